"""
Records a run of every bundled agent again: ``python -m cassettes.record_agents [FOLDER]``.

No model is asked. What it would say is written below; everything else happens: handlers decide, children run side by side,
tools read, search and edit a temporary copy of the sample shop, and its tests are run by a process. What a search service and
documentation would say is written down, too, so nothing leaves this machine.
"""

# ruff: noqa: T201 - a script that says what it wrote

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from stepengine import (
    AgentDefinition,
    AgentState,
    AssistantMessage,
    Engine,
    RunResult,
    StepContext,
    Steps,
    Tool,
    ToolCall,
    Usage,
    UserMessage,
    load_agents,
)
from stepengine.adapters.mcp import mcp_tools
from stepengine.journal import FileJournal, JournalLike, RedactField, RedactPattern
from stepengine.models import ModelReply, ModelRequest, Provider
from stepengine.testing import tool_call, tool_calls
from stepengine.tools.bundled import (
    Fetched,
    SearchHit,
    file_tools,
    followup_tools,
    search_tools,
    shell_tools,
    web_tools,
)

HERE = Path(__file__).resolve().parent
AGENTS = HERE / "agents"
SAMPLE = HERE.parent / "tests" / "e2e" / "sample_shop"
SUFFIX = ".sample"
WRITTEN = 1_767_225_600
"""When the files of every copy were changed last: the same on every machine."""
MODEL = "scripted/model"
RULES = (
    RedactField("/duration_seconds"),
    RedactPattern(r"\bin \d+\.\d{3}s", "time"),
    RedactPattern(r'(?<="duration_seconds":)[\d.]+', "time"),
)
BUNDLED = {agent.id: agent for agent in load_agents(HERE.parent / "agents")}


@attrs.frozen(kw_only=True)
class Play:
    """
    A run to record.

    Attributes:
        own: What the model says, in order, to the agent itself.
        said: What it says to others that were given a prompt: ``{(agent id, prompt): replies}``. The prompt is the first
            line of what the agent was asked.
        prompt: The prompt of the run.
        params: Its params.
        answers: What a person answers, by the names of questions.
        previous: The conversation that it continues.
        host: The agent that is run, when the recorded one is run by another; a definition.
        stand_in: Makes the agent that is recorded, with something of this script in the place of what it would start.
        prepare: Puts into the folder, or into the home, what the run finds there.
    """

    own: Sequence[ModelReply | str] = ()
    said: Mapping[tuple[str, str], Sequence[ModelReply | str]] = {}
    prompt: str = ""
    params: Mapping[str, Any] | None = None
    answers: Mapping[str, str] | None = None
    previous: Sequence[UserMessage | AssistantMessage] = ()
    host: Any = None
    stand_in: Callable[[], Any] | None = None
    prepare: Callable[[Path], None] = lambda _: None


