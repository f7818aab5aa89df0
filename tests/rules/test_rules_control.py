"""Gradients of If, Loop and Scan: what the subgraphs read from outside, states, scans, nesting."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import ortgrad

GENERATOR = np.random.default_rng(3)


def parse(text: str, opset: int = 21) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')
    onnx.checker.check_model(model)
    return model


def without_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, its subgraphs without any declared shape."""
    for node in model.graph.node:
        for attribute in node.attribute:
            for value in (*attribute.g.input, *attribute.g.output):
                if value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE:
                    value.type.tensor_type.ClearField("shape")
    return model


def random(*shape: int) -> np.ndarray:
    return GENERATOR.standard_normal(shape)


IF = """agraph (bool c, double[N,4] x, double[4] w, double[4] u) => (double[N,4] y, double[N,4] z) {
    h = Mul(x, x)
    y, z = If (c) <
        then_branch = t () => (double[N,4] a, double[N,4] a2) {
            q = Mul(h, w)
            a = Mul(q, x)
            a2 = Identity(x)
        },
        else_branch = e () => (double[N,4] b, double[N,4] b2) { b = Mul(x, h)  b2 = Mul(b, u) }
    >
}"""
NESTED_IF = """agraph (bool c, bool d, double[N,4] x, double[4] w) => (double[N,4] y) {
    y = If (c) <
        then_branch = t () => (double[N,4] a) {
            p = Mul(x, w)
            a = If (d) <
                then_branch = tt () => (double[N,4] aa) { aa = Mul(p, x) },
                else_branch = te () => (double[N,4] ab) { ab = Mul(p, p) }
            >
        },
        else_branch = e () => (double[N,4] b) { b = Mul(x, x) }
    >
}"""
LOOP = """agraph (int64 M, double[N,4] x, double[4] w) => (double[N,4] y, double[K,N,4] s) {
    y, s = Loop (M, , x) <
        body = b (int64 i, bool c, double[N,4] v) => (bool c2, double[N,4] v2, double[N,4] o) {
            c2 = Identity(c)
            p = Mul(v, w)
            v2 = Mul(p, v)
            o = Mul(v, p)
        }
    >
}"""
# The number of iterations depends on the data; whole-number state; the iteration's number is used.
WHILE = """agraph (int64 M, bool first, double[N] x, double[N] w) => (double[N] y, int64 k, double[K,N] s) {
    zero = Constant <value_int = 0> ()
    y, k, s = Loop (M, first, x, zero) <
        body = b (int64 i, bool c, double[N] v, int64 n) => (bool c2, double[N] v2, int64 n2, double[N] o) {
            one = Constant <value_int = 1> ()
            limit = Constant <value_int = 3> ()
            n2 = Add(n, one)
            c2 = Less(n2, limit)
            f = Cast <to = 11> (i)
            g = Cast <to = 11> (n2)
            t = Mul(v, w)
            p = Mul(t, g)
            v2 = Add(p, f)
            o = Mul(v2, v)
        }
    >
}"""
# States that are exchanged, that start constant, and that pass through.
STATES = """agraph (int64 M, double[N] x, double[N] w) => (double[N] y, double[N] z, double[N] r) {
    zero = Sub(x, x)
    start = Shape(x)
    blank = ConstantOfShape <value = double[1] {1.0}> (start)
    y, z, r, q = Loop (M, , x, w, blank, x) <
        body = b (int64 i, bool c, double[N] v, double[N] u, double[N] f, double[N] same)
            => (bool c2, double[N] v2, double[N] u2, double[N] f2, double[N] same2) {
            c2 = Identity(c)
            v2 = Identity(u)
            u2 = Mul(v, same)
            f2 = Mul(f, u)
            same2 = Identity(same)
        }
    >
}"""
# Only captured values, no state.
CAPTURES = """agraph (int64 M, double[N] x, double[N] w) => (double[K,N] s) {
    s = Loop (M, "") <
        body = b (int64 i, bool c) => (bool c2, double[N] o) {
            c2 = Identity(c)
            f = Cast <to = 11> (i)
            p = Mul(x, f)
            o = Mul(p, w)
        }
    >
}"""
NESTED_LOOP = """agraph (int64 M, int64 L, double[N] x, double[N] w) => (double[N] y) {
    y = Loop (M, , x) <
        body = b (int64 i, bool c, double[N] v) => (bool c2, double[N] v2) {
            c2 = Identity(c)
            h = Mul(v, w)
            v2 = Loop (L, , h) <
                body = bb (int64 i2, bool d, double[N] u) => (bool d2, double[N] u2) {
                    d2 = Identity(d)
                    t = Mul(u, w)
                    u2 = Add(t, v)
                }
            >
        }
    >
}"""
IF_IN_LOOP = """agraph (int64 M, double[N] x, double[N] w) => (double[N] y) {
    y = Loop (M, , x) <
        body = b (int64 i, bool c, double[N] v) => (bool c2, double[N] v2) {
            c2 = Identity(c)
            one = Constant <value_int = 1> ()
            odd = Equal(i, one)
            v2 = If (odd) <
                then_branch = t () => (double[N] a) { a = Mul(v, w) },
                else_branch = e () => (double[N] b1) { b1 = Mul(v, v) }
            >
        }
    >
}"""
SCAN = """agraph (double[4] x, double[T,4] xs, double[4] w) => (double[4] y, double[T,4] s) {
    y, s = Scan <
        num_scan_inputs = 1,
        body = b (double[4] v, double[4] e) => (double[4] v2, double[4] o) {
            p = Mul(v, w)
            v2 = Mul(p, e)
            o = Mul(v, e)
        }
    > (x, xs)
}"""
SCAN_AXES = """agraph (double[N] x, double[N,T] xs, double[T,N] zs)
    => (double[N] y, double[N,T] s, double[T,N] r) {
    y, s, r = Scan <
        num_scan_inputs = 2, scan_input_axes = [-1, 0], scan_input_directions = [1, 0],
        scan_output_axes = [1, 0], scan_output_directions = [0, 1],
        body = b (double[N] v, double[N] e, double[N] f) => (double[N] v2, double[N] o, double[N] q) {
            p = Mul(v, e)
            v2 = Add(p, f)
            o = Mul(v, f)
            q = Mul(v2, e)
        }
    > (x, xs, zs)
}"""
# The backward pass needs none of the scanned tensors.
SCAN_SUM = """agraph (double[N] x, double[T,N] xs) => (double[N] y) {
    y = Scan <
        num_scan_inputs = 1, body = b (double[N] v, double[N] e) => (double[N] v2) { v2 = Add(v, e) }
    > (x, xs)
}"""

