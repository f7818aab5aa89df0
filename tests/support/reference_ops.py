"""onnx's reference evaluator, with what it lacks or gets wrong written out in NumPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

DOMAIN = "com.microsoft"
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + _erf(x / math.sqrt(2)))


class Loop(OpRun):
    """onnx's joins scan outputs instead of stacking them, and without a condition runs no step."""

    def need_context(self) -> bool:
        return True

    def _run(self, trips: Any, condition: Any, *carried: Any, context: Any = None, **_: Any) -> Any:
        body = self.body
        state, going, stacked, step = list(carried), True if condition is None else bool(condition), [], 0
        while going and (trips is None or step < int(trips)):
            feeds = dict(context or {})
            first = [np.array(step, np.int64), np.array(going)]
            feeds |= dict(zip(body.input_names, [*first, *state], strict=True))
            results = self._run_body(feeds)
            going, state = bool(results[0]), list(results[1 : 1 + len(state)])
            stacked.append(results[1 + len(state) :])
            step += 1
        return (*state, *(np.stack(column) for column in zip(*stacked, strict=True)))


class Gelu(OpRun):
    op_domain = DOMAIN

    def _run(self, x: np.ndarray, **_: Any) -> Any:
        return (x * _normal_cdf(x),)


class BiasGelu(OpRun):
    op_domain = DOMAIN

    def _run(self, x: np.ndarray, b: np.ndarray) -> Any:
        return ((x + b) * _normal_cdf(x + b),)


class FastGelu(OpRun):
    op_domain = DOMAIN

    def _run(self, x: np.ndarray, b: np.ndarray | None = None) -> Any:
        x = x if b is None else x + b
        return (0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),)


class QuickGelu(OpRun):
    op_domain = DOMAIN

    def _run(self, x: np.ndarray, alpha: float = 1.702) -> Any:
        return (x / (1 + np.exp(-np.float64(alpha) * x)),)


class FusedMatMul(OpRun):
    op_domain = DOMAIN

    def _run(
        self,
        a: np.ndarray,
        b: np.ndarray,
        alpha: float = 1.0,
        transA: int = 0,
        transB: int = 0,
        transBatchA: int = 0,
        transBatchB: int = 0,
    ) -> Any:
        assert not (transBatchA or transBatchB)
        a = np.swapaxes(a, -1, -2) if transA else a
        b = np.swapaxes(b, -1, -2) if transB else b
        return (np.float64(alpha) * np.matmul(a, b),)


class Inverse(OpRun):
    op_domain = DOMAIN

    def _run(self, x: np.ndarray) -> Any:
        return (np.linalg.inv(x),)


class SkipLayerNormalization(OpRun):
    op_domain = DOMAIN

    def _run(
        self,
        x: np.ndarray,
        skip: np.ndarray,
        gamma: np.ndarray,
        beta: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        epsilon: float = 1e-12,
    ) -> Any:
        total = x + skip + (0 if bias is None else bias)
        centred = total - total.mean(-1, keepdims=True)
        scale = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float64(epsilon))
        return (centred * scale * gamma + (0 if beta is None else beta),)


class SkipSimplifiedLayerNormalization(OpRun):
    op_domain = DOMAIN

    def _run(
        self,
        x: np.ndarray,
        skip: np.ndarray,
        gamma: np.ndarray,
        bias: np.ndarray | None = None,
        epsilon: float = 1e-12,
    ) -> Any:
        total = x + skip + (0 if bias is None else bias)
        return (total / np.sqrt((total**2).mean(-1, keepdims=True) + np.float64(epsilon)) * gamma,)


class SimplifiedLayerNormalization(OpRun):
    """onnxruntime's, in the default domain, and not in onnx."""

    def _run(self, x: np.ndarray, scale: np.ndarray, axis: int = -1, epsilon: float = 1e-5, **_: Any) -> Any:
        axes = tuple(range(axis % x.ndim, x.ndim))
        return (x / np.sqrt((x**2).mean(axes, keepdims=True) + np.float64(epsilon)) * scale,)


class Erf(OpRun):
    """onnx's rounds its result to float32."""

    def _run(self, x: np.ndarray) -> Any:
        return (_erf(x),)


class Softsign(OpRun):
    """onnx's returns a NumPy scalar for a tensor without dimensions, and fails on it."""

    def _run(self, x: np.ndarray) -> Any:
        return (np.asarray(x / (1 + np.abs(x))),)


class GlobalLpPool(OpRun):
    """Missing."""

    def _run(self, x: np.ndarray, p: int = 2) -> Any:
        axes = tuple(range(2, x.ndim))
        return ((np.abs(x) ** p).sum(axes, keepdims=True) ** (1 / p),)


