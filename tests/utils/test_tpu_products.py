"""Products that TorchTPU's programs are made of: einsum as one product of matrices."""

from __future__ import annotations

import pytest
import torch

from utils.runtime.tpu.products import multiply, use_matrix_products

EQUATIONS = (
    ("bhdk,bhkq->bhdq", (2, 3, 4, 5), (2, 3, 5, 6)),
    ("bhdk,bhdq->bhkq", (2, 3, 4, 5), (2, 3, 4, 6)),
    ("bnc,thdc->tbhdn", (2, 5, 7), (3, 2, 4, 7)),
    ("bnc,thdc->bthdn", (2, 5, 7), (3, 2, 4, 7)),
    ("bhdn,bnc->hdc", (2, 3, 4, 5), (2, 5, 7)),
    ("...dn,de->...en", (2, 3, 4, 5), (4, 6)),
    ("ed,bhdn->bhen", (4, 4), (2, 3, 4, 5)),
    ("bhgdq,bhgkq->bhdk", (2, 3, 2, 4, 5), (2, 3, 2, 6, 5)),
    ("bchpwq,ocpq->bhwo", (2, 3, 4, 5, 6, 7), (8, 3, 5, 7)),
)


@pytest.mark.parametrize(("equation", "left", "right"), EQUATIONS)
def test_a_product_of_matrices_is_einsum(equation, left, right):
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in (left, right)]
    product = multiply(equation, *tensors)
    assert product is not None
    torch.testing.assert_close(product, torch.einsum(equation, *tensors))


@pytest.mark.parametrize("equation", ["ii,ij->j", "ij,kl->il"])
def test_what_is_no_product_of_matrices_stays_einsum(equation):
    tensors = [torch.randn(3, 3, dtype=torch.float64) for _ in range(2)]
    assert multiply(equation, *tensors) is None
    expected, own = torch.einsum(equation, *tensors), torch.einsum
    with use_matrix_products():
        torch.testing.assert_close(torch.einsum(equation, *tensors), expected)
    assert torch.einsum is own
