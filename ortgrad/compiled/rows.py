"""Instructions for rows of boxes (see ortgrad.ops._strips). This module imports Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ortgrad.compiled import instructions

NAMES = ("add_row", "copy_row", "copy_listed", "add_listed")
_WORD = ir.IntType(64)
# Elements of a list whose loads do not wait for the stores of those before.
_AT_ONCE = 4


@intrinsic
def add_row(_: Any, sums: Any, rows: Any, starts: Any, weights: Any, count: Any) -> Any:
    """Compute one weighted sum of rows (see ortgrad.compiled.functions)."""
    element = ir.DoubleType() if rows.dtype == types.float64 else ir.FloatType()
    lanes = instructions.lanes(rows.dtype.bitwidth)
    # Enough sums to hide the latency of additions.
    vectors = 4 if lanes * rows.dtype.bitwidth == 512 else 8
    kind, align = ir.VectorType(element, lanes), rows.dtype.bitwidth // 8

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [
            context.make_array(signature.args[i])(context, builder, value=arguments[i]) for i in range(4)
        ]
        into, source, places, factors = (array.data for array in arrays)
        terms = builder.extract_value(arrays[2].shape, 0)
        step = _WORD(lanes * vectors)
        blocks = builder.sdiv(builder.add(arguments[4], _WORD(lanes * vectors - 1)), step)
        with builder.goto_entry_block():
            totals = [builder.alloca(kind) for _ in range(vectors)]
        with cgutils.for_range(builder, blocks) as block:
            first = builder.mul(block.index, step)
            for total in totals:
                builder.store(ir.Constant(kind, None), total)
            with cgutils.for_range(builder, terms) as term:
                start = builder.load(builder.gep(places, [term.index]))
                row = builder.gep(source, [builder.add(start, first)])
                factor = instructions.broadcast(
                    builder, builder.load(builder.gep(factors, [term.index])), kind
                )
                for j, total in enumerate(totals):
                    value = instructions.load_vector(builder, row, j * lanes, kind, align)
                    product = builder.fmul(factor, value, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
            for j, total in enumerate(totals):
                place = builder.gep(into, [builder.add(first, _WORD(j * lanes))])
                pointer = builder.bitcast(place, kind.as_pointer())
                builder.store(builder.load(total), pointer, align=align)
        return context.get_dummy_value()

    return types.void(sums, rows, starts, weights, count), generate


@intrinsic
def copy_row(_: Any, into: Any, source: Any) -> Any:
    """Copy as many elements as the shorter array has, by the C library."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, value=value)
            for kind, value in zip(signature.args, arguments, strict=True)
        ]
        counts = [builder.extract_value(array.shape, 0) for array in arrays]
        count = builder.select(builder.icmp_signed("<", *counts), *counts)
        size = builder.mul(count, _WORD(source.dtype.bitwidth // 8))
        cgutils.raw_memcpy(builder, arrays[0].data, arrays[1].data, size, 1)
        return context.get_dummy_value()

    return types.void(into, source), generate


@intrinsic
def copy_listed(
    _: Any, into: Any, place: Any, source: Any, start: Any, places: Any, first: Any, last: Any
) -> Any:
    """Copy elements from a list of places (see ortgrad.compiled.functions)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, given, table = (_data(context, builder, signature, arguments, i) for i in (0, 2, 4))
        to, given = builder.gep(to, [arguments[1]]), builder.gep(given, [arguments[3]])

        def copy(indices: list[Any]) -> None:
            listed = [builder.load(builder.gep(table, [k])) for k in indices]
            values = [builder.load(builder.gep(given, [k])) for k in listed]
            for k, value in zip(indices, values, strict=True):
                builder.store(value, builder.gep(to, [k]))

        _for_some_at_once(builder, arguments[5], arguments[6], copy)
        return context.get_dummy_value()

    return types.void(into, place, source, start, places, first, last), generate


@intrinsic
def add_listed(
    _: Any, into: Any, place: Any, places: Any, first: Any, last: Any, source: Any, start: Any
) -> Any:
    """Add elements to those at a list of places (see ortgrad.compiled.functions)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, table, given = (_data(context, builder, signature, arguments, i) for i in (0, 2, 5))
        to, given = builder.gep(to, [arguments[1]]), builder.gep(given, [arguments[6]])

        def add(indices: list[Any]) -> None:
            targets = [builder.gep(to, [builder.load(builder.gep(table, [k]))]) for k in indices]
            sums = [
                builder.fadd(builder.load(target), builder.load(builder.gep(given, [k])))
                for k, target in zip(indices, targets, strict=True)
            ]
            for value, target in zip(sums, targets, strict=True):
                builder.store(value, target)

        _for_some_at_once(builder, arguments[3], arguments[4], add)
        return context.get_dummy_value()

    return types.void(into, place, places, first, last, source, start), generate


def _data(context: Any, builder: Any, signature: Any, arguments: Any, i: int) -> Any:
    return context.make_array(signature.args[i])(context, builder, value=arguments[i]).data


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
