"""Whom a run has learnt from, generation by generation: noted at its start, asked for later.

A run notes its teachers in `run.json`, with what was known of them then, and after each of them
those that it had learnt from itself. So a chain stands in its youngest run alone, and holds when
runs between were moved or removed: an ancestor is found by its id, and weights that lie in no run
by the checksum of their file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from store.query.record import RunRecord, get_final_values
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue, load_json
from utils.storage.folder import Folder

LINEAGE = "lineage"
# Beside stored answers: whose they are.
LINEAGE_FILE = "lineage.json"
TEACHER, CACHE = "teacher", "cache"
# The tag of a run whose students are in doubt.
BAD = "bad"
_JUDGED = ("eval.", "test.")
_TEXTS = ("via", "hash", "place", "id", "path", "weights", "through")
_NUMBERS = ("scores", "judged")


@dataclass(frozen=True)
class Ancestor:
    """A teacher, or a teacher of one.

    Args:
      generation: 1: taught the run itself.
      via: teacher: it answered in the step; cache: by answers that were stored.
      hash: of weights, name, classes and transform, as checkpoints and caches know it.
      place: as it was named to its student.
      id, path: of its run, `path` as it was then; empty: its weights lay in no run.
      weights: SHA-256 of their file; empty: they were a checkpoint.
      through: of a teacher's teacher, the hash of the teacher that leads to it; empty: not told.
      scores: numbers of its own run's end, as they were when its student began.
      judged: what it reached on its student's evaluation split before the first step.
    """

    generation: int
    via: str = TEACHER
    hash: str = ""
    place: str = ""
    id: str = ""
    path: str = ""
    weights: str = ""
    through: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    judged: Mapping[str, float] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """What a filter may call it."""
        name = self.path.rpartition("/")[2]
        found = (self.path, name, self.id, self.hash, self.weights, self.place)
        return list(dict.fromkeys(one for one in found if one))


def note_run(own: Ancestor, folder: Folder) -> list[Ancestor]:
    """A teacher with what its run says of itself, and those that it has learnt from.

    Args:
      own: with what is known without its run.
      folder: of its run; of an early version it tells less.
    """
    try:
        record = RunRecord(folder)
    except UserError:
        return [own]
    values = get_final_values(record.facts).items()
    scores = {k: v for k, v in values if k.startswith(_JUDGED) and math.isfinite(v)}
    name = record.facts.get("id")
    known = replace(
        own, id=name if isinstance(name, str) else "", path=record.path, scores=scores,
        weights=own.weights or _find_sum(record, own.place),
    )  # fmt: skip
    return [known, *raise_elders(read_lineage(record.facts), known)]


def raise_elders(elders: Iterable[Ancestor], own: Ancestor) -> list[Ancestor]:
    """A teacher's ancestors as its student's."""
    through = own.through or own.hash
    return [
        replace(one, generation=one.generation + own.generation, through=through) for one in elders
    ]


def read_lineage(facts: Mapping[str, JsonValue]) -> list[Ancestor]:
    """The ancestors that a `run.json`, or a cache's note, tells; of earlier programs none."""
    told = facts.get(LINEAGE)
    found = [_fit(one) for one in told] if isinstance(told, list) else []
    return sorted((one for one in found if one is not None), key=lambda one: one.generation)


def tell_lineage(ancestors: Iterable[Ancestor]) -> list[JsonValue]:
    """The same as it is written."""
    return [asdict(one) for one in ancestors]


def read_note(folder: Folder) -> list[Ancestor]:
    """Whose answers a cache holds; none where it does not say."""
    text = folder.read_texts([LINEAGE_FILE]).get(LINEAGE_FILE, "{}")
    try:
        told = load_json(text)
    except ValueError:
        return []
    found = read_lineage(told) if isinstance(told, dict) else []
    return [replace(one, via=CACHE) if one.generation == 1 else one for one in found]


def format_note(ancestors: Iterable[Ancestor]) -> str:
    """The text of a cache's note."""
    told: JsonObject = {"schema_version": 1, LINEAGE: tell_lineage(ancestors)}
    return json.dumps(told, indent=1) + "\n"


def join_lineages(old: Sequence[Ancestor], new: Sequence[Ancestor]) -> list[Ancestor]:
    """What a run has noted at its first start, and teachers that a later attempt brought."""
    known = {_get_identity(one) for one in old}
    return [*old, *(one for one in new if _get_identity(one) not in known)]


def join_notes(notes: Iterable[Sequence[Ancestor]]) -> list[Ancestor]:
    """Whose answers a cache holds that was made of several."""
    found = {(_get_identity(one), one.through): one for note in notes for one in note}
    return sorted(found.values(), key=lambda one: one.generation)


def choose_taught(known: Sequence[Ancestor], hashes: Collection[str]) -> list[Ancestor]:
    """Those of a cache's ancestors that stand behind some of its teachers.

    An elder of which nobody has noted to whom it leads stays, as do all where no teacher fits.

    Args:
      hashes: of the teachers whose answers are used.
    """
    if not any(one.generation == 1 and one.hash in hashes for one in known):
        return list(known)
    return [
        one for one in known if (one.hash if one.generation == 1 else one.through) in {"", *hashes}
    ]


def list_sums(artifacts: Iterable[Mapping[str, JsonValue]]) -> list[str]:
    """SHA-256 of the weights among files that a run has left behind."""
    found = [one.get("sha256") for one in artifacts if one["kind"] == "weights"]
    return [one for one in found if isinstance(one, str) and one]


def _get_identity(one: Ancestor) -> tuple[object, ...]:
    return one.generation, one.id or one.weights or one.hash or one.place


def _find_sum(record: RunRecord, place: str) -> str:
    """SHA-256 of the weights that a place below a run, or the run itself, means."""
    name = place.rstrip("/").rpartition("/")[2]
    sums = {
        one["path"]: one.get("sha256")
        for one in record.artifacts
        if one["kind"] == "weights" and isinstance(one.get("sha256"), str)
    }
    if name in sums:
        return sums[name]
    is_run = name == record.folder.name
    return next(iter(sums.values())) if is_run and len(sums) == 1 else ""


def _fit(told: JsonValue) -> Ancestor | None:
    """An entry whose values have the kinds that they should; none: it is no entry."""
    if not isinstance(told, dict):
        return None
    generation = told.get("generation")
    if type(generation) is not int or generation < 1:
        return None
    texts = {name: told[name] for name in _TEXTS if isinstance(told.get(name), str)}
    numbers = {name: _fit_numbers(told.get(name)) for name in _NUMBERS}
    return Ancestor(generation, **texts, **numbers)


def _fit_numbers(told: JsonValue) -> dict[str, float]:
    pairs = told.items() if isinstance(told, dict) else ()
    return {
        name: float(value)
        for name, value in pairs
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
