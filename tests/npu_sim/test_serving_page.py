"""The server's page in headless Chromium: it chats, stops, asks for a key, and shows the metrics, without an error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import chromium
from fake_engine import Script, Served, served, text_checkpoint

from npu_sim.llm import Checkpoint
from npu_sim.serving.request import Request

MARKUP = "<script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return text_checkpoint(tmp_path_factory.mktemp("plain"))


class Page:
    """The page in the browser.

    Attributes:
        problems: Errors and warnings of the console, exceptions, dialogs, and requests to other places.
    """

    def __init__(self, browser: Any, server: Served) -> None:
        self.problems: list[str] = []
        self.context = browser.new_context()
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self._on_request(request.url, server.url))
        self.page.goto(server.url)

    def _on_console(self, message: Any) -> None:
        if message.type != "verbose":  # Chromium's advice on passwords is for keys that it should keep
            self.problems.append(f"{message.type}: {message.text}")

    def _on_request(self, url: str, base: str) -> None:
        if not url.startswith((f"{base}/", "data:")):
            self.problems.append(f"request: {url}")

    def wait_for(self, script: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own waiting needs `eval`, which the page forbids."""
        until = time.monotonic() + 60
        while not self.page.evaluate(script):
            assert time.monotonic() < until, script
            self.page.wait_for_timeout(50)

    def say(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def shown(self) -> list[tuple[str, str]]:
        """(kind, text) of the messages."""
        found: list[list[str]] = self.page.evaluate(
            "[...document.querySelectorAll('.message')].map(item => [item.classList[1], item.textContent])"
        )
        return [(kind, text) for kind, text in found]


def test_the_page_chats_and_shows_the_metrics(browser: Any, checkpoint: Checkpoint) -> None:
    with served(checkpoint, Script(f"naïve 🎉 {MARKUP}", delay=0.001)) as server:
        page = Page(browser, server)
        page.wait_for("document.getElementById('model').textContent === 'tiny'")
        page.say("Hi")
        page.wait_for("document.getElementById('status').textContent.includes('prompt tokens')")
        assert page.shown() == [("user", "Hi"), ("assistant", f"naïve 🎉 {MARKUP}")]
        page.say("And?")
        page.wait_for("document.querySelectorAll('.message').length === 4 && !document.getElementById('send').disabled")
        talk = checkpoint.tokenizer.decode(server.engine.requests[-1].prompt)
        assert [part.split("\n")[0] for part in talk.split("<|im|>")[1:]] == ["user", "assistant", "user", "assistant"]
        page.wait_for("[...document.querySelectorAll('dd')].length === 10")
        page.wait_for(
            f"document.querySelectorAll('dd')[4].textContent === '{int(server.metric('npu_sim_prompt_tokens_total'))}'"
        )
        assert page.problems == []
        page.context.close()


def test_a_reply_can_be_stopped(browser: Any, checkpoint: Checkpoint) -> None:
    with served(checkpoint, Script("the cat sat. ", endless=True, delay=0.01)) as server:
        page = Page(browser, server)
        page.wait_for("document.getElementById('model').textContent === 'tiny'")
        page.say("Hi")
        page.wait_for("document.querySelectorAll('.assistant')[0]?.textContent.length > 20")
        page.page.click("#stop")
        page.wait_for("document.getElementById('status').textContent === 'stopped'")
        server.wait_until(lambda: not server.engine.active)
        assert page.problems == []
        page.context.close()


def test_errors_are_shown_and_the_message_is_not_kept(browser: Any, checkpoint: Checkpoint) -> None:
    def fail_once(request: Request) -> Script:
        return Script("", error="the device is lost") if len(server.engine.requests) == 0 else Script("Hello")

    with served(checkpoint, fail_once) as server:
        page = Page(browser, server)
        page.wait_for("document.getElementById('model').textContent === 'tiny'")
        page.say("Hi")
        page.wait_for("document.querySelectorAll('.error').length === 1")
        assert page.shown() == [("user", "Hi"), ("error", "the device is lost")]
        page.say("Again")
        page.wait_for(
            "document.querySelectorAll('.assistant').length === 1 && !document.getElementById('send').disabled"
        )
        assert "Hi" not in checkpoint.tokenizer.decode(server.engine.requests[-1].prompt)
        page.context.close()


def test_a_key_is_asked_for(browser: Any, checkpoint: Checkpoint) -> None:
    with served(checkpoint, keys={"alice": "a" * 20}) as server:
        page = Page(browser, server)
        page.wait_for("!document.getElementById('key-label').hidden")
        assert "the API key is missing" in page.page.text_content("#status")
        page.page.fill("#key", "a" * 20)
        page.page.press("#key", "Tab")
        page.wait_for("document.getElementById('model').textContent === 'tiny'")
        page.say("Hi")
        page.wait_for("document.querySelectorAll('.assistant')[0]?.textContent === 'Hello, world!'")
        page.context.close()
