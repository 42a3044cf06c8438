"""Trains a student of text alone and taught, over several seeds, and writes the table.

All runs have the same configuration, data, steps and seeds but for who teaches. Finished runs are
kept as long as their configuration is the same, so the program can be stopped and started again.
All runs go one after the other in this process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from big_vision.input.text.windows import TokenFacts
from datasets import create_source
from proofs.study import frame as study
from utils.config.load import RunConfig, load_config
from utils.errors import UserError

ALONE = "alone"


class DistilTable(study.StudyTable):
    """Bits a byte of the test split: a row for the student alone, and one for each loss."""

    name = "distil_table"
    config_help = "YAML of the student that is taught"
    distinct = ("seeds", "losses")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if ALONE in options.losses:
            raise UserError(f"--losses {ALONE}: this row is always there; remove it")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        super().add_flags(parser)
        parser.add_argument("--losses", nargs="*", default=["kd"], help="a row for each")

    def list_rows(self) -> list[str]:
        return [ALONE, *self.options.losses]

    def create_config(self, row: str, seed: int) -> RunConfig:
        path = self.options.config
        teaching = [f"--kd={row}"] if row != ALONE else ["--kd=", "--teacher_path="]
        config = load_config(
            [
                "--config",
                path,
                *self.options.rest,
                *teaching,
                f"--train.seed={seed}",
                f"--run.run_id={row}-seed{seed}",
                "--run.overwrite=true",
            ]
        )
        if not _has_bits_per_byte(config):
            raise UserError(
                f"--config ({path!r}) gives no bits a byte of a test split; set data.test_split "
                "and use tokens of text as data.source"
            )
        return config

    @staticmethod
    def format(outcomes: Sequence[study.StudyOutcome]) -> str:
        """Format a row for each kind of run, and in how many seeds it beats the student alone.

        Lower is better. *s* is processor time.
        """
        metric = "test_bits_per_byte"
        alone = {run.seed: run.scores[metric] for run in outcomes if run.row == ALONE}
        heads = ["run", *study.format_seeds(outcomes), "mean", "spread", "gain", "better in"]
        rows = []
        for row, runs in study.group_rows(outcomes).items():
            gains = [alone[run.seed] - run.scores[metric] for run in runs if row != ALONE]
            rows.append(
                [
                    f"`{row}`",
                    *study.format_scores([run.scores[metric] for run in runs], 4),
                    *study.format_gains(gains, 4),
                    study.format_mean([run.scores["test_loss"] for run in runs], 4),
                    study.format_mean([run.seconds for run in runs]),
                ]
            )
        return study.format_markdown([*heads, "nats a token", "s"], rows)


def _has_bits_per_byte(config: RunConfig) -> bool:
    if config.train.task != "language" or not config.data.test_split:
        return False
    source = create_source(config.data)
    facts = source.describe(source.select("test"), "test")
    return isinstance(facts, TokenFacts) and bool(facts.token_bytes)


main = study.create_table_program(DistilTable, __doc__)

if __name__ == "__main__":
    sys.exit(main())
