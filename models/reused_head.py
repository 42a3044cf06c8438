"""SimKD's student: a backbone, a projector, and the frozen classifier of a teacher."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.table import MODELS
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonValue

SIMKD = "simkd"
PROJECTED = "projector"  # the layer whose output is compared with the teacher's maps


class ReusedClassifier(nn.Module):
    """A student with the classifier of its teacher.

    The backbone's last maps go through a projector (1x1 convolution to `width` / `factor` channels,
    3x3, 1x1 to `width`, each with BatchNorm and ReLU), are averaged over positions and go into the
    frozen head, which is random until `adopt` or weights fill it.

    Args:
      student: name of the backbone, of timm or models/, that gives maps [B, C, H, W].
      width: channels of the teacher's last maps.
      side: of the teacher's maps in positions; larger maps of the backbone are averaged to it,
        which must divide theirs. None if the backbone's are no larger.
      factor: the projector's inner width is `width` / `factor`.
      of_student: further arguments of the backbone.

    Source: Chen et al. 2022 (SimKD), arXiv:2203.14001, the projector as in its authors' code.
    """

    def __init__(
        self,
        student: str,
        width: int,
        num_classes: int = 1000,
        *,
        side: int | None = None,
        factor: int = 2,
        **of_student: JsonValue,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise UserError("model.name 'simkd' needs a task with classes; use the backbone's name")
        if not isinstance(factor, int) or not isinstance(width, int) or not 0 < factor <= width:
            raise UserError(
                f"model.args of simkd: width ({width!r}) and factor ({factor!r}) must be whole "
                "numbers above 0, factor at most width; set width to what the teacher's classifier "
                "takes"
            )
        self.backbone = create_backbone(student, of_student)
        self.num_classes, self.num_features, self.side = num_classes, width, side
        inner = width // factor
        self.projector = nn.Sequential(
            *_create_layer(self.backbone.num_features, inner, 1),
            *_create_layer(inner, inner, 3),
            *_create_layer(inner, width, 1),
        )
        self.head = nn.Linear(width, num_classes).requires_grad_(False)

    def adopt(self, weight: Tensor, bias: Tensor | None) -> None:
        """Copy the weights of a classifier, [num_classes, width] and [num_classes]."""
        with torch.no_grad():
            self.head.weight.copy_(weight)
            self.head.bias.copy_(torch.zeros_like(self.head.bias) if bias is None else bias)

    def forward_features(self, images: Tensor) -> Tensor:
        """[B, width, H, W], to be compared with the teacher's maps."""
        maps = self.backbone.forward_features(images)
        if maps.ndim != 4:
            raise UserError(
                f"model.name 'simkd' projects maps, and its backbone gives {tuple(maps.shape)}; "
                "name a convolutional one in model.args.student"
            )
        (height, width), side = maps.shape[-2:], self.side
        if side is not None and width > side:
            if width % side or height % side:
                raise UserError(
                    f"model.args.side ({side}) does not divide the backbone's maps of "
                    f"{height} x {width}; choose a divisor, or another side of images"
                )
            maps = functional.avg_pool2d(maps, (height // side, width // side))
        return self.projector(maps)

    def forward_head(self, maps: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of projected maps, or the vectors [B, width] before them."""
        vectors = maps.mean(dim=(2, 3))
        return vectors if pre_logits else self.head(vectors)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes]."""
        return self.forward_head(self.forward_features(images))

    def get_classifier(self) -> nn.Module:
        return self.head


def create_backbone(name: str, arguments: JsonMapping) -> Any:
    """Create a model without its classifier; UserError if it is unknown or has no maps."""
    if name in MODELS:
        backbone = MODELS.get(name)(num_classes=0, **arguments)
    elif timm.is_model(name):
        backbone = timm.create_model(name, num_classes=0, **arguments)
    else:
        raise UserError(
            f"model.args.student {name!r} is no model of timm or of models/; see timm.list_models()"
        )
    if not hasattr(backbone, "forward_features") or not hasattr(backbone, "num_features"):
        raise UserError(
            f"model.args.student {name!r} does not give its maps apart from its logits; use a "
            "convolutional model of timm, or cifar_resnet8x4"
        )
    return backbone


def _create_layer(inward: int, outward: int, kernel: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inward, outward, kernel, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outward), nn.ReLU()
