"""Gradient rules of If, Loop and Scan.

The backward node runs the subgraph's forward nodes again, and then their backward nodes. The iterations
of a loop are processed from last to first: the forward node is changed to save the states at the start of
every iteration, and the backward node carries the gradients of the states, and a sum for every outer
value that the body reads, unless that sum can be computed after the loop (see _stacked_gradients). A state
that the body passes on unchanged is treated as an outer value, so neither it nor its gradient is stacked.

The states of a Loop may change their shape from iteration to iteration, but only tensors of equal shapes can
be stacked. Other states are saved in sequences, by a second Loop that runs the forward body again.
There are no sequences of sequences: a sequence state that the backward nodes read is computed again for
every iteration, from the first one on; one that is only appended to is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from ortgrad.autodiff.backward import BackwardPass, active_values
from ortgrad.autodiff.rules import ForwardNode, Gradients
from ortgrad.errors import unknown_rank
from ortgrad.graph.recorder import RANDOM, Recorder
from ortgrad.graph.traversal import FLOAT_TYPES, captured_values, dependencies, release_captured
from ortgrad.ops._stacked_gradients import StackedGradient, stacked_gradient


def if_gradient(node: ForwardNode) -> Gradients:
    names = ("then_branch", "else_branch")
    graphs = [node.attribute(name) for name in names]
    captured = _active_captures(node, graphs)
    seeds = {i: g for i in range(len(node.outputs)) if (g := node.optional_grad(i)) is not None}
    branches = {}
    for name, graph in zip(names, graphs, strict=True):
        body = _Body(node, graph)
        totals = body.differentiate(seeds, captured)
        body.close([t or body.op.full_like(v, 0.0) for v, t in zip(captured, totals, strict=True)])
        branches[name] = body.graph
    results = _emit(node.op, "If", [node.input(0)], branches, captured)
    node.captured.update(zip(captured, results, strict=True))
    return (None,)


def loop_gradient(node: ForwardNode) -> Gradients:
    op, graph = node.op, node.attribute("body")
    count = len(graph.inputs) - 2
    before, after = slice(2, 2 + count), slice(1, 1 + count)
    step = _Step(node, graph, node.inputs[2:], before, after)
    body, states = step.body, step.states
    needed = [i for i, value in enumerate(states) if value.uses()]
    same = [i for i in needed if _keeps_shape(node.input(2 + i), states[i])]
    saved = {i: _save(node, graph, 2 + i, after) for i in same}
    counted = next(iter(saved.values())) if saved else _save(node, graph, 0, after)
    trips = op.Squeeze(op.Shape(counted, start=0, end=1))
    last = op.Sub(trips, 1)

    # Iteration k of the backward loop differentiates iteration last - k.
    number, condition = (body.value_like(value, f"{value.name}") for value in body.inputs[:2])
    number.shape = condition.shape = ir.Shape([])
    front = body.new_ops()
    current = front.Sub(last, number)
    provided = {states[i]: front.Gather(tensor, current, axis=0) for i, tensor in saved.items()}
    tensors = [i for i in needed if i not in saved and not isinstance(states[i].type, ir.SequenceType)]
    for i, sequence in _replay(node, graph, tensors).items():
        provided[states[i]] = front.SequenceAt(sequence, current)
    sequences = [i for i in needed if isinstance(states[i].type, ir.SequenceType)]
    provided |= {states[i]: value for i, value in _run_again(node, graph, sequences, front, current).items()}
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
    step = _Step(node, graph, node.inputs, states, states, ranked=True)
    body = step.body

    plain = [axis == direction == 0 for axis, direction in zip(output_axes, output_directions, strict=True)]
    # The scan inputs of the backward node: value in the body, tensor, axis, and reversed direction.
    scans: list[tuple[ir.Value, ir.Value, int, int]] = []
    for i, value in enumerate(body.inputs):
        if not value.uses():
            continue
        if i < count:
            scans.append((value, _save(node, graph, i, states, plain), 0, 1))
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


class _Body:
    """A copy of a subgraph to which its backward nodes are added.

    `inputs` and `outputs` are those of the forward subgraph; `graph` has none until they are set.
    """

    def __init__(self, node: ForwardNode, graph: ir.Graph) -> None:
        _refuse_random(node, graph)
        self._node = node
        self.graph = graph.clone(allow_outer_scope_values=True)
        node.op.names.rename(self.graph)
        self.inputs = list(self.graph.inputs)
        self.outputs = list(self.graph.outputs)
        self.graph.inputs.clear()
        self.graph.outputs.clear()
        self.op = self.new_ops()

    def new_ops(self) -> Recorder:
        return self._node.op.inside(self.graph.name or "body")

    def value_like(self, value: ir.Value, name: str) -> ir.Value:
        """Return a new input for the graph, with the type and shape of another value."""
        return ir.Value(name=self.new_ops().name(name), type=value.type, shape=value.shape)

    def differentiate(
        self, seeds: Mapping[int, ir.Value], targets: Sequence[ir.Value]
    ) -> list[ir.Value | None]:
        """Return the gradients of the targets, given those of outputs; None where there is none."""
        backward = BackwardPass(self.op, list(self.graph), targets, outside=seeds.values())
        for i, grad in seeds.items():
            backward.seed(self.outputs[i], grad)
        backward.run()
        if backward.failures:
            reasons = [f"{f.node.op_type} node {f.node.name!r}: {f.reason}" for f in backward.failures]
            raise self._node.unsupported(f"in {self.graph.name!r}, {'; '.join(reasons)}")
        return [backward.total(value) for value in targets]

    def close(self, outputs: Iterable[ir.Value], keep: Iterable[ir.Value] = ()) -> None:
        """Add the recorded nodes and the outputs to the graph, and remove unused nodes.

        `keep` are values that will be used later.
        """
        own: set[ir.Value] = {value for made in self.op.nodes for value in made.outputs}
        for value in outputs:
            # Each output of a graph must be the output of a different node in it.
            output = value if value in own else self.op.copy(value)
            own.discard(output)
            self.graph.outputs.append(output)
        self.graph.extend(self.op.nodes)
        kept = {*self.graph.outputs, *keep}
        for made in reversed(self.graph):
            if not any(value in kept or value.uses() for value in made.outputs):
                release_captured(made)
                self.graph.remove(made, safe=True)

    def provide(self, front: Recorder, values: Mapping[ir.Value, ir.Value]) -> None:
        """Replace values by others that `front` recorded, and add its nodes to the graph."""
        for value, other in values.items():
            other.type, other.shape = other.type or value.type, other.shape or value.shape
            ir.convenience.replace_all_uses_with(value, other)
        self.graph.extend(front.nodes)
        self.graph.sort()


class _Step:
    """One iteration of the backward loop: the gradients that it carries, and the body that computes them.

    `carried` are the gradients of states that are passed from iteration to iteration. `ends` are those of
    states through which no gradient reaches the previous iteration, so they start anew in each iteration.
    States and scan outputs are identified by number, scan inputs by their index among the inputs. `inputs`
    and `outputs` are the positions of the states among those of the body. With `ranked`, all outputs of the
    body must have a known rank, as Scan requires: gradients of values without one are flattened.
    """

    def __init__(
        self,
        node: ForwardNode,
        graph: ir.Graph,
        operands: Gradients,
        inputs: slice,
        outputs: slice,
        *,
        ranked: bool = False,
    ) -> None:
        self._node = node
        self.body = body = _Body(node, graph)
        self.states = body.inputs[inputs]
        if ranked:
            _refuse_sequences(node, graph)
            for value, result in zip(self.states, body.outputs[outputs], strict=True):
                # A state of a Scan keeps its shape, so the shape of its output can be used.
                value.shape = value.shape or result.shape
        fed = list(zip(body.inputs[inputs.start :], operands, strict=False))
        for value, operand in fed:
            if value.type is None and operand is not None:
                value.type = operand.type
        self._operands = [operand for _, operand in fed[: len(self.states)]]
        self._unchanged = _capture_unchanged(self.states, body.outputs[outputs], self._operands)
        captured = _active_captures(node, [graph])
        captured += [value for value in self._unchanged.values() if value in node.active]
        captured = list(dict.fromkeys(captured))
        targets = [value for value, operand in fed if operand in node.active]
        targets += _activated(list(body.graph), [*targets, *captured], self.states, body.outputs[outputs])
        self.carried = {}
        for i, (value, result) in enumerate(zip(self.states, body.outputs[outputs], strict=True)):
            if value not in targets or i in self._unchanged:
                continue
            if node.optional_grad(i) is not None or value.uses() or value in body.outputs:
                # The body receives the gradient of the state that the iteration computed.
                seed = self.carried[i] = body.value_like(value, f"{value.name}_grad")
                seed.shape = result.shape or value.shape
        self.pieces = {
            i: body.value_like(value, f"{value.name}_grad")
            for i, value in enumerate(body.outputs[outputs.stop :])
            if node.optional_grad(len(self.states) + i) is not None
        }
        seeds = {outputs.start + i: value for i, value in self.carried.items()}
        seeds |= {outputs.stop + i: value for i, value in self.pieces.items()}
        grads = body.differentiate(seeds, [*targets, *captured])
        totals = {v: g for v, g in zip([*targets, *captured], grads, strict=True) if g is not None}
        self._deferred = _deferred(node, graph, {v: totals[v] for v in captured if v in totals}, ranked)
        # What the loop stacks for gradients that are computed after it.
        self.stacks = {v: shape for each in self._deferred.values() for v, shape in each.operands.items()}
        self.sums = {
            value: body.value_like(value, f"{value.name}_grad_sum")
            for value in captured
            if value in totals and value not in self._deferred
        }
        self.ends: dict[int, ir.Value] = {}
        if not ranked:
            self.ends = {i: seed for i, seed in self.carried.items() if self.states[i] not in totals}
            self.carried = {i: seed for i, seed in self.carried.items() if i not in self.ends}
        self.scanned = [i for i, v in enumerate(body.inputs) if i >= inputs.stop and v in totals]
        op = body.op
        self._flat = {value for value in self.sums if ranked and value.shape is None}
        self.flat_scanned = [i for i in self.scanned if ranked and body.inputs[i].shape is None]
        for value in (*self._flat, *(body.inputs[i] for i in self.flat_scanned)):
            totals[value] = op.Reshape(totals[value], [-1])
        for value in self._flat:
            self.sums[value].shape = ir.Shape([None])
        # In a Scan, a state and its gradient have the same shape in all iterations.
        after = [totals.get(self.states[i]) or op.full_like(seed, 0.0) for i, seed in self.carried.items()]
        after += [op.sum([total, totals[value]]) for value, total in self.sums.items()]
        after += [totals[body.inputs[i]] for i in self.scanned]
        after += self.stacks.keys()
        results = body.outputs[outputs]
        body.close(after, keep=[results[i] for i in self.ends])
        stacks = reversed(self.stacks.items())
        for output, (value, shape) in zip(reversed(body.graph.outputs), stacks, strict=False):
            output.type, output.shape = value.type, ir.Shape(shape)
        if ranked:
            ranks = [*(self.states[i] for i in self.carried), *self.sums.values()]
            ranks += [body.inputs[i] for i in self.scanned]
            for output, value in zip(body.graph.outputs, ranks, strict=False):
                rank = 1 if value.shape is None else len(value.shape)
                output.type, output.shape = value.type, ir.Shape([None] * rank)
        self.pieces = {i: value for i, value in self.pieces.items() if value.uses()}

    @property
    def before(self) -> list[ir.Value]:
        """The inputs of the body that carry gradients and sums."""
        return [*self.carried.values(), *self.sums.values()]

    @property
    def initial(self) -> list[ir.Value]:
        """The initial values of `before`: gradients of the final states, and zeros for the sums."""
        op = self._node.op
        zeros = [op.full_like(value, 0.0) for value in self.sums]
        zeros = [op.Reshape(z, [-1]) if v in self._flat else z for v, z in zip(self.sums, zeros, strict=True)]
        return [*(self._node.grad(i) for i in self.carried), *zeros]

    @property
    def like(self) -> list[ir.Value]:
        """Values with the types and shapes of the backward node's first outputs."""
        starts = (self._operands[i] or self.states[i] for i in self.carried)
        return [*starts, *self.sums.values()]

    @property
    def like_stacks(self) -> list[ir.Value]:
        """Values with the types and shapes of the stacks, the backward node's last outputs."""
        stacks = self.stacks.items()
        return [ir.Value(type=value.type, shape=ir.Shape([None, *shape])) for value, shape in stacks]

    def finish(self, results: Sequence[ir.Value]) -> list[ir.Value | None]:
        """Store the sums as gradients of captured values; returns the gradients of the initial states."""
        op = self._node.op
        stacks = dict(zip(reversed(self.stacks), reversed(results), strict=False))
        for value, deferred in self._deferred.items():
            self._node.captured[value] = deferred.compute(op, stacks)
        for value, total in zip(self.sums, results[len(self.carried) :], strict=False):
            flat = value in self._flat
            self._node.captured[value] = op.Reshape(total, op.Shape(value), allowzero=1) if flat else total
        grads: dict[int, ir.Value | None] = dict(zip(self.carried, results, strict=False))
        grads |= {i: self._node.optional_grad(i) for i in self._unchanged}
        return [grads.get(i) for i in range(len(self.states))]


