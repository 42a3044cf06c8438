"""The decoder's patches: the same names, shapes and numbers, and causal attention."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.patches import decoder as patches
from models.patches.table import PATCHES, apply_patches
from models.remat import recompute_blocks
from models.transformer import Transformer
from tests.models.patches.test_patches import TOLERANCE, flatten, get_distance

VOCABULARY, LENGTH, WIDTH = 50, 24, 32
FORMS = {
    "rope": {},
    "grouped": {"kv_heads": 2},
    "one_key_head": {"kv_heads": 1, "tied": False},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
}


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch):
    """Ten queries at once: parts of 10, 10 and 4."""
    monkeypatch.setattr(patches, "_QUERIES", 10)


def create_pair(form: str, skip: tuple[str, ...] = ()) -> tuple[nn.Module, nn.Module]:
    """A decoder whose weights are no special ones, and the same one patched."""
    torch.manual_seed(0)
    model = Transformer(VOCABULARY, LENGTH, depth=2, width=WIDTH, heads=4, **FORMS[form])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model, apply_patches(copy.deepcopy(model), skip=skip)


def create_tokens(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens, and the weights of the hidden states' sum."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator, dtype=torch.int32)
    return tokens, torch.randn((4, LENGTH, WIDTH), generator=generator)


def run(model: nn.Module, *, bf16: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states, and the gradients as one vector."""
    tokens, weights = create_tokens()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model(tokens)
    (hidden.float() * weights).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return hidden, flatten(gradients)


@pytest.mark.parametrize("form", FORMS)
def test_float32_outputs_equal_the_plain_decoders(form):
    model, patched = create_pair(form)
    wanted, found = run(model), run(patched)
    assert max(map(get_distance, found, wanted)) < TOLERANCE
    state = patched.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", PATCHES)
def test_each_patch_may_be_left_out(name):
    model, patched = create_pair("grouped", skip=(name,))
    assert max(map(get_distance, run(patched), run(model))) < TOLERANCE


@pytest.mark.parametrize("form", ["rope", "grouped", "learned"])
def test_bfloat16_is_nearly_as_close_to_float32_as_the_plain_decoder(form):
    model, patched = create_pair(form)
    truth = run(copy.deepcopy(model))
    usual, own = run(model, bf16=True), run(patched, bf16=True)
    assert own[0].dtype == torch.bfloat16
    for found, plain, exact, factor in zip(own, usual, truth, (2.0, 2.5), strict=True):
        assert get_distance(found, exact) < factor * get_distance(plain, exact) + 1e-3


def test_no_token_depends_on_later_ones():
    _, patched = create_pair("grouped")
    tokens, _ = create_tokens()
    for place in (3, 9, 10, 20, 23):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % VOCABULARY
        one, two = patched(tokens), patched(other)
        assert torch.equal(one[:, :place], two[:, :place])
        assert not torch.equal(one[:, place], two[:, place])


def test_a_patched_decoder_works_with_a_cache():
    _, patched = create_pair("grouped")
    tokens, _ = create_tokens()
    with torch.no_grad():
        whole, cache = patched(tokens), patched.create_cache()
        steps = [patched(tokens[:, n : n + 1], cache) for n in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_a_patched_decoder_recomputes_its_blocks():
    _, patched = create_pair("rope")
    again = copy.deepcopy(patched)
    recompute_blocks(again, lambda block, *args: checkpoint(block, *args, use_reentrant=False))
    for one, other in zip(run(patched), run(again), strict=True):
        assert torch.equal(one, other)
