"""How long building, preparing and loading the gradient of a transformer takes.

    python benchmarks/build_time.py [--layers 12] [--hidden 256] [--rounds 5]

The network is the language model of the tests. Times are the best of the rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import networks

import ortgrad


def best(rounds: int, function: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes = networks.Sizes(
        layers=arguments.layers, hidden=arguments.hidden, heads=8, tokens=128, vocabulary=1000
    )
    network = networks.gpt(sizes)
    seconds, built = best(arguments.rounds, lambda: ortgrad.build_gradient_model(network.model, of="loss"))
    for name, model in (("forward", network.model), ("with gradients", built)):
        print(f"{name:<32} {len(model.graph.node):6} nodes, {model.ByteSize() / 1e6:.1f} MB")
    print(f"{'build_gradient_model':<32} {seconds:6.2f} s")
    for kernels in ("auto", "python", "onnx"):
        seconds, _ = best(arguments.rounds, lambda k=kernels: ortgrad.prepare(built, kernels=k))
        print(f"{f'prepare, kernels={kernels!r}':<32} {seconds:6.2f} s")
    seconds, _ = best(arguments.rounds, lambda: ortgrad.InferenceSession(built))
    print(f"{'InferenceSession':<32} {seconds:6.2f} s")


if __name__ == "__main__":
    main()
