"""The backward pass: walk the nodes once in reverse and let their rules record the gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortgrad.bodies import Ops
from ortgrad.errors import NodeError
from ortgrad.gradient import Node, UnsupportedError, find_rule
from ortgrad.registry import find_operator

FLOAT_TYPES = frozenset([ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])


@dataclass(frozen=True)
class Failure:
    """A node on the path that cannot be differentiated."""

    node: ir.Node
    reason: str


def dependencies(node: ir.Node) -> list[ir.Value]:
    """The values that a node reads, those that its subgraphs capture included."""
    found = [value for value in node.inputs if value is not None]
    for graph in subgraphs(node):
        found += captured_values(graph)
    return found


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs in a node's attributes."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs += attribute.as_graphs()
    return graphs


def captured_values(graph: ir.Graph) -> list[ir.Value]:
    """What the nodes of a subgraph (and its outputs) read from outside of it."""
    own: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    found: dict[ir.Value, None] = {}
    for node in graph:
        found.update((value, None) for value in dependencies(node) if value not in own)
        own.update(node.outputs)
    found.update((value, None) for value in graph.outputs if value not in own)
    return list(found)


def active_values(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """The floating-point values that depend on the targets, the targets included."""
    active = set(targets)
    for node in nodes:
        rule = find_rule(node.op_type, node.domain)
        if rule is not None and rule.function is None:
            continue
        if any(value in active for value in dependencies(node)):
            active.update(v for v in node.outputs if v.dtype is None or v.dtype in FLOAT_TYPES)
    return active


class BackwardPass:
    """Gradients by value, while they grow from the outputs towards the targets.

    `op` records the nodes; `nodes` are the forward nodes of one graph in topological order. Gradients
    that are in `outside`, because a graph around this one computes them, keep their names.
    """

    def __init__(
        self,
        op: Ops,
        nodes: Sequence[ir.Node],
        targets: Sequence[ir.Value],
        outside: Iterable[ir.Value] = (),
    ) -> None:
        self.op = op
        self.failures: list[Failure] = []
        # What was recorded for each node that was visited, in the order of the visits.
        self.visits: list[tuple[ir.Node, list[ir.Node]]] = []
        self._nodes = nodes
        self._active = active_values(nodes, targets)
        self._outside = set(outside)
        self._contributions: dict[ir.Value, list[ir.Value]] = {}
        self._named: set[ir.Value] = set()
        self._inside = f"{op.scope}/" if op.scope else ""

    def seed(self, value: ir.Value, grad: ir.Value) -> None:
        """Start from the gradient of an output."""
        self._contributions.setdefault(value, []).append(grad)

    def run(self) -> None:
        """Visit every node that lies between a target and a seed."""
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
            self.op.scope = f"{self._inside}{name}_grad"
            try:
                self._visit(node, grads)
            except (UnsupportedError, NodeError) as error:
                self.failures.append(Failure(node, str(error)))
                # Go on with zeros, so that all that is not supported comes to light at once.
                for value in dependencies(node):
                    if value in self._active:
                        self.seed(value, self.op.full_like(value, 0.0))
            self.visits.append((node, list(self.op.nodes[recorded:])))

    def has_gradient(self, value: ir.Value) -> bool:
        """Whether anything has flowed back to a value."""
        return value in self._contributions

    def total(self, value: ir.Value) -> ir.Value | None:
        """The gradient of a value, all contributions added up; None if there are none."""
        parts = self._contributions.get(value)
        if not parts:
            return None
        name = f"{self._inside}{value.name}_grad"
        if len(parts) > 1:
            self.op.scope = name
            added = self.op.Add(*parts) if len(parts) == 2 else self.op.Sum(*parts)
            self._contributions[value] = parts = [added]
        self._name(parts[0], name)
        return parts[0]

    def _name(self, grad: ir.Value, name: str) -> None:
        """Call a gradient by its customary name, unless it has one already."""
        producer = grad.producer()
        recorded = producer is not None and producer.graph is None and grad not in self._outside
        if recorded and grad not in self._named:
            grad.name = self.op.names.fresh(name)
            self._named.add(grad)

    def _visit(self, node: ir.Node, grads: Sequence[ir.Value | None]) -> None:
        rule = find_rule(node.op_type, node.domain)
        if rule is None:
            raise UnsupportedError("there is no gradient rule for it")
        assert rule.function is not None
        attributes = attributes_of(node, self.op.opset)
        context = Node(node, self.op, grads, attributes, self._active)
        slots = rule.function(context)
        if len(slots) > len(node.inputs):
            slots = slots[: len(node.inputs)]
        for value, slot in zip(node.inputs, slots, strict=False):
            if value is not None and slot is not None and value in self._active:
                if rule.broadcasts:
                    slot = unbroadcast(self.op, slot, value, node.outputs[0])
                self.seed(value, self._like(slot, value))
        for value, slot in context.captured.items():
            if value in self._active:
                self.seed(value, self._like(slot, value))

    def _like(self, grad: ir.Value, value: ir.Value) -> ir.Value:
        """The gradient in the element type of the value it belongs to."""
        if grad.dtype is not None and value.dtype is not None and grad.dtype != value.dtype:
            return self.op.Cast(grad, to=int(value.dtype))
        return grad


def list_failures(failures: Sequence[Failure], opsets: Mapping[str, int]) -> str:
    """The text of an error that says all that cannot be differentiated."""
    lines = [f"{len(failures)} node(s) between `wrt` and `of` cannot be differentiated:"]
    for failure in failures:
        node = failure.node
        domain = node.domain or "ai.onnx"
        name = node.name or next(value.name for value in node.outputs if value.name)
        opset = opsets.get(node.domain, "unknown")
        lines.append(f"  {node.op_type} (domain {domain}, opset {opset}), node {name!r}: {failure.reason}")
    lines.append(
        "Ask for a `wrt` that does not lead through them, give them a rule with @ortgrad.gradient, "
        "or put an equivalent operator in their place."
    )
    return "\n".join(lines)


def unbroadcast(op: Ops, grad: ir.Value, value: ir.Value, output: ir.Value) -> ir.Value:
    """Sum a gradient of the shape of `output` over the axes along which `value` was stretched."""
    source, target = value.shape, output.shape
    if source is None or target is None:
        return _unbroadcast_at_run_time(op, grad, value)
    lead = len(target) - len(source)
    if lead < 0:
        raise NodeError(
            f"its output {output.name!r} of shape {target} has fewer axes than its input {value.name!r} of "
            f"shape {source}; the shapes that the model declares contradict each other"
        )
    axes = list(range(lead))
    for i, dim in enumerate(source):
        other = target[lead + i]
        if isinstance(dim, int) and dim == 1:
            # Summing over an axis that is 1 in the output as well does no harm.
            if not (isinstance(other, int) and other == 1):
                axes.append(lead + i)
        elif not isinstance(dim, int) and (dim.value is None or dim != other):
            # It may be 1 at run time.
            return _unbroadcast_at_run_time(op, grad, value)
    if not axes:
        return grad
    if axes == list(range(lead)):
        return op.ReduceSum(grad, axes, keepdims=0)
    summed = op.ReduceSum(grad, axes, keepdims=1)
    return op.Squeeze(summed, list(range(lead))) if lead else summed


def _unbroadcast_at_run_time(op: Ops, grad: ir.Value, value: ir.Value) -> ir.Value:
    shape, full = op.shape(value), op.Shape(grad)
    # The value's shape with ones in front, as long as the gradient's.
    missing = op.Sub(op.Shape(full), op.Shape(shape))
    aligned = op.Concat(op.Expand(np.array([1], np.int64), missing), shape, axis=0)
    axes = op.Squeeze(op.NonZero(op.And(op.Equal(aligned, [1]), op.Not(op.Equal(full, [1])))), [0])
    return op.Reshape(op.ReduceSum(grad, axes, keepdims=1, noop_with_empty_axes=1), shape, allowzero=1)


def attributes_of(node: ir.Node, opset: int) -> dict[str, Any]:
    """The node's attributes as Python data, the schema's defaults filled in."""
    found = dict(_default_attributes(node.op_type, node.domain, opset))
    for attribute in node.attributes.values():
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            value = value.numpy()
        found[attribute.name] = list(value) if isinstance(value, tuple) else value
    return found


@functools.cache
def _default_attributes(op_type: str, domain: str, opset: int) -> dict[str, Any]:
    operator = find_operator(op_type, domain)
    if operator is not None:
        return {name: a.default for name, a in operator.attributes.items() if a.default is not None}
    version = opset if domain in ("", "ai.onnx") else 1
    if not onnx.defs.has(op_type, version, domain):
        return {}
    defaults = {}
    for name, attribute in onnx.defs.get_schema(op_type, version, domain).attributes.items():
        if attribute.default_value.type:
            value = onnx.helper.get_attribute_value(attribute.default_value)
            defaults[name] = _decoded(value)
    return defaults


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value
