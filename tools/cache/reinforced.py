"""Answers published as Dataset Reinforcement: ImageNet+, CIFAR-100+, Food-101+ and Flowers-102+.

A folder holds `config.pth.tar` and a file `ID.pth.tar` for each image: (id, [sample, ...]), where a
sample has the parameters of its augmentation and its most probable classes with their
probabilities. The id is the image's place in torchvision's ImageFolder.

Source: Faghri et al. 2023, arXiv:2303.08983; `reinforce.py` and `dr/transforms.py` of its code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path

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
# Its augmentations in the order in which they are applied and their parameters lie in a file.
_DRAWN = ("random_resized_crop", "random_horizontal_flip", "rand_augment", "random_erase")
_FIXED = ("uint8", "to_tensor", "normalize")
# What may be said of them without another outcome than the one that is replayed.
_KNOWN = {
    "random_resized_crop": {"size", "scale", "ratio"},
    "rand_augment": {"p", "num_ops", "magnitude", "num_magnitude_bins"},
}
_FACTORS = ("Brightness", "Color", "Contrast", "Sharpness")
# A probability of 0 has no logarithm; that of a float32 which is just none.
_LEAST = 1e-38


class ReinforcedFiles:
    """The files of one such folder.

    Attributes:
      teacher: name of the teachers, which answered as one.
      form: of the views.
      epochs: samples of each image.
      width: classes.
      top_k: classes with a probability.
      identity: what tells these files from others.
    """

    def __init__(self, place: str) -> None:
        self._folder = to_path(place, "the published files")
        config = read_plain(self._folder / CONFIG)
        if not isinstance(config, dict) or not isinstance(config.get("reinforce"), dict):
            raise UserError(f"{self._folder / CONFIG} has no entry reinforce; name another folder")
        told = config["reinforce"]
        self._augmentation = _read_augmentation(told.get("image_augmentation") or {}, place)
        self.form = _find_form(self._augmentation, place)
        teacher = config.get("teacher")
        name = teacher.get("name") if isinstance(teacher, dict) else teacher
        self.teacher = str(name or "unnamed teachers")
        try:
            self.epochs, self.top_k = int(told["num_samples"]), int(told["topk"])
            self.width = int(config["num_classes"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self._folder / CONFIG} says nothing of {error}") from error
        self.top_k = min(self.top_k, self.width)
        words = json.dumps([self.teacher, self._augmentation, self.epochs, self.top_k])
        self.identity = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()

    def list_ids(self) -> set[str]:
        """Of all images that have answers."""
        suffix = ".pth.tar"
        names = {path.name for path in self._folder.glob(f"*{suffix}")} - {CONFIG}
        return {name.removesuffix(suffix) for name in names}

    def read(self, ids: Sequence[str]) -> tuple[np.ndarray, Tensor]:
        """Views [epochs, n] and condensed answers [epochs, n, 2 k + 1] of some images."""
        views = np.zeros((self.epochs, len(ids)), self.form.row_dtype)
        answers = torch.zeros((self.epochs, len(ids), 2 * self.top_k + 1), dtype=torch.float64)
        for place, name in enumerate(ids):
            path = self._folder / f"{name}.pth.tar"
            try:
                found, samples = read_plain(path)
                if str(found) != name or len(samples) != self.epochs:
                    raise ValueError(f"id {found} with {len(samples)} samples")
                for epoch, sample in enumerate(samples):
                    views[epoch, place] = self._read_view(sample["params"])
                    answers[epoch, place] = self._read_answer(*sample["prob"])
            except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
                raise UserError(
                    f"{path} is no file of {self.epochs} samples of {self.top_k} classes "
                    f"({error}); fetch it again"
                ) from error
        return views, answers

    def _read_view(self, params: object) -> tuple:
        """A row of `ViewForm.row_dtype`."""
        drawn = [name for name in _DRAWN if name in self._augmentation]
        if isinstance(params, dict):  # of the image, and of one that it was not mixed with
            values = {name: params[name][0] for name in drawn}
        else:
            values = dict(zip(drawn, params, strict=True))
        box, flip = values["random_resized_crop"], values.get("random_horizontal_flip")
        row: list[object] = [tuple(map(int, box)), bool(flip)]
        if self.form.layers:
            row += _read_operations(values["rand_augment"], self.form.layers)
        if self.form.erased:
            y, x, height, width = map(int, values["random_erase"] or (0, 0, 0, 0))
            row.append((y, x, height, width) if y >= 0 else (0, 0, 0, 0))
        return tuple(row)

    def _read_answer(self, probs: Sequence[float], classes: Sequence[int]) -> Tensor:
        """The best class first; the rest of the mass is what these leave."""
        values = torch.tensor(probs, dtype=torch.float64)
        indices = torch.tensor(classes, dtype=torch.float64)
        if len(values) != self.top_k or len(indices) != self.top_k:
            raise ValueError(f"{len(values)} probabilities of {len(indices)} classes")
        if not (indices.min() >= 0 and indices.max() < self.width and values.min() >= 0):
            raise ValueError("a class or a probability that there is not")
        order = values.argsort(descending=True, stable=True)
        rest = (1.0 - values.sum()).clamp(min=0.0)
        if len(values) == self.width:
            rest = torch.zeros_like(rest)
        return torch.cat([values[order].clamp(min=_LEAST).log(), indices[order], rest[None]])


def read_plain(path: Path) -> object:
    """What `torch.save` has written, of numbers, texts, lists and tables alone.

    Raises:
      UserError: it is not there, is no such file, or wants to make something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (one for one in archive.namelist() if one.endswith("/data.pkl"))
            return _PlainUnpickler(io.BytesIO(archive.read(name))).load()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise UserError(
            f"{path} cannot be read as a file of numbers by torch.save ({error}); fetch it again"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Makes no object of any class: files from elsewhere may name whatever they like."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("it holds tensors")


def _read_augmentation(told: JsonMapping, place: str) -> JsonObject:
    """The augmentations that were on; refuses those that this program does not replay."""
    found: JsonObject = {}
    for name, options in told.items():
        options = dict(options or {})
        if options.pop("enable", True):
            found[name] = options
    for name in found:
        if name in ("mixup", "cutmix"):
            raise UserError(
                f"{place!r} holds answers to pairs of images mixed by {name}, which are not "
                "replayed; take the set without mixing (RRC or RA/RE)"
            )
        extra = set(found[name]) - _KNOWN.get(name, set(found[name]))
        if name not in (*_DRAWN, *_FIXED) or extra:
            raise UserError(
                f"{place!r} holds answers to images after {name}"
                f"{f' with {sorted(extra)[0]}' if extra else ''}, which is not replayed; replayed "
                f"are {', '.join(_DRAWN)}"
            )
    if "random_resized_crop" not in found:
        raise UserError(f"{place!r} says nothing of random_resized_crop, by which views are cut")
    return found


def _find_form(augmentation: JsonMapping, place: str) -> ViewForm:
    size = augmentation["random_resized_crop"].get("size")
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise UserError(f"{place!r}: random_resized_crop has size {size!r}, no side or two")
    with contextlib.suppress(KeyError):
        layers = int(augmentation["rand_augment"].get("num_ops", 2))
        return ViewForm(sides, layers=layers, erased="random_erase" in augmentation)
    return ViewForm(sides, erased="random_erase" in augmentation)


def _read_operations(
    operations: Sequence[tuple[object, float]] | None, layers: int
) -> list[tuple[float, ...]]:
    """Numbers and arguments of a view's operations, of which torchvision names the strength."""
    if operations is None:
        return [(NOTHING,) * layers, (0.0,) * layers]
    if len(operations) != layers:
        raise ValueError(f"{len(operations)} operations instead of {layers}")
    names = list(TRIVIAL)
    pairs = [(names.index(o) if isinstance(o, str) else int(o), float(m)) for o, m in operations]
    arguments = tuple(_find_argument(names[number], strength) for number, strength in pairs)
    return [tuple(number for number, _ in pairs), arguments]


def _find_argument(name: str, strength: float) -> float:
    """What `policies` calls an operation with."""
    if name in _FACTORS:
        return 1.0 + strength
    if name in ("TranslateX", "TranslateY"):
        # Whole pixels; a picture that moves to the right is looked for on the left.
        return -float(int(strength))
    return float(int(strength)) if name == "Posterize" else strength
