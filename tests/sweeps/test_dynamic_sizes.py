"""Models of unknown sizes: what is proven about them holds in every run, and gradients make use of it."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import support
from onnx import parser
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

import ortgrad
from ortgrad.pipelines.preparation import prepare_proto
from ortgrad.shapes.dimension_names import name_dimensions
from ortgrad.shapes.inference import infer_types

# More may find more; 3000 have passed.
SEEDS = 100
HEADER = '<ir_version: 10, opset_import: ["" : 18]> main '
# How the sizes of inputs are declared: named, with one name for some of them, or not at all.
DECLARED = {
    "named": "float[A, B, C] x, float[D, E, F] y, float[G, H] z",
    "shared": "float[A, B, C] x, float[A, B, F] y, float[A, C] z",
    "unnamed": "float[?, ?, ?] x, float[?, ?, ?] y, float[?, ?] z",
    "partly": "float[A, 4, ?] x, float[1, 4, F] y, float[?, 4] z",
}


class Writer:
    """Writes random nodes whose shapes are computed in many ways."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[str] = []
        self.floats = {"x": 3, "y": 3, "z": 2}
        self.vectors: list[str] = []
        self.count = 0

    def node(self, text: str, rank: int | None = None) -> str:
        self.count += 1
        name = f"v{self.count}"
        self.nodes.append(f"{name} = {text}")
        if rank is not None:
            self.floats[name] = rank
        return name

    def constant(self, *numbers: int) -> str:
        return self.node(f"Constant<value_ints = [{', '.join(map(str, numbers))}]>()")

    def pick(self, rank: int | None = None) -> str:
        names = [name for name, each in self.floats.items() if rank in (None, each)]
        return str(self.random.choice(names[-6:]))

    def number(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high + 1))

    def size(self) -> str:
        """A vector of one element that is computed from the sizes of a tensor."""
        x = self.pick()
        axis = self.number(0, self.floats[x] - 1)
        shape = self.node(f"Shape({x})")
        kind = self.number(0, 6)
        if kind == 0:
            size = self.node(f"Slice({shape}, {self.constant(axis)}, {self.constant(axis + 1)})")
        elif kind == 1:
            size = self.node(f"Shape<start = {axis}, end = {axis + 1}>({x})")
        else:
            size = self.node(f"Gather({shape}, {self.constant(axis)})")
        other = self.constant(self.number(1, 3))
        if kind == 2:
            size = self.node(f"Div({self.node(f'Add({size}, {other})')}, {other})")
        elif kind == 3:
            size = self.node(f"Mul({size}, {other})")
        elif kind == 4:
            size = self.node(f"Max({size}, {other})")
        elif kind == 5:
            size = self.node(f"Cast<to = 7>({self.node(f'Cast<to = 6>({size})')})")
        return size

    def step(self) -> None:
        x = self.pick()
        rank = self.floats[x]
        kind = self.number(0, 17)
        if kind < 3:
            self.node(f"{self.random.choice(['Relu', 'Sigmoid', 'Neg'])}({x})", rank)
        elif kind < 6:
            y = self.pick()
            self.node(f"{self.random.choice(['Add', 'Mul', 'Max'])}({x}, {y})", max(rank, self.floats[y]))
        elif kind == 6:
            y = self.pick(rank)
            self.node(f"Concat<axis = {self.number(-1, rank - 1)}>({x}, {y})", rank)
        elif kind == 7:
            order = ", ".join(map(str, self.random.permutation(rank)))
            self.node(f"Transpose<perm = [{order}]>({x})", rank)
        elif kind == 8:
            axis, start = self.number(0, rank - 1), self.number(-2, 2)
            end = int(self.random.choice([1, 2, 3, -1, 2**31 - 1, 2**63 - 1]))
            ends = self.size() if self.number(0, 2) == 0 else self.constant(end)
            self.node(f"Slice({x}, {self.constant(start)}, {ends}, {self.constant(axis)})", rank)
        elif kind == 9:
            pads = [self.number(0, 1) for _ in range(2 * rank)]
            self.node(f"Pad({x}, {self.constant(*pads)})", rank)
        elif kind == 10:
            self.node(f"Flatten<axis = {self.number(0, rank)}>({x})", 2)
        elif kind == 11:
            target = [(0, -1), (-1, 1), (-1, 2), (1, 0, -1)][self.number(0, 3)]
            self.node(f"Reshape({x}, {self.constant(*target)})", len(target))
        elif kind == 12:
            parts = [self.size() for _ in range(self.number(1, 2))] + [self.constant(-1)]
            self.random.shuffle(parts)
            target = self.node(f"Concat<axis = 0>({', '.join(parts)})")
            self.node(f"Reshape({x}, {target})", len(parts))
        elif kind == 13:
            parts = [self.size() for _ in range(rank)]
            target = self.node(f"Concat<axis = 0>({', '.join(parts)})")
            self.node(f"Expand({x}, {target})", rank)
        elif kind == 14 and rank == 3:
            k, s = self.number(1, 3), self.number(1, 2)
            pads = f"pads = [{self.number(0, k - 1)}, {self.number(0, k - 1)}]"
            auto = str(self.random.choice([pads, 'auto_pad = "SAME_UPPER"', 'auto_pad = "VALID"']))
            self.node(f"MaxPool<kernel_shape = [{k}], strides = [{s}], {auto}>({x})", 3)
        elif kind == 15:
            y = self.pick()
            y = self.node(
                f"Transpose<perm = [{'0, 2, 1' if self.floats[y] == 3 else '1, 0'}]>({y})", self.floats[y]
            )
            self.node(f"MatMul({x}, {y})", max(rank, self.floats[y]))
        elif kind == 16:
            scales = self.node(
                "Constant<value_floats = ["
                + ", ".join(str(self.random.choice([1.0, 2.0, 0.5, 1.5])) for _ in range(rank))
                + "]>()"
            )
            self.node(f'Resize<mode = "nearest">({x}, , {scales})', rank)
        else:
            axis = self.number(0, rank - 1)
            if rank == 2:
                self.node(f"Unsqueeze({x}, {self.constant(axis)})", 3)
            else:
                self.node(f"ReduceSum<keepdims = 0>({x}, {self.constant(axis)})", 2)


