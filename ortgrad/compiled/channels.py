"""Instructions for vectors of TILE channels (see ortgrad.ops.conv._depthwise). This module imports Numba."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ortgrad.compiled import instructions, processor
from ortgrad.compiled.functions import TILE
from ortgrad.compiled.instructions import instruction

_WORD = ir.IntType(64)
_FUSED = ("contract",)
# Positions of a convolution, and taps of a correlation, whose sums are in registers at the same time.
_POSITIONS, _TAPS = 8, 9


@instruction
def spread(context: Any, builder: Any, given: Any) -> None:
    """Transpose a square of TILE numbers."""
    element = given.source.element

    def write(function: Any) -> None:
        into, places, source, stride = function.args
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        rows = instructions.transposed(builder, source, stride, element, TILE)
        for i, row in enumerate(rows):
            _store(builder, row, into, builder.load(builder.gep(places, [_WORD(i)])))
        builder.ret_void()

    square = given.source.at(given.start), given.stride
    values = [given.into.at(given.base), given.places.at(given.first), *square]
    _call(builder, f"ortgrad_spread_{element}", values, write)


@instruction
def convolve(context: Any, builder: Any, given: Any) -> None:
    """Compute weighted sums for consecutive positions."""
    element = given.memory.element
    most = min(_POSITIONS, _registers(element))

    def write(function: Any) -> None:
        *pointers, starts, terms, count = function.args
        builder = ir.IRBuilder(function.append_basic_block("entry"))

        def part(size: int, done: Any) -> None:
            moved = [
                builder.gep(pointer, [builder.mul(step, done)])
                for pointer, step in (pointers[:2], pointers[2:4], pointers[4:6])
            ]
            steps = [pointers[i] for i in (1, 3, 5)]
            values = [*(each for pair in zip(moved, steps, strict=True) for each in pair), pointers[6]]
            name, positions = f"ortgrad_convolve_{element}_{size}", functools.partial(_positions, size=size)
            _call(builder, name, [*values, starts, terms], positions)

        _divide(builder, count, most, part)
        builder.ret_void()

    at = given.memory.at
    values = [
        *(at(given.sums.place), given.sums.step, at(given.initial.place), given.initial.step),
        *(at(given.source.place), given.source.step),
        at(builder.add(given.weights, builder.mul(given.taps.first, _WORD(TILE)))),
        given.taps.starts.at(given.taps.first),
        builder.sub(given.taps.last, given.taps.first),
        given.count,
    ]
    _call(builder, f"ortgrad_convolve_{element}", values, write)


def _positions(function: Any, size: int) -> None:
    """Write the function that computes the sums of some positions together."""
    sums, step, initial, initial_step, source, source_step, weights, starts, terms = function.args
    kind = ir.VectorType(sums.type.pointee, TILE)
    builder = ir.IRBuilder(function.append_basic_block("entry"))

    def each(step: Any) -> list[Any]:
        return [builder.mul(step, _WORD(i)) for i in range(size)]

    rows = [builder.gep(source, [place]) for place in each(source_step)]
    totals = [_load(builder, initial, place, kind) for place in each(initial_step)]

    def add(term: Any, totals: Sequence[Any]) -> list[Any]:
        start = builder.load(builder.gep(starts, [term]))
        weight = _load(builder, weights, builder.mul(term, _WORD(TILE)), kind)
        values = [_load(builder, row, start, kind) for row in rows]
        return [_add(builder, *each, weight) for each in zip(totals, values, strict=True)]

    totals = _loop(builder, terms, totals, add)
    for total, place in zip(totals, each(step), strict=True):
        _store(builder, total, sums, place)
    builder.ret_void()


@instruction
def correlate(context: Any, builder: Any, given: Any) -> None:
    """Add sums of products with the same values."""
    element = given.memory.element
    most = min(_TAPS, _registers(element))

    def write(function: Any) -> None:
        sums, *others, starts, taps, rows, count = function.args
        builder = ir.IRBuilder(function.append_basic_block("entry"))

        def part(size: int, done: Any) -> None:
            moved = builder.gep(sums, [builder.mul(done, _WORD(TILE))]), builder.gep(starts, [done])
            values = [moved[0], *others, moved[1], rows, count]
            name, together = f"ortgrad_correlate_{element}_{size}", functools.partial(_taps, size=size)
            _call(builder, name, values, together)

        _divide(builder, taps, most, part)
        builder.ret_void()

    at, taps = given.memory.at, given.taps
    values = [
        *(at(given.sums), at(given.values.place), given.values.step),
        *(at(given.source.place), given.source.pitch, given.source.step),
        *(taps.starts.at(taps.first), builder.sub(taps.last, taps.first), given.rows, given.count),
    ]
    _call(builder, f"ortgrad_correlate_{element}", values, write)


def _taps(function: Any, size: int) -> None:
    """Write the function that computes the sums of some taps together."""
    sums, values, pitch, source, source_pitch, source_step, starts, rows, count = function.args
    kind = ir.VectorType(sums.type.pointee, TILE)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    taps = [builder.gep(source, [builder.load(builder.gep(starts, [_WORD(i)]))]) for i in range(size)]

    def add(own: Sequence[Any], k: Any, value: Any, totals: Sequence[Any]) -> list[Any]:
        place = builder.mul(k, source_step)
        factors = [_load(builder, tap, place, kind) for tap in own]
        return [_add(builder, *each, value) for each in zip(totals, factors, strict=True)]

    def taps_of_row(number: Any) -> list[Any]:
        return [builder.gep(tap, [builder.mul(number, source_pitch)]) for tap in taps]

    zeros = [ir.Constant(kind, None)] * size
    totals = _loop_over_vectors(builder, (values, pitch, rows, count), zeros, taps_of_row, add)
    for i, total in enumerate(totals):
        before = _load(builder, sums, _WORD(i * TILE), kind)
        _store(builder, builder.fadd(before, total), sums, _WORD(i * TILE))
    builder.ret_void()


@instruction
def add_up(context: Any, builder: Any, given: Any) -> None:
    """Compute sums in double precision."""
    element = given.memory.element

    def write(function: Any) -> None:
        sums, *lines = function.args
        kind, wide = ir.VectorType(element, TILE), ir.VectorType(ir.DoubleType(), TILE)
        builder = ir.IRBuilder(function.append_basic_block("entry"))

        def add(_: Any, k: Any, value: Any, totals: Sequence[Any]) -> list[Any]:
            return [builder.fadd(totals[0], value if kind == wide else builder.fpext(value, wide))]

        (total,) = _loop_over_vectors(builder, lines, [ir.Constant(wide, None)], lambda number: None, add)
        _store(builder, total if kind == wide else builder.fptrunc(total, kind), sums, _WORD(0))
        builder.ret_void()

    values = [*map(given.memory.at, (given.sums, given.values)), given.pitch, given.rows, given.count]
    _call(builder, f"ortgrad_add_up_{element}", values, write)


def _loop_over_vectors(
    builder: Any,
    lines: Sequence[Any],
    totals: Sequence[Any],
    prepare: Callable[[Any], Any],
    add: Callable[[Any, Any, Any, Sequence[Any]], list[Any]],
) -> list[Any]:
    """Write loops over the vectors of rows: `lines` are the first one, the pitch, and the counts of both.

    `prepare` takes the number of a row; `add` takes its result, the number of a vector in the row, the vector
    and the totals, and returns new ones.
    """
    values, pitch, rows, count = lines
    kind = ir.VectorType(values.type.pointee, TILE)

    def row(number: Any, totals: Sequence[Any]) -> list[Any]:
        line, own = builder.gep(values, [builder.mul(number, pitch)]), prepare(number)

        def vector(k: Any, totals: Sequence[Any]) -> list[Any]:
            value = _load(builder, line, builder.mul(k, _WORD(TILE)), kind)
            return add(own, k, value, totals)

        return _loop(builder, count, totals, vector)

    return _loop(builder, rows, totals, row)


def _registers(element: Any) -> int:
    """Return how many vectors of TILE numbers fit into the registers beside everything else."""
    lanes = instructions.lanes(64 if isinstance(element, ir.DoubleType) else 32)
    registers = 24 if processor.has_many_registers() else 12
    return max(1, registers * lanes // TILE)


def _load(builder: Any, array: Any, place: Any, kind: Any) -> Any:
    pointer = builder.bitcast(builder.gep(array, [place]), kind.as_pointer())
    return builder.load(pointer, align=8 if isinstance(kind.element, ir.DoubleType) else 4)


def _store(builder: Any, value: Any, array: Any, place: Any) -> None:
    pointer = builder.bitcast(builder.gep(array, [place]), value.type.as_pointer())
    builder.store(value, pointer, align=8 if isinstance(value.type.element, ir.DoubleType) else 4)


def _add(builder: Any, total: Any, left: Any, right: Any) -> Any:
    return builder.fadd(total, builder.fmul(left, right, flags=_FUSED), flags=_FUSED)


def _loop(
    builder: Any, count: Any, values: Sequence[Any], body: Callable[[Any, Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Write a loop; `body` takes the index and the values, and returns the new ones."""
    entry = builder.block
    inner, end = (builder.append_basic_block(name) for name in ("loop", "end"))
    builder.cbranch(builder.icmp_signed(">", count, _WORD(0)), inner, end)
    builder.position_at_end(inner)
    index, before = builder.phi(_WORD), [builder.phi(value.type) for value in values]
    after = body(index, before)
    last, following = builder.block, builder.add(index, _WORD(1))
    builder.cbranch(builder.icmp_signed("<", following, count), inner, end)
    builder.position_at_end(end)
    results = [builder.phi(value.type) for value in values]
    for phi, value, new in zip((index, *before), (_WORD(0), *values), (following, *after), strict=True):
        phi.add_incoming(value, entry)
        phi.add_incoming(new, last)
    for phi, value, new in zip(results, values, after, strict=True):
        phi.add_incoming(value, entry)
        phi.add_incoming(new, last)
    return results


