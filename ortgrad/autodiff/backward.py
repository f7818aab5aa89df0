"""The backward pass: visits the nodes once in reverse topological order and applies their rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortgrad.autodiff.definitions import NO_RULE
from ortgrad.autodiff.integers import float_copy, quantized_outputs
from ortgrad.autodiff.rules import ForwardNode, Gradients, Rule, UnsupportedError, find_rule
from ortgrad.autodiff.unbroadcast import unbroadcast
from ortgrad.autodiff.unchosen import Selections
from ortgrad.errors import NodeError
from ortgrad.graph.attributes import attributes_of
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import dependencies, is_integer, subgraphs

# Under this key a node's metadata says why its definition could not be put in its place.
REFUSED = "ortgrad.refused"


@dataclass(frozen=True)
class Failure:
    """A node between target and seed that cannot be differentiated."""

    node: ir.Node
    reason: str


def active_values(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Return the values that depend on the targets and may have a gradient, including the targets.

    These are floating-point values, and integers that stand for such numbers: the outputs of quantizing
    operators (whose rules have `scales`), and what is computed from them.
    """
    active = set(targets)
    for node in nodes:
        rule = find_rule(node.op_type, node.domain)
        if rule is not None and rule.function is None:
            continue
        if not any(value in active for value in dependencies(node)):
            continue
        first = node.outputs[:1]
        if rule is not None and rule.scales is not None and (is_integer(first[0]) or first == node.outputs):
            # Other outputs are scales and zero points of dynamic quantization, which count as constants.
            active.update(first)
        else:
            active.update([v for v in node.outputs if not is_integer(v)])
            active.update(quantized_outputs(node, active))
            active.update(_quantized_in_subgraphs(node, active))
    return active


def _quantized_in_subgraphs(node: ir.Node, active: set[ir.Value]) -> Iterator[ir.Value]:
    """Yield the integer outputs that may have a gradient inside of the node's subgraphs."""
    integers = [is_integer(value) for value in node.outputs]
    for graph in subgraphs(node) if any(integers) else ():
        inside = active_values(graph, [*active, *(v for v in graph.inputs if not is_integer(v))])
        # The first output of a Loop's body is the condition.
        results = graph.outputs[1:] if node.op_type == "Loop" else graph.outputs
        for value, result, integer in zip(node.outputs, results, integers, strict=False):
            if integer and result in inside:
                yield value


class BackwardPass:
    """Accumulates the gradient of every value, from the outputs to the targets.

    `op` records the nodes; `nodes` are the forward nodes of one graph in topological order. The gradients in
    `outside` belong to an outer graph and keep their names.
    """

    def __init__(
        self,
        op: Recorder,
        nodes: Sequence[ir.Node],
        targets: Sequence[ir.Value],
        outside: Iterable[ir.Value] = (),
    ) -> None:
        self.op = op
        self.failures: list[Failure] = []
        # The visited nodes in order, each with the nodes that were recorded for it.
        self.visits: list[tuple[ir.Node, list[ir.Node]]] = []
        self._nodes = nodes
        self._active = active_values(nodes, targets)
        self._outside = set(outside)
        self._contributions: dict[ir.Value, list[ir.Value]] = {}
        self._named: set[ir.Value] = set()
        self._selections = Selections(op)
        self._inside = f"{op.scope}/" if op.scope else ""

    def seed(self, value: ir.Value, grad: ir.Value) -> None:
        """Add a contribution to the gradient of a value; for an output, this is the seed."""
        self._contributions.setdefault(value, []).append(grad)

    def run(self) -> None:
        """Visit every node between a target and a seed."""
        for node in reversed(self._nodes):
            if not any(value in self._contributions for value in node.outputs):
                continue
            if not any(value in self._active for value in dependencies(node)):
                continue
            rule = find_rule(node.op_type, node.domain)
            if rule is not None and rule.function is None:
                continue
            outputs, recorded = list(node.outputs), len(self.op.nodes)
            grads = [self.total(value) for value in outputs]
            name = node.name or next(value.name for value in outputs if value.name)
            with self.op.scoped(f"{self._inside}{name}_grad"):
                try:
                    self._visit(node, grads)
                except (UnsupportedError, NodeError) as error:
                    self.failures.append(Failure(node, str(error)))
                    # Continue with zeros, so that all unsupported nodes are reported at once.
                    for value in dependencies(node):
                        if value in self._active:
                            self.seed(value, self.op.zeros_for(value))
            self.visits.append((node, list(self.op.nodes[recorded:])))

    def has_gradient(self, value: ir.Value) -> bool:
        """Return whether the value has received a gradient."""
        return value in self._contributions

    def total(self, value: ir.Value) -> ir.Value | None:
        """Return the gradient of a value, the sum of all contributions; None if there are none."""
        parts = self._contributions.get(value)
        if not parts:
            return None
        name = f"{self._inside}{value.name}_grad"
        if len(parts) > 1:
            with self.op.scoped(name):
                parts = [self.op.sum(parts)]
            self._contributions[value] = parts
        self._label(parts[0], value, name)
        return parts[0]

    def _label(self, grad: ir.Value, value: ir.Value, name: str) -> None:
        """Give a gradient that was recorded here a name, and the shape of its value.

        Inference may not find the shape. A gradient of several values keeps its first name.
        """
        producer = grad.producer()
        if producer is None or producer.graph is not None or grad in self._outside:
            return
        if grad not in self._named:
            grad.name = self.op.names.fresh(name)
            self._named.add(grad)
        if grad.shape is None and isinstance(value.type, ir.TensorType):
            grad.shape = value.shape

    def _visit(self, node: ir.Node, grads: Sequence[ir.Value | None]) -> None:
        rule = find_rule(node.op_type, node.domain)
        if rule is None:
            raise UnsupportedError(node.meta.get(REFUSED, NO_RULE))
        assert rule.function is not None
        attributes = attributes_of(node, self.op.opset)
        context = ForwardNode(node, self.op, grads, attributes, self._active)
        function = rule.function
        if rule.scales is None and any(v in self._active and is_integer(v) for v in _values(node)):
            function = _integer_gradient
        with self.op.arithmetic():
            returned = function(context)
        gradients = [returned] if returned is None or isinstance(returned, ir.Value) else returned
        for i, (value, grad) in enumerate(zip(node.inputs, gradients, strict=False)):
            if value is not None and grad is not None and value in self._active:
                self.seed(value, self._contribution(node, rule, i, grads[0], grad))
        for value, grad in context.captured.items():
            if value in self._active:
                self.seed(value, self._like(grad, value))

    def _contribution(
        self, node: ir.Node, rule: Rule, i: int, dy: ir.Value | None, grad: ir.Value
    ) -> ir.Value:
        """Return what a rule has recorded for the i-th input in the input's shape and element type."""
        value = node.inputs[i]
        assert value is not None
        choice = self._selections.behind(node, rule, i, dy, grad)
        grad = self._selections.guard(node, rule, i, grad, choice)
        if rule.broadcasts:
            summed = unbroadcast(self.op, grad, value, node.outputs[0])
            choice, grad = choice if summed is grad else None, summed
        grad = self._like(grad, value)
        self._selections.remember(grad, choice)
        return grad

    def _like(self, grad: ir.Value, value: ir.Value) -> ir.Value:
        """Return the gradient, cast to the element type of its value if necessary.

        The gradient of an integer value is float.
        """
        wanted = ir.DataType.FLOAT if is_integer(value) else value.dtype
        if grad.dtype is not None and wanted is not None and grad.dtype != wanted:
            return self.op.Cast(grad, to=int(wanted))
        return grad


