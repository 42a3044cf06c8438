"""Checks across keys that need nothing but the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from utils.config.metadata import ConfigSection, KeyInfo, read_key_info
from utils.config.sections import RunConfig
from utils.errors import UserError, get_hint


def check_config(config: RunConfig) -> None:
    """Raise a UserError for the first contradiction between keys, with the way out."""
    _check_model_args(config)
    for name, value, info in _iterate_set_keys(config, ""):
        clash = next((other for other in info.excludes if _holds(config, other)), None)
        if clash:
            text = f"{name} ({value!r}) and {clash} exclude each other; keep one of them"
            raise UserError(text, code="config.conflict", key=name, value=value)
        if info.known and value not in info.known and not config.run.imports:
            hint = get_hint(str(value), info.known)
            text = f"unknown {name} {value!r} without run.imports; {hint}"
            raise UserError(text, code="config.invalid_value", key=name, value=value)
        if info.needs and not any(_holds(config, need) for need in info.needs):
            text = f"{name} ({value!r}) needs {' or '.join(info.needs)}; set it or remove {name}"
            raise UserError(text, code="config.conflict", key=name, value=value)
    _check_distillation(config)
    _check_views(config)
    _check_optimizer(config)
    _check_runtime(config)
    _check_train(config)
    if config.profile.steps:
        first, last = map(int, config.profile.steps.split("-"))
        if last < first:
            raise UserError(
                f"profile.steps ({config.profile.steps!r}) ends before it begins; write FIRST-LAST"
            )


def _iterate_set_keys(section: ConfigSection, prefix: str) -> Iterator[tuple[str, object, KeyInfo]]:
    """Yield name, value and rules of each key that is not at its default, in lists, too."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, ConfigSection):
            yield from _iterate_set_keys(value, f"{prefix}{name}.")
            continue
        if value != field.default:
            yield f"{prefix}{name}", value, read_key_info(field)
        for number, item in enumerate(value if isinstance(value, tuple) else ()):
            if isinstance(item, ConfigSection):
                yield from _iterate_set_keys(item, f"{prefix}{name}[{number}].")


def _holds(config: RunConfig, condition: str) -> bool:
    """Return whether `section.key` is not at its default, or `section.key=value` is true."""
    key, _, wanted = condition.partition("=")
    section, _, name = key.partition(".")
    owner = getattr(config, section)
    value = getattr(owner, name)
    return str(value) == wanted if wanted else value != type(owner).model_fields[name].default


def _refuse_late_epoch(config: RunConfig, key: str, epoch: float, remedy: str) -> None:
    train = config.train
    if train.steps is None and epoch >= train.epochs:
        raise UserError(
            f"{key} ({epoch:g}) is not before the end of the run's {train.epochs} epochs; lower "
            f"it, or {remedy}"
        )


def _check_train(config: RunConfig) -> None:
    train = config.train
    _refuse_late_epoch(config, "train.ema_start_epoch", train.ema_start_epoch, "remove train.ema")
    decays = (train.ema_decay, *train.ema_more)
    if len(set(decays)) < len(decays):
        raise UserError(
            f"train.ema_more ({', '.join(map(str, train.ema_more))}) repeats a decay, or that of "
            f"train.ema_decay ({train.ema_decay}); give each once"
        )
    if train.mix_off_epoch is not None:
        _refuse_late_epoch(config, "train.mix_off_epoch", train.mix_off_epoch, "remove it")
    if train.image_sizes:
        _check_image_sizes(config)


def _check_image_sizes(config: RunConfig) -> None:
    train, largest = config.train, config.model.image_size
    if 0 not in train.image_sizes:
        raise UserError(
            f"train.image_sizes begins at epoch {min(train.image_sizes):g}; add a side for epoch 0"
        )
    _refuse_late_epoch(config, "train.image_sizes", max(train.image_sizes), "remove that epoch")
    for epoch, side in train.image_sizes.items():
        if largest is not None and side > largest:
            raise UserError(
                f"train.image_sizes ({side} from epoch {epoch:g}) exceeds model.image_size "
                f"({largest}); lower it, or raise model.image_size"
            )


