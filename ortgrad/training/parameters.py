"""The parameters of a model: tensors that are its inputs in training and evaluation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx
from onnx import helper

from ortgrad.graph.protos import FLOATS, all_nodes, copy_of, keep, replace


@dataclass
class Parameters:
    """The tensors that a model takes as inputs in training and evaluation."""

    trainable: list[onnx.TensorProto]
    frozen: list[onnx.TensorProto]
    # All of them, in the order of the model's initializers. Their names are the model's inputs.
    inputs: list[onnx.ValueInfoProto]
    # Frozen ones on whose values shapes depend; they are constants while the gradients are built.
    constants: list[onnx.TensorProto]

    def added_to(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """Return a copy of a model from which they were taken, with them as inputs or constants."""
        copy = copy_of(model)
        fixed = {tensor.name for tensor in self.constants}
        copy.graph.input.extend(value for value in self.inputs if value.name not in fixed)
        copy.graph.initializer.extend(self.constants)
        return copy


def take_parameters(
    model: onnx.ModelProto, requires_grad: Collection[str], frozen: Collection[str]
) -> Parameters:
    """Remove the parameters from the initializers of the model and return them.

    If both collections are empty, all initializers become inputs, but none of them is a parameter.
    """
    graph = model.graph
    named = {*requires_grad, *frozen}
    _move_constants(graph, named)
    taken = [tensor for tensor in graph.initializer if not named or tensor.name in named]
    names = {tensor.name for tensor in taken}
    settings = _settings(model, names - set(requires_grad))
    parameters = Parameters(
        [tensor for tensor in taken if tensor.name in requires_grad],
        [tensor for tensor in taken if tensor.name in frozen],
        [helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in taken],
        [tensor for tensor in taken if tensor.name in settings],
    )
    keep(graph.initializer, lambda tensor: tensor.name not in names)
    # Exporters may write initializers as inputs, too.
    keep(graph.input, lambda value: value.name not in names)
    return parameters


def _move_constants(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Make initializers of Constant nodes with these outputs: some exporters write weights as such nodes."""
    kept = []
    for node in graph.node:
        tensor = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
        if node.op_type == "Constant" and tensor is not None and node.output[0] in names:
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = node.output[0]
        else:
            kept.append(node)
    if len(kept) < len(graph.node):
        replace(graph.node, kept)


def _settings(model: onnx.ModelProto, names: Collection[str]) -> set[str]:
    """Return the names that are not of weights: integers, and operands such as the scales of Resize."""
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    found = {name for name in names if kinds[name] not in FLOATS}
    versions = {opset.domain: opset.version for opset in model.opset_import}
    never = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    for node in all_nodes(model.graph.node):
        operands = [i for i, name in enumerate(node.input) if name in names]
        domain = "" if node.domain == "ai.onnx" else node.domain
        version = versions.get(domain, 1)
        if not operands or node.op_type == "BatchNormalization":
            continue
        if onnx.defs.has(node.op_type, version, domain):
            declared = onnx.defs.get_schema(node.op_type, version, domain).inputs
            found |= {
                node.input[i]
                for i in operands
                if declared[min(i, len(declared) - 1)].differentiation_category == never
            }
    return found
