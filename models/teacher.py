"""Teachers: frozen, in eval mode for ever, outside everything that a checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.factory import build_model, find_model_name
from models.weights import load_into, load_weights, read_facts
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.sections import DistillSection


class Teacher(nn.Module):
    """A frozen model that answers under `no_grad`.

    `train()` does not change its mode, and its parameters never require a gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Teacher:
        """Stay in eval mode, whatever is asked."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, K] of normalised images [B, C, H, W]."""
        return self.model(images)


def create_teachers(
    section: DistillSection, *, num_classes: int, device: str = "cpu"
) -> list[Teacher]:
    """The teachers of a run; empty without distillation.

    A run directory tells its model and arguments itself, so `distill.teacher` may be empty.

    Args:
      device: "cpu", or "meta" to check names, classes and weights at no cost.

    Raises:
      UserError: unknown model, missing weights, or another number of classes than the student's.
    """
    if not section.teacher and not section.teacher_weights:
        return []
    path = section.teacher_weights
    facts = read_facts(path) if path else {}
    name = section.teacher or facts.get("model", "")
    if not name:
        raise UserError(
            f"distill.teacher_weights ({path!r}) does not say its model; name it by distill.teacher"
        )
    if facts and facts["model"] != name:
        raise UserError(
            f"distill.teacher ({name!r}) is not the model in distill.teacher_weights "
            f"({path!r}), which is {facts['model']!r}; drop distill.teacher"
        )
    _check_classes(facts.get("num_classes"), num_classes, name)
    find_model_name(name, "distill.teacher")
    arguments = {**facts.get("args", {}), **section.teacher_args}
    model = build_model(
        name,
        {**arguments, "num_classes": num_classes},
        pretrained=not path and device != "meta",
        key="distill.teacher",
        device=device,
    )
    if not path:
        return [Teacher(model)]
    tensors = load_weights(path, "distill.teacher_weights")
    _check_head(model, tensors, num_classes, path)
    load_into(model, tensors, "distill.teacher_weights", path)
    return [Teacher(model)]


def _check_classes(teacher_classes: int | None, num_classes: int, name: str) -> None:
    if teacher_classes is not None and teacher_classes != num_classes:
        raise UserError(
            f"distill.teacher {name!r} has {teacher_classes} classes, the student {num_classes}; "
            "use a teacher of the same classes"
        )


def _check_head(model: nn.Module, tensors: dict[str, Tensor], num_classes: int, path: str) -> None:
    """Tell a wrong number of classes apart from a wrong model."""
    for name, value in model.state_dict().items():
        found = tensors.get(name)
        if found is None or found.shape == value.shape or found.ndim == 0 or value.ndim == 0:
            continue
        if value.shape[0] == num_classes and found.shape[1:] == value.shape[1:]:
            _check_classes(found.shape[0], num_classes, path)
