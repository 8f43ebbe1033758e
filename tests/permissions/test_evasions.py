"""
A hundred ways around a rule about untrusted arguments, and what happens to each.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, tool
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text, tool_call

from .evasions import EVASIONS, Evasion


def outcome(evasion: Evasion) -> tuple[str, list[Any]]:
    """
    Return the status of the call that a model makes with the argument, and what was sent.
    """
    sent: list[Any] = []
    planted = evasion.planted if isinstance(evasion.planted, list) else [evasion.planted]

    @tool
    def read(number: int) -> str:
        """
        Read a text of a third party.

        Args:
            number: Which.
        """
        return str(planted[number])

    @tool(destinations=["to"])
    def send(to: Any) -> str:
        """
        Send the report.

        Args:
            to: The destination.
        """
        sent.append(to)
        return "sent"

    agent = AgentDefinition("clerk", model="scripted/clerk", tools=[read, send])
    reads = [tool_call("read", {"number": number}) for number in range(len(planted))]
    model = ScriptedModel([*reads, tool_call("send", {"to": evasion.argument}), text("Done.")])
    policy = Policy([Rule.ask_untrusted("send")], mode="bypass")
    with Engine([agent], models=model, permissions=policy, headless=True) as engine:
        result = engine.run_sync("clerk", evasion.prompt)
    return result.tool_calls[-1].result.status, sent


@pytest.mark.spec("provenance:PV1", "provenance:PV2", "provenance:PV3")
@pytest.mark.parametrize("evasion", EVASIONS, ids=lambda evasion: evasion.name)
def test_a_value_not_named_by_the_user_needs_permission(evasion: Evasion) -> None:
    expected = ("ok", [evasion.argument]) if evasion.passes else ("denied", [])

    assert expected == outcome(evasion)
