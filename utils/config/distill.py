"""`DistillSection`: who teaches, by which losses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from utils.config.metadata import TAUGHT_TASKS, ConfigSection, about


class TeacherSection(ConfigSection):
    """One teacher."""

    model: str = Field(
        "",
        description="model name; 'ema', 'past': the student's average or last epoch; empty: as "
        "weights tell",
    )
    weights: str = Field(
        "",
        description=".safetensors, .pth, run directory or checkpoint; empty: timm's hub",
        **about(is_place=True),
    )
    args: dict[str, Any] = Field(default_factory=dict, description="model arguments")
    weight: float = Field(1.0, gt=0, description="share in an ensemble, relative to the others")
    num_classes: int | None = Field(
        None,
        ge=0,
        description="classes it answers; none: as its weights tell, or the student's; 0 "
        "(train.task=distil): it has no classifier",
    )
    label_map: str = Field(
        "",
        description="JSON list: for each class of the student, the teacher's class; by_name: the "
        "class of the same name",
        **about(is_place=True),
    )
    size: Annotated[int, Field(ge=1)] | Literal["student"] | None = Field(
        None,
        description="side in pixels it sees; none: the crop as it is; student: the side that "
        "train.image_sizes has the student see",
    )
    keep_tokens: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of its patches that a vision transformer sees: those that the student's "
        "class token attends to most; none: all",
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
    of: Literal["pooled", "patches"] = Field(
        "pooled", description="train.task=distil: which features are compared"
    )
    teacher: int | str | None = Field(
        None,
        description="train.task=distil: the teacher by number, from 0, or by its model's name; "
        "none: a term for each",
    )
    weight: float = Field(1.0, ge=0, description="factor of the term")
    weight_end: float | None = Field(
        None, ge=0, description="factor at the end of the run, by a cosine; none: constant"
    )
    warmup_epochs: float = Field(0.0, ge=0, description="epochs of a linear rise from 0")
    start_epoch: float = Field(
        0.0, ge=0, description="epoch before which the term counts nothing; the rise begins then"
    )


class DistillSection(ConfigSection):
    """Distillation: total = (1 - alpha) * task loss + alpha * sum of weighted terms."""

    teacher: str = Field(
        "",
        description="model name of the only teacher; 'ema': the student's average (train.ema); "
        "'past': the student as it was when the last epoch ended",
        **about(aliases=("teacher",), tasks=TAUGHT_TASKS),
    )
    teacher_weights: str = Field(
        "",
        description="the teacher's .safetensors, .pth, run directory or checkpoint; empty: timm's "
        "hub",
        **about(resume="free", aliases=("teacher_path",), is_place=True, tasks=TAUGHT_TASKS),
    )
    teachers: tuple[TeacherSection, ...] = Field(
        (),
        description="several teachers, or one with its own input transform, dtype or classes",
        **about(tasks=TAUGHT_TASKS),
    )
    peer: str = Field(
        "",
        description="model name of a second student, which is trained in the same steps: both "
        "teach each other; 'self': the student again, by other draws of its stochastic depth",
        **about(tasks=("classify",)),
    )
    peer_args: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the peer", **about(tasks=("classify",))
    )
    ensemble: Literal["probs", "logits", "separate"] = Field(
        "probs",
        description="several teachers: mean of probabilities or logits, or one by one",
        **about(tasks=("classify", "language", "regress")),
    )
    views: Literal["consistent", "independent", "weak_strong", "rotations"] = Field(
        "consistent",
        description="teachers see the student's crop, or another one of the image; weak_strong: "
        "both answer that crop and a second view, made by data.strong_pp; rotations: and its three "
        "turned copies",
        **about(tasks=("classify",)),
    )
    teacher_cache: str = Field(
        "",
        description="directory of stored answers (python -m tools.cache write) to teach by",
        **about(is_place=True, tasks=("classify", "distil", "language")),
    )
    cache_end: Literal["stop", "cycle"] = Field(
        "stop",
        description="epochs beyond those stored: refuse the run (unless the cache was written with "
        "--augmentations), or start over with them",
        **about(tasks=("classify", "distil", "language")),
    )
    loss: str = Field(
        "",
        description="one registered loss name: short for a single term",
        **about(aliases=("kd",), tasks=TAUGHT_TASKS),
    )
    temperature: float = Field(
        4.0,
        gt=0,
        description="temperature of terms whose args do not name one",
        **about(aliases=("kd_temperature",), tasks=("classify", "language")),
    )
    alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of distillation in the total loss",
        **about(aliases=("kd_alpha",), tasks=("classify", "language", "regress")),
    )
    alpha_schedule: Literal["constant", "epochs"] = Field(
        "constant",
        description="epochs: alpha * (epoch + 1) / epochs of the run, and 0 in the first epoch",
        **about(tasks=("classify",)),
    )
    losses: tuple[LossTerm, ...] = Field(
        (),
        description="several terms: name, args, layers, weight, weight_end, warmup_epochs, "
        "start_epoch",
        **about(tasks=TAUGHT_TASKS),
    )
    projector: Literal["linear", "mlp", "none"] = Field(
        "linear",
        description="train.task=distil: what turns the student's features into as many as a "
        "teacher has; it is not exported",
        **about(tasks=("classify", "distil")),
    )
    projector_width: int | None = Field(
        None,
        ge=1,
        description="hidden units of projector=mlp; none: as many as the teacher has",
        **about(tasks=("classify", "distil")),
    )
    standardise: Literal["none", "channel", "phi_s"] = Field(
        "none",
        description="train.task=distil: bring teachers' features to one scale: each channel to "
        "variance 1, or a rotation and one factor (PHI-S)",
        **about(tasks=("classify", "distil")),
    )
    statistics: str = Field(
        "",
        description="file of features' statistics (python -m tools.feature_statistics) to "
        "standardise by",
        **about(resume="free", is_place=True, tasks=("classify", "distil")),
    )
    score: str = Field(
        "",
        description="train.task=distil: the probe that decides what is best, as NAME/knn of a set "
        "of data.evals; none: the loss, negated",
        **about(tasks=("classify", "distil")),
    )
    group_size: int = Field(
        16,
        ge=1,
        description="consecutive examples that losses between examples work on",
        **about(tasks=("classify", "regress")),
    )
    allow_weak_teacher: bool = Field(
        False,
        description="go on although the teacher is no better than chance",
        **about(resume="free", is_neutral=True, tasks=TAUGHT_TASKS),
    )
