"""
Checks of a program before it runs: of its text, and by the sandbox's own type checker, in a session that stops before the first line.

Programs are untrusted, so none of their code runs here, and no function recurses as deep as a program nests. A wrong refusal costs more
than an error at run time, so only certain problems refuse a program.
"""

from __future__ import annotations

import ast
import io
import json
import keyword
import re
import sys
import tokenize
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from attrs import frozen

from stepengine.data.alike import find_nearest, list_names
from stepengine.sandbox.check_workers import Checkout
from stepengine.sandbox.sandbox import ABSENT, BUILTINS, MODULES
from stepengine.sandbox.stubs import ALIASES, MAX_NAME_CHARS, OURS, Stubs
from stepengine.workspace.after_fork import Lock

if TYPE_CHECKING:
    from pydantic_monty import ResourceLimits, SyncSnapshot


MAX_PROGRAM_BYTES = 64 * 1024
"""A model writes some kilobytes for one task, and the time of the checks grows with the length."""
MAX_DEPTH_LEVELS = 300
"""The sandbox's own limit is below a thousand; readable code has about ten levels."""
MOST_FUNCTIONS, MOST_SCOPES = 6, 12
"""
How deep functions may be nested, and functions, lambdas and comprehensions together.

The sandbox parses a definition about three times for each one around it, so twenty lines can take a minute.
"""
MOST_PROBLEMS, MOST_SHOWN = 200, 20
"""The most problems that are collected, and that are shown: a model corrects one screen at a time."""
MAX_COMPARED_NAMES = 300
"""The most names that are compared with an unknown name, to bound the time."""
SHOWN_BEFORE, SHOWN_CHARS = 60, 120
"""The most characters that are shown before the column of a problem, and of its whole line."""


ANY_NAME = "*"
"""Among the names that earlier programs defined: any other name may be defined, too."""
RUNS_TEXT = "exec"
"""The builtin that runs a text as a program, under this name or another."""


@frozen
class ProgramProblem:
    """
    A problem in the text of a program.

    Attributes:
        line: From 1.
        column: In characters, from 1.
        text: The problem and its remedy, for a model.
    """

    line: int
    column: int
    text: str


def find_program_problems(code: str, stubs: Stubs, known_names: Collection[str] = ()) -> tuple[ProgramProblem, ...]:
    """
    Return the certain problems of a program, in line order.

    A program that only a newer Python may be able to parse has no problems here, apart from its nesting. The sandbox parses it, and
    refuses it before it runs if it cannot.

    Args:
        code: The program.
        stubs: The functions that it may call.
        known_names: The names that earlier programs defined, as ``find_defined_names`` returns them.
    """
    tree = parse_program(code)
    if isinstance(tree, ProgramProblem):
        return (tree,)
    return _ProgramAnalyzer(code, tree, stubs, known_names).find_problems() if tree is not None else ()


def find_defined_names(code: str) -> frozenset[str]:
    """
    Return the names that a program may define for later programs; all its words if this Python cannot parse it.

    ``ANY_NAME`` is among them if the program runs a text with ``exec``, which may define any name.
    """
    tree = parse_program(code)
    if isinstance(tree, ProgramProblem):
        return frozenset()
    if tree is None:
        words = frozenset(re.findall(r"[^\W\d]\w*", code)) - frozenset(keyword.kwlist)
        return words | {ANY_NAME} if RUNS_TEXT in words else words
    analyzer = _ProgramAnalyzer(code, tree, NO_STUBS, ())
    return frozenset([*analyzer.module.bindings, *([ANY_NAME] if analyzer.runs_text else ())])


def format_problems(problems: Sequence[ProgramProblem], code: str) -> str:
    """Render at most twenty problems for a model, each with its line and a caret."""
    lines = LINE.split(code)
    parts = [
        _format_problem(problem, lines[problem.line - 1] if problem.line <= len(lines) else "") for problem in problems
    ]
    if len(parts) > MOST_SHOWN:
        parts[MOST_SHOWN:] = [f"... and {len(parts) - MOST_SHOWN} more."]
    return "\n".join(parts)


TOO_NESTED = f"functions are nested deeper than {MOST_FUNCTIONS} levels; move the inner ones out of the others"
LINE = re.compile(r"\r\n|\r|\n")
"""Where Python ends a line; ``str.splitlines`` ends some at other places."""


def _format_problem(problem: ProgramProblem, line: str) -> str:
    """Render a problem with its source line, cut around the column, and a caret."""
    head = f"line {problem.line}, column {problem.column}: {problem.text}"
    if not line.strip():
        return head
    first = max(0, min(problem.column - 1, len(line)) - SHOWN_BEFORE)
    part = line[first : first + SHOWN_CHARS]
    before = part[: max(0, problem.column - 1 - first)]
    caret = "".join(["\t" if char == "\t" else " " for char in before]) + "^"
    return f"{head}\n    {part}\n    {caret}"


# --- parsing --------------------------------------------------------------------------------------------------------

_WARNINGS = Lock()
"""The filters of warnings are global to the process."""
NEWER = (
    (12, re.compile(r"""[fF][rR]?['"]|[rR][fF]['"]""")),  # any quote inside of an f-string
    (12, re.compile(r"^\s*(?:async\s)?\s*(?:def|class|type)\s+\w+\s*[\[=]")),
    (14, re.compile(r"^\s*except\b")),  # more than one, without brackets
    (14, re.compile(r"""[tT][rR]?['"]|[rR][tT]['"]""")),
)
"""The minor version of Python 3 that first parses some lines of this form."""
NEWEST_VERSION = (3, 14)
"""The version of Python whose parser knows all syntax of the sandbox."""


