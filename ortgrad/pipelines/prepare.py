"""prepare: makes a model with gradient nodes ready for a session."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import onnx

from ortgrad.compiled import machine_code
from ortgrad.dialects.optimizers import PREVIEW_TRAINING, find_optimizer
from ortgrad.dialects.training import is_training_operator
from ortgrad.errors import MissingPackageError
from ortgrad.graph.loading import ModelLike, diagnosing, imports_domain, load_model, with_import
from ortgrad.graph.metadata import is_built
from ortgrad.graph.protos import all_nodes
from ortgrad.keywords import checked
from ortgrad.operators.declaration import PORTABLE_PREFIX, find_operator
from ortgrad.threads import forks_wait

if TYPE_CHECKING:
    import onnx_ir as ir

Kernels = Literal["python", "onnx", "compiled", "auto"]


@dataclass(frozen=True)
class GradientModel:
    """A model with gradients in memory, which a session takes without reading it again.

    It has gone through the opening passes and is used up by the session. `source` is its forward model.
    """

    model: ir.Model
    source: onnx.ModelProto

    def prepare(self, kernels: Kernels, *, internal: bool) -> onnx.ModelProto:
        """Do what `prepare_loaded` does, without bodies."""
        from ortgrad.pipelines.preparation import prepare_built  # onnx-ir is slow to import

        with diagnosing(self.source):
            return prepare_built(self.model, self.source, kernels, internal=internal)


@checked
def prepare(model: ModelLike, *, kernels: Kernels = "auto") -> onnx.ModelProto:
    """Return a model that a plain onnxruntime session runs; `model` may have any gradient nodes.

    kernels="python" keeps the gradient nodes: with `ortgrad.register` their Python kernels run, without
    it the bodies, which are part of the model. "onnx" replaces them by standard operators. "compiled"
    keeps the nodes whose kernels Numba can compile, and raises MissingPackageError without Numba. "auto"
    chooses per node whichever was measured fastest of what is installed. A model without gradient nodes only
    gets an import of com.microsoft, without which it may not load with the op library. The caller's model is
    not changed.

    >>> import onnx, ortgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
    ...     g (float[N] dy, float[N] x) => (float[N] dx) { dx = com.microsoft.ReluGrad(dy, x) }''')
    >>> "ReluGrad" in {node.op_type for node in ortgrad.prepare(model, kernels="onnx").graph.node}
    False
    """
    prepared = prepare_loaded(load_model(model), kernels)
    return prepared if imports_domain(prepared) else with_import(prepared)


def prepare_loaded(
    model: onnx.ModelProto, kernels: Kernels, *, bodies: bool = True, internal: bool = True
) -> onnx.ModelProto:
    """Implement `prepare` for a loaded model; a model without gradient nodes is returned unchanged.

    Without `bodies`, the remaining gradient nodes can run only on their Python kernels. Nodes are then fused,
    and constant integers dequantized, also in models of build_gradient_model without gradient nodes. Unless
    `internal`, no operators are used that are refused in files.
    """
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels is {kernels!r}; it must be one of {', '.join(get_args(Kernels))}")
    if kernels == "compiled" and not machine_code.is_installed():
        raise MissingPackageError(
            'kernels="compiled" needs Numba: pip install \'ortgrad[compiled]\'; "auto" does without it'
        )
    simplifies = not bodies and is_built(model) and (kernels in ("auto", "compiled") or _dequantizes(model))
    if not simplifies and not has_gradient_nodes(model):
        return model
    with forks_wait():
        # onnx-ir is slow to import, and models without gradient nodes do not need it.
        from ortgrad.pipelines.preparation import prepare_proto

    with forks_wait(), diagnosing(model):
        return prepare_proto(model, kernels, bodies=bodies, internal=internal)


def _dequantizes(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "DequantizeLinear" for node in all_nodes(model.graph.node))


def computes_gradients(model: onnx.ModelProto) -> bool:
    """Return whether a model has gradient nodes, or is one of build_gradient_model."""
    return is_built(model) or has_gradient_nodes(model)


def has_gradient_nodes(model: onnx.ModelProto) -> bool:
    """Return whether a model has gradient nodes, or others that onnxruntime-training added."""
    return _has_gradients(model.graph.node) or any(_has_gradients(f.node) for f in model.functions)


def _has_gradients(nodes: Iterable[onnx.NodeProto]) -> bool:
    return any(
        find_operator(node.op_type, node.domain)
        # onnxruntime-training has the pool gradients in the default domain.
        or (node.domain in ("", "ai.onnx") and find_operator(node.op_type))
        or is_training_operator(node.op_type, node.domain)
        or find_optimizer(node.op_type, node.domain)
        or node.domain.startswith(PORTABLE_PREFIX)
        or (node.op_type == "Gradient" and node.domain == PREVIEW_TRAINING)
        for node in all_nodes(nodes)
    )
