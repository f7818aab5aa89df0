"""The summary of a model that `ortgrad explain` prints: one line per operator, then what is special."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from ortgrad.pipelines.explain import Explanation

NAMES = 3  # shown of each group of nodes
QUOTED = r"'[^']*'"
FEWEST_ROWS = 8  # of the table, on however small a terminal


def summary(found: Sequence[Explanation], columns: int, lines: int) -> list[str]:
    """Return the lines of the summary, which fit into a terminal of the given size."""
    rows = _table(found)
    special = _special(found, columns)
    without = [
        line
        for reason in dict.fromkeys(item.reason for item in found if not item.gradient and item.supported)
        for line in _counted(reason, [i for i in found if i.reason == reason and i.supported], columns)
    ]
    # Two lines are left for the prompt, and one for what is cut.
    room = max(FEWEST_ROWS, lines - len(special) - len(without) - 4)
    shown = rows if len(rows) <= room + 1 else rows[:room]
    names, counts = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    table = [
        _cut(f"{operator:<{names}}  {count:>{counts}}  {becomes}", columns)
        for operator, count, becomes in shown
    ]
    if len(shown) < len(rows):
        table.append(f"... and {len(rows) - len(shown)} more operators (--all)")
    return [f"{_count(len(found), 'node')}", *table, *without, *special]


def _table(found: Iterable[Explanation]) -> list[tuple[str, str, str]]:
    """Return the operators that have a gradient, their number, and the operators that compute it."""
    numbers: Counter[str] = Counter()
    made: dict[str, Counter[str]] = {}
    for item in found:
        if item.gradient:
            numbers[item.operator] += 1
            # Counted once per node: the operators of most nodes come first.
            made.setdefault(item.operator, Counter()).update(dict.fromkeys(item.gradient, 1))
    return [
        (operator, str(number), " ".join(name for name, _ in made[operator].most_common()))
        for operator, number in numbers.most_common()
    ]


def _counted(title: str, items: Iterable[Explanation], columns: int) -> list[str]:
    counts = Counter(item.operator for item in items)
    text = f"({title}): " + ", ".join(f"{operator} {n}" for operator, n in counts.most_common())
    lines = textwrap.wrap(text, columns, subsequent_indent="  ", break_long_words=False)
    if len(lines) > 2:
        lines = [lines[0], _cut(lines[1] + " " * columns, columns)]
    return lines


def _special(found: Iterable[Explanation], columns: int) -> list[str]:
    """Return lines on nodes that are refused, stop the gradient, round, or were replaced, in groups."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for item in found:
        for number, (text, holds) in enumerate(
            (
                (f"NOT SUPPORTED: {item.reason}", not item.supported),
                ("the gradient stops here", item.stops),
                ("straight-through: differentiated as if it did not round", item.straight_through),
                ("differentiated through its definition", item.defined),
            )
        ):
            if holds:
                # Reasons that differ only in the values they name are one.
                general = f"{number} {re.sub(QUOTED, '...', text)}"
                groups.setdefault((general, item.operator), []).append((item.node, text))
    lines = []
    # Refusals first, and the largest group of each kind.
    for (general, operator), items in sorted(groups.items(), key=lambda g: (g[0][0][0], -len(g[1]))):
        texts = {text for _, text in items}
        text = texts.pop() if len(texts) == 1 else general[2:]
        line = f"{operator}, {_count(len(items), 'node')}: {text}"
        lines += textwrap.wrap(line, columns, subsequent_indent="  ", break_long_words=False)
        more = len(items) - NAMES
        tail = f" ... and {more} more (--all)" if more > 0 else ""
        names = ", ".join(node for node, _ in items[:NAMES])
        lines.append(_cut(f"    {names}", columns - len(tail)) + tail)
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else line[: max(columns - 4, 1)].rstrip(" ,") + " ..."