def parse_program(code: str) -> ast.Module | ProgramProblem | None:
    """Return the syntax tree of a program, its syntax problem, or ``None`` if a newer Python may be able to parse it."""
    try:
        size = len(code.encode())
    except UnicodeEncodeError as error:
        line = len(LINE.split(code[: error.start]))
        return ProgramProblem(line, 1, "a program is text; this has half of a character in it (a lone surrogate)")
    if size > MAX_PROGRAM_BYTES:
        return ProgramProblem(1, 1, f"the program has {size:,} bytes; at most {MAX_PROGRAM_BYTES:,} are read")
    try:
        with _WARNINGS, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code)
    except SyntaxError as error:
        if _may_need_newer_python(error, code):
            return _find_nesting_problem(code)
        return ProgramProblem(error.lineno or 1, max(1, error.offset or 1), f"syntax error: {error.msg}")
    except (RecursionError, MemoryError):
        return ProgramProblem(1, 1, "the program is nested too deeply to be read")
    except ValueError as error:
        return ProgramProblem(1, 1, f"the program cannot be read: {error}")


def _find_nesting_problem(code: str) -> ProgramProblem | None:
    """Return the nesting problem of a program for a newer Python, or the problem of unreadable tokens; ``None`` without a problem."""
    level, around = 0, list[int]()
    try:
        for token in tokenize.generate_tokens(io.StringIO(LINE.sub("\n", code)).readline):
            level += {tokenize.INDENT: 1, tokenize.DEDENT: -1}.get(token.type, 0)
            if token.type == tokenize.NAME and token.string == "def":
                around = [one for one in around if one < level] + [level]
                if len(around) > MOST_FUNCTIONS:
                    return ProgramProblem(token.start[0], token.start[1] + 1, TOO_NESTED)
    except (SyntaxError, tokenize.TokenError) as error:
        return ProgramProblem(1, 1, f"the program cannot be read: {error}")
    return None


def _may_need_newer_python(error: SyntaxError, code: str) -> bool:
    """Return True if a syntax error may come from syntax of a newer Python than this one."""
    version = sys.version_info[:2]
    if version >= NEWEST_VERSION:
        return False
    if str(error.msg).startswith("f-string") or 'f"""' in code or "f'''" in code:
        return version < (3, 12)
    lines = LINE.split(code)
    line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
    return any(version < (3, minor) and pattern.search(line) for minor, pattern in NEWER)


# --- our own walk ---------------------------------------------------------------------------------------------------


class _Binding(NamedTuple):
    """A binding of a name: an assignment, import, parameter or definition."""

    kind: Literal["async", "module", "member", "known", "other"]
    node: ast.AST | None = None
    of: str = ""


class _Scope:
    """A module, function, class or comprehension, and its bound names."""

    def __init__(self, kind: Literal["module", "function", "class", "comprehension"], parent: _Scope | None) -> None:
        self.kind, self.parent = kind, parent
        self.depth: int = 0 if parent is None else parent.depth + (kind != "class")
        """The number of functions, lambdas and comprehensions around its statements, itself included."""
        self.functions: int = 0 if parent is None else parent.functions
        """The number of functions among them, without lambdas and comprehensions."""
        self.bindings: dict[str, list[_Binding]] = {}
        self.elsewhere: set[str] = set()
        """The names that are declared global or nonlocal here."""

    def bind(self, name: str, binding: _Binding) -> None:
        self.bindings.setdefault(name, []).append(binding)

    def resolve(self, name: str) -> tuple[_Scope, list[_Binding]] | None:
        """Return the scope and the bindings of a name, ``None`` if nothing binds it. Bindings of a class are visible only in its body."""
        is_direct = True
        for scope in self.iterate_outwards():
            if name in scope.bindings and (is_direct or scope.kind != "class"):
                return scope, scope.bindings[name]
            is_direct = is_direct and scope.kind == "comprehension"
        return None

    def iterate_outwards(self) -> Iterator[_Scope]:
        """Yield the scope and the scopes around it."""
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


class _NodeContext(NamedTuple):
    """The scope of a node, and the statements around it that matter for its checks."""

    scope: _Scope
    caught: frozenset[str]
    """The kinds of problems that a ``try`` around the node catches: ``name``, ``import``, ``attribute``, ``arguments``."""
    is_in_loop: bool = False


CAUGHT = {
    "NameError": {"name"},
    "UnboundLocalError": {"name"},
    "ImportError": {"import"},
    "ModuleNotFoundError": {"import"},
    "AttributeError": {"attribute"},
    "TypeError": {"arguments"},
    # A handler of all exceptions around an import expects that the module may be missing. A handler of all exceptions is not
    # written for an unknown name.
    "Exception": {"import", "attribute"},
    "BaseException": {"import", "attribute"},
}
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "Yield": "programs have no `yield`; return a list",
        "YieldFrom": "programs have no `yield from`; return a list",
        "Delete": "programs have no `del`; use `.pop(...)`, or assign something else",
        "AsyncFor": "programs have no `async for`; await the list, and loop over it",
        "AsyncWith": "programs have no `async with`",
        "TryStar": "programs have no `except*`; use `except`",
        "TypeAlias": "programs have no `type` statement",
        "TemplateStr": "programs have no template strings; use an f-string",
    }
)
READS_ITS_ARGUMENTS = frozenset(
    {
        *("print", "len", "int", "float", "str", "repr", "sum", "sorted", "list", "dict", "set", "tuple", "enumerate"),
        *("max", "min", "any", "all", "reversed"),
    }
)
"""Builtins that cannot use a call that was not awaited."""
AWAITED = frozenset({"gather", "sleep"})
INSTEAD = {
    "create_task": "`await` the call, or several with `await asyncio.gather(...)`",
    "ensure_future": "`await` the call, or several with `await asyncio.gather(...)`",
    "TaskGroup": "use `await asyncio.gather(...)`",
    "wait": "use `await asyncio.gather(...)`",
    "as_completed": "use `await asyncio.gather(...)`",
    "wait_for": "calls have their own limits of time",
    "timeout": "calls have their own limits of time",
    "Semaphore": "calls are limited already",
    "get_event_loop": "`await` works at the top of a program",
}


