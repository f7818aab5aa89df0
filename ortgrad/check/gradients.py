"""check_gradients: compares gradients with central differences along random directions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import onnx

from ortgrad.check.comparison import Clock, Comparison
from ortgrad.check.double_precision import in_double
from ortgrad.check.numeric_forward import make_forward
from ortgrad.check.objective import Objective
from ortgrad.check.per_node import check_nodes, intermediate_values, nodes_between
from ortgrad.check.random_feeds import complete_feeds, describe_type
from ortgrad.check.randomness import training_switches, with_fixed_draws, with_marked_draws
from ortgrad.check.reachable import differentiable
from ortgrad.check.result import GradientCheck, Row
from ortgrad.check.rounding import rounding_behind
from ortgrad.check.running import Backward
from ortgrad.errors import ModelError, OrtgradError
from ortgrad.graph.feeds import Arrays
from ortgrad.graph.loading import ModelLike, load_model
from ortgrad.graph.metadata import names_in
from ortgrad.graph.protos import FLOATS
from ortgrad.keywords import checked
from ortgrad.pipelines.build import build_gradient_model, names_of
from ortgrad.pipelines.prepare import Kernels
from ortgrad.pipelines.stops import quiet_stops


@checked
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
    seconds: float | None = 180.0,
) -> GradientCheck:
    """Compare the gradients of a model with central differences of its forward pass in float64.

    Inputs that are not in `feeds` are drawn at random: symbolic dimensions get small sizes, integers are 0
    or 1. `wrt` defaults to all floating-point inputs and initializers that a gradient can reach, `of` to all
    floating-point outputs. With `per_node`, every node between `wrt` and `of` is also checked on its own, on
    the values that it receives in the model. `progress(done, total, name)` is called once at the start, and
    after every gradient and node. If the forward pass is slow, gradients are checked in groups that move
    together. After about `seconds` (None: without a limit), what is left is not judged; the nodes have as
    much time again.

    The forward pass runs on onnxruntime if it has double kernels, else on onnx's reference implementation,
    else in single precision; the result says which. The gradients are computed in the model's own types and,
    if onnxruntime can, in double. A gradient whose relative error exceeds `tolerance` (default: by element
    type) is wrong, unless something else may explain it: measured rounding, a kink, or differences that do
    not converge. It is then not judged, and neither are the straight-through gradients of quantized models.
    The module `ortgrad.check.verdicts` has the mathematics.

    Where the function has a kink, such as Relu at 0, the gradients are checked at a point beside it. Random
    operators, such as a Dropout in training mode, are drawn once and give the same results everywhere.

    >>> import onnx, ortgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x, float[3, 2] w) => (float[N, 2] y) { y = MatMul(x, w) }''')
    >>> ortgrad.check_gradients(model, wrt="w").ok
    True
    """
    proto = load_model(model)
    generator = np.random.default_rng(seed)
    given = {name: np.asarray(array) for name, array in (feeds or {}).items()}
    targets, outputs = names_of("wrt", wrt), names_of("of", of)
    if targets is None:
        targets = differentiable(proto)
    if outputs is None:
        outputs = [o.name for o in proto.graph.output if o.type.tensor_type.elem_type in FLOATS]
    if not (targets and outputs):
        raise ModelError(_nothing_to_check(proto, targets))
    report = progress if progress is not None else lambda done, total, name: None
    report(0, len(targets), "building the gradient model")
    marked, fixed = with_marked_draws(proto, given)
    # Warn about zero gradients only if the caller asked for these targets.
    with quiet_stops() if wrt is None else nullcontext():
        built = build_gradient_model(marked, wrt=targets, of=outputs, feeds=_if_complete(marked, given))
    targets, outputs = names_in(built)
    marked = proto = _exposed(marked, targets, outputs)
    if fixed:
        proto, built = with_fixed_draws(marked), with_fixed_draws(built)

    complete = complete_feeds(proto, given, outputs, training_switches(marked), generator)
    forward = make_forward(proto, complete, targets, outputs)
    passes = [Backward(built, targets, kernels)]
    if forward.on_onnxruntime and any(h.value.dtype != np.float64 for h in forward.handles.values()):
        from ortgrad.check.double_forms import with_double_forms  # onnx-ir is slow to import

        # Some operators have no gradient in double. Warnings about zero gradients were issued above.
        with suppress(OrtgradError), quiet_stops():
            double = in_double(marked)
            double = build_gradient_model(
                double, wrt=targets, of=outputs, feeds=_if_complete(double, complete)
            )
            passes.append(Backward(with_double_forms(with_fixed_draws(double)), targets, kernels))
    known = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    seeds = [value.name for value in built.graph.input if value.name not in known]
    objective = Objective(forward, passes, outputs, seeds, generator)
    comparison = Comparison(objective, tolerance, directions, generator, Clock(seconds))
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
        add(Row(name, np.nan, np.nan, note, judged=False))
    comparison.compare([name for name in targets if name not in rounding], add)
    checked: list[Row] = []
    if nodes:
        alone = partial(
            check_gradients, kernels=kernels, directions=directions, tolerance=tolerance, seed=seed
        )
        values = intermediate_values(proto, marked, complete)
        checked = check_nodes(nodes, marked, values, alone, Clock(seconds), report_next)
    gradients = [array for arrays in objective.first.gradients for array in arrays.values()]
    precisions = tuple(dict.fromkeys(array.dtype.name for array in gradients))
    ordered = tuple(rows[name] for name in targets)
    return GradientCheck(ordered, forward.name, tuple(checked), precisions, fixed)


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
    from ortgrad.pipelines.gradients import exposed  # onnx-ir is slow to import

    return exposed(proto, targets, outputs)


def _nothing_to_check(proto: onnx.ModelProto, targets: Sequence[str]) -> str:
    if targets:
        kinds = sorted({describe_type(value.type) for value in proto.graph.output})
        return f"there is no floating-point output to check: the outputs hold {' and '.join(kinds)}"
    kinds = sorted({describe_type(value.type) for value in proto.graph.input})
    return "there is no floating-point input or initializer to check that a gradient flows to" + (
        f": the inputs hold {' and '.join(kinds)}" if kinds else ""
    )
