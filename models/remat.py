"""Repeated blocks of a model: recomputed in the backward pass, or compiled as one loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.blocks import find_blocks
from utils.errors import UserError
from utils.torch_types import P, T

# Wrappers that call a function or a module again in the backward pass.
Recompute = Callable[..., Any]


def recompute_blocks(model: nn.Module, recompute: Recompute) -> int:
    """Store only the inputs of each block; return the number of blocks, or raise a UserError.

    Args:
      recompute: function, *args -> its result (`Runtime.checkpoint_block`).
    """
    blocks = [block for container in find_blocks(model) for block in container]
    if not blocks:
        name = type(model).__name__
        raise UserError(f"train.remat finds no repeated blocks in {name}; leave it out")

    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = MethodType(type(block).forward, block)
        if not block.training:
            return plain(*args, **kwargs)
        return recompute(_update_once(block, plain), *args, **kwargs)

    for block in blocks:
        vars(block)["forward"] = MethodType(forward, block)
    return len(blocks)


def scan_blocks(model: nn.Module, scan: Callable[[Sequence[nn.Module], Tensor], Tensor]) -> int:
    """Run each chain of equal blocks through `scan`; return the number of blocks.

    A model whose blocks differ, but repeat in groups, gives the chain of these by `group_blocks`.
    UserError without a chain of blocks that are equal in shape, or if they draw dropout.

    Args:
      scan: blocks, input of the first -> output of the last (`Runtime.scan_blocks`).
    """
    own = getattr(model, "group_blocks", None)
    chains = [own()] if own is not None else find_blocks(model)
    chains = [chain for chain in chains if isinstance(chain, nn.Sequential) and _equal(chain)]
    if not chains:
        raise UserError(
            f"train.scan_layers needs a chain of equal blocks, which {type(model).__name__} does "
            "not have; leave it out"
        )

    def forward(chain: nn.Sequential, inputs: Tensor) -> Tensor:
        return scan(list(chain), inputs)

    for chain in chains:
        _check_dropout(chain)
        vars(chain)["forward"] = MethodType(forward, chain)
    return sum(len(chain) for chain in chains)


def _update_once(block: nn.Module, forward: Callable[P, T]) -> Callable[P, T]:
    """Wrap the forward of one step: its second call, in the backward pass, updates no buffers."""
    was_called = False

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal was_called
        if not was_called:
            was_called = True
            return forward(*args, **kwargs)
        with _keep_statistics(block):
            return forward(*args, **kwargs)

    return call


@contextlib.contextmanager
def _keep_statistics(block: nn.Module) -> Iterator[None]:
    """Discard the next updates of running statistics.

    The buffers themselves must not be written to: the backward pass has saved them.
    """
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, kept, strict=True):
        for name, value in buffers.items():
            norm._buffers[name] = None if value is None else value.clone()
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm._buffers.update(buffers)


def _equal(chain: nn.Sequential) -> bool:
    shapes = [{name: v.shape for name, v in block.state_dict().items()} for block in chain]
    return all(shape == shapes[0] for shape in shapes)


def _check_dropout(chain: nn.Sequential) -> None:
    for name, module in chain.named_modules():
        rate = getattr(module, "drop_prob", getattr(module, "p", 0.0))
        if isinstance(rate, float) and rate > 0:
            raise UserError(
                f"train.scan_layers runs one block's graph for all blocks, but {name} draws "
                f"dropout ({rate:g}); set its rate to 0 or leave train.scan_layers out"
            )
