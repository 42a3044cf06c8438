"""Train one model with all patches for XLA, without any, and without each one; write the table.

    python -m proofs.tables.patches_table --config configs/digits_student.yaml

Patches (`models/patches/table.py`) are to change how fast a step is, and no accuracy. A row for
each patch that changes the model of the configuration. Where there is no TPU, `attention_kernel` is
off in the others, and on in its own row, interpreted. Differences are of the same seed, in points
of the test split's top-1. Finished runs are kept as long as their configuration is the same, so the
program can be stopped and started again. All runs go one after the other in this process.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Mapping

from job.check import check
from lab.marked_tables import write_between
from models.factory import create_model
from models.patches.table import PATCHES, apply_patches
from proofs.tables.table_runs import check_table, create_table_parser, is_finished, start
from store.record.runs import Run
from utils.config.load import RunConfig, change, dump_config, load_config
from utils.errors import UserError
from utils.programs import run_program
from utils.storage.places import to_path

ALL, NONE = "all", "none"
_KERNEL = "attention_kernel"
_METRIC = "test_top1"


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, print the table and write it; gives the exit code."""
    return run_program(make_table, *parse_arguments(argv))


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The program's own flags, and the rest, which are keys of every run."""
    parser = create_table_parser(
        __doc__,
        "patches_table",
        "YAML of a run with a data.test_split; run.experiment names the marks",
    )
    return parser.parse_known_args(argv)


def make_table(options: argparse.Namespace, rest: list[str]) -> None:
    """All runs, seed by seed; the table is printed, and put into the document."""
    base = load_config(["--config", options.config, *rest])
    if base.runtime.device != "xla" or not base.data.test_split:
        raise UserError(
            f"--config ({options.config!r}) must be a run of runtime.device=xla, where models are "
            "patched, with a data.test_split; choose another, or set both"
        )
    check_table(options, base.run.experiment)
    rows = list_rows(base)
    scores: dict[str, list[float]] = {row: [] for row in rows}
    for seed in options.seeds:
        for row in rows:
            scores[row].append(train(create_config(base, row, seed)))
    table = format_table(scores, options.seeds)
    print(table)
    if options.docs:
        write_between(options.docs, base.run.experiment, table)


def list_rows(base: RunConfig) -> list[str]:
    """All patches, none, and each one that changes a module of the model."""
    facts = check(base).facts

    def get_classes(skip: tuple[str, ...]) -> list[str]:
        model = create_model(base.model, **facts.model_arguments)
        # Of a weight that lies otherwise the module has the same name.
        shapes = [str(tuple(one.shape)) for one in apply_patches(model, skip=skip).parameters()]
        # Groups that are convolved side by side change no class.
        joined = [str(getattr(one, "joined_groups", 0)) for one in model.modules()]
        return shapes + joined + [str(type(one).__mro__) for one in model.modules()]

    patched = get_classes(())
    changing = [one for one in PATCHES if get_classes((one,)) != patched]
    if importlib.util.find_spec("jax") is None and _KERNEL in changing:
        changing.remove(_KERNEL)
    return [ALL, NONE, *changing]


def create_config(base: RunConfig, row: str, seed: int) -> RunConfig:
    """The configuration of a run of the table."""
    skip = [] if row in (ALL, NONE, _KERNEL) else [row]
    kernel = "on" if row == _KERNEL else base.model.attention_kernel
    return change(
        base,
        model={"xla_patches": row != NONE, "skip_patches": skip, "attention_kernel": kernel},
        train={"seed": seed},
        run={"run_id": f"{row}-seed{seed}", "overwrite": True},
    )


def train(config: RunConfig) -> float:
    """Top-1 of a run of the table, in per cent, or of what it left when it was finished earlier."""
    folder = to_path(config.run.output_dir, "run.output_dir") / config.run.experiment
    run = Run(folder / config.run.run_id)
    if not is_finished(run, dump_config(config)):
        start(config)
    return run.read()["final"][_METRIC]


def format_table(scores: Mapping[str, list[float]], seeds: list[int]) -> str:
    """Markdown: a row for each set of patches, its top-1, and how far the row of all differs."""
    columns = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [
        f"| patches | {columns} | mean | all patches minus this, a seed | mean |",
        f"|---|{'---:|' * (len(seeds) + 3)}",
    ]
    titles = {ALL: "all", NONE: "none", _KERNEL: f"all, with `{_KERNEL}`"}
    for row, own in scores.items():
        gains = [with_all - one for with_all, one in zip(scores[ALL], own, strict=True)]
        differences = "" if row == ALL else ", ".join(f"{one:+.2f}" for one in gains)
        cells = [
            titles.get(row, f"all but `{row}`"), *(f"{one:.2f}" for one in own),
            f"{statistics.fmean(own):.2f}", differences,
            "" if row == ALL else f"{statistics.fmean(gains):+.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