def observed(text: str, inputs: str) -> tuple[onnx.ModelProto, onnxruntime.InferenceSession | None]:
    """The model with all floating-point values as outputs, and its session."""
    names = re.findall(r"(v\d+) = ", text)
    model = parser.parse_model(f"{HEADER} ({inputs}) => () {{ {text} }}")
    inferred = onnx.shape_inference.infer_shapes(model)
    types = {info.name: info.type.tensor_type.elem_type for info in inferred.graph.value_info}
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    for name in names:
        if name in types:
            shown.graph.output.append(onnx.helper.make_tensor_value_info(name, types[name], None))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        made = onnxruntime.InferenceSession(
            shown.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except (Fail, InvalidArgument, RuntimeException):
        # onnxruntime refuses the shapes of a random model.
        return shown, None
    return shown, made


def sizes_of_inputs(declared: str) -> list[dict[str, tuple[int, ...]]]:
    """Several sizes of the inputs, also 1 and 0; sizes of one name are equal."""
    random = np.random.default_rng(7)
    found = []
    for low, high in ((2, 2), (1, 1), (3, 3), (1, 3), (1, 3), (1, 4), (2, 6), (0, 2)):
        known: dict[str, int] = {}
        feeds = {}
        for shape, name in re.findall(r"float\[([^]]*)\] (\w)", DECLARED[declared]):
            dims = []
            for dim in shape.split(", "):
                size = int(random.integers(low, high + 1))
                dims.append(
                    int(dim) if dim.isdigit() else size if dim == "?" else known.setdefault(dim, size)
                )
            feeds[name] = tuple(dims)
        found.append(feeds)
    return found


@pytest.mark.parametrize("declared", DECLARED)
def test_sizes_with_one_name_are_equal_in_every_run(declared: str) -> None:
    runs = same = 0
    for seed in range(SEEDS):
        writer = Writer(seed)
        for _ in range(8):
            writer.step()
        text = " ".join(writer.nodes)
        model, session = observed(text, DECLARED[declared])
        if session is None:
            continue
        read = ir.from_proto(model)
        for output in list(read.graph.outputs):
            output.shape = None
        name_dimensions(read)
        infer_types(read)
        values = [*read.graph.inputs, *(value for node in read.graph for value in node.outputs)]
        names = {
            (value.name, axis): dim if isinstance(dim, int) else dim.value
            for value in values
            if value.shape is not None
            for axis, dim in enumerate(value.shape)
        }
        for feeds in sizes_of_inputs(declared):
            arrays = {name: np.ones(shape, np.float32) for name, shape in feeds.items()}
            used = {value.name: arrays[value.name] for value in session.get_inputs()}
            try:
                results = session.run(None, used)
            except (Fail, InvalidArgument, RuntimeException):
                # Operands that do not fit.
                continue
            runs += 1
            shapes = {o.name: array.shape for o, array in zip(session.get_outputs(), results, strict=True)}
            shapes |= feeds
            if any(0 in shape for shape in shapes.values()) and "Concat<axis" in text:
                # onnxruntime accepts empty operands of a Concat that do not fit, and onnx relies on them.
                continue
            sizes = {key: shapes[key[0]][key[1]] for key in names if key[0] in shapes}
            groups: dict[str, set[int]] = {}
            for key, size in sizes.items():
                name = names[key]
                if isinstance(name, int):
                    assert size == name, (seed, key, feeds, text)
                elif name is not None:
                    groups.setdefault(name, set()).add(size)
                    same += 1
            for name, found in groups.items():
                assert len(found) == 1, (seed, name, found, feeds, text)
    assert runs > 60 and same > 1000


# Graphs in which no operand of unknown size is broadcast, whatever the sizes are.
PROVABLE = {
    "gated": "{ a = Sigmoid(x) y = Mul(x, a) }",
    "twice gated": "{ a = Sigmoid(x) b = Mul(x, a) c = Tanh(b) y = Mul(b, c) }",
    "scaled": "<float k = {0.5}> { a = Mul(x, k) b = Relu(a) c = Add(k, b) y = Mul(c, a) }",
    "clipped": "<float k = {0.5}> { a = Clip(x, , k) b = Exp(a) y = Sub(a, b) }",
}
# The same with a known rank: the input is [samples, channels, length].
PROVABLE_RANKED = {
    **PROVABLE,
    "same padding": '{ a = AveragePool<kernel_shape = [3], auto_pad = "SAME_UPPER">(x) y = Add(a, x) }',
    "stride": """{
        a = AveragePool<kernel_shape = [2], strides = [2], auto_pad = "SAME_UPPER">(x)
        b = AveragePool<kernel_shape = [3], strides = [2], pads = [1, 1]>(x)
        y = Mul(a, b) }""",
    "flattened": """{
        s = Shape(x) t = Constant<value_ints = [0, -1]>() a = Reshape(x, t) b = Sigmoid(a) c = Reshape(b, s)
        y = Mul(c, x) }""",
    "rows": """{
        t = Constant<value_ints = [-1]>() a = Shape<start = 0, end = 1>(x) b = Concat<axis = 0>(a, t)
        c = Reshape(x, b) d = Flatten(x) y = Mul(c, d) }""",
    "divided": """{
        h = Shape<start = 2, end = 3>(x) two = Constant<value_ints = [2]>() k = Mul(h, two) l = Div(k, two)
        r = Shape<start = 0, end = 2>(x) t = Concat<axis = 0>(r, l) a = Reshape(x, t) y = Add(a, x) }""",
    "concatenated": """{
        a = Concat<axis = 2>(x, x) b = Tanh(x) c = Concat<axis = 2>(b, x) y = Mul(a, c) }""",
    "padded": """{
        p = Constant<value_ints = [0, 0, 1, 0, 0, 1]>() a = Pad(x, p) b = Exp(x) c = Pad(b, p)
        y = Mul(a, c) }""",
    "resized": "<float[3] k = {1, 1, 2}> { a = Resize(x, , k) b = Concat<axis = 2>(x, x) y = Add(a, b) }",
    "multiplied": "{ t = Transpose<perm = [0, 2, 1]>(x) a = MatMul(x, t) b = MatMul(a, x) y = Add(b, x) }",
    "filled": """{
        s = Shape(x) a = ConstantOfShape<value = float[1] {2}>(s) b = Expand(a, s) c = Mul(a, x)
        y = Add(b, c) }""",
    "selected": """<int64[1] m = {-1}> {
        s = Shape(x) q = Equal(s, m) o = Constant<value_ints = [1]>() t = Where(q, o, s)
        a = Expand(x, t) y = Mul(a, x) }""",
    "sliced": """<int64[1] o = {1}, int64[1] e = {9223372036854775807}, int64[1] i = {2}> {
        a = Slice(x, o, e, i) b = Exp(x) c = Slice(b, o, e, i) y = Mul(a, c) }""",
}
SHAPES = {"named": "[N, C, L]", "unnamed": "[?, ?, ?]", "partly": "[N, 3, ?]", "missing": ""}


@pytest.mark.parametrize(
    ("graph", "shape"),
    [(g, s) for g in PROVABLE_RANKED for s in SHAPES if s != "missing" or g in PROVABLE],
)
def test_nothing_is_decided_at_run_time(graph: str, shape: str) -> None:
    model = parser.parse_model(f"{HEADER} (float{SHAPES[shape]} x) => (float[?] y) {PROVABLE_RANKED[graph]}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    if shape == "missing":
        model.graph.input[0].type.tensor_type.ClearField("shape")
    built = ortgrad.build_gradient_model(model, wrt=["x"])
    # NonZero finds the axes to sum over; the check of the seed is the only other node of this type.
    assert sum(node.op_type == "NonZero" for node in built.graph.node) <= 1
    random = np.random.default_rng(3)
    # The gradients of the other forms are the same.
    for sizes in ((2, 3, 5), (1, 3, 1)) if shape in ("unnamed", "missing") else ():
        result = ortgrad.check_gradients(model, {"x": random.standard_normal(sizes, np.float32)}, wrt=["x"])
        assert result.ok, (sizes, str(result))


# Graphs in which operands are broadcast if sizes are 1, although they may be equal in another run.
BROADCAST = {
    "two inputs": "{ y = Mul(x, z) }",
    "residual": "{ a = Mul(x, z) y = Add(a, x) }",
    "twice": "{ a = Mul(x, z) b = Mul(a, z) c = Sigmoid(b) y = Mul(b, c) }",
    "pooled": "{ a = AveragePool<kernel_shape = [2], strides = [2]>(x) y = Mul(a, z) }",
    "expanded": "{ s = Shape(z) a = Expand(x, s) y = Mul(a, z) }",
    "matrices": "{ t = Transpose<perm = [0, 2, 1]>(z) a = MatMul(x, t) y = MatMul(a, z) }",
    "sliced": "<int64[1] o = {0}, int64[1] e = {2}> { a = Slice(z, o, e, e) y = Mul(x, a) }",
    "reshaped": "{ s = Shape(z) a = Reshape(z, s) b = Sub(a, x) y = Mul(b, a) }",
}


PAIRS_OF_SHAPES = ["[A, B, C]; [D, E, F]", "[?, ?, ?]; [?, ?, ?]", "[A, ?, 4]; [A, ?, F]", ";"]


@pytest.mark.parametrize(
    ("graph", "shapes"),
    [(g, s) for g in BROADCAST for s in PAIRS_OF_SHAPES if s != ";" or g not in ("pooled", "matrices")],
)
def test_sizes_that_are_equal_by_chance_are_not_relied_on(graph: str, shapes: str) -> None:
    one, other = shapes.split(";")
    text = f"{HEADER} (float{one} x, float{other} z) => (float[?] y) {BROADCAST[graph]}"
    model = parser.parse_model(text)
    for value in (*model.graph.output, *(model.graph.input if not one else ())):
        value.type.tensor_type.ClearField("shape")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    random = np.random.default_rng(5)
    tried = 0
    for first, second in (
        *(((2, 3, 4), (2, 3, 4)), ((2, 1, 4), (2, 3, 1)), ((1, 1, 4), (1, 3, 4)), ((2, 3, 4), (2, 3, 2))),
        ((2, 3, 1), (2, 3, 4)),
    ):
        feeds = {
            "x": random.standard_normal(first, np.float32),
            "z": random.standard_normal(second, np.float32),
        }
        try:
            session.run(None, feeds)
        except (Fail, InvalidArgument, RuntimeException):
            # Operands that do not fit.
            continue
        tried += 1
        result = ortgrad.check_gradients(model, feeds, wrt=["x", "z"])
        assert result.ok, (first, second, str(result))
    assert tried


@support.needs_numba
@pytest.mark.parametrize("shape", ["[N, 3, H, W]", "[?, 3, ?, ?]"])
def test_gradients_are_fused_behind_pools_of_unknown_sizes(shape: str) -> None:
    """The gradient of MaxPool has the shape of its input, which onnx does not infer."""
    layers = " ".join(
        f"c{i} = Conv<pads = [1, 1, 1, 1]>({'x' if i == 0 else f'p{i - 1}'}, w) s{i} = Sigmoid(c{i}) "
        f"m{i} = Mul(c{i}, s{i}) p{i} = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(m{i})"
        for i in range(4)
    )
    text = f"(float{shape} x, float[3, 3, 3, 3] w) => (float[a, b, c, d] p3) {{ {layers} }}"
    built = ortgrad.build_gradient_model(parser.parse_model(HEADER + text), wrt=["w"])
    prepared = prepare_proto(built, "auto", bodies=False)
    assert sum(node.op_type == "Fused" and "SigmoidGrad" in node.name for node in prepared.graph.node) == 4
    declared = [[d.dim_param for d in v.type.tensor_type.shape.dim] for v in prepared.graph.input]
    assert declared[0] == [d.dim_param for d in built.graph.input[0].type.tensor_type.shape.dim]
