"""Raise at the n-th bytecode that Python runs for onnxruntime, for each n in turn: run by test_signals.py.

usage: fault_script.py WAY FIRST STEP [error]

With "error", a MemoryError is raised, as code may raise it anywhere; else an exception that no code expects.

WAY is own, elsewhere (on another thread), registered, failing, planning (a compiled kernel meets new shapes),
creation or registered-creation.
Prints one line per n; the process must reach the line "done".
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

import numpy as np
import onnxruntime

import ortgrad
from ortgrad import threads as workers
from ortgrad.operators.declaration import find_operator
from ortgrad.runtime import entrance

WAY, FIRST, STEP = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
FEEDS = {"dY": np.float32([1, 2, 3]), "X": np.float32([1, -1, 2])}
BAD = {"dY": np.float32([1, 2, 3]), "X": np.float32([1, -1])}
if WAY != "planning":
    # Where there is a compiled kernel, Python runs only for new shapes.
    relu_grad = find_operator("ReluGrad")
    assert relu_grad is not None
    relu_grad.compiled_kernel = None
# The functions in which native code enters Python.
ENTRANCES = {entrance.serve.__code__}


class Fault(BaseException):
    """No code may expect this."""


RAISED: type[BaseException] = MemoryError if sys.argv[4:] == ["error"] else Fault


class Injector:
    """A trace function that raises once, at the n-th bytecode within callbacks."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.raised = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        inside: FrameType | None = frame
        while inside is not None and inside.f_code not in ENTRANCES:
            inside = inside.f_back
        if inside is None:
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "opcode") and not self.raised:
            self.left -= 1
            if self.left < 0:
                self.raised = True
                raise RAISED
        return self


def model() -> Any:
    return ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))


def make_session() -> Any:
    if WAY.startswith("registered"):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        ortgrad.register(options)
        return onnxruntime.InferenceSession(model().SerializeToString(), options)
    return ortgrad.InferenceSession(model(), kernels="compiled" if WAY == "planning" else "python")


def feeds_of(size: int) -> dict[str, np.ndarray]:
    """Inputs of a size that the kernel has not met."""
    return {"dY": np.ones(size, np.float32), "X": np.ones(size, np.float32)}


def trace(function: Any) -> None:
    threading.settrace(function)
    sys.settrace(function)
    # Threads that live already keep their own trace function. The last to work may not be idle yet.
    time.sleep(0.01)
    workers._idle.clear()


def attempt(session: Any, feeds: Any) -> str:
    try:
        (result,) = session.run(None, feeds)
    except Fault:
        return "fault"
    except ortgrad.KernelError:
        return "kernel error"
    except MemoryError:
        return "fault"
    except Exception as error:
        known = ("around a kernel of ortgrad", "must be equal", "MemoryError")
        assert any(text in str(error) for text in known), error
        return "status"
    assert result.tolist() == np.where(feeds["X"] > 0, feeds["dY"], 0).tolist()
    return "result"


def main() -> None:
    session = make_session()
    assert attempt(session, FEEDS) == "result"
    n = FIRST
    while True:
        if WAY == "elsewhere":
            session._monitor._quick_size = -1
        injector = Injector(n)
        trace(injector)
        try:
            if WAY.endswith("creation"):
                outcome = attempt(make_session(), FEEDS)
                # In a session of others the exception comes a little later.
                time.sleep(0.02)
            else:
                new = feeds_of(n + 4) if WAY == "planning" else FEEDS
                outcome = attempt(session, BAD if WAY == "failing" else new)
        except (Fault, MemoryError):
            outcome = "fault"
        except Exception as error:
            # Of the creation: a ModelError, or onnxruntime's own exception in a session of others.
            assert RAISED is MemoryError and "MemoryError" in str(error), error
            outcome = "status"
        finally:
            trace(None)
        print(n, outcome, flush=True)
        if not injector.raised:
            break
        for _ in range(2):
            assert attempt(session, FEEDS) == "result"
        n += STEP
    print("done")


main()
