"""Finds how many micro-batches a step is cheapest in, and writes it into a configuration's file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from store.reports import COMPILER_NOISE
from tools.tpu.children import TimeLimitError
from tools.tpu.schema import MicroBatches, Report
from utils.errors import UserError
from utils.storage.local import write_atomically

_LEAST_EXAMPLES = 8
_SECTION = re.compile(r"^train:\s*(#.*)?$")
_KEY = "  verdicts:"


def search_micro_batches(batch: int, measure: Callable[[int], Report]) -> list[Report]:
    """Reports of a step in 1, 2, 4, ... micro-batches, as long as one of both figures falls.

    Args:
      batch: examples of a step on a device.
      measure: compiles the step in so many micro-batches.

    Raises:
      UserError: the step as one batch is refused, or a split took too long to compile; one that is
        refused ends the search, and is told.
    """
    found: list[Report] = []
    parts = 1
    while not batch % parts and (parts == 1 or batch // parts >= _LEAST_EXAMPLES):
        try:
            found.append(measure(parts))
        except UserError as error:
            # What was not compiled in time may be the cheapest: no verdict without it.
            if not found or isinstance(error, TimeLimitError):
                raise
            sys.stderr.write(f"{parts} micro-batches: {error}\n")
            break
        if len(found) > 1 and found[-2].fits and not _falls(found[-2], found[-1]):
            break
        parts *= 2
    return found


def _falls(before: Report, now: Report) -> bool:
    """Whether a finer split is cheaper by the estimate or by bundles."""
    return now.fits and any(new < old for old, new in zip(_cost(before), _cost(now), strict=True))


def _cost(report: Report) -> tuple[float, float]:
    return report.estimated_mcycles, report.bundles_mcycles


def choose_cheapest(found: Sequence[Report]) -> int | None:
    """The place of the split of the least cost; none: none fits.

    A finer one is taken where it is cheaper by both figures, and by more than the compiler's noise
    by one of them: what only one of the two believes in is no gain.
    """
    best: int | None = None
    for place, report in enumerate(found):
        if report.fits and (best is None or _is_cheaper(report, found[best])):
            best = place
    return best


def _is_cheaper(report: Report, best: Report) -> bool:
    ratios = [new / old for old, new in zip(_cost(best), _cost(report), strict=True)]
    return max(ratios) < 1 and min(ratios) < 1 - COMPILER_NOISE


def describe_splits(found: Sequence[Report], batch: int, chosen: int) -> list[MicroBatches]:
    """What the verdict keeps of each split."""
    return [
        MicroBatches(
            parts=2**place,
            examples=batch // 2**place,
            estimated_mcycles=report.estimated_mcycles,
            bundles_mcycles=report.bundles_mcycles,
            peak_bytes=report.memory.peak_bytes,
            fits=report.fits,
            graph=report.graph,
            chosen=place == chosen,
        )
        for place, report in enumerate(found)
    ]


def print_splits(splits: Sequence[MicroBatches], unit: str) -> None:
    """A line for each split, the chosen one marked."""
    print(f"\n{'parts':>5} {'at once':>8} {'estimate':>10} {'bundles':>10} "
          f"{'kcyc each by estimate':>22} {'by bundles':>11} {'peak GiB':>9}")  # fmt: skip
    for one in splits:
        peak, mark = f"{one.peak_bytes / 2**30:9.2f}", "  <- least" if one.chosen else ""
        if not one.fits:
            print(f"{one.parts:5} {one.examples:8} {'does not fit':>56} {peak}")
            continue
        costs = (one.estimated_mcycles, one.bundles_mcycles)
        each = [1e3 * cost / (one.parts * one.examples) for cost in costs]
        print(f"{one.parts:5} {one.examples:8} {costs[0]:10.2f} {costs[1]:10.2f} "
              f"{each[0]:22.1f} {each[1]:11.1f} {peak}{mark}")  # fmt: skip
    print(f"Mcyc of a step, kcyc of one of its examples ({unit}); with DMA waits by the model")


def write_verdict(path: Path, name: str, entry: str) -> None:
    """Put one line into `train.verdicts` of a configuration's file, in place of an older one.

    Args:
      name: of the step, such as v5e:128.
      entry: the value in YAML's flow style.

    Raises:
      UserError: the file has no `train:` section in block style, or cannot be written.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [place for place, line in enumerate(lines) if _SECTION.match(line)]
    said = f"    {name}: {entry}"
    if not starts:
        raise UserError(
            f"--write {path} has no section `train:` of lines of its own; add train.verdicts "
            f"yourself: {{{name}: {entry}}}"
        )
    end = _find_end(lines, starts[0])
    keys = [place for place in range(starts[0], end) if lines[place].rstrip() == _KEY]
    if keys:
        first = keys[0] + 1
        last = next((p for p in range(first, end) if not lines[p].startswith("    ")), end)
        kept = [line for line in lines[first:last] if not line.startswith(f"    {name}:")]
        lines[first:last] = sorted([*kept, said])
    else:
        lines[end:end] = [_KEY, said]
    write_atomically(path, "\n".join(lines) + "\n")


def _find_end(lines: Sequence[str], start: int) -> int:
    """Behind the last line of a section that says something."""
    end = next(
        (p for p in range(start + 1, len(lines)) if lines[p] and lines[p][0] not in " #"),
        len(lines),
    )
    while end > start + 1 and not lines[end - 1].startswith(" "):
        end -= 1
    return end
