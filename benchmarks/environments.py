"""The peers' Python environments and processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = HERE.parent / ".benchmarks"
_TORCH = "2.13.0"
_TRAINING = ["onnxruntime-training-cpu==1.19.2", "numpy<2", "onnx<1.17"]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def installed(package: str) -> str | None:
    """The version of a package in this environment, without its local part."""
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def describe_machine() -> str:
    """System, processor and load; says so if something else runs on the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > (os.cpu_count() or 1) / 2:
        say("the machine is busy with something else: do not trust these times")
    return f"{platform.platform()}, {os.cpu_count()} CPUs ({processor}), load {load:.1f} at the start"


REQUIREMENTS = {
    "training": _TRAINING,
    # Its artifact generator imports PyTorch.
    "training-artifacts": [*_TRAINING, f"torch=={_TORCH}"],
    "torch": [f"torch=={_TORCH}", "numpy"],
    # On the onnxruntime that ortgrad runs on.
    "onnx-ad": ["onnx-ad==0.3.0", f"onnxruntime=={installed('onnxruntime')}"],
}


def interpreter_for(environment: str | None) -> str | None:
    """The Python of an environment, which is made if it is not there; None if it cannot be.

    Without a name it is the Python that runs this.
    """
    if environment is None or (environment == "torch" and installed("torch") == _TORCH):
        return sys.executable
    folder = ENVIRONMENTS / environment
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / "ready.txt"
    requirements = REQUIREMENTS[environment]
    wanted = "\n".join(requirements)
    if ready.exists() and ready.read_text() == wanted:
        return str(python)
    say(f"making {folder} with {', '.join(requirements)} ...")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _make_environment(environment, folder)
        subprocess.run([python, "-m", "pip", "install", *requirements], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"without {requirements[0]}: {error}")
        return None
    ready.write_text(wanted)
    return str(python)


def _make_environment(environment: str, folder: Path) -> None:
    if environment.startswith("training") and sys.version_info >= (3, 12):
        # Its last wheels are for Python 3.11.
        older = shutil.which("python3.11")
        if older is None:
            raise OSError("onnxruntime-training needs Python 3.11 or older, and there is no python3.11")
        subprocess.run([older, "-m", "venv", folder], check=True)
    else:
        venv.create(folder, with_pip=True)


class WorkerDiedError(RuntimeError):
    """A peer's process has ended; it says why on stderr."""


class Worker:
    """A peer's process, which runs `script` of this folder and answers requests."""

    def __init__(
        self, peer: str, python: str, script: str = "worker.py", variables: Mapping[str, str] | None = None
    ) -> None:
        self.peer = peer
        self._command = [python, str(HERE / script), peer]
        self._variables = {**os.environ, **(variables or {})}
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._variables,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerDiedError(f"the worker for {self.peer} died (see above)")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def restart(self) -> None:
        self.close()
        self.start()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has died with a request unread
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
