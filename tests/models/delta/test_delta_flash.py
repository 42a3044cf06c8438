"""Full attention by flash kernels: interpreted on XLA it is attention, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from models.delta.kernels.flash import attend_causally
from models.delta.kernels.operators import choose_kernels
from models.table import MODELS
from tests.models.delta.test_delta_kernels import needs_jax
from utils.errors import UserError


def find_all(function, device: str, dtype: torch.dtype, tokens: int) -> list[torch.Tensor]:
    """Output and gradients of q, k and v, four heads of queries to two of keys."""
    draw = torch.Generator().manual_seed(0)
    sizes = [(2, heads, tokens, 16) for heads in (4, 2, 2, 4)]
    *given, weights = [torch.randn(one, generator=draw).to(device, dtype) for one in sizes]
    leaves = [x.requires_grad_() for x in given]
    output = function(*leaves)
    (output * weights).sum().backward()
    return [x.detach().cpu() for x in (output, *(leaf.grad for leaf in leaves))]


@needs_jax
@pytest.mark.xla
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [21, 600])
def test_flash_attention_equals_attention(tokens):
    """Values within 1e-5 and gradients within 1e-4 of float64; no block is full."""
    import torch_xla

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    wanted = find_all(attend, "cpu", torch.float64, tokens)
    found = find_all(attend_causally, str(torch_xla.device()), torch.float32, tokens)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        limit = 1e-4 if place else 1e-5
        assert (one - other).abs().max() < limit * other.abs().max()


def test_heads_without_a_flash_attention_kernel_are_refused(monkeypatch):
    model = MODELS.get("qwen3")(16, 8, depth=1, width=32, mlp_width=32, head_width=192)
    monkeypatch.setattr("models.delta.kernels.operators.require_kernels", lambda device: None)
    with pytest.raises(UserError, match=r"model\.args\.head_width is 192; change it, or choose"):
        choose_kernels("pallas", torch.device("cpu"), model)
