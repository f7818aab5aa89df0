"""Depthwise convolutions in sessions with compiled kernels, against PyTorch in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import support
import torch
from onnx import helper
from support import amount
from support.calls import WAYS, Case
from support.compiled import checked_tasks
from support.geometries import assert_close, pads_of

import ortgrad
from ortgrad import nodes
from ortgrad.operators.declaration import INTERNAL_DOMAIN, all_operators, find_operator
from ortgrad.ops._windows import windows
from ortgrad.ops.conv._depthwise_plan import Division, Planes, in_two_dimensions
from ortgrad.ops.conv.depthwise import depthwise_conv, depthwise_conv_grad
from ortgrad.pipelines.prepare import prepare_loaded

Geometry = tuple[list[int], list[int], dict[str, Any]]
CONVOLUTIONS = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d}

# X, W, attributes
CASES: dict[str, Geometry] = {
    "3x3": ([2, 5, 6, 6], [5, 1, 3, 3], {"pads": [1] * 4}),
    "7x7": ([2, 3, 9, 8], [3, 1, 7, 7], {"pads": [3] * 4}),
    "5x5 strided": ([2, 3, 9, 12], [3, 1, 5, 5], {"pads": [2] * 4, "strides": [2, 2]}),
    "strides in one dimension": ([1, 3, 9, 12], [3, 1, 3, 3], {"pads": [1] * 4, "strides": [2, 1]}),
    "strides larger than the kernel": ([2, 3, 11, 13], [3, 1, 2, 1], {"strides": [4, 3]}),
    "strides of 3": ([1, 2, 11, 13], [2, 1, 3, 3], {"strides": [3, 3], "pads": [2, 0, 0, 1]}),
    "dilated": ([2, 2, 13, 11], [2, 1, 3, 3], {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "dilated and strided": ([1, 2, 17, 14], [2, 1, 3, 3], {"dilations": [3, 2], "strides": [2, 3]}),
    "asymmetric pads": ([1, 2, 7, 6], [2, 1, 3, 3], {"pads": [0, 2, 1, 0]}),
    "pads beyond the kernel": ([1, 2, 3, 3], [2, 1, 2, 2], {"pads": [3, 4, 5, 2], "strides": [2, 1]}),
    "taps that see padding only": ([1, 2, 1, 4], [2, 1, 3, 3], {"pads": [3, 1, 2, 1], "strides": [3, 1]}),
    "windows of padding only": ([1, 2, 2, 2], [2, 1, 2, 2], {"pads": [6, 6, 6, 6], "strides": [2, 2]}),
    "1x1": ([2, 3, 4, 5], [3, 1, 1, 1], {}),
    "1x1 strided": ([2, 3, 7, 8], [3, 1, 1, 1], {"strides": [2, 2]}),
    "1x15": ([2, 3, 1, 40], [3, 1, 1, 15], {"pads": [0, 7, 0, 7]}),
    "15x1": ([2, 3, 40, 1], [3, 1, 15, 1], {"pads": [7, 0, 7, 0]}),
    "several filters": ([2, 3, 6, 7], [12, 1, 3, 3], {"pads": [1] * 4}),
    "several filters, strided": ([2, 3, 7, 7], [6, 1, 5, 5], {"pads": [2] * 4, "strides": [2, 2]}),
    "1d": ([2, 3, 9], [3, 1, 3], {"pads": [1, 1]}),
    "1d strided": ([2, 3, 50], [3, 1, 15], {"pads": [7, 7], "strides": [2]}),
    "1d of several strips": ([1, 2, 9001], [4, 1, 5], {"pads": [4, 0], "dilations": [2]}),
    "1d of several strips, strided": ([1, 2, 9001], [2, 1, 5], {"pads": [4, 1], "strides": [3]}),
    "1d of several strips, stride 2": ([1, 2, 19001], [2, 1, 3], {"strides": [2]}),
    "2d of several strips": ([1, 2, 90, 100], [2, 1, 3, 3], {"pads": [1] * 4}),
    "2d of several strips, strided": ([1, 2, 201, 180], [4, 1, 3, 3], {"pads": [1] * 4, "strides": [2, 2]}),
    "2d of several strips, large kernel": ([1, 2, 70, 80], [2, 1, 31, 31], {"pads": [15] * 4}),
    "2d of several strips with gaps": ([1, 2, 205, 201], [2, 1, 2, 2], {"strides": [3, 3]}),
    "kernel of the size of X": ([2, 3, 4, 5], [3, 1, 4, 5], {}),
    "SAME_UPPER": ([2, 2, 7, 6], [2, 1, 4, 3], {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    "SAME_LOWER": ([2, 2, 7, 6], [2, 1, 4, 3], {"auto_pad": "SAME_LOWER"}),
    "VALID": ([2, 2, 7, 6], [2, 1, 3, 3], {"auto_pad": "VALID", "strides": [2, 1]}),
    "empty batch": ([0, 4, 6, 5], [4, 1, 3, 3], {"pads": [1] * 4}),
    "many channels": ([1, 130, 5, 5], [130, 1, 3, 3], {"pads": [1] * 4}),
    # Kernels compute 16 channels at once, transposed in squares of 16 elements.
    "16 channels": ([2, 16, 7, 9], [16, 1, 3, 3], {"pads": [1] * 4, "strides": [2, 2]}),
    "channels of several strips": ([2, 20, 70, 60], [20, 1, 3, 3], {"pads": [1] * 4}),
    "strips of 5x5, strided": ([1, 16, 120, 90], [16, 1, 5, 5], {"pads": [2] * 4, "strides": [2, 2]}),
    "planes smaller than a square": ([3, 19, 3, 3], [19, 1, 3, 3], {"pads": [1] * 4}),
    "small planes and several filters": ([2, 17, 3, 4], [34, 1, 5, 5], {"pads": [2] * 4}),
    "windows of much padding": ([2, 18, 5, 5], [18, 1, 5, 5], {"pads": [2] * 4}),
    "rows of padding": ([2, 17, 4, 5], [17, 1, 1, 3], {"pads": [2, 1, 1, 1]}),
    "rows longer than a sum": ([1, 16, 4, 600], [16, 1, 3, 3], {"pads": [1] * 4}),
    # With few channels, 16 pieces of planes are computed at once.
    "pieces": ([3, 5, 41, 33], [10, 1, 3, 3], {"pads": [1, 2, 0, 1], "dilations": [2, 1]}),
    "pieces, strided": ([2, 3, 61, 50], [3, 1, 5, 5], {"pads": [2] * 4, "strides": [2, 2]}),
    "pieces of a line": ([2, 3, 1500], [3, 1, 7], {"pads": [0, 6], "strides": [2]}),
    "1d of many channels": ([2, 20, 50], [40, 1, 7], {"pads": [3, 3], "strides": [2]}),
    "1d of many channels and strips": ([1, 16, 5001], [16, 1, 3], {"pads": [2, 2], "dilations": [2]}),
}


def random_geometry(seed: int) -> Geometry:
    random = np.random.default_rng(seed)
    rank = int(random.integers(1, 3))
    group = int(random.integers(2, 5) if seed % 3 else random.integers(15, 20))
    kernel = random.integers(1, 8, rank)
    strides, dilations = random.integers(1, 5, rank), random.integers(1, 4, rank)
    pads = random.integers(0, 6, 2 * rank)
    largest = 3000 if rank == 1 and seed % 3 == 0 else 40
    needed = (kernel - 1) * dilations + 1 - pads[:rank] - pads[rank:]
    sizes = np.maximum(1, needed) + random.integers(0, largest, rank)
    attributes = {"strides": strides, "dilations": dilations, "pads": pads}
    return (
        [int(random.integers(1, 4)), group, *sizes.tolist()],
        [group * int(random.integers(1, 4)), 1, *kernel.tolist()],
        {name: value.tolist() for name, value in attributes.items()},
    )


GEOMETRIES = {**CASES, **{f"random {seed}": random_geometry(seed) for seed in range(amount(30, 300))}}


def convolve(x: torch.Tensor, w: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    pads = pads_of(list(x.shape[2:]), list(w.shape[2:]), attributes)
    padded = torch.nn.functional.pad(x, [n for pair in reversed(pads) for n in pair])
    steps = {"stride": attributes.get("strides", 1), "dilation": attributes.get("dilations", 1)}
    return CONVOLUTIONS[x.ndim - 2](padded, w, **steps, groups=x.shape[1])


def make_arrays(geometry: Geometry, dtype: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The inputs, and what PyTorch computes of them in float64."""
    x_shape, w_shape, attributes = geometry
    random = np.random.default_rng(1)
    x, w = (random.standard_normal(shape).astype(dtype) for shape in (x_shape, w_shape))
    b = random.standard_normal(w_shape[0]).astype(dtype)
    tensors = [torch.tensor(array.astype(np.float64), requires_grad=True) for array in (x, w, b)]
    y = convolve(*tensors[:2], attributes) + tensors[2].reshape(-1, *[1] * (x.ndim - 2))
    dy = random.standard_normal(tuple(y.shape)).astype(dtype)
    grads = torch.autograd.grad(y, tensors, torch.tensor(dy.astype(np.float64)))
    results = dict(zip(("dX", "dW", "dB"), (g.numpy() for g in grads), strict=True))
    return {"dY": dy, "X": x, "W": w, "B": b}, {"Y": y.detach().numpy(), **results}


