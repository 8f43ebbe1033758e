"""
Two programs and no code: `stepengine init`, `stepengine studio`, and everything from there in the page, without a key.

What answers is the script that `stepengine init` made, or llmock, which somebody else wrote, on loopback.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests import forked_processes
from tests.debugging.browser import AXE, CHROMIUM, Browser, faults
from tests.faults.test_llmock import COMMAND, served

from .conftest import Page
from .shop import Shop, save
from .test_back_and_edits import VARIABLE

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the command chromium on PATH"),
]
SCRIPT = "tests/replies.json"
STEPS = 500
PATIENCE = 180.0
"""Seconds: a run of so many steps takes a while where others work at the same time."""
PLAIN = """    found = yield from call(find_todos, ctx.prompt or ".")
"""
ASKS = f"""    place = yield from Ask("Which folder is looked through?", options=["src", "tests"])
    marks = 0
    for _ in range({STEPS}):
        found = yield from call(find_todos, place)
        marks = len(found)
"""


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
    said = made.types("init").partition("What works right now, without a key and without a network:")[2]
    typed = [line.strip() for line in said.splitlines() if line.startswith("  stepengine ")]
    assert "stepengine eval evals/todos.py" in typed
    made.options = tuple(shlex.split(typed[-1])[2:])
    assert ("--script", SCRIPT) == made.options
    return made


@pytest.fixture(params=["script", "llmock"])
def answered(request: pytest.FixtureRequest, project: Project) -> Iterator[Project]:
    """
    The project with a script in place of a model, and with a model that is a server.
    """
    if request.param == "script":
        yield project
        return
    if COMMAND is None:
        pytest.skip("the command llmock is not installed (extra 'faults')")
    with served("--tool-mode", "off", "--response-style", "hello") as url:
        project.options = ("--model", "gpt-4o", "--base-url", f"{url}/v1")
        yield project


@pytest.mark.spec("studio:ST1", "studio:ST6", "studio:ST12")
def test_newcomer_uses_init_and_studio_without_code_or_key(chromium: Browser, answered: Project) -> None:
    """
    The seconds are told, and decide nothing.
    """
    project = answered
    project.types("eval", "evals/todos.py")
    with project.open():
        chromium.size(1280, 900)
        chromium.complaints.clear()
        chromium.open(project.link)
        page = Page(chromium, project)  # type: ignore[arg-type]  # of the stage only its link is used
        page.seconds = PATIENCE
        page.says("todos")
        started(page, "src", "completed")
        if "--script" in project.options:
            page.says("1. Round the total.")
            # Whoever came while the run was under way stands where it was then.
            page.go(f"{page.run('location.hash').split('?')[0]}?step=1", ".run[data-ready]")
            page.says("answered by scripted/replies.json")
            scripted(page, project)
        judged(page)
        told = page.text(".scripted")
        chromium.call("Page.navigate", url="about:blank")
    project.edit(
        ("import STEP_ALL, AgentDefinition,", "import STEP_ALL, AgentDefinition, Ask, Limits,"), (PLAIN, ASKS),
        ("    tools=[find_todos],", "    tools=[find_todos],\n    limits=Limits(max_actions=10_000),"),
    )  # fmt: skip
    project.url = project.link = project.token = ""
    with project.open():
        chromium.open(project.link)
        started(page, "", "Which folder is looked through?")
        page.press("src")
        run = page.run("location.hash").split("/")[2].split("?")[0]
        page.says("completed", "main .head")
        took = [seen(page, project, run, number) for number in range(3)]
        forked(page, project, run)
        chromium.call("Page.navigate", url="about:blank")

    logging.getLogger(__name__).info("from save to page at step %d: %s s", STEPS, took)
    assert [] == chromium.complaints
    said = "A script replaces the models here: replies.json. No model is asked."
    assert (said if "--script" in project.options else "") == told


@pytest.mark.spec("studio:ST12", "studio:ST9")
def test_missing_key_is_named_on_the_start_page(chromium: Browser, project: Project) -> None:
    project.options = ()
    with project.open():
        chromium.size(400, 800)
        chromium.complaints.clear()
        chromium.open(project.link)
        page = Page(chromium, project)  # type: ignore[arg-type]  # of the stage only its link is used
        page.go("#/start", "form")
        page.says("This agent cannot be started yet: there is no API key for 'anthropic': set ANTHROPIC_API_KEY")
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


def seen(page: Page, project: Project, run: str, number: int) -> float:
    """
    Return how long it took from a save of the agent's file until the page showed its last step under the new code.
    """
    page.go(f"#/runs/{run}/edit?place=%23{STEPS}", ".sheet")
    page.wait(f"({VARIABLE.format(name='marks')} ?? '').endsWith('\\t2')")
    began = time.monotonic()
    code = project.edit(("marks = len(found)", f"marks += len(found) + 0 * {number}"))
    page.wait(f"({VARIABLE.format(name='marks')} ?? '').endsWith('\\t{2 * STEPS - 2}')")
    took = time.monotonic() - began
    save(project.file, code)
    page.wait(f"({VARIABLE.format(name='marks')} ?? '').endsWith('\\t2')")
    return round(took, 2)


def forked(page: Page, project: Project, run: str) -> None:
    """
    Go back to the last call of the tool, run on with another result, and see where the fork differs first.
    """
    page.go(f"#/runs/{run}/back?place=%23{STEPS}", ".runon textarea")
    page.says(f"at #{STEPS}", ".runon")
    page.fill(".runon textarea", "[]")
    # The place is told anew after a save, which takes nothing back of what was typed.
    code = project.edit(("marks = len(found)", "marks = len(found) + 0"))
    page.says("len(found) + 0")
    save(project.file, code)
    page.wait("!document.querySelector('main').innerText.includes('len(found) + 0')")
    assert page.run("document.querySelector('.runon textarea').value") == "[]"
    page.press("Continue with this result")
    page.wait("location.hash.includes('/compare')")
    page.says(f"First difference: #{STEPS}")
    page.go(page.run("location.hash").split("/compare")[0], ".run[data-ready]")
    page.says("nothing to do")


def scripted(page: Page, project: Project) -> None:
    """
    Edit the prompt, and see what the script says to it: no model is asked for that, and nothing is paid.
    """
    was = project.edit(("Put the TODO", "Sort the TODO"))
    page.go(f"{page.run('location.hash').split('?')[0]}/edit", ".sheet")
    page.press("Show the request")
    page.says("Sort the TODO", "[aria-label='What comes next']")
    page.press("Show the script's reply")
    page.says("It takes about 1 reply of the script replies.json, for nothing.", ".job")
    asked = page.text("[aria-label='What comes next']")
    page.press("Use the script")
    page.says("2. Refuse orders of nothing.", ".job")
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
            shown = "This link was used before" if address == spent else "not logged in"
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
    assert "link was used before" in said[spent]
    assert [one for one in chromium.complaints if "401" not in one] == []
