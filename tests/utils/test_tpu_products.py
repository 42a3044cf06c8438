"""Products that TorchTPU's programs are made of: einsum of two tensors as one operation."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from utils.runtime.tpu.products import find_product, use_general_products, write_product

EQUATIONS = (
    ("bhdk,bhkq->bhdq", (2, 3, 4, 5), (2, 3, 5, 6)),
    ("bhdk,bhdq->bhkq", (2, 3, 4, 5), (2, 3, 4, 6)),
    ("bnc,thdc->tbhdn", (2, 5, 7), (3, 2, 4, 7)),
    ("bhdn,bnc->hdc", (2, 3, 4, 5), (2, 5, 7)),
    ("...dn,de->...en", (2, 3, 4, 5), (4, 6)),
    ("ed,bhdn->bhen", (4, 4), (2, 3, 4, 5)),
    ("bhgdq,bhgkq->bhdk", (2, 3, 2, 4, 5), (2, 3, 2, 6, 5)),
    ("bchpwq,ocpq->bhwo", (2, 3, 4, 5, 6, 7), (8, 3, 5, 7)),
    ("ab,cd->dacb", (2, 3), (4, 5)),
)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor

    def map(self, function):
        return Pair(function(self.left), function(self.right))


class Nothing(NamedTuple):
    nothing: None = None


def create_tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def compute(equation, tensors):
    """Return a product and its two gradients."""
    own = [tensor.detach().requires_grad_() for tensor in tensors]
    product = torch.einsum(equation, *own)
    return product, *torch.autograd.grad(product.square().sum(), own)


def assert_equal_up_to_rounding(value, exact):
    """Up to the rounding of float32 sums of a few hundred terms, relative to the largest value."""
    assert value.shape == exact.shape
    assert (value.cpu().double() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize(("equation", "left", "right"), EQUATIONS)
def test_a_product_and_its_gradients_are_those_of_einsum(equation, left, right):
    tensors = create_tensors(left, right)
    expected = compute(equation, tensors)
    with use_general_products():
        found = compute(equation, [tensor.float() for tensor in tensors])
    assert "Product" in type(found[0].grad_fn).__name__
    for value, exact in zip(found, expected, strict=True):
        assert_equal_up_to_rounding(value, exact)


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("ii,ij->j", (3, 3), (3, 3)),
        ("ij,kl->il", (3, 3), (3, 3)),
        ("ij,jk->ik", (3, 1), (3, 3)),
        ("ij,jk", (3, 3), (3, 3)),
    ],
)
def test_what_is_no_product_stays_einsum(equation, left, right):
    tensors = torch.randn(left), torch.randn(right)
    assert find_product(equation, tensors) is None
    expected, own = torch.einsum(equation, *tensors), torch.einsum
    with use_general_products():
        torch.testing.assert_close(torch.einsum(equation, *tensors), expected)
    assert torch.einsum is own


def test_a_product_under_autocast_is_in_its_type():
    left, right = (tensor.float() for tensor in create_tensors((2, 3), (3, 4)))
    with torch.autocast("cpu", dtype=torch.bfloat16), use_general_products():
        product = torch.einsum("ab,bc->ac", left, right)
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, left.bfloat16() @ right.bfloat16())


def test_a_product_is_written_with_its_dimensions_and_precision():
    text = write_product((2, 3, 4), (2, 5, 4), ("bqd", "bkd", "bkq"), "bf16", "HIGH")
    assert "batching_dims = [0] x [0],\n        contracting_dims = [2] x [2]" in text
    assert "precision = [HIGH, HIGH]" in text
    assert "-> tensor<2x3x5xbf16>" in text
    assert "stablehlo.transpose %product, dims = [0, 2, 1]" in text


@pytest.mark.tpu
@pytest.mark.parametrize(("equation", "left", "right"), EQUATIONS)
def test_a_program_holds_one_product_and_two_for_its_gradients(equation, left, right):
    from utils.config.execution import RuntimeSection
    from utils.runtime.launcher import create_runtime
    from utils.runtime.tpu.lowering import lower_step
    from utils.runtime.tpu.program import StepProgram, trace_step

    device = create_runtime(RuntimeSection(device="tpu")).device
    pair = Pair(*(tensor.to(device, torch.float32) for tensor in create_tensors(left, right)))
    expected = compute(equation, create_tensors(left, right))

    def step(batch, _):
        return compute(equation, (batch.left, batch.right))

    _, text = lower_step(trace_step(step, pair, Nothing()))
    assert text.count("stablehlo.dot_general") == 3
    for value, exact in zip(StepProgram(step)(pair, Nothing()), expected, strict=True):
        assert_equal_up_to_rounding(value, exact)
