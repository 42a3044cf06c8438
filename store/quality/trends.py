"""Benchmark reports and compiler's verdicts kept side by side, and whether the newest are worse.

One lies at `<store>/benchmarks/<identity>/<time>-<commit>-<hash>.json`; by this hash of its text
two of one second stand side by side, and equal ones once. The identity is a hash of all that must
be equal for figures to be comparable (`store.quality.reports`); versions of the software are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Literal

from store.formatting import format_value
from store.quality.calibration import Verdicts, index_verdicts
from store.quality.gates import Gate, GateFinding, check_samples
from store.quality.report_gates import settle_gates
from store.quality.reports import (
    BENCHMARK,
    COMPILER_NOISE,
    describe_report,
    find_figure,
    get_identity,
    get_kind,
    get_versions,
    name_report,
    read_figures,
)
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.json_files import write_json
from utils.storage.places import is_remote, to_path

FOLDER = "benchmarks"
Verdict = Literal["too few", "steady", "worse", "much worse", "better", "missing"]
BAD = ("worse", "much worse", "missing")
# So many reports before the newest ones are what they are held against.
WINDOW, NEWEST, FEWEST = 20, 3, 5
# A little below one in twenty: what single outliers add has room there.
ALARM = 0.048
# How much each of the newest three counts, the oldest first, and by how many standard deviations
# the newest must itself be off: chosen by simulation (proofs.benchmark_trends) for the most
# slow-downs found at the first three reports.
_WEIGHTS = (0.5, 0.75, 1.0)
_OFF = 0.5
# A single report that is so many robust standard deviations off needs no company.
_SUDDEN = 8.0
# From the median absolute deviation to the standard deviation of a normal distribution.
_TO_SD = 1.4826


@dataclass(frozen=True)
class Trend:
    """One figure over all reports of an identity.

    Attributes:
      subject: what was measured or compiled.
      figure: its name, a benchmark's with the number of processes in front.
      values: the oldest first; those that a report lacks are left out.
      reports: how many there are, with and without the figure.
      median: of the reports that the newest are held against.
      worse: by which share of the median the newest ones are worse, in the mean.
      p: of newest values as bad as these by chance, where nothing has changed.
      versions: what the newest report was made with and the one before the newest three was not.
    """

    identity: str
    subject: str
    figure: str
    values: tuple[float, ...]
    reports: int
    median: float
    worse: float
    p: float
    verdict: Verdict
    versions: tuple[str, ...] = ()


TREND_COLUMNS = ("figure", "reports>", "median>", "newest>", "worse by>", "verdict")


def describe_trend(one: Trend) -> tuple[str, ...]:
    """A figure in cells of `TREND_COLUMNS`, without its verdict; of too few reports no median."""
    is_known = math.isfinite(one.median)
    return (
        one.figure,
        str(len(one.values)),
        format_value(one.median) if is_known else "-",
        format_value(one.values[-1]),
        f"{one.worse:+.1%}" if is_known else "-",
    )


def group_trends(trends: Sequence[Trend]) -> list[list[Trend]]:
    """Trends of one identity together."""
    groups: dict[str, list[Trend]] = {}
    for one in trends:
        groups.setdefault(one.identity, []).append(one)
    return list(groups.values())


def place_report(store: Path, report: JsonObject) -> Path:
    """Where a report goes: beside those of the same identity.

    Raises:
      UserError: it is no report.
    """
    try:
        name, identity = name_report(report), get_identity(report)
        read_figures(report)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"no report of tools.benchmark, tools.compile_for_tpu or lab.delta ({error}); "
            "give a --json file of theirs"
        ) from error
    stem = re.sub(r"[^0-9A-Za-z.-]", "", name)
    return store / FOLDER / identity / f"{stem}-{_hash(report)}.json"


def keep_report(store: Path, report: JsonObject) -> Path:
    """Put a report there; gives its place.

    Raises:
      UserError: it is no report, or it cannot be written.
    """
    path = place_report(store, report)
    digest = _hash(report)
    # Names of earlier programs had no hash.
    old = path.with_name(path.name.replace(f"-{digest}.json", ".json"))
    with contextlib.suppress(OSError, ValueError):
        if _hash(json.loads(old.read_text(encoding="utf-8"))) == digest:
            return old
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, report)
    except OSError as error:
        raise UserError(
            f"--store {str(store)!r} cannot be written: {error.strerror}; mend its rights"
        ) from error
    return path


def read_reports(store: Path) -> dict[str, list[JsonObject]]:
    """Identity -> its reports, the oldest first; one that is damaged is named and left out."""
    found: dict[str, list[JsonObject]] = {}
    for path in sorted((store / FOLDER).glob("*/*.json")):
        try:
            found.setdefault(path.parent.name, []).append(_read(path))
        except UserError as error:
            get_logger().warning("left out: %s", error)
    return {identity: reports for identity, reports in found.items() if reports}


def read_verdicts(store: str) -> Verdicts:
    """The compiler's verdicts of a store; a bucket holds none.

    Raises:
      UserError: a report is damaged.
    """
    if is_remote(store):
        return {}
    return index_verdicts(one for many in read_reports(to_path(store)).values() for one in many)


def check_reports(store: Path) -> tuple[int, dict[Path, str]]:
    """How many reports are kept there, and what is wrong with those that are damaged."""
    found = {}
    paths = sorted((store / FOLDER).glob("*/*.json"))
    for path in paths:
        try:
            _read(path)
        except UserError as error:
            found[path] = str(error).removeprefix(f"{path} ")
    return len(paths), found


def find_trends(identity: str, reports: Sequence[JsonObject]) -> list[Trend]:
    """What has become of each figure of one identity.

    A figure that earlier reports had and the newest one lacks is missing, which is bad.
    """
    tables = [read_figures(report) for report in reports]
    names = dict.fromkeys(
        name for table in tables for name, value in table.items() if value is not None
    )
    versions = _compare_versions(reports)
    subject, kind = describe_report(reports[-1]), get_kind(reports[-1])
    found = []
    for name in names:
        values = [table[name] for table in tables if table.get(name) is not None]
        least = 0.0 if kind == BENCHMARK else COMPILER_NOISE
        median, worse, p, verdict = judge(name, values, least=least)
        if tables[-1].get(name) is None:
            verdict = "missing"
        found.append(
            Trend(identity, subject, name, tuple(values), len(reports), median, worse, p, verdict,
                  versions)
        )  # fmt: skip
    return found


def judge(
    figure: str, values: Sequence[float], *, least: float = 0.0
) -> tuple[float, float, float, Verdict]:
    """Whether the newest three values are worse than the twenty before them.

    By the exact distribution of a weighted sum over all orders of these values, which holds for
    noise of any form: where nothing has changed, at most one report in twenty raises an alarm. One
    value that is eight robust standard deviations off raises it at once.

    Args:
      values: the oldest first.
      least: share of the median below which a change means nothing.

    Returns:
      Median of the twenty, share by which the newest are worse in the mean, p, verdict.
    """
    entry = find_figure(figure)
    sign = 1.0 if entry is not None and entry.direction == "lower" else -1.0
    base, newest = values[-WINDOW - NEWEST : -NEWEST], values[-NEWEST:]
    if len(base) < FEWEST:
        return math.nan, 0.0, 1.0, "too few"
    median = statistics.median(base)
    worse = sign * (statistics.fmean(newest) - median)
    gap, floor = sign * (newest[-1] - median), max(least, 1e-9) * abs(median)
    p, less = (
        compute_p([way * sign * one for one in base], [way * sign * one for one in newest])
        for way in (1, -1)
    )
    spread = _TO_SD * statistics.median(abs(one - median) for one in base)
    verdict: Verdict = "steady"
    if gap > floor and gap > _SUDDEN * max(spread, 1e-3 * abs(median)):
        verdict = "much worse"
    elif gap > floor and p <= ALARM:
        verdict = "worse"
    elif -gap > floor and less <= ALARM:
        verdict = "better"
    return median, worse / abs(median) if median else worse, p, verdict


def compute_p(base: Sequence[float], newest: Sequence[float]) -> float:
    """How often values in a random order would end as high as these do.

    Exact, over every choice of the last three. What counts is the sum of the last three with
    weights, and that the last one is itself above the mean: so one outlier raises one alarm, not
    three. Source: Pitman 1937, Supplement to the Journal of the Royal Statistical Society 4.
    """
    together = [*base, *newest]
    mean, spread = statistics.fmean(together), statistics.pstdev(together)
    if spread == 0.0:
        return 1.0
    scores = [(one - mean) / spread for one in together]
    first, second, last = scores[-3:]
    if last <= _OFF:
        return 1.0
    w1, w2, w3 = _WEIGHTS
    found = w1 * first + w2 * second + w3 * last - 1e-9
    high = sum(w1 * a + w2 * b + w3 * c >= found for c, a, b in permutations(scores, 3) if c > _OFF)
    return high / math.perm(len(scores), 3)


def gate_newest(gates: Sequence[Gate], reports: Sequence[JsonObject]) -> list[GateFinding]:
    """Hold the newest three reports of one identity against the twenty before them, by gates.

    Raises:
      UserError: a gate on a figure that no report has.
    """
    tables = [read_figures(report) for report in reports[-WINDOW - NEWEST :]]
    names = {name for table in tables for name in table}
    found = []
    for gate in settle_gates(gates, names):
        wanted = sorted(n for n in names if gate.metric in (n, n.rpartition(" x ")[2]))
        found += [_gate(gate, name, tables) for name in wanted]
    return found


def _gate(gate: Gate, name: str, tables: Sequence[dict[str, float | None]]) -> GateFinding:
    base, newest = (
        {
            (word, place): table[name]
            for place, table in enumerate(part)
            if table.get(name) is not None
        }
        for word, part in (("base", tables[:-NEWEST]), ("new", tables[-NEWEST:]))
    )
    bad = [] if tables[-1].get(name) is not None else [f"the newest report has no {name}"]
    if not bad and len(base) < FEWEST:
        reason = f"{FEWEST} reports before the newest {NEWEST} are needed, {len(base)} have it"
        return GateFinding(replace(gate, metric=name), "undecided", reason)
    return check_samples(replace(gate, metric=name), base, newest, bad)


def _compare_versions(reports: Sequence[JsonObject]) -> tuple[str, ...]:
    before = get_versions(reports[max(0, len(reports) - NEWEST - 1)])
    now = get_versions(reports[-1])
    return tuple(
        f"{name} {before.get(name, 'none')} to {now.get(name, 'none')}"
        for name in sorted(before.keys() | now)
        if before.get(name) != now.get(name)
    )


# The content's hash in a report's name; names of earlier programs had none.
_DIGEST = re.compile(r"-([0-9a-f]{8})\.json$")


def _hash(report: JsonObject) -> str:
    text = json.dumps(report, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _read(path: Path) -> JsonObject:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        read_figures(report)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no report of a benchmark or compiler; move it away") from error
    digest = _DIGEST.search(path.name)
    if digest and digest[1] != _hash(report):
        raise UserError(f"{path} has another content than its name says; move it away")
    return report
