"""`ortgrad check`: compare the gradients of a model with finite differences."""

from __future__ import annotations

import argparse

from ortgrad.check import check_gradients
from ortgrad.cli.exit_codes import WRONG, fail
from ortgrad.cli.files import given_feeds
from ortgrad.progress import Progress


def command(arguments: argparse.Namespace) -> int:
    """Check the gradients and print the table."""
    with Progress(arguments.progress) as progress:
        result = check_gradients(
            arguments.model,
            given_feeds(arguments.feeds),
            wrt=arguments.wrt,
            of=arguments.of,
            kernels=arguments.kernels,
            per_node=arguments.per_node,
            progress=progress,
            seconds=arguments.seconds,
        )
    print(result)
    if not result.judged:
        return fail("nothing could be judged; give other values with --feeds")
    return 0 if result.ok else WRONG
