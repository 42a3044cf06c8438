"""`JobQueue`: the directory `jobs/<id>/` of each job, and what may be asked of it.

`job.json` and `config.yaml` never change; `events.jsonl` grows line by line, and tells all that
happened; `log.txt` holds what the run's programs print. Whoever works on a job holds `lock`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from service.jobs.state import JobProgress, JobView, fold_events
from service.jobs.submission import Submission, create_job_id, resolve_submission
from store.query.changes import hash_config
from store.query.record import RunRecord
from store.record.history import append_line, parse_lines
from store.record.runs import get_cache_folder
from utils.config.keys import get_resume_rules
from utils.config.load import dump_config
from utils.errors import UserError, get_hint, get_near_names
from utils.json_types import JsonObject
from utils.storage.folder import StorageError
from utils.storage.local import sync_directory, write_atomically
from utils.storage.locks import is_locked, lock_file, try_lock
from utils.storage.places import is_remote, join_place, to_path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "jobs"
JOB_FILE, CONFIG_FILE, EVENTS_FILE = "job.json", "config.yaml", "events.jsonl"
LOG_FILE, LOCK_FILE = "log.txt", "lock"
SCHEMA_VERSION = 1


class JobFile(BaseModel):
    """`job.json`: what is run, by whose wish; written once.

    Attributes:
      store: root of the run's store, a directory or a URL.
      device: `runtime.device` of the configuration.
    """

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1]
    id: str
    experiment: str
    name: str
    store: str
    config: str
    config_hash: str
    overrides: dict[str, JsonValue]
    device: str
    slots: int
    sweep: str
    argv: tuple[str, ...]
    created: float
    who: str


class JobQueue:
    """The jobs of one machine and one store.

    Args:
      folder: where their directories lie.
      store: root of the run store that they write to.
    """

    def __init__(self, folder: Path, store: str) -> None:
        self.folder, self.store = folder, store
        self._views: dict[str, tuple[tuple[int, int], JobView]] = {}

    def submit(self, submission: Submission, who: str) -> JobView:
        """Take a job that has been checked; it is on the disk when this returns.

        Raises:
          UserError: the configuration is refused, or the run is there already.
        """
        config = resolve_submission(submission, self.store)
        values = config.model_dump(mode="json")
        job_id = create_job_id(config)
        job = JobFile(
            schema_version=SCHEMA_VERSION, id=job_id, experiment=config.run.experiment,
            name=config.run.run_id, store=self.store, config=_shorten(submission.config),
            config_hash=hash_config(values, get_resume_rules()), overrides=submission.overrides,
            device=config.runtime.device, slots=submission.slots, sweep=submission.sweep,
            argv=self._write_argv(job_id), created=time.time(), who=who,
        )  # fmt: skip
        if read_run_status(job) == "complete":
            raise UserError(
                f"run.run_id: {job.experiment}/{job.name} is complete; choose another run.run_id"
            )
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
        """All jobs, the oldest first; directories that hold no job are passed over.

        Read again is what has had an event since the last time: of a thousand jobs most are over.
        """
        views: dict[str, tuple[tuple[int, int], JobView]] = {}
        for folder in self.list_folders():
            mark = get_mark(folder)  # before the events: what comes between is read next time
            kept = self._views.get(folder.name)
            if kept is not None and kept[0] == mark:
                views[folder.name] = kept
                continue
            with contextlib.suppress(UserError):
                views[folder.name] = mark, _view(read_job(folder), read_progress(folder))
        self._views = views
        return sorted((view for _, view in views.values()), key=lambda one: (one.created, one.id))

    def get(self, job_id: str) -> JobView:
        """One job.

        Raises:
          UserError: there is none of this name; or its file is damaged.
        """
        folder = self.find(job_id)
        return _view(read_job(folder), read_progress(folder))

    def stop(self, job_id: str, who: str) -> JobView:
        """Ask a job to end: it saves a checkpoint, and may be taken up again.

        Raises:
          UserError: there is no such job, or it has ended.
        """
        folder = self.find(job_id)
        progress = read_progress(folder)
        if progress.is_over:
            raise UserError(f"job {job_id!r} is {progress.state}; there is nothing to stop")
        if not progress.stop_by:
            append_event(folder, "stop", who=who)
        return self.get(job_id)

    def reopen(self, job_id: str, who: str) -> JobView:
        """Have a job that failed or was stopped go on from its last checkpoint.

        Raises:
          UserError: there is no such job, or it has not ended that way.
        """
        folder = self.find(job_id)
        state = read_progress(folder).state
        if state not in ("failed", "stopped"):
            raise UserError(
                f"job {job_id!r} is {state}; only one that failed or was stopped goes on"
            )
        append_event(folder, "reopened", who=who)
        return self.get(job_id)

    def read_log(self, job_id: str, tail_bytes: int = 1 << 16) -> str:
        """The end of what a job's programs have printed; empty before the first one."""
        path = self.find(job_id) / LOG_FILE
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - tail_bytes))
                return file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def read_overrides(self, job_id: str) -> JsonObject:
        """What a job's submission has set on top of its configuration."""
        return dict(read_job(self.find(job_id)).overrides)

    def find(self, job_id: str) -> Path:
        """The directory of a job.

        Raises:
          UserError: there is none of this name.
        """
        known = {folder.name: folder for folder in self.list_folders()}
        if job_id not in known:
            hint = "`python -m tools.queue list` shows what is there" if known else (
                "the queue is empty"
            )  # fmt: skip
            if get_near_names(job_id, known):  # else the hint would list thousands of jobs
                hint = get_hint(job_id, known)
            raise UserError(f"job {job_id!r} is not in {self.folder}; {hint}")
        return known[job_id]

    def list_folders(self) -> list[Path]:
        """The directory of each job."""
        if not self.folder.is_dir():
            return []
        found = (path for path in self.folder.iterdir() if not path.name.startswith("."))
        return sorted(path for path in found if (path / JOB_FILE).is_file())

    def _write_argv(self, job_id: str) -> tuple[str, ...]:
        config = (self.folder / job_id / CONFIG_FILE).absolute()
        return (sys.executable, str(ROOT / "main.py"), "--config", str(config))


