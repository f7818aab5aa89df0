"""GRU, LSTM and RNN inside If, Loop and Scan, with and without known ranks, in every way to run."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from support.recurrent import Case, plain
from support.sessions import WAYS

import ortgrad

KINDS = ("GRU", "LSTM", "RNN")
SURROUNDINGS = ("then", "else", "nested", "loop", "loop in if", "scan")
LEVELS = (
    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
)
FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
ROUNDS = 2


def value(name: str, shape: list | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def cell(case: Case, x: str, h: str, y: str, y_h: str) -> onnx.NodeProto:
    return helper.make_node(case.op_type, [x, "W", "R", "B", "", h], [y, y_h], **case.attributes)


def branches(case: Case, prefix: str, inner: onnx.NodeProto | None = None) -> onnx.NodeProto:
    """An If with the cell in both branches; in the second one it reads other values."""
    then = [inner] if inner else [cell(case, "X", "H0", f"{prefix}t_y", f"{prefix}t_h")]
    found = [value(name, None) for name in sorted(then[0].output, key=lambda name: name.endswith("_h"))]
    scaled = helper.make_node("Add", ["X", "X"], [f"{prefix}twice"])
    other = [scaled, cell(case, f"{prefix}twice", "H0", f"{prefix}e_y", f"{prefix}e_h")]
    return helper.make_node(
        "If",
        [f"{prefix}c"],
        [f"{prefix}y", f"{prefix}y_h"],
        then_branch=helper.make_graph(then, f"{prefix}then", [], found),
        else_branch=helper.make_graph(
            other, f"{prefix}else", [], [value(f"{prefix}e_y", None), value(f"{prefix}e_h", None)]
        ),
    )


def loop(case: Case, names: tuple[str, str]) -> onnx.NodeProto:
    """The final state of one round is the initial state of the next."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), cell(case, "X", "h", "l_y", "l_h")],
        "rounds",
        [value("i", [], INT64), value("go", [], BOOL), value("h", None)],
        [value("on", [], BOOL), value("l_h", None), value("l_y", None)],
    )
    return helper.make_node("Loop", ["rounds", "", "H0"], [names[1], names[0]], body=body)


def surrounded(case: Case, surrounding: str, ranked: bool) -> onnx.ModelProto:
    feeds = case.feeds(np.float32)
    shapes = {n: [f"{n}_{i}" for i in range(a.ndim)] if ranked else None for n, a in feeds.items()}
    extra = [value("c", [], BOOL), value("d_c", [], BOOL), value("rounds", [], INT64)]
    nodes = []
    if surrounding in ("then", "else"):
        nodes.append(branches(case, ""))
    elif surrounding == "nested":
        nodes.append(branches(case, "", branches(case, "d_")))
    elif surrounding == "loop":
        nodes.append(loop(case, ("y", "y_h")))
    elif surrounding == "loop in if":
        nodes.append(branches(case, "", loop(case, ("r_y", "r_h"))))
    else:
        body = helper.make_graph(
            [cell(case, "x", "h", "s_y", "s_h")],
            "rounds",
            [value("h", None), value("x", None)],
            [value("s_h", None), value("s_y", None)],
        )
        nodes.append(helper.make_node("Scan", ["H0", "X"], ["y_h", "y"], body=body, num_scan_inputs=1))
        if ranked:
            shapes["X"] = ["K", *(shapes["X"] or [])]
    # Types of all, ranks of none: what the graph needs of the cell it has to find out by itself.
    graph = helper.make_graph(
        nodes,
        "graph",
        [*extra, *(value(name, shape) for name, shape in shapes.items())],
        [value("y", None), value("y_h", None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def expected_of(
    case: Case, surrounding: str, feeds: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs, seeds and gradients, by PyTorch."""
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in feeds.items()}
    if surrounding == "else":
        outputs = plain(case, {**tensors, "X": tensors["X"] + tensors["X"]})
    elif surrounding in ("then", "nested"):
        outputs = plain(case, tensors)
    else:
        steps, h = [], tensors["H0"]
        for k in range(ROUNDS):
            x = tensors["X"][k] if surrounding == "scan" else tensors["X"]
            found = plain(case, {**tensors, "X": x, "H0": h})
            steps.append(found["Y"])
            h = found["Y_h"]
        outputs = {"Y": torch.stack(steps), "Y_h": h}
    generator = np.random.default_rng(1)
    results = {"y": outputs["Y"], "y_h": outputs["Y_h"]}
    seeds = {n: generator.standard_normal(r.shape).astype(np.float32) for n, r in results.items()}
    total = sum((results[n] * torch.tensor(seeds[n])).sum() for n in results)
    assert isinstance(total, torch.Tensor)
    total.backward()
    return (
        {name: result.detach().numpy() for name, result in results.items()},
        seeds,
        {name: tensor.grad.numpy() for name, tensor in tensors.items() if tensor.grad is not None},
    )


def session_of(model: onnx.ModelProto, way: str, level: object) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    if way == "registered":
        ortgrad.register(options)
    if way in ("plain", "registered"):
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    return ortgrad.InferenceSession(model, options, kernels=way)


@pytest.mark.parametrize("ranked", [True, False], ids=["ranked", "unranked"])
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str, surrounding: str, ranked: bool, caplog: pytest.LogCaptureFixture) -> None:
    case = Case("inside", kind, absent=["C0", "P"])
    feeds = case.feeds(np.float32)
    if surrounding == "scan":
        feeds["X"] = np.random.default_rng(2).standard_normal((ROUNDS, *feeds["X"].shape)).astype(np.float32)
    model = surrounded(case, surrounding, ranked)
    outputs, seeds, grads = expected_of(case, surrounding, feeds)
    with caplog.at_level(logging.WARNING):
        built = ortgrad.build_gradient_model(model, wrt=list(feeds), of=["y", "y_h"])
    assert not caplog.records
    fed = {
        **feeds,
        **{f"{name}_grad": seed for name, seed in seeds.items()},
        "c": np.array(surrounding != "else"),
        "d_c": np.array(True),
        "rounds": np.array(ROUNDS),
    }
    names = ["y", "y_h", *(f"{name}_grad" for name in feeds)]
    for way, level in itertools.product(WAYS, LEVELS):
        if level not in (LEVELS[0], LEVELS[-1]) and (kind != "LSTM" or way not in ("auto", "plain")):
            continue
        found = dict(zip(names, session_of(built, way, level).run(names, fed), strict=True))
        for name, expected in outputs.items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)
        for name, expected in grads.items():
            np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=2e-3, atol=2e-4, err_msg=name)
