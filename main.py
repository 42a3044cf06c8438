"""Train, distil or evaluate: `python main.py --config configs/x.yaml [--key value ...]`.

Flags become a `RunConfig`; `preflight` checks it without a device; the runtime starts its replicas;
each replica builds its parts (`assembly`) and hands them to the engine. PyTorch is imported inside
functions, so that `--help` answers at once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from store import read_environment
from store.session import RunSession
from utils.config import RunConfig, dump_config, load_config
from utils.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USER_ERROR, UserError
from utils.log import get_logger, setup_logging
from utils.programs import run_program
from utils.runtime import choose_device, is_silent_rank, launch
from utils.storage import StorageError

if TYPE_CHECKING:
    from torch import nn

    from assembly import Parts
    from datasets import Loader
    from preflight import Task
    from utils.runtime.base import Runtime


def main(argv: Sequence[str] | None = None) -> int:
    """The command line's way in; gives the exit code."""
    setup_logging()
    words = sys.argv[1:] if argv is None else argv
    return run_program(
        lambda: start(load_config(words)), is_silent=is_silent_rank(),
        interrupted="interrupted; --resume auto goes on from the last checkpoint, if there is one",
    )  # fmt: skip


def start(config: RunConfig) -> int:
    """Check a configuration on the host, then run it on its runtime; gives the exit code."""
    choose_device(config.runtime)
    from engine import NonFiniteError, NonFiniteEvaluationError
    from preflight import check
    from utils.checkpoint import CheckpointError
    from utils.metrics import GraphBudgetError, LostRunError
    from utils.runtime.base import ReplicaError
    from utils.runtime.processes import GroupError

    task = check(config)
    if config.run.check_only:
        return _show_check(task)
    logging.captureWarnings(True)
    try:
        return launch(config.runtime, run, task)
    except (
        CheckpointError, GraphBudgetError, GroupError, LostRunError, NonFiniteError,
        NonFiniteEvaluationError, ReplicaError, StorageError,
    ) as error:  # fmt: skip
        sys.stderr.write(f"the run was stopped: {error}\n")
        return EXIT_FAILED
    except UserError as error:
        if not is_silent_rank():
            raise
        # Found on its own device or host: nobody else may say it.
        sys.stderr.write(f"error on a rank above 0: {error}\n")
        return EXIT_USER_ERROR


def _show_check(task: Task) -> int:
    """`--check`: what a run would be, on stdout; gives the exit code."""
    from summary import describe_task

    for line in describe_task(task):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write("all checks passed; no device was used and nothing was written\n")
    return 0


def _log_task(runtime: Runtime, task: Task) -> None:
    from summary import describe_task

    for line in describe_task(task, runtime.device_count):
        get_logger().info("%s", line)


def run(runtime: Runtime, task: Task) -> int:
    """On one replica: build the parts, train or evaluate; gives the exit code."""
    from assembly import build_parts

    setup_logging(runtime.rank, runtime.world_size)
    task = _agree(runtime, task)
    if task.config.run.eval_only:
        _log_task(runtime, task)
        evaluate_checkpoint(runtime, task)
        return 0
    if task.config.train.deterministic:
        for note in runtime.make_deterministic():
            get_logger().info("train.deterministic: %s", note)
    session = RunSession(task.run) if runtime.is_writer else None
    parts = None
    try:
        task = _take_run(runtime, task, session)
        _log_task(runtime, task)
        parts = build_parts(runtime, task)
        _check_teachers(runtime, task, parts)
        if session is not None:
            _begin_run(runtime, task, parts, session)
        return _train_with_status(runtime, task, parts, session)
    finally:
        if parts is not None:
            parts.close()
        if session is not None:
            session.close()


def _train_with_status(
    runtime: Runtime, task: Task, parts: Parts, session: RunSession | None
) -> int:
    """Train, and keep the run's status true; gives the exit code."""
    from engine import PreemptedError
    from summary import describe_end

    try:
        outcome = train(runtime, task, parts, session)
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
    for line in describe_end(task, parts.state.best_metric, parts.state.step, outcome["eval_top1"]):
        get_logger().info("%s", line)
    return 0


def _take_run(runtime: Runtime, task: Task, session: RunSession | None) -> Task:
    """Have rank zero take the run and look again; what it finds holds for all ranks.

    Raises:
      UserError: on every rank, where rank zero met it.
    """
    from resume import take_run

    found: Any = None
    if session is not None:
        try:
            found = take_run(task.config, session, task.checkpoint)
        except (UserError, StorageError) as error:
            found = UserError(str(error))
    found = runtime.broadcast_value(found)
    if isinstance(found, UserError):
        raise found
    return replace(task, checkpoint=found)


def _agree(runtime: Runtime, task: Task) -> Task:
    """Rank zero's choice of directory and checkpoint: names are made from the clock."""
    run, checkpoint = runtime.broadcast_value((task.run, task.checkpoint))
    return replace(task, run=run, checkpoint=checkpoint)


def _begin_run(runtime: Runtime, task: Task, parts: Parts, session: RunSession) -> None:
    """Write the run's first facts, once every part has been built."""
    from resume import open_store

    facts = {
        "environment": {**read_environment(), **runtime.describe()},
        "teachers": parts.teacher_metrics,
    }
    is_new = not task.config.run.resume
    session.begin(
        dump_config(task.config), facts, from_step=parts.state.step,
        newest_id=open_store(task.config).find_newest_id() if is_new else "",
    )  # fmt: skip


