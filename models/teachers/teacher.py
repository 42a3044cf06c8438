"""Teachers: frozen, in eval mode for ever, outside everything that a checkpoint holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import torch
from torch import Tensor, nn

from models.factory import build_model, find_model_name
from models.run_folder import find_run_folder
from models.teachers.classes import count_classes, load_label_map, read_label_map
from models.teachers.kept_tokens import KeptTokens, keep_tokens
from models.transforms import InputTransform, spread_channels
from utils.config.distill import TeacherSection
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.weights.hub import is_shared
from utils.weights.load import load_weights
from utils.weights.opening import open_weights
from utils.weights.source import Weights

if TYPE_CHECKING:
    from utils.checkpoint.fit import TensorDiff
    from utils.config.distill import DistillSection

T = TypeVar("T")
# The student itself as a teacher: its average, and as it was when the last epoch ended.
EMA, PAST = "ema", "past"
SELVES = (EMA, PAST)
_WEIGHTS_KEY = "distill.teacher_weights"
# What a section may say of a teacher of images, and no other teacher has.
_OF_IMAGES = ("num_classes", "label_map", "size", "keep_tokens", "mean", "std")
FOLLOWS = "student"  # a size: what the student sees


class FrozenModel(nn.Module):
    """What teachers of every task share: a model that answers under `no_grad` and never changes.

    `train()` does not change its mode, and its parameters never require a gradient. A task's own
    kind of teacher gives `forward`, from what its batches hold to float32 answers.

    Args:
      weight: share in an ensemble.
    """

    def __init__(self, model: nn.Module, *, weight: float = 1.0) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.weight = weight
        self.dtype = next((p.dtype for p in model.parameters()), torch.float32)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode, whatever is asked."""
        return super().train(False)


