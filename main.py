"""Train, distil or evaluate: `python main.py --config configs/x.yaml [--key value ...]`.

Flags become a `RunConfig`; `preflight` checks it without a device; the runtime starts its replicas;
each replica builds its parts (`assembly`) and hands them to the engine. PyTorch is imported inside
functions, so that `--help` answers at once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from utils.config import RunConfig, dump_config, load_config
from utils.errors import EXIT_USER_ERROR, UserError
from utils.log import get_logger, setup_logging
from utils.runs import get_environment
from utils.runs.store import begin
from utils.runtime import choose_device, is_silent_rank, launch

if TYPE_CHECKING:
    from torch import nn

    from assembly import Parts
    from datasets import Loader
    from engine import Hooks, TrainState
    from preflight import Task
    from utils.runtime.base import Runtime

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """The command line's way in; gives the exit code."""
    setup_logging()
    try:
        return start(load_config(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        if not is_silent_rank():
            sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; --resume auto continues from the last checkpoint\n")
        return EXIT_INTERRUPTED


def start(config: RunConfig) -> int:
    """Check a configuration on the host, then run it on its runtime; gives the exit code."""
    choose_device(config.runtime)
    from engine import NonFiniteError
    from preflight import check
    from utils.metrics import GraphBudgetError
    from utils.runtime.base import ReplicaError
    from utils.runtime.processes import GroupError

    task = check(config)
    logging.captureWarnings(True)
    try:
        return launch(config.runtime, run, task)
    except (GraphBudgetError, NonFiniteError, ReplicaError, GroupError) as error:
        sys.stderr.write(f"the run was stopped: {error}\n")
        return EXIT_FAILED


def run(runtime: Runtime, task: Task) -> None:
    """On one replica: build the parts, train or evaluate, keep the run's status true."""
    from assembly import build_parts

    setup_logging(runtime.rank, runtime.world_size)
    task = _agree(runtime, task)
    if task.config.run.eval_only:
        evaluate_checkpoint(runtime, task)
        return
    started = time.time()
    parts = build_parts(runtime, task)
    _check_teachers(runtime, task, parts)
    is_writer = runtime.rank == 0
    if is_writer:
        _begin_run(runtime, task, parts, started)
    try:
        outcome = train(runtime, task, parts)
    except BaseException as error:
        if is_writer:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            reason = f"{type(error).__name__}: {error}"
            task.run.update(status=status, reason=reason, ended=time.time())
        raise
    finally:
        parts.close()
    if is_writer:
        task.run.update(status="complete", ended=time.time(), final=outcome)
        get_logger().info("complete: %s", task.run.path)


def _agree(runtime: Runtime, task: Task) -> Task:
    """Rank zero's choice of directory and checkpoint: names are made from the clock."""
    path, checkpoint = runtime.broadcast_value((task.run.path, task.checkpoint))
    return replace(task, run=replace(task.run, path=path), checkpoint=checkpoint)


def _begin_run(runtime: Runtime, task: Task, parts: Parts, started: float) -> None:
    """Write the run's first facts, once every part has been built."""
    facts = {
        "environment": {**get_environment(), **runtime.describe()},
        "teachers": parts.teacher_metrics,
    }
    if task.checkpoint is None:
        facts["started"] = started
        text = dump_config(task.config)
        begin(task.run, text, facts, overwrite=task.config.run.overwrite)
    else:
        task.run.update(status="running", resumed=started, **facts)


def train(runtime: Runtime, task: Task, parts: Parts) -> dict[str, Any]:
    """Train to the end, export the student and report what it has become."""
    from engine import fit

    hooks, close = create_hooks(runtime, task, parts)
    state = parts.state
    objective = runtime.prepare_objective(parts.objective, state.model, state.extra)
    began = time.perf_counter()
    try:
        metrics = fit(state, parts.plan, hooks, objective, runtime)
    finally:
        close()
    outcome = {"train_s": time.perf_counter() - began, "steps": parts.state.step}
    outcome |= {f"eval_{name}": value for name, value in metrics.items()}
    outcome |= _compare_with_teachers(runtime, parts)
    if task.config.data.test_split:
        outcome |= _evaluate_test(runtime, task, parts)
    _finish(runtime, task, parts)
    return {**outcome, **runtime.counters(), "parameters": parts.count_parameters()}


def create_hooks(runtime: Runtime, task: Task, parts: Parts) -> tuple[Hooks, Callable[[], None]]:
    """What the engine calls back, and the function that closes it all."""
    from assembly import iterate_batches
    from engine import Hooks
    from utils.checkpoint import CheckpointManager, collect_state
    from utils.metrics import MetricWriter
    from utils.progress import Progress
    from utils.runtime.tracing import Tracer

    config, is_writer = task.config, runtime.rank == 0
    manager = CheckpointManager(task.run.checkpoints, config.train.keep_checkpoints)
    progress = Progress(parts.state.step, parts.plan.total_steps, enabled=is_writer)
    writer = None
    if is_writer:
        writer = MetricWriter(
            task.run.path, first_step=parts.state.step, tensorboard=config.run.tensorboard
        )

    def write(step: int, scalars: dict[str, float]) -> None:
        if writer is not None:
            writer.write(step, {**scalars, **parts.train_loader.counters})
        progress.show(step, scalars)

    def save(state: TrainState, best: bool) -> None:
        tensors, facts = collect_state(state, runtime.fetch_all)
        if is_writer:
            manager.save(state.step, tensors, facts, best=best)
        runtime.barrier("checkpoint")

    def evaluate_state(state: TrainState) -> dict[str, float]:
        return evaluate_model(runtime, state.eval_model, parts, parts.eval_loader)

    tracer = Tracer(runtime, config.profile.steps, task.run.path / "profile")

    def close() -> None:
        tracer.close()
        progress.close()
        if writer is not None:
            writer.close()

    hooks = Hooks(
        batches=partial(iterate_batches, parts),
        evaluate=evaluate_state,
        write=write,
        save=save,
        global_batch_size=config.data.global_batch_size,
        begin_step=tracer.begin_step,
    )
    return hooks, close


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
    from engine import evaluate

    for teacher in parts.own_teachers():
        batches = parts.eval_loader.batches()
        metrics = evaluate(teacher, batches, ask_teacher, runtime)
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
    from engine import evaluate
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


if __name__ == "__main__":
    sys.exit(main())
