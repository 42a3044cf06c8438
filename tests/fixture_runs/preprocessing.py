"""Runs a file of preprocessing reference values through `big_vision.pp`.

The file is an .npz of arrays with a .json beside it that describes them: cases (a string, inputs
and all outputs), errors, parse (the grammar of one op), crop_decode (windows of a JPEG), aa_ops
and the tables beside them (AutoAugment), and random (distributions; see
`tests.fixture_runs.preprocessing_random`). Every entry counts as one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

CALL_MODES = ("eager", "graph")


class Fixture:
    """The opened pair of files, and a folder with the small files that strings name."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.arrays = np.load(path, allow_pickle=False)
        self.json = json.loads(path.with_suffix(".json").read_text())
        self.folder = folder
        for name, text in self.json.get("files", {}).items():
            (folder / name).write_text(text)

    def get_spec(self, record: dict[str, Any]) -> str:
        """The record's string; `{DIR}` stands for the folder."""
        return record["pp"].replace("{DIR}", str(self.folder))

    def get_image_bytes(self, name: str) -> bytes:
        """An encoded image by its name."""
        return self.arrays[self.json["images"][name]["npz"]].tobytes()

    def get_any_jpeg(self) -> str:
        """The name of the first JPEG."""
        images = self.json["images"].items()
        return next(name for name, image in images if image["format"] == "JPEG")

    def decode(self, value: dict[str, Any]) -> Any:
        """An input or output as it is stored: array, bytes, string(s) or nested dict."""
        kind = value["t"]
        if kind == "array":
            return self.arrays[value["npz"]].astype(value["dtype"]).reshape(value["shape"])
        if kind == "bytes":
            return self.arrays[value["npz"]].tobytes()
        if kind == "str":
            return value["v"].encode()
        if kind == "strs":
            return np.array([word.encode() for word in value["v"]], dtype=object)
        if kind == "dict":
            return {key: self.decode(inner) for key, inner in value["v"].items()}
        raise ValueError(f"unknown kind of value {kind!r}")

    def decode_all(self, values: dict[str, Any]) -> dict[str, Any]:
        """The same for all names of a dict."""
        return {key: self.decode(value) for key, value in values.items()}


def run(path: Path, device: str = "cpu") -> tuple[int, list[str]]:
    """Check every entry of a file.

    Args:
      path: the .npz, with the .json beside it.
      device: not used; preprocessing runs on the host.

    Returns:
      How many passed, and one line for each that did not.
    """
    # The reference was made so; oneDNN's kernels differ in the last bits.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    passed, failures = 0, []
    with tempfile.TemporaryDirectory() as folder:
        fixture = Fixture(Path(path), Path(folder))
        for label, check in list_checks(fixture):
            complaint = get_complaint(check)
            if complaint:
                failures.append(f"{label}: {complaint}")
            else:
                passed += 1
    return passed, failures


def list_checks(fixture: Fixture) -> Iterator[tuple[str, Callable[[], str]]]:
    """Label and check of every entry; a check gives what is wrong, or an empty string."""
    from tests.fixture_runs import preprocessing_random

    sections: dict[str, Callable[[Fixture, Any], str]] = {
        "cases": _check_case,
        "errors": _check_error,
        "parse": _check_parse,
        "crop_decode": _check_crop_decode,
        "aa_ops": _check_operation,
        "random": preprocessing_random.check,
    }
    tables: dict[str, Callable[[Fixture, Any], str]] = {
        "aa_level_args": _check_level_arguments,
        "aa_flat": _check_flat_images,
        "aa_policy_v0": _check_policy,
    }
    for name, check in sections.items():
        for number, record in enumerate(fixture.json.get(name, [])):
            words = (record.get(word) for word in ("id", "pp", "s", "image", "func"))
            label = " ".join(str(word) for word in words if word is not None)
            yield f"{name}[{number}] {label}", lambda c=check, r=record: c(fixture, r)
    for name, check in tables.items():
        table = fixture.json.get(name)
        if table is not None:
            yield name, lambda c=check, t=table: c(fixture, t)


