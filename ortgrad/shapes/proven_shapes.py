"""Replaces declared shapes by those that follow from the inputs and constants of a model.

Exporters declare shapes of outputs and intermediate values that are wrong at run time: the batch size of the
example input, a rank from before an optimization. onnxruntime only warns about them, but a gradient that
relies on one is wrong. The declared shapes of inputs can be trusted: onnxruntime refuses other feeds. So can
ranks without which a node does not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes, dependencies, is_operator, nodes_before, subgraphs
from ortgrad.shapes.defined_types import infer_defined_types
from ortgrad.shapes.loop_shapes import infer_loop_shapes
from ortgrad.shapes.required_ranks import apply_required_ranks

# Unproven ranks, and their source: "declared", "transposed", "inferred" (by onnxruntime) or "seen".
Ranks = Mapping[ir.Value, tuple[int, str]]


@dataclass
class Declared:
    """Ranks and shapes that a file declares, which are not proven."""

    ranks: dict[ir.Value, int] = field(default_factory=dict)
    # Bodies of Loops and Scans with the declared shapes of their inputs and outputs, in order.
    borders: list[tuple[ir.Graph, list[ir.Shape | None], list[ir.Shape | None]]] = field(default_factory=list)

    def restore_borders(self) -> None:
        """Give inputs and outputs of loops' bodies their declared shapes, where no shape is known.

        onnxruntime needs the ranks of the outputs of a Scan's body, and those of a Loop that runs no
        iteration; it accepts the declared ones. It also believes what the branches of an If declare, which
        nothing needs and which may be wrong.
        """
        for graph, inputs, outputs in self.borders:
            for values, shapes in ((graph.inputs, inputs), (graph.outputs, outputs)):
                # A rule may have added outputs at the end.
                for value, shape in zip(values, shapes, strict=False):
                    if value.shape is None and value.type is not None:
                        value.shape = shape


def infer_proven_shapes(model: ir.Model) -> Declared:
    """Replace all shapes except those of the model's inputs by inferred ones; returns what was declared."""
    declared = Declared()
    values: list[ir.Value] = []
    for node in all_nodes(model.graph):
        values += node.outputs
        for graph in subgraphs(node):
            # The first two inputs of a Loop's body keep their shapes, because onnxruntime needs them.
            values += list(graph.inputs)[2 if node.op_type == "Loop" else 0 :]
            if node.op_type != "If":
                declared.borders.append(
                    (graph, [v.shape for v in graph.inputs], [v.shape for v in graph.outputs])
                )
    for value in values:
        if value.shape is not None and isinstance(value.type, ir.TensorType):
            declared.ranks[value] = len(value.shape)
        value.shape = None
    for node in all_nodes(model.graph):
        if is_operator(node, "Scan"):
            _keep_ranks(node, declared.ranks)
    infer_further_shapes(model)
    return declared


def infer_further_shapes(model: ir.Model, outputs: Iterable[ir.Value] = ()) -> None:
    """Infer shapes from those that are proven, in place.

    Nodes on which the outputs of the model or the given values depend prove the ranks that they require.
    """
    results = [*model.graph.outputs, *outputs]
    while True:
        infer_defined_types(model)
        infer_loop_shapes(model)
        if not apply_required_ranks(model, results):
            return


def _keep_ranks(scan: ir.Node, ranks: Mapping[ir.Value, int]) -> None:
    """Give the inputs and outputs of a Scan's body the ranks that the file declares.

    onnxruntime allocates the results by these ranks, so they are right in every file that runs.
    """
    body = scan.attributes["body"].as_graph()
    states = len(body.inputs) - scan.attributes["num_scan_inputs"].as_int()
    # A state keeps its shape, so the rank of its input or output is enough.
    pairs = list(zip(body.inputs[:states], body.outputs, strict=False))
    others = (*body.inputs[states:], *body.outputs[states:])
    for value, other in (*pairs, *((b, a) for a, b in pairs), *((v, v) for v in others)):
        rank = ranks.get(value, ranks.get(other))
        if rank is not None and value.shape is None and isinstance(value.type, ir.TensorType):
            value.shape = ir.Shape([None] * rank)


def assume_ranks(model: ir.Model, ranks: Ranks, outputs: Sequence[ir.Value]) -> None:
    """Use the given ranks where inference finds none, and check them at run time; in place.

    After an operator that onnx does not know, or a Reshape to a computed shape, there may be no other source
    of a rank that a rule needs. If one is wrong, the check fails, so there is no wrong gradient. Sizes remain
    unknown. Only values that the outputs depend on are considered.
    """
    needed = list(_needed(model.graph, outputs))
    names = Names.later(model)
    checked: set[ir.Value] = set()
    while True:
        pending = {v for v in needed if v.shape is None and v in ranks and v.uses()} - checked
        # The shapes of later values may be inferred from the first ones.
        first = [v for v in needed if v in pending and not _follows(v, pending, model.opset_imports)]
        if not first:
            return
        for value in first:
            _check(value, *ranks[value], Recorder(model.opset_imports[""], names))
        checked.update(first)
        infer_further_shapes(model, outputs)


def checked_shape(op: Recorder, value: ir.Value, rank: int) -> ir.Value:
    """Return the shape of a value; a run fails if the value has another rank."""
    # Without allowzero, a rank of 0 would mean that the length is kept.
    return op.Reshape(op.Shape(value), [rank], allowzero=1)


def unknown_ranks(graph: ir.Graph, outputs: Iterable[ir.Value]) -> list[ir.Value]:
    """Return the values of unknown rank that the outputs depend on, without the values of subgraphs."""
    return [v for v in _needed(graph, outputs) if v.shape is None and v.uses() and v.graph is graph]


def _needed(graph: ir.Graph, outputs: Iterable[ir.Value]) -> Iterator[ir.Value]:
    """Yield the values of a graph and its subgraphs that the outputs depend on, in topological order."""
    for node in reversed(nodes_before(graph, outputs)):
        for inner in subgraphs(node):
            yield from inner.inputs
            yield from _needed(inner, inner.outputs)
        yield from node.outputs


def _follows(value: ir.Value, pending: set[ir.Value], opsets: dict[str, int]) -> bool:
    """Return whether inference may find the shape of a value from those of pending values."""
    node = value.producer()
    if node is None or not onnx.defs.has(node.op_type, opsets.get(node.domain, 1), node.domain):
        return False
    inner = (v for graph in subgraphs(node) for v in graph.outputs)
    return any(v in pending for v in (*dependencies(node), *inner))


def _check(value: ir.Value, rank: int, source: str, op: Recorder) -> None:
    """Replace all uses of the value by a copy whose computation fails if the value has another rank."""
    node, graph = value.producer(), value.graph
    assert isinstance(graph, ir.Graph)
    users = list(value.uses())
    with op.scoped(f"{value.name}/{source}_with_{rank}_dimensions"):
        copy = op.Reshape(value, checked_shape(op, value, rank), allowzero=1)
    copy.type, copy.shape = value.type, ir.Shape([None] * rank)
    for use in users:
        use.node.replace_input_with(use.idx, copy)
    if node is not None:
        graph.insert_after(node, op.nodes)
    else:
        graph.insert_before(graph[0], op.nodes)
