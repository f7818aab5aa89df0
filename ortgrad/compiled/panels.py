"""The instruction `multiply_panel` for compiled code (see ortgrad.compiled.functions). Imports Numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ortgrad.compiled import instructions, processor
from ortgrad.compiled.functions import PANEL
from ortgrad.compiled.instructions import instruction

_WORD = ir.IntType(64)
_VECTORS = 2  # of a row of the panel that are multiplied at once


def _groups() -> tuple[int, ...]:
    """Return how many rows are multiplied at once, from the most to the fewest.

    The sums of eight rows take sixteen registers, half of the registers of some processors.
    """
    return (8, 4, 2, 1) if processor.has_many_registers() else (4, 2, 1)


@instruction
def multiply_panel(context: Any, builder: Any, given: Any) -> None:
    """Multiply rows with a panel."""
    lanes = instructions.lanes(given.panel.bits)
    kind = ir.VectorType(given.panel.element, lanes)
    done: Any = _WORD(0)
    for size in _groups():
        # With 8, 4, 2 and 1: as many groups of 8 as there are, then at most one of each other size.
        number = builder.sdiv(builder.sub(given.rows, done), _WORD(size))
        with cgutils.for_range(builder, number) as group:
            first = builder.add(done, builder.mul(group.index, _WORD(size)))
            sums = given.sums.at(builder.mul(first, given.stride))
            left = given.left.values.at(builder.mul(first, given.left.stride))
            for start in range(0, PANEL, lanes * _VECTORS):
                places = [start + i * lanes for i in range(_VECTORS)]
                rows = [builder.gep(left, [builder.mul(given.left.stride, _WORD(i))]) for i in range(size)]
                _multiply(builder, kind, rows, places, sums, given)
        done = builder.add(done, builder.mul(number, _WORD(size)))


def _multiply(
    builder: Any, kind: Any, left: Sequence[Any], places: Sequence[int], into: Any, given: Any
) -> None:
    """Multiply rows that begin at `left` with the vectors at some places of a panel's rows, in registers."""
    align = 8 if isinstance(kind.element, ir.DoubleType) else 4
    with builder.goto_entry_block():
        sums = [[builder.alloca(kind) for _ in places] for _ in left]
    for total in (total for row in sums for total in row):
        builder.store(ir.Constant(kind, None), total)
    with cgutils.for_range(builder, given.terms) as term:
        row = given.panel.at(builder.mul(term.index, _WORD(PANEL)))
        vectors = [builder.load(_vector(builder, row, place, kind), align=align) for place in places]
        step = builder.mul(term.index, given.left.step)
        for start, totals in zip(left, sums, strict=True):
            factor = instructions.broadcast(builder, builder.load(builder.gep(start, [step])), kind)
            for vector, total in zip(vectors, totals, strict=True):
                product = builder.fmul(factor, vector, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    adds = builder.icmp_signed("!=", given.add, _WORD(0))
    for i, totals in enumerate(sums):
        row = builder.gep(into, [builder.mul(given.stride, _WORD(i))])
        for place, total in zip(places, totals, strict=True):
            to = _vector(builder, row, place, kind)
            with builder.if_then(adds):
                builder.store(builder.fadd(builder.load(to, align=align), builder.load(total)), total)
            builder.store(builder.load(total), to, align=align)


def _vector(builder: Any, row: Any, place: int, kind: Any) -> Any:
    return builder.bitcast(builder.gep(row, [_WORD(place)]), kind.as_pointer())
