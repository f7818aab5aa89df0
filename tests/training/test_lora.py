"""LoRA: adapters against PyTorch, before training, after it and merged; files and errors."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support import amount, assert_close
from support.training import torch_losses
from support.training import trained as train
from torch.nn import functional

import ortgrad
from ortgrad.errors import (
    ArgumentTypeError,
    CheckpointError,
    CheckpointFileError,
    ModelError,
    NameNotFoundError,
    TrainingError,
)
from ortgrad.training import lora
from ortgrad.training.checkpoint import Checkpoint
from ortgrad.training.lora import add_lora, load_lora, lora_parameters, merge_lora, save_lora

Arrays = dict[str, np.ndarray]
TORCH = torch.float64


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def model_of(
    nodes: str,
    weights: Mapping[str, np.ndarray],
    x: str = "T[a, b]",
    opset: int = 18,
    dtype: type = np.float64,
    ir_version: int = 8,
) -> onnx.ModelProto:
    """A model y = f(x), with T for the element type."""
    name = {np.float64: "double", np.float32: "float", np.float16: "float16"}[dtype]
    typed = f"g ({x} x) => (T y) {{ {nodes} }}".replace("T", name, 2)
    model: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: {ir_version}, opset_import: ["": {opset}]> {typed}'
    )
    for key, value in weights.items():
        tensor = numpy_helper.from_array(value.astype(dtype) if value.dtype.kind == "f" else value, key)
        model.graph.initializer.append(tensor)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def run(model: onnx.ModelProto, feeds: Arrays) -> np.ndarray:
    """Without the fusions of onnxruntime, which change the rounding."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    result: np.ndarray = session.run(None, feeds)[0]
    return result


def check(model: onnx.ModelProto) -> None:
    """The checker, with the shape of the output that inference finds."""
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    onnx.checker.check_model(inferred, full_check=True)


