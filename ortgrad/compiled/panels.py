"""The instruction `multiply_panel` for compiled code (see ortgrad.compiled.functions). Imports Numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ortgrad.compiled import instructions, processor
from ortgrad.compiled.functions import PANEL

NAMES = ("multiply_panel",)
_WORD = ir.IntType(64)
_VECTORS = 2  # of a row of the panel that are multiplied at once


def _groups() -> tuple[int, ...]:
    """Return how many rows are multiplied at once, from the most to the fewest.

    Eight rows take sixteen registers for their sums, which are half of those of some processors.
    """
    return (8, 4, 2, 1) if processor.has_many_registers() else (4, 2, 1)


class _Operands(NamedTuple):
    """The operands of `multiply_panel`, as pointers and integers."""

    sums: Any
    stride: Any
    left: Any
    left_stride: Any
    left_step: Any
    panel: Any
    terms: Any
    rows: Any
    add: Any


@intrinsic
def multiply_panel(
    _: Any,
    sums: Any,
    stride: Any,
    left: Any,
    left_stride: Any,
    left_step: Any,
    panel: Any,
    terms: Any,
    rows: Any,
    add: Any,
) -> Any:
    """Multiply rows with a panel."""
    bits = panel.dtype.bitwidth
    lanes, groups = instructions.lanes(bits), _groups()
    kind = ir.VectorType(ir.DoubleType() if bits == 64 else ir.FloatType(), lanes)
    parameters = sums, stride, left, left_stride, left_step, panel, terms, rows, add

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        given = _Operands(
            *(
                context.make_array(type_)(context, builder, value=value).data
                if isinstance(type_, types.Array)
                else value
                for type_, value in zip(signature.args, arguments, strict=True)
            )
        )
        done: Any = _WORD(0)
        for size in groups:
            # With 8, 4, 2 and 1: as many groups of 8 as there are, then at most one of each other size.
            number = builder.sdiv(builder.sub(given.rows, done), _WORD(size))
            with cgutils.for_range(builder, number) as group:
                first = builder.add(done, builder.mul(group.index, _WORD(size)))
                own = given._replace(
                    sums=builder.gep(given.sums, [builder.mul(first, given.stride)]),
                    left=builder.gep(given.left, [builder.mul(first, given.left_stride)]),
                )
                for start in range(0, PANEL, lanes * _VECTORS):
                    _multiply(builder, kind, size, [start + i * lanes for i in range(_VECTORS)], own)
            done = builder.add(done, builder.mul(number, _WORD(size)))
        return context.get_dummy_value()

    # Integers, also constant ones, are 64 bits wide.
    return types.void(*(t if isinstance(t, types.Array) else types.int64 for t in parameters)), generate


def _multiply(builder: Any, kind: Any, rows: int, places: Sequence[int], given: _Operands) -> None:
    """Multiply some rows with the vectors at some places of a panel's rows, in registers."""
    align = 8 if isinstance(kind.element, ir.DoubleType) else 4
    with builder.goto_entry_block():
        sums = [[builder.alloca(kind) for _ in places] for _ in range(rows)]
    for total in (total for row in sums for total in row):
        builder.store(ir.Constant(kind, None), total)
    starts = [builder.gep(given.left, [builder.mul(given.left_stride, _WORD(i))]) for i in range(rows)]
    with cgutils.for_range(builder, given.terms) as term:
        row = builder.gep(given.panel, [builder.mul(term.index, _WORD(PANEL))])
        vectors = [builder.load(_vector(builder, row, place, kind), align=align) for place in places]
        step = builder.mul(term.index, given.left_step)
        for start, totals in zip(starts, sums, strict=True):
            factor = instructions.broadcast(builder, builder.load(builder.gep(start, [step])), kind)
            for vector, total in zip(vectors, totals, strict=True):
                product = builder.fmul(factor, vector, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    adds = builder.icmp_signed("!=", given.add, _WORD(0))
    for i, totals in enumerate(sums):
        row = builder.gep(given.sums, [builder.mul(given.stride, _WORD(i))])
        for place, total in zip(places, totals, strict=True):
            to = _vector(builder, row, place, kind)
            with builder.if_then(adds):
                builder.store(builder.fadd(builder.load(to, align=align), builder.load(total)), total)
            builder.store(builder.load(total), to, align=align)


def _vector(builder: Any, row: Any, place: int, kind: Any) -> Any:
    return builder.bitcast(builder.gep(row, [_WORD(place)]), kind.as_pointer())
