"""
What is looked at before a program runs: its text alone, and after that the sandbox's own checker, behind a line that stops.

Whoever wrote the program may be anybody, so nothing of it is run here, and nothing recurses as deep as it nests. A refusal of a
program that would have run costs more than a slip that is found only when it runs: what is not certain is let through.
"""

from __future__ import annotations

import ast
import io
import json
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
from stepengine.sandbox.stubs import ALIASES, MAX_NAME_CHARS, OURS, Function, Stubs
from stepengine.workspace.after_fork import Lock

if TYPE_CHECKING:
    from pydantic_monty import ResourceLimits, SyncSnapshot


__all__ = (
    "NO_STUBS",
    "CheckedProgram",
    "ProgramProblem",
    "checked_by_monty",
    "globals_of",
    "parsed",
    "problems",
    "shown",
)

MAX_PROGRAM_BYTES = 64 * 1024
"""A model writes some kilobytes for one task; the checks take time in proportion to the length."""
MAX_DEPTH_LEVELS = 300
"""The sandbox has a limit of its own at less than a thousand, and code that people read has some ten levels."""
MOST_FUNCTIONS, MOST_SCOPES = 6, 12
"""
How deep functions may be nested, and functions, lambdas and comprehensions together.

The sandbox reads a definition about three times for each one around it: twenty lines take it a minute.
"""
MOST_PROBLEMS, MOST_SHOWN = 200, 20
"""Problems that are looked for, and those that are shown: a model corrects a screen of them at a time."""
MAX_COMPARED_NAMES = 300
"""As many names of a program are compared with one that is unknown: a message must not take longer than a blink."""
SHOWN_BEFORE, SHOWN_CHARS = 60, 120
"""Characters of a line before the place that is meant, and of the line."""


@frozen
class ProgramProblem:
    """
    Something that is wrong in a program.

    Attributes:
        line: From 1.
        column: In characters, from 1.
        text: What is wrong, and what would have been fine.
    """

    line: int
    column: int
    text: str


def problems(code: str, stubs: Stubs, known: Collection[str] = ()) -> tuple[ProgramProblem, ...]:
    """
    Return what is certainly wrong in a program, in the order of its lines.

    Nothing is said of a program that this Python cannot read and a later one may: the sandbox reads all of them, and refuses what
    it cannot read before it runs any of it.

    Args:
        code: The program.
        stubs: The functions that it has.
        known: The names that programs before it have left.
    """
    tree = parsed(code)
    if isinstance(tree, ProgramProblem):
        return (tree,)
    return _Walk(code, tree, stubs, known).found() if tree is not None else ()


def globals_of(code: str) -> frozenset[str]:
    """Return the names that a program may leave to those after it; every word of a program that this Python cannot read."""
    tree = parsed(code)
    if isinstance(tree, ProgramProblem):
        return frozenset()
    if tree is None:
        return frozenset(re.findall(r"[^\W\d]\w*", code))
    walk = _Walk(code, tree, NO_STUBS, ())
    return frozenset(walk.module.bindings)


def shown(found: Sequence[ProgramProblem], code: str) -> str:
    """Return problems as a model reads them: each with its line and a caret, at most twenty."""
    lines = LINE.split(code)
    parts = [_show_problem(problem, lines[problem.line - 1] if problem.line <= len(lines) else "") for problem in found]
    if len(parts) > MOST_SHOWN:
        parts[MOST_SHOWN:] = [f"... and {len(parts) - MOST_SHOWN} more."]
    return "\n".join(parts)


TOO_NESTED = f"functions are nested deeper than {MOST_FUNCTIONS} levels; move the inner ones out of the others"
LINE = re.compile(r"\r\n|\r|\n")
"""Where Python ends a line; ``str.splitlines`` ends some at other places."""


def _show_problem(problem: ProgramProblem, line: str) -> str:
    head = f"line {problem.line}, column {problem.column}: {problem.text}"
    if not line.strip():
        return head
    first = max(0, min(problem.column - 1, len(line)) - SHOWN_BEFORE)
    part = line[first : first + SHOWN_CHARS]
    before = part[: max(0, problem.column - 1 - first)]
    caret = "".join(["\t" if char == "\t" else " " for char in before]) + "^"
    return f"{head}\n    {part}\n    {caret}"


# --- reading --------------------------------------------------------------------------------------------------------

