"""Uploads a run to its bucket while it is written on the disk.

An object store does not append, so new metrics are uploaded as segments `metrics/a003-000017.jsonl`
(attempt, sequence) that never change; a rollback is recorded as a line in them. Small files are
uploaded whole after a change. From the bucket alone the run can be resumed elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
from pathlib import Path

from store.record.attempts import ATTEMPTS_FILE
from store.record.history import REWIND, Line, parse_lines, replay, write_lines
from store.record.hits import HITS_FILE
from store.record.ids import CONFIG_FILE, RUN_FILE
from store.record.spans import SPANS_FILE
from store.record.windows import SKETCHES_FILE
from utils.log import get_logger
from utils.storage.folder import Folder, StorageError
from utils.storage.local import write_atomically
from utils.storage.places import open_folder

SEGMENTS = "metrics"
# Uploaded whole after each change; the rest of a run follows at its end.
_SMALL = (CONFIG_FILE, ATTEMPTS_FILE, SKETCHES_FILE, RUN_FILE)
# Uploaded whole at checkpoints only: it grows, and no result depends on its last lines.
_AT_CHECKPOINTS = (SPANS_FILE,)
_SEGMENT = re.compile(r"a(\d{3,})-(\d{6,})\.jsonl")
_EVERY_S = 30.0
_SENDING = threading.Lock()
_SEGMENT_BYTES = 1 << 20


class Mirror:
    """Uploads metrics and facts of an attempt, from its first step on, in a thread with retries."""

    def __init__(
        self, folder: Path, remote: str, attempt: int, *, from_step: int, every_s: float = _EVERY_S
    ) -> None:
        self._folder, self._remote = folder, open_folder(remote)
        self._attempt, self._sequence = attempt, 0
        self._pending = [json.dumps({REWIND: from_step}) + "\n"]
        self._bytes = 0
        self._sent: dict[str, str] = {}
        self._every_s = every_s
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._wake, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-mirror", daemon=True)
        self._thread.start()

    def add_line(self, text: str) -> None:
        """Add a line of metrics to the next segment."""
        with self._lock:
            self._pending.append(text)
            self._bytes += len(text)
            is_full = self._bytes >= _SEGMENT_BYTES
        if is_full:
            self._wake.set()

    def rewind(self, step: int) -> None:
        """Revoke the lines after a step, which will be repeated."""
        self.add_line(json.dumps({REWIND: step}) + "\n")

    def flush(self) -> None:
        """Upload everything so far, before a checkpoint relies on it, or raise StorageError."""
        self._send(_AT_CHECKPOINTS + _SMALL)
        path = self._folder / HITS_FILE
        with self._sending:
            digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            if digest and self._sent.get(HITS_FILE) != digest:
                self._remote.put_file(path, HITS_FILE)
                self._sent[HITS_FILE] = digest

    def _send(self, names: tuple[str, ...]) -> None:
        with self._sending:
            self._send_segment()
            send_small(self._folder, self._remote, self._sent, names)

    def close(self) -> None:
        """Upload the rest and end the thread; a failure is logged, not raised."""
        self._done.set()
        self._wake.set()
        self._thread.join()
        try:
            self.flush()
        except OSError as error:
            get_logger().error("the run's last lines could not be uploaded: %s", error)

    def _run(self) -> None:
        while not self._done.is_set():
            self._wake.wait(self._every_s)
            self._wake.clear()
            if self._done.is_set():
                return
            try:
                self._send(_SMALL)
            except OSError as error:
                get_logger().warning("the run's metrics could not be uploaded yet: %s", error)

    def _send_segment(self) -> None:
        with self._lock:
            count, text = len(self._pending), "".join(self._pending)
        if not count:
            return
        name = f"a{self._attempt:03d}-{self._sequence:06d}.jsonl"
        self._remote.child(SEGMENTS).write_text(name, text)
        self._sequence += 1
        with self._lock:
            del self._pending[:count]
            self._bytes -= min(self._bytes, len(text))


def send_small(
    folder: Path,
    remote: Folder,
    sent: dict[str, str] | None = None,
    names: tuple[str, ...] = _SMALL,
) -> None:
    """Upload small files whose text differs from that in `sent`, and update `sent`."""
    sent = {} if sent is None else sent
    for name in names:
        path = folder / name
        with _SENDING:  # an older text must not arrive after a newer one
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            if text and sent.get(name) != text:
                remote.write_text(name, text)
                sent[name] = text


def pull(folder: Path, remote: str) -> None:
    """Download a run from its bucket: facts, attempts and the whole history."""
    source = open_folder(remote)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in source.read_texts(_SMALL + _AT_CHECKPOINTS).items():
        write_atomically(folder / name, text)
    if HITS_FILE in source.list_names():
        with source.open_local(HITS_FILE) as path:
            shutil.copyfile(path, folder / HITS_FILE)
    write_lines(folder, read_segments(source))


def read_segments(remote: Folder) -> list[Line]:
    """Read the history in a run's segments, each step once, by attempt and sequence."""
    parent = remote.child(SEGMENTS)
    names = {
        (int(match[1]), int(match[2])): match[0]
        for match in map(_SEGMENT.fullmatch, parent.list_names())
        if match
    }
    for attempt in {attempt for attempt, _ in names}:
        numbers = sorted(number for other, number in names if other == attempt)
        if numbers != list(range(len(numbers))):  # somebody has deleted one
            get_logger().warning(
                "%s: segments of attempt %d are missing; the run's metrics have a gap",
                parent,
                attempt,
            )
    texts = parent.read_texts(names.values())
    lines: list[Line] = []
    for _, name in sorted(names.items()):
        if name not in texts:
            raise StorageError(f"{parent}/{name}: was listed but is not there")
        lines += parse_lines(texts[name])
    return replay(lines)
