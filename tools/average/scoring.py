"""Scores of weights on a run's own evaluation split, as the run itself computes them."""

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
    from utils.json_types import JsonObject


class RunScorer:
    """A run's model, evaluation split and runtime, for several sets of weights.

    Args:
      location: of weights in a run, whose configuration is used.
      flags: keys that replace those of the configuration.
    """

    def __init__(self, location: str, flags: Sequence[str]) -> None:
        config = _read_config(location, flags)
        self._runtime = create_runtime(config.runtime)
        job = check(config)
        self._loader = open_loader(self._runtime, config, "eval")
        create_task = TASKS.get(config.train.task)
        self._task = create_task(config, job.facts, {"eval": self._loader})
        if isinstance(self._task, Prepares):
            self._task.to_device(self._runtime)
        student = create_model(config.model, **job.facts.model_arguments)
        self._model = self._runtime.prepare(student)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()

    def score(self, tensors: Mapping[str, Tensor]) -> float:
        """Evaluate weights on every example once; return the task's score, higher is better."""
        self._model.load_state_dict(tensors)
        batches = self._loader.batches()
        return evaluate(self._model, batches, self._task, self._runtime).score


def _read_config(location: str, flags: Sequence[str]) -> RunConfig:
    folder = find_run_folder(location)
    if folder is None:
        raise UserError(
            f"RUN ({location!r}) is not in a run, whose evaluation split is needed; give a run's "
            "directory first, or --method uniform"
        )
    with folder.open_local(CONFIG_FILE) as path:
        config = load_config(["--config", str(path), *flags])
    run: JsonObject = {"eval_only": True, "resume": "", "init_from": ""}
    run |= {"init_skip": (), "init_rename": {}}
    # Weights are read with adapters merged: the model is the plain one.
    model = {"weights": location, "pretrained": False, "lora": ()}
    return change(config, run=run, model=model, distill=DistillSection().model_dump())
