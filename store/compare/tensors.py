"""Which tensors of two checkpoints differ, by their bytes alone: no torch is needed for that."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from utils.errors import UserError
from utils.storage.folder import Folder
from utils.storage.places import open_folder

Place = tuple[int, int]
_ENDING = ".safetensors"


def find_tensors(base: str | Path | Folder, new: str | Path | Folder) -> list[str]:
    """`file:tensor` for each tensor of two checkpoints that differs or stands in one alone.

    They may lie on buckets: files whose checksums are equal are not fetched from a store that keeps
    checksums, of others each tensor is a request.

    Raises:
      UserError: a file is no safetensors file.
      OSError: a store refuses.
    """
    folders = [open_folder(place) for place in (base, new)]
    names = {name for one in folders for name in one.list_names() if name.endswith(_ENDING)}
    found = []
    for name in sorted(names):
        if not _are_equal(folders, name):
            found += [f"{name}:{tensor}" for tensor in _find_in_file(folders, name)]
    return found


def _are_equal(folders: list[Folder], name: str) -> bool:
    try:
        first, second = ((one.get_size(name), one.get_checksum(name)) for one in folders)
    except FileNotFoundError:
        return False
    return first == second


def _find_in_file(folders: list[Folder], name: str) -> list[str]:
    tables = [_read_table(folder, name) for folder in folders]
    return [
        tensor
        for tensor in sorted(tables[0].keys() | tables[1].keys())
        if len({_read(*pair, name, tensor) for pair in zip(folders, tables, strict=True)}) > 1
    ]


def _read_table(folder: Folder, name: str) -> dict[str, Place]:
    """Tensor -> where its bytes lie; the form is an 8-byte length, a JSON object, and the bytes."""
    try:
        size = folder.get_size(name)
    except FileNotFoundError:
        return {}
    try:
        (length,) = struct.unpack("<Q", folder.read_bytes(name, 0, 8))
        head = json.loads(folder.read_bytes(name, 8, min(length, size)))
        start = 8 + length
        return {
            tensor: (start + one["data_offsets"][0], start + one["data_offsets"][1])
            for tensor, one in head.items()
            if tensor != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(
            f"{folder}/{name} is no whole safetensors file; `python -m tools.checkpoint verify` "
            "tells more"
        ) from error


def _read(folder: Folder, table: dict[str, Place], name: str, tensor: str) -> bytes | None:
    if tensor not in table:
        return None
    start, end = table[tensor]
    return folder.read_bytes(name, start, end - start)
