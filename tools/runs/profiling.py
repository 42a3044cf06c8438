"""`profile`: ask a live run for a trace of its next steps."""

from __future__ import annotations

import argparse

from store.query.modules import MODULES_FILE, MOST_STEPS, request_profile
from store.query.record import RunRecord
from store.record.lock import find_owner
from store.terminal import print_json
from tools.runs.find_runs import choose_records
from utils.errors import UserError
from utils.programs import require_at_least
from utils.storage.local import LocalFolder


def request(options: argparse.Namespace) -> None:
    """Write a request into each run's directory; UserError for a run that is not at work."""
    require_at_least(1, options, "steps")
    if options.steps > MOST_STEPS:
        raise UserError(f"--steps ({options.steps}) must be at most {MOST_STEPS}; lower it")
    records = choose_records(options, "profile", [options.run] if options.run else [])
    for record in records:
        if not isinstance(record.folder, LocalFolder):
            raise UserError(
                f"RUN {record.path} lies on a bucket, where a run looks for no request; name its "
                "directory on the machine that trains it"
            )
        if record.facts.status != "running" or not find_owner(record.folder.path):
            raise UserError(f"RUN {record.path} is not at work; set profile.steps for a new start")
    for record in records:
        assert isinstance(record.folder, LocalFolder)
        request_profile(record.folder.path, options.steps)
    unnamed = [record.path for record in records if not names_modules(record)]
    if options.json:
        paths = [record.path for record in records]
        print_json({"runs": paths, "steps": options.steps, "without_modules": unnamed})
        return
    for record in records:
        print(
            f"{record.path} traces {options.steps} steps from its next log point on: "
            f"{record.folder}/profile, then {MODULES_FILE}"
        )
    for path in unnamed:
        print(
            f"{path} will have times without modules: XLA names them only if profile.steps is set "
            "before it loads; stop the run, and resume it with --profile.steps=FIRST-LAST"
        )


def names_modules(record: RunRecord) -> bool:
    """Return whether operations know their modules: XLA's only as `profile.steps` prepares it."""
    device = str(record.attempts[-1].get("hardware", {}).get("device") if record.attempts else "")
    return not device.startswith("xla") or bool(record.config.get("profile.steps"))
