"""Finds tensors of two checkpoints that differ, by their bytes alone: torch is not needed."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from utils.errors import UserError
from utils.storage.folder import Folder
from utils.storage.places import open_folder

_ENDING = ".safetensors"


def find_tensors(base: str | Path | Folder, new: str | Path | Folder) -> list[str]:
    """Return `file:tensor` for each tensor that differs or exists in one checkpoint alone.

    On buckets, files of equal checksums are not fetched; of others each tensor is one request.

    Raises:
      UserError: a file is no safetensors file.
      OSError: a store refuses.
    """
    folders = [open_folder(path_or_url) for path_or_url in (base, new)]
    names = {name for folder in folders for name in folder.list_names() if name.endswith(_ENDING)}
    differing: list[str] = []
    for name in (name for name in sorted(names) if not _are_equal(folders, name)):
        tables = [_read_table(folder, name) for folder in folders]
        pairs = list(zip(folders, tables, strict=True))
        differing += [
            f"{name}:{tensor}"
            for tensor in sorted(tables[0].keys() | tables[1].keys())
            if len({_read(*pair, name, tensor) for pair in pairs}) > 1
        ]
    return differing


def _are_equal(folders: list[Folder], name: str) -> bool:
    try:
        first, second = ((f.get_size(name), f.get_checksum(name)) for f in folders)
    except FileNotFoundError:
        return False
    return first == second


def _read_table(folder: Folder, name: str) -> dict[str, tuple[int, int]]:
    """Return tensor -> (start, end); the file is an 8-byte length, a JSON object, and the bytes."""
    try:
        size = folder.get_size(name)
    except FileNotFoundError:
        return {}
    try:
        (length,) = struct.unpack("<Q", folder.read_bytes(name, 0, 8))
        head = json.loads(folder.read_bytes(name, 8, min(length, size)))
        start = 8 + length
        return {
            tensor: (start + entry["data_offsets"][0], start + entry["data_offsets"][1])
            for tensor, entry in head.items()
            if tensor != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(
            f"{folder}/{name} is no whole safetensors file; run `python -m tools.checkpoint verify`"
        ) from error


def _read(folder: Folder, table: dict[str, tuple[int, int]], name: str, key: str) -> bytes | None:
    if key not in table:
        return None
    start, end = table[key]
    return folder.read_bytes(name, start, end - start)
