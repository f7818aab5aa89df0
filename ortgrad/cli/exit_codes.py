"""The exit codes of the command line."""

import sys

WRONG, FAILED, UNSUPPORTED, BUG, INTERRUPTED = 1, 2, 3, 4, 130
EXIT_CODES = """exit codes:
  0    success
  1    gradients are wrong: `check` or `demo` found that they disagree with differences; not used otherwise
  2    the command failed: wrong usage, a file that is not a valid model, a file that cannot be read or
       written, a model that does not run (the reason is on stderr)
  3    nodes of the model cannot be differentiated (`explain` lists them, other commands do so on stderr)
  4    a bug in ortgrad, with a traceback: please report it
  130  interrupted
"""


def fail(message: str, code: int = FAILED) -> int:
    """Write a message to stderr; returns the exit code."""
    print(f"ortgrad: {message}", file=sys.stderr)
    return code
