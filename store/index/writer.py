"""Puts runs into the index: what is equal in many of them is written once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable
from functools import lru_cache

from sqlalchemy import Column, Connection, Integer, String, Table, delete, func, insert, select

from store.index.kin import pack_ancestors
from store.index.scan import RunEntry
from store.index.tables import Tables
from store.query.config_text import Pairs

_BATCH = 500
# Of a column of integers.
_MOST = 1 << 31
Row = dict[str, object]


class IndexWriter:
    """One transaction's writing; numbers of rows go on from those that are there."""

    def __init__(self, connection: Connection, tables: Tables) -> None:
        self._connection, self._tables = connection, tables
        self._next: dict[str, int] = {}
        self._known: dict[str, dict[str, int]] = {}
        self._is_empty: dict[str, bool] = {}

    def remove(self, paths: Collection[str]) -> None:
        """Take runs out; what only they said stays behind until the next rebuild."""
        runs = self._tables.runs
        for chunk in _cut(sorted(paths)):
            query = select(runs.c.run).where(runs.c.path.in_(chunk))
            numbers = [row.run for row in self._connection.execute(query)]
            for table in (self._tables.values, self._tables.run_sections, runs):
                self._connection.execute(delete(table).where(table.c.run.in_(numbers)))

    def add(self, entries: Iterable[RunEntry]) -> int:
        """Put runs in that are not there; gives their number."""
        count = 0
        batch: list[RunEntry] = []
        for entry in entries:
            batch.append(entry)
            if len(batch) == _BATCH:
                self._add_batch(batch)
                count, batch = count + len(batch), []
        self._add_batch(batch)
        return count + len(batch)

    def _add_batch(self, entries: list[RunEntry]) -> None:
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
            values += [_make_value(names[n], run, value) for n, value in entry.values.items()]
            used = {sections[_hash_section(pairs)] for pairs in entry.sections.values()}
            run_sections += [{"section": section, "run": run} for section in sorted(used)]
        columns = self._tables.runs.columns
        self._insert(
            self._tables.runs, [{c.name: _fit(row.get(c.name), c) for c in columns} for row in runs]
        )
        self._insert(self._tables.values, values)
        self._insert(self._tables.run_sections, run_sections)

    def _add_sections(self, entries: list[RunEntry]) -> dict[str, int]:
        """Digest -> number of every section of some runs; new ones are written."""
        tables = self._tables
        found = {_hash_section(pairs): pairs for e in entries for pairs in e.sections.values()}
        numbers, missing = self._intern(tables.sections.c.section, {d: {} for d in found}, "digest")
        new = {digest: found[digest] for digest in missing}
        digests = {pair: _hash_pair(pair) for one in new.values() for pair in one}
        pairs = {digest: {"key": key, "text": text} for (key, text), digest in digests.items()}
        ids, _ = self._intern(tables.pairs.c.pair, pairs, "digest")
        rows = (
            {"pair": ids[digests[pair]], "section": numbers[digest]}
            for digest, one in new.items()
            for pair in one
        )
        self._insert(tables.section_pairs, list(rows))
        return numbers

    def _intern(
        self, number: Column, rows: dict[str, Row], unique: str
    ) -> tuple[dict[str, int], list[str]]:
        """Text -> number of rows that stand once, and the texts that were not there yet."""
        table = number.table
        known = self._known.setdefault(table.name, {})
        unknown = [text for text in rows if text not in known]
        if not self._was_empty(number):
            for chunk in _cut(unknown):
                query = select(table.c[unique], number).where(table.c[unique].in_(chunk))
                known.update(self._connection.execute(query).tuples().all())
        new = [text for text in unknown if text not in known]
        for text in new:
            known[text] = self._count(number)
        self._insert(table, [{**rows[t], unique: t, number.name: known[t]} for t in new])
        return known, new

    def _was_empty(self, number: Column) -> bool:
        name = number.table.name
        if name not in self._is_empty:
            self._is_empty[name] = self._read_last(number) == 0
        return self._is_empty[name]

    def _count(self, number: Column) -> int:
        name = number.table.name
        if name not in self._next:
            self._next[name] = self._read_last(number) + 1
        self._next[name] += 1
        return self._next[name] - 1

    def _read_last(self, number: Column) -> int:
        return self._connection.execute(select(func.max(number))).scalar() or 0

    def _insert(self, table: Table, rows: list[Row]) -> None:
        if rows:
            self._connection.execute(insert(table), rows)


def _make_value(name: int, run: int, value: float) -> Row:
    is_finite = math.isfinite(value)
    return {
        "name": name,
        "run": run,
        "value": value if is_finite else None,
        "told": None if is_finite else str(value),
    }


def _fit(value: object, column: Column) -> object:
    """A fact as its column takes it; what is of another type counts as unknown."""
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


@lru_cache(maxsize=1 << 16)
def _hash_pair(pair: tuple[str, str]) -> str:
    return _hash("=".join(pair))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _cut(items: list[str]) -> Iterable[list[str]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))
