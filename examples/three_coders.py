"""
Three coding agents, each a program in its own container, solve the same task, and tests select the best solution.

``python examples/three_coders.py`` needs no key, because scripted coders in this file replace the programs. ``CODERS_IN=podman:IMAGE``
runs each in a container of an image with stepengine[acp]. To use real programs, set CODERS to commands such as
``["claude-agent-acp"]``, SEEN to the names of the variables with their keys, and NETWORK.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from stepengine import AgentCall, AgentDefinition, Engine, Parallel, Perform, StepContext, Steps, Workspace
from stepengine.adapters.acp import ExternalAgent, redirect_stdout, serve
from stepengine.journal import FileJournal
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, shell_tools

TESTS = ["slug('A b') == 'a-b'", "slug(' A  b ') == 'a-b'", "slug('') == ''"]
WRITTEN = {  # what the coders write that stand in for real ones
    "ada": "def slug(text):\n    return text.lower().replace(' ', '-')\n",
    "bob": "def slug(text):\n    return '-'.join(text.lower().split())\n",
    "cy": "def slug(text):\n    return text\n",
}
IN, NETWORK, SEEN = os.environ.get("CODERS_IN", ""), "none", ["PYTHONPATH"]
CODERS = {name: ["python3" if IN else sys.executable, __file__, name] for name in WRITTEN}


def begun_in(folder: Path, words: list[str]) -> list[str]:
    folder.mkdir()
    program, _, image = IN.partition(":")
    given = [f"--env={name}" for name in SEEN] + [f"--volume={path}:{path}" for path in (folder, __file__)]
    return [program, "run", "--rm", "-i", "--init", f"--network={NETWORK}", *given, image, *words] if IN else words


async def passed(folder: Path) -> int:
    with Workspace.parse(IN, folder) if IN else Workspace(folder) as place:
        shell, tests = ToolRegistry(shell_tools(place)), [f"from slugs import slug; assert {test}" for test in TESTS]
        ran = [await shell.execute("run_terminal_command", {"command": ["python3", "-B", "-c", one]}) for one in tests]
    return [result.data["exit_code"] for result in ran if not result.is_error].count(0)


def team(project: Path, commands: dict[str, list[str]]) -> AgentDefinition[str]:
    coders = [ExternalAgent(name, command=commands[name], workspace=project / name, env=SEEN) for name in commands]

    def handle_steps(ctx: StepContext) -> Steps[str]:
        yield from Parallel(*[AgentCall(coder, ctx.prompt) for coder in coders])
        points = yield from Parallel(*[Perform(lambda name: passed(project / name), name) for name in commands])
        most, best = max(zip(points, commands, strict=True))
        return f"{best}, with {most} of {len(TESTS)} tests"

    return AgentDefinition("team", spawnable_agents=coders, handle_steps=handle_steps)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        project, journal = Path(folder).resolve(), Path(folder, "run.jsonl")
        lead = team(project, {name: begun_in(project / name, words) for name, words in CODERS.items()})
        policy = Policy([Rule.allow_category("write")])  # decides about what they ask to do
        result = Engine([lead], permissions=policy).run_sync("team", "Write slugs.py.", journal=FileJournal(journal))
        gone = Engine([team(project, {name: ["no-such-program"] for name in CODERS})], permissions=policy)
        print(f"the best: {result.unwrap()}\nreplayed without them: {gone.replay_sync(journal).unwrap()}")


def stand_in(name: str) -> None:
    def make(cwd: Path, **_: object) -> Engine:
        models = ScriptedModel([tool_call("write_file", {"path": "slugs.py", "content": WRITTEN[name]}), "Done."])
        return Engine([coder], file_tools(cwd, write=True), models, permissions=Policy())

    out, coder = redirect_stdout(), AgentDefinition(name, model="m/m", tools=["write_file"])
    with tempfile.TemporaryDirectory() as sessions:
        asyncio.run(serve(make, name, Path(sessions), out=out))


if __name__ == "__main__":
    stand_in(sys.argv[1]) if len(sys.argv) > 1 else main()
