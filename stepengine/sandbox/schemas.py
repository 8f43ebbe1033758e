"""
Convert the schema classes of an untrusted file to JSON Schema, from its text: no code of the file is imported or run.

The schema of a ``BaseModel`` or ``TypedDict`` is the one of pydantic, without titles and in pydantic's order. So an agent has the same
schema whether its file is imported or parsed. Classes that cannot be converted are refused with file and line: an ignored validator would
accept values that the author rejects. Untrusted text may nest and refer to itself, so each traversal is bounded by a depth or by one
budget of work.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.json import MAX_DIGITS, MAX_NUMBER, MIN_NUMBER, JsonDict, JsonValue, freeze_object
from stepengine.errors import DataError, DefinitionError
from stepengine.tools.arguments import remove_titles
from stepengine.tools.schemas import JsonSchema

MAX_DEPTH_LEVELS = 50
"""Typical schemas have about five levels; the reader is recursive."""
MAX_CLASSES = 500
"""More than a real file of agents has; each class takes time."""
MAX_FIELDS = 500
"""More than a form has; each field takes time."""
MAX_FIELDS_OF_FILE = 5_000
"""Ten full classes; inherited fields count again in each class."""
MAX_UNION_MEMBERS = 100
"""More types than a model can choose from."""
MAX_LITERAL_VALUES = 5_000
"""Room for a list of countries or currencies; a provider allows about a thousand."""
MAX_WORK_PLACES = 30_000
"""The units of work for the schemas of one file. Each use of an alias counts; a long text counts as several units."""
MAX_SHOWN_PLACES = 100_000
"""The units of all resulting schemas of a file together; each contains the definitions that it refers to."""
CHARS_PER_PLACE = 50
"""An estimate: copying this many characters takes about as long as one unit of work."""
MAX_PATTERN_CHARS = 500
"""Patterns for addresses and dates have about a hundred characters; longer ones compile slowly."""
MAX_ANNOTATION_CHARS = 2_000
"""An annotation has a line or two; Python's parser parses it."""
LEFT_OUT = "Any"
UNENDING = "<itself>"
"""The alias itself, in the shape of a recursive alias."""

PLAIN: Mapping[str, tuple[str, Mapping[str, object]]] = MappingProxyType(
    {
        "builtins.str": ("string", {"type": "string"}),
        "builtins.int": ("integer", {"type": "integer"}),
        "builtins.float": ("number", {"type": "number"}),
        "builtins.bool": ("other", {"type": "boolean"}),
        "builtins.object": ("other", {}),
        "typing.Any": ("other", {}),
        "datetime.datetime": ("other", {"type": "string", "format": "date-time"}),
        "datetime.date": ("other", {"type": "string", "format": "date"}),
        "datetime.time": ("other", {"type": "string", "format": "time"}),
        "datetime.timedelta": ("other", {"type": "string", "format": "duration"}),
        "decimal.Decimal": ("decimal", {}),
    }
)
LISTS = frozenset({"builtins.list", "typing.List", "typing.Sequence", "collections.abc.Sequence"})
SETS = frozenset({"builtins.set", "typing.Set", "builtins.frozenset", "typing.FrozenSet"})
TUPLES = frozenset({"builtins.tuple", "typing.Tuple"})
DICTS = frozenset({"builtins.dict", "typing.Dict", "typing.Mapping", "collections.abc.Mapping"})
ENUMS = frozenset({"enum.Enum", "enum.StrEnum", "enum.IntEnum"})
OF_ENUMS: Mapping[tuple[str, ...], type | None] = MappingProxyType(
    {
        ("enum.Enum",): None,
        ("enum.StrEnum",): str,
        ("enum.IntEnum",): int,
        ("builtins.str", "enum.Enum"): str,
        ("builtins.int", "enum.Enum"): int,
    }
)
TYPES_HERE = (
    "str, int, float, bool, None, Any, list[...], dict[str, ...], Literal[...], X | None, Annotated[..., Field(...)] "
    "and schema classes of this file"
)

NUMERIC = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
LENGTHS = {
    "string": {"min_length": "minLength", "max_length": "maxLength"},
    "array": {"min_length": "minItems", "max_length": "maxItems"},
    "object": {"min_length": "minProperties", "max_length": "maxProperties"},
}
CONSTRAINTS = (*NUMERIC, "min_length", "max_length", "pattern")
ONCE = ("default", "default_factory", "alias")
"""The arguments of ``Field`` that only a field of a class may have, not an inner type."""
OF_FIELD = frozenset({*CONSTRAINTS, *ONCE, "description", "title", "examples"})
FACTORIES: Mapping[str, type] = MappingProxyType({"builtins.list": list, "builtins.dict": dict})
EXTRA = {"forbid": False, "allow": True, "ignore": None}
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
TYPE_ALIAS: Any = getattr(ast, "TypeAlias", ())  # of Python 3.12
NOTHING: Any = object()
Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@frozen
class SchemaClass:
    """
    A schema class of a file.

    Attributes:
        name: Its name.
        kind: ``"model"`` if its values become objects, ``"typed_dict"`` if they stay dicts.
        json_schema: The schema of pydantic without titles; always an object at the top. ``$defs`` has the definitions that it refers to,
            itself included if it is recursive.
        defaults: The default of each field that has one.
        models: The shape of each field with schema classes in its value: ``"Item"``, ``"list[Item]"``, ``"dict[str, Item]"``,
            ``"tuple[Item, Any]"`` for a fixed length, ``"Item | None"``, or nested. Sequences and tuples of any length are ``list``.
            ``Any`` stands for a value without schema classes. ``"A | B"`` means the first class whose schema the value fits.
        aliases: The JSON name of each field with another name in JSON.
        line: The first line of the class, decorators included.
        end_line: Its last line.
    """

    name: str
    kind: Literal["model", "typed_dict"]
    json_schema: JsonDict
    defaults: Mapping[str, JsonValue]
    models: Mapping[str, str]
    aliases: Mapping[str, str]
    line: int
    end_line: int


def parse_schema_classes(tree: ast.Module, file: str) -> Mapping[str, SchemaClass]:
    """
    Return the schema classes of a file by name: its pydantic models and typed dicts.

    Args:
        tree: The file's tree.
        file: The name of the file in messages.

    Raises:
        DefinitionError: with file and line, for a schema class that cannot be converted.
    """
    return _SchemaClassReader(tree, file).read_classes()


# --- names ----------------------------------------------------------------------------------------------------------


@frozen
class _NameBinding:
    """The meaning of a name: ``what`` is the dotted name of an import, or one of the words below."""

    what: str
    node: Any = None


CLASS, ASSIGNED, TYPE, UNKNOWN = "a class", "a value", "a type alias", ""


