"""The command line. What its exit codes mean is in EXIT_CODES, which `ortgrad --help` shows."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ortgrad import __version__
from ortgrad.errors import (
    ModelError,
    OrtgradError,
    StoppedGradientWarning,
    UnsupportedGradientError,
    WrongGradientError,
)

if TYPE_CHECKING:
    import numpy as np
    import onnx

# protobuf cannot write more than 2 GB; some room is left for the graph itself.
WRONG, FAILED, UNSUPPORTED, BUG, INTERRUPTED = 1, 2, 3, 4, 130
EXIT_CODES = """exit codes:
  0    all is well
  1    gradients are wrong: `check` or `demo` found that they disagree with differences; nothing else gives 1
  2    it could not be done: wrong usage, a file that is no valid model, a file that cannot be read or
       written, a model that does not run (stderr says what)
  3    nodes of the model cannot be differentiated (`explain` lists them, the others do on stderr)
  4    an error of ortgrad's own, with a traceback: please report it
  130  interrupted
"""

LARGEST_FILE = (1 << 31) - (1 << 26)
SMALLEST_EXTERNAL_TENSOR = 1024
VALUES = "inputs, initializers or intermediate values, or patterns such as 'layer4.*'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", StoppedGradientWarning)
            warnings.showwarning = _show_warning
            code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough; Python would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UnsupportedGradientError as error:
        return _fail(str(error), UNSUPPORTED)
    except WrongGradientError as error:
        return _fail(str(error), WRONG)
    except (OrtgradError, OSError) as error:
        return _fail(str(error))
    except MemoryError as error:
        return _fail(f"there is not enough memory: {error}")
    except Exception:
        # Python itself would exit with 1, which scripts take for wrong gradients.
        traceback.print_exc()
        return BUG
    return code


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of `warnings.showwarning`: what is meant for the user needs no place in our code."""
    text = f"ortgrad: warning: {message}\n"
    if not issubclass(category, StoppedGradientWarning):
        text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)


def _fail(message: str, code: int = FAILED) -> int:
    print(f"ortgrad: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ortgrad",
        description="Gradients for the onnxruntime you already have.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ortgrad {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    grad = commands.add_parser(
        "grad",
        help="build the backward graph of a model",
        description="Write a model with its outputs and, for every NAME of --wrt, its gradient NAME_grad.",
    )
    _add_model(grad)
    _add_output(grad)
    _add_names(
        grad,
        f"{VALUES} (default: the parameters)",
        "outputs or intermediate values (default: the first floating-point output)",
    )
    grad.set_defaults(run=_grad)

    prepare = commands.add_parser(
        "prepare",
        help="make a model with gradient nodes ready for onnxruntime",
        description="Make a model that holds gradient nodes one that a plain onnxruntime session runs.",
    )
    _add_model(prepare)
    _add_output(prepare)
    _add_kernels(prepare)
    prepare.set_defaults(run=_prepare)

    check = commands.add_parser(
        "check",
        help="compare the gradients of a model with finite differences",
        description="Compare gradients with float64 finite differences; the exit code is 1 if they disagree.",
    )
    _add_model(check)
    _add_names(
        check,
        f"{VALUES} (default: all inputs and initializers that a gradient flows to)",
        "outputs or intermediate values (default: all floating-point outputs)",
    )
    _add_kernels(check)
    check.add_argument("--per-node", action="store_true", help="check every node by itself as well")
    check.add_argument(
        "--feeds", metavar="FILE.npz", help="inputs by name; the others are drawn at random (see numpy.savez)"
    )
    _add_progress(check)
    check.set_defaults(run=_check)

    explain = commands.add_parser(
        "explain",
        help="show what each node of a model becomes",
        description="List the nodes of a model: the operators that compute their gradients, or why there are "
        "none. The exit code is 3 if one cannot be differentiated.",
    )
    _add_model(explain)
    _add_names(
        explain,
        f"{VALUES} (default: the parameters)",
        "outputs or intermediate values (default: the first floating-point output)",
    )
    explain.set_defaults(run=_explain)

    ops = commands.add_parser(
        "ops",
        help="list gradient operators and rules",
        description="List the gradient operators, and the operators that can be differentiated.",
    )
    ops.add_argument("filter", nargs="?", default="", metavar="TEXT", help="only names that contain TEXT")
    ops.set_defaults(run=_ops)

    demo = commands.add_parser(
        "demo",
        help="train a small CNN on handwritten digits",
        description="Build the backward graph of a small CNN, check it, and train it on handwritten digits.",
    )
    _add_progress(demo)
    demo.set_defaults(run=_demo)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an ONNX file")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the file to write")


def _add_names(parser: argparse.ArgumentParser, wrt: str, of: str) -> None:
    parser.add_argument("--wrt", nargs="+", action="extend", metavar="NAME", help=f"gradients of what: {wrt}")
    parser.add_argument(
        "--of", nargs="+", action="extend", metavar="NAME", help=f"what is differentiated: {of}"
    )


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kernels",
        choices=["auto", "python", "onnx"],
        default="auto",
        help="what computes gradient nodes: Python kernels, standard ONNX operators, or per node "
        "whichever is faster (default: auto)",
    )


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a progress bar on stderr (default: if that is a terminal)",
    )


