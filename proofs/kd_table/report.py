"""The table for people (Markdown), for programs (JSON) and as a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proofs.kd_table.results import (
    BASE,
    JointRow,
    Stability,
    TableRow,
    compare_seeds,
    compare_sets,
    join_sets,
)
from proofs.kd_table.sets import SETS
from store.compare.statistics import Delta

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVEL = 0.05


@dataclass(frozen=True)
class SetTable:
    """All that is told of one set.

    Args:
      teachers: test top-1 of each.
      rows: the best first.
    """

    teachers: tuple[float, ...]
    alone: TableRow
    rows: tuple[TableRow, ...]


@dataclass(frozen=True)
class Account:
    """How the tables came about.

    Args:
      epochs: of each set's students.
      missing: methods without a row -> why.
    """

    command: str
    epochs: tuple[int, ...]
    seeds: tuple[int, ...]
    search_seeds: tuple[int, ...]
    multiples: tuple[float, ...]
    missing: Mapping[str, str]
    widen: int = 0


Tables = Mapping[str, SetTable]


def format_report(tables: Tables, account: Account) -> str:
    """Markdown: how it was made, a table for each set, and how far to trust the order."""
    multiples = " ".join(f"{one:g}" for one in account.multiples)
    lines = [
        f"`{account.command}`",
        "",
        f"Test top-1 in percent after {_format_epochs(tables, account)}, seeds "
        f"{_join(account.seeds)}; ± and [] are 95 % intervals (Student), gains are paired by "
        f"seeds, p is Holm's over the methods of the set. Weights: the best of {multiples} times "
        f"the method's own on the validation split, seeds {_join(account.search_seeds)}"
        f"{_format_widening(account)}; ! marks the least or the largest that was tried. "
        f"{describe_machine()}.",
    ]
    for name, table in tables.items():
        lines += ["", f"**{name}**: {SETS[name].what}.", "", *_format_table(table)]
    lines += [*_format_joint(tables), "", *_format_stability(tables)]
    if account.missing:
        lines += ["", *_format_missing(account.missing)]
    return "\n".join(lines)


def tell_report(tables: Tables, account: Account) -> str:
    """The same as JSON."""
    told = {
        "account": asdict(account),
        "sets": {name: {"what": SETS[name].what, **asdict(one)} for name, one in tables.items()},
        "seeds_tau": {name: _as_dict(compare_seeds(one.rows)) for name, one in tables.items()},
        "joint": [asdict(row) for row in _join_tables(tables)],
        "sets_tau": _as_dict(_compare_sets(tables)),
    }
    return json.dumps(told, indent=1) + "\n"


def draw_report(tables: Tables, path: Path) -> Path:
    """Gains with their intervals for each set, and of two sets one against the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = len(tables) + (len(tables) == 2)
    height = 2.0 + 0.22 * max(len(table.rows) for table in tables.values())
    figure, axes = pyplot.subplots(
        1, panels, figsize=(5.0 * panels, height), constrained_layout=True, squeeze=False
    )
    for one, (name, table) in zip(axes[0], tables.items(), strict=False):
        _draw_gains(one, name, table)
    if len(tables) == 2:
        _draw_pair(axes[0][-1], tables)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def describe_machine() -> str:
    """Cores and processor of this machine."""
    cores = len(os.sched_getaffinity(0))
    return f"Native CPU runtime, 1 thread a run, {cores} cores ({platform.machine()})"


def _format_table(table: SetTable) -> list[str]:
    teachers = ", ".join(f"{one:.1f}" for one in table.teachers)
    lines = [
        f"Teachers: {teachers} (all methods have the first, `multi_*` both).",
        "",
        f"| method | weight | top-1 | gain [] | p, alone | p, `{BASE}` | runs |",
        "|---|---:|---:|---:|---:|---:|---:|",
        _format_row(table.alone),
    ]
    lines += [_format_row(row) for row in table.rows]
    failures = [f"- `{row.name}`: {one}" for row in table.rows for one in row.failures]
    return lines + (["", "Failed:", *failures] if failures else [])


def _format_row(row: TableRow) -> str:
    weight = "" if row.choice is None else f"{row.choice.weight:g}{'!' * row.choice.is_edge}"
    score = "failed"
    if row.interval is not None:
        score = f"{row.interval.mean:.2f}"
        if row.interval.low is not None:
            score += f" ± {row.interval.mean - row.interval.low:.2f}"
    cells = [f"`{row.name}`", weight, score, _format_gain(row.gain), _format_p(row.p_alone),
             _format_p(row.p_base), str(len(row.scores))]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _format_gain(gain: Delta | None) -> str:
    if gain is None:
        return ""
    span = "" if gain.low is None else f" [{gain.low:+.2f}, {gain.high:+.2f}]"
    return f"{gain.value:+.2f}{span}"


