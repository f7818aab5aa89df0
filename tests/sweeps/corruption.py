"""Damaged model files, the same ones every time, and what ortgrad makes of them.

    python tests/sweeps/corruption.py --count 1000    # a table of outcomes; exits with 1 if one is wrong
    python tests/sweeps/corruption.py --show 17       # what happens to file 17, with tracebacks

Files are tried in another process, so that a crash or an endless loop is the outcome of that file and of
no other.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import queue
import random
import resource
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto, helper, numpy_helper, parser

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import ROOT

TIME_LIMIT = 300.0  # seconds for one step on any machine: what takes longer hangs
MEMORY_LIMIT = 8 << 30
DATA_FILE = "weights.bin"
SMALL = 8000  # bytes of a file in which a flipped bit is likely to hit more than a weight

HEAD = '<ir_version: 10, opset_import: ["" : 21, "local" : 1, "com.microsoft" : 1]>'
TEXTS = {
    "arithmetic": """(float[N, 3] x, float[3] w) => (float loss, float[N, 3] y) <float[3] b = {1, 2, 3}> {
        t = Mul(x, w) u = Add(t, b) s = Sigmoid(u) y = Div(s, x)
        r = ReduceMean<keepdims = 0>(y) loss = Identity(r)
    }""",
    "images": """(float[N, 2, 6, 6] x) => (float[N, 3] y)
        <float[2, 2, 1, 1] k = {1, 2, 3, 4}, float[2] scale = {1, 2}, float[2] bias = {0, 1},
         float[2] mean = {0, 0}, float[2] var = {1, 1}, float[8, 3] w> {
        c = Conv<kernel_shape = [1, 1], pads = [0, 0, 0, 0]>(x, k)
        n = BatchNormalization(c, scale, bias, mean, var)
        a = Relu(n)
        p = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>(a)
        q = AveragePool<kernel_shape = [1, 1]>(p)
        f = Flatten<axis = 1>(q)
        y = MatMul(f, w)
    }""",
    "shapes": """(float[N, 4, 3] x, int64[K] i) => (float[N, 12] y, float z) <int64[2] shape = {0, 12}> {
        t = Transpose<perm = [0, 2, 1]>(x)
        starts = Constant<value = int64[1] {0}>()
        ends = Constant<value = int64[1] {2}>()
        axes = Constant<value = int64[1] {1}>()
        s = Slice(t, starts, ends, axes)
        pads = Constant<value = int64[6] {0, 0, 0, 0, 1, 0}>()
        p = Pad(s, pads)
        c = Concat<axis = 1>(p)
        y = Reshape(c, shape)
        g = Gather<axis = 1>(y, i)
        first, second = Split<axis = 2, num_outputs = 2>(t)
        e = ReduceSum<keepdims = 0>(g)
        o = ReduceMax<keepdims = 0>(first)
        z = Sub(e, o)
    }""",
    "attention": """(float[2, 4, 8] x) => (float[2, 4, 8] y)
        <float[8, 8] q, float[8, 8] k, float[8] scale, float[8] bias> {
        a = MatMul(x, q)
        b = MatMul(x, k)
        bt = Transpose<perm = [0, 2, 1]>(b)
        scores = MatMul(a, bt)
        p = Softmax<axis = -1>(scores)
        m = MatMul(p, x)
        y = LayerNormalization<axis = -1, epsilon = 0.001>(m, scale, bias)
    }""",
    "branches": """(float[N, 3] x, bool c) => (float[N, 3] y) <float[3] w = {1, 2, 3}> {
        y = If(c) <
            then_branch = one () => (float[N, 3] a) { a = Mul(x, w) },
            else_branch = other () => (float[N, 3] b) <float[3] v = {3, 4, 5}> { t = Neg(x) b = Mul(t, v) }
        >
    }""",
    "loops": """(float[3] x, int64 n, bool c) => (float[3] y, float[M, 3] all) <float[3] w = {1, 2, 3}> {
        y, all = Loop(n, c, x) <
            body = step (int64 i, bool going, float[3] s) => (bool go, float[3] next, float[3] scanned) {
                go = Identity(going)
                next = Mul(s, w)
                scanned = Tanh(next)
            }
        >
    }""",
    "scans": """(float[T, 3] x, float[3] s) => (float[3] y, float[T, 3] all) <float[3] w = {1, 2, 3}> {
        y, all = Scan(s, x) <
            num_scan_inputs = 1,
            body = step (float[3] a, float[3] b) => (float[3] c, float[3] d) {
                t = Mul(a, w) c = Add(t, b) d = Tanh(c)
            }
        >
    }""",
    "types": """(float16[N] x, string[2] s, seq(float[N]) q) => (float16[N] y, string[2] t, float[N] z) {
        two = Constant<value = float16[1] {2}>()
        y = Mul(x, two)
        t = Identity(s)
        position = Constant<value_int = 0>()
        z = SequenceAt(q, position)
    }""",
    "training": """(float[N, 3] x, float[N, 3] dy) => (float[N, 3] dx, float[N, 3] dz) {
        dx = com.microsoft.ReluGrad(dy, x)
        a = Softmax(x)
        dz = com.microsoft.SoftmaxGrad_13<axis = 1>(dy, a)
    }""",
}
FUNCTIONS = """
<domain: "local", opset_import: ["" : 21]> scaled <factor>(x) => (y) {
    f = Constant<value_float: float = @factor>()
    y = Mul(x, f)
}
<domain: "local", opset_import: ["" : 21, "local" : 1]> twice (x) => (y) {
    a = local.scaled<factor = 2.0>(x)
    y = local.scaled<factor = 0.5>(a)
}
"""


def _parsed(name: str, text: str, head: str = HEAD) -> onnx.ModelProto:
    model = parser.parse_model(f"{head} {name} {text}")
    generator = np.random.default_rng(0)
    # Weights without values are drawn.
    for value in model.graph.value_info:
        shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        array = generator.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    return model


def _sparse() -> onnx.ModelProto:
    model = _parsed(
        "sparse",
        "(float[N, 3] x) => (float[N, 2] y) <float[2] b = {1, 2}> { m = MatMul(x, w) y = Add(m, b) }",
    )
    values = numpy_helper.from_array(np.float32([1, 2]), "w")
    places = numpy_helper.from_array(np.int64([0, 4]), "w_indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3, 2]))
    return model


def _external() -> onnx.ModelProto:
    model = _parsed("external", "(float[N, 3] x) => (float[N, 4] y) <float[3, 4] w> { y = MatMul(x, w) }")
    tensor = model.graph.initializer[0]
    onnx.external_data_helper.set_external_data(tensor, DATA_FILE, 0, len(tensor.raw_data))
    tensor.ClearField("raw_data")
    return model


def _gradient_operator() -> onnx.ModelProto:
    model = _parsed("gradient", "(float[3] x, float[3] w) => (float[3] y, float[3] g) { y = Mul(x, w) }")
    node = helper.make_node("Gradient", ["w"], ["g"], domain="ai.onnx.preview.training", xs=["w"], y="y")
    model.graph.node.append(node)
    model.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    return model


@functools.cache
def originals() -> dict[str, bytes]:
    """The models before they are damaged, by name."""
    import ortgrad

    models = {name: _parsed(name, text) for name, text in TEXTS.items()}
    calls = "(float[N, 3] x) => (float[N, 3] y) { t = local.twice(x) y = local.scaled<factor = 3.0>(t) }"
    models["functions"] = parser.parse_model(f"{HEAD} calls {calls} {FUNCTIONS}")
    old = '<ir_version: 3, opset_import: ["" : 9]>'
    text = '(float[N, 3] x) => (float[N, 3] y) { t = Softmax(x) y = Upsample<mode = "nearest">(t, s) }'
    models["old"] = _parsed("old", text.replace("{", "<float[2] s = {1, 1}> {", 1), old)
    models["sparse"], models["external"], models["gradient"] = _sparse(), _external(), _gradient_operator()
    for name in ("arithmetic", "branches", "loops"):
        # Gradient nodes with their bodies, as ortgrad hands them out.
        models[f"built_{name}"] = ortgrad.build_gradient_model(models[name], wrt=["x"])
    files = [*(ROOT / "models").glob("*.onnx"), *(ROOT / "tests" / "golden").glob("*/*.onnx")]
    found = {name: model.SerializeToString() for name, model in models.items()}
    for path in sorted(files):
        if path.stat().st_size <= SMALL:
            found[f"{path.parent.name}/{path.name}"] = path.read_bytes()
    return found


# Damage


def corrupted(seed: int) -> tuple[str, str, bytes]:
    """The name of a model, what was done to it, and what is left of it."""
    generator = random.Random(seed)
    names = list(originals())
    name = names[seed % len(names)]
    data = originals()[name]
    how = generator.choices(list(DAMAGE), weights=[4, 1, 1, 1, 1, 6])[0]
    return name, how, DAMAGE[how](data, generator)


def _flip_bits(data: bytes, generator: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(generator.choice([1, 1, 1, 2, 4])):
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
    return bytes(damaged)


def _set_bytes(data: bytes, generator: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 4])):
        damaged[generator.randrange(len(damaged))] = generator.choice([0, 1, 127, 128, 255])
    return bytes(damaged)


def _truncate(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.randrange(len(data))]


def _cut_out(data: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(data))
    return data[:start] + data[start + generator.randrange(1, 32) :]


def _repeat(data: bytes, generator: random.Random) -> bytes:
    start = generator.randrange(len(data))
    end = min(start + generator.randrange(1, 64), len(data))
    return data[:end] + data[start:]


def _change_field(data: bytes, generator: random.Random) -> bytes:
    """One or two fields of the parsed model lost, swapped, out of range or of another kind."""
    model = onnx.ModelProto.FromString(data)
    for _ in range(generator.choice([1, 1, 2])):
        fields = list(_fields(model))
        message, field = generator.choice(fields)
        same = [m for m, f in fields if f is field]
        _change(message, field, generator, generator.choice(same))
    return model.SerializeToString()


def _fields(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    for field, value in message.ListFields():
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from _fields(inner)


def _change(message: Any, field: FieldDescriptor, generator: random.Random, other: Any) -> None:
    value = getattr(message, field.name)
    if field.is_repeated:
        kept = list(value)
        i, j = generator.randrange(len(kept)), generator.randrange(len(kept))
        how = generator.choice(["drop", "double", "swap", "replace", "clear"])
        if how == "drop":
            del kept[i]
        elif how == "double":
            kept.append(kept[i])
        elif how == "swap":
            kept[i], kept[j] = kept[j], kept[i]
        elif how == "clear":
            kept = []
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            kept[i] = generator.choice(list(getattr(other, field.name)))
        else:
            kept[i] = _scalar(field, kept[i], generator)
        kept = [_copy(item) for item in kept]
        message.ClearField(field.name)
        getattr(message, field.name).extend(kept)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        replacement = _copy(getattr(other, field.name))
        message.ClearField(field.name)
        if generator.random() < 0.5:
            getattr(message, field.name).CopyFrom(replacement)
    elif generator.random() < 0.2:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(field, value, generator))


def _copy(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    copy = type(value)()
    copy.CopyFrom(value)
    return copy


def _scalar(field: FieldDescriptor, value: Any, generator: random.Random) -> Any:
    if field.type == FieldDescriptor.TYPE_ENUM:
        return generator.choice([v.number for v in field.enum_type.values])
    if isinstance(value, int):
        extremes = [-1, 0, 1, 2, value + 1, -value, 100, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63), 2**63 - 1]
        return generator.choice(extremes[:8] if field.type == FieldDescriptor.TYPE_INT32 else extremes)
    if isinstance(value, float):
        return generator.choice([0.0, -1.0, float("nan"), float("inf"), 1e38])
    if isinstance(value, bytes):
        return generator.choice([b"", b"\xff\xfe", value[:-1], value + b"\0", b"{}", b"SAME_UPPER"])
    return generator.choice(["", "x", "y", "w", "\0", "ai.onnx", "long" * 500, "Relu", "If", "com.microsoft"])


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped bits": _flip_bits,
    "set bytes": _set_bytes,
    "truncated": _truncate,
    "cut out": _cut_out,
    "repeated": _repeat,
    "changed field": _change_field,
}


# Trying


def steps(path: Path, check: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything that reads the file, by name. Later ones take what earlier ones made."""
    import ortgrad
    from ortgrad.pipelines.explain import explain

    made: dict[str, Any] = {}

    def everything() -> onnx.ModelProto:
        """Towards all floating-point inputs and initializers that the file names."""
        try:
            model = onnx.load(path, load_external_data=False)
        except (DecodeError, UnicodeDecodeError):
            model = onnx.ModelProto()
        floats = [v.name for v in model.graph.input if v.type.tensor_type.elem_type == TensorProto.FLOAT]
        floats += [t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT]
        made["built"] = ortgrad.build_gradient_model(path, wrt=floats or None)
        return made["built"]

    def session(model: Any) -> None:
        made["session"] = None
        made["session"] = ortgrad.InferenceSession(model, _quiet())

    yield "build", lambda: ortgrad.build_gradient_model(path)
    yield "build towards everything", everything
    for kernels in ("python", "onnx", "auto"):
        yield f"prepare {kernels}", lambda kernels=kernels: ortgrad.prepare(path, kernels=kernels)
    yield "explain", lambda: explain(path)
    yield "session", lambda: session(path)
    if made.get("session"):
        yield "run", lambda: _run(made["session"])
    if "built" in made:
        yield "session of built", lambda: session(made["built"])
        if made.get("session"):
            yield "run of built", lambda: _run(made["session"])
    if check:
        yield "check", lambda: ortgrad.check_gradients(path, directions=1)


