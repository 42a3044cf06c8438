"""`manifest.json`: contents of a cache, its teachers and its stream of examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tasks.teachers.cache.rows import CLASSES, CacheShape, Column, Columns
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.storage.folder import Folder
from utils.storage.local import LocalFolder
from utils.storage.places import open_folder

MANIFEST = "manifest.json"
FORMAT_VERSION = 3
# One column, of one teacher or of several combined; its rows are the same as today's.
_ONE_COLUMN_VERSION = 2
# Keys of a cache whose rows lie in the order of the examples (`rows_per_step` are written at once,
# the last ones beyond the examples), and its dataset's names of classes.
_FURTHER = ("layout", "examples", "rows_per_step", "class_names")
# Name of that layout; by default rows lie in the order of a run's global batches.
BY_EXAMPLE = "examples"


def write_manifest(
    folder: Path,
    stream: JsonMapping,
    shape: CacheShape,
    writers: int,
    *,
    is_reused: bool = False,
    further: JsonMapping | None = None,
) -> None:
    """Write a cache's manifest; an existing one must be the same, but for more steps.

    `is_reused`: a longer run starts over with the first epoch by itself. `further` is of
    `read_further`: `class_names`, and the layout of rows in another order than a run's global
    batches.
    """
    manifest: JsonObject = {
        "format_version": FORMAT_VERSION,
        "stream": dict(stream),
        "columns": [asdict(column) for column in shape.columns],
        "steps_per_epoch": shape.steps_per_epoch,
        "epochs": shape.epochs,
        "writers": writers,
        "bytes_per_example": shape.row_dtype.itemsize,
        "is_reused": is_reused,
        **(further or {}),
    }
    if (folder / MANIFEST).is_file():
        old = read_manifest(folder)
        manifest["is_reused"] = is_reused or old["is_reused"]
        wanted = {**manifest, "epochs": old["epochs"], "is_reused": old["is_reused"]}
        if "class_names" not in old:  # they came later
            wanted.pop("class_names", None)
        refuse_difference(folder, old, wanted, "--out")
        shape = max(read_shape(old), shape, key=lambda sizes: sizes.total_steps)
    manifest["epochs"] = shape.epochs
    if shape.total_steps < shape.epochs * shape.steps_per_epoch:
        manifest["steps"] = shape.total_steps
    LocalFolder(folder).write_text(MANIFEST, json.dumps(manifest, indent=2) + "\n")


def read_manifest(place: str | Path | Folder) -> JsonObject:
    """Read the manifest of a cache; one of format 2 is converted to today's."""
    folder = open_folder(place)
    try:
        manifest = json.loads(folder.read_text(MANIFEST))
        version = manifest.get("format_version")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"distill.teacher_cache ({str(folder)!r}): no readable {MANIFEST} ({error}); make the "
            "cache by python -m tools.cache write"
        ) from error
    if version not in (_ONE_COLUMN_VERSION, FORMAT_VERSION):
        raise UserError(
            f"distill.teacher_cache ({str(folder)!r}) has format {version}, this program reads "
            f"{_ONE_COLUMN_VERSION} and {FORMAT_VERSION}; make it again"
        )
    try:
        return _raise_version(manifest) if version == _ONE_COLUMN_VERSION else _check(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"distill.teacher_cache ({str(folder)!r}): {MANIFEST} has no valid {error}; make "
            "the cache again by python -m tools.cache write"
        ) from error


def read_shape(manifest: JsonMapping) -> CacheShape:
    return CacheShape(
        tuple(Column(**column) for column in manifest["columns"]),
        manifest["epochs"],
        manifest["steps_per_epoch"],
        manifest.get("rows_per_step") or manifest["stream"]["global_batch_size"],
        manifest.get("steps"),
    )


def is_by_example(manifest: JsonMapping) -> bool:
    """Return whether rows lie in the order of the dataset's examples."""
    return manifest.get("layout") == BY_EXAMPLE


def read_further(manifest: JsonMapping) -> JsonObject:
    """Read what only some manifests have: names of classes, and another order of the rows."""
    return {name: manifest[name] for name in _FURTHER if name in manifest}


def describe_classes(class_names: Sequence[str] | None) -> JsonObject:
    """Return a manifest's entry of the names of its dataset's classes; empty if unknown."""
    return {} if class_names is None else {"class_names": list(class_names)}


def choose_columns(columns: Columns, teachers: Sequence[str], place: Folder | Path) -> list[int]:
    """Return the columns' numbers of a run's teachers, in its order; of all if it names none."""
    names = [column.teacher for column in columns]
    if not teachers:
        return list(range(len(columns)))
    if "+".join(teachers) in names:  # combined into one column
        teachers = ["+".join(teachers)]
    elif len(teachers) > 1:
        teachers = teachers[:-1]
    numbers: list[int] = []
    for teacher in teachers:
        own = [number for number, name in enumerate(names) if name == teacher]
        if not own:
            raise UserError(
                f"distill.teacher_cache ({str(place)!r}) was made with teachers "
                f"{list(dict.fromkeys(names))}, here it is {list(teachers)}; make the cache again "
                "or go back to those teachers"
            )
        numbers += own
    return numbers


def count_stored(place: str, named: int) -> int:
    """Count the outputs for an example that a run with so many `named` teachers reads."""
    columns = read_shape(read_manifest(place)).columns
    return len(columns) if len(columns) == 1 or not named else named


def refuse_difference(
    folder: Path | Folder, actual: JsonMapping, wanted: JsonMapping, key: str
) -> None:
    """Raise an error at the first difference of a cache from what is wanted.

    Entries that only one of the streams has differ, too: neutral values are left out.
    """
    for name, value in wanted.items():
        if name == "stream":
            stream = {**dict.fromkeys(actual["stream"]), **value}
            refuse_difference(folder, actual["stream"], stream, key)
        elif actual.get(name) != value:
            raise UserError(
                f"{key} ({str(folder)!r}) was made with {name} {actual.get(name)!r}, here it is "
                f"{value!r}; make the cache again or go back to that {name}"
            )


def get_file_name(epoch: int, writer: int, writers: int) -> str:
    """Return the file of one process's rows of one epoch."""
    return f"epoch_{epoch:05d}.{writer:05d}-of-{writers:05d}.bin"


def _raise_version(old: JsonMapping) -> JsonObject:
    """Convert a manifest of format 2: one column of classes in float16, whose rows are the same."""
    stream = old["stream"]
    column = Column(
        teacher="+".join(old["teachers"]),
        kind=CLASSES,
        width=stream["vocab_size"] if "vocab_size" in stream else stream["num_classes"],
        top_k=old["top_k"],
        places=old.get("places", 0),
    )
    names = "stream", "steps_per_epoch", "epochs", "writers", "bytes_per_example", "steps"
    kept = {name: old[name] for name in names if name in old}
    return _check({"format_version": FORMAT_VERSION, **kept, "columns": [asdict(column)]})


def _check(manifest: JsonObject) -> JsonObject:
    """Check what is needed, and only that; later programs may add."""
    shape, writers = read_shape(manifest), int(manifest["writers"])
    sizes = shape.epochs, shape.steps_per_epoch, shape.global_batch_size, writers
    if not shape.columns or min(sizes) < 1 or shape.global_batch_size % writers:
        raise ValueError("sizes above 0")
    shape.row_dtype  # noqa: B018 (its types are known)
    return {"is_reused": False, **manifest}
