"""`DistillSection`: who teaches, by which losses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from utils.config.metadata import TAUGHT_TASKS, ConfigSection, key


class TeacherSection(ConfigSection):
    """One teacher."""

    model: str = key(
        "",
        "model name; 'ema', 'past': the student's average or last epoch; empty: as in the weights",
    )
    weights: str = key(
        "", ".safetensors, .pth, run directory or checkpoint; empty: timm's hub", is_path=True
    )
    args: dict[str, Any] = key({}, "model arguments")
    weight: float = key(1.0, "weight in an ensemble, relative to the others", gt=0)
    num_classes: int | None = key(
        None, "of its logits; None: by weights or student; 0: no classifier (distil)", ge=0
    )
    label_map: str = key(
        "", "JSON list: the teacher's class for each of the student's; or by_name", is_path=True
    )
    size: Annotated[int, Field(ge=1)] | Literal["student"] | None = key(
        None, "input side in pixels; None: the crop; student: as train.image_sizes"
    )
    keep_tokens: float | None = key(
        None,
        "share of patches that a vision transformer gets, by the attention of the student's class "
        "token; None: all",
        gt=0,
        lt=1,
    )
    mean: tuple[float, ...] | None = key(
        None, "its pixel mean on the 0..255 scale; None: as in its weights"
    )
    std: tuple[float, ...] | None = key(
        None, "its pixel std on the 0..255 scale; None: as in its weights"
    )
    dtype: Literal["fp32", "bf16"] = key("fp32", "type of its weights")
    parts: int = key(
        1,
        "parts of a batch that it answers one after the other: the same answers, from less memory "
        "at a time",
        ge=1,
    )


class LossTerm(ConfigSection):
    """One distillation term of the weighted sum."""

    name: str = key(..., "registered loss name")
    args: dict[str, Any] = key({}, "arguments of the loss")
    layers: dict[str, str] | None = key(
        None, "student layer: teacher layer, by module path (feature losses)"
    )
    of: Literal["pooled", "patches"] = key(
        "pooled", "train.task=distil: features to compare", needs=("train.task=distil",)
    )
    teacher: int | str | None = key(
        None,
        "train.task=distil: the teacher by number, from 0, or model name; None: a term for each",
        needs=("train.task=distil",),
    )
    weight: float = key(1.0, "factor of the term", ge=0)
    weight_end: float | None = key(
        None, "factor at the end of the run, by a cosine; None: constant", ge=0
    )
    warmup_epochs: float = key(0.0, "epochs of a linear rise from 0", ge=0)
    start_epoch: float = key(0.0, "epoch at which the term, or its linear rise, begins", ge=0)


class DistillSection(ConfigSection):
    """Distillation: total = (1 - alpha) * task loss + alpha * sum of weighted terms."""

    teacher: str = key(
        "",
        "model name of the only teacher; 'ema': the student's average (train.ema); 'past': the "
        "student at the end of the last epoch",
        aliases=("teacher",),
        tasks=TAUGHT_TASKS,
        excludes=("distill.teachers", "distill.peer"),
    )
    teacher_weights: str = key(
        "",
        "the teacher's .safetensors, .pth, run directory or checkpoint; empty: timm's hub",
        resume="free",
        aliases=("teacher_path",),
        is_path=True,
        tasks=TAUGHT_TASKS,
        excludes=("distill.teachers", "distill.peer"),
    )
    teachers: tuple[TeacherSection, ...] = key(
        (),
        "several teachers, or one with its own transform, dtype or classes",
        tasks=TAUGHT_TASKS,
        excludes=("distill.peer",),
    )
    peer: str = key(
        "",
        "model name of a second student; both train and teach each other; 'self': the student "
        "again, with other draws of stochastic depth",
        tasks=("classify",),
    )
    peer_args: dict[str, Any] = key(
        {}, "arguments of the peer", tasks=("classify",), needs=("distill.peer",)
    )
    ensemble: Literal["probs", "logits", "separate"] = key(
        "probs",
        "several teachers: mean of probabilities or logits, or one by one",
        tasks=("classify", "language", "regress"),
    )
    views: Literal["consistent", "independent", "weak_strong", "rotations"] = key(
        "consistent",
        "teachers see: consistent: the student's crop; independent: their own; weak_strong: the "
        "student's, both with a second view by data.strong_pp; rotations: and three rotated copies",
        tasks=("classify",),
        excludes=("distill.peer",),
    )
    teacher_cache: str = key(
        "",
        "directory of cached logits to learn from (python -m tools.cache write)",
        is_path=True,
        tasks=("classify", "distil", "language"),
        excludes=("distill.views", "distill.peer"),
    )
    cache_end: Literal["stop", "cycle"] = key(
        "stop",
        "after the stored epochs: refuse the run (unless the cache was written with "
        "--augmentations), or repeat them",
        tasks=("classify", "distil", "language"),
    )
    loss: str = key(
        "",
        "registered loss name, for a single term",
        aliases=("kd",),
        tasks=TAUGHT_TASKS,
        excludes=("distill.losses",),
    )
    temperature: float = key(
        4.0,
        "temperature of terms whose args have none",
        gt=0,
        aliases=("kd_temperature",),
        tasks=("classify", "language"),
    )
    alpha: float = key(
        0.5,
        "share of distillation in the total loss",
        ge=0,
        le=1,
        aliases=("kd_alpha",),
        tasks=("classify", "language", "regress"),
    )
    alpha_schedule: Literal["constant", "epochs"] = key(
        "constant",
        "epochs: alpha * (epoch + 1) / epochs of the run, and 0 in the first epoch",
        tasks=("classify",),
        needs=("distill.loss", "distill.losses"),
    )
    losses: tuple[LossTerm, ...] = key(
        (), "several terms: name, args, layers, weight and its schedule", tasks=TAUGHT_TASKS
    )
    projector: Literal["linear", "mlp", "none"] = key(
        "linear",
        "train.task=distil: maps the student's features to the teacher's width; not exported",
        tasks=("classify", "distil"),
    )
    projector_width: int | None = key(
        None,
        "hidden units of projector=mlp; None: the teacher's width",
        ge=1,
        tasks=("classify", "distil"),
        needs=("distill.projector=mlp",),
    )
    standardise: Literal["none", "channel", "phi_s"] = key(
        "none",
        "train.task=distil: scale of teachers' features: each channel to variance 1, or a "
        "rotation and one factor (PHI-S)",
        tasks=("classify", "distil"),
        needs=("train.task=distil",),
    )
    statistics: str = key(
        "",
        "file of feature statistics to standardise by (python -m tools.feature_statistics)",
        resume="free",
        is_path=True,
        tasks=("classify", "distil"),
        needs=("train.task=distil",),
    )
    score: str = key(
        "",
        "train.task=distil: probe that selects the best, as NAME/knn of a set of data.evals; "
        "empty: the negated loss",
        tasks=("classify", "distil"),
    )
    group_size: int = key(
        16, "consecutive examples that a loss compares", ge=1, tasks=("classify", "regress")
    )
    allow_weak_teacher: bool = key(
        False,
        "continue with a teacher that is no better than chance",
        resume="free",
        affects_results=False,
        tasks=TAUGHT_TASKS,
    )