_WARNINGS = Lock()
"""Filters of warnings belong to the process."""
NEWER = (
    (12, re.compile(r"""[fF][rR]?['"]|[rR][fF]['"]""")),  # any quote inside of an f-string
    (12, re.compile(r"^\s*(?:async\s)?\s*(?:def|class|type)\s+\w+\s*[\[=]")),
    (14, re.compile(r"^\s*except\b")),  # more than one, without brackets
    (14, re.compile(r"""[tT][rR]?['"]|[rR][tT]['"]""")),
)
"""From which 3.x on a line of this kind may be read that was not before."""
NEWEST_VERSION = (3, 14)
"""The version of Python whose parser reads every syntax that the sandbox knows."""


def parsed(code: str) -> ast.Module | ProgramProblem | None:
    """Return a program as a tree, why it cannot be read, or ``None`` where a later Python may know better."""
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
        if _may_be_newer(error, code):
            return _too_nested(code)
        return ProgramProblem(error.lineno or 1, max(1, error.offset or 1), f"syntax error: {error.msg}")
    except (RecursionError, MemoryError):
        return ProgramProblem(1, 1, "the program is nested too deeply to be read")
    except ValueError as error:
        return ProgramProblem(1, 1, f"the program cannot be read: {error}")


def _too_nested(code: str) -> ProgramProblem | None:
    """Return where functions of a program that this Python cannot parse are nested too deeply, as its tokens tell."""
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


def _may_be_newer(error: SyntaxError, code: str) -> bool:
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
    """One place at which a name gets a value."""

    kind: Literal["async", "module", "member", "known", "other"]
    node: ast.AST | None = None
    of: str = ""


class _Scope:
    """A module, function, class or comprehension, and the names that are bound in it."""

    def __init__(self, kind: Literal["module", "function", "class", "comprehension"], parent: _Scope | None) -> None:
        self.kind, self.parent = kind, parent
        self.depth: int = 0 if parent is None else parent.depth + (kind != "class")
        """How many functions, lambdas and comprehensions are around what stands in it."""
        self.functions: int = 0 if parent is None else parent.functions
        """How many functions are, without lambdas."""
        self.bindings: dict[str, list[_Binding]] = {}
        self.elsewhere: set[str] = set()
        """Names that are global or nonlocal here."""

    def bind(self, name: str, binding: _Binding) -> None:
        self.bindings.setdefault(name, []).append(binding)

    def resolved(self, name: str) -> tuple[_Scope, list[_Binding]] | None:
        """Return where a name gets its values from; those of a class are seen directly in its body alone."""
        scope: _Scope | None = self
        is_direct = True
        while scope is not None:
            if name in scope.bindings and (is_direct or scope.kind != "class"):
                return scope, scope.bindings[name]
            is_direct = is_direct and scope.kind == "comprehension"
            scope = scope.parent
        return None

    def names(self) -> Iterator[str]:
        scope: _Scope | None = self
        while scope is not None:
            yield from scope.bindings
            scope = scope.parent


class _NodePlace(NamedTuple):
    """Where a node stands."""

    scope: _Scope
    caught: frozenset[str]
    """What goes wrong here is caught by somebody who expects it: `name`, `import`, `attribute`, `arguments`."""
    is_in_loop: bool = False


