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
from pathlib import Path

from store import Run
from tools.proofs.kd_table.__main__ import is_finished, start
from utils.config import dump_config, load_config
from utils.errors import UserError
from utils.programs import create_program_parser, run_program

ALONE = "alone"
BEGIN, END = "<!-- distil_table: begin -->", "<!-- distil_table: end -->"


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
    parser = create_program_parser(
        __doc__,
        prog="python -m tools.distil_table",
        epilog="All other flags are keys of the runs' configuration, as for main.py.",
    )
    parser.add_argument("--config", required=True, help="YAML of the student that is taught")
    parser.add_argument("--losses", nargs="*", default=["kd"], help="a row for each")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--docs", type=Path, help="Markdown file that holds the table's marks")
    return parser.parse_known_args(argv)


def make_table(options: argparse.Namespace, rest: list[str]) -> None:
    """All runs, seed by seed; the table is printed, and put into the document."""
    outcomes = [
        train(row, seed, options.config, rest)
        for seed in options.seeds
        for row in (ALONE, *options.losses)
    ]
    table = format_table(outcomes, options.seeds)
    print(table)
    if options.docs:
        write_between(options.docs, table)


def train(row: str, seed: int, config_path: str, rest: list[str]) -> TextOutcome:
    """A run of the table, or what it left when it was finished earlier.

    Raises:
      UserError: its evaluation tells no bits a byte.
    """
    teaching = [f"--kd={row}"] if row != ALONE else ["--kd=", "--teacher_path="]
    config = load_config([
        "--config", config_path, *rest, *teaching, f"--train.seed={seed}",
        f"--run.run_id={row}-seed{seed}", "--run.overwrite=true",
    ])  # fmt: skip
    run = Run(Path(config.run.output_dir) / config.run.experiment / config.run.run_id)
    if not is_finished(run, dump_config(config)):
        began = time.process_time()
        start(config)
        run.update(processor_s=time.process_time() - began)
    facts = run.read()
    final = facts["final"]
    if "test_bits_per_byte" not in final:
        raise UserError(
            f"--config ({config_path!r}) gives no bits a byte of a test split; set data.test_split "
            "and take tokens of text as data.source"
        )
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


def write_between(path: Path, table: str) -> None:
    """Put the table between its two marks in a Markdown file.

    Raises:
      UserError: the marks are not there.
    """
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise UserError(f"--docs ({str(path)!r}) lacks the lines {BEGIN} and {END}; add them")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
