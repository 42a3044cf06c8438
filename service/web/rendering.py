"""Renders templates: every value is escaped, and a name that a template misspells is an error."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).with_name("templates")
STATIC = Path(__file__).with_name("static")


def create_environment() -> Environment:
    """The environment of `templates/`."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
