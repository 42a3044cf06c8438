"""`create_app`: the parts, the routes, and the gate in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import re
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse

from service.web.answers import RECORDS
from service.web.assets import AssetTable
from service.web.events import EventHub
from service.web.gate import SecurityGate
from service.web.problems import Problem, add_handlers
from service.web.rendering import create_page_environment
from service.web.serving import create_service
from service.web.settings import ServiceSettings
from utils.json_types import JsonObject

# Modules of `service.web.routes`, in the order in which their paths are tried.
_ROUTES = (
    "entry",
    "runs",
    "series",
    "compare",
    "events",
    "sweeps",
    "jobs",
    "pages",
    "job_pages",
)
# Of a docstring: what follows is told of its attributes, and of one or several of them.
_SECTION = re.compile(r"\n+(?:Attributes|Args):\n")
_FIELD = re.compile(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", re.MULTILINE)


class AsciiJSON(JSONResponse):
    """JSON of ASCII alone: text that no encoding can hold, as half of a pair, breaks nothing."""

    def render(self, content: object) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def create_app(settings: ServiceSettings) -> FastAPI:
    """The service of a store.

    Raises:
      UserError: the store, the index or the file of tokens cannot be used.
    """
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
        generate_unique_id_function=_name_operation,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.events = EventHub(service.runs, service.queue)
    app.state.assets = AssetTable()
    app.state.templates = create_page_environment(app.state.assets)
    add_handlers(app)
    for name in _ROUTES:
        app.include_router(importlib.import_module(f"service.web.routes.{name}").router)
    app.openapi = lambda: _describe(app)
    # Streams of events are left as they are; what is compressed already, too.
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=5)
    app.add_middleware(SecurityGate, settings=settings, tokens=service.tokens, audit=service.audit)
    return app


def _describe(app: FastAPI) -> JsonObject:
    """OpenAPI with the form of problems and the ways to show a token."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        parts = schema.setdefault("components", {})
        parts.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
        for record in RECORDS:
            _describe_fields(parts["schemas"][record.__name__], record)
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}]
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_fields(schema: JsonObject, record: type) -> None:
    """Say of fields what docstrings do; an answer has all of them, with a default or without."""
    schema["required"] = list(schema["properties"])
    for one in record.__mro__[:-1]:
        head, *rest = _SECTION.split(inspect.getdoc(one) or "", maxsplit=1)
        schema["description"] = head if one is record else schema["description"]
        for names, text in _FIELD.findall("".join(rest)):
            for name in names.split(", "):
                field = schema["properties"].get(name, {})
                field.setdefault("description", " ".join(text.split()))


def _name_operation(route: APIRoute) -> str:
    return route.name
