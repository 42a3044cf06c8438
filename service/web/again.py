"""Reconstructs a run's submission: a file of configs/ and the values that differ from it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from service.jobs.files import ROOT
from service.web.answers import SubmitRequest
from service.web.serving import Service
from store.query.changes import flatten
from store.query.config_text import parse_config
from store.query.record import RunRecord
from store.record.ids import CONFIG_FILE
from utils.config.load import combine_config
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject

_ORIGIN = "the run that is made again"
# Keys of one run alone: a repetition gets new ones.
_OWN = ("run.run_id", "run.output_dir", "run.resume", "run.overwrite", "run.check_only",
        "run.allow_changes")  # fmt: skip


def describe_submission(parts: Service, record: RunRecord) -> SubmitRequest:
    """Describe a run's resolved configuration as a submission of the same values.

    Raises:
      UserError: the run has no whole configuration, or no file of configs/ leads to it.
    """
    wanted = _flatten(parse_config(record.folder.read_texts([CONFIG_FILE]).get(CONFIG_FILE, "")))
    if not wanted:
        raise UserError(f"{record.path} has no whole {CONFIG_FILE}; take it from a copy")
    wanted["run.experiment"] = record.folder.parent.name
    fault = "no file of configs/ leads to it"
    for config in _list_bases(parts, record):
        try:
            path = str(ROOT / config)
            base = _flatten(combine_config(path, {}, _ORIGIN).model_dump(mode="json"))
            overrides = {key: value for key, value in wanted.items() if _differs(base, key, value)}
            made = _flatten(combine_config(path, overrides, _ORIGIN).model_dump(mode="json"))
        except UserError as error:
            fault = str(error)
            continue
        if not any(_differs(made, key, value) for key, value in wanted.items()):
            return SubmitRequest(config=config, overrides=overrides)
    raise UserError(f"{record.path} cannot be submitted again: {fault}; use `runs rerun`")


def _list_bases(parts: Service, record: RunRecord) -> Iterator[str]:
    """Yield configurations that may be the run's own, the likeliest first."""
    configs = parts.list_configs()
    used = [job.config for job in parts.queue.list() if job.run == record.path]
    experiment = record.folder.parent.name
    named = [config for config in configs if config.rpartition("/")[2] == f"{experiment}.yaml"]
    mine = [config for config in configs if any(path.endswith(f"/{config}") for path in used)]
    # A mapping such as model.args joins that of the file below, so most files lead elsewhere.
    yield from dict.fromkeys([*mine, *named, *configs])


def _flatten(config: JsonMapping) -> JsonObject:
    """Flatten to section.key -> value, without the keys of one run alone."""
    return {key: value for key, value in flatten(config).items() if key not in _OWN}


def _differs(config: JsonObject, key: str, value: object) -> bool:
    return key not in config or json.dumps(config[key], sort_keys=True, default=str) != (
        json.dumps(value, sort_keys=True, default=str)
    )
