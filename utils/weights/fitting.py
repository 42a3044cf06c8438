"""Makes weights fit a model: renamed, resampled to its size, without the head of other classes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from timm.models import adapt_input_conv
from torch import Tensor, nn

from utils.checkpoint.fit import Kind, TensorDiff, compare_tensors, get_kind
from utils.patterns import check_patterns, check_rules, matches, rename
from utils.weights.class_names import (
    ClassSide,
    describe_difference,
    describe_one_sided,
    map_classes_by_name,
    match_class_names,
    read_class_names,
    require_same_classes,
)
from utils.weights.hub import is_shared
from utils.weights.source import Weights

# Names that a model of the house's own gives its head; timm's say so themselves.
_HEADS = ("head", "fc", "fc2", "classifier")
# What timm calls the functions with which a family of models reads weights of another size.
_FILTERS = ("checkpoint_filter_fn", "_filter_fn")
_COUNTER = "num_batches_tracked"  # of BatchNorm


@dataclass(frozen=True)
class FitRules:
    """How weights may differ from the model that is to have them.

    Args:
      skip: patterns of names that keep their start: missing, foreign or of another shape.
      rename: pattern of a name in the weights -> the model's.
      reset_head: auto: the head starts anew where the classes are others, by their number or their
        names; always; never: other classes are another model; by_name: as never, but the rows of
        the same classes in another order are moved to their classes.
      class_names: of the model, or None if unknown.
    """

    skip: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    reset_head: Literal["auto", "always", "never", "by_name"] = "never"
    class_names: tuple[str, ...] | None = None


STRICT = FitRules()


@dataclass
class Fit:
    """What of some weights a model takes.

    Args:
      tensors: by the model's names; of a check only their kinds.
      kept: names of the model that keep their start.
      notes: a line for each thing that was changed on the way.
      sources: name of the model -> its name in the weights.
      warning: that the head's classes are matched by number alone; empty if there is none.
    """

    tensors: dict[str, Tensor | Kind]
    kept: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    warning: str = ""

    def misfit(self, model: nn.Module) -> TensorDiff:
        """What still keeps them from fitting."""
        own = {k: v for k, v in model.state_dict().items() if k not in self.kept}
        return compare_tensors(own, self.tensors, exact=False)


def fit(model: nn.Module, weights: Weights, rules: FitRules, *, read: bool) -> Fit:
    """What of the weights a model takes by the rules; nothing is copied.

    Args:
      read: whether tensors are read; else kinds alone are compared, and nothing is resampled.

    Raises:
      UserError: the weights cannot be read, or a pattern matches nothing.
    """
    raw = weights.get_tensors(model) if read else weights.get_kinds(model)
    own = model.state_dict()
    if rules.rename:
        check_rules("run.init_rename", rules.rename, raw)
    sources = {rename(name, rules.rename): name for name in raw}
    found = Fit({name: raw[source] for name, source in sources.items()}, sources=sources)
    if rules.skip:
        check_patterns("run.init_skip", rules.skip, [*own, *found.tensors])
        found.kept |= {name for name in own if matches(name, rules.skip)}
        found.tensors = {k: v for k, v in found.tensors.items() if not matches(k, rules.skip)}
    # Older files lack them, and nothing but a cumulative average reads them.
    found.kept |= {name for name in own if name.endswith(_COUNTER) and name not in found.tensors}
    _renew_head(model, found, rules, weights)
    if read and len(found.misfit(model)):
        _resample(model, found)
        _adapt_channels(model, found)
    return found


def list_head_names(model: nn.Module) -> list[str]:
    """Names of the tensors of a model's head, which turns features into classes."""
    said = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or _HEADS
    heads = (said,) if isinstance(said, str) else said
    starts = tuple(f"{head}." for head in heads)
    return [name for name in model.state_dict() if name.startswith(starts)]


