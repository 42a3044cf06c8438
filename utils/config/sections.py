"""The sections of a run's configuration: every key, its default, unit and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from utils.config.execution import ProfileSection, RunSection, RuntimeSection
from utils.config.metadata import ConfigSection, Devices, about

_LOOP = Devices(("xla",), "only its compiler loops over a graph; leave it out")


class ModelSection(ConfigSection):
    """The student: the model that is trained and exported."""

    name: str = Field(
        "vit_small_patch16_224", description="timm or own model name", **about(aliases=("model",))
    )
    num_classes: int | None = Field(None, ge=1, description="classes; none: the dataset's")
    image_size: int | None = Field(
        None, ge=1, description="input side in pixels, for models that are built for one size"
    )
    pretrained: bool = Field(
        False, description="start from timm's hub weights (needs a network)", **about(resume="free")
    )
    weights: str = Field(
        "",
        description="start from the weights in a .safetensors, a .pth, a run's directory or a "
        "checkpoint; all must fit",
        **about(resume="free"),
    )
    drop_rate: float = Field(0.0, ge=0, lt=1, description="dropout rate of the classifier head")
    drop_path_rate: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="stochastic depth rate, last block",
        **about(aliases=("drop_path",)),
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="further keyword arguments of timm.create_model"
    )
    xla_patches: bool = Field(
        True, description="rewrite layers for the TPU compiler on XLA; same weights"
    )
    skip_patches: list[str] = Field(
        default_factory=list,
        description="patches to leave out, named in docs/tpu_compiler.md",
    )

    @property
    def known_sizes(self) -> dict[str, int]:
        """What these keys say of the data: `num_classes` and `image_size`, where they are set."""
        sizes = {"num_classes": self.num_classes, "image_size": self.image_size}
        return {name: size for name, size in sizes.items() if size is not None}


class DataSection(ConfigSection):
    """What the model sees."""

    source: str = Field(
        "tfds",
        description="tfds dataset, folder of class folders, or a fixed synthetic pattern",
        **about(stream="dataset"),
    )
    name: str = Field(
        "",
        description="TFDS dataset name, `name`, `name/config` or `name:version`",
        **about(stream="dataset", aliases=("data_set",)),
    )
    root: str = Field(
        "",
        description="directory that holds the dataset (tfds data_dir)",
        **about(resume="free", aliases=("data_path", "tfds_data_dir")),
    )
    train_split: str = Field(
        "train",
        description="split to train on, TFDS slicing allowed",
        **about(stream="dataset", aliases=("tfds_train_split",)),
    )
    eval_split: str = Field(
        "validation",
        description="split to evaluate on during the run",
        **about(aliases=("tfds_eval_split",)),
    )
    test_split: str = Field(
        "", description="split to evaluate once at the end; empty: none", **about(resume="free")
    )
    train_pp: str = Field(
        "decode_jpeg_and_inception_crop(224)|flip_lr|value_range(-1, 1)",
        description="preprocessing string of the training split",
        **about(stream="train_pp"),
    )
    eval_pp: str = Field(
        "decode|resize_small(256)|central_crop(224)|value_range(-1, 1)",
        description="preprocessing string of evaluation",
    )
    image_key: str = Field(
        "image",
        description="the image among the examples' features; strings call it image",
        **about(stream="image_key"),
    )
    label_key: str = Field(
        "label", description="the integer label among the examples' features; in a group: group/key"
    )
    global_batch_size: int = Field(
        1024,
        ge=1,
        description="examples of one optimizer step, over all ranks and micro-batches",
        **about(stream="global_batch_size", aliases=("batch_size", "batch-size")),
    )
    eval_batch_size: int | None = Field(
        None,
        ge=1,
        description="examples of one global evaluation batch; none: global_batch_size",
        **about(resume="free"),
    )
    order: Literal["auto", "exact", "sharded"] = Field(
        "auto",
        description="exact: one seeded permutation by random access; sharded: files dealt to "
        "input processes and a shuffle buffer; auto: exact for local roots",
        **about(stream="order"),
    )
    shuffle_gib: float = Field(
        1.0,
        gt=0,
        description="memory bound of the shuffle buffer of order=sharded, in GiB",
        **about(resume="between_epochs", stream="shuffle_gib"),
    )
    threads: int = Field(
        0,
        ge=0,
        description="threads of the input pipeline; 0: as many as the process has cores",
        **about(resume="free"),
    )
    prefetch_batches: int = Field(
        2, ge=1, description="batches prepared ahead of the loop", **about(resume="free")
    )
    return_id: bool = Field(
        False, description="carry the example's TFDS id along in Batch.ids", **about(resume="free")
    )
    skip_corrupt: int = Field(
        0,
        ge=0,
        description="unreadable records to skip and count before the run stops",
        **about(resume="free"),
    )
    random_erasing: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability of erasing a rectangle, on the device",
        **about(stream="random_erasing"),
    )


class OptimSection(ConfigSection):
    """Optimizer and schedules; the schedule moves once per optimizer step."""

    name: str = Field("adamw", description="timm optimizer name", **about(aliases=("opt",)))
    lr: float = Field(1e-3, gt=0, description="peak learning rate", **about(aliases=("lr",)))
    min_lr: float = Field(
        1e-5,
        ge=0,
        description="learning rate that the last step leads up to",
        **about(aliases=("min_lr",)),
    )
    warmup_lr: float = Field(1e-6, ge=0, description="learning rate at step 0 of the warm-up")
    warmup_epochs: float = Field(
        0.0,
        ge=0,
        description="length of the linear warm-up in epochs",
        **about(aliases=("warmup_epochs",)),
    )
    warmup_steps: int | None = Field(None, ge=0, description="the same in steps; wins over epochs")
    schedule: Literal["cosine", "linear", "step", "polynomial", "wsd", "constant"] = Field(
        "cosine", description="shape after the warm-up; wsd: warmup-stable-decay"
    )
    decay_rate: float = Field(0.1, gt=0, le=1, description="factor of each step of schedule=step")
    decay_epochs: tuple[float, ...] = Field((), description="epochs at which schedule=step decays")
    power: float = Field(2.0, gt=0, description="exponent of schedule=polynomial")
    cooldown_fraction: float = Field(
        0.2, gt=0, le=1, description="share of the run, at its end, in which schedule=wsd decays"
    )
    weight_decay: float = Field(
        0.05,
        ge=0,
        description="decoupled weight decay of matrices",
        **about(aliases=("weight_decay",)),
    )
    weight_decay_end: float | None = Field(
        None,
        ge=0,
        description="weight decay that the last step leads up to, by a cosine; none: constant",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd-like optimizers")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], ...] | None = Field(
        None, description="Adam-like betas; none: default"
    )
    eps: float | None = Field(None, gt=0, description="denominator epsilon; none: default")
    layer_decay: float | None = Field(
        None,
        gt=0,
        le=1,
        description="learning-rate factor from each layer to the one below",
        **about(aliases=("layer_decay",)),
    )
    max_grad_norm: float | None = Field(
        None,
        gt=0,
        description="global gradient norm to clip to, after the mean over ranks",
        **about(aliases=("clip_grad",)),
    )
    args: dict[str, Any] = Field(default_factory=dict, description="further optimizer arguments")


class TrainSection(ConfigSection):
    """The loop."""

    task: str = Field("classify", description="what is learnt: a name in tasks/")
    epochs: int = Field(
        90,
        ge=1,
        description="passes over the training split",
        **about(resume="warns", aliases=("epochs",)),
    )
    steps: int | None = Field(
        None, ge=1, description="optimizer steps; wins over epochs", **about(resume="warns")
    )
    accumulate_steps: int = Field(
        1,
        ge=1,
        description="micro-batches that one optimizer step is split into",
        **about(aliases=("update_freq",)),
    )
    seed: int = Field(
        0,
        ge=0,
        lt=1 << 32,
        description="seed of weights, order, augmentation and dropout",
        **about(stream="seed", aliases=("seed",)),
    )
    log_every_steps: int = Field(
        50, ge=1, description="steps between two lines of metrics.jsonl", **about(resume="free")
    )
    eval_every_epochs: float = Field(
        1.0, gt=0, description="epochs between evaluations", **about(resume="free")
    )
    checkpoint_every_epochs: float = Field(
        1.0, gt=0, description="epochs between checkpoints", **about(resume="free")
    )
    checkpoint_every_steps: int | None = Field(
        None, ge=1, description="the same in steps; wins over epochs", **about(resume="free")
    )
    keep_checkpoints: int = Field(
        2, ge=1, description="newest checkpoints to keep, beside best", **about(resume="free")
    )
    keep_every_steps: int | None = Field(
        None,
        ge=1,
        description="keep the checkpoints at multiples of this step for good, too",
        **about(resume="free"),
    )
    on_nonfinite: Literal["stop", "rollback"] = Field(
        "stop",
        description="a loss or gradient that is not finite: end the run, or go back to the last "
        "checkpoint and skip that batch",
        **about(resume="free"),
    )
    max_rollbacks: int = Field(
        3, ge=1, description="batches to skip before the run ends", **about(resume="free")
    )
    stall_timeout_s: float = Field(
        1800.0,
        ge=0,
        description="seconds without a step after which all stacks are printed and the run ends; "
        "0: never",
        **about(resume="free"),
    )
    deterministic: bool = Field(
        False,
        description="choose operations that give the same bits each time, at a cost",
        **about(resume="warns"),
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="mass spread over all classes", **about(aliases=("smoothing",))
    )
    mixup_alpha: float = Field(
        0.0,
        ge=0,
        description="Beta parameter of mixup; 0: off",
        **about(stream="mixing", aliases=("mixup",)),
    )
    cutmix_alpha: float = Field(
        0.0,
        ge=0,
        description="Beta parameter of cutmix; 0: off",
        **about(stream="mixing", aliases=("cutmix",)),
    )
    mix_prob: float = Field(
        1.0, ge=0, le=1, description="share of pairs that are mixed", **about(stream="mixing")
    )
    cutmix_prob: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of cutmix among mixed pairs where both are on",
        **about(stream="mixing"),
    )
    remat: bool = Field(
        False,
        description="recompute each block in the backward pass instead of storing it",
        **about(resume="warns"),
    )
    scan_layers: bool = Field(
        False,
        description="compile the equal blocks of a ViT once and loop over them",
        **about(resume="warns", devices=_LOOP),
    )
    sync_batchnorm: bool = Field(
        False, description="BatchNorm statistics over all ranks; spmd has them always"
    )
    ema: bool = Field(
        False,
        description="keep an average of the weights and evaluate it",
        **about(aliases=("model_ema",)),
    )
    ema_decay: float = Field(
        0.9998,
        gt=0,
        lt=1,
        description="decay of the average per step; it rises to it as (1 + step) / (10 + step)",
        **about(aliases=("model_ema_decay",)),
    )


class TeacherSection(ConfigSection):
    """One teacher."""

    model: str = Field(
        "", description="model name; 'ema': the student's own average; empty: as weights tell"
    )
    weights: str = Field(
        "",
        description=".safetensors, .pth, run directory or checkpoint; empty: timm's hub",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="model arguments")
    weight: float = Field(1.0, gt=0, description="share in an ensemble, relative to the others")
    num_classes: int | None = Field(
        None, ge=1, description="classes it answers; none: as its weights tell, or the student's"
    )
    label_map: str = Field(
        "", description="JSON list: for each class of the student, the teacher's class"
    )
    size: int | None = Field(
        None, ge=1, description="side in pixels it sees; none: the student's crop as it is"
    )
    mean: tuple[float, ...] | None = Field(
        None, description="its pixel mean on the 0..255 scale; none: as its weights tell"
    )
    std: tuple[float, ...] | None = Field(
        None, description="its pixel std on the 0..255 scale; none: as its weights tell"
    )
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="type of its weights")


class LossTerm(ConfigSection):
    """One distillation term of the weighted sum."""

    name: str = Field(description="registered loss name")
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of the loss")
    layers: dict[str, str] | None = Field(
        None, description="student layer: teacher layer, by module path (feature losses)"
    )
    weight: float = Field(1.0, ge=0, description="factor of the term")
    weight_end: float | None = Field(
        None, ge=0, description="factor at the end of the run, by a cosine; none: constant"
    )
    warmup_epochs: float = Field(0.0, ge=0, description="epochs of a linear rise from 0")


class DistillSection(ConfigSection):
    """Distillation: total = (1 - alpha) * task loss + alpha * sum of weighted terms."""

    teacher: str = Field(
        "",
        description="model name of the only teacher; 'ema': the student's average (train.ema)",
        **about(aliases=("teacher",)),
    )
    teacher_weights: str = Field(
        "",
        description="the teacher's .safetensors, .pth, run directory or checkpoint; empty: timm's "
        "hub",
        **about(resume="free", aliases=("teacher_path",)),
    )
    teachers: tuple[TeacherSection, ...] = Field(
        (), description="several teachers, or one with its own input transform, dtype or classes"
    )
    ensemble: Literal["probs", "logits", "separate"] = Field(
        "probs", description="several teachers: mean of probabilities or logits, or one by one"
    )
    views: Literal["consistent", "independent"] = Field(
        "consistent", description="teachers see the student's crop, or another one of the image"
    )
    teacher_cache: str = Field(
        "", description="directory of stored answers (python -m tools.cache_teacher) to teach by"
    )
    cache_end: Literal["stop", "cycle"] = Field(
        "stop", description="epochs beyond those stored: refuse the run, or start over with them"
    )
    loss: str = Field(
        "",
        description="one registered loss name: short for a single term",
        **about(aliases=("kd",)),
    )
    temperature: float = Field(
        4.0,
        gt=0,
        description="temperature of terms whose args do not name one",
        **about(aliases=("kd_temperature",)),
    )
    alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of distillation in the total loss",
        **about(aliases=("kd_alpha",)),
    )
    losses: tuple[LossTerm, ...] = Field(
        (), description="several terms: name, args, layers, weight, weight_end, warmup_epochs"
    )
    group_size: int = Field(
        16, ge=1, description="consecutive examples that losses between examples work on"
    )
    allow_weak_teacher: bool = Field(
        False,
        description="go on although the teacher is no better than chance",
        **about(resume="free"),
    )


class RunConfig(ConfigSection):
    """The whole configuration of a run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    distill: DistillSection = DistillSection()
    runtime: RuntimeSection = RuntimeSection()
    profile: ProfileSection = ProfileSection()
    run: RunSection = RunSection()
