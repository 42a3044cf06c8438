"""Run directories: `<output_dir>/<experiment>/<run_id>/`, on a disk or on a bucket.

A run on a bucket is written in the user's cache and uploaded by `store.record.mirror`.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store.record.attempts import format_utc
from store.record.ids import CONFIG_FILE, RUN_FILE, check_name, create_id, create_run_name, is_id
from store.record.lock import LOCK_FILE
from store.record.mirror import send_small
from store.record.run_file import RunFacts, fit
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue
from utils.log import get_logger
from utils.storage.folder import ASIDE, Folder, choose_aside_name
from utils.storage.local import write_atomically
from utils.storage.places import get_user_cache, is_remote, join_path_or_url, open_folder, to_path

CHECKPOINTS = "checkpoints"
SCHEMA_VERSION = 2
# The loop, the checkpoint writer and the stall watch all update facts.
_UPDATING = threading.Lock()


@dataclass(frozen=True)
class Run:
    """One run."""

    path: Path  # its directory on this machine
    # its URL on a bucket, or its path below `checkpoint_root`; empty without either
    remote: str = ""
    # Directory or URL of its checkpoints, as `<experiment>/<run_id>`; empty: they are in the run
    # itself
    checkpoint_root: str = ""

    @property
    def is_cached(self) -> bool:
        """Whether the run is on a bucket, and its directory here is a copy."""
        return is_remote(self.remote) and not self.checkpoint_root

    @property
    def place(self) -> str | Path:
        """Its directory or URL, as messages and pages show it."""
        return self.remote if self.is_cached else self.path

    @property
    def checkpoints(self) -> str | Path:
        """Directory or URL of its checkpoints."""
        if self.checkpoint_root:
            return join_path_or_url(self.checkpoint_root, self.path.parent.name, self.path.name)
        return join_path_or_url(self.remote or self.path, CHECKPOINTS)

    def read(self) -> JsonObject:
        """Read `run.json` of this machine; empty before the run has begun, or if it is damaged."""
        file = self.path / RUN_FILE
        try:
            return _parse(file.read_text(encoding="utf-8", errors="replace"), file)
        except FileNotFoundError:
            return {}

    def update(self, **facts: JsonValue) -> None:
        """Merge facts into `run.json`, atomically; a new status is uploaded at once."""
        with _UPDATING:
            known = self.read()
            words = known.pop("nonfinite", {})
            merged, nonfinite = _split_nonfinite({**known, **facts})
            kept = {k: v for k, v in words.items() if k.partition(".")[0] not in facts}
            if kept | nonfinite:
                merged["nonfinite"] = kept | nonfinite
            text = json.dumps(merged, indent=2, allow_nan=False) + "\n"
            write_atomically(self.path / RUN_FILE, text)
        if self.remote and "status" in facts:
            send_small(self.path, open_folder(self.remote))

    def write_config(self, text: str) -> None:
        """Write the resolved configuration."""
        write_atomically(self.path / CONFIG_FILE, text)


class RunStore:
    """All runs of one experiment below `output_dir`, a directory or a URL."""

    def __init__(
        self, output_dir: str, experiment: str, checkpoint_root: str = "", cache_dir: str = ""
    ) -> None:
        check_name("run.experiment", experiment)
        self.place = join_path_or_url(output_dir, experiment)
        self.checkpoint_root = checkpoint_root
        if checkpoint_root:
            open_folder(checkpoint_root)
        self._is_remote = is_remote(output_dir)
        self._local = (
            to_path(self.place)
            if not self._is_remote
            else (get_cache_folder(output_dir, cache_dir) / experiment)
        )

    @property
    def folder(self) -> Folder:
        """The folder of the runs."""
        return open_folder(self.place)

    def get(self, run_id: str) -> Run:
        """Return the run of a name, which need not exist; UserError for an invalid name."""
        check_name("run.run_id", run_id)
        remote = ""
        if self._is_remote:
            remote = str(join_path_or_url(self.place, run_id))
        elif self.checkpoint_root:
            remote = str(join_path_or_url(self.checkpoint_root, self._local.name, run_id))
        return Run(self._local / run_id, remote, self.checkpoint_root)

    def choose(self, run_id: str, seed: int) -> Run:
        """Return a new run, not yet created; its name is generated if `run_id` is empty."""
        return self.get(run_id or create_run_name(seed))

    def find_newest(self) -> Run | None:
        """Return the most recently started run, or None; without one, that of checkpoint_root."""
        runs = _read_runs(self.folder)
        if not runs and self.checkpoint_root:
            folder = open_folder(join_path_or_url(self.checkpoint_root, self._local.name))
            runs = _read_runs(folder)
            if not runs:
                return next(map(self.get, reversed(folder.list_names())), None)
        name = max(runs, key=lambda name: _get_age(runs[name]), default=None)
        return None if name is None else self.get(name)

    def find_newest_id(self) -> str:
        """Return the id of the most recently started run, or ""."""
        ids = [facts.id for facts in _read_runs(self.folder).values()]
        return max(filter(is_id, ids), default="")


def check_free(run: Run, *, overwrite: bool) -> None:
    """Refuse a run directory that holds files, unless it is a run that may be replaced."""
    taken = [folder for folder in _list_folders(run) if _has_more_than_lock(folder)]
    if not taken:
        return
    if not overwrite:
        raise UserError(
            f"run.run_id: {taken[0]} exists; choose another run.run_id, --resume auto to continue "
            "it, or --run.overwrite to replace it"
        )
    known = [facts for facts in map(_read_facts, taken) if "status" in facts]
    # Runs of version 1 have no id.
    if not any(is_id(f.get("id")) or "number" in f or "started" in f for f in known):
        raise UserError(
            f"run.overwrite: {taken[0]} contains no {RUN_FILE} of this program, so it is no run "
            "and is not replaced; choose another run.run_id, or move it away yourself"
        )


def find_leftovers(run: Run) -> list[Folder]:
    """Find what is at a new run's path: a run to replace, or a cached copy of a bucket's run."""
    folders = {str(folder): folder for folder in (open_folder(run.path), *_list_folders(run))}
    return [folder for folder in folders.values() if _has_more_than_lock(folder)]


def set_aside(folder: Folder) -> Folder:
    """Rename a run's folder so that another run can take its name; return the renamed one."""
    name = choose_aside_name(folder.name, folder.parent.list_names())
    get_logger().warning("%s is renamed to %s", folder, name)
    return folder.rename(name)


