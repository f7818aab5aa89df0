"""A whole training step (forward, backward, AdamW) of the models of workloads.py, against PyTorch.

    python benchmarks/training.py [--models mlp resnet ...] [--rounds 20] [--threads 1] [--memory]

ortgrad runs artifacts that it generates, with Module and Optimizer; PyTorch runs eager with its fused AdamW.
Both take turns in one process. Times are the best of the rounds, in milliseconds: CPU time with one thread,
else the time on the clock. The losses of the first steps must agree.

With --memory, each has a process of its own, which first trains the model `tiny`, so that everything is
imported. `peak` is the peak of the resident memory while the model is trained, and `rise` how far that is
above the memory after the tiny model, both in MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from serving import memory, resident
from tables import number, table
from workloads import WORKLOADS, Workload

Step = Callable[[], float]
RATE = 1e-3
# So small that it does not matter whether it is added before or after the correction of the bias.
EPSILON = 1e-12
COMPARED = 3
STEPS = 5
SIDES = ("ortgrad", "PyTorch")


def make_artifacts(workload: Workload, folder: Path) -> None:
    from ortgrad.training import artifacts, onnxblock

    artifacts.generate_artifacts(
        workload.model(),
        requires_grad=workload.weights(),
        optimizer=onnxblock.optim.AdamW(eps=EPSILON),
        artifact_directory=folder,
    )


def ours(workload: Workload, folder: Path, threads: int) -> Step:
    import onnxruntime

    from ortgrad.training.api import CheckpointState, Module, Optimizer

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


def theirs(workload: Workload, threads: int) -> Step:
    import torch
    import workloads_torch

    torch.set_num_threads(threads)
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


def measure_time(workload: Workload, rounds: int, threads: int) -> list[float]:
    """Return the milliseconds of a step of both sides."""
    with tempfile.TemporaryDirectory() as folder:
        make_artifacts(workload, Path(folder))
        steps = ours(workload, Path(folder), threads), theirs(workload, threads)
    losses = [[step() for _ in range(COMPARED)] for step in steps]
    np.testing.assert_allclose(losses[0], losses[1], rtol=5e-3, err_msg=workload.name)
    clock = time.process_time if threads == 1 else time.perf_counter
    best = [float("inf")] * 2
    for _ in range(rounds):
        for i, step in enumerate(steps):
            start = clock()
            step()
            best[i] = min(best[i], 1e3 * (clock() - start))
    return best


def train_in_this_process(side: str, folder: Path, models: list[Workload], threads: int) -> dict:
    """Train one model after the other; return the peak in the last one, and its rise above the first."""
    before = None
    for workload in models:
        if side == "PyTorch":
            step = theirs(workload, threads)
        else:
            step = ours(workload, folder / workload.name, threads)
        step()
        if before is None:
            before = resident("VmRSS")
    return {**memory(step, STEPS, before), "before": before}


def measure_memory(workload: Workload, tiny: Workload, threads: int) -> dict[str, dict[str, float]]:
    """Return peak and rise of both sides, in MB."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for each in (tiny, workload):
            (Path(folder) / each.name).mkdir()
            make_artifacts(each, Path(folder) / each.name)
        for side in SIDES:
            arguments = ["--models", workload.name, "--threads", str(threads), "--worker", side, folder]
            output = subprocess.run(
                [sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE
            )
            answer = json.loads(output.stdout.splitlines()[-1])
            if "error" in answer:
                raise SystemExit(answer["error"])
            rise = answer["steps"] / 2**20
            found[side] = {"peak": rise + answer["before"] / 2**20, "rise": rise}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {workload.name: workload for workload in WORKLOADS}
    parser.add_argument("--models", nargs="+", choices=known, default=list(known))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="peak memory instead of time")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        side, folder = arguments.worker
        models = [known["tiny"], known[arguments.models[0]]]
        print(json.dumps(train_in_this_process(side, Path(folder), models, arguments.threads)))
        return
    rows = []
    for name in arguments.models:
        if arguments.memory:
            found = measure_memory(known[name], known["tiny"], arguments.threads)
            for what in ("peak", "rise"):
                mine, their = (found[side][what] for side in SIDES)
                rows.append([f"{name}, {what}", number(mine), number(their), number(mine / their)])
        else:
            mine, their = measure_time(known[name], arguments.rounds, arguments.threads)
            rows.append([name, number(mine), number(their), number(mine / their)])
    print(table(["model", *SIDES, "ratio"], rows, markdown=False))


if __name__ == "__main__":
    main()
