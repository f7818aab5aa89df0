"""What a failing run says about a malformed call."""

from __future__ import annotations

import re

from ortgrad.errors import KernelError

# In the name of a node that fails if a call is malformed: what must hold stands after it.
REQUIRES = " requires "
# The name as an error of onnxruntime quotes it.
_NAME = re.compile(
    rf"Name:'.*?: (?:(?P<node>.*) )?(?P<operator>\w+){REQUIRES}(?P<what>.*?)' Status Message:", re.DOTALL
)


def explain(text: str, inputs: str = "that do not fit") -> KernelError | None:
    """The KernelError for an error of onnxruntime's that a comparison of shapes caused, else None."""
    found = _NAME.search(text)
    if found is None:
        return None
    node, operator, what = found["node"] or "(in a function)", found["operator"], found["what"]
    return KernelError(node, operator, inputs, f"it requires {what}")
