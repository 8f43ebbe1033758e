"""
Going back in a run, seeing what an edit does to it, and judging runs, over HTTP: by a real server, with real files that are saved.
"""

from __future__ import annotations

import os
import signal
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.phrases import NO_AGENT
from tests.waits import until

from .shop import CODE, HELPER, Shop, agreed, done, judged, looking, rests, save, variables

pytestmark = pytest.mark.deep


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with Shop(tmp_path).open() as opened:
        yield opened


@pytest.fixture
def client(shop: Shop) -> Iterator[httpx2.Client]:
    with shop.client() as opened:
        yield opened


# --- going back -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST5")
def test_any_step_shows_variables_state_and_model_request(client: httpx2.Client) -> None:
    run = done(client, "tally", "tea milk sugar")
    places = client.get(f"/runs/{run}/places").json()
    with looking(client, run) as page:
        begins = page.look()["now"]
        third, result, second = [page.go(at)["now"] for at in ("3", "#4", "2")]

    assert ["#0", "#1", "#2", "#3", "#4", "#5"] == [each["address"] for each in places["places"]]
    assert (3, "price_of", "t/m") == (places["steps"], *[each["name"] for each in places["places"][:2]])
    assert {"total": "0", "item": "'tea'"} == variables(begins)
    assert [("50", "'sugar'"), ("40", "'sugar'"), ("40", "'milk'")] == [
        (variables(each)["total"], variables(each)["item"]) for each in (third, result, second)
    ]
    request = third["whole"]["request"]
    assert ("t/m", "Add up.", ["price_of"]) == (
        request["model"],
        request["system"],
        [t["name"] for t in request["tools"]],
    )
    assert {"tea milk sugar", "Be brief."} <= {message["text"] for message in request["messages"]}
    assert ("result", 50) == (result["whole"]["kind"], result["whole"]["value"])
    assert ("reply", "t/m 7: Add up.") == (second["whole"]["kind"], second["whole"]["value"])
    assert "yield STEP" in dict(third["lines"])[third["place"]["frames"][0]["line"]]


@pytest.mark.spec("studio:ST5")
@pytest.mark.parametrize(
    ("agent", "prompt", "asked", "output"),
    [
        ("tally", "tea milk", {"at": "#2", "edit": 7}, 7),
        ("tally", "tea milk", {"at": "#1", "edit": "Another reply."}, 40),
        ("asker", "x", {"at": "#0", "changes": {"model": "t/other", "system_prompt": "Shout.", "temperature": 0.5}}, "one: t/other 2: Shout."),
    ],
)  # fmt: skip
def test_edited_fork_continues_and_reports_the_first_difference(
    client: httpx2.Client, agent: str, prompt: str, asked: dict[str, Any], output: object
) -> None:
    run = done(client, agent, prompt)
    questions = client.get(f"/runs/{run}").json()["questions"]
    if questions:
        client.post(f"/runs/{run}/answers", json={"answers": {questions[0]["id"]: "one"}}).raise_for_status()
        until(lambda: client.get(f"/runs/{run}").json()["status"] == "completed")
    answer = client.post(f"/runs/{run}/fork", json=asked)
    assert 202 == answer.status_code, answer.text
    fork = rests(client, answer.json()["run_id"])
    told = client.get(f"/runs/{run}/difference/{fork}").json()
    beside = client.get(f"/runs/{run}/compare/{fork}").json()

    view = client.get(f"/runs/{fork}").json()
    assert ("completed", str(output)) == (view["status"], str(view["output"])), view
    first = {"#2": "#2", "#1": "#1", "#0": "#1" if "changes" in asked else "#0"}[asked["at"]]
    assert first == told["first"]["a"], told
    assert "pairs" in beside


