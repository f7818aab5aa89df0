"""The examples in the docstrings of the public names."""

from __future__ import annotations

import doctest
import inspect

import pytest

import ortgrad

PUBLIC = {
    name: thing
    for name in ortgrad.__all__
    if not inspect.isclass(thing := getattr(ortgrad, name)) or not issubclass(thing, Exception)
}


@pytest.mark.parametrize("name", PUBLIC)
def test_example(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, module=False)
    assert test.examples, f"{name} has no example"
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert not report, "".join(report)
