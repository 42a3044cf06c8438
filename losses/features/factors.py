"""Losses on factors of an activation: FT, which first trains a paraphraser."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from losses.base import LossInputs, Shapes
from losses.factory import check_positive, is_count
from losses.features.heads import require_one_pair
from losses.features.hints import FeatureLoss, match_sizes
from losses.reductions import mean_valid, unit_rows
from utils.errors import UserError

LEAK = 0.1  # of all its ReLUs


def create_coder(kind: type[nn.Module], inward: int, outward: int) -> nn.Sequential:
    """Create three 3x3 convolutions, each with a leaky ReLU: C -> C -> F -> F channels.

    `kind` is `nn.Conv2d` for an encoder and `nn.ConvTranspose2d` for a decoder.
    """
    layers: list[nn.Module] = []
    for pair in ((inward, inward), (inward, outward), (outward, outward)):
        layers += [kind(*pair, kernel_size=3, padding=1), nn.LeakyReLU(LEAK)]
    return nn.Sequential(*layers)


def compute_factor_gap(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute [B] sum of |gaps| of two factors [B, ...], each of unit L2 norm."""
    return (unit_rows(student.flatten(1)) - unit_rows(teacher.flatten(1))).abs().sum(dim=1)


class FactorTransfer(FeatureLoss):
    """Gap of the student's factor to the teacher's, which a paraphraser finds without labels.

    The paraphraser encodes the teacher's maps to `rate` times their channels and decodes them; its
    mean squared error is part of the value and trains nothing else. A translator, an encoder of
    the same form, makes the student's factor; its `compute_factor_gap` to the teacher's counts from
    call `paraphrase_steps` on, so that at first the paraphraser trains alone while the student has
    the other terms. It goes on learning afterwards, while the paper fixes it. Calls are counted in
    a buffer. The larger map is pooled to the smaller. One pair of maps.

    Source: Kim et al. 2018 (FT), arXiv:1802.04977, section 3, p = 1; without the BatchNorm that
    some implementations add.
    """

    why_not_tokens = "paraphrases maps of an image"

    def __init__(self, layers: Mapping[str, str], paraphrase_steps: int, rate: float = 0.5) -> None:
        super().__init__(layers)
        require_one_pair("ft", self)
        check_positive("ft", rate=rate)
        if not is_count(paraphrase_steps):
            raise UserError(
                f"distill.losses: ft.paraphrase_steps is {paraphrase_steps!r}; give a whole number "
                "of 0 or more, the steps that train only its paraphraser"
            )
        self.paraphrase_steps, self.rate = paraphrase_steps, rate
        self.register_buffer("calls", torch.zeros(1))

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        ((_, *shapes),) = self.pair_shapes(student_shapes, teacher_shapes)
        if any(len(shape) != 4 for shape in shapes):
            raise UserError(
                f"distill.losses: ft paraphrases maps and got {tuple(shapes[0])} and "
                f"{tuple(shapes[1])}; name layers whose outputs are [B, C, H, W]"
            )
        width = shapes[1][1]
        factor = max(1, round(width * self.rate))
        self.encoder = create_coder(nn.Conv2d, width, factor)
        self.decoder = create_coder(nn.ConvTranspose2d, factor, width)
        self.translator = create_coder(nn.Conv2d, shapes[0][1], factor)

    def compute(self, inputs: LossInputs) -> Tensor:
        student, teacher = self.get_pair(inputs, next(iter(self.layers)))
        student, teacher = match_sizes(student, teacher)
        factor = self.encoder(teacher)
        lost = (self.decoder(factor) - teacher).square().flatten(1).mean(dim=1)
        gap = compute_factor_gap(self.translator(student), factor.detach())
        counts = (self.calls >= self.paraphrase_steps).to(gap.dtype)
        if torch.is_grad_enabled():
            self.calls.add_(1.0)
        return mean_valid(lost + counts * gap, inputs.mask)
