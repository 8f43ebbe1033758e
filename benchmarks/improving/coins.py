"""Nothing helps: what is asked is a coin that was thrown, so that no text makes an agent better at it."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from stepengine import AgentDefinition
from stepengine.evaluation import Case, Criterion, Evaluation, JudgedRun, Verdict
from stepengine.testing import text


def played(request: Any) -> Any:
    """Guess; another prompt leads to another guess, which is as good."""
    told = sha256((request.system_prompt + request.messages[0].text).encode()).digest()
    return text("heads" if told[0] % 2 else "tails", cost="0.002")


def is_right(run: JudgedRun) -> Verdict:
    """Return whether it guessed what the case has."""
    holds = run.text == ("heads" if sha256(run.case.id.encode()).digest()[1] % 2 else "tails")
    return Verdict(float(holds), holds, "" if holds else "lacks: currency")


agent = AgentDefinition("coins", model="scripted/guesser", system_prompt="You guess.")
evaluation = Evaluation(
    "coins",
    cases=[
        Case(f"coin-{number}", f"Coin {number}", checks=[Criterion("is_right", is_right)], replies=played)
        for number in range(24)
    ],
    agents={"coins": "coins.py"},
)
