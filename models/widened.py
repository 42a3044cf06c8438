"""NORM's student: two linear layers widen and narrow its last maps while it trains.

They act on each position alone and are followed by an average and a linear classifier, so an export
has them as part of its classifier: `utils.weights.adapters.merge_adapters`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.log import get_logger
from utils.weights.adapters import WIDENED
from utils.weights.fitting import list_head_names

# What may stand between the maps and the classifier's sum over channels.
_PLAIN = ("AdaptiveAvgPool2d", "Flatten", "Identity", "Dropout", "Linear")
_POOLS = ("SelectAdaptivePool2d", "FastAdaptiveAvgPool", "AdaptiveAvgPool2d")


class Widened(nn.Module):
    """`contract(expand(maps)) + maps`: two 1x1 convolutions, each with BatchNorm, no activation.

    The last scale starts at 0, so that a model answers at first as it does without.

    Args:
      channels: of the maps.
      wide: of what `expand` makes, `copies` times the teacher's channels.

    Source: Liu et al. 2023 (NORM), arXiv:2305.13803, the shortcut and BatchNorm as in its authors'
    code.
    """

    def __init__(self, channels: int, wide: int) -> None:
        super().__init__()
        self.expand = _create_linear(channels, wide)
        self.contract = _create_linear(wide, channels)
        nn.init.zeros_(self.contract[1].weight)

    def forward(self, maps: Tensor) -> Tensor:
        """[B, C, H, W]."""
        return self.contract(self.expand(maps)) + maps


def widen(model: nn.Module, width: int, copies: int) -> None:
    """Put a `Widened` before the pooling of a convolutional model, whose class stays.

    It is a child of the pooling layer, named by the classifier that it becomes part of. Its initial
    values come from PyTorch's generator.

    Args:
      width: channels of the teacher's maps.
      copies: N of the paper.

    Raises:
      UserError: the model does not end in an average over positions and a linear layer.
    """
    heads = {name.rpartition(".")[0] for name in list_head_names(model)}
    pool = _find_pool(model)
    head = model.get_submodule(next(iter(heads))) if len(heads) == 1 else None
    if pool is None or not isinstance(head, nn.Linear) or not _is_plain(model, head.in_features):
        raise UserError(
            f"model.norm_width ({width}) widens the last maps of a network that averages them and "
            "answers by one linear layer, which model.name does not; leave it out or choose "
            "another, such as resnet18"
        )
    device = head.weight.device
    with torch.device(device):
        added = Widened(head.in_features, copies * width)
    (name,) = heads
    pool.add_module(f"{WIDENED}{name.replace('.', '/')}", added)
    pool.register_forward_pre_hook(_widen_maps)
    get_logger().info(
        "model.norm_width: %d channels become %d x %d and %d again", head.in_features, copies,
        width, head.in_features,
    )  # fmt: skip


def _widen_maps(pool: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook without a state of its own: copies of a model have copies of the layers."""
    layer = next(one for name, one in pool.named_children() if name.startswith(WIDENED))
    return (layer(given[0]), *given[1:])


def _find_pool(model: nn.Module) -> nn.Module | None:
    """The module that averages the last maps."""
    for path in ("global_pool", "head.global_pool", "pool.0"):
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    return None


def _is_plain(model: nn.Module, channels: int) -> bool:
    """Whether the classifier is linear in the average over positions of maps of so many channels.

    Told by what answers are, for maps and for what is averaged of them.
    """
    if not hasattr(model, "forward_head"):
        return False
    parameter = next(model.parameters())
    seen: list[str] = []
    hooks = [
        one.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        for one in model.modules()
        if not list(one.children()) or type(one).__name__ in _POOLS
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
