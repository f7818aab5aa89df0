"""Infers the shapes that the states of Loop nodes keep in all iterations.

ONNX's shape inference does not infer them, because a state may grow. Here a state is assumed to keep its
initial shape, the body is inferred with it, and dimensions that the body changes become unknown. This is
repeated until nothing changes; the remaining dimensions hold for every iteration.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ortgrad.graph.traversal import all_nodes, dimensions, is_operator
from ortgrad.shapes.equal_sizes import forget_made_up_names
from ortgrad.shapes.inference import infer_types

Dims = tuple["int | str | None", ...]
# The shapes of a state during and after the loop, by the indices of the loop and the state.
Shapes = dict[tuple[int, int], tuple["Dims | None", "Dims | None"]]

# How often the initial shapes of states are inferred again.
_MOST_ROUNDS = 6


def infer_loop_shapes(model: ir.Model) -> None:
    """Infer the shapes of loop states, in place; types must be inferred already."""
    found: Shapes = {}
    new: Shapes = {key: (start, start) for key, start, _ in _states(model) if start is not None}
    rounds = 0
    while new:
        found |= new
        rounds += 1
        # A loop may start from a state or result of another one, whose sizes then have other names.
        states = _states(_assuming(model, found))
        starts = {key: (start, start) for key, start, _ in states if start is not None}
        changes = rounds < _MOST_ROUNDS
        new = {k: pair for k, pair in starts.items() if k not in found or (changes and found[k] != pair)}
    assumed: Shapes = {}
    while found != assumed:
        assumed, found = found, {}
        for key, start, after in _states(_assuming(model, assumed)):
            either = _join(start, after)
            during, final = assumed.get(key, (None, None))
            found[key] = _join(during, either), _join(final, either)
    if assumed:
        _apply(model, assumed)
        infer_types(model)


def _assuming(model: ir.Model, shapes: Shapes) -> ir.Model:
    """Return a copy of the model, inferred with the given shapes of states."""
    trial = model.clone()
    _apply(trial, shapes)
    infer_types(trial)
    return trial


def _loops(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Graph]]:
    for node in all_nodes(model.graph):
        if is_operator(node, "Loop"):
            yield node, node.attributes["body"].as_graph()


def _states(model: ir.Model) -> Iterator[tuple[tuple[int, int], Dims | None, Dims | None]]:
    """Yield for every state its key, its initial shape, and its shape at the end of the body."""
    for number, (node, body) in enumerate(_loops(model)):
        count = len(body.inputs) - 2
        for i, values in enumerate(zip(node.inputs[2:], body.outputs[1 : 1 + count], strict=False)):
            start, after = map(dimensions, values)
            yield (number, i), start, after


def _join(one: Dims | None, other: Dims | None) -> Dims | None:
    """Return the dimensions that two shapes have in common; None if their ranks differ."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


def _apply(model: ir.Model, shapes: Shapes) -> None:
    for number, (node, body) in enumerate(_loops(model)):
        forget_made_up_names(body)
        for i, (before, result) in enumerate(zip(body.inputs[2:], node.outputs, strict=False)):
            during, final = shapes.get((number, i), (None, None))
            if during is not None:
                before.shape = ir.Shape(during)
            if final is not None and result.shape is None:
                result.shape = ir.Shape(final)
