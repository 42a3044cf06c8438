"""Runs the app with uvicorn: it listens before the start URL is printed, and limits all waits."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from utils.errors import EXIT_TERMINATED, UserError

# Seconds that a shutdown waits for answers that are under way; streams end by themselves.
_GRACE_S = 3
_KEEP_ALIVE_S = 15
_HEADERS_S = 10.0
_CONNECTIONS = 256


class PatientProtocol(H11Protocol):
    """uvicorn's protocol with a time limit for a request's headers."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the time limit."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(_HEADERS_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        self._deadline.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Continue; after the headers the gate enforces the limits."""
        super().handle_events()
        if self.cycle is not None:
            self._deadline.cancel()

    def _give_up(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """Create a socket that listens; UserError if the address is not local or the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # A browser that connects before the app runs waits for it.
        listener.listen(_CONNECTIONS)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise UserError(
            f"cannot listen on --host {host} --port {port}: {reason}; give another port, or 0 for "
            "any free one"
        ) from error
    return listener


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve until a signal comes.

    Raises:
      KeyboardInterrupt: after Ctrl-C.
      SystemExit: after SIGTERM; uvicorn would end the program without an exit code for the caller.
    """
    signal.signal(signal.SIGTERM, _leave)
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        limit_concurrency=_CONNECTIONS,
        h11_max_incomplete_event_size=32 << 10,
    )
    server = _Server(config, app.state.events.close)
    server.run(sockets=[listener])
    # Whether uvicorn passes a signal on depends on how far asyncio's own loop has come.
    if server.was_interrupted:
        raise KeyboardInterrupt


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_TERMINATED)


class _Server(uvicorn.Server):
    """A server that ends streams of events at a signal, instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams
        self.was_interrupted = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the shutdown."""
        self.was_interrupted |= sig == signal.SIGINT
        self._end_streams()
        super().handle_exit(sig, frame)
