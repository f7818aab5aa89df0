"""`ortgrad grad`: build the backward graph of a model."""

from __future__ import annotations

import argparse

from ortgrad.cli.files import given_feeds, output_path, save_and_describe
from ortgrad.pipelines.build import build_gradient_model


def command(arguments: argparse.Namespace) -> int:
    """Write the gradient model."""
    path = output_path(arguments.output, arguments.model, arguments.feeds)
    built = build_gradient_model(
        arguments.model,
        wrt=arguments.wrt,
        of=arguments.of,
        straight_through=arguments.straight_through,
        feeds=given_feeds(arguments.feeds),
    )
    save_and_describe(built, path)
    return 0
