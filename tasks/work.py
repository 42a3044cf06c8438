"""Counts what a run's step costs anywhere: FLOPs, bytes and examples, on the meta device.

No dataset is opened and no device used, so it takes seconds. Counts are of the model as it is
written: a compiler fuses, recomputes and pads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from models.factory import create_model
from models.freezing import freeze
from optim_factory import create_optimizer, scale_lr
from tasks import TASKS
from tasks.protocol import Traceable
from tasks.teachers.taught import count_flops, set_distilled_training
from utils.log import get_logger

if TYPE_CHECKING:
    from datasets import DatasetFacts
    from tasks.protocol import TaskFacts
    from utils.config.load import RunConfig

_EXAMPLES = 2
_FORWARD_SHARE = 1 / 3  # of the FLOPs of a training step without a teacher
_MOMENTS = 2  # assumed of an optimizer that needs real tensors


@dataclass(frozen=True)
class StepWork:
    """Cost of one example of a step, and of what a device keeps."""

    train_flops: float | None  # of an example, teachers in the step included; None if unknown
    eval_flops: float | None
    state_bytes: int  # weights, gradients, moments, averages and teachers
    checkpoint_bytes: int  # of these what a checkpoint holds
    example_bytes: int | None  # kept of an example from the forward to the backward pass


@dataclass(frozen=True)
class SplitSizes:
    """What a task reads of a loader before its first batch."""

    facts: object
    num_examples: int
    batches_per_epoch: int


def measure_step(config: RunConfig, facts: TaskFacts) -> StepWork:
    """Count FLOPs and bytes of a run's step; `facts` are those that its check has found."""
    student = create_model(config.model, **facts.model_arguments, device="meta").train()
    freeze(student, config.optim.freeze)
    set_distilled_training(student, True)
    loaders: Any = _list_splits(config, facts.dataset)
    task = TASKS.get(config.train.task)(config, facts, loaders)
    weights = _count_bytes([*student.parameters(), *student.buffers()])
    moments = _count_moments(config, student)
    averages = weights * (len(config.train.ema_more) + config.train.ema)
    trained = _count_bytes([p for p in student.parameters() if p.requires_grad])
    kept = weights + moments + averages
    if not isinstance(task, Traceable):
        return StepWork(None, None, kept + trained, kept, None)
    flops = count_flops(config, facts, task) if facts.step_shapes == 1 else None
    total = own = None
    if flops is not None:
        total, own = flops["total"], flops["student"] * _FORWARD_SHARE
    teachers = sum(
        _count_bytes(companion.model.parameters())
        for companion in task.list_companions(_EXAMPLES)
        if not companion.is_trained
    )
    size = _count_saved(config, task, student)
    return StepWork(total, own, kept + trained + teachers, kept, size)


def _list_splits(config: RunConfig, dataset: DatasetFacts) -> Mapping[str, SplitSizes]:
    size = config.data.global_batch_size
    return {
        role: SplitSizes(dataset.examples[role], number, number // size)
        for role, number in dataset.num_examples.items()
    }


def _count_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _count_moments(config: RunConfig, student: nn.Module) -> int:
    """Count the bytes that the optimizer keeps, by a step on the meta device."""
    optimizer = create_optimizer(scale_lr(config), student)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    except (RuntimeError, NotImplementedError):
        return _MOMENTS * _count_bytes(trained)
    finally:
        for parameter in trained:
            parameter.grad = None
    states = (value for state in optimizer.state.values() for value in state.values())
    return _count_bytes([value for value in states if isinstance(value, Tensor)])


def _count_saved(config: RunConfig, task: Traceable, student: nn.Module) -> int | None:
    """Count the bytes of an example's tensors that the backward pass needs; None if unknown."""
    own = {parameter.untyped_storage()._cdata for parameter in student.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    try:
        inputs = task.create_inputs(_EXAMPLES).to("meta")
        with saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = task.forward_for_tracing(student, inputs)
    except (RuntimeError, NotImplementedError) as error:
        get_logger().warning("memory is not counted: %s", " ".join(str(error).split())[:200])
        return None
    del outputs
    halves = config.runtime.precision in ("bf16", "fp16")
    return sum(sizes.values()) // _EXAMPLES // (2 if halves else 1)
