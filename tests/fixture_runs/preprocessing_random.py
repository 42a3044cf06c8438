"""Draws from random preprocessing ops and compares them with recorded distributions."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

# Draws where a record does not say how many.
DEFAULT_DRAWS = 4000


def check(fixture: Any, record: dict[str, Any]) -> str:
    """What is wrong with one record of the section `random`; empty: nothing."""
    checks = {
        "inception_crop": _check_boxes,
        "decode_jpeg_and_inception_crop": _check_sizes,
        "random_crop": _check_random_crop,
        "flip_lr": _check_flip,
        "choice": _check_choice,
        "choice_no_replacement": _check_choice_no_replacement,
        "randaug": _check_randaug,
        "cutout": _check_cutout,
    }
    if record["op"] not in checks:
        return f"no check for the op {record['op']!r}"
    return checks[record["op"]](fixture, record)


def draw(spec: str, inputs: dict[str, Any], count: int, reduce: Any) -> list[Any]:
    """`reduce(data)` of the string's results for indices 0...count-1, by tf.data."""
    import tensorflow as tf

    from big_vision.pp.builder import get_preprocess_fn

    preprocess = get_preprocess_fn(spec, seed=0)
    data = {key: tf.constant(value) for key, value in inputs.items()}
    dataset = tf.data.Dataset.range(count)
    dataset = dataset.map(
        lambda index: reduce(preprocess(data, epoch=0, index=index)), num_parallel_calls=2
    )
    leaves = tf.nest.flatten(dataset.element_spec)
    if not all(leaf.shape.is_fully_defined() for leaf in leaves):
        return list(dataset.as_numpy_iterator())
    # Batches cut the cost of each step through Python.
    batches = list(dataset.batch(250).as_numpy_iterator())
    return [tf.nest.map_structure(lambda v, i=i: v[i], b) for b in batches for i in range(_len(b))]


def _len(batch: Any) -> int:
    """Examples of a batch: an array or a dict of arrays."""
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch)


def _get_coordinates(height_width: list[int]) -> np.ndarray:
    """An image whose pixels are their own place (y, x): a crop of it tells its box."""
    return np.stack(np.indices(height_width), axis=-1).astype(np.int32)


def _draw_boxes(record: dict[str, Any]) -> np.ndarray:
    """Boxes [n, 4] as y, x, height, width."""
    import tensorflow as tf

    inputs = {"image": _get_coordinates(record["image_hw"])}
    count = record["tol"].get("draws", DEFAULT_DRAWS)
    return np.array(
        draw(
            record["pp"],
            inputs,
            count,
            lambda data: tf.concat([data["image"][0, 0], tf.shape(data["image"])[:2]], axis=0),
        )
    )


def _check_boxes(fixture: Any, record: dict[str, Any]) -> str:
    found, stored = _draw_boxes(record), fixture.arrays[record["npz_boxes_yxhw"]]
    complaint = _compare_sizes(found[:, 2:], stored[:, 2:], record)
    if complaint:
        return complaint
    sides = np.array(record["image_hw"])
    for axis, name in enumerate(("y", "x")):
        free = sides[axis] - found[:, 2 + axis]
        last_seen = bool((found[:, axis][free > 0] == free[free > 0]).any())
        if last_seen != record["stats"].get(f"last_offset_seen_{name}", last_seen):
            return f"the last offset in {name} was {'' if last_seen else 'not '}used"
        statistic = _get_ks(_get_relative(found, sides, axis), _get_relative(stored, sides, axis))
        if statistic > record["tol"]["ks_max"]:
            return f"KS of the offset in {name} is {statistic:.4f}"
    return ""


def _get_relative(boxes: np.ndarray, sides: np.ndarray, axis: int) -> np.ndarray:
    """The box's place as a share of the room that it has, where it has any."""
    free = sides[axis] - boxes[:, 2 + axis]
    return boxes[free > 0, axis] / free[free > 0]


def _check_sizes(fixture: Any, record: dict[str, Any]) -> str:
    import tensorflow as tf

    # A record without an image holds for any JPEG.
    name = record.get("image") or fixture.get_any_jpeg()
    inputs = {"image": fixture.get_image_bytes(name)}
    if "npz_sizes_hw" not in record:
        image = draw(record["pp"], inputs, 1, lambda data: data["image"])[0]
        found = [list(image.shape), str(image.dtype)]
        wanted = [record["out_shape"], record["out_dtype"]]
        return "" if found == wanted else f"{found} instead of {wanted}"
    count = record["tol"].get("draws", DEFAULT_DRAWS)
    sizes = draw(record["pp"], inputs, count, lambda data: tf.shape(data["image"])[:2])
    return _compare_sizes(np.array(sizes), fixture.arrays[record["npz_sizes_hw"]], record)


