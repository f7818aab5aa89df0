"""Optimizers on flat arrays: kernels, threads, and the reading of optimizer models."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from support import GOLDEN, PATIENCE
from support.optimizers import NAMES, SEQUENCE, adamw, optimizer_model

import ortgrad
from ortgrad.compat import optimizer_nodes
from ortgrad.compiled import machine_code
from ortgrad.errors import RegistrationError, TrainingModelError
from ortgrad.training.buffers import Arena
from ortgrad.training.optimizers import kernels, passes
from ortgrad.training.optimizers.formulas import record
from ortgrad.training.optimizers.passes import CHUNK, Pass, Sums, Update
from ortgrad.training.state import Group

ALL: dict[str, Update | Sums]
ALL = {name: value for name, value in vars(kernels).items() if isinstance(value, Pass)}
WAYS = [pytest.param(True, id="compiled"), pytest.param(False, id="numpy")]
TYPES = [np.float32, np.float64]
SIZES = [1, 7, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17]


def numbers_of(kernel: Pass) -> dict[str, float]:
    values = {"beta1": 0.9, "rest1": 0.1, "beta2": 0.99, "rest2": 0.01, "epsilon": 1e-3, "root": 1.25}
    values.update(rate=0.1, before=0.99, after=0.98, factor=0.25, bound=0.5, decay=0.2, momentum=0.9)
    values.update(rest=0.7, direct=1.0, through=0.8, alpha=0.6, centered=1.0)
    return {name: values[name] for name in kernel.kernel.numbers}


def arrays_of(kernel: Pass, size: int, dtype: Any, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    made = [generator.standard_normal(size).astype(dtype) for _ in range(kernel.arrays)]
    if len(made) == 4:
        made[3] = abs(made[3])
    elif len(made) in (3, 5):
        # The mean of the squares, which is not less than the square of the mean.
        made[2] = abs(made[2]) + (0 if len(made) == 3 else 40)
    return made + [np.zeros(-(-size // CHUNK)) for _ in range(kernel.kernel.tensors - kernel.arrays)]


def by_formula(name: str, arrays: list[np.ndarray], n: dict[str, float]) -> list[np.ndarray]:
    """The same in double precision, straight from the formula."""
    values = [array.astype(np.float64) for array in arrays]
    if name == "adamw":
        w, g, m, v = values
        m = n["beta1"] * m + n["rest1"] * g
        v = n["beta2"] * v + n["rest2"] * g * g
        w = (w * n["before"] - n["rate"] * m / (n["root"] * np.sqrt(v) + n["epsilon"])) * n["after"]
        return [w, g, m, v]
    if name == "sgd":
        return [values[0] - n["rate"] * values[1], values[1]]
    if name == "scale":
        return [values[0] * n["factor"]]
    if name == "clamp":
        return [np.minimum(np.maximum(values[0], -n["bound"]), n["bound"])]
    if name != "squares":
        return by_decaying_formula(name, values, n)
    g = values[0]
    return [g, np.array([math.fsum(g[i : i + CHUNK] ** 2) for i in range(0, g.size, CHUNK)])]


def by_decaying_formula(name: str, values: list[np.ndarray], n: dict[str, float]) -> list[np.ndarray]:
    """Optimizers in which the weight decay is added to the gradient."""
    w, g, *state = values
    d = g + n["decay"] * w
    if name == "add_decay":
        return [w, d]
    if name == "decayed_sgd":
        return [w - n["rate"] * d, g]
    if name == "momentum_sgd":
        m = n["momentum"] * state[0] + n["rest"] * d
        return [w - n["rate"] * (n["direct"] * d + n["through"] * m), g, m]
    if name == "adagrad":
        v = state[0] + d * d
        return [w - n["rate"] * d / (np.sqrt(v) + n["epsilon"]), g, v]
    v = n["alpha"] * state[0] + n["rest"] * d * d
    if name == "rmsprop":
        return [w - n["rate"] * d / (np.sqrt(v) + n["epsilon"]), g, v]
    assert name == "centered_rmsprop"
    c = (1 - n["rest"]) * state[1] + n["rest"] * d
    m = n["momentum"] * state[2] + d / (np.sqrt(v - n["centered"] * c * c) + n["epsilon"])
    return [w - n["rate"] * m, g, v, c, m]


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ALL)
def test_kernels_are_their_formulas(name: str, dtype: Any, compiled: bool) -> None:
    kernel = ALL[name]
    for size in SIZES:
        arrays, numbers = arrays_of(kernel, size, dtype, size), numbers_of(kernel)
        expected = by_formula(name, arrays, numbers)
        kernel(*arrays, compiled=compiled, **numbers)
        for actual, wanted in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5 if dtype == np.float32 else 1e-13, atol=1e-6)


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_results_do_not_depend_on_threads(name: str, compiled: bool) -> None:
    kernel, size = ALL[name], 40 * CHUNK + 5
    one = arrays_of(kernel, size, np.float32)
    kernel(*one, compiled=compiled, threads=1, **numbers_of(kernel))
    for threads in (2, 3, 8):
        several = arrays_of(kernel, size, np.float32)
        kernel(*several, compiled=compiled, threads=threads, **numbers_of(kernel))
        for a, b in zip(one, several, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_no_elements(name: str, compiled: bool) -> None:
    arrays = arrays_of(ALL[name], 0, np.float32)
    ALL[name](*arrays, compiled=compiled, threads=4, **numbers_of(ALL[name]))


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_nothing_outside_of_the_arrays_is_written(name: str, compiled: bool) -> None:
    kernel, size = ALL[name], CHUNK + 9
    whole = arrays_of(kernel, size + 200, np.float32)
    if isinstance(kernel, Sums):
        whole[-1] = np.zeros(2 + 200)
    before = [array.copy() for array in whole]
    inner = [array[100:-100] for array in whole]
    kernel(*inner, compiled=compiled, **numbers_of(kernel))
    for array, old in zip(whole, before, strict=True):
        assert np.array_equal(array[:100], old[:100])
        assert np.array_equal(array[-100:], old[-100:])


@pytest.mark.parametrize("name", ALL)
def test_compiled_code_stays_within_bounds(name: str) -> None:
    """With checked indices, on all chunks; and formulas, which have no indices, on single elements."""
    pytest.importorskip("numba")
    from ortgrad.compiled.compiler import compile_function
    from ortgrad.compiled.source import source_of

    kernel = ALL[name]
    source = source_of(kernel.kernel, kernel.types(np.dtype(np.float32)))
    function = compile_function(source.phases[0], "float32", {"contract"}, checked=True)
    for size in (1, CHUNK, CHUNK + 1):
        arrays, numbers = arrays_of(kernel, size, np.float32), numbers_of(kernel)
        expected = by_formula(name, arrays, numbers)
        values = [np.float32(numbers[key]) for key in kernel.kernel.numbers]
        if isinstance(kernel, Sums):
            for chunk in range(-(-size // CHUNK)):
                function(chunk, *arrays)
        else:
            bundles = [each.kind(*values) for each in kernel.kernel.arguments if not isinstance(each, str)]
            for k in range(size):
                found = function(*(array[k] for array in arrays), *(bundles or values))
                for i, each in zip(kernel.updated, np.atleast_1d(found), strict=True):
                    arrays[i][k] = each
        for actual, wanted in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_arrays_that_do_not_fit_are_refused(name: str) -> None:
    kernel, numbers = ALL[name], numbers_of(ALL[name])
    good = arrays_of(kernel, 100, np.float32)
    wrong: list[np.ndarray] = [
        np.zeros((10, 10), np.float32),
        np.zeros(100, np.int32),
        np.zeros(200, np.float32)[::2],
        np.zeros(100, np.float16),
        np.frombuffer(bytes(400), np.float32),
        np.zeros(401, np.uint8)[1:].view(np.float32),
    ]
    for i in range(len(good)):
        bad = [*wrong, np.zeros(99, np.float32), np.zeros(101, np.float32)]
        for array in bad if kernel.arrays > 1 else wrong:
            arrays = list(good)
            arrays[i] = array
            with pytest.raises(ValueError, match=r"array|kernel"):
                kernel(*arrays, **numbers)
    with pytest.raises(TypeError, match="arrays"):
        kernel(*good, good[0], **numbers)
    with pytest.raises(TypeError, match="arrays"):
        kernel(*good, **numbers, more=1.0)


@pytest.mark.parametrize("compiled", WAYS)
def test_nan_and_infinities(compiled: bool) -> None:
    """As element by element in NumPy, without warnings."""
    special = np.float32([np.nan, np.inf, -np.inf, 0, 1e38, 1e-45])
    w, g = (array.reshape(-1).copy() for array in np.meshgrid(special, special))
    m, v = np.ones_like(w), np.ones_like(w)
    arrays, numbers = [w, g, m, v], numbers_of(kernels.adamw)
    with np.errstate(all="ignore"):
        single = {name: np.float32(value) for name, value in numbers.items()}
        mm = single["beta1"] * m + single["rest1"] * g
        vv = single["beta2"] * v + single["rest2"] * (g * g)
        ww = w * single["before"] - single["rate"] * mm / (np.sqrt(vv) * single["root"] + single["epsilon"])
        ww = ww * single["after"]
    kernels.adamw(*arrays, compiled=compiled, **numbers)
    for actual, wanted in zip((w, m, v), (ww, mm, vv), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5)


@pytest.mark.parametrize("compiled", WAYS)
def test_norm_is_accurate(compiled: bool) -> None:
    values = np.random.default_rng(0).standard_normal(1_000_003).astype(np.float32)
    exact = math.sqrt(math.fsum(float(x) ** 2 for x in values))
    assert kernels.norm([values], compiled=compiled) == pytest.approx(exact, rel=1e-14)
    halves = [values[:500_000].copy(), values[500_000:].copy()]
    assert kernels.norm(halves, compiled=compiled, threads=2) == pytest.approx(exact, rel=1e-14)
    huge = np.full(1000, 1e30, np.float32)
    assert kernels.norm([huge], compiled=compiled) == pytest.approx(math.sqrt(1000) * 1e30, rel=1e-6)
    assert math.isnan(kernels.norm([np.float32([1, np.nan])], compiled=compiled))


def test_a_formula_in_numpy_keeps_what_is_read_later() -> None:
    def formula(w: Any, g: Any, m: Any, rate: Any) -> Any:
        a, b = m * rate, g * g
        c = a + b
        m = a * b + m
        return w - np.sqrt(c + a) * (m + b), m

    arrays = [np.random.default_rng(i).random(50) + 1 for i in range(3)]
    expected = formula(*arrays, np.float64(0.5))
    before = arrays[1].copy()
    program = record(formula, 3, 1, (0, 2))
    program.run(arrays, [np.float64(0.5)], [np.empty(50) for _ in range(program.scratch)])
    assert np.array_equal(arrays[0], expected[0]) and np.array_equal(arrays[2], expected[1])
    assert np.array_equal(arrays[1], before)


def test_a_formula_that_reads_what_it_has_overwritten_is_refused() -> None:
    def formula(w: Any, g: Any) -> Any:
        changed = w + g
        return changed, w * g

    with pytest.raises(RegistrationError, match="formula reads an array after"):
        record(formula, 2, 0, (0, 1))


# Rules


def state(shapes: dict[str, tuple[int, ...]], dtype: Any, seed: int) -> Arena:
    generator = np.random.default_rng(seed)
    return Arena.of({k: generator.standard_normal(s).astype(dtype) for k, s in shapes.items()})


SHAPES: dict[str, tuple[int, ...]] = {"w": (33, 7), "b": (7,), "scalar": (), "none": (0, 3)}


def group_for(rule: optimizer_nodes.Rule, parameters: Arena, rate: float) -> Group:
    group = Group()
    group.rate = rate
    group.momentums = {name: parameters.like() for name in rule.momentums}
    return group


@pytest.mark.parametrize("dtype", TYPES)
def test_adamw_mode_0_is_that_of_pytorch(dtype: Any) -> None:
    rule = optimizer_nodes.AdamW((), True, 0.9, 0.999, 1e-8, 0.01, True, 0)
    parameters = state(SHAPES, dtype, 0)
    tensors = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in parameters.arrays.items()}
    other = torch.optim.AdamW(tensors.values(), lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    group = group_for(rule, parameters, 0.01)
    for step in range(10):
        gradients = state(SHAPES, dtype, step + 1)
        for name, tensor in tensors.items():
            tensor.grad = torch.from_numpy(gradients[name].copy())
        other.step()
        assert rule.apply(parameters, gradients, group, 1)
        group.step += 1
    for name, tensor in tensors.items():
        np.testing.assert_allclose(
            parameters[name], tensor.detach().numpy(), rtol=2e-5 if dtype == np.float32 else 1e-12, atol=1e-7
        )


@pytest.mark.parametrize("correct_bias", [True, False])
def test_adamw_mode_1_is_that_of_onnxruntime_training(correct_bias: bool) -> None:
    """The formula of its kernel, in double precision: bias correction of the rate, decay afterwards."""
    rule = optimizer_nodes.AdamW((), True, 0.9, 0.999, 1e-6, 0.1, correct_bias, 1)
    parameters = state(SHAPES, np.float64, 0)
    group = group_for(rule, parameters, 0.01)
    w = {k: v.copy() for k, v in parameters.arrays.items()}
    m, v = ({k: np.zeros_like(a) for k, a in w.items()} for _ in range(2))
    for step in range(1, 6):
        gradients = state(SHAPES, np.float64, step)
        rate = 0.01 * (math.sqrt(1 - 0.999**step) / (1 - 0.9**step) if correct_bias else 1)
        for k, g in gradients.arrays.items():
            m[k] = 0.9 * m[k] + (1 - 0.9) * g
            v[k] = 0.999 * v[k] + (1 - 0.999) * g * g
            w[k] = w[k] - rate * m[k] / (np.sqrt(v[k]) + 1e-6)
            w[k] = w[k] - 0.01 * 0.1 * w[k]
        rule.apply(parameters, gradients, group, 2)
        group.step += 1
    for k in w:
        np.testing.assert_allclose(parameters[k], w[k], rtol=1e-12)
        np.testing.assert_allclose(group.momentums["momentum0"][k], m[k], rtol=1e-12)
        np.testing.assert_allclose(group.momentums["momentum1"][k], v[k], rtol=1e-12)


def test_sgd_is_that_of_pytorch() -> None:
    rule = optimizer_nodes.SGD((), True)
    parameters, gradients = state(SHAPES, np.float32, 0), state(SHAPES, np.float32, 1)
    expected = {k: v - np.float32(0.1) * gradients[k] for k, v in parameters.arrays.items()}
    rule.apply(parameters, gradients, group_for(rule, parameters, 0.1), 1)
    for k, v in expected.items():
        np.testing.assert_allclose(parameters[k], v, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_clipping_is_that_of_pytorch(largest: float) -> None:
    rule = optimizer_nodes.SGD((largest,), True)
    parameters, gradients = state(SHAPES, np.float32, 0), state(SHAPES, np.float32, 1)
    tensors = [torch.nn.Parameter(torch.zeros(v.shape)) for v in gradients.arrays.values()]
    for tensor, gradient in zip(tensors, gradients.arrays.values(), strict=True):
        tensor.grad = torch.from_numpy(gradient.copy())
    torch.nn.utils.clip_grad_norm_(tensors, largest)
    rule.apply(parameters, gradients, group_for(rule, parameters, 0.1), 1)
    for tensor, gradient in zip(tensors, gradients.arrays.values(), strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-5)


def test_clipping_of_nan_spoils_all_gradients() -> None:
    """As in PyTorch and onnxruntime-training: an update with part of the gradients would be wrong."""
    gradients = [np.float32([1, np.nan]), np.float32([1, 2])]
    kernels.clip(gradients, 1.0, 1)
    assert all(np.isnan(gradient).all() for gradient in gradients)


# Optimizer models


def sgd(gradients: str = "gradients") -> onnx.NodeProto:
    inputs = ["learning_rate", "params", gradients]
    return helper.make_node("SGDOptimizerV2", inputs, ["updated"], domain="com.microsoft")


def clipping(max_norm: float, into: str = "clipped", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(
        "InplaceClipGradNorm", ["gradients"], [into], max_norm=max_norm, domain="com.microsoft", **attributes
    )


def test_optimizer_model_of_onnxruntime_training() -> None:
    rule = optimizer_nodes.read_optimizer(GOLDEN / "cnn" / "optimizer_model.onnx")
    assert isinstance(rule, optimizer_nodes.AdamW)
    assert (rule.adam_mode, rule.correct_bias, rule.weight_decay) == (1, True, 0)
    assert rule.alpha == pytest.approx(0.9)
    assert rule.epsilon == pytest.approx(1e-6)


def test_defaults_of_the_operator() -> None:
    rule = optimizer_nodes.rule_of(optimizer_model([adamw()]))
    assert isinstance(rule, optimizer_nodes.AdamW)
    assert (rule.adam_mode, rule.correct_bias) == (0, True)
    assert (rule.epsilon, rule.weight_decay) == (pytest.approx(1e-8), pytest.approx(1e-2))


def test_clipping_and_update_signal() -> None:
    rule = optimizer_nodes.rule_of(optimizer_model([clipping(0.5), adamw("clipped")]))
    assert rule.clips == (0.5,) and rule.updates
    off = onnx.numpy_helper.from_array(np.array([False]), "signal")
    rule = optimizer_nodes.rule_of(optimizer_model([adamw("gradients", "signal")], initializers=(off,)))
    assert not rule.updates
    parameters, gradients = state(SHAPES, np.float32, 0), state(SHAPES, np.float32, 1)
    before = parameters["w"].copy()
    assert not rule.apply(parameters, gradients, group_for(rule, parameters, 0.1), 1)
    assert np.array_equal(parameters["w"], before)
    constant = helper.make_node("Constant", [], ["signal"], value=off)
    assert not optimizer_nodes.rule_of(optimizer_model([constant, adamw("gradients", "signal")])).updates
    assert isinstance(optimizer_nodes.rule_of(optimizer_model([sgd()], NAMES[:3])), optimizer_nodes.SGD)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (optimizer_model([adamw(), adamw()]), "one node"),
        (optimizer_model([helper.make_node("Identity", ["step"], ["updated"])]), "Identity"),
        (optimizer_model([adamw()], [*NAMES[:3], "others"]), "Invalid graph inputs"),
        (optimizer_model([sgd()], NAMES), "Invalid graph inputs"),
        (optimizer_model([adamw(adam_mode=2)]), "adam_mode is 2"),
        (optimizer_model([adamw("params")]), "only"),
        (optimizer_model([clipping(1.0), adamw()]), "only"),
        (optimizer_model([clipping(1.0, norm_type="inf"), adamw("clipped")]), "norm"),
        (optimizer_model([adamw("gradients", "step")]), "not a constant"),
        (
            optimizer_model([helper.make_node("SequenceLength", ["params"], ["n"]), adamw()]),
            "SequenceLength",
        ),
    ],
)
def test_other_models_are_refused(model: onnx.ModelProto, reason: str) -> None:
    with pytest.raises(TrainingModelError, match=reason):
        optimizer_nodes.rule_of(model)


@pytest.mark.parametrize("mode", [0, 1])
def test_the_same_as_the_expanded_model_in_a_session(mode: int) -> None:
    """The optimizer model as a model: expanded to standard operators, whose outputs are sequences."""
    model = optimizer_model([clipping(2.0), adamw("clipped", adam_mode=mode)])
    rule = optimizer_nodes.rule_of(model)
    node = model.graph.node[1]
    node.output.extend(["new_w", "new_m", "new_v"])
    model.graph.output.extend(helper.make_value_info(name, SEQUENCE) for name in ("new_w", "new_m", "new_v"))
    session = ortgrad.InferenceSession(model)
    shapes = {k: v for k, v in SHAPES.items() if k != "none"}
    parameters, gradients = state(shapes, np.float32, 0), state(shapes, np.float32, 1)
    group = group_for(rule, parameters, 0.1)
    feeds = {
        "learning_rate": np.float32([0.1]),
        "step": np.int64([1]),
        "params": [v.copy() for v in parameters.arrays.values()],
        "gradients": [v.copy() for v in gradients.arrays.values()],
        "first_order_moments": [np.zeros_like(v) for v in parameters.arrays.values()],
        "second_order_moments": [np.zeros_like(v) for v in parameters.arrays.values()],
    }
    flag, new_w, new_m, new_v = session.run(["updated", "new_w", "new_m", "new_v"], feeds)
    assert flag.all()
    rule.apply(parameters, gradients, group, 1)
    found = [parameters, group.momentums["momentum0"], group.momentums["momentum1"]]
    for arena, expected in zip(found, (new_w, new_m, new_v), strict=True):
        for array, other in zip(arena.arrays.values(), expected, strict=True):
            np.testing.assert_allclose(array, other, rtol=2e-5, atol=1e-6)


def test_types_without_a_kernel() -> None:
    rule = optimizer_nodes.SGD((), True)
    with pytest.raises(TrainingModelError, match="float16"):
        rule.warm_up(Arena({"w": ((3,), np.dtype(np.float16))}))


# Memory


def test_arrays_of_an_arena_are_aligned_and_disjoint() -> None:
    shapes = {f"{i}": ((i,), np.dtype(np.float32 if i % 2 else np.float64)) for i in range(40)}
    arena = Arena(shapes)
    for i, (name, array) in enumerate(arena.arrays.items()):
        assert array.ctypes.data % 64 == 0
        assert array.shape == (i,) and not array.any()
        array[...] = int(name)
    for name, array in arena.arrays.items():
        assert (array == int(name)).all()
        span = arena.spans[name]
        assert np.shares_memory(array, arena.flats[span.dtype]) or not array.size


def test_without_numba() -> None:
    script = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("numba", "llvmlite") else find(name, *a)
import numpy as np
from ortgrad.training.optimizers import kernels, passes
assert not passes.is_compiled()
w, g = np.ones(10, np.float32), np.ones(10, np.float32)
kernels.sgd(w, g, rate=0.5, threads=2)
assert (w == 0.5).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_failing_part_is_reported_and_the_pool_goes_on() -> None:
    def fail(part: int) -> None:
        if part == 5:
            raise ValueError("part 5")

    for _ in range(3):
        with pytest.raises(ValueError, match="part 5"):
            passes.distribute(fail, 16, 3)
    done: list[int] = []
    passes.distribute(done.append, 100, 4)
    assert sorted(done) == list(range(100))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork() -> None:
    script = """
import os, numpy as np
from ortgrad.training.optimizers import kernels
w, g = np.ones(1 << 20, np.float32), np.ones(1 << 20, np.float32)
kernels.sgd(w, g, rate=0.25, threads=2)
child = os.fork()
kernels.sgd(w, g, rate=0.25, threads=2)
assert (w == 0.5).all()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)


def test_kernels_are_compiled_here() -> None:
    pytest.importorskip("numba")
    assert machine_code.entry() is not None and passes.is_compiled()


def test_thread_count() -> None:
    assert passes.thread_count(3) == 3
    assert passes.thread_count() >= 1
