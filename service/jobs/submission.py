"""`Submission`: what somebody wants to be run, and the configuration that it means."""

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

# Directories of a store that are no experiments.
RESERVED = ("benchmarks", "jobs", "service", "sweeps")


class Submission(BaseModel):
    """A run that is asked for.

    Attributes:
      config: a YAML file, as `--config` takes it.
      overrides: dotted key -> value on top of it.
      slots: devices of the queue that it holds while it runs.
      sweep: that it is a trial of; empty: of none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str = Field(min_length=1, max_length=1024)
    overrides: dict[str, JsonValue] = Field(default_factory=dict)
    slots: int = Field(1, ge=1, le=64)
    sweep: str = Field("", max_length=128)


def resolve_submission(submission: Submission, store: str) -> RunConfig:
    """The configuration that is run: with a run's name, in this store, going on where it can.

    Raises:
      UserError: as `load_config`; or the run would lie in another store, or goes on from elsewhere.
    """
    origin = f"sweep {submission.sweep}" if submission.sweep else "the submission"
    config = combine_config(submission.config, submission.overrides, origin)
    run = config.run
    told = {key: value for key, value in submission.overrides.items() if key.startswith("run.")}
    if told.get("run.output_dir", store) != store:
        raise UserError(
            f"run.output_dir ({run.output_dir!r}) is not the store of this queue ({store!r}); "
            "leave it out, or use the queue of that store"
        )
    if run.resume not in ("", "auto") or run.check_only:
        key = "run.check_only" if run.check_only else "run.resume"
        raise UserError(f"{key} is the queue's own business; leave it out")
    if run.experiment in RESERVED:
        raise UserError(
            f"run.experiment ({run.experiment!r}) is a directory of the store itself; give another"
        )
    name = run.run_id or create_run_name(config.train.seed)
    check_name("run.run_id", name)
    return change(config, run={"output_dir": store, "run_id": name, "resume": "auto"})


def write_flags(submission: Submission, store: str) -> list[str]:
    """The words for `main.py` on another machine, which has the repository and nothing else.

    Raises:
      UserError: as `resolve_submission`; or a value that no flag can say.
    """
    config = resolve_submission(submission, store)
    told = {key: value for key, value in submission.overrides.items() if key[:4] != "run."}
    own = {"run.output_dir": store, "run.run_id": config.run.run_id}
    words = [f"--{key}={_write_value(value)}" for key, value in {**told, **own}.items()]
    flags = ["--config", submission.config, *words]
    again = change(load_config(flags), run={"resume": "auto"})
    given = change(config, run={"experiment": again.run.experiment})
    if again != given:
        raise UserError(
            "the submission sets what flags cannot say; write a YAML that extends "
            f"{submission.config} instead, commit it, and give that one"
        )
    return flags


def _write_value(value: JsonValue) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def create_job_id(config: RunConfig) -> str:
    """The same run is the same job: a name and ten digits of `experiment/run_id`."""
    place = json.dumps([config.run.experiment, config.run.run_id])
    return f"{config.run.run_id[:100]}-{hashlib.sha256(place.encode()).hexdigest()[:10]}"
