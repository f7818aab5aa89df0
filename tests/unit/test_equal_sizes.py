"""Sizes that get one name are equal in every run, and gradients make use of it."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import ortgrad
from ortgrad.shapes.inference import infer_types

HEADER = '<ir_version: 10, opset_import: ["" : 22]> main '


def named_shapes(model: onnx.ModelProto) -> dict[str, list[int | str | None]]:
    """The inferred shapes of all values."""
    read = ir.from_proto(model)
    infer_types(read)
    return {
        value.name or "": [dim if isinstance(dim, int) else dim.value for dim in value.shape]
        for node in read.graph
        for value in node.outputs
        if value.shape is not None
    }


# Two windows after each other, over an image of any size.
ATTRIBUTES = [
    f"kernel_shape = [{k}, {k}], strides = [{s}, {s}], pads = [{p}, {p}, {q}, {q}], dilations = [{d}, {d}]"
    for k, s, (p, q), d in product((1, 2, 3), (1, 2, 3), ((0, 0), (1, 1), (0, 1)), (1, 2))
    if max(p, q) < k
]


def windows_model() -> onnx.ModelProto:
    """Every window over the image, and some over others' outputs."""
    nodes, outputs = [], []
    for i, attributes in enumerate(ATTRIBUTES):
        nodes.append(f"a{i} = MaxPool<{attributes}>(x)")
        nodes.append(f"b{i} = AveragePool<{attributes}>(a{(i * 7) % (i + 1)})")
        nodes.append(f"c{i} = MaxPool<ceil_mode = 1, {attributes}>(x)")
        outputs += [f"a{i}", f"b{i}", f"c{i}"]
    ends = ", ".join(f"float[n, c, h_{name}, w_{name}] {name}" for name in outputs)
    return parser.parse_model(f"{HEADER} (float[N, 2, H, W] x) => ({ends}) {{ {' '.join(nodes)} }}")


def test_sizes_of_windows_with_one_name_are_equal() -> None:
    model = windows_model()
    shapes = named_shapes(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    sizes: dict[tuple[str, int], list[int]] = {}
    for height, width in ((20, 21), (22, 30), (24, 24), (25, 37), (29, 26)):
        found = session.run(None, {"x": np.zeros((1, 2, height, width), np.float32)})
        for output, array in zip(session.get_outputs(), found, strict=True):
            for axis, size in enumerate(array.shape):
                sizes.setdefault((output.name, axis), []).append(size)
        sizes.setdefault(("H", 0), []).append(height)
        sizes.setdefault(("W", 0), []).append(width)
    shapes |= {"H": ["H"], "W": ["W"]}
    names = {(name, axis): shapes[name][axis] for name, axis in sizes}
    named = [key for key in sizes if isinstance(names[key], str)]
    same = [(a, b) for a, b in combinations(named, 2) if names[a] == names[b]]
    assert len(same) > 1000
    for a, b in same:
        assert sizes[a] == sizes[b], (a, b, names[a])


GRAPHS = {
    "residual": "{ a = Conv<pads = [1, 1, 1, 1]>(x, w) b = Conv<pads = [1, 1, 1, 1]>(a, w) y = Add(b, x) }",
    "two strides": """{
        a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w)
        b = Conv<strides = [2, 2]>(x, v)
        c = Add(a, b)
        d = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(c, w)
        e = MaxPool<kernel_shape = [1, 1], strides = [4, 4]>(x)
        y = Mul(d, e) }""",
    "pools": """{
        a = MaxPool<kernel_shape = [5, 5], pads = [2, 2, 2, 2]>(x)
        b = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(a)
        y = Sum(a, b, x) }""",
    "Resize": """<float[4] s = {1, 1, 2, 2}> {
        a = Resize(x, , s)
        b = Conv<pads = [1, 1, 1, 1]>(a, w)
        y = Add(a, b) }""",
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", [(2, 9, 13), (1, 1, 1), (1, 5, 1)])
def test_residual_gradients_decide_nothing_at_run_time(graph: str, size: tuple[int, int, int]) -> None:
    inputs = "float[N, 2, H, W] x, float[2, 2, 3, 3] w, float[2, 2, 1, 1] v"
    text = f"({inputs}) => (float[n, c, h, w_] y) {GRAPHS[graph]}"
    model = parser.parse_model(HEADER + text)
    # NonZero finds the axes to sum over; the check of the seed is the only other node of this type.
    built = ortgrad.build_gradient_model(model, wrt=["x"])
    assert sum(node.op_type == "NonZero" for node in built.graph.node) <= 1
    random = np.random.default_rng(3)
    samples, height, width = size
    feeds = {
        "x": random.standard_normal((samples, 2, height, width)),
        "w": random.standard_normal((2, 2, 3, 3)),
        "v": random.standard_normal((2, 2, 1, 1)),
    }
    used = {name for node in model.graph.node for name in node.input}
    given = {name: array.astype(np.float32) for name, array in feeds.items() if name in used | {"x"}}
    result = ortgrad.check_gradients(model, given, wrt=["x"])
    assert result.ok, str(result)


def test_names_of_the_file_are_kept() -> None:
    """A name that a file gives may stand for different sizes; only those that onnx makes up are replaced."""
    model = parser.parse_model(
        HEADER
        + """(float[N, 2, A, B] x, float[2, 2, A, C] z) => (float[N, 2, h, w] y) {
        a = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x)
        b = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(z)
        y = Add(a, b) }"""
    )
    shapes = named_shapes(model)
    assert shapes["a"] == ["N", 2, "A", "B"]
    assert shapes["b"] == [2, 2, "A", "C"]
    assert shapes["y"][2:] == ["h", "w"]


@pytest.mark.parametrize(
    ("node", "kept"),
    [
        ('Resize<mode = "linear">(x, , s)', ["N", 2, None, "W"]),
        ('Resize<mode = "linear", axes = [0, 1, 3, 2]>(x, , s)', [None, 2, None, None]),
        (
            'Resize<mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize">(x, r, s)',
            [None, 2, None, None],
        ),
    ],
)
def test_sizes_that_resize_keeps(node: str, kept: list[int | str | None]) -> None:
    model = parser.parse_model(
        f"{HEADER} (float[N, 2, H, W] x, float[8] r) => (float[n, c, h, w] y) <float[4] s = {{1, 1, 2, 1}}>"
        f"{{ z = {node} y = Identity(z) }}"
    )
    found = named_shapes(model)["z"]
    assert [name if name in ("N", "H", "W") or isinstance(name, int) else None for name in found] == kept
