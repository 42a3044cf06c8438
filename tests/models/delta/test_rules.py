"""The decoder of all rules: chunks against tokens one by one, decays, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from models.delta.layers.decoder import DECAYS, RuleAttention, RuleShape, create_rules
from models.delta.rules.inputs import DeltaInputs
from models.delta.rules.recurrence import recur_delta_rule
from utils.errors import UserError

SMALL = {
    "depth": 2,
    "width": 16,
    "heads": 2,
    "kv_heads": 2,
    "head_width": 8,
    "mlp_width": 24,
    "linear_heads": 2,
    "linear_width": 8,
    "chunk": 4,
}
VOCAB = 11


def create(rule: str, **args: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return create_rules(VOCAB, 16, **{**SMALL, "rule": rule, **args})


def draw_tokens(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rule", DECAYS)
def test_single_tokens_equal_chunks_and_all_weights_get_gradients(rule):
    model, tokens = create(rule, depth=3, full_every=2), draw_tokens(9)
    assert [one.is_full for one in model.model.layers] == [False, True, False]
    wanted = model(tokens)
    model.compute_logits(wanted).square().mean().backward()
    silent = {name for name, one in model.named_parameters() if not one.grad.abs().max() > 0}
    assert not silent
    with torch.no_grad():
        cache = model.create_cache()
        parts = [tokens[:, :5], *tokens[:, 5:].split(1, dim=1)]
        found = torch.cat([model(part, cache) for part in parts], dim=1)
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)


def test_a_linear_state_sums_what_a_delta_rule_corrects():
    """The same key twice: one state holds both values' sum, the other moves towards the last."""
    for rule, is_sum in (("linear", True), ("linear_elu", True), ("delta_net", False)):
        layer = RuleAttention(RuleShape(**{**SMALL, "rule": rule}))
        erase, write = layer._create_gates(torch.zeros(1, 2, 16))
        assert bool((erase == 0).all() and (write == 1).all()) == is_sum
        assert bool((erase == write).all()) != is_sum


def test_plain_linear_attention_weights_are_positive():
    """What a token reads is values' mean with the published weights, up to the norm behind it."""
    layer = RuleAttention(RuleShape(**{**SMALL, "rule": "linear_elu"}))
    q, k, v = torch.randn(3, 1, 6, 2, 8, generator=torch.Generator().manual_seed(0))
    features = [functional.elu(one) + 1 for one in (q, k)]
    weights = torch.einsum("bthk,bshk->bhts", *features).tril()
    wanted = torch.einsum("bhts,bshk->bthk", weights / weights.sum(-1, keepdim=True), v)
    erase, write = layer._create_gates(torch.zeros(1, 6, 16))
    inputs = DeltaInputs(*layer._map_features(q, k), v, torch.zeros_like(erase), erase, write)
    found, _ = recur_delta_rule(inputs)
    scale = weights.sum(-1).transpose(1, 2)[..., None]
    torch.testing.assert_close(found / scale, wanted, rtol=1e-5, atol=1e-6)


def test_an_unknown_rule_is_refused():
    with pytest.raises(UserError, match=r"model.args.rule \('delta_nett'\).*'delta_net'"):
        create("delta_nett")
