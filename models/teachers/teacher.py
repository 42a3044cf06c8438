"""Teachers: frozen models in eval mode, outside of checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from models.factory import build_model, find_model_name
from models.run_folder import find_run_folder
from models.teachers.classes import count_classes, load_label_map, read_label_map
from models.teachers.kept_tokens import KeptTokens, keep_tokens
from models.transforms import InputTransform, spread_channels
from utils.config.distill import TeacherSection
from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.weights.facts import WeightFacts
from utils.weights.hub import is_shared
from utils.weights.load import load_weights
from utils.weights.opening import open_weights
from utils.weights.source import Weights

if TYPE_CHECKING:
    from models.mlp import RowModel
    from utils.checkpoint.fit import TensorDiff
    from utils.config.distill import DistillSection

# The student itself as a teacher: its average, and its weights when the last epoch ended.
EMA, PAST = "ema", "past"
SELVES = (EMA, PAST)
_WEIGHTS_KEY = "distill.teacher_weights"
# Keys for teachers of images alone.
_OF_IMAGES = ("num_classes", "label_map", "size", "keep_tokens", "mean", "std", "parts")
FOLLOWS = "student"  # a size: that of the student's input


class FrozenModel(nn.Module):
    """Base of teachers, which never train; a subclass's `forward` gives float32 outputs.

    Args:
      transform: of images: raw pixels [B, C, H, W] of 0..255 -> the model's normalised input.
      weight: share in an ensemble.

    Attributes:
      parts: of a batch, which the model sees one after the other.
    """

    parts = 1

    def __init__(
        self, model: nn.Module, transform: InputTransform | None = None, *, weight: float = 1.0
    ) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.transform, self.weight = transform, weight
        self.dtype = next((p.dtype for p in model.parameters()), torch.float32)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode."""
        return super().train(False)

    def split(self, inputs: Tensor) -> list[Tensor]:
        """Split the model's inputs into the parts; a whole batch stays as it is."""
        return [inputs] if self.parts == 1 else list(inputs.chunk(self.parts))


class RowTeacher(FrozenModel):
    """A teacher of rows of numbers, which predicts in the data's own units."""

    def __init__(self, model: RowModel, *, weight: float = 1.0) -> None:
        super().__init__(model, weight=weight)
        self.out_features = len(model.outputs.mean)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Float32 predictions [B, out_features], without variances."""
        return self.model(inputs)[:, : self.out_features]


class Teacher(FrozenModel):
    """A teacher of images with logits of the student's classes.

    Args:
      model: logits [B, Kt] of its normalised input.
      classes: int [K], the teacher's class for each class of the student; None for the same.
      follows: whether its input has the student's size, if that is smaller than the crop.
      kept: the part of `model` that keeps some of its patches; None if all are kept.
    """

    transform: InputTransform

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
        super().__init__(model, transform, weight=weight)
        self.follows = follows
        self._kept = [kept]  # a list: the module has its place in the model
        self.register_buffer("classes", classes, persistent=False)

    @property
    def kept(self) -> KeptTokens | None:
        """The part that keeps some of its patches, or None."""
        return self._kept[0]

    @torch.no_grad()
    def forward(self, pixels: Tensor, seen: StudentView | None = None) -> Tensor:
        """Float32 logits [B, K] of raw pixels [B, C, H, W]; `seen` is None outside of a step."""
        kept = self.kept
        if seen is not None and self.follows:
            pixels = seen.pixels
        if kept is not None and seen is not None:
            assert seen.scores is not None  # the task computes them for such a teacher
            kept.choose(seen.scores)
        inputs = self.transform(pixels).to(self.dtype)
        logits = join_parts([self.model(part) for part in self.split(inputs)]).float()
        if kept is not None:
            kept.chosen = None
        return logits if self.classes is None else logits.index_select(1, self.classes)


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """Join the answers for parts of a batch; those for a whole one stay as they are."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@dataclass(frozen=True)
class StudentView:
    """Input of the student in a step: raw pixels [B, C, h, w], and scores [B, N] of its patches."""

    pixels: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True)
