"""The modules in which nodes are, by PyTorch's exporters, and what operands are called there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

import onnx

from ortgrad.graph.protos import all_nodes

_SCOPES = "pkg.torch.onnx.name_scopes"
# What PyTorch's modules call the operands of their operators.
_ROLES = {
    "Conv": {1: "weight", 2: "bias"},
    "ConvTranspose": {1: "weight", 2: "bias"},
    "Gemm": {0: "weight", 1: "weight", 2: "bias"},
    "Add": {0: "bias", 1: "bias"},
    "InstanceNormalization": {1: "weight", 2: "bias"},
    "LayerNormalization": {1: "weight", 2: "bias"},
    "GroupNormalization": {1: "weight", 2: "bias"},
    "BatchNormalization": {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"},
}
# Operators of recurrent layers, and the beginnings of the names that PyTorch's modules have for operands.
RECURRENT = ("LSTM", "GRU", "RNN")
RECURRENT_ROLES = {1: ("weight_ih",), 2: ("weight_hh",), 3: ("bias_ih", "bias_hh")}


def module_of(node: onnx.NodeProto) -> str:
    """Return the name of the module in which the node is, as in `named_modules`; "" if it is not known."""
    scopes = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    if scopes:
        # The last scope is the call itself.
        names = ast.literal_eval(scopes)[:-1]
        return str(names[-1]) if names else ""
    if not node.name.startswith("/"):
        return ""
    path: list[str] = []
    for part in node.name.split("/")[1:-1]:
        # A Sequential's own scope is followed by that of a member, which repeats its name.
        if path and part.rpartition(".")[0] == path[-1]:
            path.pop()
        path.append(part)
    return ".".join(path)


def role_names(node: onnx.NodeProto, place: int, module: str, number: int) -> list[str]:
    """Return what the module would call an operand of its node, the `number`-th of this operator in it."""
    if not module:
        return []
    if node.op_type in RECURRENT:
        both = any(a.name == "direction" and a.s == b"bidirectional" for a in node.attribute)
        names = [f"{role}_l{number}" for role in RECURRENT_ROLES.get(place, ())]
        names += [f"{name}_reverse" for name in names] if both else []
    elif node.op_type == "MatMul" and place == 0:
        # Linear layers multiply by their weights from the right: this is an operand that was a constant.
        names = []
    else:
        names = [_ROLES.get(node.op_type, {}).get(place, "weight")]
    return [f"{module}.{name}" for name in names]


def containers(graph: onnx.GraphProto, names: Iterable[str]) -> set[str]:
    """Return the modules that contain others: a tensor that their own nodes read may have any name."""
    modules = {module_of(node) for node in all_nodes(graph.node)} | {
        name.rpartition(".")[0] for name in names
    }
    parts = [module.split(".") for module in modules]
    return {".".join(each[:i]) for each in parts for i in range(1, len(each))}


def names_by_bias(graph: onnx.GraphProto, named: Callable[[str], bool]) -> dict[str, list[str]]:
    """Return the names of weights by which nodes multiply before they add a bias with a name."""
    products: dict[str, onnx.NodeProto] = {}
    found: dict[str, list[str]] = {}

    def note(weight: str, bias: str) -> None:
        module, _, last = bias.rpartition(".")
        if named(bias) and last.endswith("bias"):
            name = f"{module}." * bool(module) + last.removesuffix("bias") + "weight"
            found.setdefault(weight, []).append(name)

    for node in graph.node:
        if node.op_type == "MatMul":
            products[node.output[0]] = node
        elif node.op_type in ("Conv", "ConvTranspose") and len(node.input) > 2:
            note(node.input[1], node.input[2])
        elif node.op_type == "Add":
            for product, bias in (tuple(node.input), tuple(node.input)[::-1]):
                if product in products:
                    note(products[product].input[1], bias)
    return found
