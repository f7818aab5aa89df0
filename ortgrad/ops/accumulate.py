"""Gradient accumulation."""

from __future__ import annotations

import numpy as np

from ortgrad.graph.lazy import Recorder, ir
from ortgrad.operators.declaration import FLOATS, Empty, Operand, Shape, operator
from ortgrad.ops._flow import choose


def _shapes(
    buffer: Operand | None, value: Operand | None, overwrite: Operand | None
) -> tuple[Shape | None, ...]:
    return (1,), None if buffer is None else buffer.shape


@operator(
    "InPlaceAccumulatorV2",
    inputs=["accumulation_buffer", "value: T_GRAD", "overwrite_flag?: bool"],
    outputs=["updated_flag: bool", "accumulation_buffer_out?"],
    shapes=_shapes,
    dims={"accumulation_buffer": "*S", "value": "*S", "overwrite_flag": "1^any"},
    types={"T": FLOATS, "T_GRAD": FLOATS},
)
def in_place_accumulator_v2(
    buffer: np.ndarray,
    value: np.ndarray,
    overwrite: np.ndarray | None,
    *,
    wanted: tuple[bool, ...],
    empty: Empty,
) -> tuple[np.ndarray, np.ndarray | None]:
    """accumulation_buffer_out = accumulation_buffer + value, or value alone if overwrite_flag is true

    onnxruntime-training also changes the buffer itself; here the sum is only an output.
    """
    updated = np.ones(1, np.bool_)
    if not wanted[1]:
        return updated, None
    if overwrite is not None and overwrite.reshape(-1)[0]:
        return updated, value.astype(buffer.dtype, copy=False)
    total = empty(1, buffer.shape)
    np.add(buffer, value, out=total, casting="same_kind")
    return updated, total


@in_place_accumulator_v2.onnx
def in_place_accumulator_v2_body(
    op: Recorder, buffer: ir.Value, value: ir.Value, overwrite: ir.Value | None, *, wanted: tuple[bool, ...]
) -> tuple[ir.Value, ir.Value | None]:
    updated = op.constant(np.ones(1, np.bool_))
    if not wanted[1]:
        return updated, None
    if overwrite is None:
        return updated, buffer + op.CastLike(value, buffer)
    # Where would compute both branches and take three times as long.
    total = choose(
        op,
        overwrite,
        lambda op: op.CastLike(value, buffer),
        lambda op: buffer + op.CastLike(value, buffer),
        like=buffer,
    )
    return updated, total
