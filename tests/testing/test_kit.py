"""
The kit as a whole: what it exports, what importing it costs, and how its cost grows.
"""

from __future__ import annotations

import pytest

import stepengine.testing
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.testing import ScriptedModel


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


async def test_a_scripted_step_costs_the_same_in_a_long_conversation():
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
