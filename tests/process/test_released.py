"""Nothing of a model stays in memory when the caller has dropped what was made of it."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest
from support.everything import WORK

import ortgrad

PACKAGES = ("onnx", "onnx_ir", "onnxruntime", "ortgrad")
KERNELS = ("ortgrad.runtime.entrance._Step", "ortgrad.runtime.native._Kernel", "ortgrad.runtime.plans.State")
CALLS = 3


def kept() -> Counter[str]:
    """The objects of onnx, onnx-ir, onnxruntime and ortgrad that are alive, by type."""
    gc.collect()
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        if str(kind.__module__).partition(".")[0] in PACKAGES
    )


@pytest.mark.parametrize("name", WORK)
def test_nothing_is_left(name: str, tmp_path: Path) -> None:
    def call(folder: str) -> None:
        (tmp_path / folder).mkdir()
        WORK[name](tmp_path / folder)

    # What is kept once: registrations, caches.
    for i in range(2):
        call(f"first {i}")
    before = kept()
    for i in range(CALLS):
        call(f"then {i}")
    grown = kept() - before
    if name == "register":
        # A plain session may end after Python does, so nobody is told when its kernels have no use any more.
        for kind in KERNELS:
            del grown[kind]
    assert not {kind: count for kind, count in grown.items() if count >= CALLS}


def test_large_models_are_released() -> None:
    """Each of these models is different: no cache is asked for one twice."""

    def model(width: int) -> onnx.ModelProto:
        proto: onnx.ModelProto = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": 18]>
            g (float[N, {width}] x, float[{width}, {width}] w) => (float[N, {width}] y) {{
                a = MatMul(x, w) b = Softmax(a) c = Tanh(b) d = Add(c, x) y = LogSoftmax(d)
            }}"""
        )
        return proto

    def make(width: int) -> None:
        built = ortgrad.build_gradient_model(model(width), wrt=["x", "w"])
        ortgrad.InferenceSession(built)
        onnxruntime.InferenceSession(
            ortgrad.prepare(built, kernels="onnx").SerializeToString(), providers=["CPUExecutionProvider"]
        )

    for width in (3, 4):
        make(width)
    before = kept()
    for width in (5, 6, 7, 8):
        make(width)
    grown = kept() - before
    parts = ("onnx_ir.Node", "onnx_ir.Value", "onnx_ir.Graph", "InferenceSession")
    assert not [kind for kind in grown if kind.endswith(parts)]
