"""Compare built gradients with central differences of the forward model, along random directions."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state
from onnx import TensorProto, helper, numpy_helper

from ortgrad.differentiate import build_gradient_model, names_of
from ortgrad.double import in_double
from ortgrad.errors import ModelError, OrtgradError, WrongGradientError
from ortgrad.models import ModelLike, load_model, one_line
from ortgrad.prepare import Kernels, prepare_loaded
from ortgrad.schemas import schemas_known
from ortgrad.session import InferenceSession

# How far a gradient of this element type may be from the differences, relative to its size.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
COARSE_TOLERANCE = 3e-2  # float16, or a forward pass in single precision
# Steps relative to the size of the value, the most promising first.
DOUBLE_STEPS = (1e-4, 1e-5, 1e-6, 1e-3, 1e-2)
SINGLE_STEPS = (1e-2, 3e-3, 1e-3, 3e-2)
LARGEST_INPUT = 1 << 30  # elements
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
ORT_ERRORS: tuple[type[Exception], ...] = tuple(
    e for e in vars(ort_state).values() if isinstance(e, type) and issubclass(e, Exception)
)

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One gradient, or one node: the worst error of all directions, relative to the gradient's size."""

    name: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class GradientCheck:
    """What `check_gradients` found. `forward` says what ran the forward pass."""

    rows: tuple[Row, ...]
    forward: str
    nodes: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all gradients agree, and all nodes if they were asked for."""
        return all(row.ok for row in (*self.rows, *self.nodes))

    def raise_if_wrong(self) -> None:
        """Raise WrongGradientError with the table, unless all is well."""
        if not self.ok:
            raise WrongGradientError(f"gradients disagree with central differences\n{self}")

    def __str__(self) -> str:
        rows = (*self.rows, *self.nodes)
        width = max(len(row.name) for row in rows)
        lines = [f"forward pass: {self.forward}"]
        for row in rows:
            verdict = "ok   " if row.ok else "WRONG"
            line = f"{row.name:<{width}}  {verdict}  error {row.error:.1e}, allowed {row.tolerance:.0e}"
            lines.append(f"{line}  {row.note}".rstrip())
        return "\n".join(lines)


@contextmanager
def _running() -> Iterator[None]:
    """Have what onnxruntime says of a model that does not run be a ModelError."""
    try:
        yield
    except OrtgradError:
        raise
    except FAILURES as error:
        raise ModelError(f"the model does not run: {one_line(error)}") from error


@_running()
def check_gradients(
    model: ModelLike,
    feeds: Mapping[str, np.ndarray] | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    kernels: Kernels = "auto",
    directions: int = 3,
    tolerance: float | None = None,
    per_node: bool = False,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> GradientCheck:
    """Compare the gradients of a model with central differences of its forward pass in float64.

    Inputs that `feeds` leaves out are drawn at random: symbolic dimensions get small sizes, whole
    numbers are 0 or 1. `wrt` defaults to every floating-point input and initializer that a gradient
    can flow to, `of` to every floating-point output. The forward pass runs on onnxruntime where it
    has double kernels, else on onnx's reference implementation, else in single precision with a
    looser tolerance; the result says which. With `per_node`, every node between `wrt` and `of` is
    checked by itself too, on the values it meets in the model. `progress(done, total, name)` is
    called after every gradient and node.

    Differences mean nothing at a kink: do not feed 0 to Relu or equal values to Max.
    """
    proto = load_model(model)
    generator = np.random.default_rng(seed)
    targets, outputs = names_of(wrt), names_of(of)
    if targets is None:
        targets = _differentiable(proto)
    if outputs is None:
        outputs = [o.name for o in proto.graph.output if o.type.tensor_type.elem_type in FLOATS]
    if not (targets and outputs):
        raise ModelError("there is no floating-point input, or no floating-point output, to check")
    built = build_gradient_model(proto, wrt=targets, of=outputs)
    complete = _complete_feeds(proto, feeds or {}, outputs, generator)
    forward = _forward(proto, complete, targets, outputs)
    known = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    seeds = [value.name for value in built.graph.input if value.name not in known]
    weights = {
        name: generator.standard_normal(forward.base[name].shape) if seeds else np.ones(())
        for name in outputs
    }
    # A single scalar is seeded inside the model.
    fed = dict(zip(seeds, weights.values(), strict=bool(seeds)))
    gradients = _gradients(built, {**complete, **fed}, targets, kernels)
    nodes = _nodes_between(proto, targets, outputs) if per_node else []
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        if progress is not None:
            progress(len(rows), len(targets) + len(nodes), row.name)

    for name, grad in zip(targets, gradients, strict=True):
        allowed = forward.tolerance(grad) if tolerance is None else tolerance
        errors = [
            forward.error(name, grad, weights, generator.standard_normal(grad.shape), allowed)
            for _ in range(directions)
        ]
        add(Row(name, float(np.max(errors)), allowed))
    alone = partial(check_gradients, kernels=kernels, directions=directions, tolerance=tolerance, seed=seed)
    values = _intermediates(proto, complete) if nodes else {}
    for node in nodes:
        add(_check_node(node, proto, values, generator, alone))
    return GradientCheck(tuple(rows[: len(targets)]), forward.name, tuple(rows[len(targets) :]))


def _gradients(
    built: onnx.ModelProto, feeds: Arrays, targets: Sequence[str], kernels: Kernels
) -> list[np.ndarray]:
    session = InferenceSession(built, kernels=kernels)
    results = session.run(None, _typed(built, feeds))
    return [np.asarray(result) for result in results[-len(targets) :]]


def _typed(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """What the model takes of the feeds, floating-point ones in the element types it declares."""
    typed = {}
    for value in model.graph.input:
        element = value.type.tensor_type.elem_type
        if value.name in feeds:
            array = feeds[value.name]
            typed[value.name] = array.astype(_numpy_type(element)) if element in FLOATS else array
    return typed


def _numpy_type(element: int) -> np.dtype:
    return np.dtype(helper.tensor_dtype_to_np_dtype(element))


# The forward pass


@dataclass(frozen=True)
class _Handle:
    """Where to feed a target, the value there, and how large the target is.

    What is fed for an intermediate value is added to it, so the value there is zero.
    """

    feed: str
    value: np.ndarray
    size: float


@dataclass(frozen=True)
class _Forward:
    """The forward model with inputs for `wrt`, run by something precise enough for differences."""

    name: str
    run: Callable[[Arrays], Arrays]
    feeds: Arrays
    base: Arrays
    handles: dict[str, _Handle]
    steps: Sequence[float]

    def tolerance(self, grad: np.ndarray) -> float:
        fine = TOLERANCES.get(grad.dtype.name) if self.steps is DOUBLE_STEPS else None
        return COARSE_TOLERANCE if fine is None else fine

    def error(
        self, name: str, grad: np.ndarray, weights: Arrays, direction: np.ndarray, allowed: float
    ) -> float:
        """How far the slope along a direction is from the differences, for the step that fits best."""
        if not np.isfinite(grad).all():
            return np.inf
        handle = self.handles[name]
        # Below this there is only rounding, of the gradient and of the differences.
        noise = 1e-3 if grad.dtype != np.float64 else 1e-7
        total = sum(float(np.sum(np.abs(w * self.base[k]))) for k, w in weights.items())
        grad = grad.astype(np.float64)
        scale = max(float(np.linalg.norm(grad)), noise * total / handle.size, 1e-30)
        slope = float(np.sum(grad * direction))
        best = np.inf
        estimates: dict[float, float] = {}
        for step in self.steps:
            fine = estimates[step] = self._difference(handle, direction, step * handle.size, weights)
            coarse = estimates.get(step * 10)
            found = [fine] if coarse is None else [fine, (100 * fine - coarse) / 99]
            if not np.isfinite(found).all():
                return np.inf
            best = min(best, *(abs(slope - e) / max(scale, abs(e)) for e in found))
            if best <= allowed / 10:
                break
        return float(best)

    def _difference(self, handle: _Handle, direction: np.ndarray, step: float, weights: Arrays) -> float:
        value = self.feeds[handle.feed]
        ahead, behind = (
            self.run({**self.feeds, handle.feed: np.asarray(value + signed * direction, value.dtype)})
            for signed in (step, -step)
        )
        return sum(
            float(np.sum(w * (ahead[k].astype(np.float64) - behind[k].astype(np.float64))))
            for k, w in weights.items()
        ) / (2 * step)


def _forward(
    proto: onnx.ModelProto, feeds: Arrays, targets: Sequence[str], outputs: Sequence[str]
) -> _Forward:
    """The most precise forward pass that computes what onnxruntime computes in the model's own types."""
    model, handles = _with_targets_as_inputs(proto, feeds, targets)
    initial = {**feeds, **{handle.feed: handle.value for handle in handles.values()}}
    try:
        single = _onnxruntime(model)
        expected = single(initial)
    except _CannotRunError as error:
        raise ModelError(f"the model does not run: {error}") from error
    ways = (
        ("float64 on onnxruntime", _onnxruntime),
        ("float64 on onnx.reference", _reference),
    )
    double = in_double(model)
    name, run, typed, base = "single precision", single, _typed(model, initial), expected
    for way, make in ways:
        try:
            candidate, widened = make(double), _typed(double, initial)
            found = candidate(widened)
        except (_CannotRunError, OrtgradError):
            continue
        if all(_agree(found[k], expected[k]) for k in outputs):
            name, run, typed, base = way, candidate, widened, found
            break
    again = run(typed)
    if not all(np.array_equal(again[k], base[k], equal_nan=True) for k in outputs):
        raise ModelError("the forward pass is random: two runs on the same inputs differ")
    return _Forward(name, run, typed, base, handles, SINGLE_STEPS if run is single else DOUBLE_STEPS)


