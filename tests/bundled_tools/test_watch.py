"""``watch``: commands that are run again and again in the background, by the calls of models and handlers."""

# ruff: noqa: ASYNC110, ASYNC220

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Hooks, ToolCall
from stepengine.engine.handler_sources import SourceWarning
from stepengine.errors import ToolInputError
from stepengine.journal import MemoryJournal
from stepengine.permissions import Command, Policy, Rule
from stepengine.permissions import Path as PathRule
from stepengine.permissions.commands import CommandForm
from stepengine.testing import Clock, ScriptedModel, text, tool_call
from stepengine.tools.bundled import child_tools, shell_tools
from tests.phrases import NOT_EXECUTED

from .processes import RUN_VARIABLE, running_with

pytestmark = pytest.mark.usefixtures("nothing_survives")


def left_of(test):
    """Return the commands that are left: what starts them elsewhere, which ends with its workspace, is none."""
    return [command for command in running_with(test) if b"stepengine worker" not in command]


def tools(root, **options):
    return [*child_tools(), *shell_tools(root, env=[RUN_VARIABLE], watch=True, **options)]


def lead(root, **options):
    return AgentDefinition("lead", model="t/m", tools=tools(root, **options))


def by_hand(root, handler, **options):
    return AgentDefinition("lead", handle_steps=handler, tools=tools(root, **options))


def watch(command, until="succeeds", **more):
    return tool_call("watch", {"command": command, "until": until, "every_seconds": 1, "timeout_seconds": 30, **more})


def said(request):
    return "\n".join([str(message) for message in request.messages])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT11")
async def test_a_model_is_notified_once_when_a_file_appears(tmp_path):
    there, clock = tmp_path / "there", Clock(waits=True)
    model = ScriptedModel([watch(["cat", "there"]), text("I wait."), text("It is there.")])
    async with asyncio.timeout(60), Engine([lead(tmp_path)], models=model, clock=clock) as engine:
        running = asyncio.create_task(engine.run("lead", "go"))
        await clock.wait_for_sleepers(2)
        there.write_text("built 17")
        clock.advance(seconds=1)
        result = await running

    assert (result.status.value, result.text) == ("completed", "It is there."), result.error
    (called,) = result.tool_calls
    assert called.result.data["agent_type"] == "watcher"
    assert said(model.calls[-1]).count("built 17") == 1
    assert "2 runs" in said(model.calls[-1])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT11")
@pytest.mark.parametrize(
    ("asked", "then"),
    [
        ({"until": "changes"}, "two\n"),
        ({"until": "contains", "text": "tw"}, "two\n"),
        ({"until": "contains", "text": "far away"}, "one\n" * 20_000 + "far away\n" + "two\n" * 20_000),
        ({"until": "fails"}, None),
    ],
    ids=["changes", "contains", "contains in what is not kept", "fails"],
)
async def test_watch_observes_output_and_exit_status(tmp_path, asked, then):
    file, clock = tmp_path / "file", Clock(waits=True)
    file.write_text("one\n")

    def handle_steps(ctx):
        input = {"command": "cat file", "every_seconds": 5, **asked}
        begun = (yield from ToolCall("watch", input)).data
        waited = (yield from ToolCall("wait_agents", {"ids": [begun["id"]]})).data
        return waited["done"][0]["output"]

    async with asyncio.timeout(60), Engine([by_hand(tmp_path, handle_steps)], clock=clock) as engine:
        running = asyncio.create_task(engine.run("lead", "go"))
        for _ in range(3):
            await clock.wait_for_sleepers()
            clock.advance(seconds=5)
        await clock.wait_for_sleepers()
        file.unlink() if then is None else file.write_text(then)
        clock.advance(seconds=5)
        output = (await running).unwrap()

    assert ": so, after 20 s and 5 runs." in output
    assert ("two" in output) is (then is not None)
    assert len(output) < 8_000


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT11")
@pytest.mark.parametrize(("every", "seconds", "polls"), [(50, 800, 17), (400, 1_200, 4)])
async def test_watch_times_out_and_equal_polls_leave_one_record(tmp_path, every, seconds, polls):
    clock, journal = Clock(waits=True), MemoryJournal()

    def handle_steps(ctx):
        more = {"every_seconds": every, "timeout_seconds": seconds}
        begun = (yield from ToolCall("watch", {"command": "cat nothing", "until": "succeeds", **more})).data
        return (yield from ToolCall("wait_agents", {"ids": [begun["id"]]})).data["done"][0]["output"]

    async with asyncio.timeout(60), Engine([by_hand(tmp_path, handle_steps)], clock=clock) as engine:
        running = asyncio.create_task(engine.run("lead", "go", journal=journal))
        while not running.done():
            sleeping = asyncio.ensure_future(clock.wait_for_sleepers())
            await asyncio.wait([sleeping, running], return_when=asyncio.FIRST_COMPLETED)
            sleeping.cancel()
            if not running.done():
                clock.advance(seconds=every)
            elif (await running).status.value == "suspended":
                clock.advance(seconds=every)
                running = asyncio.create_task(engine.resume(journal))
        output = (await running).unwrap()

    assert f"not so: the time is over, after {seconds} s and {polls} runs." in output
    assert "No such file" in output
    calls = [record for record in journal.records() if getattr(record, "effect", {}).get("tool_name") == "watch"]
    assert len(calls) == (3 if every == 50 else 4), [str(record)[:300] for record in journal.records()]