def conv_model(
    geometry: Geometry, dtype: str, *, dynamic: bool = False, bias: bool = True, constant: bool = False
) -> onnx.ModelProto:
    x_shape, w_shape, attributes = geometry
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {"X": [f"x{i}" for i in range(len(x_shape))] if dynamic else x_shape, "W": w_shape}
    if bias:
        shapes["B"] = w_shape[:1]
    node = helper.make_node("Conv", list(shapes), ["Y"], group=x_shape[1], **attributes)
    # Models without gradients are not changed.
    other = helper.make_node("ReluGrad", ["X", "X"], ["Z"], domain="com.microsoft")
    graph = helper.make_graph(
        [node, other],
        "g",
        [helper.make_tensor_value_info(n, element, s) for n, s in shapes.items() if n != "W" or not constant],
        [helper.make_tensor_value_info("Y", element, [f"y{i}" for i in range(len(x_shape))])],
    )
    if constant:
        graph.initializer.append(onnx.numpy_helper.from_array(np.ones(w_shape, dtype), "W"))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def operator_of(model: onnx.ModelProto, kernels: str) -> tuple[str, str]:
    """The operator of the first node in a session."""
    node = prepare_loaded(model, kernels, bodies=False).graph.node[0]
    return node.domain, node.op_type


def grad_model(
    geometry: Geometry, dtype: str, outputs: Any = ("dX", "dW", "dB"), *, dynamic: bool = False
) -> onnx.ModelProto:
    x_shape, w_shape, attributes = geometry
    node = nodes.conv_grad("dY", "X", "W", list(outputs), group=x_shape[1], dtype=dtype, **attributes)
    names = [f"x{i}" for i in range(len(x_shape))]
    return nodes.make_model(
        node, shapes={"X": names if dynamic else x_shape, "W": w_shape}, dtype=np.dtype(dtype)
    )


