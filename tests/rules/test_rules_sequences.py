"""Gradients through sequences and optional values: every operator, known and computed positions, loops."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support.sessions import WAYS

import ortgrad

Arrays = Mapping[str, np.ndarray]


def parse(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def run(model: onnx.ModelProto, feeds: Arrays, way: str = "auto") -> dict[str, np.ndarray]:
    """All outputs by name."""
    if way in ("plain", "registered"):
        options = onnxruntime.SessionOptions()
        if way == "registered":
            ortgrad.register(options)
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    else:
        session = ortgrad.InferenceSession(model, kernels=way)
    known = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    results = session.run(names, {name: array for name, array in feeds.items() if name in known})
    return dict(zip(names, results, strict=True))


def differences(model: onnx.ModelProto, feeds: Arrays, seeds: Arrays, name: str) -> np.ndarray:
    """Central differences of the seeded outputs towards one input, element by element, in float64."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def value(array: np.ndarray) -> float:
        results = session.run(list(seeds), {**feeds, name: array})
        return float(sum((r * s).sum() for r, s in zip(results, seeds.values(), strict=True)))

    found = np.zeros_like(feeds[name])
    for place in np.ndindex(*found.shape):
        step = np.zeros_like(found)
        step[place] = 1e-5
        found[place] = (value(feeds[name] + step) - value(feeds[name] - step)) / 2e-5
    return found


def check(model: onnx.ModelProto, feeds: Arrays, way: str = "auto") -> onnx.ModelProto:
    """The gradients of all outputs towards all floating-point inputs are the differences."""
    wrt = [name for name, array in feeds.items() if array.dtype == np.float64]
    outputs = run(model, feeds, "plain")
    seeds = {name: random(*array.shape, seed=7) for name, array in outputs.items()}
    built = ortgrad.build_gradient_model(model, wrt=wrt, of=list(seeds))
    found = run(built, {**feeds, **{f"{name}_grad": seed for name, seed in seeds.items()}}, way)
    for name, array in outputs.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-14)
    if all(array.ndim == 0 for array in outputs.values()) and len(outputs) == 1:
        seeds = {name: np.ones(()) for name in seeds}
    for name in wrt:
        expected = differences(model, feeds, seeds, name)
        assert found[f"{name}_grad"].shape == expected.shape
        np.testing.assert_allclose(found[f"{name}_grad"], expected, rtol=1e-6, atol=1e-7, err_msg=name)
    return built


