"""
The testing kit: agents and adapters under test without a provider.

Names are re-exported here. The transports wait for their first use, since they stand on httpx2 classes; YAML is imported
only when a cassette is read or written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepengine.testing.cassette import Cassette, CassetteMiss, CassetteUnused
from stepengine.testing.faults import Fault
from stepengine.testing.rehearsal import run_with
from stepengine.testing.scripted import ScriptedModel, failure, text, thinking, tool_call, tool_calls
from stepengine.testing.simulation import Simulated, SimulationFailed, simulate
from stepengine.testing.walk import Walk

if TYPE_CHECKING:
    from stepengine.testing.transport import RecordTransport, ReplayTransport

__all__ = (
    "Cassette",
    "CassetteMiss",
    "CassetteUnused",
    "Fault",
    "RecordTransport",
    "ReplayTransport",
    "ScriptedModel",
    "Simulated",
    "SimulationFailed",
    "Walk",
    "failure",
    "run_with",
    "simulate",
    "text",
    "thinking",
    "tool_call",
    "tool_calls",
)


def __getattr__(name: str) -> Any:
    if name in ("RecordTransport", "ReplayTransport"):
        from stepengine.testing import transport

        return getattr(transport, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
