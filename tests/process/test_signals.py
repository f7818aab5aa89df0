"""Signals while a session runs, and exceptions at any bytecode of what onnxruntime calls: never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import needs_numba
from support.scripts import run_script

SCRIPT = Path(__file__).parent / "fault_script.py"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals to processes")


# The number of bytecodes between two faults. `python tests/process/fault_script.py own 0 1` leaves none out.
FAULTS = {
    "own": 13,
    "elsewhere": 61,
    "registered": 13,
    "failing": 499,
    "planning": 199,
    "creation": 151,
    "registered-creation": 151,
    "registered error": 29,
    "failing error": 997,
    "creation error": 499,
    "registered-creation error": 499,
}


@pytest.mark.parametrize(
    ("way", "step"),
    [pytest.param(*item, marks=needs_numba if item[0] == "planning" else ()) for item in FAULTS.items()],
)
def test_an_exception_at_any_bytecode_of_a_callback(way: str, step: int) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, way.split()[0], "0", str(step), *way.split()[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"after {result.stdout.split()[-2:]}: {result.stderr[-2000:]}"
    outcomes = result.stdout.split("\n")
    assert outcomes[-2] == "done"
    # An error becomes a status, except in the code of the test's own thread.
    assert sum("fault" in line or "status" in line for line in outcomes) >= 5


LOOP = """
    import os, random, signal, sys, threading, time
    import numpy as np, onnx, onnxruntime, ortgrad

    built = ortgrad.prepare(ortgrad.build_gradient_model("models/cnn.onnx"), kernels="python")
    weights = {tensor.name for tensor in built.graph.initializer}

    def make(way):
        if way == "own":
            return ortgrad.InferenceSession(built, kernels="python")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        ortgrad.register(options)
        return onnxruntime.InferenceSession(built.SerializeToString(), options)

    def feeds_of(session, batch):
        numbers = np.random.default_rng(0)
        feeds = {}
        for given in session.get_inputs():
            shape = [d if isinstance(d, int) else batch for d in given.shape]
            if given.name not in weights:
                whole, real = numbers.integers(0, 2, shape), numbers.random(shape, np.float32)
                feeds[given.name] = whole if "int" in given.type else real
        return feeds
