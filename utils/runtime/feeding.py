"""`Feeder`: a thread that keeps batches on the device ahead of the loop and hides no error."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_END = object()


class Feeder(Iterator[T]):
    """Iterates over batches that a thread draws and moves to the device.

    What the thread meets, an error of the source or of the transfer, is raised by `next` with its
    cause. `wait_s` is the time the last `next` had to wait. Leaving the `with` block ends the
    thread, however many batches are left.
    """

    def __init__(self, batches: Iterable[T], to_device: Callable[[T], T], depth: int = 2) -> None:
        self.wait_s = 0.0
        self._queue: queue.Queue[object] = queue.Queue(maxsize=depth)
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
        if item is _END:
            self._put(_END)
            raise StopIteration
        return item

    def __iter__(self) -> Iterator[T]:
        return self

    def __enter__(self) -> Feeder[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and drop what it holds."""
        self._stop.set()
        while self._thread.is_alive():
            with_item = not self._queue.empty()
            if with_item:
                self._queue.get_nowait()
            self._thread.join(timeout=0.05)

    def _feed(self, batches: Iterable[T], to_device: Callable[[T], T]) -> None:
        try:
            for batch in batches:
                if not self._put(to_device(batch)):
                    return
            self._put(_END)
        except BaseException as error:
            self._put(error)

    def _put(self, item: object) -> bool:
        """Queue an item unless the loop has gone; tells whether it was queued."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
