"""What is measured of whole models: time, peak memory, and how both grow."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from environments import Worker, WorkerDiedError
from measuring import difference, load_all, take_turns
from peers import start
from workloads import PICTURES, Workload

MEMORY_STEPS = 3
FACTORS = (1, 2, 4)
Row = dict[str, Any]

SCALED = [
    Workload("mlp", "mlp", {"batch": 64, "width": 256, "depth": 2, "features": 784}),
    Workload("resnet", "resnet", {"batch": 2, "width": 16, "depth": 1, "size": 64}, PICTURES),
    Workload("transformer", "transformer", {"batch": 2, "width": 128, "depth": 2, "tokens": 64, "heads": 4}),
]


def measure_time(workload: Workload, workers: Sequence[Worker], rounds: int, *, dynamic: bool = False) -> Row:
    """Load, compare, time; per peer the seconds of each round. Wrong gradients are not timed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results, errors = load_all(workers, folder, build=True, **workload.write(folder, dynamic=dynamic))
        reference = results.get("torch") or next(iter(results.values()), {})
        differences = {peer: difference(result, reference) for peer, result in results.items()}
        wrong = [peer for peer, value in differences.items() if not value <= workload.tolerance]
        right = [worker for worker in workers if worker.peer in results and worker.peer not in wrong]
        seconds = take_turns(right, rounds, statistics.median) if right else {}
    return {
        "model": workload.name,
        "seconds": seconds,
        "difference": differences,
        "wrong": wrong,
        "errors": errors,
    }


def ask_fresh_process(name: str, tasks: Sequence[str], request: dict[str, Any]) -> dict[str, Any]:
    """The last answer of a process that is started for these tasks, or the first error."""
    answer: dict[str, Any] = {"error": "cannot be started (see above)"}
    worker = start(name)
    if worker is None:
        return answer
    try:
        for task in tasks:
            answer = worker.ask(do=task, calls=MEMORY_STEPS, **request)
            if "error" in answer:
                break
    except WorkerDiedError as error:
        answer = {"error": str(error)}
    finally:
        worker.close()
    return answer


def measure_memory(workload: Workload, names: Sequence[str], *, dynamic: bool = False) -> Row:
    """Per peer the bytes by which the peak of the resident memory rises above that after the imports.

    `steps` is the peak while steps run, `all` the one since the start, which includes reading the model and
    torch.compile's compiling. What the others build ahead of time is built in another process.
    """
    found: Row = {"model": workload.name, "steps": {}, "all": {}, "errors": {}, "wrong": []}
    with tempfile.TemporaryDirectory() as folder:
        request = {**workload.write(Path(folder), dynamic=dynamic), "folder": folder}
        request["results"] = str(Path(folder) / "results.npz")
        for name in names:
            answer = ask_fresh_process(name, ["build"], request)
            if "error" not in answer:
                answer = ask_fresh_process(name, ["load", "memory"], request)
            if "error" in answer:
                found["errors"][name] = answer["error"]
            else:
                found["steps"][name], found["all"][name] = answer["steps"], answer["all"]
    return found


def scaled(workload: Workload) -> Iterator[Workload]:
    """The workload with its batch, width and depth multiplied, one of them at a time."""
    for axis in ("batch", "width", "depth"):
        for factor in FACTORS:
            sizes = {**workload.sizes, axis: factor * workload.sizes[axis]}
            yield replace(workload, name=f"{workload.name}, {axis} {sizes[axis]}", sizes=sizes)
