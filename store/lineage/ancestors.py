"""The lineage of a run: its teachers and theirs, recorded at its start.

A run records its teachers in `run.json`, with their state at that time, and after each of them its
own teachers. So a chain is complete in its youngest run, and survives when others are moved or
removed: an ancestor is found by its id, and weights outside runs by the checksum of their file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from store.quality.field_types import is_number
from store.query.record import RunRecord, get_final_values
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject, JsonValue, load_json
from utils.storage.folder import Folder

LINEAGE = "lineage"
# Beside cached outputs: the teachers that computed them.
LINEAGE_FILE = "lineage.json"
TEACHER, CACHE = "teacher", "cache"
# The tag of a run whose students are doubtful.
BAD = "bad"
_JUDGED = ("eval.", "test.")
_TEXTS = ("via", "hash", "place", "id", "path", "weights", "through")
_NUMBERS = ("scores", "judged")


@dataclass(frozen=True)
class Ancestor:
    """A teacher, or a teacher of one."""

    generation: int  # 1 for teachers of the run itself
    via: str = TEACHER  # teacher: it ran in the step; cache: by cached outputs
    hash: str = ""  # of weights, name, classes and transform, as in checkpoints and caches
    place: str = ""  # as it was named to its student
    # id, path: of its run at that time; empty if its weights were in no run
    id: str = ""
    path: str = ""
    weights: str = ""  # SHA-256 of their file; empty for a checkpoint
    # of a teacher's teacher, the hash of the teacher that leads to it; "" if unknown
    through: str = ""
    # Numbers of its own run's end, as they were when its student began
    scores: Mapping[str, float] = field(default_factory=dict)
    # its metrics on its student's evaluation split before the first step
    judged: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """Names that a filter may use for it."""
        names = (self.path, self.path.rpartition("/")[2], self.id, self.hash, self.weights)
        return list(dict.fromkeys(name for name in (*names, self.place) if name))


def note_run(own: Ancestor, folder: Folder) -> list[Ancestor]:
    """Return a teacher with the data of its run's folder, and the teachers of that run."""
    try:
        record = RunRecord(folder)
    except UserError:
        return [own]
    values = get_final_values(record.facts).items()
    scores = {k: v for k, v in values if k.startswith(_JUDGED) and math.isfinite(v)}
    known = replace(
        own,
        id=record.facts.id or "",
        path=record.path,
        scores=scores,
        weights=own.weights or _find_sum(record, own.place),
    )
    return [known, *raise_elders(fit_ancestors(record.facts.lineage), known)]


def raise_elders(elders: Iterable[Ancestor], own: Ancestor) -> list[Ancestor]:
    """Return a teacher's ancestors as those of its student."""
    through, more = own.through or own.hash, own.generation
    return [replace(item, generation=item.generation + more, through=through) for item in elders]


def read_lineage(facts: JsonMapping) -> list[Ancestor]:
    """Read the ancestors of a `run.json`, or a cache's note; empty for earlier programs."""
    entries = facts.get(LINEAGE)
    return fit_ancestors(entries) if isinstance(entries, list) else []


def fit_ancestors(entries: Iterable[JsonValue]) -> list[Ancestor]:
    """Return the ancestors among the entries of a lineage, the nearest first."""
    ancestors = filter(None, map(_fit, entries))
    return sorted(ancestors, key=lambda ancestor: ancestor.generation)


def view_lineage(ancestors: Iterable[Ancestor]) -> list[JsonValue]:
    """Return ancestors as JSON objects."""
    return [asdict(ancestor) for ancestor in ancestors]


def read_note(folder: Folder) -> list[Ancestor]:
    """Read the teachers whose outputs a cache holds; empty if they are not recorded."""
    text = folder.read_texts([LINEAGE_FILE]).get(LINEAGE_FILE, "{}")
    try:
        note = load_json(text)
    except ValueError:
        return []
    ancestors = read_lineage(note) if isinstance(note, dict) else []
    return [replace(a, via=CACHE) if a.generation == 1 else a for a in ancestors]


def format_note(ancestors: Iterable[Ancestor]) -> str:
    """Format a cache's note."""
    return json.dumps({"schema_version": 1, LINEAGE: view_lineage(ancestors)}, indent=1) + "\n"


def join_lineages(old: Sequence[Ancestor], new: Sequence[Ancestor]) -> list[Ancestor]:
    """Join a run's lineage at its first start with teachers that a later attempt brought."""
    known = {_get_identity(ancestor) for ancestor in old}
    return [*old, *(ancestor for ancestor in new if _get_identity(ancestor) not in known)]


def join_notes(notes: Iterable[Sequence[Ancestor]]) -> list[Ancestor]:
    """Join the notes of several caches that became one."""
    joined = {(_get_identity(item), item.through): item for note in notes for item in note}
    return sorted(joined.values(), key=lambda item: item.generation)


def choose_taught(known: Sequence[Ancestor], hashes: Collection[str]) -> list[Ancestor]:
    """Return the ancestors of a cache that are behind the teachers with these hashes.

    An ancestor whose student is not recorded stays, as do all if no teacher fits.
    """
    if not any(item.generation == 1 and item.hash in hashes for item in known):
        return list(known)
    wanted = {"", *hashes}
    return [
        item for item in known if (item.hash if item.generation == 1 else item.through) in wanted
    ]


def list_sums(artifacts: Iterable[Mapping[str, JsonValue]]) -> list[str]:
    """List the SHA-256 of the weights among the files that a run has left."""
    sums = (entry.get("sha256") for entry in artifacts if entry["kind"] == "weights")
    return [digest for digest in sums if isinstance(digest, str) and digest]


def _get_identity(item: Ancestor) -> tuple[object, ...]:
    return item.generation, item.id or item.weights or item.hash or item.place


def _find_sum(record: RunRecord, place: str) -> str:
    """Find the SHA-256 of a run's weights by their path, or the run's if it has only one file."""
    name = place.rstrip("/").rpartition("/")[2]
    sums = {
        entry["path"]: entry["sha256"]
        for entry in record.artifacts
        if entry["kind"] == "weights" and isinstance(entry.get("sha256"), str)
    }
    if name in sums:
        return sums[name]
    is_run = name == record.folder.name
    return next(iter(sums.values())) if is_run and len(sums) == 1 else ""


def _fit(entry: JsonValue) -> Ancestor | None:
    """Create an ancestor from the fields of the right types; None without a generation."""
    if not isinstance(entry, dict):
        return None
    generation = entry.get("generation")
    if type(generation) is not int or generation < 1:
        return None
    texts = {name: entry[name] for name in _TEXTS if isinstance(entry.get(name), str)}
    numbers: JsonObject = {}
    for name in _NUMBERS:
        values = entry.get(name)
        pairs = values.items() if isinstance(values, dict) else ()
        finite = {k: float(v) for k, v in pairs if is_number(v) and math.isfinite(v)}
        numbers[name] = finite
    return Ancestor(generation, **texts, **numbers)
