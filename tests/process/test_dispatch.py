"""The meeting point with onnxruntime-extensions: foreign operators, failures, declared outputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from onnxruntime_extensions import PyCustomOpDef, _ocos, onnx_op
from support.scripts import run_script

import ortgrad
from ortgrad.operators.declaration import find_operator


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

    PyCustomOpDef.install_hooker(invoker)
    try:
        (result,) = plain_session(relu_grad_then_twice()).run(None, FEEDS)
    finally:
        PyCustomOpDef.install_hooker(_ocos._on_pyop_invocation)
    np.testing.assert_array_equal(result, [10, 0, 30])
    assert len(seen) == 1


@pytest.fixture(autouse=True)
def no_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the tests replace are Python kernels; a registered session prefers compiled ones."""
    monkeypatch.setattr(find_operator("ReluGrad"), "compiled_kernel", None)


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


def test_a_failure_in_a_plain_session_is_an_exception_of_onnxruntime() -> None:
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX", name="my node"))
    session = plain_session(model)
    with pytest.raises(Fail) as caught:
        session.run(None, {"dY": np.ones((2, 3), np.float32), "X": np.ones((4, 3), np.float32)})
    for part in (
        "my node",
        "ReluGrad",
        "dY: float32[2, 3]",
        "X: float32[4, 3]",
        "the shapes must be dY [*S], X [*S]",
    ):
        assert part in str(caught.value)
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
        session.run(None, FEEDS)


HOSTILE = [
    b"{not json",
    b"\xff\xfe\x00",
    b"",
    b"null",
    b"[]",
    b"[" * 100_000,
    b'{"node": 1, "attributes": {}, "inputs": [1, 1], "outputs": [1]}',
    b'{"node": "n", "attributes": [], "inputs": [1, 1], "outputs": [1]}',
    b'{"node": "n", "attributes": {"alpha": 1}, "inputs": [1, 1], "outputs": [1]}',
    b'{"node": "n", "attributes": {}, "inputs": [1], "outputs": [1]}',
    b'{"node": "n", "attributes": {}, "inputs": [1, 0], "outputs": [1]}',
    b'{"node": "n", "attributes": {}, "inputs": [1, 1], "outputs": [0]}',
    b'{"node": "n", "attributes": {}, "inputs": [[], {}], "outputs": [1]}',
    b'{"node": "n", "attributes": {}, "inputs": "11", "outputs": [1]}',
]
HARMLESS = [
    b'{"node": "n", "attributes": {}, "inputs": [1, 1], "outputs": [1], "session": []}',
    b'{"node": "n", "attributes": {}, "inputs": [1, 1], "outputs": [1], "session": {}}',
    b'{"node": "n", "attributes": {}, "inputs": [1, 1], "outputs": [1], "session": 94563629540416}',
]


def model_with_attribute(text: bytes) -> onnx.ModelProto:
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    (attribute,) = (a for a in model.graph.node[0].attribute if a.name == "ortgrad")
    attribute.s = text
    return model


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_attribute_is_an_error(text: bytes) -> None:
    model = model_with_attribute(text)
    for kernels in ("python", "onnx", "auto"):
        with pytest.raises(ortgrad.ModelError):
            ortgrad.InferenceSession(model, kernels=kernels)
    with pytest.raises(Fail, match=r"ReluGrad node '\(unknown\)' failed|has no|speaks of"):
        plain_session(model).run(None, FEEDS)


@pytest.mark.parametrize("text", HARMLESS)
def test_what_the_attribute_holds_besides_is_not_read(text: bytes) -> None:
    model = model_with_attribute(text)
    for session in (ortgrad.InferenceSession(model, kernels="python"), plain_session(model)):
        np.testing.assert_array_equal(session.run(None, FEEDS)[0], [1, 0, 3])


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [UnspeakableError, UnspeakableError(1), StopIteration(), GeneratorExit()])
def test_failures_that_are_hard_to_report(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def kernel(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
        raise error

    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    own, plain = ortgrad.InferenceSession(model, kernels="python"), plain_session(model)
    with monkeypatch.context() as patch:
        patch.setattr(find_operator("ReluGrad"), "kernel", kernel)
        failures = (GeneratorExit,) if isinstance(error, GeneratorExit) else (ortgrad.KernelError, Fail)
        for session in (own, plain):
            with pytest.raises(failures):
                session.run(None, FEEDS)
    for session in (own, plain):
        np.testing.assert_array_equal(session.run(None, FEEDS)[0], [1, 0, 3])


def test_the_package_of_the_library_is_not_imported() -> None:
    """It imports PyTorch where that is installed, which takes seconds."""
    script = """
        import sys
        import numpy as np, ortgrad
        model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
        ones = np.ones(3, np.float32)
        session = ortgrad.InferenceSession(model, kernels="python")
        session.run(None, {"dY": ones, "X": ones})
        print("torch" in sys.modules, "onnxruntime_extensions" in sys.modules)
        import onnxruntime_extensions  # later, by somebody else
        from onnxruntime_extensions import PyOrtFunction
        print(session.run(None, {"dY": ones, "X": ones})[0].tolist())
    """
    assert run_script(script) == ["False False", "[1.0, 1.0, 1.0]"]


FOREIGN = """
    import numpy as np, onnxruntime
    from onnx import helper, TensorProto

    def declare(name):
        from onnxruntime_extensions import PyCustomOpDef, onnx_op

        @onnx_op(op_type=name, inputs=[PyCustomOpDef.dt_float], outputs=[PyCustomOpDef.dt_float])
        def foreign(x):
            return x + 1

    def session(options):
        node = helper.make_node("Foreign", ["x"], ["y"], domain="com.microsoft")
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy"]
        graph = helper.make_graph([node], "g", values[:1], values[1:])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return onnxruntime.InferenceSession(model.SerializeToString(), options)
"""


def test_a_foreign_operator_in_our_domain_before_us() -> None:
    script = """
        declare("com.microsoft::Foreign")
        import ortgrad
        options = onnxruntime.SessionOptions()
        ortgrad.register(options)
        print(session(options).run(None, {"x": np.zeros(2, np.float32)})[0].tolist())
    """
    assert run_script(FOREIGN, script) == ["[1.0, 1.0]"]


def test_a_foreign_session_on_our_domain_before_us() -> None:
    script = """
        declare("com.microsoft::Foreign")
        from onnxruntime_extensions import get_library_path
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(get_library_path())
        foreign = session(options)
        import ortgrad
        try:
            ortgrad.register(onnxruntime.SessionOptions())
        except ortgrad.RegistrationError as error:
            print("before the first session" in str(error))
        print(foreign.run(None, {"x": np.zeros(2, np.float32)})[0].tolist())
    """
    assert run_script(FOREIGN, script) == ["True", "[1.0, 1.0]"]


@pytest.mark.parametrize("first", ["import ortgrad", "import onnxruntime_extensions, ortgrad"])
def test_a_foreign_operator_in_our_domain_after_us(first: str) -> None:
    script = f"""
        {first}
        ortgrad.register(onnxruntime.SessionOptions())
        try:
            declare("com.microsoft::Foreign")
        except ortgrad.RegistrationError as error:
            print("before the first session" in str(error))
        declare("com.example::Foreign")
    """
    assert run_script(FOREIGN, script) == ["True"]


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
