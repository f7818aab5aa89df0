"""Groups of element-wise nodes that can be computed together: connected, and with nothing in between.

A fused node needs all of its inputs before it gives any of its results. So there must be no path from a node
of a group through other nodes to another one of the group. Sums of what a group computes or reads belong to
it, but nothing of the group reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from ortgrad.graph.traversal import dependencies
from ortgrad.lowering.fusion.fusable import Fusable, known_shape
from ortgrad.lowering.fusion.fusable_sums import FusableSum
from ortgrad.lowering.fusion.kernel import MOST_INPUTS, MOST_OUTPUTS, MOST_SUMS

_MOST_STEPS = 40
# Axes of the results are divided into this many groups at most (see ortgrad.lowering.fusion.kernel).
_MOST_AXES = 3
# A loop over fewer elements than this costs more than it saves.
_SHORTEST_ROW = 8
# The number of groups that are searched for a path between two of them.
_PATIENCE = 3000


class Groups:
    """A partition of the nodes of a graph, in which fusable nodes are merged step by step."""

    def __init__(self, nodes: Sequence[ir.Node], fusable: Sequence[Fusable]) -> None:
        self._place = {node: i for i, node in enumerate(nodes)}
        self._fusable = {each.node: each for each in fusable}
        self._parent = list(range(len(nodes)))
        self._members = [[node] for node in nodes]
        # By group: the place in an order in which each comes behind what it reads.
        self._order = list(range(len(nodes)))
        self._before: list[set[int]] = [set() for _ in nodes]
        self._after: list[set[int]] = [set() for _ in nodes]
        for i, node in enumerate(nodes):
            for value in dependencies(node):
                producer = value.producer()
                if producer is not None and producer in self._place:
                    self._before[i].add(self._place[producer])
                    self._after[self._place[producer]].add(i)

    def merge_all(self) -> list[list[Fusable]]:
        """Merge what can be merged; returns the groups that save time, in the order of the graph."""
        pairs = [
            (self._fusable[node], each)
            for each in self._fusable.values()
            for value in each.values
            if (node := value.producer()) is not None and node in self._fusable
        ]
        # A boolean value is no result of a fused node, so it is computed with what reads it, if possible. If
        # the mask of a gradient is merged with forward nodes first, a path leads around through others.
        for producer, each in sorted(pairs, key=lambda pair: not pair[0].gives_bool):
            self._merge(self._place[producer.node], self._place[each.node])
        for each in self._fusable.values():
            if isinstance(each, FusableSum):
                self._merge_readers(each)
        roots = dict.fromkeys(self._find(self._place[node]) for node in self._fusable)
        groups = [_trimmed(self._group(root)) for root in roots]
        return [group for group in groups if pays(group)]

    def _merge_readers(self, total: FusableSum) -> None:
        """Merge what reads the same values as the group of a sum, so that they are read once."""
        for value in external_inputs(self._group(self._find(self._place[total.node]))):
            if known_shape(value) != total.shape:
                continue
            for use in value.uses():
                if use.node in self._fusable:
                    self._merge(self._place[total.node], self._place[use.node])

    def _group(self, root: int) -> list[Fusable]:
        return [self._fusable[node] for node in sorted(self._members[root], key=self._place.__getitem__)]

    def _find(self, i: int) -> int:
        while self._parent[i] != i:
            self._parent[i] = self._parent[self._parent[i]]
            i = self._parent[i]
        return i

    def _merge(self, one: int, other: int) -> None:
        """Merge the groups of two nodes, unless a path leads from one to the other through a third."""
        order = self._order
        a, b = sorted((self._find(one), self._find(other)), key=order.__getitem__)
        if a == b or not fit([self._fusable[n] for n in (*self._members[a], *self._members[b])]):
            return
        # What b needs comes before the merged group, and what needs a behind it.
        needed, needing = self._reached(b, self._before, a, b), self._reached(a, self._after, a, b)
        if needed is None or needing is None or not needed.isdisjoint(needing):
            return
        places = sorted(order[group] for group in (a, b, *needed, *needing))
        for group in sorted(needed, key=order.__getitem__):
            order[group] = places.pop(0)
        for group in sorted(needing, key=order.__getitem__, reverse=True):
            order[group] = places.pop()
        order[b] = places[0]
        self._parent[a] = b
        self._members[b] += self._members[a]
        self._before[b] |= self._before[a]
        self._after[b] |= self._after[a]

    def _reached(self, start: int, edges: Sequence[set[int]], low: int, high: int) -> set[int] | None:
        """Return the groups that edges lead to from a group, between two others in the order.

        Returns None if there are too many to search.
        """
        least, most = self._order[low], self._order[high]
        found: set[int] = set()
        waiting = [start]
        while waiting:
            for group in map(self._find, edges[waiting.pop()]):
                if least < self._order[group] < most and group not in found:
                    found.add(group)
                    waiting.append(group)
            if len(found) > _PATIENCE:
                return None
        return found


def pays(group: Sequence[Fusable]) -> bool:
    """Return whether nodes should be computed by one kernel.

    A sum alone is as fast, or faster, in onnxruntime.
    """
    return len(group) > 1 or any(each.saves_alone and fit(group) for each in group)


def fit(group: Sequence[Fusable]) -> bool:
    """Return whether nodes may be computed by one kernel, as far as their shapes and types tell."""
    first = group[0]
    if any(each.shape != first.shape for each in group) or len(group) > _MOST_STEPS:
        return False
    if len({each.element for each in group if each.element}) > 1:
        return False
    inputs, sums = external_inputs(group), sums_of(group)
    if len(inputs) > MOST_INPUTS or len(escaping(group)) - len(sums) > MOST_OUTPUTS or len(sums) > MOST_SUMS:
        return False
    axes = axis_groups(first.shape, inputs, sums)
    if axes is None or len(axes) > _MOST_AXES or not _are_alike(axes, len(sums)):
        return False
    read = {value for each in group for value in each.values}
    if any(output in read for each in sums for node in each.nodes for output in node.outputs):
        return False
    return len(axes) < 2 or not isinstance(axes[-1][0], int) or axes[-1][0] >= _SHORTEST_ROW


def sums_of(group: Sequence[Fusable]) -> list[FusableSum]:
    """Return the sums of a group."""
    return [each for each in group if isinstance(each, FusableSum)]


def _are_alike(axes: Sequence[tuple[int | str, tuple[bool, ...]]], sums: int) -> bool:
    """Return whether all sums of a group are over its last axes, or all over the axes before them alone."""
    if not axes or not sums:
        return True
    kinds = [kind[len(kind) - sums :] for _, kind in axes]
    return all(kinds[-1]) or (not any(kinds[-1]) and all(all(kind) for kind in kinds[:-1]))


def _trimmed(group: list[Fusable]) -> list[Fusable]:
    """Return a group without nodes that gain nothing from being computed with the others."""
    while True:
        useless = _useless(group)
        if not useless:
            return group
        group = [each for each in group if each not in useless]


def _useless(group: list[Fusable]) -> set[Fusable]:
    """Boolean results that the group does not need, and several that each need an input and a stored value.

    Several tensors that are stored at once leave the cache before they are read.
    """
    escapes = {each.output for each in escaping(group)}
    users: dict[ir.Value, list[Fusable]] = {}
    for each in group:
        for value in dict.fromkeys(each.values):
            users.setdefault(value, []).append(each)
    inside = {each.output for each in group}
    found = {each for each in group if each.gives_bool and each.output not in users}
    for value in inside & escapes:
        last = [
            each
            for each in users.get(value, [])
            if each.output in escapes
            and each.output not in users
            and any(v not in inside and len(users[v]) == 1 for v in each.values)
        ]
        if len(last) > 1:
            found.update(last)
    return found


def external_inputs(group: Sequence[Fusable]) -> list[ir.Value]:
    """Return the values that a group reads and does not compute."""
    inside = {each.output for each in group}
    return list(dict.fromkeys(v for each in group for v in each.values if v not in inside))


def escaping(group: Sequence[Fusable]) -> list[Fusable]:
    """Return the nodes of a group whose results are needed outside. Boolean ones are computed there again."""
    nodes = {each.node for each in group}
    return [
        each
        for each in group
        if not each.gives_bool
        and (each.output.is_graph_output() or any(use.node not in nodes for use in each.output.uses()))
    ]


def axis_groups(
    full: Sequence[int | str], inputs: Iterable[ir.Value], sums: Sequence[FusableSum] = ()
) -> list[tuple[int | str, tuple[bool, ...]]] | None:
    """Return groups of axes, and for each which inputs vary along it, and which sums are over it.

    Returns None if the shape of an input is unknown.
    """
    shapes = [known_shape(value) for value in inputs]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    groups: list[tuple[int | str, tuple[bool, ...]]] = []
    for axis, size in enumerate(full, -len(full)):
        if size == 1:
            continue
        kind = (
            *(-axis <= len(shape) and shape[axis] != 1 for shape in known),
            *(len(full) + axis in each.axes for each in sums),
        )
        if groups and groups[-1][1] == kind:
            before = groups.pop()[0]
            size = before * size if isinstance(before, int) and isinstance(size, int) else "several"
        groups.append((size, kind))
    return groups
