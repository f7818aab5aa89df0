"""ConvGrad against PyTorch's autograd and finite differences of PyTorch's forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import KERNELS, amount, assert_close, directional_derivative, run_node
from support.convolutions import expected, forward, make_feeds, node_for

import ortgrad
from ortgrad.ops.conv import _body
from ortgrad.ops.conv.conv import conv_grad

# X, W, attributes
CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "1d": ([2, 3, 9], [4, 3, 3], {}),
    "1d strided": ([2, 3, 10], [4, 3, 3], {"strides": [2], "pads": [1, 0]}),
    "2d": ([2, 3, 7, 6], [4, 3, 3, 2], {}),
    "2d padded": ([2, 4, 6, 5], [3, 4, 3, 3], {"pads": [1, 1, 1, 1]}),
    "2d asymmetric pads": ([2, 2, 6, 5], [3, 2, 3, 3], {"pads": [0, 2, 1, 0]}),
    "2d strided": ([2, 3, 9, 8], [4, 3, 3, 3], {"strides": [2, 3], "pads": [1, 1, 1, 1]}),
    "2d rows left over": ([1, 2, 8, 8], [2, 2, 3, 3], {"strides": [3, 2]}),
    "2d dilated": ([2, 3, 9, 9], [2, 3, 3, 2], {"dilations": [2, 3], "pads": [1, 2, 3, 0]}),
    "2d strided and dilated": ([1, 2, 11, 10], [3, 2, 3, 3], {"strides": [2, 3], "dilations": [3, 2]}),
    "2d pointwise": ([3, 8, 5, 4], [6, 8, 1, 1], {}),
    "2d pointwise strided": ([2, 4, 6, 7], [3, 4, 1, 1], {"strides": [2, 3]}),
    "2d pointwise padded": ([2, 4, 3, 3], [3, 4, 1, 1], {"pads": [2, 1, 0, 3]}),
    "2d pads beyond the kernel": ([1, 2, 3, 3], [2, 2, 2, 2], {"pads": [3, 4, 5, 2], "strides": [2, 1]}),
    "2d taps that see padding only": ([1, 2, 1, 4], [2, 2, 3, 3], {"pads": [3, 1, 2, 1], "strides": [3, 1]}),
    "2d groups": ([2, 6, 5, 5], [9, 2, 3, 3], {"group": 3, "pads": [1, 1, 1, 1]}),
    "2d depthwise": ([2, 5, 6, 6], [5, 1, 3, 3], {"group": 5, "pads": [1, 1, 1, 1]}),
    "2d depthwise strided, two each": (
        [2, 3, 7, 7],
        [6, 1, 5, 5],
        {"group": 3, "pads": [2] * 4, "strides": [2, 2]},
    ),
    "2d many filters": ([2, 1, 7, 7], [16, 1, 3, 3], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "2d many filters, groups": (
        [2, 2, 7, 6],
        [24, 1, 3, 3],
        {"group": 2, "strides": [2, 1], "dilations": [1, 2]},
    ),
    "2d kernel of the size of X": ([2, 3, 4, 5], [2, 3, 4, 5], {}),
    "3d": ([2, 2, 5, 4, 6], [3, 2, 3, 2, 3], {"pads": [1, 0, 1, 1, 1, 0]}),
    "3d strided, groups": (
        [1, 4, 6, 5, 7],
        [4, 2, 2, 3, 3],
        {"group": 2, "strides": [2, 1, 3], "dilations": [1, 2, 1]},
    ),
    "SAME_UPPER": ([2, 2, 7, 6], [3, 2, 4, 3], {"auto_pad": "SAME_UPPER"}),
    "SAME_LOWER": ([2, 2, 7, 6], [3, 2, 4, 3], {"auto_pad": "SAME_LOWER"}),
    "SAME_UPPER strided": ([2, 2, 7, 6], [3, 2, 4, 3], {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    "SAME_LOWER strided": ([2, 2, 7, 6], [3, 2, 4, 3], {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    "SAME_UPPER pointwise strided": (
        [2, 2, 6, 7],
        [3, 2, 1, 1],
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    ),
    "SAME_UPPER dilated": (
        [1, 2, 9],
        [3, 2, 3],
        {"auto_pad": "SAME_UPPER", "strides": [2], "dilations": [2]},
    ),
    "VALID": ([2, 2, 7, 6], [3, 2, 3, 3], {"auto_pad": "VALID", "strides": [2, 1]}),
    "empty batch": ([0, 4, 6, 5], [6, 2, 3, 3], {"group": 2, "strides": [2, 1], "pads": [1, 1, 1, 1]}),
    "empty batch, SAME_LOWER": ([0, 2, 6], [3, 2, 3], {"auto_pad": "SAME_LOWER", "strides": [2]}),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_float32(case: str, kernels: str) -> None:
    x_shape, w_shape, attributes = CASES[case]
    feeds = make_feeds(x_shape, w_shape, attributes, np.float32)
    result = run_node(node_for(feeds, attributes), feeds, kernels)
    for name, gradient in expected(feeds, attributes).items():
        assert_close(result[name], gradient, 1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_float64_and_finite_differences(case: str, kernels: str) -> None:
    x_shape, w_shape, attributes = CASES[case]
    feeds = make_feeds(x_shape, w_shape, attributes, np.float64)
    result = run_node(node_for(feeds, attributes), feeds, kernels)
    for name, gradient in expected(feeds, attributes).items():
        assert_close(result[name], gradient, 1e-12)
    random = np.random.default_rng(8)
    directions = [random.standard_normal(shape) for shape in (x_shape, w_shape, w_shape[:1])]

    def loss(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> float:
        y = forward(torch.tensor(x), torch.tensor(w), attributes).numpy()
        return float(np.sum(feeds["dY"] * (y + b.reshape(-1, *[1] * (x.ndim - 2)))))

    numeric = directional_derivative(loss, [feeds["X"], feeds["W"], np.zeros(w_shape[0])], directions)
    ours = sum(float(np.sum(result[n] * d)) for n, d in zip(("dX", "dW", "dB"), directions, strict=True))
    assert ours == pytest.approx(numeric, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_body_with_known_shapes(case: str) -> None:
    x_shape, w_shape, attributes = CASES[case]
    feeds = make_feeds(x_shape, w_shape, attributes, np.float32)
    node = ortgrad.nodes.conv_grad("dY", "X", "W", **attributes)
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    result = run_node(node, feeds, "onnx", shapes=shapes)
    for name, gradient in expected(feeds, attributes).items():
        assert_close(result[name], gradient, 1e-5)


# X, W, attributes: more taps than a body is written for one by one.
LARGE: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "1d": ([2, 3, 90], [4, 3, 64], {}),
    "1d filters for spectra": ([1, 1, 4096], [8, 1, 1024], {"strides": [160]}),
    "1d padded, rows left over": ([3, 2, 211], [5, 2, 80], {"strides": [7], "pads": [40, 33]}),
    "1d strided and dilated": ([2, 2, 400], [3, 2, 60], {"strides": [3], "dilations": [5], "pads": [9, 2]}),
    "1d of the size of X": ([2, 3, 2000], [2, 3, 2000], {}),
    "1d groups": ([2, 6, 200], [9, 2, 70], {"group": 3, "strides": [2], "pads": [3, 4]}),
    "1d SAME_UPPER": ([2, 2, 150], [3, 2, 64], {"auto_pad": "SAME_UPPER", "strides": [10]}),
    "1d SAME_LOWER": ([1, 2, 151], [3, 2, 65], {"auto_pad": "SAME_LOWER", "strides": [4], "dilations": [2]}),
    "1d VALID": ([1, 2, 150], [3, 2, 64], {"auto_pad": "VALID", "strides": [4]}),
    "1d empty batch": ([0, 4, 150], [6, 2, 64], {"group": 2, "strides": [4]}),
    "2d patches": ([2, 3, 32, 48], [8, 3, 16, 16], {"strides": [16, 16]}),
    "2d depthwise": ([1, 4, 20, 17], [4, 1, 15, 13], {"group": 4, "pads": [7, 6, 7, 6]}),
    "2d groups, two each": (
        [2, 4, 25, 30],
        [4, 2, 9, 9],
        {"group": 2, "strides": [2, 3], "dilations": [2, 1], "pads": [1, 2, 3, 0]},
    ),
    "2d SAME_LOWER": ([2, 2, 21, 20], [3, 2, 8, 11], {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    "2d one long axis": ([2, 2, 3, 200], [3, 2, 1, 128], {"strides": [2, 5], "pads": [0, 64, 1, 0]}),
    "2d empty batch": ([0, 4, 16, 15], [6, 2, 9, 9], {"group": 2, "strides": [2, 1], "pads": [1, 1, 1, 1]}),
    "3d": ([2, 2, 9, 8, 10], [3, 2, 4, 4, 5], {"pads": [1, 0, 1, 1, 1, 0]}),
    "3d strided, groups": (
        [1, 4, 12, 13, 14],
        [4, 2, 5, 3, 4],
        {"group": 2, "strides": [2, 1, 3], "dilations": [1, 2, 1]},
    ),
}


@pytest.mark.parametrize(("kernels", "known"), [("python", False), ("onnx", False), ("auto", True)])
@pytest.mark.parametrize("case", LARGE)
def test_large_kernels(case: str, kernels: str, known: bool) -> None:
    x_shape, w_shape, attributes = LARGE[case]
    feeds = make_feeds(x_shape, w_shape, attributes, np.float64)
    gradients = expected(feeds, attributes)
    shapes = {name: list(array.shape) for name, array in feeds.items()} if known else None
    for dtype, tolerance in (("float32", 2e-5), ("float64", 1e-12)):
        cast = {name: array.astype(dtype) for name, array in feeds.items()}
        result = run_node(node_for(cast, attributes), cast, kernels, shapes=shapes)
        for name, gradient in gradients.items():
            assert_close(result[name], gradient.astype(dtype), tolerance)


# X, W, attributes, and the form of dW where all sizes are known: a function of _body.
FORMS: dict[str, tuple[list[int], list[int], dict[str, Any], str]] = {
    "taps one by one": ([2, 17, 6, 7], [12, 17, 3, 3], {"pads": [1] * 4}, "_dw_of_rows"),
    "taps one by one, strided": ([2, 16, 9, 8], [18, 16, 3, 2], {"strides": [2, 2]}, "_dw_of_rows"),
    "taps at once, few positions": ([2, 17, 3, 4], [30, 17, 3, 2], {"pads": [1, 0, 1, 1]}, "_dw_of_rows"),
    "taps at once, few channels": ([1, 3, 6, 5], [4, 3, 3, 3], {"pads": [1] * 4}, "_dw_of_rows"),
    "one sample": ([1, 20, 9, 9], [3, 20, 2, 2], {"strides": [3, 1]}, "_dw_of_rows"),
    "pointwise, few positions": ([3, 16, 2, 2], [20, 16, 1, 1], {}, "_dw_of_rows"),
    "pointwise": ([3, 16, 6, 5], [4, 16, 1, 1], {}, "_dw_of_samples"),
    "pointwise strided": ([2, 16, 9, 9], [4, 16, 1, 1], {"strides": [2, 1]}, "_dw_of_samples"),
    "many positions": ([2, 16, 9, 40], [2, 16, 3, 1], {}, "_dw_of_samples"),
    "many positions, few channels": ([2, 3, 9, 40], [4, 3, 3, 2], {}, "_dw_of_samples"),
    "groups": ([2, 32, 4, 4], [6, 16, 3, 3], {"group": 2, "pads": [1] * 4}, "_dw_of_samples"),
    "depthwise": ([2, 18, 6, 5], [18, 1, 3, 3], {"group": 18, "strides": [2, 1]}, "_dw_of_channels"),
    "depthwise, 3d": ([2, 3, 4, 5, 6], [3, 1, 1, 2, 3], {"group": 3}, "_dw_of_channels"),
    "depthwise, two each": ([2, 3, 6, 5], [6, 1, 3, 3], {"group": 3}, "_dw_of_samples"),
}
# Which axes of dY and X, and of W, have a known size.
KNOWLEDGE = {
    "all": ("NCS", "MC"),
    "weights": ("", "MC"),
    "batch": ("N", ""),
    "all but the batch": ("CS", "MC"),
}
KNOWLEDGE |= {"no positions": ("NC", "MC"), "no weights": ("NS", ""), "nothing": ("", "")}


@pytest.mark.parametrize(
    ("knowledge", "empty"),
    [*((k, False) for k in KNOWLEDGE), ("all", True), ("weights", True), ("nothing", True)],
)
@pytest.mark.parametrize("case", FORMS)
def test_forms_of_the_body(case: str, knowledge: str, empty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x_shape, w_shape, attributes, form = FORMS[case]
    x_shape = [0, *x_shape[1:]] if empty else x_shape
    used = set()
    for name in ("_dw_of_rows", "_dw_of_samples", "_dw_of_channels"):
        function = getattr(_body, name)
        monkeypatch.setattr(_body, name, lambda *a, n=name, f=function: used.add(n) or f(*a))
    feeds = make_feeds(x_shape, w_shape, attributes, np.float32)
    data, weights = KNOWLEDGE[knowledge]
    shapes = {
        name: [
            size if (axes[i] if i < 2 else axes[2]) in known else f"{name}{i}"
            for i, size in enumerate(feeds[name].shape)
        ]
        for name, axes, known in (("dY", "NCS", data), ("X", "NCS", data), ("W", "MC-", weights + "-"))
    }
    result = run_node(node_for(feeds, attributes), feeds, "onnx", shapes=shapes, fresh=True)
    for name, gradient in expected(feeds, attributes).items():
        assert_close(result[name], gradient, 1e-5)
    if knowledge == "all" and not empty:
        assert used == {form}


@pytest.mark.parametrize("case", CASES)
def test_bodies_for_many_taps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of the body that large kernels have, for kernels of any size."""
    monkeypatch.setattr(_body, "_MANY_TAPS", 0)
    x_shape, w_shape, attributes = CASES[case]
    feeds = make_feeds(x_shape, w_shape, attributes, np.float64)
    gradients = expected(feeds, attributes)
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-12)):
        cast = {name: array.astype(dtype) for name, array in feeds.items()}
        result = run_node(node_for(cast, attributes), cast, "onnx", fresh=True)
        for name, gradient in gradients.items():
            assert_close(result[name], gradient.astype(dtype), tolerance)


