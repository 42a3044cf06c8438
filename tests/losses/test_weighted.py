"""The weighted total, and how it is made from a `distill` section."""

from __future__ import annotations

from dataclasses import replace

import torch

from losses.base import LossInputs
from losses.factory import create_loss
from losses.weighted import WeightedLoss, create_weighted_loss
from tests.losses.examples import create_example_loss, create_inputs
from utils.config.distill import DistillSection, LossTerm


def create_two_terms(alpha=0.3):
    terms = [("kd", create_loss("kd"), 2.0), ("dist", create_loss("dist"), 0.5)]
    return WeightedLoss(terms, alpha=alpha)


def test_total_is_the_weighted_sum_of_the_logged_terms():
    output = create_two_terms()(create_inputs("kd"))
    terms = output.terms
    assert list(terms) == ["task", "kd", "dist", "total"]
    want = 0.7 * terms["task"] + 0.3 * (2.0 * terms["kd"] + 0.5 * terms["dist"])
    torch.testing.assert_close(output.total.detach(), want)
    assert output.total.requires_grad and output.total.dtype == torch.float32
    assert not any(value.requires_grad for value in terms.values())


def test_without_terms_the_total_is_the_task_whatever_alpha_is():
    inputs = replace(create_inputs("kd"), strong_student_logits=None)
    output = WeightedLoss(alpha=0.9)(inputs)
    want = torch.nn.functional.cross_entropy(inputs.student_logits, inputs.targets)
    torch.testing.assert_close(output.total, want)
    assert list(output.terms) == ["task", "total"]


def test_task_is_the_mean_over_valid_examples():
    inputs = replace(create_inputs("kd"), strong_student_logits=None)
    mask = torch.tensor([True, False, True, False])
    output = WeightedLoss()(replace(inputs, mask=mask))
    want = torch.nn.functional.cross_entropy(inputs.student_logits[mask], inputs.targets[mask])
    torch.testing.assert_close(output.total, want)


def test_an_infinite_task_does_not_spread_at_alpha_one():
    inputs = create_inputs("kd")
    targets = inputs.targets.clone()
    targets[0, 0] = float("inf")
    output = create_two_terms(alpha=1.0)(replace(inputs, targets=targets))
    assert not output.terms["task"].isfinite() and output.total.isfinite()


def test_a_term_of_weight_zero_is_logged_without_changing_the_total():
    plain = WeightedLoss([("kd", create_loss("kd"), 1.0)])
    both = WeightedLoss(
        [("kd", create_loss("kd"), 1.0), ("bv_agree", create_loss("bv_agree"), 0.0)]
    )
    inputs = create_inputs("kd")
    assert torch.equal(plain(inputs).total, both(inputs).total)
    assert 0 <= both(inputs).terms["bv_agree"] <= 1


def test_scheduled_scales_multiply_the_weights():
    weighted, inputs = create_two_terms(), create_inputs("kd")
    terms = weighted(inputs).terms
    scaled = weighted(replace(inputs, term_scales=torch.tensor([0.5, 0.0])))
    torch.testing.assert_close(
        scaled.total.detach(), 0.7 * terms["task"] + 0.3 * 0.5 * 2.0 * terms["kd"]
    )


def test_a_repeated_loss_is_logged_under_its_number():
    term = ("kd", create_loss("kd"), 1.0)
    assert list(WeightedLoss([term, term])(create_inputs("kd")).terms) == [
        "task",
        "kd",
        "kd_2",
        "total",
    ]


def test_projections_are_parameters_and_memories_are_buffers_of_the_weighted_loss():
    weighted = WeightedLoss([("fitnet", create_loss("fitnet", {"layers": {"a.1": "b.2"}}), 1.0)])
    assert weighted.student_layers() == ("a.1",) and weighted.teacher_layers() == ("b.2",)
    weighted.build({"a.1": (1, 3, 4, 4)}, {"b.2": (1, 6, 4, 4)})
    assert [p.shape for p in weighted.parameters()] == [(6, 3, 1, 1)]
    crd = WeightedLoss([("crd", create_example_loss("crd"), 1.0)])
    assert "losses.0.student_memory" in dict(crd.named_buffers())


def test_the_short_form_of_the_section_makes_one_term():
    inputs = create_inputs("kd")
    section = DistillSection(teacher="resnet18", loss="soft", temperature=2.0, alpha=1.0)
    total = create_weighted_loss(section)(inputs).total
    torch.testing.assert_close(total, create_loss("kd", {"temperature": 2.0})(inputs))


def test_a_teacher_without_a_loss_adds_no_terms():
    """The configuration refuses it before."""
    assert create_weighted_loss(DistillSection(teacher="resnet18")).names == ()
    assert create_weighted_loss(DistillSection()).names == ()
    assert create_weighted_loss(DistillSection(teacher="resnet18")).group_sizes() == ()


def test_args_override_the_sections_temperature_and_group_size():
    terms = (
        LossTerm(name="dist", weight=2.0),
        LossTerm(name="dist", args={"temperature": 1.0, "group_size": 8}),
        LossTerm(name="lskd", args={"loss": "dkd", "loss_args": {"beta": 2.0}}),
    )
    section = DistillSection(teacher="resnet18", losses=terms, temperature=3.0, group_size=4)
    weighted = create_weighted_loss(section)
    first, second, third = weighted.losses
    assert (first.temperature, first.group_size) == (3.0, 4)
    assert (second.temperature, second.group_size) == (1.0, 8)
    assert (third.inner.temperature, third.inner.beta) == (3.0, 2.0)
    assert weighted.weights == (2.0, 1.0, 1.0)
    assert weighted.group_sizes() == (4, 8)


def test_target_classes_are_the_heaviest_of_mixed_targets():
    targets = torch.tensor([[0.7, 0.3], [0.4, 0.6]])
    inputs = LossInputs(torch.zeros(2, 2), targets, torch.tensor([0, 0]))
    assert inputs.target_classes().tolist() == [0, 1]
