"""LSTMTraining and LSTMGrad against onnxruntime's LSTM, PyTorch and finite differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from support import (
    BODIES,
    COMPILES,
    FASTEST,
    KERNELS,
    amount,
    assert_close,
    directional_derivative,
    run_node,
    symbolic_shapes,
)
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
from ortgrad import nodes
from ortgrad.ops.recurrent.lstm import lstm_training

TOLERANCE = {np.dtype(np.float32): 5e-6, np.dtype(np.float64): 1e-12}
SAVED = ("HAll", "CAll", "iofc")
# The gradient's inputs by the names of the outputs that they belong to.
UPSTREAM = {"Y": "dHAll", "Y_h": "dHFinal", "Y_c": "dCFinal"}


def lstm(name: str, **options: Any) -> Case:
    return Case(name, "LSTM", **options)


DIRECTIONS = ("forward", "reverse", "bidirectional")
PLAIN = {"absent": ("P",)}
FORGET = {"own": {"input_forget": 1}}
CASES = [
    *(
        lstm(
            "-".join([direction, *(["lengths"] if lengths else []), *(["plain"] if absent else [])]),
            direction=direction,
            lengths=lengths,
            absent=absent,
        )
        for direction in DIRECTIONS
        for lengths in (None, (2, 4, 0))
        for absent in ((), ("P",))
    ),
    lstm("batch-first", layout=1, lengths=(3, 1, 4), **PLAIN),
    lstm("batch-first-bidirectional", layout=1, direction="bidirectional"),
    lstm("clip", clip=0.6, **PLAIN),
    lstm("clip-peepholes", clip=0.6, direction="bidirectional", lengths=(4, 1, 3)),
    lstm("clip-no-bias", clip=0.5, direction="reverse", absent=("B", "P")),
    lstm("input-forget", **FORGET, direction="bidirectional", lengths=(2, 4, 3)),
    lstm("input-forget-clip", **FORGET, clip=0.7, absent=("P",)),
    lstm("bare", absent=("B", "H0", "C0", "P")),
    lstm("only-states", absent=("dY_h", "dY_c", "P")),
    lstm("only-final-state", absent=("dY", "dY_c"), direction="reverse"),
    lstm("only-final-cell", absent=("dY", "dY_h"), lengths=(0, 3, 4)),
    lstm("no-gradient", absent=("dY", "dY_h", "dY_c")),
    lstm("no-gradient-plain", absent=("dY", "dY_h", "dY_c", "P")),
    lstm("only-final-plain", absent=("dY", "H0", "P"), direction="bidirectional"),
    *(
        # More columns than a panel of the compiled kernel has, and more rows than one of its tasks.
        lstm(
            f"large-{direction}-{layout}",
            steps=3,
            batch=23,
            inputs=7,
            hidden=hidden,
            direction=direction,
            layout=layout,
            **PLAIN,
        )
        for direction, layout, hidden in (("forward", 1, 33), ("reverse", 0, 64), ("bidirectional", 0, 45))
    ),
    lstm("batch-first-plain", layout=1, direction="bidirectional", **PLAIN),
    lstm("one-step-one-row", steps=1, batch=1, direction="bidirectional"),
    lstm("ones", steps=1, batch=1, inputs=1, hidden=1),
    lstm("long", steps=30, batch=2, inputs=3, hidden=4, lengths=(30, 17), **PLAIN),
    lstm("all-empty-rows", lengths=(0, 0, 0), direction="bidirectional"),
    lstm("full-lengths", lengths=(4, 4, 4), direction="reverse"),
    lstm(
        "functions",
        functions=[("HardSigmoid", 0.3, 0.4), ("Softsign", None, None), ("scaledtanh", 1.2, 0.7)],
        direction="reverse",
    ),
    lstm(
        "functions-bidirectional-clip",
        functions=[
            ("Sigmoid", None, None),
            ("LeakyRelu", 0.3, None),
            ("Softplus", None, None),
            ("Softsign", None, None),
            ("Elu", 0.8, None),
            ("Affine", 0.5, 0.1),
        ],
        direction="bidirectional",
        clip=1.5,
    ),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
kernels_ = pytest.mark.parametrize("kernels", KERNELS)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def forward(case: Case, feeds: Mapping[str, np.ndarray], kernels: str) -> dict[str, np.ndarray]:
    names = [name if name in feeds else None for name in OPERANDS]
    dtype = feeds["X"].dtype
    return run_node(nodes.lstm_training(*names, dtype=dtype, **case.attributes), feeds, kernels)


def saved(case: Case, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of LSTMGrad that LSTMTraining makes, straight from its kernel."""
    made = lstm_training(*(feeds.get(name) for name in OPERANDS), **case.attributes)
    return {name: np.ascontiguousarray(made[place]) for name, place in zip(SAVED, (0, 3, 4), strict=True)}


