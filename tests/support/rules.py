"""What the tests of gradient rules share: one-node models, their gradients, PyTorch's gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper

import ortgrad

NAMES = "abcdefghijklmnopqr"
Arrays = dict[str, np.ndarray]


def one_node(
    op_type: str,
    inputs: Sequence[np.ndarray | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    opset: int = 18,
    domain: str = "",
    outputs: Sequence[np.dtype | type | None] = (None,),
    constants: Sequence[int] = (),
    symbolic: bool = True,
) -> tuple[onnx.ModelProto, Arrays]:
    """A model of one node and its feeds: inputs are a, b, ..., outputs y, z, u, ...

    None among the inputs is an absent one; those in `constants` become initializers. The
    element type of an output is that of the first floating-point input unless it is given.
    """
    names = [NAMES[i] if array is not None else "" for i, array in enumerate(inputs)]
    given = {name: array for name, array in zip(names, inputs, strict=True) if array is not None}
    fixed = {NAMES[i] for i in constants}
    floating = next(a.dtype for a in given.values() if a.dtype.kind == "f")
    produced = [
        helper.make_tensor_value_info(
            "yzuvw"[i], helper.np_dtype_to_tensor_dtype(np.dtype(dtype or floating)), None
        )
        for i, dtype in enumerate(outputs)
    ]
    node = helper.make_node(
        op_type, names, [v.name for v in produced], name="node", domain=domain, **(attributes or {})
    )
    graph = helper.make_graph(
        [node],
        "graph",
        [_info(name, array, symbolic) for name, array in given.items() if name not in fixed],
        produced,
        [numpy_helper.from_array(array, name) for name, array in given.items() if name in fixed],
    )
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return model, {name: array for name, array in given.items() if name not in fixed}


def _info(name: str, array: np.ndarray, symbolic: bool) -> onnx.ValueInfoProto:
    shape = [f"{name}_{i}" for i in range(array.ndim)] if symbolic else array.shape
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)


@functools.lru_cache(maxsize=100)
def _built(model: bytes, wrt: tuple[str, ...], of: tuple[str, ...]) -> onnx.ModelProto:
    """The gradient model, which is the same for all kernels."""
    return ortgrad.build_gradient_model(onnx.load_from_string(model), wrt=list(wrt), of=list(of))


def gradients(
    model: onnx.ModelProto,
    feeds: Arrays,
    seeds: Arrays,
    wrt: Sequence[str],
    kernels: str = "auto",
) -> Arrays:
    """The built gradients; `seeds` by output name (a single scalar output is seeded with 1)."""
    built = _built(model.SerializeToString(deterministic=True), tuple(wrt), tuple(seeds))
    session = ortgrad.InferenceSession(built, kernels=kernels)
    fed = {**feeds, **{f"{name}_grad": seed for name, seed in seeds.items()}}
    known = {value.name for value in session.get_inputs()}
    # By position: a gradient of a gradient has another name.
    wanted = [value.name for value in session.get_outputs()[-len(wrt) :]]
    results = session.run(wanted, {name: array for name, array in fed.items() if name in known})
    return dict(zip(wrt, results, strict=True))


def torch_gradients(
    function: Callable[..., torch.Tensor], inputs: Sequence[np.ndarray | None], seed: np.ndarray
) -> list[np.ndarray | None]:
    """PyTorch's gradients towards the floating-point inputs, None for the others."""
    tensors = [None if a is None else torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in inputs]
    output = function(*tensors)
    output.backward(torch.tensor(seed, dtype=output.dtype))
    return [
        None
        if t is None or not t.requires_grad
        else np.zeros(t.shape, a.dtype if a is not None else None)
        if t.grad is None
        else t.grad.numpy()
        for t, a in zip(tensors, inputs, strict=True)
    ]


def check_against_torch(
    op_type: str,
    function: Callable[..., torch.Tensor],
    inputs: Sequence[np.ndarray | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    tolerance: float = 3e-6,
    kernels: str = "auto",
    **options: Any,
) -> None:
    """The gradients towards all floating-point inputs are PyTorch's, infinities and NaN included."""
    model, feeds = one_node(op_type, inputs, attributes, **options)
    with torch.no_grad():
        shape = function(*(None if a is None else torch.tensor(a) for a in inputs)).shape
    floating = next(a.dtype for a in inputs if a is not None and a.dtype.kind == "f")
    seed = (1 + np.random.default_rng(1).random(shape)).astype(floating)
    expected = torch_gradients(function, inputs, seed)
    wrt = [NAMES[i] for i, grad in enumerate(expected) if grad is not None and NAMES[i] in feeds]
    if shape == ():
        seed = np.ones((), floating)
        expected = torch_gradients(function, inputs, seed)
    actual = gradients(model, feeds, {"y": seed}, wrt, kernels)
    for name, grad in actual.items():
        other = expected[NAMES.index(name)]
        assert other is not None
        assert grad.shape == other.shape
        assert grad.dtype == feeds[name].dtype
        scale = max(1e-30, float(np.max(np.abs(other), where=np.isfinite(other), initial=0.0)))
        np.testing.assert_allclose(grad, other, rtol=tolerance, atol=tolerance * scale, err_msg=name)


def check_rule(
    op_type: str,
    inputs: Sequence[np.ndarray | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    second: bool = False,
    wrt: Sequence[str] | None = None,
    kernels: str = "auto",
    **options: Any,
) -> None:
    """The gradients agree with finite differences; with `second`, so do the gradients of the gradients."""
    model, feeds = one_node(op_type, inputs, attributes, **options)
    targets = wrt or [name for name, array in feeds.items() if array.dtype.kind == "f"]
    ortgrad.check_gradients(model, feeds, wrt=targets, kernels=kernels).raise_if_wrong()
    if second:
        built = ortgrad.build_gradient_model(model, wrt=targets)
        results = [f"{name}_grad" for name in targets]
        y = onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], feeds)[0]
        seed = np.random.default_rng(2).standard_normal(y.shape).astype(y.dtype)
        ortgrad.check_gradients(
            built, {**feeds, "y_grad": seed}, wrt=targets, of=results, kernels=kernels
        ).raise_if_wrong()
