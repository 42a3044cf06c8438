"""Benchmark reports and compiler's estimates over time, and whether the newest are worse.

A report lies at `<store>/benchmarks/<identity>/<time>-<commit>-<hash>.json`. The identity is a hash
of all that must be equal for figures to be comparable (`store.quality.reports`), which versions of
the software are not. The last hash is that of its text: equal reports are kept once.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Literal

from store.formatting import format_value
from store.quality.calibration import Verdicts, index_verdicts
from store.quality.gates import Gate, GateFinding, check_samples
from store.quality.report_gates import resolve_gates
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
from utils.programs import prepare_folder
from utils.storage.json_files import write_json
from utils.storage.places import (
    check_writable,
    is_remote,
    join_path_or_url,
    open_folder,
    to_path,
)

FOLDER = "benchmarks"
Verdict = Literal["too few", "steady", "worse", "much worse", "better", "missing"]
BAD = ("worse", "much worse", "missing")
# The newest reports are compared with this many before them, and at least with the fewest.
WINDOW, NEWEST, FEWEST = 20, 3, 5
# A little below one in twenty, to leave room for alarms by single outliers.
ALARM = 0.048
# Weights of the newest three, the oldest first, and the number of standard deviations by which the
# newest itself must be off: chosen by simulation (proofs.benchmark_trends) to find the most
# slow-downs within the first three reports.
_WEIGHTS = (0.5, 0.75, 1.0)
_OFF = 0.5
# A single report that is this many robust standard deviations off raises an alarm alone.
_SUDDEN = 8.0
# From the median absolute deviation to the standard deviation of a normal distribution.
_TO_SD = 1.4826


@dataclass(frozen=True)
class Trend:
    """One figure over all reports of an identity."""

    identity: str
    subject: str
    figure: str  # its name, with the number of processes in front for a benchmark
    values: tuple[float, ...]  # the oldest first; reports without the figure are left out
    reports: int  # their number, with and without the figure
    median: float  # of the reports that the newest are compared with
    worse: float  # mean change of the newest as a share of the median, positive if worse
    p: float  # probability of newest values as bad as these if nothing has changed
    verdict: Verdict
    # Packages whose versions differ from those before the newest three
    versions: tuple[str, ...] = ()


TREND_COLUMNS = ("figure", "reports>", "median>", "newest>", "worse by>", "verdict")


def describe_trend(trend: Trend) -> tuple[str, ...]:
    """Format a figure as cells of `TREND_COLUMNS` without its verdict; no median of too few."""
    is_known = math.isfinite(trend.median)
    return (
        trend.figure,
        str(len(trend.values)),
        format_value(trend.median) if is_known else "-",
        format_value(trend.values[-1]),
        f"{trend.worse:+.1%}" if is_known else "-",
    )


def group_trends(trends: Sequence[Trend]) -> list[list[Trend]]:
    """Group trends by identity."""
    groups: dict[str, list[Trend]] = {}
    for trend in trends:
        groups.setdefault(trend.identity, []).append(trend)
    return list(groups.values())


def place_report(store: Path, report: JsonObject) -> Path:
    """Return the path of a report in a store; UserError if it is no report."""
    try:
        name, identity = name_report(report), get_identity(report)
        read_figures(report)
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"no report of proofs.benchmark, tools.compile_for_tpu or a lab ({error}); "
            "give a --json file of theirs"
        ) from error
    return store / FOLDER / identity / f"{re.sub(r'[^0-9A-Za-z.-]', '', name)}-{_hash(report)}.json"


def keep_report(store: Path, report: JsonObject) -> Path:
    """Save a report in a store and return its path; UserError if that is not possible."""
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
            f"--store {str(store)!r} cannot be written: {error.strerror}; change its permissions"
        ) from error
    return path


def prepare_store(store: str, flag: str) -> None:
    """Check that reports can be saved in a store, before they are made; a UserError if not."""
    if is_remote(store):
        check_writable(store, flag)
    else:
        prepare_folder(to_path(store) / FOLDER, flag)


def save_report(store: str, report: JsonObject) -> str:
    """Save a report in a store, a directory or a bucket; return its path or URL."""
    if not is_remote(store):
        return str(keep_report(to_path(store), report))
    *folders, name = place_report(Path(), report).parts
    folder = open_folder(join_path_or_url(store, *folders))
    folder.write_text(name, json.dumps(report, indent=2) + "\n")
    return f"{folder}/{name}"


def read_reports(store: Path | str) -> dict[str, list[JsonObject]]:
    """Read identity -> its reports, the oldest first; damaged ones are logged and left out."""
    reports: dict[str, list[JsonObject]] = {}
    for identity, place, read in _list_reports(store):
        try:
            report = _read(place, read)
        except UserError as error:
            get_logger().warning("left out: %s", error)
        else:
            reports.setdefault(identity, []).append(report)
    return reports


def _list_reports(store: Path | str) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Yield the identity of each report, its path or URL, and a function that reads it."""
    if not is_remote(store):
        for path in sorted((to_path(store) / FOLDER).glob("*/*.json")):
            yield path.parent.name, str(path), partial(path.read_text, encoding="utf-8")
        return
    top = open_folder(store).child(FOLDER)
    for identity in top.list_names():
        folder = top.child(identity)
        names = [name for name in folder.list_names() if name.endswith(".json")]
        for name, text in sorted(folder.read_texts(names).items()):
            yield identity, f"{folder}/{name}", partial(str, text)


def read_verdicts(store: str) -> Verdicts:
    """Read the compiler's estimates of a store, a directory or a bucket."""
    return index_verdicts(itertools.chain(*read_reports(store).values()))


