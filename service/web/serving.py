"""`Service`: what routes and pages ask, held by the app; and who asks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.web.audit import AuditLog
from service.web.catalogue import RunCatalogue
from service.web.series import SeriesReader
from service.web.settings import ServiceSettings
from service.web.tokens import Identity, TokenBook


@dataclass(frozen=True)
class Service:
    """The parts behind the routes."""

    settings: ServiceSettings
    runs: RunCatalogue
    series: SeriesReader
    tokens: TokenBook
    audit: AuditLog


def get_service(request: Request) -> Service:
    """The parts of the app that answers."""
    return request.app.state.service


def get_identity(request: Request) -> Identity:
    """Who asks; the gate has let them in."""
    return request.state.identity


Parts = Annotated[Service, Depends(get_service)]
Asker = Annotated[Identity, Depends(get_identity)]
