"""Gradient rules of If, Loop and Scan.

The backward node runs the subgraph's forward nodes again, and then their backward nodes. The iterations of a
loop are processed from last to first: the forward node is changed to save the states at the start of every
iteration (`_states`). The backward node carries the gradients of the states, and a sum for every outer value
that the body reads (`_steps`), unless that sum can be computed after the loop (`_stacked`). A state that the
body passes on unchanged is treated as an outer value, so neither it nor its gradient is stacked.

The states of a Loop may change their shape from iteration to iteration, but only tensors of equal shapes can
be stacked. Other states are saved in sequences, by a second Loop that runs the forward body again. There are
no sequences of sequences: a state that is a sequence and is read by the backward nodes is computed again for
every iteration, beginning with the first. A sequence that the body only appends to is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgrad.autodiff.rules import ForwardNode, Gradients
from ortgrad.errors import unknown_rank
from ortgrad.graph.recorder import Recorder
from ortgrad.ops._flow import choose
from ortgrad.ops.control._bodies import Body, active_captures
from ortgrad.ops.control._states import keeps_shape, replay, run_again, save
from ortgrad.ops.control._steps import Step


def if_gradient(node: ForwardNode) -> Gradients:
    names = ("then_branch", "else_branch")
    graphs = [node.attribute(name) for name in names]
    captured = active_captures(node, graphs)
    seeds = {i: g for i in range(len(node.outputs)) if (g := node.optional_grad(i)) is not None}
    branches = {}
    for name, graph in zip(names, graphs, strict=True):
        body = Body(node, graph)
        totals = body.differentiate(seeds, captured)
        body.close([totals.get(value) or body.op.full_like(value, 0.0) for value in captured])
        branches[name] = body.graph
    results = _emit(node.op, "If", [node.input(0)], branches, captured)
    node.captured.update(zip(captured, results, strict=True))
    return (None,)


def loop_gradient(node: ForwardNode) -> Gradients:
    op, graph = node.op, node.attribute("body")
    count = len(graph.inputs) - 2
    before, after = slice(2, 2 + count), slice(1, 1 + count)
    step = Step(node, graph, node.inputs[2:], before, after)
    body, states = step.body, step.states
    needed = [i for i, value in enumerate(states) if value.uses()]
    same = [i for i in needed if keeps_shape(node.input(2 + i), states[i])]
    saved = {i: save(node, graph, 2 + i, after) for i in same}
    counted = next(iter(saved.values())) if saved else save(node, graph, 0, after)
    trips = op.Squeeze(op.Shape(counted, start=0, end=1))
    last = op.Sub(trips, 1)

    # Iteration k of the backward loop differentiates iteration last - k.
    number, condition = (body.value_like(value, f"{value.name}") for value in body.inputs[:2])
    number.shape = condition.shape = ir.Shape([])
    front = body.new_ops()
    current = front.Sub(last, number)
    provided = {states[i]: front.Gather(tensor, current, axis=0) for i, tensor in saved.items()}
    tensors = [i for i in needed if i not in saved and not isinstance(states[i].type, ir.SequenceType)]
    for i, sequence in replay(node, graph, tensors).items():
        provided[states[i]] = front.SequenceAt(sequence, current)
    sequences = [i for i in needed if isinstance(states[i].type, ir.SequenceType)]
    provided |= {states[i]: value for i, value in run_again(node, graph, sequences, front, current).items()}
    for i, piece in step.pieces.items():
        provided[piece] = front.Gather(node.grad(count + i), current, axis=0)
    for i, seed in step.ends.items():
        # Only the state after the last iteration is a result of the loop.
        if seed.uses():
            provided[seed] = _if(front, front.Equal(number, 0), node.optional_grad(i), body.outputs[1 + i])
    # Every iteration that ran started with a true condition, so the condition is true here too.
    true = front.constant(np.array(True))
    body.graph.outputs.insert(0, true)
    body.graph.inputs.extend([number, condition, *step.before])
    for value, scalar in zip(body.inputs[:2], (current, true), strict=True):
        # Some files declare these as vectors of one element, which onnxruntime accepts.
        vector = value.shape is not None and len(value.shape) == 1
        if value.uses():
            provided[value] = front.Reshape(scalar, [1]) if vector else scalar
    body.provide(front, provided)
    results = _emit(
        op, "Loop", [trips, None, *step.initial], {"body": body.graph}, [*step.like, *step.like_stacks]
    )
    grads = step.finish(results)
    for i in step.ends:
        # With no iterations, the initial state is the result.
        if node.wants(2 + i):
            grads[i] = _if(op, op.Equal(trips, 0), node.optional_grad(i), node.input(2 + i))
    return None, None, *grads


def scan_gradient(node: ForwardNode) -> Gradients:
    graph, scanned = node.attribute("body"), node.attribute("num_scan_inputs")
    count = len(graph.inputs) - scanned
    outputs = len(graph.outputs) - count
    axes = node.attribute("scan_input_axes") or [0] * scanned
    directions = node.attribute("scan_input_directions") or [0] * scanned
    output_axes = node.attribute("scan_output_axes") or [0] * outputs
    output_directions = node.attribute("scan_output_directions") or [0] * outputs
    states = slice(0, count)
    step = Step(node, graph, node.inputs, states, states, ranked=True)
    body = step.body

    plain = [axis == direction == 0 for axis, direction in zip(output_axes, output_directions, strict=True)]
    # The scan inputs of the backward node: value in the body, tensor, axis, and reversed direction.
    scans: list[tuple[ir.Value, ir.Value, int, int]] = []
    for i, value in enumerate(body.inputs):
        if not value.uses():
            continue
        if i < count:
            scans.append((value, save(node, graph, i, states, plain), 0, 1))
        else:
            scans.append((value, node.input(i), axes[i - count], 1 - directions[i - count]))
    for i, piece in step.pieces.items():
        scans.append((piece, node.grad(count + i), output_axes[i], 1 - output_directions[i]))
    for name in ("scan_output_axes", "scan_output_directions"):
        if node.attribute(name):
            saved = len(graph.outputs) - count - outputs
            node.forward.attributes.add(ir.AttrInt64s(name, [*node.attribute(name), *[0] * saved]))
    if not scans:
        # A Scan needs at least one scan input, which determines the number of iterations.
        scans.append((body.inputs[count], node.input(count), axes[0], 0))
    body.graph.inputs.extend([*step.before, *(value for value, *_ in scans)])
    attributes = {
        "body": body.graph,
        "num_scan_inputs": len(scans),
        "scan_input_axes": [axis for _, _, axis, _ in scans],
        "scan_input_directions": [direction for *_, direction in scans],
        "scan_output_axes": [*(axes[i - count] for i in step.scanned), *(0 for _ in step.stacks)],
        "scan_output_directions": [
            *(1 - directions[i - count] for i in step.scanned),
            *(0 for _ in step.stacks),
        ],
    }
    operands = [*step.initial, *(tensor for _, tensor, *_ in scans)]
    like = [*step.like, *(node.input(i) for i in step.scanned), *step.like_stacks]
    results = _emit(node.op, "Scan", operands, {k: v for k, v in attributes.items() if v}, like)
    grads = dict(zip(step.scanned, results[len(step.like) :], strict=False))
    for i in step.flat_scanned:
        if axes[i - count] != 0:
            scanned_value = f"{node.input(i).name!r}, which it scans along axis {axes[i - count]},"
            raise node.unsupported(unknown_rank(scanned_value))
        grads[i] = node.op.Reshape(grads[i], node.op.Shape(node.input(i)), allowzero=1)
    return *step.finish(results), *(grads.get(i) for i in range(count, count + scanned))


def _if(op: Recorder, condition: ir.Value, grad: ir.Value | None, like: ir.Value) -> ir.Value:
    """Return a gradient if the condition holds, else zeros of the shape of `like`."""
    if grad is None:
        return op.full_like(like, 0.0)
    return choose(op, condition, lambda op: grad, lambda op: op.full_like(like, 0.0), like)


def _emit(
    op: Recorder,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    like: Sequence[ir.Value],
) -> list[ir.Value]:
    """Record a node whose outputs have the types and shapes of `like`."""
    if not like:
        return []
    outputs = op.add(op_type, inputs, attributes, outputs=len(like))
    for output, value in zip(outputs, like, strict=True):
        output.type, output.shape = value.type, value.shape
    return list(outputs)


GRADIENTS = {"If": if_gradient, "Loop": loop_gradient, "Scan": scan_gradient}
