"""Products of matrices by onnxruntime's Gemm, in a form whose results do not depend on the number of threads.

Gemm adds up the terms of a product in blocks. How long these are depends on the number of columns that a
thread has, and a thread that has one row adds up in another order, so that the result is rounded differently
if rows or columns are divided among another number of threads. If the left factor is stored transposed, all
blocks have the same length. So they have if rows are divided, each thread has several, and all have all
columns: that is so if there are at least as many rows as columns.
"""

from __future__ import annotations

from typing import NamedTuple

from ortgrad.operators.compiled import Matrix, Product

# The name of the scratch memory in which operations keep a matrix.
ROOM = ""
# Terms that Gemm adds up in one block in any case.
_TERMS = 128
# Products for which Gemm uses one more thread, and the number of threads that it uses at most.
_PRODUCTS_OF_THREAD, _THREADS = 1 << 16, 64
# Gemm divides columns in units, and has longer blocks of terms for a thread that has fewer units than these.
_UNIT, _UNITS = 16, 5


class Operation(NamedTuple):
    """A call of an operator of onnxruntime; `kind` is one of ortgrad.compiled.layout.PRODUCT_KINDS."""

    kind: str
    left: Matrix
    right: Matrix
    into: Matrix


def is_steady(rows: int, columns: int, terms: int) -> bool:
    """Return whether Gemm, of a left factor that is not transposed, rounds equally with all its threads."""
    threads = min(_THREADS, rows * columns * terms // _PRODUCTS_OF_THREAD + 1)
    if terms <= _TERMS or threads == 1:
        return True
    if columns > rows:
        return -(-columns // _UNIT) // threads >= _UNITS
    return columns > 1 and rows // threads > 1


def operations(product: Product) -> list[Operation]:
    """Return the operations by which a product is computed, in their order."""
    into, left, right, transposed = product
    terms = left.columns
    if transposed == "left" or is_steady(into.rows, into.columns, terms):
        return [Operation(transposed, left, right, into)]
    if transposed == "right" and is_steady(into.columns, into.rows, terms):
        # The transposed product, whose factors have changed places.
        room = Matrix(ROOM, into.columns, into.rows)
        return [Operation("right", right, left, room), Operation("turn", room, room, into)]
    room = Matrix(ROOM, left.columns, left.rows)
    kind = "both" if transposed == "right" else "left"
    return [Operation("turn", left, left, room), Operation(kind, room, right, into)]
