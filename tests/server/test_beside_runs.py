"""
What there is beside runs over HTTP: what they spent, what they wrote and how that is taken back, conversations, reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, ToolCall
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.errors import DefinitionError, InputError, JournalError
from stepengine.journal import FileJournal
from stepengine.permissions import Policy
from stepengine.server import Caller, Tokens, app, reports, routes
from stepengine.server.ledger import Ledger, RunRow, make_detach_runs_act, make_register_run_act
from stepengine.server.reports import Reports
from stepengine.server.run_reader import RunReader
from stepengine.server.run_requests import StartRequest, make_owner_session_key
from stepengine.server.runs import Runs
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel
from stepengine.tools.bundled import file_tools
from tests.waits import until

from .behind import kind_of
from .house import AGENTS, House, ended, question_of, started, written

pytestmark = pytest.mark.leaks_allowed(
    "the server outlasts a test: its threads and what its runs hold are the module's"
)
SONNET, HAIKU = "anthropic/claude-sonnet-4-5", "anthropic/claude-haiku-4-5"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with House(tmp_path_factory.mktemp("house")).open() as opened:
        yield opened


# --- undo ---------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV2", "studio:SV4")
def test_undo_restores_files_and_needs_the_admin_scope(house: House) -> None:
    plan = house.work / "plan.txt"
    plan.write_text("before")
    with house.client() as anna, house.client("root") as root:
        run = started(anna, "writer", "after")
        assert "completed" == ended(anna, run)["status"]
        assert "after" == plan.read_text()
        refused = anna.post(f"/runs/{run}/undo")
        tried = root.post(f"/runs/{run}/undo", json={"dry_run": True}).json()
        still = plan.read_text()
        done = root.post(f"/runs/{run}/undo").json()
        again = root.post(f"/runs/{run}/undo").json()

    assert (403, "scope_missing") == (refused.status_code, kind_of(refused))
    assert (["plan.txt"], True, "after") == (tried["restored"], tried["dry_run"], still)
    assert (["plan.txt"], False, "before") == (done["restored"], done["dry_run"], plan.read_text())
    assert ([], ["plan.txt"]) == (again["restored"], again["unchanged"])


def test_undo_of_a_running_run_is_refused(house: House) -> None:
    with house.client("root") as root:
        run = started(root, "booker")
        until(lambda: root.get(f"/runs/{run}").json()["phase"] == "executing_tool")
        refused = root.post(f"/runs/{run}/undo")
        root.post(f"/runs/{run}/cancel")

    assert (409, "under_way") == (refused.status_code, kind_of(refused))


@pytest.mark.deep
@pytest.mark.smoke
def test_undo_without_known_folder_is_refused_without_its_path(
    tmp_path: Path,
) -> None:
    told = []
    for roots in ([], [tmp_path / "gone"]):
        (tmp_path / str(len(roots))).mkdir()
        house = House(tmp_path / str(len(roots)), roots=roots)
        with house.open(), house.client("root") as root:
            run = started(root, "quick")
            ended(root, run)
            told.append(root.post(f"/runs/{run}/undo"))

    assert [(409, "no_folder"), (503, "no_folder")] == [(one.status_code, kind_of(one)) for one in told]
    assert str(tmp_path) not in told[1].text


# --- cost ---------------------------------------------------------------------------------------------------------------


def reply(request: Any) -> ModelReply:
    return ModelReply("Well.", usage=Usage(input_tokens=1_000_000, output_tokens=10), model=request.model)


def parent_steps(ctx: Any) -> Any:
    yield STEP
    yield from AgentCall("child", "Go.")
    yield from Ask("Go on?")
    return "done"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV2")
def test_cost_is_reported_by_agent_and_model(tmp_path: Path) -> None:
    agents = [AgentDefinition("parent", model=SONNET, handle_steps=parent_steps, spawnable_agents=["child"])]
    agents += [AgentDefinition("child", model=HAIKU), AgentDefinition("idle", handle_steps=idle_steps)]
    house = House(tmp_path, wait_for_answers=0)
    house.engine = lambda: Engine(agents, models=ScriptedModel(reply))  # type: ignore[method-assign]
    with house.open(), house.client() as anna, house.client("bob") as bob:
        run = started(anna, "parent")
        question = question_of(anna, run)
        until(lambda: anna.get(f"/runs/{run}").json()["status"] == "suspended")
        waiting = anna.get(f"/runs/{run}/cost").json()
        anna.post(f"/runs/{run}/answers", json={"answers": {question: "yes"}})
        ended(anna, run)
        over = anna.get(f"/runs/{run}/cost").json()
        nothing = anna.get(f"/runs/{started(anna, 'idle')}/cost").json()
        others = bob.get(f"/runs/{run}/cost").status_code

    assert over == waiting
    assert {"parent", "child"} == set(over["by_agent"])
    assert {SONNET, HAIKU} == set(over["by_model"])
    assert 2 == over["usage"]["requests"]
    assert (
        2_000_020
        == over["usage"]["total_tokens"]
        == sum(one["usage"]["total_tokens"] for one in over["by_agent"].values())
    )
    assert over["by_agent"]["child"] == over["by_model"][HAIKU]
    assert float(over["cost_usd"]) == pytest.approx(sum(float(one["cost_usd"]) for one in over["by_model"].values()))
    assert float(over["by_model"][SONNET]["cost_usd"]) > float(over["by_model"][HAIKU]["cost_usd"]) > 0
    assert (0, "0") == (nothing["usage"]["total_tokens"], nothing["cost_usd"])
    assert 404 == others


def idle_steps(ctx: Any) -> Any:
    yield from ()


# --- conversations ------------------------------------------------------------------------------------------------------


def said(client: httpx2.Client, session: str, prompt: str = "Hello", agent: str = "writer") -> str:
    run = client.post("/runs", json={"agent": agent, "prompt": prompt, "session_id": session}).json()["run_id"]
    return str(ended(client, run)["run_id"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV2")
@pytest.mark.parametrize("name", ["a/b c?d#e%2F", ".."])
def test_session_is_listed_read_and_deleted_under_any_name(tmp_path: Path, name: str) -> None:
    from urllib.parse import quote

    house = House(tmp_path)
    with house.open(), house.client() as anna, house.client("bob") as bob:
        runs = [said(anna, name, prompt) for prompt in ("first", "second")]
        alone = started(anna, "quick")
        ended(anna, alone)
        other = said(bob, name, "bob's")
        listed = anna.get("/sessions").json()
        path = f"{house.url}/sessions/{quote(name, safe='')}".replace("/..", "/%2E%2E")
        looked = anna.get(path)
        its = [one["run_id"] for one in anna.get("/runs", params={"session": name}).json()["runs"]]
        gone = anna.delete(path)
        after = anna.get("/sessions").json()["sessions"], anna.get(path).status_code
        still = [anna.get(f"/runs/{run}").json() for run in runs]
        of_bob = bob.get(path).json()

    shown = looked.json()
    assert [(name, "anna", "writer", 2)] == [
        (s["session_id"], s["owner"], s["agent"], s["runs"]) for s in listed["sessions"]
    ]
    assert (2, "completed") == (shown["turns"], shown["status"])
    assert ["first", "second"] == [one["text"] for one in shown["messages"] if one["role"] == "user"]
    assert runs[::-1] == its
    assert 204 == gone.status_code
    assert ([], 404) == after
    assert [("completed", None)] * 2 == [(one["status"], one["session_id"]) for one in still]
    assert ["bob's"] == [one["text"] for one in of_bob["messages"] if one["role"] == "user"]
    assert other not in runs


@pytest.mark.parametrize("name", ["", "a\nb", "\0", "\u202e", "x" * 201, 7, ["s"]])
def test_invalid_session_id_gets_422(house: House, name: Any) -> None:
    with house.client() as anna:
        answer = anna.post("/runs", json={"agent": "quick", "session_id": name})

    assert 422 == answer.status_code
    assert answer.json()["issues"][0].startswith("session_id: ")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV2")
def test_session_and_report_cursors_visit_each_entry_once(tmp_path: Path) -> None:
    house = House(tmp_path)
    long = "長" * 199
    with house.open(), house.client() as anna, house.client("root") as root:
        for number in (*range(7), 3):
            said(anna, f"{long}{number}", agent="quick")
        for number in range(7):
            written(house, f"nightly/{number}")
        seen: dict[str, list[str]] = {"sessions": [], "reports": []}
        for what, names in seen.items():
            cursor = ""
            while cursor is not None:
                told = anna.get(f"/{what}", params={"limit": 2, "cursor": cursor}).json()
                names += [one["session_id" if what == "sessions" else "id"] for one in told[what]]
                cursor = told["next"]
                assert len(told[what]) <= 2
        everybody = [one["owner"] for one in root.get("/sessions").json()["sessions"]]

    assert [f"{long}{number}" for number in (3, 6, 5, 4, 2, 1, 0)] == seen["sessions"]
    assert sorted(f"nightly/{number}" for number in range(7)) == sorted(seen["reports"])
    assert ["anna"] * 7 == everybody


@pytest.mark.deep
def test_session_with_waiting_run_or_without_deletion_is_kept(tmp_path: Path) -> None:
    class Plain:
        """A store of histories, which deletes nothing."""

        def __init__(self) -> None:
            self.kept: dict[str, Any] = {}

        def get_history(self, session_id: str) -> Any:
            return self.kept.get(session_id, ())

        def save_history(self, session_id: str, messages: Any) -> None:
            self.kept[session_id] = messages

    def steps(ctx: Any) -> Any:
        return (yield from Ask("Go on?"))

    told: dict[str, Any] = {}
    for name, store in (
        ("plain", Plain()),
        ("none", None),
        ("memory", MemorySessions()),
    ):
        (tmp_path / name).mkdir()
        house = House(tmp_path / name, wait_for_answers=0)
        house.engine = lambda store=store: Engine([AgentDefinition("asker", handle_steps=steps)], sessions=store)  # type: ignore[method-assign]
        with house.open(), house.client() as anna:
            run = anna.post("/runs", json={"agent": "asker", "session_id": "1"}).json()["run_id"]
            question = question_of(anna, run)
            waits = anna.delete("/sessions/1")
            anna.post(f"/runs/{run}/answers", json={"answers": {question: "yes"}})
            ended(anna, run)
            looked = anna.get("/sessions/1").json()
            over = anna.delete("/sessions/1")
            told[name] = (waits.status_code, kind_of(waits), looked["messages"] is None, over.status_code)

    assert {
        "plain": (409, "under_way", False, 409),
        "none": (409, "under_way", True, 409),
        "memory": (409, "under_way", False, 204),
    } == told


def test_session_deletion_is_refused_while_a_run_starts(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    rows = [
        RunRow(name, "anna", "quick", status, 1.0, 1.0, {}, "s")
        for name, status in (("a", "completed"), ("b", "started"))
    ]
    made = ledger.write(
        [make_register_run_act(rows[0], None), make_register_run_act(rows[1], None), make_detach_runs_act("s")]
    )
    left = [row.session for row in ledger.list_runs(owner=None, agent=None, statuses=(), before=None, limit=9)]
    ledger.close()

    assert isinstance(made[2], InputError)
    assert ["s", "s"] == left


@pytest.mark.spec("studio:SV2")
def test_session_deletion_refused_for_a_new_run_keeps_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is registered after the check of the others."""
    request = {"prompt": "", "params": None, "metadata": None}
    new = RunRow("new", "anna", "asker", "suspended", 1.0, 1.0, request, make_owner_session_key("anna", "s"))
    list_runs = Ledger.list_runs

    def list_then_register(self: Ledger, **options: Any) -> list[RunRow]:
        found = list_runs(self, **options)
        if options["statuses"]:
            monkeypatch.undo()
            self.write([make_register_run_act(new, None)])
        return found

    house = House(tmp_path)
    with house.open(), house.client() as anna:
        run = said(anna, "s", "first")
        monkeypatch.setattr(Ledger, "list_runs", list_then_register)
        refused = anna.delete("/sessions/s")
        left = anna.get("/sessions/s").json()
        runs = [one["run_id"] for one in anna.get("/runs", params={"session": "s"}).json()["runs"]]

    assert (409, "under_way") == (refused.status_code, kind_of(refused))
    assert ["first"] == [one["text"] for one in left["messages"] if one["role"] == "user"]
    assert [run, "new"] == runs


