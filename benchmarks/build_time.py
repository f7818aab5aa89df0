"""How long building, preparing and loading the gradient of a transformer takes.

    python benchmarks/build_time.py [--layers 12] [--hidden 256] [--rounds 5] [--chain 1000 5000 20000]

The network is the language model of the tests. Times are the best of the rounds. With --chain, chains of so
many small nodes are built instead, once each: the time must grow no faster than their length.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import onnx
from onnx import helper, numpy_helper
from support import networks

import ortgrad


def best(rounds: int, function: Callable[[], Any]) -> tuple[float, Any]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def chain(length: int) -> onnx.ModelProto:
    """Functions, products and sums, one behind the other."""
    operators = ("Sin", "Tanh", "Mul", "Add", "Relu", "Sigmoid")
    nodes, weights, value = [], [], "x"
    for i in range(length):
        operator = operators[i % len(operators)]
        inputs = [value]
        if operator in ("Mul", "Add"):
            inputs.append(f"w{i}")
            weights.append(numpy_helper.from_array(np.ones(4, np.float32), f"w{i}"))
        nodes.append(helper.make_node(operator, inputs, [f"v{i}"]))
        value = f"v{i}"
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "chain", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chain", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    # The first one also imports what building needs.
    for length in [6, *arguments.chain] if arguments.chain else []:
        model, start = chain(length), time.process_time()
        ortgrad.build_gradient_model(model)
        seconds = time.process_time() - start
        print(f"{f'chain of {length} nodes':<32} {seconds:6.2f} s, {1e3 * seconds / length:.2f} ms per node")
    if arguments.chain:
        return
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
