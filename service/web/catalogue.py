"""`RunCatalogue`: the runs of a store from the index, in step with the files."""

from __future__ import annotations

import contextlib
import threading
import time

from service.web.problems import ServiceProblem
from store.index.database import RunIndex
from store.quality.calibration import Verdicts
from store.quality.trends import read_verdicts
from store.query.filters import check_keys
from store.query.listing import choose_usual, read_rows, select_runs
from store.query.record import RunRecord
from store.query.selection import RunSelector
from store.record.ids import check_name
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.folder import StorageError
from utils.storage.places import is_remote, join_path_or_url, to_path
from utils.storage.retry import hurry

# Requests within this time share one look at the files.
_FRESH_S = 1.0
# The same for the reports of a bucket, which are read one by one.
_FRESH_REPORTS_S = 60.0


class RunCatalogue:
    """The runs of a store.

    Args:
      store: directory or URL.
      url: of another database of the index; a file in the user's cache if empty.
    """

    def __init__(self, store: str, url: str = "") -> None:
        self.store = store
        self._index = RunIndex(store, url)
        self._lock = threading.Lock()
        self._looked = -_FRESH_S
        self._verdicts: tuple[float, Verdicts] = (-_FRESH_REPORTS_S, {})

    def get_index(self) -> RunIndex:
        """Return the index, refreshed if older than a second."""
        with self._lock:
            if time.monotonic() - self._looked >= _FRESH_S:
                self._index.refresh()
                self._looked = time.monotonic()
        return self._index

    def expire(self) -> None:
        """Refresh the index at the next request: this program has changed files."""
        with self._lock:
            self._looked = -_FRESH_S

    def select(
        self, text: str, *, sort: str = "", reverse: bool = False, archived: bool = False
    ) -> list[int]:
        """Return the numbers of the runs that fit a filter, in order; UserError if it is malformed.

        Archived runs are included if `archived`, or if the filter names tags.
        """
        index = self.get_index()
        if sort:
            check_keys([sort], index.read_keys(), "sort")
        return select_runs(index, text, sort=sort, reverse=reverse, archived=archived)

    def read_rows(self, numbers: list[int], keys: list[str]) -> list[JsonObject]:
        """Read runs with values of keys, as `tools.runs list --json`; UserError for others."""
        index = self.get_index()
        check_keys(keys, index.read_keys(), "show")
        return read_rows(index, numbers, keys)

    def create_selector(self) -> RunSelector:
        """Create a selector that finds runs by the names that people use."""
        return RunSelector(self.get_index())

    def list_keys(self) -> list[str]:
        """List every key that some run has."""
        return self.get_index().read_keys()

    def choose_usual(self) -> list[str]:
        """Choose the numbers to show by default."""
        return choose_usual(self.list_keys())

    def open_run(self, experiment: str, name: str) -> RunRecord:
        """Open a run by its two names; a `ServiceProblem` if it does not exist."""
        try:
            check_name("experiment", experiment)
            check_name("run", name)
            place = join_path_or_url(self.store, experiment, name)
            root = to_path(self.store).resolve() if not is_remote(self.store) else None
            if root is not None and not to_path(place).resolve().is_relative_to(root):
                raise UserError(f"run {experiment}/{name}: a link leads out of the store")
            return RunRecord(place)
        except UserError as error:
            raise ServiceProblem(404, str(error)) from error

    def read_verdicts(self) -> Verdicts:
        """Read the compiler's estimates, of a bucket once a minute; empty if it does not answer."""
        if not is_remote(self.store):
            return read_verdicts(self.store)
        read, verdicts = self._verdicts
        if time.monotonic() - read >= _FRESH_REPORTS_S:
            with contextlib.suppress(StorageError), hurry():
                verdicts = read_verdicts(self.store)
            self._verdicts = (time.monotonic(), verdicts)
        return verdicts

    def close(self) -> None:
        """Close the database."""
        self._index.close()
