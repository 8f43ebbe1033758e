"""
Rewrite an agent file for the sandbox, which has no generators: each ``yield`` becomes an ``await`` at the same place.

The text does not run here. Each line keeps its number, since errors, the debugger and the viewer show the lines of the file;
``ast.unparse`` would lose them. Code that the sandbox cannot run with the same meaning is refused, with file and line.
"""

from __future__ import annotations

import ast
import re
import string
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType, MethodDescriptorType
from typing import Any, NamedTuple, NoReturn

from attrs import frozen

from stepengine.data.yields import YIELDS
from stepengine.errors import DefinitionError
from stepengine.sandbox.prelude import ERRORS
from stepengine.sandbox.program_checks import NO_STUBS, ProgramProblem, find_program_problems, parse_program
from stepengine.sandbox.sandbox import MODULES
from stepengine.sandbox.schemas import SchemaClass, parse_schema_classes

OWN = "_se_"
"""The prefix of the prelude's own names, which a file must not use."""

LAZY = ("message_history", "view", "context", "system_prompt", "tool_definitions")
"""The attributes of a state that may be large: each access fetches them."""
OF_CONTEXT = ("inherited_messages", "prompt_messages")

GENERATORS = frozenset({"map_agents", "best_of", "call"})
"""The helpers of the package that are called with ``yield from``."""
KNOWN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "stepengine": frozenset(
            [
                *[row.name for row in YIELDS if row.for_sandbox],
                "AgentDefinition",
                "AgentState",
                "AssistantMessage",
                "ChildRef",
                "ChildResult",
                "Limits",
                "Message",
                "ModelSettings",
                "StepContext",
                "StepResult",
                "Steps",
                "Thinking",
                "ToolCallPart",
                "ToolMessage",
                "ToolResult",
                "Transcript",
                "UserMessage",
                "Waited",
                "Yieldable",
                "best_of",
                "call",
                "load_agent",
                "map_agents",
                *(ERRORS.keys() - {"GeneratorExit", "LimitReached"}),
            ]
        ),
        "stepengine.errors": frozenset(ERRORS.keys() - {"GeneratorExit"}),
        "stepengine.helpers": GENERATORS,
    }
)
"""The names of the package that such a file may import."""
NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "Perform": "it runs any function of the host; let a tool do it, with `yield from ToolCall(...)`",
        "Hooks": "hooks are code of whoever runs the agent",
        "tool": "it has the tools that the host gives it, by name: tools=['read_files']",
        "retry": "write the loop: `for _ in range(3):` with `try:` and `except ToolError:`",
    }
)
DROPPED = frozenset({"__future__", "abc", "collections.abc", "pydantic", "typing", "typing_extensions"})
"""Modules that only annotations and schema classes need, which do not run."""
OF_TYPING = frozenset({"cast", "TYPE_CHECKING"})
"""The names of these modules that the prelude defines."""
ABSTRACT = frozenset(
    ["Collection", "Iterable", "Mapping", "MutableMapping", "MutableSequence", "MutableSet", "Sequence", "Set"]
)
"""More names that the prelude defines, for ``isinstance``."""
TYPES = (str, bytes, int, float, list, tuple, dict, set, frozenset)
METHODS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        kind.__name__: frozenset(
            [name for name, member in vars(kind).items() if isinstance(member, MethodDescriptorType) and name[0] != "_"]
        )
        for kind in TYPES
    }
)
"""The methods of the builtin types; the sandbox can only call them, not use them as values."""
OF_METHODS = frozenset().union(*METHODS.values())
OF_ALIASES = frozenset({"Any", "Callable", "Generator", "Iterator", "Literal", "Optional", "Union"})
"""The parts of aliases such as ``Handler = Generator[Any, Any, Any]``."""
GENERIC = frozenset({"AgentCall", "AgentDefinition", "ChildResult", "StepContext", "Steps"})
"""Generic classes of the package, as in ``AgentDefinition[str](...)``."""
SCHEMA_KEYWORDS = ("input_schema", "output_schema", "schema")
YIELD_FROM = re.compile(rb"yield(?:[ \t]|\\\n)+from")
"""The two words ``yield from`` with nothing but blanks and continued lines between them."""

Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@frozen
class AgentText:
    """
    The source of an agent file in the form that the sandbox runs.

    Attributes:
        code: The text to run, with the same line numbers as the file.
        source: The file's own text, with normalized line ends.
        file: The name of the file in messages.
        lines: The first line of each function that yields, by its name.
        schemas: Its schema classes, by name.
        params_of: The schema class of a handler's params, by the handler's name, for agents whose ``input_schema`` is such a class.
        holds: The variable with the agents, ``"agent"`` or ``"agents"``; ``""`` without one.
        line: The line that assigns this variable.
    """

    code: str
    source: str
    file: str
    lines: Mapping[str, int]
    schemas: Mapping[str, SchemaClass]
    params_of: Mapping[str, str]
    holds: str
    line: int


