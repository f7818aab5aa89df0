"""Models that grow in one respect, and what ortgrad does with them: the work per node must not grow.

    python tests/sweeps/scaling.py --lines  # functions that do more for each node of larger models
    python tests/sweeps/scaling.py          # CPU seconds of every model and way
    python tests/sweeps/scaling.py --models names --ways build explain --sizes 5000 10000 20000 40000

Counted are the lines that each function runs, one in a loop each time, and the comparisons of values and
nodes, which is what a search in a list of them does. What else happens inside of C functions only the
seconds show.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import onnx
import onnx_ir as ir

import ortgrad
from ortgrad import training
from ortgrad.check.gradients import check_gradients
from ortgrad.pipelines import explain as explaining
from ortgrad.training import artifacts

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.scaling_models import FLOAT, MODELS

# Ways

Way = Callable[[onnx.ModelProto], Callable[[], object]]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__.replace("_", " ")] = function
    return function


def built(model: onnx.ModelProto) -> onnx.ModelProto:
    return ortgrad.build_gradient_model(model)


@way
def build(model: onnx.ModelProto) -> Callable[[], object]:
    return lambda: built(model)


@way
def build_all(model: onnx.ModelProto) -> Callable[[], object]:
    """The gradients of all outputs towards all inputs and values."""
    floats = [value.name for value in model.graph.input if value.type.tensor_type.elem_type == FLOAT]
    of = [value.name for value in model.graph.output]
    middle = [name for node in model.graph.node[: len(model.graph.node) // 2] for name in node.output[:1]]
    values = {
        v.name
        for v in onnx.shape_inference.infer_shapes(model).graph.value_info
        if v.type.tensor_type.elem_type == FLOAT
    }
    wrt = [*floats, *(name for name in middle if name in values)]
    return lambda: ortgrad.build_gradient_model(model, wrt=wrt, of=of)


@way
def explain(model: onnx.ModelProto) -> Callable[[], object]:
    return lambda: explaining.explain(model)


@way
def parameters(model: onnx.ModelProto) -> Callable[[], object]:
    return lambda: training.parameters(model)


@way
def prepare(model: onnx.ModelProto) -> Callable[[], object]:
    backward = built(model)
    return lambda: ortgrad.prepare(backward)


def session(kernels: Any) -> Way:
    def way(model: onnx.ModelProto) -> Callable[[], object]:
        backward = built(model)
        return lambda: ortgrad.InferenceSession(backward, kernels=kernels)

    return way


WAYS |= {f"session {kernels}": session(kernels) for kernels in ("auto", "onnx", "python")}


@way
def trainer(model: onnx.ModelProto) -> Callable[[], object]:
    return lambda: training.Trainer(model, loss="mse", optimizer="sgd")


@way
def write_artifacts(model: onnx.ModelProto) -> Callable[[], object]:
    names = training.parameters(model)

    def write() -> None:
        with tempfile.TemporaryDirectory() as folder:
            artifacts.generate_artifacts(
                model,
                requires_grad=names,
                loss=artifacts.LossType.MSELoss,
                optimizer=artifacts.OptimType.AdamW,
                artifact_directory=Path(folder),
            )

    return write


@way
def check(model: onnx.ModelProto) -> Callable[[], object]:
    """What comes before the first comparison."""
    return lambda: check_gradients(model, wrt="x", directions=1, seconds=0)


# Measures

_COUNTED = [str(Path(module.__file__ or "").parent) for module in (ortgrad, onnx, ir)]
_NOT_COUNTED = str(Path(ortgrad.__file__).parent / "compiled")


Lines = Counter[tuple[str, str]]
# Of onnx-ir: for a function, it looks at the names of all other functions.
KNOWN = {"_abbreviate.<locals>.id_abbreviation.<locals>.<genexpr>"}
# The search between two nodes is given up after a number of nodes, which small models do not have.
KNOWN |= {f"Groups.{name}" for name in ("_has_path_around", "_has_path_around.<locals>.<genexpr>", "_find")}


def lines_of(function: Callable[[], object]) -> Lines:
    """Return how many lines of ortgrad, onnx and onnx-ir a call runs, by file and function."""
    lines: Lines = Counter()

    def count(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            # A comparison counts for the function that compares.
            place = frame.f_back if frame.f_code is _equal.__code__ else frame
            assert place is not None
            lines[Path(place.f_code.co_filename).name, place.f_code.co_qualname] += 1
        return count

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        counted = name.startswith(tuple(_COUNTED)) and not name.startswith(_NOT_COUNTED)
        return count if counted or name == __file__ else None

    def run() -> None:
        sys.settrace(enter)
        try:
            function()
        finally:
            sys.settrace(None)

    with comparisons_in_python():
        elsewhere(run)
    return lines


def growing(model: str, way: str, size: int) -> list[str]:
    """Return the functions that run more lines for a further node if the model is larger."""
    counts = []
    for n in (size, size, 2 * size, 4 * size):
        # The first run fills caches.
        counts.append(lines_of(WAYS[way](MODELS[model](n))))
    _, small, middle, large = counts
    found = []
    for key, last in large.items():
        first, second = 2 * (middle[key] - small[key]), last - middle[key]
        if second > 1.3 * max(first, 0) + 2 * size and key[1] not in KNOWN:
            found.append(f"{': '.join(key)}: {small[key]}, {middle[key]}, {last} lines")
    return found


def _equal(self: object, other: object) -> bool:
    return self is other


@contextmanager
def comparisons_in_python() -> Iterator[None]:
    """Let the comparisons of a search in a list of values or nodes be calls."""
    with ExitStack() as stack:
        for each in (ir.Value, ir.Node):
            stack.enter_context(mock.patch.object(each, "__eq__", _equal))
            stack.enter_context(mock.patch.object(each, "__hash__", object.__hash__))
        # How much of that there is depends on what was compiled before.
        stack.enter_context(mock.patch("ortgrad.runtime.native.compile_kernels"))
        yield


def elsewhere(function: Callable[[], None]) -> None:
    """Call a function on a thread of its own, on which all of it then runs."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def seconds_of(function: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1000, 2000, 4000], help="for seconds")
    parser.add_argument("--lines", nargs="?", type=int, const=40, help="nodes of the smallest model")
    arguments = parser.parse_args()
    for model, way in itertools.product(arguments.models, arguments.ways):
        label = f"{model:16s} {way:16s}"
        if arguments.lines:
            print(label, *(growing(model, way, arguments.lines) or ["linear"]), sep="\n    ", flush=True)
            continue
        seconds = [seconds_of(WAYS[way](MODELS[model](size))) for size in arguments.sizes]
        shown = [f"{1000 * t / n:9.2f}" for t, n in zip(seconds, arguments.sizes, strict=True)]
        print(label, "ms per node", *shown, flush=True)


if __name__ == "__main__":
    main()
