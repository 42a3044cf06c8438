"""Train a student of text alone and taught, over several seeds, and write the table.

All runs have the same configuration, data, steps and seeds but for who teaches. Finished runs are
kept as long as their configuration is the same, so the program can be stopped and started again.
All runs go one after the other in this process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass

from big_vision.input.text.windows import TokenFacts
from datasets import create_source
from lab.marked_tables import write_between
from proofs.tables.table_runs import check_table, create_table_parser, is_finished, start
from store.record.runs import Run
from utils.config.load import RunConfig, dump_config, load_config
from utils.errors import UserError
from utils.programs import run_program
from utils.storage.places import to_path

ALONE = "alone"
NAME = "distil_table"


@dataclass(frozen=True)
class TextOutcome:
    """One finished run of the table.

    Args:
      row: `alone`, or the loss that it was taught by.
      score: bits a byte of the test split.
      seconds: processor time of the run.
    """

    row: str
    seed: int
    score: float
    loss: float
    seconds: float


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, print the table and write it; gives the exit code."""
    return run_program(make_table, *parse_arguments(argv))


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The program's own flags, and the rest, which are keys of every run."""
    parser = create_table_parser(__doc__, "distil_table", "YAML of the student that is taught")
    parser.add_argument("--losses", nargs="*", default=["kd"], help="a row for each")
    return parser.parse_known_args(argv)


def make_table(options: argparse.Namespace, rest: list[str]) -> None:
    """All runs, seed by seed; the table is printed, and put into the document."""
    check_table(options, NAME, "losses")
    if ALONE in options.losses:
        raise UserError(f"--losses {ALONE}: this row is always there; leave it out")
    rows = [(row, seed) for seed in options.seeds for row in (ALONE, *options.losses)]
    # All are read before the first run, which may take an hour: what is wrong is said now.
    configs = [read_config(row, seed, options.config, rest) for row, seed in rows]
    outcomes = [train(*row, config) for row, config in zip(rows, configs, strict=True)]
    table = format_table(outcomes, options.seeds)
    print(table)
    if options.docs:
        write_between(options.docs, NAME, table)


def read_config(row: str, seed: int, path: str, rest: list[str]) -> RunConfig:
    """The configuration of a run of the table.

    Raises:
      UserError: its evaluation would tell no bits a byte.
    """
    teaching = [f"--kd={row}"] if row != ALONE else ["--kd=", "--teacher_path="]
    config = load_config([
        "--config", path, *rest, *teaching, f"--train.seed={seed}",
        f"--run.run_id={row}-seed{seed}", "--run.overwrite=true",
    ])  # fmt: skip
    if not _tells_bytes(config):
        raise UserError(
            f"--config ({path!r}) gives no bits a byte of a test split; set data.test_split and "
            "take tokens of text as data.source"
        )
    return config


def _tells_bytes(config: RunConfig) -> bool:
    if config.train.task != "language" or not config.data.test_split:
        return False
    source = create_source(config.data)
    facts = source.describe(source.select("test"), "test")
    return isinstance(facts, TokenFacts) and bool(facts.token_bytes)


def train(row: str, seed: int, config: RunConfig) -> TextOutcome:
    """A run of the table, or what it left when it was finished earlier."""
    run = Run(
        to_path(config.run.output_dir, "run.output_dir") / config.run.experiment / config.run.run_id
    )
    if not is_finished(run, dump_config(config)):
        began = time.process_time()
        start(config)
        run.update(processor_s=time.process_time() - began)
    facts = run.read()
    final = facts["final"]
    score, loss = final["test_bits_per_byte"], final["test_loss"]
    return TextOutcome(row, seed, score, loss, facts["processor_s"])


def format_table(outcomes: list[TextOutcome], seeds: list[int]) -> str:
    """Markdown: a row for each kind of run, and in how many seeds it beats the student alone."""
    columns = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [
        f"| run | {columns} | mean | spread | gain | better in | nats a token | s |",
        f"|---|{'---:|' * (len(seeds) + 6)}",
    ]
    alone = {one.seed: one.score for one in outcomes if one.row == ALONE}
    for row in dict.fromkeys(one.row for one in outcomes):
        own = [one for one in outcomes if one.row == row]
        lines.append(format_row(row, own, alone))
    return "\n".join(lines)


def format_row(row: str, own: list[TextOutcome], alone: dict[int, float]) -> str:
    """One line of the table; lower is better."""
    scores = [one.score for one in own]
    gains = [alone[one.seed] - one.score for one in own]
    spread = f"{statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
    gain = f"{statistics.fmean(gains):+.4f}" if row != ALONE else ""
    better = f"{sum(one > 0 for one in gains)} of {len(gains)}" if row != ALONE else ""
    cells = [
        f"`{row}`", *(f"{score:.4f}" for score in scores), f"{statistics.fmean(scores):.4f}",
        spread, gain, better, f"{statistics.fmean(one.loss for one in own):.4f}",
        f"{statistics.fmean(one.seconds for one in own):.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