@support.needs_numba
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolution(name: str, dtype: str) -> None:
    arrays, expected = make_arrays(GEOMETRIES[name], dtype)
    model = conv_model(GEOMETRIES[name], dtype, dynamic=True)
    assert operator_of(model, "auto") == (INTERNAL_DOMAIN, "DepthwiseConv")
    session = ortgrad.InferenceSession(model, kernels="auto")
    feeds = {name: arrays[name] for name in ("X", "W", "B")}
    for _ in range(2):
        assert_close(session.run(None, feeds)[0], expected["Y"].astype(dtype))


@support.needs_numba
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradient(name: str, dtype: str) -> None:
    arrays, expected = make_arrays(GEOMETRIES[name], dtype)
    model = grad_model(GEOMETRIES[name], dtype)
    assert operator_of(model, "auto") == (INTERNAL_DOMAIN, "DepthwiseConvGrad")
    session = ortgrad.InferenceSession(model, kernels="auto")
    feeds = {name: arrays[name] for name in ("dY", "X", "W")}
    for _ in range(2):
        for output, value in zip(("dX", "dW", "dB"), session.run(None, feeds), strict=True):
            assert_close(value, expected[output].astype(dtype))


@pytest.mark.parametrize("kernels", ["python", "onnx"])
@pytest.mark.parametrize("name", CASES)
def test_gradient_in_other_ways(name: str, kernels: str) -> None:
    arrays, expected = make_arrays(GEOMETRIES[name], "float64")
    session = ortgrad.InferenceSession(grad_model(GEOMETRIES[name], "float64"), kernels=kernels)
    results = session.run(None, {name: arrays[name] for name in ("dY", "X", "W")})
    for output, value in zip(("dX", "dW", "dB"), results, strict=True):
        assert_close(value, expected[output])


