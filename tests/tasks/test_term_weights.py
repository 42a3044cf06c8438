"""Schedules of the weights of loss terms, against their closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from losses.base import LossInputs
from losses.weighted import create_weighted_loss
from tasks.teachers.teaching import TermWeights
from utils.config.distill import DistillSection, LossTerm


def get_scales(term: LossTerm, total_steps: int = 101, steps_per_epoch: int = 10) -> list[float]:
    weights = TermWeights((term,), total_steps, steps_per_epoch)
    return [weights.get_scales(step).item() for step in range(total_steps)]


def test_constant_weights_need_no_schedule():
    assert TermWeights.create([LossTerm(name="kd"), LossTerm(name="hard")], 10, 5) is None
    assert TermWeights.create([], 10, 5) is None
    assert TermWeights.create([LossTerm(name="kd", warmup_epochs=1)], 10, 5) is not None
    assert TermWeights.create([LossTerm(name="kd", weight_end=0.0)], 10, 5) is not None


def test_a_warm_up_rises_linearly_from_zero_to_the_weight():
    scales = get_scales(LossTerm(name="kd", warmup_epochs=2.0))
    assert scales[:21] == pytest.approx([step / 20 for step in range(21)])
    assert set(scales[20:]) == {1.0}


@pytest.mark.parametrize(("weight", "end"), [(2.0, 0.0), (0.5, 1.5), (1.0, 1.0)])
def test_a_cosine_leads_from_weight_to_weight_end(weight, end):
    scales = get_scales(LossTerm(name="kd", weight=weight, weight_end=end))
    wanted = [
        end + (weight - end) * 0.5 * (1 + math.cos(math.pi * step / 100)) for step in range(101)
    ]
    assert [weight * scale for scale in scales] == pytest.approx(wanted, abs=1e-6)


def test_the_cosine_starts_where_the_warm_up_ends():
    scales = get_scales(LossTerm(name="kd", weight=2.0, weight_end=1.0, warmup_epochs=1.0))
    assert scales[5] == pytest.approx(0.5)
    assert scales[10] == pytest.approx(1.0)
    assert scales[-1] == pytest.approx(0.5)


def test_after_the_run_the_final_weight_stays():
    weights = TermWeights((LossTerm(name="kd", weight_end=0.25),), 11, 5)
    assert weights.get_scales(500).item() == pytest.approx(0.25)


def test_each_term_has_its_own_scale_and_it_multiplies_the_weight_in_the_total():
    terms = (
        LossTerm(name="kd", weight=2.0, warmup_epochs=1),
        LossTerm(name="hard", weight=1.0, weight_end=0.0),
    )
    distill = DistillSection(teacher="x", losses=terms, alpha=0.5)
    scales = TermWeights(terms, 11, 10).get_scales(5)
    assert scales.tolist() == pytest.approx([0.5, 0.5])
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 6, 4, generator=generator)
    inputs = LossInputs(
        student,
        torch.softmax(teacher, -1),
        teacher.argmax(-1),
        teacher_logits=(teacher,),
        term_scales=scales,
    )
    out = create_weighted_loss(distill)(inputs)
    parts = out.terms
    wanted = 0.5 * parts["task"] + 0.5 * (2.0 * 0.5 * parts["kd"] + 0.5 * parts["hard"])
    assert out.total.item() == pytest.approx(wanted.item(), rel=1e-6)
