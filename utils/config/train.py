"""`TrainSection`: how long, by which loss and with which tricks a run trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from utils.config.devices import get_devices
from utils.config.metadata import CLASS_TASKS, IMAGE_TASKS, ConfigSection, Devices, about
from utils.config.verdicts import MicroBatchVerdict, Parts, StepName

_LOOP = Devices(get_devices("loop"), "only its compiler loops over a graph; leave it out")
_KERNELS = Devices(
    get_devices("pallas"), "Pallas kernels are XLA's; choose auto or xla", value="pallas"
)


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