def test_four_spatial_dimensions() -> None:
    """Of a kernel with many taps, against sums written out; PyTorch has no such convolution."""
    random = np.random.default_rng(3)
    x, w = random.standard_normal((2, 2, 5, 4, 4, 6)), random.standard_normal((3, 2, 3, 3, 3, 3))
    dy = random.standard_normal((2, 3, 2, 2, 2, 2))
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for o in np.ndindex(2, 2, 2, 2):
        window = (
            slice(None),
            slice(None),
            *(slice(a * s, a * s + 3) for a, s in zip(o, (2, 1, 1, 3), strict=True)),
        )
        out = dy[(slice(None), slice(None), *o)]
        dw += np.einsum("nm,ncabde->mcabde", out, x[window])
        dx[window] += np.einsum("nm,mcabde->ncabde", out, w)
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-12)):
        feeds = {name: a.astype(dtype) for name, a in (("dY", dy), ("X", x), ("W", w))}
        result = run_node(node_for(feeds, {"strides": [2, 1, 1, 3]}), feeds, "onnx")
        assert_close(result["dW"], dw.astype(dtype), tolerance)
        assert_close(result["dX"], dx.astype(dtype), tolerance)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("outputs", [["dX"], ["", "dW"], ["", "", "dB"], ["dX", "", "dB"], ["", "dW", "dB"]])
