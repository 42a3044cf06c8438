"""One replica of a run: builds its parts, trains or evaluates, and keeps the run's status true."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from datasets import require_images
from engine import (
    NonFiniteEvaluationError,
    PreemptedError,
    compute_agreement,
    evaluate,
    fit,
    is_finite,
)
from job.build import build_parts, open_loader
from job.callbacks import RunCallbacks
from job.resume import open_store, take_run
from job.summary import describe_end, describe_job
from models import EMA, create_model, create_view, export_model, get_teacher_sections
from store import read_environment
from store.session import RunSession
from tasks.classify import ask_teacher, predict
from utils.checkpoint import load_checkpoint
from utils.config import dump_config
from utils.curves import draw_run
from utils.errors import EXIT_PREEMPTED, UserError
from utils.log import get_logger, setup_logging
from utils.storage import StorageError

if TYPE_CHECKING:
    from torch import nn

    from datasets import Loader
    from job.build import Parts
    from job.spec import Job
    from utils.runtime.base import Runtime


def _log_job(runtime: Runtime, job: Job) -> None:
    for line in describe_job(job, runtime.device_count):
        get_logger().info("%s", line)


def run(runtime: Runtime, job: Job) -> int:
    """On one replica: build the parts, train or evaluate; gives the exit code."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    job = _agree(runtime, job)
    if job.config.run.eval_only:
        _log_job(runtime, job)
        evaluate_checkpoint(runtime, job)
        return 0
    if job.config.train.deterministic:
        for note in runtime.make_deterministic():
            get_logger().info("train.deterministic: %s", note)
    session = RunSession(job.run) if runtime.ranks.is_writer else None
    parts = None
    try:
        job = _take_run(runtime, job, session)
        _log_job(runtime, job)
        parts = build_parts(runtime, job)
        _check_teachers(runtime, job, parts)
        if session is not None:
            _begin_run(runtime, job, parts, session)
        return _train_with_status(runtime, job, parts, session)
    finally:
        if parts is not None:
            parts.close()
        if session is not None:
            session.close()


def _train_with_status(runtime: Runtime, job: Job, parts: Parts, session: RunSession | None) -> int:
    """Train, and keep the run's status true; gives the exit code."""
    try:
        outcome = train(runtime, job, parts, session)
        if session is not None:
            session.complete(parts.state.step, outcome)
    except BaseException as error:
        status = {PreemptedError: "preempted", KeyboardInterrupt: "interrupted"}
        if session is not None:
            reason = f"{type(error).__name__}: {error}"
            session.end(parts.state.step, status.get(type(error), "failed"), reason)
        if isinstance(error, PreemptedError):
            get_logger().warning("preempted at step %d; --resume auto goes on", error.step)
            return EXIT_PREEMPTED
        raise
    for line in describe_end(job, parts.state.best_metric, parts.state.step, outcome["eval_top1"]):
        get_logger().info("%s", line)
    return 0


def _take_run(runtime: Runtime, job: Job, session: RunSession | None) -> Job:
    """Have rank zero take the run and look again; what it finds holds for all ranks.

    Raises:
      UserError: on every rank, where rank zero met it.
    """
    found: Any = None
    if session is not None:
        try:
            found = take_run(job.config, session, job.checkpoint)
        except (UserError, StorageError) as error:
            found = UserError(str(error))
    found = runtime.ranks.broadcast_value(found)
    if isinstance(found, UserError):
        raise found
    return replace(job, checkpoint=found)


def _agree(runtime: Runtime, job: Job) -> Job:
    """Rank zero's choice of directory and checkpoint: names are made from the clock."""
    run, checkpoint = runtime.ranks.broadcast_value((job.run, job.checkpoint))
    return replace(job, run=run, checkpoint=checkpoint)


def _begin_run(runtime: Runtime, job: Job, parts: Parts, session: RunSession) -> None:
    """Write the run's first facts, once every part has been built."""
    facts = {
        "environment": {**read_environment(), **runtime.describe()},
        "teachers": parts.teacher_metrics,
    }
    is_new = not job.config.run.resume
    session.begin(
        dump_config(job.config), facts, from_step=parts.state.step,
        newest_id=open_store(job.config).find_newest_id() if is_new else "",
    )  # fmt: skip


def train(runtime: Runtime, job: Job, parts: Parts, session: RunSession | None) -> dict[str, Any]:
    """Train to the end, export the student and report what it has become."""
    state = parts.state
    objective = runtime.prepare_objective(parts.objective, state.model, state.extra)
    began = time.perf_counter()
    with RunCallbacks(runtime, job, parts, session) as callbacks:
        metrics = fit(state, parts.plan, callbacks.create_hooks(), objective, runtime)
    outcome = {"train_s": time.perf_counter() - began, "steps": parts.state.step}
    outcome |= {f"eval_{name}": value for name, value in metrics.items()}
    outcome |= _compare_with_teachers(runtime, parts)
    if job.config.data.test_split:
        outcome |= _evaluate_test(runtime, job, parts)
    _finish(runtime, job, parts)
    return {**outcome, **runtime.counters(), "parameters": parts.count_parameters()}


