"""Train models of several rules on the same task, alike but for the rule, and write the table.

The configuration gives data, steps and a model `delta_rules`. Each row is one model of its depth,
width and heads, whose mlp_width is set so that all have as many parameters as that one has.
Finished runs are kept as long as their configuration is the same, so the program can be stopped and
started again. All runs go one after the other in this process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from job.check import check
from lab.marked_tables import write_between
from models.delta.layers.decoder import DECAYS
from models.factory import create_model
from proofs.tables.table_runs import check_table, create_table_parser, is_finished, start
from store.record.runs import Run
from utils.config.load import RunConfig, change, dump_config, load_config
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import run_program
from utils.storage.places import to_path

ATTENTION, RWKV = "attention", "rwkv7"
ROWS = (ATTENTION, *DECAYS, RWKV)
# Metric of the test split that is compared -> the column's title, and whether more is better.
_SCORES = {"bits_per_byte": "bits a byte", "accuracy": "% right"}


@dataclass(frozen=True)
class RuleOutcome:
    """One finished run of the table.

    Args:
      row: a name in `ROWS`.
      scores: metrics of the test split.
      seconds: processor time of the run.
    """

    row: str
    seed: int
    parameters: int
    scores: Mapping[str, float]
    seconds: float


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, print the table and write it; gives the exit code."""
    return run_program(make_table, *parse_arguments(argv))


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The program's own flags, and the rest, which are keys of every run."""
    parser = create_table_parser(
        __doc__, "rules_table", "YAML of a run of model delta_rules; run.experiment names the marks"
    )
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS,
                        help="a row for each (all)")  # fmt: skip
    return parser.parse_known_args(argv)


def make_table(options: argparse.Namespace, rest: list[str]) -> None:
    """All runs, seed by seed; the table is printed, and put into the document."""
    base = read_base(options.config, rest)
    check_table(options, base.run.experiment, "rows")
    rows = [(row, seed) for seed in options.seeds for row in options.rows]
    # All are made before the first run: what is wrong is said now.
    configs = [create_config(base, row, seed) for row, seed in rows]
    outcomes = [train(*row, config) for row, config in zip(rows, configs, strict=True)]
    table = format_table(outcomes, options.seeds)
    print(table)
    if options.docs:
        write_between(options.docs, base.run.experiment, table)


def read_base(path: str, rest: list[str]) -> RunConfig:
    """The configuration that rows are made of.

    Raises:
      UserError: it is not one of rules, or has no test split.
    """
    config = load_config(["--config", path, *rest])
    if config.model.name != "delta_rules" or not config.data.test_split:
        raise UserError(
            f"--config ({path!r}) must be a run of model.name=delta_rules with a data.test_split, "
            "as configs/delta_recall.yaml is; choose another, or set both"
        )
    return config


def create_config(base: RunConfig, row: str, seed: int) -> RunConfig:
    """The configuration of a run of the table, with as many parameters as the base has."""
    name, args = choose_model(row, dict(base.model.args))
    wanted, width = count_parameters(base), args["mlp_width"]
    changed = change(base, model={"name": name, "args": args})
    found = count_parameters(changed)
    wider = change(changed, model={"args": {**args, "mlp_width": width + 1}})
    args["mlp_width"] = width + round((wanted - found) / (count_parameters(wider) - found))
    if args["mlp_width"] < 1:
        raise UserError(
            f"model.args.mlp_width ({width}) leaves no room for {row}, whose other layers have "
            "more parameters than all of the model; raise it"
        )
    return change(
        changed, model={"args": args}, train={"seed": seed},
        run={"run_id": f"{row}-seed{seed}", "overwrite": True},
    )  # fmt: skip


def choose_model(row: str, args: JsonObject) -> tuple[str, JsonObject]:
    """Name and arguments of a row's model, from those of the base."""
    if row == ATTENTION:
        # Without a short convolution one layer cannot tell what stood before a token.
        return "delta_rules", {**args, "full_every": 1, "depth": max(2, args["depth"])}
    if row != RWKV:
        return "delta_rules", {**args, "rule": row}
    ranks = ("decay_rank", "rate_rank", "value_rank", "gate_rank")
    own = {key: args[key] for key in ("depth", "width", "mlp_width", "chunk")}
    own |= dict.fromkeys(ranks, max(4, args["width"] // 4))
    return "rwkv7", {**own, "head_width": args["linear_width"]}


def count_parameters(config: RunConfig) -> int:
    """Numbers that the model of a configuration learns."""
    facts = check(config).facts
    model = create_model(config.model, **facts.model_arguments, device="meta")
    return sum(one.numel() for one in model.parameters())


def train(row: str, seed: int, config: RunConfig) -> RuleOutcome:
    """A run of the table, or what it left when it was finished earlier."""
    folder = to_path(config.run.output_dir, "run.output_dir") / config.run.experiment
    run = Run(folder / config.run.run_id)
    if not is_finished(run, dump_config(config)):
        began = time.process_time()
        start(config)
        run.update(processor_s=time.process_time() - began)
    facts = run.read()
    scores = {
        name: facts["final"][f"test_{name}"]
        for name in (*_SCORES, "loss")
        if f"test_{name}" in facts["final"]
    }
    return RuleOutcome(row, seed, count_parameters(config), scores, facts["processor_s"])


def format_table(outcomes: list[RuleOutcome], seeds: list[int]) -> str:
    """Markdown: a row for each model."""
    metric = next(name for name in _SCORES if name in outcomes[0].scores)
    columns = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [
        f"| model | parameters | {columns} | {_SCORES[metric]}, mean | spread | nats a token | s |",
        f"|---|{'---:|' * (len(seeds) + 5)}",
    ]
    for row in dict.fromkeys(one.row for one in outcomes):
        lines.append(format_row([one for one in outcomes if one.row == row], metric))
    return "\n".join(lines)


def format_row(own: list[RuleOutcome], metric: str) -> str:
    """One line of the table; *s* is processor time."""
    digits = 4 if metric == "bits_per_byte" else 2
    scores = [one.scores[metric] for one in own]
    spread = f"{statistics.stdev(scores):.{digits}f}" if len(scores) > 1 else ""
    cells = [
        f"`{own[0].row}`", f"{own[0].parameters:,}", *(f"{one:.{digits}f}" for one in scores),
        f"{statistics.fmean(scores):.{digits}f}", spread,
        f"{statistics.fmean(one.scores['loss'] for one in own):.4f}",
        f"{statistics.fmean(one.seconds for one in own):.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
