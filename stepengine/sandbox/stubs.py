"""
Tools and agents as the functions of a program: their names, their stubs, and their description for a model.

Names, descriptions and schemas may be untrusted, such as those of MCP servers. So they are never pasted into source text. Each stub is
built as a syntax tree, written with ``ast.unparse`` and parsed again. If the result differs, the stub is simplified.
"""

from __future__ import annotations

import ast
import keyword
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

import attrs
from attrs import frozen

from stepengine.data.alike import find_nearest
from stepengine.data.definition import AgentDefinition
from stepengine.data.json import MAX_INT, thaw
from stepengine.data.tools import ToolSpec
from stepengine.sandbox.sandbox import ABSENT, BUILTINS, MODULES
from stepengine.tools.agent_tools import agent_tool
from stepengine.tools.arguments import remove_titles

Kind: TypeAlias = Literal["tool", "agent", "ask", "search", "describe"]

MAX_STUBS = 30
"""More functions are shown as a catalogue: 30 stubs cost each step about 3,000 tokens."""
MAX_FOUND_FUNCTIONS = 10
"""One screen of lines; a better query finds other functions."""
MAX_NAMES_CHARS = 4_000
"""About 1,000 tokens of each step."""
MAX_PARAMETERS = 100
"""A longer signature is not readable; such a function has one dict as its parameter."""
MAX_TYPES = 300
"""The annotations of one function; further ones are ``Any``."""
MAX_DEPTH_LEVELS = 8
"""A deeper type is shown as ``Any``."""
MAX_UNION_MEMBERS = 12
"""A longer union is shown as ``Any``."""
MOST_LITERALS, LITERAL_CHARS = 40, 100
"""The values of one ``Literal``, and the characters of each; other enumerations are shown as ``Any``."""
DEFAULT_CHARS = 80
"""A default that does not fit on the line of its parameter is shown as `...`."""
DESCRIPTION_CHARS, PARAMETER_CHARS, DOCSTRING_CHARS = 600, 200, 3_000
"""The characters of a function's description, of a parameter's, and of a whole docstring: each step pays for the stubs."""
MAX_NAME_CHARS = 64
"""OpenAI and Anthropic allow 64 characters in the name of a tool."""
MAX_QUERY_CHARS = 1_000
"""Each word of a query is searched in every stub, so the query is cut."""
INDENT = " " * 4

SHOWN_MODULES = sorted(MODULES.keys() - {"os.path", "posixpath"})
HELPERS = ("search", "describe", "ask")
ALIASES: Mapping[str, str] = MappingProxyType({"ToolError": "RuntimeError"})
"""Exception names of programs, and the builtin exceptions of the sandbox that represent them."""
TYPING = ("Any", "Literal", "NotRequired", "TypedDict")
HEADER = f"from typing import {', '.join(TYPING)}"
RESERVED = frozenset(
    {
        *BUILTINS, *ABSENT, *MODULES, *ALIASES, *HELPERS, *TYPING, *keyword.kwlist, *keyword.softkwlist,
        # Soft keywords of later versions, so that the same tools have the same names in each version.
        "type", "lazy",
    }
)  # fmt: skip
"""Names that no function of a program may have: the sandbox would silently use its own, and keywords are not names."""
OURS = "stepengine_"
"""The prefix of names that the checks add to the stubs."""

ABSTRACT = """\
Run a program in Python in which your other tools are functions.

Every function below is `async`: `await` its call, or several at once with `await asyncio.gather(...)`; top-level `await` works. \
You are told what the program prints and the value of its last expression; variables stay for your next program. A call that fails \
raises ToolError, one that is denied PermissionError.
It is a sandbox without files and network. It has these modules and no others: {modules}. It has no class inheritance, \
`super`, `property`, `staticmethod` or other decorators of methods, `del`, `yield`, `async for`, `async with`, `asyncio.create_task`, \
`asyncio.wait_for`, `gather(return_exceptions=True)`, `callable`, `issubclass`, `dir`, `vars`, `globals`, `input`."""
CATALOGUE = """\
There are {n} functions. `await search(query)` gives the signatures of those that fit, `await describe(name)` all of one; a program \
may print what they give and be followed by another. Their names: {names}"""


# --- one function ---------------------------------------------------------------------------------------------------