class TeacherSource:
    """A teacher before it is built: its section, its model's name and its weights."""

    section: TeacherSection
    name: str
    weights: Weights | None

    @property
    def facts(self) -> WeightFacts:
        """Metadata of the weights; empty without weights."""
        return self.weights.facts if self.weights is not None else {}

    def build(
        self,
        of_task: JsonMapping,
        *,
        device: str = "cpu",
        explain: Callable[[TensorDiff], str] = lambda diff: "",
    ) -> nn.Module:
        """Create the model with its weights, in the section's type.

        Args:
          of_task: arguments that the task gives: `{"num_classes": 10}`.
          device: "cpu", or "meta" to check arguments and weights at no cost.
          explain: formats the task's reason why weights do not fit; empty if it has none.

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
    """Open a teacher's weights and find its model's name; UserError if the two do not agree."""
    weights = open_weights(section.weights, _WEIGHTS_KEY) if section.weights else None
    name = _choose_name(section, weights.facts if weights is not None else {})
    return TeacherSource(section, name, weights)


def get_teacher_sections(section: DistillSection) -> tuple[TeacherSection, ...]:
    """Return all teachers of a run, also one in the short form, a shared model as weights."""
    teachers = section.teachers
    if section.teacher or section.teacher_weights:
        teachers = (TeacherSection(model=section.teacher, weights=section.teacher_weights),)
    return tuple(
        TeacherSection.model_validate(
            {**teacher.model_dump(), "model": "", "weights": teacher.model}
        )
        if is_shared(teacher.model) and not teacher.weights
        else teacher
        for teacher in teachers
    )


def hash_teacher(section: TeacherSection) -> str:
    """Hash a teacher's weights, name, classes and transform to 16 hex digits.

    Its share in an ensemble is left out: cached outputs are weighted when they are read.
    """
    digest = hashlib.sha256()
    weights = open_weights(section.weights, _WEIGHTS_KEY) if section.weights else None
    if weights is not None:
        digest.update(json.dumps(weights.facts, sort_keys=True).encode())
    if section.label_map:
        digest.update(read_label_map(section.label_map).encode())
    if weights is not None:
        weights.update_hash(digest)
    later = {"keep_tokens"} if section.keep_tokens is None else set()  # not in older hashes
    facts = section.model_dump(mode="json", exclude={"weights", "label_map", "parts", *later})
    facts["weight"] = 1.0  # in older hashes
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def explain_width(width: int, text: str) -> Callable[[TensorDiff], str]:
    """Create the `explain` of `build` for weights that differ in the number of outputs alone.

    Args:
      width: the right number.
      text: with {} for the number in the weights.
    """

    def explain(diff: TensorDiff) -> str:
        for (theirs, _), (own, _) in diff.different.values():
            if theirs and own and own[0] == width and theirs[1:] == own[1:]:
                return text.format(theirs[0])
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
    """Create the teachers that have weights of their own, so not `ema` and `past`.

    Weights of a run or a checkpoint hold their model's name, arguments and normalisation.

    Args:
      num_classes, class_names: the student's; None for unknown names.
      student_transform: the input of a teacher that has no normalisation of its own.
      device: "cpu", or "meta" to check names, classes and weights at no cost.

    Raises:
      UserError: unknown model, missing or foreign weights, or classes that do not agree.
    """
    check_shares(section)
    return [
        _create_teacher(teacher, num_classes, class_names, student_transform, device)
        for teacher in get_teacher_sections(section)
        if teacher.model not in SELVES
    ]


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
    teacher = Teacher(
        model,
        transform,
        classes=classes,
        weight=section.weight,
        follows=section.size == FOLLOWS,
        kept=None if share is None else keep_tokens(model, share, name),
    )
    teacher.parts = section.parts
    return teacher


def _choose_name(section: TeacherSection, facts: WeightFacts) -> str:
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
    section: TeacherSection, facts: WeightFacts, model: nn.Module, student_transform: InputTransform
) -> InputTransform:
    """Create a teacher's transform, with the student's normalisation if it has none of its own."""
    mean, std = section.mean, section.std
    if mean is None:
        mean, std = facts.get("mean"), facts.get("std")
    hub = getattr(model, "pretrained_cfg", {}) if not section.weights else {}
    if mean is None and hub.get("mean"):
        mean, std = [255 * v for v in hub["mean"]], [255 * v for v in hub["std"]]
    if mean is None or std is None:
        mean = student_transform.mean.flatten().tolist()
        std = student_transform.std.flatten().tolist()
    channels = student_transform.mean.shape[1]
    return InputTransform(
        spread_channels(mean, channels),
        spread_channels(std, channels),
        None if section.size == FOLLOWS else section.size,
    )


def check_shares(section: DistillSection) -> None:
    """Raise a UserError for weights of teachers whose outputs are not averaged."""
    weights = [teacher.weight for teacher in section.teachers]
    if section.ensemble == "separate" and len(set(weights)) > 1:
        raise UserError(
            f"distill.teachers weight ({weights}) has no effect with distill.ensemble=separate; "
            "give the multi_* loss args.weights, or set ensemble to probs or logits"
        )


def refuse_image_keys(section: TeacherSection, task: str) -> None:
    """Raise a UserError for keys of teachers of images with another `train.task`."""
    for key in _OF_IMAGES:
        value = getattr(section, key)
        if value != TeacherSection.model_fields[key].default:
            raise UserError(
                f"distill.teachers {key} ({value!r}) is not supported with train.task={task}; "
                "remove it"
            )


def check_normalisation(section: TeacherSection) -> None:
    """Raise a UserError for a mean without a std, the reverse, or a std that is not above 0."""
    if section.std is not None and not all(value > 0 for value in section.std):
        raise UserError(
            f"distill.teachers std ({list(section.std)}) must be above 0, since it divides pixels"
        )
    if (section.mean is None) == (section.std is None):
        return
    given, missing = ("mean", "std") if section.std is None else ("std", "mean")
    raise UserError(
        f"distill.teachers {given} ({list(getattr(section, given))}) needs {missing}; set both, or "
        "remove both to use those of the weights"
    )
