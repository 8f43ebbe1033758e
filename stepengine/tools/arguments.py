"""
The input of a tool that is a function: JSON Schema from its signature, validation by pydantic.

pydantic validates a *capture function* with the same parameters, which returns its arguments instead of running the tool.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast, get_origin

from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.json import JsonDict, JsonList, JsonValue, compact, freeze, freeze_object
from stepengine.data.schemas import NAMED_SCHEMAS, SCHEMAS
from stepengine.data.tools import Validated
from stepengine.data.typed_values import sort_dumped_sets
from stepengine.errors import DataError, DefinitionError
from stepengine.tools.conversion import dump_typed, encode_typed
from stepengine.tools.iterables import REMEDY as REMEDY_OF_ITERABLES
from stepengine.tools.iterables import find_one_shot_iterable
from stepengine.tools.places import is_bundled_function, source_location
from stepengine.tools.schemas import make_tool_input_error
from stepengine.tools.signatures import Signature

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails, ValidationError

ITERATORS = (collections.abc.Iterator, collections.abc.AsyncIterator, collections.abc.AsyncIterable)
"""Types for which pydantic has no schema, since no JSON value can be one."""
SCALARS = frozenset({str, int, float, bool, type(None)})
IN_SCHEMA_ORDER = inspect.Parameter.KEYWORD_ONLY


@frozen(eq=False)
class _Parameters:
    """
    The parameters of a function as a cache key: equal parameters have equal validation.

    Attributes:
        module: The module of the function.
        kept: The parameters.
        written: Their representation as text, which is compared, too, since ``1 == True``.
    """

    module: str
    kept: tuple[inspect.Parameter, ...]
    written: str

    def __hash__(self) -> int:
        return hash((self.module, self.written))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parameters) and all(
            (self.module == other.module, self.written == other.written, self.kept == other.kept)
        )

    def make_adapter(self) -> TypeAdapter[Any]:
        """Return a pydantic adapter that validates an object to a dict with one argument for each parameter."""
        from pydantic import ConfigDict, TypeAdapter

        def capture(**arguments: object) -> dict[str, Any]:
            return arguments

        capture.__signature__ = inspect.Signature(self.kept)  # type: ignore[attr-defined]
        capture.__annotations__ = {p.name: p.annotation for p in self.kept}
        capture.__module__ = self.module
        return TypeAdapter(cast("Any", capture), config=ConfigDict(allow_inf_nan=False))


# A bundled tool is created again for each folder of agents. Its compiled pydantic schema depends only on the signature, and
# compiling takes longer than the rest of its creation.
_bundled_adapter = functools.lru_cache(maxsize=256)(_Parameters.make_adapter)


def _make_parameters_adapter(signature: Signature) -> TypeAdapter[Any]:
    """Return the pydantic adapter for a function's parameters; raise ``DefinitionError`` if one has no JSON Schema."""
    from pydantic.errors import PydanticUserError

    fn = signature.body.fn
    kept = tuple([p.replace(kind=IN_SCHEMA_ORDER) for p in signature.parameters])
    module = getattr(fn, "__module__", __name__)
    try:
        # Only for bundled tools, equal representations are known to have the same meaning.
        return (
            _bundled_adapter(_Parameters(module, kept, repr(kept)))
            if is_bundled_function(fn)
            else _Parameters(module, kept, "").make_adapter()
        )
    except (PydanticUserError, TypeError) as error:
        text = str(error).partition("\n")[0]
        if iterator := next((p.name for p in kept if get_origin(p.annotation) in ITERATORS), None):
            text = f"the parameter {iterator!r} is an iterator: {REMEDY_OF_ITERABLES}"
        msg = f"{source_location(fn)}: the parameters of tool {getattr(fn, '__name__', '?')!r} have no JSON Schema: {text}"
        raise DefinitionError(msg) from error


def _check_no_one_shot_iterables(adapter: TypeAdapter[Any], tool_name: str, signature: Signature) -> None:
    """Raise ``DefinitionError`` if a parameter is an iterable whose values can be read only once."""
    place = find_one_shot_iterable(adapter.core_schema)
    if place is not None:
        where = source_location(signature.body.fn)
        msg = (
            f"{where}: the parameter {place!r} of tool {tool_name!r} is an Iterable or Generator: {REMEDY_OF_ITERABLES}"
        )
        raise DefinitionError(msg)


def _make_schema_without_titles(adapter: TypeAdapter[Any]) -> Any:
    """Return the JSON Schema of a pydantic adapter without titles."""
    return remove_titles(adapter.json_schema())


_bundled_json_schema = functools.lru_cache(maxsize=256)(_make_schema_without_titles)


