"""Projections from a student's activation to a teacher's shape, trained with the student."""

from __future__ import annotations

from torch import Tensor, nn

from utils.errors import UserError

REGRESSORS = ("auto", "none", "conv1x1", "convreg", "linear")

Shape = tuple[int, ...]


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
    layer = nn.Conv2d
    if side == 2 * target:
        derived = {"kernel_size": 3, "stride": 2, "padding": 1}
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
