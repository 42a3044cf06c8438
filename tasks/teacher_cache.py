"""Stored teachers: top-k answers to the very stream of examples that a training run sees.

A cache is a directory with `manifest.json` and, for each epoch and each process that wrote it, one
file of fixed-size rows in the order of the global batches: k log-probabilities (float16), k classes
(the smallest unsigned integer type), the logarithm of the remaining mass (float16), and a byte made
of the example's index, by which every batch is checked to be the one that was asked about. Of text
a row holds the answers at all places of a window. The last epoch may be stored in part.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from datasets import Batch
from losses import SparseTeacher
from utils.errors import UserError
from utils.json_types import JsonMapping, JsonObject
from utils.storage import Folder, open_folder

if TYPE_CHECKING:
    from utils.config.distill import DistillSection

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
LOG_PROBS, INDICES, RESIDUAL = "cache_log_probs", "cache_indices", "cache_residual"


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache.

    Args:
      top_k: classes stored for each example.
      num_classes: K of the student.
      epochs: epochs stored.
      steps_per_epoch: global batches of an epoch.
      global_batch_size: examples of a global batch.
      places: answers to an example, of which a window of text has many; 0: a single one.
      steps: global batches stored, where the last epoch is not whole; none: all.
    """

    top_k: int
    num_classes: int
    epochs: int
    steps_per_epoch: int
    global_batch_size: int
    places: int = 0
    steps: int | None = None

    @property
    def total_steps(self) -> int:
        """Global batches stored."""
        return self.epochs * self.steps_per_epoch if self.steps is None else self.steps

    def count_steps(self, epoch: int) -> int:
        """Global batches of an epoch that are stored."""
        return min(self.total_steps - epoch * self.steps_per_epoch, self.steps_per_epoch)

    @property
    def index_dtype(self) -> np.dtype:
        """The smallest unsigned type that holds a class number."""
        return np.min_scalar_type(max(self.num_classes - 1, 0))

    @property
    def row_dtype(self) -> np.dtype:
        """One example's row, packed."""
        places = (self.places,) if self.places else ()
        k = (*places, self.top_k)
        return np.dtype(
            [
                ("log_probs", "<f2", k),
                ("indices", self.index_dtype, k),
                ("rest", "<f2", places),
                ("example", "u1"),
            ]
        )

    @property
    def total_bytes(self) -> int:
        """Size of all rows."""
        return self.total_steps * self.global_batch_size * self.row_dtype.itemsize


def pack_answers(logits: Tensor, shape: CacheShape, examples: Tensor | None = None) -> np.ndarray:
    """Rows [B] of the k best classes of teacher logits [B, K], on the host.

    Args:
      examples: int [B], the examples' indices in the split; none: rows that fit any example.
    """
    log_probs = torch.log_softmax(logits.double(), dim=-1)
    best, indices = log_probs.topk(shape.top_k, dim=-1)
    rest = (1.0 - best.exp().sum(dim=-1)).clamp(min=0.0)
    return _pack(best, indices, rest, shape, examples)


def condense_answers(logits: Tensor, top_k: int) -> Tensor:
    """Float32 [..., 2 k + 1] of logits [..., K]: what a cache keeps of them, made on the device.

    They are k log-probabilities, their k classes, which float32 holds exactly up to 2^24, and the
    rest of the mass.
    """
    log_probs = torch.log_softmax(logits.float(), dim=-1)
    best, indices = log_probs.topk(top_k, dim=-1)
    rest = (1.0 - best.exp().sum(dim=-1, keepdim=True)).clamp(min=0.0)
    return torch.cat([best, indices.float(), rest], dim=-1)


def pack_condensed(values: Tensor, shape: CacheShape, examples: Tensor) -> np.ndarray:
    """Rows [B] of what `condense_answers` has made, on the host."""
    best, indices, rest = values.split([shape.top_k, shape.top_k, 1], dim=-1)
    return _pack(best, indices, rest.squeeze(-1), shape, examples)


def _pack(
    best: Tensor, indices: Tensor, rest: Tensor, shape: CacheShape, examples: Tensor | None
) -> np.ndarray:
    if shape.top_k == shape.num_classes:
        rest = torch.zeros_like(rest)
    rows = np.zeros(len(best), shape.row_dtype)
    rows["log_probs"] = best.numpy()
    rows["indices"] = indices.numpy()
    rows["rest"] = rest.log().numpy()
    if examples is not None:
        rows["example"] = compute_marks(examples)
    return rows


def compute_marks(examples: Tensor) -> np.ndarray:
    """[B] uint8 of 1..255: a byte of a multiplicative hash of each example's index."""
    mixed = examples.cpu().numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(40)) % np.uint64(255) + np.uint64(1)