def begin(run: Run, config_text: str, facts: JsonObject, *, newest_id: str = "") -> None:
    """Create a run's directory with configuration, facts and an id, sorted behind `newest_id`."""
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_config(config_text)
    known = run.read()
    head = {
        "schema_version": SCHEMA_VERSION,
        "id": known["id"] if is_id(known.get("id")) else create_id(newest_id),
        "experiment": run.path.parent.name,
        "name": run.path.name,
    }
    started = known.get("started", time.time())
    # The status is in the first version of run.json already: a kill may follow immediately.
    head |= {"started": started, "started_utc": format_utc(started), "status": "running"}
    run.update(**head, **facts)


def has_facts(folder: Folder) -> bool:
    """Return whether a folder has a valid `run.json`."""
    return bool(_read_facts(folder))


def get_cache_folder(output_dir: str, cache_dir: str = "") -> Path:
    """Return the local directory for the runs of a bucket: one for each output_dir."""
    own = get_user_cache("runs", former="trainer/runs")
    root = to_path(cache_dir) if cache_dir else own
    text = output_dir.rstrip("/")
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return root / f"{text.partition('://')[2].replace('/', '_')}-{digest}"


def _list_folders(run: Run) -> list[Folder]:
    """List every folder that a run of this name would write to."""
    local = [] if run.is_cached else [open_folder(run.path)]
    return [*local, *([open_folder(run.remote)] if run.remote else [])]


def _has_more_than_lock(folder: Folder) -> bool:
    return any(name != LOCK_FILE for name in folder.list_names())


def _read_facts(folder: Folder) -> JsonObject:
    text = folder.read_texts([RUN_FILE]).get(RUN_FILE, "")
    return _parse(text, f"{folder}/{RUN_FILE}") if text else {}


def _read_runs(folder: Folder) -> dict[str, RunFacts]:
    files = {
        f"{name}/{RUN_FILE}": name
        for name in folder.list_names()
        if not name.startswith((".", ASIDE))
    }
    texts = folder.read_texts(files)
    return {files[f]: fit(RunFacts, _parse(text, f"{folder}/{f}")) for f, text in texts.items()}


def _parse(text: str, file: str | Path) -> JsonObject:
    try:
        facts = json.loads(text)
    except ValueError as error:
        get_logger().warning("%s is damaged and counts as empty: %s", file, error)
        return {}
    return facts if isinstance(facts, dict) else {}


def _get_age(facts: RunFacts) -> tuple[str, int, float]:
    """Return the order of runs by their start; those of version 1 have a number or only a time."""
    return facts.id if is_id(facts.id) else "", facts.number, facts.started or 0.0


def _split_nonfinite(value: JsonValue, name: str = "") -> tuple[Any, dict[str, str]]:
    """Replace numbers that JSON cannot hold by None; return them by name: `final.loss` -> nan."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, {name: str(value)}
    words: dict[str, str] = {}
    if isinstance(value, dict):
        clean = {}
        for key, inner in value.items():
            clean[key], more = _split_nonfinite(inner, f"{name}.{key}" if name else str(key))
            words |= more
        return clean, words
    if isinstance(value, (list, tuple)):
        pairs = [_split_nonfinite(inner, f"{name}.{i}") for i, inner in enumerate(value)]
        for _, more in pairs:
            words |= more
        return [inner for inner, _ in pairs], words
    return value, words
