"""`RunConfig` and its sections: every key of a run, its default, unit and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from utils.config.data import DataSection
from utils.config.distill import DistillSection
from utils.config.execution import ProfileSection, QuantileSection, RunSection, RuntimeSection
from utils.config.metadata import CLASS_TASKS, IMAGE_TASKS, ConfigSection, Devices, about
from utils.config.source import SourceSection
from utils.config.verdicts import MicroBatchVerdict, Parts, StepName

_LOOP = Devices(("xla",), "only its compiler loops over a graph; leave it out")
_KERNELS = Devices(("xla",), "Pallas kernels are XLA's; choose auto or xla", value="pallas")


class ModelSection(ConfigSection):
    """The student: the model that is trained and exported."""

    name: str = Field(
        "vit_small_patch16_224",
        description="timm or own model name, or a shared model's (docs/finetuning.md)",
        **about(aliases=("model",)),
    )
    num_classes: int | None = Field(
        None, ge=1, description="classes; none: the dataset's", **about(tasks=CLASS_TASKS)
    )
    image_size: int | None = Field(
        None,
        ge=1,
        description="input side in pixels, for models that are built for one size",
        **about(tasks=IMAGE_TASKS),
    )
    pretrained: bool = Field(
        False,
        description="start from the weights of timm's hub (needs a network) or of a shared model",
        **about(resume="free"),
    )
    weights: str = Field(
        "",
        description="start from the weights in a .safetensors, a .pth, an .npz of JAX, a run's "
        "directory or a checkpoint, or a shared model; all but the head must fit",
        **about(resume="free", is_place=True),
    )
    reset_head: Literal["auto", "always", "never", "by_name"] = Field(
        "auto",
        description="let the head start anew: auto: where the weights have other classes, by "
        "their number or their names; never: they are refused then; by_name: the same, but the "
        "same classes in another order are mapped by name",
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
    drop_path_law: Literal["model", "linear", "constant"] = Field(
        "model",
        description="rates of the blocks: as timm's model has them, linear from 0 in the first, or "
        "the same in all",
    )
    drop_path_rescale: bool = Field(
        True, description="divide kept branches by the share that is kept; false: big_vision's form"
    )
    head_init_scale: float | None = Field(
        None,
        ge=0,
        description="factor of the classifier's first weights and bias",
        **about(tasks=CLASS_TASKS),
    )
    head_init_bias: float | None = Field(
        None,
        description="the classifier's first bias, such as -log(classes) for task_loss=bce",
        **about(tasks=CLASS_TASKS),
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="further keyword arguments of timm.create_model"
    )
    norm_width: int | None = Field(
        None,
        ge=1,
        description="channels of the teacher's last maps, for the loss norm: the student's are "
        "widened to norm_copies times as many and narrowed again while it trains; an export has "
        "that merged",
        **about(tasks=CLASS_TASKS),
    )
    norm_copies: int = Field(
        8,
        ge=1,
        description="copies of the teacher's maps in model.norm_width",
        **about(tasks=CLASS_TASKS),
    )
    lora: tuple[str, ...] = Field(
        (),
        description="linear layers that learn by low-rank adapters, by patterns of their names, as "
        "blocks.*.attn.qkv; all else but the head is frozen, and an export has them merged",
    )
    lora_rank: int = Field(8, ge=1, description="rank of the adapters of model.lora")
    lora_alpha: float = Field(
        16.0, gt=0, description="what adapters learn is scaled by lora_alpha / lora_rank"
    )
    xla_patches: bool = Field(
        True, description="rewrite layers for the TPU compiler on XLA; same weights"
    )
    skip_patches: list[str] = Field(
        default_factory=list,
        description="patches to leave out, named in docs/tpu_compiler.md",
    )
    attention_kernel: Literal["auto", "on", "off"] = Field(
        "auto",
        description="attention of timm's vision transformers by a Pallas kernel on XLA; auto: on a "
        "TPU where that costs fewer cycles (docs/tpu_compiler.md)",
    )
    kernels: Literal["auto", "xla", "pallas"] = Field(
        "auto",
        description="what computes a delta rule, and attention of qwen models: XLA's form or "
        "Pallas kernels; auto: what costs a TPU fewer cycles for the shapes that a layer meets "
        "(docs/delta.md)",
        **about(devices=_KERNELS),
    )

    @property
    def known_sizes(self) -> dict[str, int]:
        """What these keys say of the data: `num_classes` and `image_size`, where they are set."""
        sizes = {"num_classes": self.num_classes, "image_size": self.image_size}
        return {name: size for name, size in sizes.items() if size is not None}


class OptimSection(ConfigSection):
    """Optimizer and schedules; the schedule moves once per optimizer step."""

    name: str = Field("adamw", description="timm optimizer name", **about(aliases=("opt",)))
    lr: float = Field(1e-3, gt=0, description="peak learning rate", **about(aliases=("lr",)))
    base_lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of a batch of base_batch_size, in place of optim.lr: it is "
        "scaled to the run's batch",
    )
    base_batch_size: int = Field(256, ge=1, description="examples of the batch that base_lr is for")
    lr_scaling: Literal["auto", "linear", "sqrt"] = Field(
        "auto",
        description="how base_lr follows the batch; auto: sqrt for ada* and lamb, else linear",
    )
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
    warmup_inside: bool = Field(
        False,
        description="the shape runs over the whole run and the warm-up replaces its beginning, as "
        "timm does by default; false: it starts after the warm-up",
    )
    schedule: Literal["cosine", "linear", "step", "polynomial", "wsd", "plateau", "constant"] = (
        Field(
            "cosine",
            description="shape after the warm-up; wsd: warmup-stable-decay; plateau: cut where the "
            "score no longer rises",
        )
    )
    decay_rate: float = Field(
        0.1, gt=0, le=1, description="factor of each step of schedule=step, each cut of plateau"
    )
    decay_epochs: tuple[float, ...] = Field((), description="epochs at which schedule=step decays")
    power: float = Field(2.0, gt=0, description="exponent of schedule=polynomial")
    plateau_patience: int = Field(
        5, ge=1, description="evaluations in a row without a better score that lead to a cut"
    )
    plateau_min_delta: float = Field(
        0.0, ge=0, description="by how much a score must exceed the best one to count as better"
    )
    cycles: int = Field(
        1, ge=1, description="how often cosine, linear and polynomial begin anew after the warm-up"
    )
    cycle_decay: float = Field(
        1.0, gt=0, le=1, description="peak learning rate of a cycle over that of the one before"
    )
    cycle_length_factor: float = Field(
        1.0, gt=0, description="length of a cycle over that of the one before"
    )
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
    freeze: tuple[str, ...] = Field(
        (),
        description="parameters that are not trained, as names or patterns: blocks.*",
    )
    unfreeze: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="name or pattern -> epochs after which those parameters begin to move; their "
        "gradients and state are kept from the start, so that the graph stays one",
    )
    lr_factors: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="name or pattern -> factor of the learning rate; the first that matches counts",
    )
    decay_factors: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="name or pattern -> factor of the weight decay, of what decays; the first that "
        "matches counts",
    )
    max_grad_norm: float | None = Field(
        None,
        gt=0,
        description="global gradient norm to clip to, after the mean over ranks",
        **about(aliases=("clip_grad",)),
    )
    max_grad_value: float | None = Field(
        None,
        gt=0,
        description="size of each number of the gradients to clip to, in place of a norm",
    )
    max_grad_ratio: float | None = Field(
        None,
        gt=0,
        description="adaptive gradient clipping: norm of each unit's gradient to clip to, as a "
        "share of its weights' norm; the classifier is left alone",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="further optimizer arguments")


class TrainSection(ConfigSection):
    """The loop."""

    task: str = Field("classify", description="what is learnt: a name in tasks/")
    task_loss: str = Field(
        "",
        description="what is learnt from the targets (classify: softmax, bce, focal, asl, poly; "
        "multilabel: the same without softmax; regress: mse, mae, huber, gaussian_nll); empty: the "
        "task's first",
        **about(tasks=("classify", "multilabel", "regress")),
    )
    task_loss_args: dict[str, float] = Field(
        default_factory=dict,
        description="numbers of task_loss=focal (gamma, alpha), asl (gamma_negative, "
        "gamma_positive, clip) and poly (epsilon, gamma, alpha)",
        **about(tasks=CLASS_TASKS),
    )
    bce_threshold: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="targets above it count as 1 and the others as 0, for task_loss=bce; none: "
        "as they are mixed",
        **about(tasks=CLASS_TASKS),
    )
    bce_sum: bool = Field(
        False,
        description="task_loss=bce sums over classes; else their mean",
        **about(tasks=CLASS_TASKS),
    )
    bce_positive_weight: float = Field(
        1.0,
        gt=0,
        description="factor of what the right classes add to task_loss=bce",
        **about(tasks=CLASS_TASKS),
    )
    class_weights: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (),
        description="factors of the classes in the task loss, one for each; empty: all are 1",
        **about(tasks=CLASS_TASKS),
    )
    l2_penalty: float = Field(
        0.0,
        ge=0,
        description="factor of the sum of squared weight matrices in the loss: ridge, whatever "
        "the optimizer",
        **about(tasks=("regress",)),
    )
    epochs: int = Field(
        90,
        ge=1,
        description="passes over the training split",
        **about(resume="warns", aliases=("epochs",)),
    )
    steps: int | None = Field(
        None, ge=1, description="optimizer steps; wins over epochs", **about(resume="warns")
    )
    accumulate_steps: Parts = Field(
        1,
        description="micro-batches that one optimizer step is split into; auto: as train.verdicts "
        "says for the chip, 1 on what is no TPU",
        **about(aliases=("update_freq",)),
    )
    verdicts: dict[StepName, MicroBatchVerdict] = Field(
        default_factory=dict,
        description="the TPU compiler's cheapest split of a step by chip and its examples, such as "
        "v5e:128; tools.compile_for_tpu --micro-batches --write writes it",
        **about(resume="warns"),
    )
    seed: int = Field(
        0,
        ge=0,
        lt=1 << 32,
        description="seed of weights, order, augmentation and dropout",
        **about(stream="seed", aliases=("seed",)),
    )
    log_every_steps: int = Field(
        50,
        ge=1,
        description="steps between two lines of metrics.jsonl",
        **about(resume="free", is_neutral=True),
    )
    eval_every_epochs: float = Field(
        1.0, gt=0, description="epochs between evaluations", **about(resume="free")
    )
    eval_every_steps: int | None = Field(
        None, ge=1, description="the same in steps; wins over epochs", **about(resume="free")
    )
    checkpoint_every_epochs: float = Field(
        1.0, gt=0, description="epochs between checkpoints", **about(resume="free", is_neutral=True)
    )
    checkpoint_every_steps: int | None = Field(
        None,
        ge=1,
        description="the same in steps; wins over epochs",
        **about(resume="free", is_neutral=True),
    )
    keep_checkpoints: int = Field(
        2,
        ge=1,
        description="newest checkpoints to keep, beside best",
        **about(resume="free", is_neutral=True),
    )
    keep_every_steps: int | None = Field(
        None,
        ge=1,
        description="keep the checkpoints at multiples of this step for good, too",
        **about(resume="free", is_neutral=True),
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
        **about(resume="free", is_neutral=True),
    )
    early_stop_patience: int = Field(
        0,
        ge=0,
        description="evaluations in a row without a better score after which the run ends; "
        "0: it never ends early",
        **about(resume="warns"),
    )
    early_stop_min_delta: float = Field(
        0.0,
        ge=0,
        description="by how much a score must exceed the one before it to count as better",
        **about(resume="warns"),
    )
    deterministic: bool = Field(
        False,
        description="choose operations that give the same bits each time, at a cost",
        **about(resume="warns"),
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="mass spread over all classes",
        **about(aliases=("smoothing",), tasks=("classify",)),
    )
    mixup_alpha: float = Field(
        0.0,
        ge=0,
        description="Beta parameter of mixup; 0: off",
        **about(stream="mixing", aliases=("mixup",), tasks=IMAGE_TASKS),
    )
    cutmix_alpha: float = Field(
        0.0,
        ge=0,
        description="Beta parameter of cutmix; 0: off",
        **about(stream="mixing", aliases=("cutmix",), tasks=IMAGE_TASKS),
    )
    mix_mode: Literal["pair", "element", "batch"] = Field(
        "pair",
        description="what shares a coefficient: the two of a pair, nobody, or the whole batch",
        **about(stream="mix_mode", tasks=IMAGE_TASKS),
    )
    mix_off_epoch: float | None = Field(
        None,
        ge=0,
        description="epoch from which nothing is mixed any more; none: all are mixed",
        **about(stream="mix_off_epoch", tasks=IMAGE_TASKS),
    )
    image_sizes: dict[Annotated[float, Field(ge=0)], Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="epoch -> side that the student sees its training images at from then on; each "
        "side is a graph; empty: as they come",
        **about(tasks=IMAGE_TASKS),
    )
    mix_prob: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of pairs that are mixed",
        **about(stream="mixing", tasks=IMAGE_TASKS),
    )
    cutmix_prob: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of cutmix among mixed pairs where both are on",
        **about(stream="mixing", tasks=IMAGE_TASKS),
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="weight of the next token's squared log-normaliser: keeps logits small",
        **about(tasks=("language",)),
    )
    logits_mib: float = Field(
        256.0,
        gt=0,
        description="memory that one device's float32 logits of tokens may take, in MiB; the loss "
        "goes over the sequence in chunks that fit",
        **about(resume="warns", tasks=("language",)),
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
    ema_start_epoch: float = Field(
        0.0,
        ge=0,
        description="epochs in which averages are the weights themselves; the rise begins then",
    )
    ema_more: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (),
        description="decays of further averages, each evaluated beside the first one, which is "
        "exported",
    )

    @property
    def known_parts(self) -> int:
        """Micro-batches of a step; 1 where the chip decides and is not known yet."""
        return 1 if self.accumulate_steps == "auto" else self.accumulate_steps


class RunConfig(ConfigSection):
    """The whole configuration of a run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    distill: DistillSection = DistillSection()
    runtime: RuntimeSection = RuntimeSection()
    profile: ProfileSection = ProfileSection()
    quantile: QuantileSection = QuantileSection()
    run: RunSection = RunSection()
    source: SourceSection = SourceSection()
