"""
What agents say about their params and outputs, compiled: pydantic models and JSON Schemas become functions.

``data`` and ``machine`` only hold such schemas; here is where they are understood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from stepengine.data.definition import AgentDefinition
from stepengine.data.json import JsonDict, JsonValue, freeze, freeze_object
from stepengine.data.schemas import find_keyword_problem
from stepengine.data.typed_values import is_model, list_validation_problems, model_from_json, model_to_json
from stepengine.errors import DataError, DefinitionError, InputError, OutputMissing
from stepengine.machine.plan import OutputSchema
from stepengine.tools.agent_tools import get_params_schema
from stepengine.tools.arguments import remove_titles
from stepengine.tools.iterables import raise_for_one_shot_fields
from stepengine.tools.repair import make_repairer
from stepengine.tools.schemas import JsonSchema


class Params(NamedTuple):
    """
    Validated params.

    Attributes:
        value: As the handler sees them: the pydantic model, else an immutable mapping.
        json: As JSON; ``None`` when there are none.
    """

    value: Any
    json: JsonValue


class CompiledSchemas(NamedTuple):
    """
    The schemas of one agent as functions.

    Attributes:
        params: Turns given params into ``Params`` or raises ``InputError`` that lists every offending field.
        repair_params: Returns params with corrected names and values, as for a tool's input.
        output: The output schema; ``None`` without one.
    """

    params: Callable[[Any], Params]
    repair_params: Callable[[Any], Any]
    output: OutputSchema | None = None


def compile_schemas(agent: AgentDefinition) -> CompiledSchemas:
    """
    Return the validators of an agent's params and output, made from its schemas.

    Raises:
        DefinitionError: when one of them is neither a pydantic model nor a JSON Schema.
    """
    given = agent.input_schema.params if agent.input_schema is not None else None
    params = _make_params_validator(agent.id, given)
    schema: object = agent.output_schema
    repair_params = _make_params_repairer(agent)
    if schema is None:
        return CompiledSchemas(params, repair_params)
    where = f"agent {agent.id!r}: output_schema"
    if isinstance(schema, Mapping):
        validate = _make_json_output_validator(agent.id, schema, where)
        return CompiledSchemas(params, repair_params, OutputSchema(JsonDict(schema), validate))
    model = _require_model_class(schema, where)
    output = OutputSchema(
        JsonDict(freeze(remove_titles(model.model_json_schema()))),
        _make_model_output_validator(agent.id, model),
        partial(model_from_json, model),
    )
    return CompiledSchemas(params, repair_params, output)


def _make_params_repairer(agent: AgentDefinition) -> Callable[[Any], Any]:
    """Return the function that corrects an agent's params; its schema is made when it is first called."""

    @cache
    def find_repairer() -> Callable[[JsonDict], JsonDict] | None:
        try:
            schema = get_params_schema(agent)
        except DefinitionError:
            return None
        return None if schema is None else make_repairer(schema, {})

    def repair_params(given: object) -> Any:
        if not isinstance(given, Mapping):
            return given
        repair = find_repairer()
        try:
            return given if repair is None else repair(freeze_object(given))
        except DataError:
            return given

    return repair_params


def _require_model_class(schema: object, where: str) -> Any:
    """Return a pydantic model class; raise ``DefinitionError`` for anything else, or for fields that can be read only once."""
    if isinstance(schema, type) and hasattr(schema, "model_validate"):
        raise_for_one_shot_fields(schema, where)
        return schema
    msg = f"{where} must be a pydantic model class or a JSON Schema (a dict), not {schema!r}"
    raise DefinitionError(msg)


def _make_issue_finder(schema: Mapping[str, object], where: str) -> Callable[[Any], list[str]]:
    """Return a function that lists where a value does not fit a JSON Schema; raise ``DefinitionError`` for an invalid schema."""
    try:
        issues = JsonSchema(where, schema).issues
    except DefinitionError as error:
        msg = f"{where} cannot be checked: {error.message}"
        raise DefinitionError(msg) from error
    if problem := find_keyword_problem(schema):
        msg = f"{where} at {problem}"
        raise DefinitionError(msg)
    return issues


