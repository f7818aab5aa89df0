"""Write what is derived from the operators' declarations: docs/operators.md and ortgrad/nodes.pyi.

python docs/generate.py
"""

from __future__ import annotations

from pathlib import Path

from ortgrad.autodiff.rules import all_rules
from ortgrad.dialects.training import training_operators
from ortgrad.operators.declaration import Attribute, Operator, all_operators

ROOT = Path(__file__).resolve().parents[1]

# Operators of ONNX with floating-point inputs and outputs that have no rule, no body and are no stop.
SEQUENCES = "a sequence of tensors has no gradient; write it with Concat, Split, Gather or Slice"
OPTIONALS = "an optional value has no gradient; remove it where the value is always there"
MAPS = "its input or output is a map, which has no gradient; take the tensor before it, or behind it"
NOT_DIFFERENTIATED = {
    "ConcatFromSequence": SEQUENCES,
    "Optional": OPTIONALS,
    "OptionalGetElement": OPTIONALS,
    "SequenceAt": SEQUENCES,
    "SequenceConstruct": SEQUENCES,
    "SequenceErase": SEQUENCES,
    "SequenceInsert": SEQUENCES,
    "SplitToSequence": SEQUENCES,
    "QLinearMatMul": "ONNX calls it not differentiable: a quantised product, whose output is a step function",
    "ai.onnx.ml::CastMap": MAPS,
    "ai.onnx.ml::DictVectorizer": MAPS,
    "ai.onnx.ml::ZipMap": MAPS,
}

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
            f"{domain}::{name}" if domain else name
            for (domain, name), rule in rules.items()
            if (rule.function is not None) is keep
        )
        lines += ["", f"## {title}", "", " ".join(f"`{name}`" for name in names)]
    lines += [
        "",
        "## Not differentiated",
        "",
        "All other operators of ONNX with floating-point inputs and outputs have a rule, or a function body.",
        "",
        "| operator | why |",
        "| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in NOT_DIFFERENTIATED.items()),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    (ROOT / "ortgrad" / "nodes.pyi").write_text(stub())
    (ROOT / "docs" / "operators.md").write_text(operator_table())


if __name__ == "__main__":
    main()
