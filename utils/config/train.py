"""`TrainSection`: how long, by which loss and with which tricks a run trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from utils.config.metadata import (
    CLASS_TASKS,
    IMAGE_TASKS,
    ClassWeights,
    ConfigSection,
    Devices,
    key,
)
from utils.generations import LAUNCHED

_LOOP = Devices("loop", "only its compiler loops over a graph; leave it out")


# A chip and the examples that a step gives it, such as `v5e:128`.
_CHIPS = "|".join(chip.name for chip in LAUNCHED)
StepName = Annotated[str, Field(pattern=rf"^({_CHIPS}):[1-9]\d*$")]


def _check_micro_batches(value: object) -> object:
    is_number = isinstance(value, int | str) and str(value).isdecimal()
    if value != "auto" and not (is_number and int(value) >= 1):
        raise PydanticCustomError("parts", "it must be a whole number of at least 1, or auto")
    return value


MicroBatches = Annotated[int | Literal["auto"], BeforeValidator(_check_micro_batches)]


class MicroBatchVerdict(ConfigSection):
    """The cheapest split of one step on one chip, by `tools.compile_for_tpu --micro-batches`."""

    parts: int = key(..., "micro-batches of the least cost", ge=1)
    step: str = key(..., "hash of the configuration keys that decide the step's program")
    graph: str = key(..., "hash of the compiled program")


class TrainSection(ConfigSection):
    """The loop."""

    task: str = key("classify", "what is learnt: a name in tasks/")
    task_loss: str = key(
        "",
        "loss on the targets (classify: softmax, bce, focal, asl, poly; multilabel: the same "
        "without softmax; regress: mse, mae, huber, gaussian_nll); empty: the task's default",
        tasks=("classify", "multilabel", "regress"),
    )
    task_loss_args: dict[str, float] = key(
        {},
        "numbers of task_loss=focal (gamma, alpha), asl (gamma_negative, gamma_positive, clip) "
        "and poly (epsilon, gamma, alpha)",
        tasks=CLASS_TASKS,
    )
    bce_threshold: float | None = key(
        None, "task_loss=bce: targets above it become 1, others 0", ge=0, lt=1, tasks=CLASS_TASKS
    )
    bce_sum: bool = key(
        False, "task_loss=bce: sum over classes instead of their mean", tasks=CLASS_TASKS
    )
    bce_positive_weight: float = key(
        1.0, "task_loss=bce: weight of the positive classes", gt=0, tasks=CLASS_TASKS
    )
    class_weights: ClassWeights = key(
        (),
        "weights of the classes in the task loss: auto (by the counts of their labels, mean 1 over "
        "them), {class name: number}, or a number for each; unnamed and empty: 1",
        tasks=CLASS_TASKS,
    )
    l2_penalty: float = key(
        0.0, "ridge: factor of the sum of squared weight matrices", ge=0, tasks=("regress",)
    )
    epochs: int = key(
        90, "passes over the training split", ge=1, resume="warns", aliases=("epochs",)
    )
    steps: int | None = key(None, "optimizer steps; overrides epochs", ge=1, resume="warns")
    accumulate_steps: MicroBatches = key(
        1, "micro-batches of a step; auto: by train.verdicts, else 1", aliases=("update_freq",)
    )
    verdicts: dict[StepName, MicroBatchVerdict] = key(
        {},
        "micro-batches of least compiled cost, by chip and its examples (v5e:128); written by "
        "tools.compile_for_tpu --micro-batches --write",
        resume="warns",
    )
    seed: int = key(
        0,
        "seed of weights, order, augmentation and dropout",
        ge=0,
        lt=1 << 32,
        stream="seed",
        aliases=("seed",),
    )
    log_every_steps: int = key(
        50, "steps between two lines of metrics.jsonl", ge=1, resume="free", affects_results=False
    )
    eval_every_epochs: float = key(1.0, "epochs between evaluations", gt=0, resume="free")
    eval_every_steps: int | None = key(
        None, "the same in steps; overrides epochs", ge=1, resume="free"
    )
    checkpoint_every_epochs: float = key(
        1.0, "epochs between checkpoints", gt=0, resume="free", affects_results=False
    )
    checkpoint_every_steps: int | None = key(
        None, "the same in steps; overrides epochs", ge=1, resume="free", affects_results=False
    )
    keep_checkpoints: int = key(
        2, "newest ones to keep, besides the best", ge=1, resume="free", affects_results=False
    )
    keep_every_steps: int | None = key(
        None, "also keep multiples of this step", ge=1, resume="free", affects_results=False
    )
    on_nonfinite: Literal["stop", "rollback"] = key(
        "stop",
        "a loss or gradient that is not finite: end the run, or go back to the last checkpoint "
        "and skip that batch",
        resume="free",
    )
    max_rollbacks: int = key(3, "batches to skip before the run ends", ge=1, resume="free")
    keep_bad_step: bool = key(
        False,
        "if a loss or gradient that is not finite ends the run, keep that step's state, batch and "
        "draws for tools.replay",
        resume="free",
        affects_results=False,
    )
    stall_timeout_s: float = key(
        1800.0,
        "seconds without a step until all stacks are printed and the run ends; 0: never",
        ge=0,
        resume="free",
        affects_results=False,
    )
    early_stop_patience: int = key(
        0, "evaluations without a rise that end the run; 0: never", ge=0, resume="warns"
    )
    early_stop_min_delta: float = key(
        0.0, "smallest rise that counts", ge=0, resume="warns", needs=("train.early_stop_patience",)
    )
    deterministic: bool = key(
        False, "use operations with reproducible bits, at a cost", resume="warns"
    )
    label_smoothing: float = key(
        0.0, "mass spread over all classes", ge=0, lt=1, aliases=("smoothing",), tasks=("classify",)
    )
    mixup_alpha: float = key(
        0.0, "Beta's alpha; 0: off", ge=0, stream="mixing", aliases=("mixup",), tasks=IMAGE_TASKS
    )
    cutmix_alpha: float = key(
        0.0, "Beta's alpha; 0: off", ge=0, stream="mixing", aliases=("cutmix",), tasks=IMAGE_TASKS
    )
    mix_mode: Literal["pair", "element", "batch"] = key(
        "pair", "scope of a coefficient: pair, example, batch", stream="mix_mode", tasks=IMAGE_TASKS
    )
    mix_off_epoch: float | None = key(
        None,
        "epoch at which mixing ends; None: never",
        ge=0,
        stream="mix_off_epoch",
        tasks=IMAGE_TASKS,
        needs=("train.mixup_alpha", "train.cutmix_alpha"),
    )
    image_sizes: dict[Annotated[float, Field(ge=0)], Annotated[int, Field(ge=1)]] = key(
        {},
        "epoch -> side of the student's training images from then on, a graph for each side; "
        "empty: unchanged",
        tasks=IMAGE_TASKS,
        excludes=("train.scan_layers",),
    )
    mix_prob: float = key(
        1.0, "share of pairs that are mixed", ge=0, le=1, stream="mixing", tasks=IMAGE_TASKS
    )
    cutmix_prob: float = key(
        0.5, "share of cutmix if both are on", ge=0, le=1, stream="mixing", tasks=IMAGE_TASKS
    )
    z_loss: float = key(
        0.0, "weight of the squared log-normaliser: keeps logits small", ge=0, tasks=("language",)
    )
    logits_mib: float = key(
        256.0,
        "memory for one device's float32 logits of tokens, in MiB; the loss splits the sequence "
        "into chunks that fit",
        gt=0,
        resume="warns",
        tasks=("language",),
    )
    remat: bool = key(
        False,
        "recompute each block in the backward pass instead of storing it",
        resume="warns",
        excludes=("train.scan_layers",),
    )
    scan_layers: bool = key(
        False, "compile equal blocks of a ViT once, in a loop", resume="warns", devices=_LOOP
    )
    sync_batchnorm: bool = key(False, "BatchNorm statistics over all ranks; always on with spmd")
    ema: bool = key(False, "keep an average of the weights and evaluate it", aliases=("model_ema",))
    ema_decay: float = key(
        0.9998,
        "decay of the average per step, approached as (1 + step) / (10 + step)",
        gt=0,
        lt=1,
        aliases=("model_ema_decay",),
    )
    ema_start_epoch: float = key(0.0, "epoch at which averaging begins", ge=0, needs=("train.ema",))
    ema_more: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = key(
        (), "decays of further averages, evaluated but not exported", needs=("train.ema",)
    )

    @property
    def known_parts(self) -> int:
        """Micro-batches of a step; 1 if the chip decides and is not known yet."""
        return 1 if self.accumulate_steps == "auto" else self.accumulate_steps