def _parse_aliases(schema: Any, signature: Signature) -> dict[str, tuple[str, ...]]:
    """
    Return the input names of each parameter with an alias, the preferred one first; raise ``DefinitionError`` for an alias path.

    Raises:
        DefinitionError: For an alias that is a path into an object, since no input can be rebuilt from its value.
    """
    while schema["type"] != "arguments":
        schema = schema["schema"] if schema["type"] == "definitions" else schema["arguments_schema"]
    found: dict[str, tuple[str, ...]] = {}
    for parameter in schema["arguments_schema"]:
        given = parameter.get("alias")
        if given is None:
            continue
        ways = [given] if isinstance(given, str) else given if isinstance(given[0], list) else [given]
        names = [way if isinstance(way, str) else way[0] for way in ways if isinstance(way, str) or len(way) == 1]
        if len(names) < len(ways) or not all(isinstance(name, str) for name in names):
            where = source_location(signature.body.fn)
            msg = (
                f"{where}: the alias of parameter {parameter['name']!r} is a path into another value; use a single name"
            )
            raise DefinitionError(msg)
        found[parameter["name"]] = tuple(names)
    return found


def _without_field_info(annotation: Any) -> Any:
    """Return an annotation without its ``FieldInfo``. Pydantic warns about one outside of a parameter."""
    from pydantic.fields import FieldInfo

    kept = [each for each in annotation.__metadata__ if not isinstance(each, FieldInfo)]
    return Annotated[(annotation.__origin__, *kept)] if kept else annotation.__origin__


def remove_titles(schema: object) -> Any:
    """
    Return a schema without titles, which do not help a model; those set by its author are removed, too.

    Properties, defaults and examples with the name ``title`` are not removed.
    """
    if isinstance(schema, list):
        return [remove_titles(s) for s in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _remove_titles_below(key, value) for key, value in schema.items() if key != "title"}


def _remove_titles_below(keyword: str, value: object) -> object:
    """Return the value of a schema keyword with the titles of its subschemas removed; other values unchanged."""
    if keyword in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: remove_titles(schema) for name, schema in value.items()}
    return remove_titles(value) if keyword in SCHEMAS else value


def _is_same_json(call_value: Any, validated: Any) -> bool:
    """Return True if a validated value equals the given JSON in value and type."""
    kind = type(validated)
    # The type as well: `True == 1 == 1.0` in Python, and not in JSON. What is the same is not encoded, which is so for
    # nearly every call.
    if kind in SCALARS:
        return type(call_value) is kind and bool(call_value == validated)
    if kind is list or kind is JsonList:
        return (
            isinstance(call_value, JsonList)
            and len(call_value) == len(validated)
            and all(map(_is_same_json, call_value, validated))
        )
    if kind is dict or kind is JsonDict:
        return (
            isinstance(call_value, JsonDict)
            and call_value.keys() == validated.keys()
            and all(_is_same_json(call_value[k], v) for k, v in validated.items())
        )
    return False


