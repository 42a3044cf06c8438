"""Renders pages in their common frame, and parses their forms into names and values."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends
from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse

from service.web.assets import PLOTLY_SHEET, AssetTable
from service.web.views.frame import Frame
from service.web.views.jinja import create_environment
from utils.errors import UserError

# The form of a submission has a field for each key of the configuration.
_MOST_FIELDS = 1000


def create_page_environment(assets: AssetTable) -> Environment:
    """Create the templates' environment with the addresses of scripts and styles."""
    environment: Any = create_environment()
    environment.globals["asset"] = assets.url
    environment.globals["plotly_marks"] = assets.list_plotly_marks
    environment.globals["plotly_sheet"] = PLOTLY_SHEET
    return environment


def render_page(
    request: Request, template: str, page: str, *, status: int = 200, **context: object
) -> HTMLResponse:
    """Render a page; `page` is its name in `frame.PAGES`, or empty."""
    identity = getattr(request.state, "identity", None)
    frame = Frame(page, identity.who, identity.role) if identity else Frame(page)
    text = request.app.state.templates.get_template(template).render(
        **{"frame": frame, "own_run": "", **context}
    )
    return HTMLResponse(text, status)


async def read_pairs(request: Request) -> list[tuple[str, str]]:
    """Parse the fields of a form in their order; `UserError` if the body is no form data."""
    try:
        text = (await request.body()).decode()
        return parse_qsl(
            text,
            keep_blank_values=True,
            strict_parsing=bool(text),
            errors="strict",
            max_num_fields=_MOST_FIELDS,
        )
    except ValueError as error:
        raise UserError(
            "the body is not valid form data; use the page's own form, or the API"
        ) from error


Pairs = Annotated[list[tuple[str, str]], Depends(read_pairs)]


def read_form(pairs: Pairs) -> dict[str, str]:
    """Return the fields of a form; of several with one name the last one counts."""
    return dict(pairs)


Fields = Annotated[dict[str, str], Depends(read_form)]
