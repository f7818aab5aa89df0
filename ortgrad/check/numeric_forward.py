"""The forward pass that is differentiated numerically, in double precision where possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortgrad.check.differences import DOUBLE_STEPS, SINGLE_STEPS, Steps
from ortgrad.check.double_forms import with_double_forms
from ortgrad.check.double_precision import in_double
from ortgrad.check.drift import drift_between
from ortgrad.check.reference import on_reference
from ortgrad.check.running import CannotRunError, Run, on_onnxruntime, values_of
from ortgrad.errors import ModelError, OrtgradError
from ortgrad.graph.feeds import Arrays
from ortgrad.graph.protos import FIRST_WITH_CONSTANTS, copy_of


class Handle(NamedTuple):
    """The input through which a target is fed, its value there, and the size of the target.

    For an intermediate value, the feed is added to it, so `value` is zero.
    """

    feed: str
    value: np.ndarray
    size: float
    inner: bool


class Forward(NamedTuple):
    """The forward model with inputs for the targets.

    `own` runs it in its own element types, `run` in the most precise ones possible. `feeds` is the given
    point: the inputs of the model and the values of the targets.
    """

    name: str
    own: Run
    run: Run
    feeds: Arrays
    handles: dict[str, Handle]
    steps: Steps
    on_onnxruntime: bool
    # Returns how far intermediate values in the model's own types are from those in double.
    drift: Callable[[Arrays], float] = lambda feeds: 0.0

    @property
    def single(self) -> bool:
        """Whether `run` computes in single precision."""
        return self.steps.single


def make_forward(
    proto: onnx.ModelProto, feeds: Arrays, targets: Sequence[str], outputs: Sequence[str]
) -> Forward:
    """Return the most precise forward pass that agrees with onnxruntime in the model's own types."""
    model, handles = _with_targets_as_inputs(proto, feeds, targets)
    initial = {**feeds, **{handle.feed: handle.value for handle in handles.values()}}
    try:
        own = on_onnxruntime(model)
        expected = own(initial)
        again = own(initial)
    except CannotRunError as error:
        raise ModelError(f"the model does not run: {error}") from error
    if not all(np.array_equal(again[k], expected[k], equal_nan=True) for k in outputs):
        raise ModelError("the forward pass is random: two runs on the same inputs differ")

    def on_double_forms(double: onnx.ModelProto) -> Run:
        return on_onnxruntime(with_double_forms(double))

    double = in_double(model)
    found: list[tuple[Forward, Arrays]] = []
    for name, make in (("onnxruntime", on_double_forms), ("onnx.reference", on_reference)):
        try:
            run = make(double)
            results = run(initial)
        except (CannotRunError, OrtgradError):
            continue
        way = Forward(
            f"float64 on {name}",
            own,
            run,
            initial,
            handles,
            DOUBLE_STEPS,
            make is on_double_forms,
            partial(drift_between, model, double, make),
        )
        if all(_agree(results[k], expected[k]) for k in outputs):
            return way
        found.append((way, results))
    if len(found) == 2 and all(_agree(found[0][1][k], found[1][1][k]) for k in outputs):
        # Two independent implementations agree in double, so the model is inaccurate in its own types.
        return found[0][0]
    # A model that is already in double is precise in its own types.
    wide = all(expected[k].dtype == np.float64 for k in outputs)
    name, steps = ("float64 on onnxruntime", DOUBLE_STEPS) if wide else ("single precision", SINGLE_STEPS)
    return Forward(name, own, own, initial, handles, steps, on_onnxruntime=False)


def size_of(array: np.ndarray) -> float:
    """Return the root mean square of an array, clipped to 0.01 and 100."""
    size = float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 1.0
    return float(np.clip(size, 1e-2, 1e2)) if size > 0 and np.isfinite(size) else 1.0


def _agree(actual: np.ndarray, expected: np.ndarray) -> bool:
    if actual.shape != expected.shape:
        return False
    if not actual.size:
        return True
    eps = float(np.finfo(expected.dtype).eps) if expected.dtype.kind == "f" else 1e-2
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    scale = float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected)))
    return bool(np.allclose(actual, expected, rtol=0, atol=max(1e4 * eps * scale, 1e-6), equal_nan=True))


def _with_targets_as_inputs(
    proto: onnx.ModelProto, feeds: Arrays, targets: Sequence[str]
) -> tuple[onnx.ModelProto, dict[str, Handle]]:
    """Return the model with an input for every target, and the handles of the targets."""
    model = copy_of(proto)
    model.ir_version = max(model.ir_version, FIRST_WITH_CONSTANTS)
    graph = model.graph
    inputs = {value.name for value in graph.input}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    inner = [name for name in targets if name not in inputs and name not in initializers]
    found = values_of(proto, feeds, inner) if inner else {}
    handles = {}
    for name in targets:
        if name in inner:
            zeros = np.zeros_like(found[name])
            handles[name] = Handle(f"{name}.delta", zeros, size_of(found[name]), inner=True)
            _let_move(graph, name, found[name].dtype)
            continue
        value = feeds[name] if name in feeds else numpy_helper.to_array(initializers[name])
        handles[name] = Handle(name, value, size_of(value), inner=False)
        if name not in inputs:
            graph.input.append(helper.make_tensor_value_info(name, initializers[name].data_type, value.shape))
    return model, handles


def _let_move(graph: onnx.GraphProto, name: str, dtype: np.dtype) -> None:
    """Add a new graph input `<name>.delta` to an intermediate value."""
    nodes = list(graph.node)
    position = next(i for i, node in enumerate(nodes) if name in node.output)
    producer = nodes[position]
    producer.output[list(producer.output).index(name)] = f"{name}.before"
    nodes.insert(position + 1, helper.make_node("Add", [f"{name}.before", f"{name}.delta"], [name]))
    del graph.node[:]
    graph.node.extend(nodes)
    element = helper.np_dtype_to_tensor_dtype(dtype)
    graph.input.append(helper.make_tensor_value_info(f"{name}.delta", element, None))
