"""
How the page of the studio is used and looks: keys, light and dark, widths, other scripts, machines that check accessibility.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.debugging.browser import AXE, CHROMIUM, faults

from .conftest import Page
from .stage import Stage

pytestmark = [
    pytest.mark.deep,
    pytest.mark.leaks_allowed("the server outlasts a test: its threads and what its runs hold are the module's"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the command chromium on PATH"),
]


@pytest.fixture(scope="module")
def scene(stage: Stage) -> dict[str, str]:
    return prepared(stage)


def prepared(stage: Stage, *, prompt: str = "看看阁楼里有没有书架 — 屋根裏を見て") -> dict[str, str]:
    """
    Start runs of every kind, so that each view has something to show, and return their ids.
    """
    made = {
        "asks": stage.start("asker", prompt),
        "paints": stage.start("painter", "paint it"),
        "talks": stage.start("talker", "look around", session_id="house", turn=True),
        "sleeps": stage.start("sleeper", "good night"),
        "again": stage.start("talker", "look again"),
        "pays": stage.start("clerk", "Please pay bill.txt."),
    }
    stage.asked(made["asks"])
    stage.asked(made["paints"])
    stage.asked(made["pays"])
    stage.until(made["talks"])
    stage.until(made["sleeps"], "suspended")
    stage.until(made["again"])
    done = stage.place / f"{made['talks']}.jsonl"
    (stage.place / "theirs.jsonl").write_bytes(b"".join(done.read_bytes().splitlines(keepends=True)[:4]))
    return made


def views(scene: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {
        "runs": ("#/runs", ".row-link"),
        "none": ("#/runs?search=nothing-like-it", ".empty"),
        "run that asks": (f"#/runs/{scene['asks']}", ".question"),
        "approval": (f"#/runs/{scene['pays']}", ".origins"),
        "run that ended": (f"#/runs/{scene['talks']}?tab=calls", ".run[data-ready]"),
        "inbox": ("#/inbox", ".question"),
        "start": ("#/start/boss", "form"),
        "conversations": ("#/chat", ".threads a"),
        "conversation": ("#/chat/talker/house?owner=root", ".turn .bubble"),
        "schedules": ("#/schedules", "table"),
        "others": ("#/foreign", "table"),
        "other": ("#/foreign/theirs", ".next"),
        "compare": (f"#/runs/{scene['again']}/compare?other={scene['talks']}", ".run[data-ready]"),
        "go back": (f"#/runs/{scene['talks']}/back", ".runon"),
        "edit and see": (f"#/runs/{scene['talks']}/edit", ".course"),
    }


@pytest.mark.skipif(
    AXE is None, reason="needs axe-core: npm install --no-save axe-core, or AXE_CORE=path/to/axe.min.js"
)
@pytest.mark.spec("studio:ST9")
@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1280)])
def test_axe_finds_no_accessibility_violation_in_any_view(
    page: Page, scheme: str, width: int, scene: dict[str, str]
) -> None:
    page.chromium.scheme(scheme)
    page.chromium.size(width, 800)
    found: dict[str, list[Any]] = {}
    for name, (address, shows) in views(scene).items():
        page.go(address, shows)
        page.run("document.querySelectorAll('main details').forEach(d => d.open = true)")
        page.run("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")
        found[name] = faults(page.chromium)
    page.go("#/runs")
    page.chromium.press("?")
    page.wait("document.querySelector('dialog[open]')")
    found["keys"] = faults(page.chromium)

    assert {} == {name: each for name, each in found.items() if each}


@pytest.mark.spec("studio:ST9")
@pytest.mark.parametrize("width", [400, 1280, 3840])
def test_no_width_scrolls_sideways(page: Page, width: int, scene: dict[str, str]) -> None:
    page.chromium.size(width, 900)
    wide: dict[str, Any] = {}
    for name, (address, shows) in views(scene).items():
        page.go(address, shows)
        page.run("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")
        wide[name] = page.run(
            "Math.max(document.documentElement.scrollWidth, document.querySelector('main').scrollWidth) - innerWidth"
        )

    assert {} == {name: each for name, each in wide.items() if each > 0}


@pytest.mark.spec("studio:ST9")
def test_every_view_is_usable_with_the_keyboard_alone(page: Page, scene: dict[str, str]) -> None:
    def pressed(*keys: str) -> str:
        page.chromium.press(*keys)
        page.run("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")
        return str(page.run("location.hash"))

    ways = {key: pressed("g", key) for key in "isdocr"}
    page.wait("document.querySelector('.row-link')")
    pressed("/")
    in_search = page.run("document.activeElement.type")
    page.run("document.activeElement.blur()")
    page.run("document.querySelector('.row-link').focus()")
    page.chromium.press("Enter")
    page.wait("location.hash.startsWith('#/runs/')")
    pressed("g", "r")
    pressed("t")
    dark = page.run("document.documentElement.dataset.theme")
    pressed("t", "t")

    assert {"i": "#/inbox", "s": "#/start", "d": "#/schedules", "o": "#/foreign", "c": "#/chat", "r": "#/runs"} == ways
    assert ("search", "dark") == (in_search, dark)
    unreached = page.run(
        "[...document.querySelectorAll('button, a, input, select, textarea')].filter(n => n.tabIndex < 0).map(n => n.outerHTML)"
    )
    assert [] == unreached


@pytest.mark.spec("studio:ST9")
def test_deep_link_opens_its_view_in_a_new_tab(page: Page, scene: dict[str, str]) -> None:
    page.chromium.open(f"{page.stage.url}/#/runs/{scene['talks']}?step=2&tab=calls")
    page.wait("document.querySelector('.run #head h2')?.textContent === 'Step 2'")

    assert "Calls" in page.text(".run #tabs [aria-selected=true]")
    page.chromium.open(f"{page.stage.url}/#/inbox?agent=painter")
    page.wait("document.querySelector('.question')")
    assert {"painter"} == set(page.run("[...document.querySelectorAll('.question .cap a')].map(a => a.innerText)"))


@pytest.mark.spec("studio:ST9")
def test_page_loads_nothing_external_and_data_needs_a_session(page: Page) -> None:
    page.chromium.open(f"{page.stage.url}/#/runs")
    foreign = [one for one in page.chromium.requests if not one.startswith(page.stage.url)]
    link = page.stage.link()
    with page.stage.client() as client:
        names = [one.removeprefix(f"{page.stage.url}/") for one in page.chromium.requests if "/studio/" in one]
        without = [client.get(f"/{name}", headers={"authorization": ""}).status_code for name in ("", *names)]
        closed = [
            client.get(f"/{path}", headers={"authorization": ""}).status_code
            for path in ("runs", "agents", "questions")
        ]
        code = {"code": link.partition("#login=")[2]}
        first, second = [client.post("/login", json=code, headers={"authorization": ""}).status_code for _ in range(2)]
        outside = client.get("/studio/..%2f..%2fruns.py").status_code

    assert [] == foreign
    # The files of the page hold no data; whatever does needs a session, which no cookie carries.
    assert {200} == set(without)
    assert {401} == set(closed)
    assert "" == page.run("document.cookie")
    assert 8 < len(names)
    assert (200, 401, 404) == (first, second, outside)