@pytest.mark.parametrize("case", ["2d strided", "2d many filters", "2d pointwise"])
def test_only_what_is_wanted(case: str, outputs: list[str], kernels: str) -> None:
    x_shape, w_shape, attributes = CASES[case]
    feeds = make_feeds(x_shape, w_shape, attributes, np.float32)
    result = run_node(node_for(feeds, attributes, outputs), feeds, kernels)
    assert sorted(result) == sorted(filter(None, outputs))
    for name, gradient in expected(feeds, attributes).items():
        if name in result:
            assert_close(result[name], gradient, 1e-5)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[list[int], list[int], dict[str, Any]]:
    rank = draw(st.integers(1, 3))

    def numbers(low: int, high: int, count: int = rank) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    group, kernel, dilations = draw(st.integers(1, 3)), numbers(1, 3), numbers(1, 2)
    attributes: dict[str, Any] = {"group": group, "dilations": dilations, "strides": numbers(1, 3)}
    sizes = numbers(1, 7)
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    auto_pad = draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto_pad == "NOTSET":
        attributes["pads"] = pads = numbers(0, 3, 2 * rank)
        room = [pads[i] + pads[rank + i] for i in range(rank)]
    else:
        attributes["auto_pad"] = auto_pad
        room = [0] * rank
    if auto_pad.startswith("SAME"):
        attributes["strides"] = [min(s, e + 1) for s, e in zip(attributes["strides"], extents, strict=True)]
    else:
        sizes = [max(n, e - r) for n, e, r in zip(sizes, extents, room, strict=True)]
    channels, filters = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    return (
        [draw(st.integers(1, 2)), group * channels, *sizes],
        [group * filters, channels, *kernel],
        attributes,
    )


