"""Losses against a memory of earlier examples: CRD, queue KL, ND."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from losses.base import Layers, LossInputs, RankMemory, Shapes
from losses.factory import check_positive
from losses.features.gaussians import get_vector, get_width, pool_shapes
from losses.features.heads import require_one_pair
from losses.features.hints import FeatureLoss, ProjectedLoss, create_projection, get_key
from losses.label_free.embeddings import EmbeddingLoss
from losses.noise import draw_words, get_noise_key
from losses.reductions import Mask, mean_valid, safe_sqrt, sum_terms, unit_rows, upcast
from utils.errors import UserError

# Logit of an empty entry of the queue: its share of a softmax is 0 in float32, without NaN.
_EMPTY = -1e9
MIN_NORM = 1e-12  # under the longer of two embeddings


def compute_scores(embeddings: Tensor, memory_rows: Tensor, temperature: float) -> Tensor:
    """Compute [B, 1 + N] exp(dot / temperature) of each embedding with its rows of the memory.

    Args:
      embeddings: [B, D], unit L2 norm; receives the gradient.
      memory_rows: [B, 1 + N, D], the positive first; constant here.
      temperature: > 0; exp(1 / temperature) must be finite in float32, so at least 0.0115.
    """
    products = (memory_rows.detach() * embeddings.unsqueeze(1)).sum(dim=-1)
    return (products / temperature).exp()


def compute_contrast(scores: Tensor, num_examples: int, *, eps: float, mask: Mask = None) -> Tensor:
    """Compute the noise-contrastive loss of one side, summed over positive and negatives.

    Args:
      scores: [B, 1 + N], divided by the normaliser, the positive first.
      num_examples: rows of the memory; negatives are drawn with probability 1 / num_examples.
      eps: keeps the logarithms finite.

    Source: Tian, Krishnan and Isola 2020 (CRD), arXiv:1910.10699, equation 18, as coded in
    RepDistiller and mdistiller.
    """
    noise = (scores.shape[-1] - 1) / num_examples
    positive = (scores[:, 0] / (scores[:, 0] + noise + eps)).log()
    negatives = (noise / (scores[:, 1:] + noise + eps)).log().sum(dim=-1)
    return mean_valid(-(positive + negatives), mask)


class CRD(RankMemory, FeatureLoss):
    """Embeddings of student and teacher of one pair of layers, each against the other's memory.

    `num_examples` rows are held per side, as buffers; after each step a row moves to
    unit(momentum * row + (1 - momentum) * embedding). `embed_dim` 0 takes the activations as unit
    embeddings, else linear layers and L2 normalisation make them. Each side's normaliser
    Z = num_examples * mean(exp(..)) is estimated on the first step, without gradient, and kept
    (buffers `student_normaliser` and `teacher_normaliser`, -1 before). Rows and normalisers use the
    examples of all ranks. Needs `LossInputs.example_indices`; negatives are drawn by the step's key
    and the example unless `contrast_indices` are given.
    """

    why_not_tokens = "keeps a memory of every example of the split"
    needs_noise = True

    eps = 1e-7  # keeps logarithms finite; from the references, not a key of a run

    student_normaliser: Tensor
    teacher_normaliser: Tensor
    student_memory: Tensor
    teacher_memory: Tensor

    def __init__(
        self,
        layers: Layers,
        num_examples: int,
        embed_dim: int = 128,
        negatives: int = 16384,
        contrast_temperature: float = 0.07,
        momentum: float = 0.5,
    ) -> None:
        super().__init__(layers)
        check_positive(
            "crd",
            num_examples=num_examples,
            negatives=negatives,
            contrast_temperature=contrast_temperature,
        )
        require_one_pair("crd", self)
        self.num_examples = num_examples
        self.embed_dim = embed_dim
        self.negatives = negatives
        self.contrast_temperature = contrast_temperature
        self.momentum = momentum
        self.student_embedding: nn.Module = nn.Identity()
        self.teacher_embedding: nn.Module = nn.Identity()
        self.register_buffer("student_normaliser", torch.tensor(-1.0))
        self.register_buffer("teacher_normaliser", torch.tensor(-1.0))

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create embedding layers, and memories of random rows of about unit length."""
        ((_, *pair),) = self.pair_shapes(student_shapes, teacher_shapes)
        student, teacher = (math.prod(shape[1:]) for shape in pair)
        if self.embed_dim:
            self.student_embedding = UnitEmbedding(student, self.embed_dim)
            self.teacher_embedding = UnitEmbedding(teacher, self.embed_dim)
        for side, width in (("student", student), ("teacher", teacher)):
            width = self.embed_dim or width
            bound = math.sqrt(3 / width)
            rows = torch.empty(self.num_examples, width).uniform_(-bound, bound)
            self.register_buffer(f"{side}_memory", rows)

    def compute(self, inputs: LossInputs) -> Tensor:
        if inputs.example_indices is None:
            raise UserError("distill.losses: crd needs the examples' indices and got none")
        path = next(iter(self.layers))
        student, teacher = (features.flatten(1) for features in self.get_pair(inputs, path))
        student, teacher = self.student_embedding(student), self.teacher_embedding(teacher)
        if inputs.contrast_indices is not None:
            indices = inputs.contrast_indices.long()
        else:
            own = inputs.example_indices.long()
            drawn = draw_words(own, get_noise_key(inputs), self.negatives) % self.num_examples
            indices = torch.cat([own.unsqueeze(1), drawn], dim=1)
        scores = [
            self._score(student, self.teacher_memory, indices),
            self._score(teacher, self.student_memory, indices),
        ]
        self._remember(student, teacher, scores, inputs)
        terms = []
        normalisers = self.student_normaliser, self.teacher_normaliser
        for side, normaliser in zip(scores, normalisers, strict=True):
            ratios = side / torch.where(normaliser > 0, normaliser, torch.ones_like(normaliser))
            value = compute_contrast(ratios, self.num_examples, eps=self.eps, mask=inputs.mask)
            terms.append(value)
        return sum_terms(terms)

    def _score(self, embeddings: Tensor, memory: Tensor, indices: Tensor) -> Tensor:
        rows = memory.index_select(0, indices.reshape(-1)).reshape(*indices.shape, -1)
        return compute_scores(embeddings, rows, self.contrast_temperature)

    @torch.no_grad()
    def _remember(
        self, student: Tensor, teacher: Tensor, scores: Sequence[Tensor], inputs: LossInputs
    ) -> None:
        """Estimate missing normalisers and move the rows, by the examples of all ranks."""
        means = [side.mean(dim=1, keepdim=True) for side in scores]
        mask = torch.ones_like(means[0]) if inputs.mask is None else inputs.mask.unsqueeze(1)
        # Two collectives: indices above 2^24 do not fit into float32.
        rows = self.gather(torch.cat([student, teacher, *means, mask.to(student.dtype)], dim=1))
        assert inputs.example_indices is not None
        indices = self.gather(inputs.example_indices.long())
        widths = [student.shape[1], teacher.shape[1], 1, 1, 1]
        *embeddings, mine, theirs, mask = rows.split(widths, dim=1)
        is_valid = mask[:, 0] > 0
        for stored, mean in ((self.student_normaliser, mine), (self.teacher_normaliser, theirs)):
            estimate = mean_valid(mean[:, 0], is_valid) * self.num_examples
            is_new = (stored < 0) & (estimate > 0)  # none from a batch without valid examples
            stored.copy_(torch.where(is_new, estimate.to(stored.dtype), stored))
        memories = self.student_memory, self.teacher_memory
        for memory, own in zip(memories, embeddings, strict=True):
            before = memory.index_select(0, indices)
            moved = unit_rows(self.momentum * before + (1 - self.momentum) * own)
            memory.index_add_(0, indices, ((moved - before) * mask).to(memory.dtype))


