"""The entry point of the command line, which turns exceptions into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from ortgrad.cli.arguments import make_parser
from ortgrad.cli.exit_codes import BUG, INTERRUPTED, UNSUPPORTED, WRONG, fail
from ortgrad.cli.wording import for_command_line
from ortgrad.errors import OrtgradError, StoppedGradientWarning, UnsupportedGradientError, WrongGradientError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: `sys.argv[1:]`); returns the exit code."""
    arguments = make_parser().parse_args(argv)
    try:
        module = importlib.import_module(f"ortgrad.cli.{arguments.command}")
        with warnings.catch_warnings():
            warnings.simplefilter("always", StoppedGradientWarning)
            warnings.showwarning = _show_warning
            code: int = module.command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe; Python would report an error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UnsupportedGradientError as error:
        return fail(for_command_line(str(error)), UNSUPPORTED)
    except WrongGradientError as error:
        return fail(for_command_line(str(error)), WRONG)
    except (OrtgradError, OSError) as error:
        return fail(for_command_line(str(error)))
    except MemoryError as error:
        return fail(f"there is not enough memory: {error}")
    except Exception:
        # Python would exit with 1, the exit code for wrong gradients.
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
    """Replace `warnings.showwarning`: a StoppedGradientWarning is shown without file and line."""
    text = f"ortgrad: warning: {for_command_line(str(message))}\n"
    if not issubclass(category, StoppedGradientWarning):
        text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(text)