def open_queue(store: str) -> JobQueue:
    """The queue of a store on this machine; that of a bucket lies in the user's cache."""
    folder = get_cache_folder(store) if is_remote(store) else to_path(store)
    return JobQueue(Path(folder) / FOLDER, store)


def read_job(folder: Path) -> JobFile:
    """What is run.

    Raises:
      UserError: the file is damaged, or of another program.
    """
    path = folder / JOB_FILE
    try:
        return JobFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{path} is damaged; move its directory away") from error


def read_progress(folder: Path) -> JobProgress:
    """Where a job stands."""
    try:
        text = (folder / EVENTS_FILE).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        text = ""
    return fold_events(parse_lines(text))


def get_mark(folder: Path) -> tuple[int, int]:
    """Time and bytes of a job's events, which change with each; zeros: none are there."""
    try:
        found = (folder / EVENTS_FILE).stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def append_event(folder: Path, event: str, **facts: JsonValue) -> None:
    """Note what has happened to a job; it is on the disk when this returns."""
    with (folder / EVENTS_FILE).open("ab+") as file:
        lock_file(file)
        append_line(file, {"time": time.time(), "event": event, **facts})


@contextlib.contextmanager
def hold_lock(folder: Path, patience_s: float = 2.0) -> Iterator[int | None]:
    """Hold a job's lock: gives its file's number, which a program may inherit; none: it is taken.

    The kernel lets go of it when the last program that has the file open is gone.
    """
    with (folder / LOCK_FILE).open("ab") as file:
        deadline = time.monotonic() + patience_s
        while not try_lock(file):
            if time.monotonic() > deadline:
                yield None
                return
            time.sleep(0.05)  # another process may only be looking
        yield file.fileno()


def is_held(folder: Path) -> bool:
    """Whether a program works on a job right now."""
    return is_locked(folder / LOCK_FILE)


def read_run_status(job: JobFile) -> str:
    """What the job's run says of itself; empty: it has not begun, or cannot be read."""
    return str(read_run_facts(job).get("status", ""))


def read_run_facts(job: JobFile) -> JsonObject:
    """`run.json` of the job's run; empty: it has not begun, or cannot be read."""
    try:
        return RunRecord(join_place(job.store, job.experiment, job.name)).facts
    except (UserError, StorageError, OSError):
        return {}


def _shorten(config: str) -> str:
    """The path of a configuration as the repository has it, wherever that lies."""
    path = Path(config)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else config


def _view(job: JobFile, progress: JobProgress) -> JobView:
    last = progress.attempts[-1] if progress.attempts else None
    return JobView(
        id=job.id, run=f"{job.experiment}/{job.name}", state=progress.state, argv=job.argv,
        config=job.config, config_hash=job.config_hash, created=job.created,
        changed=progress.changed, who=job.who, attempts=len(progress.attempts),
        exit_code=last.code if last else None, reason=progress.reason, sweep=job.sweep,
        slots=job.slots,
    )  # fmt: skip
