"""Time forward and backward over forward alone, for model files of any origin.

    python benchmarks/field.py MODEL.onnx ... [--batch 8] [--feeds FILE.npz] [--of NAME] [--ways auto onnx]
                                [--rounds 5] [--markdown] [--json FILE]

Backward goes from the first floating-point output, seeded at random, towards all weights. Forward is the file
on stock onnxruntime. Inputs that are not fed are random; a symbolic first dimension is the batch. Processes
take turns as in models.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from environments import Worker, say
from measuring import RunFailedError, difference, load_all, ratio, take_turns
from peers import WAYS, accepted, start_all
from tables import number, table

import ortgrad
from ortgrad.check.random_feeds import complete_feeds
from ortgrad.check.running import CannotRunError, on_onnxruntime
from ortgrad.graph.loading import load_model
from ortgrad.graph.protos import FLOATS

FORWARD = "forward"
Arrays = dict[str, np.ndarray]
Row = dict[str, Any]


def with_batch(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """The model with its batch fixed: the first dimension of inputs that has no size, and its namesakes."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    defaults = {tensor.name for tensor in model.graph.initializer}
    inputs = [v.type.tensor_type.shape.dim for v in fixed.graph.input if v.name not in defaults]
    first = [dims[0] for dims in inputs if dims and dims[0].dim_value <= 0]
    names = {dim.dim_param for dim in first} - {""}
    for dim in [*first, *(dim for dims in inputs for dim in dims if dim.dim_param in names)]:
        dim.dim_value = batch
    return fixed


def differentiated(model: onnx.ModelProto) -> str:
    """The first output of a floating-point type."""
    for value in model.graph.output:
        if value.type.tensor_type.elem_type in FLOATS:
            return value.name
    raise ortgrad.ModelError("no output is a tensor of a floating-point type")


def write(
    path: Path, folder: Path, given: Mapping[str, np.ndarray], batch: int, of: str | None
) -> dict[str, Any]:
    """Write what is fed, the seed with it; returns the requests for model_worker.py."""
    model = load_model(path)
    of = of or differentiated(model)
    own = {value.name for value in model.graph.input}
    fixed = with_batch(model, batch)
    fed = {name: array for name, array in given.items() if name in own}
    generator = np.random.default_rng(0)
    feeds: Arrays = complete_feeds(fixed, fed, [of], set(), generator)
    output = on_onnxruntime(fixed)(feeds)[of]
    # Not ones: the sum of a Softmax has no gradient.
    seed = generator.standard_normal(output.shape).astype(output.dtype)
    np.savez(folder / "feeds.npz", **feeds, **{f"{of}_grad": seed})
    return {"model": str(path.resolve()), "feeds": str(folder / "feeds.npz"), "weights": None, "of": of}


def run_file(path: Path, workers: Sequence[Worker], arguments: argparse.Namespace, given: Arrays) -> Row:
    row: Row = {"model": path.name, "seconds": {}, "errors": {}, "difference": 0.0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            request = write(path, folder, given, arguments.batch, arguments.of)
        except (OSError, ortgrad.OrtgradError, CannotRunError) as error:
            return {**row, "errors": {FORWARD: str(error)}}
        results, row["errors"] = load_all(workers, folder, build=True, **request)
        ways = [result for peer, result in results.items() if peer != FORWARD]
        row["difference"] = max((difference(way, ways[0]) for way in ways[1:]), default=0.0)
        active = [worker for worker in workers if worker.peer in results]
        try:
            if active:
                row["seconds"] = take_turns(active, arguments.rounds, statistics.median, (1, 100))
        except RunFailedError as error:
            row["errors"]["timing"] = str(error)
    return row


def report(rows: Sequence[Row], ways: Sequence[str], *, markdown: bool) -> str:
    """Times, and how many times as long as forward alone; last the middle and the ninth of ten."""

    def milliseconds(row: Row, name: str) -> str:
        taken = row["seconds"].get(name)
        return number(statistics.median(taken) * 1e3 if taken else None)

    ratios = {way: [ratio(row["seconds"], way, FORWARD) for row in rows] for way in ways}
    names = [FORWARD, *ways]
    cells = [
        [
            row["model"],
            *(milliseconds(row, name) for name in names),
            *(number(ratios[way][i], 1) for way in ways),
            f"{row['difference']:.0e}",
        ]
        for i, row in enumerate(rows)
    ]
    for label, share in (("median", 0.5), ("one in ten above", 0.9)):
        found = ([value for value in ratios[way] if value is not None] for way in ways)
        shares = [number(float(np.quantile(values, share)) if values else None, 1) for values in found]
        cells.append([label, *("" for _ in names), *shares, ""])
    header = ["ms", *names, *(f"{way} / forward" for way in ways), "difference"]
    return table(header, cells, markdown=markdown)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--batch", type=int, default=8, metavar="N")
    parser.add_argument(
        "--feeds", type=Path, metavar="FILE.npz", help="inputs by name; the others are random"
    )
    parser.add_argument("--of", metavar="NAME", help="what to differentiate, instead of the first output")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["auto", "onnx"])
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    arguments = parser.parse_args(argv)
    given: Arrays = dict(np.load(arguments.feeds)) if arguments.feeds else {}
    ways = accepted(arguments.ways)
    workers = start_all([FORWARD, *ways])
    rows = []
    try:
        for path in arguments.models:
            say(str(path))
            rows.append(run_file(path, workers, arguments, given))
    finally:
        for worker in workers:
            worker.close()
    print(report(rows, ways, markdown=arguments.markdown))
    for row in rows:
        for name, error in row["errors"].items():
            print(f"- {row['model']}, {name}: {error.strip().splitlines()[0][:200]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
