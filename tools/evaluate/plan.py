"""Plan of an evaluation, made on the host before a device is touched."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import timm
import yaml
from torch import nn

from big_vision.input.images.labelled import ImageFacts
from big_vision.input.source import require_facts
from datasets import create_source
from models.run_folder import find_run_folder
from models.trained import TrainedModel, open_trained
from store.record.ids import CONFIG_FILE
from tasks.evaluation.evaluator import check_model_takes
from tasks.evaluation.sets import (
    KNOWN_SETS,
    EvaluatedSet,
    ModelClasses,
    SetSpec,
    describe_sets,
    match_classes,
    plan_sets,
)
from tools.weights.load_model import load_trained
from utils.config.load import RunConfig, change, load_config
from utils.errors import UserError, get_hint
from utils.json_types import JsonObject
from utils.programs import get_run_flags
from utils.weights.class_names import ClassSide, get_label_names, warn_if_one_sided

TEACHER, SETS = "--teacher", "--sets"
# Splits of the run's own dataset.
_OWN = {"eval": "eval_split", "test": "test_split"}
# No run starts or is resumed here.
_NEUTRAL = ("--run.resume=", "--run.init_from=", "--run.eval_only=false")
_SHORT = re.compile(r"^(?P<name>[\w.-]+)=(?P<dataset>[^@]+)(@(?P<split>.+))?$")


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What every replica starts from."""

    config: RunConfig  # of the data and of the runtime
    classes: ModelClasses  # of the model's outputs
    sets: tuple[EvaluatedSet, ...]
    # [K], the teacher's class for each of the model's; None without a teacher
    teacher_classes: list[int] | None = None


def make_plan(options: argparse.Namespace) -> EvaluationPlan:
    """Create the plan from the flags.

    Raises:
      UserError: weights, sets or flags are wrong, as far as the host can check.
    """
    options.pp = options.pp or _find_pp(options)
    trained = load_trained(options)
    config = _load_config(options, trained)
    if config.train.task == "multilabel":
        raise UserError(
            f"WEIGHTS ({options.weights}) are of train.task=multilabel, but sets are evaluated by "
            "one output for an image; use python main.py --eval for a run's mAP and F1"
        )
    classes = ModelClasses(trained.num_classes, _find_names(trained, config))
    sections = [_parse_set(text, config) for text in options.sets]
    if not sections and not options.probes:
        own = [section.model_dump() for section in config.data.evals]
        sections = [_parse_set("eval", config), *own]
    config = change(config, data={"evals": sections})
    shadow = deepcopy(trained.model).to("meta")
    specs = plan_sets(config.data, config.data.evals, SETS)
    sets = describe_sets(specs, classes, trained.pp)
    for evaluated in sets:
        check_model_takes(evaluated.spec, evaluated.image_shape, shadow)
    if options.probes:
        _check_probes(config, shadow, options.probes)
    teacher = _match_teacher(options.teacher, classes, sets) if options.teacher else None
    return EvaluationPlan(config=config, classes=classes, sets=sets, teacher_classes=teacher)


def _find_pp(options: argparse.Namespace) -> str:
    """Return data.eval_pp of a flag or of --config; empty if neither sets it."""
    data = load_config([*get_run_flags(options), *_NEUTRAL]).data
    return data.eval_pp if "eval_pp" in data.model_fields_set else ""


def _load_config(options: argparse.Namespace, trained: TrainedModel) -> RunConfig:
    """Load --config or the run's own configuration, the flags on top; training keys are reset."""
    is_name = "/" not in trained.location and timm.is_model(trained.location.partition(".")[0])
    folder = None if is_name else find_run_folder(trained.location)
    flags = [*get_run_flags(options), *_NEUTRAL]
    with contextlib.ExitStack() as stack:
        if not options.config and folder is not None:
            path = stack.enter_context(folder.open_local(CONFIG_FILE))
            flags = ["--config", str(path), *flags]
        config = load_config(flags)
    model = {"name": trained.name, "weights": "", "pretrained": False}
    return change(config, model=model, data={"eval_pp": trained.pp})


def _find_names(trained: TrainedModel, config: RunConfig) -> tuple[str, ...] | None:
    """Return the names of the classes: those in the weights, else of the run's dataset."""
    names = get_label_names(trained.class_names)
    if names is not None:
        return names
    with contextlib.suppress(UserError):
        selection = create_source(config.data).select("eval")
        names = getattr(selection, "class_names", None)
        return names if names and len(names) == trained.num_classes else None
    return None


def _parse_set(text: str, config: RunConfig) -> JsonObject:
    """Convert a value of --sets to a section of data.evals."""
    if text in _OWN:
        split = getattr(config.data, _OWN[text])
        if not split:
            raise UserError(f"{SETS} {text}: data.{_OWN[text]} is empty; name a split")
        return {"name": text, "split": split}
    if text in KNOWN_SETS:
        return {"name": text}
    if text.startswith("{"):
        with contextlib.suppress(yaml.YAMLError):
            section = yaml.safe_load(text)
            if isinstance(section, dict):
                return section
        raise UserError(f"{SETS} ({text!r}) is no mapping; write '{{name: x, dataset: y}}'")
    match = _SHORT.match(text)
    if match is None:
        raise UserError(
            f"{SETS} ({text!r}) is no known set and no NAME=DATASET@SPLIT; "
            f"{get_hint(text, [*_OWN, *KNOWN_SETS])}"
        )
    section = {"name": match["name"], "dataset": match["dataset"], "source": "tfds"}
    return section | ({"split": match["split"]} if match["split"] else {})


def _check_probes(config: RunConfig, shadow: nn.Module, probes: Sequence[str]) -> None:
    """Check that both splits suffice, examples have one label, and the model takes the images."""
    source = create_source(config.data)
    for role in ("train", "eval"):
        selection = source.select(role)
        facts = require_facts(source.describe(selection, "eval"), ImageFacts, config.data.source)
        if facts.several_labels:
            raise UserError(
                f"--probes: data.label_key ({config.data.label_key}) holds a list of labels, but a "
                "probe learns one; name another"
            )
        if role == "train" and "linear" in probes and selection.num_examples < 2:
            raise UserError(
                f"--probes linear: data.train_split ({config.data.train_split}) holds one example, "
                "but heads learn from some and are chosen by others; name a larger split"
            )
        split = getattr(config.data, f"{role}_split")
        spec = SetSpec(key="--probes", name=split, group=split, data=config.data, classes="all")
        check_model_takes(spec, facts.image_shape, shadow)


def _match_teacher(path: str, classes: ModelClasses, sets: Sequence[EvaluatedSet]) -> list[int]:
    """Return the teacher's class for each of the model's, after a check of the sets' images."""
    teacher = open_trained(path, TEACHER)
    theirs = ModelClasses(teacher.num_classes, get_label_names(teacher.class_names))
    if theirs.names is None and theirs.count == classes.count:
        warn_if_one_sided(ClassSide("the model", classes.names), ClassSide(TEACHER, None))
        theirs = classes
    shadow, side = teacher.model.to("meta"), teacher.image_shape[0]
    try:
        for evaluated in sets:
            shape = evaluated.image_shape and (side, side, evaluated.image_shape[2])
            check_model_takes(evaluated.spec, shape, shadow)
        return match_classes(classes, theirs).tolist()
    except UserError as error:
        raise UserError(f"{TEACHER} ({path!r}) does not fit: {error}") from error
