"""Compiled kernels: how they are declared, compiled, cached, planned and called."""

from __future__ import annotations

import ast
import gc
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from support.calls import CASES, Case, cells
from support.compiled import checked_tasks

import ortgrad
from ortgrad import nodes
from ortgrad.compiled import cache, functions, layout, machine_code
from ortgrad.compiled.source import source_of
from ortgrad.errors import RegistrationError
from ortgrad.lowering.fusion.kernel import fused_operator
from ortgrad.lowering.fusion.program import Constant, Operand, Program, Step
from ortgrad.operators.compiled import CompiledKernel, Plan, elementwise_plan
from ortgrad.operators.declaration import Operator, all_operators
from ortgrad.runtime import c_api, plans

pytest.importorskip("numba", reason="kernels are compiled by Numba, which is optional")

COMPILED = [operator for operator in all_operators() if operator.compiled_kernel is not None]


def relu_session(**options: Any) -> ortgrad.InferenceSession:
    session_options = onnxruntime.SessionOptions()
    for name, value in options.items():
        setattr(session_options, name, value)
    model = nodes.make_model(nodes.relu_grad("dY", "X", "dX"))
    return ortgrad.InferenceSession(model, session_options, kernels="compiled")


def arrays(*shape: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, dtype=np.float32) for name in ("dY", "X")}


def expected(feeds: dict[str, np.ndarray]) -> np.ndarray:
    return np.where(feeds["X"] > 0, feeds["dY"], 0)


def run_script(text: str, folder: Path, **variables: str) -> str:
    environment = {**os.environ, "ORTGRAD_CACHE_DIR": str(folder), **variables}
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SCRIPT = """
import sys
import numpy as np, ortgrad
model = ortgrad.nodes.make_model(ortgrad.nodes.relu_grad("dY", "X", "dX"))
session = ortgrad.InferenceSession(model, kernels="compiled")
print(session.run(None, {"dY": np.float32([1, 2]), "X": np.float32([-1, 1])})[0], "numba" in sys.modules)
"""


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (1 << 17,), (2, 1, 2, 1, 2, 1, 2, 1)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    feeds = arrays(*shape)
    np.testing.assert_array_equal(relu_session().run(None, feeds)[0], expected(feeds))


def test_more_shapes_than_plans() -> None:
    session = relu_session()
    for _ in range(2):
        for size in range(400):
            feeds = arrays(size, seed=size)
            np.testing.assert_array_equal(session.run(None, feeds)[0], expected(feeds))


def test_the_plan_that_was_not_used_for_the_longest_time_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, ...]] = []
    make = plans._make_plan

    def counting(kernel: Any, call: Any, inputs: Any) -> Any:
        made.append(inputs[0].shape)
        return make(kernel, call, inputs)

    monkeypatch.setattr(plans, "_make_plan", counting)
    session = relu_session()

    def run(size: int) -> None:
        feeds = arrays(size, seed=size)
        np.testing.assert_array_equal(session.run(None, feeds)[0], expected(feeds))

    most = layout.MOST_PLANS
    for size in range(1, 2 * most + 50):
        run(size)
        run(3)  # a shape that is always in use
    assert len(made) == 2 * most + 49
    made.clear()
    for size in range(most + 55, 2 * most + 50):
        run(size)
    assert made == []
    run(4)
    assert made == [(4,)]


def test_plans_are_replaced_while_other_threads_use_them() -> None:
    session, failures = relu_session(), []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for size in random.integers(0, 2 * layout.MOST_PLANS, 700):
            feeds = arrays(int(size), seed=int(size))
            if not np.array_equal(session.run(None, feeds)[0], expected(feeds)):
                failures.append(size)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