class _ModuleBindings:
    """The bindings of the names in a module, found from its source."""

    def __init__(self, tree: ast.Module) -> None:
        self._bound: dict[str, _NameBinding] = {}
        self._top = {id(node) for node in tree.body}
        self._is_open = False
        left: list[ast.AST] = [*reversed(tree.body)]
        while left:
            left.extend(reversed(list(self._record_bindings(left.pop()))))
        self.classes: list[ast.ClassDef] = []
        """All classes of the file, including nested ones."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self.classes.append(node)
            elif isinstance(node, ast.Global):
                self._bound.update(dict.fromkeys(node.names, _NameBinding(UNKNOWN)))

    def get_binding(self, name: str) -> _NameBinding:
        """Return the binding of a name at the end of the module, or the builtin if nothing binds it."""
        known = self._bound.get(name)
        return known or _NameBinding(UNKNOWN if self._is_open else f"builtins.{name}")

    def _record_bindings(self, node: ast.AST) -> Iterable[ast.AST]:
        """Record the names that a node binds, and return the nodes to visit below it."""
        match node:
            case ast.Import(names=names):
                for one in names:
                    self._bind(one.asname or one.name.split(".")[0], one.name if one.asname else one.name.split(".")[0])
            case ast.ImportFrom(names=names):
                self._bind_import_from(node)
            case ast.ClassDef(name=name):
                self._bind(name, CLASS if id(node) in self._top else UNKNOWN, node)
                return [*node.decorator_list, *node.bases, *(word.value for word in node.keywords)]
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._bind(node.name, UNKNOWN)
                return [*node.decorator_list, node.args]
            case ast.Lambda():
                return [node.args]
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                self._bind(name, ASSIGNED if id(node) in self._top else UNKNOWN, node.value)
                return [node.value] if node.value else []
            case _:
                return self._record_other_bindings(node)
        return []

    def _record_other_bindings(self, node: ast.AST) -> Iterable[ast.AST]:
        """Bind the names that any other node binds as unknown, and return its child nodes."""
        if isinstance(node, TYPE_ALIAS):
            self._bind(node.name.id, TYPE if id(node) in self._top else UNKNOWN, node)
            return []
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self._bind(node.id, UNKNOWN)
        for word in ("name", "rest"):  # of `except`, `match`
            if isinstance(name := getattr(node, word, None), str):
                self._bind(name, UNKNOWN)
        return ast.iter_child_nodes(node)

    def _bind_import_from(self, node: ast.ImportFrom) -> None:
        """Bind the names of a ``from`` import; a star import makes all unbound names unknown."""
        module = "" if node.level else node.module or ""
        module = "typing" if module == "typing_extensions" else module
        for one in node.names:
            if one.name == "*":
                self._is_open = True
            else:
                self._bind(one.asname or one.name, f"{module}.{one.name}" if module else UNKNOWN)

    def _bind(self, name: str, kind: str, node: Any = None) -> None:
        """Bind a name to an import or kind; a name that is bound twice becomes unknown."""
        kind = kind.replace("typing_extensions", "typing")
        same = self._bound.get(name)
        is_import = kind not in {CLASS, ASSIGNED, TYPE}
        is_new = same is None or (is_import and same.what == kind)
        self._bound[name] = _NameBinding(kind, node) if is_new else _NameBinding(UNKNOWN)


# --- reading --------------------------------------------------------------------------------------------------------


@frozen
class _ParsedType:
    """
    The JSON Schema of an annotation and facts about it.

    Attributes:
        schema: As JSON Schema.
        kind: The constraints that it allows: those of ``string``, ``integer``, ``number``, ``decimal``, ``array``, ``object``,
            ``union``, ``nullable`` or ``other``.
        shape: The schema classes in its values, as in ``SchemaClass.models``.
        inner: For ``nullable``, the type apart from ``None``.
        given: The default and alias of a ``Field``, which only a field of a class may have.
    """

    schema: dict[str, Any]
    kind: str = "other"
    shape: str = LEFT_OUT
    inner: _ParsedType | None = None
    given: Mapping[str, Any] = MappingProxyType({})


@frozen
class _ClassField:
    """A field as declared in its class."""

    schema: dict[str, Any]
    shape: str
    is_required: bool
    default: Any
    alias: str
    refers: frozenset[str]
    line: int


@frozen
class _Definition:
    """An entry of ``$defs``."""

    schema: JsonDict
    refers: frozenset[str]
    size: int


@frozen
class _NodeAtDepth:
    """A node and its nesting depth."""

    node: ast.expr
    depth: int


class _SchemaClassReader:
    """Reads the schema classes of an agent file from its syntax tree."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self._file = file
        self._names = _ModuleBindings(tree)
        self._tops = {id(node) for node in tree.body}
        self._shown_left = MAX_SHOWN_PLACES
        self._left = MAX_WORK_PLACES
        self._fields_left = MAX_FIELDS_OF_FILE
        self._where = ""
        self._line = 1
        self._own: frozenset[str] = frozenset()
        self._refers: set[str] = set()
        self._seen: set[str] = set()
        self._shapes: dict[str, str] = {}
        self._enums: dict[str, dict[str, Any]] = {}
        self._patterns: dict[str, int] = {}
        self._kinds: dict[str, Literal["model", "typed_dict"]] = {}
        self._fields: dict[str, dict[str, _ClassField]] = {}
        self._extras: dict[str, bool | None] = {}
        self._definitions: dict[str, _Definition | None] = {}
        """By name; ``None`` while the definition is being read."""

    def read_classes(self) -> Mapping[str, SchemaClass]:
        """Return the schema classes of the file by name, in the order of their lines; raise ``DefinitionError`` for an invalid class."""
        classes = self._find_and_sort_schema_classes()
        for node in classes:
            self._read_and_record_class(node)
        self._check_patterns()
        made = {}
        for node in classes:
            self._set_error_position(node)
            made[node.name] = self._make_schema_class(node, self._list_reachable_from(node.name))
        return MappingProxyType(dict(sorted(made.items(), key=lambda item: item[1].line)))

    def _make_schema_class(self, node: ast.ClassDef, definition_names: Sequence[str]) -> SchemaClass:
        """Return a class that was read as a ``SchemaClass``, with the definitions that its schema refers to."""
        fields = self._fields[node.name]
        extras = self._extra_rules_by_typed_dict(node.name, definition_names)
        defined = {name: self._get_definition(name).schema for name in definition_names}
        for name, extra in extras.items():
            if extra is not None and name in defined:
                defined[name] = freeze_object({"additionalProperties": extra, **defined[name]})
        schema: dict[str, Any] = {"$defs": defined} if definition_names else {}
        return SchemaClass(
            node.name,
            self._kinds[node.name],
            freeze_object({**schema, **self._get_definition(node.name).schema}),
            MappingProxyType({name: field.default for name, field in fields.items() if field.default is not NOTHING}),
            MappingProxyType(
                {name: shape for name, field in fields.items() if (shape := self._field_shape(node, field))}
            ),
            MappingProxyType({name: field.alias for name, field in fields.items() if field.alias}),
            min([node.lineno, *(one.lineno for one in node.decorator_list)]),
            node.end_lineno or node.lineno,
        )

    def _extra_rules_by_typed_dict(self, top: str, names: Sequence[str]) -> dict[str, bool | None]:
        """
        Return the rule for additional members of each typed dict, taken from the models that contain it.

        If models disagree, pydantic uses the one that it sees first, so they are refused.
        """
        found: dict[str, bool | None] = {}
        for owner in dict.fromkeys((top, *names)):
            self._spend_output_budget(self._get_definition(owner).size)
            if owner != top and self._kinds.get(owner) != "model":
                continue
            extra = self._extras[owner]
            reached = self._collect_reachable_through(self._get_definition(owner).refers)
            self._spend_output_budget(len(reached))
            for name in reached:
                if self._kinds.get(name) == "typed_dict" and found.setdefault(name, extra) != extra:
                    self._refuse(
                        f"models with different extra=... share the typed dict {name!r}; give them the same extra, or a typed dict each"
                    )
        return found

    def _spend_output_budget(self, work: int) -> None:
        """Subtract *work* from the budget of resulting schemas; raise an error when it is used up."""
        self._shown_left -= work
        if self._shown_left < 0:
            self._refuse("the schema classes of this file refer to each other too often; use fewer classes")

    def _field_shape(self, node: ast.ClassDef, field: _ClassField) -> str:
        """Return the shape of the schema classes in the value of a field; ``""`` if there are none."""
        if UNENDING in field.shape:
            if self._collect_reachable_through(field.refers, through=()) & self._kinds.keys():
                self._line, self._where = field.line, f"class {node.name!r}"
                self._refuse("a recursive type alias cannot contain schema classes; use a recursive schema class")
            return ""
        return "" if field.shape == LEFT_OUT else field.shape

    def _collect_reachable_through(
        self, names: Iterable[str], *, through: Collection[str] = ("typed_dict",)
    ) -> set[str]:
        """Return *names* and the definitions that they reach through aliases and classes of the kinds in *through*."""
        found: set[str] = set()
        left = [*names]
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                if name not in self._kinds or self._kinds[name] in through:
                    left.extend(self._get_definition(name).refers)
        return found

    def _list_reachable_from(self, name: str) -> list[str]:
        """Return the sorted names of the definitions that *name* refers to, also indirectly; *name* itself only if it is recursive."""
        return sorted(
            self._collect_reachable_through(self._get_definition(name).refers, through=("model", "typed_dict"))
        )

    def _get_definition(self, name: str) -> _Definition:
        """Return the definition of a class or alias, which was read before."""
        made = self._definitions[name]
        assert made is not None  # noqa: S101 - everything is read before anything is shown
        return made

    # --- finding the classes

    def _find_and_sort_schema_classes(self) -> list[ast.ClassDef]:
        """Find the schema classes, record their kinds, and return them: base classes first, then in file order."""
        bases: dict[str, str] = {}
        found: list[ast.ClassDef] = []
        for node in self._names.classes:
            if base := self._find_schema_base(node):
                self._set_error_position(node)
                if id(node) not in self._tops:
                    self._refuse("a schema class must be at the top level of its file; move it there")
                if self._names.get_binding(node.name).node is not node:
                    self._refuse("its name is bound more than once; give it a unique name")
                if len(found) >= MAX_CLASSES:
                    self._refuse(f"there are too many schema classes; a file may have at most {MAX_CLASSES}")
                bases[node.name] = base
                found.append(node)
        return self._record_kinds_and_sort_classes(found, bases)

    def _record_kinds_and_sort_classes(
        self, classes: Sequence[ast.ClassDef], bases: Mapping[str, str]
    ) -> list[ast.ClassDef]:
        """Record the kinds of the classes that derive from ``BaseModel`` or ``TypedDict``, and return these, bases first."""
        chains = {}
        for node in classes:
            chain = [bases[node.name]]
            while chain[-1] in bases and len(chain) <= MAX_DEPTH_LEVELS:
                chain.append(bases[chain[-1]])
            self._set_error_position(node)
            if len(chain) > MAX_DEPTH_LEVELS:
                self._refuse(f"it inherits from itself, or through more than {MAX_DEPTH_LEVELS} classes; use fewer")
            if chain[-1] not in {"pydantic.BaseModel", "typing.TypedDict"}:
                continue
            chains[node.name] = len(chain)
            self._kinds[node.name] = "model" if chain[-1] == "pydantic.BaseModel" else "typed_dict"
        return sorted([node for node in classes if node.name in chains], key=lambda node: chains[node.name])

    def _find_schema_base(self, node: ast.ClassDef) -> str:
        """Return the base that makes or may make a class a schema class; ``""`` for other classes."""
        named = [self._base_name(base) for base in node.bases]
        self._set_error_position(node)
        hidden = [
            one
            for base, name in zip(node.bases, named, strict=True)
            if not name
            for one in ast.walk(base)
            if not isinstance(base, ast.Subscript) or self._may_be_schema_base(self._base_name(one))
        ]
        bases = [name for name in named if self._may_be_schema_base(name)]
        if hidden or (bases and len(named) > 1):
            self._refuse(
                "its bases are not supported; use one base: BaseModel, TypedDict or a schema class of this file"
            )
        if bases and bases[0].startswith("pydantic.") and bases[0] != "pydantic.BaseModel":
            self._refuse(f"{bases[0]!r} is not supported here; use BaseModel or TypedDict")
        return bases[0] if bases else ""

    def _may_be_schema_base(self, name: str) -> bool:
        """Return True if a class with the base *name* derives, or may derive, from ``BaseModel`` or ``TypedDict``."""
        seen: set[str] = set()
        while name not in seen and len(seen) <= MAX_DEPTH_LEVELS:
            if name.startswith("pydantic.") or name == "typing.TypedDict":
                return True
            seen.add(name)
            bound = self._names.get_binding(name) if "." not in name else None
            bases = bound.node.bases if bound and bound.what == CLASS else []
            if len(bases) != 1:
                return any(self._base_name(one).startswith(("pydantic.", "typing.TypedDict")) for one in bases)
            name = self._base_name(bases[0])
        return bool(name)  # a cycle, or a long chain: the code that resolves it refuses it

    def _base_name(self, node: ast.AST) -> str:
        """Return the dotted name of a base that was imported, or the name of a class of this file; ``""`` for others."""
        for _ in range(MAX_DEPTH_LEVELS):
            bound = self._resolve_binding(node)
            if bound.what == CLASS:
                return str(bound.node.name)
            if bound.what != ASSIGNED:
                return bound.what if "." in bound.what else ""
            node = bound.node
        return ""

    def _resolve_binding(self, node: ast.AST) -> _NameBinding:
        node, parts = _split_attributes(node)
        if not isinstance(node, ast.Name):
            return _NameBinding(UNKNOWN)
        bound = self._names.get_binding(node.id)
        if not parts:
            return bound
        if bound.what in {CLASS, ASSIGNED, TYPE, UNKNOWN}:
            return _NameBinding(UNKNOWN)
        return _NameBinding(".".join([bound.what, *reversed(parts)]))

    # --- reading a class

    def _read_and_record_class(self, node: ast.ClassDef) -> None:
        """Read a class, and record its fields, its rule for additional members and its definition."""
        name, kind = node.name, self._kinds[node.name]
        self._set_error_position(node)
        self._seen = set()
        left = self._left
        if node.decorator_list:
            self._refuse("decorators of schema classes are not supported here; remove them")
        if getattr(node, "type_params", None):
            self._refuse("schema classes with type parameters are not supported here; write a class for each type")
        base = self._base_name(node.bases[0])
        fields = dict(self._fields.get(base, {}))
        self._count_fields_against_limit(len(fields))
        words = {word.arg: word.value for word in node.keywords}
        is_total = self._read_total(words.pop("total")) if kind == "typed_dict" and "total" in words else True
        if words and kind == "typed_dict":
            self._refuse(f"{next(iter(words))!r} is not supported here; a TypedDict takes only total=")
        self._extras[name] = self._read_extra_setting(words, extra=self._extras.get(base))
        self._own = frozenset(_fields_with_values(node))
        for at, statement in enumerate(node.body):
            self._line, self._where = statement.lineno, f"class {name!r}"
            self._read_class_statement(node, statement, fields, is_total=is_total, is_first=at == 0)
        self._where = f"class {name!r}"
        self._own = frozenset()
        self._fields[name] = fields
        self._definitions[name] = self._make_definition(
            _object_schema(node, fields, extra=self._extras[name]),
            {one for field in fields.values() for one in field.refers},
            left - self._left + (self._get_definition(base).size if base in self._kinds else 0),
        )

    def _count_fields_against_limit(self, count: int) -> None:
        """Subtract *count* from the fields that the file may have; raise an error when none is left."""
        self._fields_left -= count
        if self._fields_left < 0:
            self._refuse(f"there are too many fields; a file may have at most {MAX_FIELDS_OF_FILE:,}")

    def _read_class_statement(
        self, node: ast.ClassDef, statement: ast.stmt, fields: dict[str, _ClassField], *, is_total: bool, is_first: bool
    ) -> None:
        """Read one statement of a class: add a field to *fields*, or read the config; refuse other statements."""
        match statement:
            case ast.Pass():
                pass
            case ast.Expr(value=ast.Constant(value=text)) if isinstance(text, str) or text is ...:
                if is_first and isinstance(text, str):
                    self._spend_work_for_text(text)
            case ast.Assign(targets=[ast.Name(id="model_config")]) if self._kinds[node.name] == "model":
                self._extras[node.name] = self._read_extra_setting(
                    self._config_arguments(statement.value), extra=self._extras[node.name]
                )
            case ast.AnnAssign(target=ast.Name(id=name)):
                self._where = f"class {node.name!r}, field {name!r}"
                self._check_and_count_field(node, name, fields)
                fields[name] = self._read_field(statement, self._kinds[node.name], is_total=is_total)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._refuse(f"{statement.name!r} is a method, which is not supported here; keep only fields")
            case _:
                self._refuse(
                    f"{_describe_node(statement)} is not supported here; use fields such as `name: str`, a docstring and model_config"
                )

    def _check_and_count_field(self, node: ast.ClassDef, name: str, fields: Mapping[str, _ClassField]) -> None:
        """Refuse an invalid or repeated field name, and count a new field against the limits."""
        is_private = name.startswith("_" if self._kinds[node.name] == "model" else "__")
        if is_private or name == "model_config":
            self._refuse("this is not a valid field name; use one that does not start with '_'")
        if name in self._seen:
            self._refuse("it is declared twice; remove one declaration")
        self._seen.add(name)
        if name not in fields:
            self._count_fields_against_limit(1)
            if len(fields) >= MAX_FIELDS:
                self._refuse(f"there are too many fields; a class may have at most {MAX_FIELDS}")

    def _config_arguments(self, node: ast.expr) -> Mapping[str | None, ast.expr]:
        """Return the settings of a ``model_config`` by name; refuse one that is neither ``ConfigDict(...)`` nor a dict."""
        if (
            isinstance(node, ast.Call)
            and self._resolve_binding(node.func).what == "pydantic.ConfigDict"
            and not node.args
        ):
            return {word.arg: word.value for word in node.keywords}
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return {key.value: value for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[union-attr]
        return self._refuse(f'{_describe_node(node)} is not supported here; use ConfigDict(extra="forbid")')

    def _read_extra_setting(self, settings: Mapping[str | None, ast.expr], *, extra: bool | None) -> bool | None:
        """Return ``additionalProperties`` for the settings in *settings*, ``None`` for ``"ignore"``; *extra* if they do not set it."""
        strange = [word for word in settings if word not in {"extra", "title"}]
        if strange:
            self._refuse(f"the setting {strange[0]!r} is not supported here; use extra='forbid' or title='...'")
        for word, node in settings.items():
            value = self._evaluate_literal(_NodeAtDepth(node, 0))
            if word == "extra":
                if not isinstance(value, str) or value not in EXTRA:
                    self._refuse("extra must be 'forbid', 'allow' or 'ignore'")
                extra = EXTRA[value]
        return extra

    def _read_total(self, node: ast.expr) -> bool:
        """Return the value of ``total=``; refuse one that is not True or False."""
        value = self._evaluate_literal(_NodeAtDepth(node, 0))
        return value if isinstance(value, bool) else self._refuse("total must be True or False")

    # --- fields

    def _read_field(self, node: ast.AnnAssign, kind: str, *, is_total: bool) -> _ClassField:
        """Return a field from its declaration, with its schema, default and alias."""
        self._refers = set()
        marks, at = self._split_required_markers(_NodeAtDepth(node.annotation, 0))
        parsed_type = self._read_annotation(at)
        refers = frozenset(self._refers)
        if kind == "typed_dict":
            if node.value is not None or parsed_type.given:
                self._refuse("a field of a TypedDict cannot have a default or an alias; use NotRequired[...]")
            is_required = marks[-1] == "typing.Required" if marks else is_total
            return _ClassField(parsed_type.schema, parsed_type.shape, is_required, NOTHING, "", refers, node.lineno)
        if marks:
            self._refuse("Required and NotRequired are only for a TypedDict; give the field a default instead")
        if node.value is not None:
            parsed_type = self._add_default(parsed_type, node.value)
        default = parsed_type.given.get("default", NOTHING)
        is_shown = default is not NOTHING and not parsed_type.given["is_made"]
        schema = {**parsed_type.schema, "default": default} if is_shown else parsed_type.schema
        alias = parsed_type.given.get("alias", "")
        return _ClassField(schema, parsed_type.shape, default is NOTHING, default, alias, refers, node.lineno)

    def _add_default(self, parsed_type: _ParsedType, value: ast.expr) -> _ParsedType:
        """Return a field type with the default or the arguments of ``Field(...)`` after its ``=``."""
        if isinstance(value, ast.Call) and self._resolve_binding(value.func).what == "pydantic.Field":
            return self._apply_field_call(parsed_type, value)
        return attrs.evolve(
            parsed_type,
            given={**parsed_type.given, "default": self._evaluate_literal(_NodeAtDepth(value, 0)), "is_made": False},
        )

    def _split_required_markers(self, node_at_depth: _NodeAtDepth) -> tuple[list[str], _NodeAtDepth]:
        """Return the ``Required`` and ``NotRequired`` markers of a TypedDict field, and the annotation inside them."""
        marks: list[str] = []
        node_at_depth = self._resolve_quotes_and_aliases(node_at_depth)
        while isinstance(node_at_depth.node, ast.Subscript):
            what = self._resolve_binding(node_at_depth.node.value).what
            if what not in {"typing.Required", "typing.NotRequired"}:
                break
            marks.append(what)
            node_at_depth = self._resolve_quotes_and_aliases(
                _NodeAtDepth(node_at_depth.node.slice, node_at_depth.depth + 1)
            )
        return marks, node_at_depth

    def _apply_field_call(self, parsed_type: _ParsedType, call: ast.Call) -> _ParsedType:
        """Return a type with the constraints, documentation, default and alias of a ``Field(...)``; refuse other arguments."""
        self._refuse_own_field_name(call.func)
        words = {word.arg: word.value for word in call.keywords}
        if len(call.args) > 1 or any(isinstance(one, ast.Starred) for one in call.args) or None in words:
            self._refuse("these arguments of Field(...) are not supported here; pass at most one default, and keywords")
        if call.args:
            words = {"default": call.args[0], **words}
        if strange := [word for word in words if word not in OF_FIELD]:
            self._refuse(
                f"Field({strange[0]}=...) is not supported here; supported keywords: {list_names(sorted(OF_FIELD), strange[0])}"
            )
        given = {**parsed_type.given, **self._read_default_and_alias(words)}
        values = {
            word: self._evaluate_literal(_NodeAtDepth(node, 0)) for word, node in words.items() if word not in ONCE
        }
        for word in CONSTRAINTS:
            if values.get(word) is not None:
                parsed_type = self._apply_constraint(parsed_type, word, values[word])
        return attrs.evolve(parsed_type, schema={**parsed_type.schema, **self._read_documentation(values)}, given=given)

    def _read_default_and_alias(self, arguments: Mapping[str | None, ast.expr]) -> dict[str, Any]:
        """Return the default and the alias of a ``Field``, which only fields have."""
        given: dict[str, Any] = {}
        default = arguments.get("default")
        if default is not None:
            is_required = isinstance(default, ast.Constant) and default.value is ...
            given = {
                "default": NOTHING if is_required else self._evaluate_literal(_NodeAtDepth(default, 0)),
                "is_made": False,
            }
        if "default_factory" in arguments:
            made = FACTORIES.get(self._resolve_binding(arguments["default_factory"]).what)
            if made is None or given:
                self._refuse(
                    "default_factory must be `list` or `dict`, without another default; or write a literal default"
                )
            given = {"default": made(), "is_made": True}
        if "alias" in arguments:
            given["alias"] = self._require_text("alias", self._evaluate_literal(_NodeAtDepth(arguments["alias"], 0)))
        return given

    def _read_documentation(self, values: Mapping[str | None, Any]) -> dict[str, Any]:
        """Return the description, title and examples of a ``Field``, after checking their types."""
        told: dict[str, Any] = {}
        for word in ("description", "title", "examples"):
            value = values.get(word)
            if value is None:
                continue
            if word == "examples":
                told[word] = value if isinstance(value, list) else self._refuse("examples must be a list of literals")
            else:
                told[word] = self._require_text(word, value)
        return told

    def _require_text(self, argument_name: str, value: object) -> str:
        """Return *value* if it is a string, else refuse it with a message about *argument_name*."""
        return value if isinstance(value, str) else self._refuse(f"{argument_name} must be a string")

    def _apply_constraint(self, parsed_type: _ParsedType, argument_name: str, value: Any) -> _ParsedType:
        """Return a type with a constraint, written where pydantic writes it; refuse one that does not apply to the type."""
        if parsed_type.kind == "nullable" and parsed_type.inner is not None:
            inner = self._apply_constraint(parsed_type.inner, argument_name, value)
            told = {key: said for key, said in parsed_type.schema.items() if key != "anyOf"}
            return attrs.evolve(
                parsed_type, schema={**_any_of_schema([inner.schema, {"type": "null"}]), **told}, inner=inner
            )
        if argument_name == "pattern" and parsed_type.kind == "string":
            return attrs.evolve(
                parsed_type, schema={**parsed_type.schema, "pattern": self._validate_and_store_pattern(value)}
            )
        if argument_name in NUMERIC and parsed_type.kind in {"integer", "number", "decimal"}:
            return self._apply_numeric_constraint(parsed_type, argument_name, value)
        lengths = LENGTHS.get("string" if parsed_type.kind == "union" else parsed_type.kind, {})
        takes = parsed_type.kind != "union" or any(one.get("type") == "string" for one in parsed_type.schema["anyOf"])
        if argument_name not in lengths or not takes:
            self._refuse(
                f"Field({argument_name}=...) does not apply to this type. ge, gt, le, lt and multiple_of are for numbers, pattern is for str. "
                "min_length and max_length are for str, list and dict. In a union, constrain its members: Annotated[..., Field(...)]"
            )
        if type(value) is not int or value < 0:
            self._refuse(f"{argument_name} must be a whole number of at least 0")
        return attrs.evolve(parsed_type, schema={**parsed_type.schema, lengths[argument_name]: value})

    def _apply_numeric_constraint(self, parsed_type: _ParsedType, argument_name: str, value: Any) -> _ParsedType:
        """Return a number type with one of ``ge``, ``gt``, ``le``, ``lt`` and ``multiple_of``."""
        allowed = (int,) if parsed_type.kind == "integer" else (int, float)
        if type(value) not in allowed or (argument_name == "multiple_of" and value <= 0):
            self._refuse(f"{argument_name} must be a number that fits the type, and multiple_of must be more than 0")
        if parsed_type.kind != "decimal":
            return attrs.evolve(parsed_type, schema={**parsed_type.schema, NUMERIC[argument_name]: value})
        number, *others = parsed_type.schema["anyOf"]  # as in pydantic, which does not constrain the text form
        return attrs.evolve(
            parsed_type,
            schema={**parsed_type.schema, "anyOf": [{**number, NUMERIC[argument_name]: float(value)}, *others]},
        )

    def _validate_and_store_pattern(self, value: object) -> str:
        """Refuse an invalid type or length of a pattern, store the pattern for ``_check_patterns``, and return it."""
        text = self._require_text("pattern", value)
        if len(text) > MAX_PATTERN_CHARS:
            self._refuse(f"the pattern has {len(text):,} characters; use at most {MAX_PATTERN_CHARS}")
        self._patterns.setdefault(text, self._line)
        return text

    def _check_patterns(self) -> None:
        """Raise an error, at the first such pattern, if the file's patterns together cannot be compiled within the limits."""
        texts = list(self._patterns)

        def find_problem(count: int) -> str:
            """Return the problem of compiling the first *count* patterns together; ``""`` if there is none."""
            try:
                JsonSchema(
                    "the patterns of this file", {"anyOf": [{"pattern": text} for text in texts[:count]] or [True]}
                )
            except DefinitionError as error:
                return str(error)
            return ""

        low, high, said = 0, len(texts), find_problem(len(texts))
        if not said:
            return
        while high - low > 1:
            middle = (low + high) // 2
            now = find_problem(middle)
            low, high, said = (low, middle, now) if now else (middle, high, said)
        self._line, self._where = self._patterns[texts[low]], "Field(pattern=...)"
        self._refuse(said)

    # --- types

    def _read_annotation(self, node_at_depth: _NodeAtDepth) -> _ParsedType:
        """Return the schema of an annotation; members of a union are merged without duplicates."""
        members = self._union_members(node_at_depth)
        nulls = [one for one in members if isinstance(one.node, ast.Constant) and one.node.value is None]
        parsed_types: list[_ParsedType] = []
        for one in members:
            if one not in nulls:
                parsed_type = self._read_non_union_annotation(one)
                if len(members) > 1 and parsed_type.given:
                    self._refuse("a member of a union cannot have a default or an alias; give them to the whole field")
                parsed_types.append(parsed_type)
        if len(parsed_types) > 1:
            parsed_types = _without_duplicates(parsed_types, key=lambda one: repr(one.schema))
        if not parsed_types:
            return _ParsedType({"type": "null"})
        inner = parsed_types[0]
        if len(parsed_types) > 1:
            inner = _ParsedType(
                _any_of_schema([one.schema for one in parsed_types]),
                "union",
                _join_shapes([one.shape for one in parsed_types]),
            )
        if not nulls:
            return inner
        shape = inner.shape if inner.shape == LEFT_OUT or inner.shape.endswith(" | None") else f"{inner.shape} | None"
        return _ParsedType(_any_of_schema([inner.schema, {"type": "null"}]), "nullable", shape, inner)

    def _union_members(self, node_at_depth: _NodeAtDepth) -> list[_NodeAtDepth]:
        """Return the members of a union, aliases followed; the annotation itself when it is not a union."""
        found: list[_NodeAtDepth] = []
        left = [node_at_depth]
        while left:
            now = self._resolve_quotes_and_aliases(left.pop())
            parts = self._direct_union_members(now)
            if parts is None:
                found.append(now)
            else:
                left.extend(reversed(parts))
            if len(found) > MAX_UNION_MEMBERS:
                self._refuse(f"a union may have at most {MAX_UNION_MEMBERS} types; use fewer, or one Literal")
        return found

    def _direct_union_members(self, node_at_depth: _NodeAtDepth) -> list[_NodeAtDepth] | None:
        """Return the direct members of a union; ``None`` for any other annotation."""
        node = node_at_depth.node
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return [_NodeAtDepth(node.left, node_at_depth.depth), _NodeAtDepth(node.right, node_at_depth.depth)]
        if isinstance(node, ast.Subscript):
            what = self._resolve_binding(node.value).what
            if what == "typing.Optional":
                return [
                    _NodeAtDepth(node.slice, node_at_depth.depth + 1),
                    _NodeAtDepth(ast.Constant(None), node_at_depth.depth + 1),
                ]
            if what == "typing.Union":
                return [_NodeAtDepth(one, node_at_depth.depth + 1) for one in _tuple_items(node.slice)]
        return None

    def _resolve_quotes_and_aliases(self, node_at_depth: _NodeAtDepth) -> _NodeAtDepth:
        """Return an annotation without quotes and with plain aliases resolved."""
        while True:
            self._spend_work()
            if node_at_depth.depth > MAX_DEPTH_LEVELS:
                self._refuse(
                    f"its type is recursive, or nested more than {MAX_DEPTH_LEVELS} levels deep; use a simpler type"
                )
            node = node_at_depth.node
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node_at_depth = _NodeAtDepth(self._parse_quoted(node.value), node_at_depth.depth + 1)
                continue
            self._refuse_own_field_name(node)
            bound = self._resolve_binding(node)
            if bound.what != ASSIGNED:
                return node_at_depth
            node_at_depth = _NodeAtDepth(bound.node, node_at_depth.depth + 1)

    def _parse_quoted(self, text: str) -> ast.expr:
        """Return the syntax tree of a quoted annotation; refuse one that is too long or invalid."""
        if len(text) > MAX_ANNOTATION_CHARS:
            self._refuse(f"a quoted annotation may have at most {MAX_ANNOTATION_CHARS:,} characters; remove the quotes")
        try:
            return ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return self._refuse(f"the quoted annotation is not a supported type; use one of {TYPES_HERE}")

    def _refuse_own_field_name(self, node: ast.AST) -> None:
        """Raise an error for a name that refers to a field of its own class."""
        for _ in range(MAX_DEPTH_LEVELS):
            if not isinstance(node, ast.Attribute):
                break
            node = node.value
        if isinstance(node, ast.Name) and node.id in self._own:
            self._refuse(f"{node.id!r} means the field of that name here; rename the field")

    def _read_non_union_annotation(self, node_at_depth: _NodeAtDepth) -> _ParsedType:
        """Return the schema of an annotation that is no union: a named type, a generic type or None."""
        node = node_at_depth.node
        if isinstance(node, ast.Name | ast.Attribute):
            return self._read_named_type(node, node_at_depth.depth)
        if isinstance(node, ast.Subscript):
            self._refuse_own_field_name(node.value)
            return self._read_generic_type(node, node_at_depth.depth + 1)
        return self._refuse(f"{_describe_node(node)} is not a supported type; use one of {TYPES_HERE}")

    def _read_named_type(self, node: ast.Name | ast.Attribute, depth: int) -> _ParsedType:
        """Return the schema of a type that is named without arguments: a builtin, an alias, an Enum or a schema class."""
        bound = self._resolve_binding(node)
        what = bound.what
        if what == "decimal.Decimal":
            return _ParsedType({"anyOf": [{"type": "number"}, {"type": "string"}]}, "decimal")
        if what in PLAIN:
            kind, schema = PLAIN[what]
            return _ParsedType(dict(schema), kind)
        if what in LISTS | SETS | TUPLES:
            return _ParsedType({"type": "array", "items": {}, **_unique_items_keyword(what)}, "array")
        if what in DICTS:
            return _ParsedType({"type": "object", "additionalProperties": True}, "object")
        if what == TYPE:
            return self._define_type_alias(bound.node, depth + 1)
        if what == CLASS and bound.node.name in self._kinds:
            return self._make_and_record_reference(bound.node.name, bound.node.name)
        if what == CLASS and any(self._resolve_binding(base).what in ENUMS for base in bound.node.bases):
            self._define_enum(bound.node)
            return self._make_and_record_reference(bound.node.name, LEFT_OUT)
        return self._refuse(f"{_describe_node(node)} is not a supported type; use one of {TYPES_HERE}")

    def _make_and_record_reference(self, name: str, shape: str) -> _ParsedType:
        """Return a reference to a definition, and record that the current field refers to it."""
        self._refers.add(name)
        return _ParsedType({"$ref": f"#/$defs/{name}"}, "other", shape)

    def _read_generic_type(self, node: ast.Subscript, depth: int) -> _ParsedType:
        """Return the schema of a type with arguments, such as ``list[...]``, ``Literal[...]`` or ``Annotated[...]``."""
        what, items = self._resolve_binding(node.value).what, _tuple_items(node.slice)
        if what == "typing.Literal":
            return _ParsedType(_enum_schema(self._read_literals(items, depth)))
        if what == "typing.Annotated":
            return self._read_annotated_type(items, depth)
        if what in TUPLES:
            return self._read_tuple_type(items, depth)
        if what in LISTS | SETS and len(items) == 1:
            parsed_type = self._read_inner_annotation(items[0], depth)
            if what in SETS and parsed_type.shape != LEFT_OUT:
                self._refuse("a set cannot contain schema classes; use list[...]")
            return _ParsedType(
                {"type": "array", "items": parsed_type.schema, **_unique_items_keyword(what)},
                "array",
                _format_shape("list[{}]", parsed_type.shape),
            )
        if what in DICTS and len(items) == 2:  # noqa: PLR2004 - key and value
            return self._read_dict_type(items, depth)
        return self._refuse(f"{_describe_node(node)} is not a supported type; use one of {TYPES_HERE}")

    def _read_inner_annotation(self, node: ast.expr, depth: int) -> _ParsedType:
        parsed_type = self._read_annotation(_NodeAtDepth(node, depth))
        if parsed_type.given:
            self._refuse("a type inside another type cannot have a default or an alias; give them to the whole field")
        return parsed_type

    def _read_dict_type(self, items: Sequence[ast.expr], depth: int) -> _ParsedType:
        """Return the schema of a ``dict`` type; refuse keys other than ``str``."""
        key = self._read_inner_annotation(items[0], depth)
        if key.schema != {"type": "string"}:
            self._refuse("the keys of an object must be str; use dict[str, ...]")
        value = self._read_inner_annotation(items[1], depth)
        schema = {"type": "object", "additionalProperties": value.schema or True}
        return _ParsedType(schema, "object", _format_shape("dict[str, {}]", value.shape))

    def _read_tuple_type(self, items: Sequence[ast.expr], depth: int) -> _ParsedType:
        """Return the schema of a ``tuple`` type, of any or of a fixed length."""
        if len(items) == 2 and isinstance(items[1], ast.Constant) and items[1].value is ...:  # noqa: PLR2004 - X, ...
            parsed_type = self._read_inner_annotation(items[0], depth)
            return _ParsedType(
                {"type": "array", "items": parsed_type.schema}, "array", _format_shape("list[{}]", parsed_type.shape)
            )
        parsed_types = [self._read_inner_annotation(item, depth) for item in items]
        schema: dict[str, Any] = {"type": "array", "minItems": len(parsed_types), "maxItems": len(parsed_types)}
        if parsed_types:
            schema["prefixItems"] = [parsed_type.schema for parsed_type in parsed_types]
        shapes = [parsed_type.shape for parsed_type in parsed_types]
        shape = LEFT_OUT if all(one == LEFT_OUT for one in shapes) else f"tuple[{', '.join(shapes)}]"
        return _ParsedType(schema, "other", shape)

    def _read_annotated_type(self, items: Sequence[ast.expr], depth: int) -> _ParsedType:
        """Return the schema of an ``Annotated[...]`` type with the constraints of each ``Field(...)``; refuse other metadata."""
        parsed_type = self._read_annotation(_NodeAtDepth(items[0], depth)) if items else _ParsedType({})
        for node in items[1:]:
            if not isinstance(node, ast.Call) or self._resolve_binding(node.func).what != "pydantic.Field":
                self._refuse(
                    f"Annotated[..., {_describe_node(node)}] is not supported here; use Annotated[..., Field(...)]"
                )
            parsed_type = self._apply_field_call(parsed_type, node)
        return parsed_type

    def _define_type_alias(self, node: Any, depth: int) -> _ParsedType:
        """Add the definition of a ``type`` statement if it is new, and return a reference to the definition."""
        name = node.name.id
        if node.type_params:
            self._refuse(f"{name!r} has type parameters, which are not supported here; write an alias for each type")
        if name not in self._definitions:
            self._definitions[name] = None
            refers, self._refers, left = self._refers, set(), self._left
            parsed_type = self._read_inner_annotation(node.value, depth)
            self._definitions[name] = self._make_definition(
                parsed_type.schema, frozenset(self._refers), left - self._left
            )
            self._refers = refers
            self._shapes[name] = parsed_type.shape
        return self._make_and_record_reference(name, self._shapes.get(name, f"list[{UNENDING}]"))

    # --- values

    def _define_enum(self, node: ast.ClassDef) -> dict[str, Any]:
        """Add the definition of an Enum if it is new, and return the values of its members by name."""
        if node.name in self._enums:
            return self._enums[node.name]
        kept = self._line, self._where, self._own
        self._set_error_position(node)
        self._own = frozenset()
        bases = tuple(self._resolve_binding(base).what for base in node.bases)
        if bases not in OF_ENUMS or node.keywords or node.decorator_list:
            self._refuse("this kind of Enum is not supported here; use Literal[...] with its values")
        values: dict[str, Any] = {}
        left = self._left
        for at, statement in enumerate(node.body):
            self._line = statement.lineno
            self._read_enum_member(statement, OF_ENUMS[bases], values, is_first=at == 0)
        if not values:
            self._refuse("an Enum without members accepts no value; add members, or use Literal['low', 'high']")
        first: dict[Any, Any] = {}
        values = {
            name: first.setdefault(value, value) for name, value in values.items()
        }  # `1` and `True` are one member
        schema = {**_description_keyword(node), **_common_type_keyword([*first]), "enum": [*first]}
        if schema.get("type") == "null":
            del schema["type"]
        self._enums[node.name] = values
        self._definitions[node.name] = self._make_definition(schema, frozenset(), left - self._left)
        self._line, self._where, self._own = kept
        return values

    def _read_enum_member(
        self, statement: ast.stmt, kind: type | None, values: dict[str, Any], *, is_first: bool
    ) -> None:
        """Add a member of an Enum to *values*; refuse values of another type and other statements."""
        match statement:
            case ast.Pass():
                pass
            case ast.Expr(value=ast.Constant(value=str() as text)):
                if is_first:
                    self._spend_work_for_text(text)
            case ast.Assign(targets=[ast.Name(id=name)]) if not name.startswith("_") and name not in values:
                value = self._evaluate_literal(_NodeAtDepth(statement.value, 0))
                if isinstance(value, list | dict) or (kind and type(value) is not kind):
                    self._refuse(
                        f"the value of {name!r} has the wrong type; use a literal {kind.__name__ if kind else 'str or int'}"
                    )
                values[name] = value
            case _:
                self._refuse(
                    f"{_describe_node(statement)} is not supported in an Enum; use members such as `LOW = 'low'`"
                )

    def _read_literals(self, items: Sequence[ast.expr], depth: int) -> list[Any]:
        """Return the distinct values of a ``Literal[...]``, nested ones included; refuse values that it may not contain."""
        found: dict[tuple[type, Any], Any] = {}
        self._spend_work(len(items))
        if len(items) > MAX_LITERAL_VALUES:
            self._refuse(f"Literal[...] may have at most {MAX_LITERAL_VALUES:,} values; use str")
        left = [_NodeAtDepth(item, depth) for item in reversed(items)]
        while left:
            at = left.pop()
            node = at.node
            if isinstance(node, ast.Name | ast.Attribute):
                at = self._resolve_quotes_and_aliases(at)
                node = at.node
            if isinstance(node, ast.Subscript) and self._resolve_binding(node.value).what == "typing.Literal":
                left.extend(_NodeAtDepth(one, at.depth + 1) for one in reversed(_tuple_items(node.slice)))
                continue
            is_value = isinstance(node, ast.Constant | ast.UnaryOp)
            value = self._evaluate_literal(at) if is_value else NOTHING
            if not isinstance(value, str | int | None):
                self._refuse(
                    f"Literal[...] may contain strings, integers, True, False and None, not {_describe_node(node)}"
                )
            found.setdefault((type(value), value), value)
        return list(found.values()) or self._refuse("Literal[...] must contain at least one value")

    def _evaluate_literal(self, node_at_depth: _NodeAtDepth) -> Any:
        """Return the JSON value of a literal or of a constant of the file; refuse other expressions."""
        self._spend_work()
        node, depth = node_at_depth.node, node_at_depth.depth
        if depth > MAX_DEPTH_LEVELS:
            self._refuse(f"a value is nested more than {MAX_DEPTH_LEVELS} levels deep; use fewer levels")
        match node:
            case ast.Constant(value=str() | bool() | int() | float() | None as value):
                return self._require_json_scalar(value)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as value)):
                if not isinstance(value, bool):
                    return self._require_json_scalar(-value if isinstance(node.op, ast.USub) else value)
            case ast.List(elts=elts) | ast.Tuple(elts=elts):
                return [self._evaluate_literal(_NodeAtDepth(one, depth + 1)) for one in elts]
            case ast.Dict() if all(node.keys):
                return self._evaluate_dict(node, depth + 1)
            case ast.Name() | ast.Attribute():
                return self._evaluate_constant(node, depth)
            case _:
                pass
        return self._refuse(
            f"{_describe_node(node)} is not a literal, and it cannot be read without running code; write a literal"
        )

    def _evaluate_dict(self, node: ast.Dict, depth: int) -> dict[str, Any]:
        """Return the JSON object of a dict literal; refuse keys that are not texts."""
        names = [self._evaluate_literal(_NodeAtDepth(key, depth)) for key in node.keys if key]
        if not all(isinstance(name, str) for name in names):
            self._refuse("the keys of an object must be strings")
        return dict(zip(names, [self._evaluate_literal(_NodeAtDepth(one, depth)) for one in node.values], strict=True))

    def _evaluate_constant(self, node: ast.Name | ast.Attribute, depth: int) -> Any:
        """Return the value of a constant of the file, or of a member of one of its Enums."""
        self._refuse_own_field_name(node)
        bound = self._resolve_binding(node)
        if bound.what == ASSIGNED and not any(isinstance(one, ast.List | ast.Dict) for one in ast.walk(bound.node)):
            return self._evaluate_literal(_NodeAtDepth(bound.node, depth + 1))
        if isinstance(node, ast.Attribute):
            owner = self._resolve_binding(node.value)
            if owner.what == CLASS and any(self._resolve_binding(base).what in ENUMS for base in owner.node.bases):
                values = self._define_enum(owner.node)
                if node.attr in values:
                    return values[node.attr]
        return self._refuse(
            f"{_describe_node(node)} is not a readable constant of this file; write a literal, "
            "or a name that is assigned one string, number or tuple of them, once"
        )

    def _require_json_scalar(self, value: Any) -> Any:
        """Return *value* unchanged; refuse numbers that JSON cannot have. A text counts against the budget of work."""
        if isinstance(value, str):
            self._spend_work_for_text(value)
        elif isinstance(value, float) and not math.isfinite(value):
            self._refuse("infinity and NaN are not JSON; use a finite number")
        elif isinstance(value, int) and not MIN_NUMBER <= value <= MAX_NUMBER:
            self._refuse(f"a number may have at most {MAX_DIGITS:,} digits; use a smaller one")
        return value

    # --- bounds

    def _spend_work(self, work: int = 1) -> None:
        """Subtract *work* from the budget of the file; raise an error when it is used up."""
        self._left -= work
        if self._left < 0:
            self._refuse("the schema classes of this file are too large with all aliases expanded; make them smaller")

    def _spend_work_for_text(self, text: str) -> None:
        """Subtract the work for a text from the budget of the file."""
        self._spend_work(len(text) // CHARS_PER_PLACE)

    def _make_definition(self, schema: dict[str, Any], refers: Iterable[str], size: int) -> _Definition:
        """Return a frozen definition without titles and in pydantic's order; refuse texts that are not JSON."""
        try:
            return _Definition(freeze_object(remove_titles(_sort_like_pydantic(schema))), frozenset(refers), size + 1)
        except DataError as error:
            return self._refuse(f"it is not JSON: {error}; remove incomplete characters (lone surrogates)")

    def _set_error_position(self, node: ast.ClassDef) -> None:
        """Set the position that error messages name to a class."""
        self._line, self._where = node.lineno, f"class {node.name!r}"

    def _refuse(self, reason: str) -> NoReturn:
        """Raise ``DefinitionError`` with the current line and position in the file."""
        msg = f"{self._file}:{self._line}: {self._where}: {reason}"
        raise DefinitionError(msg)


# --- parts ----------------------------------------------------------------------------------------------------------


def _tuple_items(node: ast.expr) -> list[ast.expr]:
    """Return the items of a tuple expression; any other expression is the only item."""
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _fields_with_values(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of annotated fields with a value."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and one.value is not None and isinstance(one.target, ast.Name):
            yield one.target.id


def _unique_items_keyword(type_name: str) -> dict[str, Any]:
    """Return ``uniqueItems`` for the annotation of a set, nothing for other arrays."""
    return {"uniqueItems": True} if type_name in SETS else {}


def _format_shape(template: str, shape: str) -> str:
    """Return *template* with *shape* inserted; ``"Any"`` if the value has no schema classes."""
    return shape if shape == LEFT_OUT else template.format(shape)


def _join_shapes(shapes: Sequence[str]) -> str:
    """Return the shape of a union, such as ``"A | B | None"``; ``"Any"`` if no member has schema classes."""
    different = list(dict.fromkeys(one.removesuffix(" | None") for one in shapes))
    null = " | None" if any(one.endswith(" | None") for one in shapes) else ""
    return LEFT_OUT if different == [LEFT_OUT] else " | ".join(different) + null


def _any_of_schema(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema that accepts any of several schemas, without duplicates."""
    flat = [one for schema in schemas for one in (schema["anyOf"] if schema.keys() == {"anyOf"} else [schema])]
    members = _without_duplicates(flat, key=repr)  # `1` and `True` are equal, and not the same in JSON
    return members[0] if len(members) == 1 else {"anyOf": members}


def _without_duplicates(values: Iterable[Any], key: Callable[[Any], Any]) -> list[Any]:
    found: dict[Any, Any] = {}
    for value in values:
        found.setdefault(key(value), value)
    return list(found.values())


def _common_type_keyword(values: Sequence[Any]) -> dict[str, Any]:
    """Return the ``type`` of JSON Schema that all values have; nothing if their types differ."""
    types = {type(value) for value in values}
    return {"type": JSON_TYPES[types.pop()]} if len(types) == 1 else {}


def _enum_schema(values: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of a set of values: ``const`` for a single one, else ``enum``, with their common type."""
    return {**({"const": values[0]} if len(values) == 1 else {"enum": [*values]}), **_common_type_keyword(values)}


def _description_keyword(node: ast.ClassDef) -> dict[str, Any]:
    """Return the docstring of a class as a ``description``; nothing without one."""
    text = ast.get_docstring(node, clean=False)
    return {"description": inspect.cleandoc(text)} if text else {}


def _object_schema(node: ast.ClassDef, fields: Mapping[str, _ClassField], *, extra: bool | None) -> dict[str, Any]:
    """Return the schema of a class: its description, properties, required names and rule for additional members."""
    schema: dict[str, Any] = {"type": "object", **_description_keyword(node)}
    schema["properties"] = {field.alias or name: field.schema for name, field in fields.items()}
    if required := [field.alias or name for name, field in fields.items() if field.is_required]:
        schema["required"] = required
    if extra is not None:
        schema["additionalProperties"] = extra
    return schema


def _sort_like_pydantic(value: Any, above: str = "") -> Any:
    """Return a schema with its keys in the order of pydantic. *above* is the key that contains *value*."""
    if isinstance(value, list):
        return [_sort_like_pydantic(one, above) for one in value]
    if not isinstance(value, dict):
        return value
    names = value if above in {"properties", "default"} else sorted(value)
    return {name: _sort_like_pydantic(value[name], name) for name in names}


def _split_attributes(node: ast.AST) -> tuple[ast.AST, list[str]]:
    """Return the innermost value of an attribute access, and the names of the attributes from the last to the first."""
    names: list[str] = []
    while isinstance(node, ast.Attribute) and len(names) < MAX_DEPTH_LEVELS:
        names.append(node.attr)
        node = node.value
    return node, names


def _describe_node(node: ast.AST) -> str:
    """Return a short description of a node for messages: a name, a constant or its kind."""
    node, parts = _split_attributes(node)
    if isinstance(node, ast.Name):
        return repr(".".join([node.id, *reversed(parts)])[:100])
    if isinstance(node, ast.Call):
        return f"a call of {node.func.id[:100]!r}" if isinstance(node.func, ast.Name) else "a call"
    if isinstance(node, ast.Subscript):
        return f"{node.value.id[:100]!r}[...]" if isinstance(node.value, ast.Name) else "a subscript"
    if isinstance(node, ast.Constant):
        return repr(node.value)[:100] if not isinstance(node.value, int) else "a number"
    return "an f-string" if isinstance(node, ast.JoinedStr) else type(node).__name__
