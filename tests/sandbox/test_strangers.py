"""
A handler in the sandbox does what it does outside: the same records, byte for byte.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, RunStatus, ToolResult, load_agent, tool
from stepengine.data.limits import Limits
from stepengine.errors import DefinitionError
from stepengine.journal import FileJournal
from stepengine.sandbox.source_rewriter import rewrite_for_sandbox
from stepengine.sandbox.untrusted_handlers import OwnLimits, load_file, load_source, make_sandboxed_handler
from stepengine.testing import Clock, ScriptedModel, Walk, tool_call
from tests.e2e.bundled import ROOT, recorder
from tests.examples.test_from_codebuff import ports

from .handlers import text_of

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

script = recorder()
WITH_HANDLER = {agent_id: agent for agent_id, agent in script.BUNDLED.items() if agent.handle_steps is not None}
NOT_PURE = {
    "agent-builder": "tools of its own, which check and try what a model wrote",
    "context-pruner": "rewriting of the host: prune_to_summary, ContextLimits",
    "editor": "asks Python's own parser, and stepengine's diffs",
    "improver": "tools of its own, a class whose methods yield, an exception of its own",
}
"""Bundled agents whose handlers are no plain Python over what they yield, and what they use beside it."""
PURE = [agent_id for agent_id in WITH_HANDLER if agent_id not in NOT_PURE]
NOT_WHOLE = {
    **dict.fromkeys(["base2", "coder", "context-pruner", "editor", "editor-implementor"], "hooks"),
    **dict.fromkeys(["base2-fast", "base2-lite", "base2-max", "base2-plan"], "made by a function of base2's file"),
    **dict.fromkeys(["editor-multi-prompt", "file-picker", "thinker-best-of-n"], "parts of the file beside it"),
    "browser-use": "a server of tools",
    "agent-builder": NOT_PURE["agent-builder"],
    "improver": NOT_PURE["improver"],
}
"""Bundled agents whose files are more than a definition, its handler and helpers, and what they hold beside these."""
WHOLE = [agent_id for agent_id in script.BUNDLED if agent_id not in NOT_WHOLE]


PORTS_WITH_HOOKS = ["base_deep"]
"""Ports whose files hold hooks, which the sandbox does not load."""


@cache
def file_of(agent_id: str) -> Path:
    handler: Any = WITH_HANDLER[agent_id].handle_steps
    # Its module may be gone: other tests load the same files anew.
    return Path(handler.__code__.co_filename)


@cache
def in_sandbox(agent_id: str) -> Any:
    """Return the handler of a bundled agent as the sandbox runs it, from its file's text."""
    file = file_of(agent_id)
    return make_sandboxed_handler(rewrite_for_sandbox(text_of(file, "handle_steps"), str(file)), "handle_steps")


def moved(agent: AgentDefinition[Any]) -> AgentDefinition[Any]:
    """Return an agent with its handler, and those of the agents that it may spawn, in the sandbox."""
    helpers = [one if isinstance(one, str) else moved(one) for one in agent.spawnable_agents]
    is_pure = agent.id in PURE and agent.handle_steps is WITH_HANDLER[agent.id].handle_steps
    return attrs.evolve(
        agent,
        spawnable_agents=helpers,
        **({"handle_steps": in_sandbox(agent.id)} if is_pure else {}),
    )


def expect_equal_journal(path: Path, agents: list[AgentDefinition[Any]], tools: Any) -> None:
    """Replay a journal: the run completes, and all its records are written as they were."""
    with Engine(agents, tools) as engine:
        result = engine.replay_sync(FileJournal(path))

    assert (RunStatus.COMPLETED, None) == (result.status, result.error)
    assert path.read_bytes() == result.journal.content()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize("agent_id", [one for one in PURE if one in NOT_WHOLE])