# Each has x of 5 x 3, w of 3 and positions p, q, which are read at run time.
NODES = {
    "construct-at": "s = SequenceConstruct(t, u, t) y = SequenceAt(s, p) z = SequenceAt(s, last)",
    "construct-at-known": "s = SequenceConstruct(t, u) a = SequenceAt(s, last)"
    " b = SequenceAt(s, one) y = Mul(a, b)",
    "at-twice": "s = SequenceConstruct(t, u) a = SequenceAt(s, p) b = SequenceAt(s, q) y = Mul(a, b)",
    "at-one-place": "s = SequenceConstruct(t, u) a = SequenceAt(s, p) b = SequenceAt(s, p) y = Add(a, b)",
    "summed": "s = SequenceConstruct(t, u) a = SequenceAt(s, p) b = SequenceAt(s, p) c = Add(a, b)"
    " i = SequenceInsert(s, t, p) j = Identity(s) k = SequenceInsert(j, t, p)"
    " d = ConcatFromSequence<axis = 0>(i) e = ConcatFromSequence<axis = 0>(k) z = Add(d, e) y = Mul(c, t)",
    "other-shapes": "s = SequenceConstruct(w, t) a = SequenceAt(s, p) b = SequenceAt(s, q) y = Mul(a, b)",
    "insert": "s = SequenceConstruct(t, u) i = SequenceInsert(s, t, p) a = SequenceAt(i, q) y = Mul(a, u)",
    "insert-end": "s = SequenceConstruct(t, u) i = SequenceInsert(s, t) y = ConcatFromSequence<axis = -1>(i)",
    "insert-negative": "s = SequenceConstruct(t, u) i = SequenceInsert(s, w, q)"
    " j = SequenceInsert(i, v, minus) y = SequenceAt(i, q) z = SequenceAt(j, p)",
    "insert-known": "s = SequenceConstruct(t, u) i = SequenceInsert(s, w, last)"
    " j = SequenceInsert(i, v, zero) y = SequenceAt(j, one) z = SequenceAt(j, two)",
    "erase": "s = SequenceConstruct(t, w, u) e = SequenceErase(s, p) y = SequenceAt(e, one)",
    "erase-end": "s = SequenceConstruct(t, w, u) e = SequenceErase(s) y = SequenceAt(e, p)",
    "erase-negative": "s = SequenceConstruct(t, w, u) e = SequenceErase(s, minus) y = SequenceAt(e, p)",
    "erase-known": "s = SequenceConstruct(t, w, u) e = SequenceErase(s, minus_two)"
    " f = SequenceErase(e) y = SequenceAt(f, zero) z = SequenceAt(e, one)",
    "empty": "o = SequenceEmpty<dtype = 11>() s = SequenceInsert(o, t) i = SequenceInsert(s, u)"
    " y = SequenceAt(i, p)",
    "length": "s = SequenceConstruct(t, u) n = SequenceLength(s) f = Cast<to = 11>(n) a = SequenceAt(s, p)"
    " y = Mul(a, f)",
    "identity": "s = SequenceConstruct(t, u) i = Identity(s) y = SequenceAt(i, p) z = SequenceAt(i, zero)",
    "split": "s = SplitToSequence<axis = 0>(x, two) y = SequenceAt(s, p) z = SequenceAt(s, two)",
    "split-ones": "s = SplitToSequence<axis = 1>(t) y = SequenceAt(s, p) z = SequenceAt(s, last)",
    "split-squeezed": "s = SplitToSequence<axis = -1, keepdims = 0>(t) y = SequenceAt(s, p)"
    " z = SequenceAt(s, one)",
    "split-torch": "s = SplitToSequence<axis = 0, keepdims = 0>(t, one) a = SequenceAt(s, p) y = Mul(a, w)",
    "split-sizes": "s = SplitToSequence<axis = 0>(t, sizes) y = SequenceAt(s, p) z = SequenceAt(s, zero)",
    "split-known-sizes": "s = SplitToSequence<axis = 0, keepdims = 0>(t, known) y = SequenceAt(s, minus_two)"
    " z = SequenceAt(s, zero)",
    "split-length": "s = SplitToSequence<axis = 0>(t) n = SequenceLength(s) f = Cast<to = 11>(n)"
    " y = Mul(t, f)",
    "concat": "s = SequenceConstruct(t, u) i = SequenceInsert(s, v, p) y = ConcatFromSequence<axis = 0>(i)",
    "concat-negative": "s = SequenceConstruct(t, u) i = SequenceInsert(s, t, p)"
    " y = ConcatFromSequence<axis = -1>(i)",
    "concat-known": "s = SequenceConstruct(t, u) y = ConcatFromSequence<axis = -2>(s)",
    "stack": "s = SequenceConstruct(t, u) i = SequenceInsert(s, t, p)"
    " y = ConcatFromSequence<axis = 1, new_axis = 1>(i)",
    "stack-known": "s = SequenceConstruct(t, u) y = ConcatFromSequence<axis = -1, new_axis = 1>(s)",
    "concat-split": "s = SplitToSequence<axis = 1>(t) y = ConcatFromSequence<axis = 1>(s)",
    "concat-split-elsewhere": "s = SplitToSequence<axis = 1>(t) y = ConcatFromSequence<axis = 0>(s)",
    "stack-split": "s = SplitToSequence<axis = 1, keepdims = 0>(t)"
    " y = ConcatFromSequence<axis = 0, new_axis = 1>(s)",
    "optional": "o = Optional(t) h = OptionalHasElement(o) i = OptionalGetElement(o)"
    " j = OptionalGetElement(i)"
    " f = Cast<to = 11>(h) y = Mul(j, f)",
    "optional-sequence": "s = SequenceConstruct(t, u) o = Optional(s) i = OptionalGetElement(o)"
    " y = SequenceAt(i, p)",
    "map": """s = SequenceConstruct(t, u, v) m = SequenceMap(s) <body = b (double[R, 3] e) => (double[R, 3] f)
        { g = Mul(e, w) f = Mul(g, e) }> y = SequenceAt(m, p) z = ConcatFromSequence<axis = 0>(m)""",
    "map-two": """s = SequenceConstruct(t, u) r = SequenceConstruct(u, x) m, k = SequenceMap(s, r, w) <
        body = b (double[R, 3] e, double[R, 3] d, double[3] c) => (double[R, 3] f, double[3] h)
        { g = Mul(e, c) f = Mul(g, d) h = Mul(c, c) }> y = SequenceAt(m, p) z = SequenceAt(k, one)""",
    "if": """s = SequenceConstruct(t, u) b = Less(p, q)
        r = If(b) <then_branch = yes () => (seq(double[Q, 3]) i) { i = SequenceInsert(s, t, p) },
        else_branch = no () => (seq(double[R, 3]) j) { j = SequenceErase(s, p) }> y = SequenceAt(r, zero)""",
    "if-reads": """s = SequenceConstruct(t, u) b = Less(p, q)
        y = If(b) <then_branch = yes () => (double[Q, 3] i) { i = SequenceAt(s, p) },
        else_branch = no () => (double[R, 3] j) { j = SequenceAt(s, zero) }>""",
    "append": """o = SequenceEmpty<dtype = 11>()
        r = Loop(three, , o) <body = b (int64 k, bool c, seq(double[5, 3]) a) => (bool d, seq(double[5, 3]) e)
        { d = Identity(c) f = Cast<to = 11>(k) g = Add(t, f) h = Mul(g, w) e = SequenceInsert(a, h) }>
        y = ConcatFromSequence<axis = 0>(r) z = SequenceAt(r, p)""",
    "other-shapes-in-a-loop": """s = SequenceConstruct(v)
        r = Loop(three, , s) <body = b (int64 k, bool c, seq(double[N, 3]) a) => (bool d, seq(double[M, 3]) e)
        { d = Identity(c) g = SequenceAt(a, last) h = Concat<axis = 0>(g, t) m = Mul(h, w)
          e = SequenceInsert(a, m) }>
        y = SequenceAt(r, last) z = SequenceAt(r, p)""",
    "read-in-a-loop": """s = SplitToSequence<axis = 0>(t, two)
        n = SequenceLength(s) r, y = Loop(n, , w) <
        body = b (int64 k, bool c, double[3] a) => (bool d, double[3] e, double[3] f)
        { d = Identity(c) g = SequenceAt(s, k) h = ReduceSum<keepdims = 0>(g, axes) e = Mul(a, h)
          f = Mul(h, h) }>
        z = Identity(r)""",
    "rows-in-a-loop": """s = SplitToSequence<axis = 0, keepdims = 0>(t, one) n = SequenceLength(s)
        o = SequenceEmpty<dtype = 11>()
        r, y = Loop(n, , o, w) <
        body = b (int64 k, bool c, seq(double[3]) l, double[3] a) => (bool d, seq(double[3]) m, double[3] e)
        { d = Identity(c) g = SequenceAt(s, k) h = Mul(g, a) e = Tanh(h) m = SequenceInsert(l, e) }>
        z = ConcatFromSequence<axis = 0, new_axis = 1>(r)""",
    "queue": """s = SequenceConstruct(t, u, x) y, r = Loop(three, , w, s) <
        body = b (int64 k, bool c, double[N, 3] v0, seq(double[5, 3]) l)
            => (bool d, double[N, 3] e, seq(double[5, 3]) m)
        { d = Identity(c) g = SequenceAt(l, zero) e = Mul(v0, g) f = SequenceErase(l, zero) h = Mul(g, g)
          m = SequenceInsert(f, h) }>
        z = SequenceAt(r, p)""",
    "empty-then-rank": """o = SequenceEmpty<dtype = 11>() s = SequenceInsert(o, t)
        i = SequenceInsert(s, u, zero)
        a = SequenceAt(i, p) b = Transpose<perm = [1, 0]>(a) y = MatMul(a, b)""",
    "nested-loops": """o = SequenceEmpty<dtype = 11>() r = Loop(two, , o) <
        body = b (int64 k, bool c, seq(double[]) l) => (bool d, seq(double[]) m) {
            d = Identity(c) m = Loop(two, , l) <
            body = b2 (int64 k2, bool c2, seq(double[]) l2) => (bool d2, seq(double[]) m2) {
                d2 = Identity(c2) f = Cast<to = 11>(k2) g = Mul(t, f) h = Mul(g, w)
                m2 = SequenceInsert(l2, h, zero) }> }> y = ConcatFromSequence<axis = 0>(r)""",
    "while": """o = SequenceConstruct(w) yes = Less(zero, three) r, y = Loop(, yes, o, w) <
        body = b (int64 k, bool c, seq(double[]) l, double[3] a) => (bool d, seq(double[]) m, double[3] e)
        { n = SequenceLength(l) d = Less(n, three) g = SequenceAt(l, last) e = Mul(a, g) h = Tanh(e)
          m = SequenceInsert(l, h) }> z = ConcatFromSequence<axis = 0>(r)""",
    "exchanged": """s = SequenceConstruct(t) s2 = SequenceConstruct(u, x) r, r2 = Loop(three, , s, s2) <
        body = b (int64 k, bool c, seq(double[]) l, seq(double[]) l2)
            => (bool d, seq(double[]) m, seq(double[]) m2)
        { d = Identity(c) g = SequenceAt(l, zero) h = Mul(g, w) m = SequenceInsert(l2, h) m2 = Identity(l) }>
        y = ConcatFromSequence<axis = 0>(r) z = ConcatFromSequence<axis = 0>(r2)""",
    "if-in-a-loop": """s = SequenceConstruct(t, u, x) r = Loop(three, , s) <
        body = b (int64 k, bool c, seq(double[]) l) => (bool d, seq(double[]) m) {
            d = Identity(c) f = Less(k, one) m = If(f) <
            then_branch = a () => (seq(double[]) a1) { e = Mul(x, w) a1 = SequenceInsert(l, e, one) },
            else_branch = b1 () => (seq(double[]) b2) { b2 = SequenceErase(l, zero) }> }>
        y = SequenceAt(r, zero) z = SequenceAt(r, last)""",
}
HEAD = """g (double[N, 3] x, double[3] w, int64 p, int64 q, int64[K] sizes) => (double[] y{z})
    <int64 zero = {{0}}, int64 one = {{1}}, int64 two = {{2}}, int64 three = {{3}}, int64 last = {{-1}},
     int64 minus_two = {{-2}}, int64[3] known = {{1, 3, 1}}, int64[1] axes = {{0}}, int64[1] ones = {{1}}> {{
    t = Mul(x, x) u = Mul(t, w) v = Slice(t, axes, ones) minus = Neg(p) {nodes} }}"""