def gradients(
    case: Case,
    feeds: Mapping[str, np.ndarray],
    upstream: Mapping[str, np.ndarray],
    kernels: str,
    outputs: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """The gradients by the inputs' names; `feeds` holds what LSTMTraining saved too."""
    fed = {**feeds, **{UPSTREAM[name]: array for name, array in upstream.items()}}
    if case.clip is None:
        fed.pop("B", None)
    inputs = ("X", "W", "R", "SL", "H0", "C0", *SAVED, *UPSTREAM.values(), "B", "P")
    names = [name if name in fed else None for name in inputs]
    wanted = outputs or [n for n in FLOATS if n in feeds]
    made = [f"d{n}" if n in wanted else None for n in FLOATS]
    node = nodes.lstm_grad(*names, made, dtype=feeds["X"].dtype, **case.attributes)
    return {name[1:]: array for name, array in run_node(node, fed, kernels).items()}


def check(case: Case, dtype: Any, kernels: str) -> None:
    feeds, upstream = case.feeds(dtype), case.upstream(dtype)
    actual = gradients(case, {**feeds, **saved(case, feeds)}, upstream, kernels)
    expected = plain_gradients(case, feeds, upstream)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, TOLERANCE[np.dtype(dtype)])


@cases
def test_forward_is_onnxruntimes(case: Case) -> None:
    feeds = case.feeds(np.float32)
    # onnxruntime's LSTM knows layout 0 only.
    swapped = {n: a.swapaxes(0, 1).copy() for n, a in feeds.items() if n in ("X", "H0", "C0") and case.layout}
    fed = {**feeds, **swapped}
    info = helper.make_tensor_value_info
    attributes = {k: v for k, v in case.attributes.items() if k != "layout"}
    names = [name if name in feeds else "" for name in OPERANDS]
    graph = helper.make_graph(
        [helper.make_node("LSTM", names, case.outputs, **attributes)],
        "lstm",
        [info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in fed.items()],
        [info(n, 1, None) for n in case.outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, fed)
    actual = forward(case, feeds, "python")
    for name, value in zip(("HAll", "HFinal", "CFinal"), expected, strict=True):
        if case.layout:
            value = value.transpose(2, 0, 1, 3) if value.ndim == 4 else value.swapaxes(0, 1)
        # onnxruntime's sigmoid and tanh are rational approximations.
        assert_close(actual[name], np.ascontiguousarray(value), 5e-6)


@cases
@pytest.mark.parametrize("kernels", ["onnx", FASTEST])
def test_forward_is_the_plain_one(case: Case, kernels: str) -> None:
    feeds = case.feeds(np.float64)
    expected = plain(case, {n: torch.tensor(a) for n, a in feeds.items()})
    actual = forward(case, feeds, kernels)
    for name, value in zip(("HAll", "HFinal", "CFinal"), expected.values(), strict=True):
        assert_close(actual[name], value.numpy(), 1e-12)


@cases
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("python", np.float64),
        *((kernels, dtype) for kernels in ("onnx", FASTEST) for dtype in (np.float32, np.float64)),
    ],
)
def test_gradient_is_autograds(case: Case, kernels: str, dtype: Any) -> None:
    check(case, dtype, kernels)


@cases
def test_gradient_is_the_finite_difference(case: Case) -> None:
    feeds, upstream = case.feeds(np.float64), case.upstream(np.float64)
    actual = gradients(case, {**feeds, **saved(case, feeds)}, upstream, "python")
    names = [n for n in FLOATS if n in feeds]
    rng = np.random.default_rng(2)
    directions = [rng.standard_normal(feeds[n].shape) for n in names]

    def loss(*arguments: np.ndarray) -> float:
        outputs = plain(case, {n: torch.tensor(a) for n, a in zip(names, arguments, strict=True)})
        return sum(float((outputs[n].numpy() * up).sum()) for n, up in upstream.items())

    # A kink between the two points of a difference would spoil it, so the step is small.
    scale = 1e-3
    expected = directional_derivative(loss, [feeds[n] for n in names], [scale * d for d in directions])
    product = sum(float((actual[n] * d).sum()) for n, d in zip(names, directions, strict=True))
    assert scale * product == pytest.approx(expected, rel=1e-4, abs=1e-9)


