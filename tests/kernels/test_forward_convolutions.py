"""Dense convolutions in sessions with compiled kernels, against PyTorch in float64."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper
from support import COMPILES, FASTEST, amount, needs_numba
from support.compiled import checked_tasks
from support.forward_convolutions import (
    ACTIVATIONS,
    Geometry,
    case_of,
    conv_model,
    expect,
    make_arrays,
    operators_of,
)
from support.geometries import assert_close, pads_of

import ortgrad
from ortgrad.lowering import forward_convolutions
from ortgrad.operators.declaration import INTERNAL_DOMAIN, find_operator
from ortgrad.ops.conv import winograd
from ortgrad.ops.conv.forward import dense_conv, is_fastest

SAME = {"pads": [1] * 4}

# X, W, attributes. Kernels compute 6 positions of up to 64 filters at once, or 6 filters at 64 positions.
CASES: dict[str, Geometry] = {
    "3x3": ([2, 5, 7, 9], [16, 5, 3, 3], SAME),
    "many filters": ([1, 6, 9, 8], [130, 6, 3, 3], SAME),
    "80 filters": ([2, 3, 9, 8], [80, 3, 3, 3], SAME),
    "many channels": ([1, 70, 6, 6], [32, 70, 3, 3], SAME),
    "many positions": ([2, 3, 40, 37], [64, 3, 3, 3], SAME),
    "few filters": ([2, 5, 9, 20], [3, 5, 3, 3], SAME),
    "few filters, many positions": ([1, 2, 40, 41], [7, 2, 3, 3], SAME),
    "few filters, many channels": ([2, 40, 5, 18], [7, 40, 3, 3], SAME),
    "few filters without padding": ([1, 3, 9, 20], [5, 3, 3, 3], {}),
    "few filters, three dimensions": ([2, 3, 5, 6, 17], [5, 3, 3, 2, 3], {"pads": [1, 0, 1, 1, 1, 1]}),
    "24 filters": ([1, 4, 12, 33], [24, 4, 3, 3], SAME),
    "strided": ([2, 3, 9, 12], [16, 3, 3, 3], {"pads": [1] * 4, "strides": [2, 2]}),
    "7x7 strided": ([1, 3, 19, 22], [20, 3, 7, 7], {"pads": [3] * 4, "strides": [2, 2]}),
    "strides in one dimension": ([1, 3, 9, 12], [5, 3, 3, 3], {"pads": [1] * 4, "strides": [2, 1]}),
    "strides larger than the kernel": ([2, 3, 11, 13], [5, 3, 2, 1], {"strides": [4, 3]}),
    "dilated": ([2, 3, 13, 11], [6, 3, 3, 3], {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "dilated, few filters": ([2, 2, 13, 40], [3, 2, 3, 3], {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "dilated and strided": ([1, 2, 17, 14], [4, 2, 3, 3], {"dilations": [3, 2], "strides": [2, 3]}),
    "asymmetric pads": ([1, 2, 7, 6], [16, 2, 3, 3], {"pads": [0, 2, 1, 0]}),
    "asymmetric pads, few filters": ([1, 2, 7, 30], [2, 2, 3, 3], {"pads": [0, 2, 1, 0]}),
    "pads beyond the kernel": ([1, 2, 3, 3], [3, 2, 2, 2], {"pads": [3, 4, 5, 2], "strides": [2, 1]}),
    "windows of padding only": ([1, 2, 2, 2], [4, 2, 2, 2], {"pads": [6, 6, 6, 6], "strides": [2, 2]}),
    "long rows": ([1, 2, 3, 300], [16, 2, 3, 3], SAME),
    "1x1": ([2, 3, 4, 5], [16, 3, 1, 1], {}),
    "1x1, few filters": ([2, 3, 4, 5], [3, 3, 1, 1], {}),
    "1x1 strided": ([2, 3, 7, 8], [6, 3, 1, 1], {"strides": [2, 2]}),
    "1x1 padded": ([2, 3, 7, 8], [6, 3, 1, 1], {"pads": [1, 0, 2, 1]}),
    "small pictures": ([5, 20, 2, 2], [16, 20, 3, 3], SAME),
    "one position": ([3, 4, 3, 3], [20, 4, 3, 3], {}),
    "groups": ([2, 12, 7, 9], [32, 6, 3, 3], {**SAME, "group": 2}),
    "groups of few filters": ([2, 12, 7, 19], [8, 3, 3, 3], {**SAME, "group": 4}),
    "many groups of few filters": ([1, 18, 5, 6], [18, 2, 3, 3], {**SAME, "group": 9}),
    "groups, strided": ([2, 6, 7, 9], [9, 2, 3, 3], {**SAME, "group": 3, "strides": [2, 2]}),
    "the last filters of groups": ([1, 6, 7, 9], [58, 3, 3, 3], {**SAME, "group": 2, "strides": [2, 2]}),
    "the last filters of several blocks": ([1, 4, 7, 9], [71, 4, 3, 3], {**SAME, "strides": [2, 2]}),
    "1d": ([2, 3, 9], [5, 3, 3], {"pads": [1, 1]}),
    "1d strided": ([2, 3, 200], [33, 3, 15], {"pads": [7, 7], "strides": [2]}),
    "1d dilated": ([1, 3, 300], [16, 3, 3], {"dilations": [5]}),
    "3d": ([1, 3, 5, 6, 7], [16, 3, 3, 3, 3], {"pads": [1] * 6}),
    "3d strided": ([2, 2, 5, 6, 7], [5, 2, 2, 3, 3], {"pads": [1] * 6, "strides": [1, 2, 2]}),
    "large kernel": ([1, 2, 20, 21], [3, 2, 17, 17], {"pads": [8] * 4}),
    "kernel of the size of X": ([2, 3, 4, 5], [20, 3, 4, 5], {}),
    "SAME_UPPER": ([2, 2, 7, 6], [4, 2, 4, 3], {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    "SAME_LOWER": ([2, 2, 7, 6], [16, 2, 4, 3], {"auto_pad": "SAME_LOWER"}),
    "VALID": ([2, 2, 7, 6], [3, 2, 3, 3], {"auto_pad": "VALID", "strides": [2, 1]}),
}


def random_geometry(seed: int) -> Geometry:
    random = np.random.default_rng(seed)
    rank, group = int(random.integers(1, 4)), int(random.integers(1, 4) if seed % 3 == 0 else 1)
    kernel = random.integers(1, 5, rank)
    strides = random.integers(1, 4, rank) if seed % 2 else np.ones(rank, int)
    dilations, pads = random.integers(1, 3, rank), random.integers(0, 4, 2 * rank)
    needed = (kernel - 1) * dilations + 1 - pads[:rank] - pads[rank:]
    sizes = np.maximum(1, needed) + random.integers(0, (200, 24, 8)[rank - 1], rank)
    filters, channels = int(random.choice([1, 3, 6, 16, 21, 40])), int(random.integers(1, 9))
    attributes = {"strides": strides, "dilations": dilations, "pads": pads}
    return (
        [int(random.integers(1, 4)), group * channels, *sizes.tolist()],
        [group * filters, channels, *kernel.tolist()],
        {"group": group, **{name: value.tolist() for name, value in attributes.items()}},
    )


GEOMETRIES = {**CASES, **{f"random {seed}": random_geometry(seed) for seed in range(amount(24, 240))}}


@pytest.fixture(autouse=True)
def _replace_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small convolutions would be left to onnxruntime, and some would get another kernel."""
    monkeypatch.setattr(forward_convolutions, "is_fastest", lambda *_: True)
    monkeypatch.setattr(winograd, "is_fastest", lambda *_: False)


