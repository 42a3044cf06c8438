"""What the service is told at its start: which store, where it listens, how much it takes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from utils.storage.places import get_user_cache, is_remote, to_path

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Limits:
    """How much one request, one client or all of them may ask for.

    Attributes:
      body_bytes: of a request.
      json_depth: brackets within brackets in a request.
      header_bytes, header_count: of a request, its address included.
      receive_s: until a request's last byte is here.
      streams: event streams that are open at once.
      changes_per_minute: requests of one client that are to change something.
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
    """Where the service finds runs, keeps what it must know, and whom it answers.

    Attributes:
      store: the `run.output_dir` of the runs, a directory or a URL.
      index: another database of the run index; empty: a file in the user's cache.
      token_file: hashes of all tokens; none: in `state_folder`.
      hosts: names by which the service may be called, without a port.
      roots: directories, or buckets as gs://bucket, that a submission may name places in.
    """

    store: str
    index: str = ""
    token_file: Path | None = None
    hosts: tuple[str, ...] = LOOPBACK
    roots: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    @property
    def state_folder(self) -> Path:
        """Where the service keeps what it must know."""
        return choose_folder(self.store, "service")

    @property
    def tokens_path(self) -> Path:
        """The file of tokens."""
        return self.token_file or self.state_folder / "tokens.json"

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers send those of one port of a host to all its ports."""
        return f"trainer_{_hash(self.store)}"


def choose_folder(store: str, name: str) -> Path:
    """A folder of this machine for a store: in it, or in the user's cache for a bucket's."""
    if not is_remote(store):
        return to_path(store) / name
    return get_user_cache("trainer", name, _hash(store))


def _hash(store: str) -> str:
    text = store.rstrip("/") if is_remote(store) else str(to_path(store).resolve())
    return hashlib.sha256(text.encode()).hexdigest()[:12]
