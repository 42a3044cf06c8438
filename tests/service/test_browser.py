"""One page in a real browser is drawn, and nothing goes wrong; the rest are slow proofs."""

from __future__ import annotations

from tests.service.browsers import Watched, open_browser, serve, wait_for_charts
from tests.service.web.apps import make_store


def test_a_runs_page_is_drawn_by_the_script_and_nothing_goes_wrong(tmp_path):
    with open_browser() as browser, serve(make_store(tmp_path), tmp_path / "cache") as start:
        watched = Watched(browser, start)
        page = watched.visit("/runs/digits/seed0")
        wait_for_charts(page, 1)
        assert page.locator(".js-plotly-plot").count() >= 1
        watched.check()
