"""Compare features that were learnt without labels to those of supervised runs, on few labels.

A teacher is trained on all labels of the digits; students learn its features on the same images
without labels. Against them stand students of the same model and as many steps that were trained on
10 labels a class. Then the same probes read both, taught by the same 10 labels a class and judged
on the test split. Each seed draws its own labels. Finished runs are kept as long as their
configuration is the same, so the program can be stopped and started again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.marked_tables import write_between
from proofs.tables.table_runs import check_table, is_finished, start
from store.record.runs import Run
from tools.evaluate.__main__ import main as evaluate
from tools.feature_statistics import __main__ as feature_statistics
from tools.prepare_dataset import digits, write
from utils.config.load import dump_config, load_config
from utils.errors import UserError
from utils.log import setup_logging
from utils.programs import create_program_parser, run_program
from utils.storage.places import to_path

NAME = "labelfree_table"
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


@dataclass(frozen=True)
class ProbedRun:
    """What probes make of the features of one finished run.

    Args:
      probes: top-1 on the test split in percent, by the probe's name.
      seconds: processor time of the run.
    """

    row: str
    seed: int
    probes: dict[str, float]
    seconds: float


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, print the table and write it; gives the exit code."""
    setup_logging()
    return run_program(make_table, *parse_arguments(argv))


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The program's own flags, and the rest, which are keys of every run."""
    parser = create_program_parser(
        __doc__,
        prog=f"python -m proofs.tables.{NAME}",
        epilog="All other flags are keys of the runs' configuration, as for main.py.",
    )
    add = parser.add_argument
    add("--data-dir", default="data", help="root that holds the digits; digits_few is made there")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of each row")
    add("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), help="what is compared")
    add("--epochs", type=int, default=20, help="of a label-free student on all images")
    add("--teacher-epochs", type=int, default=40, help="of the teacher")
    add("--docs", type=Path, help="Markdown file that holds the table's marks")
    return parser.parse_known_args(argv)


def make_table(options: argparse.Namespace, rest: list[str]) -> None:
    """All runs, seed by seed; the table is printed, and put into the document."""
    check_table(options, NAME, "rows")
    make_few_labels(options.data_dir, options.seeds)
    rest = [*rest, f"--data.root={options.data_dir}", f"--run.experiment={EXPERIMENT}"]
    teacher = train(
        ["--config=configs/digits_teacher.yaml", *rest, f"--epochs={options.teacher_epochs}",
         "--run.run_id=teacher"]
    )  # fmt: skip
    readings = [
        read_features(row, seed, train(get_flags(row, seed, options, rest, teacher)), options)
        for seed in options.seeds
        for row in options.rows
    ]
    top1 = teacher.read()["final"]["test_top1"]
    table = format_table(readings, options.seeds) + f"\n\nThe teacher's own test top-1: {top1:.2f}."
    print(table)
    if options.docs:
        write_between(options.docs, NAME, table)


def make_few_labels(root: str, seeds: list[int]) -> None:
    """Write a dataset whose split `few_SEED` has 10 digits of each class of the training split.

    Raises:
      UserError: a dataset of that name has other splits.
    """
    from sklearn.datasets import load_digits

    target = write.get_root(root) / FEW / write.VERSION
    if write.is_complete(target):
        found = json.loads((target / "dataset_info.json").read_text())["splits"]
        missing = {f"few_{seed}" for seed in seeds} - {one["name"] for one in found}
        if missing:
            raise UserError(
                f"--data-dir ({root!r}) has a {FEW} without {', '.join(sorted(missing))}; remove "
                f"{str(target)!r}, and it is made again"
            )
        return
    bunch = load_digits()
    splits = digits.split_digits(bunch.target)
    train_positions = np.array(splits.pop("train"))
    chosen = {f"few_{seed}": _choose(train_positions, bunch.target, seed) for seed in seeds}
    write.write_dataset(
        digits.describe_digits(FEW, {**chosen, **splits}), target, "tfrecord", _SHARD_BYTES
    )


def _choose(positions: np.ndarray, labels: np.ndarray, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    picked = [rng.permutation(positions[labels[positions] == label])[:SHOTS] for label in range(10)]
    return rng.permutation(np.concatenate(picked)).tolist()


def get_flags(
    row: str, seed: int, options: argparse.Namespace, rest: list[str], teacher: Run
) -> list[str]:
    """Flags of a run of the table: the same model, and as many steps in either kind."""
    own = [*rest, f"--train.seed={seed}", f"--run.run_id={row}-seed{seed}"]
    if row == SUPERVISED:
        return [
            "--config=configs/digits_student.yaml", *own, f"--data.name={FEW}",
            f"--data.train_split=few_{seed}", f"--data.global_batch_size={BATCH}",
            f"--train.epochs={count_epochs(options.epochs)}",
            f"--train.eval_every_epochs={count_epochs(options.epochs)}",
        ]  # fmt: skip
    free = [
        "--config=configs/kd/digits_labelfree.yaml", *own, f"--teacher_path={teacher.path}",
        f"--train.epochs={options.epochs}",
    ]  # fmt: skip
    if row != PHI_S:
        return free
    free.append('--distill.losses=[{"name": "mse"}, {"name": "mse", "of": "patches"}]')
    place = teacher.path / "features.statistics"
    measure_statistics(free, place)
    return [*free, f"--distill.standardise={PHI_S}", f"--distill.statistics={place}"]


def count_epochs(epochs: int) -> int:
    """Of the supervised runs, which take as many steps on their few images."""
    images, batch = 1197, 64
    return max(1, epochs * (images // batch) * BATCH // (10 * SHOTS))


def measure_statistics(flags: list[str], place: Path) -> None:
    """The teacher's statistics over one epoch, unless they are there."""
    if place.exists():
        return
    words = [word for flag in flags for word in flag.split("=", 1) if flag.startswith("--config")]
    others = [flag for flag in flags if not flag.startswith("--config")]
    if feature_statistics.main([*words, *others, "--out", str(place)]):
        raise RuntimeError("the statistics were not made; the last lines say why")


def train(flags: list[str]) -> Run:
    """A run of the table, or what it left when it was finished earlier."""
    config = load_config([*flags, "--run.overwrite=true", "--run.tensorboard=false"])
    place = to_path(config.run.output_dir, "run.output_dir")
    run = Run(place / config.run.experiment / config.run.run_id)
    if not is_finished(run, dump_config(config)):
        began = time.process_time()
        start(config)
        run.update(processor_s=time.process_time() - began)
    return run


def read_features(row: str, seed: int, run: Run, options: argparse.Namespace) -> ProbedRun:
    """Probes taught by the seed's few labels, by the tool that judges any weights."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = evaluate([
            str(run.path), "--probes", "linear", "fewshot", "--json", "--probe-epochs", "300",
            f"--data.root={options.data_dir}", f"--data.name={FEW}",
            f"--data.train_split=few_{seed}", "--data.eval_split=test", "--runtime.device=cpu",
        ])  # fmt: skip
    if code:
        raise RuntimeError("the probes were not read; the last lines say why")
    found = json.loads(said.getvalue())["probes"]
    probes = {
        "linear": found["linear"]["chosen"]["top1"],
        "ridge": found["fewshot"][str(SHOTS)]["mean"],
    }
    return ProbedRun(row, seed, probes, run.read()["processor_s"])


def format_table(readings: list[ProbedRun], seeds: list[int]) -> str:
    """Markdown: a row for each kind of run and probe, and how often it beats supervision."""
    columns = " | ".join(f"seed {seed}" for seed in seeds)
    lines = [
        f"| features | probe | {columns} | mean | std | gain | better in | s |",
        f"|---|---|{'---:|' * (len(seeds) + 5)}",
    ]
    for probe in readings[0].probes:
        base = {one.seed: one.probes[probe] for one in readings if one.row == SUPERVISED}
        for row in dict.fromkeys(one.row for one in readings):
            own = [one for one in readings if one.row == row]
            lines.append(_format_row(probe, own, base))
    return "\n".join(lines)


def _format_row(probe: str, own: list[ProbedRun], base: dict[int, float]) -> str:
    scores = [one.probes[probe] for one in own]
    gains = [one.probes[probe] - base[one.seed] for one in own if one.seed in base]
    compared = own[0].row != SUPERVISED and gains
    cells = [
        ROWS[own[0].row], probe, *(f"{score:.2f}" for score in scores),
        f"{statistics.fmean(scores):.2f}",
        f"{statistics.stdev(scores):.2f}" if len(scores) > 1 else "",
        f"{statistics.fmean(gains):+.2f}" if compared else "",
        f"{sum(one > 0 for one in gains)} of {len(gains)}" if compared else "",
        f"{statistics.fmean(one.seconds for one in own):.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