class Cast(Provider):
    """
    Plays the model of every agent of one run; a message costs 10 tokens, a part of a reply 5.

    Which agent asks is told by its instructions, which are the last that its request holds; an agent without instructions
    is the run's own.

    Args:
        play: What is said.
        own: The id of the run's agent.
    """

    name = "scripted"

    def __init__(self, play: Play, own: str) -> None:
        self._left = {key: list(replies) for key, replies in {(own, play.prompt): play.own, **play.said}.items()}
        self._own = own

    @property
    def left(self) -> dict[tuple[str, str], int]:
        """How many replies nobody has asked for, where there are some."""
        return {key: len(replies) for key, replies in self._left.items() if replies}

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return what is said next to whoever asks."""
        agent_id, prompt = self._asked(request)
        replies = self._left.get((agent_id, prompt))
        if not replies:
            msg = f"nothing more is written for {(agent_id, prompt)!r}"
            raise LookupError(msg)
        reply = replies.pop(0)
        spoken = ModelReply(reply) if isinstance(reply, str) else reply
        usage = Usage(input_tokens=10 * len(request.all_messages), output_tokens=5 * len(spoken.content), requests=1)
        return attrs.evolve(spoken, usage=usage)

    def _asked(self, request: ModelRequest) -> tuple[str, str]:
        told = [m for m in request.all_messages if m.role == "user"]
        prompts = [(i, m.text) for i, m in enumerate(told) if "USER_PROMPT" in m.tags]
        at, prompt = prompts[-1] if prompts else (0, "")
        instructions = [m.text for m in told[at:] if "INSTRUCTIONS_PROMPT" in m.tags]
        text = instructions[-1] if instructions else ""
        known = [a.id for a in BUNDLED.values() if a.instructions_prompt and text.startswith(a.instructions_prompt)]
        found = self._own if self._own in known or not known else known[0]
        return found, prompt.partition("\n")[0]


class Web:
    """A search service, documentation and pages that say the same to everybody."""

    async def search(self, query: str, depth: str) -> Sequence[SearchHit]:
        """Return three pages."""
        return [SearchHit(f"Page {n} about {query}", f"https://pages.example/{n}", "It says more.") for n in (1, 2, 3)]

    async def read(self, library_title: str, topic: str, max_tokens: int) -> str:
        """Return what stands about a topic."""
        return f"# {library_title}\n\n{topic}: fixtures of a wider scope are set up first."

    async def fetch(self, url: str) -> Fetched:
        """Return a page."""
        return Fetched(url, 200, "text/plain", f"This is {url}. Money is not counted in floats.".encode())


def with_browser() -> AgentDefinition[Any]:
    """Return ``browser-use`` with a browser that shows the same two pages to everybody."""
    from mcp.server import MCPServer

    shown = {"at": "about:blank", "name": ""}
    server = MCPServer("browser")

    def navigate_page(url: str) -> str:
        shown["at"] = url
        return f"Navigated to {url}."

    def take_snapshot() -> str:
        done = 'uid=3 heading "Order taken"' if shown["name"] else 'uid=1 textbox "Name"\nuid=2 button "Order"'
        return f'url={shown["at"]} title="Shop"\n{done}'

    def fill(uid: str, value: str) -> str:
        shown["name"] = value
        return f"Filled {uid}."

    def click(uid: str) -> str:
        return f"Clicked {uid}."

    def list_console_messages() -> str:
        return "[error] favicon.ico: 404"

    for function in (navigate_page, take_snapshot, fill, click, list_console_messages):
        server.add_tool(
            function, name=function.__name__, description=f"{function.__name__.replace('_', ' ')}.".capitalize()
        )
    return attrs.evolve(BUNDLED["browser-use"], tools=(mcp_tools(server, name="browser"),))


def publish(root: Path) -> None:
    """Have ``git`` find a repository of the sample's files where ``librarian`` looks for one, without a network."""
    origin, home = Path(os.environ["HOME"]) / "shop.git", Path(os.environ["HOME"])
    shutil.copytree(root, origin)
    git = home / "git"
    # Commands see neither our home nor our variables, so the address is turned into a path by a `git` of our own.
    git.write_text(
        f'#!/bin/sh\nexec {shutil.which("git")} -c url."file://{home}/".insteadOf=https://git.example/ "$@"\n'
    )
    git.chmod(0o755)
    by = ["-c", "user.name=Shop", "-c", "user.email=shop@example.com"]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], [*by, "commit", "-qm", "A shop"]):
        subprocess.run([str(git), "-C", str(origin), *words], check=True)  # noqa: S603 - the words stand above
    os.environ["PATH"] = os.pathsep.join([str(home), os.environ["PATH"]])


@contextmanager
def sample() -> Iterator[Path]:
    """Give a temporary copy of the sample shop; commands find this interpreter as ``python3``, and nothing is at home."""
    before = dict(os.environ)
    made = tempfile.TemporaryDirectory
    with made(prefix="stepengine-shop-") as folder, made(prefix="stepengine-home-") as home:
        for file in sorted(SAMPLE.rglob(f"*{SUFFIX}")):
            target = Path(folder) / file.relative_to(SAMPLE).with_suffix("")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
            os.utime(target, (WRITTEN, WRITTEN))
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before.get("PATH", "")])
        os.environ["HOME"] = os.environ["XDG_CONFIG_HOME"] = home
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


