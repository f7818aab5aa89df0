"""Forks children while other threads make sessions, and counts those that hang.

python tests/process/fork_script.py [children]

Each child builds a gradient model, makes a session and runs it, and compares the result with NumPy's.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback

import numpy as np
import onnx

import ortgrad

SECONDS = 60  # after which a child counts as hanging; one takes less than a second


def gradients(number: int, kernels: str) -> bool:
    """Return whether a session that is made now computes the right gradients."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[N, {number}] x, float[{number}, 2] w) => (float loss)
        {{ y = MatMul(x, w) z = Tanh(y) loss = ReduceSum<keepdims = 0>(z) }}"""
    )
    built = ortgrad.build_gradient_model(model, wrt=["w"], of="loss")
    x, w = np.random.default_rng(number).standard_normal((2, number, number), dtype=np.float32)
    w = w[:, :2] if number > 1 else np.ones((1, 2), np.float32)
    result = ortgrad.InferenceSession(built, kernels=kernels).run(["w_grad"], {"x": x, "w": w})[0]
    return bool(np.allclose(result, x.T @ (1 - np.tanh(x @ w) ** 2), atol=1e-4))


def child() -> None:
    # The alarm ends the process even if all of its threads wait for a lock.
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(SECONDS - 2)
    status = 2
    try:
        status = 0 if gradients(5, "auto") else 3
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main(count: int) -> None:
    stopped = threading.Event()

    def make_sessions(first: int) -> None:
        number = first
        while not stopped.is_set():
            number += 1
            assert gradients(2 + number % 7, "auto" if number % 2 else "onnx")

    # The first children are forked while modules are imported and kernels compiled.
    threads = [threading.Thread(target=make_sessions, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    generator = np.random.default_rng(0)
    statuses = []
    for _ in range(count):
        time.sleep(generator.uniform(0, 0.1))
        pid = os.fork()
        if pid == 0:
            child()
        statuses.append(os.waitpid(pid, 0)[1])
    stopped.set()
    for thread in threads:
        thread.join()
    hanging = sum(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM for status in statuses)
    print(f"{count} children: {hanging} hang, {sum(map(bool, statuses)) - hanging} fail")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
