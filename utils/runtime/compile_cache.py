"""The place of compiled programs that outlive a run, by `runtime.compile_cache`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from utils.config.execution import RuntimeSection


def find_cache(section: RuntimeSection, *, has_chips: bool) -> str:
    """Return the cache's place; empty without one, as `auto` is without chips."""
    if section.compile_cache != "auto":
        return section.compile_cache
    return "~/.cache/xla_graphs" if has_chips else ""


def shrink(folder: Path, limit_gib: float) -> list[Path]:
    """Delete the least recently used files until the rest fits; return the deleted ones."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [(path, path.stat()) for path in folder.rglob("*") if path.is_file()]
    files.sort(key=lambda entry: max(entry[1].st_atime, entry[1].st_mtime), reverse=True)
    size, dropped = 0, list[Path]()
    for path, facts in files:
        size += facts.st_size
        if size > limit_gib * 2**30:
            path.unlink()
            dropped.append(path)
    return dropped