class _CannotRunError(Exception):
    """Something cannot run the forward pass."""


FAILURES: tuple[type[Exception], ...] = (_CannotRunError, OrtgradError, *ORT_ERRORS)


def _quiet() -> onnxruntime.SessionOptions:
    """For sessions whose failures are handled here: onnxruntime need not write them to stderr."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def _onnxruntime(model: onnx.ModelProto) -> Callable[[Arrays], Arrays]:
    try:
        session = InferenceSession(model, _quiet(), kernels="onnx")
    except ORT_ERRORS as error:
        raise _CannotRunError(str(error)) from error
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Arrays) -> Arrays:
        try:
            return dict(zip(names, session.run(None, _typed(model, feeds)), strict=True))
        except ORT_ERRORS as error:
            raise _CannotRunError(str(error)) from error

    return run


def _reference(model: onnx.ModelProto) -> Callable[[Arrays], Arrays]:
    from onnx.reference import ReferenceEvaluator

    names = [output.name for output in model.graph.output]

    def run(feeds: Arrays) -> Arrays:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = evaluator.run(None, feeds)
        return {name: np.asarray(result) for name, result in zip(names, results, strict=True)}

    def guarded(feeds: Arrays) -> Arrays:
        try:
            return run(feeds)
        except Exception as error:  # a NumPy program of its own: it may raise anything
            raise _CannotRunError(str(error)) from error

    try:
        evaluator = ReferenceEvaluator(prepare_loaded(model, "onnx"))
    except Exception as error:
        raise _CannotRunError(str(error)) from error
    return guarded


def _agree(actual: np.ndarray, expected: np.ndarray) -> bool:
    if actual.shape != expected.shape:
        return False
    if not actual.size:
        return True
    eps = float(np.finfo(expected.dtype).eps) if expected.dtype.kind == "f" else 1e-2
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    scale = float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected)))
    return bool(np.allclose(actual, expected, rtol=0, atol=max(1e4 * eps * scale, 1e-6), equal_nan=True))


def _size(array: np.ndarray) -> float:
    size = float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 1.0
    return float(np.clip(size, 1e-2, 1e2)) if size > 0 and np.isfinite(size) else 1.0


def _with_targets_as_inputs(
    proto: onnx.ModelProto, feeds: Arrays, targets: Sequence[str]
) -> tuple[onnx.ModelProto, dict[str, _Handle]]:
    """The model with an input for every target, and what to feed there."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    graph = model.graph
    inputs = {value.name for value in graph.input}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    inner = [name for name in targets if name not in inputs and name not in initializers]
    found = _values(proto, feeds, inner) if inner else {}
    handles = {}
    for name in targets:
        if name in inner:
            handles[name] = _Handle(f"{name}.delta", np.zeros_like(found[name]), _size(found[name]))
            _let_move(graph, name, found[name].dtype)
            continue
        value = feeds[name] if name in feeds else numpy_helper.to_array(initializers[name])
        handles[name] = _Handle(name, value, _size(value))
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


