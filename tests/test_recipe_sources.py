"""Recipes against what their sources state: resolved keys, built parts, and the page of results.

A recipe's section `source` holds what its publication states. Each value is compared with the run
that the YAML builds; a difference stands only where the recipe lists it with its reason.
"""

from __future__ import annotations

import io
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import RandomResizedCrop

from proofs.tables.recipe_table import (
    DOCUMENT,
    format_cost,
    format_page,
    list_recipes,
    read_costs,
    read_source,
    read_sources,
)
from tests.support.recipe_measures import MEASURES, Recipe, measure
from tests.support.recipe_ops import complete_timm_policy
from tests.test_configs import get_flags
from utils.config.load import change, load_config
from utils.config.sections import RunConfig, SourceSection

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {path.relative_to(ROOT / "configs").as_posix(): path for path in list_recipes()}
VIEW = "evaluate.short_side"
SOURCES = {name: read_source(path) for name, path in RECIPES.items()}
# What a recipe with a published figure must state: silence would hide a difference.
REQUIRED = {
    "optim.name",
    "data.global_batch_size",
    "data.repeats",
    "schedule.lr",
    "schedule.moves",
    "decay.at_peak",
    "decay.parameters",
    "drop_path.rates",
    "crop.law",
    "crop.size",
    "augment.policy",
    "augment.flip",
    "evaluate.short_side",
    "evaluate.size",
    "evaluate.method",
    "pixels",
    "train.label_smoothing",
    "train.mixup_alpha",
    "train.cutmix_alpha",
    "train.task_loss",
    "data.random_erasing",
    "optim.max_grad_norm",
    "train.ema",
}
# Whole photographs without these: small images are cropped and shown whole.
SMALL = {
    "crop.area",
    "crop.ratio",
    "crop.method",
    "evaluate.short_side",
    "evaluate.size",
    "evaluate.method",
}


@cache
def load(name: str) -> Recipe:
    return Recipe(load_config(get_flags(RECIPES[name])))


def get_lr(law: dict[str, Any], step: float, epoch: int) -> float:
    """The source's learning rate at a step, by the formula of its schedule."""
    total = law.get("steps") or law["epochs"] * epoch
    warmup = law.get("warmup", law.get("warmup_epochs", 0) * epoch)
    low, high, start = law.get("end", 0.0), law["peak"], law.get("start", 0.0)
    if step < warmup:
        return start + (high - start) * step / warmup
    begin = 0 if law.get("inside") else warmup
    passed = (step - begin) / (total - begin)
    if law["shape"] == "cosine":
        return low + (high - low) * (1 + math.cos(math.pi * passed)) / 2
    if law["shape"] == "linear":
        return high + (low - high) * passed
    assert law["shape"] == "step"
    return high * law["rate"] ** sum(step >= mark * epoch for mark in law["epochs_of_cuts"])