def get_complaint(check: Callable[[], str]) -> str:
    """What is wrong with an entry; empty where nothing is."""
    try:
        return check()
    except Exception as error:  # whatever an entry raises is that entry's failure
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _check_case(fixture: Fixture, case: dict[str, Any]) -> str:
    spec, inputs = fixture.get_spec(case), fixture.decode_all(case["inputs"])
    expected = _flatten(fixture.decode_all(case["outputs"]))
    # Where the reference's graph gave something else, its eager value is what is stored.
    default = CALL_MODES if case.get("eager_equals_graph", True) else "eager"
    modes = case.get("modes", default)
    modes = (modes,) if isinstance(modes, str) else modes
    for mode in modes:
        found = _flatten(run_spec(spec, inputs, mode))
        if found.keys() != expected.keys():
            return f"{mode}: keys {sorted(found)} instead of {sorted(expected)}"
        for key, value in expected.items():
            complaint = compare(found[key], value, _get_tolerance(case, value))
            if complaint:
                return f"{mode}: {key!r} {complaint}"
    return ""


def run_spec(spec: str, inputs: dict[str, Any], mode: str) -> dict[str, Any]:
    """What a string makes of an example, called at once or inside tf.data; numpy leaves."""
    import tensorflow as tf

    from big_vision.pp.builder import get_preprocess_fn

    preprocess = get_preprocess_fn(spec)
    data = tf.nest.map_structure(to_tensor, inputs)
    if mode == "eager":
        return tf.nest.map_structure(to_numpy, preprocess(data))
    dataset = tf.data.Dataset.from_tensors(data).map(preprocess)
    return next(dataset.as_numpy_iterator())


def to_tensor(value: Any) -> Any:
    """A tensor of the same type; an array of objects becomes strings."""
    import tensorflow as tf

    is_text = isinstance(value, np.ndarray) and value.dtype == object
    return tf.constant(value, tf.string) if is_text else tf.constant(value)


def to_numpy(value: Any) -> Any:
    """The value of an eager tensor; other values as they are."""
    return value.numpy() if hasattr(value, "numpy") else value


def compare(found: Any, expected: Any, tolerance: str) -> str:
    """What is wrong with a value under a tolerance class of the fixtures; empty: nothing."""
    if isinstance(expected, bytes):
        return "" if found == expected else f"is {found!r} instead of {expected!r}"
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"is {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
    if tolerance == "exact" or expected.size == 0 or expected.dtype == object:
        return "" if np.array_equal(found, expected) else "differs"
    distance = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    scale = float(np.abs(expected).max())
    if tolerance == "resize_u8":
        is_close = distance.max() <= 1 and (distance > 0).mean() <= 0.01
    elif tolerance == "chain_f32":
        is_close = distance.max() <= _get_step(expected) * 1.01
    elif tolerance == "f32":
        is_close = bool((distance <= 2e-6 * np.abs(expected) + 2e-6 * scale).all())
    elif tolerance == "resize_f32":
        is_close = bool((distance <= 1e-5 * np.abs(expected) + 1e-6 * scale).all())
    else:
        return f"has the unknown tolerance {tolerance!r}"
    share = (distance > 0).mean()
    return "" if is_close else f"is off by up to {distance.max():.3g} in {share:.2%} of values"


def _get_tolerance(case: dict[str, Any], expected: Any) -> str:
    """The case's tolerance, made exact for whole numbers under a float class."""
    tolerance = case["tol"]
    is_whole = isinstance(expected, np.ndarray) and expected.dtype.kind in "iub"
    return "exact" if is_whole and tolerance.endswith("f32") else tolerance


def _get_step(expected: np.ndarray) -> float:
    """One uint8 step after scaling: the smallest distance of two values of a channel."""
    channels = expected.reshape(-1, expected.shape[-1]).T.astype(np.float64)
    gaps = np.concatenate([np.diff(np.unique(np.round(channel, 5))) for channel in channels])
    return float(gaps.min()) if gaps.size else 0.0


