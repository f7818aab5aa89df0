"""Gradients do not depend on how onnxruntime is told to run them, in own, registered and plain sessions."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxruntime import ExecutionMode, GraphOptimizationLevel, OrtValue, RunOptions, SessionOptions

import ortgrad

Arrays = dict[str, np.ndarray]
Setting = Callable[[SessionOptions], None]
TOLERANCE = 2e-5

# Python kernels (convolution, pool, activation, GRU, loss), standard operators, a Loop and an If that
# read values of the surrounding graph, and a dimension that only the feeds know.
TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
network (float[N, 2, 6, 6] x, int64[N] labels, float[3, 2, 3, 3] w, float[3] bias, float[1, 6, 4] gw,
         float[1, 6, 2] gr, float[1, 12] gb, float[2, 2] m, float[2] scale)
    => (float loss, float[N, 2] logits) {
    convolved = Conv(x, w, bias)
    active = Relu(convolved)
    pooled = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(active)
    rows_shape = Constant<value = int64[3] {0, 3, 4}>()
    rows = Reshape(pooled, rows_shape)
    steps = Transpose<perm = [1, 0, 2]>(rows)
    unused, last = GRU<hidden_size = 2, linear_before_reset = 1>(steps, gw, gr, gb)
    first_axis = Constant<value = int64[1] {0}>()
    start = Squeeze(last, first_axis)
    trips = Constant<value = int64 {3}>()
    yes = Constant<value = bool {1}>()
    state, seen = Loop(trips, yes, start) <body = step
        (int64 i, bool going, float[N, 2] h) => (bool more, float[N, 2] next, float[N, 2] kept) {
            more = Identity(going)
            product = MatMul(h, m)
            shifted = Add(product, start)
            next = Tanh(shifted)
            kept = Sigmoid(product)
        }
    >
    total = ReduceSum<keepdims = 0>(x)
    zero = Constant<value = float {0}>()
    positive = Greater(total, zero)
    chosen = If(positive) <
        then_branch = on () => (float[N, 2] a) { doubled = Add(state, state) a = Mul(doubled, scale) },
        else_branch = off () => (float[N, 2] b) { b = Sub(state, scale) }
    >
    mean = ReduceMean<keepdims = 0>(seen, first_axis)
    logits = Add(chosen, mean)
    loss = SoftmaxCrossEntropyLoss(logits, labels)
}
"""
WRT = ["x", "w", "bias", "gw", "gr", "gb", "m", "scale", "pooled"]
WEIGHTS = {
    "w": (3, 2, 3, 3),
    "bias": (3,),
    "gw": (1, 6, 4),
    "gr": (1, 6, 2),
    "gb": (1, 12),
    "m": (2, 2),
    "scale": (2,),
}


@functools.cache
def built() -> bytes:
    """With weights as initializers, as models come."""
    model = onnx.parser.parse_model(TEXT)
    weights = draw(3)
    for value in [v for v in model.graph.input if v.name in WEIGHTS]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights[value.name], value.name))
        model.graph.input.remove(value)
    return ortgrad.build_gradient_model(model, wrt=WRT, of="loss").SerializeToString()


