"""Brings weights into a model: all that the model has, but for what may start anew."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from utils.checkpoint import TensorDiff
from utils.errors import UserError
from utils.log import get_logger
from utils.weights.fitting import STRICT, FitRules, fit
from utils.weights.source import Weights

_STUDENT_KEY, _START_KEY = "model.weights", "run.init_from"


def load_weights(
    model: nn.Module,
    weights: Weights,
    rules: FitRules = STRICT,
    explain: Callable[[TensorDiff], str] = lambda diff: "",
) -> None:
    """Copy weights into a model, all or none; what the rules leave out keeps its start.

    Position embeddings and patches of another size are resampled. Of a model on the meta device
    only names and shapes are compared, and no tensor is read where they fit as they are.

    Args:
      explain: says what is wrong, and the way out, where it knows more than names; else nothing.

    Raises:
      UserError: they cannot be read, or are of another model.
    """
    is_check = any(value.is_meta for value in model.state_dict().values())
    found = fit(model, weights, rules, read=not is_check)
    if is_check and len(found.misfit(model)):
        found = fit(model, weights, rules, read=True)
    diff = found.misfit(model)
    if len(diff):
        words = explain(diff) or _explain_other_model(diff, weights.key)
        raise UserError(f"{weights.key} ({weights.path!r}) {words}")
    if is_check:
        return
    model.load_state_dict(found.tensors, strict=False)
    for line in found.notes:
        get_logger().info("%s: %s", weights.key, line)
    if weights.key == _START_KEY:
        get_logger().info(
            "%d of %d tensors start from %s",
            len(found.tensors), len(model.state_dict()), weights.location,
        )  # fmt: skip


def _explain_other_model(diff: TensorDiff, key: str) -> str:
    way = "check the model's name and classes"
    if key == _STUDENT_KEY:
        way += ", or start by run.init_from, which renames and leaves out by pattern"
    elif key == _START_KEY:
        way += ", or name what may keep its start by run.init_skip, as head.*"
    return f"is of another model: {diff.summary()}; {way}"
