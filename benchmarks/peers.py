"""The peers that run whole models: where they live, and whether they are there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import onnx
from environments import Worker, interpreter_for, say

import ortgrad

WAYS = ("auto", "onnx", "python", "compiled")


@dataclass(frozen=True)
class Peer:
    title: str
    environment: str | None = None  # None: this one
    variables: dict[str, str] = field(default_factory=dict)


# With its own settings it has two OpenMP runtimes whose waiting threads keep each other off the processors.
_PASSIVE = {"OMP_NUM_THREADS": str(os.cpu_count()), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}

PEERS = {
    "torch": Peer("PyTorch", "torch"),
    "torch-compile": Peer("torch.compile", "torch", _PASSIVE),
    "ort-training": Peer("ort-training", "training-artifacts"),
    "onnx-ad": Peer("onnx-ad", "onnx-ad"),
}


def title(name: str) -> str:
    return PEERS[name].title if name in PEERS else f"ortgrad {name}"


def accepted(ways: Iterable[str]) -> list[str]:
    """The values of `kernels` that the installed ortgrad knows."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[1] x) => (float[1] y) {y = Relu(x)}'
    )
    found = []
    for way in ways:
        try:
            ortgrad.prepare(model, kernels=way)
        except (ImportError, ValueError) as error:
            say(f"without ortgrad {way}: {error}")
        else:
            found.append(way)
    return found


def start(name: str) -> Worker | None:
    """The process of a peer or a way of ortgrad; None, with a message, where it cannot run."""
    peer = PEERS.get(name, Peer(name))
    if name == "torch-compile" and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        say("without torch.compile: it needs a C++ compiler, and there is no g++ or clang++")
        return None
    python = interpreter_for(peer.environment)
    return Worker(name, python, "model_worker.py", peer.variables) if python else None


def start_all(names: Sequence[str]) -> list[Worker]:
    return [worker for name in names if (worker := start(name))]
