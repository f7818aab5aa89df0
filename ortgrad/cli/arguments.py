"""The argument parser of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ortgrad import __version__
from ortgrad.cli.exit_codes import EXIT_CODES

VALUES = "inputs, initializers or intermediate values, or patterns such as 'layer4.*'"
PARAMETERS = f"{VALUES} (default: the parameters)"
FIRST_OUTPUT = "outputs or intermediate values (default: the first floating-point output)"

SEEN = (
    "all inputs by name, for a run that shows the numbers of dimensions that the model does not tell "
    "(see numpy.savez)"
)

TRAINED = "what is trained: names or patterns such as 'layer4.*' (default: the parameters)"
KERNELS = ("auto", "compiled", "python", "onnx")


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser; the argument `command` is the name of a module in ortgrad.cli."""
    parser = argparse.ArgumentParser(
        prog="ortgrad",
        description="Gradients for the onnxruntime you already have.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ortgrad {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for name, (add, text, description) in _COMMANDS.items():
        add(commands.add_parser(name, help=text, description=description))
    return parser


# Commands


def _add_grad(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_output(parser)
    _add_names(parser, PARAMETERS, FIRST_OUTPUT)
    parser.add_argument(
        "--straight-through",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="differentiate quantized models as if nothing were rounded; without, refuse them (default: yes)",
    )
    _add_feeds(parser, SEEN)


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_output(parser)
    _add_kernels(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_names(
        parser,
        f"{VALUES} (default: all inputs and initializers that a gradient flows to)",
        "outputs or intermediate values (default: all floating-point outputs)",
    )
    _add_kernels(parser)
    parser.add_argument("--per-node", action="store_true", help="check every node by itself as well")
    _add_feeds(parser, "inputs by name; the others are drawn at random (see numpy.savez)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=180.0,
        metavar="N",
        help="time for the gradients, and as much again for --per-node; what is left then is not checked "
        "(default: 180)",
    )
    _add_progress(parser)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_names(parser, PARAMETERS, FIRST_OUTPUT)
    _add_feeds(parser, SEEN)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--all", action="store_true", help="a line for every node instead")
    shown.add_argument(
        "--kernels",
        nargs="?",
        const="auto",
        choices=KERNELS,
        help="instead, a line for every node of the model with gradients: which kernel a session with these "
        "kernels runs, and why (default: auto)",
    )


def _add_ops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("filter", nargs="?", default="", metavar="TEXT", help="only names that contain TEXT")


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="an ONNX file (default: all kernels)")
    parser.add_argument(
        "--shared",
        metavar="FOLDER",
        help="keep them in this folder, which all users may read: for sessions with ORTGRAD_CACHE_DIR=FOLDER",
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_output(parser)
    add = parser.add_argument
    add(
        "--data", required=True, metavar="FILE.npz", help="arrays by the names of the inputs, with the target"
    )
    add(
        "--loss",
        required=True,
        metavar="LOSS",
        help="such as cross-entropy (of scores and labels), mse or bce (of scores and a target), or the name "
        "of a scalar in the model",
    )
    add("--loss-output", metavar="NAME", help="the value that the loss is of (default: the first output)")
    add("--axis", type=int, metavar="N", help="the dimension of the classes, for cross-entropy")
    add("--target", metavar="NAME", help="the array with the target (default: labels, or target)")
    add("--optimizer", default="adamw", metavar="NAME", help="such as adamw (the default), adam or sgd")
    add("--learning-rate", type=float, metavar="R", help="default: that of the optimizer")
    add("--weight-decay", type=float, metavar="D", help="default: that of the optimizer")
    add("--momentum", type=float, metavar="M", help="for sgd and rmsprop (default: 0)")
    add("--schedule", choices=["constant", "linear", "cosine"], default="constant", help="default: constant")
    add("--warmup", type=float, default=0, metavar="N", help="steps, or a fraction of them (default: 0)")
    add("--clip-norm", type=float, metavar="N", help="the largest norm of the gradients")
    add("--accumulate", type=int, default=1, metavar="N", help="batches per step (default: 1)")
    add("--epochs", type=int, default=1, metavar="N", help="default: 1")
    add("--batch-size", type=int, default=32, metavar="N", help="default: 32")
    _add_trained(parser)
    _add_statistics(parser)
    add("--eval", metavar="FILE.npz", help="held-out data, or a fraction of the data, such as 0.2")
    add("--metric", choices=["accuracy", "mse"], help="what is computed of the held-out data")
    add("--patience", type=int, metavar="N", help="stop after N epochs without an improvement")
    add("--checkpoint", metavar="FILE", help="written after each epoch; .safetensors, or 1.19.2's format")
    add("--checkpoint-every", type=int, metavar="N", help="and after every N steps")
    add("--resume", action="store_true", help="continue from the checkpoint if it exists")
    add("--curve", metavar="PNG", help="a picture of the losses (needs matplotlib)")
    add("--seed", type=int, default=0, metavar="N", help="for the order of samples and Dropout (default: 0)")
    add("--threads", type=int, default=0, metavar="N", help="default: all processors")
    _add_progress(parser)


def _add_artifacts(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_output(parser, "FOLDER", "the folder to write to")
    parser.add_argument(
        "--loss",
        choices=["cross-entropy", "mse", "l1", "bce"],
        help="of the first output (default: the first output is the loss)",
    )
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw", help="default: adamw")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="the names of the files begin with it")
    _add_trained(parser)
    _add_statistics(parser)


# Options of several commands


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an ONNX file")


def _add_output(
    parser: argparse.ArgumentParser, metavar: str = "OUT", text: str = "the file to write"
) -> None:
    parser.add_argument("-o", "--output", required=True, metavar=metavar, help=text)


def _add_names(parser: argparse.ArgumentParser, wrt: str, of: str) -> None:
    parser.add_argument("--wrt", nargs="+", action="extend", metavar="NAME", help=f"gradients of what: {wrt}")
    parser.add_argument(
        "--of", nargs="+", action="extend", metavar="NAME", help=f"what is differentiated: {of}"
    )


def _add_feeds(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--feeds", metavar="FILE.npz", help=text)


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="what computes gradient nodes: kernels compiled by Numba, Python kernels, standard ONNX "
        "operators, or per node whichever is fastest (default: auto)",
    )


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a progress bar on stderr (default: if that is a terminal)",
    )


def _add_statistics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--statistics",
        choices=["trained", "all", "none"],
        default="trained",
        help="batch normalizations whose running statistics are updated: those with a trained parameter, "
        "all, or none (default: trained)",
    )


def _add_trained(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wrt", nargs="+", action="extend", metavar="NAME", help=TRAINED)
    parser.add_argument("--exclude", nargs="+", action="extend", metavar="NAME", help="what is not trained")


# By name: what adds the arguments of a command, its help and its description.
_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str, str]] = {
    "grad": (
        _add_grad,
        "build the backward graph of a model",
        "Write a model with its outputs and, for every NAME of --wrt, its gradient NAME_grad.",
    ),
    "prepare": (
        _add_prepare,
        "make a model with gradient nodes ready for onnxruntime",
        "Turn a model with gradient nodes into one that a plain onnxruntime session runs.",
    ),
    "check": (
        _add_check,
        "compare the gradients of a model with finite differences",
        "Compare gradients with float64 finite differences; the exit code is 1 if they disagree.",
    ),
    "explain": (
        _add_explain,
        "show what the nodes of a model become",
        "Count the nodes of a model by operator, with the operators that compute gradients, "
        "and name those that are special: that cannot be differentiated, stop the gradient, round, or are "
        "differentiated through a definition. The exit code is 3 if one cannot be differentiated.",
    ),
    "ops": (
        _add_ops,
        "list gradient operators and rules",
        "List the gradient operators, and the operators that can be differentiated.",
    ),
    "compile": (
        _add_compile,
        "compile kernels ahead of their first use",
        "Compile the kernels that a model with gradient nodes needs, or all of them, and keep "
        "them for later sessions. Sessions do this themselves; the command is for the build of a container.",
    ),
    "train": (
        _add_train,
        "train a model on arrays",
        "Train a forward model on the arrays of an npz file, and write the trained forward model.",
    ),
    "artifacts": (
        _add_artifacts,
        "write the files for onnxruntime.training and ortgrad.training.api",
        "Write training_model.onnx, eval_model.onnx, optimizer_model.onnx and checkpoint.",
    ),
    "demo": (
        _add_progress,
        "train a small CNN on handwritten digits",
        "Build the backward graph of a small CNN, check it, and train it on handwritten digits.",
    ),
}