def model_of(name: str, *, fixed: bool = False) -> onnx.ModelProto:
    return model_with(NODES[name], fixed=fixed)


def model_with(nodes: str, *, fixed: bool = False) -> onnx.ModelProto:
    text = HEAD.format(nodes=nodes, z=", double[] z" if re.search(r"\bz =", nodes) else "")
    return parse(text.replace("double[N, 3] x", "double[5, 3] x") if fixed else text)


FEEDS = {
    "x": random(5, 3),
    "w": random(3, seed=1),
    "p": np.array(1),
    "q": np.array(-1),
    "sizes": np.array([2, 0, 3]),
}


@pytest.mark.parametrize("name", NODES)
def test_gradients_are_the_differences(name: str) -> None:
    check(model_of(name), FEEDS)
    check(model_of(name, fixed=True), {**FEEDS, "p": np.array(0), "q": np.array(1)})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["at-twice", "split-sizes", "concat", "map", "if", "append", "queue"])
def test_every_way_to_run(name: str, way: str) -> None:
    check(model_of(name), FEEDS, way)


@pytest.mark.parametrize("name", NODES)
def test_second_derivatives(name: str) -> None:
    model = model_of(name)
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"], of="y")
    seed = random(*run(model, FEEDS)["y"].shape, seed=3)
    feeds = {**FEEDS, "y_grad": seed}
    ortgrad.check_gradients(built, feeds, wrt=["x", "w", "y_grad"], of="x_grad").raise_if_wrong()