def _make_params_validator(agent_id: str, schema: object) -> Callable[[Any], Params]:
    """Return a function that validates params, and raises ``InputError`` with every problem."""
    where = f"agent {agent_id!r}: input_schema"
    if schema is None or isinstance(schema, Mapping):
        issues = None if schema is None else _make_issue_finder(schema, where)
        return lambda given: _validate_json_params(agent_id, issues, given)
    model = _require_model_class(schema, where)
    return lambda given: _validate_model_params(agent_id, model, given)


def _params_to_json(agent_id: str, params: object) -> JsonDict:
    """Return params as immutable JSON, ``{}`` for ``None``; raise ``InputError`` if they are not a JSON object."""
    if params is None:
        return JsonDict()
    try:
        value = model_to_json(params) if is_model(params) else params
        if not isinstance(value, Mapping):
            raise _make_params_error(agent_id, [f"params should be an object, not a {type(params).__name__}"])
        frozen: JsonDict = freeze(value, "params")
    except DataError as error:
        raise _make_params_error(agent_id, [error.message]) from error
    return frozen


def _validate_json_params(agent_id: str, find_issues: Callable[[Any], list[str]] | None, params: object) -> Params:
    """Return params that fit a JSON Schema, or any JSON object where there is none."""
    value = _params_to_json(agent_id, params)
    if find_issues is not None and (found := find_issues(value)):
        raise _make_params_error(agent_id, found)
    return Params(value, None if params is None else value)


def _validate_model_params(agent_id: str, model: Any, params: Any) -> Params:
    """Return params as an instance of *model* and as JSON; raise ``InputError`` with every problem."""
    is_fresh = not isinstance(params, model)
    value = _parse_or_list_problems(model, _params_to_json(agent_id, params)) if is_fresh else params
    if isinstance(value, list):
        raise _make_params_error(agent_id, value)
    try:
        return Params(value, None if params is None else model_to_json(value, kind=model, is_fresh=is_fresh))
    except DataError as error:
        raise _make_params_error(agent_id, [error.message]) from error


def _parse_or_list_problems(model: Any, value: JsonValue) -> Any:
    """Return *value* as an instance of the model, or a list of its problems; a problem does not raise."""
    from pydantic import ValidationError

    try:
        return model_from_json(model, value)
    except ValidationError as error:
        return list_validation_problems(error)


def _make_params_error(agent_id: str, issues: list[str]) -> InputError:
    listed = "; ".join(issues)
    msg = f"the params of agent {agent_id!r} do not fit its input_schema: {listed}"
    return InputError(msg, issues=issues)


def _make_output_error(agent_id: str, issues: list[str]) -> OutputMissing:
    listed = "; ".join(issues)
    msg = f"the output of agent {agent_id!r} does not fit its output_schema: {listed}"
    return OutputMissing(msg, issues=issues)


def _make_json_output_validator(agent_id: str, schema: Mapping[str, object], where: str) -> Callable[[Any], JsonValue]:
    """Return a function that returns a valid output as JSON, and raises ``OutputMissing`` with every problem."""
    issues = _make_issue_finder(schema, where)

    def validate(value: object) -> JsonValue:
        frozen = _freeze_output(agent_id, value)
        found = issues(frozen)
        if found:
            raise _make_output_error(agent_id, found)
        return frozen

    return validate


def _make_model_output_validator(agent_id: str, model: Any) -> Callable[[Any], JsonValue]:
    """Return a function that returns a valid output of a pydantic model as JSON, and raises ``OutputMissing`` otherwise."""

    def validate(value: Any) -> JsonValue:
        is_fresh = not isinstance(value, model)
        made = _parse_or_list_problems(model, _freeze_output(agent_id, value)) if is_fresh else value
        if isinstance(made, list):
            raise _make_output_error(agent_id, made)
        try:
            return model_to_json(made, kind=model, is_fresh=is_fresh)
        except DataError as error:
            raise _make_output_error(agent_id, [error.message]) from error

    return validate


def _freeze_output(agent_id: str, value: object) -> JsonValue:
    """Return an output as immutable JSON; raise ``OutputMissing`` if it is not JSON."""
    try:
        frozen: JsonValue = model_to_json(value) if is_model(value) else freeze(value, "output")
    except DataError as error:
        raise _make_output_error(agent_id, [error.message]) from error
    return frozen
