"""A node as rules, definitions and translations see it: its inputs, outputs and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ortgrad.errors import NodeError, unknown_rank
from ortgrad.graph.lazy import ir


class NodeView:
    """A node, with its attributes as Python data."""

    def __init__(self, node: ir.Node, attributes: Mapping[str, Any]) -> None:
        self.node = node
        self.attributes = attributes

    @property
    def op_type(self) -> str:
        return self.node.op_type

    @property
    def inputs(self) -> Sequence[ir.Value | None]:
        return self.node.inputs

    @property
    def outputs(self) -> Sequence[ir.Value]:
        return self.node.outputs

    def input(self, i: int) -> ir.Value:
        """Return the i-th input; it is an error if it is absent."""
        value = self.optional(i)
        if value is None:
            raise self.unsupported(f"it has no input {i}")
        return value

    def optional(self, i: int) -> ir.Value | None:
        """Return the i-th input, or None if it is absent."""
        return self.inputs[i] if i < len(self.inputs) else None

    def has_output(self, i: int) -> bool:
        """Return whether the i-th output is present."""
        return i < len(self.outputs) and bool(self.outputs[i].name)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute as Python data: the schema's default if it is absent, else `default`."""
        return self.attributes.get(name, default)

    def rank(self, i: int = 0) -> int:
        """Return the rank of the i-th input; it is an error if it is unknown."""
        shape = self.input(i).shape
        if shape is None:
            raise self.unsupported(unknown_rank(f"its input {self.input(i).name!r}"))
        return len(shape)

    def constant(self, i: int) -> np.ndarray | None:
        """Return the value of the i-th input if it is a constant, else None."""
        value = self.optional(i)
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        # An initializer that is also a graph input is only a default value.
        if tensor is None or (value is not None and value.is_graph_input()):
            return None
        return tensor.numpy()

    def unsupported(self, why: str) -> Exception:
        """Return the error to raise if the node cannot be handled; `why` is shown to the user."""
        return NodeError(why)
