"""Definitions of onnxruntime's own operators, against its kernels, PyTorch and finite differences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from support import KERNELS
from support.contrib_cases import (
    MS,
    B,
    Case,
    D,
    H,
    N,
    S,
    expert_cases,
    ints,
    linear_attention_cases,
    normal,
    quantized_cases,
)
from support.rules import check_against_torch, gradients, one_node
from torch.nn import functional

import ortgrad
from ortgrad.autodiff import rules
from ortgrad.autodiff.defined_nodes import put_definition
from ortgrad.autodiff.definitions import all_definitions, all_reasons, definition
from ortgrad.graph.names import Names
from ortgrad.shapes.defined_types import infer_defined_types


def defined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the definition in the place of its node."""
    graph = ir.from_proto(model)
    # Definitions may contain operators that have one.
    opened = True
    while opened:
        infer_defined_types(graph)
        opened = (
            sum(put_definition(n, graph.opset_imports[""], Names.of(graph)) for n in list(graph.graph)) > 0
        )
    return ir.to_proto(graph)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def activation_cases() -> list[Case]:
    x, w, b = normal(2, 3, 6, 6), normal(4, 3, 3, 3, seed=1, scale=0.3), normal(4, seed=2)
    z = normal(2, 4, 6, 6, seed=3)
    same: dict[str, Any] = {"pads": [1, 1, 1, 1]}
    parameters: dict[str, dict[str, Any]] = {
        "Relu": {},
        "Tanh": {},
        "Sigmoid": {},
        "LeakyRelu": {"activation_params": [0.2]},
        "Clip": {"activation_params": [-0.5, 0.7]},
        "HardSigmoid": {"activation_params": [0.3, 0.4]},
    }
    found = [
        Case("FusedConv", [x, w, b], {**same, "activation": name, **given}, note=name)
        for name, given in parameters.items()
    ]
    found += [
        Case("FusedConv", [x, w], {"strides": [2, 1], "dilations": [1, 2]}),
        Case("FusedConv", [x, w, b, z], {**same, "activation": "Relu"}, note="sum"),
        Case("FusedConv", [x, w, None, z], same, note="sum without bias"),
        Case("FusedConv", [normal(2, 4, 9), normal(4, 2, 3), b], {"group": 2, "activation": "Relu"}),
        Case("FusedConv", [x, w, b], {"auto_pad": "SAME_UPPER", "activation": "Relu"}, symbolic=False),
    ]
    a, m, c = normal(3, 5), normal(5, 4, seed=1), normal(4, seed=2)
    for name in ("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign"):
        found.append(Case("FusedGemm", [a, m, c], {"activation": name}, note=name))
    found += [
        Case("FusedGemm", [a, m], {"activation": "LeakyRelu", "activation_alpha": 0.2, "alpha": 0.5}),
        Case("FusedGemm", [a, m, c], {"activation": "Elu", "activation_alpha": 0.7, "beta": 0.5}),
        Case(
            "FusedGemm", [a, m, c], {"activation": "Selu", "activation_alpha": 1.6, "activation_gamma": 1.1}
        ),
        Case(
            "FusedGemm",
            [a, m, c],
            {"activation": "HardSigmoid", "activation_alpha": 0.3, "activation_beta": 0.4},
        ),
        Case("FusedGemm", [a, m, c], {"activation": "ThresholdedRelu", "activation_alpha": 0.3}),
        Case("FusedGemm", [a.T.copy(), m.T.copy(), c], {"transA": 1, "transB": 1, "activation": "Relu"}),
        Case("FusedMatMul", [normal(2, 3, 5), normal(2, 5, 4)], {"alpha": 0.5}),
        Case("FusedMatMul", [normal(2, 5, 3), normal(2, 4, 5)], {"transA": 1, "transB": 1}),
        Case("FusedMatMul", [normal(3, 2, 5), normal(5, 2, 4)], {"transBatchA": 1, "transBatchB": 1}),
        Case(
            "FusedMatMul",
            [normal(5, 2, 3), normal(4, 2, 5)],
            {"transBatchA": 1, "transBatchB": 1, "transA": 1, "transB": 1},
        ),
        Case("TransposeMatMul", [normal(2, 5, 3), normal(2, 5, 4)], {"transA": 1}),
        Case(
            "FusedMatMulActivation",
            [normal(3, 5), normal(4, 5)],
            {"transB": 1, "activation": "LeakyRelu", "activation_alpha": 0.1},
            kernel=False,
        ),
        Case("FusedMatMulActivation", [a, m], {"activation": "Softmax", "activation_axis": 1}, kernel=False),
        Case("GemmFastGelu", [a, m, c], kernel=False),
        Case("Gelu", [normal(3, 4)]),
        Case("BiasGelu", [normal(2, 3, 4), normal(4)]),
        Case("FastGelu", [normal(2, 3, 4), normal(4)]),
        Case("FastGelu", [normal(2, 3, 4)]),
        Case("QuickGelu", [normal(2, 3, 4)]),
        Case("QuickGelu", [normal(2, 3, 4)], {"alpha": 1.1}),
        Case("ScaledSiLU", [normal(3, 4)], {"alpha": 0.7}),
        Case("ScaledSiLU", [normal(3, 4), np.array(1.3, np.float32)]),
        Case("BiasAdd", [normal(2, 3, 4), normal(4), normal(2, 3, 4, seed=1)], kernel=False),
        Case("BiasSplitGelu", [normal(2, 3, 8), normal(8)], kernel=False),
        Case("GatedAdd", [normal(2, 3, 4), normal(2, 3, 4, seed=1), normal(2, 3, 1)]),
        *causal_cases(),
        Case("NhwcConv", [normal(2, 6, 5, 3), normal(4, 3, 3, 3)], {"pads": [1, 0, 1, 0]}, kernel=False),
        Case(
            "ConvTransposeWithDynamicPads",
            [normal(1, 3, 4, 4), normal(3, 2, 3, 3), ints([1, 0, 0, 1], np.int64), normal(2)],
            {"strides": [2, 2], "output_padding": [1, 0]},
        ),
    ]
    return found


