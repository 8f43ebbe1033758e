"""
The hooks that load a conversation before a run and save it after it, and the other helpers that return hooks.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, AgentState, AssistantMessage, Engine, Hooks, RunStatus, UserMessage, tool
from stepengine.data.hooks import Change
from stepengine.events import HookFailed, LogLine
from stepengine.journal import MemoryJournal
from stepengine.permissions import Policy, Rule
from stepengine.sessions import MemorySessions, session_hooks
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import ask_user_tool
from tests.sessions.stores import Histories

pytestmark = pytest.mark.anyio


def bot(store, **fields):
    return AgentDefinition("bot", **{"model": "scripted/m", "hooks": session_hooks(store), **fields})


def said(messages):
    return [message.text for message in messages]


async def talk(store, replies, words, **options):
    seen = []
    model = ScriptedModel(replies)
    options = {"session_id": "u:1", **options}
    agent = options.pop("agent", None) or bot(store)
    result = await Engine([agent], models=model, observers=[seen.append]).run(agent, words, **options)
    return result, model, seen


@pytest.mark.spec("requirements:H16", "requirements:L4")
async def test_run_continues_the_conversation_of_the_previous_run():
    store = MemorySessions()
    first, _, _ = await talk(store, [text("Hello.")], "Hi.", user_id="ann", metadata={"lang": "de"})
    second, model, _ = await talk(store, [text("You said hi.")], "What did I say?")
    session = store.load("u:1")

    assert ["Hi.", "Hello.", "What did I say?"] == said(model.calls[0].messages)
    assert ["Hi.", "Hello.", "What did I say?", "You said hi."] == said(session.messages)
    assert (2, 2, "ann", "completed") == (session.version, session.turns, session.info.user_id, session.info.status)
    assert {"lang": "de"} == session.info.metadata
    assert first.usage + second.usage == session.usage
    assert "You said hi." == second.text


@pytest.mark.spec("requirements:L4")
async def test_run_without_session_id_starts_one_named_by_run_id():
    store = MemorySessions()
    result, _, _ = await talk(store, [text("Hello.")], "Hi.", session_id=None)

    assert [result.state.run_id, result.session_id] == [info.session_id for info in store.list()] * 2

    journal, seen = MemoryJournal(), []
    hooks = session_hooks(store) + Hooks(post_run=lambda ctx, _: seen.append(ctx.session_id))
    recorded, _, _ = await talk(
        store, [text("Hello.")], "Hi.", session_id=None, agent=bot(store, hooks=hooks), journal=journal
    )
    again = await Engine([bot(store, hooks=hooks)]).replay(journal)
    assert [recorded.session_id] * 3 == [*seen, again.session_id]
    assert recorded.session_id in {info.session_id for info in store.list()}


async def test_engine_and_hooks_share_a_session():
    store, plain = MemorySessions(), AgentDefinition("bot", model="scripted/m")
    await talk(store, [text("one")], "1")
    async with Engine([plain], models=ScriptedModel([text("two")]), sessions=store) as engine:
        await engine.run(plain, "2", session_id="u:1")
    await talk(store, [text("three")], "3")

    assert ["1", "one", "2", "two", "3", "three"] == said(store.load("u:1").messages)
    assert 3 == store.load("u:1").turns


async def test_run_refused_by_a_hook_leaves_the_session_unchanged():
    store = MemorySessions()

    def refuse(ctx):
        msg = "not before noon"
        raise ValueError(msg)

    agent = AgentDefinition("bot", model="scripted/m", hooks=session_hooks(store) + Hooks(pre_run=refuse))
    result, _, _ = await talk(store, [], "Hi.", agent=agent)

    assert (RunStatus.FAILED, []) == (result.status, store.list())


async def test_context_and_view_are_saved_with_the_session():
    store = MemorySessions()

    def shorter(ctx):
        view = [*ctx.messages][-1:]
        return Change(view=view, context={"step": ctx.step_index})

    agent = AgentDefinition("bot", model="scripted/m", hooks=session_hooks(store) + Hooks(pre_step=shorter))
    await talk(store, [text("one")], "1", agent=agent)
    await talk(store, [text("two")], "2", agent=agent)
    result, model, _ = await talk(store, [text("three")], "3")

    assert ["2", "two", "3"] == said(model.calls[0].messages)
    assert ["1", "one", "2", "two", "3", "three"] == said(result.state.message_history)
    assert {"step": 0} == result.state.context


async def test_previous_state_replaces_the_stored_history():
    store = MemorySessions()
    first, _, _ = await talk(store, [text("one")], "1")
    await talk(store, [text("two")], "2")
    await talk(store, [text("three")], "3", previous=first.state)

    assert ["1", "one", "3", "three"] == said(store.load("u:1").messages)


@pytest.mark.spec("requirements:L4")
@given(st.lists(st.sampled_from([UserMessage("me"), AssistantMessage("you")]), min_size=1, max_size=3))
async def test_previous_with_any_messages_replaces_the_stored_history(messages):
    store, journal = MemorySessions(), MemoryJournal()
    await talk(store, [text("one")], "1")
    previous = AgentState.from_messages(messages)
    result, _, _ = await talk(store, [text("two")], "2", previous=previous, agent=bot(store), journal=journal)

    assert [*said(messages), "2", "two"] == said(store.load("u:1").messages)
    assert result.state == (await Engine([bot(store)]).replay(journal)).state


async def test_hooks_see_whether_a_run_has_earlier_messages():
    seen = []
    agent = AgentDefinition("bot", model="t/m", hooks=Hooks(pre_run=lambda ctx: seen.append(ctx.has_earlier_messages)))
    engine = Engine([agent], models=ScriptedModel([text("one"), text("two")]))
    first = await engine.run(agent, "1")
    await engine.run(agent, "2", previous=first.state)

    assert [False, True] == seen


async def test_children_have_no_session():
    store = MemorySessions()
    child = AgentDefinition("child", description="Helps.", hooks=session_hooks(store))
    agent = bot(store, tools=["spawn_agents"], spawnable_agents=[child])
    spawn = tool_call("spawn_agents", {"agents": [{"agent_type": "child", "prompt": "Help."}]})
    await talk(store, [spawn, text("Helped."), text("Done.")], "Go.", agent=agent)

    assert ["u:1"] == [info.session_id for info in store.list()]
    assert "Done." == store.load("u:1").messages[-1].text


@pytest.mark.spec("reliability:SS03")
async def test_failing_load_fails_the_run_and_failing_save_does_not():
    class Broken(Histories):
        async def get_history(self, session_id):
            msg = "no connection"
            raise OSError(msg)

    class Full(Histories):
        async def save_history(self, session_id, messages):
            msg = "disk full"
            raise OSError(msg)

    broken, model, _ = await talk(Broken(), [], "Hi.")
    full, _, events = await talk(Full(), [text("Hello.")], "Hi.")

    assert (RunStatus.FAILED, []) == (broken.status, model.calls)
    assert "no connection" in str(broken.error)
    assert (RunStatus.COMPLETED, "Hello.") == (full.status, full.output)
    assert ["disk full" in event.error for event in events if isinstance(event, HookFailed)] == [True]


@pytest.mark.spec("reliability:SS01")
async def test_conflicting_save_overwrites_nothing_and_is_reported():
    store = MemorySessions()

    def meanwhile(_):
        store.set_metadata("u:1", "by", "somebody else")
        return text("Hello.")

    result, _, events = await talk(store, [meanwhile], "Hi.")

    assert (RunStatus.COMPLETED, 0) == (result.status, len(store.load("u:1").messages))
    assert ["saved by another writer" in event.error for event in events if isinstance(event, HookFailed)] == [True]


async def test_suspended_run_is_not_saved_and_logs_a_warning():
    store = MemorySessions()
    question = tool_call("ask_user", {"questions": [{"question": "For how many?"}]})
    result, _, events = await talk(store, [question], "Book.", agent=bot(store, tools=[ask_user_tool()]))

    assert (RunStatus.SUSPENDED, []) == (result.status, store.list())
    assert ["warning"] == [event.level for event in events if isinstance(event, LogLine)]
    assert not [event for event in events if isinstance(event, HookFailed)]


@tool(category="write")
def write(text: str) -> str:
    """Write."""
    return f"wrote {text}"


@tool
def look(text: str) -> str:
    """Look."""
    return f"saw {text}"


@pytest.mark.spec("requirements:H16")
@pytest.mark.parametrize("by_name", [False, True])
async def test_permission_rules_are_a_hook_of_one_agent(by_name):
    policy = Policy([Rule.deny_tool("look"), Rule.allow_category("write")])
    agent = AgentDefinition(
        "bot",
        model="scripted/m",
        tools=["write", "look"] if by_name else [write, look],
        hooks=Hooks(pre_tool=policy.hook()),
    )
    model = ScriptedModel([tool_call("write", {"text": "a"}), tool_call("look", {"text": "b"}), text("Done.")])
    result = await Engine([agent], [write, look], models=model).run(agent, "Go.")

    assert ["wrote a", False, True] == [
        result.tool_calls[0].result.text, result.tool_calls[0].is_error, result.tool_calls[1].is_error,
    ]  # fmt: skip
