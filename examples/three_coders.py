"""
Three coding agents, each a program of its own, solve one task in copies of a project, and the tests say which of them solved it best.

``python examples/three_coders.py`` needs no key and no coding agent: its coders are small agents with written replies, which this
file serves itself. To go live, put the commands of coding agents into CODERS, such as ``["claude-agent-acp"]``,
``["gemini", "--experimental-acp"]`` and ``["codex-acp"]``, and name the variables with their keys in ``env=``.
"""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from stepengine import AgentCall, AgentDefinition, Engine, Parallel, Perform, StepContext, Steps
from stepengine.acp import ExternalAgent, serve, take_stdout
from stepengine.journal import FileJournal
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools import file_tools

TESTS = ["slug('A b') == 'a-b'", "slug(' A  b ') == 'a-b'", "slug('') == ''"]
WRITTEN = {  # what the coders write that stand in for real ones
    "ada": "def slug(text):\n    return text.lower().replace(' ', '-')\n",
    "bob": "def slug(text):\n    return '-'.join(text.lower().split())\n",
    "cy": "def slug(text):\n    return text\n",
}
CODERS = {name: [sys.executable, __file__, name] for name in WRITTEN}


def passed(folder: Path) -> int:
    runs = [(sys.executable, "-c", f"from slugs import slug; assert {test}") for test in TESTS]
    return [subprocess.run(run, cwd=folder, capture_output=True, check=False).returncode for run in runs].count(0)  # noqa: S603


def team(project: Path, commands: dict[str, list[str]]) -> AgentDefinition[str]:
    coders = [
        ExternalAgent(name, command=words, workspace=project / name, env=["PYTHONPATH"])
        for name, words in commands.items()
    ]

    def handle_steps(ctx: StepContext) -> Steps[str]:
        replies = yield from Parallel(*[AgentCall(coder, ctx.prompt) for coder in coders])
        solved = [coder.id for coder, reply in zip(coders, replies, strict=True) if not reply.is_error]
        points = yield from Parallel(*[Perform(lambda name: passed(project / name), name) for name in solved])
        return max(zip(points, solved, strict=True))[1]

    return AgentDefinition("team", spawnable_agents=coders, handle_steps=handle_steps)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        project, journal = Path(folder), Path(folder, "run.jsonl")
        for name in CODERS:
            (project / name).mkdir()
        policy = Policy([Rule.allow_category("write")])  # what they ask to do is asked of it, and of people
        lead = Engine([team(project, CODERS)], permissions=policy)
        result = lead.run_sync("team", "Write slugs.py.", journal=FileJournal(journal))
        print(f"the best: {result.unwrap()}, with {passed(project / result.unwrap())} of {len(TESTS)} tests")
        gone = team(project, {name: ["no-such-program"] for name in CODERS})
        again = Engine([gone], permissions=policy).replay_sync(journal)
        print(f"replayed without them: {again.unwrap()}")


def stand_in(name: str) -> None:
    """Serve a coder that writes what is written down for it, as a coding agent's program does."""
    out, coder = take_stdout(), AgentDefinition(name, model="m/m", tools=["write_file"])

    def make(cwd: Path, **_: object) -> Engine:
        written = tool_call("write_file", {"path": "slugs.py", "content": WRITTEN[name]})
        models = ScriptedModel([written, "It is written."])
        return Engine([coder], file_tools(cwd, write=True), models, permissions=Policy())

    with tempfile.TemporaryDirectory() as sessions:
        asyncio.run(serve(make, name, Path(sessions), out=out))


if __name__ == "__main__":
    stand_in(sys.argv[1]) if len(sys.argv) > 1 else main()
