"""`Submission`: a requested run, and the configuration that it resolves to."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from store.record.ids import check_name, create_run_name
from utils.config.load import change, combine_config, load_config
from utils.errors import UserError

if TYPE_CHECKING:
    from utils.config.load import RunConfig

# Directories of a store that are not experiments.
RESERVED = ("benchmarks", "jobs", "service", "sweeps")


class Submission(BaseModel):
    """A requested run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str = Field(min_length=1, max_length=1024)  # a YAML file, as `--config` takes it
    overrides: dict[str, JsonValue] = Field(default_factory=dict)  # dotted key -> value
    slots: int = Field(1, ge=1, le=64)  # devices of the queue that it holds while it runs
    sweep: str = Field("", max_length=128)  # the sweep of a trial, or empty


def resolve_submission(submission: Submission, store: str) -> RunConfig:
    """Resolve the configuration of a run in this store; UserError if it names another one."""
    origin = f"sweep {submission.sweep}" if submission.sweep else "the submission"
    config = combine_config(submission.config, submission.overrides, origin)
    run = config.run
    if submission.overrides.get("run.output_dir", store) != store:
        raise UserError(
            f"run.output_dir ({run.output_dir!r}) is not the store of this queue ({store!r}); "
            "remove it, or use the queue of that store"
        )
    if run.resume not in ("", "auto") or run.check_only:
        key = "run.check_only" if run.check_only else "run.resume"
        raise UserError(f"{key} is set by the queue itself; remove it")
    if run.experiment in RESERVED:
        raise UserError(
            f"run.experiment ({run.experiment!r}) is a directory of the store itself; give another"
        )
    name = run.run_id or create_run_name(config.train.seed)
    check_name("run.run_id", name)
    return change(config, run={"output_dir": store, "run_id": name, "resume": "auto"})


def write_flags(submission: Submission, store: str) -> list[str]:
    """Write `main.py`'s arguments for another machine; UserError if no flag can express a value."""
    config = resolve_submission(submission, store)
    values = {key: value for key, value in submission.overrides.items() if key[:4] != "run."}
    own = {"run.output_dir": store, "run.run_id": config.run.run_id}
    words = [f"--{key}={_write_value(value)}" for key, value in {**values, **own}.items()]
    flags = ["--config", submission.config, *words]
    again = change(load_config(flags, imports=False), run={"resume": "auto"})
    given = change(config, run={"experiment": again.run.experiment})
    if again != given:
        raise UserError(
            "the submission sets values that flags cannot express; write a YAML that extends "
            f"{submission.config} instead, commit it, and give that one"
        )
    return flags


def _write_value(value: JsonValue) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def create_job_id(config: RunConfig) -> str:
    """Create the id of a run's job: a name and ten digits of `experiment/run_id`."""
    run = json.dumps([config.run.experiment, config.run.run_id])
    return f"{config.run.run_id[:100]}-{hashlib.sha256(run.encode()).hexdigest()[:10]}"
