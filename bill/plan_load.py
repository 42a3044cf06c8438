"""Counts a run whose dataset, weights and teachers need not be here."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from big_vision.input.splits import parse_split
from bill.step.synthetic_run import create_synthetic_run, get_default_sizes
from datasets import describe_dataset
from job.summary import create_load
from models.factory import create_model
from store.quality.slices import Load
from tasks import TASKS
from tasks.work import measure_step
from utils.config.load import change
from utils.errors import UserError
from utils.storage.places import is_there

if TYPE_CHECKING:
    from utils.config.load import RunConfig

# Classes and examples of the splits of datasets that recipes use, by their names in TFDS.
CLASSES = {
    "imagenet2012": 1000,
    "cifar10": 10,
    "cifar100": 100,
    "oxford_iiit_pet": 37,
    "digits": 10,
}
EXAMPLES = {
    "imagenet2012": {"train": 1_281_167, "validation": 50_000},
    "cifar10": {"train": 50_000, "test": 10_000},
    "cifar100": {"train": 50_000, "test": 10_000},
    "oxford_iiit_pet": {"train": 3_680, "test": 3_669},
    "digits": {"train": 1_197, "validation": 300, "test": 300},
}
_ROLES = {"train": "train_split", "eval": "eval_split"}
_BATCHES = 2  # of the synthetic data


def measure_load(config: RunConfig, examples: Mapping[str, int], sizes: Mapping[str, int]) -> Load:
    """Count a run's step; UserError if its shapes or the sizes of its data are unknown.

    Args:
      examples: of the splits by role, for a dataset that is not here.
      sizes: others that the step depends on, such as num_classes.
    """
    counts = count_examples(config, examples)
    known = {"num_classes": CLASSES[config.data.name]} if config.data.name in CLASSES else {}
    names = get_default_sizes(config)
    given = {name: size for name, size in known.items() if name in names} | dict(sizes)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        synthetic = create_synthetic_run(config, given)
        batch = config.data.global_batch_size
        made = synthetic.replace_data(_BATCHES * batch, Path(folder), by_trial=True)
        made = change(_drop_missing(made), model={"weights": "", "pretrained": False})
        check = TASKS.get(config.train.task).check(made)
        student = create_model(made.model, **check.model_arguments, device="meta")
        check.dry_run(student)
        return create_load(config, measure_step(made, check.find_facts()), counts)


def count_examples(config: RunConfig, given: Mapping[str, int]) -> dict[str, int]:
    """Count the examples of the splits: as given, of the dataset here, or as published."""
    if given:
        missing = [role for role in _ROLES if role not in given]
        if missing or len(given) > len(_ROLES):
            raise UserError(f"--examples needs train and eval, got {', '.join(given)}; give both")
        return dict(given)
    data = config.data
    try:
        return describe_dataset(data, config.model.known_sizes).num_examples
    except UserError as error:
        if data.name not in EXAMPLES or data.source != "tfds":
            raise UserError(f"{error}; or give --examples train=N eval=N") from error
    lengths = {name: [number] for name, number in EXAMPLES[data.name].items()}
    return {
        role: sum(
            part.stop - part.start
            for part in parse_split(getattr(data, key), lengths, f"data.{key}")
        )
        for role, key in _ROLES.items()
    }


def read_numbers(flag: str, words: Sequence[str]) -> dict[str, int]:
    """Read NAME=NUMBER; UserError for another form."""
    numbers = {}
    for word in words:
        name, _, number = word.partition("=")
        if not name or not number.isdigit() or not int(number):
            raise UserError(f"{flag} ({word!r}) is not NAME=NUMBER; write one such as train=50000")
        numbers[name] = int(number)
    return numbers


def _drop_missing(config: RunConfig) -> RunConfig:
    """Return the run with teachers by name alone where their weights are not here."""

    def keep(path: str) -> str:
        return path if path and is_there(path) else ""

    distill = config.distill
    teachers = [{**t.model_dump(), "weights": keep(t.weights)} for t in distill.teachers]
    weights = keep(distill.teacher_weights)
    return change(config, distill={"teacher_weights": weights, "teachers": teachers})
