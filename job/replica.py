"""One replica of a run: builds its parts, trains or evaluates, and records the run's status."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from engine import evaluate, fit, sum_batches
from job.build import build_parts, open_loader
from job.callbacks import RunCallbacks
from job.correctness import Correctness
from job.curves import draw_run
from job.lineage import find_lineage
from job.resume import Finished, open_store, take_run
from job.steps.bad_step import keep_bad_step
from job.summary import describe_end, describe_finished, describe_job, describe_reason
from job.warmup import ShapeWarmup
from models.factory import create_model, export_model
from store.lineage.ancestors import LINEAGE, join_lineages, read_lineage, view_lineage
from store.record.environment import read_environment
from store.record.session import RunSession
from tasks import TASKS
from tasks.protocol import Caches, Compares, Distils, HasExtraSets, Prepares
from utils.checkpoint.files import load_checkpoint
from utils.config.load import dump_config
from utils.endings import NonFiniteError, NonFiniteEvaluationError, PreemptedError
from utils.error_codes import find_code
from utils.errors import EXIT_PREEMPTED, UserError
from utils.json_types import JsonObject
from utils.log import get_logger, setup_logging
from utils.own_code import describe_modules
from utils.storage.folder import StorageError
from utils.storage.places import describe_refusal

if TYPE_CHECKING:
    from job.build import Parts
    from job.spec import Job
    from tasks.protocol import SumOver
    from utils.checkpoint.files import Location
    from utils.runtime.base import Runtime


def _log_job(runtime: Runtime, job: Job) -> None:
    for line in describe_job(job, runtime.device_count):
        get_logger().info("%s", line)


def run(runtime: Runtime, job: Job) -> int:
    """Build the parts of one replica, then train or evaluate; return the exit code."""
    setup_logging(runtime.ranks.index, runtime.ranks.size)
    # Names of runs contain the time, so rank zero's choice is used on all ranks.
    chosen, checkpoint = runtime.ranks.broadcast_value((job.run, job.checkpoint))
    job = replace(job, run=chosen, checkpoint=checkpoint)
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
        taken = _take_run(runtime, job, session)
        if isinstance(taken, Finished):
            get_logger().info("%s", describe_finished(job, taken.reason))
            return 0
        job = replace(job, checkpoint=taken)
        _log_job(runtime, job)
        parts = build_parts(runtime, job)
        if isinstance(parts.task, Distils):
            parts.teacher_metrics = parts.task.evaluate_teachers(sum_over(runtime, parts))
        _begin_run(runtime, job, parts, session)
        return _train_with_status(runtime, job, parts, session)
    finally:
        if parts is not None:
            parts.close()
        if session is not None:
            session.close()


def _train_with_status(runtime: Runtime, job: Job, parts: Parts, session: RunSession | None) -> int:
    """Train, and record the run's status; return the exit code."""
    first_step = parts.state.step
    try:
        outcome = train(runtime, job, parts, session)
        reason = describe_reason(parts.plan, parts.state, first_step)
        if session is not None:
            session.complete(parts.state.step, outcome, reason)
    except BaseException as error:
        status: dict[type[BaseException], str] = {
            PreemptedError: "preempted",
            KeyboardInterrupt: "interrupted",
        }
        if session is not None:
            reason = f"{type(error).__name__}: {error}"
            session.end(parts.state.step, status.get(type(error), "failed"), reason)
        if isinstance(error, PreemptedError):
            get_logger().warning("preempted at step %d; continue with --resume auto", error.step)
            return EXIT_PREEMPTED
        raise
    get_logger().info("%s", reason)
    for line in describe_end(job, parts.task.score_name, parts.state, outcome["score"]):
        get_logger().info("%s", line)
    return 0


def _take_run(runtime: Runtime, job: Job, session: RunSession | None) -> Location | Finished | None:
    """Take the run on rank zero and choose again; its result or UserError is that of all ranks."""
    result: Location | Finished | UserError | None = None
    if session is not None:
        try:
            result = take_run(job.config, session, job.checkpoint)
        except (UserError, StorageError) as error:
            result = UserError(str(error), code=find_code(error))
        except OSError as error:
            result = _describe_refusal(job, error)
    result = runtime.ranks.broadcast_value(result)
    if isinstance(result, UserError):
        raise result
    return result


def _describe_refusal(job: Job, error: OSError) -> UserError:
    return describe_refusal(job.config.run.output_dir, "run.output_dir", error)


