"""Reads a request's body up to its limit, and checks how deep it nests."""

from __future__ import annotations

import re

from starlette.requests import ClientDisconnect
from starlette.types import Receive

# Brackets inside texts do not count.
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_INNERMOST = re.compile(rb"\[\]|\{\}")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


class BodyTooLarge(ValueError):
    """More bytes than a request may have."""


class BodyTooDeep(ValueError):
    """More brackets within brackets than a request may have."""


async def read_body(receive: Receive, declared: str | None, limit: int) -> bytes:
    """Read a request's whole body.

    Args:
      declared: its Content-Length, which is trusted if too large; None without the header.

    Raises:
      BodyTooLarge: it has more bytes than `limit`; at most one piece beyond it is held.
      ClientDisconnect: the client has gone.
    """
    if declared is not None and (not declared.isdecimal() or int(declared) > limit):
        raise BodyTooLarge(declared)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge(str(len(body)))
        if not message.get("more_body", False):
            return bytes(body)


def check_depth(body: bytes, limit: int) -> None:
    """Raise `BodyTooDeep` for a text with more nested brackets than `limit`, valid or not."""
    brackets = _TEXTS.sub(b"", body).translate(None, _OTHERS)
    # Each round removes the innermost pairs; a loop over single brackets would take seconds.
    for _ in range(limit):
        left = _INNERMOST.sub(b"", brackets)
        if len(left) == len(brackets):
            break
        brackets = left
    else:
        if brackets:
            raise BodyTooDeep
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            raise BodyTooDeep
