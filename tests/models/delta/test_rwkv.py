"""RWKV-7: the paper's equations token by token, cached as uncached, trained through main."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import main
from models.delta.layers.rwkv import Rwkv, create_rwkv
from models.remat import scan_blocks
from store.record.history import read_metrics
from tests.models.delta.test_qwen import CLOSE, VOCAB, draw_tokens, read_losses, run_in_turn
from tests.support.language import create_language_argv
from tools import generate as generate_tool
from utils.errors import UserError

SHAPE = {
    "depth": 3,
    "width": 16,
    "head_width": 8,
    "mlp_width": 40,
    "decay_rank": 4,
    "rate_rank": 5,
    "value_rank": 3,
    "gate_rank": 6,
    "chunk": 8,
}


def create(**changes) -> Rwkv:
    torch.manual_seed(3)
    model = create_rwkv(VOCAB, 16, **{**SHAPE, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def norm(x, w, name, eps=1e-5):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def low_rank(x, w, name, function):
    found = w[f"{name}.lora.2.weight"] @ function(w[f"{name}.lora.0.weight"] @ x)
    return found + w.get(f"{name}.lora.2.bias", 0.0)


def mix_time(x, before, state, first, w):
    heads, size = w["r_k"].shape
    r_in, w_in, k_in, v_in, a_in, g_in = (
        x + (before - x) * w[f"x_{name}"].ravel() for name in "rwkvag"
    )
    r, k, v = w["r_proj.weight"] @ r_in, w["k_proj.weight"] @ k_in, w["v_proj.weight"] @ v_in
    decay = np.exp(-np.exp(-0.5) * sigmoid(low_rank(w_in, w, "w_lora", np.tanh)))
    if first is None:
        first = v
    else:
        v = v + (first - v) * sigmoid(low_rank(v_in, w, "v_lora", lambda z: z))
    rate = sigmoid(low_rank(a_in, w, "a_lora", lambda z: z))
    gate = low_rank(g_in, w, "g_lora", sigmoid)
    key = (k * w["k_k"]).reshape(heads, size)
    key = key / np.linalg.norm(key, axis=-1, keepdims=True)
    k = k * (1 + (rate - 1) * w["k_a"])
    r, k, v, rate, decay = (z.reshape(heads, size) for z in (r, k, v, rate, decay))
    outputs = []
    for h in range(heads):
        moved = state[h] * decay[h] - state[h] @ np.outer(key[h], key[h] * rate[h])
        state[h] = moved + np.outer(v[h], k[h])
        outputs.append(state[h] @ r[h])
    spread = np.stack(outputs)
    spread = (spread - spread.mean(-1, keepdims=True)) / np.sqrt(
        spread.var(-1, keepdims=True) + size * 1e-5
    )
    mixed = spread.ravel() * w["g_norm.weight"] + w["g_norm.bias"]
    known = (r * k * w["r_k"]).sum(-1, keepdims=True) * v
    return w["o_proj.weight"] @ ((mixed + known.ravel()) * gate), first


def take(weights, start):
    return {n.removeprefix(start): v for n, v in weights.items() if n.startswith(start)}


def compute_logits(weights, tokens):
    """[T, V] of one sequence."""
    layers = [take(weights, f"model.layers.{n}.") for n in range(SHAPE["depth"])]
    heads, size = layers[0]["attn.r_k"].shape
    states = [np.zeros((heads, size, size)) for _ in layers]
    tails = [[np.zeros(heads * size)] * 2 for _ in layers]
    found = []
    for token in tokens:
        x, first = weights["model.embeddings.weight"][token], None
        for number, w in enumerate(layers):
            x = norm(x, w, "pre_norm") if number == 0 else x
            seen = norm(x, w, "attn_norm")
            mixed, first = mix_time(seen, tails[number][0], states[number], first, take(w, "attn."))
            x = x + mixed
            inner = norm(x, w, "ffn_norm")
            hidden = w["ffn.key.weight"] @ (inner + (tails[number][1] - inner) * w["ffn.x_k"])
            x, tails[number] = x + w["ffn.value.weight"] @ np.maximum(hidden, 0) ** 2, [seen, inner]
        found.append(weights["lm_head.weight"] @ norm(x, weights, "model.norm"))
    return np.stack(found)


def test_logits_equal_the_papers_equations():
    model, tokens = create(), draw_tokens(21)
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    with torch.no_grad():
        found = model.compute_logits(model(tokens)).double()
    for row, line in zip(tokens.tolist(), found, strict=True):
        wanted = compute_logits(weights, row)
        np.testing.assert_allclose(line, wanted, atol=2e-5 * np.abs(wanted).max())


def test_chunks_of_two_tokens_and_of_all_give_the_same_gradients():
    """Their numbers differ by roundings alone."""
    found = []
    for chunk in (2, 16):
        model, tokens = create(chunk=chunk), draw_tokens(9)
        model.compute_logits(model(tokens)).square().mean().backward()
        found.append({name: one.grad for name, one in model.named_parameters()})
    for name, grad in found[0].items():
        scale = float(grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(found[1][name], grad, rtol=0, atol=1e-4 * scale)


def test_cached_and_scanned_hidden_states_equal_the_plain_ones():
    model, tokens = create(), draw_tokens(30)
    with torch.no_grad():
        wanted, cache = model(tokens), model.create_cache()
        parts = [tokens[:, :11], tokens[:, 11:28], tokens[:, 28:29], tokens[:, 29:]]
        found = torch.cat([model(part, cache) for part in parts], dim=1)
        torch.testing.assert_close(found, wanted, **CLOSE)
        assert cache[0].state.shape == (2, 2, 8, 8)
        names = list(model.state_dict())
        assert scan_blocks(model, run_in_turn) == 2
        assert list(model.state_dict()) == names
        assert torch.equal(model(tokens), wanted)


def test_a_head_must_divide_the_width():
    with pytest.raises(UserError, match=r"model.args.head_width \(5\) does not divide model.args"):
        create(head_width=5)
    with pytest.raises(UserError, match=r"model.args.chunk \(3\) must be a power of two"):
        create(chunk=3)


def create_argv(folder, *flags, device="cpu"):
    own = ("--model=rwkv7", f"--model.args={json.dumps(SHAPE)}", "--data.sequence_length=20")
    argv = create_language_argv(folder, *own, *flags, device=device)
    # RWKV-7 has no heads of attention.
    return [one for one in argv if "kv_heads" not in one]


@pytest.mark.slow
def test_rwkv_trains_through_main_resumes_and_generates(tmp_path, capsys):
    """From its checkpoint, with recomputed blocks, to the bits of a whole run."""
    flags = ("--train.steps=16", "--train.checkpoint_every_steps=8", "--train.keep_checkpoints=9")
    assert main.main(create_argv(tmp_path, *flags)) == 0
    wanted, folder = read_losses(tmp_path), tmp_path / "lang" / "a"
    assert wanted[-1] < wanted[0] - 0.05
    again = (f"--run.resume={folder}/checkpoints/step_00000008", "--train.remat=true")
    assert main.main(create_argv(tmp_path, *flags, *again)) == 0
    assert read_losses(tmp_path) == wanted
    capsys.readouterr()
    argv = [str(folder), "--prompt", "1 2 3", "--max-tokens", "4", "--temperature", "0"]
    assert generate_tool.main(argv) == 0
    assert len(capsys.readouterr().out.split()) == 7


@pytest.mark.slow
@pytest.mark.xla
def test_rwkv_trains_on_xla_as_on_native_pytorch_with_a_loop_over_layers(tmp_path):
    pytest.importorskip("torch_xla")
    steps = ("--train.steps=6", "--runtime.graph_budget=6")
    assert main.main(create_argv(tmp_path / "cpu", *steps)) == 0
    wanted = read_losses(tmp_path / "cpu")
    for name, flags in (("plain", ()), ("scan", ("--train.scan_layers=true",))):
        assert main.main(create_argv(tmp_path / name, *steps, *flags, device="xla")) == 0
        assert read_losses(tmp_path / name) == pytest.approx(wanted, rel=1e-4)
        assert read_metrics(tmp_path / name / "lang" / "a")[-1]["graphs_train"] == 1
