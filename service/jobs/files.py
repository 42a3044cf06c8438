"""`JobQueue`: the directory `jobs/<id>/` of each job, and operations on jobs.

`job.json` and `config.yaml` never change; `events.jsonl` gets a line for each event; `log.txt`
holds the output of the run's programs. The program that works on a job holds `lock`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from service.jobs.state import JobProgress, JobView, fold_events
from service.jobs.submission import Submission, create_job_id, resolve_submission
from store.query.changes import hash_config
from store.query.record import RunRecord
from store.record.history import append_line, parse_lines
from store.record.run_file import RunFacts
from store.record.runs import get_cache_folder
from utils.config.keys import get_resume_rules
from utils.config.load import dump_config
from utils.errors import UserError, get_hint, get_near_names
from utils.json_types import JsonObject
from utils.storage.folder import StorageError
from utils.storage.installation import ROOT
from utils.storage.local import sync_directory, write_atomically
from utils.storage.locks import is_locked, lock_file, try_lock
from utils.storage.places import is_remote, join_path_or_url, to_path

FOLDER = "jobs"
JOB_FILE, CONFIG_FILE, EVENTS_FILE = "job.json", "config.yaml", "events.jsonl"
LOG_FILE, LOCK_FILE = "log.txt", "lock"
SCHEMA_VERSION = 1


class JobFile(BaseModel):
    """`job.json`: command and owner of a job. Written once."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1]
    id: str
    experiment: str
    name: str
    store: str  # root of the run's store, a directory or a URL
    config: str
    config_hash: str
    overrides: dict[str, JsonValue]
    device: str  # `runtime.device` of the configuration
    slots: int
    sweep: str
    argv: tuple[str, ...]
    created: float
    who: str


class JobQueue:
    """The jobs of one machine and one store.

    Args:
      folder: holds the directories of jobs.
      store: root of the run store that they write to.
    """

    def __init__(self, folder: Path, store: str) -> None:
        self.folder, self.store = folder, store
        self._views: dict[str, tuple[tuple[int, int], JobView]] = {}

    def submit(self, submission: Submission, who: str) -> JobView:
        """Write a checked job to the disk; UserError if it is refused or the run exists."""
        config = resolve_submission(submission, self.store)
        values = config.model_dump(mode="json")
        job_id = create_job_id(config)
        config_path, given = (self.folder / job_id / CONFIG_FILE).absolute(), submission.config
        if Path(given).is_relative_to(ROOT):  # as the repository names it
            given = str(Path(given).relative_to(ROOT))
        job = JobFile(
            schema_version=SCHEMA_VERSION,
            id=job_id,
            experiment=config.run.experiment,
            name=config.run.run_id,
            store=self.store,
            config=given,
            config_hash=hash_config(values, get_resume_rules()),
            overrides=submission.overrides,
            device=config.runtime.device,
            slots=submission.slots,
            sweep=submission.sweep,
            argv=(sys.executable, str(ROOT / "main.py"), "--config", str(config_path)),
            created=time.time(),
            who=who,
        )
        if read_run_status(job) == "complete":
            run = f"{job.experiment}/{job.name}"
            raise UserError(f"run.run_id: {run} is complete; choose another run.run_id")
        made = self.folder / f".{job_id}-{secrets.token_hex(4)}"
        made.mkdir(parents=True)
        try:
            write_atomically(made / CONFIG_FILE, dump_config(config))
            write_atomically(made / JOB_FILE, job.model_dump_json(indent=1) + "\n")
            append_event(made, "submitted", who=who)
            sync_directory(made)
            made.rename(self.folder / job_id)
        except OSError as error:
            shutil.rmtree(made, ignore_errors=True)
            if (self.folder / job_id).is_dir():
                raise UserError(
                    f"run.run_id: {job.experiment}/{job.name} is a job of this queue already "
                    f"({job_id}); choose another run.run_id"
                ) from error
            raise
        sync_directory(self.folder)
        return self.get(job_id)

    def list(self) -> list[JobView]:
        """List all jobs, the oldest first; directories without a job are skipped.

        Only jobs with new events are read again: of a thousand jobs most are over.
        """
        views: dict[str, tuple[tuple[int, int], JobView]] = {}
        for folder in self.list_folders():
            mark = get_mark(folder)  # before the events: later ones are read next time
            kept = self._views.get(folder.name)
            if kept is not None and kept[0] == mark:
                views[folder.name] = kept
                continue
            with contextlib.suppress(UserError):
                views[folder.name] = mark, _view(read_job(folder), read_progress(folder))
        self._views = views
        return sorted((view for _, view in views.values()), key=lambda job: (job.created, job.id))

    def get(self, job_id: str) -> JobView:
        """Return one job; UserError if no job has this name, or its file is damaged."""
        folder = self.find(job_id)
        return _view(read_job(folder), read_progress(folder))

    def stop(self, job_id: str, who: str) -> JobView:
        """Request that a job saves and ends; UserError if it is unknown or has ended."""
        folder = self.find(job_id)
        progress = read_progress(folder)
        if progress.is_over:
            raise UserError(f"job {job_id!r} is {progress.state}; there is nothing to stop")
        if not progress.stop_by:
            append_event(folder, "stop", who=who)
        return self.get(job_id)

    def reopen(self, job_id: str, who: str) -> JobView:
        """Continue a failed or stopped job from its last checkpoint; UserError for any other."""
        folder = self.find(job_id)
        state = read_progress(folder).state
        if state not in ("failed", "stopped"):
            raise UserError(f"job {job_id!r} is {state}; only failed or stopped jobs can go on")
        append_event(folder, "reopened", who=who)
        return self.get(job_id)

    def read_log(self, job_id: str, tail_bytes: int = 1 << 16) -> str:
        """Read the end of the output of a job's programs; empty before the first one."""
        path = self.find(job_id) / LOG_FILE
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - tail_bytes))
                return file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def read_overrides(self, job_id: str) -> JsonObject:
        """Read the overrides of a job's submission."""
        return dict(read_job(self.find(job_id)).overrides)

    def find(self, job_id: str) -> Path:
        """Return the directory of a job; UserError if no job has this name."""
        known = {folder.name: folder for folder in self.list_folders()}
        if job_id not in known:
            hint = "`python -m tools.queue list` lists all jobs" if known else "the queue is empty"
            if get_near_names(job_id, known):  # else the hint would list thousands of jobs
                hint = get_hint(job_id, known)
            raise UserError(f"job {job_id!r} is not in {self.folder}; {hint}")
        return known[job_id]

    def list_folders(self) -> Sequence[Path]:
        """List the directory of each job."""
        paths = (path.parent for path in self.folder.glob(f"*/{JOB_FILE}") if path.is_file())
        return sorted(path for path in paths if not path.name.startswith("."))


