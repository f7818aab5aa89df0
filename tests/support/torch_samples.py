"""Samples of PyTorch's own operator and module tests, exported, with the gradients of PyTorch.

Import this in a process of its own: PyTorch's test utilities change settings of hypothesis and of torch.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

try:
    import expecttest  # noqa: F401
except ModuleNotFoundError:
    # PyTorch's test utilities derive a class from it, which is not used here.
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

from support.exporters import keep_tables

KINDS = ("operators", "modules", "training modules")
EXPORTERS = ("script", "dynamo")
# Their backward functions ignore the gradients of the statistics, which are further outputs.
FIRST_OUTPUT_ONLY = ("native_batch_norm", "native_group_norm", "native_layer_norm")
# PyTorch gives the gradient of an element to all that is written to it, and calls that incorrect; there are
# variants of the tests named "grad", without repeated indices.
REPEATED_INDICES = tuple(f"nn.functional.max_unpool{n}d" for n in (1, 2, 3))


class NoSampleError(Exception):
    """There is nothing to export; the text says why."""


class ExporterError(Exception):
    """PyTorch does not export the sample."""


@dataclass(frozen=True)
class Sample:
    """One sample of an entry: the last one is number 0, since first ones are often scalars."""

    kind: str
    entry: int
    number: int
    exporter: str

    @property
    def name(self) -> str:
        found = op_db[self.entry] if self.kind == "operators" else module_db[self.entry]
        variant = getattr(found, "variant_test_name", "")
        name = f"{found.name}.{variant}" if variant else found.name
        return f"{self.kind}-{name}-{self.exporter}-{self.number}".replace(" ", "_")


def samples(kinds: Sequence[str], exporters: Sequence[str], count: int) -> list[Sample]:
    """Return `count` samples of each entry."""
    sizes = {kind: len(op_db if kind == "operators" else module_db) for kind in kinds}
    return [
        Sample(kind, entry, number, exporter)
        for number in range(count)
        for exporter in exporters
        for kind in kinds
        for entry in range(sizes[kind])
    ]


class Call(torch.nn.Module):
    """The call of a sample, with all its tensors as inputs; returns the outputs that have a gradient."""

    def __init__(self, function: Callable[..., Any], args: Any, process: Callable[..., Any] | None) -> None:
        super().__init__()
        self.function, self.process = function, process
        leaves, self.spec = pytree.tree_flatten(args)
        self.leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.kept: list[int] | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.function(*args, **kwargs)
        result = result if self.process is None else self.process(result)
        found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return tuple(found if self.kept is None else [found[i] for i in self.kept])


def export(sample: Sample, folder: Path) -> None:
    """Write `<name>.onnx`, and `<name>.npz` with inputs, outputs, seeds and gradients."""
    call = _call(sample)
    inputs = [call.leaves[i].detach().clone() for i in call.places]
    try:
        data = _reference(call, inputs, sample.name)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise NoSampleError(f"PyTorch itself fails: {error}") from error
    names = [f"i{i}" for i in range(len(inputs))]
    path = folder / f"{sample.name}.onnx"
    options: dict[str, Any] = {"dynamo": True}
    if sample.exporter == "script":
        # Folding renames weights.
        folding = sample.kind == "operators"
        mode = torch.onnx.TrainingMode.PRESERVE
        options = {"dynamo": False, "training": mode, "do_constant_folding": folding}
    sink = io.StringIO()
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        try:
            torch.onnx.export(
                call,
                tuple(inputs),
                str(path),
                input_names=names,
                output_names=[name[4:] for name in data if name.startswith("out:")],
                external_data=False,
                verbose=False,
                **options,
            )
        except Exception as error:  # exporters raise whatever fails in them
            path.unlink(missing_ok=True)
            raise ExporterError(f"{type(error).__name__}: {error}") from error
    np.savez(path.with_suffix(".npz"), **data)


def _call(sample: Sample) -> Call:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": True}
    if sample.kind == "operators":
        info = op_db[sample.entry]
        if not info.supports_autograd or torch.float32 not in info.dtypes:
            raise NoSampleError("no gradient in float32")
        if info.name in REPEATED_INDICES and info.variant_test_name != "grad":
            raise NoSampleError("repeated indices")
        given = _pick(list(info.sample_inputs(**options)), sample.number)
        if info.name == "addmm" and given.args[0].numel() == 0:
            raise NoSampleError("onnxruntime's Gemm ignores beta where the inner dimension is 0")
        return Call(
            info.get_op(), ((given.input, *given.args), given.kwargs), given.output_process_fn_grad
        ).requires_grad_(False)
    info, training = module_db[sample.entry], sample.kind == "training modules"
    found = info.module_inputs_func(info, training=training, **options)
    given = _pick([each for each in found if each.forward_input is not None], sample.number)
    made, fed = given.constructor_input, given.forward_input
    module = info.module_cls(*made.args, **made.kwargs).train(training)
    _distinguish(module)
    return Call(module, (fed.args, fed.kwargs), None)


def _pick(found: list[Any], number: int, count: int = 4) -> Any:
    """Return one of four samples that are spread over those that there are."""
    last = len(found) - 1
    spread = sorted({round(i * last / (count - 1)) for i in range(count)} if found else [], reverse=True)
    if number >= len(spread):
        raise NoSampleError("fewer samples")
    return found[spread[number]]


def _distinguish(module: torch.nn.Module) -> None:
    """Change weights that are equal, which the exporters merge."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            lazy = isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
            if tensor.is_floating_point() and not lazy:
                tensor += torch.rand(tensor.shape, generator=generator) * 0.3


