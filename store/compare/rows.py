"""Rows and lines of a comparison as text, for terminal, dashboard and file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from store.compare.correctness import SameExamples
from store.compare.differences import SourceDifference
from store.compare.divergence import Divergence
from store.compare.sides import Comparison, Side, choose_comparable
from store.compare.statistics import Summary
from store.formatting import format_sample, name_few
from utils.json_types import JsonObject

COMPARISON_COLUMNS = (
    "number",
    "unit",
    "base>",
    "new>",
    "difference>",
    "95 % interval>",
    "p (Holm)>",
    "verdict",
)
ANSWER_COLUMNS = (
    "on the same examples",
    "examples>",
    "only base right>",
    "only new right>",
    "both right>",
    "p (McNemar)>",
)
_MOST_NAMES = 8


@dataclass(frozen=True)
class ComparedSide:
    """The comparable numbers of one side against the base's."""

    name: str
    rows: tuple[tuple[str, ...], ...]  # cells of `COMPARISON_COLUMNS`
    notes: tuple[str, ...]  # how to read the rows
    missing: tuple[str, ...]  # runs without a finite number, a line for each number
    apart: str  # one line on the numbers that cannot be compared; empty if all can

    @property
    def is_shown(self) -> bool:
        """Whether there is a table; otherwise only the line `apart` is shown."""
        return bool(self.rows) or not self.apart


def describe_side(base: Side, side: Side, comparisons: Sequence[Comparison]) -> ComparedSide:
    """Format a side's numbers against the base's."""
    shared, apart = choose_comparable(base, side, [row.metric for row in comparisons])
    rows = [row for row in comparisons if row.metric in shared]
    missing = (
        f"{row.metric}: no finite number in {', '.join(row.bad[:3])}{', ...' * bool(row.bad[3:])}"
        for row in rows
        if row.bad
    )
    notes = []
    if any(row.delta is not None and row.delta.method != "single" for row in rows):
        pairs = max(row.delta.pairs for row in rows if row.delta is not None)
        how = f"paired by {pairs} seeds" if pairs else "Welch, seeds differ"
        notes.append(f"mean ± standard deviation (n); {how}, p over {len(rows)} numbers")
    if any(s is not None and s.runs > s.n for row in rows for s in (row.base, row.new)):
        notes.append("runs of one seed are averaged first: n, intervals and p count seeds")
    cells = tuple(_make_cells(row) for row in rows)
    return ComparedSide(side.name, cells, tuple(notes), tuple(missing), apart)


def _make_cells(row: Comparison) -> tuple[str, ...]:
    delta, interval = row.delta, "-"
    if delta is not None and delta.low is not None:
        interval = f"{delta.low:+.4g} to {delta.high:+.4g}"
    return (
        row.metric,
        row.entry.unit if row.entry else "",
        _summarise(row.base),
        _summarise(row.new),
        "-" if delta is None else f"{delta.value:+.4g}",
        interval,
        "-" if row.p is None else f"{row.p:.3f}",
        row.verdict,
    )


def _summarise(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    return format_sample(summary.mean, summary.sd, summary.n, summary.runs)


def describe_answers(row: SameExamples) -> list[str]:
    """Format two runs on the same examples as cells of `ANSWER_COLUMNS`."""
    name = f"{row.base} and {row.new}"
    if row.reason:
        return [f"{name}: {row.reason}", "-", "-", "-", "-", "-"]
    counts = (row.examples, row.base_only, row.new_only, row.both)
    return [name, *(f"{value:,}" for value in counts), f"{row.p:.3g}"]


def describe_source(row: SourceDifference) -> list[str]:
    """Describe what differs, or is unknown, in a line each; empty for the same source."""
    lines = []
    if row.commits[0] != row.commits[1]:
        short = [commit[:12] or "unknown" for commit in row.commits]
        lines.append(f"commits {short[0]} and {short[1]}")
    if row.files:
        names = name_few(row.files, _MOST_NAMES)
        lines.append(f"other changes beside the commit: {names}")
    for run, patch in zip((row.base, row.new), row.patches, strict=True):
        if patch not in ("none", "whole"):
            lines.append(f"{run}: its changes beside the commit are not kept ({patch})")
    return lines


def describe_divergence(report: JsonObject) -> list[str]:
    """Describe the result of `view_divergence`, a sentence a line."""
    if report["found"] is None:
        return ["The runs are equal bit for bit in all deterministic numbers."]
    part = Divergence(**report["found"])
    lines = [f"The runs part at step {part.step:,} ({part.kind})."]
    lines.append(f"{part.lines:,} lines before it are equal.")
    if part.metric:
        lines.append(f"{part.metric}: {part.base!r} and {part.new!r}{format_ulps(part)}.")
    else:
        lines.append("One of them has no such line.")
    if part.others:
        lines.append(f"Further numbers of that line: {name_few(part.others, _MOST_NAMES)}.")
    if report["checkpoint"] is None:
        return [*lines, "There is no checkpoint before it that both have."]
    lines.append(f"The last checkpoint before it that both have: step {report['checkpoint']:,}.")
    if (tensors := report["tensors"]) is not None:
        names = f": {name_few(tensors, _MOST_NAMES)}" if tensors else ""
        lines.append(f"{len(tensors)} tensors differ there{names}.")
    return lines


def format_ulps(part: Divergence) -> str:
    """Format how many numbers of the precision lie between two values."""
    if part.ulps32 is not None:
        return f", {part.ulps32:,} ulps of single precision apart"
    return "" if part.ulps is None else f", {part.ulps:,} ulps apart"
