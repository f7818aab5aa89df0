"""Shapes that follow from the inputs and constants of a model, instead of what the file says about them.

Exporters write shapes of outputs and of values in between that the run contradicts: the batch size of the
example, a rank from before an optimisation. onnxruntime only warns of them, but a gradient that relies on
one is wrong. What the file says of its inputs is true: onnxruntime refuses anything else that is fed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from ortgrad.graph.inference import infer_types
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import dependencies, subgraphs
from ortgrad.passes.loop_shapes import infer_loop_shapes


@dataclass
class Declared:
    """What a file says of shapes and nothing proves."""

    ranks: dict[ir.Value, int] = field(default_factory=dict)
    # By subgraph, for its inputs and outputs in their order.
    borders: list[tuple[ir.Graph, list[ir.Shape | None], list[ir.Shape | None]]] = field(default_factory=list)

    def restore_borders(self) -> None:
        """Give inputs and outputs of subgraphs what the file says of them, if nothing else is known.

        onnxruntime wants to know the rank of what a Scan puts out, and has loaded the file with these.
        """
        for graph, inputs, outputs in self.borders:
            for values, shapes in ((graph.inputs, inputs), (graph.outputs, outputs)):
                # A rule may have added outputs at the end.
                for value, shape in zip(values, shapes, strict=False):
                    if value.shape is None and value.type is not None:
                        value.shape = shape


def infer_proven_shapes(model: ir.Model) -> Declared:
    """Replace all shapes but those of the model's inputs by what inference finds, in place."""
    declared = Declared()
    values: list[ir.Value] = []
    for node in model.graph.all_nodes():
        values += node.outputs
        for graph in subgraphs(node):
            # onnxruntime wants to know those of the number and the condition of an iteration.
            values += list(graph.inputs)[2 if node.op_type == "Loop" else 0 :]
            declared.borders.append(
                (graph, [value.shape for value in graph.inputs], [value.shape for value in graph.outputs])
            )
    for value in values:
        if value.shape is not None and isinstance(value.type, ir.TensorType):
            declared.ranks[value] = len(value.shape)
        value.shape = None
    for node in model.graph.all_nodes():
        if node.op_type == "Scan" and node.domain in ("", "ai.onnx"):
            _keep_ranks(node, declared.ranks)
    infer_types(model)
    infer_loop_shapes(model)
    return declared


def _keep_ranks(scan: ir.Node, ranks: Mapping[ir.Value, int]) -> None:
    """Give what a Scan's body takes and puts out the number of dimensions that the file declares.

    onnxruntime allocates the results by it, so it is true of every file that runs.
    """
    body = scan.attributes["body"].as_graph()
    states = len(body.inputs) - scan.attributes["num_scan_inputs"].as_int()
    # A state keeps its shape, so one of the two says enough.
    pairs = list(zip(body.inputs[:states], body.outputs, strict=False))
    for value, other in (*pairs, *((b, a) for a, b in pairs), *((v, v) for v in body.inputs[states:])):
        rank = ranks.get(value, ranks.get(other))
        if rank is not None and value.shape is None and isinstance(value.type, ir.TensorType):
            value.shape = ir.Shape([None] * rank)


def assume_ranks(model: ir.Model, declared: Declared, outputs: Iterable[ir.Value]) -> None:
    """Let ranks that the file declares count where inference finds none, with a check at run time.

    Behind an operator that onnx does not know, or a Reshape whose target is computed, there may be no other
    way to know what a rule needs. If the file is wrong, the check fails, so there is no wrong gradient. Sizes
    are left open. Only what the outputs depend on is looked at, in place.
    """
    needed = list(_needed(model.graph, outputs))
    names: Names | None = None
    checked: set[ir.Value] = set()
    while True:
        pending = {v for v in needed if v.shape is None and v in declared.ranks and v.uses()} - checked
        # What comes later may follow from the first ones.
        first = [v for v in needed if v in pending and not _follows(v, pending, model.opset_imports)]
        if not first:
            return
        names = names or Names.of(model)
        for value in first:
            _check(value, declared.ranks[value], Recorder(model.opset_imports[""], names))
        checked.update(first)
        infer_types(model)
        infer_loop_shapes(model)


def checked_shape(op: Recorder, value: ir.Value, rank: int) -> ir.Value:
    """The shape of a value; running it fails if the value has another rank."""
    # A zero would otherwise mean any length.
    return op.Reshape(op.Shape(value), [rank], allowzero=1)


def _needed(graph: ir.Graph, outputs: Iterable[ir.Value]) -> Iterator[ir.Value]:
    """The values of a graph and its subgraphs on which some values depend, in an order of computation."""
    needed, nodes = set(outputs), []
    for node in reversed(graph):
        if any(value in needed for value in node.outputs):
            needed.update(dependencies(node))
            nodes.append(node)
    for node in reversed(nodes):
        for inner in subgraphs(node):
            yield from inner.inputs
            yield from _needed(inner, inner.outputs)
        yield from node.outputs


def _follows(value: ir.Value, pending: set[ir.Value], opsets: dict[str, int]) -> bool:
    """Whether inference may find the shape once it has found those of other values."""
    node = value.producer()
    if node is None or not onnx.defs.has(node.op_type, opsets.get(node.domain, 1), node.domain):
        return False
    inner = (v for graph in subgraphs(node) for v in graph.outputs)
    return any(v in pending for v in (*dependencies(node), *inner))


def _check(value: ir.Value, rank: int, op: Recorder) -> None:
    """Have everything read a copy of the value that is there only if the value has that rank."""
    node, graph = value.producer(), value.graph
    assert isinstance(graph, ir.Graph)
    users = list(value.uses())
    with op.scoped(f"{value.name}/declared_with_{rank}_dimensions"):
        copy = op.Reshape(value, checked_shape(op, value, rank), allowzero=1)
    copy.type, copy.shape = value.type, ir.Shape([None] * rank)
    for use in users:
        use.node.replace_input_with(use.idx, copy)
    if node is not None:
        graph.insert_after(node, op.nodes)
    else:
        graph.insert_before(graph[0], op.nodes)
