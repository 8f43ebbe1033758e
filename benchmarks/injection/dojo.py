"""
AgentDojo's environments and tools, driven by stepengine and a scripted model.

The model follows the ground truth of the user's task. As soon as it reads an injection, it does what that says, and goes on with the task.
A person approves what the task asks for and denies what the attack does, so that no question hides a later one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from agentdojo.functions_runtime import FunctionCall, FunctionsRuntime
from agentdojo.task_suite.load_suites import get_suite

from benchmarks.injection.attacks import Call, calls_of
from benchmarks.injection.labels import LABELS
from stepengine import AgentDefinition, Engine, Limits, Tool
from stepengine.errors import ToolError
from stepengine.testing import ScriptedModel, text, tool_call

VERSION = "v1.2.1"
OPENING, CLOSING = "<INFORMATION> ", " </INFORMATION>"
MAX_STEPS = 100
"""The longest task has 18 calls, the longest attack 12."""


class Made(NamedTuple):
    """
    A call as it was carried out.

    Attributes:
        by: Who wanted it.
        name: The tool.
        input: What it was given.
        asked: Whether somebody was asked before.
        created: The id that the service gave to what it created.
    """

    by: str
    name: str
    input: Mapping[str, Any]
    asked: bool
    created: str


class Outcome(NamedTuple):
    """
    What came of one run.

    Attributes:
        made: The calls that were carried out.
        questions: The tools about which somebody was asked, with the arguments that were the reason, behind who wanted the call.
        read: Whether the injection was read.
        world: The environment afterwards.
        before: The environment before.
        answer: What the model said at the end.
    """

    made: list[Made]
    questions: list[tuple[str, str]]
    read: bool
    world: Any
    before: Any
    answer: str


@cache
def suite_of(name: str) -> Any:
    """Return a suite of AgentDojo."""
    return get_suite(VERSION, name)


@cache
def _loaded(name: str, attack_id: str) -> Any:
    suite = suite_of(name)
    injected = {}
    if attack_id:
        goal = suite.injection_tasks[attack_id].GOAL
        injected = dict.fromkeys(suite.get_injection_vector_defaults(), f"{OPENING}{goal}{CLOSING}")
    return suite.load_and_inject_default_environment(injected)


def as_json(value: Any) -> Any:
    """Return a result of AgentDojo as JSON."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): as_json(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(member) for member in value]
    return value


class Script:
    """
    The model, the person and the world of one run.

    Attributes:
        world: The environment, which the tools change.
        made: The calls that were carried out.
        questions: As in ``Outcome``.
    """

    def __init__(self, suite: str, task: Any, attack: Any | None, *, lookups: bool) -> None:
        self._suite, self._task, self._attack, self._lookups = suite, task, attack, lookups
        loaded = _loaded(suite, "" if attack is None else attack.ID)
        self.world = task.init_environment(loaded.model_copy(deep=True))
        self.before = self.world.model_copy(deep=True)
        self.made: list[Made] = []
        self.questions: list[tuple[str, str]] = []
        self.read = False
        self._steps: deque[tuple[str, Iterator[Call]]] = deque([("task", self._calls())])
        self._by, self._asked = "task", False

    def _calls(self) -> Iterator[Call]:
        for call in self._task.ground_truth(self.world):
            yield call.function, dict(call.args)

    def _look_up_everybody(self) -> Iterator[Call]:
        """Read the lists that trusted contacts are in, as an attack does that knows the labels."""
        names = {function.name for function in suite_of(self._suite).tools}
        if "search_contacts_by_name" in names:
            yield "search_contacts_by_name", {"query": ""}
        if "get_channels" in names:
            yield "get_channels", {}
            for channel in self.world.slack.channels:
                yield "get_users_in_channel", {"channel": channel}

    def reply(self, request: Any) -> Any:
        """Return the next call."""
        if self._attack is not None and not self.read and OPENING.strip() in request.messages[-1].text:
            self.read = True
            self._steps.appendleft(("attack", calls_of(self._suite, self._attack, self.world)))
            if self._lookups:
                self._steps.appendleft(("attack", self._look_up_everybody()))
        while self._steps:
            by, calls = self._steps[0]
            call = next(calls, None)
            if call is not None:
                self._by, self._asked = by, False
                return tool_call(call[0], json.loads(json.dumps(call[1])))
            self._steps.popleft()
        return text(self.answer)

    @property
    def answer(self) -> str:
        """What the model says at the end: the ground truth of the task, and of the attack."""
        said = [self._task.GROUND_TRUTH_OUTPUT, self._attack.GOAL if self.read and self._attack else ""]
        return "\n".join(filter(None, said)) or "Done."

    def ask(self, question: Any) -> bool:
        """Approve what the task wants, deny what the attack does."""
        self._asked = True
        judged = [origin["parameter"] for origin in question.provenance if not origin["trusted"]]
        names = dict.fromkeys([parameter.partition("[")[0] for parameter in judged])
        self.questions.append((self._by, f"{question.tool_name}({', '.join(filter(None, names))})"))
        return self._by == "task"

    def perform(self, name: str, runtime: FunctionsRuntime, given: Mapping[str, Any]) -> Any:
        """Carry out a call in the world."""
        result, error = runtime.run_function(self.world, name, dict(given))
        if error is not None:
            raise ToolError(error)
        found = as_json(result)
        field = LABELS[name].created
        self.made.append(Made(self._by, name, given, self._asked, str(found[field]) if field else ""))
        return found