def evaluate_model(
    runtime: Runtime, model: nn.Module, parts: Parts, loader: Loader
) -> dict[str, float]:
    """Exact metrics of a model over a loader's split, as the student sees it."""
    return evaluate(model, loader.batches(), partial(predict, parts.view), runtime)


def _check_teachers(runtime: Runtime, job: Job, parts: Parts) -> None:
    """Evaluate the teachers; refuse one that knows nothing."""
    sections = [one for one in get_teacher_sections(job.config.distill) if one.model != EMA]
    # With stored answers there is none to ask.
    for section, teacher in zip(sections, parts.own_teachers(), strict=False):
        batches = parts.eval_loader.batches()
        metrics = evaluate(teacher, batches, ask_teacher, runtime)
        if not is_finite(metrics):
            raise UserError(
                f"distill.teacher {(section.weights or section.model)!r} gives answers that are "
                "not finite on data.eval_split; check its weights, its mean and std, and its dtype"
            )
        get_logger().info("teacher top-1 %.2f on %s", metrics["top1"], job.config.data.eval_split)
        chance = 1.0 / job.num_classes
        spread = (chance * (1 - chance) / max(metrics["examples"], 1)) ** 0.5
        limit = 100 * (chance + 3 * spread)
        if metrics["top1"] <= limit and not job.config.distill.allow_weak_teacher:
            raise UserError(
                f"distill.teacher has top-1 {metrics['top1']:.2f} on data.eval_split, no better "
                f"than chance ({limit:.2f}); check its weights and the preprocessing, or set "
                "distill.allow_weak_teacher"
            )
        parts.teacher_metrics.append(metrics)


def _compare_with_teachers(runtime: Runtime, parts: Parts) -> dict[str, float]:
    """Share of the evaluation split on which student and each teacher name the same class."""
    student = partial(predict, parts.view, parts.state.eval_model)
    found = {}
    for number, teacher in enumerate(parts.own_teachers()):
        name = "agreement" if number == 0 else f"agreement_{number + 1}"
        batches = parts.eval_loader.batches()
        parts.state.eval_model.eval()
        found[name] = compute_agreement(student, partial(ask_teacher, teacher), batches, runtime)
    return found


def _evaluate_test(runtime: Runtime, job: Job, parts: Parts) -> dict[str, float]:
    loader = open_loader(runtime, job.config, "test")
    try:
        metrics = evaluate_model(runtime, parts.state.eval_model, parts, loader)
    finally:
        loader.close()
    get_logger().info("test top-1 %.2f", metrics["top1"])
    return {f"test_{name}": value for name, value in metrics.items()}


def _finish(runtime: Runtime, job: Job, parts: Parts) -> None:
    """Export the evaluated weights and draw the curves."""
    tensors = runtime.fetch_all(parts.state.eval_model.state_dict())
    if runtime.ranks.is_writer:
        path = export_model(tensors, job.model_facts, job.run.path)
        draw_run(job.run.path)
        get_logger().info("exported %s", path)


def evaluate_checkpoint(runtime: Runtime, job: Job) -> None:
    """`--eval`: metrics of a checkpoint or of weights on data.eval_split."""
    config = job.config
    loader = open_loader(runtime, config, "eval")
    student = create_model(config.model, num_classes=job.num_classes)
    source = config.model.weights
    if job.checkpoint is not None:
        tensors, _ = load_checkpoint(job.checkpoint)
        student.load_state_dict(tensors.get("ema", tensors["model"]))
        source = str(job.checkpoint)
    images = require_images(loader.facts, config.data.source)
    view = create_view(*images.normalisation, channels=images.image_shape[2]).to(runtime.device)
    model = runtime.prepare(student)
    try:
        metrics = evaluate(model, loader.batches(), partial(predict, view), runtime)
    finally:
        loader.close()
    get_logger().info(
        "%s on %s: top-1 %.2f, top-5 %.2f, loss %.4f, ECE %.4f, %d examples",
        source, config.data.eval_split, metrics["top1"], metrics["top5"], metrics["loss"],
        metrics["ece"], metrics["examples"],
    )  # fmt: skip
    if not is_finite(metrics):
        raise NonFiniteEvaluationError(
            f"{source} gives answers that are not finite on {config.data.eval_split}; its weights "
            "or running statistics hold NaN"
        )
