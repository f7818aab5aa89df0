"""Pools of the sizes that onnxruntime computes.

With ceil_mode, onnx infers one window too many. Without it, an input that is smaller than a window by less
than a stride has one window, which is cut off.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from support.node_tests import ORT_ERRORS
from support.sessions import make_session

import ortgrad
from ortgrad.shapes.inference import infer_types

# Kernel, stride, head and tail padding, dilation.
WINDOWS = [
    (2, 3, 0, 0, 1),
    (1, 3, 0, 0, 1),
    (2, 2, 1, 1, 1),
    (2, 4, 0, 1, 1),
    (3, 4, 2, 1, 1),
    (3, 2, 0, 2, 2),
    (2, 3, 1, 0, 2),
    (3, 3, 1, 1, 1),
]


def model(
    nodes: list[onnx.NodeProto], shape: list[int | str], output: str = "y", opset: int = 21
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def pool(op_type: str, x: str, y: str, axes: list[tuple[int, ...]], **more: Any) -> onnx.NodeProto:
    kernel, strides, heads, tails, dilations = zip(*axes, strict=True)
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
    if "auto_pad" not in more:
        attributes["pads"] = [*heads, *tails]
    return helper.make_node(op_type, [x], [y], **attributes, ceil_mode=1, **more)


def forward(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray | None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        (y,) = session.run(None, {"x": x})
    except ORT_ERRORS:
        return None
    return y


@pytest.mark.parametrize("opset", [18, 22])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
def test_inferred_sizes(op_type: str, opset: int) -> None:
    """Of all windows along one axis that onnxruntime runs, and that do see something."""
    wrong = compared = 0
    dilations = (1,) if op_type == "AveragePool" and opset < 19 else (1, 2)
    for n, k, s, auto_pad, d in itertools.product(
        range(1, 7), (1, 2, 3), (1, 2, 3, 4), (None, "VALID", "SAME_UPPER", "SAME_LOWER"), dilations
    ):
        if auto_pad is not None and auto_pad.startswith("SAME") and d > 1:
            continue  # onnxruntime takes no account of dilations there, and the gradient is refused
        for head, tail in itertools.product(range(k), range(k)) if auto_pad is None else [(0, 0)]:
            more = {} if auto_pad is None else {"auto_pad": auto_pad}
            axis = (k, s, head, tail, d)
            node = pool(op_type, "x", "y", [axis], **more)
            if d == 1:
                del node.attribute[[a.name for a in node.attribute].index("dilations")]
            proto = model([node], [1, 1, n], opset=opset)
            y = forward(proto, np.ones((1, 1, n), np.float32))
            if y is None or not y.size:
                continue
            read = ir.from_proto(proto)
            infer_types(read)
            assert read.graph.outputs[0].shape == ir.Shape(y.shape), (n, axis, auto_pad)
            plain = onnx.shape_inference.infer_shapes(proto).graph.output[0].type.tensor_type.shape
            wrong += plain.dim[2].dim_value != y.shape[2]
            compared += 1
    assert compared > 200
    # That is why there is something to do; later opsets say it right.
    assert wrong > 0 or opset == 22


def torch_pool(op_type: str, x: torch.Tensor, axes: list[tuple[int, ...]]) -> torch.Tensor:
    """The windows one by one, of the sizes that ONNX and PyTorch say: none begins behind the input."""
    for i, (k, s, head, tail, d) in enumerate(axes):
        x = x.movedim(2 + i, -1)
        n, extent = x.shape[-1], (k - 1) * d + 1
        starts = range(0, max(0, n + head + tail - extent + s), s)
        starts = [a - head for a in starts if a < n + head]
        seen = [[p for p in range(a, a + extent, d) if 0 <= p < n] for a in starts]
        assert op_type == "MaxPool" or all(seen)
        x = torch.stack(
            [x[..., p].amax(-1) if op_type == "MaxPool" else x[..., p].mean(-1) for p in seen], -1
        )
        x = x.movedim(-1, 2 + i)
    return x


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("rank", [1, 2])
def test_gradients(op_type: str, rank: int, symbolic: bool) -> None:
    compared = 0
    for number, (window, n) in enumerate(itertools.product(WINDOWS, (3, 4, 5, 7))):
        axes = [window, WINDOWS[(number + 3) % len(WINDOWS)]][:rank]
        shape = [2, 2, n, n + 1][: 2 + rank]
        x = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
        proto = model(
            [pool(op_type, "x", "y", axes)], ["N", "C", "H", "W"][: 2 + rank] if symbolic else shape
        )
        y = forward(proto, x)
        if y is None or not y.size:
            continue
        leaf = torch.tensor(x, requires_grad=True)
        expected = torch_pool(op_type, leaf, axes)
        np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
        seed = np.random.default_rng(9).standard_normal(y.shape).astype(np.float32)
        expected.backward(torch.tensor(seed))
        built = ortgrad.build_gradient_model(proto, wrt=["x"], of=["y"])
        if not symbolic:
            (seeded,) = [v.type.tensor_type.shape for v in built.graph.input if v.name == "y_grad"]
            assert tuple(dim.dim_value for dim in seeded.dim) == y.shape
        ways = ("python", "onnx", "plain", "auto")
        for way in ways if number % 4 == 0 else (ways[number % 4],):
            (dx,) = make_session(built, way, "all").run(["x_grad"], {"x": x, "y_grad": seed})
            np.testing.assert_allclose(dx, leaf.grad, rtol=1e-5, atol=1e-6, err_msg=f"{axes}, {n}, {way}")
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("way", ["python", "onnx", "plain", "auto"])
def test_what_follows_from_the_size(way: str) -> None:
    """A second pool, whose input has a size that onnx infers wrong, and a mean over what it puts out."""
    nodes = [
        pool("AveragePool", "x", "p", [(2, 3, 0, 0, 1)]),
        pool("MaxPool", "p", "q", [(2, 3, 0, 0, 1)]),
        helper.make_node("ReduceMean", ["q"], ["m"], keepdims=0),
        helper.make_node("Mul", ["p", "m"], ["z"]),
    ]
    proto = model(nodes, [1, 2, 27], "z")
    x = np.random.default_rng(0).standard_normal((1, 2, 27)).astype(np.float32)
    y = forward(proto, x)
    assert y is not None
    leaf = torch.tensor(x, requires_grad=True)
    p = torch_pool("AveragePool", leaf, [(2, 3, 0, 0, 1)])
    expected = p * torch_pool("MaxPool", p, [(2, 3, 0, 0, 1)]).mean()
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    expected.sum().backward()
    built = ortgrad.build_gradient_model(proto, wrt=["x"], of=["z"])
    (dx,) = make_session(built, way, "all").run(["x_grad"], {"x": x, "z_grad": np.ones_like(y)})
    np.testing.assert_allclose(dx, leaf.grad, rtol=1e-5, atol=1e-6)


def torch_cut_off(kind: str, x: torch.Tensor, axes: list[tuple[int, ...]]) -> torch.Tensor:
    """Pools of inputs with exactly one window per axis, which begins in the head padding or at 0."""
    for i, (k, _, head, tail, d) in enumerate(axes):
        x = x.movedim(2 + i, -1)
        size, places = x.shape[-1], range(-head, -head + k * d, d)
        x = x[..., [p for p in places if 0 <= p < size]]
        counts = {
            "AveragePool": x.shape[-1],
            "with pads": len([p for p in places if p < size + tail]),
            "with pads, opset 18": k,
        }
        if kind == "MaxPool":
            x = x.amax(-1, keepdim=True)
        elif kind == "LpPool":
            x = x.square().sum(-1, keepdim=True).sqrt()
        else:
            x = x.sum(-1, keepdim=True) / counts[kind]
        x = x.movedim(-1, 2 + i)
    return x


# Sizes and windows that are larger by less than a stride, but see something.
SMALL = [
    (n, (k, s, head, tail, d))
    for n, k, s, head, tail, d in itertools.product((1, 2, 3), (2, 3, 4), (2, 3, 4), (0, 1), (0, 1), (1, 2))
    if -s < n + head + tail - (k - 1) * d - 1 < 0 and any(0 <= p < n for p in range(-head, k * d - head, d))
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "with pads", "with pads, opset 18", "LpPool"])
def test_inputs_smaller_than_a_window(kind: str, symbolic: bool) -> None:
    """Such as images that are too low for a network that reads text, which runs all the same."""
    op_type = kind if kind.endswith("Pool") else "AveragePool"
    opset = 18 if kind.endswith("18") else 21
    compared = 0
    cases = [(n, axis) for n, axis in SMALL if opset > 18 or axis[4] == 1]
    for number in range(16):
        (n, high), (m, wide) = cases[number * 5 % len(cases)], cases[(number * 11 + 1) % len(cases)]
        axes, shape = [high, wide], [1, 2, n, m]
        node = pool(op_type, "x", "y", axes, **({"count_include_pad": 1} if kind.startswith("with") else {}))
        next(a for a in node.attribute if a.name == "ceil_mode").i = 0
        if opset == 18:
            del node.attribute[[a.name for a in node.attribute].index("dilations")]
        proto = model([node], ["N", "C", "H", "W"] if symbolic else shape, opset=opset)
        x = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
        y = forward(proto, x)
        if y is None:
            continue
        leaf = torch.tensor(x, requires_grad=True)
        expected = torch_cut_off(kind, leaf, axes)
        where = f"{axes}, {shape}"
        np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-6, err_msg=where)
        seed = np.random.default_rng(9).standard_normal(y.shape).astype(np.float32)
        expected.backward(torch.tensor(seed))
        built = ortgrad.build_gradient_model(proto, wrt=["x"], of=["y"])
        way = ("python", "onnx", "plain", "auto")[number % 4]
        (dx,) = make_session(built, way, "all").run(["x_grad"], {"x": x, "y_grad": seed})
        np.testing.assert_allclose(dx, leaf.grad, rtol=1e-5, atol=1e-6, err_msg=f"{where}, {way}")
        compared += 1
    assert compared > 10