@frozen
class ProgramFunction:
    """
    A function that a program may call.

    Attributes:
        name: Its name in the program.
        kind: What a call does: ``"tool"``, ``"agent"``, ``"ask"``, ``"search"`` or ``"describe"``.
        of: The tool's name or the agent's id; for a helper, its own name.
        parameters: In the order of positional arguments.
        takes_args: Whether the whole input is the one parameter ``args``, because its members cannot be parameters: names that are not
            identifiers, too many members, or an input without ``properties``.
        required: The number of parameters without a default; they come first.
        more: Whether it accepts other keyword arguments, too.
    """

    name: str
    kind: Kind
    of: str
    parameters: tuple[str, ...]
    takes_args: bool = False
    required: int = attrs.field(default=0, kw_only=True)
    more: bool = attrs.field(default=False, kw_only=True)

    def find_call_error(self, positional_count: int, keyword_names: Collection[str]) -> str:
        """Return Python's error message for a call with these positional and keyword arguments, or ``""``."""
        for name in keyword_names:
            if name not in self.parameters:
                if not self.more:
                    return f"{self.name}() got an unexpected keyword argument {name!r}"
            elif self.parameters.index(name) < positional_count:
                return f"{self.name}() got multiple values for argument {name!r}"
        if positional_count > len(self.parameters):
            return self._too_many_arguments_text(positional_count)
        missing = [
            repr(name) for name in self.parameters[positional_count : self.required] if name not in keyword_names
        ]
        if not missing:
            return ""
        plural = "" if len(missing) == 1 else "s"
        return f"{self.name}() missing {len(missing)} required positional argument{plural}: {_join_names(missing)}"

    def _too_many_arguments_text(self, given_count: int) -> str:
        """Return Python's error message for a call with too many positional arguments."""
        most = len(self.parameters)
        takes = f"{most}" if self.required == most else f"from {self.required} to {most}"
        plural = "" if most == 1 and self.required == most else "s"
        return f"{self.name}() takes {takes} positional argument{plural} but {given_count} {'was' if given_count == 1 else 'were'} given"

    def make_tool_input(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """
        Return the arguments of a call as the tool's input, without defaults; raise ``TypeError`` if they do not fit the parameters.

        Raises:
            TypeError: with Python's own message, when they do not fit the parameters.
        """
        if fault := self.find_call_error(len(args), kwargs):
            raise TypeError(fault)
        given = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        if not self.takes_args:
            return given
        whole = given.get("args", {})
        if not isinstance(whole, Mapping):
            msg = f"{self.name}() argument 'args' must be a dict, not {type(whole).__name__}"
            raise TypeError(msg)
        if strange := [key for key in whole if not isinstance(key, str)]:
            msg = f"{self.name}() argument 'args' must have keys of type str, not {type(strange[0]).__name__}"
            raise TypeError(msg)
        return dict(whole)


def _join_names(names: Sequence[str]) -> str:
    """Return names as Python lists them in errors: ``a, b, and c``."""
    if len(names) < 3:  # noqa: PLR2004 - Python's own words put a comma before `and` from three on
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


# --- all of them ----------------------------------------------------------------------------------------------------


@frozen
class Stubs:
    """
    The functions that a program may call, with their stubs for models.

    Attributes:
        functions: By their name in the program: tools, agents, then helpers.
        text: The source of all stubs, which compiles; for a type checker.
        description: The description of ``run_code`` for the model.
        declarations: The part of ``text`` for each function, by its name.
        summaries: The first line of each function's description, by its name; ``""`` without one.
    """

    functions: Mapping[str, ProgramFunction]
    text: str
    description: str
    declarations: Mapping[str, str]
    summaries: Mapping[str, str]

    def search(self, query: str) -> list[str]:
        """Return at most ten functions that match *query* best, as signature and first line of the description."""
        words = {word.casefold() for word in re.findall(r"\w+", query[:MAX_QUERY_CHARS])}
        found = []
        for place, name in enumerate(self.functions):
            called, said = name.casefold(), self.summaries[name].casefold()
            score = sum([2 * (word in called) + (word in said) for word in words])
            if score:
                found.append((-score, place, name))
        return [self._format_summary_line(name) for _, _, name in sorted(found)[:MAX_FOUND_FUNCTIONS]]

    def describe(self, name: str) -> str:
        """Return the stub of one function, or the nearest names for an unknown one."""
        if name in self.declarations:
            return self.declarations[name]
        near = find_nearest(name[:MAX_NAME_CHARS], self.functions, max_count=3)
        return f"There is no function of this name{'; there is ' + _join_names(near) if near else ''}."

    def _format_summary_line(self, name: str) -> str:
        """Return the signature of a function and, as a comment, the first line of its description."""
        tree = ast.parse(self.declarations[name]).body[-1]
        signature = ast.unparse(tree).partition("\n")[0].removesuffix(":")
        return f"{signature}  # {self.summaries[name]}" if self.summaries[name] else signature


class _StubSource(NamedTuple):
    """The tool or agent behind a function, and its schemas."""

    kind: Kind
    of: str
    raw: str
    description: str
    schema: Mapping[str, Any]
    output: Any


def make_stubs(
    tools: Sequence[ToolSpec],
    agents: Sequence[AgentDefinition],
    *,
    ask: bool,
    outputs: Mapping[str, Any] = MappingProxyType({}),
) -> Stubs:
    """
    Return stubs for tools and agents, which programs call as functions.

    Args:
        tools: Each becomes a function of its input's members.
        agents: Each becomes a function of ``prompt`` and ``params``, as in ``agent_tool``.
        ask: Whether a program may ask a person.
        outputs: The JSON Schema of a tool's result, by the tool's name.

    Raises:
        DefinitionError: for an agent whose params have no JSON Schema.
    """
    sources = [
        _StubSource("tool", tool.name, tool.name, tool.description, tool.input_schema, outputs.get(tool.name))
        for tool in tools
    ]
    sources += [_stub_source_from_agent(agent) for agent in agents]
    is_many = len(sources) + ask > MAX_STUBS
    helpers = [*([ASK] if ask else []), *([SEARCH, DESCRIBE] if is_many else [])]
    names = _make_function_names(sources)
    taken = {*RESERVED, *names}
    made = [_declare_function(source, names[place], taken) for place, source in enumerate(sources)]
    made += [_declare_function(source, source.raw, taken) for source in helpers]
    declarations = {each.function.name: each.text for each in made}
    text = "\n\n\n".join([HEADER, *declarations.values()]) + "\n"
    ast.parse(text)
    shown = [each for each in made if not is_many or each.function.kind in HELPERS]
    description = [ABSTRACT.format(modules=", ".join(SHOWN_MODULES))]
    if is_many:
        description.append(CATALOGUE.format(n=len(sources), names=_shorten_names(", ".join(names))))
    return Stubs(
        MappingProxyType({each.function.name: each.function for each in made}),
        text,
        "\n\n".join([*description, *[each.text for each in shown]]),
        MappingProxyType(declarations),
        MappingProxyType({each.function.name: each.summary for each in made}),
    )


def _shorten_names(names: str) -> str:
    """Return a list of names cut after the last whole name within the limit, with a note."""
    if len(names) <= MAX_NAMES_CHARS:
        return names
    return f"{names[:MAX_NAMES_CHARS].rpartition(', ')[0]}, and others."


def _stub_source_from_agent(agent: AgentDefinition) -> _StubSource:
    """Return the name, description and schemas of an agent as of its tool, with the schema of its output."""
    spec = agent_tool(agent).spec
    given: Any = agent.output_schema
    output = given if given is None or isinstance(given, Mapping) else remove_titles(given.model_json_schema())
    return _StubSource("agent", agent.id, spec.name, spec.description, spec.input_schema, output)


def _make_helper_source(
    name: Kind, description: str, output: Any, required: Sequence[str], /, **properties: Any
) -> _StubSource:
    """Return the source of a stub for a function that is no tool, such as ``ask``."""
    return _StubSource(name, name, name, description, {"properties": properties, "required": required}, output)


_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
ASK = _make_helper_source(
    "ask", "Ask a person, and wait for the answer for as long as it takes.", _TEXT, ["question"],
    question=_TEXT, options={"anyOf": [_TEXTS, {"type": "null"}], "default": None},
)  # fmt: skip
SEARCH = _make_helper_source(
    "search", "Find functions by words of their names and descriptions.", _TEXTS, ["query"], query=_TEXT
)
DESCRIBE = _make_helper_source("describe", "Get the whole stub of one function.", _TEXT, ["name"], name=_TEXT)


# --- names ----------------------------------------------------------------------------------------------------------


def _make_function_names(sources: Sequence[_StubSource]) -> list[str]:
    """
    Return a distinct function name for each source, in the order of the sources.

    A source with a valid name always has that name. The others get names in the order of kind and name, so the names do not depend on the
    order of the sources.
    """
    wanted = [_make_function_identifier(source.raw) for source in sources]

    def priority(place: int) -> tuple[bool, bool, str, int]:
        """Return the sort key of a source: sources whose name needs no change come first."""
        return wanted[place] != sources[place].raw, sources[place].kind != "tool", sources[place].raw, place

    taken: set[str] = set()
    names = dict.fromkeys(range(len(sources)), "")
    for place in sorted(names, key=priority):
        names[place] = _make_free_name(wanted[place], taken)
        taken.add(names[place])
    return list(names.values())


def _make_function_identifier(raw: str) -> str:
    """Return a function name for a tool's name: other characters become ``_``, and reserved names get a suffix."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", raw[:MAX_NAME_CHARS])
    # The checker imports the stubs with a star, which skips names with a leading underscore.
    if not name or name[0] == "_" or name[0].isdigit() or name.startswith(OURS):
        name = f"tool_{name}"
    return f"{name}_tool" if name in RESERVED else name


def _make_free_name(name: str, taken_names: Collection[str]) -> str:
    """Return *name*, or *name* with the first free number if it is in *taken_names*."""
    if name not in taken_names:
        return name
    return next(f"{name}_{n}" for n in count(2) if f"{name}_{n}" not in taken_names)


def _can_be_parameter(name: object) -> bool:
    """Return True if a member of an input can be a parameter: a valid and normalized identifier."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and name != "__debug__"
        and len(name) <= MAX_NAME_CHARS
        and unicodedata.normalize("NFKC", name) == name
    )