def check_reports(store: Path) -> tuple[int, dict[Path, str]]:
    """Return the number of reports and, by path, the faults of damaged ones."""
    faults = {}
    reports = list(_list_reports(store))
    for _, place, read in reports:
        try:
            _read(place, read)
        except UserError as error:
            faults[to_path(place)] = str(error).removeprefix(f"{place} ")
    return len(reports), faults


def find_trends(identity: str, reports: Sequence[JsonObject]) -> list[Trend]:
    """Evaluate each figure of one identity; one that only earlier reports have is "missing"."""
    tables = [read_figures(report) for report in reports]
    names = dict.fromkeys(
        name for table in tables for name, value in table.items() if value is not None
    )
    before, now = (
        get_versions(reports[max(0, len(reports) - NEWEST - 1)]),
        get_versions(reports[-1]),
    )
    versions = tuple(
        f"{name} {before.get(name, 'none')} to {now.get(name, 'none')}"
        for name in sorted(before.keys() | now)
        if before.get(name) != now.get(name)
    )
    subject, kind = describe_report(reports[-1]), get_kind(reports[-1])
    trends = []
    for name in names:
        values = [value for table in tables if (value := table.get(name)) is not None]
        least = 0.0 if kind == BENCHMARK else COMPILER_NOISE
        median, worse, p, verdict = judge(name, values, least=least)
        if tables[-1].get(name) is None:
            verdict = "missing"
        trends.append(
            Trend(
                identity,
                subject,
                name,
                tuple(values),
                len(reports),
                median,
                worse,
                p,
                verdict,
                versions,
            )
        )
    return trends


def judge(
    figure: str, values: Sequence[float], *, least: float = 0.0
) -> tuple[float, float, float, Verdict]:
    """Test whether the newest three values are worse than the twenty before them.

    The exact distribution of a weighted sum over all orders of these values holds for noise of any
    form: without a change, at most one report in twenty raises an alarm. One value that is eight
    robust standard deviations off raises it at once.

    Args:
      values: the oldest first.
      least: share of the median below which a change is ignored.

    Returns:
      Median of the twenty, mean change of the newest as a share of it, p, verdict.
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
        compute_p([way * sign * v for v in base], [way * sign * v for v in newest])
        for way in (1, -1)
    )
    spread = _TO_SD * statistics.median(abs(value - median) for value in base)
    verdict: Verdict = "steady"
    if gap > floor and gap > _SUDDEN * max(spread, 1e-3 * abs(median)):
        verdict = "much worse"
    elif gap > floor and p <= ALARM:
        verdict = "worse"
    elif -gap > floor and less <= ALARM:
        verdict = "better"
    return median, worse / abs(median) if median else worse, p, verdict


def compute_p(base: Sequence[float], newest: Sequence[float]) -> float:
    """Compute how often values in a random order would end as high as these do.

    Exact, over every choice of the last three. Compared is their weighted sum, if the last one is
    itself above the mean: so one outlier raises one alarm, not three. Source: Pitman 1937,
    Supplement to the Journal of the Royal Statistical Society 4.
    """
    together = [*base, *newest]
    mean, spread = statistics.fmean(together), statistics.pstdev(together)
    if spread == 0.0:
        return 1.0
    scores = [(value - mean) / spread for value in together]
    first, second, last = scores[-3:]
    if last <= _OFF:
        return 1.0
    w1, w2, w3 = _WEIGHTS
    least = w1 * first + w2 * second + w3 * last - 1e-9
    high = sum(w1 * a + w2 * b + w3 * c >= least for c, a, b in permutations(scores, 3) if c > _OFF)
    return high / math.perm(len(scores), 3)


def gate_newest(gates: Sequence[Gate], reports: Sequence[JsonObject]) -> list[GateFinding]:
    """Check the newest three reports of one identity against the twenty before them by gates."""
    tables = [read_figures(report) for report in reports[-WINDOW - NEWEST :]]
    names = {name for table in tables for name in table}
    findings: list[GateFinding] = []
    for gate in resolve_gates(gates, names):
        wanted = sorted(n for n in names if gate.metric in (n, n.rpartition(" x ")[2]))
        findings += [_gate(replace(gate, metric=name), tables) for name in wanted]
    return findings


def _gate(gate: Gate, tables: Sequence[dict[str, float | None]]) -> GateFinding:
    base, newest = (
        {(word, i): v for i, t in enumerate(part) if (v := t.get(gate.metric)) is not None}
        for word, part in (("base", tables[:-NEWEST]), ("new", tables[-NEWEST:]))
    )
    if tables[-1].get(gate.metric) is None:
        return check_samples(gate, base, newest, [f"the newest report has no {gate.metric}"])
    if len(base) < FEWEST:
        reason = f"{FEWEST} reports before the newest {NEWEST} are needed, {len(base)} have it"
        return GateFinding(gate, "undecided", reason)
    return check_samples(gate, base, newest)


# The content's hash in a report's name; earlier programs wrote none.
_DIGEST = re.compile(r"-([0-9a-f]{8})\.json$")


def _hash(report: JsonObject) -> str:
    return hashlib.sha256(json.dumps(report, sort_keys=True).encode()).hexdigest()[:8]


def _read(place: str, read: Callable[[], str]) -> JsonObject:
    try:
        report = json.loads(read())
        read_figures(report)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place} is no report of a benchmark or compiler; move it away") from error
    digest = _DIGEST.search(place)
    if digest and digest[1] != _hash(report):
        raise UserError(f"{place} does not match the hash in its name; move it away")
    return report
