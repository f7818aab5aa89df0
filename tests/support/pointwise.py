"""Convolutions of kernel size 1, by PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch

import ortgrad
import support
from ortgrad import nodes
from ortgrad.ops.pointwise import pointwise_conv_grad
from support.calls import Case
from support.compiled import checked_tasks

# The shape of X, the number of filters, attributes
CASES: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "one sample": ([1, 5, 4, 3], 7, {}),
    "one position": ([1, 5, 1, 1], 7, {"pads": [0] * 4, "strides": [1, 1]}),
    "products are added up": ([3, 5, 20, 31], 7, {}),
    "more filters than a group of sums": ([2, 40, 9, 90], 33, {}),
    "samples are joined": ([3, 40, 2, 3], 33, {}),
    "squares are transposed": ([2, 34, 3, 3], 48, {}),
    "one channel": ([4, 1, 6, 5], 3, {"auto_pad": "SAME_UPPER"}),
    "one filter": ([4, 3, 6, 5], 1, {"auto_pad": "VALID", "dilations": [2, 3]}),
    "1d": ([2, 3, 700], 4, {}),
    "3d": ([2, 3, 4, 5, 6], 4, {"kernel_shape": [1, 1, 1]}),
    "no sample": ([0, 3, 4, 5], 4, {}),
}


OUTPUTS = ("dX", "dW", "dB")


def arrays_of(name: str, dtype: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The inputs, and what PyTorch computes of them in float64."""
    shape, filters, _ = CASES[name]
    random = np.random.default_rng(0)
    w_shape = [filters, shape[1], *[1] * (len(shape) - 2)]
    shapes = {"dY": [shape[0], filters, *shape[2:]], "X": shape, "W": w_shape}
    arrays = {key: random.standard_normal(sizes).astype(dtype) for key, sizes in shapes.items()}
    dy, x, w = (torch.tensor(array.astype(np.float64)) for array in arrays.values())
    rows, columns, matrix = dy.flatten(2), x.flatten(2), w.flatten(1)
    dx = torch.einsum("nms,mc->ncs", rows, matrix).reshape(x.shape)
    dw = torch.einsum("nms,ncs->mc", rows, columns).reshape(w.shape)
    if x.numel():
        # PyTorch refuses convolutions of nothing.
        tensors = [t.requires_grad_() for t in (x, w, torch.zeros(filters, dtype=torch.float64))]
        y = getattr(torch.nn.functional, f"conv{len(shape) - 2}d")(*tensors)
        own = torch.autograd.grad(y, tensors, dy)
        torch.testing.assert_close(own[0], dx)
        torch.testing.assert_close(own[1], dw)
    expected = {"dX": dx, "dW": dw, "dB": rows.sum((0, 2))}
    return arrays, {key: value.detach().numpy().astype(dtype) for key, value in expected.items()}


def model_of(name: str, dtype: str, outputs: Any = OUTPUTS, *, dynamic: bool = False) -> onnx.ModelProto:
    shape, filters, attributes = CASES[name]
    node = nodes.conv_grad("dY", "X", "W", list(outputs), dtype=dtype, **attributes)
    sizes: list[Any] = [f"x{i}" for i in range(len(shape))] if dynamic else shape
    shapes = {"X": sizes, "W": [filters, shape[1], *[1] * (len(shape) - 2)]}
    return nodes.make_model(node, shapes=shapes, dtype=np.dtype(dtype))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    support.assert_close(actual, expected, {"float32": 2e-5, "float64": 1e-12}[expected.dtype.name])


def check_memory() -> None:
    """Numba's checks raise an IndexError; a result that was not written is NaN."""
    for name, (shape, _, attributes) in CASES.items():
        arrays, expected = arrays_of(name, "float32")
        results = checked_tasks(pointwise_conv_grad, Case("PointwiseConvGrad", arrays, attributes))
        assert (results is None) == (0 in shape)
        for output, value in zip(OUTPUTS, results or (), strict=bool(results)):
            assert_close(value, expected[output])


def check_special(value: float, where: str) -> None:
    session = ortgrad.InferenceSession(model_of("samples are joined", "float32"))
    arrays, _ = arrays_of("samples are joined", "float32")
    arrays[where].reshape(-1)[arrays[where].size // 2] = value
    with np.errstate(invalid="ignore"):
        expected = pointwise_conv_grad(*arrays.values())
    for actual, right in zip(session.run(None, arrays), expected, strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-4, atol=1e-4)
