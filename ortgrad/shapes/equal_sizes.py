"""Gives unknown sizes one name where they are always equal.

onnx's shape inference makes up a new name for every size that it cannot compute: for the sizes of a
convolution's output, even if padding keeps them, and for everything that is computed from these. The gradient
of an Add would then have to find out at run time whether an operand was broadcast. Here every size is an
expression of the inputs' sizes, and sizes with the same expression get the same name.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from ortgrad.graph.traversal import all_nodes, dimensions, subgraphs
from ortgrad.shapes.computed_sizes import output_sizes
from ortgrad.shapes.known_elements import Elements
from ortgrad.shapes.size_expressions import Size

# The beginning of the names that onnx makes up; other names may stand for different sizes in different
# places.
_MADE_UP = "unk__"


def name_equal_sizes(graph: ir.Graph) -> None:
    """Rename sizes of the graph's values, in place; the nodes must be in topological order."""
    names = _Names(graph)
    names.visit(graph)
    names.write(graph)


def forget_made_up_names(graph: ir.Graph) -> None:
    """Let the results of a graph's nodes have no sizes under made-up names, in place.

    Inference does not replace a name by another one, even if it now finds that a size is a known one.
    """
    for value in (value for node in all_nodes(graph) for value in node.outputs):
        if value.shape is not None and any(name.startswith(_MADE_UP) for name in _symbols(value)):
            dims = dimensions(value) or ()
            value.shape = ir.Shape([None if str(dim).startswith(_MADE_UP) else dim for dim in dims])


class _Names:
    """What is known about the sizes of the values that were visited, and the names of sizes."""

    def __init__(self, graph: ir.Graph) -> None:
        self._sizes: dict[ir.Value, list[Size]] = {}
        self._elements = Elements(self.sizes)
        # What made-up names stand for, and the first name of each size.
        self._meanings: dict[str, Size] = {}
        self._names: dict[Size, str] = {}
        self._seen = set(_symbols(*graph.inputs, *graph.initializers.values()))
        self._made = 0

    def sizes(self, value: ir.Value | None) -> list[Size] | None:
        """Return the sizes of a value; None if its number of dimensions is unknown."""
        if value is None or value.shape is None or not isinstance(value.type, ir.TensorType):
            return None
        if value not in self._sizes:
            self._sizes[value] = [self._given(value, i, dim) for i, dim in enumerate(value.shape)]
        return self._sizes[value]

    def visit(self, graph: ir.Graph) -> None:
        """Find the sizes of all values of a graph and its subgraphs."""
        for node in graph:
            for inner in subgraphs(node):
                self._seen.update(_symbols(*inner.inputs))
                self.visit(inner)
            computed = output_sizes(node, self.sizes, self._elements)
            for i, output in enumerate(node.outputs):
                if output.shape is None or not isinstance(output.type, ir.TensorType):
                    continue
                found = computed[i] if i < len(computed) else None
                if found is None or len(found) != len(output.shape):
                    found = [None] * len(output.shape)
                self._sizes[output] = [
                    self._resolve(output, axis, dim, size)
                    for axis, (dim, size) in enumerate(zip(output.shape, found, strict=True))
                ]
                self._seen.update(_symbols(output))
            self._elements.visit(node)

    def _resolve(self, value: ir.Value, axis: int, dim: int | ir.SymbolicDim, size: Size | None) -> Size:
        """Return a size of an output, for which onnx has inferred `dim`."""
        name = None if isinstance(dim, int) else dim.value
        if name is None:
            return size if size is not None and not isinstance(dim, int) else self._given(value, axis, dim)
        # Only a name that occurs for the first time gets a meaning.
        if name.startswith(_MADE_UP) and name not in self._seen and size is not None:
            self._meanings[name] = size
            self._names.setdefault(size, name)
        return self._given(value, axis, dim)

    def _given(self, value: ir.Value, axis: int, dim: int | ir.SymbolicDim) -> Size:
        if isinstance(dim, int):
            return Size.of(dim)
        if dim.value is None:
            return Size.atom(("unknown", id(value), axis))
        return self._meanings.get(dim.value) or Size.atom(dim.value)

    def write(self, graph: ir.Graph) -> None:
        """Write the sizes to the values of the graph, except for its inputs."""
        for value in _values(graph):
            sizes = self.sizes(value)
            if sizes is None or value.shape is None:
                continue
            dims = [self._name(size, dim) for size, dim in zip(sizes, value.shape, strict=True)]
            if tuple(dims) != dimensions(value):
                value.shape = ir.Shape(dims)

    def _name(self, size: Size, dim: int | ir.SymbolicDim) -> int | str | None:
        number, single = size.number, size.single
        if number is not None:
            return number if number >= 0 or isinstance(dim, int) else dim.value
        if isinstance(single, str):
            return single
        if size not in self._names:
            if isinstance(single, tuple) and single[0] == "unknown":
                return None
            self._made += 1
            while f"{_MADE_UP}{self._made}'" in self._seen:
                self._made += 1
            self._names[size] = f"{_MADE_UP}{self._made}'"
        return self._names[size]


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    for node in graph:
        for inner in subgraphs(node):
            yield from _values(inner)
            yield from inner.inputs
        yield from node.outputs


def _symbols(*values: ir.Value) -> Iterator[str]:
    for value in values:
        for dim in value.shape or ():
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                yield dim.value
