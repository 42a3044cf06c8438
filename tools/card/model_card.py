"""Writes a model card out of what a run has written down."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence

from models.run_folder import find_run_folder
from models.trained import TrainedModel
from store.query.record import RunRecord
from tools.weights.flags import WEIGHTS_KEY
from tools.weights.load_model import load_trained
from utils.json_types import JsonObject, JsonValue
from utils.programs import prepare_file
from utils.storage.local import write_atomically
from utils.storage.places import is_there, join_path_or_url
from utils.weights.files import EXPORT_FILE
from utils.weights.hub import is_shared
from utils.weights.opening import open_weights

# Keys that say how a model was trained, in the words of the configuration.
_RECIPE = (
    "optim.name", "optim.lr", "optim.base_lr", "optim.schedule", "optim.warmup_epochs",
    "optim.weight_decay", "optim.max_grad_norm", "optim.freeze", "optim.unfreeze",
    "optim.lr_factors", "optim.decay_factors", "model.lora", "data.global_batch_size",
    "data.repeats", "data.train_pp", "train.epochs", "train.steps", "train.task_loss",
    "train.label_smoothing", "train.mixup_alpha", "train.cutmix_alpha", "train.ema",
    "model.drop_rate", "model.drop_path_rate", "model.weights", "run.init_from",
    "distill.loss", "distill.losses", "distill.temperature", "distill.alpha", "train.seed",
    "runtime.precision",
)  # fmt: skip
# The front matter that hubs read.
_HEAD = """---
library_name: timm
pipeline_tag: image-classification
tags:
- timm
---
""".splitlines()
# Keys of which a run that is taught sets one.
_TAUGHT = ("teacher", "teacher_weights", "teachers", "teacher_cache", "peer")
_NAMES = 20  # of classes that a card lists
_NOTHING = (None, "", [], {}, (), False)
_SPLITS = {"eval_": "data.eval_split", "test_": "data.test_split"}


def write(options: argparse.Namespace) -> None:
    """Write the card of a run, or of weights that lie in none.

    Raises:
      UserError: no weights are there, or nothing says of which model they are.
    """
    place = options.weights
    is_path = is_shared(place) or "/" in place or is_there(place)
    weights = open_weights(place, WEIGHTS_KEY) if is_path else None
    folder = None if weights is None else find_run_folder(weights.location)
    prepare_file(options.out, "--out")
    if weights is not None and folder is not None:
        text = make_card(RunRecord(folder), weights.facts, weights.location)
    else:
        text = make_bare_card(load_trained(options))
    write_atomically(options.out, text)
    print(f"{options.out}: the card of {folder or place}")


def make_card(record: RunRecord, facts: JsonObject, location: str) -> str:
    """The card as Markdown, with the front matter that hubs read.

    Args:
      facts: what was written with the weights.
      location: where they lie.
    """
    parts = [
        *_HEAD, f"# {record.path}", "", _introduce(record, facts), "",
        "## Results", "", *_doubt_results(record, location),
        *_make_table(("split", "metric", "value"), _list_results(record)), "",
        "## Model", "", *_make_table(("what", "value"), _list_model(record, facts)), "",
        "## Training", "", *_make_table(("key", "value"), _list_recipe(record)), "",
        *_list_teachers(record),
        "## Made on", "", *_make_table(("what", "value"), _list_origin(record)), "",
        "## Not told by the run", "",
        "Licence of weights and data, intended use, and behaviour outside of the splits above.", "",
    ]  # fmt: skip
    return "\n".join(parts)


def make_bare_card(trained: TrainedModel) -> str:
    """Make the card of weights that lie in no run, as Markdown: what the model is."""
    names = trained.class_names
    told = {**trained.facts, "num_classes": trained.num_classes, "eval_pp": trained.pp}
    told |= {"classes": list(names)} if names else {}
    numbers = sum(one.numel() for one in trained.model.parameters())
    rows = [("parameters", _show(numbers)), *_list_facts(told)]
    lines = [*_HEAD, f"# {trained.location}", "", f"`{trained.name}`, weights that lie in no run."]
    lines += ["", "## Model", "", *_make_table(("what", "value"), rows), "", "## Not known", ""]
    lines += ["Data and training, results, licence of weights and data, intended use.", ""]
    return "\n".join(lines)


def _introduce(record: RunRecord, facts: JsonObject) -> str:
    config = record.config
    data = config.get("data.name") or config.get("data.source")
    state = "" if record.is_complete else f" The run is not complete: {record.facts['status']}."
    split = config.get("data.train_split")
    return f"`{facts.get('model')}` trained on `{data}`, split `{split}`.{state}"


def _doubt_results(record: RunRecord, location: str) -> list[str]:
    """A word where the weights are not those that the run has judged at its end."""
    place = str(record.folder)
    if location == str(join_path_or_url(place, EXPORT_FILE)):
        return []
    shown = location.removeprefix(place).strip("/")
    return [f"Of the run at its end; these weights, `{shown}`, were not judged by it.", ""]


def _list_results(record: RunRecord) -> list[tuple[str, ...]]:
    final = record.facts.get("final") or {}
    rows = []
    for start, key in _SPLITS.items():
        split = str(record.config.get(key))
        found = {n.removeprefix(start): v for n, v in final.items() if n.startswith(start)}
        rows += [(split, name, _show(value)) for name, value in found.items()]
    return rows


def _list_model(record: RunRecord, facts: JsonObject) -> list[tuple[str, ...]]:
    told = {"eval_pp": record.config.get("data.eval_pp"), **facts}
    numbers = (record.facts.get("final") or {}).get("parameters")
    rows = [("parameters trained", _show(numbers)), *_list_facts(told)]
    return [row for row in rows if row[1]]


def _list_facts(facts: JsonObject) -> list[tuple[str, str]]:
    """What is known of a model by its weights alone."""
    shown = str(facts.get("num_classes", ""))
    if names := facts.get("classes"):
        shown += f": {', '.join(names[:_NAMES])}{', ...' if len(names) > _NAMES else ''}"
    rows = [
        ("architecture", f"`{facts.get('model')}`"),
        ("arguments", f"`{json.dumps(facts.get('args', {}))}`"),
        ("classes", shown),
        ("preparation of images", f"`{facts.get('eval_pp')}`"),
    ]
    if facts.get("mean") is not None:
        rows.append(("mean, std of pixels 0 to 255", f"{facts['mean']}, {facts.get('std')}"))
    return [row for row in rows if row[1]]


def _list_recipe(record: RunRecord) -> list[tuple[str, ...]]:
    is_taught = any(record.config.get(f"distill.{key}") not in _NOTHING for key in _TAUGHT)
    keys = [key for key in _RECIPE if is_taught or not key.startswith("distill.")]
    found = {key: record.config.get(key) for key in keys}
    return [(f"`{k}`", f"`{_show(v)}`") for k, v in found.items() if v not in _NOTHING]


def _list_teachers(record: RunRecord) -> list[str]:
    teachers = record.facts.get("teachers") or []
    if not teachers:
        return []
    rows = [(str(number), ", ".join(f"{k} {_show(v)}" for k, v in one.items()))
            for number, one in enumerate(teachers, start=1) if isinstance(one, dict)]  # fmt: skip
    source = record.config.get("distill.teacher") or record.config.get("distill.teacher_weights")
    told = f"The student was taught ({source or 'distill.teachers'}); the teachers reach:"
    table = _make_table(("teacher", "on the evaluation split"), rows)
    return ["## Teachers", "", told, "", *table, ""]


def _list_origin(record: RunRecord) -> list[tuple[str, ...]]:
    environment, final = record.facts.get("environment") or {}, record.facts.get("final") or {}
    packages = environment.get("packages") or {}
    rows = [
        ("device", f"{environment.get('device', '')} x {environment.get('devices', 1)}"),
        ("training time", f"{final['train_s']:.0f} s" if "train_s" in final else ""),
        ("steps", _show(final.get("steps"))),
        ("source", _show(environment.get("git_commit"))),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("configuration", "`config_resolved.yaml` of the run"),
    ]
    return [row for row in rows if row[1]]


def _make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {line} |" for line in lines]


def _show(value: JsonValue) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)