# --- a stub ---------------------------------------------------------------------------------------------------------


class _DeclaredFunction(NamedTuple):
    function: ProgramFunction
    text: str
    summary: str


class _Parameter(NamedTuple):
    name: str
    schema: Any
    is_required: bool


def _declare_function(source: _StubSource, name: str, taken_names: set[str]) -> _DeclaredFunction:
    """
    Return a function with its stub, and add the names of the stub's classes to *taken_names*.

    The stub is simplified if its text cannot be parsed back to the same tree.
    """
    summary = _to_single_line(source.description.strip().partition("\n")[0], PARAMETER_CHARS)
    for is_documented, is_typed in ((True, True), (False, True), (False, False)):
        used = set(taken_names)
        made = _StubBuilder(source, name, used, is_typed=is_typed)
        function, body = made.build_function(_make_stub_docstring(source) if is_documented else "")
        text = _unparse_if_stable(body)
        if text:
            taken_names |= used
            return _DeclaredFunction(function, text, summary)
    # The last attempt has only identifiers and `Any`, so it cannot fail.
    msg = f"the stub of {source.of!r} cannot be written"
    raise AssertionError(msg)


def _unparse_if_stable(body: list[ast.stmt]) -> str:
    """Return the source of statements; ``""`` if it cannot be parsed back to the same tree."""
    tree = ast.fix_missing_locations(ast.Module(body, []))
    try:
        text = ast.unparse(tree)
        return text if ast.dump(ast.parse(text)) == ast.dump(tree) else ""
    except (SyntaxError, ValueError, RecursionError):
        return ""


