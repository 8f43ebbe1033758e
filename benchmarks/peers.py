"""
Who is measured beside stepengine, and an environment of its own for each: ``python -m benchmarks.peers --make DIR``.

Peers' requirements disagree with each other's and with ours. All come from PyPI; what is asked for is pinned, and what was
installed is noted beside every measurement. ``--newest`` asks for the newest instead.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

AGENTS = ("bu_agent_sdk", "pydantic_ai", "openai_agents", "langgraph", "smolagents", "google_adk")
"""The agent frameworks; each is a module of ``benchmarks.engines``."""

ENVIRONMENTS = {
    "bu_agent_sdk": ["bu-agent-sdk==0.0.1"],
    "pydantic_ai": ["pydantic-ai-slim[dbos,openai]==2.68.0"],
    "pydantic_ai_harness": ["pydantic-ai-harness[code-mode]==0.62.0", "pydantic-ai-slim[openai]==2.62.0"],
    "openai_agents": ["openai-agents==0.24.0"],
    "langgraph": [
        "langgraph==1.2.22",
        "langchain==1.4.7",
        "langchain-openai==1.7.3",
        "langgraph-checkpoint-sqlite==3.1.2",
    ],
    "smolagents": ["smolagents[openai]==1.26.0"],
    "google_adk": ["google-adk==2.13.0"],
    "anthropic": ["anthropic==2.11.0"],
    "openai": ["openai==3.52.0"],
    "google": ["google-genai==3.4.0"],
    "vcrpy": ["vcrpy==9.4.2", "httpx2==2.16.2"],
    "langgraph_server": ["langgraph-cli[inmem]==0.4.40", "langgraph-api==0.16.7", "langgraph==1.2.22"],
    "temporal": ["temporalio[openai-agents]==1.35.0"],
}
SDKS = {"anthropic": "anthropic", "openai": "openai", "openai_chat": "openai", "google": "google"}
"""Each protocol with the environment of its bare loop."""
MEASURED = [*AGENTS, *dict.fromkeys(SDKS.values()), "vcrpy"]
"""The environments that ``python -m benchmarks`` measures in."""

LABELS = {
    "floor": "a bare generator",
    "stepengine": "stepengine",
    "stepengine_handler": "stepengine, handler",
    "stepengine_run": "stepengine",
    "bu_agent_sdk": "bu-agent-sdk",
    "pydantic_ai": "pydantic-ai",
    "openai_agents": "openai-agents",
    "google_adk": "google-adk",
    "google": "google-genai",
    "bare": "the SDK's bare loop",
}


def label(engine: str) -> str:
    """Return the name that people know an engine by."""
    return LABELS.get(engine, engine)


class Peers:
    """
    The interpreters of the peers.

    Args:
        place: A folder that ``--make`` has filled, or one interpreter in which whatever it has is installed; without it our own.
    """

    def __init__(self, place: str | None) -> None:
        self.place = Path(place).absolute() if place else None

    def python(self, name: str) -> str:
        """Return the interpreter of an environment."""
        if self.place is None:
            return sys.executable
        if not self.place.is_dir():
            return str(self.place)
        return str(self.place / name / "bin" / "python")

    def has(self, name: str) -> bool:
        """Return whether the environment was made."""
        return Path(self.python(name)).exists()


def make(folder: Path, names: list[str], *, newest: bool) -> None:
    """Make environments, one after another; one that is there already is brought to the versions."""
    for name in names:
        home = folder / name
        wanted = [w.partition("==")[0] for w in ENVIRONMENTS[name]] if newest else ENVIRONMENTS[name]
        print(f"{name}: {' '.join(wanted)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted], check=True)


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--make", metavar="DIR", type=Path, required=True, help="where the environments stand")
    parser.add_argument("--newest", action="store_true", help="the newest versions instead of the pinned ones")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"only these of {', '.join(ENVIRONMENTS)}")
    asked = parser.parse_args()
    unknown = [name for name in asked.names if name not in ENVIRONMENTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(ENVIRONMENTS)}")
    make(asked.make, asked.names or list(ENVIRONMENTS), newest=asked.newest)


if __name__ == "__main__":
    main()
