"""Loops whose states change their shape, are never read, or are passed on unchanged.

PyTorch runs the same steps one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.sessions import WAYS
from torch import Tensor

import ortgrad

# (x, w, p, number of iterations) to the outputs
Steps = Callable[[Tensor, Tensor, Tensor, int], list[Tensor]]


def parse(outputs: str, nodes: str, opset: int = 21) -> onnx.ModelProto:
    """A model of x [2, 3], w [3, 3], p [1] and n, whose outputs declare no shapes."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {opset}]>
        g (int64 n, double[N, 3] x, double[3, 3] w, double[1] p) => ({outputs})
        <int64 zero = {{0}}, int64 one = {{1}}, int64[1] first = {{0}}, int64[1] second = {{1}},
         int64[1] most = {{1000}}, bool yes = {{1}}, bool[1] surely = {{1}}> {{ {nodes} }}"""
    )
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return model


def unread(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y, h = p, x
    for _ in range(n):
        h = h @ w
        y = h[:, None] * h[:, None]
    return [y, h]


UNREAD = """y, h = Loop (n, yes, p, x) <
    body = b (int64 i, bool c, double[A, 1, 3] q, double[M, 3] s)
        => (bool c2, double[A2, 1, 3] q2, double[M2, 3] s2) {
        c2 = Identity(c)
        s2 = MatMul(s, w)
        u = Unsqueeze(s2, second)
        q2 = Mul(u, u)
    }
>"""
# As Paddle writes it: the number of the iteration is a vector, and so is the condition.
VECTORS = """y, h = Loop (n, surely, p, x) <
    body = b (int64[1] i, bool[1] c, double[A, 1, 3] q, double[M, 3] s)
        => (bool[1] c2, double[A2, 1, 3] q2, double[M2, 3] s2) {
        c2 = Identity(c)
        k = Shape(i)
        f = Cast <to = 11> (k)
        t = MatMul(s, w)
        s2 = Mul(t, f)
        u = Unsqueeze(s2, second)
        q2 = Mul(u, u)
    }
>"""


def only_its_size_is_read(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y, h = p, x
    for _ in range(n):
        h = h @ w * y.numel()
        y = torch.cat([h, h])
    return [y, h]


SIZE = """y, h = Loop (n, yes, p, x) <
    body = b (int64 i, bool c, double q, double s) => (bool c2, double q2, double s2) {
        c2 = Identity(c)
        k = Size(q)
        f = Cast <to = 11> (k)
        t = MatMul(s, w)
        s2 = Mul(t, f)
        q2 = Concat <axis = 0> (s2, s2)
    }
>"""


def added(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y = p
    for _ in range(n):
        y = y + x @ w
    return [y]


ADDED = """y = Loop (n, yes, p) <
    body = b (int64 i, bool c, double q) => (bool c2, double q2) {
        c2 = Identity(c)
        t = MatMul(x, w)
        q2 = Add(q, t)
    }
>"""


def growing(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y, sums = x, []
    for _ in range(n):
        y = torch.cat([torch.tanh(y @ w), x])
        sums.append((y * y).sum())
    return [y, torch.stack(sums) if sums else torch.zeros(0, dtype=x.dtype)]


GROWING = """y, z = Loop (n, yes, x) <
    body = b (int64 i, bool c, double[M, 3] s) => (bool c2, double[M2, 3] s2, double z) {
        c2 = Identity(c)
        t = MatMul(s, w)
        u = Tanh(t)
        s2 = Concat <axis = 0> (u, x)
        z = ReduceSumSquare <keepdims = 0> (s2)
    }
>"""


def cached(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    q, keys = x, x[:0]
    for _ in range(n):
        keys = torch.cat([keys, q @ w])
        q = torch.softmax(q @ keys.T, -1) @ keys
    return [q, keys]


# As a decoder with a cache of keys.
CACHED = """none = Slice (x, first, first)
y, z = Loop (n, yes, x, none) <
    body = b (int64 i, bool c, double[M, 3] q, double[K, 3] k)
        => (bool c2, double[M2, 3] q2, double[K2, 3] k2) {
        c2 = Identity(c)
        t = MatMul(q, w)
        k2 = Concat <axis = 0> (k, t)
        turned = Transpose (k2)
        scores = MatMul(q, turned)
        a = Softmax(scores)
        q2 = MatMul(a, k2)
    }