def train(runtime: Runtime, task: Task, parts: Parts, session: RunSession | None) -> dict[str, Any]:
    """Train to the end, export the student and report what it has become."""
    from engine import fit
    from keeper import Keeper

    state = parts.state
    objective = runtime.prepare_objective(parts.objective, state.model, state.extra)
    began = time.perf_counter()
    with Keeper(runtime, task, parts, session) as keeper:
        metrics = fit(state, parts.plan, keeper.create_hooks(), objective, runtime)
    outcome = {"train_s": time.perf_counter() - began, "steps": parts.state.step}
    outcome |= {f"eval_{name}": value for name, value in metrics.items()}
    outcome |= _compare_with_teachers(runtime, parts)
    if task.config.data.test_split:
        outcome |= _evaluate_test(runtime, task, parts)
    _finish(runtime, task, parts)
    return {**outcome, **runtime.counters(), "parameters": parts.count_parameters()}


def evaluate_model(
    runtime: Runtime, model: nn.Module, parts: Parts, loader: Loader
) -> dict[str, float]:
    """Exact metrics of a model over a loader's split, as the student sees it."""
    from assembly import predict
    from engine import evaluate

    return evaluate(model, loader.batches(), partial(predict, parts.view), runtime)


def _check_teachers(runtime: Runtime, task: Task, parts: Parts) -> None:
    """Evaluate the teachers; refuse one that knows nothing."""
    from assembly import ask_teacher
    from engine import evaluate, is_finite
    from models import EMA, get_teacher_sections

    sections = [one for one in get_teacher_sections(task.config.distill) if one.model != EMA]
    # With stored answers there is none to ask.
    for section, teacher in zip(sections, parts.own_teachers(), strict=False):
        batches = parts.eval_loader.batches()
        metrics = evaluate(teacher, batches, ask_teacher, runtime)
        if not is_finite(metrics):
            raise UserError(
                f"distill.teacher {(section.weights or section.model)!r} gives answers that are "
                "not finite on data.eval_split; check its weights, its mean and std, and its dtype"
            )
        get_logger().info("teacher top-1 %.2f on %s", metrics["top1"], task.config.data.eval_split)
        chance = 1.0 / task.num_classes
        spread = (chance * (1 - chance) / max(metrics["examples"], 1)) ** 0.5
        limit = 100 * (chance + 3 * spread)
        if metrics["top1"] <= limit and not task.config.distill.allow_weak_teacher:
            raise UserError(
                f"distill.teacher has top-1 {metrics['top1']:.2f} on data.eval_split, no better "
                f"than chance ({limit:.2f}); check its weights and the preprocessing, or set "
                "distill.allow_weak_teacher"
            )
        parts.teacher_metrics.append(metrics)


def _compare_with_teachers(runtime: Runtime, parts: Parts) -> dict[str, float]:
    """Share of the evaluation split on which student and each teacher name the same class."""
    from assembly import ask_teacher, predict
    from engine import compute_agreement

    student = partial(predict, parts.view, parts.state.eval_model)
    found = {}
    for number, teacher in enumerate(parts.own_teachers()):
        name = "agreement" if number == 0 else f"agreement_{number + 1}"
        batches = parts.eval_loader.batches()
        parts.state.eval_model.eval()
        found[name] = compute_agreement(student, partial(ask_teacher, teacher), batches, runtime)
    return found


def _evaluate_test(runtime: Runtime, task: Task, parts: Parts) -> dict[str, float]:
    from datasets import create_loader

    loader = create_loader(task.config, "test", shard=(runtime.rank, runtime.world_size))
    try:
        metrics = evaluate_model(runtime, parts.state.eval_model, parts, loader)
    finally:
        loader.close()
    get_logger().info("test top-1 %.2f", metrics["top1"])
    return {f"test_{name}": value for name, value in metrics.items()}


def _finish(runtime: Runtime, task: Task, parts: Parts) -> None:
    """Export the evaluated weights and draw the curves."""
    from models import export_model
    from utils.curves import draw_run

    tensors = runtime.fetch_all(parts.state.eval_model.state_dict())
    if runtime.rank == 0:
        path = export_model(tensors, task.model_facts, task.run.path)
        draw_run(task.run.path)
        get_logger().info("exported %s", path)


def evaluate_checkpoint(runtime: Runtime, task: Task) -> None:
    """`--eval`: metrics of a checkpoint or of weights on data.eval_split."""
    from assembly import predict
    from datasets import create_loader
    from engine import NonFiniteEvaluationError, evaluate, is_finite
    from models import create_model, create_view
    from utils.checkpoint import load_checkpoint

    config = task.config
    loader = create_loader(config, "eval", shard=(runtime.rank, runtime.world_size))
    student = create_model(config.model, num_classes=task.num_classes)
    source = config.model.weights
    if task.checkpoint is not None:
        tensors, _ = load_checkpoint(task.checkpoint)
        student.load_state_dict(tensors.get("ema", tensors["model"]))
        source = str(task.checkpoint)
    view = create_view(*loader.normalisation, channels=loader.image_shape[2]).to(runtime.device)
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


if __name__ == "__main__":
    sys.exit(main())
