"""The tf.data graph from positions to batches: order, source, preprocessing, batch.

Each element has `epoch` and `index`; records turn it into features, the preprocessing string turns
those into one uint8 image and one label. Nothing here runs Python for an example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from big_vision.input.images.encoded import Stream
from big_vision.input.order import (
    GROUP_UNITS,
    ExactOrder,
    ShardedOrder,
    ShardSpec,
    get_evaluation_blocks,
    get_evaluation_range,
)
from big_vision.input.records import Records
from big_vision.pp.registry import Example
from big_vision.tensorflow_setup import tf
from utils.errors import UserError

_FOREVER = np.iinfo(np.int64).max
_NO_FLOATS = (
    "end the string with value_range, vgg_value_range or clip_value_range, which run on the device"
)


@dataclass(frozen=True)
class PipelineSpec:
    """How examples become batches."""

    preprocess: Callable[..., Example]  # `fn(data, epoch=, index=)`; returns a uint8 image
    pp_key: str  # configuration key of the string, for messages
    pp: str  # the string, for messages
    # image_key, label_key: features of the dataset; `a/b` is feature b of the group a; without a
    # label key every label is 0
    image_key: str
    label_key: str
    shard: ShardSpec
    order: ExactOrder
    seed: int
    threads: int
    prefetch_batches: int
    tolerant: bool  # True if an unreadable example becomes a marked blank one
    window: int  # examples that the sharded order shuffles together
    # Number of classes if an example has a list of them; None for a single label
    several: int | None = None


class Pipeline:
    """Builds `tf.data.Dataset`s over one kind of records."""

    def __init__(self, records: Records, spec: PipelineSpec) -> None:
        self.records = records
        self.spec = spec
        # Reads front to back; None if elements are read by index.
        self.stream = None if spec.tolerant else records.stream

    def exact_training(self, epoch: int, start: int) -> tf.data.Dataset:
        """Return endless elements of the exact order, from `start` global examples into `epoch`."""
        return self.records.attach(self.exact_indices(epoch, start))

    def exact_indices(self, epoch: int, start: int) -> tf.data.Dataset:
        """Return epoch and index of each element of the exact order; reads no example."""

        def get_order(now: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return self.spec.order.get_epoch(int(now), start if now == epoch else 0)

        def add_order(now: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            order, epochs = tf.numpy_function(get_order, [now], (tf.int64, tf.int64))
            order.set_shape([None])
            epochs.set_shape([None])
            return epochs, order

        def spread(epochs: tf.Tensor, order: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices({"epoch": epochs, "index": order})

        # The next epoch's order is computed ahead, so that there is no stall between them.
        return tf.data.Dataset.range(epoch, _FOREVER).map(add_order).prefetch(1).flat_map(spread)

    def sharded_training(self, order: ShardedOrder, epoch: int, start: int) -> tf.data.Dataset:
        """Return endless elements of the sharded order, from `start` global examples on."""
        if self.stream is not None:
            return self._shuffle_windows(order, epoch, start, self._read_records)
        return self.records.attach(self.sharded_indices(order, epoch, start))

    def sharded_indices(self, order: ShardedOrder, epoch: int, start: int) -> tf.data.Dataset:
        """Return epoch and index of each element of the sharded order; reads no example."""
        return self._shuffle_windows(order, epoch, start, _stream_indices)

    def evaluation_blocks(self) -> tf.data.Dataset:
        """Return elements of one ordered pass: this shard's block of each global batch."""
        return self.load_indices(get_evaluation_blocks(self.records.num_examples, self.spec.shard))

    def evaluation_range(self) -> tf.data.Dataset:
        """Return elements of one ordered pass: this shard's own range, front to back."""
        start, stop = get_evaluation_range(self.records.num_examples, self.spec.shard)
        if self.stream is not None:
            return self._stream_range(start, stop)
        return self.load_indices(np.arange(start, stop, dtype=np.int64))

    def load_indices(self, indices: np.ndarray, epoch: int = 0) -> tf.data.Dataset:
        """Return elements of the given examples, by random access."""
        elements = {"epoch": np.full_like(indices, epoch), "index": indices}
        return self.records.attach(tf.data.Dataset.from_tensor_slices(elements))

    def batches(self, elements: tf.data.Dataset) -> tf.data.Dataset:
        """Return preprocessed batches: `image`, `label`, `index`, and `ok` if examples may fail."""
        examples = self.process(elements, tolerant=self.spec.tolerant)
        batches = examples.batch(self.spec.order.batch_size)
        options = tf.data.Options()
        options.autotune.enabled = False
        options.deterministic = True
        options.threading.private_threadpool_size = self.spec.threads
        options.threading.max_intra_op_parallelism = 1
        return batches.prefetch(self.spec.prefetch_batches).with_options(options)

    def process(self, elements: tf.data.Dataset, *, tolerant: bool = False) -> tf.data.Dataset:
        """Map elements to image, label and index; types and shapes are checked while tracing."""
        step = self._tolerate if tolerant else self._process
        # AutoGraph would wrap our errors in its own, and is not needed.
        step = tf.autograph.experimental.do_not_convert(step)
        return elements.map(step, num_parallel_calls=self.spec.threads, deterministic=True)

    def _process(self, element: Example) -> Example:
        data = self.load(element)
        data = self.spec.preprocess(data, epoch=element["epoch"], index=element["index"])
        image, label = self._pick(data)
        # In int64: what does not fit into int32 must not become another class.
        return {"image": image, "label": tf.cast(label, tf.int64), "index": element["index"]}

    def load(self, element: Example) -> Example:
        """Load the example's features as a string sees them: the image is always `image`."""
        data, spec = self.records.load(element), self.spec
        label = {spec.label_key: _take(data, spec.label_key)} if spec.label_key else {}
        image = _take(data, spec.image_key)
        data.pop(spec.image_key, None)
        return {**data, **label, "image": image}

    def _pick(self, data: Example) -> tuple[tf.Tensor, tf.Tensor]:
        spec = self.spec
        for key in filter(None, ("image", spec.label_key)):
            if key not in data:
                raise UserError(
                    f"{spec.pp_key} yields no {key!r}, only {', '.join(sorted(data))}; keep it"
                )
        label = data[spec.label_key] if spec.label_key else tf.zeros([], "int64")
        image, label = data["image"], self._take_label(label)
        if image.dtype.name == "string":
            raise UserError(f"{spec.pp_key} leaves the image encoded; begin it with decode")
        if image.dtype.name != "uint8":
            raise UserError(
                f"{spec.pp_key} yields {image.dtype.name} images, but batches travel as uint8; "
                f"{_NO_FLOATS}"
            )
        if image.shape.rank != 3 or not image.shape.is_fully_defined():
            raise UserError(
                f"{spec.pp_key} yields images of shape {image.shape}, which is not a fixed "
                "[H, W, C]; add resize or a crop with a size"
            )
        if not label.dtype.is_integer or label.shape.rank != (spec.several is not None):
            raise UserError(
                f"{spec.pp_key} yields labels of type {label.dtype.name} and shape {label.shape}, "
                "but a label is one whole number; leave onehot out (targets are made on the device)"
            )
        return image, label

    def _take_label(self, label: tf.Tensor) -> tf.Tensor:
        """Return a label, or a list of labels as [K] with a 1 for each."""
        classes = self.spec.several
        if classes is None or label.shape.rank != 1:
            return label
        inside = tf.debugging.Assert(tf.reduce_all((label >= 0) & (label < classes)), [label])
        with tf.control_dependencies([inside]):
            # The list may be empty, and name a class twice.
            counts = tf.reduce_sum(tf.one_hot(label, classes, dtype=tf.int64), axis=0)
            return tf.minimum(counts, 1)

    def _tolerate(self, element: Example) -> Example:
        """Process an element; one that fails becomes a blank."""

        def process(element: Example) -> Example:
            return self._process(element) | {"ok": True}

        good = tf.data.Dataset.from_tensors(element).map(process)
        spec = good.element_spec["image"]
        blank = {
            "image": tf.zeros(spec.shape, spec.dtype),
            "label": tf.zeros(good.element_spec["label"].shape, tf.int64),
            "index": element["index"],
            "ok": False,
        }
        readable = good.ignore_errors(log_warning=False)
        blanks = tf.data.Dataset.from_tensors(blank)
        return readable.concatenate(blanks).take(1).get_single_element()

    def _read_records(self, unit: tf.Tensor, index: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
        assert self.stream is not None
        records = self.stream(unit, index, count)
        indices = tf.data.Dataset.range(index, index + count)
        return tf.data.Dataset.zip({"index": indices, "record": records})

    def stream_examples(self, indices: np.ndarray, epoch: int = 0) -> tf.data.Dataset:
        """Return elements of single examples, each read through its unit's stream: slow."""
        units = np.searchsorted(self.records.unit_starts, indices, side="right") - 1
        pieces = tf.data.Dataset.from_tensor_slices((units, indices, np.ones_like(indices)))
        return _add_epoch(pieces.flat_map(self._read_records), epoch)

    def _stream_range(self, start: int, stop: int) -> tf.data.Dataset:
        """Return elements [start, stop), read front to back."""
        starts, counts = self.records.unit_starts, self.records.unit_counts
        first = np.maximum(starts, start)
        count = np.minimum(starts + counts, stop) - first
        units = np.flatnonzero(count > 0)
        pieces = tf.data.Dataset.from_tensor_slices((units, first[units], count[units]))
        return _add_epoch(pieces.flat_map(self._read_records), 0)

    def _shuffle_windows(
        self, order: ShardedOrder, epoch: int, start: int, read: Stream
    ) -> tf.data.Dataset:
        """Shuffle the sharded order over `read(unit, index, count)`, which reads a piece."""

        def get_stream(now: np.ndarray) -> tuple[np.ndarray | np.int64, ...]:
            stream = order.get_epoch(int(now), start if now == epoch else 0)
            numbers = (stream.first_window, stream.window_skip, stream.limit, stream.seed)
            return (stream.groups, stream.skips, *(np.int64(n) for n in numbers))

        def open_windows(now: tf.Tensor) -> tf.data.Dataset:
            types = [tf.int64] * 6
            groups, skips, *numbers = tf.numpy_function(get_stream, [now], types)
            groups.set_shape([None, GROUP_UNITS, 3])
            skips.set_shape([None])
            first, skip, limit, seed = (tf.ensure_shape(n, []) for n in numbers)

            def tag(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
                return now, number, tf.where(number == first, skip, 0), limit, seed

            records = tf.data.Dataset.from_tensor_slices((groups, skips))
            records = records.flat_map(functools.partial(_read_group, read))
            tags = tf.data.Dataset.range(first, _FOREVER).map(tag)
            return tf.data.Dataset.zip(tags, records.window(order.window))

        def shuffle(tag: tuple[tf.Tensor, ...], window: tf.data.Dataset) -> tf.data.Dataset:
            now, number, skip, limit, seed = tag
            examples = tf.data.Dataset.zip(window).shuffle(order.window, seed=seed + number)
            left = tf.maximum(limit - number * order.window, 0)
            return _add_epoch(examples.take(left).skip(skip), now)

        # The next window fills while this one is read, also across the epoch's border.
        windows = tf.data.Dataset.range(epoch, _FOREVER).flat_map(open_windows).prefetch(1)
        return windows.flat_map(shuffle)


def _add_epoch(elements: tf.data.Dataset, epoch: tf.Tensor | int) -> tf.data.Dataset:
    def add(element: Example) -> Example:
        return element | {"epoch": tf.convert_to_tensor(epoch, tf.int64)}

    return elements.map(add)


def _read_group(read: Stream, group: tf.Tensor, passed: tf.Tensor) -> tf.data.Dataset:
    """Read the units of a group side by side, one example from each in turn, after `passed`."""

    def read_piece(piece: tf.Tensor) -> tf.data.Dataset:
        return read(piece[0], piece[1], piece[2])

    pieces = tf.data.Dataset.from_tensor_slices(group)
    return pieces.interleave(read_piece, cycle_length=GROUP_UNITS, block_length=1).skip(passed)


def _stream_indices(unit: tf.Tensor, index: tf.Tensor, count: tf.Tensor) -> tf.data.Dataset:
    """Return only indices, in the order in which records would be read."""
    return tf.data.Dataset.zip({"index": tf.data.Dataset.range(index, index + count)})


def _take(data: Example, key: str) -> tf.Tensor:
    """Return a feature by its key; `a/b` is feature b of the group a."""
    *groups, name = [key] if key in data else key.split("/")
    for group in groups:
        data = data[group]
    return data[name]
