"""The procedure of check_gradients, from the gradient model to the verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import onnx

from ortgrad.check.comparison import Clock, Comparison
from ortgrad.check.double_forms import with_double_forms
from ortgrad.check.double_precision import in_double
from ortgrad.check.gradients import check_gradients
from ortgrad.check.numeric_forward import make_forward
from ortgrad.check.objective import Objective
from ortgrad.check.per_node import check_nodes, intermediate_values
from ortgrad.check.random_feeds import complete_feeds, describe_type
from ortgrad.check.randomness import training_switches, with_fixed_draws, with_marked_draws
from ortgrad.check.reachable import differentiable, nodes_between, rounding_behind
from ortgrad.check.result import GradientCheck, Row, unjudged
from ortgrad.check.running import Backward
from ortgrad.errors import ModelError, OrtgradError
from ortgrad.graph.feeds import Arrays
from ortgrad.graph.metadata import names_in
from ortgrad.graph.protos import FLOATS
from ortgrad.pipelines.backward_graph import exposed
from ortgrad.pipelines.build import build_gradient_model
from ortgrad.pipelines.prepare import Kernels
from ortgrad.pipelines.stops import quiet_stops


class Arguments(NamedTuple):
    """Arguments of `check_gradients`."""

    wrt: Sequence[str] | None
    of: Sequence[str] | None
    kernels: Kernels
    directions: int
    tolerance: float | None
    seed: int
    seconds: float | None


def check(
    proto: onnx.ModelProto,
    given: Arrays,
    arguments: Arguments,
    report: Callable[[int, int, str], None],
    *,
    per_node: bool,
) -> GradientCheck:
    """Implement `check_gradients` for a loaded model."""
    generator = np.random.default_rng(arguments.seed)
    targets, outputs, kernels = arguments.wrt, arguments.of, arguments.kernels
    if targets is None:
        targets = differentiable(proto)
    if outputs is None:
        outputs = [o.name for o in proto.graph.output if o.type.tensor_type.elem_type in FLOATS]
    if not (targets and outputs):
        raise ModelError(_nothing_to_check(proto, targets))
    report(0, len(targets), "building the gradient model")
    marked, fixed = with_marked_draws(proto, given)
    # Warn about zero gradients only if the caller asked for these targets.
    with quiet_stops() if arguments.wrt is None else nullcontext():
        built = build_gradient_model(marked, wrt=targets, of=outputs, feeds=_if_complete(marked, given))
    targets, outputs = names_in(built)
    marked = proto = _exposed(marked, targets, outputs)
    if fixed:
        proto, built = with_fixed_draws(marked), with_fixed_draws(built)

    complete = complete_feeds(proto, given, outputs, training_switches(marked), generator)
    forward = make_forward(proto, complete, targets, outputs)
    passes = [Backward(built, targets, kernels)]
    if forward.on_onnxruntime and any(h.value.dtype != np.float64 for h in forward.handles.values()):
        # Some operators have no gradient in double. Warnings about zero gradients were issued above.
        with suppress(OrtgradError), quiet_stops():
            passes.append(_backward_in_double(marked, targets, outputs, complete, kernels))
    known = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    seeds = [value.name for value in built.graph.input if value.name not in known]
    objective = Objective(forward, passes, outputs, seeds, generator)
    comparison = Comparison(
        objective, arguments.tolerance, arguments.directions, generator, Clock(arguments.seconds)
    )
    nodes = nodes_between(marked, targets, outputs) if per_node else []
    rows: dict[str, Row] = {}
    done = itertools.count(1)

    def add(row: Row) -> None:
        rows[row.name] = row
        report_next(row.name)

    def report_next(name: str) -> None:
        report(next(done), len(targets) + len(nodes), name)

    rounding = rounding_behind(marked, outputs)
    for name in (name for name in targets if name in rounding):
        note = f"straight-through because of the {rounding[name]}: not the slope of the output"
        add(unjudged(name, note))
    comparison.compare([name for name in targets if name not in rounding], add)
    checked: list[Row] = []
    if nodes:
        alone = partial(
            check_gradients,
            kernels=kernels,
            directions=arguments.directions,
            tolerance=arguments.tolerance,
            seed=arguments.seed,
        )
        values = intermediate_values(proto, marked, complete)
        checked = check_nodes(nodes, marked, values, alone, Clock(arguments.seconds), report_next)
    gradients = [array for arrays in objective.first.gradients for array in arrays.values()]
    precisions = tuple(dict.fromkeys(array.dtype.name for array in gradients))
    ordered = tuple(rows[name] for name in targets)
    return GradientCheck(ordered, forward.name, tuple(checked), precisions, fixed)


def _backward_in_double(
    marked: onnx.ModelProto,
    targets: Sequence[str],
    outputs: Sequence[str],
    feeds: Arrays,
    kernels: Kernels,
) -> Backward:
    """Return the backward pass of the model in double, with fixed draws."""
    double = in_double(marked)
    double = build_gradient_model(double, wrt=targets, of=outputs, feeds=_if_complete(double, feeds))
    return Backward(with_double_forms(with_fixed_draws(double)), targets, kernels)


def _if_complete(proto: onnx.ModelProto, feeds: Arrays) -> Arrays | None:
    """Return the feeds if there is one for every input without a default, else None."""
    defaults = {tensor.name for tensor in proto.graph.initializer}
    inputs = {value.name for value in proto.graph.input}
    return {k: feeds[k] for k in inputs & feeds.keys()} if inputs - defaults <= feeds.keys() else None


def _exposed(proto: onnx.ModelProto, targets: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """Return the model with all `outputs` among its outputs and all weights among its initializers."""
    graph = proto.graph
    known = {value.name for value in (*graph.input, *graph.initializer)}
    known.update(name for node in graph.node if node.op_type != "Constant" for name in node.output)
    if known.issuperset(targets) and {value.name for value in graph.output}.issuperset(outputs):
        return proto
    return exposed(proto, targets, outputs)


def _nothing_to_check(proto: onnx.ModelProto, targets: Sequence[str]) -> str:
    if targets:
        kinds = sorted({describe_type(value.type) for value in proto.graph.output})
        return f"there is no floating-point output to check: the outputs hold {' and '.join(kinds)}"
    kinds = sorted({describe_type(value.type) for value in proto.graph.input})
    return "there is no floating-point input or initializer to check that a gradient flows to" + (
        f": the inputs hold {' and '.join(kinds)}" if kinds else ""
    )
