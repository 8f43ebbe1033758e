"""
The testing kit: agents and adapters under test without a provider.

Four depths, from the quickest to the most thorough. ``Walk`` steps one handler by hand. ``run_with`` and ``ScriptedModel`` run an agent
with a model that says what a script says. Recordings play back what a real run did (a journal, for agents) or what went over the wire
(a cassette, for adapters), and fail where something else is asked for now. ``simulate`` runs a tree of agents in thousands of
made-up worlds, with failures, stops and crashes, and checks in each what must hold of every run.

All of it stands on the same machine and runtime as real runs: what is replaced is a model, a transport or the world, never a part of
the engine, so there is nothing here that a test could pass and a run would fail.

Names are re-exported here. What stands on httpx2, engines or journals waits for its first use; YAML is imported only when a
cassette is read or written.

Must not be here: pytest (that is ``pytest_plugin``), and anything that a run needs.

Begin with ``walk`` and ``scripted``; ``cassette`` and ``transport`` for traffic; ``simulation`` and ``invariants``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepengine.models.scripted import RunScript, ScriptedModel, failure, text, tool_call, tool_calls, with_thinking
from stepengine.testing.cassette import Cassette, CassetteUnused
from stepengine.testing.cassette_misses import CassetteMiss
from stepengine.testing.faults import Fault
from stepengine.testing.rehearsal import run_with
from stepengine.testing.simulation import Simulated, SimulationFailed, simulate
from stepengine.testing.traffic_redaction import vcr_config
from stepengine.testing.walk import Walk

if TYPE_CHECKING:
    from stepengine.testing.conformance.interactors import check_interactor
    from stepengine.testing.conformance.journals import check_journal
    from stepengine.testing.conformance.providers import check_provider
    from stepengine.testing.conformance.sandboxes import check_sandbox
    from stepengine.testing.conformance.sessions import check_sessions
    from stepengine.testing.conformance.tool_sources import check_tool_source
    from stepengine.testing.engines import Clock, EngineFactory
    from stepengine.testing.installation_checks import Finding, check_installation
    from stepengine.testing.package_checks import PackageCheck, check_package
    from stepengine.testing.prefixes import assert_prefix_stable
    from stepengine.testing.processes.broker import ProgramRun, record_program, replay_program
    from stepengine.testing.recordings import CassetteFixture, JournalFixture
    from stepengine.testing.transport import Clients, RecordTransport, ReplayTransport

LATER = {
    "CassetteFixture": "recordings",
    "Clients": "transport",
    "Clock": "engines",
    "EngineFactory": "engines",
    "Finding": "installation_checks",
    "JournalFixture": "recordings",
    "PackageCheck": "package_checks",
    "ProgramRun": "processes.broker",
    "RecordTransport": "transport",
    "ReplayTransport": "transport",
    "assert_prefix_stable": "prefixes",
    "check_installation": "installation_checks",
    "check_interactor": "conformance.interactors",
    "check_journal": "conformance.journals",
    "check_package": "package_checks",
    "check_provider": "conformance.providers",
    "check_sandbox": "conformance.sandboxes",
    "check_sessions": "conformance.sessions",
    "check_tool_source": "conformance.tool_sources",
    "record_program": "processes.broker",
    "replay_program": "processes.broker",
}

__all__ = (
    "Cassette",
    "CassetteFixture",
    "CassetteMiss",
    "CassetteUnused",
    "Clients",
    "Clock",
    "EngineFactory",
    "Fault",
    "Finding",
    "JournalFixture",
    "PackageCheck",
    "ProgramRun",
    "RecordTransport",
    "ReplayTransport",
    "RunScript",
    "ScriptedModel",
    "Simulated",
    "SimulationFailed",
    "Walk",
    "assert_prefix_stable",
    "check_installation",
    "check_interactor",
    "check_journal",
    "check_package",
    "check_provider",
    "check_sandbox",
    "check_sessions",
    "check_tool_source",
    "failure",
    "record_program",
    "replay_program",
    "run_with",
    "simulate",
    "text",
    "tool_call",
    "tool_calls",
    "vcr_config",
    "with_thinking",
)


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(f"stepengine.testing.{LATER[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
