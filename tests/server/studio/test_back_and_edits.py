"""
Going back, seeing edits, comparing, judging and agents, in Chromium: with the agent's file saved as an editor saves it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.debugging.browser import AXE, CHROMIUM, Browser, faults
from tests.waits import until

from .conftest import Page
from .shop import CODE, Shop, done, rests, save

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the command chromium on PATH"),
]
STEPS = 2_000
LONG = CODE.replace("STEP, AgentDefinition", "STEP, AgentDefinition, Limits").replace(
    "tools=[price_of],", f"tools=[price_of], limits=Limits(max_steps={2 * STEPS}, max_actions={4 * STEPS}),"
)
VARIABLE = "[...document.querySelectorAll('.sheet tr')].find(r => r.querySelector('th')?.innerText.startsWith('{name}'))?.innerText"


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    report(tmp_path / "evals" / "first")
    with Shop(tmp_path, options=["--reports", "evals"]).open() as opened:
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


def report(folder: Path) -> None:
    """
    Write the report of an evaluation of one case, with the journal of its run.
    """
    from stepengine import AgentDefinition, Engine

    def ends(ctx: Any) -> Any:
        yield from ()
        return "Rome it is"

    (folder / "rome").mkdir(parents=True)
    agent = AgentDefinition("quick", handle_steps=ends)
    with Engine([agent]) as engine:
        engine.run_sync(agent, "Where to?", journal=folder / "rome" / "base-1.jsonl")
    sample = {
        "side": "base", "n": 1, "journal": "rome/base-1.jsonl", "status": "completed", "passed": True, "cost": "0.5", "tokens": 7,
        "scores": {}, "steps": 1, "seconds": 0.1, "reused": "new",
    }  # fmt: skip
    told = {
        "format": "stepengine.eval/1", "name": "tried", "seed": 1, "n": 1, "sides": [{"name": "base", "agent": "quick", "models": []}],
        "checks": [], "cases": [{"id": "rome", "tags": [], "group": None, "samples": [sample]}], "summary": [], "pairs": [], "ratios": [],
        "spent": "0.5", "stopped": "", "created": "2026-11-20T10:00:00+00:00",
    }  # fmt: skip
    (folder / "results.json").write_text(json.dumps(told))


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
    page.press("Run on with these")
    page.says("First difference: #3")
    fork = rests(client, page.run("location.hash").split("/")[2])
    page.go(f"#/runs/{fork}/back?place=%23%33", ".sheet")
    page.says("t/m 7: Multiply.")


@pytest.mark.spec("studio:ST5")
def test_broken_file_is_reported_before_starting_and_mended_one_runs(
    page: Page, client: httpx2.Client, shop: Shop
) -> None:
    run = done(client, "tally", "tea milk sugar")
    page.go(f"#/runs/{run}/back?place=%23%33", ".sheet")
    stands(page, "#3")
    save(shop.file, CODE.replace("for item in", "for item of"))
    page.says("SyntaxError", ".runon .problem")
    page.go("#/start/tally", "form.card")
    page.says("SyntaxError", "form .problem")
    save(shop.file, CODE.replace("total = worth", "total += worth"))
    page.wait("!document.querySelector('form .problem')")
    page.go(f"#/runs/{run}/back?place=%23%32", ".sheet")
    stands(page, "#2", item="'milk'", total="30")
    page.fill(".runon textarea", "7")
    page.press("Continue with this result")
    page.wait("location.hash.includes('/compare')")
    fork = rests(client, page.run("location.hash").split("/")[2])

    assert 87 == client.get(f"/runs/{fork}").json()["output"]


# --- edit and see -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST6")
def test_edit_is_shown_at_step_two_thousand(chromium: Browser, tmp_path: Path) -> None:
    """
    The times are told, and decide nothing.
    """
    with Shop(tmp_path, LONG).open() as shop, shop.client() as client:
        chromium.complaints.clear()
        chromium.open(shop.link)
        took = seen_at_the_end(Page(chromium, shop), client, shop)  # type: ignore[arg-type]  # as above
        chromium.call("Page.navigate", url="about:blank")

    logging.getLogger(__name__).info("from save to page at step %d: %s s", STEPS, took)
    assert 3 == len(took)


def seen_at_the_end(page: Page, client: httpx2.Client, shop: Shop) -> list[float]:
    """
    Return how long it took from each save until the page showed the last step under the new code.
    """
    run = done(client, "tally", " ".join(["tea"] * STEPS))
    last = f"#{2 * STEPS - 1}"
    page.go(f"#/runs/{run}/edit?place={last.replace('#', '%23')}", ".sheet")
    stands(page, last, total="30")
    took = []
    for number in range(3):
        began = time.monotonic()
        save(shop.file, LONG.replace("total = worth", f"total += {number} * 0 + worth"))
        page.wait(f"({VARIABLE.format(name='total')} ?? '').endsWith('\\t{30 * STEPS}')")
        page.wait("document.querySelector('.saves b')")
        took.append(time.monotonic() - began)
        save(shop.file, LONG)
        page.wait(f"({VARIABLE.format(name='total')} ?? '').endsWith('\\t30')")
    return [round(each, 2) for each in took]


@pytest.mark.spec("studio:ST6")
def test_broken_code_is_reported_and_the_last_view_stays(page: Page, client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk sugar")
    page.go(f"#/runs/{run}/edit?place=%23%33", ".sheet")
    stands(page, "#3", total="40")
    for said, code in (
        ("SyntaxError", CODE.replace("for item in", "for item of")),
        ("ended after 5 s", CODE.replace("total = 0", "total = 0\n    while True: pass")),
        ("its code ended the process", CODE.replace("total = 0", "total = 0\n    import os\n    os._exit(0)")),
    ):
        save(shop.file, code)
        page.says(said, ".broken")
        assert variable(page, "total").endswith("40")
    save(shop.file, CODE.replace("total = worth", "total += worth"))
    page.wait("!document.querySelector('.broken')")
    stands(page, "#3", total="70")
    page.says("completed: 120")
    save(shop.file, CODE.replace("price_of, item)", "price_of, item + '!' if total else item)"))
    page.says("The code diverges at #2")
    stands(page, "#1", item="'tea'")


@pytest.mark.spec("studio:ST6")
def test_edited_prompt_replays_the_reply_and_can_ask_the_model(page: Page, client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk")
    page.go(f"#/runs/{run}/edit?place=%23%33", ".sheet")
    stands(page, "#3", total="40")
    save(shop.file, CODE.replace("Add up.", "Add it all up."))
    page.says("Assuming the same reply")
    stands(page, "#1", item="'tea'", total="30")
    page.press("Show the request")
    page.says("Add it all up.", "[aria-label='What comes next']")
    page.press("Ask the model; shows the price first")
    page.says("1 model call", ".job")
    page.press("Ask the model")
    page.says("t/m 4: Add it all up.", ".job")
    assert "asked otherwise" in page.text(".places")


@pytest.mark.spec("studio:ST6")
def test_save_shows_the_first_changed_place_and_hides_empty_panels(
    page: Page, client: httpx2.Client, shop: Shop
) -> None:
    run = done(client, "tally", "tea milk sugar")
    page.go(f"#/runs/{run}/edit?place=%23%30", ".sheet")
    stands(page, "#0", item="'tea'")
    save(shop.file, CODE.replace("price_of, item)", "price_of, item + '!' if total else item)"))
    stands(page, "#2")
    page.says("What is shown is the last place before it.")
    save(shop.file, CODE.replace("    total = 0", "    yield from ()\n    total = 0"))
    page.says("The run equals its record to the end.")
    stands(page, "#2", item="'milk'")
    page.go(f"#/runs/{run}/back?place=%23%30", ".sheet")
    stands(page, "#0", item="'tea'")

    headings = page.run("[...document.querySelectorAll('.scroll h2, .scroll summary')].map(h => h.innerText)")
    assert "What the model saw" not in headings
    assert {"Source", "Variables", "Outcome"} <= {*headings}


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
    page.says("Rome it is")
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


@pytest.mark.spec("studio:ST8")
def test_agents_form_a_tree_with_tools_prompts_and_source(page: Page, shop: Shop) -> None:
    page.go("#/agents", ".d-tree li li a")
    tree = page.run("document.querySelector('.d-tree li li a').innerText")
    page.press("tally")
    page.says("Add up.")
    page.says("price_of")

    assert "tally" == tree
    line = CODE[: CODE.index("tally = AgentDefinition")].count("\n") + 1
    assert f"{shop.file}:{line}" in page.text(".facts")


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
