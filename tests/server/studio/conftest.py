"""
The studio in Chromium, as somebody has it before them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.debugging.browser import CHROMIUM, Browser, browser

from .stage import Stage


class Page:
    """
    A browser that was let in to a studio.
    """

    def __init__(self, chromium: Browser, stage: Stage) -> None:
        self.chromium, self.stage = chromium, stage

    def go(self, address: str, shows: str = "main h1, main .crumbs") -> None:
        """
        Go to an address of the page, and wait until something is there.
        """
        self.run(f"location.hash = {json.dumps(address)}")
        self.wait(f"document.querySelector({json.dumps(shows)})")

    def run(self, script: str) -> Any:
        return self.chromium.run(script)

    def wait(self, script: str) -> Any:
        """
        Wait until something is so; a node, which cannot be brought here, is.
        """
        return self.chromium.wait(f"!!({script})")

    def text(self, selector: str = "main") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def says(self, text: str, selector: str = "main") -> None:
        """
        Wait until a part of the page says a text.
        """
        said = f"(document.querySelector({json.dumps(selector)})?.innerText ?? '')"
        try:
            self.wait(f"{said}.includes({json.dumps(text)})")
        except AssertionError as error:
            error.add_note(f"it says: {self.run(said)[:2_000]}")
            raise

    def fill(self, selector: str, text: str) -> None:
        """
        Type into a field.
        """
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.run(
            f"(() => {{ const f = document.querySelector({json.dumps(selector)}); f.value = {json.dumps(text)};"
            "f.dispatchEvent(new Event('input', {bubbles: true})); f.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def press(self, name: str, within: str = "main") -> None:
        """
        Press the button, or follow the link, of a name.
        """
        found = (
            f"[...document.querySelectorAll({json.dumps(f'{within} button, {within} a, {within} summary')})]"
            f".find(b => b.innerText.trim() === {json.dumps(name)} && !b.disabled)"
        )
        self.wait(f"!!{found}")
        self.run(f"{found}.click()")


@pytest.fixture(autouse=True)
def forked(forks: None) -> None:
    """
    The studios of these tests are forked processes.
    """


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: the command chromium on PATH")
    with browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Stage(tmp_path_factory.mktemp("stage")).open() as opened:
        yield opened


@pytest.fixture
def page(chromium: Browser, stage: Stage) -> Iterator[Page]:
    """
    The page of the studio, opened by its link; nothing that it complains of is overlooked.
    """
    yield from opened(chromium, stage)


def opened(chromium: Browser, stage: Stage) -> Iterator[Page]:
    chromium.size(1280, 800)
    chromium.scheme("light")
    chromium.complaints.clear()
    chromium.open(stage.link())
    yield Page(chromium, stage)
    assert [] == chromium.complaints
    chromium.call("Page.navigate", url="about:blank")


@pytest.fixture
def own(chromium: Browser, tmp_path: Path) -> Iterator[Any]:
    """
    Opens the page of a studio of the test's own.
    """
    from contextlib import ExitStack, contextmanager

    with ExitStack() as stack:

        def made(stage: Stage) -> Page:
            served = stack.enter_context(stage.open())
            return stack.enter_context(contextmanager(opened)(chromium, served))

        yield made