class _ProgramAnalyzer:
    """Analyzes a program in two passes: one collects bindings and uses, the other finds the problems of the uses."""

    def __init__(self, code: str, tree: ast.Module, stubs: Stubs, known_names: Collection[str]) -> None:
        self._lines = LINE.split(code)
        self._ends: dict[int, list[int]] = {}
        """The end of each character in bytes, by line, for lines that are not ASCII."""
        self._stubs = stubs
        self._problems: list[ProgramProblem] = []
        self._loads: list[tuple[ast.Name, _NodeContext]] = []
        self._attributes: list[tuple[ast.Attribute, _NodeContext]] = []
        self._calls: list[tuple[ast.Call, _NodeContext]] = []
        self._nonlocals: list[tuple[ast.Nonlocal, _NodeContext]] = []
        self._unawaited: dict[int, str] = {}
        """How a call is used without ``await``, by the id of its node; ``""`` if its value is dropped."""
        self._values: dict[int, ast.expr] = {}
        """The value that is assigned to a name, by the id of the name's node."""
        self.module = _Scope("module", None)
        self.runs_text = ANY_NAME in known_names
        self.good_imports: set[int] = set()
        """The lines of imports that certainly work or whose errors are caught."""
        self._exempt: list[tuple[str, tuple[int, int], tuple[int, int]]] = []
        """The kind, start and end of each span where such a problem is harmless: in annotations, and where errors are caught."""
        for name in known_names:
            self.module.bind(name, _Binding("known"))
        self._visit_nodes(tree)

    def find_problems(self) -> tuple[ProgramProblem, ...]:
        """Return the problems of the program in the order of their positions."""
        if not self._is_too_deep:
            for attribute, context in self._attributes:
                self._check_attribute(attribute, context)
            for call, context in self._calls:
                self._check_call(call, context)
            for node, context in self._nonlocals:
                self._check_nonlocal(node, context)
            for name, context in self._loads:
                self._check_name(name, context)
        return _sort_distinct_problems(self._problems)

    def refers_to_stub(self, name: str) -> bool:
        """Return True if a module-level name refers to the stub function of that name."""
        return name in self._stubs.functions and name not in self.module.bindings

    def is_exempt(self, kind: str, problem: ProgramProblem) -> bool:
        """Return True if a problem of this kind at this position is harmless, such as an unknown name in an annotation."""
        position = problem.line, problem.column
        return any(kind == exempt and start <= position < end for exempt, start, end in self._exempt)

    # --- collecting

    _is_too_deep = False

    def _visit_nodes(self, tree: ast.Module) -> None:
        """
        Visit all nodes: record bindings and uses, and report refused syntax. Stop at a node that is nested too deeply.

        A method for a kind of node returns the inner nodes to visit; ``None`` means all of them, in the context of the node.
        """
        waiting: list[tuple[ast.AST, _NodeContext, int]] = [(tree, _NodeContext(self.module, frozenset()), 0)]
        while waiting:
            node, context, depth = waiting.pop()
            too_deep = _find_depth_problem(node, context.scope, depth)
            if too_deep:
                self._add_problem(node, too_deep)
                self._is_too_deep = True
                return
            kind = type(node).__name__
            if kind in REFUSED:
                self._add_problem(node, REFUSED[kind])
            visit = getattr(self, f"_visit_{kind.lower()}", None)
            inner = visit(node, context) if visit is not None else None
            if inner is None:
                inner = _pair_with_context(ast.iter_child_nodes(node), context)
            waiting += [(child, context, depth + 1) for child, context in inner]

    def _add_problem(self, node: ast.AST, text: str) -> None:
        """Record a problem at the start of a node, unless there are 200 problems already."""
        if len(self._problems) < MOST_PROBLEMS:
            position = self._position_from_byte_offset(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))
            self._problems.append(ProgramProblem(*position, text))

    def _mark_span_exempt(self, kind: str, first: ast.AST | None, last: ast.AST | None = None) -> None:
        """Mark the span from *first* to *last* as one where problems of this kind are harmless."""
        if first is not None:
            span: Any = (first, last or first)
            start, end = (span[0].lineno, span[0].col_offset), (span[1].end_lineno, span[1].end_col_offset)
            self._exempt.append((kind, self._position_from_byte_offset(*start), self._position_from_byte_offset(*end)))

    def _position_from_byte_offset(self, line: int, offset: int) -> tuple[int, int]:
        """Return the line and the column in characters, from 1, of a byte offset in a line."""
        source = self._lines[line - 1] if line <= len(self._lines) else ""
        if source.isascii():
            return line, offset + 1
        ends = self._ends.get(line)
        if ends is None:
            # Once for each line: encoding a line of a thousand parameters for each of them would take quadratic time.
            ends = self._ends[line] = list(accumulate([len(one.encode(errors="surrogatepass")) for one in source]))
        return line, bisect_right(ends, offset) + 1

    def _visit_name(self, node: ast.Name, context: _NodeContext) -> NodesWithContext:
        """Record a read of a name, or bind a name that is assigned."""
        if isinstance(node.ctx, ast.Load):
            self._loads.append((node, context))
            self.runs_text = self.runs_text or node.id == RUNS_TEXT
        elif isinstance(node.ctx, ast.Store):
            context.scope.bind(node.id, _Binding("other", node))
        return ()

    def _visit_namedexpr(self, node: ast.NamedExpr, context: _NodeContext) -> NodesWithContext:
        """Bind the target of ``:=`` in the scope around the comprehensions."""
        scope = next(one for one in context.scope.iterate_outwards() if one.kind != "comprehension")
        scope.bind(node.target.id, _Binding("other", node))
        return [(node.value, context)]

    def _visit_assign(self, node: ast.Assign, context: _NodeContext) -> None:
        """Record the values that are assigned to single names."""
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._values[id(target)] = node.value

    def _visit_annassign(self, node: ast.AnnAssign, context: _NodeContext) -> NodesWithContext:
        """Skip the annotation, whose names need not exist. A target without a value counts as bound, too."""
        self._mark_span_exempt("name", node.annotation)
        return _pair_with_context([node.target, *([node.value] if node.value is not None else [])], context)

    def _visit_augassign(self, node: ast.AugAssign, context: _NodeContext) -> None:
        """Record a problem for ``@=``, and a call on the right that lacks its ``await``."""
        if isinstance(node.op, ast.MatMult):
            self._add_problem(node, "programs have no `@=`")
        self._record_if_unawaited_call(node.value, "computed with")

    def _visit_import(self, node: ast.Import, context: _NodeContext) -> NodesWithContext:
        """Bind the imported modules, and record a problem for each one that the sandbox lacks."""
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._report_missing_module(node, alias.name, context)
            module = alias.name if alias.asname else top
            context.scope.bind(alias.asname or top, _Binding("module", node, module))
        return ()

    def _visit_importfrom(self, node: ast.ImportFrom, context: _NodeContext) -> NodesWithContext:
        """Bind the imported names, and record problems of missing modules and members, and of ``*``."""
        module = node.module or ""
        if node.level:
            self._add_problem(node, "there is nothing to import from; a program stands alone")
        elif module == "__future__" or self._report_missing_module(node, module, context):
            self._report_missing_members(node, module, context)
        for alias in node.names:
            if alias.name == "*":
                self._add_problem(node, f"programs have no `import *`; name what you need of `{module}`")
                continue
            whole = f"{module}.{alias.name}"
            kind: Literal["module", "member"] = "module" if whole in MODULES else "member"
            context.scope.bind(alias.asname or alias.name, _Binding(kind, node, whole))
        return ()

    def _report_missing_module(self, node: ast.stmt, module: str, context: _NodeContext) -> bool:
        """Record a problem if the sandbox lacks a module, unless the import's errors are caught; return whether the module exists."""
        if module in MODULES or "import" in context.caught:
            self._record_allowed_import(node)
            return module in MODULES
        near = find_nearest(module[:MAX_NAME_CHARS], MODULES, max_count=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {list_names(sorted(MODULES))}"
        self._add_problem(node, f"there is no module `{module}` in a program; {hint}")
        return False

    def _report_missing_members(self, node: ast.ImportFrom, module: str, context: _NodeContext) -> None:
        """Record a problem for each imported name that its module lacks, unless the import's errors are caught."""
        lacking = [alias.name for alias in node.names if alias.name not in {*MODULES.get(module, ()), "*"}]
        if module == "__future__" or not lacking or "import" in context.caught:
            self._record_allowed_import(node)
            return
        for name in lacking:
            instead = INSTEAD.get(name, "") if module == "asyncio" else ""
            self._add_problem(node, f"`{module}` has no `{name}` in a program{'; ' + instead if instead else ''}")

    def _record_allowed_import(self, node: ast.stmt) -> None:
        """Record the lines of an import that works or whose errors are caught."""
        # The checker reports a member at its own line.
        self.good_imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    def _visit_global(self, node: ast.Global, context: _NodeContext) -> None:
        """Bind the names in the module, and record them as declared elsewhere."""
        context.scope.elsewhere.update(node.names)
        for name in node.names:
            self.module.bind(name, _Binding("other", node))

    def _visit_nonlocal(self, node: ast.Nonlocal, context: _NodeContext) -> None:
        """Record the names as declared elsewhere; they are checked after all bindings are known."""
        context.scope.elsewhere.update(node.names)
        self._nonlocals.append((node, context))

    def _visit_functiondef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, context: _NodeContext
    ) -> NodesWithContext:
        """
        Bind a function, and its parameters in a scope of its own, and return its inner nodes with their scopes.

        Calls of an ``async`` function must be awaited unless it has decorators.
        """
        is_async = isinstance(node, ast.AsyncFunctionDef) and not node.decorator_list
        context.scope.bind(node.name, _Binding("async" if is_async else "other", node))
        self._mark_span_exempt("name", node.returns)
        inner = self._make_function_scope(node.args, context)
        inner.scope.functions += 1
        for parameter in getattr(node, "type_params", ()):
            inner.scope.bind(parameter.name, _Binding("other", parameter))
        return [
            *_pair_with_context(node.decorator_list, context),
            *_pair_with_context(_parameter_defaults(node.args), context),
            *_pair_with_context(node.body, inner),
        ]

    _visit_asyncfunctiondef = _visit_functiondef

    def _visit_lambda(self, node: ast.Lambda, context: _NodeContext) -> NodesWithContext:
        """Return the default values, and the body with a scope for its parameters."""
        inner = self._make_function_scope(node.args, context)
        return [*_pair_with_context(_parameter_defaults(node.args), context), (node.body, inner)]

    def _make_function_scope(self, args: ast.arguments, context: _NodeContext) -> _NodeContext:
        """Return the context of a function's body: a new scope in which its parameters are bound."""
        scope = _Scope("function", context.scope)
        for arg in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg):
            if arg is not None:
                if arg.arg in scope.bindings:
                    self._add_problem(arg, f"syntax error: the parameter `{arg.arg}` comes twice")
                scope.bind(arg.arg, _Binding("other", arg))
                self._mark_span_exempt("name", arg.annotation)
        return _NodeContext(scope, context.caught)

    def _visit_classdef(self, node: ast.ClassDef, context: _NodeContext) -> NodesWithContext:
        """Bind a class, record problems of its bases and body, and return its inner nodes with their scopes."""
        context.scope.bind(node.name, _Binding("other", node))
        if node.bases or node.keywords:
            self._add_problem(node, f"classes have no bases in a program; write `class {node.name}:`")
        scope = _Scope("class", context.scope)
        for parameter in getattr(node, "type_params", ()):
            scope.bind(parameter.name, _Binding("other", parameter))
        for statement in node.body:
            self._check_class_statement(statement)
        inner = _NodeContext(scope, context.caught)
        keywords = [keyword.value for keyword in node.keywords]
        return [
            *_pair_with_context([*node.decorator_list, *node.bases, *keywords], context),
            *_pair_with_context(node.body, inner),
        ]

    def _check_class_statement(self, statement: ast.stmt) -> None:
        """Record a problem for a statement that the body of a class in the sandbox cannot have."""
        match statement:
            case ast.FunctionDef(decorator_list=[first, *_]) | ast.AsyncFunctionDef(decorator_list=[first, *_]):
                self._add_problem(first, "methods have no decorators in a program; write a plain method or a function")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Pass() | ast.Expr(ast.Constant()):
                pass
            case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name()):
                pass
            case _:
                # The other statements have messages of their own.
                if type(statement).__name__ not in REFUSED:
                    self._add_problem(statement, "the body of a class has methods and `name = value`, and nothing else")

    def _enter_comprehension(self, node: Any, context: _NodeContext) -> NodesWithContext:
        """Yield the inner nodes of a comprehension; all but the first iterable are in a scope of their own."""
        inner = context._replace(scope=_Scope("comprehension", context.scope))
        for number, generator in enumerate(node.generators):
            if generator.is_async:
                self._add_problem(generator.iter, "programs have no `async for`; await the list, and loop over it")
            self._record_if_unawaited_call(generator.iter, "looped over")
            yield generator.iter, inner if number else context
            yield generator.target, inner
            yield from _pair_with_context(generator.ifs, inner)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        yield from _pair_with_context(parts, inner)

    _visit_listcomp = _visit_setcomp = _visit_dictcomp = _visit_generatorexp = _enter_comprehension

    def _visit_for(self, node: ast.For, context: _NodeContext) -> NodesWithContext:
        """Return the inner nodes, the body as inside a loop; record an iterated call that lacks its ``await``."""
        self._record_if_unawaited_call(node.iter, "looped over")
        return self._visit_asyncfor(node, context)

    def _visit_asyncfor(self, node: ast.For | ast.AsyncFor, context: _NodeContext) -> NodesWithContext:
        """Return the inner nodes, the body as inside a loop."""
        return [
            *_pair_with_context([node.target, node.iter, *node.orelse], context),
            *_pair_with_context(node.body, context._replace(is_in_loop=True)),
        ]

    def _visit_while(self, node: ast.While, context: _NodeContext) -> NodesWithContext:
        """Return the inner nodes, the body as inside a loop."""
        return [
            *_pair_with_context([node.test, *node.orelse], context),
            *_pair_with_context(node.body, context._replace(is_in_loop=True)),
        ]

    def _visit_break(self, node: ast.Break | ast.Continue, context: _NodeContext) -> None:
        """Record a syntax error for a ``break`` or ``continue`` outside of a loop."""
        if not context.is_in_loop:
            self._add_problem(node, f"syntax error: `{type(node).__name__.lower()}` outside of a loop")

    _visit_continue = _visit_break

    def _visit_try(self, node: ast.Try, context: _NodeContext) -> NodesWithContext:
        """Mark the problems in the body that the handlers catch as harmless."""
        caught = {what for handler in node.handlers for what in _caught_problem_kinds(handler.type)}
        for kind in caught:
            self._mark_span_exempt(kind, node.body[0], node.body[-1])
        inner = context._replace(caught=context.caught | caught)
        return [
            *_pair_with_context(node.body, inner),
            *_pair_with_context([*node.handlers, *node.orelse, *node.finalbody], context),
        ]

    def _visit_excepthandler(self, node: ast.ExceptHandler, context: _NodeContext) -> NodesWithContext:
        """Bind the name of the exception; problems in the handler's classes are harmless."""
        if node.name is not None:
            context.scope.bind(node.name, _Binding("other", node))
        # The classes of a handler are looked up only after an exception, which most programs never raise.
        self._mark_span_exempt("name", node.type)
        self._mark_span_exempt("attribute", node.type)
        types = context._replace(caught=context.caught | {"name", "attribute"})
        return [*([(node.type, types)] if node.type is not None else []), *_pair_with_context(node.body, context)]

    def _visit_matchas(self, node: ast.MatchAs | ast.MatchStar, context: _NodeContext) -> None:
        """Bind the name of a match pattern, if it has one."""
        if node.name is not None:
            context.scope.bind(node.name, _Binding("other", node))

    _visit_matchstar = _visit_matchas

    def _visit_matchmapping(self, node: ast.MatchMapping, context: _NodeContext) -> None:
        """Bind the name of ``**rest`` in a match pattern, if it has one."""
        if node.rest is not None:
            context.scope.bind(node.rest, _Binding("other", node))

    # --- how calls are used

    def _visit_expr(self, node: ast.Expr, context: _NodeContext) -> None:
        """Record the calls whose values the statement drops, which need an ``await``."""
        parts: list[ast.expr] = [node.value]
        for part in parts:
            match part:
                case ast.Call():
                    self._unawaited[id(part)] = ""
                case ast.IfExp(body=body, orelse=orelse):
                    parts += [body, orelse]
                case ast.Tuple(elts=members) | ast.List(elts=members) | ast.Set(elts=members):
                    parts += members
                case ast.ListComp(elt=member) | ast.SetComp(elt=member) | ast.GeneratorExp(elt=member):
                    parts.append(member)
                case _:
                    pass

    def _record_if_unawaited_call(self, node: ast.expr | None, use: str) -> None:
        """Record that a node is used without ``await``, if it is a call; *use* describes the use in the message."""
        if isinstance(node, ast.Call):
            self._unawaited[id(node)] = use

    def _visit_attribute(self, node: ast.Attribute, context: _NodeContext) -> NodesWithContext:
        """Record a read of an attribute, and a call before it that lacks its ``await``."""
        self._record_if_unawaited_call(node.value, "asked for an attribute")
        if isinstance(node.ctx, ast.Load):
            self._attributes.append((node, context))
        return [(node.value, context)]

    def _visit_subscript(self, node: ast.Subscript, context: _NodeContext) -> NodesWithContext:
        """Record a call before the brackets that lacks its ``await``."""
        self._record_if_unawaited_call(node.value, "asked for an item")
        return _pair_with_context([node.value, node.slice], context)

    def _visit_binop(self, node: ast.BinOp, context: _NodeContext) -> None:
        """Record calls among the operands that lack their ``await``."""
        self._record_if_unawaited_call(node.left, "computed with")
        self._record_if_unawaited_call(node.right, "computed with")

    def _visit_formattedvalue(self, node: ast.FormattedValue, context: _NodeContext) -> None:
        """Record a call in an f-string that lacks its ``await``."""
        self._record_if_unawaited_call(node.value, "printed")

    def _visit_call(self, node: ast.Call, context: _NodeContext) -> None:
        """Record a call, and calls among its arguments that a builtin would use without ``await``."""
        self._calls.append((node, context))
        if isinstance(node.func, ast.Name):
            called = node.func.id
            if called in READS_ITS_ARGUMENTS:
                for argument in node.args:
                    self._record_if_unawaited_call(argument, f"given to `{called}`")

    # --- problems

    def _check_name(self, node: ast.Name, context: _NodeContext) -> None:
        """Record a problem for a name that is not defined, unless ``exec`` or a ``try`` makes it uncertain."""
        name = node.id
        is_there = name in BUILTINS or name in ALIASES or name in self._stubs.functions
        if is_there or "name" in context.caught or self.runs_text or context.scope.resolve(name) is not None:
            return
        self._add_problem(node, self._unknown_name_text(name, context))

    def _unknown_name_text(self, name: str, context: _NodeContext) -> str:
        """Return the message for an undefined name, with a similar name or another hint."""
        if name in MODULES:
            return f"`{name}` is not imported"
        if name in ABSENT:
            return f"programs have no `{name}`"
        called = [f.name for f in self._stubs.functions.values() if f.of == name]
        if called:
            return f"there is no `{name}`; the function is called `{called[0]}`"
        if len(self._problems) > MOST_SHOWN:
            return f"there is no `{name}`"
        visible = (one for scope in context.scope.iterate_outwards() for one in scope.bindings)
        names = sorted({*self._stubs.functions, *islice(visible, MAX_COMPARED_NAMES), *BUILTINS})
        near = find_nearest(name[:MAX_NAME_CHARS], names, max_count=1)
        return f"there is no `{name}`{f'; did you mean `{near[0]}`?' if near else ''}"

    def _check_attribute(self, node: ast.Attribute, context: _NodeContext) -> None:
        """Record a problem for an attribute that its module lacks in the sandbox."""
        module = self._find_referenced_module(node.value, context)
        if module is None or "attribute" in context.caught or node.attr.startswith("_"):
            return
        if node.attr not in MODULES[module] and f"{module}.{node.attr}" not in MODULES:
            instead = INSTEAD.get(node.attr, "") if module == "asyncio" else ""
            self._add_problem(node, f"`{module}` has no `{node.attr}` in a program{'; ' + instead if instead else ''}")

    def _find_referenced_module(self, node: ast.expr, context: _NodeContext) -> str | None:
        """Return the module to which an expression certainly refers; ``None`` if it is not certain."""
        found = context.scope.resolve(node.id) if isinstance(node, ast.Name) else None
        if found is None:
            return None
        kinds = {(binding.kind, binding.of) for binding in found[1]}
        kind, of = kinds.pop()
        return of if not kinds and kind == "module" and of in MODULES else None

    def _check_call(self, node: ast.Call, context: _NodeContext) -> None:
        """Record a problem for a call that lacks its ``await`` or has wrong arguments."""
        of_asyncio = self._find_asyncio_function(node.func, context)
        how = self._unawaited.get(id(node))
        if of_asyncio is not None:
            if of_asyncio in AWAITED and how is not None:
                self._add_problem(node, _missing_await_text(f"asyncio.{of_asyncio}", how))
            if of_asyncio == "gather" and node.keywords and "arguments" not in context.caught:
                words = f"{node.keywords[0].arg}=" if node.keywords[0].arg else "**"
                said = f"`asyncio.gather` takes no `{words}` in a program; catch the errors inside of what you gather"
                self._add_problem(node.keywords[0].value, said)
        elif isinstance(node.func, ast.Name):
            self._check_function_call(node, node.func.id, how, context)

    def _find_asyncio_function(self, func: ast.expr, context: _NodeContext) -> str | None:
        """Return the name of the ``asyncio`` function that an expression certainly refers to, else ``None``."""
        if isinstance(func, ast.Attribute):
            return func.attr if self._find_referenced_module(func.value, context) == "asyncio" else None
        found = context.scope.resolve(func.id) if isinstance(func, ast.Name) else None
        if found is None or {(b.kind, b.of.partition(".")[0]) for b in found[1]} != {("member", "asyncio")}:
            return None
        return found[1][0].of.partition(".")[2]

    def _check_function_call(self, node: ast.Call, name: str, use: str | None, context: _NodeContext) -> None:
        """Record the problems of a call by name: a missing ``await``, wrong arguments, or a local variable of that name."""
        found = context.scope.resolve(name)
        if found is not None:
            scope, bindings = found
            is_async = {binding.kind for binding in bindings} == {"async"}
            if is_async and use is not None:
                self._add_problem(node, _missing_await_text(name, use))
            if name in self._stubs.functions and self._is_unbound_at_call(node, scope, bindings, context):
                self._add_problem(
                    node, f"`{name}` is a variable of this function, so it cannot be called; name it otherwise"
                )
            return
        stub = self._stubs.functions.get(name)
        if stub is None:
            return
        if use is not None:
            self._add_problem(node, _missing_await_text(name, use))
        is_whole = not any(isinstance(a, ast.Starred) for a in node.args) and all(k.arg for k in node.keywords)
        if is_whole and "arguments" not in context.caught:
            fault = stub.find_call_error(len(node.args), [k.arg for k in node.keywords if k.arg])
            if fault:
                self._add_problem(node, fault)

    def _is_unbound_at_call(
        self, node: ast.Call, scope: _Scope, bindings: list[_Binding], context: _NodeContext
    ) -> bool:
        """Return True if a name is local only because of its own call: ``price = await price(1)``."""
        if scope.kind != "function" or len(bindings) != 1 or context.scope is not scope:
            return False
        target = bindings[0].node
        name = getattr(target, "id", "")
        if "name" in context.caught or name in scope.elsewhere:
            return False
        value = self._values.get(id(target))
        return (value.value if isinstance(value, ast.Await) else value) is node

    def _check_nonlocal(self, node: ast.Nonlocal, context: _NodeContext) -> None:
        """Record a problem for each ``nonlocal`` name that no surrounding function binds."""
        around = [*context.scope.iterate_outwards()][1:]
        for name in node.names:
            if not any(outer.kind == "function" and name in outer.bindings for outer in around):
                self._add_problem(
                    node, f"syntax error: no function around this one has a variable `{name}`; use `global`"
                )