class UnitEmbedding(nn.Module):
    """A linear layer and L2 normalisation."""

    def __init__(self, width: int, embed_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, embed_dim)

    def forward(self, features: Tensor) -> Tensor:
        """Return [B, embed_dim] of unit length."""
        return unit_rows(self.linear(features))


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

    All embeddings have unit length: [B, D] of both sides, and in the queue [Q, D] those of the
    teacher for these and earlier examples; `filled`, bool [Q], marks its entries that hold one,
    None if all do. The temperature divides the cosines; there is no factor T^2.

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
            is_valid = torch.ones_like(teacher[:, :1]) if mask is None else mask[:, None]
            new = self.gather(torch.cat([teacher, is_valid.to(teacher.dtype)], dim=1))
            rows, filled = push_rows(rows, new[:, :-1]), push_rows(filled, new[:, -1] > 0)
        value = compute_queue_kl(student, teacher, rows, self.temperature, filled=filled, mask=mask)
        if self.training:
            self.rows.copy_(rows)
            self.filled.copy_(filled)
        return value


def check_queue(size: int, temperature: float) -> None:
    check_positive("queue_kl", size=size, queue_temperature=temperature)
    if not isinstance(size, int):
        raise UserError(f"distill.losses: queue_kl.size is {size!r}; give a whole number")


