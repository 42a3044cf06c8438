"""The loop as it is written by hand, as a measure for the engine's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from models.factory import create_model
from models.patches.choice import patch_for
from models.teachers.teacher import get_teacher_sections
from optim_factory import PREPARABLE, create_optimizer, scale_lr
from tasks.protocol import HasPlainLoss
from utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import Batch
    from job.build import Parts
    from job.spec import Job
    from tasks.protocol import RunTask
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime


def check_bare(config: RunConfig) -> None:
    """Refuse what a bare loop does not do.

    Raises:
      UserError: names the key.
    """
    wrong = {
        "distill": bool(get_teacher_sections(config.distill)),
        "train.accumulate_steps": config.train.accumulate_steps != 1,
        "train.remat": config.train.remat,
        "train.scan_layers": config.train.scan_layers,
        "runtime.num_processes": (config.runtime.num_processes or 1) > 1,
        "runtime.parallel": config.runtime.parallel == "spmd",
        "runtime.precision": config.runtime.precision == "fp16",
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(
                f"--bare compares with a loop of forward, loss, backward and step on one device, "
                f"which has no {key}; leave that key at its default"
            )


class BareLoop:
    """Forward, loss, backward, optimizer step: no schedule, clipping, average, checks or log.

    The same model and optimizer as the run's; its batches lie on the device, what need not be done
    in each step is done already.
    """

    # Graphs that it has cost, and the seconds to compile them
    compiled: tuple[int, float] = (0, 0.0)

    def __init__(self, runtime: Runtime, job: Job, parts: Parts, batches: Sequence[Batch]) -> None:
        config = job.config
        torch.manual_seed(config.train.seed)
        self._runtime = runtime
        self.model = create_model(config.model, **job.facts.model_arguments)
        patch_for(runtime, config.model, self.model)
        runtime.accelerate(runtime.prepare(self.model)).train()
        name = config.optim.name.lower()
        self._optimizer = create_optimizer(
            scale_lr(config), self.model, device_arguments=runtime.updates.get_arguments(name)
        )
        # State that is there before step 0 costs no graph of its own.
        if name in PREPARABLE:
            runtime.updates.prepare(self._optimizer)
        lrs, decays = parts.plan.schedule.values(0, self._optimizer)
        rates = runtime.updates.set_hyperparameters(self._optimizer, lrs, decays)
        runtime.updates.place_rates(self._optimizer, rates)
        # Once: a step has no transfer in it.
        placed = [runtime.to_device(batch) for batch in batches]
        self._losses = [_plan_loss(parts.task, batch) for batch in placed]
        runtime.finish_step()

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds by the wall clock and of CPU time, the device waited for at the end."""
        runtime = self._runtime
        began, cpu_began = time.perf_counter(), time.process_time()
        for step in range(steps):
            compute_loss = self._losses[step % len(self._losses)]
            with runtime.autocast():
                loss = compute_loss(self.model)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            runtime.finish_step()
        runtime.fetch(loss)  # host read: the block ends when its last step is done
        return time.perf_counter() - began, time.process_time() - cpu_began


def _plan_loss(task: RunTask[Batch], batch: Batch) -> Callable[[nn.Module], Tensor]:
    """Return the loss of a model as written by hand."""
    if isinstance(task, HasPlainLoss):
        return task.create_supervised_loss(batch)
    return lambda model: task.loss(model, batch).total
