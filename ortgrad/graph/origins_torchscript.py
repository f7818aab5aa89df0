"""What the older PyTorch exporter says about the tensors of a file.

It writes every parameter and every buffer that is saved as an initializer under its name, other tensors as
Constant nodes, and the module of a node into the node's name. What it has computed or transposed has the name
of its reader (`onnx::MatMul_375`), and equal tensors are copies by Identity nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from ortgrad.graph.origins import Origins, copied, is_generated, is_lifted, module_of_name
from ortgrad.graph.protos import all_graphs, all_nodes
from ortgrad.graph.scopes import containers, module_of, names_by_bias, role_names

_STATISTICS = ("running_mean", "running_var")


def from_torchscript(graph: onnx.GraphProto) -> Origins:
    """Return what the file says about its initializers."""
    result = Origins("torchscript")
    for inner in all_graphs(graph):
        constants = [node.output[0] for node in inner.node if node.op_type == "Constant" and not node.domain]
        result.parameters.update(dict.fromkeys(constants, False))
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for name, tensor in tensors.items():
        counts = not is_generated(name) or math.prod(tensor.dims) > 1
        # The scale of an adapter is ortgrad's.
        result.parameters[name] = counts and not is_lifted(name) and not name.endswith(".lora_scale")
    copies = copied(graph, tensors)
    for copy, name in copies.items():
        if not is_generated(copy):
            result.add_alias(name, copy)
    _name_generated(graph, tensors, copies, result)
    result.split = _transposed_copies(tensors)
    for name, original in result.split.items():
        result.add_alias(name, original)
    told = [name for name, counts in result.parameters.items() if counts and name in tensors]
    result.unknown = [
        name
        for name in told
        if is_generated(name) and all(alias.endswith(f".{name}") for alias in result.aliases.get(name, ()))
    ]
    for name in tensors if copies else ():
        found = [n for n in result.names(name) if not is_generated(n) and not n.endswith(_STATISTICS)]
        # Several names in one module, such as those of the two biases of a recurrent layer, are one tensor.
        modules = {module_of_name(n) for n in found}
        several = len(modules) > 1 if is_generated(name) else len(found) > 1
        if several and result.parameters[name] and name not in result.split:
            result.merged[name] = found
    return result


def _name_generated(
    graph: onnx.GraphProto, tensors: Mapping[str, object], copies: Mapping[str, str], result: Origins
) -> None:
    """Give initializers with the name of a reader those that they have in its module."""
    outer = containers(graph, (name for name in (*tensors, *copies) if not is_generated(name)))
    biases = names_by_bias(graph, lambda name: name in tensors or name in copies)
    counts: dict[tuple[str, str], int] = {}
    for node in all_nodes(graph.node):
        module = module_of(node)
        number = counts.get((module, node.op_type), 0)
        counts[module, node.op_type] = number + 1
        for place, value in enumerate(node.input):
            name = copies.get(value, value)
            if name not in tensors or not is_generated(value) or node.op_type == "Identity":
                continue
            guessed = [f"{module}.{name}"] if module in outer else role_names(node, place, module, number)
            for found in biases.get(value) or guessed:
                if found not in tensors and found not in copies:
                    result.add_alias(name, found)
            if node.op_type in ("Conv", "ConvTranspose") and place in (1, 2) and is_generated(node.input[1]):
                # The weights of convolutions are changed only by a batch normalization.
                result.folded[name] = []


def _transposed_copies(tensors: Mapping[str, onnx.TensorProto]) -> dict[str, str]:
    """Return the matrices that are transposed copies of others with a name, such as tied embeddings."""
    matrices = {
        name: tensor
        for name, tensor in tensors.items()
        if len(tensor.dims) == 2 and min(tensor.dims) and tensor.data_location != onnx.TensorProto.EXTERNAL
    }
    named: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in matrices.items():
        if not is_generated(name):
            named.setdefault(tuple(tensor.dims), []).append(name)
    found: dict[str, str] = {}
    for name, tensor in matrices.items():
        for other in named.get(tuple(tensor.dims)[::-1], ()) if is_generated(name) else ():
            copy, original = numpy_helper.to_array(tensor), numpy_helper.to_array(matrices[other])
            if np.array_equal(copy[0], original[:, 0]) and np.array_equal(copy, original.T):
                found[name] = other
                break
    return found
