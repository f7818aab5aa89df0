"""check_gradients on models with kinks and noise: nothing right is WRONG, everything wrong is found.

`python tests/check/test_check_sweep.py 200` runs all models with 200 seeds, and all mutations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import onnx
import pytest

import ortgrad
from ortgrad.check import GradientCheck
from ortgrad.check.running import Backward

HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
# Nodes from x to y, by name.
KINKS = {
    "Relu": "h = MatMul(x, w) r = Relu(h) y = MatMul(r, w)",
    "deep Relu": "a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) d = Relu(c) e = MatMul(d, w) y = Relu(e)",
    "Abs": "h = MatMul(x, w) y = Abs(h)",
    "Max": "h = MatMul(x, w) y = Max(x, h)",
    "Clip": "h = MatMul(x, w) low = Neg(one) y = Clip(h, low, one)",
    "LeakyRelu": "h = MatMul(x, w) y = LeakyRelu<alpha = 0.1>(h)",
    "HardSigmoid": "h = MatMul(x, w) y = HardSigmoid(h)",
    "HardSwish": "h = MatMul(x, w) y = HardSwish(h)",
    "MaxPool": "h = MatMul(x, w) y = MaxPool<kernel_shape = [3], pads = [1, 1]>(h)",
    "ReduceMax": "h = MatMul(x, w) y = ReduceMax<keepdims = 0>(h)",
    "TopK": "k = Constant<value_ints = [3]>() h = MatMul(x, w) y, i = TopK(h, k)",
    "Sign": "h = MatMul(x, w) s = Sign(h) y = Mul(h, s)",
    "Round": "h = MatMul(x, w) s = Round(h) y = Sub(h, s)",
    "Where": "h = MatMul(x, w) c = Greater(h, x) y = Where(c, h, x)",
    "Conv": "h = Conv<pads = [1, 1]>(x, f) y = Relu(h)",
    "two pools": """h = Conv<pads = [1, 1]>(x, f) r = Relu(h)
        p = MaxPool<kernel_shape = [2]>(r) y = AveragePool<kernel_shape = [2]>(p)""",
}
NOISE = {
    "Softmax": "h = MatMul(x, w) b = Mul(h, ten) y = Softmax(b)",
    "saturated Sigmoid": "h = MatMul(x, w) b = Mul(h, ten) y = Sigmoid(b)",
    "saturated Tanh": "h = MatMul(x, w) b = Mul(h, ten) y = Tanh(b)",
    "Erf": "h = MatMul(x, w) y = Erf(h)",
    "Gelu": "h = MatMul(x, w) y = Gelu(h)",
    "QuickGelu": "h = MatMul(x, w) y = com.microsoft.QuickGelu(h)",
    "BiasGelu": "h = MatMul(x, w) y = com.microsoft.BiasGelu(h, v)",
    "LayerNormalization": "h = MatMul(x, w) y = LayerNormalization(h, v)",
    "InstanceNormalization": "h = MatMul(x, w) y = InstanceNormalization(h, u, u)",
    "cancellation": "h = MatMul(x, w) b = Add(h, large) y = Sub(b, large)",
    "logarithm": "h = MatMul(x, w) s = Mul(h, h) e = Add(s, small) y = Log(e)",
    "root": "h = MatMul(x, w) s = Mul(h, h) e = Add(s, small) y = Sqrt(e)",
    "variance": "m = ReduceMean(x) c = Sub(x, m) s = Mul(c, c) v2 = ReduceMean(s) y = Reciprocal(v2)",
    "Exp": "h = MatMul(x, w) y = Exp(h)",
    "Resize": """s = Constant<value_floats = [1.0, 1.0, 1.7]>() h = MatMul(x, w)
        y = Resize<mode = "linear">(h, , s)""",
    "Cast": "h = MatMul(x, w) n = Cast<to = 10>(h) y = Cast<to = 1>(n)",
    "a constant": "h = MatMul(x, w) d = Div(h, ten) t = Tanh(d) y = Mul(t, ten)",
}
MODELS = {**KINKS, **NOISE}
# Gradients as something that is wrong would give them.
MUTATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "one percent more": lambda g: g * g.dtype.type(1.01),
    "a term is missing": lambda g: g - 0.1 * np.abs(g).max(),
    "axes swapped": lambda g: np.swapaxes(g, -1, -2).reshape(g.shape),
    "wrong sign in one branch": lambda g: np.where(g < 0, -g, g),
    "shifted by one": lambda g: np.roll(g, 1, axis=-1),
}


def model_of(nodes: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""{HEAD} g (float[6, 4, 8] x, float[8, 8] w, float[5, 4, 3] f, float[8] v, float[4] u)
        => (float[A, B, C] y)
        <float one = {{1}}, float ten = {{10}}, float large = {{30000}}, float small = {{0.000001}}>
        {{ {nodes} }}"""
    )
    used = {name for node in model.graph.node for name in node.input}
    kept = [value for value in model.graph.input if value.name in used]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def check(name: str, seed: int, wrt: list[str] | None = None) -> GradientCheck:
    model = model_of(MODELS[name])
    generator = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        array = generator.standard_normal(shape) * 10.0 ** generator.uniform(-2, 1)
        # Many zeros and equal elements: on the kinks themselves.
        feeds[value.name] = (np.round(array, 1) if seed % 3 == 0 else array).astype(np.float32)
    return ortgrad.check_gradients(model, feeds, wrt=wrt, seed=seed)


@pytest.mark.filterwarnings("ignore::ortgrad.StoppedGradientWarning")
@pytest.mark.parametrize("name", MODELS)
def test_nothing_right_is_wrong(name: str) -> None:
    result = check(name, len(name))
    assert not any(row.wrong for row in result.rows), result


@pytest.mark.parametrize("name", ["deep Relu", "two pools", "saturated Sigmoid", "QuickGelu", "cancellation"])
def test_everything_wrong_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missed = undetected(name, 1, monkeypatch)
    assert not missed, missed


def undetected(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The mutations that are not found."""
    right, missed = Backward.run, []
    for mutation, function in MUTATIONS.items():

        def mutated(
            self: Backward,
            feeds: dict[str, np.ndarray],
            change: Callable[[np.ndarray], np.ndarray] = function,
        ) -> dict[str, np.ndarray]:
            return {k: change(g).astype(g.dtype) for k, g in right(self, feeds).items()}

        with monkeypatch.context() as patch:
            patch.setattr(Backward, "run", mutated)
            if not any(row.wrong for row in check(name, seed, ["x"]).rows):
                missed.append(f"{name}: {mutation}")
    return missed


if __name__ == "__main__":
    seeds = int(sys.argv[1])
    wrong, judged, rows, missed = [], 0, 0, []
    for name in MODELS:
        for seed in range(seeds):
            result = check(name, seed)
            rows += len(result.rows)
            judged += sum(row.judged for row in result.rows)
            wrong += [f"{name}, seed {seed}: {row}" for row in result.rows if row.wrong]
        missed += undetected(name, 1, pytest.MonkeyPatch())
        print(
            f"{name}: {judged} of {rows} judged, {len(wrong)} WRONG, {len(missed)} mutations missed",
            flush=True,
        )
    print("\n".join([*wrong, *missed]))
