"""Answers that TinyViT's `save_logits.py` stores: a seed and the k best classes of each image.

A folder holds `logits_topK_epochE/` for each epoch, with `rankR-keys.txt`, a key a line, and
`rankR-values.bin`, for each key an int32 seed, k int16 classes and k float16 probabilities, the
best first. The seed decides all that is drawn for the image; by which rules stands in the
`config.json` that the program wrote beside, and nowhere in these files.

Source: Wu et al. 2022, arXiv:2207.10666; `save_logits.py` and `data/augmentation` of its code.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from big_vision.pp.stored_views import SeedRules, ViewForm
from utils.errors import UserError
from utils.storage.places import to_path

# Float16 knows no probability below; what was rounded to 0 counts as half of it.
_LEAST = 2.0**-25
_MEANS = {
    "default": (0.485, 0.456, 0.406),
    "inception": (0.5, 0.5, 0.5),
    "clip": (0.48145466, 0.4578275, 0.40821073),
}
# Smaller images are cut otherwise.
_LEAST_SIDE = 33
_MOST_LEVEL = 10
_UNIFORM = 100


class SeededFiles:
    """The files of one such folder.

    Attributes:
      teacher: name of the model that answered.
      form: of the views.
      epochs: stored, from 0 on.
      width: classes.
      top_k: classes with a probability.
      identity: what tells these files from others.
    """

    def __init__(self, place: str, saved_config: str, classes: int) -> None:
        config = _read_config(saved_config)
        self._folder, self.width = to_path(place, "the published files"), classes
        self.form = _find_form(config, saved_config)
        self.top_k, self.epochs = _find_sizes(self._folder)
        model = config["MODEL"]
        self.teacher = str(model.get("NAME") or model.get("TYPE") or "unnamed teacher")
        self._dtype = np.dtype(
            [("seed", "<i4"), ("classes", "<i2", self.top_k), ("probs", "<f2", self.top_k)]
        )
        self._values: list[list[np.ndarray]] = []
        self._places: list[dict[str, tuple[int, int]]] = []
        for epoch in range(self.epochs):
            self._open(self._folder / f"logits_top{self.top_k}_epoch{epoch}")
        words = [self.teacher, str(self.form), self.top_k, self.epochs, self._sample()]
        self.identity = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()

    def list_ids(self) -> set[str]:
        """Of all images that have answers in each epoch."""
        found = set(self._places[0])
        return found.intersection(*map(set, self._places[1:]))

    def read(self, ids: Sequence[str]) -> tuple[np.ndarray, Tensor]:
        """Views [epochs, n] and condensed answers [epochs, n, 2 k + 1] of some images."""
        views = np.zeros((self.epochs, len(ids)), self.form.row_dtype)
        answers = []
        for epoch, (values, places) in enumerate(zip(self._values, self._places, strict=True)):
            found = np.stack([values[part][row] for part, row in (places[name] for name in ids)])
            views[epoch]["seed"] = found["seed"]
            answers.append(self._condense(found, epoch))
        return views, torch.stack(answers)

    def _condense(self, found: np.ndarray, epoch: int) -> Tensor:
        probs = torch.from_numpy(found["probs"].astype(np.float64))
        classes = torch.from_numpy(found["classes"].astype(np.float64))
        is_good = bool(((probs >= 0) & (probs <= 1)).all() and (probs.sum(-1) < 1.01).all())
        if not is_good or classes.min() < 0 or classes.max() >= self.width:
            raise UserError(
                f"{str(self._folder)!r}: epoch {epoch} has what is no probability of one of "
                f"{self.width} classes; its files are cut, or of another number of classes"
            )
        rest = (1.0 - probs.sum(-1, keepdim=True)).clamp(min=0.0)
        if self.top_k == self.width:
            rest = torch.zeros_like(rest)
        return torch.cat([probs.clamp(min=_LEAST).log(), classes, rest], dim=-1)

    def _open(self, folder: Path) -> None:
        """All ranks of an epoch; of a key that several have, the first."""
        values, places = [], {}
        for path in sorted(folder.glob("rank*-values.bin")):
            keys = path.with_name(path.name.replace("-values.bin", "-keys.txt"))
            try:
                names = keys.read_text(encoding="utf-8").split()
            except OSError as error:
                raise UserError(f"{path} has no keys beside it ({error})") from error
            if path.stat().st_size != len(names) * self._dtype.itemsize:
                raise UserError(
                    f"{path} has {path.stat().st_size} bytes instead of {self._dtype.itemsize} "
                    f"for each of {len(names)} keys; copy it again"
                )
            rows = np.memmap(path, self._dtype, mode="r") if names else np.zeros(0, self._dtype)
            for row, name in enumerate(names):
                places.setdefault(name, (len(values), row))
            values.append(rows)
        self._values.append(values)
        self._places.append(places)

    def _sample(self) -> list[int]:
        """Some seeds, which no other files have."""
        return [int(seed) for values in self._values for one in values for seed in one["seed"][:9]]


def _find_sizes(folder: Path) -> tuple[int, int]:
    """Classes and epochs by the names of the folders, which count from 0 on."""
    found = [re.fullmatch(r"logits_top(\d+)_epoch(\d+)", path.name) for path in folder.glob("*")]
    names = [(int(one[1]), int(one[2])) for one in found if one]
    epochs = sorted(epoch for _, epoch in names)
    if not names or len({k for k, _ in names}) > 1 or epochs != list(range(len(names))):
        raise UserError(
            f"{str(folder)!r} holds no folders logits_topK_epoch0, 1 and so on of one K; name the "
            "directory that DISTILL.TEACHER_LOGITS_PATH named"
        )
    return names[0][0], len(names)


def _read_config(place: str) -> dict[str, dict]:
    if not place:
        raise UserError(
            "--saved-config is missing: what the seeds have drawn stands in the config.json that "
            "save_logits.py wrote into its output folder; name it"
        )
    try:
        told = yaml.safe_load(to_path(place, "--saved-config").read_text(encoding="utf-8"))
        return {name: dict(told[name]) for name in ("AUG", "DATA", "MODEL")}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--saved-config ({place!r}) is no configuration of save_logits.py ({reason})"
        ) from error


def _find_form(config: dict[str, dict], place: str) -> ViewForm:
    """The rules by which views are drawn; refuses those that a student could not be shown."""
    aug, data = config["AUG"], config["DATA"]

    def refuse(key: str, value: object, reason: str) -> UserError:
        return UserError(f"--saved-config ({place!r}) has {key} {value!r}: {reason}")

    for name in ("MIXUP", "CUTMIX", "CUTMIX_MINMAX"):
        if aug.get(name):
            raise refuse(f"AUG.{name}", aug[name], "answers to pairs of images are not replayed")
    if aug.get("REPROB"):
        raise refuse(
            "AUG.REPROB", aug["REPROB"],
            "the erased box was filled after normalisation with what no image of 0 to 255 holds; "
            "only answers stored with 0 can be replayed",
        )  # fmt: skip
    method, side = data.get("INTERPOLATION"), data.get("IMG_SIZE")
    if method not in ("bilinear", "bicubic"):
        raise refuse("DATA.INTERPOLATION", method, "replayed are bilinear and bicubic")
    if not isinstance(side, int) or side < _LEAST_SIDE:
        raise refuse("DATA.IMG_SIZE", side, f"replayed are sides of {_LEAST_SIDE} and more")
    mean = _MEANS.get(str(data.get("MEAN_AND_STD_TYPE")))
    if mean is None:
        raise refuse("DATA.MEAN_AND_STD_TYPE", data.get("MEAN_AND_STD_TYPE"), "unknown")
    policy = str(aug.get("AUTO_AUGMENT"))
    if policy == "none" and aug.get("COLOR_JITTER"):
        raise refuse("AUG.COLOR_JITTER", aug["COLOR_JITTER"], "it is not replayed")
    fill = tuple(min(255, round(255 * channel)) for channel in mean)
    rules = SeedRules(fill=fill) if policy == "none" else _read_policy(policy, fill)
    if rules is None:
        raise refuse("AUG.AUTO_AUGMENT", policy, "replayed is rand-m9-mstd0.5-inc1 and its like")
    return ViewForm((side, side), method, rules=rules)


def _read_policy(text: str, fill: tuple[int, ...]) -> SeedRules | None:
    """timm's words for RandAugment; none: it has others."""
    head, *words = text.split("-")
    values = {"m": float(_MOST_LEVEL), "n": 2.0, "mstd": 0.0, "inc": 0.0}
    for word in words:
        found = re.fullmatch(r"(m|n|mstd|inc)(\d+(?:\.\d*)?|inf)", word)
        if not found:
            return None
        values[found[1]] = float(found[2])
    if head != "rand":
        return None
    mstd = values["mstd"] if values["mstd"] <= _UNIFORM else math.inf
    # Any text after `inc`, 0 too, counts as true there.
    increasing = any(word.startswith("inc") for word in words)
    return SeedRules(int(values["n"]), int(values["m"]), mstd, increasing, fill)
