"""The gate in front of every route, page, file and stream.

It covers every route, also those added later: in CVE-2026-0545 a route of another tracker was
outside its checks. It checks host, origin and sizes, then the caller and its role.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.web.audit import AuditLog
from service.web.problems import answer_page, answer_problem, wants_page
from service.web.settings import ServiceSettings
from service.web.tokens import Identity, Role, TokenBook
from utils.log import get_logger

START = "/start"
EVENTS = "/api/v1/events"
SUBMIT = "/submit"
# Query key of a submission's page that starts the checks.
ESTIMATE = "estimate"
SAFE = ("GET", "HEAD")
# Paths that need a higher role than their method.
_ROLES: dict[str, Role] = {"/api/v1/audit": "admin"}
# Style and icon of the page that asks a caller to sign in; they hold no data.
_FOR_NOBODY = re.compile(r"/static/(app-[0-9a-f]{12}\.css|icon-[0-9a-f]{12}\.svg)")
# Every role may sign out.
_FOR_ALL = ("/sign-out",)
_BODIES = ("application/json", "application/x-www-form-urlencoded")
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With no-referrer, forms would send Origin: null.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
# Brackets inside JSON strings do not count.
_TEXTS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_INNERMOST = re.compile(rb"\[\]|\{\}")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


class Refusal(Exception):
    """A request that is refused."""

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


class BodyTooLarge(ValueError):
    """More bytes than a request may have."""


class BodyTooDeep(ValueError):
    """Brackets nested deeper than a request may have."""


class SecurityGate:
    """The middleware; `scope["state"]["identity"]` holds the caller for the routes."""

    def __init__(
        self, app: ASGIApp, *, settings: ServiceSettings, tokens: TokenBook, audit: AuditLog
    ) -> None:
        self._app, self._settings, self._tokens, self._audit = app, settings, tokens, audit
        self._streams = 0
        self._changes: dict[str, deque[float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            # There is no websocket here; closing one before it is accepted is a 403.
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        try:
            identity = self._let_in(scope)
            receive = await self._receive(scope, receive)
            await self._pass_on(scope, receive, answer)
        except Refusal as error:
            identity = None
            headers = {name.replace("_", "-"): text for name, text in error.headers.items()}
            if wants_page(scope["path"], Headers(scope=scope).get("accept", "")):
                response = answer_page(Request(scope), error.status, error.detail, headers)
            else:
                response = answer_problem(error.status, error.detail, headers)
            await response(scope, receive, answer.send)
        except ClientDisconnect:
            return
        except Exception:
            get_logger().exception("%s %s failed", scope["method"], scope["path"])
            if answer.status is None:
                response = answer_problem(500, "the service has failed; its log says how")
                await response(scope, receive, answer.send)
        if scope["method"] not in SAFE or scope["path"] == START or starts_check(scope):
            self._note(scope, identity, answer.status or 500)

    def _let_in(self, scope: Scope) -> Identity | None:
        """Identify the caller; None for the start page and the files of the sign-in page.

        Raises:
          Refusal: the request may not go on.
        """
        headers = Headers(scope=scope)
        self._check_size(scope)
        self._check_host(headers)
        self._check_origin(scope["method"], headers)
        is_check = starts_check(scope)
        needed = "submit" if is_check else get_needed_role(scope["method"], scope["path"])
        if needed is None:
            return None
        identity, is_cookie = self._identify(headers)
        if identity is None:
            raise Refusal(
                401,
                "this browser or program is not signed in: open the start URL that the service "
                "prints, or send Authorization: Bearer TOKEN",
                WWW_Authenticate="Bearer",
            )
        scope.setdefault("state", {})["identity"] = identity
        if not identity.may(needed):
            raise Refusal(403, f"role {identity.role} may not do this; it needs {needed}")
        if scope["method"] not in SAFE:
            self._check_sender(headers, is_cookie=is_cookie)
        if scope["method"] not in SAFE or is_check:
            self._count_change(identity)
        return identity

    def _check_size(self, scope: Scope) -> None:
        limits = self._settings.limits
        fields = scope["headers"]
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in fields)
        if size > limits.header_bytes or len(fields) > limits.header_count:
            raise Refusal(431, f"address and headers exceed {limits.header_bytes} bytes")

    def _check_host(self, headers: Headers) -> None:
        """Refuse names that an attacker's server may give to this address (DNS rebinding)."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or split_host(hosts[0]) not in self._settings.hosts:
            raise Refusal(
                421, "this service does not answer under that name; see tools.serve --allow-host"
            )

    def _check_origin(self, method: str, headers: Headers) -> None:
        """Refuse a page of another site that changes something or loads parts from here."""
        site = headers.get("sec-fetch-site", "none")
        is_visit = method in SAFE and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("none", "same-origin") and not is_visit:
            raise Refusal(403, "the request comes from another site; use this service's pages")
        if method in SAFE:
            return
        for origin in headers.getlist("origin"):
            if not is_same_place(origin, headers["host"]):
                raise Refusal(403, "the request is from another origin; use this service's pages")

    def _check_sender(self, headers: Headers, *, is_cookie: bool) -> None:
        if is_cookie and "origin" not in headers and "sec-fetch-site" not in headers:
            raise Refusal(403, "a change with a cookie needs the header Origin; send it too")

    def _count_change(self, identity: Identity) -> None:
        now, limit = time.monotonic(), self._settings.limits.changes_per_minute
        recent = self._changes.setdefault(identity.who, deque())
        while recent and recent[0] < now - 60:
            recent.popleft()
        if len(recent) >= limit:
            wait = str(int(61 - (now - recent[0])))
            raise Refusal(429, f"more than {limit} changes a minute; wait", Retry_After=wait)
        recent.append(now)

    def _check_streams(self) -> None:
        limit = self._settings.limits.streams
        if self._streams >= limit:
            raise Refusal(503, f"{limit} event streams are open; close a tab", Retry_After="10")

    def _identify(self, headers: Headers) -> tuple[Identity | None, bool]:
        """Return the token's owner, and whether a browser sent it as a cookie."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and token:
            return self._tokens.identify(token.strip()), False
        token = read_cookie(headers, self._settings.cookie)
        return (self._tokens.identify(token) if token else None), True

    async def _receive(self, scope: Scope, receive: Receive) -> Receive:
        """Read the whole body within the limits; return a `receive` that replays it.

        Raises:
          Refusal: it is too large, too deep, too slow or of another type.
        """
        limits, headers = self._settings.limits, Headers(scope=scope)
        try:
            async with asyncio.timeout(limits.receive_s):
                body = await read_body(receive, headers.get("content-length"), limits.body_bytes)
        except TimeoutError as error:
            raise Refusal(
                408, f"the request took more than {limits.receive_s:g} s", Connection="close"
            ) from error
        except BodyTooLarge as error:
            raise Refusal(
                413, f"the body exceeds {limits.body_bytes} bytes", Connection="close"
            ) from error
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and kind not in _BODIES:
            raise Refusal(415, f"the Content-Type of a body must be {' or '.join(_BODIES)}")
        try:
            check_depth(body, limits.json_depth)
        except BodyTooDeep as error:
            raise Refusal(
                422, f"the body nests deeper than {limits.json_depth} brackets"
            ) from error
        return _replay(body, receive)

    async def _pass_on(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        is_stream = scope["path"] == EVENTS
        if is_stream:
            self._check_streams()
        self._streams += is_stream
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self._streams -= is_stream

    def _note(self, scope: Scope, identity: Identity | None, status: int) -> None:
        identity = identity or scope.get("state", {}).get("identity")
        who = identity.who if identity else "nobody"
        client = (scope.get("client") or ("unknown",))[0]
        method, path = scope["method"], scope["path"][:500]
        try:
            self._audit.add(who, f"{method} {path}", status=status, client=client)
        except OSError as error:
            get_logger().error("%s cannot be written: %s", self._audit.path, error)


class _Answer:
    """Sender of an answer that adds the headers of all answers and keeps the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, text in _HEADERS.items():
                headers[name] = text
            headers.setdefault("Cache-Control", "no-store")
        await self._send(message)


