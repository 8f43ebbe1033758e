"""
A simulated world whose replies, results and answers are those of a recorded run.

What a run asks for at the place where it was recorded gives what it gave; what is asked elsewhere gives what an equal effect
gave that nobody came by yet. Where a fault led the run away from its record, the world says what a simulated one says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs

from stepengine.data.effects import CallModel, CallTool, Leaf
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Failure, Single, Value
from stepengine.journal.encoding import encode_effect
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import History
from stepengine.journal.records import Address
from stepengine.redaction import Redactor
from stepengine.runtime.performer import Item
from stepengine.testing.effect_performer import OutcomeSource

MODEL = "model_call"


class RecordedRunIndex:
    """
    An index of a recorded run's outcomes, shared by many simulated worlds.

    Args:
        history: The recorded run.

    Attributes:
        history: As given.
        tools: The names of the tools that it called.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._prints = Fingerprints(Redactor({}, shapes=False))
        self._places: dict[tuple[str, str], list[Address]] = {}
        self.tools: set[str] = set()
        for address, intent in history.intents.items():
            if intent.type == "tool_call":
                self.tools.add(str(history.form(intent)["tool_name"]))
            if not intent.starts_child_or_body and address in history.results:
                fp = MODEL if intent.type == MODEL else self._prints.for_effect(history.form(intent))
                self._places.setdefault((address[0], fp), []).append(address)

    def list_equal_effects(self, path: str, effect: Leaf) -> list[Address]:
        """Return the addresses of equal effects of the run at *path*; for a model call, of all model calls."""
        plan: Any = SimpleNamespace(tools={})
        fp = (
            MODEL if isinstance(effect, CallModel) else self._prints.for_effect(encode_effect(Item(path, effect, plan)))
        )
        return self._places.get((path, fp), [])


class RecordedOutcomes:
    """
    The outcomes of one seed's world, from a record.

    Args:
        record: The recorded run.
        otherwise: What the world says where the record has nothing.

    Attributes:
        results: Those of *otherwise*, and nothing for what is recorded; whatever is not in it was made up.
    """

    def __init__(self, record: RecordedRunIndex, otherwise: OutcomeSource) -> None:
        self._record = record
        self._otherwise = otherwise
        self._said: dict[Address, Value | Failure] = {}
        self._used: set[Address] = set()
        self.results = {**dict.fromkeys(record.tools), **otherwise.results}

    def create_outcome(self, path: str, effect: Leaf, now_ms: int) -> Single:
        """
        Return the unused recorded outcome of an equal effect, else one of the other source; the same outcome again after a crash.
        """
        address, history = (path, effect.seq), self._record.history
        if address not in self._said:
            waiting = [place for place in self._record.list_equal_effects(path, effect) if place not in self._used]
            if not waiting:
                return self._otherwise.create_outcome(path, effect, now_ms)
            place = address if address in waiting else waiting[0]
            self._used.add(place)
            self._said[address] = history.outcome(history.results[place])
        said = attrs.evolve(self._said[address], at=now_ms)
        if isinstance(effect, CallTool) and isinstance(said, Value) and isinstance(said.value, ToolResult):
            named = attrs.evolve(said.value, tool_name=effect.tool_name, tool_call_id=effect.tool_call_id)
            return attrs.evolve(said, value=named)
        return said
