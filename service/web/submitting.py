"""Takes a submission: checks keys, paths and the configuration, then queues it."""

from __future__ import annotations

from service.checker import Verdict
from service.jobs.files import ROOT
from service.jobs.state import JobView
from service.jobs.submission import Submission, resolve_submission
from service.places import check_config_path, check_places
from service.web.answers import SubmitRequest
from service.web.problems import ServiceProblem
from service.web.serving import Service
from service.web.text import read_plain_yaml
from service.web.tokens import Identity
from utils.config.load import RunConfig
from utils.errors import UserError
from utils.json_types import JsonObject

# Each dot of a key is a level of the configuration.
_KEY_LETTERS = 256


def submit(
    parts: Service, asker: Identity, request: SubmitRequest
) -> tuple[JobView | None, Verdict]:
    """Check a submission and queue it; the job is None for a dry run.

    Raises:
      UserError: it is refused, with the reason.
      ServiceProblem: the run exists already.
    """
    submission = read_request(parts, request)
    verdict = parts.checker.check(submission, parts.store)
    if verdict.error:
        raise UserError(verdict.error)
    if request.dry_run:
        return None, verdict
    try:
        job = parts.queue.submit(submission, asker.who)
    except UserError as error:
        raise ServiceProblem(409, str(error)) from error
    parts.audit.add(asker.who, "submit", job=job.id, run=job.run, config_hash=job.config_hash)
    return job, verdict


def read_request(parts: Service, request: SubmitRequest) -> Submission:
    """Create the submission of a request, with the name of its run.

    Raises:
      UserError: an invalid configuration, key or value, or a path outside the roots.
    """
    check_config_path(request.config, ROOT)
    overrides = {**request.overrides, **flatten_overrides(request.overrides_yaml)}
    for key in overrides:
        if len(key) > _KEY_LETTERS:
            raise UserError(f"{key[:80]}...: a key has at most {_KEY_LETTERS} letters; shorten it")
    draft = Submission(config=str(ROOT / request.config), overrides=overrides, slots=request.slots)
    config = resolve_submission(draft, parts.store)
    check_places(config, parts.roots, ROOT)
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
