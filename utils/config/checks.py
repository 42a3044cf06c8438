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
    has_teacher = bool(single or distill.teachers or distill.teacher_cache)
    if wants_loss and not has_teacher:
        raise UserError(
            "distill.loss is given but distill.teacher is empty; name a teacher or drop the loss"
        )
    if has_teacher and not wants_loss:
        raise UserError(
            f"distill.teacher ({single or 'given'!r}) has no loss to teach by; set distill.loss "
            "(--kd soft) or distill.losses"
        )
    names = [distill.teacher, *(teacher.model for teacher in distill.teachers)]
    if "ema" in names and not config.train.ema:
        raise UserError(
            "distill.teacher 'ema' needs the average of the student's weights; set train.ema"
        )
    for term in distill.losses:
        if term.weight == 0 and term.weight_end:
            raise UserError(
                f"distill.losses: {term.name} has weight 0 and weight_end {term.weight_end:g}; a "
                "term of weight 0 is only logged: give it a weight, and warmup_epochs for a rise"
            )
    if distill.teacher_cache and distill.views == "independent":
        raise UserError(
            "distill.views 'independent' contradicts distill.teacher_cache: stored answers belong "
            "to the student's crops; drop one of them"
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
    if runtime.parallel != "spmd" and (runtime.mesh_fsdp > 1 or runtime.mesh_data):
        key = "mesh_fsdp" if runtime.mesh_fsdp > 1 else "mesh_data"
        raise UserError(
            f"runtime.{key} ({getattr(runtime, key)}) needs a mesh; set runtime.parallel=spmd or "
            f"leave it out"
        )
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
            "exceed; lower it or train.eval_every_epochs, or leave it out"
        )


def check_warmup(warmup_steps: int, total_steps: int) -> None:
    """Refuse a warm-up that is longer than the run."""
    if warmup_steps > total_steps:
        raise UserError(
            f"optim.warmup_steps ({warmup_steps}) exceeds the run's {total_steps} steps; lower it "
            "or raise train.epochs"
        )