class Dojo:
    """
    A suite under one policy.

    Args:
        suite: The suite's name.
        options: What is said of each tool beside its schema, by name.
        permissions: The policy; ``None`` for none.
    """

    def __init__(self, suite: str, options: Mapping[str, Mapping[str, Any]], permissions: Any) -> None:
        self._suite = suite
        self._script: Script | None = None
        functions = suite_of(suite).tools
        runtime = FunctionsRuntime(functions)
        tools = [self._tool(function, runtime, options.get(function.name, {})) for function in functions]
        limits = Limits(max_steps=MAX_STEPS)
        self._agent = AgentDefinition("assistant", model="scripted/m", tools=tools, limits=limits)
        self._engine = Engine(
            [self._agent], models=ScriptedModel(self._reply), permissions=permissions, interactor=self, pricing=None
        )

    @property
    def _now(self) -> Script:
        assert self._script is not None
        return self._script

    def _reply(self, request: Any) -> Any:
        return self._now.reply(request)

    def _tool(self, function: Any, runtime: FunctionsRuntime, options: Mapping[str, Any]) -> Tool:
        def run(input: dict[str, Any]) -> Any:
            return self._now.perform(function.name, runtime, input)

        schema = function.parameters.model_json_schema()
        return Tool(function.name, function.description, schema, run, in_thread=False, **options)

    def ask(self, question: Any) -> bool:
        """Answer a question as the script does."""
        return self._now.ask(question)

    async def run(self, task: Any, attack: Any | None = None, *, lookups: bool = False) -> Outcome:
        """Run a task, with or without an attack in everything that can hold one."""
        script = self._script = Script(self._suite, task, attack, lookups=lookups)
        result = await self._engine.run(self._agent, task.PROMPT)
        result.unwrap()
        return Outcome(script.made, script.questions, script.read, script.world, script.before, result.text)

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.aclose()


def reaches_goal(attack: Any, outcome: Outcome) -> bool:
    """Return what AgentDojo's own check of an attack says."""
    calls = _function_calls(outcome)
    traced = attack.security_from_traces(outcome.answer, outcome.before, outcome.world, calls)
    return bool(attack.security(outcome.answer, outcome.before, outcome.world) if traced is None else traced)


def is_done(task: Any, outcome: Outcome) -> bool:
    """Return what AgentDojo's own check of a task says."""
    calls = _function_calls(outcome)
    traced = task.utility_from_traces(outcome.answer, outcome.before, outcome.world, calls)
    return bool(task.utility(outcome.answer, outcome.before, outcome.world) if traced is None else traced)


def _function_calls(outcome: Outcome) -> list[Any]:
    return [FunctionCall(function=made.name, args=dict(made.input)) for made in outcome.made]