def _deferred(
    node: ForwardNode, graph: ir.Graph, totals: Mapping[ir.Value, ir.Value], ranked: bool
) -> dict[ir.Value, StackedGradient]:
    """Return the captured values whose gradients are computed after the loop."""
    outer = [*(v for v in node.inputs if v is not None), *captured_values(graph)]
    # Inference gives a unique name to an unknown size, so a name from outside stands for one size.
    names = {n.value for v in outer for n in v.shape or () if isinstance(n, ir.SymbolicDim)} - {None}

    def is_steady(value: ir.Value) -> bool:
        if not isinstance(value.type, ir.TensorType) or value.shape is None:
            return False
        # In a Scan, all values keep their shape.
        return ranked or all(isinstance(n, int) or n.value in names for n in value.shape)

    found = {value: stacked_gradient(value, total, is_steady) for value, total in totals.items()}
    return {value: gradient for value, gradient in found.items() if gradient is not None}


def _activated(
    nodes: Sequence[ir.Node],
    targets: Sequence[ir.Value],
    before: Sequence[ir.Value],
    after: Sequence[ir.Value],
) -> list[ir.Value]:
    """Return the states whose initial value does not depend on the targets, but later values do."""
    found: list[ir.Value] = []
    while True:
        active = active_values(nodes, [*targets, *found])
        more = [
            start
            for start, end in zip(before, after, strict=True)
            if end in active and start not in active and start.dtype in FLOAT_TYPES
        ]
        if not more:
            return found
        found += more


