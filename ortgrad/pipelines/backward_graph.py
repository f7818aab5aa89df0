"""The pipeline of build_gradient_model: from a forward model to the model with gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.autodiff.backward import BackwardPass, Failure, list_failures
from ortgrad.autodiff.paths import straight_through_nodes
from ortgrad.autodiff.stopped import describe_stops
from ortgrad.errors import NodeError, UnsupportedGradientError
from ortgrad.graph.bodies import is_body
from ortgrad.graph.metadata import describe_build, is_built
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.serialization import read, write
from ortgrad.graph.traversal import all_nodes, values_by_name
from ortgrad.passes import Pass, run
from ortgrad.passes.attach import attach
from ortgrad.passes.complete import complete
from ortgrad.passes.deduplicate import deduplicate
from ortgrad.passes.expand_unsupported import expand_unsupported
from ortgrad.passes.fold_ifs import fold_ifs
from ortgrad.passes.fold_normalizations import fold_normalizations
from ortgrad.passes.inline import inline
from ortgrad.passes.pads import pad_all_axes
from ortgrad.passes.resolve_sequences import resolve_sequences
from ortgrad.passes.separate_targets import separate_targets
from ortgrad.passes.slices import drop_whole_slices
from ortgrad.passes.state_pool_sizes import state_pool_sizes
from ortgrad.passes.tidy import remove_unused, sort
from ortgrad.pipelines.observed_ranks import ask_onnxruntime, see_ranks
from ortgrad.pipelines.opening import OPENING
from ortgrad.pipelines.targets import (
    decides_shapes,
    find_outputs,
    find_targets,
    refuse_integers,
    scalar_parameters,
)
from ortgrad.shapes.dimension_names import forget_dimensions, name_dimensions
from ortgrad.shapes.inference import infer_types
from ortgrad.shapes.known_values import fold_known_values
from ortgrad.shapes.proven_shapes import (
    Declared,
    assume_ranks,
    infer_further_shapes,
    infer_proven_shapes,
    unknown_ranks,
)
from ortgrad.shapes.required_ranks import transposed_ranks

Feeds = Mapping[str, np.ndarray]

_ROUNDS = (
    "it rounds to integers, so its gradient is 0 almost everywhere; straight_through=False excludes the "
    "straight-through gradient"
)


@dataclass(frozen=True)
class Request:
    """What a caller of `build_gradient_model` or `explain` asks for."""

    source: onnx.ModelProto
    wrt: Sequence[str] | None
    of: Sequence[str] | None
    straight_through: bool = True
    feeds: Feeds | None = None
    # Passes that follow the opening ones.
    begin: Sequence[Pass] = ()
    # Whether nodes are not merged for the sake of speed.
    as_written: bool = False


@dataclass(frozen=True)
class BackwardRun:
    """A forward model after the opening passes, and its backward pass, which is not yet in the graph."""

    model: ir.Model
    backward: BackwardPass
    targets: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    # The names of the targets' gradients.
    results: Sequence[str]
    # The inferred shapes of targets and outputs, which do not rely on declared ones.
    proven: Mapping[str, ir.Shape | None]
    declared: Declared
    # Names that the inputs' dimensions have meanwhile.
    dimensions: set[str]
    # The text of the StoppedGradientWarning, if there is one.
    stopped: str | None
    # Texts of warnings about patterns.
    partial: Sequence[str]
    # Whether ranks without proof were used.
    trusting: bool
    # Whether values that follow from known sizes were replaced by constants where they are known.
    folding: bool


def run_backward(request: Request) -> BackwardRun:
    """Run the backward pass; nodes that cannot be differentiated are in its `failures`."""
    ran = _run_backward(request)
    if ran.backward.failures:
        # Ranks without proof are used only if a rule needs one that cannot be inferred.
        ran = _run_again(request, ran)
    if not request.straight_through:
        nodes = straight_through_nodes(ran.model.graph, ran.targets, ran.outputs)
        ran.backward.failures += [Failure(node, _ROUNDS) for node in nodes]
    return ran


def _run_again(request: Request, ran: BackwardRun) -> BackwardRun:
    """Return another run, in which ranks without proof are used, and checked at run time."""
    # Of feeds, the ranks may be known, so that other values can be folded.
    folding = ran.folding or request.feeds is not None
    return _run_backward(request, trusting=True, folding=folding)


def _run_backward(request: Request, *, trusting: bool = False, folding: bool = True) -> BackwardRun:
    source, wrt, of = request.source, request.wrt, request.of
    feeds = request.feeds if trusting else None
    model = _opened(request)
    _take_ranks_of_feeds(model, feeds)
    dimensions = name_dimensions(model)
    declared = infer_proven_shapes(model)
    folded = False
    # Scalars that may be trained do not count as known.
    unknown = [*(wrt or ()), *scalar_parameters(source)]
    while folding and fold_known_values(model, unknown):
        # A branch that is taken may decide about further ranks.
        folded = True
        model = run(model, fold_ifs, resolve_sequences, sort)
        infer_further_shapes(model)
    model = pad_all_axes(model)
    graph = model.graph
    outputs = find_outputs(graph, of)
    targets, partial = find_targets(model, wrt, source, outputs)
    # Weights become inputs with defaults, so that new values can be fed; they no longer count as constants.
    fed = [value for value in targets if value.is_initializer() and not value.is_graph_input()]
    graph.inputs.extend(fed)
    if any(decides_shapes(value, model.opset_imports) for value in fed):
        if folded:
            # What was folded may have followed from the value of a target.
            return _run_backward(request, trusting=trusting, folding=False)
        infer_proven_shapes(model)
    if not set(outputs) <= set(graph.outputs) and unknown_ranks(graph, outputs):
        infer_further_shapes(model, outputs)
    proven = {value.name or "": value.shape for value in (*targets, *outputs)}
    scalars = {v.name for v in outputs if v.shape is None and declared.ranks.get(v) == 0}
    if trusting:
        assume_ranks(model, _unproven_ranks(model, source, declared, outputs, feeds), outputs)
    names = [[value.name or "" for value in values] for values in (targets, outputs)]
    fed_names = {value.name for value in fed}
    if not request.as_written:
        model = fold_normalizations(model, *names)
    model = expand_unsupported(model, *names)
    graph, values = model.graph, values_by_name(model.graph)
    targets, outputs = ([values[name] for name in group] for group in names)
    op = Recorder(model.opset_imports[""], Names.of(model))
    backward = BackwardPass(op, list(graph), targets)
    for value in outputs:
        shape = proven[value.name or ""]
        if len(outputs) == 1 and _is_scalar(shape, value.name in scalars):
            backward.seed(value, _one(op, value, shape is not None))
        else:
            seed = ir.Value(name=op.names.fresh(f"{value.name}_grad"), type=value.type, shape=shape)
            graph.inputs.append(seed)
            backward.seed(value, _checked(op, seed, value))
    # Reserved here, before the backward pass records other values under these names.
    results = [op.names.fresh(f"{value.name}_grad") for value in targets]
    # Inputs without a default come first.
    graph.inputs[:] = sorted(graph.inputs, key=lambda value: value.name in fed_names)
    backward.run()
    # No warning for second derivatives: those of piecewise linear functions are zero, as expected.
    stopped = None if is_built(source) else describe_stops(backward, list(graph), targets, outputs)
    return BackwardRun(
        model,
        backward,
        targets,
        outputs,
        results,
        proven,
        declared,
        dimensions,
        stopped,
        partial,
        trusting,
        folding,
    )


def _opened(request: Request) -> ir.Model:
    """Return the model after the passes that need no shapes."""
    wrt, of = request.wrt, request.of
    model = separate_targets(read(request.source), wrt)
    model = inline(model, lambda function: not is_body(function))
    refuse_integers(model, of)
    # A list of known length decides Ifs, and a branch that is taken may read known elements.
    model = run(model, *OPENING, *request.begin, resolve_sequences, fold_ifs, resolve_sequences, sort)
    return drop_whole_slices(model, {*(wrt or ()), *(of or ())})


def _take_ranks_of_feeds(model: ir.Model, feeds: Feeds | None) -> None:
    """Give inputs without a declared rank that of what is fed."""
    for value in model.graph.inputs:
        seen = None if feeds is None else feeds.get(value.name or "")
        if seen is not None and value.shape is None and isinstance(value.type, ir.TensorType):
            # onnxruntime refuses other feeds than declared.
            value.shape = ir.Shape([None] * np.ndim(seen))


def _unproven_ranks(
    model: ir.Model,
    source: onnx.ModelProto,
    declared: Declared,
    outputs: Sequence[ir.Value],
    feeds: Feeds | None,
) -> dict[ir.Value, tuple[int, str]]:
    """Return ranks for values without one, each with its source; the last of several sources counts."""
    values = unknown_ranks(model.graph, outputs)
    ranks = {value: (rank, "declared") for value, rank in declared.ranks.items()}
    transposed = transposed_ranks(model, [*model.graph.outputs, *outputs])
    ranks |= {value: (rank, "transposed") for value, rank in transposed.items()}
    if values:
        told = ask_onnxruntime(model, source, values)
        ranks |= {value: (rank, "inferred") for value, rank in told.items()}
    if values and feeds is not None:
        seen = see_ranks(model, source, feeds, values)
        ranks |= {value: (rank, "seen") for value, rank in seen.items()}
    return ranks


def build(
    source: onnx.ModelProto,
    wrt: Sequence[str] | None,
    of: Sequence[str] | None,
    straight_through: bool = True,
    feeds: Feeds | None = None,
) -> tuple[onnx.ModelProto, str | None, Sequence[str]]:
    """Return the model with gradients, the text of a StoppedGradientWarning or None, and other warnings."""
    model, ran = build_opened(source, wrt, of, straight_through, feeds, finish=(attach,))
    return write(model, source), ran.stopped, ran.partial


def build_opened(
    source: onnx.ModelProto,
    wrt: Sequence[str] | None,
    of: Sequence[str] | None,
    straight_through: bool = True,
    feeds: Feeds | None = None,
    *,
    begin: Sequence[Pass] = (),
    finish: Sequence[Pass] = (),
) -> tuple[ir.Model, BackwardRun]:
    """Return the model with gradients as its last outputs, in memory, and the run of the backward pass.

    `begin` are passes that follow the opening ones. `finish` are the last passes, which bring gradient nodes
    into the form in which the model is written.
    """
    request = Request(source, wrt, of, straight_through, feeds, begin)
    ran = run_backward(request)
    try:
        return _assemble(ran, finish), ran
    except NodeError:
        if ran.trusting:
            raise
        # The body of an operator needs a rank that cannot be inferred.
        ran = _run_again(request, ran)
        return _assemble(ran, finish), ran


def _assemble(ran: BackwardRun, finish: Sequence[Pass]) -> ir.Model:
    """Add the recorded nodes to the graph, with the gradients as outputs, and run the final passes."""
    model, backward, targets = ran.model, ran.backward, ran.targets
    graph, op = model.graph, backward.op
    if backward.failures:
        raise UnsupportedGradientError(list_failures(backward.failures, model.opset_imports))
    results: list[ir.Value] = []
    taken: set[ir.Value] = set()
    for value, name in zip(targets, ran.results, strict=True):
        results.append(_result(backward, value, name, taken))
        taken.add(results[-1])
        results[-1].shape = ran.proven[value.name or ""]
    graph.extend(op.nodes)
    for node in all_nodes(graph):
        model.opset_imports.setdefault(node.domain, 1)
    graph.outputs.extend(results)
    model = run(
        model,
        sort,
        deduplicate,
        remove_unused,
        lambda model: complete(model, built=True),
        state_pool_sizes,
        *finish,
    )
    ran.declared.restore_borders()
    forget_dimensions(model, ran.dimensions)
    names = ([value.name or "" for value in values] for values in (targets, ran.outputs))
    model.metadata_props.update(describe_build(*names))
    return model


def exposed(source: onnx.ModelProto, wrt: Sequence[str], of: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of the model with `of` among the outputs and the weights in `wrt` as initializers."""
    model = read(source)
    infer_types(model)
    find_targets(model, wrt, source)
    values = values_by_name(model.graph)
    outputs = set(model.graph.outputs)
    model.graph.outputs.extend(values[name] for name in of if values[name] not in outputs)
    return write(model, source)


