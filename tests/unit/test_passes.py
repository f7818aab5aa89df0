"""The contract of passes, for all of them: `ortgrad.passes` states it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from onnx import parser
from support.passes import check_uses

import ortgrad
from ortgrad import dialects, lowering, passes
from ortgrad.dialects.gradient_operator import expand_gradient_operator
from ortgrad.dialects.training_nodes import adopt_training_nodes
from ortgrad.dialects.translate import translate_training_operators
from ortgrad.graph.serialization import read, to_proto
from ortgrad.lowering.biases import join_biases
from ortgrad.lowering.columns import expand_with_columns
from ortgrad.lowering.depthwise import use_depthwise
from ortgrad.lowering.fold_dequantized import fold_dequantized
from ortgrad.lowering.forward_convolutions import use_forward_convolutions
from ortgrad.lowering.fusion.copies import drop_copies
from ortgrad.lowering.fusion.fuse import fuse
from ortgrad.lowering.max_pools import use_max_pool
from ortgrad.lowering.moments import use_moments
from ortgrad.lowering.open_losses import open_losses
from ortgrad.lowering.pointwise import use_pointwise
from ortgrad.lowering.share_branches import share_branches
from ortgrad.lowering.single_channels import expand_single_channels
from ortgrad.lowering.slices import join_slices
from ortgrad.lowering.transposed_products import use_transposed_products
from ortgrad.lowering.ways import expand_constant
from ortgrad.lowering.winograd import use_winograd
from ortgrad.operators.schema import with_schemas
from ortgrad.passes.absent_inputs import drop_empty_inputs
from ortgrad.passes.attach import attach, detach
from ortgrad.passes.complete import complete
from ortgrad.passes.deduplicate import deduplicate
from ortgrad.passes.expand import expand
from ortgrad.passes.expand_unsupported import expand_unsupported
from ortgrad.passes.fold_ifs import fold_ifs
from ortgrad.passes.fold_normalizations import fold_normalizations
from ortgrad.passes.inline import inline
from ortgrad.passes.opset import at_minimum_opset
from ortgrad.passes.pads import pad_all_axes
from ortgrad.passes.portable import make_portable
from ortgrad.passes.resolve_sequences import resolve_sequences
from ortgrad.passes.separate_targets import separate_targets
from ortgrad.passes.slices import drop_whole_slices
from ortgrad.passes.state_pool_sizes import state_pool_sizes
from ortgrad.passes.tidy import remove_unused, sort
from ortgrad.pipelines import opening, preparation
from ortgrad.shapes.inference import infer_types

ROOMS = (passes, lowering, dialects)


def head(opset: int = 21) -> str:
    domains = f'"" : {opset}, "com.microsoft" : 1, "ai.onnx.preview.training" : 1'
    return f"<ir_version: 10, opset_import: [{domains}]>"


@dataclass
class Case:
    """A model in which a pass finds something to change, after the passes that it needs before it."""

    apply: Callable[..., ir.Model]
    text: str
    settings: dict[str, Any] = field(default_factory=dict)
    before: tuple[Callable[[ir.Model], object], ...] = ()
    # If gradients with respect to these are built first.
    wrt: tuple[str, ...] = ()
    opset: int = 21
    # Whether a second application changes nothing.
    idempotent: bool = True
    # The operators that the pass puts into the model.
    puts: tuple[str, ...] = ()

    def model(self) -> ir.Model:
        proto = parser.parse_model(
            self.text if self.text.startswith("<") else f"{head(self.opset)} {self.text}"
        )
        if self.wrt:
            proto = ortgrad.build_gradient_model(proto, wrt=self.wrt)
        model = read(proto)
        for each in self.before:
            each(model)
        return model


def everything(*_: object) -> bool:
    return True


def convolution(x: str, w: str, y: str, attributes: str = "") -> str:
    return f"g (float[{x}] x, float[{w}] w) => (float[{y}] y) {{ y = Conv{attributes}(x, w) }}"


RELU_GRAD = "g (float[4] dy, float[4] x) => (float[4] dx) { dx = com.microsoft.ReluGrad(dy, x) }"
TANH = "g (float[4] x) => (float[4] y) { y = Tanh(x) }"
FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
g (float[4] x) => (float[4] y) { a = own.twice(x) y = own.twice(a) }
<domain: "own", opset_import: ["" : 18]> twice (a) => (b) { b = Add(a, a) }"""
# onnx converts it when it is inlined.
OLD_FUNCTION = """<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
g (float[4] x) => (float[4] y) { y = own.same(x) }
<domain: "own", opset_import: ["" : 12]>
same (a) => (b) { c = Unsqueeze<axes = [0]>(a) b = Squeeze<axes = [0]>(c) }"""
BRANCH = """g (bool c, float[4,4] x) => (float[4,4] y) { y = If(c) <
    then_branch = t () => (float[4,4] a) { p = Exp(x) q = Tanh(p) a = MatMul(q, p) },
    else_branch = e () => (float[4,4] b) { b = Neg(x) }> }"""
