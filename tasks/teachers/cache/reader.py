"""`TeacherCache`: stored outputs replayed to a rank, and their parts of a batch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from datasets import Batch
from losses.base import SparseTeacher, compute_dense_log_probs
from losses.logits.ensembles import combine_answers
from tasks.teachers.cache.manifest import (
    choose_columns,
    get_file_name,
    is_by_example,
    read_manifest,
    read_shape,
    refuse_difference,
)
from tasks.teachers.cache.rows import CLASSES, CacheShape, Column, compute_marks, unpack_values
from utils.errors import UserError
from utils.json_types import JsonMapping
from utils.registry import load_object
from utils.storage.folder import Folder
from utils.storage.local import compute_crc32c
from utils.storage.places import open_folder

if TYPE_CHECKING:
    from utils.config.distill import DistillSection

# Names in a batch's draws, followed by the column's number: `cache_log_probs0`.
LOG_PROBS, INDICES, RESIDUAL = "cache_log_probs", "cache_indices", "cache_residual"
STORED_FEATURES = "cache_features"
# A file up to this size is verified by its checksum, once an epoch: a second or less.
_CHECKED_BYTES = 2**30


class TeacherCache:
    """Replays a cache to one rank, an epoch's files at a time.

    `shard` is (index, count) of the rank; any number of ranks that divides the global batch.
    Columns of `teachers` (`list_hashes`) are read; empty: all. `batch` is the run's global batch if
    rows lie in the order of the examples; None: they are read one after the other. A stream of
    outputs starts over after `epochs`; `columns` are in the order of the teachers, `numbers` theirs
    in a row.
    """

    def __init__(
        self,
        place: str | Path | Folder,
        shard: tuple[int, int] = (0, 1),
        teachers: Sequence[str] = (),
        batch: int | None = None,
    ) -> None:
        self._folder = open_folder(place)
        manifest = read_manifest(self._folder)
        self._steps: int | None = None
        if is_by_example(manifest):
            self._steps = manifest["examples"] // batch if batch else None
            shard = (0, 1)  # any rank may need any example
        self.epochs: int = manifest["epochs"]
        self._shape = read_shape(manifest)
        self.numbers = choose_columns(self._shape.columns, teachers, self._folder)
        self.columns: list[Column] = [self._shape.columns[number] for number in self.numbers]
        self._writers: int = manifest["writers"]
        rows = self._shape.global_batch_size // shard[1]
        self._block = range(shard[0] * rows, (shard[0] + 1) * rows)
        self._check_sizes()
        self._files = contextlib.ExitStack()
        self._epoch = -1
        self._rows: dict[int, np.memmap] = {}

    def read(self, step: int, examples: Tensor | None = None) -> dict[str, Tensor]:
        """Read this rank's outputs of a step, by their names in a batch.

        `examples` are int [B], the indices that the outputs must belong to; None: no check.
        """
        if self._steps is None:
            rows = self.read_rows(step)
        else:
            self._open_epoch(step // self._steps % self.epochs)
            assert examples is not None
            rows = self._rows[0][examples.cpu().numpy()]
        if examples is not None:
            self._check_examples(rows["example"], compute_marks(examples), step)
        outputs: dict[str, Tensor] = {}
        for position, (number, column) in enumerate(zip(self.numbers, self.columns, strict=True)):
            values = torch.from_numpy(unpack_values(rows, number, column))
            if column.kind != CLASSES:
                outputs[f"{STORED_FEATURES}{position}"] = values
                continue
            indices, rest = rows[f"indices{number}"], rows[f"rest{number}"]
            outputs[f"{LOG_PROBS}{position}"] = values
            outputs[f"{INDICES}{position}"] = torch.from_numpy(indices.astype(np.int32))
            outputs[f"{RESIDUAL}{position}"] = torch.from_numpy(np.exp(rest.astype(np.float32)))
        return outputs

    def read_rows(self, step: int) -> np.ndarray:
        """Read this rank's rows [B] of a step, as they are stored."""
        epoch, step_in_epoch = divmod(step, self._shape.steps_per_epoch)
        self._open_epoch(epoch % self.epochs)
        size = self._shape.global_batch_size // self._writers
        pieces = []
        for writer, rows in self._rows.items():
            first = writer * size
            start, stop = max(self._block.start, first), min(self._block.stop, first + size)
            offset = step_in_epoch * size - first
            pieces.append(rows[offset + start : offset + stop])
        return np.concatenate(pieces)

    def close(self) -> None:
        self._rows = {}
        self._files.close()
        self._epoch = -1

    def _open_epoch(self, epoch: int) -> None:
        """Open this rank's files of an epoch: on the disk, or fetched from a URL."""
        if epoch == self._epoch:
            return
        self.close()
        size = self._shape.global_batch_size // self._writers
        for writer in range(self._block.start // size, -(-self._block.stop // size)):
            name = get_file_name(epoch, writer, self._writers)
            path = self._files.enter_context(self._folder.open_local(name))
            self._check_bytes(path, name)
            self._rows[writer] = np.memmap(path, self._shape.row_dtype, mode="r")
        self._epoch = epoch

    def _check_bytes(self, path: Path, name: str) -> None:
        """Refuse a file that differs from what was written; `verify` checks larger ones."""
        if path.stat().st_size > _CHECKED_BYTES:
            return
        facts = self._folder.read_texts([f"{name[:-4]}.json"])
        wanted = json.loads(next(iter(facts.values()), "{}")).get("crc32c")
        if wanted is not None and compute_crc32c(path) != wanted:
            raise UserError(
                f"distill.teacher_cache: {self._folder}/{name} is damaged (its CRC32C differs); "
                "delete it and store it again by the command that made the cache"
            )

    def _check_examples(self, stored: np.ndarray, seen: np.ndarray, step: int) -> None:
        wrong = int(((stored != seen) & (stored > 0)).sum())
        if wrong:
            raise UserError(
                f"distill.teacher_cache ({str(self._folder)!r}) holds outputs for other examples: "
                f"{wrong} of {len(seen)} differ at step {step}; make the cache again with this "
                "run's configuration and dataset"
            )

    def _check_sizes(self) -> None:
        size = self._shape.row_dtype.itemsize * (self._shape.global_batch_size // self._writers)
        for epoch in range(self.epochs):
            wanted = self._shape.count_steps(epoch) * size
            for writer in range(self._writers):
                name = get_file_name(epoch, writer, self._writers)
                try:
                    actual = f"{self._folder.get_size(name)} bytes"
                except FileNotFoundError:
                    actual = "missing"
                if actual != f"{wanted} bytes":
                    raise UserError(
                        f"distill.teacher_cache: {self._folder}/{name} is {actual} instead of "
                        f"{wanted} bytes; finish it by python -m tools.cache write"
                    )


def get_stored_answers(batch: Batch) -> tuple[SparseTeacher, ...]:
    """Return the stored outputs for a batch's examples, of each teacher; empty without a cache."""
    names = LOG_PROBS, INDICES, RESIDUAL
    return tuple(
        SparseTeacher(*(batch.draws[f"{name}{number}"] for name in names))
        for number in _list_numbers(batch, LOG_PROBS)
    )


def get_stored_features(batch: Batch) -> tuple[Tensor, ...]:
    """Return float32 [B, D] or [B, places, D] of each column of features, by teachers."""
    numbers = _list_numbers(batch, STORED_FEATURES)
    return tuple(batch.draws[f"{STORED_FEATURES}{number}"] for number in numbers)


def combine_stored(
    answers: Sequence[SparseTeacher], num_classes: int, weights: Sequence[float], ensemble: str
) -> tuple[tuple[Tensor, ...], SparseTeacher | None]:
    """Combine stored outputs for the losses: logits of several teachers, or the only output."""
    if len(answers) < 2:
        return (), answers[0] if answers else None
    dense = [compute_dense_log_probs(answer, num_classes) for answer in answers]
    return combine_answers(dense, weights, ensemble), None


def open_cache(
    section: DistillSection,
    stream: JsonMapping,
    teachers: list[str],
    shard: tuple[int, int],
    total_steps: int,
) -> TeacherCache:
    """Open the cache of a run and check it against the run.

    `stream` is `describe_stream` of this run; `teachers` are hashes of those that the run names, or
    empty for all of the cache. UserError if the cache belongs to another stream or teacher (the
    difference is named), is not whole, or holds fewer epochs than the run's `total_steps` need.
    """
    folder = open_folder(section.teacher_cache)
    manifest = read_manifest(folder)
    then = manifest["stream"]
    # The device has yet to decide what is None.
    known = {name: then.get(name) if value is None else value for name, value in stream.items()}
    shape, batch = read_shape(manifest), None
    if is_by_example(manifest):
        # It needs the preprocessing language, which other caches do not.
        describe_images = load_object("tasks.teachers.cache.by_example:describe_images")
        batch, known = stream["global_batch_size"], describe_images(stream, folder)
        shape = replace(shape, steps_per_epoch=manifest["examples"] // batch, steps=None)
    refuse_difference(folder, manifest, {"stream": known}, "distill.teacher_cache")
    end = "cycle" if manifest["is_reused"] else section.cache_end
    _check_length(shape, total_steps, end, str(folder))
    return TeacherCache(folder, shard, teachers, batch)


def _list_numbers(batch: Batch, name: str) -> list[int]:
    """List numbers of the columns of one kind that a batch carries."""
    return sorted(int(key.removeprefix(name)) for key in batch.draws if key.startswith(name))


def _check_length(shape: CacheShape, total_steps: int, end: str, folder: str) -> None:
    """Refuse a run that is longer than its cache, unless that may start over."""
    is_whole = shape.total_steps == shape.epochs * shape.steps_per_epoch
    if total_steps <= shape.total_steps or (is_whole and end == "cycle"):
        return
    if not is_whole:
        raise UserError(
            f"distill.teacher_cache ({folder!r}) holds {shape.total_steps} steps, the run needs "
            f"{total_steps}, and only whole epochs can start over; store more, or lower train.steps"
        )
    needed = total_steps / shape.steps_per_epoch
    raise UserError(
        f"distill.teacher_cache ({folder!r}) holds {shape.epochs} epochs, the run needs "
        f"{needed:g}; store more, lower train.epochs, or set distill.cache_end=cycle"
    )
