"""Sets of images to judge on: where they lie, and what their labels mean to a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from big_vision.input.catalog import join_path, list_directory, open_root
from big_vision.input.images.labelled import require_images
from big_vision.input.splits_check import warn_of_left_out
from big_vision.pp.device_ops import require_equal_ranges
from datasets import create_source
from tasks.evaluation.corrupted import CORRUPTIONS, SEVERITIES
from utils.config.data import DataSection, EvalSection
from utils.errors import UserError, get_hint
from utils.log import get_logger
from utils.storage.places import open_folder
from utils.weights.class_names import ClassSide, match_class_names, warn_if_one_sided

Choice = Literal["named", "present", "all"]
_CORRUPTED = "imagenet2012_corrupted"


@dataclass(frozen=True)
class KnownSet:
    """A public set as TFDS has it.

    Attributes:
      classes: which of them compete for an answer, as the set's authors judge it.
    """

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
    """What a model's answers mean.

    Attributes:
      names: in the order of the answers; none: nobody tells.
    """

    count: int
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class SetSpec:
    """Where a set lies and how it is judged.

    Attributes:
      key: of the configuration, for errors.
      data: with the set as its evaluation split.
      group: what the configuration calls it: one group may be many sets.
      corruption: which one the set shows, and how severely; none: it is no such set.
    """

    key: str
    name: str
    group: str
    data: DataSection
    classes: Choice
    class_map: str = ""
    every: int = 1
    corruption: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class JudgedSet:
    """A set as its metadata tell it, for one model.

    Attributes:
      to_model: [classes of the set] int64, the model's class for each, or -1.
      several: whether an example may have several right labels, or none.
      image_shape: (H, W, C); none: only a loader can tell.
      class_names: of the set, or None if it has none.
    """

    spec: SetSpec
    num_examples: int
    to_model: np.ndarray
    several: bool
    image_shape: tuple[int, int, int] | None
    class_names: tuple[str, ...] | None = None


def plan_sets(data: DataSection, sections: Sequence[EvalSection], key: str) -> list[SetSpec]:
    """The sets that sections ask for; nothing is looked at but ImageNet-C's folders.

    Args:
      key: what holds the sections, for errors.

    Raises:
      UserError: a name that is given twice, or that nobody knows.
    """
    names = [one.name for one in sections]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{key}: the name {twice!r} is given twice; give each set one of its own")
    return [spec for one in sections for spec in _plan(data, one, key)]


def change_data(data: DataSection, **values: object) -> DataSection:
    """The section with other values, checked again, and without sets of its own."""
    return DataSection.model_validate({**data.model_dump(), **values, "evals": ()})


def look_at_sets(
    specs: Sequence[SetSpec], model: ModelClasses, eval_pp: str
) -> tuple[JudgedSet, ...]:
    """Look at each set; warn once for each group whose classes are matched by number alone.

    Raises:
      UserError: as `look_at`.
    """
    sets = tuple(look_at(spec, model, eval_pp) for spec in specs)
    for shown in {one.spec.group: one for one in sets}.values():
        if not shown.spec.class_map:
            warn_if_one_sided(
                ClassSide("the model", model.names),
                ClassSide(f"{shown.spec.key} {shown.spec.group!r}", shown.class_names),
            )
    return sets


def look_at(spec: SetSpec, model: ModelClasses, eval_pp: str) -> JudgedSet:
    """What a set's metadata tell of it.

    Args:
      eval_pp: the string that the model's input is known by: only its final range must agree.

    Raises:
      UserError: the set is not there, or its labels mean nothing to the model.
    """
    try:
        require_equal_ranges(eval_pp, spec.data.eval_pp)
        source = create_source(spec.data, {"num_classes": model.count})
        selection = source.select("eval")
        facts = require_images(source.describe(selection, "eval"), spec.data.source)
        names = facts.class_names
        to_model = map_classes(spec, ModelClasses(facts.num_classes, names), model)
    except UserError as error:
        raise UserError(f"{spec.key} {spec.name!r}: {error}") from error
    warn_of_left_out(f"{spec.key} {spec.name!r}", selection)
    return JudgedSet(
        spec=spec,
        num_examples=selection.num_examples,
        to_model=to_model,
        several=facts.several_labels,
        image_shape=facts.image_shape,
        class_names=names,
    )


def map_classes(spec: SetSpec, mine: ModelClasses, model: ModelClasses) -> np.ndarray:
    """[classes of the set] int64: the model's class for each, or -1 for none.

    By the map that is given, else by names, else by numbers where there are as many.

    Raises:
      UserError: a class that the model does not have, or nobody can tell.
    """
    if spec.class_map:
        to_model = _read_map(spec.class_map, mine.count, model.count)
        if (to_model < 0).all():
            raise UserError(
                f"class_map ({spec.class_map!r}) leaves out every class, so that there is nothing "
                "to judge; mend it"
            )
        return to_model
    return match_classes(mine, model)


def match_classes(mine: ModelClasses, model: ModelClasses) -> np.ndarray:
    """[classes] int64: the model's class for each, by names, or by numbers of as many classes.

    Raises:
      UserError: a class that the model does not have, or nobody can tell.
    """
    match = match_class_names(mine.names, model.names)
    if match.missing:
        raise UserError(
            f"{len(match.missing)} of its {mine.count} classes are none of the model's, first "
            f"{match.missing[0]!r} ({get_hint(match.missing[0], model.names[:20])}); give a "
            "class_map"
        )
    if match.ambiguous:
        raise UserError(
            f"its class {match.ambiguous[0]!r} is the name of several of the model's classes; give "
            "a class_map"
        )
    if match.numbers:
        return np.array(match.numbers, np.int64)
    if mine.count != model.count:
        raise UserError(
            f"it has {mine.count} classes and the model {model.count}, and nobody tells the names "
            "of both; give a class_map"
        )
    return np.arange(mine.count, dtype=np.int64)


def _plan(data: DataSection, section: EvalSection, key: str) -> list[SetSpec]:
    known = KNOWN_SETS.get(section.name)
    if known is None and not (section.dataset or section.source or section.root or section.split):
        raise UserError(
            f"{key}: {section.name!r} is no known set and has no dataset, root or split; "
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
    usual = known.classes if known else "named"
    given = {
        "key": key,
        "group": section.name,
        "classes": usual if section.classes == "auto" else section.classes,
        "class_map": section.class_map,
        "every": section.every,
    }

    def plan(name: str, dataset: str, corruption: tuple[str, int] | None = None) -> SetSpec:
        own = change_data(data, **{**values, "name": dataset})
        return SetSpec(name=name, data=own, corruption=corruption, **given)

    if name != _CORRUPTED:
        return [plan(section.name, name)]
    found = _list_corrupted(values["root"], key)
    return [plan(f"{section.name}/{c}_{s}", f"{name}/{c}_{s}", (c, s)) for c, s in found]


def _list_corrupted(root: str, key: str) -> list[tuple[str, int]]:
    """The corruptions and severities that are there, in the benchmark's order."""
    there = set(list_directory(join_path(open_root(root), _CORRUPTED)))
    wanted = [(name, severity) for name in CORRUPTIONS for severity in SEVERITIES]
    found = [(name, severity) for name, severity in wanted if f"{name}_{severity}" in there]
    if not found:
        raise UserError(
            f"{key}: {root} holds no {_CORRUPTED}; prepare its configs, or name the directory "
            "above it by root"
        )
    if len(found) < len(wanted):
        missing = next(one for one in wanted if one not in found)
        get_logger().warning(
            "%s holds %d of the 75 sets of ImageNet-C, %s_%d is the first that is missing: there "
            "is no mCE without all of them",
            root, len(found), *missing,
        )  # fmt: skip
    return found


def _read_map(place: str, classes: int, model_classes: int) -> np.ndarray:
    folder = open_folder(place)
    try:
        found = json.loads(folder.parent.read_text(folder.name))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise UserError(f"class_map ({place!r}) cannot be read: {reason}; mend it") from error
    is_right = isinstance(found, list) and all(
        type(one) is int and -1 <= one < model_classes for one in found
    )
    if not is_right or len(found) != classes:
        raise UserError(
            f"class_map ({place!r}) must be a list of {classes} whole numbers, one for each class "
            f"of the set, from -1 to {model_classes - 1}; mend it"
        )
    return np.array(found, np.int64)