def _values(proto: onnx.ModelProto, feeds: Arrays, names: Sequence[str]) -> Arrays:
    """Intermediate values of the model."""
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = InferenceSession(model, kernels="onnx")
    return dict(zip(names, session.run(None, _typed(model, feeds)), strict=True))


# Feeds


def _complete_feeds(
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    generator: np.random.Generator,
) -> Arrays:
    """The feeds with random ones for what is left out, such that the model runs and stays finite."""
    given = {name: np.asarray(array) for name, array in feeds.items()}
    unknown = sorted(set(given) - {value.name for value in proto.graph.input})
    if unknown:
        raise ModelError(f"the model has no input {unknown[0]!r} to feed")
    for value in proto.graph.input:
        if value.name in given and value.type.tensor_type.elem_type in FLOATS:
            dtype = given[value.name].dtype
            if not (np.issubdtype(dtype, np.number) or dtype.name in ("bool", "bfloat16")):
                raise ModelError(f"input {value.name!r} takes numbers, not {dtype}")
    defaults = {tensor.name for tensor in proto.graph.initializer}
    missing = [v for v in proto.graph.input if v.name not in given and v.name not in defaults]
    if not missing:
        return given
    session = InferenceSession(proto, _quiet(), kernels="onnx")
    reason = "its outputs are not finite"
    # Equal sizes for models whose names of dimensions do not say which must agree.
    for spread, distinct in itertools.product(DISTRIBUTIONS, (True, False)):
        drawn = _draw(missing, _sizes(proto, given), spread, distinct, generator)
        try:
            results = session.run(list(outputs), _typed(proto, {**given, **drawn}))
        except ORT_ERRORS as error:
            reason = " ".join(str(error).split())
            continue
        if all(np.isfinite(np.asarray(result)).all() for result in results):
            return {**given, **drawn}
    raise ModelError(f"the model does not run on random inputs ({reason}); give feeds")


