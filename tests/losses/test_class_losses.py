"""The task losses of a classification: timm's values for the same inputs, one graph on XLA."""

from __future__ import annotations

import pytest
import torch
from timm.loss import AsymmetricLossMultiLabel, BinaryCrossEntropy
from timm.loss.poly_loss import PolyBinaryCrossEntropy
from torch.nn import functional as F

from losses.base import LossInputs
from losses.tasks.classes import create_class_loss
from losses.weighted import WeightedLoss
from tasks.images.mixing import Mixing
from utils.config.train import TrainSection

CLASSES = 5
WEIGHTS = (0.5, 2.0, 1.0, 0.0, 3.0)
# Our keys beside timm's arguments; the last two act on what mixing has made of the labels.
KINDS = {
    "mean": ({}, {}),
    "sum": ({"bce_sum": True}, {"sum_classes": True}),
    "threshold": ({"bce_threshold": 0.2}, {"target_threshold": 0.2}),
    "positive": ({"bce_positive_weight": 3.0}, {"pos_weight": 3.0}),
    "weights": ({"class_weights": WEIGHTS}, {"weight": torch.tensor(WEIGHTS)}),
    "all": (
        {
            "bce_sum": True,
            "bce_threshold": 0.1,
            "bce_positive_weight": 0.3,
            "class_weights": WEIGHTS,
        },
        {
            "sum_classes": True,
            "target_threshold": 0.1,
            "pos_weight": 0.3,
            "weight": torch.tensor(WEIGHTS),
        },
    ),
}


def draw(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [8, 5], some of them huge, and mixed targets."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(8, CLASSES, generator=generator)
    logits[0] = torch.tensor([1e4, -1e4, 0.0, 60.0, -60.0])
    targets = torch.rand(8, CLASSES, generator=generator)
    return logits.to(dtype).requires_grad_(), targets / targets.sum(dim=1, keepdim=True)


def compute(logits: torch.Tensor, targets: torch.Tensor, **keys: object) -> torch.Tensor:
    section = TrainSection(**{"task_loss": "bce", **keys})
    loss = WeightedLoss(task_loss=create_class_loss(section, CLASSES)).to(logits.device)
    return loss(LossInputs(logits, targets)).total


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_equal_timms(kind):
    keys, arguments = KINDS[kind]
    (logits, targets), (same, _) = draw(), draw()
    found, wanted = compute(logits, targets, **keys), BinaryCrossEntropy(**arguments)(same, targets)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(logits.grad, same.grad, rtol=1e-5, atol=1e-7)


SETS = {
    "asl": ("asl", {}, AsymmetricLossMultiLabel()),
    "asl_all": (
        "asl",
        {"gamma_negative": 2, "gamma_positive": 0, "clip": 0},
        AsymmetricLossMultiLabel(gamma_neg=2, gamma_pos=0, clip=None),
    ),
    "poly": ("poly", {}, PolyBinaryCrossEntropy()),
    "poly_focal": (
        "poly",
        {"epsilon": -1, "gamma": 2, "alpha": 0.25},
        PolyBinaryCrossEntropy(epsilon=-1, gamma=2, alpha=0.25),
    ),
    "focal": (
        "focal",
        {},
        PolyBinaryCrossEntropy(epsilon=0, gamma=2, alpha=0.25, reduction="batchmean"),
    ),
}


@pytest.mark.parametrize("kind", SETS)
def test_losses_of_several_classes_have_timms_values_and_gradients(kind):
    name, arguments, theirs = SETS[kind]
    generator = torch.Generator().manual_seed(3)
    found = []
    for mine in (True, False):
        generator.manual_seed(3)
        logits = (4 * torch.randn(8, CLASSES, generator=generator)).requires_grad_()
        targets = (torch.rand(8, CLASSES, generator=generator) < 0.4).float()
        targets[0] = torch.rand(CLASSES, generator=generator)  # as mixing leaves them
        if mine:
            value = compute(logits, targets, task_loss=name, task_loss_args=arguments)
        else:
            value = theirs(logits, targets)
        value.backward()
        found.append((value.detach(), logits.grad))
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothed_labels_are_timms(smoothing):
    """timm spreads the mass in its loss; here it is done where targets are made."""
    labels, (logits, _) = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]), draw()
    targets = Mixing(TrainSection(label_smoothing=smoothing)).mix_targets(labels, CLASSES, {})
    wanted = BinaryCrossEntropy(smoothing=smoothing)(logits, labels)
    torch.testing.assert_close(compute(logits, targets), wanted, rtol=1e-6, atol=1e-6)


def test_class_weights_weigh_the_softmax_as_in_pytorch():
    logits, targets = draw()
    found = compute(logits, targets, task_loss="softmax", class_weights=WEIGHTS)
    wanted = F.cross_entropy(logits, targets, weight=torch.tensor(WEIGHTS))
    torch.testing.assert_close(found, wanted)
    assert torch.equal(
        compute(logits, targets, task_loss=""), compute(logits, targets, task_loss="softmax")
    )


def test_half_precision_is_computed_in_float32_and_padding_left_out():
    (logits, targets), section = draw(torch.bfloat16), TrainSection(task_loss="bce", bce_sum=True)
    loss, mask = create_class_loss(section, CLASSES), torch.arange(8) < 6
    found = loss(LossInputs(logits, targets, mask=mask))
    wanted = BinaryCrossEntropy(sum_classes=True)(logits[:6].float(), targets[:6])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)


@pytest.mark.xla
def test_on_xla_the_loss_is_one_graph_without_host_fallback():
    torch_xla = pytest.importorskip("torch_xla")
    metrics = pytest.importorskip("torch_xla.debug.metrics")
    device, (logits, targets) = torch_xla.device(), draw()
    section = TrainSection(task_loss="bce", **KINDS["all"][0])
    loss = WeightedLoss(task_loss=create_class_loss(section, CLASSES)).to(device)
    torch_xla.sync(wait=True)
    found = []
    for step in range(3):
        if step == 1:
            metrics.clear_all()
        moved = (logits.detach() * (1 + step)).to(device).requires_grad_()
        total = loss(LossInputs(moved, targets.to(device))).total
        total.backward()
        found.append(total.detach())
        torch_xla.sync(wait=True)
    assert not metrics.counter_value("UncachedCompile")
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []
    wanted = BinaryCrossEntropy(**KINDS["all"][1])(logits, targets)
    torch.testing.assert_close(found[0].cpu(), wanted.detach(), rtol=1e-5, atol=1e-5)
