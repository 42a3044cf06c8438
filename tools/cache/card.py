"""The card of a cache: whose answers it holds, how exact they are, and how they are used."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.teachers.cache.manifest import get_file_name, is_by_example, read_manifest, read_shape
from tasks.teachers.cache.rows import CLASSES, CacheShape, Column
from utils.json_types import JsonMapping, JsonObject
from utils.storage.folder import Folder
from utils.storage.places import open_folder

CARD, CARD_JSON, JUDGED = "CARD.md", "card.json", "teachers.json"
_UNITS = {CLASSES: "nats"}
# Of what teachers are judged by; the rest stands in card.json.
_SHOWN = ("top1", "map", "perplexity", "accuracy", "split")


def make_card(place: str | Path | Folder) -> JsonObject:
    """What is known of a cache, from its manifest and from what stands beside its files."""
    folder = open_folder(place)
    manifest = read_manifest(folder)
    shape, stream = read_shape(manifest), manifest["stream"]
    facts = read_all_facts(folder, shape, manifest["writers"])
    wanted = shape.epochs * manifest["writers"]
    judged = read_judged(folder)
    columns = [
        describe_column(column, number, list(facts.values()), judged)
        for number, column in enumerate(shape.columns)
    ]
    return {
        "teachers": columns,
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
        "files_missing": wanted - len(facts),
        "stream": dict(stream),
    }


def describe_column(
    column: Column, number: int, facts: list[JsonObject], judged: JsonMapping
) -> JsonObject:
    """One teacher's answers: what they are, and the errors that were measured as they were stored.

    Args:
      facts: of the files.
    """
    noted = [one["errors"][number] for one in facts if "errors" in one]
    count = sum(one[2] for one in noted)
    return {
        "name": column.name,
        "hash": column.teacher,
        "kind": column.kind,
        "part": column.part,
        "width": column.width,
        "top_k": column.top_k,
        "places": column.places,
        "dtype": column.dtype,
        "weight": column.weight,
        "max_error": max(one[0] for one in noted) if count else None,
        "mean_error": sum(one[1] for one in noted) / count if count else None,
        "error_unit": _UNITS.get(column.kind, "units of the features"),
        "accuracy": judged.get(column.teacher),
    }


def read_all_facts(folder: Folder, shape: CacheShape, writers: int) -> dict[str, JsonObject]:
    """What stands beside each finished file, by the file's name."""
    names = [
        get_file_name(epoch, writer, writers)
        for epoch in range(shape.epochs)
        for writer in range(writers)
    ]
    there = set(folder.list_names())
    texts = folder.read_texts([f"{name[:-4]}.json" for name in names if name in there])
    return {
        name: json.loads(texts.get(f"{name[:-4]}.json", "{}")) for name in names if name in there
    }


def read_judged(folder: Folder) -> JsonObject:
    """Metrics of teachers on an evaluation split, by their hashes; empty: nobody has judged."""
    found = folder.read_texts([JUDGED])
    return json.loads(found[JUDGED]) if found else {}


def write_card(place: Path | Folder) -> None:
    """`CARD.md` for people and `card.json` for programs, beside the manifest."""
    folder = open_folder(place)
    card = make_card(folder)
    folder.write_text(CARD_JSON, json.dumps(card, indent=2) + "\n")
    folder.write_text(CARD, format_card(card, folder.name))


def format_card(card: JsonMapping, name: str) -> str:
    """The card as Markdown."""
    lines = [
        f"# Stored answers: {name}",
        "",
        f"{card['examples']:,} examples of {_name_dataset(card)}, {card['augmentations']} "
        f"augmentations of each, in {card['bytes_per_example']} bytes an augmented example: "
        f"{card['bytes'] / 2**20:,.1f} MiB.",
        "",
        "| teacher | hash | answers | type | greatest error | mean error | accuracy |",
        "|---|---|---|---|---:|---:|---|",
        *(_format_row(one) for one in card["teachers"]),
        "",
        _tell_augmentation(card),
        "- a longer run starts over with the first epoch"
        + ("" if card["reused"] else " where distill.cache_end=cycle says so"),
    ]
    if card["files_missing"]:
        lines.append(f"- {card['files_missing']} files are missing: the same command continues")
    lines += [
        "",
        f"A run {'that shows these views' if card['views'] else 'of the same stream'} reads it by "
        f"`--distill.teacher_cache={name}`; errors were measured as the answers were stored, or "
        "are what they are at most.",
    ]
    return "\n".join(lines) + "\n"


def _tell_augmentation(card: JsonMapping) -> str:
    """Which images the answers are to."""
    if card["views"]:
        return (
            f"- augmentation: the views {card['views']} as `stored_view` shows them, in any order, "
            "of any seed, in batches of any size"
        )
    return (
        f"- augmentation: `{card['train_pp']}`, seed {card['seed']}, batches of "
        f"{card['global_batch_size']}; what else decides it stands in manifest.json"
    )


def _name_dataset(card: JsonMapping) -> str:
    dataset = card["dataset"] or ["made-up data"]
    return " ".join(str(part) for part in dataset[1:4] if part) or str(dataset[0])


def _format_row(one: JsonMapping) -> str:
    what = (
        f"{one['top_k']} of {one['width']} classes" if one["top_k"] else f"{one['width']} numbers"
    )
    if one["part"]:
        what += f", {one['part']}"
    if one["places"]:
        what += f", at {one['places']} places"
    errors = [
        "unknown" if one[key] is None else f"{one[key]:.2g} {one['error_unit']}"
        for key in ("max_error", "mean_error")
    ]
    accuracy = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"of {value}"
        for key, value in (one["accuracy"] or {}).items()
        if key in _SHOWN
    )
    name = one["name"] or "unnamed"
    cells = [name, one["hash"], what, one["dtype"], *errors, accuracy or "not judged"]
    return f"| {' | '.join(cells)} |"
