"""
``check_provider``: the promises of a model provider, against a server that its test plays.

The server answers with the text of the last message. If a tool is offered and has no result yet, it calls that tool.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    ModelRequest,
    ReplyDone,
    StopReason,
    TextChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.engine.engine import Engine
from stepengine.errors import ModelError
from stepengine.models.base import Provider
from stepengine.testing.conformance.promises import Promises, UncheckedPromise, require, require_equal
from stepengine.tools.definition import Tool

T = TypeVar("T")
Situation: TypeAlias = Literal["normal", "refused", "cut", "unreachable", "silent"]
MakeProvider: TypeAlias = Callable[[Situation], Provider | None]
CANCEL_SECONDS = 10.0
"""Closing a connection takes milliseconds; a busy machine gets some more."""
BLOCKED_SECONDS = 2.0
"""A loop that does not run for so long is blocked by the request that ended meanwhile, and not by a busy machine."""
NOT_CANCELLED = f"{CANCEL_SECONDS:g} seconds after its cancellation, the request still waits"
BLOCKED = "the provider blocks the event loop: await an asynchronous client, or call a blocking one with `await asyncio.to_thread(...)`"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = ToolSpec("weather", "Look up the weather of a city.", SCHEMA)

PROVIDER: Promises[tuple[MakeProvider, str]] = Promises("check_provider(make, model")


def check_provider(make: MakeProvider, model: str, *, only: str = "", skip: Collection[str] = ()) -> None:
    """
    Check that a model provider meets the promises of its interface.

    Args:
        make: Returns a provider for a situation of its server. ``"normal"``: it answers with the text of the last message, and calls a
            tool that is offered and has no result yet. ``"refused"``: it refuses one request for now, as for a rate limit. ``"cut"``:
            a stream ends before its end. ``"unreachable"``: no server listens. ``"silent"``: it never answers. ``None`` if the
            server cannot play it; the promise is then named in *skip*.
        model: The name of a model, without the provider's.
        only: The name of one promise; by default all are checked.
        skip: Names of promises that are not checked, as for situations that the server cannot play.

    Raises:
        AssertionError: when a promise is broken, or cannot be checked because *make* returns ``None`` for its situation.
    """
    PROVIDER.check((make, model), only, skip)


# --- promises -------------------------------------------------------------------------------------------------------


@PROVIDER.add("name", "`name` contains letters and no slash; `strip_prefix` removes it from a model string.")
def _check_name_and_prefix(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail for a name that cannot be a prefix, or that ``strip_prefix`` does not remove from a model string."""
    provider = _make_provider(make_and_model, "normal")
    require(provider.name and "/" not in provider.name, f"`name` is {provider.name!r}")
    require_equal(
        "some/model", provider.strip_prefix(f"{provider.name}/some/model"), "`strip_prefix` of a model string"
    )


