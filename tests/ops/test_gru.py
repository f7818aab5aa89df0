"""GRUTraining and GRUGrad against onnxruntime's GRU, PyTorch and finite differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from support import BODIES, KERNELS, amount, assert_close, directional_derivative, run_node, symbolic_shapes
from support.recurrent import FUNCTIONS

import ortgrad
from ortgrad import nodes
from ortgrad.ops.recurrent.gru import gru_training

INPUTS = ("X", "W", "R", "B", "H0")
TOLERANCE = {np.dtype(np.float32): 5e-6, np.dtype(np.float64): 1e-12, np.dtype(np.float16): 1e-2}


@dataclass
class Case:
    """Sizes, attributes and which optional inputs there are; `functions` are (name, alpha, beta)."""

    name: str
    steps: int = 4
    batch: int = 3
    inputs: int = 5
    hidden: int = 6
    direction: str = "forward"
    linear_before_reset: int = 0
    layout: int = 0
    clip: float | None = None
    lengths: Sequence[int] | None = None
    absent: Sequence[str] = ()
    functions: Sequence[tuple[str, float | None, float | None]] = ()

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def attributes(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "direction": self.direction,
            "linear_before_reset": self.linear_before_reset,
            "layout": self.layout,
            "hidden_size": self.hidden,
        }
        if self.clip is not None:
            result["clip"] = self.clip
        if self.functions:
            result["activations"] = [name for name, _, _ in self.functions]
            for key, place in (("activation_alpha", 1), ("activation_beta", 2)):
                values = [function[place] for function in self.functions if function[place] is not None]
                result.update({key: values} if values else {})
        return result

    def feeds(self, dtype: Any, seed: int = 0) -> dict[str, np.ndarray]:
        """Inputs in the case's layout, without the absent ones."""
        rng = np.random.default_rng(seed)
        d, h = self.directions, self.hidden
        shapes = {
            "X": (self.steps, self.batch, self.inputs),
            "W": (d, 3 * h, self.inputs),
            "R": (d, 3 * h, h),
            "B": (d, 6 * h),
            "H0": (d, self.batch, h),
        }
        feeds = {name: (0.7 * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
        if self.lengths is not None:
            feeds["SL"] = np.array(self.lengths, np.int32)
        if self.layout:
            feeds |= {name: np.ascontiguousarray(feeds[name].swapaxes(0, 1)) for name in ("X", "H0")}
        return {name: array for name, array in feeds.items() if name not in self.absent}

    def upstream(self, dtype: Any) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1)
        d, h = self.directions, self.hidden
        all_ = rng.standard_normal((self.steps, d, self.batch, h)).astype(dtype)
        final = rng.standard_normal((d, self.batch, h)).astype(dtype)
        if self.layout:
            all_, final = all_.transpose(2, 0, 1, 3), final.swapaxes(0, 1)
        result = {"dHAll": np.ascontiguousarray(all_), "dHFinal": np.ascontiguousarray(final)}
        return {name: array for name, array in result.items() if name not in self.absent}


DIRECTIONS = ("forward", "reverse", "bidirectional")
CASES = [
    *(
        Case(
            f"{direction}{'-linear' if linear else ''}{'-lengths' if lengths else ''}",
            direction=direction,
            linear_before_reset=linear,
            lengths=lengths,
        )
        for direction in DIRECTIONS
        for linear in (0, 1)
        for lengths in (None, (2, 4, 0))
    ),
    *(
        Case(
            f"batch-first-{direction}",
            direction=direction,
            layout=1,
            lengths=(3, 1, 4),
            linear_before_reset=linear,
        )
        for linear, direction in enumerate(("forward", "bidirectional"))
    ),
    *(
        Case(
            f"clip-{direction}-{linear}",
            direction=direction,
            clip=0.6,
            linear_before_reset=linear,
            lengths=lengths,
        )
        for direction, linear, lengths in (
            ("forward", 0, None),
            ("reverse", 1, (4, 2, 3)),
            ("bidirectional", 0, (1, 4, 2)),
        )
    ),
    Case("no-bias-no-state", absent=("B", "H0", "dHAll")),
    Case("no-bias-linear", linear_before_reset=1, absent=("B", "dHFinal")),
    Case("no-bias-clip", linear_before_reset=1, absent=("B", "dHFinal"), clip=0.6, direction="reverse"),
    Case("no-gradient", absent=("dHAll", "dHFinal")),
    *(
        # More columns than a panel of the compiled kernel has, and more rows than one of its tasks.
        Case(
            f"large-{direction}-{linear}-{layout}",
            steps=3,
            batch=23,
            inputs=7,
            hidden=hidden,
            direction=direction,
            linear_before_reset=linear,
            layout=layout,
        )
        for linear in (0, 1)
        for direction, layout, hidden in (("forward", 1, 33), ("reverse", 0, 64), ("bidirectional", 0, 45))
    ),
    Case("batch-first-plain", layout=1, direction="bidirectional", linear_before_reset=1),
    Case("one-step-one-row", steps=1, batch=1, direction="bidirectional"),
    Case("ones", steps=1, batch=1, inputs=1, hidden=1),
    Case("long", steps=30, batch=2, inputs=3, hidden=4, lengths=(30, 17)),
    Case("all-empty-rows", lengths=(0, 0, 0), direction="bidirectional"),
    Case("full-lengths", lengths=(4, 4, 4), direction="reverse"),
    *(
        Case(
            f"functions-{functions[0][0]}-{functions[1][0]}",
            functions=functions,
            linear_before_reset=linear,
            direction="bidirectional" if len(functions) == 4 else "reverse",
            clip=1.5 if linear else None,
        )
        for linear, functions in (
            (0, [("HardSigmoid", None, None), ("Softsign", None, None)]),
            (1, [("Sigmoid", None, None), ("LeakyRelu", 0.3, None)]),
            (0, [("hardsigmoid", 0.3, 0.4), ("SCALEDTANH", 1.2, 0.7)]),
            (1, [("Softsign", None, None), ("Elu", 0.8, None)]),
            (0, [("Sigmoid", None, None), ("Softplus", None, None)]),
            (
                1,
                [
                    ("Sigmoid", None, None),
                    ("Relu", None, None),
                    ("Affine", 0.3, 0.4),
                    ("ThresholdedRelu", 0.1, None),
                ],
            ),
        )
    ),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
kernels_ = pytest.mark.parametrize("kernels", KERNELS)
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])
both = pytest.mark.parametrize("linear_before_reset", [0, 1])


