"""Try mutated nodes (see mutations), each in a process of its own, and judge what becomes of them.

    python tests/sweeps/mutate_nodes.py --count 2000    # the exit code is 1 if one is not handled
    python tests/sweeps/mutate_nodes.py --show 17       # mutation 17 with tracebacks, in this process

A session refuses a model, a run raises an exception, or it returns numbers. A signal, more than SECONDS of
processor time, more than MEMORY, and exceptions that are not for users are wrong. So are numbers that depend
on what was in memory before: malloc fills memory with one pattern, then with another, and a second session
and run must return the same bytes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime

import ortgrad
from ortgrad.compiled import machine_code
from ortgrad.graph.trials import onnxruntime_errors
from ortgrad.runtime import session as runtime_session

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import node_mutations as mutations
from support import session_of_passes

SECONDS = 10
MEMORY = 2 << 30
# For a process that waits for something: no machine is that slow.
PATIENCE = 300
# What malloc fills memory with. As numbers of any type these are like nothing that a kernel computes.
PATTERNS = (0x55, 0x33)
_M_PERTURB = -6
# So that no thread keeps blocks that are not filled.
TUNABLES = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
OWN = ("python", "onnx", "auto", *(["compiled"] if machine_code.is_installed() else []))


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # All memory comes from malloc.
    options.enable_cpu_mem_arena = False
    return options


def registered(data: bytes) -> onnxruntime.InferenceSession:
    options = quiet()
    ortgrad.register(options)
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def session_as_it_is(model: onnx.ModelProto) -> ortgrad.InferenceSession:
    """A session of ortgrad in which onnxruntime gets the model unchanged."""
    with mock.patch.object(runtime_session, "prepare_loaded", lambda model, *_, **__: model):
        return session_of_passes(model, quiet())


def ways(mutated: mutations.Mutated) -> Iterator[tuple[str, Callable[[], Any]]]:
    """How a user can come to run the model; for internal nodes also as passes would have made them."""
    model, data = mutated.model, mutated.model.SerializeToString()
    for kernels in OWN[: 1 if mutated.internal else None]:
        yield kernels, lambda kernels=kernels: ortgrad.InferenceSession(data, quiet(), kernels=kernels)
    yield "registered", lambda: registered(data)
    if mutated.internal:
        yield "passes", lambda: session_of_passes(model, quiet())
        yield "kernel", lambda: session_as_it_is(model)
    else:
        prepared = "python"
        yield "prepared", lambda: registered(ortgrad.prepare(data, kernels=prepared).SerializeToString())


def fill_memory(pattern: int) -> None:
    """Fill what is free, and what will be allocated, with a pattern."""
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no such function
        ctypes.CDLL(None).mallopt(_M_PERTURB, pattern)
    # NumPy keeps small blocks.
    kept = [np.full(size, pattern, np.uint8) for size in range(1, 1024) for _ in range(8)]
    del kept


def digest(results: Any) -> str:
    total = hashlib.sha256()
    for value in results:
        array = np.asarray(value)
        total.update(f"{array.dtype}{array.shape}".encode())
        total.update(array.tobytes() if array.dtype != object else repr(array.tolist()).encode())
    return total.hexdigest()


def judged(error: BaseException, way: str, step: str) -> str:
    """The outcome of an exception."""
    ours = way in OWN or way in ("passes", "kernel") or isinstance(error, ortgrad.OrtgradError)
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if (
        isinstance(error, MemoryError)
        or "bad_alloc" in text
        or "Failed to allocate" in text
        or "MemoryError" in text
    ):
        return f"MEMORY {text}"
    if isinstance(error, ortgrad.OrtgradError):
        return f"refused {step} {text}"
    if isinstance(error, onnxruntime_errors()) or (
        way in ("registered", "prepared", "kernel") and isinstance(error, RuntimeError)
    ):
        # onnxruntime's own exceptions; sessions of ortgrad load no model with one.
        return f"{'RAW' if ours and step == 'load' else 'refused'} {step} {text}"
    if step == "run" and isinstance(error, (ValueError, RuntimeError)) and "onnxruntime" in _origin(error):
        return f"refused {step} {text}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in frames if "ortgrad" in f.filename]
    return f"RAW {step} at {' '.join(places[-3:])}: {text}"


def _origin(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].filename


def attempt(way: str, make: Callable[[], Any], feeds: mutations.Arrays) -> str:
    """What becomes of the model: numbers, or what was raised where."""
    found = ""
    for pattern in PATTERNS:
        fill_memory(pattern)
        step = "load"
        try:
            session = make()
            wanted = {value.name for value in session.get_inputs()}
            given = {name: np.array(array) for name, array in feeds.items() if name in wanted}
            step = "run"
            fill_memory(pattern)
            results = session.run(None, given)
        except Exception as error:
            return judged(error, way, step)
        again = digest(results)
        if found and again != found:
            return "FOREIGN MEMORY"
        found = again
        del session, results
        gc.collect()
    return f"numbers {found[:12]}"


def is_allowed(outcome: str) -> bool:
    return outcome.startswith(("refused", "numbers"))


# Processes


def limit() -> None:
    """Limit what this process may use from now on."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def try_here(seed: int, most: float, write: Callable[[str, str], None]) -> None:
    mutated = mutations.mutated(seed)
    for way, make in ways(mutated):
        write(way, "")
        begin = time.process_time()
        outcome = attempt(way, make, mutated.feeds)
        seconds = time.process_time() - begin
        write(way, f"TIME {seconds:.0f} s, {outcome}" if seconds > most else outcome)


