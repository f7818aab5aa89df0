"""Random cases of all compiled kernels: compared with PyTorch in float64, and on several numbers of threads.

    python tests/sweeps/random_kernels.py --count 2000 --jobs 2              # a summary, and what failed
    python tests/sweeps/random_kernels.py --kinds lstm --seed 17 --count 1   # one case

Results must be right, and equal to the last bit on all numbers of threads; except those that depend on what
onnxruntime's own kernels compute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime

import ortgrad
from ortgrad.pipelines.prepare import prepare_loaded
from ortgrad.runtime import plans

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.kernel_cases import KINDS, Case, generate

THREADS = (1, 2, 4)
# onnxruntime's operators whose roundings depend on how it divides them among threads.
OTHERS = ("Conv", "Gemm", "MatMul", "ReduceMean", "ReduceSum", "Sigmoid", "Tanh")
CHUNK = 52  # cases of a process


@dataclass
class Outcome:
    """What became of a case: '' is right."""

    wrong: str = ""
    depends: str = ""
    kernels: list[str] = field(default_factory=list)  # that ran
    compared: int = 0  # results on several numbers of threads


def run(case: Case, threads: int) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ortgrad.InferenceSession(case.model, options, kernels="compiled")
    names = list(case.double)
    return dict(zip(names, session.run(names, case.feeds), strict=True))


def check(case: Case, threads: Sequence[int] = THREADS) -> Outcome:
    """Run a case on several numbers of threads."""
    outcome, make = Outcome(), plans._make_plan

    def recording(kernel: object, *arguments: object) -> object:
        plan = make(kernel, *arguments)  # type: ignore[arg-type]
        if plan is not None:
            outcome.kernels.append(kernel.function.__name__)  # type: ignore[attr-defined]
        return plan

    with mock.patch.object(plans, "_make_plan", recording):
        results = [run(case, count) for count in threads]
    others = _of_others(case)
    for name, found in results[0].items():
        outcome.wrong = outcome.wrong or differs(found, case.single[name], case.double[name], name)
        outcome.compared += name not in others
        for count, other in zip(threads[1:], results[1:], strict=True):
            if name not in others and not np.array_equal(found, other[name], equal_nan=True):
                most = np.abs(found.astype(np.float64) - other[name]).max()
                outcome.depends += f"{name} differs on {count} threads by {most:.2g}; "
    return outcome


def _of_others(case: Case) -> set[str]:
    """Return the values that depend on what onnxruntime's own kernels compute."""
    found: set[str] = set()
    for node in prepare_loaded(case.model, "compiled", bodies=False).graph.node:
        if (node.domain == "" and node.op_type in OTHERS) or not found.isdisjoint(node.input):
            found.update(node.output)
    return found


def differs(found: np.ndarray, single: np.ndarray, double: np.ndarray, name: str) -> str:
    """Say where an array is not PyTorch's in float64; '' if nowhere.

    The error of PyTorch's own float32 result tells how much rounding matters.
    """
    if found.shape != double.shape:
        return f"{name} has the shape {found.shape}, not {double.shape}"
    largest = np.abs(double).max(initial=0)
    allowed = 1e-10 * (np.abs(double) + largest) + 1e-14
    if found.dtype == np.float32:
        rounding = np.abs(single.astype(np.float64) - double)
        allowed = 1e-4 * np.abs(double) + 1e-5 * largest + 10 * rounding + 1e-7
    off = ~(np.abs(found.astype(np.float64) - double) <= allowed)
    if not off.any():
        return ""
    place = tuple(map(int, np.argwhere(off)[0]))
    text = f"{name}{list(place)} is {found[place]:.8g}, not {double[place]:.8g}"
    return f"{text}; {off.sum()} of {off.size} are off"


def rows(kinds: Sequence[str], seeds: Sequence[int], threads: Sequence[int]) -> Iterator[dict]:
    """Check cases whose kinds take turns; the seed of a case is its number."""
    for seed in seeds:
        name = kinds[seed % len(kinds)]
        case = generate(name, seed // len(kinds))
        outcome = check(case, threads)
        yield {"seed": seed, "kind": name, "text": case.text, **vars(outcome)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=len(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.seeds is not None:
        for row in rows(given.kinds, json.loads(given.seeds), given.threads):
            print(json.dumps(row), flush=True)
        return
    start, wrong, depends, compared = time.time(), 0, 0, 0
    kinds, kernels = Counter[str](), Counter[str]()
    for row in _in_processes(given):
        kinds[row["kind"]] += 1
        kernels.update(set(row["kernels"]))
        wrong, depends = wrong + bool(row["wrong"]), depends + bool(row["depends"])
        compared += row["compared"]
        if row["wrong"] or row["depends"]:
            print(
                f"{row['kind']} {row['seed']}: {row['wrong']} {row['depends']}\n    {row['text']}", flush=True
            )
    counts = ", ".join(map(str, given.threads))
    print(f"\n{sum(kinds.values())} cases on {counts} threads, {time.time() - start:.0f} s: ", end="")
    print(f"{wrong} wrong, {depends} that depend on the threads ({compared} results compared)")
    print(f"{len(kernels)} kernels: {' '.join(f'{n} {c}' for n, c in sorted(kernels.items()))}")


def _in_processes(given: argparse.Namespace) -> Iterator[dict]:
    """Cases in processes of their own, a number of them in each: one that dies is a finding."""
    seeds = range(given.seed, given.seed + given.count)

    def run_chunk(first: int) -> list[dict]:
        own = json.dumps(list(seeds[first : first + CHUNK]))
        command = [sys.executable, __file__, "--seeds", own, "--kinds", *given.kinds]
        command += ["--threads", *map(str, given.threads)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        if done.returncode != 0:
            died = {
                "seed": seeds[first + len(found)],
                "kind": "a process",
                "text": "",
                "kernels": [],
                "compared": 0,
            }
            found.append({**died, "wrong": f"ended with {done.returncode}", "depends": ""})
        return found

    with ThreadPoolExecutor(given.jobs) as pool:
        for found in pool.map(run_chunk, range(0, given.count, CHUNK)):
            yield from found


if __name__ == "__main__":
    main()
