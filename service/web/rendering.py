"""Renders pages: templates in the frame that all of them share."""

from __future__ import annotations

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse

from service.web.assets import PLOTLY_SHEET, AssetTable
from service.web.views.frame import Frame
from service.web.views.jinja import create_environment


def create_page_environment(assets: AssetTable) -> Environment:
    """Create the templates' environment with the addresses of scripts and styles."""
    environment = create_environment()
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