>"""


def more_axes(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y = x
    for _ in range(n):
        y = (y * y * p)[None]
    return [y]


AXES = """y = Loop (n, yes, x) <
    body = b (int64 i, bool c, double s) => (bool c2, double s2) {
        c2 = Identity(c)
        t = Mul(s, s)
        u = Mul(t, p)
        s2 = Unsqueeze(u, first)
    }
>"""


def shrinking(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y = w @ w
    for _ in range(n):
        y = (y * y)[1:]
    return [y]


SHRINKING = """ww = MatMul(w, w)
y = Loop (n, yes, ww) <
    body = b (int64 i, bool c, double[A, 3] s) => (bool c2, double[A2, 3] s2) {
        c2 = Identity(c)
        t = Mul(s, s)
        s2 = Slice(t, second, most)
    }
>"""


def chosen(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y = p
    for i in range(n):
        y = (x if i == 0 else y * y) * w[0]
    return [y]


# A placeholder that is read, but not in the first iteration.
CHOSEN = """y = Loop (n, yes, p) <
    body = b (int64 i, bool c, double s) => (bool c2, double s2) {
        c2 = Identity(c)
        begin = Equal(i, zero)
        v = If (begin) <
            then_branch = t () => (double a) { a = Identity(x) },
            else_branch = e () => (double d) { d = Mul(s, s) }
        >
        row = Gather(w, zero)
        s2 = Mul(v, row)
    }
>"""


def delayed(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    old, new, h = p, p, x
    for _ in range(n):
        h = h @ w
        old, new = new, h[None] * h
    return [old, new]


DELAYED = """y, z, h = Loop (n, yes, p, p, x) <
    body = b (int64 i, bool c, double a, double d, double s) => (bool c2, double a2, double d2, double s2) {
        c2 = Identity(c)
        a2 = Identity(d)
        s2 = MatMul(s, w)
        u = Unsqueeze(s2, first)
        d2 = Mul(u, s2)
    }
>"""


def growing_inside(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y, z = x, p
    for _ in range(n):
        rows = y[:1]
        for _ in range(n):
            rows = torch.cat([torch.tanh(rows @ w), y])
        z = rows
        y = torch.cat([rows.mean(0, keepdim=True), y])
    return [y, z]


NESTED = """y, z = Loop (n, yes, x, p) <
    body = b (int64 i, bool c, double[A, 3] s, double[B, 3] q)
        => (bool c2, double[A2, 3] s2, double[B2, 3] q2) {
        c2 = Identity(c)
        r = Slice(s, first, second)
        q2 = Loop (n, yes, r) <
            body = bb (int64 i2, bool d, double[E, 3] v) => (bool d2, double[E2, 3] v2) {
                d2 = Identity(d)
                t = MatMul(v, w)
                u = Tanh(t)
                v2 = Concat <axis = 0> (u, s)
            }
        >
        m = ReduceMean <keepdims = 1> (q2, first)
        s2 = Concat <axis = 0> (m, s)
    }
>"""


def numbers(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y, places = x, [0]
    for i in range(n):
        y = (w[places] * y[:1]).sum(0, keepdim=True)
        places = [*places, i]
    return [y]


# A state of whole numbers grows.
NUMBERS = """y, k = Loop (n, yes, x, first) <
    body = b (int64 i, bool c, double[A, 3] s, int64[B] k) => (bool c2, double[A2, 3] s2, int64[B2] k2) {
        c2 = Identity(c)
        rows = Gather(w, k)
        r = Slice(s, first, second)
        t = Mul(rows, r)
        s2 = ReduceSum <keepdims = 1> (t, first)
        j = Unsqueeze(i, first)
        k2 = Concat <axis = 0> (k, j)
    }
>"""


def unchanged(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y = x
    for _ in range(n):
        y = torch.tanh(y @ w + p * w[0])
    return [y, w, w, p]


# Weights as states: straight through, as a copy of a copy, and captured besides.
UNCHANGED = """y, z, z2, r = Loop (n, yes, x, w, w, p) <
    body = b (int64 i, bool c, double[M, 3] s, double[3, 3] v, double[3, 3] v2, double[1] q)
        => (bool c2, double[M2, 3] s2, double[3, 3] v, double[3, 3] v4, double[1] q2) {
        c2 = Identity(c)
        v3 = Identity(v2)
        v4 = Identity(v3)
        q2 = Identity(q)
        t = MatMul(s, v)
        row = Gather(v2, zero)
        u = Mul(q, row)
        a = Add(t, u)
        s2 = Tanh(a)
    }