def rewrite_for_sandbox(text: str, file: str) -> AgentText:
    """
    Return an agent file rewritten for the sandbox.

    Args:
        text: The file's text, of at most 64 KiB.
        file: The name of the file in messages.

    Raises:
        DefinitionError: with file and line, for code that the sandbox cannot run.
    """
    source = text.replace("\r\n", "\n").replace("\r", "\n")
    tree = parse_program(source)
    if isinstance(tree, ProgramProblem):
        _refuse(file, tree.line, tree.text)
    if tree is None:
        _refuse(file, 1, "this Python version cannot parse the file; use a later one")
    schemas = parse_schema_classes(tree, file)
    work = _SourceRewriter(source, tree, file, schemas)
    code = work.rewrite()
    for problem in find_program_problems(code, NO_STUBS, PRELUDE_NAMES):
        _refuse(file, problem.line, problem.text)
    return AgentText(code, source, file, work.lines, schemas, work.params_of, work.holds, work.holds_at)


PRELUDE_NAMES = frozenset(
    {*KNOWN["stepengine"], *OF_TYPING, *ABSTRACT, "GeneratorExit", "LimitReached", "datetime", "timedelta"}
) | {
    f"{OWN}{name}"
    for name in (
        "yield",
        "from",
        "bare",
        "got",
        "value",
        "lazy",
        "method",
        "added",
        "class",
        "schema",
        "host",
        "agent",
    )
}


def _refuse(file: str, line: int, reason: str) -> NoReturn:
    """Raise ``DefinitionError`` with file and line."""
    msg = f"{file}:{line}: {reason}"
    raise DefinitionError(msg)


class _Edit(NamedTuple):
    """A replacement of some bytes by *text*; *order* sorts edits at the same position."""

    start: int
    order: int
    end: int
    text: bytes


class _ContextNode(NamedTuple):
    """A node with its function and parent, and whether it is in a class or an f-string."""

    node: ast.AST
    function: Functions | None
    parent: ast.AST | None
    in_class: bool
    in_text: bool = False


