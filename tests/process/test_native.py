"""Kernels on onnxruntime's own memory: no copies, and nothing that outlives the call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from support.scripts import run_script

import ortgrad
from ortgrad.operators.declaration import Empty, Operator, find_operator
from ortgrad.runtime import native

FEEDS = {"dY": np.float32([1, 2, 3]), "X": np.float32([1, -1, 2])}
EXPECTED = [1, 0, 3]


def relu_model() -> onnx.ModelProto:
    return ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX", name="the node"))


def session() -> ortgrad.InferenceSession:
    return ortgrad.InferenceSession(relu_model(), kernels="python")


@pytest.fixture
def relu_grad() -> Iterator[Operator]:
    """The operator, with its own kernel back in place afterwards."""
    operator = find_operator("ReluGrad")
    assert operator is not None
    kernel = operator.kernel
    yield operator
    operator.kernel = kernel


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_kernel_sees_the_memory_that_was_fed(relu_grad: Operator) -> None:
    seen: list[int] = []

    def kernel(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        seen.extend((address(dy), address(x)))
        return dy * (x > 0)

    relu_grad.kernel = kernel
    np.testing.assert_array_equal(session().run(None, FEEDS)[0], EXPECTED)
    assert seen == [address(FEEDS["dY"]), address(FEEDS["X"])]


def test_a_result_in_the_given_memory_is_not_copied(relu_grad: Operator) -> None:
    seen: list[int] = []

    def kernel(dy: np.ndarray, x: np.ndarray, *, empty: Empty) -> np.ndarray:
        dx = empty(0, x.shape)
        seen.append(address(dx))
        dx[...] = dy * (x > 0)
        return dx

    relu_grad.kernel = kernel
    (result,) = session().run(None, FEEDS)
    np.testing.assert_array_equal(result, EXPECTED)
    assert seen == [address(result)]


def test_a_result_elsewhere_is_copied_even_if_memory_was_asked_for(relu_grad: Operator) -> None:
    def kernel(dy: np.ndarray, x: np.ndarray, *, empty: Empty) -> np.ndarray:
        empty(0, x.shape)[...] = 7
        return dy[::-1]

    relu_grad.kernel = kernel
    np.testing.assert_array_equal(session().run(None, FEEDS)[0], [3, 2, 1])


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shapes_and_types(shape: tuple[int, ...], dtype: type) -> None:
    numbers = np.random.default_rng(0)
    dy, x = (numbers.standard_normal(shape).astype(dtype) for _ in range(2))
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"), dtype=np.dtype(dtype).name)
    (dx,) = ortgrad.InferenceSession(model, kernels="python").run(None, {"dY": dy, "X": x})
    assert dx.dtype == dtype
    np.testing.assert_array_equal(dx, np.where(x > 0, dy, 0))


def test_a_kernel_cannot_write_into_its_inputs(relu_grad: Operator) -> None:
    def kernel(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        dy *= 2
        return dy

    made = session()
    own, relu_grad.kernel = relu_grad.kernel, kernel
    with pytest.raises(ortgrad.KernelError, match="read-only"):
        made.run(None, FEEDS)
    np.testing.assert_array_equal(FEEDS["dY"], [1, 2, 3])
    relu_grad.kernel = own
    np.testing.assert_array_equal(made.run(None, FEEDS)[0], EXPECTED)


@pytest.mark.parametrize(
    "kept",
    [
        lambda dy, out: dy,
        lambda dy, out: dy[1:],
        lambda dy, out: dy.reshape(3, 1).T,
        lambda dy, out: out,
        lambda dy, out: memoryview(dy),
        lambda dy, out: memoryview(dy)[1:].cast("B"),
        lambda dy, out: dy.ravel().view(np.int32),
        lambda dy, out: out.__array_interface__ and out.data,
        lambda dy, out: np.lib.stride_tricks.as_strided(dy, (2,), (4,)),
        lambda dy, out: dy.ctypes,
    ],
)
def test_a_kernel_that_keeps_an_array_is_told_so(
    relu_grad: Operator, kept: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> None:
    shelf: list[np.ndarray] = []

    def kernel(dy: np.ndarray, x: np.ndarray, *, empty: Empty) -> np.ndarray:
        dx = empty(0, x.shape)
        dx[...] = dy
        shelf.append(kept(dy, dx))
        return dx

    made = session()
    own, relu_grad.kernel = relu_grad.kernel, kernel
    with pytest.raises(ortgrad.KernelError, match="keep a copy"):
        made.run(None, FEEDS)
    relu_grad.kernel = own
    np.testing.assert_array_equal(made.run(None, FEEDS)[0], EXPECTED)


def test_the_base_of_an_array_is_of_no_use_afterwards(relu_grad: Operator) -> None:
    shelf: list[object] = []

    def kernel(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        shelf.append(dy.base)
        return dy * (x > 0)

    relu_grad.kernel = kernel
    np.testing.assert_array_equal(session().run(None, FEEDS)[0], EXPECTED)
    with pytest.raises(TypeError):
        memoryview(shelf[0])
    with pytest.raises(ValueError, match="__array_interface__"):
        np.asarray(shelf[0])


def test_copies_may_be_kept_and_cycles_are_no_offence(relu_grad: Operator) -> None:
    shelf: list[np.ndarray] = []

    def kernel(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        shelf.append(dy.copy())

        def count_down(n: int) -> np.ndarray:
            return count_down(n - 1) if n else dy * (x > 0)

        return count_down(3)

    relu_grad.kernel = kernel
    np.testing.assert_array_equal(session().run(None, FEEDS)[0], EXPECTED)
    np.testing.assert_array_equal(shelf[0], FEEDS["dY"])


def test_what_a_debugger_finds_in_a_failure_is_no_borrowed_memory(relu_grad: Operator) -> None:
    def kernel(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        view = dy[1:]
        try:
            return view / 0 if view.size > 9 else np.reshape(view, (7, 7))
        except ValueError as error:
            raise LookupError("no such shape") from error

    relu_grad.kernel = kernel
    with pytest.raises(ortgrad.KernelError, match="LookupError: no such shape") as caught:
        session().run(None, FEEDS)
    found = []
    reason: BaseException | None = caught.value
    while reason is not None:
        trace = reason.__traceback__
        while trace is not None:
            for value in trace.tb_frame.f_locals.values():
                arrays = value if isinstance(value, (list, tuple)) else [value]
                found += [a for a in arrays if isinstance(a, np.ndarray)]
            trace = trace.tb_next
        reason = reason.__cause__ or reason.__context__
    assert any(np.array_equal(array, [2, 3]) for array in found)
    for array in found:
        while isinstance(array.base, np.ndarray):
            array = array.base
        assert array.base is None, "a view of memory that is gone"


def test_a_failure_that_does_not_repeat_is_still_a_failure(relu_grad: Operator) -> None:
    calls: list[int] = []

    def kernel(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("only once")
        return dy.copy()

    relu_grad.kernel = kernel
    with pytest.raises(ortgrad.KernelError, match="OSError: only once"):
        session().run(None, FEEDS)


def test_more_memory_than_there_is(relu_grad: Operator) -> None:
    def kernel(dy: np.ndarray, x: np.ndarray, *, empty: Empty) -> np.ndarray:
        return empty(0, (1 << 30, 1 << 20))

    made = session()
    own, relu_grad.kernel = relu_grad.kernel, kernel
    with pytest.raises(ortgrad.KernelError):
        made.run(None, FEEDS)
    relu_grad.kernel = own
    np.testing.assert_array_equal(made.run(None, FEEDS)[0], EXPECTED)


def test_what_goes_wrong_around_a_kernel_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise MemoryError("nothing left")

    made = session()
    with monkeypatch.context() as patch:
        patch.setattr(native._Kernel, "_run", run)
        with pytest.raises(Exception, match="MemoryError around a kernel of ortgrad"):
            made.run(None, FEEDS)
    np.testing.assert_array_equal(made.run(None, FEEDS)[0], EXPECTED)


def test_kernels_end_with_their_session() -> None:
    made = session()
    made.run(None, FEEDS)
    (kernel,) = made._monitor.kernels
    kernels = [weakref.ref(kernel)]
    del kernel, made
    gc.collect()
    assert kernels[0]() is None


def test_session_options_can_be_used_again_for_other_operators() -> None:
    options = onnxruntime.SessionOptions()
    first = ortgrad.InferenceSession(relu_model(), options, kernels="python")
    ones = np.ones(2, np.float32)
    for node in (ortgrad.nodes.tanh_grad("a", "b", "z"), ortgrad.nodes.bias_gelu_grad_dx("a", "b", "c", "z")):
        made = ortgrad.InferenceSession(ortgrad.nodes.make_model(node), options, kernels="python")
        assert np.isfinite(made.run(None, dict.fromkeys(node.input, ones))[0]).all()
    np.testing.assert_array_equal(first.run(None, FEEDS)[0], EXPECTED)


def test_a_saved_model_has_portable_nodes(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    made = ortgrad.InferenceSession(relu_model(), options, kernels="python")
    np.testing.assert_array_equal(made.run(None, FEEDS)[0], EXPECTED)
    saved = onnx.load(tmp_path / "optimized.onnx")
    assert [(node.domain, node.op_type) for node in saved.graph.node] == [("com.microsoft", "ReluGrad")]


def test_where_the_library_is_another_auto_does_without_it() -> None:
    script = """
        import numpy as np, ortgrad
        from ortgrad.runtime import extensions as dispatch
        dispatch._native_address = lambda definition: id(definition)
        model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
        session = ortgrad.InferenceSession(model)
        print(session.run(None, {"dY": np.float32([1, 2]), "X": np.float32([-1, 1])})[0].tolist())
        try:
            ortgrad.InferenceSession(model, kernels="python")
        except ortgrad.RegistrationError as error:
            print("kernels='onnx'" in str(error))
    """
    assert run_script(script) == ["[0.0, 2.0]", "True"]


def test_the_end_of_the_interpreter_is_quiet() -> None:
    """Sessions in globals and in cycles end after most of Python has."""
    script = """
        import sys
        import numpy as np, ortgrad
        model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
        session = ortgrad.InferenceSession(model, kernels="python")
        sys.kept = [ortgrad.InferenceSession(model, kernels="python")]
        sys.kept.append(sys.kept)
        ones = np.ones(3, np.float32)
        print([s.run(None, {"dY": ones, "X": ones})[0].tolist() for s in (session, sys.kept[0])])
    """
    assert run_script(script) == ["[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]"]
