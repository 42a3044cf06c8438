"""OpenAPI of the service: forms of answers, of problems, and the ways to show a token."""

from __future__ import annotations

import inspect
import re

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.web.answers import RECORDS
from service.web.problems import Problem
from utils.json_types import JsonObject

# Of a docstring: what follows is told of its attributes, and of one or several of them.
_SECTION = re.compile(r"\n+(?:Attributes|Args):\n")
_FIELD = re.compile(r"^  (\w+(?:, \w+)*): (.*(?:\n    .*)*)", re.MULTILINE)


def describe_app(app: FastAPI) -> JsonObject:
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