CAUGHT = {
    "NameError": {"name"},
    "UnboundLocalError": {"name"},
    "ImportError": {"import"},
    "ModuleNotFoundError": {"import"},
    "AttributeError": {"attribute"},
    "TypeError": {"arguments"},
    # Whoever catches everything around an import expects that there may be none; nobody does so for a name.
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
"""Builtins that can do nothing sensible with a call that nobody has awaited."""
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


class _Walk:
    """A program looked at: first all of it, for what is bound and used where; then what was used is judged."""

    def __init__(self, code: str, tree: ast.Module, stubs: Stubs, known: Collection[str]) -> None:
        self._lines = LINE.split(code)
        self._ends: dict[int, list[int]] = {}
        """Up to which byte each character of a line goes, of lines that are not ASCII."""
        self._stubs = stubs
        self._problems: list[ProgramProblem] = []
        self._loads: list[tuple[ast.Name, _NodePlace]] = []
        self._attributes: list[tuple[ast.Attribute, _NodePlace]] = []
        self._calls: list[tuple[ast.Call, _NodePlace]] = []
        self._nonlocals: list[tuple[ast.Nonlocal, _NodePlace]] = []
        self._unawaited: dict[int, str] = {}
        """How a call is used that nobody awaits, by the id of its node."""
        self._values: dict[int, ast.expr] = {}
        """What is assigned to a name, by the id of the name's node."""
        self.module = _Scope("module", None)
        self.runs_text = False
        self.good_imports: set[int] = set()
        """The lines of imports that are known to work, or to be caught."""
        self.spared: list[tuple[str, tuple[int, int], tuple[int, int]]] = []
        """Where something of a kind does no harm: names in annotations, and whatever is caught."""
        for name in known:
            self.module.bind(name, _Binding("known"))
        self._collect(tree)

    def found(self) -> tuple[ProgramProblem, ...]:
        """Return what is wrong."""
        if not self._problems or not self._is_too_deep:
            for attribute, place in self._attributes:
                self._judge_attribute(attribute, place)
            for call, place in self._calls:
                self._judge_call(call, place)
            for node, place in self._nonlocals:
                self._judge_nonlocal(node, place)
            for name, place in self._loads:
                self._judge_name(name, place)
        return _in_order(self._problems)

    def has_stub(self, name: str) -> bool:
        """Return whether a name of the module means the function of that name wherever it is not bound again."""
        return name in self._stubs.functions and name not in self.module.bindings

    def spares(self, kind: str, problem: ProgramProblem) -> bool:
        """Return whether what is wrong there with a `name` or `arguments` does no harm."""
        place = problem.line, problem.column
        return any(kind == spared and start <= place < end for spared, start, end in self.spared)

    # --- collecting

    _is_too_deep = False

    def _collect(self, tree: ast.Module) -> None:
        waiting: list[tuple[ast.AST, _NodePlace, int]] = [(tree, _NodePlace(self.module, frozenset()), 0)]
        while waiting:
            node, place, depth = waiting.pop()
            too_deep = _too_deep(node, place.scope, depth)
            if too_deep:
                self._say(node, too_deep)
                self._is_too_deep = True
                return
            kind = type(node).__name__
            if kind in REFUSED:
                self._say(node, REFUSED[kind])
            visit = getattr(self, f"_on_{kind.lower()}", None)
            inner = visit(node, place) if visit is not None else _each(ast.iter_child_nodes(node), place)
            waiting += [(child, there, depth + 1) for child, there in inner]

    def _say(self, node: ast.AST, text: str) -> None:
        if len(self._problems) < MOST_PROBLEMS:
            place = self._in_characters(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))
            self._problems.append(ProgramProblem(*place, text))

    def _spare(self, kind: str, first: ast.AST | None, last: ast.AST | None = None) -> None:
        if first is not None:
            span: Any = (first, last or first)
            start, end = (span[0].lineno, span[0].col_offset), (span[1].end_lineno, span[1].end_col_offset)
            self.spared.append((kind, self._in_characters(*start), self._in_characters(*end)))

    def _in_characters(self, line: int, offset: int) -> tuple[int, int]:
        source = self._lines[line - 1] if line <= len(self._lines) else ""
        if source.isascii():
            return line, offset + 1
        ends = self._ends.get(line)
        if ends is None:
            # Once a line: a line of a thousand parameters was encoded for each of them, and four times the line took ten times the time.
            ends = self._ends[line] = list(accumulate([len(one.encode(errors="surrogatepass")) for one in source]))
        return line, bisect_right(ends, offset) + 1

    def _on_name(self, node: ast.Name, place: _NodePlace) -> Inner:
        if isinstance(node.ctx, ast.Load):
            self._loads.append((node, place))
        elif isinstance(node.ctx, ast.Store):
            place.scope.bind(node.id, _Binding("other", node))
        return ()

    def _on_namedexpr(self, node: ast.NamedExpr, place: _NodePlace) -> Inner:
        scope = place.scope
        while scope.kind == "comprehension" and scope.parent is not None:
            scope = scope.parent
        scope.bind(node.target.id, _Binding("other", node))
        return [(node.value, place)]

    def _on_assign(self, node: ast.Assign, place: _NodePlace) -> Inner:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._values[id(target)] = node.value
        return _each([*node.targets, node.value], place)

    def _on_annassign(self, node: ast.AnnAssign, place: _NodePlace) -> Inner:
        self._spare("name", node.annotation)
        return _each([node.target, *([node.value] if node.value is not None else [])], place)

    def _on_augassign(self, node: ast.AugAssign, place: _NodePlace) -> Inner:
        if isinstance(node.op, ast.MatMult):
            self._say(node, "programs have no `@=`")
        self._misuse(node.value, "computed with")
        return _each([node.target, node.value], place)

    def _on_import(self, node: ast.Import, place: _NodePlace) -> Inner:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._judge_module(node, alias.name, place)
            module = alias.name if alias.asname else top
            place.scope.bind(alias.asname or top, _Binding("module", node, module))
        return ()

    def _on_importfrom(self, node: ast.ImportFrom, place: _NodePlace) -> Inner:
        module = node.module or ""
        if node.level:
            self._say(node, "there is nothing to import from; a program stands alone")
        elif module == "__future__" or self._judge_module(node, module, place):
            self._judge_members(node, module, place)
        for alias in node.names:
            if alias.name == "*":
                self._say(node, f"programs have no `import *`; name what you need of `{module}`")
                continue
            whole = f"{module}.{alias.name}"
            kind: Literal["module", "member"] = "module" if whole in MODULES else "member"
            place.scope.bind(alias.asname or alias.name, _Binding(kind, node, whole))
        return ()

    def _judge_module(self, node: ast.stmt, module: str, place: _NodePlace) -> bool:
        if module in MODULES or "import" in place.caught:
            self.good_imports.add(node.lineno)
            return module in MODULES
        near = find_nearest(module[:MAX_NAME_CHARS], MODULES, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are {list_names(sorted(MODULES))}"
        self._say(node, f"there is no module `{module}` in a program; {hint}")
        return False

    def _judge_members(self, node: ast.ImportFrom, module: str, place: _NodePlace) -> None:
        lacking = [alias.name for alias in node.names if alias.name not in {*MODULES.get(module, ()), "*"}]
        if module == "__future__" or not lacking or "import" in place.caught:
            self.good_imports.add(node.lineno)
            return
        for name in lacking:
            instead = INSTEAD.get(name, "") if module == "asyncio" else ""
            self._say(node, f"`{module}` has no `{name}` in a program{'; ' + instead if instead else ''}")

    def _on_global(self, node: ast.Global, place: _NodePlace) -> Inner:
        place.scope.elsewhere.update(node.names)
        for name in node.names:
            self.module.bind(name, _Binding("other", node))
        return ()

    def _on_nonlocal(self, node: ast.Nonlocal, place: _NodePlace) -> Inner:
        place.scope.elsewhere.update(node.names)
        self._nonlocals.append((node, place))
        return ()

    def _on_functiondef(self, node: ast.FunctionDef, place: _NodePlace) -> Inner:
        place.scope.bind(node.name, _Binding("other", node))
        return self._function(node, place)

    def _on_asyncfunctiondef(self, node: ast.AsyncFunctionDef, place: _NodePlace) -> Inner:
        place.scope.bind(node.name, _Binding("other" if node.decorator_list else "async", node))
        return self._function(node, place)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, place: _NodePlace) -> Inner:
        self._spare("name", node.returns)
        inner = self._parameters(node.args, place)
        inner.scope.functions += 1
        for parameter in getattr(node, "type_params", ()):
            inner.scope.bind(parameter.name, _Binding("other", parameter))
        return [*_each(node.decorator_list, place), *_each(_defaults(node.args), place), *_each(node.body, inner)]

    def _on_lambda(self, node: ast.Lambda, place: _NodePlace) -> Inner:
        inner = self._parameters(node.args, place)
        return [*_each(_defaults(node.args), place), (node.body, inner)]

    def _parameters(self, args: ast.arguments, place: _NodePlace) -> _NodePlace:
        scope = _Scope("function", place.scope)
        for arg in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg):
            if arg is not None:
                if arg.arg in scope.bindings:
                    self._say(arg, f"syntax error: the parameter `{arg.arg}` comes twice")
                scope.bind(arg.arg, _Binding("other", arg))
                self._spare("name", arg.annotation)
        return _NodePlace(scope, place.caught)

    def _on_classdef(self, node: ast.ClassDef, place: _NodePlace) -> Inner:
        place.scope.bind(node.name, _Binding("other", node))
        if node.bases or node.keywords:
            self._say(node, f"classes have no bases in a program; write `class {node.name}:`")
        scope = _Scope("class", place.scope)
        for parameter in getattr(node, "type_params", ()):
            scope.bind(parameter.name, _Binding("other", parameter))
        for statement in node.body:
            self._judge_member(statement)
        inner = _NodePlace(scope, place.caught)
        keywords = [keyword.value for keyword in node.keywords]
        return [*_each([*node.decorator_list, *node.bases, *keywords], place), *_each(node.body, inner)]

    def _judge_member(self, statement: ast.stmt) -> None:
        match statement:
            case ast.FunctionDef(decorator_list=[first, *_]) | ast.AsyncFunctionDef(decorator_list=[first, *_]):
                self._say(first, "methods have no decorators in a program; write a plain method or a function")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Pass() | ast.Expr(ast.Constant()):
                pass
            case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name()):
                pass
            case _:
                # Whatever has words of its own has been said, or will be.
                if type(statement).__name__ not in REFUSED:
                    self._say(statement, "the body of a class has methods and `name = value`, and nothing else")

    def _comprehension(self, node: Any, place: _NodePlace) -> Inner:
        inner = place._replace(scope=_Scope("comprehension", place.scope))
        for number, generator in enumerate(node.generators):
            if generator.is_async:
                self._say(generator.iter, "programs have no `async for`; await the list, and loop over it")
            self._misuse(generator.iter, "looped over")
            yield generator.iter, inner if number else place
            yield generator.target, inner
            yield from _each(generator.ifs, inner)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        yield from _each(parts, inner)

    _on_listcomp = _on_setcomp = _on_dictcomp = _on_generatorexp = _comprehension

    def _on_for(self, node: ast.For, place: _NodePlace) -> Inner:
        self._misuse(node.iter, "looped over")
        inner = place._replace(is_in_loop=True)
        return [*_each([node.target, node.iter, *node.orelse], place), *_each(node.body, inner)]

    def _on_asyncfor(self, node: ast.AsyncFor, place: _NodePlace) -> Inner:
        inner = place._replace(is_in_loop=True)
        return [*_each([node.target, node.iter, *node.orelse], place), *_each(node.body, inner)]

    def _on_while(self, node: ast.While, place: _NodePlace) -> Inner:
        return [*_each([node.test, *node.orelse], place), *_each(node.body, place._replace(is_in_loop=True))]

    def _on_break(self, node: ast.Break, place: _NodePlace) -> Inner:
        if not place.is_in_loop:
            self._say(node, "syntax error: `break` outside of a loop")
        return ()

    def _on_continue(self, node: ast.Continue, place: _NodePlace) -> Inner:
        if not place.is_in_loop:
            self._say(node, "syntax error: `continue` outside of a loop")
        return ()

    def _on_try(self, node: ast.Try, place: _NodePlace) -> Inner:
        caught = {what for handler in node.handlers for what in _caught_by(handler.type)}
        for kind in caught:
            self._spare(kind, node.body[0], node.body[-1])
        inner = place._replace(caught=place.caught | caught)
        return [*_each(node.body, inner), *_each([*node.handlers, *node.orelse, *node.finalbody], place)]

    def _on_excepthandler(self, node: ast.ExceptHandler, place: _NodePlace) -> Inner:
        if node.name is not None:
            place.scope.bind(node.name, _Binding("other", node))
        # What a handler catches is looked up when something was raised; most programs that catch what there is not never do.
        self._spare("name", node.type)
        self._spare("attribute", node.type)
        types = place._replace(caught=place.caught | {"name", "attribute"})
        return [*([(node.type, types)] if node.type is not None else []), *_each(node.body, place)]

    def _on_matchas(self, node: ast.MatchAs, place: _NodePlace) -> Inner:
        if node.name is not None:
            place.scope.bind(node.name, _Binding("other", node))
        return [(node.pattern, place)] if node.pattern is not None else []

    def _on_matchstar(self, node: ast.MatchStar, place: _NodePlace) -> Inner:
        if node.name is not None:
            place.scope.bind(node.name, _Binding("other", node))
        return ()

    def _on_matchmapping(self, node: ast.MatchMapping, place: _NodePlace) -> Inner:
        if node.rest is not None:
            place.scope.bind(node.rest, _Binding("other", node))
        return _each([*node.keys, *node.patterns], place)

    # --- how calls are used

    def _on_expr(self, node: ast.Expr, place: _NodePlace) -> Inner:
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
        return [(node.value, place)]

    def _misuse(self, node: ast.expr | None, how: str) -> None:
        if isinstance(node, ast.Call):
            self._unawaited[id(node)] = how

    def _on_attribute(self, node: ast.Attribute, place: _NodePlace) -> Inner:
        self._misuse(node.value, "asked for an attribute")
        if isinstance(node.ctx, ast.Load):
            self._attributes.append((node, place))
        return [(node.value, place)]

    def _on_subscript(self, node: ast.Subscript, place: _NodePlace) -> Inner:
        self._misuse(node.value, "asked for an item")
        return _each([node.value, node.slice], place)

    def _on_binop(self, node: ast.BinOp, place: _NodePlace) -> Inner:
        self._misuse(node.left, "computed with")
        self._misuse(node.right, "computed with")
        return _each([node.left, node.right], place)

    def _on_formattedvalue(self, node: ast.FormattedValue, place: _NodePlace) -> Inner:
        self._misuse(node.value, "printed")
        return _each([node.value, *([node.format_spec] if node.format_spec is not None else [])], place)

    def _on_call(self, node: ast.Call, place: _NodePlace) -> Inner:
        self._calls.append((node, place))
        if isinstance(node.func, ast.Name):
            called = node.func.id
            if called in READS_ITS_ARGUMENTS:
                for argument in node.args:
                    self._misuse(argument, f"given to `{called}`")
            self.runs_text = self.runs_text or called == "exec"
        return _each(ast.iter_child_nodes(node), place)

    # --- judging

    def _stub(self, name: str, place: _NodePlace) -> Function | None:
        return self._stubs.functions.get(name) if place.scope.resolved(name) is None else None

    def _judge_name(self, node: ast.Name, place: _NodePlace) -> None:
        name = node.id
        is_there = name in BUILTINS or name in ALIASES or name in self._stubs.functions
        if is_there or "name" in place.caught or self.runs_text or place.scope.resolved(name) is not None:
            return
        self._say(node, self._unknown(name, place))

    def _unknown(self, name: str, place: _NodePlace) -> str:
        if name in MODULES:
            return f"`{name}` is not imported"
        if name in ABSENT:
            return f"programs have no `{name}`"
        called = [f.name for f in self._stubs.functions.values() if f.of == name]
        if called:
            return f"there is no `{name}`; the function is called `{called[0]}`"
        if len(self._problems) > MOST_SHOWN:
            return f"there is no `{name}`"
        names = sorted({*self._stubs.functions, *islice(place.scope.names(), MAX_COMPARED_NAMES), *BUILTINS})
        near = find_nearest(name[:MAX_NAME_CHARS], names, n=1)
        return f"there is no `{name}`{f'; did you mean `{near[0]}`?' if near else ''}"

    def _judge_attribute(self, node: ast.Attribute, place: _NodePlace) -> None:
        module = self._module(node.value, place)
        if module is None or "attribute" in place.caught or node.attr.startswith("_"):
            return
        if node.attr not in MODULES[module] and f"{module}.{node.attr}" not in MODULES:
            instead = INSTEAD.get(node.attr, "") if module == "asyncio" else ""
            self._say(node, f"`{module}` has no `{node.attr}` in a program{'; ' + instead if instead else ''}")

    def _module(self, node: ast.expr, place: _NodePlace) -> str | None:
        """Return which module an expression certainly is."""
        found = place.scope.resolved(node.id) if isinstance(node, ast.Name) else None
        if found is None:
            return None
        kinds = {(binding.kind, binding.of) for binding in found[1]}
        kind, of = kinds.pop()
        return of if not kinds and kind == "module" and of in MODULES else None

    def _judge_call(self, node: ast.Call, place: _NodePlace) -> None:
        of_asyncio = self._of_asyncio(node.func, place)
        how = self._unawaited.get(id(node))
        if of_asyncio is not None:
            if of_asyncio in AWAITED and how is not None:
                self._say(node, _forgotten(f"asyncio.{of_asyncio}", how))
            if of_asyncio == "gather" and node.keywords and "arguments" not in place.caught:
                words = f"{node.keywords[0].arg}=" if node.keywords[0].arg else "**"
                said = f"`asyncio.gather` takes no `{words}` in a program; catch the errors inside of what you gather"
                self._say(node.keywords[0].value, said)
        elif isinstance(node.func, ast.Name):
            self._judge_named(node, node.func.id, how, place)

    def _of_asyncio(self, func: ast.expr, place: _NodePlace) -> str | None:
        if isinstance(func, ast.Attribute):
            return func.attr if self._module(func.value, place) == "asyncio" else None
        found = place.scope.resolved(func.id) if isinstance(func, ast.Name) else None
        if found is None or {(b.kind, b.of.partition(".")[0]) for b in found[1]} != {("member", "asyncio")}:
            return None
        return found[1][0].of.partition(".")[2]

    def _judge_named(self, node: ast.Call, name: str, how: str | None, place: _NodePlace) -> None:
        found = place.scope.resolved(name)
        if found is not None:
            scope, bindings = found
            is_async = {binding.kind for binding in bindings} == {"async"}
            if is_async and how is not None:
                self._say(node, _forgotten(name, how))
            if name in self._stubs.functions and self._is_unbound(node, scope, bindings, place):
                self._say(node, f"`{name}` is a variable of this function, so it cannot be called; name it otherwise")
            return
        stub = self._stubs.functions.get(name)
        if stub is None:
            return
        if how is not None:
            self._say(node, _forgotten(name, how))
        is_whole = not any(isinstance(a, ast.Starred) for a in node.args) and all(k.arg for k in node.keywords)
        if is_whole and "arguments" not in place.caught:
            fault = stub.fault(len(node.args), [k.arg for k in node.keywords if k.arg])
            if fault:
                self._say(node, fault)

    def _is_unbound(self, node: ast.Call, scope: _Scope, bindings: list[_Binding], place: _NodePlace) -> bool:
        """Return whether a call is the whole reason why its function's name is local: ``price = await price(1)``."""
        if scope.kind != "function" or len(bindings) != 1 or place.scope is not scope:
            return False
        target = bindings[0].node
        name = getattr(target, "id", "")
        if "name" in place.caught or name in scope.elsewhere:
            return False
        value = self._values.get(id(target))
        return (value.value if isinstance(value, ast.Await) else value) is node

    def _judge_nonlocal(self, node: ast.Nonlocal, place: _NodePlace) -> None:
        for name in node.names:
            outer = place.scope.parent
            while outer is not None and not (outer.kind == "function" and name in outer.bindings):
                outer = outer.parent
            if outer is None:
                self._say(node, f"syntax error: no function around this one has a variable `{name}`; use `global`")


