"""Fields of records in kernels (see ortgrad.operators.records) become elements of arrays."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from ortgrad.compiled import variables
from ortgrad.errors import RegistrationError
from ortgrad.operators.records import fields_of, is_record


def lower_fields(tree: ast.FunctionDef, function: Callable[..., Any]) -> ast.FunctionDef:
    """Replace the fields in a function by elements and slices of arrays.

    Raises RegistrationError, with the file and the line, if a record has no such field.
    """
    given = tree.args
    annotated = {a.arg: a.annotation for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            annotated[node.target.id] = node.annotation
    found = {name: function.__globals__.get(getattr(each, "id", "")) for name, each in annotated.items()}
    records = {name: record for name, record in found.items() if is_record(record)}
    return _Lowering(records, function.__code__.co_filename).visit(tree) if records else tree


class _Lowering(ast.NodeTransformer):
    def __init__(self, records: dict[str, Any], file: str) -> None:
        self._records, self._file = records, file

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        if getattr(node.target, "id", "") not in self._records or node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name, *fields = variables.dotted_name(node).split(".")
        record = self._records.get(name)
        if record is None:
            self.generic_visit(node)
            return node
        start, size = 0, 1
        for field in fields:
            found = fields_of(record).get(field) if record is not None else None
            if found is None:
                kind = "a number" if record is None else record.__name__
                raise RegistrationError(f"{self._file}:{node.lineno}: {kind} has no field {field!r}")
            start, size, record = start + found.start, found.size, found.record
        array = ast.Name(name, ast.Load())
        if record is None:
            return ast.copy_location(ast.Subscript(array, ast.Constant(start), node.ctx), node)
        part = ast.Call(
            ast.Name("subrecord", ast.Load()), [array, ast.Constant(start), ast.Constant(size)], []
        )
        return ast.copy_location(part, node)
