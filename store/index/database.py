"""`RunIndex`: the database of a store's runs, kept in step with the files, rebuilt on any doubt."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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

from store.index.kin import Family, Kin, unpack_ancestors
from store.index.scan import create_scan
from store.index.tables import define_tables
from store.index.writer import IndexWriter
from store.query.filters import check_keys, parse_filter
from store.query.record import FACTS
from store.query.tags import TAG
from store.record.score import SCORE, SCORE_NAME, SCORE_PROBE, Score, choose_score, is_candidate
from utils.errors import UserError
from utils.json_types import JsonObject, JsonValue
from utils.log import get_logger
from utils.storage.locks import hold_file
from utils.storage.places import get_user_cache, is_remote, to_path

# Another number means other tables: the index is rebuilt.
INDEX_VERSION = 6
NOTE = "note"
# Of all whom a run has learnt from: what they are called, and what people have said of them.
TEACHER, TEACHER_TAG = "teacher", "teacher.tag"
_WAIT_S = 120
_CHUNK = 500
# Of a run's row, what `read_family` alone makes sense of.
_KIN = ("lineage", "sums")
T = TypeVar("T")


@dataclass(frozen=True)
class Refreshed:
    """What a look at the store has changed in its index."""

    runs: int
    read: int
    removed: int
    rebuilt: bool


class _NoIndexError(ValueError):
    """Nothing has been made yet."""


class RunIndex:
    """Answers for all runs of a store.

    Args:
      store: directory or URL of the runs, `<store>/<experiment>/<run>`.
      url: of another database, as SQLAlchemy writes it; empty: a file in the user's cache, or
        memory where that cannot be written.

    Raises:
      UserError: a database that nobody knows.
    """

    def __init__(self, store: str, url: str = "") -> None:
        self.store = store.rstrip("/") if is_remote(store) else str(to_path(store).resolve())
        digest = hashlib.sha256(self.store.encode()).hexdigest()[:12]
        self._tables = define_tables(f"store_{digest}")
        self._lock_path: Path | None = get_user_cache("trainer", "index") / f"{digest}.lock"
        self._path: Path | None = None
        try:
            self._lock_path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_path.open("a").close()
        except OSError as error:
            if not url:
                get_logger().warning(
                    "the index cannot be kept in %s: %s; it is made in memory for this question "
                    "alone; set XDG_CACHE_HOME to a place that can be written",
                    self._lock_path.parent, error.strerror,
                )  # fmt: skip
            self._lock_path = None
        if not url and self._lock_path is not None:
            self._path = self._lock_path.with_suffix(".sqlite")
            url = f"sqlite:///{self._path}"
        self._url = url or "sqlite://"
        self._engine = _create_engine(self._url)

    @property
    def is_kept(self) -> bool:
        """Whether another object of this class finds what this one has made."""
        return self._url != "sqlite://"

    def refresh(self) -> Refreshed:
        """Bring the index in step with the files.

        Raises:
          UserError: the store or the database cannot be read.
        """
        with _explained(self._url):
            try:
                stamps, settled = self._read_stamps()
            except (SQLAlchemyError, ValueError) as error:
                done = self.rebuild()
                # Said once it is made: a database that cannot be used is one line, not two.
                if not isinstance(error, _NoIndexError):
                    reason = " ".join(str(getattr(error, "orig", None) or error).split())
                    get_logger().warning("the index was made anew from the runs: %s", reason)
                return done
            found = create_scan(self.store, settled).find()
            if found and stamps == found and "" not in found.values():
                return Refreshed(len(found), 0, 0, rebuilt=False)
            with self._locked():
                return self._update()

    def rebuild(self) -> Refreshed:
        """Make the index anew from the files.

        Raises:
          UserError: the store or the database cannot be read or written.
        """
        with _explained(self._url), self._locked():
            return self._make()

    def select(self, text: str) -> list[int]:
        """The numbers of runs that fit a filter, that which was begun last first.

        Raises:
          UserError: the filter breaks the rules, or no run has one of its keys.
        """
        wanted, order = parse_filter(text), self.read_order()
        if not order or not wanted.keys:
            return order
        check_keys(wanted.keys, self.read_keys())
        columns = {key: self.read_column(key) for key in wanted.keys}
        return [run for run in order if wanted.fits(lambda key, run=run: columns[key].get(run))]

    def read_order(self, limit: int | None = None) -> list[int]:
        """The numbers of runs, that which was begun last first."""
        runs = self._tables.runs.c
        text = "BINARY" if self._engine.dialect.name == "sqlite" else "C"
        keys = [
            func.coalesce(runs.id, "").collate(text),
            func.coalesce(runs.started, 0.0),
            runs.path.collate(text),
        ]
        query = select(runs.run).order_by(*(key.desc() for key in keys)).limit(limit)
        return self._ask(lambda connection: list(connection.execute(query).scalars()))

    def read_runs(self, numbers: Sequence[int]) -> list[JsonObject]:
        """Facts, tags and fault of runs, in the order of their numbers."""
        runs, found = self._tables.runs, {}
        for start in range(0, len(numbers), _CHUNK):
            query = select(runs).where(runs.c.run.in_(numbers[start : start + _CHUNK]))
            rows = (row._mapping for row in self._read_rows(query))
            found |= {
                row["run"]: {k: v for k, v in row.items() if k not in _KIN}
                | {"tags": json.loads(row["tags"])}
                for row in rows
            }
        return [found[number] for number in numbers if number in found]

    def read_column(self, key: str) -> dict[int, JsonValue]:
        """Run -> value of a key: a fact, a number or an entry of the configuration."""
        runs = self._tables.runs.c
        if key == TAG:
            query = select(runs.run, runs.tags)
            return {run: json.loads(tags) for run, tags in self._read_rows(query)}
        if key in (TEACHER, TEACHER_TAG):
            return self._read_teachers(key)
        if key in (SCORE, SCORE_NAME):
            scores = self.read_scores().items()
            return {run: one.value if key == SCORE else one.name for run, one in scores}
        if key in (*FACTS, NOTE):
            return dict(self._read_rows(select(runs.run, runs[key]).where(runs[key].is_not(None))))
        return self._read_config(key) | self._read_numbers(key)

    def read_cells(
        self, numbers: Sequence[int], keys: Sequence[str]
    ) -> dict[str, dict[int, JsonValue]]:
        """Key -> run -> value for a few runs: of their configuration and numbers, no facts."""
        tables, found = self._tables, {key: {} for key in keys}
        # From the runs to their sections to what stands there: the other way would pass through
        # every value that a key has anywhere.
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
        told = (
            select(names.text, values.run, values.value, values.told)
            .join(tables.names, names.name == values.name)
            .where(names.text.in_(keys))
        )
        for start in range(0, len(numbers), _CHUNK):
            chunk = numbers[start : start + _CHUNK]
            for key, run, text in self._read_rows(
                pairs.where(tables.run_sections.c.run.in_(chunk))
            ):
                found[key][run] = json.loads(text)
            for key, run, value, word in self._read_rows(told.where(values.run.in_(chunk))):
                found[key][run] = float(word) if word else value
        return found

    def read_scores(self, numbers: Sequence[int] | None = None) -> dict[int, Score]:
        """Run -> score of those that have been evaluated.

        Args:
          numbers: of the runs; None: all of them.
        """
        names, values = self._tables.names.c, self._tables.values.c
        texts = self._read_rows(select(names.name, names.text))
        wanted = {name: text for name, text in texts if is_candidate(text)}
        query = select(values.run, values.name, values.value, values.told)
        query = query.where(values.name.in_(wanted))
        if numbers is not None and len(numbers) <= _CHUNK:
            query = query.where(values.run.in_(numbers))
        found: dict[int, dict[str, float]] = {}
        for run, name, value, told in self._read_rows(query):
            found.setdefault(run, {})[wanted[name]] = float(told) if told else value
        if numbers is None:
            probes = self._read_config(SCORE_PROBE)
        else:
            probes = self.read_cells(numbers, [SCORE_PROBE])[SCORE_PROBE]
        asked = found if numbers is None else found.keys() & set(numbers)
        scores = {run: choose_score(found[run], probes.get(run)) for run in asked}
        return {run: score for run, score in scores.items() if score is not None}

    def list_varied(self) -> list[str]:
        """Keys of configurations that do not have the same value wherever they stand."""
        key = self._tables.pairs.c.key
        query = select(key).group_by(key).having(func.count() > 1).order_by(key)
        return [row[0] for row in self._read_rows(query)]

    def read_faults(self) -> dict[int, tuple[str, str]]:
        """Run -> path and fault of those that cannot be read."""
        runs = self._tables.runs.c
        query = select(runs.run, runs.path, runs.fault).where(runs.fault != "").order_by(runs.path)
        return {run: (path, fault) for run, path, fault in self._read_rows(query)}

    def count_states(self, without: str = "") -> dict[str, int]:
        """What `run.json` says of its state -> in how many runs.

        Args:
          without: a tag whose runs are not counted.
        """
        runs = self._tables.runs.c
        query = select(runs.status, func.count()).group_by(runs.status)
        if without:
            query = query.where(runs.run.not_in(self.list_tagged(without)))
        return {text or "": count for text, count in self._read_rows(query)}

    def list_tagged(self, tag: str) -> list[int]:
        """The runs that have a tag."""
        runs = self._tables.runs.c
        query = select(runs.run, runs.tags).where(runs.tags.contains(json.dumps(tag)))
        return [run for run, tags in self._read_rows(query) if tag in json.loads(tags)]

    def read_keys(self) -> list[str]:
        """All keys that some run has."""
        pairs = self._read_rows(select(self._tables.pairs.c.key).distinct())
        names = self._read_rows(select(self._tables.names.c.text))
        own = (*FACTS, TAG, NOTE, TEACHER, TEACHER_TAG, SCORE, SCORE_NAME)
        return sorted({*own, *(row[0] for row in [*pairs, *names])})

    def read_family(self) -> Family:
        """All runs, by whom they have learnt from and whom they may have taught."""
        runs = self._tables.runs.c
        query = select(runs.run, runs.path, runs.id, runs.tags, runs.sums, runs.lineage)
        return Family(
            Kin(
                run, path, name or "", tuple(json.loads(tags)) if tags != "[]" else (),
                tuple(sums.split()) if sums else (), unpack_ancestors(lineage),
            )
            for run, path, name, tags, sums, lineage in self._read_rows(query)
        )  # fmt: skip

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    def _read_teachers(self, key: str) -> dict[int, JsonValue]:
        """Words of each run's ancestors, also what their runs are called now; or their tags."""
        family = self.read_family()
        found: dict[int, JsonValue] = {}
        for run, kin in family.runs.items():
            words: list[JsonValue] = []
            for one, teacher in family.follow(kin.ancestors, run) if kin.ancestors else ():
                now = teacher.words if teacher else ()
                tags = teacher.tags if teacher else ()
                words += tags if key == TEACHER_TAG else [*now, *one.words]
            if kin.ancestors:
                found[run] = list(dict.fromkeys(words))
        return found

    def _read_config(self, key: str) -> dict[int, JsonValue]:
        tables = self._tables
        query = (
            select(tables.run_sections.c.run, tables.pairs.c.text)
            .join(tables.section_pairs, tables.section_pairs.c.pair == tables.pairs.c.pair)
            .join(
                tables.run_sections,
                tables.run_sections.c.section == tables.section_pairs.c.section,
            )
            .where(tables.pairs.c.key == key)
        )
        parsed: dict[str, JsonValue] = {}
        found = {}
        for run, text in self._read_rows(query):
            if text not in parsed:
                parsed[text] = json.loads(text)
            found[run] = parsed[text]
        return found

    def _read_numbers(self, key: str) -> dict[int, JsonValue]:
        values, names = self._tables.values.c, self._tables.names.c
        query = (
            select(values.run, values.value, values.told)
            .join(self._tables.names, names.name == values.name)
            .where(names.text == key)
        )
        rows = self._read_rows(query)
        return {run: float(told) if told else value for run, value, told in rows}

    def _read_rows(self, query: Select) -> Sequence[Row]:
        return self._ask(lambda connection: connection.execute(query).all())

    def _ask(self, question: Callable[[Connection], T]) -> T:
        """An answer of the database; a file that turns out damaged is made again first."""
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
        """Path -> stamp of the runs in the index, and those that have ended.

        Raises:
          ValueError: the index is of another version, or damaged.
        """
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
                self._look_after(connection)
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

    def _look_after(self, connection: Connection) -> None:
        """Check a file that a power cut may have hit: it was last looked at before this boot.

        Raises:
          ValueError: it is damaged.
        """
        if connection.exec_driver_sql("PRAGMA quick_check").scalar() != "ok":
            raise ValueError("it is damaged")
        head = self._tables.head
        connection.execute(update(head).where(head.c.key == "boot").values(text=_get_boot()))
        connection.commit()

    def _update(self) -> Refreshed:
        try:
            stamps, settled = self._read_stamps()
        except (SQLAlchemyError, ValueError):
            return self._make()
        scan = create_scan(self.store, settled)
        found = scan.find()
        changed = [path for path, stamp in found.items() if not stamp or stamps.get(path) != stamp]
        gone = stamps.keys() - found.keys()
        with self._engine.begin() as connection:
            writer = IndexWriter(connection, self._tables)
            writer.remove({*gone, *(path for path in changed if path in stamps)})
            count = writer.add(scan.read(changed))
            total = connection.execute(select(func.count()).select_from(self._tables.runs)).scalar()
        return Refreshed(total or 0, count, len(gone), rebuilt=False)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, whatever machine or process it is on this cache."""
        if self._lock_path is None:
            yield
            return
        with hold_file(self._lock_path):
            yield


def _create_engine(url: str) -> Engine:
    try:
        known = make_url(url)
        if known.get_backend_name() == "sqlite":
            engine = create_engine(known, connect_args={"timeout": _WAIT_S})
            event.listen(engine, "connect", _prepare)
            return engine
        return create_engine(known)
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--index {url!r} cannot be opened: {reason}; give a URL of SQLAlchemy such as "
            "postgresql+psycopg://USER@HOST/NAME, and install its driver"
        ) from error


def _prepare(connection: object, _: object) -> None:
    """A file that may be deleted at any time need not outlive a power cut; it is looked at."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=OFF")
    cursor.execute("PRAGMA cache_size=-65536")
    cursor.close()


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        reason = " ".join(str(getattr(error, "orig", None) or error).split())
        raise UserError(
            f"the index {make_url(url).render_as_string(hide_password=True)!r} cannot be used: "
            f"{reason}; give another --index, or delete it: it is made again from the runs"
        ) from error


def _get_boot() -> str:
    """This boot of this machine; the file system keeps what was written until it ends."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