def _quiet() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


NUMPY_TYPES = {"float": "float32", "double": "float64", "float16": "float16", "string": "str"}


def _run(session: Any) -> None:
    feeds = {}
    for given in session.get_inputs():
        name = given.type.removeprefix("tensor(").removesuffix(")")
        shape = [dim if isinstance(dim, int) and dim >= 0 else 2 for dim in given.shape]
        if not given.type.startswith("tensor(") or np.prod(shape, dtype=float) > 1e6:
            return
        try:
            dtype = np.dtype(NUMPY_TYPES.get(name, name))
        except TypeError:
            return
        feeds[given.name] = np.ones(shape, dtype)
    session.run(None, feeds)


def outcome(step: str, call: Callable[[], Any]) -> str:
    """`ok`, the error that is allowed, or RAW and the one that is not."""
    import ortgrad

    try:
        call()
    except ortgrad.OrtgradError as error:
        return type(error).__name__
    except Exception as error:
        if step.startswith("run") and type(error).__module__.startswith("onnxruntime"):
            return "onnxruntime's error"
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "ortgrad" in f.filename]
        return f"RAW {type(error).__name__} at {' '.join(ours[-3:])}: {str(error)[:200]!r}"
    return "ok"


def try_file(seed: int, folder: Path) -> Iterator[tuple[str, str]]:
    data = corrupted(seed)[2]
    path = folder / "model.onnx"
    path.write_bytes(data)
    (folder / DATA_FILE).write_bytes(np.ones(12, np.float32).tobytes())
    for step, call in steps(path, check=seed % 4 == 0):
        yield step, outcome(step, call)