class _StubBuilder:
    """Builds the stub of one function."""

    def __init__(self, source: _StubSource, name: str, taken: set[str], *, is_typed: bool) -> None:
        self.source, self.name, self.taken = source, name, taken
        self.types = _AnnotationBuilder(source.schema, taken, MAX_TYPES if is_typed else 0)
        self.output = _AnnotationBuilder(source.output, taken, MAX_TYPES if is_typed else 0)

    def build_function(self, docstring: str) -> tuple[ProgramFunction, list[ast.stmt]]:
        """Return the function and its stub as syntax trees: the classes of its types, then the function."""
        schema = self.types.resolve_reference(self.source.schema)
        found = _find_input_parameters(schema)
        if found is None:
            made, arguments = self._build_with_whole_input(schema)
        else:
            made, arguments = self._build_with_parameters(schema, found)
        returns = self.output.annotate(self.source.output, f"{_to_camel_case(self.name)}Result")
        body: list[ast.stmt] = [ast.Expr(ast.Constant(docstring))] if docstring else []
        body.append(ast.Expr(ast.Constant(...)))
        tree = ast.AsyncFunctionDef(
            name=self.name, args=arguments, body=body, decorator_list=[], returns=returns, type_comment=None
        )
        if "type_params" in tree._fields:  # Python 3.12
            tree.type_params = []  # type: ignore[attr-defined,unused-ignore]
        return made, [*self.types.classes, *self.output.classes, tree]

    def _build_with_whole_input(self, schema: Mapping[str, Any]) -> tuple[ProgramFunction, ast.arguments]:
        is_needed = bool(_required_names(schema.get("required")))
        kind = self.types.annotate({**schema, "type": "object"}, f"{_to_camel_case(self.name)}Args")
        function = ProgramFunction(
            self.name, self.source.kind, self.source.of, ("args",), True, required=int(is_needed)
        )
        defaults: list[ast.expr] = [] if is_needed else [ast.Dict([], [])]
        return function, _make_arguments([ast.arg("args", kind)], defaults)

    def _build_with_parameters(
        self, schema: Mapping[str, Any], parameters: list[_Parameter]
    ) -> tuple[ProgramFunction, ast.arguments]:
        """Return a function with one parameter for each member of the input, and their syntax."""
        made = [
            ast.arg(p.name, self.types.annotate(p.schema, f"{_to_camel_case(self.name)}{_to_camel_case(p.name)}"))
            for p in parameters
        ]
        defaults = [_default_expression(p.schema) for p in parameters if not p.is_required]
        names = tuple([p.name for p in parameters])
        more: ast.arg | None = None
        others = schema.get("additionalProperties")
        if others is True or (isinstance(others, Mapping) and others.get("not") != {}):
            called = _make_free_name("more", names)
            more = ast.arg(called, self.types.annotate(others, f"{_to_camel_case(self.name)}More"))
        function = ProgramFunction(
            self.name,
            self.source.kind,
            self.source.of,
            names,
            required=len(names) - len(defaults),
            more=more is not None,
        )
        return function, _make_arguments(made, defaults, more)


