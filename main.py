"""Train, distil or evaluate: `python main.py --config configs/x.yaml [--key value ...]`.

The only file that knows every part: flags become a `RunConfig`, the configuration is checked
without a device, the runtime starts its replicas, and each replica builds its parts and hands
them to the engine. PyTorch is imported inside functions, so that `--help` answers at once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from utils.config import RunConfig, dump_config, load_config
from utils.errors import EXIT_USER_ERROR, UserError
from utils.log import get_logger, setup_logging
from utils.runs import Run, RunStore, get_environment
from utils.runs.store import begin, check_free

if TYPE_CHECKING:
    from torch import Tensor, nn

    from datasets import Batch, Loader
    from engine import Hooks, Plan, TrainState
    from losses import LossOutput, Objective
    from models import Teacher, View
    from utils.mixing import Mixing
    from utils.runtime.base import Runtime

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Task:
    """A checked configuration: what every replica starts from.

    Args:
      run: where the results go.
      checkpoint: weights and state to continue or to evaluate; none: a new run.
      num_classes: of student, teachers and dataset.
      model_facts: how to create the exported student again.
    """

    config: RunConfig
    run: Run
    checkpoint: Path | None
    num_classes: int
    model_facts: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line's way in; gives the exit code."""
    setup_logging()
    try:
        return start(load_config(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; --resume auto continues from the last checkpoint\n")
        return EXIT_INTERRUPTED


def start(config: RunConfig) -> int:
    """Check a configuration on the host, then run it on its runtime; gives the exit code."""
    from utils.runtime import choose_device, launch

    choose_device(config.runtime)
    task = check(config)
    from engine import NonFiniteError
    from utils.metrics import GraphBudgetError

    logging.captureWarnings(True)
    try:
        launch(config.runtime, run, task)
    except (GraphBudgetError, NonFiniteError) as error:
        sys.stderr.write(f"the run was stopped: {error}\n")
        return EXIT_FAILED
    return 0


# ---------------------------------------------------------------------- before any device


def check(config: RunConfig) -> Task:
    """All that can be found wrong without a device; nothing is written.

    Raises:
      UserError: the first thing that is wrong.
    """
    from big_vision.pp.checks import require_valid_spec
    from datasets import describe_dataset
    from losses import create_objective
    from models import create_model, create_teachers, find_model_name
    from optim_factory import check_optimizer_name, create_schedule

    find_model_name(config.model.name)
    check_optimizer_name(config.optim.name)
    require_valid_spec(config.data.train_pp, "data.train_pp")
    require_valid_spec(config.data.eval_pp, "data.eval_pp")
    facts = describe_dataset(config)
    classes = _choose_classes(config, facts.num_classes)
    total_steps, steps_per_epoch = _count_steps(config, facts.num_examples["train"])
    create_schedule(config.optim, total_steps=total_steps, steps_per_epoch=steps_per_epoch)
    create_objective(config.distill)
    student = create_model(config.model, num_classes=classes, device="meta")
    create_teachers(config.distill, num_classes=classes, device="meta")
    run_folder, checkpoint = _choose_run(config)
    if checkpoint is not None:
        _check_checkpoint(student, checkpoint)
    arguments = dict(config.model.args)
    if config.model.image_size is not None:
        arguments["img_size"] = config.model.image_size
    model_facts = {"model": config.model.name, "args": arguments, "num_classes": classes}
    return Task(config, run_folder, checkpoint, classes, model_facts)


def _choose_classes(config: RunConfig, dataset_classes: int) -> int:
    classes = config.model.num_classes or dataset_classes
    if classes < dataset_classes:
        raise UserError(
            f"model.num_classes ({classes}) is less than the {dataset_classes} classes of "
            f"{config.data.name or config.data.source}; raise it or leave it out"
        )
    return classes


def _count_steps(config: RunConfig, num_examples: int) -> tuple[int, int]:
    """Optimizer steps of the run and of one epoch."""
    batch = config.data.global_batch_size
    steps_per_epoch = num_examples // batch
    if steps_per_epoch == 0:
        raise UserError(
            f"data.global_batch_size ({batch}) exceeds the {num_examples} examples of "
            f"data.train_split ({config.data.train_split!r}); lower it"
        )
    return config.train.steps or config.train.epochs * steps_per_epoch, steps_per_epoch


def _choose_run(config: RunConfig) -> tuple[Run, Path | None]:
    """The run's directory and the checkpoint to continue or evaluate, if any."""
    from utils.checkpoint import find_checkpoint

    store = RunStore(config.run.output_dir, config.run.experiment)
    if not config.run.resume:
        run_folder = store.choose(config.run.run_id, config.train.seed)
        if not config.run.eval_only:
            check_free(run_folder, overwrite=config.run.overwrite)
        return run_folder, None
    if config.run.resume != "auto":
        checkpoint = find_checkpoint(Path(config.run.resume))
        return Run(checkpoint.parent.parent), checkpoint
    found = Run(store.folder / config.run.run_id) if config.run.run_id else store.find_newest()
    if found is None or not found.checkpoints.is_dir():
        if config.run.eval_only:
            raise UserError(
                f"run.resume 'auto' finds no checkpoint under {store.folder}; train first, or give "
                "--resume PATH"
            )
        return found or store.choose(config.run.run_id, config.train.seed), None
    return found, find_checkpoint(found.path)


def _check_checkpoint(student: nn.Module, checkpoint: Path) -> None:
    from utils.checkpoint import read_table

    table = read_table(checkpoint)
    own = {f"model/{name}": list(v.shape) for name, v in student.state_dict().items()}
    found = {name: entry[0] for name, entry in table.items() if name.startswith("model/")}
    wrong = sorted(n for n in own.keys() | found.keys() if own.get(n) != found.get(n))
    if wrong:
        name = wrong[0]
        raise UserError(
            f"run.resume ({str(checkpoint)!r}) is a checkpoint of another model: {len(wrong)} "
            f"tensors differ, first {name} {found.get(name, 'missing')} instead of "
            f"{own.get(name, 'nothing')}; resume with the model that wrote it"
        )


# ---------------------------------------------------------------------- on each replica


def run(runtime: Runtime, task: Task) -> None:
    """Build the parts on this replica and train or evaluate."""
    setup_logging(runtime.rank, runtime.world_size)
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
    """Train to the end, export the student and evaluate it on the test split."""
    from engine import fit

    hooks, close = create_hooks(runtime, task, parts)
    began = time.perf_counter()
    try:
        metrics = fit(parts.state, parts.plan, hooks, parts.objective, runtime)
    finally:
        close()
    outcome = {"train_s": time.perf_counter() - began, "steps": parts.state.step}
    outcome |= {f"eval_{name}": value for name, value in metrics.items()}
    if task.config.data.test_split:
        outcome |= _evaluate_test(runtime, task, parts)
    _finish(runtime, task, parts)
    return {**outcome, **runtime.counters(), "parameters": parts.count_parameters()}


@dataclass
class Parts:
    """What `train` works with on one replica."""

    state: TrainState
    plan: Plan
    objective: TrainObjective
    teachers: list[Teacher]
    train_loader: Loader
    eval_loader: Loader
    view: View
    teacher_metrics: list[dict[str, float]] = field(default_factory=list)

    def count_parameters(self) -> int:
        """Trainable numbers of the student."""
        return sum(p.numel() for p in self.state.model.parameters())

    def close(self) -> None:
        """Let the loaders go."""
        self.train_loader.close()
        self.eval_loader.close()


class TrainObjective:
    """A micro-batch on the device -> mixed images -> student and teachers -> one loss."""

    def __init__(
        self, view: View, mixing: Mixing, teachers: list[Teacher], losses: Objective, classes: int
    ) -> None:
        self.view = view
        self.mixing = mixing
        self.teachers = teachers
        self.losses = losses
        self.num_classes = classes

    def __call__(self, model: nn.Module, batch: Batch) -> LossOutput:
        from losses import LossInputs
        from models.views import to_pixels

        pixels = self.mixing.mix_pixels(to_pixels(batch.images), batch.extras)
        targets = self.mixing.mix_targets(batch.labels, self.num_classes, batch.extras)
        images = self.view(pixels)
        outputs = model(images)
        logits, distill_logits = outputs if isinstance(outputs, tuple) else (outputs, None)
        inputs = LossInputs(
            student_logits=logits,
            targets=targets,
            labels=batch.labels,
            mask=batch.mask,
            teacher_logits=tuple(teacher(images) for teacher in self.teachers),
            student_distill_logits=distill_logits,
        )
        return self.losses(inputs)


def build_parts(runtime: Runtime, task: Task) -> Parts:
    """Loaders, models, objective and train state of this replica, restored if asked."""
    import torch

    from datasets import create_loader
    from losses import create_objective
    from models import create_model, create_teachers, create_view
    from utils.mixing import Mixing

    config, shard = task.config, (runtime.rank, runtime.world_size)
    train_loader = create_loader(config, "train", shard=shard)
    eval_loader = create_loader(config, "eval", shard=shard)
    torch.manual_seed(config.train.seed)
    student = create_model(config.model, num_classes=task.num_classes)
    losses = create_objective(config.distill)
    state = _create_state(runtime, task, student, losses)
    teachers = create_teachers(config.distill, num_classes=task.num_classes)
    teachers = [runtime.prepare(teacher) for teacher in teachers]
    normalisation = train_loader.normalisation
    view = create_view(*normalisation, channels=train_loader.image_shape[2]).to(runtime.device)
    objective = TrainObjective(view, Mixing(config.train), teachers, losses, task.num_classes)
    plan, state.schedule = _create_plan(config, train_loader.batches_per_epoch)
    if task.checkpoint is not None:
        _restore(state, task.checkpoint)
    return Parts(state, plan, objective, teachers, train_loader, eval_loader, view)


def _create_state(
    runtime: Runtime, task: Task, student: nn.Module, losses: Objective
) -> TrainState:
    from engine import TrainState, create_ema
    from optim_factory import PREPARABLE, create_optimizer

    config = task.config
    ema = create_ema(student) if config.train.ema else None
    for module in (student, losses, ema):
        if module is not None:
            runtime.prepare(module)
    optimizer = create_optimizer(
        config.optim,
        student,
        extra=losses,
        device_arguments=runtime.optimizer_arguments(config.optim.name.lower()),
    )
    if config.optim.name.lower() in PREPARABLE:
        runtime.prepare_optimizer(optimizer)
    return TrainState(
        model=student,
        extra=losses,
        optimizer=optimizer,
        schedule=None,
        ema=ema,
        ema_decay=config.train.ema_decay,
        accumulate_steps=config.train.accumulate_steps,
        max_grad_norm=config.optim.max_grad_norm,
    )


def _create_plan(config: RunConfig, steps_per_epoch: int) -> tuple[Plan, Any]:
    from engine import Plan
    from optim_factory import create_schedule

    total = config.train.steps or config.train.epochs * steps_per_epoch
    schedule = create_schedule(config.optim, total_steps=total, steps_per_epoch=steps_per_epoch)

    def in_steps(epochs: float) -> int:
        return max(1, round(epochs * steps_per_epoch))

    plan = Plan(
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        log_every=config.train.log_every_steps,
        eval_every=in_steps(config.train.eval_every_epochs),
        checkpoint_every=config.train.checkpoint_every_steps
        or in_steps(config.train.checkpoint_every_epochs),
        seed=config.train.seed,
        graph_budget=config.runtime.graph_budget,
    )
    get_logger().info(
        "%d steps, %d an epoch; graph budget %d", total, steps_per_epoch, plan.graph_budget
    )
    return plan, schedule


def _restore(state: TrainState, checkpoint: Path) -> None:
    from utils.checkpoint import load_checkpoint, restore_state

    parts, facts = load_checkpoint(checkpoint)
    restore_state(state, parts, facts, checkpoint)
    get_logger().info("resumed from %s at step %d", checkpoint, state.step)


def create_hooks(runtime: Runtime, task: Task, parts: Parts) -> tuple[Hooks, Any]:
    """What the engine calls back, and the function that closes it all."""
    from engine import Hooks
    from utils.checkpoint import CheckpointManager, collect_state
    from utils.metrics import MetricWriter
    from utils.progress import Progress

    config, is_writer = task.config, runtime.rank == 0
    manager = CheckpointManager(task.run.checkpoints, config.train.keep_checkpoints)
    writer = None
    if is_writer:
        first_step = parts.state.step
        writer = MetricWriter(
            task.run.path, first_step=first_step, tensorboard=config.run.tensorboard
        )
    progress = Progress(parts.state.step, parts.plan.total_steps, enabled=is_writer)

    def write(step: int, scalars: dict[str, float]) -> None:
        if writer is not None:
            writer.write(step, scalars)
        progress.show(step, scalars)

    def save(state: TrainState, best: bool) -> None:
        tensors, facts = collect_state(state, runtime.fetch_all)
        if is_writer:
            manager.save(state.step, tensors, facts, best=best)
        runtime.barrier("checkpoint")

    def evaluate_state(state: TrainState) -> dict[str, float]:
        return evaluate_model(runtime, state.eval_model, parts.eval_loader, parts.view)

    def close() -> None:
        progress.close()
        if writer is not None:
            writer.close()

    hooks = Hooks(
        batches=lambda step: iterate_batches(task, parts, step),
        evaluate=evaluate_state,
        write=write,
        save=save,
        global_batch_size=config.data.global_batch_size,
    )
    return hooks, close


def iterate_batches(task: Task, parts: Parts, first_step: int) -> Iterator[Batch]:
    """Training batches from a step on, with this rank's share of the step's mixing."""
    from datasets import Position

    loader, mixing = parts.train_loader, parts.objective.mixing
    epoch, batch_in_epoch = divmod(first_step, loader.batches_per_epoch)
    position = Position(epoch, batch_in_epoch * loader.global_batch_size)
    for step, batch in enumerate(loader.batches(position), start=first_step):
        if mixing.active:
            size = loader.image_shape[:2]
            drawn = mixing.sample(step, loader.global_batch_size, size)
            start = loader.shard[0] * loader.rank_batch_size
            block = slice(start, start + loader.rank_batch_size)
            batch.extras.update({name: value[block] for name, value in drawn.items()})
        yield batch


def evaluate_model(
    runtime: Runtime, model: nn.Module, loader: Loader, view: View
) -> dict[str, float]:
    """Exact metrics of a model over a loader's split."""
    from engine import evaluate
    from models.views import to_pixels

    def predict(network: nn.Module, batch: Batch) -> Tensor:
        return network(view(to_pixels(batch.images)))

    return evaluate(model, loader.batches(), predict, runtime)


def _check_teachers(runtime: Runtime, task: Task, parts: Parts) -> None:
    """Evaluate the teachers; refuse one that knows nothing."""
    for teacher in parts.teachers:
        metrics = evaluate_model(runtime, teacher, parts.eval_loader, parts.view)
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


def _evaluate_test(runtime: Runtime, task: Task, parts: Parts) -> dict[str, float]:
    from datasets import create_loader

    shard = (runtime.rank, runtime.world_size)
    loader = create_loader(task.config, "test", shard=shard)
    try:
        metrics = evaluate_model(runtime, parts.state.eval_model, loader, parts.view)
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
    from datasets import create_loader
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
    try:
        metrics = evaluate_model(runtime, runtime.prepare(student), loader, view)
    finally:
        loader.close()
    get_logger().info(
        "%s on %s: top-1 %.2f, top-5 %.2f, loss %.4f, %d examples",
        source, config.data.eval_split, metrics["top1"], metrics["top5"], metrics["loss"],
        metrics["examples"],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
