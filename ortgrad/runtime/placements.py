"""What a session runs for every node of a model: which way, which kernel, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import onnx

from ortgrad.compiled import machine_code
from ortgrad.graph.loading import ModelLike, load_model
from ortgrad.graph.protos import all_nodes
from ortgrad.lowering.fusion.kernel import DOMAIN, NAMES, fused_call
from ortgrad.operators.declaration import (
    CALL_ATTRIBUTE,
    INTERNAL_DOMAIN,
    PYTHON_TYPES,
    Operator,
    find_operator,
)
from ortgrad.pipelines.prepare import Kernels, prepare_loaded
from ortgrad.runtime.providers import Providers, kernels_for

# The element types of fused nodes.
_ELEMENTS = {(DOMAIN, name): element for element, name in NAMES.items()}

Way = Literal["compiled", "python", "body", "onnxruntime", "removed"]


@dataclass(frozen=True)
class Placement:
    """How a session runs a node of a model.

    `way` is "compiled" or "python" for kernels of ortgrad, "body" for a gradient node that is replaced by its
    body in standard ONNX operators, "onnxruntime" for its kernels, and "removed" for what is not computed in
    a run. `kernel` is the function or the operator that runs.
    """

    node: str
    operator: str
    way: Way
    kernel: str
    reason: str = ""


def placements(
    model: ModelLike, *, kernels: Kernels = "auto", providers: Providers | None = None
) -> list[Placement]:
    """Return a Placement for every node of a model that an InferenceSession with these arguments would run.

    The model is one of `build_gradient_model`, or another with gradient nodes; of other models onnxruntime
    runs all nodes. A compiled kernel leaves shapes that it does not support, which only a run may tell, to
    the NumPy kernel.

    >>> import ortgrad
    >>> from ortgrad.runtime.placements import placements
    >>> model = ortgrad.nodes.make_model(ortgrad.nodes.tanh_grad("dY", "Y", "dX"))
    >>> [(each.operator, each.way) for each in placements(model, kernels="onnx")]
    [('TanhGrad', 'body')]
    """
    proto = load_model(model)
    chosen = kernels_for(kernels, providers, None)
    prepared = prepare_loaded(proto, chosen, bodies=False)
    return _Session(prepared, chosen).explain(all_nodes(proto.graph.node))


class _Session:
    """A prepared model, and its nodes by what the nodes that they stand for are called."""

    def __init__(self, prepared: onnx.ModelProto, kernels: str) -> None:
        self._kernels = kernels
        self._types = _types(prepared)
        self._named: dict[str, onnx.NodeProto] = {}
        self._writers: dict[str, onnx.NodeProto] = {}
        self._parts: dict[str, int] = {}
        self._fused: dict[str, list[str]] = {}
        for node in all_nodes(prepared.graph.node):
            self._named.setdefault(node.name, node)
            self._writers.update((name, node) for name in node.output if name)
            steps = _fused_nodes(node)
            for name in steps:
                self._fused[name] = steps
            for name in steps or ([node.name] if node.op_type != "Constant" else []):
                # Nodes of a body are called like the node, and what follows a slash.
                while "/" in name:
                    name = name.rpartition("/")[0]
                    self._parts[name] = self._parts.get(name, 0) + 1

    def explain(self, nodes: Iterable[onnx.NodeProto]) -> list[Placement]:
        return [self._explain(node) for node in nodes]

    def _explain(self, node: onnx.NodeProto) -> Placement:
        label = node.name or next((name for name in node.output if name), "")
        if node.name in self._fused:
            steps = self._fused[node.name]
            reason = f"in one kernel with {_listed([name for name in steps if name != node.name])}"
            return Placement(label, node.op_type, "compiled", "fused", reason if len(steps) > 1 else "")
        found = self._named.get(node.name) if node.name else None
        merged = next((self._writers[name] for name in node.output if name in self._writers), None)
        if found is None and node.name in self._parts:
            kernel = f"{self._parts[node.name]} ONNX operators"
            return Placement(label, node.op_type, "body", kernel, self._why_body(node))
        run = found or merged
        if run is None:
            reason = "merged into another node, constant, or not needed"
            return Placement(label, node.op_type, "removed", "", reason)
        way, kernel, reason = self._kernel(run, node)
        if found is None and run.name != node.name:
            reason = f"merged into {run.name!r}"
        return Placement(label, node.op_type, way, kernel, reason)

    def _kernel(self, run: onnx.NodeProto, node: onnx.NodeProto) -> tuple[Way, str, str]:
        """Return way, kernel and reason of a node that runs, which stands for `node`."""
        operator = find_operator(run.op_type, run.domain)
        if operator is None:
            return "onnxruntime", run.op_type, ""
        compiled = operator.compiled_kernel
        if compiled is None or self._kernels not in ("auto", "compiled") or not machine_code.is_installed():
            return "python", _name(operator.kernel), self._why_python(operator)
        if run.domain == INTERNAL_DOMAIN:
            reason = f"{run.op_type}, measured to be faster than {node.op_type}"
        elif self._kernels == "compiled":
            reason = 'kernels="compiled"'
        else:
            reason = "measured to be the fastest way"
        return "compiled", compiled.function.__name__, reason

    def _why_python(self, operator: Operator) -> str:
        if self._kernels == "python":
            return 'kernels="python"'
        if operator.compiled_kernel is not None:
            return "its compiled kernel needs Numba, which is not installed"
        return "it has no compiled kernel, and its body was measured to be slower"

    def _why_body(self, node: onnx.NodeProto) -> str:
        if self._kernels == "onnx":
            return 'kernels="onnx"'
        others = {self._types.get(name, "") for name in (*node.input, *node.output)} - {"", *PYTHON_TYPES}
        if others:
            return f"kernels of ortgrad do not compute in {sorted(others)[0]}"
        operator = find_operator(node.op_type, node.domain)
        if operator is not None and operator.compiled_kernel is not None and machine_code.is_installed():
            return "measured to be faster here than the compiled kernel"
        return "measured to be faster than the NumPy kernel"


def _fused_nodes(node: onnx.NodeProto) -> list[str]:
    """Return the names of the nodes that a fused node computes; none of another node."""
    element = _ELEMENTS.get((node.domain, node.op_type))
    text = next((a.s for a in node.attribute if a.name == CALL_ATTRIBUTE), None)
    return [] if element is None or text is None else list(fused_call(text, element).attributes["nodes"])


def _types(model: onnx.ModelProto) -> dict[str, str]:
    """Return the element types of values, as far as the model declares them."""
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    kinds |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    return {name: onnx.helper.tensor_dtype_to_np_dtype(k).name for name, k in kinds.items() if k}


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
