"""Losses on the logits of parts of an image: SDD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from losses.base import LossInputs
from losses.factory import check_positive, is_count
from losses.features.heads import ClassifierMaps
from losses.features.hints import pool_adaptive
from losses.logits.kd import kl_per_example
from losses.reductions import mean_valid
from utils.errors import UserError


def compute_local_logits(
    maps: Tensor, weight: Tensor, bias: Tensor, scales: Sequence[int]
) -> Tensor:
    """Compute [B, cells, K] logits of a classifier on the averages of cells, scale after scale.

    Args:
      maps: [B, C, H, W], the maps that are averaged before the classifier.
      weight: [K, C] of the classifier; bias: [K].
      scales: cells along a side; scale 1 gives the logits of the whole image.
    """
    pooled = torch.cat([pool_adaptive(maps, side, side).flatten(2) for side in scales], dim=-1)
    return pooled.transpose(1, 2) @ weight.T + bias


class ScaleDecoupled(ClassifierMaps):
    """KL of the softened logits of each cell of each scale, averaged over all cells, times T^2.

    A cell counts `complement_weight` times if the teacher is right about the cell and wrong about
    the whole image, or the other way round.

    Source: Wei et al. 2024 (SDD), arXiv:2403.13512, section 3, with the mean over cells of the
    authors' code; of the losses that it can extend, this is `kd`.
    """

    loss_name = "sdd"
    head_keys = ("weight", "bias")

    def __init__(
        self,
        layers: Mapping[str, str],
        student_head: str,
        teacher_head: str,
        temperature: float = 4.0,
        scales: Sequence[int] = (1, 2, 4),
        complement_weight: float = 2.0,
    ) -> None:
        super().__init__(layers, student_head, teacher_head)
        check_positive("sdd", temperature=temperature, complement_weight=complement_weight)
        is_list = isinstance(scales, Sequence) and len(scales) > 0 and scales[0] == 1
        if not is_list or not all(is_count(side, 1) for side in scales):
            raise UserError(
                f"distill.losses: sdd.scales is {scales!r}; give cells along a side, whole numbers "
                "that begin with 1, the whole image"
            )
        self.temperature, self.scales = temperature, tuple(scales)
        self.complement_weight = complement_weight

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_sides(inputs)
        logs = [torch.log_softmax(side / self.temperature, dim=-1) for side in (teacher, student)]
        divergence = kl_per_example(*logs)
        is_right = teacher.argmax(dim=-1) == inputs.target_classes().unsqueeze(1)
        is_complement = (is_right != is_right[:, :1]).to(divergence.dtype)
        weights = 1 + (self.complement_weight - 1) * is_complement
        return self.temperature**2 * mean_valid((weights * divergence).mean(dim=1), inputs.mask)

    def apply_head(self, maps: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return [B, cells, K] of all scales; a UserError if maps have too few cells."""
        if min(maps.shape[2:]) < max(self.scales):
            raise UserError(
                f"distill.losses: sdd.scales {list(self.scales)} ask for more cells than maps of "
                f"{tuple(maps.shape[2:])} have; leave the finer ones out"
            )
        return compute_local_logits(maps, weight, bias, self.scales)
