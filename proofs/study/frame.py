"""The frame of a study: trains what is missing, and formats and writes the table."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import job
from lab.marked_tables import check_document, write_between
from store.record.ids import CONFIG_FILE
from store.record.runs import Run
from utils.config.load import RunConfig, dump_config
from utils.errors import UserError
from utils.programs import CommandLine, create_program_parser
from utils.storage.places import to_path

EPILOG = "All other flags are keys of the runs' configuration, as for main.py."


@dataclass(frozen=True)
class StudyOutcome:
    """One finished run of a study: its scores by metric, and its processor time."""

    row: str
    seed: int
    scores: Mapping[str, float]
    seconds: float = 0.0


class StudyTable:
    """A table of a document; its constructor refuses flags that do not fit."""

    # what --config must be; empty: the table has configurations of its own
    config_help: ClassVar[str] = ""
    distinct: ClassVar[Sequence[str]] = ("seeds",)  # flags whose values must differ
    name: str  # of the table's marks in a document

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of most tables; a subclass adds its own."""
        if cls.config_help:
            parser.add_argument("--config", required=True, help=cls.config_help)
        parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of each row")
        parser.add_argument("--docs", type=Path, help="Markdown file that holds the table's marks")

    def list_rows(self) -> Sequence[str]:
        """Prepare what the runs need, and return the names of the rows."""
        raise NotImplementedError

    def create_config(self, row: str, seed: int) -> RunConfig:
        """Create the configuration of one run; a UserError if it does not fit."""
        raise NotImplementedError

    def read_scores(self, config: RunConfig, run: Run) -> Mapping[str, float]:
        """Return what the table shows of a finished run."""
        return run.read()["final"]

    @staticmethod
    def format(outcomes: Sequence[StudyOutcome]) -> str:
        """Format the outcomes, which are in the order of seeds, as Markdown."""
        raise NotImplementedError

    def get_note(self) -> str:
        """Return the text behind the table."""
        return ""

    def write(self) -> None:
        """Train what is missing, seed by seed; print the table and write it into the document."""
        # All configurations are made before the first run, so that errors come at once.
        runs = [
            (row, seed, self.create_config(row, seed))
            for seed, row in itertools.product(self.options.seeds, self.list_rows())
        ]
        text = self.format([self._measure(*run) for run in runs]) + self.get_note()
        print(text)
        if self.options.docs:
            write_between(self.options.docs, self.name, text)

    def _measure(self, row: str, seed: int, config: RunConfig) -> StudyOutcome:
        run = train(config)
        # NaN if the run was finished by another program.
        seconds = run.read().get("processor_s", float("nan"))
        return StudyOutcome(row, seed, self.read_scores(config, run), seconds)


def create_table_program(table_class: type[StudyTable], doc: str | None) -> CommandLine:
    """Create the program of a table, whose help is the docstring of its module."""

    def create_parser() -> argparse.ArgumentParser:
        spec = sys.modules[table_class.__module__].__spec__
        assert spec is not None  # it was imported, or runs by -m
        parser = create_program_parser(doc, prog=f"python -m {spec.name}", epilog=EPILOG)
        table_class.add_flags(parser)
        return parser

    create_parser.__module__ = table_class.__module__  # where readers of a program look for it

    def write_table(options: argparse.Namespace) -> None:
        table = table_class(options)
        require_distinct(options, *table.distinct)
        check_document(options.docs, table.name)
        table.write()

    return CommandLine(create_parser, write_table, takes_keys=True, logs=True)


def require_distinct(options: argparse.Namespace, *flags: str) -> None:
    """Raise a UserError for a flag with the same value twice; flags without a value pass."""
    for flag in flags:
        given = getattr(options, flag) or []
        if len(set(given)) < len(given):
            raise UserError(f"--{flag.replace('_', '-')} contains duplicates; name each value once")


def train(config: RunConfig) -> Run:
    """Return the finished run of this very configuration, trained here if it is missing."""
    folder = to_path(config.run.output_dir, "run.output_dir") / config.run.experiment
    run = Run(folder / config.run.run_id)
    is_complete = run.read().get("status") == "complete"
    text = (run.path / CONFIG_FILE).read_text(encoding="utf-8") if is_complete else ""
    if text != dump_config(config):
        began = time.process_time()
        if job.start(config):
            raise RuntimeError("the run was stopped; its last lines say why")
        run.update(processor_s=time.process_time() - began)
    return run


def group_rows(outcomes: Iterable[StudyOutcome]) -> dict[str, list[StudyOutcome]]:
    """Group outcomes by row, both in their order."""
    groups: dict[str, list[StudyOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.row, []).append(outcome)
    return groups


def format_markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """Format a Markdown table whose first columns are text, and whose others are numbers."""
    marks = "---|" * texts + "---:|" * (len(heads) - texts)
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([head, f"|{marks}", *lines])


def format_seeds(outcomes: Iterable[StudyOutcome]) -> list[str]:
    """Format the heads of the columns of seeds."""
    return [f"seed {seed}" for seed in dict.fromkeys(outcome.seed for outcome in outcomes)]


def format_mean(scores: Sequence[float], digits: int = 0, sign: str = "") -> str:
    """Format a mean; empty if there are no scores."""
    return f"{statistics.fmean(scores):{sign}.{digits}f}" if scores else ""


def format_scores(scores: Sequence[float], digits: int) -> list[str]:
    """Format each score, their mean and their standard deviation (empty if there is one score)."""
    spread = f"{statistics.stdev(scores):.{digits}f}" if len(scores) > 1 else ""
    return [*(f"{score:.{digits}f}" for score in scores), format_mean(scores, digits), spread]


def format_gains(gains: Sequence[float], digits: int) -> list[str]:
    """Format the mean of gains, and how many of them are above 0; empty cells without gains."""
    better = f"{sum(gain > 0 for gain in gains)} of {len(gains)}" if gains else ""
    return [format_mean(gains, digits, "+"), better]