x, w, u = random(3, 4), random(4), random(4)
CASES = {
    "if-then": (IF, {"c": np.array(True), "x": x, "w": w, "u": u}),
    "if-else": (IF, {"c": np.array(False), "x": x, "w": w, "u": u}),
    "nested-if-then": (NESTED_IF, {"c": np.array(True), "d": np.array(True), "x": x, "w": w}),
    "nested-if-else": (NESTED_IF, {"c": np.array(True), "d": np.array(False), "x": x, "w": w}),
    "loop-0": (LOOP, {"M": np.array(0), "x": x, "w": w}),
    "loop-1": (LOOP, {"M": np.array(1), "x": x, "w": w}),
    "loop-3": (LOOP, {"M": np.array(3), "x": x, "w": w}),
    "while": (WHILE, {"M": np.array(9), "first": np.array(True), "x": w, "w": u}),
    "while-trips": (WHILE, {"M": np.array(2), "first": np.array(True), "x": w, "w": u}),
    "while-never": (WHILE, {"M": np.array(9), "first": np.array(False), "x": w, "w": u}),
    "states": (STATES, {"M": np.array(3), "x": w, "w": u}),
    "states-0": (STATES, {"M": np.array(0), "x": w, "w": u}),
    "captures": (CAPTURES, {"M": np.array(3), "x": w, "w": u}),
    "nested-loop": (NESTED_LOOP, {"M": np.array(2), "L": np.array(3), "x": w, "w": u}),
    "nested-loop-0": (NESTED_LOOP, {"M": np.array(2), "L": np.array(0), "x": w, "w": u}),
    "if-in-loop": (IF_IN_LOOP, {"M": np.array(3), "x": w, "w": u}),
    "scan": (SCAN, {"x": w, "xs": random(3, 4), "w": u}),
    "scan-1": (SCAN, {"x": w, "xs": random(1, 4), "w": u}),
    "scan-axes": (SCAN_AXES, {"x": w, "xs": random(4, 3), "zs": random(3, 4)}),
    "scan-sum": (SCAN_SUM, {"x": w, "xs": random(3, 4)}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    text, feeds = CASES[name]
    model = parse(text)
    wrt = [key for key, array in feeds.items() if array.dtype.kind == "f"]
    ortgrad.check_gradients(model, feeds, wrt=wrt).raise_if_wrong()
    built = ortgrad.build_gradient_model(
        model, wrt=wrt, of=[o.name for o in model.graph.output if is_float(o)]
    )
    onnx.checker.check_model(built, full_check=True)


def is_float(value: onnx.ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE


@pytest.mark.parametrize("name", ["if-then", "loop-3", "states", "scan", "scan-axes"])
def test_gradients_when_the_subgraph_declares_no_shapes(name: str) -> None:
    text, feeds = CASES[name]
    ortgrad.check_gradients(without_shapes(parse(text)), feeds).raise_if_wrong()


@pytest.mark.parametrize("opset", [18, 19, 23, 24])
@pytest.mark.parametrize("name", ["if-else", "loop-3", "scan"])
def test_gradients_in_other_opsets(name: str, opset: int) -> None:
    text, feeds = CASES[name]
    ortgrad.check_gradients(parse(text, opset), feeds).raise_if_wrong()


@pytest.mark.parametrize(
    "name", ["if-then", "if-else", "loop-3", "while", "nested-loop", "scan", "scan-axes"]
)
def test_second_derivatives(name: str) -> None:
    text, feeds = CASES[name]
    model = parse(text)
    built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    seed = np.random.default_rng(1).standard_normal(feeds["x"].shape)
    wrt = ["x", "w"] if "w" in feeds else ["x", "xs"]
    ortgrad.check_gradients(built, {**feeds, "y_grad": seed}, wrt=wrt, of="x_grad").raise_if_wrong()


def test_only_what_is_needed_is_saved_and_computed() -> None:
    built = ortgrad.build_gradient_model(parse(SCAN_SUM), wrt="x", of="y")
    # The others compare the seed with its output.
    forward, backward = (node for node in built.graph.node if node.op_type == "Scan")
    assert len(forward.output) == 1
    assert len(backward.output) == 1
    again = ortgrad.build_gradient_model(parse(LOOP), wrt="x", of="y")
    loops = [node for node in again.graph.node if node.op_type == "Loop"]
    assert [len(loop.output) for loop in loops] == [3, 1]


def test_a_second_build_saves_nothing_twice() -> None:
    once = ortgrad.build_gradient_model(parse(LOOP), wrt="x", of="y")
    twice = ortgrad.build_gradient_model(once, wrt="w", of="y")
    assert len(next(n for n in twice.graph.node if n.op_type == "Loop").output) == 3


def test_gradients_flow_on_through_a_loop_without_shapes() -> None:
    """The nodes after a loop need the number of dimensions of its result."""
    model = parse(
        """agraph (int64 M, float[N,3] x, float[3,3] w) => (float loss) {
            y = Loop (M, , x) <
                body = b (int64 i, bool c, float[] v) => (bool c2, float[] v2) {
                    c2 = Identity(c)
                    m = MatMul(v, w)
                    v2 = Tanh(m)
                }
            >
            loss = ReduceMean <keepdims = 0> (y)
        }"""
    )
    body = model.graph.node[0].attribute[0].g
    for value in (body.input[2], body.output[1]):
        value.type.tensor_type.ClearField("shape")
    feeds = {"M": np.array(3), "x": random(2, 3).astype(np.float32), "w": random(3, 3).astype(np.float32)}
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    _, dx, dw = ortgrad.InferenceSession(built).run(None, feeds)
    tx, tw = (torch.tensor(feeds[name], requires_grad=True) for name in "xw")
    state = tx
    for _ in range(3):
        state = torch.tanh(state @ tw)
    state.mean().backward()
    np.testing.assert_allclose(dx, tx.grad.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dw, tw.grad.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernels", ["python", "onnx"])
def test_a_recurrent_cell_as_a_scan(kernels: str) -> None:
    model = parse(
        """agraph (float[B,4] h, float[T,B,3] xs, float[3,4] w, float[4,4] r) => (float[T,B,4] s) {
            y, s = Scan <
                num_scan_inputs = 1,
                body = b (float[B,4] v, float[B,3] e) => (float[B,4] v2, float[B,4] o) {
                    p = MatMul(e, w)
                    q = MatMul(v, r)
                    a = Add(p, q)
                    v2 = Relu(a)
                    o = Sigmoid(v2)
                }
            > (h, xs)
        }"""
    )
    shapes = {"h": (2, 4), "xs": (5, 2, 3), "w": (3, 4), "r": (4, 4)}
    feeds = {name: 0.5 * random(*shape).astype(np.float32) for name, shape in shapes.items()}
    seed = random(5, 2, 4).astype(np.float32)
    built = ortgrad.build_gradient_model(model, wrt=list(shapes))
    session = ortgrad.InferenceSession(built, kernels=kernels)
    actual = session.run([f"{name}_grad" for name in shapes], {**feeds, "s_grad": seed})
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in feeds.items()}
    state, outputs = tensors["h"], []
    for step in tensors["xs"]:
        state = torch.relu(step @ tensors["w"] + state @ tensors["r"])
        outputs.append(torch.sigmoid(state))
    torch.stack(outputs).backward(torch.tensor(seed))
    for name, grad in zip(shapes, actual, strict=True):
        np.testing.assert_allclose(grad, tensors[name].grad.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_random_numbers_in_a_subgraph_are_refused() -> None:
    model = parse(
        """agraph (bool c, float[N] x) => (float[N] y) {
            y = If (c) <
                then_branch = t () => (float[N] a) { r = RandomNormalLike(x)  a = Mul(x, r) },
                else_branch = e () => (float[N] b) { b = Identity(x) }
            >
        }"""
    )
    with pytest.raises(ortgrad.UnsupportedGradientError, match="random RandomNormalLike"):
        ortgrad.build_gradient_model(model, wrt="x")


def test_what_fails_inside_is_named() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "custom" : 1]>
        agraph (bool c, float[N] x) => (float[N] y) {
            y = If (c) <
                then_branch = t () => (float[N] a) { a = custom.Unknown(x) },
                else_branch = e () => (float[N] b) { b = Identity(x) }
            >
        }"""
    )
    with pytest.raises(ortgrad.UnsupportedGradientError, match=r"If .*in 't', Unknown node"):
        ortgrad.build_gradient_model(model, wrt="x")


SCAN_8 = """<ir_version: 3, opset_import: ["" : 8]>
agraph (float[B,2] x, float[B,T,2] xs) => (float[B,2] y, float[B,T,2] s) {
    y, s = Scan <
        num_scan_inputs = 1, directions = [1],
        body = b (float[2] v, float[2] e) => (float[2] v2, float[2] o) {
            p = Mul(v, e)
            v2 = Add(p, e)
            o = Mul(v2, v)
        }
    > ("", x, xs)
}"""


def test_scan_with_a_batch_axis_in_opset_8() -> None:
    model = onnx.parser.parse_model(SCAN_8)
    feeds = {"x": random(2, 2).astype(np.float32), "xs": random(2, 3, 2).astype(np.float32)}
    ortgrad.check_gradients(model, feeds, tolerance=1e-3).raise_if_wrong()
    built = ortgrad.build_gradient_model(model, wrt=["x", "xs"])
    found = ortgrad.InferenceSession(built).run(["y", "s"], {**feeds, "y_grad": feeds["x"]})
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for actual, expected in zip(found, plain.run(None, feeds), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_scan_with_lengths_in_opset_8_is_refused() -> None:
    model = onnx.parser.parse_model(
        SCAN_8.replace("(float[B,2] x,", "(int64[B] n, float[B,2] x,").replace('("", x', "(n, x")
    )
    with pytest.raises(ortgrad.ModelError, match="sequence_lens"):
        ortgrad.build_gradient_model(model, wrt="x")
