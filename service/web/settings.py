"""The service's settings: its store, its address, its limits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from utils.storage.places import get_user_cache, is_remote, to_path

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Limits:
    """Limits of one request, one client or all of them.

    Attributes:
      body_bytes: of a request.
      json_depth: nested brackets in a request.
      header_bytes, header_count: of a request, its address included.
      receive_s: until a request's last byte has arrived.
      streams: event streams that are open at once.
      changes_per_minute: requests of one client that change something.
      page_rows: rows of a list in one answer.
      log_bytes: of a log's tail.
    """

    body_bytes: int = 1 << 20
    json_depth: int = 32
    header_bytes: int = 16 << 10
    header_count: int = 64
    receive_s: float = 10.0
    streams: int = 64
    changes_per_minute: int = 60
    page_rows: int = 1000
    log_bytes: int = 256 << 10


@dataclass(frozen=True)
class ServiceSettings:
    """Where the service finds runs, keeps its state, and which names it answers to.

    Attributes:
      store: the `run.output_dir` of the runs, a directory or a URL.
      index: another database of the run index; a file in the user's cache if empty.
      token_file: hashes of all tokens; in `state_folder` by default.
      hosts: names by which the service may be called, without a port.
      roots: directories, or buckets as gs://bucket, in which a submission may name paths.
    """

    store: str
    index: str = ""
    token_file: Path | None = None
    hosts: tuple[str, ...] = LOOPBACK
    roots: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    @property
    def state_folder(self) -> Path:
        """Where the service keeps its state: in the store, or for a bucket in the user's cache."""
        if is_remote(self.store):
            return get_user_cache("trainer", "service", _hash(self.store))
        return to_path(self.store) / "service"

    @property
    def tokens_path(self) -> Path:
        """The file of tokens."""
        return self.token_file or self.state_folder / "tokens.json"

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers send those of one port of a host to all its ports."""
        return f"trainer_{_hash(self.store)}"


def _hash(store: str) -> str:
    text = store.rstrip("/") if is_remote(store) else str(to_path(store).resolve())
    return hashlib.sha256(text.encode()).hexdigest()[:12]
