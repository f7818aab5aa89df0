"""Time every gradient operator beside its peers.

    python benchmarks/run.py [--only SUBSTRING] [--rounds N] [--json FILE]

The first run makes the peers' environments under .benchmarks/. Every peer is a process of its own
with its default settings; they take turns, round by round, so that noise hits all alike, and their
results are compared, so that nothing wrong is timed. A round's time is the best call of a burst; times
are medians over the rounds, ratios medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from cases import CASES, Case

from ortgrad.operators.declaration import find_operator

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".benchmarks"
REQUIREMENTS = {
    "training": ["onnxruntime-training-cpu==1.19.2", "numpy<2", "onnx<1.17"],
    "torch": ["torch==2.13.0", "numpy"],
}
TITLES = {
    "python": "NumPy kernel",
    "onnx": "ONNX body",
    "training": "ort-training",
    "torch": "PyTorch",
    "stock": "stock invoker",
}
# Long enough for a steady state, as in a training loop; the pause lets the last worker's threads go to sleep.
BURST_SECONDS = 0.25
PAUSE_SECONDS = 0.1
# Relative to the largest value; the kernels sum in different orders.
TOLERANCE = 1e-4


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def interpreter_for(peer: str) -> str | None:
    """The Python of the peer's environment, which is made if it is not there; None if it cannot be."""
    if peer not in REQUIREMENTS:
        return sys.executable
    if peer == "torch" and _installed("torch", "2.13.0"):
        return sys.executable
    folder = ENVIRONMENTS / peer
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / "ready.txt"
    wanted = "\n".join(REQUIREMENTS[peer])
    if ready.exists() and ready.read_text() == wanted:
        return str(python)
    say(f"making {folder} with {', '.join(REQUIREMENTS[peer])} ...")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _make_environment(peer, folder)
        subprocess.run([python, "-m", "pip", "install", *REQUIREMENTS[peer]], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"without {TITLES[peer]}: {error}")
        return None
    ready.write_text(wanted)
    return str(python)


def _installed(package: str, version: str) -> bool:
    try:
        return metadata.version(package).split("+")[0] == version
    except metadata.PackageNotFoundError:
        return False


def _make_environment(peer: str, folder: Path) -> None:
    if peer == "training" and sys.version_info >= (3, 12):
        # Its last wheels are for Python 3.11.
        older = shutil.which("python3.11")
        if older is None:
            raise OSError("onnxruntime-training needs Python 3.11 or older, and there is no python3.11")
        subprocess.run([older, "-m", "venv", folder], check=True)
    else:
        venv.create(folder, with_pip=True)


