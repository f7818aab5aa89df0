"""Random graphs: their gradients compared with float64 differences, in all ways to run them.

    python tests/sweeps/random_graphs.py --count 5000 --seed 0 --jobs 2   # a summary, and failures made small
    python tests/sweeps/random_graphs.py --show 17                        # one model as text
    python tests/sweeps/random_graphs.py --shrink 17                      # one failing model, made small

The differences are those of onnx's reference evaluator in float64; `reference_ops.py` says for which
operators it is replaced, and why. Where a difference cannot be told (a kink in the way) another direction
is drawn.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state
from onnx import helper, numpy_helper

import ortgrad

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import graph_operators  # noqa: F401  (declares the operators)
from support.graph_builder import (
    Arrays,
    RandomGraph,
    generate,
    in_float32,
)
from support.reference_ops import evaluator

ORT_ERRORS: tuple[type[Exception], ...] = tuple(
    e for e in vars(ort_state).values() if isinstance(e, type) and issubclass(e, Exception)
)
STEPS = (1e-4, 1e-5, 1e-3, 1e-6)
DOUBLE, SINGLE = np.dtype(np.float64), np.dtype(np.float32)
# onnxruntime's fusions round a scale of float64 products to float32.
FORWARD_TOLERANCES = {DOUBLE: 1e-6, SINGLE: 1e-3}
TOLERANCES = {DOUBLE: 3e-6, SINGLE: 3e-3}

RIGHT, WRONG, NOT_LOADED, REFUSED, UNUSABLE = "right", "wrong", "forward only", "refused", "no oracle"
RAW = "raw exception"
FAILURES = (WRONG, NOT_LOADED, RAW)


@dataclass
class Outcome:
    """What became of one graph."""

    kind: str
    text: str = ""
    way: str = ""
    operators: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # ways that it was compared with
    checked: int = 0  # gradients that were compared with differences

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


# Ways to run a built model.


def _options(level: onnxruntime.GraphOptimizationLevel | None = None) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if level is not None:
        options.graph_optimization_level = level
    return options


OFF = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def _own(kernels: str, level: onnxruntime.GraphOptimizationLevel | None = None) -> Callable:
    return lambda model: ortgrad.InferenceSession(model, _options(level), kernels=kernels)


def _plain(level: onnxruntime.GraphOptimizationLevel | None = None, *, registered: bool = False) -> Callable:
    def make(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
        options = _options(level)
        if registered:
            ortgrad.register(options)
        return onnxruntime.InferenceSession(model.SerializeToString(), options)

    return make


WAYS: dict[str, Callable[[onnx.ModelProto], onnxruntime.InferenceSession]] = {
    "python": _own("python"),
    "onnx": _own("onnx"),
    "auto": _own("auto"),
    "plain": _plain(),
    "registered": _plain(registered=True),
    "auto, not optimised": _own("auto", OFF),
    "plain, not optimised": _plain(OFF),
    "registered, not optimised": _plain(OFF, registered=True),
}


# The oracle.


class Oracle:
    """The forward model in float64, as a function of what its targets are moved by."""

    def __init__(self, graph: RandomGraph, seeds: Arrays) -> None:
        model = onnx.ModelProto()
        model.CopyFrom(graph.model)
        self._seeds = seeds
        self._feeds = dict(graph.feeds)
        weights = {t.name: t for t in model.graph.initializer}
        produced = {name: node for node in model.graph.node for name in node.output}
        inputs = {v.name for v in model.graph.input}
        self._moved: dict[str, str] = {}
        for name in graph.wrt:
            if name in produced:
                # Everybody reads the sum of the value and what it is moved by.
                node, delta = produced[name], f"{name}//delta"
                position = list(node.output).index(name)
                node.output[position] = f"{name}//before"
                at = list(model.graph.node).index(node)
                model.graph.node.insert(at + 1, helper.make_node("Add", [f"{name}//before", delta], [name]))
                model.graph.input.append(helper.make_tensor_value_info(delta, onnx.TensorProto.DOUBLE, None))
                self._feeds[delta] = np.zeros(())
                self._moved[name] = delta
            else:
                if name in weights:
                    self._feeds[name] = numpy_helper.to_array(weights[name])
                    model.graph.initializer.remove(weights[name])
                    if name not in inputs:
                        info = helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, None)
                        model.graph.input.append(info)
                self._moved[name] = name
        self._outputs = [o.name for o in model.graph.output]
        names = [*self._outputs, *(n for n in graph.wrt if n not in self._outputs)]
        del model.graph.output[:]
        model.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in names)
        self._evaluator = evaluator(model)
        self.values = self._run({})

    def noise(self, name: str, direction: np.ndarray, derivative: float) -> float:
        """How much the derivative changes if what is fed changes by a hundred roundings of float32.

        Where that is much, as behind a variance that is a difference of squares, float32 tells nothing.
        """
        exact, rng = self._feeds, np.random.default_rng(0)
        moved = {delta: self.values[target] for target, delta in self._moved.items()}
        found = []
        for _ in range(4):
            self._feeds = {
                n: a + moved.get(n, a) * rng.uniform(-1e-5, 1e-5, moved.get(n, a).shape)
                if a.dtype.kind == "f"
                else a
                for n, a in exact.items()
            }
            found.append(self.derivative(name, direction))
        self._feeds = exact
        changes = [abs(value - derivative) for value in found if value is not None]
        return max(changes, default=np.inf)

    def _run(self, moved: Arrays) -> Arrays:
        feeds = dict(self._feeds)
        for name, by in moved.items():
            feeds[self._moved[name]] = feeds[self._moved[name]] + by
        names = self._evaluator.output_names
        with np.errstate(all="ignore"):
            return dict(zip(names, map(np.asarray, self._evaluator.run(None, feeds)), strict=True))

    def _total(self, moved: Arrays) -> float:
        values = self._run(moved)
        return float(sum(np.sum(seed * values[name]) for name, seed in self._seeds.items()))

    def derivative(self, name: str, direction: np.ndarray) -> float | None:
        """Along a direction; None if there is a kink, or the numbers do not tell."""
        base = self._total({})
        for step in STEPS:

            def difference(h: float) -> tuple[float, float]:
                up, down = self._total({name: h * direction}), self._total({name: -h * direction})
                return (up - down) / (2 * h), (up - 2 * base + down) / h

            (coarse, bend), (middle, half_bend), (fine, _) = (difference(step / 2**i) for i in range(3))
            first, second = (4 * middle - coarse) / 3, (4 * fine - middle) / 3
            scale = abs(second) + 1e-3 * (1 + abs(base))
            # At a kink the second difference over the step stays; elsewhere it halves with the step.
            kink = abs(half_bend) > 0.7 * abs(bend) and abs(half_bend) > 1e-6 * scale
            if np.isfinite(second) and abs(first - second) <= 1e-7 * scale and not kink:
                return second
        return None


# One graph.


def check(graph: RandomGraph, seed: int = 0, ways: Sequence[str] = tuple(WAYS)) -> Outcome:
    """Build, load and run in all ways, in float64 where onnxruntime can, and in float32."""
    outcome = _check(graph, seed, ways)
    if outcome.kind == WRONG and (other := _forward_difference(graph)):
        outcome = Outcome(UNUSABLE, f"{other} is one thing in onnxruntime and another in the oracle")
    outcome.operators = sorted(graph.operators)
    return outcome


def _forward_difference(graph: RandomGraph) -> str:
    """The first operator whose forward result is not the oracle's; outputs may hide it."""
    values, model = _all_values(graph), onnx.ModelProto()
    model.CopyFrom(graph.model)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    wanted = [n for node in nodes for n in node.output if n and values[n].dtype == np.float64]
    del model.graph.output[:]
    infos = [helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, None) for n in wanted]
    model.graph.output.extend(infos)
    single = in_float32(model)
    results = WAYS["plain, not optimised"](single).run(wanted, _fed(graph.feeds, SINGLE))
    for name, result in zip(wanted, results, strict=True):
        if not _close(result, values[name], FORWARD_TOLERANCES[SINGLE]):
            return next(node.op_type for node in nodes if name in node.output)
    return ""


