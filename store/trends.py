"""Reports of `tools.benchmark` kept side by side, and whether the newest are worse than before.

A report lies at `<store>/benchmarks/<identity>/<time>-<commit>.json`. The identity is a hash of all
that must be equal for figures to be comparable: devices, batch, input and configuration.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from store.config_text import flatten_config
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage import write_atomically

FOLDER = "benchmarks"
Verdict = Literal["too few", "steady", "worse", "much worse", "better"]
# So many reports before the newest ones are what they are held against.
WINDOW, NEWEST, FEWEST = 20, 3, 5
ALARM = 0.05
# A single report that is so many robust standard deviations off needs no company.
_SUDDEN = 6.0
# From the median absolute deviation to the standard deviation of a normal distribution.
_TO_SD = 1.4826
_FREE_KEYS = ("run.", "runtime.num_processes")
_IDENTITY = ("processes", "hardware", "devices", "global_batch_size", "unit")
_LOWER = ("step_p50_s", "step_p95_s", "input_stall_share", "compile_s", "graphs", "peak_host_gib",
          "peak_device_gib", "engine_over_bare")  # fmt: skip


@dataclass(frozen=True)
class Trend:
    """One figure over all reports of an identity.

    Attributes:
      figure: its name, with the number of processes in front.
      values: the oldest first.
      median: of the reports that the newest are held against.
      worse: by which share of the median the newest ones are worse, in the mean.
      p: of such ranks by chance, where nothing has changed.
    """

    identity: str
    figure: str
    values: tuple[float, ...]
    median: float
    worse: float
    p: float
    verdict: Verdict


def keep_report(store: Path, report: JsonObject) -> Path:
    """Put a report beside those of the same identity; gives its place.

    Raises:
      UserError: it is no report.
    """
    try:
        name = f"{report['created']}-{report['environment']['git_commit'] or 'unknown'}"
        identity = get_identity(report)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--add: no report of tools.benchmark ({error!r} is missing); give a file of its --json"
        ) from error
    path = store / FOLDER / identity / f"{re.sub(r'[^0-9A-Za-z.-]', '', name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(report, indent=2) + "\n")
    return path


def get_identity(report: JsonObject) -> str:
    """A hash of all that figures of two reports must have in common to be compared."""
    config = flatten_config(report["config"])
    kept = {key: value for key, value in config.items() if not key.startswith(_FREE_KEYS)}
    results = [{name: one.get(name) for name in _IDENTITY} for one in report["results"]]
    text = json.dumps([kept, report["settings"]["input"], results], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_trends(store: Path) -> list[Trend]:
    """What has become of each figure of each identity.

    Raises:
      UserError: a report is damaged.
    """
    found = []
    for folder in sorted((store / FOLDER).glob("*/")):
        series: dict[str, list[float]] = {}
        for path in sorted(folder.glob("*.json")):
            for figure, value in _read_figures(path).items():
                series.setdefault(figure, []).append(value)
        found += [judge(folder.name, figure, values) for figure, values in series.items()]
    return found


def judge(identity: str, figure: str, values: Sequence[float]) -> Trend:
    """Whether the newest three values are worse than the twenty before them.

    By the exact distribution of their ranks (Wilcoxon), which holds for noise of any form: where
    nothing has changed, at most one report in twenty raises an alarm. One value that is six robust
    standard deviations off raises it at once.

    Args:
      values: the oldest first.
    """
    sign = 1.0 if figure.rpartition(" ")[2] in _LOWER else -1.0
    base, newest = values[-WINDOW - NEWEST : -NEWEST], values[-NEWEST:]
    if len(base) < FEWEST:
        return Trend(identity, figure, tuple(values), math.nan, 0.0, 1.0, "too few")
    median = statistics.median(base)
    worse = sign * (statistics.fmean(newest) - median)
    p = compute_rank_p([sign * one for one in base], [sign * one for one in newest])
    less = compute_rank_p([-sign * one for one in base], [-sign * one for one in newest])
    spread = _TO_SD * statistics.median(abs(one - median) for one in base)
    verdict: Verdict = "steady"
    if p <= ALARM:
        verdict = "worse"
    elif sign * (newest[-1] - median) > _SUDDEN * max(spread, 1e-3 * abs(median)):
        verdict = "much worse"
    elif less <= ALARM:
        verdict = "better"
    share = worse / abs(median) if median else worse
    return Trend(identity, figure, tuple(values), median, share, p, verdict)


def compute_rank_p(base: Sequence[float], newest: Sequence[float]) -> float:
    """How often values drawn at random from all would rank as high as the newest ones do.

    Exact, with mean ranks where values are equal. Source: Wilcoxon 1945, Biometrics 1.
    """
    together = sorted([*base, *newest])
    first = {value: place for place, value in reversed(list(enumerate(together)))}
    last = {value: place for place, value in enumerate(together)}
    ranks = {value: (first[value] + last[value]) / 2 for value in together}
    found = sum(ranks[value] for value in newest)
    sums = [sum(one) for one in itertools.combinations([ranks[v] for v in together], len(newest))]
    return sum(one >= found - 1e-9 for one in sums) / len(sums)


def _read_figures(path: Path) -> dict[str, float]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        results = report["results"]
        return {
            f"{one['processes']} x {name}": float(value)
            for one in results
            for name, value in one.items()
            if (name in _LOWER or name.endswith("_per_s"))
            and isinstance(value, int | float)
            and math.isfinite(value)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is no report of tools.benchmark; move it away") from error
