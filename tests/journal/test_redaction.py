"""
Secrets: no planted value is in any byte that is written, and a recording plays with another key.
"""

from __future__ import annotations

import base64
import contextlib
import json
from urllib.parse import quote

import attrs
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Complete,
    Engine,
    Parallel,
    Perform,
    RunStatus,
    Tool,
    ToolCall,
)
from stepengine.errors import PerformError, SecretFound
from stepengine.journal import FileJournal, MemoryJournal, Redactor, check, scrub
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import file_tools


def planted(number: int, key: str = "") -> str:
    return f"sk-test-PLANT-{number}-{key or 'aB3dE6gH9jK2mN5pQ8sT1vW4'}"


def leaky(plant) -> AgentDefinition:
    """
    An agent with a secret in every place that a journal knows.
    """

    def fails(value: str) -> None:
        raise ValueError(f"cannot use {value}")

    def handle_steps(ctx):
        yield from Perform(str, plant(1))
        with contextlib.suppress(PerformError):
            yield from Perform(fails, plant(2))
        yield from ToolCall("act", {"note": f"use {plant(3)} twice", "nested": json.dumps({"inner": plant(4)})})
        yield STEP
        yield from Ask(f"Is {plant(5)} right?", details={"password": plant(6)})
        return f"the end {plant(7)}"

    schema = {"type": "object", "properties": {"key": {"type": "string", "default": plant(8)}}}
    act = Tool(
        name="act",
        description=f"d {plant(9)}",
        input_schema=schema,
        run=lambda given: f"HOME=/x\nAPI={plant(10)}\n{base64.b64encode(plant(10).encode()).decode()}",
        in_thread=False,
    )
    return AgentDefinition("leaky", model="t/m", tools=[act], handle_steps=handle_steps, system_prompt=f"s {plant(11)}")


REPLIES = [tool_call("act", {"key": planted(12)}, text=f"thinking of {planted(13)}"), text("fine")]


def forms(secret: str) -> list[bytes]:
    plain = [secret, quote(secret, safe=""), json.dumps(secret)[1:-1]]
    return [f.encode() for f in plain] + [base64.b64encode(secret.encode())]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:K5", "replay:K6", "reliability:R11", "replay:K8")
@pytest.mark.parametrize("redact", ["all", "known"])
def test_planted_secret_is_in_no_written_byte(rig, store, tmp_path, redact):
    secrets = {planted(n): f"PLANT_{n}" for n in range(1, 16)} if redact == "known" else {}
    journal = store(redact=redact, secrets=secrets)
    result = rig(leaky(planted), REPLIES).record(
        journal,
        f"prompt {planted(14)}",
        answers={f"Is {planted(5)} right?": f"yes {planted(15)}"},
        metadata={"m": planted(14)},
    )
    assert result.status is RunStatus.COMPLETED, result.error
    written = b"".join([journal.content(), *[file.read_bytes() for file in tmp_path.iterdir()]])
    for number in range(1, 16):
        # A shape cannot be told in base64; a known value can.
        for form in forms(planted(number))[: 4 if redact == "known" else 3]:
            assert form not in written, f"plant {number}"
    assert b"<redacted:" in written
    assert check(journal)
    assert not check(journal).secrets


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:K5", "reliability:R11")
def test_copying_removes_recorded_secrets(rig, tmp_path):
    raw = FileJournal(tmp_path / "raw.jsonl", redact="off")
    answers = {f"Is {planted(5)} right?": f"yes {planted(15)}"}
    recorded = rig(leaky(planted), REPLIES).record(raw, f"prompt {planted(14)}", answers=answers)
    assert all(planted(number).encode() in raw.content() for number in range(1, 16))
    known = {"redact": "known", "secrets": {planted(n): f"PLANT_{n}" for n in range(1, 16)}}
    copy = MemoryJournal(**known)
    raw.copy_to(copy)
    # A shape cannot be told in base64; a known value can.
    for made, options, count in ((copy, known, 4), (scrub(raw), {"redact": "all"}, 3)):
        content = made.content()
        for number in range(1, 16):
            for form in forms(planted(number))[:count]:
                assert form not in content, f"plant {number}"
        result = rig(leaky(planted)).replay(MemoryJournal(content, **options))
        assert (result.status, len(result.tool_calls)) == (recorded.status, len(recorded.tool_calls)), result.error
    assert raw.history().outcome(raw.history().results["", 0]).value == planted(1), (
        "the one that was copied is as it was"
    )


class Long:
    def render(self, ctx) -> str:
        return "prompt " * 9_000


