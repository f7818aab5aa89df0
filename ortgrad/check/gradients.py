"""Compare built gradients with central differences of the forward model, along random directions."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortgrad.check.differences import Derivative, central_difference, derivative
from ortgrad.check.double import in_double
from ortgrad.check.forward import (
    FIRST,
    ORT_ERRORS,
    QUICK,
    SINGLE_EPS,
    SINGLE_STEPS,
    Arrays,
    CannotRunError,
    Forward,
    make_forward,
    numpy_type,
    quiet,
    rounded_otherwise,
    size_of,
    typed,
    values_of,
)
from ortgrad.check.randomness import describe, training_switches, with_fixed_draws, with_marked_draws
from ortgrad.errors import ModelError, OrtgradError, StoppedGradientWarning, WrongGradientError
from ortgrad.graph.loading import ModelLike, load_model, one_line
from ortgrad.graph.metadata import names_in
from ortgrad.graph.protos import FLOATS
from ortgrad.operators.declaration import find_operator
from ortgrad.operators.schema import with_schemas
from ortgrad.pipelines.build import build_gradient_model, names_of
from ortgrad.pipelines.prepare import Kernels
from ortgrad.runtime.session import InferenceSession

# How far a gradient of this element type may be from the differences, relative to its size, without
# further questions. What is farther off is compared with the rounding that is measured.
TOLERANCES = {"float64": 1e-6, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
COARSE_TOLERANCE = 1e-3  # where the forward pass is in single precision
# Rounding that would hide an error of this size leaves nothing to judge.
LARGEST_NOISE = 0.1
NOISE_RUNS = 3
SAFETY = 5.0
POINTS = 4  # that are tried until one is smooth: the given one, and others beside it
PATIENCE = 10.0  # seconds for all directions; where they would take longer, there is one for each gradient
LARGEST_INPUT = 1 << 30  # elements that are drawn
# Inputs of gradient operators that are settings; those of standard operators are in their schemas.
SETTINGS = {"ratio", "roi", "scales"}


@dataclass(frozen=True)
class Row:
    """One gradient, or one node: the worst error of all directions, relative to the gradient's size.

    `tolerance` is what rounding explains: a little for the element type, and more where more was measured.
    """

    name: str
    error: float
    tolerance: float
    note: str = ""
    judged: bool = True

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; NaN is not, nor is what could not be judged."""
        return self.judged and self.error <= self.tolerance

    @property
    def wrong(self) -> bool:
        """Whether the gradient is wrong."""
        return self.judged and not self.ok