def _source(value: ir.Value) -> ir.Value:
    """Return the value that `value` is a copy of, or `value` itself."""
    while (node := value.producer()) is not None:
        place, source = value.index() or 0, None
        if node.op_type == "Identity":
            source = node.inputs[0]
        elif node.op_type in ("Loop", "Scan"):
            body = node.attributes["body"].as_graph()
            first, results = (2, body.outputs[1:]) if node.op_type == "Loop" else (0, body.outputs)
            scanned = 0 if node.op_type == "Loop" else node.attributes["num_scan_inputs"].as_int()
            states = body.inputs[first : len(body.inputs) - scanned]
            if place < len(states) and _source(results[place]) is states[place]:
                source = node.inputs[first + place]
        elif node.op_type == "If":
            branches = [attribute.as_graph() for attribute in node.attributes.values()]
            sources = {_source(branch.outputs[place]) for branch in branches}
            source = sources.pop() if len(sources) == 1 else None
        if source is None:
            break
        value = source
    return value


def _keeps_shape(start: ir.Value, state: ir.Value) -> bool:
    """Return whether a state of a Loop is known to have its initial shape in all iterations."""
    if not isinstance(state.type, ir.TensorType):
        return False
    if start.shape is None or state.shape is None or len(start.shape) != len(state.shape):
        return False
    # Inference gives a unique name to an unknown size, so equal names stand for equal sizes.
    pairs = zip(start.shape, state.shape, strict=True)
    return all(a == b and (isinstance(a, int) or a.value is not None) for a, b in pairs)


