"""Generated trees of tools that yield: killed at a random effect, resumed, replayed, and each effect counted outside."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Ask, Engine, Parallel, Perform, RunStatus, Steps, ToolCall, tool
from stepengine.errors import StepEngineError, ToolError
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls

pytestmark = pytest.mark.spec("programs:PG2", "programs:PG5")

DEPTH = 4


class Outside:
    """The world that the effects change: it outlives every process."""

    def __init__(self) -> None:
        self._happened: list[str] = []

    def happen(self, what: str) -> str:
        # Two threads that count the same thing for the first time could both count one; to append is one step.
        self._happened.append(what)
        return f"done {what}"

    @property
    def done(self) -> Counter[str]:
        return Counter(self._happened)


def drawn(random: Random, depth: int = DEPTH, name: str = "t") -> dict[str, Any]:
    """Return what a body shall do: a tree of calls, groups, questions, children and failures."""
    steps = []
    for number in range(random.randint(1, 3)):
        mine = f"{name}.{number}"
        kinds = ["note", "perform", "fail", "ask", "child", *(["node", "group", "node", "group"] if depth else [])]
        kind = random.choice(kinds)
        step: dict[str, Any] = {"do": kind, "name": mine}
        if kind == "node":
            step["tree"] = drawn(random, depth - 1, mine)
        if kind == "group":
            members = [random.choice(["note", "perform", "ask", "node", "node"]) for _ in range(random.randint(2, 3))]
            step["members"] = [
                {"do": member, "name": f"{mine}.{n}"}
                | ({"tree": drawn(random, depth - 1, f"{mine}.{n}")} if member == "node" else {})
                for n, member in enumerate(members)
            ]
        steps.append(step)
    return {"name": name, "steps": steps, "raises": random.random() < 0.15}


def agent_of(outside: Outside, *, by_model: bool, tree: dict[str, Any]) -> AgentDefinition[Any]:
    """Return the agent whose tool does what a tree says, called by its model or its handler."""

    @tool(idempotent=True)
    def note(what: str) -> str:
        """Note something outside."""
        return outside.happen(what)

    helper = AgentDefinition(
        "helper", handle_steps=lambda ctx: (yield from Perform.idempotent(outside.happen, ctx.prompt))
    )

    def asked(step: dict[str, Any]) -> Any:
        name = step["name"]
        match step["do"]:
            case "note":
                return ToolCall("note", {"what": name})
            case "perform":
                return Perform.idempotent(outside.happen, name)
            case "ask":
                return Ask(f"{name}?", key=name.replace(".", "-"))
            case "child":
                return AgentCall("helper", name)
        return ToolCall("node", {"tree": step["tree"]})

    @tool(uses=[note, helper], parallel_safe=True)
    def node(tree: dict[str, Any]) -> Steps[Any]:
        """Do what a tree says."""
        said: list[Any] = []
        for step in tree["steps"]:
            try:
                if step["do"] == "fail":
                    raise ToolError(step["name"])
                if step["do"] == "group":
                    values = yield from Parallel(*[asked(member) for member in step["members"]])
                    said.append([getattr(value, "text", value) for value in values])
                else:
                    said.append((yield from asked(step)))
            except StepEngineError as error:
                said.append(f"failed: {error}")
        if tree["raises"]:
            raise ToolError(f"{tree['name']} gives up after {len(said)}")
        return [str(one) for one in said]

    def handler(ctx: Any) -> Any:
        first = yield ToolCall("node", {"tree": tree})
        both = yield from Parallel(ToolCall("node", {"tree": tree | {"name": "again"}}), AgentCall("helper", "beside"))
        return [first.tool_result.text, str(both[0])]

    fields: dict[str, Any] = {} if by_model else {"handle_steps": handler, "spawnable_agents": [helper]}
    return AgentDefinition("root", model="test/m", tools=[node], **fields)


def script(tree: dict[str, Any]) -> list[Any]:
    """Return what the model says: a batch of two, one alone, the end."""
    call = tool_call("node", {"tree": tree})
    return [tool_calls(call, tool_call("node", {"tree": tree | {"name": "second"}})), call, text("end")]


class AlwaysYes:
    """A person."""

    def ask(self, question: Any) -> str:
        return f"yes to {question.text}"


async def until_over(agent: AgentDefinition[Any], models: Any, journal: FileJournal, random: Random) -> Any:
    """Resume a run, answering its questions, sometimes only one of them, until it has ended."""
    made = Engine([agent], models=models)
    result = await made.resume(journal)
    for _ in range(200):
        if result.status is not RunStatus.SUSPENDED:
            return result
        asked = result.pending_questions if random.random() < 0.8 else random.sample(result.pending_questions, 1)
        result = await made.resume(journal, answers={question.id: f"yes to {question.text}" for question in asked})
    raise AssertionError(result)


def noted(journal: Path, lines: int) -> Counter[str]:
    """Return what the first so many lines of a journal have results of."""
    begun: dict[tuple[str, int], str] = {}
    done: Counter[str] = Counter()
    for line in journal.read_text().splitlines()[:lines]:
        record = json.loads(line)
        place = record.get("path", ""), record.get("seq", 0)
        effect = record.get("effect") or {}
        if record["kind"] == "intent" and effect.get("tool_name") == "note":
            begun[place] = effect["input"]["what"]
        if record["kind"] == "intent" and effect["type"] == "perform":
            begun[place] = effect["args"][0]
        if record["kind"] == "result" and place in begun:
            done[begun[place]] += 1
    return done


async def killed(seed: int, folder: Path) -> None:
    random = Random(seed)
    tree, by_model = drawn(random), seed % 2 == 0
    whole = Outside()
    agent = agent_of(whole, by_model=by_model, tree=tree)
    path = folder / f"{seed}.jsonl"
    # A process dies here, not the power: nothing has to wait for the disk.
    journal = FileJournal(path, sync="write")
    # The whole run, with a person who answers at once.
    ran = await Engine([agent], models=ScriptedModel(script(tree)), interactor=AlwaysYes()).run(
        agent, "go", journal=journal
    )
    assert ran.status is RunStatus.COMPLETED, ran.error
    replayed = await Engine([agent], models=ScriptedModel([])).replay(journal)
    assert replayed == ran
    # A process that died after any of its records, perhaps in the middle of one.
    content = path.read_bytes().splitlines(keepends=True)
    kept = random.randint(3, len(content))
    torn = content[kept][: random.randint(0, len(content[kept]) - 2)] if kept < len(content) else b""
    cut = folder / f"{seed}-cut.jsonl"
    cut.write_bytes(b"".join(content[:kept]) + torn)
    before = noted(path, kept)
    after = Outside()
    again = agent_of(after, by_model=by_model, tree=tree)
    said = sum(b'"kind":"result"' in line and b'"type":"model_reply"' in line for line in content[:kept])
    left = ScriptedModel(script(tree)[said:])
    result = await until_over(again, left, FileJournal(cut, sync="write"), random)
    assert (result.status, result.output, result.text) == (ran.status, ran.output, ran.text)
    assert [one.result for one in result.tool_calls] == [one.result for one in ran.tool_calls]
    assert before + after.done == whole.done
    assert await Engine([again], models=ScriptedModel([])).replay(cut) == result


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("seed", range(4))
async def test_killed_tree_reaches_the_same_end_without_repeats(seed: int, tmp_path: Path) -> None:
    await killed(seed, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("first", range(100, 300, 50))
async def test_hundreds_of_killed_trees_go_on_to_the_same_end(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        await killed(seed, tmp_path)
