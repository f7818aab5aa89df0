"""Sizes that are inferred for ONNX's own node tests, if those of the inputs are not known."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.errors import ModelError
from ortgrad.shapes.inference import infer_types


def node_tests() -> Iterator[tuple[str, onnx.ModelProto, list[Any], list[Any]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        for test in collect_testcases(None):
            if test.model is not None and test.data_sets:
                yield test.name, test.model, *test.data_sets[0]


def forget_sizes(model: onnx.ModelProto, inputs: list[Any]) -> dict[str, int]:
    """Give every size of an input a name of its own, in place; returns the sizes by name."""
    sizes: dict[str, int] = {}
    for value, array in zip(model.graph.input, inputs, strict=False):
        dims = value.type.tensor_type.shape.dim
        if isinstance(array, np.ndarray) and len(dims) == array.ndim:
            for axis, (dim, size) in enumerate(zip(dims, array.shape, strict=True)):
                dim.dim_param = f"{value.name}_{axis}"
                sizes[dim.dim_param] = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    return sizes


def test_sizes_of_outputs() -> None:
    """A number that is inferred, or the name of a size of an input, is the size in the test."""
    checked, wrong = 0, []
    for name, source, inputs, outputs in node_tests():
        if any(value.type.WhichOneof("value") != "tensor_type" for value in source.graph.output):
            continue
        proto = onnx.ModelProto()
        proto.CopyFrom(source)
        sizes = forget_sizes(proto, inputs)
        model = ir.from_proto(proto)
        try:
            infer_types(model)
        except ModelError:
            # What onnx refuses to infer is not inferred wrongly.
            continue
        for value, array in zip(model.graph.outputs, outputs, strict=True):
            if value.shape is None or not isinstance(array, np.ndarray):
                continue
            known = [n if isinstance(n, int) else sizes.get(n.value or "") for n in value.shape]
            checked += sum(n is not None for n in known)
            fits = len(known) == array.ndim and all(
                n in (None, size) for n, size in zip(known, array.shape, strict=True)
            )
            if not fits:
                wrong.append((name, value.name, str(value.shape), array.shape))
    assert not wrong
    assert checked > 1000
