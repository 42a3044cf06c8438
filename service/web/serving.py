"""`Service`: the objects behind routes and pages, held by the app; and the caller's identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.checker import Checker
from service.estimates import Estimator
from service.jobs.files import JobQueue, open_queue
from service.places import list_configs
from service.web.audit import AuditLog
from service.web.catalogue import RunCatalogue
from service.web.series.ranges import SeriesReader
from service.web.settings import ServiceSettings
from service.web.tokens import Identity, TokenBook
from utils.storage.installation import ROOT, get_workplace
from utils.storage.places import is_remote, to_path


@dataclass(frozen=True)
class Service:
    """The objects behind the routes."""

    settings: ServiceSettings
    store: str  # root of the runs, as jobs name it: a URL, or an absolute path
    roots: tuple[str, ...]  # places below which the paths of a submission must lie
    runs: RunCatalogue
    series: SeriesReader
    queue: JobQueue
    checker: Checker
    estimator: Estimator
    tokens: TokenBook
    audit: AuditLog

    def list_configs(self) -> list[str]:
        """List the repository's configurations that may be submitted."""
        return list_configs(ROOT)

    def close(self) -> None:
        """End the checking program, and close the index."""
        self.checker.close()
        self.estimator.close()
        self.runs.close()


def create_service(settings: ServiceSettings) -> Service:
    """Create the objects of a store's service; UserError for an unusable store or token file."""
    store = settings.store.rstrip("/")
    if not is_remote(store):
        store = str(to_path(store).resolve())
    return Service(
        settings,
        store,
        (store, str(get_workplace() / "data"), *settings.roots),
        RunCatalogue(store, settings.index),
        SeriesReader(),
        open_queue(store),
        Checker(),
        Estimator(store),
        TokenBook(settings.tokens_path),
        AuditLog(settings.state_folder),
    )


def get_service(request: Request) -> Service:
    """Return the service of the request's app."""
    return request.app.state.service


def get_identity(request: Request) -> Identity:
    """Return the caller, whom the gate has let in."""
    return request.state.identity


Services = Annotated[Service, Depends(get_service)]
Asker = Annotated[Identity, Depends(get_identity)]