def _too_deep(node: ast.AST, scope: _Scope, depth: int) -> str:
    """Return why a node stands too deep to be read; ``""`` where it does not."""
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
"""What has a scope of its own and may stand in an expression or a function."""
Inner = Iterable[tuple[ast.AST, _NodePlace]]


def _each(nodes: Iterable[ast.AST], place: _NodePlace) -> list[tuple[ast.AST, _NodePlace]]:
    return [(node, place) for node in nodes]


def _defaults(args: ast.arguments) -> list[ast.expr]:
    return [*args.defaults, *[default for default in args.kw_defaults if default is not None]]


def _forgotten(name: str, how: str) -> str:
    if not how:
        return f"`{name}(...)` is never awaited, so nothing happens; write `await {name}(...)`"
    return f"`{name}(...)` is {how} before it is awaited; write `(await {name}(...))`"


def _caught_by(node: ast.expr | None) -> set[str]:
    """Return what a handler of these exceptions expects to go wrong."""
    if node is None:
        return CAUGHT["Exception"]
    kinds = node.elts if isinstance(node, ast.Tuple) else [node]
    everything = {what for whats in CAUGHT.values() for what in whats}
    found: set[str] = set()
    for kind in kinds:
        if isinstance(kind, ast.Name) and (kind.id in BUILTINS or kind.id in ALIASES):
            found |= CAUGHT.get(kind.id, set())
        elif not isinstance(kind, ast.Attribute):
            # A variable that holds who knows which.
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
"""What the sandbox has and its checker does not know."""
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
"""Of a check. What a worker says of its limits goes to the standard error of this process, so they are wide."""
MAX_ANSWERS = 100
"""Of modules that a program asks the host for while it is checked."""
KEPT_CANARIES = 100
"""Texts of stubs that a check was seen to understand: an application has a few, and each is some kilobytes long."""


