"""
The parts of an agent's file that can be changed without changing its code: prompts, tool texts, settings, defaults of params.

A part is a literal in the source. A version of the agent is the source with other literals, loaded like the file. So a measured
version is exactly the one that a diff of the file shows. This module runs no agent.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.tools import ToolLike
from stepengine.engine.loader import AgentLocation, load_agents_from_source
from stepengine.errors import DataError, DefinitionError

MOST_CHARS = 20_000
"""The maximum length of a new text; a text that was longer may keep its length."""
MAX_SOURCE = 4 * 1024 * 1024
PROMPTS = ("system_prompt", "instructions_prompt", "step_prompt")
SCALARS = (str, int, float, bool)
QUOTES = '"""'
FORMS = "a string literal, or the name of one at the top of the file"


@frozen
class Part:
    """
    A literal in an agent file that can be changed.

    Attributes:
        name: ``system_prompt``, ``tools.look``, ``settings.temperature``, ``params.limit``; with the prefix ``ID.`` for another
            agent in the file.
        value: Its current value.
        line: Its line.
    """

    name: str
    value: Any
    line: int
    _start: int = attrs.field(repr=False)
    _end: int = attrs.field(repr=False)
    _is_docstring: bool = attrs.field(default=False, repr=False)

    def find_value_problem(self, value: object) -> str:
        """Return why *value* cannot replace the literal, as far as this is known before the file is loaded, or ``""``."""
        if type(value) is not type(self.value) and not (isinstance(self.value, float) and type(value) is int):
            return f"{self.name} must have the type {type(self.value).__name__}, not {type(value).__name__}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{self.name} must be a finite number, not {value}"
        if not isinstance(value, str):
            return ""
        most = max(MOST_CHARS, len(str(self.value)))
        if len(value) > most:
            return f"a text of {len(value)} characters for {self.name} is too long; at most {most} are allowed"
        if not value.strip():
            return f"the text for {self.name} is empty"
        if "\0" in value or value.encode("utf-8", "replace").decode() != value:
            return f"the text for {self.name} contains characters that cannot be written to a file"
        return ""


@frozen
class AgentFile:
    """
    The file of an agent, and its changeable literals.

    Attributes:
        file: The file.
        agent_id: The id of the agent in it.
        source: Its content.
        parts: The changeable literals, by name.
        fixed: The prompts that cannot be changed, each with the reason.
    """

    file: Path
    agent_id: str
    source: bytes = attrs.field(repr=False)
    parts: Mapping[str, Part]
    fixed: Mapping[str, str]

    @classmethod
    def load(cls, location: AgentLocation) -> AgentFile:
        """
        Run the file of an agent, and return it with the changeable literals of its agents; raise an error if it lacks the agent.

        Raises:
            DataError: when the file cannot be read.
            DefinitionError: when the file has no such agent.
        """
        agent = location.load()
        try:
            source = location.file.read_bytes()
            source.decode()
        except (OSError, UnicodeDecodeError) as error:
            msg = f"{location.file} cannot be read as UTF-8: {error}"
            raise DataError(msg) from None
        if len(source) > MAX_SOURCE:
            msg = f"{location.file} is larger than {MAX_SOURCE} bytes"
            raise DataError(msg)
        found = _AgentSource(source, agent, location.file.resolve())
        # A text that is used twice is one part: both uses change with it.
        places: dict[int, Part] = {}
        for part in found.find_parts():
            places.setdefault(part._start, part)  # noqa: SLF001
        parts = {part.name: part for part in places.values()}
        return cls(location.file, agent.id, source, parts, found.fixed)

    def source_with_changes(self, changes: Mapping[str, Any]) -> bytes:
        """
        Return the source with *changes*: new values by the names of parts.

        Raises:
            DataError: when there is no such part, or it cannot hold such a value.
        """
        text = self.source
        for name in changes:
            if name not in self.parts:
                msg = f"{self.file} has no changeable part {name!r}; changeable parts: {list_names(self.parts, name)}"
                raise DataError(msg)
            if problem := self.parts[name].find_value_problem(changes[name]):
                raise DataError(problem)
        for part in sorted([self.parts[name] for name in changes], key=lambda part: -part._start):  # noqa: SLF001
            text = _replace_part_literal(text, part, changes[part.name])
        return text

    def is_file_unchanged(self) -> bool:
        """Return whether the file still has the content that was read; False for an unreadable file."""
        try:
            return self.file.read_bytes() == self.source
        except OSError:
            return False

    def load_with_changes(self, changes: Mapping[str, Any]) -> AgentDefinition:
        """
        Load the agent from its source with *changes*, without a change of the file.

        Raises:
            DataError: as in ``source_with_changes``.
            DefinitionError: when the changed source cannot be loaded.
        """
        found = load_agents_from_source(self.file, self.source_with_changes(changes))
        for agent in found:
            if normalised_id(agent.id) == normalised_id(self.agent_id):
                return agent
        msg = f"after a change of {', '.join(changes)}, {self.file} no longer has an agent {self.agent_id!r}"
        raise DefinitionError(msg)

    def diff_changes(self, changes: Mapping[str, Any]) -> str:
        """Return the effect of *changes* on the file as a unified diff; errors are those of ``source_with_changes``."""
        # Lines as `patch` knows them: ``splitlines`` ends some at form feeds, and at what texts may hold.
        before, after = [
            StringIO(text.decode(), "\n").readlines() for text in (self.source, self.source_with_changes(changes))
        ]
        name = self.file.name if self.file.is_absolute() else self.file.as_posix()
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        return "".join([line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines])


