"""Tables of the index: equal sections of configurations and equal values are kept once."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Column, Float, Integer, MetaData, String, Table, Text

from store.query.record import FACTS

# Facts that are numbers; the others are text.
_NUMBERS = {"started": Float, "ended": Float, "attempts": Integer, "final_up_to_step": Integer,
            "schema_version": Integer}  # fmt: skip


@dataclass(frozen=True)
class Tables:
    """The tables of one store.

    Attributes:
      head: key -> text: version of the index, path or URL of the store.
      values: a row a run and number; `told` is nan, inf or -inf if the value is null.
      names: of the numbers.
      pairs: each key of a configuration with each of its values, as JSON.
      section_pairs: the pairs of a section.
      sections: each different section, by its digest.
      run_sections: the sections of a run.
    """

    metadata: MetaData
    head: Table
    runs: Table
    values: Table
    names: Table
    pairs: Table
    sections: Table
    section_pairs: Table
    run_sections: Table


def define_tables(prefix: str) -> Tables:
    """Define tables whose names have a prefix, because stores may share a server's database."""
    metadata = MetaData()
    compact = {"sqlite_with_rowid": False}

    def table(name: str, *columns: Column, **options: object) -> Table:
        return Table(f"{prefix}_{name}", metadata, *columns, **options)

    def number(name: str, **options: object) -> Column:
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