>"""


def unchanged_inside(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y = x
    for _ in range(n):
        for _ in range(n):
            y = torch.tanh(y @ w)
        y = y * p
    return [y, w, p]


# Unchanged by a loop inside, and by both branches of an If.
UNCHANGED_INSIDE = """y, z, r = Loop (n, yes, x, w, p) <
    body = b (int64 i, bool c, double[M, 3] s, double[3, 3] v, double[1] q)
        => (bool c2, double[M2, 3] s2, double[3, 3] v2, double[1] q2) {
        c2 = Identity(c)
        t, v2 = Loop (n, yes, s, v) <
            body = bb (int64 i2, bool d, double[B, 3] a, double[3, 3] f)
                => (bool d2, double[B2, 3] a2, double[3, 3] f2) {
                d2 = Identity(d)
                k = MatMul(a, f)
                a2 = Tanh(k)
                f2 = Identity(f)
            }
        >
        s2 = Mul(t, q)
        q2 = If (c) <
            then_branch = th () => (double[1] g) { g = Identity(q) },
            else_branch = el () => (double[1] e) { e = Identity(q) }
        >
    }
>"""


def scanned(x: Tensor, w: Tensor, p: Tensor, n: int) -> list[Tensor]:
    y, z = x[0], x[0]
    for row in w:
        y, z = torch.tanh(y @ w * row * p), row * row
    return [y, w, z, p]


# States of a Scan: changed, unchanged, never read, and unchanged without a declared shape.
SCANNED = """row = Gather(x, zero)
y, v, z, r = Scan <
    num_scan_inputs = 1,
    body = b (double[3] s, double[3, 3] f, double[3] q, double[1] h, double[3] e)
        => (double[3] s2, double[3, 3] f2, double[3] q2, double[1] h2) {
        f2 = Identity(f)
        h2 = Identity(h)
        q2 = Mul(e, e)
        t = MatMul(s, f)
        u = Mul(t, e)
        k = Mul(u, h)
        s2 = Tanh(k)
    }
> (row, w, row, p, w)"""

CASES: dict[str, tuple[str, str, Steps]] = {
    "unread": ("double y, double h", UNREAD, unread),
    "vectors": ("double y, double h", VECTORS, unread),
    "size": ("double y, double h", SIZE, only_its_size_is_read),
    "added": ("double y", ADDED, added),
    "growing": ("double y, double z", GROWING, growing),
    "cached": ("double y, double z", CACHED, cached),
    "axes": ("double y", AXES, more_axes),
    "shrinking": ("double y", SHRINKING, shrinking),
    "chosen": ("double y", CHOSEN, chosen),
    "delayed": ("double y, double z", DELAYED, delayed),
    "nested": ("double y, double z", NESTED, growing_inside),
    "numbers": ("double y", NUMBERS, numbers),
    "unchanged": ("double y, double z, double z2, double r", UNCHANGED, unchanged),
    "unchanged-inside": ("double y, double z, double r", UNCHANGED_INSIDE, unchanged_inside),
    "scanned": ("double y, double v, double z, double r", SCANNED, scanned),
}


def model_of(name: str) -> onnx.ModelProto:
    outputs, nodes, _ = CASES[name]
    model = parse(outputs, nodes)
    for node in model.graph.node:
        if node.op_type == "Loop":
            for attribute in node.attribute:
                _forget_scalars(attribute.g)
    return model


def _forget_scalars(graph: onnx.GraphProto) -> None:
    """Values without brackets have any shape here, except for the iteration's number and the condition."""
    for value in (*graph.input, *graph.output):
        tensor = value.type.tensor_type
        if tensor.elem_type == onnx.TensorProto.DOUBLE and not tensor.shape.dim:
            tensor.ClearField("shape")
    for node in graph.node:
        for attribute in node.attribute:
            _forget_scalars(attribute.g)


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def session_of(model: onnx.ModelProto, way: str, optimized: bool) -> onnxruntime.InferenceSession:
    options = quiet()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if way == "registered":
        ortgrad.register(options)
    if way in ("plain", "registered"):
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    return ortgrad.InferenceSession(model, options, kernels=way)


def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    return {"x": generator.random((2, 3)), "w": generator.standard_normal((3, 3)), "p": generator.random(1)}


