"""`RunConfig` and its sections: every key of a run, its default, unit and meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from utils.config.data import DataSection
from utils.config.devices import get_devices
from utils.config.distill import DistillSection
from utils.config.execution import ProfileSection, QuantileSection, RunSection, RuntimeSection
from utils.config.metadata import CLASS_TASKS, IMAGE_TASKS, ConfigSection, Devices, about
from utils.config.source import SourceSection
from utils.config.train import TrainSection

_LOOP = Devices(get_devices("loop"), "only its compiler loops over a graph; leave it out")
_KERNELS = Devices(
    get_devices("pallas"), "Pallas kernels are XLA's; choose auto or xla", value="pallas"
)


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