def _format_p(p: float | None) -> str:
    if p is None:
        return ""
    text = f"{p:.3f}" if p >= 0.001 else "< 0.001"
    return f"**{text}**" if p <= _LEVEL else text


def _format_joint(tables: Tables) -> list[str]:
    """What the sets say together; empty: of one set, or of no method on all of them."""
    rows = _join_tables(tables)
    if not rows:
        return []
    return [
        "",
        f"**{' and '.join(tables)}** together: the mean of the gains on each, paired by seeds "
        "within a set; p is Holm's over the methods of this list.",
        "",
        f"| method | gain [] | p, alone | p, `{BASE}` |",
        "|---|---:|---:|---:|",
        *(f"| `{row.name}` | {_format_gain(row.gain)} | {_format_p(row.p_alone)} | "
          f"{_format_p(row.p_base)} |" for row in rows),
    ]  # fmt: skip


def _format_stability(tables: Tables) -> list[str]:
    lines = []
    for name, table in tables.items():
        found = compare_seeds(table.rows)
        if found is not None:
            lines.append(f"Order of {found.methods} methods on {name}, between seeds: Kendall's "
                         f"tau {found.mean:.2f} ({found.low:.2f} to {found.high:.2f} over "
                         f"{found.pairs} pairs).")  # fmt: skip
    found = _compare_sets(tables)
    if found is not None:
        lines.append(f"Between sets, by their means: tau {found.mean:.2f} ({found.methods} "
                     "methods).")  # fmt: skip
    return lines


def _format_missing(missing: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(missing.items()):
        reasons.setdefault(why, []).append(f"`{name}`")
    return ["No row:", "", *(f"- {why}: {', '.join(names)}" for why, names in reasons.items())]


def _join_tables(tables: Tables) -> list[JointRow]:
    return join_sets([one.alone for one in tables.values()], [one.rows for one in tables.values()])


def _compare_sets(tables: Tables) -> Stability | None:
    return compare_sets({name: table.rows for name, table in tables.items()})


def _draw_gains(axes: Axes, name: str, table: SetTable) -> None:
    rows = [row for row in table.rows if row.gain is not None][::-1]
    for place, row in enumerate(rows):
        gain, colour = row.gain, _choose_colour(row)
        if gain.low is not None:
            axes.plot([gain.low, gain.high], [place, place], color=colour, linewidth=1.5)
        axes.plot(gain.value, place, "o", color=colour, markersize=5)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.set(title=f"{name}: gain over the student alone", xlabel="test top-1, points")
    axes.grid(axis="x", alpha=0.3)


def _choose_colour(row: TableRow | JointRow) -> str:
    """Grey where chance is not ruled out."""
    if row.p_alone is None or row.p_alone > _LEVEL:
        return "0.55"
    return "tab:green" if row.gain.value > 0 else "tab:red"


def _draw_pair(axes: Axes, tables: Tables) -> None:
    (first, left), (second, right) = tables.items()
    gains = [{row.name: row.gain for row in one.rows} for one in (left, right)]
    for row in _join_tables(tables):
        place = [one[row.name].value for one in gains]
        axes.plot(*place, "o", color=_choose_colour(row), markersize=4)
        axes.annotate(row.name, place, fontsize=7, xytext=(3, 3), textcoords="offset points")
    found = _compare_sets(tables)
    tau = "" if found is None else f", Kendall's tau {found.mean:.2f}"
    axes.axhline(0.0, color="black", linewidth=0.5)
    axes.axvline(0.0, color="black", linewidth=0.5)
    axes.set(title=f"both sets{tau}", xlabel=f"gain on {first}", ylabel=f"gain on {second}")
    axes.grid(alpha=0.3)


def _format_widening(account: Account) -> str:
    if not account.widen:
        return ""
    return (f", and of up to {account.widen} more, one at a time beyond a best one that is the "
            "least or the largest")  # fmt: skip


def _format_epochs(tables: Tables, account: Account) -> str:
    """The budget: one for all, or each set's own."""
    if len(set(account.epochs)) == 1:
        return f"{account.epochs[0]} epochs"
    own = zip(account.epochs, tables, strict=True)
    return " and ".join(f"{epochs} epochs of {name}" for epochs, name in own)


def _join(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _as_dict(found: Stability | None) -> dict[str, float] | None:
    return None if found is None else asdict(found)
