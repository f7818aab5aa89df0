"""The result of check_gradients, and its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ortgrad.errors import WrongGradientError
from ortgrad.keywords import checked


@dataclass(frozen=True)
class Row:
    """The worst relative error of one gradient, or of one node, in all directions.

    `tolerance` is the error that rounding explains: that of the element type plus measured rounding.
    """

    name: str
    error: float
    tolerance: float
    note: str = ""
    judged: bool = True

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; False for NaN, and if the gradient is not judged."""
        return self.judged and self.error <= self.tolerance

    @property
    def wrong(self) -> bool:
        """Whether the gradient is wrong."""
        return self.judged and not self.ok


def unjudged(name: str, reason: str) -> Row:
    """Return the row of a gradient, or of a node, that is not judged."""
    return Row(name, math.nan, math.nan, reason, judged=False)


@checked
@dataclass(frozen=True)
class GradientCheck:
    """The result of `check_gradients`. `forward` says what ran the forward pass.

    `gradients` has the precisions in which the gradients were computed, `fixed` the random nodes whose
    results were drawn once.

    >>> import onnx, ortgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x) => (float[N, 3] y) { y = Tanh(x) }''')
    >>> result = ortgrad.check_gradients(model)
    >>> result.ok, [row.name for row in result.rows]
    (True, ['x'])
    """

    rows: tuple[Row, ...]
    forward: str
    nodes: tuple[Row, ...] = ()
    gradients: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no gradient and no node is wrong, and at least one gradient is right."""
        return any(row.ok for row in self.rows) and not any(row.wrong for row in (*self.rows, *self.nodes))

    @property
    def judged(self) -> bool:
        """Whether at least one gradient or node could be judged."""
        return any(row.judged for row in (*self.rows, *self.nodes))

    def raise_if_wrong(self) -> None:
        """Raise WrongGradientError with the table, unless `ok`."""
        if not self.ok:
            what = "disagree with central differences" if self.judged else "could not be judged"
            raise WrongGradientError(f"gradients {what}\n{self}")

    def __str__(self) -> str:
        rows = (*self.rows, *self.nodes)
        width = max(len(row.name) for row in rows)
        lines = [f"forward pass: {self.forward}; gradients: {' and '.join(self.gradients)}"]
        if self.fixed:
            lines.append(_describe_draws(self.fixed))
        for row in rows:
            if row.judged:
                verdict = "ok   " if row.ok else "WRONG"
                line = f"{row.name:<{width}}  {verdict}  error {row.error:.1e}, allowed {row.tolerance:.0e}"
            else:
                line = f"{row.name:<{width}}  not judged:"
            lines.append(f"{line}  {row.note}".rstrip())
        return "\n".join(lines)


def _describe_draws(fixed: Sequence[str]) -> str:
    nodes = ", ".join(fixed[:3]) + (f" and {len(fixed) - 3} more" if len(fixed) > 3 else "")
    return (
        f"the model is random: {nodes}. The results were drawn once and are the same for the gradients and "
        "for the differences"
    )
