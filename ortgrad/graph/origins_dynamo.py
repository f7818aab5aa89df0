"""What the PyTorch exporter of `dynamo=True` says about the tensors of a file.

The metadata of the graph lists all parameters, buffers and constants; the metadata of a value lists the
tensors from which it was computed when the file was written, and the metadata of a node names the call that
it is a part of.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

import onnx

from ortgrad.graph.origins import Origins, copied, is_generated, last_part, module_of_name
from ortgrad.graph.protos import all_nodes
from ortgrad.graph.scopes import RECURRENT, RECURRENT_ROLES, module_of

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
_CALL = "pkg.torch.onnx.fx_node"
# One line of a signature as newer versions write it, and a part of the text that older ones write.
_SPECS = (
    re.compile(r"^(?P<arg>\w+): (?P<kind>[A-Z_]+) target='(?P<target>[^']+)'", re.M),
    re.compile(
        r"InputSpec\(kind=<InputKind\.(?P<kind>[A-Z_]+): \d+>, arg=\w+\(name='(?P<arg>\w+)'[^)]*\), "
        r"target='(?P<target>[^']+)'"
    ),
)
# A value inside a call, such as the transposed weight of a linear layer.
_INTERNAL = re.compile(r"val_\d+")
# Calls that at most move their weights. Others compute with them, such as `add` with its `alpha`.
_RECURRENT_CALLS = r"gru|lstm|rnn_tanh|rnn_relu"
_MOVES_INSIDE = re.compile(
    rf"target=[\w.]*\b({_RECURRENT_CALLS}|linear|bilinear|matmul|mm|bmm|einsum|prelu|convolution|conv[123]d|"
    r"(native_)?(group|layer|instance|batch)_norm)\b"
)
_JOINS_INSIDE = re.compile(rf"target=[\w.]*\b({_RECURRENT_CALLS})\b")
# Calls that move elements without changing them. The zeros are initial states, which are among the sources of
# the weights of recurrent layers.
_MOVES = re.compile(
    r"(permute|transpose|t|numpy_t|view|_unsafe_view|reshape|unsqueeze|squeeze|flatten|clone|contiguous|detach|"
    r"alias|_to_copy|zeros)(_\d+)?"
)


def signature_of(graph: onnx.GraphProto) -> dict[str, tuple[str, str]]:
    """Return kind and name of the tensors of the exported program, by the names that calls use for them."""
    text = next((entry.value for entry in graph.metadata_props if entry.key == _SIGNATURE), "")
    specs = (match for pattern in _SPECS for match in pattern.finditer(text))
    return {match["arg"]: (match["kind"], match["target"]) for match in specs}


def _call_of(node: onnx.NodeProto) -> str:
    return next((entry.value for entry in node.metadata_props if entry.key == _CALL), "")


def from_dynamo(graph: onnx.GraphProto, signature: Mapping[str, tuple[str, str]]) -> Origins:
    """Return what the file says about its initializers."""
    return _Reader(graph, signature).origins


class _Reader:
    def __init__(self, graph: onnx.GraphProto, signature: Mapping[str, tuple[str, str]]) -> None:
        self._graph = graph
        self._kinds = {target: kind for kind, target in signature.values()}
        self._targets = {arg: target for arg, (kind, target) in signature.items() if kind == "PARAMETER"}
        self._initializers = dict.fromkeys(tensor.name for tensor in graph.initializer)
        self._sources = dict(self._folded_from())
        self._readers = self._readers_by_operand()
        self.origins = Origins("dynamo")
        self._judge()
        missing = self._follow_calls()
        self._find_lost(missing)
        self._find_merged()
        named = self.origins.all_aliases()
        self.origins.removed = [name for name in missing if name not in named]

    def _folded_from(self) -> Iterator[tuple[str, list[str]]]:
        for value in self._graph.value_info:
            text = next((entry.value for entry in value.metadata_props if entry.key == _FOLDED), "")
            if text and value.name in self._initializers:
                yield value.name, [name for name in ast.literal_eval(text) if isinstance(name, str)]

    def _readers_by_operand(self) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
        found: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in all_nodes(self._graph.node):
            for place, name in enumerate(node.input):
                found.setdefault(name, []).append((node, place))
        return found

    def _parameters_in(self, name: str) -> list[str]:
        """Return the parameters from which a value was computed."""
        found = [s for s in self._sources[name] if self._kinds.get(s) == "PARAMETER"]
        for node, place in self._readers.get(name, ()):
            if node.op_type in RECURRENT:
                # Initial states are among the sources of the weights.
                roles = RECURRENT_ROLES.get(place, ())
                found = [s for s in found if last_part(s).startswith(roles)] or found
        return found

    def _judge(self) -> None:
        """Tell parameters from buffers and constants, and name those that were computed from parameters."""
        result = self.origins
        moved: dict[tuple[str, ...], str] = {}
        for name in self._initializers:
            if name in self._kinds:
                result.parameters[name] = self._kinds[name] == "PARAMETER"
            elif name in self._sources:
                sources = self._parameters_in(name)
                result.parameters[name] = bool(sources)
                if not sources:
                    continue
                result.aliases[name] = sources
                own = [s for s in sources if s in self._initializers]
                if not self._only_moved(name):
                    result.computed[name] = sources
                elif own:
                    result.split[name] = own[0]
                elif (first := moved.setdefault(tuple(sources), name)) != name:
                    result.split[name] = first
            elif is_generated(name):
                result.parameters[name] = False

    def _only_moved(self, name: str) -> bool:
        calls = [_call_of(node) for node, _ in self._readers.get(name, ())]
        if _INTERNAL.fullmatch(name) and not all(map(_MOVES_INSIDE.search, calls)):
            return False
        sources = [s for s in self._sources[name] if s in self._kinds]
        # Recurrent layers have the weights of both directions in one tensor; other calls multiply.
        if len(sources) > 1 and not all(map(_JOINS_INSIDE.search, calls)):
            return False
        steps = [s for s in (name, *self._sources[name]) if s not in self._kinds]
        return all(_INTERNAL.fullmatch(step) or _MOVES.fullmatch(step) for step in steps)

    def _follow_calls(self) -> list[str]:
        """Name the initializers that calls read instead of others; return the parameters that are gone."""
        result = self.origins
        calls: dict[str, tuple[list[str], list[str]]] = {}
        copies = copied(self._graph, self._initializers)
        for node in all_nodes(self._graph.node):
            text = _call_of(node)
            if not text:
                continue
            if text not in calls:
                arguments = re.findall(r"%(\w+)", text.partition("args =")[2])
                named = dict.fromkeys(self._targets[a] for a in arguments if a in self._targets)
                calls[text] = (list(named), [])
            parameters, operands = calls[text]
            operands += [name for n in node.input if (name := copies.get(n, n)) in self._initializers]
            if node.op_type in ("Conv", "ConvTranspose") and "batch_norm" in text:
                self._note_folded(node, parameters)
        present = self._known()
        missing: dict[str, None] = {}
        for parameters, operands in calls.values():
            absent = [name for name in parameters if name not in present]
            for name, operand in self._assigned(absent, parameters, list(dict.fromkeys(operands))):
                if operand is None:
                    missing[name] = None
                else:
                    # A tensor about which the file says nothing is the parameter, in another form.
                    result.parameters[operand] = True
                    result.add_alias(operand, name)
        return list(missing)

    def _known(self) -> set[str]:
        inside = {name for found in self.origins.folded.values() for name in found}
        return {*self._initializers, *self.origins.all_aliases(), *inside}

    def _assigned(
        self, absent: list[str], parameters: list[str], operands: list[str]
    ) -> Iterator[tuple[str, str | None]]:
        """Yield the parameters of a call that are not in the file, with what the call reads instead."""
        names, told = self.origins.names, self.origins.parameters
        free = [o for o in operands if not set(names(o)) & set(parameters)]
        likely = [o for o in free if told.get(o) is not False]
        # Otherwise the ones about which nothing is known: older versions do not write what was folded.
        rest = likely or [o for o in free if _INTERNAL.fullmatch(o) and o not in self._sources]
        count = len(absent)
        for name in absent:
            alike = [o for o in rest if any(last_part(n) == last_part(name) for n in names(o))]
            chosen = alike[0] if alike else rest[0] if len(rest) == count else None
            if chosen is not None:
                rest.remove(chosen)
            count -= 1
            yield name, chosen

    def _find_lost(self, missing: Iterable[str]) -> None:
        """Find parameters that no call mentions: equal tensors that were computed from two were merged."""
        result = self.origins
        known = self._known() | set(missing)
        lost: dict[str, list[str]] = {}
        for target in self._targets.values():
            if target not in known:
                lost.setdefault(module_of_name(target), []).append(target)
        for node in all_nodes(self._graph.node) if lost else ():
            for target in lost.get(module_of(node), ()):
                for name in node.input:
                    others = [last_part(n) for n in result.aliases.get(name, ())]
                    if name in result.computed and last_part(target) in others:
                        result.add_alias(name, target)

    def _find_merged(self) -> None:
        result = self.origins
        for name, found in result.aliases.items():
            sources = self._sources.get(name, [])
            own = [name] if name in self._kinds else [alias for alias in found if alias in sources]
            others = [alias for alias in found if alias not in sources]
            if name not in result.folded and others and (own or len(others) > 1):
                result.merged[name] = [*own, *others]

    def _note_folded(self, node: onnx.NodeProto, parameters: list[str]) -> None:
        """Note that the weights of a convolution contain a batch normalization."""
        for name in node.input[1:3]:
            if name not in self._initializers:
                continue
            self.origins.parameters[name] = True
            self.origins.folded[name] = parameters
            if name not in self._kinds and name.endswith(".weight_bias"):
                self.origins.add_alias(name, name.removesuffix("weight_bias") + "bias")
