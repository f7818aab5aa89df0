"""check_gradients: compares gradients with central differences along random directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ortgrad.check.result import GradientCheck
from ortgrad.graph.loading import ModelLike, load_model
from ortgrad.keywords import checked
from ortgrad.pipelines.build import names_of
from ortgrad.pipelines.prepare import Kernels
from ortgrad.threads import forks_wait


@checked
def check_gradients(
    model: ModelLike,
    feeds: Mapping[str, np.ndarray] | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    kernels: Kernels = "auto",
    directions: int = 3,
    tolerance: float | None = None,
    per_node: bool = False,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
    seconds: float | None = 180.0,
) -> GradientCheck:
    """Compare the gradients of a model with central differences of its forward pass in float64.

    Inputs that are not in `feeds` are drawn at random: symbolic dimensions get small sizes, integers are 0
    or 1. `wrt` defaults to all floating-point inputs and initializers that a gradient can reach, `of` to all
    floating-point outputs. With `per_node`, every node between `wrt` and `of` is also checked on its own, on
    the values that it receives in the model. `progress(done, total, name)` is called once at the start, and
    after every gradient and node. If the forward pass is slow, gradients are checked in groups that move
    together. After about `seconds` (None: no limit), what is left is not judged; the nodes get the same time
    again.

    The forward pass runs on onnxruntime if it has double kernels, else on onnx's reference implementation,
    else in single precision; the result says which. The gradients are computed in the model's own types and,
    if onnxruntime can, in double. A gradient whose relative error exceeds `tolerance` (default: by element
    type) is wrong, unless something else may explain it: measured rounding, a kink, or differences that do
    not converge. It is then not judged, and neither are the straight-through gradients of quantized models.
    The module `ortgrad.check.verdicts` has the mathematics.

    Where the function has a kink, such as Relu at 0, the gradients are checked at a point beside it. Random
    operators, such as a Dropout in training mode, are drawn once and give the same results everywhere.

    >>> import onnx, ortgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x, float[3, 2] w) => (float[N, 2] y) { y = MatMul(x, w) }''')
    >>> ortgrad.check_gradients(model, wrt="w").ok
    True
    """
    with forks_wait():
        from ortgrad.check.procedure import Arguments, check  # onnx-ir is slow to import

    proto = load_model(model)
    given = {name: np.asarray(array) for name, array in (feeds or {}).items()}
    arguments = Arguments(
        names_of("wrt", wrt), names_of("of", of), kernels, directions, tolerance, seed, seconds
    )
    report = progress if progress is not None else lambda done, total, name: None
    return check(proto, given, arguments, report, per_node=per_node)
