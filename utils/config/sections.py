"""`RunConfig` and its sections: every key of a run, its default, unit and meaning."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from utils.config.data import DataSection
from utils.config.distill import DistillSection
from utils.config.execution import ProfileSection, QuantileSection, RunSection, RuntimeSection
from utils.config.metadata import CLASS_TASKS, IMAGE_TASKS, ConfigSection, Devices, Resume, key
from utils.config.train import TrainSection

SCHEDULE_NAMES = ("cosine", "linear", "step", "polynomial", "wsd", "plateau", "constant")
_CYCLED = ("optim.schedule=cosine", "optim.schedule=linear", "optim.schedule=polynomial")
_KERNELS = Devices("pallas", "Pallas kernels are XLA's; choose auto or xla", value="pallas")


class ModelSection(ConfigSection):
    """The student: the model that is trained and exported."""

    name: str = key(
        "vit_small_patch16_224", "timm, own or shared model; docs/finetuning.md", aliases=("model",)
    )
    num_classes: int | None = key(
        None, "classes; None: those of the dataset", ge=1, tasks=CLASS_TASKS
    )
    image_size: int | None = key(
        None, "input side in pixels, for models of one fixed size", ge=1, tasks=IMAGE_TASKS
    )
    pretrained: bool = key(
        False, "start from the weights of timm's hub (network) or a shared model", resume="free"
    )
    weights: str = key(
        "",
        "initial weights: .safetensors, .pth, .npz of JAX, run directory, checkpoint or shared "
        "model; all but the head must fit",
        resume="free",
        is_path=True,
    )
    reset_head: Literal["auto", "always", "never", "by_name"] = key(
        "auto",
        "initialise the head anew; auto: if the weights have classes of another number or names; "
        "never: refuse such weights; by_name: as never, but map the same classes in another order",
        resume="free",
    )
    drop_rate: float = key(0.0, "dropout rate of the classifier head", ge=0, lt=1)
    drop_path_rate: float = key(
        0.0, "stochastic depth rate, last block", ge=0, lt=1, aliases=("drop_path",)
    )
    drop_path_law: Literal["model", "linear", "constant"] = key(
        "model", "rates of the blocks: as in timm's model, linear from 0, or constant"
    )
    drop_path_rescale: bool = key(
        True, "divide kept branches by the share that is kept; false: as big_vision"
    )
    head_init_scale: float | None = key(
        None, "factor of the classifier's initial weights and bias", ge=0, tasks=CLASS_TASKS
    )
    head_init_bias: float | None = key(
        None, "initial bias of the classifier, as -log(classes) for bce", tasks=CLASS_TASKS
    )
    args: dict[str, Any] = key({}, "further keyword arguments of timm.create_model")
    norm_width: int | None = key(
        None,
        "channels of the teacher's last feature maps, for the loss norm: training widens the "
        "student's to norm_copies times as many and narrows them again; an export has both merged",
        ge=1,
        tasks=CLASS_TASKS,
    )
    norm_copies: int = key(
        8, "copies of the teacher's maps in model.norm_width", ge=1, tasks=CLASS_TASKS
    )
    lora: tuple[str, ...] = key(
        (),
        "linear layers trained by low-rank adapters, as name patterns: blocks.*.attn.qkv; "
        "everything else but the head is frozen, and an export has the adapters merged",
    )
    lora_rank: int = key(8, "rank of the adapters of model.lora", ge=1)
    lora_alpha: float = key(16.0, "adapter outputs are scaled by lora_alpha / lora_rank", gt=0)
    xla_patches: bool = key(True, "rewrite layers for the TPU compiler on XLA; same weights")
    skip_patches: list[str] = key([], "names of patches to leave out (docs/tpu_compiler.md)")
    attention_kernel: Literal["auto", "on", "off"] = key(
        "auto",
        "attention of timm's vision transformers by a Pallas kernel on XLA; auto: on a TPU where "
        "it costs fewer cycles (docs/tpu_compiler.md)",
    )
    kernels: Literal["auto", "xla", "pallas"] = key(
        "auto",
        "computes delta rules and the attention of qwen models: XLA or Pallas kernels; auto: "
        "whichever costs a TPU fewer cycles for a layer's shapes (docs/delta.md)",
        devices=_KERNELS,
    )

    @property
    def known_sizes(self) -> dict[str, int]:
        """`num_classes` and `image_size`, if they are set."""
        sizes = {"num_classes": self.num_classes, "image_size": self.image_size}
        return {name: size for name, size in sizes.items() if size is not None}


class OptimSection(ConfigSection):
    """Optimizer and schedules; the schedule moves once per optimizer step."""

    name: str = key("adamw", "timm optimizer name", aliases=("opt",))
    lr: float = key(1e-3, "peak learning rate", gt=0, aliases=("lr",))
    base_lr: float | None = key(
        None, "peak learning rate for base_batch_size examples; replaces optim.lr", gt=0
    )
    base_batch_size: int = key(256, "batch size that base_lr is for", ge=1)
    lr_scaling: Literal["auto", "linear", "sqrt"] = key(
        "auto", "how base_lr scales with the batch; auto: sqrt for ada* and lamb, else linear"
    )
    min_lr: float = key(1e-5, "learning rate at the last step", ge=0, aliases=("min_lr",))
    warmup_lr: float = key(1e-6, "learning rate at step 0 of the warm-up", ge=0)
    warmup_epochs: float = key(
        0.0, "length of the linear warm-up in epochs", ge=0, aliases=("warmup_epochs",)
    )
    warmup_steps: int | None = key(None, "the same in steps; overrides epochs", ge=0)
    warmup_inside: bool = key(
        False,
        "the warm-up replaces the beginning of the schedule, as in timm; false: it comes before it",
    )
    schedule: str = key(
        "cosine",
        "after the warm-up; wsd: warmup-stable-decay; plateau: cut if the score stalls",
        known=SCHEDULE_NAMES,
    )
    decay_rate: float = key(
        0.1, "factor of each step of schedule=step, and of each cut of plateau", gt=0, le=1
    )
    decay_epochs: tuple[float, ...] = key((), "epochs at which schedule=step decays")
    power: float = key(2.0, "exponent of schedule=polynomial", gt=0)
    plateau_patience: int = key(
        5, "evaluations without a rise before a cut", ge=1, needs=("optim.schedule=plateau",)
    )
    plateau_min_delta: float = key(
        0.0, "smallest rise that counts as a better score", ge=0, needs=("optim.schedule=plateau",)
    )
    cycles: int = key(1, "cycles of schedule=cosine, linear or polynomial", ge=1, needs=_CYCLED)
    cycle_decay: float = key(
        1.0, "peak of a cycle relative to the previous one", gt=0, le=1, needs=("optim.cycles",)
    )
    cycle_length_factor: float = key(
        1.0, "length of a cycle relative to the previous one", gt=0, needs=("optim.cycles",)
    )
    cooldown_fraction: float = key(
        0.2, "final share of the run in which schedule=wsd decays", gt=0, le=1
    )
    weight_decay: float = key(
        0.05, "decoupled weight decay of matrices", ge=0, aliases=("weight_decay",)
    )
    weight_decay_end: float | None = key(
        None, "weight decay at the last step, by a cosine; None: constant", ge=0
    )
    momentum: float = key(0.9, "momentum of sgd-like optimizers", ge=0, lt=1)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], ...] | None = key(
        None, "Adam-like betas; None: default"
    )
    eps: float | None = key(None, "denominator epsilon; None: default", gt=0)
    layer_decay: float | None = key(
        None, "learning-rate factor per layer towards input", gt=0, le=1, aliases=("layer_decay",)
    )
    freeze: tuple[str, ...] = key(
        (), "parameters that are not trained, as names or patterns: blocks.*"
    )
    unfreeze: dict[str, Annotated[float, Field(gt=0)]] = key(
        {},
        "name or pattern -> epochs until those parameters are updated; their gradients and state "
        "exist from the start, so the graph stays the same",
    )
    lr_factors: dict[str, Annotated[float, Field(gt=0)]] = key(
        {}, "name or pattern -> factor of the learning rate; the first match counts"
    )
    decay_factors: dict[str, Annotated[float, Field(ge=0)]] = key(
        {}, "name or pattern -> factor of the weight decay, if any; the first match counts"
    )
    max_grad_norm: float | None = key(
        None,
        "global gradient norm to clip to, after the mean over ranks",
        gt=0,
        aliases=("clip_grad",),
        excludes=("optim.max_grad_value", "optim.max_grad_ratio"),
    )
    max_grad_value: float | None = key(
        None,
        "absolute value to clip each gradient element to, instead of a norm",
        gt=0,
        excludes=("optim.max_grad_ratio",),
    )
    max_grad_ratio: float | None = key(
        None,
        "adaptive clipping: gradient norm of each unit relative to its weights' norm; skips the "
        "classifier",
        gt=0,
    )
    args: dict[str, Any] = key({}, "further optimizer arguments")


class SourceSection(ConfigSection):
    """Publication that the recipe follows, as data for tests and documents; a run ignores it."""

    on_resume: ClassVar[Resume] = "free"
    affects_results: ClassVar[bool] = False

    paper: str = key("", "arXiv identifier or title")
    code: str = key("", "public repository and file, as owner/name: train.py")
    commit: str = key("", "commit of that repository that the recipe follows")
    published: str = key("", "published result and its conditions; empty: none")
    values: dict[str, Any] = key(
        {},
        "values in the source, by dotted key or by a property of the built run (docs/recipes.md)",
    )
    differs: dict[str, str] = key({}, "name in values -> reason for another value here")

    @model_validator(mode="after")
    def _check_differs(self) -> SourceSection:
        unknown = sorted(self.differs.keys() - self.values.keys())
        if unknown:
            raise PydanticCustomError(
                "differs",
                "{name} is missing in source.values; add the source's value there",
                {"name": unknown[0]},
            )
        return self


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
