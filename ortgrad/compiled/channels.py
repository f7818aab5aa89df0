"""Instructions for vectors of TILE channels (see ortgrad.ops.conv._depthwise). This module imports Numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ortgrad.compiled import instructions, processor
from ortgrad.compiled.functions import TILE

NAMES = ("spread", "convolve", "correlate", "add_up")
_WORD = ir.IntType(64)
_FUSED = ("contract",)
# Positions of a convolution, and taps of a correlation, whose sums are in registers at the same time.
_POSITIONS, _TAPS = 8, 9


@intrinsic
def spread(
    _: Any, into: Any, base: Any, places: Any, first: Any, source: Any, start: Any, stride: Any
) -> Any:
    """Transpose a square of TILE numbers (see ortgrad.compiled.functions)."""
    element = _element(source)

    def write(function: Any) -> None:
        into, places, source, stride = function.args
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        rows = instructions.transposed(builder, source, stride, element, TILE)
        for i, row in enumerate(rows):
            _store(builder, row, into, builder.load(builder.gep(places, [_WORD(i)])))
        builder.ret_void()

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, table, given = (_data(context, builder, signature, arguments, i) for i in (0, 2, 4))
        values = [
            builder.gep(to, [arguments[1]]),
            builder.gep(table, [arguments[3]]),
            builder.gep(given, [arguments[5]]),
            arguments[6],
        ]
        _call(builder, f"ortgrad_spread_{element}", values, write)
        return context.get_dummy_value()

    return types.void(into, base, places, first, source, start, stride), generate


@intrinsic
def convolve(
    _: Any,
    memory: Any,
    sums: Any,
    step: Any,
    initial: Any,
    initial_step: Any,
    source: Any,
    source_step: Any,
    weights: Any,
    starts: Any,
    first: Any,
    last: Any,
    count: Any,
) -> Any:
    """Compute weighted sums for consecutive positions (see ortgrad.compiled.functions)."""
    element = _element(memory)
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
            _call(builder, f"ortgrad_convolve_{element}_{size}", [*values, starts, terms], positions(size))

        _divide(builder, count, most, part)
        builder.ret_void()

    def positions(size: int) -> Callable[[Any], None]:
        def write(function: Any) -> None:
            sums, step, initial, initial_step, source, source_step, weights, starts, terms = function.args
            kind = ir.VectorType(element, TILE)
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

        return write

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, table = (_data(context, builder, signature, arguments, i) for i in (0, 8))
        sums, step, initial, initial_step, source, source_step, weights = arguments[1:8]
        first, last, count = arguments[9:]
        values = [
            *(builder.gep(data, [sums]), step, builder.gep(data, [initial]), initial_step),
            *(builder.gep(data, [source]), source_step),
            builder.gep(data, [builder.add(weights, builder.mul(first, _WORD(TILE)))]),
            builder.gep(table, [first]),
            builder.sub(last, first),
            count,
        ]
        _call(builder, f"ortgrad_convolve_{element}", values, write)
        return context.get_dummy_value()

    numbers = (sums, step, initial, initial_step, source, source_step, weights)
    return types.void(memory, *numbers, starts, first, last, count), generate


@intrinsic
def correlate(
    _: Any,
    memory: Any,
    sums: Any,
    values: Any,
    pitch: Any,
    source: Any,
    source_pitch: Any,
    source_step: Any,
    starts: Any,
    first: Any,
    last: Any,
    rows: Any,
    count: Any,
) -> Any:
    """Add sums of products with the same values (see ortgrad.compiled.functions)."""
    element = _element(memory)
    most = min(_TAPS, _registers(element))

    def write(function: Any) -> None:
        sums, *others, starts, taps, rows, count = function.args
        builder = ir.IRBuilder(function.append_basic_block("entry"))

        def part(size: int, done: Any) -> None:
            moved = builder.gep(sums, [builder.mul(done, _WORD(TILE))]), builder.gep(starts, [done])
            values = [moved[0], *others, moved[1], rows, count]
            _call(builder, f"ortgrad_correlate_{element}_{size}", values, together(size))

        _divide(builder, taps, most, part)
        builder.ret_void()

    def together(size: int) -> Callable[[Any], None]:
        def write(function: Any) -> None:
            sums, values, pitch, source, source_pitch, source_step, starts, rows, count = function.args
            kind = ir.VectorType(element, TILE)
            builder = ir.IRBuilder(function.append_basic_block("entry"))
            taps = [builder.gep(source, [builder.load(builder.gep(starts, [_WORD(i)]))]) for i in range(size)]

            def row(number: Any, totals: Sequence[Any]) -> list[Any]:
                line = builder.gep(values, [builder.mul(number, pitch)])
                own = [builder.gep(tap, [builder.mul(number, source_pitch)]) for tap in taps]

                def add(k: Any, totals: Sequence[Any]) -> list[Any]:
                    value = _load(builder, line, builder.mul(k, _WORD(TILE)), kind)
                    place = builder.mul(k, source_step)
                    factors = [_load(builder, tap, place, kind) for tap in own]
                    return [_add(builder, *each, value) for each in zip(totals, factors, strict=True)]

                return _loop(builder, count, totals, add)

            totals = _loop(builder, rows, [ir.Constant(kind, None)] * size, row)
            for i, total in enumerate(totals):
                before = _load(builder, sums, _WORD(i * TILE), kind)
                _store(builder, builder.fadd(before, total), sums, _WORD(i * TILE))
            builder.ret_void()

        return write

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, table = (_data(context, builder, signature, arguments, i) for i in (0, 7))
        sums, values, pitch, source, source_pitch, source_step = arguments[1:7]
        first, last, rows, count = arguments[8:]
        given = [
            *(builder.gep(data, [sums]), builder.gep(data, [values]), pitch),
            *(builder.gep(data, [source]), source_pitch, source_step),
            *(builder.gep(table, [first]), builder.sub(last, first), rows, count),
        ]
        _call(builder, f"ortgrad_correlate_{element}", given, write)
        return context.get_dummy_value()

    numbers = (sums, values, pitch, source, source_pitch, source_step)
    return types.void(memory, *numbers, starts, first, last, rows, count), generate


@intrinsic
def add_up(_: Any, memory: Any, sums: Any, values: Any, pitch: Any, rows: Any, count: Any) -> Any:
    """Compute sums in double precision (see ortgrad.compiled.functions)."""
    element = _element(memory)

    def write(function: Any) -> None:
        sums, values, pitch, rows, count = function.args
        kind, wide = ir.VectorType(element, TILE), ir.VectorType(ir.DoubleType(), TILE)
        builder = ir.IRBuilder(function.append_basic_block("entry"))

        def row(number: Any, totals: Sequence[Any]) -> list[Any]:
            line = builder.gep(values, [builder.mul(number, pitch)])

            def add(k: Any, totals: Sequence[Any]) -> list[Any]:
                value = _load(builder, line, builder.mul(k, _WORD(TILE)), kind)
                return [builder.fadd(totals[0], value if kind == wide else builder.fpext(value, wide))]

            return _loop(builder, count, totals, add)

        total = _loop(builder, rows, [ir.Constant(wide, None)], row)[0]
        _store(builder, total if kind == wide else builder.fptrunc(total, kind), sums, _WORD(0))
        builder.ret_void()

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = _data(context, builder, signature, arguments, 0)
        places = [builder.gep(data, [place]) for place in arguments[1:3]]
        _call(builder, f"ortgrad_add_up_{element}", [*places, *arguments[3:]], write)
        return context.get_dummy_value()

    return types.void(memory, sums, values, pitch, rows, count), generate


def _element(array: Any) -> Any:
    return ir.DoubleType() if array.dtype == types.float64 else ir.FloatType()


def _data(context: Any, builder: Any, signature: Any, arguments: Any, i: int) -> Any:
    return context.make_array(signature.args[i])(context, builder, value=arguments[i]).data


def _registers(element: Any) -> int:
    """Return how many vectors of TILE numbers fit into the registers, beside what else is needed."""
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