def _make_arguments(args: list[ast.arg], defaults: list[ast.expr], more: ast.arg | None = None) -> ast.arguments:
    """Return the parameters of a function as syntax, with *more* as its ``**`` parameter."""
    return ast.arguments(
        posonlyargs=[], args=args, vararg=None, kwonlyargs=[], kw_defaults=[], kwarg=more, defaults=defaults
    )


def _find_input_parameters(schema: Mapping[str, Any]) -> list[_Parameter] | None:
    """Return the members of an input as parameters, required ones first; ``None`` if they cannot be parameters."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return None
    required = _required_names(schema.get("required"))
    members = {**properties, **{name: {} for name in required if name not in properties}}
    if len(members) > MAX_PARAMETERS or not all(_can_be_parameter(name) for name in members):
        return None
    found = [_Parameter(name, member, name in required) for name, member in members.items()]
    return sorted(found, key=lambda parameter: not parameter.is_required)


def _required_names(required: Any) -> list[str]:
    """Return the distinct strings in the ``required`` of a schema; an empty list for anything but a list."""
    names = required if isinstance(required, list | tuple) else ()
    return list(dict.fromkeys([name for name in names if isinstance(name, str)]))


def _default_expression(schema: Any) -> ast.expr:
    """Return the default of a parameter for its stub; ``...`` unless it is short, plain JSON."""
    if isinstance(schema, Mapping) and "default" in schema:
        try:
            shown = repr(thaw(schema["default"]))
            if len(shown) <= DEFAULT_CHARS and _remove_unprintable(shown) == shown:
                value = ast.literal_eval(shown)
                if value == value:  # noqa: PLR0124 - a NaN is written as a name
                    return ast.parse(shown, mode="eval").body
        except (ValueError, SyntaxError, TypeError, RecursionError):
            pass
    return ast.Constant(...)


# --- types ----------------------------------------------------------------------------------------------------------


ANY = "Any"
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}


class _AnnotationBuilder:
    """Converts JSON Schemas to annotations; objects become ``TypedDict`` classes."""

    def __init__(self, root: Any, taken: set[str], max_types: int) -> None:
        self._root, self._taken, self._left = root, taken, max_types
        self.classes: list[ast.stmt] = []

    def annotate(self, schema: Any, hint: str, depth: int = 0) -> ast.expr:
        """Return the annotation for *schema*, and add a ``TypedDict`` for each object in it, named after *hint*."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH_LEVELS:
            return _make_name_node(ANY)
        schema = self.resolve_reference(schema)
        forms = _union_schemas(schema)
        if forms is not None:
            return self._make_union([self.annotate(form, hint, depth + 1) for form in forms])
        if "const" in schema or isinstance(schema.get("enum"), list | tuple):
            return _make_literal_annotation([schema["const"]] if "const" in schema else schema["enum"])
        if isinstance(schema.get("allOf"), list | tuple) and len(schema["allOf"]) == 1 and "properties" not in schema:
            return self.annotate(schema["allOf"][0], hint, depth + 1)
        return self._annotate_plain(schema, hint, depth)

    def resolve_reference(self, schema: Any) -> Mapping[str, Any]:
        """Return the schema that *schema* refers to, or *schema* itself; an empty schema for an invalid reference or a non-object."""
        for _ in range(MAX_DEPTH_LEVELS):
            if not isinstance(schema, Mapping):
                return {}
            if not isinstance(schema.get("$ref"), str):
                return schema
            schema = _resolve_pointer(self._root, schema["$ref"])
        return {}

    def _annotate_plain(self, schema: Mapping[str, Any], hint: str, depth: int) -> ast.expr:
        """Return the annotation for a schema that is no union, literal or reference."""
        kind = schema.get("type")
        if kind is None and isinstance(schema.get("properties"), Mapping):
            kind = "object"
        if kind == "null":
            return ast.Constant(None)
        if kind == "array":
            return _make_subscript_node("list", self.annotate(schema.get("items"), f"{hint}Item", depth + 1))
        if kind == "object":
            return self._annotate_object(schema, hint, depth)
        return _make_name_node(PLAIN.get(kind, ANY) if isinstance(kind, str) else ANY)

    def _annotate_object(self, schema: Mapping[str, Any], hint: str, depth: int) -> ast.expr:
        """Add a ``TypedDict`` for an object with named members and return its name; else return a ``dict`` annotation."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            others = self.annotate(schema.get("additionalProperties"), f"{hint}Value", depth + 1)
            return _make_subscript_node("dict", _make_name_node("str"), others)
        names = list(properties)
        if len(names) > MAX_PARAMETERS or not all(_can_be_literal(name) for name in names):
            return _make_subscript_node("dict", _make_name_node("str"), _make_name_node(ANY))
        required = set(_required_names(schema.get("required")))
        fields: dict[str, ast.expr] = {}
        for name, member in properties.items():
            field = self.annotate(member, f"{hint}{_to_camel_case(name)}", depth + 1)
            fields[name] = field if name in required else _make_subscript_node("NotRequired", field)
        return self._add_class(hint, fields)

    def _add_class(self, hint: str, fields: Mapping[str, ast.expr]) -> ast.expr:
        """Add a ``TypedDict`` class with these fields under a free name, and return a reference to it."""
        called = _make_free_name(hint[:MAX_NAME_CHARS], self._taken)
        self._taken.add(called)
        base = _make_name_node("TypedDict")
        # Names that begin with two underscores would get the class's name before them.
        if all(_can_be_parameter(name) and not name.startswith("__") for name in fields):
            body: list[ast.stmt] = [
                ast.AnnAssign(ast.Name(name, ast.Store()), field, None, 1) for name, field in fields.items()
            ]
            made: ast.stmt = ast.ClassDef(name=called, bases=[base], keywords=[], body=body, decorator_list=[])
            if "type_params" in made._fields:  # Python 3.12
                made.type_params = []  # type: ignore[attr-defined,unused-ignore]
        else:
            members = ast.Dict([ast.Constant(name) for name in fields], list(fields.values()))
            made = ast.Assign([ast.Name(called, ast.Store())], ast.Call(base, [ast.Constant(called), members], []))
        self.classes.append(made)
        return _make_name_node(called)

    def _make_union(self, members: Sequence[ast.expr]) -> ast.expr:
        """Return the union of annotations without duplicates; ``Any`` if one of them is ``Any``."""
        distinct = list({ast.dump(member): member for member in members}.values())
        if not distinct or any(isinstance(m, ast.Name) and m.id == ANY for m in distinct):
            return _make_name_node(ANY)
        made = distinct[0]
        for member in distinct[1:]:
            made = ast.BinOp(made, ast.BitOr(), member)
        return made


def _union_schemas(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the schemas of the members of a union; ``None`` if *schema* is not a union."""
    if schema.get("nullable") is True:
        return [{name: value for name, value in schema.items() if name != "nullable"}, {"type": "null"}]
    for word in ("anyOf", "oneOf"):
        forms = schema.get(word)
        if isinstance(forms, list | tuple) and "properties" not in schema:
            return list(forms) if len(forms) <= MAX_UNION_MEMBERS else [{}]
    kinds = schema.get("type")
    if isinstance(kinds, list | tuple):
        if len(kinds) > MAX_UNION_MEMBERS or "enum" in schema or "const" in schema:
            return [{k: v for k, v in schema.items() if k != "type"}]
        return [{**schema, "type": kind} for kind in kinds]
    return None