@kernels_
@dtypes
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("lengths", [None, (5, 1, 3)])
def test_gradient_is_that_of_pytorchs_lstm(
    kernels: str, dtype: Any, direction: str, lengths: Sequence[int] | None
) -> None:
    case = lstm("torch", steps=5, direction=direction, lengths=lengths, **PLAIN)
    feeds, upstream = case.feeds(dtype), case.upstream(dtype)
    module, tensors = torch_module(case, feeds)
    outputs = run_module(case, module, tensors)
    sum((outputs[name] * torch.tensor(up)).sum() for name, up in upstream.items()).backward()
    actual = gradients(case, {**feeds, **saved(case, feeds)}, upstream, kernels)
    tolerance = TOLERANCE[np.dtype(dtype)]
    for name, tensor in tensors.items():
        assert_close(actual[name], tensor.grad.numpy(), tolerance)
    for name, value in module_parameters(case, actual).items():
        assert_close(value, getattr(module, name).grad.numpy(), tolerance)


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    steps, batch = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, steps), min_size=batch, max_size=batch)
    optional = ["B", "H0", "C0", "P", "dY", "dY_h", "dY_c"]
    return lstm(
        "any",
        steps=steps,
        batch=batch,
        inputs=draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, 5)),
        direction=draw(st.sampled_from(DIRECTIONS)),
        layout=draw(st.integers(0, 1)),
        clip=draw(st.sampled_from([None, 0.5])),
        lengths=draw(st.none() | lengths),
        absent=draw(st.lists(st.sampled_from(optional), max_size=3, unique=True)),
        own={"input_forget": draw(st.integers(0, 1))},
    )


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=amount(25, 500), deadline=None, derandomize=True)
@given(case=any_case())
def test_gradient_for_any_shape(case: Case, kernels: str) -> None:
    check(case, np.float64, kernels)


@kernels_
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_padding_does_not_matter(kernels: str, direction: str) -> None:
    case = lstm("padding", direction=direction, lengths=(2, 0, 4), clip=0.8)
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    made = saved(case, feeds)
    expected = gradients(case, {**feeds, **made}, upstream, kernels)
    over = np.arange(case.steps)[:, None] >= np.array(case.lengths)
    feeds["X"][over] = np.nan
    assert_close(forward(case, feeds, kernels)["HAll"], made["HAll"], 1e-6)
    for array in (*made.values(), upstream["Y"]):
        array.swapaxes(1, 2)[over] = np.nan
    actual = gradients(case, {**feeds, **made}, upstream, kernels)
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-6)
    assert not actual["X"][over].any()


@kernels_
@pytest.mark.parametrize("wanted", FLOATS)
def test_each_output_alone(kernels: str, wanted: str) -> None:
    case = lstm("alone", direction="bidirectional")
    feeds, upstream = case.feeds(np.float64), case.upstream(np.float64)
    actual = gradients(case, {**feeds, **saved(case, feeds)}, upstream, kernels, [wanted])
    assert list(actual) == [wanted]
    assert_close(actual[wanted], plain_gradients(case, feeds, upstream)[wanted], 1e-12)


@kernels_
def test_gradients_towards_what_is_left_out(kernels: str) -> None:
    case = lstm("zeros", direction="bidirectional", layout=1, **PLAIN)
    feeds, upstream = case.feeds(np.float64), case.upstream(np.float64)
    for name in ("B", "H0", "C0"):
        feeds[name][:] = 0
    expected = plain_gradients(case, feeds, upstream)
    made = saved(case, feeds)
    for name in ("B", "H0", "C0"):
        del feeds[name]
    actual = gradients(case, {**feeds, **made}, upstream, kernels, list(expected))
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-12)


