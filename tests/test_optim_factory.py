"""Parameter groups, schedules by their closed forms, and optimizers whose state is made ahead."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn

from optim_factory import SCHEDULES, create_optimizer, create_schedule
from tests.support.tiny_parts import CLASSES, TinyConvNet, create_cpu_runtime, create_vit
from utils.config.sections import OptimSection
from utils.errors import UserError

BASE = OptimSection(lr=0.8, min_lr=0.1, warmup_lr=0.2, warmup_steps=4, weight_decay=0.3)


def create_groups(model: nn.Module, **changes: object) -> dict[str, dict]:
    """Parameter name -> the group it is in."""
    optimizer = create_optimizer(BASE.model_copy(update=changes), model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
    assert groups.keys() == set(names.values())
    return groups


def create_distilled_vit() -> nn.Module:
    return timm.create_model(
        "deit_tiny_distilled_patch16_224",
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=CLASSES,
    )


def create_convnext() -> nn.Module:
    return timm.create_model(
        "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16), num_classes=CLASSES
    )


def test_tokens_positions_biases_and_norms_of_a_vit_do_not_decay():
    groups = create_groups(create_distilled_vit())
    decaying = {name for name, group in groups.items() if group["weight_decay"] > 0}
    matrices = (
        "patch_embed.proj",
        "attn.qkv",
        "attn.proj",
        "mlp.fc1",
        "mlp.fc2",
        "head",
        "head_dist",
    )
    expected = {
        name
        for name in groups
        if name.endswith(".weight") and name.removesuffix(".weight").endswith(matrices)
    }
    assert decaying == expected
    assert {"cls_token", "dist_token", "pos_embed", "norm.weight"} <= groups.keys() - decaying
    assert all(group["decays"] == (name in decaying) for name, group in groups.items())


def test_norms_biases_and_layer_scale_of_a_conv_net_do_not_decay():
    model = create_convnext()
    groups = create_groups(model)
    shapes = {name: p.ndim for name, p in model.named_parameters()}
    assert any(name.endswith("gamma") for name in groups)
    for name, group in groups.items():
        expected = 0.3 if shapes[name] > 1 else 0.0
        assert group["weight_decay"] == expected, name


def test_tokens_and_tables_do_not_decay_in_models_without_a_declaration():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
            self.dist_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.reg_token = nn.Parameter(torch.zeros(1, 2, 4))
            self.mask_token = nn.Parameter(torch.zeros(1, 1, 4))
            self.attn = nn.ParameterDict({"relative_position_bias_table": torch.zeros(9, 2)})
            # Layer scale of feature maps has more than one dimension.
            self.stage = nn.ParameterDict({"gamma": torch.zeros(4, 1, 1)})
            scales = {f"ls{i}": nn.ParameterDict({"scale": torch.zeros(4, 1, 1)}) for i in (1, 2)}
            self.block = nn.ModuleDict(scales)
            self.head = nn.Linear(4, 2)

    groups = create_groups(Bare())
    assert {name for name, group in groups.items() if group["decays"]} == {"head.weight"}


def test_layer_decay_scales_each_layer_by_a_power_of_its_distance_to_the_head():
    decay = 0.5
    groups = create_groups(create_distilled_vit(), layer_decay=decay)

    def get_distance(name: str) -> int:
        if name.startswith("head"):
            return 0
        if name.startswith(("blocks.1", "norm")):
            return 1
        return 2 if name.startswith("blocks.0") else 3

    for name, group in groups.items():
        assert group["lr_scale"] == pytest.approx(decay ** get_distance(name)), name
        is_matrix = name.endswith("weight") and "norm" not in name
        assert group["decays"] == is_matrix, name


def test_layer_decay_reaches_the_optimizer_as_the_groups_learning_rate():
    model = create_distilled_vit()
    section = BASE.model_copy(update={"layer_decay": 0.5})
    optimizer = create_optimizer(section, model)
    schedule = create_schedule(section, total_steps=20, steps_per_epoch=5)
    lrs, _ = schedule.values(4, optimizer)
    scales = [group["lr_scale"] for group in optimizer.param_groups]
    assert lrs == pytest.approx([0.8 * scale for scale in scales])
    assert min(scales) == 0.125


def test_layer_decay_needs_a_model_that_names_its_layers():
    with pytest.raises(UserError, match=r"optim.layer_decay \(0.5\) needs .*TinyConvNet"):
        create_groups(TinyConvNet(), layer_decay=0.5)


def test_projections_of_losses_are_trained_without_layer_decay():
    loss_modules = nn.Linear(3, 3)
    section = BASE.model_copy(update={"layer_decay": 0.5})
    optimizer = create_optimizer(section, create_distilled_vit(), loss_modules=loss_modules)
    for group in optimizer.param_groups:
        if any(p is loss_modules.weight for p in group["params"]):
            assert group["lr_scale"] == 1.0
            assert group["decays"]
        if any(p is loss_modules.bias for p in group["params"]):
            assert not group["decays"]
    listed = {p for group in optimizer.param_groups for p in group["params"]}
    assert {loss_modules.weight, loss_modules.bias} <= listed


TOTAL, WARMUP, PER_EPOCH = 24, 4, 5


def cosine(high: float, low: float, share: float) -> float:
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2


SHAPES = {
    "constant": lambda s, step: 0.8,
    "plateau": lambda s, step: 0.8,
    "cosine": lambda s, step: cosine(0.8, 0.1, s),
    "linear": lambda s, step: 0.8 - 0.7 * s,
    "polynomial": lambda s, step: 0.1 + 0.7 * (1 - s) ** 3,
    "step": lambda s, step: max(0.8 * 0.5 ** ((step >= 10) + (step >= 20)), 0.1),
    # The share is one of all 24 steps: the decay begins at 14.4, the warm-up has no part in it.
    "wsd": lambda s, step: 0.8 if step <= 14.4 else 0.8 - 0.7 * (step - 14.4) / 9.6,
}


def create_test_schedule(name: str, **changes: object):
    values = {
        "schedule": name,
        "power": 3.0,
        "decay_rate": 0.5,
        "decay_epochs": (2.0, 4.0),
        "cooldown_fraction": 0.4,
        **changes,
    }
    section = BASE.model_copy(update=values)
    return create_schedule(section, total_steps=TOTAL, steps_per_epoch=PER_EPOCH)


@pytest.mark.parametrize("name", SHAPES)
def test_a_schedule_follows_its_closed_form_at_every_step(name):
    schedule = create_test_schedule(name)
    for step in range(TOTAL + 1):
        if step < WARMUP:
            expected = 0.2 + 0.6 * step / WARMUP
        else:
            expected = SHAPES[name]((step - WARMUP) / (TOTAL - WARMUP), step)
        assert schedule.lr_at(step) == pytest.approx(expected, abs=1e-12), step


@pytest.mark.parametrize("name", SHAPES)
def test_a_schedule_starts_at_the_warm_up_rate_and_peaks_after_it(name):
    schedule = create_test_schedule(name)
    assert schedule.lr_at(0) == pytest.approx(0.2)
    assert schedule.lr_at(WARMUP) == pytest.approx(0.8)
    ends = {"constant": 0.8, "plateau": 0.8, "step": 0.2}
    assert schedule.lr_at(TOTAL) == pytest.approx(ends.get(name, 0.1))


@pytest.mark.parametrize(("factor", "count", "total"), [(1.0, 3, 12), (2.0, 3, 28)])
def test_cycles_equal_timms(factor, count, total):
    """At every step, a cycle's first one among them, without a warm-up."""
    weight = nn.Parameter(torch.zeros(1))
    timms = CosineLRScheduler(
        torch.optim.SGD([weight], lr=0.8),
        t_initial=4,
        lr_min=0.1,
        cycle_mul=factor,
        cycle_decay=0.5,
        cycle_limit=count,
        t_in_epochs=False,
    )
    section = BASE.model_copy(
        update={
            "cycles": count,
            "cycle_decay": 0.5,
            "cycle_length_factor": factor,
            "warmup_steps": 0,
        }
    )
    ours = create_schedule(section, total_steps=total, steps_per_epoch=total)
    for step in range(total):
        assert ours.lr_at(step) == pytest.approx(timms._get_lr(step)[0]), step
    assert ours.lr_at(total) == pytest.approx(0.1)


