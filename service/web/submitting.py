"""Takes a submission: checks keys, paths and the configuration, then queues it.

`describe_submission` turns a run back into a submission: a file of configs/ and overrides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from service.checker import Verdict
from service.jobs.state import JobView
from service.jobs.submission import Submission, resolve_submission
from service.places import check_config_path, check_places
from service.web.answers import SubmitRequest
from service.web.problems import ServiceProblem
from service.web.serving import Service
from service.web.text import read_plain_yaml
from service.web.tokens import Identity
from store.query.changes import flatten
from store.query.config_text import parse_config
from store.query.record import RunRecord
from store.record.ids import CONFIG_FILE
from utils.config.load import RunConfig, change, combine_config
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.storage.installation import ROOT, get_workplace

_ORIGIN = "the run that is made again"
# Keys of one run alone: a repetition gets new ones.
_OWN = (
    "run.run_id",
    "run.output_dir",
    "run.resume",
    "run.overwrite",
    "run.check_only",
    "run.allow_changes",
)
# Longest key: each dot is a level of nesting, and nesting is recursive.
_KEY_LETTERS = 256


def submit(
    parts: Service, asker: Identity, request: SubmitRequest
) -> tuple[JobView | None, Verdict]:
    """Check a submission and queue it, or raise a UserError; the job is None for a dry run."""
    submission = read_request(parts, request)
    verdict = parts.checker.check(submission, parts.store)
    if verdict.error:
        raise UserError(verdict.error, code=verdict.code)
    if request.dry_run:
        return None, verdict
    try:
        job = parts.queue.submit(submission, asker.who)
    except UserError as error:
        raise ServiceProblem(409, str(error)) from error
    parts.audit.add(asker.who, "submit", job=job.id, run=job.run, config_hash=job.config_hash)
    return job, verdict


def read_request(parts: Service, request: SubmitRequest) -> Submission:
    """Create the submission of a request, with its run's name; UserError if it is not allowed."""
    check_config_path(request.config, ROOT)
    overrides = {**request.overrides, **flatten_overrides(request.overrides_yaml)}
    for key in overrides:
        if len(key) > _KEY_LETTERS:
            raise UserError(f"{key[:80]}...: a key has at most {_KEY_LETTERS} letters; shorten it")
    draft = Submission(config=str(ROOT / request.config), overrides=overrides, slots=request.slots)
    config = resolve_submission(draft, parts.store)
    if config.run.imports and not parts.settings.allow_imports:
        raise UserError(
            f"run.imports ({', '.join(config.run.imports)}) would run code of its own, which this "
            "service refuses; remove it, or start tools.serve with --allow-imports"
        )
    # The directory of a file of configs/ is the repository's own.
    is_own = "run.import_dir" not in overrides
    checked = change(config, run={"import_dir": ""}) if is_own else config
    check_places(checked, parts.roots, get_workplace())
    # The name is chosen here, so that the check, the job and the answer are of the same run.
    named = {**overrides, "run.run_id": config.run.run_id}
    return Submission(config=draft.config, overrides=named, slots=draft.slots)


def flatten_overrides(text: str) -> JsonObject:
    """Parse YAML lines to dotted key -> value; keys may be dotted or stand in sections."""
    values: JsonObject = {}
    for key, value in read_plain_yaml(text, "overrides_yaml").items():
        if key in RunConfig.model_fields and isinstance(value, dict):
            values |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            values[key] = value
    return values


def describe_submission(parts: Service, record: RunRecord) -> SubmitRequest:
    """Describe a run as a submission; UserError if no file of configs/ can give its values."""
    wanted = _flatten(parse_config(record.folder.read_texts([CONFIG_FILE]).get(CONFIG_FILE, "")))
    if not wanted:
        raise UserError(f"{record.path} has no whole {CONFIG_FILE}; take it from a copy")
    wanted["run.experiment"] = record.folder.parent.name
    fault = "no file of configs/ can give its configuration"
    for config in _list_bases(parts, record):
        try:
            overrides = _find_differing(wanted, config, {})
            if not _find_differing(wanted, config, overrides):
                return SubmitRequest(config=config, overrides=overrides)
        except UserError as error:
            fault = str(error)
    raise UserError(f"{record.path} cannot be submitted again: {fault}; use tools.runs rerun")


def _list_bases(parts: Service, record: RunRecord) -> Iterator[str]:
    """Yield configurations that may be the run's own, the likeliest first."""
    configs = parts.list_configs()
    used = [job.config for job in parts.queue.list() if job.run == record.path]
    experiment = record.folder.parent.name
    named = [config for config in configs if config.rpartition("/")[2] == f"{experiment}.yaml"]
    mine = [config for config in configs if any(path.endswith(f"/{config}") for path in used)]
    # Overrides cannot remove entries of a file's mapping, such as model.args, so most files fail.
    yield from dict.fromkeys([*mine, *named, *configs])


def _flatten(config: JsonMapping) -> JsonObject:
    """Flatten to section.key -> value, without the keys of one run alone."""
    return {key: value for key, value in flatten(config).items() if key not in _OWN}


def _find_differing(wanted: JsonObject, config: str, overrides: JsonObject) -> JsonObject:
    """Return the wanted values that a file of configs/ with these overrides does not have."""
    combined = combine_config(str(ROOT / config), overrides, _ORIGIN)
    values = _flatten(combined.model_dump(mode="json"))

    def write(value: object) -> str:
        return json.dumps(value, sort_keys=True, default=str)

    return {k: v for k, v in wanted.items() if k not in values or write(values[k]) != write(v)}