def test_a_sequence_of_no_elements() -> None:
    check(model_of("read-in-a-loop"), {**FEEDS, "x": np.zeros((0, 3))})


def test_wrt_and_of_are_no_sequences() -> None:
    model = parse(
        """g (double[N] x, seq(double[N]) q, int64 p) => (seq(double[N]) s, double[N] y)
        { a = SequenceAt(q, p) b = Mul(a, x) s = SequenceConstruct(b, x) y = SequenceAt(s, p) }"""
    )
    for name in ("q", "s"):
        with pytest.raises(
            ortgrad.ModelError, match=f"wrt='{name}' is a sequence; name tensors that are in it"
        ):
            ortgrad.build_gradient_model(model, wrt=name, of="y")
    with pytest.raises(ortgrad.ModelError, match=r"of='s' is a sequence; .*differentiate 'b'"):
        ortgrad.build_gradient_model(model, wrt="x", of="s")
    built = ortgrad.build_gradient_model(model, wrt="*")
    assert [value.name for value in built.graph.output] == ["s", "y", "x_grad"]
    feeds = {
        "x": random(3),
        "q": [random(3, seed=1), random(3, seed=2)],
        "p": np.array(0),
        "y_grad": np.ones(3),
    }
    np.testing.assert_allclose(run(built, feeds)["x_grad"], feeds["q"][0])