class CacheWriter:
    """Writes one process's rows of one epoch; continues where an earlier process stopped.

    Rows go to a `.part` file, whose name loses that ending when all that the shape has of the epoch
    is stored. It gets that ending again where a longer cache wants more.
    """

    def __init__(
        self, folder: Path, shape: CacheShape, epoch: int, shard: tuple[int, int] = (0, 1)
    ) -> None:
        self._path = folder / _get_file_name(epoch, *shard)
        self._part = self._path.with_suffix(".part")
        self._mark = self._path.with_suffix(".progress")
        self._rows_per_step = shape.global_batch_size // shard[1]
        self._steps = shape.count_steps(epoch)
        self._rows: np.memmap | None = None
        self.steps_done = 0
        if self._path.is_file():
            stored = self._path.stat().st_size // shape.row_dtype.itemsize
            self.steps_done = min(stored // self._rows_per_step, self._steps)
            if self.is_complete:
                return
            self._mark.write_text(str(self.steps_done))
            self._path.replace(self._part)
        count = self._steps * self._rows_per_step
        is_new = not self._part.is_file() or not self._mark.is_file()
        if not is_new:
            self.steps_done = int(self._mark.read_text())
        self._rows = np.memmap(
            self._part, shape.row_dtype, mode="w+" if is_new else "r+", shape=(count,)
        )

    @property
    def is_complete(self) -> bool:
        """Whether every step of the epoch is stored."""
        return self.steps_done == self._steps

    def append(self, rows: np.ndarray) -> None:
        """Store the next step's rows; progress is kept every 50 steps and at the end."""
        start = self.steps_done * self._rows_per_step
        self._rows[start : start + self._rows_per_step] = rows
        self.steps_done += 1
        if self.steps_done % 50 == 0 or self.is_complete:
            self.flush()

    def flush(self) -> None:
        """Make what is stored so far safe; name the file when the epoch is whole."""
        if self._rows is None:
            return
        self._rows.flush()
        self._mark.write_text(str(self.steps_done))
        if self.is_complete:
            self._rows = None
            self._part.replace(self._path)
            self._mark.unlink()


def write_manifest(
    folder: Path, stream: JsonMapping, teachers: list[str], shape: CacheShape, writers: int
) -> None:
    """Say what a cache holds; one that is there already must say the same, but for more steps."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "stream": dict(stream),
        "teachers": teachers,
        "top_k": shape.top_k,
        "steps_per_epoch": shape.steps_per_epoch,
        "epochs": shape.epochs,
        "writers": writers,
        "bytes_per_example": shape.row_dtype.itemsize,
    }
    if shape.places:
        manifest["places"] = shape.places
    path = folder / MANIFEST
    if path.is_file():
        old = read_manifest(folder)
        _refuse_difference(folder, old, {**manifest, "epochs": old["epochs"]}, "--out")
        shape = max(_read_shape(old), shape, key=lambda one: one.total_steps)
    manifest["epochs"] = shape.epochs
    if shape.total_steps < shape.epochs * shape.steps_per_epoch:
        manifest["steps"] = shape.total_steps
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_manifest(place: str | Path | Folder) -> JsonObject:
    """The manifest of a cache.

    Raises:
      UserError: none there, or of another format.
    """
    folder = open_folder(place)
    try:
        manifest = json.loads(folder.read_text(MANIFEST))
    except (OSError, ValueError) as error:
        raise UserError(
            f"distill.teacher_cache ({str(folder)!r}): no readable {MANIFEST} ({error}); make the "
            "cache by python -m tools.cache_teacher"
        ) from error
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"distill.teacher_cache ({str(folder)!r}) has format "
            f"{manifest.get('format_version')}, this program reads {FORMAT_VERSION}; make it again"
        )
    return manifest


class TeacherCache:
    """Replays a cache to one rank, an epoch's files at a time.

    Args:
      shard: (index, count) of the rank; any number of ranks that divides the global batch.
    """

    def __init__(self, place: str | Path | Folder, shard: tuple[int, int] = (0, 1)) -> None:
        self._folder = open_folder(place)
        manifest = read_manifest(self._folder)
        self.epochs: int = manifest["epochs"]
        self._shape = _read_shape(manifest)
        self._writers: int = manifest["writers"]
        rows = self._shape.global_batch_size // shard[1]
        self._block = range(shard[0] * rows, (shard[0] + 1) * rows)
        self._check_sizes()
        self._files = contextlib.ExitStack()
        self._epoch = -1
        self._rows: dict[int, np.memmap] = {}

    def read(self, step: int, examples: Tensor | None = None) -> dict[str, Tensor]:
        """This rank's answers of a step: log-probabilities, classes and remaining mass.

        Args:
          examples: int [B], the indices of this rank's examples; none: whatever is stored.

        Raises:
          UserError: the answers are those to other examples.
        """
        epoch, step_in_epoch = divmod(step, self._shape.steps_per_epoch)
        self._open_epoch(epoch % self.epochs)
        size = self._shape.global_batch_size // self._writers
        pieces = []
        for writer, rows in self._rows.items():
            first = writer * size
            start, stop = max(self._block.start, first), min(self._block.stop, first + size)
            offset = step_in_epoch * size - first
            pieces.append(rows[offset + start : offset + stop])
        found = np.concatenate(pieces)
        if examples is not None:
            self._check_examples(found["example"], compute_marks(examples), step)
        return {
            LOG_PROBS: torch.from_numpy(found["log_probs"].astype(np.float32)),
            INDICES: torch.from_numpy(found["indices"].astype(np.int32)),
            RESIDUAL: torch.from_numpy(np.exp(found["rest"].astype(np.float32))),
        }

    def close(self) -> None:
        """Let go of the files."""
        self._rows = {}
        self._files.close()

    def _open_epoch(self, epoch: int) -> None:
        """Have this rank's files of an epoch at hand: on the disk, or fetched from a URL."""
        if epoch == self._epoch:
            return
        self.close()
        size = self._shape.global_batch_size // self._writers
        for writer in range(self._block.start // size, -(-self._block.stop // size)):
            name = _get_file_name(epoch, writer, self._writers)
            path = self._files.enter_context(self._folder.open_local(name))
            self._rows[writer] = np.memmap(path, self._shape.row_dtype, mode="r")
        self._epoch = epoch

    def _check_examples(self, stored: np.ndarray, seen: np.ndarray, step: int) -> None:
        wrong = int(((stored != seen) & (stored > 0)).sum())
        if wrong:
            raise UserError(
                f"distill.teacher_cache ({str(self._folder)!r}) holds answers to other examples: "
                f"{wrong} of {len(seen)} differ at step {step}; make the cache again with this "
                "run's configuration and dataset"
            )

    def _check_sizes(self) -> None:
        size = self._shape.row_dtype.itemsize * (self._shape.global_batch_size // self._writers)
        for epoch in range(self.epochs):
            wanted = self._shape.count_steps(epoch) * size
            for writer in range(self._writers):
                name = _get_file_name(epoch, writer, self._writers)
                found = self._measure(name)
                if found != f"{wanted} bytes":
                    raise UserError(
                        f"distill.teacher_cache: {self._folder}/{name} is {found} instead of "
                        f"{wanted} bytes; finish it by python -m tools.cache_teacher"
                    )

    def _measure(self, name: str) -> str:
        try:
            return f"{self._folder.get_size(name)} bytes"
        except FileNotFoundError:
            return "missing"


def get_stored_answers(batch: Batch) -> SparseTeacher | None:
    """What a cache has given to a batch's examples; none without a cache."""
    if LOG_PROBS not in batch.draws:
        return None
    return SparseTeacher(*(batch.draws[name] for name in (LOG_PROBS, INDICES, RESIDUAL)))


def open_cache(
    section: DistillSection,
    stream: JsonMapping,
    teachers: list[str],
    shard: tuple[int, int],
    total_steps: int,
) -> TeacherCache:
    """The cache of a run, checked against it.

    Args:
      stream: of `describe_stream` for this run.
      teachers: hashes of the teachers that the run names; empty: whatever the cache holds.
      total_steps: of the run.

    Raises:
      UserError: the cache belongs to another stream or teacher (the difference is named), is not
        whole, or holds fewer epochs than the run needs.
    """
    folder = open_folder(section.teacher_cache)
    manifest = read_manifest(folder)
    known = {name: value for name, value in stream.items() if value is not None}
    wanted = {"stream": known, "teachers": teachers or manifest["teachers"]}
    _refuse_difference(folder, manifest, {**manifest, **wanted}, "distill.teacher_cache")
    shape = _read_shape(manifest)
    _check_length(shape, total_steps, section.cache_end, str(folder))
    return TeacherCache(folder, shard)


def _check_length(shape: CacheShape, total_steps: int, end: str, folder: str) -> None:
    """Refuse a run that is longer than its cache, if that may not start over."""
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


def _read_shape(manifest: JsonMapping) -> CacheShape:
    stream = manifest["stream"]
    return CacheShape(
        manifest["top_k"],
        stream["vocab_size"] if "vocab_size" in stream else stream["num_classes"],
        manifest["epochs"],
        manifest["steps_per_epoch"],
        stream["global_batch_size"],
        manifest.get("places", 0),
        manifest.get("steps"),
    )


def _refuse_difference(
    folder: Path | Folder, found: JsonMapping, wanted: JsonMapping, key: str
) -> None:
    """Name the first thing in which a cache is not what is wanted."""
    for name, value in wanted.items():
        if name == "stream":
            _refuse_difference(folder, found["stream"], value, key)
        elif found.get(name) != value:
            raise UserError(
                f"{key} ({str(folder)!r}) was made with {name} {found.get(name)!r}, here it is "
                f"{value!r}; make the cache again or go back to that {name}"
            )


def _get_file_name(epoch: int, writer: int, writers: int) -> str:
    return f"epoch_{epoch:05d}.{writer:05d}-of-{writers:05d}.bin"
