"""Sets of images for evaluation: where they lie, and what their labels mean to a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from big_vision.input.catalog import join_path, list_directory, open_root
from big_vision.input.images.labelled import ImageFacts
from big_vision.input.selection import warn_of_left_out
from big_vision.input.source import require_facts
from big_vision.pp.device_ops import require_equal_ranges
from datasets import create_source
from utils.config.data import DataSection, EvalSection
from utils.errors import UserError, get_hint
from utils.json_types import JsonValue
from utils.log import get_logger
from utils.storage.places import open_folder
from utils.weights.class_names import ClassSide, match_class_names, warn_if_one_sided

SEVERITIES = (1, 2, 3, 4, 5)
# Corruption -> AlexNet's error, mean over the five severities.
# Source: Hendrycks and Dietterich 2019, arXiv:1903.12261, table 1, in the digits of their code.
CORRUPTIONS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}


def compute_corruption_errors(top1: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Compute errors in percent of AlexNet's, of each corruption with top-1 of all five severities.

    Source: Hendrycks and Dietterich 2019, arXiv:1903.12261, section 4.2.
    """
    computed = {}
    for name, alexnet in CORRUPTIONS.items():
        errors = [1.0 - top1[name, s] / 100.0 for s in SEVERITIES if (name, s) in top1]
        if len(errors) == len(SEVERITIES):
            computed[name] = 100.0 * sum(errors) / len(errors) / alexnet
    return computed


def compute_mce(errors: Mapping[str, float]) -> float | None:
    """Compute the mean corruption error in percent; None if a corruption is missing."""
    if set(errors) != set(CORRUPTIONS):
        return None
    return sum(errors.values()) / len(errors)


Choice = Literal["named", "present", "all"]
_CORRUPTED = "imagenet2012_corrupted"


@dataclass(frozen=True)
class KnownSet:
    """A public set in TFDS; `classes` compete for an output as in the set's own publication."""

    dataset: str
    split: str
    label_key: str = "label"
    classes: Choice = "named"


KNOWN_SETS = {
    "imagenet": KnownSet("imagenet2012", "validation"),
    "imagenet_v2": KnownSet("imagenet_v2/matched-frequency", "test"),
    "imagenet_real": KnownSet("imagenet2012_real", "validation", "real_label"),
    # Of 200 classes each, though TFDS names all 1000.
    "imagenet_a": KnownSet("imagenet_a", "test", classes="present"),
    "imagenet_r": KnownSet("imagenet_r", "test", classes="present"),
    "imagenet_sketch": KnownSet("imagenet_sketch", "test"),
    "imagenet_c": KnownSet(_CORRUPTED, "validation"),
}


@dataclass(frozen=True)
class ModelClasses:
    """Classes of a model's outputs, with names in their order if known."""

    count: int
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SetSpec:
    """Location of a set and how it is evaluated."""

    key: str  # of the configuration, for errors
    name: str
    group: str  # its name in the configuration: one group may be many sets
    data: DataSection  # with the set as its evaluation split
    classes: Choice
    class_map: str = ""
    every: int = 1
    # Name and severity; None unless it is a set of ImageNet-C.
    corruption: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluatedSet:
    """Metadata of a set, for one model."""

    spec: SetSpec
    num_examples: int
    to_model: np.ndarray  # [classes of the set] int64, the model's class for each, or -1
    several: bool  # whether an example may have several correct labels, or none
    image_shape: tuple[int, int, int] | None  # (H, W, C); None if only a loader can tell
    class_names: tuple[str, ...] | None = None  # of the set, or None if it has none


def plan_sets(data: DataSection, sections: Sequence[EvalSection], key: str) -> list[SetSpec]:
    """List the sets of some sections of `key`; of all data it reads only ImageNet-C's folders.

    UserError for a name that is given twice, or an unknown one.
    """
    names = [section.name for section in sections]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{key}: two sets have the name {twice!r}; use different names")
    return [spec for section in sections for spec in _plan(data, section, key)]


def change_data(data: DataSection, **values: JsonValue) -> DataSection:
    """Return the section with other values, checked again, and without sets of its own."""
    return DataSection.model_validate({**data.model_dump(), **values, "evals": ()})


def describe_sets(
    specs: Sequence[SetSpec], model: ModelClasses, eval_pp: str
) -> tuple[EvaluatedSet, ...]:
    """Describe each set; warn once for each group whose classes are matched by number alone."""
    sets = tuple(look_at(spec, model, eval_pp) for spec in specs)
    for shown in {shown.spec.group: shown for shown in sets}.values():
        if not shown.spec.class_map:
            warn_if_one_sided(
                ClassSide("the model", model.names),
                ClassSide(f"{shown.spec.key} {shown.spec.group!r}", shown.class_names),
            )
    return sets