def _begin_run(runtime: Runtime, job: Job, parts: Parts, session: RunSession | None) -> None:
    """Write the run's first facts on rank zero; if its disk refuses, UserError on every rank."""
    refusal = None
    if session is not None:
        try:
            environment = {**read_environment(), **runtime.describe()}
            if modules := describe_modules(job.config.run.own_code):
                environment["imports"] = modules
            facts: JsonObject = {"environment": environment, "teachers": parts.teacher_metrics}
            # The lineage at the run's start stays, and a later attempt may add another teacher.
            new = find_lineage(job, parts.teacher_metrics)
            if lineage := join_lineages(read_lineage(job.run.read()), new):
                facts[LINEAGE] = view_lineage(lineage)
            newest = "" if job.config.run.resume else open_store(job.config).find_newest_id()
            text, step = dump_config(job.config), parts.state.step
            session.begin(text, facts, from_step=step, newest_id=newest)
        except StorageError:
            raise  # its message names the call that the bucket refused
        except OSError as error:
            refusal = _describe_refusal(job, error)
    refusal = runtime.ranks.broadcast_value(refusal)
    if refusal is not None:
        raise refusal


def train(runtime: Runtime, job: Job, parts: Parts, session: RunSession | None) -> JsonObject:
    """Train to the end, export the student and return the final metrics."""
    state = parts.state
    task = runtime.prepare_task(parts.task, state.model, state.loss_modules)
    began = time.perf_counter()
    has_shapes = job.facts.step_shapes > 1
    ahead = ShapeWarmup(runtime, parts, task) if has_shapes else None
    try:
        with RunCallbacks(runtime, job, parts, session, ahead) as callbacks:
            evaluation = fit(state, parts.plan, callbacks, task, runtime)
    except NonFiniteError as error:
        if job.config.train.keep_bad_step:
            keep_bad_step(runtime, job, parts, task, error.step)
        raise
    outcome = {"train_s": time.perf_counter() - began, "steps": state.step}
    outcome |= {"score": evaluation.score}
    outcome |= {f"eval_{name}": value for name, value in evaluation.all_metrics.items()}
    if isinstance(parts.task, Compares):
        outcome |= parts.task.compare(state.eval_model.eval(), sum_over(runtime, parts))
    if job.config.data.test_split:
        outcome |= _evaluate_test(runtime, job, parts)
    tensors = runtime.fetch_all(parts.state.eval_model.state_dict())
    if runtime.ranks.is_writer:
        path = export_model(tensors, job.facts.export, job.run.path)
        draw_run(job.run.path)
        get_logger().info("exported %s", path)
    return {**outcome, **runtime.counters(), "parameters": parts.count_parameters()}


def sum_over(runtime: Runtime, parts: Parts) -> SumOver:
    """Return a function that sums any count of the task over the evaluation split."""
    return lambda count: sum_batches(count, parts.eval_loader.batches(), runtime)


def _evaluate_test(runtime: Runtime, job: Job, parts: Parts) -> dict[str, float]:
    loader = open_loader(runtime, job.config, "test")
    try:
        # With hits like the other evaluations, so that the graph is the same.
        answers = Correctness(parts.task, runtime)
        evaluation = answers.evaluate(parts.state.eval_model, loader.batches())
    finally:
        loader.close()
    get_logger().info("test %s", parts.task.describe(evaluation.metrics))
    return {f"test_{name}": value for name, value in evaluation.metrics.items()}


def evaluate_checkpoint(runtime: Runtime, job: Job) -> None:
    """Evaluate a checkpoint or weights on data.eval_split and on further sets (`--eval`)."""
    config = job.config
    loader = open_loader(runtime, config, "eval")
    student = create_model(config.model, **job.facts.model_arguments)
    source = config.model.weights
    if job.checkpoint is not None:
        tensors, _ = load_checkpoint(job.checkpoint)
        student.load_state_dict(tensors.get("ema", tensors["model"]))
        source = str(job.checkpoint)
    task = TASKS.get(config.train.task)(config, job.facts, {"eval": loader})
    if isinstance(task, Prepares):
        task.to_device(runtime)
    model = runtime.prepare(student)
    try:
        evaluation = evaluate(model, loader.batches(), task, runtime)
        extra: dict[str, float] = {}
        if isinstance(task, HasExtraSets):
            extra = task.evaluate_extra_sets(model, partial(sum_batches, runtime=runtime), None)
    finally:
        loader.close()
        if isinstance(task, Caches):
            task.close()
    text = task.describe({**evaluation.metrics, **extra})
    get_logger().info("%s on %s: %s", source, config.data.eval_split, text)
    if not evaluation.is_finite:
        raise NonFiniteEvaluationError(
            f"{source} gives outputs that are not finite on {config.data.eval_split}; its weights "
            "or running statistics contain NaN"
        )
