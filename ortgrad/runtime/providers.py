"""Which ways to run a node suit the execution providers of a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnxruntime

from ortgrad.pipelines.prepare import Kernels

CPU = "CPUExecutionProvider"
# It only calls models on a server, and every stock wheel has it.
_WITHOUT_KERNELS = frozenset(["AzureExecutionProvider"])

Providers = Sequence[str | tuple[str, dict[Any, Any]]]


def kernels_for(
    kernels: Kernels, providers: Providers | None, options: onnxruntime.SessionOptions | None
) -> Kernels:
    """Return `kernels`, or "onnx" instead of "auto" if another provider than the CPU's runs nodes.

    ortgrad's own kernels run on the CPU. Between nodes of another provider each of them would need its inputs
    and outputs copied, and would keep the provider from the nodes that are fused.
    """
    return "onnx" if kernels == "auto" and runs_elsewhere(providers, options) else kernels


def runs_elsewhere(providers: Providers | None, options: onnxruntime.SessionOptions | None) -> bool:
    """Return whether a provider other than the CPU's is asked first.

    onnxruntime asks them in the order given. It warns about those that are not part of the installed wheel,
    and goes on without them.
    """
    if options is not None and options.has_providers():
        # onnxruntime then takes those of the options, and does not tell which they are.
        return True
    available = onnxruntime.get_available_providers()
    for provider in providers or ():
        name = provider if isinstance(provider, str) else provider[0]
        if name == CPU:
            return False
        if name in available and name not in _WITHOUT_KERNELS:
            return True
    return False
