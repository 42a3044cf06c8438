"""A table of workers: a row for each item, a column for each worker, outliers starred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


def find_odd(values: Sequence[Hashable]) -> list[bool]:
    """Mark the values that differ from most others; all of them if no two are equal."""
    usual, votes = Counter(values).most_common(1)[0]
    return [value != usual or (votes == 1 and len(values) > 1) for value in values]


def draw_table(
    workers: Sequence[str], rows: Mapping[str, Sequence[str]], odd: Mapping[str, Sequence[bool]]
) -> str:
    """Format the table with aligned columns.

    Args:
      rows: name -> a cell for each worker.
      odd: name -> whether a star follows the cell.
    """
    lines = [["", *(f"w{worker}" for worker in workers)]]
    for name, cells in rows.items():
        stars = [" *" if is_odd else "" for is_odd in odd[name]]
        lines.append([name, *map("".join, zip(cells, stars))])  # noqa: B905  older Pythons
    widths = [max(map(len, column)) for column in zip(*lines)]  # noqa: B905
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip()  # noqa: B905
        for line in lines
    )
