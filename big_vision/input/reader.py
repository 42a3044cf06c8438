"""Runs a pipeline: batches of one shard from a position on, and errors that name the example."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from big_vision.input.batches import ImageBatch
from big_vision.input.faults import create_record_error, create_string_error, get_reason
from big_vision.input.images.labelled import (
    ImageFacts,
    LabelRule,
    create_blank_images,
    create_image_batch,
)
from big_vision.input.order import ShardedOrder, get_evaluation_blocks, get_evaluation_range
from big_vision.input.pipeline import Pipeline, PipelineSpec
from big_vision.input.records import Records
from big_vision.input.source import Reader
from big_vision.pp.registry import Example
from big_vision.tensorflow_setup import tf
from utils.errors import UserError
from utils.log import get_logger

_GIB = 1 << 30
_STDERR = 2
_LINES = re.compile(
    rb"^(Improper call to JPEG library in state \d+|Premature end of JPEG file|"
    rb"Input file read error|Corrupt JPEG data: .*|Not a JPEG file: .*|.* jpeg_mem\.cc:\d+\] .*|"
    rb"WARNING: All log messages before absl::InitializeLog\(\) .*)\n",
    flags=re.MULTILINE,
)
# The redirection affects the whole process; it may be nested in one thread.
_REDIRECTING = threading.RLock()


@contextlib.contextmanager
def drop_decoder_messages() -> Iterator[None]:
    """Drop libjpeg's lines from stderr within the block; other output follows at its end.

    TensorFlow has no setting for them: the C library writes to the file descriptor itself.
    """
    with _REDIRECTING, tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(_STDERR)
        os.dup2(file.fileno(), _STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, _STDERR)
            os.close(kept)
            file.seek(0)
            os.write(_STDERR, _LINES.sub(b"", file.read()))


class TensorFlowReader(Reader):
    """Reads one split of labelled images for one shard.

    Args:
      facts: from metadata; the image shape comes from the traced string.
    """

    facts: ImageFacts

    def __init__(
        self, records: Records, spec: PipelineSpec, order: str, facts: ImageFacts, labels: LabelRule
    ) -> None:
        self.num_examples = records.num_examples
        self._records, self._spec = records, spec
        self._pipeline = Pipeline(records, spec)
        self._sharded: ShardedOrder | None = None
        if order == "sharded":
            units = (records.unit_starts, records.unit_counts)
            self._sharded = ShardedOrder(*units, spec.window, spec.shard, spec.seed)
        self._evaluation: tf.data.Dataset | None = None
        self.facts = replace(facts, image_shape=self._find_image_shape())
        self._labels = labels

    def _find_image_shape(self) -> tuple[int, int, int]:
        """Trace the pipeline once, which checks types, shapes and the record index."""
        try:
            traced = self._pipeline.process(self._open_examples(np.zeros(1, np.int64)))
        except UserError:
            raise
        except Exception as error:
            raise create_string_error(self._spec.pp_key, error) from error
        height, width, channels = (int(side) for side in traced.element_spec["image"].shape)
        return height, width, channels

    def try_first_example(self) -> None:
        """Read the first example, so that a string that fails on it is reported early."""
        error = None if self._spec.tolerant else self._find_broken_example(np.zeros((1, 2), int))
        if error is not None:
            raise error

    def log_shuffle_memory(self) -> None:
        """Log the memory of the sharded order's windows."""
        if self._sharded is None:
            return
        window, share = self._spec.window, self.num_examples // self._spec.shard.count
        held = min(2 * window, share) * self._records.mean_record_bytes / _GIB
        get_logger().info(
            "order sharded: two shuffle windows of %d examples, %.2f GiB of memory", window, held
        )

    def read_training(self, epoch: int, start: int) -> Iterator[ImageBatch]:
        pipeline, order = self._pipeline, self._sharded
        if order is None:
            elements = pipeline.exact_training(epoch, start)
        else:
            elements = pipeline.sharded_training(order, epoch, start)

        def get_indices(number: int) -> np.ndarray:
            if order is None:
                indices = pipeline.exact_indices(epoch, start)
            else:
                indices = pipeline.sharded_indices(order, epoch, start)
            return self._cut_batch(indices, number)

        return self._iterate(pipeline.batches(elements), get_indices, epoch)

    def read_evaluation(self) -> Iterator[ImageBatch]:
        pipeline, shard = self._pipeline, self._spec.shard
        if self._evaluation is None:
            by_range = self._sharded is not None
            elements = pipeline.evaluation_range() if by_range else pipeline.evaluation_blocks()
            self._evaluation = pipeline.batches(elements)

        def get_indices(number: int) -> np.ndarray:
            if self._sharded is None:
                indices = get_evaluation_blocks(self.num_examples, shard)
            else:
                indices = np.arange(*get_evaluation_range(self.num_examples, shard))
            begin = number * shard.rank_batch_size
            indices = indices[begin : begin + shard.rank_batch_size]
            return np.stack([np.zeros_like(indices), indices], axis=1)

        return self._iterate(self._evaluation, get_indices, 0)

    def read_examples(self, indices: np.ndarray, epoch: int) -> ImageBatch:
        examples = self._pipeline.process(self._open_examples(indices, epoch))
        batch = next(iter(examples.batch(len(indices))))
        return self._create_batch(batch)

    def create_blank(self, size: int) -> ImageBatch:
        facts = self.facts
        several = facts.num_classes if facts.several_labels else None
        return create_blank_images(size, facts.known_shape, several)

    def get_ids(self, indices: np.ndarray) -> tuple[str, ...]:
        return self._records.get_ids(indices)

    def describe(self, index: int) -> str:
        return self._records.describe(index)

    def close(self) -> None:
        self._evaluation = None

    def explain_example(self, epoch: int, index: int) -> UserError:
        error = self._find_broken_example(np.array([[epoch, index]]))
        return error or self._create_error(epoch, index, OSError("it cannot be read"))

    def _iterate(
        self, batches: tf.data.Dataset, get_indices: Callable[[int], np.ndarray], epoch: int
    ) -> Iterator[ImageBatch]:
        iterator = iter(batches)
        number = 0
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                cause = self._find_broken_example(get_indices(number))
                cause = cause or self._find_broken_record(epoch)
                if cause is None:
                    raise RuntimeError(f"the input failed: {get_reason(error)}") from error
                raise cause from error
            yield self._create_batch(batch)
            number += 1

    def _create_batch(self, tensors: Example) -> ImageBatch:
        """Convert TensorFlow's tensors to torch's: images without a copy."""
        raw = {name: value if name == "image" else value.numpy() for name, value in tensors.items()}
        return create_image_batch(raw, self._labels)

    def _cut_batch(self, indices: tf.data.Dataset, number: int) -> np.ndarray:
        """Return [b, 2]: epoch and index of each element of a batch."""
        size = self._spec.order.batch_size
        batch = next(iter(indices.skip(number * size).take(size).batch(size)))
        return np.stack([batch["epoch"].numpy(), batch["index"].numpy()], axis=1)

    def _open_examples(self, indices: np.ndarray, epoch: int = 0) -> tf.data.Dataset:
        """Return elements of single examples, read in the way of this reader."""
        if self._sharded is not None and self._pipeline.stream is not None:
            return self._pipeline.stream_examples(indices, epoch)
        return self._pipeline.load_indices(indices, epoch)

    @drop_decoder_messages()
    def _find_broken_example(self, suspects: np.ndarray) -> UserError | None:
        """Return the error of the first of the suspects ([n, 2] epoch and index) that fails."""
        for epoch in np.unique(suspects[:, 0]):
            indices = suspects[suspects[:, 0] == epoch, 1]
            examples = iter(self._pipeline.process(self._open_examples(indices, int(epoch))))
            for index in indices:
                try:
                    next(examples)
                except Exception as error:
                    return self._create_error(int(epoch), int(index), error)
        return None

    @drop_decoder_messages()
    def _create_error(self, epoch: int, index: int, error: Exception) -> UserError:
        """Create the error that names a failed example, after reading its stored features."""
        element = self._open_examples(np.array([index], np.int64), epoch)
        try:
            raw = next(iter(element.map(self._pipeline.load)))
        except Exception:  # the first error says why the record cannot be read
            raw = None
        if raw is not None:
            try:  # op by op, which shows where
                self._spec.preprocess(raw, epoch=epoch, index=index)
            except Exception as op_error:
                error = op_error
        spec = (self._spec.pp_key, self._spec.pp)
        return create_record_error(self.describe(index), error, raw, spec)

    def _find_broken_record(self, epoch: int) -> UserError | None:
        """Return the error of the first broken record in this shard's files: streams read ahead."""
        stream = self._pipeline.stream
        if self._sharded is None or stream is None:
            return None
        units: list[int] = []
        for later in (epoch, epoch + 1):
            groups = self._sharded.get_epoch(later, 0).groups.reshape(-1, 3)
            units += groups[groups[:, 2] > 0, 0].tolist()
        for unit in dict.fromkeys(units):
            start, count = self._records.unit_starts[unit], self._records.unit_counts[unit]
            index = int(start)
            try:
                for _ in stream(tf.constant(unit), start, count):
                    index += 1
            except Exception as error:
                return self._create_error(epoch, index, error)
        return None
