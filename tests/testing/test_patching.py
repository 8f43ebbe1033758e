"""
Programs that make their own clients are recorded and replayed by a patch of the libraries that send.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import requests
import urllib3

from stepengine.errors import DataError
from stepengine.testing import Cassette, CassetteMiss
from stepengine.testing.recordings import CassetteFixture
from tests.http_programs.odd_server import odd_server
from tests.model_server import ModelServer, model_server

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SAID = "You said: hi"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    with model_server() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def openai_sync(prompt: str) -> str:
    from openai import OpenAI

    with OpenAI() as client:
        return (
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}])
            .choices[0]
            .message.content
            or ""
        )


def bedrock(prompt: str) -> str:
    import boto3

    client = boto3.client("bedrock-runtime")
    reply = client.converse(modelId="m", messages=[{"role": "user", "content": [{"text": prompt}]}])
    return str(reply["output"]["message"]["content"][0]["text"])


def bedrock_stream(prompt: str) -> str:
    import boto3

    client = boto3.client("bedrock-runtime")
    reply = client.converse_stream(modelId="m", messages=[{"role": "user", "content": [{"text": prompt}]}])
    found = [event["contentBlockDelta"]["delta"]["text"] for event in reply["stream"] if "contentBlockDelta" in event]
    return "".join(found)


def record(file: Path, program: Callable[[], Any], **options: Any) -> Any:
    cassette = CassetteFixture(file, "once", **options)
    with cassette.patch():
        result = program()
    cassette.check_usage()
    cassette.write_recordings()
    return result


def replay(file: Path, program: Callable[[], Any]) -> Any:
    cassette = CassetteFixture(file, "none")
    with cassette.patch():
        result = program()
    cassette.check_usage()
    return result


@pytest.mark.deep
@pytest.mark.spec("replay:Y20", "replay:K15")
@pytest.mark.parametrize("program", [bedrock, bedrock_stream])
def test_a_bedrock_program_is_recorded_replayed_and_its_changes_named(server, tmp_path, program):
    """
    The server is gone for the replay; no key and no signature is in the file.
    """
    file = tmp_path / "c.yaml"
    assert SAID == record(file, lambda: program("hi"))
    count = len(server.requests)
    assert count == len(Cassette.load(file))
    assert "live" not in file.read_text()
    assert SAID == replay(file, lambda: program("hi"))
    with pytest.raises(CassetteMiss, match=r"(?s)\"hi\".*now \"bye\"|recorded.*hi.*now.*bye"):
        replay(file, lambda: program("bye"))
    assert count == len(server.requests)


@pytest.mark.spec("replay:Y20")
def test_older_clients_are_patched_and_everything_is_restored_afterwards(server, tmp_path):
    from openai import OpenAI

    before = (
        httpx2.HTTPTransport.handle_request,
        httpx2.AsyncHTTPTransport.handle_async_request,
        urllib3.HTTPConnectionPool.urlopen,
    )
    client = OpenAI()
    file = tmp_path / "c.yaml"
    said = [
        f(file, lambda: client.chat.completions.create(**ASKED)).choices[0].message.content for f in (record, replay)
    ]
    assert [SAID, SAID] == said
    assert before == (
        httpx2.HTTPTransport.handle_request, httpx2.AsyncHTTPTransport.handle_async_request, urllib3.HTTPConnectionPool.urlopen,
    )  # fmt: skip
    client.close()


@pytest.mark.spec("replay:Y20", "replay:C11")
def test_a_second_patch_is_refused_and_nested_transports_record_once(server, tmp_path):
    patch, other = CassetteFixture(tmp_path / "a.yaml", "once"), CassetteFixture(tmp_path / "b.yaml", "once")
    with patch.patch():
        with pytest.raises(DataError, match=r"this process is already patched for .*a\.yaml"), other.patch():
            pass
        with httpx2.Client(transport=other.transport()) as client:
            client.post(f"{server.url}/v1/chat/completions", json=ASKED)
        with httpx2.Client() as client:
            client.post(f"{server.url}/v1/messages", json=ASKED)
    assert [1, 1] == [len(patch.fresh.complete_interactions), len(other.fresh.complete_interactions)]
    with other.patch():
        pass


@pytest.mark.spec("replay:Y20", "replay:Y10")
def test_a_miss_swallowed_in_a_thread_is_remembered(server, tmp_path):
    file = tmp_path / "c.yaml"
    record(file, lambda: openai_sync("hi"))

    def swallow() -> None:
        with contextlib.suppress(BaseException):
            openai_sync("other")

    def program() -> None:
        thread = threading.Thread(target=swallow)
        thread.start()
        thread.join()

    with pytest.raises(CassetteMiss):
        replay(file, program)
    assert 1 == len(server.requests)


@pytest.mark.spec("replay:Y20", "replay:C6")
def test_a_stream_that_is_left_early_is_not_recorded(tmp_path):
    early = CassetteFixture(tmp_path / "early.yaml", "once")
    with odd_server() as waiting, early.patch():
        reply = requests.get(f"http://127.0.0.1:{waiting.server_port}/waiting-events", stream=True, timeout=5)
        assert b"data: first\n\n" == next(reply.iter_content(13))
        reply.close()

    assert (0, ["not_read"]) == (len(early.fresh.complete_interactions), [left.reason for left in early.fresh.left_out])


@pytest.mark.spec("replay:Y20", "replay:C6")
@pytest.mark.parametrize("size", [b"-10", b"0x3", b"3_0", b"", b"f" * 40])
def test_reply_with_an_invalid_chunk_size_is_recorded_as_broken(size, tmp_path):
    damaged = CassetteFixture(tmp_path / "damaged.yaml", "once")
    with socket.create_server(("127.0.0.1", 0)) as server, damaged.patch():

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n%s\r\nabc" % size)

        thread = threading.Thread(target=answer)
        thread.start()
        with contextlib.suppress(OSError, ValueError):
            requests.get(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout=5)
        thread.join()

    assert [(False, b"abc")] == [(one.is_complete, one.response.body) for one in damaged.fresh.complete_interactions]


@pytest.mark.spec("replay:K15", "replay:Y11")
def test_a_replaying_program_gets_an_invalid_token(tmp_path):
    def program() -> Any:
        form = {"grant_type": "refresh_token", "refresh_token": "x"}
        return requests.post("https://oauth2.googleapis.com/token", data=form, timeout=5).json()["access_token"]

    assert "replay" == replay(tmp_path / "c.yaml", program)


@pytest.mark.spec("replay:Y20")
def test_reports_to_tracing_services_are_answered_and_never_recorded(tmp_path):
    def program() -> int:
        return httpx2.post("https://api.openai.com/v1/traces/ingest", json={"data": []}).status_code

    assert 200 == replay(tmp_path / "c.yaml", program)


@pytest.mark.spec("replay:Y20", "replay:C20")
def test_every_way_of_an_aiohttp_session_is_recorded_and_replayed(server, tmp_path):
    aiohttp = pytest.importorskip(
        "aiohttp", reason="aiohttp is not installed: .ci/deep has an environment of its own for this"
    )
    url = f"{server.url}/v1/chat/completions"

    async def ask() -> list[Any]:
        async with aiohttp.ClientSession() as session, aiohttp.request("POST", url, json=ASKED) as alone:
            found = [(await alone.json())["id"]]
            async with session.request("POST", url, json=ASKED) as reply:
                found.append((reply.status, (await reply.json())["id"]))
            async with session.post(url, json={**ASKED, "stream": True}) as reply:
                found.append([line async for line in reply.content])
            reply = await session.get(f"{server.url}/page", params={"page": "1"})
            return [*found, reply.headers["content-type"], json.loads(await reply.text())]

    async def leave() -> None:
        async with aiohttp.ClientSession() as session:
            server.cut = 40
            reply = await session.post(url, json={**ASKED, "stream": True})
            await reply.content.readany()
            reply.close()

    file = tmp_path / "c.yaml"
    recorded = record(file, lambda: asyncio.run(ask()))
    assert b"data: [DONE]\n" in recorded[2]
    assert (recorded, 4) == (replay(file, lambda: asyncio.run(ask())), len(Cassette.load(file)))
    early = CassetteFixture(tmp_path / "early.yaml", "once")
    with early.patch():
        asyncio.run(leave())
    assert () == early.fresh.complete_interactions


@pytest.mark.spec("replay:Y20", "replay:C20")
def test_legacy_httpx_is_covered_also_when_it_is_imported_later(server, tmp_path):
    pytest.importorskip("httpx", reason="httpx is not installed: .ci/deep has an environment of its own for this")
    code = (
        "import sys, pathlib; from stepengine.testing.recordings import CassetteFixture\n"
        "assert 'httpx' not in sys.modules\n"
        "for mode in ('once', 'none'):\n"
        "    cassette = CassetteFixture(pathlib.Path(sys.argv[1]), mode)\n"
        "    with cassette.patch():\n"
        "        import httpx\n"
        "        assert httpx.post(sys.argv[2], json={'model': 'm', 'messages': []}).status_code == 200\n"
        "    cassette.check_usage(), cassette.write_recordings()\n"
    )
    url = f"{server.url}/v1/chat/completions"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c.yaml"), url], capture_output=True, text=True, check=False
    )
    assert (0, 1) == (done.returncode, len(server.requests)), done.stderr