def tensors(model: onnx.ModelProto) -> Arrays:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def trained(model: onnx.ModelProto, seed: int = 1) -> onnx.ModelProto:
    """The model with other values of A and B."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    names = lora_parameters(model)
    for i, tensor in enumerate(copy.graph.initializer):
        if tensor.name in names:
            old = numpy_helper.to_array(tensor)
            new = normal(*old.shape, seed=seed + i).astype(old.dtype)
            tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
    return copy


def gradients(model: onnx.ModelProto, feeds: Arrays, wrt: list[str], dy: np.ndarray) -> list[np.ndarray]:
    backward = ortgrad.build_gradient_model(model, wrt=wrt, of="y")
    session = ortgrad.InferenceSession(backward)
    return session.run([f"{name}_grad" for name in wrt], {**feeds, "y_grad": dy})


# By name: nodes, the shape of the weight, that of x, the function, and whether the weight is [in, out].
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MATRICES: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], Function, bool]] = {
    "matmul": ("y = MatMul(x, w)", (4, 3), (2, 5, 4), lambda x, w, c: x @ w, True),
    "matmul_left": ("y = MatMul(w, x)", (3, 4), (2, 4, 5), lambda x, w, c: w @ x, False),
    "vector": ("y = MatMul(x, w)", (4, 3), (4,), lambda x, w, c: x @ w, True),
    "vector_left": ("y = MatMul(w, x)", (3, 4), (4,), lambda x, w, c: w @ x, False),
    "batch": ("y = MatMul(x, w)", (2, 4, 3), (2, 5, 4), lambda x, w, c: x @ w, True),
    "batch_left": ("y = MatMul(w, x)", (2, 3, 4), (4, 5), lambda x, w, c: w @ x, False),
    "transposed": (
        "v = Transpose<perm = [1, 0]>(w) y = MatMul(x, v)",
        (3, 4),
        (2, 5, 4),
        lambda x, w, c: x @ w.T,
        False,
    ),
    "transposed_left": (
        "v = Transpose(w) y = MatMul(v, x)",
        (4, 3),
        (2, 4, 5),
        lambda x, w, c: w.T @ x,
        True,
    ),
    "transposed_batch": (
        "v = Transpose<perm = [0, 2, 1]>(w) y = MatMul(x, v)",
        (2, 3, 4),
        (2, 5, 4),
        lambda x, w, c: x @ w.mT,
        False,
    ),
    "identity": ("v = Identity(w) y = MatMul(x, v)", (4, 3), (5, 4), lambda x, w, c: x @ w, True),
    "transposed_twice": (
        "v = Transpose(w) u = Transpose(v) y = Gemm(x, u)",
        (4, 3),
        (5, 4),
        lambda x, w, c: x @ w,
        True,
    ),
    "square": ("y = MatMul(x, w)", (2, 2), (2, 2), lambda x, w, c: x @ w, True),
    "square_left": ("y = Gemm(w, x)", (2, 2), (2, 2), lambda x, w, c: w @ x, False),
    "empty": ("y = MatMul(x, w)", (4, 3), (0, 4), lambda x, w, c: x @ w, True),
}
for ta in (0, 1):
    for tb in (0, 1):
        flags = f"transA = {ta}, transB = {tb}"
        MATRICES[f"gemm_{ta}{tb}"] = (
            f"y = Gemm<{flags}, alpha = 0.5, beta = 3.0>(x, w, c)",
            (3, 4) if tb else (4, 3),
            (4, 5) if ta else (5, 4),
            lambda x, w, c, ta=ta, tb=tb: 0.5 * (x.T if ta else x) @ (w.T if tb else w) + 3 * c,
            not tb,
        )
        MATRICES[f"gemm_left_{ta}{tb}"] = (
            f"y = Gemm<{flags}, alpha = 1.5>(w, x)",
            (4, 5) if ta else (5, 4),
            (3, 4) if tb else (4, 3),
            lambda x, w, c, ta=ta, tb=tb: 1.5 * (w.T if ta else w) @ (x.T if tb else x),
            bool(ta),
        )


@pytest.mark.parametrize("case", MATRICES)
@pytest.mark.parametrize("opset", [10, 18])
def test_matrices(case: str, opset: int) -> None:
    """Forward, gradients and the merged model against W + s A B in PyTorch."""
    nodes, shape, x_shape, function, input_first = MATRICES[case]
    if opset == 10 and "Gemm" in nodes and ", c)" not in nodes:
        # The third input is required.
        nodes = f"{nodes[:-1]}, zero)"
    c, x = normal(3), normal(*x_shape, seed=2)
    weights = {"w": normal(*shape), "c": c, "zero": np.zeros(1)}
    dims = ", ".join("abc"[: len(x_shape)])
    model = model_of(nodes, weights, f"T[{dims}]", opset)
    adapted = add_lora(model, "w", rank=2, alpha=3)
    check(adapted)
    np.testing.assert_array_equal(run(adapted, {"x": x}), run(model, {"x": x}))

    after = trained(adapted)
    values = tensors(after)
    a, b = (torch.tensor(values[f"w.lora_{k}"], requires_grad=True) for k in "AB")
    delta = a @ b if input_first else b @ a
    tx = torch.tensor(x, requires_grad=True)
    expected = function(tx, torch.tensor(values["w"]) + 3 / 2 * delta, torch.tensor(c))
    dy = normal(*expected.shape, seed=5)
    assert_close(run(after, {"x": x}), expected.detach().numpy(), 1e-13)
    if x.size:
        expected_gradients = torch.autograd.grad(expected, [a, b, tx], torch.tensor(dy))
        actual = gradients(after, {"x": x}, [*lora_parameters(after), "x"], dy)
        for mine, theirs in zip(actual, expected_gradients, strict=True):
            assert_close(mine, theirs.numpy(), 1e-12)
    merged = merge_lora(after)
    assert merged.graph.node == model.graph.node
    assert_close(run(merged, {"x": x}), expected.detach().numpy(), 1e-13)
    # Without training, merging changes nothing at all.
    restored = merge_lora(adapted)
    assert restored.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("bias", [False, True])
def test_linear_as_in_torch(bias: bool) -> None:
    """A Gemm as PyTorch exports a linear layer, beside two further linear layers."""
    dense, down, up = (
        torch.nn.Linear(6, 5, bias, dtype=TORCH),
        torch.nn.Linear(6, 3, False, dtype=TORCH),
        torch.nn.Linear(3, 5, False, dtype=TORCH),
    )
    weights = {"fc.weight": dense.weight.detach().numpy()}
    if bias:
        weights["fc.bias"] = dense.bias.detach().numpy()
    node = helper.make_node("Gemm", ["x", *weights], ["y"], transB=1)
    model = model_of("", weights)
    model.graph.node.append(node)
    adapted = add_lora(model, "fc.*", rank=3, alpha=7.5)
    for tensor in adapted.graph.initializer:
        layer = {"fc.weight.lora_A": down, "fc.weight.lora_B": up}.get(tensor.name)
        if layer is not None:
            # The layout is that of PyTorch.
            tensor.CopyFrom(numpy_helper.from_array(layer.weight.detach().numpy(), tensor.name))
    x = normal(4, 6)
    expected = dense(torch.tensor(x)) + 2.5 * up(down(torch.tensor(x)))
    assert_close(run(adapted, {"x": x}), expected.detach().numpy(), 1e-13)
    dy = normal(4, 5, seed=1)
    wanted = torch.autograd.grad(expected, [down.weight, up.weight], torch.tensor(dy))
    for mine, theirs in zip(gradients(adapted, {"x": x}, lora_parameters(adapted), dy), wanted, strict=True):
        assert_close(mine, theirs.numpy(), 1e-12)


# Weight, spatial shape, attributes of the node, arguments of PyTorch.
CONVOLUTIONS = {
    "plain": ((6, 4, 3, 3), (7, 8), "", {}),
    "geometry": (
        (6, 4, 3, 2),
        (9, 8),
        "pads = [1, 2, 1, 2], strides = [2, 1], dilations = [1, 2], kernel_shape = [3, 2]",
        {"padding": (1, 2), "stride": (2, 1), "dilation": (1, 2)},
    ),
    "groups": ((6, 2, 3, 3), (7, 8), "group = 2, pads = [1, 1, 1, 1]", {"groups": 2, "padding": 1}),
    "depthwise": ((8, 1, 3, 3), (7, 8), "group = 4", {"groups": 4}),
    "pointwise": ((6, 4, 1, 1), (3, 3), "", {}),
    "one": ((6, 4, 3), (7,), "strides = [2]", {"stride": 2}),
    "three": ((4, 2, 2, 2, 2), (4, 3, 4), "group = 2", {"groups": 2}),
    "same": ((6, 4, 3, 3), (7, 8), 'auto_pad = "SAME_UPPER"', {"padding": "same"}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions(case: str, bias: bool) -> None:
    """Against two further convolutions in PyTorch, in double precision, which onnxruntime does not have."""
    shape, size, attributes, arguments = CONVOLUTIONS[case]
    groups = int(arguments.get("groups", 1))
    weights = {"w": normal(*shape)} | ({"b": normal(shape[0])} if bias else {})
    dims = ", ".join("abcde"[: len(shape)])
    node = f"y = Conv{f'<{attributes}>' if attributes else ''}({', '.join(['x', *weights])})"
    model = model_of(node, weights, f"T[{dims}]", dtype=np.float32)
    x = normal(2, shape[1] * groups, *size).astype(np.float32)
    adapted = add_lora(model, ["w"], rank=2, alpha=1)
    check(adapted)
    np.testing.assert_array_equal(run(adapted, {"x": x}), run(model, {"x": x}))
    values = tensors(adapted)
    assert values["w.lora_A"].shape == (2 * groups, *shape[1:])
    assert values["w.lora_B"].shape == (shape[0], 2, *(1 for _ in size))

    after = trained(adapted)
    values = tensors(after)
    tw, tb, tx = (torch.tensor(v, dtype=TORCH) for v in (values["w"], values.get("b", 0), x))
    a, b = (torch.tensor(values[f"w.lora_{k}"], dtype=TORCH, requires_grad=True) for k in "AB")
    conv = getattr(functional, f"conv{len(size)}d")
    base = conv(tx, tw, tb if bias else None, **arguments)
    expected = base + conv(conv(tx, a, **arguments), b, groups=groups) / 2
    assert_close(run(after, {"x": x}), expected.detach().float().numpy(), 2e-6)
    dy = normal(*expected.shape, seed=4).astype(np.float32)
    wanted = torch.autograd.grad(expected, [a, b], torch.tensor(dy, dtype=TORCH))
    for mine, theirs in zip(gradients(after, {"x": x}, lora_parameters(after), dy), wanted, strict=True):
        assert_close(mine, theirs.float().numpy(), 2e-6)
    merged = merge_lora(after)
    assert merged.graph.node == model.graph.node
    assert_close(run(merged, {"x": x}), expected.detach().float().numpy(), 2e-6)
    assert merge_lora(adapted).SerializeToString() == model.SerializeToString()


def test_shared_by_nodes_of_several_kinds() -> None:
    """One adapter, whose shapes follow the first node; merged, the weight is what all of them read."""
    nodes = "p = MatMul(x, w) q = Gemm<transB = 1>(p, w) v = Transpose(w) r = MatMul(v, q) y = Add(p, r)"
    w, x = normal(4, 4), normal(4, 4, seed=3)
    model = model_of(nodes, {"w": w})
    # A power of 2 as the scale: onnxruntime fuses Mul and MatMul, and rounds the factor to single precision.
    after = trained(add_lora(model, "w", rank=4))
    assert lora_parameters(after) == ["w.lora_A", "w.lora_B"]
    values = tensors(after)
    a, b = (torch.tensor(values[f"w.lora_{k}"], requires_grad=True) for k in "AB")
    total = torch.tensor(w) + 4 * a @ b
    p = torch.tensor(x) @ total
    expected = p + total.T @ (p @ total.T)
    assert_close(run(after, {"x": x}), expected.detach().numpy(), 1e-12)
    dy = normal(4, 4, seed=9)
    wanted = torch.autograd.grad(expected, [a, b], torch.tensor(dy))
    for mine, theirs in zip(gradients(after, {"x": x}, lora_parameters(after), dy), wanted, strict=True):
        assert_close(mine, theirs.numpy(), 1e-12)
    merged = merge_lora(after)
    assert merged.graph.node == model.graph.node
    assert_close(run(merged, {"x": x}), expected.detach().numpy(), 1e-12)


def test_other_readers_keep_the_weight() -> None:
    """An embedding that shares its weight with the last layer is not adapted, nor changed by merging."""
    nodes = "e = Gather(w, i) s = Add(x, e) v = Transpose(w) y = MatMul(s, v)"
    model = model_of(nodes, {"w": normal(6, 4), "i": np.array([5, 1])})
    x = normal(2, 4)
    after = trained(add_lora(model, "w"))
    merged = merge_lora(after)
    assert_close(run(merged, {"x": x}), run(after, {"x": x}), 1e-12)
    assert [node.op_type for node in merged.graph.node] == ["Gather", "Add", "MatMul"]
    np.testing.assert_array_equal(tensors(merged)["w"], tensors(model)["w"])
    assert set(tensors(merged)) == {"w", "i", "v.merged"}


def branches(inside: bool) -> onnx.ModelProto:
    """If with a product in both branches; with `inside`, the second branch has a weight of its own."""
    own = "<double[4, 3] u = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>" if inside else ""
    text = f"""<ir_version: 8, opset_import: ["": 18]> g (double[a, 4] x, bool c) => (double[a, b] y) {{
        z = If(c) <
            then_branch = one () => (double[a, b] p) {{ p = MatMul(x, w) }},
            else_branch = two () => (double[a, b] q) {own} {{
                k = MatMul(x, w) h = MatMul(x, {"u" if inside else "w"}) q = Add(k, h) }}
        >
        m = MatMul(x, w) y = Add(z, m) }}"""
    model: onnx.ModelProto = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(normal(4, 3), "w"))
    for tensor in model.graph.node[0].attribute[1].g.initializer:
        # As bytes, which is how weights are written.
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor), tensor.name))
    return model


@pytest.mark.parametrize("inside", [False, True])
def test_subgraphs(inside: bool) -> None:
    model = branches(inside)
    adapted = add_lora(model, "[uw]", rank=2)
    assert len(lora_parameters(adapted)) == (4 if inside else 2)
    assert merge_lora(adapted).SerializeToString() == model.SerializeToString()
    after = trained(adapted)
    merged = merge_lora(after)
    x = normal(5, 4)
    for c in (False, True):
        feeds = {"x": x, "c": np.array(c)}
        np.testing.assert_array_equal(run(adapted, feeds), run(model, feeds))
        values = tensors(after)
        w = values["w"] + 8 * values["w.lora_A"] @ values["w.lora_B"]
        u = w
        if inside:
            u = np.arange(1.0, 13).reshape(4, 3) + 8 * values["u.lora_A"] @ values["u.lora_B"]
        expected = x @ w + (x @ w if c else x @ w + x @ u)
        assert_close(run(after, feeds), expected, 1e-12)
        assert_close(run(merged, feeds), expected, 1e-12)
        dy = normal(5, 3, seed=8)
        a_grad, b_grad = gradients(after, feeds, ["w.lora_A", "w.lora_B"], dy)
        products = 2 if c or inside else 3
        assert_close(a_grad, 8 * products * x.T @ dy @ values["w.lora_B"].T, 1e-12)
        assert_close(b_grad, 8 * products * (x @ values["w.lora_A"]).T @ dy, 1e-12)


def test_constant_nodes() -> None:
    model = model_of("y = MatMul(x, w)", {})
    constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(normal(4, 3)))
    model.graph.node.insert(0, constant)
    after = trained(add_lora(model, "w"))
    x = normal(5, 4)
    merged = merge_lora(after)
    assert [node.op_type for node in merged.graph.node] == ["Constant", "MatMul"]
    assert not merged.graph.initializer
    assert_close(run(merged, {"x": x}), run(after, {"x": x}), 1e-12)


@pytest.mark.parametrize("seed", range(amount(40, 400)))
def test_random_graphs(seed: int) -> None:
    """Chains of products with weights that several of them share; some weights are adapted."""
    random = np.random.default_rng(seed)
    shapes = {f"layer{i}.weight": (4, 4) for i in range(3)} | {f"conv{i}.weight": (3, 3, 3) for i in range(2)}
    weights = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    nodes: list[onnx.NodeProto] = []
    # What the nodes compute, and whether the first node of a weight has it as [in, out].
    steps: list[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = []
    input_first: dict[str, bool] = {}
    last = "x"
    for i in range(int(random.integers(3, 8))):
        name, kind, flag = str(random.choice(list(weights))), int(random.integers(3)), int(random.integers(2))
        t, s, v, u = (f"{letter}{i}" for letter in "tsvu")
        if len(shapes[name]) == 3:
            nodes.append(helper.make_node("Conv", [last, name], [v], pads=[1, 1]))
            steps.append((name, lambda x, w: functional.conv1d(x, w, padding=1)))
            first = False
        elif kind == 0:
            nodes.append(helper.make_node("Transpose" if flag else "Identity", [name], [t]))
            nodes.append(helper.make_node("MatMul", [last, t], [v]))
            steps.append((name, (lambda x, w: x @ w.T) if flag else (lambda x, w: x @ w)))
            first = not flag
        elif kind == 1:
            nodes.append(helper.make_node("Transpose", [last], [t], perm=[0, 2, 1]))
            nodes.append(helper.make_node("MatMul", [name, t], [s]))
            nodes.append(helper.make_node("Transpose", [s], [v], perm=[0, 2, 1]))
            steps.append((name, lambda x, w: x @ w.T))
            first = False
        else:
            nodes.append(helper.make_node("Reshape", [last, "rows"], [t]))
            nodes.append(helper.make_node("Gemm", [t, name], [s], alpha=0.5, transB=flag))
            nodes.append(helper.make_node("Reshape", [s, "batch"], [v]))
            steps.append((name, (lambda x, w: x @ w.T / 2) if flag else (lambda x, w: x @ w / 2)))
            first = not flag
        input_first.setdefault(name, first)
        nodes.append(helper.make_node("Tanh", [v], [u]))
        last = u
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    constants = {"rows": np.array([-1, 4]), "batch": np.array([-1, 3, 4])}
    model = model_of("", weights | constants, "T[a, 3, 4]", dtype=np.float32)
    model.graph.node.extend(nodes)
    chosen = [name for name in input_first if random.integers(3)] or list(input_first)
    rank = int(random.integers(1, 5))
    adapted = add_lora(model, chosen, rank=rank, alpha=2.0, seed=seed)
    check(adapted)
    x = random.standard_normal((2, 3, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(adapted, {"x": x}), run(model, {"x": x}))
    assert merge_lora(adapted).SerializeToString() == model.SerializeToString()

    after = trained(adapted)
    values = tensors(after)
    names = lora_parameters(after)
    leaves = {name: torch.tensor(values[name], dtype=TORCH, requires_grad=True) for name in names}
    totals = {name: torch.tensor(values[name], dtype=TORCH) for name in weights}
    for name in chosen:
        a, b = leaves[f"{name}.lora_A"], leaves[f"{name}.lora_B"]
        if a.ndim == 3:
            delta = torch.einsum("or,rik->oik", b[..., 0], a)
        else:
            delta = a @ b if input_first[name] else b @ a
        totals[name] = totals[name] + 2 / rank * delta
    expected = torch.tensor(x, dtype=TORCH)
    for name, function in steps:
        expected = torch.tanh(function(expected, totals[name]))
    assert_close(run(after, {"x": x}), expected.detach().float().numpy(), 1e-4)
    merged = merge_lora(after)
    assert merged.graph.node == model.graph.node
    assert_close(run(merged, {"x": x}), expected.detach().float().numpy(), 1e-4)
    dy = random.standard_normal((2, 3, 4)).astype(np.float32)
    wanted = torch.autograd.grad(expected, list(leaves.values()), torch.tensor(dy, dtype=TORCH))
    for mine, theirs in zip(gradients(after, {"x": x}, names, dy), wanted, strict=True):
        assert_close(mine, theirs.float().numpy(), 1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float16, 5e-3)])
def test_other_types(dtype: type, tolerance: float) -> None:
    model = model_of(
        "p = MatMul(x, w) y = Gemm<transB = 1>(p, v)", {"w": normal(8, 6), "v": normal(5, 6)}, dtype=dtype
    )
    x = normal(3, 8).astype(dtype)
    adapted = add_lora(model, "*", rank=2, alpha=1)
    assert {value.dtype for value in tensors(adapted).values()} == {np.dtype(dtype)}
    np.testing.assert_array_equal(run(adapted, {"x": x}), run(model, {"x": x}))
    after = trained(adapted)
    assert_close(run(merge_lora(after), {"x": x}), run(after, {"x": x}), tolerance)
    assert merge_lora(adapted).SerializeToString() == model.SerializeToString()


def test_bfloat16() -> None:
    """Without a run: onnxruntime has no such kernels for every processor."""
    model = model_of("y = MatMul(x, w)", {"w": normal(4, 3)}, dtype=np.float32)
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(normal(4, 3).astype(kind), "w"))
    after = trained(add_lora(model, "w", rank=2, alpha=1))
    values = {name: value.astype(np.float64) for name, value in tensors(after).items()}
    expected = values["w"] + values["w.lora_A"] @ values["w.lora_B"] / 2
    np.testing.assert_array_equal(tensors(merge_lora(after))["w"], expected.astype(np.float32).astype(kind))


def test_converted_opset() -> None:
    """A Gemm of an old opset has a third input, also after a conversion."""
    model = model_of("y = Gemm(x, w, c)", {"w": normal(4, 3), "c": normal(3)}, opset=10)
    model.graph.output[0].type.tensor_type.shape.SetInParent()
    after = trained(add_lora(model, "w"))
    x = normal(2, 4)
    expected = run(after, {"x": x})
    after.opset_import[0].version = 18
    merged = merge_lora(after)
    assert merged.graph.node == model.graph.node
    assert_close(run(merged, {"x": x}), expected, 1e-12)


def test_cast_weight() -> None:
    """A weight that is stored in half precision and multiplied in single precision."""
    model = model_of("v = Cast<to = 1>(w) y = MatMul(x, v)", {}, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(normal(4, 3).astype(np.float16), "w"))
    adapted = add_lora(model, "w")
    assert tensors(adapted)["w.lora_A"].dtype == np.float32
    after, x = trained(adapted), normal(2, 4).astype(np.float32)
    merged = merge_lora(after)
    assert merged.graph.node == model.graph.node
    assert_close(run(merged, {"x": x}), run(after, {"x": x}), 2e-3)


def quantized(axis: str = "", extra: str = "") -> onnx.ModelProto:
    scale = np.float32([0.5, 0.25, 0.1]) if axis else np.float32(0.5)
    zero = np.int8([1, 0, -2]) if axis else np.int8(3)
    random = np.random.default_rng(0)
    model = model_of(
        f"d = DequantizeLinear{axis}(q, scale, zero) y = MatMul(x, d) {extra}", {}, dtype=np.float32
    )
    values = {"q": random.integers(-128, 128, (4, 3)).astype(np.int8), "scale": scale, "zero": zero}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in values.items())
    return model


@pytest.mark.parametrize("pattern", ["q", "d"])
@pytest.mark.parametrize("axis", ["", "<axis = 1>"])
def test_quantized(pattern: str, axis: str) -> None:
    """The adapter of a dequantized weight, by either name, with gradients and dequantized on request."""
    model = quantized(axis)
    x = normal(5, 4).astype(np.float32)
    adapted = add_lora(model, pattern, rank=2)
    assert lora_parameters(adapted) == ["q.lora_A", "q.lora_B"]
    np.testing.assert_array_equal(run(adapted, {"x": x}), run(model, {"x": x}))
    after = trained(adapted)
    values = tensors(after)
    a, b = (torch.tensor(values[f"q.lora_{k}"], requires_grad=True) for k in "AB")
    base = (values["q"].astype(np.float32) - values["zero"]) * values["scale"]
    expected = torch.tensor(x) @ (torch.tensor(base) + 8 * a @ b)
    assert_close(run(after, {"x": x}), expected.detach().numpy(), 1e-5)
    dy = normal(5, 3).astype(np.float32)
    wanted = torch.autograd.grad(expected, [a, b], torch.tensor(dy))
    for mine, theirs in zip(gradients(after, {"x": x}, lora_parameters(after), dy), wanted, strict=True):
        assert_close(mine, theirs.numpy(), 1e-5)
    with pytest.raises(ModelError, match=r"'q' is quantized.*dequantize=True"):
        merge_lora(after)
    merged = merge_lora(after, dequantize=True)
    assert [node.op_type for node in merged.graph.node] == ["MatMul"]
    assert list(tensors(merged)) == ["d.merged"]
    assert_close(run(merged, {"x": x}), expected.detach().numpy(), 1e-5)


def test_quantized_convolution() -> None:
    nodes = "d = DequantizeLinear<axis = 0>(q, scale) y = Conv<pads = [1, 1]>(x, d)"
    model = model_of(nodes, {}, "T[a, 3, b]", dtype=np.float32)
    random = np.random.default_rng(0)
    values = {"q": random.integers(-128, 128, (2, 3, 3)).astype(np.int8), "scale": np.float32([0.5, 0.1])}
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in values.items())
    x = normal(2, 3, 5).astype(np.float32)
    after = trained(add_lora(model, "q", rank=1))
    stored = tensors(after)
    weight = values["q"] * values["scale"][:, None, None]
    weight = weight + 16 * np.einsum("or,rik->oik", stored["q.lora_B"][..., 0], stored["q.lora_A"])
    expected = functional.conv1d(torch.tensor(x), torch.tensor(weight), padding=1).numpy()
    assert_close(run(after, {"x": x}), expected, 1e-5)
    merged = merge_lora(after, dequantize=True)
    assert [node.op_type for node in merged.graph.node] == ["Conv"]
    assert_close(run(merged, {"x": x}), expected, 1e-5)


def test_quantized_in_blocks() -> None:
    """Four bits, a scale for two rows, and the same weight behind two DequantizeLinear nodes."""
    nodes = """
        d = DequantizeLinear<axis = 0, block_size = 2>(q, scale)
        e = DequantizeLinear<axis = 0, block_size = 2>(q, scale)
        p = MatMul(x, d) t = Transpose(e) y = MatMul(p, t)"""
    model = model_of(nodes, {}, opset=21, ir_version=10, dtype=np.float32)
    levels = np.random.default_rng(0).integers(-8, 8, (4, 3))
    model.graph.initializer.append(helper.make_tensor("q", TensorProto.INT4, (4, 3), levels.reshape(-1)))
    scale = np.abs(normal(2, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(scale, "scale"))
    x = normal(5, 4).astype(np.float32)
    after = trained(add_lora(model, "q", rank=2))
    values = tensors(after)
    weight = levels * np.repeat(scale, 2, 0) + 8 * values["q.lora_A"] @ values["q.lora_B"]
    expected = (x @ weight @ weight.T).astype(np.float32)
    assert_close(run(after, {"x": x}), expected, 1e-5)
    merged = merge_lora(after, dequantize=True)
    assert [node.op_type for node in merged.graph.node] == ["MatMul", "MatMul"]
    assert_close(run(merged, {"x": x}), expected, 1e-5)


def test_absent_values_are_not_removed() -> None:
    """Names that are empty stand for no value."""
    model = quantized()
    del model.graph.node[0].input[2]
    model.graph.node[0].input.append("")
    model.graph.node.append(helper.make_node("Dropout", ["y"], ["z", ""]))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    after, x = trained(add_lora(model, "q")), normal(5, 4).astype(np.float32)
    merged = merge_lora(after, dequantize=True)
    assert [node.op_type for node in merged.graph.node] == ["MatMul", "Dropout"]
    assert_close(run(merged, {"x": x}), run(after, {"x": x}), 1e-5)


def test_computed_scale() -> None:
    model = quantized()
    model.graph.node.insert(0, helper.make_node("Relu", ["scale"], ["s"]))
    with pytest.raises(NameNotFoundError, match="read by DequantizeLinear"):
        model.graph.node[1].input[1] = "s"
        add_lora(model, "q")
    model.graph.node[0].op_type = "Identity"
    model.graph.node[1].input[1] = "s"
    after = trained(add_lora(model, "q"))
    with pytest.raises(ModelError, match="scale of the quantized weight 'q' is not a constant"):
        merge_lora(after, dequantize=True)


def test_quantized_weight_with_another_reader() -> None:
    model = quantized(extra="z = Relu(d)")
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    x = normal(5, 4).astype(np.float32)
    after = trained(add_lora(model, "d"))
    merged = merge_lora(after, dequantize=True)
    assert [node.op_type for node in merged.graph.node] == ["DequantizeLinear", "MatMul", "Relu"]
    assert_close(run(merged, {"x": x}), run(after, {"x": x}), 1e-5)


def test_four_bits() -> None:
    """MatMulNBits, as onnxruntime's quantizer for large language models writes it."""
    random = np.random.default_rng(0)
    k, n, size = 32, 6, 16
    model = model_of("", {}, dtype=np.float32)
    model.opset_import.add(domain="com.microsoft", version=1)
    attributes = {"K": k, "N": n, "bits": 4, "block_size": size}
    names = ["x", "w_Q4", "w_scales"]
    model.graph.node.append(
        helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **attributes)
    )
    packed = random.integers(0, 256, (n, k // size, size // 2)).astype(np.uint8)
    scales = random.standard_normal((n, k // size)).astype(np.float32)
    model.graph.initializer.extend(
        numpy_helper.from_array(v, name) for name, v in (("w_Q4", packed), ("w_scales", scales))
    )
    x = normal(3, k).astype(np.float32)
    adapted = add_lora(model, "w_Q4")
    np.testing.assert_array_equal(run(adapted, {"x": x}), run(model, {"x": x}))
    after = trained(adapted)
    values = tensors(after)
    levels = np.stack([packed & 15, packed >> 4], -1).reshape(n, k // size, size).astype(np.float64) - 8
    weight = (levels * scales[..., None]).reshape(n, k).T
    expected = x @ (weight + 2 * values["w_Q4.lora_A"].astype(np.float64) @ values["w_Q4.lora_B"])
    assert_close(run(after, {"x": x}), expected.astype(np.float32), 1e-5)
    dy = normal(3, n).astype(np.float32)
    a_grad, b_grad = gradients(after, {"x": x}, lora_parameters(after), dy)
    assert_close(a_grad, 2 * x.T @ dy @ values["w_Q4.lora_B"].T, 1e-5)
    assert_close(b_grad, 2 * (x @ values["w_Q4.lora_A"]).T @ dy, 1e-5)
    with pytest.raises(ModelError, match="quantized"):
        merge_lora(after)
    with pytest.raises(ModelError, match="cannot be dequantized"):
        merge_lora(after, dequantize=True)


def test_old_models() -> None:
    """In old files every initializer is an input, too, and Gemm has three inputs."""
    model = model_of("y = Gemm(x, w, c)", {"w": normal(4, 3), "c": normal(3)}, opset=9, ir_version=3)
    for name, dims in (("w", [4, 3]), ("c", [3])):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, dims))
    adapted = add_lora(model, "w")
    check(adapted)
    x = normal(5, 4)
    np.testing.assert_array_equal(run(adapted, {"x": x}), run(model, {"x": x}))
    assert_close(run(merge_lora(trained(adapted)), {"x": x}), run(trained(adapted), {"x": x}), 1e-12)
    assert merge_lora(adapted).SerializeToString() == model.SerializeToString()
    model.opset_import[0].version = 6
    with pytest.raises(ModelError, match="opset 6"):
        add_lora(model, "w")


def two_layers() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "encoder.0.weight"], ["p"]),
        helper.make_node("Relu", ["p"], ["r"]),
        helper.make_node("Gemm", ["r", "encoder.1.weight", "encoder.1.bias"], ["s"], transB=1),
        helper.make_node("MatMul", ["s", "head.weight"], ["y"]),
    ]
    weights = {
        "encoder.0.weight": normal(4, 6),
        "encoder.1.weight": normal(5, 6),
        "encoder.1.bias": normal(5),
        "head.weight": normal(5, 3),
    }
    model = model_of("", weights, dtype=np.float32)
    model.graph.node.extend(nodes)
    return model


