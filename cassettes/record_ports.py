"""
Records a run of every agent that was ported from codebuff: ``python -m cassettes.record_ports [FOLDER]``.

As with ``record_agents.py`` no model is asked and everything else happens: a repository is cloned, proposals are made and the best
is written, and a terminal is opened. The page about coming from codebuff rests on these runs.
"""

# ruff: noqa: T201 - a script that says what it wrote

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from cassettes import record_agents as script
from stepengine import AgentDefinition, AgentState, AssistantMessage, Engine, RunResult, Usage, UserMessage, load_agent
from stepengine.journal import FileJournal, JournalLike, RedactField
from stepengine.models import ModelReply, ModelRequest, Provider
from stepengine.testing import tool_call, tool_calls
from stepengine.tools.bundled import ask_user_tool, control_tools, skill_tools, spawn_tools

HERE = Path(__file__).resolve().parent
PORTS = HERE / "ports"
EXAMPLES = HERE.parent / "examples" / "from_codebuff"
MODEL = "scripted/model"


def greeting(root: Path) -> None:
    """Put a program into the folder that asks for a name."""
    (root / "greet.py").write_text("name = input('name? ')\nprint('hello', name)\n")


def versioned(root: Path) -> None:
    """Make the folder a repository with one commit and one change, and give the home folder an identity for commits."""
    for name in [n for n in os.environ if n.startswith("GIT_")]:
        del os.environ[name]
    home = Path(os.environ["HOME"])
    (home / ".gitconfig").write_text("[user]\n\tname = Ada\n\temail = ada@example.com\n")
    # The hash of a commit depends on its dates.
    dates = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "A shop"]):
        subprocess.run(["git", "-C", str(root), *words], check=True, env={**os.environ, **dates})  # noqa: S603, S607
    prices = root / "prices.py"
    prices.write_text(prices.read_text().replace("12.5", "13.5"))


def nothing(_: Path) -> None:
    """Leave the folder as it is."""


@attrs.frozen(kw_only=True)
class Play:
    """
    A run to record.

    Attributes:
        prompt: The prompt of the run.
        said: What the model says, in order, to whoever was asked something that holds the key.
        params: The params of the run.
        answers: The answers of a person, by question.
        previous: The conversation that it continues.
        prepare: Puts into the folder what the run finds there.
    """

    said: Mapping[str, Sequence[ModelReply | str]]
    prompt: str = ""
    params: Mapping[str, Any] | None = None
    answers: Mapping[str, str] | None = None
    previous: Sequence[UserMessage | AssistantMessage] = ()
    prepare: Callable[[Path], None] = nothing


