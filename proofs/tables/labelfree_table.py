"""Compares features that were learnt without labels to supervised ones, on few labels.

A teacher is trained on all labels of the digits; students learn its features on the same images
without labels. Against them stand students of the same model and as many steps that were trained on
10 labels a class. Then the same probes read both, taught by the same 10 labels a class and
evaluated on the test split. Each seed draws its own labels. Finished runs are kept as long as their
configuration is the same, so the program can be stopped and started again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from proofs.study import frame as study
from store.record.runs import Run
from tools.evaluate.__main__ import main as evaluate
from tools.feature_statistics import __main__ as feature_statistics
from tools.prepare_dataset import digits, write
from utils.config.load import RunConfig, load_config
from utils.errors import UserError

EXPERIMENT = "labelfree"
FEW = "digits_few"
SHOTS = 10
BATCH = 50  # of the supervised runs: twice in an epoch of 100 examples
SUPERVISED, PHI_S = "supervised", "phi_s"
_SHARD_BYTES = 1 << 24
# What a student learns of the teacher: flags beside those of the label-free configuration.
ROWS = {
    SUPERVISED: "10 labels a class, cross-entropy",
    "cosine": "pooled cosine and patches smooth L1, no labels",
    PHI_S: "squared error of pooled and patches at PHI-S' scale, no labels",
}


class LabelfreeTable(study.StudyTable):
    """Top-1 of probes on the test split in percent: a row for each kind of run and probe."""

    name = "labelfree_table"
    distinct = ("seeds", "rows")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        super().add_flags(parser)
        parser.set_defaults(seeds=[0, 1, 2, 3, 4])
        add = parser.add_argument
        add("--data-dir", default="data", help="root of the digits; digits_few is written there")
        add("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="what is compared")
        add("--epochs", type=int, default=20, help="of a label-free student on all images")
        add("--teacher-epochs", type=int, default=40, help="of the teacher")

    def list_rows(self) -> Sequence[str]:
        make_few_labels(self.options.data_dir, self.options.seeds)
        epochs = f"--epochs={self.options.teacher_epochs}"
        self.teacher = study.train(self._load("digits_teacher", epochs, "--run.run_id=teacher"))
        return self.options.rows

    def create_config(self, row: str, seed: int) -> RunConfig:
        own = [f"--train.seed={seed}", f"--run.run_id={row}-seed{seed}"]
        if row == SUPERVISED:
            epochs = count_epochs(self.options.epochs)
            return self._load(
                "digits_student",
                *own,
                f"--data.name={FEW}",
                f"--data.train_split=few_{seed}",
                f"--data.global_batch_size={BATCH}",
                f"--train.epochs={epochs}",
                f"--train.eval_every_epochs={epochs}",
            )
        own += [f"--teacher_path={self.teacher.path}", f"--train.epochs={self.options.epochs}"]
        if row == PHI_S:
            own.append('--distill.losses=[{"name": "mse"}, {"name": "mse", "of": "patches"}]')
            path = self.teacher.path / "features.statistics"
            if not path.exists():
                flags = ["--config", "configs/kd/digits_labelfree.yaml", *self._flags, *own]
                _write_statistics(flags, path)
            own += [f"--distill.standardise={PHI_S}", f"--distill.statistics={path}"]
        return self._load("kd/digits_labelfree", *own)

    @property
    def _flags(self) -> list[str]:
        """Flags of every run."""
        root = f"--data.root={self.options.data_dir}"
        return [*self.options.rest, root, f"--run.experiment={EXPERIMENT}"]

    def _load(self, name: str, *flags: str) -> RunConfig:
        last = ("--run.overwrite=true", "--run.tensorboard=false")
        return load_config([f"--config=configs/{name}.yaml", *self._flags, *flags, *last])

    def read_scores(self, config: RunConfig, run: Run) -> Mapping[str, float]:
        return read_probes(run, self.options.data_dir, config.train.seed)

    @staticmethod
    def format(outcomes: Sequence[study.StudyOutcome]) -> str:
        """Format a row for each kind of run and probe, and how often it beats supervision."""
        heads = ["features", "probe", *study.format_seeds(outcomes), "mean", "std"]
        rows = []
        for probe in outcomes[0].scores:
            base = {run.seed: run.scores[probe] for run in outcomes if run.row == SUPERVISED}
            for row, runs in study.group_rows(outcomes).items():
                compared = [run for run in runs if row != SUPERVISED and run.seed in base]
                gains = [run.scores[probe] - base[run.seed] for run in compared]
                rows.append(
                    [
                        ROWS[row],
                        probe,
                        *study.format_scores([run.scores[probe] for run in runs], 2),
                        *study.format_gains(gains, 2),
                        study.format_mean([run.seconds for run in runs]),
                    ]
                )
        return study.format_markdown([*heads, "gain", "better in", "s"], rows, texts=2)

    def get_note(self) -> str:
        top1 = self.teacher.read()["final"]["test_top1"]
        return f"\n\nThe teacher's own test top-1: {top1:.2f}."


def make_few_labels(root: str, seeds: Sequence[int]) -> None:
    """Write a dataset whose split `few_SEED` has 10 digits of each class of the training split.

    Raises:
      UserError: a dataset of that name has other splits.
    """
    from sklearn.datasets import load_digits

    target = write.get_root(root) / FEW / write.VERSION
    if write.is_complete(target):
        splits = json.loads((target / "dataset_info.json").read_text())["splits"]
        missing = {f"few_{seed}" for seed in seeds} - {split["name"] for split in splits}
        if missing:
            raise UserError(
                f"--data-dir ({root!r}) has a {FEW} without {', '.join(sorted(missing))}; remove "
                f"{str(target)!r}, and it is written again"
            )
        return
    labels = np.asarray(load_digits(return_X_y=True)[1])
    splits = digits.split_digits(labels)
    train_positions = np.array(splits.pop("train"))
    chosen = {f"few_{seed}": _choose(train_positions, labels, seed) for seed in seeds}
    write.write_dataset(
        digits.describe_digits(FEW, {**chosen, **splits}), target, "tfrecord", _SHARD_BYTES
    )


def _choose(positions: np.ndarray, labels: np.ndarray, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    picked = [rng.permutation(positions[labels[positions] == label])[:SHOTS] for label in range(10)]
    return rng.permutation(np.concatenate(picked)).tolist()


def count_epochs(epochs: int) -> int:
    """Count the epochs of supervised runs, which take as many steps on their few images."""
    images, batch = 1197, 64
    return max(1, epochs * (images // batch) * BATCH // (10 * SHOTS))


def _write_statistics(flags: Sequence[str], path: Path) -> None:
    """Write the teacher's statistics over one epoch."""
    if feature_statistics.main([*flags, "--out", str(path)]):
        raise RuntimeError("the statistics were not written; the last lines say why")


def read_probes(run: Run, root: str, seed: int) -> dict[str, float]:
    """Train probes on the seed's few labels by `tools.evaluate`; return their test top-1."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = evaluate(
            [
                str(run.path),
                "--probes",
                "linear",
                "fewshot",
                "--json",
                "--probe-epochs",
                "300",
                f"--data.root={root}",
                f"--data.name={FEW}",
                f"--data.train_split=few_{seed}",
                "--data.eval_split=test",
                "--runtime.device=cpu",
            ]
        )
    if code:
        raise RuntimeError("the probes were not read; the last lines say why")
    probes = json.loads(printed.getvalue())["probes"]
    ridge = probes["fewshot"][str(SHOTS)]["mean"]
    return {"linear": probes["linear"]["chosen"]["top1"], "ridge": ridge}


main = study.create_table_program(LabelfreeTable, __doc__)

if __name__ == "__main__":
    sys.exit(main())
