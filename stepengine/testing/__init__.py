"""
The testing kit: agents and adapters under test without a provider.

It has four depths, from the quickest to the most thorough:

- ``Walk`` steps one handler manually, and ``run_script`` compares its yields with a script. Neither needs an engine.
- ``ScriptedModel`` is a model with scripted replies, for the runs of a real engine.
- Recordings replay a journal (the effects of a run) or a cassette (HTTP traffic). They fail at the first difference.
- ``simulate`` runs a tree of agents in many generated worlds with failures, stops and crashes, and checks invariants in each.

Recordings use an ordinary engine and replace only its outcomes or its transport. ``simulate`` uses the machine, planner, recorder,
replayer, limit gate and usage meter of real runs, with a synchronous driver and performer of its own.

Names are re-exported here. Modules with httpx2, engines or journals are imported at their first use. YAML is imported only when a
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
from stepengine.testing.rehearsal import run_script
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
    "run_script",
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
