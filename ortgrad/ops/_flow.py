"""Scan and If in bodies, definitions and rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ortgrad.graph.lazy import Recorder, ir

# The results of a step, or of a Scan: the states after it, and elements of sequences (or the sequences).
Results: TypeAlias = "tuple[Sequence[ir.Value], Sequence[ir.Value]]"
# step(op, states, *elements), with the states before it and the elements of the sequences that are read.
Step: TypeAlias = "Callable[..., Results]"


def scan(
    op: Recorder,
    states: Sequence[ir.Value],
    sequences: Sequence[ir.Value],
    step: Step,
    *,
    reverse: bool = False,
    rank: int = 2,
) -> Results:
    """Run `step` over the first axis of the sequences; its states and elements have `rank` dimensions."""
    count = len(states)

    def build(op: Recorder, *inputs: ir.Value) -> Sequence[ir.Value]:
        new, made = step(op, inputs[:count], *inputs[count:])
        return [*new, *made]

    name = "reverse" if reverse else "forward"
    inputs = [
        ir.Value(name=op.name(f"{name}/input_{i}"), type=value.type)
        for i, value in enumerate([*states, *sequences])
    ]
    body = op.subgraph(name, inputs, build)
    for value in body.outputs:
        # onnxruntime 1.23 requires the rank.
        value.shape = ir.Shape([None] * rank)
    results = op.Scan(
        *states,
        *sequences,
        body=body,
        num_scan_inputs=len(sequences),
        scan_input_directions=[int(reverse)] * len(sequences),
        scan_output_directions=[int(reverse)] * (len(body.outputs) - count),
        _outputs=len(body.outputs),
    )
    return results[:count], results[count:]


def choose(
    op: Recorder,
    condition: ir.Value,
    then: Callable[[Recorder], ir.Value],
    otherwise: Callable[[Recorder], ir.Value],
    like: ir.Value,
) -> ir.Value:
    """Return `then(op)` if the condition holds, else `otherwise(op)`; both are of the type of `like`."""
    result: ir.Value = op.If(
        condition,
        then_branch=op.subgraph("then", [], lambda op: [then(op)]),
        else_branch=op.subgraph("else", [], lambda op: [otherwise(op)]),
    )
    result.type = like.type
    return result
