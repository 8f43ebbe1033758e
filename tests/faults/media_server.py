"""
A loopback provider that holds files and is strict about media: what the services refuse, it refuses (providers PV47 to PV53).

It speaks the file APIs of Anthropic, OpenAI and Gemini and answers requests for replies of all four wires. A request is
refused when it names a file that is not there, holds a kind of media in a form that the wire has no word for, or has the
user's media in a message of the assistant.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email import message_from_bytes
from typing import Any, Protocol

import attrs

from tests.faults.scripts import anthropic_reply, chat_reply, google_reply, responses_reply

Json = dict[str, Any]
SAID = ("It is five.", [], "end_turn")
IMAGES = {"image/png", "image/jpeg", "image/gif", "image/webp"}
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


class Refused(Exception):
    """What the service answers 400 or 404 for."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


def need(fine: Any, why: str, status: int = 400) -> None:
    if not fine:
        raise Refused(why, status)


@attrs.define
class MediaServer:
    """
    The server while it runs.

    Attributes:
        url: Its address.
        files: What is held, by id: type and bytes.
        uploads: How many files came.
        bodies: The requests for replies, in order.
        replies: What is answered in turn, as bytes; a short text when none is left.
    """

    url: str = ""
    files: dict[str, tuple[str, bytes]] = attrs.field(factory=dict)
    uploads: int = 0
    bodies: list[Json] = attrs.field(factory=list)
    replies: list[bytes] = attrs.field(factory=list)
    waiting: dict[str, Json] = attrs.field(factory=dict)
    seen: list[str] = attrs.field(factory=list)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], Any]:
        self.seen.append(f"{method} {path}")
        path = path.partition("?")[0]
        try:
            if ("/files" in path and "x-goog-api-key" in headers) or path.startswith("/upload/"):
                return self._gemini_file(method, path, headers, body)
            if path.startswith("/v1/files"):
                return 200, {}, self._file(method, path, headers, body)
            return 200, {}, self._reply(path, json.loads(body))
        except Refused as refused:
            kind = "not_found_error" if refused.status == 404 else "invalid_request_error"
            return refused.status, {}, {"type": "error", "error": {"type": kind, "message": str(refused)}}

    # --- files --------------------------------------------------------------------------------------------------------

    def _file(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Json:
        if method == "DELETE":
            name = path.rpartition("/")[2]
            need(self.files.pop(name, None), f"File not found: {name}", 404)
            return {"id": name, "object": "file", "deleted": True, "type": "file_deleted"}
        form = message_from_bytes(b"content-type: " + headers["content-type"].encode() + b"\r\n\r\n" + body)
        fields = {part.get_param("name", header="content-disposition"): part for part in form.get_payload()}
        file = fields["file"]
        need(file.get_filename(), "the part 'file' needs a filename")
        is_openai = "anthropic-version" not in headers
        need(not is_openai or fields["purpose"].get_payload() == "user_data", "purpose must be user_data")
        seconds = fields.get("expires_after[seconds]" if is_openai else "expires_in_seconds")
        need(seconds is None or int(seconds.get_payload()) >= 3600, "a file stays for an hour at least")
        self.uploads += 1
        name = f"file-{self.uploads}"
        self.files[name] = (file.get_content_type(), file.get_payload(decode=True))
        size = len(self.files[name][1])
        common = {"id": name, "filename": file.get_filename()}
        if is_openai:
            return {
                **common,
                "object": "file",
                "bytes": size,
                "created_at": 1,
                "purpose": "user_data",
                "status": "processed",
            }
        kind = self.files[name][0]
        stamp = "2026-11-01T00:00:00Z"
        return {
            **common,
            "type": "file",
            "mime_type": kind,
            "size_bytes": size,
            "created_at": stamp,
            "downloadable": False,
        }

    def _gemini_file(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], Any]:
        name = path.rpartition("/")[2]
        known = {"name": f"files/{name}", "uri": f"{self.url}/v1beta/files/{name}"}
        if path.startswith("/upload/") and headers.get("x-goog-upload-command") == "start":
            self.uploads += 1
            name = f"f{self.uploads}"
            self.waiting[name] = {"mimeType": headers["x-goog-upload-header-content-type"]}
            return (
                200,
                {"x-goog-upload-url": f"{self.url}/upload/v1beta/part/{name}", "x-goog-upload-status": "active"},
                {},
            )
        if path.startswith("/upload/"):
            need(headers["x-goog-upload-command"] == "upload, finalize", "one piece was expected")
            self.files[known["uri"]] = (self.waiting[name]["mimeType"], body)
            return (
                200,
                {"x-goog-upload-status": "final"},
                {"file": {**known, **self.waiting[name], "state": "PROCESSING"}},
            )
        need(
            known["uri"] in self.files,
            f"You do not have permission to access the File {name} or it may not exist.",
            403,
        )
        if method == "DELETE":
            del self.files[known["uri"]]
            return 200, {}, {}
        return 200, {}, {**known, "mimeType": self.files[known["uri"]][0], "state": "ACTIVE"}

    # --- replies ------------------------------------------------------------------------------------------------------

    def _reply(self, path: str, body: Json) -> Any:
        self.bodies.append(body)
        wire = next(w for w in WIRES if w.path in path)
        wire.check(self, body)
        return self.replies.pop(0) if self.replies else wire.reply(*SAID)

    def held(self, name: str, why: str) -> None:
        need(name in self.files, f"{why}: {name}", 404)

    def anthropic(self, body: Json) -> None:
        for message in body["messages"]:
            for block in message["content"] if isinstance(message["content"], list) else ():
                inner = (
                    block["content"] if block["type"] == "tool_result" and isinstance(block["content"], list) else []
                )
                for each in (block, *inner):
                    if each["type"] in {"image", "document", "container_upload"}:
                        need(
                            message["role"] == "user", f"{each['type']} blocks are not permitted in assistant messages"
                        )
                        self._anthropic_source(each)

    def _anthropic_source(self, block: Json) -> None:
        source = block.get("source", block)
        if "file_id" in source:
            self.held(source["file_id"], "File not found")
            return
        fine = {"image": IMAGES, "document": {"application/pdf", "text/plain"}}[block["type"]]
        need(
            source["type"] == "url" or source["media_type"] in fine,
            f"media_type: Input should be one of {sorted(fine)}",
        )

    def responses(self, body: Json) -> None:
        for item in body["input"] if isinstance(body["input"], list) else ():
            inside = item.get("content", item.get("output"))
            for piece in inside if isinstance(inside, list) else ():
                if piece["type"] in {"input_image", "input_file"}:
                    need(item.get("role") != "assistant", f"Invalid value: '{piece['type']}' in assistant content")
                    self._responses_piece(piece)
            if item.get("type") == "image_generation_call":
                need(item.get("id") and base64.b64decode(item["result"]), "image_generation_call needs id and result")

    def _responses_piece(self, piece: Json) -> None:
        if "file_id" in piece:
            self.held(piece["file_id"], "No such File object")
        elif "file_data" in piece:
            kind = piece["file_data"].partition(";")[0].removeprefix("data:")
            need(kind in {"application/pdf", DOCX}, f"Invalid file data: unsupported MIME type '{kind}'")
            ending = {"application/pdf": ".pdf", DOCX: ".docx"}[kind]
            need(piece["filename"].endswith(ending), f"the filename of {kind} ends with {ending}")

    def chat(self, body: Json) -> None:
        for message in body["messages"]:
            content = message.get("content")
            for piece in content if isinstance(content, list) else ():
                need(
                    piece["type"] == "text" or message["role"] == "user",
                    f"{piece['type']} in a message of {message['role']}",
                )
                file = piece.get("file", {})
                if "file_id" in file:
                    self.held(file["file_id"], "No such File object")
                elif file:
                    start = "data:application/pdf;base64,"
                    need(file["file_data"].startswith(("https://", start)), "Please try again with a pdf")

    def gemini(self, body: Json) -> None:
        for content in body["contents"]:
            for part in content["parts"]:
                if "inlineData" in part and content["role"] == "model":
                    need("thoughtSignature" in part, "Image part is missing a thought_signature")
                if "fileData" in part and part["fileData"]["fileUri"].startswith(self.url):
                    self.held(part["fileData"]["fileUri"], "it may not exist")


