"""Synthetic feature distillation: random images and teachers of random weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from big_vision.pp.device_ops import require_range
from models.factory import create_model
from models.teachers.embedding import create_feature_teachers
from models.transforms import create_input_transform
from tasks.classify.synthetic import SyntheticClassify
from tasks.distil.check import create_loss_of, list_shapes, look_at
from tasks.distil.feature_statistics import (
    FeatureShapes,
    Moments,
    describe_source,
    write_statistics,
)
from utils.config.load import change

if TYPE_CHECKING:
    from pathlib import Path

    from utils.config.load import RunConfig


class SyntheticDistil(SyntheticClassify):
    """Synthetic images, whose class is not used, and teachers without a classifier."""

    default_sizes: ClassVar[Mapping[str, int]] = MappingProxyType({})

    def __init__(self, config: RunConfig, given: Mapping[str, int]) -> None:
        self._config = config
        self._classes = 0
        self._image: tuple[int, int] | None = None

    def replace_teachers(
        self, config: RunConfig, folder: Path, *, only_missing: bool = False
    ) -> RunConfig:
        """Write random weights, and statistics at unit scale if the run has some."""
        config = super().replace_teachers(config, folder, only_missing=only_missing)
        if config.distill.standardise == "none":
            return config
        place = str(folder / "features.statistics")
        made = {
            f"{number}.{of}": Moments.of_unit_scale(width)
            for number, kinds in enumerate(self._list_shapes(config))
            for of, (_, width) in kinds.items()
        }
        write_statistics(place, made, describe_source(config), images=2)
        return change(config, distill={"statistics": place})

    def _list_shapes(self, config: RunConfig) -> list[FeatureShapes]:
        assert self._image is not None
        side, channels = self._image
        transform = create_input_transform(
            *require_range(config.data.train_pp, "data.train_pp").normalisation, channels=channels
        )
        teachers = create_feature_teachers(
            config.distill, student_transform=transform, device="meta"
        )
        student = create_model(config.model, num_classes=0, device="meta")
        _, seen = look_at(student, teachers, transform, (side, side, channels))
        return list_shapes(create_loss_of(config), seen)
