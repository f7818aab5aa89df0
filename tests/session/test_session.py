"""ortgrad.InferenceSession behaves as onnxruntime's, and says which kernel failed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto
from support.sessions_of_kernels import chain_model, session

import ortgrad
from ortgrad.runtime import runs
from ortgrad.runtime.bindings import size_of

FEEDS = {"dY": np.float32([1, 2, 3]), "X": np.float32([1, -1, 2])}
BAD = {"dY": np.float32([1, 2, 3]), "X": np.float32([1, -1])}


def test_it_is_an_onnxruntime_session() -> None:
    made = session()
    assert isinstance(made, onnxruntime.InferenceSession)
    assert made.get_providers() == ["CPUExecutionProvider"]
    assert [i.name for i in made.get_inputs()] == ["dY", "X"]


@pytest.mark.parametrize("kernels", ["python", "onnx", "auto"])
@pytest.mark.parametrize("source", ["proto", "bytes", "str", "path"])
def test_models_from_everywhere(tmp_path: Path, source: str, kernels: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(chain_model(), path)
    model = {
        "proto": chain_model(),
        "bytes": path.read_bytes(),
        "str": str(path),
        "path": path,
    }[source]
    (result,) = ortgrad.InferenceSession(model, kernels=kernels).run(None, FEEDS)
    np.testing.assert_array_equal(result, [2, 0, 6])
    ready = ortgrad.prepare(model, kernels=kernels)
    assert isinstance(ready, onnx.ModelProto)


def test_external_data_is_found_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    onnx.save(
        chain_model(),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    monkeypatch.chdir(tmp_path)
    for kernels in ("python", "onnx"):
        made = ortgrad.InferenceSession("weights/model.onnx", kernels=kernels)
        np.testing.assert_array_equal(made.run(None, FEEDS)[0], [2, 0, 6])
    ready = ortgrad.prepare("weights/model.onnx")
    assert ready.graph.initializer[0].data_location == TensorProto.DEFAULT
    (folder / "weights.bin").unlink()
    with pytest.raises(ortgrad.ModelError, match="external data"):
        ortgrad.prepare("weights/model.onnx")


def test_the_callers_model_and_options_stay_usable() -> None:
    model = chain_model()
    before = model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for _ in range(2):
        made = ortgrad.InferenceSession(model, options, kernels="python")
        np.testing.assert_array_equal(made.run(None, FEEDS)[0], [2, 0, 6])
    assert model.SerializeToString() == before


def run_plain(made: ortgrad.InferenceSession, feeds: dict) -> np.ndarray:
    return made.run(["Z"], feeds)[0]


def run_with_options(made: ortgrad.InferenceSession, feeds: dict) -> np.ndarray:
    return made.run(["Z"], feeds, onnxruntime.RunOptions())[0]


def run_ort_values(made: ortgrad.InferenceSession, feeds: dict) -> np.ndarray:
    values = {k: onnxruntime.OrtValue.ortvalue_from_numpy(v) for k, v in feeds.items()}
    return made.run_with_ort_values(["Z"], values)[0].numpy()


def run_binding(made: ortgrad.InferenceSession, feeds: dict) -> np.ndarray:
    binding = made.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("Z")
    made.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0]


def run_async(made: ortgrad.InferenceSession, feeds: dict) -> np.ndarray:
    done = threading.Event()
    got: list = []

    def callback(results: list, data: object, message: str) -> None:
        got.extend((results, data, message))
        done.set()

    made.run_async(["Z"], feeds, callback, "data")
    assert done.wait(60)
    results, data, message = got
    assert data == "data"
    if message:
        raise ortgrad.KernelError("first", "ReluGrad", "", message)
    return results[0]


WAYS = [run_plain, run_with_options, run_ort_values, run_binding, run_async]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("mode", ["ORT_SEQUENTIAL", "ORT_PARALLEL"])
def test_every_way_to_run_reports_a_failing_kernel(way, mode: str) -> None:
    options = onnxruntime.SessionOptions()
    options.execution_mode = getattr(onnxruntime.ExecutionMode, mode)
    made = session(sess_options=options)
    np.testing.assert_array_equal(way(made, FEEDS), [2, 0, 6])
    for _ in range(3):
        with pytest.raises(ortgrad.KernelError, match="first"):
            way(made, BAD)
    np.testing.assert_array_equal(way(made, FEEDS), [2, 0, 6])


def test_kernel_error_tells_everything() -> None:
    with pytest.raises(ortgrad.KernelError) as caught:
        session().run(None, BAD)
    error = caught.value
    assert (error.node, error.operator) == ("first", "ReluGrad")
    assert error.inputs == "dY: float32[3], X: float32[2]"
    assert "does not fit" in error.reason
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.__traceback__ is not None
    assert isinstance(error, ortgrad.OrtgradError)


def test_the_callers_run_options_are_not_terminated() -> None:
    options = onnxruntime.RunOptions()
    made = session()
    with pytest.raises(ortgrad.KernelError):
        made.run(None, BAD, options)
    assert not options.terminate
    np.testing.assert_array_equal(made.run(None, FEEDS, options)[0], [2, 0, 6])


def test_terminate_by_the_caller_is_onnxruntimes_own_error() -> None:
    options = onnxruntime.RunOptions()
    options.terminate = True
    with pytest.raises(Exception, match="terminate") as caught:
        session().run(None, FEEDS, options)
    assert not isinstance(caught.value, ortgrad.OrtgradError)


def test_eight_threads_on_one_session_and_on_many() -> None:
    shared = session()

    def work(seed: int) -> None:
        made = shared if seed % 2 else session()
        generator = np.random.default_rng(seed)
        for i in range(40):
            dy, x = generator.standard_normal((2, 1000)).astype(np.float32)
            if i % 5 == seed % 5:
                with pytest.raises(ortgrad.KernelError):
                    made.run(None, {"dY": dy, "X": x[:-1]})
            else:
                expected = np.where(x > 0, dy * 2, 0)
                np.testing.assert_array_equal(made.run(None, {"dY": dy, "X": x})[0], expected)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_sessions_are_released() -> None:
    made = session()
    made.run(None, FEEDS)
    monitor = weakref.ref(made._monitor)
    del made
    gc.collect()
    assert monitor() is None


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("no/such/model.onnx", "No such file"),
        (b"no model at all", "no ONNX model"),
        (b"", "no ONNX model"),
        (onnx.ModelProto(), "no ONNX model"),
        (3, "not int"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_model(model: object, text: str) -> None:
    for read in (ortgrad.InferenceSession, ortgrad.prepare):
        with pytest.raises(ortgrad.ModelError, match=text):
            read(model)


def test_operators_that_nobody_has() -> None:
    model = chain_model()
    model.graph.node[1].op_type = "Mull"
    model.graph.node[1].domain = "com.example"
    model.graph.node[1].name = "the odd one"
    model.opset_import.add(domain="com.example", version=1)
    with pytest.raises(ortgrad.ModelError, match=r"com\.example::Mull \(node 'the odd one'\)"):
        ortgrad.InferenceSession(model)


def test_unknown_kernels() -> None:
    for read in (ortgrad.InferenceSession, ortgrad.prepare):
        with pytest.raises(ValueError, match="python, onnx, compiled, auto"):
            read(chain_model(), kernels="cuda")


def test_register_takes_session_options() -> None:
    with pytest.raises(TypeError, match="SessionOptions"):
        ortgrad.register("options")


def test_registering_the_library_twice_is_explained() -> None:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(ortgrad.get_library_path())
    with pytest.raises(ortgrad.ModelError, match="registered twice"):
        ortgrad.InferenceSession(chain_model(), options, kernels="python")


def test_quick_runs_need_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of a size that was quick before are; whatever else is given may take long."""
    # On a busy machine, runs of a few elements may take any time.
    monkeypatch.setattr(runs, "_SHORT", float("inf"))
    elsewhere: list[str] = []
    monkeypatch.setattr(
        runs, "call_elsewhere", lambda function, stop: (elsewhere.append("run"), function())[1]
    )

    def count(size: int, way: Callable[[ortgrad.InferenceSession, dict], np.ndarray]) -> int:
        feeds = {"dY": np.ones(size, np.float32), "X": np.ones(size, np.float32)}
        elsewhere.clear()
        np.testing.assert_array_equal(way(made, feeds), np.full(size, 2, np.float32))
        return len(elsewhere)

    for way in (run_plain, run_ort_values, run_binding, run_ort_value_binding):
        made = session()
        assert [count(size, way) for size in (10, 10, 5, 11, 11, 10)] == [1, 0, 0, 1, 0, 0], way.__name__
    monkeypatch.setattr(runs, "_SHORT", 0.0)
    # The first of these is on the main thread, and too long.
    assert [count(10, run_plain) for _ in range(3)] == [0, 1, 1]


