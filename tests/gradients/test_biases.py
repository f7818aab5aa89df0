"""A bias that is added to the result of a convolution becomes its input in sessions; against PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

import ortgrad
from ortgrad.pipelines.prepare import prepare_loaded

CONV = "c = Conv<pads=[1,1,1,1]>(x, w)"
JOINED = {
    "weight": ("b", "[1,4,1,1]", f"{CONV} y = Add(c, b)"),
    "first operand": ("b", "[4,1,1]", f"{CONV} y = Add(b, c)"),
    "reshaped vector": (
        "b",
        "[4]",
        f"s = Constant<value_ints=[1,-1,1,1]>() r = Reshape(b, s) {CONV} y = Add(c, r)",
    ),
    "computed later": ("b", "[1,4,1,1]", f"{CONV} e = Exp(b) y = Add(c, e)"),
    "depthwise": ("b", "[1,4,1,1]", "c = Conv<pads=[1,1,1,1], group=4>(v, w) y = Add(c, b)"),
}
OTHERS = {
    "of another axis": ("b", "[1,1,4,1]", f"{CONV} y = Add(c, b)"),
    "a vector along the last axis": ("b", "[4]", f"{CONV} y = Add(c, b)"),
    "a whole tensor": ("b", "[2,4,4,4]", f"{CONV} y = Add(c, b)"),
    "one number": ("b", "[1,1,1,1]", f"{CONV} y = Add(c, b)"),
    "result read twice": ("b", "[1,4,1,1]", f"{CONV} d = Add(c, b) y = Mul(d, c)"),
    "with itself": ("b", "[1,4,1,1]", f"{CONV} d = Add(c, c) y = Add(d, b)"),
}


def build(case: tuple[str, str, str]) -> onnx.ModelProto:
    name, shape, body = case
    channels = 1 if "group" in body else 3
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[2,3,4,4] x, float[2,4,4,4] v, float[4,{channels},3,3] w, float{shape} {name})
        => (float[2,4,4,4] y) {{ {body} }}"""
    return ortgrad.build_gradient_model(parser.parse_model(text), wrt=["w", "b"])


def reference(name: str, feeds: dict[str, np.ndarray]) -> list[torch.Tensor]:
    """y and the gradients of w and b."""
    x, v, w, b, seed = (torch.tensor(array.astype(np.float64)) for array in feeds.values())
    for tensor in (w, b):
        tensor.requires_grad_()
    depthwise = name == "depthwise"
    c = torch.nn.functional.conv2d(v if depthwise else x, w, padding=1, groups=4 if depthwise else 1)
    if name == "reshaped vector":
        y = c + b.reshape(1, -1, 1, 1)
    elif name == "computed later":
        y = c + b.exp()
    elif name == "result read twice":
        y = (c + b) * c
    elif name == "with itself":
        y = c + c + b
    else:
        y = c + b
    return [y, *torch.autograd.grad(y, (w, b), seed)]


@pytest.mark.parametrize("kernels", ["auto", "onnx"])
@pytest.mark.parametrize("name", [*JOINED, *OTHERS])
def test_biases(name: str, kernels: ortgrad.pipelines.prepare.Kernels) -> None:
    model = build({**JOINED, **OTHERS}[name])
    prepared = prepare_loaded(model, kernels, bodies=False).graph.node
    forward = next(node for node in prepared if node.op_type in ("Conv", "DepthwiseConv"))
    bias = len(forward.input) > 2 and not forward.input[2].startswith("ortgrad.empty")
    assert bias == (name in JOINED)
    session = ortgrad.InferenceSession(model, kernels=kernels)
    random = np.random.default_rng(0)
    shapes = {value.name: value.shape for value in session.get_inputs()}
    feeds = {
        key: random.standard_normal(shapes[key]).astype(np.float32) for key in ("x", "v", "w", "b", "y_grad")
    }
    used = {key: array for key, array in feeds.items() if key in shapes}
    actual = session.run(["y", "w_grad", "b_grad"], used)
    for value, expected in zip(actual, reference(name, feeds), strict=True):
        np.testing.assert_allclose(value, expected.detach().numpy(), rtol=1e-4, atol=1e-4)
