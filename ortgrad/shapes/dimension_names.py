"""Names for the dimensions of inputs that have none, while a gradient is built or a session is prepared.

Two unknown dimensions may differ; two of the same name do not. With names, inference proves that the values
that are computed from an input of shape [?, 4] have the same length: no gradient is summed at run time, and
element-wise nodes can be fused.
"""

from __future__ import annotations

import onnx_ir as ir


def name_dimensions(model: ir.Model) -> set[str]:
    """Name the unknown dimensions of the model's inputs, in place; returns the names."""
    shapes = [(value, value.shape) for value in model.graph.inputs if value.shape is not None]
    taken = {str(dim) for _, shape in shapes for dim in shape}
    made = set()
    for value, shape in shapes:
        dims = list(shape)
        for i, dim in enumerate(dims):
            if isinstance(dim, ir.SymbolicDim) and dim.value is None:
                name = f"{value.name}.shape[{i}]"
                while name in taken:
                    name += "'"
                dims[i] = ir.SymbolicDim(name)
                taken.add(name)
                made.add(name)
        value.shape = ir.Shape(dims)
    return made


def forget_dimensions(model: ir.Model, made: set[str]) -> None:
    """Remove the names from the inputs and outputs again, in place; in between they do no harm."""
    if not made:
        return
    for value in (*model.graph.inputs, *model.graph.outputs):
        shape = value.shape
        if shape is not None and any(isinstance(d, ir.SymbolicDim) and d.value in made for d in shape):
            value.shape = ir.Shape(
                [None if isinstance(d, ir.SymbolicDim) and d.value in made else d for d in shape]
            )