def test_initial_values() -> None:
    """As PyTorch initializes linear layers; they depend on the seed and on the weight, not on the order."""
    model = two_layers()
    one = tensors(add_lora(model, ["encoder.*", "head.weight"], rank=400))
    other = tensors(add_lora(add_lora(model, "head.*", rank=400), "enc*", rank=400))
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])
    for name, inputs in (("encoder.0.weight", 4), ("encoder.1.weight", 6), ("head.weight", 5)):
        a, b = one[f"{name}.lora_A"], one[f"{name}.lora_B"]
        layer = torch.nn.Linear(inputs, 400)
        bound = layer.weight.abs().max().item()
        assert not b.any()
        assert abs(float(np.abs(a).max()) / bound - 1) < 0.02
        assert abs(float(a.std()) * np.sqrt(3) / bound - 1) < 0.05
        assert abs(float(a.mean())) < 0.05 * bound
    again = tensors(add_lora(model, "head.weight", rank=400, seed=1))
    assert not np.array_equal(again["head.weight.lora_A"], one["head.weight.lora_A"])


def test_added_in_two_steps() -> None:
    """With other ranks, and patterns that match the tensors of the first adapters."""
    model = two_layers()
    adapted = add_lora(add_lora(model, "head.weight", rank=2, alpha=1), "encoder.*", rank=3, alpha=9)
    record = json.loads(adapted.metadata_props[0].value)
    assert record["head.weight"] == {"rank": 2, "alpha": 1.0}
    assert record["encoder.1.weight"] == {"rank": 3, "alpha": 9.0}
    assert merge_lora(adapted).SerializeToString() == model.SerializeToString()
    with pytest.raises(ModelError, match=r"'encoder.0.weight' has an adapter already"):
        add_lora(adapted, "*")
    with pytest.raises(NameNotFoundError, match="matches no weight"):
        add_lora(adapted, "*.lora_A")


