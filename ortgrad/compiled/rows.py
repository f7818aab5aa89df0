"""Instructions for rows of boxes (see ortgrad.ops._strips). This module imports Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ortgrad.compiled import instructions
from ortgrad.compiled.instructions import instruction

_WORD = ir.IntType(64)
# Elements of a list whose loads do not wait for the stores of those before.
_AT_ONCE = 4


@instruction
def add_row(context: Any, builder: Any, given: Any) -> None:
    """Compute one weighted sum of rows."""
    lanes = instructions.lanes(given.rows.bits)
    # Enough sums to hide the latency of additions.
    vectors = 4 if lanes * given.rows.bits == 512 else 8
    kind, align = ir.VectorType(given.rows.element, lanes), given.rows.bits // 8
    step = _WORD(lanes * vectors)
    blocks = builder.sdiv(builder.add(given.count, _WORD(lanes * vectors - 1)), step)
    with builder.goto_entry_block():
        totals = [builder.alloca(kind) for _ in range(vectors)]
    with cgutils.for_range(builder, blocks) as block:
        first = builder.mul(block.index, step)
        for total in totals:
            builder.store(ir.Constant(kind, None), total)
        with cgutils.for_range(builder, given.starts.length) as term:
            start = builder.load(given.starts.at(term.index))
            row = given.rows.at(builder.add(start, first))
            factor = instructions.broadcast(builder, builder.load(given.weights.at(term.index)), kind)
            for j, total in enumerate(totals):
                value = instructions.load_vector(builder, row, j * lanes, kind, align)
                product = builder.fmul(factor, value, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
        for j, total in enumerate(totals):
            pointer = builder.bitcast(given.sums.at(builder.add(first, _WORD(j * lanes))), kind.as_pointer())
            builder.store(builder.load(total), pointer, align=align)


@instruction
def copy_row(context: Any, builder: Any, given: Any) -> None:
    """Copy as many elements as the shorter array has, by the C library."""
    counts = given.into.length, given.source.length
    count = builder.select(builder.icmp_signed("<", *counts), *counts)
    size = builder.mul(count, _WORD(given.source.bits // 8))
    cgutils.raw_memcpy(builder, given.into.data, given.source.data, size, 1)


@instruction
def copy_listed(context: Any, builder: Any, given: Any) -> None:
    """Copy elements from a list of places."""
    to, source = given.into.at(given.place), given.source.at(given.start)

    def copy(indices: list[Any]) -> None:
        listed = [builder.load(given.places.at(k)) for k in indices]
        values = [builder.load(builder.gep(source, [k])) for k in listed]
        for k, value in zip(indices, values, strict=True):
            builder.store(value, builder.gep(to, [k]))

    _for_some_at_once(builder, given.first, given.last, copy)


@instruction
def add_listed(context: Any, builder: Any, given: Any) -> None:
    """Add elements to those at a list of places."""
    to, source = given.into.at(given.place), given.source.at(given.start)

    def add(indices: list[Any]) -> None:
        targets = [builder.gep(to, [builder.load(given.places.at(k))]) for k in indices]
        sums = [
            builder.fadd(builder.load(target), builder.load(builder.gep(source, [k])))
            for k, target in zip(indices, targets, strict=True)
        ]
        for value, target in zip(sums, targets, strict=True):
            builder.store(value, target)

    _for_some_at_once(builder, given.first, given.last, add)


def _for_some_at_once(builder: Any, first: Any, last: Any, body: Callable[[list[Any]], None]) -> None:
    """Write loops over indices, of which `body` takes several at once."""
    count = builder.sub(last, first)
    whole = builder.sdiv(count, _WORD(_AT_ONCE))
    with cgutils.for_range(builder, whole) as group:
        begin = builder.add(first, builder.mul(group.index, _WORD(_AT_ONCE)))
        body([builder.add(begin, _WORD(i)) for i in range(_AT_ONCE)])
    begin = builder.add(first, builder.mul(whole, _WORD(_AT_ONCE)))
    with cgutils.for_range(builder, builder.sub(last, begin)) as one:
        body([builder.add(begin, one.index)])
