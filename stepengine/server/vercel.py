"""The routes for pages that use Vercel's AI SDK: start a turn of a chat, and reconnect to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from stepengine.adapters.vercel import HEADERS, VERSIONS, parse_prompt, read_approvals, sse, vercel
from stepengine.data.codec import plain
from stepengine.errors import AnswerRejected
from stepengine.redaction import KNOWN
from stepengine.server.access import require_caller
from stepengine.server.bodies import make_input_error, read_json_body, validate_as
from stepengine.server.openapi import HttpParameter, Operation
from stepengine.server.pages import CallerConversation, add_ping_comments, require_agent_id

if TYPE_CHECKING:
    from starlette.requests import Request

    from stepengine.data.events import Event

__all__ = ("OPERATIONS",)

VERSION = "ai-sdk-version"


class ChatTurn(BaseModel):
    """What the package `ai` sends by its DefaultChatTransport; a member that is not named here is not read."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    id: Annotated[str, Field(description="The chat.", min_length=1, max_length=200)]
    messages: Annotated[list[dict[str, Any]], Field(description="Only the last message is used.")]
    trigger: str = "submit-message"
    messageId: str | None = None  # noqa: N815 - the package's own name


async def start_chat_turn(request: Request) -> Response:
    """Start the next turn of a conversation from a request of Vercel's ``useChat``, and stream its events."""
    body = validate_as(ChatTurn, plain(await read_json_body(request)))
    agent, version = require_agent_id(request), _parse_protocol_version(request)
    answers = read_approvals(body.messages)
    prompt = "" if answers else parse_prompt(body.messages, trigger=body.trigger, message_id=body.messageId)
    chat = await CallerConversation.load(request, body.id)
    chat.require_not_running()
    asks = chat.state is not None and bool(chat.state.pending)
    if answers or asks:
        require_caller(request).must("answer")
    if answers:
        _require_answers_for_last_run(chat, body.messages[-1])
    taken = await chat.start_next_turn(agent, prompt, answers)
    message = taken.run
    if answers:  # what comes of them goes into the message that asks
        message = str(body.messages[-1].get("id") or taken.run)[:1_000]
    elif taken.after is not None:
        message = f"{taken.run}-{taken.after.rpartition('-')[2]}"
        await chat.turns.store_shown_message(taken.run, message, taken.after)
    return _make_event_stream_response(chat, taken.events, message, version)


def _require_answers_for_last_run(chat: CallerConversation, message: dict[str, Any]) -> None:
    """Raise ``AnswerRejected`` if an approval in *message* is for another run than the last one."""
    given = [p["approval"]["id"] for p in message["parts"] if p.get("state") == "approval-responded"]
    runs = {run for run, colon, _ in [id_.partition(":") for id_ in given] if colon}
    if runs - {"" if chat.last is None else chat.last.run}:
        msg = "the answers are not for the last run of this conversation, so none was accepted; reload the conversation"
        raise AnswerRejected(msg)


async def reconnect_to_chat(request: Request) -> Response:
    """Stream the last run of a chat to its page again; 204 if there is none."""
    agent, version = require_agent_id(request), _parse_protocol_version(request)
    chat = await CallerConversation.load(request, request.path_params["chat"])
    if chat.last is None or chat.last.agent != agent:
        return Response(status_code=204)
    if request.method == "HEAD":
        return Response(headers=dict(HEADERS))
    message, after = await chat.turns.find_shown_message(chat.last.run) or (chat.last.run, None)
    return _make_event_stream_response(chat, chat.stream_events(chat.last, after), message, version)


def _parse_protocol_version(request: Request) -> int:
    """Return the protocol version in the request's header, by default the newest; raise ``InputError`` for an unknown one."""
    given = request.headers.get(VERSION, str(VERSIONS[-1]))
    if given not in map(str, VERSIONS):
        msg = f"{VERSION}: {given[:20]!r} is not supported; supported versions: {', '.join(map(str, VERSIONS))}"
        raise make_input_error(msg)
    return int(given)


def _make_event_stream_response(
    chat: CallerConversation, events: AsyncGenerator[Event, None], message: str, version: int
) -> Response:
    """Return a response that streams events in Vercel's protocol with secrets redacted."""
    chunks = vercel(events, message_id=message, version=version)
    return StreamingResponse(
        add_ping_comments(sse(_redact_chunks(chunks)), chat.runs.state.stopping), headers=dict(HEADERS)
    )


async def _redact_chunks(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield chunks with known secrets redacted."""
    try:
        async for chunk in chunks:
            yield KNOWN.redact_keeping_machine_details(chunk)
    finally:
        await chunks.aclose()


OF_PAGE = (
    HttpParameter(
        VERSION,
        "The major version of the page's package `ai`: 5, 6 or 7, which is the default.",
        int,
        location="header",
    ),
)
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST", path="/vercel/{agent}", name="take_chat_turn", scope="run", handler=start_chat_turn, body=ChatTurn,
        parameters=OF_PAGE, gives={200: "text/event-stream"}, refuses=(404, 409, 415, 429, 503),
        about=(
            "Start a turn of a chat, for pages that use Vercel's AI SDK.\n"
            "The page sends a user message or answers to approvals; answers need the scope answer. The server stores the chat."
        ),
    ),
    Operation(
        method="GET", path="/vercel/{agent}/{chat}/stream", name="come_back_to_chat", scope="read", handler=reconnect_to_chat,
        parameters=OF_PAGE, gives={200: "text/event-stream", 204: None}, refuses=(404, 409, 422),
        about="Reconnect to a chat: its last message, from the beginning.\n204 means that there is none.",
    ),
)  # fmt: skip