def causal_cases() -> list[Case]:
    c, x, w, bias, past = "CausalConvWithState", normal(2, 3, 6), normal(3, 1, 4), normal(3), normal(2, 3, 3)
    both: dict[str, Any] = {"outputs": (None, None), "compared": (0, 1), "symbolic": False}
    last = np.ascontiguousarray(x.swapaxes(1, 2))
    return [
        Case(c, [x, w, bias, past], {"activation": "silu"}, **both),
        Case(c, [x, w], **both),
        Case(c, [x, w, bias, normal(2, 3, 6, seed=1)], {"dilation": 2}, **both),
        Case(c, [last, w, bias, np.ascontiguousarray(past.swapaxes(1, 2))], {"channels_last": 1}, **both),
        Case(c, [last.reshape(2, 6, 3, 1), w], {"channels_last": 1}, **both, note="several axes"),
    ]


def normalization_cases() -> list[Case]:
    x, skip, gamma, beta, bias = (
        normal(B, S, 8),
        normal(B, S, 8, seed=1),
        normal(8),
        normal(8, seed=2),
        normal(8, seed=3),
    )
    wide = (None, None, None, None)
    found = [
        Case("SkipLayerNormalization", [x, skip, gamma, beta, bias], {"epsilon": 1e-3}),
        Case("SkipLayerNormalization", [x, skip, gamma]),
        Case("SkipLayerNormalization", [x, skip, gamma, None, bias], note="no beta"),
        Case("SkipLayerNormalization", [x, normal(1, S, 8), gamma, beta], note="one skip"),
        Case("SkipLayerNormalization", [x, normal(S, 8), gamma, beta], note="flat skip"),
        Case(
            "SkipLayerNormalization",
            [x, skip, gamma, beta],
            outputs=wide,
            absent=(1, 2),
            compared=(0, 1),
            note="sum",
        ),
        Case("SkipLayerNormalization", [x[0], skip[0], gamma, beta], note="matrix"),
        Case("SkipSimplifiedLayerNormalization", [x, skip, gamma], {"epsilon": 1e-5}),
        Case(
            "SkipSimplifiedLayerNormalization",
            [x, skip, gamma, bias],
            outputs=wide,
            absent=(1, 2),
            compared=(0, 1),
        ),
        Case("SimplifiedLayerNormalization", [x, gamma], domain=""),
        Case("SimplifiedLayerNormalization", [x, normal(S, 8)], {"axis": 1, "epsilon": 1e-3}, domain=""),
        Case("GatedRMSNorm", [x, normal(4), skip]),
        Case("GatedRMSNorm", [x, gamma, skip], {"activation": "sigmoid", "epsilon": 1e-3}),
        Case("BranchwiseRMSNorm", [normal(B, S, 3, 8), gamma], symbolic=False),
        Case("BranchwiseRMSNorm", [normal(B, S, 3, 8)]),
        Case("BranchwiseRMSNorm", [normal(B, S, 24), normal(24)], {"num_branches": 3}, symbolic=False),
        Case("BranchwiseRMSNorm", [normal(B, S, 24), normal(3, 8)], {"num_branches": 3}),
        Case("HyperConnectionPreMix", [normal(B, S, 3, 8), normal(B, S, 3)], {"reduction_scale": 0.5}),
        Case("HyperConnectionPreMix", [normal(B, S, 3, 8), normal(B, S, 3, 1)]),
        Case(
            "HyperConnectionPreMix", [normal(B, S, 24), normal(B, S, 3)], {"num_branches": 3}, symbolic=False
        ),
        Case(
            "HyperConnectionPreMix", [normal(B, S, 24), normal(B, S, 24)], {"num_branches": 3}, symbolic=False
        ),
        Case(
            "HyperConnectionPostMix",
            [normal(B, S, 3, 8), normal(B, S, 8), normal(B, S, 3), normal(B, S, 3, 3)],
        ),
        Case(
            "HyperConnectionPostMix",
            [normal(B, S, 24), normal(B, S, 8), normal(B, S, 3, 1)],
            {"num_branches": 3},
        ),
        Case(
            "LinearAttentionGate",
            [x, gamma, beta, skip],
            outputs=(None, None),
            compared=(0, 1),
        ),
        Case(
            "EngramGate",
            [
                normal(B, S, 3, 8),
                normal(B, S, 3, 8, seed=1),
                x,
                normal(3, 8),
                normal(3, 8, seed=1),
                normal(3, 8, seed=2),
            ],
            outputs=(None, None),
            compared=(0, 1),
        ),
    ]
    ids, segments = ints([[1, 3, 0, 2], [4, 4, 1, 0]]), ints([[0, 0, 1, 1], [1, 0, 0, 0]])
    words, places, parts = normal(5, 8), normal(6, 8), normal(2, 8)
    mask, at = ints([[1, 1, 1, 0], [1, 1, 0, 0]]), ints([[3, 2, 1, 0]])
    e, two = "EmbedLayerNormalization", {"outputs": (None, np.int32), "compared": (0, 1), "symbolic": False}
    found += [
        Case(e, [ids, segments, words, places, parts, gamma, beta], **two),
        Case(e, [ids, None, words, places, None, gamma, beta], {"epsilon": 1e-3}, **two),
        Case(e, [ids, segments, words, places, parts, gamma, beta, mask], **two, note="mask"),
        Case(e, [ids, segments, words, places, parts, gamma, beta, 1 - mask], **two, note="late mask"),
        Case(e, [ids, None, words, places, None, gamma, beta, None, at], **two, note="positions"),
        Case(
            e,
            [ids, None, words, places, None, gamma, beta, None, at.repeat(2, 0)],
            outputs=(None, np.int32, None),
            compared=(0, 1, 2),
            symbolic=False,
            note="sum",
        ),
    ]
    return found


