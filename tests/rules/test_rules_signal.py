"""The gradient rule of STFT against the transform written out in NumPy, which is linear in both operands."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from support.differences import differences
from support.rules import check_rule, gradients, one_node
from support.sessions import session

import ortgrad


def stft(x: np.ndarray, step: int, window: np.ndarray, onesided: bool) -> np.ndarray:
    """ONNX's STFT of a signal (batch, time), (batch, time, 1) or (batch, time, 2)."""
    z = x if x.ndim == 2 else x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
    length = len(window)
    frames = [z[:, k : k + length] * window for k in range(0, x.shape[1] - length + 1, step)]
    spectrum = np.fft.fft(np.stack(frames, axis=1), axis=-1)
    if onesided:
        spectrum = spectrum[..., : length // 2 + 1]
    return np.stack([spectrum.real, spectrum.imag], axis=-1)


def transposed(
    function: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], seed: np.ndarray
) -> np.ndarray:
    """The gradient of a linear function: the function of every unit vector, times the seed."""
    units = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    return np.array([np.sum(seed * function(unit)) for unit in units]).reshape(shape)


def expected(
    x: np.ndarray, step: int, window: np.ndarray, onesided: bool, seed: np.ndarray
) -> list[np.ndarray]:
    return [
        transposed(lambda unit: stft(unit, step, window, onesided), x.shape, seed),
        transposed(lambda unit: stft(x, step, unit, onesided), window.shape, seed),
    ]


SIGNALS = [(2, 13), (2, 13, 1), (1, 14, 2)]
# Overlapping frames that do and do not divide the length, frames side by side, and frames with gaps.
FRAMES = [(2, 4), (3, 8), (5, 5), (7, 4), (1, 3)]


@pytest.mark.parametrize("shape", SIGNALS, ids=str)
@pytest.mark.parametrize(("step", "length"), FRAMES, ids=str)
@pytest.mark.parametrize("onesided", [0, 1, None])
def test_stft(shape: tuple[int, ...], step: int, length: int, onesided: int | None) -> None:
    random = np.random.default_rng([*shape, step, length])
    x, window = random.standard_normal(shape), random.standard_normal(length)
    half = onesided != 0  # also without the attribute
    y = stft(x, step, window, half)
    seed = random.standard_normal(y.shape)
    dx, dwindow = expected(x, step, window, half, seed)
    attributes = {} if onesided is None else {"onesided": onesided}
    for opset, symbolic, frame_length in ((18, True, True), (21, False, True), (18, False, False)):
        inputs = [x, np.array(step), window] + ([np.array(length)] if frame_length else [])
        model, feeds = one_node("STFT", inputs, attributes, opset=opset, symbolic=symbolic)
        result = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
        np.testing.assert_allclose(result, y, atol=1e-9)
        found = gradients(model, feeds, {"y": seed}, ["a", "c"])
        np.testing.assert_allclose(found["a"], dx, atol=1e-9)
        np.testing.assert_allclose(found["c"], dwindow, atol=1e-9)


