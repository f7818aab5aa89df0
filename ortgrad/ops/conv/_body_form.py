"""What is known about a convolution before it runs, and shapes that may be known only at run time.

For bodies in standard ONNX operators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortgrad.errors import NodeError
from ortgrad.graph.lazy import Recorder, ir
from ortgrad.ops._windows import explicit_pads, per_dimension, windows

if TYPE_CHECKING:
    # A known size, or a vector of one element that holds it at run time.
    Size = int | ir.Value


def has_known_kernel(w: ir.Value) -> bool:
    """Return whether the shape of W contains the size of the kernel."""
    return w.shape is not None and len(w.shape) > 2 and all(isinstance(n, int) for n in w.shape[2:])


def known_kernel(w: ir.Value) -> list[int]:
    """Return the size of the kernel from the shape of W."""
    if not has_known_kernel(w):
        raise NodeError(f"the kernel size is not known; declare the shape of {w.name!r} or give kernel_shape")
    return [n for n in list(w.shape or ())[2:] if isinstance(n, int)]


def is_double(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.name == "DOUBLE"


@dataclass(frozen=True)
class Form:
    """What is known about the windows before the run. Sizes may be unknown, and then also pads."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    sizes: tuple[int | None, ...]  # of X
    pads: tuple[tuple[int, ...], tuple[int, ...]] | None
    auto_pad: str
    group: int
    fixed: bool  # whether the kernel is known; otherwise its sizes are ones, and `sizes` are unknown

    @classmethod
    def of(
        cls,
        x: ir.Value,
        kernel: Sequence[int],
        *,
        group: int,
        fixed: bool,
        auto_pad: str,
        strides: Sequence[int] | None,
        dilations: Sequence[int] | None,
        pads: Sequence[int] | None,
    ) -> Form:
        rank = len(kernel)
        if x.shape is not None and len(x.shape) != rank + 2:
            raise ValueError(f"X has {len(x.shape)} dimensions, but the kernel has {rank} spatial ones")
        dims = list(x.shape)[2:] if x.shape is not None else [None] * rank
        sizes = tuple(d if isinstance(d, int) and fixed else None for d in dims)
        strides = per_dimension("strides", strides, rank)
        dilations = per_dimension("dilations", dilations, rank)
        kernel = per_dimension("kernel_shape", kernel, rank)
        extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
        known: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        if auto_pad == "NOTSET":
            known = explicit_pads(pads, rank)
        elif auto_pad == "VALID":
            known = (0,) * rank, (0,) * rank
        elif all(n is not None or s == 1 for n, s in zip(sizes, strides, strict=True)):
            # With stride 1 the padding does not depend on the size.
            some = [e if n is None else n for n, e in zip(sizes, extents, strict=True)]
            win = windows(some, kernel, auto_pad=auto_pad, strides=strides, dilations=dilations)
            known = win.heads, win.tails
        elif any(s > e + 1 for s, e in zip(strides, extents, strict=True)):
            raise ValueError(
                f"auto_pad {auto_pad} with strides {list(strides)} and kernel {list(kernel)} may leave gaps "
                "where the sizes of X are not known; give pads instead"
            )
        return cls(kernel, strides, dilations, sizes, known, auto_pad, group, fixed)

    @property
    def extents(self) -> list[int]:
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def axes(self) -> list[int]:
        return list(range(2, 2 + self.rank))

    @property
    def outputs(self) -> tuple[int, ...] | None:
        """How many windows there are along each axis, if the sizes of X are known and there are any."""
        if self.pads is None or None in self.sizes:
            return None
        ends = zip(self.padded_sizes, self.extents, self.strides, strict=True)
        counts = tuple((n - e) // s + 1 for n, e, s in ends)
        return counts if min(counts) > 0 else None

    @property
    def padded_sizes(self) -> tuple[int, ...]:
        """The sizes of X with its padding, which must be known."""
        assert self.pads is not None
        return tuple((n or 0) + h + t for n, h, t in zip(self.sizes, *self.pads, strict=True))

    @property
    def pointwise(self) -> bool:
        """Whether each window is a single position of X, and all positions have one."""
        padded = self.pads is None or any(map(any, self.pads))
        return self.fixed and math.prod(self.kernel) == max(self.strides) == 1 and not padded

    def start(self, tap: Sequence[int]) -> tuple[int, ...]:
        """Where a tap of the kernel begins to read in the padded X."""
        return tuple(k * d for k, d in zip(tap, self.dilations, strict=True))

    def positions(self, dy: ir.Value) -> int | None:
        """The number of windows, if it is known."""
        sizes = [known_size(dy, axis) for axis in self.axes]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def heads(self, op: Recorder, x: ir.Value) -> list[int] | ir.Value:
        """The padding before X."""
        return list(self.pads[0]) if self.pads else self._pads_at_run_time(op, x)[0]

    def padded(self, op: Recorder, x: ir.Value, first: int = 2) -> ir.Value:
        """X with its padding; `first` is its first spatial axis."""
        axes = list(range(first, first + self.rank))
        if self.pads is None:
            pads = op.Concat(*self._pads_at_run_time(op, x, first), axis=0)
        else:
            pads = [*self.pads[0], *self.pads[1]]
            if not any(pads):
                return x
        return op.Pad(x, pads, None, axes, rank=2 + self.rank)

    def _pads_at_run_time(self, op: Recorder, x: ir.Value, first: int = 2) -> tuple[ir.Value, ir.Value]:
        """The padding for SAME_UPPER and SAME_LOWER, before and after."""
        sizes, strides = op.shape_of(x, first, first + self.rank), list(self.strides)
        outputs = (sizes + [s - 1 for s in strides]) / strides
        total = op.Max((outputs - 1) * strides + self.extents - sizes, 0)
        small = total / 2
        large = total - small
        return (small, large) if self.auto_pad == "SAME_UPPER" else (large, small)


def known_size(value: ir.Value, axis: int) -> int | None:
    size = None if value.shape is None else value.shape[axis]
    return size if isinstance(size, int) else None


def size_of(op: Recorder, value: ir.Value, axis: int) -> Size:
    known = known_size(value, axis)
    return op.Shape(value, start=axis, end=axis + 1) if known is None else known


def shaped(op: Recorder, value: ir.Value, *sizes: Size) -> ir.Value:
    """Return the value in a shape, which is a constant if possible."""
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) == len(sizes):
        return op.Reshape(value, known, allowzero=1)
    if len(known) == len(sizes) - 1 and all(known):
        return op.Reshape(value, [size if isinstance(size, int) else -1 for size in sizes])
    return reshaped(op, value, *([size] if isinstance(size, int) else size for size in sizes))


def reshaped(op: Recorder, value: ir.Value, *sizes: ir.Value | list[int]) -> ir.Value:
    """Return the value in a shape that is a concatenation of vectors."""
    # Not -1, which fails if the value is empty.
    return op.Reshape(value, op.Concat(*sizes, axis=0), allowzero=1)
