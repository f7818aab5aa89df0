"""Time every gradient operator beside its peers.

    python benchmarks/run.py [--only SUBSTRING] [--peers NAME ...] [--rounds N] [--threads N] [--json FILE]
    python benchmarks/run.py --per-node [--rounds N] [--threads N]

The first run makes the peers' environments under .benchmarks/. Every peer is a process of its own; they take
turns, round by round, so that noise hits all alike, and their results are compared, so that nothing wrong is
timed. In every round the case is loaded anew. A round's time is the best call of a burst; times are medians
over the rounds, ratios medians of the ratios within a round.

Inputs are bound once, and sessions write their outputs to memory that they keep. By default the peers use as
many threads as they choose, and the time is that on the clock. With --threads 1 it is CPU time, which other
processes on the machine hardly change.

--per-node gives the cost of a node on 64 elements: what a chain of 101 takes longer than a single one.
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
from cases import CASES, Case, chain, normal
from environments import Worker, describe_machine, interpreter_for
from measuring import difference, load_all, ratio, take_turns

ENVIRONMENT = {"training": "training", "torch": "torch"}
TITLES = {
    "auto": "auto",
    "compiled": "compiled",
    "onnx": "ONNX body",
    "python": "NumPy kernel",
    "training": "ort-training",
    "torch": "PyTorch",
    "stock": "stock invoker",
}
RATIOS = (("training", "auto"), ("torch", "auto"), ("stock", "python"))
PER_NODE = {
    "registered": "compiled, not fused",
    "auto": "auto, fused",
    "training": "ort-training",
    "torch": "PyTorch",
}
# Relative to the largest value; the kernels sum in different orders.
TOLERANCE = 1e-4
LONG_CHAIN = 101


class Measuring:
    """The peers' processes, and how their calls are timed."""

    def __init__(self, workers: list[Worker], rounds: int, threads: int | None) -> None:
        self.workers = workers
        self.rounds = rounds
        self.threads = threads

    @property
    def clock(self) -> str:
        return "process_time" if self.threads == 1 else "perf_counter"

    def measure(self, folder: Path, **request: Any) -> dict[str, Any]:
        """Load, compare, time; per peer the seconds of each round."""
        files = {"model": str(folder / "model.onnx"), "feeds": str(folder / "feeds.npz")}
        seconds: dict[str, list[float]] = {}
        differences: dict[str, float] = {}
        workers, errors = list(self.workers), {}
        for turn in range(self.rounds):
            # Loaded anew, because times depend on where in memory the tensors happen to be.
            results, failed = load_all(workers, folder, **request, **files, threads=self.threads)
            errors.update(failed)
            workers = [worker for worker in workers if worker.peer in results]
            expected = results[workers[0].peer]
            for worker in workers:
                found = difference(results[worker.peer], expected)
                differences[worker.peer] = max(found, differences.get(worker.peer, 0.0))
            # What else runs on the machine only ever adds time. Nobody always runs behind the same neighbour.
            start = turn % len(workers)
            for peer, taken in take_turns(
                [*workers[start:], *workers[:start]], 1, min, clock=self.clock
            ).items():
                seconds.setdefault(peer, []).extend(taken)
        return {"seconds": seconds, "difference": differences, "errors": errors}


def run_case(case: Case, measuring: Measuring, folder: Path) -> dict[str, Any]:
    feeds = case.feeds()
    np.savez(folder / "feeds.npz", **feeds)
    (folder / "model.onnx").write_bytes(case.model(feeds).SerializeToString())
    attributes = {**case.attributes, "output_shape": case.output_shape}
    measured = measuring.measure(
        folder, op_type=case.op_type, attributes=attributes, outputs=list(case.outputs)
    )
    return {"case": case.name, **measured}


def run_chain(count: int, measuring: Measuring, folder: Path) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    np.savez(folder / "feeds.npz", dY=normal(generator, (64,)), X=normal(generator, (64,)))
    (folder / "model.onnx").write_bytes(chain(count).SerializeToString())
    measured = measuring.measure(folder, op_type="chain", attributes={"count": count}, outputs=["dX"])
    return {"case": f"chain of {count}", **measured}