def look_at(spec: SetSpec, model: ModelClasses, eval_pp: str) -> EvaluatedSet:
    """Describe a set by its metadata; only its pixels' final range must agree with `eval_pp`.

    UserError if the set is missing, or its labels do not fit the model.
    """
    try:
        require_equal_ranges(eval_pp, spec.data.eval_pp)
        source = create_source(spec.data, {"num_classes": model.count})
        selection = source.select("eval")
        facts = require_facts(source.describe(selection, "eval"), ImageFacts, spec.data.source)
        to_model = map_classes(spec, ModelClasses(facts.num_classes, facts.class_names), model)
    except UserError as error:
        raise UserError(f"{spec.key} {spec.name!r}: {error}") from error
    warn_of_left_out(f"{spec.key} {spec.name!r}", selection)
    return EvaluatedSet(
        spec=spec,
        num_examples=selection.num_examples,
        to_model=to_model,
        several=facts.several_labels,
        image_shape=facts.image_shape,
        class_names=facts.class_names,
    )


def map_classes(spec: SetSpec, mine: ModelClasses, model: ModelClasses) -> np.ndarray:
    """Return [classes of the set] int64: the model's class for each, or -1 for none.

    By the given map, else by names, else by numbers if there are as many.
    """
    if not spec.class_map:
        return match_classes(mine, model)
    to_model = _read_map(spec.class_map, mine.count, model.count)
    if (to_model < 0).all():
        raise UserError(f"class_map ({spec.class_map!r}) leaves out every class; correct it")
    return to_model


def match_classes(mine: ModelClasses, model: ModelClasses) -> np.ndarray:
    """Return [classes] int64: the model's class for each, by names, or by equal numbers.

    UserError for a class that the model does not have, or that cannot be matched.
    """
    match = match_class_names(mine.names, model.names)
    if match.missing:
        near = get_hint(match.missing[0], (model.names or ())[:20])
        raise UserError(
            f"{len(match.missing)} of its {mine.count} classes are unknown to the model, first "
            f"{match.missing[0]!r} ({near}); set class_map"
        )
    if match.ambiguous:
        raise UserError(
            f"its class {match.ambiguous[0]!r} is the name of several of the model's classes; set "
            "class_map"
        )
    if match.numbers:
        return np.array(match.numbers, np.int64)
    if mine.count != model.count:
        raise UserError(
            f"it has {mine.count} classes and the model {model.count}, without names on both "
            "sides; set class_map"
        )
    return np.arange(mine.count, dtype=np.int64)


def _plan(data: DataSection, section: EvalSection, key: str) -> list[SetSpec]:
    known = KNOWN_SETS.get(section.name)
    if known is None and not (section.dataset or section.source or section.root or section.split):
        raise UserError(
            f"{key}: unknown set {section.name!r}, which has no dataset, root or split; "
            f"{get_hint(section.name, KNOWN_SETS)}"
        )
    name = section.dataset or (known.dataset if known else data.name)
    values = {
        "source": section.source or ("tfds" if known else data.source),
        "name": name,
        "root": section.root or data.root,
        "eval_split": section.split or (known.split if known else data.eval_split),
        "eval_pp": section.pp or data.eval_pp,
        "label_key": section.label_key or (known.label_key if known else data.label_key or "label"),
    }
    default = known.classes if known else "named"
    plain = SetSpec(
        key=key,
        name=section.name,
        group=section.name,
        data=change_data(data, **values),
        classes=default if section.classes == "auto" else section.classes,
        class_map=section.class_map,
        every=section.every,
    )
    if name != _CORRUPTED:
        return [plain]
    return [
        replace(
            plain,
            name=f"{section.name}/{corruption}_{severity}",
            data=change_data(data, **{**values, "name": f"{name}/{corruption}_{severity}"}),
            corruption=(corruption, severity),
        )
        for corruption, severity in _list_corrupted(values["root"], key)
    ]


def _list_corrupted(root: str, key: str) -> list[tuple[str, int]]:
    """List the available corruptions and severities, in the benchmark's order."""
    there = set(list_directory(join_path(open_root(root), _CORRUPTED)))
    wanted = [(name, severity) for name in CORRUPTIONS for severity in SEVERITIES]
    present = [(name, severity) for name, severity in wanted if f"{name}_{severity}" in there]
    if not present:
        raise UserError(
            f"{key}: {root} holds no {_CORRUPTED}; prepare its configs, or set root to the "
            "directory above it"
        )
    if len(present) < len(wanted):
        missing = next(pair for pair in wanted if pair not in present)
        text = (
            "%s holds %d of the 75 sets of ImageNet-C, first without %s_%d: mCE needs all of them"
        )
        get_logger().warning(text, root, len(present), *missing)
    return present


def _read_map(path_or_url: str, classes: int, model_classes: int) -> np.ndarray:
    folder = open_folder(path_or_url)
    try:
        numbers = json.loads(folder.parent.read_text(folder.name))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise UserError(
            f"class_map ({path_or_url!r}) is unreadable: {reason}; correct it"
        ) from error
    is_valid = isinstance(numbers, list) and all(
        type(number) is int and -1 <= number < model_classes for number in numbers
    )
    if not is_valid or len(numbers) != classes:
        raise UserError(
            f"class_map ({path_or_url!r}) must be a list of {classes} whole numbers, one for each "
            f"class of the set, from -1 to {model_classes - 1}; correct it"
        )
    return np.array(numbers, np.int64)
