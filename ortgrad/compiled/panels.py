"""The instruction `multiply_panel` for compiled code (see ortgrad.compiled.functions). Imports Numba."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ortgrad.compiled.functions import PANEL

_WORD = ir.IntType(64)
_VECTORS = 2  # of a row of the panel that are multiplied at once


def _shape(bits: int) -> tuple[int, tuple[int, ...]]:
    """Return how many numbers a vector register holds, and how many rows are multiplied at once.

    Eight rows take sixteen registers for their sums, which are half of those of some processors.
    """
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 512 // bits, (8, 4, 2, 1)
    if features.get("avx") and features.get("fma"):
        return 256 // bits, (4, 2, 1)
    return 128 // bits, (8, 4, 2, 1) if features.get("neon") else (4, 2, 1)


@intrinsic
def multiply_panel(
    _: Any, sums: Any, stride: Any, left: Any, left_stride: Any, panel: Any, terms: Any, rows: Any
) -> Any:
    """Multiply rows with a panel."""
    bits = panel.dtype.bitwidth
    element = ir.DoubleType() if bits == 64 else ir.FloatType()
    lanes, groups = _shape(bits)
    kind = ir.VectorType(element, lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        into, source, right = (
            context.make_array(signature.args[i])(context, builder, value=arguments[i]).data
            for i in (0, 2, 4)
        )
        into_stride, source_stride, count, rows = (arguments[i] for i in (1, 3, 5, 6))
        done: Any = _WORD(0)
        for size in groups:
            # With 8, 4, 2 and 1: as many groups of 8 as there are, then at most one of each other size.
            number = builder.sdiv(builder.sub(rows, done), _WORD(size))
            with cgutils.for_range(builder, number) as group:
                first = builder.add(done, builder.mul(group.index, _WORD(size)))
                to = builder.gep(into, [builder.mul(first, into_stride)])
                of = builder.gep(source, [builder.mul(first, source_stride)])
                for start in range(0, PANEL, lanes * _VECTORS):
                    places = [start + i * lanes for i in range(_VECTORS)]
                    _multiply(builder, kind, size, places, (to, into_stride, of, source_stride, right, count))
            done = builder.add(done, builder.mul(number, _WORD(size)))
        return context.get_dummy_value()

    return types.void(sums, stride, left, left_stride, panel, terms, rows), generate


def _multiply(builder: Any, kind: Any, rows: int, places: Sequence[int], operands: Sequence[Any]) -> None:
    """Multiply some rows with the vectors at some places of a panel's rows, in registers."""
    into, into_stride, left, left_stride, panel, count = operands
    align = 8 if isinstance(kind.element, ir.DoubleType) else 4
    with builder.goto_entry_block():
        sums = [[builder.alloca(kind) for _ in places] for _ in range(rows)]
    for total in (total for row in sums for total in row):
        builder.store(ir.Constant(kind, None), total)
    starts = [builder.gep(left, [builder.mul(left_stride, _WORD(i))]) for i in range(rows)]
    with cgutils.for_range(builder, count) as term:
        row = builder.gep(panel, [builder.mul(term.index, _WORD(PANEL))])
        vectors = [builder.load(_vector(builder, row, place, kind), align=align) for place in places]
        for start, totals in zip(starts, sums, strict=True):
            factor = _broadcast(builder, builder.load(builder.gep(start, [term.index])), kind)
            for vector, total in zip(vectors, totals, strict=True):
                product = builder.fmul(factor, vector, flags=("contract",))
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    for i, totals in enumerate(sums):
        row = builder.gep(into, [builder.mul(into_stride, _WORD(i))])
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), _vector(builder, row, place, kind), align=align)


def _vector(builder: Any, row: Any, place: int, kind: Any) -> Any:
    return builder.bitcast(builder.gep(row, [_WORD(place)]), kind.as_pointer())


def _broadcast(builder: Any, number: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)