@pytest.mark.spec("waiting:WT11")
async def test_a_cancelled_watch_leaves_no_process(tmp_path, nothing_survives):
    command = ["sh", "-c", "touch begun; sleep 60"]
    model = ScriptedModel(
        [
            watch(command),
            tool_call("list_agents", {}),
            lambda request: tool_call("cancel_agent", {"id": found(request), "reason": "enough"}),
            text("Done."),
        ]
    )
    async with asyncio.timeout(60), Engine([lead(tmp_path)], models=model) as engine:
        result = await engine.run("lead", "go")

    assert (result.status.value, result.text) == ("completed", "Done."), result.error
    assert "watcher" in str(result.tool_calls[1].result)
    assert "enough" in str(result.tool_calls[2].result)
    assert not left_of(nothing_survives)


def found(request):
    (id,) = {*re.findall(r"'id': '([^']+)', 'agent_type'", said(request).replace('"', "'"))}
    return id


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT11")
async def test_a_watch_ends_with_its_run_during_a_command(tmp_path, nothing_survives):
    begun = tmp_path / "begun"

    def handle_steps(ctx):
        yield from ToolCall("watch", {"command": ["sh", "-c", "touch begun; sleep 60"], "until": "fails"})
        while not begun.exists():
            yield from ToolCall("run_terminal_command", {"command": "true"})
        return "over"

    async with asyncio.timeout(60), Engine([by_hand(tmp_path, handle_steps)]) as engine:
        result = await engine.run("lead", "go")
        assert result.output == "over", result.error
        assert not left_of(nothing_survives)


WATCHED = """
import asyncio, sys
from stepengine import AgentDefinition, Engine
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import shell_tools

root, journal = sys.argv[1:]
asked = {"command": ["sh", "-c", "echo poll >> polls; cat there"], "until": "succeeds", "every_seconds": 1}
replies = [tool_call("watch", asked), text("I wait."), text("It is there.")]
agent = AgentDefinition("lead", model="t/m", tools=shell_tools(root, watch=True, env=["TEST_RUN"]))

async def main():
    model = ScriptedModel(replies)
    async with Engine([agent], models=model) as engine:
        result = await engine.run("lead", "go", journal=journal)
        print(result.text)

asyncio.run(main())
"""


@pytest.mark.deep
@pytest.mark.spec("waiting:WT11")
async def test_a_killed_watch_resumes_polling_and_notifies_once(tmp_path, nothing_survives):
    journal, root = tmp_path / "run.jsonl", tmp_path / "root"
    root.mkdir()
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WATCHED), str(root), str(journal)])
    try:
        async with asyncio.timeout(60):
            while not (root / "polls").exists() or (root / "polls").read_text().count("poll") < 2:
                await asyncio.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    before = (root / "polls").read_text().count("poll")
    (root / "there").write_text("built 17")
    model = ScriptedModel([text("It is there.")])
    agent = AgentDefinition("lead", model="t/m", tools=shell_tools(root, watch=True, env=[RUN_VARIABLE]))
    async with asyncio.timeout(60), Engine([agent], models=model) as engine:
        result = await engine.resume(journal)
        again = await engine.replay(journal)

    assert (result.status.value, result.text, again.text) == ("completed", "It is there.", "It is there."), result.error
    assert said(model.calls[-1]).count("built 17") == 1
    assert (root / "polls").read_text().count("poll") == before + 1
    assert len(model.calls) == 1


@pytest.mark.spec("waiting:WT11")
async def test_rules_bind_each_poll_as_they_bound_the_call(tmp_path):
    polls = []

    def judge(ctx, call):
        polls.append((ctx.agent.id, call.tool_name, call.input["command"]))

    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("seventeen")
    model = ScriptedModel([watch("cat key", cwd="sub"), text("I wait."), text("It failed.")])
    (tmp_path / "sub").symlink_to("secret")
    policy = Policy(
        [Rule("deny", PathRule("secret/**")), Rule("allow", Command(CommandForm(["cat"], flags=(), operands="paths")))]
    )
    agent = lead(tmp_path)
    hooks = Hooks(pre_tool=judge)
    async with asyncio.timeout(60), Engine([agent], models=model, permissions=policy, hooks=hooks) as engine:
        result = await engine.run("lead", "go")

    assert result.text == "It failed.", [str(c.result) for c in result.tool_calls]
    assert polls == [("lead", "watch", "cat key"), ("watcher", "watch", "cat key")]
    assert "seventeen" not in said(model.calls[-1])
    assert "secret" in said(model.calls[-1])


