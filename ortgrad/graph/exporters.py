"""What a file says about the tensors in it: which are parameters, and under which names PyTorch has them."""

from __future__ import annotations

import onnx

from ortgrad.graph.origins import Origins, copied
from ortgrad.graph.origins_dynamo import from_dynamo, signature_of
from ortgrad.graph.origins_torchscript import from_torchscript
from ortgrad.graph.protos import all_nodes
from ortgrad.graph.scopes import containers, module_of, role_names


def read_origins(model: onnx.ModelProto) -> Origins:
    """Return what the file says about its initializers."""
    signature = signature_of(model.graph)
    if signature:
        found = from_dynamo(model.graph, signature)
    elif model.producer_name == "pytorch":
        found = from_torchscript(model.graph)
    else:
        found = Origins()
    _note_readers(model.graph, found)
    for copy, original in found.split.items():
        for name, other in ((copy, original), (original, copy)):
            for alias in found.names(other):
                found.add_alias(name, alias)
    return found


def _note_readers(graph: onnx.GraphProto, origins: Origins) -> None:
    """Note the modules that read initializers, and the names that tied weights have in all of them."""
    known = {tensor.name for tensor in graph.initializer}
    copies = copied(graph, known)
    taken = known | origins.all_aliases()
    outer = containers(graph, taken)
    for node in all_nodes(graph.node):
        module = module_of(node)
        for place, value in enumerate(node.input if module else ()):
            name = copies.get(value, value)
            if name not in known or module in origins.readers.setdefault(name, []):
                continue
            origins.readers[name].append(module)
            elsewhere = not any(other.startswith(f"{module}.") for other in origins.names(name))
            if (
                elsewhere
                and module not in outer
                and origins.parameters.get(name)
                and name not in origins.folded
            ):
                for alias in role_names(node, place, module, 0):
                    if alias not in taken:
                        origins.add_alias(name, alias)
                        taken.add(alias)
