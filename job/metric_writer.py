"""Writes a run's metrics to their file."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING

from store.record.catalogue import KINDS, METRICS
from store.record.history import (
    METRICS_FILE,
    Line,
    get_numbers,
    keep_until,
    read_metrics,
    write_lines,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from store.record.epoch_means import EpochMeans
    from store.record.mirror import Mirror

# Numbers of a line that count from the run's start.
_COUNTED_ON = ("time_s", "graphs", "graphs_train", "graphs_eval")


class LostRunError(RuntimeError):
    """The run's files are gone, or can no longer be written."""


class MetricWriter:
    """Appends one JSON line for each log point; on rank zero only.

    `folder` is the run's directory. Lines after `first_step` of a resumed run are dropped, and so
    is an evaluation at this step, which is repeated. `attempt` is the number of this program's
    attempt, for every line; 0: without. `mirror` uploads the lines to the run's bucket, if it has
    one; `epochs` adds a line for each epoch.
    """

    def __init__(
        self,
        folder: Path,
        *,
        first_step: int = 0,
        attempt: int = 0,
        mirror: Mirror | None = None,
        epochs: EpochMeans | None = None,
        tensorboard: bool = False,
    ) -> None:
        self.path = folder / METRICS_FILE
        self._attempt, self._mirror, self._epochs = attempt, mirror, epochs
        self._tensorboard = tensorboard
        self._events: SummaryWriter | None = None
        self._file = self._reopen(first_step)
        # Time and graphs count over all attempts; the loop counts those of its own process.
        self._before = self._counts

    def write(self, step: int, kind: str, scalars: dict[str, float]) -> None:
        """Write one line: the step, `train` or `eval`, and its scalars.

        A number that is not finite becomes null, and `nonfinite` contains its name and value.
        UserError if a scalar has no entry in the catalogue of metrics, LostRunError if the line
        cannot be written.
        """
        METRICS.require(scalars)
        line: Line = {"step": step, "kind": kind}
        if self._attempt:
            line["attempt"] = self._attempt
        nonfinite = {name: str(v) for name, v in scalars.items() if not math.isfinite(v)}
        for name, value in scalars.items():
            line[name] = None if name in nonfinite else value + self._before.get(name, 0)
        if nonfinite:
            line["nonfinite"] = nonfinite
        lines = [line] if self._epochs is None else self._epochs.surround(line)
        texts = [json.dumps(line, allow_nan=False) + "\n" for line in lines]
        try:
            self._file.write("".join(texts))
            self._file.flush()
        except OSError as error:
            raise LostRunError(
                f"{self.path} cannot be written: {error.strerror}; free or repair it and resume by "
                "--resume auto"
            ) from error
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise LostRunError(
                f"{self.path} was deleted while the run was writing it; restore the directory from "
                "a copy, or start the run again"
            )
        for line, text in zip(lines, texts, strict=True):
            if self._mirror is not None:
                self._mirror.add_line(text)
            self._show(line)

    def sync(self) -> None:
        """Sync all lines to the disk and the bucket: before a checkpoint that relies on them."""
        os.fsync(self._file.fileno())
        if self._mirror is not None:
            self._mirror.flush()

    def rewind(self, step: int) -> None:
        """Drop the lines after a step, which the run repeats."""
        self._file.close()
        if self._mirror is not None:
            self._mirror.rewind(step)
        self._file = self._reopen(step)

    def close(self) -> None:
        """Close the files; each line was flushed when it was written."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._events is not None:
            with contextlib.suppress(OSError):
                self._events.close()

    def _reopen(self, step: int) -> IO[str]:
        """Open the file, and TensorBoard's, without the lines that will be repeated."""
        kept = (
            keep_until(read_metrics(self.path.parent, KINDS), step) if self.path.is_file() else []
        )
        if kept or self.path.is_file():
            write_lines(self.path.parent, kept)
        self._counts = {
            name: next((line[name] for line in reversed(kept) if line.get(name)), 0)
            for name in _COUNTED_ON
        }
        if self._epochs is not None:
            self._epochs.restore(kept)
        if self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            if self._events is not None:
                self._events.close()
            # TensorBoard drops what purge_step covers, this step's lines included.
            self._events = SummaryWriter(str(self.path.parent), purge_step=step or None)
            for line in (line for line in kept if line["step"] == step):
                self._show(line)
        return self.path.open("a", encoding="utf-8")

    def _show(self, line: Line) -> None:
        if self._events is None:
            return
        for name, value in get_numbers(line).items():
            shown = float(line["nonfinite"][name]) if value is None else value
            self._events.add_scalar(f"{line['kind']}/{name}", shown, line["step"])
