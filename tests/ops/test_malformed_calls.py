"""Malformed calls of every operator: in ortgrad's session none returns numbers, however it is run.

Valid calls are mutated: axes added, removed and exchanged, dimensions of 1 for n and of n for 1, lengths,
indices and labels out of range, wrong types, wrong attributes. Whether a mutated call is still well-formed is
decided by the predicates below, which say in NumPy what the operators' documentation says.

    python tests/ops/test_malformed_calls.py --count 5000
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest

import ortgrad
from ortgrad import nodes
from ortgrad.operators.assertions import REQUIRES, failed_check
from ortgrad.operators.declaration import Parameter, all_operators, find_operator

# Started as a script, Python finds the modules of tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support.calls import CASES, ORT_ERRORS, WAYS, Arrays, Case, integers, make_model, numbers, quiet

# Sessions of onnxruntime itself.
OTHERS = ("plain", "registered")
# What the model says of its inputs: the ranks, or nothing at all.
RANKS = ("symbolic", "undeclared")
HUGE = 2**40


# What makes a call well-formed.


def same(*names: str) -> Callable[..., bool]:
    return lambda arrays, **_: len({arrays[name].shape for name in names if name in arrays}) == 1


def has_axis(array: np.ndarray, axis: int) -> bool:
    return -array.ndim <= axis < array.ndim


def softmax(arrays: Arrays, axis: int) -> bool:
    return same("dY", "Y")(arrays) and has_axis(arrays["Y"], axis)


def bias_gelu(arrays: Arrays) -> bool:
    x = arrays["X"].shape
    return same("dY", "X")(arrays) and len(x) > 0 and arrays["B"].shape == x[-1:]


def accumulator(arrays: Arrays) -> bool:
    return same("accumulation_buffer", "value")(arrays) and arrays.get("overwrite_flag", np.ones(1)).size == 1


def channels(arrays: Arrays, names: tuple[str, ...]) -> bool:
    x = arrays["X"].shape
    if not x or ("dY" in arrays and arrays["dY"].shape != x):
        return False
    return all(arrays[name].shape == ((x[1],) if len(x) > 1 else (1,)) for name in names)


def positions(
    size: int, kernel: int, stride: int, dilation: int, head: int, tail: int, ceil: int, pool: bool
) -> int:
    """How many windows ONNX puts along an axis, one by one; pools may have one that is cut off."""
    count, extent = 0, (kernel - 1) * dilation + 1
    # More than any dY here has.
    size = min(size, 10_000)
    while count * stride + extent <= size + head + tail:
        count += 1
    left_over = count == 0 or (count - 1) * stride + extent < size + head + tail
    # With ceil_mode one more, if it begins in the input or in the padding before it.
    if (
        ceil
        and left_over
        and count * stride - (stride - 1) + extent <= size + head + tail
        and count * stride < size + head
    ):
        count += 1
    missing = extent - (size + head + tail)
    return 1 if pool and not ceil and 0 < missing < stride else count


def windows(sizes: Any, outputs: Any, kernel: Any, attributes: dict[str, Any], pool: bool = False) -> bool:
    """Whether that many windows lie over an input of these sizes."""
    n = len(sizes)
    strides, dilations = (attributes.get(key) or [1] * n for key in ("strides", "dilations"))
    auto_pad = attributes.get("auto_pad", "NOTSET")
    # As in onnxruntime, pads say nothing beside auto_pad.
    pads = (attributes.get("pads") if auto_pad == "NOTSET" else None) or [0] * 2 * n
    if not n == len(outputs) == len(kernel) == len(strides) == len(dilations) or len(pads) != 2 * n:
        return False
    if min(*kernel, *strides, *dilations) < 1 or min(pads) < 0:
        return False
    if auto_pad.startswith("SAME"):
        return all(y == math.ceil(x / s) for y, x, s in zip(outputs, sizes, strides, strict=True))
    heads, tails = (pads[:n], pads[n:]) if auto_pad == "NOTSET" else ([0] * n, [0] * n)
    counts = [
        positions(*dims, attributes.get("ceil_mode", 0), pool)
        for dims in zip(sizes, kernel, strides, dilations, heads, tails, strict=True)
    ]
    return min(counts) > 0 and counts == list(outputs)


def conv(arrays: Arrays, group: int = 1, **attributes: Any) -> bool:
    dy, x, w = (arrays[name].shape for name in ("dY", "X", "W"))
    if not (len(dy) == len(x) == len(w) > 2) or group < 1 or dy[0] != x[0] or dy[1] != w[0]:
        return False
    kernel = attributes.get("kernel_shape") or w[2:]
    fits = tuple(kernel) == w[2:] and x[1] == w[1] * group and w[0] % group == 0
    return fits and windows(x[2:], dy[2:], kernel, attributes)


def pool(arrays: Arrays, storage_order: int = 0, count_include_pad: int = 0, **attributes: Any) -> bool:
    dy, x_shape = arrays["dY"].shape, arrays["X_shape"]
    if x_shape.ndim != 1 or len(x_shape) != len(dy) or len(dy) < 3 or (x_shape < 0).any():
        return False
    x = tuple(x_shape.tolist())
    if x[:2] != dy[:2] or storage_order not in (0, 1):
        return False
    if "Indices" not in arrays:
        return bool(attributes.get("kernel_shape")) and windows(
            x[2:], dy[2:], attributes["kernel_shape"], attributes, pool=True
        )
    indices, size = arrays["Indices"], math.prod(x[2:])
    if indices.shape != dy:
        return False
    kernel, rank = attributes.get("kernel_shape"), len(x) - 2
    if kernel and not windows(x[2:], dy[2:], kernel, attributes, pool=True):
        return False
    lengths = {"strides": rank, "dilations": rank}
    if attributes.get("auto_pad", "NOTSET") == "NOTSET":
        lengths["pads"] = 2 * rank  # otherwise they are ignored
    if any(len(attributes[name]) != n for name, n in lengths.items() if attributes.get(name)):
        return False
    own = np.arange(x[0] * x[1]).reshape(*x[:2], *[1] * (len(x) - 2)) * size
    return bool(((own <= indices) & (indices < own + size)).all())


def dropout(arrays: Arrays) -> bool:
    ratio, training = arrays.get("ratio", np.zeros(1)), arrays.get("training_mode", np.ones(1))
    if ratio.size != 1 or training.size != 1 or not same("dY", "mask")(arrays):
        return False
    return bool(0 <= float(ratio.reshape(())) < 1)


def recurrent(
    gates: int, states: tuple[str, ...], finals: tuple[str, ...], kept: str = ""
) -> Callable[..., bool]:
    def well_formed(arrays: Arrays, direction: str = "forward", layout: int = 0, **attributes: Any) -> bool:
        x, r = arrays["X"].shape, arrays["R"].shape
        if len(x) != 3 or len(r) != 3 or layout not in (0, 1):
            return False
        d, h = 2 if direction == "bidirectional" else 1, r[2]
        batch, steps = (x[0], x[1]) if layout else (x[1], x[0])
        if attributes.get("hidden_size", h) != h:
            return False
        all_, last = ((batch, steps, d), (batch, d)) if layout else ((steps, d, batch), (d, batch))
        expected = {
            "R": (d, gates * h, h),
            "W": (d, gates * h, x[2]),
            "B": (d, 2 * gates * h),
            "SL": (batch,),
        }
        expected |= {"P": (d, 3 * h)} | dict.fromkeys(states, (*all_, h)) | dict.fromkeys(finals, (*last, h))
        expected |= {kept: (*all_, gates * h)} if kept else {}
        if any(arrays[name].shape != shape for name, shape in expected.items() if name in arrays):
            return False
        lengths = arrays.get("SL", np.zeros(0))
        return bool(((lengths >= 0) & (lengths <= steps)).all())

    return well_formed


def vector(array: np.ndarray) -> bool:
    """Whether it could be a shape, of something that fits into memory."""
    return array.ndim == 1 and not ((array < 0) | (array >= HUGE)).any()


def in_range(indices: np.ndarray, length: int) -> bool:
    return bool(((-length <= indices) & (indices < length)).all())


def gather(arrays: Arrays, axis: int = 0) -> bool:
    shape, indices = arrays["shape"], arrays["indices"]
    if not vector(shape) or not -len(shape) <= axis < len(shape):
        return False
    x, axis = tuple(shape.tolist()), axis % len(shape)
    return arrays["dY"].shape == x[:axis] + indices.shape + x[axis + 1 :] and in_range(indices, x[axis])


def gather_elements(arrays: Arrays, axis: int = 0) -> bool:
    shape, indices = arrays["shape"], arrays["indices"]
    if not vector(shape) or len(shape) != indices.ndim or not has_axis(indices, axis):
        return False
    axis %= indices.ndim
    inside = all(n <= x for i, (n, x) in enumerate(zip(indices.shape, shape, strict=True)) if i != axis)
    return arrays["dY"].shape == indices.shape and inside and in_range(indices, int(shape[axis]))


def gather_nd(arrays: Arrays, batch_dims: int = 0) -> bool:
    shape, indices = arrays["shape"], arrays["indices"]
    if not vector(shape) or batch_dims < 0 or indices.ndim <= batch_dims:
        return False
    x, end = tuple(shape.tolist()), batch_dims + indices.shape[-1]
    if end > len(x) or indices.shape[-1] == 0 or indices.shape[:batch_dims] != x[:batch_dims]:
        return False
    inside = all(in_range(indices[..., i], x[batch_dims + i]) for i in range(indices.shape[-1]))
    return inside and arrays["dY"].shape == indices.shape[:-1] + x[end:]


def grid_sample(arrays: Arrays, **_: Any) -> bool:
    x, grid = arrays["X"].shape, arrays["Grid"].shape
    if len(x) != 4 or len(grid) != 4 or grid[0] != x[0] or grid[3] != 2:
        return False
    dy = arrays["dY"]
    return dy.shape == (*x[:2], *grid[1:3]) and (arrays["X"].size > 0 or dy.size == 0)


def slice_(arrays: Arrays) -> bool:
    shape, starts = arrays["shape"], arrays["starts"]
    axes = arrays.get("axes", np.arange(starts.size))
    steps = arrays.get("steps", np.ones(starts.size, int))
    if (
        not vector(shape)
        or starts.ndim != 1
        or len({a.shape for a in (starts, arrays["ends"], axes, steps)}) > 1
    ):
        return False
    rank = len(shape)
    if not in_range(axes, rank) or len(set((axes % max(rank, 1)).tolist())) < len(axes) or (steps == 0).any():
        return False
    y = shape.tolist()
    for start, end, axis, step in zip(starts, arrays["ends"], axes, steps, strict=True):
        y[axis] = len(range(*slice(int(start), int(end), int(step)).indices(int(shape[axis]))))
    return arrays["dY"].shape == tuple(y)


def layer(x_name: str, *statistics: str) -> Callable[..., bool]:
    def well_formed(arrays: Arrays, axis: int = -1) -> bool:
        x = arrays[x_name].shape
        if not has_axis(arrays[x_name], axis) or arrays["Y_grad"].shape != x:
            return False
        axis %= len(x)
        one = x[:axis] + (1,) * (len(x) - axis)
        scales = [arrays[name].shape for name in ("scale", "bias") if name in arrays]
        if x_name == "Y" and not arrays["scale"].all():
            return False
        return all(s == x[axis:] for s in scales) and all(arrays[name].shape == one for name in statistics)

    return well_formed


def loss(arrays: Arrays, reduction: str = "mean", ignore_index: int | None = None) -> bool:
    log_prob, label, dy = arrays["log_prob"], arrays["label"], arrays["dY"]
    if log_prob.ndim < 2 or label.shape != log_prob.shape[:1] + log_prob.shape[2:]:
        return False
    classes = log_prob.shape[1]
    if "weight" in arrays and arrays["weight"].shape != (classes,):
        return False
    if not (((label >= 0) & (label < classes)) | (label == ignore_index)).all():
        return False
    return dy.shape == label.shape if reduction == "none" else dy.size == 1


STATISTICS = ("mean", "inv_std_dev")
WELL_FORMED: dict[str, Callable[..., bool]] = {
    **{f"{name}Grad": same("dY", "X") for name in ("Relu", "QuickGelu", "FastGelu", "Gelu")},
    **{f"{name}Grad": same("dY", "Y") for name in ("Sigmoid", "Tanh", "LeakyRelu")},
    "BiasGeluGrad_dX": bias_gelu,
    **{f"{name}Grad": lambda arrays, axis=1: softmax(arrays, axis) for name in ("Softmax", "LogSoftmax")},
    **{f"{name}Grad_13": lambda arrays, axis=-1: softmax(arrays, axis) for name in ("Softmax", "LogSoftmax")},
    "InPlaceAccumulatorV2": accumulator,
    "BatchNormalizationGrad": lambda arrays, **_: channels(arrays, ("scale", "mean", "variance")),
    "BatchNormInternal": lambda arrays, **_: channels(arrays, ("scale", "B", "input_mean", "input_var")),
    "ConvGrad": conv,
    "MaxPoolGrad": pool,
    "AveragePoolGrad": pool,
    "DropoutGrad": dropout,
    "TrainableDropoutGrad": dropout,
    "GRUTraining": recurrent(3, (), ("H0",)),
    "GRUGrad": recurrent(3, ("HAll", "dHAll"), ("H0", "dHFinal"), "ZRH"),
    "LSTMTraining": recurrent(4, (), ("Ht0", "Ct0")),
    "LSTMGrad": recurrent(4, ("HAll", "CAll", "dHAll"), ("Ht0", "Ct0", "dHFinal", "dCFinal"), "iofc"),
    "GatherGrad": gather,
    "GatherElementsGrad": gather_elements,
    "GatherNDGrad": gather_nd,
    "GridSampleGrad": grid_sample,
    "SliceGrad": slice_,
    "LayerNormalizationGrad": layer("X", *STATISTICS),
    "SimplifiedLayerNormalizationGrad": layer("X", "inv_std_var"),
    "InvertibleLayerNormalizationGrad": layer("Y", "inv_std_var"),
    "SoftmaxCrossEntropyLossGrad": loss,
}


# Valid calls.


def is_well_formed(case: Case) -> bool:
    return WELL_FORMED[case.op_type](case.arrays, **case.attributes)


# Mutations.


def other_shapes(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array with other dimensions; what its values mean stays."""
    yield array[None]
    yield array[..., None]
    yield np.stack([array, array])
    if array.ndim == 0:
        return
    yield array[0] if len(array) else array[None, None]
    yield array[..., 0] if array.shape[-1] else array[None, None]
    yield array.reshape(-1)
    yield array[..., :0]
    for i, n in enumerate(array.shape):
        yield array.take([0] * min(n, 1), axis=i)
        yield np.concatenate([array, array.take([0], axis=i)], axis=i) if n else array[None]
        yield np.concatenate([array, array], axis=i)
        yield np.delete(array, -1, axis=i) if n else array[None]
        yield (
            np.concatenate([array, np.repeat(array.take([0], axis=i), 7, axis=i)], axis=i)
            if n
            else array[None]
        )
        for j in range(i):
            yield np.ascontiguousarray(array.swapaxes(i, j))
            # As many elements, otherwise arranged.
            if n % 2 == 0:
                shape = list(array.shape)
                shape[i], shape[j] = n // 2, shape[j] * 2
                yield array.reshape(shape)
    yield np.ascontiguousarray(array.T)


