"""The service in its own process, and a real browser that is signed in to it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIZES = {"wide": {"width": 1440, "height": 900}, "narrow": {"width": 390, "height": 844}}


@contextlib.contextmanager
def serve(store: Path, cache: Path) -> Iterator[str]:
    """Run `tools.serve` on a store; yield the start URL."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "tools.serve", "--store", str(store), "--port", "0"]
    program = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        found = next((m for line in program.stdout if (m := re.search(r"http://\S+", line))), None)
        assert found is not None, "the service did not start"
        yield found[0]
    finally:
        program.send_signal(signal.SIGINT)
        program.wait(20)


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A headless Chromium; skips loudly where there is none."""
    if CHROMIUM is None:
        pytest.skip("NO BROWSER: chromium is not installed here, so no page was looked at in one")
    sync_api = pytest.importorskip("playwright.sync_api", reason="NO BROWSER: no playwright here")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A browser on the service, with everything that goes wrong in it.

    Attributes:
      faults: console errors, exceptions, refusals by the policy, answers of 400 and above.
      foreign: requests to anybody but the service.
    """

    def __init__(self, browser: Browser, start: str, **options: object) -> None:
        self.base = start.partition("/start")[0]
        self.context: BrowserContext = browser.new_context(**options)
        self.faults: list[str] = []
        self.foreign: list[str] = []
        self.context.on("request", self._note)
        self.context.on("weberror", lambda error: self.faults.append(str(error.error)))
        self.context.on("console", self._hear)
        self.page = self.open_tab()
        if "storage_state" not in options:
            self.page.goto(start)

    def open_tab(self) -> Page:
        """A further tab."""
        page = self.context.new_page()
        page.set_default_timeout(30_000)
        return page

    def visit(self, place: str) -> Page:
        """Open a page in the first tab."""
        self.page.goto(self.base + place)
        return self.page

    def check(self) -> None:
        """Check that nothing has gone wrong and that no other host was contacted."""
        assert self.faults == []
        assert self.foreign == []

    def _note(self, request: object) -> None:
        if not request.url.startswith((self.base, "data:", "blob:")):
            self.foreign.append(request.url)

    def _hear(self, message: object) -> None:
        # The browser tells of what its policy refuses here, too.
        if message.type in ("error", "warning"):
            self.faults.append(message.text)


def read_paint(page: Page) -> float:
    """Seconds from the beginning of a page to its first paint with content."""
    script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    while (found := page.evaluate(script)) is None:  # the browser tells it a frame later
        page.wait_for_timeout(20)
    return found / 1000


def wait_for_charts(page: Page, count: int) -> float:
    """Seconds from the beginning of a page until so many charts are drawn by the script."""
    # The policy of the pages forbids `wait_for_function`, which evaluates text in them.
    page.locator("figure[data-drawn]").nth(count - 1).wait_for()
    mark = f"performance.getEntriesByName('chart-drawn')[{count - 1}].startTime"
    return page.evaluate(mark) / 1000