@settings(max_examples=amount(20, 400), deadline=None, derandomize=True)
@given(convolutions())
def test_any_convolution(case: tuple[list[int], list[int], dict[str, Any]]) -> None:
    x_shape, w_shape, attributes = case
    feeds = make_feeds(x_shape, w_shape, attributes, np.float64)
    gradients = expected(feeds, attributes)
    for kernels in KERNELS:
        result = run_node(node_for(feeds, attributes), feeds, kernels)
        for name, gradient in gradients.items():
            assert_close(result[name], gradient, 1e-12)


@pytest.mark.parametrize(
    "case", ["1d strided", "2d padded", "2d groups", "3d", "SAME_LOWER strided", "empty batch"]
)
def test_float16_body(case: str) -> None:
    x_shape, w_shape, attributes = CASES[case]
    feeds = make_feeds(x_shape, w_shape, attributes, np.float16)
    result = run_node(node_for(feeds, attributes), feeds, "onnx")
    for name, gradient in expected(feeds, attributes).items():
        assert_close(result[name], gradient, 5e-3)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_padding_is_that_of_onnxruntime(kernel: int, auto_pad: str, kernels: str) -> None:
    """Conv is linear: with the dX of each output by itself, sum(dX * X) gives Y back. Any size runs."""
    attributes = {"auto_pad": auto_pad, "strides": [2]}
    node = ortgrad.nodes.conv_grad("dY", "X", "W", ["dX"], kernel_shape=[kernel], **attributes)
    shapes = {name: [None] * 3 for name in ("dY", "X", "W")}
    session = ortgrad.InferenceSession(ortgrad.nodes.make_model(node, shapes=shapes), kernels=kernels)
    w = np.ones((1, 1, kernel), np.float32)
    for size in range(3, 8):
        x = np.arange(1, size + 1, dtype=np.float32).reshape(1, 1, size)
        y = conv_of_onnxruntime(x, w, attributes)
        one_each = np.eye(y.size, dtype=np.float32)[:, None, :]
        dx = session.run(None, {"dY": one_each, "X": np.repeat(x, y.size, axis=0), "W": w})[0]
        np.testing.assert_array_equal((dx * x).sum(axis=(1, 2)), y.reshape(-1))


