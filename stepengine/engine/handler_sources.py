"""
Reads the source of handlers, tools and hooks, and reports lines that cannot do what their author meant.

Such a line fails only when a run reaches it, or not at all. The reader needs no run: it parses the file of the function and looks
up the names of each call among the function's globals. What it cannot look up it leaves alone. So it may miss a mistake, but it
reports no line that is right.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import attrs
from attrs import frozen

from stepengine.data.alike import did_you_mean
from stepengine.data.definition import AgentDefinition
from stepengine.data.functions import PACKAGE, unwrapped
from stepengine.data.hooks import HOOK_POINTS, Hooks
from stepengine.data.tools import ToolBinding, ToolLike, Yielding
from stepengine.data.yields import AgentCall, Sentinel, ToolCall, tool_name_of
from stepengine.errors import BadYield
from stepengine.helpers import best_of, call, map_agents, retry
from stepengine.machine.batch import RUN_FREELY
from stepengine.machine.protocol import rows_for
from stepengine.machine.spawning import matching_id
from stepengine.tooling.definition import Tool

__all__ = ("Names", "SourceWarning", "check_agent_sources", "check_hook_sources")

YIELDABLES: Collection[object] = {*rows_for("handler"), *rows_for("hook"), *rows_for("tool")}
HELPERS: Collection[object] = (best_of, call, map_agents, retry)
CALLS_A_TOOL: Collection[object] = (ToolCall, call)
CALLS_AN_AGENT: Collection[object] = (AgentCall, map_agents, best_of)
# A file is parsed once for all of its functions.
MAX_FILES = 64
MISSING = object()
# A service may build a definition for each run, all of the same code.
PARSED: WeakKeyDictionary[CodeType, _Source | None] = WeakKeyDictionary()
SHOWN: dict[str, dict[Any, Any]] = {}


class SourceWarning(UserWarning):
    """A line of an agent's code has no effect, or names a tool or an agent that is not available there."""


class _Dotted(NamedTuple):
    """A name in source code, such as ``stepengine.ToolCall``."""

    parts: tuple[str, ...]


_Argument: TypeAlias = "_Dotted | str | bool | None"
"""An argument of a call: a name, a constant, or ``None`` for any other expression."""


@frozen
class _Call:
    """A call in source code: the line, the called name, the first argument and ``include_tool_call=``."""

    line: int
    callee: _Dotted
    first: _Argument
    keeps: _Argument


@frozen
class _Source:
    """
    The source of one function.

    Attributes:
        dropped: Lines of statements that consist of one call or one name, with that name.
        calls: All calls by name.
        local: Names that the function binds itself.
    """

    dropped: tuple[tuple[int, _Dotted, bool], ...]
    calls: tuple[_Call, ...]
    local: frozenset[str]


@frozen
class Names:
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


class _Scope(NamedTuple):
    """The names that a function may use, and where a missing tool or agent is listed."""

    names: Names
    for_tools: str
    for_agents: str


def check_agent_sources(
    definition: AgentDefinition,
    names: Names,
    tools: Iterable[ToolLike],
    uses: Mapping[str, tuple[Collection[str], Collection[str]]],
    *,
    is_shared: bool,
) -> None:
    """
    Warn about code of an agent that has no effect, or names a tool or an agent that it does not have, and about undescribed tools.

    Args:
        definition: The agent; its handler and its own hooks are read.
        names: What its code may name.
        tools: The tools whose bodies are read.
        uses: By the name of a tool that yields, the names of the tools and agents that it carries.
        is_shared: Whether other agents have the same handler. What that names may then be for one of them.
    """
    listed = f"tools=[...] of agent {definition.id!r}", f"spawnable_agents=[...] of agent {definition.id!r}"
    scope = None if is_shared else _Scope(names, *listed)
    _check(definition.handle_steps, f"handle_steps of {definition.id!r}", scope)
    check_hook_sources(f"agent {definition.id!r}", definition.hooks)
    for tool in tools:
        if isinstance(tool, Tool):
            _check_tool(tool, _names_of_body(tool.spec.name, names, uses))


def _names_of_body(name: str, names: Names, uses: Mapping[str, tuple[Collection[str], Collection[str]]]) -> Names:
    """Return the names that a tool's body may use: those of its agent and of ``uses=``."""
    # The body of a carried tool also has what its callers carry, and any tool that carries others may be among these.
    is_carried = any(name in tools for tools, _ in uses.values())
    carried = list(uses.values()) if is_carried else [uses[name]] if name in uses else []
    offered = dict.fromkeys([*names.offered, *[tool for tools, _ in carried for tool in tools]])
    agents = dict.fromkeys([*names.agents, *[agent for _, ids in carried for agent in ids]])
    return attrs.evolve(names, offered=offered, agents=agents)