def test_more_dimensions_than_compiled_code_reads() -> None:
    feeds = arrays(*[1] * 9, 3)
    np.testing.assert_array_equal(relu_session().run(None, feeds)[0], expected(feeds))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_results_do_not_depend_on_threads(threads: int) -> None:
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal((257, 1031), dtype=np.float32) for name in ("dY", "Y")}
    model = nodes.make_model(nodes.softmax_grad_13("dY", "Y", "dX"))
    options = [onnxruntime.SessionOptions() for _ in range(2)]
    options[0].intra_op_num_threads, options[1].intra_op_num_threads = 1, threads
    one, other = (
        ortgrad.InferenceSession(model, each, kernels="compiled").run(None, feeds)[0] for each in options
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["GRU", "LSTM"])
def test_recurrences_do_not_depend_on_threads(name: str) -> None:
    sizes = {"n": 40, "t": 5, "i": 24, "h": 40}
    results = []
    for threads in (1, 2, 4):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        found = []
        for operator in (f"{name}Training", f"{name}Grad"):
            case = cells(operator, layout=0, direction="bidirectional", full=True, **sizes)
            given = {n: a for n, a in case.arrays.items() if n not in ("SL", "P")}
            builder = getattr(nodes, "_".join([name.lower(), operator.removeprefix(name).lower()]))
            parameters = next(op for op in COMPILED if op.name == operator).inputs
            names = [p.name if p.name in given else None for p in parameters]
            # dP needs P.
            wanted = [["dX", "dW", "dR", "dB", "dH0", "dC0", None]] if operator == "LSTMGrad" else []
            node = builder(*names, *wanted, **case.attributes)
            session = ortgrad.InferenceSession(nodes.make_model(node), options, kernels="compiled")
            found += session.run(None, given)
        results.append(found)
    for other in results[1:]:
        for one, value in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, value)


def test_several_threads_run_one_session() -> None:
    session, failures = relu_session(), []

    def work(seed: int) -> None:
        for size in range(1, 60):
            feeds = arrays(size * 7, seed=seed)
            if not np.array_equal(session.run(None, feeds)[0], expected(feeds)):
                failures.append((seed, size))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_failures_have_the_same_text_as_those_of_the_numpy_kernel() -> None:
    feeds = {"dY": np.zeros((2, 3), np.float32), "X": np.zeros((3, 2), np.float32)}
    model = nodes.make_model(nodes.relu_grad("dY", "X", "dX"))
    texts = []
    for kernels in ("compiled", "python"):
        session = ortgrad.InferenceSession(model, kernels=kernels)
        for _ in range(2):
            with pytest.raises(ortgrad.KernelError) as caught:
                session.run(None, feeds)
            texts.append(str(caught.value))
        good = arrays(2, 3)
        np.testing.assert_array_equal(session.run(None, good)[0], expected(good))
    assert len(set(texts)) == 1


def test_a_registered_session_runs_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    operator = next(op for op in COMPILED if op.name == "ReluGrad")
    monkeypatch.setattr(operator, "kernel", lambda *_, **__: calls.append(1))
    options = onnxruntime.SessionOptions()
    ortgrad.register(options)
    model = nodes.make_model(nodes.relu_grad("dY", "X", "dX"))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    feeds = arrays(7)
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected(feeds))
    assert not calls


def test_kernels_come_from_the_cache_without_numba(tmp_path: Path) -> None:
    assert run_script(SCRIPT, tmp_path) == "[0. 2.] True\n"
    # The functions that all kernels share, and one kernel.
    assert len(list(tmp_path.iterdir())) == len(machine_code.Entry._fields) + 1
    assert run_script(SCRIPT, tmp_path) == "[0. 2.] False\n"


def test_damaged_files_are_compiled_again(tmp_path: Path) -> None:
    """Empty ones, those with something else in them, and those that are cut off."""
    run_script(SCRIPT, tmp_path)
    for damage in (lambda _: b"", lambda _: b"x" * 40, lambda content: content[:-9]):
        for path in tmp_path.iterdir():
            path.write_bytes(damage(path.read_bytes()))
        assert run_script(SCRIPT, tmp_path) == "[0. 2.] True\n"
    assert run_script(SCRIPT, tmp_path) == "[0. 2.] False\n"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert run_script(SCRIPT, file / "folder") == "[0. 2.] True\n"