@kernels_
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_rows(kernels: str, direction: str) -> None:
    case = lstm("empty", direction=direction, batch=0)
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    made = forward(case, feeds, kernels)
    assert made["iofc"].shape == (case.steps, case.directions, 0, 4 * case.hidden)
    actual = gradients(case, {**feeds, **{n: made[n] for n in SAVED}}, upstream, kernels)
    for name, value in actual.items():
        assert value.shape == feeds[name].shape
        assert not value.any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_precision(direction: str) -> None:
    case = lstm("half", direction=direction, lengths=(4, 2, 3), clip=1.0)
    half = case.feeds(np.float16)
    full = {n: a.astype(np.float32) if a.dtype == np.float16 else a for n, a in half.items()}
    made = {n: a.astype(np.float16) for n, a in saved(case, full).items()}
    actual = forward(case, half, "onnx")
    for name, value in made.items():
        assert_close(actual[name], value, 1e-2)
    upstream = case.upstream(np.float16)
    exact = {n: a.astype(np.float32) for n, a in made.items()}
    expected = gradients(
        case, {**full, **exact}, {n: a.astype(np.float32) for n, a in upstream.items()}, "onnx"
    )
    for name, value in gradients(case, {**half, **made}, upstream, "onnx").items():
        assert_close(value, expected[name].astype(np.float16), 1e-2)


WRONG = {
    "X": ((4, 3), "does not fit"),
    "W": ((1, 24, 4), "W [1, 24, 4] does not fit"),
    "R": ((1, 18, 6), "R [1, 18, 6] does not fit"),
    "B": ((1, 24), "B [1, 24] does not fit"),
    "H0": ((1, 1, 6), "Ht0 [1, 1, 6] does not fit"),
    "C0": ((1, 3, 1), "Ct0 [1, 3, 1] does not fit"),
    "P": ((1, 6), "P [1, 6] does not fit"),
    "HAll": ((4, 1, 1, 6), "HAll ["),
    "CAll": ((4, 1, 3, 1), "CAll ["),
    "iofc": ((4, 1, 3, 6), "iofc ["),
    "Y": ((1, 1, 3, 6), "dHAll ["),
    "Y_h": ((1, 1, 6), "dHFinal ["),
    "Y_c": ((1, 3, 5), "dCFinal ["),
}


@pytest.mark.parametrize("name", WRONG)
@kernels_
def test_wrong_shapes(name: str, kernels: str) -> None:
    case = lstm("wrong", clip=1.0)
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    feeds |= saved(case, feeds)
    shape, text = WRONG[name]
    (upstream if name in upstream else feeds)[name] = np.zeros(shape, np.float32)
    errors: Any = ortgrad.OrtgradError
    if kernels in BODIES:
        state = onnxruntime.capi.onnxruntime_pybind11_state
        errors = (ortgrad.OrtgradError, state.Fail, state.InvalidArgument, state.RuntimeException)
    with pytest.raises(errors) as caught:
        gradients(case, feeds, upstream, kernels)
    assert kernels in BODIES or text in str(caught.value)


@pytest.mark.parametrize("lengths", [(2,), (1, 5, 2), (1, -1, 2)], ids=str)
@kernels_
def test_wrong_lengths(lengths: Sequence[int], kernels: str) -> None:
    case = lstm("wrong")
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    feeds |= {**saved(case, feeds), "SL": np.array(lengths, np.int32)}
    state = onnxruntime.capi.onnxruntime_pybind11_state
    errors = (ortgrad.KernelError, state.Fail, state.InvalidArgument, state.RuntimeException)
    with pytest.raises(errors):
        gradients(case, feeds, upstream, kernels)


@kernels_
def test_peephole_gradients_need_the_peepholes(kernels: str) -> None:
    # onnxruntime-training's node has no P, and leaves out what flows through the peepholes.
    case = lstm("peepholes")
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    feeds |= saved(case, feeds)
    del feeds["P"]
    with pytest.raises(ortgrad.OrtgradError, match="dP is asked for, but there is no P"):
        gradients(case, feeds, upstream, kernels, list(FLOATS))


