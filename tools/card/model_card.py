"""Writes a model card from a run's files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence

from models.run_folder import find_run_folder
from models.trained import TrainedModel
from store.query.record import RunRecord
from tools.weights.flags import WEIGHTS_KEY
from tools.weights.load_model import load_trained
from utils.json_types import JsonMapping, JsonValue
from utils.programs import prepare_file
from utils.storage.local import write_atomically
from utils.storage.places import is_there, join_path_or_url
from utils.weights.files import EXPORT_FILE
from utils.weights.hub import is_shared
from utils.weights.opening import open_weights

# Keys of the configuration that describe the training.
_RECIPE = (
    *("optim.name", "optim.lr", "optim.base_lr", "optim.schedule", "optim.warmup_epochs"),
    *("optim.weight_decay", "optim.max_grad_norm", "optim.freeze", "optim.unfreeze"),
    *("optim.lr_factors", "optim.decay_factors", "model.lora", "data.global_batch_size"),
    *("data.repeats", "data.mix", "data.sample_weights", "train.class_weights"),
    *("data.train_pp", "train.epochs", "train.steps", "train.task_loss"),
    *("train.label_smoothing", "train.mixup_alpha", "train.cutmix_alpha", "train.ema"),
    *("model.drop_rate", "model.drop_path_rate", "model.weights", "run.init_from"),
    *("distill.loss", "distill.losses", "distill.temperature", "distill.alpha", "train.seed"),
    "runtime.precision",
)
# The front matter for hubs.
_HEAD = """---
library_name: timm
pipeline_tag: image-classification
tags:
- timm
---
""".splitlines()
# Keys of which every distilled run sets one.
_TEACHERS = ("teacher", "teacher_weights", "teachers", "teacher_cache", "peer")
_NAMES = 20  # of classes that a card lists
_NOTHING = (None, "", list[str](), dict[str, str](), (), False)
_SPLITS = {"eval_": "data.eval_split", "test_": "data.test_split"}
Rows = list[tuple[str, ...]]


def write(options: argparse.Namespace) -> None:
    """Write the card of a run, or of weights that lie in none."""
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


def make_card(record: RunRecord, facts: JsonMapping, location: str) -> str:
    """Format the card of a run as Markdown, with front matter for hubs.

    Args:
      facts: those that were written with the weights.
      location: of the weights.
    """
    config, final = record.config, record.facts.final
    data = config.get("data.name") or config.get("data.source")
    text = f"`{facts.get('model')}` trained on `{data}`, split `{config.get('data.train_split')}`."
    if not record.is_complete:
        text += f" The run is not complete: {record.facts.status}."
    run = str(record.folder)
    doubt: list[str] = []
    if location != str(join_path_or_url(run, EXPORT_FILE)):
        path = location.removeprefix(run).strip("/")
        doubt = [f"Of the run at its end; these weights, `{path}`, were not evaluated by it.", ""]
    results: Rows = [
        (str(config.get(key)), name.removeprefix(start), _format(value))
        for start, key in _SPLITS.items()
        for name, value in final.items()
        if name.startswith(start)
    ]
    model = {"parameters trained": _format(final.get("parameters"))}
    model |= _describe_model({"eval_pp": config.get("data.eval_pp"), **facts})
    is_distilled = any(config.get(f"distill.{key}") not in _NOTHING for key in _TEACHERS)
    keys = [key for key in _RECIPE if is_distilled or not key.startswith("distill.")]
    keys = [key for key in keys if config.get(key) not in _NOTHING]
    recipe = [(f"`{key}`", f"`{_format(config.get(key))}`") for key in keys]
    lines = [
        *(*_HEAD, f"# {record.path}", "", text, ""),
        *("## Results", "", *doubt, *_make_table(("split", "metric", "value"), results), ""),
        *("## Model", "", *_make_table(("what", "value"), _list_known(model)), ""),
        *("## Training", "", *_make_table(("key", "value"), recipe), ""),
        *_list_teachers(record),
        *("## Made on", "", *_make_table(("what", "value"), _list_origin(record)), ""),
        *("## Not told by the run", ""),
        "Licence of weights and data, intended use, and behaviour outside of the splits above.",
        "",
    ]
    return "\n".join(lines)


def make_bare_card(trained: TrainedModel) -> str:
    """Format the card of weights that lie in no run as Markdown: a description of the model."""
    names = trained.class_names
    facts = {**trained.facts, "num_classes": trained.num_classes, "eval_pp": trained.pp}
    facts |= {"classes": list(names)} if names else {}
    numbers = sum(parameter.numel() for parameter in trained.model.parameters())
    rows = _list_known({"parameters": _format(numbers), **_describe_model(facts)})
    lines = [*_HEAD, f"# {trained.location}", "", f"`{trained.name}`, weights that lie in no run."]
    lines += ["", "## Model", "", *_make_table(("what", "value"), rows), "", "## Not known", ""]
    lines += ["Data and training, results, licence of weights and data, intended use.", ""]
    return "\n".join(lines)


def _describe_model(facts: JsonMapping) -> dict[str, str]:
    """Describe a model by the facts of its weights."""
    classes = str(facts.get("num_classes", ""))
    if names := facts.get("classes"):
        classes += f": {', '.join(names[:_NAMES])}{', ...' if len(names) > _NAMES else ''}"
    rows = {
        "architecture": f"`{facts.get('model')}`",
        "arguments": f"`{json.dumps(facts.get('args', {}))}`",
        "classes": classes,
        "preparation of images": f"`{facts.get('eval_pp')}`",
    }
    if facts.get("mean") is not None:
        rows["mean, std of pixels 0 to 255"] = f"{facts['mean']}, {facts.get('std')}"
    return rows


def _list_teachers(record: RunRecord) -> list[str]:
    if not record.facts.teachers:
        return []
    rows = [
        (str(number), ", ".join(f"{name} {_format(value)}" for name, value in metrics.items()))
        for number, metrics in enumerate(record.facts.teachers, start=1)
        if isinstance(metrics, dict)
    ]
    source = record.config.get("distill.teacher") or record.config.get("distill.teacher_weights")
    text = f"The student was taught ({source or 'distill.teachers'}); the teachers reach:"
    table = _make_table(("teacher", "on the evaluation split"), rows)
    return ["## Teachers", "", text, "", *table, ""]


def _list_origin(record: RunRecord) -> Rows:
    environment, final = record.facts.environment, record.facts.final
    packages = environment.get("packages") or {}
    rows = {
        "device": f"{environment.get('device', '')} x {environment.get('devices', 1)}",
        "training time": f"{final['train_s']:.0f} s" if "train_s" in final else "",
        "steps": _format(final.get("steps")),
        "source": _format(environment.get("git_commit")),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "configuration": "`config_resolved.yaml` of the run",
    }
    return _list_known(rows)


def _list_known(rows: dict[str, str]) -> Rows:
    return [row for row in rows.items() if row[1]]


def _make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [f"| {line} |" for line in lines]


def _format(value: JsonValue) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)
