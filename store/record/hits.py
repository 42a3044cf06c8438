"""`eval_hits.bin`: which examples a model classified correctly, one bit each, of two evaluations.

The first line is JSON: for `last` and `best` the step, the number of examples, a hash of their
identities, and the offset of their bits after that line. Bits are in the order of the split, the
first example in the highest bit. With this file two runs are compared on the same examples.

`best_before` is the best evaluation before `best`; a rollback to before `best` makes it `best`
again. One is enough: its checkpoint is complete before a better evaluation replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.json_types import JsonObject, is_count, load_json

HITS_FILE = "eval_hits.bin"
SCHEMA_VERSION = 2
LAST, BEST, BEFORE = "last", "best", "best_before"


@dataclass(frozen=True)
class Hits:
    """Which examples were correct; `ids_sha256` identifies them, the first is the highest bit."""

    step: int
    examples: int
    ids_sha256: str
    bits: bytes

    def count(self) -> int:
        """Count the examples that were classified correctly."""
        return int.from_bytes(self.bits, "big").bit_count()


class HitsFile:
    """The file of a run in `folder`, with its last and best evaluation, for its only writer."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / HITS_FILE
        self._entries: dict[str, Hits] = {}
        if self._path.is_file():
            self._entries = parse_hits(self._path.read_bytes()) or {}

    def note(self, hits: Hits, *, is_best: bool) -> None:
        """Save an evaluation's hits; OSError if the disk refuses."""
        entries, best = self._entries, self._entries.get(BEST)
        entries[LAST] = hits
        if is_best:
            if best is not None and best.step < hits.step:
                entries[BEFORE] = best
            entries[BEST] = hits
        self._write()

    def drop_later_than(self, step: int) -> None:
        """Drop the evaluations that a run resumed at a step will repeat."""
        kept = {name: hits for name, hits in self._entries.items() if hits.step <= step}
        if BEFORE in kept and BEST not in kept:
            kept[BEST] = kept.pop(BEFORE)
        if kept != self._entries:
            self._entries = kept
            self._write()

    def _write(self) -> None:
        if not self._entries:
            self._path.unlink(missing_ok=True)
            return
        staged = self._path.with_name(HITS_FILE + ".tmp")
        staged.write_bytes(format_hits(self._entries))
        staged.replace(self._path)


def format_hits(entries: Mapping[str, Hits]) -> bytes:
    """Format the bytes of the file: its line, and the bits of each entry."""
    lines: dict[str, JsonObject] = {}
    bits = b""
    for name, hits in sorted(entries.items()):
        lines[name] = {
            "step": hits.step,
            "examples": hits.examples,
            "ids_sha256": hits.ids_sha256,
            "offset": len(bits),
            "bytes": len(hits.bits),
            "crc32c": _sign(hits.bits),
        }
        bits += hits.bits
    line: JsonObject = {"schema_version": SCHEMA_VERSION, "entries": lines}
    line["crc32c"] = _sign(json.dumps(line).encode())
    return json.dumps(line).encode() + b"\n" + bits


def parse_hits(content: bytes) -> dict[str, Hits] | None:
    """Parse the entries of a file; None if it is torn or any bit of it has changed."""
    bits = content.partition(b"\n")[2]
    try:
        header: Any = read_header(content)
        hits = {name: _parse_entry(entry, bits) for name, entry in header["entries"].items()}
        return hits if format_hits(hits) == content else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_header(content: bytes) -> JsonObject | None:
    """Parse the first line; None if it is no JSON object."""
    try:
        header = load_json(content.partition(b"\n")[0].decode("utf-8"))
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def _parse_entry(entry: JsonObject, bits: bytes) -> Hits:
    if not all(is_count(entry[name]) for name in ("step", "examples", "offset", "bytes")):
        raise ValueError("an entry has no counts")
    if not isinstance(entry["ids_sha256"], str) or entry["examples"] > 8 * entry["bytes"]:
        raise ValueError("an entry has too few bits, or no hash")
    part = bits[entry["offset"] : entry["offset"] + entry["bytes"]]
    return Hits(entry["step"], entry["examples"], entry["ids_sha256"], part)


def _sign(content: bytes) -> str:
    import google_crc32c

    return f"{google_crc32c.value(content):08x}"
