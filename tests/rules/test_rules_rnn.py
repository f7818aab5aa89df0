"""Gradients of GRU, LSTM and RNN nodes in built models: PyTorch, finite differences, second derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from support import KERNELS, assert_close
from support.recurrent import (
    FLOATS,
    OPERANDS,
    Case,
    module_parameters,
    plain,
    plain_gradients,
    run_module,
    torch_module,
)

import ortgrad

LINEAR = {"linear_before_reset": 1}
KINDS = [("RNN", None), ("GRU", None), ("GRU", LINEAR), ("LSTM", None), ("LSTM", {"input_forget": 1})]
kinds = pytest.mark.parametrize(("op_type", "own"), KINDS, ids=lambda v: v if isinstance(v, str) else str(v))
op_types = pytest.mark.parametrize("op_type", ["RNN", "GRU", "LSTM"])


def make_model(
    case: Case,
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None = None,
    *,
    opset: int = 18,
    constants: Sequence[str] = (),
    more: Sequence[onnx.NodeProto] = (),
    results: Sequence[str] | None = None,
) -> onnx.ModelProto:
    """The case as one node with symbolic shapes; the inputs in `constants` are initializers."""
    operands = OPERANDS if case.op_type == "LSTM" else OPERANDS[:6]
    names = [name if name in feeds else "" for name in operands]
    outputs = case.outputs if outputs is None else outputs
    attributes = {k: v for k, v in case.attributes.items() if k != "layout" or v}
    node = helper.make_node(case.op_type, names, outputs, name="node", **attributes)

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        shape = [f"{name}_{i}" for i in range(array.ndim)]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)

    element = helper.np_dtype_to_tensor_dtype(feeds["X"].dtype)
    graph = helper.make_graph(
        [node, *more],
        "graph",
        [info(name, array) for name, array in feeds.items() if name not in constants],
        [
            helper.make_tensor_value_info(n, element, None)
            for n in (results if results is not None else outputs)
            if n
        ],
        [numpy_helper.from_array(feeds[name], name) for name in constants],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def gradients(
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    upstream: Mapping[str, np.ndarray],
    wrt: Sequence[str],
    kernels: str = "auto",
) -> dict[str, np.ndarray]:
    """Gradients by the names in `wrt`, and the outputs under their own names."""
    built = ortgrad.build_gradient_model(model, wrt=wrt, of=list(upstream))
    session = ortgrad.InferenceSession(built, kernels=kernels)
    fed = {**feeds, **{f"{name}_grad": seed for name, seed in upstream.items()}}
    known = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    results = session.run(names, {name: array for name, array in fed.items() if name in known})
    return {name.removesuffix("_grad"): value for name, value in zip(names, results, strict=True)}


def check(case: Case, kernels: str = "auto", outputs: Sequence[str] | None = None, **options: Any) -> None:
    feeds = case.feeds(np.float32)
    upstream = {n: a for n, a in case.upstream(np.float32).items() if outputs is None or n in outputs}
    model = make_model(case, feeds, outputs, **options)
    wrt = [n for n in FLOATS if n in feeds]
    actual = gradients(model, feeds, upstream, wrt, kernels)
    expected = plain(case, {n: torch.tensor(a) for n, a in feeds.items()})
    for name in upstream:
        assert_close(actual[name], expected[name].numpy(), 5e-6)
    for name, value in plain_gradients(case, feeds, upstream).items():
        assert_close(actual[name], value, 1e-5)


@kinds
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [None, (2, 4, 0)])
def test_gradient_is_autograds(
    op_type: str, own: Mapping[str, int] | None, direction: str, lengths: Sequence[int] | None
) -> None:
    check(Case("case", op_type, direction=direction, lengths=lengths, own=own))


@kinds
@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_a_row_without_steps_does_not_depend_on_its_initial_state(
    op_type: str, own: Mapping[str, int] | None, direction: str
) -> None:
    """By differences of onnxruntime's own operator, whose states are 0 there."""
    sizes = {"steps": 3, "inputs": 2, "hidden": 2, "lengths": (0, 3, 1)}
    case = Case("empty", op_type, direction=direction, own=own, **sizes)  # type: ignore[arg-type]
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    model = make_model(case, feeds)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def total(h0: np.ndarray) -> float:
        outputs = session.run(list(upstream), {**feeds, "H0": h0.astype(np.float32)})
        return float(
            sum((y.astype(np.float64) * upstream[n]).sum() for n, y in zip(upstream, outputs, strict=True))
        )

    expected = np.zeros(feeds["H0"].shape)
    for place in np.ndindex(*expected.shape):
        step = np.zeros(expected.shape)
        step[place] = 2.0**-7
        expected[place] = (total(feeds["H0"] + step) - total(feeds["H0"] - step)) / 2.0**-6
    assert not expected[:, 0].any()
    for kernels in KERNELS:
        actual = gradients(model, feeds, upstream, ["H0"], kernels)["H0"]
        np.testing.assert_allclose(actual, expected, atol=2e-3)
        assert not actual[:, 0].any()


