"""Finds the runs of a store, tells which have changed, and reads what the index keeps of one."""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from store.lineage.ancestors import Ancestor, list_sums, read_lineage
from store.quality.field_types import fit_artifacts
from store.query.config_text import PUBLISHED, Pairs, read_sections
from store.query.record import (
    Values,
    describe,
    get_final_values,
    get_last_values,
    parse_facts,
    read_tail,
)
from store.query.tags import TAGS_FILE, parse_note, parse_tags
from store.record.artifacts import ARTIFACTS_FILE
from store.record.attempts import ATTEMPTS_FILE
from store.record.history import METRICS_FILE
from store.record.ids import CONFIG_FILE, RUN_FILE
from store.record.runs import CHECKPOINTS
from store.record.summary import SUMMARY_FILE
from utils.errors import UserError
from utils.json_types import JsonValue, load_json
from utils.storage.folder import ASIDE
from utils.storage.local import LocalFolder
from utils.storage.places import is_remote, open_folder, to_path

# A file as young as this may still change within the tick of its clock.
_YOUNG_NS = 2_000_000_000
# The name of a run says it already, so that runs of one configuration share their entries.
_LEFT_OUT = {"run.run_id"}
# A directory with one of these was a run's.
_LEFT_BEHIND = {METRICS_FILE, SUMMARY_FILE, ATTEMPTS_FILE, CHECKPOINTS}
# What tells whether a run has changed: one that has ended, and one that may go on.
_SETTLED = (RUN_FILE, TAGS_FILE, CONFIG_FILE)
_LIVE = (*_SETTLED, METRICS_FILE)
# What is read of a run, but the end of its history.
_READ = (*_SETTLED, SUMMARY_FILE, ARTIFACTS_FILE)
# A section without entries; and a line of a commit record, without parsing the whole summary.
_EMPTY = ("{}", "null")
_TOLD_CONFIG = re.compile(
    rf'"path": "{re.escape(CONFIG_FILE)}",\s+"bytes": \d+,\s+"crc32c": "(\w+)"'
)


@dataclass(frozen=True)
class RunEntry:
    """What the index keeps of one run.

    Args:
      path: `experiment/name`.
      stamp: of its files when they were read; empty: read them again next time.
      facts: by the names of `store.query.record.FACTS`.
      sums: SHA-256 of the weights that it has left behind.
      fault: why nothing else is known; empty: nothing is wrong.
    """

    path: str
    stamp: str
    facts: dict[str, JsonValue] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    note: str = ""
    lineage: tuple[Ancestor, ...] = ()
    sums: tuple[str, ...] = ()
    values: Values = field(default_factory=dict)
    sections: dict[str, Pairs] = field(default_factory=dict)
    fault: str = ""


class DiskScan:
    """The runs below a directory.

    Args:
      root: of the store.
      settled: paths of runs that have ended: their metrics change no more.
    """

    def __init__(self, root: Path, settled: Collection[str] = ()) -> None:
        self._root, self._settled = root, settled

    def find(self) -> dict[str, str]:
        """Path -> stamp of every run."""
        found = {}
        now = time.time_ns()
        for path in _list_folders(self._root):
            names = _SETTLED if path in self._settled else _LIVE
            stamp = _stamp_files(f"{self._root}/{path}", names, now)
            if stamp is not None:
                found[path] = stamp
        return found

    def read(self, paths: Collection[str]) -> Iterator[RunEntry]:
        """What the index keeps of those runs; one that is gone by now is left out."""
        for path in paths:
            folder, now = self._root / path, time.time_ns()
            stamps = [_stamp_files(str(folder), names, now) for names in (_SETTLED, _LIVE)]
            if None not in stamps:
                entry = self._read_run(path, folder)
                yield replace(entry, stamp=stamps[0] if is_done(entry) else stamps[1])

    def _read_run(self, path: str, folder: Path) -> RunEntry:
        texts = LocalFolder(folder).read_texts(_READ)
        return _make_entry(path, "", texts, get_last_values(read_tail(folder / METRICS_FILE)))


class BucketScan:
    """The runs below a URL; small files are read whole, the history of a live run is not."""

    def __init__(self, root: str) -> None:
        self._root = open_folder(root)
        self._texts: dict[str, str] = {}

    def find(self) -> dict[str, str]:
        """Path -> stamp of every run."""
        paths = [
            f"{name}/{run}"
            for name in self._root.list_names()
            if not name.startswith(".")
            for run in self._root.child(name).list_names()
            if not run.startswith((".", ASIDE))
        ]
        names = [f"{path}/{name}" for path in paths for name in (RUN_FILE, TAGS_FILE)]
        self._texts = self._root.read_texts(names)
        return {
            path: f"{zlib.crc32((text + self._texts.get(f'{path}/{TAGS_FILE}', '')).encode()):08x}"
            for path in paths
            if (text := self._texts.get(f"{path}/{RUN_FILE}")) is not None
        }

    def read(self, paths: Collection[str]) -> Iterator[RunEntry]:
        """What the index keeps of those runs."""
        stamps = self.find()
        later = (CONFIG_FILE, ARTIFACTS_FILE)
        told = self._root.read_texts([f"{path}/{name}" for path in paths for name in later])
        for path in paths:
            if path in stamps:
                names = (RUN_FILE, TAGS_FILE)
                texts = {name: self._texts.get(f"{path}/{name}", "") for name in names}
                texts |= {name: told.get(f"{path}/{name}", "") for name in later}
                yield _make_entry(path, stamps[path], texts, {})


