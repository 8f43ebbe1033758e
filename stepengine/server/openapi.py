"""The OpenAPI document of the server, made from the same table of operations as its routes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from stepengine.server.shared_responses import SharedResponse

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from stepengine.server.access import ScopeName

BY_GUARD = (400, 408, 413, 429)
BY_SCOPE = (401, 403, 421, 503)
BY_BODY = (415, 422)
REF = "#/components/schemas/{model}"
PROBLEM = {
    "type": "object",
    "description": "A problem document (RFC 9457).",
    "properties": {
        "type": {"type": "string", "description": "urn:stepengine:problem:KIND"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What happened, and what to do about it."},
        "issues": {"type": "array", "items": {"type": "string"}, "description": "One sentence for each field."},
    },
    "required": ["type", "title", "status", "detail"],
    "additionalProperties": True,
}


@frozen
class HttpParameter:
    """
    A parameter in the query, or a header.

    Attributes:
        name: Its name.
        about: A description in one sentence.
        type: Its type in Python, from which its schema is made.
        location: ``"query"`` or ``"header"``.
    """

    name: str
    about: str
    type: Any = str
    location: str = "query"


@frozen(kw_only=True)
class Operation:
    """
    An operation that a client may request.

    Attributes:
        method: The HTTP method.
        path: The path, with ``{run}`` and the like.
        name: Its name in clients that are generated.
        about: Its description; the first line is its title.
        scope: The scope that the caller needs; ``None`` if the operation needs no caller.
        handler: The function that handles a request.
        body: The model of the request body; ``None`` without a body.
        parameters: Its parameters in the query and in headers.
        gives: The content of responses by status: a model, a media type, or ``None`` for an empty body.
        refuses: Statuses of problem documents, in addition to those of the guard, the scope and the body.
    """

    method: str
    path: str
    name: str
    about: str
    scope: ScopeName | None
    handler: Callable[[Request], Awaitable[Response]]
    body: type[BaseModel] | None = None
    parameters: tuple[HttpParameter, ...] = ()
    gives: Mapping[int, type[BaseModel] | str | None] = attrs.field(factory=dict)
    refuses: tuple[int, ...] = ()


class OpenApiDocument:
    """
    The OpenAPI document of an application. It is made at the first request; only its address differs between mounts.

    Args:
        operations: The operations.
        version: The version of the server.
    """

    def __init__(self, operations: Iterable[Operation], *, version: str) -> None:
        self._operations = tuple(operations)
        self._version = version

    def make_response(self, base_path: str) -> SharedResponse:
        """Return the document as a response for an application below the path *base_path*, ``""`` for the root of its host."""
        # The path may hold parameters of the client's address, so documents are not stored by it.
        servers = json.dumps([{"url": base_path or "/"}]).encode()
        return SharedResponse.create(self._json_without_servers + b', "servers": ' + servers + b"}", "application/json")

    @cached_property
    def _json_without_servers(self) -> bytes:
        """The members that are the same below every path, as JSON without the closing brace."""
        return json.dumps(make_document(self._operations, version=self._version), ensure_ascii=False).encode()[:-1]


def make_document(operations: Iterable[Operation], *, version: str) -> dict[str, Any]:
    """
    Return the OpenAPI 3.1 document of *operations*, without the member ``servers``.

    Args:
        operations: The operations.
        version: The version of the server.
    """
    found = tuple(operations)
    models = {one.body for one in found if one.body is not None}
    models |= {m for one in found for m in one.gives.values() if isinstance(m, type)}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for one in found:
        paths.setdefault(one.path, {})[one.method.lower()] = _describe_operation(one)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "stepengine",
            "version": version,
            "description": "Start, watch, answer and debug runs of agents.",
        },
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Problem": PROBLEM},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
            },
        },
        "security": [{"token": []}],
    }


def _describe_operation(operation: Operation) -> dict[str, Any]:
    """Return an operation as a member of an OpenAPI path."""
    title, _, more = operation.about.partition("\n")
    problem = {"application/problem+json": {"schema": {"$ref": REF.format(model="Problem")}}}
    said: dict[str, Any] = {
        "operationId": operation.name,
        "summary": title,
        "parameters": [
            *_describe_path_parameters(operation.path),
            *[_describe_parameter(each) for each in operation.parameters],
        ],
        "responses": {str(status): _describe_response(status, what) for status, what in operation.gives.items()},
    }
    if more.strip():
        said["description"] = " ".join(more.split())
    refused = {
        *operation.refuses,
        *BY_GUARD,
        *(() if operation.scope is None else BY_SCOPE),
        *(BY_BODY if operation.body else ()),
    }
    told = {str(status): {"description": HTTPStatus(status).phrase, "content": problem} for status in sorted(refused)}
    said["responses"] = {**told, **said["responses"]}
    if operation.body is not None:
        schema = {"$ref": REF.format(model=operation.body.__name__)}
        said["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.scope is None:
        said["security"] = []
    else:
        said["x-scope"] = operation.scope
    return said


def _describe_path_parameters(path: str) -> list[dict[str, Any]]:
    """Return the OpenAPI parameters for the names in braces of a path."""
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _describe_parameter(parameter: HttpParameter) -> dict[str, Any]:
    """Return a query or header parameter as OpenAPI."""
    schema = TypeAdapter(parameter.type).json_schema()
    return {
        "name": parameter.name,
        "in": parameter.location,
        "required": False,
        "description": parameter.about,
        "schema": schema,
    }


def _describe_response(status: int, content: type[BaseModel] | str | None) -> dict[str, Any]:
    """Return a response as OpenAPI; *content* is a model or a media type, ``None`` for no body."""
    said: dict[str, Any] = {"description": "Accepted." if status == 202 else "Done."}  # noqa: PLR2004 - it is the status of HTTP
    if isinstance(content, str):
        said["content"] = {content: {"schema": {"type": "object" if content == "application/json" else "string"}}}
    elif content is not None:
        said["content"] = {"application/json": {"schema": {"$ref": REF.format(model=content.__name__)}}}
    return said