def tools_for(root: Path) -> list[Any]:
    """Return the tools that bundled agents name, for a folder."""
    web = Web()
    local = [*file_tools(root, write=True, propose=True), *search_tools(root), *shell_tools(root)]
    return [*local, *followup_tools(), *web_tools(web, web, web)]


def performed(agent_id: str, play: Play, root: Path, journal: JournalLike | None, **options: Any) -> RunResult[Any]:
    """Run a play in a folder, once and to its end; every reply that is written has to be asked for."""
    agent = play.stand_in() if play.stand_in else play.host or BUNDLED[agent_id]
    play.prepare(root)
    cast = Cast(play, agent.id)
    previous = AgentState.from_messages(play.previous) if play.previous else None
    with Engine([agent], tools_for(root), cast, default_model=MODEL, workspace=root, **options) as engine:
        given = {"params": play.params, "previous": previous, "answers": play.answers}
        result = engine.run_sync(agent, play.prompt, journal=journal, **given)
    result.unwrap()
    if cast.left:
        msg = f"{agent_id}: not asked for: {cast.left}"
        raise AssertionError(msg)
    return result


def journal_at(path: Path) -> FileJournal:
    """Return a journal for git: the same run gives the same bytes, how long commands took left out."""
    return FileJournal(path, link=False, stable=True, redact=RULES)


def record(agent_id: str, folder: Path) -> Path:
    """Record the run of one agent into *folder* and return its file."""
    path = folder / f"{agent_id}.jsonl"
    path.unlink(missing_ok=True)
    with sample() as root:
        performed(agent_id, PLAYS[agent_id], root, journal_at(path))
    return path


# --- what is said -----------------------------------------------------------------------------------------------------


def replace(path: str, old: str, new: str, tool: str = "str_replace") -> ModelReply:
    """Return a reply that replaces a piece of a file."""
    return tool_call(tool, {"path": path, "replacements": [{"old_string": old, "new_string": new}]})


def spawn(*agents: Mapping[str, Any], said: str = "") -> ModelReply:
    """Return a reply that spawns agents."""
    return tool_call("spawn_agents", {"agents": list(agents)}, text=said)


def todos(*done: bool) -> ModelReply:
    """Return a reply that writes the todos of the discount."""
    tasks = ("Give the discount in total()", "Test it", "Run the tests")
    items = [{"task": task, "completed": is_done} for task, is_done in zip(tasks, done, strict=True)]
    return tool_call("write_todos", {"todos": items})


def output(**fields: Any) -> ModelReply:
    """Return a reply that sets the output."""
    return tool_call("set_output", fields)


REQUEST = "Give orders of 100 or more a discount of 10 %."
CHANGE = "In shop.py, take 10 % off in total() from 100 on; in test_shop.py, test an order below and one from 100 on."
WHERE = "Where are totals computed, and where are they tested?"
LISTED = "shop.py\nprices.py\ntest_shop.py"
REPORTED = "shop.py: total() computes what an order costs.\nprices.py: the prices.\ntest_shop.py: its tests."
SUM = "    return sum(PRICES[article] * count for article, count in order.items())\n"
DISCOUNT = SUM.replace("return", "price =") + "    return price * 0.9 if price >= 100 else price\n"
EMPTY = "        self.assertEqual(0, total({}))\n"
TESTED = """
    def test_orders_of_100_or_more_are_10_percent_cheaper(self):
        self.assertEqual(87.5, total({"cheese": 7}))
        self.assertEqual(90.0, total({"cheese": 8}))
"""
EDITS = (replace("shop.py", SUM, DISCOUNT), replace("test_shop.py", EMPTY, EMPTY + TESTED))
TESTS = {"command": "python3 -m unittest"}
PICKER = {"agent_type": "file-picker", "prompt": WHERE}
SEARCHER = {"agent_type": "code-searcher", "params": {"search_queries": [{"pattern": "total"}]}}
LOOKED = {("file-lister", WHERE): [LISTED], ("file-picker", WHERE): [REPORTED]}
REVIEW = "Is the discount right?"
DONE = "Orders of 100 or more are now 10 % cheaper. The tests pass, a new one among them."
FOLLOWUPS = [{"prompt": "Mention the discount in the README.", "label": "Document it"}]
PROPOSED = replace("shop.py", SUM, DISCOUNT, "propose_str_replace")
GUARDED = replace("shop.py", SUM, SUM.replace(" in order", " in (order or {})"), "propose_str_replace")
IMPLEMENTATIONS = [{"id": "A", "content": "-1\n+2"}, {"id": "B", "content": "-1\n+3"}]
IMPLEMENTING = "Use this strategy: {}"
WAYS = ("one more line", "a table of discounts")
QUESTIONS = ("Is 100 itself included?", "Is it simple?")
CLONED = ".librarian/shop-c9db86ed"
LONG = "The shop sells apples, bread and cheese. " * 200


