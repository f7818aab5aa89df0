"""The names and kinds that tensors had before they were exported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx

# Names that exporters make up: numbers, names of the node that reads or computes a tensor, lifted constants.
_GENERATED = re.compile(r"val_\d+|onnx::.*|\d+|.*/.*|(.*\.)?(lifted_tensor_|_tensor_constant)\d*")
_LIFTED = re.compile(r"(.*\.)?(lifted_tensor_|_tensor_constant)\d*")


@dataclass
class Origins:
    """Names and kinds of the initializers of a file, and what its exporter has done to them."""

    # "dynamo" or "torchscript", PyTorch's exporters; "" for others.
    exporter: str = ""
    # Whether a constant is a parameter, if the file says so.
    parameters: dict[str, bool] = field(default_factory=dict)
    # Further names of initializers, under which PyTorch has them.
    aliases: dict[str, list[str]] = field(default_factory=dict)
    # Parameters that are now one initializer, by its name.
    merged: dict[str, list[str]] = field(default_factory=dict)
    # Parameters from which an initializer was computed, by its name, unless their elements were only moved.
    computed: dict[str, list[str]] = field(default_factory=dict)
    # Copies of parameters that are also in the file under their own names.
    split: dict[str, str] = field(default_factory=dict)
    # Weights of convolutions that contain a batch normalization, and the parameters of that, if known.
    folded: dict[str, list[str]] = field(default_factory=dict)
    # Initializers that were computed from tensors that the file does not name.
    unknown: list[str] = field(default_factory=list)
    # Parameters that nodes would read, but that are not in the file.
    removed: list[str] = field(default_factory=list)
    # The modules whose nodes read an initializer.
    readers: dict[str, list[str]] = field(default_factory=dict)

    def names(self, name: str) -> list[str]:
        """Return the name of a value and its further ones."""
        return [name, *self.aliases.get(name, ())]

    def all_aliases(self) -> set[str]:
        """Return the further names of all initializers."""
        return {alias for found in self.aliases.values() for alias in found}

    def add_alias(self, name: str, alias: str) -> None:
        """Add a further name unless it is known."""
        if alias not in self.names(name):
            self.aliases.setdefault(name, []).append(alias)


def is_generated(name: str) -> bool:
    """Return whether an exporter has made up the name."""
    return _GENERATED.fullmatch(name) is not None


def is_lifted(name: str) -> bool:
    """Return whether the name is that of a constant in the Python code of a module."""
    return _LIFTED.fullmatch(name) is not None


def module_of_name(name: str) -> str:
    """Return the module of a parameter."""
    return name.rpartition(".")[0]


def last_part(name: str) -> str:
    """Return the name that a parameter has in its module."""
    return name.rpartition(".")[2]


def copied(graph: onnx.GraphProto, known: Iterable[str]) -> dict[str, str]:
    """Return the values that are copies of initializers, each with the name of the initializer."""
    names, found = set(known), dict[str, str]()
    for node in graph.node:
        if node.op_type == "Identity" and not node.domain and len(node.input) == 1:
            source = found.get(node.input[0], node.input[0])
            if source in names:
                found[node.output[0]] = source
    return found
