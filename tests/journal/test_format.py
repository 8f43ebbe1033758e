"""
What stands in a journal and when: kinds and their members, appends, batches, children, blobs, how durable each record is.
"""

from __future__ import annotations

import fcntl
import json
import os

import attrs
import pytest

from stepengine import (
    AgentDefinition,
    Ask,
    Engine,
    Hooks,
    Perform,
    RetryPolicy,
    RunStatus,
    Tool,
    ToolCall,
)
from stepengine.data.messages import ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import JournalCorrupt, JournalError, JournalLocked, ModelError
from stepengine.journal import FileJournal, MemoryJournal, check, scrub
from stepengine.journal.forks import branch
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.workspace.walk import TEMPORARY
from tests.journal.mutants import resealed


def members(journal):
    return [json.loads(line) for line in journal.content().splitlines()]


class Spied:
    """
    A file journal that tells what its writer writes.
    """

    def __init__(self, path, **options):
        self.journal = FileJournal(path, **options)
        self.flags, self.before, self.writes = set(), [], []
        self.journal._write = self.write

    def write(self, descriptor, data):
        self.flags.add(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND)
        self.before.append(self.journal.content())
        self.writes.append(bytes(data))
        return os.write(descriptor, data)


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("replay:J38", "reliability:JR13")
def test_file_holds_one_run_and_grows_by_whole_lines(tmp_path, world):
    path = tmp_path / "run.jsonl"
    spied, locked = Spied(path), []

    class Done(list):
        def append(self, name):
            super().append(name)
            with pytest.raises(JournalLocked) as caught:
                FileJournal(path).writer()
            locked.append((caught.value.pid, bool(caught.value.host)))

    world.done = Done()
    assert world.rig().record(spied.journal).status is RunStatus.COMPLETED
    assert set(locked) == {(os.getpid(), True)}
    assert spied.flags == {os.O_APPEND}
    states = [*spied.before[1:], path.read_bytes()]
    for before, data, after in zip(spied.before, spied.writes, states, strict=True):
        assert after == before + data
        assert data.endswith(b"\n")
    entries = members(spied.journal)
    assert [e["kind"] for e in entries].count("head") == 1
    assert entries[0]["kind"] == "head"
    assert {e["path"] for e in entries[1:] if "path" in e} == {"", "8", "9"}


@pytest.mark.spec("replay:J38")
@pytest.mark.parametrize("rewrite", ["replace", "fork", "stable"])
def test_rewriting_creates_a_new_file_and_renames_it(tmp_path, world, rewrite):
    path = tmp_path / "run.jsonl"
    journal = FileJournal(path, stable=rewrite == "stable", link=rewrite != "stable")
    seen = []
    original = os.rename

    def spy(made, name, *, src_dir_fd, dst_dir_fd):
        with open(os.open(made, os.O_RDONLY, dir_fd=src_dir_fd), "rb") as file:  # noqa: PTH123  (it is open already)
            seen.append((file.read(), path.read_bytes() if path.exists() else b""))
        original(made, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", spy)
        world.rig().record(journal)
        inode, before = path.stat().st_ino, path.read_bytes()
        if rewrite == "fork":
            branch(journal, 0, into=tmp_path / "fork.jsonl", allow_repeat=True)
            assert (path.stat().st_ino, path.read_bytes()) == (inode, before)
        elif rewrite == "replace":
            journal.replace(journal.records())
            assert path.stat().st_ino != inode
    assert len(seen) == 1
    whole, old = seen[0]
    target = tmp_path / "fork.jsonl" if rewrite == "fork" else path
    assert (whole, check(target).problems) == (target.read_bytes(), ())
    assert old
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(TEMPORARY)]


