"""
Drafts of agent files that a model writes for the sandbox: the rules for such files, and tests before a person approves one.

The rules are made from the tables of the sandbox. A draft is tested with invented replies of the model and invented results of tools
and other agents. No tool of the host is called, no other agent is run, and no code of the draft runs outside of the sandbox.
"""

from __future__ import annotations

import inspect
import math
import unicodedata
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data import definition, hooks, limits, messages, models, state, transcript, waits, yields
from stepengine.data.definition import AgentDefinition
from stepengine.data.json import thaw
from stepengine.data.limits import Limits
from stepengine.data.messages import to_tuple
from stepengine.data.models import ModelReply
from stepengine.data.questions import Question
from stepengine.engine import loader
from stepengine.engine.engine import Engine
from stepengine.errors import DefinitionError
from stepengine.helpers import agents as children
from stepengine.helpers import calls
from stepengine.journal import MemoryJournal
from stepengine.sandbox.program_tool import ProgramLimits
from stepengine.sandbox.sandbox import MODULES
from stepengine.sandbox.source_rewriter import DROPPED, GENERATORS, KNOWN, NOT_HERE
from stepengine.sandbox.untrusted_handlers import load_source
from stepengine.testing import Clock, ScriptedModel, Simulated, simulate, tool_call, tool_calls
from stepengine.tools.bundled import reference

if TYPE_CHECKING:
    from stepengine.data.hooks import StepContext
    from stepengine.data.state import RunResult
    from stepengine.journal import JournalLike
    from stepengine.tools.definition import Tool

__all__ = ("Example", "agent_file_rules", "list_permissions", "load_draft_agents")

Said: TypeAlias = "str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | ModelReply"
HOMES = (yields, definition, hooks, limits, messages, models, state, transcript, waits, children, calls, loader)
"""The modules with the names of the package that a file may import, and their docstrings."""
UNSEEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
"""Categories of characters that are invisible to a reader, or that change the position of visible ones."""
EXAMPLE = '''\
"""Answers from the notes, and says which of them it used."""

from stepengine import STEP_ALL, AgentDefinition, StepContext, Steps, ToolCall


def handle_steps(ctx: StepContext) -> Steps[dict]:
    listing = yield from ToolCall("list_directory", {"path": "."}, include_tool_call=False)
    if not listing.data["files"]:
        return {"answer": "There are no notes.", "sources": []}
    turn = yield STEP_ALL
    return {"answer": turn.text, "sources": [name for name in listing.data["files"] if name in turn.text]}


agent = AgentDefinition(
    "note-reader",
    description="Answers questions from a folder of notes.",
    system_prompt="Answer from the notes. Read before you answer, and name the notes that you used.",
    tools=["list_directory", "read_files"],
    output_mode="structured_output",
    handle_steps=handle_steps,
)
'''


NOT_IN_SANDBOX = {"Complete": ("schema",)}
"""Parameters of stepengine's classes that are missing in the classes of the sandbox."""

# --- rules for the writer ---------------------------------------------------------------------------------------


def agent_file_rules() -> str:
    """Return the rules for agent files in the sandbox, made from the tables of the sandbox, as text for a model."""
    most = ProgramLimits()
    fields = [name for name in inspect.signature(AgentDefinition).parameters if name != "hooks"]
    plain = {name for name in KNOWN["stepengine"] - KNOWN["stepengine.errors"] if not _find_docstring_summary(name)}
    modules = sorted(name for name in MODULES if name not in {"os.path", "posixpath", "asyncio"})
    never = [f"- `{name}`: {why}." for name, why in NOT_HERE.items()]
    gives = {one.name: one.forms for one in reference.document_tools()}
    tools = [
        f"- `{tool.spec.name}({', '.join(_format_parameters(tool))})` gives {_describe_result_forms(gives[tool.spec.name])}: {_get_first_line(tool.spec.description)}"
        for tool in list_host_tools()
    ]
    return "\n".join(
        [
            "# The file",
            "An agent file defines `agent = AgentDefinition(...)`, or `agents = [...]`, and its handler is a plain generator function",
            "`def handle_steps(ctx)`: it yields what shall happen, and `yield from` gives what came of it. It runs in a sandbox. An agent",
            "that only talks and calls tools needs no handler. Write this:",
            f"```python\n{EXAMPLE}```",
            f"`AgentDefinition` takes {', '.join(fields)}. Its id is words in small letters with hyphens. What the handler returns is",
            "the output. `ctx.prompt` is the prompt, `ctx.params` the params by the input_schema (a class of the file derived from",
            "pydantic's BaseModel, or a JSON Schema), `ctx.random` is chance.",
            "# What it may import",
            *[
                f"- `{_format_export_signature(name)}`: {about}"
                for name in sorted(KNOWN["stepengine"])
                if (about := _find_docstring_summary(name))
            ],
            f"- types for annotations: {', '.join(sorted(plain))}",
            f"- from stepengine.errors: {', '.join(sorted(KNOWN['stepengine.errors']))}",
            f"- of Python: {', '.join(modules)}; for annotations and schema classes also {', '.join(sorted(DROPPED - {'__future__'}))}",
            "",
            f"{', '.join(sorted(GENERATORS))} and functions of your own that yield stand directly behind `yield from`.",
            "# What it may not",
            *never,
            "- no decorators, no `async`, no methods that yield, no files, network, clock or environment, no code when it is loaded.",
            f"- A turn may compute for {most.seconds:g} seconds and use {most.memory >> 20} MiB; the file has at most 64 KiB.",
            "# Tools of the host, by name",
            "List in `tools` those that it needs, and no others: they are its permissions, and a person decides about them.",
            *tools,
        ]
    )


