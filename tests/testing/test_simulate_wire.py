"""
Every state of simulated runs on the four wires: what a provider is sent pairs calls and results, too (I1).
"""

from __future__ import annotations

import json

import pytest

from stepengine.data.models import ModelRequest
from stepengine.testing import simulate
from stepengine.testing.invariants import WatchedRun
from tests.models.wires import FOUR, HISTORY, MODEL, provider_of
from tests.testing.stages import CAST

SEEDS = range(150)


@pytest.fixture
def transcripts():
    """
    Every history and view that anybody saw in the worlds of all seeds, each once.
    """
    seen = {}
    saw = WatchedRun._check_state

    def keeping(run, state):
        for messages in (state.message_history, state.view):
            seen.setdefault(tuple(messages), messages)
        saw(run, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WatchedRun, "_check_state", keeping)
        for agent in ("wording", "hooked", "batching", "within"):
            simulate(CAST[agent], SEEDS)
    return [*seen.values()]


def groups(name, said):
    """
    Return, message by message, the calls and the results that stand on a wire, by what joins them there.
    """
    if name == "openai":
        flat = []
        for item in said:
            kind = {"function_call": "call", "function_call_output": "result"}.get(item.get("type"), "other")
            if not flat or flat[-1][0] != kind:
                flat.append((kind, []))
            flat[-1][1].append(item.get("call_id"))
        return [(kind, ids) for kind, ids in flat if kind != "other"]
    return [group for message in said for group in OF_MESSAGE[name](message) if group[1]]


def of_anthropic(message):
    blocks = message["content"]
    yield "result", [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    yield "call", [block["id"] for block in blocks if block["type"] == "tool_use"]


def of_google(message):
    parts = message["parts"]
    answers = [part["functionResponse"] for part in parts if "functionResponse" in part]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    yield "result", [(answer["name"], answer.get("id")) for answer in answers]
    yield "call", [(call["name"], call.get("id")) for call in calls]


def of_chat(message):
    yield "result", [message["tool_call_id"]] if message["role"] == "tool" else []
    yield "call", [call["id"] for call in message.get("tool_calls", ())]


OF_MESSAGE = {"anthropic": of_anthropic, "google": of_google, "openai_chat": of_chat}


@pytest.mark.deep
@pytest.mark.spec("reliability:I1", "requirements:G10")
def test_every_simulated_state_pairs_its_calls_on_the_wire(transcripts):
    for name in FOUR:  # one test: to make the histories takes most of the time
        assert_paired(name, transcripts)


def assert_paired(name, transcripts):
    provider = provider_of(name)
    pairs = 0
    for messages in transcripts:
        request = ModelRequest(f"{name}/{MODEL[name]}", "system", messages)
        said = json.loads(provider._encode(request, stream=False).content)[HISTORY.get(name, "messages")]
        waiting, met = [], []
        for kind, ids in groups(name, said):
            if kind == "call":
                assert not waiting, name
                waiting = [*ids]
                met += ids
            else:
                assert ids == waiting[: len(ids)], name
                del waiting[: len(ids)]
                pairs += len(ids)
        assert not waiting, name
        assert name == "google" or len({*met}) == len(met), name
        expected = sum(len(m.tool_calls) for m in messages if m.role == "assistant")
        assert len(met) == expected, name
    assert len(transcripts) > 500
    assert pairs > 1_000, name