def _make_literal_annotation(values: Sequence[Any]) -> ast.expr:
    """Return a ``Literal`` annotation; ``Any`` for too many, too long or non-literal values."""
    if not 0 < len(values) <= MOST_LITERALS or not all(_can_be_literal(value) for value in values):
        return _make_name_node(ANY)
    distinct = {(type(value).__name__, value): value for value in values}
    members = [_make_constant_node(value) for value in distinct.values()]
    if len(members) == 1 and distinct == {("NoneType", None): None}:
        return members[0]
    inner: ast.expr = members[0] if len(members) == 1 else ast.Tuple(members, ast.Load())
    return ast.Subscript(_make_name_node("Literal"), inner, ast.Load())


def _can_be_literal(value: Any) -> bool:
    """Return True for a value that ``Literal`` allows and that is short enough to be shown."""
    if isinstance(value, str):
        return len(value) <= LITERAL_CHARS and _remove_unprintable(value) == value
    return value is None or isinstance(value, bool) or (type(value) is int and abs(value) <= MAX_INT)


def _make_constant_node(value: Any) -> ast.expr:
    """Return a constant as syntax, a negative number as in source code."""
    if type(value) is int and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def _make_name_node(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _make_subscript_node(generic: str, *parts: ast.expr) -> ast.expr:
    """Return a generic type with its arguments as syntax."""
    inner = parts[0] if len(parts) == 1 else ast.Tuple(list(parts), ast.Load())
    return ast.Subscript(_make_name_node(generic), inner, ast.Load())


def _to_camel_case(name: str) -> str:
    """Return a name as CamelCase with letters and digits only; ``Value`` if nothing remains."""
    parts = re.sub(r"[^A-Za-z0-9]", " ", name).split()
    return "".join([part[0].upper() + part[1:] for part in parts]) or "Value"


def _resolve_pointer(root: Any, ref: str) -> Any:
    """Return the target of a reference such as ``#/$defs/City`` inside *root*, or ``None``."""
    if not ref.startswith("#"):
        return None
    found = root
    for part in unquote(ref[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list | tuple) and key.isascii() and key.isdigit() and int(key[:6]) < len(found):
            found = found[int(key[:6])]
        else:
            return None
    return found


# --- texts ----------------------------------------------------------------------------------------------------------


def _remove_unprintable(text: str) -> str:
    """Return *text* without unprintable characters, such as direction marks and lone surrogates."""
    return "".join([char for char in text if char.isprintable()])


def _to_single_line(text: Any, max_chars: int) -> str:
    """Return an untrusted text as one line of at most *max_chars* characters."""
    words = " ".join(text[: 4 * max_chars].split()) if isinstance(text, str) else ""
    line = _remove_unprintable(words)
    return line if len(line) <= max_chars else f"{line[: max_chars - 3].rstrip()}..."


def _make_stub_docstring(source: _StubSource) -> str:
    """Return the docstring of a stub: the shortened descriptions of the function and its parameters."""
    lines = [_to_single_line(source.description, DESCRIPTION_CHARS)]
    properties = _AnnotationBuilder(source.schema, set(), 0).resolve_reference(source.schema).get("properties")
    for name, member in properties.items() if isinstance(properties, Mapping) else ():
        said = _to_single_line(member.get("description"), PARAMETER_CHARS) if isinstance(member, Mapping) else ""
        if said:
            lines.append(f"{_to_single_line(name, MAX_NAME_CHARS)}: {said}")
    return _join_lines_within_limit([line for line in lines if line])


def _join_lines_within_limit(lines: Iterable[str]) -> str:
    """Join the first lines that together fit the limit of a docstring."""
    kept, left = [], DOCSTRING_CHARS
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            break
        kept.append(line)
    return f"\n{INDENT}".join(kept)
