"""Gives the targets of a differentiation values of their own.

A function, an If or an operator that later passes replace by other nodes may compute one output from another.
Inside the replacement these are the same value, but a gradient towards an output of the node counts only
what the rest of the graph computes from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.outputs import replace_values


def separate_targets(model: ir.Model, wrt: Sequence[str] | None) -> ir.Model:
    """Copy the outputs of nodes with several outputs that `wrt` names; all readers read the copy."""
    chosen = [
        value
        for node in model.graph
        if sum(bool(value.name) for value in node.outputs) > 1
        for value in node.outputs
        if value.name and any(value.name == name or fnmatchcase(value.name, name) for name in wrt or ())
    ]
    names = Names.later(model)
    for value in chosen:
        node, name = value.producer(), value.name or ""
        assert node is not None
        copy = ir.node("Identity", [value], name=names.fresh(f"{name}/Identity"))
        replace_values([value], [copy.outputs[0]])
        # The line above has made the copy read itself.
        copy.replace_input_with(0, value)
        copied = copy.outputs[0]
        copied.type, copied.shape = value.type, value.shape
        copied.name, value.name = name, names.fresh(f"{name}/value")
        model.graph.insert_after(node, copy)
    return model
