"""`EpochMeans`: a line of each epoch, from its lines of training alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from store.record.catalogue import EPOCH, GRAD_NORM, LOSS, TRAIN
from store.record.history import Line


class EpochMeans:
    """Means over the log points of an epoch, its seconds and its examples.

    Seconds and examples are those from the last log point of the epoch before to its own last one.
    Everything is a function of the lines of training, so a resumed run writes the same lines; no
    value is read from the device for it. An epoch without a log point has no line.
    """

    def __init__(self, steps_per_epoch: int, global_batch_size: int) -> None:
        self._steps, self._batch = steps_per_epoch, global_batch_size
        self.restore(())

    def restore(self, lines: Iterable[Line]) -> None:
        """Continue after these lines of a run."""
        self._last: Line = {"step": 0}  # of training
        self._start: Line = self._last  # the same when the running epoch began
        self._values: dict[str, list[float]] = defaultdict(list)
        for line in lines:
            if line["kind"] == EPOCH:
                self._begin()
            else:
                self.surround(line)

    def surround(self, line: Line) -> list[Line]:
        """Return a line of training or evaluation with those of epochs that it completes."""
        is_train, step = line["kind"] == TRAIN, line["step"]
        end = -(-self._last["step"] // self._steps) * self._steps  # of the last point's epoch
        lines = [line]
        if self._values and (end < step or (end == step and not is_train)):
            lines.insert(0, self._close(end))
        if is_train:
            self._last = line
            for name, value in line.items():
                if value is not None and (name.startswith(LOSS) or name == GRAD_NORM):
                    self._values[name].append(value)
            if step % self._steps == 0 and self._values:
                lines.append(self._close(step))
        return lines

    def _close(self, end: int) -> Line:
        first, last = self._start, self._last
        line: Line = {"step": end, "kind": EPOCH}
        if "attempt" in last:
            line["attempt"] = last["attempt"]
        line["epoch"] = end / self._steps
        line |= {name: sum(values) / len(values) for name, values in self._values.items()}
        if "time_s" in last:
            line["epoch_s"] = last["time_s"] - first.get("time_s", 0.0)
        line["examples"] = (last["step"] - first["step"]) * self._batch
        self._begin()
        return line

    def _begin(self) -> None:
        self._start, self._values = self._last, defaultdict(list)
