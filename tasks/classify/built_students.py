"""Students that are built for their teacher: model and loss of SimKD and of NORM belong together.

SimKD's student gets its classifier from its teacher before the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from models.features import FeatureTap
from models.reused_head import PROJECTED, SIMKD, ReusedClassifier
from models.teachers.teacher import Teacher, create_teachers
from utils.errors import UserError
from utils.log import get_logger

if TYPE_CHECKING:
    from losses.weighted import WeightedLoss
    from models.transforms import InputTransform
    from utils.config.load import RunConfig

# Largest difference from the teacher's logits that is a rounding error, as a share of the largest.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def check_reused(config: RunConfig, losses: WeightedLoss) -> None:
    """Refuse SimKD's or NORM's student without its loss, and the loss without that student."""
    _check_widened(config, losses)
    term = _find_term(losses)
    is_reused = config.model.name == SIMKD
    if is_reused and config.run.eval_only:
        return
    if is_reused and term is None:
        raise UserError(
            "model.name 'simkd' needs its loss in distill.losses; add {name: simkd, layers: "
            "{projector: layer4}, args: {teacher_head: fc}}"
        )
    if term is not None and not is_reused:
        raise UserError(
            f"distill.losses: simkd is not supported with model.name {config.model.name!r}; set "
            "model.name=simkd and model.args to {student: NAME, width: N}, or use fitnet"
        )
    if term is not None and PROJECTED not in term.layers:
        raise UserError(
            f"distill.losses: simkd compares layer {PROJECTED!r} of its student and args.layers "
            f"names {next(iter(term.layers))!r}; write {{{PROJECTED}: TEACHER_LAYER}}"
        )
    if is_reused and config.model.pretrained:
        raise UserError("model.pretrained has no weights for model.name 'simkd'; remove it")
    for key in ("head_init_scale", "head_init_bias"):
        if is_reused and getattr(config.model, key) is not None:
            raise UserError(
                f"model.{key} ({getattr(config.model, key):g}) is not supported with simkd, which "
                "copies its teacher's classifier; remove it"
            )


def _check_widened(config: RunConfig, losses: WeightedLoss) -> None:
    width, has_term = config.model.norm_width, _find_term(losses, "norm") is not None
    if width is not None and not has_term and not config.run.eval_only:
        raise UserError(
            f"model.norm_width ({width}) needs a loss on the widened maps; add "
            "{name: norm, layers: {global_pool.norm_to_fc.expand: layer4}}, or remove it"
        )
    if has_term and width is None:
        raise UserError(
            "distill.losses: norm needs model.norm_width; set "
            "model.norm_width to the channels of the teacher's layer, or use fitnet"
        )


def reuse_classifier(
    config: RunConfig,
    student: nn.Module,
    losses: WeightedLoss,
    transform: InputTransform,
    image_shape: tuple[int, int, int],
    class_names: tuple[str, ...] | None,
) -> None:
    """Copy the first teacher's classifier into a student of SimKD; do nothing for others.

    `transform` and `class_names` (None if unknown) are the student's; `image_shape` is (H, W, C) in
    training. The classifier is tried on the averaged maps of the layer that the loss names.
    UserError if it does not give the teacher's logits: the student would learn something else.
    """
    term = _find_term(losses)
    if term is None or not isinstance(student, ReusedClassifier):
        return
    state = torch.random.get_rng_state()
    teacher = create_teachers(
        config.distill,
        num_classes=student.num_classes,
        class_names=class_names,
        student_transform=transform,
    )[0]
    torch.random.set_rng_state(state)
    weight = teacher.model.get_parameter(f"{term.teacher_head}.weight").detach()
    bias = getattr(teacher.model.get_submodule(term.teacher_head), "bias", None)
    _require_averages(teacher, term, (weight, bias), image_shape)
    if teacher.classes is not None:
        weight = weight[teacher.classes]
        bias = bias if bias is None else bias[teacher.classes]
    student.adopt(weight, bias)
    get_logger().info("simkd: the student uses the teacher's %s", term.teacher_head)


@torch.no_grad()
def _require_averages(
    teacher: Teacher,
    term: Any,
    head: tuple[Tensor, Tensor | None],
    image_shape: tuple[int, int, int],
) -> None:
    height, width, channels = image_shape
    (path,) = term.layers.values()
    tap = FeatureTap(teacher.model, (path,), "teacher")
    numbers = torch.Generator().manual_seed(0)
    pixels = 255 * torch.rand((2, channels, height, width), generator=numbers)
    logits = teacher.model(teacher.transform(pixels).to(teacher.dtype)).float()
    vectors = tap.take()[path].float().mean(dim=(2, 3))
    weight, bias = head
    expected = vectors @ weight.float().T + (0 if bias is None else bias.float())
    gap, scale = (expected - logits).abs().max(), logits.abs().max().clamp(min=1e-6)
    if not gap <= _TOLERANCES.get(teacher.dtype, 1e-3) * scale:
        raise UserError(
            f"distill.losses: simkd.teacher_head ({term.teacher_head}) on the averages of {path!r} "
            f"does not give the teacher's logits (they differ by {float(gap / scale):.2g} of "
            "the largest); name the last maps before the pooling, of a teacher that ends with an "
            "average pooling and one linear layer"
        )


def _find_term(losses: WeightedLoss, wanted: str = SIMKD) -> Any:
    named = zip(losses.names, losses.losses, strict=True)
    return next((loss for name, loss in named if name == wanted), None)
