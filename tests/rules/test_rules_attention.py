"""Gradient rules of attention and rotary embeddings, against PyTorch and finite differences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper
from support.rules import check_against_torch, check_rule, gradients

import ortgrad
from ortgrad.shapes.inference import infer_types

BATCH, LENGTH, KEYS, WIDTH = 2, 4, 6, 8
NAMES = ["q", "k", "v", "mask", "past_k", "past_v", "lengths"]
OUTPUTS = ["y", "present_k", "present_v", "qk"]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    past_k: torch.Tensor | None,
    past_v: torch.Tensor | None,
    lengths: torch.Tensor | None,
    *,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_causal: int = 0,
    qk_matmul_output_mode: int = 0,
) -> list[torch.Tensor]:
    """The operator as ONNX specifies it; masked elements are filled, so that no gradient flows there."""
    flat = q.ndim == 3

    def split(x: torch.Tensor, heads: int | None) -> torch.Tensor:
        return x.unflatten(2, (heads, -1)).transpose(1, 2) if flat else x

    q, k, v = split(q, q_num_heads), split(k, kv_num_heads), split(v, kv_num_heads)
    if past_k is not None and past_v is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    shared = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(shared, 1).mT * (scale or 1 / math.sqrt(q.shape[3]))
    stages = [scores]
    stages.append(softcap * torch.tanh(scores / softcap) if softcap else scores)
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    allowed = torch.ones(scores.shape, dtype=torch.bool)
    if lengths is not None:
        lengths = lengths.reshape(-1, 1, 1, 1)
        allowed &= columns < lengths
    if is_causal:
        past = 0 if past_k is None else past_k.shape[2]
        allowed &= columns <= rows + (past if lengths is None else lengths - q.shape[2])
    biased = stages[1]
    if mask is not None and mask.dtype == torch.bool:
        allowed &= mask
    elif mask is not None:
        allowed &= mask > -torch.inf
        biased = biased + torch.where(mask > -torch.inf, mask, 0.0)
    biased = torch.where(allowed, biased, -torch.inf)
    dead = ~allowed.any(3, keepdim=True)
    stages.append(biased)
    stages.append(torch.where(dead, 0.0, torch.softmax(torch.where(dead, 0.0, biased), 3)))
    y = stages[3] @ v.repeat_interleave(shared, 1)
    return [y.transpose(1, 2).flatten(2) if flat else y, k, v, stages[qk_matmul_output_mode]]


@dataclass
class Case:
    """Attributes, heads, and which inputs and outputs there are besides Q, K, V and Y."""

    attributes: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 2)
    mask: np.ndarray | None = None
    past: int = 0
    lengths: list[int] | None = None
    outputs: tuple[str, ...] = ("y",)
    flat: bool = False
    values: int = WIDTH
    opset: int = 24

    def inputs(self) -> list[np.ndarray | None]:
        heads, kv = self.heads
        shapes = [(BATCH, heads, LENGTH, WIDTH), (BATCH, kv, KEYS, WIDTH), (BATCH, kv, KEYS, self.values)]
        if self.flat:
            shapes = [(b, s, h * w) for b, h, s, w in shapes]  # type: ignore[misc]
        past = [(BATCH, kv, self.past, WIDTH), (BATCH, kv, self.past, self.values)] if self.past else []
        given: list[np.ndarray | None] = [normal(*s, seed=i) for i, s in enumerate(shapes)]
        given += [self.mask, *([normal(*s, seed=5 + i) for i, s in enumerate(past)] or [None, None])]
        return [*given, None if self.lengths is None else np.array(self.lengths)]

    def all_attributes(self) -> dict[str, Any]:
        heads = {"q_num_heads": self.heads[0], "kv_num_heads": self.heads[1]} if self.flat else {}
        return {**self.attributes, **heads}


CAUSAL = {"is_causal": 1}
QK = ("y", "qk")
ALL = tuple(OUTPUTS)
BOOL = np.random.default_rng(3).random((LENGTH, KEYS)) > 0.4
CASES = {
    "plain": Case(),
    "opset 23": Case(opset=23),
    "flat": Case(flat=True),
    "scale": Case({"scale": 0.3}),
    "wide values": Case(values=5),
    "wide values, flat": Case(values=5, flat=True),
    "causal": Case(CAUSAL),
    "shared keys": Case(heads=(6, 2)),
    "shared keys, flat": Case(CAUSAL, heads=(6, 2), flat=True),
    "one key head": Case(heads=(3, 1), flat=True),
    "float mask": Case(mask=normal(LENGTH, KEYS)),
    "float mask of heads": Case(mask=normal(2, LENGTH, KEYS)),
    "float mask of batches": Case(mask=normal(BATCH, 1, LENGTH, KEYS), heads=(4, 2)),
    "bool mask": Case(mask=BOOL),
    "bool mask, a row without keys": Case(mask=BOOL & (np.arange(LENGTH) != 1)[:, None]),
    "infinite mask, a row without keys": Case(
        mask=np.where(np.arange(LENGTH) == 1, -np.inf, 0)[:, None].repeat(KEYS, 1).astype(np.float32)
    ),
    "bool mask, causal": Case(CAUSAL, mask=BOOL),
    "softcap": Case({"softcap": 0.7}),
    "softcap, mask, shared": Case({"softcap": 2.0, **CAUSAL}, mask=normal(LENGTH, KEYS), heads=(4, 2)),
    "past": Case(past=3, outputs=ALL[:3]),
    "past, causal, flat": Case(CAUSAL, past=3, outputs=ALL[:3], flat=True),
    "past, mask, shared": Case(past=3, outputs=ALL[:3], heads=(4, 2), mask=normal(LENGTH, KEYS + 3)),
    "scores": Case(outputs=QK, mask=normal(LENGTH, KEYS)),
    "capped scores": Case({"softcap": 1.5, "qk_matmul_output_mode": 1}, outputs=QK),
    "uncapped scores": Case({"softcap": 1.5}, outputs=QK, heads=(4, 2)),
    "biased scores": Case({"qk_matmul_output_mode": 2}, outputs=QK, mask=normal(LENGTH, KEYS)),
    "probabilities": Case({"qk_matmul_output_mode": 3, **CAUSAL}, outputs=QK, heads=(4, 2)),
    "only probabilities": Case({"qk_matmul_output_mode": 3}, outputs=("qk",)),
    "only scores": Case(outputs=("qk",)),
    "past and scores": Case(outputs=ALL, past=2),
    "lengths": Case(lengths=[3, 6]),
    "causal, lengths": Case(CAUSAL, lengths=[5, 6]),
    "causal, lengths, rows without keys": Case(CAUSAL, lengths=[2, 6], heads=(4, 2)),
    "causal, lengths, mask": Case(CAUSAL, lengths=[4, 6], mask=normal(LENGTH, KEYS)),
}


# Which dimensions are unknown: none, batch and lengths, all.
STATIC, LENGTHS, ALL_SYMBOLIC = range(3)


def _shape(name: str, shape: tuple[int, ...], symbolic: int) -> list[str | int]:
    fixed = (1, 3) if len(shape) == 4 else (2,) if name in ("q", "k", "v") else ()
    return [
        dim if symbolic == STATIC or (symbolic == LENGTHS and i in fixed) else f"{name}_{i}"
        for i, dim in enumerate(shape)
    ]


def make_model(case: Case, symbolic: int = STATIC) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    inputs = case.inputs()
    feeds = {name: a for name, a in zip(NAMES, inputs, strict=True) if a is not None}
    last = max(OUTPUTS.index(name) for name in case.outputs)
    read = [n if n in feeds else "" for n in NAMES]
    while not read[-1]:
        read.pop()
    # onnxruntime wants the present keys and values if there are past ones.
    made = [n if n in case.outputs or n == "y" or case.past else "" for n in OUTPUTS[: last + 1]]
    node = helper.make_node("Attention", read, made, name="node", **case.all_attributes())
    infos = [
        helper.make_tensor_value_info(
            n,
            helper.np_dtype_to_tensor_dtype(a.dtype),
            _shape(n, a.shape, symbolic),
        )
        for n, a in feeds.items()
    ]
    results = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in made if n]
    graph = helper.make_graph([node], "graph", infos, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=10)
    return model, feeds


def torch_results(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs, seeds for them, and gradients by input."""
    given = case.inputs()
    tensors = [None if a is None else torch.tensor(a, requires_grad=a.dtype == np.float32) for a in given]
    results = dict(zip(OUTPUTS, reference(*tensors, **case.all_attributes()), strict=True))
    wanted = {name: results[name] for name in case.outputs}
    seeds = {name: normal(*value.shape, seed=9) for name, value in wanted.items()}
    torch.autograd.backward(list(wanted.values()), [torch.tensor(s) for s in seeds.values()])
    grads = {
        name: t.grad.numpy() if t.grad is not None else np.zeros(t.shape, np.float32)
        for name, t in zip(NAMES, tensors, strict=True)
        if t is not None and t.requires_grad
    }
    return {name: value.detach().numpy() for name, value in wanted.items()}, seeds, grads


