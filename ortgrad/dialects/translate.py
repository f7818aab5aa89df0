"""Replaces onnxruntime-training's nodes by the translations in `ortgrad.dialects.training`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx_ir as ir

from ortgrad.autodiff.backward import BackwardPass
from ortgrad.dialects.training import find_translation
from ortgrad.errors import NodeError
from ortgrad.graph.gradient_nodes import put_in_place
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import Recorder
from ortgrad.passes.complete import complete


def translate_training_operators(model: ir.Model) -> ir.Model:
    """Replace every node whose operator has a translation."""
    found = [(node, find_translation(node.op_type, node.domain)) for node in model.graph.all_nodes()]
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


class ForeignNode:
    """The argument of a translation: a node to be replaced."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node
        # Forward nodes that have to be added because the gradients read their outputs.
        self.computed_again: list[ir.Node] = []

    def input(self, i: int) -> ir.Value:
        value = self.optional(i)
        if value is None:
            raise NodeError(f"input {i} is missing")
        return value

    def optional(self, i: int) -> ir.Value | None:
        return self.node.inputs[i] if i < len(self.node.inputs) else None

    def wants(self, i: int) -> bool:
        return i < len(self.node.outputs) and bool(self.node.outputs[i].name)

    @property
    def attributes(self) -> dict[str, Any]:
        return {name: attribute.value for name, attribute in self.node.attributes.items()}

    def attribute(self, name: str, default: Any = None) -> Any:
        found = self.node.attributes.get(name)
        if found is None and default is None:
            raise NodeError(f"attribute {name!r} is missing")
        return default if found is None else found.value

    def gradients(self, op: Recorder, forward: str, operands: Iterable[int]) -> list[ir.Value | None]:
        """Apply the rule of the operator `forward` to the inputs at `operands`; input 0 is dY."""
        operands = list(operands)
        inputs = [self.optional(i) for i in operands]
        name = op.name(forward)
        node = ir.Node("", forward, inputs, self.node.attributes.values(), name=name)
        dy = self.input(0)
        output = node.outputs[0]
        output.name, output.type, output.shape = name, dy.type, dy.shape
        targets = [value for i, value in enumerate(inputs) if value is not None and self.wants(i)]
        backward = BackwardPass(op, [node], targets)
        backward.seed(output, dy)
        backward.run()
        if backward.failures:
            raise NodeError(backward.failures[0].reason)
        if output.uses():
            self.computed_again.append(node)
        return [None if value is None else backward.total(value) for value in inputs]
