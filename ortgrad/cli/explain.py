"""`ortgrad explain`: show what the nodes of a model become."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

from ortgrad.cli.exit_codes import UNSUPPORTED, fail
from ortgrad.cli.files import given_feeds
from ortgrad.cli.summary import summary
from ortgrad.pipelines.explain import Explanation, explain

NO_TERMINAL = (100, 50)  # columns and lines where nothing tells the size of the terminal


def command(arguments: argparse.Namespace) -> int:
    """Print a summary, or a line for each node."""
    found = explain(arguments.model, wrt=arguments.wrt, of=arguments.of, feeds=given_feeds(arguments.feeds))
    lines = _all_nodes(found) if arguments.all else summary(found, *shutil.get_terminal_size(NO_TERMINAL))
    for line in lines:
        print(line)
    missing = sum(not item.supported for item in found)
    if missing:
        return fail(f"{missing} node(s) cannot be differentiated", UNSUPPORTED)
    return 0


def _all_nodes(found: Sequence[Explanation]) -> list[str]:
    names = max((len(item.node) for item in found), default=0)
    operators = max((len(item.operator) for item in found), default=0)
    lines = []
    for item in found:
        reason = item.reason if item.supported else f"NOT SUPPORTED: {item.reason}"
        becomes = " ".join(item.gradient) or f"({reason})"
        if item.straight_through:
            becomes += " (straight-through)"
        lines.append(f"{item.node:<{names}}  {item.operator:<{operators}}  {becomes}")
    return lines
