"""Outputs published as Dataset Reinforcement: ImageNet+, CIFAR-100+, Food-101+ and Flowers-102+.

A folder holds `config.pth.tar` and a file `ID.pth.tar` for each image: (id, [sample, ...]), where a
sample has the parameters of its augmentation and its most probable classes with their
probabilities. The id is the image's rank in torchvision's ImageFolder.

Source: Faghri et al. 2023, arXiv:2303.08983; `reinforce.py` and `dr/transforms.py` of its code.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

import numpy as np
import torch
from torch import Tensor

from big_vision.pp.ops_stored import NOTHING
from big_vision.pp.policies import TRIVIAL
from big_vision.pp.stored_views import ViewForm
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.storage.places import to_path

CONFIG = "config.pth.tar"
# Augmentations in the order of application, which is that of their parameters in a file.
_DRAWN = ("random_resized_crop", "random_horizontal_flip", "rand_augment", "random_erase")
_FIXED = ("uint8", "to_tensor", "normalize")
# Options of them that the replay follows, or that do not change a drawn view.
_KNOWN = {
    "random_resized_crop": {"size", "scale", "ratio"},
    "rand_augment": {"p", "num_ops", "magnitude", "num_magnitude_bins"},
}
# A part of a row of views, and a sample's parameters, of one image or of a mixed pair.
View = bool | tuple[float, ...]
Samples = Sequence[Any] | dict[str, Sequence[Any]]
_FACTORS = ("Brightness", "Color", "Contrast", "Sharpness")
# A probability of 0 has no logarithm; this is the smallest normal float32.
_LEAST = 1e-38


class ReinforcedFiles:
    """The files of one such folder.

    Attributes:
      teacher: name of the teachers, whose outputs are combined.
      form: of the views.
      epochs: samples of each image.
      width: classes.
      top_k: classes with a probability.
      identity: hash that distinguishes these files from others.
    """

    def __init__(self, path: str) -> None:
        self._folder = to_path(path, "the published files")
        config = read_plain(self._folder / CONFIG)
        if not isinstance(config, dict) or not isinstance(config.get("reinforce"), dict):
            raise UserError(f"{self._folder / CONFIG} has no entry reinforce; use another folder")
        section = config["reinforce"]
        self._augmentation = _read_augmentation(section.get("image_augmentation") or {}, path)
        self.form = _find_form(self._augmentation, path)
        teacher = config.get("teacher")
        name = teacher.get("name") if isinstance(teacher, dict) else teacher
        self.teacher = str(name or "unnamed teachers")
        try:
            self.epochs, self.top_k = int(section["num_samples"]), int(section["topk"])
            self.width = int(config["num_classes"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self._folder / CONFIG} has no valid {error}; use another folder"
            ) from error
        self.top_k = min(self.top_k, self.width)
        words = json.dumps([self.teacher, self._augmentation, self.epochs, self.top_k])
        self.identity = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    def list_ids(self) -> set[str]:
        """List all images that have outputs."""
        suffix = ".pth.tar"
        names = {path.name for path in self._folder.glob(f"*{suffix}")} - {CONFIG}
        return {name.removesuffix(suffix) for name in names}

    def read(self, ids: Sequence[str]) -> tuple[np.ndarray, Tensor]:
        """Read views [epochs, n] and condensed outputs [epochs, n, 2 k + 1] of some images."""
        views = np.zeros((self.epochs, len(ids)), self.form.row_dtype)
        outputs = torch.zeros((self.epochs, len(ids), 2 * self.top_k + 1), dtype=torch.float64)
        for number, name in enumerate(ids):
            path = self._folder / f"{name}.pth.tar"
            try:
                own_id, samples = read_plain(path)
                if str(own_id) != name or len(samples) != self.epochs:
                    raise ValueError(f"id {own_id} with {len(samples)} samples")
                for epoch, sample in enumerate(samples):
                    views[epoch, number] = self._read_view(sample["params"])
                    outputs[epoch, number] = self._read_output(*sample["prob"])
            except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
                raise UserError(
                    f"{path} is no file of {self.epochs} samples of {self.top_k} classes "
                    f"({error}); fetch it again"
                ) from error
        return views, outputs

    def _read_view(self, params: Samples) -> tuple[View, ...]:
        """Convert the parameters of a sample to a row of `ViewForm.row_dtype`."""
        drawn = [name for name in _DRAWN if name in self._augmentation]
        if isinstance(params, dict):  # of the image, and of a second one that was not used
            values = {name: params[name][0] for name in drawn}
        else:
            values = dict(zip(drawn, params, strict=True))
        box, flip = values["random_resized_crop"], values.get("random_horizontal_flip")
        row: list[View] = [tuple(map(int, box)), bool(flip)]
        if self.form.layers:
            row += _read_operations(values["rand_augment"], self.form.layers)
        if self.form.erased:
            y, x, height, width = map(int, values["random_erase"] or (0, 0, 0, 0))
            row.append((y, x, height, width) if y >= 0 else (0, 0, 0, 0))
        return tuple(row)

    def _read_output(self, probs: Sequence[float], classes: Sequence[int]) -> Tensor:
        """Condense probabilities to [2 k + 1], the best class first; the rest sums to 1."""
        values = torch.tensor(probs, dtype=torch.float64)
        indices = torch.tensor(classes, dtype=torch.float64)
        if len(values) != self.top_k or len(indices) != self.top_k:
            raise ValueError(f"{len(values)} probabilities of {len(indices)} classes")
        if not (indices.min() >= 0 and indices.max() < self.width and values.min() >= 0):
            raise ValueError("a class or a probability out of range")
        order = values.argsort(descending=True, stable=True)
        rest = (1.0 - values.sum()).clamp(min=0.0)
        if len(values) == self.width:
            rest = torch.zeros_like(rest)
        return torch.cat([values[order].clamp(min=_LEAST).log(), indices[order], rest[None]])


def read_plain(path: Path) -> Any:
    """Read a file of `torch.save`; UserError unless it is numbers, texts, lists and tables."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _PlainUnpickler(io.BytesIO(archive.read(name))).load()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise UserError(
            f"{path} cannot be read as a file of numbers by torch.save ({error}); fetch it again"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that creates no object of any class: files may name arbitrary code."""

    def find_class(self, module: str, name: str) -> Never:
        raise pickle.UnpicklingError(f"it contains {module}.{name}")

    def persistent_load(self, pid: object) -> Never:
        raise pickle.UnpicklingError("it contains tensors")


def _read_augmentation(sections: JsonMapping, path: str) -> JsonObject:
    """Read the enabled augmentations; refuse those that this program does not replay."""
    enabled: JsonObject = {}
    for name, options in sections.items():
        options = dict(options or {})
        if options.pop("enable", True):
            enabled[name] = options
    for name, options in enabled.items():
        if name in ("mixup", "cutmix"):
            raise UserError(
                f"{path!r} holds outputs for pairs of images mixed by {name}, which are not "
                "replayed; use the set without mixing (RRC or RA/RE)"
            )
        extra = sorted(set(options) - _KNOWN.get(name, set(options)))
        if name not in (*_DRAWN, *_FIXED) or extra:
            option = f" with {extra[0]}" if extra else ""
            raise UserError(
                f"{path!r} holds outputs for images after {name}{option}, which is not replayed; "
                f"replayed are {', '.join(_DRAWN)}"
            )
    if "random_resized_crop" not in enabled:
        raise UserError(f"{path!r} has no random_resized_crop, which every view needs")
    return enabled


def _find_form(augmentation: JsonMapping, path: str) -> ViewForm:
    size = augmentation["random_resized_crop"].get("size")
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise UserError(f"{path!r}: size of random_resized_crop must be one or two sides: {size!r}")
    drawn = augmentation.get("rand_augment")
    layers = 0 if drawn is None else int(drawn.get("num_ops", 2))
    return ViewForm(sides, layers=layers, erased="random_erase" in augmentation)


def _read_operations(
    operations: Sequence[tuple[str | int, float]] | None, layers: int
) -> list[tuple[float, ...]]:
    """Convert torchvision's operations and strengths to the numbers and arguments of a view."""
    if operations is None:
        return [(NOTHING,) * layers, (0.0,) * layers]
    if len(operations) != layers:
        raise ValueError(f"{len(operations)} operations instead of {layers}")
    names = list(TRIVIAL)
    pairs = [(names.index(o) if isinstance(o, str) else int(o), float(m)) for o, m in operations]
    arguments = tuple(_find_argument(names[number], strength) for number, strength in pairs)
    return [tuple(number for number, _ in pairs), arguments]


def _find_argument(name: str, strength: float) -> float:
    """Convert torchvision's strength to the argument of an operation of `policies`."""
    if name in _FACTORS:
        return 1.0 + strength
    if name in ("TranslateX", "TranslateY"):
        # Whole pixels; `policies` shifts the sampling grid, in the opposite direction.
        return -float(int(strength))
    return float(int(strength)) if name == "Posterize" else strength