def _values(node: ir.Node) -> list[ir.Value]:
    return [*dependencies(node), *node.outputs]


def differentiate(
    node: ForwardNode, results: Sequence[ir.Value], inputs: Gradients | None = None
) -> Gradients:
    """Return the gradients of a node's inputs through a definition of its outputs.

    `results` have been recorded with `node.op`; the definition is what has been recorded between them and the
    node's inputs, or those given in their place. Only what the gradients need becomes part of the model.
    """
    starts = node.inputs if inputs is None else inputs
    targets = {start for i, start in enumerate(starts) if start is not None and node.wants(i)}
    backward = BackwardPass(node.op, _between(starts, results), list(targets))
    for i, result in enumerate(results):
        grad = node.optional_grad(i)
        if grad is not None:
            backward.seed(result, grad)
    backward.run()
    if backward.failures:
        raise node.unsupported("; ".join(f"{f.node.op_type}: {f.reason}" for f in backward.failures))
    # A value in several places has one gradient.
    totals = {start: backward.total(start) for start in targets}
    return [None if start is None else totals.pop(start, None) for start in starts]


def _between(starts: Gradients, results: Sequence[ir.Value]) -> list[ir.Node]:
    """Return the nodes that compute the results from the given values, in topological order."""
    found: dict[ir.Node, None] = {}

    def visit(value: ir.Value | None) -> None:
        node = None if value is None or value in starts else value.producer()
        if node is not None and node not in found:
            for operand in node.inputs:
                visit(operand)
            found[node] = None

    for result in results:
        visit(result)
    return list(found)


def _integer_gradient(node: ForwardNode) -> Gradients:
    """Differentiate a node on quantized tensors as if their elements were floating-point numbers."""
    if subgraphs(node.forward):
        name = next(v.name for v in _values(node.forward) if v in node.active and is_integer(v))
        raise node.unsupported(
            f"the quantized tensor {name!r} goes into its subgraphs or comes out of them; "
            "quantize and dequantize it on the same side"
        )
    if node.op_type in ("Cast", "CastLike"):
        return [node.grad(0)]
    inputs, outputs = float_copy(node.op, node.forward)
    return differentiate(node, outputs, inputs)


def list_failures(failures: Sequence[Failure], opsets: Mapping[str, int]) -> str:
    """Return the message of an UnsupportedGradientError, which lists all failures."""
    lines = [f"{len(failures)} node(s) between `wrt` and `of` cannot be differentiated:"]
    for failure in failures:
        node = failure.node
        domain = node.domain or "ai.onnx"
        name = node.name or next(value.name for value in node.outputs if value.name)
        opset = opsets.get(node.domain, "unknown")
        lines.append(f"  {node.op_type} (domain {domain}, opset {opset}), node {name!r}: {failure.reason}")
    lines.append(
        "Choose `wrt` and `of` so that these nodes are not between them, declare a rule for them with "
        "@ortgrad.gradient, or replace them by equivalent operators."
    )
    return "\n".join(lines)
