"""Copies weights into a model: all of its tensors except those that may start anew."""

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


def load_weights(
    model: nn.Module,
    weights: Weights,
    rules: FitRules = STRICT,
    explain: Callable[[TensorDiff], str] = lambda diff: "",
) -> Fit:
    """Copy weights into a model, all or none; tensors that the rules skip keep their values.

    Position embeddings and patches of another size are resampled. For a model on the meta device
    only names and shapes are compared, and tensors are read only if those do not fit. Arguments of
    an own model that change the meaning of tensors (`utils.weights.meaning`) must agree, and norms
    of another convention are converted to the model's. `explain` returns the error and the way out
    for a difference, or "" for the usual text. UserError if they cannot be read, or are of another
    model.
    """
    is_check = any(value.is_meta for value in model.state_dict().values())
    fitted = fit(model, weights, rules, read=not is_check)
    if is_check and len(fitted.misfit(model)):
        fitted = fit(model, weights, rules, read=True)
    diff = fitted.misfit(model)
    if len(diff):
        words = explain(diff) or _explain_other_model(diff, weights.key)
        raise UserError(f"{weights.key} ({weights.path!r}) {words}")
    _compare_meanings(model, weights, rules, fitted)
    if weights.key in (_STUDENT_KEY, _START_KEY):
        own = model.state_dict()
        taken = len(own.keys() & fitted.tensors.keys())
        fitted.notes.append(f"{taken} of {len(own)} tensors start from {weights.location}")
    if not is_check:
        tensors = fitted.get_tensors()
        _refuse_not_finite(model, weights, tensors)
        model.load_state_dict(tensors, strict=False)
        for line in fitted.notes:
            get_logger().info("%s: %s", weights.key, line)
    return fitted


def _refuse_not_finite(model: nn.Module, weights: Weights, tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN, and infinite parameters: a buffer may hold a mask of -inf."""
    parameters = {name for name, _ in model.named_parameters()}
    bad = {name: n for name, t in tensors.items() if (n := _count_bad(t, name in parameters))}
    if bad:
        name, count = next(iter(bad.items()))
        raise UserError(
            f"{weights.key} ({weights.path!r}) holds numbers that are not finite: {count} of "
            f"{tensors[name].numel()} in {name}, in {len(bad)} of {len(tensors)} tensors; use "
            "weights that did not diverge"
        )


def _count_bad(value: Tensor, is_parameter: bool) -> int:
    if not value.is_floating_point():
        return 0
    value = value.float() if value.element_size() == 1 else value  # no isfinite for float8
    return int((~value.isfinite() if is_parameter else value.isnan()).sum())


def find_other_variant(model: nn.Module, facts: JsonMapping, key: str, path: str) -> str:
    """Describe arguments by which a model's tensors mean something else than a checkpoint's."""
    own: TensorMeanings | None = getattr(model, "meanings", None)
    if own is None or (theirs := read_meanings(own, facts, key, path)) is None:
        return ""
    return describe_disagreements(find_disagreements(own, theirs, model.state_dict()))


def _compare_meanings(model: nn.Module, weights: Weights, rules: FitRules, fitted: Fit) -> None:
    """Refuse weights that mean something else, and convert norms of another convention.

    If the rules adapt weights of another model, the differences are only reported.
    """
    own: TensorMeanings | None = getattr(model, "meanings", None)
    if own is None:
        return
    theirs = read_meanings(own, weights.facts, weights.key, weights.path)
    if theirs is None:
        return
    differing = find_disagreements(own, theirs, fitted.tensors)
    is_conversion = own.model != theirs.model and bool(rules.skip or rules.rename)
    if differing and not is_conversion:
        raise UserError(
            f"{weights.key} ({weights.path!r}) {_explain_other_variant(differing, weights.key)}"
        )
    if differing:
        fitted.notes.append(f"of {theirs.model}: {describe_disagreements(differing)}")
    if len(fitted.get_tensors()) == len(fitted.tensors):
        centre_norms(fitted, own, theirs)


def _explain_other_variant(differing: Sequence[Disagreement], key: str) -> str:
    section, way = "model.args", "set the value there"
    if key == _START_KEY:
        names = ", ".join(dict.fromkeys(item.tensors[0] for item in differing))
        way += f", or skip these tensors by run.init_skip: {names}"
    elif key == _STUDENT_KEY:
        way += ", or use run.init_from, which skips by pattern"
    elif key == "distill.teacher_weights":
        section, way = "distill.teachers args", "remove it there: weights have their own"
    return (
        f"is of another variant: {describe_disagreements(differing, section)}, which gives tensors "
        f"of the same names and shapes another meaning; {way}"
    )


def _explain_other_model(diff: TensorDiff, key: str) -> str:
    way = "check the model's name and classes"
    if key == _STUDENT_KEY:
        way += ", or use run.init_from, which renames and skips by pattern"
    elif key == _START_KEY:
        way += ", or skip tensors by run.init_skip, such as head.*"
    return f"is of another model: {diff.summary()}; {way}"