def plain_gru(case: Case, feeds: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """ONNX's GRU, one row and one step at a time; Y and Y_h in the case's layout."""
    x, h0 = feeds["X"], feeds.get("H0")
    if case.layout:
        x = x.swapaxes(0, 1)
        h0 = None if h0 is None else h0.swapaxes(0, 1)
    defaults = [("Sigmoid", None, None), ("Tanh", None, None)] * case.directions
    standard = {"HardSigmoid": (0.2, 0.5), "LeakyRelu": (0.01, 0), "Elu": (1.0, 0)}
    functions = []
    for given_name, alpha, beta in case.functions or defaults:
        name = next(n for n in FUNCTIONS if n.lower() == given_name.lower())
        default = standard.get(name, (0.0, 0.0))
        functions.append(
            (FUNCTIONS[name], default[0] if alpha is None else alpha, default[1] if beta is None else beta)
        )

    def activate(which: int, value: torch.Tensor) -> torch.Tensor:
        function, alpha, beta = functions[which]
        return function(value if case.clip is None else value.clamp(-case.clip, case.clip), alpha, beta)

    zeros = torch.zeros(case.hidden, dtype=x.dtype)
    y = [[[zeros] * case.batch for _ in range(case.directions)] for _ in range(case.steps)]
    y_h = [[zeros] * case.batch for _ in range(case.directions)]
    for d in range(case.directions):
        wz, wr, wh = feeds["W"][d].split(case.hidden)
        rz, rr, rh = feeds["R"][d].split(case.hidden)
        bias = feeds["B"][d] if "B" in feeds else torch.zeros(6 * case.hidden, dtype=x.dtype)
        wbz, wbr, wbh, rbz, rbr, rbh = bias.split(case.hidden)
        for row in range(case.batch):
            length = case.steps if case.lengths is None else int(case.lengths[row])
            state = zeros if h0 is None else h0[d, row]
            backwards = case.direction == "reverse" or d == 1
            for t in reversed(range(length)) if backwards else range(length):
                xt = x[t, row]
                z = activate(2 * d, wz @ xt + rz @ state + wbz + rbz)
                r = activate(2 * d, wr @ xt + rr @ state + wbr + rbr)
                if case.linear_before_reset:
                    h = activate(2 * d + 1, wh @ xt + r * (rh @ state + rbh) + wbh)
                else:
                    h = activate(2 * d + 1, wh @ xt + rh @ (r * state) + rbh + wbh)
                state = (1 - z) * h + z * state
                y[t][d][row] = y_h[d][row] = state
    all_ = torch.stack([torch.stack([torch.stack(rows) for rows in step]) for step in y])
    final = torch.stack([torch.stack(rows) for rows in y_h])
    return (all_.permute(2, 0, 1, 3), final.swapaxes(0, 1)) if case.layout else (all_, final)


def plain_gradients(
    case: Case, feeds: Mapping[str, np.ndarray], upstream: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What PyTorch's autograd makes of the plain GRU."""
    tensors = {n: torch.tensor(feeds[n], requires_grad=True) for n in INPUTS if n in feeds}
    all_, final = plain_gru(case, tensors)
    loss = torch.zeros((), dtype=all_.dtype)
    for name, output in (("dHAll", all_), ("dHFinal", final)):
        if name in upstream:
            loss = loss + (output * torch.tensor(upstream[name])).sum()
    if loss.requires_grad:
        loss.backward()
    return {f"d{n}": (torch.zeros_like(t) if t.grad is None else t.grad).numpy() for n, t in tensors.items()}


def forward(case: Case, feeds: Mapping[str, np.ndarray], kernels: str) -> dict[str, np.ndarray]:
    names = [name if name in feeds else None for name in ("X", "W", "R", "B", "SL", "H0")]
    dtype = feeds["X"].dtype
    return run_node(nodes.gru_training(*names, dtype=dtype, **case.attributes), feeds, kernels)


def gradients(
    case: Case,
    feeds: Mapping[str, np.ndarray],
    kernels: str,
    outputs: Sequence[str | None] | None = None,
) -> dict[str, np.ndarray]:
    inputs = ("X", "W", "R", "B", "SL", "H0", "HAll", "ZRH", "dHAll", "dHFinal")
    names = [name if name in feeds else None for name in inputs]
    if outputs is None:
        outputs = [f"d{n}" if n in feeds else None for n in INPUTS]
    node = nodes.gru_grad(*names, outputs, dtype=feeds["X"].dtype, **case.attributes)
    return run_node(node, feeds, kernels)


def saved(case: Case, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of GRUGrad that GRUTraining makes, straight from its kernel."""
    arrays = [feeds.get(name) for name in ("X", "W", "R", "B", "SL", "H0")]
    h_all, _, zrh = gru_training(*arrays, **case.attributes)
    return {"HAll": np.ascontiguousarray(h_all), "ZRH": np.ascontiguousarray(zrh)}


def check(case: Case, dtype: Any, kernels: str) -> None:
    feeds, upstream = case.feeds(dtype), case.upstream(dtype)
    actual = gradients(case, {**feeds, **saved(case, feeds), **upstream}, kernels)
    expected = plain_gradients(case, feeds, upstream)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(actual[name], value, TOLERANCE[np.dtype(dtype)])


def onnxruntime_gru(case: Case, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    attributes = {k: v for k, v in case.attributes.items() if k != "layout"}
    names = [name if name in feeds else "" for name in ("X", "W", "R", "B", "SL", "H0")]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("GRU", names, ["Y", "Y_h"], **attributes)],
        "gru",
        [info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()],
        [info(n, 1, None) for n in ("Y", "Y_h")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


@cases
@kernels_
def test_forward_is_onnxruntimes(case: Case, kernels: str) -> None:
    feeds = case.feeds(np.float32)
    # onnxruntime's GRU knows layout 0 only.
    swap = {n: np.ascontiguousarray(a.swapaxes(0, 1)) for n, a in feeds.items() if n in ("X", "H0")}
    y, y_h = onnxruntime_gru(case, {**feeds, **swap} if case.layout else feeds)
    if case.layout:
        y, y_h = y.transpose(2, 0, 1, 3), y_h.swapaxes(0, 1)
    actual = forward(case, feeds, kernels)
    for name, expected in (("HAll", y), ("HFinal", y_h)):
        # onnxruntime's sigmoid and tanh are rational approximations.
        assert_close(actual[name], expected, 5e-6)


@cases
@kernels_
def test_forward_is_the_plain_one(case: Case, kernels: str) -> None:
    feeds = case.feeds(np.float64)
    y, y_h = plain_gru(case, {n: torch.tensor(a) for n, a in feeds.items()})
    actual = forward(case, feeds, kernels)
    assert_close(actual["HAll"], y.numpy(), 1e-12)
    assert_close(actual["HFinal"], y_h.numpy(), 1e-12)


@cases
@kernels_
@dtypes
def test_gradient_is_autograds(case: Case, kernels: str, dtype: Any) -> None:
    check(case, dtype, kernels)


@cases
def test_gradient_is_the_finite_difference(case: Case) -> None:
    feeds, upstream = case.feeds(np.float64), case.upstream(np.float64)
    actual = gradients(case, {**feeds, **saved(case, feeds), **upstream}, "python")
    names = [n for n in INPUTS if n in feeds]
    rng = np.random.default_rng(2)
    directions = [rng.standard_normal(feeds[n].shape) for n in names]

    def loss(*arguments: np.ndarray) -> float:
        values = {n: torch.tensor(a) for n, a in zip(names, arguments, strict=True)}
        outputs = dict(zip(("dHAll", "dHFinal"), plain_gru(case, values), strict=True))
        return sum(float((outputs[n].numpy() * up).sum()) for n, up in upstream.items())

    # A kink between the two points of a difference would spoil it, so the step is small.
    scale = 1e-3
    expected = directional_derivative(loss, [feeds[n] for n in names], [scale * d for d in directions])
    product = sum(float((actual[f"d{n}"] * d).sum()) for n, d in zip(names, directions, strict=True))
    assert scale * product == pytest.approx(expected, rel=1e-4, abs=1e-9)


@kernels_
@dtypes
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("lengths", [None, (5, 1, 3)])
def test_gradient_is_that_of_pytorchs_gru(
    kernels: str, dtype: Any, bidirectional: bool, lengths: Sequence[int] | None
) -> None:
    case = Case(
        "torch",
        steps=5,
        direction="bidirectional" if bidirectional else "forward",
        linear_before_reset=1,
        lengths=lengths,
    )
    feeds, upstream = case.feeds(dtype), case.upstream(dtype)
    element = torch.float32 if dtype is np.float32 else torch.float64
    module = torch.nn.GRU(case.inputs, case.hidden, bidirectional=bidirectional, dtype=element)
    parameters = {
        "weight_ih": feeds["W"],
        "weight_hh": feeds["R"],
        "bias_ih": feeds["B"][:, : 3 * case.hidden],
        "bias_hh": feeds["B"][:, 3 * case.hidden :],
    }
    with torch.no_grad():
        for name, value in parameters.items():
            for d in range(case.directions):
                target = getattr(module, f"{name}_l0{'_reverse' if d else ''}")
                target.copy_(torch.tensor(reset_first(value[d])))
    x, h0 = (torch.tensor(feeds[n], requires_grad=True) for n in ("X", "H0"))
    sequence: Any = x
    if lengths is not None:
        sequence = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    y, y_h = module(sequence, h0)
    if lengths is not None:
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=case.steps)
    y = y.reshape(case.steps, case.batch, case.directions, case.hidden).permute(0, 2, 1, 3)
    loss = (y * torch.tensor(upstream["dHAll"])).sum() + (y_h * torch.tensor(upstream["dHFinal"])).sum()
    loss.backward()
    made = saved(case, feeds)
    actual = gradients(case, {**feeds, **made, **upstream}, kernels)
    tolerance = TOLERANCE[np.dtype(dtype)]
    assert_close(made["HAll"], y.detach().numpy(), tolerance)
    assert_close(actual["dX"], x.grad.numpy(), tolerance)
    assert_close(actual["dH0"], h0.grad.numpy(), tolerance)
    made_by_torch = {
        name: [
            reset_first(getattr(module, f"{name}_l0{'_reverse' if d else ''}").grad.numpy())
            for d in range(case.directions)
        ]
        for name in parameters
    }
    assert_close(actual["dW"], np.stack(made_by_torch["weight_ih"]), tolerance)
    assert_close(actual["dR"], np.stack(made_by_torch["weight_hh"]), tolerance)
    db = np.concatenate([np.stack(made_by_torch[f"bias_{n}"]) for n in ("ih", "hh")], axis=1)
    assert_close(actual["dB"], db, tolerance)


def reset_first(value: np.ndarray) -> np.ndarray:
    """From ONNX's order of the gates (z, r, h) to PyTorch's (r, z, n), or back."""
    first, second, third = np.split(value, 3)
    return np.concatenate([second, first, third])


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    steps, batch = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    lengths = st.lists(st.integers(0, steps), min_size=batch, max_size=batch)
    return Case(
        "any",
        steps,
        batch,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 5)),
        draw(st.sampled_from(DIRECTIONS)),
        draw(st.integers(0, 1)),
        draw(st.integers(0, 1)),
        draw(st.sampled_from([None, 0.5])),
        draw(st.none() | lengths),
        draw(st.lists(st.sampled_from(["B", "H0", "dHAll", "dHFinal"]), max_size=2, unique=True)),
    )


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=amount(25, 500), deadline=None, derandomize=True)
@given(case=any_case())
def test_gradient_for_any_shape(case: Case, kernels: str) -> None:
    check(case, np.float64, kernels)


@kernels_
@pytest.mark.parametrize("direction", DIRECTIONS)
@both
def test_padding_does_not_matter(kernels: str, direction: str, linear_before_reset: int) -> None:
    case = Case(
        "padding",
        direction=direction,
        linear_before_reset=linear_before_reset,
        lengths=(2, 0, 4),
        clip=0.8,
    )
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    made = saved(case, feeds)
    expected = gradients(case, {**feeds, **made, **upstream}, kernels)
    over = np.arange(case.steps)[:, None] >= np.array(case.lengths)
    feeds["X"][over] = np.nan
    assert_close(forward(case, feeds, kernels)["HAll"], made["HAll"], 1e-6)
    for array in (made["HAll"], made["ZRH"], upstream["dHAll"]):
        array.swapaxes(1, 2)[over] = np.nan
    actual = gradients(case, {**feeds, **made, **upstream}, kernels)
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-6)
    assert not actual["dX"][over].any()


@kernels_
@pytest.mark.parametrize("wanted", ["dX", "dW", "dR", "dB", "dH0"])
@both
def test_each_output_alone(kernels: str, wanted: str, linear_before_reset: int) -> None:
    case = Case("alone", direction="bidirectional", linear_before_reset=linear_before_reset)
    feeds, upstream = case.feeds(np.float64), case.upstream(np.float64)
    outputs = [wanted if wanted == f"d{n}" else None for n in INPUTS]
    actual = gradients(case, {**feeds, **saved(case, feeds), **upstream}, kernels, outputs)
    assert list(actual) == [wanted]
    assert_close(actual[wanted], plain_gradients(case, feeds, upstream)[wanted], 1e-12)


@kernels_
@pytest.mark.parametrize("wanted", ["HAll", "HFinal", "ZRH"])
def test_each_training_output_alone(kernels: str, wanted: str) -> None:
    case = Case("alone", direction="reverse", lengths=(3, 4, 1))
    feeds = case.feeds(np.float32)
    outputs = [wanted if wanted == n else None for n in ("HAll", "HFinal", "ZRH")]
    node = nodes.gru_training("X", "W", "R", "B", "SL", "H0", outputs, **case.attributes)
    assert_close(run_node(node, feeds, kernels)[wanted], forward(case, feeds, "python")[wanted], 1e-6)


@kernels_
def test_bias_and_state_gradients_without_bias_and_state(kernels: str) -> None:
    case = Case("zeros", linear_before_reset=1, direction="bidirectional", layout=1)
    feeds, upstream = case.feeds(np.float64), case.upstream(np.float64)
    feeds["B"][:] = 0
    feeds["H0"][:] = 0
    expected = plain_gradients(case, feeds, upstream)
    made = saved(case, feeds)
    del feeds["B"], feeds["H0"]
    actual = gradients(case, {**feeds, **made, **upstream}, kernels, [f"d{n}" for n in INPUTS])
    for name, value in expected.items():
        assert_close(actual[name], value, 1e-12)


@kernels_
@pytest.mark.parametrize("direction", DIRECTIONS)
@both
@pytest.mark.parametrize("size", [{"steps": 0}, {"batch": 0}], ids=str)
def test_empty(kernels: str, direction: str, linear_before_reset: int, size: dict[str, int]) -> None:
    case = Case("empty", direction=direction, linear_before_reset=linear_before_reset, **size)
    feeds, upstream = case.feeds(np.float32), case.upstream(np.float32)
    if kernels in BODIES and case.steps == 0:
        # onnxruntime's Scan does not run over nothing.
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="Scan"):
            forward(case, feeds, kernels)
        return
    made = forward(case, feeds, kernels)
    assert not made["HFinal"].any()
    assert made["ZRH"].shape == (case.steps, case.directions, case.batch, 3 * case.hidden)
    made.pop("HFinal")
    for name, value in gradients(case, {**feeds, **made, **upstream}, kernels).items():
        assert value.shape == feeds[name[1:]].shape
        assert not value.any()


@pytest.mark.parametrize("direction", DIRECTIONS)
@both
def test_half_precision(direction: str, linear_before_reset: int) -> None:
    case = Case(
        "half",
        direction=direction,
        linear_before_reset=linear_before_reset,
        lengths=(4, 2, 3),
        clip=1.0,
    )
    half, full = case.feeds(np.float16), {n: a.astype(np.float32) for n, a in case.feeds(np.float16).items()}
    full["SL"] = half["SL"]
    expected = forward(case, full, "onnx")
    actual = forward(case, half, "onnx")
    for name, value in expected.items():
        assert_close(actual[name], value.astype(np.float16), 1e-2)
    upstream = case.upstream(np.float16)
    made = {n: actual[n] for n in ("HAll", "ZRH")}
    exact = {n: a.astype(np.float32) for n, a in {**made, **upstream}.items()}
    expected = gradients(case, {**full, **exact}, "onnx")
    actual = gradients(case, {**half, **made, **upstream}, "onnx")
    for name, value in expected.items():
        assert_close(actual[name], value.astype(np.float16), 1e-2)


@dataclass
class Wrong:
    text: str
    replaced: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lengths: Sequence[int] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "wrong",
    [
        Wrong("X [4, 3] does not fit", {"X": (4, 3)}),
        Wrong("W [1, 18, 4] does not fit", {"W": (1, 18, 4)}),
        Wrong("W [2, 18, 5] does not fit", {"W": (2, 18, 5)}),
        Wrong("R [1, 18, 7] does not fit", {"R": (1, 18, 7)}),
        Wrong("R [1, 12, 6] does not fit", {"R": (1, 12, 6)}),
        Wrong(
            "R [1, 18, 6] does not fit",
            {},
            None,
            {"direction": "bidirectional"},
        ),
        Wrong("B [1, 18] does not fit", {"B": (1, 18)}),
        Wrong("H0 [3, 1, 6] does not fit", {"H0": (3, 1, 6)}),
        Wrong("SL [3] does not fit", attributes={"layout": 1}),
        Wrong("SL [2] does not fit", {}, [1, 2]),
        Wrong("the lengths SL must be from 0 to 4; they are [1, 5, 2]", {}, [1, 5, 2]),
        Wrong("the lengths SL must be from 0 to 4; they are [1, -1, 2]", {}, [1, -1, 2]),
        Wrong("HAll [4, 1, 2, 6] does not fit", {"HAll": (4, 1, 2, 6)}),
        Wrong("ZRH [4, 1, 3, 6] does not fit", {"ZRH": (4, 1, 3, 6)}),
        Wrong("dHAll [3, 1, 3, 6] does not fit", {"dHAll": (3, 1, 3, 6)}),
        Wrong("dHFinal [1, 3, 5] does not fit", {"dHFinal": (1, 3, 5)}),
    ],
    ids=lambda wrong: wrong.text[:40],
)
@pytest.mark.parametrize("operator", ["gru_training", "gru_grad"])
def test_wrong_inputs(wrong: Wrong, operator: str) -> None:
    case = Case("wrong")
    feeds = case.feeds(np.float32)
    right = dict(feeds)
    if operator == "gru_grad":
        right |= {**saved(case, feeds), **case.upstream(np.float32)}
    elif not wrong.replaced.keys() <= right.keys():
        return
    order = ["X", "W", "R", "B", "SL", "H0", "HAll", "ZRH", "dHAll", "dHFinal"]
    right["SL"] = np.array([4, 2, 3], np.int32)
    names = [name for name in order if name in right]
    outputs = ["dX"] if operator == "gru_grad" else ["HAll"]
    node = getattr(nodes, operator)(*names, outputs, **{**case.attributes, **wrong.attributes})
    shapes = dict.fromkeys(right)
    session = ortgrad.InferenceSession(nodes.make_model(node, shapes=shapes), kernels="python")
    feeds = dict(right)
    for name, shape in wrong.replaced.items():
        feeds[name] = np.zeros(shape, np.float32)
    if wrong.lengths is not None:
        feeds["SL"] = np.array(wrong.lengths, np.int32)
    with pytest.raises(ortgrad.KernelError) as caught:
        session.run(None, feeds)
    assert wrong.text in str(caught.value)
    if not wrong.attributes:
        assert np.isfinite(session.run(None, right)[0]).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SL", np.array([2], np.int32)),
        ("SL", np.array([1, 5, 2], np.int32)),
        ("SL", np.array([1, -1, 2], np.int32)),
        ("B", np.zeros((1, 2), np.float32)),
        ("R", np.zeros((1, 15, 5), np.float32)),
        ("W", np.zeros((1, 1, 5), np.float32)),
        ("H0", np.zeros((1, 1, 6), np.float32)),
        ("HAll", np.zeros((4, 1, 1, 6), np.float32)),
        ("ZRH", np.zeros((4, 1, 1, 18), np.float32)),
        ("dHAll", np.zeros((1, 1, 3, 6), np.float32)),
        ("dHFinal", np.zeros((1, 1, 6), np.float32)),
    ],
    ids=lambda value: str(getattr(value, "shape", value)),
)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_body_does_not_broadcast_by_mistake(name: str, value: np.ndarray, direction: str) -> None:
    case = Case("wrong", lengths=(4, 2, 3), direction=direction)
    feeds = case.feeds(np.float32)
    feeds |= {**saved(case, feeds), **case.upstream(np.float32)}
    state = onnxruntime.capi.onnxruntime_pybind11_state
    with pytest.raises((ortgrad.OrtgradError, state.Fail, state.InvalidArgument, state.RuntimeException)):
        gradients(case, {**feeds, name: value}, "onnx")


@dtypes
@both
def test_a_saved_model_needs_no_library(dtype: Any, linear_before_reset: int) -> None:
    case = Case(
        "saved",
        direction="bidirectional",
        lengths=(3, 1, 4),
        linear_before_reset=linear_before_reset,
        layout=1,
    )
    feeds, upstream = case.feeds(dtype), case.upstream(dtype)
    feeds_grad = {**feeds, **saved(case, feeds), **upstream}
    names = ["X", "W", "R", "B", "SL", "H0", "HAll", "ZRH", "dHAll", "dHFinal"]
    node = nodes.gru_grad(*names, dtype=dtype, **case.attributes)
    model = nodes.make_model(node, shapes=symbolic_shapes(feeds_grad), dtype=dtype)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = plain_gradients(case, feeds, upstream)
    for output, value in zip(session.get_outputs(), session.run(None, feeds_grad), strict=True):
        assert_close(value, expected[output.name], TOLERANCE[np.dtype(dtype)])


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"activations": ["Sigmoid", "Gelu"]}, "activation 'Gelu' is unknown; there are Sigmoid, Tanh, Relu"),
        ({"activations": ["Sigmoid"]}, "activations has 1 names; there must be 2"),
        ({"activations": ["Sigmoid", "Affine"]}, "activation Affine needs a value in activation_alpha"),
        (
            {"activations": ["Sigmoid", "ScaledTanh"], "activation_alpha": [1.0]},
            "activation ScaledTanh needs a value in activation_beta",
        ),
        (
            {"activations": ["Sigmoid", "Elu"], "activation_alpha": [-1.0]},
            "the gradient of activation Elu with alpha -1.0",
        ),
        ({"clip": 0.0}, "clip is 0.0; it must be positive"),
        ({"layout": 2}, "layout is 2; it must be 0 or 1"),
    ],
    ids=str,
)
@kernels_
def test_wrong_attributes(attributes: dict[str, Any], text: str, kernels: str) -> None:
    case = Case("wrong")
    feeds = case.feeds(np.float32)
    feeds |= {**saved(case, feeds), **case.upstream(np.float32)}
    names = ["X", "W", "R", "B", None, "H0", "HAll", "ZRH", "dHAll", "dHFinal"]
    with pytest.raises(ortgrad.OrtgradError) as caught:
        node = nodes.gru_grad(*names, **attributes)
        run_node(node, feeds, kernels, shapes=symbolic_shapes(feeds))
    assert text in str(caught.value)