def _compare_sizes(found: np.ndarray, stored: np.ndarray, record: dict[str, Any]) -> str:
    """Compare heights and widths [n, 2] by area and aspect."""
    tolerance, area = record["tol"], float(np.prod(record["image_hw"]))
    found, stored = found.astype(np.float64), stored.astype(np.float64)
    pairs = {
        "area": (found.prod(1) / area, stored.prod(1) / area),
        "aspect": (found[:, 1] / found[:, 0], stored[:, 1] / stored[:, 0]),
    }
    for name, (ours, theirs) in pairs.items():
        statistic, shift = _get_ks(ours, theirs), abs(ours.mean() - theirs.mean())
        if statistic > tolerance["ks_max"] or shift > tolerance[f"{name}_mean_abs"]:
            return f"{name}: KS {statistic:.4f}, mean off by {shift:.4f}"
    return ""


def _get_ks(first: np.ndarray, second: np.ndarray) -> float:
    """The two-sample Kolmogorov-Smirnov statistic."""
    places = np.unique(np.concatenate([first, second]))
    shares = [np.searchsorted(np.sort(s), places, side="right") / len(s) for s in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())


def _check_random_crop(_fixture: Any, record: dict[str, Any]) -> str:
    boxes = _draw_boxes(record)
    for axis, name in enumerate(("y", "x")):
        offsets = boxes[:, axis]
        low, high = record[f"{name}_min"], record[f"{name}_max"]
        if offsets.min() < low or offsets.max() > high:
            return f"{name} is in {offsets.min()}...{offsets.max()}, not {low}...{high}"
        if record["tol"].get("every_offset_hit") and len(np.unique(offsets)) != high - low + 1:
            return f"{name} does not reach every offset"
        shift = abs(offsets.mean() - (low + high) / 2)
        if shift > record["tol"][f"mean_abs_{name}"]:
            return f"the mean of {name} is off by {shift:.3f}"
    return ""


def _check_flip(_fixture: Any, record: dict[str, Any]) -> str:
    image = np.arange(3 * 5 * 3, dtype=np.uint8).reshape(3, 5, 3)
    found = np.array(draw(record["pp"], {"image": image}, record["draws"], lambda d: d["image"]))
    flipped = (found == image[:, ::-1]).all((1, 2, 3))
    if not (flipped | (found == image).all((1, 2, 3))).all() or found.dtype != image.dtype:
        return "gives something that is neither the image nor its mirror image"
    distance = abs(flipped.mean() - 0.5)
    return "" if distance <= record["tol"]["abs"] else f"p is off by {distance:.3f}"


