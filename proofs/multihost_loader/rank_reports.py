"""Reads a dataset on several ranks and checks what they read together."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.loader.open_loader import plan_loader
from utils.errors import UserError

# By its path, as it runs in any directory.
_PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "test_tfds_loader_multihost.py"
_SHOWN = 3
_SHORTEST_PART_S = 0.25


@dataclass(frozen=True)
class RankReport:
    """Examples and speed of one rank in one pass."""

    rank: int
    world_size: int
    role: str
    num_examples: int
    global_batch_size: int
    batches: int
    ids: list[str]  # of all examples, in order
    # Images per second of this rank in each part of the pass that has whole batches
    speeds: list[float]


class PartTimer:
    """Images per second of the parts of a pass.

    After whole batches, a split's last batch is left out: it is short or, on the last ranks, empty.
    A part grows until it lasts a quarter of a second: a shorter one would time the batches that
    were prepared ahead.
    """

    def __init__(self, batches: int, batch_examples: int) -> None:
        self._batches, self._batch_examples = batches, batch_examples
        self.speeds: list[float] = []
        self._open(time.perf_counter())

    def add(self, examples: int) -> None:
        """Count a batch that has been read."""
        if examples < self._batch_examples and (self.speeds or self._examples):
            return
        self._examples += examples
        self._count += 1
        self._last = time.perf_counter()
        if self._count >= self._batches and self._last - self._start >= _SHORTEST_PART_S:
            self._close()

    def finish(self) -> list[float]:
        """Return the speeds of all parts; at least one if there was an example."""
        if self._examples and not self.speeds:
            self._close()
        return self.speeds

    def _open(self, now: float) -> None:
        self._start, self._last = now, now
        self._examples, self._count = 0, 0

    def _close(self) -> None:
        self.speeds.append(self._examples / (self._last - self._start))
        self._open(self._last)


def run(arguments: argparse.Namespace) -> int:
    """Write one rank's report, check reports, or do both for all ranks; return the exit code.

    Raises:
      UserError: the loader cannot be opened, or reports are missing.
    """
    if arguments.rank is not None:
        write_report(arguments, Path(_require_reports(arguments)))
        return 0
    if arguments.check:
        return check_reports(load_reports(arguments, Path(_require_reports(arguments))), arguments)
    with tempfile.TemporaryDirectory(prefix="loader_reports_") as directory:
        reports = Path(arguments.reports or directory)
        run_ranks(arguments, arguments.words, reports)
        return check_reports(load_reports(arguments, reports), arguments)


def run_ranks(arguments: argparse.Namespace, argv: Sequence[str], reports: Path) -> None:
    """Run every rank as a process of this machine, all at once."""
    reports.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, str(_PROGRAM), *argv, "--reports", str(reports)]
    processes = [
        subprocess.Popen([*program, "--rank", str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(arguments.world_size)
    ]
    for rank, process in enumerate(processes):
        _, log = process.communicate()
        if process.returncode:
            for other in processes:
                other.kill()
            lines = log.strip().splitlines() or ["no message"]
            raise UserError(f"rank {rank} failed: {lines[-1].removeprefix('error: ')}")


def write_report(arguments: argparse.Namespace, reports: Path) -> None:
    """Read one pass as this rank and write the report."""
    loader = plan_loader(arguments).open((arguments.rank, arguments.world_size))
    batches = iter(loader.batches())
    timer = PartTimer(max(1, loader.batches_per_epoch // arguments.parts), loader.rank_batch_size)
    ids: list[str] = []
    for _ in range(loader.batches_per_epoch):
        batch = next(batches)
        assert batch.ids is not None  # data.return_id is set
        ids += [name for name in batch.ids if name]
        timer.add(int(batch.mask.sum()))
    report = RankReport(
        arguments.rank,
        arguments.world_size,
        loader.role,
        loader.num_examples,
        loader.global_batch_size,
        loader.batches_per_epoch,
        ids,
        timer.finish(),
    )
    reports.mkdir(parents=True, exist_ok=True)
    temporary = reports / f"writing.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(report)))
    temporary.replace(reports / f"rank_{arguments.rank:05d}.json")


def load_reports(arguments: argparse.Namespace, reports: Path) -> list[RankReport]:
    """Read the reports of all ranks."""
    loaded = []
    for rank in range(arguments.world_size):
        path = reports / f"rank_{rank:05d}.json"
        if not path.exists():
            raise UserError(f"--reports ({reports}) has no report of rank {rank}; run that rank")
        loaded.append(RankReport(**json.loads(path.read_text())))
    return loaded


def check_reports(reports: Sequence[RankReport], arguments: argparse.Namespace) -> int:
    """Print the findings and the verdict; return 0 for PASS, 1 for FAIL."""
    problems = find_problems(reports)
    total = 0.0
    for report in reports:
        # The first part holds the start of the pipeline. A rank may have no example at all.
        speeds = sorted(report.speeds[1:] or report.speeds) or [0.0]
        median = speeds[len(speeds) // 2]
        ratio = speeds[0] / median if median else 1.0
        total += median
        print(
            f"rank {report.rank}: {report.batches} batches, {len(report.ids)} examples, images/s "
            f"min {speeds[0]:.0f}, median {median:.0f}, max {speeds[-1]:.0f}, ratio {ratio:.2f}"
        )
        if ratio < arguments.min_throughput_ratio:
            problems.append(
                f"rank {report.rank} slows down to {ratio:.2f} of its median, below "
                f"--min-throughput-ratio {arguments.min_throughput_ratio}"
            )
    print(f"all ranks: {total:.0f} images/s")
    if total < arguments.min_samples_per_sec:
        problems.append(
            f"{total:.0f} images/s lie below --min-samples-per-sec {arguments.min_samples_per_sec}"
        )
    for problem in problems:
        print(f"problem: {problem}")
    print("verdict: FAIL" if problems else "verdict: PASS")
    return 1 if problems else 0


def find_problems(reports: Sequence[RankReport]) -> list[str]:
    """Return what is wrong with the examples that the ranks read together."""
    first = reports[0]
    problems = []
    shapes = {(r.world_size, r.role, r.num_examples, r.batches) for r in reports}
    if len(shapes) > 1:
        problems.append(f"ranks disagree on world size, role, examples or batches: {shapes}")
    counts = Counter(name for report in reports for name in report.ids)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        problems.append(f"{len(twice)} ids were seen more than once: {', '.join(twice[:_SHOWN])}")
    expected = first.num_examples
    if first.role == "train":
        expected = first.batches * first.global_batch_size
    if len(counts) != expected:
        problems.append(f"{len(counts)} different ids were seen, not {expected}")
    return problems


def _require_reports(arguments: argparse.Namespace) -> str:
    if not arguments.reports:
        raise UserError("--rank and --check need --reports, a directory that all hosts see")
    return arguments.reports
