"""Creates the synthetic run that is measured and compiled without a run's data and teachers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks import TASKS
from utils.errors import UserError
from utils.registry import load_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from datasets import Loader
    from tasks.protocol import SyntheticRun
    from utils.config.load import RunConfig


def create_synthetic_run(config: RunConfig, given: Mapping[str, int]) -> SyntheticRun:
    """Create the synthetic run of a run's task.

    Args:
      given: sizes of a dataset that is not here, by name.

    Raises:
      UserError: the task has no synthetic run, a name is not one of its sizes, or one is unknown.
    """
    task, kind = config.train.task, _find_kind(config)
    if kind is None:
        raise UserError(
            f"train.task={task} makes up no data; measure the run with its own, by --input real"
        )
    for name in given.keys() - kind.default_sizes.keys():
        raise UserError(
            f"--assume {name} is not a size of train.task={task}; its sizes are: "
            f"{', '.join(sorted(kind.default_sizes)) or 'none'}"
        )
    return kind(config, given)


def get_default_sizes(config: RunConfig) -> Mapping[str, int]:
    """Return the sizes that may be assumed of a dataset without known metadata, by name."""
    kind = _find_kind(config)
    return {} if kind is None else kind.default_sizes


def _find_kind(config: RunConfig) -> type[SyntheticRun] | None:
    path = TASKS.get(config.train.task).synthetic
    return load_object(path) if path else None


def describe_example(loader: Loader) -> dict[str, list[int]]:
    """Shapes of one example's own tensors on the host, by their names in the batch."""
    tensors = loader.load_examples([0]).get_tensors()
    shapes = {name: list(tensor.shape[1:]) for name, tensor in tensors.items()}
    return {name: shapes[name] for name in shapes if name not in ("mask", "indices")}
