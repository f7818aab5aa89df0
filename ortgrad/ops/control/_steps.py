"""One iteration of the backward nodes of Loop and Scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from ortgrad.autodiff.backward import active_values
from ortgrad.autodiff.rules import ForwardNode, Gradients
from ortgrad.graph.traversal import FLOAT_TYPES, captured_values
from ortgrad.ops.control._bodies import Body, active_captures, capture_unchanged
from ortgrad.ops.control._stacked import StackedGradient, stacked_gradient


class Step:
    """One iteration of the backward loop: the gradients that it carries, and the body that computes them.

    `carried` are the gradients of states that are passed from iteration to iteration, `ends` those of states
    through which no gradient reaches the previous iteration, so they start anew in each iteration. `pieces`
    are the gradients of the elements of scan outputs that the body reads, `sums` those of outer values that
    are added up, and `stacks` what the loop stacks for gradients that are computed after it.

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
        self.body = body = Body(node, graph)
        self.states, self._results = body.inputs[inputs], body.outputs[outputs]
        if ranked:
            _refuse_sequences(node, graph)
            for value, result in zip(self.states, self._results, strict=True):
                # A state of a Scan keeps its shape, so the shape of its output can be used.
                value.shape = value.shape or result.shape
        fed = list(zip(body.inputs[inputs.start :], operands, strict=False))
        for value, operand in fed:
            if value.type is None and operand is not None:
                value.type = operand.type
        self._operands = [operand for _, operand in fed[: len(self.states)]]
        self._unchanged = capture_unchanged(self.states, self._results, self._operands)
        unchanged = [value for value in self._unchanged.values() if value in node.active]
        captured = list(dict.fromkeys([*active_captures(node, [graph]), *unchanged]))
        targets = [value for value, operand in fed if operand in node.active]
        targets += _activated(list(body.graph), [*targets, *captured], self.states, self._results)

        self.carried = self._seeds_of_states(targets)
        self.pieces = {
            i: body.value_like(value, f"{value.name}_grad")
            for i, value in enumerate(body.outputs[outputs.stop :])
            if node.optional_grad(len(self.states) + i) is not None
        }
        seeds = {outputs.start + i: value for i, value in self.carried.items()}
        seeds |= {outputs.stop + i: value for i, value in self.pieces.items()}
        totals = body.differentiate(seeds, [*targets, *captured])

        self._deferred = _deferred(node, graph, {v: totals[v] for v in captured if v in totals}, ranked)
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
        self._flat = [value for value in self.sums if ranked and value.shape is None]
        self.flat_scanned = [i for i in self.scanned if ranked and body.inputs[i].shape is None]
        self._close(totals)
        if ranked:
            self._declare_ranks()
        self.pieces = {i: value for i, value in self.pieces.items() if value.uses()}

    def _seeds_of_states(self, targets: Sequence[ir.Value]) -> dict[int, ir.Value]:
        """Return inputs for the body: the gradients of the states that an iteration computed."""
        found = {}
        for i, (value, result) in enumerate(zip(self.states, self._results, strict=True)):
            if value not in targets or i in self._unchanged:
                continue
            if self._node.optional_grad(i) is not None or value.uses() or value in self.body.outputs:
                seed = found[i] = self.body.value_like(value, f"{value.name}_grad")
                seed.shape = result.shape or value.shape
        return found

    def _close(self, totals: dict[ir.Value, ir.Value]) -> None:
        """Let the body return the gradients `totals`: carried on, added up, scanned or stacked."""
        body, op = self.body, self.body.op
        for value in (*self._flat, *(body.inputs[i] for i in self.flat_scanned)):
            totals[value] = op.Reshape(totals[value], [-1])
        for value in self._flat:
            self.sums[value].shape = ir.Shape([None])
        # In a Scan, a state and its gradient have the same shape in all iterations.
        after = [totals.get(self.states[i]) or op.full_like(seed, 0.0) for i, seed in self.carried.items()]
        after += [op.sum([total, totals[value]]) for value, total in self.sums.items()]
        after += [totals[body.inputs[i]] for i in self.scanned]
        after += self.stacks.keys()
        body.close(after, keep=[self._results[i] for i in self.ends])
        stacks = reversed(self.stacks.items())
        for output, (value, shape) in zip(reversed(body.graph.outputs), stacks, strict=False):
            output.type, output.shape = value.type, ir.Shape(shape)

    def _declare_ranks(self) -> None:
        """Give the outputs of the body the ranks of their values; what was flattened is a vector."""
        ranked = [*(self.states[i] for i in self.carried), *self.sums.values()]
        ranked += [self.body.inputs[i] for i in self.scanned]
        for output, value in zip(self.body.graph.outputs, ranked, strict=False):
            rank = 1 if value.shape is None else len(value.shape)
            output.type, output.shape = value.type, ir.Shape([None] * rank)

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


def _refuse_sequences(node: ForwardNode, graph: ir.Graph) -> None:
    """A Scan carries no sequences, so it cannot sum up the gradient of one."""
    for value in active_captures(node, [graph]):
        if not isinstance(value.type, ir.TensorType | None):
            raise node.unsupported(
                f"its body reads from outside {value.name!r}, which is not a tensor; read its elements "
                "before the node, or replace it by a Loop"
            )