class GlobalMaxPool(OpRun):
    """onnx's adds a dimension if there are three or more of them."""

    def _run(self, x: np.ndarray) -> Any:
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class MaxUnpool(OpRun):
    """onnx's takes the indices for positions in an output of the smallest size."""

    def _run(self, x: np.ndarray, indices: np.ndarray, shape: np.ndarray, **_: Any) -> Any:
        y = np.zeros(shape, x.dtype)
        y.flat[indices.ravel()] = x.ravel()
        return (y,)


class MeanVarianceNormalization(OpRun):
    """onnx's function holds constants in float32 and fails in float64."""

    def _run(self, x: np.ndarray, axes: Any = None) -> Any:
        over = tuple(axes) if axes is not None else (0, 2, 3)
        centred = x - x.mean(over, keepdims=True)
        return (centred / (np.sqrt((centred**2).mean(over, keepdims=True)) + 1e-9),)


class GatherElements(OpRun):
    """onnx's wants indices as large as the data in the other axes."""

    def _run(self, x: np.ndarray, indices: np.ndarray, axis: int = 0) -> Any:
        near = tuple(slice(None) if i == axis % x.ndim else slice(d) for i, d in enumerate(indices.shape))
        return (np.take_along_axis(x[near], indices.astype(np.int64), axis),)


class OneHot(OpRun):
    """onnx's fails if the depth is a tensor of one element."""

    def _run(self, indices: np.ndarray, depth: np.ndarray, values: np.ndarray, axis: int = -1) -> Any:
        size = int(np.asarray(depth).ravel()[0])
        hot = np.moveaxis(np.arange(size) == (indices % size)[..., None], -1, axis)
        return (np.where(hot, values[1], values[0]),)


class ConvTranspose(OpRun):
    """onnx's confuses the sizes with groups and with one spatial dimension."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        bias: np.ndarray | None = None,
        auto_pad: Any = None,
        dilations: Any = None,
        group: int = 1,
        kernel_shape: Any = None,
        output_padding: Any = None,
        output_shape: Any = None,
        pads: Any = None,
        strides: Any = None,
    ) -> Any:
        assert output_shape is None
        assert auto_pad in (None, "NOTSET")
        dims, kernel = x.ndim - 2, w.shape[2:]
        strides, dilations = strides or [1] * dims, dilations or [1] * dims
        pads, more = pads or [0] * 2 * dims, output_padding or [0] * dims
        full = [
            (n - 1) * s + (k - 1) * d + 1 + o
            for n, s, k, d, o in zip(x.shape[2:], strides, kernel, dilations, more, strict=True)
        ]
        n, c, m = x.shape[0], x.shape[1], w.shape[1]
        y = np.zeros((n, group, m, *full))
        parts, weights = (
            x.reshape(n, group, c // group, *x.shape[2:]),
            w.reshape(group, c // group, m, *kernel),
        )
        for at in np.ndindex(*kernel):
            place = tuple(
                slice(a * d, a * d + (size - 1) * s + 1, s)
                for a, d, s, size in zip(at, dilations, strides, x.shape[2:], strict=True)
            )
            y[(..., *place)] += np.einsum("ngc...,gcm->ngm...", parts, weights[(..., *at)])
        y = y.reshape(n, group * m, *full)
        y = y[(..., *(slice(pads[i], full[i] - pads[i + dims]) for i in range(dims)))]
        return (y if bias is None else y + bias.reshape(-1, *[1] * dims),)


class Scan(OpRun):
    """onnx's has only the first axis, forwards."""

    def need_context(self) -> bool:
        return True

    def _run(self, *inputs: np.ndarray, context: Any = None, **_: Any) -> Any:
        body, count = self.body, int(self.num_scan_inputs)
        state, scanned = list(inputs[:-count]), list(inputs[-count:])

        def setting(name: str, i: int) -> int:
            given = getattr(self, name, None)
            return int(given[i]) if given is not None else 0

        scanned = [np.moveaxis(x, setting("scan_input_axes", i), 0) for i, x in enumerate(scanned)]
        scanned = [x[::-1] if setting("scan_input_directions", i) else x for i, x in enumerate(scanned)]
        stacked = []
        for parts in zip(*scanned, strict=True):
            feeds = dict(context or {}) | dict(zip(body.input_names, [*state, *parts], strict=True))
            results = self._run_body(feeds)
            state = list(results[: len(state)])
            stacked.append(results[len(state) :])
        columns = [np.stack(column) for column in zip(*stacked, strict=True)]
        columns = [x[::-1] if setting("scan_output_directions", i) else x for i, x in enumerate(columns)]
        columns = [np.moveaxis(x, 0, setting("scan_output_axes", i)) for i, x in enumerate(columns)]
        return (*state, *columns)


