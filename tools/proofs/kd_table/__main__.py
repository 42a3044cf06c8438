"""Train the digits student alone, by every loss and every kind of teacher, and write the table.

One command that can be stopped and started again: finished runs are kept as long as their
configuration is the same. Native CPU, one thread, all runs in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from store import Run
from tools.proofs.kd_table.entries import ENTRIES, TEACHING, Entry
from tools.proofs.table_runs import is_finished, start, write_between
from utils.config import RunConfig, dump_config, load_config
from utils.errors import UserError
from utils.programs import DefaultsHelp, ProgramParser

ROOT = Path(__file__).resolve().parents[3]

EXPERIMENT = "kd_table"


@dataclass(frozen=True)
class TableEntry:
    """One run of the table.

    Args:
      top1: on the test split, in percent; none where the run failed.
      seconds: processor time from the checks to the export; the machine may be shared.
      error: why it failed; empty.
    """

    name: str
    seed: int
    top1: float | None
    seconds: float
    error: str = ""


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and write the table; 1 if a run failed."""
    options = parse_arguments(argv)
    entries = [one for one in ENTRIES if not options.only or one.name in options.only]
    teacher_seeds = sorted({s for seed in options.seeds for s in (seed, get_other(seed))})
    jobs = [(TEACHING, seed) for seed in teacher_seeds]
    jobs += [(entry, seed) for seed in options.seeds for entry in entries]
    # All YAMLs are read before the first run: one that is edited meanwhile changes no row.
    configs = [read_config(entry, seed, options) for entry, seed in jobs]
    outcomes = []
    for (entry, seed), config in zip(jobs, configs, strict=True):
        outcomes.append(run_entry(entry, seed, config, options))
        write_json(outcomes, options)
    table = format_table(outcomes, options)
    print(table)
    if options.docs:
        write_between(options.docs, EXPERIMENT, table)
    return int(any(one.error for one in outcomes))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The tool's flags."""
    parser = ProgramParser(
        prog="python -m tools.proofs.kd_table",
        description=__doc__.splitlines()[0],
        formatter_class=DefaultsHelp,
    )
    parser.add_argument("--data-dir", type=Path, default=ROOT / "data", help="dataset directory")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs", help="where runs go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds")
    parser.add_argument("--epochs", type=int, default=20, help="epochs of each student")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows to run (all)")
    parser.add_argument("--limit-s", type=int, default=60, help="processor seconds of a run")
    parser.add_argument("--docs", type=Path, help="Markdown file that holds the table's marks")
    return parser.parse_args(argv)


def read_config(entry: Entry, seed: int, options: argparse.Namespace) -> RunConfig | UserError:
    """The configuration of one run, or what is wrong with it."""
    try:
        return load_config(get_flags(entry, seed, options))
    except UserError as error:
        return error


