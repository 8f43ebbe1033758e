"""
A loopback provider that takes batches as Anthropic, OpenAI and Gemini do, and is strict about their forms (providers PV99).

A batch is done when it was asked for often enough. What comes of a request hangs on the last word of its prompt: ``refused``,
``expired``, ``canceled``, ``lost``; any other is answered with what was asked, in capitals.
"""

from __future__ import annotations

import json
from email import message_from_bytes
from typing import Any

import attrs

from tests.faults.media_server import Refused, need
from tests.faults.scripts import anthropic_reply, chat_reply, google_reply, responses_reply

Json = dict[str, Any]
REPLIES = {"/v1/responses": responses_reply, "/v1/chat/completions": chat_reply}


@attrs.define
class BatchServer:
    """
    The server while it runs.

    Attributes:
        url: Its address.
        polls: How often a batch has to be asked for.
        refuses: Whether new batches are refused, with which status.
        fails: Whether a batch fails as a whole.
        batches: The requests of each batch, by its id: custom id and body.
        files: What was uploaded, and files of results.
        asked: How often each batch was asked for.
        headers: The headers that each batch came with.
    """

    url: str = ""
    polls: int = 2
    refuses: int = 0
    fails: bool = False
    batches: dict[str, list[tuple[str, Json]]] = attrs.field(factory=dict)
    files: dict[str, bytes] = attrs.field(factory=dict)
    asked: dict[str, int] = attrs.field(factory=dict)
    headers: list[dict[str, str]] = attrs.field(factory=list)
    endpoints: dict[str, str] = attrs.field(factory=dict)

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], Any]:
        path = path.partition("?")[0]
        try:
            if path.startswith("/v1/messages/batches"):
                return self._anthropic(method, path, headers, body)
            if path.startswith(("/v1/files", "/v1/batches")) and "x-goog-api-key" not in headers:
                return self._openai(method, path, headers, body)
            need(path.startswith(("/v1/models/", "/v1/batches/")), f"nothing is at {path}", 404)
            return self._gemini(method, path, headers, body)
        except Refused as refused:
            kind = "invalid_request_error"
            return refused.status, {}, {"type": "error", "error": {"type": kind, "message": str(refused)}}

    def took(self, requests: list[tuple[str, Json]], headers: dict[str, str]) -> str:
        if self.refuses:
            raise Refused("no batches today", self.refuses)
        need(len({name for name, _ in requests}) == len(requests), "custom_id must be unique")
        name = f"batch-{len(self.batches) + 1}"
        self.batches[name] = requests
        self.headers.append(headers)
        return name

    def is_done(self, name: str) -> bool:
        need(name in self.batches, f"no batch {name}", 404)
        self.asked[name] = self.asked.get(name, 0) + 1
        return self.asked[name] >= self.polls

    def _anthropic(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Json, Any]:
        if method == "POST":
            requests = json.loads(body)["requests"]
            for request in requests:
                need({*request} == {"custom_id", "params"}, "requests hold custom_id and params")
                need("stream" not in request["params"], "stream is not allowed in batches")
                need(request["params"]["max_tokens"] > 0, "max_tokens must be above 0")
            name = self.took([(r["custom_id"], r["params"]) for r in requests], headers)
            return 200, {}, {"id": name, "type": "message_batch", "processing_status": "in_progress"}
        name = path.split("/")[4]
        if not path.endswith("/results"):
            status = "ended" if self.is_done(name) else "in_progress"
            return 200, {}, {"id": name, "type": "message_batch", "processing_status": status}
        lines = []
        for custom, params in reversed(self.batches[name]):
            said = params["messages"][-1]["content"][-1]["text"]
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": "not so"}}
            result: Json = {"type": "succeeded", "message": json.loads(anthropic_reply(said.upper(), [], "end_turn"))}
            match said.rpartition(" ")[2]:
                case "refused":
                    result = {"type": "errored", "error": error}
                case ("expired" | "canceled") as kind:
                    result = {"type": kind}
                case "lost":
                    continue
            lines.append(json.dumps({"custom_id": custom, "result": result}))
        return 200, {"content-type": "application/x-jsonl"}, "\n".join(lines).encode()

    def _openai(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Json, Any]:
        if path == "/v1/files":
            form = message_from_bytes(b"content-type: " + headers["content-type"].encode() + b"\r\n\r\n" + body)
            fields = {part.get_param("name", header="content-disposition"): part for part in form.get_payload()}
            need(fields["purpose"].get_payload() == "batch", "purpose must be batch")
            name = f"file-{len(self.files)}"
            self.files[name] = fields["file"].get_payload(decode=True)
            return 200, {}, {"id": name, "object": "file", "purpose": "batch", "bytes": len(self.files[name])}
        if path.startswith("/v1/files/"):
            return 200, {"content-type": "application/octet-stream"}, self.files[path.split("/")[3]]
        if method == "POST":
            told = json.loads(body)
            need(told["completion_window"] == "24h", "completion_window must be 24h")
            lines = [json.loads(line) for line in self.files[told["input_file_id"]].splitlines()]
            for line in lines:
                need(line["method"] == "POST" and line["url"] == told["endpoint"], "all lines go to the endpoint")
                need("stream" not in line["body"], "stream is not allowed in batches")
            need(len({line["body"]["model"] for line in lines}) == 1, "one model in a batch")
            name = self.took([(line["custom_id"], line["body"]) for line in lines], headers)
            self.endpoints[name] = told["endpoint"]
            return 200, {}, {"id": name, "object": "batch", "status": "validating"}
        name = path.split("/")[3]
        if not self.is_done(name):
            return 200, {}, {"id": name, "object": "batch", "status": "in_progress"}
        if self.fails:
            errors = {"object": "list", "data": [{"code": "invalid_json_line", "message": "line 1 is not so"}]}
            return 200, {}, {"id": name, "object": "batch", "status": "failed", "errors": errors}
        good, bad = [], []
        for custom, asked in self.batches[name]:
            item = (asked.get("input") or asked["messages"])[-1]["content"]
            said = item if isinstance(item, str) else item[-1]["text"]
            last = said.rpartition(" ")[2]
            whole = json.loads(REPLIES[self.endpoints[name]](said.upper(), [], "end_turn"))
            response: Any = {"status_code": 200, "request_id": f"req-{custom}", "body": whole}
            error = None
            if last == "refused":
                response = {
                    "status_code": 400,
                    "request_id": "r",
                    "body": {"error": {"message": "not so", "type": "invalid_request_error"}},
                }
            elif last in {"expired", "canceled"}:
                code = {"expired": "batch_expired", "canceled": "batch_cancelled"}[last]
                response, error = None, {"code": code, "message": "too late"}
            elif last == "lost":
                continue
            line = {"id": "b", "custom_id": custom, "response": response, "error": error}
            (bad if error or last == "refused" else good).append(json.dumps(line))
        self.files["good"], self.files["bad"] = ["\n".join(lines).encode() for lines in (good, bad)]
        files = {"output_file_id": "good" if good else None, "error_file_id": "bad" if bad else None}
        return 200, {}, {"id": name, "object": "batch", "status": "completed", **files}

    def _gemini(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Json, Any]:
        if method == "POST":
            need(path.endswith(":batchGenerateContent"), f"nothing is at {path}", 404)
            told = json.loads(body)["batch"]["inputConfig"]["requests"]["requests"]
            name = self.took([(one["metadata"]["key"], one["request"]) for one in told], headers)
            return 200, {}, {"name": f"batches/{name}", "metadata": {"state": "BATCH_STATE_PENDING"}}
        name = path.rpartition("/")[2]
        if not self.is_done(name):
            return 200, {}, {"name": f"batches/{name}", "metadata": {"state": "BATCH_STATE_RUNNING"}}
        if self.fails:
            error = {"code": 3, "message": "not so", "status": "INVALID_ARGUMENT"}
            return 200, {}, {"name": name, "done": True, "metadata": {"state": "BATCH_STATE_FAILED"}, "error": error}
        answers, state = [], "BATCH_STATE_SUCCEEDED"
        for key, asked in self.batches[name]:
            said = asked["contents"][-1]["parts"][-1]["text"]
            answer: Json = {"response": json.loads(google_reply(said.upper(), [], "end_turn"))}
            match said.rpartition(" ")[2]:
                case "refused":
                    answer = {"error": {"code": 400, "message": "not so", "status": "INVALID_ARGUMENT"}}
                case "lost":
                    continue
                case "expired":
                    state = "BATCH_STATE_EXPIRED"
                    continue
                case "canceled":
                    state = "BATCH_STATE_CANCELLED"
                    continue
            answers.append({**answer, "metadata": {"key": key}})
        output = {"inlinedResponses": {"inlinedResponses": answers}}
        return 200, {}, {"name": f"batches/{name}", "done": True, "metadata": {"state": state, "output": output}}
