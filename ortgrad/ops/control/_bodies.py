"""The bodies of If, Loop and Scan, to which their backward nodes are added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from ortgrad.autodiff.backward import BackwardPass
from ortgrad.autodiff.rules import ForwardNode, Gradients
from ortgrad.graph.recorder import RANDOM, Recorder
from ortgrad.graph.traversal import captured_values, release_captured


class Body:
    """A copy of a subgraph to which its backward nodes are added.

    `inputs` and `outputs` are those of the forward subgraph; `graph` has none until they are set.
    """

    def __init__(self, node: ForwardNode, graph: ir.Graph) -> None:
        _refuse_random(node, graph)
        self._node = node
        self.graph = graph.clone(allow_outer_scope_values=True)
        node.op.names.rename(self.graph)
        self.inputs = list(self.graph.inputs)
        self.outputs = list(self.graph.outputs)
        self.graph.inputs.clear()
        self.graph.outputs.clear()
        self.op = self.new_ops()

    def new_ops(self) -> Recorder:
        return self._node.op.inside(self.graph.name or "body")

    def value_like(self, value: ir.Value, name: str) -> ir.Value:
        """Return a new input for the graph, with the type and shape of another value."""
        return ir.Value(name=self.new_ops().name(name), type=value.type, shape=value.shape)

    def differentiate(
        self, seeds: Mapping[int, ir.Value], targets: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        """Return the gradients by target, given those of some outputs; targets without one are left out."""
        backward = BackwardPass(self.op, list(self.graph), targets, outside=seeds.values())
        for i, grad in seeds.items():
            backward.seed(self.outputs[i], grad)
        backward.run()
        if backward.failures:
            reasons = [f"{f.node.op_type} node {f.node.name!r}: {f.reason}" for f in backward.failures]
            raise self._node.unsupported(f"in {self.graph.name!r}, {'; '.join(reasons)}")
        totals = ((value, backward.total(value)) for value in targets)
        return {value: total for value, total in totals if total is not None}

    def close(self, outputs: Iterable[ir.Value], keep: Iterable[ir.Value] = ()) -> None:
        """Add the recorded nodes and the outputs to the graph, and remove unused nodes.

        `keep` are values that will be used later.
        """
        own: set[ir.Value] = {value for made in self.op.nodes for value in made.outputs}
        for value in outputs:
            # Each output of a graph must be the output of a different node in it.
            output = value if value in own else self.op.copy(value)
            own.discard(output)
            self.graph.outputs.append(output)
        self.graph.extend(self.op.nodes)
        kept = {*self.graph.outputs, *keep}
        for made in reversed(self.graph):
            if not any(value in kept or value.uses() for value in made.outputs):
                release_captured(made)
                self.graph.remove(made, safe=True)

    def provide(self, front: Recorder, values: Mapping[ir.Value, ir.Value]) -> None:
        """Replace values by others that `front` recorded, and add its nodes to the graph."""
        for value, other in values.items():
            other.type, other.shape = other.type or value.type, other.shape or value.shape
            ir.convenience.replace_all_uses_with(value, other)
        self.graph.extend(front.nodes)
        self.graph.sort()


def active_captures(node: ForwardNode, graphs: Iterable[ir.Graph]) -> list[ir.Value]:
    found = dict.fromkeys(value for graph in graphs for value in captured_values(graph))
    return [value for value in found if value in node.active]


def capture_unchanged(
    states: Sequence[ir.Value], results: Sequence[ir.Value], operands: Gradients
) -> dict[int, ir.Value]:
    """Let a body read the states that it does not change from outside; returns the outer values by state."""
    found: dict[int, ir.Value] = {}
    for i, (value, result, operand) in enumerate(zip(states, results, operands, strict=True)):
        known = operand is not None and (operand.shape is not None or value.shape is None)
        if operand is not None and known and _source(result) is value:
            found[i] = operand
    for i, operand in found.items():
        ir.convenience.replace_all_uses_with(states[i], operand)
    return found


def _source(value: ir.Value) -> ir.Value:
    """Return the value that `value` is a copy of, or `value` itself."""
    while (node := value.producer()) is not None:
        place, source = value.index() or 0, None
        if node.op_type == "Identity":
            source = node.inputs[0]
        elif node.op_type in ("Loop", "Scan"):
            body = node.attributes["body"].as_graph()
            first, results = (2, body.outputs[1:]) if node.op_type == "Loop" else (0, body.outputs)
            scanned = 0 if node.op_type == "Loop" else node.attributes["num_scan_inputs"].as_int()
            states = body.inputs[first : len(body.inputs) - scanned]
            if place < len(states) and _source(results[place]) is states[place]:
                source = node.inputs[first + place]
        elif node.op_type == "If":
            branches = [attribute.as_graph() for attribute in node.attributes.values()]
            sources = {_source(branch.outputs[place]) for branch in branches}
            source = sources.pop() if len(sources) == 1 else None
        if source is None:
            break
        value = source
    return value


def _refuse_random(node: ForwardNode, graph: ir.Graph) -> None:
    """Raise an error for random nodes, which would draw other numbers when the backward node runs them."""
    for inner in RecursiveGraphIterator(graph):
        idle = inner.op_type == "Dropout" and (len(inner.inputs) < 3 or inner.inputs[2] is None)
        if inner.op_type in RANDOM and not idle:
            raise node.unsupported(f"its subgraph contains the random {inner.op_type} node {inner.name!r}")
