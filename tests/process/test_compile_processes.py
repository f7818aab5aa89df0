"""Compilation by several processes: who compiles what, and what happens if a process fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE

import ortgrad
from ortgrad.compiled import cache, machine_code, progress, workers
from ortgrad.compiled.progress import Progress
from ortgrad.compiled.source import Function, Source
from ortgrad.operators.compiled import CompiledKernel

pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")

TYPES = ["float32"] * 3


def times(dy: float, x: float) -> float:
    return dy * x


def plus(dy: float, x: float) -> float:
    return dy + x


class Compilation:
    """What this process compiles, and the workers that it starts."""

    def __init__(self) -> None:
        self.here: list[Source] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self.kernels = [(CompiledKernel(function, 3), TYPES) for function in (times, plus)]

    def run(self) -> None:
        machine_code.compile_all(self.kernels)
        assert all(machine_code.block(kernel, types) for kernel, types in self.kernels)
        assert all(process.poll() is not None for process in self.started)


@pytest.fixture
def compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilation]:
    found = Compilation()
    compile_block, start = machine_code._compile_block, workers._start

    def counted_compile(source: Source) -> bytes:
        found.here.append(source)
        return compile_block(source)

    def counted_start(share: Any) -> subprocess.Popen[bytes]:
        found.started.append(start(share))
        return found.started[-1]

    monkeypatch.setenv("ORTGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ORTGRAD_COMPILE_PROCESSES", "2")
    monkeypatch.setattr(machine_code, "_loaded", {})
    monkeypatch.setattr(machine_code, "_progress", Progress())
    monkeypatch.setattr(machine_code, "_compile_block", counted_compile)
    monkeypatch.setattr(workers, "_start", counted_start)
    monkeypatch.setattr(workers, "_LEAST_SECONDS", 0)
    yield found


def test_workers_compile_all(compilation: Compilation, capfd: pytest.CaptureFixture[str]) -> None:
    compilation.run()
    assert not compilation.here
    assert [process.returncode for process in compilation.started] == [0, 0]
    assert len(list(cache.folder().iterdir())) == 2
    compilation.run()
    assert len(compilation.started) == 2
    assert capfd.readouterr() == ("", "")


SCRIPT = """
import sys
import numpy as np, ortgrad
from ortgrad.compiled import machine_code, workers
print("imported", file=open(sys.argv[1], "a"))
workers._LEAST_SECONDS = 0
kernels = [ortgrad.nodes.tanh_grad("dY", "Y", "A"), ortgrad.nodes.softmax_grad_13("A", "Y", "B", axis=1)]
here, compile_block = [], machine_code._compile_block
machine_code._compile_block = lambda source: here.append(source) or compile_block(source)
session = ortgrad.InferenceSession(ortgrad.nodes.make_model(kernels), kernels="compiled")
feeds = np.random.default_rng(0).standard_normal((2, 5, 37), dtype=np.float32)
print(session.run(None, {"dY": feeds[0], "Y": feeds[1]})[-1].tobytes().hex(), len(here))
"""


def test_results_are_the_same(tmp_path: Path) -> None:
    """And the user's program, which has no guard for other processes, does not run in them."""
    script, log, results = tmp_path / "script.py", tmp_path / "log", []
    script.write_text(SCRIPT)
    for count in (1, 2):
        variables = {"ORTGRAD_CACHE_DIR": str(tmp_path / str(count)), "ORTGRAD_COMPILE_PROCESSES": str(count)}
        done = subprocess.run(
            [sys.executable, script, log], env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        results.append(done.stdout.split())
    (one, here), (other, not_here) = results
    assert one == other
    assert (int(here), int(not_here)) == (2, 0)
    assert log.read_text() == "imported\n" * 2


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import os; os.abort()", "import nowhere"])
def test_workers_that_fail(
    compilation: Compilation,
    program: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", program)
    compilation.run()
    assert len(compilation.started) == len(compilation.here) == 2
    assert capfd.readouterr() == ("", "")


def test_workers_that_hang(compilation: Compilation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", "import time; time.sleep(1000)")
    monkeypatch.setattr(workers, "_PATIENCE", 0)
    compilation.run()
    assert len(compilation.started) == len(compilation.here) == 2


@pytest.mark.parametrize("executable", [None, "", "/usr/bin/editor", "/nowhere/python3"])
def test_no_interpreter(
    compilation: Compilation, executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    compilation.run()
    assert not compilation.started
    assert len(compilation.here) == 2


def test_a_frozen_program(compilation: Compilation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    compilation.run()
    assert not compilation.started


def test_a_cache_that_cannot_be_written(
    compilation: Compilation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORTGRAD_CACHE_DIR", str(tmp_path / "file" / "folder"))
    compilation.run()
    assert not compilation.started
    assert len(compilation.here) == 2


def test_a_kernel_that_cannot_be_compiled(compilation: Compilation) -> None:
    """The others are compiled all the same, and the reason is that of Numba in this process."""

    def broken(dy: float, x: float) -> float:
        return dy + nowhere  # type: ignore[name-defined]  # noqa: F821

    kernel = CompiledKernel(broken, 3)
    machine_code.compile_all([(kernel, TYPES), *compilation.kernels])
    with pytest.raises(ortgrad.RegistrationError, match="Numba cannot compile"):
        machine_code.block(kernel, TYPES)
    assert len(compilation.here) == 1
    compilation.run()
    assert len(compilation.here) == 1


def test_several_threads_share_the_workers(compilation: Compilation) -> None:
    threads = [
        threading.Thread(target=machine_code.compile_all, args=(compilation.kernels,)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilation.started) == 2
    compilation.run()
    assert not compilation.here


def test_progress(
    compilation: Compilation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 1.0)
    monkeypatch.setattr(workers, "_SECONDS", 5)
    compilation.run()
    assert capsys.readouterr().err == "ortgrad: compiling times, plus, once for this machine\n"
    assert machine_code._names(f"k{i} Source()" for i in range(9)) == "k0, k1, k2, k3 and 5 more"


def test_quick_kernels_start_no_process(compilation: Compilation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("ORTGRAD_COMPILE_PROCESSES", "2")
    monkeypatch.setattr(workers, "_start", lambda share: pytest.fail("a process is started"))
    monkeypatch.setattr(machine_code.cache, "has", lambda key: False)
    machine_code.compile_all(compilation.kernels)


def source(name: str, length: int, *called: Function) -> Source:
    function = Function(name, name * length, functions=tuple((each.name, each) for each in called))
    return Source("float32", (function,), "", reorders=True)


@pytest.mark.parametrize(
    ("variable", "processes"), [("0", 0), ("1", 0), ("2", 2), ("3", 3), ("100", 6), ("many", 4), ("", 4)]
)
def test_number_of_processes(variable: str, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTGRAD_COMPILE_PROCESSES", variable)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    shares = workers.distribute([source(name, 20000) for name in "abcdef"])
    assert len(shares) == processes
    assert sorted(i for share in shares for i in share) == (list(range(6)) if processes else [])


def test_kernels_with_functions_in_common_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTGRAD_COMPILE_PROCESSES", "2")
    common = Function("c", "c" * 20000)
    given = [source("a", 3000, common), source("d", 28000), source("b", 2000, common), source("e", 10)]
    assert [sorted(share) for share in workers.distribute(given)] in ([[1], [0, 2, 3]], [[1, 3], [0, 2]])
    assert workers.expected_seconds([given[0], given[2]]) < sum(
        workers.expected_seconds([each]) for each in (given[0], given[2])
    )


def test_workers_end_with_the_process_that_started_them() -> None:
    process = workers._start(["name __import__('time').sleep(1000)"])
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE) == 1


KILLED = """
import os, sys, threading
from ortgrad.compiled import workers
started, start = [], workers._start

def told(share):
    started.append(start(share))
    print(started[-1].pid, flush=True)
    return started[-1]

workers._start = told
loop = "name (lambda f: f(f))(lambda f: [sum(range(10 ** 9)) for _ in iter(int, 1)])"
threading.Thread(target=workers.run, args=([[loop]] * 2, 1000, threading.Event())).start()
while len(started) < 2:
    pass
import time
time.sleep(float(sys.argv[1]))
if os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork, and no SIGKILL")
@pytest.mark.parametrize("delay", [0.0, 0.03, 0.3, 1.0, 2.5])
def test_workers_end_within_two_seconds_after_their_parent_is_killed(delay: float) -> None:
    """At any moment: while Python starts, while Numba is imported, while a kernel is compiled.

    A process that the parent has forked holds the pipes of the workers open.
    """
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(delay)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    parent.wait()
    end = time.monotonic() + 2
    while (alive := [pid for pid in pids if _exists(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    parent.stdout.close()
    assert not alive


def _exists(pid: int) -> bool:
    """Return whether a process runs. One that has ended may still wait to be collected."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


INTERRUPTED = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np, ortgrad
from ortgrad.compiled import workers

folder, program = Path(sys.argv[1]), workers._PROGRAM
workers._LEAST_SECONDS = 0
workers._PROGRAM = f'''
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open(os.path.join({sys.argv[1]!r}, str(os.getpid())), "w").close()
time.sleep(1000)
'''

def interrupt():
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

def session():
    kernels = [ortgrad.nodes.tanh_grad("dY", "Y", "A"), ortgrad.nodes.relu_grad("A", "Y", "B")]
    return ortgrad.InferenceSession(ortgrad.nodes.make_model(kernels), kernels="compiled")

threading.Thread(target=interrupt).start()
try:
    session()
except KeyboardInterrupt:
    print("interrupted")
for path in folder.iterdir():
    try:
        os.kill(int(path.name), 0)
    except ProcessLookupError:
        print("ended")
workers._PROGRAM = program
feeds = {name: np.float32([0.5]) for name in ("dY", "Y")}
print(session().run(["B"], feeds)[0])
"""


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_interruption(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    variables = {"ORTGRAD_CACHE_DIR": str(tmp_path / "cache"), "ORTGRAD_COMPILE_PROCESSES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, tmp_path / "pids"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert all(line.startswith("ortgrad: compiling ") for line in done.stderr.splitlines()), done.stderr
    assert done.stdout == "interrupted\nended\nended\n[0.375]\n"


_FORK = """
import os
import numpy as np
import ortgrad
from ortgrad.compiled import machine_code, workers
from ortgrad.operators.declaration import find_operator

workers._LEAST_SECONDS = 0
started, start = [], workers._start
workers._start = lambda share: started.append(start(share)) or started[-1]


def compile_and_run(*names):
    kernels = [find_operator(name).compiled_kernel for name in names]
    machine_code.compile_all([(kernel, ["float32"] * 3) for kernel in kernels])
    model = ortgrad.nodes.make_model(ortgrad.nodes.tanh_grad("dY", "Y", "dX"))
    session = ortgrad.InferenceSession(model, kernels="compiled")
    return session.run(None, {"dY": np.float32([1, 2]), "Y": np.float32([1, 0])})[0].tolist() == [0, 2]


assert compile_and_run("ReluGrad", "TanhGrad") and len(started) == 2
# As if another thread were waiting for workers, which does not exist in the child.
machine_code._workers_lock.acquire()
child = os.fork()
if child == 0:
    os._exit(0 if compile_and_run("SigmoidGrad", "GeluGrad") and len(started) == 4 else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_workers_of_a_forked_process(tmp_path: Path) -> None:
    variables = {"ORTGRAD_CACHE_DIR": str(tmp_path), "ORTGRAD_COMPILE_PROCESSES": "2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
