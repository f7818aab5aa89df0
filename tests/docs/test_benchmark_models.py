"""The benchmarks of whole models: PyTorch and ONNX are the same models, and all parts of the scripts work."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from support import ROOT
from support.recorded_graph import Arrays

import ortgrad

BENCHMARKS = ROOT / "benchmarks"
SMALL = {
    "mlp": {"batch": 3, "features": 5, "width": 4, "depth": 2},
    "cnn": {"batch": 2, "size": 8, "width": 3},
    "resnet": {"batch": 2, "size": 32, "width": 4, "depth": 2},
    "mobilenet": {"batch": 2, "size": 16, "width": 4, "depth": 2},
    "gru": {"batch": 2, "steps": 4, "features": 3, "width": 5},
    "lstm": {"batch": 2, "steps": 4, "features": 3, "width": 5},
    "transformer": {"batch": 2, "tokens": 5, "width": 8, "depth": 2, "heads": 2},
}
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of the benchmarks' folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


def torch_step(benchmark: Callable[[str], ModuleType], kind: str, feeds: Arrays) -> Arrays:
    workloads_torch = benchmark("workloads_torch")
    values = workloads_torch.from_onnx(kind, {name: torch.from_numpy(array) for name, array in feeds.items()})
    weights = [name for name in values if name not in ("x", "label")]
    wrt = [values[name].requires_grad_() for name in weights]
    loss = workloads_torch.KINDS[kind](values, SMALL[kind])
    gradients = dict(zip(weights, torch.autograd.grad(loss, wrt), strict=True))
    named = {"loss": loss, **workloads_torch.to_onnx(kind, gradients)}
    return {name: value.detach().numpy() for name, value in named.items()}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("kind", SMALL)
def test_both_are_the_same_model(benchmark, kind: str, dynamic: bool) -> None:
    workload = benchmark("workloads").Workload(kind, kind, SMALL[kind])
    feeds = workload.feeds()
    backward = ortgrad.build_gradient_model(
        workload.model(dynamic=dynamic), wrt=workload.weights(), of="loss"
    )
    session = ortgrad.InferenceSession(backward)
    names = [output.name.removesuffix("_grad") for output in session.get_outputs()]
    actual = dict(zip(names, session.run(None, feeds), strict=True))
    expected = torch_step(benchmark, kind, feeds)
    assert expected.keys() == actual.keys() == {"loss", *workload.weights()}
    assert benchmark("measuring").difference(actual, expected) < 1e-4


def test_every_kind_is_measured(benchmark) -> None:
    workloads = benchmark("workloads")
    assert {w.kind for w in workloads.WORKLOADS} == set(workloads.KINDS) == set(SMALL)
    assert set(benchmark("workloads_torch").KINDS) == set(SMALL)
    names = [w.name for w in workloads.WORKLOADS]
    assert len(names) == len(set(names))


def test_the_whole_way(benchmark, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes are started, gradients compared, times taken and written."""
    peers = ["torch"] if benchmark("environments").installed("torch") == "2.13.0" else []
    file = tmp_path / "report.json"
    arguments = ["--only", "tiny", "--ways", "onnx", "--rounds", "2", "--markdown", "--json", str(file)]
    assert benchmark("models").main([*arguments, "--peers", *peers]) == 0
    (row,) = json.loads(file.read_text())["times"]
    assert row["errors"] == {}
    assert row["seconds"].keys() == row["difference"].keys() == {"onnx", *peers} and row["wrong"] == []
    assert all(len(taken) == 2 and min(taken) > 0 for taken in row["seconds"].values())
    assert "\n| ms | ortgrad onnx |" in capsys.readouterr().out


@needs_proc
def test_memory(benchmark) -> None:
    workload = benchmark("workloads").Workload(
        "mlp", "mlp", {"batch": 1024, "features": 512, "width": 512, "depth": 2}
    )
    row = benchmark("comparing").measure_memory(workload, ["onnx"])
    assert row["errors"] == {}
    # At least the two hidden layers, forward and backward.
    assert row["all"]["onnx"] >= row["steps"]["onnx"] > 2 * 1024 * 512 * 4


