"""The exit codes of the command line."""

import sys

WRONG, FAILED, UNSUPPORTED, BUG, INTERRUPTED = 1, 2, 3, 4, 130
EXIT_CODES = """exit codes:
  0    success
  1    gradients are wrong: `check` or `demo` found that they disagree with differences; nothing else gives 1
  2    it could not be done: wrong usage, a file that is no valid model, a file that cannot be read or
       written, a model that does not run (stderr says what)
  3    nodes of the model cannot be differentiated (`explain` lists them, the others do on stderr)
  4    an error of ortgrad's own, with a traceback: please report it
  130  interrupted
"""


def fail(message: str, code: int = FAILED) -> int:
    """Write a message to stderr; returns the exit code."""
    print(f"ortgrad: {message}", file=sys.stderr)
    return code