@pytest.mark.parametrize("kernels", support.KERNELS)
@pytest.mark.parametrize(
    "outputs", [("dX", None, None), (None, "dW", None), (None, None, "dB"), ("dX", None, "dB")]
)
@pytest.mark.parametrize(
    "name", ["3x3", "channels of several strips", "2d of several strips with gaps", "several filters"]
)
def test_some_gradients(name: str, outputs: tuple[str | None, ...], kernels: str) -> None:
    arrays, expected = make_arrays(GEOMETRIES[name], "float32")
    session = ortgrad.InferenceSession(grad_model(GEOMETRIES[name], "float32", outputs), kernels=kernels)
    feeds = {value.name: arrays[value.name] for value in session.get_inputs()}
    for output, value in zip(filter(None, outputs), session.run(None, feeds), strict=True):
        assert_close(value, expected[output].astype(np.float32))


@pytest.mark.parametrize("name", CASES)
def test_the_numpy_kernels(name: str) -> None:
    arrays, expected = make_arrays(GEOMETRIES[name], "float64")
    attributes = {
        "group": len(arrays["W"]) if not arrays["X"].size else arrays["X"].shape[1],
        **GEOMETRIES[name][2],
    }
    assert_close(depthwise_conv(arrays["X"], arrays["W"], arrays["B"], **attributes), expected["Y"])
    results = depthwise_conv_grad(arrays["dY"], arrays["X"], arrays["W"], **attributes)
    for output, value in zip(("dX", "dW", "dB"), results, strict=True):
        assert_close(value, expected[output])


@support.needs_numba
@pytest.mark.parametrize("name", [name for name in GEOMETRIES if name != "empty batch"])
def test_no_kernel_reads_or_writes_outside_its_tensors(name: str) -> None:
    """Numba's checks raise an IndexError; a result that was not written is NaN."""
    arrays, expected = make_arrays(GEOMETRIES[name], "float32")
    attributes = {"group": arrays["X"].shape[1], **GEOMETRIES[name][2]}
    case = Case("DepthwiseConvGrad", {n: arrays[n] for n in ("dY", "X", "W")}, attributes)
    for output, value in zip(("dX", "dW", "dB"), checked_tasks(depthwise_conv_grad, case), strict=True):
        assert_close(value, expected[output].astype(np.float32))
    case = Case("DepthwiseConv", {n: arrays[n] for n in ("X", "W", "B")}, attributes)
    assert_close(checked_tasks(depthwise_conv, case)[0], expected["Y"].astype(np.float32))


@support.needs_numba
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize(
    "name", ["channels of several strips", "planes smaller than a square", "1d of several strips"]
)
def test_results_do_not_depend_on_threads(name: str, threads: int) -> None:
    arrays, _ = make_arrays(GEOMETRIES[name], "float32")
    results = []
    for count in (1, threads):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = count
        session = ortgrad.InferenceSession(
            grad_model(GEOMETRIES[name], "float32"), options, kernels="compiled"
        )
        results.append(session.run(None, {name: arrays[name] for name in ("dY", "X", "W")}))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@support.needs_numba
