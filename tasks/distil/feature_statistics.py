"""Statistics of teachers' features over training images: made once, stored, and read by runs.

`tools.feature_statistics` makes the file; `distill.statistics` names it and `distill.standardise`
says which map is made of it.
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
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.log import get_logger
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from utils.config.load import RunConfig

# By kind: rows of an image and their width.
FeatureShapes = Mapping[str, tuple[int, int]]
COMMAND = "python -m tools.feature_statistics --config YAML --out FILE"
_VERSION = 1
_TELLS = "statistics"  # of the file's metadata
_PARTS = ("mean", "variances", "eigenvalues", "eigenvectors")
# What decides which pixels teachers see, beside the images themselves.
_SEEN = (
    ("data", "train_pp"), ("data", "random_erasing"), ("data", "erasing_mode"),
    ("train", "mixup_alpha"), ("train", "cutmix_alpha"),
)  # fmt: skip
# Values of files from before their keys.
_SEEN_BEFORE = {"data.erasing_mode": "const"}


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
        """Of made-up features with mean 0 and variance 1, each by itself."""
        found = cls(width)
        found.count, found.products = 2, 2.0 * np.eye(width)
        return found

    def add(self, rows: np.ndarray) -> None:
        """Take rows [N, width]."""
        other = Moments(self.mean.size)
        values = rows.astype(np.float64)
        other.count, other.mean = len(values), values.mean(axis=0)
        centred = values - other.mean
        other.products = centred.T @ centred
        self.merge(other)

    def merge(self, other: Moments) -> None:
        """Take the rows that another has seen."""
        total = self.count + other.count
        if not total:
            return
        gap = other.mean - self.mean
        share = self.count * other.count / total
        self.products = self.products + other.products + share * np.outer(gap, gap)
        self.mean = self.mean + gap * (other.count / total)
        self.count = total

    def describe(self) -> dict[str, np.ndarray]:
        """Mean, and the covariance by its diagonal, eigenvalues and eigenvectors (one a column).

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
    """What a file tells.

    Attributes:
      tensors: `NUMBER.KIND.PART` -> float64 array, by the teacher's number.
      facts: teachers' hashes, what they saw, images, rows of each kind.
      checksum: of both.
    """

    tensors: Mapping[str, np.ndarray]
    facts: JsonObject
    checksum: str

    def get_width(self, teacher: int, of: str) -> int:
        """Numbers of a teacher's features of a kind; 0: the file holds none."""
        found = self.tensors.get(f"{teacher}.{of}.mean")
        return 0 if found is None else found.size


def describe_source(config: RunConfig) -> JsonObject:
    """What statistics are of: the teachers, and how the images come to them."""
    sections = get_teacher_sections(config.distill)
    dumped = config.model_dump(mode="json")
    return {
        "teachers": [hash_teacher(one) for one in sections],
        "seen": {f"{section}.{key}": dumped[section][key] for section, key in _SEEN},
        "dataset": config.data.name,
    }


def write_statistics(
    place: str, found: Mapping[str, Moments], source: JsonObject, images: int
) -> FeatureStatistics:
    """Store what was found, and read it back.

    Args:
      place: a file, or a URL of one.
      found: by `NUMBER.KIND`.
      source: as `describe_source` gives it.
    """
    tensors = {
        f"{name}.{part}": np.ascontiguousarray(value)
        for name, moments in found.items()
        for part, value in moments.describe().items()
    }
    facts = {
        "version": _VERSION, **source, "images": images,
        "rows": {name: moments.count for name, moments in found.items()},
    }  # fmt: skip
    told = json.dumps(facts, sort_keys=True)
    metadata = {_TELLS: json.dumps({"facts": told, "checksum": _sum(tensors, told)})}
    target = open_folder(place)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "statistics")
        save_file(tensors, file, metadata)
        target.parent.put_file(file, target.name)
    return read_statistics(place)


