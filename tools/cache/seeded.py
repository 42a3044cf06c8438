"""Outputs that TinyViT's `save_logits.py` stores: a seed and the k best classes of each image.

A folder holds `logits_topK_epochE/` for each epoch, with `rankR-keys.txt`, a key a line, and
`rankR-values.bin`, for each key an int32 seed, k int16 classes and k float16 probabilities, the
best first. The seed decides everything that is drawn for the image; its rules are in `config.json`
of that program, and not in these files.

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
from utils.json_types import JsonObject, JsonValue
from utils.storage.places import to_path

# Half of the smallest float16, for probabilities that were rounded to 0.
_LEAST = 2.0**-25
_MEANS = {
    "default": (0.485, 0.456, 0.406),
    "inception": (0.5, 0.5, 0.5),
    "clip": (0.48145466, 0.4578275, 0.40821073),
}
# Smaller images are cropped differently.
_LEAST_SIDE = 33
_MOST_LEVEL = 10
_UNIFORM = 100


class SeededFiles:
    """The files of one such folder, with the attributes of `ReinforcedFiles`."""

    def __init__(self, path: str, saved_config: str, classes: int) -> None:
        config = _read_config(saved_config)
        self._folder, self.width = to_path(path, "the published files"), classes
        self.form = _find_form(config, saved_config)
        self.top_k, self.epochs = _find_sizes(self._folder)
        model = config["MODEL"]
        self.teacher = str(model.get("NAME") or model.get("TYPE") or "unnamed teacher")
        self._dtype = np.dtype(
            [("seed", "<i4"), ("classes", "<i2", self.top_k), ("probs", "<f2", self.top_k)]
        )
        # Rows of each epoch by rank, and (rank's number, row) of each key.
        self._values: list[list[np.ndarray]] = []
        self._positions: list[dict[str, tuple[int, int]]] = []
        for epoch in range(self.epochs):
            self._open(self._folder / f"logits_top{self.top_k}_epoch{epoch}")
        # Seeds, which no other files share.
        seeds = [int(s) for ranks in self._values for rows in ranks for s in rows["seed"][:9]]
        words = [self.teacher, str(self.form), self.top_k, self.epochs, seeds]
        self.identity = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).hexdigest()

    def list_ids(self) -> set[str]:
        """List all images that have outputs in each epoch."""
        return set.intersection(*map(set, self._positions))

    def read(self, ids: Sequence[str]) -> tuple[np.ndarray, Tensor]:
        """Read views [epochs, n] and condensed outputs [epochs, n, 2 k + 1] of some images."""
        views = np.zeros((self.epochs, len(ids)), self.form.row_dtype)
        outputs = []
        for epoch, (values, known) in enumerate(zip(self._values, self._positions, strict=True)):
            rows = np.stack([values[rank][row] for rank, row in (known[name] for name in ids)])
            views[epoch]["seed"] = rows["seed"]
            outputs.append(self._condense(rows, epoch))
        return views, torch.stack(outputs)

    def _condense(self, rows: np.ndarray, epoch: int) -> Tensor:
        probs = torch.from_numpy(rows["probs"].astype(np.float64))
        classes = torch.from_numpy(rows["classes"].astype(np.float64))
        is_good = bool(((probs >= 0) & (probs <= 1)).all() and (probs.sum(-1) < 1.01).all())
        if not is_good or classes.min() < 0 or classes.max() >= self.width:
            raise UserError(
                f"{str(self._folder)!r}: epoch {epoch} has values that are no probabilities of "
                f"{self.width} classes; its files are cut, or of another number of classes"
            )
        rest = (1.0 - probs.sum(-1, keepdim=True)).clamp(min=0.0)
        if self.top_k == self.width:
            rest = torch.zeros_like(rest)
        return torch.cat([probs.clamp(min=_LEAST).log(), classes, rest], dim=-1)

    def _open(self, folder: Path) -> None:
        """Open all ranks of an epoch; of a key that several have, the first is used."""
        values: list[np.ndarray] = []
        positions: dict[str, tuple[int, int]] = {}
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
                positions.setdefault(name, (len(values), row))
            values.append(rows)
        self._values.append(values)
        self._positions.append(positions)


def _find_sizes(folder: Path) -> tuple[int, int]:
    """Read the numbers of classes and of epochs from the names of the folders."""
    matches = [re.fullmatch(r"logits_top(\d+)_epoch(\d+)", path.name) for path in folder.glob("*")]
    names = [(int(match[1]), int(match[2])) for match in matches if match]
    epochs = sorted(epoch for _, epoch in names)
    if not names or len({k for k, _ in names}) > 1 or epochs != list(range(len(names))):
        raise UserError(
            f"{str(folder)!r} holds no folders logits_topK_epoch0, 1 and so on of one K; use the "
            "directory of DISTILL.TEACHER_LOGITS_PATH"
        )
    return names[0][0], len(names)


def _read_config(path: str) -> dict[str, JsonObject]:
    if not path:
        raise UserError(
            "--saved-config is missing: the rules of the seeds are in the config.json that "
            "save_logits.py wrote into its output folder; name it"
        )
    try:
        config = yaml.safe_load(to_path(path, "--saved-config").read_text(encoding="utf-8"))
        return {name: dict(config[name]) for name in ("AUG", "DATA", "MODEL")}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"--saved-config ({path!r}) is no configuration of save_logits.py ({reason})"
        ) from error


def _find_form(config: dict[str, JsonObject], path: str) -> ViewForm:
    """Read the rules by which views are drawn; refuse those that cannot be replayed."""
    aug, data = config["AUG"], config["DATA"]

    def refuse(key: str, value: JsonValue, reason: str) -> UserError:
        return UserError(f"--saved-config ({path!r}) has {key} {value!r}: {reason}")

    for name in ("MIXUP", "CUTMIX", "CUTMIX_MINMAX"):
        if aug.get(name):
            raise refuse(f"AUG.{name}", aug[name], "outputs for pairs of images are not replayed")
    if aug.get("REPROB"):
        reason = "the erased box was filled after normalisation with values that no image of 0 to "
        reason += "255 holds; only outputs stored with 0 can be replayed"
        raise refuse("AUG.REPROB", aug["REPROB"], reason)
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
    """Parse timm's string for RandAugment; None if it has other words."""
    head, *words = text.split("-")
    values = {"m": float(_MOST_LEVEL), "n": 2.0, "mstd": 0.0, "inc": 0.0}
    for word in words:
        match = re.fullmatch(r"(m|n|mstd|inc)(\d+(?:\.\d*)?|inf)", word)
        if not match:
            return None
        values[match[1]] = float(match[2])
    if head != "rand":
        return None
    mstd = values["mstd"] if values["mstd"] <= _UNIFORM else math.inf
    # In timm any text after `inc`, also 0, is true.
    increasing = any(word.startswith("inc") for word in words)
    return SeedRules(int(values["n"]), int(values["m"]), mstd, increasing, fill)