@pytest.mark.parametrize("form", ["proto", "bytes", "path", "state", "checkpoint"])
def test_files(tmp_path: Path, form: str) -> None:
    """Adapters from every source, into a model with and one without adapters."""
    model = two_layers()
    adapted = add_lora(model, ["encoder.*", "head.*"], rank=3, alpha=1.5)
    after = trained(adapted)
    values = tensors(after)
    path = tmp_path / "adapters.safetensors"
    if form in ("state", "checkpoint"):
        state = {"other": np.zeros(3), **values}
        save_lora(state if form == "state" else Checkpoint(trainable=state), path, model=adapted)
    else:
        onnx.save(after, tmp_path / "m.onnx")
        save_lora(
            {"proto": after, "bytes": after.SerializeToString(), "path": tmp_path / "m.onnx"}[form], path
        )
    assert load_lora(model, path).SerializeToString() == after.SerializeToString()
    assert load_lora(adapted, str(path)).SerializeToString() == after.SerializeToString()
    stored = ortgrad.training.checkpoint.load(path).trainable
    assert list(stored) == lora_parameters(adapted)
    for name, value in stored.items():
        np.testing.assert_array_equal(value, values[name])


def test_file_without_the_model(tmp_path: Path) -> None:
    model = two_layers()
    adapted = add_lora(model, "head.*")
    after = trained(adapted)
    save_lora(tensors(after), tmp_path / "a")
    assert load_lora(adapted, tmp_path / "a").SerializeToString() == after.SerializeToString()
    with pytest.raises(CheckpointError, match="neither rank nor alpha"):
        load_lora(model, tmp_path / "a")


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    model = two_layers()
    path = tmp_path / "a.safetensors"
    save_lora(add_lora(model, "head.*", rank=2), path)
    both = add_lora(model, ["head.*", "encoder.1.weight"], rank=2)
    with pytest.raises(CheckpointError, match=r"2 are missing, such as 'encoder.1.weight.lora_A'"):
        load_lora(both, path)
    with pytest.raises(CheckpointError, match=r"'head.weight.lora_A' is float32\[5, 2\] .* float32\[5, 3\]"):
        load_lora(add_lora(model, "head.*", rank=3), path)
    with pytest.raises(CheckpointError, match=r"alpha 16.0 in .* alpha 8.0 in the model"):
        load_lora(add_lora(model, "head.*", rank=2, alpha=8), path)
    save_lora(both, path)
    with pytest.raises(CheckpointError, match=r"2 are not in the model, such as 'encoder.1.weight.lora_A'"):
        load_lora(add_lora(model, "head.*", rank=2), path)
    other = two_layers()
    other.graph.initializer[3].name = other.graph.node[3].input[1] = "heads.weight"
    with pytest.raises(NameNotFoundError, match=r"'head.weight' of .* not in the model; did you mean 'heads"):
        load_lora(other, path)
    wide = two_layers()
    wide.graph.initializer[3].CopyFrom(numpy_helper.from_array(np.zeros((5, 4), np.float32), "head.weight"))
    with pytest.raises(CheckpointError, match=r"'head.weight.lora_B' is float32\[2, 3\] .* float32\[2, 4\]"):
        load_lora(wide, path)
    double = tensors(both)
    double["head.weight.lora_A"] = double["head.weight.lora_A"].astype(np.float64)
    with pytest.raises(CheckpointError, match=r"'head.weight.lora_A' is float64"):
        save_lora(double, path, model=both)


