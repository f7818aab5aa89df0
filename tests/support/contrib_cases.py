"""Calls of onnxruntime's own operators: mixtures of experts, linear attention, quantized ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from support.rules import one_node

MS = "com.microsoft"
B, S, N, H = 2, 4, 2, 6
D = N * H


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed + sum(shape)).standard_normal(shape) * scale).astype(np.float32)


def ints(values: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array(values, dtype)


@dataclass
class Case:
    op_type: str
    inputs: Sequence[np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: Sequence[Any] = (None,)
    domain: str = MS
    # Positions of the outputs that are compared and differentiated.
    compared: Sequence[int] = (0,)
    # Whether onnxruntime's CPU provider computes it.
    kernel: bool = True
    constants: Sequence[int] = ()
    symbolic: bool = True
    # Positions of outputs that the node leaves out.
    absent: Sequence[int] = ()
    note: str = ""
    opset: int = 18

    def __str__(self) -> str:
        return "-".join([self.op_type, *map(str, self.attributes), self.note]).rstrip("-")

    def model(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        model, feeds = one_node(
            self.op_type,
            self.inputs,
            self.attributes,
            domain=self.domain,
            outputs=self.outputs,
            constants=self.constants,
            symbolic=self.symbolic,
            opset=self.opset,
        )
        for i in sorted(self.absent, reverse=True):
            model.graph.node[0].output[i] = ""
            del model.graph.output[i]
        return model, feeds


def expert_cases() -> list[Case]:
    x, router, experts, inner = normal(6, 8), normal(6, 3, seed=1), 3, 5
    w1, b1 = normal(experts, inner, 8, scale=0.5), normal(experts, inner)
    w2, b2 = normal(experts, 8, inner, seed=1, scale=0.5), normal(experts, 8, seed=1)
    wide, wide_b = normal(experts, 2 * inner, 8, scale=0.5), normal(experts, 2 * inner)
    gated: dict[str, Any] = {
        "k": 2,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.7,
        "activation_beta": 1.0,
    }
    found = [
        Case("MoE", [x, router, w1, b1, w2, b2], {"k": 2, "activation_type": name}, note=name)
        for name in ("relu", "gelu", "silu", "identity")
    ]
    found += [
        Case("MoE", [x, router, w1, None, w2], {"k": 1, "activation_type": "relu"}),
        Case("MoE", [x.reshape(2, 3, 8), router, w1, None, w2], {"k": 3, "activation_type": "silu"}),
        Case("MoE", [x, router, w1, b1, w2, b2], {"k": 2, "normalize_routing_weights": 1}),
        Case("MoE", [x, router, wide, wide_b, w2, b2], gated, note="gated"),
        Case("MoE", [x, router, wide, wide_b, w2, b2], {**gated, "swiglu_limit": 0.5}),
    ]
    rng = np.random.default_rng(7)
    for bits in (2, 4, 8):
        parts, few = 8 // bits, {"k": 2, "expert_weight_bits": bits, "activation_type": "silu"}
        x, inner = normal(6, 32), 16
        q1, q2 = (
            rng.integers(0, 256, s).astype(np.uint8) for s in ((3, 16, 32 // parts), (3, 32, 16 // parts))
        )
        s1, s2 = normal(3, 16, scale=0.1), normal(3, 32, scale=0.1)
        z1, z2 = (rng.integers(0, 256, (3, n // parts)).astype(np.uint8) for n in (16, 32))
        blocks = [normal(3, 16, 2, scale=0.1), normal(3, 32, 1, scale=0.1)]
        block_zeros = [
            rng.integers(0, 256, (3, n, -(-count // parts))).astype(np.uint8)
            for n, count in ((16, 2), (32, 1))
        ]
        fixed: dict[str, Any] = {"symbolic": False, "constants": (2, 5)}
        b1, b2, none = normal(3, 16), normal(3, 32), None
        every = [
            Case("QMoE", [x, router, q1, s1, b1, q2, s2, b2], few, **fixed, note=f"{bits}"),
            Case(
                "QMoE",
                [x, router, q1, s1, none, q2, s2, *[none] * 4, z1, z2],
                few,
                **fixed,
                note=f"{bits} zero",
            ),
            Case(
                "QMoE",
                [x, router, q1, blocks[0], none, q2, blocks[1]],
                {**few, "block_size": 16},
                **fixed,
                note=f"{bits} blocks",
            ),
            Case(
                "QMoE",
                [x, router, q1, blocks[0], none, q2, blocks[1], *[none] * 4, *block_zeros],
                {**few, "block_size": 16},
                **fixed,
                note=f"{bits} zeros of blocks",
            ),
            Case(
                "QMoE",
                [x, router, q1, s1, none, q2, s2, *[none] * 7, np.abs(normal(6, 3))],
                {**few, "normalize_routing_weights": 1},
                **fixed,
                note=f"{bits} weights",
            ),
        ]
        found += every if bits == 4 else every[-2:-1]
    return found


def linear_attention_cases() -> list[Case]:
    both: dict[str, Any] = {"outputs": (None, None), "compared": (0, 1)}
    found = []
    for i, rule in enumerate(("linear", "gated", "delta", "gated_delta")):
        heads = ((2, 2, 2), (4, 2, 2), (2, 4, 4), (2, 4, 2))
        for query, shared, keys in (heads[i], heads[i - 1]):
            q, k, v = (
                normal(B, S, query * 3),
                normal(B, S, keys * 3, seed=1, scale=0.5),
                normal(B, S, shared * 5),
            )
            given: dict[str, Any] = {"q_num_heads": query, "kv_num_heads": shared, "update_rule": rule}
            decay = -np.abs(normal(B, S, shared if query == 2 else shared * 3)) if "gated" in rule else None
            beta = np.abs(normal(B, S, 1 if keys == 4 else shared)) if "delta" in rule else None
            past = normal(B, shared, 3, 5) if query != shared else None
            if rule == "delta":
                given["scale"] = 0.7
            note = f"{rule} {query} {shared} {keys}"
            found.append(Case("LinearAttention", [q, k, v, past, decay, beta], given, **both, note=note))
    return found


def quantized_cases() -> list[Case]:
    rng = np.random.default_rng(9)

    def integers(low: int, high: int, *shape: int) -> np.ndarray:
        return rng.integers(low, high, shape).astype(np.uint8 if low >= 0 else np.int8)

    heads, columns = {"num_heads": N}, 3 * D
    x, bias, scale, zero = (
        integers(0, 256, B, S, 8),
        normal(columns),
        ints(0.02, np.float32),
        ints(120, np.uint8),
    )
    signed, unsigned = integers(-128, 128, 8, columns), integers(0, 256, 8, columns)
    per_column = np.abs(normal(columns, scale=0.01)) + ints(0.005, np.float32)
    mask, past = ints([[1, 1, 1, 0], [0, 1, 1, 1]]), normal(2, B, N, 3, H)
    found = [
        Case(
            "QAttention", [x, signed, bias, scale, ints(0.01, np.float32), None, zero], heads, constants=(1,)
        ),
        Case(
            "QAttention",
            [x, unsigned, bias, scale, per_column, mask, zero, integers(100, 150, columns)],
            heads,
            constants=(1,),
            note="columns",
        ),
        Case(
            "QAttention",
            [x, signed, bias, scale, ints(0.01, np.float32), None, zero, ints(3, np.int8), past],
            {**heads, "unidirectional": 1, "scale": 0.3},
            (None, None),
            compared=(0, 1),
            constants=(1,),
            note="past",
        ),
    ]
    e, tables = "QEmbedLayerNormalization", [integers(0, 256, n, 8) for n in (5, 6, 2)]
    gamma, beta, factors = (
        integers(0, 256, 8),
        integers(0, 256, 8),
        [ints(v, np.float32) for v in (0.01, 0.02, 0.03)],
    )
    ids, segments = ints([[1, 3, 0, 2], [4, 4, 1, 0]]), ints([[0, 0, 1, 1], [1, 0, 0, 0]])
    points, two = (
        [ints(v, np.uint8) for v in (100, 120, 140)],
        {"outputs": (None, np.int32), "compared": (0, 1), "symbolic": False},
    )
    ends = [ints(0.05, np.float32), ints(0.04, np.float32)], [ints(90, np.uint8), ints(110, np.uint8)]
    found += [
        Case(e, [ids, segments, *tables, gamma, beta, mask, *factors, *ends[0], *points, *ends[1]], **two),
        Case(
            e,
            [
                *(ids, None, *tables[:2], None, gamma, beta, None, *factors[:2], None, *ends[0]),
                *(*points[:2], None, *ends[1]),
            ],
            {"epsilon": 1e-3},
            **two,
            note="no segments",
        ),
    ]
    g, indices = "GatherBlockQuantized", ints([[1, -1], [0, 3]], np.int64)
    for bits in (2, 4, 8):
        parts = 8 // bits
        data, scales = integers(0, 256, 5, 48 // parts), normal(5, 3)
        given = {"bits": bits, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
        zeros = integers(0, 256, 5, -(-3 // parts))
        found += [
            Case(g, [data, indices, scales], given, constants=(0,), note=f"{bits}", symbolic=False),
            Case(
                g,
                [data, indices, scales, zeros],
                given,
                constants=(0, 3),
                note=f"{bits} zero",
                symbolic=False,
            ),
        ]
    for i, name in enumerate(("int4", "uint4")):
        kind = getattr(ml_dtypes, name)
        low, high = (-8, 8) if name == "int4" else (0, 16)
        data = rng.integers(low, high, (20, 3, 18)).astype(kind)
        for axis, blocked in ((0, 2), (0, 0), (-1, 0)) if i else ((1, 0), (0, 0), (2, 1)):
            shape = list(data.shape)
            shape[blocked] = -(-shape[blocked] // 16)
            given = {"block_size": 16, "gather_axis": axis, "quantize_axis": blocked}
            at = ints([[1, -1], [0, 2]], np.int64 if axis else np.int32)
            zeros = rng.integers(low, high, shape).astype(kind)
            more = [] if axis == 1 else [zeros]
            fixed: dict[str, Any] = {"constants": (0, 3) if more else (0,), "symbolic": False, "opset": 21}
            note = f"{name} {axis} {blocked}"
            found.append(Case(g, [data, at, normal(*shape), *more], given, **fixed, note=note))
    return found
