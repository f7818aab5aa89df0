"""Write what is derived from the operators' declarations: docs/operators.md and ortgrad/nodes.pyi.

python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path

from ortgrad.autodiff.definitions import all_definitions, all_reasons
from ortgrad.autodiff.rules import all_rules
from ortgrad.dialects.training import training_operators
from ortgrad.operators.declaration import Attribute, Operator, all_operators

ROOT = Path(__file__).resolve().parents[1]

STUB_HEAD = '''\
"""Node builders, one per gradient operator. Written by docs/generate.py from the declarations."""

from collections.abc import Mapping, Sequence

import onnx
from numpy.typing import DTypeLike

from ortgrad.pipelines.prepare import Kernels

def make_model(
    nodes: onnx.NodeProto | Sequence[onnx.NodeProto],
    *,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    dtype: DTypeLike = "float32",
    kernels: Kernels = "python",
) -> onnx.ModelProto: ...
'''


def stub() -> str:
    """The text of ortgrad/nodes.pyi."""
    return STUB_HEAD + "".join(_signature(o) for o in sorted(all_operators(), key=lambda o: o.builder_name))


def _signature(operator: Operator) -> str:
    lines = []
    default = ""
    for parameter in operator.inputs:
        # Python wants defaults from the first optional input on, required ones behind it included.
        default = default or (" | None = None" if parameter.optional else "")
        lines.append(f"{parameter.name}: str{default}")
    names = "str | Sequence[str | None]" if operator.has_optional_outputs else "str | Sequence[str]"
    lines.append(f"outputs: {names} = ...")
    lines.append("*")
    lines += [f"{name}: {_python_type(a)} = ..." for name, a in operator.attributes.items()]
    lines += ['name: str = ""', 'dtype: DTypeLike = "float32"']
    arguments = "".join(f"    {line},\n" for line in lines)
    return f"def {operator.builder_name}(\n{arguments}) -> onnx.NodeProto: ...\n"


def _python_type(attribute: Attribute) -> str:
    name = attribute.type.__name__
    return f"Sequence[{name}]" if attribute.is_list else name


def operator_table() -> str:
    """The text of docs/operators.md."""
    lines = [
        "# Operators",
        "",
        "Written by `docs/generate.py` from the declarations in `ortgrad/ops`.",
        "",
        "## Gradient operators",
        "",
        'A question mark means optional. `auto` is what `kernels="auto"` runs, by measurement.',
        "",
        "| operator | builder | inputs | outputs | attributes | auto | formula |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for o in sorted(all_operators(), key=lambda o: o.name):
        cells = [
            f"`{o.name}`" + (f" ({o.domain})" if o.domain != "com.microsoft" else ""),
            f"`{o.builder_name}`",
            ", ".join(s.name + "?" * s.optional for s in o.inputs),
            ", ".join(s.name + "?" * s.optional for s in o.outputs),
            ", ".join(o.attributes),
            o.auto,
            o.doc.split("\n")[0].replace("|", "\\|"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## What else training models hold",
        "",
        "onnxruntime-training has these too. `prepare` writes them in standard ONNX.",
        "",
        ", ".join(f"`{name}`" for name in training_operators()),
    ]
    rules = all_rules()
    for title, keep in (
        ("Forward operators with a gradient rule", True),
        ("Where the gradient stops", False),
    ):
        names = sorted(
            _qualified(domain, name)
            for (domain, name), rule in rules.items()
            if (rule.function is not None) is keep
        )
        lines += ["", f"## {title}", "", " ".join(f"`{name}`" for name in names)]
    defined = sorted(_qualified(*key) for key in all_definitions() if key not in rules)
    lines += [
        "",
        "## Forward operators that are differentiated through their definition",
        "",
        "Their definition in operators that have a rule replaces nodes between `wrt` and `of`.",
        "",
        " ".join(f"`{name}`" for name in defined),
        "",
        "## Operators of onnxruntime without a gradient",
        "",
        "| operator | reason |",
        "| --- | --- |",
    ]
    lines += [f"| `{_qualified(*key)}` | {why} |" for key, why in sorted(all_reasons().items())]
    return "\n".join(lines) + "\n"


def _qualified(domain: str, name: str) -> str:
    return f"{domain}::{name}" if domain else name


def main() -> None:
    (ROOT / "ortgrad" / "nodes.pyi").write_text(stub())
    (ROOT / "docs" / "operators.md").write_text(operator_table())


if __name__ == "__main__":
    main()
