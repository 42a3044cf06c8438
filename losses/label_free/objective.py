"""The loss of a student without labels: terms between its features and those of its teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from losses.base import LossOutput
from losses.factory import create_from
from losses.label_free.embeddings import EmbeddingLoss
from losses.reductions import Mask
from losses.table import EMBEDDING_LOSSES
from utils.config.distill import LossTerm
from utils.errors import UserError, get_hint
from utils.torch_types import ModuleListOf

if TYPE_CHECKING:
    from utils.config.distill import DistillSection, TeacherSection

POOLED, PATCHES = "pooled", "patches"


@dataclass(frozen=True)
class Embeddings:
    """Features of images in front of a model's head."""

    pooled: Tensor | None  # [B, C], the input of a classifier
    # [B, N, C], row by row of the grid; None if the model has no grid or none was needed
    patches: Tensor | None = None

    def get(self, of: str) -> Tensor:
        features = self.pooled if of == POOLED else self.patches
        assert features is not None, of
        return features


@dataclass(frozen=True)
class LabelFreeInputs:
    """Inputs of terms between features, on the device of the step."""

    # For each teacher the student's features, patches on that teacher's grid
    students: tuple[Embeddings, ...]
    teachers: tuple[Embeddings, ...]  # their features
    mask: Mask = None  # bool [B], valid examples
    # float [terms of the configuration], scheduled factors, as data
    term_scales: Tensor | None = None


@dataclass(frozen=True)
class TermSpec:
    """A term of one teacher."""

    name: str  # in the log
    number: int  # index of the term in the configuration
    teacher: int  # index of the teacher
    of: str  # `pooled` or `patches`
    weight: float

    @property
    def projector(self) -> str:
        """Key of the projector, shared by all terms on such features of one teacher."""
        return f"{self.of}_{self.teacher}"


class LabelFreeLoss(nn.Module):
    """total = sum of weight * term; each kind of features has a projector of the student.

    Args:
      terms: each term with its loss.
      kind: of the projectors: `linear`, `mlp` or `none`.
      hidden: width of an mlp's hidden layer; None is the teacher's.
    """

    def __init__(
        self,
        terms: Sequence[tuple[TermSpec, EmbeddingLoss]],
        kind: str = "linear",
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.terms = tuple(spec for spec, _ in terms)
        self.losses = ModuleListOf(loss for _, loss in terms)
        self.projectors = nn.ModuleDict()
        self._kind, self._hidden = kind, hidden

    def wants(self, of: str, teacher: int | None = None) -> bool:
        """Return whether a term compares such features, of one teacher or of any."""
        return any(term.of == of and teacher in (None, term.teacher) for term in self.terms)

    def build(self, student: Embeddings, teachers: Sequence[Embeddings]) -> None:
        """Create the projectors and the losses' parameters, before the optimizer is created.

        Of features only widths and, of teachers, the number of patches count. A UserError if there
        are no projectors and the widths differ.
        """
        for spec, loss in zip(self.terms, self.losses, strict=True):
            mine, theirs = student.get(spec.of), teachers[spec.teacher].get(spec.of)
            width = theirs.shape[-1]
            loss.build(width, theirs.shape[1] if spec.of == PATCHES else 0)
            if spec.projector not in self.projectors:
                made = create_projector(self._kind, mine.shape[-1], width, self._hidden)
                self.projectors[spec.projector] = made

    def forward(self, inputs: LabelFreeInputs) -> LossOutput:
        values: dict[str, Tensor] = {}
        parts = []
        seen = dict.fromkeys(self.projectors)
        for spec, loss in zip(self.terms, self.losses, strict=True):
            if seen[spec.projector] is None:
                mine = inputs.students[spec.teacher].get(spec.of)
                seen[spec.projector] = self.projectors[spec.projector](mine)
            theirs = inputs.teachers[spec.teacher].get(spec.of)
            value = values[spec.name] = loss(seen[spec.projector], theirs, inputs.mask)
            if spec.weight:
                scales = inputs.term_scales
                part = spec.weight * value
                parts.append(part if scales is None else scales[spec.number] * part)
        total = values["total"] = torch.stack(parts).sum()
        return LossOutput(total, {name: value.detach() for name, value in values.items()})


class MlpProjector(nn.Sequential):
    """Two linear maps around LayerNorm and GELU.

    Source: Ranzinger et al. 2024 (AM-RADIO), arXiv:2312.06709, section 3.3: two-layer heads.
    """

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__(
            nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, out)
        )


def create_projector(kind: str, width: int, out: int, hidden: int | None = None) -> nn.Module:
    """Create a map of features [..., width] to [..., out]; a UserError if `none` does not fit."""
    if kind == "mlp":
        return MlpProjector(width, hidden or out, out)
    if kind == "linear":
        return nn.Linear(width, out)
    if width != out:
        raise UserError(
            f"distill.projector (none) needs equal widths, but the student has {width} features "
            f"and a teacher {out}; set linear or mlp"
        )
    return nn.Identity()


def create_label_free_loss(
    distill: DistillSection, teachers: Sequence[TeacherSection]
) -> LabelFreeLoss:
    """Create the loss of a `distill` section; a term without a teacher applies to each of them.

    Teachers are in the order of their outputs; a teacher's weight multiplies its terms. A UserError
    for an unknown loss, argument or teacher.
    """
    terms = distill.losses or (LossTerm(name=distill.loss),)
    specs: list[tuple[TermSpec, EmbeddingLoss]] = []
    names: list[str] = []
    for number, term in enumerate(terms):
        for teacher in _find_teachers(term, teachers):
            loss = create_from(EMBEDDING_LOSSES, term.name, term.args)
            name = f"{term.name}_{term.of}_{teacher}"
            names.append(name)
            repeated = names.count(name)
            name = name if repeated == 1 else f"{name}_{repeated}"
            weight = term.weight * teachers[teacher].weight
            specs.append((TermSpec(name, number, teacher, term.of, weight), loss))
    if not any(spec.weight for spec, _ in specs):
        raise UserError(
            "distill.losses gives every term the weight 0, so that there is nothing to learn; "
            "give one a weight"
        )
    return LabelFreeLoss(specs, distill.projector, distill.projector_width)


def _find_teachers(term: LossTerm, teachers: Sequence[TeacherSection]) -> list[int]:
    """Return the numbers of the teachers that a term learns from."""
    if term.teacher is None:
        return list(range(len(teachers)))
    if isinstance(term.teacher, int):
        if 0 <= term.teacher < len(teachers):
            return [term.teacher]
        raise UserError(
            f"distill.losses: {term.name} learns from teacher {term.teacher}, but there are "
            f"{len(teachers)}, numbered from 0; correct it"
        )
    known = [section.model or section.weights for section in teachers]
    matches = [number for number, name in enumerate(known) if name == term.teacher]
    if len(matches) != 1:
        many = f"{len(matches)} teachers have this name; give its number" if matches else ""
        raise UserError(
            f"distill.losses: {term.name} learns from teacher {term.teacher!r}; "
            f"{many or get_hint(term.teacher, known)}"
        )
    return matches
