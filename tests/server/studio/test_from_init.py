"""
Two programs and no code: `stepengine init`, `stepengine studio`, and everything from there in the page, without a key.

What answers is the script that `stepengine init` made.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import httpx2
import pytest

from tests import forked_processes
from tests.debugging.browser import AXE, CHROMIUM, Browser, faults
from tests.phrases import NO_KEY

from .conftest import Page
from .shop import Shop, save

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the command chromium on PATH"),
]
SCRIPT = "tests/replies.json"
PATIENCE = 180.0
"""Seconds: a run of so many steps takes a while where others work at the same time."""


class Project(Shop):
    """
    What `stepengine init` made in an empty folder, with its studio.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "agents" / "todos.py"
        self.url = self.link = self.token = ""
        self.process = None
        self.options: tuple[str, ...] = ()
        keys = dict.fromkeys([name for name in os.environ if name.endswith(("_API_KEY", "_AUTH_TOKEN"))], "")
        self.variables = {**keys, "STEPENGINE_STATE_DIR": str(folder.parent / "state")}

    def types(self, *words: str) -> str:
        """
        Type a command of `stepengine` in the folder, and return what it says.
        """
        made = forked_processes.run(
            [sys.executable, "-m", "stepengine", *words], cwd=self.folder, env={**os.environ, **self.variables},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout

    def edit(self, *changes: tuple[str, str]) -> str:
        """
        Save the agent's file with some texts replaced, and return what it was.
        """
        code = changed = self.file.read_text()
        for old, new in changes:
            assert old in changed, old
            changed = changed.replace(old, new)
        save(self.file, changed)
        return code


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """
    What `stepengine init` made, whose studio is the one that its last lines say.
    """
    folder = tmp_path / "empty"
    folder.mkdir()
    made = Project(folder)
    said = made.types("init").partition("These commands need no key and no network:")[2]
    typed = [line.strip() for line in said.splitlines() if line.startswith("  stepengine ")]
    assert "stepengine eval evals/todos.py" in typed
    made.options = tuple(shlex.split(typed[-1])[2:])
    assert ("--script", SCRIPT) == made.options
    return made


@pytest.mark.spec("studio:ST1", "studio:ST6", "studio:ST12")
def test_newcomer_uses_init_and_studio_without_code_or_key(chromium: Browser, project: Project) -> None:
    project.types("eval", "evals/todos.py")
    with project.open():
        chromium.size(1280, 900)
        chromium.complaints.clear()
        chromium.open(project.link)
        page = Page(chromium, project)  # type: ignore[arg-type]  # of the stage only its link is used
        page.seconds = PATIENCE
        page.says("todos")
        started(page, "src", "completed")
        page.says("1. Round the total.")
        # Whoever came while the run was under way stands where it was then.
        page.go(f"{page.run('location.hash').split('?')[0]}?step=1", ".run[data-ready]")
        page.says("answered by scripted/replies.json")
        scripted(page, project)
        judged(page)
        told = page.text(".scripted")
        chromium.call("Page.navigate", url="about:blank")

    assert [] == chromium.complaints
    assert "A script replaces the models here: replies.json. No model is called." == told


@pytest.mark.spec("studio:ST12", "studio:ST9")
def test_missing_key_is_named_on_the_start_page(chromium: Browser, project: Project) -> None:
    project.options = ()
    with project.open():
        chromium.size(400, 800)
        chromium.complaints.clear()
        chromium.open(project.link)
        page = Page(chromium, project)  # type: ignore[arg-type]  # of the stage only its link is used
        page.go("#/start", "form")
        page.says(f"This agent cannot be started yet: there is {NO_KEY} 'anthropic': set ANTHROPIC_API_KEY")
        page.says("stepengine studio --script FILE")
        assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
        assert AXE is None or not faults(chromium)
        page.press("Start")
        page.wait("document.querySelector('[role=alert]')?.innerText.includes('ANTHROPIC_API_KEY')")
        page.go("#/runs")
        runs = page.text("main")
        chromium.call("Page.navigate", url="about:blank")

    assert "todos" not in runs
    assert [one for one in chromium.complaints if "503" not in one] == []


def started(page: Page, prompt: str, says: str) -> None:
    """
    Start a run from the page, and wait until its page says something.
    """
    page.go("#/start", "main a, form")
    if not page.run("!!document.querySelector('form')"):
        page.press("todos")
    page.fill("form textarea", prompt)
    page.press("Start")
    page.wait("location.hash.startsWith('#/runs/')")
    page.says(says)


def scripted(page: Page, project: Project) -> None:
    """
    Edit the prompt, and see what the script says to it: no model is asked for that, and nothing is paid.
    """
    was = project.edit(("Sort the TODO", "Order the TODO"))
    page.go(f"{page.run('location.hash').split('?')[0]}/edit", ".sheet")
    page.press("Show the request")
    page.says("Order the TODO", "[aria-label='What comes next']")
    page.press("Show the script's reply")
    page.says("It takes about 1 reply of the script replies.json, at no cost.", ".job")
    asked = page.text("[aria-label='What comes next']")
    page.press("Use the script")
    page.says("2. Reject empty orders.", ".job")
    save(project.file, was)

    assert "$" not in asked
    assert "Ask" not in asked


def judged(page: Page) -> None:
    """
    Open the report of the evaluation of the project, and a case of it.
    """
    page.go("#/reports", ".threads a")
    page.run("document.querySelector('.threads a').click()")
    page.says("some")
    page.press("passes")
    page.wait("document.querySelector('.run[data-ready]')")
    page.says("find_todos")


@pytest.mark.spec("studio:ST9")
def test_browser_without_session_sees_how_to_log_in(chromium: Browser, project: Project) -> None:
    with project.open():
        with httpx2.Client(base_url=project.url, timeout=60) as client:
            kinds = [client.get(path).headers["content-type"] for path in ("/runs", "/studio.js", "/")]
        chromium.size(400, 800)
        chromium.complaints.clear()
        spent = project.link.replace("login=", "login=x")
        said = {}
        chromium.call("Page.navigate", url="about:blank")
        for address in (f"{project.url}/", spent):
            chromium.call("Page.navigate", url=address)
            shown = "This link was already used" if address == spent else "not logged in"
            chromium.wait(f"document.querySelector('.door')?.innerText?.toLowerCase().includes({shown.lower()!r})")
            said[address] = chromium.run("document.querySelector('.door').innerText")
            assert "system-ui" in chromium.run("getComputedStyle(document.body).fontFamily")
            assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
            assert AXE is None or not faults(chromium)
        chromium.picture(project.folder / "door.png")
        chromium.call("Page.navigate", url="about:blank")

    assert [*["application/problem+json"] * 2, "text/html; charset=utf-8"] == kinds
    assert all("Open the link that stepengine studio printed" in one for one in said.values())
    assert all("stepengine studio --link" in one for one in said.values())
    assert "link was already used" in said[spent]
    assert [one for one in chromium.complaints if "401" not in one] == []
