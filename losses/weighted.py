"""The weighted loss: the task loss and weighted distillation terms as one total."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from losses.base import Loss, LossInputs, LossOutput, Shapes
from losses.factory import create_loss
from losses.logits.kd import soft_cross_entropy
from utils.torch_types import ModuleListOf

if TYPE_CHECKING:
    from utils.config.distill import DistillSection
    from utils.json_types import JsonObject

# Computes what a task learns from its targets: a scalar, with autocast off.
TaskTerm = Callable[[LossInputs], Tensor]


class WeightedLoss(nn.Module):
    """total = (1 - alpha) * task + alpha * sum of weight * term; without terms, the task alone.

    Args:
      terms: (name, loss, weight) of each term; a repeated name is numbered in the log.
      alpha: share of distillation, 0 to 1.
      task_loss: computes the loss of the targets; None is soft cross-entropy.

    A part of weight 0 is computed and logged but left out of the total, so that an infinity in
    it cannot spread. `LossInputs.term_scales` multiplies the weights by data, for schedules.
    """

    # A second student that learns by the same terms, or None; set by its owner
    peer: nn.Module | None

    def __init__(
        self,
        terms: Sequence[tuple[str, Loss, float]] = (),
        alpha: float = 0.5,
        task_loss: TaskTerm | None = None,
    ) -> None:
        super().__init__()
        self.task_loss = task_loss or compute_class_loss
        self.alpha = alpha if terms else 0.0
        self.names = _number_repeats([name for name, _, _ in terms])
        self.register_module("peer", None)
        self.losses = ModuleListOf(loss for _, loss, _ in terms)
        self.weights = tuple(weight for _, _, weight in terms)
        of_terms = zip(self.names, self.weights, strict=True)
        self._factors = {"task": 1 - self.alpha} | {n: self.alpha * w for n, w in of_terms}

    def student_layers(self) -> tuple[str, ...]:
        """Return the student's module paths whose outputs `student_features` must contain."""
        return tuple(dict.fromkeys(p for loss in self.losses for p in loss.student_layers()))

    def teacher_layers(self) -> tuple[str, ...]:
        """Return the teacher's module paths whose outputs `teacher_features` must contain."""
        return tuple(dict.fromkeys(p for loss in self.losses for p in loss.teacher_layers()))

    def needs_distill_token(self) -> bool:
        """Return whether a term reads the logits of a distillation token."""
        return any(loss.needs_distill_token() for loss in self.losses)

    def needs_strong_view(self) -> bool:
        """Return whether a term compares a second, strongly augmented view."""
        return any(getattr(m, "needs_strong_view", False) for m in self.losses.modules())

    def needs_turned(self) -> bool:
        """Return whether a term compares images with their turned copies."""
        return any(getattr(m, "needs_turned", False) for m in self.losses.modules())

    def needs_noise(self) -> bool:
        """Return whether a term draws numbers with a key of the step."""
        return any(loss.needs_noise for loss in self.losses)

    def group_sizes(self) -> tuple[int, ...]:
        """Return the sizes of the groups of examples that terms compare; empty if no term does."""
        sizes = (getattr(module, "group_size", 0) for module in self.losses.modules())
        return tuple(sorted({size for size in sizes if size}))

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create the projections of all terms, before the optimizer is created."""
        for loss in self.losses:
            loss.build(student_shapes, teacher_shapes)

    def forward(self, inputs: LossInputs) -> LossOutput:
        with torch.autocast(inputs.student_logits.device.type, enabled=False):
            task = self.task_loss(inputs)
            if inputs.strong_student_logits is not None:  # both views share the targets
                strong = replace(inputs, student_logits=inputs.strong_student_logits)
                task = (task + self.task_loss(strong)) / 2
        terms = {"task": task}
        for name, loss in zip(self.names, self.losses, strict=True):
            terms[name] = loss(inputs)
        total = terms["total"] = self.weigh(terms, inputs.term_scales, inputs.alpha)
        return LossOutput(total, {name: value.detach() for name, value in terms.items()})

    def weigh(
        self,
        parts: Mapping[str, Tensor],
        term_scales: Tensor | None = None,
        alpha: Tensor | None = None,
    ) -> Tensor:
        """Compute what parts of the loss add to the total, which is their sum.

        Args:
          parts: `task` and terms by their names, or some of them; at least one.
          alpha: as in `LossInputs`.
        """
        scaled = []
        for name, value in parts.items():
            factor = self._get_factor(name, alpha)
            if isinstance(factor, float) and not factor:
                continue
            part = factor * value
            if term_scales is not None and name != "task":
                part = term_scales[self.names.index(name)].to(part.dtype) * part
            scaled.append(part)
        return torch.stack(scaled).sum() if scaled else 0 * next(iter(parts.values()))

    def _get_factor(self, name: str, alpha: Tensor | None) -> float | Tensor:
        """Return the factor of a part; a tensor if the share of distillation is data."""
        if alpha is None or not self.names:
            return float(self._factors[name])
        if name == "task":
            return 1 - alpha
        weight = self.weights[self.names.index(name)]
        return alpha * weight if weight else 0.0


def compute_class_loss(inputs: LossInputs) -> Tensor:
    """Compute the cross-entropy with the targets: a classification's task loss."""
    assert inputs.targets is not None
    return soft_cross_entropy(inputs.student_logits, inputs.targets, mask=inputs.mask)


def create_weighted_loss(
    distill: DistillSection, task_loss: TaskTerm = compute_class_loss
) -> WeightedLoss:
    """Create the loss of a `distill` section: its terms (`create_loss`), or the task loss alone."""
    entries: list[tuple[str, JsonObject, float]] = [
        (term.name, term.args | ({"layers": term.layers} if term.layers else {}), term.weight)
        for term in distill.losses
    ]
    if distill.loss:
        entries = [(distill.loss, {}, 1.0)]
    defaults = {"temperature": distill.temperature, "group_size": distill.group_size}
    terms = [(name, create_loss(name, args, **defaults), weight) for name, args, weight in entries]
    return WeightedLoss(terms, distill.alpha, task_loss)


def _number_repeats(names: Sequence[str]) -> tuple[str, ...]:
    """Return names as they are logged: the second `kd` becomes `kd_2`."""
    logged: list[str] = []
    for position, name in enumerate(names):
        earlier = names[:position].count(name)
        logged.append(f"{name}_{earlier + 1}" if earlier else name)
    return tuple(logged)
