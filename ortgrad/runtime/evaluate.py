"""A checked call of a kernel, shared by all callbacks from onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ortgrad.errors import KernelError
from ortgrad.operators.call import Call
from ortgrad.operators.declaration import Empty, Operand, Operator


def declared_shapes(call: Call, feed: Sequence[np.ndarray]) -> Sequence[Any]:
    """Return the shapes of the outputs for these inputs, by the operator's declaration."""
    operands = [
        Operand(array.shape, _small_value(array)) if real else None
        for array, real in zip(feed, call.present, strict=True)
    ]
    return call.operator.shapes(*operands, **call.attributes)


def evaluate(
    call: Call, feed: Sequence[np.ndarray], dtypes: Sequence[np.dtype], empty: Empty
) -> list[np.ndarray | None]:
    """Run the kernel; returns its outputs, checked for type and shape, and None where unwanted.

    Raises ValueError for inputs that violate the operator's contract.
    """
    arrays = [array if real else None for array, real in zip(feed, call.present, strict=True)]
    call.contract.check_arrays(arrays)
    shapes = declared_shapes(call, feed)
    with np.errstate(all="ignore"):
        result = call.operator.compute(arrays, call.attributes, call.wanted, empty)
    values = result if isinstance(result, tuple) else (result,)
    if len(values) != len(dtypes):
        raise TypeError(f"the kernel returned {len(values)} outputs, not {len(dtypes)}")
    outputs: list[np.ndarray | None] = []
    for value, dtype, shape, wanted in zip(values, dtypes, shapes, call.wanted, strict=True):
        if not wanted:
            outputs.append(None)
            continue
        if not isinstance(value, np.ndarray) or value.dtype != dtype:
            got = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"the kernel returned {got} where {dtype} is declared")
        if shape is not None and not _agree(value.shape, shape):
            raise TypeError(f"the kernel returned shape {value.shape} where {shape} is declared")
        outputs.append(value)
    return outputs


def describe(operator: Operator, feed: Sequence[np.ndarray]) -> str:
    """Return the inputs' names, types and shapes, for error messages."""
    return ", ".join(
        f"{parameter.name}: {array.dtype}{list(array.shape)}"
        for parameter, array in zip(operator.inputs, feed, strict=False)
    )


def kernel_error(operator: Operator, node: str, inputs: str, reason: BaseException) -> BaseException:
    """Return the exception for the session's caller: a KernelError, or `reason` if it is no Exception."""
    if not isinstance(reason, Exception):
        return reason
    kind = type(reason).__name__
    try:
        text = str(reason)
    except Exception:
        # An exception class may have a faulty __str__.
        text = f"{kind}, which cannot be shown"
    else:
        text = text if isinstance(reason, ValueError) else f"{kind}: {text}"
    error = KernelError(node, operator.name, inputs, text)
    error.__cause__ = reason
    return error


def _small_value(array: np.ndarray) -> np.ndarray | None:
    return array if array.dtype == np.int64 and array.ndim == 1 and array.size <= 16 else None


def _agree(actual: tuple[int, ...], declared: Sequence[Any]) -> bool:
    return len(actual) == len(declared) and all(
        not isinstance(d, int) or a == d for a, d in zip(actual, declared, strict=True)
    )
