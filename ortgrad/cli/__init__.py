"""The command line; each command has a module, which is imported when the command runs."""

from ortgrad.cli.entry_point import main

__all__ = ["main"]
