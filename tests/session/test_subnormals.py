"""Subnormal numbers are zero where gradients are computed, and the caller's thread is restored."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortgrad
from ortgrad.graph.trials import onnxruntime_errors
from ortgrad.runtime import subnormals

pytestmark = pytest.mark.skipif(
    subnormals.saved() is None, reason="the state of a thread cannot be changed on this platform"
)

TINY = float(np.finfo(np.float32).tiny)
OPTION = "session.set_denormal_as_zero"
# Operators, by the nodes that make y of x.
KINDS = {
    "softmax": "y = Softmax (x)",
    "log-softmax": "y = LogSoftmax (x)",
    "sigmoid": "y = Sigmoid (x)",
    "tanh": "y = Tanh (x)",
    "erf": "y = Erf (x)",
    "gelu": "y = Gelu (x)",
    "layer normalization": "y = LayerNormalization (x, s)",
    "product": "y = MatMul (x, w)",
    "lstm": "z, y, c = LSTM <hidden_size = 8> (x, a, b)",
}


def built(kind: str) -> onnx.ModelProto:
    shape = "5,40,8" if kind == "lstm" else "40,8"
    result = "1,40,8" if kind == "lstm" else "40,8"
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x) => (float[{result}] y)
        <float[8] s, float[8,8] w, float[1,32,8] a, float[1,32,8] b> {{ {KINDS[kind]} }}"""
    )
    del model.graph.initializer[:]
    for name, sizes in {"s": [8], "w": [8, 8], "a": [1, 32, 8], "b": [1, 32, 8]}.items():
        values = rng.uniform(0.1, 0.3, sizes).astype(np.float32) * np.float32(0.1 if name == "w" else 1)
        if any(name in node.input for node in model.graph.node):
            model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return ortgrad.build_gradient_model(model, wrt=["x"], of="y")


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Inputs with which some of the gradients are subnormal, others not."""
    rng = np.random.default_rng(1)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    feeds = {"x": rng.uniform(-2, 2, shapes["x"]).astype(np.float32)}
    rows = np.geomspace(2e-38, 3e-34, 40, dtype=np.float64)[:, None]
    feeds["y_grad"] = (rows * rng.uniform(0.5, 1, shapes["y_grad"])).astype(np.float32)
    return feeds


def options_of(value: str | None, **settings: Any) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    if value is not None:
        options.add_session_config_entry(OPTION, value)
    for name, setting in settings.items():
        setattr(options, name, setting)
    return options


def count_subnormal(array: np.ndarray) -> int:
    return int(np.count_nonzero((np.abs(array) < TINY) & (array.view(np.int32) & 0x7FFFFFFF != 0)))


def flushes() -> bool:
    """Whether this thread flushes subnormal numbers, by what NumPy computes on it."""
    numbers = np.full(64, 1e-30, np.float32)
    return bool((numbers * np.float32(1e-10) == 0).all())


@pytest.mark.parametrize("kernels", ["auto", "onnx", "python"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_subnormal_gradients(kind: str, kernels: Any) -> None:
    model = built(kind)
    feeds = feeds_of(model)
    exact = ortgrad.InferenceSession(model, options_of("0"), kernels=kernels).run(["x_grad"], feeds)[0]
    flushed = ortgrad.InferenceSession(model, kernels=kernels).run(["x_grad"], feeds)[0]
    assert count_subnormal(exact) > 5
    assert count_subnormal(flushed) == 0
    # Terms of a sum may be zero, each of which is less than TINY.
    np.testing.assert_allclose(flushed, exact, rtol=1e-5, atol=100 * TINY)
    assert np.count_nonzero(flushed) > 100
    assert not flushes()


def plain(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)
    prepared = ortgrad.prepare(model, kernels="python")
    return onnxruntime.InferenceSession(prepared.SerializeToString(), options)


def test_kernels_in_plain_sessions() -> None:
    model = built("sigmoid")
    result = plain(model).run(["x_grad"], feeds_of(model))[0]
    assert count_subnormal(result) == 0 and result.any()
    assert not flushes()


def test_blocks_on_threads_of_the_pool() -> None:
    # Large enough for several blocks. The pool of a plain session does not flush by itself.
    model = ortgrad.nodes.make_model(ortgrad.nodes.sigmoid_grad("dY", "Y", "dX"))
    feeds = {"dY": np.full(1 << 20, 2e-38, np.float32), "Y": np.full(1 << 20, 0.5, np.float32)}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    ortgrad.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    for _ in range(3):
        assert not session.run(None, feeds)[0].any()


def run_bound(session: Any, feeds: dict[str, np.ndarray]) -> np.ndarray:
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("x_grad")
    session.run_with_iobinding(binding)
    return np.asarray(binding.copy_outputs_to_cpu()[0])


def run_values(session: Any, feeds: dict[str, np.ndarray]) -> np.ndarray:
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    return np.asarray(session.run_with_ort_values(["x_grad"], values)[0].numpy())


def run_async(session: Any, feeds: dict[str, np.ndarray]) -> np.ndarray:
    done, found = threading.Event(), []

    def finish(results: Any, _: Any, message: str) -> None:
        found.append((results, message))
        done.set()

    session.run_async(["x_grad"], feeds, finish, None)
    assert done.wait(60)
    ((results, message),) = found
    assert not message
    return np.asarray(results[0])


# onnxruntime runs asynchronously in sequential mode only.
WAYS = [
    *((run, mode) for run in (run_bound, run_values) for mode in ("ORT_SEQUENTIAL", "ORT_PARALLEL")),
    (run_async, "ORT_SEQUENTIAL"),
]


@pytest.mark.parametrize(("run", "mode"), WAYS)
def test_ways_to_run(run: Callable[..., np.ndarray], mode: str) -> None:
    model = built("softmax")
    settings = {
        "execution_mode": getattr(onnxruntime.ExecutionMode, mode),
        "intra_op_num_threads": 2,
        "inter_op_num_threads": 2,
    }
    session = ortgrad.InferenceSession(model, options_of(None, **settings), kernels="onnx")
    result = run(session, feeds_of(model))
    assert count_subnormal(result) == 0 and result.any()
    assert not flushes()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("way", ["own", "plain", "other thread", "failing", "creation"])
def test_state_of_the_caller(way: str, before: bool) -> None:
    model = built("tanh")
    feeds = feeds_of(model)
    session = plain(model) if way == "plain" else ortgrad.InferenceSession(model)
    seen: list[bool] = []

    def use() -> None:
        state = subnormals.saved()
        try:
            if before:
                subnormals.flush(state)
            for _ in range(3):  # the first on another thread, since it may be long
                if way == "failing":
                    with pytest.raises(onnxruntime_errors()):
                        session.run(None, {**feeds, "x": feeds["x"][0]})
                elif way == "creation":
                    ortgrad.InferenceSession(model)
                else:
                    session.run(None, feeds)
                seen.append(flushes())
        finally:
            subnormals.restore(state)

    if way == "other thread":
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    else:
        use()
    assert seen == [before] * 3
    assert not flushes()


def test_a_failing_kernel() -> None:
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    session = ortgrad.InferenceSession(model)
    for _ in range(2):
        with pytest.raises(ortgrad.KernelError):
            session.run(None, {"dY": np.ones(3, np.float32), "X": np.ones(2, np.float32)})
        assert not flushes()


def test_models_without_gradients_compute_as_onnxruntime_does() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y) { y = Mul (x, x) }"""
    )
    feeds = {"x": np.full(9, 1e-20, np.float32)}
    assert ortgrad.InferenceSession(model).run(None, feeds)[0].all()
    assert not ortgrad.InferenceSession(model, options_of("1")).run(None, feeds)[0].any()


def test_double_precision() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (double[N] x) => (double[N] y) { y = Mul (x, x) }"""
    )
    session = ortgrad.InferenceSession(ortgrad.build_gradient_model(model, wrt=["x"], of="y"))
    seeds = np.array([1e-40, 1e-300, 1e-310])
    (result,) = session.run(["x_grad"], {"x": np.full(3, 3.0), "y_grad": seeds})
    # What is subnormal in single precision is not in double precision.
    np.testing.assert_allclose(result[:2], 6 * seeds[:2], rtol=1e-9)
    assert result[2] == 0
