"""Losses on activations: FitNet hints, attention transfer, ReviewKD's hierarchical context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from losses.base import Layers, Loss, LossInputs, Shapes, get_feature
from losses.factory import check_choice, check_positive
from losses.reductions import Mask, as_constant, mean_valid, safe_sqrt, sum_terms, unit_rows, upcast
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject

REGRESSORS = ("auto", "none", "conv1x1", "convreg", "linear")

Shape = tuple[int, ...]
HCL_LEVELS = (4, 2, 1)


class ConvRegressor(nn.Module):
    """Convolution with bias, BatchNorm on batch statistics, ReLU.

    BatchNorm keeps no running statistics: the module runs in training only.
    Source: Romero et al. 2015, arXiv:1412.6550, as coded in mdistiller.
    """

    def __init__(self, convolution: nn.Module, channels: int) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = nn.BatchNorm2d(channels, track_running_stats=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return [B, C, H, W] of the teacher's shape."""
        return self.norm(self.convolution(features)).relu()


def create_projection(
    student: Shape, teacher: Shape, regressor: str, **convolution: int | None
) -> nn.Module | None:
    """Create the projection between two activation shapes with a batch axis; None if not needed.

    Args:
      student, teacher: [B, C, H, W], [B, N, D] or [B, D].
      regressor: one of REGRESSORS.
      convolution: `kernel_size`, `stride`, `padding` of `convreg`; None is derived from the shapes.

    Raises:
      UserError: the shapes do not fit the regressor.
    """
    kind = _choose(student, teacher) if regressor == "auto" else regressor
    fits = {
        "none": student[1:] == teacher[1:],
        "conv1x1": len(student) == len(teacher) == 4 and student[2:] == teacher[2:],
        "convreg": len(student) == len(teacher) == 4,
        "linear": len(student) == len(teacher) and student[1:-1] == teacher[1:-1],
    }
    if not fits[kind]:
        usable = [name for name, is_usable in fits.items() if is_usable]
        ways = f"use {' or '.join(usable)}" if usable else "choose layers of like shapes"
        raise UserError(
            f"distill.losses: regressor {kind} cannot turn {student} into {teacher}; {ways}"
        )
    if kind == "none":
        return None
    if kind == "linear":
        return nn.Linear(student[-1], teacher[-1], bias=False)
    if kind == "conv1x1":
        return nn.Conv2d(student[1], teacher[1], kernel_size=1, bias=False)
    return ConvRegressor(_create_convolution(student, teacher, convolution), teacher[1])


def _choose(student: Shape, teacher: Shape) -> str:
    if student[1:] == teacher[1:]:
        return "none"
    if len(student) == 4:
        return "conv1x1" if student[2:] == teacher[2:] else "convreg"
    return "linear"


def _create_convolution(student: Shape, teacher: Shape, given: dict[str, int | None]) -> nn.Module:
    """Halve by a stride, double by a transposed convolution, else shrink by the kernel's size."""
    side, target = student[2], teacher[2]
    layer: type[nn.Module] = nn.Conv2d
    if side == 2 * target:
        derived: JsonObject = {"kernel_size": 3, "stride": 2, "padding": 1}
    elif 2 * side == target:
        derived = {"kernel_size": 4, "stride": 2, "padding": 1}
        layer = nn.ConvTranspose2d
    elif side >= target:
        derived = {"kernel_size": 1 + side - target, "stride": 1, "padding": 0}
    else:
        raise UserError(
            f"distill.losses: convreg cannot turn maps of {side} pixels into {target}; "
            "choose a student layer at least as large, or half as large"
        )
    derived |= {key: value for key, value in given.items() if value is not None}
    return layer(student[1], teacher[1], **derived)


def compute_feature_mse(
    student_features: Tensor, teacher_features: Tensor, *, mask: Mask = None
) -> Tensor:
    """Compute the mean squared difference of two activations [B, ...].

    Source: Romero et al. 2015 (FitNets), arXiv:1412.6550, equation 3, as a mean and without 1/2.
    """
    difference = upcast(student_features) - as_constant(teacher_features)
    return mean_valid(difference.square().flatten(1).mean(dim=1), mask)


def match_sizes(student: Tensor, teacher: Tensor) -> list[Tensor]:
    """Average the larger of two maps [B, C, H, W] to the smaller along each axis."""
    sizes = [min(pair) for pair in zip(student.shape[2:], teacher.shape[2:], strict=True)]
    return [
        side if list(side.shape[2:]) == sizes else pool_adaptive(side, *sizes)
        for side in (student, teacher)
    ]