def test_a_bundled_agent_has_an_equal_journal_in_the_sandbox(agent_id: str, tmp_path: Path) -> None:
    path = script.AGENTS / f"{agent_id}.jsonl"

    expect_equal_journal(path, [moved(script.BUNDLED[agent_id])], script.tools_for(tmp_path))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize("agent_id", WHOLE)
def test_a_bundled_agent_loaded_from_text_has_an_equal_journal(agent_id: str, tmp_path: Path) -> None:
    path = script.AGENTS / f"{agent_id}.jsonl"
    (agent,) = load_file(ROOT / "agents" / f"{agent_id.replace('-', '_')}.py")
    helpers = [one for one in script.BUNDLED[agent_id].spawnable_agents if not isinstance(one, str)]

    expect_equal_journal(path, [agent, *helpers], script.tools_for(tmp_path))


@pytest.mark.deep
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize("agent_id", [*PURE, "context-pruner", "editor", "coder"])
def test_a_run_with_sandboxed_handlers_is_recorded_equal(
    agent_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "BUNDLED", {name: moved(agent) for name, agent in script.BUNDLED.items()})
    again = script.record(agent_id, tmp_path)

    assert without_head(script.AGENTS / again.name) == without_head(again)


def without_head(file: Path) -> bytes:
    """Return a journal without its first line, which says what version recorded it."""
    return file.read_bytes().partition(b"\n")[2]


@pytest.mark.parametrize("agent_id", NOT_PURE)
def test_a_handler_that_needs_the_host_is_refused(agent_id: str) -> None:
    file = file_of(agent_id)

    with pytest.raises(DefinitionError, match=rf"{file.name}:\d+: "):
        rewrite_for_sandbox(text_of(file, "handle_steps"), str(file))


@pytest.mark.parametrize("agent_id", NOT_WHOLE)
def test_a_file_with_unsupported_parts_is_refused_with_its_line(agent_id: str) -> None:
    file = ROOT / "agents" / f"{agent_id.replace('-', '_')}.py"

    with pytest.raises(DefinitionError, match=rf"{file.name}:\d+: "):
        load_file(file)


@pytest.mark.parametrize(
    ("second", "is_refused"), [("input_schema=Weather", False), ("input_schema=Count", True), ("model='x/y'", True)]
)
def test_agents_that_share_a_handler_need_one_input_schema(second: str, is_refused: bool) -> None:
    text = f"""
from pydantic import BaseModel
from stepengine import STEP, AgentDefinition
class Weather(BaseModel):
    city: str
class Count(BaseModel):
    count: int = 7
def run(ctx):
    yield STEP
agents = [
    AgentDefinition("a", handle_steps=run, input_schema=Weather),
    AgentDefinition("b", handle_steps=run, {second}),
]
"""
    with pytest.raises(DefinitionError, match=r"a\.py:12: .*'run' need the same") if is_refused else nullcontext():
        rewrite_for_sandbox(text, "a.py")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize("name", [name for name in ports.PLAYS if name not in PORTS_WITH_HOOKS])
def test_agents_ported_from_codebuff_have_equal_journals_in_the_sandbox(name: str, tmp_path: Path) -> None:
    path = ports.PORTS / f"{name}.jsonl"
    (agent,) = load_file(ports.EXAMPLES / f"{name}.py")
    helpers = [script.BUNDLED["best-of-n-selector"]] if name == "editor_multi_prompt" else []

    expect_equal_journal(path, [agent, *helpers], ports.tools_for(tmp_path))