@kernels_
@pytest.mark.parametrize("clip", [None, 0.8])
def test_peepholes_of_a_foreign_pair_are_found(kernels: str, clip: float | None) -> None:
    case = lstm("foreign", clip=clip, absent=("dY_c",))
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    names = [name if name in feeds else "" for name in OPERANDS]
    training = [*SAVED[:1], "HFinal", "CFinal", *SAVED[1:]]
    given = ["X", "W", "R", "", "H0", "C0", *SAVED, "dHAll", "dHFinal"]
    made = ["dX", "dW", "dR", "dB", "dH0", "dC0"]
    info = helper.make_tensor_value_info
    fed = {**feeds, **{UPSTREAM[name]: array for name, array in upstream.items()}}
    attributes = {k: v for k, v in case.attributes.items() if k != "layout"}
    graph = helper.make_graph(
        [
            helper.make_node("LSTMTraining", names, training, domain="com.microsoft", **attributes),
            helper.make_node("LSTMGrad", given, made, domain="com.microsoft", **attributes),
        ],
        "foreign",
        [info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in fed.items()],
        [info(n, 1, None) for n in made],
    )
    opsets = [helper.make_opsetid("", 15), helper.make_opsetid("com.microsoft", 1)]
    session = ortgrad.InferenceSession(
        helper.make_model(graph, opset_imports=opsets, ir_version=8), kernels=kernels
    )
    expected = plain_gradients(case, feeds, upstream)
    for name, value in zip(made, session.run(made, fed), strict=True):
        assert_close(value, expected[name[1:]], 1e-5)


def test_a_saved_model_needs_no_library() -> None:
    case = lstm("saved", direction="bidirectional", lengths=(3, 1, 4), layout=1, clip=0.9)
    feeds, upstream = case.feeds(np.float64), case.upstream(np.float64)
    fed = {**feeds, **saved(case, feeds), **{UPSTREAM[n]: a for n, a in upstream.items()}}
    names = ("X", "W", "R", "SL", "H0", "C0", *SAVED, *UPSTREAM.values(), "B", "P")
    node = nodes.lstm_grad(*names, dtype=np.float64, **case.attributes)
    model = nodes.make_model(node, shapes=symbolic_shapes(fed), dtype=np.float64)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = plain_gradients(case, feeds, upstream)
    for output, value in zip(session.get_outputs(), session.run(None, fed), strict=True):
        assert_close(value, expected[output.name[1:]], 1e-12)


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"activations": ["Sigmoid", "Tanh"]}, "activations has 2 names; there must be 3"),
        ({"activations": ["Sigmoid", "Tanh", "Gelu"]}, "activation 'Gelu' is unknown"),
        (
            {"activations": ["Sigmoid", "Tanh", "LeakyRelu"], "activation_alpha": [-1.0]},
            "the gradient of activation LeakyRelu with alpha -1.0",
        ),
        ({"clip": -1.0}, "clip is -1.0; it must be positive"),
    ],
    ids=str,
)
@kernels_
def test_wrong_attributes(attributes: dict[str, Any], text: str, kernels: str) -> None:
    case = lstm("wrong")
    feeds = case.feeds(np.float32)
    feeds |= {**saved(case, feeds), "dHAll": case.upstream(np.float32)["Y"]}
    del feeds["B"]
    with pytest.raises(ortgrad.OrtgradError) as caught:
        node = nodes.lstm_grad(
            "X", "W", "R", None, "H0", "C0", *SAVED, "dHAll", None, None, None, "P", **attributes
        )
        run_node(node, feeds, kernels)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("x", "hidden", "lengths", "compiled"),
    [
        (["T", "N", 3], 4, False, True),
        ([20, 1, 3], 256, False, True),
        # R would be copied to be multiplied once.
        ([1, 1, 3], 256, False, False),
        ([1, 1, 3], 16, False, True),
        # The compiled kernel does not support lengths.
        (["T", "N", 3], 4, True, False),
    ],
    ids=str,
)
def test_auto(x: list[int | str], hidden: int, lengths: bool, compiled: bool) -> None:
    shapes = {"X": x, "W": [1, 4 * hidden, 3], "R": [1, 4 * hidden, hidden]}
    shapes |= {"SL": [x[1]]} if lengths else {}
    names = ["X", "W", "R", None, "SL" if lengths else None]
    model = nodes.make_model(nodes.lstm_training(*names, hidden_size=hidden), shapes=shapes)
    found = {node.op_type for node in ortgrad.prepare(model, kernels="auto").graph.node}
    assert ("LSTMTraining" in found) == (compiled and COMPILES)
