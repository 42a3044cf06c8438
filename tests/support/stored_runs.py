"""Run directories as the trainer leaves them, written at once without a trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import yaml

from store.record.attempts import begin_attempt, end_attempt
from store.record.history import write_lines
from store.record.runs import Run, RunStore, begin
from utils.json_types import JsonObject

CONFIG: JsonObject = {
    "model": {"name": "vit_tiny", "args": {"depth": 2, "heads": [1, 2]}, "weights": ""},
    "data": {"name": "digits", "root": "data", "train_pp": "value_range(-1, 1)|flip_lr"},
    "optim": {"name": "adamw", "lr": 1e-3, "betas": None},
    "train": {"epochs": 5, "seed": 0, "ema": False},
    "run": {"experiment": "digits", "run_id": "", "output_dir": "runs"},
}


def make_config(**changes: object) -> JsonObject:
    """The configuration with other values: `make_config(**{"train.seed": 3})`."""
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        section, _, name = key.partition(".")
        config[section][name] = value
    return config


def make_run(
    root: Path,
    name: str,
    *,
    config: JsonObject | None = None,
    final: JsonObject | None = None,
    lines: Iterable[JsonObject] = (),
    **facts: object,
) -> Run:
    """A run of the experiment `digits`, complete if it has final numbers."""
    store = RunStore(str(root), str(facts.pop("experiment", "digits")))
    run, config = store.get(name), config or make_config()
    config["run"] |= {"run_id": name, "output_dir": str(root)}
    environment = {"host": "vm", "device": "cpu", "git_commit": "abc", "packages": {"torch": "2"}}
    begin(
        run,
        yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        {"environment": environment},
        newest_id=str(facts.pop("newest_id", "")),
    )
    number = begin_attempt(run.path, 0, {"device": "cpu"})
    run.update(status="running", attempts=number)
    lines = list(lines) or make_lines(4)
    write_lines(run.path, lines)
    if final is not None:
        end_attempt(run.path, number, lines[-1]["step"], "complete")
        run.update(status="complete", final=final, final_up_to_step=lines[-1]["step"])
    if facts:
        run.update(**facts)
    return run


def make_lines(steps: int, *, start: float = 2.0, every: int = 1) -> list[JsonObject]:
    """A history of training with one evaluation at its end."""
    lines: list[JsonObject] = [
        {
            "step": step,
            "kind": "train",
            "attempt": 1,
            "loss/total": start / math.sqrt(step),
            "lr": 1e-3,
            "grad_norm": 1.0 + 1 / step,
            "img_per_s": 100.0 + step,
            "time_s": step * 0.1,
        }
        for step in range(every, steps + 1, every)
    ]
    last = {"step": steps, "kind": "eval", "attempt": 1, "top1": 50.0, "loss": 1.5}
    return [*lines, last]