# --- the kinds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "member",
    [
        {"created": "2026-11-27T00:00:00"},
        {"created": "9999-12-31T00:00:00+00:00"},
        {"created": "today"},
        {"parent": {"run": 1, "at": "0"}},
        {"hooks": [1]},
        {"packages": {"pydantic": 2}},
    ],
    ids=str,
)
def test_head_with_an_invalid_member_is_corrupt(world, member):
    journal = MemoryJournal()
    world.rig().record(journal)
    head, *others = journal.content().decode().splitlines()
    crc = ',"crc":"00000000"}'
    changed = json.dumps({**json.loads(head[: -len(crc)] + "}"), **member}, separators=(",", ":"))[:-1] + crc
    with pytest.raises(JournalCorrupt, match=r"^record 1 .* is not a valid head record"):
        MemoryJournal(resealed("\n".join([changed, *others]))).history()


@pytest.mark.spec("replay:J14", "reliability:R3")
def test_failed_attempts_are_members_of_the_result(rig):
    def limited(request):
        raise ModelError("slow down", status=429, retryable=True)

    agent = AgentDefinition("a", model="t/m")
    journal = MemoryJournal()
    made = rig(agent, [limited, limited, text("ok")], retry=RetryPolicy(base_seconds=0.001, cap_seconds=0.001))
    recorded = made.record(journal)
    assert recorded.text == "ok"
    (reply,) = [e for e in members(journal) if (e["kind"], e.get("seq")) == ("result", 0)]
    assert list(reply)[:5] == ["kind", "path", "seq", "at", "attempts"]
    assert [a["error"]["type"] for a in reply["attempts"]] == ["model_error", "model_error"]
    again = rig(agent).replay(journal)
    assert (again.text, again.usage) == ("ok", recorded.usage)
    assert again.journal.content() == journal.content()


@pytest.mark.parametrize("inline", [1_023, True, "many"])
def test_too_small_inline_limit_is_rejected(inline):
    with pytest.raises(JournalError, match="at least 1,024"):
        MemoryJournal(inline=inline)


@pytest.mark.spec("replay:J11", "replay:J20")
def test_head_never_uses_blobs():
    name = "-".join(["agent"] * 300)
    journal = MemoryJournal(inline=1_024)
    with Engine([AgentDefinition(name, model="test/model")], models=ScriptedModel([text("done")])) as engine:
        engine.run_sync(name, "go", journal=journal).unwrap()
        assert engine.replay_sync(MemoryJournal(journal.lines())).text == "done"


@pytest.mark.spec("replay:D2", "replay:J23")
def test_moving_the_handler_changes_no_byte(rig):
    source = "def handle_steps(ctx):\n    yield from Perform.idempotent(str, 1)\n    yield from Ask('Sure?')\n"

    def recorded(blank):
        space = {"Perform": Perform, "Ask": Ask}
        exec(compile("\n" * blank + source, f"file{blank}.py", "exec"), space)
        journal = MemoryJournal(stable=True)
        rig(AgentDefinition("a", handle_steps=space["handle_steps"])).record(journal, answers={"Sure?": "yes"})
        return journal.content()

    assert recorded(0) == recorded(70)


@pytest.mark.spec("reliability:TL24")
def test_hook_changed_result_is_recorded_in_both_forms(rig):
    def louder(ctx, call, result):
        return ToolResult.text(result.text.upper())

    tool = Tool(
        name="say", description="d", input_schema={"type": "object"}, run=lambda given: "quiet", in_thread=False
    )
    agent = AgentDefinition("a", model="t/m", tools=[tool], hooks=Hooks(post_tool=[louder]))
    journal = MemoryJournal()
    made = rig(agent, [tool_call("say", {}), text("ok")])
    assert made.record(journal).status is RunStatus.COMPLETED
    history = journal.history()
    assert history.outcome(history.results["", 1]).value.text == "quiet"
    assert RecordedRequests(history).get_request(history.intents["", 2]).messages[-1].text == "QUIET"
    changed = attrs.evolve(agent, hooks=Hooks(post_tool=[lambda ctx, call, result: None]))
    with pytest.raises(Exception, match="/messages/2"):
        asked = rig(changed).replay(journal)
        raise asked.error


