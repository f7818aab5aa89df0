"""The inner loop of matrix products, in vector registers. This module imports Numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ortgrad.compiled import instructions, libraries, processor
from ortgrad.compiled.functions import TILE, TILE_ROWS

_WORD = ir.IntType(64)
_FUSED = ("contract",)
# Places among the arguments of a tile.
_SUMS, _RIGHT = 0, 7
NAMES = frozenset(["add_products", "transpose", "clear", "copy_elements", "copy_vector", "prefetch"])


def _vectors() -> int:
    """Return how many vectors of a row fit into registers, if each takes TILE_ROWS registers for sums."""
    return 4 if processor.has_many_registers() else 2


@intrinsic
def add_products(
    _: Any,
    sums: Any,
    pitch: Any,
    left: Any,
    starts: Any,
    rows: Any,
    shifts: Any,
    steps: Any,
    right: Any,
    bases: Any,
    places: Any,
    columns: Any,
    fresh: Any,
) -> Any:
    """Add products to a tile of sums (see ortgrad.compiled.functions)."""
    element = ir.DoubleType() if left.dtype == types.float64 else ir.FloatType()
    parameters = (sums, pitch, left, starts, rows, shifts, steps, right, bases, places, columns, fresh)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def array(i: int) -> Any:
            return context.make_array(signature.args[i])(context, builder, value=arguments[i])

        def count(i: int) -> Any:
            return builder.extract_value(array(i).shape, 0)

        given = [
            array(0).data,
            arguments[1],
            array(2).data,
            array(3).data,
            array(5).data,
            count(5),
            array(6).data,
            array(7).data,
            array(8).data,
            array(9).data,
            count(9),
            builder.zext(arguments[11], _WORD),
            arguments[4],
            arguments[10],
        ]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        name = f"ortgrad_products_{element}"
        function = libraries.write(context, builder, name, kind, lambda function: _tiles(function, element))
        builder.call(function, given)
        return context.get_dummy_value()

    return types.void(*parameters), generate


def _tiles(function: Any, element: Any) -> None:
    """Write the function that divides rows with any number of columns into tiles."""
    *given, rows, columns = function.args
    lanes, most = instructions.lanes(64 if isinstance(element, ir.DoubleType) else 32), _vectors()
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    first = cgutils.alloca_once_value(builder, _WORD(0))
    # A row has a multiple of so many vectors.
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
    """Return the function that computes a tile of so many rows and vectors."""
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


@intrinsic
def transpose(_: Any, into: Any, place: Any, pitch: Any, source: Any, start: Any, stride: Any) -> Any:
    """Transpose a square of TILE numbers (see ortgrad.compiled.functions)."""
    element = ir.DoubleType() if source.dtype == types.float64 else ir.FloatType()

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, given = (
            context.make_array(signature.args[i])(context, builder, value=arguments[i]).data for i in (0, 3)
        )
        places = [builder.gep(to, [arguments[1]]), arguments[2]]
        places += [builder.gep(given, [arguments[4]]), arguments[5]]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in places])
        name = f"ortgrad_transpose_{element}"
        function = libraries.write(
            context, builder, name, kind, lambda function: _transposition(function, element)
        )
        builder.call(function, places)
        return context.get_dummy_value()

    return types.void(into, place, pitch, source, start, stride), generate


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


@intrinsic
def clear(_: Any, array: Any, place: Any, count: Any) -> Any:
    """Set elements to zero (see ortgrad.compiled.functions)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        size = builder.mul(arguments[2], _WORD(array.dtype.bitwidth // 8))
        cgutils.memset(builder, builder.gep(data, [arguments[1]]), size, 0)
        return context.get_dummy_value()

    return types.void(array, place, count), generate


@intrinsic
def copy_elements(_: Any, into: Any, place: Any, source: Any, start: Any, count: Any) -> Any:
    """Copy elements (see ortgrad.compiled.functions)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, given = (
            context.make_array(signature.args[i])(context, builder, value=arguments[i]).data for i in (0, 2)
        )
        target, values = builder.gep(to, [arguments[1]]), builder.gep(given, [arguments[3]])
        cgutils.raw_memcpy(builder, target, values, arguments[4], source.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(into, place, source, start, count), generate


@intrinsic
def copy_vector(_: Any, into: Any, place: Any, source: Any, start: Any) -> Any:
    """Copy TILE numbers (see ortgrad.compiled.functions)."""
    element = ir.DoubleType() if source.dtype == types.float64 else ir.FloatType()
    kind, align = ir.VectorType(element, TILE), source.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, given = (
            context.make_array(signature.args[i])(context, builder, value=arguments[i]).data for i in (0, 2)
        )
        value = instructions.load_vector(builder, builder.gep(given, [arguments[3]]), 0, kind, align)
        target = builder.bitcast(builder.gep(to, [arguments[1]]), kind.as_pointer())
        builder.store(value, target, align=align)
        return context.get_dummy_value()

    return types.void(into, place, source, start), generate


@intrinsic
def prefetch(_: Any, array: Any, place: Any) -> Any:
    """Begin to load an element (see ortgrad.compiled.functions)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, value=arguments[0]).data
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        # To read, into all caches, data.
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), address)
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, place), generate
