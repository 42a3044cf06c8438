"""The 62 letters and digits in the typefaces of matplotlib, rendered reproducibly.

A second task that needs no network: the evaluation splits have other typefaces than training, every
example is rotated, shifted, scaled and gets noise, and an example is a function of (split, face,
class, draw) alone.
"""

from __future__ import annotations

import argparse
import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tools.prepare_dataset import write
from utils.errors import UserError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
SIDE = 16
# Faces of each split, and draws of every class in each: 2,976, 496 and 992 examples.
_FACES = {
    "train": (
        "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSansMono DejaVuSansMono-Bold "
        "DejaVuSerif DejaVuSerif-Bold STIXGeneral STIXGeneralBol STIXGeneralItalic cmr10 cmss10"
    ),
    "validation": "DejaVuSansMono-Oblique DejaVuSerif-Italic STIXGeneralBolIta cmb10",
    "test": "DejaVuSans-BoldOblique DejaVuSerif-BoldItalic cmtt10 cmti10",
}
FACES = {split: tuple(faces.split()) for split, faces in _FACES.items()}
DRAWS = {"train": 4, "validation": 2, "test": 4}
_OVERSAMPLED = 4
_NOISE = 24.0


@dataclass(frozen=True, order=True)
class Glyph:
    """An example: the draw of a class in a face."""

    split: str
    face: str
    label: int
    draw: int


def add_command(commands: write.Commands) -> None:
    """Add the subcommand `fonts`."""
    what = f"{len(CLASSES)} letters and digits in matplotlib's typefaces, {SIDE} x {SIDE} grey"
    fonts = commands.add_parser("fonts", help=what)
    fonts.set_defaults(prepare=prepare_fonts, name="fonts", version=write.VERSION)
    write.add_output_flags(fonts)


def prepare_fonts(arguments: argparse.Namespace) -> Path:
    """Render and write all glyphs."""
    return write.write_once(lambda _: describe_fonts(), arguments)


def describe_fonts() -> write.Conversion[tuple[int, Glyph]]:
    """Return the glyphs as a dataset, whose description says how hard they are."""
    import tensorflow_datasets as tfds

    splits = list_glyphs()
    error = measure_neighbours(splits["train"], splits["test"])
    return write.Conversion(
        name="fonts",
        description=f"Letters and digits in matplotlib's typefaces, {SIDE} x {SIDE} grey; the "
        f"nearest neighbour in pixels errs on {100 * error:.1f} % of the test split.",
        features={
            "image": tfds.features.Image(shape=(SIDE, SIDE, 1), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=list(CLASSES)),
            "id": tfds.features.Scalar(dtype=np.int64),
        },
        splits={split: list(enumerate(glyphs)) for split, glyphs in splits.items()},
        encode=lambda pair: {"image": render(pair[1]), "label": pair[1].label, "id": pair[0]},
        get_bytes=lambda _: 400,
    )


def list_glyphs() -> dict[str, list[Glyph]]:
    """Return the examples of each split, in a fixed random order."""
    splits = {}
    for number, (split, faces) in enumerate(FACES.items()):
        glyphs = [
            Glyph(split, face, label, draw)
            for face in faces
            for label in range(len(CLASSES))
            for draw in range(DRAWS[split])
        ]
        order = np.random.Generator(np.random.Philox(key=number)).permutation(len(glyphs))
        splits[split] = [glyphs[index] for index in order]
    return splits


def render(glyph: Glyph) -> np.ndarray:
    """Render the image [SIDE, SIDE, 1] uint8 of a glyph, light on dark.

    It is drawn four times as large, rotated by up to 15 degrees, shifted by up to 1.5 pixels and
    scaled by 0.8 to 1.1, then averaged to its size, and gets Gaussian noise.
    """
    from PIL import Image, ImageDraw

    faces = [face for those in FACES.values() for face in those]
    key = (faces.index(glyph.face) * len(CLASSES) + glyph.label) * 1000 + glyph.draw
    random = np.random.Generator(np.random.Philox(key=key))
    scale, angle = random.uniform(0.8, 1.1), random.uniform(-15.0, 15.0)
    shift = random.uniform(-1.5, 1.5, size=2) * _OVERSAMPLED
    large = SIDE * _OVERSAMPLED
    image = Image.new("L", (large, large))
    font = open_face(glyph.face, round(0.8 * scale * large))
    text = CLASSES[glyph.label]
    left, top, right, bottom = font.getbbox(text)
    # By its own box, not by its line: a baseline would distinguish capitals from small letters.
    corner = ((large - left - right) / 2 + shift[0], (large - top - bottom) / 2 + shift[1])
    ImageDraw.Draw(image).text(corner, text, fill=255, font=font)
    image = image.rotate(angle, resample=Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float64)
    cut = pixels.reshape(SIDE, _OVERSAMPLED, SIDE, _OVERSAMPLED).mean(axis=(1, 3))
    noisy = cut + _NOISE * random.standard_normal((SIDE, SIDE))
    return np.clip(np.round(noisy), 0, 255).astype(np.uint8)[..., None]


@cache
def open_face(face: str, size: int) -> FreeTypeFont:
    """Open a typeface of matplotlib at a size in pixels; a UserError if it is not there."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("fonts needs matplotlib; pip install matplotlib") from error
    from PIL import ImageFont

    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    try:
        return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise UserError(
            f"fonts needs {path}, which matplotlib brings; pip install matplotlib anew"
        ) from error


def measure_neighbours(train: list[Glyph], test: list[Glyph]) -> float:
    """Return the share of test glyphs whose nearest training glyph is of another class."""
    known, test_pixels = (
        np.stack([render(glyph).ravel() for glyph in glyphs]).astype(np.float64)
        for glyphs in (train, test)
    )
    distances = (known**2).sum(axis=1) - 2 * test_pixels @ known.T  # up to a constant of each row
    labels = np.array([glyph.label for glyph in train])
    return float(np.mean(labels[distances.argmin(axis=1)] != [glyph.label for glyph in test]))
