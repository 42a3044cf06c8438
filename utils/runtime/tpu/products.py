"""Products of tensors with several dimensions, for programs of TorchTPU.

TorchTPU itself has products of matrices with one batch dimension. PyTorch takes `einsum` apart into
those, with dimensions of size 1 between them, for which the compiler copies and pads: a step of
ViT-S/16 costs 1.6 times as much. So `einsum` of two tensors becomes an operation of its own, whose
StableHLO is given to TorchTPU as that of a kernel; the compiler sees one `dot_general`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from utils.torch_types import Ctx, DifferentiationRule

_LETTERS = "ABCDEFGHIJ"  # of the dimensions that `...` stands for
_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_PRECISIONS = {"medium": "DEFAULT", "high": "HIGH", "highest": "HIGHEST"}
_NAME = "product"


@contextlib.contextmanager
def use_general_products() -> Iterator[None]:
    """Let `torch.einsum` of two tensors be one product, backward passes included."""
    einsum = torch.einsum

    def compute(equation: str, *operands: Any) -> Tensor:
        operands = cast_by_autocast(operands)
        terms = find_product(equation, operands)
        return (
            einsum(equation, *operands) if terms is None else _EinsumProduct.apply(*operands, terms)
        )

    # No mode of PyTorch's: those leave a backward pass out.
    torch.einsum = cast("Any", compute)
    try:
        yield
    finally:
        torch.einsum = einsum


def cast_by_autocast(operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Cast operands as `torch.autocast` does for `einsum`; it does not know this operation."""
    kind = operands[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tuple(operands)
    dtype = torch.get_autocast_dtype(kind)
    return tuple(o.to(dtype) if o.dtype in _TYPES else o for o in operands)


def find_product(equation: str, operands: Sequence[Tensor]) -> tuple[str, str, str] | None:
    """Return the dimensions of left, right and result, or None for what is no such product."""
    if len(operands) != 2 or any(operand.dtype not in _TYPES for operand in operands):
        return None
    left, right = operands
    terms, _, of_result = equation.replace(" ", "").partition("->")
    of_left, _, of_right = terms.partition(",")
    if "..." in of_left:
        hidden = _LETTERS[: left.dim() - len(of_left) + 3]
        of_left, of_result = (term.replace("...", hidden) for term in (of_left, of_result))
    dimensions = of_left, of_right, of_result
    if any("." in term or len(set(term)) < len(term) for term in dimensions):
        return None
    outside = set(of_left) ^ set(of_right)
    sizes = dict(zip(of_right, right.shape, strict=True))
    same = all(sizes.get(name, n) == n for name, n in zip(of_left, left.shape, strict=True))
    known = outside <= set(of_result) <= set(of_left + of_right)
    return dimensions if same and known and left.dtype == right.dtype else None


class _EinsumProduct(DifferentiationRule):
    """A product and its derivatives, each of them a product again."""

    @staticmethod
    def forward(ctx: Ctx, left: Tensor, right: Tensor, terms: tuple[str, str, str]) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.terms = terms
        return get_operation()(left, right, *terms)

    @staticmethod
    def backward(ctx: Ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        of_left, of_right, of_result = ctx.terms
        multiply, needs = get_operation(), ctx.needs_input_grad
        dleft = multiply(gradient, right, of_result, of_right, of_left) if needs[0] else None
        dright = multiply(gradient, left, of_result, of_left, of_right) if needs[1] else None
        return dleft, dright, None


@functools.cache
def get_operation() -> torch._ops.OpOverload:
    """Define the operation: left, right, their dimensions and those of the result."""
    terms = "str of_left, str of_right, str of_result"
    torch.library.define(
        "tpu_products::multiply", f"(Tensor left, Tensor right, {terms}) -> Tensor"
    )
    torch.library.register_fake("tpu_products::multiply", _create_result)
    torch.library.impl("tpu_products::multiply", "PrivateUse1", _multiply)
    torch.library.impl("tpu_products::multiply", "CPU", _compute_plainly)
    return torch.ops.tpu_products.multiply.default


def _compute_plainly(left: Tensor, right: Tensor, *terms: str) -> Tensor:
    return torch.functional.einsum("{},{}->{}".format(*terms), left, right).contiguous()


def _create_result(left: Tensor, right: Tensor, *terms: str) -> Tensor:
    sizes = dict(zip(terms[0] + terms[1], left.shape + right.shape, strict=True))
    return left.new_empty([sizes[name] for name in terms[2]])


def _multiply(left: Tensor, right: Tensor, *terms: str) -> Tensor:
    from torch_tpu._internal.pallas import tpu_torch_pallas

    result = _create_result(left, right, *terms)
    precision = _PRECISIONS[torch.get_float32_matmul_precision()]
    text = write_product(left.shape, right.shape, terms, _TYPES[left.dtype], precision)
    key = hashlib.sha256(text.encode()).hexdigest()
    if not tpu_torch_pallas.lookup_custom_kernel(_NAME, key):
        tpu_torch_pallas.register_custom_kernel(_NAME, key, serialized_mlir_module=text.encode())
    return tpu_torch_pallas.call_custom_kernel(
        _NAME,
        key,
        inputs=[left, right],
        output_shapes=[result],
        donate_argnums=[],
        device_assignment=[],
    )[0]


def write_product(
    left: Sequence[int], right: Sequence[int], terms: Sequence[str], dtype: str, precision: str
) -> str:
    """Write a product as a module of StableHLO: a `dot_general`, and a transposition if needed."""
    of_left, of_right, of_result = terms
    sizes = dict(zip(of_left + of_right, (*left, *right), strict=True))
    shared = [name for name in of_left if name in of_right]
    batch = [name for name in of_result if name in shared]
    inner = [name for name in shared if name not in of_result]
    order = batch + [name for term in terms[:2] for name in term if name not in shared]

    def shape(names: Sequence[str]) -> str:
        return f"tensor<{''.join(f'{sizes[name]}x' for name in names)}{dtype}>"

    def pair(names: Sequence[str]) -> str:
        return " x ".join(str([term.index(name) for name in names]) for term in terms[:2])

    result, product = shape(of_result), shape(order)
    return f"""module @{_NAME} {{
  func.func public @main(%left: {shape(of_left)}, %right: {shape(of_right)}) -> {result} {{
    %product = stablehlo.dot_general %left, %right, batching_dims = {pair(batch)},
        contracting_dims = {pair(inner)}, precision = [{precision}, {precision}]
        : ({shape(of_left)}, {shape(of_right)}) -> {product}
    %turned = stablehlo.transpose %product, dims = {[order.index(name) for name in of_result]}
        : ({product}) -> {result}
    return %turned : {result}
  }}
}}
"""
