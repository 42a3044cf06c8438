"""Pages in a real browser are drawn without errors; the rest are slow proofs."""

from __future__ import annotations

import pytest

from tests.service.browsers import Watched, open_browser, serve, wait_for_charts
from tests.service.web.apps import make_store


def test_a_runs_page_is_drawn_without_errors(tmp_path):
    with open_browser() as browser, serve(make_store(tmp_path), tmp_path / "cache") as start:
        watched = Watched(browser, start)
        page = watched.visit("/runs/digits/seed0")
        wait_for_charts(page, 1)
        assert page.locator(".js-plotly-plot").count() >= 1
        watched.check()


def test_chart_choices_apply_and_persist(tmp_path):
    """Axis, smoothing, hidden curves, and charts that are hidden or added; kept in the browser."""
    with open_browser() as browser, serve(make_store(tmp_path), tmp_path / "cache") as start:
        watched = Watched(browser, start)
        page = watched.visit("/compare?run=digits/seed0&run=digits/seed1&seeds=apart")
        wait_for_charts(page, 1)
        first = "document.querySelector('figure[data-title=\"train.loss/total\"] .plot').data"
        assert page.evaluate(f"{first}[0].x") == [1, 2, 3, 4]
        page.get_by_label("x axis").select_option("time")
        page.get_by_text("0.3 s").first.wait_for()
        assert page.evaluate(f"{first}[0].x") == [0.1, 0.2, 0.3, 0.4]
        page.get_by_label("Smoothing").select_option("5")
        page.locator('figure[data-title="train.loss/total"] .scatterlayer .trace').nth(3).wait_for()
        values, smooth = page.evaluate(f"[{first}[0].y, {first}[2].y]")
        assert smooth[2] == pytest.approx(sum(values) / 4, rel=1e-5)
        page.get_by_role("button", name="digits/seed1").first.click()
        page.locator(".keys button[aria-pressed=false]").first.wait_for()
        page.wait_for_timeout(300)
        assert page.evaluate(f"{first}.map((one) => one.visible)") == [True, False] * 2
        page.locator("summary", has_text="Charts").click()
        page.get_by_role("checkbox", name="train.lr").check()
        page.get_by_role("checkbox", name="train.loss/total").uncheck()
        page.reload()
        page.locator('figure[data-title="train.lr"][data-drawn]').wait_for()
        assert page.locator('figure[data-title="train.loss/total"]').is_hidden()
        assert page.get_by_label("x axis").input_value() == "time"
        watched.check()


def test_a_table_wider_than_its_frame_marks_hidden_columns(tmp_path):
    with open_browser() as browser, serve(make_store(tmp_path), tmp_path / "cache") as start:
        watched = Watched(browser, start, viewport={"width": 900, "height": 700})
        page = watched.visit(
            "/?show=eval.top1,optim.lr,data.train_pp,model.args.heads,data.root,host"
        )
        frame = page.locator(".scroll").first
        box = frame.bounding_box()
        edge = {"x": box["x"] + box["width"] - 4, "y": box["y"] + 2, "width": 3, "height": 8}
        cut = page.screenshot(clip=edge)
        frame.evaluate("(frame) => { frame.scrollLeft = frame.scrollWidth; }")
        page.wait_for_timeout(200)
        assert page.screenshot(clip=edge) != cut  # the shadow is gone at the end
        assert page.locator("tbody .name").first.bounding_box()["x"] >= box["x"]  # and runs stay
        watched.check()
