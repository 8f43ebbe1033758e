"""
External agents: programs that speak the protocol stand where agents stand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Parallel, RunStatus, Start, Usage, Wait, Workspace
from stepengine.adapters.acp import ExternalAgent, program, remote_agent
from stepengine.adapters.external import turns
from stepengine.errors import DefinitionError, ExternalAgentError
from stepengine.journal import FileJournal
from stepengine.permissions import EveryCall, Policy, Rule
from stepengine.testing import ScriptedModel, text, tool_call
from tests.waits import until_async as until

HERE = Path(__file__).parent
OTHER = str(HERE / "other.py")


def led(project: Path | Workspace, way: str, *more: object, name: str = "other", **options: Any) -> ExternalAgent:
    command = [sys.executable, "-S", "-E", OTHER, way, *map(str, more)]  # which needs no package, and starts at once
    return ExternalAgent(name, command=command, workspace=project, **options)


def gone(project: Path) -> ExternalAgent:
    """
    The same agent where its program is not.
    """
    return ExternalAgent("other", command=[str(project / "gone")], workspace=project)


def leading(agent: AgentDefinition, *prompts: str) -> AgentDefinition:
    def handle(ctx: Any) -> Any:
        said = []
        for prompt in prompts or ("hello",):
            reply = yield from AgentCall(agent, prompt)
            said.append(reply["text"])
        return said

    return AgentDefinition("boss", spawnable_agents=[agent], handle_steps=handle)


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF120")
async def test_external_agent_call_returns_its_text_and_replays_without_it(project: Path, tmp_path: Path) -> None:
    journal, events = tmp_path / "run.jsonl", []
    result = await Engine([leading(led(project, "plain"))], observers=[events.append]).run(
        "boss", journal=FileJournal(journal)
    )

    assert (RunStatus.COMPLETED, ["You said: hello"]) == (result.status, result.unwrap())
    shown = [(event.path, event.type) for event in events if event.type in ("text_delta", "text_completed")]
    assert [("0", "text_delta"), ("0", "text_completed")] == shown

    again = await Engine([leading(gone(project))]).replay(journal)
    assert ["You said: hello"] == again.unwrap()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF120")
async def test_external_agents_run_in_parallel_background_and_by_spawn(project: Path) -> None:
    one, two = led(project, "plain", name="one"), led(project, "chatty", name="two")

    def handle(ctx: Any) -> Any:
        begun = yield from Start(AgentCall(one, "in the background"))
        both = yield from Parallel(AgentCall(one, "a"), AgentCall(two, "b"))
        late = yield from Wait(begun)
        return [child.unwrap()["text"] for child in (*both, *late.done)]

    boss = AgentDefinition("boss", spawnable_agents=[one, two], handle_steps=handle)
    result = await Engine([boss]).run("boss")
    assert ["You said: a", "You said: b", "You said: in the background"] == result.unwrap()

    model = ScriptedModel(
        [tool_call("spawn_agents", {"agents": [{"agent_type": "two", "prompt": "c"}]}), text("Done.")]
    )
    chief = AgentDefinition("chief", model="m/m", tools=["spawn_agents"], spawnable_agents=[two])
    await Engine([chief], models=model).run("chief", "go")
    assert "You said: c" in model.calls[1].messages[-1].text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF121")
async def test_permission_requests_of_the_program_are_judged_by_policy(project: Path) -> None:
    rules = [Rule.allow_command(["pytest"]), Rule.deny_tool("other_edit")]
    events: list[Any] = []
    engine = Engine([led(project, "asks")], permissions=Policy(rules), observers=[events.append])
    result = await engine.run("other", "go")

    assert "The tests: y. The edit: n." == result.unwrap()["text"]
    decided = [
        (event.tool_name, event.decision)
        for event in events
        if event.type == "permission_decided" and "_e" in event.tool_name
    ]
    assert [("other_execute", "allow"), ("other_edit", "deny")] == decided


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF121")
async def test_present_person_is_asked_while_the_program_waits(project: Path) -> None:
    engine = Engine([led(project, "asks")], permissions=Policy([Rule.allow_command(["pytest"])]))
    async with engine.start("other", "go") as handle:
        async for event in handle.events():
            if event.type == "permission_requested":
                assert [str(project / "shop.py")] == event.input["paths"]
                handle.answer(event.question.id, True)
        result = await handle.result()

    assert "The tests: y. The edit: y." == result.unwrap()["text"]


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF121", "interfaces:IF124")
async def test_approval_holds_after_a_restart_only_for_its_kind(project: Path, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    engine = Engine([led(project, "changes", terminals=True)], permissions=Policy())
    asked = await engine.run("other", "go", journal=FileJournal(journal))
    (question,) = asked.pending_questions
    result = await engine.resume(journal, answers={question.id: True})

    assert "other_read" == question.tool_name
    assert ["other_execute"] == [one.tool_name for one in result.pending_questions]
    assert not (project / "made").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF121", "interfaces:IF122")
async def test_suspended_run_ends_the_program_and_resumes_its_session(project: Path, tmp_path: Path) -> None:
    journal, kept = tmp_path / "run.jsonl", tmp_path / "kept"
    engine = Engine([led(project, "once", kept)], permissions=Policy())
    asked = await engine.run("other", "go", journal=FileJournal(journal))
    (question,) = asked.pending_questions
    assert (RunStatus.SUSPENDED, True) == (asked.status, "was ended" in " ".join(asked.warnings))

    result = await engine.resume(journal, answers={question.id: True})
    assert "The edit: y." == result.unwrap()["text"]
    first, second = kept.read_text().splitlines()
    assert ("go", True) == (first, second.startswith("You were stopped"))

    again = await Engine([gone(project)], permissions=Policy()).replay(journal)
    assert result.unwrap() == again.unwrap()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF122")
async def test_external_session_continues_by_params_or_state(project: Path, tmp_path: Path) -> None:
    agent = led(project, "kept", tmp_path / "kept")
    engine = Engine([agent])
    first = await engine.run("other", "one")
    second = await engine.run("other", "two", params={"session": first.unwrap()["session"]})
    third = await engine.run("other", "three", previous=second.state)

    assert 1 == len({result.unwrap()["session"] for result in (first, second, third)})
    assert ["You said: two", "You said: three"] == [second.text, third.text]
    refused = await Engine([led(project, "plain")]).run("other", params={"session": "s1"})
    assert ("session", True) == (
        refused.error.kind,
        "cannot resume a session; call it without a session" in refused.error.message,
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF123")
async def test_tokens_and_cost_of_the_program_are_counted(project: Path) -> None:
    result = await Engine([leading(led(project, "spends"))]).run("boss")

    assert (Usage(input_tokens=100, output_tokens=20, reasoning_tokens=10), Decimal("0.5")) == (
        result.usage,
        result.cost,
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF124")
async def test_program_files_are_confined_to_the_workspace(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    (project / "link").symlink_to(outside)
    here = str(project)
    asked = [
        ("fs/read_text_file", {"path": f"{here}/shop.py", "line": 2, "limit": 1}),
        ("fs/write_text_file", {"path": f"{here}/new.py", "content": "x = 1\n"}),
        ("fs/read_text_file", {"path": str(tmp_path / "outside.txt")}),
        ("fs/read_text_file", {"path": f"{here}/link"}),
        ("fs/write_text_file", {"path": f"{here}/../outside.txt", "content": ""}),
        ("fs/write_text_file", {"path": f"{here}/.git/config", "content": ""}),
        ("fs/write_text_file", {"path": 3}),
        ("terminal/create", {"command": "id"}),
    ]
    result = await Engine([led(project, "files")]).run("other", json.dumps(asked))

    read, wrote, *refused = [json.loads(line) for line in result.text.splitlines()]
    assert ({"content": "name = 2\n"}, {}, "x = 1\n") == (read, wrote, (project / "new.py").read_text())
    assert [True] * 6 == [isinstance(one, str) for one in refused]
    assert "secret" == outside.read_text()

    result = await Engine([led(project, "files", files="none")]).run("other", json.dumps(asked[:2]))
    assert ["this client does not allow reading files", "this client does not allow writing files"] == [
        json.loads(x) for x in result.text.splitlines()
    ]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF124", "reliability:FS16")
async def test_files_are_read_and_written_by_line_ends(project: Path) -> None:
    """A page break and a line separator are characters of a line."""
    file = project / "mixed.py"
    file.write_bytes("a\x0cb\u2028\r\nsecond\nthird\r\n".encode())
    asked = [
        ("fs/read_text_file", {"path": str(file), "line": 2, "limit": 1}),
        ("fs/write_text_file", {"path": str(file), "content": "second\nnew\nthird\n"}),
    ]
    result = await Engine([led(project, "files")]).run("other", json.dumps(asked))

    assert json.loads(result.text.splitlines()[0]) == {"content": "second\n"}
    assert file.read_bytes() == b"second\nnew\nthird\r\n"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF124")
async def test_commands_run_in_the_workspace_if_rules_allow_them(project: Path) -> None:
    code = "import os; print(sorted(os.listdir()), os.environ['GIVEN']); raise SystemExit(3)"
    words = [[sys.executable, "-c", code], ["rm", "-rf", "."], ["no-such-program"]]
    given = ["env", "GIVEN=by me"]
    rules = [Rule.allow_command([*given, name]) for name in (sys.executable, "no-such-program")]
    rules += [Rule.allow_command([name]) for name in (sys.executable, "sh")]
    events: list[Any] = []
    agent = led(project, "terminal", terminals=True)
    result = await Engine(
        [agent], permissions=Policy([*rules, Rule.deny_command(["rm"])]), observers=[events.append]
    ).run("other", json.dumps(words))

    ran, refused, missing, outside = [json.loads(line) for line in result.text.splitlines()]
    status = {"exitCode": 3, "signal": None}
    assert [status, {"output": "['shop.py'] by me\n"[-20:], "truncated": False, "exitStatus": status}] == ran
    assert ["the command was not allowed", "there is no program 'no-such-program'"] == [refused, missing]
    assert "cwd must be a folder of the workspace" == outside
    decided = [
        event.decision
        for event in events
        if getattr(event, "tool_name", "") == "other_execute" and event.type == "permission_decided"
    ]
    assert ["allow", "deny", "allow", "allow", "allow"] == decided


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.spec("interfaces:IF124", "remote:WS7")
async def test_commands_run_in_the_sandbox_that_the_workspace_is(project: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret of this machine")
    code = "import os, sys; print(os.path.exists(sys.argv[1]), os.environ['GIVEN'])"
    words = [[sys.executable, "-c", code, str(tmp_path / "secret")], ["cat", "shop.py"], ["no-such-program"]]
    with Workspace.bubblewrap(project) as place:
        inside = await Engine([led(place, "terminal", terminals=True)]).run("other", json.dumps(words))
    outside = await Engine([led(project, "terminal", terminals=True)]).run("other", json.dumps(words))

    def printed(said: Any) -> list[Any]:
        told = [json.loads(line) for line in said.text.splitlines()]
        return [one[1]["output"] if isinstance(one, list) else one for one in told]

    same = ["rate = 1\nname = 2\n", "there is no program 'no-such-program'", "cwd must be a folder of the workspace"]
    assert (["False by me\n", *same], ["True by me\n", *same]) == (printed(inside), printed(outside))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF124")
async def test_the_program_sees_no_keys_that_it_was_not_given(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "k1")
    monkeypatch.setenv("OTHER_API_KEY", "k2")
    result = await Engine([led(project, "env", env=["SOME_API_KEY"])]).run("other")
    seen = json.loads(result.text)

    assert ("k1", None, True) == (seen.get("SOME_API_KEY"), seen.get("OTHER_API_KEY"), "PATH" in seen)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("way", "kind", "words"),
    [
        ("dies", "ended", "its program ended (exit 3); its stderr ends with: out of memory"),
        ("junk", "protocol", "lines that are not protocol messages, such as 'no JSON'"),
        ("endless", "protocol", "a line of more than"),
        ("newer", "protocol", "uses version 2 of the protocol, but only version 1 is supported"),
        ("nonsense", "protocol", "uses version 'one' of the protocol, but only version 1 is supported"),
        ("locked", "auth_required", "it offers: A key of yours"),
        ("mute", "time", "did not open a session within 0.5 s; raise start_seconds= if it needs longer"),
    ],
)
@pytest.mark.spec("interfaces:IF125")
async def test_failing_program_raises_an_error_with_its_kind(project: Path, way: str, kind: str, words: str) -> None:
    options = {"start_seconds": 0.5} if way == "mute" else {}
    result = await Engine([led(project, way, **options)]).run("other")

    assert (RunStatus.FAILED, ExternalAgentError, kind) == (result.status, type(result.error), result.error.kind)
    assert words in result.error.message


@pytest.mark.spec("interfaces:IF125")
async def test_missing_program_or_folder_is_a_start_error(project: Path) -> None:
    for agent, words in (
        (gone(project), "there is no such program"),
        (ExternalAgent("other", command=["no-such-agent-anywhere"], workspace=project), "not on the search path"),
        (led(project / "gone", "plain"), "cannot be opened"),
        (ExternalAgent("other", command=[sys.executable]), "needs a folder to work in"),
    ):
        result = await Engine([agent]).run("other")
        assert ("start", True) == (result.error.kind, words in result.error.message), result.error


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF125")
@pytest.mark.parametrize("way", ["repeats", "plans"])
async def test_what_a_program_repeats_is_kept_up_to_a_limit(
    project: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "RECORD_CHARS", 20_000)
    journal = tmp_path / "run.jsonl"
    result = await Engine([led(project, way)]).run("other", journal=FileJournal(journal))

    assert result.unwrap()["text"].startswith("Done.")
    assert journal.stat().st_size < 100_000


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF125")
async def test_invalid_protocol_messages_are_ignored(project: Path) -> None:
    result = await Engine([led(project, "odd")]).run("other")

    assert "lone \ufffd <tool_call>{}</tool_call>" == result.unwrap()["text"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF126")
@pytest.mark.parametrize("way", ["silent", "deaf"])
async def test_cancelling_the_run_ends_the_program_and_its_children(
    project: Path, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "deaf":  # it never listens, however long it is waited for
        monkeypatch.setattr(remote_agent, "CANCEL_SECONDS", 0.05)
        monkeypatch.setattr(program, "EOF_SECONDS", 0.05)
        monkeypatch.setattr(program, "TERM_SECONDS", 0.05)
    said = tmp_path / "said"
    engine = Engine([led(project, way, said)])
    async with engine.start("other", "go") as handle:
        await until(lambda: said.exists() and len(said.read_text().split()) >= 2)
        handle.interrupt()
        result = await handle.result()

    pids = said.read_text().split()
    assert (RunStatus.CANCELLED, way == "silent") == (result.status, "cancelled" in pids)
    await until(lambda: all(is_gone(int(pid)) for pid in pids[:2]))


def open_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
@pytest.mark.spec("interfaces:IF126")
async def test_escaped_process_keeps_no_pipe_open(project: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    before = open_descriptors()
    async with Engine([led(project, "escapes", said)]).start("other", "go") as handle:
        await until(lambda: said.exists() and len(said.read_text().split()) >= 2)
        handle.interrupt()
        await handle.result()
    after = open_descriptors()
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(said.read_text().split()[1]), signal.SIGKILL)

    assert before == after


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF126")
@pytest.mark.parametrize(
    ("way", "words"),
    [("saves", "saved at the end of input"), ("stays", "saved when it was told to"), ("closes", "closed s")],
)
async def test_program_gets_time_to_save_its_session(project: Path, tmp_path: Path, way: str, words: str) -> None:
    result = await Engine([led(project, way, tmp_path / "said")]).run("other", "go")

    assert "You said: go" == result.text
    assert (tmp_path / "said").read_text().startswith(words)


@pytest.mark.spec("interfaces:IF120")
def test_invalid_external_agent_options_raise_and_copies_work(project: Path) -> None:
    for options in ({}, {"command": []}, {"command": "claude"}, {"command": ["a"], "env": "A"}, {"command": ["a"], "files": "all"},
                    {"command": ["a"], "start_seconds": 0}):  # fmt: skip
        with pytest.raises(DefinitionError):
            ExternalAgent("other", **options)
    copy = attrs.evolve(led(project, "plain"), description="Says again what it is told.")
    assert ("Says again what it is told.", 6) == (copy.description, len(copy.tools))


SCRIPT = """
import asyncio, sys
from pathlib import Path
from stepengine import AgentCall, AgentDefinition, Engine, Parallel
from stepengine.adapters.acp import ExternalAgent, program
from stepengine.adapters.acp import remote_agent
from stepengine.journal import FileJournal

