"""Calls on another thread keep nothing alive: what they referred to ends with the caller's last reference."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import ortgrad
from ortgrad import threads
from ortgrad.threads import call_elsewhere


class Value:
    """An object that weak references can refer to."""


@pytest.fixture(autouse=True)
def late_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads that stop at the end of a job, as they may on a busy machine, until the test has ended."""
    run, test_has_ended = threads._Job.run, threading.Event()

    def run_and_stop(job: threads._Job) -> None:
        run(job)
        test_has_ended.wait()

    monkeypatch.setattr(threads._Job, "run", run_and_stop)
    yield
    test_has_ended.set()


def test_the_function() -> None:
    value = Value()
    found = weakref.ref(value)

    def function(value: Value = value) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return 3

    assert call_elsewhere(function) == 3
    del function, value
    assert found() is None


def test_the_result() -> None:
    value = call_elsewhere(Value)
    found = weakref.ref(value)
    del value
    assert found() is None


class OwnError(Exception):
    """Weak references cannot refer to exceptions of Python itself."""


def fail() -> None:
    raise OwnError


def test_the_exception() -> None:
    with pytest.raises(OwnError) as raised:
        call_elsewhere(fail)
    found = weakref.ref(raised.value)
    del raised
    # Frames and the exceptions that passed through them refer to each other.
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("kernels", ["python", "onnx", "auto"])
def test_a_session(kernels: str) -> None:
    model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
    session = ortgrad.InferenceSession(model, kernels=kernels)
    feeds = {"dY": np.float32([1, 2]), "X": np.float32([1, -1])}
    (result,) = session.run(None, feeds)
    np.testing.assert_array_equal(result, [1, 0])
    found = [weakref.ref(value) for value in (session, result, *feeds.values(), *session._monitor.kernels)]
    del session, result, feeds
    gc.collect()
    assert [reference() for reference in found] == [None] * len(found)
