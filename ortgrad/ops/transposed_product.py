"""Products with a transposed matrix, for sessions that run compiled kernels.

The gradient of a matrix of weights is the product of the transposed inputs and dY. onnxruntime's Gemm copies
parts of a transposed left factor again for every block of columns. Here it is transposed once, before the
product. So is B where the transposed product is computed, because that does not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortgrad.compiled.functions import TILE
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.compiled import Matrix, Plan, Product, vectors
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Operand, Shape, operator
from ortgrad.operators.gemm import is_steady
from ortgrad.ops._transposition import turn


def _shapes(a: Operand, b: Operand) -> Sequence[Shape | None]:
    rows = a.shape[1] if a.shape is not None else None
    return [(rows, b.shape[1] if b.shape is not None else None)]


@operator(
    "TransposedProduct",
    domain=INTERNAL_DOMAIN,
    inputs=["A", "B"],
    outputs=["Y"],
    shapes=_shapes,
    dims={"A": "K M", "B": "K N"},
)
def transposed_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Y = transposed A B"""
    return a.T @ b


@transposed_product.onnx
def transposed_product_body(op: Recorder, a: ir.Value, b: ir.Value) -> ir.Value:
    return op.Gemm(a, b, transA=1)


# With fewer terms, Gemm copies less than the transposition does.
FEWEST_TERMS = 48


def plan(a: Sequence[int], b: Sequence[int], y: Sequence[int]) -> Plan | None:
    """Return the plan; None for tensors without elements."""
    (terms, rows), columns = a, b[1]
    if not terms * rows * columns:
        return None
    steady, exchanged = is_steady(rows, columns, terms), is_steady(columns, rows, terms)
    turned = terms >= FEWEST_TERMS and (steady or exchanged)
    both = turned and not steady
    into = Matrix("y", rows, columns)
    left = Matrix("turned", rows, terms) if turned else Matrix("a", terms, rows)
    right = Matrix("turned_b", columns, terms) if both else Matrix("b", terms, columns)
    turns = -(-rows // TILE) if turned else 0
    return Plan(
        tasks=turns + (-(-columns // TILE) if both else 0),
        views=[(terms * rows,), (terms * columns,), (rows * columns,)],
        numbers={"terms": terms, "turns": turns},
        work=terms * (rows + (columns if both else 0)),
        scratch=[(rows * terms if turned else 0,), (columns * terms if both else 0,)],
        after=[Product(into, left, right, "right" if both else "" if turned else "left")],
    )


@transposed_product.compiled(
    views=vectors("a b y"), scratch=vectors("turned turned_b"), plan=plan, products=True
)
def transposed_product_task(
    task: int, a: np.ndarray, b: np.ndarray, turned: np.ndarray, turned_b: np.ndarray, terms: int, turns: int
) -> None:
    """Copy up to TILE columns of A, or of B, into rows."""
    if task < turns:
        turn(turned, a, task * TILE, terms)
    else:
        turn(turned_b, b, (task - turns) * TILE, terms)
