"""A whole training step (forward, backward, AdamW) of the models of workloads.py, against PyTorch.

    python benchmarks/training.py [--models mlp resnet ...] [--rounds 20] [--threads 1]

ortgrad runs artifacts that it generates, with Module and Optimizer; PyTorch runs eager with its fused AdamW.
Both take turns in one process. Times are the best of the rounds, in milliseconds: CPU time with one thread,
else the time on the clock. The losses of the first steps must agree.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import workloads_torch
from tables import number, table
from workloads import WORKLOADS, Workload

from ortgrad.training import artifacts, onnxblock
from ortgrad.training.api import CheckpointState, Module, Optimizer

Step = Callable[[], float]
RATE = 1e-3
# So small that it does not matter whether it is added before or after the correction of the bias.
EPSILON = 1e-12
COMPARED = 3


def ours(workload: Workload, folder: Path, threads: int) -> Step:
    artifacts.generate_artifacts(
        workload.model(),
        requires_grad=workload.weights(),
        optimizer=onnxblock.optim.AdamW(eps=EPSILON),
        artifact_directory=folder,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, session_options=options)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(RATE)
    feeds = workload.feeds()
    inputs = [feeds[name] for name in module.input_names()]

    def step() -> float:
        outputs = module(*inputs)
        optimizer.step()
        module.lazy_reset_grad()
        return float(outputs[0] if isinstance(outputs, tuple) else outputs)

    return step


def theirs(workload: Workload) -> Step:
    tensors = {name: torch.from_numpy(array.copy()) for name, array in workload.feeds().items()}
    values = workloads_torch.from_onnx(workload.kind, tensors)
    parameters = [v.requires_grad_() for name, v in values.items() if name not in ("x", "label")]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, eps=EPSILON, weight_decay=0.0, fused=True)
    forward = workloads_torch.KINDS[workload.kind]

    def step() -> float:
        loss = forward(values, workload.sizes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {workload.name: workload for workload in WORKLOADS}
    parser.add_argument("--models", nargs="+", choices=known, default=list(known))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    rows = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            steps = ours(known[name], Path(folder), arguments.threads), theirs(known[name])
        losses = [[step() for _ in range(COMPARED)] for step in steps]
        np.testing.assert_allclose(losses[0], losses[1], rtol=5e-3, err_msg=name)
        best = [float("inf")] * 2
        for _ in range(arguments.rounds):
            for i, step in enumerate(steps):
                start = clock()
                step()
                best[i] = min(best[i], 1e3 * (clock() - start))
        rows.append([name, *map(number, best), number(best[0] / best[1])])
    print(table(["model", "ortgrad", "PyTorch", "ratio"], rows, markdown=False))


if __name__ == "__main__":
    main()