def open_queue(store: str) -> JobQueue:
    """Open the queue of a store on this machine; that of a bucket is in the user's cache."""
    folder = get_cache_folder(store) if is_remote(store) else to_path(store)
    return JobQueue(Path(folder) / FOLDER, store)


def read_job(folder: Path) -> JobFile:
    """Read `job.json`; UserError if the file is damaged, or of another program."""
    path = folder / JOB_FILE
    try:
        return JobFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{path} is damaged; move its directory away") from error


def read_progress(folder: Path) -> JobProgress:
    """Read the state of a job from its events."""
    try:
        text = (folder / EVENTS_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    return fold_events(parse_lines(text))


def get_mark(folder: Path) -> tuple[int, int]:
    """Return time and size of a job's events, which change with each; zeros without a file."""
    try:
        status = (folder / EVENTS_FILE).stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def append_event(folder: Path, event: str, **facts: JsonValue) -> None:
    """Write an event of a job to the disk."""
    with (folder / EVENTS_FILE).open("ab+") as file:
        lock_file(file)
        append_line(file, {"time": time.time(), "event": event, **facts})


@contextlib.contextmanager
def hold_lock(folder: Path, patience_s: float = 2.0) -> Iterator[int | None]:
    """Hold a job's lock; yield its file's number, which a program may inherit, or None if taken.

    The kernel releases it with the last program that has the file open.
    """
    with (folder / LOCK_FILE).open("ab") as file:
        deadline = time.monotonic() + patience_s
        while not try_lock(file):
            if time.monotonic() > deadline:
                yield None
                return
            time.sleep(0.05)  # another process may hold it briefly to test it
        yield file.fileno()


def is_held(folder: Path) -> bool:
    """Return whether a program works on a job right now."""
    return is_locked(folder / LOCK_FILE)


def read_run_status(job: JobFile) -> str:
    """Read the status of the job's run; empty if it has not begun or cannot be read."""
    return read_run_facts(job).status or ""


def read_run_facts(job: JobFile) -> RunFacts:
    """Read `run.json` of the job's run; empty if it has not begun or cannot be read."""
    try:
        return RunRecord(join_path_or_url(job.store, job.experiment, job.name)).facts
    except (UserError, StorageError, OSError):
        return RunFacts()


def _view(job: JobFile, progress: JobProgress) -> JobView:
    kept = ("id", "argv", "config", "config_hash", "created", "who", "sweep", "slots")
    return JobView(
        **{name: getattr(job, name) for name in kept},
        run=f"{job.experiment}/{job.name}",
        state=progress.state,
        changed=progress.changed,
        attempts=len(progress.attempts),
        exit_code=progress.attempts[-1].code if progress.attempts else None,
        reason=progress.reason,
    )