def _check_error(fixture: Fixture, record: dict[str, Any]) -> str:
    from big_vision.pp.builder import get_preprocess_fn

    spec, stage = fixture.get_spec(record), record["stage"]
    try:
        preprocess = get_preprocess_fn(spec)
    except Exception as error:  # its class is what is compared
        names = [kind.__name__ for kind in type(error).__mro__]
        if stage == "build" and record["error"] in names:
            return ""
        return f"building raised {names[0]}, not {record['error']} at stage {stage}"
    if stage == "build":
        return f"was built, without the {record['error']}"
    try:
        preprocess(fixture.decode_all(record["inputs"]))
    except Exception as error:  # any class will do here
        return "" if stage == "call" else f"the call raised {type(error).__name__}"
    return "" if stage == "none" else f"was called, without the {record['error']}"


def _check_parse(_fixture: Fixture, record: dict[str, Any]) -> str:
    from big_vision.pp.registry import parse_call

    try:
        call = parse_call(record["s"])
    except Exception as error:  # its class is what is compared
        wanted = record.get("error")
        return "" if type(error).__name__ == wanted else f"{type(error).__name__}, not {wanted}"
    found = (True, call.name, repr(call.args), repr(call.kwargs))
    wanted = (record["ok"], record.get("name"), record.get("args"), record.get("kwargs"))
    return "" if found == wanted else f"{found} instead of {wanted}"


def _check_crop_decode(fixture: Fixture, record: dict[str, Any]) -> str:
    from big_vision.pp.ops_image import decode_jpeg_window, resize_image

    encoded = fixture.get_image_bytes(record["image"])
    window = decode_jpeg_window(encoded, record["window_yxhw"])
    complaint = compare(window.numpy(), fixture.arrays[record["npz"]], "exact")
    if complaint or not record.get("resize"):
        return complaint
    side = record["resize"]
    height_width = tuple(side) if isinstance(side, list) else (side, side)
    resized = resize_image(window, height_width, "bilinear", False).numpy()
    return compare(resized, fixture.arrays[record["npz_resized"]], "resize_u8")


def _check_operation(fixture: Fixture, record: dict[str, Any]) -> str:
    from big_vision.pp import autoaugment

    operation = getattr(autoaugment, record["func"])
    image = to_tensor(fixture.arrays[record["npz_in"]])
    found = operation(image, *record["args"]).numpy()
    return compare(found, fixture.arrays[record["npz"]], "exact")


def _check_level_arguments(_fixture: Fixture, table: dict[str, Any]) -> str:
    from big_vision.pp.autoaugment import get_level_argument

    for name, levels in table.items():
        for magnitude, expected in levels.items():
            found = get_level_argument(name, float(magnitude))
            found = [] if found is None else [found]
            if not np.allclose(found, expected, rtol=1e-6, atol=0):
                return f"{name} at {magnitude}: {found} instead of {expected}"
    return ""


def _check_flat_images(fixture: Fixture, table: dict[str, Any]) -> str:
    """A constant image of 7 under a function gives the listed pixel everywhere."""
    from big_vision.pp import autoaugment

    image = to_tensor(np.full((12, 12, 3), 7, np.uint8))
    for name, pixel in table.items():
        found = getattr(autoaugment, name)(image).numpy()
        if not (found == np.array(pixel, np.uint8)).all():
            return f"{name}: {found[0, 0].tolist()} instead of {pixel}"
    return ""


def _check_policy(_fixture: Fixture, table: list[Any]) -> str:
    from big_vision.pp.autoaugment import POLICY_V0

    found = [[list(step) for step in steps] for steps in POLICY_V0]
    return "" if found == table else "the policy differs"


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with names joined by blanks."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key} "))
        else:
            flat[prefix + key] = value
    return flat
