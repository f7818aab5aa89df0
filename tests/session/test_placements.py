"""What `placements` says of a node is what onnxruntime's profile of a session shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support import KERNELS, ROOT, needs_numba

import ortgrad
from ortgrad.cli.entry_point import main
from ortgrad.compiled import machine_code
from ortgrad.errors import NameNotFoundError
from ortgrad.graph.protos import all_nodes
from ortgrad.lowering.fusion import fuse
from ortgrad.operators.declaration import find_operator
from ortgrad.runtime.placements import Placement, placements

MODELS = ROOT / "models"
WAYS = sorted({*KERNELS, "auto"})
TEXTS = {
    # Chains that are fused, and a constant.
    "chain": """g (float[64, 512] x, float[512] b) => (float loss) {
        c = Constant<value_float = 2.0>() p = Sqrt(c)
        s = Mul(x, p) t = Add(s, b) u = Tanh(t) v = Sigmoid(t) w = Mul(u, v)
        loss = ReduceMean<keepdims = 0>(w) }""",
    "subgraph": """g (float[4, 8] x, bool c) => (float loss) {
        y = If (c) <
            then_branch = a () => (float[4, 8] p) { h = Softmax(x) p = Mul(h, x) },
            else_branch = b () => (float[4, 8] q) { q = Tanh(x) }>
        loss = ReduceSum<keepdims = 0>(y) }""",
}


def model_of(name: str) -> onnx.ModelProto:
    if name not in TEXTS:
        return ortgrad.build_gradient_model(MODELS / f"{name}.onnx")
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {TEXTS[name]}')
    for i, node in enumerate(all_nodes(model.graph.node)):
        node.name = f"{node.op_type} {i}"
    return ortgrad.build_gradient_model(model, wrt="x")


def feeds_of(session: onnxruntime.InferenceSession) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    feeds = {}
    for value in session.get_inputs():
        shape = [size if isinstance(size, int) else 3 for size in value.shape]
        feeds[value.name] = np.asarray(random.standard_normal(shape)).astype(types[value.type])
    return feeds


def profile(model: onnx.ModelProto, kernels: str, folder: Path) -> dict[str, str]:
    """Return the operators of the nodes that run, by name."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    # Otherwise onnxruntime merges nodes, too.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ortgrad.InferenceSession(model, options, kernels=kernels)
    session.run(None, feeds_of(session))
    events = json.loads(Path(session.end_profiling()).read_text())
    suffix = "_kernel_time"
    return {
        event["name"].removesuffix(suffix): event["args"]["op_name"]
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith(suffix)
    }


@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "gru", *TEXTS])
def test_what_runs(name: str, kernels: Any, tmp_path: Path) -> None:
    model = model_of(name)
    found = {each.node: each for each in placements(model, kernels=kernels)}
    ran = profile(model, kernels, tmp_path)
    for each in found.values():
        if "merged" in each.reason or each.kernel == "fused" or each.way == "removed":
            assert each.node not in ran or ran[each.node] in ("Fused", "FusedDouble"), each
        elif each.way == "body":
            assert each.node not in ran
        elif each.node in ran:  # a branch may not run
            assert is_run_by(ran[each.node], each), (each, ran[each.node])
    # Nothing runs that no node stands for.
    for run, operator in ran.items():
        known = run in found or any(run.startswith(f"{node}/") for node in found)
        assert known or operator.startswith("Fused"), (run, operator)
    assert {each.way for each in found.values()} <= ways_of(kernels)


def is_run_by(operator: str, found: Placement) -> bool:
    own = find_operator(operator) or find_operator(operator, "ortgrad")
    if found.way == "onnxruntime":
        return own is None and operator == found.kernel
    if own is None:
        return False
    if found.way == "python":
        return own.kernel.__name__ == found.kernel
    return own.compiled_kernel is not None and own.compiled_kernel.function.__name__ == found.kernel


def ways_of(kernels: str) -> set[str]:
    others = {"onnxruntime", "removed"}
    if kernels == "onnx":
        return {"body"} | others
    return {"python"} | others if kernels == "python" else {"python", "body", "compiled"} | others


@needs_numba
def test_fused_nodes_name_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "_LEAST_SAVED", 0)
    found = [each for each in placements(model_of("chain"), kernels="auto") if each.kernel == "fused"]
    assert len(found) > 3
    assert all("in one kernel with" in each.reason for each in found)


def test_without_numba_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "is_installed", lambda: False)
    assert any("Numba" in each.reason for each in placements(model_of("cnn")) if each.way == "python")


def test_another_provider_gets_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    found = placements(model_of("cnn"), providers=["CUDAExecutionProvider"])
    assert {each.way for each in found} == {"body", "onnxruntime"}


def test_models_without_gradients() -> None:
    assert {each.way for each in placements(MODELS / "cnn.onnx")} == {"onnxruntime"}


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    cnn = str(MODELS / "cnn.onnx")
    assert main(["explain", cnn, "--kernels", "python"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[1:4] == ["ConvGrad", "python", "conv_grad"] for line in lines)
    assert main(["explain", cnn, "--kernels"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(lines)
    assert main(["explain", cnn, "--kernels", "onnx", "--wrt", "no such"]) == 2
    with pytest.raises(NameNotFoundError):
        ortgrad.build_gradient_model(cnn, wrt="no such")


@pytest.mark.parametrize("more", [["--wrt", "image"], ["--of", "logits"], ["--feeds", "feeds.npz"]])
def test_command_refuses_what_it_would_ignore(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with gradients is shown as it is."""
    path = str(tmp_path / "backward.onnx")
    onnx.save(model_of("cnn"), path)
    assert main(["explain", path, "--kernels"]) == 0
    assert main(["explain", path, "--kernels", "auto", *more]) == 2
    assert "has gradients already" in capsys.readouterr().err


def test_command_shows_nodes_or_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", str(MODELS / "cnn.onnx"), "--kernels", "auto", "--all"])
    assert "not allowed with argument" in capsys.readouterr().err
