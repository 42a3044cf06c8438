"""Brings weights into a model: all that the model has, but for what may start anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from utils.checkpoint.fit import TensorDiff
from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.log import get_logger
from utils.weights.fitting import STRICT, Fit, FitRules, fit
from utils.weights.meaning import (
    Disagreement,
    TensorMeanings,
    centre_norms,
    describe_disagreements,
    find_disagreements,
    read_meanings,
)
from utils.weights.source import Weights

_STUDENT_KEY, _START_KEY = "model.weights", "run.init_from"
_TEACHER_KEY = "distill.teacher_weights"


def load_weights(
    model: nn.Module,
    weights: Weights,
    rules: FitRules = STRICT,
    explain: Callable[[TensorDiff], str] = lambda diff: "",
) -> Fit:
    """Copy weights into a model, all or none; what the rules leave out keeps its start.

    Position embeddings and patches of another size are resampled. Of a model on the meta device
    only names and shapes are compared, and no tensor is read where they fit as they are. What
    arguments of an own model give to tensors of the same names and shapes (`utils.weights.meaning`)
    must be alike, and norms of another convention are turned into the model's.

    Args:
      explain: says what is wrong, and the way out, where it knows more than names; else nothing.

    Returns:
      What was taken and what was changed on the way.

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
    _settle_meaning(model, weights, rules, found)
    if weights.key in (_STUDENT_KEY, _START_KEY):
        own = model.state_dict()
        taken = len(own.keys() & found.tensors.keys())
        found.notes.append(f"{taken} of {len(own)} tensors start from {weights.location}")
    if not is_check:
        _refuse_not_finite(model, weights, found.tensors)
        model.load_state_dict(found.tensors, strict=False)
        for line in found.notes:
            get_logger().info("%s: %s", weights.key, line)
    return found


def _refuse_not_finite(model: nn.Module, weights: Weights, tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN, and infinite parameters: a buffer may hold a mask of -inf.

    Raises:
      UserError: names the first such tensor.
    """
    parameters = {name for name, _ in model.named_parameters()}
    bad = {name: n for name, one in tensors.items() if (n := _count_bad(one, name in parameters))}
    if bad:
        name, count = next(iter(bad.items()))
        raise UserError(
            f"{weights.key} ({weights.path!r}) holds numbers that are not finite: {count} of "
            f"{tensors[name].numel()} in {name}, in {len(bad)} of {len(tensors)} tensors; give "
            "weights that did not diverge"
        )


def _count_bad(value: Tensor, is_parameter: bool) -> int:
    if not value.is_floating_point():
        return 0
    value = value.float() if value.element_size() == 1 else value  # torch has no test of float8
    return int((~value.isfinite() if is_parameter else value.isnan()).sum())


def find_other_variant(model: nn.Module, facts: JsonMapping, key: str, path: str) -> str:
    """What arguments give all tensors of a model another meaning than a checkpoint's facts tell.

    Raises:
      UserError: the checkpoint tells arguments that its model does not take.
    """
    own: TensorMeanings | None = getattr(model, "meanings", None)
    theirs = None if own is None else read_meanings(own, facts, key, path)
    if own is None or theirs is None:
        return ""
    return describe_disagreements(find_disagreements(own, theirs, model.state_dict()))


def _settle_meaning(model: nn.Module, weights: Weights, rules: FitRules, found: Fit) -> None:
    """Refuse weights that mean something else, and turn norms of another convention.

    Weights of another model that rules make fit are a conversion, whose arguments are told alone.

    Raises:
      UserError: names the arguments.
    """
    own: TensorMeanings | None = getattr(model, "meanings", None)
    if own is None:
        return
    theirs = read_meanings(own, weights.facts, weights.key, weights.path)
    if theirs is None:
        return
    differing = find_disagreements(own, theirs, found.tensors)
    is_conversion = own.model != theirs.model and bool(rules.skip or rules.rename)
    if differing and not is_conversion:
        raise UserError(
            f"{weights.key} ({weights.path!r}) {_explain_other_variant(differing, weights.key)}"
        )
    if differing:
        found.notes.append(f"of {theirs.model}: {describe_disagreements(differing)}")
    if all(isinstance(one, Tensor) for one in found.tensors.values()):
        centre_norms(found, own, theirs)


def _explain_other_variant(differing: Sequence[Disagreement], key: str) -> str:
    section, way = "model.args", "set what is there"
    if key == _START_KEY:
        names = ", ".join(dict.fromkeys(one.tensors[0] for one in differing))
        way += f", or leave what that concerns out by run.init_skip, as {names}"
    elif key == _STUDENT_KEY:
        way += ", or start by run.init_from, which leaves out by pattern"
    elif key == _TEACHER_KEY:
        section, way = "distill.teachers args", "leave it out there, as weights tell their own"
    return (
        f"is of another variant: {describe_disagreements(differing, section)}, which gives tensors "
        f"of the same names and shapes another meaning; {way}"
    )


def _explain_other_model(diff: TensorDiff, key: str) -> str:
    way = "check the model's name and classes"
    if key == _STUDENT_KEY:
        way += ", or start by run.init_from, which renames and leaves out by pattern"
    elif key == _START_KEY:
        way += ", or name what may keep its start by run.init_skip, as head.*"
    return f"is of another model: {diff.summary()}; {way}"
