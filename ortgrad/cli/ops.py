"""`ortgrad ops`: list gradient operators and rules."""

from __future__ import annotations

import argparse

from ortgrad.autodiff.definitions import all_definitions, retired_operators
from ortgrad.autodiff.rules import all_rules
from ortgrad.cli.exit_codes import fail
from ortgrad.operators.declaration import all_operators


def command(arguments: argparse.Namespace) -> int:
    """Print the operators and rules whose names contain the text."""
    text = arguments.filter.lower()
    operators = [o for o in all_operators() if text in o.name.lower()]
    rules = {_qualified(*key): rule for key, rule in all_rules().items()}
    defined = sorted({_qualified(*key) for key in all_definitions()} - set(rules))
    defined = [name for name in defined if text in name.lower()]
    differentiable = sorted(name for name, rule in rules.items() if text in name.lower() and rule.function)
    retired = [name for name in retired_operators() if text in name.lower()]
    constant = sorted(name for name, rule in rules.items() if text in name.lower() and not rule.function)
    if not (operators or differentiable or defined or retired or constant):
        return fail(f"there is no gradient operator or rule with {arguments.filter!r} in its name")
    if operators:
        print("Gradient operators:")
        for operator in sorted(operators, key=lambda o: o.name):
            inputs, outputs = (
                ", ".join(parameter.name + "?" * parameter.optional for parameter in parameters)
                for parameters in (operator.inputs, operator.outputs)
            )
            formula = operator.doc.partition("\n")[0]
            print(f"  {operator.name}({inputs}) -> {outputs}\n      {formula}")
    for title, names in (
        ("Operators with a gradient rule:", differentiable),
        ("Operators that are differentiated through a definition:", defined),
        ("Old operators that are replaced by a definition (opset 9 and older):", retired),
        ("Operators through which no gradient flows:", constant),
    ):
        if names:
            print(title)
            for name in names:
                print(f"  {name}")
    return 0


def _qualified(domain: str, name: str) -> str:
    return f"{domain}::{name}" if domain else name
