"""Renders templates: every value is escaped, and a name that a template misspells is an error."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from service.web.assets import PLOTLY_SHEET, AssetTable
from service.web.views.frame import Frame

TEMPLATES = Path(__file__).with_name("templates")


def create_environment(assets: AssetTable) -> Environment:
    """The environment of `templates/`."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = assets.url
    environment.globals["plotly_marks"] = assets.list_plotly_marks
    environment.globals["plotly_sheet"] = PLOTLY_SHEET
    return environment


def render_page(
    request: Request, template: str, page: str, *, status: int = 200, **context: object
) -> HTMLResponse:
    """A whole page.

    Args:
      page: the one of `frame.PAGES` that it belongs to; empty: none.
    """
    identity = getattr(request.state, "identity", None)
    frame = Frame(page, identity.who, identity.role) if identity else Frame(page)
    text = request.app.state.templates.get_template(template).render(
        **{"frame": frame, "own_run": "", **context}
    )
    return HTMLResponse(text, status)