MOMENTS = """g (float[5,3,4,5] x) => (float[5,3,4,5] y) <int64[2] axes = {2, 3}, float e = {0.1}> {
    m = ReduceMean(x, axes) c = Sub(x, m) s = Mul(c, c) v = ReduceMean(s, axes) w = Add(v, e)
    r = Sqrt(w) i = Reciprocal(r) y = Mul(c, i) }"""
OPENED = opening.OPENING
CASES = [
    Case(
        drop_empty_inputs,
        """g (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[0] roi = {}, float[4] scales = {1, 1, 2, 2}>
        { y = Resize(x, roi, scales) }""",
    ),
    Case(attach, TANH, wrt=("x",), before=(detach,)),
    Case(detach, TANH, wrt=("x",)),
    Case(complete, RELU_GRAD),
    Case(deduplicate, "g (float[4] x) => (float[4] y) { a = Exp(x) b = Exp(x) y = Add(a, b) }"),
    Case(expand, RELU_GRAD, {"choose": everything}, before=(complete,)),
    Case(
        expand_unsupported,
        "g (float[2,5,4] x, float[4] b) => (float[2,5,4] y) { y = com.microsoft.BiasAdd(x, b, x) }",
        {"targets": ["x"], "outputs": ["y"]},
        before=(infer_types,),
    ),
    Case(
        fold_ifs,
        """g (float[4] x) => (float[4] y) <bool c = {1}> { y = If(c) <
        then_branch = t () => (float[4] a) { p = Exp(x) a = Neg(p) },
        else_branch = e () => (float[4] b) { p = Sin(x) b = Neg(p) }> }""",
    ),
    Case(
        fold_normalizations,
        """g (float[1,2,9,9] x, float[3,2,3,3] w, float[3] s, float[3] b, float[3] m, float[3] v)
        => (float[1,3,7,7] y) { c = Conv(x, w) y = BatchNormalization(c, s, b, m, v) }""",
        {"targets": ["w"], "outputs": ["y"]},
        before=(infer_types,),
    ),
    Case(inline, FUNCTION, {"criteria": everything}),
    Case(inline, OLD_FUNCTION, {"criteria": everything}),
    Case(at_minimum_opset, "g (float[4,3] x) => (float[4,1] y) { y = ReduceMean<axes = [1]>(x) }", opset=13),
    Case(
        pad_all_axes,
        """g (float[2,3] x) => (float[2,5] y) <int64[2] pads = {1, 1}, int64[1] axes = {1}>
        { y = Pad(x, pads, , axes) }""",
        puts=("Pad",),
    ),
    Case(make_portable, RELU_GRAD, before=(complete,)),
    Case(
        make_portable,
        "g (float[2,4] dy, float[2,4] y) => (float[2,4] dx) { dx = com.microsoft.LogSoftmaxGrad(dy, y) }",
        before=(complete,),
    ),
    Case(
        resolve_sequences,
        """g (float[4] x, float[4] z) => (float[4] y) <int64 one = {1}>
        { s = SequenceConstruct(x, z) y = SequenceAt(s, one) }""",
    ),
    Case(
        separate_targets,
        "g (float[4] x) => (float[2] y) { a, b = Split<num_outputs = 2>(x) y = Add(a, b) }",
        {"wrt": ["a"]},
    ),
    Case(
        drop_whole_slices,
        """g (float[4,3] x) => (float[4,3] y)
        <int64[1] start = {0}, int64[1] end = {9223372036854775807}, int64[1] axis = {1}>
        { a = Slice(x, start, end, axis) y = Neg(a) }""",
        {"kept": ()},
    ),
    Case(
        join_slices,
        """g (float[4,6] x) => (float y)
        <int64[1] axis = {1}, int64[1] a = {0}, int64[1] b = {2}, int64[1] c = {6}>
        { s = Slice(x, a, b, axis) t = Slice(x, b, c, axis) u = Exp(s) v = Sin(t)
        p = ReduceSum<keepdims = 0>(u) q = ReduceSum<keepdims = 0>(v) y = Add(p, q) }""",
        wrt=("x",),
        puts=("Concat",),
    ),
    Case(
        state_pool_sizes,
        """g (float[1,1,4] x) => (float[1,1,2] y)
        { y = MaxPool<kernel_shape = [1], strides = [3], ceil_mode = 1, pads = [0, 1]>(x) }""",
        before=(infer_types,),
        idempotent=False,
    ),
    Case(sort, "g (float[4] x) => (float[4] y) { y = Neg(a) a = Exp(x) }"),
    Case(remove_unused, "g (float[4] x) => (float[4] y) { y = Neg(x) a = Exp(x) b = Sin(a) }"),
    Case(
        adopt_training_nodes,
        """g (float[1,1,4] x, float[1,1,2] dy) => (float[1,1,4] dx)
        { y, i = MaxPool<kernel_shape = [2], strides = [2]>(x) dx = MaxPoolGrad(dy, i) }""",
    ),
    Case(
        translate_training_operators,
        "g (float[4] x, float s) => (float[4] y) { y = com.microsoft.Scale(x, s) }",
    ),
    Case(
        expand_gradient_operator,
        """g (float[4] x) => (float[4] dx)
        { y = Tanh(x) dx = ai.onnx.preview.training.Gradient<xs = ["x"], y = "y">(x) }""",
    ),
    Case(
        join_biases,
        """g (float[1,2,5,5] x, float[3,2,3,3] w, float[3,1,1] b) => (float[1,3,3,3] y)
        { c = Conv(x, w) y = Add(c, b) }""",
        before=(infer_types,),
    ),
    Case(
        expand_with_columns,
        convolution("2,3,8,8", "16,3,3,3", "2,16,6,6"),
        {"choose": everything},
        wrt=("x", "w"),
        before=OPENED,
    ),
    Case(
        use_depthwise,
        convolution("1,8,6,6", "8,1,3,3", "1,8,4,4", "<group = 8>"),
        wrt=("x", "w"),
        before=OPENED,
        puts=("DepthwiseConv", "DepthwiseConvGrad"),
    ),
    Case(
        fold_dequantized,
        """g (float[2,2] x) => (float[2,2] y) <int8[2,2] q = {1, 2, 3, 4}, float s = {0.5}>
        { w = DequantizeLinear(q, s) y = MatMul(x, w) }""",
        before=(infer_types,),
    ),
    Case(
        use_forward_convolutions,
        """g (double[1,2,5,5] x, double[3,2,3,3] w, double[1,3,3,3] z) => (double[1,3,3,3] y)
        { c = Conv(x, w) a = Add(c, z) y = Relu(a) }""",
        before=(infer_types,),
        puts=("DenseConv",),
    ),
    Case(
        use_max_pool,
        """g (float[1,1,8,8] x) => (float[1,1,4,4] y, int64[1,1,4,4] i)
        { y, i = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(x) }""",
        before=(infer_types,),
    ),
    Case(use_moments, MOMENTS, before=(infer_types,), puts=("Moments",)),
    Case(
        open_losses,
        """g (float[5,3] x, int64[5] t) => (float y)
        { y = SoftmaxCrossEntropyLoss<reduction = "mean">(x, t) }""",
        {"compiled": True},
        before=(infer_types,),
    ),
    Case(
        open_losses,
        """g (float[5,3] x, int64[5] t) => (float y, float[5,3] p)
        { y, p = SoftmaxCrossEntropyLoss<reduction = "sum">(x, t) }""",
        {"compiled": False},
        before=(infer_types,),
    ),
    Case(
        use_pointwise,
        convolution("1,8,6,6", "4,8,1,1", "1,4,6,6"),
        wrt=("x", "w"),
        before=OPENED,
    ),
    Case(share_branches, BRANCH, wrt=("x",), before=(*OPENED, infer_types)),
    Case(
        expand_single_channels,
        convolution("1,1,9,9", "20,1,3,3", "1,20,7,7"),
        wrt=("x", "w"),
        before=OPENED,
    ),
    Case(
        use_transposed_products,
        "g (float[400,200] a, float[400,200] b) => (float[200,200] y) { y = Gemm<transA = 1>(a, b) }",
        before=(infer_types,),
    ),
    Case(
        use_winograd,
        convolution("8,64,32,32", "64,64,3,3", "8,64,30,30"),
        wrt=("x", "w"),
        before=OPENED,
    ),
    Case(
        expand_constant,
        "g (float[4] z) => (float[4] y) <float[4] dy = {1, 2, 3, 4}, float[4] x = {1, 2, 3, 4}> "
        "{ dx = com.microsoft.ReluGrad(dy, x) y = Add(dx, z) }",
        before=(complete,),
    ),
    Case(
        fuse,
        "g (float[600,600] x, float[600,600] z) => (float[600,600] y) "
        "{ a = Add(x, z) b = Exp(a) y = Mul(b, x) }",
        before=(infer_types,),
        puts=("Fused",),
    ),
    Case(
        drop_copies,
        "g (float[4] x) => (float[4] y) { a = Exp(x) b = Identity(a) y = Neg(b) }",
        before=(infer_types,),
    ),
]
IDS = [f"{case.apply.__name__} {i}" for i, case in enumerate(CASES)]


