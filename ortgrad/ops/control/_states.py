"""The states at the start of every iteration of a Loop or Scan, which the backward nodes read.

They are outputs of the forward node, or a second Loop computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortgrad.autodiff.rules import ForwardNode
from ortgrad.graph.recorder import Recorder
from ortgrad.graph.traversal import dependencies
from ortgrad.ops.control._bodies import Body, capture_unchanged


def keeps_shape(start: ir.Value, state: ir.Value) -> bool:
    """Return whether a state of a Loop is known to have its initial shape in all iterations."""
    if not isinstance(state.type, ir.TensorType):
        return False
    if start.shape is None or state.shape is None or len(start.shape) != len(state.shape):
        return False
    # Inference gives a unique name to an unknown size, so equal names stand for equal sizes.
    pairs = zip(start.shape, state.shape, strict=True)
    return all(a == b and (isinstance(a, int) or a.value is not None) for a, b in pairs)


def save(
    node: ForwardNode, graph: ir.Graph, i: int, states: slice, plain: Sequence[bool] | None = None
) -> ir.Value:
    """Add the i-th input of a loop's body to the loop's scan outputs, and return that output.

    `states` is the position of the states among the outputs of the body; `plain` tells which of the scan
    outputs after them are stacked along axis 0 in forward direction.
    """
    value = graph.inputs[i]
    if not isinstance(value.type, ir.TensorType):
        raise node.unsupported(f"the state {value.name!r} of its body is not known to be a tensor")
    first = states.stop
    for place, output in enumerate(graph.outputs[first:], first):
        producer = output.producer()
        if plain is not None and not all(plain[place - first : place - first + 1]):
            continue
        if producer is not None and producer.op_type == "Identity" and producer.inputs[0] is value:
            # A model that was built before already saves this value.
            return node.add_output(place - states.start)
    name = node.op.names.fresh(f"{value.name}/saved")
    keeper = ir.Node("", "Identity", [value], name=name)
    kept = keeper.outputs[0]
    # A state of a Scan keeps its shape, so the shape of its output can be used.
    shape = value.shape or (graph.outputs[i].shape if plain is not None else None)
    kept.name, kept.type, kept.shape = name, value.type, shape
    graph.append(keeper)
    graph.outputs.append(kept)
    saved = node.add_output(len(graph.outputs) - 1 - states.start)
    saved.type = value.type
    saved.shape = None if shape is None else ir.Shape([None, *shape])
    return saved


def replay(node: ForwardNode, graph: ir.Graph, places: Sequence[int]) -> dict[int, ir.Value]:
    """Record a Loop that runs the forward body again and saves the states at `places` in sequences."""
    if not places:
        return {}
    op = node.op
    body, states, needed = _forward_again(node, graph, places)
    starts: list[ir.Value] = []
    keeping = body.new_ops()
    for i in places:
        type_ = states[i].type
        if not isinstance(type_, ir.TensorType):
            raise node.unsupported(f"the state {states[i].name!r} of its body is not known to be a tensor")
        (start,) = op.add("SequenceEmpty", [], {"dtype": int(type_.dtype)})
        start.type = ir.SequenceType(type_)
        before = body.value_like(start, f"{states[i].name}/kept")
        (after,) = keeping.add("SequenceInsert", [before, states[i]])
        after.type = start.type
        body.graph.inputs.append(before)
        body.graph.outputs.append(after)
        starts.append(start)
    body.graph.extend(keeping.nodes)
    operands = [*node.inputs[:2], *(node.input(2 + i) for i in needed), *starts]
    outputs = op.add("Loop", operands, {"body": body.graph}, outputs=len(needed) + len(starts))
    for output, value in zip(outputs, (*(states[i] for i in needed), *starts), strict=True):
        output.type = value.type
    return dict(zip(places, outputs[len(needed) :], strict=True))


def run_again(
    node: ForwardNode, graph: ir.Graph, places: Sequence[int], op: Recorder, count: ir.Value
) -> dict[int, ir.Value]:
    """Record on `op` a Loop that runs `count` iterations of the forward body; returns some of its states."""
    if not places:
        return {}
    body, states, needed = _forward_again(node, graph, places)
    # All of these iterations ran, so their condition does not matter.
    operands = [count, None, *(node.input(2 + i) for i in needed)]
    outputs = op.add("Loop", operands, {"body": body.graph}, outputs=len(needed))
    for output, i in zip(outputs, needed, strict=True):
        output.type = states[i].type
    return {i: output for i, output in zip(needed, outputs, strict=True) if i in places}


def _forward_again(
    node: ForwardNode, graph: ir.Graph, places: Sequence[int]
) -> tuple[Body, Sequence[ir.Value], list[int]]:
    """Return the forward body of a Loop, reduced to what the states at `places` depend on.

    Returns the body, all its states, and the numbers of those that are inputs and outputs of its graph.
    """
    body = Body(node, graph)
    states, results = body.inputs[2:], body.outputs[1 : len(body.inputs) - 1]
    capture_unchanged(states, results, node.inputs[2:])
    needed = _needed_states(body, states, results, places)
    body.graph.inputs.extend([*body.inputs[:2], *(states[i] for i in needed)])
    body.close([body.outputs[0], *(results[i] for i in needed)])
    return body, states, needed


def _needed_states(
    body: Body, states: Sequence[ir.Value], results: Sequence[ir.Value], places: Sequence[int]
) -> list[int]:
    """Return the states on which those at `places` and the number of iterations depend."""
    needed: set[int] = set()
    more = set(places)
    while more:
        needed |= more
        read = {body.outputs[0], *(results[i] for i in needed)}
        for made in reversed(body.graph):
            if any(value in read for value in made.outputs):
                read.update(dependencies(made))
        more = {i for i, value in enumerate(states) if value in read} - needed
    return sorted(needed)
