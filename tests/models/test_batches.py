"""What becomes of calls that wait for batches when things go wrong, with a provider that does as it is told."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest

from stepengine.data.messages import AssistantMessage, TextPart, ThinkingPart, UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, ModelError
from stepengine.models import (
    AnthropicProvider,
    Batched,
    BatchMember,
    GoogleProvider,
    Models,
    OpenAIProvider,
    Provider,
    batches,
)
from stepengine.models._stopped_usage import may_have_been_sent
from tests.waits import until_async

pytestmark = pytest.mark.anyio
SOON = 20.0


class Told(Provider):
    """Takes batches, and is done with all of them once it is told so."""

    name = "told"

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.asked: list[str] = []
        self.loops: set[int] = set()
        self.is_done = True
        self.error: Exception | None = None
        self.on_reply: Exception | None = None
        self.on_sending: Callable[[], Any] | None = None
        self.accepts = asyncio.Event()
        self.accepts.set()
        self.calls: dict[str, dict[str, int]] = {}
        self.given = 0

    async def complete(self, request: ModelRequest) -> ModelReply:
        return ModelReply()

    def encode_batch_member(self, request: ModelRequest) -> BatchMember:
        return BatchMember(request, request.model, request.system_prompt)

    async def submit_batch(self, members: Mapping[str, BatchMember]) -> str:
        self.sent.append([member.content for member in members.values()])
        if self.on_sending is not None:
            self.on_sending()
        name = f"b{len(self.sent)}"
        await self.accepts.wait()
        self.calls[name] = {}
        for each in members:
            self.given += 1
            self.calls[name][each] = self.given
        return name

    async def fetch_batch_results(self, batch: str) -> Mapping[str, Any] | None:
        self.asked.append(batch)
        self.loops.add(id(asyncio.get_running_loop()))
        if self.error is not None:
            raise self.error
        return self.calls[batch] if self.is_done else None

    def decode_batch_reply(self, result: Any, request: ModelRequest) -> ModelReply:
        if self.on_reply is not None:
            raise self.on_reply
        return ModelReply((TextPart(f"{request.system_prompt} {result}"),))


def about(text: str = "a") -> ModelRequest:
    return ModelRequest("told/m", text, Transcript([UserMessage("go")]))


def batched(told: Told, folder: Path, **more: Any) -> Batched:
    return Batched(told, folder / "batches.db", **{"wait": 0, "poll": 0.01, **more})


def rows(folder: Path) -> int:
    db = sqlite3.connect(folder / "batches.db")
    try:
        return int(db.execute("SELECT count(*) FROM calls").fetchone()[0])
    finally:
        db.close()


async def ended(waiting: Any) -> Any:
    async with asyncio.timeout(SOON):
        return (await asyncio.gather(waiting, return_exceptions=True))[0]


class NeedsMore(Exception):
    """One that cannot be made from its arguments, as those of the SDKs."""

    def __init__(self, text: str, *, response: object) -> None:
        super().__init__(text)


async def test_unreadable_batch_reply_fails_only_its_own_call(tmp_path: Path) -> None:
    told = Told()
    told.on_reply = TypeError("not so")
    waiting = batched(told, tmp_path)

    assert "not so" == str(await ended(waiting.complete(about())))
    told.on_reply = None
    assert "a 2" == (await waiting.complete(about())).text
    await waiting.close()


@pytest.mark.parametrize("error", [NeedsMore("not so", response=None), RuntimeError("not so")])
async def test_provider_error_reaches_all_calls_waiting_for_the_batch(error: Exception, tmp_path: Path) -> None:
    told = Told()
    told.error = error
    waiting = batched(told, tmp_path)

    async with asyncio.timeout(SOON):
        failed = await asyncio.gather(*[waiting.complete(about(text)) for text in "ab"], return_exceptions=True)
    await waiting.close()

    assert [type(error)] * 2 == [*map(type, failed)]
    assert ["not so"] * 2 == [*map(str, failed)]


class Verdict(BaseException):
    """What a test framework raises to fail a test."""


async def test_base_exception_while_submitting_ends_the_wait(tmp_path: Path) -> None:
    def give_verdict() -> None:
        raise Verdict("no")

    told = Told()
    told.on_sending = give_verdict
    waiting = batched(told, tmp_path)

    assert isinstance(await ended(waiting.complete(about())), Verdict)
    told.on_sending = None
    assert "a 1" == (await waiting.complete(about())).text
    await waiting.close()


def test_wrapped_provider_selects_models_and_counts_skipped_replies(tmp_path: Path) -> None:
    skipped: list[ModelRequest] = []

    class Selecting(Told):
        def supports_model(self, model: str) -> bool:
            return model == "mine"

        def skip_reply(self, request: ModelRequest) -> None:
            skipped.append(request)

    waiting = batched(Selecting(), tmp_path)
    models = Models({"told": waiting})
    models.provider_for("mine").skip_reply(about())

    assert "told/mine" == str(models.parse("mine"))
    assert [about()] == skipped


async def test_batch_that_cannot_be_persisted_is_still_awaited(tmp_path: Path) -> None:
    told = Told()
    waiting = batched(told, tmp_path)
    await waiting.complete(about("first"))
    told.on_sending = lambda: waiting._get_or_open_sent_calls()._db.execute("DROP TABLE calls")
    reply = await ended(waiting.complete(about()))
    await waiting.close()

    assert "a 2" == reply.text
    assert [["first"], ["a"]] == told.sent


async def test_broken_batch_file_raises_data_error(tmp_path: Path) -> None:
    told = Told()
    waiting = batched(told, tmp_path)
    await waiting.complete(about())
    waiting._get_or_open_sent_calls()._db.execute("DROP TABLE calls")

    with pytest.raises(DataError, match=r"the batch file .* cannot be used: no such table"):
        await waiting.complete(about())
    await waiting.close()


async def test_answered_call_is_not_shared_with_an_equal_call(tmp_path: Path) -> None:
    told = Told()
    waiting = batched(told, tmp_path)
    second: list[asyncio.Task[ModelReply]] = []
    told_reply = told.decode_batch_reply

    def asked_again(result: Any, request: ModelRequest) -> ModelReply:
        if not second:
            # Begins before the first is woken, whose reply stands already.
            second.append(asyncio.ensure_future(waiting.complete(request)))
        return told_reply(result, request)

    told.decode_batch_reply = asked_again  # type: ignore[method-assign]
    first = await ended(waiting.complete(about()))
    other = await ended(second[0])
    await waiting.close()

    assert {"a 1", "a 2"} == {first.text, other.text}


async def test_failed_deletion_never_serves_an_old_reply_again(tmp_path: Path) -> None:
    told = Told()
    waiting = batched(told, tmp_path)
    await ended(waiting.complete(about("other")))
    file = waiting._get_or_open_sent_calls()._db
    file.execute("CREATE TRIGGER full BEFORE DELETE ON calls BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    replies = [(await ended(waiting.complete(about()))).text for _ in range(3)]
    file.execute("DROP TRIGGER full")
    await waiting.close()

    assert ["a 2", "a 3", "a 4"] == replies
    assert 0 == rows(tmp_path)


async def test_reply_of_a_cancelled_call_serves_the_next_equal_call(tmp_path: Path) -> None:
    told = Told()
    waiting = batched(told, tmp_path)
    told_reply = told.decode_batch_reply
    task: asyncio.Task[ModelReply]

    def cancelled(result: Any, request: ModelRequest) -> ModelReply:
        asyncio.get_running_loop().call_soon(task.cancel)
        return told_reply(result, request)

    told.decode_batch_reply = cancelled  # type: ignore[method-assign]
    task = asyncio.ensure_future(waiting.complete(about()))
    gone = await ended(task)
    told.decode_batch_reply = told_reply  # type: ignore[method-assign]
    reply = await waiting.complete(about())
    await waiting.close()

    assert isinstance(gone, asyncio.CancelledError)
    assert ("a 1", 1) == (reply.text, len(told.sent))


async def test_close_fails_waiting_calls_and_keeps_their_batch_on_disk(tmp_path: Path) -> None:
    told = Told()
    told.is_done = False
    waiting = batched(told, tmp_path)
    task = asyncio.ensure_future(waiting.complete(about()))
    await until_async(lambda: told.asked)
    await waiting.close()
    error = await ended(task)
    told.is_done = True
    after = batched(told, tmp_path)
    reply = await after.complete(about())
    await after.close()

    assert isinstance(error, ModelError)
    assert "the provider was closed" in str(error)
    assert ("a 1", 1) == (reply.text, len(told.sent))


async def test_close_while_sending_still_persists_the_batch(tmp_path: Path) -> None:
    told = Told()
    told.accepts.clear()
    waiting = batched(told, tmp_path)
    task = asyncio.ensure_future(waiting.complete(about()))
    await until_async(lambda: told.sent)
    closing = asyncio.ensure_future(waiting.close())
    await asyncio.sleep(0)
    told.accepts.set()
    await ended(closing)
    await ended(task)

    assert 1 == rows(tmp_path)


@pytest.mark.parametrize(("status", "kept"), [(401, 1), (403, 1), (404, 0)])
async def test_batch_record_survives_an_auth_failure(status: int, kept: int, tmp_path: Path) -> None:
    told = Told()
    told.error = ModelError("no", status=status)
    waiting = batched(told, tmp_path)
    await ended(waiting.complete(about()))
    await waiting.close()

    assert kept == rows(tmp_path)


async def test_unreadable_batch_results_are_not_polled_forever(tmp_path: Path) -> None:
    told = Told()
    told.error = ModelError("no lines", retryable=True, kind="protocol")
    waiting = batched(told, tmp_path, poll=0.001)
    error = await ended(waiting.complete(about()))
    await waiting.close()

    assert "no lines" == str(error)
    assert 1 == rows(tmp_path)


async def test_calls_cancelled_before_submission_are_not_sent(tmp_path: Path) -> None:
    told = Told()
    told.accepts.clear()
    waiting = batched(told, tmp_path, most=1)
    first, second = [asyncio.ensure_future(waiting.complete(about(text))) for text in "ab"]
    await until_async(lambda: told.sent)
    second.cancel()
    await ended(second)
    told.accepts.set()
    await ended(first)
    await waiting.close()

    assert [["a"]] == told.sent


async def test_call_cancelled_during_submission_counts_as_sent(tmp_path: Path) -> None:
    told = Told()
    told.accepts.clear()
    waiting = batched(told, tmp_path)
    task = asyncio.ensure_future(waiting.complete(about()))
    await until_async(lambda: told.sent)
    task.cancel()
    gone = await ended(task)
    told.accepts.set()
    await waiting.close()

    assert isinstance(gone, asyncio.CancelledError)
    assert may_have_been_sent(gone)
    assert 1 == rows(tmp_path)


async def test_large_requests_are_split_into_batches_below_the_byte_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST_BYTES", 5_000)
    told = Told()
    waiting = batched(told, tmp_path)
    texts = [letter * size for letter, size in zip("abcd", (2_000, 2_000, 2_000, 9_000), strict=True)]
    await asyncio.gather(*[waiting.complete(about(text)) for text in texts])
    await waiting.close()

    assert [["a", "b"], ["c"], ["d"]] == [[text[0] for text in sent] for sent in told.sent]


def test_finished_event_loop_does_not_poll_the_next_loops_calls(tmp_path: Path) -> None:
    told = Told()
    waiting = batched(told, tmp_path, poll=0.02)
    elsewhere = asyncio.new_event_loop()
    thread = threading.Thread(target=elsewhere.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(waiting.complete(about("there")), elsewhere).result(SOON)
        told.is_done = False
        told.loops.clear()

        async def here() -> ModelReply:
            task = asyncio.ensure_future(waiting.complete(about("here")))
            # Longer than the other loop sleeps between two questions.
            await until_async(lambda: len(told.asked) > 5)
            told.is_done = True
            reply = await task
            await waiting.close()
            return reply

        reply = asyncio.run(here())
    finally:
        elsewhere.call_soon_threadsafe(elsewhere.stop)
        thread.join()
        elsewhere.close()

    assert ("here 2", [["there"], ["here"]]) == (reply.text, told.sent)
    assert 1 == len(told.loops)


# --- what the adapters make of answers ---------------------------------------------------------------------------------

MODELS = {"anthropic": "claude-sonnet-4-5", "openai": "gpt-5-mini", "google": "gemini-2.5-flash"}
wires = pytest.mark.parametrize("wire", MODELS)


def adapter(wire: str, *answers: Any) -> Any:
    """Return an adapter whose questions get these answers, one after another."""
    left = [*answers]
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, **left.pop(0)))
    kind = {"anthropic": AnthropicProvider, "openai": OpenAIProvider, "google": GoogleProvider}[wire]
    return kind("k", transport=transport)


def asked_of(wire: str, **settings: Any) -> ModelRequest:
    model = f"{wire}/{MODELS[wire]}"
    return ModelRequest(model, "", Transcript([UserMessage("go")]), settings=ModelSettings(**settings))


@wires
@pytest.mark.parametrize("named", [None, "", "x" * 201, 7])
async def test_a_batch_without_an_id_is_a_final_failure(wire: str, named: Any) -> None:
    taken = {"json": {"id": named, "name": named}}
    provider = adapter(wire, *([{"json": {"id": "file-1", "object": "file"}}] if wire == "openai" else []), taken)

    with pytest.raises(ModelError, match=f"{wire} accepted a batch, but its reply has no valid") as caught:
        await provider.submit_batch({"call-1": provider.encode_batch_member(asked_of(wire))})
    await provider.close()
    assert (False, "protocol") == (caught.value.retryable, caught.value.kind)


async def test_batch_request_uses_model_limits_learnt_after_encoding() -> None:
    stated = {"type": "model", "max_input_tokens": 200_000, "max_tokens": 12_345, "capabilities": {}}
    seen: list[bytes] = []

    def answer(request: Any) -> Any:
        seen.append(request.content)
        return httpx2.Response(200, json={"id": "b"} if request.content else stated)

    provider = AnthropicProvider("k", transport=httpx2.MockTransport(answer), ask_models=True)
    request = ModelRequest("anthropic/claude-unheard-of-9", "", Transcript([UserMessage("go")]))
    await provider.submit_batch({"call-1": provider.encode_batch_member(request)})
    await provider.close()

    assert [False, True] == [b'"max_tokens":12345' in body for body in seen]


@wires
async def test_batch_result_without_an_id_is_ignored(wire: str) -> None:
    lines = b'{"custom_id":"","result":{"type":"succeeded","message":{}},"response":{"status_code":200,"body":{}}}'
    file = {"content": lines, "headers": {"content-type": "application/x-jsonl"}}
    unnamed = {"inlinedResponses": {"inlinedResponses": [{"response": {}}]}}
    answers = {
        "anthropic": [{"json": {"processing_status": "ended"}}, file],
        "openai": [{"json": {"status": "completed", "output_file_id": "f"}}, file],
        "google": [{"json": {"metadata": {"state": "BATCH_STATE_SUCCEEDED", "output": unnamed}}}],
    }
    provider = adapter(wire, *answers[wire])
    results = await provider.fetch_batch_results("b")
    await provider.close()

    assert {} == results


@pytest.mark.parametrize("errors", [7, {"data": 7}, {"data": {"message": "x"}}, None])
async def test_refused_batch_with_malformed_errors_still_raises(errors: Any) -> None:
    provider = adapter("openai", {"json": {"status": "failed", "errors": errors}})

    with pytest.raises(ModelError, match="rejected the batch b: no reason given"):
        await provider.fetch_batch_results("b")
    await provider.close()


async def test_batch_name_is_escaped_as_one_path_segment() -> None:
    seen: list[str] = []

    def answer(request: Any) -> Any:
        seen.append(request.url.raw_path.decode())
        return httpx2.Response(200, json={})

    provider = GoogleProvider("k", transport=httpx2.MockTransport(answer))
    await provider.fetch_batch_results("batches/a?b#c")
    await provider.close()

    assert seen[0].endswith("/batches/a%3Fb%23c")


async def test_signature_refused_in_a_batch_is_dropped_on_retry() -> None:
    provider = adapter("anthropic")
    signed = {"provider": "anthropic", "model": "claude-sonnet-4-5", "signature": "s"}
    thought = AssistantMessage([ThinkingPart("hm", provider_data=signed), TextPart("a")])
    history = Transcript([UserMessage("go"), thought, UserMessage("on")])
    request = ModelRequest("anthropic/claude-sonnet-4-5", "", history)
    refused = {"error": {"type": "invalid_request_error", "message": "Invalid `signature` in `thinking` block"}}
    failed = []
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            provider.decode_batch_reply(refused, request)
        failed.append((caught.value.kind, caught.value.retryable))
    first, again = [
        provider._encode_for_batch(each).content
        for each in (attrs.evolve(request, messages=Transcript([*history])), request)
    ]
    await provider.close()

    assert [("invalid_signature", True), ("invalid_signature", False)] == failed
    assert (True, False) == (b'"signature"' in first, b'"signature"' in again)


@pytest.mark.parametrize("wire", ["openai", "google"])
def test_headers_that_a_batch_cannot_carry_are_reported(wire: str) -> None:
    request = asked_of(wire, extra={"headers": {"x-title": "t"}}, unsupported="error")

    with pytest.raises(ModelError, match=r"does not support extra\['headers'\]= of ModelSettings"):
        adapter(wire).encode_batch_member(request)