def modules() -> Iterator[ModuleType]:
    for room in ROOMS:
        for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if not info.ispkg:
                yield importlib.import_module(info.name)


def passes_in(module: ModuleType) -> set[Callable[..., ir.Model]]:
    """The public functions of a module that take a model and return one."""
    return {
        function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and function.__annotations__.get("return") == "ir.Model"
        and next(iter(inspect.signature(function).parameters), "") == "model"
    }


def names_of(model: ir.Model) -> Counter[str]:
    """How often each name of a value or node occurs in the model and its subgraphs."""
    values = [
        value
        for graph in model.graphs()
        for value in dict.fromkeys(
            (*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs))
        )
    ]
    nodes = [node for graph in model.graphs() for node in graph]
    return Counter(f"value {v.name}" for v in values if v.name) + Counter(
        f"node {n.name}" for n in nodes if n.name
    )


def operators_of(model: ir.Model) -> set[str]:
    return {node.op_type for graph in model.graphs() for node in graph}


def test_no_pass_is_forgotten() -> None:
    found = set().union(*map(passes_in, modules()))
    lists = (opening.OPENING, preparation.FOR_SESSIONS, preparation.BEFORE_BODIES, preparation.FOR_COMPILED)
    found.update(each for listed in lists for each in listed)
    assert {case.apply for case in CASES} == found


