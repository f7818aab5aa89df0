"""Replaces the nodes that compute the mean and the inverse deviation of a value by one of Moments."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.patterns import Match, Operators, Pattern, Term
from ortgrad.graph.traversal import constant_array, constant_number
from ortgrad.lowering.constants import computed_nodes
from ortgrad.lowering.internal_operators import KERNEL_TYPES, become
from ortgrad.operators.declaration import INTERNAL_DOMAIN
from ortgrad.ops.moments import kept_axes, moments_of


def _difference(op: Operators, x: Term, axes: Term, behind: Term) -> Term:
    mean = op.ReduceMean(x, axes)
    return op.Sub(x, op.either(mean, op.Unsqueeze(mean, behind)))


# If c is not a difference, Moments computes the inverse root of the mean of its squares.
_DIFFERENCE = Pattern(_difference)
_INVERSE = Pattern(
    lambda op, c, axes, epsilon: op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(c, c), axes), epsilon)))
)


def use_moments(model: ir.Model) -> ir.Model:
    """Replace them in the graph and in subgraphs."""
    names = Names.later(model)
    for match in _INVERSE.find(computed_nodes(model)):
        _replace(model, match, names)
    return model


def _replace(model: ir.Model, match: Match, names: Names) -> None:
    last, x, epsilon = match.root, match.values["c"], constant_number(match.values["epsilon"])
    reduced = _reduced(match.node("ReduceMean"))
    graph, inverse = last.graph, last.outputs[0]
    if epsilon is None or reduced is None or inverse.is_graph_output() or x.dtype not in KERNEL_TYPES:
        return
    axes, keepdims = reduced
    found = (each for each in _DIFFERENCE.match(x) if each.root.graph is graph)
    difference = next((each for each in found if _is_deviation(each, axes, keepdims)), None)
    place, old = last, [None, inverse]
    if difference is not None:
        x, place = difference.values["x"], difference.node("ReduceMean")
        old[0] = place.outputs[0]
    if x.shape is None or kept_axes(len(x.shape), axes) is None or (old[0] and old[0].is_graph_output()):
        return
    made = ir.node(
        moments_of.name,
        [x],
        {
            "axes": axes,
            "keepdims": int(keepdims),
            "epsilon": epsilon,
            "centred": int(difference is not None),
        },
        domain=INTERNAL_DOMAIN,
        num_outputs=2,
        name=names.fresh(f"{inverse.name}_moments"),
    )
    assert graph is not None
    graph.insert_before(place, made)
    for value, before in zip(made.outputs, old, strict=True):
        if before is not None:
            value.name, value.type, value.shape = names.fresh(f"{before.name}"), before.type, before.shape
            before.replace_all_uses_with(value)
    become(model, made, moments_of, names)
    match.remove_unread()
    if difference is not None:
        difference.remove_unread()


def _reduced(mean: ir.Node) -> tuple[list[int], bool] | None:
    """Return the axes along which a mean is computed, if they are known, and whether they are kept."""
    x, axes = mean.inputs[0], constant_array(mean.inputs[1])
    if x is None or x.shape is None or axes is None or axes.size == 0:
        return None
    rank = len(x.shape)
    return sorted(int(axis) % rank for axis in np.atleast_1d(axes)), bool(
        mean.attributes.get_int("keepdims", 1)
    )


def _is_deviation(difference: Match, axes: list[int], keepdims: bool) -> bool:
    """Return whether a difference is that from the mean along these axes, which it broadcasts rightly."""
    x, behind = difference.values["x"], difference.values.get("behind")
    if _reduced(difference.node("ReduceMean")) != (axes, keepdims) or x.shape is None:
        return False
    kept = kept_axes(len(x.shape), axes)
    if keepdims or kept is None:
        return keepdims and behind is None
    # The axes that are missing behind the kept ones.
    missing = range(len(kept), len(kept) + len(x.shape) - kept.stop)
    given = np.arange(0) if behind is None else constant_array(behind)
    return given is not None and list(given) == list(missing)
