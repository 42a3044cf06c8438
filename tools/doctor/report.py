"""Reports of findings: lines for one machine, a table for the workers of a pod."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from tools.doctor.machine import GREEN, RED, YELLOW, Finding
from train.table import draw_table, find_odd

_COLOURS = {GREEN: "\033[32m", YELLOW: "\033[33m", RED: "\033[31m"}
_PLAIN = "\033[0m"
_ORDER = (GREEN, YELLOW, RED)


def format_lines(findings: Sequence[Finding], *, colour: bool) -> str:
    """Format a line for each finding, the way out below it unless green, and the counts."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        level = finding.level.ljust(6)
        if colour:
            level = f"{_COLOURS[finding.level]}{level}{_PLAIN}"
        lines.append(f"{level}  {finding.name.ljust(width)}  {finding.text}")
        if finding.hint and finding.level != GREEN:
            lines.append(f"{' ' * (width + 10)}-> {finding.hint}")
    counts = Counter(finding.level for finding in findings)
    return "\n".join([*lines, "", ", ".join(f"{counts[level]} {level}" for level in _ORDER)])


def format_hints(findings: Sequence[Finding]) -> str:
    """Format the ways out alone, worst first."""
    bad = [finding for finding in findings if finding.hint and finding.level != GREEN]
    bad.sort(key=lambda finding: -_ORDER.index(finding.level))
    return "\n".join(f"{finding.level}: {finding.name}: {finding.hint}" for finding in bad)


def format_json(findings: Sequence[Finding]) -> str:
    """Format one line of JSON."""
    rows = [asdict(finding) for finding in findings]
    return json.dumps({"verdict": get_verdict(findings), "findings": rows})


def get_verdict(findings: Sequence[Finding]) -> str:
    """Return the worst level."""
    return max((finding.level for finding in findings), key=_ORDER.index, default=GREEN)


def format_table(workers: Mapping[str, Sequence[Finding]]) -> str:
    """Format a row for each check, a column for each worker; odd ones are starred."""
    names = list(dict.fromkeys(finding.name for row in workers.values() for finding in row))
    by_name = [{finding.name: finding for finding in row} for row in workers.values()]
    rows: dict[str, list[str]] = {}
    odd: dict[str, list[bool]] = {}
    details: list[str] = []
    for name in names:
        cells = [findings.get(name) for findings in by_name]
        odd[name] = find_odd([(cell.level, cell.value) if cell else None for cell in cells])
        rows[name] = [cell.level if cell else "missing" for cell in cells]
        details += [
            f"w{worker} {name}: {cell.text}" + (f" -> {cell.hint}" if cell.hint else "")
            for worker, cell, is_odd in zip(workers, cells, odd[name])  # noqa: B905  older Pythons
            if cell and (is_odd or cell.level == RED)
        ]
    table = draw_table(list(workers), rows, odd)
    return "\n".join([table, *(["", *details] if details else [])])
