"""An operator that ONNX does not have, with a gradient rule of one's own.

    python examples/custom_rule.py

SquarePlus, (X + sqrt(X^2 + 4)) / 2, is a smooth Relu. It is declared once, together with its gradient
operator and the rule that leads from one to the other; then it trains like any other. Both operators have
a NumPy kernel, and a body in standard ONNX operators that goes into the model, so that the file runs
where there is no Python.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime

import ortgrad

DOMAIN = "example.ortgrad"


@ortgrad.operator("SquarePlus", domain=DOMAIN, inputs=["X"], outputs=["Y"], shapes="X", auto="python")
def square_plus(x):
    """Y = (X + sqrt(X^2 + 4)) / 2"""
    return (x + np.sqrt(x * x + 4)) / 2


@square_plus.onnx
def square_plus_body(op, x):
    return (x + op.Sqrt(x * x + 4.0)) * 0.5


@ortgrad.operator(
    "SquarePlusGrad", domain=DOMAIN, inputs=["dY", "X", "Y"], outputs=["dX"], shapes="X", auto="python"
)
def square_plus_grad(dy, x, y):
    """dX = dY * Y / (2 * Y - X), as 2 * Y - X is the root in Y"""
    return dy * y / (2 * y - x)


@square_plus_grad.onnx
def square_plus_grad_body(op, dy, x, y):
    return dy * y / (y * 2.0 - x)


# The gradient of the input of SquarePlus, from that of its output. A rule for several inputs returns a tuple.
@ortgrad.gradient("SquarePlus", domain=DOMAIN)
def square_plus_gradient(node):
    return node.op.SquarePlusGrad(node.grad(0), node.input(0), node.output(0))


MODEL = """
    <ir_version: 10, opset_import: ["" : 21, "example.ortgrad" : 1]>
    network (float[N, 2] x, float[N, 1] target) => (float loss)
        <float[2, 3] w1 = {0.5, -0.3, 0.8, -0.6, 0.4, 0.2}, float[3, 1] w2 = {0.3, -0.7, 0.5}> {
        z = MatMul(x, w1)
        hidden = example.ortgrad.SquarePlus(z)
        y = MatMul(hidden, w2)
        error = Sub(y, target)
        square = Mul(error, error)
        loss = ReduceMean<keepdims = 0>(square)
    }
"""


def main() -> tuple[ortgrad.GradientCheck, float, float]:
    """Returns the check, and the loss before and after some gradient steps."""
    model = onnx.parser.parse_model(MODEL)
    check = ortgrad.check_gradients(model, wrt=["x", "w1", "w2"], per_node=True)
    print(check)

    backward = ortgrad.build_gradient_model(model, wrt=["w1", "w2"], of="loss")
    session = ortgrad.InferenceSession(backward)  # runs the NumPy kernels above
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # no warnings of weights that can be fed
    plain = onnxruntime.InferenceSession(  # runs the bodies that the model carries
        backward.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )

    x = np.random.default_rng(0).standard_normal((64, 2), dtype=np.float32)
    target = np.abs(x).sum(axis=1, keepdims=True)
    weights = {t.name: onnx.numpy_helper.to_array(t).copy() for t in model.graph.initializer}
    losses = []
    for _ in range(300):
        feeds = {"x": x, "target": target, **weights}
        loss, *gradients = session.run(None, feeds)
        losses.append(float(loss))
        for name, gradient in zip(weights, gradients, strict=True):
            weights[name] -= 0.1 * gradient
    for ours, theirs in zip(session.run(None, feeds), plain.run(None, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    print(f"loss {losses[0]:.3f} before training, {losses[-1]:.3f} after")
    return check, losses[0], losses[-1]


if __name__ == "__main__":
    main()