def without_checksum(data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]["ortgrad.checksum"], header["__metadata__"]["ortgrad.sha256"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def test_damaged_files(tmp_path: Path) -> None:
    model = two_layers()
    adapted = add_lora(model, "head.*", rank=2)
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointFileError, match=r"a.safetensors cannot be read"):
        load_lora(model, path)
    save_lora(adapted, path)
    data = path.read_bytes()
    for end in range(0, len(data), 7):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError, match="damaged"):
            load_lora(model, path)
    data = without_checksum(data)
    for old, new in (
        (b'rank\\": 2', b'rank\\": 0'),
        (b'rank\\": 2', b'rank\\":""'),
        (b'alpha\\": 16.0', b'alpha\\": -1.0'),
        (b'alpha\\": 16.0', b'alpha\\":  NaN'),
        (b"head.weight\\", b"heat.weight\\"),
    ):
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, new))
        with pytest.raises(CheckpointError, match="damaged"):
            load_lora(model, path)
    # A rank that the tensors do not have; no memory is allocated for it.
    path.write_bytes(data.replace(b'rank\\": 2, \\"alpha\\": 16.0', b'rank\\":9999999,\\"alpha\\":1'))
    with pytest.raises(CheckpointError, match=r"float32\[5, 2\] .* float32\[5, 9999999\]"):
        load_lora(model, path)
    ortgrad.training.checkpoint.save(Checkpoint(trainable={"w": np.zeros(3)}), path)
    with pytest.raises(CheckpointError, match="not a file of adapters: 'w'"):
        load_lora(model, path)
    with pytest.raises(CheckpointFileError, match="cannot be written"):
        save_lora(adapted, tmp_path / "missing" / "a")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_lora(model, tmp_path)


