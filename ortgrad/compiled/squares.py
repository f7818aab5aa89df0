"""The maxima of squares of two by two elements, in vector registers. This module imports Numba."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from ortgrad.compiled import instructions
from ortgrad.compiled.instructions import call_written, instruction

_WORD, _PLACE = ir.IntType(64), ir.IntType(32)
# How many squares are compared at once: the first of these numbers that a row has.
_SIZES = (16, 8, 4, 1)


@instruction
def pool_squares(context: Any, builder: Any, given: Any) -> None:
    """Write the largest elements of squares, and where they are."""
    element = given.values.element
    rows = given.values.at(given.above), given.values.at(given.below)
    results = given.into.largest.at(given.into.place), given.into.indices.at(given.into.place)
    values = [*rows, *results, given.count, given.origin, given.width]
    write = functools.partial(_rows, element=element)
    call_written(context, builder, f"ortgrad_squares_{element}", values, write)


def _rows(function: Any, element: Any) -> None:
    """Write the function for the squares of two rows."""
    count = function.args[4]
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    for size in _SIZES:
        body, end = (function.append_basic_block(f"{name}{size}") for name in ("squares", "fewer"))
        entry = builder.block
        builder.cbranch(builder.icmp_signed(">=", count, _WORD(size)), body, end)
        builder.position_at_end(body)
        first = builder.phi(_WORD)
        # The last squares may be some of those before them.
        rest = builder.sub(count, _WORD(size))
        own = builder.select(builder.icmp_signed("<", first, rest), first, rest)
        _squares(builder, function, element, size, own)
        following = builder.add(first, _WORD(size))
        first.add_incoming(_WORD(0), entry)
        first.add_incoming(following, body)
        done = function.append_basic_block("done")
        builder.cbranch(builder.icmp_signed("<", following, count), body, done)
        builder.position_at_end(done)
        builder.ret_void()
        builder.position_at_end(end)
    builder.ret_void()


def _squares(builder: Any, function: Any, element: Any, size: int, first: Any) -> None:
    """Compare the elements of `size` squares, beginning with number `first`."""
    above, below, into, indices, _, origin, width = function.args
    align = 8 if isinstance(element, ir.DoubleType) else 4
    pairs, kind = ir.VectorType(element, 2 * size), ir.VectorType(element, size)
    narrow, wide = ir.VectorType(_PLACE, size), ir.VectorType(_WORD, size)
    undefined = ir.Constant(pairs, ir.Undefined)
    values = []
    for row in (above, below):
        start = builder.gep(row, [builder.mul(first, _WORD(2))])
        both = instructions.load_vector(builder, start, 0, pairs, align)
        for k in range(2):
            taken = ir.Constant(narrow, list(range(k, 2 * size, 2)))
            values.append(builder.shuffle_vector(both, undefined, taken))
    beyond = builder.trunc(width, _PLACE)
    places = [_PLACE(0), _PLACE(1), beyond, builder.add(beyond, _PLACE(1))]
    best, place = values[0], ir.Constant(narrow, None)
    for value, number in zip(values[1:], places[1:], strict=True):
        larger = builder.fcmp_ordered(">", value, best)
        place = builder.select(larger, instructions.broadcast(builder, number, narrow), place)
        best = builder.select(larger, value, best)
    builder.store(best, builder.bitcast(builder.gep(into, [first]), kind.as_pointer()), align=align)
    begin = builder.add(origin, builder.mul(first, _WORD(2)))
    numbers = builder.add(
        instructions.broadcast(builder, begin, wide), ir.Constant(wide, list(range(0, 2 * size, 2)))
    )
    numbers = builder.add(numbers, builder.sext(place, wide))
    builder.store(numbers, builder.bitcast(builder.gep(indices, [first]), wide.as_pointer()), align=8)