def _reference(call: Call, inputs: Sequence[torch.Tensor], name: str) -> dict[str, np.ndarray]:
    """Return inputs, and outputs, seeds and gradients in float32 and float64, by names with a prefix."""
    results = call(*_leaves(inputs, torch.float32))
    call.kept = [i for i, y in enumerate(results) if y.requires_grad and y.is_floating_point()]
    if any(f"-{each}-" in name for each in FIRST_OUTPUT_ONLY):
        call.kept = call.kept[:1]
    if not call.kept or not (any(x.is_floating_point() for x in inputs) or list(call.parameters())):
        raise NoSampleError("nothing that requires a gradient")
    kept = [results[i] for i in call.kept]
    generator = torch.Generator().manual_seed(3)
    # A single scalar is seeded with 1 inside of a built model.
    scalar = len(kept) == 1 and kept[0].ndim == 0
    seeds = [torch.ones(()) if scalar else torch.randn(y.shape, generator=generator) for y in kept]
    data = {f"in:i{i}": x.numpy() for i, x in enumerate(inputs)}
    targets = [f"i{i}" for i, x in enumerate(inputs) if x.is_floating_point()]
    targets += [each for each, _ in call.named_parameters()]
    for dtype, suffix in ((torch.float32, ""), (torch.float64, "64")):
        copied = call if dtype == torch.float32 else copy.deepcopy(call).to(dtype)
        leaves = _leaves(inputs, dtype)
        outputs = copied(*leaves)
        wrt = [x for x in leaves if x.is_floating_point()] + list(copied.parameters())
        found = torch.autograd.grad(
            outputs, wrt, [s.to(y.dtype) for s, y in zip(seeds, outputs, strict=True)], allow_unused=True
        )
        for i, y in enumerate(outputs):
            data[f"out{suffix}:o{i}"] = _array(y)
        for target, leaf, grad in zip(targets, wrt, found, strict=True):
            data[f"grad{suffix}:{target}"] = _array(torch.zeros_like(leaf) if grad is None else grad)
    for i, (seed, y) in enumerate(zip(seeds, kept, strict=True)):
        data[f"seed:o{i}"] = _array(seed.to(y.dtype))
    return data


def _leaves(inputs: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x.to(dtype, copy=True).requires_grad_() if x.is_floating_point() else x.clone() for x in inputs]


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        raise NoSampleError("NumPy has no bfloat16")
    return tensor.detach().numpy()


def quiet() -> None:
    """Turn off what the exporters say, and keep the tables that one of them makes for every export."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    keep_tables()
