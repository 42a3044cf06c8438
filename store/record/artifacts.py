"""Uploads, checks and lists the files that a run leaves besides checkpoints and metrics."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from store.query.tags import TAGS_FILE
from store.record.attempts import ATTEMPTS_FILE
from store.record.ids import RUN_FILE
from store.record.lock import LOCK_FILE
from utils.json_types import JsonObject
from utils.storage.local import compute_crc32c, write_atomically
from utils.storage.places import open_folder

ARTIFACTS_FILE = "artifacts.json"
# Not artifacts: they still change, or other modules upload them.
_OTHERS = {LOCK_FILE, RUN_FILE, ATTEMPTS_FILE, ARTIFACTS_FILE, TAGS_FILE, "checkpoints"}
_KINDS = {
    ".safetensors": "weights",
    ".png": "picture",
    ".jsonl": "metrics",
    ".yaml": "config",
    ".json": "facts",
    ".zst": "source",
    ".bin": "answers",
}


def publish_artifacts(folder: Path, remote: str = "") -> list[JsonObject]:
    """List a run's files with their checksums in `artifacts.json`, and upload them.

    Args:
      remote: the run's URL on a bucket; empty without one.

    Returns:
      `path`, `kind`, `bytes`, `sha256` and `crc32c` of each; object stores keep crc32c themselves.

    Raises:
      OSError: the store refuses, or holds other bytes than were sent.
    """
    target = open_folder(remote) if remote else None
    artifacts = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or name.parts[0] in _OTHERS or name.name.endswith(".tmp"):
            continue
        checksum = compute_crc32c(path) if target is None else target.put_file(path, str(name))
        kind = "trace" if name.parts[0] == "profile" else _KINDS.get(name.suffix, "file")
        if ".tfevents." in name.name:
            kind = "events"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        artifacts.append(
            {
                "path": name.as_posix(),
                "kind": kind,
                "bytes": path.stat().st_size,
                "sha256": digest,
                "crc32c": f"{checksum:08x}",
            }
        )
    text = json.dumps({"schema_version": 2, "artifacts": artifacts}, indent=1) + "\n"
    write_atomically(folder / ARTIFACTS_FILE, text)
    if target is not None:
        target.write_text(ARTIFACTS_FILE, text)
    return artifacts