def _divide(builder: Any, count: Any, most: int, part: Callable[[int, Any], None]) -> None:
    """Divide a number into as many parts of the largest size as it has, and the rest."""
    whole = builder.sdiv(count, _WORD(most))

    def next_part(_: Any, values: Sequence[Any]) -> list[Any]:
        part(most, values[0])
        return [builder.add(values[0], _WORD(most))]

    (done,) = _loop(builder, whole, [_WORD(0)], next_part)
    end = builder.append_basic_block("end")
    switch = builder.switch(builder.sub(count, done), end)
    for size in range(1, most):
        case = builder.append_basic_block(f"rest{size}")
        switch.add_case(_WORD(size), case)
        builder.position_at_end(case)
        part(size, done)
        builder.branch(end)
    builder.position_at_end(end)


def _call(builder: Any, name: str, arguments: Sequence[Any], write: Callable[[Any], None]) -> None:
    """Call a function of the module, which is written if it is not there yet."""
    function = builder.module.globals.get(name)
    if function is None:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in arguments])
        function = ir.Function(builder.module, kind, name)
        function.linkage = "linkonce_odr"
        # Optimized for size, so that small loops are not unrolled, which takes long to compile.
        function.attributes.add("noinline")
        function.attributes.add("optsize")
        write(function)
    builder.call(function, arguments)
