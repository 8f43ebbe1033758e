"""The input of a tool that comes with a JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.tools import Validated
from stepengine.errors import DataError, DefinitionError
from stepengine.tools.refusals import refusal
from stepengine.tools.schema_values import issues_of
from stepengine.tools.schemas import Compiler

__all__ = ("SchemaInputs", "check_providers")

PROPERTY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNFIT_AT_TOP = ("anyOf", "oneOf", "allOf", "not", "enum", "$ref")


class SchemaInputs:
    """
    Validates inputs against a JSON Schema. The validated value is the input itself; defaults are not filled in.

    Args:
        tool_name: For messages.
        schema: A JSON Schema of an object.

    Raises:
        DefinitionError: when the schema cannot be checked, or no provider would accept it.
    """

    def __init__(self, tool_name: str, schema: Mapping[str, Any]) -> None:
        try:
            self.schema = freeze_object({"type": "object", "properties": {}, **schema}, "input_schema")
        except (DataError, TypeError) as error:
            msg = f"input_schema of tool {tool_name!r} is not JSON: {error}"
            raise DefinitionError(msg) from error
        self._name = tool_name
        check_providers(tool_name, self.schema)
        self._check = Compiler(tool_name, self.schema).compiled("#")

    def validate(self, value: JsonDict) -> Validated:
        """
        Return the input as it is, when it fits.

        Raises:
            ToolInputError: listing every field with its problem.
        """
        issues = issues_of(self._check, value)
        if issues:
            raise refusal(self._name, [i.removeprefix(": ") for i in issues], value)
        return Validated(value, value)


def check_providers(tool_name: str, schema: Mapping[str, Any]) -> None:
    """
    Refuse a schema that every provider would answer with an error at the first step (reliability TL20).

    Raises:
        DefinitionError: when the top is not a plain object, or a parameter's name has other characters than they take.
    """
    problem = ""
    if schema.get("type") != "object":
        problem = f"its type is {schema.get('type')!r}; the input of a tool is an object"
    elif unfit := [word for word in UNFIT_AT_TOP if word in schema]:
        problem = f"providers refuse {unfit[0]!r} at the top; put it below a property"
    elif strange := [n for n in schema.get("properties", {}) if not PROPERTY_NAME.fullmatch(n)]:
        problem = f"providers refuse the parameter name {strange[0]!r}; use up to 64 letters, digits, '_', '.' and '-'"
    if problem:
        msg = f"input_schema of tool {tool_name!r} does not fit: {problem}"
        raise DefinitionError(msg)
