"""Lets the gradient of an If read what its branches have computed, instead of computing it again.

The gradient of an If is another If with the same condition, whose branches repeat the forward nodes that they
need. Here the first If gets further outputs for them. In the branch that does not compute such an output, it
is an empty tensor, which nothing reads.

Some nodes compute more in the gradient than in the first If: the maxima of a MaxPool and where they were, the
gates of an LSTM. There the node of the first If is changed, so that it computes that, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgrad.errors import NodeError
from ortgrad.graph.attributes import content
from ortgrad.graph.gradient_nodes import call_of
from ortgrad.graph.names import Names
from ortgrad.graph.recorder import RANDOM
from ortgrad.graph.traversal import all_graphs, dependencies, is_operator, release_captured, subgraphs
from ortgrad.operators.call import make_call
from ortgrad.operators.declaration import CALL_ATTRIBUTE, find_operator

_BRANCHES = ("then_branch", "else_branch")
# Operators that compute more, for gradients, and ONNX's operators in their place.
_TRAINING_FORMS = {"LSTMTraining": "LSTM", "GRUTraining": "GRU"}
# What stands for a value in a comparison: another value, or its number in a subgraph.
_Same = Mapping[ir.Value, object]


def share_branches(model: ir.Model) -> ir.Model:
    """Share values between Ifs with the same condition, which must be in topological order."""
    names = Names.later(model)
    for graph in list(all_graphs(model.graph)):
        first: dict[ir.Value, ir.Node] = {}
        for node in list(graph):
            condition = node.inputs[0] if _is_if(node) else None
            if condition is not None and first.setdefault(condition, node) is not node:
                for branch in _BRANCHES:
                    _share(first[condition], node, branch, names)
    return model


def _is_if(node: ir.Node) -> bool:
    return is_operator(node, "If") and len(node.inputs) == 1


def _share(first: ir.Node, second: ir.Node, branch: str, names: Names) -> None:
    """Replace nodes in a branch of the second If by outputs of the first."""
    source, graph = (node.attributes[branch].as_graph() for node in (first, second))
    same = _matches(source, graph, names)
    needed, exported = set(graph.outputs), []
    gone: list[ir.Node] = []
    for node in reversed(list(graph)):
        read = [value for value in node.outputs if value in needed]
        if all(value in same for value in node.outputs) and not any(map(_stays, read)):
            exported += read
            gone.append(node)
        else:
            needed.update(dependencies(node))
    for value in exported:
        _replace(value, _exported(first, branch, same[value], names), graph, names)
    for node in gone:
        release_captured(node)
    graph.remove(gone, safe=True)


def _stays(value: ir.Value) -> bool:
    """Whether a value is computed in the branch: a constant, or one that cannot be an output."""
    producer = value.producer()
    constant = producer is not None and producer.op_type == "Constant"
    return constant or not isinstance(value.type, ir.TensorType)


def _exported(first: ir.Node, branch: str, value: ir.Value, names: Names) -> ir.Value:
    """Return the output of an If that has a value of a branch."""
    graphs = [first.attributes[name].as_graph() for name in _BRANCHES]
    own, other = graphs if branch == _BRANCHES[0] else reversed(graphs)
    if value in own.outputs:
        return first.outputs[own.outputs.index(value)]
    first.resize_outputs(len(first.outputs) + 1)
    output = first.outputs[-1]
    # Without a shape: the empty tensor has another one.
    output.name, output.type = names.fresh(f"{value.name}/shared"), value.type
    own.outputs.append(value)
    assert value.dtype is not None
    empty = ir.node(
        "Constant",
        [],
        {"value": ir.tensor(np.zeros(0, value.dtype.numpy()), dtype=value.dtype)},
        name=names.fresh(f"{value.name}/absent"),
    )
    empty.outputs[0].name = empty.name
    empty.outputs[0].type, empty.outputs[0].shape = value.type, ir.Shape([0])
    other.append(empty)
    other.outputs.append(empty.outputs[0])
    return output


def _replace(old: ir.Value, new: ir.Value, graph: ir.Graph, names: Names) -> None:
    for i, value in enumerate(graph.outputs):
        if value is old:
            # An output of a branch must be computed in it.
            copy = ir.node("Identity", [new], name=names.fresh(f"{old.name}/Identity"))
            copy.outputs[0].name, copy.outputs[0].type = names.fresh(f"{old.name}/copy"), old.type
            graph.append(copy)
            graph.outputs[i] = copy.outputs[0]
    ir.convenience.replace_all_uses_with(old, new)


def _matches(source: ir.Graph, graph: ir.Graph, names: Names) -> dict[ir.Value, ir.Value]:
    """Return the values of a graph that the other one computes, too, with those values."""
    nodes: dict[object, ir.Node] = {}
    similar: dict[object, list[ir.Node]] = {}
    # Of several equal nodes, the first stands for all.
    known: dict[ir.Value, ir.Value] = {}
    for node in source:
        first = node if _is_random(node) else nodes.setdefault(_key(node, known), node)
        known.update(zip(node.outputs, first.outputs, strict=True))
        if not _is_random(node) and not subgraphs(node):
            similar.setdefault(_operator_and_operands(node, known), []).append(node)
    same: dict[ir.Value, ir.Value] = {}
    for node in graph:
        match = None if _is_random(node) else nodes.get(_key(node, same))
        if match is None and not _is_random(node):
            found = similar.get(_operator_and_operands(node, same), ())
            match = next((each for each in found if _extend(each, node, names)), None)
        if match is not None:
            same.update(zip(node.outputs, match.outputs, strict=False))
    return same


def _operator_and_operands(node: ir.Node, same: _Same) -> object:
    """Return a key that is equal for nodes that differ at most in how many results they compute."""
    domain, name, overload = node.op_identifier()
    tokens = [_token(value, same) for value in node.inputs]
    operator = find_operator(name, domain)
    if name in _TRAINING_FORMS and operator is not None and CALL_ATTRIBUTE in node.attributes:
        domain, name, overload = "", _TRAINING_FORMS[name], ""
        present = call_of(node, operator).present
        tokens = [token if real else None for token, real in zip(tokens, present, strict=True)]
    while tokens and tokens[-1] is None:
        tokens.pop()
    return domain, name, overload, tuple(tokens)


def _extend(node: ir.Node, other: ir.Node, names: Names) -> bool:
    """Let a node compute what another one computes from the same operands; returns False if it cannot."""
    count = len(other.outputs)
    if node.op_identifier() == other.op_identifier():
        plain = CALL_ATTRIBUTE not in node.attributes and len(node.outputs) < count
        if not plain or _attributes(node) != _attributes(other):
            return False
    else:
        operator = find_operator(other.op_type, other.domain)
        if operator is None or len(node.outputs) > count:
            return False
        call = call_of(other, operator)
        try:
            given = operator.with_defaults({a.name: _plain(a) for a in node.attributes.values()})
        except NodeError:
            # It has an attribute that the training form does not know.
            return False
        if given != call.attributes:
            return False
        wanted = [
            want or (i < len(node.outputs) and bool(node.outputs[i].name))
            for i, want in enumerate(call.wanted)
        ]
        node.domain, node.op_type, node.version = other.domain, other.op_type, None
        node.name = node.name or names.fresh(call.node)
        node.overload = other.overload
        node.attributes.clear()
        node.attributes.update((a.name, a) for a in other.attributes.values())
        made = make_call(operator, node.name, call.attributes, call.present, wanted, built=call.built)
        node.attributes.add(ir.AttrString(CALL_ATTRIBUTE, made.to_json()))
        first = len(node.inputs)
        node.resize_inputs(len(operator.inputs))
        for i, real in enumerate(call.present):
            if i >= first or not real:
                # Empty tensors stand for what is absent.
                node.replace_input_with(i, other.inputs[i])
    node.resize_outputs(count)
    for output, computed in zip(node.outputs, other.outputs, strict=True):
        if not output.name:
            output.name = names.fresh(f"{computed.name}/first")
            output.type, output.shape = computed.type, computed.shape
    return True


def _attributes(node: ir.Node) -> list[tuple[str, str]]:
    return sorted((a.name, content(a)) for a in node.attributes.values())


def _plain(attribute: ir.Attr) -> Any:
    return list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value


def _is_random(node: ir.Node) -> bool:
    inner = (inside for graph in subgraphs(node) for inside in graph)
    return node.op_type in RANDOM or any(map(_is_random, inner))


def _key(node: ir.Node, same: _Same, depth: int = 0) -> object:
    """Return a key that is equal for nodes that compute the same, if values are what `same` says."""
    return (
        node.op_identifier(),
        tuple(_token(value, same) for value in node.inputs),
        len(node.outputs),
        tuple(sorted((a.name, _content(a, same, depth)) for a in node.attributes.values())),
    )


def _token(value: ir.Value | None, same: _Same) -> object:
    found = value if value is None else same.get(value, value)
    return id(found) if isinstance(found, ir.Value) else found


def _content(attribute: ir.Attr, same: _Same, depth: int) -> str:
    if attribute.type == ir.AttributeType.GRAPH:
        return repr(_describe(attribute.as_graph(), same, depth + 1))
    if attribute.type == ir.AttributeType.GRAPHS:
        return repr([_describe(graph, same, depth + 1) for graph in attribute.as_graphs()])
    return content(attribute)


def _describe(graph: ir.Graph, same: _Same, depth: int) -> object:
    """Return a key that is equal for equal subgraphs, in which a value is known by its number."""
    known: dict[ir.Value, object] = dict(same)
    own = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    known.update((value, f"{depth}.{i}") for i, value in enumerate(own))
    constants = [value.const_value for value in graph.initializers.values()]
    return (
        [repr((value.type, value.shape)) for value in graph.inputs],
        [content(ir.AttrTensor("value", tensor)) for tensor in constants if tensor is not None],
        [_key(node, known, depth) for node in graph],
        [_token(value, known) for value in graph.outputs],
    )
