"""Fields of records in kernels become elements of arrays (see ortgrad.operators.records)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from ortgrad.compiled import variables
from ortgrad.errors import RegistrationError
from ortgrad.operators.records import fields_of, is_bundle, is_named_tuple, is_record, types_of


def lower_fields(tree: ast.FunctionDef, function: Callable[..., Any]) -> ast.FunctionDef:
    """Replace the fields of records in a function by elements and slices of arrays.

    Raises RegistrationError, with the file and the line, if a record or a bundle has no such field.
    """
    given = tree.args
    annotated = {a.arg: a.annotation for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotated[node.target.id] = node.annotation
    found = {name: function.__globals__.get(getattr(each, "id", "")) for name, each in annotated.items()}
    kinds = {name: kind for name, kind in found.items() if is_named_tuple(kind)}
    return _Lowering(kinds, function.__code__.co_filename).visit(tree) if kinds else tree


class _Lowering(ast.NodeTransformer):
    def __init__(self, kinds: dict[str, type], file: str) -> None:
        self._kinds, self._file = kinds, file

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        if getattr(node.target, "id", "") not in self._kinds or node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name, *fields = variables.dotted_name(node).split(".")
        kind: Any = self._kinds.get(name)
        if kind is None:
            self.generic_visit(node)
            return node
        value: ast.expr = ast.Name(name, ast.Load())
        while fields and is_bundle(kind):
            field = fields.pop(0)
            value, kind = ast.Attribute(value, field, ast.Load()), self._field(kind, field, node, types_of)
        if not (fields and is_record(kind)):
            return node  # Numba knows the fields of bundles, and what tensors have
        start, size = 0, 1
        for field in fields:
            found = self._field(kind, field, node, fields_of)
            start, size, kind = start + found.start, found.size, found.record
        if kind is None:
            return ast.copy_location(ast.Subscript(value, ast.Constant(start), node.ctx), node)
        part = ast.Call(
            ast.Name("subrecord", ast.Load()), [value, ast.Constant(start), ast.Constant(size)], []
        )
        return ast.copy_location(part, node)

    def _field(self, kind: Any, field: str, node: ast.expr, fields: Callable[[type], dict[str, Any]]) -> Any:
        found = fields(kind).get(field) if kind is not None else None
        if found is None:
            name = "a number" if kind is None else kind.__name__
            raise RegistrationError(f"{self._file}:{node.lineno}: {name} has no field {field!r}")
        return found