@frozen
class CheckedProgram:
    """
    What the sandbox says of a program before any of it runs.

    Attributes:
        refused: For these it is not run: it cannot be read, or it has names, imports or calls that certainly fail.
        told: What else its checker says, which may be wrong; it is told with the result when the program fails.
        is_whole: Whether the checker was at work; without, the text was read by the sandbox, and nothing else is known.
    """

    refused: tuple[ProgramProblem, ...] = ()
    told: tuple[ProgramProblem, ...] = ()
    is_whole: bool = True


def checked_by_monty(checkout: Checkout, code: str, stubs: Stubs, known: Collection[str] = ()) -> CheckedProgram:
    """
    Return what the sandbox says of a program, in sessions of their own that stop before its first line.

    It takes tens of milliseconds and a worker: not for a loop's thread. What is too long for ``problems`` is not for
    here either.

    Args:
        checkout: Gives a session in a worker.
        code: The program.
        stubs: The functions that it has.
        known: The names that programs before it have left.
    """
    from pydantic_monty import MontyError

    try:
        unread = _unread(checkout, code)
        if unread is not None:
            return CheckedProgram((unread,))
        text = stubs.text + BESIDE
        if not _sings(checkout, text):
            return CheckedProgram(is_whole=False)
        return _sorted_out(_diagnostics(checkout, code, text, known), code, stubs, known)
    except MontyError:
        # The worker is gone, or has reached a limit; the text was read by then, or is read again before it runs.
        return CheckedProgram(is_whole=False)


