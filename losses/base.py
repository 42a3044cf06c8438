"""Defines the inputs and the output of a loss, and the base class of all losses.

What holds for every `compute_*` and is not repeated there:

- `student_logits` and `teacher_logits` are [B, K], unnormalised; `student_features` and
  `teacher_features` [B, C, P], C channels at P positions, of one shape.
- The student's side receives the gradient; teachers, targets and classes are constants.
- `classes`: int [B], the target classes; with mixed targets the heaviest.
- `mask`: bool [B], valid examples; None if all are.
- `temperature`: T > 0, divides the logits of both sides; the result is scaled by T^2, so that
  gradients keep the hard-label scale.
- `group_size`: consecutive examples that are compared with each other; 0: all of the batch.
  Groups are [G, g, ...], their `weights` [G, g] are 1 for valid examples and 0 for the others.
- The result is a scalar, float32 at least: summed over K, averaged over valid examples;
  divergences in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from losses.reductions import Mask, as_constant
from utils.errors import UserError, get_hint

Shapes = Mapping[str, tuple[int, ...]]
Layers = Mapping[str, str]  # the student's layer -> the teacher's, by module path
MIN_MASS = 1e-30  # keeps the logarithm of an empty rest finite in float32


@dataclass(frozen=True)
class Turned:
    """Outputs of both sides for n turned copies of each image of a batch (`sskd`)."""

    student_logits: Tensor  # [B, n, K], carries the gradient
    teacher_logits: tuple[Tensor, ...]  # one [B, n, K] per live teacher
    # Activations [B, n, ...] by module path of the student; no parameters
    student_features: Mapping[str, Tensor]
    teacher_features: Mapping[str, Tensor]  # likewise, of the teacher


@dataclass(frozen=True)
class SparseTeacher:
    """Stored outputs of a teacher for a batch."""

    log_probs: Tensor  # float [B, k], log-probabilities at temperature 1 of the k best classes
    indices: Tensor  # int [B, k], their classes, each at most once in a row
    residual: Tensor  # float [B], probability mass of the other K - k classes


@dataclass(frozen=True)
class LossInputs:
    """Everything that a loss may look at, on the device of the step."""

    student_logits: Tensor  # [B, K], carries the gradient; of a regression its predictions [B, O]
    # float [B, K], rows sum to 1, after mixup and label smoothing; of sets of classes each 0 to 1;
    # of a regression the numbers [B, O], in the units of the predictions; None if there are only
    # `labels`
    targets: Tensor | None
    # int [B], hard labels of the examples before mixing; None if there are no classes
    labels: Tensor | None = None
    mask: Mask = None  # bool [B], valid examples; None if all are
    teacher_logits: tuple[Tensor, ...] = ()  # one [B, K] per live teacher
    # Stored top-k outputs of a teacher, instead of a live one
    sparse_teacher: SparseTeacher | None = None
    # [B, K] of a distillation-token head, in training mode
    student_distill_logits: Tensor | None = None
    # Activations by module path of the student
    student_features: Mapping[str, Tensor] = field(default_factory=dict)
    # Activations by module path of the teacher
    teacher_features: Mapping[str, Tensor] = field(default_factory=dict)
    # [B, K] of a second, strongly augmented view (`mlkd`, `crld`); None without distill.views:
    # weak_strong
    strong_student_logits: Tensor | None = None
    strong_teacher_logits: tuple[Tensor, ...] = ()  # one [B, K] per teacher of that view
    # Outputs for the images' turned copies; None without distill.views: rotations
    turned: Turned | None = None
    example_indices: Tensor | None = None  # int [B], positions in the training split (`crd`)
    # int [B, 1 + N], `example_indices` followed by N negatives, for reference values; in a run
    # `crd` draws them with `noise_key`
    contrast_indices: Tensor | None = None
    # int64 [1], a function of (seed, step) for losses that draw numbers; None is 0, for a step
    # outside a run
    noise_key: Tensor | None = None
    # float [terms], scheduled factors on the weights of the terms, as data
    term_scales: Tensor | None = None
    # float scalar, share of distillation at this step, as data; None if as configured
    alpha: Tensor | None = None
    log_variances: Tensor | None = None  # [B, O], of the predictions of a regression that has them

    def target_classes(self) -> Tensor:
        """Return int [B], the heaviest class of each target: the label, or mixup's larger one."""
        if self.targets is not None:
            return self.targets.argmax(dim=-1)
        assert self.labels is not None
        return self.labels


