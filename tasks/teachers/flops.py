"""FLOPs of a training step per example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from models.factory import create_model
from models.freezing import freeze
from utils.errors import UserError
from utils.log import get_logger

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tasks.protocol import TaskFacts, Traceable
    from utils.config.load import RunConfig

_EXAMPLES = 2  # BatchNorm in training mode refuses a single value


def count_flops(config: RunConfig, facts: TaskFacts, task: Traceable) -> dict[str, float] | None:
    """FLOPs per example of matrix products and convolutions, counted on the meta device.

    The student's forward and backward pass and the forward pass of the teachers in the step. Not
    counted: losses and projections, the optimizer, and what train.remat computes again. A causal
    attention counts in full.

    Returns:
      `student` with its peer, `teachers` and `total`; none for a model that needs data to run.
    """
    student = create_model(config.model, **facts.model_arguments, device="meta").train()
    freeze(student, config.optim.freeze)
    if hasattr(student, "set_distilled_training"):
        student.set_distilled_training(True)
    try:
        inputs = task.create_inputs(_EXAMPLES).to("meta")
        found = {"student": _count(task, student, inputs, backward=True), "teachers": 0.0}
        for model, own, is_trained in task.list_companions(_EXAMPLES):
            role = "student" if is_trained else "teachers"
            found[role] += _count(task, model, own, backward=is_trained)
    except UserError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        get_logger().warning("FLOPs are not counted: %s", " ".join(str(error).split())[:200])
        return None
    return {**found, "total": sum(found.values())}


def _count(task: Traceable, model: nn.Module, inputs: Tensor, *, backward: bool) -> float:
    """FLOPs per example of a model's forward pass, or of forward and backward pass."""
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        outputs: Any = task.answer(model, inputs)
        if backward:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(output.sum() for output in outputs).backward()
    return counter.get_total_flops() / _EXAMPLES