class _AgentSource:
    """
    The syntax tree of an agent's file.

    Args:
        source: The content of the file.
        agent: The loaded agent.
        file: The file.
    """

    def __init__(self, source: bytes, agent: AgentDefinition, file: Path) -> None:
        self.fixed: dict[str, str] = {}
        self._source = source
        self._agent = agent
        self._file = file
        self._tree = ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._family = _collect_agent_and_descendants(agent)

    def find_parts(self) -> Iterator[Part]:
        """Yield the changeable parts of all agents and tools in the file, and record computed prompts in ``fixed``."""
        for call in self._find_agent_constructors():
            own = self._resolve_constant(_find_argument(call, "id", 0))
            agent_id = normalised_id(str(own.value)) if own is not None else ""
            if agent_id in self._family:
                before = "" if agent_id == normalised_id(self._agent.id) else f"{agent_id}."
                yield from self._find_agent_parts(call, before)
        yield from self._find_tool_function_parts()
        yield from self._find_tool_constructor_parts()

    def _find_agent_constructors(self) -> list[ast.Call]:
        """Return the expressions ``AgentDefinition(...)`` in the file, those of the agent itself first."""
        found = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Call) and _get_callee_name(node.func) == AgentDefinition.__name__
        ]
        return sorted(found, key=lambda node: (not self._is_own_constructor(node), node.lineno))

    def _is_own_constructor(self, call: ast.Call) -> bool:
        """Return whether an expression ``AgentDefinition(...)`` has the id of the agent itself."""
        literal = self._resolve_constant(_find_argument(call, "id", 0))
        return literal is not None and normalised_id(str(literal.value)) == normalised_id(self._agent.id)

    def _find_agent_parts(self, call: ast.Call, prefix: str) -> Iterator[Part]:
        """Yield the prompts, settings and defaults of params in an ``AgentDefinition(...)``; record computed prompts as fixed."""
        for name in (*PROMPTS, *(["description"] if prefix else [])):
            value = _find_argument(call, name)
            if value is None:
                continue
            literal = self._resolve_constant(value)
            if literal is not None and isinstance(literal.value, str):
                yield self._make_part(f"{prefix}{name}", literal)
            else:
                self.fixed[f"{prefix}{name}"] = f"code computes it (line {value.lineno}); write it as {FORMS}"
        settings = _find_argument(call, "settings")
        for keyword in settings.keywords if isinstance(settings, ast.Call) else []:
            yield from self._find_scalar_part(f"{prefix}settings.{keyword.arg}", keyword.value)
        schema = _find_argument(call, "input_schema")
        if isinstance(schema, ast.Name):
            yield from self._find_params_parts(schema.id, f"{prefix}params")

    def _find_params_parts(self, name: str, prefix: str) -> Iterator[Part]:
        """Yield the default values of a params class in the file."""
        classes = [node for node in self._tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        for node in classes[-1].body if classes else []:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                default = node.value
                if isinstance(default, ast.Call) and _get_callee_name(default.func) == "Field":
                    default = _find_argument(default, "default", 0) or default
                yield from self._find_scalar_part(f"{prefix}.{node.target.id}", default)

    def _find_scalar_part(self, name: str, node: ast.expr) -> Iterator[Part]:
        """Yield the literal of a string, number or bool as a part; nothing for another expression."""
        try:
            value = ast.literal_eval(node)
        except ValueError:
            return
        if isinstance(value, SCALARS) and not isinstance(node, ast.Name):
            yield self._make_part(name, node)

    def _find_tool_function_parts(self) -> Iterator[Part]:
        """Yield the descriptions of tools that are functions in the file: their docstrings, or constant ``description=``."""
        known = {_get_function_name_and_file(tool): tool for agent in self._family.values() for tool in agent.tools}
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (node.name, self._file) not in known:
                continue
            name = f"tools.{known[node.name, self._file].spec.name}"  # type: ignore[union-attr]
            made = [d for d in node.decorator_list if isinstance(d, ast.Call)]
            described = next((value for d in made if (value := _find_argument(d, "description")) is not None), None)
            if described is not None:
                if (literal := self._resolve_constant(described)) is not None and isinstance(literal.value, str):
                    yield self._make_part(name, literal)
                continue
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield attrs.evolve(
                    self._make_part(name, first.value), value=inspect.cleandoc(first.value.value), is_docstring=True
                )

    def _find_tool_constructor_parts(self) -> Iterator[Part]:
        """Yield the descriptions in the expressions ``Tool(name=..., description=...)`` of the file."""
        known = {
            tool.spec.name for agent in self._family.values() for tool in agent.tools if isinstance(tool, ToolLike)
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and _get_callee_name(node.func) == "Tool":
                name, text = (
                    self._resolve_constant(_find_argument(node, "name", 0)),
                    self._resolve_constant(_find_argument(node, "description", 1)),
                )
                if name is not None and name.value in known and text is not None and isinstance(text.value, str):
                    yield self._make_part(f"tools.{name.value}", text)

    def _resolve_constant(self, node: ast.expr | None) -> ast.Constant | None:
        """Return the constant of an expression: itself, or the one value of a module-level name; ``None`` if there is none."""
        if isinstance(node, ast.Constant):
            return node
        if not isinstance(node, ast.Name):
            return None
        given = [value for name, value in _find_module_assignments(self._tree) if name == node.id]
        return given[0] if len(given) == 1 and isinstance(given[0], ast.Constant) else None

    def _make_part(self, name: str, node: ast.expr) -> Part:
        """Return the part for a literal, with its value and its place in the source."""
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        start = self._starts[node.lineno - 1] + node.col_offset
        return Part(name, ast.literal_eval(node), node.lineno, start, self._starts[end_line - 1] + end)


def _collect_agent_and_descendants(agent: AgentDefinition) -> dict[str, AgentDefinition]:
    """Return an agent and the agents that it may spawn, by their ids."""
    found: dict[str, AgentDefinition] = {}
    waiting = [agent]
    while waiting:
        one = waiting.pop()
        if normalised_id(one.id) not in found:
            found[normalised_id(one.id)] = one
            waiting += [child for child in one.spawnable_agents if isinstance(child, AgentDefinition)]
    return found


def _find_module_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield names and values of the assignments at the top level of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from [(target.id, node.value) for target in targets if isinstance(target, ast.Name)]


def _get_callee_name(function: ast.expr) -> str:
    """Return the last name of a called expression, without subscripts, or ``""``."""
    while isinstance(function, ast.Subscript):
        function = function.value
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _find_argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the argument of a call by position, else by keyword; ``None`` if it is missing."""
    if position is not None and len(call.args) > position:
        return call.args[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _get_function_name_and_file(tool: object) -> tuple[str, Path]:
    """Return the name and the file of a tool's function; ``""`` and ``Path()`` if they are unknown."""
    code = getattr(inspect.unwrap(getattr(getattr(tool, "body", None), "fn", tool)), "__code__", None)  # type: ignore[arg-type]
    return ("", Path()) if code is None else (code.co_name, Path(code.co_filename).resolve())


# --- literals ---------------------------------------------------------------------------------------------------------


def _replace_part_literal(source: bytes, part: Part, value: object) -> bytes:
    """Return the source with a new literal for a part; a docstring keeps its indentation, and line ends stay."""
    before, after = source[: part._start], source[part._end :]  # noqa: SLF001
    if part._is_docstring:  # noqa: SLF001
        made = _format_docstring_literal(str(value), " " * (len(before) - before.rfind(b"\n") - 1))
    else:
        made = _format_literal(value)
    if b"\r\n" in source:
        made = made.replace("\n", "\r\n")
    return before + made.encode() + after


def _format_literal(value: object) -> str:
    """Return a literal for *value*; a text of several lines in triple quotes, if that has the same value."""
    if not isinstance(value, str):
        return repr(value)
    if "\n" in value:
        inside = value.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        inside = f'{inside[:-1]}\\"' if inside.endswith('"') and not inside.endswith('\\"') else inside
        made = f"{QUOTES}\\\n{inside}{QUOTES}"
        if "\r" not in value and _evaluate_literal_or_none(made) == value:
            return made
    made = json.dumps(value, ensure_ascii=False)
    return made if _evaluate_literal_or_none(made) == value else repr(value)


def _format_docstring_literal(value: str, indent: str) -> str:
    """Return the docstring literal whose value without indentation is *value*."""
    text = inspect.cleandoc(value)
    if "\n" not in text:
        made = f"{QUOTES}{text}{QUOTES}"
        return made if _evaluate_literal_or_none(made) == text else _format_literal(text)
    lines = [
        f"{indent}{line}" if line else "" for line in text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"').split("\n")
    ]
    body = "\n".join(lines)
    made = f"{QUOTES}\n{body}\n{indent}{QUOTES}"
    return made if inspect.cleandoc(str(_evaluate_literal_or_none(made))) == text else _format_literal(text)


def _evaluate_literal_or_none(literal: str) -> object:
    """Return the value of a literal; ``None`` if it is not valid."""
    try:
        return ast.literal_eval(literal)
    except (SyntaxError, ValueError):
        return None