@dataclass(frozen=True)
class LossOutput:
    """Loss of one step."""

    total: Tensor  # scalar that carries the gradient; float32, or float64 for float64 inputs
    # Detached scalars by name: `task`, each term before its weight, `total`
    terms: dict[str, Tensor]


class Loss(nn.Module):
    """One term: subclasses implement `compute`; `forward` runs it outside autocast.

    Losses with projections make them in `build`; their parameters train with the student and are
    not exported. Losses with memory keep it in buffers.
    """

    # End of the error that refuses the loss for a language model; empty if its value is a mean over
    # any rows of logits, or over windows of any hidden states
    why_not_tokens: str = ""
    needs_strong_view: bool = False  # True if it also compares a second, strongly augmented view
    needs_turned: bool = False  # True if it compares images with their turned copies
    needs_noise: bool = False  # True if it draws with `noise_key`
    # True if outputs may be any numbers; else they must be logits of classes
    takes_numbers: bool = False

    def __init__(self) -> None:  # without it, create_loss would see nn.Module's *args
        super().__init__()

    def student_layers(self) -> tuple[str, ...]:
        """Return the student's module paths whose outputs the loss needs."""
        return ()

    def teacher_layers(self) -> tuple[str, ...]:
        """Return the teacher's module paths whose outputs the loss needs."""
        return ()

    def needs_distill_token(self) -> bool:
        """Return whether the loss reads the logits of a distillation token."""
        return False

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create projections for activations of these shapes (with a batch axis of any size)."""

    def forward(self, inputs: LossInputs) -> Tensor:
        """Compute the scalar; half-precision inputs are computed in float32."""
        with torch.autocast(inputs.student_logits.device.type, enabled=False):
            return self.compute(inputs)

    def compute(self, inputs: LossInputs) -> Tensor:
        """Compute the scalar, with autocast off."""
        raise NotImplementedError


class LogitLoss(Loss):
    """A pure `function` of the logits of the student and of its only teacher.

    Args:
      function: takes both logits, then `mask` and `arguments` by name.
      reduction: `numel` also divides the value by K, `batchmean` does not.
      arguments: attributes too: an ensemble averages at its loss's `temperature`, and a batch
        must be a multiple of every `group_size`.
    """

    def __init__(
        self, function: Callable[..., Tensor], *, reduction: str = "batchmean", **arguments: float
    ) -> None:
        super().__init__()
        self.function = function
        self.reduction = reduction
        self.arguments = arguments
        vars(self).update(arguments)

    def get_student_logits(self, inputs: LossInputs) -> Tensor:
        """Return the logits that learn from the teacher: those of the class head."""
        return inputs.student_logits

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_student_logits(inputs), get_teacher_logits(inputs)
        check_classes(student, teacher)
        value = self.compare(student, teacher, inputs)
        return value / student.shape[-1] if self.reduction == "numel" else value

    def compare(self, student: Tensor, teacher: Tensor, inputs: LossInputs) -> Tensor:
        """Compute the scalar from both [B, K] logits; targets are not used."""
        return self.function(student, teacher, mask=inputs.mask, **self.arguments)


class TargetLoss(LogitLoss):
    """A logit loss whose function takes as its third argument the target classes, too."""

    def compare(self, student: Tensor, teacher: Tensor, inputs: LossInputs) -> Tensor:
        classes = inputs.target_classes()
        return self.function(student, teacher, classes, mask=inputs.mask, **self.arguments)


def get_teacher_logits(inputs: LossInputs) -> Tensor:
    """Return [B, K] of the only teacher, live or stored; a UserError unless exactly one fits."""
    if not inputs.teacher_logits and inputs.sparse_teacher is not None:
        return compute_dense_log_probs(inputs.sparse_teacher, inputs.student_logits.shape[-1])
    if not inputs.teacher_logits:
        raise UserError(
            "distill.losses needs a teacher's logits and the step has none; set distill.teacher"
        )
    if len(inputs.teacher_logits) > 1:
        raise UserError(
            f"distill.losses: this loss takes one teacher and got {len(inputs.teacher_logits)}; "
            "wrap it as multi_avg_prob, multi_avg_logit or multi_avg_loss with args.loss"
        )
    check_classes(inputs.student_logits, inputs.teacher_logits[0])
    return inputs.teacher_logits[0]


def compute_dense_log_probs(teacher: SparseTeacher, num_classes: int) -> Tensor:
    """Return [B, K] log-probabilities, the residual mass spread evenly over the other classes.

    They replace the teacher's logits in every loss that only sees softmax(t / T): with k = K they
    differ from the live teacher by a shift of each row and the storage rounding.

    Source: Wu et al. 2022 (TinyViT), arXiv:2207.10666, section 3.2.
    """
    log_probs = as_constant(teacher.log_probs)
    rest = max(num_classes - log_probs.shape[-1], 1)
    mass = as_constant(teacher.residual).to(log_probs.dtype).clamp(min=MIN_MASS)
    even = (mass / rest).clamp(min=MIN_MASS).log().unsqueeze(-1)
    dense = even.expand(-1, num_classes).contiguous()
    return dense.scatter(-1, teacher.indices.long(), log_probs)


def get_strong_logits(inputs: LossInputs, name: str) -> tuple[Tensor, Tensor]:
    """Return [B, K] of the student and of the only teacher for the strong view.

    A UserError, which names the loss, without such a view or with not exactly one teacher.
    """
    if inputs.strong_student_logits is None:
        raise UserError(
            f"distill.losses: {name} compares two views of a batch, and this run has no second, "
            "strongly augmented one; set distill.views=weak_strong and data.strong_pp"
        )
    if len(inputs.strong_teacher_logits) != 1:
        raise UserError(
            f"distill.losses: {name} got a strong view of the student and "
            f"{len(inputs.strong_teacher_logits)} of teachers; give exactly one"
        )
    check_classes(inputs.strong_student_logits, inputs.strong_teacher_logits[0])
    return inputs.strong_student_logits, inputs.strong_teacher_logits[0]


def check_classes(student_logits: Tensor, teacher_logits: Tensor) -> None:
    """Raise a UserError if the teacher's logits do not have the student's shape."""
    if student_logits.shape != teacher_logits.shape:
        raise UserError(
            f"distill.teacher gives logits {tuple(teacher_logits.shape)} and the student "
            f"{tuple(student_logits.shape)}; a logit loss needs the same classes on both sides"
        )


def get_feature(features: Mapping[str, Tensor], path: str, side: str) -> Tensor:
    """Return the activation at a module path; a UserError names near paths if it is missing."""
    if path not in features:
        raise UserError(
            f"distill.losses: {side} layer {path!r} was not collected; {get_hint(path, features)}"
        )
    return features[path]


def _keep(rows: Tensor) -> Tensor:
    return rows


class RankMemory:
    """Beside `nn.Module`: remembers a step's examples through `gather`, which gives all ranks'."""

    # This rank's rows [B, ...] -> those of all ranks [ranks * B, ...] in their order, without a
    # gradient; of a whole number, too. Alone they are the rank's own
    gather: Callable[[Tensor], Tensor] = staticmethod(_keep)


def join_memories(losses: nn.Module, gather: Callable[[Tensor], Tensor]) -> None:
    """Let what losses remember take the rows of all ranks."""
    for module in losses.modules():
        if isinstance(module, RankMemory):
            module.gather = gather