# onnx takes symbolic numbers of keys for 0 in the scores that are an output, and unknown widths in Y.
RUNS = [(name, STATIC) for name in CASES]
RUNS += [(name, LENGTHS) for name, case in CASES.items() if "qk" not in case.outputs]
RUNS += [(name, ALL_SYMBOLIC) for name in ("plain", "shared keys", "float mask of batches", "past")]


@pytest.mark.parametrize(("name", "symbolic"), RUNS)
def test_attention(name: str, symbolic: int) -> None:
    case = CASES[name]
    model, feeds = make_model(case, symbolic)
    outputs, seeds, expected = torch_results(case)
    # The reference computes what onnxruntime computes.
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for output, value in zip(outputs, session.run(list(outputs), feeds), strict=True):
        np.testing.assert_allclose(value, outputs[output], rtol=1e-4, atol=1e-5)
    actual = gradients(model, feeds, seeds, list(expected))
    for wrt, grad in actual.items():
        np.testing.assert_allclose(grad, expected[wrt], rtol=1e-4, atol=2e-5, err_msg=wrt)


@pytest.mark.parametrize("name", [n for n in CASES if "infinite" not in n])
def test_attention_differences(name: str) -> None:
    case = CASES[name]
    model, feeds = make_model(case)
    wrt = [n for n, a in feeds.items() if a.dtype == np.float32]
    ortgrad.check_gradients(model, feeds, wrt=wrt, of=list(case.outputs)).raise_if_wrong()