def test_what_is_in_the_room_of_passes() -> None:
    for module in modules():
        if module.__name__.startswith("ortgrad.passes."):
            assert passes_in(module), module.__name__


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_its_signature(case: Case) -> None:
    first, *settings = inspect.signature(case.apply).parameters.values()
    assert (first.name, first.annotation) == ("model", "ir.Model")
    assert all(each.annotation is not inspect.Parameter.empty for each in settings)
    # Objects of a model do not outlast a pass; they are named.
    assert not any("ir.Value" in each.annotation or "ir.Graph" in each.annotation for each in settings)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_it_changes_its_model_in_place(case: Case) -> None:
    model = case.model()
    before = to_proto(model).SerializeToString(deterministic=True)
    assert case.apply(model, **case.settings) is model
    assert to_proto(model).SerializeToString(deterministic=True) != before
    assert set(case.puts) <= operators_of(model)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_model_stays_valid(case: Case) -> None:
    model = case.model()
    inputs, outputs = (
        [value.name for value in values] for values in (model.graph.inputs, model.graph.outputs)
    )
    case.apply(model, **case.settings)
    assert [value.name for value in model.graph.inputs] == inputs
    assert [value.name for value in model.graph.outputs] == outputs
    assert set(names_of(model).values()) == {1}
    check_uses(model)
    with_schemas(onnx.checker.check_model, to_proto(model))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_applied_again_it_changes_nothing(case: Case) -> None:
    model = case.model()
    case.apply(model, **case.settings)
    once = to_proto(model).SerializeToString(deterministic=True)
    assert case.apply(model, **case.settings) is model
    assert (to_proto(model).SerializeToString(deterministic=True) == once) == case.idempotent