@attrs.frozen
class Rules:
    """How one wire answers and what it refuses."""

    path: str
    check: Callable[[MediaServer, Json], None]
    reply: Callable[..., bytes]


WIRES = (
    Rules("/messages", MediaServer.anthropic, anthropic_reply),
    Rules("/responses", MediaServer.responses, responses_reply),
    Rules("/chat/completions", MediaServer.chat, chat_reply),
    Rules(":generateContent", MediaServer.gemini, google_reply),
)


async def body_of(headers: dict[str, str], reader: asyncio.StreamReader) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


class Answering(Protocol):
    """What a server says to a request, and where it is."""

    url: str

    def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], Any]: ...


async def serve(state: Answering, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        first, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        method, path, _ = first.split(" ")
        status, more, answer = state.answer(method, path, headers, await body_of(headers, reader))
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        more = {"content-type": "application/json", "content-length": str(len(data)), **more}
        said = "".join([f"{k}: {v}\r\n" for k, v in more.items()])
        writer.write(f"HTTP/1.1 {status} Scripted\r\n{said}\r\n".encode() + data)
        await writer.drain()


@asynccontextmanager
async def media_server(*replies: bytes) -> AsyncIterator[MediaServer]:
    """Run the server, which answers with *replies* first."""
    state = MediaServer(replies=list(replies))
    async with running(state):
        yield state


@asynccontextmanager
async def running(state: Answering) -> AsyncIterator[None]:
    """Run a server that says what *state* says, and tell that where it is."""
    tasks: set[asyncio.Task[None] | None] = set()
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        writers.append(writer)
        try:
            await serve(state, reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    state.url = f"http://{host}:{port}"
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*[writer.wait_closed() for writer in writers], return_exceptions=True)
        await server.wait_closed()
