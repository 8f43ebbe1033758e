"""
The kit as a whole: what it exports, what importing it costs, and how its cost grows.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import stepengine.testing
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.testing import ScriptedModel

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
