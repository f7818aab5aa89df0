"""Operators whose inputs may have different floating-point types, in every combination onnxruntime runs.

The oracle is onnx's reference evaluator on the same model in double, differentiated by differences.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi import onnxruntime_pybind11_state

import ortgrad
from ortgrad.autodiff.rules import all_rules

FLOATS = {
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
}
NUMPY: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
REFUSALS = tuple(
    getattr(onnxruntime_pybind11_state, name) for name in ("Fail", "InvalidGraph", "NotImplemented")
)
ERRORS = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 1e-3, "float64": 1e-3}

STEP = 2.0**-10


@dataclass(frozen=True)
class Case:
    """A node: `inputs` are (type variable or None for int64, values); outputs follow a type variable."""

    op_type: str
    inputs: Sequence[tuple[str | None, np.ndarray]]
    output: str = "T"
    attributes: dict[str, Any] = field(default_factory=dict)
    # Inputs towards which there is a gradient.
    wrt: Sequence[int] = (0,)
    opset: int = 21
    outputs: int = 1

    @property
    def variables(self) -> list[str]:
        return list(dict.fromkeys([*(v for v, _ in self.inputs if v), self.output]))


def values(*shape: int, seed: int = 0) -> np.ndarray:
    # Numbers that all types hold exactly.
    return np.random.default_rng(seed).integers(-12, 13, shape) / 8


positive = functools.partial(lambda *shape, seed=0: np.abs(values(*shape, seed=seed)) + 0.5)
NORMALIZED = [("T", values(2, 3, 4)), ("T1", values(3, seed=1)), ("T1", values(3, seed=2))]
STATISTICS = [("T2", values(3, seed=3)), ("T2", positive(3, seed=4))]
CASES = {
    "Attention": Case(
        "Attention",
        [("T1", values(1, 2, 3, 4)), ("T1", values(1, 2, 3, 4, seed=1)), ("T2", values(1, 2, 3, 4, seed=2))],
        output="T1",
        wrt=(0, 1, 2),
        opset=23,
    ),
    "BatchNormalization": Case("BatchNormalization", [*NORMALIZED, *STATISTICS], wrt=(0, 1, 2, 3, 4)),
    "BatchNormalization, opset 14": Case(
        "BatchNormalization", [*NORMALIZED, *STATISTICS], wrt=(0, 1), opset=14
    ),
    "BatchNormalization, training": Case(
        "BatchNormalization",
        [*NORMALIZED, *STATISTICS],
        wrt=(0, 1, 2),
        attributes={"training_mode": 1},
        outputs=3,
    ),
    "Dropout": Case("Dropout", [("T", values(2, 3)), ("T1", np.array(0.5))]),
    "GridSample": Case(
        "GridSample",
        [("T1", values(1, 2, 4, 4)), ("T2", values(1, 3, 3, 2, seed=1) / 2 + 0.03125)],
        output="T1",
        wrt=(0, 1),
    ),
    "LayerNormalization": Case(
        "LayerNormalization",
        [("T", values(2, 3, 4)), ("T", values(4, seed=1)), ("T", values(4, seed=2))],
        wrt=(0, 1, 2),
    ),
    "LayerNormalization, scale of another type": Case(
        "LayerNormalization",
        [("T", values(2, 3, 4)), ("T1", values(4, seed=1)), ("T1", values(4, seed=2))],
        output="T1",
        wrt=(0, 1, 2),
    ),
    "OneHot": Case(
        "OneHot",
        [("T1", np.array([0.0, 2.0])), ("T2", np.array(3.0)), ("T3", np.array([0.25, 2.0]))],
        output="T3",
        wrt=(2,),
    ),
    "Pow": Case("Pow", [("T", positive(2, 3)), ("T1", values(2, 3, seed=1))], wrt=(0, 1)),
    "Pow, broadcast": Case("Pow", [("T", positive(2, 3)), ("T1", values(1, seed=1))], wrt=(0, 1)),
    "Pow, broadcast the other way": Case(
        "Pow", [("T", positive(1)), ("T1", values(2, 3, seed=1))], wrt=(0, 1)
    ),
    "RMSNormalization": Case(
        "RMSNormalization",
        [("T", values(2, 3, 4)), ("V", values(4, seed=1))],
        output="V",
        wrt=(0, 1),
        opset=23,
    ),
    "Resize, linear": Case(
        "Resize",
        [("T1", values(1, 2, 4, 5)), ("T2", np.zeros(8)), (None, np.array([1, 1, 1.5, 2], np.float32))],
        output="T1",
        attributes={"mode": "linear"},
    ),
    "Resize, crop": Case(
        "Resize",
        [
            ("T1", values(1, 2, 4, 5)),
            ("T2", np.array([0, 0, 0.125, 0.25, 1, 1, 0.75, 1])),
            (None, np.array([1, 1, 1.5, 2], np.float32)),
        ],
        output="T1",
        attributes={"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"},
    ),
}
# These have no two floating-point inputs of different types, or are tested below or with quantized models.
ELSEWHERE = {
    "Cast",
    "CastLike",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "OptionalGetElement",
    "QuantizeLinear",
}


def test_every_operator_with_several_types_has_a_case() -> None:
    names = {f"tensor({name})" for name in ("float", "double", "float16", "bfloat16")}
    missing = []
    for (domain, op_type), rule in all_rules().items():
        if domain or rule.function is None or not onnx.defs.has(op_type):
            continue
        schema = onnx.defs.get_schema(op_type)
        floating = {c.type_param_str for c in schema.type_constraints if names & set(c.allowed_type_strs)}
        used = {p.type_str for p in (*schema.inputs, *schema.outputs)} & (floating | names)
        if len(used) > 1:
            missing.append(op_type)
    covered = {case.op_type for case in CASES.values()} | ELSEWHERE
    assert set(missing) <= covered


def model_of(case: Case, types: dict[str, str]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    feeds, infos = {}, []
    for name, (variable, array) in zip("abcdefgh", case.inputs, strict=False):
        kind = types[variable] if variable else array.dtype.name
        feeds[name] = array.astype(NUMPY.get(kind, kind))
        infos.append(
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), array.shape
            )
        )
    node = helper.make_node(case.op_type, list(feeds), list("yzw"[: case.outputs]), **case.attributes)
    output = helper.make_tensor_value_info("y", FLOATS[types[case.output]], None)
    graph = helper.make_graph([node], "graph", infos, [output])
    imports = [helper.make_opsetid("", case.opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def combinations(case: Case) -> Iterator[dict[str, str]]:
    for kinds in itertools.product(FLOATS, repeat=len(case.variables)):
        if len(set(kinds)) <= 2:
            yield dict(zip(case.variables, kinds, strict=True))


def runs_forward(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> bool:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        session.run_with_ort_values(None, ort_values(feeds))
    except REFUSALS:
        return False
    return True


def ort_values(feeds: dict[str, np.ndarray]) -> dict[str, onnxruntime.OrtValue]:
    return {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array,
            helper.np_dtype_to_tensor_dtype(array.dtype),
        )
        for name, array in feeds.items()
    }


def derivative(case: Case, seed: np.ndarray, i: int, direction: np.ndarray) -> float:
    """Along a direction of the i-th input, of the model in double."""
    model, feeds = model_of(case, dict.fromkeys(case.variables, "float64"))
    evaluator = ReferenceEvaluator(model)
    name = "abcdefgh"[i]

    def total(step: float) -> float:
        (y,) = evaluator.run(["y"], {**feeds, name: feeds[name] + step * direction})
        return float(np.sum(y.astype(np.float64) * seed))

    return (total(STEP) - total(-STEP)) / (2 * STEP)


def with_casts(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with double outputs, which NumPy can hold."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for output in copy.graph.output:
        cast = helper.make_node("Cast", [output.name], [f"{output.name}_double"], to=TensorProto.DOUBLE)
        copy.graph.node.append(cast)
        output.name = f"{output.name}_double"
        output.type.tensor_type.elem_type = TensorProto.DOUBLE
    return copy


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    checked = 0
    for types in combinations(case):
        model, feeds = model_of(case, types)
        if not runs_forward(model, feeds):
            continue
        checked += 1
        wrt = ["abcdefgh"[i] for i in case.wrt]
        with caplog.at_level(logging.WARNING):
            built = ortgrad.build_gradient_model(model, wrt=wrt)
        assert not caplog.records
        onnx.checker.check_model(built, full_check=True)
        for output, i in zip(built.graph.output[-len(wrt) :], case.wrt, strict=True):
            kind = types[case.inputs[i][0] or ""]
            assert output.type.tensor_type.elem_type == FLOATS[kind], (types, output.name)
        reference, exact = model_of(case, dict.fromkeys(case.variables, "float64"))
        (y,) = ReferenceEvaluator(reference).run(["y"], exact)
        seed = values(*y.shape, seed=9)
        feeds["y_grad"] = seed.astype(NUMPY.get(types[case.output], types[case.output]))
        for kernels in ("python", "onnx", "auto"):
            session = ortgrad.InferenceSession(with_casts(built), kernels=kernels)
            results = session.run_with_ort_values(
                [f"{target}_grad_double" for target in wrt], ort_values(feeds)
            )
            for result, i in zip(results, case.wrt, strict=True):
                direction = values(*case.inputs[i][1].shape, seed=7)
                expected = derivative(case, seed, i, direction)
                actual = float(np.sum(result.numpy() * direction))
                scale = float(np.sum(np.abs(result.numpy() * direction))) + 1
                worst = max(ERRORS[kind] for kind in types.values())
                assert abs(actual - expected) <= worst * scale, (types, kernels, i, actual, expected)
    assert checked >= 1
