"""`ortgrad explain`: show what the nodes of a model become."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

from ortgrad.cli.exit_codes import UNSUPPORTED, fail
from ortgrad.cli.files import given_feeds
from ortgrad.cli.summary import summary
from ortgrad.errors import ModelError
from ortgrad.graph.loading import load_model
from ortgrad.pipelines.build import build_gradient_model
from ortgrad.pipelines.explain import Explanation, explain
from ortgrad.pipelines.prepare import computes_gradients
from ortgrad.runtime.placements import placements

NO_TERMINAL = (100, 50)  # columns and lines where nothing tells the size of the terminal


def command(arguments: argparse.Namespace) -> int:
    """Print a summary, or a line for each node."""
    if arguments.kernels is not None:
        return _kernels(arguments)
    found = explain(arguments.model, wrt=arguments.wrt, of=arguments.of, feeds=given_feeds(arguments.feeds))
    lines = _all_nodes(found) if arguments.all else summary(found, *shutil.get_terminal_size(NO_TERMINAL))
    for line in lines:
        print(line)
    missing = sum(not item.supported for item in found)
    if missing:
        return fail(f"{missing} node(s) cannot be differentiated", UNSUPPORTED)
    return 0


def _kernels(arguments: argparse.Namespace) -> int:
    """Print which kernels a session runs for the nodes of the model with gradients."""
    model = load_model(arguments.model)
    if not computes_gradients(model):
        feeds = given_feeds(arguments.feeds)
        model = build_gradient_model(model, wrt=arguments.wrt, of=arguments.of, feeds=feeds)
    elif arguments.wrt or arguments.of or arguments.feeds:
        raise ModelError(
            "the model has gradients already, and --kernels shows what runs them: "
            "leave out --wrt, --of and --feeds"
        )
    found = placements(model, kernels=arguments.kernels)
    rows = [(each.node, each.operator, each.way, each.kernel, each.reason) for each in found]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    for *cells, reason in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
        print(f"{line}  {reason}".rstrip())
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