@pytest.mark.parametrize(("count", "factor"), [(13, 1.0), (3, 40.0), (2000, 3.0)])
def test_a_cycle_shorter_than_a_step_is_refused(count, factor):
    changes = {"cycles": count, "cycle_length_factor": factor, "warmup_steps": 0}
    section = BASE.model_copy(update=changes)
    with pytest.raises(UserError, match=rf"optim\.cycles \({count}\), .* of 12 steps; lower"):
        create_schedule(section, total_steps=12, steps_per_epoch=12)


@pytest.mark.parametrize(
    "args", [{"adjust_lr_fn": "foo"}, {"ns_coefficients": [1, 2]}, {"nothing": 1}]
)
def test_arguments_that_muon_refuses_are_refused_before_the_first_step(args):
    with pytest.raises(UserError, match=r"optim\.name 'nadamuon' refuses its arguments"):
        create_optimizer(OptimSection(name="nadamuon", args=args), nn.Linear(4, 4))


def test_cycles_start_after_the_warm_up_in_every_schedule_with_cycles():
    for name in ("cosine", "linear", "polynomial"):
        schedule = create_test_schedule(name, cycles=2, cycle_decay=0.25)
        half = WARMUP + (TOTAL - WARMUP) // 2
        assert schedule.lr_at(WARMUP) == pytest.approx(0.8)
        assert schedule.lr_at(half - 1) < 0.18
        assert schedule.lr_at(half) == pytest.approx(0.2)
        assert schedule.lr_at(TOTAL) == pytest.approx(0.1)


def test_cuts_lower_the_learning_rate_down_to_its_minimum():
    schedule = create_test_schedule("plateau")
    assert [schedule.get_lr(9, cuts) for cuts in range(5)] == pytest.approx(
        [0.8, 0.4, 0.2, 0.1, 0.1]
    )
    assert schedule.get_lr(0, 9) == pytest.approx(0.1)  # the warm-up's own rate is not raised
    assert create_test_schedule("plateau", min_lr=0.5).get_lr(0, 9) == pytest.approx(0.2)


