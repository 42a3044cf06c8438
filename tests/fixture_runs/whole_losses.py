"""Runs a case that names arguments, layers and parameters as the loss itself names them.

Roles of such a case: `s`, `t`, `s_strong`, `t_strong` logits; `y` classes; `f_s...` and `head...`
activations and parameters of the student, `f_t...` and `fc...` of the teacher, by module path;
`turned/...` the same of the turned copies; `state/PATH` a buffer of the loss; `parameters` all its
parameters in one row, in the order and shapes of the case's `parameters`; `indices` and `noise_key`
of the step. Its `hyper` are the arguments of `create_loss`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import functional_call

from losses.base import Loss, LossInputs, Turned
from losses.factory import create_loss
from tests.fixture_runs.cases import Case, Result, get_targets

STATE, TURNED = "state/", "turned/"
SIDES = {"student": ("f_s", "head."), "teacher": ("f_t", "fc.")}


def run_whole(case: Case) -> Result:
    """Create the loss with the case's parameters and compute the value."""
    loss = build(case, create_loss(case.record["loss"], case.record["hyper"]))
    return functional_call(loss, split_parameters(case), (collect_inputs(case),)), {}


def build(case: Case, loss: Loss) -> Loss:
    """Make the loss's modules from the shapes and copy the case's buffers into them.

    Raises:
      KeyError: the case lacks a parameter of the loss, which would be random, or has another.
    """
    shapes = {role: tuple(entry["shape"]) for role, entry in case.record["inputs"].items()}
    loss.build(shapes, shapes)
    loss = loss.to(case.device, case.dtype)
    own = {path for path, _ in loss.named_parameters()}
    if own ^ case.record.get("parameters", {}).keys():
        raise KeyError(f"the loss has the parameters {', '.join(sorted(own))}")
    for role in case.record["inputs"]:
        if role.startswith(STATE):
            loss.get_buffer(role.removeprefix(STATE)).copy_(case.tensor(role))
    return loss


def split_parameters(case: Case) -> dict[str, Tensor]:
    """The parameters by path, views of the role `parameters` that carry its gradient."""
    shapes = case.record.get("parameters", {})
    if not shapes:
        return {}
    parts = case.tensor("parameters").split([math.prod(shape) for shape in shapes.values()])
    pairs = zip(shapes.items(), parts, strict=True)
    return {path: part.reshape(shape) for (path, shape), part in pairs}


def collect_inputs(case: Case) -> LossInputs:
    """Everything that the case has, where `LossInputs` keeps it; zeros for absent logits."""
    features = {side: collect_side(case, side) for side in SIDES}
    examples = len(next(iter(features["student"].values()), torch.empty(0)))
    zeros = torch.zeros(examples, 2, dtype=case.dtype, device=case.device)
    student = case.tensor("s") if case.has("s") else zeros
    targets = get_targets(case, student)
    turned = None
    if case.has(TURNED + "s"):
        turned = Turned(
            case.tensor(TURNED + "s"),
            (case.tensor(TURNED + "t"),),
            collect_side(case, "student", TURNED),
            collect_side(case, "teacher", TURNED),
        )
    return LossInputs(
        student,
        targets,
        targets.argmax(dim=-1),
        teacher_logits=(case.tensor("t") if case.has("t") else zeros,),
        student_features=features["student"],
        teacher_features=features["teacher"],
        strong_student_logits=case.tensor("s_strong") if case.has("s_strong") else None,
        strong_teacher_logits=(case.tensor("t_strong"),) if case.has("t_strong") else (),
        turned=turned,
        example_indices=case.tensor("indices") if case.has("indices") else None,
        noise_key=case.tensor("noise_key") if case.has("noise_key") else None,
    )


def collect_side(case: Case, side: str, prefix: str = "") -> dict[str, Tensor]:
    """Activations and parameters of one side by module path."""
    starts = tuple(prefix + start for start in SIDES[side])
    roles = [role for role in case.record["inputs"] if role.startswith(starts)]
    return {role.removeprefix(prefix): case.tensor(role) for role in roles}
