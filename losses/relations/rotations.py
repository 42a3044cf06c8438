"""Losses that also see turned images: SSKD, with heads that match them to the plain ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from losses.base import Layers, LossInputs, Shapes, Turned, get_feature, get_teacher_logits
from losses.factory import check_positive, check_steps, is_number
from losses.features.gaussians import get_vector, get_width
from losses.features.heads import require_one_pair
from losses.features.hints import FeatureLoss
from losses.logits.kd import kd_kl_div
from losses.reductions import (
    as_constant,
    get_group_weights,
    mean_groups,
    split_groups,
    unit_rows,
    upcast,
)
from losses.relations.views import compute_row_kl
from utils.errors import UserError

SIMILARITY_TEMPERATURE = 0.5
ABSENT = -1e9  # replaces a logit: probability 0, last rank, and finite in differences
SLACK = 1e-6  # float32 must not round a whole number of predictions down


def create_head(width: int) -> nn.Sequential:
    """Create two linear layers with a ReLU between them, all of one width."""
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def compute_similarities(plain: Tensor, turned: Tensor, valid: Tensor) -> Tensor:
    """Compute [G, g * n, g] rows of cosines / `SIMILARITY_TEMPERATURE` of turned to plain images.

    Args:
      plain: [G, g, C].
      turned: [G, g, n, C], of the same images; in the result, turn after turn of each image.
      valid: bool [G, g]; the columns of other images are `ABSENT`.
    """
    cosines = unit_rows(turned).flatten(1, 2) @ unit_rows(plain).transpose(1, 2)
    absent = torch.full_like(cosines, ABSENT)
    return torch.where(valid.unsqueeze(1), cosines / SIMILARITY_TEMPERATURE, absent)


def count_better(scores: Tensor, answers: Tensor) -> Tensor:
    """Count [G, n] entries of [G, n, M] scores that rank before the right one.

    `answers` is int [n] or [G, n], the right one of a row; of equal scores the first is better.
    """
    answers = answers.expand(scores.shape[:2]).unsqueeze(-1)
    own = scores.gather(-1, answers)
    is_earlier = torch.arange(scores.shape[-1], device=scores.device) < answers
    return ((scores > own) | ((scores == own) & is_earlier)).sum(dim=-1, dtype=torch.int32)


def select_answers(ranks: Tensor, valid: Tensor, share: float) -> Tensor:
    """Select [G, n] all right predictions, and the share `share` of the wrong ones, best first.

    A comparison of all pairs replaces the sort: its shape does not depend on how many are wrong.

    Args:
      ranks: int [G, n] of `count_better`; of equally wrong ones the first is kept.
      valid: bool [G, n]; the others are neither right nor wrong.
    """
    is_wrong = valid & (ranks > 0)
    numbers = torch.arange(ranks.shape[-1], dtype=ranks.dtype, device=ranks.device)
    keys = ranks * ranks.shape[-1] + numbers
    is_before = (keys.unsqueeze(-2) < keys.unsqueeze(-1)) & is_wrong.unsqueeze(-2)
    room = share * (1 + SLACK) * is_wrong.sum(dim=-1, keepdim=True)
    return valid & ((ranks == 0) | (is_before.sum(dim=-1) + 1 <= room))


def mean_selected(values: Tensor, is_selected: Tensor) -> Tensor:
    """Compute [G] mean of the selected among [G, n] values; 0 if none is selected."""
    total = torch.where(is_selected, values, torch.zeros_like(values)).sum(dim=-1)
    return total / is_selected.sum(dim=-1).clamp(min=1)


class SelfSupervisedKD(FeatureLoss):
    """Distillation of images, of their turned copies, and of the match between both.

    weights[0] * kd of the images + weights[1] * kd of the three turned copies of each +
    weights[2] * tau^2 KL(b_t, b_s): b is each side's softmax, over the images of a group, of the
    cosines of a turned copy to them / tau (0.5), between heads of two layers on features averaged
    over positions. Of the teacher's wrong predictions of classes only the share keep[0] counts, and
    of those of matches keep[1], beginning with those that rank the right one best. Means over the
    predictions that count; the selection is made within a group.

    The teacher's head learns first, by the cross-entropy of its own b with the right image, while
    the student has the other terms: calls are counted in a buffer, and from call `head_steps` on
    the head is a constant copy, its own loss is dropped and the matches count. One pair of layers:
    those before the classifiers; widths may differ.

    Source: Xu et al. 2020 (SSKD), arXiv:2006.07114, sections 3.2 and 3.3, rotations alone; weights,
    shares and temperatures of its authors' code, in which the teacher's head learns at tau 1, in
    epochs of its own.
    """

    why_not_tokens = "turns images and compares those of a group"
    needs_turned = True

    def __init__(
        self,
        layers: Layers,
        head_steps: int,
        temperature: float = 4.0,
        weights: Sequence[float] = (0.9, 2.7, 10.0),
        keep: Sequence[float] = (1.0, 0.75),
        group_size: int = 0,
    ) -> None:
        super().__init__(layers)
        require_one_pair("sskd", self)
        check_positive("sskd", temperature=temperature)
        purpose = "train the teacher's head before the student learns from it"
        check_steps("sskd", purpose, head_steps=head_steps)
        self.weights = _check_numbers("weights", weights, 3, "numbers of 0 or more")
        self.keep = _check_numbers("keep", keep, 2, "shares from 0 to 1", most=1.0)
        self.head_steps, self.temperature = head_steps, temperature
        self.group_size = group_size
        self.register_buffer("calls", torch.zeros(1))

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create both heads, and the copy of the teacher's."""
        ((_, student, teacher),) = self.pair_shapes(student_shapes, teacher_shapes)
        self.student_head = create_head(get_width(student))
        self.teacher_head = create_head(get_width(teacher))
        for number, weight in enumerate(self.teacher_head.parameters()):
            self.register_buffer(f"settled_{number}", weight.detach().clone())

    def compute(self, inputs: LossInputs) -> Tensor:
        turned = get_turned(inputs)
        student, teacher = upcast(inputs.student_logits), as_constant(get_teacher_logits(inputs))
        weights = get_group_weights(student, inputs.mask, self.group_size)
        plain = kd_kl_div(student, teacher, self.temperature, mask=inputs.mask)
        copies = self.compare_copies(inputs, turned, weights)
        is_learning = (self.calls < self.head_steps).to(student.dtype)
        lost, pairs = self.compare_pairs(inputs, turned, weights)
        if torch.is_grad_enabled():
            self.calls.add_(1.0)
        first, second, third = self.weights
        total = first * plain + second * copies + third * (1 - is_learning) * pairs
        return (total + is_learning * lost).squeeze()

    def compare_copies(self, inputs: LossInputs, turned: Turned, weights: Tensor) -> Tensor:
        """Compute `kd` of the turned copies, without the worst of the teacher's predictions."""
        size, copies = weights.shape[1], turned.student_logits.shape[1]
        student, teacher = (
            split_groups(side, size).flatten(1, 2)
            for side in (turned.student_logits, turned.teacher_logits[0])
        )
        classes = split_groups(inputs.target_classes().long(), size)
        answers, valid = (rows.repeat_interleave(copies, dim=1) for rows in (classes, weights > 0))
        kept = select_answers(count_better(as_constant(teacher), answers), valid, self.keep[0])
        values = compute_row_kl(student, teacher, self.temperature)
        return mean_groups(mean_selected(values, kept), weights)

    def compare_pairs(
        self, inputs: LossInputs, turned: Turned, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of the teacher's head, and tau^2 KL of the similarities."""
        ((student_path, teacher_path),) = self.layers.items()
        student = get_vectors(
            get_feature(inputs.student_features, student_path, "student"),
            turned.student_features[student_path],
        )
        teacher = get_vectors(
            get_feature(inputs.teacher_features, teacher_path, "teacher").detach(),
            turned.teacher_features[teacher_path].detach(),
        )
        size, valid = weights.shape[1], weights > 0
        own, learnt, settled = (
            compute_similarities(
                split_groups(head(sides[0]), size), split_groups(head(sides[1]), size), valid
            )
            for head, sides in (
                (self.student_head, student),
                (self.teacher_head, teacher),
                (self.apply_settled, teacher),
            )
        )
        copies = own.shape[1] // size
        answers = torch.arange(size, device=own.device).repeat_interleave(copies)
        valid = valid.repeat_interleave(copies, dim=1)
        right = learnt.log_softmax(dim=-1).gather(-1, answers.expand(valid.shape).unsqueeze(-1))
        lost = mean_groups(mean_selected(-right.squeeze(-1), valid), weights)
        kept = select_answers(count_better(settled, answers), valid, self.keep[1])
        values = SIMILARITY_TEMPERATURE**2 * compute_row_kl(own, settled, 1.0)
        return lost, mean_groups(mean_selected(values, kept), weights)

    def apply_settled(self, features: Tensor) -> Tensor:
        """Apply the teacher's head as of call `head_steps`, or as it is before that call."""
        is_due = self.calls <= self.head_steps
        parts = []
        for number, weight in enumerate(self.teacher_head.parameters()):
            settled = self.get_buffer(f"settled_{number}")
            part = torch.where(is_due, weight.detach(), settled)
            if torch.is_grad_enabled():
                settled.copy_(part)
            parts.append(part)
        hidden = functional.linear(features, parts[0], parts[1]).relu()
        return functional.linear(hidden, parts[2], parts[3])


def get_vectors(plain: Tensor, turned: Tensor) -> list[Tensor]:
    """Return [B, C] of the images and [B, n, C] of their copies, averaged over positions."""
    copies = upcast(turned)
    vectors = get_vector(copies.flatten(0, 1)).unflatten(0, copies.shape[:2])
    return [get_vector(upcast(plain)), vectors]


def get_turned(inputs: LossInputs) -> Turned:
    """Return outputs for the turned copies; a UserError without them, or of several teachers."""
    if inputs.turned is None:
        raise UserError(
            "distill.losses: sskd compares images with their turned copies, and this run has none; "
            "set distill.views=rotations"
        )
    if len(inputs.turned.teacher_logits) != 1:
        raise UserError(
            f"distill.losses: sskd takes one teacher and got {len(inputs.turned.teacher_logits)}; "
            "name one, or set distill.ensemble=probs"
        )
    return inputs.turned


def _check_numbers(
    key: str, values: Sequence[float], count: int, form: str, most: float = float("inf")
) -> tuple[float, ...]:
    """Return the numbers as a tuple; a UserError if count or range is wrong."""
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    numbers = tuple(values) if is_list else ()
    if len(numbers) != count or not all(is_number(value, 0, most) for value in numbers):
        raise UserError(f"distill.losses: sskd.{key} is {values!r}; give {count} {form}")
    return numbers