class _SourceRewriter:
    def __init__(self, source: str, tree: ast.Module, file: str, schemas: Mapping[str, SchemaClass]) -> None:
        self._data = source.encode()
        self._tree = tree
        self._file = file
        self._schemas = schemas
        self._edits: list[_Edit] = []
        self._extended: list[tuple[tuple[int, int], int, int]] = []
        """The target of each ``+=``, the place behind it and the order of its edit, which copies the target with all of its edits."""
        self._count = 0
        self._starts = [0, *[newline.end() for newline in re.finditer(b"\n", self._data)]]
        blank = [(one.line, one.end_line) for one in schemas.values()]
        self._all = [
            context_node
            for context_node in _iterate_nodes_with_context(tree)
            if not _is_inside_lines(context_node.node, blank)
        ]
        self._yielding = {
            id(s.function) for s in self._all if isinstance(s.node, ast.Yield | ast.YieldFrom) and s.function
        }
        self._delegated = {id(s.node.value) for s in self._all if isinstance(s.node, ast.YieldFrom)}
        self._imported: dict[str, str] = {}
        self._of_types: set[str] = set()
        self._gone: set[int] = set()
        self._used = {s.node.id for s in self._all if isinstance(s.node, ast.Name) and isinstance(s.node.ctx, ast.Load)}
        self.lines: dict[str, int] = {}
        self._params_of: dict[str, str] = {}
        self.holds = ""
        self.holds_at = 1

    @property
    def params_of(self) -> dict[str, str]:
        """The schema class of each handler's params, for handlers with such a class."""
        return {handler: schema for handler, schema in self._params_of.items() if schema}

    def rewrite(self) -> str:
        """Return the rewritten text; raise ``DefinitionError`` for code that the sandbox cannot run."""
        self._record_agent_variable()
        self._record_generators()
        for context_node in self._all:
            if id(context_node.node) not in self._gone:
                self._rewrite_node(context_node)
        for schema in self._schemas.values():
            self._replace_schema_class(schema)
        edits = sorted(self._edits)
        for (start, end), behind, order in self._extended:
            target = self._rewrite_span(edits, start, end)
            self._edits.append(_Edit(behind, order, behind, b" _se_added(" + target + b", ("))
        return self._rewrite_span(sorted(self._edits), 0, len(self._data)).decode()

    def _rewrite_span(self, edits: Sequence[_Edit], start: int, end: int) -> bytes:
        """Return the text between two offsets, with the sorted edits inside it applied."""
        pieces: list[bytes] = []
        at = start
        first, last = [bisect_left(edits, place, key=attrgetter("start")) for place in (start, end)]
        for edit in edits[first:last]:
            pieces += (self._data[at : edit.start], edit.text)
            at = edit.end
        return b"".join([*pieces, self._data[at:end]])

    # --- agents and generators ------------------------------------------------------------------------------------------

    def _record_agent_variable(self) -> None:
        """Record which of ``agent`` and ``agents`` the file assigns, and where; refuse both."""
        for node in self._tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and target.id in {"agent", "agents"}:
                    if self.holds not in {"", target.id}:
                        self._refuse(node, "the file assigns both `agent` and `agents`; keep one of them")
                    self.holds, self.holds_at = target.id, node.lineno

    def _record_generators(self) -> None:
        """Record the functions that yield, by name, and refuse yields in other places and ambiguous names."""
        named: dict[str, list[ast.FunctionDef]] = {}
        for context_node in self._all:
            node = context_node.node
            if isinstance(node, ast.Yield | ast.YieldFrom):
                self._check_and_record_generator(context_node)
            elif isinstance(node, ast.FunctionDef):
                named.setdefault(node.name, []).append(node)
        for name, functions in named.items():
            if len({id(one) in self._yielding for one in functions}) > 1:
                self._refuse(functions[0], f"two functions are called {name!r}, and one of them yields; rename one")

    def _check_and_record_generator(self, context_node: _ContextNode) -> None:
        """Record the function of a yield as a generator; refuse yields in methods, lambdas and decorated functions."""
        function = context_node.function
        if function is None:
            self._refuse(context_node.node, "`yield` is outside a function; move it into a handler")
        if isinstance(function, ast.Lambda):
            self._refuse(context_node.node, "a lambda cannot yield in the sandbox; write a function with `def`")
        if context_node.in_class:
            self._refuse(context_node.node, "a method cannot yield in the sandbox; write a function outside the class")
        if function.decorator_list:
            self._refuse(function, f"{function.name!r} yields and has a decorator; remove the decorator")
        self.lines.setdefault(function.name, function.lineno)

    # --- nodes ----------------------------------------------------------------------------------------------------------

    def _rewrite_node(self, context_node: _ContextNode) -> None:  # noqa: C901, PLR0912, PLR0915 - one case for each kind of node
        """Record the edits of one node, or refuse it; its inner nodes are visited separately."""
        node = context_node.node
        self._refuse_reserved_names(node)
        if context_node.in_text and _is_yield_or_lazy_attribute(node):
            # Before Python 3.12 the position of a node in an f-string is not reliable.
            self._refuse(node, "this does not work inside an f-string in the sandbox; assign it to a name first")
        match node:
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                self._refuse(node, "handlers are not async; write `def handle_steps(ctx):`, and wait with `yield from`")
            case ast.Import():
                self._refuse_unknown_imports(node)
            case ast.ImportFrom():
                self._rewrite_from_import(node)
            case ast.FunctionDef() if id(node) in self._yielding:
                self._record_insertion(self._byte_span(node)[0], b"async ")
            case ast.YieldFrom() if self._is_generator_call(node.value):
                self._wrap_yield(node, YIELD_FROM, b"await (", b")")
            case ast.YieldFrom():
                self._wrap_yield(node, YIELD_FROM, b"_se_value(await _se_from((", b")))")
            case ast.Yield(None):
                start, end = self._byte_span(node)
                self._record_replacement(start, end, b"_se_got(await _se_yield(None))")
            case ast.Yield() if isinstance(context_node.parent, ast.Expr):
                self._wrap_yield(node, re.compile(b"yield"), b"await _se_bare((", b"))")
            case ast.Yield():
                self._wrap_yield(node, re.compile(b"yield"), b"_se_got(await _se_yield((", b")))")
            case ast.Attribute() if _is_yield_or_lazy_attribute(node):
                self._replace_attribute(node, b"_se_lazy", repr(node.attr))
            case ast.Attribute():
                self._wrap_method_value(context_node, node)
            case ast.Name():
                self._rewrite_or_refuse_name(context_node, node)
            case ast.AnnAssign(annotation=ast.Name("TypeAlias")):
                self._replace_node(node, b"")
            case ast.Call(
                func=ast.Name("AgentDefinition" | "Receive") | ast.Subscript(value=ast.Name("AgentDefinition"))
            ):
                self._rewrite_agent_arguments(node)
            case ast.Call(func=ast.Name("cast"), args=[kind, _]):
                self._replace_node(kind, b"None")
            case ast.AugAssign(op=ast.Add()):
                self._rewrite_inplace_add(node)
            case ast.Call(func=ast.Name("next"), args=[ast.GeneratorExp() as found, *_]):
                self._wrap_generator_in_iter(node, found)
            case _:
                pass

    def _rewrite_or_refuse_name(self, context_node: _ContextNode, node: ast.Name) -> None:
        """Replace a generic class by its plain name; refuse a generator that is not called after ``yield from``."""
        if isinstance(context_node.parent, ast.Subscript) and context_node.parent.value is node:
            if node.id in self._of_types:
                self._replace_node(node, b"list")
            elif self._imported.get(node.id) in GENERIC:
                self._replace_node(context_node.parent, node.id.encode())
        if not isinstance(node.ctx, ast.Load) or not (
            node.id in self.lines or self._imported.get(node.id) in GENERATORS
        ):
            return
        parent = context_node.parent
        if isinstance(parent, ast.Call) and parent.func is node and id(parent) in self._delegated:
            return
        if isinstance(parent, ast.keyword) and parent.arg == "handle_steps":
            return
        self._refuse(
            node,
            f"{node.id!r} yields, so call it only directly after `yield from`, as in `found = yield from {node.id}(...)`",
        )

    def _is_generator_call(self, value: ast.expr) -> bool:
        """Return True for a call of a function of the file that yields, or of a helper that does."""
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name)):
            return False
        return value.func.id in self.lines or self._imported.get(value.func.id) in GENERATORS

    def _replace_attribute(self, node: ast.Attribute, function: bytes, arguments: str) -> None:
        """Replace an attribute by a call of a function with the value before the dot and *arguments*."""
        start, end = self._byte_span(node)
        dot = self._find_dot(self._byte_span(node.value)[1])
        lines = self._data[dot:end].count(b"\n")
        self._record_insertion(start, function + b"((")
        self._record_replacement(dot, end, b")," + b"\n" * lines + f" {arguments})".encode())

    def _find_dot(self, offset: int) -> int:
        """Return the offset of the dot after a value, past brackets, blanks and comments."""
        while self._data[offset] != ord("."):
            offset = self._data.index(b"\n", offset) if self._data[offset] == ord("#") else offset + 1
        return offset

    def _wrap_method_value(self, context_node: _ContextNode, node: ast.Attribute) -> None:
        """Replace a method that is used as a value, as in ``map(str.strip, lines)``, by a lambda, since the sandbox only calls methods."""
        if not isinstance(node.ctx, ast.Load):
            return
        value, called = node.value, f"lambda _se_v, *_se_a, **_se_k: _se_v.{node.attr}(*_se_a, **_se_k)"
        start, end = self._byte_span(node)
        if isinstance(value, ast.Name) and node.attr in METHODS.get(value.id, ()):
            lines = self._data[start:end].count(b"\n")
            self._record_replacement(start, end, b"(" + b"\n" * lines + f"{called})".encode())
        elif (
            not (isinstance(context_node.parent, ast.Call) and context_node.parent.func is node)
            and node.attr in OF_METHODS
        ):
            self._replace_attribute(node, b"_se_method", f"{node.attr!r}, {called}")

    def _rewrite_inplace_add(self, node: ast.AugAssign) -> None:
        """
        Rewrite ``found += others`` for any iterable, since the sandbox adds only lists to a list.

        A target with a call, or on several lines, stays unchanged.
        """
        if any(
            isinstance(one, ast.Call | ast.Await | ast.NamedExpr | ast.Yield | ast.YieldFrom)
            for one in ast.walk(node.target)
        ):
            return
        start, end = self._byte_span(node.target)
        if b"\n" in self._data[start:end]:
            return
        _, of_value = self._byte_span(node)
        behind = self._data.index(b"+=", end) + 2
        self._count += 1
        self._extended.append(((start, end), behind, self._count))
        self._edits.append(_Edit(of_value, -self._count, of_value, b"))"))

    def _wrap_generator_in_iter(self, call: ast.Call, generator: ast.GeneratorExp) -> None:
        """Record the edits that wrap a generator expression in ``iter``: the sandbox evaluates it to a list, which ``next`` rejects."""
        start, end = self._byte_span(generator)
        self._record_insertion(start, b"(iter" if end == self._byte_span(call)[1] else b"iter(")
        self._edits.append(_Edit(end, -self._count, end, b")"))

    def _rewrite_agent_arguments(self, call: ast.Call) -> None:
        """Replace handlers and schema classes in keyword arguments, and record the schema class of each handler's params."""
        named = {one.arg: one.value.id for one in call.keywords if isinstance(one.value, ast.Name)}
        handler, schema = named.get("handle_steps", ""), named.get("input_schema", "")
        if handler in self.lines:
            schema = schema if schema in self._schemas else ""
            if self._params_of.setdefault(handler, schema) != schema:
                self._refuse(
                    call,
                    f"agents that share the handler {handler!r} need the same input_schema; write a handler for each",
                )
        for keyword in call.keywords:
            value = keyword.value
            if not isinstance(value, ast.Name):
                continue
            start, end = self._byte_span(value)
            if keyword.arg == "handle_steps" and value.id in self.lines:
                self._record_replacement(start, end, repr(value.id).encode())
            elif keyword.arg in SCHEMA_KEYWORDS and value.id in self._schemas:
                self._record_replacement(start, end, f"_se_schema({value.id!r})".encode())

    # --- imports and classes --------------------------------------------------------------------------------------------

    def _refuse_unknown_imports(self, node: ast.Import) -> None:
        """Refuse an ``import`` of modules that the sandbox lacks; other imports stay unchanged."""
        for alias in node.names:
            name = alias.name
            if name in MODULES:
                continue
            if name.partition(".")[0] in {"stepengine", "pydantic", "typing"}:
                self._refuse(node, f"write `from {name} import ...` with the names that you use")
            self._refuse(node, _unknown_module_text(name))

    def _rewrite_from_import(self, node: ast.ImportFrom) -> None:
        """Replace a ``from`` import by assignments. An import of a sandbox module stays, and unknown modules are refused."""
        module = "." * node.level + (node.module or "")
        names = [(alias.name, alias.asname or alias.name) for alias in node.names]
        if any(name == "*" for name, _ in names):
            self._refuse(node, f"`from {module} import *` is not supported here; import the names that you use")
        if module in KNOWN:
            made = [self._record_and_format_import(node, module, name, local_name) for name, local_name in names]
        elif module in DROPPED:
            self._of_types |= {local_name for _, local_name in names}
            made = [self._type_import_text(name, local_name) for name, local_name in names]
        elif module == "string":
            made = [f"{local_name} = {self._string_constant_source(node, name)}" for name, local_name in names]
        elif node.level == 1 and "." not in (node.module or "."):
            made = [self._sibling_import_text(node, str(node.module), name, local_name) for name, local_name in names]
        elif module in MODULES:
            return
        else:
            self._refuse(node, _unknown_module_text(module))
        self._replace_node(node, "; ".join(filter(None, made)).encode() or b"pass")

    def _record_and_format_import(self, node: ast.AST, module: str, name: str, local_name: str) -> str:
        """Record an imported name of the package, and return its assignment, or ``""``; refuse a name that the sandbox lacks."""
        if name not in KNOWN[module]:
            reason = NOT_HERE.get(
                name, f"a file in the sandbox may import from {module}: {_join_sorted(KNOWN[module])}"
            )
            self._refuse(node, f"{name!r} cannot be used in the sandbox: {reason}")
        self._imported[local_name] = name
        return f"{local_name} = {name}" if local_name != name else ""

    def _type_import_text(self, name: str, local_name: str) -> str:
        """Return the assignment for a name of ``typing`` that code uses at run time; ``""`` for others."""
        if name in OF_TYPING or name in ABSTRACT:
            return f"{local_name} = {name}" if local_name != name else ""
        return f"{local_name} = object" if local_name in self._used and name in OF_ALIASES else ""

    def _sibling_import_text(self, node: ast.AST, module: str, name: str, local_name: str) -> str:
        """Return the assignment for the ``agent`` of another file of the same folder; refuse other names."""
        if name != "agent":
            self._refuse(
                node,
                f"a file in the sandbox can import only `agent` from {module!r}; copy {name!r} into this file",
            )
        return f"{local_name} = _se_agent({module.replace('_', '-')!r})"

    def _string_constant_source(self, node: ast.AST, name: str) -> str:
        """Return the literal of a constant of the module ``string``; refuse other names."""
        value = getattr(string, name, None) if name in string.__all__ else None
        if not isinstance(value, str):
            self._refuse(
                node,
                f"the sandbox has only the constants of the module 'string', such as ascii_uppercase, not {name!r}",
            )
        return repr(value)

    def _replace_schema_class(self, schema: SchemaClass) -> None:
        """Replace a schema class by an assignment on its first line; the number of lines stays."""
        made = "dict" if schema.kind == "typed_dict" else f"_se_class({schema.name!r})"
        start, end = self._starts[schema.line - 1], self._line_end_offset(schema.end_line)
        lines = schema.end_line - schema.line
        self._record_replacement(start, end, f"{schema.name} = {made}".encode() + b"\n" * lines)

    def _replace_node(self, node: ast.stmt | ast.expr, text: bytes) -> None:
        """Replace a node by a text on its first line, ``pass`` if it is empty; the nodes inside it are not visited."""
        self._gone |= {id(one) for one in ast.walk(node)} - {id(node)}
        start, end = self._byte_span(node)
        self._record_replacement(start, end, (text or b"pass") + b"\n" * self._data[start:end].count(b"\n"))

    # --- positions and edits --------------------------------------------------------------------------------------------

    def _line_end_offset(self, line: int) -> int:
        return self._starts[line] - 1 if line < len(self._starts) else len(self._data)

    def _byte_span(self, node: Any) -> tuple[int, int]:
        """Return the byte offsets of the start and end of a node."""
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _wrap_yield(self, node: ast.expr, words: re.Pattern[bytes], before: bytes, behind: bytes) -> None:
        """Replace the *words* at the start of a node by *before*, and insert *behind* after its end."""
        start, end = self._byte_span(node)
        found = words.match(self._data, start)
        if found is None:
            self._refuse(node, "write `yield from` on one line, with only spaces between the two words")
        lines = found[0].count(b"\n")
        self._record_replacement(start, found.end(), before + b"\\\n" * lines)
        # Of nodes with the same end, the inner one is closed first.
        self._edits.append(_Edit(end, -self._count, end, behind))

    def _record_insertion(self, offset: int, text: bytes) -> None:
        """Record an edit that inserts a text at a byte offset."""
        self._record_replacement(offset, offset, text)

    def _record_replacement(self, start: int, end: int, text: bytes) -> None:
        """Record an edit that replaces the bytes between two offsets by *text*."""
        self._count += 1
        self._edits.append(_Edit(start, self._count, end, text))

    def _refuse_reserved_names(self, node: ast.AST) -> None:
        """Raise an error for reserved names in any position, such as imports, keywords and match patterns."""
        if isinstance(node, ast.Constant):
            return
        for _, value in ast.iter_fields(node):
            for name in value if isinstance(value, list) else (value,):
                if isinstance(name, str) and name.startswith(OWN):
                    self._refuse(node, f"names that start with {OWN!r} are reserved for the sandbox; rename {name!r}")

    def _refuse(self, node: Any, reason: str) -> NoReturn:
        """Raise ``DefinitionError`` with the line of a node and the *reason*."""
        _refuse(self._file, getattr(node, "lineno", 1), reason)