@pytest.mark.spec("studio:SV2")
async def test_run_started_during_a_session_deletion_keeps_its_messages(tmp_path: Path) -> None:
    """It would load the messages before they are deleted, and could not store its own."""
    caller, started_runs = Caller("anna", {"run", "answer"}), list[str]()

    class Slow(MemorySessions):
        async def delete(self, session_id: str) -> None:  # type: ignore[override]
            await start("during")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(runs.live.wait_until_end_recorded(started_runs[-1]), 0.2)
            super().delete(session_id)

    async def start(prompt: str) -> None:
        asked = StartRequest(agent="quick", prompt=prompt, session="s")
        started_runs.append((await runs.launcher.start(caller, asked))[0])

    async with Engine([AgentDefinition("quick", handle_steps=idle_steps)], sessions=Slow()) as engine:
        runs = Runs(engine, tmp_path / "runs", drain=0)
        await runs.start()
        await start("before")
        await runs.live.wait_until_end_recorded(started_runs[-1])
        await runs.conversations.delete_messages(caller, "s", owner=None)
        await runs.live.wait_until_end_recorded(started_runs[-1])
        _, session = await runs.conversations.get_session(caller, "s", owner=None)
        await runs.close()

    assert session is not None
    assert ["during"] == [one.text for one in session.messages if one.role == "user"]