class Teacher(FrozenModel):
    """A teacher of images, which answers in the student's classes.

    Args:
      model: logits [B, Kt] of its normalised input.
      transform: pixels [B, C, H, W] of 0..255 -> that input.
      classes: int [K], the teacher's class for each class of the student; none: the same.
      weight: share in an ensemble.
      follows: whether it sees what the student does, where that is smaller than the crop.
      kept: stands in `model` and keeps some of its patches; none: it always sees all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        transform: InputTransform,
        *,
        classes: Tensor | None = None,
        weight: float = 1.0,
        follows: bool = False,
        kept: KeptTokens | None = None,
    ) -> None:
        super().__init__(model, weight=weight)
        self.transform, self.follows = transform, follows
        self._kept = [kept]  # a list: the module has its place in the model
        self.register_buffer("classes", classes, persistent=False)
        self.eval()  # the transform, too

    @property
    def kept(self) -> KeptTokens | None:
        """What keeps some of its patches."""
        return self._kept[0]

    @torch.no_grad()
    def forward(self, pixels: Tensor, seen: SeenByStudent | None = None) -> Tensor:
        """Float32 logits [B, K] of raw pixels [B, C, H, W].

        Args:
          seen: what the student made of the same images; none: outside of a step.
        """
        kept = self.kept
        if seen is not None and self.follows:
            pixels = seen.pixels
        if kept is not None and seen is not None:
            kept.choose(seen.scores)
        logits = self.model(self.transform(pixels).to(self.dtype)).float()
        if kept is not None:
            kept.chosen = None
        return logits if self.classes is None else logits.index_select(1, self.classes)


@dataclass(frozen=True)
class SeenByStudent:
    """What a student has just looked at, for teachers that look at the same.

    Attributes:
      pixels: [B, C, h, w], raw, at the student's side.
      scores: [B, N] of its patches; none: nobody asks for them.
    """

    pixels: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True)
class TeacherSource:
    """What a teacher's section names, looked at but not built: its model's name and its weights.

    Whatever is learnt, teachers come this way: a task opens one, holds its facts against what it
    knows of student and data, and builds it with its own arguments.
    """

    section: TeacherSection
    name: str
    weights: Weights | None

    @property
    def facts(self) -> JsonObject:
        """What the weights tell of their model; empty without any."""
        return self.weights.facts if self.weights is not None else {}

    def build(
        self,
        of_task: Mapping[str, object],
        *,
        device: str = "cpu",
        explain: Callable[[TensorDiff], str] = lambda diff: "",
    ) -> nn.Module:
        """The model with its weights, in the section's type.

        Args:
          of_task: arguments that the task gives: `{"num_classes": 10}`.
          device: "cpu", or "meta" to check arguments and weights at no cost.
          explain: says in the task's words why weights do not fit; empty: it has none.

        Raises:
          UserError: arguments that the model does not take, weights that do not fit.
        """
        model = build_model(
            self.name,
            {**self.facts.get("args", {}), **self.section.args, **of_task},
            pretrained=not self.section.weights and device != "meta",
            key="distill.teacher",
            device=device,
        )
        if self.weights is not None:
            load_weights(model, self.weights, explain=explain)
        return model.to(torch.bfloat16) if self.section.dtype == "bf16" else model


def open_teacher(section: TeacherSection) -> TeacherSource:
    """A teacher's weights and the name of its model, which they or the section tell.

    Raises:
      UserError: unknown model, missing weights, or a name that is not theirs.
    """
    weights = open_weights(section.weights, _WEIGHTS_KEY) if section.weights else None
    name = _choose_name(section, weights.facts if weights is not None else {})
    return TeacherSource(section, name, weights)


def get_teacher_sections(section: DistillSection) -> tuple[TeacherSection, ...]:
    """All teachers of a run, the short form of a single one written out.

    A shared model's name is that of its weights, too, which tell the rest.
    """
    found = section.teachers
    if section.teacher or section.teacher_weights:
        found = (TeacherSection(model=section.teacher, weights=section.teacher_weights),)
    return tuple(
        TeacherSection(**{**one.model_dump(), "model": "", "weights": one.model})
        if is_shared(one.model) and not one.weights
        else one
        for one in found
    )


def hash_teacher(section: TeacherSection) -> str:
    """What a teacher is, in 16 hex digits: its weights' bytes, its name, classes and transform.

    Its share in an ensemble is no part of it: answers are weighed when they are read.
    """
    digest = hashlib.sha256()
    weights = open_weights(section.weights, _WEIGHTS_KEY) if section.weights else None
    if weights is not None:
        digest.update(json.dumps(weights.facts, sort_keys=True).encode())
    if section.label_map:
        digest.update(read_label_map(section.label_map).encode())
    if weights is not None:
        weights.update_hash(digest)
    later = {"keep_tokens"} if section.keep_tokens is None else set()  # it came later
    facts = section.model_dump(mode="json", exclude={"weights", "label_map", *later})
    facts["weight"] = 1.0  # it once was part
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def create_each(
    section: DistillSection,
    create: Callable[[TeacherSection], T],
    selves: Sequence[str] = SELVES,
) -> list[T]:
    """The teachers that have weights of their own, in the configuration's order.

    Args:
      create: the task's kind of teacher.
      selves: names that stand for the student, which the train state holds.
    """
    return [create(one) for one in get_teacher_sections(section) if one.model not in selves]


def explain_width(width: int, text: str) -> Callable[[TensorDiff], str]:
    """Says why weights do not fit where only the number of answers is wrong, not the model.

    Args:
      width: the number that there should be.
      text: with a place for the number that is found.
    """

    def explain(diff: TensorDiff) -> str:
        for (found, _), (own, _) in diff.different.values():
            if found and own and own[0] == width and found[1:] == own[1:]:
                return text.format(found[0])
        return ""

    return explain


def create_teachers(
    section: DistillSection,
    *,
    num_classes: int,
    class_names: tuple[str, ...] | None = None,
    student_transform: InputTransform,
    device: str = "cpu",
) -> list[Teacher]:
    """The teachers that have weights of their own; empty without distillation.

    A run or a checkpoint tells its model, arguments and normalisation itself. `ema` and `past` are
    not among them: they are the student, which the train state holds.

    Args:
      num_classes: the student's.
      class_names: the student's, by which a teacher's may be mapped; None if unknown.
      student_transform: the input of a teacher that has no normalisation of its own.
      device: "cpu", or "meta" to check names, classes and weights at no cost.

    Raises:
      UserError: unknown model, missing or foreign weights, or classes that do not agree.
    """
    check_shares(section)
    return create_each(
        section,
        lambda one: _create_teacher(one, num_classes, class_names, student_transform, device),
    )


def _create_teacher(
    section: TeacherSection,
    num_classes: int,
    class_names: tuple[str, ...] | None,
    student_transform: InputTransform,
    device: str,
) -> Teacher:
    check_normalisation(section)
    source = open_teacher(section)
    name, facts = source.name, source.facts
    classes = load_label_map(source, num_classes, class_names)
    own_classes = count_classes(source, num_classes)
    if classes is None and own_classes != num_classes:
        raise UserError(
            f"distill.teacher {name!r} has {own_classes} classes, the student {num_classes}; use a "
            "teacher of the same classes, or map them by distill.teachers label_map"
        )
    explain = explain_width(
        own_classes,
        f"is a model of {{}} classes, not {own_classes}; use a teacher of the same classes, or map "
        "them by distill.teachers num_classes and label_map",
    )
    model = source.build({"num_classes": own_classes}, device=device, explain=explain)
    transform = create_teacher_transform(section, facts, model, student_transform)
    share = section.keep_tokens
    return Teacher(
        model,
        transform,
        classes=classes,
        weight=section.weight,
        follows=section.size == FOLLOWS,
        kept=None if share is None else keep_tokens(model, share, name),
    )


def _choose_name(section: TeacherSection, facts: JsonObject) -> str:
    name = section.model or facts.get("model", "")
    if not name:
        raise UserError(
            f"distill.teacher_weights ({section.weights!r}) does not say its model; name it by "
            "distill.teacher"
        )
    if facts and facts["model"] != name:
        raise UserError(
            f"distill.teacher ({name!r}) is not the model in distill.teacher_weights "
            f"({section.weights!r}), which is {facts['model']!r}; drop distill.teacher"
        )
    is_path = "/" in name and not is_shared(name)
    if is_path and not section.weights and find_run_folder(name) is not None:
        raise UserError(
            f"distill.teacher ({name!r}) is a run, but it takes a model's name; give the run by "
            f"distill.teacher_weights (--teacher_path {name})"
        )
    return find_model_name(name, "distill.teacher")


def create_teacher_transform(
    section: TeacherSection, facts: JsonObject, model: nn.Module, student_transform: InputTransform
) -> InputTransform:
    """Its own size and normalisation where the section, its run or timm's hub tells them."""
    mean, std = section.mean, section.std
    if mean is None:
        mean, std = facts.get("mean"), facts.get("std")
    hub = getattr(model, "pretrained_cfg", {}) if not section.weights else {}
    if mean is None and hub.get("mean"):
        mean, std = [255 * v for v in hub["mean"]], [255 * v for v in hub["std"]]
    if mean is None or std is None:
        mean, std = (
            student_transform.mean.flatten().tolist(),
            student_transform.std.flatten().tolist(),
        )
    channels = student_transform.mean.shape[1]
    return InputTransform(
        spread_channels(mean, channels),
        spread_channels(std, channels),
        None if section.size == FOLLOWS else section.size,
    )


