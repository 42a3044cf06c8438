"""Scores of weights on a run's own evaluation split, every example once, as the run has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from engine import evaluate
from job.build import open_loader
from job.check import check
from models.factory import create_model
from models.run_folder import find_run_folder
from store.record.ids import CONFIG_FILE
from tasks import TASKS
from tasks.protocol import Prepares
from utils.config.distill import DistillSection
from utils.config.load import change, load_config
from utils.errors import UserError
from utils.runtime.launcher import create_runtime

if TYPE_CHECKING:
    from torch import Tensor

    from utils.config.load import RunConfig


class RunJudge:
    """A run's model, split and runtime, ready for one set of weights after the other.

    Args:
      place: of weights that lie in a run, whose configuration counts.
      flags: keys that count instead.

    Raises:
      UserError: no run is there, or its data is not.
    """

    def __init__(self, place: str, flags: Sequence[str]) -> None:
        config = _read_config(place, flags)
        self._runtime = create_runtime(config.runtime)
        job = check(config)
        self._loader = open_loader(self._runtime, config, "eval")
        kind = TASKS.get(config.train.task)
        self._task = kind(config, job.facts, {"eval": self._loader})
        if isinstance(self._task, Prepares):
            self._task.to_device(self._runtime)
        student = create_model(config.model, **job.facts.model_arguments)
        self._model = self._runtime.prepare(student)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()

    def score(self, tensors: Mapping[str, Tensor]) -> float:
        """What the task calls its score; higher is better."""
        self._model.load_state_dict(tensors)
        batches = self._loader.batches()
        return evaluate(self._model, batches, self._task, self._runtime).score


def _read_config(place: str, flags: Sequence[str]) -> RunConfig:
    folder = find_run_folder(place)
    if folder is None:
        raise UserError(
            f"RUN ({place!r}) lies in no run, whose split would judge it; give a run's directory "
            "first, or --method uniform"
        )
    with folder.open_local(CONFIG_FILE) as path:
        config = load_config(["--config", str(path), *flags])
    of_run = {"eval_only": True, "resume": "", "init_from": "", "init_skip": (), "init_rename": {}}
    # Weights come merged: the model is the plain one.
    of_model = {"weights": place, "pretrained": False, "lora": ()}
    return change(config, run=of_run, model=of_model, distill=DistillSection().model_dump())
