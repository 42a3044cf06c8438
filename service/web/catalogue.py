"""`RunCatalogue`: answers for the runs of a store out of the index, in step with the files."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from service.web.problems import ServiceProblem
from store.index.database import RunIndex
from store.query.filters import check_keys
from store.query.listing import choose_usual, read_rows, select_runs
from store.query.record import RunRecord
from store.query.selection import RunSelector
from store.record.ids import check_name
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue
from utils.storage.places import is_remote, join_place, to_path

# Questions that follow each other more closely than this share one look at the files.
_FRESH_S = 1.0


class RunCatalogue:
    """The runs of a store.

    Args:
      store: directory or URL.
      url: of another database of the index; empty: a file in the user's cache.
    """

    def __init__(self, store: str, url: str = "") -> None:
        self.store = store
        self._index = RunIndex(store, url)
        self._lock = threading.Lock()
        self._looked = -_FRESH_S

    def get_index(self) -> RunIndex:
        """The index, not older than a second."""
        with self._lock:
            if time.monotonic() - self._looked >= _FRESH_S:
                self._index.refresh()
                self._looked = time.monotonic()
        return self._index

    def expire(self) -> None:
        """Look at the files at the next question: this program has changed some."""
        with self._lock:
            self._looked = -_FRESH_S

    def select(
        self, text: str, *, sort: str = "", reverse: bool = False, archived: bool = False
    ) -> list[int]:
        """Numbers of the runs that fit a filter, in order.

        Args:
          archived: those that are archived, too; a filter that asks for tags has them anyway.

        Raises:
          UserError: the filter breaks the rules, or no run has one of its keys.
        """
        index = self.get_index()
        if sort:
            check_keys([sort], index.read_keys(), "sort")
        return select_runs(index, text, sort=sort, reverse=reverse, archived=archived)

    def read_rows(self, numbers: list[int], keys: list[str]) -> list[JsonObject]:
        """Facts of runs with the values of keys, as `python -m tools.runs list --json` has them.

        Raises:
          UserError: no run has one of the keys.
        """
        index = self.get_index()
        check_keys(keys, index.read_keys(), "show")
        return read_rows(index, numbers, keys)

    def create_selector(self) -> RunSelector:
        """Finds runs as people name them."""
        return RunSelector(self.get_index())

    def read_column(self, key: str) -> dict[int, JsonValue]:
        """Run -> value of a key."""
        return self.get_index().read_column(key)

    def list_keys(self) -> list[str]:
        """Every key that some run has."""
        return self.get_index().read_keys()

    def choose_usual(self) -> list[str]:
        """Numbers that are shown where nothing else is asked for."""
        return choose_usual(self.list_keys())

    def open_run(self, experiment: str, name: str) -> RunRecord:
        """A run by its two names.

        Raises:
          ServiceProblem: there is none.
        """
        try:
            check_name("experiment", experiment)
            check_name("run", name)
            place = join_place(self.store, experiment, name)
            if not is_remote(place) and not _is_below(to_path(place), to_path(self.store)):
                raise UserError(f"run {experiment}/{name}: a link leads out of the store")
            return RunRecord(place)
        except UserError as error:
            raise ServiceProblem(404, str(error)) from error

    def close(self) -> None:
        """Let go of the database."""
        self._index.close()


def _is_below(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root.resolve())
