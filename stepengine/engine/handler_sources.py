"""
Reads the source of handlers, tools and hooks, and reports lines that cannot do what their author meant.

Such a line fails only when a run reaches it, or not at all. The reader needs no run: it parses the file of the function and looks
up the names of each call among the function's globals. What it cannot look up it leaves alone. So it may miss a mistake, but it
reports no line that is right.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import attrs
from attrs import frozen

from stepengine.data.alike import did_you_mean
from stepengine.data.definition import AgentDefinition
from stepengine.data.functions import PACKAGE, unwrap_function
from stepengine.data.hooks import HOOK_POINTS, Hooks
from stepengine.data.tools import ToolBinding, ToolLike, Yielding
from stepengine.data.yields import AgentCall, Sentinel, ToolCall, get_tool_name
from stepengine.errors import BadYield
from stepengine.helpers import best_of, call, map_agents, retry
from stepengine.machine.batch import RUN_FREELY
from stepengine.machine.child_effects import find_matching_id
from stepengine.machine.protocol import get_yield_rows
from stepengine.tools.definition import Tool

INERT: Collection[object] = (
    *get_yield_rows("handler"), *get_yield_rows("hook"), *get_yield_rows("tool"), best_of, call, map_agents, retry,
)  # fmt: skip
"""Calls of these only return something to yield."""
CALLS_A_TOOL: Collection[object] = (ToolCall, call)
CALLS_AN_AGENT: Collection[object] = (AgentCall, map_agents, best_of)
KEPT_FILES = 64
"""A file is parsed once for all of its functions; an engine is made of the agents of a few files."""
ARGUMENTS_BEFORE_INCLUDE = 2
"""Arguments of ``ToolCall`` before ``include_tool_call``, which may have no name."""
MISSING = object()
# A service may build a definition for each run, all of the same code.
PARSED: WeakKeyDictionary[CodeType, tuple[_NameUse, ...]] = WeakKeyDictionary()
SHOWN: dict[str, dict[Any, Any]] = {}


class SourceWarning(UserWarning):
    """A line of an agent's code has no effect, or names a tool or an agent that is not available there."""


_Dotted: TypeAlias = tuple[str, ...]
"""The parts of a name in source code, such as ``stepengine.ToolCall``."""


@frozen
class _NameUse:
    """
    A call by name, or a statement that consists of a name.

    Attributes:
        line: Its line in the file.
        name: The name.
        is_call: Whether it is a call.
        is_statement: Whether its value is dropped.
        first: The first argument, if it is a name or a text.
        is_kept: Whether no argument with a name is ``include_tool_call=False``, as far as the source shows.
        count: How many arguments have no name.
    """

    line: int
    name: _Dotted
    is_call: bool = False
    is_statement: bool = False
    first: _Dotted | str | None = None
    is_kept: bool = False
    count: int = 0


@frozen
class AllowedNames:
    """
    The tools and agents that code of an agent may name.

    Attributes:
        tools: All tools of the run.
        offered: Names of the tools whose calls may enter the conversation.
        agents: Ids of the agents that it may spawn.
        is_open: Whether a source or a hook may add tools when a run starts; then an unknown name is no mistake.
    """

    tools: Mapping[str, ToolBinding]
    offered: Collection[str]
    agents: Collection[str]
    is_open: bool


class _FunctionScope(NamedTuple):
    """The names that a function may use, and the lists to add a missing tool or agent to."""

    names: AllowedNames
    for_tools: str
    for_agents: str


def warn_about_agent_sources(
    definition: AgentDefinition,
    names: AllowedNames,
    tools: Iterable[ToolLike],
    uses: Mapping[str, tuple[Collection[str], Collection[str]]],
    *,
    is_shared: bool,
) -> None:
    """
    Warn about statements without an effect, unknown names of tools and agents, and tools without a description.

    Args:
        definition: The agent; its handler and its own hooks are read.
        names: The names that its code may use.
        tools: The tools whose bodies are read.
        uses: By the name of a tool that yields, the names of the tools and agents that it carries.
        is_shared: Whether other agents have the same handler, so that a name in it may be meant for one of them.
    """
    listed = f"tools=[...] of agent {definition.id!r}", f"spawnable_agents=[...] of agent {definition.id!r}"
    scope = None if is_shared else _FunctionScope(names, *listed)
    _warn_about_function_source(definition.handle_steps, f"handle_steps of {definition.id!r}", scope)
    warn_about_hook_sources(f"agent {definition.id!r}", definition.hooks)
    for tool in tools:
        if isinstance(tool, Tool):
            _warn_about_tool_source(tool, _list_names_for_tool_body(tool.spec.name, names, uses))