class Mean(OpRun):
    """onnx's does not broadcast the first input."""

    def _run(self, *inputs: np.ndarray) -> Any:
        return (np.asarray(sum(inputs) / len(inputs)),)


class ReduceLogSumExp(OpRun):
    """onnx's fails for a tensor without dimensions."""

    def _run(self, x: np.ndarray, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        given = None if axes is None or len(axes) == 0 else tuple(int(a) for a in axes)
        if given is None and noop_with_empty_axes:
            return (x,)
        largest = x.max(axis=given, keepdims=True)
        y = np.log(np.exp(x - largest).sum(axis=given, keepdims=True)) + largest
        over = tuple(range(x.ndim)) if given is None else given
        return (np.asarray(y if keepdims else np.squeeze(y, over)),)


class LRN(OpRun):
    """onnx's counts the channels of the output along the batch."""

    def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> Any:
        squares = np.zeros_like(x)
        for c in range(x.shape[1]):
            near = slice(max(0, c - (size - 1) // 2), c + -(-(size - 1) // 2) + 1)
            squares[:, c] = (x[:, near] ** 2).sum(1)
        return (x / (np.float64(bias) + np.float64(alpha) / size * squares) ** np.float64(beta),)


class Pad(OpRun):
    """onnx's does not cut, as negative pads do."""

    def _run(
        self, x: np.ndarray, pads: np.ndarray, value: Any = None, axes: Any = None, mode: str = "constant"
    ) -> Any:
        over = [int(a) % x.ndim for a in axes] if axes is not None else list(range(x.ndim))
        widths = [(0, 0)] * x.ndim
        for i, a in enumerate(over):
            widths[a] = int(pads[i]), int(pads[i + len(over)])
        fill = {"constant_values": 0.0 if value is None else float(np.asarray(value).ravel()[0])}
        more = [(max(p, 0), max(q, 0)) for p, q in widths]
        y = np.pad(x, more, mode=mode, **(fill if mode == "constant" else {}))
        return (
            y[tuple(slice(max(-p, 0), d + min(q, 0)) for (p, q), d in zip(widths, y.shape, strict=True))],
        )


class GridSample(OpRun):
    """onnx's works out the coordinates in float32; this is onnxruntime's kernel for float64."""

    def _run(self, *inputs: np.ndarray, **_: Any) -> Any:
        names = ["x", "grid"]
        if not hasattr(self, "_session"):
            node = onnx.NodeProto()
            node.CopyFrom(self.onnx_node)
            node.input[:], node.output[:] = names, ["y"]
            for attribute in node.attribute:
                if attribute.name == "mode":  # as opset 20 says it, which has the kernel
                    attribute.s = attribute.s.replace(b"bilinear", b"linear").replace(b"bicubic", b"cubic")
            model = _one_node(node, dict(zip(names, inputs, strict=True)), 20)
            self._session = onnxruntime.InferenceSession(model.SerializeToString())
        return tuple(self._session.run(None, dict(zip(names, inputs, strict=True))))


class _Pool(OpRun):
    """onnx's fail for some sizes with ceil_mode, dilations and SAME."""

    def _pool(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each window sees, over all outputs; whether that is data; whether it is data or padding."""
        dims, size = x.ndim - 2, x.shape[2:]
        kernel = list(self.kernel_shape)
        strides = list(getattr(self, "strides", None) or [1] * dims)
        dilations = list(getattr(self, "dilations", None) or [1] * dims)
        pads = list(getattr(self, "pads", None) or [0] * 2 * dims)
        auto, ceil = getattr(self, "auto_pad", None) or "NOTSET", getattr(self, "ceil_mode", 0)
        places = []
        for i in range(dims):
            reach = (kernel[i] - 1) * dilations[i] + 1
            before, after = pads[i], pads[i + dims]
            if auto.startswith("SAME"):
                count = -(-size[i] // strides[i])
                total = max(0, (count - 1) * strides[i] + reach - size[i])
                before = total // 2 if auto == "SAME_UPPER" else total - total // 2
                after = total - before
            else:
                if auto == "VALID":
                    before = after = 0
                room = size[i] + before + after - reach
                count = (-(-room // strides[i]) if ceil else room // strides[i]) + 1
                if ceil and (count - 1) * strides[i] >= size[i] + before:
                    count -= 1
            at = np.arange(count)[:, None] * strides[i] + np.arange(kernel[i]) * dilations[i] - before
            places.append((at, (at >= 0) & (at < size[i]), at < size[i] + after))
        shape = tuple(at.shape[0] for at, _, _ in places)
        seen, real, padded = [], [], []
        for offset in np.ndindex(*kernel):
            columns = [at[:, o] for (at, _, _), o in zip(places, offset, strict=True)]
            near = [np.clip(c, 0, d - 1) for c, d in zip(columns, size, strict=True)]
            seen.append(x[(..., *np.ix_(*near))])
            for kind, found in ((1, real), (2, padded)):
                # As numbers: np.ix_ would take truth values for a choice.
                inside = np.ix_(*(p[kind][:, o].astype(int) for p, o in zip(places, offset, strict=True)))
                found.append(np.broadcast_to(math.prod(inside), shape) > 0)
        return np.stack(seen), np.stack(real)[:, None, None], np.stack(padded)[:, None, None]


class MaxPool(_Pool):
    def _run(self, x: np.ndarray, **_: Any) -> Any:
        seen, real, _padded = self._pool(x)
        y = np.where(real, seen, -np.inf).max(0)
        if len(self.onnx_node.output) == 1:
            return (y,)
        positions = np.arange(x.size, dtype=np.float64).reshape(x.shape)
        places, real, _padded = self._pool(positions)
        first = np.where(real, seen, -np.inf).argmax(0)
        return y, np.take_along_axis(places, first[None], 0)[0].astype(np.int64)


class AveragePool(_Pool):
    def _run(self, x: np.ndarray, **_: Any) -> Any:
        seen, real, padded = self._pool(x)
        counted = padded if self.count_include_pad else real
        return (np.where(real, seen, 0).sum(0) / counted.sum(0),)


class LpPool(_Pool):
    def _run(self, x: np.ndarray, **_: Any) -> Any:
        seen, real, _padded = self._pool(x)
        return ((np.where(real, np.abs(seen), 0) ** self.p).sum(0) ** (1 / self.p),)


class DeformConv(OpRun):
    """onnx's samples in float32."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        offset: np.ndarray,
        bias: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        **_: Any,
    ) -> Any:
        # Without strides, pads, dilations and groups.
        n, _c, h, width = x.shape
        kh, kw = w.shape[2:]
        rows, columns = h - kh + 1, width - kw + 1
        places = np.asarray(offset).reshape(n, kh * kw, 2, rows, columns)
        y = np.zeros((n, w.shape[0], rows, columns))
        for b, (k, (i, j)) in itertools.product(range(n), enumerate(np.ndindex(kh, kw))):
            down = places[b, k, 0] + np.arange(rows)[:, None] + i
            across = places[b, k, 1] + np.arange(columns) + j
            top, left = np.floor(down).astype(int), np.floor(across).astype(int)
            seen = 0
            for r, s in ((0, 0), (0, 1), (1, 0), (1, 1)):
                share = np.abs(1 - r - (down - top)) * np.abs(1 - s - (across - left))
                inside = (top + r >= 0) & (top + r < h) & (left + s >= 0) & (left + s < width)
                at = np.clip(top + r, 0, h - 1), np.clip(left + s, 0, width - 1)
                seen = seen + x[b][:, at[0], at[1]] * share * inside
            seen = seen if mask is None else seen * mask[b, k]
            y[b] += np.einsum("mc,chw->mhw", w[:, :, i, j], seen)
        return (y if bias is None else y + bias.reshape(-1, 1, 1),)


OPERATORS: list[type[OpRun]] = [
    Loop,
    DeformConv,
    MaxPool,
    AveragePool,
    LpPool,
    Scan,
    Mean,
    ReduceLogSumExp,
    LRN,
    Pad,
    GridSample,
    Erf,
    Softsign,
    GlobalLpPool,
    GlobalMaxPool,
    MaxUnpool,
    MeanVarianceNormalization,
    GatherElements,
    OneHot,
    ConvTranspose,
    Gelu,
    BiasGelu,
    FastGelu,
    QuickGelu,
    FusedMatMul,
    Inverse,
    SkipLayerNormalization,
    SkipSimplifiedLayerNormalization,
    SimplifiedLayerNormalization,
]


def evaluator(model: onnx.ModelProto) -> ReferenceEvaluator:
    return ReferenceEvaluator(model, new_ops=OPERATORS)


def evaluate_node(node: onnx.NodeProto, arrays: Mapping[str, np.ndarray], opset: int) -> Sequence[np.ndarray]:
    """The outputs of one node; `arrays` holds its inputs, and what its bodies read."""
    with np.errstate(all="ignore"):
        return evaluator(_one_node(node, arrays, opset)).run(None, dict(arrays))


def _one_node(node: onnx.NodeProto, arrays: Mapping[str, np.ndarray], opset: int) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in arrays.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(n) for n in node.output]
    graph = helper.make_graph([node], "node", infos, outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)
