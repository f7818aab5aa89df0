"""PyTorch's own operator and module tests through export: gradients compared with those of autograd.

    python tests/sweeps/torch_operators.py --jobs 2                        # four samples, both exporters
    python tests/sweeps/torch_operators.py --exporters script --samples 1  # in minutes
    python tests/sweeps/torch_operators.py --only nn.functional.pad        # entries with this in the name
    python tests/sweeps/torch_operators.py --models FOLDER                 # keep exported models

A table of what became of the samples, and all that is wrong, refused or failed. Where the exported model
computes something else than PyTorch, which is the exporter's doing, finite differences judge its gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state

import ortgrad

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from support.torch_samples import Sample

NO_SAMPLE, EXPORTER, RANDOM, NAN = "nothing to export", "exporter fails", "random", "result is NaN"
NOT_RUN, OTHER_RIGHT, OTHER_UNKNOWN = "forward does not run", "forward differs: right", "forward differs"
OTHER_WRONG, REFUSED, CRASH = "forward differs: WRONG", "refused", "build crash"
LOAD, RUN, DEATH, WRONG, RIGHT = "load failure", "run failure", "process death", "wrong", "right"
FAILURES = (OTHER_WRONG, REFUSED, CRASH, LOAD, RUN, DEATH, WRONG)
WAYS = ("auto", "onnx")
PREFIXES = ("in:", "out:", "grad:")  # of arrays in a file
SECONDS = 600  # for one sample
TYPES = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}
DRAWN = {"Bernoulli", "Dropout", "Multinomial"}
ORT_ERRORS: tuple[type[Exception], ...] = tuple(
    e for e in vars(ort_state).values() if isinstance(e, type) and issubclass(e, Exception)
)
Verdict = tuple[str, str]


def judge(path: Path, ways: Sequence[str] = WAYS) -> Verdict:
    """Compare the gradients of an exported model with those of PyTorch beside it."""
    data = dict(np.load(path.with_suffix(".npz")))
    feeds, results, wanted = ({k[len(p) :]: v for k, v in data.items() if k.startswith(p)} for p in PREFIXES)
    model = onnx.load(path)
    given = {value.name for value in model.graph.input}
    feeds = {name: array for name, array in feeds.items() if name in given}
    try:
        session = onnxruntime.InferenceSession(path, _options(), providers=["CPUExecutionProvider"])
        found = dict(zip(results, session.run(list(results), feeds), strict=True))
    except ORT_ERRORS as error:
        return NOT_RUN, str(error)
    names = given | {tensor.name for tensor in model.graph.initializer}
    # The call that is exported holds the module as `function`.
    targets = {name: name.removeprefix("" if name in names else "function.") for name in wanted}
    targets = {name: target for name, target in targets.items() if target in names}
    if not targets:
        return NO_SAMPLE, "the exported model is a constant"
    if any(np.isnan(array).any() for array in (*found.values(), *results.values())):
        return NAN, ""
    for name in results:
        difference = differs(found[name], data[f"out:{name}"], data[f"out64:{name}"])
        if difference:
            if any(n.op_type in DRAWN or n.op_type.startswith("Random") for n in model.graph.node):
                return RANDOM, ""
            return _by_differences(path, feeds, list(targets.values()), list(results)), difference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ortgrad.StoppedGradientWarning)
        try:
            built = ortgrad.build_gradient_model(path, wrt=list(targets.values()), of=list(results))
        except ortgrad.OrtgradError as error:
            return REFUSED, str(error)
        except Exception:  # whatever is no OrtgradError is a finding
            return CRASH, traceback.format_exc()
    for way in ways:
        kind, text = _compare(built, way, feeds, data, targets)
        if kind == WRONG and any(np.isnan(data[f"grad:{name}"]).any() for name in targets):
            # PyTorch's gradient is NaN where a branch that is not taken is infinite.
            return _by_differences(path, feeds, list(targets.values()), list(results)), text
        if kind != RIGHT:
            return kind, f"{way}: {text}"
    return RIGHT, ""


def _compare(
    built: onnx.ModelProto,
    way: str,
    feeds: dict[str, np.ndarray],
    data: dict[str, np.ndarray],
    targets: dict[str, str],
) -> Verdict:
    try:
        session = ortgrad.InferenceSession(built, _options(), kernels=way)
    except Exception as error:  # whatever it is
        return LOAD, f"{type(error).__name__}: {error}"
    types = {value.name: TYPES.get(value.type) for value in session.get_inputs()}
    named = {f"{k[5:]}_grad": v for k, v in data.items() if k.startswith("seed:")}
    # Exporters differ from PyTorch in the element type of some results.
    seeds = {name: seed.astype(types[name] or seed.dtype) for name, seed in named.items() if name in types}
    try:
        found = session.run([f"{target}_grad" for target in targets.values()], {**feeds, **seeds})
    except Exception as error:  # whatever it is
        return RUN, f"{type(error).__name__}: {error}"
    for name, array in zip(targets, found, strict=True):
        difference = differs(array, data[f"grad:{name}"], data[f"grad64:{name}"])
        if difference:
            return WRONG, f"{name}: {difference}"
    return RIGHT, ""


def differs(found: np.ndarray, single: np.ndarray, double: np.ndarray) -> str:
    """Say where an array is neither PyTorch's result in float64 nor that in float32; '' if nowhere.

    The error of PyTorch's own float32 result tells how much rounding matters.
    """
    if found.shape != double.shape:
        return f"the shape is {found.shape}, not {double.shape}"
    found, single, double = (np.asarray(array, np.float64) for array in (found, single, double))
    with np.errstate(all="ignore"):
        largest = np.abs(double, where=np.isfinite(double), out=np.zeros_like(double)).max(initial=0)
        rounding = np.nan_to_num(np.abs(single - double), nan=0, posinf=0)
        close = np.abs(found - double) <= 1e-3 * np.abs(double) + 1e-5 * largest + 20 * rounding + 1e-6
    for other in (single, double):
        close |= (found == other) | (np.isnan(found) & np.isnan(other))
    if close.all():
        return ""
    place = tuple(map(int, np.argwhere(~close)[0]))
    text = f"at {place} it is {found[place]:.7g}, not {double[place]:.7g}"
    return f"{text}; {np.sum(~close)} of {close.size} are off"


def _by_differences(path: Path, feeds: dict[str, np.ndarray], wrt: list[str], of: list[str]) -> str:
    try:
        found = str(ortgrad.check_gradients(path, feeds, wrt=wrt, of=of))
    except ortgrad.OrtgradError:
        return OTHER_UNKNOWN
    return OTHER_WRONG if "WRONG" in found else OTHER_UNKNOWN if "not judged" in found else OTHER_RIGHT


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


# The command: samples run in processes of their own, so that one that dies is a finding and not the end.


def _work(folder: Path) -> None:
    """Read samples from the standard input and write verdicts, a line each."""
    from support.torch_samples import ExporterError, NoSampleError, Sample, export, quiet

    quiet()
    # What libraries print must not get between the verdicts.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        sample = Sample(**json.loads(line))
        path = folder / f"{sample.name}.onnx"
        try:
            if not path.with_suffix(".npz").exists():
                export(sample, folder)
            verdict = judge(path)
        except NoSampleError as reason:
            verdict = NO_SAMPLE, str(reason)
        except ExporterError as error:
            verdict = EXPORTER, str(error)
        replies.write(json.dumps([sample.name, *verdict]) + "\n")


class _Worker:
    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--work", str(folder)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, text=True, bufsize=1, stderr=subprocess.DEVNULL, **pipes)

    def run(self, sample: Sample) -> tuple[str, str, str] | None:
        """Return name, verdict and text; None if the process dies or takes too long."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(sample)) + "\n")
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(SECONDS) else ""
        if line:
            return json.loads(line)
        self.close()
        return None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def run(chosen: Iterable[Sample], folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, verdict and text of each sample."""
    worker: _Worker | None = None
    for sample in chosen:
        worker = worker or _Worker(folder)
        answer = worker.run(sample)
        if answer is None:
            # Without the file, PyTorch's exporter has died.
            died = DEATH if (folder / f"{sample.name}.npz").exists() else EXPORTER
            worker, answer = None, (sample.name, died, "the process died")
        if answer[1] in FAILURES:
            print(f"{answer[0]}: {answer[1]}: {answer[2]}", flush=True)
        yield answer
    if worker is not None:
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--exporters", nargs="+", default=["script", "dynamo"])
    parser.add_argument("--samples", type=int, default=4, help="of each entry")
    parser.add_argument("--only", default="", help="part of the names of samples")
    parser.add_argument("--draw", type=int, help="that many samples at random, with a fixed seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--models", type=Path, help="a folder for exported models")
    parser.add_argument("--json", type=Path, help="a file for all verdicts")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        _work(arguments.work)
        return
    from support.torch_samples import KINDS, samples

    chosen = [s for s in samples(KINDS, arguments.exporters, arguments.samples) if arguments.only in s.name]
    if arguments.draw is not None:
        chosen = random.Random(0).sample(chosen, arguments.draw)
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = arguments.models or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        parts = [chosen[job :: arguments.jobs] for job in range(arguments.jobs)]
        verdicts = [v for found in pool.map(lambda part: list(run(part, folder)), parts) for v in found]
    table = Counter((kind, name.rsplit("-", 2)[1]) for name, kind, _ in verdicts)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(verdicts))
    for kind in sorted({kind for kind, _ in table}):
        counts = ", ".join(f"{exporter} {table[kind, exporter]}" for exporter in arguments.exporters)
        print(f"{kind}: {counts}")


if __name__ == "__main__":
    main()
