"""Statistics of teachers' features over training images: made once, stored, and read by runs.

`tools.feature_statistics` makes the file; `distill.statistics` names it and `distill.standardise`
selects the map that is made of it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import nn

from losses.features.affine import AffineMap, create_channel_map, create_phi_s_map
from models.teachers.teacher import get_teacher_sections, hash_teacher
from utils.config.keys import get_stream_values
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.places import open_folder
from utils.torch_types import ModuleListOf

if TYPE_CHECKING:
    from utils.config.load import RunConfig

# By kind: rows of an image and their width.
FeatureShapes = Mapping[str, tuple[int, int]]
COMMAND = "python -m tools.feature_statistics --config YAML --out FILE"
_VERSION = 1
_KEY = "statistics"  # of the file's metadata
_PARTS = ("mean", "variances", "eigenvalues", "eigenvectors")
# What decides which pixels teachers see, beside the images themselves.
_SEEN = tuple(("data", key) for key in ("train_pp", "random_erasing", "erasing_mode"))
_SEEN += (("data", "sample_weights"),)
_SEEN += (("train", "mixup_alpha"), ("train", "cutmix_alpha"))
# Values of files from before their keys.
_SEEN_BEFORE: JsonObject = {"data.erasing_mode": "const", "data.sample_weights": [], "data.mix": []}


class Moments:
    """Count, mean and sums of products of rows of numbers, in float64.

    Parts are merged by their means, so that nothing cancels, whatever offset the numbers have.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm".
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = np.zeros(width)
        self.products = np.zeros((width, width))

    @classmethod
    def of_unit_scale(cls, width: int) -> Moments:
        """Create moments of synthetic, independent features with mean 0 and variance 1."""
        moments = cls(width)
        moments.count, moments.products = 2, 2.0 * np.eye(width)
        return moments

    def add(self, rows: np.ndarray) -> None:
        """Add rows [N, width]."""
        other = Moments(self.mean.size)
        values = rows.astype(np.float64)
        other.count, other.mean = len(values), values.mean(axis=0)
        centred = values - other.mean
        other.products = centred.T @ centred
        self.merge(other)

    def merge(self, other: Moments) -> None:
        total = self.count + other.count
        if not total:
            return
        gap = other.mean - self.mean
        share = self.count * other.count / total
        self.products = self.products + other.products + share * np.outer(gap, gap)
        self.mean = self.mean + gap * (other.count / total)
        self.count = total

    def describe(self) -> dict[str, np.ndarray]:
        """Return the mean, and the covariance's diagonal, eigenvalues, eigenvectors (one a column).

        Each eigenvector's largest entry is positive: LAPACK's own signs differ by machine.
        """
        covariance = self.products / self.count
        values, vectors = np.linalg.eigh(covariance)
        largest = vectors[np.abs(vectors).argmax(axis=0), np.arange(len(values))]
        return {
            "mean": self.mean,
            "variances": covariance.diagonal().copy(),
            "eigenvalues": values.clip(min=0),
            "eigenvectors": vectors * np.sign(largest),
        }


@dataclass(frozen=True)
class FeatureStatistics:
    """Contents of a file."""

    # `NUMBER.KIND.PART` -> float64 array, by the teacher's number.
    tensors: Mapping[str, np.ndarray]
    facts: JsonObject  # teachers' hashes, how they saw the images, images, rows of each kind
    checksum: str  # of both


def describe_source(config: RunConfig) -> JsonObject:
    """Return the source of statistics: the teachers, and how they see the images."""
    sections = get_teacher_sections(config.distill)
    dumped = config.model_dump(mode="json")
    return {
        "teachers": [hash_teacher(section) for section in sections],
        "seen": {
            **{f"{section}.{key}": dumped[section][key] for section, key in _SEEN},
            "data.mix": get_stream_values(config)["mix"],
        },
        "dataset": config.data.name,
    }


def write_statistics(
    place: str, moments: Mapping[str, Moments], source: JsonObject, images: int
) -> FeatureStatistics:
    """Store statistics, by `NUMBER.KIND`, in a file or URL, and read them back."""
    tensors = {
        f"{name}.{part}": np.ascontiguousarray(value)
        for name, own in moments.items()
        for part, value in own.describe().items()
    }
    facts = {
        "version": _VERSION,
        **source,
        "images": images,
        "rows": {name: own.count for name, own in moments.items()},
    }
    text = json.dumps(facts, sort_keys=True)
    metadata = {_KEY: json.dumps({"facts": text, "checksum": _sum(tensors, text)})}
    target = open_folder(place)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "statistics")
        save_file(tensors, file, metadata)
        target.parent.put_file(file, target.name)
    return read_statistics(place)


