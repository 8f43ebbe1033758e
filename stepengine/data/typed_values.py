"""
Typed values as JSON: the stored form of models, and the check that reading it returns an equal value.

The form uses aliases and has no computed fields, like schemas of validation. Some models differ after they are read, for example if
a validator changes them again. Those are stored as the JSON from which they were validated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, cast

import attrs

from stepengine.data.json import ABSENT, JsonValue, canonical, compact, freeze
from stepengine.errors import DataError

REMEDY = (
    "give it one alias for reading and writing, no exclude=True, a serializer whose text its type accepts, and validators "
    "that leave a valid value as it is"
)
REMEDY_FOR_SECRETS = "a secret is not stored; read it where it is used, such as from the environment or with Depends"
SCALARS = (str, int, float)

_SOURCES: dict[int, tuple[weakref.ref[Any], JsonValue]] = {}
"""By the id of a model, the JSON from which it was validated. It is checked before use, since the model may have changed."""


def is_model(value: object) -> bool:
    """Return True for an instance of a pydantic model."""
    return hasattr(type(value), "model_dump") and not isinstance(value, type)


def dump_model(model: Any) -> Any:
    """Return a pydantic model in its stored form, without a check that reading it returns an equal one."""
    return sort_dumped_sets(model, _dump_to_json(model, by_alias=True))


def model_from_json(kind: Any, value: JsonValue) -> Any:
    """
    Validate *value* as the pydantic class *kind* and return the model; *value* is remembered as its JSON.

    Raises:
        pydantic.ValidationError: when it does not fit.
    """
    # As JSON text: a strict model takes a date or a tuple from JSON text and not from a Python string or list.
    made = kind.model_validate_json(compact(value))
    _remember_source(made, value)
    return made


def _remember_source(model: object, value: JsonValue) -> None:
    """Store the JSON from which *model* was validated as long as the model exists."""
    key = id(model)

    # A default holds the dict: at the end of the process the names of modules may be gone.
    def forget_source(_: object, sources: dict[int, Any] = _SOURCES) -> None:
        sources.pop(key, None)

    try:
        _SOURCES[key] = weakref.ref(model, forget_source), value
    except TypeError:  # a class without weak references
        return


def model_to_json(model: Any, *, kind: Any = None, is_fresh: bool = False) -> JsonValue:
    """
    Return JSON from which an equal pydantic model can be read; raise ``DataError`` if there is none.

    Args:
        model: The model.
        kind: The class that will read it; its own by default.
        is_fresh: Whether it was just validated from its JSON. Validators see it a second time only if its form differs.

    Raises:
        DataError: if no JSON returns an equal model, with the field and the remedy.
    """
    kind = type(model) if kind is None else kind
    known = _SOURCES.get(id(model))
    source = known[1] if known is not None and known[0]() is model else None
    if is_fresh and source is not None and _dumps_to(model, source):
        return source
    return to_round_trip_json(
        model,
        dumps=[partial(_dump_to_json, by_alias=True), partial(_dump_to_json, by_alias=False)],
        load=lambda value: kind.model_validate_json(compact(value)),
        source=source,
        name=type(model).__name__,
    )


def _dumps_to(model: Any, source: JsonValue) -> bool:
    """Return whether the stored form of a model equals *source*; ``False`` if the model cannot be dumped."""
    try:
        return bool(freeze(dump_model(model)) == source)
    except Exception:  # noqa: BLE001 - serializers of the author's may raise anything
        return False


def _dump_to_json(model: Any, *, by_alias: bool) -> Any:
    return model.model_dump(mode="json", by_alias=by_alias, round_trip=True, warnings=False)


def to_round_trip_json(
    value: Any,
    *,
    dumps: Sequence[Callable[[Any], Any]],
    load: Callable[[JsonValue], Any],
    name: str,
    source: JsonValue | None = None,
) -> JsonValue:
    """
    Return the first form of *value* in *dumps*, else *source*, that *load* restores to an equal value; raise if none does.

    Args:
        value: The value.
        dumps: Functions that return the JSON of a value; the first result that returns an equal value is used.
        load: Returns the value in a JSON.
        name: The type or the parameter, for messages.
        source: The JSON from which *value* was validated, if it is known. It is returned if no dump fits, unless *value* has a secret.

    Raises:
        DataError: if there is no such JSON, with the field and the remedy.
    """
    problem: DataError | None = None
    for dump in dumps:
        try:
            stored = freeze(sort_dumped_sets(value, dump(value)), name)
            back = load(stored)
            changed = list(find_changed_parts(value, back, name))
            if not changed:
                # Of the value that was read: a default that is no instance of its type is dumped in another way.
                return cast("JsonValue", freeze(sort_dumped_sets(back, dump(back)), name))
        except DataError as error:
            problem = problem or error
        except Exception as error:  # noqa: BLE001 - serializers and validators of the author's may raise anything
            problem = problem or _make_round_trip_error(_describe_load_failure(error, name))
        else:
            problem = problem or _make_round_trip_error(f"{changed[0][0]} does not come back equal from its JSON")
    assert problem is not None  # noqa: S101 - every form failed
    _refuse_secrets(value, name, problem)
    if source is not None and _survives_round_trip(value, source, load, name):
        return source
    raise problem


def _refuse_secrets(value: object, name: str, problem: DataError) -> None:
    """Raise for a value with a secret; the JSON from which it was validated is not stored either."""
    try:
        secret = find_secret_path(value, name)
    except RecursionError:
        raise problem from None
    if secret is not None:
        msg = f"{secret} does not come back equal from its JSON; {REMEDY_FOR_SECRETS}"
        raise DataError(msg)


def _survives_round_trip(value: object, source: JsonValue, load: Callable[[JsonValue], Any], name: str) -> bool:
    """Return whether *load* makes an equal value of *source*; False if it raises."""
    try:
        return not any(find_changed_parts(value, load(source), name))
    except Exception:  # noqa: BLE001 - validators of the author's may raise anything
        return False


def list_validation_problems(error: Any, whole_name: str = "(the whole)") -> list[str]:
    """Return the field and message of each problem in a pydantic ``ValidationError``; *whole_name* is the field for the whole value."""
    return [f"{'.'.join(map(str, e['loc'])) or whole_name}: {e['msg']}" for e in error.errors(include_url=False)]


def _make_round_trip_error(problem: str) -> DataError:
    return DataError(f"{problem}; {REMEDY}")


def _describe_load_failure(error: Exception, name: str) -> str:
    """Return the first problem of a validation error with its field, or else the error itself."""
    if type(error).__name__ != "ValidationError":
        return f"the JSON of {name} is not read back: {type(error).__name__}: {error}"
    found: Any = error
    issue = found.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"the JSON of {'.'.join([name, *map(str, issue['loc'])])} is not read back: {issue['msg']}"


def find_changed_parts(before: Any, after: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yield the path and the former value of each part in which *after* differs from *before*, types included."""
    parts, others = _get_compared_parts(before), _get_compared_parts(after)
    same_kind = _get_comparison_type(before) is _get_comparison_type(after)
    if not same_kind:
        is_same = _are_equal_despite_types(before, after)
    elif parts is None or others is None:
        is_same = bool(before == after)
    else:
        is_same = parts.keys() == others.keys()
    if not is_same:
        yield path, before
    elif same_kind and parts is not None and others is not None:
        for name, value in parts.items():
            yield from find_changed_parts(value, others[name], f"{path}.{name}")


