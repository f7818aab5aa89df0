"""Forks beside threads that make sessions: no child may wait for a lock that nobody releases."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

import ortgrad
from ortgrad import threads
from ortgrad.compiled import machine_code
from ortgrad.graph import recorder
from ortgrad.operators import schema
from ortgrad.runtime import extensions

PACKAGE = Path(ortgrad.__file__).parent
# What has a lock inside that a forked child inherits as it is.
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier", "Queue", "cached_property"}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_all_locks_are_made_in_one_place() -> None:
    """Only those of `ortgrad.threads` are known to be free in a child."""
    found = [
        (str(path.relative_to(PACKAGE)), node.lineno)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Attribute, ast.Name))
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in LOCKS
    ]
    assert {name for name, _ in found} == {"threads.py"}, found


def test_every_lock_is_free_in_a_child() -> None:
    """Another thread holds all locks of the package while this one forks."""
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        end.wait()
        for lock in locks:
            lock.release()

    locks = list(threads._locks)
    known = [schema._lock, machine_code._lock, machine_code._workers_lock, extensions._lock]
    assert all(lock in locks for lock in (*known, recorder._arithmetic._lock))
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = fork()
    if child == 0:
        os._exit(0 if all(lock.acquire(timeout=5) for lock in locks) else 1)
    status = os.waitpid(child, 0)[1]
    end.set()
    holder.join()
    assert status == 0


def fork() -> int:
    """Fork without the warning of newer releases of Python that there are other threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def test_a_fork_waits_for_what_must_not_be_divided() -> None:
    steps: list[str] = []
    inside, waited = threading.Event(), threading.Event()

    def work() -> None:
        with threads.forks_wait(), threads.forks_wait():
            steps.append("begin")
            inside.set()
            waited.wait(0.2)
            steps.append("end")

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait()
    child = fork()
    if child == 0:
        # And the child itself need not wait.
        with threads.forks_wait():
            os._exit(0 if steps == ["begin", "end"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    worker.join()
    with threads.forks_wait():
        steps.append("open again")
    assert not threads._gate._inside


def test_a_fork_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that it waits for may wait for the one that forks."""
    monkeypatch.setattr(threads, "_PATIENCE", 0.1)
    inside, forked = threading.Event(), threading.Event()

    def work() -> None:
        with threads.forks_wait():
            inside.set()
            forked.wait()

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait()
    child = fork()
    if child == 0:
        with threads.forks_wait():
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    forked.set()
    worker.join()


def test_functions_that_run_for_an_awaited_thread_do_not_wait_for_the_fork() -> None:
    """Else the fork would wait for the first thread, that for the second, and that for the fork."""
    script = """
import os, threading, time
from ortgrad import threads
from ortgrad.compiled import machine_code
from ortgrad.graph import recorder
from ortgrad.operators import schema
from ortgrad.runtime import extensions

def fork():
    inside.wait()
    if os.fork() == 0:
        os._exit(0)
    os.wait()

def inner():
    with threads.forks_wait():
        return 3

inside = threading.Event()
forker = threading.Thread(target=fork)
forker.start()
start = time.monotonic()
with threads.forks_wait():
    inside.set()
    while threads._gate._forking is None:
        time.sleep(0.01)
    assert threads.call_elsewhere(inner) == 3
forker.join()
print(time.monotonic() - start < threads._PATIENCE)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "True\n", done.stderr


def test_children_that_are_forked_while_sessions_are_made() -> None:
    script = Path(__file__).with_name("fork_script.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, "10"], capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "10 children: 0 hang, 0 fail\n", done.stderr