@PROVIDER.add("complete", "`complete` sends the messages and returns one whole reply.")
def _check_complete(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail unless ``complete`` sends the messages and returns one whole reply."""

    async def request_reply(provider: Provider) -> ModelReply:
        return await provider.complete(_make_request(provider, make_and_model[1], "a heron"))

    reply = _run_with_provider(make_and_model, "normal", request_reply)
    _require_answer(reply, "a heron")


@PROVIDER.add(
    "stream", "`stream` yields the reply in pieces, then exactly one ReplyDone with the result of `complete`."
)
def _check_stream(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail unless ``stream`` yields the reply in pieces, then one ``ReplyDone`` with the result of ``complete``."""

    async def stream_and_complete(provider: Provider) -> tuple[list[ModelDelta], ModelReply]:
        request = _make_request(provider, make_and_model[1], "a heron")
        return await _collect_stream(provider, request), await provider.complete(request)

    deltas, whole = _run_with_provider(make_and_model, "normal", stream_and_complete)
    reply = _require_one_final_reply(deltas)
    _require_answer(reply, "a heron")
    require_equal(whole.text, reply.text, "text of ReplyDone, compared with `complete`")
    require_equal(reply.text, "".join(d.text for d in deltas if isinstance(d, TextChunk)), "texts of the pieces")


@PROVIDER.add(
    "tools",
    "A call has the name of the tool and its input; the result is sent with the next request.",
)
def _check_tool_calls(make_and_model: tuple[MakeProvider, str]) -> None:
    async def call_tool_and_send_result(provider: Provider) -> tuple[ModelReply, list[ModelDelta], ModelReply]:
        first = _make_request(provider, make_and_model[1], "How is it?", WEATHER)
        reply = await provider.complete(first)
        deltas = await _collect_stream(provider, first)
        # As in a run, where the engine numbers the calls.
        calls = [attrs.evolve(call, tool_call_id=f"call-{n}") for n, call in enumerate(reply.tool_calls)]
        results = [ToolMessage(call.tool_call_id, call.tool_name, "rain") for call in calls]
        history = Transcript([*first.messages, AssistantMessage(calls), *results])
        second = ModelRequest(first.model, messages=history, tools=(WEATHER,))
        return reply, deltas, await provider.complete(second)

    reply, deltas, answer = _run_with_provider(make_and_model, "normal", call_tool_and_send_result)
    for one in (reply, _require_one_final_reply(deltas)):
        require_equal(["weather"], [call.tool_name for call in one.tool_calls], "names of the calls")
        require_equal(StopReason.TOOL_USE, one.stop_reason, "stop reason of a reply with a call")
        require_equal([str], [type(call.input.get("city")) for call in one.tool_calls], "type of the argument `city`")
    _require_matching_call_pieces(deltas, _require_one_final_reply(deltas))
    require("rain" in answer.text, f"the result 'rain' was not sent: the server answered {answer.text!r}")


@PROVIDER.add("run", "An agent with a tool returns the model's last answer.")
def _check_agent_run(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail unless an agent with a tool returns the model's last answer."""
    cities: list[Any] = []
    provider = _make_provider(make_and_model, "normal")

    def look_up(input: dict[str, Any]) -> str:
        cities.append(input["city"])
        return "hail"

    tool: Tool[..., Any] = Tool("weather", "Look up the weather of a city.", SCHEMA, look_up)
    agent = AgentDefinition("forecaster", model=f"{provider.name}/{make_and_model[1]}", tools=[tool])
    with Engine([agent], models={provider.name: provider}, pricing=None) as engine:
        result = engine.run_sync(agent, "How is it?")
    require("hail" in str(result.unwrap()), f"the run ended with {result.output!r}")
    require_equal(1, len(cities), "calls of the tool")


@PROVIDER.add("concurrency", "Requests at the same time do not mix.")
def _check_concurrency(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail if requests at the same time get each other's replies."""
    names = [f"bird {number}" for number in range(8)]

    async def stream_reply(provider: Provider, request: ModelRequest) -> ModelReply:
        return _require_one_final_reply(await _collect_stream(provider, request))

    async def request_all_replies(provider: Provider) -> list[ModelReply]:
        requests = [_make_request(provider, make_and_model[1], name) for name in names]
        whole = [provider.complete(request) for request in requests[::2]]
        return await asyncio.gather(*whole, *[stream_reply(provider, request) for request in requests[1::2]])

    for name, reply in zip(
        [*names[::2], *names[1::2]], _run_with_provider(make_and_model, "normal", request_all_replies), strict=True
    ):
        _require_answer(reply, name)


@PROVIDER.add(
    "reuse",
    "A provider works again after `close`, in another event loop, and after a partly read stream.",
)
def _check_reuse_after_close(make_and_model: tuple[MakeProvider, str]) -> None:
    provider = _make_provider(make_and_model, "normal")

    async def abandon_stream_and_complete(name: str) -> ModelReply:
        request = _make_request(provider, make_and_model[1], name)
        try:
            async with aclosing(_open_stream(provider, request)) as deltas:
                async for _ in deltas:
                    break
            return await provider.complete(request)
        finally:
            await provider.close()

    for name in ("a heron", "a stork"):
        _require_answer(asyncio.run(abandon_stream_and_complete(name)), name)


@PROVIDER.add("refused", "A refusal raises a ModelError with retryable=True; the provider itself does not retry.")
def _check_refusal_is_retryable(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail unless a refusal raises a retryable ``ModelError`` after one request."""
    for ask in (_request_whole_reply, _collect_stream):
        error = _request_expecting_error(make_and_model, "refused", ask)
        require(error.retryable, f"retryable is False in {error!r}")


@PROVIDER.add("cut", "A stream that ends too early raises ModelError without a ReplyDone.")
def _check_cut_stream(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail unless a stream that ends too early raises a retryable ``ModelError``."""
    error = _request_expecting_error(make_and_model, "cut", _collect_stream)
    require(error.retryable, f"retryable is False in {error!r}")


@PROVIDER.add("unreachable", "If no server listens, `complete` and `stream` raise a ModelError with retryable=True.")
def _check_unreachable_server(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail unless ``complete`` and ``stream`` raise a retryable ``ModelError`` without a server."""
    for ask in (_request_whole_reply, _collect_stream):
        error = _request_expecting_error(make_and_model, "unreachable", ask)
        require(error.retryable, f"retryable is False in {error!r}")


@PROVIDER.add("cancel", "A waiting request can be cancelled immediately and leaves no task behind.")
def _check_request_cancellation(make_and_model: tuple[MakeProvider, str]) -> None:
    """Fail unless a waiting request can be cancelled at once and leaves no task behind."""

    async def cancel_silent_request(
        ask: Callable[[Provider, ModelRequest], Awaitable[Any]], loop_runs: threading.Event, provider: Provider
    ) -> None:
        before = asyncio.all_tasks()
        task = asyncio.ensure_future(ask(provider, _make_request(provider, make_and_model[1], "a heron")))
        start = time.monotonic()
        await asyncio.sleep(0.1)
        # Read the error in any case: asyncio logs errors of tasks that are never read.
        end = _describe_task_end(task) if task.done() else ""
        require(not end or time.monotonic() - start < BLOCKED_SECONDS, BLOCKED)
        loop_runs.set()
        require(not end, f"the server sends nothing, but the request ended with {end}")
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_SECONDS)
        require(task.done(), NOT_CANCELLED)
        end = _describe_task_end(task)
        require(task.cancelled(), f"a cancelled request ended with {end}, not with CancelledError")
        await provider.close()
        await asyncio.sleep(0)
        require_equal(set(), {t for t in asyncio.all_tasks() - before if not t.done()}, "tasks that are left")

    for ask in (_request_whole_reply, _collect_stream):
        loop_runs = threading.Event()
        # In another thread, since a blocked event loop, or a task that ignores its cancellation, would never return.
        ended = _run_in_thread_until_timeout(
            partial(_run_with_provider, make_and_model, "silent", partial(cancel_silent_request, ask, loop_runs))
        )
        require(ended or loop_runs.is_set(), BLOCKED)
        require(ended, NOT_CANCELLED)


# --- helpers --------------------------------------------------------------------------------------------------------


def _make_provider(make_and_model: tuple[MakeProvider, str], situation: Situation) -> Provider:
    """Return the provider for *situation*; raise ``UncheckedPromise`` if there is none."""
    provider = make_and_model[0](situation)
    if provider is None:
        msg = f"make({situation!r}) returned None"
        raise UncheckedPromise(msg)
    if not isinstance(provider, Provider):
        msg = f"make({situation!r}) returned {provider!r}, which is not a Provider"
        raise TypeError(msg)
    return provider


def _run_with_provider(
    make_and_model: tuple[MakeProvider, str], situation: Situation, work: Callable[[Provider], Awaitable[T]]
) -> T:
    """Return the result of *work* with a provider, in an event loop of its own."""

    async def run_and_close_provider() -> T:
        """Do the work with a new provider, close the provider, and return the result."""
        provider = _make_provider(make_and_model, situation)
        try:
            return await work(provider)
        finally:
            await provider.close()

    return asyncio.run(run_and_close_provider())


def _run_in_thread_until_timeout(work: Callable[[], None]) -> bool:
    """Run *work* in another thread, and return True if it ends in time; raise its error."""
    errors: list[Exception] = []

    def run_and_store_error() -> None:
        """Do the work, and store its error."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)

    thread = threading.Thread(target=run_and_store_error, daemon=True)
    thread.start()
    thread.join(2 * CANCEL_SECONDS)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def _make_request(provider: Provider, model: str, text: str, *tools: ToolSpec) -> ModelRequest:
    """Return a request to *model* with one user message and *tools*."""
    return ModelRequest(f"{provider.name}/{model}", messages=Transcript([UserMessage(text)]), tools=tools)


async def _request_whole_reply(provider: Provider, request: ModelRequest) -> ModelReply:
    return await provider.complete(request)


def _open_stream(provider: Provider, request: ModelRequest) -> Any:
    """Return the iterator of ``stream``, which has not started."""
    return provider.stream(request)


async def _collect_stream(provider: Provider, request: ModelRequest) -> list[ModelDelta]:
    async with aclosing(_open_stream(provider, request)) as deltas:
        return [delta async for delta in deltas]


def _describe_task_end(task: asyncio.Future[Any]) -> str:
    """Return the error or the result of a task that is done, as text."""
    return "CancelledError" if task.cancelled() else repr(task.exception() or task.result())


def _request_expecting_error(
    make_and_model: tuple[MakeProvider, str],
    situation: Situation,
    ask: Callable[[Provider, ModelRequest], Awaitable[Any]],
) -> ModelError:
    """Return the ``ModelError`` of a request to a new provider; fail if the request raises none."""

    async def request_error(provider: Provider) -> ModelError:
        """Return the ``ModelError`` of the request; raise ``AssertionError`` without one."""
        try:
            found = await ask(provider, _make_request(provider, make_and_model[1], "a heron"))
        except ModelError as error:
            return error
        msg = f"`{'complete' if ask is _request_whole_reply else 'stream'}` raised no ModelError and returned {found!r}"
        raise AssertionError(msg)

    return _run_with_provider(make_and_model, situation, request_error)


def _require_answer(reply: ModelReply, text: str) -> None:
    """Raise ``AssertionError`` unless *reply* is a whole answer that contains *text*."""
    require(isinstance(reply, ModelReply), f"{reply!r} is not a ModelReply")
    require(text in reply.text, f"the server should repeat {text!r}, the reply is {reply.text!r}")
    require_equal(StopReason.END_TURN, reply.stop_reason, "stop reason of a whole answer")


def _require_one_final_reply(deltas: list[ModelDelta]) -> ModelReply:
    """Return the reply of the only ``ReplyDone``; raise ``AssertionError`` unless it is the last delta."""
    done = [number for number, delta in enumerate(deltas, start=1) if isinstance(delta, ReplyDone)]
    require_equal([len(deltas)], done, "positions of ReplyDone in the stream")
    last = deltas[-1]
    assert isinstance(last, ReplyDone)  # noqa: S101 - for the type checker
    return last.reply


def _require_matching_call_pieces(deltas: list[ModelDelta], reply: ModelReply) -> None:
    """Raise ``AssertionError`` unless the streamed pieces of calls add up to the calls of *reply*."""
    started = {d.index: d.tool_name for d in deltas if isinstance(d, ToolCallStarted)}
    require_equal([call.tool_name for call in reply.tool_calls], list(started.values()), "calls that started")
    require_equal(sorted(started), sorted(d.index for d in deltas if isinstance(d, ToolCallEnded)), "calls that ended")
    for index, call in zip(started, reply.tool_calls, strict=True):
        text = "".join(d.text for d in deltas if isinstance(d, ToolCallChunk) and d.index == index)
        require_equal(dict(call.input), json.loads(text or "{}"), "input in pieces")
