"""Small convolutions share their columns with the gradient towards the weights, in sessions without compiled
kernels; against PyTorch and the definition, both in float64.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import ortgrad
from ortgrad.pipelines.prepare import prepare_loaded

Shape = tuple[int, ...]
# X, W, attributes
SHARED: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "1d": ((3, 16, 9), (6, 16, 3), {"pads": [1, 0]}),
    "2d": ((2, 16, 5, 6), (24, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "2d-all": (
        (2, 17, 9, 8),
        (12, 17, 3, 2),
        {"pads": [1, 0, 2, 1], "strides": [2, 3], "dilations": [2, 1]},
    ),
    "3d": ((2, 16, 3, 4, 3), (6, 16, 2, 2, 3), {"pads": [0, 1, 0, 1, 0, 1], "strides": [1, 2, 1]}),
    "row": ((2, 16, 5, 6), (20, 16, 1, 3), {}),
    "batch of one": ((1, 16, 6, 6), (8, 16, 3, 3), {}),
    "stride beyond the kernel": ((2, 16, 8, 8), (6, 16, 2, 2), {"strides": [3, 4]}),
    "same upper": ((2, 16, 6, 5), (15, 16, 3, 2), {"auto_pad": "SAME_UPPER", "strides": [2, 1]}),
    "few positions": ((4, 16, 2, 2), (40, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "few positions, strided": ((8, 20, 5, 6), (70, 20, 3, 2), {"pads": [1, 0, 1, 1], "strides": [2, 2]}),
    "same lower": ((2, 16, 6, 5), (15, 16, 3, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
}
OWN: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "few channels": ((2, 3, 6, 7), (8, 3, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "few channels, large kernel": ((2, 3, 16, 15), (8, 3, 7, 5), {"strides": [2, 3], "dilations": [1, 2]}),
    "one position": ((2, 16, 3, 3), (16, 16, 3, 3), {}),
    "few positions, few samples": ((2, 16, 2, 2), (40, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "many filters": ((2, 16, 4, 4), (40, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "groups": ((2, 32, 5, 5), (32, 16, 3, 3), {"group": 2}),
    "pointwise": ((2, 16, 5, 5), (16, 16, 1, 1), {}),
    "many columns": ((2, 16, 70, 70), (16, 16, 3, 3), {}),
}
# The gradients are computed from columns of dY.
TURNED: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "turned, 1d": ((3, 64, 9), (6, 64, 3), {"pads": [2, 0]}),
    "turned, 2d": ((2, 64, 5, 6), (8, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
    "turned, 2d-all": ((2, 65, 7, 6), (20, 65, 3, 2), {"pads": [1, 0, 2, 1], "dilations": [2, 1]}),
    "turned, 3d": ((2, 64, 3, 4, 3), (6, 64, 2, 1, 3), {"pads": [0, 1, 0, 1, 0, 2]}),
    "turned, padding beyond the kernel": ((1, 64, 4, 4), (12, 64, 1, 3), {"pads": [1, 3, 2, 0]}),
    "turned, few rows": ((2, 64, 4, 4), (64, 64, 3, 3), {"pads": [1, 1, 1, 1]}),
    "turned, same": ((2, 64, 6, 5), (15, 64, 3, 2), {"auto_pad": "SAME_LOWER", "strides": [1, 1]}),
}
CASES = SHARED | OWN | TURNED


def forward(
    x: Shape, w: Shape, attributes: dict[str, Any], *, bias: bool, batch: int | str
) -> onnx.ModelProto:
    """y = Tanh(Conv(Tanh(x), w, b)), so that the gradient of the convolution's input is needed."""
    shapes: dict[str, Any] = {"x": [batch, *x[1:]], "w": w, "b": w[:1]}
    names = ["x", "w", "b"] if bias else ["x", "w"]
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"]),
        helper.make_node("Conv", ["t", *names[1:]], ["c"], **attributes),
        helper.make_node("Tanh", ["c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, shapes[n]) for n in names],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(x))],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def pads_of(x: Shape, w: Shape, attributes: dict[str, Any]) -> list[tuple[int, int]]:
    rank = len(x) - 2
    given, auto_pad = attributes.get("pads", [0] * 2 * rank), attributes.get("auto_pad")
    if not auto_pad:
        return list(zip(given[:rank], given[rank:], strict=True))
    result = []
    for size, kernel, stride in zip(x[2:], w[2:], attributes["strides"], strict=True):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        small, large = total // 2, total - total // 2
        result.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    return result


def conv_by_torch(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, attributes: dict[str, Any]
) -> torch.Tensor:
    rank = x.ndim - 2
    around = [n for pair in reversed(pads_of(x.shape, w.shape, attributes)) for n in pair]
    return (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1](
        torch.nn.functional.pad(x, around),
        w,
        b,
        stride=attributes.get("strides", [1] * rank),
        dilation=attributes.get("dilations", [1] * rank),
        groups=attributes.get("group", 1),
    )


def by_torch(feeds: dict[str, np.ndarray], seed: np.ndarray, attributes: dict[str, Any]) -> list[np.ndarray]:
    """y and the gradients, by PyTorch's convolution of the padded x."""
    given = {n: torch.tensor(a.astype(np.float64), requires_grad=True) for n, a in feeds.items()}
    y = torch.tanh(conv_by_torch(torch.tanh(given["x"]), given["w"], given.get("b"), attributes))
    gradients = torch.autograd.grad(y, list(given.values()), torch.tensor(seed.astype(np.float64)))
    return [y.detach().numpy(), *(g.numpy() for g in gradients)]


def convolved(feeds: dict[str, np.ndarray], attributes: dict[str, Any]) -> np.ndarray:
    """y by the definition: for each tap of the kernel, what it reads times its weights."""
    x, w = np.tanh(feeds["x"].astype(np.float64)), feeds["w"].astype(np.float64)
    rank, group = x.ndim - 2, attributes.get("group", 1)
    strides, dilations = (attributes.get(n, [1] * rank) for n in ("strides", "dilations"))
    x = np.pad(x, [(0, 0), (0, 0), *pads_of(x.shape, w.shape, attributes)])
    extents = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    counts = [(n - e) // s + 1 for n, e, s in zip(x.shape[2:], extents, strides, strict=True)]
    y = np.zeros((len(x), len(w), *counts))
    for tap in np.ndindex(w.shape[2:]):
        steps = zip(tap, dilations, counts, strides, strict=True)
        read = x[(..., *(slice(k * d, k * d + (n - 1) * s + 1, s) for (k, d, n, s) in steps))]
        read = read.reshape(len(x), group, -1, *counts)
        weights = w[(..., *tap)].reshape(group, -1, w.shape[1])
        y += np.einsum("gmc,ngc...->ngm...", weights, read).reshape(y.shape)
    if "b" in feeds:
        y += feeds["b"].reshape(-1, *[1] * rank)
    return np.tanh(y)


def feeds_of(x: Shape, w: Shape, *, bias: bool) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = {"x": x, "w": w, "b": w[:1]} if bias else {"x": x, "w": w}
    return {name: generator.standard_normal(shape, dtype=np.float32) * 0.3 for name, shape in shapes.items()}


def operators(model: onnx.ModelProto, kernels: str = "onnx") -> Counter[str]:
    return Counter(node.op_type for node in prepare_loaded(model, kernels, bodies=False).graph.node)


@pytest.mark.parametrize("batch", ["known", "N"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, bias: bool, batch: str) -> None:
    x, w, attributes = CASES[name]
    model = forward(x, w, attributes, bias=bias, batch=x[0] if batch == "known" else batch)
    feeds = feeds_of(x, w, bias=bias)
    built = ortgrad.build_gradient_model(model, wrt=list(feeds))
    y = convolved(feeds, attributes)
    seed = np.random.default_rng(1).standard_normal(y.shape, dtype=np.float32)
    session = ortgrad.InferenceSession(built, kernels="onnx")
    results = session.run(["y", *(f"{n}_grad" for n in feeds)], {**feeds, "y_grad": seed})
    np.testing.assert_allclose(results[0], y, rtol=1e-4, atol=1e-5)
    for actual, expected in zip(results, by_torch(feeds, seed, attributes), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", SHARED | OWN)
def test_which_share(name: str) -> None:
    x, w, attributes = CASES[name]
    built = ortgrad.build_gradient_model(
        forward(x, w, attributes, bias=True, batch=x[0]), wrt=["x", "w", "b"]
    )
    prepared = operators(built)
    # The gradient towards X of a pointwise convolution is a Conv, too.
    assert prepared["Conv"] == (0 if name in SHARED else 2 if name == "pointwise" else 1)
    if name in SHARED:
        # Two sort W and dW, or none does.
        assert prepared["Gather"] in (1, 3)
    # The kernels of ConvGrad make their own columns.
    assert operators(built, "python")["Conv"] == 1


@pytest.mark.parametrize("name", TURNED)
def test_columns_of_dy_are_shared(name: str) -> None:
    x, w, attributes = TURNED[name]
    built = ortgrad.build_gradient_model(
        forward(x, w, attributes, bias=True, batch=x[0]), wrt=["x", "w", "b"]
    )
    prepared = operators(built)
    assert prepared["ConvTranspose"] == prepared["Col2Im"] == 0
    # Of dY; and of X with W, where the convolution is a product, too.
    assert prepared["Gather"] == (1 if prepared["Conv"] else 3)


def test_only_with_the_gradient_of_the_weights() -> None:
    x, w, attributes = SHARED["2d"]
    built = ortgrad.build_gradient_model(forward(x, w, attributes, bias=True, batch=2), wrt=["x", "b"])
    assert operators(built)["Conv"] == 1


def test_kernel_of_unknown_size() -> None:
    x, w, attributes = SHARED["2d"]
    model = forward(x, w, attributes, bias=True, batch=2)
    for dimension in model.graph.input[1].type.tensor_type.shape.dim[2:]:
        dimension.dim_param = "K"
    built = ortgrad.build_gradient_model(model, wrt=["w", "b"])
    assert operators(built)["Conv"] == 2  # The gradient towards W is one, too.


def test_two_convolutions_of_one_tensor() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[2,16,6,6] x, float[8,16,3,3] v, float[8,16,3,3] w)
        => (float[2,8,4,4] y, float[2,8,4,4] b) {
            a = Conv(x, v) b = Conv(x, w) y = Mul(a, b) }"""
    built = ortgrad.build_gradient_model(onnx.parser.parse_model(text), wrt=["v", "w"], of=["y"])
    counts = operators(built)
    # The columns of x, and what sorts both weights and their gradients.
    assert (counts["Conv"], counts["Gather"]) == (0, 1 + 4)
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.standard_normal(shape, dtype=np.float32)
        for name, shape in {"x": (2, 16, 6, 6), "v": (8, 16, 3, 3), "w": (8, 16, 3, 3)}.items()
    }
    seed = generator.standard_normal((2, 8, 4, 4), dtype=np.float32)
    session = ortgrad.InferenceSession(built, kernels="onnx")
    actual = session.run(["b", "v_grad", "w_grad"], {**arrays, "y_grad": seed})
    x, v, w = (torch.tensor(array.astype(np.float64), requires_grad=True) for array in arrays.values())
    a, b = torch.conv2d(x, v), torch.conv2d(x, w)
    expected = [b, *torch.autograd.grad(a * b, (v, w), torch.tensor(seed.astype(np.float64)))]
    for value, reference in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, reference.detach().numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float16, 5e-3)])
@pytest.mark.parametrize("name", [name for name in CASES if name != "many columns"])
def test_gradient_of_other_types(name: str, dtype: type, tolerance: float) -> None:
    x_shape, w_shape, attributes = CASES[name]
    feeds = {n: array.astype(dtype) for n, array in feeds_of(x_shape, w_shape, bias=False).items()}
    x, w = (torch.tensor(array.astype(np.float64), requires_grad=True) for array in feeds.values())
    y = conv_by_torch(x, w, None, attributes)
    feeds = {"dy": np.random.default_rng(1).standard_normal(y.shape).astype(dtype), **feeds}
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node(
        "ConvGrad",
        ["dy", "x", "w"],
        ["dx", "dw"],
        domain="com.microsoft",
        kernel_shape=w_shape[2:],
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, element, array.shape) for n, array in feeds.items()],
        [helper.make_tensor_value_info(n, element, None) for n in ("dx", "dw")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    actual = ortgrad.InferenceSession(model, kernels="onnx").run(None, feeds)
    expected = torch.autograd.grad(y, (x, w), torch.tensor(feeds["dy"].astype(np.float64)))
    for value, reference in zip(actual, expected, strict=True):
        assert np.abs(value - reference.numpy()).max() <= tolerance * reference.abs().max()
