"""`Cursor`: how far a run has been sent to a target, in a file of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from store.record.history import Line
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.json_files import write_json
from utils.storage.locks import try_lock
from utils.storage.places import to_path


@dataclass(frozen=True)
class HistoryEnd:
    """A place in a history: so many lines lie before it, and this is what they say.

    Args:
      digest: of those lines; it tells whether a history still begins with them.
    """

    lines: int = 0
    digest: str = ""

    def add(self, line: Line) -> HistoryEnd:
        """The place behind one more line."""
        text = self.digest + json.dumps(line, sort_keys=True)
        return HistoryEnd(
            self.lines + 1, hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
        )


@dataclass(frozen=True)
class Cursor:
    """What a target is known to hold.

    Args:
      sent: behind the last line that is there.
      final: behind the last of them that the trainer cannot take back; without `--live` the same.
      generation: counts histories: the trainer has gone back behind `final`, which it does only by
        hand or where a checkpoint was damaged, and the target has begun another run.
      ended: when the run ended that the target has been told the end of; none: of none.
    """

    sent: HistoryEnd = field(default_factory=HistoryEnd)
    final: HistoryEnd = field(default_factory=HistoryEnd)
    generation: int = 1
    ended: float | None = None


class CursorFile:
    """Keeps the cursor of one run and one target; one mirror at a time has it.

    Args:
      folder: of all cursors.
      names: what tells this run and target from all others.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self._names = list(names)
        digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=12).hexdigest()
        self.path = folder / f"{digest}.json"

    def read(self) -> Cursor:
        """The cursor; a new one where none is kept.

        Raises:
          UserError: the file is damaged.
        """
        try:
            facts = json.loads(self.path.read_text(encoding="utf-8"))
            return _parse(facts)
        except FileNotFoundError:
            return Cursor()
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the cursor {self.path} is damaged; delete it: what the target holds already is "
                "found there"
            ) from error

    def write(self, cursor: Cursor) -> None:
        """Keep a cursor, on the disk when this returns."""
        facts = {"schema_version": 2, "of": self._names, **asdict(cursor)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, facts, indent=1)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other mirrors out.

        Raises:
          UserError: one is at work, or the cursors' directory cannot be written.
        """
        lock = self.path.with_suffix(".lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("a")
        except OSError as error:
            raise UserError(
                f"--state ({str(lock.parent)!r}) cannot be written: {error.strerror}; give a "
                "directory that can"
            ) from error
        with file:
            if not try_lock(file):
                raise UserError(
                    f"another mirror sends {self._names[-1]} to the same target; let it go on, or "
                    "end it first"
                )
            yield


def get_state_folder(text: str) -> Path:
    """Where cursors lie: they must outlive a cache."""
    root = text or os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return to_path(root, "--state") / ("" if text else "trainer/mirror")


def _parse(facts: JsonObject) -> Cursor:
    return Cursor(
        sent=HistoryEnd(**facts["sent"]), final=HistoryEnd(**facts["final"]),
        generation=facts["generation"], ended=facts["ended"],
    )  # fmt: skip
