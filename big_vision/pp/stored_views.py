"""Views from another program: which part of each image, in which epoch.

A folder holds `views.bin`, a row for each epoch and example, and `views.json`, which describes the
rows and verifies the file. `tools.cache import` writes both; the op `stored_view` replays them.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from big_vision.pp.policies import RANDAUG
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.places import open_folder

_AREA, _RATIOS, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
_FLIPPED, _APPLIED = 0.5, 0.5
_ENHANCING = ("Color", "Contrast", "Brightness", "Sharpness")
# The largest argument of operations with a sign, at magnitude 10.
_SIGNED = {
    "Rotate": 30.0,
    "ShearX": 0.3,
    "ShearY": 0.3,
    "TranslateXRel": 0.45,
    "TranslateYRel": 0.45,
}
_MOST = 10.0
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class SeedRules:
    """What is drawn from a seed besides the box and the mirror image.

    Args:
      layers: operations of RandAugment, each left out half the time; 0: none.
      magnitude: of 10.
      mstd: deviation of the magnitude.
      increasing: True if every operation is stronger at a higher magnitude.
      fill: of uncovered pixels.
    """

    layers: int = 0
    magnitude: float = 10.0
    mstd: float = 0.0
    increasing: bool = False
    fill: Sequence[int] = (128, 128, 128)


@dataclass(frozen=True)
class SeededView:
    """A drawn view: box (y, x, height, width), mirror image, operations (-1: none)."""

    box: Box
    flip: bool
    numbers: np.ndarray
    arguments: np.ndarray


def draw_view(seed: int, shape: tuple[int, int], rules: SeedRules) -> SeededView:
    """Draw the view of an image of (height, width)."""
    generator = np.random.Generator(np.random.PCG64(seed))
    box = _draw_box(generator, shape)
    flip = generator.random() < _FLIPPED
    numbers = np.full(rules.layers, -1, np.int32)
    arguments = np.zeros(rules.layers, np.float32)
    if rules.layers:
        chosen = generator.choice(len(RANDAUG), rules.layers, replace=True)
        for layer, number in enumerate(chosen):
            if generator.random() <= _APPLIED:
                numbers[layer] = number
                arguments[layer] = _draw_argument(generator, RANDAUG[number], rules)
    return SeededView(box, bool(flip), numbers, arguments)


def _draw_box(generator: np.random.Generator, shape: tuple[int, int]) -> Box:
    """Draw torchvision's box in ten tries; else the middle, as large as its aspect allows."""
    whole_height, whole_width = shape
    area = whole_height * whole_width
    logs = math.log(_RATIOS[0]), math.log(_RATIOS[1])
    for _ in range(_TRIES):
        target = _uniform(generator, *_AREA) * area
        aspect = math.exp(_uniform(generator, *logs))
        width = round(math.sqrt(target * aspect))
        height = round(math.sqrt(target / aspect))
        if width <= whole_width and height <= whole_height:
            y = _integer(generator, whole_height - height)
            return y, _integer(generator, whole_width - width), height, width
    aspect, height, width = whole_width / whole_height, whole_height, whole_width
    if aspect < _RATIOS[0]:
        height = round(whole_width / _RATIOS[0])
    elif aspect > _RATIOS[1]:
        width = round(whole_height * _RATIOS[1])
    return (whole_height - height) // 2, (whole_width - width) // 2, height, width


def _draw_argument(generator: np.random.Generator, name: str, rules: SeedRules) -> float:
    """Draw an operation's argument."""
    magnitude = rules.magnitude
    if math.isinf(rules.mstd):
        magnitude = _uniform(generator, 0, magnitude)
    elif rules.mstd > 0:
        magnitude = generator.normal(magnitude, rules.mstd)
    level = max(0.0, min(magnitude, _MOST)) / _MOST
    if name in _SIGNED:
        return _negate(generator, level * _SIGNED[name])
    if name in _ENHANCING:
        if not rules.increasing:
            return level * 1.8 + 0.1
        return max(0.1, 1.0 + _negate(generator, level * 0.9))
    if name in ("Posterize", "Solarize"):
        most = 4 if name == "Posterize" else 256
        whole = int(level * most)
        return float(most - whole if rules.increasing else whole)
    return float(int(level * 110)) if name == "SolarizeAdd" else 0.0