def _list_names_for_tool_body(
    name: str, names: AllowedNames, uses: Mapping[str, tuple[Collection[str], Collection[str]]]
) -> AllowedNames:
    """
    Return the names that a tool's body may use: those of its agent and of ``uses=``.

    The body of a tool in another tool's ``uses=`` may use the names of every ``uses=``.
    """
    # The body of a carried tool also has what its callers carry, and any tool that carries others may be among these.
    is_carried = any(name in tools for tools, _ in uses.values())
    carried = list(uses.values()) if is_carried else [uses[name]] if name in uses else []
    offered = dict.fromkeys([*names.offered, *[tool for tools, _ in carried for tool in tools]])
    agents = dict.fromkeys([*names.agents, *[agent for _, ids in carried for agent in ids]])
    return attrs.evolve(names, offered=offered, agents=agents)


def _warn_about_tool_source(tool: Tool[..., Any], names: AllowedNames) -> None:
    """Warn about the source of a tool's body, and about a tool without a description."""
    name, function = tool.spec.name, _find_python_function(tool.body.fn)
    remedy = f"uses=[...] of the tool {name!r}"
    # The body of a tool that does not yield calls no other tool.
    is_generator = isinstance(tool.binding().runs, Yielding)
    _warn_about_function_source(
        tool.body.fn, f"tool {name!r}", _FunctionScope(names, remedy, remedy) if is_generator else None
    )
    if not tool.spec.description.strip() and function is not None and not _is_stepengine_function(function):
        text = (
            f"tool {name!r} has no description. Write a docstring: the model reads it to decide when to call the tool."
        )
        _emit_source_warning(text, function.__code__.co_filename, function.__code__.co_firstlineno)


def warn_about_hook_sources(owner: str, hooks: Hooks) -> None:
    """Warn about lines of hooks that have no effect."""
    for point in HOOK_POINTS:
        for hook in hooks.get_hooks(point):
            _warn_about_function_source(hook, f"the {point} hook of {owner}", None)


def _warn_about_function_source(fn: object, owner: str, scope: _FunctionScope | None) -> None:
    """Warn of each problem in the source of a function, and of its author's generator functions that it calls by name."""
    waiting, met = [_find_python_function(fn)], set[object]()
    for function in waiting:
        if function is None or function.__code__ in met or _is_stepengine_function(function):
            continue
        met.add(function.__code__)
        for line, text in _find_source_problems(function, owner, scope):
            _emit_source_warning(text, function.__code__.co_filename, line)
        called = [_resolve_name(function, one.name) for one in _find_dotted_name_uses(function) if one.is_call]
        waiting += [_find_python_function(one) for one in called if inspect.isgeneratorfunction(one)]


