"""`Cursor`: the part of a run that has been sent to a target, in a file of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from store.record.history import Line
from utils.errors import UserError
from utils.storage.json_files import write_json
from utils.storage.locks import try_lock


@dataclass(frozen=True)
class HistoryEnd:
    """End of a part of a history, from its beginning: the number of lines and their digest."""

    lines: int = 0
    digest: str = ""

    def add(self, line: Line) -> HistoryEnd:
        """Return the end after one more line."""
        text = self.digest + json.dumps(line, sort_keys=True)
        return HistoryEnd(self.lines + 1, _hash(text))


@dataclass(frozen=True)
class Cursor:
    """Known contents of a target.

    Args:
      sent: end of the lines that it has.
      final: end of those that the trainer cannot take back; without `--live` the same.
      generation: counts histories: if the trainer goes back before `final`, which it does only by
        hand or if a checkpoint was damaged, the target begins another run.
      ended: time of the run's end that the target has, or None.
    """

    sent: HistoryEnd = field(default_factory=HistoryEnd)
    final: HistoryEnd = field(default_factory=HistoryEnd)
    generation: int = 1
    ended: float | None = None


class CursorFile:
    """File of the cursor of one run and one target, held by one mirror at a time.

    Args:
      folder: of all cursors.
      names: identify the run and the target.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self._names = list(names)
        self.path = folder / f"{_hash(json.dumps(names))}.json"

    def read(self) -> Cursor:
        """Read the cursor; a new one if there is no file, a UserError if it is damaged."""
        try:
            facts = json.loads(self.path.read_text(encoding="utf-8"))
            ends = HistoryEnd(**facts["sent"]), HistoryEnd(**facts["final"])
            return Cursor(*ends, facts["generation"], facts["ended"])
        except FileNotFoundError:
            return Cursor()
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"the cursor {self.path} is damaged; delete it: the contents of the target are "
                "found anew"
            ) from error

    def write(self, cursor: Cursor) -> None:
        """Write the cursor; it is on the disk when this returns."""
        facts = {"schema_version": 2, "of": self._names, **asdict(cursor)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, facts, indent=1)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Lock out other mirrors.

        Raises:
          UserError: another one is running, or the cursors' directory cannot be written.
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
                    f"another mirror sends {self._names[-1]} to the same target; wait for it, or "
                    "end it first"
                )
            yield


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
