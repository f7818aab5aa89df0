"""The meeting point with onnxruntime-extensions: foreign operators, failures, declared outputs."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnxruntime_extensions import PyCustomOpDef, onnx_op

import ortgrad
from ortgrad import dispatch
from ortgrad.registry import find_operator


@onnx_op(op_type="test.foreign::Twice", inputs=[PyCustomOpDef.dt_float], outputs=[PyCustomOpDef.dt_float])
def twice(x: np.ndarray) -> np.ndarray:
    return x * 2


def relu_grad_then_twice() -> onnx.ModelProto:
    nodes = [
        ortgrad.nodes.relu_grad("dY", "X", "dX"),
        helper.make_node("Twice", ["dX"], ["Z"], domain="test.foreign"),
    ]
    graph = helper.make_graph(
        nodes,
        "mixed",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N"]) for n in ("dY", "X")],
        [helper.make_tensor_value_info("Z", TensorProto.FLOAT, ["N"])],
    )
    opsets = [helper.make_opsetid(d, v) for d, v in (("", 21), ("com.microsoft", 1), ("test.foreign", 1))]
    return ortgrad.prepare(helper.make_model(graph, opset_imports=opsets, ir_version=10), kernels="python")


FEEDS = {"dY": np.float32([1, 2, 3]), "X": np.float32([1, -1, 2])}


def plain_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def test_foreign_operator_in_the_same_session() -> None:
    session = ortgrad.InferenceSession(relu_grad_then_twice(), kernels="python")
    np.testing.assert_array_equal(session.run(None, FEEDS)[0], [2, 0, 6])


def test_another_invoker_gets_the_foreign_calls_only() -> None:
    seen = []

    def invoker(op_id: int, feed: list, attributes: dict) -> tuple:
        seen.append(op_id)
        return op_id, feed[0].shape, feed[0] * 10

    before = dispatch._previous
    PyCustomOpDef.install_hooker(invoker)
    try:
        (result,) = plain_session(relu_grad_then_twice()).run(None, FEEDS)
    finally:
        dispatch._previous = before
    np.testing.assert_array_equal(result, [10, 0, 30])
    assert len(seen) == 1


def test_install_is_idempotent() -> None:
    dispatch.install()
    dispatch.install()
    session = ortgrad.InferenceSession(relu_grad_then_twice(), kernels="python")
    np.testing.assert_array_equal(session.run(None, FEEDS)[0], [2, 0, 6])


def test_python_kernels_run_when_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = find_operator("ReluGrad")
    assert operator is not None
    calls = []
    kernel = operator.kernel
    monkeypatch.setattr(
        operator, "kernel", lambda dy, x, empty: calls.append(dy.shape) or kernel(dy, x, empty=empty)
    )
    model = ortgrad.nodes.make_model(
        ortgrad.nodes.relu_grad("dY", "X", "dX"), shapes={"X": ["N"], "dY": ["N"]}
    )

    unregistered = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(unregistered.run(None, FEEDS)[0], [1, 0, 3])
    assert calls == []

    np.testing.assert_array_equal(plain_session(model).run(None, FEEDS)[0], [1, 0, 3])
    assert calls == [(3,)]


def test_plain_session_gets_nan_and_a_log_record(caplog: pytest.LogCaptureFixture) -> None:
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX", name="my node"))
    session = plain_session(model)
    with caplog.at_level(logging.ERROR, logger="ortgrad"):
        (result,) = session.run(None, {"dY": np.ones((2, 3), np.float32), "X": np.ones((4, 3), np.float32)})
    assert result.shape == (4, 3)
    assert np.isnan(result).all()
    (record,) = caplog.records
    for part in (
        "my node",
        "ReluGrad",
        "dY: float32[2, 3]",
        "X: float32[4, 3]",
        "the shapes must be dY [*S], X [*S]",
    ):
        assert part in record.getMessage()
    np.testing.assert_array_equal(session.run(None, FEEDS)[0], [1, 0, 3])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda dy, x: dy.astype(np.int32), "int32 where float32 is declared"),
        (lambda dy, x: dy[:-1], r"shape \(2,\) where \(3,\) is declared"),
        (lambda dy, x: (dy, x), "2 outputs, not 1"),
        (lambda dy, x: dy.tolist(), "list where float32 is declared"),
        (lambda dy, x: None, "NoneType where float32 is declared"),
        (lambda dy, x: 1 // 0, "ZeroDivisionError"),
        (lambda dy, x: np.zeros(1 << 50), "Memory"),
    ],
)
def test_a_kernel_cannot_return_what_is_not_declared(
    monkeypatch: pytest.MonkeyPatch, wrong: object, reason: str
) -> None:
    operator = find_operator("ReluGrad")
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    session = ortgrad.InferenceSession(model, kernels="python")
    with monkeypatch.context() as patch:
        patch.setattr(operator, "kernel", wrong)
        with pytest.raises(ortgrad.KernelError, match=reason):
            session.run(None, FEEDS)
    np.testing.assert_array_equal(session.run(None, FEEDS)[0], [1, 0, 3])


def test_a_strided_result_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = find_operator("ReluGrad")
    monkeypatch.setattr(operator, "kernel", lambda dy, x: dy[::-1])
    session = ortgrad.InferenceSession(
        ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX")), kernels="python"
    )
    np.testing.assert_array_equal(session.run(None, FEEDS)[0], [3, 2, 1])


def test_keyboard_interrupt_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    operator = find_operator("ReluGrad")
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    monkeypatch.setattr(operator, "kernel", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ortgrad.InferenceSession(model, kernels="python").run(None, FEEDS)
    session = plain_session(model)
    with pytest.raises(KeyboardInterrupt):
        assert np.isnan(session.run(None, FEEDS)[0]).all()
        for _ in range(1000):
            threading.Event().wait(0.01)


def test_an_unreadable_attribute_is_an_error() -> None:
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "ortgrad":
            attribute.s = b"{not json"
    with pytest.raises(ortgrad.NodeError, match="cannot be read"):
        ortgrad.InferenceSession(model, kernels="python")
    (result,) = plain_session(model).run(None, FEEDS)
    assert np.isnan(result).all()


def test_the_stock_invoker_serves_our_operators_too() -> None:
    """If somebody takes the invoker's place, ortgrad's kernels still neither raise nor go wrong."""
    script = """
        import numpy as np, onnxruntime, ortgrad
        from ortgrad import dispatch
        from onnxruntime_extensions import _ocos
        model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
        options = onnxruntime.SessionOptions()
        ortgrad.register(options)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        dispatch._install_hooker(_ocos._on_pyop_invocation)
        ones = np.ones(3, np.float32)
        print(session.run(None, {"dY": ones, "X": ones})[0].tolist())
        print(session.run(None, {"dY": ones, "X": np.ones(4, np.float32)})[0].tolist())
    """
    assert run_script(script) == ["[1.0, 1.0, 1.0]", "[nan, nan, nan, nan]"]


def test_declaring_an_operator_under_a_running_session_is_refused() -> None:
    """The library would move the operators that live sessions run on: a crash, found by measuring."""
    script = """
        import numpy as np, onnxruntime, ortgrad
        ortgrad.get_library_path()

        @ortgrad.operator("LateGrad", inputs=["dY"], outputs=["dX"], shapes="dY")
        def late_grad(dy):
            return dy

        try:
            ortgrad.register(onnxruntime.SessionOptions())
        except ortgrad.RegistrationError as error:
            print("declare operators before the first session" in str(error))
    """
    assert run_script(script) == ["True"]


def test_an_operator_from_outside() -> None:
    script = """
        import numpy as np, onnxruntime, ortgrad

        @ortgrad.operator("SquareGrad", domain="my.domain", inputs=["dY", "X"], outputs=["dX"], shapes="X")
        def square_grad(dy, x):
            '''dX = 2 * dY * X'''
            return 2 * dy * x

        @square_grad.onnx
        def _(op, dy, x):
            return op.Mul(op.Mul(dy, x), 2.0)

        model = ortgrad.nodes.make_model(ortgrad.nodes.square_grad("dY", "X", "dX"))
        feeds = {"dY": np.float32([1, 2]), "X": np.float32([3, 4])}
        for kernels in ("python", "onnx"):
            print(ortgrad.InferenceSession(model, kernels=kernels).run(None, feeds)[0].tolist())
        print(onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0].tolist())
    """
    assert run_script(script) == ["[6.0, 16.0]"] * 3


def run_script(script: str) -> list[str]:
    """A process of its own for what changes the process."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")[:-1]