def _check_tool(tool: Tool[..., Any], names: Names) -> None:
    name, function = tool.spec.name, _function_of(tool.body.fn)
    remedy = f"uses=[...] of the tool {name!r}"
    # The body of a tool that does not yield calls no other tool.
    is_generator = isinstance(tool.binding().runs, Yielding)
    _check(tool.body.fn, f"tool {name!r}", _Scope(names, remedy, remedy) if is_generator else None)
    if not tool.spec.description.strip() and function is not None and not _is_ours(function):
        text = (
            f"tool {name!r} has no description. Write a docstring: the model reads it to decide when to call the tool."
        )
        _warn(text, function.__code__.co_filename, function.__code__.co_firstlineno)


def check_hook_sources(owner: str, hooks: Hooks) -> None:
    """Warn about lines of hooks that have no effect."""
    for point in HOOK_POINTS:
        for hook in hooks.at(point):
            _check(hook, f"the {point} hook of {owner}", None)


def _check(fn: object, owner: str, scope: _Scope | None) -> None:
    """Check a function, and the generator functions of its author that it calls by name."""
    waiting, met = [_function_of(fn)], set[object]()
    for function in waiting:
        if function is None or function.__code__ in met or _is_ours(function):
            continue
        met.add(function.__code__)
        source = _source_of(function)
        if source is None:
            continue
        for line, text in _findings(function, source, owner, scope):
            _warn(text, function.__code__.co_filename, line)
        called = [_look_up(function, source, one.callee) for one in source.calls]
        waiting += [_function_of(one) for one in called if inspect.isgeneratorfunction(one)]


def _is_ours(function: FunctionType) -> bool:
    return function.__code__.co_filename.startswith(PACKAGE)


def _warn(text: str, file: str, line: int) -> None:
    # The registry of the file, as `warnings.warn` has it: one line is reported once, however many agents have it.
    warnings.warn_explicit(text, SourceWarning, file, line, registry=SHOWN.setdefault(file, {}))


def _findings(function: FunctionType, source: _Source, owner: str, scope: _Scope | None) -> Iterator[tuple[int, str]]:
    for line, name, is_call in source.dropped:
        problem = _dropped_problem(_look_up(function, source, name), ".".join(name.parts), is_call=is_call)
        if problem:
            yield line, f"{owner}: {problem}"
    for one in source.calls if scope is not None else ():
        named = _look_up(function, source, one.first) if isinstance(one.first, _Dotted) else one.first
        problem = _call_problem(_look_up(function, source, one.callee), named, one.keeps, cast("_Scope", scope))
        if problem:
            yield one.line, f"{owner}: {problem}"


def _dropped_problem(value: object, written: str, *, is_call: bool) -> str:
    """Return why a statement that consists of one call or name has no effect; ``""`` if it may have one."""
    if is_call and _is_inert(value):
        return f"{written}(...) has no effect by itself. Write `yield from {written}(...)`."
    if not is_call and isinstance(value, Sentinel):
        return f"{written} has no effect by itself. Write `yield {written}`."
    return ""


def _call_problem(callee: object, named: object, keeps: _Argument, scope: _Scope) -> str:
    if any(callee is one for one in CALLS_A_TOOL):
        return _tool_problem(named, keeps, scope)
    return _agent_problem(named, scope) if any(callee is one for one in CALLS_AN_AGENT) else ""


def _is_inert(value: object) -> bool:
    """Return whether a call of *value* only returns something to yield."""
    if isinstance(value, type):
        return value in YIELDABLES
    return any(value is one for one in HELPERS) or inspect.isgeneratorfunction(value)


def _tool_problem(tool: Any, keeps: _Argument, scope: _Scope) -> str:
    try:
        name = tool_name_of(tool)
    except BadYield:
        return ""
    if name not in scope.names.tools:
        if scope.names.is_open:
            return ""
        near = did_you_mean(name, scope.names.tools) or f". List it in {scope.for_tools}."
        return f"the tool {name!r} is not available{near}"
    # Only what is known for certain: any other expression may be `False` when the line runs. A tool that comes with the
    # package is made when its binding is asked for, so that is done last.
    if name in scope.names.offered or keeps is not True or scope.names.tools[name].runs.how not in RUN_FREELY:
        return ""
    return (
        f"the tool {name!r} is not listed by the agent. List it in {scope.for_tools}, or call it with "
        f"ToolCall({name!r}, {{...}}, include_tool_call=False)."
    )