@pytest.mark.spec("waiting:WT11")
async def test_a_person_is_asked_once_and_sees_the_command(tmp_path):
    asked = []

    class Person:
        def ask(self, question):
            asked.append(question)
            return "allow"

    (tmp_path / "there").write_text("17")
    model = ScriptedModel([watch("cat there"), text("I wait."), text("Done.")])
    async with (
        asyncio.timeout(60),
        Engine([lead(tmp_path)], models=model, permissions=Policy(), interactor=Person()) as engine,
    ):
        result = await engine.run("lead", "go")

    assert result.text == "Done.", result.error
    assert len(asked) == 1
    assert asked[0].preview["details"]["command"] == "cat there"


@pytest.mark.spec("waiting:WT11")
async def test_a_watcher_cannot_be_spawned_by_its_name(tmp_path):
    forged = {"command": "touch made", "until": "succeeds", "every_seconds": 1, "timeout_seconds": 1}
    agents = [{"agent_type": "watcher", "params": forged}]

    def handle_steps(ctx):
        yield from AgentCall("watcher", params=forged)

    model = ScriptedModel([tool_call("start_agents", {"agents": agents}), text("No."), text("No.")])
    async with asyncio.timeout(60), Engine([lead(tmp_path)], models=model, permissions=Policy()) as engine:
        result = await engine.run("lead", "go")
    with pytest.warns(SourceWarning, match="the agent 'watcher' may not be spawned"):
        by_name = Engine([by_hand(tmp_path, handle_steps)])
    async with asyncio.timeout(60), by_name as engine:
        other = await engine.run("lead", "go")

    assert "may not spawn 'watcher'" in str(result.tool_calls[0].result)
    assert "may not spawn 'watcher'" in str(other.error)
    assert not (tmp_path / "made").exists()


@pytest.mark.spec("waiting:WT11")
@pytest.mark.parametrize(
    "wrong",
    [
        {"every_seconds": 0},
        {"timeout_seconds": 7 * 24 * 3600 + 1},
        {"until": "burns"},
        {"until": "contains"},
        {"command": "cat x | wc"},
    ],
    ids=str,
)
async def test_invalid_watch_arguments_are_refused(tmp_path, wrong):
    def handle_steps(ctx):
        yield ToolCall("watch", {"command": "true", "until": "succeeds", **wrong})

    async with Engine([by_hand(tmp_path, handle_steps)]) as engine:
        result = await engine.run("lead", "go")
    assert isinstance(result.error, ToolInputError)
    assert next(iter(wrong)) in str(result.error)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT11")
@pytest.mark.parametrize(
    "asked",
    [{"command": ["./dist/app"]}, {"command": "cat app", "cwd": "dist"}, {"command": ["dist/app"], "until": "fails"}],
    ids=str,
)
async def test_a_watch_waits_for_missing_programs_and_folders(tmp_path, asked):
    clock = Clock(waits=True)

    def handle_steps(ctx):
        begun = (yield from ToolCall("watch", {"until": "succeeds", "every_seconds": 5, **asked})).data
        return (yield from ToolCall("wait_agents", {"ids": [begun["id"]]})).data["done"][0]["output"]

    async with asyncio.timeout(60), Engine([by_hand(tmp_path, handle_steps)], clock=clock) as engine:
        running = asyncio.create_task(engine.run("lead", "go"))
        await clock.wait_for_sleepers()
        clock.advance(seconds=5)
        await clock.wait_for_sleepers()
        app = tmp_path / "dist" / "app"
        app.parent.mkdir()
        app.write_text("#!/bin/sh\necho built\n" + "exit 1\n" * ("until" in asked))
        app.chmod(0o755)
        clock.advance(seconds=5)
        output = (await running).unwrap()

    assert ": so, after 10 s and 3 runs." in output
    assert "built" in output


async def test_a_missing_program_ends_the_watch_with_an_error(tmp_path):
    model = ScriptedModel([watch(["no-such-program"]), text("I wait."), text("Sorry.")])
    async with asyncio.timeout(60), Engine([lead(tmp_path)], models=model) as engine:
        result = await engine.run("lead", "go")

    assert result.text == "Sorry."
    assert NOT_EXECUTED in said(model.calls[-1])