def _check(graph: RandomGraph, seed: int, given: Sequence[str]) -> Outcome:
    rng = np.random.default_rng(seed)
    models = {}
    problems = []
    for dtype, model in ((DOUBLE, graph.model), (SINGLE, in_float32(graph.model))):
        try:
            forward = [
                onnxruntime.InferenceSession(model.SerializeToString(), _options(o)) for o in (None, OFF)
            ]
            models[dtype] = model, [f.run(None, _fed(graph.feeds, dtype)) for f in forward]
        except ORT_ERRORS as error:
            problems.append(str(error))
    if not models:
        return Outcome(UNUSABLE, f"onnxruntime does not run the forward model: {_short(problems[-1])}")
    names = [o.name for o in graph.model.graph.output]
    values = dict(zip(names, next(iter(models.values()))[1][0], strict=True))
    alone = len(graph.of) == 1 and values[graph.of[0]].shape == ()
    seeds = {n: np.ones(()) if alone else _rounded(rng.standard_normal(values[n].shape)) for n in graph.of}
    oracle = Oracle(graph, seeds)
    for dtype, (_, results) in models.items():
        for name, result in zip(names * 2, [*results[0], *results[1]], strict=True):
            if not _close(result, oracle.values[name], FORWARD_TOLERANCES[dtype]):
                return Outcome(UNUSABLE, f"forward results disagree in {dtype}: {name}")
    expected = {}
    for name in graph.wrt:
        for _ in range(3):
            direction = rng.standard_normal(oracle.values[name].shape)
            derivative = oracle.derivative(name, direction)
            if derivative is not None:
                expected[name] = direction, derivative
                break
    if not expected:
        return Outcome(UNUSABLE, "kinks in every direction")
    wrt, ways = list(expected), given
    for i, (dtype, (model, _)) in enumerate(models.items()):
        if len(models) > 1 and len(given) == len(WAYS):
            # Every way on every graph, and every way in both types on every other one.
            ways = [way for j, way in enumerate(given) if (i + j + seed) % 2 == 0]
        outcome = _check_built(graph, model, dtype, wrt, seeds, expected, oracle, ways)
        if outcome.kind != RIGHT:
            return outcome
    return Outcome(RIGHT, checked=len(expected) * len(models))


