"""Reads a request's body no further than it may go, and looks how deep it nests."""

from __future__ import annotations

import re

from starlette.requests import ClientDisconnect
from starlette.types import Receive

# Brackets in texts do not count.
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_INNERMOST = re.compile(rb"\[\]|\{\}")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


class BodyTooLarge(ValueError):
    """More bytes than a request may have."""


class BodyTooDeep(ValueError):
    """More brackets within brackets than a request may have."""


async def read_body(receive: Receive, told: str | None, limit: int) -> bytes:
    """A request's whole body.

    Args:
      told: its Content-Length, which is believed where it says too much; none: not told.

    Raises:
      BodyTooLarge: it has more bytes than `limit`; no more than one piece beyond it is held.
      ClientDisconnect: the client has gone.
    """
    if told is not None and (not told.isdecimal() or int(told) > limit):
        raise BodyTooLarge(told)
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
    """Refuse a text of brackets within brackets, whatever else it is.

    Raises:
      BodyTooDeep: there are more than `limit`.
    """
    brackets = _TEXTS.sub(b"", body).translate(None, _OTHERS)
    # Each round takes the innermost pairs away; a loop over single brackets would take seconds.
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
