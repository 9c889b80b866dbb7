"""Debian's Chromium, driven by Playwright: what it complains of, and what it asks for elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from dashboard.stage import ADMIN

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
REQUIRED = "OSTINATO_REQUIRE_BROWSER"
"""Where this is set (CI) a missing browser is a failure, not a test left out."""


def chromium_path() -> str:
    """Where it is; skips the test, or fails it, where it is not."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        text = "no Chromium here: apt-get install chromium"
        if os.environ.get(REQUIRED):
            pytest.fail(text)
        pytest.skip(text)
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = ["--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), headless=True, chromium_sandbox=False, args=options
        )
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page that notes every complaint and every request to elsewhere."""

    def __init__(self, browser: Browser, url: str, **options: Any) -> None:
        self.url = url
        self.complaints: list[str] = []
        self.outside: list[str] = []
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.url + "/", "data:", "blob:")):
            self.outside.append(request.url)

    def go(self, path: str) -> Page:
        self.page.goto(self.url + path, wait_until="networkidle" if path == "/" else "load")
        return self.page

    def sign_in(self) -> None:
        self.page.goto(self.url + "/")
        self.page.get_by_label("Admin key").fill(ADMIN)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(self.url + "/")

    def faults(self) -> list[str]:
        """What axe finds that is serious or worse, as one line each."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map("
            "v => [v.impact, v.id, v.nodes.map(n => n.html + ' ' + n.failureSummary).join(' | ')]))"
        )
        return [" ".join(each) for each in found if each[0] in ("serious", "critical")]

    def close(self) -> None:
        """Ends the page; it must have complained of nothing and asked for nothing elsewhere."""
        self.context.close()
        assert self.complaints == []
        assert self.outside == []