def _check_built(
    graph: RandomGraph,
    model: onnx.ModelProto,
    dtype: np.dtype,
    wrt: list[str],
    seeds: Arrays,
    expected: dict[str, tuple[np.ndarray, float]],
    oracle: Oracle,
    ways: Sequence[str],
) -> Outcome:
    try:
        with warnings.catch_warnings():
            # The differences tell whether the gradients are zero.
            warnings.simplefilter("ignore", ortgrad.StoppedGradientWarning)
            built = ortgrad.build_gradient_model(model, wrt=wrt, of=graph.of)
    except ortgrad.OrtgradError as error:
        return Outcome(REFUSED, f"{type(error).__name__}: {error}", "build")
    except Exception as error:
        return Outcome(RAW, f"{type(error).__name__}: {error}", "build")
    known = {v.name for v in model.graph.input}
    # New inputs are seeds, in the order of `of`, and weights that can be fed from now on.
    weights = {t.name for t in built.graph.initializer}
    added = [v.name for v in built.graph.input if v.name not in known | weights]
    feeds = _fed(graph.feeds, dtype)
    if added:
        feeds |= {n: np.asarray(seed, dtype) for n, seed in zip(added, seeds.values(), strict=True)}
    outputs = [o.name for o in built.graph.output]
    first: list[np.ndarray] | None = None
    tolerance = TOLERANCES[dtype]
    for way in ways:
        label = f"{way}, {dtype}"
        try:
            session = WAYS[way](built)
            results = session.run(outputs, feeds)
        except Exception as error:
            return Outcome(NOT_LOADED, f"{type(error).__name__}: {error}", label)
        for name, result in zip(outputs[: -len(wrt)], results, strict=False):
            if not _close(result, oracle.values[name], FORWARD_TOLERANCES[dtype]):
                return Outcome(WRONG, f"forward output {name!r} differs", label)
        for name, grad in zip(wrt, results[-len(wrt) :], strict=True):
            direction, derivative = expected[name]
            if grad.shape != direction.shape or grad.dtype != dtype:
                text = f"{name!r}: {grad.dtype}{grad.shape} for {dtype}{direction.shape}"
                return Outcome(WRONG, text, label)
            terms = grad.astype(np.float64) * direction
            scale = abs(derivative) + float(np.sqrt(np.sum(terms**2))) + 1e-3
            error = abs(float(terms.sum()) - derivative)
            if not error <= tolerance * scale:
                text = f"{name!r}: {terms.sum():.9g} for {derivative:.9g}"
                if dtype == SINGLE and error <= 3 * oracle.noise(name, direction, derivative):
                    return Outcome(UNUSABLE, f"rounding of what is fed explains {text}", label)
                return Outcome(WRONG, text, label)
        if first is None:
            first = results
        for name, result, other in zip(outputs, results, first, strict=True):
            if not _close(result, other, TOLERANCES[dtype]):
                return Outcome(
                    WRONG, f"{name!r} differs between {ways[0]!r} and {way!r}", label, others=[ways[0]]
                )
    return Outcome(RIGHT)