@pytest.mark.spec("programs:PG42")
def test_the_documented_codebuff_handler_works_in_the_sandbox(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "coming-from" / "codebuff.md").read_text(encoding="utf-8")
    file = tmp_path / "page.py"
    file.write_text(source := page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    handler = make_sandboxed_handler(rewrite_for_sandbox(text_of(file, "handle_steps"), str(file)), "handle_steps")
    edited, was = (
        source.replace("with Engine(", "reviewer = moved(reviewer)\nwith Engine("),
        source.count("with Engine("),
    )
    names: dict[str, Any] = {"moved": lambda agent: attrs.evolve(agent, handle_steps=handler, tools=["changed_files"])}

    exec(compile(edited, str(file), "exec"), names)  # which asserts what comes of it

    assert 1 == was
    assert RunStatus.COMPLETED is names["result"].status


# --- what else is seen of a handler -----------------------------------------------------------------------------------

MADE = '''
"""An agent."""
from stepengine import STEP, AgentCall, AgentDefinition, Ask, Parallel, Sleep, StepContext, Steps, ToolCall
from stepengine.errors import ToolError


def handle_steps(ctx: StepContext) -> Steps:
    ctx.logger.info("begins", n=1)
    how = ctx.prompt
    if how == "raises":
        raise ValueError("own")
    if how == "helper":
        yield from helper(ctx)
    if how == "child":
        yield from AgentCall("failing")
    if how == "bare":
        yield AgentCall("failing")
    if how == "wrong":
        yield 3
    if how == "tool":
        found = yield from ToolCall("nothing", {"n": 1})
    answer = yield from Ask("Go on?", ["yes", "no"])
    ctx.notify("asked", {"answer": answer})
    turn = yield ToolCall("note", {"name": answer + str(ctx.random.randint(1, 100))})
    try:
        yield from ToolCall("note", {"name": "second"})
    except ToolError as error:
        return str(error)
    return [turn.tool_result.text, ctx.now().isoformat()]


def helper(ctx):
    yield from Sleep(0)
    return {}[ctx.prompt]


def fail(ctx):
    yield from Sleep(0)
    raise RuntimeError("no")


failing = AgentDefinition("failing", handle_steps=fail)
agent = AgentDefinition("made", tools=["note"], spawnable_agents=[failing], handle_steps=handle_steps)
'''


@tool
def note(name: str) -> str:
    """Note."""
    return f"noted {name}"


def both(folder: Path) -> tuple[AgentDefinition[Any], AgentDefinition[Any]]:
    """Return the agent above, imported and only read."""
    file = folder / "made.py"
    file.write_text(MADE)
    (read,) = load_file(file)
    return load_agent(file), read


def told(agent: AgentDefinition[Any], how: str) -> tuple[Any, ...]:
    """Return what comes of a run, and what is said of it."""
    with Engine([agent], [note], models=ScriptedModel([]), default_model="test/m", clock=Clock()) as engine:
        result = engine.run_sync(agent, how)
    said = [str(child.error) for child in result.children]
    return result.status, str(result.error), result.warnings, said, [one.text for one in result.pending_questions]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore::stepengine.engine.handler_sources.SourceWarning")
@pytest.mark.spec("programs:PG42")
@pytest.mark.parametrize("how", ["raises", "helper", "child", "bare", "wrong", "tool", "asks"])
def test_an_error_has_the_same_words_and_place_as_outside(how: str, tmp_path: Path) -> None:
    plain, read = both(tmp_path)

    assert told(plain, how) == told(read, how)


@pytest.mark.filterwarnings("ignore::stepengine.engine.handler_sources.SourceWarning")
def test_a_discarded_failed_child_is_logged_as_outside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    for agent in both(tmp_path):
        caplog.clear()
        told(agent, "bare")
        seen.append(
            [record.getMessage() for record in caplog.records if "ignores a failed child" in record.getMessage()]
        )

    assert seen[0] == seen[1]
    assert len(seen[0]) == 1


@pytest.mark.spec("programs:PG42")
def test_a_walk_steps_a_sandboxed_handler_as_one_outside(tmp_path: Path) -> None:
    seen = []
    for agent in both(tmp_path):
        walk, steps = Walk(agent, "asks", seed=3), []
        for answer in ("yes", "noted", ToolResult.error("full")):
            steps.append((repr(walk.asked), walk.location))
            walk.send(answer)
        seen.append((steps, walk.returned, walk.notes))

    assert seen[0] == seen[1]
    assert "full" in str(seen[0][1])


PROCESS = """
import sys
from stepengine import Engine
from stepengine.journal import FileJournal
from stepengine.sandbox.untrusted_handlers import load_file
from stepengine.testing import Clock, ScriptedModel
from tests.sandbox.test_strangers import note

(agent,) = load_file(__import__("pathlib").Path(sys.argv[1]))
with Engine([agent], [note], models=ScriptedModel([]), default_model="test/m", clock=Clock()) as engine:
    result = engine.resume_sync(FileJournal(sys.argv[2]), answers={"q0": "yes"})
print(result.status.value, result.output)
"""


@pytest.mark.deep
@pytest.mark.spec("programs:PG42")
@pytest.mark.filterwarnings("ignore::stepengine.engine.handler_sources.SourceWarning")
def test_another_process_answers_and_a_replay_needs_no_sandbox(tmp_path: Path) -> None:
    plain, read = both(tmp_path)
    journal = FileJournal(tmp_path / "run.jsonl")
    with Engine([read], [note], models=ScriptedModel([]), default_model="test/m", clock=Clock()) as engine:
        waiting = engine.run_sync(read, "asks", journal=journal)
    words = [sys.executable, "-c", PROCESS, str(tmp_path / "made.py"), str(journal.path)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    with Engine([plain], [note], models=ScriptedModel([]), default_model="test/m", clock=Clock()) as engine:
        replayed = engine.replay_sync(journal)

    assert RunStatus.SUSPENDED is waiting.status
    assert RunStatus.COMPLETED is replayed.status
    assert ended.stdout.splitlines() == [f"completed {replayed.output}"], ended.stderr


PYTHON = [
    "list(map(str.strip, [' a', 'b ']))",
    "sorted(['b', 'A'], key=str.lower)",
    "str.join(', ', ['a', 'b'])",
    "list(map('<{}>'.format, [1, 2]))",
    "[give(n) for give in [found.append] for n in range(2)], list(found)",
    "(take := {'a': 1}.get)('a')",
    "list(map((\n    '<{}>'  # so\n)\n    .format, [1]))",
    "next((n for n in [1, 2] if n > 1), None)",
    "next(n for n in [1, 2] if n > 1)",
    "next((n for n in [] if n), 'none')",
    "cast(list[Sequence[int]], list(found))",
    "[isinstance(one, Mapping) for one in ({}, [], 'a')], [isinstance(one, Sequence) for one in ({}, [], 'a', (), 3)]",
    "[isinstance(one, (Iterable, int)) for one in ({}, [], 3, None)]",
    "Json is not None and Handler is not None",
    "[word.title() for word in ['a b']], 'ab'.index('b'), 'x'.replace('x', 'y')",
    "ChildResult[str] is ChildResult[str]",
]
STATEMENTS = [
    "found += (1, 2)",
    "found += map(str, [1])",
    "found += 'ab'",
    "found += [1] if found else (2,)",
    "text = 'a'\ntext += 'b'\nfound.append(text)",
    "kept = {'list': [1]}\nkept['list'] += (2,)\nfound.append(kept)",
    "found += yield from Race(Sleep(0), Sleep(9))\nfound.pop()",
    "n = 1\nn += (\n    2\n)\nfound.append(n)",
    "n = {ctx.agent_state.system_prompt: 1}\nn[ctx.agent_state.system_prompt] += 1\nfound += n.values()",
    "found.append([])\nfound[1 if ctx.agent_state.context else 0]+=ctx.agent_state.ancestor_run_ids\nfound[0] += (3,)",
]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("text", [*[f"found.append([{one}])" for one in PYTHON], *STATEMENTS])
def test_python_features_behave_as_outside_the_sandbox(text: str, tmp_path: Path) -> None:
    file = tmp_path / "python.py"
    body = text.replace("\n", "\n    ")
    file.write_text(
        "from collections.abc import Generator, Iterable, Mapping, Sequence\n"
        "from typing import Any, cast\n"
        "from stepengine import AgentDefinition, ChildResult, Race, Sleep\n"
        "Json = dict[str, Any]\nHandler = Generator[Any, Any, Any]\n"
        f"def handle_steps(ctx):\n    found = []\n    yield from Sleep(0)\n    {body}\n    return found\n"
        "agent = AgentDefinition('python', handle_steps=handle_steps)\n"
    )
    (read,) = load_file(file)
    results = []
    for agent in (load_agent(file), read):
        with Engine([agent], models=ScriptedModel([]), clock=Clock()) as engine:
            results.append(engine.run_sync(agent, "go"))

    assert RunStatus.COMPLETED is results[0].status, results[0].error
    assert (results[0].output, str(results[0].error)) == (results[1].output, str(results[1].error))


PETS = """
from typing import Any, Literal
from pydantic import BaseModel, ConfigDict
from typing_extensions import NotRequired, TypedDict
from stepengine import AgentDefinition, Sleep

class Cat(BaseModel):
    kind: Literal['cat']
    n: int
    note: str = 'meow'

class Dog(BaseModel):
    kind: Literal['dog']
    n: int

class Loose(BaseModel):
    model_config = ConfigDict(extra='allow')
    x: int
    of: dict[str, Any] = {}

class Tight(BaseModel):
    x: int
    y: int | None = None

class Size(TypedDict):
    w: int | None
    h: NotRequired[int | None]

class Params(BaseModel):
    sizes: list[Size | None] | dict[str, Size] = []
    pair: tuple[Size, int | None] | None = None
    pets: list[Cat | Dog | None] = []
    loose: Loose | None = None
    lists: list[Cat] | list[Dog] = []
    either: Tight | Dog | str = ''

def handle_steps(ctx):
    yield Sleep(0)
    p = ctx.params
    return [repr(p), p.model_dump(mode='json'), p.model_dump(mode='json', exclude_none=True), p.loose is not None and p.loose.x]

agent = AgentDefinition('pets', handle_steps=handle_steps, input_schema=Params)
"""
NUMBERS = st.integers(-9, 9)
CATS = st.fixed_dictionaries({"kind": st.just("cat"), "n": NUMBERS}, optional={"note": st.text(), "other": NUMBERS})
DOGS = st.fixed_dictionaries({"kind": st.just("dog"), "n": NUMBERS}, optional={"note": st.text()})
SIZES = st.fixed_dictionaries({"w": st.none() | NUMBERS}, optional={"h": st.none() | NUMBERS, "other": NUMBERS})
NULLS = st.dictionaries(st.text(), st.none() | NUMBERS | st.lists(st.none() | NUMBERS, max_size=2), max_size=2)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "pets": st.lists(CATS | DOGS | st.none(), max_size=3),
        "loose": st.none() | st.fixed_dictionaries({"x": NUMBERS}, optional={"of": NULLS, "q": st.none() | NUMBERS}),
        "lists": st.lists(CATS, max_size=2) | st.lists(DOGS, max_size=2),
        "sizes": st.lists(st.none() | SIZES, max_size=2) | st.dictionaries(st.text(), SIZES, max_size=2),
        "pair": st.tuples(SIZES, st.none() | NUMBERS).map(list),
        "either": DOGS | st.text() | st.fixed_dictionaries({"x": NUMBERS}, optional={"y": st.none() | NUMBERS}),
    },
)


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> list[AgentDefinition[Any]]:
    file = tmp_path_factory.mktemp("pets") / "pets.py"
    file.write_text(PETS)
    return [load_agent(file), *load_file(file)]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG42")
