"""Finds files of a cache that differ from what was written."""

from __future__ import annotations

from big_vision.pp.stored_views import VIEWS, VIEWS_JSON, read_view_facts
from tasks.teachers.cache.manifest import is_by_example, read_manifest, read_shape
from tools.cache.card import list_files, read_facts
from tools.cache.files import Expected, find_faults
from utils.storage.places import open_folder


def find_damage(path: str, workers: int = 1) -> list[str]:
    """Describe each file that is missing, cut or changed, or has no checksum.

    Args:
      workers: processes that read.
    """
    folder = open_folder(path)
    manifest = read_manifest(folder)
    shape, writers = read_shape(manifest), manifest["writers"]
    facts = read_facts(folder, shape, writers)
    files: list[Expected] = []
    for number, name in enumerate(list_files(shape, writers)):
        rows = shape.count_steps(number // writers) * (shape.global_batch_size // writers)
        checksum = facts.get(name, {}).get("crc32c", "none noted")
        files.append(Expected(name, rows * shape.row_dtype.itemsize, checksum))
    if is_by_example(manifest) and VIEWS_JSON in folder.list_names():
        views = read_view_facts(path)
        size = views.epochs * views.examples * views.form.row_dtype.itemsize
        files.append(Expected(VIEWS, size, views.crc32c))
    remedy = f"python -m tools.cache {'import' if is_by_example(manifest) else 'write'}"
    return [
        f"{path}: {file.name} {fault}; finish it by {remedy}"
        for file, fault in zip(files, find_faults(path, files, workers), strict=True)
        if fault
    ]
