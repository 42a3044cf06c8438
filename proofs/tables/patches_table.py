"""Trains one model with all patches for XLA, without any, and without each one; writes the table.

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
import sys
from collections.abc import Sequence

from job.check import check
from models.factory import create_model
from models.patches.table import PATCHES, apply_patches
from proofs.study import frame as study
from utils.config.load import RunConfig, change, load_config
from utils.errors import UserError
from utils.programs import get_run_flags

ALL, NONE = "all", "none"
_KERNEL = "attention_kernel"
_METRIC = "test_top1"
_TITLES = {ALL: "all", NONE: "none", _KERNEL: f"all, with `{_KERNEL}`"}


class PatchesTable(study.StudyTable):
    """Top-1 of the test split in percent, with and without patches."""

    config_help = "YAML of a run with a data.test_split; run.experiment names the marks"

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.base = load_config(get_run_flags(options))
        self.name = self.base.run.experiment
        if self.base.runtime.device != "xla" or not self.base.data.test_split:
            raise UserError(
                f"--config ({options.config!r}) must be a run of runtime.device=xla, where models "
                "are patched, with a data.test_split; use another, or set both"
            )

    def list_rows(self) -> list[str]:
        """List all patches, none, and each one that changes a module of the model."""
        facts = check(self.base).facts

        def describe(skip: tuple[str, ...]) -> list[str]:
            model = create_model(self.base.model, **facts.model_arguments)
            parameters = apply_patches(model, skip=skip).parameters()
            # A weight that a patch transposes keeps its name; its shape differs.
            shapes = [str(tuple(parameter.shape)) for parameter in parameters]
            # Groups that are convolved side by side change no class.
            joined = [str(getattr(module, "joined_groups", 0)) for module in model.modules()]
            return shapes + joined + [str(type(module).__mro__) for module in model.modules()]

        patched = describe(())
        changing = [patch for patch in PATCHES if describe((patch,)) != patched]
        if importlib.util.find_spec("jax") is None and _KERNEL in changing:
            changing.remove(_KERNEL)
        return [ALL, NONE, *changing]

    def create_config(self, row: str, seed: int) -> RunConfig:
        skip: list[str] = [] if row in (ALL, NONE, _KERNEL) else [row]
        kernel = "on" if row == _KERNEL else self.base.model.attention_kernel
        return change(
            self.base,
            model={"xla_patches": row != NONE, "skip_patches": skip, "attention_kernel": kernel},
            train={"seed": seed},
            run={"run_id": f"{row}-seed{seed}", "overwrite": True},
        )

    @staticmethod
    def format(outcomes: Sequence[study.StudyOutcome]) -> str:
        """Format a row for each set of patches: its top-1, and how far the row of all differs."""
        heads = ["patches", *study.format_seeds(outcomes), "mean"]
        groups = study.group_rows(outcomes)
        rows: list[list[str]] = []
        for row, runs in groups.items():
            scores = [run.scores[_METRIC] for run in runs]
            pairs = zip(groups[ALL], scores, strict=True)
            gains = [best.scores[_METRIC] - score for best, score in pairs if row != ALL]
            title = _TITLES.get(row, f"all but `{row}`")
            differences = ", ".join(f"{gain:+.2f}" for gain in gains)
            mean = study.format_mean(gains, 2, "+")
            rows.append([title, *study.format_scores(scores, 2)[:-1], differences, mean])
        return study.format_markdown([*heads, "all patches minus this, a seed", "mean"], rows)


main = study.create_table_program(PatchesTable, __doc__)

if __name__ == "__main__":
    sys.exit(main())