def work() -> None:
    """Read numbers of files from stdin, and write what becomes of each, a line for every step."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            for step, found in try_file(int(line), Path(folder)):
                print(json.dumps([int(line), step, found]), flush=True)
            print(json.dumps([int(line), None, None]), flush=True)


class Worker:
    """A process that tries files, replaced when it dies or hangs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def try_file(self, seed: int) -> dict[str, str]:
        """The outcome of every step; CRASH or TIMEOUT for the one that it ended in."""
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        found: dict[str, str] = {}
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        while True:
            try:
                line = self._lines.get(timeout=TIME_LIMIT)
            except queue.Empty:
                self.close()
                return {**found, f"after {_last(found)}": "TIMEOUT"}
            if line is None:
                code = self._process.wait()
                self.close()
                guilty = "onnxruntime crashes" if _onnxruntime_crashes(seed) else f"CRASH {code}"
                return {**found, f"after {_last(found)}": guilty}
            _, step, what = json.loads(line)
            if step is None:
                return found
            found[step] = what

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._lines = queue.Queue()
        threading.Thread(target=_read, args=(self._process, self._lines), daemon=True).start()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._process = None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _onnxruntime_crashes(seed: int) -> bool:
    """Whether a plain session kills its process with the file as it is."""
    command = [sys.executable, __file__, "--plain", str(seed)]
    return subprocess.run(command, capture_output=True, timeout=TIME_LIMIT).returncode < 0


