"""Products of tensors in the form that TorchTPU lowers best.

PyTorch takes `einsum` apart into products of matrices with dimensions of size 1 between them, for
which the compiler copies and pads: a step of ViT-S/16 costs more than twice as much.
"""

from __future__ import annotations

import contextlib
import math
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

_LETTERS = "ABCDEFGHIJ"  # of the dimensions that `...` stands for


@contextlib.contextmanager
def use_matrix_products() -> Iterator[None]:
    """Let `torch.einsum` of two tensors be one product of matrices, backward passes included."""
    einsum = torch.einsum

    def compute(equation: str, *operands: Tensor) -> Tensor:
        product = multiply(equation, *operands) if len(operands) == 2 else None
        return einsum(equation, *operands) if product is None else product

    # No mode of PyTorch's: those leave a backward pass out.
    with unittest.mock.patch.object(torch, "einsum", compute):
        yield


def merges_batches(value: Tensor) -> bool:
    """Return whether products of a batch of two dimensions do better with one on this device.

    TorchTPU has products of matrices with one; between a product and what follows it, two of them
    would be split again, and the compiler does not compute both at once.
    """
    return value.device.type == "tpu"


def multiply(equation: str, left: Tensor, right: Tensor) -> Tensor | None:
    """Compute einsum of two tensors, or return None if it is not a product of matrices."""
    terms, _, of_result = equation.replace(" ", "").partition("->")
    of_left, _, of_right = terms.partition(",")
    if "..." in of_left:
        hidden = _LETTERS[: left.dim() - len(of_left) + 3]
        of_left, of_result = (term.replace("...", hidden) for term in (of_left, of_result))
    names = of_left, of_right, of_result
    if any("." in term or len(set(term)) < len(term) for term in names):
        return None
    shared = [name for name in of_left if name in of_right]
    batch = [name for name in shared if name in of_result]
    inner = [name for name in shared if name not in of_result]
    rows, columns = ([n for n in of_result if n in term and n not in batch] for term in names[:2])
    if len(of_left + of_right) != 2 * len(shared) + len(rows + columns):
        return None
    if rows and columns and of_result.index(columns[0]) < of_result.index(rows[0]):
        return multiply(f"{of_right},{of_left}->{of_result}", right, left)
    sizes = dict(zip(of_left + of_right, left.shape + right.shape, strict=True))
    for merged in (inner, rows, columns):
        # Tiles have 8 rows: merging (197, 128) moves nothing in memory, (128, 197) does.
        merged.sort(key=lambda name: sizes[name] % 8 == 0)
    product = torch.matmul(
        _flatten(left, of_left, (batch, rows, inner), sizes),
        _flatten(right, of_right, (batch, inner, columns), sizes),
    )
    order = [*batch, *rows, *columns]
    shaped = product.reshape([sizes[name] for name in order])
    return shaped.permute([order.index(name) for name in of_result])


def _flatten(
    value: Tensor, names: str, groups: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> Tensor:
    """Reshape to one dimension for each group; the first group, a batch, may be empty."""
    order = [names.index(name) for group in groups for name in group]
    shape = [math.prod(sizes[name] for name in group) for group in groups]
    return value.permute(order).reshape(shape if groups[0] else shape[1:])