@pytest.mark.spec("studio:SV2")
def test_failed_session_deletion_keeps_the_session_and_can_be_repeated(tmp_path: Path) -> None:
    class Failing(MemorySessions):
        is_broken = True

        def delete(self, session_id: str) -> None:
            if self.is_broken:
                msg = "the disk is full"
                raise OSError(msg)
            super().delete(session_id)

    store = Failing()
    house = House(tmp_path)
    house.engine = lambda: Engine([AgentDefinition("quick", handle_steps=idle_steps)], sessions=store)  # type: ignore[method-assign]
    with house.open(), house.client() as anna:
        run = said(anna, "s", agent="quick")
        failed = anna.delete("/sessions/s")
        runs = [one["run_id"] for one in anna.get("/runs", params={"session": "s"}).json()["runs"]]
        store.is_broken = False
        again = anna.delete("/sessions/s")

    assert (409, "session_error") == (failed.status_code, kind_of(failed))
    assert [run] == runs
    assert 204 == again.status_code


# --- reports ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV2")
def test_report_lists_its_run_ids_to_readers(house: House) -> None:
    folder = written(house)
    run = json.loads((folder / "rome" / "base-1.jsonl").read_text().splitlines()[0])["run"]
    with house.client("reader") as reader:
        listed = reader.get("/reports").json()["reports"]
        told = reader.get("/reports/tried/one").json()

    assert [("tried/one", "tried", ["base"], 1)] == [
        (one["id"], one["name"], one["sides"], one["cases"]) for one in listed
    ]
    sample = told["cases"][0]["samples"][0]
    assert (run, True, "0.5") == (sample["run_id"], sample["passed"], sample["cost"])
    assert [{"mean": None}] == told["summary"]