def _unread(checkout: Checkout, code: str) -> ProgramProblem | None:
    """Return why the sandbox cannot read a program, if so; it reads all of it before it runs the line that stops."""
    from pydantic_monty import CollectString, MontyCrashedError, MontyError

    with checkout(limits=LIMITS) as session:
        try:
            session.feed_start(f"{STOP}()\n{code}", print_callback=CollectString())
        except MontyCrashedError as error:
            if not getattr(error, "timed_out", False):
                raise
            # It would take as long when it is run.
            seconds = LIMITS["max_turn_duration_secs"]
            return ProgramProblem(1, 1, f"the sandbox needs more than {seconds:g} s to read this; make it shorter")
        except MontyError as error:
            return _unreadable(error)
    return None


def _unreadable(error: Any) -> ProgramProblem:
    frames = error.traceback() if hasattr(error, "traceback") else []
    line, column = (frames[-1].line - 1, frames[-1].column) if frames else (1, 1)
    words = error.display("msg") if frames else str(error)
    return ProgramProblem(max(1, line), max(1, column), f"the sandbox cannot read this: {words}")


_CANARIES: OrderedDict[str, None] = OrderedDict()
_SINGING = Lock()


def _sings(checkout: Checkout, text: str) -> bool:
    """Return whether a call that must be refused is: with a stub that it cannot read the checker may be silent about all."""
    with _SINGING:
        if text in _CANARIES:
            _CANARIES.move_to_end(text)
            return True
    found = _diagnostics(checkout, f"await {CANARY}()", text, ())
    if not any(each["name"] in ARGUMENTS for each in found):
        return False
    with _SINGING:
        _CANARIES[text] = None
        while len(_CANARIES) > KEPT_CANARIES:
            _CANARIES.popitem(last=False)
    return True