def _iterate_nodes_with_context(tree: ast.Module) -> Iterator[_ContextNode]:
    """Yield every node with its context, outer nodes first. Annotations are skipped, since they are not run."""
    left: list[_ContextNode] = [_ContextNode(tree, None, None, in_class=False)]
    while left:
        context_node = left.pop()
        yield context_node
        node = context_node.node
        inner, in_class = context_node.function, context_node.in_class
        for name, value in reversed(list(ast.iter_fields(node))):
            if name in {"annotation", "returns", "type_params"}:
                continue
            function, is_class = inner, in_class
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and name == "body":
                function, is_class = node, in_class and isinstance(context_node.parent, ast.ClassDef)
            elif isinstance(node, ast.ClassDef) and name == "body":
                is_class = True
            members = value if isinstance(value, list) else [value]
            in_text = context_node.in_text or isinstance(node, ast.JoinedStr)
            left += [
                _ContextNode(one, function, node, is_class, in_text)
                for one in reversed(members)
                if isinstance(one, ast.AST)
            ]


def _is_yield_or_lazy_attribute(node: ast.AST) -> bool:
    """Return True for a yield, and for a read of a large field of a state or context."""
    is_lazy = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in (*LAZY, *OF_CONTEXT)
    return is_lazy or isinstance(node, ast.Yield | ast.YieldFrom)


def _is_inside_lines(node: ast.AST, spans: Collection[tuple[int, int]]) -> bool:
    line = getattr(node, "lineno", 0)
    return any(first <= line <= last for first, last in spans)


def _unknown_module_text(name: str) -> str:
    """Return the message for a module that the sandbox lacks, with the available ones."""
    if name == "enum":
        return "there is no module 'enum' in the sandbox; write `Literal['low', 'high']` for the type of a field"
    return f"there is no module {name!r} in the sandbox; available modules: {_join_sorted(MODULES.keys() - {'os.path', 'posixpath'})}"


def _join_sorted(names: Collection[str]) -> str:
    """Return the sorted names, separated by commas."""
    return ", ".join(sorted(names))