def test_invalid_and_linked_reports_are_not_listed(house: House, tmp_path: Path) -> None:
    folder = written(house)
    fine = (folder / "results.json").read_text()
    broken = {
        "cut": fine[: len(fine) // 2], "empty": "", "list": "[]", "other": fine.replace("stepengine.eval/1", "stepengine.improve/1"), "deep": "[" * 100_000,
        "bytes": "\udcff", "typed": fine.replace('"cases": [', '"cases": [7, '), "digits": fine.replace('"seed": 1', f'"seed": {"9" * 5_000}'),
    }  # fmt: skip
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "results.json").write_text(fine)
    evals = house.folder / "evals"
    made = []
    for name, text in broken.items():
        made.append(evals / f"bad-{name}")
        made[-1].mkdir()
        (made[-1] / "results.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (evals / "linked").symlink_to(outside)
    (evals / "file-linked").mkdir()
    (evals / "file-linked" / "results.json").symlink_to(outside / "results.json")
    (evals / "pipe").mkdir()
    os.mkfifo(evals / "pipe" / "results.json")
    try:
        with house.client("reader") as reader:
            listed = [one["id"] for one in reader.get("/reports").json()["reports"]]
            looked = [
                reader.get(f"/reports/{name}").status_code
                for name in ("linked", "file-linked", "pipe", *[f"bad-{name}" for name in broken])
            ]
    finally:
        for one in made:
            (one / "results.json").unlink()
            one.rmdir()

    assert ["tried/one"] == listed
    assert {404} == set(looked)


def delete_after_listing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete a file as soon as its folder has been listed."""
    scandir = os.scandir

    @contextmanager
    def list_and_delete() -> Iterator[list[os.DirEntry[str]]]:
        with scandir(file.parent) as entries:
            found = list(entries)
        file.unlink()
        yield found

    monkeypatch.setattr(
        os, "scandir", lambda place: list_and_delete() if Path(place) == file.parent else scandir(place)
    )


def test_report_deleted_while_the_list_is_made_is_left_out(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    written(house)
    file = written(house, "tried/gone") / "results.json"
    with house.client("reader") as reader, monkeypatch.context() as deleting:
        delete_after_listing(file, deleting)
        listed = reader.get("/reports")

    assert 200 == listed.status_code
    assert ["tried/one"] == [one["id"] for one in listed.json()["reports"]]
    assert not file.exists()


ODD = [
    "",
    "/etc/passwd",
    "../one/rome/base-1.jsonl",
    "ABSOLUTE",
    "nothing.jsonl",
    "results.json",
    "a\0b",
    "rome",
    "rome/link.jsonl",
    "linked/base-1.jsonl",
]


@pytest.mark.parametrize("journal", ODD)
def test_report_links_no_run_outside_its_folder(house: House, journal: str) -> None:
    one, folder = written(house), written(house, "tried/odd")
    for link, to in (("rome/link.jsonl", one / "rome" / "base-1.jsonl"), ("linked", one / "rome")):
        if not (folder / link).is_symlink():
            (folder / link).symlink_to(to)
    told = json.loads((folder / "results.json").read_text())
    odd = str(one / "rome" / "base-1.jsonl") if journal == "ABSOLUTE" else journal
    told["cases"][0]["samples"] = [
        {**told["cases"][0]["samples"][0], "journal": name} for name in (odd, "rome/base-1.jsonl")
    ]
    (folder / "results.json").write_text(json.dumps(told))
    try:
        found = Reports(house.folder / "evals").find_report("tried/odd")
    finally:
        (folder / "results.json").unlink()

    assert found is not None
    assert [True, False] == [sample.run_id is None for case in found.cases for sample in case.samples]


def test_report_in_the_folder_itself_has_the_folder_name(house: House) -> None:
    folder = written(house)
    found = Reports(folder)

    assert ["one"] == [place.id for place, _ in found.list_summaries(None, 9)]
    assert found.find_report("one") is not None


def test_report_list_parses_each_file_version_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(house, "tried/often")
    file = folder / "results.json"
    told = json.loads(file.read_text())
    try:
        with house.client("reader") as reader:
            first = reader.get("/reports").json()
            monkeypatch.setattr(reports, "_parse_report_file", lambda _: None)
            again = reader.get("/reports").json()
            monkeypatch.undo()
            file.write_text(json.dumps({**told, "name": "tried again"}))
            changed = reader.get("/reports").json()
    finally:
        file.unlink()

    assert first == again
    assert "tried again" in [one["name"] for one in changed["reports"]]


def test_agent_summaries_are_computed_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    def summarize_nothing(_: Any) -> Any:
        raise AssertionError

    with house.client("reader") as reader:
        first = reader.get("/agents").json(), reader.get("/agents/quick").json()
        monkeypatch.setattr(routes, "_summarize_agent", summarize_nothing)
        again = reader.get("/agents").json(), reader.get("/agents/quick").json()

    assert first == again


def test_agents_are_listed_while_their_engine_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explain, smaller = Runs.explain_missing_model, Engine([AgentDefinition("quick")])

    def replace_engine(self: Runs, *given: Any) -> str:
        self.engines.engine = smaller
        return explain(self, *given)

    monkeypatch.setattr(Runs, "explain_missing_model", replace_engine)
    with House(tmp_path).open() as house, house.client("root") as root:
        listed = root.get("/agents")

    assert 200 == listed.status_code, listed.text
    assert {one.id for one in AGENTS} == {one["id"] for one in listed.json()["agents"]}


def test_report_folder_must_be_private_and_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    tokens = tmp_path / "tokens.json"
    Tokens.open(tokens).add("root", ["admin"])

    assert [] == Reports(tmp_path / "later").list_summaries(None, 9)
    with pytest.raises(DefinitionError, match="is not a folder"):
        app(Engine([]), runs=tmp_path / "runs", tokens=tokens, reports=tmp_path / "file")
    with pytest.raises(JournalError, match="others may write"):
        app(Engine([]), runs=tmp_path / "runs", tokens=tokens, reports=shared)


@pytest.mark.spec("studio:SV2")
def test_undo_over_changed_files_is_refused_unless_partial(
    house: House,
) -> None:
    plan = house.work / "plan.txt"
    plan.write_text("before")
    with house.client("root") as root:
        run = started(root, "writer", "after")
        ended(root, run)
        plan.write_text("by hand")
        refused = root.post(f"/runs/{run}/undo")
        left = root.post(f"/runs/{run}/undo", json={"partial": True}).json()["left"]

    assert (409, "undo_refused") == (refused.status_code, kind_of(refused))
    assert [["plan.txt", "it was changed later"]] == refused.json()["files"]
    assert [{"path": "plan.txt", "why": "it was changed later"}] == left
    assert "by hand" == plan.read_text()


# --- third-party journals -----------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV2", "studio:SV3")
def test_undo_of_an_adopted_journal_or_its_fork_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a journal decides which files an undo writes and their content."""
    agent = AgentDefinition("writer-then-asker", tools=["write_file"], handle_steps=writing_then_asking)
    house = House(tmp_path, wait_for_answers=0)
    house.engine = lambda: Engine([agent], file_tools(house.work, write=True), permissions=Policy(mode="accept_edits"))  # type: ignore[method-assign]
    house.work.mkdir()
    plan, name = house.work / "plan.txt", "theirs"
    plan.write_text("forged")
    with monkeypatch.context() as another_user:
        another_user.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "another-state"))
        (tmp_path / "runs").mkdir(mode=0o700)
        with house.engine() as engine:
            engine.run_sync("writer-then-asker", "after", journal=FileJournal(tmp_path / "runs" / f"{name}.jsonl"))
    with house.open(), house.client("root") as root:
        seen = root.get(f"/foreign/{name}").json()["seen"]
        assert 202 == root.post(f"/foreign/{name}/resume", json={"seen": seen}).status_code
        until(lambda: root.get(f"/runs/{name}").json()["status"] == "suspended")
        fork = root.post(f"/runs/{name}/fork", json={"at": 0}).json()["run_id"]
        until(lambda: root.get(f"/runs/{fork}").json()["status"] == "suspended")
        plans = [root.post(f"/runs/{run}/undo", json={"dry_run": True}).json()["restored"] for run in (name, fork)]
        refused = [root.post(f"/runs/{run}/undo") for run in (name, fork)]

    assert [["plan.txt"]] * 2 == plans
    assert [(409, "not_possible")] * 2 == [(one.status_code, kind_of(one)) for one in refused]
    assert "after" == plan.read_text()