def _fed(feeds: Arrays, dtype: np.dtype) -> Arrays:
    return {n: np.asarray(a, dtype if a.dtype.kind == "f" else None) for n, a in feeds.items()}


def _rounded(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32).astype(np.float64)


def _close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    if actual.shape != expected.shape:
        return False
    if actual.dtype.kind != "f":
        return bool(np.array_equal(actual, expected))
    if actual.size == 0:
        return True
    scale = max(1.0, float(np.abs(expected).max()))
    return bool(np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max() <= tolerance * scale)


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


# Making failures small.


def shrink(graph: RandomGraph, seed: int, outcome: Outcome) -> RandomGraph:
    """A smaller graph that fails in the same way."""
    way = outcome.way.split(", float")[0]
    ways = [*outcome.others, way] if way in WAYS else list(WAYS)

    def fails(candidate: RandomGraph) -> bool:
        result = check(candidate, seed, ways)
        return result.kind == outcome.kind and _gist(result.text) == _gist(outcome.text)

    return minimise(graph, fails)


def _gist(text: str) -> str:
    """A message without names and numbers."""
    return re.sub(r"'[^']*'|\([^)]*\)|[\d.]+", "", text)[:300]


def minimise(graph: RandomGraph, fails: Callable[[RandomGraph], bool]) -> RandomGraph:
    """Other outputs, fewer targets, values given instead of computed, as long as it fails."""
    while True:
        for candidate in _smaller(graph):
            if _size(candidate) >= _size(graph):
                continue
            try:
                failed = fails(candidate)
            except Exception:  # a cut that makes an invalid model is no step
                failed = False
            if failed:
                graph = candidate
                break
        else:
            return graph


def _size(graph: RandomGraph) -> int:
    return len(graph.model.graph.node) + len(graph.wrt) + len(graph.of)


def _smaller(graph: RandomGraph) -> Iterator[RandomGraph]:
    if len(graph.wrt) > 1:
        for name in graph.wrt:
            yield _cut(graph, wrt=[name])
    if len(graph.of) > 1:
        for name in graph.of:
            yield _cut(graph, of=[name])
    values = _all_values(graph)
    floats = [n for n, a in values.items() if a.dtype == np.float64]
    nodes = graph.model.graph.node
    produced = [name for node in nodes for name in node.output if name in floats]
    if len(nodes) > 1:
        for name in produced[:-1]:
            yield _cut(graph, of=[name])
    for node in reversed(nodes):
        if node.op_type != "Constant" and all(n in values for n in node.output if n):
            yield _cut(graph, given={n: values[n] for n in node.output if n})


def _all_values(graph: RandomGraph) -> Arrays:
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    names = [n for node in model.graph.node for n in node.output if n]
    del model.graph.output[:]
    model.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in names)
    with np.errstate(all="ignore"):
        return dict(zip(names, map(np.asarray, evaluator(model).run(None, graph.feeds)), strict=True))


def _cut(
    graph: RandomGraph,
    *,
    wrt: list[str] | None = None,
    of: list[str] | None = None,
    given: Arrays | None = None,
) -> RandomGraph:
    """Other targets or outputs, or values that become inputs; what is then unused goes."""
    given, of = given or {}, of or graph.of
    wrt = wrt or graph.wrt
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    g = model.graph
    nodes = [node for node in g.node if not set(node.output) & set(given)]
    needed, kept = {*of, *wrt}, []
    for node in reversed(nodes):
        if needed & set(node.output):
            kept.append(node)
            needed |= set(_names_in(node))
    del g.node[:]
    g.node.extend(reversed(kept))
    declared = {o.name: o for o in g.output}
    outputs = [declared.get(n) or helper.make_tensor_value_info(n, onnx.TensorProto.DOUBLE, None) for n in of]
    inputs = [v for v in g.input if v.name in needed]
    inputs += [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in given.items()
        if n in needed
    ]
    initializers = [t for t in g.initializer if t.name in needed]
    del g.output[:], g.input[:], g.initializer[:]
    g.output.extend(outputs)
    g.input.extend(inputs)
    g.initializer.extend(initializers)
    weights = {t.name for t in initializers}
    values = graph.feeds | given
    feeds = {v.name: values[v.name] for v in inputs if v.name not in weights}
    return RandomGraph(model, feeds, wrt, of)