def pool_adaptive(values: Tensor, height: int, width: int) -> Tensor:
    """Average [B, C, H, W] to [B, C, height, width]; torch's windows, lowered by XLA at any size.

    nn.AdaptiveAvgPool2d runs on the CPU if H is not a multiple of the output.
    """
    return _pool_axis(_pool_axis(values, height).transpose(-1, -2), width).transpose(-1, -2)


def _pool_axis(values: Tensor, count: int) -> Tensor:
    """Average windows of the second-last axis."""
    size = values.shape[-2]
    if size % count == 0:
        return values.unflatten(-2, (count, size // count)).mean(dim=-2)
    windows = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
    return torch.stack([values[..., a:b, :].mean(dim=-2) for a, b in windows], dim=-2)


def compute_attention(features: Tensor, power: int) -> Tensor:
    """Compute [B, positions] channel mean of features^power, scaled to unit L2 norm.

    Features are [B, C, H, W], or [B, N, C] of tokens; an even power, as there is no absolute value.
    """
    channels = -1 if features.ndim == 3 else 1
    return unit_rows(features.pow(power).mean(dim=channels).flatten(1))


def compute_attention_gaps(
    student_features: Tensor, teacher_features: Tensor, power: int
) -> Tensor:
    """Compute [B, positions] gaps of attention maps, the larger map pooled to the smaller."""
    student, teacher = upcast(student_features), as_constant(teacher_features)
    is_mixed = student.ndim == 4 and teacher.ndim != 4
    if min(student.ndim, teacher.ndim) < 3 or is_mixed:
        raise UserError(
            f"distill.losses: attention maps need positions on both sides, and the layers give "
            f"{tuple(student.shape)} and {tuple(teacher.shape)}; name maps or tokens, or use fitnet"
        )
    if student.ndim == 4:
        if student.shape[-2] > teacher.shape[-2]:
            student = pool_adaptive(student, *teacher.shape[-2:])
        elif student.shape[-2] < teacher.shape[-2]:
            teacher = pool_adaptive(teacher, *student.shape[-2:])
    maps = compute_attention(student, power), compute_attention(teacher, power)
    if maps[0].shape != maps[1].shape:
        raise UserError(
            f"distill.losses: attention maps of {tuple(student.shape)} and {tuple(teacher.shape)} "
            "differ in positions; choose layers with the same number of tokens"
        )
    return maps[0] - maps[1]


def compute_hcl(student_features: Tensor, teacher_features: Tensor, *, mask: Mask = None) -> Tensor:
    """Compute the hierarchical context loss of one stage: MSE at full size and on averages.

    Averages are of side 4, 2 and 1 if below h. The result is the weighted mean of the levels' mean
    squared differences, with weights 1, then 1/2, 1/4, ...

    Source: Chen et al. 2021 (ReviewKD), arXiv:2104.09044, section 3.3; with the fusion modules
    (ABF) it is `reviewkd`.
    """
    student, teacher = upcast(student_features), as_constant(teacher_features)
    total = compute_feature_mse(student, teacher, mask=mask)
    weight, weights = 1.0, 1.0
    for level in HCL_LEVELS:
        if level >= student.shape[-2]:
            continue
        weight /= 2
        weights += weight
        pooled = pool_adaptive(student, level, level), pool_adaptive(teacher, level, level)
        total = total + weight * compute_feature_mse(*pooled, mask=mask)
    return total / weights


def get_student_features(inputs: LossInputs, *paths: str) -> list[Tensor]:
    """Return upcast activations or parameters of the student."""
    return [upcast(get_feature(inputs.student_features, path, "student")) for path in paths]


def get_teacher_features(inputs: LossInputs, *paths: str) -> list[Tensor]:
    """Return upcast constants of the teacher."""
    return [as_constant(get_feature(inputs.teacher_features, path, "teacher")) for path in paths]


class FeatureLoss(Loss):
    """A sum over pairs of layers; `layers` maps student module paths to teacher module paths."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        if not isinstance(layers, Mapping) or not layers:
            raise UserError(
                f"distill.losses: args.layers is {layers!r}; give student paths and the teacher "
                "paths they learn from, as in {blocks.3: blocks.5}"
            )
        self.layers = dict(layers)
        self.projections = nn.ModuleDict()

    def student_layers(self) -> tuple[str, ...]:
        return tuple(self.layers)

    def teacher_layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.layers.values()))

    def get_raw_pair(self, inputs: LossInputs, student_path: str) -> tuple[Tensor, Tensor]:
        """Return upcast activations of one pair."""
        (student,) = get_student_features(inputs, student_path)
        (teacher,) = get_teacher_features(inputs, self.layers[student_path])
        return student, teacher

    def project(self, student_path: str, student: Tensor) -> Tensor:
        """Return an activation of the student after its projection, if it has one."""
        key = get_key(student_path)
        return self.projections[key](student) if key in self.projections else student

    def get_pair(self, inputs: LossInputs, student_path: str) -> tuple[Tensor, Tensor]:
        """Return upcast activations of one pair, the student's after its projection."""
        student, teacher = self.get_raw_pair(inputs, student_path)
        return self.project(student_path, student), teacher

    def pair_shapes(
        self, student_shapes: Shapes, teacher_shapes: Shapes
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Yield the student's path and both shapes of each pair."""
        for path, teacher_path in self.layers.items():
            yield path, student_shapes[path], teacher_shapes[teacher_path]

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        """Compute the scalar of one pair of activations."""
        raise NotImplementedError

    def compute(self, inputs: LossInputs) -> Tensor:
        pairs = [self.get_pair(inputs, path) for path in self.layers]
        return sum_terms(self.compute_pair(*pair, inputs.mask) for pair in pairs)


class ProjectedLoss(FeatureLoss):
    """A feature loss that needs the same shape on both sides and projects the student's to it."""

    def __init__(
        self,
        layers: Layers,
        regressor: str = "auto",
        kernel: int | None = None,
        stride: int | None = None,
        padding: int | None = None,
    ) -> None:
        super().__init__(layers)
        check_choice("args", "regressor", regressor, REGRESSORS)
        self.regressor = regressor
        self.convolution = {"kernel_size": kernel, "stride": stride, "padding": padding}

    def build(self, student_shapes: Shapes, teacher_shapes: Shapes) -> None:
        """Create a projection for each pair of unequal shapes, of the form in `regressor`."""
        for student_path, teacher_path in self.layers.items():
            shapes: list[tuple[int, ...]] = []
            for side, path, known in (
                ("student", student_path, student_shapes),
                ("teacher", teacher_path, teacher_shapes),
            ):
                if path not in known:
                    raise UserError(
                        f"distill.losses: the {side} has no layer {path!r}; {get_hint(path, known)}"
                    )
                shapes.append(tuple(known[path]))
            student, teacher = shapes
            projection = create_projection(student, teacher, self.regressor, **self.convolution)
            if projection is not None:
                self.projections[get_key(student_path)] = projection


class FitNet(ProjectedLoss):
    """`compute_feature_mse` of each pair, the student's side projected if shapes differ.

    `regressor`: `none`; `conv1x1` without bias (OFAKD); `convreg`: convolution, BatchNorm on the
    batch's own statistics (masked examples included), ReLU (mdistiller); `linear` for tokens and
    vectors; `auto` chooses by the shapes. `kernel`, `stride` and `padding` override the values that
    `convreg` derives from the shapes.
    """

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        return compute_feature_mse(student, teacher, mask=mask)


class HCL(ProjectedLoss):
    """`compute_hcl` of each pair, the student's side projected if shapes differ."""

    why_not_tokens = "pools maps of an image at several sizes"

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        return compute_hcl(student, teacher, mask=mask)


class AttentionTransfer(FeatureLoss):
    """Mean squared difference of unit attention maps, averaged over positions.

    The paper's and torchdistill's norm is `at_paper`. mdistiller is followed; its weight of 1000
    is the term's weight here. The result is small: 1 / positions of a squared norm below 4.

    Source: Zagoruyko and Komodakis 2017, arXiv:1612.03928, equation 2.
    """

    def __init__(self, layers: Layers, power: int = 2) -> None:
        super().__init__(layers)
        check_positive("at", power=power)
        self.power = power

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        gaps = compute_attention_gaps(student, teacher, self.power)
        return mean_valid(gaps.square().mean(dim=1), mask)


class PaperAttentionTransfer(AttentionTransfer):
    """Norm, not squared, of the same difference, with gradient 0 where the maps are equal."""

    def compute_pair(self, student: Tensor, teacher: Tensor, mask: Mask) -> Tensor:
        gaps = compute_attention_gaps(student, teacher, self.power)
        return mean_valid(safe_sqrt(gaps.square().sum(dim=1)), mask)


def get_key(path: str) -> str:
    """Return a module path as a key of nn.ModuleDict, which allows no dots."""
    return path.replace(".", "/")