def _sum(tensors: Mapping[str, np.ndarray], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    return digest.hexdigest()


def read_statistics(place: str) -> FeatureStatistics:
    """Read a file of statistics; refuse a missing, damaged or different one."""
    target = open_folder(place)
    try:
        with target.parent.open_local(target.name) as path, safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            record = json.loads((file.metadata() or {})[_KEY])
    except FileNotFoundError as error:
        raise UserError(
            f"distill.statistics ({place!r}) is not there; make it: {COMMAND}"
        ) from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(
            f"distill.statistics ({place!r}) is no file of statistics, or a broken one; make it "
            f"again: {COMMAND}"
        ) from error
    facts = json.loads(record["facts"])
    if _sum(tensors, record["facts"]) != record["checksum"] or facts["version"] != _VERSION:
        raise UserError(
            f"distill.statistics ({place!r}) was damaged: its checksum is not that of its numbers; "
            f"make it again: {COMMAND}"
        )
    return FeatureStatistics(tensors, facts, record["checksum"])


def open_statistics(config: RunConfig) -> FeatureStatistics | None:
    """Read the run's statistics; None if it needs none, UserError if missing or of another run."""
    place, standardise = config.distill.statistics, config.distill.standardise
    if standardise == "none":
        if place:
            raise UserError(
                f"distill.statistics ({place!r}) has no effect with distill.standardise=none; "
                "set channel or phi_s, or remove it"
            )
        return None
    if not place:
        raise UserError(
            f"distill.standardise ({standardise}) needs the features' statistics; make them by "
            f"{COMMAND}, and set distill.statistics=FILE"
        )
    statistics, wanted = read_statistics(place), describe_source(config)
    begin = f"distill.statistics ({place!r}) was made"
    if statistics.facts["teachers"] != wanted["teachers"]:
        raise UserError(
            f"{begin} with other teachers than distill.teachers names, or in another order; make "
            f"it again: {COMMAND}"
        )
    for key, value in wanted["seen"].items():
        then = statistics.facts["seen"].get(key, _SEEN_BEFORE.get(key))
        if then != value:
            raise UserError(
                f"{begin} with {key}={then!r}, this run has {value!r}; make it again: {COMMAND}"
            )
    if statistics.facts["dataset"] != wanted["dataset"]:
        get_logger().warning(
            "%s on data.name=%s, this run learns from %s",
            begin,
            statistics.facts["dataset"],
            wanted["dataset"],
        )
    return statistics


def create_scalings(
    config: RunConfig, shapes: Sequence[FeatureShapes]
) -> ModuleListOf[nn.ModuleDict]:
    """Create for each teacher the maps of the features that terms read; none without statistics.

    UserError as by `open_statistics`, or for another width, or without a kind that is read.
    """
    statistics = open_statistics(config)
    if statistics is None:
        return ModuleListOf(nn.ModuleDict() for _ in shapes)
    scalings: ModuleListOf[nn.ModuleDict] = ModuleListOf()
    for teacher, kinds in enumerate(shapes):
        for of, (_, width) in kinds.items():
            mean = statistics.tensors.get(f"{teacher}.{of}.mean")
            if mean is None or mean.size != width:
                raise UserError(
                    f"distill.statistics ({config.distill.statistics!r}) has "
                    f"{'no' if mean is None else mean.size} {of} features of teacher {teacher}, "
                    f"which gives {width}; make it again: {COMMAND}"
                )
        maps = {of: _create_map(statistics, config, f"{teacher}.{of}") for of in kinds}
        scalings.append(nn.ModuleDict(maps))
    return scalings


def _create_map(statistics: FeatureStatistics, config: RunConfig, name: str) -> AffineMap:
    mean, variances, values, vectors = (
        torch.from_numpy(statistics.tensors[f"{name}.{part}"]) for part in _PARTS
    )
    standardise = config.distill.standardise
    if not float(variances.sum()) > 0:
        raise UserError(
            f"distill.standardise ({standardise}) has nothing to scale by: features {name} were "
            "the same for all images; check that teacher's weights"
        )
    if standardise == "channel":
        return create_channel_map(mean, variances)
    return create_phi_s_map(mean, values, vectors)
