"""`eval_hits.bin`: which examples a model has answered rightly, one bit each, of two evaluations.

The first line is JSON: for `last` and `best` the step, the number of examples, a hash of which
examples they are, and where the bits lie behind the line, in the order of the split, the first
example in the highest bit. With it two runs are compared on the very same examples.

A checkpoint stands before the next evaluation can be better, so where a run goes back before the
best one, the best one before that (`best_before`) is what counts again; it is kept for that alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from utils.json_types import JsonObject, is_count, load_json

HITS_FILE = "eval_hits.bin"
SCHEMA_VERSION = 2
LAST, BEST, BEFORE = "last", "best", "best_before"


@dataclass(frozen=True)
class Hits:
    """One evaluation's answers.

    Attributes:
      step: that the model had made.
      examples: how many bits count.
      ids_sha256: which examples, in which order: equal hashes, equal examples.
      bits: the first example in the highest bit of the first byte.
    """

    step: int
    examples: int
    ids_sha256: str
    bits: bytes

    def count(self) -> int:
        """Examples that were answered rightly."""
        return int.from_bytes(self.bits, "big").bit_count()


class HitsFile:
    """The answers of a run's last and best evaluation, for the one program that writes it.

    Args:
      folder: the run's directory.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / HITS_FILE
        self._entries: dict[str, Hits] = {}
        if self._path.is_file():
            self._entries = parse_hits(self._path.read_bytes()) or {}

    def note(self, hits: Hits, *, is_best: bool) -> None:
        """Keep an evaluation's answers.

        Raises:
          OSError: the disk refuses.
        """
        entries, best = self._entries, self._entries.get(BEST)
        entries[LAST] = hits
        if is_best:
            if best is not None and best.step < hits.step:
                entries[BEFORE] = best
            entries[BEST] = hits
        self._write()

    def drop_later_than(self, step: int) -> None:
        """Forget what a run that goes on from a step does again.

        Raises:
          OSError: the disk refuses.
        """
        kept = {name: one for name, one in self._entries.items() if one.step <= step}
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
    """The bytes of the file: its line, and the bits of each entry."""
    told: dict[str, JsonObject] = {}
    bits = b""
    for name in sorted(entries):
        one = entries[name]
        told[name] = {"step": one.step, "examples": one.examples, "ids_sha256": one.ids_sha256,
                      "offset": len(bits), "bytes": len(one.bits),
                      "crc32c": _sign(one.bits)}  # fmt: skip
        bits += one.bits
    line: JsonObject = {"schema_version": SCHEMA_VERSION, "entries": told}
    line["crc32c"] = _sign(json.dumps(line).encode())
    return json.dumps(line).encode() + b"\n" + bits


def parse_hits(content: bytes) -> dict[str, Hits] | None:
    """The entries of a file; none: it is torn, or one bit of it is not as it was written."""
    line, _, bits = content.partition(b"\n")
    try:
        told = load_json(line.decode("utf-8"))["entries"]
        found = {name: _take(one, bits) for name, one in told.items()}
        return found if format_hits(found) == content else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_header(content: bytes) -> JsonObject | None:
    """What the first line says; none: it is no JSON object."""
    try:
        told = load_json(content.partition(b"\n")[0].decode("utf-8"))
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _take(told: JsonObject, bits: bytes) -> Hits:
    if not all(is_count(told[name]) for name in ("step", "examples", "offset", "bytes")):
        raise ValueError("an entry holds no counts")
    if not isinstance(told["ids_sha256"], str) or told["examples"] > 8 * told["bytes"]:
        raise ValueError("an entry holds too few bits, or no hash")
    piece = bits[told["offset"] : told["offset"] + told["bytes"]]
    return Hits(told["step"], told["examples"], told["ids_sha256"], piece)


def _sign(content: bytes) -> str:
    import google_crc32c

    return f"{google_crc32c.value(content):08x}"