def test_every_schedule_of_the_configuration_is_tested_here():
    assert set(SCHEDULES) == set(SHAPES)
    with pytest.raises(UserError, match=r"unknown optim.schedule 'cosin'; did you mean 'cosine'"):
        create_test_schedule("cosin")


def test_a_warm_up_inside_the_schedule_equals_timms_without_prefix():
    """By timm's own scheduler, at every step."""
    theirs = CosineLRScheduler(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.8),
        t_initial=40,
        lr_min=0.1,
        warmup_t=4,
        warmup_lr_init=0.2,
    )
    inside = BASE.model_copy(update={"warmup_inside": True})
    ours = create_schedule(inside, total_steps=40, steps_per_epoch=10)
    behind = create_schedule(BASE, total_steps=40, steps_per_epoch=10)
    for step in range(41):
        wanted = theirs._get_lr(step)[0]
        assert ours.lr_at(step) == pytest.approx(wanted)
        assert (behind.lr_at(step) == pytest.approx(wanted)) is (step < 4 or step == 40)


def test_warm_up_in_epochs_is_as_many_steps():
    schedule = create_test_schedule("constant", warmup_steps=None, warmup_epochs=1.6)
    assert schedule.lr_at(7) == pytest.approx(0.2 + 0.6 * 7 / 8)
    assert schedule.lr_at(8) == pytest.approx(0.8)


def test_a_warm_up_of_zero_steps_starts_at_the_peak():
    assert create_test_schedule("cosine", warmup_steps=0).lr_at(0) == pytest.approx(0.8)


def test_warm_up_in_epochs_that_exceeds_the_steps_is_refused():
    with pytest.raises(UserError, match=r"warmup_steps \(25\) exceeds the run's 24 steps"):
        create_test_schedule("cosine", warmup_steps=None, warmup_epochs=5.0)


def test_the_weight_decay_schedule_is_a_cosine_and_never_touches_no_decay_groups():
    section = BASE.model_copy(update={"weight_decay": 0.04, "weight_decay_end": 0.4})
    optimizer = create_optimizer(section, create_distilled_vit())
    schedule = create_schedule(section, total_steps=TOTAL, steps_per_epoch=PER_EPOCH)
    runtime = create_cpu_runtime()
    for step in range(TOTAL):
        runtime.updates.set_hyperparameters(optimizer, *schedule.values(step, optimizer))
        expected = cosine(0.04, 0.4, step / TOTAL)
        for group in optimizer.param_groups:
            wanted = expected if group["decays"] else 0.0
            assert group["weight_decay"] == pytest.approx(wanted)
    assert {group["decays"] for group in optimizer.param_groups} == {True, False}


def test_a_weight_decay_that_starts_at_zero_still_has_decay_groups():
    section = BASE.model_copy(update={"weight_decay": 0.0, "weight_decay_end": 0.4})
    optimizer = create_optimizer(section, create_distilled_vit())
    assert {group["decays"] for group in optimizer.param_groups} == {True, False}
    schedule = create_schedule(section, total_steps=TOTAL, steps_per_epoch=PER_EPOCH)
    _, decays = schedule.values(TOTAL, optimizer)
    assert max(decays) == pytest.approx(0.4)


def test_projections_of_losses_follow_a_weight_decay_from_zero():
    section = BASE.model_copy(update={"weight_decay": 0.0, "weight_decay_end": 0.4})
    loss_modules = nn.Linear(2, 2)
    groups = create_optimizer(section, create_vit(), loss_modules=loss_modules).param_groups
    owners = {p: group["decays"] for group in groups for p in group["params"]}
    assert (owners[loss_modules.weight], owners[loss_modules.bias]) == (True, False)


def test_learning_rate_and_weight_decay_end_at_the_same_step():
    """The one after the last: a run of n steps goes n parts of the way."""
    schedule = create_test_schedule("linear", weight_decay=0.0, weight_decay_end=0.4)
    assert schedule.lr_at(TOTAL - 1) > 0.1
    assert schedule.decay_at(TOTAL - 1) < 0.4
    assert schedule.lr_at(TOTAL) == pytest.approx(0.1)
    assert schedule.decay_at(TOTAL) == pytest.approx(0.4)


def test_a_cooldown_that_starts_in_the_warm_up_is_refused():
    with pytest.raises(UserError, match=r"cooldown_fraction \(0.9\) of the run's 24.*warm-up of 4"):
        create_test_schedule("wsd", cooldown_fraction=0.9)


def test_no_decay_parameters_keep_their_values_without_gradients():
    """A step with zero gradients moves what decays by lr * weight_decay, and nothing else."""
    model = create_distilled_vit()
    section = BASE.model_copy(update={"warmup_steps": 0, "schedule": "constant"})
    optimizer = create_optimizer(section, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.8 * 0.3 if groups[parameter]["decays"] else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, msg=name)