def _diagnostics(checkout: Checkout, code: str, text: str, known: Collection[str]) -> list[dict[str, Any]]:
    """Return what the checker says of a program behind a line that stops, and gives a value to each name that is *known*."""
    from pydantic_monty import CollectString, MontyTypingError

    # Names of the stubs that begin with an underscore would not be seen, and an assignment hides a stub as the real one does.
    names = [
        name for name in sorted(known) if name.isidentifier() and name not in BUILTINS and not name.startswith("__")
    ]
    first = "; ".join([f"{STOP}()", *[f"{name} = {STOP}()" for name in names]])
    with checkout(
        type_check=True,
        type_check_stubs=text,
        type_check_format="json",
        limits=LIMITS,
    ) as session:
        try:
            snapshot = session.feed_start(f"{first}\n{code}", print_callback=CollectString())
            _until_stop(snapshot)
        except MontyTypingError as error:
            found: list[dict[str, Any]] = json.loads(error.display())
            return found
    return []


def _until_stop(snapshot: SyncSnapshot) -> None:
    """Answer what the checker asks of the host, which is modules that do not exist, until the line that stops is reached."""
    from pydantic_monty import FunctionSnapshot

    for _ in range(MAX_ANSWERS):
        if not isinstance(snapshot, FunctionSnapshot) or snapshot.function_name == STOP:
            return
        snapshot = snapshot.resume_not_handled()