@needs_numba
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float64" if i % 3 == 2 else "float32") for i, name in enumerate(GEOMETRIES)],
)
def test_convolution(name: str, dtype: str) -> None:
    arrays, y = make_arrays(GEOMETRIES[name], dtype)
    model = conv_model(arrays, GEOMETRIES[name][2], dynamic=True)
    assert operators_of(model) == ["DenseConv"]
    session = ortgrad.InferenceSession(model)
    feeds = {name: arrays[name] for name in "XWB"}
    for _ in range(2):
        assert_close(session.run(["Y"], feeds)[0], expect(arrays, y, "", "XWB"))


@needs_numba
@pytest.mark.parametrize("name", ["small pictures", "groups of few filters"])
@pytest.mark.parametrize("inputs", ["XW", "XWZ", "XWBZ"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_merged(name: str, inputs: str, activation: str) -> None:
    arrays, y = make_arrays(GEOMETRIES[name], "float64" if inputs == "XWZ" else "float32")
    model = conv_model(arrays, GEOMETRIES[name][2], activation, inputs)
    assert operators_of(model) == ["DenseConv"]
    result = ortgrad.InferenceSession(model).run(["Y"], {name: arrays[name] for name in inputs})[0]
    assert_close(result, expect(arrays, y, activation, inputs))


@pytest.mark.parametrize("name", CASES)
def test_the_numpy_kernel(name: str) -> None:
    arrays, y = make_arrays(GEOMETRIES[name], "float64")
    for activation in ACTIVATIONS:
        case = case_of(arrays, GEOMETRIES[name][2], activation, "XWBZ")
        result = dense_conv(*case.arrays.values(), **case.attributes)
        assert_close(result, expect(arrays, y, activation, "XWBZ"))


@needs_numba
@pytest.mark.parametrize("name", GEOMETRIES)
def test_no_kernel_reads_or_writes_outside_its_tensors(name: str) -> None:
    """Numba's checks raise an IndexError; a result that was not written is NaN."""
    arrays, y = make_arrays(GEOMETRIES[name], "float32")
    case = case_of(arrays, GEOMETRIES[name][2], "Relu", "XWBZ")
    assert_close(checked_tasks(dense_conv, case)[0], expect(arrays, y, "Relu", "XWBZ"))


@needs_numba
@pytest.mark.parametrize("name", ["many positions", "few filters, many positions", "small pictures"])
def test_results_do_not_depend_on_threads(name: str) -> None:
    arrays, _ = make_arrays(GEOMETRIES[name], "float32")
    results = []
    for count in (1, 2, 5):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = count
        session = ortgrad.InferenceSession(
            conv_model(arrays, GEOMETRIES[name][2], "Relu", "XWBZ"), options, kernels="compiled"
        )
        results.append(session.run(["Y"], arrays)[0])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@needs_numba
@pytest.mark.parametrize(
    ("name", "activation"),
    [("few filters", ""), ("strided", "Relu"), ("small pictures", "LeakyRelu"), ("few filters", "Clip")],
)
def test_numbers_that_are_not_finite(name: str, activation: str) -> None:
    """Products of infinite weights with padding are NaN."""
    arrays, _ = make_arrays(GEOMETRIES[name], "float64")
    session = ortgrad.InferenceSession(conv_model(arrays, GEOMETRIES[name][2], activation, "XWBZ"))
    x_shape, w_shape, attributes = GEOMETRIES[name]
    pads = [n for pair in reversed(pads_of(x_shape[2:], w_shape[2:], attributes)) for n in pair]
    for where, value in itertools.product("XWBZ", (np.nan, np.inf, -np.inf)):
        changed = {**arrays, where: arrays[where].copy()}
        changed[where].reshape(-1)[arrays[where].size // 2] = value
        padded = torch.nn.functional.pad(torch.tensor(changed["X"]), pads)
        # As a product of matrices, in which no product with padding is left out.
        steps = {"stride": attributes.get("strides", 1)}
        columns = torch.nn.functional.unfold(padded, tuple(w_shape[2:]), **steps)
        y = torch.tensor(changed["W"]).reshape(w_shape[0], -1) @ columns
        expected = expect(changed, y.reshape(changed["Z"].shape), activation, "XWBZ")
        np.testing.assert_allclose(session.run(["Y"], changed)[0], expected, rtol=1e-9, atol=1e-9)


@needs_numba
def test_sums_are_accurate() -> None:
    """A long sum of numbers of one sign, in float32."""
    random = np.random.default_rng(0)
    x, w = (random.random(shape, dtype=np.float32) + 1 for shape in ([1, 3000, 4, 4], [16, 3000, 3, 3]))
    arrays, y = {"X": x, "W": w, "Z": np.empty((1, 16, 2, 2), np.float32)}, np.empty((1, 16, 2, 2))
    for i, j in np.ndindex(2, 2):
        y[0, :, i, j] = np.tensordot(w.astype(np.float64), x[0, :, i : i + 3, j : j + 3], 3)
    session = ortgrad.InferenceSession(conv_model(arrays, {}, "", "XW"))
    np.testing.assert_allclose(session.run(["Y"], {"X": x, "W": w})[0], y, rtol=2e-6)


@needs_numba
def test_what_is_not_merged() -> None:
    arrays, _ = make_arrays(CASES["3x3"], "float32")
    # The shapes of what is added up are not known to be equal.
    model = conv_model(arrays, CASES["3x3"][2], "Relu", "XWBZ")
    model.graph.input[3].type.tensor_type.shape.dim[0].dim_param = "n"
    assert operators_of(model)[0] == "DenseConv" and len(operators_of(model)) > 1
    # The result of the convolution is needed elsewhere.
    model = conv_model(arrays, CASES["3x3"][2], "Relu")
    model.graph.output.append(helper.make_tensor_value_info("c", 1, list(arrays["Z"].shape)))
    assert operators_of(model) == ["DenseConv", "Relu"]
    results = ortgrad.InferenceSession(model).run(None, {name: arrays[name] for name in "XWB"})
    np.testing.assert_array_equal(results[0], np.maximum(results[1], 0))


def test_what_is_left_to_onnxruntime() -> None:
    arrays, _ = make_arrays(CASES["3x3"], "float32")
    attributes = CASES["3x3"][2]
    assert operators_of(conv_model(arrays, attributes, constant=True))[0] == "Conv"
    for kernels in ("onnx", "python"):
        assert operators_of(conv_model(arrays, attributes), kernels)[0] == "Conv"
    half = {name: array.astype(np.float16) for name, array in arrays.items()}
    assert operators_of(conv_model(half, attributes))[0] == "Conv"


def test_which_convolutions_are_faster() -> None:
    assert is_fastest((1, 32, 32, 32), (32, 32, 3, 3), 1, None)
    assert is_fastest((1, 96, 40, 40), (24, 96, 3, 3), 1, None)
    assert is_fastest((None, 32, None, None), (64, 32, 3, 3), 1, [2, 2])
    # Products of matrices, for which onnxruntime copies nothing.
    assert not is_fastest((1, 64, 32, 32), (64, 64, 1, 1), 1, None)
    # Many filters, for which W would be transposed for few positions.
    assert is_fastest((1, 64, 32, 32), (256, 64, 3, 3), 1, None)
    assert not is_fastest((1, 256, 4, 4), (256, 256, 3, 3), 1, None)
    # Few products.
    assert not is_fastest((1, 1, 32, 32), (64, 1, 3, 3), 1, None)
    # Much to copy, for few products.
    assert not is_fastest((8, 64, 80, 80), (32, 64, 3, 3), 1, [2, 2])
    assert not is_fastest(None, None, 1, None)
    assert not is_fastest((1, 64, 32, 32), (None, 64, 3, 3), 1, None)


def test_empty_tensors() -> None:
    arrays, _ = make_arrays(CASES["3x3"], "float32")
    session = ortgrad.InferenceSession(conv_model(arrays, CASES["3x3"][2], "Relu", dynamic=True))
    feeds = {**{name: arrays[name] for name in "XWB"}, "X": arrays["X"][:0]}
    assert session.run(["Y"], feeds)[0].shape == (0, *arrays["Z"].shape[1:])


def test_operators_of_sessions_stay_in_sessions() -> None:
    arrays, _ = make_arrays(CASES["3x3"], "float32")
    built = ortgrad.build_gradient_model(conv_model(arrays, CASES["3x3"][2], "Relu"), wrt=["X", "W"])
    for saved in (built, *(ortgrad.prepare(built, kernels=way) for way in ("auto", FASTEST))):
        assert INTERNAL_DOMAIN not in {node.domain for node in saved.graph.node}
        assert "Conv" in {node.op_type for node in saved.graph.node}
    assert find_operator("DenseConv") is None


@pytest.mark.parametrize("kernels", ["auto", "python", "onnx"])
def test_gradients_of_a_model(kernels: str) -> None:
    """Of a residual block, against PyTorch."""
    compiled = COMPILES and kernels == "auto"
    # onnxruntime has no convolution in double precision.
    dtype, tolerance = ("float64", 1e-9) if compiled else ("float32", 1e-4)
    arrays, _ = make_arrays(([2, 16, 6, 7], [16, 16, 3, 3], SAME), dtype)
    model = conv_model(arrays, SAME, "Relu", "XWBZ")
    built = ortgrad.build_gradient_model(model, of="Y", wrt=list("XWBZ"))
    assert ("DenseConv" in operators_of(built, kernels)) == compiled
    dy = np.random.default_rng(2).standard_normal(arrays["Z"].shape).astype(dtype)
    session = ortgrad.InferenceSession(built, kernels=kernels)
    results = session.run([f"{n}_grad" for n in "XWBZ"], {**arrays, "Y_grad": dy})
    tensors = [torch.tensor(arrays[name], requires_grad=True) for name in "XWBZ"]
    x, w, b, z = tensors
    y = torch.relu(torch.nn.functional.conv2d(x, w, b, padding=1) + z)
    for actual, right in zip(results, torch.autograd.grad(y, tensors, torch.tensor(dy)), strict=True):
        np.testing.assert_allclose(actual, right.numpy(), rtol=tolerance, atol=tolerance)


@needs_numba
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"X": (2, 4, 7, 9)}, "X"),
        ({"W": (16, 6, 3, 3)}, "W"),
        ({"B": (15,)}, "B"),
        ({"W": (16, 5, 30, 3)}, "does not fit"),
        ({"X": (2, 5, 0, 0)}, "does not fit"),
    ],
)
def test_a_wrong_shape_is_refused_and_the_next_run_works(
    wrong: dict[str, tuple[int, ...]], message: str
) -> None:
    arrays, _ = make_arrays(CASES["3x3"], "float32")
    model = conv_model(arrays, {}, dynamic=True)
    for value in model.graph.input:
        for i, size in enumerate(value.type.tensor_type.shape.dim):
            size.dim_param = f"{value.name}{i}"
    session = ortgrad.InferenceSession(model)
    feeds = {name: arrays[name] for name in "XWB"}
    bad = {**feeds, **{name: np.ones(shape, np.float32) for name, shape in wrong.items()}}
    shapes = ", ".join(f"{name}: float32{list(array.shape)}" for name, array in bad.items())
    with pytest.raises(ortgrad.KernelError, match=message) as raised:
        session.run(["Y"], bad)
    assert "'conv'" in str(raised.value) and shapes in str(raised.value)
    assert session.run(["Y"], feeds)[0].shape == (2, 16, 5, 7)
