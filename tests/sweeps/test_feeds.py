"""Ranks that a model does not tell: proven by what reads them, or seen in a run on `feeds`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.rule_cases import CASES, Case
from support.sessions import without_ranks

import ortgrad
from ortgrad.cli import main
from ortgrad.graph.serialization import read
from ortgrad.pipelines.explain import explain
from ortgrad.shapes.inference import infer_types
from ortgrad.shapes.required_ranks import _relations

Arrays = dict[str, np.ndarray]


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def parse(text: str, opset: int = 21, **initializers: np.ndarray) -> onnx.ModelProto:
    head = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    model = onnx.parser.parse_model(f"{head} {text}")
    model.graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in initializers.items())
    for value in (*model.graph.input, *model.graph.output):
        # In the text, a tensor without dimensions stands for one of unknown rank.
        if not value.type.tensor_type.shape.dim and value.name in ("x", "y", "k"):
            value.type.tensor_type.ClearField("shape")
    return model


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(0.2, 1.0, shape)


@dataclass(frozen=True)
class Rule:
    """A node that reads t, of the given shape; `k` is a second operand of unknown rank."""

    node: str
    shape: tuple[int, ...]
    expected: Callable[..., torch.Tensor]
    k: tuple[int, ...] = (1,)
    opset: int = 21
    proven: bool = True  # whether the gradient is found without feeds


def _grid_sample(t: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.grid_sample(t, k, align_corners=False)


def _tensor_scatter(t: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.cat([k, t[:, k.shape[1] :]], 1)


def _attention(t: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(t, k, k)


def _resize(t: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2, -1)


RULES = {
    "MatMul": Rule("MatMul(t, k)", (2, 3, 4), torch.matmul, (4, 5)),
    "MatMul of stacks": Rule("MatMul(t, k)", (3, 4), torch.matmul, (2, 2, 4, 5)),
    "MatMul broadcasting": Rule("MatMul(t, k)", (2, 1, 3, 4), torch.matmul, (3, 4, 2)),
    "MatMul with a vector": Rule("MatMul(t, k)", (2, 3, 4), torch.matmul, (4,)),
    "MatMul of a vector": Rule("MatMul(t, k)", (4,), torch.matmul, (2, 4, 3)),
    "MatMul of vectors": Rule("MatMul(t, k)", (4,), torch.matmul, (4,)),
    "Gemm": Rule("Gemm<alpha = 0.5>(t, k)", (3, 4), lambda t, k: 0.5 * t @ k, (4, 2)),
    "Gemm of a transpose": Rule("Gemm<transA = 1, transB = 1>(t, k)", (3, 4), lambda t, k: t.T @ k.T, (2, 3)),
    "Tile": Rule("Tile(t, times)", (2, 3), lambda t, k: t.repeat(2, 3)),
    "Einsum": Rule('Einsum<equation = "bij,kj->bik">(t, k)', (2, 3, 4), lambda t, k: t @ k.T, (5, 4)),
    "Det": Rule("Det(t)", (2, 3, 3), lambda t, k: torch.linalg.det(t)),
    "LayerNormalization": Rule(
        "LayerNormalization(t, k)",
        (2, 3, 4),
        lambda t, k: torch.nn.functional.layer_norm(t, (4,), k),
        (4,),
    ),
    "LayerNormalization from the front": Rule(
        "LayerNormalization<axis = 1>(t, k)",
        (2, 3, 4),
        lambda t, k: torch.nn.functional.layer_norm(t, (3, 4), k),
        (3, 4),
    ),
    "BatchNormalization": Rule(
        "BatchNormalization(t, k, threes, threes, threes)",
        (2, 3, 4, 5),
        lambda t, k: torch.nn.functional.batch_norm(t, torch.ones(3), torch.ones(3), k, torch.ones(3)),
        (3,),
    ),
    "InstanceNormalization": Rule(
        "InstanceNormalization(t, k, threes)",
        (2, 3, 4, 5),
        lambda t, k: torch.nn.functional.instance_norm(t, weight=k, bias=torch.ones(3)),
        (3,),
    ),
    "Transpose": Rule("Transpose<perm = [1, 2, 0]>(t)", (2, 3, 4), lambda t, k: t.permute(1, 2, 0)),
    "MaxPool": Rule(
        "MaxPool<kernel_shape = [2, 2]>(t)",
        (1, 2, 4, 5),
        lambda t, k: torch.nn.functional.max_pool2d(t, 2, 1),
    ),
    "Conv": Rule(
        "Conv(t, kernel)",
        (1, 2, 4, 5),
        lambda t, k: torch.nn.functional.conv2d(t, torch.full((3, 2, 2, 2), 0.5)),
    ),
    "Resize": Rule('Resize<mode = "nearest">(t, , scales)', (1, 2, 3, 4), _resize, proven=False),
    "GridSample": Rule("GridSample(t, k)", (1, 2, 4, 3), _grid_sample, (1, 2, 3, 2), proven=False),
    "TensorScatter": Rule(
        "TensorScatter<axis = 1>(t, k)", (2, 5, 4), _tensor_scatter, (2, 2, 4), opset=24, proven=False
    ),
    "Attention": Rule("Attention(t, k, k)", (1, 2, 3, 4), _attention, (1, 2, 5, 4), opset=24, proven=False),
}
CONSTANTS = "float[3] threes = {1, 1, 1}, int64 one = {1}, bool yes = {1}, int64[1] front = {0}"

# How t comes to have an unknown rank: the type of x, the nodes, and whether x is a vector of all elements.
SOURCES = {
    "no declared shape": ("float", "t = Identity(x)", False),
    "computed shape": ("float[N]", "t = Reshape(x, shape)", True),
    "unknown operator": ("float", "t = com.microsoft.Gelu(x)", False),
    "loop": (
        "float[N]",
        """t = Loop(one, yes, x) <body = b (int64 i, bool c, float s) => (bool d, float s2)
            { d = Identity(c) s2 = Reshape(s, shape) }>""",
        True,
    ),
    "sequence": (
        "float[N]",
        """r = Reshape(x, shape) u = Unsqueeze(r, front) q = SequenceConstruct(u, r)
        t = SequenceAt(q, position)""",
        True,
    ),
    "if": (
        "float[N]",
        """r = Reshape(x, shape)
        t = If (flag) <then_branch = a () => (float a1) { a1 = Identity(r) },
            else_branch = b () => (float b1) { b1 = Unsqueeze(r, front) }>""",
        True,
    ),
}


def make(source: str, rule: Rule) -> tuple[onnx.ModelProto, Arrays]:
    type_, nodes, flat = SOURCES[source]
    inputs = f"{type_} x, float k, int64[M] shape, int64 position, bool flag, int64[R] times, float[Q] scales"
    kernel = np.full((3, 2, 2, 2), 0.5, np.float32)
    model = parse(
        f"g ({inputs}) => (float y) <{CONSTANTS}> {{ {nodes} y = {rule.node} }}", rule.opset, kernel=kernel
    )
    for node in model.graph.node:
        for attribute in node.attribute:
            for value in (*attribute.g.input, *attribute.g.output):
                if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                    value.type.tensor_type.ClearField("shape")
    x = numbers(*rule.shape).astype(np.float32)
    scales = np.ones(len(rule.shape), np.float32)
    scales[-1] = 2
    feeds = {
        "x": x.reshape(-1) if flat else x,
        "k": numbers(*rule.k, seed=1).astype(np.float32),
        "shape": np.array(rule.shape),
        "position": np.array(1),
        "flag": np.array(True),
        "times": np.array([2, 3]),
        "scales": scales,
    }
    return model, feeds


def wanted(source: str, rule: Rule, feeds: Arrays) -> tuple[np.ndarray, list[np.ndarray]]:
    """A seed, and the gradients of x and k by PyTorch."""
    x, k = (torch.tensor(feeds[name], requires_grad=True) for name in "xk")
    t = x.reshape(rule.shape)
    y = rule.expected(torch.nn.functional.gelu(t) if source == "unknown operator" else t, k)
    seed = numbers(*y.shape, seed=2).astype(np.float32)
    y.backward(torch.tensor(seed))
    return seed, [np.zeros(v.shape, np.float32) if v.grad is None else v.grad.numpy() for v in (x, k)]


def run(built: onnx.ModelProto, feeds: Arrays, seed: np.ndarray, kernels: str) -> list[np.ndarray]:
    session = ortgrad.InferenceSession(built, quiet(), kernels=kernels)
    names = {value.name for value in built.graph.input}
    fed = {name: array for name, array in {**feeds, "y_grad": seed}.items() if name in names}
    return session.run(None, fed)[1:]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("source", SOURCES)
def test_each_rule_behind_each_source_of_ignorance(source: str, name: str) -> None:
    rule = RULES[name]
    model, feeds = make(source, rule)
    seed, expected = wanted(source, rule, feeds)
    models = [ortgrad.build_gradient_model(model, wrt=["x", "k"], feeds=feeds)]
    if rule.proven:
        models.append(ortgrad.build_gradient_model(model, wrt=["x", "k"]))
    else:
        with pytest.raises(ortgrad.UnsupportedGradientError, match=r"number of dimensions .* feeds"):
            ortgrad.build_gradient_model(model, wrt=["x", "k"])
    for built, kernels in zip(models * 2, ["auto", "onnx", "onnx", "auto"], strict=False):
        for actual, right in zip(run(built, feeds, seed, kernels), expected, strict=True):
            np.testing.assert_allclose(actual, right, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("source", [name for name in SOURCES if SOURCES[name][2]])
def test_another_rank_than_that_which_was_seen(source: str) -> None:
    """A run in which the rank is another one fails; the rule would compute something."""
    model, feeds = make(source, RULES["Attention"])
    built = ortgrad.build_gradient_model(model, wrt=["x", "k"], feeds=feeds)
    later = {**feeds, "shape": np.array([1, 3, 2, 4, 1])}
    seed = np.ones((1, 2, 3, 4), np.float32)
    for kernels in ("auto", "onnx"):
        with pytest.raises(Exception, match="seen_with_4_dimensions"):
            run(built, later, seed, kernels)


def test_another_rank_of_an_input() -> None:
    model, feeds = make("no declared shape", RULES["TensorScatter"])
    built = ortgrad.build_gradient_model(model, wrt="x", feeds=feeds)
    with pytest.raises(Exception, match=r"[Ii]nvalid rank for input: x"):
        run(built, {**feeds, "x": feeds["x"][0]}, np.ones((5, 4), np.float32), "auto")


# What a node requires, onnxruntime refuses otherwise.

# On too few dimensions, onnxruntime ends the process.
_DEADLY = ("Einsum", "ReverseSequence")


def other_ranks(array: np.ndarray, *, fewer: bool) -> list[np.ndarray]:
    more = [array[None], array[..., None], array[None, None]]
    more += [np.expand_dims(array, axis) for axis in range(1, array.ndim)]
    if not fewer or not array.ndim:
        return more
    less = [
        array.reshape(-1)[:1].reshape(()),
        *([array[0], array[..., 0], array.reshape(-1)] * (array.ndim > 1)),
    ]
    return [*more, *map(np.ascontiguousarray, less[1:]), np.array(less[0])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_node_runs_on_other_ranks_than_it_is_said_to_require(case: Case) -> None:
    model, feeds = case.make()
    model = without_ranks(model)
    parsed = read(model)
    infer_types(parsed)
    relations = list(_relations(parsed.graph, parsed.graph.outputs, parsed.opset_imports[""]))
    if not relations:
        return
    session = onnxruntime.InferenceSession(model.SerializeToString(), quiet())
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    names = [output.name for output in session.get_outputs()]

    def compare(feeds: Arrays, results: list[np.ndarray]) -> None:
        ranks = {
            name: np.ndim(array)
            for name, array in {**constants, **feeds, **dict(zip(names, results, strict=True))}.items()
        }
        for _, value, other, offset in relations:
            if other is None or other.name in ranks:
                required = offset if other is None else ranks[other.name] + offset
                assert ranks.get(value.name, required) == required, (value.name, ranks)

    compare(feeds, session.run(None, feeds))
    for name, array in feeds.items():
        for changed in other_ranks(array, fewer=case.op_type not in _DEADLY):
            given = {**feeds, name: changed}
            try:
                results = session.run(None, given)
            except Exception:  # onnxruntime refuses it
                continue
            compare(given, results)


def test_a_branch_proves_nothing_about_what_is_outside() -> None:
    """The GRU needs three dimensions, but does not run if there are not three."""
    model = parse(
        """g (float x, bool c, float[1, 6, 4] w, float[1, 6, 2] r) => (float y) {
            n = ReduceSum<keepdims = 0>(x)
            z = If (c) <
                then_branch = a () => (float a1)
                    { q, h = GRU<hidden_size = 2>(x, w, r) a1 = ReduceSum<keepdims = 0>(q) },
                else_branch = b () => (float b1) { m = Mul(x, x) b1 = ReduceSum<keepdims = 0>(m) }
            >
            y = Add(n, z)
        }"""
    )
    built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    (x,) = [value for value in built.graph.input if value.name == "x"]
    assert not x.type.tensor_type.HasField("shape")
    given = numbers(2, 5).astype(np.float32)
    feeds = {
        "x": given,
        "c": np.array(False),
        "w": np.ones((1, 6, 4), np.float32),
        "r": np.ones((1, 6, 2), np.float32),
    }
    (grad,) = run(built, feeds, np.array(1, np.float32), "auto")
    np.testing.assert_allclose(grad, 1 + 2 * given, rtol=1e-5)


def test_a_node_that_no_output_needs_proves_nothing() -> None:
    """onnxruntime removes it, so it refuses nothing."""
    model = parse(
        """g (float x) => (float y) { p = Transpose<perm = [1, 0]>(x) m = Mul(x, x) y = Tanh(m) }"""
    )
    built = ortgrad.build_gradient_model(model, wrt="x", of="y")
    x = numbers(2, 3, 4).astype(np.float32)
    (grad,) = run(built, {"x": x}, np.ones_like(x), "auto")
    np.testing.assert_allclose(grad, 2 * x * (1 - np.tanh(x * x) ** 2), rtol=1e-4, atol=1e-6)


def test_a_permutation_is_no_proof() -> None:
    """onnxruntime removes two Transposes that cancel, so that the node runs on other ranks as well."""
    model = parse(
        """g (float[N] x, int64[M] shape, float[1, 2, 5, 4] q) => (float y) {
            t = Reshape(x, shape) u = Transpose<perm = [0, 2, 1, 3]>(t) w = Transpose<perm = [0, 2, 1, 3]>(u)
            y = Attention<q_num_heads = 2, kv_num_heads = 2>(w, q, q)
        }""",
        24,
    )
    built = ortgrad.build_gradient_model(model, wrt=["x", "q"], of="y")
    x, q = (numbers(*shape).astype(np.float32) for shape in ((24,), (1, 2, 5, 4)))
    tensors = [torch.tensor(array, requires_grad=True) for array in (x, q)]
    seed = numbers(1, 2, 3, 4, seed=3).astype(np.float32)
    _attention(tensors[0].reshape(1, 2, 3, 4), tensors[1]).backward(torch.tensor(seed))
    feeds = {"x": x, "q": q, "shape": np.array([1, 2, 3, 4])}
    for kernels in ("auto", "onnx"):
        for actual, tensor in zip(run(built, feeds, seed, kernels), tensors, strict=True):
            np.testing.assert_allclose(actual, tensor.grad, rtol=1e-4, atol=1e-6)
        with pytest.raises(Exception, match="t/transposed_with_4_dimensions"):
            run(built, {**feeds, "shape": np.array([1, 3, 8])}, seed, kernels)


# Conditions and axes that follow from sizes and ranks.

FOLDED = {
    "rank": "s = Shape(x) n = Size(s) c = Equal(n, three)",
    "rank of a shape": "s = Shape(x) p = Shape(s) q = Squeeze(p) c = Equal(q, three)",
    "one size of several": "s = Shape(x) n = Gather(s, two) c = Equal(n, four)",
    "sliced": """n = Shape<start = 1, end = 3>(x) m = Slice(n, ones, twos) k = Squeeze(m)
        c = Greater(k, three)""",
    "casts and logic": """s = Shape(x) n = Size(s) f = Cast<to = 1>(n) l = Less(f, tenth) g = Not(l)
        p = Gather(s, zero) u = Greater(p, million) o = Or(u, g) h = Size(s) e = Equal(h, three)
        c = And(o, e)""",
    "reduced": """a = Shape<start = 1>(x) b = ReduceProd<keepdims = 0>(a) d = Sub(b, four)
        e = Div(d, two) c = Equal(e, four)""",
    "where": "s = Shape(x) l = Size(s) m = Equal(l, three) n = Where(m, four, two) c = Equal(n, four)",
}
SCALARS = {"zero": 0, "two": 2, "three": 3, "four": 4, "million": 10**6}


@pytest.mark.parametrize("name", FOLDED)
def test_ifs_on_sizes(name: str) -> None:
    """Only the branch that is taken can be differentiated; it is right for every other size."""
    model = parse(
        f"""g (float[N, 3, 4] x, float[4, 5] w) => (float y) {{
            {FOLDED[name]}
            t = If (c) <then_branch = a () => (float a1) {{ a1 = MatMul(x, w) }},
                else_branch = b () => (float b1) {{ b0 = Det(x) b1 = Multinomial(b0) }}>
            y = Softmax<axis = 1>(t)
        }}""",
        ones=np.array([1]),
        twos=np.array([2]),
        tenth=np.array(0.1, np.float32),
        **{key: np.array(value) for key, value in SCALARS.items()},
    )
    for attribute in next(n for n in model.graph.node if n.op_type == "If").attribute:
        attribute.g.output[0].type.tensor_type.ClearField("shape")
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"], of="y")
    assert "If" not in {node.op_type for node in built.graph.node}
    for count in (1, 2, 5):
        x, w = (numbers(*shape).astype(np.float32) for shape in ((count, 3, 4), (4, 5)))
        tensors = [torch.tensor(array, requires_grad=True) for array in (x, w)]
        seed = numbers(count, 3, 5, seed=3).astype(np.float32)
        torch.softmax(tensors[0] @ tensors[1], 1).backward(torch.tensor(seed))
        for actual, tensor in zip(run(built, {"x": x, "w": w}, seed, "onnx"), tensors, strict=True):
            np.testing.assert_allclose(actual, tensor.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "condition", ["s = Shape(x) n = Gather(s, zero) c = Equal(n, two)", "c = Less(a, b)"]
)
def test_ifs_that_are_not_known(condition: str) -> None:
    """The size is another in every run, and the numbers are targets that can be fed."""
    model = parse(
        f"""g (float[N, 3] x) => (float y) <float a = {{1}}, float b = {{2}}> {{
            {condition}
            t = If (c) <then_branch = d () => (float d1) {{ d1 = Mul(x, x) }},
                else_branch = e () => (float e1) {{ e1 = Mul(x, a) }}>
            y = Mul(t, b)
        }}""",
        zero=np.array(0),
        two=np.array(2),
    )
    built = ortgrad.build_gradient_model(model, wrt=["x", "a", "b"], of="y")
    assert "If" in {node.op_type for node in built.graph.node}
    for count, a in ((2, 1), (3, 3)):
        x = numbers(count, 3).astype(np.float32)
        feeds = {"x": x, "a": np.array(a, np.float32), "b": np.array(2, np.float32)}
        grad = run(built, feeds, np.ones_like(x), "auto")[0]
        np.testing.assert_allclose(grad, 4 * x if count == 2 else np.full_like(x, 2 * a), rtol=1e-6)


def test_constants_remain_what_they_are() -> None:
    """The rank of the result is not known, although all that decides about it is a constant."""
    model = parse(
        """g (float x, float[2] values) => (float y) {
            n = Constant<value = int64 {3}>() a = ArgMax<axis = 0, keepdims = 0>(x) h = OneHot(a, n, values)
            s = ReduceSum<keepdims = 0>(x) y = Mul(h, s)
        }"""
    )
    built = ortgrad.build_gradient_model(model, wrt=["values"], of="y")
    x = np.float32([[1, 4], [3, 2]])
    (grad,) = run(built, {"x": x, "values": np.float32([0, 1])}, np.ones((2, 3), np.float32), "auto")
    np.testing.assert_allclose(grad, [40, 20])


def test_sizes_that_follow_from_a_target() -> None:
    """The scales of a Resize decide about an If, but are fed."""
    model = parse(
        """g (float[1, 1, 4] x) => (float y) <float[3] scales = {1, 1, 2}> {
            r = Resize<mode = "linear">(x, , scales) s = Shape(r) n = Gather(s, two) c = Equal(n, eight)
            y = If (c) <then_branch = d () => (float d1) { d1 = Mul(r, r) },
                else_branch = e () => (float e1) { e1 = Identity(r) }>
        }""",
        two=np.array(2),
        eight=np.array(8),
    )
    built = ortgrad.build_gradient_model(model, wrt=["x", "scales"], of="y")
    x = numbers(1, 1, 4).astype(np.float32)
    feeds = {"x": x, "scales": np.float32([1, 1, 1])}
    grad = run(built, feeds, np.ones((1, 1, 4), np.float32), "auto")[0]
    np.testing.assert_allclose(grad, np.ones_like(x), rtol=1e-6)


# Feeds that do not fit.


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"z": np.ones(1)}, "no input 'z' to feed"),
        ({"k": None}, "no array for the input 'k'"),
        ({"shape": np.array([1.5, 2])}, "'shape' has type float64, but the input has int64"),
        ({"shape": np.array(4)}, r"'shape' has shape \[\], but the input has \[M\]"),
        ({"x": np.array(["a"])}, "'x' takes numbers"),
        ({"shape": np.array([7, 7, 7, 7])}, "does not run on these feeds: .*Reshape"),
    ],
)
def test_feeds_that_do_not_fit(changes: dict, text: str) -> None:
    model, feeds = make("computed shape", RULES["Attention"])
    given = {name: array for name, array in {**feeds, **changes}.items() if array is not None}
    for function in (ortgrad.build_gradient_model, explain):
        with pytest.raises(ortgrad.ModelError, match=text):
            function(model, wrt="x", feeds=given)


def test_a_static_size_that_a_feed_contradicts() -> None:
    model = parse("g (float[N, 3] x) => (float y) { y = Tanh(x) }")
    with pytest.raises(ortgrad.ModelError, match=r"'x' has shape \[2, 4\], but the input has \[N, 3\]"):
        ortgrad.build_gradient_model(model, wrt="x", feeds={"x": np.ones((2, 4), np.float32)})
    # Floats of another precision are converted, as everywhere.
    ortgrad.build_gradient_model(model, wrt="x", feeds={"x": np.ones((2, 3))})


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, feeds = make("computed shape", RULES["GridSample"])
    file, arrays, out = (str(tmp_path / name) for name in ("m.onnx", "feeds.npz", "out.onnx"))
    onnx.save(model, file)
    np.savez(arrays, **feeds)
    assert main(["grad", file, "--wrt", "x", "-o", out]) == 3
    assert "--feeds" in capsys.readouterr().err
    assert main(["explain", file, "--wrt", "x"]) == 3
    assert main(["grad", file, "--wrt", "x", "--feeds", arrays, "-o", out]) == 0
    assert main(["explain", file, "--wrt", "x", "--feeds", arrays]) == 0
    assert main(["check", file, "--wrt", "x", "--feeds", arrays]) == 0
    assert "x_grad" in {value.name for value in onnx.load(out).graph.output}


def test_a_value_of_unknown_type_and_rank() -> None:
    """onnx knows neither of what comes out of this operator of onnxruntime; onnxruntime knows the type."""
    model = parse(
        """g (float x, float[4, 3, 5] q) => (float y) {
            i = com.microsoft.Inverse(x) a = MatMul(i, i) y = TensorScatter<axis = 1>(a, x)
        }""",
        24,
    )
    del model.graph.input[1]
    x = np.eye(4, dtype=np.float32)[None] + numbers(2, 4, 4).astype(np.float32)
    built = ortgrad.build_gradient_model(model, wrt="x", of="y", feeds={"x": x})
    (grad,) = run(built, {"x": x}, np.ones_like(x), "auto")
    np.testing.assert_allclose(grad, np.ones_like(x))


def test_declared_ranks_give_way_to_seen_ones() -> None:
    model, feeds = make("computed shape", RULES["GridSample"])
    model.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, ["A", "B"]))
    seed, expected = wanted("computed shape", RULES["GridSample"], feeds)
    built = ortgrad.build_gradient_model(model, wrt=["x", "k"], feeds=feeds)
    for actual, right in zip(run(built, feeds, seed, "auto"), expected, strict=True):
        np.testing.assert_allclose(actual, right, rtol=2e-4, atol=2e-5)