def _capture_unchanged(
    states: Sequence[ir.Value], results: Sequence[ir.Value], operands: Gradients
) -> dict[int, ir.Value]:
    """Make a body read states that it does not change from outside; returns the outer values by state."""
    found: dict[int, ir.Value] = {}
    for i, (value, result, operand) in enumerate(zip(states, results, operands, strict=True)):
        known = operand is not None and (operand.shape is not None or value.shape is None)
        if operand is not None and known and _source(result) is value:
            found[i] = operand
    for i, operand in found.items():
        ir.convenience.replace_all_uses_with(states[i], operand)
    return found


def _replay(node: ForwardNode, graph: ir.Graph, places: Sequence[int]) -> dict[int, ir.Value]:
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


def _run_again(
    node: ForwardNode, graph: ir.Graph, places: Sequence[int], op: Recorder, count: ir.Value
) -> dict[int, ir.Value]:
    """Record on `op` a Loop that runs `count` iterations of the forward body; returns some of its states."""
    if not places:
        return {}
    body, states, needed = _forward_again(node, graph, places)
    # All of these iterations ran, whatever their condition is.
    operands = [count, None, *(node.input(2 + i) for i in needed)]
    outputs = op.add("Loop", operands, {"body": body.graph}, outputs=len(needed))
    for output, i in zip(outputs, needed, strict=True):
        output.type = states[i].type
    return {i: output for i, output in zip(needed, outputs, strict=True) if i in places}


