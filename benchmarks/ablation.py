"""Time forward and backward of whole models without each special kernel, one at a time.

    python benchmarks/ablation.py [MODEL.onnx ...] [--only resnet gru] [--without fuse few_positions_dx]
                                  [--rounds 15] [--threads 1] [--least] [--markdown] [--json FILE] [--list]

A switch leaves out a pass of sessions, a part of fusion or the compiled kernel of an operator, or lets plans
choose otherwise. For each switch that changes something in a model, a session is made without it. That one
and the ordinary session, in the same process, take turns with bursts of calls. What is timed, and the models,
are those of models.py; model files are treated as by field.py, and --only with no names leaves out the models
of models.py. With one thread, time is CPU time of the process, otherwise it is time on the clock.

The column "nodes" says how many nodes are other ones without the switch, or have other plans. "ratio" is the
median over the rounds of the time without divided by the time with it: above 1, the kernel saves time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from environments import say
from field import write
from measuring import difference
from serving import seconds, session_runner
from tables import number, table
from workloads import PICTURES, WORKLOADS

import ortgrad
from ortgrad.operators.declaration import Operator, all_operators
from ortgrad.ops.conv.costs import takes
from ortgrad.pipelines import preparation
from ortgrad.pipelines.prepare import prepare_loaded
from ortgrad.runtime import plans

Arrays = dict[str, np.ndarray]
Off = Callable[[], contextlib.AbstractContextManager[None]]
# The lists of passes, and the passes that have a place of their own.
PASSES, SINGLE = (
    ("FOR_SESSIONS", "BEFORE_BODIES", "FOR_COMPILED"),
    ("expand_constant", "expand_single_channels"),
)
BURST_SECONDS = 0.1


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def by(value: Any) -> Callable[..., Any]:
    """Return a function that returns a value."""
    return lambda *_, **__: value


def declining(choice: str) -> Callable[..., bool]:
    """Return a function that takes the second of two ways of convolutions (see ortgrad.ops.conv.costs)."""
    return lambda name, first, second: name != choice and takes(name, first, second)


NEVER = property(by(False))
FUSION, CONV = "ortgrad.lowering.fusion.fuse", "ortgrad.ops.conv"
# Parts of fusion, and what plans choose: where they say so, and what they would say otherwise.
CHOICES: dict[str, tuple[str, str, Any]] = {
    "fused_sums": (FUSION, "read_sum", by(None)),
    "fused_copies": (FUSION, "drop_copies", by(None)),
    "fused_recomputation": (FUSION, "_compute_again", by(None)),
    "winograd_forward": (f"{CONV}.winograd", "is_fastest", by(False)),
    "convolution_by_rows": (f"{CONV}.costs", "takes", declining("rows")),
    "few_positions_dx": (f"{CONV}._few_positions_plan:FewPositions", "dx_is_possible", NEVER),
    "few_positions_dw": (f"{CONV}._few_positions_plan:FewPositions", "dw_is_possible", NEVER),
    "skipped_padding_dw": (f"{CONV}.costs", "takes", declining("skip")),
    "depthwise_pieces": (f"{CONV}._depthwise_plan", "_piece", by(0)),
    "pool_squares": ("ortgrad.ops._pools", "_are_squares", by(False)),
}


def owner_of(place: str) -> Any:
    """Return a module, or a class of it, "module:class"."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def without_kernel(operator: Operator) -> contextlib.AbstractContextManager[None]:
    """Let nodes of an operator run as they would if its compiled kernel did not exist."""
    kernel = operator.compiled_kernel
    assert kernel is not None
    has_body = operator.body is not None and operator.auto == "onnx"
    return replaced(operator, "compiled_kernel", replace(kernel, auto=False) if has_body else None)