@pytest.mark.parametrize("wrt", [["x"], ["w"], ["x", "w", "p"]], ids=["x", "w", "all"])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, wrt: list[str]) -> None:
    model, steps, given = model_of(name), CASES[name][2], arrays()
    names = [value.name for value in model.graph.output]
    built = ortgrad.build_gradient_model(model, wrt=wrt, of=names)
    wanted = [*names, *(f"{name}_grad" for name in wrt)]
    sessions = {
        (way, optimized): session_of(built, way, optimized)
        for way, optimized in itertools.product(WAYS, (True, False))
        if len(wrt) > 1 or (optimized and way in ("auto", "plain"))
    }
    for n in (0, 1, 3):
        tensors = {key: torch.tensor(array, requires_grad=True) for key, array in given.items()}
        outputs = steps(*tensors.values(), n)
        generator = np.random.default_rng(n)
        seeds = [generator.standard_normal(tuple(output.shape)) for output in outputs]
        total = sum(((y * torch.tensor(seed)).sum() for y, seed in zip(outputs, seeds, strict=True)))
        assert isinstance(total, Tensor)
        grads = torch.autograd.grad(total, [tensors[key] for key in wrt], allow_unused=True)
        expected = [*(output.detach().numpy() for output in outputs)]
        for key, grad in zip(wrt, grads, strict=True):
            expected.append(np.zeros_like(given[key]) if grad is None else grad.numpy())
        feeds = {**given, "n": np.array(n), **{f"{k}_grad": s for k, s in zip(names, seeds, strict=True)}}
        feeds = {value.name: feeds[value.name] for value in built.graph.input if value.name in feeds}
        for way, session in sessions.items():
            for key, actual, right in zip(wanted, session.run(wanted, feeds), expected, strict=True):
                assert actual.shape == right.shape, (way, n, key)
                np.testing.assert_allclose(actual, right, rtol=1e-9, atol=1e-9, err_msg=f"{way} {n} {key}")


def elements_of_loops(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> int:
    """How many numbers all loops of a model put out, which is what stays in memory from one to the next."""
    names = [name for node in model.graph.node if node.op_type == "Loop" for name in node.output if name]
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), quiet(), providers=["CPUExecutionProvider"]
    )
    found = session.run(names, feeds)
    return sum(array.size for item in found for array in (item if isinstance(item, list) else [item]))


@pytest.mark.parametrize("shapes", [True, False], ids=["proven", "unproven"])
@pytest.mark.parametrize("name", ["unchanged", "unchanged-inside"])
def test_memory_does_not_grow_by_the_weights_with_every_iteration(name: str, shapes: bool) -> None:
    size = 30
    outputs, nodes, _ = CASES[name]
    if not shapes:
        # Inference does not follow a shape through Abs.
        behind = "l = Shape(r1)  k1 = Abs(l)  s2 = Reshape(r1, k1)"
        nodes = nodes.replace("s2 = Tanh(a)", f"r1 = Tanh(a)  {behind}")
        nodes = nodes.replace("s2 = Mul(t, q)", f"r1 = Mul(t, q)  {behind}")
    model = parse(outputs, nodes.replace("3]", f"{size}]"))
    for value, shape in zip(model.graph.input[1:3], ([2, size], [size, size]), strict=True):
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.DOUBLE, shape))
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"], of="y")
    feeds = {
        "x": np.ones((2, size)),
        "w": np.ones((size, size)),
        "p": np.ones(1),
        "y_grad": np.ones((2, size)),
    }
    # A state that is not known to keep its shape takes one more loop.
    assert [node.op_type for node in built.graph.node].count("Loop") == (2 if shapes else 3)
    few, many = (elements_of_loops(built, {**feeds, "n": np.array(n)}) for n in (2, 12))
    # The activations, and the number of the iteration.
    assert 0 < many - few <= 10 * (2 * size + 1)


