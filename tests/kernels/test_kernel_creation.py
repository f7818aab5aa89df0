"""Attributes for which no kernel can be made, in the data that a node carries for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A process of its own: what is tested here has ended processes.
SCRIPT = """
import json, sys
import numpy as np, onnx, onnxruntime, ortgrad
from ortgrad import nodes

onnxruntime.set_default_logger_severity(4)
CPU = ["CPUExecutionProvider"]
BUILD = {
    "conv": lambda: nodes.conv_grad("dY", "X", "W", outputs=["dX", "dW", "dB"], kernel_shape=[3, 3]),
    "average": lambda: nodes.average_pool_grad("dY", "X_shape", outputs=["dX"], kernel_shape=[3, 3]),
    "max": lambda: nodes.max_pool_grad("dY", "Indices", "X_shape", outputs=["dX"], kernel_shape=[3, 3]),
}
FEEDS = {
    "X": np.ones((1, 1, 5, 5), np.float32), "W": np.ones((1, 1, 3, 3), np.float32),
    "dY": np.ones((1, 1, 3, 3), np.float32), "X_shape": np.array([1, 1, 5, 5]),
    "Indices": np.zeros((1, 1, 3, 3), np.int64),
}
kind, kernels = sys.argv[1:]
model = ortgrad.prepare(nodes.make_model(BUILD[kind]()), kernels=kernels)
(attribute,) = (a for node in model.graph.node for a in node.attribute if a.name == "ortgrad")
content = json.loads(attribute.s)
options = onnxruntime.SessionOptions()
ortgrad.register(options)
for name in ("kernel_shape", "strides", "dilations", "pads"):
    for value in ([0, 3], [-3, 3], [3, 0], [], [3], [2**40, 2**40], [2**63 - 1] * 4, 3, "3", None, [1.5, 2]):
        changed = {**content, "attributes": {**content["attributes"], name: value}}
        attribute.s = json.dumps(changed).encode()
        for make in (
            lambda: onnxruntime.InferenceSession(model.SerializeToString(), options, providers=CPU),
            lambda: ortgrad.InferenceSession(model, kernels=kernels),
        ):
            try:
                session = make()
                session.run(None, {i.name: FEEDS[i.name] for i in session.get_inputs()})
                outcome = "ran"
            except Exception as error:
                outcome = type(error).__name__ + ": " + str(error)
                assert outcome[-2:] != ": ", "an error without a text"
            print(name, value, outcome[:150].replace(chr(10), " "), flush=True)
print("done")
"""


@pytest.mark.parametrize("kernels", ["python", "auto"])
@pytest.mark.parametrize("kind", ["conv", "average", "max"])
def test_kernels_that_cannot_be_made(kind: str, kernels: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, kernels], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    lines = found.stdout.splitlines()
    assert lines[-1] == "done"
    # Windows without elements are refused, whoever makes the session.
    refused = [line for line in lines if line.startswith(("kernel_shape [0, 3]", "kernel_shape [-3, 3]"))]
    assert len(refused) == 4
    assert not any(" ran" in line for line in refused), refused