def _find_depth_problem(node: ast.AST, scope: _Scope, depth: int) -> str:
    """Return the message for a node that is nested too deeply, or ``""``."""
    if depth > MAX_DEPTH_LEVELS:
        return "the program is nested too deeply to be read"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and scope.functions >= MOST_FUNCTIONS:
        return TOO_NESTED
    if isinstance(node, SCOPES) and scope.depth >= MOST_SCOPES:
        return f"functions, lambdas and comprehensions are nested deeper than {MOST_SCOPES} levels; name some of them before"
    return ""


SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
"""The nodes with their own scope, without classes."""
NodesWithContext = Iterable[tuple[ast.AST, _NodeContext]]


def _pair_with_context(nodes: Iterable[ast.AST], context: _NodeContext) -> list[tuple[ast.AST, _NodeContext]]:
    return [(node, context) for node in nodes]


def _parameter_defaults(args: ast.arguments) -> list[ast.expr]:
    return [*args.defaults, *[default for default in args.kw_defaults if default is not None]]


def _missing_await_text(name: str, use: str) -> str:
    """Return the message for a call without ``await``; *use* describes its use, ``""`` if its value is dropped."""
    if not use:
        return f"`{name}(...)` is never awaited, so nothing happens; write `await {name}(...)`"
    return f"`{name}(...)` is {use} before it is awaited; write `(await {name}(...))`"


