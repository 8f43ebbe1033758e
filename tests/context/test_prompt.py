"""
``SystemPrompt`` and ``Environment``.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest

from stepengine import AgentDefinition
from stepengine.context import Environment, SystemPrompt
from stepengine.journal import MemoryJournal
from stepengine.testing import Clock, ScriptedModel, text
from tests.context.worlds import MODEL, NOW, context, engine

SECTIONS = {
    "identity": ("You are Ada.", "# Identity\nYou are Ada."),
    "capabilities": (["Read.", "Write."], "# Capabilities\n- Read.\n- Write."),
    "constraints": (("Never push.",), "# Constraints\n- Never push."),
    "tone": ("Dry.", "# Tone\nDry."),
    "tool_policy": ("Look first.", "# Tool usage policy\nLook first."),
    "environment": (Environment(platform="linux", date=None), "<env>\nPlatform: linux\n</env>"),
    "reminders": (
        ["One.", "Two."],
        "<system-reminder>\nOne.\n</system-reminder>\n\n<system-reminder>\nTwo.\n</system-reminder>",
    ),
}
EMPTY: dict[str, Any] = {
    "identity": " ",
    "capabilities": [],
    "constraints": ["", " "],
    "environment": Environment(date=None),
    "reminders": [""],
}


@pytest.mark.spec("requirements:I18", "generator-contract:L32")
def test_prompt_sections_keep_one_order_and_empty_ones_disappear() -> None:
    names = list(SECTIONS)
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            given: dict[str, Any] = {name: SECTIONS[name][0] for name in reversed(chosen)}
            expected = "\n\n".join(["Base.", *[SECTIONS[name][1] for name in chosen]])

            assert expected == SystemPrompt("Base.", **{**EMPTY, **given}).render(context())
            assert expected.removeprefix("Base.\n\n") == SystemPrompt(**given).text(NOW) or not chosen


@pytest.mark.spec("requirements:I18")
@pytest.mark.parametrize("base", ["", "Base.", " Base with\n\n space \n", "<env>"])
def test_a_base_alone_is_passed_through_unchanged(base: str) -> None:
    assert base == SystemPrompt(base).text(NOW)
    assert base == SystemPrompt(base, **EMPTY).text(NOW)


@pytest.mark.spec("requirements:I19")
@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ({}, ["Today's date: 2026-03-04"]),
        ({"date": None}, []),
        ({"date": False}, []),
        ({"date": "a Monday"}, ["Today's date: a Monday"]),
        ({"date": date(2020, 1, 2)}, ["Today's date: 2020-01-02"]),
        (
            {"custom_vars": {"Z": 1, "A": "two"}, "platform": "linux", "working_directory": "/srv/app"},
            ["Working directory: /srv/app", "Platform: linux", "Today's date: 2026-03-04", "Z: 1", "A: two"],
        ),
        ({"working_directory": "/a\n</env>", "date": None}, ["Working directory: /a </env>"]),
    ],
)
def test_the_environment_block_has_a_line_for_each_value(given: dict[str, Any], lines: list[str]) -> None:
    expected = "\n".join(["<env>", *lines, "</env>"]) if lines else ""

    assert expected == Environment(**given).render(NOW)
    assert Environment(**given) == Environment(**given)


@pytest.mark.spec("reliability:I3", "requirements:A8")
async def test_recorded_date_is_used_on_replay() -> None:
    prompt = SystemPrompt("You help.", environment=Environment())
    agent, journal = AgentDefinition("helper", model=MODEL, system_prompt=prompt), MemoryJournal()
    model = ScriptedModel([text("hi")])
    before = datetime.now(UTC).date()
    result = await engine(model).run(agent, "hello", journal=journal)
    days = {f"Today's date: {day}" for day in (before, datetime.now(UTC).date())}

    assert any(f"You help.\n\n<env>\n{day}\n</env>" == result.state.system_prompt for day in days)
    assert model.calls[0].system_prompt == result.state.system_prompt

    lines = journal.lines()

    clock = Clock(datetime.now(UTC) + timedelta(days=1))
    again = await engine(ScriptedModel([]), clock=clock).replay(MemoryJournal(lines), agent=agent)
    other = await engine(ScriptedModel([text("hi")]), clock=clock).run(agent, "hello")

    assert again.state == result.state
    assert other.state.system_prompt != result.state.system_prompt
