"""The service's settings: its store, its address, its limits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from utils.storage.places import get_user_cache, is_remote, to_path

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Limits:
    """Limits of one request, one client or all of them."""

    body_bytes: int = 1 << 20
    json_depth: int = 32  # nested brackets in a request
    header_bytes: int = 16 << 10  # of a request, its address included
    header_count: int = 64
    receive_s: float = 10.0  # until a request's last byte has arrived
    streams: int = 64  # that are open at once
    changes_per_minute: int = 60  # of one client


@dataclass(frozen=True)
class ServiceSettings:
    """Store, state, host names and limits of the service."""

    store: str  # the `run.output_dir` of the runs, a directory or a URL
    index: str = ""  # another database of the run index; a file in the user's cache if empty
    token_file: Path | None = None  # hashes of all tokens; in `state_folder` by default
    hosts: tuple[str, ...] = LOOPBACK  # accepted names of the service, without a port
    roots: tuple[str, ...] = ()  # paths in submissions lie below: directories, or gs://bucket
    limits: Limits = field(default_factory=Limits)
    allow_imports: bool = False  # whether submissions may import modules (run.imports)

    @property
    def state_folder(self) -> Path:
        """Where the service keeps its state: in the store, or for a bucket in the user's cache."""
        if is_remote(self.store):
            name = _hash(self.store)
            return get_user_cache("service", name, former=f"trainer/service/{name}")
        return to_path(self.store) / "service"

    @property
    def tokens_path(self) -> Path:
        """The file of tokens."""
        return self.token_file or self.state_folder / "tokens.json"

    @property
    def cookie(self) -> str:
        """Name of the cookie, one for each store: browsers share cookies among a host's ports."""
        return f"trainer_{_hash(self.store)}"


def _hash(store: str) -> str:
    text = store.rstrip("/") if is_remote(store) else str(to_path(store).resolve())
    return hashlib.sha256(text.encode()).hexdigest()[:12]