def pruning(_: StepContext) -> Steps[int]:
    """Have the conversation pruned, and return how long it is then."""
    pruner = {"agent_type": "context-pruner", "params": {"max_context_length": 2_500}}
    turn = yield ToolCall("spawn_agent_inline", pruner, include_tool_call=False)
    return len(turn.agent_state.message_history)


BASE2 = Play(
    prompt=REQUEST,
    own=[
        spawn(PICKER, SEARCHER, said="I look around first."),
        tool_calls(
            tool_call("read_files", {"paths": ["shop.py", "prices.py", "test_shop.py"]}), todos(False, False, False)
        ),
        tool_call("editor", {"prompt": CHANGE}),
        tool_calls(
            todos(True, True, False),
            spawn({"agent_type": "code-reviewer", "prompt": REVIEW}, {"agent_type": "basher", "params": TESTS}),
        ),
        todos(True, True, True),
        tool_calls(tool_call("suggest_followups", {"followups": FOLLOWUPS}), text=DONE),
    ],
    said={
        **LOOKED,
        ("editor", CHANGE): [tool_calls(*EDITS, text="Both files at once."), "Discount and test are in."],
        ("code-reviewer", REVIEW): ["Nothing to say: 100 is included, and the test shows it."],
    },
)
BASE2_MAX = Play(
    prompt=REQUEST,
    own=[
        spawn(SEARCHER, {"agent_type": "thinker-best-of-n", "prompt": REVIEW, "params": {"n": 2}}),
        spawn({"agent_type": "editor-multi-prompt", "prompt": CHANGE, "params": {"prompts": list(WAYS)}}),
        spawn(
            {"agent_type": "code-reviewer-multi-prompt", "params": {"prompts": list(QUESTIONS)}},
            {"agent_type": "basher", "params": TESTS},
        ),
        DONE,
    ],
    said={
        ("thinker", REVIEW): ["From 100 on.", "Above 100."],
        ("thinker-selector", "{"): [output(thought_id="A")],
        **{("editor-implementor", IMPLEMENTING.format(way)): [PROPOSED, "Proposed."] for way in WAYS},
        ("best-of-n-selector", "{"): [
            output(implementation_id="A", reason="It is smaller.", suggested_improvements="")
        ],
        **{("code-reviewer", question): ["Yes."] for question in QUESTIONS},
    },
)  # fmt: skip
EDITING = Play(
    prompt=REQUEST,
    own=[spawn(PICKER, SEARCHER), tool_calls(*EDITS), spawn({"agent_type": "basher", "params": TESTS}), DONE],
    said=LOOKED,
)
"""An orchestrator that edits by itself."""


def with_cases() -> AgentDefinition:
    """Return the improver with cases that pass by what the prompt says, in place of those of an evaluation."""
    helps = {"a": "greet", "b": "by name"}

    def run_case(given: Mapping[str, Any]) -> dict[str, Any]:
        prompt = given["changes"].get("system_prompt", "Answer.")
        passed = helps[given["case"][0]] in prompt
        said = [] if passed else [f"it lacks {helps[given['case'][0]]!r}"]
        course = "" if passed else "user: Hello\nstep 1: Yes."
        return {
            "score": float(passed), "problem": "", "said": said, "did": course, "steps": 1, "spent": "0.01", "cost": "0.01", "served": 0,
            "journal": "", "stopped": "",
        }  # fmt: skip

    improver = BUNDLED["improver"]
    options = {"idempotent": True, "parallel_safe": True, "requires_permission": False, "destinations": ()}
    specs = [tool.spec for tool in improver.tools]
    played = [Tool(spec.name, spec.description, spec.input_schema, run_case, **options) for spec in specs]
    return attrs.evolve(improver, tools=played)


