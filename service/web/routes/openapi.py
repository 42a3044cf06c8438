"""OpenAPI of the service: models of answers and problems, and the ways to send a token."""

from __future__ import annotations

import inspect
import re

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.web.answers import RECORDS
from service.web.problems import Problem
from utils.json_types import JsonObject

# The head of a docstring's list of attributes, and an entry, which may describe several names.
_SECTION = re.compile(r"\n+(?:Attributes|Args):\n")
_FIELD = re.compile(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", re.MULTILINE)


def describe_app(app: FastAPI) -> JsonObject:
    """Create OpenAPI with the model of problems and the ways to send a token."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        parts = schema.setdefault("components", {})
        parts.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
        for record in RECORDS:
            _describe_fields(parts["schemas"][record.__name__], record)
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": list[str]()}]
        app.openapi_schema = schema
    return app.openapi_schema


def _describe_fields(schema: JsonObject, record: type) -> None:
    """Copy descriptions from a docstring; all fields are required, also those with a default."""
    schema["required"] = list(schema["properties"])
    for base in record.__mro__[:-1]:
        head, *rest = _SECTION.split(inspect.getdoc(base) or "", maxsplit=1)
        schema["description"] = head if base is record else schema["description"]
        for names, text in _FIELD.findall("".join(rest)):
            for name in names.split(", "):
                field = schema["properties"].get(name, {})
                field.setdefault("description", " ".join(text.split()))
