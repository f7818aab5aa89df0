"""The command line."""

from ortgrad.cli.commands import main

__all__ = ["main"]