def run_entry(
    entry: Entry, seed: int, config: RunConfig | UserError, options: argparse.Namespace
) -> TableEntry:
    """A finished run as it stands, or a new one; a failure is an outcome too."""
    run = Run(options.output_dir / EXPERIMENT / get_run_id(entry, seed))
    began = time.process_time()
    try:
        if isinstance(config, UserError):
            raise config
        if not is_finished(run, dump_config(config)):
            print(f"--- {entry.name}, seed {seed}", flush=True)
            with limit_time(options.limit_s):
                if entry.cache_top_k:
                    store_answers(entry, seed, options)
                start(config)
            run.update(processor_s=time.process_time() - began)
    except (UserError, RuntimeError, TimeoutError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(f"failed: {reason}", flush=True)
        return TableEntry(entry.name, seed, None, time.process_time() - began, reason)
    facts = run.read()
    return TableEntry(entry.name, seed, facts["final"]["test_top1"], facts["processor_s"])


def get_flags(entry: Entry, seed: int, options: argparse.Namespace) -> list[str]:
    """The flags of main.py for one run."""
    flags = [
        "--config", str(ROOT / entry.config), f"--data.root={options.data_dir}",
        f"--run.output_dir={options.output_dir}", f"--run.experiment={EXPERIMENT}",
        f"--run.run_id={get_run_id(entry, seed)}", "--run.overwrite=true",
        "--run.tensorboard=false", f"--train.seed={seed}", "--runtime.device=cpu",
        "--runtime.num_threads=1", "--train.eval_every_epochs=1000",
        "--train.checkpoint_every_epochs=1000",
    ]  # fmt: skip
    if not entry.own_epochs:
        flags.append(f"--train.epochs={options.epochs}")
    if entry.losses:
        flags.append(f"--distill.losses={json.dumps(entry.losses)}")
    place = {
        "store": str(options.output_dir / EXPERIMENT),
        "cache": str(get_cache(entry, seed, options)),
        "seed": str(seed),
        "other": str(get_other(seed)),
    }
    return flags + [fill(flag, place) for flag in entry.flags]


def get_other(seed: int) -> int:
    """The seed of the second of two teachers."""
    return seed + 1


def fill(text: str, values: dict[str, str]) -> str:
    """`{name}` replaced by its value; other braces are JSON and stay."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def get_run_id(entry: Entry, seed: int) -> str:
    """Directory of a run below the experiment's."""
    return f"{entry.name}-seed{seed}"


def get_cache(entry: Entry, seed: int, options: argparse.Namespace) -> Path:
    """Where an entry's stored answers lie."""
    return options.output_dir / EXPERIMENT / "answers" / get_run_id(entry, seed)


def store_answers(entry: Entry, seed: int, options: argparse.Namespace) -> None:
    """Ask the teacher once about every step of the run."""
    from tools import cache_teacher

    out = get_cache(entry, seed, options)
    shutil.rmtree(out, ignore_errors=True)
    own = ["--out", str(out), "--top-k", str(entry.cache_top_k), "--epochs", str(options.epochs)]
    if cache_teacher.main([*own, *get_flags(entry, seed, options)]):
        raise RuntimeError("the teacher's answers could not be stored; the lines above say why")


@contextmanager
def limit_time(seconds: int) -> Iterator[None]:
    """Ends the block by a TimeoutError after that many seconds of processor time."""

    def stop(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"longer than {seconds} s of processor time; raise --limit-s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def write_json(outcomes: list[TableEntry], options: argparse.Namespace) -> None:
    """All outcomes so far, beside the runs."""
    path = options.output_dir / EXPERIMENT / "table.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [vars(one) for one in outcomes]
    path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def format_table(outcomes: list[TableEntry], options: argparse.Namespace) -> str:
    """Markdown: a row for each entry, with what it cost and what failed."""
    seeds = " ".join(map(str, options.seeds))
    lines = [
        f"Test top-1 on 300 digits, seeds {seeds}, {options.epochs} epochs; spread is the sample "
        "standard deviation, gain is over the mean of the same student alone, s is processor time.",
        f"{describe_machine()}.",
        "",
        f"| run | what | {' | '.join(f'seed {s}' for s in options.seeds)} | mean | spread | gain "
        "| s |",
        f"|---|---|{'---:|' * (len(options.seeds) + 4)}",
    ]
    shown = [one for one in outcomes if one.seed in options.seeds]
    means = {e.name: get_mean(shown, e.name) for e in (TEACHING, *ENTRIES)}
    for entry in (TEACHING, *ENTRIES):
        own = [one for one in shown if one.name == entry.name]
        if own:
            lines.append(format_row(entry, own, means))
    failures = [f"- {one.name}, seed {one.seed}: {one.error}" for one in outcomes if one.error]
    lines += ["", "Failed:", *failures] if failures else ["", "No run failed."]
    return "\n".join(lines)


def format_row(entry: Entry, own: list[TableEntry], means: dict[str, float | None]) -> str:
    """One line of the table."""
    values = [one.top1 for one in own if one.top1 is not None]
    cells = ["failed" if one.top1 is None else f"{one.top1:.1f}" for one in own]
    mean = f"{statistics.fmean(values):.2f}" if values else ""
    spread = f"{statistics.stdev(values):.2f}" if len(values) > 1 else ""
    base, mine = means[entry.compare_with], means[entry.name]
    is_base = entry.compare_with == entry.name
    gain = "" if is_base or base is None or mine is None else f"{mine - base:+.2f}"
    seconds = statistics.fmean(one.seconds for one in own)
    return (
        f"| `{entry.name}` | {entry.what} | {' | '.join(cells)} | {mean} | {spread} | {gain} "
        f"| {seconds:.0f} |"
    )


def get_mean(outcomes: list[TableEntry], name: str) -> float | None:
    """Mean over the seeds that did not fail."""
    values = [one.top1 for one in outcomes if one.name == name and one.top1 is not None]
    return statistics.fmean(values) if values else None


def describe_machine() -> str:
    """Cores and processor of this machine."""
    cores = len(os.sched_getaffinity(0))
    return f"Native CPU runtime, 1 thread a run, {cores} cores ({platform.machine()})"


if __name__ == "__main__":
    sys.exit(main())