project, other, said, command = sys.argv[1:]


def led(name, *words):
    words = [sys.executable, other, *words] if command == "there" else [command]
    return ExternalAgent(name, command=words, workspace=project)


three = [led("one", "plain"), led("two", "chatty"), led("three", "slow", said)]


def handle(ctx):
    children = yield from Parallel(*[AgentCall(agent, ctx.prompt) for agent in three])
    return [child.unwrap()["text"] for child in children]


boss = AgentDefinition("boss", spawnable_agents=three, handle_steps=handle)
journal = Path(project) / "run.jsonl"


async def main():
    engine = Engine([boss])
    if command != "there":
        result = await engine.replay(journal)
    elif journal.exists():
        result = await engine.resume(journal, in_doubt="retry")
    else:
        result = await engine.run("boss", "hello", journal=FileJournal(journal))
    print(result.unwrap())


asyncio.run(main())
"""


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF120", "interfaces:IF126")
async def test_killed_handler_with_three_agents_resumes_and_replays(project: Path, tmp_path: Path) -> None:
    said, script = tmp_path / "said", tmp_path / "lead.py"
    script.write_text(SCRIPT)

    def begun(command: str) -> subprocess.Popen[str]:
        words = [sys.executable, str(script), str(project), OTHER, str(said), command]
        env = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)

    def is_under_way() -> bool:
        done = (project / "run.jsonl").read_text().count("end_turn") if (project / "run.jsonl").exists() else 0
        return done >= 4 and said.exists() and len(said.read_text().split()) == 2

    first = begun("there")
    await until(is_under_way)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    await until(lambda: all(is_gone(int(pid)) for pid in said.read_text().split()))

    said.with_suffix(".go").touch()
    second, _ = await asyncio.to_thread(begun("there").communicate)
    assert "['You said: hello', 'You said: hello', 'You said: hello']\n" == second
    third, _ = await asyncio.to_thread(begun(str(project / "gone")).communicate)
    assert second == third


FILE_REQUESTS = [
    ("fs/read_text_file", {"path": "{here}/open/a.txt"}),
    ("fs/read_text_file", {"path": "{here}/closed/b.txt"}),
    ("fs/read_text_file", {"path": "{here}/open/link"}),
    ("fs/read_text_file", {"path": "{here}/open/twin"}),
    ("fs/write_text_file", {"path": "{here}/open/a.txt", "content": "new\n"}),
    ("fs/write_text_file", {"path": "{here}/closed/b.txt", "content": "new\n"}),
]
READS, WRITES = ("a", "b", "link", "twin"), ("a", "b")


async def allowed_requests(project: Path, policy: Policy) -> tuple[set[str], set[str]]:
    """
    Return which of the requests a program could make under a policy: those to read, and those to write.
    """
    for folder in ("open", "closed"):
        shutil.rmtree(project / folder, ignore_errors=True)
        (project / folder).mkdir()
    (project / "open/a.txt").write_text("a\n")
    (project / "closed/b.txt").write_text("b\n")
    (project / "open/link").symlink_to("../closed/b.txt")
    (project / "open/twin").hardlink_to(project / "closed/b.txt")
    asked = json.dumps(FILE_REQUESTS).replace("{here}", str(project))
    result = await Engine([led(project, "files")], permissions=policy).run("other", asked)
    assert result.status is RunStatus.COMPLETED, result.error
    answers = [isinstance(json.loads(line), dict) for line in result.text.splitlines()]
    wrote = {"a": (project / "open/a.txt").read_text(), "b": (project / "closed/b.txt").read_text()}
    assert answers[4:] == [wrote[name] == "new\n" for name in WRITES]
    read = {name for name, done in zip(READS, answers, strict=False) if done}
    return read, {name for name, done in zip(WRITES, answers[4:], strict=True) if done}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("policy", "read", "written"),
    [
        (Policy([Rule("allow", EveryCall())]), {*READS}, {*WRITES}),
        (Policy([Rule.deny_category("read"), Rule("allow", EveryCall())]), set(), {*WRITES}),
        (Policy([Rule.deny_tool("other_edit"), Rule("allow", EveryCall())]), {*READS}, set()),
        (Policy(mode="plan"), {*READS}, set()),
        (Policy([Rule.allow_path("open/**")], mode="dont_ask"), {"a"}, {"a"}),
        (Policy([Rule.deny_path("closed", tool="other_read"), Rule("allow", EveryCall())]), {"a"}, {*WRITES}),
    ],
    ids=lambda value: (
        "; ".join(map(str, (value.mode, *[rule.id for rule in value.rules]))) if isinstance(value, Policy) else None
    ),
)
@pytest.mark.spec("interfaces:IF124")
async def test_each_program_file_request_is_judged_as_a_call(
    project: Path, policy: Policy, read: set[str], written: set[str]
) -> None:
    assert (read, written) == await allowed_requests(project, policy)


@pytest.mark.spec("interfaces:IF124")
async def test_person_sees_the_diff_before_a_write(project: Path) -> None:
    asked = [("fs/write_text_file", {"path": f"{project}/shop.py", "content": "rate = 2\nname = 2\n"})]
    engine = Engine([led(project, "files")], permissions=Policy())
    async with engine.start("other", json.dumps(asked)) as handle:
        async for event in handle.events():
            if event.type == "permission_requested":
                assert ("other_edit", ["shop.py"], True) == (
                    event.tool_name,
                    list(event.input["paths"]),
                    "-rate = 1\n+rate = 2" in event.input["details"],
                )
                assert "rate = 1\nname = 2\n" == (project / "shop.py").read_text()
                handle.answer(event.question.id, True)
        result = await handle.result()

    assert ("{}", "rate = 2\nname = 2\n") == (result.text.strip(), (project / "shop.py").read_text())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF124")
async def test_just_allowed_file_is_not_asked_about_again(project: Path) -> None:
    (project / "link").symlink_to("shop.py")
    events: list[Any] = []
    engine = Engine(
        [led(project, "edits")], permissions=Policy([Rule("allow", EveryCall())]), observers=[events.append]
    )
    await engine.run("other", "go")

    judged = [event.input["title"] for event in events if event.type == "tool_started" and event.source != "external"
              and event.tool_name == "other_edit"]  # fmt: skip
    # The permission covers one write of that name. The second one is judged, and so is one by another name.
    assert ["Edit shop.py", "Write shop.py", "Edit link", "Write shop.py"] == judged


def permission(kind: str, command: str) -> tuple[str, dict[str, Any]]:
    options = [
        {"optionId": "y", "name": "Yes", "kind": "allow_once"},
        {"optionId": "n", "name": "No", "kind": "reject_once"},
    ]
    call = {"toolCallId": "t1", "title": "Look", "kind": kind, "rawInput": {"command": command}}
    return "session/request_permission", {"toolCall": call, "options": options}


async def answers_to(project: Path, policy: Policy, *asked: tuple[str, dict[str, Any]]) -> list[Any]:
    engine = Engine([led(project, "files", terminals=True)], permissions=policy)
    result = await engine.run("other", json.dumps(asked))
    return [json.loads(line) for line in result.text.splitlines()]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (Policy(mode="plan"), "read"),
        (Policy([Rule.deny_tool("other_execute"), Rule("allow", EveryCall())]), "think"),
    ],
    ids=["plan", "denied tool"],
)
@pytest.mark.spec("interfaces:IF121", "interfaces:IF124")
async def test_a_permission_of_another_kind_lets_no_command_run(project: Path, policy: Policy, kind: str) -> None:
    allowed, made = await answers_to(
        project, policy, permission(kind, "touch made"), ("terminal/create", {"command": "touch", "args": ["made"]})
    )

    assert "y" == allowed["outcome"]["optionId"]
    assert ("the command was not allowed", False) == (made, (project / "made").exists())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("more", "judged"),
    [({}, 1), ({"cwd": "PROJECT"}, 1), ({"cwd": "PROJECT/other"}, 2), ({"env": [{"name": "A", "value": "b"}]}, 2)],
    ids=["same", "same folder", "other folder", "variables"],
)
@pytest.mark.spec("interfaces:IF124")
async def test_command_permission_excludes_other_folders_and_variables(
    project: Path, more: dict[str, Any], judged: int
) -> None:
    (project / "other").mkdir()
    given = {k: v.replace("PROJECT", str(project)) if isinstance(v, str) else v for k, v in more.items()}
    events: list[Any] = []
    engine = Engine(
        [led(project, "files", terminals=True)],
        permissions=Policy([Rule("allow", EveryCall())]),
        observers=[events.append],
    )
    await engine.run(
        "other", json.dumps([permission("execute", "true"), ("terminal/create", {"command": "true", **given})])
    )

    started = [event for event in events if event.type == "tool_started" and event.source != "external"]
    assert judged == len([event for event in started if event.tool_name == "other_execute"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF124")
async def test_command_rule_does_not_allow_added_variables(project: Path) -> None:
    (project / "git").write_text("#!/bin/sh\necho > made\n")
    (project / "git").chmod(0o755)
    command = {"command": "git", "args": ["status"], "env": [{"name": "PATH", "value": str(project)}]}
    policy = Policy([Rule.allow_command(["git", "status"])], mode="dont_ask")
    (refused,) = await answers_to(project, policy, ("terminal/create", command))
    assert ("the command was not allowed", False) == (refused, (project / "made").exists())

    denies = Policy([Rule.deny_command(["git"]), Rule("allow", EveryCall())])
    (refused,) = await answers_to(project, denies, ("terminal/create", command))
    assert "the command was not allowed" == refused
