"""Every operator of ONNX that may have a gradient is differentiated, stops it, or is listed with a reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from support import ROOT
from support.differences import differences

import ortgrad
from ortgrad.autodiff.rules import all_rules

GENERATOR = ROOT / "docs" / "generate.py"


def newest() -> Iterator[Any]:
    """The newest schemas of ONNX and of ai.onnx.ml that are not deprecated."""
    found: dict[tuple[str, str], Any] = {}
    for schema in onnx.defs.get_all_schemas():
        if schema.domain in ("", "ai.onnx.ml"):
            found[schema.domain, schema.name] = schema
    yield from (schema for schema in found.values() if not schema.deprecated)


def floating(parameters: Any) -> bool:
    return any("float" in kind or "double" in kind for p in parameters for kind in p.types)


def table() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.NOT_DIFFERENTIATED)


def test_every_operator_is_accounted_for() -> None:
    rules, listed = all_rules(), table()
    unknown, stale = [], set(listed)
    for schema in newest():
        name = f"{schema.domain}::{schema.name}" if schema.domain else schema.name
        if not (floating(schema.inputs) and floating(schema.outputs)):
            continue
        if (schema.domain, schema.name) in rules:
            continue
        if schema.has_function or schema.has_context_dependent_function:
            continue
        stale.discard(name)
        if name not in listed:
            unknown.append(name)
    assert not unknown
    assert not stale, "listed as not differentiated, but they are"


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


# Newer than what onnxruntime loads.
BODIES: dict[str, tuple[list[np.ndarray], dict[str, Any], int, int]] = {
    "SwiGLU": ([values(2, 3), values(2, 3) + 1], {}, 28, 1),
    "CausalConvWithState": ([values(1, 2, 5), values(2, 1, 3), values(2)], {}, 27, 2),
    "LinearAttention": (
        [values(1, 3, 4), values(1, 3, 4), values(1, 3, 2)],
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "linear"},
        27,
        2,
    ),
}


@pytest.mark.parametrize("op_type", BODIES)
def test_new_operators_are_opened(op_type: str) -> None:
    inputs, attributes, opset, outputs = BODIES[op_type]
    if onnx.defs.onnx_opset_version() < opset:
        pytest.skip(f"this onnx has no opset {opset}")
    names = list("abc"[: len(inputs)])
    node = helper.make_node(op_type, names, list("yz"[:outputs]), name="node", **attributes)
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(n, 1, a.shape) for n, a in zip(names, inputs, strict=True)],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    feeds = dict(zip(names, inputs, strict=True))
    forward = ReferenceEvaluator(model)
    seed = values(*forward.run(["y"], feeds)[0].shape)
    built = ortgrad.prepare(ortgrad.build_gradient_model(model, wrt=names), kernels="onnx")
    # What is left are operators that an older opset has as well.
    next(o for o in built.opset_import if o.domain == "").version = 24
    session = onnxruntime.InferenceSession(built.SerializeToString())
    found = session.run([f"{name}_grad" for name in names], {**feeds, "y_grad": seed})
    for name, grad in zip(names, found, strict=True):
        # The step suits float32, in which they compute; all but SwiGLU are linear in each operand.
        numeric = differences(
            lambda x, name=name: float(
                np.sum(seed * forward.run(["y"], {**feeds, name: x.astype(np.float32)})[0])
            ),
            feeds[name].astype(np.float64),
            1e-2,
        )
        np.testing.assert_allclose(grad, numeric, rtol=1e-3, atol=1e-4)
