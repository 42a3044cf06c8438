"""Embeddings against a queue of the teacher's earlier ones, which replace classes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from losses.base import LossInputs, Shapes
from losses.factory import check_positive
from losses.features.gaussians import get_vector, get_width
from losses.features.hints import FeatureLoss, get_key
from losses.features.projections import create_projection
from losses.label_free.embeddings import EmbeddingLoss
from losses.memories import RankMemory
from losses.reductions import Mask, mean_valid, unit_rows, upcast
from utils.errors import UserError

# Logit of an empty entry of the queue: its share of a softmax is 0 in float32, without NaN.
_EMPTY = -1e9


def compute_queue_kl(
    student: Tensor,
    teacher: Tensor,
    queue: Tensor,
    temperature: float,
    *,
    filled: Tensor | None = None,
    mask: Mask = None,
) -> Tensor:
    """Compute KL(teacher || student) of the softmax of an embedding's cosines to a queue.

    All embeddings have unit length.

    Args:
      student: [B, D]; receives the gradient.
      teacher: [B, D]; constant here.
      queue: [Q, D]: the teacher's embeddings of these and earlier examples.
      temperature: > 0, divides the cosines; there is no factor T^2.
      filled: bool [Q], entries that hold an embedding; None if all do.

    Source: lightly-train's distillation v1 and v3 as their documentation describes them.
    """
    rows = queue.detach()
    cosines = [upcast(student) @ rows.T, upcast(teacher.detach()) @ rows.T]
    logits = [side / temperature for side in cosines]
    if filled is not None:
        logits = [torch.where(filled, side, torch.full_like(side, _EMPTY)) for side in logits]
    student_logs, teacher_logs = (side.log_softmax(dim=-1) for side in logits)
    divergence = teacher_logs.exp() * (teacher_logs - student_logs)
    return mean_valid(divergence.sum(dim=-1), mask)


def push_rows(queue: Tensor, rows: Tensor) -> Tensor:
    """Put `rows` in front of the queue and drop as many of its oldest; the shape stays."""
    return torch.cat([rows.to(queue.dtype), queue])[: queue.shape[0]]


class TeacherQueue(RankMemory, nn.Module):
    """The newest `size` embeddings of a teacher, and the loss against them.

    Both buffers have a static size. In training, embeddings of a step enter before they are
    compared, of all ranks in the order of the global batch: every rank holds the same, and the
    number of ranks changes nothing.
    """

    def __init__(self, size: int, width: int, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.register_buffer("rows", torch.zeros(size, width))
        self.register_buffer("filled", torch.zeros(size, dtype=torch.bool))

    def forward(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        """Compute `compute_queue_kl` of vectors [B, width] of any length."""
        student, teacher = unit_rows(student), unit_rows(teacher)
        rows, filled = self.rows, self.filled
        if self.training:
            rows, filled = self._push(teacher, mask)
        value = compute_queue_kl(student, teacher, rows, self.temperature, filled=filled, mask=mask)
        if self.training:
            self.rows.copy_(rows)
            self.filled.copy_(filled)
        return value

    def _push(self, teacher: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        is_valid = torch.ones_like(teacher[:, :1]) if mask is None else mask[:, None]
        new = self.gather(torch.cat([teacher, is_valid.to(teacher.dtype)], dim=1))
        return push_rows(self.rows, new[:, :-1]), push_rows(self.filled, new[:, -1] > 0)


def check_queue(size: int, temperature: float) -> None:
    check_positive("queue_kl", size=size, queue_temperature=temperature)
    if not isinstance(size, int):
        raise UserError(f"distill.losses: queue_kl.size is {size!r}; give a whole number")


class QueueKL(FeatureLoss):
    """`TeacherQueue` of one pair of layers, maps and tokens averaged over their positions.

    If widths differ, a linear layer projects the student's embedding.
    """

    why_not_tokens = "keeps a queue of one embedding for each image"

    def __init__(
        self, layers: Mapping[str, str], size: int = 8192, queue_temperature: float = 0.07
    ) -> None:
        super().__init__(layers)
        check_queue(size, queue_temperature)
        if len(layers) != 1:
            raise UserError(
                f"distill.losses: queue_kl takes one pair of layers and got {len(layers)}; write a "
                "term for each pair"
            )
        self.size, self.queue_temperature = size, queue_temperature

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        ((path, *pair),) = self.pair_shapes(student_shapes, teacher_shapes)
        own, width = map(get_width, pair)
        projection = create_projection((1, own), (1, width), "auto")
        if projection is not None:
            self.projections[get_key(path)] = projection
        self.memory = TeacherQueue(self.size, width, self.queue_temperature)

    def compute(self, inputs: LossInputs) -> Tensor:
        path = next(iter(self.layers))
        student, teacher = (get_vector(side) for side in self.get_raw_pair(inputs, path))
        return self.memory(self.project(path, student), teacher, inputs.mask)


class QueueTerm(EmbeddingLoss):
    """`TeacherQueue` of pooled features; patches are averaged first."""

    def __init__(self, size: int = 8192, queue_temperature: float = 0.07) -> None:
        super().__init__()
        check_queue(size, queue_temperature)
        self.size, self.queue_temperature = size, queue_temperature

    def build(self, width: int, patches: int) -> None:
        self.memory = TeacherQueue(self.size, width, self.queue_temperature)

    def compute(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        return self.memory(get_vector(student), get_vector(teacher), mask)
