"""Valid calls of every operator, and models of one call."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxruntime.capi.onnxruntime_pybind11_state as ort_state

from ortgrad import nodes
from ortgrad.compiled import machine_code
from ortgrad.operators.declaration import find_operator

Arrays = dict[str, np.ndarray]


WAYS = ("python", "onnx", "auto", *(["compiled"] if machine_code.is_installed() else []))


ORT_ERRORS: tuple[type[Exception], ...] = tuple(
    e for e in vars(ort_state).values() if isinstance(e, type) and issubclass(e, Exception)
)


@dataclass(frozen=True)
class Case:
    """A call: the operator, its attributes and inputs by name; `outputs` are those that are asked for."""

    op_type: str
    arrays: Arrays
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    name: str = ""


def numbers(*shape: int) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(repr(shape).encode()))
    return np.asarray(generator.uniform(0.1, 0.9, shape), np.float32)


def integers(*values: Any, dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype)


def elementwise() -> Iterator[Case]:
    for op_type, second in (
        *((f"{name}Grad", "X") for name in ("Relu", "QuickGelu", "FastGelu", "Gelu")),
        *((f"{name}Grad", "Y") for name in ("Sigmoid", "Tanh", "LeakyRelu")),
    ):
        yield Case(op_type, {"dY": numbers(2, 3), second: numbers(2, 3)})
        yield Case(op_type, {"dY": numbers(4), second: numbers(4)})
    yield Case("BiasGeluGrad_dX", {"dY": numbers(2, 3, 4), "X": numbers(2, 3, 4), "B": numbers(4)})
    buffers = {"accumulation_buffer": numbers(2, 3), "value": numbers(2, 3)}
    yield Case("InPlaceAccumulatorV2", {**buffers, "overwrite_flag": np.array([False])})
    yield Case("InPlaceAccumulatorV2", buffers, outputs=("updated_flag",))
    for op_type in ("DropoutGrad", "TrainableDropoutGrad"):
        full = {
            "mask": np.ones((2, 3), bool),
            "ratio": np.array(0.25, np.float32),
            "training_mode": np.array(True),
        }
        yield Case(op_type, {"dY": numbers(2, 3), **full})
        yield Case(op_type, {"dY": numbers(2, 3), "mask": np.ones((2, 3), bool)})


def normalizations() -> Iterator[Case]:
    for op_type in ("SoftmaxGrad", "LogSoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad_13"):
        for axis in (1, -1, 0):
            yield Case(op_type, {"dY": numbers(2, 3, 4), "Y": numbers(2, 3, 4)}, {"axis": axis})
    c = [numbers(3) for _ in range(4)]
    x = {"dY": numbers(2, 3, 4), "X": numbers(2, 3, 4)}
    names = ("scale", "mean", "variance")
    yield Case("BatchNormalizationGrad", {**x, **dict(zip(names, c, strict=False))})
    yield Case(
        "BatchNormalizationGrad",
        {"dY": numbers(4, 3), "X": numbers(4, 3), **dict(zip(names, c, strict=False))},
        outputs=("bias_grad",),
    )
    yield Case(
        "BatchNormInternal",
        {"X": numbers(2, 3, 4, 2), **dict(zip(("scale", "B", "input_mean", "input_var"), c, strict=True))},
    )
    for axis, inner, outer in ((-1, (4,), (2, 3, 1)), (1, (3, 4), (2, 1, 1)), (0, (2, 3, 4), (1, 1, 1))):
        full = {"Y_grad": numbers(2, 3, 4), "X": numbers(2, 3, 4), "scale": numbers(*inner)}
        inv = numbers(*outer)
        yield Case("LayerNormalizationGrad", {**full, "mean": inv, "inv_std_dev": inv}, {"axis": axis})
        yield Case("SimplifiedLayerNormalizationGrad", {**full, "inv_std_var": inv}, {"axis": axis})
        y = {"Y_grad": full["Y_grad"], "Y": full["X"], "scale": full["scale"], "bias": full["scale"]}
        yield Case("InvertibleLayerNormalizationGrad", {**y, "inv_std_var": inv}, {"axis": axis})
    full = {"Y_grad": numbers(2, 4), "X": numbers(2, 4), "scale": numbers(4)}
    yield Case(
        "LayerNormalizationGrad",
        {**full, "mean": numbers(2, 1), "inv_std_dev": numbers(2, 1)},
        outputs=("bias_grad",),
    )


def windowed() -> Iterator[Case]:
    yield Case("ConvGrad", {"dY": numbers(2, 4, 3, 2), "X": numbers(2, 3, 5, 4), "W": numbers(4, 3, 3, 3)})
    attributes = {"group": 2, "strides": [2], "pads": [1, 0], "kernel_shape": [2]}
    yield Case("ConvGrad", {"dY": numbers(2, 4, 3), "X": numbers(2, 2, 6), "W": numbers(4, 1, 2)}, attributes)
    same_ = {"auto_pad": "SAME_UPPER", "strides": [2, 1], "kernel_shape": [3, 3]}
    arrays = {"dY": numbers(1, 2, 3, 4), "X": numbers(1, 2, 5, 4), "W": numbers(2, 2, 3, 3)}
    yield Case("ConvGrad", arrays, same_)
    for output in ("dX", "dW", "dB"):
        yield Case("ConvGrad", arrays, same_, outputs=(output,))
    for attributes, x, y in (
        ({"kernel_shape": [2, 2], "strides": [2, 2]}, (2, 3, 4, 6), (2, 3, 2, 3)),
        ({"kernel_shape": [3], "strides": [2], "ceil_mode": 1}, (2, 2, 6), (2, 2, 3)),
        ({"kernel_shape": [3], "pads": [1, 1]}, (1, 2, 4), (1, 2, 4)),
        ({"kernel_shape": [2], "dilations": [2]}, (2, 2, 5), (2, 2, 3)),
        ({"kernel_shape": [2], "auto_pad": "SAME_LOWER"}, (2, 1, 5), (2, 1, 5)),
    ):
        shape = np.array(x, np.int64)
        yield Case("AveragePoolGrad", {"dY": numbers(*y), "X_shape": shape}, attributes)
        size = math.prod(x[2:])
        starts = np.arange(x[0] * x[1]).reshape(*x[:2], *[1] * (len(x) - 2)) * size
        indices = starts + np.arange(math.prod(y[2:])).reshape(y[2:])
        yield Case("MaxPoolGrad", {"dY": numbers(*y), "Indices": indices, "X_shape": shape}, attributes)
    yield Case("MaxPoolGrad", {"dY": numbers(*y), "Indices": indices, "X_shape": shape})


def sampled() -> Iterator[Case]:
    arrays = {"dY": numbers(2, 3, 2, 4), "X": numbers(2, 3, 4, 5), "Grid": numbers(2, 2, 4, 2)}
    for mode, padding in (("linear", "zeros"), ("nearest", "border"), ("cubic", "reflection")):
        yield Case("GridSampleGrad", arrays, {"mode": mode, "padding_mode": padding, "align_corners": 1})
    for output in ("dX", "dGrid"):
        yield Case("GridSampleGrad", arrays, outputs=(output,))


def cells(
    op_type: str,
    *,
    layout: int,
    direction: str,
    full: bool,
    outputs: tuple[str, ...] = (),
    t: int = 4,
    n: int = 3,
    i: int = 5,
    h: int = 2,
) -> Case:
    gates, d = 3 if op_type.startswith("GRU") else 4, 2 if direction == "bidirectional" else 1
    all_, last = ((n, t, d), (n, d)) if layout else ((t, d, n), (d, n))
    arrays = {
        "X": numbers(n, t, i) if layout else numbers(t, n, i),
        "W": numbers(d, gates * h, i),
        "R": numbers(d, gates * h, h),
    }
    if full:
        arrays |= {"B": numbers(d, 2 * gates * h), "SL": integers(4, 2, 3, dtype=np.int32)}
        arrays |= {name: numbers(*last, h) for name in (("H0",) if gates == 3 else ("Ht0", "Ct0"))}
        arrays |= {} if gates == 3 else {"P": numbers(d, 3 * h)}
    if op_type.endswith("Grad"):
        kept = {"ZRH": 3 * h, "HAll": h} if gates == 3 else {"iofc": 4 * h, "HAll": h, "CAll": h}
        arrays |= {name: numbers(*all_, size) for name, size in kept.items()} | {"dHAll": numbers(*all_, h)}
        if full:
            arrays |= {name: numbers(*last, h) for name in ("dHFinal", "dCFinal")[: gates - 2]}
    attributes: dict[str, Any] = {"direction": direction, "layout": layout}
    return Case(op_type, arrays, attributes | ({"hidden_size": h} if full else {}), outputs)


def recurrences() -> Iterator[Case]:
    for op_type in ("GRUTraining", "GRUGrad", "LSTMTraining", "LSTMGrad"):
        some = () if op_type.endswith("Training") else ("dX", "dW", "dR", "dB")
        yield cells(op_type, layout=0, direction="forward", full=False, outputs=some)
        yield cells(op_type, layout=1, direction="bidirectional", full=True)
        yield cells(op_type, layout=0, direction="reverse", full=True)
    yield cells("GRUGrad", layout=0, direction="forward", full=False, outputs=("dB",))
    yield cells("LSTMGrad", layout=0, direction="forward", full=False, outputs=("dB",))


def indexed() -> Iterator[Case]:
    shape = integers(3, 4, 5)
    yield Case("GatherGrad", {"shape": shape, "indices": integers(0, 2), "dY": numbers(2, 4, 5)})
    rows = integers([0, -1], [3, 1], [2, 2])
    yield Case("GatherGrad", {"shape": shape, "indices": rows, "dY": numbers(3, 3, 2, 5)}, {"axis": 1})
    yield Case(
        "GatherGrad", {"shape": shape, "indices": integers(0, 4), "dY": numbers(3, 4, 2)}, {"axis": -1}
    )
    yield Case(
        "GatherElementsGrad",
        {"dY": numbers(2, 3), "shape": integers(3, 4), "indices": integers([0, 1, 2], [1, 0, 2])},
    )
    arrays = {"dY": numbers(3, 2), "shape": integers(3, 4), "indices": integers([0, 1], [1, 3], [2, 0])}
    yield Case("GatherElementsGrad", arrays, {"axis": -1})
    pairs = integers([0, 1], [2, 3])
    yield Case("GatherNDGrad", {"shape": shape, "indices": pairs, "dY": numbers(2, 5)})
    batch = integers([[0], [1]], [[2], [3]], [[1], [1]])
    yield Case("GatherNDGrad", {"shape": shape, "indices": batch, "dY": numbers(3, 2, 5)}, {"batch_dims": 1})
    bounds = {
        "starts": integers(1, -1),
        "ends": integers(3, 0),
        "axes": integers(0, 2),
        "steps": integers(1, -2),
    }
    yield Case("SliceGrad", {"dY": numbers(2, 4, 2), "shape": shape, **bounds})
    yield Case(
        "SliceGrad", {"dY": numbers(2, 4, 5), "shape": shape, "starts": integers(1), "ends": integers(3)}
    )
    for reduction in ("mean", "sum", "none"):
        dy = numbers(2, 3) if reduction == "none" else numbers()
        arrays = {"dY": dy, "log_prob": numbers(2, 4, 3), "label": integers([0, 1, 3], [2, 2, -1])}
        yield Case(
            "SoftmaxCrossEntropyLossGrad",
            {**arrays, "weight": numbers(4)},
            {"reduction": reduction, "ignore_index": -1},
        )
    arrays = {"dY": numbers(), "log_prob": numbers(2, 4), "label": integers(0, 3, dtype=np.int32)}
    yield Case("SoftmaxCrossEntropyLossGrad", arrays)


def all_cases() -> list[Case]:
    cases = [*elementwise(), *normalizations(), *windowed(), *sampled(), *recurrences(), *indexed()]
    return [replace(case, name=f"{i}-{case.op_type}") for i, case in enumerate(cases)]


CASES = all_cases()


def make_model(case: Case, ranks: str, original: Case | None = None) -> onnx.ModelProto:
    """A model of the call that says nothing of sizes, or only how many dimensions the inputs have.

    With "static", it says of the inputs what they are.
    """
    declared = original or case
    operator = find_operator(case.op_type)
    build = getattr(nodes, operator.builder_name)
    outputs = [
        slot.name if not case.outputs or slot.name in case.outputs or not slot.optional else None
        for slot in operator.outputs
    ]
    if operator.name == "LSTMGrad" and "P" not in case.arrays:
        outputs[-1] = None
    node = build(**{name: name for name in case.arrays}, outputs=outputs, name="the node", **case.attributes)

    def info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        shape: Any = None
        if ranks == "symbolic":
            shape = [f"{name}_{i}" for i in range(declared.arrays[name].ndim)]
        elif ranks == "static":
            shape = array.shape
        element = onnx.helper.np_dtype_to_tensor_dtype(declared.arrays[name].dtype)
        return onnx.helper.make_tensor_value_info(name, element, shape)

    names = [name for name in outputs if name]
    types = {slot.name: 9 if slot.type == "bool" else 1 for slot in operator.outputs}
    graph = onnx.helper.make_graph(
        [node],
        "call",
        [info(name, array) for name, array in case.arrays.items()],
        [onnx.helper.make_tensor_value_info(name, types[name], None) for name in names],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(operator.domain, 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options