"""


@pytest.mark.parametrize("way", ["own", "registered"])
def test_ctrl_c_in_a_training_loop(way: str) -> None:
    script = """
        session = make(WAY)
        feeds = feeds_of(session, 16)
        expected = session.run(None, feeds)
        random.seed(0)
        sent = []

        def interrupt(delay):
            time.sleep(delay)
            os.kill(os.getpid(), signal.SIGINT)
            sent.append(delay)

        # A run that begins after the signal must not come to its end.
        late = interrupted = 0
        for i in range(40):
            thread = threading.Thread(target=interrupt, args=(random.uniform(0.002, 0.04),))
            try:
                thread.start()
                while late == 0:
                    begins_late = len(sent) > i
                    session.run(None, feeds)
                    late += begins_late
            except KeyboardInterrupt:
                interrupted += 1
            thread.join()
            for actual, right in zip(session.run(None, feeds), expected):
                np.testing.assert_array_equal(actual, right)
        print(interrupted, late)
    """
    assert run_script(LOOP, f"WAY = {way!r}", script) == ["40 0"]


@pytest.mark.parametrize("way", ["own", "registered"])
def test_any_exception_of_a_signal_handler_comes_out_of_run(way: str) -> None:
    script = """
        class TooLong(Exception):
            pass

        def handler(number, frame):
            raise TooLong("after 50 ms")

        signal.signal(signal.SIGALRM, handler)
        session = make(WAY)
        feeds = feeds_of(session, 16)
        expected = session.run(None, feeds)
        for _ in range(20):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                for _ in range(10_000):
                    session.run(None, feeds)
                print("not interrupted")
            except TooLong as error:
                assert str(error) == "after 50 ms"
            np.testing.assert_array_equal(session.run(None, feeds)[0], expected[0])
    """
    assert run_script(LOOP, f"WAY = {way!r}", script) == []


@pytest.mark.parametrize("kernels", ["python", "onnx", "auto"])
def test_a_handler_that_raises_nothing_disturbs_nothing(kernels: str) -> None:
    script = """
        calls = []
        signal.signal(signal.SIGALRM, lambda number, frame: calls.append(number))
        session = ortgrad.InferenceSession(built, kernels=KERNELS)
        feeds = feeds_of(session, 16)
        expected = session.run(None, feeds)
        signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
        for _ in range(50):
            for actual, right in zip(session.run(None, feeds), expected):
                np.testing.assert_array_equal(actual, right)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(len(calls) > 5)
    """
    assert run_script(LOOP, f"KERNELS = {kernels!r}", script) == ["True"]


def test_a_long_run_without_python_kernels_is_stopped_at_once() -> None:
    script = """
        loop = onnx.parser.parse_model('''
            <ir_version: 10, opset_import: ["" : 21]>
            long (float[300, 300] x, int64 n) => (float[300, 300] y) {
                yes = Constant<value = bool {1}>()
                y = Loop(n, yes, x) <body = step (int64 i, bool c, float[300,300] s)
                    => (bool d, float[300,300] t) {
                    d = Identity(c)
                    u = MatMul(s, x)
                    t = Tanh(u)
                }>
            }
        ''')
        session = ortgrad.InferenceSession(loop)
        x = np.ones((300, 300), np.float32)
        options = onnxruntime.RunOptions()
        for given in (None, options):
            for _ in range(2):
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                try:
                    # To its end, this run would take a day.
                    session.run(None, {"x": x, "n": np.array(10**9)}, given)
                except KeyboardInterrupt:
                    print("stopped")
                session.run(None, {"x": x, "n": np.array(1)}, given)
        print(options.terminate)
    """
    assert run_script(LOOP, script) == [*["stopped"] * 4, "False"]


def test_near_the_recursion_limit() -> None:
    script = """
        model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
        session = ortgrad.InferenceSession(model, kernels="python")
        feeds = {"dY": np.float32([1, 2, 3]), "X": np.float32([1, -1, 2])}
        session.run(None, feeds)
        outcomes = set()

        def descend(depth):
            return descend(depth - 1) if depth else session.run(None, feeds)[0].tolist()

        for elsewhere in (False, True):
            for depth in range(800, 1000):
                if elsewhere:
                    session._monitor._quick_size = -1
                try:
                    outcomes.add(str(descend(depth)))
                except RecursionError:
                    outcomes.add("RecursionError")
        print(sorted(outcomes))
    """
    assert run_script(LOOP, script) == ["['RecursionError', '[1.0, 0.0, 3.0]']"]


def test_a_session_that_runs_itself() -> None:
    script = """
        from ortgrad.operators.declaration import find_operator
        model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
        session = ortgrad.InferenceSession(model, kernels="python")
        feeds = {"dY": np.float32([1, 2, 3]), "X": np.float32([1, -1, 2])}
        operator = find_operator("ReluGrad")
        kernel, depth = operator.kernel, [0]

        def again(dy, x, empty):
            depth[0] -= 1
            return session.run(None, feeds)[0] if depth[0] else kernel(dy, x, empty=empty)

        operator.kernel = again
        for depth[0] in (1, 2, 10):
            print(session.run(None, feeds)[0].tolist())
        try:
            session.run(None, feeds)
        except ortgrad.KernelError as error:
            print("RecursionError" in str(error))
        operator.kernel = kernel
        print(session.run(None, feeds)[0].tolist())
    """
    assert run_script(LOOP, script) == ["[1.0, 0.0, 3.0]"] * 3 + ["True", "[1.0, 0.0, 3.0]"]


def test_ctrl_c_while_a_session_is_made() -> None:
    script = """
        interrupted = 0
        for way in ("own", "registered"):
            make(way)
            for n in range(15):
                try:
                    threading.Timer(0.003 * n, os.kill, (os.getpid(), signal.SIGINT)).start()
                    for _ in range(1000):
                        session = make(way)
                except KeyboardInterrupt:
                    interrupted += 1
                session = make(way)
                session.run(None, feeds_of(session, 2))
        print(interrupted)
    """
    assert run_script(LOOP, script) == ["30"]