@pytest.mark.parametrize("shape", SIGNALS, ids=str)
def test_stft_without_a_window(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(shape)
    x = random.standard_normal(shape).astype(np.float32)
    inputs = [x, np.array(3, np.int32), None, np.array(6, np.int32)]
    seed = random.standard_normal(stft(x, 3, np.ones(6), True).shape).astype(np.float32)
    dx, _ = expected(x, 3, np.ones(6), True, seed)
    for constants in ((), (1, 3)):
        model, feeds = one_node("STFT", inputs, {"onesided": 1}, constants=constants)
        np.testing.assert_allclose(gradients(model, feeds, {"y": seed}, ["a"])["a"], dx, atol=1e-4)


@pytest.mark.parametrize("length", [400, 2048])
def test_stft_of_long_frames(length: int) -> None:
    """onnxruntime's DFT is inaccurate for 400; for 2048 it is what the rule takes."""
    random = np.random.default_rng(length)
    x, window = random.standard_normal((1, 3 * length)), np.hanning(length)
    seed = random.standard_normal(stft(x, length // 2, window, True).shape)
    inputs = [x.astype(np.float32), np.array(length // 2), window.astype(np.float32), np.array(length)]
    model, feeds = one_node("STFT", inputs, {"onesided": 1}, constants=[1, 3])
    found = gradients(model, feeds, {"y": seed.astype(np.float32)}, ["a"])["a"]
    direction = random.standard_normal(x.shape)
    slope = np.sum(seed * stft(direction, length // 2, window, True))
    scale = np.linalg.norm(found) * np.linalg.norm(direction)
    assert abs(np.sum(found * direction) - slope) < 2e-6 * scale
    some = random.integers(0, x.shape[1], 5)
    for i in some:
        unit = np.zeros_like(x)
        unit[0, i] = 1
        exact = np.sum(seed * stft(unit, length // 2, window, True))
        assert abs(found[0, i] - exact) < 3e-6 * np.abs(found).max()


def test_stft_twice() -> None:
    random = np.random.default_rng(0)
    inputs = [random.standard_normal((2, 13, 1)), np.array(3), random.standard_normal(6), np.array(6)]
    check_rule("STFT", inputs, {"onesided": 1}, second=True, symbolic=False)


FRONT_END = """
    <ir_version: 10, opset_import: ["" : 18]>
    front_end ({signal} x) => (float[N, T, 5] y) <int64 step = {{4}}, int64 length = {{16}}> {{
        count = Constant<value_int = 16>()
        window = HannWindow(count)
        spectrum = STFT<onesided = 1>(x, step, window, length)
        squares = Mul(spectrum, spectrum)
        axis = Constant<value_ints = [-1]>()
        power = ReduceSum<keepdims = 0>(squares, axis)
        bands = Constant<value_int = 5>()
        rate = Constant<value_int = 8000>()
        low = Constant<value_float = 100.0>()
        high = Constant<value_float = 4000.0>()
        mel = MelWeightMatrix(bands, count, rate, low, high)
        energy = MatMul(power, mel)
        floor = Constant<value_float = 0.01>()
        above = Add(energy, floor)
        y = Log(above)
    }}
"""


@pytest.mark.parametrize("way", ["auto", "python", "onnx", "plain", "registered"])
@pytest.mark.parametrize("signal", ["float[N, L]", "float[N, L, 1]"])
def test_a_front_end_of_any_length(signal: str, way: str) -> None:
    """onnx infers no shape for an STFT of unknown sizes; the product after it needs the rank."""
    model = onnx.parser.parse_model(FRONT_END.format(signal=signal))
    random = np.random.default_rng(3)
    x = random.standard_normal((2, 50) + (1,) * signal.endswith("1]")).astype(np.float32)
    y = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    seed = random.standard_normal(y.shape).astype(np.float32)
    mel = _mel(model)

    def loss(x: np.ndarray) -> float:
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(16) / 16)
        power = np.sum(stft(x, 4, hann, True) ** 2, axis=-1)
        return float(np.sum(seed * np.log(power @ mel + 0.01)))

    numeric = differences(loss, x.astype(np.float64))
    built = ortgrad.build_gradient_model(model, wrt="x")
    found = session(built, way).run(["x_grad"], {"x": x, "y_grad": seed})[0]
    np.testing.assert_allclose(found, numeric, rtol=1e-3, atol=1e-4 * np.abs(numeric).max())
    assert ortgrad.check_gradients(model, {"x": x}, wrt=["x"]).ok


def _mel(model: onnx.ModelProto) -> np.ndarray:
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.append(onnx.helper.make_tensor_value_info("mel", 1, None))
    x = np.zeros([2, 50] + [1] * (len(model.graph.input[0].type.tensor_type.shape.dim) - 2), np.float32)
    return (
        onnxruntime.InferenceSession(shown.SerializeToString()).run(["mel"], {"x": x})[0].astype(np.float64)
    )
