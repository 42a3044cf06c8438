"""Brings weights into a model: all of them or none, or those that fit."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from utils.checkpoint import TensorDiff, compare_tensors, copy_tensors
from utils.errors import UserError
from utils.log import get_logger
from utils.weights.source import Weights

_STUDENT_KEY = "model.weights"


def load_weights(
    model: nn.Module, weights: Weights, explain: Callable[[TensorDiff], str] = lambda diff: ""
) -> None:
    """Copy weights into a model, all or none; every name and shape must fit.

    Of a model on the meta device only names and shapes are compared, and no tensor is read.

    Args:
      explain: says what is wrong, and the way out, where it knows more than names; else nothing.

    Raises:
      UserError: they cannot be read, or are of another model.
    """
    own = model.state_dict()
    is_check = any(value.is_meta for value in own.values())
    tensors = {} if is_check else weights.read_tensors()
    diff = compare_tensors(own, weights.kinds if is_check else tensors, exact=False)
    if len(diff):
        words = explain(diff) or _explain_other_model(diff, weights.key)
        raise UserError(f"{weights.key} ({weights.path!r}) {words}")
    if not is_check:
        model.load_state_dict(tensors, strict=True)


def check_fitting(model: nn.Module, weights: Weights, tolerance: float) -> None:
    """Refuse weights of which too large a share does not fit a model, without reading a tensor.

    Raises:
      UserError: more than `tolerance` times the model's tensors do not fit.
    """
    own = model.state_dict()
    diff = compare_tensors(own, weights.kinds, exact=False)
    if len(diff) <= tolerance * len(own):
        return
    for line in diff.lines():
        get_logger().error("%s: %s", weights.key, line)
    raise UserError(
        f"{weights.key} ({weights.path!r}) does not fit the model: {diff.summary()}; that is more "
        f"than run.init_tolerance ({tolerance:g}) of its {len(own)} tensors: choose weights of "
        "this model, or raise run.init_tolerance"
    )


def load_fitting(model: nn.Module, weights: Weights) -> TensorDiff:
    """Copy the weights that fit into a model; what does not keeps its start, and is logged.

    Raises:
      UserError: they cannot be read.
    """
    own, tensors = model.state_dict(), weights.read_tensors()
    diff = compare_tensors(own, tensors, exact=False)
    for line in diff.lines():
        get_logger().info("%s: %s", weights.key, line)
    fitting = [name for name in own if name in tensors and name not in diff.different]
    copy_tensors({name: own[name] for name in fitting}, tensors)
    get_logger().info("%d of %d tensors start from %s", len(fitting), len(own), weights.location)
    return diff


def _explain_other_model(diff: TensorDiff, key: str) -> str:
    way = "check the model's name and classes"
    if key == _STUDENT_KEY:
        way += (
            ", or start from the tensors that fit: run.init_from instead, with "
            "run.init_tolerance for the share that may not"
        )
    return f"is of another model: {diff.summary()}; {way}"
