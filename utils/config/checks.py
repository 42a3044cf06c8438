"""Checks across keys that need nothing but the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.sections import RunConfig


# The schedules that keys of their own belong to.
_PLATEAU, _CYCLED = ("plateau",), ("cosine", "linear", "polynomial")
# What keeps gradients small, one way at a time.
_LIMITS = ("max_grad_norm", "max_grad_value", "max_grad_ratio")


def check_config(config: RunConfig) -> None:
    """Refuse keys that contradict each other.

    Raises:
      UserError: the first contradiction, with the way out.
    """
    _check_model_args(config)
    _check_distillation(config)
    _check_optimizer(config)
    _check_runtime(config)
    _check_profile(config)
    if config.data.allow_download and config.data.source != "tfds":
        raise UserError(
            "data.allow_download has TFDS fetch a dataset, and data.source is "
            f"{config.data.source}; leave it out, or set data.source=tfds"
        )
    train = config.train
    if train.early_stop_min_delta and not train.early_stop_patience:
        raise UserError(
            f"train.early_stop_min_delta ({train.early_stop_min_delta:g}) has no effect without "
            "train.early_stop_patience; set it, or leave both out"
        )
    _check_averages(config)
    if train.mix_off_epoch is not None:
        _check_mix_off(config, train.mix_off_epoch)
    if train.image_sizes:
        _check_image_sizes(config)
    if config.run.eval_only and not (config.run.resume or config.model.weights):
        raise UserError(
            "run.eval_only needs weights to evaluate; add --resume auto, --resume PATH or "
            "--model.weights PATH"
        )


def _check_averages(config: RunConfig) -> None:
    train = config.train
    for key in ("ema_start_epoch", "ema_more"):
        if getattr(train, key) and not train.ema:
            raise UserError(
                f"train.{key} ({getattr(train, key)}) has no effect without train.ema; set it, or "
                "leave both out"
            )
    if train.steps is None and train.ema_start_epoch >= train.epochs:
        raise UserError(
            f"train.ema_start_epoch ({train.ema_start_epoch:g}) is not before the end of the run's "
            f"{train.epochs} epochs; lower it, or leave train.ema out"
        )
    decays = (train.ema_decay, *train.ema_more)
    if len(set(decays)) < len(decays):
        raise UserError(
            f"train.ema_more ({', '.join(map(str, train.ema_more))}) names a decay twice, or that "
            f"of train.ema_decay ({train.ema_decay}); give each once"
        )


def _check_mix_off(config: RunConfig, epoch: float) -> None:
    train = config.train
    if not train.mixup_alpha and not train.cutmix_alpha:
        raise UserError(
            f"train.mix_off_epoch ({epoch:g}) has nothing to switch off; set train.mixup_alpha or "
            "train.cutmix_alpha, or leave it out"
        )
    if train.steps is None and epoch >= train.epochs:
        raise UserError(
            f"train.mix_off_epoch ({epoch:g}) is not before the end of the run's {train.epochs} "
            "epochs; lower it, or leave it out"
        )


def _check_image_sizes(config: RunConfig) -> None:
    train, largest = config.train, config.model.image_size
    if 0 not in train.image_sizes:
        raise UserError(
            f"train.image_sizes begins at epoch {min(train.image_sizes):g}, so nothing says what "
            "the run begins with; give a side for epoch 0"
        )
    last = max(train.image_sizes)
    if train.steps is None and last >= train.epochs:
        raise UserError(
            f"train.image_sizes names epoch {last:g}, which is not before the end of the run's "
            f"{train.epochs} epochs; lower it, or leave it out"
        )
    for epoch, side in train.image_sizes.items():
        if largest is not None and side > largest:
            raise UserError(
                f"train.image_sizes ({side} from epoch {epoch:g}) exceeds model.image_size "
                f"({largest}); lower it, or raise model.image_size"
            )
    if train.scan_layers:
        raise UserError(
            "train.image_sizes and train.scan_layers are both set, but one compiled block stands "
            "for images of one size; leave one out"
        )


def _check_model_args(config: RunConfig) -> None:
    """Refuse arguments of a model that a key of its own would override in silence."""
    model = config.model
    taken = {
        "num_classes": "model.num_classes",
        "pretrained": "model.pretrained",
        "img_size": "model.image_size" if model.image_size is not None else "",
        "drop_rate": "model.drop_rate" if model.drop_rate else "",
        "drop_path_rate": "model.drop_path_rate" if model.drop_path_rate else "",
    }
    for name, key in taken.items():
        if key and name in model.args:
            raise UserError(
                f"model.args.{name} ({model.args[name]!r}) would be overridden by {key}; set that "
                "key and leave the argument out"
            )
    for teacher in config.distill.teachers:
        if "num_classes" in teacher.args:
            raise UserError(
                f"distill.teachers args.num_classes ({teacher.args['num_classes']!r}) would be "
                "overridden; give the teacher num_classes itself"
            )


def _check_distillation(config: RunConfig) -> None:
    distill = config.distill
    if distill.loss and distill.losses:
        raise UserError(
            f"distill.loss ({distill.loss!r}) and distill.losses are both given; keep one of them"
        )
    single = distill.teacher or distill.teacher_weights
    if single and distill.teachers:
        raise UserError(
            f"distill.teacher ({single!r}) and distill.teachers are both given; keep one of them"
        )
    wants_loss = bool(distill.loss or distill.losses)
    has_teacher = bool(single or distill.teachers or distill.teacher_cache or distill.peer)
    if wants_loss and not has_teacher:
        given = "distill.loss" if distill.loss else "distill.losses"
        raise UserError(
            f"{given} is given but distill.teacher is empty; name a teacher or drop the loss"
        )
    if has_teacher and not wants_loss:
        raise UserError(
            f"distill.teacher ({single or distill.peer or 'given'!r}) has no loss to teach by; set "
            "distill.loss (--kd soft) or distill.losses"
        )
    if config.train.task != "distil" and 0 in [one.num_classes for one in distill.teachers]:
        raise UserError(
            "distill.teachers num_classes (0) is a teacher that answers by features alone, which "
            f"train.task={config.train.task} does not ask for; leave it out, or set "
            "train.task=distil"
        )
    names = [distill.teacher, *(teacher.model for teacher in distill.teachers)]
    if "ema" in names and not config.train.ema:
        raise UserError(
            "distill.teacher 'ema' needs the average of the student's weights; set train.ema"
        )
    _check_selves(config)
    _check_schedules(config)
    _check_features(config)
    _check_views(config)
    _check_peer(config)
    if distill.alpha_schedule != "constant" and not wants_loss:
        raise UserError(
            f"distill.alpha_schedule ({distill.alpha_schedule}) has no effect without a loss to "
            "teach by; leave it out"
        )


def _check_schedules(config: RunConfig) -> None:
    """Refuse terms that would never count."""
    train = config.train
    for term in config.distill.losses:
        if term.weight == 0 and term.weight_end:
            raise UserError(
                f"distill.losses: {term.name} has weight 0 and weight_end {term.weight_end:g}; a "
                "term of weight 0 is only logged: give it a weight, and warmup_epochs for a rise"
            )
        if train.steps is None and term.start_epoch >= train.epochs:
            raise UserError(
                f"distill.losses: {term.name} has start_epoch {term.start_epoch:g}, which is not "
                f"before the end of the run's {train.epochs} epochs; lower it, or leave the term "
                "out"
            )


def _check_selves(config: RunConfig) -> None:
    """The student as its own teacher is the model that it is, and sees what it sees."""
    for teacher in config.distill.teachers:
        plain = type(teacher)(model=teacher.model, weight=teacher.weight)
        changed = [name for name, value in teacher if value != getattr(plain, name)]
        if teacher.model in ("ema", "past") and changed:
            raise UserError(
                f"distill.teachers {changed[0]} means nothing to the teacher {teacher.model!r}, "
                "which is the student itself; leave it out"
            )


def _check_peer(config: RunConfig) -> None:
    distill, model = config.distill, config.model
    if distill.peer_args and distill.peer in ("", "self"):
        raise UserError(
            "distill.peer_args are arguments of a peer that is a model of its own; name it by "
            "distill.peer, or leave them out"
        )
    if not distill.peer:
        return
    others = {
        "distill.teacher": distill.teacher or distill.teacher_weights or distill.teachers,
        "distill.teacher_cache": distill.teacher_cache,
        "distill.views": distill.views != "consistent",
    }
    taken = next((key for key, value in others.items() if value), None)
    if taken:
        raise UserError(
            f"distill.peer ({distill.peer!r}) teaches alone, by the student's own images, and "
            f"{taken} is given, too; drop one of them"
        )
    if distill.peer == "self" and not (model.drop_path_rate or model.drop_rate):
        raise UserError(
            "distill.peer 'self' needs model.drop_path_rate, or both answers of the student are "
            "one and the same; set it"
        )


def _check_views(config: RunConfig) -> None:
    distill, strong_pp = config.distill, config.data.strong_pp
    for teacher in distill.teachers:
        if teacher.size == "student" and (distill.teacher_cache or not config.train.image_sizes):
            reason = "has no effect without train.image_sizes"
            if distill.teacher_cache:
                reason = "changes with the steps, and distill.teacher_cache holds answers to crops"
            raise UserError(f"distill.teachers size ('student') {reason}; leave it out")
    if distill.teacher_cache and distill.views != "consistent":
        raise UserError(
            f"distill.views {distill.views!r} contradicts distill.teacher_cache: stored answers "
            "belong to the student's crops; drop one of them"
        )
    mixed = [key for key in ("mixup_alpha", "cutmix_alpha") if getattr(config.train, key)]
    if distill.views == "rotations" and mixed:
        raise UserError(
            f"train.{mixed[0]} ({getattr(config.train, mixed[0])}) contradicts distill.views="
            "rotations: which image a turned copy belongs to is learnt, and a mixed one is two; "
            "set it to 0"
        )
    if distill.views == "weak_strong" and not strong_pp:
        raise UserError(
            "distill.views 'weak_strong' needs data.strong_pp, the preprocessing string of the "
            "second view; give it, or leave distill.views out"
        )
    if strong_pp and distill.views != "weak_strong":
        raise UserError(
            f"data.strong_pp ({strong_pp!r}) has no effect without distill.views=weak_strong; set "
            "it, or leave both out"
        )


def _check_features(config: RunConfig) -> None:
    """Refuse what compares features where logits are compared, and a hidden layer of no mlp."""
    distill, task = config.distill, config.train.task
    if distill.projector_width and distill.projector != "mlp":
        raise UserError(
            f"distill.projector_width ({distill.projector_width}) has no effect on "
            f"distill.projector={distill.projector}; set mlp, or leave it out"
        )
    for key in ("standardise", "statistics") if task != "distil" else ():
        value = getattr(distill, key)
        if value not in ("none", ""):
            raise UserError(
                f"distill.{key} ({value!r}) means nothing to train.task={task}, which compares no "
                "features of teachers; leave it out, or set train.task=distil"
            )
    for one in config.data.evals if task != "distil" else ():
        if one.bank:
            raise UserError(
                f"data.evals {one.name!r} has bank ({one.bank!r}), which means nothing to "
                f"train.task={task}; leave it out, or set train.task=distil"
            )
    for term in distill.losses if task != "distil" else ():
        for key in ("of", "teacher"):
            value = getattr(term, key)
            if value != type(term).model_fields[key].default:
                raise UserError(
                    f"distill.losses: {term.name} has {key} ({value!r}), which means nothing to "
                    f"train.task={task}; leave it out, or set train.task=distil"
                )


def _check_optimizer(config: RunConfig) -> None:
    optim = config.optim
    limits = {key: getattr(optim, key) for key in _LIMITS if getattr(optim, key) is not None}
    if len(limits) > 1:
        (first, second), values = list(limits)[:2], list(limits.values())
        raise UserError(
            f"optim.{first} ({values[0]:g}) and optim.{second} ({values[1]:g}) are both given; "
            "keep one of them"
        )
    if optim.base_lr is None and optim.min_lr > optim.lr:
        raise UserError(
            f"optim.min_lr ({optim.min_lr}) exceeds optim.lr ({optim.lr}); lower min_lr"
        )
    if config.train.steps is None and optim.warmup_steps is None:
        if optim.warmup_epochs > config.train.epochs:
            raise UserError(
                f"optim.warmup_epochs ({optim.warmup_epochs:g}) exceeds train.epochs "
                f"({config.train.epochs}); lower it or raise train.epochs"
            )
    elif optim.warmup_steps is not None and config.train.steps is not None:
        check_warmup(optim.warmup_steps, config.train.steps)
    _check_schedule(config)
    if optim.schedule == "step" and not optim.decay_epochs:
        raise UserError(
            "optim.schedule is 'step' but optim.decay_epochs is empty; name the epochs of the steps"
        )


def _check_schedule(config: RunConfig) -> None:
    """Refuse keys of another schedule than the run has: they would have no effect."""
    optim, fields = config.optim, type(config.optim).model_fields
    needs = {"plateau_patience": _PLATEAU, "plateau_min_delta": _PLATEAU, "cycles": _CYCLED}
    for key, schedules in needs.items():
        value = getattr(optim, key)
        if value != fields[key].default and optim.schedule not in schedules:
            raise UserError(
                f"optim.{key} ({value:g}) has no effect on optim.schedule={optim.schedule}; set "
                f"{' or '.join(schedules)}, or leave it out"
            )
    for key in ("cycle_decay", "cycle_length_factor"):
        value = getattr(optim, key)
        if value != fields[key].default and optim.cycles == 1:
            raise UserError(
                f"optim.{key} ({value:g}) has no effect on a single cycle; set optim.cycles, or "
                "leave it out"
            )


def _check_runtime(config: RunConfig) -> None:
    runtime = config.runtime
    for key in ("mesh_fsdp", "mesh_context", "mesh_data"):
        least = 1 if key == "mesh_data" else 2
        if runtime.parallel != "spmd" and (getattr(runtime, key) or 0) >= least:
            raise UserError(
                f"runtime.{key} ({getattr(runtime, key)}) needs a mesh; set "
                "runtime.parallel=spmd or leave it out"
            )
    if runtime.mesh_context > 1:
        _check_context(config)
    for key in ("num_processes", "cpu_processes"):
        count = getattr(runtime, key) or 1
        if runtime.parallel == "spmd" and count > 1:
            raise UserError(
                f"runtime.{key} ({count}) contradicts runtime.parallel=spmd, which has one process "
                "for all devices of a host; drop one of them"
            )
    if runtime.num_processes and runtime.cpu_processes:
        raise UserError(
            f"runtime.num_processes ({runtime.num_processes}) and runtime.cpu_processes "
            f"({runtime.cpu_processes}) are both given; keep one of them"
        )
    if runtime.parallel == "spmd" and (runtime.precision, runtime.reduce_dtype) == ("fp32", "bf16"):
        raise UserError(
            "runtime.reduce_dtype (bf16) has no effect on a mesh with runtime.precision=fp32: its "
            "products give the sums in fp32; set runtime.precision=bf16, or leave it out"
        )
    mixed = runtime.precision == "bf16" and runtime.reduce_dtype == "fp32"
    skips = not config.model.xla_patches or config.model.skip_patches
    if runtime.parallel == "spmd" and mixed and skips:
        off = "skip_patches leaves some out" if config.model.xla_patches else "xla_patches is off"
        raise UserError(
            f"model.{off}, but on a mesh the patches are what sums the gradients of bf16 "
            "in runtime.reduce_dtype (fp32); switch them on, or set runtime.reduce_dtype=bf16"
        )
    if config.train.remat and config.train.scan_layers:
        raise UserError(
            "train.remat and train.scan_layers are both set; scan_layers keeps each block's input "
            "alone already, drop train.remat"
        )
    if config.train.scan_layers and (config.model.drop_path_rate or config.model.drop_rate):
        raise UserError(
            "train.scan_layers runs one block's graph for all blocks, so it cannot draw dropout; "
            "set model.drop_rate and model.drop_path_rate to 0, or drop train.scan_layers"
        )


def _check_context(config: RunConfig) -> None:
    """Refuse what cannot deal the tokens of a sequence to several devices."""
    parts, length = config.runtime.mesh_context, config.data.sequence_length
    if config.train.task != "language":
        raise UserError(
            f"runtime.mesh_context ({parts}) deals out the tokens of a sequence, and "
            f"train.task={config.train.task} has none; leave it out, or use runtime.mesh_data"
        )
    if length % parts:
        raise UserError(
            f"runtime.mesh_context ({parts}) does not divide data.sequence_length ({length}); "
            "change one of them"
        )
    if config.model.kernels == "pallas":
        raise UserError(
            f"runtime.mesh_context ({parts}) deals out the tokens of a sequence, and model.kernels "
            "(pallas) walk over it as a whole; choose model.kernels: auto or xla"
        )


def _check_profile(config: RunConfig) -> None:
    if not config.profile.steps:
        return
    first, last = map(int, config.profile.steps.split("-"))
    if last < first:
        raise UserError(
            f"profile.steps ({config.profile.steps!r}) ends before it begins; write FIRST-LAST"
        )


def check_profiled_steps(steps: str, total_steps: int) -> None:
    """Refuse a trace of steps that the run does not have."""
    if steps and int(steps.split("-")[1]) >= total_steps:
        raise UserError(
            f"profile.steps ({steps!r}) lies beyond the run's {total_steps} steps, which are 0 to "
            f"{total_steps - 1}; name earlier ones or raise train.epochs"
        )


def check_patience(patience: int, evaluations: int) -> None:
    """Refuse to wait for more evaluations than the run has: it could never end early."""
    if patience >= evaluations > 0 and patience:
        raise UserError(
            f"train.early_stop_patience ({patience}) can end no run with {evaluations} "
            f"evaluation{'' if evaluations == 1 else 's'}, the first of which has nothing to "
            "exceed; lower it or the distance of evaluations (train.eval_every_epochs, "
            "train.eval_every_steps), or leave it out"
        )


def check_warmup(warmup_steps: int, total_steps: int) -> None:
    """Refuse a warm-up that is longer than the run."""
    if warmup_steps > total_steps:
        raise UserError(
            f"optim.warmup_steps ({warmup_steps}) exceeds the run's {total_steps} steps; lower it "
            "or raise train.epochs"
        )