def per_node(short: dict[str, Any], long: dict[str, Any]) -> dict[str, float]:
    """Per peer the seconds that one node more takes."""
    return {
        peer: (statistics.median(taken) - statistics.median(short["seconds"][peer])) / (LONG_CHAIN - 1)
        for peer, taken in long["seconds"].items()
        if peer in short["seconds"]
    }


def columns(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    cells = [row["case"]]
    for peer in TITLES:
        taken = row["seconds"].get(peer)
        cells.append(f"{statistics.median(taken) * 1e3:.3f}" if taken else "-")
    for over, under in RATIOS:
        value = ratio(row["seconds"], over, under)
        cells.append(f"{value:.2f}" if value is not None else "-")
    cells.append(f"{max(row['difference'].values(), default=0.0):.0e}")
    return cells


HEADER = [
    "ms",
    *TITLES.values(),
    *(f"{TITLES[over]} / {TITLES[under]}" for over, under in RATIOS),
    "difference",
]


def print_row(cells: list[str], first: int) -> None:
    widths = [first, *(max(len(title), 8) for title in HEADER[1:])]
    print(
        "  ".join([cells[0].ljust(first), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]),
        flush=True,
    )


def time_cases(cases: list[Case], measuring: Measuring, folder: Path) -> list[dict[str, Any]]:
    first = max(len(case.name) for case in cases)
    print_row(HEADER, first)
    rows = []
    for case in cases:
        rows.append(run_case(case, measuring, folder))
        print_row(columns(rows[-1]), first)
    print("\nRatios above 1: ortgrad is faster.")
    return rows


def time_nodes(measuring: Measuring, folder: Path) -> list[dict[str, Any]]:
    rows = [run_chain(count, measuring, folder) for count in (1, LONG_CHAIN)]
    for peer, seconds in per_node(*rows).items():
        print(f"{PER_NODE[peer]:20} {seconds * 1e6:6.2f} us per node")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases whose name contains this")
    parser.add_argument("--peers", nargs="+", choices=list(TITLES), metavar="NAME", help=", ".join(TITLES))
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of every peer; with 1, CPU time is measured"
    )
    parser.add_argument("--per-node", action="store_true", help="the cost of a node on 64 elements instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only.lower() in case.name.lower()]
    if not cases or arguments.rounds < 1:
        parser.error("nothing to run")

    machine = describe_machine()
    titles = PER_NODE if arguments.per_node else TITLES
    peers = [peer for peer in titles if arguments.per_node or peer in (arguments.peers or TITLES)]
    workers = [Worker(peer, python) for peer in peers if (python := interpreter_for(ENVIRONMENT.get(peer)))]
    measuring = Measuring(workers, arguments.rounds, arguments.threads)
    try:
        versions = {worker.peer: worker.ask(do="versions")["versions"] for worker in workers}
        for peer, found in versions.items():
            print(f"{titles[peer]:20} {', '.join(f'{k} {v}' for k, v in found.items())}")
        threads = f"threads: {arguments.threads or 'as the peers choose'}"
        kind = "CPU time" if measuring.clock == "process_time" else "wall time"
        print(f"{machine}, {threads}, {kind}, {arguments.rounds} rounds\n")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            rows = (
                time_nodes(measuring, folder) if arguments.per_node else time_cases(cases, measuring, folder)
            )
    finally:
        for worker in workers:
            worker.close()

    wrong = [
        f"{row['case']}: {titles[peer]} differs by {value:.1e}"
        for row in rows
        for peer, value in row["difference"].items()
        if not value <= TOLERANCE
    ]
    for row in rows:
        for peer, error in row["errors"].items():
            print(f"- {row['case']}, {titles[peer]}: {error.splitlines()[0][:160]}")
    for line in wrong:
        print(f"WRONG {line}")
    if arguments.json:
        report = {"machine": machine, "clock": measuring.clock, "versions": versions, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