def test_patterns_without_a_match() -> None:
    model = two_layers()
    with pytest.raises(NameNotFoundError, match=r"'encoder.0.wieght' matches no.*'encoder.0.weight'"):
        add_lora(model, ["head.*", "encoder.0.wieght"])
    with pytest.raises(NameNotFoundError, match=r"'\*.bias' matches 'encoder.1.bias', which is read by Gemm"):
        add_lora(model, "*.bias")
    with pytest.raises(NameNotFoundError, match="patterns is empty"):
        add_lora(model, [])
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((2, 2), np.float32), "unused"))
    with pytest.raises(NameNotFoundError, match="'unused', which is read by no node"):
        add_lora(model, "unused")
    function = helper.make_function(
        "f", "Linear", ["x", "w"], ["y"], [helper.make_node("MatMul", ["x", "w"], ["y"])], model.opset_import
    )
    model.functions.append(function)
    model.opset_import.add(domain="f", version=1)
    model.graph.node[3].op_type, model.graph.node[3].domain = "Linear", "f"
    with pytest.raises(NameNotFoundError, match=r"'head.weight', which is read by Linear.*inline_local_fun"):
        add_lora(model, "head.*")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"rank": 0}, TrainingError),
        ({"rank": 2.0}, ArgumentTypeError),
        ({"rank": True}, ArgumentTypeError),
        ({"alpha": 0}, TrainingError),
        ({"alpha": float("nan")}, TrainingError),
        ({"alpha": 1e-60}, TrainingError),
        ({"alpha": 1e60}, TrainingError),
        ({"alpha": "1"}, ArgumentTypeError),
        ({"seed": -1}, TrainingError),
        ({"patterns": 3}, ArgumentTypeError),
        ({"patterns": [b"head"]}, ArgumentTypeError),
    ],
)
def test_wrong_arguments(arguments: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        add_lora(two_layers(), **{"patterns": "head.*", **arguments})


def test_weights_that_cannot_have_an_adapter() -> None:
    both = model_of("p = MatMul(w, v) y = MatMul(x, p)", {"w": normal(4, 4), "v": normal(4, 4)})
    with pytest.raises(ModelError, match="both inputs"):
        add_lora(both, "*")
    x = normal(2, 4)
    after = trained(add_lora(both, "v"))
    assert_close(run(merge_lora(after), {"x": x}), run(after, {"x": x}), 1e-12)
    with pytest.raises(ModelError, match="both inputs"):
        add_lora(add_lora(both, "v"), "w")
    squared = model_of("p = MatMul(w, w) y = MatMul(x, p)", {"w": normal(4, 4)})
    with pytest.raises(ModelError, match="both inputs"):
        add_lora(squared, "w")
    vector = model_of("y = MatMul(x, w)", {"w": normal(4)})
    with pytest.raises(NameNotFoundError, match="read by MatMul"):
        add_lora(vector, "w")
    batch = model_of("y = MatMul(x, w)", {"w": normal(2, 4, 3)}, "T[a]")
    with pytest.raises(ModelError, match="'x', which is a vector"):
        add_lora(batch, "w")
    unknown = model_of("z = Relu(x) y = MatMul(z, w)", {"w": normal(2, 4, 3)}, "T[a]")
    with pytest.raises(ModelError, match="'z', which has no known number of dimensions"):
        add_lora(unknown, "w")
    groups = model_of("p = Conv(x, w) y = Conv<group = 2>(p, w)", {"w": normal(4, 2, 1)}, "T[a, b, c]")
    with pytest.raises(ModelError, match="different types, groups"):
        add_lora(groups, "w")
    taken = model_of("p = MatMul(x, w) y = Add(p, c)", {"w": normal(4, 3), "c": normal(3)})
    taken.graph.initializer[1].name = taken.graph.node[1].input[1] = "w.lora_B"
    with pytest.raises(ModelError, match=r"has a value 'w.lora_B'"):
        add_lora(taken, "w")
    twice = branches(True)
    twice.graph.node[0].attribute[0].g.initializer.append(numpy_helper.from_array(normal(4, 3), "u"))
    with pytest.raises(ModelError, match="2 values of the model have the name 'u'"):
        add_lora(twice, "u")


def test_models_without_adapters(tmp_path: Path) -> None:
    model = two_layers()
    assert lora_parameters(model) == []
    with pytest.raises(ModelError, match="no adapters"):
        merge_lora(model)
    with pytest.raises(ModelError, match="no adapters"):
        save_lora(model, tmp_path / "a")
    with pytest.raises(TrainingError, match="no adapters"):
        save_lora({"w": np.zeros(3)}, tmp_path / "a")
    with pytest.raises(ArgumentTypeError, match="int"):
        save_lora(3, tmp_path / "a")
    with pytest.raises(ArgumentTypeError, match="model is for a state"):
        save_lora(model, tmp_path / "a", model=model)
    assert not list(tmp_path.iterdir())


def test_changed_adapters() -> None:
    """Adapters whose nodes somebody has changed are not merged."""
    adapted = trained(add_lora(two_layers(), "head.*"))
    node = next(node for node in adapted.graph.node if node.op_type == "Mul")
    node.op_type = "Div"
    with pytest.raises(ModelError, match=r"'head.weight.lora_A' and 'head.weight.lora_B' are not an adapter"):
        merge_lora(adapted)
    node.op_type = "Mul"
    adapted.graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None))
    with pytest.raises(ModelError, match=r"within the adapter of 'head.weight', is read elsewhere"):
        merge_lora(adapted)
    del adapted.graph.output[1]
    adapted.graph.node.append(helper.make_node("Relu", ["head.weight.lora_B"], ["unused"]))
    with pytest.raises(ModelError, match="read by a Relu node"):
        merge_lora(adapted)
    del adapted.graph.node[-1]
    scale = next(t for t in adapted.graph.initializer if t.name.endswith("scale"))
    scale.CopyFrom(numpy_helper.from_array(np.ones(8, np.float32), scale.name))
    with pytest.raises(ModelError, match=r"'head.weight.lora_scale' has the shape \[8\]"):
        merge_lora(adapted)
    # Without metadata, with types of all values, and another scale.
    del adapted.metadata_props[:]
    scale.CopyFrom(numpy_helper.from_array(np.float32(0.25), scale.name))
    inferred = onnx.shape_inference.infer_shapes(adapted)
    merged = merge_lora(inferred)
    x = normal(2, 4).astype(np.float32)
    assert_close(run(merged, {"x": x}), run(adapted, {"x": x}), 1e-5)
    assert not any("lora" in value.name for value in merged.graph.value_info)


