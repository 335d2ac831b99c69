"""Headless Chromium for tests of HTML: a page that keeps what went wrong in it, and asks nothing of any server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBLEM = None if CHROMIUM else "there is no Chromium here"


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip(PROBLEM or "")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # containers lack its needs
        yield browser
        browser.close()


class Opened:
    """A page of a report in the browser.

    Attributes:
        problems: Errors and warnings of the console, exceptions, dialogs and requests but for the file itself.
    """

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.problems: list[str] = []
        self.context = browser.new_context(viewport={"width": 1300, "height": 850}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._on_request)
        self._url = path.resolve().as_uri()
        self.page.goto(self._url)
        self.page.wait_for_selector("#report[aria-busy=false]")

    def _on_request(self, request: Any) -> None:
        if request.url.partition("#")[0] != self._url:
            self.problems.append(f"request: {request.url[:200]}")

    def open(self, tab: str) -> None:
        """Click on a tab."""
        self.page.click(f"#tab-{tab}")
        self.page.wait_for_selector(f"#panel-{tab}:not([hidden])")

    def texts(self, selector: str) -> list[str]:
        """The texts of what the selector finds."""
        found: list[str] = self.page.locator(selector).all_inner_texts()
        return found

    def rows(self, caption: str) -> list[list[str]]:
        """The cells of a table's rows, by the beginning of its caption."""
        table = self.page.locator(f"section:not([hidden]) table:has(caption:has-text('{caption}'))").first
        rows: list[list[str]] = table.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )
        return rows

    def value(self, script: str) -> Any:
        """Evaluate a JavaScript expression on the page."""
        return self.page.evaluate(script)
