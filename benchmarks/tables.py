"""Tables, as text or Markdown, and a chart of ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    """The first column to the left, the others to the right."""
    if markdown:
        marks = ["---", *("---:" for _ in header[1:])]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, marks, *rows))
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            [cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]
        ).rstrip()
        for cells in (header, *rows)
    )


def save_chart(
    path: Path, labels: Sequence[str], ratios: Mapping[str, Sequence[float | None]], title: str
) -> None:
    """Bars of ratios, a colour for each peer, on a logarithmic axis. Needs matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(2 + 1.1 * len(labels), 4), layout="constrained")
    width = 0.8 / len(ratios)
    for i, (name, values) in enumerate(ratios.items()):
        places = [x + (i - (len(ratios) - 1) / 2) * width for x, v in enumerate(values) if v is not None]
        axes.bar(places, [v for v in values if v is not None], width, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel("time, ours / theirs")
    axes.set_title(title)
    figure.legend(loc="outside upper right", ncols=len(ratios))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