class FunctionInputs:
    """
    Validates inputs against a function's parameters.

    Args:
        tool_name: The name of the tool, for messages.
        signature: The signature of the function.
        texts: The descriptions of parameters, by name.

    Attributes:
        schema: The input schema.

    Raises:
        DefinitionError: If a parameter's type has no JSON Schema.
    """

    def __init__(self, tool_name: str, signature: Signature, texts: Mapping[str, str]) -> None:
        # Imported here, so that commands without tools do not load pydantic.
        from pydantic_core import ValidationError

        self._name = tool_name
        self._signature = signature
        self._refused = ValidationError
        self._adapter = _make_parameters_adapter(signature)
        self._encoders: dict[str, TypeAdapter[Any]] = {}
        _check_no_one_shot_iterables(self._adapter, tool_name, signature)
        self._aliases = _parse_aliases(self._adapter.core_schema, signature)
        self.schema = self._make_schema(texts)

    def _make_schema(self, descriptions: Mapping[str, str]) -> JsonDict:
        """Return the input schema of the parameters; *descriptions* are used where a parameter has none of its own."""
        from pydantic.errors import PydanticInvalidForJsonSchema

        try:
            made = (
                _bundled_json_schema if is_bundled_function(self._signature.body.fn) else _make_schema_without_titles
            )(self._adapter)
        except PydanticInvalidForJsonSchema as error:
            fn = self._signature.body.fn
            msg = f"{source_location(fn)}: the parameters of tool {self._name!r} have no JSON Schema: {error}"
            raise DefinitionError(msg) from error
        described = {
            name: {**field, "description": field.get("description", descriptions[name])}
            if name in descriptions
            else field
            for name, field in made.get("properties", {}).items()
        }
        return freeze_object({"type": "object", "properties": {}, **made} | {"properties": described})

    def validate(self, value: JsonDict) -> Validated:
        """
        Return the arguments for the body, and the same arguments as JSON.

        Raises:
            ToolInputError: If it is invalid; the message lists every invalid field.
        """
        # First as Python objects, which is faster; then as JSON text, for strict types: they accept a date from JSON text
        # but not from a Python string.
        try:
            arguments = self._adapter.validator.validate_python(value)
        except self._refused as error:
            arguments = self._validate_as_json_text(value, error)
        return Validated(self._merge_arguments_into_input(value, arguments), arguments)

    def encode_arguments(self, arguments: Mapping[str, object]) -> JsonDict:
        """
        Return the JSON input whose validation returns arguments equal to these.

        Raises:
            DataError: If a value has no such JSON; the message names the parameter.
        """
        return freeze_object(
            {
                self._get_input_name(name, JsonDict()): self._encode_argument_losslessly(name, value)
                for name, value in arguments.items()
            }
        )

    def _encode_argument_losslessly(self, name: str, value: Any) -> object:
        """Return JSON whose validation returns a value equal to this argument; raise ``DataError`` if there is none."""
        if type(value) in SCALARS:
            return value
        encoder = self._get_or_create_parameter_adapter(name)
        return encode_typed(value, encoder, name, partial(self._load_typed_value, encoder))

    def _validate_as_json_text(self, value: JsonDict, first_error: ValidationError) -> object:
        """
        Return the arguments, validated from the input as JSON text, for strict types.

        Raises:
            ToolInputError: With the issues of *first_error*, the error of the first attempt.
        """
        try:
            return self._adapter.validate_json(compact(value))
        except self._refused:
            # The issues of the first attempt describe the input as it was passed.
            details = first_error.errors(include_url=False, include_context=False, include_input=False)
            raise make_tool_input_error(self._name, [self._describe_issue(e) for e in details], value) from None

    def _describe_issue(self, error: ErrorDetails) -> str:
        """Return the sentence for an error of pydantic, with the path of the invalid value."""
        where = ".".join(str(part) for part in error["loc"])
        kind = error["type"]
        if kind == "missing_keyword_only_argument":
            return f"{where}: is required"
        if kind == "unexpected_keyword_argument":
            known = list_names([p.name for p in self._signature.parameters], where)
            return f"{where}: is not a parameter; the parameters are: {known}"
        return f"{where}: {error['msg']}" if where else error["msg"]

    def _merge_arguments_into_input(self, call_input: JsonDict, arguments: Mapping[str, object]) -> JsonDict:
        """Return the call's input with added defaults, and with the validated values of members that validation changed."""
        changed: dict[str, object] = {}
        for name, value in arguments.items():
            place = self._get_input_name(name, call_input) if name in self._aliases else name
            kind = type(value)
            if place in call_input:
                held = call_input[place]
                # As ``_is_same_json``, without a call for scalars, which most arguments are.
                if (type(held) is not kind or held != value) if kind in SCALARS else not _is_same_json(held, value):
                    changed[place] = self._dump_validated_argument(name, value, call_input)
            # Defaults are added to the input: hooks, rules and records contain the values that the tool receives, and a
            # replay detects a changed default.
            elif kind in SCALARS:
                changed[place] = value
            else:
                changed[place] = self._dump_validated_argument(name, value, call_input)
        # These are the values that the body receives; rules, hooks and people check the same input.
        return freeze_object({**call_input, **changed}) if changed else call_input

    def _load_typed_value(self, adapter: TypeAdapter[Any], value: JsonValue) -> Any:
        """Return the typed value of JSON, validated as Python objects, or as JSON text if that fails."""
        try:
            return adapter.validator.validate_python(value)
        except self._refused:
            return adapter.validate_json(compact(value))

    def _get_input_name(self, name: str, call_input: JsonDict) -> str:
        """Return the name of a parameter in *call_input*: its first alias there, else its preferred name."""
        known = self._aliases.get(name, (name,))
        return next((alias for alias in known if alias in call_input), known[0])

    def _dump_validated_argument(self, name: str, value: Any, call_input: JsonDict) -> object:
        """Return a validated argument as JSON; raise ``ToolInputError`` if it has no JSON form."""
        try:
            return freeze(sort_dumped_sets(value, dump_typed(value, self._get_or_create_parameter_adapter(name))), name)
        except (DataError, ValueError, TypeError) as error:
            raise make_tool_input_error(self._name, [f"{name}: has no JSON form: {error}"], call_input) from error

    def _get_or_create_parameter_adapter(self, name: str) -> TypeAdapter[Any]:
        """Return the pydantic adapter of one parameter, created at its first use."""
        encoder = self._encoders.get(name)
        if encoder is None:
            from pydantic import TypeAdapter

            annotation = next(p.annotation for p in self._signature.parameters if p.name == name)
            # Created only if it is needed: most parameters are plain JSON.
            encoder = self._encoders[name] = TypeAdapter(
                _without_field_info(annotation) if name in self._aliases else annotation
            )
        return encoder
