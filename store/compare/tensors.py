"""Which tensors of two checkpoints differ, by their bytes alone: no torch is needed for that."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from utils.errors import UserError

Place = tuple[int, int]


def find_tensors(base: Path, new: Path) -> list[str]:
    """`file:tensor` for each tensor of two checkpoints that differs or stands in one alone.

    Raises:
      UserError: a file is no safetensors file.
    """
    found = []
    names = {path.name for folder in (base, new) for path in folder.glob("*.safetensors")}
    for name in sorted(names):
        tables = [_read_table(folder / name) for folder in (base, new)]
        for tensor in sorted(tables[0].keys() | tables[1].keys()):
            if _read(base / name, tables[0].get(tensor)) != _read(
                new / name, tables[1].get(tensor)
            ):
                found.append(f"{name}:{tensor}")
    return found


def _read_table(path: Path) -> dict[str, Place]:
    """Tensor -> where its bytes lie; the form is an 8-byte length, a JSON object, and the bytes."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(min(length, path.stat().st_size)))
        start = 8 + length
        return {
            name: (start + one["data_offsets"][0], start + one["data_offsets"][1])
            for name, one in head.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(
            f"{path} is no whole safetensors file; `python -m tools.checkpoint verify` tells more"
        ) from error


def _read(path: Path, place: Place | None) -> bytes | None:
    if place is None:
        return None
    with path.open("rb") as file:
        file.seek(place[0])
        return file.read(place[1] - place[0])