def test_alpha_of_a_changed_scale(tmp_path: Path) -> None:
    adapted = add_lora(two_layers(), "head.*", rank=2)
    scale = next(t for t in adapted.graph.initializer if t.name.endswith("scale"))
    scale.CopyFrom(numpy_helper.from_array(np.float32(0.25), scale.name))
    save_lora(adapted, tmp_path / "a")
    loaded = load_lora(two_layers(), tmp_path / "a")
    assert tensors(loaded)["head.weight.lora_scale"] == 0.25


def test_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights stay in their file; only those that are merged are read."""
    model = two_layers()
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    small = add_lora(path, "head.*")
    assert not any(t.external_data for t in small.graph.initializer)
    monkeypatch.setattr(lora, "LARGE", 0)
    adapted = add_lora(path, "head.*")
    assert all(t.external_data for t in adapted.graph.initializer if "lora" not in t.name)
    onnx.save(trained(adapted), tmp_path / "adapted.onnx")
    save_lora(tmp_path / "adapted.onnx", tmp_path / "a")
    merged = merge_lora(tmp_path / "adapted.onnx")
    inside = [t.name for t in merged.graph.initializer if not t.external_data]
    assert inside == ["head.weight"]
    onnx.save(merged, tmp_path / "merged.onnx")
    x = normal(2, 4).astype(np.float32)
    results = [
        onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"]).run(None, {"x": x})[
            0
        ]
        for name in ("adapted.onnx", "merged.onnx")
    ]
    assert_close(results[1], results[0], 1e-5)
    (tmp_path / "m.data").unlink()
    assert lora_parameters(add_lora(path, "head.*")) == ["head.weight.lora_A", "head.weight.lora_B"]
    with pytest.raises(ModelError, match=r"cannot read the tensor 'head.weight'"):
        merge_lora(tmp_path / "adapted.onnx")


def test_inputs_are_not_changed(tmp_path: Path) -> None:
    model = two_layers()
    before = model.SerializeToString()
    adapted = add_lora(model, "head.*")
    assert model.SerializeToString() == before
    text = adapted.SerializeToString()
    save_lora(adapted, tmp_path / "a")
    load_lora(adapted, tmp_path / "a")
    merge_lora(adapted)
    assert adapted.SerializeToString() == text


def test_training(tmp_path: Path) -> None:
    """The losses of PyTorch; only the adapters change, and the merged model has the same outputs."""
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 4)).astype(np.float32)
    labels = (x @ random.standard_normal((4, 3))).argmax(1)
    adapted = add_lora(two_layers(), ["encoder.*", "head.*"], rank=2)
    names = lora_parameters(adapted)
    steps = [(x, labels)] * 30
    losses, state, _ = train(tmp_path, adapted, names, steps)
    values = {name: torch.tensor(value) for name, value in tensors(adapted).items()}
    leaves = {name: values[name].requires_grad_() for name in names}

    def forward(x: torch.Tensor) -> torch.Tensor:
        def product(x: torch.Tensor, name: str, turned: bool = False) -> torch.Tensor:
            w, a, b = (values[f"{name}.weight{suffix}"] for suffix in ("", ".lora_A", ".lora_B"))
            return x @ w.T + 8 * (x @ a.T) @ b.T if turned else x @ w + 8 * (x @ a) @ b

        hidden = product(torch.relu(product(x, "encoder.0")), "encoder.1", True) + values["encoder.1.bias"]
        return product(hidden, "head")

    np.testing.assert_allclose(losses, torch_losses(leaves, forward, steps), rtol=1e-3)
    assert losses[-1] < losses[0] / 5
    save_lora(state, tmp_path / "a.safetensors", model=adapted)
    loaded = load_lora(two_layers(), tmp_path / "a.safetensors")
    assert_close(run(merge_lora(loaded), {"x": x}), run(loaded, {"x": x}), 1e-5)
    for name in names:
        np.testing.assert_array_equal(tensors(loaded)[name], state.parameters[name].data)