def _find_exported_object(name: str) -> Any:
    """Return the object with a public name of the package; ``None`` if there is none."""
    return next((getattr(home, name) for home in HOMES if hasattr(home, name)), None)


def _find_docstring_summary(name: str) -> str:
    """Return the first line of the docstring of a class, function or step constant; ``""`` for other names, such as type aliases."""
    # Type aliases are for annotations, and have the docstring of their class.
    found = _find_exported_object(name)
    is_told = inspect.isclass(found) or inspect.isfunction(found) or name in {"STEP", "STEP_ALL"}
    return _get_first_line(inspect.getdoc(found) or "") if is_told else ""


def _format_export_signature(name: str) -> str:
    """Return a public name with its parameters, without those that the sandbox does not support."""
    if name in {"STEP", "STEP_ALL", "AgentDefinition"}:
        return name
    parameters = [
        one
        for one in inspect.signature(_find_exported_object(name)).parameters
        if one not in NOT_IN_SANDBOX.get(name, ())
    ]
    return f"{name}({', '.join(parameters)})"


def _get_first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _describe_result_forms(forms: Sequence[reference.Form]) -> str:
    """Return the forms of a tool's result in words, with their keys."""
    told = [
        f"{form.type} of {', '.join([key.name for key in form.keys])}" if form.keys else form.type for form in forms
    ]
    return " or ".join(told)


def _format_parameters(tool: Tool) -> list[str]:
    """Return the names of a tool's parameters, optional ones with ``=...``."""
    given: Mapping[str, Any] = tool.spec.input_schema
    required = given.get("required", ())
    return [name if name in required else f"{name}=..." for name in given.get("properties", {})]


def list_host_tools() -> list[Tool]:
    """Return the workspace tools that the command line offers to agents; only their names and schemas are used."""
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    known = {one.name for one in reference.document_tools()}
    return [tool for tool in list_all_workspace_tools(Path.cwd().anchor) if tool.name in known]


# --- checks ------------------------------------------------------------------------------------------------


def load_draft_agents(source: str, file: str) -> tuple[AgentDefinition, ...]:
    """
    Load a draft in the sandbox, and return its agents; raise ``DefinitionError`` if it breaks a rule for agent files.

    Raises:
        DefinitionError: With file and line, for code that cannot run in the sandbox, for invisible characters, for an id that cannot
            be a file name, and for the id of a bundled agent.
    """
    for number, line in enumerate(source.split("\n"), start=1):
        unseen = next((one for one in line if unicodedata.category(one) in UNSEEN and one != "\t"), None)
        if unseen is not None:
            msg = f"{file}:{number}: {unicodedata.name(unseen, hex(ord(unseen)))} cannot be seen by whoever reads the file; write it as an escape"
            raise DefinitionError(msg)
    agents = load_source(source, file=file)
    first = agents[0].id
    if not first.replace("-", "_").isidentifier():  # an agent file is named like a Python module
        msg = f"{file}: the id {first!r} is no name of a file; small letters, digits and single hyphens would be, as in 'note-reader'"
        raise DefinitionError(msg)
    for agent in _list_agents_with_nested(agents):
        if loader.find_bundled_id(agent.id) is not None:
            msg = f"{file}: {agent.id!r} is the id of an agent that comes with stepengine; choose another one"
            raise DefinitionError(msg)
    return agents


def list_permissions(agents: Iterable[AgentDefinition]) -> list[dict[str, Any]]:
    """Return for each agent, including nested ones, its tools, agents, model, and the limits that differ from the defaults."""
    told = []
    for agent in _list_agents_with_nested(agents):
        bounds = attrs.asdict(agent.limits)
        usual = attrs.asdict(Limits())
        told.append(
            {
                "agent": agent.id,
                "tools": list(agent.tool_names),
                "spawns": list(agent.spawnable_ids),
                "model": agent.model or "that of the run",
                "limits": {name: value for name, value in bounds.items() if value != usual[name] and value != math.inf},
            }
        )
    return told