def _grad(arguments: argparse.Namespace) -> int:
    from ortgrad.pipelines.build import build_gradient_model

    output = _output_path(arguments.output)
    model = build_gradient_model(arguments.model, wrt=arguments.wrt, of=arguments.of)
    _save(model, output)
    _describe(model, output)
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    from ortgrad.pipelines.prepare import prepare

    output = _output_path(arguments.output)
    model = prepare(arguments.model, kernels=arguments.kernels)
    _save(model, output)
    _describe(model, output)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from ortgrad.check.gradients import check_gradients
    from ortgrad.cli.progress import Progress

    with Progress(arguments.progress) as progress:
        result = check_gradients(
            arguments.model,
            _feeds(arguments.feeds),
            wrt=arguments.wrt,
            of=arguments.of,
            kernels=arguments.kernels,
            per_node=arguments.per_node,
            progress=progress,
        )
    print(result)
    if not result.judged:
        return _fail("nothing could be judged; give other values with --feeds")
    return 0 if result.ok else WRONG


def _explain(arguments: argparse.Namespace) -> int:
    from ortgrad.pipelines.explain import explain

    found = explain(arguments.model, wrt=arguments.wrt, of=arguments.of)
    names = max((len(item.node) for item in found), default=0)
    operators = max((len(item.operator) for item in found), default=0)
    for item in found:
        reason = item.reason if item.supported else f"NOT SUPPORTED: {item.reason}"
        becomes = " ".join(item.gradient) or f"({reason})"
        print(f"{item.node:<{names}}  {item.operator:<{operators}}  {becomes}")
    missing = sum(not item.supported for item in found)
    if missing:
        return _fail(f"{missing} node(s) cannot be differentiated", UNSUPPORTED)
    return 0


def _ops(arguments: argparse.Namespace) -> int:
    from ortgrad.autodiff.rules import all_rules
    from ortgrad.operators.declaration import all_operators

    text = arguments.filter.lower()
    operators = [o for o in all_operators() if text in o.name.lower()]
    rules = {f"{domain}::{name}" if domain else name: rule for (domain, name), rule in all_rules().items()}
    differentiable = sorted(name for name, rule in rules.items() if text in name.lower() and rule.function)
    constant = sorted(name for name, rule in rules.items() if text in name.lower() and not rule.function)
    if not (operators or differentiable or constant):
        return _fail(f"there is no gradient operator or rule with {arguments.filter!r} in its name")
    if operators:
        print("Gradient operators:")
        for operator in sorted(operators, key=lambda o: o.name):
            inputs, outputs = (
                ", ".join(parameter.name + "?" * parameter.optional for parameter in parameters)
                for parameters in (operator.inputs, operator.outputs)
            )
            formula = operator.doc.partition("\n")[0]
            print(f"  {operator.name}({inputs}) -> {outputs}\n      {formula}")
    for title, names in (
        ("Operators with a gradient rule:", differentiable),
        ("Operators through which no gradient flows:", constant),
    ):
        if names:
            print(title)
            for name in names:
                print(f"  {name}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from ortgrad.cli import demo

    demo.run(arguments.progress)
    return 0


def _feeds(path: str | None) -> dict[str, np.ndarray] | None:
    if path is None:
        return None
    import zipfile
    import zlib

    import numpy as np

    # Opened here: numpy leaves files open that it cannot read.
    with open(path, "rb") as file:
        try:
            loaded = np.load(file)
            arrays = None if isinstance(loaded, np.ndarray) else dict(loaded)
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ModelError(
                f"there are no arrays to be read in {path!r} ({error}): write it with numpy.savez"
            ) from error
    if arrays is None:
        raise ModelError(f"{path!r} holds a single array: write inputs by name with numpy.savez")
    return arrays


def _output_path(name: str) -> Path:
    """The file to write, checked before the work is done."""
    path = Path(name)
    if path.is_dir():
        raise ModelError(f"cannot write {name!r}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ModelError(f"cannot write {name!r}: there is no folder {str(path.parent)!r}; make it first")
    return path


def _save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; the weights of one that does not fit in one file go to a second beside it."""
    import onnx

    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) <= LARGEST_FILE:
        path.write_bytes(model.SerializeToString())
        return
    data = path.with_name(path.name + ".data")
    # onnx would append to it.
    data.unlink(missing_ok=True)
    onnx.save_model(
        model,
        str(path),
        save_as_external_data=True,
        location=data.name,
        size_threshold=SMALLEST_EXTERNAL_TENSOR,
    )


def _describe(model: onnx.ModelProto, path: Path) -> None:
    count = len(model.graph.node)
    print(f"{path}: {count} node{'s' if count != 1 else ''}")
    print(f"  inputs:  {', '.join(value.name for value in model.graph.input)}")
    print(f"  outputs: {', '.join(value.name for value in model.graph.output)}")
