"""Adapts weights to a model: renames, resamples to its size, drops a head of other classes."""

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

# Names of the head in own models; timm's declare theirs.
_HEADS = ("head", "fc", "fc2", "classifier")
# Names of timm's functions that adapt a family's weights to another size.
_FILTERS = ("checkpoint_filter_fn", "_filter_fn")
_COUNTER = "num_batches_tracked"  # of BatchNorm


@dataclass(frozen=True)
class FitRules:
    """Allowed differences between weights and the model that loads them."""

    # Patterns of names that keep their initial values: missing, foreign or of another shape.
    skip: tuple[str, ...] = ()
    # Pattern of a name in the weights -> the model's.
    rename: Mapping[str, str] = field(default_factory=dict)
    # Auto: initialise the head anew if the classes differ in number or names; always; never: refuse
    # other classes; by_name: as never, but reorder the rows of the same classes.
    reset_head: Literal["auto", "always", "never", "by_name"] = "never"
    class_names: tuple[str, ...] | None = None  # of the model, or None if unknown


STRICT = FitRules()


@dataclass
class Fit:
    """The weights that a model takes."""

    tensors: dict[str, Tensor | Kind]  # by the model's names; only their kinds in a check
    kept: set[str] = field(default_factory=set)  # names of the model that keep their initial values
    notes: list[str] = field(default_factory=list)  # a line for each change
    # Name of the model -> its name in the weights.
    sources: dict[str, str] = field(default_factory=dict)
    warning: str = ""  # a warning that classes are matched by number, or empty

    def get_tensors(self) -> dict[str, Tensor]:
        """Return the tensors; empty in a check, which has kinds alone."""
        return {k: v for k, v in self.tensors.items() if isinstance(v, Tensor)}

    def misfit(self, model: nn.Module) -> TensorDiff:
        """Compare the tensors with those that the model needs."""
        own = {k: v for k, v in model.state_dict().items() if k not in self.kept}
        return compare_tensors(own, self.tensors, exact=False)


def fit(model: nn.Module, weights: Weights, rules: FitRules, *, read: bool) -> Fit:
    """Adapt weights to a model by the rules; without `read`, compare kinds and resample nothing."""
    raw = weights.get_tensors(model) if read else weights.get_kinds(model)
    own = model.state_dict()
    if rules.rename:
        check_rules("run.init_rename", rules.rename, raw)
    sources = {rename(name, rules.rename): name for name in raw}
    fitted = Fit({name: raw[source] for name, source in sources.items()}, sources=sources)
    if rules.skip:
        check_patterns("run.init_skip", rules.skip, [*own, *fitted.tensors])
        fitted.kept |= {name for name in own if matches(name, rules.skip)}
        fitted.tensors = {k: v for k, v in fitted.tensors.items() if not matches(k, rules.skip)}
    # Older files lack them, and nothing but a cumulative average reads them.
    fitted.kept |= {name for name in own if name.endswith(_COUNTER) and name not in fitted.tensors}
    _renew_head(model, fitted, rules, weights)
    if read and len(fitted.misfit(model)):
        _resample(model, fitted)
        _adapt_channels(model, fitted)
    return fitted


def list_head_names(model: nn.Module) -> list[str]:
    """Return the names of the tensors of a model's head, which maps features to classes."""
    heads = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or _HEADS
    heads = (heads,) if isinstance(heads, str) else heads
    starts = tuple(f"{head}." for head in heads)
    return [name for name in model.state_dict() if name.startswith(starts)]


def _renew_head(model: nn.Module, fitted: Fit, rules: FitRules, weights: Weights) -> None:
    """Drop the head if the rules say so, or if it has other classes that they allow."""
    own = model.state_dict()
    heads = [name for name in list_head_names(model) if name not in fitted.kept]
    if not heads:
        return
    counts = {get_kind(fitted.tensors[name])[0][:1] for name in heads if name in fitted.tensors}
    (count,) = own[heads[0]].shape[:1]
    if rules.reset_head == "always":
        reason = "model.reset_head is always"
    elif counts != {(count,)}:
        if rules.reset_head != "auto":
            return
        there = " and ".join(str(shape[0]) for shape in sorted(counts) if shape)
        reason = f"that of the weights has {there or 'other'} classes"
    else:
        reason = _compare_names(fitted, heads, rules, weights)
    if not reason:
        return
    fitted.kept |= set(heads)
    fitted.tensors = {name: value for name, value in fitted.tensors.items() if name not in heads}
    fitted.notes.append(f"the head starts anew with {count} classes ({', '.join(heads)}): {reason}")


def _compare_names(fitted: Fit, heads: Sequence[str], rules: FitRules, weights: Weights) -> str:
    """Return why a head with as many classes is initialised anew; empty if it is not.

    Rows of the same classes in another order are moved if the rules say so.
    """
    own = ClassSide("the run's data", rules.class_names)
    count = get_kind(fitted.tensors[heads[0]])[0][0]
    theirs = ClassSide(
        f"{weights.key} ({weights.path!r})",
        read_class_names(weights.facts, count, is_public=is_shared(weights.path)),
    )
    anew = "set model.reset_head=always to initialise the head anew"
    if rules.reset_head == "by_name":
        rows = list(map_classes_by_name(own, theirs, anew))
        if rows != list(range(count)):
            values = {name: fitted.tensors[name] for name in heads}
            fitted.tensors |= {n: v[rows] for n, v in values.items() if isinstance(v, Tensor)}
            fitted.notes.append(f"the head's rows are moved to their {count} classes by name")
        return ""
    fitted.warning = describe_one_sided(own, theirs)
    outcome = match_class_names(own.names, theirs.names).outcome
    if outcome == "other" and rules.reset_head == "auto":
        return describe_difference(own, theirs)
    if outcome in ("other", "permuted"):
        by_name = f"set model.reset_head=by_name to move its rows; or {anew}"
        require_same_classes(own, theirs, way=anew, by_name=by_name)
    return ""


def _resample(model: nn.Module, fitted: Fit) -> None:
    """Resample positions and patches to the model's size by timm, as for its own weights."""
    module = sys.modules[type(model).__module__]
    change = next((getattr(module, name) for name in _FILTERS if hasattr(module, name)), None)
    if change is None:
        return
    try:
        changed: dict[str, Tensor] = change(dict(fitted.tensors), model)
    except (KeyError, RuntimeError, ValueError, AttributeError, AssertionError, TypeError):
        return  # another family: the error names what does not fit
    before = fitted.tensors
    resampled = Fit({k: v for k, v in changed.items() if k not in fitted.kept}, fitted.kept)
    if len(resampled.misfit(model)) < len(fitted.misfit(model)):
        fitted.tensors = resampled.tensors
        fitted.notes += [
            f"{name} is resampled from {get_kind(before[name])[0]} to {tuple(value.shape)}"
            for name, value in changed.items()
            if name in before and get_kind(before[name])[0] != tuple(value.shape)
        ]


def _adapt_channels(model: nn.Module, fitted: Fit) -> None:
    """Sum or repeat the first layer's filters if the images have other channels."""
    first = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv") or ()
    for layer in (first,) if isinstance(first, str) else first:
        name, own = f"{layer}.weight", model.state_dict()
        value = fitted.tensors.get(name)
        if not isinstance(value, Tensor) or name not in own or value.ndim != 4:
            continue
        old, new = value.shape[1], own[name].shape[1]
        if old == 3 and new != 3 and value.shape[2:] == own[name].shape[2:]:
            fitted.tensors[name] = adapt_input_conv(new, value)
            fitted.notes.append(f"{name} is converted from {old} input channels to {new}")
