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
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from cases import CASES, Case
from environments import Worker, describe_machine, interpreter_for
from measuring import difference, load_all, ratio, take_turns

from ortgrad.operators.declaration import find_operator

ENVIRONMENT = {"training": "training", "torch": "torch"}
TITLES = {
    "python": "NumPy kernel",
    "onnx": "ONNX body",
    "training": "ort-training",
    "torch": "PyTorch",
    "stock": "stock invoker",
}
# Relative to the largest value; the kernels sum in different orders.
TOLERANCE = 1e-4


def run_case(case: Case, workers: list[Worker], rounds: int, folder: Path) -> dict[str, Any]:
    """Load, compare, time; per peer the seconds of each round."""
    feeds = case.feeds()
    np.savez(folder / "feeds.npz", **feeds)
    (folder / "model.onnx").write_bytes(case.model(feeds).SerializeToString())
    attributes = {**case.attributes, "output_shape": case.output_shape}
    results, errors = load_all(
        workers,
        folder,
        op_type=case.op_type,
        attributes=attributes,
        outputs=list(case.outputs),
        model=str(folder / "model.onnx"),
        feeds=str(folder / "feeds.npz"),
    )
    active = [worker for worker in workers if worker.peer in results]
    differences = {p: difference(results[p], results[active[0].peer]) for p in results}
    # What else runs on the machine only ever adds time.
    seconds = take_turns(active, rounds, min)
    operator = find_operator(case.op_type)
    assert operator is not None
    return {
        "case": case.name,
        "auto": operator.auto,
        "seconds": seconds,
        "difference": differences,
        "errors": errors,
    }


def columns(row: dict[str, Any]) -> list[str]:
    """One row of the table. The star marks the way that kernels="auto" takes."""
    cells = [row["case"]]
    for peer in TITLES:
        taken = row["seconds"].get(peer)
        star = "*" if peer == row["auto"] else " "
        cells.append(f"{statistics.median(taken) * 1e3:.2f}{star}" if taken else "- ")
    for over, under in (("training", row["auto"]), ("torch", row["auto"]), ("stock", "python")):
        value = ratio(row["seconds"], over, under)
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

    machine = describe_machine()
    workers = [Worker(peer, python) for peer in TITLES if (python := interpreter_for(ENVIRONMENT.get(peer)))]
    rows = []
    try:
        versions = {worker.peer: worker.ask(do="versions")["versions"] for worker in workers}
        for peer, found in versions.items():
            print(f"{TITLES[peer]:14} {', '.join(f'{k} {v}' for k, v in found.items())}")
        print(f"{machine}, {arguments.rounds} rounds\n")
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
