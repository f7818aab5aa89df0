"""The forward pass that differences are taken of: in double precision wherever something can run it so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

from ortgrad.check.double import in_double
from ortgrad.errors import ModelError, OrtgradError
from ortgrad.graph.loading import one_line, onnxruntime_errors
from ortgrad.graph.protos import FLOATS
from ortgrad.pipelines.prepare import prepare_loaded
from ortgrad.runtime.session import InferenceSession

ORT_ERRORS = onnxruntime_errors()
# Steps relative to the size of a value. Those of a forward pass in single precision must be large.
DOUBLE_STEPS = tuple(1e-2 / 4.0**k for k in range(10))
SINGLE_STEPS = tuple(1e-1 / 4.0**k for k in range(6))
QUICK = {DOUBLE_STEPS: DOUBLE_STEPS[5], SINGLE_STEPS: SINGLE_STEPS[2]}
# Where these are enough, no others are run.
FIRST = DOUBLE_STEPS[3:7]
SINGLE_EPS = float(np.finfo(np.float32).eps)

Arrays = dict[str, np.ndarray]


class CannotRunError(Exception):
    """Something cannot run the forward pass."""


@dataclass(frozen=True)
class Handle:
    """Where to feed a target, the value there, and how large the target is.

    What is fed for an intermediate value is added to it, so the value there is zero.
    """

    feed: str
    value: np.ndarray
    size: float
    inner: bool


@dataclass(frozen=True)
class Forward:
    """The forward model with inputs for the targets.

    `own` runs it in its own element types, `run` in the most precise ones that something can run.
    """

    name: str
    own: Callable[[Arrays], Arrays]
    run: Callable[[Arrays], Arrays]
    handles: dict[str, Handle]
    steps: tuple[float, ...]
    on_onnxruntime: bool


def make_forward(
    proto: onnx.ModelProto, feeds: Arrays, targets: Sequence[str], outputs: Sequence[str]
) -> Forward:
    """The most precise forward pass that computes what onnxruntime computes in the model's own types."""
    model, handles = _with_targets_as_inputs(proto, feeds, targets)
    initial = {**feeds, **{handle.feed: handle.value for handle in handles.values()}}
    try:
        own = _onnxruntime(model)
        expected = own(initial)
        again = own(initial)
    except CannotRunError as error:
        raise ModelError(f"the model does not run: {error}") from error
    if not all(np.array_equal(again[k], expected[k], equal_nan=True) for k in outputs):
        raise ModelError("the forward pass is random: two runs on the same inputs differ")
    double = in_double(model)
    ways = (
        ("float64 on onnxruntime", _onnxruntime),
        ("float64 on onnx.reference", _reference),
    )
    found: list[tuple[Forward, Arrays]] = []
    for name, make in ways:
        try:
            run = make(double)
            results = run(initial)
        except (CannotRunError, OrtgradError):
            continue
        way = Forward(name, own, run, handles, DOUBLE_STEPS, on_onnxruntime=make is _onnxruntime)
        if all(_agree(results[k], expected[k]) for k in outputs):
            return way
        found.append((way, results))
    if len(found) == 2 and all(_agree(found[0][1][k], found[1][1][k]) for k in outputs):
        # Two that have nothing in common but the precision: what is far off is the model in its own types.
        return found[0][0]
    # A model in double that only onnxruntime runs is precise as it is.
    wide = all(expected[k].dtype == np.float64 for k in outputs)
    name, steps = ("float64 on onnxruntime", DOUBLE_STEPS) if wide else ("single precision", SINGLE_STEPS)
    return Forward(name, own, own, handles, steps, on_onnxruntime=False)


def typed(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Arrays:
    """What the model takes of the feeds, floating-point ones in the element types it declares."""
    found = {}
    for value in model.graph.input:
        element = value.type.tensor_type.elem_type
        if value.name in feeds:
            array = feeds[value.name]
            found[value.name] = np.asarray(array).astype(numpy_type(element)) if element in FLOATS else array
    return found


def numpy_type(element: int) -> np.dtype:
    """The NumPy type of an onnx element type."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(element))


def quiet() -> onnxruntime.SessionOptions:
    """For sessions whose failures are handled here: onnxruntime need not write them to stderr."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def size_of(array: np.ndarray) -> float:
    """The size of the elements of an array, from 0.01 to 100."""
    size = float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 1.0
    return float(np.clip(size, 1e-2, 1e2)) if size > 0 and np.isfinite(size) else 1.0


def rounded_otherwise(array: np.ndarray, generator: np.random.Generator, eps: float) -> np.ndarray:
    """The array, every element off by about `eps` of its size, as another rounding would have it."""
    if array.dtype.kind not in "fV" or not array.size:
        return array
    wide = array.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.asarray(wide * (1 + eps * generator.standard_normal(array.shape)), array.dtype)


def values_of(proto: onnx.ModelProto, feeds: Arrays, names: Sequence[str]) -> Arrays:
    """Intermediate values of the model."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        session = InferenceSession(model, quiet(), kernels="onnx")
        return dict(zip(names, session.run(None, typed(model, feeds)), strict=True))
    except ORT_ERRORS as error:
        raise ModelError(f"the model does not run: {one_line(error)}") from error


def _onnxruntime(model: onnx.ModelProto) -> Callable[[Arrays], Arrays]:
    try:
        session = InferenceSession(model, quiet(), kernels="onnx")
    except ORT_ERRORS as error:
        raise CannotRunError(one_line(error)) from error
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Arrays) -> Arrays:
        try:
            return dict(zip(names, session.run(None, typed(model, feeds)), strict=True))
        except ORT_ERRORS as error:
            raise CannotRunError(one_line(error)) from error

    return run


def _reference(model: onnx.ModelProto) -> Callable[[Arrays], Arrays]:
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class LRN(OpRun):
        """onnx 1.23 normalizes as many channels as the batch has rows, and leaves the others as they are."""

        def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> tuple[np.ndarray]:
            before, after = (size - 1) // 2, size // 2
            channels = range(x.shape[1])
            sums = [np.sum(x[:, max(0, c - before) : c + after + 1] ** 2, axis=1) for c in channels]
            return (x / (bias + alpha / size * np.stack(sums, axis=1)) ** beta,)

    # The gradient operators of training models become standard ones; that may add outputs.
    prepared = prepare_loaded(model, "onnx")
    names = [output.name for output in prepared.graph.output]

    def run(feeds: Arrays) -> Arrays:
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                results = evaluator.run(None, typed(prepared, feeds))
        except Exception as error:  # a NumPy program of its own: it may raise anything
            raise CannotRunError(str(error)) from error
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}

    try:
        evaluator = ReferenceEvaluator(prepared, new_ops=[LRN])
    except Exception as error:
        raise CannotRunError(str(error)) from error
    return run


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
    """The model with an input for every target, and what to feed there."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
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
    """Add a graph input `<name>.delta` to an intermediate value."""
    nodes = list(graph.node)
    position = next(i for i, node in enumerate(nodes) if name in node.output)
    producer = nodes[position]
    producer.output[list(producer.output).index(name)] = f"{name}.before"
    nodes.insert(position + 1, helper.make_node("Add", [f"{name}.before", f"{name}.delta"], [name]))
    del graph.node[:]
    graph.node.extend(nodes)
    element = helper.np_dtype_to_tensor_dtype(dtype)
    graph.input.append(helper.make_tensor_value_info(f"{name}.delta", element, None))