@pytest.mark.parametrize(
    "name",
    ["3x3", "5x5 strided", "1d", "several filters", "dilated", "windows of much padding", "rows of padding"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["dY", "X", "W"])
def test_numbers_that_are_not_finite(name: str, value: float, where: str) -> None:
    """They go where they go in the NumPy kernels, which follow PyTorch (see test_non_finite)."""
    arrays, _ = make_arrays(GEOMETRIES[name], "float32")
    group, attributes = arrays["X"].shape[1], GEOMETRIES[name][2]
    gradient = ortgrad.InferenceSession(grad_model(GEOMETRIES[name], "float32"), kernels="compiled")
    forward = ortgrad.InferenceSession(conv_model(GEOMETRIES[name], "float32"), kernels="compiled")
    for place in (0, arrays[where].size // 2, arrays[where].size - 1):
        changed = {**arrays, where: arrays[where].copy()}
        changed[where].reshape(-1)[place] = value
        dy, x, w, b = changed.values()
        with np.errstate(invalid="ignore"):
            expected = depthwise_conv_grad(dy, x, w, group=group, **attributes)
            y = depthwise_conv(x, w, b, group=group, **attributes)
        for actual, right in zip(gradient.run(None, {"dY": dy, "X": x, "W": w}), expected, strict=True):
            np.testing.assert_allclose(actual, right, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(forward.run(None, {"X": x, "W": w, "B": b})[0], y, rtol=1e-4, atol=1e-4)


def test_what_has_pieces() -> None:
    for name in ("pieces", "pieces, strided", "pieces of a line", "16 channels", "many channels"):
        x, w, attributes = GEOMETRIES[name]
        attributes = {"auto_pad": "NOTSET", "dilations": None, "strides": None} | attributes
        win = in_two_dimensions(windows(x[2:], w[2:], **attributes))
        planes = Planes(x[0], x[1])
        tables = Division(win).forward(planes), Division(win).backward(True, True, planes)
        assert [table.geometry.pieces > 0 for table in tables] == [name.startswith("pieces")] * 2


@support.needs_numba
def test_several_threads_run_one_session() -> None:
    """They allocate and release memory at the same time."""
    feeds, expected = make_arrays(GEOMETRIES["pieces, strided"], "float32")
    geometry = GEOMETRIES["pieces, strided"]
    session = ortgrad.InferenceSession(conv_model(geometry, "float32"), kernels="compiled")
    given = {name: feeds[name] for name in ("X", "W", "B")}

    def work(_: int) -> bool:
        results = (session.run(["Y"], given)[0] for _ in range(30))
        return all(np.allclose(result, expected["Y"], rtol=1e-4, atol=1e-4) for result in results)

    with ThreadPoolExecutor(6) as workers:
        assert all(workers.map(work, range(6)))


@support.needs_numba
def test_sums_are_accurate() -> None:
    """A long sum of numbers of one sign, in float32."""
    x = np.random.default_rng(0).random((4, 2, 512, 512), dtype=np.float32) + 1
    w, dy = np.ones((2, 1, 1, 1), np.float32), np.full_like(x, 0.1)
    geometry: Geometry = ([4, 2, 512, 512], [2, 1, 1, 1], {})
    session = ortgrad.InferenceSession(grad_model(geometry, "float32"), kernels="compiled")
    _, dw, db = session.run(None, {"dY": dy, "X": x, "W": w})
    wide = dy.astype(np.float64)
    np.testing.assert_allclose(dw.reshape(-1), (wide * x).sum((0, 2, 3)), rtol=3e-7)
    np.testing.assert_allclose(db, wide.sum((0, 2, 3)), rtol=3e-7)


@support.needs_numba
def test_without_a_bias() -> None:
    arrays, expected = make_arrays(CASES["3x3"], "float32")
    session = ortgrad.InferenceSession(conv_model(CASES["3x3"], "float32", bias=False), kernels="compiled")
    y = session.run(None, {"X": arrays["X"], "W": arrays["W"]})[0]
    assert_close(y + arrays["B"].reshape(-1, 1, 1), expected["Y"].astype(np.float32))


def test_what_is_left_to_onnxruntime() -> None:
    depthwise = CASES["3x3"]
    assert operator_of(conv_model(depthwise, "float32", constant=True), "auto") == ("", "Conv")
    assert operator_of(conv_model(depthwise, "float32"), "onnx") == ("", "Conv")
    assert operator_of(conv_model(depthwise, "float32"), "python") == ("", "Conv")
    assert operator_of(conv_model(depthwise, "float16"), "auto") == ("", "Conv")


def test_operators_of_sessions_stay_in_sessions() -> None:
    names = {operator.name for operator in all_operators()}
    internal = [o for o in all_operators(internal=True) if o.domain == INTERNAL_DOMAIN]
    assert {depthwise_conv, depthwise_conv_grad} <= set(internal)
    assert not names & {operator.name for operator in internal}
    model = conv_model(CASES["3x3"], "float32")
    built = ortgrad.build_gradient_model(model, wrt=["X", "W"])
    for saved in (
        built,
        *(ortgrad.prepare(built, kernels=way) for way in WAYS),
    ):
        assert INTERNAL_DOMAIN not in {node.domain for node in saved.graph.node}
    assert find_operator("DepthwiseConv") is None


@support.needs_numba
def test_a_wrong_shape_is_refused_and_the_next_run_works() -> None:
    arrays, expected = make_arrays(CASES["3x3"], "float32")
    session = ortgrad.InferenceSession(conv_model(CASES["3x3"], "float32", dynamic=True), kernels="auto")
    feeds = {name: arrays[name] for name in ("X", "W", "B")}
    for shape in ((2, 4, 6, 6), (2, 5, 0, 0)):
        with pytest.raises(ortgrad.KernelError):
            session.run(None, {**feeds, "X": np.zeros(shape, np.float32)})
    assert_close(session.run(None, feeds)[0], expected["Y"].astype(np.float32))