def _caught_problem_kinds(node: ast.expr | None) -> set[str]:
    """Return the kinds of problems that an exception handler expects."""
    if node is None:
        return CAUGHT["Exception"]
    kinds = node.elts if isinstance(node, ast.Tuple) else [node]
    everything = {what for whats in CAUGHT.values() for what in whats}
    found: set[str] = set()
    for kind in kinds:
        if isinstance(kind, ast.Name) and (kind.id in BUILTINS or kind.id in ALIASES):
            found |= CAUGHT.get(kind.id, set())
        elif not isinstance(kind, ast.Attribute):
            # A variable with unknown exception classes.
            found |= everything
    return found


NO_STUBS = Stubs(MappingProxyType({}), "", "", MappingProxyType({}), MappingProxyType({}))


# --- the sandbox's own checker --------------------------------------------------------------------------------------


STOP: Final = f"{OURS}stop"
CANARY: Final = f"{OURS}canary"
LACKING = """

def filter(*args: Any, **kwargs: Any) -> Any: ...
def format(*args: Any, **kwargs: Any) -> Any: ...
def getattr(*args: Any, **kwargs: Any) -> Any: ...
def hasattr(*args: Any, **kwargs: Any) -> bool: ...
def map(*args: Any, **kwargs: Any) -> Any: ...
def open(*args: Any, **kwargs: Any) -> Any: ...
def setattr(*args: Any, **kwargs: Any) -> None: ...
class FileExistsError(OSError): ...
class FileNotFoundError(OSError): ...
class IsADirectoryError(OSError): ...
class NotADirectoryError(OSError): ...
class PermissionError(OSError): ...
class ImportError(Exception): ...
class ModuleNotFoundError(ImportError): ...
class UnboundLocalError(NameError): ...
class UnicodeDecodeError(ValueError): ...
class UnicodeEncodeError(ValueError): ...
"""
"""Builtins of the sandbox that its type checker does not know."""
BESIDE = (
    LACKING
    + "".join([f"{alias} = {error}\n" for alias, error in ALIASES.items()])
    + f"def {STOP}() -> Any: ...\nasync def {CANARY}(needed: int) -> None: ...\n"
)
REFERENCES = frozenset({"unresolved-reference"})
IMPORTS = frozenset({"unresolved-import"})
AWAITS = frozenset({"unused-awaitable"})
ARGUMENTS = frozenset(
    {"missing-argument", "unknown-argument", "too-many-positional-arguments", "parameter-already-assigned"}
)
OF_A_FUNCTION = re.compile(r"function `([^`]+)`")
LIMITS: ResourceLimits = {"max_turn_duration_secs": 2.0, "max_memory": 256 * 1024 * 1024}
"""The limits of a check. A worker reports an exceeded limit on the standard error of this process, so they are high."""
MAX_ANSWERS = 100
"""The most calls of the host before the stopping line, such as look-ups of modules."""
KEPT_CANARIES = 100
"""The number of cached stub texts that the checker understands; an application has a few of some kilobytes each."""