def try_there(seed: int, most: float = SECONDS) -> dict[str, str]:
    """The outcome of every way, in a child process; `most` seconds are allowed for each."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:

        def write(way: str, outcome: str) -> None:
            os.write(write_end, (json.dumps([way, outcome]) + "\n").encode())

        try:
            os.close(read_end)
            # What onnxruntime or glibc say before they end the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            limit()
            try_here(seed, most, write)
            write("end", "refused")
        except BaseException as error:
            write("nothing", f"RAW {error!r}")
        finally:
            os._exit(0)
    os.close(write_end)
    text, deadline = b"", time.monotonic() + PATIENCE
    hangs = False
    while not hangs:
        ready, _, _ = select.select([read_end], [], [], max(0, deadline - time.monotonic()))
        part = os.read(read_end, 1 << 16) if ready else b""
        text += part
        hangs = not ready
        if ready and not part:
            break
    if hangs:
        os.kill(child, signal.SIGKILL)
    os.close(read_end)
    _, status = os.waitpid(child, 0)
    found = dict(json.loads(line) for line in text.decode().splitlines() if line.endswith("]"))
    last = next(reversed(found), "nothing")
    if hangs:
        found[last] = f"HANGS {found.get(last, '')}"
    elif os.WIFSIGNALED(status):
        found[last] = f"SIGNAL {signal.Signals(os.WTERMSIG(status)).name} {found.get(last, '')}"
    elif found.pop("end", None) is None:
        found[last] = f"ENDED {found.get(last, '')}"
    return found


def serve() -> None:
    """Read numbers of mutations, and write what becomes of them."""
    for line in sys.stdin:
        seed, most = json.loads(line)
        warm(seed)
        print(json.dumps(try_there(seed, most)), flush=True)


_warm: set[str] = set()


def warm(seed: int) -> None:
    """Run the valid calls of the operator once, so that its kernels are compiled."""
    groups = [*mutations.by_operator().items()]
    name, group = groups[seed % len(groups)]
    if name in _warm:
        return
    _warm.add(name)
    for subject in group[:1]:
        data = subject.model.SerializeToString()
        for kernels in OWN:
            session = (
                session_of_passes(subject.model, quiet())
                if subject.internal
                else ortgrad.InferenceSession(data, quiet(), kernels=kernels)
            )
            session.run(None, subject.feeds)


class Server:
    """A process that has imported everything, and forks for each mutation."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **TUNABLES, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def try_mutation(self, seed: int, seconds: float = SECONDS) -> dict[str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"[{seed}, {seconds}]\n")
        self._process.stdin.flush()
        found: dict[str, str] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()


def describe(seed: int) -> str:
    mutated = mutations.mutated(seed)
    return f"{seed} {mutated.name}: {'; '.join(mutated.changes)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", type=int)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return 0
    if given.show is not None:
        return show(given.show)
    server, bad = Server(), 0
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for seed in range(given.first, given.first + given.count):
        found = server.try_mutation(seed)
        for way, outcome in found.items():
            table[way][" ".join(outcome.split()[: 2 if outcome.startswith("refused") else 1])] += 1
        wrong = {way: outcome for way, outcome in found.items() if not is_allowed(outcome)}
        if wrong:
            bad += 1
            print(describe(seed)[:300])
            for way, outcome in wrong.items():
                print(f"    {way}: {outcome[:300]}", flush=True)
    server.close()
    for way, counts in table.items():
        print(f"{way:12}", ", ".join(f"{what} {n}" for what, n in counts.most_common()))
    print(f"{bad} of {given.count} mutations are not handled")
    return 1 if bad else 0


def show(seed: int) -> int:
    mutated = mutations.mutated(seed)
    print(describe(seed))
    for way, make in ways(mutated):
        print("===", way, flush=True)
        try:
            session = make()
            wanted = {value.name for value in session.get_inputs()}
            print(session.run(None, {n: a for n, a in mutated.feeds.items() if n in wanted}))
        except Exception:
            traceback.print_exc()
    return 0


if __name__ == "__main__":
    sys.exit(main())
