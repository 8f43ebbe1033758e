"""Images, sound, video and files both ways on every wire, before a server that refuses what the services refuse."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stepengine import (
    AgentDefinition,
    AgentState,
    Complete,
    DocumentPart,
    Engine,
    ImagePart,
    ModelSettings,
    Perform,
    TextPart,
    UserMessage,
)
from stepengine.data.messages import AssistantMessage
from stepengine.data.models import TextChunk
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, InputError, ModelError
from stepengine.journal import MemoryJournal
from stepengine.models import (
    AnthropicProvider,
    CodeExecution,
    GoogleProvider,
    ModelRequest,
    Models,
    OpenAIChatProvider,
    OpenAIProvider,
    file_part,
)
from tests.faults.media_server import DOCX, MediaServer, media_server
from tests.faults.scripts import chat_reply, chunk, google_chunk
from tests.faults.server import fault_server, sse

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(40))
PNG64 = base64.b64encode(PNG).decode()
PDF = b"%PDF-1.7 a report"
PDF64 = base64.b64encode(PDF).decode()
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt "
MODELS = {
    "anthropic": "claude-sonnet-5",
    "openai": "gpt-5",
    "openai_chat": "gpt-5",
    "google": "gemini-3-pro-image",
    "openrouter": "google/gemini-3-pro-image",
    "mistral": "mistral-large-latest",
    "deepseek": "deepseek-v4",
    "qwen": "qwen3-omni",
}
HOLDERS = ["anthropic", "openai", "google"]


def at_openai(url: str) -> OpenAIChatProvider:
    provider = OpenAIChatProvider("openai_chat", "k")
    provider._base_url = f"{url}/v1"
    return provider


def models_at(url: str) -> Models:
    chats = {name: OpenAIChatProvider(name, "k", f"{url}/v1") for name in MODELS if name not in HOLDERS}
    # With an address of its own this name is a server that nothing is known of; OpenAI's own goes by the environment.
    chats["openai_chat"] = at_openai(url)
    first = {"anthropic": AnthropicProvider("k", url), "openai": OpenAIProvider("k", f"{url}/v1")}
    return Models({**first, **chats, "google": GoogleProvider("k", url)})


@asynccontextmanager
async def served(*replies: bytes) -> AsyncIterator[tuple[MediaServer, Models]]:
    async with media_server(*replies) as server:
        models = models_at(server.url)
        try:
            yield server, models
        finally:
            await models.close()


def request(name: str, *parts: Any, **settings: Any) -> ModelRequest:
    history = Transcript([UserMessage(["What is it?", *parts])])
    return ModelRequest(f"{name}/{MODELS[name]}", "", history, settings=ModelSettings(**settings))


def reader(name: str, **fields: Any) -> AgentDefinition[Any]:
    return AgentDefinition("reader", model=f"{name}/{MODELS[name]}", **fields)


def inside(value: Any) -> list[dict[str, Any]]:
    """Every object in a body."""
    found = [value] if isinstance(value, dict) else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found + [each for item in items for each in inside(item)]


# --- what users give ------------------------------------------------------------------------------------------------

REPORT = DocumentPart(data=PDF, name="a.pdf")
DATA_URL = f"data:application/pdf;base64,{PDF64}"


@pytest.mark.spec("providers:PV47", "providers:PV48", "providers:PV49", "providers:PV51")
@pytest.mark.parametrize(
    ("name", "part", "wanted"),
    [
        ("anthropic", REPORT, {"type": "base64", "media_type": "application/pdf", "data": PDF64}),
        ("openai", REPORT, {"type": "input_file", "filename": "a.pdf", "file_data": DATA_URL}),
        ("openrouter", REPORT, {"filename": "a.pdf", "file_data": DATA_URL}),
        ("mistral", REPORT, {"type": "document_url", "document_url": DATA_URL}),
        ("google", REPORT, {"mimeType": "application/pdf", "data": PDF64}),
        ("openai", DocumentPart(data=b"PK", mime_type=DOCX), {"filename": "document.docx"}),
        ("openai", DocumentPart(data=b'{"a": 1}', mime_type="application/json"), {"text": '{"a": 1}'}),
        ("openrouter", DocumentPart(data=WAV, mime_type="audio/wav"), {"format": "wav", "data": base64.b64encode(WAV).decode()}),
        ("qwen", DocumentPart(data=WAV, mime_type="audio/wav"), {"data": f"data:audio/wav;base64,{base64.b64encode(WAV).decode()}"}),
        ("openrouter", DocumentPart("https://x/v.mp4", mime_type="video/mp4"), {"video_url": {"url": "https://x/v.mp4"}}),
        ("google", DocumentPart(data=WAV, mime_type="audio/wav"), {"mimeType": "audio/wav"}),
        ("google", DocumentPart("https://youtu.be/x", mime_type="video/mp4"), {"fileUri": "https://youtu.be/x"}),
        ("mistral", DocumentPart("https://x/a.pdf"), {"document_url": "https://x/a.pdf"}),
        ("anthropic", DocumentPart(data=PNG, mime_type="image/png"), {"media_type": "image/png"}),
    ],
)  # fmt: skip
async def test_documents_and_media_take_the_form_of_each_wire(name, part, wanted):
    async with served() as (server, models):
        await models.provider_for(f"{name}/x").complete(request(name, part))
    assert any(wanted.items() <= each.items() for each in inside(server.bodies[0]))


REFUSED = [
    ("openai", DocumentPart(data=WAV, mime_type="audio/wav"), "images, PDF, text and office files"),
    ("openai", DocumentPart("https://x/v.mp4", mime_type="video/mp4"), "images, PDF, text and office files"),
    ("openai", DocumentPart(data=b"x", mime_type="application/zip"), "images, PDF, text and office files"),
    ("anthropic", DocumentPart(data=WAV, mime_type="audio/wav"), "images, PDF and plain text"),
    ("anthropic", DocumentPart("https://x/a.docx", mime_type=DOCX), "images, PDF and plain text"),
    ("anthropic", DocumentPart("https://x/a.txt", mime_type="text/plain"), "text as bytes or as an uploaded file"),
    ("anthropic", DocumentPart(mime_type=DOCX, file_id="file-1", provider="anthropic"), r"CodeExecution\(\)"),
    ("anthropic", ImagePart(data=b"x", mime_type="image/tiff"), "JPEG, PNG, GIF and WebP"),
    ("openai_chat", DocumentPart(data=b"PK", mime_type=DOCX), "PDF as bytes or uploaded"),
    ("openai_chat", DocumentPart("https://x/a.pdf"), "PDF as bytes or uploaded"),
    ("openai_chat", ImagePart(file_id="file-1", provider="openai"), "images as bytes or by URL"),
    ("openai_chat", DocumentPart("https://x/a.wav", mime_type="audio/wav"), "WAV and MP3 as bytes"),
    ("deepseek", DocumentPart(data=PDF), "text as bytes, images as bytes or by URL"),
    ("mistral", DocumentPart(data=WAV, mime_type="audio/wav"), "PDF as bytes or by URL"),
    ("google", DocumentPart(data=b"PK", mime_type=DOCX), "images, audio, video, text and PDF"),
    ("google", DocumentPart(data=bytes(15_000_001)), "15,000,001 bytes, and a request holds 15,000,000; upload it"),
    (
        "anthropic",
        DocumentPart(file_id="file-1", provider="openai"),
        "the file is stored at openai; .* upload it to anthropic",
    ),
    ("openai", ImagePart(file_id="file-1", provider="anthropic"), "the file is stored at anthropic"),
    ("openai_chat", DocumentPart(file_id="f", provider="google"), "the file is stored at google"),
    ("google", DocumentPart(file_id="file-1", provider="openai"), "the file is stored at openai"),
]


@pytest.mark.spec("providers:PV47", "providers:PV48", "providers:PV49", "providers:PV51")
@pytest.mark.parametrize(
    ("where", "name", "part", "why"),
    [("user", *row) for row in REFUSED]
    + [(where, *REFUSED[index]) for where in ("result", "assistant") for index in (0, 3, 8, 14)],
)
async def test_an_unsupported_part_is_refused_before_sending_with_alternatives(where, name, part, why):
    from stepengine.data.messages import ToolCallPart, ToolMessage

    call = [AssistantMessage([ToolCallPart("c1", "look")]), ToolMessage("c1", "look", [part])]
    messages = {"user": [UserMessage([part])], "result": call, "assistant": [AssistantMessage([part])]}[where]
    asked = ModelRequest(f"{name}/{MODELS[name]}", "", Transcript([UserMessage("Hi."), *messages]))
    async with served() as (server, models):
        provider = models.provider_for(f"{name}/x")
        with pytest.raises(ModelError, match=why) as caught:
            await provider.complete(asked)
    assert caught.value.kind == "unsupported_part"
    assert caught.value.message.startswith(f"{name} does not accept the {type(part).__name__}")
    assert not server.seen


# --- what models make -----------------------------------------------------------------------------------------------


def gemini_image() -> bytes:
    blob = {"inlineData": {"mimeType": "image/png", "data": PNG64}, "thoughtSignature": "c2ln"}
    return json.dumps(google_chunk([{"text": "Here."}, blob], "STOP")).encode()


def responses_image() -> bytes:
    call = {
        "type": "image_generation_call",
        "id": "ig_1",
        "status": "completed",
        "output_format": "png",
        "result": PNG64,
    }
    said = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Here."}],
    }
    return json.dumps({"id": "r", "status": "completed", "output": [call, said], "usage": None}).encode()


def openrouter_image() -> bytes:
    reply = json.loads(chat_reply("Here.", [], "end_turn"))
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG64}"}, "index": 0}
    reply["choices"][0]["message"]["images"] = [image]
    return json.dumps(reply).encode()


MAKERS = {"google": gemini_image, "openai": responses_image, "openrouter": openrouter_image}


@pytest.mark.spec("providers:PV52", "providers:PV30")
@pytest.mark.parametrize("other", ["anthropic", "openai", "google"])
@pytest.mark.parametrize("maker", MAKERS)
async def test_an_image_made_by_one_model_is_seen_by_another(maker, other):
    async with (
        served(MAKERS[maker]()) as (server, models),
        Engine([reader(maker)], models=models, pricing=None) as engine,
    ):
        first = await engine.run("reader", "Draw it.")
        made = first.state.message_history[-1]
        images = [part for part in made.content if isinstance(part, ImagePart)]
        assert [(part.data, part.mime_type) for part in images] == [(PNG, "image/png")]
        assert made.text == "Here."
        again = await engine.run(reader(other), "What is on it?", previous=first.state)
    assert again.unwrap() == "It is five."
    sent = json.dumps(server.bodies[1])
    assert sent.count(PNG64) == 1
    assert ("that the assistant made" in sent) == (maker != other)
    if maker == other == "google":
        blob = {"inlineData": {"mimeType": "image/png", "data": PNG64}, "thoughtSignature": "c2ln"}
        assert blob in server.bodies[1]["contents"][1]["parts"]


@pytest.mark.spec("providers:PV52")
@pytest.mark.parametrize("streamed", [False, True])
async def test_sound_from_a_chat_model_goes_back_as_its_transcript(streamed):
    sound = {"id": "audio_1", "expires_at": 9, "transcript": "It is five.", "data": base64.b64encode(WAV).decode()}
    whole = json.loads(chat_reply("", [], "end_turn"))
    if streamed:
        halves = [{"id": "audio_1", "data": base64.b64encode(WAV[:5]).decode(), "transcript": "It is"}]
        halves += [{"data": base64.b64encode(WAV[5:]).decode(), "transcript": " five.", "expires_at": 9}]
        events = [*[chunk({"audio": half}) for half in halves], chunk({}, "stop"), b"data: [DONE]\n\n"]
        async with fault_server(sse(*events, "fin")) as faulty:
            provider = OpenAIChatProvider("openrouter", "k", base_url=faulty.url)
            deltas = [delta async for delta in provider.stream(request("openrouter"))]
            await provider.close()
        reply = deltas[-1].reply
        assert "".join([delta.text for delta in deltas if isinstance(delta, TextChunk)]) == "It is five."
    else:
        whole["choices"][0]["message"]["audio"] = sound
        async with served(json.dumps(whole).encode()) as (server, models):
            reply = await models.provider_for("openrouter/x").complete(request("openrouter"))
    heard, said = reply.content
    assert isinstance(heard, DocumentPart)
    assert (heard.data, heard.mime_type) == (WAV, "audio/wav")
    assert heard.provider_data["id"] == "audio_1"
    assert said == TextPart("It is five.")
    asked = Transcript([UserMessage("Say it."), AssistantMessage(reply.content), UserMessage("Again.")])
    async with served() as (server, models):
        for name in ("anthropic", "openai", "mistral", "google"):
            await models.provider_for(f"{name}/x").complete(ModelRequest(f"{name}/{MODELS[name]}", "", asked))
    for body in server.bodies:
        assert "It is five." in json.dumps(body)
        assert base64.b64encode(WAV).decode() not in json.dumps(body)


# --- files that a provider holds ------------------------------------------------------------------------------------


@pytest.mark.spec("providers:PV53")
@pytest.mark.parametrize("name", HOLDERS)
async def test_an_uploaded_file_is_used_in_two_runs_and_deleted(name, tmp_path):
    path = tmp_path / "report.pdf"
    path.write_bytes(PDF)
    async with (
        served() as (server, models),
        Engine([reader(name)], models=models, pricing=None) as engine,
    ):
        file = await engine.files.upload(path, to=name)
        assert (file["provider"], file["mime_type"], file["name"]) == (name, "application/pdf", "report.pdf")
        assert server.files[file["file_id"]] == ("application/pdf", PDF)
        given = AgentState.from_messages([UserMessage(["Read this.", file_part(file)]), AssistantMessage("Yes.")])
        for _ in range(2):
            said = await engine.run("reader", "What is it?", previous=given)
            assert said.unwrap() == "It is five."
        assert (server.uploads, len(server.bodies)) == (1, 2)
        assert all(file["file_id"] in json.dumps(body) and PDF64 not in json.dumps(body) for body in server.bodies)
        await engine.files.delete(file)
        assert not server.files
        with pytest.raises(ModelError):
            await engine.files.delete(file)
        gone = await engine.run("reader", "What is it?", previous=given)
    assert gone.status == "failed"
    assert file["file_id"] in gone.error.message or "exist" in gone.error.message


@pytest.mark.spec("providers:PV53")
async def test_an_office_file_goes_into_the_container_where_code_runs():
    async with served() as (server, models):
        provider = models.provider_for("anthropic/x")
        async with Engine(models=models) as engine:
            file = await engine.files.upload(b"PK", to="anthropic", mime_type=DOCX, name="a.docx", expires_in=3600)
        asked = request("anthropic", file_part(file), server_tools=[CodeExecution()])
        assert (await provider.complete(asked)).text == "It is five."
    assert {"type": "container_upload", "file_id": file["file_id"]} in inside(server.bodies[0])


async def test_an_impossible_upload_is_refused_with_the_reason(tmp_path):
    async with served() as (server, models), Engine(models=models) as engine:
        with pytest.raises(InputError, match=r"'odd\.zzz' is unknown; pass mime_type="):
            await engine.files.upload(b"x", to="openai", name="odd.zzz")
        with pytest.raises(InputError, match="cannot be read"):
            await engine.files.upload(tmp_path / "none.pdf", to="openai")
        with pytest.raises(ModelError, match="mistral stores no files"):
            await engine.files.upload(PDF, to="mistral", name="a.pdf")
        with pytest.raises(ModelError, match="stores every file for 48 hours"):
            await engine.files.upload(PDF, to="google", name="a.pdf", expires_in=3600)
        with pytest.raises(DataError, match=r"the result of engine\.files\.upload\(\.\.\.\)"):
            await engine.files.delete({"file_id": 5})
        assert not server.seen
        for name in ("anthropic", "openai"):
            with pytest.raises(ModelError, match="an hour at least"):
                await engine.files.upload(PDF, to=name, name="a.pdf", expires_in=60)


@pytest.mark.spec("providers:PV53")
@pytest.mark.parametrize("name", HOLDERS)
async def test_a_handler_uploads_once_and_replays_without_the_server(name):
    def reads(engine: list[Engine]) -> AgentDefinition[Any]:
        def handle_steps(context: Any) -> Any:
            file = yield from Perform(engine[0].files.upload, PDF, to=name, mime_type="application/pdf", name="r.pdf")
            reply = yield from Complete([UserMessage(["Read it.", file_part(file)])])
            yield from Perform(engine[0].files.delete, file)
            return reply.text

        return reader(name, handle_steps=handle_steps)

    async with served() as (server, models):
        engines: list[Engine] = []
        async with Engine([reads(engines)], models=models, pricing=None) as engine:
            engines.append(engine)
            journal = MemoryJournal()
            first = await engine.run("reader", "Go.", journal=journal)
            assert first.status == "completed", first.error
            assert (server.uploads, server.files) == (1, {})
            before = len(server.seen)
            again = await engine.replay(journal)
            assert (again.output, again.status) == (first.output, first.status)
        assert len(server.seen) == before
