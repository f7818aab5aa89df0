"""Replaces chains and small graphs of element-wise nodes, and sums of them, by fused nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from ortgrad.graph.names import Names
from ortgrad.graph.outputs import replace_values
from ortgrad.graph.traversal import all_graphs, all_nodes, dependencies
from ortgrad.lowering.constants import constant_values
from ortgrad.lowering.fusion.copies import drop_copies
from ortgrad.lowering.fusion.expressions import TABLE
from ortgrad.lowering.fusion.fusable import Fusable, infer_broadcast, known_shape, read_fusable, unsqueezed
from ortgrad.lowering.fusion.fusable_sums import FusableSum, read_sum
from ortgrad.lowering.fusion.groups import Groups, axis_groups, external_inputs, fit, pays, sums_of
from ortgrad.lowering.fusion.kernel import DOMAIN, NAMES, fused_operator
from ortgrad.lowering.fusion.onnxruntime_fusions import left_to_onnxruntime
from ortgrad.lowering.fusion.program import Constant, Operand, Program, Step
from ortgrad.operators.call import make_call
from ortgrad.operators.declaration import CALL_ATTRIBUTE
from ortgrad.shapes.inference import infer_types

# The largest cost of computing a value again instead of storing it: for any value, and for one that nothing
# else needs then (see ortgrad.lowering.fusion.expressions).
_CHEAP, _AFFORDABLE = 2, 30
_MOST_COPIES = 8
_MOST_NAMED = 8
# The number of programs in a model that are compiled, a third of a second each.
_MOST_PROGRAMS = 20
# A node takes as long as `_PER_NODE` elements, about 1.5 microseconds. A program is compiled if it saves
# `_LEAST_SAVED` elements in a run, where an unknown size counts as `_UNKNOWN_SIZE`.
_PER_NODE = 10000
_LEAST_SAVED = 1 << 17
_UNKNOWN_SIZE = 16


def fuse(model: ir.Model) -> ir.Model:
    """Fuse the element-wise nodes of the model and its subgraphs."""
    if _knows_little(model):
        infer_types(model)
    drop_copies(model)
    names = Names.of(model)
    constant = constant_values(model)
    fused = False
    for graph in list(all_graphs(model.graph)):
        fused |= _fuse_graph(graph, names, constant)
    if fused:
        model.opset_imports.setdefault(DOMAIN, 1)
    return model


def _knows_little(model: ir.Model) -> bool:
    """Return whether most shapes of element-wise results are unknown; inference takes its time."""
    values = [node.outputs[0] for node in all_nodes(model.graph) if node.op_type in TABLE]
    return 2 * sum(known_shape(value) is None for value in values) > len(values)


def _fuse_graph(graph: ir.Graph, names: Names, constant: Collection[ir.Value]) -> bool:
    nodes = list(graph)
    for node in nodes:
        infer_broadcast(node)
    # onnxruntime folds the others.
    computed = [node for node in nodes if not node.outputs or node.outputs[0] not in constant]
    fusable = {node: each for node in computed if (each := read_fusable(node)) is not None}
    sums = [each for node in computed if (each := read_sum(node)) is not None]
    kept = left_to_onnxruntime(nodes)
    groups = Groups(nodes, [*(each for node, each in fusable.items() if node not in kept), *sums]).merge_all()
    groups = _most_useful(groups)
    if not groups:
        return False
    place = {node: i for i, node in enumerate(nodes)}
    owner = {each.node: i for i, group in enumerate(groups) for each in group}
    _compute_again(groups, owner, fusable)
    for group in groups:
        group.sort(key=lambda each: place[each.node])
    live = _live_values(graph, groups, owner, fusable)
    made: list[tuple[ir.Node, list[Fusable]]] = []
    replaced: set[ir.Node] = set()
    added: list[ir.Node] = []
    for i, group in enumerate(groups):
        results = [e for e in group if owner.get(e.node) == i and not e.gives_bool and e.output in live]
        # Sums are the last outputs.
        results.sort(key=lambda each: isinstance(each, FusableSum))
        needed = _needed(group, results)
        fused = pays(needed)
        if fused:
            made.append(_fused_node(needed, results, names))
            replaced.update(each.node for each in results)
        # If nothing reads a sum, neither it nor what reads it is needed.
        added += (node for each in sums_of(group) if fused or each.output not in live for node in each.nodes)
    gone = [node for node, each in fusable.items() if each.output not in live or node in replaced]
    graph.extend(node for node, _ in made)
    for node, results in made:
        for old, new in zip((each.output for each in results), node.outputs, strict=True):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            replace_values([old], [new])
    graph.remove([*added, *gone], safe=True)
    graph.remove([node for node in nodes if node.op_type == "Unsqueeze" and _is_unused(node)], safe=True)
    graph.sort()
    return True


def _is_unused(node: ir.Node) -> bool:
    return not node.outputs[0].uses() and not node.outputs[0].is_graph_output()


def _most_useful(groups: list[list[Fusable]]) -> list[list[Fusable]]:
    """Return the groups of the programs that save most: each has to be compiled once."""
    saved: Counter[object] = Counter()
    for group in groups:
        sizes = [size if isinstance(size, int) else _UNKNOWN_SIZE for size in group[0].shape]
        nodes = sum(each.expression.alone for each in group)
        # Nodes that change the shape of an input, or of a sum.
        nodes += sum(unsqueezed(value) is not None for value in external_inputs(group))
        nodes += sum(each.last is not None for each in sums_of(group))
        saved[_structure(group)] += (nodes - 1) * (_PER_NODE + math.prod(sizes))
    best = saved.most_common(_MOST_PROGRAMS)
    chosen = {structure for structure, elements in best if elements >= _LEAST_SAVED}
    return [group for group in groups if _structure(group) in chosen]


def _structure(group: Sequence[Fusable]) -> object:
    """Return what is equal for groups that have one kernel, nearly always."""
    numbers: dict[ir.Value, int] = {}
    found = []
    for each in group:
        operands = [
            numbers.setdefault(o, len(numbers)) if isinstance(o, ir.Value) else -1 for o in each.operands
        ]
        numbers[each.output] = len(numbers)
        found.append((each.operator, each.attributes, tuple(operands)))
    return group[0].element, tuple(found)


def _compute_again(
    groups: list[list[Fusable]], owner: Mapping[ir.Node, int], fusable: Mapping[ir.Node, Fusable]
) -> None:
    """Let groups compute an input themselves if that costs less than to store it and read it again.

    They must have all that it is computed from among their other inputs.
    """
    for each in reversed(list(fusable.values())):
        value = each.output
        own = owner.get(each.node)
        users = {use.node for use in value.uses()}
        readers = {owner[user] for user in users if user in owner} - {own}
        if not readers:
            continue
        copies = {i: _derivation(each, groups[i], fusable) for i in readers}
        # What is needed elsewhere is stored in any case.
        elsewhere = value.is_graph_output() or any(user not in owner for user in users)
        possible = all(copies.values()) and not elsewhere
        for i, copied in copies.items():
            cost = sum(copy.expression.cost for copy in copied)
            if copied and (cost <= (_AFFORDABLE if possible else _CHEAP)) and fit([*groups[i], *copied]):
                groups[i] += copied


def _derivation(each: Fusable, group: Sequence[Fusable], fusable: Mapping[ir.Node, Fusable]) -> list[Fusable]:
    """Return the nodes that compute a value from the other inputs of a group; an empty list if none do."""
    inputs = set(external_inputs(group)) - {each.output}
    inside = {member.output for member in group}
    found: dict[Fusable, None] = {}
    waiting = [each]
    while waiting:
        step = waiting.pop()
        if step.shape != each.shape or len(found) > _MOST_COPIES:
            return []
        found[step] = None
        for value in step.values:
            if value in inputs or value in inside:
                continue
            producer = value.producer()
            if producer is None or producer not in fusable:
                return []
            waiting.append(fusable[producer])
    return list(found)


def _live_values(
    graph: ir.Graph,
    groups: Iterable[Sequence[Fusable]],
    owner: Mapping[ir.Node, int],
    fusable: Mapping[ir.Node, Fusable],
) -> set[ir.Value]:
    """Return the values that are needed outside of the group that computes them."""
    waiting = list(graph.outputs)
    added = {node for group in groups for each in sums_of(group) for node in each.nodes}
    for node in graph:
        if node not in fusable and node not in added:
            waiting += dependencies(node)
    for group in groups:
        waiting += external_inputs(group)
    live: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        each = fusable.get(value.producer())  # type: ignore[arg-type]
        if value not in live:
            live.add(value)
            # Boolean values are no results of fused nodes: if one is needed outside, its own node stays.
            if each is not None and (each.node not in owner or each.gives_bool):
                waiting += dependencies(each.node)
    return live


def _needed(group: Sequence[Fusable], results: Sequence[Fusable]) -> list[Fusable]:
    """Return the nodes of a group that its results are computed from."""
    values = {each.output for each in results}
    found = []
    for each in reversed(group):
        if each.output in values:
            found.append(each)
            values.update(each.values)
    return found[::-1]


def _fused_node(
    group: Sequence[Fusable], results: list[Fusable], names: Names
) -> tuple[ir.Node, list[Fusable]]:
    """Return the node that computes a group, without names of its outputs."""
    inputs, sums = external_inputs(group), sums_of(group)
    axes = axis_groups(group[0].shape, inputs, sums) or []
    kind = axes[-1][1] if axes else (False,) * len(inputs) + (True,) * len(sums)
    varying, by_rows = kind[: len(inputs)], all(kind[len(inputs) :])
    types = ["bool" if value.dtype == ir.DataType.BOOL else "float" for value in inputs]
    numbers = {value: i for i, value in enumerate(inputs)}
    steps = []
    elementwise = [each for each in group if not isinstance(each, FusableSum)]
    for each in elementwise:
        operands = tuple(o if isinstance(o, Constant) else numbers[o] for o in each.operands)
        steps.append(Step(each.operator, operands, each.attributes))
        numbers[each.output] = len(numbers)
    views = [unsqueezed(value) or (value, 0) for value in inputs]
    program = Program(
        tuple(map(Operand, types, varying, (ones for _, ones in views))),
        tuple(steps),
        tuple(numbers[each.output] for each in results if not isinstance(each, FusableSum)),
        tuple(each.total(numbers[each.values[0]], by_rows) for each in sums_of(results)),
    )
    element = next(each.element for each in group if each.element)
    name = names.fresh(f"{_label(results[-1])} ({_summary(group)})")
    nodes = tuple(_label(each) for each in elementwise)
    operator = fused_operator(program, nodes, element)
    attributes = {**program.to_attributes(), "nodes": list(nodes)}
    call = make_call(operator, name, attributes, [True] * len(inputs), [True] * len(results))
    node = ir.Node(
        DOMAIN,
        NAMES[element],
        [value for value, _ in views],
        [ir.AttrString(CALL_ATTRIBUTE, call.to_json())],
        num_outputs=len(results),
        name=name,
    )
    return node, results


def _label(each: Fusable) -> str:
    return each.node.name or each.output.name or each.node.op_type


def _summary(group: Sequence[Fusable]) -> str:
    operators = [each.node.op_type for each in group]
    more = len(operators) - _MOST_NAMED
    return "+".join([*operators[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])
