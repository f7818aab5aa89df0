"""ONNX's node tests, and the slopes that their gradients must have."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state
from onnx import TensorProto

import ortgrad

Arrays = dict[str, np.ndarray]


Run = Callable[[Arrays], Arrays]


ORT_ERRORS = tuple(e for e in vars(ort_state).values() if isinstance(e, type) and issubclass(e, Exception))


@dataclass(frozen=True)
class Case:
    """A node test with float inputs that reach float outputs."""

    name: str
    model: onnx.ModelProto
    feeds: Arrays
    wrt: list[str]
    of: list[str]


@cache
def cases_by_operator() -> dict[str, list[Case]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        tests = collect_testcases(None)
    found: dict[str, list[Case]] = defaultdict(list)
    for test in tests:
        nodes = test.model.graph.node
        # "expanded" tests are the function bodies of others.
        if len(nodes) == 1 and not nodes[0].domain and test.data_sets and "_expanded" not in test.name:
            inputs, outputs = test.data_sets[0]
            if all(isinstance(a, np.ndarray) for a in (*inputs, *outputs)):
                case = make_case(test.name, test.model, inputs, outputs)
                if case.wrt and case.of:
                    found[nodes[0].op_type].append(case)
    return found


def make_case(
    name: str, model: onnx.ModelProto, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
) -> Case:
    feeds = {value.name: array for value, array in zip(model.graph.input, inputs, strict=False)}
    fixed = not_differentiable(model)
    wrt = [n for n, array in feeds.items() if is_single(array) and n not in fixed]
    of = [value.name for value, array in zip(model.graph.output, outputs, strict=True) if is_single(array)]
    return Case(name, model, feeds, wrt, of)


def is_single(array: np.ndarray) -> bool:
    return array.dtype == np.float32 and array.size > 0


# Its schema is older than that declaration.
SIZES = {("Upsample", 1)}


def not_differentiable(model: onnx.ModelProto) -> set[str]:
    """The inputs of the only node that its schema declares to have no gradient."""
    node = model.graph.node[0]
    version = next(o.version for o in model.opset_import if o.domain == node.domain)
    parameters = onnx.defs.get_schema(node.op_type, version, node.domain).inputs
    never = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    last = len(parameters) - 1
    return {
        name
        for i, name in enumerate(node.input)
        if parameters[min(i, last)].differentiation_category == never or (node.op_type, i) in SIZES
    }


@dataclass(frozen=True)
class Slope:
    """The derivative of the weighted outputs as one input moves along a direction, for several steps."""

    name: str
    direction: np.ndarray
    estimates: list[float]


@dataclass(frozen=True)
class Measured:
    """A case at a point where it is smooth, and its derivatives there."""

    case: Case
    feeds: Arrays
    weights: Arrays
    slopes: list[Slope]
    tolerance: float


def forward(model: onnx.ModelProto) -> Run:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(None, feeds), strict=True))


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    double = onnx.ModelProto()
    double.CopyFrom(model)
    for value in (*double.graph.input, *double.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return double


def measure(case: Case) -> Measured | None:
    """The derivatives of a case, None if onnxruntime does not run it or if it is constant or random."""
    generator = np.random.default_rng(7)
    try:
        run = forward(case.model)
        first = run(case.feeds)
        # A little off the point of the test: there are zeros under an activation, equal values under a Max.
        feeds = {
            name: moved(array, 0.02 * np.abs(generator.standard_normal(array.shape)) + 0.01)
            if name in case.wrt
            else array
            for name, array in case.feeds.items()
        }
        base = run(feeds)
    except ORT_ERRORS:
        return None
    of = [n for n in case.of if np.isfinite(first[n]).all() and np.isfinite(base[n]).all()]
    again = run(feeds)
    if not of or not all(np.array_equal(again[n], base[n]) for n in of):
        return None
    weights = {name: generator.standard_normal(base[name].shape).astype(np.float32) for name in of}
    run, wide, steps = most_precise(case.model, run, feeds, {n: base[n] for n in of})
    slopes = []
    for name in case.wrt:
        for _ in range(3):
            direction = generator.standard_normal(feeds[name].shape)
            estimates = [difference(run, wide, name, direction, step, weights) for step in steps]
            slopes.append(Slope(name, direction, estimates))
    found = np.array([slope.estimates for slope in slopes])
    if not np.isfinite(found).all() or not found.any():
        return None
    return Measured(case, feeds, weights, slopes, 1e-3 if steps is DOUBLE_STEPS else 1e-2)


SINGLE_STEPS = (1e-2, 3e-3, 1e-3)


DOUBLE_STEPS = (1e-4, 1e-5, 1e-6)


def moved(array: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.asarray(array + by, array.dtype)


def most_precise(
    model: onnx.ModelProto, run: Run, feeds: Arrays, base: Arrays
) -> tuple[Run, Arrays, tuple[float, ...]]:
    """The forward pass in float64, if onnxruntime has it and computes the same as in float32."""
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    try:
        double = forward(in_double(model))
        found = double(wide)
    except ORT_ERRORS:
        return run, feeds, SINGLE_STEPS
    # Some double kernels of onnxruntime read the causal mask of Attention differently.
    if not all(np.allclose(found[n], base[n], rtol=1e-3, atol=1e-4) for n in base):
        return run, feeds, SINGLE_STEPS
    return double, wide, DOUBLE_STEPS


def difference(
    run: Run, feeds: Arrays, name: str, direction: np.ndarray, step: float, weights: Arrays
) -> float:
    value = feeds[name]
    ahead, behind = (run({**feeds, name: moved(value, signed * direction)}) for signed in (step, -step))
    return sum(
        float(np.sum(weight * (ahead[n].astype(np.float64) - behind[n].astype(np.float64))))
        for n, weight in weights.items()
    ) / (2 * step)


def problems(measured: Measured) -> Iterator[str]:
    """What is wrong with the gradients of a case; nothing if they are right with all kernels."""
    case = measured.case
    built = ortgrad.build_gradient_model(case.model, wrt=case.wrt, of=list(measured.weights))
    # Without gradient nodes there is only one way to run.
    for kernels in ("auto", "python", "onnx") if built.functions else ("auto",):
        gradients = run_gradients(measured, built, kernels)
        for slope in measured.slopes:
            grad = gradients[slope.name]
            found = float(np.sum(grad * slope.direction))
            scale = max(1e-3, float(np.linalg.norm(grad)), *np.abs(slope.estimates))
            error = min(abs(found - estimate) for estimate in slope.estimates) / scale
            if not error <= measured.tolerance:  # NaN is wrong
                yield (
                    f"{case.name}, kernels={kernels!r}: {slope.name}_grad gives {found:.6g} "
                    f"where differences give {slope.estimates}"
                )
                break


def run_gradients(measured: Measured, built: onnx.ModelProto, kernels: str) -> Arrays:
    """The gradients in float64, by the names of what they belong to."""
    session = ortgrad.InferenceSession(built, kernels=kernels)
    seeds = {f"{name}_grad": weight for name, weight in measured.weights.items()}
    known = {value.name for value in session.get_inputs()}
    seeded = known >= set(seeds)
    results = session.run(
        [f"{name}_grad" for name in measured.case.wrt],
        {name: array for name, array in {**measured.feeds, **seeds}.items() if name in known},
    )
    # A single scalar is seeded with 1 inside.
    factor = 1.0 if seeded else float(next(iter(seeds.values())))
    return {
        name: factor * result.astype(np.float64)
        for name, result in zip(measured.case.wrt, results, strict=True)
    }
