"""A result that was trimmed in the view is sent as its placeholder, on every wire."""

from __future__ import annotations

import json

import pytest

from stepengine.data.messages import AssistantMessage, ToolResult, UserMessage
from stepengine.data.transcript import Transcript
from tests.models.wires import FOUR, body, call, result


@pytest.mark.spec("requirements:I15")
@pytest.mark.parametrize("wire", FOUR)
def test_trimmed_result_is_sent_as_its_placeholder(wire: str) -> None:
    record = Transcript(
        [
            UserMessage("go"),
            AssistantMessage([call(1), call(2)]),
            result(1, "a long story"),
            result(2),
            UserMessage("on"),
        ]
    )
    body(wire, *record)  # what is kept beside the messages must not leak into the view

    shown = json.dumps(body(wire, *record.replace_result("c1", ToolResult.text("[trimmed]"))))

    assert "[trimmed]" in shown
    assert "a long story" not in shown
    assert "saw 2" in shown
    assert "a long story" in json.dumps(body(wire, *record))
