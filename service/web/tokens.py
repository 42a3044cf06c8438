"""Who asks: tokens of 32 random bytes, of which only hashes are kept, in a file of its owner alone.

A start token signs in once; the browser then has a cookie with a token of its own. Tokens with a
name stay until they are removed from the file, for programs and for other people; a cookie that was
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
    """Somebody who has shown a token."""

    who: str
    role: Role

    def may(self, needed: Role) -> bool:
        """Whether the role is enough; each may do what those before it may."""
        return ROLES.index(self.role) >= ROLES.index(needed)


class TokenBook:
    """The tokens that the service knows.

    Args:
      path: of the file; it is read again when another program has changed it.

    Raises:
      UserError: others can read the file, or it says something else.
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
        """A token that signs in once, while this process lives."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            self._start[_hash(token)] = _describe(get_user(), role, "start", _START_S)
        return token

    def add(self, who: str, role: str) -> str:
        """A token with a name that stays; it is told this once.

        Raises:
          UserError: no name, or no role.
        """
        if not _NAME.fullmatch(who):
            raise UserError(f"token's name ({who!r}): use at most 64 letters, digits and . _ @ -")
        if role not in ROLES:
            raise UserError(f"role ({role!r}): choose one of {', '.join(ROLES)}")
        return self._keep(_describe(who, role, "named", None))

    def sign_in(self, token: str) -> str | None:
        """A cookie's token for a start token or one with a name; none: it is neither."""
        with self._lock:
            self._read()
            start = _find(self._start, token)
            if start is not None:
                self._start.pop(_hash(token))
            found = start or self._look_up(token)
        if found is None or found["kind"] == "session":
            return None
        row = _describe(found["who"], found["role"], "session", COOKIE_S)
        parent = "" if start is not None else _hash(token)
        return self._keep({**row, "parent": parent})

    def identify(self, token: str) -> Identity | None:
        """Who has a token; none: nobody, or it is too old."""
        with self._lock:
            self._read()
            found = self._look_up(token)
        return Identity(found["who"], found["role"]) if found else None

    def sign_out(self, token: str) -> None:
        """Forget a cookie's token."""
        with self._changing():
            digest = _hash(token)
            self._write([r for r in self._rows if r["sha256"] != digest or r["kind"] == "named"])

    def _look_up(self, token: str) -> JsonObject | None:
        rows = {row["sha256"]: row for row in self._rows}
        found = _find(rows, token)
        return found if found is not None and _has_parent(found, rows) else None

    def _keep(self, row: JsonObject) -> str:
        token = secrets.token_urlsafe(32)
        with self._changing():
            known = {one["sha256"]: one for one in self._rows}
            rows = [one for one in self._rows if _is_valid(one) and _has_parent(one, known)]
            sessions = [one for one in rows if one["kind"] == "session"][-_MOST_SESSIONS:]
            named = [one for one in rows if one["kind"] == "named"]
            self._write([*named, *sessions, {"sha256": _hash(token), **row}])
        return token

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """The file as it is, while no other thread and no other program changes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, hold_file(self.path.with_name(f"{self.path.name}.lock")):
            self._read()
            yield

    def _read(self) -> None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            self._rows, self._stamp = [], None
            return
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{self.path} is no file; give one of tokens, or a name for a new one")
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(
                f"{self.path} can be read by others; make it yours alone: chmod 600 {self.path}"
            )
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))["tokens"]
            well_formed = all(_is_row(row) for row in rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} is no file of tokens: {error}; delete it, and all sign in again"
            ) from error
        if not well_formed:
            raise UserError(f"{self.path} is no file of tokens; delete it, and all sign in again")
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
    """The row of a token; how long it takes tells nothing of the hashes."""
    digest, found = _hash(token), None
    for known, row in rows.items():
        if hmac.compare_digest(known, digest):
            found = row
    return found if found and _is_valid(found) else None


def _describe(who: str, role: str, kind: str, lives_s: int | None) -> JsonObject:
    now = int(time.time())
    return {
        "who": who, "role": role, "kind": kind, "created": now,
        "expires": None if lives_s is None else now + lives_s,
    }  # fmt: skip


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
    """Whether the named token that a cookie was given for is still there, where there was one."""
    if row["kind"] != "session":
        return True
    # A row without the field is of nobody knows which token.
    parent = row.get("parent")
    return parent == "" or (parent in rows and _is_valid(rows[parent]))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", errors="replace")).hexdigest()


def get_user() -> str:
    """Who has started this program."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "owner"
