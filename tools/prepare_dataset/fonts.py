"""The 62 letters and digits in the typefaces that ship with matplotlib, rendered anew and alike.

A second real task for tables of methods that needs no network: the faces of the evaluation splits
are no faces of training, every example is turned, shifted, scaled and made noisy in a way of its
own, and what an example looks like is a function of (split, face, class, draw) alone.
"""

from __future__ import annotations

import argparse
import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tools.prepare_dataset import write
from utils.errors import UserError

CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
SIDE = 16
# Faces of each split, and how often each draws every class: 2,976, 496 and 992 examples.
FACES = {
    "train": (
        "DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono",
        "DejaVuSansMono-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "STIXGeneral",
        "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmss10",
    ),
    "validation": ("DejaVuSansMono-Oblique", "DejaVuSerif-Italic", "STIXGeneralBolIta", "cmb10"),
    "test": ("DejaVuSans-BoldOblique", "DejaVuSerif-BoldItalic", "cmtt10", "cmti10"),
}  # fmt: skip
DRAWS = {"train": 4, "validation": 2, "test": 4}
_OVERSAMPLED = 4
_NOISE = 24.0


@dataclass(frozen=True, order=True)
class Glyph:
    """One example: the draw of a class in a face, in the order in which it is written."""

    split: str
    face: str
    label: int
    draw: int


def add_command(commands: argparse._SubParsersAction) -> None:
    """The subcommand `fonts`."""
    what = f"{len(CLASSES)} letters and digits in matplotlib's typefaces, {SIDE} x {SIDE} grey"
    fonts = commands.add_parser("fonts", help=what)
    fonts.set_defaults(prepare=prepare_fonts, name="fonts", version=write.VERSION)
    write.add_output_flags(fonts)


def prepare_fonts(arguments: argparse.Namespace) -> Path:
    """Render and write all glyphs; how hard they are stands in the dataset's description."""
    target = write.get_target(arguments)
    if write.is_there(target, arguments):
        return target
    import tensorflow_datasets as tfds

    splits = list_glyphs()
    error = measure_neighbours(splits["train"], splits["test"])
    conversion = write.Conversion(
        name="fonts",
        description=f"Letters and digits in matplotlib's typefaces, {SIDE} x {SIDE} grey; the "
        f"nearest neighbour in pixels errs on {100 * error:.1f} % of the test split.",
        features={
            "image": tfds.features.Image(shape=(SIDE, SIDE, 1), encoding_format="png"),
            "label": tfds.features.ClassLabel(names=list(CLASSES)),
            "id": tfds.features.Scalar(dtype=np.int64),
        },
        splits={split: list(enumerate(glyphs)) for split, glyphs in splits.items()},
        encode=lambda one: {"image": render(one[1]), "label": one[1].label, "id": one[0]},
        get_bytes=lambda _: 400,
    )
    return write.write_asked(conversion, target, arguments)


def list_glyphs() -> dict[str, list[Glyph]]:
    """The examples of each split, shuffled once and for all."""
    splits = {}
    for number, (split, faces) in enumerate(FACES.items()):
        glyphs = [
            Glyph(split, face, label, draw)
            for face in faces
            for label in range(len(CLASSES))
            for draw in range(DRAWS[split])
        ]
        order = np.random.Generator(np.random.Philox(key=number)).permutation(len(glyphs))
        splits[split] = [glyphs[place] for place in order]
    return splits


def render(glyph: Glyph) -> np.ndarray:
    """The image [SIDE, SIDE, 1] uint8 of a glyph, light on dark.

    It is drawn four times as large, turned by up to 15 degrees, shifted by up to 1.5 pixels and
    scaled by 0.8 to 1.1, then made smaller by means, and gets Gaussian noise.
    """
    from PIL import Image, ImageDraw

    faces = [face for those in FACES.values() for face in those]
    place = (faces.index(glyph.face) * len(CLASSES) + glyph.label) * 1000 + glyph.draw
    random = np.random.Generator(np.random.Philox(key=place))
    scale, angle = random.uniform(0.8, 1.1), random.uniform(-15.0, 15.0)
    shift = random.uniform(-1.5, 1.5, size=2) * _OVERSAMPLED
    large = SIDE * _OVERSAMPLED
    image = Image.new("L", (large, large))
    font = open_face(glyph.face, round(0.8 * scale * large))
    text = CLASSES[glyph.label]
    left, top, right, bottom = font.getbbox(text)
    # By its own box, not by its line: a text's baseline would tell capitals from small letters.
    corner = ((large - left - right) / 2 + shift[0], (large - top - bottom) / 2 + shift[1])
    ImageDraw.Draw(image).text(corner, text, fill=255, font=font)
    image = image.rotate(angle, resample=Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float64)
    cut = pixels.reshape(SIDE, _OVERSAMPLED, SIDE, _OVERSAMPLED).mean(axis=(1, 3))
    noisy = cut + _NOISE * random.standard_normal((SIDE, SIDE))
    return np.clip(np.round(noisy), 0, 255).astype(np.uint8)[..., None]


@cache
def open_face(face: str, size: int):
    """A typeface of matplotlib's own files, at a size in pixels.

    Raises:
      UserError: matplotlib is not there, or brings no such face.
    """
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
    """Share of the test glyphs whose nearest training glyph, in pixels, is of another class."""
    known, asked = (np.stack([render(one).ravel() for one in those]) for those in (train, test))
    known, asked = known.astype(np.float64), asked.astype(np.float64)
    distances = (known**2).sum(axis=1) - 2 * asked @ known.T  # up to a constant of each row
    labels = np.array([one.label for one in train])
    return float(np.mean(labels[distances.argmin(axis=1)] != [one.label for one in test]))
