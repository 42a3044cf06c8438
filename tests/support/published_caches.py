"""Files of stored outputs as other projects publish them, by their published rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F
from torchvision.transforms.autoaugment import _apply_op

CLASSES, IMAGES, VIEWS, TOP_K, SIDE = 4, 24, 3, 2, 16
OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)


CROP = {
    "uint8": {"enable": True},
    "random_resized_crop": {"enable": True, "size": SIDE},
    "random_horizontal_flip": {"enable": True, "p": 0.5},
    "rand_augment": {"enable": False},
    "to_tensor": {"enable": True},
    "normalize": {"mean": [0.5] * 3, "std": [0.5] * 3},
}


STRONG = {
    **CROP,
    "rand_augment": {"enable": True, "p": 0.5},
    "random_erase": {"enable": True, "p": 0.25},
}


def list_images(root: Path) -> list[Path]:
    """As torchvision's ImageFolder numbers them."""
    return [
        file for folder in sorted((root / "train").iterdir()) for file in sorted(folder.iterdir())
    ]


def publish(folder: Path, root: Path, augmentation: dict, compress: bool = True) -> list[list]:
    """Files as `reinforce.py` writes them; gives each image's samples, with their parameters."""
    folder.mkdir()
    generator = np.random.default_rng(1)
    reinforce = {
        "num_samples": VIEWS,
        "topk": TOP_K,
        "compress": compress,
        "joblib": False,
        "image_augmentation": augmentation,
    }
    config = {"dataset": "imagenet", "num_classes": CLASSES, "teacher": {"name": "two,teachers"}}
    torch.save({**config, "reinforce": reinforce}, folder / "config.pth.tar")
    found = []
    for number, path in enumerate(list_images(root)):
        width, height = Image.open(path).size
        label = int(path.parent.name[-1])
        samples = [
            draw_sample(generator, (height, width), label, "random_erase" in augmentation)
            for _ in range(VIEWS)
        ]
        stored = [{**one, "params": pack(one["params"], compress)} for one in samples]
        torch.save((number, stored), folder / f"{number}.pth.tar", pickle_protocol=4)
        found.append(samples)
    return found


def draw_sample(generator, shape: tuple[int, int], label: int, strong: bool) -> dict:
    height, width = (int(generator.integers(5, side + 1)) for side in shape)
    y, x = (
        int(generator.integers(whole - part + 1))
        for whole, part in zip(shape, (height, width), strict=True)
    )
    params = {
        "random_resized_crop": (y, x, height, width),
        "random_horizontal_flip": bool(generator.integers(2)),
    }
    if strong:
        drawn = [OPERATIONS[number] for number in generator.integers(len(OPERATIONS), size=2)]
        strengths = {
            "Posterize": 4.0,
            "Solarize": 100.0,
            "Rotate": 9.0,
            "TranslateX": -2.9,
            "TranslateY": 1.7,
        }
        pairs = [(name, strengths.get(name, 0.27)) for name in drawn]
        params["rand_augment"] = pairs if generator.integers(3) else None
        params["random_erase"] = (2, 3, 5, 7) if generator.integers(2) else None
    other = int(generator.integers(1, CLASSES))
    top = float(generator.uniform(0.5, 0.9))
    probs = [top, (1 - top) * 0.7]
    ids = [label, (label + other) % CLASSES]
    return {"params": params, "prob": (probs[::-1], ids[::-1])}  # in no order


def pack(params: dict, compress: bool) -> list | dict:
    if not compress:
        return {name: (value, value) for name, value in params.items()} | {"uint8": ((), ())}
    values = dict(params)
    if values.get("rand_augment") is not None:
        values["rand_augment"] = [(OPERATIONS.index(n), m) for n, m in values["rand_augment"]]
    return list(values.values())


def replay(path: Path, params: dict) -> np.ndarray:
    """What `dr/transforms.py` makes of an image, by torchvision."""
    image = Image.open(path).convert("RGB")
    image = F.resized_crop(image, *params["random_resized_crop"], (SIDE, SIDE))
    image = F.hflip(image) if params["random_horizontal_flip"] else image
    for name, strength in params.get("rand_augment") or ():
        image = _apply_op(image, name, strength, InterpolationMode.NEAREST, fill=None)
    pixels = np.array(image)
    if params.get("random_erase"):
        y, x, height, width = params["random_erase"]
        pixels[y : y + height, x : x + width] = 0
    return pixels
