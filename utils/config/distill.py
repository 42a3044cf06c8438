"""`DistillSection`: who teaches, by which losses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from utils.config.metadata import ConfigSection, about


class TeacherSection(ConfigSection):
    """One teacher."""

    model: str = Field(
        "", description="model name; 'ema': the student's own average; empty: as weights tell"
    )
    weights: str = Field(
        "",
        description=".safetensors, .pth, run directory or checkpoint; empty: timm's hub",
        **about(is_place=True),
    )
    args: dict[str, Any] = Field(default_factory=dict, description="model arguments")
    weight: float = Field(1.0, gt=0, description="share in an ensemble, relative to the others")
    num_classes: int | None = Field(
        None, ge=1, description="classes it answers; none: as its weights tell, or the student's"
    )
    label_map: str = Field(
        "",
        description="JSON list: for each class of the student, the teacher's class",
        **about(is_place=True),
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
        **about(resume="free", aliases=("teacher_path",), is_place=True),
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
        "",
        description="directory of stored answers (python -m tools.cache_teacher) to teach by",
        **about(is_place=True),
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
        **about(resume="free", is_neutral=True),
    )