REFUSED = {
    "an optional value has a gradient only where": """b = Less(p, q) o = If(b) <
        then_branch = yes () => (optional(double[N, 3]) i) { i = Optional(t) },
        else_branch = no () => (optional(double[N, 3]) j) { j = Optional(u) }> y = OptionalGetElement(o)""",
    "keepdims=0 and a split that is not known to be a vector": """k = Sub(p, q)
        s = SplitToSequence<axis = 0, keepdims = 0>(t, k) y = SequenceAt(s, p)""",
    "reads from outside 's', which is not a tensor": """s = SequenceConstruct(t, u) y, z = Scan(w, t) <
        num_scan_inputs = 1, body = b (double[3] a, double[3] e) => (double[3] c, double[3] d)
        { f = SequenceAt(s, p) g = ReduceSum<keepdims = 0>(f, axes) c = Mul(a, g) d = Mul(g, e) }>""",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    with pytest.raises(ortgrad.UnsupportedGradientError, match=text):
        ortgrad.build_gradient_model(model_with(REFUSED[text]), wrt="x", of="y")


def test_known_elements_leave_no_sequence() -> None:
    """Where all positions are constants, nothing of the gradients goes through sequences or loops."""
    for name in ("construct-at-known", "erase-known", "insert-known", "split-known-sizes", "concat-known"):
        built = ortgrad.build_gradient_model(model_of(name), wrt="x", of="y")
        used = {node.op_type for node in built.graph.node}
        assert not [op_type for op_type in used if "Sequence" in op_type or op_type == "Loop"], name


def test_optional_content_decides_an_if() -> None:
    model = model_with(
        """i = Identity(t) e = OptionalHasElement() h = OptionalHasElement(i)
        y = If(h) <then_branch = a () => (double[N, 3] b) { b = Mul(i, w) },
        else_branch = c () => (double[N, 3] d) { d = Identity(x) }>
        z = If(e) <then_branch = f () => (double[N, 3] k) { k = Identity(x) },
        else_branch = l () => (double[N, 3] m) { m = Mul(t, t) }>"""
    )
    built = check(model, FEEDS)
    assert "If" not in {node.op_type for node in built.graph.node if node.name in ("y", "z")}


def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    state = torch.zeros_like(x[0])
    for row in torch.unbind(x):
        state = torch.tanh(row @ w + state)
        found.append(state)
    return torch.stack(found)


def pieces(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for piece in x.split(2):
        found += [piece * piece.sum()]
    return torch.cat(found) @ w + found[-1].sum()


EXPORTS = {
    "hstack": lambda x, w: torch.hstack([x, x * x]),
    "vstack": lambda x, w: torch.vstack([x @ w, x * x]),
    "atleast_2d": lambda x, w: torch.atleast_2d(x[0] * x[1], x)[0] @ w,
    "tensor_split": lambda x, w: sum(t.sum(0) * (i + 1) for i, t in enumerate(torch.tensor_split(x, 3))) * w,
    "chunk": lambda x, w: torch.chunk(x, 3)[1] @ w + torch.chunk(x, 3)[2],
    "unbind": lambda x, w: torch.unbind(x)[1] * torch.unbind(x)[-1] * w,
    "embedding_bag": lambda x, w: torch.nn.functional.embedding_bag(torch.tensor([[0, 2], [1, 1]]), x) @ w,
    "rows": rows,
    "pieces": pieces,
}
SCRIPTED = ("rows", "pieces")


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.function(x, w)


@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_of_pytorch(name: str, dynamic: bool) -> None:
    x, w = (
        torch.tensor(random(*shape), dtype=torch.float32, requires_grad=True) for shape in ((5, 3), (3, 3))
    )
    function = torch.jit.script(EXPORTS[name]) if name in SCRIPTED else EXPORTS[name]
    buffer = io.BytesIO()
    axes = {"x": {0: "N"}} if dynamic else {}
    torch.onnx.export(
        Module(function), (x, w), buffer, dynamo=False, opset_version=17,
        input_names=["x", "w"], output_names=["y"], dynamic_axes=axes,
    )  # fmt: skip
    model = onnx.load_from_string(buffer.getvalue())
    y = EXPORTS[name](x, w)
    seed = random(*y.shape, seed=4).astype(np.float32)
    expected = torch.autograd.grad(y, [x, w], torch.tensor(seed), allow_unused=True)
    wrt = [n for n, grad in zip("xw", expected, strict=True) if grad is not None]
    built = ortgrad.build_gradient_model(model, wrt=wrt, of="y")
    for way in WAYS:
        found = run(built, {"x": x.detach().numpy(), "w": w.detach().numpy(), "y_grad": seed}, way)
        for n, grad in zip("xw", expected, strict=True):
            if grad is not None:
                np.testing.assert_allclose(found[f"{n}_grad"], grad.numpy(), rtol=1e-4, atol=1e-5)