def _sorted_out(found: list[dict[str, Any]], code: str, stubs: Stubs, known: Collection[str]) -> CheckedProgram:
    tree = parsed(code)
    walk = _Walk(code, tree, stubs, known) if isinstance(tree, ast.Module) else None
    refused, told = [], []
    for each in found[:MOST_PROBLEMS]:
        problem = ProgramProblem(each["location"]["row"] - 1, each["location"]["column"], each["message"])
        kind = each["name"]
        if problem.line < 1 or kind == "invalid-syntax":
            # The sandbox has read it, so it is not an error: `return` outside of a function is fine, too.
            continue
        is_certain = _is_certain(problem, kind, stubs, walk)
        if is_certain:
            refused.append(problem)
        elif is_certain is not None:
            told.append(ProgramProblem(problem.line, problem.column, f"{problem.text} ({kind})"))
    return CheckedProgram(_in_order(refused), _in_order(told))


def _in_order(found: Iterable[ProgramProblem]) -> tuple[ProgramProblem, ...]:
    distinct = dict.fromkeys(sorted(found, key=lambda problem: (problem.line, problem.column)))
    return tuple(distinct)[:MOST_PROBLEMS]


def _is_certain(problem: ProgramProblem, kind: str, stubs: Stubs, walk: _Walk | None) -> bool | None:
    """Return whether a program that has this certainly fails; ``None`` when it is known to be wrong."""
    if kind in REFERENCES:
        return None if walk is not None and (walk.runs_text or walk.spares("name", problem)) else True
    if kind in IMPORTS:
        return None if walk is not None and problem.line in walk.good_imports else True
    if kind in AWAITS:
        return True
    if kind in ARGUMENTS:
        if walk is not None and walk.spares("arguments", problem):
            return False
        called = OF_A_FUNCTION.search(problem.text)
        name = called[1] if called else ""
        return name in stubs.functions and (walk is None or walk.has_stub(name))
    return False
