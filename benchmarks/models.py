"""Time forward and backward of whole models beside PyTorch, torch.compile, onnxruntime-training and onnx-ad.

    python benchmarks/models.py [--only resnet gru] [--peers torch onnx-ad] [--ways auto onnx] [--rounds 7]
                                [--memory | --scaling] [--dynamic] [--markdown] [--json FILE] [--png FILE]

The first run makes the peers' environments under .benchmarks/. All peers get the same model file, weights and
inputs; PyTorch gets the same model as functions. Each is a process of its own with its default settings; they
take turns, round by round, so that noise hits all alike. Gradients are compared first, and what is wrong is
not timed. A round's time is the median of a burst of calls; times are medians over the rounds, ratios medians
of the ratios within a round. docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from comparing import SCALED, Row, measure_memory, measure_time, scaled
from environments import Worker, describe_machine, installed, say
from measuring import geometric_mean, ratio
from peers import PEERS, WAYS, accepted, start_all, title
from tables import number, save_chart, table
from workloads import WORKLOADS, Workload

import ortgrad


def time_cell(row: Row, name: str) -> str:
    """The median in milliseconds, or why there is none."""
    if name in row["seconds"]:
        return number(statistics.median(row["seconds"][name]) * 1e3)
    return "refuses" if name in row["errors"] else "wrong"


def time_table(rows: Sequence[Row], names: Sequence[str], *, markdown: bool) -> str:
    """The last column is the largest difference between gradients."""
    cells = [
        [
            row["model"],
            *(time_cell(row, name) for name in names),
            f"{max(row['difference'].values(), default=0.0):.0e}",
        ]
        for row in rows
    ]
    return table(["ms", *map(title, names), "difference"], cells, markdown=markdown)


def ratio_table(rows: Sequence[Row], way: str, peers: Sequence[str], *, markdown: bool) -> str:
    """Ours over theirs; below 1 ours is faster."""
    values = [[ratio(row["seconds"], way, peer) for peer in peers] for row in rows]
    cells = [[row["model"], *map(number, line)] for row, line in zip(rows, values, strict=True)]
    if len(rows) > 1:
        means = [geometric_mean(column) for column in zip(*values, strict=True)]
        cells.append(["geometric mean", *map(number, means)])
    return table([f"{way} / theirs", *map(title, peers)], cells, markdown=markdown)


def memory_table(rows: Sequence[Row], names: Sequence[str], *, markdown: bool) -> str:
    def cell(row: Row, name: str) -> str:
        if name not in row["steps"]:
            return "refuses" if name in row["errors"] else "-"
        return f"{row['steps'][name] / 1e6:.0f} ({row['all'][name] / 1e6:.0f})"

    cells = [[row["model"], *(cell(row, name) for name in names)] for row in rows]
    return table(["MB, of steps (of all)", *map(title, names)], cells, markdown=markdown)


def problems(rows: Sequence[Row]) -> list[str]:
    """What peers said when they refused, and wrong gradients."""
    lines = [
        f"{row['model']}, {title(name)}: {(error.strip().splitlines() or ['?'])[0][:300]}"
        for row in rows
        for name, error in row["errors"].items()
    ]
    wrong = [
        f"WRONG {row['model']}, {title(name)}: differs by {row['difference'][name]:.1e}"
        for row in rows
        for name in row["wrong"]
    ]
    return lines + wrong


def report_times(
    workloads: Sequence[Workload], workers: Sequence[Worker], arguments: argparse.Namespace
) -> list[Row]:
    rows = []
    names = [worker.peer for worker in workers]
    for workload in workloads:
        row = measure_time(workload, workers, arguments.rounds, dynamic=arguments.dynamic)
        rows.append(row)
        say(f"{workload.name}: {', '.join(f'{title(n)} {time_cell(row, n)}' for n in names)}")
    ways, peers = [n for n in names if n not in PEERS], [n for n in names if n in PEERS]
    print(time_table(rows, names, markdown=arguments.markdown) + "\n")
    for way in ways if peers else ():
        print(ratio_table(rows, way, peers, markdown=arguments.markdown) + "\n")
    if arguments.png and ways and peers:
        ratios = {title(peer): [ratio(row["seconds"], ways[0], peer) for row in rows] for peer in peers}
        save_chart(arguments.png, [row["model"] for row in rows], ratios, f"kernels={ways[0]!r}")
    return rows


def report_memory(
    workloads: Sequence[Workload], names: Sequence[str], arguments: argparse.Namespace
) -> list[Row]:
    rows = []
    for workload in workloads:
        say(f"memory: {workload.name}")
        rows.append(measure_memory(workload, names, dynamic=arguments.dynamic))
    print(memory_table(rows, names, markdown=arguments.markdown) + "\n")
    return rows


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Callable[[str], None]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    models = [workload.name for workload in WORKLOADS]
    parser.add_argument("--only", nargs="+", choices=models, metavar="MODEL", help=f"of {', '.join(models)}")
    parser.add_argument("--peers", nargs="*", choices=PEERS, metavar="PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--ways", nargs="*", choices=WAYS, metavar="WAY", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--dynamic", action="store_true", help="a symbolic batch in the model files")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the ratios; needs matplotlib")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--memory", action="store_true", help="peak memory instead of time")
    mode.add_argument("--scaling", action="store_true", help="time and memory by batch, width and depth")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    if arguments.png and installed("matplotlib") is None:
        parser.error("--png needs matplotlib, which is not installed")
    return arguments, parser.error


def main(argv: Sequence[str] | None = None) -> int:
    arguments, refuse = parse(argv)
    ways = accepted((["auto"] if arguments.scaling else WAYS) if arguments.ways is None else arguments.ways)
    peers = (["torch"] if arguments.scaling else list(PEERS)) if arguments.peers is None else arguments.peers
    chosen = [
        w for w in (SCALED if arguments.scaling else WORKLOADS) if w.name in (arguments.only or [w.name])
    ]
    if not chosen or not ways + peers:
        refuse("nothing to run")
    workloads = [point for base in chosen for point in scaled(base)] if arguments.scaling else chosen

    machine = describe_machine()
    workers = start_all([*ways, *peers])
    names = [worker.peer for worker in workers]
    report: Row = {
        "machine": machine,
        "ortgrad": ortgrad.__version__,
        "rounds": arguments.rounds,
        "times": [],
        "memory": [],
    }
    try:
        report["versions"] = {worker.peer: worker.ask(do="versions")["versions"] for worker in workers}
        for name, found in report["versions"].items():
            say(f"{title(name):16} {', '.join(f'{k} {v}' for k, v in found.items())}")
        command = " ".join(["python benchmarks/models.py", *(sys.argv[1:] if argv is None else argv)])
        print(f"`{command}`: {machine}, {arguments.rounds} rounds.\n")
        if not arguments.memory:
            report["times"] = report_times(workloads, workers, arguments)
    finally:
        for worker in workers:
            worker.close()
    if arguments.memory or arguments.scaling:
        report["memory"] = report_memory(workloads, names, arguments)
    for line in problems(report["times"] + report["memory"]):
        print(f"- {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))
    return int(any(way in row["wrong"] for row in report["times"] for way in ways))


if __name__ == "__main__":
    sys.exit(main())