def test_several_processes_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "ORTGRAD_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [each.communicate()[0].split()[:2] for each in running] == [[b"[0.", b"2.]"]] * 3
    assert all(path.suffix == ".o" for path in tmp_path.iterdir())


def test_a_changed_kernel_has_another_source() -> None:
    def first(dy: float, x: float) -> float:
        return dy * x * FACTOR

    def second(dy: float, x: float) -> float:
        return dy + x * FACTOR

    sources = {repr(source_of(CompiledKernel(f, 3), ["float32"] * 3)) for f in (first, second)}
    assert len(sources) == 2
    global FACTOR
    FACTOR = 3.0
    try:
        sources.add(repr(source_of(CompiledKernel(first, 3), ["float32"] * 3)))
    finally:
        FACTOR = 2.0
    assert len(sources) == 3


FACTOR = 2.0


def test_every_part_of_the_compiler_determines_the_keys_of_the_cache() -> None:
    """What a part was changed to must not run as the code that is in the cache from before."""
    folder, seen = Path(machine_code.__file__).parent, {"compiler"}
    waiting = ["compiler"]
    while waiting:
        for node in ast.walk(ast.parse((folder / f"{waiting.pop()}.py").read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [alias.name for alias in node.names] if module == "ortgrad.compiled" else []
            names += [module.removeprefix("ortgrad.compiled.")] if "ortgrad.compiled." in module else []
            waiting += [name for name in names if name not in seen]
            seen.update(names)
    # The text of what these return is part of the key itself.
    assert {f"{name}.py" for name in seen - {"fields", "source", "mathematics"}} == set(machine_code._PARTS)


def test_cache_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTGRAD_CACHE_DIR", str(tmp_path / "a" / "b"))
    assert cache.read("key") is None
    cache.write("key", b"code")
    assert cache.read("key") == b"code"
    assert cache.read("other") is None


@pytest.mark.parametrize("element", ["float32", "float64"])
def test_exp(element: str) -> None:
    from numba import njit

    from ortgrad.compiled import compiler

    def function(x: float, y: float) -> float:
        return functions_exp(x) + y * 0.0

    source = source_of(CompiledKernel(function, 3), [element] * 3)
    inner = compiler.compile_function(source.phases[0], element, {"contract"})

    @njit(error_model="numpy")
    def compiled(x, y):  # type: ignore[no-untyped-def]
        return inner(x, y)

    limits = {"float32": 104.0, "float64": 746.0}[element]
    x = np.linspace(-limits, limits, 20001).astype(element)
    actual = np.array([compiled(value, value.dtype.type(1)) for value in x])
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp(x.astype(np.longdouble))
        rounded = exact.astype(element)
    finite = np.isfinite(rounded) & (rounded > np.finfo(element).tiny)
    np.testing.assert_array_equal(np.isinf(actual), np.isinf(rounded))
    error = np.abs(actual[finite].astype(np.longdouble) / exact[finite] - 1)
    assert error.max() < 2 * np.finfo(element).eps
    assert np.all(actual[~finite & np.isfinite(rounded)] <= np.finfo(element).tiny * (1 + 1e-6))
    assert np.isnan(compiled(x.dtype.type(np.nan), x.dtype.type(1)))
    assert compiled(x.dtype.type(-np.inf), x.dtype.type(1)) == 0


functions_exp = functions.exp


@pytest.mark.parametrize("element", ["float32", "float64"])
def test_multiply_panel(element: str) -> None:
    from numba import njit

    from ortgrad.compiled import panels

    multiply_panel, generator = panels.multiply_panel, np.random.default_rng(0)
    factor = functions.Factor

    @njit(error_model="numpy")
    def multiply(sums, stride, left, left_stride, left_step, panel, terms, rows, add):  # type: ignore[no-untyped-def]
        multiply_panel(sums, stride, factor(left, left_stride, left_step), panel, terms, rows, add)

    for rows in range(18):
        for terms in (0, 1, 7):
            panel = generator.standard_normal(terms * functions.PANEL + 1).astype(element)
            left = generator.standard_normal(rows * terms + 1).astype(element)
            before = generator.standard_normal(rows * functions.PANEL + 3).astype(element)
            for strides in ((terms, 1), (1, rows)):
                for add in (0, 1):
                    sums, expected = before.copy(), before.copy()
                    multiply(sums, functions.PANEL, left, *strides, panel, terms, rows, add)
                    functions.multiply_panel(
                        expected, functions.PANEL, factor(left, *strides), panel, terms, rows, add
                    )
                    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)


def test_the_operators_of_products_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    release = c_api._release_all

    def counting(function: Callable[[int], None], operators: list[int]) -> None:
        released.extend(operators)
        release(function, operators)

    monkeypatch.setattr(c_api, "_release_all", counting)
    case = cells("GRUTraining", layout=0, direction="forward", full=False)
    model = nodes.make_model(nodes.gru_training("X", "W", "R"))
    for _ in range(3):
        session = ortgrad.InferenceSession(model, kernels="compiled")
        for _ in range(2):
            session.run(None, case.arrays)
        del session
        gc.collect()
    assert len(released) == 3 * len(layout.PRODUCT_KINDS)


def test_products_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("""
import sys
import numpy as np
import ortgrad
from ortgrad.operators.compiled import Matrix, Plan, Product


def plan(a, b, c, d):
    n, k, m = a[0], a[1], b[1]
    right = Matrix("b", k, m, int(sys.argv[1]))
    before = [Product(Matrix("product", n, m), Matrix("a", n, k), right)]
    # (A B)^T C
    after = [Product(Matrix("d", m, m), Matrix("product", n, m), Matrix("c", n, m), "left")]
    return Plan(n, [a, b, c, d], scratch=[(n, m)], before=before, after=after)


@ortgrad.operator(
    "Products", domain="my.domain", inputs=["A", "B"], outputs=["C", "D"], dims={"A": "N K", "B": "K M"},
    shapes=lambda a, b: [(a.shape[0], b.shape[1]), (b.shape[1], b.shape[1])],
)
def products(a, b):
    # The compiled kernel should run.
    return np.zeros((len(a), b.shape[1]), a.dtype), np.zeros((b.shape[1], b.shape[1]), a.dtype)


@products.compiled(views=[2, 2, 2, 2], scratch=[2], plan=plan, products=True)
def products_row(
    row: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, product: np.ndarray
) -> None:
    for k in range(c.shape[1]):
        c[row, k] = 2.0 * product[row, k]


for dtype in ("float32", "float64"):
    a, b = np.arange(6, dtype=dtype).reshape(2, 3), np.arange(12, dtype=dtype).reshape(3, 4)
    node = ortgrad.nodes.products("A", "B")
    model = ortgrad.nodes.make_model(node, dtype=dtype, shapes={"A": ["N", "K"], "B": ["K", "M"]})
    session = ortgrad.InferenceSession(model, kernels="compiled")
    try:
        c, d = session.run(None, {"A": a, "B": b})
    except ortgrad.KernelError as error:
        print("cannot be computed" in str(error))
    else:
        np.testing.assert_array_equal(c, 2 * (a @ b))
        np.testing.assert_array_equal(d, (a @ b).T @ (2 * (a @ b)))
        print(dtype)
""")
    for start, expected in (("0", "float32\nfloat64\n"), ("1", "True\nTrue\n")):
        done = subprocess.run(
            [sys.executable, str(script), start], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected


def test_memory_that_a_task_does_not_get(tmp_path: Path) -> None:
    """The task fails, and the NumPy kernel takes over; memory of several sizes is used again."""
    script = tmp_path / "memory.py"
    script.write_text("""
import numpy as np
import ortgrad
from ortgrad.compiled.functions import allocate, release
from ortgrad.operators.compiled import Plan


@ortgrad.operator("Copy", domain="my.domain", inputs=["X", "N: int64"], outputs=["Y"], shapes="X")
def copy(x, n):
    return -x


@copy.compiled(views=[1, 1, 1], plan=lambda x, n, y: Plan(x[0], [x, n, y]))
def copy_element(k: int, x: np.ndarray, n: np.ndarray, y: np.ndarray) -> bool:
    first, second = allocate(n[0]), allocate(n[1])
    failed = len(first) == 0 or len(second) == 0
    if not failed:
        first[n[0] - 1] = x[k]
        second[n[1] - 1] = x[k]
        y[k] = first[n[0] - 1] + second[n[1] - 1]
    release(first)
    release(second)
    return failed


model = ortgrad.nodes.make_model(ortgrad.nodes.copy("X", "N"), shapes={"X": ["M"], "N": [2]})
session = ortgrad.InferenceSession(model, kernels="compiled")
x = np.arange(50, dtype=np.float32)
for sizes in ((1, 1), (5000, 9000), (1 << 46, 1), (1, 1 << 46), (70000, 1 << 21), (300000, 300000)):
    y = session.run(None, {"X": x, "N": np.array(sizes)})[0]
    assert (y == (-x if max(sizes) == 1 << 46 else 2 * x)).all(), (sizes, y)
print("done")
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("operator", COMPILED, ids=lambda operator: operator.name)
def test_numbers_of_a_kernel_are_attributes_or_planned(operator: Operator) -> None:
    kernel = operator.compiled_kernel
    assert kernel is not None
    if kernel.plan is None:
        assert set(kernel.numbers) <= set(operator.attributes)


def test_declarations_that_do_not_fit_are_refused() -> None:
    def element(dy: float) -> float:
        return dy

    with pytest.raises(RegistrationError, match="must take 2 parameters"):
        CompiledKernel(element, 3)
    with pytest.raises(RegistrationError, match="view for every input"):
        CompiledKernel(lambda task, a, b, c: None, 3, (1, 1))


def recurrent_cases(name: str) -> Iterator[Case]:
    """Calls without lengths and peepholes, with more columns than a panel and more rows than a task has."""
    sizes = {"n": 19, "t": 3, "i": 35, "h": 34}
    for order, direction in ((0, "forward"), (1, "bidirectional"), (0, "reverse"), (0, "bidirectional")):
        case = cells(name, layout=order, direction=direction, full=True, **sizes)
        given = {name: array for name, array in case.arrays.items() if name not in ("SL", "P")}
        # dP needs P.
        outputs = ("dX", "dW", "dR", "dB", "dH0", "dC0") if name == "LSTMGrad" else ()
        for linear in (0, 1) if name.startswith("GRU") else (0,):
            own = {"linear_before_reset": linear} if name.startswith("GRU") else {}
            yield replace(case, arrays=given, attributes=case.attributes | own, outputs=outputs)


@pytest.mark.parametrize("operator", COMPILED, ids=lambda operator: operator.name)
def test_no_kernel_reads_or_writes_outside_its_tensors(operator: Operator) -> None:
    """Numba's checks raise an IndexError; a result that was not written is NaN."""
    cases = [case for case in CASES if case.op_type == operator.name]
    if operator.name.startswith(("GRU", "LSTM")):
        cases += recurrent_cases(operator.name)
    supported = 0
    for case in cases:
        outputs = checked_tasks(operator, case)
        if outputs is None:
            continue
        supported += 1
        given = [case.arrays.get(parameter.name) for parameter in operator.inputs]
        wanted = [not case.outputs or parameter.name in case.outputs for parameter in operator.outputs]
        attributes = operator.with_defaults(case.attributes)
        results = operator.compute(given, attributes, wanted, lambda i, shape: np.empty(shape, np.float32))
        expected = results if isinstance(results, tuple) else (results,)
        for actual, right in zip(outputs, expected, strict=True):
            if actual.size:
                # Terms of a sum may cancel.
                atol = 1e-6 * max(10.0, float(np.abs(right).max()))
                np.testing.assert_allclose(actual, right, rtol=2e-5, atol=atol, err_msg=case.name)
    assert supported


FUSED = [
    Program(
        (Operand("float", True), Operand("float", True), Operand("bool", True), Operand("float", False)),
        (Step("Add", (0, 1)), Step("Where", (2, 4, Constant(0.3))), Step("Mul", (5, 3)), Step("Erf", (6,))),
        (7, 4),
    ),
    Program(
        (Operand("float", True), Operand("float", False), Operand("bool", False)),
        (Step("Mul", (0, 1)), Step("Where", (2, 3, 0)), Step("ReluGrad", (4, 3))),
        (3, 4, 5),
    ),
]
SHAPES = {
    "flat": [(9000,), (9000,), (9000,), (1,)],
    "rows": [(3, 7, 5), (5,), (3, 7, 5), (7, 1)],
    "channels": [(2, 3, 4, 5), (2, 3, 4, 5), (4, 5), (3, 1, 1)],
    "both": [(2, 3, 5), (2, 1, 5), (3, 5), (2, 1, 1)],
    "ones": [(2, 3, 1), (2, 3, 1), (3, 1), (3, 1)],
    "one": [(1,), (), (1,), ()],
    "empty": [(2, 0, 5), (5,), (2, 0, 5), ()],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("program", FUSED, ids=["rows", "ones"])
def test_no_fused_kernel_reads_or_writes_outside_its_tensors(
    program: Program, shapes: list[tuple[int, ...]]
) -> None:
    operator = fused_operator(program, tuple("abcd"[: len(program.steps)]), "float32")
    generator = np.random.default_rng(0)
    chosen = iter(shapes) if len(program.operands) == 4 else iter([shapes[0], shapes[3], shapes[3]])
    arrays = {
        parameter.name: (generator.standard_normal(next(chosen)) * 2).astype(parameter.type)
        for parameter in operator.inputs
    }
    attributes = {**program.to_attributes(), "nodes": list("abcd"[: len(program.steps)])}
    outputs = checked_tasks(operator, Case(operator.name, arrays, attributes))
    for actual, right in zip(outputs, operator(*arrays.values(), **attributes), strict=True):
        np.testing.assert_allclose(actual, right, rtol=2e-5, atol=1e-5)


def test_plans() -> None:
    assert elementwise_plan((2, 3)) == Plan(6, [], work=18)


def test_kernels_of_ones_own(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text('''
import numpy as np
import ortgrad
from ortgrad.operators.compiled import Plan


@ortgrad.operator("CubeGrad", domain="my.domain", inputs=["dY", "X"], outputs=["dX"], shapes="X")
def cube_grad(dy, x):
    """dX = 3 dY X^2"""
    raise AssertionError("the compiled kernel should run")


@cube_grad.compiled
def cube_grad_element(dy: float, x: float) -> float:
    return 3.0 * dy * x * x


@ortgrad.operator(
    "RowSum", domain="my.domain", inputs=["X"], outputs=["Y"], dims={"X": "N C"},
    shapes=lambda x, scale: [x.shape and x.shape[:1]], attributes={"scale": 2.0},
)
def row_sum(x, *, scale):
    raise AssertionError("the compiled kernel should run")


@row_sum.compiled(views=[2, 1], plan=lambda x, y, *, scale: Plan(x[0], [x, y]))
def row_sum_of_row(row: int, x: np.ndarray, y: np.ndarray, scale: float) -> None:
    total = 0.0
    for k in range(x.shape[1]):
        total += x[row, k]
    y[row] = total * scale


@ortgrad.operator("Broken", domain="my.domain", inputs=["dY", "X"], outputs=["dX"], shapes="X")
def broken(dy, x):
    return dy


@broken.compiled
def broken_element(dy: float, x: float) -> float:
    return missing_function(dy, x)


for dtype in ("float32", "float64"):
    x = np.arange(6, dtype=dtype).reshape(2, 3)
    model = ortgrad.nodes.make_model(ortgrad.nodes.cube_grad("dY", "X", "dX"), dtype=dtype)
    session = ortgrad.InferenceSession(model, kernels="compiled")
    np.testing.assert_array_equal(session.run(None, {"dY": x, "X": x})[0], 3 * x**3)
    model = ortgrad.nodes.make_model(ortgrad.nodes.row_sum("X", "Y", scale=0.5), dtype=dtype)
    session = ortgrad.InferenceSession(model, kernels="compiled")
    np.testing.assert_array_equal(session.run(None, {"X": x})[0], x.sum(1) / 2)
session = ortgrad.InferenceSession(ortgrad.nodes.make_model(ortgrad.nodes.broken("dY", "X", "dX")))
try:
    session.run(None, {"dY": np.ones(2, np.float32), "X": np.ones(2, np.float32)})
except ortgrad.KernelError as error:
    print("Numba" in str(error))
''')
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


def test_a_compiler_that_fails_in_any_way_is_a_failing_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(kernel: CompiledKernel, dtypes: Sequence[str]) -> int:
        raise AttributeError("no such instruction")

    monkeypatch.setattr(machine_code, "block", fails)
    with pytest.raises(ortgrad.KernelError, match="AttributeError: no such instruction"):
        relu_session().run(None, arrays(3))


def test_auto_uses_a_compiled_kernel_only_if_it_is_the_fastest() -> None:
    kept = {}
    for size in (3, 1):
        shapes = {"dY": ["N", 2, 5, 5], "X": ["N", 3, 5, 5], "W": [2, 3, size, size]}
        node = nodes.conv_grad("dY", "X", "W", ["dX", "dW", None], pads=[size // 2] * 4)
        both = nodes.make_model([node, nodes.relu_grad("dY", "Y", "Z")], shapes=shapes)
        for kernels in ("auto", "compiled"):
            prepared = ortgrad.prepare(both, kernels=kernels)
            kept[kernels, size] = {n.op_type for n in prepared.graph.node}
    assert all("ReluGrad" in names for names in kept.values())
    assert "ConvGrad" in kept["auto", 3] & kept["compiled", 3] & kept["compiled", 1]
    assert "ConvGrad" not in kept["auto", 1]


BROKEN = """
import numpy as np, onnx, ortgrad
from ortgrad.compiled import cache, machine_code

def compile_entry(name):
    raise AttributeError("Numba has changed")

machine_code._compile_entry, cache.read = compile_entry, lambda key: None
model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 18]>
    g (float[2,16,64,64] x, float[16,1,3,3] w) => (float[2,16,62,62] y) <float a = {0}, float b = {6}>
    { c = Conv<group=16>(x, w) y = Clip(c, a, b) }''')
built = ortgrad.build_gradient_model(model, wrt="w")
random = np.random.default_rng(0)
shapes = {"x": (2, 16, 64, 64), "w": (16, 1, 3, 3), "y_grad": (2, 16, 62, 62)}
feeds = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
sessions = (ortgrad.InferenceSession(built, kernels=kernels) for kernels in ("auto", "onnx"))
found, expected = (session.run(["w_grad"], feeds)[0] for session in sessions)
np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-2)
"""


def test_a_release_of_numba_whose_compiler_has_changed() -> None:
    """Kernels are not compiled, with a warning, and sessions run all the same."""
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernels are not compiled: Numba has changed" in done.stderr


NARROW = """
import numpy as np, ortgrad
from ortgrad.compiled import instructions, processor
nodes, numbers = ortgrad.nodes, np.random.default_rng(0)
x, w = numbers.random((2, 5, 9, 7), np.float32), numbers.random((6, 5, 3, 3), np.float32)
dy = numbers.random((2, 6, 9, 7), np.float32)
model = nodes.make_model(
    nodes.conv_grad("dY", "X", "W", ["dX", "dW", "dB"], pads=[1, 1, 1, 1], kernel_shape=[3, 3])
)
feeds = {"dY": dy, "X": x, "W": w}
results = [ortgrad.InferenceSession(model, kernels=k).run(None, feeds) for k in ("compiled", "onnx")]
for actual, expected in zip(*results):
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
print(instructions.lanes(32), processor.has_many_registers(), processor.description()[0])
"""


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="names features of x86")
def test_kernels_for_another_processor(tmp_path: Path) -> None:
    """As Numba does, kernels are compiled for the processor that its variables name."""
    variables = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2,-avx,-avx2,-fma,-avx512f"}
    assert run_script(NARROW, tmp_path, **variables) == "4 False x86-64\n"