def other_values(name: str, array: np.ndarray) -> Iterator[np.ndarray]:
    """The array with other contents, where the contents are sizes, indices, labels or ratios."""
    if name == "ratio":
        for value in (1.0, 1.5, -0.5, np.nan):
            yield np.full_like(array, value)
    if name == "scale":
        yield np.zeros_like(array)
    if array.dtype.kind != "i" or not array.size:
        return
    values = [-1, -2, 0, 1, -1000, 1000, HUGE if array.dtype == np.int64 else 2**30]
    if name in ("shape", "X_shape"):
        # A size that could be meant is not tried: it would be computed.
        yield array + 1
        yield array[::-1].copy()
        values = [*values[:4], HUGE]
    for value in values:
        for place in {0, array.size // 2, array.size - 1}:
            changed = array.copy()
            changed.reshape(-1)[place] = value
            yield changed
    changed = array.copy()
    changed.reshape(-1)[-1] = array.reshape(-1)[0]
    yield changed


def other_types(array: np.ndarray) -> Iterator[np.ndarray]:
    for dtype in (np.float32, np.float64, np.int32, np.int64, np.bool_):
        if array.dtype != dtype:
            yield array.astype(dtype)


ATTRIBUTES: dict[str, list[Any]] = {
    "axis": [-4, -3, 2, 3, 7],
    "batch_dims": [-1, 1, 2, 3],
    "group": [-1, 0, 2, 3],
    "kernel_shape": [[1], [2, 2], [3, 3], [2, 3, 2], [0, 0], [-1], [4, 1], [5]],
    "strides": [[3], [2, 2], [0, 0], [0], [-1, -1], [1, 1, 1]],
    "pads": [[1, 1], [0, 1], [1, 1, 1, 1], [-1, -1], [-1, 0, 0, 0], [1]],
    "dilations": [[2], [2, 2], [0, 0], [-1], [1, 1, 1]],
    "hidden_size": [0, 1, 3, 4, -1],
    "layout": [1, 0, 2, -1],
    "direction": ["bidirectional", "forward"],
    "storage_order": [2, -1],
    "reduction": ["none", "mean"],
}


def mutations(case: Case) -> Iterator[Case]:
    """Every single change."""
    for name, array in case.arrays.items():
        changed = [*other_shapes(array), *other_values(name, array), *other_types(array)]
        for new in changed:
            yield replace(case, arrays={**case.arrays, name: new})


def wrong_attributes(case: Case) -> Iterator[Case]:
    operator = find_operator(case.op_type)
    for name in operator.attributes:
        for value in ATTRIBUTES.get(name, ()):
            yield replace(case, attributes={**case.attributes, name: value})
    for slot in operator.inputs:
        if slot.name in case.arrays and not slot.optional:
            yield replace(case, arrays={k: v for k, v in case.arrays.items() if k != slot.name})


def has_types(case: Case, original: Case) -> bool:
    return all(case.arrays[name].dtype == array.dtype for name, array in original.arrays.items())


def has_ranks(case: Case, original: Case) -> bool:
    return all(case.arrays[name].ndim == array.ndim for name, array in original.arrays.items())


def pairs(case: Case, generator: np.random.Generator, count: int) -> Iterator[Case]:
    """Two inputs changed at random, or one changed twice."""
    singles = [*mutations(case)]
    for _ in range(count):
        once = singles[generator.integers(len(singles))]
        name = str(generator.choice(list(case.arrays)))
        again = [*other_shapes(once.arrays[name])]
        yield replace(once, arrays={**once.arrays, name: again[generator.integers(len(again))]})


# Running.


class Session:
    """A session for a case's model; `run` says whether a call returned anything."""

    def __init__(self, case: Case, way: str, ranks: str, *, optimize: bool = True) -> None:
        options = quiet()
        if not optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self.error: Exception | None = None
        self._session = None
        try:
            model = make_model(case, ranks)
            if way in OTHERS:
                # The functions that a model carries, on an onnxruntime that knows nothing of ortgrad, or the
                # kernels that are registered with it.
                if way == "registered":
                    ortgrad.register(options)
                prepared = ortgrad.prepare(model, kernels="python").SerializeToString()
                self._session = onnxruntime.InferenceSession(
                    prepared, options, providers=["CPUExecutionProvider"]
                )
            else:
                self._session = ortgrad.InferenceSession(model, options, kernels=way)
        except (ortgrad.OrtgradError, RuntimeError, TypeError, *ORT_ERRORS) as error:
            self.error = error

    def run(self, case: Case) -> bool:
        if self._session is None:
            return False
        options = onnxruntime.RunOptions()
        options.log_severity_level = 4
        try:
            self._session.run(None, {name: np.asarray(a) for name, a in case.arrays.items()}, options)
        except (ortgrad.OrtgradError, RuntimeError, ValueError, *ORT_ERRORS) as error:
            self.error = error
            return False
        return True


class Result(NamedTuple):
    calls: int
    accepted: list[str]  # malformed ones
    refused: list[str]  # well-formed ones


def sweep(way: str, ranks: str, count: int | None, *, optimize: bool = True, seed: int = 0) -> Result:
    """Run mutated calls one way: every single change and as many random pairs, or `count` of these."""
    generator = np.random.default_rng(seed)
    calls, accepted, refused = 0, [], []
    for case in CASES:
        session = Session(case, way, ranks, optimize=optimize)
        works = session.run(case)
        # Bodies may need to know the number of dimensions, and then say so.
        if (
            not works
            and not (ranks == "undeclared" and way != "python")
            and "not known" not in str(session.error)
        ):
            refused.append(f"{case.name}: {session.error}")
        changed = [*mutations(case)]
        changed += [*pairs(case, generator, len(changed))]
        if count is not None:
            share = generator.choice(len(changed), min(len(changed), -(-count // len(CASES))), replace=False)
            changed = [changed[i] for i in share]
        for call in changed:
            if not (has_types(call, case) and is_well_formed(call)):
                calls += 1
                if session.run(call):
                    accepted.append(describe(case, call))
            elif works and (ranks == "undeclared" or has_ranks(call, case)) and not session.run(call):
                refused.append(f"{describe(case, call)}: {session.error}")
    return Result(calls, accepted, refused)


def describe(case: Case, call: Case) -> str:
    changed = []
    for name, array in call.arrays.items():
        if array is not case.arrays[name]:
            few = array.reshape(-1)[:6].tolist() if array.dtype.kind == "i" else ""
            was = list(case.arrays[name].shape)
            changed.append(f"{name} {array.dtype}{list(array.shape)} {few} for {was}")
    return f"{case.name} {call.attributes} {case.outputs}: {'; '.join(changed)}"


def test_every_operator_has_valid_calls() -> None:
    ours = {operator.name for operator in all_operators() if operator.domain == "com.microsoft"}
    assert {case.op_type for case in CASES} == set(WELL_FORMED) == ours
    assert all(is_well_formed(case) for case in CASES)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("way", [*WAYS, "plain"])
def test_no_malformed_call_returns_numbers(way: str, ranks: str) -> None:
    result = sweep(way, ranks, 1500)
    assert result.calls > 1000
    assert result.accepted == []
    assert result.refused == []


VECTORS = [
    (case, name)
    for case in CASES
    for name, array in case.arrays.items()
    if array.dtype.kind == "i" and array.ndim == 1
]


@pytest.mark.parametrize(("case", "name"), VECTORS, ids=lambda item: getattr(item, "name", item))
def test_matrices_in_place_of_vectors(case: Case, name: str) -> None:
    """onnxruntime's Concat aborts the process if an empty vector comes before a matrix."""
    for shape in ((-1, 1), (1, -1)):
        call = replace(case, arrays={**case.arrays, name: case.arrays[name].reshape(shape)})
        if not is_well_formed(call):
            for way in ("onnx", "plain"):
                assert not Session(case, way, "undeclared").run(call)


def test_nor_does_one_without_optimisation() -> None:
    result = sweep("auto", "symbolic", 1000, optimize=False)
    assert (result.accepted, result.refused) == ([], [])


def disagreements(count: int, seed: int = 0) -> tuple[int, list[str]]:
    """Compare the ways on about `count` changed calls, each in a model that declares what the call has.

    Bodies may need to know a shape, and then say so; such calls are not compared.
    """
    generator, calls, found = np.random.default_rng(seed), 0, []
    for number in generator.choice(len(CASES), min(len(CASES), count), replace=False):
        case = CASES[number]
        changed = [*mutations(case), *wrong_attributes(case)]
        for i in generator.choice(len(changed), min(len(changed), -(-count // len(CASES))), replace=False):
            call, ranks = changed[i], str(generator.choice(["static", "undeclared"]))
            sizes = call.arrays.get("X_shape", np.zeros(0))
            if sizes.size and np.abs(sizes).max() >= HUGE:
                continue  # the gradient would have that size
            sessions = {way: Session(call, way, ranks) for way in (*WAYS, *OTHERS)}
            answers = {way: session.run(call) for way, session in sessions.items()}
            calls += 1
            errors = {way: str(session.error) for way, session in sessions.items() if session.error}
            if len({*answers.values()}) > 1 and not any("not known" in text for text in errors.values()):
                found.append(f"{case.name} {ranks} {describe(case, call)} {answers} {errors}")
    return calls, found


def test_all_ways_refuse_the_same_calls() -> None:
    calls, found = disagreements(60)
    assert calls > 50
    assert found == []


@pytest.mark.parametrize("way", [*WAYS, *OTHERS])
@pytest.mark.parametrize(
    ("op_type", "attributes", "changed"),
    [
        ("ReluGrad", {}, {"X": np.int64}),
        ("LeakyReluGrad", {}, {"Y": np.float64}),
        ("LayerNormalizationGrad", {"axis": 0}, {"mean": np.int32}),
        ("SoftmaxCrossEntropyLossGrad", {}, {"dY": np.float64}),
        ("InPlaceAccumulatorV2", {}, {"value": np.bool_}),
        ("MaxPoolGrad", {"dilations": [2, 2]}, {}),
    ],
)
def test_calls_that_some_ways_took(
    way: str, op_type: str, attributes: dict[str, Any], changed: dict[str, Any]
) -> None:
    """Types that only a body can compute with, and a list of the wrong length."""
    case = next(c for c in reversed(CASES) if c.op_type == op_type and (changed or not c.attributes))
    arrays = {name: a.astype(changed.get(name, a.dtype)) for name, a in case.arrays.items()}
    assert fails(replace(case, arrays=arrays, attributes={**case.attributes, **attributes}), way, "static")


def fails(case: Case, way: str, ranks: str) -> bool:
    return not Session(case, way, ranks).run(case)


@pytest.mark.parametrize("way", WAYS)
def test_static_shapes_that_contradict_each_other(way: str) -> None:
    """They are an error before anything runs; where only values are wrong, it is one of the run."""
    generator = np.random.default_rng(1)
    for case in CASES:
        changed = [c for c in mutations(case) if has_types(c, case) and not is_well_formed(c)]
        for i in generator.choice(len(changed), 3):
            assert fails(changed[i], way, "static"), describe(case, changed[i])


@pytest.mark.parametrize("way", WAYS)
def test_wrong_attributes(way: str) -> None:
    generator = np.random.default_rng(2)
    for case in CASES:
        changed = [*wrong_attributes(case)]
        for i in generator.choice(len(changed), min(5, len(changed)), replace=False):
            call = changed[i]
            missing = any(not slot.optional and slot.name not in call.arrays for slot in slots(call))
            if missing or not is_well_formed(call):
                assert fails(call, way, "symbolic"), f"{case.name} {call.attributes} {list(call.arrays)}"


def slots(case: Case) -> tuple[Parameter, ...]:
    operator = find_operator(case.op_type)
    assert operator is not None
    return operator.inputs


def relu(**shapes: Any) -> onnx.ModelProto:
    node = nodes.relu_grad("dY", "X", "dX", name="the/node")
    return nodes.make_model(node, shapes=shapes)


def test_a_contradiction_is_found_when_the_model_is_made() -> None:
    with pytest.raises(ortgrad.NodeError, match=r"'the/node'.*X \[2, 3\] does not fit with dY \[\?, 1\]"):
        relu(dY=["N", 1], X=[2, 3])


def test_the_error_of_a_body_names_node_operator_and_reason() -> None:
    wrong = {"dY": numbers(1, 3), "X": numbers(2, 3)}
    session = ortgrad.InferenceSession(relu(dY=["N", "C"], X=["M", "D"]), quiet(), kernels="onnx")
    with pytest.raises(Exception) as caught:
        session.run(None, wrong)
    error = caught.value if isinstance(caught.value, ortgrad.KernelError) else failed_check(str(caught.value))
    assert error is not None
    assert (error.node, error.operator) == ("the/node", "ReluGrad")
    assert error.reason == "it requires dY [*S], X [*S]"
    assert (
        failed_check("Non-zero status code returned while running Add. Name:'x' Status Message: no") is None
    )


def test_built_models_compare_nothing_but_seeds() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,3,H,W] x, float[4,3,3,3] w) => (float[N,4,A,B] y) {
            c = Conv(x, w)
            r = Relu(c)
            y = Softmax <axis = 1> (r)
        }"""
    )
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    for function in built.functions:
        assert not [node.name for node in function.node if REQUIRES in node.name]
    expanded = ortgrad.prepare(built, kernels="onnx")
    names = [node.name for node in expanded.graph.node if REQUIRES in node.name]
    assert names
    assert all("y_grad input requires the shape of y" in name for name in names)


# Other bodies leave nodes behind for outputs that nobody asks for; onnxruntime drops those.
WHOLE = [
    case
    for case in CASES
    if not case.outputs and not case.op_type.startswith(("GRU", "LSTM", "SimplifiedLayer"))
]


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_unchecked_bodies_hold_nothing_that_nobody_reads(case: Case) -> None:
    """What is only needed for a comparison is not computed where there is none."""
    model = make_model(case, "symbolic")
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "ortgrad":
            attribute.s = json.dumps({**json.loads(attribute.s), "built": 1}).encode()
    try:
        graph = ortgrad.prepare(model, kernels="onnx").graph
    except ortgrad.NodeError as error:
        assert "not known" in str(error)
        return
    read = {name for node in nodes_of(graph) for name in node.input}
    read |= {value.name for node in nodes_of(graph) for a in node.attribute for value in a.g.output}
    read |= {value.name for value in graph.output}
    assert [node.name for node in graph.node if not read & set(node.output)] == []
    assert not [node.name for node in graph.node if REQUIRES in node.name]


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g)


@pytest.mark.parametrize("kernels", [*WAYS, "plain"])
def test_a_seed_has_the_shape_of_its_output(kernels: Any) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        g (float[N,C] x, float[C] w) => (float[M,D] y) { p = Mul(x, w) y = Relu(p) }"""
    )
    built = ortgrad.build_gradient_model(model, wrt=["x", "w"])
    session = (
        onnxruntime.InferenceSession(built.SerializeToString(), quiet(), providers=["CPUExecutionProvider"])
        if kernels == "plain"
        else ortgrad.InferenceSession(built, quiet(), kernels=kernels)
    )
    feeds = {"x": numbers(2, 3), "w": numbers(3)}
    for shape in ((1, 3), (2, 1), (1, 1), (3, 2), (2, 4)):
        with pytest.raises(Exception, match=r"input.*requires the shape of y"):
            session.run(None, {**feeds, "y_grad": numbers(*shape)})
    assert session.run(["x_grad"], {**feeds, "y_grad": numbers(2, 3)})[0].shape == (2, 3)


def test_an_empty_slice_is_not_the_whole_axis() -> None:
    """A start that lies before the first element, with a negative step, selects nothing."""
    feeds = {"dY": numbers(2), "shape": integers(3), "starts": integers(-1000), "ends": integers(-2000)}
    with pytest.raises(ValueError, match="the slice of"):
        find_operator("SliceGrad")(*feeds.values(), integers(0), integers(-2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, help="about so many calls for each way and rank (default: all)")
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=5, help="so many of the calls that went wrong")
    given = parser.parse_args()
    for way in given.ways:
        for ranks in RANKS:
            result = sweep(way, ranks, given.count, seed=given.seed)
            print(
                f"{way}, ranks {ranks}: {result.calls} malformed calls of {len(WELL_FORMED)} operators, "
                f"{len(result.accepted)} accepted; {len(result.refused)} well-formed calls refused"
            )
            for line in [*result.accepted[: given.show], *result.refused[: given.show]]:
                print("   ", line[:300])
    calls, found = disagreements(given.count or 5000, given.seed)
    print(f"all ways: {calls} calls, {len(found)} that some refuse and some take")
    for line in found[: given.show]:
        print("   ", line[:1000])


if __name__ == "__main__":
    main()
