"""The repeated blocks of a model: computed again in the backward pass, or compiled as one loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.errors import UserError

# Wrappers that call a function or a module again in the backward pass.
Recompute = Callable[..., Any]


def find_blocks(model: nn.Module) -> list[nn.Sequential | nn.ModuleList]:
    """The outermost containers that hold two or more blocks of one class with weights."""
    return list(_iterate_blocks(model))


def recompute_blocks(model: nn.Module, recompute: Recompute) -> int:
    """Store only the inputs of each block; what happens inside is computed again.

    Args:
      recompute: function, *args -> its result (`Runtime.checkpoint_block`).

    Returns:
      How many blocks.

    Raises:
      UserError: the model has no repeated blocks.
    """
    blocks = [block for container in find_blocks(model) for block in container]
    if not blocks:
        raise UserError(
            f"train.remat finds no repeated blocks in {type(model).__name__}; leave it out"
        )

    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = MethodType(type(block).forward, block)
        if not block.training:
            return plain(*args, **kwargs)
        return recompute(_update_once(block, plain), *args, **kwargs)

    for block in blocks:
        block.forward = MethodType(forward, block)
    return len(blocks)


def scan_blocks(model: nn.Module, scan: Callable[[Sequence[nn.Module], Tensor], Tensor]) -> int:
    """Run each chain of equal blocks through `scan`.

    A model whose blocks differ, but repeat in groups, offers the chain of them by `group_blocks`.

    Args:
      scan: blocks, input of the first -> output of the last (`Runtime.scan_blocks`).

    Returns:
      How many blocks.

    Raises:
      UserError: the model has no chain of blocks that are equal in shape, or they draw dropout.
    """
    own = getattr(model, "group_blocks", None)
    chains = [own()] if own is not None else find_blocks(model)
    chains = [one for one in chains if isinstance(one, nn.Sequential) and _equal(one)]
    if not chains:
        raise UserError(
            f"train.scan_layers needs a chain of equal blocks, which {type(model).__name__} does "
            "not have; leave it out"
        )
    for chain in chains:
        _check_dropout(chain)
        chain.forward = MethodType(lambda self, inputs: scan(list(self), inputs), chain)
    return sum(len(chain) for chain in chains)


def _update_once(block: nn.Module, forward: Recompute) -> Recompute:
    """The forward of one step, whose second call, in the backward pass, leaves buffers alone."""
    was_called = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal was_called
        if not was_called:
            was_called = True
            return forward(*args, **kwargs)
        with _keep_statistics(block):
            return forward(*args, **kwargs)

    return call


@contextlib.contextmanager
def _keep_statistics(block: nn.Module) -> Iterator[None]:
    """Let BatchNorms update copies of their running statistics, which are then forgotten.

    The buffers themselves must not be written to: the backward pass has saved them.
    """
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    held = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, held, strict=True):
        copies = {n: None if value is None else value.clone() for n, value in buffers.items()}
        norm._buffers.update(copies)
    try:
        yield
    finally:
        for norm, buffers in zip(norms, held, strict=True):
            norm._buffers.update(buffers)


def _iterate_blocks(module: nn.Module) -> Iterator[nn.Sequential | nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList) and _repeats(child):
            yield child
        else:
            yield from _iterate_blocks(child)


def _repeats(container: nn.Sequential | nn.ModuleList) -> bool:
    kinds = {type(block) for block in container}
    has_parts = all(next(block.children(), None) is not None for block in container)
    # Stages repeat as well, but their own blocks are what is worth storing less of.
    return len(container) > 1 and len(kinds) == 1 and has_parts and not _holds_blocks(container)


def _holds_blocks(container: nn.Module) -> bool:
    return any(next(_iterate_blocks(block), None) is not None for block in container)


def _equal(chain: nn.Sequential) -> bool:
    shapes = [{name: v.shape for name, v in block.state_dict().items()} for block in chain]
    return all(one == shapes[0] for one in shapes)


def _check_dropout(chain: nn.Sequential) -> None:
    for name, module in chain.named_modules():
        rate = getattr(module, "drop_prob", getattr(module, "p", 0.0))
        if isinstance(rate, float) and rate > 0:
            raise UserError(
                f"train.scan_layers runs one block's graph for all blocks, but {name} draws "
                f"dropout ({rate:g}); set its rate to 0 or leave train.scan_layers out"
            )
