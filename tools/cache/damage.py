"""Finds files of a cache that are not what was written."""

from __future__ import annotations

import itertools

from big_vision.pp.stored_views import VIEWS, VIEWS_JSON, read_view_facts
from tasks.teachers.cache.manifest import get_file_name, is_by_example, read_manifest, read_shape
from tools.cache.card import read_all_facts
from tools.cache.files import Expected, find_faults
from utils.json_types import JsonMapping
from utils.storage.places import open_folder


def find_damage(place: str, workers: int = 1) -> list[str]:
    """A line for each file that is missing, cut, changed, or of a program that kept no checksum.

    Args:
      workers: processes that read.
    """
    folder = open_folder(place)
    manifest = read_manifest(folder)
    shape, writers = read_shape(manifest), manifest["writers"]
    facts, wanted = read_all_facts(folder, shape, writers), []
    for epoch, writer in itertools.product(range(shape.epochs), range(writers)):
        name = get_file_name(epoch, writer, writers)
        rows = shape.count_steps(epoch) * (shape.global_batch_size // writers)
        checksum = facts.get(name, {}).get("crc32c", "none noted")
        wanted.append(Expected(name, rows * shape.row_dtype.itemsize, checksum))
    if is_by_example(manifest) and VIEWS_JSON in folder.list_names():
        views = read_view_facts(place)
        size = views.epochs * views.examples * views.form.row_dtype.itemsize
        wanted.append(Expected(VIEWS, size, views.crc32c))
    faults = find_faults(place, wanted, workers)
    remedy = f"finish it by {_get_remedy(manifest)}"
    return [
        f"{place}: {one.name} {fault}; {remedy}"
        for one, fault in zip(wanted, faults, strict=True)
        if fault
    ]


def _get_remedy(manifest: JsonMapping) -> str:
    return f"python -m tools.cache {'import' if is_by_example(manifest) else 'write'}"