def _renew_head(model: nn.Module, found: Fit, rules: FitRules, weights: Weights) -> None:
    """Let the head keep its start where that is asked for, or where it is one of other classes.

    Raises:
      UserError: the weights' classes have other names or another order, which the rules refuse.
    """
    own = model.state_dict()
    heads = [name for name in list_head_names(model) if name not in found.kept]
    if not heads:
        return
    counts = {get_kind(found.tensors[name])[0][:1] for name in heads if name in found.tensors}
    (count,) = own[heads[0]].shape[:1]
    if rules.reset_head == "always":
        reason = "model.reset_head is always"
    elif counts != {(count,)}:
        if rules.reset_head != "auto":
            return
        there = " and ".join(str(one[0]) for one in sorted(counts) if one)
        reason = f"the weights' is of {there or 'other'} classes"
    else:
        reason = _compare_names(found, heads, rules, weights)
    if not reason:
        return
    found.kept |= set(heads)
    found.tensors = {name: value for name, value in found.tensors.items() if name not in heads}
    found.notes.append(f"the head starts anew with {count} classes ({', '.join(heads)}): {reason}")


def _compare_names(found: Fit, heads: Sequence[str], rules: FitRules, weights: Weights) -> str:
    """Why a head of as many classes starts anew, by their names; empty if it does not.

    Rows of the same classes in another order are moved where the rules say so.
    """
    own = ClassSide("the run's data", rules.class_names)
    count = get_kind(found.tensors[heads[0]])[0][0]
    theirs = ClassSide(
        f"{weights.key} ({weights.path!r})",
        read_class_names(weights.facts, count, is_public=is_shared(weights.path)),
    )
    anew = "set model.reset_head=always, and the head starts anew"
    if rules.reset_head == "by_name":
        rows = list(map_classes_by_name(own, theirs, anew))
        if rows != list(range(count)):
            found.tensors |= {name: _take_rows(found.tensors[name], rows) for name in heads}
            found.notes.append(f"the head's rows are moved to their {count} classes by name")
        return ""
    found.warning = describe_one_sided(own, theirs)
    outcome = match_class_names(own.names, theirs.names).outcome
    if outcome == "other" and rules.reset_head == "auto":
        return describe_difference(own, theirs)
    if outcome in ("other", "permuted"):
        by_name = f"set model.reset_head=by_name, and its rows are moved; or {anew}"
        require_same_classes(own, theirs, way=anew, by_name=by_name)
    return ""


def _take_rows(value: Tensor | Kind, rows: Sequence[int]) -> Tensor | Kind:
    return value[list(rows)] if isinstance(value, Tensor) else value


def _resample(model: nn.Module, found: Fit) -> None:
    """Have timm fit positions and patches to the model's size, as it does for its own weights."""
    module = sys.modules[type(model).__module__]
    change = next((getattr(module, name) for name in _FILTERS if hasattr(module, name)), None)
    if change is None:
        return
    try:
        changed = change(dict(found.tensors), model)
    except (KeyError, RuntimeError, ValueError, AttributeError, AssertionError, TypeError):
        return  # of another family: what does not fit is told name by name
    notes = [*found.notes, *_describe_changes(found.tensors, changed)]
    better = Fit(changed, found.kept, notes)
    better.tensors = {k: v for k, v in changed.items() if k not in found.kept}
    if len(better.misfit(model)) < len(found.misfit(model)):
        found.tensors, found.notes = better.tensors, better.notes


def _describe_changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name} is resampled from {tuple(before[name].shape)} to {tuple(value.shape)}"
        for name, value in after.items()
        if name in before and before[name].shape != value.shape
    ]


def _adapt_channels(model: nn.Module, found: Fit) -> None:
    """Sum or repeat the first layer's filters where the images have other channels."""
    first = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv") or ()
    for layer in (first,) if isinstance(first, str) else first:
        name, own = f"{layer}.weight", model.state_dict()
        value = found.tensors.get(name)
        if value is None or name not in own or value.ndim != 4:
            continue
        old, new = value.shape[1], own[name].shape[1]
        if old == 3 and new != 3 and value.shape[2:] == own[name].shape[2:]:
            found.tensors[name] = adapt_input_conv(new, value)
            found.notes.append(f"{name} is turned from {old} input channels to {new}")
