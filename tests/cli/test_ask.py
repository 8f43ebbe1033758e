"""
`stepengine ask`: one model call and what is said about it.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stepengine.cli.app import app
from stepengine.data.models import ModelReply, ReplyDone, StopReason, TextChunk
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models import Provider
from stepengine.testing import failure, text

MODEL = "test/m"


def ask(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, ["ask", *arguments], **options)


class Streams(Provider):
    """
    Gives one list of deltas per request; an exception among them is raised.
    """

    name = "test"

    def __init__(self, *streams: list[Any]) -> None:
        self._streams = list(streams)

    async def complete(self, request: Any) -> ModelReply:
        raise AssertionError(request)

    async def stream(self, request: Any) -> Any:
        for delta in self._streams.pop(0):
            if isinstance(delta, Exception):
                raise delta
            yield delta


def test_ask_prints_the_reply_to_stdout_and_cost_to_stderr(scripted: Any) -> None:
    reply = ModelReply("It is five.", usage=Usage(1_200, 3), cost=Decimal("0.0125"), model="test/m-2026")
    model = scripted(reply)
    result = ask(MODEL, "2 + 3?", "--system", "Be brief.", "--max-tokens", "50")
    request = model.calls[0]

    assert (0, "It is five.\n") == (result.exit_code, result.stdout)
    assert "test/m-2026 | 1,200 tokens in, 3 out | $0.0125 | " in result.stderr
    assert ("Be brief.", "2 + 3?", 50) == (request.system_prompt, request.messages[0].text, request.settings.max_tokens)
    assert 1 == len(model.calls)


@pytest.mark.deep
@pytest.mark.smoke
def test_ask_streams_text_and_restarts_an_interrupted_reply(scripted: Any) -> None:
    cut = TruncatedReply("cut", retryable=True, retry_after=0)
    whole = [TextChunk("It is "), TextChunk("fi\x1b[2Jve."), ReplyDone(ModelReply("It is five."))]
    scripted(Streams([TextChunk("It"), cut], whole))
    result = ask(MODEL, "2 + 3?")

    assert 0 == result.exit_code
    assert "It\nIt is fi\\x1b[2Jve.\n" == result.stdout
    assert "the reply was interrupted" in result.stderr
    assert "attempt 1 failed; retrying in " in result.stderr


def test_json_is_one_object_without_anything_before_it(scripted: Any) -> None:
    scripted(text("hi \x1b[2J", usage=Usage(10, 2)))
    result = ask(MODEL, "hello", "--json")
    told = json.loads(result.stdout)

    assert "" == result.stderr
    assert {"model", "status", "stop_reason", "text", "error", "usage", "cost", "warnings"} == set(told)
    assert (MODEL, "hi \x1b[2J", 12, None) == (told["model"], told["text"], told["usage"]["total_tokens"], told["cost"])
    assert "\x1b" not in result.stdout


def test_ask_reads_the_prompt_from_stdin(scripted: Any) -> None:
    model = scripted(text("ok"))

    assert 0 == ask(MODEL, "-", input="from a pipe").exit_code
    assert "from a pipe" == model.calls[0].messages[0].text


@pytest.mark.spec("ecosystem:EC141")
@pytest.mark.parametrize(
    ("reply", "code", "said"),
    [
        (failure(ModelError("no such model", status=404)), 1, "no such model"),
        (ModelReply("half", stop_reason=StopReason.MAX_TOKENS), 4, "truncated"),
    ],
)
def test_exit_codes_say_how_it_ended(scripted: Any, reply: Any, code: int, said: str) -> None:
    scripted(*[reply] * 4)  # a text that was cut is asked for three times more
    result = ask(MODEL, "hi")

    assert code == result.exit_code
    assert said in result.stderr


@pytest.mark.spec("ecosystem:EC141", "requirements:G13", "requirements:G23")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["antropic/m", "hi"], "did you mean 'anthropic'"),
        (["anthropic/m", "hi"], "set ANTHROPIC_API_KEY"),
        (
            ["m", "hi", "--base-url", "localhost"],
            "--base-url must be an address such as http://localhost:11434/v1, not 'localhost'",
        ),
    ],
)
def test_ask_rejects_unknown_models_missing_keys_and_bad_addresses(arguments: list[str], said: str) -> None:
    result = ask(*arguments)

    assert (2, "") == (result.exit_code, result.stdout)
    assert said in result.stderr


def test_a_reply_that_arrives_in_one_piece_is_printed_once(scripted: Any) -> None:
    scripted(Streams([ReplyDone(ModelReply("It is fi\x1b[2Jve."))]))
    result = ask(MODEL, "2 + 3?")

    assert (0, "It is fi\\x1b[2Jve.\n") == (result.exit_code, result.stdout)
