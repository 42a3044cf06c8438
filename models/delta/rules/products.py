"""Products of float32 matrices by as many parts of bfloat16 as an option says.

A TPU's matrix unit multiplies bfloat16, and PyTorch/XLA's precision of float32 products is one for
a whole process. Here factors are cut into numbers of 8 bits that add up to them, whose products no
unit rounds, and the products that matter are summed in float32: the same numbers on every device.
Gates, their sums, inverses and states stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Parts of a factor; 0: products of float32 as the device computes them.
PRODUCTS = {"auto": 0, "bfloat16": 1, "bfloat16x3": 2, "bfloat16x6": 3}

# c - (c - x) with c = (2^16 + 1) x is x rounded to 8 bits. XLA removes a cast to bfloat16 and back,
# but keeps this.
_CUT = 65537.0


def multiply(x: Tensor, y: Tensor, products: str) -> Tensor:
    """Return x @ y by the parts that `products` names; float64 is multiplied as it is."""
    x, y = widen(x), widen(y)
    depth = PRODUCTS[products]
    if not depth or x.dtype != torch.float32:
        return x @ y
    lefts, rights = _split(x, depth), _split(y, depth)
    # The smallest first, so that the sum loses least.
    order = sorted(((i, j) for i in range(depth) for j in range(depth - i)), key=sum)[::-1]
    terms = [lefts[i] @ rights[j] for i, j in order]
    return sum(terms[1:], terms[0])


def add_marked(x: Tensor, marks: Tensor) -> Tensor:
    """Return x @ marks of zeros and ones; float32 keeps all digits, however a device rounds."""
    if x.dtype != torch.float32:
        return x @ marks.to(x.dtype)
    first, second, third = (part @ marks.to(x.dtype) for part in _split(x, 3))
    return third + second + first


def narrow(factors: Sequence[Tensor], products: str) -> list[Tensor]:
    """Return factors as they are stored until they are multiplied: one part is half as wide."""
    if products != "bfloat16" or factors[0].dtype != torch.float32:
        return list(factors)
    return [x.to(torch.bfloat16) for x in factors]


def widen(x: Tensor) -> Tensor:
    """Return the result of `narrow` as float32."""
    return x.to(torch.float32) if x.dtype == torch.bfloat16 else x


def _split(x: Tensor, depth: int) -> list[Tensor]:
    parts = []
    for _ in range(depth):
        scaled = x * _CUT
        parts.append(scaled - (scaled - x))
        x = x - parts[-1]
    return parts


def turn(x: Tensor) -> Tensor:
    """Return the transposed matrices."""
    return x.transpose(-1, -2)
