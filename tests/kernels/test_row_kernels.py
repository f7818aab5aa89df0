"""Kernels on sizes around the limits of the rows, blocks and parts by which compiled kernels work.

The oracle is PyTorch in float64, or a sum in float64 that is written out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support import COMPILES, FASTEST, KERNELS, assert_close, float_type, needs_numba
from support.calls import Case
from support.compiled import checked_tasks

import ortgrad
from ortgrad import nodes
from ortgrad.operators.declaration import find_operator
from ortgrad.pipelines.prepare import Kernels

Arrays = dict[str, np.ndarray]
TOLERANCE = {"float32": 1e-6, "float64": 1e-14}
DTYPES = list(TOLERANCE)
# Those whose errors are our own; in a body, onnxruntime finds them.
OWN: list[Kernels] = [kernels for kernels in KERNELS if kernels in ("python", "compiled")]


def normal(*shape: int, seed: int = 0, dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def run(
    op_type: str,
    feeds: Arrays,
    *,
    kernels: Kernels = FASTEST,
    threads: int = 1,
    outputs: list[str] | None = None,
    **attributes: Any,
) -> Arrays:
    """The results of a node; a compiled kernel must not fail over to the NumPy kernel."""
    operator = find_operator(op_type)
    assert operator is not None
    names = [p.name if outputs is None or p.name in outputs else None for p in operator.outputs]
    node = getattr(nodes, operator.builder_name)(*feeds, outputs=names, **attributes)
    shapes = {name: [f"{name}{i}" for i in range(array.ndim)] for name, array in feeds.items()}
    model = nodes.make_model(node, shapes=shapes, dtype=float_type(feeds))
    for given in model.graph.input:
        kind = onnx.helper.np_dtype_to_tensor_dtype(feeds[given.name].dtype)
        given.type.tensor_type.elem_type = kind
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = ortgrad.InferenceSession(model, options, kernels=kernels)
    kernel = operator.kernel
    if kernels == "compiled":
        operator.kernel = _fail
    try:
        results = session.run(None, feeds)
    finally:
        operator.kernel = kernel
    return dict(zip([n for n in names if n], results, strict=True))


def _fail(*_: Any, **__: Any) -> None:
    raise AssertionError("the compiled kernel should run")


def check(op_type: str, feeds: Arrays, expected: dict[str, Any], **attributes: Any) -> None:
    dtype = float_type(feeds).name
    for kernels in KERNELS:
        actual = run(op_type, feeds, kernels=kernels, **attributes)
        # The others add up in single precision what compiled kernels add up in double.
        tolerance = TOLERANCE[dtype] * (1 if kernels == "compiled" else 10)
        for name, value in expected.items():
            right = np.asarray(value.numpy() if isinstance(value, torch.Tensor) else value)
            assert_close(actual[name], right.astype(dtype), tolerance)


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(a.astype(np.float64), requires_grad=True) for a in arrays]


MATRICES = [(1, 1), (5, 3), (33, 7), (100, 257), (3, 513), (7, 1100), (0, 4), (129, 64), (4, 3000)]


def layer_feeds(rows: int, columns: int, dtype: str, offset: float = 0.0) -> tuple[Arrays, Arrays]:
    x = (normal(rows, columns) + offset).astype(dtype)
    dy, scale = normal(rows, columns, seed=1, dtype=dtype), normal(columns, seed=2, dtype=dtype) + 2
    xt, st, bt = tensors(x, scale, np.zeros(columns))
    y = torch.nn.functional.layer_norm(xt, (columns,), st, bt)
    grads = torch.autograd.grad(y, (xt, st, bt), torch.tensor(dy.astype(np.float64)))
    exact = x.astype(np.float64)
    mean = exact.mean(1, keepdims=True)
    inv = 1 / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    feeds = {"Y_grad": dy, "X": x, "scale": scale, "mean": mean, "inv_std_dev": inv}
    return (
        {name: array.astype(dtype) for name, array in feeds.items()},
        dict(zip(("X_grad", "scale_grad", "bias_grad"), (g.numpy() for g in grads), strict=True)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), MATRICES)
def test_layer_normalization_grad(rows: int, columns: int, dtype: str) -> None:
    feeds, expected = layer_feeds(rows, columns, dtype)
    if columns == 1:
        # A row of one element has no gradient.
        feeds["mean"] = feeds["X"]
        assert abs(run("LayerNormalizationGrad", feeds)["X_grad"]).max() == 0
        expected = {"scale_grad": np.zeros(1), "bias_grad": expected["bias_grad"]}
    check("LayerNormalizationGrad", feeds, expected)
    for name in expected:
        check("LayerNormalizationGrad", feeds, {name: expected[name]}, outputs=[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), MATRICES)
def test_simplified_layer_normalization_grad(rows: int, columns: int, dtype: str) -> None:
    x, dy = normal(rows, columns, dtype=dtype), normal(rows, columns, seed=1, dtype=dtype)
    scale = normal(columns, seed=2, dtype=dtype)
    xt, st = tensors(x, scale)
    inv = torch.rsqrt(xt.square().mean(1, keepdim=True) + 1)
    dx, ds = torch.autograd.grad(xt * inv * st, (xt, st), torch.tensor(dy.astype(np.float64)))
    feeds = {"Y_grad": dy, "X": x, "scale": scale, "inv_std_var": inv.detach().numpy().astype(dtype)}
    check("SimplifiedLayerNormalizationGrad", feeds, {"X_grad": dx, "scale_grad": ds})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), MATRICES)
def test_invertible_layer_normalization_grad(rows: int, columns: int, dtype: str) -> None:
    feeds, expected = layer_feeds(rows, columns, "float64")
    bias = normal(columns, seed=3)
    y = (feeds["X"] - feeds["mean"]) * feeds["inv_std_dev"] * feeds["scale"] + bias
    given = {"Y_grad": feeds["Y_grad"], "Y": y, "scale": feeds["scale"], "bias": bias}
    given["inv_std_var"] = feeds["inv_std_dev"]
    cast = {name: array.astype(dtype) for name, array in given.items()}
    actual = run("InvertibleLayerNormalizationGrad", cast)
    for name, right in expected.items():
        if columns > 1:
            # The differences Y - bias are as accurate as Y.
            assert_close(actual[name], right.astype(dtype), 20 * TOLERANCE[dtype])


@pytest.mark.parametrize("kernels", OWN)
def test_a_scale_of_0_cannot_be_inverted(kernels: Kernels) -> None:
    feeds = {"Y_grad": normal(2, 3), "Y": normal(2, 3), "scale": np.array([1.0, 0, 1]), "bias": normal(3)}
    node = nodes.invertible_layer_normalization_grad(*feeds, "inv", outputs=["x", "s", "b"])
    model = nodes.make_model(node, dtype=np.float64)
    session = ortgrad.InferenceSession(model, kernels=kernels)
    with pytest.raises(ortgrad.KernelError, match="scale holds a 0"):
        session.run(None, {**feeds, "inv": np.ones((2, 1))})
    session.run(None, {**feeds, "scale": np.ones(3), "inv": np.ones((2, 1))})


CHANNELS = [
    (70, 300),
    (5000, 3),
    (3, 2, 1100),
    (40, 3, 5),
    (0, 3, 4),
    (2, 3, 0),
    (9, 20, 7),
    (4, 1),
    (33, 1, 2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CHANNELS, ids=str)
def test_batch_normalization(shape: tuple[int, ...], dtype: str) -> None:
    channels, axes = shape[1], (0, *range(2, len(shape)))
    x, dy = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
    scale, bias, mean, var = (abs(normal(channels, seed=s, dtype=dtype)) for s in (2, 3, 4, 5))
    xt, st, bt = tensors(x, scale, bias)
    ones = (1, channels, *[1] * (len(shape) - 2))
    count = max(1, math.prod(shape) // channels)
    batch_mean = xt.sum(axes) / count
    batch_var = (xt - batch_mean.reshape(ones)).square().sum(axes) / count
    inv = torch.rsqrt(batch_var + 1e-5)
    y = (xt - batch_mean.reshape(ones)) * (inv * st).reshape(ones) + bt.reshape(ones)
    feeds = {"X": x, "scale": scale, "B": bias, "input_mean": mean, "input_var": var}
    outputs = [
        y,
        0.9 * mean + 0.1 * batch_mean.detach().numpy(),
        0.9 * var + 0.1 * batch_var.detach().numpy(),
    ]
    names = ("Y", "running_mean", "running_var", "saved_mean", "saved_inv_std")
    values = [torch.as_tensor(v).detach() for v in (*outputs, batch_mean, inv)]
    check("BatchNormInternal", feeds, dict(zip(names, values, strict=True)))
    grads = torch.autograd.grad(y, (xt, st, bt), torch.tensor(dy.astype(np.float64)))
    saved = {"mean": values[3].numpy().astype(dtype), "variance": values[4].numpy().astype(dtype)}
    feeds = {"dY": dy, "X": x, "scale": scale, **saved}
    expected = dict(zip(("X_grad", "scale_grad", "bias_grad"), grads, strict=True))
    check("BatchNormalizationGrad", feeds, expected)
    check("BatchNormalizationGrad", feeds, {"X_grad": grads[0]}, outputs=["X_grad"])


def worst(actual: Any, expected: Any) -> float:
    difference = np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
    return float(difference.max() / np.abs(expected).max())


def test_a_large_mean_in_layer_normalization() -> None:
    """At least as accurate as PyTorch with the same statistics."""
    feeds, expected = layer_feeds(64, 1000, "float32", offset=1e4)
    actual = run("LayerNormalizationGrad", feeds)
    dy, x, scale, mean, inv = (torch.tensor(a) for a in feeds.values())
    peers = torch.ops.aten.native_layer_norm_backward(
        dy, x, [1000], mean, inv, scale, torch.zeros(1000), [True] * 3
    )
    for (name, right), peer in zip(expected.items(), peers, strict=True):
        assert worst(actual[name], right) <= 1.1 * worst(peer.numpy(), right) + 1e-7


@needs_numba
@pytest.mark.parametrize("shape", [(16, 5, 900), (3000, 5)], ids=str)
def test_a_large_mean_in_batch_normalization(shape: tuple[int, ...]) -> None:
    x = (normal(*shape) + 1e4).astype(np.float32)
    axes = (0, *range(2, len(shape)))
    ones, zeros = np.ones(5, np.float32), np.zeros(5, np.float32)
    feeds = {"X": x, "scale": ones, "B": zeros, "input_mean": zeros, "input_var": ones}
    actual = run("BatchNormInternal", feeds)
    exact = x.astype(np.float64)
    assert worst(actual["saved_mean"], exact.mean(axes)) < 1e-7
    assert worst(actual["saved_inv_std"], 1 / np.sqrt(exact.var(axes) + 1e-5)) < 1e-6
    t = [torch.tensor(a) for a in (x, ones, zeros)]
    peer = torch.native_batch_norm(*t, None, None, True, 0.1, 1e-5)[0].numpy()
    kept = exact.mean(axes, keepdims=True)
    right = (exact - kept) / np.sqrt(exact.var(axes, keepdims=True) + 1e-5)
    assert worst(actual["Y"], right) <= 1.1 * worst(peer, right) + 1e-7


MOMENTS = [
    ((5, 7), [1]),
    ((5, 7), [0]),
    ((70, 300), [0]),
    ((300, 70), [-1]),
    ((4, 3, 600), [0, 2]),
    ((2, 3, 4, 5), [2, 3]),
    ((2, 3, 4, 5), [0, 1]),
    ((2, 3, 4), [0, 1, 2]),
    ((1, 6, 1100), [2]),
    ((0, 3), [1]),
    ((3, 0), [1]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [0, 1])
@pytest.mark.parametrize(("shape", "axes"), MOMENTS, ids=str)
def test_moments(shape: tuple[int, ...], axes: list[int], centred: int, dtype: str) -> None:
    operator = find_operator("Moments", "ortgrad")
    assert operator is not None
    x = normal(*shape, dtype=dtype) + 3
    exact = torch.tensor(x.astype(np.float64))
    count = max(1, math.prod(shape[axis] for axis in axes))
    mean = exact.sum(axes, keepdim=True) / count if centred else torch.zeros(())
    inverse = torch.rsqrt((exact - mean).square().sum(axes, keepdim=True) / count + 0.1)
    for keepdims in (0, 1):
        attributes = {"axes": axes, "keepdims": keepdims, "epsilon": 0.1, "centred": centred}
        outputs = ("mean", "inverse") if centred else ("inverse",)
        wanted = {"mean": mean, "inverse": inverse}
        case = Case("Moments", {"X": x}, attributes, outputs=outputs)
        slow = operator.compute([x], operator.with_defaults(attributes), [bool(centred), True], _fail)
        computed = [(slow, 10 * TOLERANCE[dtype])]
        if COMPILES:
            computed.append((checked_tasks(operator, case), TOLERANCE[dtype]))
        for results, tolerance in computed:
            for name, result in zip(("mean", "inverse"), results, strict=True):
                if name in outputs:
                    right = wanted[name].numpy().astype(dtype)
                    right = right if keepdims else np.squeeze(right, tuple(axes))
                    assert_close(result, right, tolerance)


LOSSES = [(1, 1), (5, 3), (300, 7), (20000, 3), (4, 5, 7), (3, 4, 300), (2, 3, 4, 5), (0, 3), (2, 1000)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", LOSSES, ids=str)
def test_loss(shape: tuple[int, ...], reduction: str, dtype: str) -> None:
    generator = np.random.default_rng(3)
    label = generator.integers(0, shape[1], (shape[0], *shape[2:]))
    weight = generator.uniform(0.5, 2, shape[1]).astype(dtype)
    label.reshape(-1)[1::3] = -7
    logits = torch.tensor(normal(*shape), requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        logits,
        torch.from_numpy(label),
        torch.from_numpy(weight.astype(np.float64)),
        ignore_index=-7,
        reduction=reduction,
    )
    dy = normal(*loss.shape, seed=5)
    (expected,) = torch.autograd.grad(loss, logits, torch.from_numpy(np.asarray(dy)))
    log_prob = torch.log_softmax(logits.detach(), 1).numpy().astype(dtype)
    feeds = {"dY": np.asarray(dy, dtype), "log_prob": log_prob, "label": label, "weight": weight}
    attributes = {"reduction": reduction, "ignore_index": -7}
    check("SoftmaxCrossEntropyLossGrad", feeds, {"d_logits": expected}, **attributes)


@pytest.mark.parametrize("kernels", OWN)
def test_labels_out_of_range_are_found_in_any_block(kernels: Kernels) -> None:
    log_prob = np.zeros((40000, 2), np.float32)
    feeds = {"dY": np.ones((), np.float32), "log_prob": log_prob, "label": np.zeros(40000, np.int64)}
    session = gradient_session(nodes.softmax_cross_entropy_loss_grad(*feeds, outputs=["x"]), feeds, kernels)
    for place in (0, 20000, 39999):
        for wrong in (2, -1, 2**40):
            label = feeds["label"].copy()
            label[place] = wrong
            with pytest.raises(ortgrad.KernelError, match=f"label {wrong} is out of range for 2 classes"):
                session.run(None, {**feeds, "label": label})
    assert session.run(None, feeds)[0].shape == (40000, 2)


def gradient_session(node: onnx.NodeProto, feeds: Arrays, kernels: Kernels) -> ortgrad.InferenceSession:
    model = nodes.make_model(node, dtype=float_type(feeds))
    for given in model.graph.input:
        kind = onnx.helper.np_dtype_to_tensor_dtype(feeds[given.name].dtype)
        given.type.tensor_type.elem_type = kind
    return ortgrad.InferenceSession(model, kernels=kernels)


GATHERS = [
    ((3000, 70), (50,), 0),
    ((7, 5), (0,), 0),
    ((7, 5), (), 0),
    ((4, 30, 6), (3, 40), 1),
    ((20, 3, 5), (9,), 2),
    ((9,), (1000,), 0),
    ((2, 0, 3), (0,), 1),
    ((5, 4, 0), (3,), 0),
]


@pytest.mark.parametrize("integers", [np.int64, np.int32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("x", "i", "axis"), GATHERS, ids=str)
def test_gather_grad(x: tuple[int, ...], i: tuple[int, ...], axis: int, dtype: str, integers: Any) -> None:
    length = x[axis]
    indices = np.random.default_rng(0).integers(-length, max(length, 1 - length), i)
    dy = normal(*x[:axis], *i, *x[axis + 1 :], dtype=dtype)
    expected = np.zeros(x)
    along = np.moveaxis(expected, axis, 0)
    terms = dy.reshape(*x[:axis], indices.size, *x[axis + 1 :])
    for k, index in enumerate(indices.reshape(-1)):
        along[index] += terms.take(k, axis)
    feeds = {"shape": np.array(x), "indices": np.asarray(indices, integers), "dY": dy}
    check("GatherGrad", feeds, {"dX": expected}, axis=axis)


ELEMENTS = [
    ((7, 5), (7, 3), -1),
    ((7, 5), (4, 5), 0),
    ((3, 4, 600), (3, 9, 600), 1),
    ((3, 4, 600), (2, 9, 500), 1),
    ((0, 3), (0, 2), 1),
    ((3, 3), (3, 0), 1),
    ((4,), (900,), 0),
    ((2, 3, 4), (1, 2, 9), 2),
    ((5, 300, 4), (2, 3, 2), 0),
]


@pytest.mark.parametrize("integers", [np.int64, np.int32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("x", "y", "axis"), ELEMENTS, ids=str)
def test_gather_elements_grad(
    x: tuple[int, ...], y: tuple[int, ...], axis: int, dtype: str, integers: Any
) -> None:
    indices = np.random.default_rng(0).integers(-x[axis], x[axis], y)
    dy = normal(*y, dtype=dtype)
    places = torch.tensor(np.where(indices < 0, indices + x[axis], indices))
    expected = torch.zeros(x, dtype=torch.float64)
    expected.scatter_add_(axis, places, torch.tensor(dy.astype(np.float64)))
    feeds = {"dY": dy, "shape": np.array(x), "indices": indices.astype(integers)}
    check("GatherElementsGrad", feeds, {"dX": expected}, axis=axis)


POINTS = [
    ((20, 30, 64), (10, 2), 0),
    ((8, 40, 6), (8, 50, 1), 1),
    ((8, 40, 6), (8, 3, 2, 2), 1),
    ((9,), (1000, 1), 0),
    ((5, 4), (0, 1), 0),
    ((40, 3), (40, 1), 1),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("x", "i", "batch"), POINTS, ids=str)
def test_gather_nd_grad(x: tuple[int, ...], i: tuple[int, ...], batch: int, dtype: str) -> None:
    generator = np.random.default_rng(0)
    columns = [generator.integers(-n, n, i[:-1]) for n in x[batch : batch + i[-1]]]
    indices = np.stack(columns, -1)
    dy = normal(*i[:-1], *x[batch + i[-1] :], dtype=dtype)
    expected = np.zeros(x)
    for place in np.ndindex(*i[:-1]):
        expected[(*place[:batch], *indices[place])] += dy[place]
    feeds = {"shape": np.array(x), "indices": indices, "dY": dy}
    check("GatherNDGrad", feeds, {"dX": expected}, batch_dims=batch)


@pytest.mark.parametrize("kernels", OWN)
@pytest.mark.parametrize("wrong", [6, -7, 2**31 - 1, -(2**31)])
def test_indices_out_of_range(wrong: int, kernels: Kernels) -> None:
    shape, indices = np.array([6, 4]), np.array([0, 5, -6])
    calls: list[tuple[Callable[..., onnx.NodeProto], Arrays]] = [
        (nodes.gather_grad, {"shape": shape, "indices": indices, "dY": normal(3, 4)}),
        (
            nodes.gather_elements_grad,
            {"dY": normal(3, 1), "shape": shape, "indices": indices.reshape(3, 1)},
        ),
        (nodes.gather_nd_grad, {"shape": shape, "indices": indices.reshape(3, 1), "dY": normal(3, 4)}),
    ]
    for build, feeds in calls:
        session = gradient_session(build(*feeds, outputs=["dX"]), feeds, kernels)
        for place in range(3):
            changed = feeds["indices"].copy()
            changed.reshape(-1)[place] = wrong
            with pytest.raises(ortgrad.KernelError, match=f"index {wrong} is out of range for length 6"):
                session.run(None, {**feeds, "indices": changed})
        assert session.run(None, feeds)[0].shape == (6, 4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_shape_of_32_bits(kernels: Kernels) -> None:
    """Compiled code reads shapes as numbers of 64 bits."""
    feeds = {
        "shape": np.array([3, 2], np.int32),
        "indices": np.array([1, 1]),
        "dY": np.ones((2, 2), np.float32),
    }
    session = gradient_session(nodes.gather_grad(*feeds, outputs=["dX"]), feeds, kernels)
    for _ in range(2):
        np.testing.assert_array_equal(session.run(None, feeds)[0], [[0, 0], [2, 2], [0, 0]])


def calls() -> dict[str, Arrays]:
    big, rows = normal(700, 900, dtype="float32"), normal(700, 1, dtype="float32")
    columns, channels = normal(900, dtype="float32"), normal(9, dtype="float32")
    image = normal(30, 9, 40, 60, dtype="float32")
    indices = np.random.default_rng(0).integers(0, 90, 700)
    return {
        "LayerNormalizationGrad": {
            "Y_grad": big,
            "X": big + 1,
            "scale": columns,
            "mean": rows,
            "inv_std_dev": rows,
        },
        "SimplifiedLayerNormalizationGrad": {
            "Y_grad": big,
            "X": big + 1,
            "scale": columns,
            "inv_std_var": rows,
        },
        "BatchNormalizationGrad": {
            "dY": image,
            "X": image + 1,
            **dict.fromkeys(("scale", "mean", "variance"), channels),
        },
        "BatchNormInternal": {
            "X": image,
            **dict.fromkeys(("scale", "B", "input_mean", "input_var"), channels),
        },
        "SoftmaxCrossEntropyLossGrad": {
            "dY": np.ones((), np.float32),
            "log_prob": big,
            "label": indices,
        },
        "GatherGrad": {"shape": np.array([90, 900]), "indices": indices, "dY": big},
        "GatherElementsGrad": {
            "dY": big,
            "shape": np.array([700, 900]),
            "indices": np.random.default_rng(1).integers(0, 700, big.shape),
        },
        "GatherNDGrad": {"shape": np.array([90, 900]), "indices": indices[:, None], "dY": big},
    }


@needs_numba
@pytest.mark.parametrize("op_type", list(calls()))
def test_results_do_not_depend_on_threads(op_type: str) -> None:
    feeds = calls()[op_type]
    one, several = (run(op_type, feeds, threads=threads) for threads in (1, 3))
    for name, value in one.items():
        np.testing.assert_array_equal(value, several[name])
