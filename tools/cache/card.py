"""The card of a cache: its teachers, how exact their outputs are, and how it is used."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tasks.teachers.cache.manifest import get_file_name, is_by_example, read_manifest, read_shape
from tasks.teachers.cache.rows import CLASSES, CacheShape, Column
from utils.json_types import JsonMapping, JsonObject
from utils.storage.folder import Folder
from utils.storage.places import open_folder

CARD, CARD_JSON, SCORES = "CARD.md", "card.json", "teachers.json"
_UNITS = {CLASSES: "nats"}
# Scores of teachers that the card shows; card.json has all.
_SHOWN = ("top1", "map", "perplexity", "accuracy", "split")


def make_card(path: str | Path | Folder) -> JsonObject:
    """Describe a cache by its manifest and the facts beside its files."""
    folder = open_folder(path)
    manifest = read_manifest(folder)
    shape, stream = read_shape(manifest), manifest["stream"]
    facts = read_facts(folder, shape, manifest["writers"])
    scores = read_scores(folder)
    return {
        "teachers": [
            _describe_column(column, number, list(facts.values()), scores)
            for number, column in enumerate(shape.columns)
        ],
        "dataset": stream.get("dataset"),
        "examples": manifest.get("examples", shape.steps_per_epoch * shape.global_batch_size),
        "augmentations": shape.epochs,
        "reused": manifest["is_reused"],
        "train_pp": stream.get("train_pp"),
        "seed": stream.get("seed"),
        "global_batch_size": None if is_by_example(manifest) else shape.global_batch_size,
        "views": stream.get("views"),
        "bytes_per_example": shape.row_dtype.itemsize,
        "bytes": shape.total_bytes,
        "files": len(facts),
        "files_missing": shape.epochs * manifest["writers"] - len(facts),
        "stream": dict(stream),
    }


def _describe_column(
    column: Column, number: int, facts: Sequence[JsonMapping], scores: JsonMapping
) -> JsonObject:
    """Describe one teacher's outputs, with the errors that were measured when they were stored.

    Args:
      facts: of the files.
      scores: of the teachers, by hash.
    """
    errors = [file["errors"][number] for file in facts if "errors" in file]
    count = sum(error[2] for error in errors)
    row = asdict(column)
    return {
        "hash": row.pop("teacher"),
        **row,
        "max_error": max(error[0] for error in errors) if count else None,
        "mean_error": sum(error[1] for error in errors) / count if count else None,
        "error_unit": _UNITS.get(column.kind, "units of the features"),
        "accuracy": scores.get(column.teacher),
    }


def list_files(shape: CacheShape, writers: int) -> list[str]:
    """List the files of rows of a whole cache."""
    pairs = itertools.product(range(shape.epochs), range(writers))
    return [get_file_name(epoch, writer, writers) for epoch, writer in pairs]


def get_facts_name(name: str) -> str:
    """Return the JSON file that belongs to a file of rows."""
    return f"{name.removesuffix('.bin')}.json"


def read_facts(folder: Folder, shape: CacheShape, writers: int) -> dict[str, JsonObject]:
    """Read the facts of each finished file of rows, by the file's name."""
    existing = set(folder.list_names())
    names = {name: get_facts_name(name) for name in list_files(shape, writers) if name in existing}
    texts = folder.read_texts(names.values())
    return {name: json.loads(texts.get(facts, "{}")) for name, facts in names.items()}


def read_scores(folder: Folder) -> JsonObject:
    """Read the teachers' scores on an evaluation split, by their hashes; empty if unknown."""
    return json.loads(folder.read_texts([SCORES]).get(SCORES, "{}"))


def write_card(path: Path | Folder) -> None:
    """Write `CARD.md` for people and `card.json` for programs."""
    folder = open_folder(path)
    card = make_card(folder)
    folder.write_text(CARD_JSON, json.dumps(card, indent=2) + "\n")
    folder.write_text(CARD, format_card(card, folder.name))


def format_card(card: JsonMapping, name: str) -> str:
    """Format a card as Markdown."""
    dataset = card["dataset"] or ["synthetic data"]
    dataset_name = " ".join(str(part) for part in dataset[1:4] if part) or str(dataset[0])
    augmentation = (
        f"`{card['train_pp']}`, seed {card['seed']}, batches of {card['global_batch_size']}; all "
        "other keys that affect it are in manifest.json"
    )
    if card["views"]:
        augmentation = (
            f"the views {card['views']} as `stored_view` shows them, in any order, of any seed, in "
            "batches of any size"
        )
    lines = [
        f"# Stored outputs: {name}",
        "",
        f"{card['examples']:,} examples of {dataset_name}, {card['augmentations']} "
        f"augmentations of each, in {card['bytes_per_example']} bytes an augmented example: "
        f"{card['bytes'] / 2**20:,.1f} MiB.",
        "",
        "| teacher | hash | answers | type | greatest error | mean error | accuracy |",
        "|---|---|---|---|---:|---:|---|",
        *map(_format_row, card["teachers"]),
        "",
        f"- augmentation: {augmentation}",
        "- a longer run starts over with the first epoch"
        + ("" if card["reused"] else " if distill.cache_end=cycle"),
    ]
    if card["files_missing"]:
        lines.append(f"- {card['files_missing']} files are missing: the same command continues")
    lines += [
        "",
        f"A run {'that shows these views' if card['views'] else 'of the same stream'} reads it by "
        f"`--distill.teacher_cache={name}`; errors were measured when the outputs were stored, or "
        "are upper bounds.",
    ]
    return "\n".join(lines) + "\n"


def _format_row(row: JsonMapping) -> str:
    content = f"{row['width']} numbers"
    if row["top_k"]:
        content = f"{row['top_k']} of {row['width']} classes"
    content += f", {row['part']}" if row["part"] else ""
    content += f", at {row['places']} places" if row["places"] else ""
    errors = [
        "unknown" if row[key] is None else f"{row[key]:.2g} {row['error_unit']}"
        for key in ("max_error", "mean_error")
    ]
    accuracy = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"of {value}"
        for key, value in (row["accuracy"] or {}).items()
        if key in _SHOWN
    )
    name = row["name"] or "unnamed"
    cells = [name, row["hash"], content, row["dtype"], *errors, accuracy or "not evaluated"]
    return f"| {' | '.join(cells)} |"
