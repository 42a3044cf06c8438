"""Packs the tree that is shipped to the workers: the commit, or everything as it lies here."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from train import commands
from train.execute import ROOT, Executor
from utils.errors import UserError

ARCHIVE = ".sync/tree.tar.gz"
_SHOWN = 3


@dataclass(frozen=True)
class Tree:
    """A packed tree; `commit` ends with +dirty where it holds more than the commit."""

    archive: str
    commit: str


def pack_tree(executor: Executor, *, dirty: bool) -> Tree:
    """Write the archive below the repository's root and say what is in it.

    Raises:
      UserError: this is no git checkout.
    """
    commit = executor.require(commands.get_commit(), assume="HEAD").strip()
    changes = executor.require(commands.list_changes()).splitlines()
    if not executor.dry_run:
        (ROOT / ARCHIVE).parent.mkdir(exist_ok=True)
    if dirty:
        names = executor.require(commands.list_tree()).split("\0")
        if not executor.dry_run:
            _pack([name for name in names if name], ROOT / ARCHIVE)
        return Tree(ARCHIVE, f"{commit}+dirty" if changes else commit)
    executor.require(commands.archive_commit(ARCHIVE))
    if changes:
        shown = ", ".join(line[3:] for line in changes[:_SHOWN])
        more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        print(f"not shipped, as not committed: {shown}{more}; --dirty ships them")
    return Tree(ARCHIVE, commit)


def _pack(names: list[str], path: Path) -> None:
    """Files that were deleted but not yet committed as such are listed and not there."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                archive.add(ROOT / name, arcname=name)
    if path.stat().st_size > 1 << 30:
        raise UserError(f"the tree packs to {path.stat().st_size >> 20} MiB; ignore large files")
