"""Losses that rebuild the teacher's activation, or a factor of it: MGD, ViTKD, FT."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from losses.base import Layers, LossInputs, Shapes
from losses.factory import check_positive, check_steps, is_number
from losses.features.heads import require_one_pair
from losses.features.hints import FeatureLoss, ProjectedLoss, get_key, match_sizes
from losses.noise import draw_for
from losses.reductions import mean_valid, sum_terms, unit_rows
from utils.errors import UserError

LEAK = 0.1  # of all its ReLUs


class MaskedGeneration(ProjectedLoss):
    """Squared gaps of the teacher's maps and those rebuilt from the student's masked maps.

    Each position of an example is set to 0 in all channels with probability `mask_ratio`, a
    function of (seed, step, example); then a 3x3 convolution, ReLU and another one, trained with
    the student, rebuild the teacher's maps. Summed over the elements of an example, so that the
    term's weight is small, 7e-5 in the paper.

    Source: Yang et al. 2022 (MGD), arXiv:2205.01529, equations 2 to 5.
    """

    why_not_tokens = "rebuilds maps of an image"
    needs_noise = True

    def __init__(self, layers: Layers, mask_ratio: float = 0.5, regressor: str = "auto") -> None:
        super().__init__(layers, regressor)
        check_ratio("mgd", mask_ratio)
        self.mask_ratio = mask_ratio
        self.generations = nn.ModuleList()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        super().build(student_shapes, teacher_shapes)
        for path in self.layers.values():
            if len(teacher_shapes[path]) != 4:
                raise UserError(
                    f"distill.losses: mgd rebuilds maps and teacher layer {path!r} gives "
                    f"{tuple(teacher_shapes[path])}; name a layer whose output is [B, C, H, W]"
                )
            width = teacher_shapes[path][1]
            self.generations.append(create_generation(width))

    def compute(self, inputs: LossInputs) -> Tensor:
        terms = []
        for path, generation in zip(self.layers, self.generations, strict=True):
            student, teacher = self.get_pair(inputs, path)
            if self.mask_ratio:
                drawn = draw_for(inputs, student[0, 0].numel(), "mgd")
                drawn = drawn.unflatten(1, student.shape[2:]).unsqueeze(1)
                student = student * (drawn >= self.mask_ratio).to(student.dtype)
            gap = (generation(student) - teacher).square().flatten(1).sum(dim=1)
            terms.append(mean_valid(gap, inputs.mask))
        return sum_terms(terms)


class TransformerGuidelines(FeatureLoss):
    """Gaps to a ViT teacher's first blocks, and to its last one, rebuilt from masked tokens.

    All entries of `layers` but the last: low_weight * the sum of (W s - t)^2 over the patches. The
    last: a trained token replaces exactly the share `mask_ratio` of W s in each example, a function
    of (seed, step, example); a 3x3 convolution, ReLU and another one rebuild the teacher's grid,
    and high_weight / mask_ratio * the sum of squares over the masked positions is added. W is a
    linear layer if widths differ.

    Args:
      layers: blocks, from the first ones to the last.
      mask_ratio: above 0.
      prefix_tokens: class and distillation tokens before the patches, which are left out.

    Source: Yang et al. 2022 (ViTKD), arXiv:2209.02432, section 3, with the weights of its authors'
    code.
    """

    why_not_tokens = "rebuilds a grid of patches"
    needs_noise = True

    def __init__(
        self,
        layers: Layers,
        mask_ratio: float = 0.5,
        low_weight: float = 3e-5,
        high_weight: float = 3e-6,
        prefix_tokens: int = 1,
    ) -> None:
        super().__init__(layers)
        check_ratio("vitkd", mask_ratio)
        check_positive("vitkd", mask_ratio=mask_ratio)
        if len(self.layers) < 2:
            raise UserError(
                "distill.losses: vitkd needs two or more pairs of layers: the first blocks and the "
                "last one; name them in args.layers, or use fitnet"
            )
        self.mask_ratio, self.prefix_tokens = mask_ratio, prefix_tokens
        self.weights = low_weight, high_weight

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create linear layers if widths differ, the mask token and the convolutions."""
        for path, student, teacher in self.pair_shapes(student_shapes, teacher_shapes):
            patches = student[1] - self.prefix_tokens
            is_grid = len(student) == 3 and patches > 0 and math.isqrt(patches) ** 2 == patches
            if not is_grid or student[:2] != teacher[:2] or len(teacher) != 3:
                raise UserError(
                    f"distill.losses: vitkd cannot compare {tuple(student)} with {tuple(teacher)} "
                    f"behind {self.prefix_tokens} tokens; name blocks with the same square grid of "
                    "patches, and set prefix_tokens to the class tokens before it"
                )
            if student[2] != teacher[2]:
                self.projections[get_key(path)] = nn.Linear(student[2], teacher[2])
        width = teacher[2]
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.generation = create_generation(width)

    def compute(self, inputs: LossInputs) -> Tensor:
        *low, high = [
            [side[:, self.prefix_tokens :] for side in self.get_pair(inputs, path)]
            for path in self.layers
        ]
        gaps = [(s - t).square().flatten(1).sum(dim=1) for s, t in low]
        student, teacher = high
        is_masked = self.draw_masked(inputs, student.shape[1]).unsqueeze(-1)
        seen = torch.where(is_masked, self.mask_token.to(student.dtype), student)
        side = math.isqrt(student.shape[1])
        rebuilt = self.generation(seen.transpose(1, 2).unflatten(2, (side, side)))
        gap = (rebuilt.flatten(2).transpose(1, 2) - teacher).square() * is_masked.to(teacher.dtype)
        lost = gap.flatten(1).sum(dim=1) / self.mask_ratio
        return mean_valid(self.weights[0] * sum(gaps) + self.weights[1] * lost, inputs.mask)

    def draw_masked(self, inputs: LossInputs, count: int) -> Tensor:
        """Return bool [B, count]; all but the int(count * (1 - mask_ratio)) lowest are masked."""
        drawn = draw_for(inputs, count, "vitkd")
        kept = int(count * (1 - self.mask_ratio))
        if not kept:
            return torch.ones_like(drawn, dtype=torch.bool)
        highest = drawn.topk(kept, dim=1, largest=False).values.amax(dim=1, keepdim=True)
        return drawn > highest


def create_generation(width: int) -> nn.Sequential:
    """Create two 3x3 convolutions with ReLU between them."""
    convolutions = [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
    return nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1])


def check_ratio(name: str, value: float) -> None:
    """Raise a UserError for a share of masked positions that leaves none."""
    if not is_number(value) or not 0 <= value < 1:
        raise UserError(f"distill.losses: {name}.mask_ratio is {value!r}; give 0 <= value < 1")


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

    def __init__(self, layers: Layers, paraphrase_steps: int, rate: float = 0.5) -> None:
        super().__init__(layers)
        require_one_pair("ft", self)
        check_positive("ft", rate=rate)
        check_steps("ft", "train only its paraphraser", paraphrase_steps=paraphrase_steps)
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