def conv_of_onnxruntime(x: np.ndarray, w: np.ndarray, attributes: Mapping[str, Any]) -> np.ndarray:
    import onnxruntime
    from onnx import TensorProto, helper

    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("X", "W", "Y")]
    graph = helper.make_graph(
        [helper.make_node("Conv", ["X", "W"], ["Y"], **attributes)], "conv", infos[:2], infos[2:]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"X": x, "W": w})[0]


BAD = {
    "rank": ({"X": [1, 2, 5]}, {}, r"must be dY \[N, 1\*M, Y0, \*Y\]"),
    "no spatial dimension": (
        {"X": [1, 2], "W": [2, 2], "dY": [1, 2]},
        {},
        r"must be dY \[N, 1\*M, Y0, \*Y\]",
    ),
    "kernel_shape": ({}, {"kernel_shape": [3, 2]}, r"W \[2, 2, 3, 3\] does not fit .*kernel_shape=\[3, 2\]"),
    "channels": ({"X": [1, 3, 5, 5]}, {}, r"W \[2, 2, 3, 3\] does not fit with .*X \[1, 3, 5, 5\]"),
    "group": ({"X": [1, 6, 5, 5]}, {"group": 3}, "does not fit .*group=3"),
    "dY": ({"dY": [1, 2, 3, 4]}, {}, r"dY has shape \[1, 2, 3, 4\], but Conv .* gives \[1, 2, 3, 3\]"),
    "batch of dY": ({"dY": [2, 2, 3, 3]}, {}, r"does not fit with dY \[2, 2, 3, 3\]"),
    "strides": ({}, {"strides": [1]}, r"strides \[1\] must have one number"),
    "zero stride": ({}, {"strides": [0, 1]}, r"strides \[0, 1\] must be positive"),
    "dilations": ({}, {"dilations": [1, -1]}, "must be positive"),
    "pads": ({}, {"pads": [1, 1]}, r"pads \[1, 1\] must have two numbers"),
    "negative pads": ({}, {"pads": [-1, 0, 0, 0]}, "must not be negative"),
    "kernel too large": ({"X": [1, 2, 2, 5]}, {}, "does not fit"),
    "gaps": (
        {"X": [1, 2, 8, 8], "W": [2, 2, 1, 1]},
        {"auto_pad": "SAME_UPPER", "strides": [4, 4]},
        "leaves gaps",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    changed, attributes, text = BAD[case]
    shapes = {"dY": [1, 2, 3, 3], "X": [1, 2, 5, 5], "W": [2, 2, 3, 3]} | changed
    good = {"dY": [1, 2, 3, 3], "X": [1, 2, 5, 5], "W": [2, 2, 3, 3]}
    arrays = [np.ones(shape, np.float32) for shape in shapes.values()]
    with pytest.raises(ValueError, match=text):
        conv_grad(*arrays, **attributes)
    assert conv_grad(*(np.ones(s, np.float32) for s in good.values()))[0].shape == (1, 2, 5, 5)


def test_bad_input_in_a_session() -> None:
    good = make_feeds([1, 2, 5, 5], [2, 2, 3, 3], {}, np.float32)
    shapes = {name: [None] * array.ndim for name, array in good.items()}
    node = ortgrad.nodes.conv_grad("dY", "X", "W", kernel_shape=[3, 3], name="conv1")
    session = ortgrad.InferenceSession(ortgrad.nodes.make_model(node, shapes=shapes), kernels="python")
    with pytest.raises(ortgrad.KernelError, match=r"conv1.*dY has shape \[1, 2, 3, 4\]"):
        session.run(None, good | {"dY": np.ones((1, 2, 3, 4), np.float32)})
    gradients = expected(good, {})
    for output, value in zip(session.get_outputs(), session.run(None, good), strict=True):
        assert_close(value, gradients[output.name], 1e-5)


@pytest.mark.parametrize(
    ("shapes", "attributes", "text"),
    [
        ({"W": ["M", "C", "h", "w"]}, {}, "kernel size is not known"),
        ({"X": ["N", "C", "H"], "W": [2, 2, 3, 3]}, {}, "X has 3 dimensions"),
        ({"W": [2, 2, 3, 3]}, {"strides": [1]}, "must have one number"),
        ({"W": [2, 2, 1, 1]}, {"auto_pad": "SAME_LOWER", "strides": [4, 4]}, "may leave gaps"),
    ],
)
def test_bad_body(shapes: dict[str, list[Any]], attributes: dict[str, Any], text: str) -> None:
    node = ortgrad.nodes.conv_grad("dY", "X", "W", **attributes)
    with pytest.raises(ortgrad.OrtgradError, match=text):
        ortgrad.nodes.make_model(node, shapes=shapes, kernels="onnx")