class Worker:
    """A peer's process."""

    def __init__(self, peer: str, python: str) -> None:
        self.peer = peer
        self._process = subprocess.Popen(
            [python, HERE / "worker.py", peer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker for {TITLES[self.peer]} died (see above)")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run_case(case: Case, workers: list[Worker], rounds: int, folder: Path) -> dict[str, Any]:
    """Load, compare, time; per peer the seconds of each round."""
    feeds = case.feeds()
    np.savez(folder / "feeds.npz", **feeds)
    (folder / "model.onnx").write_bytes(case.model(feeds).SerializeToString())
    attributes = {**case.attributes, "output_shape": case.output_shape}
    results, errors = {}, {}
    for worker in workers:
        path = folder / f"{worker.peer}.npz"
        answer = worker.ask(
            do="load",
            op_type=case.op_type,
            attributes=attributes,
            outputs=list(case.outputs),
            model=str(folder / "model.onnx"),
            feeds=str(folder / "feeds.npz"),
            results=str(path),
        )
        if "error" in answer:
            errors[worker.peer] = answer["error"]
            continue
        with np.load(path) as file:
            results[worker.peer] = {name: file[name] for name in file.files}
    active = [worker for worker in workers if worker.peer in results]
    differences = {p: difference(results[p], results[active[0].peer]) for p in results}
    calls = {}
    for worker in active:
        once = min(worker.ask(do="time", calls=3)["seconds"])
        calls[worker.peer] = max(3, min(200, round(BURST_SECONDS / once)))
    seconds: dict[str, list[float]] = {worker.peer: [] for worker in active}
    for turn in range(rounds):
        # Nobody always runs behind the same neighbour.
        start = turn % len(active)
        for worker in active[start:] + active[:start]:
            time.sleep(PAUSE_SECONDS)
            burst = worker.ask(do="time", calls=calls[worker.peer])["seconds"]
            # What else runs on the machine only ever adds time.
            seconds[worker.peer].append(min(burst))
    operator = find_operator(case.op_type)
    assert operator is not None
    return {
        "case": case.name,
        "auto": operator.auto,
        "seconds": seconds,
        "difference": differences,
        "errors": errors,
    }


def difference(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference in any output, relative to the largest value there."""
    worst = 0.0
    for name, array in expected.items():
        if actual[name].shape != array.shape:
            return float("inf")
        scale = float(np.abs(array).max()) or 1.0
        worst = max(worst, float(np.abs(actual[name] - array).max()) / scale)
    return worst


def ratio(row: dict[str, Any], over: str, under: str) -> float | None:
    seconds = row["seconds"]
    if over not in seconds or under not in seconds:
        return None
    return statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))


def columns(row: dict[str, Any]) -> list[str]:
    """One row of the table. The star marks the way that kernels="auto" takes."""
    cells = [row["case"]]
    for peer in TITLES:
        taken = row["seconds"].get(peer)
        star = "*" if peer == row["auto"] else " "
        cells.append(f"{statistics.median(taken) * 1e3:.2f}{star}" if taken else "- ")
    for over, under in (("training", row["auto"]), ("torch", row["auto"]), ("stock", "python")):
        value = ratio(row, over, under)
        cells.append(f"{value:.2f}" if value is not None else "-")
    cells.append(f"{max(row['difference'].values(), default=0.0):.0e}")
    return cells


HEADER = [
    "ms",
    *TITLES.values(),
    "ort-training / auto",
    "PyTorch / auto",
    "stock / NumPy kernel",
    "difference",
]


def print_row(cells: list[str], first: int) -> None:
    widths = [first, *(max(len(title), 8) for title in HEADER[1:])]
    print(
        "  ".join([cells[0].ljust(first), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only.lower() in case.name.lower()]
    if not cases or arguments.rounds < 1:
        parser.error("nothing to run")

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    workers = [Worker(peer, python) for peer in TITLES if (python := interpreter_for(peer))]
    rows = []
    try:
        versions = {worker.peer: worker.ask(do="versions")["versions"] for worker in workers}
        for peer, found in versions.items():
            print(f"{TITLES[peer]:14} {', '.join(f'{k} {v}' for k, v in found.items())}")
        machine = f"{platform.platform()}, {os.cpu_count()} CPUs, load {load:.1f} at the start"
        print(f"{machine}, {arguments.rounds} rounds\n")
        if load > (os.cpu_count() or 1) / 2:
            say("the machine is busy with something else: do not trust these times")
        first = max(len(case.name) for case in cases)
        print_row(HEADER, first)
        with tempfile.TemporaryDirectory() as folder:
            for case in cases:
                row = run_case(case, workers, arguments.rounds, Path(folder))
                rows.append(row)
                print_row(columns(row), first)
    finally:
        for worker in workers:
            worker.close()

    print('\n* what kernels="auto" takes. Ratios above 1: ortgrad is faster.')
    wrong = [
        f"{row['case']}: {TITLES[peer]} differs by {value:.1e}"
        for row in rows
        for peer, value in row["difference"].items()
        if not value <= TOLERANCE
    ]
    for row in rows:
        for peer, error in row["errors"].items():
            print(f"- {row['case']}, {TITLES[peer]}: {error.splitlines()[0][:160]}")
    for line in wrong:
        print(f"WRONG {line}")
    if arguments.json:
        report = {"machine": machine, "versions": versions, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