def _sum(tensors: Mapping[str, np.ndarray], told: str) -> str:
    digest = hashlib.sha256(told.encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    return digest.hexdigest()


def read_statistics(place: str) -> FeatureStatistics:
    """A file of statistics.

    Raises:
      UserError: it is not there, is none, or was damaged.
    """
    target = open_folder(place)
    try:
        with target.parent.open_local(target.name) as path, safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            told = json.loads((file.metadata() or {})[_TELLS])
    except FileNotFoundError as error:
        raise UserError(
            f"distill.statistics ({place!r}) is not there; make it: {COMMAND}"
        ) from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(
            f"distill.statistics ({place!r}) is no file of statistics, or a broken one; make it "
            f"again: {COMMAND}"
        ) from error
    facts = json.loads(told["facts"])
    if _sum(tensors, told["facts"]) != told["checksum"] or facts["version"] != _VERSION:
        raise UserError(
            f"distill.statistics ({place!r}) was damaged: its checksum is not that of its numbers; "
            f"make it again: {COMMAND}"
        )
    return FeatureStatistics(tensors, facts, told["checksum"])


def open_statistics(config: RunConfig) -> FeatureStatistics | None:
    """The statistics that a run names, held against its teachers and images; none: it asks none.

    Raises:
      UserError: they are missing, or of other teachers, or of images seen otherwise.
    """
    place, standardise = config.distill.statistics, config.distill.standardise
    if standardise == "none":
        if place:
            raise UserError(
                f"distill.statistics ({place!r}) is read by nobody while distill.standardise is "
                "none; set channel or phi_s, or leave it out"
            )
        return None
    if not place:
        raise UserError(
            f"distill.standardise ({standardise}) needs the features' statistics; make them by "
            f"{COMMAND}, and set distill.statistics=FILE"
        )
    found, wanted = read_statistics(place), describe_source(config)
    begin = f"distill.statistics ({place!r}) was made"
    if found.facts["teachers"] != wanted["teachers"]:
        raise UserError(
            f"{begin} with other teachers than distill.teachers names, or in another order; make "
            f"it again: {COMMAND}"
        )
    for key, value in wanted["seen"].items():
        then = found.facts["seen"].get(key, _SEEN_BEFORE.get(key))
        if then != value:
            raise UserError(
                f"{begin} with {key}={then!r}, this run has {value!r}; make it again: {COMMAND}"
            )
    if found.facts["dataset"] != wanted["dataset"]:
        get_logger().warning(
            "%s on data.name=%s, this run learns from %s",
            begin, found.facts["dataset"], wanted["dataset"],
        )  # fmt: skip
    return found


def create_scalings(config: RunConfig, shapes: Sequence[FeatureShapes]) -> nn.ModuleList:
    """For each teacher the maps of its features by their kind; of no kind where none is asked.

    Args:
      shapes: of each teacher, the kinds that terms look at.

    Raises:
      UserError: as `open_statistics`; or of another width, or without a kind that is looked at.
    """
    statistics = open_statistics(config)
    if statistics is None:
        return nn.ModuleList(nn.ModuleDict() for _ in shapes)
    found = nn.ModuleList()
    for teacher, kinds in enumerate(shapes):
        for of, (_, width) in kinds.items():
            _check_width(statistics, config.distill.statistics, (teacher, of, width))
        found.append(
            nn.ModuleDict({of: _create_map(statistics, config, f"{teacher}.{of}") for of in kinds})
        )
    return found


def _check_width(statistics: FeatureStatistics, place: str, of: tuple[int, str, int]) -> None:
    teacher, kind, width = of
    known = statistics.get_width(teacher, kind)
    if known != width:
        holds = f"{known} {kind} features" if known else f"no {kind} features"
        raise UserError(
            f"distill.statistics ({place!r}) has {holds} of teacher {teacher}, which gives "
            f"{width}; make it again: {COMMAND}"
        )


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
