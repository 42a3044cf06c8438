"""`RunIndex`: a database of a store's runs, updated from their files, rebuilt if in doubt."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    Row,
    Select,
    create_engine,
    event,
    func,
    inspect,
    select,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, SQLAlchemyError

from store.index.lineage import Family, Node, unpack_ancestors
from store.index.scan import create_scan
from store.index.writer import IndexWriter, define_tables
from store.query.filters import check_keys, parse_filter
from store.query.record import FACTS
from store.query.tags import TAG
from store.record.catalogue import SCORE, SCORE_NAME, SCORE_PROBE, Score, is_candidate, select_score
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue
from utils.log import get_logger
from utils.storage.locks import hold_file
from utils.storage.places import get_user_cache, is_remote, to_path

# Another number means other tables: the index is rebuilt.
INDEX_VERSION = 6
NOTE = "note"
# Names and tags of all teachers of a run and of theirs.
TEACHER, TEACHER_TAG = "teacher", "teacher.tag"
_WAIT_S = 120
_CHUNK = 500
# Columns that only `read_family` uses.
_KIN = ("lineage", "sums")
T = TypeVar("T")


@dataclass(frozen=True)
class Refreshed:
    """The changes of an index by one refresh."""

    runs: int
    read: int
    removed: int
    rebuilt: bool


class _NoIndexError(ValueError):
    """No index has been created yet."""


class RunIndex:
    """Queries over all runs of a store.

    Args:
      store: directory or URL of the runs, `<store>/<experiment>/<run>`.
      url: of another database, as SQLAlchemy writes it; empty: a file in the user's cache, or
        memory if that cannot be written.
    """

    def __init__(self, store: str, url: str = "") -> None:
        self.store = store.rstrip("/") if is_remote(store) else str(to_path(store).resolve())
        digest = hashlib.sha256(self.store.encode()).hexdigest()[:12]
        self._tables = define_tables(f"store_{digest}")
        folder = get_user_cache("index", former="trainer/index")
        self._lock_path: Path | None = folder / f"{digest}.lock"
        self._path: Path | None = None
        try:
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_path.open("a").close()
        except OSError as error:
            if not url:
                get_logger().warning(
                    "the index cannot be saved in %s: %s; it is kept in memory for this program "
                    "alone; set XDG_CACHE_HOME to a writable directory",
                    self._lock_path.parent,
                    error.strerror,
                )
            self._lock_path = None
        if not url and self._lock_path is not None:
            self._path = self._lock_path.with_suffix(".sqlite")
            url = f"sqlite:///{self._path}"
        self._url = url or "sqlite://"
        self._engine = _create_engine(self._url)

    @property
    def is_kept(self) -> bool:
        """Whether the index outlives this object."""
        return self._url != "sqlite://"

    def refresh(self) -> Refreshed:
        """Update the index from the files; UserError if store or database cannot be read."""
        with _explained(self._url):
            try:
                stamps, settled = self._read_stamps()
            except (SQLAlchemyError, ValueError) as error:
                done = self.rebuild()
                # Logged after the rebuild: a database that cannot be used is one line, not two.
                if not isinstance(error, _NoIndexError):
                    reason = " ".join(str(getattr(error, "orig", None) or error).split())
                    get_logger().warning("the index was rebuilt from the runs: %s", reason)
                return done
            current = create_scan(self.store, settled).find()
            if current and stamps == current and "" not in current.values():
                return Refreshed(len(current), 0, 0, rebuilt=False)
            with self._locked():
                return self._update()

    def rebuild(self) -> Refreshed:
        """Rebuild the index; UserError if the store or the database cannot be used."""
        with _explained(self._url), self._locked():
            return self._make()

    def select(self, text: str) -> list[int]:
        """Return the numbers of runs that fit a filter, the most recently started first."""
        wanted, order = parse_filter(text), self.read_order()
        if not order or not wanted.keys:
            return order
        check_keys(wanted.keys, self.read_keys())
        columns = {key: self.read_column(key) for key in wanted.keys}
        return [run for run in order if wanted.fits(lambda key, run=run: columns[key].get(run))]

    def read_order(self, limit: int | None = None) -> list[int]:
        """Return the numbers of runs, the most recently started first."""
        runs = self._tables.runs.c
        text = "BINARY" if self._engine.dialect.name == "sqlite" else "C"
        keys = [
            func.coalesce(runs.id, "").collate(text),
            func.coalesce(runs.started, 0.0),
            runs.path.collate(text),
        ]
        query = select(runs.run).order_by(*(key.desc() for key in keys)).limit(limit)
        return self._query(lambda connection: list(connection.execute(query).scalars()))

    def read_runs(self, numbers: Sequence[int]) -> list[JsonObject]:
        """Read facts, tags and fault of runs, in the order of their numbers."""
        runs = self._tables.runs
        rows: dict[int, JsonObject] = {}
        for start in range(0, len(numbers), _CHUNK):
            query = select(runs).where(runs.c.run.in_(numbers[start : start + _CHUNK]))
            for row in self._read_rows(query):
                facts = {str(k): v for k, v in row._mapping.items() if k not in _KIN}
                rows[row.run] = facts | {"tags": json.loads(row.tags)}
        return [rows[number] for number in numbers if number in rows]

    def read_column(self, key: str) -> dict[int, JsonValue]:
        """Read run -> value of a key: a fact, a number or an entry of the configuration."""
        runs = self._tables.runs.c
        if key == TAG:
            query = select(runs.run, runs.tags)
            return {run: json.loads(tags) for run, tags in self._read_rows(query)}
        if key in (TEACHER, TEACHER_TAG):
            return self._read_teachers(key)
        if key in (SCORE, SCORE_NAME):
            scores = self.read_scores().items()
            return {run: s.value if key == SCORE else s.name for run, s in scores}
        if key in (*FACTS, NOTE):
            return dict(self._read_rows(select(runs.run, runs[key]).where(runs[key].is_not(None))))
        return self._read_config(key) | self._read_numbers(key)

    def read_cells(
        self, numbers: Sequence[int], keys: Sequence[str]
    ) -> dict[str, dict[int, JsonValue]]:
        """Read key -> run -> value of a few runs: of configurations and numbers, not facts."""
        tables = self._tables
        cells: dict[str, dict[int, JsonValue]] = {key: {} for key in keys}
        # From the runs to their sections to their pairs: the other way would read every value that
        # a key has anywhere.
        pairs = (
            select(tables.pairs.c.key, tables.run_sections.c.run, tables.pairs.c.text)
            .select_from(tables.run_sections)
            .join(
                tables.section_pairs,
                tables.section_pairs.c.section == tables.run_sections.c.section,
            )
            .join(tables.pairs, tables.pairs.c.pair == tables.section_pairs.c.pair)
            .where((tables.pairs.c.key + "").in_(keys))
        )
        names, values = tables.names.c, tables.values.c
        numbers_query = (
            select(names.text, values.run, values.value, values.told)
            .join(tables.names, names.name == values.name)
            .where(names.text.in_(keys))
        )
        for start in range(0, len(numbers), _CHUNK):
            chunk = numbers[start : start + _CHUNK]
            for key, run, text in self._read_rows(
                pairs.where(tables.run_sections.c.run.in_(chunk))
            ):
                cells[key][run] = json.loads(text)
            rows = self._read_rows(numbers_query.where(values.run.in_(chunk)))
            for key, run, value, word in rows:
                cells[key][run] = float(word) if word else value
        return cells

    def read_scores(self, numbers: Sequence[int] | None = None) -> dict[int, Score]:
        """Read run -> score of the evaluated ones among these runs, by default among all."""
        names, values = self._tables.names.c, self._tables.values.c
        texts = self._read_rows(select(names.name, names.text))
        wanted = {name: text for name, text in texts if is_candidate(text)}
        query = select(values.run, values.name, values.value, values.told)
        query = query.where(values.name.in_(wanted))
        if numbers is not None and len(numbers) <= _CHUNK:
            query = query.where(values.run.in_(numbers))
        numbers_of: dict[int, dict[str, float]] = {}
        for run, name, value, word in self._read_rows(query):
            numbers_of.setdefault(run, {})[wanted[name]] = float(word) if word else value
        if numbers is None:
            probes, runs = self._read_config(SCORE_PROBE), numbers_of.keys()
        else:
            probes = self.read_cells(numbers, [SCORE_PROBE])[SCORE_PROBE]
            runs = numbers_of.keys() & set(numbers)
        scores = {run: select_score(numbers_of[run], probes.get(run)) for run in runs}
        return {run: score for run, score in scores.items() if score is not None}

    def list_varied(self) -> list[str]:
        """List keys of configurations with different values."""
        key = self._tables.pairs.c.key
        query = select(key).group_by(key).having(func.count() > 1).order_by(key)
        return [row[0] for row in self._read_rows(query)]

    def read_faults(self) -> dict[int, tuple[str, str]]:
        """Read run -> path and fault of damaged runs."""
        runs = self._tables.runs.c
        query = select(runs.run, runs.path, runs.fault).where(runs.fault != "").order_by(runs.path)
        return {run: (path, fault) for run, path, fault in self._read_rows(query)}

    def count_states(self, without: str = "") -> dict[str, int]:
        """Count runs by the status in `run.json`, except those with the tag `without`."""
        runs = self._tables.runs.c
        query = select(runs.status, func.count()).group_by(runs.status)
        if without:
            query = query.where(runs.run.not_in(self.list_tagged(without)))
        return {text or "": count for text, count in self._read_rows(query)}

    def list_tagged(self, tag: str) -> list[int]:
        """List the runs with a tag."""
        runs = self._tables.runs.c
        query = select(runs.run, runs.tags).where(runs.tags.contains(json.dumps(tag)))
        return [run for run, tags in self._read_rows(query) if tag in json.loads(tags)]

    def read_keys(self) -> list[str]:
        """List all keys that some run has."""
        pairs = self._read_rows(select(self._tables.pairs.c.key).distinct())
        names = self._read_rows(select(self._tables.names.c.text))
        own = (*FACTS, TAG, NOTE, TEACHER, TEACHER_TAG, SCORE, SCORE_NAME)
        return sorted({*own, *(row[0] for row in [*pairs, *names])})

    def read_family(self) -> Family:
        """Read the lineage of all runs."""
        runs = self._tables.runs.c
        query = select(runs.run, runs.path, runs.id, runs.tags, runs.sums, runs.lineage)
        return Family(
            Node(
                run,
                path,
                name or "",
                tuple(json.loads(tags)) if tags != "[]" else (),
                tuple(sums.split()) if sums else (),
                unpack_ancestors(lineage),
            )
            for run, path, name, tags, sums, lineage in self._read_rows(query)
        )

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    def _read_teachers(self, key: str) -> dict[int, JsonValue]:
        """Read names of each run's ancestors, then and today, or their tags."""
        family = self.read_family()
        column: dict[int, JsonValue] = {}
        for run, node in family.runs.items():
            if not node.ancestors:
                continue
            words: list[JsonValue] = []
            for ancestor, teacher in family.follow(node.ancestors, run):
                if key == TEACHER_TAG:
                    words += teacher.tags if teacher else ()
                else:
                    words += [*(teacher.words if teacher else ()), *ancestor.words]
            column[run] = list(dict.fromkeys(words))
        return column

    def _read_config(self, key: str) -> dict[int, JsonValue]:
        tables = self._tables
        query = (
            select(tables.run_sections.c.run, tables.pairs.c.text)
            .join(tables.section_pairs, tables.section_pairs.c.pair == tables.pairs.c.pair)
            .join(
                tables.run_sections, tables.run_sections.c.section == tables.section_pairs.c.section
            )
            .where(tables.pairs.c.key == key)
        )
        parsed: dict[str, JsonValue] = {}
        column = {}
        for run, text in self._read_rows(query):
            if text not in parsed:
                parsed[text] = json.loads(text)
            column[run] = parsed[text]
        return column

    def _read_numbers(self, key: str) -> dict[int, JsonValue]:
        values, names = self._tables.values.c, self._tables.names.c
        query = (
            select(values.run, values.value, values.told)
            .join(self._tables.names, names.name == values.name)
            .where(names.text == key)
        )
        rows = self._read_rows(query)
        return {run: float(word) if word else value for run, value, word in rows}

    def _read_rows(self, query: Select[*tuple[Any, ...]]) -> Sequence[Row[*tuple[Any, ...]]]:
        return self._query(lambda connection: connection.execute(query).all())

    def _query(self, question: Callable[[Connection], T]) -> T:
        """Query the database; rebuild a file that turns out damaged first."""
        with _explained(self._url):
            try:
                with self._engine.connect() as connection:
                    return question(connection)
            except DatabaseError:
                if self._path is None:
                    raise
            self.rebuild()
            with self._engine.connect() as connection:
                return question(connection)

    def _read_stamps(self) -> tuple[dict[str, str], set[str]]:
        """Return path -> stamp of runs, and the complete runs; ValueError for an unusable index."""
        if self._path is not None and not self._path.is_file():
            raise _NoIndexError
        runs = self._tables.runs.c
        with self._engine.connect() as connection:
            if not inspect(connection).has_table(self._tables.head.name):
                raise _NoIndexError
            head = dict(connection.execute(select(self._tables.head)).tuples().all())
            boot = head.pop("boot", "")
            if head != {"version": str(INDEX_VERSION), "store": self.store}:
                raise ValueError("it is of another version of this program")
            if self._path is not None and boot != _get_boot():
                # The file may have been damaged by a power cut since its last check.
                if connection.exec_driver_sql("PRAGMA quick_check").scalar() != "ok":
                    raise ValueError("it is damaged")
                own = self._tables.head
                query = update(own).where(own.c.key == "boot").values(text=_get_boot())
                connection.execute(query)
                connection.commit()
            rows = connection.execute(select(runs.path, runs.stamp, runs.status)).all()
        stamps = {path: stamp for path, stamp, _ in rows}
        return stamps, {path for path, _, status in rows if status == "complete"}

    def _make(self) -> Refreshed:
        self._engine.dispose()
        if self._path is not None:
            for suffix in ("", "-journal", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        scan = create_scan(self.store)
        with self._engine.begin() as connection:
            self._tables.metadata.drop_all(connection)
            self._tables.metadata.create_all(connection)
            head = {"version": str(INDEX_VERSION), "store": self.store, "boot": _get_boot()}
            rows = [{"key": key, "text": text} for key, text in head.items()]
            connection.execute(self._tables.head.insert(), rows)
            count = IndexWriter(connection, self._tables).add(scan.read(scan.find()))
        return Refreshed(count, count, 0, rebuilt=True)

    def _update(self) -> Refreshed:
        try:
            stamps, settled = self._read_stamps()
        except (SQLAlchemyError, ValueError):
            return self._make()
        scan = create_scan(self.store, settled)
        current = scan.find()
        changed = [
            path for path, stamp in current.items() if not stamp or stamps.get(path) != stamp
        ]
        gone = stamps.keys() - current.keys()
        with self._engine.begin() as connection:
            writer = IndexWriter(connection, self._tables)
            writer.remove({*gone, *(path for path in changed if path in stamps)})
            count = writer.add(scan.read(changed))
            total = connection.execute(select(func.count()).select_from(self._tables.runs)).scalar()
        return Refreshed(total or 0, count, len(gone), rebuilt=False)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Allow one writer of this cache at a time, in any process or machine."""
        if self._lock_path is None:
            yield
            return
        with hold_file(self._lock_path):
            yield


def _create_engine(url: str) -> Engine:
    def prepare(connection: Any, _: object) -> None:
        """Trade safety for speed: the file can be rebuilt, and is checked after a reboot."""
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous=OFF")
        cursor.execute("PRAGMA cache_size=-65536")
        cursor.close()

    try:
        known = make_url(url)
        if known.get_backend_name() != "sqlite":
            return create_engine(known)
        engine = create_engine(known, connect_args={"timeout": _WAIT_S})
        event.listen(engine, "connect", prepare)
        return engine
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--index {url!r} cannot be opened: {reason}; give a URL of SQLAlchemy such as "
            "postgresql+psycopg://USER@HOST/NAME, and install its driver"
        ) from error


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        reason = " ".join(str(getattr(error, "orig", None) or error).split())
        raise UserError(
            f"the index {make_url(url).render_as_string(hide_password=True)!r} cannot be used: "
            f"{reason}; give another --index, or delete it: it is rebuilt from the runs"
        ) from error


def _get_boot() -> str:
    """Return an id of this boot: the file system keeps unsynced writes until it ends."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