def test_scaled_workloads(benchmark) -> None:
    comparing = benchmark("comparing")
    for base in comparing.SCALED:
        points = list(comparing.scaled(base))
        assert len({point.name for point in points}) == len(points) == 9
        for axis in ("batch", "width", "depth"):
            assert {p.sizes[axis] for p in points} == {f * base.sizes[axis] for f in comparing.FACTORS}


def test_field(benchmark, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One bad file does not stop the others."""
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"nothing")
    file = tmp_path / "report.json"
    arguments = [
        str(bad),
        str(ROOT / "models/mlp.onnx"),
        "--ways",
        "onnx",
        "--rounds",
        "1",
        "--json",
        str(file),
    ]
    assert benchmark("field").main(arguments) == 0
    failed, row = json.loads(file.read_text())
    assert failed["seconds"] == {} and "forward" in failed["errors"]
    assert row["errors"] == {} and row["seconds"].keys() == {"forward", "onnx"}
    assert "onnx / forward" in capsys.readouterr().out


def test_batch_of_a_file(benchmark) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        g (float[N, 3, M] x, float[M, N] y, float[2, K] z) => (float[N, 3, M] out) { out = Relu(x) }
    """)
    shapes = [
        [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in benchmark("field").with_batch(model, 7).graph.input
    ]
    assert shapes == [[7, 3, 7], [7, 7], [2, "K"]]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"


def test_a_process_that_dies_is_an_error_and_starts_again(benchmark, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import sys\nsys.stdin.readline()\n")
    worker = benchmark("environments").Worker("dies", sys.executable, str(script))
    try:
        for _ in range(2):
            results, errors = benchmark("measuring").load_all([worker], tmp_path)
            assert results == {} and "died" in errors["dies"]
    finally:
        worker.close()


def test_difference_finds_what_is_wrong(benchmark) -> None:
    difference = benchmark("measuring").difference
    expected = {"w": np.float32([1, -4])}
    assert difference({"w": np.float32([1, -4])}, expected) == 0
    assert difference({"w": np.float32([1, -3])}, expected) == 0.25
    for wrong in ({}, {"w": np.zeros(3, np.float32)}, {"w": np.float32([np.nan, -4])}):
        assert difference(wrong, expected) == float("inf")


def test_tables(benchmark) -> None:
    models = benchmark("models")
    seconds = [
        {"auto": [1.0, 2.0, 9.0], "torch": [2.0, 4.0, 3.0]},
        {"auto": [0.008]},
        {"auto": [2.0], "torch": [1.0]},
    ]
    rows = [
        {"model": name, "seconds": taken, "errors": {}, "difference": {"torch": 2e-6}, "wrong": []}
        for name, taken in zip("abc", seconds, strict=True)
    ]
    rows[1]["errors"] = {"torch": "Error: no\nmore"}
    rows[2] |= {"difference": {"onnx-ad": 0.5}, "wrong": ["onnx-ad"]}
    assert models.time_table(rows, ["auto", "torch"], markdown=True).splitlines()[2:] == [
        "| a | 2000.00 | 3000.00 | 2e-06 |",
        "| b | 8.00 | refuses | 2e-06 |",
        "| c | 2000.00 | 1000.00 | 5e-01 |",
    ]
    assert models.time_cell(rows[2], "onnx-ad") == "wrong"
    assert models.ratio_table(rows, "auto", ["torch"], markdown=False).splitlines() == [
        "auto / theirs   PyTorch",
        "a                  0.50",
        "b                     -",
        "c                  2.00",
        "geometric mean     1.00",
    ]
    assert models.problems(rows) == ["b, PyTorch: Error: no", "WRONG c, onnx-ad: differs by 5.0e-01"]
    memory = [{"model": "a", "steps": {"auto": 5e6}, "all": {"auto": 7e6}, "errors": {"torch": "no"}}]
    assert models.memory_table(memory, ["auto", "torch"], markdown=True).endswith("| a | 5 (7) | refuses |")


def test_ways_that_this_version_does_not_have_are_left_out(benchmark) -> None:
    assert benchmark("peers").accepted(["onnx", "none of them"]) == ["onnx"]


def test_chart(benchmark, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="only the chart needs matplotlib")
    file = tmp_path / "ratios.png"
    benchmark("tables").save_chart(file, ["a", "b"], {"PyTorch": [0.5, None], "onnx-ad": [2.0, 1.0]}, "title")
    assert file.read_bytes().startswith(b"\x89PNG")