@frozen
class CheckedProgram:
    """
    The result of a sandbox's check of a program.

    Attributes:
        refused: Certain problems, such as syntax errors and missing modules; the program does not run.
        told: Possible problems; the model sees them if the program fails.
        is_whole: Whether the check was complete; if not, at most the syntax was checked.
    """

    refused: tuple[ProgramProblem, ...] = ()
    told: tuple[ProgramProblem, ...] = ()
    is_whole: bool = True


def check_with_monty(checkout: Checkout, code: str, stubs: Stubs, known_names: Collection[str] = ()) -> CheckedProgram:
    """
    Check a program in separate sandbox sessions that stop before its first line.

    The check takes tens of milliseconds and a worker, so it must not run in the thread of an event loop. The caller checks the length
    first, with ``find_program_problems``.

    Args:
        checkout: Opens a session in a worker.
        code: The program.
        stubs: The functions that it may call.
        known_names: The names that earlier programs defined, as ``find_defined_names`` returns them.
    """
    from pydantic_monty import MontyError

    try:
        unread = _find_parse_problem(checkout, code)
        if unread is not None:
            return CheckedProgram((unread,))
        text = stubs.text + BESIDE
        if not _can_check_with_stubs(checkout, text):
            return CheckedProgram(is_whole=False)
        return _make_checked_program(_run_checker(checkout, code, text, known_names), code, stubs, known_names)
    except MontyError:
        # The worker died or reached a limit. The sandbox parses the program again before it runs.
        return CheckedProgram(is_whole=False)


