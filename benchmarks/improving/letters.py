"""Prompts: letters of a shop have to follow four rules that the agent was not told."""

from __future__ import annotations

from typing import Any

from stepengine import AgentDefinition
from stepengine.evaluation import Case, Criterion, Evaluation, JudgedRun, Verdict
from stepengine.testing import text

RULES = {
    "currency": ("EUR", "in EUR"), "date": ("2026-", "2026-01-31"), "signature": ("The Shop", "Sign as"), "language": ("Guten Tag", "customer's language"),
}  # fmt: skip


def played(request: Any) -> Any:
    """Follow the rules that it was told, in the letters that they are about."""
    told = request.system_prompt + "".join([message.text for message in request.messages if message.role == "user"])
    kind = request.messages[0].text.split()[2]
    word, rule = RULES[kind]
    return text(f"A letter. {word if rule in told else ''}", cost="0.002")


def follows(kind: str) -> Criterion:
    """Return the check of a rule."""

    def check(run: JudgedRun) -> Verdict:
        holds = RULES[kind][0] in run.text
        return Verdict(float(holds), holds, "" if holds else f"lacks: {kind}")

    return Criterion("follows", check, kind)


agent = AgentDefinition(
    "letters", model="scripted/writer", system_prompt="You write letters.", instructions_prompt="Write it."
)
evaluation = Evaluation(
    "letters",
    cases=[
        Case(f"{kind}-{number}", f"Write the {kind} letter, number {number}", checks=[follows(kind)], replies=played)
        for kind in RULES
        for number in range(6)
    ],
    agents={"letters": "letters.py"},
)
