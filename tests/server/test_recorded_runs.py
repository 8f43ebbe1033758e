"""
The three verbs for recorded runs over HTTP: resume with other code, replay, and fork with tools that the record answers.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

pytest.importorskip("starlette")

from stepengine import STEP, AgentDefinition, Ask, Engine, ToolAnnotations, call, tool
from stepengine.errors import JournalError
from stepengine.journal import SqliteJournal
from stepengine.journal.run_writer import RunWriter
from stepengine.server import Quotas, Tokens, run_launcher, run_recovery
from stepengine.server.ledger import Ledger, RunRow, make_register_run_act, make_store_status_act
from stepengine.server.live_runs import LiveRuns
from stepengine.server.run_reader import RunReader
from stepengine.server.run_requests import make_owner_session_key
from stepengine.server.run_store import RunStore
from stepengine.testing import ScriptedModel, text, tool_call
from tests.cases import case
from tests.waits import until

from .behind import kind_of
from .house import SECONDS, House, answered, ended, question_of, started

HAIKU, SONNET = "anthropic/claude-haiku-4-5", "anthropic/claude-sonnet-4-5"
DONE: list[str] = []
MILK = {"system_prompt": "The price of milk"}


@tool
def deploy(place: str) -> str:
    """Deploy."""
    DONE.append(place)
    return f"deployed to {place}"


@tool(annotations=ToolAnnotations(read_only=True))
def price_of(item: str) -> str:
    """Return a price."""
    DONE.append(item)
    return f"{item} costs {10 * len(item)}"


@tool
async def dally() -> str:
    """Take long."""
    DONE.append("dally")
    await asyncio.sleep(SECONDS)
    return "late"


def deploying(ctx: Any) -> Any:
    done = yield from call(deploy, place="Rome")
    day = yield from Ask("On which day?")
    return f"{done} on {day}"


def asking_otherwise(ctx: Any) -> Any:
    done = yield from call(deploy, place="Rome")
    day = yield from Ask("When?")
    return f"{done} on {day}"


def deploying_elsewhere(ctx: Any) -> Any:
    done = yield from call(deploy, place="Oslo")
    day = yield from Ask("On which day?")
    return f"{done} on {day}"


def failing_without_a_day(ctx: Any) -> Any:
    yield from call(deploy, place="Rome")
    msg = "there is no day"
    raise ValueError(msg)


def dallying(ctx: Any) -> Any:
    yield from call(deploy, place="Rome")
    yield from call(dally)


def pricing(ctx: Any) -> Any:
    while not (yield STEP).steps_complete:
        pass


def reply(request: Any) -> Any:
    """Ask for the price of what the last word of the system prompt names, then say what it was."""
    asked = str(request.system_prompt)
    if request.messages[-1].role != "tool":
        return tool_call("price_of", {"item": asked.rsplit(maxsplit=1)[-1]})
    return text(f"{request.model}: {request.messages[-1].text}")


class Shop(House):
    """
    A server whose agents are edited while it is closed.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, wait_for_answers=0)
        known = Tokens.open(folder / "tokens.json")
        self.tokens["dora"] = known.add("dora", ["read", "run", "answer", "debug"])
        self.tokens["other"] = known.add("other", ["read", "run", "debug"])
        self.tokens["looker"] = known.add("looker", ["read", "debug"], owner="dora")
        self.tokens["runner"] = known.add("runner", ["run"], owner="dora")
        self.handler: Any = deploying
        self.removed = ""
        self.models: ScriptedModel | None = ScriptedModel(reply)

    def engine(self) -> Engine:
        agents = [
            AgentDefinition("deployer", tools=[deploy, dally], handle_steps=self.handler),
            AgentDefinition(
                "pricer", model=HAIKU, tools=[price_of], system_prompt="The price of tea", handle_steps=pricing
            ),
        ]
        return Engine([one for one in agents if one.id != self.removed], models=self.models)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    DONE.clear()
    return Shop(tmp_path)


def priced(client: httpx2.Client) -> str:
    """
    Return a run that has said a price.
    """
    done = ended(client, started(client, "pricer"))
    assert f"{HAIKU}: tea costs 30" == done["output"]
    return str(done["run_id"])