@pytest.mark.spec("replay:J20", "replay:K5")
def test_scrubbed_copy_keeps_long_prompts_and_undo_data(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("old " * 20_000)
    (root / "b.bin").write_bytes(b"\xff\x00 " + planted(1).encode())
    journal = FileJournal(tmp_path / "raw.jsonl", redact="off")

    def handle_steps(ctx):
        for name in ("a.txt", "b.bin"):
            yield ToolCall("write_file", {"path": name, "content": "new"}, include_tool_call=False)
        yield STEP

    agent = AgentDefinition("a", model="t/m", system_prompt=Long(), handle_steps=handle_steps)
    with Engine([agent], file_tools(root, write=True), models=ScriptedModel([f"say {planted(2)}"])) as engine:
        engine.run_sync("a", journal=journal).unwrap()
    copy = scrub(journal)
    before = [write for known in journal.history().results.values() for write in journal.history().writes(known)]
    after = [write for known in copy.history().results.values() for write in copy.history().writes(known)]
    assert [write.before.content is None for write in before] == [False, False]
    assert after == [before[0], attrs.evolve(before[1], before=before[1].before.without_content())]
    assert planted(2).encode() not in copy.content()
    with Engine([agent], file_tools(root, write=True)) as engine:
        assert engine.replay_sync(copy).text == "say <redacted:provider-key>"


@pytest.mark.spec("replay:D3", "replay:K14")
@pytest.mark.parametrize("redact", ["all", "known"])
def test_recording_replays_with_a_different_key(rig, redact):
    def agent(key):
        def handle_steps(ctx):
            yield from ToolCall("act", {"note": f"use {key}"})
            yield STEP

        act = Tool(name="act", description="d", input_schema={"type": "object"}, run=lambda given: key, in_thread=False)
        return AgentDefinition("a", model="t/m", tools=[act], handle_steps=handle_steps, system_prompt=f"k {key}")

    old, new = planted(1, "a1" * 12), planted(1, "b2" * 12)
    journal = MemoryJournal(redact=redact, secrets={old: "MY_KEY"})
    rig(agent(old), ["fine"]).record(journal, f"go {old}")
    lines = journal.lines()
    assert old.encode() not in b"".join(lines)
    player = MemoryJournal(lines, redact=redact, secrets={new: "MY_KEY"})
    result = rig(agent(new)).replay(player)
    # The prompt comes from the record, everything else from the code with its new key.
    assert result.text == "fine"


@pytest.mark.spec("replay:K14")
def test_pattern_redaction_is_visible_live_only_with_all(rig):
    def handle_steps(ctx):
        return (yield from Perform(planted, 1))

    agent = AgentDefinition("a", handle_steps=handle_steps)
    recorded = {redact: MemoryJournal(redact=redact) for redact in ("all", "known", "off")}
    outputs = {redact: rig(agent).record(journal).output for redact, journal in recorded.items()}
    assert outputs == {"all": "<redacted:provider-key>", "known": planted(1), "off": planted(1)}
    for redact, journal in recorded.items():
        assert rig(agent).replay(MemoryJournal(journal.lines(), redact=redact)).output == outputs[redact]


@pytest.mark.spec("replay:K8")
def test_remaining_secret_shape_prevents_writing(rig, tmp_path, monkeypatch):
    # A cleaner with a hole: what it misses, the scan before the write finds.
    monkeypatch.setattr(Redactor, "value", lambda self, value, level=0: value)
    journal = FileJournal(tmp_path / "j.jsonl", redact="all")

    def handle_steps(ctx):
        yield from Perform(str, planted(1))

    result = rig(AgentDefinition("a", handle_steps=handle_steps)).record(journal)
    assert result.status is RunStatus.FAILED
    assert isinstance(result.error, SecretFound)
    assert (result.error.path, result.error.rule) == ("/effect/args/0", "provider-key")
    assert planted(1) not in str(result.error)
    assert planted(1) not in journal.path.read_text()
    assert check(journal)


@pytest.mark.spec("replay:K5")
@pytest.mark.parametrize(
    "harmless",
    [
        "task-type-ignored-for-this-run",
        "max_tokens",
        "c2stYWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXo=",
        "sk-ipped-the-rest-of-it",
    ],
)
def test_key_like_words_are_not_redacted(harmless):
    assert Redactor({}, shapes=True).value({"x": harmless, "max_tokens": 5}) == {"x": harmless, "max_tokens": 5}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR43", "replay:J20")
def test_value_that_cannot_be_stored_is_refused_at_the_yield(rig, tmp_path):
    journal = FileJournal(tmp_path / "j.jsonl")

    def handle_steps(ctx):
        for value in ("\ud800", float("nan"), 10**4300, b"raw", [["x" * 1000] * 10_000] * 2):
            try:
                yield from Perform(lambda value=value: value)
            except PerformError as error:
                seen.append(error.kind)

    seen: list[str] = []
    result = rig(AgentDefinition("a", handle_steps=handle_steps)).record(journal)
    assert seen == [*["DataError"] * 4, "too_long"]
    assert result.status is RunStatus.COMPLETED
    assert check(journal)


@pytest.mark.spec("replay:K4", "reliability:R11")
@pytest.mark.parametrize(
    "name", ["Password:", "secret value", "secret__value", "secret_raw_value", "api_key*", "pass_word", "to\u212aen\n"]
)
def test_journal_never_stores_the_value_of_a_secret_name(rig, tmp_path, name):
    nearly_json = json.dumps({name: "hunter2 x"})[:-1] + ","

    def handle_steps(ctx):
        yield from Perform(lambda: {name: "hunter2 x", "nearly JSON": nearly_json})
        yield from ToolCall("act", {name: "hunter2 x"})

    act = Tool(
        name="act", description="d", input_schema={"type": "object"}, run=lambda _: {name: "hunter2 x"}, in_thread=False
    )
    journal = FileJournal(tmp_path / "run.jsonl", redact="all")
    result = rig(AgentDefinition("a", tools=[act], handle_steps=handle_steps)).record(journal)

    assert result.status is RunStatus.COMPLETED, result.error
    assert b"hunter2" not in b"".join([file.read_bytes() for file in tmp_path.iterdir()])
    assert journal.content().count(b"<redacted:") > 2


# --- what a caller gives ----------------------------------------------------------------------------------------------


TOKEN = 'tok-4711-aB3dE6gH9jK2"mN5pQ8/sT1vW4'


@pytest.mark.spec("reliability:SC11", "reliability:R11")
@pytest.mark.parametrize("known", ["by the environment", "by the journal"])
def test_secret_inputs_reach_their_functions_but_no_journal(rig, tmp_path, known, monkeypatch):
    """
    Whole values, parts of longer ones, keys of objects, of the run, of its children, of handlers and of models.
    """
    got = []

    def send(*args, **kwargs):
        got.append(json.dumps([args, kwargs]))
        return f"sent {kwargs or args}"

    def act(given):
        got.append(json.dumps(dict(given)))
        return "acted"

    def child_steps(ctx):
        yield from Perform(send, ctx.params["token"], ctx.prompt)

    def handle_steps(ctx):
        token = ctx.params["token"]
        yield from Perform(send, token, headers={"Authorization": f"Bearer {token}", token: [token]})
        yield from Perform.idempotent(send, [{"deep": {"deeper": token}}])
        yield from ToolCall("act", {"key": token, "note": f"with {token}", "list": [[token]]})
        yield from AgentCall("child", f"use {token}", {"token": token})
        yield from Parallel(
            Perform(send, token), ToolCall("act", {"key": token}), AgentCall("child", "", {"token": token})
        )
        yield from Complete(f"is {token} fine?")
        yield STEP
        return {"with": token}

    schema = {"type": "object", "properties": {"token": {"type": "string"}}, "required": ["token"]}
    tool = Tool(name="act", description="d", input_schema={"type": "object"}, run=act, in_thread=False)
    child = AgentDefinition("child", input_schema=schema, handle_steps=child_steps)
    agent = AgentDefinition(
        "a", model="t/m", tools=[tool], spawnable_agents=[child], input_schema=schema, handle_steps=handle_steps
    )
    options = {"secrets": {TOKEN: "SHOP_TOKEN"}} if known == "by the journal" else {}
    if not options:
        monkeypatch.setenv("SHOP_TOKEN", TOKEN)
    journal = FileJournal(tmp_path / "run.jsonl", **options)
    replies = [text("yes"), tool_call("act", {"key": TOKEN})]
    result = rig(agent, replies).record(journal, f"go with {TOKEN}", params={"token": TOKEN}, metadata={"of": TOKEN})

    assert result.status is RunStatus.COMPLETED, result.error
    assert len(got) == 8
    assert all(json.dumps(TOKEN)[1:-1] in given and "<redacted" not in given for given in got)
    written = b"".join([journal.content(), *[file.read_bytes() for file in tmp_path.iterdir()]])
    assert [] == [form for form in forms(TOKEN) if form in written]
    assert journal.content().count(b"<redacted:SHOP_TOKEN>") > 12

    monkeypatch.delenv("SHOP_TOKEN", raising=False)
    got.clear()
    again = rig(agent).replay(MemoryJournal(journal.content()))
    assert (again.status, again.output, got) == (RunStatus.COMPLETED, {"with": "<redacted:SHOP_TOKEN>"}, [])


@pytest.mark.spec("reliability:SC11")
@pytest.mark.parametrize("token", [TOKEN, "no secret"])
def test_resume_without_param_secrets_warns_by_name(rig, token):
    got = []

    def handle_steps(ctx):
        yield from Perform(got.append, ctx.params["token"])
        yield from Ask("Go on?")
        yield from Perform(got.append, ctx.params["token"])

    agent = AgentDefinition("a", handle_steps=handle_steps)
    journal = MemoryJournal(secrets={TOKEN: "SHOP_TOKEN"})
    first = rig(agent).record(journal, params={"token": token, "note": f"with {token}"})
    stored = MemoryJournal(journal.lines())
    again = rig(agent).resume(stored, {"Go on?": "yes"})
    replayed = rig(agent).replay(MemoryJournal(stored.lines()))
    ended = rig(agent).resume(MemoryJournal(stored.lines()))

    assert (first.warnings, replayed.warnings, ended.warnings) == ((), (), ())
    if token == TOKEN:
        assert got == [TOKEN, "<redacted:SHOP_TOKEN>"]
        (warning,) = again.warnings
        assert "from the params of this run (SHOP_TOKEN)" in warning
    else:
        assert (got, again.warnings) == ([token, token], ())
