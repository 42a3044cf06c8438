"""Images that nobody has sorted into classes: every image below a folder, for programs that ask."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from big_vision.input.images.folder import IMAGE_SUFFIXES, FolderSelection, is_hidden, name_left_out
from big_vision.input.images.image_files import FolderSource
from utils.errors import UserError
from utils.storage.places import is_remote, to_path


def list_images(place: str, key: str) -> tuple[Path, list[Path], tuple[str, ...]]:
    """A folder, the images in it and below it by name, and how many other files lie there.

    Hidden files and folders, whose names begin with a dot, are counted among the others.

    One image may be named, too.

    Args:
      key: what named the place, for errors.

    Raises:
      UserError: it is not there, or holds no image.
    """
    if is_remote(place):
        raise UserError(
            f"{key} ({place}) is a URL, but images one by one are read from local folders alone; "
            "copy the folder here"
        )
    root = to_path(place, key)
    if root.is_file():
        return root.parent, [root], ()
    if not root.is_dir():
        raise UserError(f"{key} ({place!r}): no such file or directory; name a folder of images")
    images: list[Path] = []
    others: Counter[str] = Counter()
    for folder, below, names in os.walk(root, followlinks=True):
        others.update(f"folder {name}" for name in below if is_hidden(name))
        below[:] = sorted(name for name in below if not is_hidden(name))
        for name in sorted(names):
            if Path(name).suffix.lower() in IMAGE_SUFFIXES and not is_hidden(name):
                images.append(Path(folder, name))
            else:
                others[name_left_out(name)] += 1
    if not images:
        raise UserError(
            f"{key} ({place!r}) holds no image; its files must end with "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return root, images, tuple(f"{count} {what}" for what, count in sorted(others.items()))


class LooseImages(FolderSource):
    """Every image below data.root, in the order of names and without a label."""

    def select_files(self, expression: str, key: str) -> FolderSelection:
        """All of them, whatever the expression says."""
        root, paths, left_out = list_images(self.data.root, key)
        # A link to nothing has no size: it is told as a file that cannot be read, like others.
        sizes = [path.stat().st_size for path in paths[:100] if path.exists()] or [0]
        return FolderSelection(
            num_examples=len(paths),
            num_classes=1,
            directory=root,
            paths=tuple(paths),
            labels=np.zeros(len(paths), np.int64),
            mean_record_bytes=sum(sizes) / len(sizes),
            left_out=left_out,
        )
