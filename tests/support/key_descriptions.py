"""What a configuration decides, as plain values: plan, job, parts, batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from datasets import create_loader
from job.build import build_parts
from job.callbacks import RunCallbacks
from job.check import check
from job.spec import Job
from job.stream import iterate_batches
from tasks.classify.views import TEACHER_IMAGES
from utils.config.load import RunConfig
from utils.errors import UserError
from utils.runtime.choice import choose_device, find_planned_ranks
from utils.runtime.launcher import create_runtime
from utils.runtime.xla.spmd import get_mesh_shape


def describe(config: RunConfig) -> dict[str, Any]:
    """All that a configuration decides about a run on this machine, by part."""
    found: dict[str, Any] = {}
    try:
        found |= _describe_plan(config)
        job = check(config)
        found["task"] = _describe_job(job)
        if config.data.source != "synthetic":
            return found | {"reader": _describe_reader(config)}
        if config.runtime.parallel == "spmd":
            return found  # a mesh cannot be left again in this process
        runtime = create_runtime(config.runtime)
    except UserError as error:
        return found | {"refused": str(error)}
    try:
        return found | _describe_parts(runtime, job)
    except UserError as error:
        return found | {"refused": str(error)}
    finally:
        runtime.ranks.leave()


def _describe_plan(config: RunConfig) -> dict[str, Any]:
    """What needs neither data nor device."""
    name = choose_device(config.runtime)
    return {
        "device": name,
        "ranks": find_planned_ranks(config.runtime, name),
        "mesh": get_mesh_shape(config.runtime, devices=4),
    }


def _describe_job(job: Job) -> list[Any]:
    run = job.run
    places = [run.place, str(run.path), str(run.checkpoints), job.checkpoint]
    return [
        places,
        job.facts.teachers,
        job.facts.dataset.num_examples,
        job.facts.image_shapes,
        job.total_steps,
    ]


def _describe_reader(config: RunConfig) -> list[Any]:
    loader = create_loader(config.data, "train", seed=0, known=config.model.known_sizes)
    try:
        spec = loader._reader._spec
        return [spec.threads, spec.prefetch_batches, spec.window, spec.tolerant, loader.order]
    finally:
        loader.close()


def _describe_parts(runtime: Any, job: Job) -> dict[str, Any]:
    parts = build_parts(runtime, job)
    state, schedule = parts.state, parts.plan.schedule
    steps = range(parts.plan.total_steps)
    found = {
        "model": str(state.model),
        "layers": [
            (name, type(layer).__name__, sorted(layer.__dict__))
            for name, layer in state.model.named_modules()
        ],
        "layout": [p.stride() for p in state.model.parameters()],
        "weights": [v.double().sum().item() for v in state.model.state_dict().values()],
        "optimizer": _describe_optimizer(state.optimizer),
        "schedule": [(schedule.lr_at(step), schedule.decay_at(step)) for step in steps],
        "plan": repr(dataclasses.replace(parts.plan, schedule=None)),
        "state": [
            parts.plan.averaging,
            list(state.averages),
            parts.plan.accumulate_steps,
            parts.plan.clipping,
        ],
        "eval": [parts.eval_loader.rank_batch_size, parts.eval_loader.facts.normalisation],
        "teachers": [
            (
                t.dtype,
                t.weight,
                t.transform.size,
                t.transform.mean.flatten().tolist(),
                t.transform.std.flatten().tolist(),
            )
            for t in parts.task.teachers
        ],
        "callbacks": _describe_callbacks(runtime, job, parts),
    }
    batches = iterate_batches(parts, 0)
    first = next(batches)
    found["batch"] = [_describe_batch(one) for one in (first, next(batches))]
    if choose_device(job.config.runtime) == "cpu":
        torch.manual_seed(0)
        with runtime.autocast():
            found["loss"] = parts.task.loss(state.model, first).total.item()
    parts.close()
    return found


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = [
        {k: v if k != "params" else len(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, repr(optimizer.defaults), repr(groups)]


def _describe_callbacks(runtime: Any, job: Job, parts: Any) -> list[Any]:
    callbacks = RunCallbacks(runtime, job, parts, None)
    callbacks.stopping.listening.__enter__()
    saving, recording = callbacks.saving, callbacks.recording
    watch, tracer, manager = callbacks.stopping.watch, recording._profiler, saving.manager
    found = [
        manager.keep,
        manager.keep_every,
        saving.max_rollbacks,
        recording.keeper.sketches.epsilon,
        *(_get_plain(one) for one in (watch, tracer)),
    ]
    callbacks.__exit__(None, RuntimeError(), None)  # no writer runs: nothing to wait for
    return found


def _get_plain(thing: Any) -> dict[str, Any]:
    kinds = (int, float, str, tuple, type(None))
    ignored = ("_beat", "_last")
    return {k: v for k, v in vars(thing).items() if isinstance(v, kinds) and k not in ignored}


def _describe_batch(batch: Any) -> list[Any]:
    draws, values = (
        {name: value.double().sum().item() for name, value in drawn.items()}
        for drawn in (batch.draws, batch.values)
    )
    return [
        batch.indices.tolist(),
        batch.ids,
        batch.images.double().sum().item(),
        draws,
        values,
        TEACHER_IMAGES in draws,
    ]
