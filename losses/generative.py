"""Losses that rebuild the teacher's activation from a part of the student's: MGD."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from losses.base import LOSSES, LossInputs, Shapes
from losses.features import ProjectedLoss
from losses.reductions import mean_valid
from utils.errors import UserError


@LOSSES.register("mgd")
class MaskedGeneration(ProjectedLoss):
    """Squared gaps of the teacher's maps and what two convolutions make of masked ones.

    Each position of an example is set to 0 with probability `mask_ratio`, all channels at once, by
    the device's generator, which a run seeds by its step and rank; then a 3x3 convolution, ReLU
    and another one, trained with the student, rebuild the teacher's maps. Summed over the elements
    of an example, averaged over valid examples: the term's weight is small, 7e-5 in the paper.

    Source: Yang et al. 2022 (MGD), arXiv:2205.01529, equations 2 to 5.
    """

    why_not_tokens = "rebuilds maps of an image"

    def __init__(
        self, layers: Mapping[str, str], mask_ratio: float = 0.5, regressor: str = "auto"
    ) -> None:
        super().__init__(layers, regressor)
        is_number = isinstance(mask_ratio, int | float) and not isinstance(mask_ratio, bool)
        if not is_number or not 0 <= mask_ratio < 1:
            raise UserError(
                f"distill.losses: mgd.mask_ratio is {mask_ratio!r}; give 0 <= value < 1"
            )
        self.mask_ratio = mask_ratio
        self.generations = nn.ModuleList()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Projections, and a pair of convolutions for each pair of layers."""
        super().build(student_shapes, teacher_shapes)
        for path in self.layers.values():
            if len(teacher_shapes[path]) != 4:
                raise UserError(
                    f"distill.losses: mgd rebuilds maps and teacher layer {path!r} gives "
                    f"{tuple(teacher_shapes[path])}; name a layer whose output is [B, C, H, W]"
                )
            width = teacher_shapes[path][1]
            convolutions = [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
            self.generations.append(nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1]))

    def compute(self, inputs: LossInputs) -> Tensor:
        """Sum over the pairs."""
        total = 0
        for path, generation in zip(self.layers, self.generations, strict=True):
            student, teacher = self.get_pair(inputs, path)
            if self.mask_ratio:
                drawn = torch.rand_like(student[:, :1])
                student = student * (drawn >= self.mask_ratio).to(student.dtype)
            gap = (generation(student) - teacher).square().flatten(1).sum(dim=1)
            total = total + mean_valid(gap, inputs.mask)
        return total
