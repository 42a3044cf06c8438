"""`Feeder`: a thread that moves batches to the device ahead of the loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Feeder(Iterator[T]):
    """Iterates over batches that a thread reads and moves to the device.

    `next` raises errors of the thread, of the source or the transfer. `wait_s` is the wait of the
    last `next`. Leaving the `with` block ends the thread, even if batches are left.
    """

    def __init__(self, batches: Iterable[T], to_device: Callable[[T], T], depth: int = 2) -> None:
        self.wait_s = 0.0
        self._queue: queue.Queue[T | BaseException | None] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._feed, args=(batches, to_device), name="feeder", daemon=True
        )
        self._thread.start()

    def __next__(self) -> T:
        start = time.perf_counter()
        item = self._queue.get()
        self.wait_s = time.perf_counter() - start
        if isinstance(item, BaseException):
            self._put(item)
            raise item
        if item is None:  # the end
            self._put(None)
            raise StopIteration
        return item

    def __iter__(self) -> Iterator[T]:
        return self

    def __enter__(self) -> Feeder[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            if not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)

    def _feed(self, batches: Iterable[T], to_device: Callable[[T], T]) -> None:
        try:
            for batch in batches:
                if not self._put(to_device(batch)):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: T | BaseException | None) -> bool:
        """Queue an item unless the loop has ended; return whether it was queued."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
