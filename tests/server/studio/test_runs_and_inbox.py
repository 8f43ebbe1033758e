"""
The page of the studio in Chromium: runs, how they are started, watched and answered, and conversations.
"""

from __future__ import annotations

import base64
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, ToolCall
from stepengine.server import Caller, Tokens
from tests.debugging.browser import CHROMIUM
from tests.waits import until

from .conftest import Page
from .stage import HOSTILE, WORDS, Model, Stage, png

pytestmark = [
    pytest.mark.deep,
    pytest.mark.leaks_allowed("the server outlasts a test: its threads and what its runs hold are the module's"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the command chromium on PATH"),
]
ROWS = "[...document.querySelectorAll('.row-link')].map(r => r.innerText.replace(/\\s+/g, ' '))"


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST1")
def test_run_list_shows_state_agent_steps_cost_time_and_waits(page: Page) -> None:
    waits, done, sleeper = [
        page.stage.start(agent, prompt)
        for agent, prompt in (("asker", "first shelf"), ("talker", "look around"), ("sleeper", "good night"))
    ]
    page.stage.asked(waits)
    page.stage.until(done)
    page.stage.until(sleeper, "suspended")
    page.go("#/runs?search=first", ".row-link")
    page.says("Which size should the shelf have?", ".rows")
    asking = page.run(ROWS)
    page.go("#/runs?search=around")
    page.says("look around", ".rows")
    page.says("completed", ".rows")
    ended = page.run(ROWS)
    page.go("#/runs?status=suspended&search=night")
    page.says("until", ".rows")

    assert 1 == len(asking) == len(ended)
    assert "asker" in asking[0]
    assert all(part in ended[0] for part in ("completed", "talker", "4 steps"))
    assert re.search(r" \d+(\.\d)? s ", ended[0])
    page.go("#/schedules")
    page.says("good night")


@pytest.mark.spec("studio:ST1")
def test_run_list_is_live_and_filters_are_in_the_address(page: Page) -> None:
    page.go("#/runs?search=unheard-of")
    page.says("No matching runs")
    run = page.stage.start("talker", "unheard-of thing")
    page.says("unheard-of thing", ".rows")
    page.press("completed", ".filters")
    page.wait("location.hash.includes('status=completed')")
    page.says("unheard-of thing", ".rows")
    page.fill("main input[type=search]", "nowhere at all")
    page.says("No matching runs")

    assert "search=nowhere" in page.run("location.hash")
    assert page.stage.look(run)["status"] == "completed"


@pytest.mark.spec("studio:ST1")
def test_ten_thousand_runs_scroll_with_few_rows(own: Any, tmp_path: Any) -> None:
    from stepengine.server.ledger import Ledger, RunRow, make_register_run_act

    stage = Stage(tmp_path)
    stage.place.mkdir(mode=0o700)
    ledger = Ledger(stage.place)
    rows = [
        RunRow(
            f"{n:032x}",
            "root",
            "talker",
            "completed",
            1_000_000.0 + n,
            1_000_000.0 + n,
            {"prompt": f"run {n}", "params": None},
        )
        for n in range(10_000)
    ]
    ledger.write([make_register_run_act(row, None) for row in rows])
    ledger.close()
    page = own(stage)
    page.go("#/runs", ".row-link")
    page.says("run 9999", ".rows")
    most = 0
    for wanted in (9_800, 9_500, 9_000):
        while page.run("Number([...document.querySelectorAll('.row-link .title')].pop().innerText.slice(4))") > wanted:
            page.run("document.querySelector('.rows').scrollTop = 1e9")
            most = max(most, page.run("document.querySelectorAll('.row-link').length"))
            page.run("new Promise(go => setTimeout(go, 30))")
    page.fill("main input[type=search]", "run 77")
    page.wait(f"({ROWS}).some(r => r.includes('run 7799'))")

    assert 0 < most < 60


# --- starting ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST2")
def test_run_starts_from_the_schema_form_with_limits(page: Page) -> None:
    page.go("#/start/boss", "form")
    labels = page.run("[...document.querySelectorAll('form .field > span')].map(s => s.textContent)")
    kinds = page.run("[...document.querySelectorAll('form .field :is(input, select, textarea)')].map(f => f.type)")
    page.fill("form textarea", "look around")
    page.press("Start")
    page.wait("document.querySelector('form :invalid')")
    page.fill("form .string textarea", "the attic")
    page.fill("form .json textarea", "[1, oops]")
    page.press("Start")
    page.says("sizes is not valid JSON")
    page.fill("form .json textarea", "[1, 2]")
    page.fill("form .enum select", "green")
    page.run("document.querySelector('form details').open = true")
    page.fill("form input.mono", "stage/other")
    page.fill("form .pair input", "2")
    page.press("Start")
    page.wait("location.hash.startsWith('#/runs/')")
    run = page.run("location.hash").split("/")[2]
    found = page.stage.until(run)

    assert [
        "Prompt",
        "room required",
        "coats",
        "colour",
        "dry",
        "sizes",
        "Model",
        "Steps at most",
        "US dollars at most",
    ] == labels
    assert ["textarea", "textarea", "number", "select-one", "checkbox", "textarea", "text", "number", "number"] == kinds
    assert "max_steps" == found["status"]
    with page.stage.client() as client:
        view = client.get(f"/runs/{run}/view").json()
    given = view["texts"][view["run"]["params"]]
    assert {"room": "the attic", "coats": 2, "colour": "green", "sizes": [1, 2], "dry": False} == given
    assert 3 >= view["run"]["steps"]
    assert ["stage/other"] == view["run"]["models"]


# --- conversations ----------------------------------------------------------------------------------------------------


def say(page: Page, text: str) -> None:
    page.fill(".composer textarea", text)
    page.press("Send", ".composer")


@pytest.mark.spec("studio:ST2")
def test_conversation_continues_over_turns_with_thinking_and_pictures(page: Page) -> None:
    page.go("#/chat/talker/house", ".composer")
    say(page, "hello")
    page.says(WORDS.strip(), ".thread")
    page.wait("document.querySelector('.thread .state.good')")
    # Between the last event and the recorded turn the page has neither.
    page.wait("document.querySelector('.thread .thinks')")
    thinking = page.run("document.querySelector('.thread .thinks').open")
    picture = base64.b64encode(png(30, 20)).decode()
    page.run(
        "(() => { const bytes = Uint8Array.from(atob('"
        + picture
        + "'), c => c.charCodeAt(0)), files = new DataTransfer();"
        "files.items.add(new File([bytes], 'wall.png', {type: 'image/png'}));"
        "const f = document.querySelector('.composer input[type=file]'); f.files = files.files; f.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    page.wait("document.querySelector('.chosen img')")
    say(page, "now draw")
    page.says("I saw 2 pictures.", ".thread")
    page.wait("document.querySelectorAll('.thread .turn figure img').length === 2")
    page.wait("document.querySelectorAll('.thread .state.good').length === 2")
    page.wait("[...document.querySelectorAll('.thread figure img')].every(i => i.naturalWidth > 0)")
    page.go("#/chat", ".threads a")
    page.says("house", ".threads")

    assert thinking is False
    with page.stage.client() as client:
        runs = client.get("/runs", params={"session": "house", "owner": "operator"}).json()["runs"]
        view = client.get(f"/runs/{runs[0]['run_id']}/view").json()
    assert 2 == len(runs)
    assert "hello" in json.dumps(view["texts"])


# --- watching ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST3")
def test_watched_run_shows_agents_handler_line_calls_and_figures(page: Page) -> None:
    run = page.stage.start("asker", "watch me")
    page.go(f"#/runs/{run}", ".run[data-ready]")
    page.says("asks is at", ".standing")
    line = page.text(".standing .here")
    page.press("S", ".question")
    page.wait("!document.querySelector('.question')")
    page.wait("document.querySelector('.run #tree')?.innerText.includes('kid')")
    page.wait("document.querySelector('.crumbs .state').innerText === 'completed'")
    page.wait("[...document.querySelectorAll('.run #list [role=option]')].some(r => r.innerText.includes('cellar'))")

    assert "Which size should the shelf have?" in line
    page.run(f"location.hash = '#/runs/{run}?step=%230&tab=handler'")
    page.wait("document.querySelector('.run #panel .source .here')?.innerText.includes('Which size')")
    facts = page.text(".run #facts")
    assert "steps 4" in " ".join(facts.split())


@pytest.mark.spec("studio:ST3")
def test_closed_run_view_sends_no_more_requests(page: Page) -> None:
    run = page.stage.start("talker", "short")
    page.stage.until(run)
    page.go(f"#/runs/{run}", ".run[data-ready]")
    page.go("#/inbox")
    page.wait("!document.querySelector('.run')")
    page.chromium.requests.clear()
    time.sleep(1.5)

    assert [] == [one for one in page.chromium.requests if run in one]


@pytest.mark.spec("studio:ST2", "studio:ST3")
def test_text_is_shown_while_it_streams(page: Page) -> None:
    Model.goes_on.clear()
    page.go("#/chat/slow/talk", ".composer")
    say(page, "hello")
    page.wait("document.querySelector('.thread :is(.coming, .thinks pre)')?.textContent.length > 10")
    coming = page.run("document.querySelector('.thread :is(.coming pre, .thinks pre)').textContent")
    run = page.run("document.querySelector('.under a').getAttribute('href')")
    page.go(run, ".now .line")
    page.wait("document.querySelector('.now :is(.stream, .thinks pre)')?.textContent.length > 10")
    Model.goes_on.set()
    page.wait("document.querySelector('.crumbs .state').innerText === 'completed'")

    assert "The attic comes to mind first.".startswith(coming[:30]) or WORDS.startswith(coming)


# --- the inbox --------------------------------------------------------------------------------------------------------


def card(prompt: str) -> str:
    return f".question:has(a[href*='{prompt}'])"


@pytest.mark.spec("studio:ST4")
def test_question_shows_asker_action_and_all_answers(page: Page) -> None:
    painter, asker = page.stage.start("painter"), page.stage.start("asker")
    page.stage.asked(painter)
    page.stage.asked(asker)
    page.go("#/inbox")
    page.wait(
        f"document.querySelector({json.dumps(card(painter))}) && document.querySelector({json.dumps(card(asker))})"
    )
    paints, asks = page.text(card(painter)), page.text(card(asker))
    page.press("L", card(asker))
    page.wait(f"!document.querySelector({json.dumps(card(asker))})")
    page.press("Deny with a reason", card(painter))
    page.fill(f"{card(painter)} input[type=text]", "It was painted yesterday.")
    page.press("Deny for this reason", card(painter))
    page.wait(f"!document.querySelector({json.dumps(card(painter))})")

    assert all(
        part in paints
        for part in (
            "painter",
            "paint",
            "May paint run?",
            "what",
            "the wall",
            "Allow",
            "Edit and allow",
            "Allow from now on",
        )
    )
    assert all(part in asks for part in ("asker", "Which size should the shelf have?", "S", "L"))
    assert "size L" == page.stage.until(asker)["output"]
    page.stage.until(painter)
    with page.stage.client() as client:
        journal = client.get(f"/runs/{painter}/journal").text
    assert "It was painted yesterday." in journal


@pytest.mark.spec("studio:ST4")
def test_call_is_allowed_with_edited_input_or_permanently(page: Page) -> None:
    painter, talker = page.stage.start("painter"), page.stage.start("talker", "paint the wall")
    page.stage.asked(painter)
    page.stage.asked(talker)
    page.go("#/inbox")
    page.press("Edit and allow", card(painter))
    page.fill(f"{card(painter)} textarea", '{"what": "the do')
    page.press("Allow with this input", card(painter))
    page.says("This is not JSON", card(painter))
    page.fill(f"{card(painter)} textarea", '{"what": "the door"}')
    page.press("Allow with this input", card(painter))
    page.wait(f"!document.querySelector({json.dumps(card(painter))})")
    page.press("Allow from now on", card(talker))
    page.says("exactly this call", card(talker))
    page.press("For this run", f"{card(talker)} li:first-child")
    page.wait(f"!document.querySelector({json.dumps(card(talker))})")
    page.stage.until(painter)
    page.stage.until(talker)

    with page.stage.client() as client:
        assert "the door is red" in client.get(f"/runs/{painter}/journal").text
        assert "the wall is red" in client.get(f"/runs/{talker}/journal").text


@pytest.mark.spec("studio:ST4")
def test_approval_of_any_input_is_confirmed_before_it_counts(page: Page) -> None:
    run = page.stage.start("talker", "paint the wall")
    page.stage.asked(run)
    page.go("#/inbox")
    page.press("Allow from now on", card(run))
    page.says("ANY call of paint, with any input", card(run))
    widest = f"{card(run)} li:last-child"
    page.press("For this run", widest)
    page.says("Every later call of paint runs without approval, with any input.", widest)
    page.press("Cancel", widest)
    page.wait(f"!document.querySelector({json.dumps(widest)}).innerText.includes('without approval')")
    open_after_one_click = page.stage.look(run)["questions"]
    page.press("For this run", widest)
    page.press("Confirm: for this run", widest)
    page.wait(f"!document.querySelector({json.dumps(card(run))})")
    page.stage.until(run)

    assert ["paint"] == [question["tool_name"] for question in open_after_one_click]
    with page.stage.client() as client:
        assert "allow any calls of paint by talker" in client.get(f"/runs/{run}/journal").text


@pytest.mark.spec("studio:ST4")
def test_page_offers_only_what_its_token_may_do(page: Page) -> None:
    ann = Caller("ann", frozenset({"read", "run", "answer"}))
    token = Tokens.open(page.stage.folder / "tokens.json").add(ann.name, ann.scopes)
    with page.stage.client(token) as client:
        run = client.post("/runs", json={"agent": "talker", "prompt": "paint the wall"}).json()["run_id"]
    page.stage.asked(run)
    page.chromium.open(page.stage.link(ann))
    page.go("#/inbox")
    page.press("Allow from now on", card(run))
    page.says("exactly this call", card(run))
    names = "[...document.querySelectorAll({})].map(b => b.innerText.trim())"
    offered = page.run(names.format(json.dumps(f"{card(run)} button")))
    page.go(f"#/runs/{run}")
    page.says("Cancel", ".head")
    around = page.run(names.format("'.head button, .head nav a'"))
    page.press("Allow from now on", ".card")
    page.press("For this run", ".card li:first-child")
    page.stage.until(run)

    assert {"Allow", "Deny", "For this run"} <= {*offered}
    assert not {"Always", "Edit and allow"} & {*offered}
    assert ["Watch", "Cancel"] == around


@pytest.mark.spec("studio:ST4")
def test_second_answer_to_a_question_names_the_first_answerer(page: Page) -> None:
    run = page.stage.start("asker")
    asked = page.stage.asked(run)
    page.go("#/inbox")
    page.wait(f"document.querySelector({json.dumps(card(run))})")
    # The page asks again every second or so; a second tab is quicker than that.
    page.run(
        "window.fetchOnce = window.fetch; window.fetch = (path, more) => String(path).startsWith('questions') ? new Promise(() => {}) : window.fetchOnce(path, more)"
    )
    with page.stage.client() as client:
        assert 202 == client.post(f"/runs/{run}/answers", json={"answers": {asked["id"]: "S"}}).status_code
    page.press("L", card(run))
    page.says("root answered first", ".question.done")
    told = page.text(".question.done")
    page.chromium.complaints[:] = [one for one in page.chromium.complaints if "409" not in one]

    assert "S" in told
    assert "size S" == page.stage.until(run)["output"]


# --- hostile journals -------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST11")
def test_hostile_text_is_shown_as_text_everywhere(page: Page) -> None:
    run = page.stage.start("asker", HOSTILE)
    page.stage.asked(run)
    for address, shows in (
        ("#/runs", ".row-link"), (f"#/runs/{run}", ".run[data-ready]"), ("#/inbox", ".question"),
        (f"#/runs?search={'%3Cimg'}", ".row-link"), ("#/chat/talker/%3Cimg%20src=x%20onerror=window.hacked=1%3E", ".composer"),
    ):  # fmt: skip
        page.go(address, shows)
        page.run("new Promise(go => setTimeout(go, 100))")

        assert page.run(
            "window.hacked === undefined && !document.querySelector('#studio img[src=\"x\"], #studio script')"
        )
    page.go("#/runs?search=%3Cscript%3E", ".row-link")
    page.says("<img src=x", ".row-link")


@pytest.mark.spec("studio:ST11")
def test_content_policy_blocks_foreign_script_style_and_text(page: Page) -> None:
    page.run(
        "window.caught = []; addEventListener('securitypolicyviolation', e => window.caught.push(e.effectiveDirective))"
    )
    refused = page.run(
        "(() => { try { document.createElement('div').innerHTML = '<b>x</b>'; return ''; } catch (e) { return e.name; } })()"
    )
    page.run(
        "(() => { const s = document.createElement('img'); s.src = 'https://example.com/x.png'; document.body.append(s); })()"
    )
    page.run("fetch('https://example.com/').catch(() => 0)")
    page.wait("window.caught.includes('img-src') && window.caught.includes('connect-src')")
    page.chromium.complaints.clear()
    with page.stage.client() as client:
        answer = client.get("/")

    assert "TypeError" == refused
    assert all(
        part in answer.headers["content-security-policy"]
        for part in ("default-src 'none'", "script-src 'self'", "require-trusted-types-for 'script'")
    )
    assert not [
        one for one in page.chromium.requests if not one.startswith(page.stage.url) and "example.com" not in one
    ]


@pytest.mark.spec("studio:ST11")
def test_foreign_journal_resumes_only_after_approval_of_its_effects(page: Page) -> None:
    run = page.stage.start("painter")
    page.stage.asked(run)
    journal = page.stage.place / f"{run}.jsonl"
    until(lambda: page.stage.look(run)["questions"])
    with page.stage.client() as client:
        client.post(f"/runs/{run}/answers", json={"answers": {page.stage.asked(run)["id"]: True}})
    page.stage.until(run)
    lines = journal.read_bytes().splitlines(keepends=True)
    begun = next(n for n, line in enumerate(lines) if b'"tool_call"' in line)
    theirs = page.stage.place / "theirs.jsonl"
    theirs.write_bytes(b"".join(lines[: begun + 1]))
    before = theirs.read_bytes()
    page.go("#/foreign/theirs", ".run[data-ready]")
    page.says("Show the next effects")
    page.go("#/foreign")
    page.says("theirs", "table")
    page.go("#/foreign/theirs", ".run[data-ready]")
    with page.stage.client() as client:
        unseen = client.post("/foreign/theirs/resume", json={"seen": "something else"}).status_code
    unresumed = theirs.read_bytes()
    no_way = page.run("[...document.querySelectorAll('main button')].some(b => b.innerText.includes('Go on with'))")
    page.press("Show the next effects")
    page.says("paint", ".next")
    page.says("the wall", ".next")
    page.press("Resume with exactly this")
    page.wait("location.hash === '#/runs/theirs'")
    asked = page.stage.asked("theirs")

    assert (409, before) == (unseen, unresumed)
    assert not no_way
    assert "doubt:#1" == asked["id"]
    # The yes that stands in one where the call had not begun is not believed.
    (page.stage.place / "others.jsonl").write_bytes(b"".join(lines[:begun]))
    with page.stage.client() as client:
        seen = client.get("/foreign/others").json()["seen"]
        assert 202 == client.post("/foreign/others/resume", json={"seen": seen}).status_code
    assert "paint" == page.stage.asked("others")["tool_name"]


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST10")
def test_database_runs_are_started_answered_and_watched(tmp_path: Any, db: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("psycopg", reason="needs the extra 'durable'")
    from stepengine.durable import DurableEngine

    engine = DurableEngine(on=Stage(tmp_path).engine(), db=db, executor="stage", polling=0.1)
    stage = Stage(tmp_path / "other", engine=engine, runs=None, max_live=None)
    page = request.getfixturevalue("own")(stage)  # behind the database, which outlasts it so
    page.go("#/start/asker", "form")
    page.fill("form textarea", "a shelf")
    page.press("Start")
    page.wait("location.hash.startsWith('#/runs/')")
    run = page.run("location.hash").split("/")[2]
    page.press("L", ".question")
    page.wait("document.querySelector('.crumbs .state')?.innerText === 'completed'")
    page.wait("[...document.querySelectorAll('.run #list [role=option]')].some(r => r.innerText.includes('cellar'))")
    page.go(f"#/runs/{run}?step=%230&tab=handler", ".run[data-ready]")
    page.wait("document.querySelector('.run #panel .source .here')?.innerText.includes('Which size')")
    page.go("#/runs?search=shelf", ".row-link")
    page.says("completed", ".rows")

    assert "size L" == stage.look(run)["output"]


@pytest.mark.spec("studio:ST2")
def test_refused_start_is_explained_in_the_form(page: Page) -> None:
    page.go("#/start/talker", "form")
    page.run("document.querySelector('form details').open = true")
    page.fill("form textarea", "anything")
    page.fill("form .pair input", "5000")
    page.press("Start")
    page.says("limits.max_steps: 5000 exceeds the agent's limit on this server, 50", "form")
    page.chromium.complaints[:] = [one for one in page.chromium.complaints if "422" not in one]

    assert page.run("location.hash").startswith("#/start")


@pytest.mark.spec("studio:ST3", "generator-contract:L42")
def test_an_ended_run_shows_the_warnings_of_its_children(own: Any, tmp_path: Path) -> None:
    def note(_: Any) -> Any:
        yield ToolCall("set_output", {"found": 1})

    noter = AgentDefinition("noter", tools=["set_output"], handle_steps=note)
    leader = AgentDefinition(
        "leader", spawnable_agents=[noter], handle_steps=lambda ctx: (yield from AgentCall("noter"))
    )
    page = own(Stage(tmp_path / "noting", engine=Engine([leader])))
    run = page.stage.start("leader")
    page.stage.until(run)
    page.go(f"#/runs/{run}", ".run[data-ready]")

    page.says("run 0 (noter): agent 'noter' calls set_output", ".warnings")


@pytest.mark.spec("studio:ST2")
def test_question_in_a_turn_is_answered_in_the_conversation(page: Page) -> None:
    page.go("#/chat/talker/walls", ".composer")
    say(page, "paint the wall")
    page.says("May paint run?", ".thread")
    page.fill(".composer textarea", "and more")
    busy = page.run("document.querySelector('.composer .primary').disabled")
    page.press("Allow", ".thread")
    page.wait("document.querySelector('.thread .state.good')")

    assert busy
    page.says(WORDS.strip(), ".thread")
