"""The choice of kernels by the execution providers of a session."""

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest

import ortgrad
from ortgrad.graph.protos import all_nodes
from ortgrad.runtime import providers as choice
from ortgrad.runtime import session as sessions

CPU, AZURE = "CPUExecutionProvider", "AzureExecutionProvider"
OTHERS = [
    "OpenVINOExecutionProvider",
    "CUDAExecutionProvider",
    "TensorrtExecutionProvider",
    "ROCMExecutionProvider",
    "DmlExecutionProvider",
    "CoreMLExecutionProvider",
    "XnnpackExecutionProvider",
    "DnnlExecutionProvider",
    "QNNExecutionProvider",
    "WebGpuExecutionProvider",
]
MODEL = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[N, 3, 8, 8] x, float[4, 3, 3, 3] w) => (float loss) {
        c = Conv<pads = [1, 1, 1, 1]>(x, w)
        r = Relu(c)
        t = Tanh(r)
        u = Mul(t, r)
        p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(u)
        loss = ReduceMean<keepdims = 0>(p)
    }"""


@pytest.fixture(scope="module")
def backward() -> onnx.ModelProto:
    return ortgrad.build_gradient_model(onnx.parser.parse_model(MODEL), wrt=["x", "w"])


def prepared_nodes(monkeypatch, backward, available, **arguments) -> list[onnx.NodeProto]:
    """Return the nodes that reach onnxruntime, as if its wheel had the `available` providers."""
    written = []

    def create(self, model, *rest, **keywords):
        written.append(model)

    monkeypatch.setattr(choice.onnxruntime, "get_available_providers", lambda: available)
    monkeypatch.setattr(sessions.InferenceSession, "_create", create)
    ortgrad.InferenceSession(backward, **arguments)
    return list(all_nodes(onnx.load_from_string(written[0]).graph.node))


def own(nodes: list[onnx.NodeProto]) -> set[str]:
    """Return the operators of nodes that only ortgrad's kernels run."""
    return {node.op_type for node in nodes if node.domain not in ("", "ai.onnx")}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_provider_counts(monkeypatch, name):
    monkeypatch.setattr(choice.onnxruntime, "get_available_providers", lambda: [name, AZURE, CPU])
    for given in ([name, CPU], [name], [(name, {"device_id": "0"}), CPU], [AZURE, name, CPU]):
        assert choice.kernels_for("auto", given, None) == "onnx", given


@pytest.mark.parametrize("given", [OTHERS[:1], [(OTHERS[0], {"device_type": "CPU"}), CPU]], ids=str)
def test_another_provider_gets_standard_operators(monkeypatch, backward, given):
    nodes = prepared_nodes(monkeypatch, backward, [OTHERS[0], AZURE, CPU], providers=given)
    assert own(nodes) == set()


@pytest.mark.parametrize(
    "given",
    [
        None,
        [],
        [CPU],
        [(CPU, {})],
        [AZURE, CPU],
        [CPU, "OpenVINOExecutionProvider"],
        ["NoSuchExecutionProvider", CPU],
        ["CUDAExecutionProvider", CPU],  # not in the wheel
    ],
    ids=str,
)
def test_the_cpu_keeps_its_kernels(monkeypatch, given):
    available = ["OpenVINOExecutionProvider", AZURE, CPU]
    monkeypatch.setattr(choice.onnxruntime, "get_available_providers", lambda: available)
    assert choice.kernels_for("auto", given, None) == "auto"


def test_the_cpu_gets_nodes_of_its_kernels(monkeypatch, backward):
    assert own(prepared_nodes(monkeypatch, backward, [AZURE, CPU], providers=[AZURE, CPU]))


@pytest.mark.parametrize("kernels", ["python", "compiled"])
def test_kernels_that_were_asked_for_stay(monkeypatch, backward, kernels):
    if kernels == "compiled":
        pytest.importorskip("numba")
    nodes = prepared_nodes(monkeypatch, backward, OTHERS, providers=[OTHERS[0], CPU], kernels=kernels)
    assert own(nodes)


def test_providers_of_the_options_count(monkeypatch, backward):
    monkeypatch.setattr(onnxruntime.SessionOptions, "has_providers", lambda self: True)
    nodes = prepared_nodes(monkeypatch, backward, [CPU], sess_options=onnxruntime.SessionOptions())
    assert own(nodes) == set()


def test_every_provider_of_the_wheel_runs(backward):
    feeds = {"x": np.ones((2, 3, 8, 8), np.float32), "w": np.ones((4, 3, 3, 3), np.float32)}
    expected = ortgrad.InferenceSession(backward, kernels="onnx").run(None, feeds)
    for providers in (onnxruntime.get_available_providers(), ["NoSuchExecutionProvider", CPU]):
        with warnings.catch_warnings():
            # onnxruntime's own warning about a name that it does not know.
            warnings.simplefilter("ignore", UserWarning)
            session = ortgrad.InferenceSession(backward, providers=providers)
        for result, want in zip(session.run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-7)