def get_needed_role(method: str, path: str) -> Role | None:
    """Return the role that a request needs; None for the start page and `_FOR_NOBODY`."""
    if method in SAFE and (path == START or _FOR_NOBODY.fullmatch(path)):
        return None
    if path in _ROLES:
        return _ROLES[path]
    return "view" if method in SAFE or path in _FOR_ALL else "submit"


def starts_check(scope: Scope) -> bool:
    """Return whether a GET starts the checking program; it then needs the role of a change."""
    return scope["path"] == SUBMIT and ESTIMATE in QueryParams(scope["query_string"])


def split_host(host: str) -> str:
    """Return the name of a Host header without its port; empty if malformed."""
    name, colon, port = host.lower().rpartition(":")
    if not colon or host.endswith("]"):
        return host.lower()
    return name if port.isdecimal() and port.isascii() and int(port) < 1 << 16 else ""


def is_same_place(origin: str, host: str) -> bool:
    """Return whether an Origin header is of the called host; a proxy may change its scheme."""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return False
    if (
        parts.scheme not in ("http", "https")
        or origin.lower() != f"{parts.scheme}://{parts.netloc}"
    ):
        return False
    usual = {"http": ":80", "https": ":443"}[parts.scheme]
    return parts.netloc.removesuffix(usual) == host.lower().removesuffix(usual)


def read_cookie(headers: Headers, name: str) -> str:
    """Return the value of a cookie; empty if it was not sent."""
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, then the client's next message: its disconnect."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def read_body(receive: Receive, declared: str | None, limit: int) -> bytes:
    """Read a request's whole body.

    Args:
      declared: its Content-Length; None without the header. Too large a number is refused at once.

    Raises:
      BodyTooLarge: it has more bytes than `limit`; at most one chunk more than that is read.
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
