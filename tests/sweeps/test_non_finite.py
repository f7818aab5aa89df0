"""NaN and infinities: the ways to run an operator agree on where they go, and PyTorch does, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import KERNELS, run_node, symbolic_shapes
from support.calls import CASES, Arrays, Case, make_model, quiet

import ortgrad
from ortgrad import nodes
from ortgrad.operators.declaration import all_operators

DTYPES = ("float32", "float64")
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}
SPECIAL = (np.nan, np.inf, -np.inf)
# These say what the call means, and must be finite.
CHECKED = {("DropoutGrad", "ratio"), ("TrainableDropoutGrad", "ratio")}
# These stay positive.
SCALES = ("ratio", "variance", "input_var", "inv_std_dev", "inv_std_var")


def with_one(arrays: Arrays) -> Iterator[tuple[str, str, Arrays]]:
    """The inputs with one value that is not finite: each kind in each of them, at three places."""
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            for value in SPECIAL:
                for place in sorted({0, array.size // 2, array.size - 1}):
                    changed = array.copy()
                    changed.reshape(-1)[place] = value
                    yield name, f"{name}[{place}] = {value}", {**arrays, name: changed}


def cast(case: Case, dtype: str, *, signed: bool) -> Case:
    """The call in another type, perhaps with values of both signs and some zeros."""

    def change(name: str, array: np.ndarray) -> np.ndarray:
        if array.dtype == np.bool_ and name == "mask" and signed:
            return np.arange(array.size).reshape(array.shape) % 2 == 0
        if array.dtype.kind != "f":
            return array
        array = array.astype(dtype)
        if signed and name not in SCALES:
            array -= 0.5
            # A scale of 0 is refused where X is computed from Y.
            array.reshape(-1)[1::4] *= name == "scale"
        return array

    return replace(case, arrays={name: change(name, array) for name, array in case.arrays.items()})


def make_session(case: Case, kernels: str, dtype: str, ranks: str) -> ortgrad.InferenceSession:
    model = make_model(case, ranks)
    for output in model.graph.output:
        if output.type.tensor_type.elem_type == 1:
            output.type.tensor_type.elem_type = 1 if dtype == "float32" else 11
    return ortgrad.InferenceSession(model, quiet(), kernels=kernels)


def difference(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """What differs: a NaN or infinity here and not there, or finite values by more than rounding."""
    for kind in (np.isnan, np.isposinf, np.isneginf):
        if expected.dtype.kind == "f" and not np.array_equal(kind(actual), kind(expected)):
            return f"{kind.__name__} is\n{kind(actual).astype(int)}, not\n{kind(expected).astype(int)}"
    same = np.allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if same else f"{actual}\n, not\n{expected}"


def test_every_operator_with_a_body_is_here() -> None:
    assert {op.name for op in all_operators() if op.body is not None} <= {case.op_type for case in CASES}


@pytest.mark.parametrize(
    "dtype, ranks", (("float32", "static"), ("float32", "symbolic"), ("float64", "static"))
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_and_body_agree(case: Case, dtype: str, ranks: str) -> None:
    if case.op_type == "ConvGrad":
        # Its body has to know it.
        case = replace(case, attributes={**case.attributes, "kernel_shape": case.arrays["W"].shape[2:]})
    sessions = [make_session(cast(case, dtype, signed=False), kernels, dtype, ranks) for kernels in KERNELS]
    outputs = [output.name for output in sessions[0].get_outputs()]
    for signed in (False, True):
        changed = cast(case, dtype, signed=signed)
        for name, what, arrays in with_one(changed.arrays):
            if (case.op_type, name) in CHECKED:
                for session in sessions:
                    with pytest.raises(ortgrad.OrtgradError, match="ratio"):
                        session.run(None, arrays)
                continue
            expected, *others = (session.run(None, arrays) for session in sessions)
            for kernels, actual in zip(KERNELS[1:], others, strict=True):
                for output, a, e in zip(outputs, actual, expected, strict=True):
                    wrong = difference(a, e, TOLERANCE[dtype])
                    assert not wrong, f"{kernels}, {what}, signed={signed}: {output}: {wrong}"


def torch_average_pool(arrays: Arrays, *, kernel: int, stride: int, pad: int, include: int) -> Arrays:
    x = torch.zeros(
        *arrays["X_shape"].tolist(), dtype=torch.from_numpy(arrays["dY"]).dtype, requires_grad=True
    )
    y = torch.nn.functional.avg_pool2d(x, kernel, stride, pad, count_include_pad=bool(include))
    return {"dX": torch.autograd.grad(y, x, torch.from_numpy(arrays["dY"]))[0].numpy()}


def torch_conv(arrays: Arrays, *, stride: int, pad: int, group: int) -> Arrays:
    dy, x, w = (torch.from_numpy(arrays[name].copy()) for name in ("dY", "X", "W"))
    y = torch.nn.functional.conv2d(x.requires_grad_(), w.requires_grad_(), None, stride, pad, 1, group)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    return {"dX": dx.numpy(), "dW": dw.numpy()}


def torch_batch_norm(arrays: Arrays) -> Arrays:
    dy, x, scale, mean, inv = (torch.from_numpy(array) for array in arrays.values())
    grads = torch.ops.aten.native_batch_norm_backward(
        dy, x, scale, None, None, mean, inv, True, 1e-5, [True, True, True]
    )
    return dict(zip(("X_grad", "scale_grad", "bias_grad"), (g.numpy() for g in grads), strict=True))


def check_against_torch(
    node: Any, arrays: Arrays, kernels: str, dtype: str, reference: Callable[[Arrays], Arrays]
) -> None:
    model = nodes.make_model(node, shapes=symbolic_shapes(arrays), dtype=np.dtype(dtype))
    session = ortgrad.InferenceSession(model, quiet(), kernels=kernels)
    outputs = [output.name for output in session.get_outputs()]
    for _, what, changed in with_one(arrays):
        actual = dict(zip(outputs, session.run(None, changed), strict=True))
        for output, expected in reference(changed).items():
            wrong = difference(actual[output], expected, TOLERANCE[dtype])
            assert not wrong, f"{what}: {output}: {wrong}"


def normal(*shape: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kernel, stride, pad, include", [(2, 2, 0, 0), (3, 2, 1, 0), (3, 1, 1, 1), (2, 3, 0, 1)]
)
def test_average_pool(kernel: int, stride: int, pad: int, include: int, dtype: str, kernels: str) -> None:
    size = (7 + 2 * pad - kernel) // stride + 1
    arrays = {"dY": normal(2, 2, size, size, dtype=dtype), "X_shape": np.array([2, 2, 7, 7])}
    node = nodes.average_pool_grad(
        "dY",
        "X_shape",
        kernel_shape=[kernel] * 2,
        strides=[stride] * 2,
        pads=[pad] * 4,
        count_include_pad=include,
        outputs=["dX"],
    )
    options = {"kernel": kernel, "stride": stride, "pad": pad, "include": include}
    check_against_torch(node, arrays, kernels, dtype, lambda a: torch_average_pool(a, **options))
    # Infinities of both signs meet where their windows overlap.
    arrays["dY"][0, 0, 0, :2] = np.inf, -np.inf
    expected = torch_average_pool(arrays, **options)["dX"]
    assert not difference(run_node(node, arrays, kernels)["dX"], expected, TOLERANCE[dtype])


# With more channels than filters the kernel is another one; the last ones have windows of padding only.
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "channels, filters, kernel, stride, pad, group",
    [(3, 2, 3, 1, 1, 1), (2, 6, 3, 1, 1, 1), (4, 4, 2, 2, 1, 2), (3, 2, 1, 2, 0, 1), (3, 2, 2, 1, 2, 1)],
)
def test_conv(
    channels: int,
    filters: int,
    kernel: int,
    stride: int,
    pad: int,
    group: int,
    dtype: str,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With oneDNN it depends on sizes and types whether zeros of the padding are multiplied.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    size = (5 + 2 * pad - kernel) // stride + 1
    arrays = {
        "dY": normal(2, filters, size, size, dtype=dtype),
        "X": normal(2, channels, 5, 5, dtype=dtype),
        "W": normal(filters, channels // group, kernel, kernel, dtype=dtype),
    }
    node = nodes.conv_grad(
        "dY",
        "X",
        "W",
        kernel_shape=[kernel] * 2,
        strides=[stride] * 2,
        pads=[pad] * 4,
        group=group,
        outputs=["dX", "dW", None],
    )
    check_against_torch(
        node, arrays, kernels, dtype, lambda a: torch_conv(a, stride=stride, pad=pad, group=group)
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_normalization(dtype: str, kernels: str) -> None:
    arrays = {"dY": normal(2, 3, 4, dtype=dtype), "X": normal(3, 2, 4, dtype=dtype).reshape(2, 3, 4)}
    arrays |= {name: normal(3 + i, dtype=dtype)[:3] for i, name in enumerate(("scale", "mean"))}
    arrays["variance"] = np.array([0.5, 1.5, 2], dtype)
    node = nodes.batch_normalization_grad(*arrays, outputs=["X_grad", "scale_grad", "bias_grad"])
    check_against_torch(node, arrays, kernels, dtype, torch_batch_norm)
