"""Losses beside their formulas in NumPy: the cases, and both sides of the comparison in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from losses.base import LossInputs
from tests.losses.examples import (
    ARGS,
    create_example_loss,
    create_inputs,
    get_student_tensors,
    map_examples,
)
from tests.losses.feature_references import FEATURE_REFERENCES
from tests.losses.module_references import MODULE_REFERENCES
from tests.losses.references import LOGIT_REFERENCES, Example

REFERENCES = LOGIT_REFERENCES | FEATURE_REFERENCES | MODULE_REFERENCES
# Arguments beside those of the examples, where the formula has further branches.
MORE = (
    ("abkd", {"alpha": 1.0, "beta": 0.0}),
    ("abkd", {"alpha": 0.0, "beta": 0.7}),
    ("abkd", {"alpha": 0.0, "beta": 0.0}),
    ("lskd", {"loss": "kd", "loss_args": {"temperature": 4.0}}),
    ("rld", {"alpha": 0.5, "beta": 8.0}),
    ("cat_kd", {"size": 3}),
    ("crld", {"weak_confidence": 0.0, "strong_confidence": 1.0}),
    ("mgd", {"mask_ratio": 0.5}),
    ("vitkd", {"mask_ratio": 0.8}),
    ("ft", {"paraphrase_steps": 3}),
    ("sdd", {"scales": [1, 4], "temperature": 1.5}),
    ("sskd", {"head_steps": 3, "weights": [0.0, 2.0, 1.0]}),
    ("sskd", {"keep": [0.3, 0.0], "group_size": 3, "temperature": 2.0}),
    ("sskd", {"keep": [1.0, 1.0], "group_size": 2}),
    ("skd", {"tikhonov": 2.0, "direction_weight": 5.0}),
    ("wkd_f", {"grid": 1}),
    ("wkd_l", {"sharpness": 4.0, "entropy": 0.2, "iterations": 3}),
)
CASES = [(name, {}) for name in sorted(REFERENCES)] + list(MORE)


def create_case(name: str, args: dict[str, Any]) -> tuple[torch.nn.Module, LossInputs]:
    """A loss and its inputs in float64."""
    inputs = create_inputs(name, batch=6)
    inputs = map_examples(inputs, lambda x: x.detach().double() if x.is_floating_point() else x)
    loss = create_example_loss(name, **args).double()
    for path, parameter in loss.named_parameters():
        if path.startswith("variances"):  # which start at 0
            torch.nn.init.normal_(parameter, std=0.3)
    if name == "nd":  # earlier steps have seen some of the classes
        torch.nn.init.normal_(loss.sums[1:5])
    if name == "queue_kl":  # a step has left its embeddings, of which the last two now go
        loss(map_examples(inputs, lambda x: x.roll(2, dims=0) * 2 if x.ndim > 1 else x))
        loss.memory.filled[4:6] = False
    return loss, inputs


def describe_turned(
    logits: torch.Tensor, features: Mapping[str, torch.Tensor]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One side of the turned copies."""
    activations = {key: value.detach().numpy() for key, value in features.items()}
    return logits.detach().numpy(), activations


def describe(name: str, args: dict[str, Any], loss: torch.nn.Module, inputs: LossInputs) -> Example:
    """The same for NumPy."""
    return Example(
        logits=inputs.student_logits.detach().numpy(),
        teachers=tuple(one.numpy() for one in inputs.teacher_logits),
        classes=inputs.target_classes().numpy(),
        targets=inputs.targets.numpy(),
        student={key: value.detach().numpy() for key, value in inputs.student_features.items()},
        teacher={key: value.numpy() for key, value in inputs.teacher_features.items()},
        strong=(
            inputs.strong_student_logits.detach().numpy(),
            inputs.strong_teacher_logits[0].numpy(),
        ),
        turned=(
            describe_turned(inputs.turned.student_logits, inputs.turned.student_features),
            describe_turned(inputs.turned.teacher_logits[0], inputs.turned.teacher_features),
        ),
        state={key: value.clone().numpy() for key, value in loss.state_dict().items()},
        args=ARGS[name] | args,
        indices=inputs.example_indices.numpy(),
        noise_key=int(inputs.noise_key),
    )


def compare_values(name: str, args: dict[str, Any]) -> tuple[float, float]:
    """Compute the loss's value and the formula's."""
    loss, inputs = create_case(name, args)
    wanted = REFERENCES[name](describe(name, args, loss, inputs))
    return loss(inputs).item(), float(wanted)


def compare_slopes(name: str, args: dict[str, Any]) -> tuple[float, float]:
    """Compute the slope by the gradient and by finite differences.

    Along one random direction of all that the student gives, its classifier with it.
    """
    loss, inputs = create_case(name, args)
    given = [*get_student_tensors(inputs), inputs.student_features["head.weight"]]
    tensors = [tensor.requires_grad_() for tensor in given]
    numbers = torch.Generator().manual_seed(5)
    steps = [torch.randn(x.shape, generator=numbers, dtype=x.dtype) for x in tensors]
    state = {key: value.clone() for key, value in loss.state_dict().items()}
    grads = torch.autograd.grad(loss(inputs), tensors, allow_unused=True)
    pairs = zip(grads, steps, strict=True)
    slope = sum((grad * step).sum() for grad, step in pairs if grad is not None)

    def compute(size: float) -> float:
        loss.load_state_dict(state)
        with torch.no_grad():
            for tensor, step in zip(tensors, steps, strict=True):
                tensor.add_(size * step)
            value = loss(inputs).item()
            for tensor, step in zip(tensors, steps, strict=True):
                tensor.sub_(size * step)
        return value

    return slope.item(), (compute(1e-6) - compute(-1e-6)) / 2e-6
