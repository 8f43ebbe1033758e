"""
The kit as a whole: what it exports, what importing it costs, and how its cost grows.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import stepengine.testing
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.testing import Cassette, ScriptedModel
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse

LATE = ("anthropic", "google.genai", "httpx2", "openai", "pytest", "vcr", "yaml")


@pytest.mark.deep
def test_importing_the_kit_loads_no_sdk_no_http_and_no_yaml():
    """
    All of them wait for their first use, in a fresh interpreter.
    """
    code = f"import sys, stepengine.testing; print([name for name in {LATE} if name in sys.modules])"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]" == out.stdout.strip()


def test_every_public_name_is_there_and_no_other():
    """
    Late names are listed and found like the others; an unknown one is an `AttributeError`.
    """
    for name in stepengine.testing.__all__:
        assert getattr(stepengine.testing, name).__module__.startswith(
            ("stepengine.testing.", "stepengine.models.scripted")
        )
    assert sorted(stepengine.testing.__all__) == dir(stepengine.testing)
    with pytest.raises(AttributeError, match="no attribute 'run_everything'"):
        stepengine.testing.run_everything


async def test_a_scripted_step_costs_the_same_however_long_the_conversation_is():
    """
    `complete` only takes the next reply: it looks at no message.
    """

    class Untouchable(Transcript):
        def __iter__(self):
            raise AssertionError("the history was read")

        __getitem__ = __len__ = __iter__

    request = ModelRequest("m", messages=Untouchable([UserMessage("a"), AssistantMessage("b")]))
    model = ScriptedModel(["hi"] * 3)

    assert ["hi"] * 3 == [(await model.complete(request)).text for _ in range(3)]


@pytest.mark.spec("replay:C11")
@pytest.mark.speed
def test_a_lookup_reads_its_own_request_and_not_the_recorded_ones(monkeypatch):
    """
    200 steps of a growing conversation are 200 keys at load and 200 at play, whatever the order.
    """
    from stepengine.testing.cassette_matching import Matcher

    computed = []
    key = Matcher.key
    monkeypatch.setattr(Matcher, "key", lambda self, request: computed.append(1) or key(self, request))
    bodies = [json.dumps({"messages": [f"{'x' * 1_000} {n}" for n in range(step)]}).encode() for step in range(200)]
    requests = [RecordedRequest("POST", "http://a/b", (), body) for body in bodies]

    held = Cassette([Interaction(r, RecordedResponse(200, "OK", (), b"%d" % n)) for n, r in enumerate(requests)])
    answers = [int(held.take(request).response.body) for request in reversed(requests)]

    assert list(range(199, -1, -1)) == answers
    assert 400 == len(computed)
