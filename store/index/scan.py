"""Finds the runs of a store and which have changed, and reads their entries for the index."""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from store.lineage.ancestors import Ancestor, fit_ancestors, list_sums
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
from utils.json_types import JsonObject, JsonValue, load_json
from utils.storage.folder import ASIDE, Folder
from utils.storage.local import LocalFolder
from utils.storage.places import is_remote, open_folder, to_path

# A file as young as this may still change within the tick of its clock.
_YOUNG_NS = 2_000_000_000
# This key repeats the name; without it runs of one configuration share their entries.
_LEFT_OUT = {"run.run_id"}
# A directory with one of these files was a run's.
_LEFT_BEHIND = {METRICS_FILE, SUMMARY_FILE, ATTEMPTS_FILE, CHECKPOINTS}
# Files that show whether a run has changed: after its end, and before.
_SETTLED = (RUN_FILE, TAGS_FILE, CONFIG_FILE)
_LIVE = (*_SETTLED, METRICS_FILE)
# Files that are read of a run, besides the end of its history.
_READ = (*_SETTLED, SUMMARY_FILE, ARTIFACTS_FILE)
# Sections without entries; and a line of a commit record, found without parsing the summary.
_EMPTY = ("{}", "null")
_CONFIG_SUM = re.compile(
    rf'"path": "{re.escape(CONFIG_FILE)}",\s+"bytes": \d+,\s+"crc32c": "(\w+)"'
)


@dataclass(frozen=True)
class RunEntry:
    """The entry of one run in the index."""

    path: str  # `experiment/name`
    stamp: str  # of its files when they were read; empty: read them again next time
    # by the names of `store.query.record.FACTS`
    facts: dict[str, JsonValue] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    note: str = ""
    lineage: tuple[Ancestor, ...] = ()
    sums: tuple[str, ...] = ()  # SHA-256 of the weights that it has left
    values: Values = field(default_factory=dict)
    sections: dict[str, Pairs] = field(default_factory=dict)
    fault: str = ""  # why nothing else is known; empty if nothing is wrong


class DiskScan:
    """The runs below a directory; metrics of the `settled` ones, by path, change no more."""

    def __init__(self, root: Path, settled: Collection[str] = ()) -> None:
        self._root, self._settled = root, settled

    def find(self) -> dict[str, str]:
        """Return path -> stamp of every run."""
        stamps = {}
        now = time.time_ns()
        for path in _list_folders(self._root):
            names = _SETTLED if path in self._settled else _LIVE
            stamp = _stamp_files(f"{self._root}/{path}", names, now)
            if stamp is not None:
                stamps[path] = stamp
        return stamps

    def read(self, paths: Collection[str]) -> Iterator[RunEntry]:
        """Yield the entries of those runs; one that has been removed is left out."""
        for path in paths:
            folder, now = self._root / path, time.time_ns()
            settled, live = (_stamp_files(str(folder), names, now) for names in (_SETTLED, _LIVE))
            if settled is not None and live is not None:
                texts = LocalFolder(folder).read_texts(_READ)
                last = get_last_values(read_tail(folder / METRICS_FILE))
                entry = _make_entry(path, "", texts, last)
                yield replace(entry, stamp=settled if is_done(entry) else live)


class BucketScan:
    """The runs below a URL; small files are read whole, the history of a live run is not."""

    def __init__(self, root: str) -> None:
        self._root = open_folder(root)
        self._texts: dict[str, str] = {}

    def find(self) -> dict[str, str]:
        """Return path -> stamp of every run."""
        paths = _list_paths(self._root)
        names = [f"{path}/{name}" for path in paths for name in (RUN_FILE, TAGS_FILE)]
        self._texts = self._root.read_texts(names)
        return {
            path: f"{zlib.crc32((text + self._texts.get(f'{path}/{TAGS_FILE}', '')).encode()):08x}"
            for path in paths
            if (text := self._texts.get(f"{path}/{RUN_FILE}")) is not None
        }

    def read(self, paths: Collection[str]) -> Iterator[RunEntry]:
        """Yield the entries of those runs."""
        stamps = self.find()
        later = (CONFIG_FILE, ARTIFACTS_FILE)
        self._texts |= self._root.read_texts([f"{path}/{n}" for path in paths for n in later])
        for path in paths:
            if path in stamps:
                names = (RUN_FILE, TAGS_FILE, *later)
                texts = {name: self._texts.get(f"{path}/{name}", "") for name in names}
                yield _make_entry(path, stamps[path], texts, {})


