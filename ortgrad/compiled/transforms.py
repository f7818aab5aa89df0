"""The transforms of Winograd's convolutions, in vector registers. This module imports Numba."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from ortgrad.compiled import instructions
from ortgrad.compiled.functions import TILE, TRANSFORM_SIZES, TRANSFORMS
from ortgrad.compiled.instructions import call_written, instruction

_WORD = ir.IntType(64)


@instruction
def transform(context: Any, builder: Any, given: Any) -> None:
    """Transform squares of vectors."""
    into, source, element = given.into, given.source, given.source.values.element
    values = [into.values.at(into.place), into.row, into.column]
    values += [source.values.at(source.place), source.row, source.column, given.count]
    done = builder.append_basic_block("transformed")
    switch = builder.switch(given.kind, done)
    for number in range(len(TRANSFORMS)):
        case = builder.append_basic_block("transform")
        switch.add_case(_WORD(number), case)
        builder.position_at_end(case)
        name = f"ortgrad_transform_{element}_{number}"
        call_written(context, builder, name, values, _writer(number, element))
        builder.branch(done)
    builder.position_at_end(done)


def _writer(number: int, element: Any) -> Callable[[Any], None]:
    """Return what writes the function of one of the transforms."""
    results, given = TRANSFORM_SIZES[number]
    matrix = [coefficients[:given] for coefficients in TRANSFORMS[number][:results]]
    is_double = isinstance(element, ir.DoubleType)
    lanes = min(TILE, instructions.lanes(64 if is_double else 32))
    kind, align = ir.VectorType(element, lanes), 8 if is_double else 4

    def write(function: Any) -> None:
        into, into_row, into_column, source, row, column, count = function.args
        entry, inner, end = (function.append_basic_block(name) for name in ("entry", "vector", "end"))
        builder = ir.IRBuilder(entry)
        last = builder.mul(count, _WORD(TILE))

        def places(rows: int, row: Any, column: Any) -> list[list[Any]]:
            return [
                [builder.add(builder.mul(row, _WORD(i)), builder.mul(column, _WORD(k))) for k in range(rows)]
                for i in range(rows)
            ]

        sources, targets = places(given, row, column), places(results, into_row, into_column)
        builder.cbranch(builder.icmp_signed(">", last, _WORD(0)), inner, end)
        builder.position_at_end(inner)
        lane = builder.phi(_WORD)

        def pointer(array: Any, place: Any) -> Any:
            return builder.bitcast(builder.gep(array, [builder.add(place, lane)]), kind.as_pointer())

        values = [[builder.load(pointer(source, place), align=align) for place in line] for line in sources]
        # The columns first, then the rows.
        values = _transposed([_apply(builder, matrix, line, kind) for line in _transposed(values)])
        values = [_apply(builder, matrix, line, kind) for line in values]
        for line, line_of_places in zip(values, targets, strict=True):
            for value, place in zip(line, line_of_places, strict=True):
                builder.store(value, pointer(into, place), align=align)
        following = builder.add(lane, _WORD(lanes))
        lane.add_incoming(_WORD(0), entry)
        lane.add_incoming(following, inner)
        builder.cbranch(builder.icmp_signed("<", following, last), inner, end)
        builder.position_at_end(end)
        builder.ret_void()

    return write


def _transposed(values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(line) for line in zip(*values, strict=True)]


def _apply(builder: Any, matrix: Sequence[Sequence[float]], values: Sequence[Any], kind: Any) -> list[Any]:
    """Return the products of a matrix with vectors; the coefficients of a row are 0, or of one size."""
    results = []
    for coefficients in matrix:
        # A row does not begin with what is subtracted.
        terms = sorted(
            ((c, v) for c, v in zip(coefficients, values, strict=True) if c != 0), key=lambda term: -term[0]
        )
        size, total = terms[0]
        for coefficient, value in terms[1:]:
            total = builder.fadd(total, value) if coefficient > 0 else builder.fsub(total, value)
        if size != 1:
            total = builder.fmul(total, ir.Constant(kind, [size] * kind.count))
        results.append(total)
    return results