def run_ort_value_binding(made: ortgrad.InferenceSession, feeds: dict) -> np.ndarray:
    binding = made.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    binding.bind_output("Z")
    made.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[0]


def test_a_binding_counts_what_is_bound_at_last() -> None:
    binding = session().io_binding()
    assert binding.fed_bytes == 0
    binding.bind_cpu_input("dY", np.ones(3, np.float32))
    binding.bind_cpu_input("dY", np.ones(5, np.float32))
    binding.bind_ortvalue_input("X", onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(2, np.float32)))
    assert binding.fed_bytes == 28
    memory = np.ones(4, np.float32)
    binding.bind_input("X", "cpu", 0, np.float32, [4], memory.ctypes.data)
    assert binding.fed_bytes == 36
    # An element type by its number in ONNX.
    binding.bind_input("X", "cpu", 0, TensorProto.FLOAT, [4], memory.ctypes.data)
    assert binding.fed_bytes is not None and binding.fed_bytes >= 36
    binding.clear_binding_inputs()
    assert binding.fed_bytes == 0


def test_a_sequence_that_is_fed_has_no_size() -> None:
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32))
    assert size_of([value, value]) == 24

    class Sequence:
        def is_tensor(self) -> bool:
            return False

    assert size_of([value, Sequence()]) is None