def create_scan(store: str, settled: Collection[str] = ()) -> DiskScan | BucketScan:
    """Create the scan of a store, a directory or a URL."""
    return BucketScan(store) if is_remote(store) else DiskScan(to_path(store), settled)


def list_runs(store: str) -> list[str]:
    """List `experiment/name` of every folder with a `run.json`, whatever it contains."""
    return sorted(create_scan(store).find())


def list_beheaded(store: str, runs: Collection[str]) -> list[str]:
    """List folders that are none of the `runs`, but contain other files of a run."""
    root = open_folder(store)
    paths = sorted(set(_list_paths(root)) - set(runs))
    return [p for p in paths if not _LEFT_BEHIND.isdisjoint(root.child(p).list_names())]


def _list_paths(root: Folder) -> list[str]:
    return [
        f"{name}/{run}"
        for name in root.list_names()
        if not name.startswith(".")
        for run in root.child(name).list_names()
        if not run.startswith((".", ASIDE))
    ]


def is_done(entry: RunEntry) -> bool:
    """Return whether a run is complete, so that its history is final."""
    return entry.facts.get("status") == "complete"


def _make_entry(path: str, stamp: str, texts: dict[str, str], last: Values) -> RunEntry:
    try:
        known = parse_facts(texts[RUN_FILE], f"{path}/{RUN_FILE}")
    except UserError as error:
        return RunEntry(path, stamp, fault=str(error))
    except KeyError:
        return RunEntry(path, "", fault=f"{path}/{RUN_FILE} disappeared while it was read")
    sections = {
        name: tuple(pair for pair in pairs if pair[0] not in _LEFT_OUT)
        for name, pairs in read_sections(texts.get(CONFIG_FILE, "")).items()
        if name != PUBLISHED
    }
    config = texts.get(CONFIG_FILE, "")
    is_damaged = bool(config) and not _is_whole(config, texts.get(SUMMARY_FILE, ""), sections)
    try:
        artifacts = fit_artifacts(load_json(texts.get(ARTIFACTS_FILE) or "{}"))
    except ValueError:
        artifacts: list[JsonObject] = []
    return RunEntry(
        path,
        stamp,
        fault=f"{path}/{CONFIG_FILE} is damaged; take it from a copy" if is_damaged else "",
        facts=describe(known, path),
        tags=tuple(parse_tags(texts.get(TAGS_FILE, ""))),
        note=parse_note(texts.get(TAGS_FILE, "")),
        lineage=tuple(fit_ancestors(known.lineage)),
        sums=tuple(list_sums(artifacts)),
        values={**last, **get_final_values(known)},
        sections=sections,
    )


def _is_whole(config: str, summary: str, sections: dict[str, Pairs]) -> bool:
    """Return whether a configuration has sections and the checksum that the summary states."""
    import google_crc32c

    pairs = (pair for section in sections.values() for pair in section)
    if not sections or any("." not in key and text not in _EMPTY for key, text in pairs):
        return False
    entry = _CONFIG_SUM.search(summary)
    return entry is None or f"{google_crc32c.value(config.encode()):08x}" == entry[1]


def _list_folders(root: Path) -> Iterator[str]:
    """Yield `experiment/name` of every folder that may be a run."""
    try:
        experiments = sorted(entry.name for entry in os.scandir(root) if entry.name[:1] != ".")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(
            f"--store {str(root)!r} cannot be read: {error.strerror}; change its permissions"
        ) from error
    for experiment in experiments:
        try:
            names = sorted(entry.name for entry in os.scandir(root / experiment))
        except (NotADirectoryError, FileNotFoundError, PermissionError):
            continue
        yield from (f"{experiment}/{name}" for name in names if not name.startswith((".", ASIDE)))


def _stamp_files(folder: str, names: Collection[str], now: int) -> str | None:
    """Return time, size and inode of each file; "" if one is too young, None without a run."""
    parts = []
    is_young = False
    for name in names:
        try:
            stat = os.stat(f"{folder}/{name}")  # noqa: PTH116 (three times faster)
        except (FileNotFoundError, NotADirectoryError):
            if name == RUN_FILE:
                return None
            parts.append("-")
            continue
        is_young = is_young or stat.st_mtime_ns > now - _YOUNG_NS
        parts.append(f"{stat.st_mtime_ns:x}.{stat.st_size:x}.{stat.st_ino:x}")
    return "" if is_young else " ".join(parts)
