"""Find out which shapes the states of Loop nodes keep from one iteration to the next.

ONNX's shape inference gives up on them, because a state may grow. Here the shape of the initial
state is assumed, the body is inferred with it, and what does not come out again is dropped,
until nothing changes: what is left holds for every iteration.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ortgrad.passes.inference import infer_types

Dims = tuple["int | str | None", ...]
# The shapes of a state during the loop and after it, by the numbers of the loop and the state.
Shapes = dict[tuple[int, int], tuple["Dims | None", "Dims | None"]]


def infer_loop_shapes(model: ir.Model) -> None:
    """Write the shapes of loop states into the model, in place; types must be inferred already."""
    declared = {key: before for key, _, before, _ in _states(model) if before is not None}
    found: Shapes = {key: (before or start, start) for key, start, before, _ in _states(model)}
    assumed: Shapes = {}
    while found != assumed:
        assumed = found
        trial = model.clone()
        _apply(trial, assumed)
        infer_types(trial)
        found = {}
        for key, start, _, after in _states(trial):
            either = _join(start, after)
            during, final = assumed[key]
            # What the body declares is the model's own business.
            found[key] = declared.get(key) or _join(during, either), _join(final, either)
    if assumed:
        _apply(model, assumed)
        infer_types(model)


def _loops(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Graph]]:
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "Loop" and node.domain == "":
            yield node, node.attributes["body"].as_graph()


def _states(model: ir.Model) -> Iterator[tuple[tuple[int, int], Dims | None, Dims | None, Dims | None]]:
    """Every state: its key, its shape at the start, in the body, and at the body's end."""
    for number, (node, body) in enumerate(_loops(model)):
        states = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], strict=False)
        for i, values in enumerate(states):
            start, before, after = map(_dims, values)
            yield (number, i), start, before, after


def _dims(value: ir.Value | None) -> Dims | None:
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape)


def _join(one: Dims | None, other: Dims | None) -> Dims | None:
    """What two shapes have in common."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


def _apply(model: ir.Model, shapes: Shapes) -> None:
    for number, (node, body) in enumerate(_loops(model)):
        for i, (before, result) in enumerate(zip(body.inputs[2:], node.outputs, strict=False)):
            during, final = shapes.get((number, i), (None, None))
            if during is not None:
                before.shape = ir.Shape(during)
            if final is not None and result.shape is None:
                result.shape = ir.Shape(final)