def _find_parse_problem(checkout: Checkout, code: str) -> ProgramProblem | None:
    """Return why the sandbox cannot parse a program, or ``None``. It parses all of it before the stopping line runs."""
    from pydantic_monty import CollectString, MontyCrashedError, MontyError

    with checkout(limits=LIMITS) as session:
        try:
            session.feed_start(f"{STOP}()\n{code}", print_callback=CollectString())
        except MontyCrashedError as error:
            if not getattr(error, "timed_out", False):
                raise
            # Parsing takes as long when the program runs.
            seconds = LIMITS["max_turn_duration_secs"]
            return ProgramProblem(1, 1, f"the sandbox needs more than {seconds:g} s to read this; make it shorter")
        except MontyError as error:
            return _problem_from_parse_error(error)
    return None


def _problem_from_parse_error(error: Any) -> ProgramProblem:
    """Return the problem of a program that the sandbox cannot parse, with its line and column."""
    frames = error.traceback() if hasattr(error, "traceback") else []
    line, column = (frames[-1].line - 1, frames[-1].column) if frames else (1, 1)
    words = error.display("msg") if frames else str(error)
    return ProgramProblem(max(1, line), max(1, column), f"the sandbox cannot read this: {words}")


_CANARIES: OrderedDict[str, None] = OrderedDict()
_SINGING = Lock()