class Cast(Provider):
    """Says to everybody what the play has for the words that they were asked with."""

    name = "scripted"

    def __init__(self, play: Play) -> None:
        self._said = {words: list(replies) for words, replies in play.said.items()}

    @property
    def left(self) -> dict[str, int]:
        """How many replies nobody has asked for, where there are some."""
        return {words: len(replies) for words, replies in self._said.items() if replies}

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return what is said next to whoever asks."""
        asked = "\n".join([m.text for m in request.all_messages if m.role == "user"])
        # The longest are the most particular.
        words = max((words for words in self._said if words in asked), key=len)
        reply = self._said[words].pop(0)
        spoken = ModelReply(reply) if isinstance(reply, str) else reply
        usage = Usage(input_tokens=10 * len(request.all_messages), output_tokens=5 * len(spoken.content), requests=1)
        return attrs.evolve(spoken, usage=usage)


def ported(name: str) -> AgentDefinition[Any]:
    """Return an agent of ``examples/from_codebuff``."""
    return load_agent(EXAMPLES / f"{name}.py")


def tools_for(root: Path) -> list[Any]:
    """Return the tools that the ported agents name."""
    return [
        *script.tools_for(root),
        *spawn_tools(inline=True),
        *control_tools(),
        ask_user_tool(),
        *skill_tools(root),
    ]


def performed(name: str, root: Path, journal: JournalLike | None = None) -> RunResult[Any]:
    """Run a play in a folder, once and to its end; every reply that is written has to be asked for."""
    play, agent = PLAYS[name], ported(name)
    play.prepare(root)
    cast = Cast(play)
    previous = AgentState.from_messages(play.previous) if play.previous else None
    with Engine([agent], tools_for(root), cast, default_model=MODEL, workspace=root) as engine:
        given: dict[str, Any] = {"params": play.params, "previous": previous, "answers": play.answers}
        result = engine.run_sync(agent, play.prompt, journal=journal, **given)
    result.unwrap()
    if cast.left:
        msg = f"{name}: not asked for: {cast.left}"
        raise AssertionError(msg)
    return result


def journal_at(path: Path) -> FileJournal:
    """Return a journal for git, as of bundled agents; nor does it tell the number and the file of a job."""
    rules = [*script.RULES, RedactField("/pid"), RedactField("/output_file")]
    return FileJournal(path, link=False, stable=True, redact=rules)


def record(name: str, folder: Path) -> Path:
    """Record a run into *folder* and return its file."""
    path = folder / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    folder.mkdir(exist_ok=True)
    with script.sample() as root:
        performed(name, root, journal_at(path))
    return path


CLONED = ".clones/shop-826808"
SESSION = "tui-826808"
PHASES = ("Context", "Spec", "Plan")
NOTES = ".agents/sessions/discount"
CRITIQUE = "What is missing in the spec of the discount for large orders?"
REVIEW = "Review the discount in shop.py and the test of it in test_shop.py."
TMUX = ["tmux", "-L", SESSION]

PLAYS: dict[str, Play] = {
    "librarian": Play(
        prompt="How is an order added up?",
        params={"repo_url": "https://git.example/shop.git"},
        prepare=script.publish,
        said={
            "How is an order added up?": [
                tool_call("run_terminal_command", {"command": ["grep", "-n", "total", f"{CLONED}/shop.py"]}),
                tool_call(
                    "set_output",
                    {
                        "answer": "total() adds up price times count.",
                        "relevant_files": [f"{CLONED}/shop.py"],
                        "clone_dir": CLONED,
                    },
                ),
            ]
        },
    ),
    "thinker_with_files": Play(
        prompt="What does an empty order cost?",
        params={"file_paths": ["shop.py", "nowhere.py"]},
        said={"What does an empty order cost?": ["Nothing: the sum of no prices is 0."]},
    ),
    "base_chat": Play(
        prompt="How do shops count money?",
        previous=[UserMessage("Hello."), AssistantMessage("Hello. What is it about?")],
        said={
            "How do shops count money?": [
                tool_call(
                    "spawn_agents",
                    {"agents": [{"agent_type": "codebuff/researcher-web@0.0.1", "prompt": "Money in software"}]},
                ),
                tool_calls(
                    tool_call(
                        "suggest_followups", {"followups": [{"prompt": "Show me how in Python.", "label": "Python"}]}
                    ),
                    text="In whole cents, not in floats.",
                ),
            ],
            "Money in software": [
                tool_call("web_search", {"query": "money in software"}),
                "Not in floats, says https://pages.example/1.",
            ],
        },
    ),
    "advanced_file_explorer": Play(
        prompt="Add a discount.",
        params={"prompts": ["prices", "tests"]},
        said={
            "this part of it: prices": ["prices.py\nshop.py", "prices.py holds the prices, shop.py adds them up."],
            "this part of it: tests": ["test_shop.py", "test_shop.py tests total()."],
        },
    ),
    "base_deep": Play(
        prompt=script.REQUEST,
        answers={"Is an order of exactly 100 included?": "yes"},
        said={
            script.REQUEST: [
                tool_call("write_todos", {"todos": [{"task": task, "completed": False} for task in PHASES]}),
                script.spawn(script.PICKER, script.SEARCHER),
                tool_calls(
                    tool_call(
                        "write_file", {"path": f"{NOTES}/SPEC.md", "content": "# Spec\n\n10 % off for large orders.\n"}
                    ),
                    tool_call(
                        "ask_user",
                        {"questions": [{"question": "Is an order of exactly 100 included?", "options": ["yes", "no"]}]},
                    ),
                ),
                script.spawn({"agent_type": "thinker", "prompt": CRITIQUE}),
                tool_calls(*script.EDITS),
                script.spawn(
                    {"agent_type": "code-reviewer", "prompt": REVIEW}, {"agent_type": "basher", "params": script.TESTS}
                ),
                tool_calls(tool_call("suggest_followups", {"followups": script.FOLLOWUPS}), text=script.DONE),
            ],
            script.WHERE: [script.LISTED, script.REPORTED],
            CRITIQUE: ["Nothing is missing once 100 itself is decided."],
            REVIEW: ["The change is right."],
        },
    ),
    "general_agent": Play(
        prompt="Make total() accept None.",
        params={"file_paths": ["shop.py"]},
        said={
            "Make total() accept None.": [
                tool_call(
                    "spawn_agents",
                    {
                        "agents": [
                            {"agent_type": "code-searcher", "params": {"search_queries": [{"pattern": "total"}]}},
                            {"agent_type": "basher", "params": {"command": "python3 -m unittest"}},
                        ]
                    },
                ),
                script.replace("shop.py", " in order.", " in (order or {})."),
                "total(None) is 0 now.",
            ]
        },
    ),
    "git_committer": Play(
        prompt="Commit the new price of cheese.",
        prepare=versioned,
        said={
            "Commit the new price of cheese.": [
                tool_call("read_files", {"paths": ["prices.py"]}),
                tool_call("run_terminal_command", {"command": ["git", "add", "prices.py"]}),
                tool_call(
                    "run_terminal_command",
                    {"command": ["git", "commit", "-q", "-m", "Raise the price of cheese", "-m", "It costs us more."]},
                ),
                tool_call("run_terminal_command", {"command": ["git", "log", "-1", "--format=%an <%ae>%n%B"]}),
                tool_call("end_turn", {}, text="The new price is committed."),
            ]
        },
    ),
    "editor_multi_prompt": Play(
        prompt="Make total() robust.",
        params={"prompts": list(script.WAYS)},
        previous=[UserMessage("total() fails for None."), AssistantMessage("I have it looked after.")],
        said={
            f"Strategy: {script.WAYS[0]}": [script.GUARDED, "Done."],
            f"Strategy: {script.WAYS[1]}": ["A table does not help."],
            '"implementations"': [
                tool_call(
                    "set_output",
                    {"implementation_id": "A", "reason": "It is the only one.", "suggested_improvements": "Test it."},
                )
            ],
        },
    ),
    "tmux_cli": Play(
        prompt="See whether it greets by name.",
        params={"command": "python3 greet.py"},
        prepare=greeting,
        said={
            "See whether it greets by name.": [
                tool_call("run_terminal_command", {"command": [*TMUX, "send-keys", "Ada", "Enter"]}),
                tool_call("run_terminal_command", {"command": ["sleep", "0.5"]}),
                tool_call("run_terminal_command", {"command": [*TMUX, "capture-pane", "-p"]}),
                tool_call("run_terminal_command", {"command": [*TMUX, "kill-server"]}),
                tool_call(
                    "set_output",
                    {"overall_status": "success", "summary": "It says hello Ada.", "session_name": SESSION},
                ),
            ]
        },
    ),
}

if __name__ == "__main__":
    for port in PLAYS:
        print(f"recorded {record(port, Path(sys.argv[1]) if sys.argv[1:] else PORTS)}")