def _check_model_args(config: RunConfig) -> None:
    """Refuse arguments of a model that a key of its own would override in silence."""
    model = config.model
    keys = {"num_classes": "num_classes", "pretrained": "pretrained"}
    if model.image_size is not None:
        keys["img_size"] = "image_size"
    keys |= {name: name for name in ("drop_rate", "drop_path_rate") if getattr(model, name)}
    for name, key in keys.items():
        if name in model.args:
            raise UserError(
                f"model.args.{name} ({model.args[name]!r}) would be overridden by model.{key}; set "
                "that key and remove the argument"
            )
    for teacher in config.distill.teachers:
        if "num_classes" in teacher.args:
            raise UserError(
                f"distill.teachers args.num_classes ({teacher.args['num_classes']!r}) would be "
                "overridden; set num_classes of the teacher itself"
            )


def _check_distillation(config: RunConfig) -> None:
    distill = config.distill
    has_loss = bool(distill.loss or distill.losses)
    teacher = distill.teacher or distill.teacher_weights or distill.teachers or distill.peer
    if has_loss and not (teacher or distill.teacher_cache):
        given = "distill.loss" if distill.loss else "distill.losses"
        raise UserError(
            f"{given} is set but distill.teacher is empty; name a teacher or remove the loss"
        )
    if (teacher or distill.teacher_cache) and not has_loss:
        raise UserError(
            "distill.teacher is set but no distillation loss; set distill.loss (--kd soft) or "
            "distill.losses"
        )
    if config.train.task != "distil" and 0 in [entry.num_classes for entry in distill.teachers]:
        raise UserError(
            "distill.teachers num_classes (0) is a teacher without a classifier, which is not "
            f"supported with train.task={config.train.task}; remove it, or set train.task=distil"
        )
    names = [distill.teacher, *(entry.model for entry in distill.teachers)]
    if "ema" in names and not config.train.ema:
        raise UserError("distill.teacher 'ema' is the average of the student; set train.ema")
    for entry in distill.teachers:
        changed = [
            name
            for name, value in entry
            if name not in ("model", "weight") and value != type(entry).model_fields[name].default
        ]
        if entry.model in ("ema", "past") and changed:
            raise UserError(
                f"distill.teachers {changed[0]} is not supported with the teacher "
                f"{entry.model!r}, which is the student itself; remove it"
            )
    for term in distill.losses:
        if term.weight == 0 and term.weight_end:
            raise UserError(
                f"distill.losses: {term.name} has weight 0 and weight_end {term.weight_end:g}; a "
                "term of weight 0 is only logged: set its weight, and warmup_epochs for a rise"
            )
        key = f"distill.losses: {term.name} start_epoch"
        _refuse_late_epoch(config, key, term.start_epoch, "remove the term")


def _check_views(config: RunConfig) -> None:
    distill, train, strong_pp = config.distill, config.train, config.data.strong_pp
    if strong_pp and any(member.pp for member in config.data.mix):
        raise UserError(
            "data.mix pp is not supported with data.strong_pp, the one string of all second views; "
            "remove one of them"
        )
    if distill.peer_args and distill.peer == "self":
        raise UserError(
            "distill.peer_args is not supported with distill.peer=self, which has the student's "
            "arguments; remove it"
        )
    if distill.peer == "self" and not (config.model.drop_path_rate or config.model.drop_rate):
        raise UserError(
            "distill.peer=self needs model.drop_path_rate, or both outputs of the student are "
            "equal; set it"
        )
    for teacher in distill.teachers:
        if teacher.size == "student" and (distill.teacher_cache or not train.image_sizes):
            reason = "needs train.image_sizes; set it"
            if distill.teacher_cache:
                reason = "is not supported with distill.teacher_cache, which holds logits of crops"
            raise UserError(f"distill.teachers size ('student') {reason} or remove size")
    mixed = [key for key in ("mixup_alpha", "cutmix_alpha") if getattr(train, key)]
    if distill.views == "rotations" and mixed:
        raise UserError(
            f"train.{mixed[0]} ({getattr(train, mixed[0])}) is not supported with distill.views="
            "rotations, because a rotated copy belongs to one image; set it to 0"
        )
    if distill.views == "weak_strong" and not strong_pp:
        raise UserError(
            "distill.views=weak_strong needs data.strong_pp, the preprocessing string of the "
            "second view; set it or remove distill.views"
        )