def _can_check_with_stubs(checkout: Checkout, stubs_text: str) -> bool:
    """Check an invalid call with the stubs, and return True if the checker rejects it, as it should. A success is cached."""
    with _SINGING:
        if stubs_text in _CANARIES:
            _CANARIES.move_to_end(stubs_text)
            return True
    found = _run_checker(checkout, f"await {CANARY}()", stubs_text, ())
    if not any(each["name"] in ARGUMENTS for each in found):
        return False
    with _SINGING:
        _CANARIES[stubs_text] = None
        while len(_CANARIES) > KEPT_CANARIES:
            _CANARIES.popitem(last=False)
    return True


def _run_checker(checkout: Checkout, code: str, stubs_text: str, known_names: Collection[str]) -> list[dict[str, Any]]:
    """Run the type checker on a program, which itself does not run, and return the findings. Names in *known_names* have any type."""
    from pydantic_monty import CollectString, MontyTypingError

    # The names are assigned in the program, since the checker does not see stubs with a leading underscore. The assignment also hides
    # a function of the same name, as at run time.
    names = [
        name
        for name in sorted(known_names)
        if name.isidentifier() and not keyword.iskeyword(name) and name not in BUILTINS and not name.startswith("__")
    ]
    first = "; ".join([f"{STOP}()", *[f"{name} = {STOP}()" for name in names]])
    with checkout(
        type_check=True,
        type_check_stubs=stubs_text,
        type_check_format="json",
        limits=LIMITS,
    ) as session:
        try:
            snapshot = session.feed_start(f"{first}\n{code}", print_callback=CollectString())
            _run_until_stop(snapshot)
        except MontyTypingError as error:
            found: list[dict[str, Any]] = json.loads(error.display())
            return found
    return []


def _run_until_stop(snapshot: SyncSnapshot) -> None:
    """Resume the checked program until it calls ``STOP`` in its first line; leave earlier external calls unhandled."""
    from pydantic_monty import FunctionSnapshot

    for _ in range(MAX_ANSWERS):
        if not isinstance(snapshot, FunctionSnapshot) or snapshot.function_name == STOP:
            return
        snapshot = snapshot.resume_not_handled()


def _make_checked_program(
    findings: list[dict[str, Any]], code: str, stubs: Stubs, known_names: Collection[str]
) -> CheckedProgram:
    """Sort the checker's findings into refusals and warnings, without those known to be wrong."""
    tree = parse_program(code)
    analyzer = _ProgramAnalyzer(code, tree, stubs, known_names) if isinstance(tree, ast.Module) else None
    refused, told = [], []
    for each in findings[:MOST_PROBLEMS]:
        problem = ProgramProblem(each["location"]["row"] - 1, each["location"]["column"], each["message"])
        kind = each["name"]
        if problem.line < 1 or kind == "invalid-syntax":
            # The sandbox has parsed the program, so its syntax is valid: `return` outside of a function is allowed, too.
            continue
        if kind in REFERENCES and ANY_NAME in known_names:
            continue
        rating = _rate_problem(problem, kind, stubs, analyzer)
        if rating == "fails":
            refused.append(problem)
        elif rating == "may fail":
            told.append(ProgramProblem(problem.line, problem.column, f"{problem.text} ({kind})"))
    return CheckedProgram(_sort_distinct_problems(refused), _sort_distinct_problems(told))


def _sort_distinct_problems(problems: Iterable[ProgramProblem]) -> tuple[ProgramProblem, ...]:
    """Return the distinct problems in order of their positions, at most 200."""
    distinct = dict.fromkeys(sorted(problems, key=lambda problem: (problem.line, problem.column)))
    return tuple(distinct)[:MOST_PROBLEMS]


def _rate_problem(
    problem: ProgramProblem, kind: str, stubs: Stubs, analyzer: _ProgramAnalyzer | None
) -> Literal["fails", "may fail", "works"]:
    """Return whether a program with this problem certainly fails, may fail, or works because the checker's finding is wrong."""
    if kind in REFERENCES:
        return (
            "works" if analyzer is not None and (analyzer.runs_text or analyzer.is_exempt("name", problem)) else "fails"
        )
    if kind in IMPORTS:
        return "works" if analyzer is not None and problem.line in analyzer.good_imports else "fails"
    if kind in AWAITS:
        return "fails"
    if kind not in ARGUMENTS or (analyzer is not None and analyzer.is_exempt("arguments", problem)):
        return "may fail"
    called = OF_A_FUNCTION.search(problem.text)
    name = called[1] if called else ""
    return "fails" if name in stubs.functions and (analyzer is None or analyzer.refers_to_stub(name)) else "may fail"
