"""`create_app`: the services, the routes, and the gate in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse

from service.web.assets import AssetTable
from service.web.events import EventHub
from service.web.gate import SecurityGate
from service.web.problems import add_handlers
from service.web.rendering import create_page_environment
from service.web.serving import create_service
from service.web.settings import ServiceSettings
from utils.registry import load_object

# Modules of `service.web.routes`, in the order in which their paths are tried.
_ROUTES = ("entry", "runs", "compare", "jobs", "pages", "job_pages")


class AsciiJSON(JSONResponse):
    """JSON in ASCII only, so that a lone surrogate, which UTF-8 cannot encode, does no harm."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def create_app(settings: ServiceSettings) -> FastAPI:
    """Create the service of a store; UserError for an unusable store, index or token file."""
    service = create_service(settings)

    @contextlib.asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        watch = asyncio.create_task(app.state.events.watch())
        yield
        watch.cancel()
        service.close()

    app = FastAPI(
        title="Runs",
        version="1",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=live,
        default_response_class=AsciiJSON,
        generate_unique_id_function=lambda route: route.name,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.events = EventHub(service.runs, service.queue)
    app.state.assets = AssetTable()
    app.state.templates = create_page_environment(app.state.assets)
    add_handlers(app)
    for name in _ROUTES:
        app.include_router(importlib.import_module(f"service.web.routes.{name}").router)
    # pyrefly: ignore[method-assign]  # FastAPI's documented way to extend the schema
    app.openapi = lambda: load_object("service.web.routes.openapi:describe_app")(app)
    # Streams of events and compressed files stay as they are.
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=5)
    app.add_middleware(SecurityGate, settings=settings, tokens=service.tokens, audit=service.audit)
    return app