@functools.cache
def draw(batch: int) -> Arrays:
    rng = np.random.default_rng(batch)
    arrays = {"x": rng.standard_normal((batch, 2, 6, 6)), "labels": rng.integers(0, 2, batch)}
    rng = np.random.default_rng(7)
    arrays |= {name: 0.5 * rng.standard_normal(shape) for name, shape in WEIGHTS.items()}
    return {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def feeds(batch: int) -> Arrays:
    return {name: array for name, array in draw(batch).items() if name not in WEIGHTS}


@functools.cache
def expected(batch: int) -> Arrays:
    """PyTorch's results in float64."""
    t = {n: torch.tensor(a.astype(np.float64) if a.dtype.kind == "f" else a) for n, a in draw(batch).items()}
    for value in t.values():
        value.requires_grad_(value.is_floating_point())
    active = torch.relu(torch.nn.functional.conv2d(t["x"], t["w"], t["bias"]))
    t["pooled"] = pooled = torch.nn.functional.max_pool2d(active, 2, 2)
    h = torch.zeros(batch, 2, dtype=torch.float64)
    wb, rb = t["gb"][0, :6], t["gb"][0, 6:]
    for step in pooled.reshape(batch, 3, 4).transpose(0, 1):
        from_x, from_h = step @ t["gw"][0].T + wb, h @ t["gr"][0].T + rb
        z, r = torch.sigmoid(from_x[:, :2] + from_h[:, :2]), torch.sigmoid(from_x[:, 2:4] + from_h[:, 2:4])
        h = (1 - z) * torch.tanh(from_x[:, 4:] + r * from_h[:, 4:]) + z * h
    state, seen = h, []
    for _ in range(3):
        product = state @ t["m"]
        seen.append(torch.sigmoid(product))
        state = torch.tanh(product + h)
    chosen = 2 * state * t["scale"] if t["x"].sum() > 0 else state - t["scale"]
    logits = chosen + torch.stack(seen).mean(0)
    loss = torch.nn.functional.cross_entropy(logits, t["labels"])
    grads = torch.autograd.grad(loss, [t[name] for name in WRT])
    results = {"loss": loss, "logits": logits} | {f"{n}_grad": g for n, g in zip(WRT, grads, strict=True)}
    return {name: value.detach().numpy() for name, value in results.items()}


def own(kernels: str) -> Callable[..., onnxruntime.InferenceSession]:
    return lambda options, **more: ortgrad.InferenceSession(built(), options, kernels=kernels, **more)


def plain(options: SessionOptions, **more: Any) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(built(), options, **more)


def registered(options: SessionOptions, **more: Any) -> onnxruntime.InferenceSession:
    ortgrad.register(options)
    return onnxruntime.InferenceSession(built(), options, **more)


SESSIONS = {
    "python": own("python"),
    "onnx": own("onnx"),
    "auto": own("auto"),
    "plain": plain,
    "registered": registered,
}
every_session = pytest.mark.parametrize("kind", SESSIONS)


def quiet() -> SessionOptions:
    options = SessionOptions()
    options.log_severity_level = 3
    return options


def run(session: onnxruntime.InferenceSession, names: Sequence[str], batch: int) -> Sequence[np.ndarray]:
    return session.run(names, feeds(batch))


Runner = Callable[[onnxruntime.InferenceSession, Sequence[str], int], Sequence[np.ndarray]]


def check(
    session: onnxruntime.InferenceSession, runner: Runner = run, batches: Sequence[int] = (3, 2)
) -> None:
    for batch in batches:
        wanted = expected(batch)
        names = list(wanted)
        for name, result in zip(names, runner(session, names, batch), strict=True):
            scale = max(1e-3, float(np.abs(wanted[name]).max()))
            assert result.dtype == np.float32
            np.testing.assert_allclose(result, wanted[name], rtol=0, atol=TOLERANCE * scale, err_msg=name)


LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL")
MODES = ("ORT_SEQUENTIAL", "ORT_PARALLEL")


@every_session
@pytest.mark.parametrize("level", LEVELS)
def test_levels_modes_threads_and_memory(kind: str, level: str) -> None:
    for mode, (threads, memory) in itertools.product(
        MODES, [((1, 1), True), ((2, 2), False), ((0, 0), True)]
    ):
        options = quiet()
        options.graph_optimization_level = getattr(GraphOptimizationLevel, level)
        options.execution_mode = getattr(ExecutionMode, mode)
        options.intra_op_num_threads, options.inter_op_num_threads = threads
        options.enable_mem_pattern = options.enable_cpu_mem_arena = options.enable_mem_reuse = memory
        check(SESSIONS[kind](options), batches=[3] if memory else [2])


def entry(key: str, value: str) -> Setting:
    return lambda options: options.add_session_config_entry(key, value)


def attribute(name: str, value: object) -> Setting:
    return lambda options: setattr(options, name, value)


SETTINGS: dict[str, Setting] = {
    "functions not inlined ahead": entry("session.disable_aot_function_inlining", "1"),
    "no prepacking": entry("session.disable_prepacking", "1"),
    "denormals are zero": entry("session.set_denormal_as_zero", "1"),
    "no spinning": entry("session.intra_op.allow_spinning", "0"),
    "dynamic blocks": entry("session.dynamic_block_base", "4"),
    "strict shape inference": entry("session.strict_shape_type_inference", "1"),
    "environment allocators": entry("session.use_env_allocators", "1"),
    "device allocator for weights": entry("session.use_device_allocator_for_initializers", "1"),
    "looping optimisation": entry("session.graph_optimizations_loop_level", "2"),
    "no quantization clean-up": entry("session.disable_quant_qdq", "1"),
    "deterministic": attribute("use_deterministic_compute", True),
    "priority order": attribute("execution_order", onnxruntime.ExecutionOrder.PRIORITY_BASED),
    "batch fixed by name": lambda options: options.add_free_dimension_override_by_name("N", 3),
}


@every_session
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(kind: str, setting: str) -> None:
    options = quiet()
    SETTINGS[setting](options)
    check(SESSIONS[kind](options), batches=[3] if setting == "batch fixed by name" else [3, 2])


DISABLED = [
    "ConstantFolding",
    "CommonSubexpressionElimination",
    "TransposeOptimizer",
    "MatmulTransposeFusion",
]


@every_session
@pytest.mark.parametrize("names", [DISABLED[:1], DISABLED], ids=len)
def test_disabled_optimizers(kind: str, names: list[str]) -> None:
    check(SESSIONS[kind](quiet(), disabled_optimizers=names))


@every_session
def test_providers_with_options(kind: str) -> None:
    check(
        SESSIONS[kind](
            quiet(), providers=[("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})]
        )
    )


@every_session
def test_weights_from_outside(kind: str) -> None:
    """`add_initializer` puts a value in the place of one in the file."""
    options = quiet()
    kept = OrtValue.ortvalue_from_numpy(draw(3)["m"])
    options.add_initializer("m", kept)
    check(SESSIONS[kind](options))


@every_session
@pytest.mark.parametrize("mode", MODES)
def test_profiling(kind: str, mode: str, tmp_path: Path) -> None:
    options = quiet()
    options.execution_mode = getattr(ExecutionMode, mode)
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = SESSIONS[kind](options)
    check(session)
    events = json.loads(Path(session.end_profiling()).read_text())
    assert any("kernel_time" in event["name"] for event in events)


def as_told(options: RunOptions) -> RunOptions:
    options.log_severity_level = 3
    options.log_verbosity_level = 1
    options.logid = "a run"
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def run_with_options(session: onnxruntime.InferenceSession, names: Sequence[str], batch: int) -> Any:
    return session.run(names, feeds(batch), as_told(RunOptions()))


def run_what_is_needed(session: onnxruntime.InferenceSession, names: Sequence[str], batch: int) -> Any:
    options = RunOptions()
    options.only_execute_path_to_fetches = True
    return [session.run([name], feeds(batch), options)[0] for name in names]


def run_ort_values(session: onnxruntime.InferenceSession, names: Sequence[str], batch: int) -> Any:
    values = {n: OrtValue.ortvalue_from_numpy(a) for n, a in feeds(batch).items()}
    # Copies: the arrays do not keep the memory of the values.
    return [value.numpy().copy() for value in session.run_with_ort_values(names, values)]


def run_binding(session: onnxruntime.InferenceSession, names: Sequence[str], batch: int) -> Any:
    binding = session.io_binding()
    for name, array in feeds(batch).items():
        binding.bind_cpu_input(name, array)
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding, as_told(RunOptions()))
    return binding.copy_outputs_to_cpu()


def run_binding_to_memory(session: onnxruntime.InferenceSession, names: Sequence[str], batch: int) -> Any:
    """Into arrays of the caller's, twice, so that what is left from the first run would be seen."""
    binding = session.io_binding()
    given = {n: OrtValue.ortvalue_from_numpy(a) for n, a in feeds(batch).items()}
    shapes = {n: a.shape for n, a in expected(batch).items()}
    results = {n: OrtValue.ortvalue_from_numpy(np.full(shapes[n], np.nan, np.float32)) for n in names}
    for name, value in given.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in results.items():
        binding.bind_ortvalue_output(name, value)
    for _ in range(2):
        session.run_with_iobinding(binding)
    return [results[name].numpy().copy() for name in names]


def run_async(session: onnxruntime.InferenceSession, names: Sequence[str], batch: int) -> Any:
    done, got = threading.Event(), []

    def callback(results: Any, data: object, message: str) -> None:
        got.extend((results, message))
        done.set()

    session.run_async(names, feeds(batch), callback, None)
    assert done.wait(60)
    results, message = got
    assert not message
    return results


RUNNERS: list[Runner] = [
    run_with_options,
    run_what_is_needed,
    run_ort_values,
    run_binding,
    run_binding_to_memory,
    run_async,
]


@every_session
@pytest.mark.parametrize("mode", MODES)
def test_ways_to_call(kind: str, mode: str) -> None:
    """One after the other in one session, as programs do."""
    options = quiet()
    options.execution_mode = getattr(ExecutionMode, mode)
    options.intra_op_num_threads = 2  # run_async wants more than one
    session = SESSIONS[kind](options)
    for runner in RUNNERS:
        check(session, runner)


@every_session
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("form", ["onnx", "ort"])
def test_saved_models(kind: str, level: str, form: str, tmp_path: Path) -> None:
    """What a session saves runs where the op library is registered, and in the session that saved it."""
    options = quiet()
    options.graph_optimization_level = getattr(GraphOptimizationLevel, level)
    path = tmp_path / f"saved.{form}"
    options.optimized_model_filepath = str(path)
    if form == "ort":
        options.add_session_config_entry("session.save_model_format", "ORT")
    check(SESSIONS[kind](options))
    again = quiet()
    ortgrad.register(again)
    check(onnxruntime.InferenceSession(str(path), again))
    if kind in ("onnx", "plain"):
        check(onnxruntime.InferenceSession(str(path), quiet()))
    if form == "onnx":
        check(ortgrad.InferenceSession(path))
