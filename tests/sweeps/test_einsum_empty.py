"""Einsum with an empty axis: onnxruntime may end the process; where it does not, the gradient must not."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support import PATIENCE, ROOT
from support.rules import one_node
from support.sessions import make_session, run

import ortgrad

EQUATIONS = [
    ("bij,ji->bi", [(2, 3, 4), (4, 3)]),
    ("bqhd,bkhd->bhqk", [(2, 3, 2, 4), (2, 5, 2, 4)]),
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("ij,kj->ik", [(2, 3), (4, 3)]),
]
WAYS = ("auto", "onnx", "python", "plain")


def variants() -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """The equations with axes of each length in turn empty."""
    for equation, shapes in EQUATIONS:
        for length in sorted({n for shape in shapes for n in shape}):
            yield equation, [tuple(0 if n == length else n for n in shape) for shape in shapes]


def differentiate(equation: str, shapes: list[tuple[int, ...]], ways: Sequence[str], symbolic: bool) -> None:
    """Run the node, and its gradients in some ways, which are 0 because nothing comes out or is summed."""
    inputs = [np.ones(shape, np.float32) for shape in shapes]
    model, feeds = one_node("Einsum", inputs, {"equation": equation}, symbolic=symbolic)
    (y,) = make_session(model, "plain", "all").run(None, feeds)
    if not ways:
        return
    wrt = list(feeds)
    built = ortgrad.build_gradient_model(model, wrt=wrt, of=["y"])
    for way in ways:
        grads = run(make_session(built, way, "all"), feeds, {"y": np.ones_like(y)}, len(wrt))
        for name, grad in zip(wrt, grads, strict=True):
            assert grad.shape == feeds[name].shape, f"{way}, {name}: {grad.shape}"
            assert not grad.any(), f"{way}, {name}"


def status(*arguments: Any) -> int:
    """How `differentiate` ends in a process of its own: 0, or something else for an error or a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            differentiate(*arguments)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Print how many variants ran, and those whose node runs but whose gradients do not."""
    ran = 0
    for equation, shapes in variants():
        if status(equation, shapes, (), True) != 0:
            continue  # onnxruntime does not run the node itself
        ran += 1
        # Lengths that are 0 for sure, and such that may be.
        symbolic = ran % 3 > 0
        found = status(equation, shapes, WAYS if symbolic else ("onnx",), symbolic)
        if found:
            print("failed", equation, shapes, symbolic, found)
    print("ran", ran)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a signal ends a process, and a new one takes seconds")
def test_gradients_of_empty_operands() -> None:
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    # Not in this process: it has threads, which a fork does not copy.
    done = subprocess.run(
        [sys.executable, "-c", "from sweeps import test_einsum_empty; test_einsum_empty.main()"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 7


def test_lengths_that_are_known_cost_nothing() -> None:
    model, _ = one_node(
        "Einsum",
        [np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)],
        {"equation": "ij,jk->ik"},
        symbolic=False,
    )
    built = ortgrad.build_gradient_model(model, wrt=["a", "b"], of=["y"])
    assert "If" not in {node.op_type for node in built.graph.node}