@settings(max_examples=20, deadline=None)
@given(params=PARAMS)
def test_params_become_the_same_objects_as_outside(pets: list[AgentDefinition[Any]], params: dict[str, Any]) -> None:
    results = []
    for agent in pets:
        with Engine([agent], models=ScriptedModel([])) as engine:
            results.append(engine.run_sync(agent, "go", params=params))

    assert RunStatus.COMPLETED is results[0].status, results[0].error
    assert results[0].output == results[1].output, results[1].error


@pytest.mark.parametrize("returned", ["x", "[...]", "{...}"])
def test_the_last_output_of_a_handler_is_logged(returned: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (agent,) = load_source(
        "from stepengine import AgentDefinition, Sleep\n"
        "def handle_steps(ctx):\n    print('first')\n    yield Sleep(0)\n"
        f"    print('the last words')\n    return {returned!r}\n"
        "agent = AgentDefinition('a', handle_steps=handle_steps)\n"
    )
    with Engine([agent], models=ScriptedModel([])) as engine:
        assert returned == engine.run_sync(agent, "go").output

    assert 1 == caplog.text.count("the last words")


def test_chance_is_drawn_from_the_run_as_outside(tmp_path: Path) -> None:
    file = tmp_path / "chance.py"
    file.write_text(
        "from stepengine import AgentDefinition, Sleep\n"
        "def handle_steps(ctx):\n"
        "    r, mixed = ctx.random, [1, 2, 3, 4, 5]\n"
        "    yield Sleep(0)\n"
        "    r.shuffle(mixed)\n"
        "    drawn = [r.random(), r.uniform(1, 2), r.gauss(0, 1), r.gauss(), r.getrandbits(40)]\n"
        "    drawn += [r.randint(1, 9), r.randrange(9), r.randrange(1, 9, 2), r.sample(range(9), 4), r.sample(mixed, k=2)]\n"
        "    return [*drawn, mixed, [r.choice('abc') for _ in range(9)], r.random()]\n"
        "agent = AgentDefinition('chance', handle_steps=handle_steps)\n"
    )
    (read,) = load_file(file)
    drawn = [Walk(agent, seed=3).send().returned for agent in (load_agent(file), read)]

    assert drawn[0] == drawn[1]


@pytest.mark.spec("reliability:LA6")
@pytest.mark.parametrize("of_host", [None, False, True])
@pytest.mark.parametrize("of_file", [None, False, True])
def test_a_file_asks_for_more_only_where_its_host_does(of_file, of_host):
    assert of_host is OwnLimits(max_steps=2, ask=of_file).resolve(Limits(ask=of_host)).ask
    assert OwnLimits(ask=of_file).resolve(None).ask is None


OUTPUTS = """
from stepengine import AgentDefinition, STEP_ALL

def handle_steps(ctx):
    seen = []
    for _ in range(2):
        turn = yield STEP_ALL
        seen.append([turn.output, turn.agent_state.output])
    return {"seen": seen}

agent = AgentDefinition("a", model="t/m", output_mode="structured_output", tools=["set_output"], handle_steps=handle_steps)
"""


@pytest.mark.spec("generator-contract:G22")
def test_a_sandboxed_handler_receives_the_output_of_its_turn():
    (agent,) = load_source(OUTPUTS)
    replies = [tool_call("set_output", {"number": "A1"}), "no"]
    with Engine([agent], models=ScriptedModel(replies)) as engine:
        assert engine.run_sync(agent, "go").output == {"seen": [[{"number": "A1"}] * 2, [None, {"number": "A1"}]]}


def test_an_untrusted_file_defines_at_most_200_agents() -> None:
    def agents(number: int) -> str:
        return (
            f"from stepengine import AgentDefinition\nagents = [AgentDefinition(f'a{{n}}') for n in range({number})]\n"
        )

    assert 200 == len(load_source(agents(200)))
    with pytest.raises(DefinitionError, match="the file defines more than 200 agents; split it"):
        load_source(agents(201))


def test_a_file_is_reloaded_only_when_its_text_changes(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("from stepengine import AgentDefinition\nagent = AgentDefinition('one')\n")
    first = load_file(file)

    assert load_file(file) is first
    file.write_text("from stepengine import AgentDefinition\nagent = AgentDefinition('two')\n")
    assert ["two"] == [agent.id for agent in load_file(file)]
