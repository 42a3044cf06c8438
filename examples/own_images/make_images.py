"""Draws discs, squares and triangles: stands for a folder of images of your own.

`python examples/own_images/make_images.py shapes` writes shapes/train/CLASS/*.png and
shapes/validation/CLASS/*.png, the same files each time.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIDE = 32
SPLITS = {"train": 64, "validation": 16}


def draw(shape: str, source: random.Random) -> Image.Image:
    """Draw one shape of a random place, size and colour on noise."""
    noise = Image.frombytes("RGB", (SIDE, SIDE), source.randbytes(3 * SIDE * SIDE))
    image = noise.point(lambda value: value // 2)
    radius = source.randint(6, 10)
    x, y = (source.randint(radius + 1, SIDE - radius - 2) for _ in range(2))
    colour = tuple(source.randint(100, 255) for _ in range(3))
    box = (x - radius, y - radius, x + radius, y + radius)
    pen = ImageDraw.Draw(image)
    if shape == "disc":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(x, y - radius), box[2:], (x - radius, y + radius)], fill=colour)
    return image


def main(argv: list[str] | None = None) -> int:
    """Write both splits into the folder that is named; return the exit code."""
    (name,) = sys.argv[1:] if argv is None else argv
    folder, source = Path(name), random.Random(0)
    for split, count in SPLITS.items():
        for shape in ("disc", "square", "triangle"):
            target = folder / split / shape
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                draw(shape, source).save(target / f"{number:03}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
