"""Sliding windows: what convolution and pooling share of the arithmetic of their attributes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ortgrad.graph.lazy import Recorder, ir

# Positions of a channel with its padding that are never too many, and how many times as many as of X there
# may be. Kernels copy X with its padding; so much of it is a mistake or an attack.
_POSITIONS, _PADDING = 1 << 16, 64
AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


@dataclass(frozen=True)
class Windows:
    """Where the windows of a convolution or pool lie; one number per spatial dimension each.

    Output position o reads the input positions o * stride - head + k * dilation for k in range(kernel);
    those outside the input are padding.
    """

    sizes: tuple[int, ...]  # of the input
    outputs: tuple[int, ...]  # sizes of the output
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    heads: tuple[int, ...]  # padding before the input
    tails: tuple[int, ...]  # padding after it, as the attributes say

    @property
    def rank(self) -> int:
        """The number of spatial dimensions."""
        return len(self.sizes)

    @property
    def extents(self) -> tuple[int, ...]:
        """From the first to the last element of a window."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def reach(self) -> tuple[int, ...]:
        """The size of the padded input that the windows touch: more than it with ceil_mode, or less."""
        return tuple(
            (o - 1) * s + e for o, s, e in zip(self.outputs, self.strides, self.extents, strict=True)
        )


class Plane(NamedTuple):
    """A number for rows and one for columns, as compiled kernels read them."""

    height: int
    width: int


def spatial(kernel_shape: Sequence[int] | None) -> tuple[str, str, str]:
    """Patterns of the spatial dimensions of output, input and kernel; there is at least one."""
    if not kernel_shape:
        return "Y0 *Y", "S0 *S:Y", "K0 *K:Y"
    per_dimension("kernel_shape", kernel_shape, len(kernel_shape))
    numbers = range(len(kernel_shape))
    return (
        " ".join(f"Y{i}" for i in numbers),
        " ".join(f"S{i}" for i in numbers),
        " ".join(map(str, kernel_shape)),
    )


