"""A training that tests kill and start again: python training_process.py FOLDER [KILLS]

Trains a network with Dropout and batch normalization, with a checkpoint in FOLDER after every second step,
and writes the parameters to FOLDER/result.npz in the end. With KILLS, starts itself as often, kills each
process at a random moment, lets the last one finish, and compares the result with that of a training without
kills.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import PATIENCE

TEXT = """<ir_version: 8, opset_import: ["": 18]>
g (float[N, 6] x) => (float[N, 3] y) {
    a = Gemm(x, w1, b1)
    n = BatchNormalization(a, scale, bias, mean, var)
    r = Relu(n)
    d = Dropout(r, ratio)
    y = Gemm(d, w2, b2)
}"""


def network() -> object:
    import onnx

    numbers = np.random.default_rng(0)
    weights = {
        "w1": numbers.standard_normal((6, 16)),
        "b1": np.zeros(16),
        "scale": np.ones(16),
        "bias": np.zeros(16),
        "mean": np.zeros(16),
        "var": np.ones(16),
        "w2": numbers.standard_normal((16, 3)) / 4,
        "b2": np.zeros(3),
        "ratio": np.array(0.3),
    }
    model = onnx.parser.parse_model(TEXT)
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(1)
    x = numbers.standard_normal((250, 6)).astype(np.float32)
    return x, (x @ numbers.standard_normal((6, 3))).argmax(1)


def train(folder: Path) -> None:
    from ortgrad import training

    trainer = training.Trainer(
        network(),  # type: ignore[arg-type]
        loss="cross-entropy",
        optimizer="adamw",
        learning_rate=1e-2,
        schedule="cosine",
        accumulate=2,
        threads=1,
    )
    x, labels = data()
    trainer.fit(
        (x[:200], labels[:200]),
        epochs=12,
        batch_size=8,
        evaluate=(x[200:], labels[200:]),
        metric="accuracy",
        checkpoint=folder / "training.safetensors",
        checkpoint_every=2,
        resume=True,
    )
    state = trainer.state
    np.savez(folder / "result.npz", **{name: state.parameter(name) for name in state.names})
    (folder / "done").touch()


def run(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, str(folder)])


def finished(folder: Path) -> dict[str, np.ndarray]:
    assert run(folder).wait() == 0
    return dict(np.load(folder / "result.npz"))


def killed(folder: Path, kills: int, longest: float = 4.0) -> tuple[dict[str, np.ndarray], int]:
    """Kill the training so many times, then let it finish; returns also how many kills met a running one."""
    moments = random.Random(0)
    hits = 0
    for _ in range(kills):
        process = run(folder)
        # Most of the time before it trains is spent on imports.
        checkpoint = folder / "training.safetensors"
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit and process.poll() is None:
            if checkpoint.exists() and checkpoint.stat().st_mtime_ns != before:
                break
            time.sleep(0.002)
        time.sleep(moments.uniform(0, longest / 40))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            hits += 1
        process.wait()
        if (folder / "done").exists():
            break
    return finished(folder), hits


def main(folder: Path, kills: int) -> None:
    (folder / "whole").mkdir(parents=True)
    (folder / "killed").mkdir()
    expected = finished(folder / "whole")
    found, hits = killed(folder / "killed", kills)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
    print(f"{hits} kills, and the same parameters to the bit")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        train(Path(sys.argv[1]))
