"""The loop of a peer's process: requests from stdin, answers on stdout, a line of JSON each.

    {"do": "versions"}                         -> {"versions": ...}
    {"do": "build", ...}                       -> {}; what a peer prepares once and keeps in files
    {"do": "load", "feeds": PATH, "results": PATH, ...}
    {"do": "time", "calls": N, "clock": NAME}  -> {"seconds": [...]}; NAME is a function of the module time
    {"do": "memory", "calls": N}               -> {"steps": BYTES, "all": BYTES}

Needs NumPy and the peer's own library only, so it runs in any of the environments.
"""

import importlib.metadata
import json
import os
import sys
import time

import numpy as np

LIBRARIES = (
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-extensions",
    "onnxruntime-training-cpu",
    "onnx-ad",
    "ortgrad",
    "numba",
    "torch",
)


def session_runner(session, feeds, renamed, bound=()):
    """A call of a session, and the names of its outputs: `renamed` says which to fetch, and as what.

    The inputs in `bound` are bound once, as OrtValues; the others in every call, as NumPy arrays. Outputs
    stay in memory of the session, which the next call overwrites.
    """
    from onnxruntime import OrtValue

    binding = session.io_binding()
    fed = {value.name: feeds[value.name] for value in session.get_inputs() if value.name in feeds}
    values = {
        name: OrtValue.ortvalue_from_numpy(fed.pop(name)) for name in list(fed) if name in (bound or ())
    }
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in renamed:
        binding.bind_output(name)

    def run():
        for name, array in fed.items():
            binding.bind_cpu_input(name, array)
        session.run_with_iobinding(binding)

    run.bound = values  # onnxruntime reads the memory of their arrays, which must stay alive
    return run, lambda _: dict(zip(renamed.values(), binding.copy_outputs_to_cpu(), strict=True))


def versions():
    found = {"python": sys.version.split()[0]}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def resident(field):
    """VmRSS, the resident memory in bytes, or VmHWM, its peak; None where the system does not say."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
    except OSError:
        return None


def memory(run, calls, before):
    """How far the peak rises above `before` while `run` is called again, and since the start."""
    if before is None:
        return {"error": "peak memory is read from /proc/self/status, which this system does not have"}
    whole = resident("VmHWM")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    for _ in range(calls):
        run()
    steps = resident("VmHWM")
    return {"steps": steps - before, "all": max(whole, steps) - before}


def seconds(run, calls, clock):
    run()  # wakes up threads and caches
    taken = []
    for _ in range(calls):
        start = clock()
        run()
        taken.append(clock() - start)
    return taken


def serve(load, build=None):
    """Answer requests. `load(request, feeds)` returns a call to time and how its results are named."""
    # Libraries may print; the answers keep the real stdout for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run, before = None, resident("VmRSS")

    def answer(request):
        nonlocal run
        if request["do"] == "versions":
            return {"versions": versions()}
        if request["do"] == "build":
            if build is not None:
                build(request)
            return {}
        if request["do"] == "load":
            run = None
            with np.load(request["feeds"]) as file:
                feeds = {name: file[name] for name in file.files}
            run, results = load(request, feeds)
            np.savez(request["results"], **results(run()))
            return {}
        if request["do"] == "memory":
            return memory(run, request["calls"], before)
        return {"seconds": seconds(run, request["calls"], getattr(time, request["clock"]))}

    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # whatever the peer raises is its answer
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers)