def without_pass(name: str, left_out: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    rest = tuple(each for each in getattr(preparation, name) if each is not left_out)
    return replaced(preparation, name, rest)


def all_switches() -> dict[str, Off]:
    """Return what can be left out, by names: each is a context in which sessions are made without it."""
    switches: dict[str, Off] = {}
    for name in PASSES:
        for each in getattr(preparation, name):
            switches[each.__name__] = lambda name=name, each=each: without_pass(name, each)
    for name in SINGLE:
        switches[name] = lambda name=name: replaced(preparation, name, lambda model: model)
    for name, (place, attribute, value) in CHOICES.items():
        switches[name] = lambda place=place, attribute=attribute, value=value: replaced(
            owner_of(place), attribute, value
        )
    for operator in all_operators():
        if operator.compiled_kernel is not None:
            switches[operator.name] = lambda operator=operator: without_kernel(operator)
    return switches


@dataclass(frozen=True)
class Model:
    """A model with gradients, and what it is fed."""

    name: str
    proto: Any
    feeds: Arrays
    weights: Sequence[str] | None
    # The names of the outputs that are fetched: what was differentiated, and the gradients.
    outputs: Mapping[str, str]
    tolerance: float = 1e-3


def read(name: str, request: Mapping[str, Any], tolerance: float) -> Model:
    """Return the model of a request for model_worker.py."""
    proto = ortgrad.build_gradient_model(request["model"], wrt=request["weights"], of=request["of"])
    with np.load(request["feeds"]) as file:
        feeds = {key: file[key] for key in file.files}
    outputs = [value.name for value in proto.graph.output]
    named = {each: each for each in outputs if each == request["of"] or each.endswith("_grad")}
    return Model(name, proto, feeds, request["weights"], named, tolerance)


@dataclass
class Session:
    """A session after its first run, when all plans are made."""

    run: Callable[[], None]
    results: Arrays
    nodes: Counter[tuple[str, str]]
    plans: Counter[tuple[str, bytes]] = field(default_factory=Counter)


def start(model: Model, threads: int) -> Session:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    prepared = prepare_loaded(model.proto, "auto", bodies=False)
    session = ortgrad.InferenceSession(model.proto, options, kernels="auto")
    run, named = session_runner(session, model.feeds, model.outputs, model.weights)
    made: Counter[tuple[str, bytes]] = Counter()
    make = plans._make_plan

    def recording(kernel: Any, *others: Any) -> Any:
        plan = make(kernel, *others)
        made[kernel.function.__name__, b"" if plan is None else plan.tobytes()] += 1
        return plan

    with replaced(plans, "_make_plan", recording):
        results = {name: array.copy() for name, array in named(run()).items()}
    return Session(run, results, Counter((n.domain, n.op_type) for n in prepared.graph.node), made)


def changed(session: Session, other: Session) -> int:
    """Return how many nodes of a session are others in another one, or have other plans."""
    nodes = session.nodes - other.nodes or other.nodes - session.nodes
    return max(nodes.total(), (session.plans - other.plans).total())


def measure(session: Session, other: Session, rounds: int, threads: int) -> list[tuple[float, float]]:
    """Return the seconds of both in each round: the least of a burst."""
    clock = time.process_time if threads == 1 else time.perf_counter
    pair = [session.run, other.run]
    once = max(1e-6, min(seconds(session.run, 3, time.perf_counter)))
    calls = max(1, round(BURST_SECONDS / once))
    found = []
    for turn in range(rounds):
        least = [0.0, 0.0]
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            # CPU time is counted in steps, which are long for one call of a small model.
            start = clock()
            taken = seconds(pair[i], calls, clock)
            least[i] = (clock() - start) / (calls + 1) if threads == 1 else min(taken)
        found.append((least[0], least[1]))
    return found


Row = dict[str, Any]


def ablate(model: Model, switches: Mapping[str, Off], arguments: argparse.Namespace) -> list[Row]:
    """Return what each switch that changes the model does to its time."""
    base, rows = start(model, arguments.threads), []
    for name, off in switches.items():
        try:
            with off():
                other = start(model, arguments.threads)
        except Exception as error:  # whatever is raised is the result
            rows.append({"model": model.name, "switch": name, "error": f"{type(error).__name__}: {error}"})
            continue
        nodes, differs = changed(base, other), difference(other.results, base.results)
        if nodes == 0:
            continue
        row: Row = {"model": model.name, "switch": name, "nodes": nodes, "difference": differs}
        if differs > model.tolerance:
            row["error"] = f"differs by {differs:.1e}"
        row["seconds"] = measure(base, other, arguments.rounds, arguments.threads)
        rows.append(row)
        say(f"{model.name}, without {name}: {nodes} nodes, {number(ratio(row, least=arguments.least), 3)}")
    return rows


def ratio(row: Row, *, least: bool) -> float | None:
    """Return the time without divided by the time with it."""
    if "seconds" not in row:
        return None
    if least:
        with_it, without = (min(each) for each in zip(*row["seconds"], strict=True))
        return without / with_it
    return statistics.median(without / with_it for with_it, without in row["seconds"])


def report(rows: Sequence[Row], *, least: bool, markdown: bool) -> str:
    """Return a table of all times, and one with the ratios of all models."""
    cells = []
    for row in rows:
        if "seconds" in row:
            times = [statistics.median(each) * 1e3 for each in zip(*row["seconds"], strict=True)]
            label = f"{row['model']}, without {row['switch']}"
            values = [*(number(each, 3) for each in times), number(ratio(row, least=least), 3)]
            cells.append([label, str(row["nodes"]), *values])
    tables = [table(["ms", "nodes", "with", "without", "ratio"], cells, markdown=markdown)]
    models = list(dict.fromkeys(row["model"] for row in rows))
    ratios: dict[str, dict[str, float | None]] = {}
    for row in rows:
        ratios.setdefault(row["switch"], {})[row["model"]] = ratio(row, least=least)
    best = {name: max((each for each in of.values() if each), default=0.0) for name, of in ratios.items()}
    cells = [
        [name, *(number(ratios[name].get(model), 3) for model in models), number(best[name], 3)]
        for name in sorted(ratios, key=lambda name: -best[name])
    ]
    tables.append(table(["without / with", *models, "largest"], cells, markdown=markdown))
    return "\n\n".join(tables)


def models(arguments: argparse.Namespace, folder: Path) -> Iterator[Model]:
    """Return the models of models.py that are wanted, then the files."""
    for workload in WORKLOADS:
        if arguments.only is None or workload.name in arguments.only:
            yield read(workload.name, workload.write(folder), workload.tolerance)
    for path in arguments.files:
        try:
            request = write(path, folder, {}, arguments.batch, None)
        except (OSError, ortgrad.OrtgradError) as error:
            print(f"{path.name} is left out: {error}", file=sys.stderr)
        else:
            yield read(path.name, request, PICTURES)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names, switches = [workload.name for workload in WORKLOADS], list(all_switches())
    parser.add_argument("files", nargs="*", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--only", nargs="*", choices=names, metavar="MODEL", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--without", nargs="+", choices=switches, metavar="SWITCH", help="only these (see --list)"
    )
    parser.add_argument("--list", action="store_true", help="print the names of all switches")
    parser.add_argument("--rounds", type=int, default=15, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each session (1)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="of model files (8)")
    parser.add_argument("--least", action="store_true", help="ratios of the least times, instead of medians")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or arguments.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments, switches = parse(argv), all_switches()
    if arguments.list:
        print("\n".join(switches))
        return 0
    chosen = {name: switches[name] for name in arguments.without or switches}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for model in models(arguments, Path(folder)):
            rows += ablate(model, chosen, arguments)
    print(report(rows, least=arguments.least, markdown=arguments.markdown))
    for row in rows:
        if "error" in row:
            print(f"- {row['model']}, without {row['switch']}: {row['error']}")
    unused = [name for name in chosen if all(row["switch"] != name for row in rows)]
    print(f"\nWhat no model uses: {', '.join(unused) or '-'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
