"""The command line: what it writes, what it says, and its exit codes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import ROOT

import ortgrad
from ortgrad.check.running import Backward
from ortgrad.cli import demo, exit_codes, files, main
from ortgrad.cli.summary import summary
from ortgrad.pipelines.explain import Explanation
from ortgrad.progress import Progress

CNN = str(ROOT / "models" / "cnn.onnx")
TRAINING_MODEL = str(ROOT / "tests" / "golden" / "cnn" / "training_model.onnx")

HEAD = '<ir_version: 10, opset_import: ["" : 21, "my.domain" : 1]>'
MODELS = {
    "regression": """(float[N, 3] x, float[N] target) => (float loss, float[N] error)
        <float[3] w = {1, 2, 3}> {
        y = MatMul(x, w)
        error = Sub(y, target)
        square = Mul(error, error)
        loss = ReduceMean<keepdims = 0>(square)
    }""",
    "unsupported": """(float[N, 3] x) => (float[N, 3] y, float[N, 3] z) {
        a = my.domain.Foo(x)
        b = my.domain.Bar(a)
        y = Relu(b)
        r = Round(x)
        z = Add(r, x)
    }""",
    "dangling": "(float[N, 3] x) => (float[N, 3] y) { y = Add(x, q) }",
    "dangling_in_branch": """(float[N, 3] x, bool c) => (float[N, 3] y) {
        y = If(c) <
            then_branch = one () => (float[N, 3] a) { a = Neg(x) },
            else_branch = other () => (float[N, 3] b) { b = Neg(q) }
        >
    }""",
    "no_producer": "(float[N, 3] x) => (float[N, 3] y, float[N, 3] z) { y = Relu(x) }",
    "cycle": "(float[N, 3] x) => (float[N, 3] y) { y = Add(x, a) a = Relu(y) }",
    "integers": "(int64[N] x) => (int64[N] y) { y = Add(x, x) }",
    "mismatch": "(float[N, 3] x) => (float[N, 2] y) <float[2] w = {1, 2}> { y = MatMul(x, w) }",
    "empty": "(float[N] x) => (float[N] x) { }",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in MODELS.items():
        model = onnx.parser.parse_model(f"{HEAD} {name} {text}")
        (tmp_path / f"{name}.onnx").write_bytes(model.SerializeToString())
    (tmp_path / "text.onnx").write_text("not a model")
    (tmp_path / "nothing.onnx").write_bytes(b"")
    (tmp_path / "half.onnx").write_bytes(Path(CNN).read_bytes()[:3000])
    return tmp_path


def test_grad_writes_a_model_that_onnxruntime_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "backward.onnx"
    assert main(["grad", str(folder / "regression.onnx"), "-o", str(output), "--wrt", "w", "x"]) == 0
    assert "outputs: loss, error, w_grad, x_grad" in capsys.readouterr().out
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(output, options, providers=["CPUExecutionProvider"])
    x, target = np.float32([[1, 0, 0], [0, 1, 0]]), np.float32([0, 0])
    _, _, w_grad, x_grad = session.run(None, {"x": x, "target": target})
    np.testing.assert_allclose(w_grad, [1, 2, 0])
    np.testing.assert_allclose(x_grad, [[1, 2, 3], [2, 4, 6]])


def test_grad_of_several_outputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "backward.onnx"
    arguments = ["--wrt", "w", "--of", "loss", "--of", "error"]
    assert main(["grad", str(folder / "regression.onnx"), "-o", str(output), *arguments]) == 0
    assert "inputs:  x, target, loss_grad, error_grad, w" in capsys.readouterr().out


def test_weights_are_kept_once(tmp_path: Path) -> None:
    output = tmp_path / "backward.onnx"
    assert main(["grad", CNN, "-o", str(output)]) == 0
    names = [tensor.name for tensor in onnx.load(output).graph.initializer if len(tensor.raw_data) > 64]
    assert sorted(names) == ["conv1.weight", "conv2.weight", "fc.weight"]


def test_large_models_have_their_weights_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "backward.onnx"
    monkeypatch.setattr(files, "LARGEST_FILE", 1000)
    for _ in range(2):  # the second time over the first
        assert main(["grad", CNN, "-o", str(output)]) == 0
        tensors = onnx.load(output, load_external_data=False).graph.initializer
        outside = [t.name for t in tensors if t.data_location == onnx.TensorProto.EXTERNAL]
        assert outside == ["conv2.weight", "fc.weight"]  # small ones stay in the model
        size = (tmp_path / "backward.onnx.data").stat().st_size
        assert size < 2 * os.path.getsize(CNN), "written twice"
    image = np.ones((2, 1, 8, 8), np.float32)
    feeds = {"image": image, "logits_grad": np.ones((2, 10), np.float32)}
    found = ortgrad.InferenceSession(output).run(None, feeds)
    expected_outputs = ortgrad.InferenceSession(ortgrad.build_gradient_model(CNN)).run(None, feeds)
    for actual, other in zip(found, expected_outputs, strict=True):
        np.testing.assert_array_equal(actual, other)


@pytest.mark.parametrize("kernels", ["python", "onnx", "auto"])
def test_prepare(tmp_path: Path, kernels: str) -> None:
    output = tmp_path / "ready.onnx"
    assert main(["prepare", TRAINING_MODEL, "-o", str(output), "--kernels", kernels]) == 0
    model = onnx.load(output)
    gradients = {node.op_type for node in model.graph.node if node.domain == "com.microsoft"}
    assert ("ConvGrad" in gradients) >= (kernels == "python")
    assert not (gradients and kernels == "onnx")


def test_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder / "regression.onnx"), "--per-node", "--kernels", "onnx"]) == 0
    out, err = capsys.readouterr()
    for name in ("w", "x", "MatMul y", "Sub error"):
        assert any(line.startswith(f"{name} ") and " ok " in line for line in out.splitlines()), out
    assert err == ""


def test_check_with_a_progress_bar(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder / "regression.onnx"), "--wrt", "w", "--of", "loss", "--progress"]) == 0
    out, err = capsys.readouterr()
    assert "w  ok" in out and "1/1 w" in err


def test_check_of_wrong_gradients(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Backward.run
    monkeypatch.setattr(
        Backward, "run", lambda *arguments: {k: 1.1 * g for k, g in right(*arguments).items()}
    )
    assert main(["check", str(folder / "regression.onnx"), "--wrt", "w"]) == 1
    assert "w  WRONG" in capsys.readouterr().out


def test_check_of_the_models_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted(Path(CNN).parent.glob("*.onnx")):
        assert main(["check", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "WRONG" not in out and "the model is random: Dropout dropout." in out
    assert err == ""


def test_check_of_what_cannot_be_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y)
        { z = Sub(x, x) y = Relu(z) }"""
    path = tmp_path / "kink.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    assert main(["check", str(path), "--wrt", "z"]) == 2
    out, err = capsys.readouterr()
    assert "z  not judged:  it is on a kink" in out
    (line,) = err.splitlines()
    assert "nothing could be judged" in line