def _get_comparison_type(value: object) -> type[object]:
    """Return the type of a value; frozen JSON and other kinds of dicts and lists are those."""
    return dict if isinstance(value, dict) else list if isinstance(value, list) else type(value)


def _get_compared_parts(value: Any) -> Mapping[Any, object] | None:
    """Return the parts of a value for a comparison; ``None`` if it is compared as a whole."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return get_compared_fields(value)


def find_secret_path(value: Any, path: str) -> str | None:
    """Return the path of a pydantic secret in *value*, whose JSON is a row of asterisks; ``None`` without one."""
    if hasattr(value, "get_secret_value"):
        return path
    parts = dict(enumerate(value)) if isinstance(value, set | frozenset) else _get_compared_parts(value)
    found = (find_secret_path(one, f"{path}.{name}") for name, one in (parts or {}).items())
    return next(filter(None, found), None)


def _are_equal_despite_types(before: object, after: object) -> bool:
    """Return True for equal numbers or texts of two classes, such as the default ``0`` of a float; not for enums and bools."""
    both = (before, after)
    if any(isinstance(one, bool | Enum) for one in both) or not all(isinstance(one, SCALARS) for one in both):
        return is_model(before) and bool(before == after)  # `Box(x=1)` and `Box[Any](x=1)`
    return before == after


def get_compared_fields(value: Any) -> Mapping[str, object] | None:
    """Return the fields of an object; ``None`` for a value that is compared as a whole."""
    kind = type(value)
    if hasattr(kind, "model_fields"):
        private = getattr(value, "__pydantic_private__", None)
        fields = {name: getattr(value, name, ABSENT) for name in kind.model_fields}
        return {**fields, **(value.model_extra or {}), **(private or {})}
    if hasattr(kind, "__dataclass_fields__"):
        import dataclasses  # noqa: PLC0415 - loading it is felt in `import stepengine`

        return {field.name: getattr(value, field.name, ABSENT) for field in dataclasses.fields(value)}
    if attrs.has(kind):
        return {field.name: getattr(value, field.name, ABSENT) for field in attrs.fields(kind)}
    compared: Any = kind.__eq__
    is_opaque = compared is object.__eq__ and not isinstance(value, Enum | type) and hasattr(value, "__dict__")
    return vars(value) if is_opaque else None


# The order of a set of texts differs between processes, and a resumed run is compared with stored values.
def sort_dumped_sets(value: Any, dumped: Any) -> Any:
    """Return *dumped*, the JSON of *value*, with the items of each set sorted."""
    if hasattr(value, "root") and hasattr(type(value), "model_fields"):
        return sort_dumped_sets(value.root, dumped)
    if isinstance(value, set | frozenset) and isinstance(dumped, list):
        of_sets = all(isinstance(one, frozenset) for one in value)
        return sorted([sorted(one, key=canonical) if of_sets else one for one in dumped], key=canonical)
    if isinstance(value, list | tuple) and isinstance(dumped, list) and len(value) == len(dumped):
        return [sort_dumped_sets(one, other) for one, other in zip(value, dumped, strict=True)]
    if not isinstance(dumped, dict):
        return dumped
    members = value if isinstance(value, Mapping) else get_compared_fields(value) or {}
    if len(members) == len(dumped):  # by their places, since names may be aliases
        return {key: sort_dumped_sets(one, dumped[key]) for one, key in zip(members.values(), dumped, strict=True)}
    return {key: sort_dumped_sets(members.get(key), one) for key, one in dumped.items()}
