"""Tokens of 32 random bytes; only their hashes are kept, in a file that its owner alone can read.

A start token signs in once; the browser then has a cookie with a token of its own. Tokens with a
name, for programs and other people, stay until they are removed from the file; a cookie that was
given for one of them ends with it.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.locks import hold_file

Role = Literal["view", "submit", "admin"]
ROLES: tuple[str, ...] = get_args(Role)
COOKIE_S = 30 * 24 * 3600
_START_S = 24 * 3600
_MOST_SESSIONS = 200
_NAME = re.compile(r"[\w.@-]{1,64}")


@dataclass(frozen=True)
class Identity:
    """The owner of a valid token."""

    who: str
    role: Role

    def may(self, needed: Role) -> bool:
        """Return whether the role is sufficient; each role includes those before it in `ROLES`."""
        return ROLES.index(self.role) >= ROLES.index(needed)


class TokenBook:
    """The tokens of the service.

    Args:
      path: of the file; it is read again after another program has changed it.

    Raises:
      UserError: others can read the file, or it is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._start: dict[str, JsonObject] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._rows: list[JsonObject] = []
        with self._lock:
            self._read()

    def create_start(self, role: Role = "admin") -> str:
        """Create a token that signs in once, while this process lives."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._start[_hash(token)] = _describe(get_user(), role, "start", _START_S)
        return token

    def add(self, who: str, role: str) -> str:
        """Create a named token that stays; it is shown only once.

        Raises:
          UserError: malformed name, or unknown role.
        """
        if not _NAME.fullmatch(who):
            raise UserError(f"token name ({who!r}): use at most 64 letters, digits and . _ @ -")
        if role not in ROLES:
            raise UserError(f"role ({role!r}): choose one of {', '.join(ROLES)}")
        return self._keep(_describe(who, role, "named", None))

    def sign_in(self, token: str) -> str | None:
        """Create a cookie's token from a start token or a named one; None for any other."""
        with self._lock:
            self._read()
            start = _find(self._start, token)
            if start is not None:
                self._start.pop(_hash(token))
            row = start or self._look_up(token)
        if row is None or row["kind"] == "session":
            return None
        session = _describe(row["who"], row["role"], "session", COOKIE_S)
        parent = "" if start is not None else _hash(token)
        return self._keep({**session, "parent": parent})

    def identify(self, token: str) -> Identity | None:
        """Return the owner of a token; None if it is unknown or expired."""
        with self._lock:
            self._read()
            row = self._look_up(token)
        return Identity(row["who"], row["role"]) if row else None

    def sign_out(self, token: str) -> None:
        """Forget a cookie's token."""
        with self._changing():
            digest = _hash(token)
            self._write([r for r in self._rows if r["sha256"] != digest or r["kind"] == "named"])

    def _look_up(self, token: str) -> JsonObject | None:
        rows = {row["sha256"]: row for row in self._rows}
        row = _find(rows, token)
        return row if row is not None and _has_parent(row, rows) else None

    def _keep(self, row: JsonObject) -> str:
        token = secrets.token_urlsafe(32)
        with self._changing():
            known = {old["sha256"]: old for old in self._rows}
            rows = [old for old in self._rows if _is_valid(old) and _has_parent(old, known)]
            sessions = [old for old in rows if old["kind"] == "session"][-_MOST_SESSIONS:]
            named = [old for old in rows if old["kind"] == "named"]
            self._write([*named, *sessions, {"sha256": _hash(token), **row}])
        return token

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Read the file and keep other threads and programs from changing it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, hold_file(self.path.with_name(f"{self.path.name}.lock")):
            self._read()
            yield

    def _read(self) -> None:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._rows = []
            self._stamp = None
            return
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{self.path} is no file; give a token file, or a path for a new one")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(
                f"{self.path} can be read by others; make it yours alone: chmod 600 {self.path}"
            )
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._stamp:
            return
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["tokens"]
            well_formed = all(_is_row(row) for row in rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} is no token file: {error}; delete it, and all must sign in again"
            ) from error
        if not well_formed:
            raise UserError(f"{self.path} is no token file; delete it, and all must sign in again")
        self._rows, self._stamp = rows, stamp

    def _write(self, rows: list[JsonObject]) -> None:
        temporary = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"tokens": rows}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._rows, self._stamp = rows, None


def _find(rows: dict[str, JsonObject], token: str) -> JsonObject | None:
    """Find the row of a token; the time that it takes reveals nothing about the hashes."""
    digest, match = _hash(token), None
    for known, row in rows.items():
        if hmac.compare_digest(known, digest):
            match = row
    return match if match and _is_valid(match) else None


def _describe(who: str, role: str, kind: str, lives_s: int | None) -> JsonObject:
    now = int(time.time())
    return {
        "who": who,
        "role": role,
        "kind": kind,
        "created": now,
        "expires": None if lives_s is None else now + lives_s,
    }


def _is_row(row: JsonObject) -> bool:
    expires = row.get("expires")
    return (
        all(isinstance(row.get(key), str) for key in ("sha256", "who", "kind"))
        and row.get("role") in ROLES
        and (expires is None or isinstance(expires, int | float))
    )


def _is_valid(row: JsonObject) -> bool:
    return row["expires"] is None or row["expires"] > time.time()


def _has_parent(row: JsonObject, rows: dict[str, JsonObject]) -> bool:
    """Return whether a cookie's named token still exists; True for the cookie of a start token."""
    if row["kind"] != "session":
        return True
    # Rows without this field predate it: their token is unknown.
    parent = row.get("parent")
    return parent == "" or (parent in rows and _is_valid(rows[parent]))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", errors="replace")).hexdigest()


def get_user() -> str:
    """Return the user who started this program."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "owner"