def test_check_on_given_feeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, feeds = str(folder / "regression.onnx"), folder / "feeds.npz"
    np.savez(feeds, x=np.ones((5, 3), np.float32))
    assert main(["check", model, "--wrt", "w", "--of", "loss", "--feeds", str(feeds)]) == 0
    np.savez(feeds, x=np.ones((5, 4), np.float32))
    assert main(["check", model, "--wrt", "w", "--of", "loss", "--feeds", str(feeds)]) == 2
    out, err = capsys.readouterr()
    assert "w  ok" in out and err.count("\n") == 1
    np.save(folder / "one.npy", np.ones(3))
    assert main(["check", model, "--feeds", str(folder / "one.npy")]) == 2
    assert main(["check", model, "--feeds", str(folder / "text.onnx")]) == 2
    assert main(["check", model, "--feeds", str(folder / "missing.npz")]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CNN, "--all"]) == 0
    found = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert found["conv1"] == ["Conv", "ConvGrad"]
    assert found["relu1"] == ["Relu", "ReluGrad"]
    assert found["pool1"] == ["MaxPool", "Shape", "MaxPoolGrad"]
    assert list(found) == ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten", "fc"]
    assert main(["explain", CNN]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [["8", "nodes"], ["Conv", "2", "ConvGrad"]]
    assert ["MaxPool", "1", "Shape", "MaxPoolGrad"] in lines and len(lines) == 8


def test_explain_names_the_operator_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    # The rule puts GRUTraining in its place.
    assert main(["explain", str(ROOT / "models" / "gru.onnx"), "--all"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["gru", "GRU", "GRUGrad"]


def test_explain_what_is_not_supported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(folder / "unsupported.onnx"), "--wrt", "x", "--all"]) == 3
    out, err = capsys.readouterr()
    assert [line.split(maxsplit=2) for line in out.splitlines()] == [
        ["a", "Foo", "(NOT SUPPORTED: there is no gradient rule for it)"],
        ["b", "Bar", "(NOT SUPPORTED: there is no gradient rule for it)"],
        ["y", "Relu", "ReluGrad"],
        ["r", "Round", "(no gradient flows through this operator)"],
        ["z", "Add", "(not between wrt and of)"],
    ]
    assert err == "ortgrad: 2 node(s) cannot be differentiated\n"
    assert main(["explain", str(folder / "unsupported.onnx"), "--wrt", "x"]) == 3
    out, err = capsys.readouterr()
    assert "Foo, 1 node: NOT SUPPORTED: there is no gradient rule for it\n    a\n" in out
    assert err == "ortgrad: 2 node(s) cannot be differentiated\n"
    assert main(["explain", str(folder / "unsupported.onnx"), "--wrt", "x", "--of", "z"]) == 0
    out = capsys.readouterr().out
    assert "(the gradient passes unchanged)" in out
    assert "Round, 1 node: the gradient stops here\n    r\n" in out
    assert main(["explain", str(folder / "empty.onnx"), "--wrt", "x"]) == 0


def large_model(layers: int) -> onnx.ModelProto:
    """Return a model with nodes of every kind that `explain` tells apart, with long names."""
    nodes = [helper.make_node("Shape", ["x"], ["shape"])]
    last = "x"

    def add(op_type: str, *more: str, domain: str = "", **attributes: object) -> None:
        nonlocal last
        name = f"/model/encoder/layers.{len(nodes)}/attention/self/{op_type}"
        nodes.append(helper.make_node(op_type, [last, *more], [name], name, domain=domain, **attributes))
        last = name

    for i in range(layers):
        for op_type in ("Sin", "Cos", "Exp", "Abs", "Erf", "Neg", "Sigmoid", "Tanh", "Elu", "Softplus"):
            add(op_type)
        add("Foo" if i % 2 else "Bar", domain="my.domain")
        add("QuickGelu", domain="com.microsoft")
        add("HardSwish")
        add("FusedGemm", "square", domain="com.microsoft", activation="Relu")
        add("QuantizeLinear", "scale")
        add("DequantizeLinear", "scale")
        nodes.append(helper.make_node("Round", [last], [f"rounded{i}"], f"round{i}"))
        add("Add", f"rounded{i}")
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [2, 3])],
        [
            numpy_helper.from_array(np.float32(0.1), "scale"),
            numpy_helper.from_array(np.eye(3, dtype=np.float32), "square"),
        ],
    )
    opsets = [
        helper.make_opsetid(domain, v) for domain, v in (("", 21), ("com.microsoft", 1), ("my.domain", 1))
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("columns, lines", [(80, 24), (60, 30), (200, 50)])
def test_explain_of_a_large_model_fits_a_screen(
    columns: int,
    lines: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    path = str(tmp_path / "large.onnx")
    onnx.save(large_model(8), path)
    assert main(["explain", path, "--wrt", "x"]) == 3
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= columns
    assert len(out) <= max(lines, 36)  # the special nodes are always shown, and at least 8 operators
    text = " ".join(" ".join(out).split())
    for operator in ("Foo", "Bar"):
        assert f"{operator}, 4 nodes: NOT SUPPORTED: there is no gradient rule for it" in text
    assert "QuantizeLinear, 8 nodes: straight-through: differentiated as if it did not round" in text
    assert "Round, 8 nodes: the gradient stops here round0, round1, round2 ... and 5 more (--all)" in text
    assert "FusedGemm, 8 nodes: differentiated through its definition" in text
    # The refusals come first.
    assert text.index("NOT SUPPORTED") < text.index("straight-through")
    assert main(["explain", path, "--wrt", "x", "--all"]) == 3
    assert len(capsys.readouterr().out.splitlines()) > 8 * 18


def test_refusals_that_differ_in_names_are_one_group() -> None:
    found = [
        Explanation(f"n{i}", "Foo", reason=f"the rank of 'v{i}' is not known", supported=False)
        for i in range(5)
    ]
    assert summary(found, 80, 24) == [
        "5 nodes",
        "Foo, 5 nodes: NOT SUPPORTED: the rank of ... is not known",
        "    n0, n1, n2 ... and 2 more (--all)",
    ]
    assert "Foo, 1 node: NOT SUPPORTED: the rank of 'v0' is not known" in summary(found[:1], 80, 24)


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "RELU"]) == 0
    out = capsys.readouterr().out
    assert "  ReluGrad(dY, X) -> dX\n      dX = dY where X > 0, else 0\n" in out
    assert "\n  LeakyRelu\n" in out and "ConvGrad" not in out
    assert main(["ops"]) == 0
    out = capsys.readouterr().out
    assert "ConvGrad(dY, X, W)" in out and "\n  Floor\n" in out
    assert main(["ops", "Grue"]) == 2
    assert "'Grue'" in capsys.readouterr().err


