"""Finds how many micro-batches a step is cheapest in, and writes it into a configuration's file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bill.children.processes import TimeLimitError
from bill.schema import MicroBatches, Report
from store.quality.reports import COMPILER_NOISE
from utils.errors import UserError
from utils.storage.local import write_atomically

_LEAST_EXAMPLES = 8
_SECTION = re.compile(r"^train:\s*(#.*)?$")
_KEY = "  verdicts:"


@dataclass(frozen=True)
class Split:
    """A step in equal micro-batches.

    Args:
      report: of the whole step, or of one micro-batch as a step of its own.
      is_probe: the latter, which compiles in a fraction of the time.
    """

    parts: int
    report: Report
    is_probe: bool

    @property
    def fits(self) -> bool:
        """Whether what was compiled fits."""
        return self.report.fits

    @property
    def cost(self) -> tuple[float, float]:
        """Mcyc of the whole step by the estimate, with bundles where it has none, and by bundles.

        A probe counts the optimizer once for each micro-batch, where a step adds gradients up.
        """
        estimate, bundles = self.report.estimated_mcycles, self.report.bundles_mcycles
        assert estimate is not None and bundles is not None  # the step fits
        return self._times * estimate + self.unestimated, self._times * bundles

    @property
    def unestimated(self) -> float:
        """Mcyc of the whole step that only bundles tell, such as those of kernels."""
        bundles = self.report.bundles
        return self._times * bundles.unestimated_mcycles if bundles else 0.0

    @property
    def _times(self) -> int:
        return self.parts if self.is_probe else 1


def search_micro_batches(
    batch: int, probe: Callable[[int], Report], measure: Callable[[int], Report]
) -> tuple[list[Split], int | None]:
    """Try splits of a step; return them, and the index of the one of the least cost.

    Micro-batches are compiled as steps of their own; of the splits themselves those alone that
    these would choose, until the cheapest is one that was compiled as a whole.

    Args:
      batch: examples of a step on a device.
      probe: compiles a step of so many examples.
      measure: compiles the step in so many micro-batches.

    Raises:
      UserError: as `probe_splits`, or the chosen split is refused.
    """
    splits = probe_splits(batch, probe)
    while True:
        place = choose_cheapest(splits)
        if place is None or not splits[place].is_probe:
            return splits, place
        parts = splits[place].parts
        splits[place] = Split(parts, measure(parts), is_probe=False)


def probe_splits(batch: int, probe: Callable[[int], Report]) -> list[Split]:
    """Probe a step in 1, 2, 4, ... micro-batches, as long as one of both figures falls.

    Args:
      batch: examples of a step on a device.
      probe: compiles a step of so many examples.

    Raises:
      UserError: the step as one batch is refused, or one took too long to compile; a smaller one
        that is refused ends the search, and is reported.
    """
    splits: list[Split] = []
    parts = 1
    while not batch % parts and (parts == 1 or batch // parts >= _LEAST_EXAMPLES):
        try:
            splits.append(Split(parts, probe(batch // parts), is_probe=parts > 1))
        except UserError as error:
            # What was not compiled in time may be the cheapest: no verdict without it.
            if not splits or isinstance(error, TimeLimitError):
                raise
            sys.stderr.write(f"{parts} micro-batches: {error}\n")
            break
        if len(splits) > 1 and splits[-2].fits and not _falls(splits[-2], splits[-1]):
            break
        parts *= 2
    return splits


def _falls(before: Split, now: Split) -> bool:
    """Return whether a finer split is cheaper by the estimate or by bundles."""
    return now.fits and any(new < old for old, new in zip(before.cost, now.cost, strict=True))


def choose_cheapest(found: Sequence[Split]) -> int | None:
    """Return the index of the split of the least cost, or None if no split fits.

    A finer one is taken where it is cheaper by both figures, and by more than the compiler's noise
    by one of them: what only one of the two believes in is no gain. Between one that computes by
    kernels and one that does not bundles decide alone, because only they see both alike.
    """
    best: int | None = None
    for place, split in enumerate(found):
        if split.fits and (best is None or _is_cheaper(split, found[best])):
            best = place
    return best


def _is_cheaper(split: Split, best: Split) -> bool:
    ratios = [new / old for old, new in zip(best.cost, split.cost, strict=True)]
    if abs(split.unestimated - best.unestimated) > COMPILER_NOISE * best.cost[0]:
        ratios = ratios[1:]
    return max(ratios) < 1 and min(ratios) < 1 - COMPILER_NOISE


def describe_splits(found: Sequence[Split], batch: int, chosen: int) -> list[MicroBatches]:
    """Describe each split for the report."""
    return [
        MicroBatches(
            parts=split.parts,
            examples=batch // split.parts,
            estimated_mcycles=split.cost[0] if split.fits else None,
            bundles_mcycles=split.cost[1] if split.fits else None,
            unestimated_mcycles=split.unestimated,
            peak_bytes=split.report.memory.peak_bytes,
            fits=split.fits,
            graph=split.report.graph,
            probed=split.is_probe,
            chosen=place == chosen,
        )
        for place, split in enumerate(found)
    ]


def print_splits(splits: Sequence[MicroBatches], unit: str) -> None:
    """Print a line for each split, the chosen one marked."""
    print(
        f"\n{'parts':>5} {'at once':>8} {'estimate':>10} {'of kernels':>10} {'bundles':>10} "
        f"{'kcyc each by estimate':>22} {'by bundles':>11} {'peak GiB':>9}"
    )
    for split in splits:
        peak = f"{split.peak_bytes / 2**30:9.2f}"
        mark = "  <- least" if split.chosen else "  of one part" if split.probed else ""
        if split.estimated_mcycles is None or split.bundles_mcycles is None:
            print(f"{split.parts:5} {split.examples:8} {'does not fit':>67} {peak}{mark}")
            continue
        costs = (split.estimated_mcycles, split.bundles_mcycles)
        each = [1e3 * cost / (split.parts * split.examples) for cost in costs]
        print(
            f"{split.parts:5} {split.examples:8} {costs[0]:10.2f} {split.unestimated_mcycles:10.2f}"
            f" {costs[1]:10.2f} {each[0]:22.1f} {each[1]:11.1f} {peak}{mark}"
        )
    print(f"Mcyc of a step, kcyc of one of its examples ({unit}); with DMA waits by the model")
    print("of kernels: in the estimate, but by bundles, because what they are of has none")
    if any(split.probed for split in splits):
        print(
            "of one part: that of a step of one micro-batch, times the parts; its memory as it is"
        )


def require_section(path: Path) -> None:
    """Refuse a configuration's file that `write_verdict` has no room in.

    Raises:
      UserError: the file has no `train:` section in block style.
    """
    if not any(map(_SECTION.match, path.read_text(encoding="utf-8").splitlines())):
        raise UserError(
            f"--write ({str(path)!r}) needs a section `train:` of lines of its own in that file; "
            "give it one, or leave --write out and add the verdict that is printed yourself"
        )


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
