"""Turns onnxruntime's error about a failed comparison of shapes into a KernelError."""

from __future__ import annotations

import re

from ortgrad.errors import KernelError

# Separates the operator from the required condition in the names of nodes that check a call at run time.
REQUIRES = " requires "
# Matches such a name as onnxruntime quotes it in an error message.
_NAME = re.compile(
    rf"Name:'.*?: (?:(?P<node>.*) )?(?P<operator>\w+){REQUIRES}(?P<what>.*?)' Status Message:", re.DOTALL
)


def failed_check(text: str, inputs: str = "that do not fit") -> KernelError | None:
    """Return the KernelError for an error message of onnxruntime; None if no checking node caused it."""
    found = _NAME.search(text)
    if found is None:
        return None
    node, operator, what = found["node"] or "(in a function)", found["operator"], found["what"]
    return KernelError(node, operator, inputs, f"it requires {what}")