class QueueKL(FeatureLoss):
    """`TeacherQueue` of one pair of layers, maps and tokens averaged over their positions.

    If widths differ, a linear layer projects the student's embedding.
    """

    why_not_tokens = "keeps a queue of one embedding for each image"

    def __init__(self, layers: Layers, size: int = 8192, queue_temperature: float = 0.07) -> None:
        super().__init__(layers)
        check_queue(size, queue_temperature)
        require_one_pair("queue_kl", self)
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


def compute_norm_and_direction(
    student: Tensor, teacher: Tensor, directions: Tensor, *, mask: Mask = None
) -> Tensor:
    """Compute 1 - s e / max(|s|, |t|): the student turns to e and grows to the teacher's length.

    Both sides are [B, D], `directions` unit vectors e [B, D] of each example's class. The gradient
    flows through the student's length as well.

    Source: Wang et al. 2023 (KD++), arXiv:2305.17007, section 3, as in its authors' code.
    """
    norms = [safe_sqrt(side.square().sum(dim=-1)) for side in (student, teacher)]
    longest = torch.maximum(*norms).clamp(min=MIN_NORM)
    return mean_valid(1 - (student * directions).sum(dim=-1) / longest, mask)


class NormAndDirection(RankMemory, ProjectedLoss):
    """`compute_norm_and_direction` towards the teacher's mean embedding of each class.

    KD++ is this with `kd`, DKD++ with `dkd`. The paper takes the means over the training set
    beforehand; here they are those of all examples, of all ranks, that the loss has seen before the
    step, sums in a buffer; for a class not seen yet the example's own teacher gives the direction.
    Maps and tokens are averaged over positions first.
    """

    why_not_tokens = "keeps a mean embedding for each class, too many for a vocabulary"
    sums: Tensor

    def __init__(self, layers: Layers, num_classes: int, regressor: str = "auto") -> None:
        super().__init__(layers, regressor)
        require_one_pair("nd", self)
        check_positive("nd", num_classes=num_classes)
        self.num_classes = num_classes

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create a projection between the vectors, and the sums of the teacher's."""
        super().build(pool_shapes(student_shapes), pool_shapes(teacher_shapes))
        width = get_width(teacher_shapes[next(iter(self.layers.values()))])
        self.register_buffer("sums", torch.zeros(self.num_classes, width))

    def compute(self, inputs: LossInputs) -> Tensor:
        (path,) = self.layers
        student, teacher = (get_vector(x) for x in self.get_raw_pair(inputs, path))
        if inputs.student_logits.shape[-1] > self.num_classes:
            raise UserError(
                f"distill.losses: nd.num_classes ({self.num_classes}) is less than the student's "
                f"{inputs.student_logits.shape[-1]} classes; raise it"
            )
        classes = inputs.target_classes().long()
        sums = self.sums.to(teacher.dtype)[classes]
        is_seen = (sums != 0).any(dim=-1, keepdim=True)
        directions = unit_rows(torch.where(is_seen, sums, teacher))
        if torch.is_grad_enabled():
            self.remember(teacher, classes, inputs.mask)
        student = self.project(path, student)
        return compute_norm_and_direction(student, teacher, directions, mask=inputs.mask)

    @torch.no_grad()
    def remember(self, teacher: Tensor, classes: Tensor, mask: Mask) -> None:
        """Add embeddings [B, D], and those of the other ranks, to the sums of their classes."""
        if mask is not None:
            teacher = torch.where(mask.unsqueeze(1), teacher, torch.zeros_like(teacher))
        rows = self.gather(teacher.to(self.sums.dtype))
        self.sums.index_add_(0, self.gather(classes), rows)
