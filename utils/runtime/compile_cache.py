"""Keeps compiled graphs between runs, and says how much of the disk they may take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from utils.storage.places import to_path

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection

_AUTO = "~/.cache/xla_graphs"


def prepare_cache(section: RuntimeSection, hardware: str, rank: int) -> Path | None:
    """A rank's directory of compiled graphs, within its size; none where it is of no use.

    On the CPU graphs can be written but not read back.

    Args:
      hardware: kind of device behind PJRT.
    """
    key, limit_gib = section.compile_cache, section.compile_cache_gib
    if hardware == "CPU" or not key:
        return None
    root = to_path(_AUTO if key == "auto" else key)  # its writer in C++ knows no URLs
    folder = root / f"rank_{rank}"
    shrink(folder, limit_gib)
    return folder


def shrink(folder: Path, limit_gib: float) -> list[Path]:
    """Drop the least recently used files until the rest fits; gives what was dropped."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    files.sort(key=lambda entry: max(entry[1].st_atime, entry[1].st_mtime), reverse=True)
    size, dropped = 0, []
    for path, facts in files:
        size += facts.st_size
        if size > limit_gib * 2**30:
            path.unlink()
            dropped.append(path)
    return dropped