@pytest.mark.spec("studio:ST2")
def test_chosen_model_survives_kill_fork_and_inspection(
    tmp_path: Path,
) -> None:
    shop = Shop(tmp_path)
    with shop.open(), shop.client() as client:
        wanted = {"agent": "asker", "prompt": "x", "model": "t/other"}
        run = rests(client, client.post("/runs", json=wanted).raise_for_status().json()["run_id"])
        assert shop.process is not None
        shop.process.kill()
        shop.process.wait()
    shop.url = shop.link = shop.token = ""
    with shop.open(), shop.client() as client:
        asked = client.get(f"/runs/{run}").json()["questions"][0]["id"]
        client.post(f"/runs/{run}/answers", json={"answers": {asked: "one"}}).raise_for_status()
        until(lambda: client.get(f"/runs/{run}").json()["status"] == "completed")
        forks = [
            rests(client, client.post(f"/runs/{run}/fork", json=body).raise_for_status().json()["run_id"])
            for body in ({"at": "#0", "edit": "two"}, {"at": "#0", "changes": {"model": "t/later"}})
        ]
        outputs = [client.get(f"/runs/{one}").json()["output"] for one in (run, *forks)]
        with looking(client, run, "#1") as page:
            seen = page.look()

    assert ["one: t/other 2:", "two: t/other 2:", "one: t/later 2:"] == [one.strip() for one in outputs]
    assert ("t/other", []) == (seen["now"]["whole"]["request"]["model"], seen["now"]["changed"])