def check_shares(section: DistillSection) -> None:
    """Refuse weights of teachers where nobody averages their answers."""
    weights = [one.weight for one in section.teachers]
    if section.ensemble == "separate" and len(set(weights)) > 1:
        raise UserError(
            f"distill.teachers weight ({weights}) has no effect with distill.ensemble=separate; "
            "give the multi_* loss args.weights, or set ensemble to probs or logits"
        )


def refuse_image_keys(section: TeacherSection, task: str) -> None:
    """Refuse what only a teacher of images can have.

    Args:
      task: what is learnt, as `train.task` names it.
    """
    for key in _OF_IMAGES:
        value = getattr(section, key)
        if value not in (None, ""):
            raise UserError(
                f"distill.teachers {key} ({value!r}) means nothing to train.task={task}; leave it "
                "out"
            )


def check_normalisation(section: TeacherSection) -> None:
    """Mean and std belong together: half of them would be dropped, or mixed with another's."""
    if section.std is not None and not all(value > 0 for value in section.std):
        raise UserError(
            f"distill.teachers std ({list(section.std)}) divides its pixels; give numbers above 0"
        )
    if (section.mean is None) == (section.std is None):
        return
    given, missing = ("mean", "std") if section.std is None else ("std", "mean")
    raise UserError(
        f"distill.teachers {given} ({list(getattr(section, given))}) stands without {missing}; "
        "give both, or neither and it is taken from the weights"
    )
