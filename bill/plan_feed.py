"""What an image costs its host: the run's own preprocessing, timed against crop and flip."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from big_vision.pp.builder import get_preprocess_fn
from big_vision.pp.device_ops import split_device_ops
from big_vision.tensorflow_setup import import_tensorflow
from utils.hosts import CPU_MS

if TYPE_CHECKING:
    from utils.config.load import RunConfig

JPEG, PIXELS = "JPEG", "pixels"
# Form of an image -> the string whose cost `CPU_MS` has.
REFERENCES = {
    JPEG: "decode_jpeg_and_inception_crop(224)|flip_lr",
    PIXELS: "inception_crop(224)|flip_lr",
}
_IMAGES, _ROUNDS = 24, 3
_JPEG_SIZE = (500, 375)
_JPEG_QUALITY = 93
_JPEG_NOISE = 22
_STORED_SIDE = 256  # the short side of stored pixels (docs/data.md)


def find_cpu_ms(config: RunConfig) -> tuple[float | None, str]:
    """Find what an image costs its host with crop and flip alone, and its form.

    None for what is not an image.
    """
    if config.data.source not in ("tfds", "folder", "webdataset", "hf"):
        return None, "not images from files"
    strings = [member.pp or config.data.train_pp for member in config.data.mix]
    # These operations take encoded images.
    ops = ("decode", "random_resized_crop", "upright")
    form = JPEG if any(op in (strings or [config.data.train_pp])[0] for op in ops) else PIXELS
    return CPU_MS[form], form


def measure_cpu_ms(config: RunConfig) -> tuple[float | None, str]:
    """Estimate what an image costs its host by the run's own strings, and how it was found.

    Both strings are timed here, in turns and in one thread: their ratio counts, so that neither
    this machine's speed nor other work on it does.
    """
    base_ms, form = find_cpu_ms(config)
    if base_ms is None:
        return None, form
    shares = [(member.weight, member.pp or config.data.train_pp) for member in config.data.mix]
    shares = shares or [(1.0, config.data.train_pp)]
    images = list(_create_images(form))
    try:
        ratios = [(weight, _compare(spec, form, images)) for weight, spec in shares]
    except Exception as error:  # an operation needs files or features that are not here
        reason = " ".join(str(error).split())[:80]
        return base_ms, f"{form}, crop and flip alone: the own string fails here ({reason})"
    ratio = sum(weight * value for weight, value in ratios) / sum(weight for weight, _ in ratios)
    return base_ms * ratio, f"{form}, {ratio:.2f} times crop and flip by timing the own string here"


def create_jpeg(number: int) -> bytes:
    """Create a photograph-like JPEG, 500x375, about 110 kB: detail at all scales, and grain."""
    from PIL import Image

    width, height = _JPEG_SIZE
    rng = np.random.RandomState(number)
    picture = np.zeros((height, width, 3), np.float32)
    for octave in range(7):
        side = 3 << octave
        coarse = rng.randint(0, 256, (side, side * 4 // 3, 3)).astype(np.uint8)
        fine = Image.fromarray(coarse).resize(_JPEG_SIZE, Image.Resampling.BICUBIC)
        picture += (np.asarray(fine, np.float32) - 128) * 0.75**octave
    picture += rng.normal(0, _JPEG_NOISE, (height, width, 1))
    pixels = np.clip(picture * 0.5 + 128, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return buffer.getvalue()


def _create_images(form: str) -> Iterator[bytes | np.ndarray]:
    from PIL import Image

    width, height = _JPEG_SIZE
    size = (_STORED_SIDE * width // height, _STORED_SIDE)
    for number in range(8):
        jpeg = create_jpeg(number)
        yield jpeg if form == JPEG else np.asarray(Image.open(io.BytesIO(jpeg)).resize(size))


def _compare(spec: str, form: str, images: Sequence[bytes | np.ndarray]) -> float:
    """Return the CPU time of a string over that of the form's reference."""
    rounds = [_create_round(text, images) for text in (spec, REFERENCES[form])]
    for run in rounds:
        run()  # it is traced
    pairs = [[_time(run) for run in rounds] for _ in range(_ROUNDS)]
    return statistics.median(own / reference for own, reference in pairs)


def _time(run: Callable[[], None]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _create_round(spec: str, images: Sequence[bytes | np.ndarray]) -> Callable[[], None]:
    """Return a function that preprocesses some images, as the host's part of the input does."""
    tf = import_tensorflow()
    preprocess = get_preprocess_fn(split_device_ops(spec)[0])
    stored = tf.constant(images)

    def apply(index: Any) -> Any:
        image = stored[index % len(images)]
        return preprocess({"image": image, "label": tf.zeros([], tf.int64)}, index=index)["image"]

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    elements = tf.data.Dataset.range(_IMAGES).map(apply).with_options(options)

    def run() -> None:
        for _ in elements:
            pass

    return run
