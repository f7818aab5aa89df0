"""The command line: a module for each command, imported when it is run."""

from ortgrad.cli.entry_point import main

__all__ = ["main"]