# --- replay -------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
def test_replay_reports_the_first_difference_with_its_line(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        answered(dora, run)
        same = dora.post(f"/runs/{run}/replay").json()
    shop.handler = deploying_elsewhere
    with shop.open(), shop.client("dora") as dora:
        edited = dora.post(f"/runs/{run}/replay", json={})

    line = deploying_elsewhere.__code__.co_firstlineno + 1
    difference = edited.json()["difference"]
    assert (None, "completed") == (same["difference"], same["status"])
    assert "deployed to Rome on Monday" == same["output"]
    assert ("#0", "changed") == (difference["address"], difference["kind"])
    assert difference["site"].endswith(f"test_recorded_runs.py:{line}")
    assert [{"pointer": "/input/place", "recorded": '"Rome"', "now": '"Oslo"'}] == difference["fields"]
    assert "tool_call deploy changed" in difference["message"]
    assert str(shop.folder) not in difference["message"]
    assert ["Rome"] == DONE


@pytest.mark.spec("studio:SV36", "studio:SV4")
def test_replay_performs_again_only_what_scopes_permit(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora, shop.client("looker") as looker, shop.client("root") as root:
        run = priced(dora)
        path = f"/runs/{run}/replay"
        of_models = {"live": ["model_call"]}
        refused = [
            looker.post(path, json=of_models),
            dora.post(path, json={"live": ["tool_call"]}),
            dora.post(path, json={"live": ["perform"]}),
        ]
        strange = [
            root.post(path, json={"live": live}) for live in (["model_call", "tool_call"], ["ask"], "model_call")
        ]
        before = list(DONE)
        models = dora.post(path, json=of_models).json()
        tools = root.post(path, json={"live": ["tool_call"]}).json()
        with shop.client("anna") as anna, shop.client("other") as other:
            others = [anna.post(path, json={}), other.post(path, json={})]

    assert [(403, "run"), (403, "admin"), (403, "admin")] == [(one.status_code, one.json()["scope"]) for one in refused]
    assert [422] * 3 == [one.status_code for one in strange]
    assert (["tea"], ["tea", "tea"]) == (before, DONE)
    assert [(None, f"{HAIKU}: tea costs 30")] * 2 == [(one["difference"], one["output"]) for one in (models, tools)]
    assert [403, 404] == [one.status_code for one in others]


@pytest.mark.spec("studio:SV36")
def test_replay_counts_as_a_live_run(shop: Shop) -> None:
    shop.handler, shop.options["max_live"] = dallying, 1
    with shop.open(), shop.client("dora") as dora:
        run = priced(dora)
        free = dora.post(f"/runs/{run}/replay")
        started(dora, "deployer")
        full = dora.post(f"/runs/{run}/replay")

    assert (200, 429, "too_many_runs") == (free.status_code, full.status_code, kind_of(full))


@pytest.mark.spec("studio:SV36")
def test_replay_of_a_fork_uses_its_changes(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        path, changes = f"/runs/{priced(dora)}/fork", {"model": SONNET, "temperature": 0.5}
        forks = [
            root.post(path, json={"at": 1, "changes": changes}).json()["run_id"],
            root.post(path, json={"tools": "recorded", "changes": changes}).json()["run_id"],
        ]
        outputs = [ended(root, run)["output"] for run in forks]
        replays = [root.post(f"/runs/{run}/replay").json() for run in forks]

    assert [f"{SONNET}: tea costs 30"] * 2 == outputs
    assert [(None, output) for output in outputs] == [(one["difference"], one["output"]) for one in replays]


# --- resume -------------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36", "studio:SV4")
def test_edited_waiting_run_is_resumed_as_an_admin_says(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
    shop.handler = asking_otherwise
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        path = f"/runs/{run}/resume"
        refused = [dora.post(path, json={"on_divergence": how}) for how in ("keep", "extend")]
        strange = [
            root.post(path, json=body) for body in ({"allow_repeat": True}, {"on_divergence": "stop"}, {"now": 1})
        ]
        extended = root.post(path, json={"on_divergence": "extend"})
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "suspended")
        (asked,) = dora.get(f"/runs/{run}").json()["questions"]
        done = answered(dora, run)
        late = root.post(path, json={"on_divergence": "extend"})

    assert [(403, "scope_missing")] * 2 == [(one.status_code, kind_of(one)) for one in refused]
    assert [422] * 3 == [one.status_code for one in strange]
    assert (202, "When?") == (extended.status_code, asked["text"])
    assert "deployed to Rome on Monday" == done["output"]
    assert ["Rome"] == DONE
    assert (409, "ended") == (late.status_code, kind_of(late))


@pytest.mark.spec("studio:SV36")
def test_resume_requested_before_the_end_reports_the_end(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends after the request has looked it up, and before it resumes it."""
    looked_up, has_ended, find = Event(), Event(), RunReader.get_run

    async def find_before_the_end(self: RunReader, caller: Any, run: str) -> RunRow:
        row = await find(self, caller, run)
        if caller.name == "root":
            looked_up.set()
            await asyncio.to_thread(has_ended.wait, SECONDS)
        return row

    monkeypatch.setattr(RunReader, "get_run", find_before_the_end)
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root, ThreadPoolExecutor() as pool:
        run = started(dora, "deployer")
        question_of(dora, run)
        late = pool.submit(root.post, f"/runs/{run}/resume", json={"on_divergence": "extend"})
        assert looked_up.wait(SECONDS)
        done = answered(dora, run)
        has_ended.set()

        assert (409, "ended") == (late.result().status_code, kind_of(late.result()))
    assert "completed" == done["status"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
def test_no_end_is_shown_before_it_is_recorded(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader looks up a suspended run and reads its journal after the end, while the run still closes its journal."""
    looked_up, has_ended, may_close = Event(), Event(), Event()
    read, close, wait = RunReader.read_details_from_journal, RunWriter.close, LiveRuns.wait_until_end_recorded

    async def read_after_the_end(self: RunReader, row: RunRow) -> Any:
        if not looked_up.is_set():
            looked_up.set()
            await asyncio.to_thread(has_ended.wait, SECONDS)
        return await read(self, row)

    def close_late(self: RunWriter) -> None:
        if self.journal.history().is_complete:
            has_ended.set()
            may_close.wait(SECONDS)
        close(self)

    async def wait_and_close(self: LiveRuns, run: str) -> None:
        if has_ended.is_set():
            may_close.set()
        await wait(self, run)

    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        asked = question_of(dora, run)
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "suspended")
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(RunWriter, "close", close_late)
        monkeypatch.setattr(RunReader, "read_details_from_journal", read_after_the_end)
        monkeypatch.setattr(LiveRuns, "wait_until_end_recorded", wait_and_close)
        shown = pool.submit(lambda: dora.get(f"/runs/{run}").json())
        assert looked_up.wait(SECONDS)
        given = root.post(f"/runs/{run}/answers", json={"answers": {asked: "Monday"}})
        done = shown.result()
        late = root.post(f"/runs/{run}/resume", json={"on_divergence": "extend"})
        may_close.set()

    assert (202, "completed") == (given.status_code, done["status"])
    assert (409, "ended") == (late.status_code, kind_of(late))


@pytest.mark.spec("studio:SV36")
def test_extension_repeats_changes_of_the_world_only_if_allowed(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
    shop.handler = deploying_elsewhere
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        path = f"/runs/{run}/resume"
        assert 202 == root.post(path, json={"on_divergence": "extend"}).status_code
        left = until(lambda: (found := dora.get(f"/runs/{run}").json())["error"] and found)
        before = list(DONE)
        assert 202 == root.post(path, json={"on_divergence": "extend", "allow_repeat": True}).status_code
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "suspended")
        done = answered(dora, run)

    assert ["Rome"] == before
    assert "stranded" == left["status"]
    assert "deploy" in left["error"]
    assert "deployed to Oslo on Monday" == done["output"]
    assert ["Rome", "Oslo"] == DONE


@pytest.mark.spec("studio:SV36")
def test_running_extension_can_be_cancelled(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
    shop.handler = dallying
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        assert 202 == root.post(f"/runs/{run}/resume", json={"on_divergence": "extend"}).status_code
        until(lambda: "dally" in DONE)
        assert 202 == dora.post(f"/runs/{run}/cancel").status_code
        done = ended(dora, run)

    assert "cancelled" == done["status"]


@pytest.mark.spec("studio:SV36")
def test_kept_divergence_uses_the_recorded_result(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
    shop.handler = deploying_elsewhere
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        assert 202 == root.post(f"/runs/{run}/resume", json={"on_divergence": "keep"}).status_code
        done = answered(dora, run)

    assert ("deployed to Rome on Monday", ["Rome"]) == (done["output"], DONE)


@pytest.mark.spec("studio:SV36")
def test_running_run_refuses_on_divergence(shop: Shop) -> None:
    shop.handler = dallying
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        run = started(dora, "deployer")
        until(lambda: "dally" in DONE)
        refused = [root.post(f"/runs/{run}/resume", json={"on_divergence": how}) for how in ("keep", "extend")]
        plain = dora.post(f"/runs/{run}/resume")

    assert [(409, "under_way")] * 2 == [(one.status_code, kind_of(one)) for one in refused]
    assert 202 == plain.status_code


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
@pytest.mark.parametrize("asked", [{}, {"on_divergence": "keep"}, {"on_divergence": "extend"}], ids=str)
def test_resume_that_cannot_start_leaves_the_run_unchanged(shop: Shop, asked: dict[str, str]) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
    shop.removed = "deployer"
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        before = dora.get(f"/runs/{run}").json()
        refused = root.post(f"/runs/{run}/resume", json=asked)
        after = dora.get(f"/runs/{run}").json()
    shop.removed = ""
    with shop.open(), shop.client("dora") as dora:
        done = answered(dora, run)

    assert (409, "agent_error") == (refused.status_code, kind_of(refused))
    assert ("suspended", before) == (after["status"], after)
    assert "deployed to Rome on Monday" == done["output"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
def test_resume_that_cannot_start_leaves_a_stranded_run_unchanged(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
    path, shop.handler = f"/runs/{run}/resume", deploying_elsewhere
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        root.post(path, json={"on_divergence": "extend"})
        until(lambda: dora.get(f"/runs/{run}").json()["error"])
    shop.removed = "deployer"
    with shop.open(), shop.client("dora") as dora:
        before = dora.get(f"/runs/{run}").json()
        refused = dora.post(path)
        after = dora.get(f"/runs/{run}").json()
    shop.removed, shop.handler = "", deploying
    with shop.open(), shop.client("dora") as dora:
        resumed = dora.post(path)
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "suspended")
        done = answered(dora, run)

    assert (409, "agent_error") == (refused.status_code, kind_of(refused))
    assert ("stranded", before) == (after["status"], after)
    assert (202, "deployed to Rome on Monday") == (resumed.status_code, done["output"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36", "studio:SV4")
def test_run_of_a_removed_agent_is_refused_with_its_reason(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        run = started(dora, "deployer")
        question_of(dora, run)
        priced_run = priced(dora)
        fork = root.post(f"/runs/{priced_run}/fork", json={"at": 1, "changes": {"model": SONNET}}).json()["run_id"]
        ended(root, fork)
    shop.removed = "deployer"
    with shop.open(), shop.client("dora") as dora:
        refused = [
            dora.post(f"/runs/{run}/replay"),
            dora.post(f"/runs/{run}/fork", json={"at": 0, "allow_repeat": False}),
            dora.post(f"/runs/{run}/fork", json={"at": 0, "tools": "recorded"}),
            dora.post(f"/runs/{run}/resume"),
        ]
    shop.removed = "pricer"
    with shop.open(), shop.client("root") as root:
        refused += [root.post(f"/runs/{fork}/replay"), root.post(f"/runs/{fork}/fork", json={"at": 1})]

    assert [(409, "agent_error")] * 6 == [(one.status_code, kind_of(one)) for one in refused]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
@pytest.mark.parametrize("place", ["runs", "runs.db"])
def test_copy_of_an_extended_run_is_not_listed(shop: Shop, place: str) -> None:
    shop.options["runs"] = shop.folder / place
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
    shop.handler = asking_otherwise
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        root.post(f"/runs/{run}/resume", json={"on_divergence": "extend"})
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "suspended")
        listed = root.get("/foreign").json()["journals"]
        copies = [root.get(f"/foreign/{run}{sign}before-1").status_code for sign in ".-"]
        answered(dora, run)

    assert ([], [404, 404]) == (listed, copies)


# --- fork ---------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV36", "evaluation:JG7", "evaluation:JG8")
def test_fork_with_recorded_tools_reports_what_answered(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        path = f"/runs/{priced(dora)}/fork"
        anew = dora.post(path, json={"tools": "recorded", "at": -1, "reuse": False}).json()
        unknown = root.post(path, json={"tools": "recorded", "changes": MILK}).json()
        made_up = {"tools": "recorded", "changes": {**MILK, "model": SONNET}, "simulate": {"price_of": "milk is free"}}
        simulated = root.post(path, json=made_up).json()
        before = list(DONE)
        performed = root.post(path, json={"tools": "idempotent", "changes": MILK}).json()
        unpaid = dora.post(path, json={"tools": "recorded", "at": -1, "reuse": False, "budget": 1e-9}).json()
        nothing = dora.post(path, json={"tools": "recorded"}).json()
        view = root.get(f"/runs/{unknown['run_id']}").json()
        late = root.post(f"/runs/{unknown['run_id']}/resume")
        listed = [one["run_id"] for one in root.get("/runs?limit=100").json()["runs"]]

    assert (1, 0, 0, 2) == tuple(anew[name] for name in ("served", "simulated", "performed", "model_calls"))
    assert (f"{HAIKU}: tea costs 30", "completed") == (anew["output"], anew["status"])
    assert {"name": "price_of", "input": {"item": "milk"}, "address": "#1"} == unknown["refused"]
    assert ("failed", "failed", "#0") == (unknown["status"], view["status"], view["forked_from"]["at"])
    assert "is not recorded" in view["error"]
    assert str(shop.folder) not in view["error"]
    assert (f"{SONNET}: milk is free", 1) == (simulated["output"], simulated["simulated"])
    assert (["tea"], ["tea", "milk"]) == (before, DONE)
    assert (f"{HAIKU}: milk costs 40", 1) == (performed["output"], performed["performed"])
    assert (True, 0) == (unpaid["is_unpaid"], unpaid["model_calls"])
    assert (None, "", "completed") == (nothing["run_id"], nothing["broke_at"], nothing["status"])
    assert 409 == late.status_code
    assert 6 == len(listed)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
def test_waiting_fork_with_recorded_tools_is_never_resumed(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        answered(dora, run)
    shop.handler = asking_otherwise
    with shop.open(), shop.client("dora") as dora:
        made = dora.post(f"/runs/{run}/fork", json={"tools": "recorded"}).json()
        answer = dora.post(f"/runs/{made['run_id']}/answers", json={"answers": {"q0": "Friday"}})
        resumed = dora.post(f"/runs/{made['run_id']}/resume")
    with shop.open(), shop.client("dora") as dora:
        later = dora.get(f"/runs/{made['run_id']}").json()

    assert "the fork is suspended, and a fork with `tools` cannot be resumed" in made["error"]
    assert [409, 409] == [answer.status_code, resumed.status_code]
    assert ("failed", ["Rome"]) == (later["status"], DONE)


@pytest.mark.spec("studio:SV36", "studio:SV4")
def test_fork_options_need_their_scopes_and_companions(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        path = f"/runs/{priced(dora)}/fork"
        for body in (
            {"tools": "working-copy"}, {"tools": "recorded", "simulate": {"price_of": "free"}}, {"tools": "recorded", "changes": MILK},
        ):  # fmt: skip
            with case(body):
                refused = dora.post(path, json=body)
                assert (403, "admin") == (refused.status_code, refused.json().get("scope"))
        for name, body in (
            ("at", {}), ("budget", {"at": 0, "budget": 1}), ("reuse", {"at": 0, "reuse": False}), ("simulate", {"at": 0, "simulate": {}}),
            ("edit", {"tools": "recorded", "edit": 1}), ("allow_repeat", {"tools": "recorded", "allow_repeat": True}),
            ("tools", {"tools": "shop.py:all_tools"}), ("budget", {"tools": "recorded", "budget": 0}), ("simulate", {"tools": "recorded", "simulate": "shop.py:made_up"}),
        ):  # fmt: skip
            with case(name, body):
                strange = root.post(path, json=body)
                assert 422 == strange.status_code
                assert strange.json()["issues"][0].startswith(f"{name}: ")
        nowhere = dora.post(path, json={"tools": "recorded", "at": 99})

    assert (422, "no_such_place") == (nowhere.status_code, kind_of(nowhere))
    assert ["tea"] == DONE


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
def test_fork_of_a_turn_belongs_to_no_conversation(shop: Shop) -> None:
    turn = {"agent": "pricer", "prompt": "How much?", "session_id": "shopping", "turn": True}
    with shop.open(), shop.client("dora") as dora:
        first, second = (ended(dora, dora.post("/runs", json=turn).json()["run_id"]) for _ in range(2))
        made = [dora.post(f"/runs/{one['run_id']}/fork", json={"at": 1}) for one in (first, second)]
        forks = [ended(dora, one.json()["run_id"]) for one in made]
        report = dora.post(f"/runs/{first['run_id']}/fork", json={"tools": "recorded", "at": 1, "reuse": False})
        third = dora.post("/runs", json=turn)
        ended(dora, third.json()["run_id"])
        runs = [one["run_id"] for one in dora.get("/runs?session=shopping").json()["runs"]]

    assert [202, 202, 200, 202] == [one.status_code for one in (*made, report, third)]
    assert [None, None] == [one["session_id"] for one in forks]
    assert [first["output"], second["output"]] == [one["output"] for one in forks]
    assert [third.json()["run_id"], second["run_id"], first["run_id"]] == runs


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
def test_fork_leaves_the_state_of_the_conversation(shop: Shop) -> None:
    """The agent is edited, so that the state cannot be found by a replay."""
    turn = {"agent": "deployer", "prompt": "Deploy.", "session_id": "deployments", "turn": True}
    with shop.open(), shop.client("dora") as dora:
        run = dora.post("/runs", json=turn).json()["run_id"]
        answered(dora, run)
        fork = dora.post(f"/runs/{run}/fork", json={"at": 0}).json()["run_id"]
        until(lambda: dora.get(f"/runs/{fork}").json()["status"] == "suspended")
    shop.handler = dallying
    with shop.open(), shop.client("dora") as dora:
        following = dora.post("/runs", json=turn)

    assert 202 == following.status_code


@pytest.mark.spec("studio:SV36", "studio:SV4")
def test_fork_with_a_report_needs_the_scope_read(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora, shop.client("runner") as runner:
        path = f"/runs/{priced(dora)}/fork"
        refused = runner.post(path, json={"tools": "recorded", "at": 1, "reuse": False})
        plain = runner.post(path, json={"at": 1})

    assert (403, "read") == (refused.status_code, refused.json()["scope"])
    assert 202 == plain.status_code


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
def test_fork_that_stores_nothing_uses_no_quota(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = priced(dora)
    size = (shop.folder / "runs" / f"{run}.jsonl").stat().st_size
    shop.options["quotas"] = Quotas(bytes_per_minute=size + size // 2)
    with shop.open(), shop.client("dora") as dora:
        path = f"/runs/{run}/fork"
        same = [dora.post(path, json={"tools": "recorded"}) for _ in range(3)]
        stored = [dora.post(path, json={"at": 1}) for _ in range(2)]

    assert [200, 200, 200, 202, 429] == [one.status_code for one in (*same, *stored)]


@pytest.mark.spec("studio:SV36")
def test_fork_that_cannot_start_leaves_no_journal(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = priced(dora)
    shop.models = None
    with shop.open(), shop.client("root") as root:
        refused = root.post(f"/runs/{run}/fork", json={"at": 0, "changes": {"model": SONNET}})
        listed = root.get("/foreign").json()["journals"]

    assert (503, "missing_key", []) == (refused.status_code, kind_of(refused), listed)


# --- the caller -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV4")
def test_caller_is_told_its_name_and_scopes(shop: Shop) -> None:
    with shop.open(), shop.client("looker") as looker, shop.client("root") as root:
        told = [client.get("/caller").json() for client in (looker, root)]

    assert [{"name": "dora", "scopes": ["debug", "read"]}, {"name": "root", "scopes": ["admin"]}] == told


# --- runs that cannot be resumed ----------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV3", "studio:SV36")
def test_registered_run_without_journal_starts_once_it_can(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server was killed after the 202, and at the next starts its agent is missing."""
    monkeypatch.setattr(run_recovery, "LOOK_SECONDS", 0.01)
    run = "0" * 32
    ledger = Ledger(shop.folder / "runs")
    request = {"prompt": "hi", "params": None, "metadata": None}
    ledger.write([make_register_run_act(RunRow(run, "dora", "pricer", "started", 1.0, 1.0, request), None)])
    ledger.close()
    shop.removed = "pricer"
    with shop.open(), shop.client("dora") as dora:
        left = until(lambda: (one := dora.get(f"/runs/{run}").json())["status"] == "stranded" and one)
        refused = dora.post(f"/runs/{run}/resume")
        after = dora.get(f"/runs/{run}").json()
    shop.removed = ""
    with shop.open(), shop.client("dora") as dora:
        resumed = dora.post(f"/runs/{run}/resume")
        done = ended(dora, run)

    assert "pricer" in left["error"]
    assert (409, left) == (refused.status_code, after)
    assert (202, f"{HAIKU}: tea costs 30") == (resumed.status_code, done["output"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV11")
def test_turn_that_never_started_can_be_cancelled_and_followed(shop: Shop) -> None:
    """Its server was killed after the 202. The recovery does not start a run that is newer than its clock."""
    run, later, turn = "2" * 32, time.time() + 60, {"agent": "pricer", "prompt": "hi", "session_id": "s", "turn": True}
    with shop.open(), shop.client("dora") as dora:
        first = dora.post("/runs", json=turn).json()["run_id"]
        ended(dora, first)
        request = {"prompt": "hi", "params": None, "metadata": None, "turn": {"after": first}}
        key = make_owner_session_key("dora", "s")
        ledger = Ledger(shop.folder / "runs")
        ledger.write(
            [make_register_run_act(RunRow(run, "dora", "pricer", "started", later, later, request, key), None)]
        )
        ledger.close()
        said = dora.post(f"/runs/{run}/input", json={"text": "Hurry."})
        cancelled = dora.post(f"/runs/{run}/cancel", json={"reason": "too late"})
        resumed = dora.post(f"/runs/{run}/resume")
        view, events = dora.get(f"/runs/{run}").json(), dora.get(f"/runs/{run}/events")
        page = dora.get("/vercel/pricer/s/stream")
        followed = dora.post("/runs", json=turn)
        done = ended(dora, followed.json()["run_id"])

    assert [404, 202, 409, 204, 202] == [one.status_code for one in (said, cancelled, resumed, events, followed)]
    assert "the run has no record: it has not started yet, or its journal was deleted" == said.json()["detail"]
    assert ("cancelled", "too late") == (view["status"], view["error"])
    assert f"{HAIKU}: tea costs 30" == done["output"]
    assert page.text.endswith("data: [DONE]\n\n")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV3")
def test_run_that_another_server_is_starting_is_kept(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_recovery, "LOOK_SECONDS", 0.01)
    place, run = shop.folder / "runs.db", "1" * 32
    shop.options["runs"] = place
    monkeypatch.setattr(run_launcher, "secrets", SimpleNamespace(token_hex=lambda _: run))
    with shop.open(), shop.client("dora") as dora:
        unlock = SqliteJournal(place, run).lock()
        accepted = dora.post("/runs", json={"agent": "pricer", "prompt": "hi"})
        listed = dora.get(f"/runs/{run}")
        unlock()
        done = ended(dora, run)

    assert [(202, run), (200, run)] == [(one.status_code, one.json()["run_id"]) for one in (accepted, listed)]
    assert f"{HAIKU}: tea costs 30" == done["output"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV3", "studio:SV36")
def test_stranded_run_whose_journal_was_deleted_never_starts_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_recovery, "LOOK_SECONDS", 0.01)
    run = stranded(shop)
    (shop.folder / "runs" / f"{run}.jsonl").unlink()
    with shop.open(), shop.client("dora") as dora:
        refused = dora.post(f"/runs/{run}/resume")

    assert (404, ["Rome"]) == (refused.status_code, DONE)


def stranded(shop: Shop) -> str:
    """
    Return a run that waited, and is stranded because its code was edited.
    """
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "suspended")
    shop.handler = deploying_elsewhere
    with shop.open(), shop.client("dora") as dora:
        assert 202 == dora.post(f"/runs/{run}/resume").status_code
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "stranded")
    return run


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV1", "studio:SV36")
def test_error_of_a_stranded_run_names_no_server_file(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_recovery, "LOOK_SECONDS", 0.01)
    run = stranded(shop)
    with shop.open(), shop.client("reader") as reader, shop.client("dora") as dora:
        error = dora.get(f"/runs/{run}").json()["error"]
        others = reader.get(f"/runs/{run}").status_code

    assert error.startswith("the run diverged from its record at step 0, effect #0 of deployer")
    assert [] == [part for part in (str(shop.folder), __file__, "stepengine ", "\n") if part in error]
    assert 404 == others


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV36")
def test_failed_extension_leaves_the_run_stranded_and_extendable(shop: Shop) -> None:
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "suspended")
    path, shop.handler = f"/runs/{run}/resume", failing_without_a_day
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        assert 202 == root.post(path, json={"on_divergence": "extend"}).status_code
        left = until(lambda: (one := dora.get(f"/runs/{run}").json())["error"] and one)
    shop.handler = asking_otherwise
    with shop.open(), shop.client("dora") as dora, shop.client("root") as root:
        assert 202 == root.post(path, json={"on_divergence": "extend"}).status_code
        until(lambda: dora.get(f"/runs/{run}").json()["status"] == "suspended")
        done = answered(dora, run)

    assert ("stranded", True) == (left["status"], "no day" in left["error"])
    assert ("deployed to Rome on Monday", ["Rome"]) == (done["output"], DONE)


@pytest.mark.spec("studio:SV36")
async def test_failures_hours_apart_strand_no_run(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    request = {"prompt": "", "params": None, "metadata": None}
    statuses = []
    for seconds in (10.0, 86_400.0):
        run = f"failed-{seconds:g}-ago"
        row = RunRow(run, "dora", "pricer", "running", 1.0, 1.0, request)
        await store.write(make_register_run_act(row, None))
        await store.write(
            make_store_status_act(run, "running", time.time() - seconds, tries=2, error="the disk was full")
        )
        await store.record_failed_resume(run, JournalError("its agent is missing"))
        statuses.append((row := await store.find(run)) and row.status)
    await store.close()

    assert ["stranded", "running"] == statuses


@pytest.mark.spec("studio:SV31")
def test_live_fork_shows_its_origin(shop: Shop) -> None:
    shop.options["wait_for_answers"] = 60
    with shop.open(), shop.client("dora") as dora:
        run = started(dora, "deployer")
        question_of(dora, run)
        fork = dora.post(f"/runs/{run}/fork", json={"at": 0}).json()["run_id"]
        question_of(dora, fork)
        shown = dora.get(f"/runs/{fork}").json()
        original = dora.get(f"/runs/{run}").json()

    assert ("awaiting_answer", run) == (shown["phase"], shown["forked_from"]["run"])
    assert original["forked_from"] is None
