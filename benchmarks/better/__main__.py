"""
Runs what the page "What stepengine does better" tells: ``python -m benchmarks.better [NAME ...] [--peers DIR] [--json FILE]``.

Without peers only our side runs. ``--write`` puts what was printed into the page, and into ``benchmarks/better/shown.json``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.peers import Peers

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "better.md"
SHOWN = Path(__file__).with_name("shown.json")
TOPICS = {
    "growth": ("temporal", ("temporalio", "temporalio-openai-agents", "openai-agents")),
    "replay": ("pydantic_ai", ("pydantic-ai-slim", "dbos")),
    "forks": ("langgraph", ("langgraph",)),
    "drift": ("vcrpy", ("vcrpy",)),
}
"""Each topic with the environment of its peer, and what is noted of it."""

BLOCK = re.compile(r"^```text\n.*?^```$", re.DOTALL | re.MULTILINE)


def filled(page: str, shown: dict[str, str]) -> str:
    """Return the page with what was printed in its blocks of text, in the order of the topics."""
    found = iter(TOPICS)
    return BLOCK.sub(lambda _: f"```text\n{shown[next(found)]}\n```", page)


def our_side(topic: str) -> Path:
    """Return the file of our side of a topic."""
    return Path(__file__).parent / "ours" / f"{topic}.py"


def ours(topic: str) -> str:
    """Run our side in an empty folder and return what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(our_side(topic))]
        return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def theirs(topic: str, peers: Peers) -> str:
    """Run the peer's side and return what it printed, behind its versions."""
    name, packages = TOPICS[topic]
    python = peers.python(name)
    code = f"import importlib.metadata as m; print(', '.join([f'{{p}} {{m.version(p)}}' for p in {packages!r}]))"
    versions = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    command = [python, "-m", f"benchmarks.better.{topic}"]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return f"{versions}: {said}"


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.better", description=__doc__)
    parser.add_argument("topics", nargs="*", metavar="NAME", help=f"only these of {', '.join(TOPICS)}")
    parser.add_argument("--peers", metavar="DIR", help="what `python -m benchmarks.peers --make DIR` made")
    parser.add_argument("--write", action="store_true", help="put what was printed into the page")
    asked = parser.parse_args()
    unknown = [topic for topic in asked.topics if topic not in TOPICS]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(TOPICS)}")
    shown = json.loads(SHOWN.read_text(encoding="utf-8")) if SHOWN.exists() else {}
    for topic in asked.topics or TOPICS:
        said = [f"stepengine: {line}" for line in ours(topic).splitlines()]
        said += [theirs(topic, Peers(asked.peers))] if asked.peers else []
        shown[topic] = "\n".join(said)
        print(f"{topic}\n  " + shown[topic].replace("\n", "\n  "), flush=True)
    if asked.write and asked.peers:
        SHOWN.write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), shown), encoding="utf-8")


if __name__ == "__main__":
    main()