# The backward graphs of the last four keep states in sequences.
@pytest.mark.parametrize(
    "name",
    ["size", "added", "unchanged", "unchanged-inside", "scanned", "growing", "cached", "chosen", "numbers"],
)
def test_second_derivatives(name: str) -> None:
    built = ortgrad.build_gradient_model(model_of(name), wrt=["x"], of="y")
    given, n = arrays(), 2
    tensors = {key: torch.tensor(array, requires_grad=True) for key, array in given.items()}
    y = CASES[name][2](*tensors.values(), n)[0]
    seed = np.random.default_rng(1).standard_normal(tuple(y.shape))
    feeds = {**given, "n": np.array(n), "y_grad": seed}
    (first,) = torch.autograd.grad((y * torch.tensor(seed)).sum(), [tensors["x"]], create_graph=True)
    outer = np.random.default_rng(2).standard_normal((2, 3))
    wrt = ["x", "w", "p"]
    grads = torch.autograd.grad(
        (first * torch.tensor(outer)).sum(), [tensors[key] for key in wrt], allow_unused=True
    )
    twice = ortgrad.build_gradient_model(built, wrt=wrt, of="x_grad")
    # Of two gradients of x, the second one has a number.
    (inner,) = [i.name for i in twice.graph.input if i.name.startswith("x_grad")]
    feeds[inner] = outer
    feeds = {value.name: feeds[value.name] for value in twice.graph.input if value.name in feeds}
    found = ortgrad.InferenceSession(twice, quiet()).run(None, feeds)[-len(wrt) :]
    for key, actual, grad in zip(wrt, found, grads, strict=True):
        right = np.zeros_like(given[key]) if grad is None else grad.numpy()
        np.testing.assert_allclose(actual, right, rtol=1e-9, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_a_built_model_is_differentiated_towards_something_else(name: str) -> None:
    model = model_of(name)
    given = {**arrays(), "n": np.array(2)}
    tensors = [torch.tensor(given[key]) for key in ("x", "w", "p")]
    given["y_grad"] = np.ones(tuple(CASES[name][2](*tensors, 2)[0].shape))
    once = ortgrad.build_gradient_model(model, wrt=["w"], of="y")
    results = []
    for source in (model, once):
        built = ortgrad.build_gradient_model(source, wrt=["x"], of="y")
        seeds = [value.name for value in built.graph.input if value.name.startswith("y_grad")]
        feeds = {**given, **dict.fromkeys(seeds, given["y_grad"])}
        feeds = {value.name: feeds[value.name] for value in built.graph.input if value.name in feeds}
        results.append(ortgrad.InferenceSession(built, quiet()).run(["x_grad"], feeds)[0])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-12)


LISTS = {
    "put together": """l, h = Loop (n, yes, none, x) <
        body = b (int64 i, bool c, seq(double[M, 3]) q, double[M, 3] s)
            => (bool c2, seq(double[M, 3]) q2, double[M, 3] s2)
        { c2 = Identity(c)  s2 = MatMul(s, w)  q2 = SequenceInsert(q, s2) }
    >
    y = ConcatFromSequence <axis = 0> (l)""",
    "read": """l, y = Loop (n, yes, some, x) <
        body = b (int64 i, bool c, seq(double[M, 3]) q, double[M, 3] s)
            => (bool c2, seq(double[M, 3]) q2, double[M, 3] s2)
        { c2 = Identity(c)  t = SequenceAt(q, i)  s2 = MatMul(t, w)  q2 = SequenceInsert(q, s2) }
    >""",
    "beside": """l, y = Loop (n, yes, none, x) <
        body = b (int64 i, bool c, seq(double[M, 3]) q, double[M, 3] s)
            => (bool c2, seq(double[M, 3]) q2, double[M, 3] s2)
        { c2 = Identity(c)  s2 = MatMul(s, w)  q2 = SequenceInsert(q, s2) }
    >""",
}


@pytest.mark.parametrize("wrt", ["x", "w"])
@pytest.mark.parametrize("name", LISTS)
def test_lists_as_states(name: str, wrt: str) -> None:
    start = "none = SequenceEmpty <dtype = 11> ()  some = SequenceConstruct(x) "
    model = parse("double y", start + LISTS[name])
    built = ortgrad.build_gradient_model(model, wrt=wrt, of="y")
    given = arrays()
    x, w, _ = (torch.tensor(array, requires_grad=True) for array in given.values())
    states = [x @ w, x @ w @ w, x @ w @ w @ w]
    y = torch.cat(states) if name == "put together" else states[-1]
    seed = np.random.default_rng(3).standard_normal(tuple(y.shape))
    y.backward(torch.tensor(seed))
    feeds = {**given, "n": np.array(3), "y_grad": seed}
    feeds = {value.name: feeds[value.name] for value in built.graph.input if value.name in feeds}
    found = ortgrad.InferenceSession(built, quiet()).run([f"{wrt}_grad"], feeds)[0]
    right = {"x": x, "w": w}[wrt].grad
    assert right is not None
    np.testing.assert_allclose(found, right.numpy(), rtol=1e-9)
