"""The order of the package's parts: a part imports only from those before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support import ROOT

PACKAGE = ROOT / "ortgrad"
LAYERS = [
    "errors",
    "keywords",
    "threads",
    "progress",
    "operators",
    "compiled",
    "graph",
    "autodiff",
    "shapes",
    "ops",
    "passes",
    "dialects",
    "lowering",
    "pipelines",
    "runtime",
    "nodes",
    "check",
    "training",
    "compat",
    "cli",
    "__main__",
    "public",
]
# Modules that only give others the names that they have in onnxruntime; nothing in the package imports them.
PUBLIC = ("ortgrad.training.api", "ortgrad.training.artifacts", "ortgrad.training.onnxblock")
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def is_public(module: str) -> bool:
    return f"{module}.".startswith(tuple(f"{each}." for each in PUBLIC))


def layer(module: str) -> int:
    return LAYERS.index("public") if is_public(module) else LAYERS.index(module.split(".")[1])


def imported(tree: ast.AST) -> set[str]:
    """The modules of the package that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in found if name.startswith("ortgrad.") and name != "ortgrad.__version__"}


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(PACKAGE)) for path in MODULES])
def test_imports_go_down(path: Path) -> None:
    own = module_of(path)
    upward = {name for name in imported(ast.parse(path.read_text())) if layer(name) > layer(own)}
    assert not upward


def test_every_part_has_its_place() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert folders | {path.stem for path in PACKAGE.glob("*.py")} == {*LAYERS, "__init__"} - {"public"}


def test_public_modules_only_give_names_to_others() -> None:
    public = [path for path in MODULES if is_public(module_of(path))]
    assert public
    for path in public:
        docstring, *statements = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr)
        for statement in statements:
            assert isinstance(statement, ast.ImportFrom)
            assert (statement.module or "").startswith("ortgrad.compat.")