def _check_optimizer(config: RunConfig) -> None:
    optim, train = config.optim, config.train
    if optim.base_lr is None and optim.min_lr > optim.lr:
        raise UserError(
            f"optim.min_lr ({optim.min_lr}) exceeds optim.lr ({optim.lr}); lower min_lr"
        )
    if optim.warmup_steps is None and train.steps is None and optim.warmup_epochs > train.epochs:
        raise UserError(
            f"optim.warmup_epochs ({optim.warmup_epochs:g}) exceeds train.epochs "
            f"({train.epochs}); lower it or raise train.epochs"
        )
    if optim.warmup_steps is not None and train.steps is not None:
        check_warmup(optim.warmup_steps, train.steps)
    if optim.schedule == "step" and not optim.decay_epochs:
        raise UserError("optim.schedule=step needs optim.decay_epochs, the epochs of its steps")


def _check_runtime(config: RunConfig) -> None:
    runtime, model = config.runtime, config.model
    if runtime.mesh_context > 1:
        _check_context(config)
    if config.train.scan_layers and (model.drop_path_rate or model.drop_rate):
        raise UserError(
            "train.scan_layers is not supported with dropout, because all blocks run one graph; "
            "set model.drop_rate and model.drop_path_rate to 0, or remove train.scan_layers"
        )
    if runtime.parallel != "spmd":
        return
    for key in ("num_processes", "cpu_processes"):
        count = getattr(runtime, key) or 1
        if count > 1:
            raise UserError(
                f"runtime.{key} ({count}) is not supported with runtime.parallel=spmd, which has "
                "one process for all devices of a host; remove one of them"
            )
    for teacher in config.distill.teachers:
        if teacher.parts > 1:
            raise UserError(
                f"distill.teachers parts ({teacher.parts}) is not supported with "
                "runtime.parallel=spmd, whose devices share each batch; remove one of them"
            )
    if (runtime.precision, runtime.reduce_dtype) == ("fp32", "bf16"):
        raise UserError(
            "runtime.reduce_dtype (bf16) has no effect on a mesh with runtime.precision=fp32, "
            "whose products are summed in fp32; set runtime.precision=bf16, or remove it"
        )
    skips = not model.xla_patches or model.skip_patches
    if (runtime.precision, runtime.reduce_dtype) == ("bf16", "fp32") and skips:
        key = "skip_patches" if model.xla_patches else "xla_patches"
        raise UserError(
            f"model.{key} ({getattr(model, key)}) is not supported on a mesh with "
            "runtime.precision=bf16 and runtime.reduce_dtype=fp32, because the patches sum the "
            "gradients in fp32; enable all patches, or set runtime.reduce_dtype=bf16"
        )


def _check_context(config: RunConfig) -> None:
    """Refuse runs that cannot split the tokens of a sequence over several devices."""
    parts, length = config.runtime.mesh_context, config.data.sequence_length
    if config.train.task != "language":
        raise UserError(
            f"runtime.mesh_context ({parts}) splits a sequence of tokens, and "
            f"train.task={config.train.task} has none; remove it, or use runtime.mesh_data"
        )
    if length % parts:
        raise UserError(
            f"runtime.mesh_context ({parts}) does not divide data.sequence_length ({length}); "
            "change one of them"
        )
    if config.model.kernels == "pallas":
        raise UserError(
            f"runtime.mesh_context ({parts}) splits a sequence of tokens, and model.kernels=pallas "
            "needs the whole of it; set model.kernels=auto or xla"
        )


def check_profiled_steps(steps: str, total_steps: int) -> None:
    """Refuse to trace steps that the run does not have."""
    if steps and int(steps.split("-")[1]) >= total_steps:
        raise UserError(
            f"profile.steps ({steps!r}) lies beyond the run's {total_steps} steps, which are 0 to "
            f"{total_steps - 1}; choose earlier ones or raise train.epochs"
        )


def check_patience(patience: int, evaluations: int) -> None:
    """Refuse a patience of at least the run's evaluations, which could never end it early."""
    if patience >= evaluations > 0 and patience:
        raise UserError(
            f"train.early_stop_patience ({patience}) must be less than the run's {evaluations} "
            f"evaluation{'' if evaluations == 1 else 's'} to have an effect; lower it, evaluate "
            "more often (train.eval_every_epochs, train.eval_every_steps), or remove it"
        )


def check_warmup(warmup_steps: int, total_steps: int) -> None:
    """Refuse a warm-up that is longer than the run."""
    if warmup_steps > total_steps:
        raise UserError(
            f"optim.warmup_steps ({warmup_steps}) exceeds the run's {total_steps} steps; lower it "
            "or raise train.epochs"
        )