def windows(
    sizes: Sequence[int],
    kernel: Sequence[int],
    *,
    auto_pad: str = "NOTSET",
    strides: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    ceil_mode: bool = False,
    pool: bool = False,
) -> Windows:
    """The windows over an input of these spatial sizes; raises ValueError if there can be none.

    With `pool`, the input may be smaller than a window, as in onnxruntime's pools: by less than a stride, and
    there is one window, cut off behind the input; by exactly one stride, and there is none. None stands for
    the default of an attribute. Explicit pads are ignored, as in onnxruntime, if auto_pad is set.
    """
    rank = len(sizes)
    kernel = per_dimension("kernel_shape", kernel, rank)
    strides = per_dimension("strides", strides, rank)
    dilations = per_dimension("dilations", dilations, rank)
    heads, tails = explicit_pads(pads, rank) if auto_pad == "NOTSET" else ((0,) * rank, (0,) * rank)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [_same(*dim) for dim in zip(sizes, kernel, strides, dilations, strict=True)]
        small, large = tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals)
        heads, tails = (small, large) if auto_pad == "SAME_UPPER" else (large, small)
    outputs = []
    for i, (n, k, s, d) in enumerate(zip(sizes, kernel, strides, dilations, strict=True)):
        room = n + heads[i] + tails[i] - (k - 1) * d - 1
        # onnxruntime's pools divide as C++ does, which rounds what is negative up.
        upwards = ceil_mode or (pool and room < 0)
        count = (-(-room // s) if upwards else room // s) + 1
        if count < (0 if pool else 1):
            raise ValueError(
                f"a window of {(k - 1) * d + 1} (kernel {k}, dilation {d}) does not fit into spatial "
                f"dimension {i} of size {n} with pads {heads[i]} and {tails[i]}"
            )
        # A window that starts behind the input and its head padding would see nothing but padding.
        if ceil_mode and (count - 1) * s >= n + heads[i]:
            count -= 1
        outputs.append(count)
    made = Windows(tuple(sizes), tuple(outputs), kernel, strides, dilations, heads, tails)
    padded = [max(n + h + t, r) for n, h, t, r in zip(sizes, heads, tails, made.reach, strict=True)]
    if math.prod(padded) > max(_POSITIONS, _PADDING * math.prod(sizes)):
        raise ValueError(
            f"the windows and pads extend an X of spatial size {list(sizes)} to {padded}: too far"
        )
    return made


def require_outputs(
    op: Recorder,
    dy: ir.Value,
    sizes: Sequence[int] | ir.Value,
    kernel: Sequence[int],
    **attributes: Any,
) -> ir.Value:
    """dY, which must have as many spatial positions as there are windows over an input of these sizes.

    It takes the attributes that `windows` takes.
    """
    rank, auto_pad = len(kernel), attributes["auto_pad"]
    kernel = per_dimension("kernel_shape", kernel, rank)
    steps, gaps = (per_dimension(name, attributes[name], rank) for name in ("strides", "dilations"))
    heads, tails = explicit_pads(attributes["pads"] if auto_pad == "NOTSET" else None, rank)
    what = f"dY [N, M, *Y] with one Y for each window of {list(kernel)} over X"
    known = None if dy.shape is None else tuple(dy.shape)[2:]
    if isinstance(sizes, Sequence) and known is not None and all(isinstance(n, int) for n in known):
        win = windows(sizes, kernel, **attributes)
        if win.outputs != known:
            raise ValueError(
                f"windows of {list(kernel)} over an X of spatial size {list(sizes)} give "
                f"{list(win.outputs)}, but dY has {list(known)}"
            )
        return dy
    # Div rounds towards zero, as onnxruntime's pools do; elsewhere what is divided is not negative.
    if auto_pad.startswith("SAME"):
        outputs = op.Add(sizes, [s - 1 for s in steps]) / steps
    else:
        padding = [h + t - (k - 1) * d - 1 for h, t, k, d in zip(heads, tails, kernel, gaps, strict=True)]
        room = op.Max(op.Add(sizes, padding), [-s for s in steps])
        if not attributes.get("ceil_mode"):
            outputs = room / steps + 1 if attributes.get("pool") else (room + steps) / steps
        else:
            count = (room + [2 * s - 1 for s in steps]) / steps
            # A window that starts behind the input and its head padding is left out.
            starts = op.Add(sizes, [h + s - 1 for h, s in zip(heads, steps, strict=True)]) / steps
            outputs = op.Max(count - 1, op.Min(count, starts))
    return op.require(dy, [op.Shape(dy, start=2) - outputs], what)


def per_dimension(name: str, values: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """A list attribute with one positive number per spatial dimension; ones if it is absent or empty."""
    if not values:
        return (1,) * rank
    if len(values) != rank:
        raise ValueError(f"{name} {list(values)} must have one number for each of {rank} spatial dimensions")
    if min(values) < 1:
        raise ValueError(f"{name} {list(values)} must be positive")
    return tuple(values)


def explicit_pads(pads: Sequence[int] | None, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The attribute `pads` as (before, after); zeros if it is absent or empty."""
    pads = tuple(pads or (0,) * (2 * rank))
    if len(pads) != 2 * rank:
        raise ValueError(f"pads {list(pads)} must have two numbers for each of {rank} spatial dimensions")
    if min(pads, default=0) < 0:
        raise ValueError(f"pads {list(pads)} must not be negative")
    return pads[:rank], pads[rank:]


def _same(size: int, kernel: int, stride: int, dilation: int) -> int:
    """How much padding gives ceil(size / stride) outputs."""
    total = (math.ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size
    if total < -1:
        # onnxruntime crops the input at both ends here, and Conv and AveragePool do it differently.
        raise ValueError(
            f"auto_pad SAME with stride {stride} and kernel {kernel} leaves gaps in a dimension "
            f"of size {size}; give pads instead"
        )
    return max(total, 0)
