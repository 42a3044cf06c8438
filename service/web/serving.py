"""`Service`: what routes and pages ask, held by the app; and who asks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.checker import Checker
from service.estimates import Estimator
from service.jobs.files import ROOT, JobQueue, open_queue
from service.places import list_configs
from service.web.audit import AuditLog
from service.web.catalogue import RunCatalogue
from service.web.series.ranges import SeriesReader
from service.web.settings import ServiceSettings
from service.web.tokens import Identity, TokenBook
from utils.storage.places import is_remote, to_path


@dataclass(frozen=True)
class Service:
    """The parts behind the routes.

    Attributes:
      store: root of the runs as jobs have it: a URL, or a whole path.
      roots: below which a submission may name places.
    """

    settings: ServiceSettings
    store: str
    roots: tuple[str, ...]
    runs: RunCatalogue
    series: SeriesReader
    queue: JobQueue
    checker: Checker
    estimator: Estimator
    tokens: TokenBook
    audit: AuditLog

    def list_configs(self) -> list[str]:
        """Configurations of the repository that may be submitted."""
        return list_configs(ROOT)

    def close(self) -> None:
        """End the checking program, and let go of the index."""
        self.checker.close()
        self.estimator.close()
        self.runs.close()


def create_service(settings: ServiceSettings) -> Service:
    """The parts of a store's service.

    Raises:
      UserError: the store, the index or the file of tokens cannot be used.
    """
    store = settings.store.rstrip("/")
    if not is_remote(store):
        store = str(to_path(store).resolve())
    return Service(
        settings, store, (store, str(ROOT / "data"), *settings.roots),
        RunCatalogue(store, settings.index), SeriesReader(), open_queue(store), Checker(),
        Estimator(store),         TokenBook(settings.tokens_path), AuditLog(settings.state_folder),
    )  # fmt: skip


def get_service(request: Request) -> Service:
    """The parts of the app that answers."""
    return request.app.state.service


def get_identity(request: Request) -> Identity:
    """Who asks; the gate has let them in."""
    return request.state.identity


Parts = Annotated[Service, Depends(get_service)]
Asker = Annotated[Identity, Depends(get_identity)]
