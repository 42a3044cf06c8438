"""Trains models of several rules on the same task, alike but for the rule, and writes the table.

The configuration gives data, steps and a model `delta_rules`. Each row is one model of its depth,
width and heads, whose mlp_width is set so that all have as many parameters as that one has.
Finished runs are kept as long as their configuration is the same, so the program can be stopped and
started again. All runs go one after the other in this process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from job.check import check
from models.delta.layers.decoder import DECAYS
from models.factory import create_model
from proofs.study import frame as study
from store.record.runs import Run
from utils.config.load import RunConfig, change, load_config
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import get_run_flags

ATTENTION, RWKV = "attention", "rwkv7"
ROWS = (ATTENTION, *DECAYS, RWKV)
# Metric of the test split that is compared -> the column's title, and its digits.
_SCORES = {"test_bits_per_byte": ("bits a byte", 4), "test_accuracy": ("% right", 2)}


class RulesTable(study.StudyTable):
    """The test split's score of models of equal size: a row for each rule."""

    config_help = "YAML of a run of model delta_rules; run.experiment names the marks"
    distinct = ("seeds", "rows")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.base = load_config(get_run_flags(options))
        self.name = self.base.run.experiment
        if self.base.model.name != "delta_rules" or not self.base.data.test_split:
            raise UserError(
                f"--config ({options.config!r}) must be a run of model.name=delta_rules with a "
                "data.test_split, as configs/delta_recall.yaml is; use another, or set both"
            )

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        super().add_flags(parser)
        parser.add_argument(
            "--rows", nargs="+", default=list(ROWS), choices=ROWS, help="a row for each (all)"
        )

    def list_rows(self) -> Sequence[str]:
        return self.options.rows

    def create_config(self, row: str, seed: int) -> RunConfig:
        """Create the configuration of a run, with as many parameters as the base has."""
        name, args = choose_model(row, dict(self.base.model.args))
        wanted, width = count_parameters(self.base), args["mlp_width"]
        changed = change(self.base, model={"name": name, "args": args})
        count = count_parameters(changed)
        wider = change(changed, model={"args": {**args, "mlp_width": width + 1}})
        args["mlp_width"] = width + round((wanted - count) / (count_parameters(wider) - count))
        if args["mlp_width"] < 1:
            raise UserError(
                f"model.args.mlp_width ({width}) leaves no room for {row}, whose other layers have "
                "more parameters than all of the model; raise it"
            )
        return change(
            changed,
            model={"args": args},
            train={"seed": seed},
            run={"run_id": f"{row}-seed{seed}", "overwrite": True},
        )

    def read_scores(self, config: RunConfig, run: Run) -> Mapping[str, float]:
        return {**super().read_scores(config, run), "parameters": count_parameters(config)}

    @staticmethod
    def format(outcomes: Sequence[study.StudyOutcome]) -> str:
        """Format a row for each model; *s* is processor time."""
        metric = next(name for name in _SCORES if name in outcomes[0].scores)
        title, digits = _SCORES[metric]
        heads = ["model", "parameters", *study.format_seeds(outcomes), f"{title}, mean", "spread"]
        return study.format_markdown(
            [*heads, "nats a token", "s"],
            [
                [
                    f"`{row}`",
                    f"{runs[0].scores['parameters']:,}",
                    *study.format_scores([run.scores[metric] for run in runs], digits),
                    study.format_mean([run.scores["test_loss"] for run in runs], 4),
                    study.format_mean([run.seconds for run in runs]),
                ]
                for row, runs in study.group_rows(outcomes).items()
            ],
        )


def choose_model(row: str, args: JsonObject) -> tuple[str, JsonObject]:
    """Return name and arguments of a row's model, from those of the base."""
    if row == ATTENTION:
        # Without a short convolution one layer cannot see what stood before a token.
        return "delta_rules", {**args, "full_every": 1, "depth": max(2, args["depth"])}
    if row != RWKV:
        return "delta_rules", {**args, "rule": row}
    ranks = ("decay_rank", "rate_rank", "value_rank", "gate_rank")
    own = {key: args[key] for key in ("depth", "width", "mlp_width", "chunk")}
    own |= dict.fromkeys(ranks, max(4, args["width"] // 4))
    return "rwkv7", {**own, "head_width": args["linear_width"]}


def count_parameters(config: RunConfig) -> int:
    """Count the parameters of a configuration's model."""
    facts = check(config).facts
    model = create_model(config.model, **facts.model_arguments, device="meta")
    return sum(parameter.numel() for parameter in model.parameters())


main = study.create_table_program(RulesTable, __doc__)

if __name__ == "__main__":
    sys.exit(main())