WISH = "An agent that says which files of a folder are tests"
BUILT = '''\
"""Says which files of a folder are tests."""

from stepengine import AgentDefinition, StepContext, Steps, ToolCall
from stepengine.errors import ToolError


def handle_steps(ctx: StepContext) -> Steps[list[str]]:
    try:
        listed = yield from ToolCall("list_directory", {"path": ctx.prompt or "."})
    except ToolError:
        return []
    return [name for name in listed.data["files"] if name.startswith("test_")]


agent = AgentDefinition(
    "tests-finder",
    description="Says which files of a folder are tests.",
    tools=["list_directory"],
    output_mode="structured_output",
    handle_steps=handle_steps,
)
'''


def drafted(source: str) -> ModelReply:
    """Return a reply that hands over an agent file, with an example."""
    listed = {"path": ".", "files": ["shop.py", "test_shop.py"], "directories": []}
    example = {"example_prompt": ".", "example_replies": [], "example_results": {"list_directory": listed}}
    return tool_call("draft_agent", {"source": source, "why": "No model is needed to read names.", **example})


PLAYS: dict[str, Play] = {
    "agent-builder": Play(
        prompt=WISH,
        own=[
            tool_call("list_directory", {"path": "."}),
            drafted(BUILT.replace("from stepengine.errors", "from os")),
            drafted(BUILT.replace('data["files"]', 'data["names"]')),
            drafted(BUILT),
        ],
        answers={"file-1": "file it"},
    ),
    "base2": BASE2,
    "base2-fast": EDITING,
    "base2-lite": EDITING,
    "base2-max": BASE2_MAX,
    "base2-plan": Play(prompt=REQUEST, own=[spawn(PICKER), "<plan>\n1. shop.py: take 10 % off.\n</plan>"], said=LOOKED),
    "basher": Play(params=TESTS),
    "best-of-n-selector": Play(
        prompt=REQUEST,
        params={"implementations": IMPLEMENTATIONS},
        own=[output(implementation_id="B", reason="It is right.", suggested_improvements="")],
    ),
    "code-reviewer": Play(prompt=REVIEW, own=["There is no change to review."]),
    "code-reviewer-multi-prompt": Play(
        prompt="+    return price * 0.9",
        params={"prompts": list(QUESTIONS)},
        said={("code-reviewer", question): ["No."] for question in QUESTIONS},
    ),
    "code-searcher": Play(params=SEARCHER["params"]),
    "coder": Play(
        prompt=REQUEST,
        own=[
            tool_call("find_files", {"prompt": "total of an order"}),
            tool_calls(*EDITS),
            tool_call("run_terminal_command", TESTS),
            DONE,
        ],
    ),
    "context-pruner": Play(
        host=AgentDefinition("pruning-host", spawnable_agents=[BUNDLED["context-pruner"]], handle_steps=pruning),
        prompt="What do we sell?",
        previous=[
            UserMessage(LONG),
            AssistantMessage("I see."),
            UserMessage("And what does bread cost?"),
            AssistantMessage(LONG),
        ],
    ),
    "directory-lister": Play(params={"directories": [{"path": "."}, {"path": "docs"}, {"path": "nowhere"}]}),
    "editor": Play(prompt=CHANGE, params={"files": ["shop.py"]}, own=[tool_calls(*EDITS), "Discount and test are in."]),
    "editor-implementor": Play(prompt=CHANGE, own=[PROPOSED, "Proposed."]),
    "editor-multi-prompt": Play(
        prompt="Make total() robust.",
        params={"prompts": list(WAYS)},
        said={
            ("editor-implementor", IMPLEMENTING.format(WAYS[0])): [GUARDED, "An order may be None."],
            ("editor-implementor", IMPLEMENTING.format(WAYS[1])): ["A table does not help here."],
            ("best-of-n-selector", "{"): [
                output(implementation_id="A", reason="The other proposes nothing.", suggested_improvements="Test it."),
            ],
        },
    ),
    "browser-use": Play(
        prompt="Does the shop take an order?",
        params={"url": "http://localhost:8000/"},
        own=[
            tool_call("browser__navigate_page", {"url": "http://localhost:8000/"}),
            tool_call("browser__take_snapshot", {}),
            tool_calls(
                tool_call("browser__fill", {"uid": "1", "value": "Ada"}), tool_call("browser__click", {"uid": "2"})
            ),
            tool_calls(tool_call("browser__take_snapshot", {}), tool_call("browser__list_console_messages", {})),
            output(
                overall_status="success",
                summary="An order with a name is taken.",
                results=[{"name": "order with a name", "passed": True, "details": "The page says: Order taken."}],
                final_url="http://localhost:8000/",
                console_errors=["favicon.ico: 404"],
            ),
        ],
        stand_in=with_browser,
    ),
    "file-lister": Play(prompt=WHERE, own=[LISTED]),
    "file-picker": Play(prompt=WHERE, said=LOOKED),
    "glob-matcher": Play(params={"patterns": [{"pattern": "**/*.py"}, {"pattern": "*.md", "cwd": "docs"}]}),
    "improver": Play(
        params={
            "parts": {"system_prompt": "Answer."},
            "search": ["a1", "b1", "b2"],
            "held_out": ["a2", "b3"],
            "budget": "1",
            "seed": 1,
        },
        own=[
            tool_call("change", {"part": "system_prompt", "value": "You greet.", "why": "Nobody said to."}),
            tool_call("change", {"part": "system_prompt", "value": "You greet by name.", "why": "A name was wanted."}),
        ],
        stand_in=with_cases,
    ),
    "librarian": Play(
        prompt="How is an order added up?",
        params={"repo_url": "https://git.example/shop.git"},
        own=[
            tool_call("list_directory", {"path": CLONED}),
            tool_call("code_search", {"pattern": "total", "cwd": CLONED}),
            tool_call("read_files", {"paths": [f"{CLONED}/shop.py"]}),
            output(
                answer="total() in shop.py adds up price times count.",
                relevant_files=[f"{CLONED}/shop.py"],
                clone_dir=CLONED,
            ),
        ],
        prepare=publish,
    ),
    "planner": Play(
        prompt=REQUEST, own=[tool_call("read_files", {"paths": ["shop.py"]}), "1. shop.py: take 10 % off."]
    ),
    "researcher-docs": Play(
        prompt="How does pytest order fixtures?",
        own=[
            tool_call("read_docs", {"library_title": "pytest", "topic": "order of fixtures"}),
            "Those of a wider scope are set up first.",
        ],
    ),
    "researcher-web": Play(
        prompt="How do shops count money?",
        own=[
            tool_call("web_search", {"query": "money without floats"}),
            tool_calls(*[tool_call("read_url", {"url": f"https://pages.example/{n}"}) for n in (1, 2, 3)]),
            "Not in floats, say all three pages.",
        ],
    ),
    "thinker": Play(prompt=REVIEW, own=["<think>100?</think>From 100 on: the request says so."]),
    "thinker-best-of-n": Play(
        prompt=REVIEW,
        params={"n": 2},
        own=["From 100 on.", "Above 100."],
        said={("thinker-selector", "{"): ["I choose A.", output(thought_id="A")]},
    ),
    "thinker-selector": Play(
        prompt=REVIEW,
        params={"thoughts": [{"id": "A", "content": "From 100 on."}, {"id": "B", "content": "Above 100."}]},
        own=[output(thought_id="A")],
    ),
}

if __name__ == "__main__":
    for name in BUNDLED:
        print(f"recorded {record(name, Path(sys.argv[1]) if sys.argv[1:] else AGENTS)}")