@dataclass(frozen=True)
class GradientCheck:
    """What `check_gradients` found. `forward` says what ran the forward pass.

    `gradients` has the precisions in which the gradients were computed, `fixed` the random nodes whose
    results were drawn once.
    """

    rows: tuple[Row, ...]
    forward: str
    nodes: tuple[Row, ...] = ()
    gradients: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no gradient is wrong and some could be judged, and no node is if they were asked for."""
        return any(row.ok for row in self.rows) and not any(row.wrong for row in (*self.rows, *self.nodes))

    @property
    def judged(self) -> bool:
        """Whether there was anything to go by, for one of the gradients at least."""
        return any(row.judged for row in (*self.rows, *self.nodes))

    def raise_if_wrong(self) -> None:
        """Raise WrongGradientError with the table, unless all is well."""
        if not self.ok:
            what = "disagree with central differences" if self.judged else "could not be judged"
            raise WrongGradientError(f"gradients {what}\n{self}")

    def __str__(self) -> str:
        rows = (*self.rows, *self.nodes)
        width = max(len(row.name) for row in rows)
        lines = [f"forward pass: {self.forward}; gradients: {' and '.join(self.gradients)}"]
        if self.fixed:
            lines.append(describe(self.fixed))
        for row in rows:
            if row.judged:
                verdict = "ok   " if row.ok else "WRONG"
                line = f"{row.name:<{width}}  {verdict}  error {row.error:.1e}, allowed {row.tolerance:.0e}"
            else:
                line = f"{row.name:<{width}}  not judged:"
            lines.append(f"{line}  {row.note}".rstrip())
        return "\n".join(lines)


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
    can flow to, `of` to every floating-point output. With `per_node`, every node between `wrt` and `of` is
    checked by itself too, on the values it meets in the model. `progress(done, total, name)` is
    called once before the first, and after every gradient and node. If the forward pass is slow, there is one
    direction for each gradient.

    The forward pass runs on onnxruntime where it has double kernels, else on onnx's reference implementation,
    else in single precision; the result says which. The gradients are computed in the model's own types and,
    where onnxruntime can, in double. A gradient that is off by more than `tolerance` of its size (default: by
    element type) is wrong, unless the rounding that is measured explains it: from step to step of the
    differences, and in the gradient itself. Where rounding would hide anything, it is not judged.

    Where the function has a kink, as Relu at 0, the gradients are checked at a point beside it. The results
    of random operators, such as a Dropout in training mode, are drawn once and are the same everywhere.
    """
    proto = load_model(model)
    generator = np.random.default_rng(seed)
    given = {name: np.asarray(array) for name, array in (feeds or {}).items()}
    targets, outputs = names_of(wrt), names_of(of)
    if targets is None:
        targets = _differentiable(proto)
    if outputs is None:
        outputs = [o.name for o in proto.graph.output if o.type.tensor_type.elem_type in FLOATS]
    if not (targets and outputs):
        raise ModelError(_nothing_to_check(proto, targets))
    report = progress if progress is not None else lambda done, total, name: None
    report(0, len(targets), "building the gradient model")
    marked, fixed = with_marked_draws(proto, given)
    # Zeros surprise only where somebody asked for them.
    with _silence() if wrt is None else nullcontext():
        built = build_gradient_model(marked, wrt=targets, of=outputs)
    targets, outputs = names_in(built)
    marked = proto = _exposed(marked, targets, outputs)
    if fixed:
        proto, built = with_fixed_draws(marked), with_fixed_draws(built)
    complete = _complete_feeds(proto, given, outputs, training_switches(marked), generator)
    forward = make_forward(proto, complete, targets, outputs)
    known = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    seeds = [value.name for value in built.graph.input if value.name not in known]
    passes = [_Gradients(built, targets, kernels)]
    if forward.on_onnxruntime and any(h.value.dtype != np.float64 for h in forward.handles.values()):
        passes += _gradients_in_double(marked, targets, outputs, kernels)
    check = _Check(forward, passes, outputs, seeds, complete, tolerance, directions, generator)
    nodes = _nodes_between(marked, targets, outputs) if per_node else []
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        report(len(rows), len(targets) + len(nodes), row.name)

    for name in targets:
        add(check.row(name))
    alone = partial(check_gradients, kernels=kernels, directions=directions, tolerance=tolerance, seed=seed)
    values = _intermediates(proto, marked, complete) if nodes else {}
    for node in nodes:
        add(_check_node(node, marked, values, alone))
    return GradientCheck(
        tuple(rows[: len(targets)]),
        forward.name,
        tuple(rows[len(targets) :]),
        check.precisions,
        fixed,
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Without the warning that gradients are zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoppedGradientWarning)
        yield