def attention_cases() -> list[Case]:
    x, w, bias = normal(B, S, 5), normal(5, 3 * D, scale=0.5), normal(3 * D)
    past = normal(2, B, N, 3, H)
    raw = ints([[1, 1, 1, 0], [0, 1, 1, 1]])
    heads = {"num_heads": N}
    pair = (None, None)
    longer = np.concatenate([np.ones((B, 3), np.int32), raw], 1)
    found = [
        Case("Attention", [x, w, bias], heads),
        # onnxruntime ends the process without a bias.
        Case("Attention", [x, w, None], heads, kernel=False, note="no bias"),
        Case("Attention", [x, w, bias], {**heads, "scale": 0.3}),
        Case("Attention", [x, w, bias], {**heads, "unidirectional": 1}),
        Case("Attention", [x, w, bias, raw], heads, note="raw mask"),
        Case("Attention", [x, w, bias, raw], {**heads, "unidirectional": 1}, note="raw mask"),
        Case("Attention", [x, w, bias, raw], {**heads, "mask_filter_value": -3.0}, note="raw mask"),
        Case("Attention", [x, w, bias, np.tril(np.ones((B, S, S), np.int32))], heads, note="square mask"),
        Case("Attention", [x, w, bias, ints([3, 2])], heads, note="lengths"),
        Case("Attention", [x, w, bias, ints([4, 3, 1, 0])], heads, note="ends and starts"),
        Case("Attention", [x, w, bias, ints([4, 3, 1, 0])], {**heads, "unidirectional": 1}, note="ends"),
        Case("Attention", [x, w, bias, None, past], heads, pair, compared=(0, 1), note="past"),
        Case(
            "Attention",
            [x, w, bias, longer, past],
            {**heads, "unidirectional": 1},
            pair,
            compared=(0, 1),
            note="past and mask",
        ),
        Case("Attention", [x, w, bias, None, None, normal(B, N, S, S)], heads, note="bias"),
        Case("Attention", [x, w, bias, raw, None, normal(1, 1, S, S)], heads, note="mask and bias"),
        Case(
            "Attention",
            [x, normal(5, 2 * D + 8, scale=0.5), normal(2 * D + 8)],
            {**heads, "qkv_hidden_sizes": [D, D, 8]},
        ),
    ]
    q, k, v = normal(B, S, D), normal(B, 5, D, seed=1), normal(B, 5, D, seed=2)
    past_k, past_v = normal(B, N, 3, H), normal(B, N, 3, H, seed=1)
    keys = ints([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    m = "MultiHeadAttention"
    found += [
        Case(m, [q, k, v], heads),
        Case(m, [q, k, v, bias], {**heads, "scale": 0.3}),
        Case(m, [q, k, normal(B, 5, 8), normal(2 * D + 8)], heads, note="other values"),
        Case(m, [q, k, v, None, keys], heads, note="mask"),
        Case(m, [q, k, v, None, np.tril(np.ones((B, S, 5), np.int32))], heads, note="square mask"),
        Case(m, [q, k, v, None, keys, normal(1, N, S, 5)], heads, note="mask and bias"),
        Case(m, [q, q + 1, v[:, :4], bias], {**heads, "unidirectional": 1}),
        Case(
            m,
            [q, q + 1, v[:, :4], bias, None, None, past_k, past_v],
            {**heads, "unidirectional": 1},
            (None, None, None),
            compared=(0, 1, 2),
            note="past",
        ),
        Case(m, [q, normal(B, N, 5, H), normal(B, N, 5, H, seed=1)], heads, note="keys of heads"),
        Case(m, [q, k, v, bias], heads, (None, None, None, None), compared=(0, 1, 2, 3), note="scores"),
        Case(
            m,
            [q, k, v, bias, keys, normal(1, N, S, 5)],
            heads,
            (None, None, None, None),
            compared=(0, 1, 2, 3),
            note="masked scores",
        ),
        Case(m, [normal(B, S, N, 3, H)], heads, note="packed", kernel=False),
        Case(m, [q, normal(B, 5, N, 2, H)], heads, note="packed keys", kernel=False),
    ]
    return found


def rotary_cases() -> list[Case]:
    angles = np.random.default_rng(5).random((9, H // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    x, at = normal(B, S, D), ints([[0, 1, 2, 3], [4, 2, 0, 8]], np.int64)
    part = np.ascontiguousarray(angles[:, :2])
    found = [
        Case("RotaryEmbedding", [x, at, cos, sin]),
        Case("RotaryEmbedding", [x, ints([3], np.int64), cos, sin], note="offset"),
        Case("RotaryEmbedding", [x, at, cos, sin], {"interleaved": 1}),
        Case("RotaryEmbedding", [normal(B, N, S, H), at, cos, sin], note="heads"),
        Case(
            "RotaryEmbedding",
            [x, at, np.cos(part), np.sin(part)],
            {"num_heads": N, "rotary_embedding_dim": 4},
        ),
        Case("RotaryEmbedding", [x, at, cos, sin], {"scale": 2.0}),
        Case(
            "MRotaryEmbedding",
            [x, np.stack([at, at[::-1], 8 - at]), cos, sin],
            {"mrope_section": [1, 1, 1], "num_heads": N},
        ),
        Case(
            "MRotaryEmbedding",
            [x, np.stack([at, at[::-1], 8 - at]), cos, sin],
            {"mrope_section": [1, 1, 1], "num_heads": N, "mrope_layout": 1, "interleaved": 1},
        ),
    ]
    g, wide, few = "GroupQueryAttention", 16, 2
    heads: dict[str, Any] = {"num_heads": 4, "kv_num_heads": few}
    big = np.random.default_rng(6).random((16, wide // 2)).astype(np.float32)
    caches = [np.cos(big), np.sin(big)]
    q, k, v = normal(B, S, 4 * wide), normal(B, S, few * wide), normal(B, S, few * wide, seed=1)
    three = (None, None, None)
    empty = np.zeros((B, few, 0, wide), np.float32)
    prompt = [q, k, v, None, None, ints([S - 1, S - 1]), ints(S)]
    past_k, past_v = normal(B, few, 5, wide), normal(B, few, 5, wide, seed=1)
    step = [q[:, :1], k[:, :1], v[:, :1], past_k, past_v, ints([5, 5]), ints(6)]
    ragged = [q[:, :1], k[:, :1], v[:, :1], past_k, past_v, ints([5, 3]), ints(6)]
    extend = [q[:1], k[:1], v[:1], past_k[:1], past_v[:1], ints([8]), ints(9)]
    every: dict[str, Any] = {"outputs": three, "compared": (0, 1, 2), "symbolic": False}
    found += [
        Case(g, prompt, heads, **every, note="prompt"),
        Case(g, [*prompt, *caches], {**heads, "do_rotary": 1}, **every),
        Case(g, [*prompt, *caches], {**heads, "do_rotary": 1, "rotary_interleaved": 1}, **every),
        Case(g, prompt, {**heads, "softcap": 2.0, "scale": 0.3}, **every),
        Case(g, prompt, {**heads, "local_window_size": 2}, **every),
        Case(g, prompt, {**heads, "smooth_softmax": 1}, **every),
        Case(g, prompt, {**heads, "causal": 0}, **every),
        Case(g, [*prompt, None, None, None, normal(1, 4, S, S)], heads, **every, note="bias"),
        Case(g, [*prompt, None, None, None, None, normal(4)], heads, **every, note="sink"),
        Case(g, [q, k, v, empty, empty, ints([S - 1, S - 1]), ints(S)], heads, **every, note="empty past"),
        Case(g, [*step, *caches], {**heads, "do_rotary": 1}, **every, note="step"),
        Case(g, [*ragged, *caches], {**heads, "do_rotary": 1}, outputs=three, symbolic=False, note="ragged"),
        Case(g, [*extend, *caches], {**heads, "do_rotary": 1}, **every, note="several steps"),
        Case(
            g,
            [normal(B, S, 8 * wide), None, None, None, None, ints([S - 1, S - 1]), ints(S)],
            heads,
            **every,
            note="packed",
        ),
        Case(g, [q, q + 1, q - 1, None, None, *prompt[5:]], {"num_heads": 4, "kv_num_heads": 4}, **every),
    ]
    table = normal(8, 3)
    found += [
        Case(
            "GatedRelativePositionBias",
            [normal(B, S, D), normal(D), normal(1, N, S, S), normal(H, 8), normal(8), normal(1, N, 1, 1)],
            heads | {"num_heads": N, "kv_num_heads": None},
            kernel=False,
        ),
        Case(
            "RelativePositionBias",
            [table, ints([6], np.int64), ints([6], np.int64)],
            {"max_distance": 5, "is_bidirectional": 1},
            kernel=False,
            symbolic=False,
        ),
    ]
    for case in found:
        case.attributes = {name: value for name, value in case.attributes.items() if value is not None}
    return found


def other_cases() -> list[Case]:
    rng = np.random.default_rng(3)
    a, packed = normal(2, 3, 40), rng.integers(0, 256, (4, 3, 8)).astype(np.uint8)
    scales = normal(4, 3, scale=0.1)
    found = [
        Case("SampleOp", [normal(3)]),
        Case("ExpandDims", [normal(3, 4), ints(1)], constants=(1,)),
        Case("GatherND", [normal(3, 4), ints([[0, 1], [2, 2], [0, 1]])]),
        Case("Pad", [normal(3, 4), ints([1, 0, 0, 2], np.int64), np.array([0.5], np.float32)]),
        Case("Pad", [normal(3, 4), ints([1, 0, 0, 2], np.int64)], {"mode": "reflect"}),
        Case("Range", [np.array(v, np.float32) for v in (1.0, 4.0, 0.7)]),
        Case("Trilu", [normal(3, 4), ints(1, np.int64)], {"upper": 0}),
        Case(
            "Unique",
            [np.array([2, 1, 1, 3, 2], np.float32)],
            {},
            (None, np.int64, np.int64),
            compared=(0, 1, 2),
        ),
        Case("UnfoldTensor", [normal(2, 7, 3)], {"dim": 1, "size": 3, "step": 2}),
        Case("UnfoldTensor", [normal(2, 7)], {"size": 2}),
        Case("CDist", [normal(3, 4), normal(2, 4, seed=1)]),
        Case("CDist", [normal(3, 4), normal(2, 4, seed=1)], {"metric": "euclidean"}),
        Case("GridSample", [normal(2, 3, 5, 6), normal(2, 4, 3, 2, scale=0.6)]),
        Case(
            "GridSample",
            [normal(2, 3, 5, 6), normal(2, 4, 3, 2, scale=0.6)],
            {"align_corners": 1, "padding_mode": "border", "mode": "bicubic"},
        ),
        Case(
            "CropAndResize",
            [
                normal(2, 3, 5, 6),
                np.array([[0.1, 0.2, 0.7, 0.9], [0.3, -0.2, 1.2, 0.8]], np.float32),
                ints([1, 0]),
                ints([4, 3]),
            ],
            {"extrapolation_value": 0.5},
        ),
        Case(
            "CropAndResize",
            [normal(2, 3, 5, 6), np.array([[0.1, 0.2, 0.7, 0.9]], np.float32), ints([1]), ints([1, 3])],
            note="one line",
        ),
    ]
    for bits, blob in ((2, 4), (4, 8), (8, 16)):
        weight = rng.integers(0, 256, (4, 3, blob)).astype(np.uint8)
        fixed: dict[str, Any] = {"bits": bits, "block_size": 16, "N": 4, "K": 40}
        zeros = rng.integers(0, 256, (4, -(-3 * bits // 8))).astype(np.uint8)
        found.append(Case("MatMulNBits", [a, weight, scales], fixed, constants=(1,), note=f"{bits}"))
        found.append(
            Case("MatMulNBits", [a, weight, scales, zeros], fixed, constants=(1,), note=f"{bits} zero")
        )
    four: dict[str, Any] = {"bits": 4, "block_size": 16, "N": 4, "K": 40}
    found += [
        Case(
            "MatMulNBits",
            [a, packed, scales, normal(4, 3), None, normal(4)],
            four,
            symbolic=False,
            note="float zero",
        ),
        Case("MatMulNBits", [a, packed, scales, None, None, normal(4)], four, symbolic=False, note="bias"),
        Case("MatMulNBits", [a, packed, scales, None, ints(np.arange(40) % 3)], four, note="groups"),
    ]
    for kind in (0, 1):
        codes, largest = rng.integers(0, 256, 80).astype(np.uint8), np.abs(normal(10))
        given: dict[str, Any] = {"quant_type": kind, "block_size": 16, "N": 4, "K": 40}
        found.append(Case("MatMulBnb4", [a, codes, largest], given))
    return found


CASES = [
    *activation_cases(),
    *normalization_cases(),
    *attention_cases(),
    *rotary_cases(),
    *other_cases(),
    *expert_cases(),
    *linear_attention_cases(),
    *quantized_cases(),
]


@pytest.mark.parametrize("case", [c for c in CASES if c.kernel], ids=str)
def test_a_definition_computes_what_the_kernel_computes(case: Case) -> None:
    model, feeds = case.model()
    expected = run(model, feeds)
    actual = run(defined(model), feeds)
    for i in case.compared:
        assert actual[i].dtype == expected[i].dtype
        np.testing.assert_allclose(actual[i], expected[i], rtol=1e-5, atol=1e-5)


# A small step makes equal elements different.
WITHOUT_DIFFERENCES = {"Unique"}


@pytest.mark.parametrize("case", [c for c in CASES if c.op_type not in WITHOUT_DIFFERENCES], ids=str)
def test_gradients_of_a_definition(case: Case) -> None:
    model, feeds = case.model()
    wrt = [name for name, array in feeds.items() if array.dtype == np.float32]
    # In double precision, which few of the fused kernels have.
    with warnings.catch_warnings():
        # Scores that only choose have no gradient.
        warnings.simplefilter("ignore", ortgrad.StoppedGradientWarning)
        ortgrad.check_gradients(defined(model), feeds, wrt=wrt, directions=1).raise_if_wrong()


def attention(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mask: torch.Tensor, past: torch.Tensor, *, causal: bool
) -> torch.Tensor:
    q, k, v = ((x @ w + b).unflatten(2, (3, N, H))).permute(2, 0, 3, 1, 4)
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    scores = q @ k.mT / H**0.5 + torch.where(mask > 0, 0.0, -1e4)[:, None, None]
    if causal:
        later = torch.ones(S, k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - S)
        scores = scores.masked_fill(later, -torch.inf)
    return (scores.softmax(3) @ v).transpose(1, 2).flatten(2)


def multi_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor, mask: Any, bias: torch.Tensor
) -> torch.Tensor:
    parts = b.split([D, D, D])
    q, k, v = ((x + y).unflatten(2, (N, H)).transpose(1, 2) for x, y in zip((q, k, v), parts, strict=True))
    scores = q @ k.mT / H**0.5 + bias
    return (scores.softmax(3) @ v).transpose(1, 2).flatten(2)


def rotary(x: torch.Tensor, at: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.unflatten(2, (N, H)).chunk(2, 3)
    c, s = cos[at][:, :, None], sin[at][:, :, None]
    return torch.cat([a * c - b * s, b * c + a * s], 3).flatten(2)


ANGLES = normal(9, H // 2)
IN_TORCH: dict[str, tuple[Callable[..., torch.Tensor], list[Any], dict[str, Any]]] = {
    "FusedConv": (
        lambda x, w, b, z: torch.relu(functional.conv2d(x, w, b, padding=1) + z),
        [normal(2, 3, 6, 6), normal(4, 3, 3, 3), normal(4), normal(2, 4, 6, 6)],
        {"pads": [1, 1, 1, 1], "activation": "Relu"},
    ),
    "FusedGemm": (
        lambda a, b, c: functional.leaky_relu(0.5 * a @ b.T + c, 0.2),
        [normal(3, 5), normal(4, 5), normal(4)],
        {"alpha": 0.5, "transB": 1, "activation": "LeakyRelu", "activation_alpha": 0.2},
    ),
    "SkipLayerNormalization": (
        lambda x, y, g, b, c: functional.layer_norm(x + y + c, (8,), g, b, 1e-3),
        [normal(B, S, 8), normal(B, S, 8, seed=1), normal(8), normal(8, seed=1), normal(8, seed=2)],
        {"epsilon": 1e-3},
    ),
    "Attention": (
        partial(attention, causal=True),
        [
            *(normal(B, S, 5), normal(5, 3 * D), normal(3 * D)),
            *(ints([[1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]]), normal(2, B, N, 3, H)),
        ],
        {"num_heads": N, "unidirectional": 1},
    ),
    "MultiHeadAttention": (
        multi_head,
        [normal(B, S, D), normal(B, 5, D), normal(B, 5, D, seed=1), normal(3 * D), None, normal(1, N, S, 5)],
        {"num_heads": N},
    ),
    "RotaryEmbedding": (
        rotary,
        [normal(B, S, D), ints([[0, 1, 2, 3], [4, 2, 0, 8]], np.int64), np.cos(ANGLES), np.sin(ANGLES)],
        {},
    ),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("op_type", IN_TORCH)
def test_gradients_are_those_of_torch(op_type: str, kernels: str) -> None:
    function, inputs, attributes = IN_TORCH[op_type]
    check_against_torch(op_type, function, inputs, attributes, domain=MS, kernels=kernels, tolerance=1e-5)


def test_blocked_scores_have_no_gradient() -> None:
    words, scores = ints([[0, 1, 2, 0, 1]], np.int64), normal(1, 4)
    model, feeds = one_node("NGramRepeatBlock", [words, scores], {"ngram_size": 3}, domain=MS)
    grad = gradients(model, feeds, {"y": np.ones((1, 4), np.float32)}, ["b"])["b"]
    assert grad.tolist() == [[1.0, 1.0, 0.0, 1.0]]


def test_the_mean_that_no_kernel_computes_is_there() -> None:
    case = Case(
        "SkipLayerNormalization", [normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(8)], {}, (None,) * 3
    )
    model, feeds = case.model()
    seed = normal(2, 3, 1)
    grad = gradients(model, feeds, {"z": seed}, ["a"])["a"]
    np.testing.assert_allclose(grad, np.broadcast_to(seed / 8, grad.shape), rtol=1e-5)


ENCODER = """<ir_version: 10, opset_import: ["": 18, "com.microsoft": 1]>
encoder (int32[n, s] ids, int32[n, s] mask) => (float[n, s, 3] y)
{
    embedded, lengths = com.microsoft.EmbedLayerNormalization (ids, , words, places, , g, b, mask)
    attended = com.microsoft.Attention <num_heads = 2> (embedded, qkv, qkv_b, lengths)
    projected = com.microsoft.FusedMatMul <alpha = 0.5> (attended, p)
    first = com.microsoft.SkipLayerNormalization (projected, embedded, g, b, p_b)
    raised = MatMul (first, up)
    bent = com.microsoft.BiasGelu (raised, up_b)
    lowered = MatMul (bent, down)
    second, mean, inv, sum = com.microsoft.SkipSimplifiedLayerNormalization (lowered, first, g)
    rows = Transpose <perm = [1, 0, 2]> (sum)
    mixed = Einsum <equation = "snd,de->nse"> (rows, out)
    scaled = SimplifiedLayerNormalization <axis = -1> (second, g)
    other = MatMul (scaled, out)
    y = Add (mixed, other)
}"""

ENCODER_WEIGHTS: dict[str, tuple[int, ...]] = {
    "words": (9, 12),
    "places": (7, 12),
    "g": (12,),
    "b": (12,),
    "qkv": (12, 36),
    "qkv_b": (36,),
    "p": (12, 12),
    "p_b": (12,),
    "up": (12, 16),
    "up_b": (16,),
    "down": (16, 12),
    "out": (12, 3),
}


def encoder() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = onnx.parser.parse_model(ENCODER)
    node = model.graph.node[7]
    node.output[1] = node.output[2] = ""
    for i, (name, shape) in enumerate(ENCODER_WEIGHTS.items()):
        array = normal(*shape, seed=i, scale=0.5) + np.float32(name == "g")
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    feeds = {"ids": ints([[1, 2, 3, 8], [0, 4, 4, 0]]), "mask": ints([[1, 1, 1, 0], [1, 1, 0, 0]])}
    return model, feeds


def test_ranks_are_known_behind_operators_of_onnxruntime() -> None:
    model, feeds = encoder()
    ortgrad.check_gradients(model, feeds).raise_if_wrong()


def test_only_operators_on_the_way_are_replaced() -> None:
    model, feeds = encoder()
    built = ortgrad.build_gradient_model(model, wrt="out")
    kept = {node.op_type for node in built.graph.node}
    assert {"Attention", "EmbedLayerNormalization", "SkipLayerNormalization", "BiasGelu"} <= kept
    expected = ortgrad.build_gradient_model(defined(model), wrt="out")
    seed = normal(2, 4, 3)
    results = [
        ortgrad.InferenceSession(m).run(["out_grad"], {**feeds, "y_grad": seed})[0] for m in (built, expected)
    ]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)


def test_a_refusal_gives_the_reason() -> None:
    case = Case(
        "Attention", [normal(B, S, 5), normal(5, 3 * D), normal(3 * D)], {"num_heads": N, "do_rotary": 1}
    )
    with pytest.raises(ortgrad.UnsupportedGradientError, match="do_rotary"):
        ortgrad.build_gradient_model(case.model()[0], wrt="a")
    sparse = Case("MaxpoolWithMask", [normal(1, 2, 4), ints(np.ones((1, 2, 4)))], {"kernel_shape": [2]})
    with pytest.raises(ortgrad.UnsupportedGradientError, match="use MaxPool"):
        ortgrad.build_gradient_model(sparse.model()[0], wrt="a")


def test_a_model_for_one_kind_of_processor_is_refused(tmp_path: Path) -> None:
    model, _ = one_node("Conv", [normal(1, 16, 8, 8), normal(16, 16, 3, 3)], constants=(1,), symbolic=False)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    optimised = onnx.load(options.optimized_model_filepath)
    if "com.microsoft.nchwc" not in {node.domain for node in optimised.graph.node}:
        pytest.skip("onnxruntime has no such layout on this processor")
    with pytest.raises(ortgrad.UnsupportedGradientError, match="ORT_ENABLE_EXTENDED"):
        ortgrad.build_gradient_model(optimised, wrt="a")


def test_a_rule_of_the_user_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_rules", dict(rules.all_rules()))

    @ortgrad.gradient("BiasAdd", domain=MS)
    def doubled(node: Any) -> Any:
        return node.grad(0) * 2.0

    model, _ = one_node("BiasAdd", [normal(2, 3), normal(3), normal(2, 3)], domain=MS)
    built = ortgrad.build_gradient_model(model, wrt="a")
    assert [node.op_type for node in built.graph.node].count("BiasAdd") == 1


# They make hashes and tokens, and compare them.
NO_NUMBERS = {"BifurcationDetector", "MurmurHash3", "NGramHashMapping", "Tokenizer", "VarlenNGramHashMapping"}
# Its output is a path, which is piecewise constant.
NO_NUMBERS |= {"DynamicTimeWarping"}


def all_kernels() -> set[tuple[str, str]]:
    """The operators of onnxruntime's CPU provider that are its own."""
    kernels = onnxruntime.capi.onnxruntime_pybind11_state.get_all_opkernel_def()
    return {
        (kernel.domain, kernel.op_name)
        for kernel in kernels
        if kernel.domain.startswith(MS) and kernel.provider == "CPUExecutionProvider"
    }


def test_every_operator_of_onnxruntime_is_known() -> None:
    known = {key for table in (rules.all_rules(), all_definitions(), all_reasons()) for key in table}
    operators = all_kernels()
    assert len(operators) > 80
    assert {key for key in operators - known if key[1] not in NO_NUMBERS} == set()


# They compute integers from integers, or round their inputs: they are tested with the quantized operators.
TESTED_IN_QUANTIZATION = {"DynamicQuantizeLSTM", "MatMulInteger16", "NhwcMaxPool"}


def test_every_definition_has_a_case() -> None:
    # The others are tested in test_retired.py.
    covered = {case.op_type for case in CASES} | TESTED_IN_QUANTIZATION | {"MemcpyFromHost", "MemcpyToHost"}
    assert {name for _, name in all_definitions()} - covered == set()


def test_a_second_definition_is_an_error() -> None:
    with pytest.raises(ortgrad.errors.RegistrationError, match="FusedConv"):
        definition("FusedConv", domain=MS)(lambda op, node: node.input(0))