def _list_agents_with_nested(agents: Iterable[AgentDefinition]) -> list[AgentDefinition]:
    """Return *agents* and, recursively, the agents that they may spawn as objects."""
    found = [*agents]
    for agent in found:
        found += [one for one in agent.spawnable_agents if not isinstance(one, str) and one not in found]
    return found


# --- tests ----------------------------------------------------------------------------------------------------


@frozen
class Example:
    """
    An example for an agent, with invented results of the model, the tools and other agents.

    Attributes:
        agents: The agents of a file; the first one is tested.
        prompt: Its prompt.
        params: Its params.
        replies: The replies of the model in order: a text, ``{"tool": name, "input": {...}}``, or a list of such calls.
        results: The results of tools, and of spawned agents that are not in the file, by name.
    """

    agents: tuple[AgentDefinition[Any], ...] = attrs.field(converter=to_tuple)
    prompt: str = attrs.field(kw_only=True)
    params: Any = attrs.field(default=None, kw_only=True)
    replies: Sequence[Said] = attrs.field(default=(), kw_only=True)
    results: Mapping[str, Any] = attrs.field(factory=dict, kw_only=True)

    def simulate(self, seeds: Iterable[int] = range(100)) -> Simulated:
        """
        Run the agent once per seed in a world where models, tools and processes fail, as ``stepengine.testing.simulate`` does.

        Raises:
            SimulationFailed: At the first seed with a run that violates an invariant of every run.
        """
        return self._simulate_with_fakes(seeds=seeds, prompt=self.prompt, params=self.params)

    def fail_each(self) -> Simulated:
        """
        Run the example, then once per effect with a failure of this effect.

        Raises:
            SimulationFailed: At the first failure after which the run violates an invariant of every run.
        """
        journal = MemoryJournal(redact="off")
        self.run(journal=journal)
        return self._simulate_with_fakes(from_journal=journal)

    def _simulate_with_fakes(self, **options: Any) -> Simulated:
        """Simulate the first agent with fakes of the host's tools and agents; *options* are those of ``simulate``."""
        first, *others = self.agents
        tools = self._make_fake_tools()
        results = {tool.spec.name: self._get_result_or_placeholder(tool.spec.name) for tool in tools}
        return simulate(first, tools=tools, results=results, agents=[*others, *self._make_fake_agents()], **options)

    def run(self, *, journal: JournalLike | None = None) -> RunResult[Any]:
        """Run the example once to its end; questions are answered with their first option, and waits take no time."""
        model = ScriptedModel([_to_model_reply(one) for one in self.replies])
        with Engine(
            [*self.agents, *self._make_fake_agents()], self._make_fake_tools(), model, default_model="made-up/model", clock=Clock(),
            interactor=_FirstOptionInteractor(),
        ) as engine:  # fmt: skip
            return engine.run_sync(self.agents[0], self.prompt, params=self.params, journal=journal)

    def _make_fake_tools(self) -> list[Tool]:
        """Return fakes of the host's tools that the agents list, with the real input schemas and invented results."""
        from stepengine.tools.definition import Tool

        listed = {name for agent in _list_agents_with_nested(self.agents) for name in agent.tool_names}
        return [
            Tool(
                tool.spec.name, tool.spec.description, thaw(tool.spec.input_schema), _make_constant_tool_body(self._get_result_or_placeholder(tool.spec.name)),
                requires_permission=False,
            )
            for tool in list_host_tools()
            if tool.spec.name in listed
        ]  # fmt: skip

    def _make_fake_agents(self) -> list[AgentDefinition]:
        """Return fakes of the agents that these agents may spawn by id and that are not in the file."""
        own = {agent.id for agent in _list_agents_with_nested(self.agents)}
        named = Counter(
            [name for agent in _list_agents_with_nested(self.agents) for name in agent.spawnable_ids if name not in own]
        )
        return [
            AgentDefinition(name, handle_steps=_make_constant_handler(self._get_result_or_placeholder(name)))
            for name in named
        ]

    def _get_result_or_placeholder(self, name: str) -> Any:
        """Return the example's result of a tool, or an invented one."""
        return self.results.get(name, f"a made-up result of {name}")


class _FirstOptionInteractor:
    def ask(self, question: Question) -> str:
        return question.options[0] if question.options else "yes"


def _make_constant_tool_body(result: Any) -> Any:
    return lambda _: result


def _make_constant_handler(output: Any) -> Any:
    def handle_steps(_: StepContext[Any]) -> Generator[Any, Any, Any]:
        return output
        yield

    return handle_steps


def _to_model_reply(reply: Said) -> str | ModelReply:
    """Return a reply of the example as text or ``ModelReply``: a text, a tool call, or several calls."""
    if isinstance(reply, str | ModelReply):
        return reply
    if isinstance(reply, Mapping):
        return tool_call(str(reply["tool"]), dict(reply.get("input") or {}))
    return tool_calls(*[tool_call(str(one["tool"]), dict(one.get("input") or {})) for one in reply])
