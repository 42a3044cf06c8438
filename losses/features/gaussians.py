"""Losses that treat an activation as a Gaussian: VID, PAD, WKD-F."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from losses.base import Layers, LossInputs, Shapes
from losses.factory import check_positive
from losses.features.hints import FeatureLoss, ProjectedLoss
from losses.features.maps import get_channels, match_positions
from losses.reductions import Mask, mean_valid, safe_sqrt, sum_terms
from utils.errors import UserError

MIN_VARIANCE = 1e-5  # under the learnt variances of VID
FIRST_VARIANCE = 5.0  # of VID, before the first step


def compute_gaussian_distance(
    student_features: Tensor, teacher_features: Tensor, *, mean_weight: float, eps: float
) -> Tensor:
    """Compute [B] mean_weight * |mu_s - mu_t|^2 + |sigma_s - sigma_t|^2 over channels.

    mu and sigma are a channel's mean and deviation (Bessel's divisor, eps inside the root) over
    its positions, which may differ in number: with mean_weight 1 and eps 0 the squared
    2-Wasserstein distance of two Gaussians with diagonal covariance.

    Source: Lv et al. 2024 (WKD-F), arXiv:2412.08139, section 3.2.
    """
    means: list[Tensor] = []
    deviations: list[Tensor] = []
    for features in (student_features, teacher_features):
        mean = features.mean(dim=-1, keepdim=True)
        squares = (features - mean).square().sum(dim=-1) / (features.shape[-1] - 1)
        means.append(mean.squeeze(-1))
        deviations.append(safe_sqrt(squares + eps))
    gap = mean_weight * (means[0] - means[1]).square()
    return (gap + (deviations[0] - deviations[1]).square()).sum(dim=1)


def split_cells(features: Tensor, grid: int) -> list[Tensor]:
    """Return [B, C, positions] of each cell of a grid on maps, with adaptive pooling's windows."""
    height, width = features.shape[2:]
    rows = [(i * height // grid, -(-(i + 1) * height // grid)) for i in range(grid)]
    columns = [(i * width // grid, -(-(i + 1) * width // grid)) for i in range(grid)]
    return [features[:, :, a:b, c:d].flatten(2) for a, b in rows for c, d in columns]


class WassersteinFeatures(ProjectedLoss):
    """`compute_gaussian_distance` of each pair, averaged over the cells of a grid on the maps.

    `grid` 1 takes all positions as one cell, and tokens too. The student's side is projected if
    shapes differ, without the paper's BatchNorm and ReLU (`regressor: convreg` has them).
    """

    def __init__(
        self,
        layers: Layers,
        mean_weight: float = 1.0,
        grid: int = 1,
        eps: float = 1e-5,
        regressor: str = "auto",
    ) -> None:
        super().__init__(layers, regressor)
        check_positive("wkd_f", mean_weight=mean_weight, grid=grid, eps=eps)
        self.grid = grid
        self.weights = {"mean_weight": mean_weight, "eps": eps}

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        if student.ndim < 3:
            raise UserError(
                f"distill.losses: wkd_f compares spreads over positions, and the layers give "
                f"{tuple(student.shape)}; name maps or tokens, or use fitnet"
            )
        if self.grid == 1:
            cells = [(get_channels(student), get_channels(teacher))]
        else:
            get_channels(student[:, :, 0])  # raises if there is no height and width
            sides = (split_cells(side, self.grid) for side in (student, teacher))
            cells = list(zip(*sides, strict=True))
        if cells[0][0].shape[-1] < 2:
            raise UserError(
                f"distill.losses: wkd_f has one position in a cell of {tuple(student.shape)} and "
                f"grid {self.grid}, which has no deviation; choose a larger map or a smaller grid"
            )
        distances = [compute_gaussian_distance(*cell, **self.weights) for cell in cells]
        return mean_valid(torch.stack(distances).mean(dim=0), mask)


class ChannelGaussian(nn.Module):
    """q(teacher | student): means by three linear layers at each position, a variance a channel."""

    def __init__(self, student: int, teacher: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(student, teacher, bias=False), nn.ReLU()]
        layers += [nn.Linear(teacher, teacher, bias=False), nn.ReLU()]
        self.mean = nn.Sequential(*layers, nn.Linear(teacher, teacher, bias=False))
        raw = math.log(math.expm1(FIRST_VARIANCE - MIN_VARIANCE))
        self.raw_variance = nn.Parameter(torch.full((teacher,), raw))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return [B] negative log-likelihood of [B, P, C] less log(2 pi) / 2, over P and C."""
        variance = nn.functional.softplus(self.raw_variance) + MIN_VARIANCE
        gap = (self.mean(student) - teacher).square()
        return ((gap / variance + variance.log()) / 2).mean(dim=(1, 2))


class VariationalInformation(FeatureLoss):
    """Negative log-likelihood of the teacher's activation given the student's, a Gaussian each.

    The means come from a trained network of three 1x1 layers with ReLU between, the variances are
    one trained number for each channel of the teacher. Averaged over positions and channels (the
    paper sums); the larger map is pooled to the smaller.

    Source: Ahn et al. 2019 (VID), arXiv:1904.05835, equation 6.
    """

    def __init__(self, layers: Layers) -> None:
        super().__init__(layers)
        self.gaussians = nn.ModuleList()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        for _, *pair in self.pair_shapes(student_shapes, teacher_shapes):
            self.gaussians.append(ChannelGaussian(*(get_width(shape) for shape in pair)))

    def compute(self, inputs: LossInputs) -> Tensor:
        terms = []
        for path, gaussian in zip(self.layers, self.gaussians, strict=True):
            pair = self.get_pair(inputs, path)
            pair = match_positions(*(x.unsqueeze(1) if x.ndim == 2 else x for x in pair))
            values = gaussian(*(side.transpose(1, 2) for side in pair))
            terms.append(mean_valid(values, inputs.mask))
        return sum_terms(terms)


class PrimeAware(ProjectedLoss):
    """Squared gaps of vectors, each example weighted by a variance that the student predicts.

    mean over dimensions of (s - t)^2 / (v + eps) + log v, log v a trained linear layer of the
    student's vector, with no gradient stopped. Maps and tokens are averaged over positions first.
    The paper's branch also has BatchNorm, which is left out: an example's weight does not depend
    on its neighbours.

    Source: Zhang et al. 2020 (PAD-L2), arXiv:2008.01458, equation 5.
    """

    def __init__(self, layers: Layers, eps: float = 1e-6, regressor: str = "auto") -> None:
        super().__init__(layers, regressor)
        check_positive("pad", eps=eps)
        self.eps = eps
        self.variances = nn.ModuleList()

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create projections, and a layer of variances for each pair, which starts at v = 1."""
        super().build(pool_shapes(student_shapes), pool_shapes(teacher_shapes))
        for _, *pair in self.pair_shapes(student_shapes, teacher_shapes):
            layer = nn.Linear(get_width(pair[0]), get_width(pair[1]))
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
            self.variances.append(layer)

    def compute(self, inputs: LossInputs) -> Tensor:
        terms = []
        for path, layer in zip(self.layers, self.variances, strict=True):
            student, teacher = (get_vector(x) for x in self.get_raw_pair(inputs, path))
            log_variance = layer(student)
            gap = (self.project(path, student) - teacher).square()
            values = (gap / (log_variance.exp() + self.eps) + log_variance).mean(dim=1)
            terms.append(mean_valid(values, inputs.mask))
        return sum_terms(terms)


def get_width(shape: tuple[int, ...]) -> int:
    """Return the channels of maps, or the width of tokens and vectors."""
    return shape[1] if len(shape) == 4 else shape[-1]


def pool_shapes(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `get_vector` of such activations."""
    return {path: (shape[0], get_width(shape)) for path, shape in shapes.items()}


def get_vector(features: Tensor) -> Tensor:
    """Return [B, C]: the mean over the positions of maps and tokens, or the vector itself."""
    return features if features.ndim == 2 else get_channels(features).mean(dim=-1)
