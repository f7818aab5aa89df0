"""Replaces onnxruntime-training's nodes and optimizers by their translations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from ortgrad.autodiff.backward import BackwardPass
from ortgrad.autodiff.node_view import NodeView
from ortgrad.dialects.optimizers import find_optimizer
from ortgrad.dialects.training import find_translation
from ortgrad.errors import NodeError
from ortgrad.graph.gradient_nodes import put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import all_nodes
from ortgrad.passes.complete import complete


def translate_training_operators(model: ir.Model) -> ir.Model:
    """Replace every node whose operator has a translation."""
    found = [
        (node, find_translation(node.op_type, node.domain) or find_optimizer(node.op_type, node.domain))
        for node in all_nodes(model.graph)
    ]
    chosen = [(node, translation) for node, translation in found if translation is not None]
    if not chosen:
        return model
    names = Names.of(model)
    for node, translation in chosen:
        op = Recorder(model.opset_imports[""], names, f"{node.name or node.outputs[0].name}")
        foreign = ForeignNode(node)
        try:
            with op.arithmetic():
                results = translation(op, foreign)
        except NodeError as error:
            raise NodeError(f"{node.op_type} node {node.name!r}: {error}") from error
        values = [results] if isinstance(results, ir.Value) else results
        put_in_place(node, foreign.computed_again, op, values)
    return complete(model)


class ForeignNode(NodeView):
    """The argument of a translation: a node to be replaced."""

    def __init__(self, node: ir.Node) -> None:
        super().__init__(node, {name: attribute.value for name, attribute in node.attributes.items()})
        # Forward nodes that have to be added because the gradients read their outputs.
        self.computed_again: list[ir.Node] = []

    def attribute(self, name: str, default: Any = None) -> Any:
        found = super().attribute(name, default)
        if found is None:
            raise NodeError(f"attribute {name!r} is missing")
        return found

    def gradients(self, op: Recorder, forward: str, operands: Iterable[int]) -> list[ir.Value | None]:
        """Apply the rule of the operator `forward` to the inputs at `operands`; input 0 is dY."""
        operands = list(operands)
        inputs = [self.optional(i) for i in operands]
        name = op.name(forward)
        node = ir.Node("", forward, inputs, self.node.attributes.values(), name=name)
        dy = self.input(0)
        output = node.outputs[0]
        output.name, output.type, output.shape = name, dy.type, dy.shape
        targets = [value for i, value in enumerate(inputs) if value is not None and self.has_output(i)]
        backward = BackwardPass(op, [node], targets)
        backward.seed(output, dy)
        backward.run()
        if backward.failures:
            raise NodeError(backward.failures[0].reason)
        if output.uses():
            self.computed_again.append(node)
        return [None if value is None else backward.total(value) for value in inputs]
