"""The table for people (Markdown), for programs (JSON) and as a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proofs.kd_table.entries import SETS
from proofs.kd_table.results import (
    BASE,
    JointRow,
    Stability,
    TableRow,
    compare_seeds,
    compare_sets,
    join_sets,
)
from proofs.study.frame import format_markdown
from store.compare.statistics import Delta

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVEL = 0.05


@dataclass(frozen=True)
class SetTable:
    """Results of one set.

    Args:
      teachers: test top-1 of each.
      rows: the best first.
    """

    teachers: tuple[float, ...]
    alone: TableRow
    rows: tuple[TableRow, ...]


@dataclass(frozen=True)
class Account:
    """Settings of the tables.

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
    """Format the settings, a table for each set, and the stability of the order as Markdown."""
    multiples = " ".join(f"{multiple:g}" for multiple in account.multiples)
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


def describe_report(tables: Tables, account: Account) -> str:
    """Format the same as JSON."""
    report = {
        "account": asdict(account),
        "sets": {
            name: {"what": SETS[name].what, **asdict(table)} for name, table in tables.items()
        },
        "seeds_tau": {name: _as_dict(compare_seeds(table.rows)) for name, table in tables.items()},
        "joint": [asdict(row) for row in _join_tables(tables)],
        "sets_tau": _as_dict(_compare_sets(tables)),
    }
    return json.dumps(report, indent=1) + "\n"


def draw_report(tables: Tables, path: Path) -> Path:
    """Draw the gains with their intervals of each set, and of two sets against each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = len(tables) + (len(tables) == 2)
    height = 2.0 + 0.22 * max(len(table.rows) for table in tables.values())
    figure, axes = pyplot.subplots(
        1, panels, figsize=(5.0 * panels, height), constrained_layout=True, squeeze=False
    )
    for panel, (name, table) in zip(axes[0], tables.items(), strict=False):
        _draw_gains(panel, name, table)
    if len(tables) == 2:
        _draw_pair(axes[0][-1], tables)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def describe_machine() -> str:
    """Describe cores and processor of this machine."""
    cores = len(os.sched_getaffinity(0))
    return f"Native CPU runtime, 1 thread a run, {cores} cores ({platform.machine()})"


def _format_table(table: SetTable) -> list[str]:
    teachers = ", ".join(f"{item:.1f}" for item in table.teachers)
    lines = [
        f"Teachers: {teachers} (all methods have the first, `multi_*` both).",
        "",
        format_markdown(
            ["method", "weight", "top-1", "gain []", "p, alone", f"p, `{BASE}`", "runs"],
            [_list_cells(row) for row in (table.alone, *table.rows)],
        ),
    ]
    failures = [f"- `{row.name}`: {item}" for row in table.rows for item in row.failures]
    return lines + (["", "Failed:", *failures] if failures else [])


def _list_cells(row: TableRow) -> list[str]:
    weight = "" if row.choice is None else f"{row.choice.weight:g}{'!' * row.choice.is_edge}"
    score = "failed"
    if row.interval is not None:
        score = f"{row.interval.mean:.2f}"
        if row.interval.low is not None:
            score += f" ± {row.interval.mean - row.interval.low:.2f}"
    return [f"`{row.name}`", weight, score, *_format_deltas(row), str(len(row.scores))]


def _format_deltas(row: TableRow | JointRow) -> list[str]:
    return [_format_gain(row.gain), _format_p(row.p_alone), _format_p(row.p_base)]


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
    """Format the sets together; empty with one set, or without a method on all of them."""
    rows = _join_tables(tables)
    if not rows:
        return []
    return [
        "",
        f"**{' and '.join(tables)}** together: the mean of the gains on each, paired by seeds "
        "within a set; p is Holm's over the methods of this list.",
        "",
        format_markdown(
            ["method", "gain []", "p, alone", f"p, `{BASE}`"],
            [[f"`{row.name}`", *_format_deltas(row)] for row in rows],
        ),
    ]


def _format_stability(tables: Tables) -> list[str]:
    lines = []
    for name, table in tables.items():
        if (tau := compare_seeds(table.rows)) is not None:
            lines.append(
                f"Order of {tau.methods} methods on {name}, between seeds: Kendall's "
                f"tau {tau.mean:.2f} ({tau.low:.2f} to {tau.high:.2f} over "
                f"{tau.pairs} pairs)."
            )
    if (tau := _compare_sets(tables)) is not None:
        lines.append(f"Between sets, by their means: tau {tau.mean:.2f} ({tau.methods} methods).")
    return lines


def _format_missing(missing: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(missing.items()):
        reasons.setdefault(why, []).append(f"`{name}`")
    return ["No row:", "", *(f"- {why}: {', '.join(names)}" for why, names in reasons.items())]


def _join_tables(tables: Tables) -> list[JointRow]:
    return join_sets(
        [table.alone for table in tables.values()], [table.rows for table in tables.values()]
    )


def _compare_sets(tables: Tables) -> Stability | None:
    return compare_sets({name: table.rows for name, table in tables.items()})


def _draw_gains(axes: Axes, name: str, table: SetTable) -> None:
    rows = [(row, row.gain) for row in table.rows if row.gain is not None][::-1]
    for place, (row, gain) in enumerate(rows):
        colour = _choose_colour(row)
        if gain.low is not None and gain.high is not None:
            axes.plot([gain.low, gain.high], [place, place], color=colour, linewidth=1.5)
        axes.plot(gain.value, place, "o", color=colour, markersize=5)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.name for row, _ in rows], fontsize=8)
    axes.set(title=f"{name}: gain over the student alone", xlabel="test top-1, points")
    axes.grid(axis="x", alpha=0.3)


def _choose_colour(row: TableRow | JointRow) -> str:
    """Return the colour of a row: grey where chance is not ruled out."""
    if row.gain is None or row.p_alone is None or row.p_alone > _LEVEL:
        return "0.55"
    return "tab:green" if row.gain.value > 0 else "tab:red"


def _draw_pair(axes: Axes, tables: Tables) -> None:
    (first, left), (second, right) = tables.items()
    gains = [{row.name: row.gain for row in part.rows if row.gain} for part in (left, right)]
    for row in _join_tables(tables):
        place = gains[0][row.name].value, gains[1][row.name].value
        axes.plot(*place, "o", color=_choose_colour(row), markersize=4)
        axes.annotate(row.name, place, fontsize=7, xytext=(3, 3), textcoords="offset points")
    stability = _compare_sets(tables)
    tau = "" if stability is None else f", Kendall's tau {stability.mean:.2f}"
    axes.axhline(0.0, color="black", linewidth=0.5)
    axes.axvline(0.0, color="black", linewidth=0.5)
    axes.set(title=f"both sets{tau}", xlabel=f"gain on {first}", ylabel=f"gain on {second}")
    axes.grid(alpha=0.3)


def _format_widening(account: Account) -> str:
    if not account.widen:
        return ""
    return (
        f", and of up to {account.widen} more, one at a time beyond a best one that is the "
        "least or the largest"
    )


def _format_epochs(tables: Tables, account: Account) -> str:
    """Format the epochs: one number for all, or one for each set."""
    if len(set(account.epochs)) == 1:
        return f"{account.epochs[0]} epochs"
    own = zip(account.epochs, tables, strict=True)
    return " and ".join(f"{epochs} epochs of {name}" for epochs, name in own)


def _join(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _as_dict(stability: Stability | None) -> dict[str, float] | None:
    return None if stability is None else asdict(stability)
