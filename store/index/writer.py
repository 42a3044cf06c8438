"""Writes runs into the index: what is equal in many of them is written once."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
)

from store.index.lineage import pack_ancestors
from store.index.scan import RunEntry
from store.query.config_text import Pairs
from store.query.record import FACTS
from utils.json_types import JsonObject

_BATCH = 500
# Limit of a column of integers.
_MOST = 1 << 31
Row = JsonObject


class IndexWriter:
    """Writes of one transaction; numbers of rows continue from the existing ones."""

    def __init__(self, connection: Connection, tables: Tables) -> None:
        self._connection, self._tables = connection, tables
        self._next: dict[str, int] = {}
        self._known: dict[str, dict[str, int]] = {}
        self._is_empty: dict[str, bool] = {}

    def remove(self, paths: Collection[str]) -> None:
        """Remove runs; values that only they had stay until the next rebuild."""
        runs = self._tables.runs
        for chunk in _cut(sorted(paths)):
            query = select(runs.c.run).where(runs.c.path.in_(chunk))
            numbers = [row.run for row in self._connection.execute(query)]
            for table in (self._tables.values, self._tables.run_sections, runs):
                self._connection.execute(delete(table).where(table.c.run.in_(numbers)))

    def add(self, entries: Iterable[RunEntry]) -> int:
        """Add runs that are not in the index; return their number."""
        count, rest = 0, iter(entries)
        while batch := list(itertools.islice(rest, _BATCH)):
            self._add_batch(batch)
            count += len(batch)
        return count

    def _add_batch(self, entries: Sequence[RunEntry]) -> None:
        runs: list[Row] = []
        values: list[Row] = []
        run_sections: list[Row] = []
        texts = {name: {} for entry in entries for name in entry.values}
        names, _ = self._intern(self._tables.names.c.name, texts, "text")
        sections = self._add_sections(entries)
        for entry in entries:
            run = self._count(self._tables.runs.c.run)
            facts = {**entry.facts, "path": entry.path, "tags": json.dumps(entry.tags)}
            facts["note"] = entry.note or None
            facts["lineage"] = pack_ancestors(entry.lineage)
            facts["sums"] = " ".join(entry.sums) or None
            runs.append({"run": run, "stamp": entry.stamp, "fault": entry.fault, **facts})
            for name, value in entry.values.items():
                word = None if math.isfinite(value) else str(value)
                number = None if word else value
                values.append({"name": names[name], "run": run, "value": number, "told": word})
            used = {sections[_hash_section(pairs)] for pairs in entry.sections.values()}
            run_sections += [{"section": section, "run": run} for section in sorted(used)]
        columns = self._tables.runs.columns
        rows = [{c.name: _fit(row.get(c.name), c) for c in columns} for row in runs]
        self._insert(self._tables.runs, rows)
        self._insert(self._tables.values, values)
        self._insert(self._tables.run_sections, run_sections)

    def _add_sections(self, entries: Sequence[RunEntry]) -> dict[str, int]:
        """Return digest -> number of every section of some runs, and write new ones."""
        tables = self._tables
        sections = {_hash_section(pairs): pairs for e in entries for pairs in e.sections.values()}
        rows = {digest: {} for digest in sections}
        numbers, missing = self._intern(tables.sections.c.section, rows, "digest")
        digests = {pair: _hash("=".join(pair)) for digest in missing for pair in sections[digest]}
        pairs = {digest: {"key": key, "text": text} for (key, text), digest in digests.items()}
        ids, _ = self._intern(tables.pairs.c.pair, pairs, "digest")
        section_pairs = [
            {"pair": ids[digests[pair]], "section": numbers[digest]}
            for digest in missing
            for pair in sections[digest]
        ]
        self._insert(tables.section_pairs, section_pairs)
        return numbers

    def _intern(
        self, number: Column[int], rows: Mapping[str, Row], unique: str
    ) -> tuple[dict[str, int], list[str]]:
        """Return text -> number of unique rows, and the texts that were not there yet."""
        table = number.table
        known = self._known.setdefault(table.name, {})
        unknown = [text for text in rows if text not in known]
        name = table.name
        if name not in self._is_empty:
            self._is_empty[name] = self._read_last(number) == 0
        if not self._is_empty[name]:
            for chunk in _cut(unknown):
                query = select(table.c[unique], number).where(table.c[unique].in_(chunk))
                known.update(self._connection.execute(query).tuples().all())
        new = [text for text in unknown if text not in known]
        for text in new:
            known[text] = self._count(number)
        self._insert(table, [{**rows[t], unique: t, number.name: known[t]} for t in new])
        return known, new

    def _count(self, number: Column[int]) -> int:
        name = number.table.name
        if name not in self._next:
            self._next[name] = self._read_last(number) + 1
        self._next[name] += 1
        return self._next[name] - 1

    def _read_last(self, number: Column[int]) -> int:
        return self._connection.execute(select(func.max(number))).scalar() or 0

    def _insert(self, table: Table, rows: list[Row]) -> None:
        if rows:
            self._connection.execute(insert(table), rows)


def _fit(value: object, column: Column[Any]) -> object:
    """Return a fact of the column's type; None otherwise."""
    if isinstance(column.type, String):
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if isinstance(column.type, Integer):
        return int(value) if abs(value) < _MOST else None
    return float(value)


