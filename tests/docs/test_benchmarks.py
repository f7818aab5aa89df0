"""The benchmark's table covers the gradient operators, its inputs are what they should be, and peers run."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ROOT, needs_numba
from support.calls import WAYS

from ortgrad.operators.declaration import all_operators

BENCHMARKS = ROOT / "benchmarks"
FAMILIES = ("activations", "softmax", "dropout", "conv", "pool", "gru", "loss")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import cases

    yield cases
    del sys.modules["cases"]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import worker

    yield worker
    for name in ("worker", "serving"):
        del sys.modules[name]


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba", reason="without compiled kernels there is little to leave out")
    monkeypatch.syspath_prepend(BENCHMARKS)
    loaded = {*sys.modules}
    import ablation

    yield ablation
    for name in {*sys.modules} - loaded:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCHMARKS:
            del sys.modules[name]


def test_every_special_kernel_can_be_left_out(ablation) -> None:
    """What a switch replaces exists, and comes back."""
    for name, (place, attribute, value) in ablation.CHOICES.items():
        before = getattr(ablation.owner_of(place), attribute)
        with ablation.all_switches()[name]():
            assert getattr(ablation.owner_of(place), attribute) is value
        assert getattr(ablation.owner_of(place), attribute) is before
    kernels = [operator.compiled_kernel for operator in all_operators()]
    for name, off in ablation.all_switches().items():
        with off():
            left = [operator.compiled_kernel for operator in all_operators()]
            assert (left != kernels) == (name in {operator.name for operator in all_operators()})
        assert [operator.compiled_kernel for operator in all_operators()] == kernels


def test_the_time_without_a_kernel(ablation, capfd, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--without", "fuse", "use_winograd", "SoftmaxCrossEntropyLossGrad", "--rounds", "1"]
    assert ablation.main(["--only", "tiny", *options, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [(row["switch"], row["nodes"]) for row in rows] == [("SoftmaxCrossEntropyLossGrad", 1)]
    assert all(seconds > 0 for row in rows for pair in row["seconds"] for seconds in pair)
    printed = capfd.readouterr().out
    assert "tiny, without SoftmaxCrossEntropyLossGrad" in printed
    assert "What no model uses: fuse, use_winograd" in printed


def test_every_gradient_operator_of_these_families_is_timed(cases) -> None:
    registered = {
        operator.name
        for operator in all_operators()
        if operator.kernel.__module__.rpartition(".")[2] in FAMILIES and "Grad" in operator.name
    }
    assert registered <= {case.op_type for case in cases.CASES}


def test_names_are_unique(cases) -> None:
    names = [case.name for case in cases.CASES]
    assert len(names) == len(set(names))


def test_derived_inputs(cases) -> None:
    """The maxima are where PyTorch finds them, the GRU's states are PyTorch's."""
    pool = next(case for case in cases.CASES if case.op_type == "MaxPoolGrad")
    x = torch.from_numpy(cases.normal(np.random.default_rng(1), pool.output_shape))
    _, expected = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    n, c, h, w = pool.output_shape
    offsets = np.arange(n * c).reshape(n, c, 1, 1) * (h * w)
    np.testing.assert_array_equal(pool.feeds()["Indices"], expected.numpy() + offsets)

    gru = next(case for case in cases.CASES if case.op_type == "GRUGrad")
    feeds = gru.feeds()
    hidden = gru.attributes["hidden_size"]
    order = np.r_[hidden : 2 * hidden, :hidden, 2 * hidden : 3 * hidden]
    weights = [feeds["W"][0], feeds["R"][0], *np.split(feeds["B"][0], 2)]
    module = [torch.from_numpy(np.ascontiguousarray(weight[order])) for weight in weights]
    states, _ = torch.gru(
        torch.from_numpy(feeds["X"]), torch.from_numpy(feeds["H0"]), module, True, 1, 0.0, False, False, False
    )
    np.testing.assert_allclose(feeds["HAll"][:, 0], states.numpy(), atol=1e-5)


@pytest.mark.parametrize("peer", [*WAYS, pytest.param("registered", marks=needs_numba), "torch"])
def test_peers_compute_the_same(cases, worker, peer: str, tmp_path: Path) -> None:
    """A chain of nodes, with a thread each; bound inputs are aligned and stay alive."""
    random = np.random.default_rng(0)
    dy, x = (random.standard_normal(64).astype(np.float32) for _ in range(2))
    path = tmp_path / "model.onnx"
    path.write_bytes(cases.chain(3).SerializeToString())
    request = {"op_type": "chain", "attributes": {"count": 3}, "outputs": ["dX"], "model": str(path)}
    load = worker.PEERS[peer]() if peer in worker.PEERS else worker.ortgrad_peer(peer)
    threads = torch.get_num_threads()
    try:
        fed = {name: worker.aligned(array) for name, array in (("dY", dy), ("X", x))}
        assert all(array.ctypes.data % worker.ALIGNMENT == 0 for array in fed.values())
        run, results = load({**request, "threads": 1}, fed)
        for _ in range(2):
            found = results(run())
        np.testing.assert_array_equal(found["dX"], np.where(x > 0, dy, 0))
    finally:
        torch.set_num_threads(threads)


def test_calls_are_timed_with_the_given_clock(worker) -> None:
    ticks = itertools.count()
    taken = sys.modules["serving"].seconds(lambda: next(ticks), 3, lambda: next(ticks))
    assert taken == [2, 2, 2]