@kinds
@pytest.mark.parametrize("kernels", KERNELS)
def test_clip(op_type: str, own: Mapping[str, int] | None, kernels: str) -> None:
    case = Case("clip", op_type, direction="bidirectional", lengths=(3, 1, 4), clip=0.6, own=own)
    check(case, kernels)


@op_types
def test_bare(op_type: str) -> None:
    check(Case("bare", op_type, absent=("B", "H0", "C0", "P")))


@pytest.mark.parametrize(
    ("op_type", "outputs"),
    [
        ("RNN", ["Y"]),
        ("RNN", ["", "Y_h"]),
        ("GRU", ["Y"]),
        ("GRU", ["", "Y_h"]),
        ("LSTM", ["Y"]),
        ("LSTM", ["", "Y_h"]),
        ("LSTM", ["", "", "Y_c"]),
        ("LSTM", ["Y", "", "Y_c"]),
    ],
    ids=str,
)
def test_some_outputs(op_type: str, outputs: Sequence[str]) -> None:
    check(Case("some", op_type, direction="reverse", lengths=(3, 4, 1)), outputs=outputs)


@pytest.mark.parametrize(
    ("op_type", "functions"),
    [
        ("RNN", [("Relu", None, None)]),
        ("RNN", [("LeakyRelu", 0.2, None), ("Affine", 0.5, 0.1)]),
        ("RNN", [("ScaledTanh", 1.2, 0.7), ("HardSigmoid", None, None)]),
        ("RNN", [("Softsign", None, None), ("Softplus", None, None)]),
        ("RNN", [("Elu", 0.8, None), ("ThresholdedRelu", 0.1, None)]),
        ("GRU", [("HardSigmoid", 0.3, 0.4), ("Softsign", None, None)]),
        ("LSTM", [("HardSigmoid", 0.3, 0.4), ("Softsign", None, None), ("ScaledTanh", 1.2, 0.7)]),
    ],
    ids=str,
)
def test_activations(op_type: str, functions: Sequence[tuple[str, float | None, float | None]]) -> None:
    both = op_type == "RNN" and len(functions) == 2
    check(Case("functions", op_type, direction="bidirectional" if both else "forward", functions=functions))


