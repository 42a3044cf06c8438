"""NORM's student: two linear layers widen and narrow its last maps in training.

They act on each position alone and are followed by an average and a linear classifier, so exports
merge them into the classifier: `utils.weights.adapters.merge_adapters`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.log import get_logger
from utils.weights.adapters import WIDENED
from utils.weights.fitting import list_head_names

# Layers that may stand between the maps and the classifier's sum over channels.
_PLAIN = ("AdaptiveAvgPool2d", "Flatten", "Identity", "Dropout", "Linear")
_POOLS = ("SelectAdaptivePool2d", "FastAdaptiveAvgPool", "AdaptiveAvgPool2d")
_POOL_PATHS = ("global_pool", "head.global_pool", "pool.0")


class Widened(nn.Module):
    """`contract(expand(maps)) + maps`: two 1x1 convolutions, each with BatchNorm, no activation.

    The last scale starts at 0: outputs are at first those of the model without it.

    Args:
      channels: of the maps.
      wide: channels between the two, `copies` times the teacher's.

    Source: Liu et al. 2023 (NORM), arXiv:2305.13803, the shortcut and BatchNorm as in its authors'
    code.
    """

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.expand = _create_linear(channels, wide)
        self.contract = _create_linear(wide, channels)
        nn.init.zeros_(self.contract.get_parameter("1.weight"))

    def forward(self, maps: Tensor) -> Tensor:
        """[B, C, H, W]."""
        return self.contract(self.expand(maps)) + maps


def widen(model: nn.Module, width: int, copies: int) -> None:
    """Add a `Widened` before the pooling of a convolutional model, whose class stays.

    It is a child of the pooling layer, named by the classifier that it becomes part of. Its initial
    values come from PyTorch's generator. UserError if the model does not end in an average over
    positions and a linear layer.

    Args:
      width: channels of the teacher's maps.
      copies: N of the paper.
    """
    names = {name.rpartition(".")[0] for name in list_head_names(model)}
    modules = dict(model.named_modules(remove_duplicate=False))
    pools = [modules[path] for path in _POOL_PATHS if path in modules]
    head = modules[next(iter(names))] if len(names) == 1 else None
    if not pools or not isinstance(head, nn.Linear) or not _is_plain(model, head.in_features):
        raise UserError(
            f"model.norm_width ({width}) widens the last maps of a network that averages them and "
            "answers by one linear layer, which model.name does not; leave it out or choose "
            "another, such as resnet18"
        )
    channels = head.in_features
    with torch.device(head.weight.device):
        layer = Widened(channels, copies * width)
    pools[0].add_module(f"{WIDENED}{next(iter(names)).replace('.', '/')}", layer)
    pools[0].register_forward_pre_hook(_widen_maps)
    text = "model.norm_width: %d channels become %d x %d and %d again"
    get_logger().info(text, channels, copies, width, channels)


def _widen_maps(pool: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Apply the layer among a pool's children, so that copies of a model use their own."""
    layer = next(child for name, child in pool.named_children() if name.startswith(WIDENED))
    return (layer(inputs[0]), *inputs[1:])


def _is_plain(model: Any, channels: int) -> bool:
    """Return whether the classifier is linear in the average over positions of the last maps."""
    if not hasattr(model, "forward_head"):
        return False
    parameter = next(model.parameters())
    seen: list[str] = []

    def note(module: nn.Module, _inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        seen.append(type(module).__name__)

    hooks = [
        module.register_forward_hook(note)
        for module in model.modules()
        if not list(module.children()) or type(module).__name__ in _POOLS
    ]
    training = model.training
    try:
        with torch.no_grad():
            maps = torch.zeros((2, channels, 2, 3), device=parameter.device, dtype=parameter.dtype)
            model.eval().forward_head(maps)
    except (RuntimeError, TypeError):
        return False
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return all(name in (*_PLAIN, *_POOLS) for name in seen)


def _create_linear(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inward, outward, 1, bias=False), nn.BatchNorm2d(outward))
