"""The inner loop of matrix products, in vector registers. This module imports Numba."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ortgrad.compiled import instructions, processor
from ortgrad.compiled.functions import TILE, TILE_ROWS
from ortgrad.compiled.instructions import call_written, instruction

_WORD = ir.IntType(64)
_FUSED = ("contract",)
# Places among the arguments of a tile.
_SUMS, _RIGHT = 0, 7


def _vectors() -> int:
    """Return how many vectors of a row fit into registers, if each takes TILE_ROWS registers for sums."""
    return 4 if processor.has_many_registers() else 2


@instruction
def add_products(context: Any, builder: Any, given: Any) -> None:
    """Add products to a tile of sums."""
    left, right = given.left, given.right
    element = left.values.element
    values = [
        *(given.sums.data, given.pitch),
        *(left.values.data, left.starts.data, left.shifts.data, left.shifts.length, left.steps.data),
        *(right.values.data, right.bases.data, right.places.data, right.places.length),
        *(given.fresh, given.rows, given.columns),
    ]
    write = functools.partial(_tiles, element=element)
    call_written(context, builder, f"ortgrad_products_{element}", values, write)


def _tiles(function: Any, element: Any) -> None:
    """Write the function that divides rows with any number of columns into tiles."""
    *given, rows, columns = function.args
    lanes, most = instructions.lanes(64 if isinstance(element, ir.DoubleType) else 32), _vectors()
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    first = cgutils.alloca_once_value(builder, _WORD(0))
    # The number of vectors of a row is a multiple of this one.
    unit = min(most, max(1, TILE // lanes))
    for vectors in range(most, 0, -unit):
        # As many vectors as fit, then the rest.
        width = _WORD(vectors * lanes)
        condition, body, end = (builder.append_basic_block(f"{n}{vectors}") for n in ("if", "do", "end"))
        builder.branch(condition)
        builder.position_at_end(condition)
        here = builder.load(first)
        last = builder.add(here, width)
        builder.cbranch(builder.icmp_signed("<=", last, columns), body, end)
        builder.position_at_end(body)
        own = list(given)
        for i in (_SUMS, _RIGHT):
            own[i] = builder.gep(given[i], [here])
        done, default = builder.append_basic_block("done"), builder.append_basic_block("none")
        switch = builder.switch(rows, default)
        for number in range(1, TILE_ROWS + 1):
            case = builder.append_basic_block("rows")
            switch.add_case(_WORD(number), case)
            builder.position_at_end(case)
            builder.call(_tile(function.module, element, lanes, number, vectors), own)
            builder.branch(done)
        builder.position_at_end(default)
        builder.branch(done)
        builder.position_at_end(done)
        builder.store(last, first)
        builder.branch(condition)
        builder.position_at_end(end)
    builder.ret_void()


def _tile(module: Any, element: Any, lanes: int, rows: int, vectors: int) -> Any:
    """Return the function that computes a tile with these numbers of rows and vectors."""
    numbers, words = element.as_pointer(), _WORD.as_pointer()
    kinds = [numbers, _WORD, numbers, words, words, _WORD, words, numbers, words, words, _WORD, _WORD]
    name = f"ortgrad_tile_{element}_{rows}_{vectors}"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    sums, pitch, left, starts, shifts, groups, steps, right, bases, places, count, fresh = function.args
    kind = ir.VectorType(element, lanes)
    align = 8 if isinstance(element, ir.DoubleType) else 4
    tile = [(i, j) for i in range(rows) for j in range(vectors)]
    entry, outer, inner, after, end = (
        function.append_basic_block(name) for name in ("entry", "group", "item", "next", "end")
    )
    zero = ir.Constant(kind, None)
    builder = ir.IRBuilder(entry)
    row_starts = [builder.load(builder.gep(starts, [_WORD(i)])) for i in range(rows)]
    some = [builder.icmp_signed(">", number, _WORD(0)) for number in (groups, count)]
    builder.cbranch(builder.and_(*some), outer, end)

    builder.position_at_end(outer)
    g, outer_totals = builder.phi(_WORD), [builder.phi(kind) for _ in tile]
    shift = builder.load(builder.gep(shifts, [g]))
    base = builder.gep(right, [builder.load(builder.gep(bases, [g]))])
    pointers = [builder.gep(left, [builder.add(start, shift)]) for start in row_starts]
    builder.branch(inner)

    builder.position_at_end(inner)
    k, totals = builder.phi(_WORD), [builder.phi(kind) for _ in tile]
    place = builder.gep(base, [builder.load(builder.gep(places, [k]))])
    values = [instructions.load_vector(builder, place, j * lanes, kind, align) for j in range(vectors)]
    step = builder.load(builder.gep(steps, [k]))
    factors = [
        instructions.broadcast(builder, builder.load(builder.gep(pointer, [step])), kind)
        for pointer in pointers
    ]
    added = [
        builder.fadd(total, builder.fmul(factors[i], values[j], flags=_FUSED), flags=_FUSED)
        for (i, j), total in zip(tile, totals, strict=True)
    ]
    next_k = builder.add(k, _WORD(1))
    builder.cbranch(builder.icmp_signed("<", next_k, count), inner, after)

    builder.position_at_end(after)
    next_g = builder.add(g, _WORD(1))
    builder.cbranch(builder.icmp_signed("<", next_g, groups), outer, end)

    for phi, start, other in ((g, entry, next_g), (k, outer, next_k)):
        phi.add_incoming(_WORD(0), start)
        phi.add_incoming(other, after if phi is g else inner)
    builder.position_at_end(end)
    results = []
    for before, total, new in zip(outer_totals, totals, added, strict=True):
        before.add_incoming(zero, entry)
        before.add_incoming(new, after)
        total.add_incoming(before, outer)
        total.add_incoming(new, inner)
        results.append(builder.phi(kind))
        results[-1].add_incoming(zero, entry)
        results[-1].add_incoming(new, after)
    is_fresh = builder.icmp_signed("!=", fresh, _WORD(0))
    for (i, j), result in zip(tile, results, strict=True):
        place = builder.gep(sums, [builder.add(builder.mul(pitch, _WORD(i)), _WORD(j * lanes))])
        target = builder.bitcast(place, kind.as_pointer())
        # What was not written yet may be a signaling NaN, but never reaches the sum.
        old = builder.select(is_fresh, zero, builder.load(target, align=align))
        builder.store(builder.fadd(result, old), target, align=align)
    builder.ret_void()
    return function


@instruction
def transpose(context: Any, builder: Any, given: Any) -> None:
    """Transpose a square of TILE numbers."""
    element = given.source.element
    values = [given.into.at(given.place), given.pitch, given.source.at(given.start), given.stride]
    write = functools.partial(_transposition, element=element)
    call_written(context, builder, f"ortgrad_transpose_{element}", values, write)


def _transposition(function: Any, element: Any) -> None:
    """Write the function that transposes a square."""
    kind = ir.VectorType(element, TILE)
    into, pitch, source, stride = function.args
    align = 8 if isinstance(element, ir.DoubleType) else 4
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    rows = instructions.transposed(builder, source, stride, element, TILE)
    for i, row in enumerate(rows):
        target = builder.gep(into, [builder.mul(pitch, _WORD(i))])
        builder.store(row, builder.bitcast(target, kind.as_pointer()), align=align)
    builder.ret_void()


@instruction
def clear(context: Any, builder: Any, given: Any) -> None:
    """Set elements to zero."""
    size = builder.mul(given.count, _WORD(given.array.bits // 8))
    cgutils.memset(builder, given.array.at(given.place), size, 0)


@instruction
def copy_elements(context: Any, builder: Any, given: Any) -> None:
    """Copy elements."""
    target, values = given.into.at(given.place), given.source.at(given.start)
    cgutils.raw_memcpy(builder, target, values, given.count, given.source.bits // 8)


@instruction
def copy_vector(context: Any, builder: Any, given: Any) -> None:
    """Copy TILE numbers."""
    kind, align = ir.VectorType(given.source.element, TILE), given.source.bits // 8
    value = instructions.load_vector(builder, given.source.at(given.start), 0, kind, align)
    builder.store(value, builder.bitcast(given.into.at(given.place), kind.as_pointer()), align=align)


@instruction
def prefetch(context: Any, builder: Any, given: Any) -> None:
    """Begin to load an element."""
    address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [address, number, number, number])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    # To read, into all caches, data.
    pointer = builder.bitcast(given.array.at(given.place), address)
    builder.call(function, [pointer, number(0), number(3), number(1)])
