"""`ortgrad explain`: show what each node of a model becomes."""

from __future__ import annotations

import argparse

from ortgrad.cli.exit_codes import UNSUPPORTED, fail
from ortgrad.cli.files import given_feeds
from ortgrad.pipelines.explain import explain


def command(arguments: argparse.Namespace) -> int:
    """Print a line for each node."""
    found = explain(arguments.model, wrt=arguments.wrt, of=arguments.of, feeds=given_feeds(arguments.feeds))
    names = max((len(item.node) for item in found), default=0)
    operators = max((len(item.operator) for item in found), default=0)
    for item in found:
        reason = item.reason if item.supported else f"NOT SUPPORTED: {item.reason}"
        becomes = " ".join(item.gradient) or f"({reason})"
        if item.straight_through:
            becomes += " (straight-through)"
        print(f"{item.node:<{names}}  {item.operator:<{operators}}  {becomes}")
    missing = sum(not item.supported for item in found)
    if missing:
        return fail(f"{missing} node(s) cannot be differentiated", UNSUPPORTED)
    return 0