def _is_stepengine_function(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(PACKAGE)


def _emit_source_warning(text: str, file: str, line: int) -> None:
    """Emit a ``SourceWarning`` for a line; the same warning about a line is shown once, however many agents have it."""
    # The registry of the file, as `warnings.warn` has it: one line is reported once, however many agents have it.
    warnings.warn_explicit(text, SourceWarning, file, line, registry=SHOWN.setdefault(file, {}))


def _find_source_problems(
    function: FunctionType, owner: str, scope: _FunctionScope | None
) -> Iterator[tuple[int, str]]:
    """Yield line and text of each problem of a function: values without effect, and, with *scope*, wrong tool and agent names."""
    for one in _find_dotted_name_uses(function):
        value = _resolve_name(function, one.name)
        problems = [_find_unused_value_problem(one, value) if one.is_statement else ""]
        if scope is not None and one.is_call:
            named = _resolve_name(function, one.first) if isinstance(one.first, tuple) else one.first
            if _is_identical_to_any(value, CALLS_A_TOOL):
                is_kept = one.is_kept and (value is not ToolCall or one.count <= ARGUMENTS_BEFORE_INCLUDE)
                problems.append(_find_tool_name_problem(named, scope, is_kept=is_kept))
            elif _is_identical_to_any(value, CALLS_AN_AGENT):
                problems.append(_find_agent_name_problem(named, scope))
        yield from [(one.line, f"{owner}: {problem}") for problem in problems if problem]


def _is_identical_to_any(value: object, known: Collection[object]) -> bool:
    # By identity: a value of the author's may be compared by code of the author's.
    return any(value is one for one in known)


def _find_unused_value_problem(name_use: _NameUse, value: object) -> str:
    """Return why a statement that consists of one call or name has no effect; ``""`` if it may have one."""
    written = ".".join(name_use.name)
    if name_use.is_call and (_is_identical_to_any(value, INERT) or inspect.isgeneratorfunction(value)):
        return f"{written}(...) has no effect by itself. Write `yield from {written}(...)`."
    if not name_use.is_call and isinstance(value, Sentinel):
        return f"{written} has no effect by itself. Write `yield {written}`."
    return ""


def _find_tool_name_problem(tool: Any, scope: _FunctionScope, *, is_kept: bool) -> str:
    """Return why a call may not name this tool; ``""`` if it may, or if its name is unknown; *is_kept*: the call is in the history."""
    try:
        name = get_tool_name(tool)
    except BadYield:
        return ""
    if name not in scope.names.tools:
        if scope.names.is_open:
            return ""
        near = did_you_mean(name, scope.names.tools) or f". List it in {scope.for_tools}."
        return f"the tool {name!r} is not available{near}"
    if not is_kept or name in scope.names.offered or scope.names.tools[name].runs.how not in RUN_FREELY:
        return ""
    return (
        f"the tool {name!r} is not in the tools of the agent. List it in {scope.for_tools}, or call it with "
        f"ToolCall({name!r}, {{...}}, include_tool_call=False)."
    )


def _find_agent_name_problem(agent: object, scope: _FunctionScope) -> str:
    """Return why a call may not name this agent; ``""`` if it may, or if its name is not known here."""
    if not isinstance(agent, str) or find_matching_id(agent, dict.fromkeys(scope.names.agents)) is not None:
        return ""
    near = did_you_mean(agent, scope.names.agents) or f". List it in {scope.for_agents}."
    return f"the agent {agent!r} may not be spawned{near}"


# --- source text ------------------------------------------------------------------------------------------------------


def _find_python_function(fn: object) -> FunctionType | None:
    """Return the function whose code runs when *fn* is called, ``None`` where that is not Python code."""
    found: Any = unwrap_function(fn)
    found = inspect.unwrap(found) if callable(found) else None
    found = getattr(found, "__func__", found)
    return found if isinstance(found, FunctionType) else None


def _find_dotted_name_uses(function: FunctionType) -> tuple[_NameUse, ...]:
    """Return the calls of dotted names in a function, and the statements that are only such a name, except names it binds itself."""
    code = function.__code__
    if code not in PARSED:
        found = _parse_name_uses(_read_function_file(function)).get((code.co_firstlineno, code.co_name), ())
        # Only a run could tell what a name means that the function binds itself.
        own = _list_locally_bound_names(code)
        PARSED[code] = tuple(
            [
                attrs.evolve(one, first=None) if isinstance(one.first, tuple) and one.first[0] in own else one
                for one in found
                if one.name[0] not in own
            ]
        )
    return PARSED[code]


def _read_function_file(function: FunctionType) -> str:
    """Return the text of a function's file as it was loaded, if its loader has it; else the text of the file."""
    loader: Any = function.__globals__.get("__loader__")
    file = function.__code__.co_filename
    # A module that is loaded from other text than its file holds knows that text; the file would show other lines.
    if getattr(loader, "path", None) == file:
        try:
            return loader.get_source(function.__globals__["__name__"]) or ""
        except (ImportError, OSError, SyntaxError):
            return ""
    return "".join(linecache.getlines(file))


@lru_cache(KEPT_FILES)
def _parse_name_uses(text: str) -> Mapping[tuple[int, str], tuple[_NameUse, ...]]:
    """Return the name uses of each function in a file, by first line and name; none for text that does not parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        (min([node.lineno, *[d.lineno for d in node.decorator_list]]), node.name): tuple(
            _iterate_dotted_name_uses(node)
        )
        for node in functions
    }


def _iterate_dotted_name_uses(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_NameUse]:
    """Yield each call of a dotted name in a function, such as ``f()`` or ``module.f()``, and each statement that is only such a name."""
    nodes = [inner for part in (*function.body, function.args) for inner in ast.walk(part)]
    dropped = {id(node.value): node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Call) and (name := _find_dotted_name(node.func)):
            yield _name_use_from_call(node, name, is_statement=id(node) in dropped)
    for value in dropped.values():
        if name := _find_dotted_name(value):
            yield _NameUse(value.lineno, name, is_statement=True)


def _name_use_from_call(node: ast.Call, name: _Dotted, *, is_statement: bool) -> _NameUse:
    """Return what a call in a handler's source says about its tool or agent."""
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    first = node.args[0] if node.args else named.get("tool", named.get("agent"))
    # Whatever is passed on with `*` or `**` may hold it.
    is_kept = None not in named and not any(isinstance(one, ast.Starred) for one in node.args)
    if include := named.get("include_tool_call"):
        is_kept = isinstance(include, ast.Constant) and include.value is True
    said = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else _find_dotted_name(first)
    return _NameUse(node.lineno, name, True, is_statement, said, is_kept, len(node.args))


def _find_dotted_name(node: ast.expr | None) -> _Dotted | None:
    """Return the parts of a dotted name, or ``None`` for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) else None


def _resolve_name(function: FunctionType, name: _Dotted) -> object:
    """
    Return the value of a name among a function's closure variables and globals, with attributes of modules only.

    ``MISSING`` stands for all other names, such as builtins and attributes of objects.
    """
    (first, *rest), code = name, function.__code__
    value: Any = MISSING
    if first in code.co_freevars:
        with contextlib.suppress(ValueError):  # not bound yet
            value = (function.__closure__ or ())[code.co_freevars.index(first)].cell_contents
    else:
        value = function.__globals__.get(first, MISSING)
    for attribute in rest:
        # Of anything else than a module, an attribute may be computed by code of the author's.
        if not isinstance(value, ModuleType):
            return MISSING
        value = getattr(value, attribute, MISSING)
    return value


def _list_locally_bound_names(code: CodeType) -> set[str]:
    """Return the names that a function, or one within it, binds itself."""
    inner = [_list_locally_bound_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_varnames, *code.co_cellvars}.union(*inner)