COMMANDS = {
    "grad": ["-o", "out.onnx", "--wrt", "x"],
    "prepare": ["-o", "out.onnx"],
    "check": ["--wrt", "x", "--of", "y"],
    "explain": ["--wrt", "x"],
}
BAD_FILES = [
    ".",
    "missing.onnx",
    "text.onnx",
    "nothing.onnx",
    "half.onnx",
    "dangling.onnx",
    "bytes.onnx",
    "feeds.npz",
]


@pytest.mark.parametrize("file", BAD_FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_exit_code_of_bad_files(
    folder: Path,
    command: str,
    file: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "bytes.onnx").write_bytes(bytes(range(256)))
    np.savez(folder / "feeds.npz", x=np.ones(3))
    assert main([command, file, *COMMANDS[command]]) == exit_codes.FAILED == 2
    out, err = capfd.readouterr()
    assert err.startswith("ortgrad: ") and err.count("\n") == 1 and out == ""
    assert not (folder / "out.onnx").exists()


@pytest.mark.parametrize(
    ("command", "code"),
    [("grad", 3), ("prepare", 0), ("check", 3), ("explain", 3)],
    ids=lambda value: str(value),
)
def test_exit_code_of_unsupported_nodes(folder: Path, command: str, code: int, capfd) -> None:
    arguments = [a if a != "out.onnx" else str(folder / a) for a in COMMANDS[command]]
    assert main([command, str(folder / "unsupported.onnx"), *arguments]) == code
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_exit_code_of_a_bug(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(f"ortgrad.cli.{command}.command", broken)
    assert main([command, str(folder / "regression.onnx"), *COMMANDS[command]]) == 4
    assert "ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.setattr(
        f"ortgrad.cli.{command}.command", lambda _: (_ for _ in ()).throw(KeyboardInterrupt())
    )
    assert main([command, str(folder / "regression.onnx"), *COMMANDS[command]]) == 130


def test_exit_code_of_a_demo_with_wrong_gradients(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise ortgrad.WrongGradientError("by far")

    monkeypatch.setattr(demo, "run", wrong)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "ortgrad: by far\n"


def test_help_says_what_exit_codes_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    codes = [line.split()[0] for line in out.partition("exit codes:")[2].splitlines() if line[2:3].isdigit()]
    assert codes == ["0", "1", "2", "3", "4", "130"]


def test_feeds_that_cannot_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feeds = folder / "feeds.npz"
    np.savez_compressed(feeds, x=np.arange(3000, dtype=np.float32).reshape(-1, 3))
    whole = feeds.read_bytes()
    check = ["check", str(folder / "regression.onnx"), "--wrt", "w", "--of", "loss", "--feeds"]
    assert main([*check, str(feeds)]) == 0
    capsys.readouterr()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    for content in (bytes(damaged), whole[: len(whole) // 2], b"", b"text"):
        feeds.write_bytes(content)
        assert main([*check, str(feeds)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    np.savez(feeds, x=np.array([object()]))
    for path in (feeds, folder, folder / "missing.npz"):
        assert main([*check, str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    np.savez(feeds, x=np.array(["a", "b", "c"]).reshape(1, 3))
    assert main([*check, str(feeds)]) == 2


NOWHERE = os.path.join("no", "such", "folder", "out.onnx")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["grad", "missing.onnx", "-o", "out.onnx"], 2, "cannot read the model 'missing.onnx': No such file"),
        (["check", "missing.onnx"], 2, "cannot read the model"),
        (["explain", "missing.onnx"], 2, "cannot read the model"),
        (["prepare", "missing.onnx", "-o", "out.onnx"], 2, "cannot read the model"),
        (["grad", ".", "-o", "out.onnx"], 2, "cannot read the model '.'"),
        (["grad", "text.onnx", "-o", "out.onnx"], 2, "there is no ONNX model in the file 'text.onnx'"),
        (["check", "nothing.onnx"], 2, "there is no ONNX model in the file 'nothing.onnx'"),
        (["prepare", "half.onnx", "-o", "out.onnx"], 2, "there is no ONNX model in the file 'half.onnx'"),
        (["grad", "regression.onnx", "-o", NOWHERE], 2, "make it first"),
        (["prepare", "regression.onnx", "-o", NOWHERE], 2, "make it first"),
        (["grad", "regression.onnx", "-o", "."], 2, "it is a folder"),
        (["grad", "regression.onnx", "-o", "out.onnx", "--wrt", "ww"], 2, "did you mean 'w'?"),
        (["grad", "regression.onnx", "-o", "out.onnx", "--of", "los"], 2, "did you mean 'loss'?"),
        (["check", "regression.onnx", "--wrt", "qqq"], 2, "--wrt 'qqq' is not a value of the model"),
        (["explain", "regression.onnx", "--of", "lost"], 2, "--of 'lost' is not a value of the model"),
        (["grad", "integers.onnx", "-o", "out.onnx", "--wrt", "x"], 2, "no floating-point output"),
        (["grad", "regression.onnx", "-o", "out.onnx", "--wrt", "q*"], 2, "--wrt 'q*' matches no"),
        (["grad", "unsupported.onnx", "-o", "out.onnx"], 2, "name what you want with --wrt"),
        (["grad", "dangling.onnx", "-o", "out.onnx", "--wrt", "x"], 2, "Add node 'y' reads 'q', which is"),
        (["check", "dangling_in_branch.onnx"], 2, "Neg node 'b' reads 'q'"),
        (["explain", "no_producer.onnx", "--wrt", "x"], 2, "the output 'z' is computed nowhere"),
        (["grad", "cycle.onnx", "-o", "out.onnx", "--wrt", "x"], 2, "form a cycle"),
        (["check", "mismatch.onnx"], 2, "onnxruntime does not load the model"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_errors_are_one_line(
    folder: Path,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("ortgrad: ") and err.count("\n") == 1
    assert out == ""
    assert not (folder / "out.onnx").exists()


@pytest.mark.parametrize("command", ["grad", "check"])
def test_unsupported_nodes_are_listed(folder: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["-o", str(folder / "out.onnx")] if command == "grad" else []
    assert main([command, str(folder / "unsupported.onnx"), "--wrt", "x", "--of", "y", *output]) == 3
    out, err = capsys.readouterr()
    assert "2 node(s)" in err and "Foo (domain my.domain, opset 1), node 'a'" in err and "Bar" in err
    assert out == ""


def test_a_file_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "regression.onnx"
    # A name that no file system takes.
    assert main(["grad", str(model), "-o", str(folder / ("long" * 100))]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["gradient"], ["grad", CNN], ["prepare", CNN, "-o", "x", "--kernels", "fast"]]
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: ortgrad" in capsys.readouterr().err


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


def test_demo(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = demo.run()
    out, err = capsys.readouterr()
    assert accuracy > 0.95
    assert (
        "conv1.weight  ok" in out and "samples per second" in out and f"{accuracy:.1%} after training" in out
    )
    assert err == ""
    monkeypatch.setattr(demo, "run", lambda show: accuracy)
    assert main(["demo"]) == 0


def test_demo_without_scikit_learn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    out, err = capsys.readouterr()
    assert "python -m pip install scikit-learn" in err and err.count("\n") == 1
    assert out == ""


def test_trained_weights_are_put_back() -> None:
    model = demo.classifier()
    parameters = {name: array + 1 for name, array in demo.parameters_of(model).items()}
    changed = demo.with_parameters(model, parameters)
    for tensor in changed.graph.initializer:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), parameters[tensor.name])
    onnx.checker.check_model(demo.with_loss(changed), full_check=True)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert (exit_.value.code, capsys.readouterr().out) == (0, f"ortgrad {ortgrad.__version__}\n")


def test_python_m_ortgrad(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ortgrad", "grad", "missing.onnx", "-o", "out.onnx"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("ortgrad: cannot read the model") and result.stderr.count("\n") == 1


def test_what_is_installed_has_the_model_and_a_light_start(tmp_path: Path) -> None:
    code = (
        "import sys; from ortgrad.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('onnx_ir', 'sympy', 'sklearn', 'ortgrad.cli.demo') if m in sys.modules])\n"
        "from ortgrad.cli.demo import classifier; print(classifier().graph.name)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["[]", "cnn"]


def test_a_reader_that_has_enough(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ortgrad", "ops"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()  # before anything is written
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (0, b"")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_and_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    with Progress(stream=terminal) as progress:
        progress(1, 2, "one")
        progress(2, 2, "a text that is longer than the line")
    lines = terminal.getvalue().split("\r")
    assert lines[1] == "[############............] 1/2 one"
    assert lines[2].startswith("[########################] 2/2 a text") and len(lines[2]) == 39
    assert lines[3:] == [" " * 39, ""]


@pytest.mark.parametrize(("show", "drawn"), [(None, False), (False, False), (True, True)])
def test_progress_is_for_terminals(show: bool | None, drawn: bool) -> None:
    stream = io.StringIO()
    with Progress(show, stream) as progress:
        progress(1, 1, "one")
    assert bool(stream.getvalue()) == drawn