def _is_scalar(proven: ir.Shape | None, declared: bool) -> bool:
    return declared if proven is None else len(proven) == 0


def _one(op: Recorder, value: ir.Value, proven: bool) -> ir.Value:
    """Return the seed 1 of a scalar output; if its rank is not proven, it is checked at run time."""
    assert value.dtype is not None
    with op.scoped(f"{value.name}_grad"), op.checking(f"{value.name} output"):
        one = op.constant(np.array(1.0, value.dtype.numpy()))
        if proven:
            return one
        # Of an unknown shape to onnxruntime, which would otherwise compute with it before the check fails.
        full = op.Expand(one, op.Shape(value))
        what = f"a scalar, because the model declares {value.name} as one; declare its real shape instead"
        return op.require(full, [op.Shape(op.Shape(value))], what)


def _checked(op: Recorder, seed: ir.Value, value: ir.Value) -> ir.Value:
    """Return the seed, checked to have the shape of its value; one that broadcasts gives wrong gradients."""
    if seed.shape is not None and seed.shape.is_static():
        # onnxruntime itself compares the shape of a feed with a static shape.
        return seed
    with op.scoped(f"{seed.name}"), op.checking(f"{seed.name} input"):
        return op.require_shape(seed, value, f"the shape of {value.name}")


def _result(backward: BackwardPass, value: ir.Value, name: str, others: Set[ir.Value]) -> ir.Value:
    """Return the gradient of a target under the given name; zeros if there is none."""
    op = backward.op
    grad = backward.total(value)
    with op.scoped(f"{value.name}_grad"):
        if grad is None:
            grad = op.full_like(value, 0.0)
        producer = grad.producer()
        if producer is None or producer.graph is not None or grad in others:
            # The tensor is also the gradient of another target, or belongs to the forward graph.
            grad = op.copy(grad)
    grad.name, grad.type = name, value.type
    return grad
