"""Experts of static capacity: which tokens they take and drop, their balance, and training."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import main
from models.delta.layers.qwen_next import ExpertShape, SparseMlp
from models.remat import scan_blocks
from store.record.history import read_metrics
from tests.models.delta.test_qwen import EXPERTS, create, draw_tokens, read_losses, run_in_turn
from tests.support.language import create_language_argv
from utils.errors import UserError


def create_mlp(**changes) -> SparseMlp:
    torch.manual_seed(1)
    shape = {**EXPERTS, **changes}
    return SparseMlp(ExpertShape(**shape))


def sum_experts(mlp: SparseMlp, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert: those that have room, and the shared one."""
    shape = mlp.shape
    room, found = shape.find_capacity(x.shape[1]), []
    for window in x:
        used = [0] * shape.experts
        found.append(torch.stack([sum_token(mlp, token, used, room) for token in window]))
    return torch.stack(found)


def sum_token(mlp: SparseMlp, token: torch.Tensor, used: list[int], room: int) -> torch.Tensor:
    row = mlp.shared_expert(token) * mlp.shared_expert_gate(token).sigmoid()
    weights, chosen = mlp.gate(token).topk(mlp.shape.experts_per_token)
    for weight, one in zip(weights / weights.sum(), chosen.tolist(), strict=True):
        used[one] += 1
        if used[one] <= room:
            gate, up = (mlp.experts.gate_up_proj[one] @ token).chunk(2)
            row = row + weight * (mlp.experts.down_proj[one] @ (functional.silu(gate) * up))
    return row


@pytest.mark.parametrize("factor", [1.01, 4.0])
def test_tokens_go_to_the_likeliest_experts_with_capacity(factor):
    mlp = create_mlp(capacity_factor=factor)
    x = torch.randn(2, 11, 32, requires_grad=True)
    wanted, (found, _) = sum_experts(mlp, x), mlp(x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    weights = torch.randn_like(found)
    leaves = [x, *mlp.parameters()]
    theirs = torch.autograd.grad((wanted * weights).sum(), leaves)
    ours = torch.autograd.grad((found * weights).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 + 1e-5 * float(other.abs().max()))


def test_full_experts_drop_tokens_and_windows_are_routed_separately():
    mlp = create_mlp(capacity_factor=1.01)
    # What all tokens share makes most of them choose the same experts.
    x = torch.randn(3, 16, 32) + 3 * torch.randn(32)
    with torch.no_grad():
        together, balance = mlp(x)
        alone = [mlp(one[None]) for one in x]
        roomy = create_mlp(capacity_factor=4.0)(x)[0]
    # Not to the bit: a product of fewer rows may be summed in another order.
    torch.testing.assert_close(together, torch.cat([one for one, _ in alone]), rtol=0, atol=1e-6)
    torch.testing.assert_close(balance, torch.cat([one for _, one in alone]), rtol=0, atol=1e-6)
    assert (together - roomy).abs().max() > 1e-3


def test_the_balance_loss_is_lowest_for_evenly_used_experts():
    mlp = create_mlp()
    with torch.no_grad():
        mlp.gate.weight.zero_()
        assert mlp(torch.randn(2, 9, 32))[1].tolist() == pytest.approx([2.0, 2.0])
        mlp.gate.weight[0] = 5.0
        # All tokens that look one way choose the first expert, at a probability near 1.
        assert float(mlp(torch.ones(1, 9, 32))[1]) == pytest.approx(8.0, rel=1e-3)


def test_the_balance_loss_equals_transformers():
    hub = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    mlp, x = create_mlp(), torch.randn(1, 40, 32)
    logits = functional.linear(x[0], mlp.gate.weight)
    wanted = hub.load_balancing_loss_func((logits,), num_experts=8, top_k=2)
    torch.testing.assert_close(mlp(x)[1][0], wanted)


def test_an_experts_capacity_is_its_share_times_the_factor():
    shape = ExpertShape(experts=8, experts_per_token=2, capacity_factor=1.25)
    assert shape.find_capacity(16) == 5
    assert shape.find_capacity(1) == 1
    assert replace(shape, capacity_factor=40.0).find_capacity(16) == 16


def test_scanned_groups_of_layers_pass_the_balance_loss():
    model, tokens = create("qwen3_next", depth=8), draw_tokens(9)
    wanted, balance = model(tokens), model.balance_loss
    assert balance.shape == (2,)
    assert scan_blocks(model, run_in_turn) == 2
    assert torch.equal(model(tokens), wanted)
    torch.testing.assert_close(model.balance_loss, balance)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, "model.args.experts_per_token (9) exceeds model.args.experts"),
        ({"mlp_width": 4}, "model.args.mlp_width (4) is not supported by a model of experts"),
        ({"capacity_factor": 1.0}, "model.args.capacity_factor (1.0) must be a number above 1"),
        ({"balance": -1}, "model.args.balance (-1) must be a number of 0 or more"),
    ],
)
def test_invalid_expert_arguments_are_refused_in_one_line(changes, message):
    with pytest.raises(UserError) as caught:
        create("qwen3_next", **changes)
    assert str(caught.value).startswith(message)


def create_argv(folder, *flags, device="cpu"):
    own = (
        "--model=qwen3_next",
        f"--model.args={json.dumps(EXPERTS)}",
        "--model.args.capacity_factor=1.5",
        "--data.sequence_length=20",
    )
    return create_language_argv(folder, *own, *flags, device=device)


def test_experts_train_through_main_with_the_balance_loss(tmp_path):
    flags = ("--train.steps=12", "--model.args.balance=0.05")
    assert main.main(create_argv(tmp_path, *flags)) == 0
    lines = [one for one in read_metrics(tmp_path / "lang" / "a") if "loss/balance" in one]
    assert lines[-1]["loss/task"] < lines[0]["loss/task"]
    for one in (lines[0], lines[-1]):
        assert 0.05 * 2 <= one["loss/balance"] < 0.05 * 8
        assert one["loss/total"] == pytest.approx(one["loss/task"] + one["loss/balance"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.xla
def test_experts_train_on_xla_as_on_native_pytorch(tmp_path):
    """One graph, whatever the router chooses; nothing on the host."""
    pytest.importorskip("torch_xla")
    steps = ("--train.steps=6", "--runtime.graph_budget=6", "--optim.name=sgd", "--optim.lr=0.1")
    assert main.main(create_argv(tmp_path / "cpu", *steps)) == 0
    wanted = read_losses(tmp_path / "cpu")
    assert main.main(create_argv(tmp_path / "again", *steps, "--train.remat=true")) == 0
    assert read_losses(tmp_path / "again") == wanted
    for name, flags in (("plain", ()), ("remat", ("--train.remat=true",))):
        assert main.main(create_argv(tmp_path / name, *steps, *flags, device="xla")) == 0
        assert read_losses(tmp_path / name) == pytest.approx(wanted, rel=1e-4)
        assert read_metrics(tmp_path / name / "lang" / "a")[-1]["graphs_train"] == 1