# --- edit and see -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST6")
def test_each_save_shows_old_and_new_without_a_server_import(client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk sugar")
    imported = shop.folder / "imported.txt"
    imported.unlink()
    with looking(client, run, "3") as page:
        first = page.look()
        save(shop.helper, HELPER.replace("+ 0", "+ 5"))
        second = page.look()
        moved = page.go("2")
        save(shop.file, CODE.replace("total = worth", "total += worth"))
        third = page.look()

    assert (None, "50", None) == (first["before"], variables(first["now"])["total"], first["difference"])
    assert ("50", "55", ["~ total 50 -> 55"]) == (
        variables(second["before"])["total"],
        variables(second["now"])["total"],
        second["difference"],
    )
    assert [str(shop.helper)] == second["saved"]
    assert ("40", "45") == (variables(moved["before"])["total"], variables(moved["now"])["total"])
    assert ("45", "80", "2") == (variables(third["before"])["total"], variables(third["now"])["total"], third["at"])
    assert ["completed: 50", "completed: 135"] == third["now"]["ends"]
    assert shop.process is not None
    assert str(shop.process.pid) not in imported.read_text().split()


@pytest.mark.spec("studio:ST6")
def test_desks_are_bounded_and_end_with_page_or_server(client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea")
    alone = shop.processes()
    with looking(client, run) as page:
        page.look()
        assert len(shop.processes()) > len(alone)
        foreign = client.post(f"/runs/{run}/edits/another", json={"at": "1"})
    until(lambda: shop.processes() == alone)

    assert (404, "urn:stepengine:problem:no_such_desk") == (foreign.status_code, foreign.json()["type"])
    pages = [client.stream("GET", f"/runs/{run}/edits") for _ in range(9)]
    answers = [page.__enter__() for page in pages]
    assert [*[200] * 8, 429] == [answer.status_code for answer in answers]
    below = shop.processes()
    assert shop.process is not None
    os.kill(shop.process.pid, signal.SIGKILL)
    for page in pages:
        page.__exit__(None, None, None)
    until(lambda: not [pid for pid in below if (Path("/proc") / str(pid)).exists()])


@pytest.mark.spec("studio:ST6")
def test_desk_ends_if_its_page_leaves_before_the_first_event(client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea")
    alone, server = shop.processes(), httpx2.URL(shop.url)
    for _ in range(9):
        with socket.create_connection((server.host, server.port)) as page:
            page.sendall(
                f"GET /runs/{run}/edits HTTP/1.1\r\nhost: {server.host}:{server.port}\r\nauthorization: Bearer {shop.token}\r\n\r\n".encode()
            )

    def accepts_another_page() -> bool:
        with client.stream("GET", f"/runs/{run}/edits") as answer:
            return 200 == answer.status_code

    # More pages left than the server has desks for: until some have ended, it answers 429.
    until(accepts_another_page)
    with looking(client, run) as opened:
        opened.look()
    until(lambda: shop.processes() == alone)


# --- judging ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST7")
def test_blame_waits_for_agreement_and_can_be_cancelled(client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk")
    asked = {"kind": "blame", "runs": [run], "check": "output == 70", "samples": 2}
    priced = judged(client, **asked)
    made = agreed(client, priced)
    other = judged(client, **asked)
    gone = client.post(f"/jobs/{other['id']}/cancel").json()
    late = client.post(f"/jobs/{other['id']}/agree", json={})
    unknown = client.get("/jobs/1000")

    assert ({"calls": 6, "low": None, "high": None}, "done") == (priced["price"], made["status"])
    assert (6, 6) == (made["progress"]["calls"], made["progress"]["of"])
    assert "no step is to blame" in made["result"]["why"]
    assert ("cancelled", 409) == (gone["status"], late.status_code)
    assert (404, "urn:stepengine:problem:no_such_job") == (unknown.status_code, unknown.json()["type"])
    until(lambda: not shop.processes())


# --- agents -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:ST8")
def test_agent_view_has_tools_prompts_children_and_source(client: httpx2.Client, shop: Shop) -> None:
    told = client.get("/agents/asker").json()
    other = client.get("/agents/tally").json()

    line = CODE[: CODE.index('"asker"')].count("\n") + 1
    assert (str(shop.file), line, ["tally"]) == (told["file"], line, told["spawns"])
    assert "You may run these agents:\n- tally" in told["prompts"]["instructions"]
    assert ("Add up.", "Be brief.", "") == tuple(other["prompts"][name] for name in ("system", "instructions", "step"))
    (tool,) = other["tool_specs"]
    assert ("price_of", "Return the price of an item.", ["item"]) == (
        tool["name"],
        tool["description"],
        tool["input_schema"]["required"],
    )


@pytest.mark.spec("studio:ST5", "studio:ST6")
def test_database_runs_are_inspected_and_forked_only_with_deployed_agents(tmp_path: Path, db: str) -> None:
    with Shop(tmp_path, options=["--runs", db]).open() as shop, shop.client() as client:
        run = done(client, "tally", "tea milk sugar")
        with looking(client, run, "3") as page:
            first = page.look()
            save(shop.file, CODE.replace("total = worth", "total += worth"))
            second = page.look()
        refused = client.post(f"/runs/{run}/fork", json={"at": "#0", "changes": {"system_prompt": "Multiply."}})

    assert ("50", "120") == (variables(first["now"])["total"], variables(second["now"])["total"])
    assert (409, True) == (refused.status_code, "deployed there" in refused.json()["detail"]), refused.text


# --- journals that nobody wrote ---------------------------------------------------------------------------------------


def _deepen(content: bytes, depth: int) -> bytes:
    """Put a deep value in place of the prompt, with right checksums."""
    lines, previous = [], 0
    linked = b'"link":true' in content.splitlines()[0]
    for line in content.splitlines():
        body = line[: line.rindex(b',"crc":')].replace(b'"tea"', b"[" * depth + b"1" + b"]" * depth)
        crc = zlib.crc32(body, previous if linked else 0)
        previous = crc
        lines.append(body + b',"crc":"%08x"}\n' % crc)
    return b"".join(lines)


@pytest.mark.spec("replay:J51", "studio:SV4")
def test_damaged_or_deep_journal_is_409_with_its_record(shop: Shop, tmp_path: Path) -> None:
    with shop.client() as client:
        run = done(client, "tally", "tea")
        (file,) = [path for path in tmp_path.rglob("*.jsonl") if run in path.name]
        content = file.read_bytes()
        broken = {f"deep {depth}": _deepen(content, depth) for depth in (400, 5_000)}
        broken["damaged"] = content[:200] + b"X" + content[201:]
        for name, made in broken.items():
            file.write_bytes(made)
            for page in ("view", "places", "lines"):
                answer = client.get(f"/runs/{run}/{page}")

                assert 409 == answer.status_code, (name, page, answer.text)
                assert "record " in answer.json()["detail"]
            assert client.get(f"/runs/{run}").status_code == client.get("/runs").status_code == 200


@pytest.mark.spec("studio:ST7")
def test_impact_reruns_with_the_current_file_after_agreement(client: httpx2.Client, shop: Shop) -> None:
    runs = [done(client, "tally", prompt) for prompt in ("tea", "tea milk")]
    same = judged(client, kind="impact", runs=runs, samples=1)
    save(shop.file, CODE.replace("Be brief.", "Be loud."))
    priced = judged(client, kind="impact", runs=runs, samples=2)
    made = agreed(client, priced)

    assert ("done", ["same", "same"]) == (same["status"], [one["class"] for one in same["result"]["journals"]])
    assert ({"calls": 6, "low": None, "high": None}, None) == (priced["price"], priced["result"])
    assert [(run, "asked", "#1", 2) for run in runs] == [
        (one["file"], one["class"], one["break"], len(one["samples"])) for one in made["result"]["journals"]
    ]
    assert str(shop.folder) not in str(made["result"])


@pytest.mark.spec("studio:ST7")
def test_pin_writes_a_failing_test_or_explains_why_not(client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk")
    made = judged(client, kind="pin", runs=[run], check="output == 70", name="sum")
    twice = judged(client, kind="pin", runs=[run], check="output == 70", name="sum")
    fine = judged(client, kind="pin", runs=[run], check="output == 40", name="other")

    assert ("done", "tests/test_pin_sum.py") == (made["status"], made["result"]["file"])
    assert 'load_agent(ROOT / "shop.py#tally")' in (shop.folder / "tests/test_pin_sum.py").read_text()
    assert ("failed", "failed") == (twice["status"], fine["status"])
    assert "exists already" in twice["error"]
    assert "nothing to pin" in fine["error"]


@pytest.mark.spec("studio:ST6")
def test_edited_prompt_shows_the_next_request_and_its_price(client: httpx2.Client, shop: Shop) -> None:
    run = done(client, "tally", "tea milk sugar")
    with looking(client, run, "3") as page:
        page.look()
        same = page.next()
        save(shop.file, CODE.replace("Add up.", "Add it all up."))
        told = page.look()
        coming = page.next()
        asked = agreed(client, judged(client, kind="ask", runs=[run]))
        save(shop.file, CODE.replace("price_of, item)", "price_of, item + '!')"))
        other = page.look()
        lost = page.next()

    assert ("", None, "the run matches its record") == (same["address"], same["request"], same["why"][:26])
    assert (["#1", "#3", "#5"], "") == (told["now"]["changed"], told["now"]["differs"])
    assert ("#1", "Add it all up.") == (coming["address"], coming["request"]["system"])
    assert ("#1", "t/m 4: Add it all up.") == (asked["result"]["address"], asked["result"]["text"])
    assert ("#0", True) == (other["now"]["differs_at"], other["now"]["is_before"])
    assert "is an unrecorded call of price_of" in lost["why"]


@pytest.mark.spec("studio:ST5")
def test_reply_with_calls_can_be_edited_and_sent_back(tmp_path: Path) -> None:
    calls = """
def calls(request):
    from stepengine.testing import tool_call
    return text("done") if any(m.role == "tool" for m in request.messages) else tool_call("price_of", {"item": "tea"})


free = AgentDefinition("free", model="t/m", tools=[price_of])
agents, models = [free], ScriptedModel(calls)
"""  # fmt: skip
    with Shop(tmp_path, f"{CODE}{calls}").open() as shop, shop.client() as client:
        run = done(client, "free", "go")
        with looking(client, run, "1") as page:
            value = page.look()["now"]["whole"]["value"]
        value["content"][0]["input"] = {"item": "coffee"}
        fork = rests(client, client.post(f"/runs/{run}/fork", json={"at": "#0", "edit": value}).json()["run_id"])
        with looking(client, fork, "#1") as page:
            result = page.look()["now"]["whole"]["value"]

    assert ("model_reply", 60) == (value["type"], result)


TODOS = """
from stepengine import AgentDefinition, Perform


def handle_steps(ctx):
    found = yield Perform(len, ctx.prompt)
    return found


agent = AgentDefinition("todos", handle_steps=handle_steps)
"""


@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (TODOS.replace("found = yield", "found of yield"), "SyntaxError: invalid syntax (todos.py, line 6)"),
        (
            TODOS.replace("\nfrom", "\nimport no_such_module\nfrom"),
            "ModuleNotFoundError: No module named 'no_such_module' (",
        ),
    ],
)
def test_broken_file_of_an_agent_folder_is_named_with_line(tmp_path: Path, code: str, said: str) -> None:
    shop = Shop(tmp_path)
    shop.options = ("--agents", "agents", "--runs", "runs")
    (tmp_path / "agents").mkdir()
    todos = tmp_path / "agents" / "todos.py"
    todos.write_text(TODOS)
    (tmp_path / "agents" / "other.py").write_text(TODOS.replace("todos", "other"))
    with shop.open() as opened, opened.client() as client:
        run = done(client, "todos", "tea")
        with looking(client, run, "0") as page:
            page.look()
            save(todos, code)
            problem = page.look()["now"]["problem"]
        failed = judged(client, kind="blame", runs=[run], check="output == 4")

    assert f"agents/todos.py: loading it failed with {said}" in problem
    assert problem.index("todos.py") < problem.index(f"{NO_AGENT} 'todos'")
    assert said in str(failed), failed
    if "Module" in said:
        assert "todos.py:2)" in problem
