"""The gradients of Conv and ConvTranspose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ortgrad.autodiff.rules import ForwardNode, Gradients, gradient
from ortgrad.graph.lazy import ir
from ortgrad.operators.compiled import vectors
from ortgrad.operators.declaration import INTERNAL_DOMAIN, Choice, Operand, Shape, operator
from ortgrad.ops._windows import AUTO_PADS, per_dimension, spatial
from ortgrad.ops.conv import _body, _body_form, _compiled, _numpy
from ortgrad.ops.conv._dense import Known

ATTRIBUTES: Mapping[str, Any] = {
    "auto_pad": Choice(*AUTO_PADS),
    "dilations": list[int],
    "group": 1,
    "kernel_shape": list[int],
    "pads": list[int],
    "strides": list[int],
}


def _shapes(dy: Operand, x: Operand, w: Operand, **_: Any) -> Sequence[Shape | None]:
    return [x.shape, w.shape, w.shape[:1] if w.shape else None]


def _dims(*, group: int, kernel_shape: list[int] | None, **_: Any) -> dict[str, str]:
    if group < 1:
        raise ValueError(f"group is {group}; it must be positive")
    y, x, kernel = spatial(kernel_shape)
    return {"dY": f"N {group}*M {y}", "X": f"N {group}*C {x}", "W": f"{group}*M C {kernel}"}


_TENSORS: Mapping[str, Any] = {
    "inputs": ["dY", "X", "W"],
    "outputs": ["dX?", "dW?", "dB?"],
    "shapes": _shapes,
    "dims": _dims,
    "attributes": ATTRIBUTES,
}
conv_grad = operator("ConvGrad", **_TENSORS)(_numpy.conv_grad)
conv_grad.onnx(_body.conv_grad_body)
# The declaration of operators that replace some of its nodes in sessions with compiled kernels.
DECLARATION: Mapping[str, Any] = {"domain": INTERNAL_DOMAIN, **_TENSORS}


def is_depthwise(w: Shape | None, group: int) -> bool:
    """Return whether there are one or two dimensions, and every group is known to have a single channel."""
    return w is not None and w[1] == 1 and group > 1 and 3 <= len(w) <= 4


def _is_fastest(dy: Known, x: Known, w: Known, *, group: int, **attributes: Any) -> bool:
    # Another kernel computes depthwise convolutions.
    return is_depthwise(w, group) or _compiled.is_fastest(dy, x, w, group=group, **attributes)


conv_grad.compiled(
    views=vectors("dy x w dx dw db"),
    scratch=vectors("dy_boxes x_boxes turned scratch"),
    plan=_compiled.plan,
    first=_compiled.prepare,
    auto=_is_fastest,
)(_compiled.conv_grad_task)


@gradient("Conv")
def conv_gradient(node: ForwardNode) -> Gradients:
    _require_kernel(node)
    same = node.attributes_for("ConvGrad")
    return node.op.ConvGrad(node.grad(0), node.input(0), node.input(1), **same, _outputs=3)


@gradient("ConvTranspose")
def conv_transpose_gradient(node: ForwardNode) -> Gradients:
    """dX = Conv(dY, W); dW is that convolution's gradient towards W for the gradient X; dB = sum of dY"""
    op, dy, w = node.op, node.grad(0), node.input(1)
    axes = list(range(2, node.rank()))
    _require_kernel(node)
    pads = _transposed_pads(node)
    known = isinstance(pads, list)
    spread = dy if known else op.Pad(dy, pads, None, axes, rank=node.rank())
    same = node.attributes_for("ConvGrad") | {"auto_pad": None, "pads": pads if known else None}
    _, dw, _ = op.ConvGrad(node.input(0), spread, w, **same, _outputs=3)
    return op.Conv(spread, w, **same), dw, op.ReduceSum(dy, [0, *axes], keepdims=0)


def _require_kernel(node: ForwardNode) -> None:
    """Refuse a node whose kernel size is not known. The error names the node and not its gradient."""
    w = node.input(1)
    known = bool(node.attribute("kernel_shape")) or _body_form.has_known_kernel(w)
    if not known and _body.needs_kernel(w, node.grad(0), node.attribute("auto_pad")):
        raise node.unsupported(
            f"its kernel size is not known; declare the shape of {w.name!r}, or give the node a kernel_shape"
        )


def _transposed_pads(node: ForwardNode) -> list[int] | ir.Value:
    """Return the pads of ConvTranspose, computed at run time if they depend on an unknown size."""
    op, x, auto_pad = node.op, node.input(0), node.attribute("auto_pad")
    rank = node.rank() - 2
    output_shape = node.attribute("output_shape")
    if not output_shape and not auto_pad.startswith("SAME"):
        return list(node.attribute("pads") or [0] * (2 * rank))
    kernel = node.attribute("kernel_shape") or _body_form.known_kernel(node.input(1))
    strides = per_dimension("strides", node.attribute("strides"), rank)
    dilations = per_dimension("dilations", node.attribute("dilations"), rank)
    extra = node.attribute("output_padding") or [0] * rank
    # The pads of an input of size 1, and how much they grow with each further element.
    reach = [a + (k - 1) * d + 1 for a, k, d in zip(extra, kernel, dilations, strict=True)]
    if output_shape:
        first = [r - n for r, n in zip(reach, output_shape[-rank:], strict=True)]
        growth = list(strides)
    else:
        first = [r - s for r, s in zip(reach, strides, strict=True)]
        growth = [0] * rank
    sizes = [n if isinstance(n, int) else None for n in list(x.shape)[2:]] if x.shape is not None else []
    if any(growth) and None in sizes:
        total = op.Max((op.Shape(x, start=2) - 1) * growth + first, 0)
        small = total / 2
        large = total - small
        return op.Concat(*((small, large) if auto_pad == "SAME_UPPER" else (large, small)), axis=0)
    totals = [max(f + g * ((n or 1) - 1), 0) for f, g, n in zip(first, growth, sizes, strict=True)]
    halves, rests = [t // 2 for t in totals], [t - t // 2 for t in totals]
    return [*halves, *rests] if auto_pad == "SAME_UPPER" else [*rests, *halves]