DISTRIBUTIONS: Sequence[Callable[[np.random.Generator, Sequence[int]], np.ndarray]] = (
    lambda generator, shape: generator.standard_normal(shape),
    lambda generator, shape: generator.uniform(0.2, 0.8, shape),
    lambda generator, shape: generator.uniform(1.2, 2.0, shape),
)


def _sizes(proto: onnx.ModelProto, given: Arrays) -> dict[str, int]:
    """What the given feeds say about symbolic dimensions."""
    return {
        dim.dim_param: size
        for value in proto.graph.input
        if value.name in given
        for dim, size in zip(value.type.tensor_type.shape.dim, given[value.name].shape, strict=False)
        if dim.dim_param
    }


def _draw(
    missing: Iterable[onnx.ValueInfoProto],
    sizes: dict[str, int],
    spread: Callable[[np.random.Generator, Sequence[int]], np.ndarray],
    distinct: bool,
    generator: np.random.Generator,
) -> Arrays:
    drawn = {}
    for value in missing:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            raise ModelError(f"input {value.name!r} has no shape: feed it")
        shape = []
        for dim in tensor.shape.dim:
            size = sizes.setdefault(dim.dim_param, 2 + len(sizes) if distinct else 2)
            shape.append(dim.dim_value if dim.HasField("dim_value") else size)
        if min(shape, default=0) < 0 or math.prod(shape) > LARGEST_INPUT:
            raise ModelError(f"input {value.name!r} has shape {shape}, too large to be drawn: feed it")
        if tensor.elem_type in FLOATS:
            drawn[value.name] = spread(generator, shape)
        elif tensor.elem_type == TensorProto.STRING:
            raise ModelError(f"input {value.name!r} holds strings: feed it")
        else:
            drawn[value.name] = generator.integers(0, 2, shape).astype(_numpy_type(tensor.elem_type))
    return drawn


# Which names


def _differentiable(proto: onnx.ModelProto) -> list[str]:
    """Floating-point inputs and initializers that some node takes as something to differentiate."""
    elements = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    elements |= {value.name: value.type.tensor_type.elem_type for value in proto.graph.input}
    used = set()
    for node in proto.graph.node:
        fixed = _not_differentiable(node, proto)
        used |= {name for name in node.input if name not in fixed} | set(_captured(node))
    return [name for name, element in elements.items() if element in FLOATS and name in used]


