"""`Job`: what every replica of a run starts from, with every answer that was found on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store import Run
    from tasks.rehearsal import ImageShapes
    from utils.checkpoint import Place
    from utils.config import RunConfig


@dataclass(frozen=True)
class Job:
    """A checked configuration.

    Args:
      run: where the results go.
      checkpoint: weights and state to continue or to evaluate; none: a new run.
      num_classes: of student, teachers and dataset.
      model_facts: how to create the exported student again.
      stream: what decides which training examples come when; see `describe_stream`.
      teachers: hashes of the teachers that the run names.
      image_shapes: (H, W, C) of the images by role, as the strings tell; None: only a run can.
      num_examples: of the splits by role.
      num_parameters: of the student.
    """

    config: RunConfig
    run: Run
    checkpoint: Place | None
    num_classes: int
    model_facts: dict[str, Any]
    stream: dict[str, Any]
    teachers: list[str]
    image_shapes: ImageShapes
    num_examples: dict[str, int]
    num_parameters: int
    total_steps: int
