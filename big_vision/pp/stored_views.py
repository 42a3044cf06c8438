"""Views that somebody else has drawn: which part of each image, in which epoch.

A folder holds `views.bin`, a row for each epoch and example, and `views.json`, which says what a
row has and verifies the file. `tools.cache import` writes both; the op `stored_view` replays them.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from big_vision.pp.seeded_views import SeedRules
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import open_folder

VIEWS, VIEWS_JSON = "views.bin", "views.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class ViewForm:
    """What is known of a view.

    Args:
      size: (height, width) to which the views were resized for the teacher.
      method: of resizing; smoothed where it shrinks, as PIL does.
      layers: operations of torchvision's RandAugment on each; 0: none.
      erased: whether a box of each may be black.
      rules: a row is a seed, and this is drawn from it; none: a row says it all.
    """

    size: tuple[int, int]
    method: str = "bilinear"
    layers: int = 0
    erased: bool = False
    rules: SeedRules | None = None

    @property
    def row_dtype(self) -> np.dtype:
        """One view: a box (y, x, height, width) of the image, and what happens to it then.

        `numbers` are places in `policies.TRIVIAL`, 255 for nothing; `arguments` what its operations
        are called with; a box to erase without a height is none.
        """
        if self.rules is not None:
            return np.dtype([("seed", "<u4")])
        fields: list[tuple[str, str, tuple[int, ...]]] = [("box", "<u2", (4,)), ("flip", "u1", ())]
        if self.layers:
            fields += [("numbers", "u1", (self.layers,)), ("arguments", "<f4", (self.layers,))]
        if self.erased:
            fields.append(("erased", "<u2", (4,)))
        return np.dtype(fields)

    @property
    def is_bound(self) -> bool:
        """Whether what happens to the pixels holds for this size alone."""
        return self.layers > 0 or self.erased or bool(self.rules and self.rules.layers)


@dataclass(frozen=True)
class ViewFacts:
    """What `views.json` says.

    Args:
      digest: of the form and of all rows.
    """

    form: ViewForm
    epochs: int
    examples: int
    crc32c: int
    digest: str


def read_view_facts(place: str) -> ViewFacts:
    """What lies in a folder.

    Raises:
      UserError: nothing that this program can read.
    """
    try:
        found = json.loads(open_folder(place).read_text(VIEWS_JSON))
        if found["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {found['format_version']} instead of {FORMAT_VERSION}")
        form = {**found["form"], "size": tuple(found["form"]["size"])}
        if form.get("rules") is not None:
            form["rules"] = SeedRules(**form["rules"])
        rest = {name: found[name] for name in ("epochs", "examples", "crc32c", "digest")}
        return ViewFacts(ViewForm(**form), **rest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"stored_view ({place!r}): no readable {VIEWS_JSON} ({error}); write it by python -m "
            "tools.cache import"
        ) from error


def describe_views(facts: ViewFacts) -> JsonObject:
    """As `views.json` says it."""
    return {"format_version": FORMAT_VERSION, **asdict(facts)}


class ViewTable:
    """The rows of a folder, fetched when the first is asked for; of one process."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._files = contextlib.ExitStack()
        self.facts: ViewFacts | None = None
        self._rows: np.ndarray | None = None

    def open(self) -> ViewFacts:
        """What lies there; from here on rows can be had."""
        if self.facts is None:
            facts = read_view_facts(self._place)
            path = self._files.enter_context(open_folder(self._place).open_local(VIEWS))
            self._rows = _map_rows(path, facts, self._place)
            self.facts = facts
        return self.facts

    def get(self, epoch: int, index: int) -> np.void:
        """The row of an example in an epoch, of which they start over after the last."""
        facts = self.open()
        if not 0 <= index < facts.examples:
            raise UserError(
                f"stored_view ({self._place!r}) has views of {facts.examples} examples and is "
                f"asked for number {index}; it belongs to data.train_pp of the split that was "
                "imported for"
            )
        return self._rows[epoch % facts.epochs, index]


def _map_rows(path: Path, facts: ViewFacts, place: str) -> np.ndarray:
    dtype, wanted = facts.form.row_dtype, (facts.epochs, facts.examples)
    found = path.stat().st_size
    if found != wanted[0] * wanted[1] * dtype.itemsize:
        raise UserError(
            f"stored_view ({place!r}): {VIEWS} has {found} bytes, not those of {wanted[0]} x "
            f"{wanted[1]} views; import them again"
        )
    return np.memmap(path, dtype, mode="r", shape=wanted)
