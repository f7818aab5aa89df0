"""Second derivatives: a Hessian-vector product, and Newton's method with it.

    python examples/second_derivatives.py

A backward graph is an ONNX model like any other, so it can be differentiated again. The gradient
of <gradient, v> is the Hessian times v, without the Hessian ever being made.
"""

from __future__ import annotations

import numpy as np
import onnx

import ortgrad

# Logistic regression in float64: the loss has one minimum, and a Hessian that depends on w.
MODEL = """
    <ir_version: 10, opset_import: ["" : 21]>
    logistic (double[N, 4] x, double[N] sign, double[4] w) => (double loss) {
        score = MatMul(x, w)
        margin = Mul(score, sign)
        probability = Sigmoid(margin)
        likelihood = Log(probability)
        losses = Neg(likelihood)
        mean = ReduceMean<keepdims = 0>(losses)
        square = ReduceSumSquare<keepdims = 0>(w)
        factor = Constant<value_float = 0.01>()
        weight = CastLike(factor, w)
        penalty = Mul(weight, square)
        loss = Add(mean, penalty)
    }
"""


def main() -> tuple[float, list[float]]:
    """Returns the largest error of a Hessian-vector product, and the gradient's norm in Newton's steps."""
    gradient_model = ortgrad.build_gradient_model(onnx.parser.parse_model(MODEL), wrt="w", of="loss")
    # `w_grad` is a vector, so differentiating it takes a vector to multiply from the left: the input
    # `w_grad_grad`. The Hessian is symmetric, so this is the Hessian-vector product.
    hessian_model = ortgrad.build_gradient_model(gradient_model, wrt="w", of="w_grad")
    session = ortgrad.InferenceSession(hessian_model)
    print("inputs: ", ", ".join(i.name for i in session.get_inputs()))
    print("outputs:", ", ".join(o.name for o in session.get_outputs()))

    generator = np.random.default_rng(0)
    x = generator.standard_normal((50, 4))
    sign = np.sign(x @ [1, -2, 0.5, 0] + 0.5 * generator.standard_normal(50))
    w = np.zeros(4)

    def gradient_and_product(at: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        feeds = {"x": x, "sign": sign, "w": at, "w_grad_grad": v}
        _, gradient, product = session.run(None, feeds)
        return gradient, product

    # The check: the difference of two gradients is the Hessian-vector product too.
    point, v, step = generator.standard_normal(4), generator.standard_normal(4), 1e-5
    _, product = gradient_and_product(point, v)
    ahead, _ = gradient_and_product(point + step * v, v)
    behind, _ = gradient_and_product(point - step * v, v)
    error = float(np.abs(product - (ahead - behind) / (2 * step)).max())
    print(f"Hessian times v: {product}, {error:.1e} from the difference of gradients")

    # Newton's method: w -= H^-1 gradient. Four products with unit vectors make this small Hessian.
    norms = []
    for number in range(6):
        columns = [gradient_and_product(w, unit) for unit in np.eye(4)]
        gradient, hessian = columns[0][0], np.stack([column for _, column in columns])
        norms.append(float(np.linalg.norm(gradient)))
        print(f"step {number}: |gradient| = {norms[-1]:.1e}")
        w = w - np.linalg.solve(hessian, gradient)
    return error, norms


if __name__ == "__main__":
    main()