@pytest.mark.parametrize(
    "name", ["plain", "shared keys, flat", "softcap, mask, shared", "only probabilities"]
)
def test_attention_second_derivative(name: str) -> None:
    case = CASES[name]
    model, feeds = make_model(case)
    wrt = [n for n, a in feeds.items() if a.dtype == np.float32]
    built = ortgrad.build_gradient_model(model, wrt=wrt, of=list(case.outputs))
    seeds = {f"{n}_grad": s for n, s in torch_results(case)[1].items()}
    results = [f"{n}_grad" for n in wrt]
    ortgrad.check_gradients(built, {**feeds, **seeds}, wrt=wrt, of=results).raise_if_wrong()


def test_attention_gives_no_gradient_where_nothing_is_asked_for() -> None:
    model, _ = make_model(Case())
    built = ortgrad.build_gradient_model(model, wrt="v")
    kinds = [node.op_type for node in built.graph.node]
    assert kinds.count("MatMul") == 1


ROTATED = {
    "plain": (normal(2, 3, 4, 8), {}, 4),
    "interleaved": (normal(2, 3, 4, 8), {"interleaved": 1}, 4),
    "part": (normal(2, 3, 4, 8), {"rotary_embedding_dim": 4}, 2),
    "part, interleaved": (normal(2, 3, 4, 8), {"rotary_embedding_dim": 4, "interleaved": 1}, 2),
    "flat": (normal(2, 4, 24), {"num_heads": 3}, 4),
    "flat, part": (normal(2, 4, 24), {"num_heads": 3, "rotary_embedding_dim": 6}, 3),
}


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("name", ROTATED)
def test_rotary_embedding(name: str, positions: bool) -> None:
    x, attributes, pairs = ROTATED[name]
    caches = [normal(*((10, pairs) if positions else (2, 4, pairs)), seed=i) for i in (1, 2)]
    ids = np.array([[0, 1, 2, 3], [7, 3, 3, 0]]) if positions else None

    def rotate(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ids: torch.Tensor | None
    ) -> torch.Tensor:
        flat = x.ndim == 3
        x = x.unflatten(2, (3, -1)) if flat else x.transpose(1, 2)
        cos, sin = (cos, sin) if ids is None else (cos[ids], sin[ids])
        cos, sin = cos[:, :, None], sin[:, :, None]
        width = 2 * pairs
        turned, rest = x[..., :width], x[..., width:]
        if attributes.get("interleaved"):
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        else:
            a, b = turned[..., :pairs], turned[..., pairs:]
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        y = torch.cat([turned, rest], -1)
        return y.flatten(2) if flat else y.transpose(1, 2)

    inputs = [x, *caches, ids]
    check_against_torch("RotaryEmbedding", rotate, inputs, attributes, opset=23, symbolic=False)
    check_rule("RotaryEmbedding", inputs, attributes, opset=23, symbolic=False, second=True)


def test_contrib_rotary_embedding() -> None:
    inputs = [
        normal(2, 3, 4, 8),
        np.array([[0, 1, 2, 3], [7, 3, 3, 0]]),
        normal(10, 4),
        normal(10, 4, seed=1),
    ]
    check_rule("RotaryEmbedding", inputs, domain="com.microsoft", constants=(1, 2, 3), symbolic=False)
    check_rule("RotaryEmbedding", inputs, domain="com.microsoft")


@pytest.mark.parametrize(
    ("keys", "past", "expected"),
    [("S", None, None), (7, None, 7), ("S", 5, None), (3, "P", None), ("S", "P", None), (3, 5, 8)],
)
def test_an_unknown_number_of_keys_is_not_zero(
    keys: int | str, past: int | str | None, expected: int | None
) -> None:
    """onnx's shape inference counts it as none."""
    shapes: dict[str, list[Any]] = {"q": ["B", "L", 16], "k": ["B", keys, 16], "v": ["B", keys, 16]}
    more = {"past_k": ["B", 2, past, 8], "past_v": ["B", 2, past, 8]} if past is not None else {}
    read, made = [*shapes, *(["", *more] if more else [])], ["y", *(["a", "b"] if more else ["", ""]), "qk"]
    graph = helper.make_graph(
        [
            helper.make_node("Attention", read, made, q_num_heads=2, kv_num_heads=2),
            helper.make_node("Relu", ["qk"], ["z"]),
        ],
        "attention",
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in (shapes | more).items()],
        [helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)],
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))
    infer_types(model)
    for node in model.graph:
        shape = node.outputs[-1].shape
        assert shape is not None and (
            shape[3] == expected or (expected is None and not isinstance(shape[3], int))
        )