@pytest.mark.parametrize("op_type", ["GRU", "LSTM"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_batch_first_and_every_precision(op_type: str, dtype: Any) -> None:
    # onnxruntime's own kernels know neither, but the operators that take their place do.
    case = Case("layout", op_type, layout=1, direction="bidirectional", lengths=(2, 4, 1))
    feeds, upstream = case.feeds(dtype), case.upstream(dtype)
    wrt = [n for n in FLOATS if n in feeds]
    actual = gradients(make_model(case, feeds), feeds, upstream, wrt)
    exact = {n: a.astype(np.float64) if n != "SL" else a for n, a in feeds.items()}
    expected = plain_gradients(case, exact, {n: a.astype(np.float64) for n, a in upstream.items()})
    for name, value in expected.items():
        tolerance = {np.float16: 1e-2, np.float32: 1e-5, np.float64: 1e-12}[dtype]
        assert_close(actual[name], value.astype(dtype), tolerance)


@op_types
@pytest.mark.parametrize("opset", [7, 22])
def test_opsets(op_type: str, opset: int) -> None:
    check(Case("opset", op_type, direction="bidirectional"), opset=opset)


@op_types
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("lengths", [None, (5, 1, 3)])
def test_gradient_is_that_of_pytorchs_module(
    op_type: str, direction: str, lengths: Sequence[int] | None
) -> None:
    own = LINEAR if op_type == "GRU" else None
    case = Case("torch", op_type, steps=5, direction=direction, lengths=lengths, absent=("P",), own=own)
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    module, tensors = torch_module(case, feeds)
    outputs = run_module(case, module, tensors)
    sum((outputs[name] * torch.tensor(up)).sum() for name, up in upstream.items()).backward()
    actual = gradients(make_model(case, feeds), feeds, upstream, [n for n in FLOATS if n in feeds])
    for name, tensor in tensors.items():
        assert_close(actual[name], tensor.grad.numpy(), 1e-5)
    for name, value in module_parameters(case, actual).items():
        assert_close(value, getattr(module, name).grad.numpy(), 1e-5)


@pytest.mark.parametrize(
    ("op_type", "options"),
    [
        ("RNN", {}),
        ("RNN", {"direction": "reverse", "lengths": (2, 3, 0)}),
        ("GRU", {}),
        ("GRU", {"direction": "reverse", "lengths": (2, 3, 0), "own": LINEAR}),
        ("LSTM", {"own": {"input_forget": 1}}),
        ("LSTM", {"direction": "reverse", "lengths": (2, 3, 0)}),
    ],
    ids=str,
)
def test_first_and_second_derivatives_are_differences(op_type: str, options: dict[str, Any]) -> None:
    case = Case("second", op_type, 3, inputs=2, hidden=2, **options)
    feeds = case.feeds(np.float32)
    model = make_model(case, feeds)
    wrt = [n for n in FLOATS if n in feeds]
    ortgrad.check_gradients(model, feeds, wrt=wrt).raise_if_wrong()
    built = ortgrad.build_gradient_model(model, wrt=wrt, of=case.outputs)
    seeds = {f"{name}_grad": array for name, array in case.upstream(np.float32).items()}
    targets, results = [*wrt, *seeds], [f"{name}_grad" for name in wrt]
    ortgrad.check_gradients(built, {**feeds, **seeds}, wrt=targets, of=results).raise_if_wrong()


@op_types
def test_two_layers_share_weights(op_type: str) -> None:
    case = Case("layers", op_type, inputs=4, hidden=4, absent=("H0", "C0", "P", "dY_h", "dY_c"))
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    squeeze = helper.make_node("Squeeze", ["Y", "axes"], ["hidden"])
    axes = helper.make_node("Constant", [], ["axes"], value_ints=[1])
    second = helper.make_node(op_type, ["hidden", "W", "R", "B"], ["Z"], hidden_size=4)
    model = make_model(
        case, feeds, ["Y"], constants=["W", "R", "B"], more=[axes, squeeze, second], results=["Z"]
    )
    actual = gradients(model, {"X": feeds["X"]}, {"Z": upstream["Y"]}, ["X", "W", "R", "B", "Y"])
    tensors = {n: torch.tensor(a, requires_grad=True) for n, a in feeds.items()}
    first = plain(case, tensors)["Y"]
    first.retain_grad()
    last = plain(case, {**tensors, "X": first[:, 0]})["Y"]
    (last * torch.tensor(upstream["Y"])).sum().backward()
    assert_close(actual["Z"], last.detach().numpy(), 5e-6)
    for name, tensor in {**tensors, "Y": first}.items():
        assert_close(actual[name], tensor.grad.numpy(), 1e-5)


@pytest.mark.parametrize("op_type", ["GRU", "LSTM"])
def test_the_forward_node_runs_once(op_type: str) -> None:
    case = Case("once", op_type, absent=("C0", "P"))
    feeds = case.feeds(np.float32)
    built = ortgrad.build_gradient_model(make_model(case, feeds, ["", "Y_h"]), wrt=["X", "W"], of="Y_h")
    # Nodes named after the seed compare it with its output.
    nodes = [node for node in built.graph.node if not node.name.startswith("Y_h_grad/")]
    assert [node.op_type for node in nodes] == [f"{op_type}Training", f"{op_type}Grad"]
    assert [output.name for output in built.graph.output] == ["Y_h", "X_grad", "W_grad"]
    last = next(a.s for a in nodes[1].attribute if a.name == "ortgrad")
    # Nobody asked for the others.
    assert b'"outputs":[1,1,0,0,0' in last


@pytest.mark.parametrize(
    ("op_type", "functions", "text"),
    [
        ("RNN", [("Affine", None, None)], "activation Affine needs a value in activation_alpha"),
        ("RNN", [("LeakyRelu", -0.5, None)], "gradient of activation LeakyRelu with alpha -0.5"),
        ("GRU", [("Sigmoid", None, None), ("Elu", -1.0, None)], "gradient of activation Elu"),
        ("LSTM", [("Sigmoid", None, None), ("Tanh", None, None)], "activations has 2 names"),
    ],
    ids=str,
)
def test_refused(op_type: str, functions: Sequence[tuple[str, Any, Any]], text: str) -> None:
    case = Case("refused", op_type, functions=functions)
    feeds = case.feeds(np.float32)
    with pytest.raises(ortgrad.UnsupportedGradientError) as caught:
        ortgrad.build_gradient_model(make_model(case, feeds), wrt=["X"], of="Y")
    assert text in str(caught.value)
    assert f"{op_type} (domain ai.onnx, opset 18), node 'node'" in str(caught.value)
