"""Which views of an example a step sees: one crop, another one for teachers, or two for both.

Views are augmentations of the same examples in the same order, read side by side. What is drawn for
an example beside its crop (mixing, erasing) is drawn once and applied to each of its views alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from big_vision.input.images.labelled import require_images
from big_vision.pp.checks import require_valid_spec
from big_vision.pp.device_ops import require_equal_ranges
from datasets import create_source
from utils.config.data import DataSection
from utils.errors import UserError

if TYPE_CHECKING:
    from losses.weighted import WeightedLoss
    from tasks.images.dry_run import ImageShapes
    from utils.config.load import RunConfig

# Travel with a batch beside mixing coefficients: the teachers' own crops, and the strong views.
TEACHER_IMAGES, STRONG_IMAGES = "teacher_images", "strong_images"


def list_streams(config: RunConfig) -> list[DataSection]:
    """How the training split is read for a step: once, or a second time for other views."""
    data = config.data
    if config.distill.views == "weak_strong":
        strong = {**data.model_dump(), "train_pp": data.strong_pp}
        return [data, DataSection.model_validate(strong)]
    return [data, data] if config.distill.views == "independent" else [data]


def get_view_name(config: RunConfig) -> str:
    """What the second stream's images are called among a batch's draws."""
    return STRONG_IMAGES if config.distill.views == "weak_strong" else TEACHER_IMAGES


def check_strong_view(config: RunConfig, losses: WeightedLoss, shapes: ImageShapes) -> None:
    """Refuse a strong view that nothing looks at, or whose images are not like the weak ones.

    Args:
      shapes: of the weak view's images, as far as metadata tells.

    Raises:
      UserError: the first thing that is wrong.
    """
    if config.distill.views != "weak_strong":
        return
    if not losses.needs_strong_view():
        raise UserError(
            "distill.views 'weak_strong' makes a second view that none of distill.losses looks at; "
            "add mlkd or crld, or leave it out"
        )
    strong = config.data.strong_pp
    require_valid_spec(strong, "data.strong_pp")
    require_equal_ranges(config.data.train_pp, strong, "data.strong_pp")
    source = create_source(list_streams(config)[1], config.model.known_sizes)
    selection = source.select("train")
    shape = require_images(source.describe(selection, "train"), config.data.source).image_shape
    if shape is not None and shapes["train"] not in (None, shape):
        weak = " x ".join(map(str, shapes["train"]))
        raise UserError(
            f"data.strong_pp gives images of {' x '.join(map(str, shape))} and data.train_pp of "
            f"{weak}, but mixing and erasing cut both views alike; make them of one size"
        )
