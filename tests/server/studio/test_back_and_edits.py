"""
Going back, seeing edits, comparing, judging and agents, in Chromium: with the agent's file saved as an editor saves it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.debugging.browser import AXE, CHROMIUM, Browser, faults
from tests.server.house import written
from tests.waits import until

from .conftest import Page
from .shop import CODE, Shop, done, rests, save

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the command chromium on PATH"),
]
VARIABLE = "[...document.querySelectorAll('.sheet tr')].find(r => r.querySelector('th')?.innerText.startsWith('{name}'))?.innerText"


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path, options=["--reports", "evals"])
    written(shop, "first")  # type: ignore[arg-type]  # of the house only its folder is used
    with shop.open() as opened:
        yield opened


@pytest.fixture
def client(shop: Shop) -> Iterator[httpx2.Client]:
    with shop.client() as opened:
        yield opened


@pytest.fixture
def page(chromium: Browser, shop: Shop) -> Iterator[Page]:
    chromium.size(1280, 900)
    chromium.scheme("light")
    chromium.complaints.clear()
    chromium.open(shop.link)
    yield Page(chromium, shop)  # type: ignore[arg-type]  # of the stage only its link is used
    chromium.call("Page.navigate", url="about:blank")


def variable(page: Page, name: str) -> str:
    return str(page.run(VARIABLE.format(name=name)) or "")


def stands(page: Page, address: str, **variables: str) -> None:
    """
    Wait until the page stands at a place, with these variables.
    """
    page.wait(f"document.querySelector('.way output')?.innerText.includes({json.dumps(f'{address} ')})")
    for name, value in variables.items():
        page.wait(f"({VARIABLE.format(name=name)} ?? '').endsWith({json.dumps(value)})")


def key(page: Page, name: str, *, shift: bool = False) -> None:
    code = {"ArrowLeft": 37, "ArrowRight": 39}[name]
    for kind in ("keyDown", "keyUp"):
        page.chromium.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key=name,
            code=name,
            windowsVirtualKeyCode=code,
            modifiers=8 if shift else 0,
        )


# --- going back -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST5")
def test_stepping_back_and_editing_a_result_shows_the_first_difference(page: Page, client: httpx2.Client) -> None:
    run = done(client, "tally", "tea milk sugar")
    page.go(f"#/runs/{run}/back?place=%23%33", ".sheet")
    stands(page, "#3", total="40", item="'milk'")
    key(page, "ArrowRight")
    stands(page, "#4", item="'sugar'", total="40")
    key(page, "ArrowLeft", shift=True)
    stands(page, "#3", item="'milk'")
    page.run(
        "(() => { const s = document.querySelector('.way input'); s.value = 2; s.dispatchEvent(new Event('input')); })()"
    )
    stands(page, "#2", item="'milk'", total="30")
    address = page.run("location.hash")
    page.run("location.reload()")
    stands(page, "#2", item="'milk'", total="30")
    page.says("Add up.")
    page.fill(".runon textarea", "7")
    page.press("Continue with this result")
    page.wait("location.hash.includes('/compare')")
    page.wait("document.querySelector('.run[data-ready]')")
    page.says("First difference: #2")

    assert address.endswith("place=%232")
    assert "price_of" in page.text(".run")
    fork = page.run("location.hash").split("/")[2]
    assert fork != run
    assert "completed" == client.get(f"/runs/{rests(client, fork)}").json()["status"]


@pytest.mark.spec("studio:ST5")
def test_another_system_prompt_continues_as_a_fork(page: Page, client: httpx2.Client) -> None:
    run = done(client, "tally", "tea milk sugar")
    page.go(f"#/runs/{run}/back?place=%23%33", ".sheet")
    stands(page, "#3")
    page.press("Another prompt, model or setting")
    page.fill(".runon details textarea", "Multiply.")
    page.press("Continue with these")
    page.says("First difference: #3")
    fork = rests(client, page.run("location.hash").split("/")[2])
    page.go(f"#/runs/{fork}/back?place=%23%33", ".sheet")
    page.says("t/m 7: Multiply.")


# --- edit and see -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST6")
def test_broken_code_is_reported_and_the_last_view_stays(page: Page, client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk sugar")
    page.go(f"#/runs/{run}/edit?place=%23%33", ".sheet")
    stands(page, "#3", total="40")
    save(shop.file, CODE.replace("for item in", "for item of"))
    page.says("SyntaxError", ".broken")
    assert variable(page, "total").endswith("40")
    save(shop.file, CODE.replace("total = worth", "total += worth"))
    page.wait("!document.querySelector('.broken')")
    stands(page, "#3", total="70")
    page.says("completed: 120")
    save(shop.file, CODE.replace("price_of, item)", "price_of, item + '!' if total else item)"))
    page.says("The code diverges at #2")
    stands(page, "#1", item="'tea'")


@pytest.mark.spec("studio:ST6")
def test_save_shows_the_first_changed_place_and_hides_empty_panels(
    page: Page, client: httpx2.Client, shop: Shop
) -> None:
    run = done(client, "tally", "tea milk sugar")
    page.go(f"#/runs/{run}/edit?place=%23%30", ".sheet")
    stands(page, "#0", item="'tea'")
    save(shop.file, CODE.replace("price_of, item)", "price_of, item + '!' if total else item)"))
    stands(page, "#2")
    page.says("Showing the last place before it.")
    save(shop.file, CODE.replace("    total = 0", "    yield from ()\n    total = 0"))
    page.says("The run equals its record to the end.")
    stands(page, "#2", item="'milk'")
    page.go(f"#/runs/{run}/back?place=%23%30", ".sheet")
    stands(page, "#0", item="'tea'")

    headings = page.run("[...document.querySelectorAll('.scroll h2, .scroll summary')].map(h => h.innerText)")
    assert "What the model saw" not in headings
    assert {"Source", "Variables", "Outcome"} <= {*headings}


@pytest.mark.spec("studio:ST5", "studio:SV36")
def test_replay_shows_the_first_difference_of_an_edit(page: Page, client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk sugar")
    page.go(f"#/runs/{run}", ".run[data-ready]")
    page.press("Replay")
    page.says("The current code matches the record.", ".replayed")
    save(shop.file, CODE.replace("price_of, item)", "price_of, item + '!' if total else item)"))
    page.press("Replay")
    page.says("First difference: step 1, #2, at", ".replayed")

    line = 1 + CODE[: CODE.index("price = yield")].count("\n")
    assert all(part in page.text(".replayed") for part in (f"shop.py:{line}", "milk!"))


@pytest.mark.spec("studio:ST5")
def test_comparison_uses_the_width_of_a_small_screen(page: Page, client: httpx2.Client) -> None:
    run = done(client, "tally", "tea milk sugar")
    fork = rests(client, client.post(f"/runs/{run}/fork", json={"at": "#2", "edit": 7}).json()["run_id"])
    page.chromium.size(1280, 800)
    page.go(f"#/runs/{fork}/compare?other={run}", ".run[data-ready]")

    wide = page.run("['#middle', '#panel'].map(id => document.querySelector(`.run ${id}`).offsetWidth)")
    assert min(wide) >= 480
    one_line = page.run("new Set([...document.querySelectorAll('.run #tabs button')].map(b => b.offsetTop)).size")
    assert 1 == one_line
    assert [] == page.run(
        "[...document.querySelectorAll('.run .chart:not([hidden]) h2')].filter(h => h.offsetWidth && h.innerText.includes('unknown')).map(h => h.innerText)"
    )


# --- judging, agents --------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST7")
def test_evaluation_case_opens_as_a_run_and_runs_are_judged(page: Page, client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk")
    page.go("#/reports", ".threads a")
    page.run("document.querySelector('.threads a').click()")
    page.says("rome")
    page.press("passes")
    page.wait("document.querySelector('.run[data-ready]')")
    page.says("quick")
    page.go(f"#/runs/{run}/judge", ".cards")
    page.fill(".cards input.mono", "output == 70")
    page.press("Find the step")
    page.says("It takes about 9 model calls")
    page.press("Ask the model")
    page.says("no step is to blame")
    page.press("Write the test")
    page.says("tests/test_pin_")
    save(shop.file, CODE.replace("Be brief.", "Be loud."))
    page.go("#/reports/impact", ".picks label + label input")
    page.run("document.querySelector('.picks input').click()")
    page.press("Judge 1 run")
    page.says("It takes about")
    page.press("Leave it")
    page.says("It was cancelled")
    until(lambda: not [one for one in client.get("/jobs").json()["jobs"] if one["status"] == "running"])


@pytest.mark.skipif(AXE is None, reason="needs axe-core")
@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1280)])
def test_back_edit_compare_judge_and_agent_views_are_accessible(
    page: Page, client: httpx2.Client, shop: Shop, scheme: str, width: int
) -> None:
    run = done(client, "tally", "tea milk sugar")
    fork = rests(client, client.post(f"/runs/{run}/fork", json={"at": "#2", "edit": 7}).json()["run_id"])
    page.chromium.size(width, 900)
    page.chromium.scheme(scheme)
    found = {}
    for address, shows in (
        (f"#/runs/{run}/back?place=%23%33", ".sheet"),
        (f"#/runs/{run}/edit?place=%23%33", ".sheet"),
        (f"#/runs/{fork}/compare?other={run}", ".d-first"),
        (f"#/runs/{run}/judge", ".cards"),
        ("#/agents", ".d-tree li a"),
        ("#/agents/asker", ".toolbox"),
        ("#/reports", ".threads a"),
        ("#/reports/of/first", ".sheet"),
        ("#/reports/impact", ".picks input"),
    ):
        page.go(address, shows)
        page.wait("[...document.querySelectorAll('main h1')].some(h => h.innerText.trim())")
        if "/edit" in address:
            save(shop.file, CODE.replace("total = worth", "total += worth").replace("Be brief.", "Be loud."))
            page.wait("document.querySelector('.d-other')")
            found["edited"] = faults(page.chromium)
            save(shop.file, "what is this")
            page.wait("document.querySelector('.broken')")
            found["broken"] = faults(page.chromium)
            save(shop.file, CODE)
            page.wait("!document.querySelector('.broken')")
        found[address] = faults(page.chromium)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), address

    assert {name: [] for name in found} == found