def _exposed(proto: onnx.ModelProto, targets: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """The model with all that is differentiated among its outputs, and all weights among its initializers."""
    graph = proto.graph
    known = {value.name for value in (*graph.input, *graph.initializer)}
    known.update(name for node in graph.node if node.op_type != "Constant" for name in node.output)
    if known.issuperset(targets) and {value.name for value in graph.output}.issuperset(outputs):
        return proto
    from ortgrad.pipelines.gradients import exposed  # onnx-ir takes a while to import

    return exposed(proto, targets, outputs)


def _nothing_to_check(proto: onnx.ModelProto, targets: Sequence[str]) -> str:
    if targets:
        kinds = sorted({_kind(value.type) for value in proto.graph.output})
        return f"there is no floating-point output to check: the outputs hold {' and '.join(kinds)}"
    kinds = sorted({_kind(value.type) for value in proto.graph.input})
    return "there is no floating-point input or initializer to check that a gradient flows to" + (
        f": the inputs hold {' and '.join(kinds)}" if kinds else ""
    )


def _kind(type_: onnx.TypeProto) -> str:
    which = type_.WhichOneof("value")
    if which == "tensor_type":
        return f"{TensorProto.DataType.Name(type_.tensor_type.elem_type).lower()} tensors"
    return f"a {str(which or 'value').removesuffix('_type')}"


# The gradients


class _Gradients:
    """A gradient model in a session."""

    def __init__(self, built: onnx.ModelProto, targets: Sequence[str], kernels: Kernels) -> None:
        self._model = built
        self._targets = targets
        try:
            self._session = InferenceSession(built, quiet(), kernels=kernels)
        except ORT_ERRORS as error:
            raise ModelError(f"the gradient model does not load: {one_line(error)}") from error

    def run(self, feeds: Arrays) -> Arrays:
        """The gradients by target."""
        try:
            results = self._session.run(None, typed(self._model, feeds))
        except ORT_ERRORS as error:
            raise ModelError(f"the gradient model does not run: {one_line(error)}") from error
        arrays = map(np.asarray, results[-len(self._targets) :])
        return dict(zip(self._targets, arrays, strict=True))


def _gradients_in_double(
    marked: onnx.ModelProto, targets: Sequence[str], outputs: Sequence[str], kernels: Kernels
) -> list[_Gradients]:
    """The gradients of the model in double, if they can be built."""
    try:
        # What is to be said was said of the model in its own types.
        with _silence():
            built = build_gradient_model(in_double(marked), wrt=targets, of=outputs)
        return [_Gradients(with_fixed_draws(built), targets, kernels)]
    except OrtgradError:
        return []


# The verdict


@dataclass(frozen=True)
class _Point:
    """Values to differentiate at, what the forward pass gives there, and the gradients of every pass.

    `rounding` is how far the forward pass in the model's own types is from `base`, relative to that.
    `otherwise` has the gradients of a pass where the values are rounded otherwise.
    """

    feeds: Arrays
    base: np.ndarray
    rounding: float
    gradients: list[Arrays]
    otherwise: dict[int, list[Arrays]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Verdict:
    """How far a slope is from the differences and may be, both relative; or why that cannot be said."""

    error: float
    allowed: float
    reason: str = ""

    @property
    def wrong(self) -> bool:
        return not self.reason and not self.error <= self.allowed


class _Check:
    """The differences of a forward pass against the gradients of one or two gradient models."""

    def __init__(
        self,
        forward: Forward,
        passes: Sequence[_Gradients],
        outputs: Sequence[str],
        seeds: Sequence[str],
        feeds: Arrays,
        tolerance: float | None,
        directions: int,
        generator: np.random.Generator,
    ) -> None:
        self._forward = forward
        self._passes = passes
        self._tolerance = tolerance
        self._generator = generator
        initial = {**feeds, **{handle.feed: handle.value for handle in forward.handles.values()}}
        base = forward.run(initial)
        self._weights = {
            # Outputs that are not finite have no differences.
            name: np.where(np.isfinite(base[name]), generator.standard_normal(base[name].shape), 0.0)
            if seeds
            else np.ones(())
            for name in outputs
        }
        # A single scalar is seeded inside the model.
        self._seeds = dict(zip(seeds, self._weights.values(), strict=bool(seeds)))
        self._points: list[_Point | None] = [self._point(initial)]
        started = time.perf_counter()
        forward.run(initial)
        seconds = 2 * (time.perf_counter() - started) * directions * len(forward.handles)
        self._directions = directions if seconds < PATIENCE else 1

    @property
    def precisions(self) -> tuple[str, ...]:
        """The element types of the gradients."""
        first = self._points[0]
        assert first is not None
        names = [array.dtype.name for arrays in first.gradients for array in arrays.values()]
        return tuple(dict.fromkeys(names))

    def row(self, name: str) -> Row:
        """The verdict on the gradient towards a target."""
        first = ""
        for i in range(POINTS):
            while len(self._points) <= i:
                self._points.append(self._beside(len(self._points)))
            point = self._points[i]
            if point is None:
                continue
            verdict, note = self._at(point, name)
            if not verdict.reason:
                beside = f"beside the given point: there, {first}" if first else ""
                return Row(name, verdict.error, verdict.allowed, "; ".join(filter(None, (note, beside))))
            first = first or verdict.reason
        return Row(name, np.nan, np.nan, first, judged=False)

    def _point(self, feeds: Arrays) -> _Point:
        base = self._vector(self._forward.run(feeds))
        own = self._vector(self._forward.own(feeds))
        size = float(np.linalg.norm(base))
        rounding = float(np.linalg.norm(own - base)) / size if size > 0 and own.shape == base.shape else 0.0
        return _Point(feeds, base, rounding, [p.run({**feeds, **self._seeds}) for p in self._passes])

    def _beside(self, number: int) -> _Point | None:
        """A point where what was equal or zero at the first no longer is; None if nothing can run there."""
        first = self._points[0]
        assert first is not None
        added = {handle.feed for handle in self._forward.handles.values() if handle.inner}
        moved = {}
        for name, array in first.feeds.items():
            if array.dtype.kind not in "fV" or name in added:
                moved[name] = array
                continue
            shift = self._generator.uniform(0.01, 0.04, array.shape)
            # Upwards first: many functions end at 0.
            sign = 1.0 if number % 2 else self._generator.choice([-1.0, 1.0], array.shape)
            moved[name] = np.asarray(array.astype(np.float64) + size_of(array) * shift * sign, array.dtype)
        try:
            point = self._point(moved)
        except (CannotRunError, ModelError):
            return None
        return point if point.base.shape == first.base.shape and np.isfinite(point.base).all() else None

    def _vector(self, results: Arrays) -> np.ndarray:
        """What is differentiated is the sum of this."""
        parts = []
        for name, weight in self._weights.items():
            result = results[name].astype(np.float64)
            if weight.shape not in ((), result.shape):
                return np.full(1, np.nan)
            with np.errstate(invalid="ignore"):
                parts.append(np.where(weight == 0, 0.0, weight * result).ravel())
        return np.concatenate(parts)

    def _at(self, point: _Point, name: str) -> tuple[_Verdict, str]:
        """The verdict at a point, from several directions."""
        found: list[list[_Verdict]] = [[] for _ in self._passes]
        shape = point.gradients[0][name].shape
        tried = 0
        # More directions where one crosses a kink, or where only one disagrees.
        while tried < self._directions or (tried < self._directions + 3 and _open(found, self._directions)):
            tried += 1
            direction = self._generator.standard_normal(shape)
            for verdicts, verdict in zip(found, self._along(point, name, direction), strict=True):
                verdicts.append(verdict)
        verdicts = [_summary(each) for each in found]
        own, double = verdicts[0], verdicts[-1]
        if own.wrong or not double.wrong:
            if own.reason and not double.reason:
                return double, f"in double only: {own.reason}"
            return own, ""
        return double, "in double"

    def _along(self, point: _Point, name: str, direction: np.ndarray) -> list[_Verdict]:
        """The verdict on every pass from one direction."""
        forward, handle = self._forward, self._forward.handles[name]
        value = point.feeds[handle.feed].astype(np.float64)
        single = forward.steps is SINGLE_STEPS

        @cache
        def function(t: float) -> np.ndarray:
            moved = {**point.feeds, handle.feed: value + t * direction}
            try:
                return self._vector(forward.run(moved)) if t else point.base
            except CannotRunError:
                return np.full(1, np.nan)

        def measure(enough: float) -> Derivative:
            rounding = 4 * _eps("float64", single) * float(np.linalg.norm(point.base))
            steps = [s * handle.size for s in forward.steps]
            if not single:
                few = derivative(function, [s * handle.size for s in FIRST], rounding)
                if few.error <= enough:
                    return few
            return derivative(function, steps, rounding, plateaus=single)

        gradients = [gradients[name] for gradients in point.gradients]
        wide = [gradient.astype(np.float64) for gradient in gradients]
        with np.errstate(invalid="ignore"):
            slopes = [float(np.sum(gradient * direction)) for gradient in wide]
        total = float(np.sum(np.abs(point.base)))
        norms = [float(np.linalg.norm(gradient)) for gradient in wide]
        quick = central_difference(function, QUICK[forward.steps] * handle.size)
        measured = None
        verdicts = []
        for i, (gradient, slope) in enumerate(zip(gradients, slopes, strict=True)):
            precision = gradient.dtype.name
            base = TOLERANCES[precision] if self._tolerance is None else self._tolerance
            if single and self._tolerance is None:
                base = max(base, COARSE_TOLERANCE)
            scale = max(norms[i] if np.isfinite(norms[i]) else 0.0, abs(quick), 1e-30)
            error = abs(slope - quick)
            if error <= base * scale:
                verdicts.append(_Verdict(error / scale, base))
                continue
            noise = self._noise(point, i, name, direction) + SAFETY * point.rounding * scale
            if noise <= LARGEST_NOISE * scale and error <= base * scale + noise:
                verdicts.append(_Verdict(error / scale, base + noise / scale))
                continue
            if measured is None:
                measured = measure(0.01 * error)
            if not np.isfinite(measured.error):
                verdicts.append(_Verdict(np.nan, np.nan, "the differences are not finite or do not converge"))
                continue
            if not np.isfinite(slope):
                smooth = not measured.jump and measured.error <= LARGEST_NOISE * abs(measured.value)
                reason = "" if smooth else "the gradient is not finite, and the differences do not converge"
                verdicts.append(_Verdict(np.inf, base, reason))
                continue
            scale = max(norms[i], abs(measured.value), 1e-30)
            error = abs(slope - measured.value)
            # A slope below this is rounding, of something that is zero.
            zero = 10 * _eps(precision, single) * total / handle.size
            if max(norms[i], abs(measured.value)) + measured.error <= zero:
                verdicts.append(_Verdict(error * handle.size / total, zero * handle.size / total))
                continue
            noise = measured.error + (noise if error > base * scale + measured.error else 0.0)
            verdict = _Verdict(error / scale, base + noise / scale)
            if verdict.wrong and measured.jump >= error / 10:
                verdict = _Verdict(np.nan, np.nan, "it is on a kink")
            elif not verdict.wrong and noise > LARGEST_NOISE * scale:
                verdict = _Verdict(np.nan, np.nan, f"rounding hides errors below {noise / scale:.0%}")
            verdicts.append(verdict)
        return verdicts

    def _noise(self, point: _Point, number: int, name: str, direction: np.ndarray) -> float:
        """How far the slope moves if all values are rounded otherwise."""
        if number not in point.otherwise:
            runs = point.otherwise[number] = []
            for _ in range(NOISE_RUNS):
                other = {
                    key: rounded_otherwise(array, self._generator, _eps(array.dtype.name, True))
                    if array.dtype.kind in "fV"
                    else array
                    for key, array in point.feeds.items()
                }
                runs.append(self._passes[number].run({**other, **self._seeds}))
        right = point.gradients[number][name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            moves = [
                abs(float(np.sum((other[name].astype(np.float64) - right) * direction)))
                if other[name].shape == right.shape
                else np.inf
                for other in point.otherwise[number]
            ]
        return SAFETY * float(np.max(np.nan_to_num(moves, nan=np.inf)))


def _eps(precision: str, single: bool) -> float:
    """The rounding of an element type, of float32 at least if `single`."""
    eps = 2.0**-7 if precision == "bfloat16" else float(np.finfo(precision).eps)
    return max(eps, SINGLE_EPS) if single else eps


def _open(found: Sequence[Sequence[_Verdict]], directions: int) -> bool:
    """Whether more directions are needed for a verdict."""
    return any(
        sum(v.wrong for v in each) == 1 or sum(not v.reason for v in each) < directions for each in found
    )


def _summary(verdicts: Sequence[_Verdict]) -> _Verdict:
    """The worst of the directions. A single one of several that disagrees is an accident."""
    judged = sorted((v for v in verdicts if not v.reason), key=lambda v: v.error / v.allowed)
    if not judged:
        return verdicts[0]
    alone = len(judged) > 2 and judged[-1].wrong and not judged[-2].wrong
    return judged[-2] if alone else judged[-1]


# Feeds


def _complete_feeds(
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    switches: set[str],
    generator: np.random.Generator,
) -> Arrays:
    """The feeds with random ones for what is left out, such that the model runs and stays finite."""
    unknown = sorted(set(feeds) - {value.name for value in proto.graph.input})
    if unknown:
        raise ModelError(f"the model has no input {unknown[0]!r} to feed")
    for value in proto.graph.input:
        if value.name in feeds and value.type.tensor_type.elem_type in FLOATS:
            dtype = np.asarray(feeds[value.name]).dtype
            if not (np.issubdtype(dtype, np.number) or dtype.name in ("bool", "bfloat16")):
                raise ModelError(f"input {value.name!r} takes numbers, not {dtype}")
    given = typed(proto, feeds)
    defaults = {tensor.name for tensor in proto.graph.initializer}
    missing = [v for v in proto.graph.input if v.name not in given and v.name not in defaults]
    if not missing:
        return given
    try:
        session = InferenceSession(proto, quiet(), kernels="onnx")
    except ORT_ERRORS as error:
        raise ModelError(f"the model does not load: {one_line(error)}") from error
    reason = "its outputs are not finite"
    # Equal sizes for models whose names of dimensions do not say which must agree.
    for spread, distinct in itertools.product(DISTRIBUTIONS, (True, False)):
        drawn = _draw(missing, _sizes(proto, given), spread, distinct, generator)
        # What was meant to be switched off is not: there is more to check with Dropout.
        drawn.update((k, np.ones_like(drawn[k])) for k in switches & drawn.keys())
        try:
            results = session.run(list(outputs), {**given, **typed(proto, drawn)})
        except ORT_ERRORS as error:
            reason = one_line(error)
            continue
        if all(np.isfinite(np.asarray(result)).all() for result in results):
            return {**given, **typed(proto, drawn)}
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
        if value.type.WhichOneof("value") != "tensor_type":
            raise ModelError(f"input {value.name!r} is {_kind(value.type)}, not a tensor: feed it")
        if not tensor.HasField("shape"):
            raise ModelError(f"input {value.name!r} has no shape: feed it")
        shape = []
        for dim in tensor.shape.dim:
            size = sizes.setdefault(dim.dim_param, 2 + len(sizes) if distinct else 2)
            # Exporters write -1 for a size that is not known.
            shape.append(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else size)
        if math.prod(shape) > LARGEST_INPUT:
            raise ModelError(f"input {value.name!r} has shape {shape}, too large to be drawn: feed it")
        if tensor.elem_type in FLOATS:
            drawn[value.name] = spread(generator, shape)
        elif tensor.elem_type == TensorProto.STRING:
            raise ModelError(f"input {value.name!r} holds strings: feed it")
        else:
            drawn[value.name] = generator.integers(0, 2, shape).astype(numpy_type(tensor.elem_type))
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
    operator = find_operator(node.op_type, node.domain)
    if operator is not None:
        parameters = zip(node.input, operator.inputs, strict=False)
        return {name for name, parameter in parameters if name and parameter.name in SETTINGS}
    if node.op_type == "ResizeGrad":
        return set(node.input[2:4])  # onnxruntime-training's: roi and scales
    version = next((o.version for o in proto.opset_import if o.domain == node.domain), 1)
    if not onnx.defs.has(node.op_type, version, node.domain):
        return set()
    formal = onnx.defs.get_schema(node.op_type, version, node.domain).inputs
    never = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    last = len(formal) - 1
    categories = [(name, formal[min(i, last)].differentiation_category) for i, name in enumerate(node.input)]
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
    inferred = with_schemas(onnx.shape_inference.infer_shapes, proto)
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


def _intermediates(proto: onnx.ModelProto, marked: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """Every value of the main graph; `marked` is the model with random nodes in the place of fixed ones."""
    produced = [name for node in marked.graph.node for name in node.output if name]
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    return {**weights, **typed(proto, feeds), **values_of(proto, feeds, produced)}


def _check_node(
    item: _PathNode, proto: onnx.ModelProto, values: Arrays, check: Callable[..., GradientCheck]
) -> Row:
    """Check one node as a model of its own, on the values that it meets."""
    node = item.node
    name = f"{node.op_type} {node.name or node.output[0]}"
    if not all(isinstance(values[k], np.ndarray) for k in (*_reads(node), *item.of)):
        return Row(name, np.nan, np.nan, "it does not work on tensors alone", judged=False)
    model = _model_of(item, proto, values)
    feeds = {value.name: values[value.name] for value in model.graph.input}
    try:
        with _silence():
            result = check(model, feeds, wrt=item.wrt, of=item.of)
    except OrtgradError as error:
        return Row(name, np.nan, np.nan, one_line(error), judged=False)
    wrong = [row for row in result.rows if row.wrong]
    judged = [row for row in result.rows if row.judged]
    worst = max(wrong or judged or result.rows, key=lambda row: row.error / row.tolerance)
    note = f"towards {worst.name!r}" if wrong else worst.note
    return Row(name, worst.error, worst.tolerance, note, worst.judged)


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