def writing_then_asking(ctx: Any) -> Any:
    yield from ToolCall("write_file", {"path": "plan.txt", "instructions": "Write it down.", "content": ctx.prompt})
    return (yield from Ask("Go on?"))


def test_journal_deleted_while_the_list_is_made_is_left_out(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    file = house.folder / "runs" / "theirs.jsonl"
    file.touch()
    with house.client("root") as root, monkeypatch.context() as deleting:
        delete_after_listing(file, deleting)
        listed = root.get("/foreign")

    assert (200, []) == (listed.status_code, listed.json()["journals"])
    assert not file.exists()


# --- open questions -----------------------------------------------------------------------------------------------------


def test_question_is_listed_again_after_its_journal_was_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with House(tmp_path, wait_for_answers=0).open() as house, house.client() as anna:
        run = started(anna)
        question_of(anna, run)
        until(lambda: anna.get(f"/runs/{run}").json()["status"] == "suspended")
        with monkeypatch.context() as failing:
            failing.setattr(RunReader, "load_details", raise_journal_error)
            without = anna.get("/questions").json()["questions"]
        listed = anna.get("/questions").json()["questions"]

    assert ([], [run]) == (without, [one["run_id"] for one in listed])


async def raise_journal_error(*_: object) -> None:
    msg = "the disk could not be read"
    raise JournalError(msg)