def _uniform(generator: np.random.Generator, low: float, high: float) -> float:
    return generator.random() * (high - low) + low


def _integer(generator: np.random.Generator, most: int) -> int:
    """Draw from 0 to `most`, inclusive."""
    return min(int(generator.random() * (most + 1)), most)


def _negate(generator: np.random.Generator, value: float) -> float:
    return -value if generator.random() > 0.5 else value


VIEWS, VIEWS_JSON = "views.bin", "views.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class ViewForm:
    """Description of views.

    Args:
      size: (height, width) to which the views were resized for the teacher.
      method: of resizing; antialiased as in PIL.
      layers: operations of torchvision's RandAugment on each; 0: none.
      erased: True if a box of each may be black.
      rules: if given, a row is a seed that these are drawn from; None if a row has all numbers.
    """

    size: tuple[int, int]
    method: str = "bilinear"
    layers: int = 0
    erased: bool = False
    rules: SeedRules | None = None

    @property
    def row_dtype(self) -> np.dtype:
        """One view: a box (y, x, height, width) of the image, and the operations on it.

        `numbers` are positions in `policies.TRIVIAL`, 255 for no operation, `arguments` those of
        the operations; a box to erase without a height is not used.
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
        """True if the operations hold for this size only."""
        return self.layers > 0 or self.erased or bool(self.rules and self.rules.layers)


@dataclass(frozen=True)
class ViewFacts:
    """Contents of `views.json`; `digest` is of the form and of all rows."""

    form: ViewForm
    epochs: int
    examples: int
    crc32c: int
    digest: str


def read_view_facts(place: str) -> ViewFacts:
    """Read the description of a folder of views; UserError if missing or unreadable."""
    try:
        content = json.loads(open_folder(place).read_text(VIEWS_JSON))
        if content["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {content['format_version']} instead of {FORMAT_VERSION}")
        form: JsonObject = {**content["form"], "size": tuple(content["form"]["size"])}
        if form.get("rules") is not None:
            form["rules"] = SeedRules(**form["rules"])
        rest = {name: content[name] for name in ("epochs", "examples", "crc32c", "digest")}
        return ViewFacts(ViewForm(**form), **rest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"stored_view ({place!r}): no readable {VIEWS_JSON} ({error}); write it by python -m "
            "tools.cache import"
        ) from error


def describe_views(facts: ViewFacts) -> JsonObject:
    """Return the contents of `views.json`."""
    return {"format_version": FORMAT_VERSION, **asdict(facts)}


class ViewTable:
    """Rows of a folder, fetched on first use; of one process."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._files = contextlib.ExitStack()
        self.facts: ViewFacts | None = None
        self._rows: np.ndarray | None = None

    def open(self) -> ViewFacts:
        """Fetch the rows and return their description."""
        if self.facts is None:
            facts = read_view_facts(self._place)
            path = self._files.enter_context(open_folder(self._place).open_local(VIEWS))
            self._rows = _map_rows(path, facts, self._place)
            self.facts = facts
        return self.facts

    def get(self, epoch: int, index: int) -> np.void:
        """Return the row of an example in an epoch; epochs start over after the last."""
        facts = self.open()
        if not 0 <= index < facts.examples:
            raise UserError(
                f"stored_view ({self._place!r}) has views of {facts.examples} examples and got "
                f"number {index}; use it in data.train_pp of the split that they were imported for"
            )
        assert self._rows is not None
        return self._rows[epoch % facts.epochs, index]


def _map_rows(path: Path, facts: ViewFacts, place: str) -> np.ndarray:
    dtype, wanted = facts.form.row_dtype, (facts.epochs, facts.examples)
    size = path.stat().st_size
    if size != wanted[0] * wanted[1] * dtype.itemsize:
        raise UserError(
            f"stored_view ({place!r}): {VIEWS} has {size} bytes, not those of {wanted[0]} x "
            f"{wanted[1]} views; import them again"
        )
    return np.memmap(path, dtype, mode="r", shape=wanted)