def run_plain(seed: int) -> None:
    import onnxruntime

    with contextlib.suppress(Exception):
        _run(onnxruntime.InferenceSession(corrupted(seed)[2], _quiet(), providers=["CPUExecutionProvider"]))


def _last(found: dict[str, str]) -> str:
    return next(reversed(found), "nothing")


def is_allowed(found: str) -> bool:
    """Whether a user may see this outcome of a damaged file."""
    return not found.startswith(("RAW", "CRASH", "TIMEOUT"))


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--show", type=int)
    options.add_argument("--plain", type=int, help=argparse.SUPPRESS)
    options.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args(arguments)
    if given.work:
        work()
        return 0
    if given.plain is not None:
        run_plain(given.plain)
        return 0
    if given.show is not None:
        return _show(given.show)
    worker = Worker()
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    bad = 0
    for seed in range(given.first, given.first + given.count):
        found = worker.try_file(seed)
        for step, what in found.items():
            table[step][what.partition(" at ")[0]] += 1
        wrong = {step: what for step, what in found.items() if not is_allowed(what)}
        if wrong:
            bad += 1
            print(f"{seed} {corrupted(seed)[:2]}: {json.dumps(wrong)}", flush=True)
    worker.close()
    for step, counts in table.items():
        print(f"{step:26}", ", ".join(f"{what} {n}" for what, n in counts.most_common()))
    print(f"{bad} of {given.count} files are not handled")
    return 1 if bad else 0


def _show(seed: int) -> int:
    name, how, data = corrupted(seed)
    print(name, how, len(data), "bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(data)
        (Path(folder) / DATA_FILE).write_bytes(np.ones(12, np.float32).tobytes())
        for step, call in steps(path, check=True):
            print("===", step, flush=True)
            try:
                call()
            except Exception:
                traceback.print_exc()
    return 0


if __name__ == "__main__":
    sys.exit(main())