def _not_differentiable(node: onnx.NodeProto, proto: onnx.ModelProto) -> set[str]:
    """The inputs of a node that its schema declares to have no gradient: scales, axes, ratios."""
    version = next((o.version for o in proto.opset_import if o.domain == node.domain), 1)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return set()
    parameters = onnx.defs.get_schema(node.op_type, version, node.domain).inputs
    never = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    last = len(parameters) - 1
    categories = [
        (name, parameters[min(i, last)].differentiation_category) for i, name in enumerate(node.input)
    ]
    return {name for name, c in categories if c == never} - {name for name, c in categories if c != never}


def _captured(node: onnx.NodeProto) -> list[str]:
    """What the subgraphs of a node read from outside."""
    found: dict[str, None] = {}
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                found.update((name, None) for name in _reads(inner) if name and name not in own)
                own.update(inner.output)
            found.update((value.name, None) for value in graph.output if value.name not in own)
    return list(found)


def _reads(node: onnx.NodeProto) -> list[str]:
    return list(dict.fromkeys([name for name in node.input if name] + _captured(node)))


# Node by node


@dataclass(frozen=True)
class _PathNode:
    node: onnx.NodeProto
    wrt: list[str]
    of: list[str]


def _nodes_between(proto: onnx.ModelProto, targets: Sequence[str], outputs: Sequence[str]) -> list[_PathNode]:
    """The nodes of the main graph through which a gradient flows."""
    with schemas_known():
        inferred = onnx.shape_inference.infer_shapes(proto)
    typed = (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info)
    other = {v.name for v in typed if v.type.tensor_type.elem_type not in FLOATS}
    active, needed = set(targets), set(outputs)
    for node in proto.graph.node:
        if active.intersection(_reads(node)):
            active.update(name for name in node.output if name and name not in other)
    found = []
    for node in reversed(proto.graph.node):
        of = [name for name in node.output if name in needed and name in active]
        fixed = _not_differentiable(node, proto)
        wrt = [name for name in _reads(node) if name in active and name not in fixed]
        if of and wrt:
            found.append(_PathNode(node, wrt, of))
            needed.update(wrt)
    return found[::-1]


def _intermediates(proto: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Every value of the main graph."""
    produced = [name for node in proto.graph.node for name in node.output if name]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    return {**weights, **_typed(proto, feeds), **_values(proto, feeds, produced)}


def _check_node(
    item: _PathNode,
    proto: onnx.ModelProto,
    values: Arrays,
    generator: np.random.Generator,
    check: Callable[..., GradientCheck],
) -> Row:
    """Check one node as a model of its own, on the values that it meets."""
    node = item.node
    name = f"{node.op_type} {node.name or node.output[0]}"
    reads = _reads(node)
    if not all(isinstance(values[k], np.ndarray) for k in (*reads, *item.of)):
        return Row(name, 0.0, 0.0, "not checked by itself: it does not work on tensors alone")
    model = _model_of(item, proto, values)
    feeds = {value.name: values[value.name] for value in model.graph.input}
    moved = {k: _off_kinks(v, generator) if k in item.wrt else v for k, v in feeds.items()}
    row = Row(name, np.inf, 0.0)
    for where in (feeds, moved):
        try:
            result = check(model, where, wrt=item.wrt, of=item.of)
        except FAILURES as error:
            return replace(row, note=str(error))
        worst = max(result.rows, key=lambda r: r.error)
        row = Row(name, worst.error, worst.tolerance, "" if worst.ok else f"towards {worst.name!r}")
        if row.ok:
            break
    return row


def _off_kinks(array: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A little more than the values: zeros behind a Relu and equal values are kinks for the next node."""
    moved = array + _size(array) * (0.01 + 0.02 * np.abs(generator.standard_normal(array.shape)))
    return moved.astype(array.dtype)


def _model_of(item: _PathNode, proto: onnx.ModelProto, values: Arrays) -> onnx.ModelProto:
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = numpy_helper.from_array(values[node.output[0]], node.output[0])
    declared = {value.name for value in proto.graph.input}
    reads = _reads(item.node)
    fixed = [k for k in reads if k in constants and k not in item.wrt and k not in declared]
    graph = helper.make_graph(
        [item.node],
        "node",
        [_info(k, values[k]) for k in reads if k not in fixed],
        [_info(k, values[k]) for k in item.node.output if k],
        [constants[k] for k in fixed],
    )
    return helper.make_model(
        graph, opset_imports=proto.opset_import, ir_version=proto.ir_version, functions=proto.functions
    )


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