def create_scan(store: str, settled: Collection[str] = ()) -> DiskScan | BucketScan:
    """The scan of a store, a directory or a URL."""
    return BucketScan(store) if is_remote(store) else DiskScan(to_path(store), settled)


def list_runs(store: str) -> list[str]:
    """`experiment/name` of everything with a `run.json`, whatever it says."""
    return sorted(create_scan(store).find())


def list_beheaded(store: str, runs: Collection[str]) -> list[str]:
    """`experiment/name` of directories with a run's other files, and no `run.json`.

    Args:
      runs: those that have one.
    """
    root, known = open_folder(store), set(runs)
    return sorted(
        path
        for name in root.list_names()
        if not name.startswith(".")
        for run in root.child(name).list_names()
        if not run.startswith((".", ASIDE)) and (path := f"{name}/{run}") not in known
        if not _LEFT_BEHIND.isdisjoint(root.child(name).child(run).list_names())
    )


def is_done(entry: RunEntry) -> bool:
    """Whether a run has ended, so that its history stands."""
    return entry.facts.get("status") == "complete"


def _make_entry(path: str, stamp: str, texts: dict[str, str], last: Values) -> RunEntry:
    try:
        known = parse_facts(texts[RUN_FILE], f"{path}/{RUN_FILE}")
    except UserError as error:
        return RunEntry(path, stamp, fault=str(error))
    except KeyError:
        return RunEntry(path, "", fault=f"{path}/{RUN_FILE} went away while it was read")
    sections = {
        name: tuple(pair for pair in pairs if pair[0] not in _LEFT_OUT)
        for name, pairs in read_sections(texts.get(CONFIG_FILE, "")).items()
        if name != PUBLISHED
    }
    is_damaged = not _is_config(texts, sections) and bool(texts.get(CONFIG_FILE))
    return RunEntry(
        path,
        stamp,
        fault=f"{path}/{CONFIG_FILE} is damaged; take it from a copy" if is_damaged else "",
        facts=describe(known, path),
        tags=tuple(parse_tags(texts.get(TAGS_FILE, ""))),
        note=parse_note(texts.get(TAGS_FILE, "")),
        lineage=tuple(read_lineage(known)),
        sums=_read_sums(texts.get(ARTIFACTS_FILE, "")),
        values={**last, **get_final_values(known)},
        sections=sections,
    )


def _read_sums(text: str) -> tuple[str, ...]:
    """Of a list of files that may be damaged."""
    try:
        return tuple(list_sums(fit_artifacts(load_json(text)))) if text else ()
    except ValueError:
        return ()


def _is_config(texts: dict[str, str], sections: dict[str, Pairs]) -> bool:
    """Whether a configuration has sections, and the bytes that the summary of its run tells."""
    pairs = (pair for one in sections.values() for pair in one)
    if not sections or any("." not in key and text not in _EMPTY for key, text in pairs):
        return False
    told = _TOLD_CONFIG.search(texts.get(SUMMARY_FILE, ""))
    return told is None or f"{_compute_crc32c(texts[CONFIG_FILE]):08x}" == told[1]


def _compute_crc32c(text: str) -> int:
    import google_crc32c

    return google_crc32c.value(text.encode())


def _list_folders(root: Path) -> Iterator[str]:
    """`experiment/name` of everything that may be a run."""
    try:
        experiments = sorted(one.name for one in os.scandir(root) if one.name[:1] != ".")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(
            f"--store {str(root)!r} cannot be read: {error.strerror}; mend its rights"
        ) from error
    for experiment in experiments:
        try:
            names = sorted(one.name for one in os.scandir(root / experiment))
        except (NotADirectoryError, FileNotFoundError, PermissionError):
            continue
        yield from (f"{experiment}/{name}" for name in names if not name.startswith((".", ASIDE)))


def _stamp_files(folder: str, names: Collection[str], now: int) -> str | None:
    """Time, size and number of each file; empty where one is too young; none: no run is there."""
    parts = []
    is_young = False
    for name in names:
        try:
            found = os.stat(f"{folder}/{name}")  # noqa: PTH116 (three times faster)
        except (FileNotFoundError, NotADirectoryError):
            if name == RUN_FILE:
                return None
            parts.append("-")
            continue
        is_young = is_young or found.st_mtime_ns > now - _YOUNG_NS
        parts.append(f"{found.st_mtime_ns:x}.{found.st_size:x}.{found.st_ino:x}")
    return "" if is_young else " ".join(parts)