def compare_schedules(recipe: Recipe, law: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Steps at which the source's rate is another -> both rates: three of the warm-up, ten after.

    Whole epochs where the source counts in epochs, so that a rate that moves once an epoch agrees.
    """
    epoch, total = recipe.epoch, recipe.steps
    length = law.get("steps") or law["epochs"] * epoch
    warmup = law.get("warmup", law.get("warmup_epochs", 0) * epoch)
    pairs = [(round(warmup * part), round(warmup * part)) for part in (0.25, 0.5, 0.75)]
    for tenth in range(1, 11):
        mine, theirs = round(total * tenth / 10), length * tenth / 10
        if "epochs" in law:
            mine = theirs = round(law["epochs"] * tenth / 10) * epoch
        pairs.append((mine, theirs))
    factor = 1 - recipe.config.distill.alpha if law.get("of") == "step" else 1.0
    found = {}
    for mine, theirs in pairs:
        ours, wanted = factor * recipe.schedule.lr_at(mine), get_lr(law, theirs, epoch)
        if not math.isclose(ours, wanted, rel_tol=3e-3, abs_tol=1e-12):
            found[mine] = (ours, wanted)
    return found


def list_rates(law: Any) -> list[float]:
    """Stochastic depth of each block as the source gives it."""
    if not law:
        return []
    last = max(law["blocks"] - 1, 1)
    rising = law["law"] == "linear"
    return [law["rate"] * (number / last if rising else 1.0) for number in range(law["blocks"])]


def agrees(recipe: Recipe, name: str, stated: Any) -> bool:
    if name == "schedule.lr":
        return not compare_schedules(recipe, stated)
    found = measure(recipe, name)
    if name == "drop_path.rates":
        wanted = list_rates(stated)
        return found == pytest.approx(wanted) if wanted else not any(found)
    if name == "augment.policy":
        return complete_timm_policy(found) == complete_timm_policy(stated)
    if isinstance(found, tuple):
        found = list(found)
    if isinstance(stated, bool) or not isinstance(stated, int | float | list):
        return found == stated
    return found is not None and found == pytest.approx(stated, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_equals_its_source_except_for_listed_differences(name):
    recipe = load(name)
    source = recipe.config.source
    assert source.paper, "source.paper is missing"
    found = {key for key, stated in source.values.items() if not agrees(recipe, key, stated)}
    hidden = {key: measure(recipe, key) for key in found - source.differs.keys()}
    assert not hidden, "differs from the source and is not listed in source.differs"
    assert found == source.differs.keys(), "listed in source.differs, but there is no difference"
    assert all(len(reason) > 15 for reason in source.differs.values())


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.published])
def test_a_recipe_with_a_published_result_states_every_value_behind_it(name):
    source = load(name).config.source
    law = source.values.get("crop.law")
    wanted = REQUIRED - SMALL if law in ("padded", "resized") else REQUIRED
    assert not wanted - source.values.keys()
    assert source.code and source.commit


def test_planted_differences_are_found_by_name():
    """Faults that a Mixer's recipe had, and another view of evaluation."""
    recipe = load("imagenet/mixer_b16.yaml")
    config = change(
        recipe.config,
        model={"args": {}, "drop_path_law": "model", "drop_path_rescale": True},
        data={"eval_pp": recipe.config.data.eval_pp.replace("256", "240")},
        optim={"min_lr": 1e-5, "warmup_steps": 9888},
    )
    values, changed = config.source.values, Recipe(config)
    found = {key for key, stated in values.items() if not agrees(changed, key, stated)}
    assert found - config.source.differs.keys() == {
        "model.gelu",
        "model.drop_path_rescale",
        "drop_path.rates",
        "evaluate.short_side",
        "schedule.lr",
        "schedule.warmup_steps",
    }


def test_a_listed_difference_without_a_stated_value_is_refused():
    with pytest.raises(ValueError, match=r"is missing in source\.values"):
        SourceSection(values={"optim.lr": 1.0}, differs={"optim.name": "a reason"})


def create_coordinates(height: int, width: int) -> bytes:
    """A JPEG whose red is the place in the row and whose green is the place in the column."""
    red = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    green = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    pixels = np.stack([red, green, np.full((height, width), 128.0)], axis=2).round()
    stream = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(stream, "JPEG", quality=100, subsampling=0)
    return stream.getvalue()


def read_boxes(images: np.ndarray) -> np.ndarray:
    """Height and width [N, 2] of the part that each image shows, in shares of the whole."""
    side = images.shape[1]
    inner = slice(side // 8, side - side // 8)  # away from the borders
    span = (side - 2 * (side // 8) - 1) / side
    tall = images[:, inner, side // 2, 1].astype(float)
    wide = images[:, side // 2, inner, 0].astype(float)
    return np.stack([(part[:, -1] - part[:, 0]) / 255 / span for part in (tall, wide)], axis=1)


def draw_boxes(law: str, area: list[float], ratio: list[float], count: int) -> np.ndarray:
    """Shares [N, 2] of a 375 x 500 image by torchvision itself, or by big_vision's law."""
    torch.manual_seed(0)
    height, width = 375, 500
    if law == "torchvision":
        image = torch.empty(3, height, width)
        boxes = [RandomResizedCrop.get_params(image, area, ratio)[2:] for _ in range(count)]
        return np.array(boxes) / [height, width]
    # TensorFlow's sample_distorted_bounding_box: ratio, then a height that keeps area in range.
    boxes, draws = [], np.random.default_rng(0)
    while len(boxes) < count:
        aspect = draws.uniform(*ratio)
        low, high = (math.sqrt(part * height * width / aspect) for part in area)
        high = min(high, height, width / aspect)
        if low < high:
            tall = draws.uniform(low, high)
            boxes.append((tall / height, tall * aspect / width))
    return np.array(boxes)


def list_crops() -> dict[str, str]:
    """Crop op of a photograph -> the first recipe with it."""
    found: dict[str, str] = {}
    for name in RECIPES:
        recipe = load(name)
        if measure(recipe, "crop.law") in ("inception", "torchvision"):
            texts = [op.text for op in recipe.train_ops[:2] if op.arguments.get("size")]
            found.setdefault(texts[0], name)
    return found


@pytest.mark.parametrize(("text", "name"), list_crops().items())
def test_crop_boxes_have_the_stated_distribution(text, name):
    """Mean area and mean logarithm of the ratio of 400 boxes, within four standard errors."""
    import tensorflow as tf

    from big_vision.pp.builder import get_preprocess_fn

    recipe = load(name)
    ops = text if "jpeg" in text or "resized" in text else f"decode|{text}"
    preprocess, data = get_preprocess_fn(ops), create_coordinates(375, 500)
    dataset = tf.data.Dataset.range(400).map(
        lambda index: preprocess({"image": data}, index=index)["image"]
    )
    images = next(dataset.batch(400).as_numpy_iterator())
    law, area, ratio = (measure(recipe, f"crop.{part}") for part in ("law", "area", "ratio"))
    ours = read_boxes(images)
    theirs = draw_boxes(law, area, ratio, 10_000)
    for statistic in (lambda b: b.prod(axis=1), lambda b: np.log(b[:, 1] / b[:, 0])):
        mine, wanted = statistic(ours), statistic(theirs)
        assert abs(mine.mean() - wanted.mean()) < 4 * wanted.std() / math.sqrt(len(mine)) + 0.004


def list_policies() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in RECIPES:
        stated = SOURCES[name].values.get("augment.policy", "")
        if stated.startswith("rand-"):
            found.setdefault(stated, name)
    return found


@pytest.mark.parametrize(("policy", "name"), list_policies().items())
def test_a_policy_equals_what_timm_reads_from_the_source(policy, name):
    """timm's own parser of `--aa` against the arguments of the op that the recipe runs."""
    theirs = rand_augment_transform(policy, {})
    op = next(op for op in load(name).train_ops if op.name == "timm_randaug")
    first = theirs.ops[0]
    assert op.arguments["num_layers"] == theirs.num_layers
    assert op.arguments["magnitude"] == first.magnitude
    assert op.arguments["mstd"] == first.magnitude_std
    assert op.arguments["probability"] == first.prob
    names = {one.name for one in theirs.ops}
    assert op.arguments["increasing"] == ("PosterizeIncreasing" in names)


@pytest.mark.parametrize("name", [n for n, source in SOURCES.items() if VIEW in source.values])
def test_evaluation_crops_the_stated_centre(name):
    import tensorflow as tf

    from big_vision.pp.builder import get_preprocess_fn

    recipe = load(name)
    side, size = (measure(recipe, f"evaluate.{part}") for part in ("short_side", "size"))
    spec = "|".join(op.text for op in recipe.eval_ops if "range" not in op.name)
    shown = get_preprocess_fn(spec)({"image": tf.constant(create_coordinates(375, 500))})["image"]
    tall, wide = read_boxes(shown.numpy()[None])[0]
    assert shown.shape[:2] == (size, size)
    assert tall == pytest.approx(size / side, abs=0.02)
    assert wide == pytest.approx(0.75 * size / side, abs=0.02)


def test_every_measured_name_is_stated_by_a_recipe():
    stated = {name for recipe in RECIPES for name in SOURCES[recipe].values}
    keys = {
        f"{section}.{key}"
        for section, field in RunConfig.model_fields.items()
        for key in field.annotation.model_fields
    }
    assert MEASURES.keys() <= stated
    for name in stated - MEASURES.keys():
        assert ".".join(name.split(".")[:2]) in keys, name


def test_the_results_page_matches_the_recipes():
    """source.paper, source.code, source.commit and source.published are written nowhere else."""
    assert (ROOT / DOCUMENT).read_text(encoding="utf-8") == format_page(read_costs())


@pytest.mark.parametrize("name", ["imagenet/resnet50", "kd/cifar100_dkd"])
def test_the_costs_are_those_of_the_plan(name):
    assert format_cost(name, read_sources()[name]) in read_costs()


def test_every_published_result_has_a_cost():
    published = [name for name, source in read_sources().items() if source.published]
    assert len(published) >= 15
    assert [row.partition("`")[2].partition("`")[0] for row in read_costs()] == published