@lru_cache(maxsize=1 << 16)
def _hash_section(pairs: Pairs) -> str:
    return _hash("\n".join(f"{key}={text}" for key, text in pairs))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _cut(items: list[str]) -> Iterable[list[str]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


# Facts that are numbers; the others are text.
_NUMBERS = {
    "started": Float,
    "ended": Float,
    "attempts": Integer,
    "final_up_to_step": Integer,
    "schema_version": Integer,
}


@dataclass(frozen=True)
class Tables:
    """The tables of one store."""

    metadata: MetaData
    head: Table  # key -> text: version of the index, path or URL of the store
    runs: Table
    values: Table  # a row a run and number; `told` is nan, inf or -inf if the value is null
    names: Table  # of the numbers
    pairs: Table  # each key of a configuration with each of its values, as JSON
    sections: Table  # each different section, by its digest
    section_pairs: Table  # the pairs of a section
    run_sections: Table  # the sections of a run


def define_tables(prefix: str) -> Tables:
    """Define tables whose names have a prefix, because stores may share a server's database."""
    metadata = MetaData()
    compact = {"sqlite_with_rowid": False}

    def table(name: str, *columns: Column[Any], **options: Any) -> Table:
        return Table(f"{prefix}_{name}", metadata, *columns, **options)

    def number(name: str, **options: Any) -> Column[int]:
        return Column(name, Integer, autoincrement=False, nullable=False, **options)

    facts = [Column(name, _NUMBERS.get(name, Text)) for name in FACTS]
    return Tables(
        metadata,
        head=table("head", Column("key", String(40), primary_key=True), Column("text", Text)),
        runs=table(
            "runs", number("run", primary_key=True), Column("stamp", Text), *facts,
            Column("tags", Text), Column("note", Text), Column("lineage", Text),
            Column("sums", Text), Column("fault", Text),
        ),
        values=table(
            "values", number("name", primary_key=True), number("run", primary_key=True),
            Column("value", Float(53)), Column("told", String(4)), **compact,
        ),
        names=table("names", number("name", primary_key=True), Column("text", Text, unique=True)),
        pairs=table(
            "pairs", number("pair", primary_key=True), Column("digest", String(24), unique=True),
            Column("key", Text, index=True), Column("text", Text),
        ),
        sections=table(
            "sections", number("section", primary_key=True),
            Column("digest", String(24), unique=True),
        ),
        section_pairs=table(
            "section_pairs", number("pair", primary_key=True),
            number("section", primary_key=True, index=True), **compact,
        ),
        run_sections=table(
            "run_sections", number("section", primary_key=True),
            number("run", primary_key=True, index=True), **compact,
        ),
    )  # fmt: skip