# --- what may have changed ------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:GN17")
def test_renamed_function_diverges_with_a_hint(rig):
    def agent(name):
        word = "closed over"

        def fetch(n):
            return f"{word} {n}"

        fetch.__qualname__ = name

        def handle_steps(ctx):
            first = yield from Perform.idempotent(lambda n: n + 1, 1)
            second = yield from Perform.idempotent(fetch, 2)
            return [first, second]

        return AgentDefinition("a", handle_steps=handle_steps)

    journal = MemoryJournal()
    assert rig(agent("fetch")).record(journal).output == [2, "closed over 2"]
    assert rig(agent("fetch")).replay(journal).output == [2, "closed over 2"]
    error = rig(agent("grab")).replay(journal).error
    assert (error.kind, error.address, error.diff) == ("changed", "#1", (("/name", '"fetch"', '"grab"'),))
    assert "cause looks like: the function was renamed" in error.message


@pytest.mark.filterwarnings("ignore::stepengine.engine.handler_sources.SourceWarning")
@pytest.mark.spec("reliability:JR24")
def test_removed_tool_is_needed_only_to_resume(rig):
    safe = ToolAnnotations(idempotent=True)
    tool = Tool(
        name="look", description="d", input_schema={"type": "object"}, run=lambda given: "ok", annotations=safe,
        in_thread=False,
    )  # fmt: skip

    def handle_steps(ctx):
        first = yield from ToolCall("look", {}, include_tool_call=False)
        second = yield from ToolCall("look", {}, include_tool_call=False)
        return [first.text, second.text]

    journal = MemoryJournal()
    agent = AgentDefinition("a", tools=[tool], handle_steps=handle_steps)
    rig(agent).record(journal)
    without = attrs.evolve(agent, tools=[])
    assert rig(without).replay(journal).output == ["ok", "ok"]
    cut = MemoryJournal(journal.lines()[:4])
    result = rig(without).resume(cut)
    assert "the tool 'look' of agent 'a' cannot be carried out here" in str(result.error)


@pytest.mark.spec("reliability:JR24")
def test_other_version_and_hooks_only_warn(rig):
    def quiet(ctx):
        return None

    def loud(ctx):
        from stepengine.data.messages import UserMessage

        return UserMessage("hear me")

    agent = AgentDefinition("a", model="t/m", hooks=Hooks(pre_step=[quiet]))
    journal = MemoryJournal()
    rig(agent, [text("ok")]).record(journal)
    assert rig(agent).replay(journal).warnings == ()
    head, *rest = journal.records()
    older = MemoryJournal()
    older.replace([attrs.evolve(head, engine="0.0.1"), *rest])
    without = attrs.evolve(agent, hooks=None)
    result = rig(without).replay(older)
    assert (result.status, result.text) == (RunStatus.COMPLETED, "ok")
    assert "was recorded by stepengine 0.0.1; this is " in result.warnings[0]
    assert result.warnings[1].endswith("was recorded with other hooks: quiet; the hooks are now: none")
    other = rig(attrs.evolve(agent, system_prompt="Now you shout.")).replay(older)
    assert other.error.diff[0][0] == "/system_prompt"


@pytest.mark.parametrize("number", ["1e999", "NaN"])
def test_a_number_that_no_json_writes_is_damage(number: str) -> None:
    """Read as infinite it could be read, and written again by nobody."""
    journal = MemoryJournal()
    with Engine([AgentDefinition("a", model="test/m")], models=ScriptedModel(["fine"])) as engine:
        engine.run_sync("a", metadata={"n": 7.5}, journal=journal)
    written = b"".join(journal.lines()).decode()
    assert '{"n":7.5}' in written

    with pytest.raises(JournalCorrupt, match="is not JSON"):
        scrub(MemoryJournal(resealed(written.replace('{"n":7.5}', f'{{"n":{number}}}'))))