def _forward_again(
    node: ForwardNode, graph: ir.Graph, places: Sequence[int]
) -> tuple[_Body, Sequence[ir.Value], list[int]]:
    """Return the forward body of a Loop without what some of its states do not depend on.

    Returns the body, all its states, and which of them are inputs and outputs of its graph.
    """
    body = _Body(node, graph)
    states, results = body.inputs[2:], body.outputs[1 : len(body.inputs) - 1]
    _capture_unchanged(states, results, node.inputs[2:])
    needed = _needed_states(body, states, results, places)
    body.graph.inputs.extend([*body.inputs[:2], *(states[i] for i in needed)])
    body.close([body.outputs[0], *(results[i] for i in needed)])
    return body, states, needed


def _needed_states(
    body: _Body, states: Sequence[ir.Value], results: Sequence[ir.Value], places: Sequence[int]
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


def _if(op: Recorder, condition: ir.Value, grad: ir.Value | None, like: ir.Value) -> ir.Value:
    """Return a gradient if the condition holds, else zeros of the shape of `like`."""
    if grad is None:
        return op.full_like(like, 0.0)
    branches = {
        "then_branch": op.subgraph("then", [], lambda inner: [inner.copy(grad)]),
        "else_branch": op.subgraph("else", [], lambda inner: [inner.full_like(like, 0.0)]),
    }
    (result,) = op.add("If", [condition], branches)
    result.type = like.type
    return result


def _active_captures(node: ForwardNode, graphs: Iterable[ir.Graph]) -> list[ir.Value]:
    found = dict.fromkeys(value for graph in graphs for value in captured_values(graph))
    return [value for value in found if value in node.active]


def _refuse_sequences(node: ForwardNode, graph: ir.Graph) -> None:
    """A Scan carries no sequences, so it cannot sum up the gradient of one."""
    for value in _active_captures(node, [graph]):
        if not isinstance(value.type, ir.TensorType | None):
            raise node.unsupported(
                f"its body reads from outside {value.name!r}, which is no tensor; read its elements in front "
                "of the node, or put a Loop in its place"
            )


def _refuse_random(node: ForwardNode, graph: ir.Graph) -> None:
    """Raise an error for random nodes, which would draw other numbers when the backward node runs them."""
    for inner in RecursiveGraphIterator(graph):
        idle = inner.op_type == "Dropout" and (len(inner.inputs) < 3 or inner.inputs[2] is None)
        if inner.op_type in RANDOM and not idle:
            raise node.unsupported(f"its subgraph holds the random {inner.op_type} node {inner.name!r}")


def _save(
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
