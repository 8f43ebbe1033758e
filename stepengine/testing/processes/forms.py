"""Requests and replies as JSON, between a process of the program and the broker."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from stepengine.data.json import thaw
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse


def request_to_json(request: RecordedRequest) -> dict[str, Any]:
    """Return *request* as JSON."""
    return {
        "method": request.method, "url": request.url, "headers": request.headers, "body": b64encode(request.body).decode(),
    }  # fmt: skip


def request_from_json(tree: dict[str, Any]) -> RecordedRequest:
    """Return the request of ``request_to_json``."""
    return RecordedRequest(tree["method"], tree["url"], tree["headers"], b64decode(tree["body"]))


def response_to_json(response: RecordedResponse) -> dict[str, Any]:
    """Return *response* as JSON."""
    return {
        "status": response.status, "reason": response.reason, "headers": response.headers,
        "body": b64encode(response.body).decode(),
    }  # fmt: skip


def response_from_json(tree: dict[str, Any]) -> RecordedResponse:
    """Return the response of ``response_to_json``."""
    return RecordedResponse(tree["status"], tree["reason"], tree["headers"], b64decode(tree["body"]))


def interaction_to_json(interaction: Interaction) -> dict[str, Any]:
    """Return *interaction* as JSON."""
    return {
        "request": request_to_json(interaction.request),
        "response": response_to_json(interaction.response),
        "extras": thaw(interaction.extras),
    }


def interaction_from_json(tree: dict[str, Any]) -> Interaction:
    """Return the interaction of ``interaction_to_json``."""
    return Interaction(request_from_json(tree["request"]), response_from_json(tree["response"]), tree["extras"])