def _agent_problem(agent: object, scope: _Scope) -> str:
    if not isinstance(agent, str) or matching_id(agent, dict.fromkeys(scope.names.agents)) is not None:
        return ""
    near = did_you_mean(agent, scope.names.agents) or f". List it in {scope.for_agents}."
    return f"the agent {agent!r} may not be spawned{near}"


# --- source text ------------------------------------------------------------------------------------------------------


def _function_of(fn: object) -> FunctionType | None:
    """Return the function whose code runs when *fn* is called, ``None`` where that is not Python code."""
    found: Any = unwrapped(fn)
    found = inspect.unwrap(found) if callable(found) else None
    found = getattr(found, "__func__", found)
    return found if isinstance(found, FunctionType) else None


def _source_of(function: FunctionType) -> _Source | None:
    code = function.__code__
    if code not in PARSED:
        PARSED[code] = _read(_text_of(function)).get((code.co_firstlineno, code.co_name))
    return PARSED[code]


def _text_of(function: FunctionType) -> str:
    """Return the text that the file of a function had when it was loaded, as far as that is known."""
    loader: Any = function.__globals__.get("__loader__")
    file = function.__code__.co_filename
    # A module that is loaded from other text than its file holds knows that text; the file would show other lines.
    if getattr(loader, "path", None) == file:
        try:
            return loader.get_source(function.__globals__["__name__"]) or ""
        except (ImportError, OSError, SyntaxError):
            return ""
    return "".join(linecache.getlines(file))


@lru_cache(MAX_FILES)
def _read(text: str) -> Mapping[tuple[int, str], _Source]:
    """Return the functions of a file by first line and name; none for text that this Python cannot parse."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        (min([node.lineno, *[d.lineno for d in node.decorator_list]]), node.name): _parse(node) for node in functions
    }


def _parse(function: ast.FunctionDef | ast.AsyncFunctionDef) -> _Source:
    dropped: list[tuple[int, _Dotted, bool]] = []
    calls: list[_Call] = []
    local: set[str] = set()
    for node in [inner for statement in function.body for inner in ast.walk(statement)] + list(ast.walk(function.args)):
        local.update(filter(None, _bound_names(node)))
        if isinstance(node, ast.Expr):
            is_call = isinstance(node.value, ast.Call)
            name = _dotted(node.value.func if isinstance(node.value, ast.Call) else node.value)
            if name is not None:
                dropped.append((node.lineno, name, is_call))
        elif isinstance(node, ast.Call) and (name := _dotted(node.func)) is not None:
            calls.append(_Call(node.lineno, name, _first(node), _keeps(node)))
    return _Source(tuple(dropped), tuple(calls), frozenset(local))


def _bound_names(node: ast.AST) -> Iterable[str | None]:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return (name,)
        case ast.arg(arg=name):
            return (name,)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return (name,)
        case ast.MatchMapping(rest=name):
            return (name,)
        case ast.alias(name=name, asname=alias):
            return (alias or name.partition(".")[0],)
        case _:
            return ()


def _dotted(node: ast.expr) -> _Dotted | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return _Dotted((node.id, *reversed(parts))) if isinstance(node, ast.Name) else None


def _argument(node: ast.expr | None) -> _Argument:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bool):
        return node.value
    return None if node is None else _dotted(node)


def _first(node: ast.Call) -> _Argument:
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    return _argument(node.args[0] if node.args else named.get("tool", named.get("agent")))


def _keeps(node: ast.Call) -> _Argument:
    """Return ``include_tool_call=`` of a call, ``True`` where it is left out; it is the third of ``ToolCall``."""
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    if "include_tool_call" in named:
        return _argument(named["include_tool_call"])
    # Whatever is passed on with `*` or `**` may hold it.
    return None if None in named or any(isinstance(one, ast.Starred) for one in node.args) else True


def _look_up(function: FunctionType, source: _Source, name: _Dotted) -> object:
    """Resolve a name in a function; ``MISSING`` if only a run could tell."""
    first, *rest = name.parts
    if first in source.local:
        return MISSING
    value: Any = _closure(function).get(first, MISSING)
    if value is MISSING:
        value = function.__globals__.get(first, MISSING)
    for attribute in rest:
        # Of anything else than a module, an attribute may be computed by code of the author's.
        if not isinstance(value, ModuleType):
            return MISSING
        value = getattr(value, attribute, MISSING)
    return value


def _closure(function: FunctionType) -> Mapping[str, object]:
    found: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not bound yet
            found[name] = MISSING
    return found
