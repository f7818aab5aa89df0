"""One step of an optimizer over flat parameters, against PyTorch's fused one.

    python benchmarks/optimizers.py [--size 10000000] [--rounds 20] [--threads 1 2]

Both take turns in one process, on the same numbers of threads. Times are the best of the rounds, in
milliseconds: CPU time with one thread, else the time on the clock. With the same hyperparameters both must
come to the same weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from tables import number, table

from ortgrad.compat import optimizer_nodes
from ortgrad.training.buffers import Arena
from ortgrad.training.state import Group

Step = Callable[[], object]
RATE = 1e-3


def ours(rule: optimizer_nodes.Rule, size: int, threads: int) -> tuple[Step, np.ndarray]:
    numbers = np.random.default_rng(0)
    parameters = Arena.of({"w": numbers.standard_normal(size, dtype=np.float32)})
    gradients = Arena.of({"w": numbers.standard_normal(size, dtype=np.float32)})
    group = Group()
    group.rate = RATE
    group.momentums = {name: parameters.like() for name in rule.momentums}
    rule.warm_up(parameters)

    def step() -> None:
        rule.apply(parameters, gradients, group, threads)
        group.step += 1

    return step, parameters["w"]


def theirs(kind: type[torch.optim.Optimizer], size: int) -> tuple[Step, np.ndarray]:
    numbers = np.random.default_rng(0)
    weight = torch.nn.Parameter(torch.from_numpy(numbers.standard_normal(size, dtype=np.float32)))
    weight.grad = torch.from_numpy(numbers.standard_normal(size, dtype=np.float32))
    optimizer = kind([weight], lr=RATE, fused=True)  # type: ignore[call-arg]
    return optimizer.step, weight.detach().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    cases: dict[str, tuple[optimizer_nodes.Rule, type[torch.optim.Optimizer]]] = {
        "AdamW": (optimizer_nodes.AdamW((), True, 0.9, 0.999, 1e-8, 0.01, True, 0), torch.optim.AdamW),
        "SGD": (optimizer_nodes.SGD((), True), torch.optim.SGD),
    }
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        clock = time.process_time if threads == 1 else time.perf_counter
        for name, (rule, kind) in cases.items():
            steps, weights = zip(
                ours(rule, arguments.size, threads), theirs(kind, arguments.size), strict=True
            )
            best = [float("inf")] * 2
            for _ in range(arguments.rounds):
                for i, step in enumerate(steps):
                    start = clock()
                    step()
                    best[i] = min(best[i], 1e3 * (clock() - start))
            np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-5)
            rows.append([name, str(threads), *map(number, best), number(best[0] / best[1])])
    print(table(["optimizer", "threads", "ortgrad", "PyTorch", "ratio"], rows, markdown=False))


if __name__ == "__main__":
    main()