def _check_choice(_fixture: Any, record: dict[str, Any]) -> str:
    items = np.arange(record["n_items"]) * 10
    inputs = {"t": items, "u": items + 1}
    rows = draw(record["pp"], inputs, record["draws"], lambda data: data)
    target, partner = _get_choice_targets(record["pp"], rows[0])
    draws = [np.atleast_1d(row[target]) // 10 for row in rows]
    if rows[0][target].ndim != record["out_rank"]:
        return f"rank {rows[0][target].ndim}"
    if any((np.diff(entries) <= 0).any() for entries in draws):
        return "an entry came twice or out of order"
    if partner and any((row[partner] != row[target] + 1).any() for row in rows):
        return "the keys do not share their entries"
    shares = np.bincount(np.concatenate(draws), minlength=len(items)) / len(draws)
    if np.abs(shares - np.mean(record["inclusion"])).max() > record["tol"]["inclusion_abs"]:
        return f"entries are included {np.round(shares, 3).tolist()}"
    for length, share in record["length_fraction"].items():
        distance = abs(np.mean([len(entries) == int(length) for entries in draws]) - share)
        if distance > record["tol"]["length_abs"]:
            return f"length {length}: off by {distance:.3f}"
    return ""


def _get_choice_targets(spec: str, row: dict[str, np.ndarray]) -> tuple[str, str]:
    """The keys under which choices of `t` and of `u` were written; u's may be empty.

    Entries of `t` are multiples of 10, those of `u` are one more.
    """
    written = set(row) - {"t", "u"}
    if not written:
        return "t", "u" if re.search("[\"']u[\"']", spec) else ""
    by_unit = {int(np.ravel(row[key])[0]) % 10: key for key in written}
    return by_unit[0], by_unit.get(1, "")


def _check_choice_no_replacement(_fixture: Any, record: dict[str, Any]) -> str:
    import tensorflow as tf

    from big_vision.pp.builder import get_preprocess_fn

    count, blocks = record["n_items"], record["epochs"]
    items = tf.range(count, dtype=tf.int64) * 10
    preprocess = get_preprocess_fn(record["pp"])

    def visit(number: Any) -> Any:
        identity, epoch = number // (count * blocks), number % (count * blocks)
        data = {"t": items, "u": items + 1, "_id": identity}
        data = preprocess(data, epoch=epoch, index=identity)
        return data["t"], data["u"]

    dataset = tf.data.Dataset.range(record["ids"] * count * blocks).map(visit)
    pairs = np.array(list(dataset.as_numpy_iterator()))
    if (pairs[:, 1] != pairs[:, 0] + 1).any():
        return "the keys do not share their entries"
    orders = pairs[:, 0].reshape(-1, count) // 10
    if (np.sort(orders, axis=1) != np.arange(count)).any():
        return "a block is no permutation"
    distinct = len({tuple(order) for order in orders})
    return "" if distinct >= record["tol"]["distinct_min"] else f"{distinct} orders"


def _check_randaug(fixture: Any, record: dict[str, Any]) -> str:
    """Tell by the pixels which operation was drawn; groups are those that give the same ones."""
    image = fixture.arrays[record["image"]]
    outcomes = _list_outcomes(record["pp"], image)
    shares = {frozenset(label.split("|")): share for label, share in record["picked"].items()}
    groups = dict.fromkeys(shares, 0)
    rest = frozenset({"Cutout-or-other"})
    for found in draw(record["pp"], {"image": image}, record["draws"], lambda d: d["image"]):
        labels = outcomes.get(found.tobytes(), rest)
        matching = [group for group in groups if group & labels]
        if not matching:
            return f"drew {sorted(labels)}, which is in no recorded group"
        groups[matching[0]] += 1
    for group, count in groups.items():
        expected = sum(1 / 32 if label[-1] in "+-" else 1 / 16 for label in group)
        recorded = shares[group]
        share = count / record["draws"]
        # By the law; or as recorded, where Cutout has no effect and fell into another group.
        distance = min(abs(share - expected), abs(share - recorded))
        if distance > record["tol"]["abs"]:
            return f"{'|'.join(sorted(group))}: share off by {distance:.4f}"
    return ""


def _list_outcomes(spec: str, image: np.ndarray) -> dict[bytes, frozenset[str]]:
    """Pixels after each operation but Cutout -> the labels that give them."""
    import tensorflow as tf

    from big_vision.pp import autoaugment
    from big_vision.pp.registry import parse_call

    call = parse_call(spec)
    magnitude = call.kwargs.get("magnitude", call.args[1] if len(call.args) > 1 else 10)
    outcomes: dict[bytes, frozenset[str]] = {}
    for name, operation in autoaugment.OPERATIONS.items():
        if name == "Cutout":
            continue
        level = autoaugment.get_level_argument(name, magnitude)
        arguments = {"": [] if level is None else [level]}
        if name in autoaugment.SIGNED:
            arguments = {"+": [level], "-": [-level]}
        for sign, values in arguments.items():
            pixels = operation(tf.constant(image), *values).numpy().tobytes()
            outcomes[pixels] = outcomes.get(pixels, frozenset()) | {name + sign}
    return outcomes


def _check_cutout(_fixture: Any, record: dict[str, Any]) -> str:
    import tensorflow as tf

    from big_vision.pp import autoaugment
    from big_vision.pp.randomness import Randomness

    image = tf.zeros([*record["image_hw"], 3], tf.uint8)

    def cut(index: Any) -> Any:
        randomness = Randomness(0, 0, tf.stack([tf.constant(0, tf.int64), index]))
        filled = autoaugment.cutout(image, record["pad_size"], randomness)
        return tf.math.count_nonzero(filled[..., 0] == 128)

    dataset = tf.data.Dataset.range(record["tol"].get("draws", DEFAULT_DRAWS)).map(cut)
    areas = np.array(list(dataset.as_numpy_iterator()))
    distance = abs(areas.mean() - record["mean_area"])
    if areas.max() != record["max_area"] or distance > record["tol"]["mean_area_abs"]:
        return f"area up to {areas.max()}, mean off by {distance:.2f}"
    return ""