def _names_in(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                yield from _names_in(inner)
            yield from (o.name for o in attribute.g.output)


# The command.


def _run_seeds(seeds: Sequence[int], *, small: bool) -> Iterator[dict]:
    for seed in seeds:
        graph = generate(seed)
        outcome = check(graph, seed)
        row = {"seed": seed, "kind": outcome.kind, "text": outcome.text, "way": outcome.way}
        row |= {
            "operators": outcome.operators,
            "checked": outcome.checked,
            "nodes": len(graph.model.graph.node),
        }
        if outcome.failed and small:
            tiny = shrink(graph, seed, outcome)
            row["small"] = [n.op_type for n in tiny.model.graph.node if n.op_type != "Constant"]
        yield row


def describe(graph: RandomGraph) -> str:
    feeds = "\n".join(
        f"  {n}: {a.dtype}{list(a.shape)} {a.ravel()[:4].tolist()}" for n, a in graph.feeds.items()
    )
    return f"{onnx.printer.to_text(graph.model)}\nwrt={graph.wrt} of={graph.of}\nfeeds:\n{feeds}"


def _in_processes(first: int, count: int, jobs: int, small: bool) -> Iterator[dict]:
    """Graphs in processes of their own, so that one that dies is a finding and not the end."""
    todo = [list(range(first + job, first + count, jobs)) for job in range(jobs)]
    running: dict[int, tuple[subprocess.Popen, Path, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while any(todo) or running:
            for job in range(jobs):
                if job not in running and todo[job]:
                    chunk = todo[job][:100]
                    out = Path(folder) / f"{job}-{chunk[0]}.jsonl"
                    command = [
                        sys.executable,
                        __file__,
                        "--seeds",
                        ",".join(map(str, chunk)),
                        "--out",
                        str(out),
                    ]
                    process = subprocess.Popen(command + ([] if small else ["--no-shrink"]))
                    running[job] = process, out, len(chunk)
            for job, (process, out, size) in list(running.items()):
                if process.poll() is not None:
                    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
                    yield from rows
                    done = len(rows)
                    if done < size:
                        died = {
                            "seed": todo[job][done],
                            "kind": RAW,
                            "operators": [],
                            "checked": 0,
                            "nodes": 0,
                        }
                        yield died | {"way": "", "text": f"the process ended with {process.returncode}"}
                        done += 1
                    todo[job] = todo[job][done:]
                    del running[job]
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--show", type=int)
    parser.add_argument("--shrink", type=int)
    parser.add_argument("--seeds", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.show is not None:
        print(describe(generate(arguments.show)))
    elif arguments.shrink is not None:
        graph = generate(arguments.shrink)
        outcome = check(graph, arguments.shrink)
        print(outcome)
        if outcome.kind != RIGHT:
            print(describe(shrink(graph, arguments.shrink, outcome)))
    elif arguments.seeds is not None:
        with open(arguments.out, "w") as out:
            for row in _run_seeds(
                [int(s) for s in arguments.seeds.split(",")], small=not arguments.no_shrink
            ):
                out.write(json.dumps(row) + "\n")
                out.flush()
    else:
        _summary(_in_processes(arguments.seed, arguments.count, arguments.jobs, not arguments.no_shrink))


def _summary(rows: Iterator[dict]) -> None:
    start, kinds, coverage = time.time(), Counter(), Counter()
    refusals: dict[str, list[int]] = defaultdict(list)
    checked = nodes = 0
    for row in rows:
        kinds[row["kind"]] += 1
        checked += row["checked"]
        nodes += row["nodes"]
        if row["kind"] == RIGHT:
            coverage.update(row["operators"])
        elif row["kind"] in FAILURES:
            print(f"seed {row['seed']}: {row['kind']} ({row['way']}): {_short(row['text'])}")
            print(f"    {' '.join(row.get('small', row['operators']))}", flush=True)
        else:
            refusals[f"{row['kind']}: {_short(_gist(row['text']))}"].append(row["seed"])
    print()
    for text, found in sorted(refusals.items(), key=lambda item: -len(item[1])):
        print(f"{len(found)} x {text} (seeds {', '.join(map(str, found[:5]))})")
    total = sum(kinds.values())
    print(f"\n{total} graphs, {nodes} nodes, {checked} gradients compared, {time.time() - start:.0f} s")
    print(", ".join(f"{kind}: {count}" for kind, count in kinds.most_common()))
    print(f"{len(coverage)} operators: {' '.join(f'{n} {c}' for n, c in sorted(coverage.items()))}")


if __name__ == "__main__":
    main()
