"""Freezes parameters by patterns over their names."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.errors import UserError
from utils.patterns import check_patterns, matches


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Exclude parameters from gradients, optimizer state and weight decay; count their numbers.

    A BatchNorm whose parameters are all frozen keeps its statistics and normalises by them. Dropout
    and stochastic depth of frozen parts stay as they are. UserError if a pattern matches nothing,
    or nothing is left to train.

    Args:
      patterns: of whole names, such as `blocks.*`.
    """
    named = dict(model.named_parameters())
    check_patterns("optim.freeze", patterns, named)
    frozen = [value for name, value in named.items() if matches(name, patterns)]
    if frozen and len(frozen) == len(named):
        raise UserError(
            f"optim.freeze ({list(patterns)}) leaves nothing to train; leave the head out of it"
        )
    for value in frozen:
        value.requires_grad_(False)
    for module in model.modules():
        own = list(module.parameters(recurse=False)) if isinstance(module, _BatchNorm) else []
        if own and not any(value.requires_grad for value in own):
            module.register_forward_pre_hook(_stay_in_evaluation)
    return sum(value.numel() for value in frozen)


def _stay_in_evaluation(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    module.eval()  # the loop's train() comes before every step
