"""Build the backward graph of a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import onnx

from ortgrad.errors import StoppedGradientWarning
from ortgrad.graph.loading import ModelLike, judging, load_model


def build_gradient_model(
    model: ModelLike,
    *,
    wrt: str | Sequence[str] | None = None,
    of: str | Sequence[str] | None = None,
    straight_through: bool = True,
) -> onnx.ModelProto:
    """A model with the same outputs and, for every name in `wrt`, the gradient `<name>_grad`.

    `wrt` names inputs, initializers or intermediate values. A name that is not in the model may be a pattern
    (`"layer4.*"`, see fnmatch): it stands for the inputs and parameters that it matches, else for other
    constants, else for intermediate values. The default is every parameter: a floating-point weight, be it an
    initializer, a Constant node or one of them inside a subgraph, that is no scalar, no statistic of a
    BatchNormalization and no setting of an operator (scales, ratios, bounds, exponents). Weights in `wrt` can
    be fed from then on.

    `of` names outputs or intermediate values (default: the first floating-point output). One scalar is seeded
    with 1; otherwise the model gets an input `<name>_grad` for each. Where a name is taken, `_2` is
    appended. What does not influence `of` has a gradient of zeros; if it does, but every path is stopped by
    an operator without a gradient, there is a StoppedGradientWarning.

    Quantised models have straight-through gradients: rounding counts as the identity, and what is outside of
    the range has a gradient of 0. With `straight_through=False` nodes that need them are refused.

    The model's metadata_props say what was built: `ortgrad.version`, and `ortgrad.wrt` and `ortgrad.of` as
    JSON lists of names. Raises UnsupportedGradientError with all nodes that cannot be differentiated.

    >>> import onnx, ortgrad
    >>> model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N, 3] x, float[3, 2] w) => (float loss)
    ...     { y = MatMul(x, w) loss = ReduceMean<keepdims = 0>(y) }''')
    >>> backward = ortgrad.build_gradient_model(model, wrt=["x", "w"], of="loss")
    >>> [value.name for value in backward.graph.output]
    ['loss', 'x_grad', 'w_grad']
    """
    from ortgrad.pipelines.gradients import build  # onnx-ir takes a while to import

    proto = load_model(model)
    with judging(proto):
        built, stopped = build(proto, names_of(wrt), names_of(of), straight_through)
    if stopped is not None:
        warnings.warn(stopped, StoppedGradientWarning, stacklevel=2)
    return built


def names_of(names: str | Sequence[str] | None) -> list[str] | None:
    """`wrt` or `of` as a list of names, None if it is not given."""
    if names is None:
        return None
    # Once each, in the order given.
    return list(dict.fromkeys([names] if isinstance(names, str) else names))
