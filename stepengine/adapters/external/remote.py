"""
An agent on another stepengine server, run over the HTTP API of ``stepengine serve``.

The remote run is started with an idempotency key made from the call. Its events are read, its questions are answered, and it is cancelled
with the call. No state is stored here between calls: a repeated call with the same key finds the same run.

Must not be here: the server's own code. Replies are untrusted, and their shape is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self
from urllib.parse import urlsplit

import attrs
import jiter
from attrs import frozen

from stepengine.adapters.external.turns import (
    ENTRY_CHARS,
    NAME_CHARS,
    OPEN_ASKS,
    QUESTION,
    TurnOutput,
    finish_shielded,
    get_dict_or_empty,
    list_dicts,
    make_external_handler,
    make_failed_result,
    make_permission_input,
    make_permission_tools,
    make_shown_input,
    permission_kind_from_category,
    shorten_json,
    shorten_text,
)
from stepengine.data.definition import AgentDefinition, InputSchema
from stepengine.data.hooks import StepContext
from stepengine.data.json import JsonDict, replace_lone_surrogates
from stepengine.data.messages import ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.data.usage import Usage
from stepengine.data.visible import cut_end
from stepengine.errors import DefinitionError, ExternalAgentError, ToolError
from stepengine.models._sse import SSEParser
from stepengine.models.keys import Secret, make_safe_excerpt, register_secret
from stepengine.runtime.logs import LOGGER
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import Tool
from stepengine.workspace.urls import is_loopback_host

if TYPE_CHECKING:
    import httpx2

Permissions = Literal["people", "policy"]

TOKEN_ENV = "STEPENGINE_REMOTE_TOKEN"  # noqa: S105  (the name of a variable)
AWAY_SECONDS = 60.0
CANCEL_SECONDS = 5.0
"""How long a server may take to hear that its run is cancelled."""
READ_SECONDS = 45.0
"""A server says something every 15 seconds, be it a comment."""
ANSWER_BYTES = 16 * 1024 * 1024
EVENT_BYTES = 16 * 1024 * 1024
"""The longest event, and the longest answer: the whole result of a tool is one."""
EVENT_ID = re.compile(r"[!-~]{0,1000}")
"""An id that the header `Last-Event-ID` can hold, which is sent when the client reconnects."""
FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
TAKEN_SECONDS = 10.0
"""How long a run may still show a question that was answered."""
MAX_AGAIN = 20
PROMPT = "What to do."
ENDED = ("completed", "failed", "cancelled", "max_steps", "truncated", "stranded")
OPEN = ("running", "suspended")
AWAY = (429, 502, 503, 504)
OK = (200, 202, 204)
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
PROBLEMS: Mapping[int, str] = {401: "auth_required", 403: "auth_required"}


@frozen(kw_only=True)
class _RemoteSettings:
    """The address, credentials and limits of a remote agent."""

    id: str
    url: str
    agent: str
    token: Secret | None
    token_env: str
    permissions: Permissions
    away_seconds: float


class RemoteAgent(AgentDefinition[Any]):
    """
    An agent on another server, run by ``stepengine serve`` or ``stepengine.server.app``.

    It is used like any agent: ``AgentCall``, ``Parallel``, ``spawn_agents``, ``Start``, ``engine.run``. Prompt, params and output are
    those of the remote agent. A turn is one recorded effect with the agent's texts and calls, so a replay needs no server. Its tokens
    and cost count as the run's. Questions of the remote run become questions of this run, and the answers are sent back. Cancelling the
    call cancels the remote run.

    The remote run is started with an idempotency key made from the call. A call that is repeated after a crash finds its run, within
    the day for which a server stores keys.

    Args:
        id: The agent's id here, at most 56 characters.
        url: The URL of the server, such as ``"https://agents.example.com"``, with the path below which it is mounted.
        token: The server's token, with the scopes ``run``, ``read`` and ``answer``; by default the value of the environment variable
            *token_env* at the time of the call. Journals, events and messages never contain it.
        token_env: The name of that variable.
        agent: The agent's id on the server; *id* by default.
        description: The description for other agents.
        permissions: Who decides permission requests that the server's policy leaves to a person: ``"people"``, as questions of this
            run, or ``"policy"``: rules, hooks and people decide them as calls of ``ID_edit``, ``ID_execute``, ``ID_read``, ``ID_fetch``
            or ``ID_other``, which an engine without a policy allows.
        allow_http: Whether the token may be sent over plain HTTP to another machine.
        away_seconds: The most seconds that the server may be unreachable before the call fails.
        timeout: The most seconds of a turn; ``None`` for no limit.
        **fields: Other fields of ``AgentDefinition``, such as ``input_schema``, ``hooks`` and ``limits``.

    Raises:
        DefinitionError: For an invalid URL, token or other option.
    """

    __slots__ = ()

    def __init__(
        self,
        id: str,
        *,
        url: str | None = None,
        token: str | Secret | None = None,
        token_env: str = TOKEN_ENV,
        agent: str = "",
        description: str = "",
        permissions: Permissions = "people",
        allow_http: bool = False,
        away_seconds: float = AWAY_SECONDS,
        timeout: float | None = None,
        **fields: Any,
    ) -> None:
        if url is not None:
            _require_valid_options(id, url, permissions, away_seconds, allow_http=allow_http)
            secret = Secret(_validate_token(id, token)) if isinstance(token, str) else token
            settings = _RemoteSettings(
                id=id, url=url.rstrip("/"), agent=agent or id, token=secret, token_env=token_env, permissions=permissions,
                away_seconds=away_seconds,
            )  # fmt: skip
            params = {"type": "object", "additionalProperties": True}
            fields = {
                "input_schema": InputSchema(prompt=PROMPT, params=params),
                **fields,
                "tools": [_make_turn_tool(settings, timeout), *make_permission_tools(id)],
                "handle_steps": make_external_handler(
                    id, _make_first_turn_input, itemgetter("output"), carried=("run", "place")
                ),
            }
        elif "handle_steps" not in fields:  # `attrs.evolve` makes one of its fields
            msg = f"agent {id!r}: a RemoteAgent needs its server, such as url='https://agents.example.com'"
            raise DefinitionError(msg)
        super().__init__(id, description=description, **fields)


def _require_valid_options(
    id: object, url: object, permissions: object, away_seconds: float, *, allow_http: bool
) -> None:
    """Raise ``DefinitionError`` for invalid options of a remote agent."""
    problem = _find_url_problem(url, allow_http=allow_http)
    if problem:
        pass
    elif permissions not in ("people", "policy"):
        problem = f"permissions must be 'people' or 'policy', not {permissions!r}"
    elif not away_seconds > 0:
        problem = f"away_seconds must be more than 0, not {away_seconds!r}"
    elif not isinstance(id, str) or len(id) > NAME_CHARS:
        problem = (
            f"the id of a remote agent must have at most {NAME_CHARS} characters, because tool names start with it"
        )
    if problem:
        msg = f"agent {id!r}: {problem}"
        raise DefinitionError(msg)


def _find_url_problem(url: object, *, allow_http: bool) -> str:
    """Return why an address cannot be that of a server, with advice; ``""`` if it can."""
    fine = "use one such as 'https://agents.example.com'"
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        host, _ = parts.hostname, parts.port
    except ValueError:
        return f"its url cannot be read; {fine}"
    if parts.scheme not in ("http", "https") or not host:
        return f"its url is not the address of a server; {fine}"
    if parts.query or parts.fragment or "@" in parts.netloc:
        return f"its url has a query, a fragment or a user name; {fine}, and pass the token as token="
    if parts.scheme == "http" and not (allow_http or is_loopback_host(host)):
        return (
            f"{host!r} is another machine, and http sends the token unencrypted; use https://, or pass allow_http=True"
        )
    return ""


def _validate_token(id: str, token: str) -> str:
    """Return *token* without surrounding blanks; raise ``DefinitionError`` if it is empty or has invalid characters."""
    token = token.strip()
    if not token or not (token.isascii() and token.isprintable()) or " " in token:
        msg = f"agent {id!r}: its token is empty or has invalid characters; `stepengine tokens add` creates a token"
        raise DefinitionError(msg)
    return token


# --- the run ----------------------------------------------------------------------------------------------------------


def _make_first_turn_input(ctx: StepContext) -> dict[str, Any]:
    """Return the prompt and params of a run; params that are empty or no mapping are ``None``."""
    given = ctx.params
    return {"prompt": ctx.prompt, "params": dict(given) if isinstance(given, Mapping) and given else None}


# --- a turn -----------------------------------------------------------------------------------------------------------


def _make_turn_tool(settings: _RemoteSettings, timeout: float | None) -> Tool[Any, Any]:
    """Return the tool whose calls run the turns of a remote agent."""
    schema = {
        "type": "object",
        "properties": {
            "prompt": {"type": "string"},
            "params": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "run": {"type": "string"},
            "place": {"type": "string"},
            "answers": {"type": "array", "items": {"type": "object"}},
        },
        "additionalProperties": False,
    }

    async def run_turn(ctx: ToolContext, input: JsonDict) -> ToolResult:
        """Run a turn on the server, and return its output; a failure becomes a failed result, and ends the remote run."""
        said = TurnOutput()
        said.start_call_output(ctx)
        turn: _RemoteRun | None = None
        try:
            async with _ServerClient(settings) as server:
                turn = _RemoteRun(settings, server, said)
                return await turn.run_until_question(ctx, input)
        except ExternalAgentError as error:
            if turn is not None and turn.is_running:
                await turn.cancel()  # nobody would ask for what it does
            return make_failed_result(error)
        except BaseException:
            if turn is not None:
                await finish_shielded(turn.cancel())
            raise
        finally:
            said.end_unfinished_calls()

    return Tool(
        settings.id,
        f"Has the remote agent {settings.id} do something, and gives what came of it.",
        schema,
        run_turn,
        category="network",
        # Again it finds its run by its key: what it does there is not done twice.
        annotations=ToolAnnotations(idempotent=True, destructive=True, open_world=True),
        requires_permission=False,
        # The answers of a turn repeat what was asked about, which was judged by itself.
        about=(),
        timeout=math.inf if timeout is None else timeout,
    )


class _RemoteRun:
    """A run on another server, from its start or an answer to its end or next question."""

    def __init__(self, settings: _RemoteSettings, server: _ServerClient, said: TurnOutput) -> None:
        self._settings = settings
        self._server = server
        self._said = said
        self._run = ""
        self._place = ""
        self._start: dict[str, Any] | None = None
        self._is_found = False
        self._is_over = False
        self._completed_texts: set[tuple[str, int, str]] = set()
        self._kinds: dict[str, str] = {}
        self._answered: dict[str, float] = {}

    @property
    def is_running(self) -> bool:
        """Whether the run was started and is not known to have ended."""
        return bool(self._run) and not self._is_over

    async def run_until_question(self, ctx: ToolContext, input: Mapping[str, Any]) -> ToolResult:
        """Start or answer the run, and return its output up to its end or next question."""
        answers = input.get("answers")
        if answers is None:
            await self._start_or_find_run(ctx, input)
        else:
            self._run, self._place = input["run"], input["place"]
            for answer in answers:
                await self._send_answer(answer)
        pause = FIRST_PAUSE
        while True:
            before = self._place
            heard = await self._record_events_until_question()
            view = await self._fetch_run()
            if view["status"] == "cancelled" and self._is_found:
                # Its end was still on its way when it was found: it was cancelled with the run that led it.
                await self._start_or_find_run(ctx, input)
                continue
            if view["status"] in ENDED:
                self._is_over = True
                return self._make_final_result(view)
            if asks := await self._deny_oversized_and_list_asks(view, has_more_events=self._place != before):
                self._said.emit_full_text()
                told: Any = {
                    "asks": asks,
                    "run": self._run,
                    "place": self._place,
                    "transcript": self._said.drain_record(),
                }
                return ToolResult.json(told)
            pause = FIRST_PAUSE if heard else min(2 * pause, LAST_PAUSE)
            await asyncio.sleep(pause)

    # --- what is said to it -------------------------------------------------------------------------------------------

    async def _start_or_find_run(self, ctx: ToolContext, input: Mapping[str, Any]) -> None:
        """Start a run, or find the run of an earlier start with the same key; cancelled runs are skipped."""
        body = {"agent": self._settings.agent, "prompt": input.get("prompt") or ""}
        if input.get("params"):
            body["params"] = input["params"]
        for again in range(MAX_AGAIN):
            # Whoever resumes a run that was cancelled has its remote run cancelled, too, and starts another.
            self._start = {"body": body, "key": f"{ctx.idempotency_key}-{again}"}
            self._place, self._completed_texts = "", set()
            self._is_found = not await self._send_run_start()
            if not self._is_found or (await self._fetch_run())["status"] != "cancelled":
                return
        msg = f"the run of {self._settings.id!r} was cancelled {MAX_AGAIN} times; start a new run"
        raise ExternalAgentError(msg, kind="failed")

    async def _send_run_start(self) -> bool:
        """Send the start, store the id of the run, and return whether the server started a new one."""
        assert self._start is not None  # noqa: S101
        start = self._start
        made = await self._server.send_request(
            "POST", "/runs", start["body"], headers={"idempotency-key": start["key"]}
        )
        run, is_new = made.get("run_id"), made.get("is_new")
        if not isinstance(run, str) or RUN_ID.fullmatch(run) is None or not isinstance(is_new, bool):
            self._server.raise_invalid_reply("POST /runs returned no run id")
        self._run = run
        return is_new

    async def _send_answer(self, entry: Mapping[str, Any]) -> None:
        """Send the answer in *entry* to the server; raise if the server rejects it and the question is still open."""
        name = entry["id"]
        answer = entry.get("answer", entry.get("allowed"))
        told: Any = {"declined": True} if answer == "" else answer
        refused = await self._server.send_request(
            "POST", f"/runs/{self._run}/answers", {"answers": {name: told}}, accepted_errors=(409, 404)
        )
        self._answered[name] = asyncio.get_running_loop().time()
        if refused.get("type") == "urn:stepengine:problem:answer_rejected" and name in [
            one.get("id") for one in list_dicts(refused.get("open"))
        ]:
            # It is open, and this is no answer to it: to ask about it again would go on for ever.
            msg = f"{self._settings.id!r} rejected the answer to {name!r}: {shorten_text(refused.get('detail'))}"
            raise ExternalAgentError(_clean_text(msg), kind="failed")

    async def cancel(self) -> None:
        """Cancel the run on the server. If the reply to its start is missing, request the start again to learn its id."""
        if not self._run and self._start is None:
            return
        with contextlib.suppress(ExternalAgentError, TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS), _ServerClient(self._settings) as self._server:
                if not self._run:
                    await self._send_run_start()
                body = {"reason": "the run that called it was cancelled"}
                await self._server.send_request("POST", f"/runs/{self._run}/cancel", body, accepted_errors=(404, 409))

    # --- what it says -------------------------------------------------------------------------------------------------

    async def _fetch_run(self) -> Mapping[str, Any]:
        """Fetch the run from the server; raise an error for a reply without status and questions."""
        view = await self._server.send_request("GET", f"/runs/{self._run}")
        if view.get("status") not in (*ENDED, *OPEN) or not isinstance(view.get("questions"), list):
            self._server.raise_invalid_reply(f"a run with the status {view.get('status')!r:.60}")
        return view

    async def _record_events_until_question(self) -> bool:
        """Emit and record events until the run asks or ends or the stream ends; return whether there were any."""
        heard = False
        async with contextlib.aclosing(self._server.stream_events(f"/runs/{self._run}/events", self._place)) as events:
            async for place, event in events:
                heard = True
                self._place = place or self._place
                if self._emit_and_record_event(event["type"], event):
                    break
        return heard

    def _emit_and_record_event(self, kind: str, event: Mapping[str, Any]) -> bool:
        """Emit and record the content of an event, and return True if the run has to be fetched."""
        match kind:
            case "question_asked" | "permission_requested" | "run_finished":
                name = get_dict_or_empty(event.get("question")).get("id")
                if isinstance(name, str):
                    self._kinds[name] = permission_kind_from_category(shorten_text(event.get("category"), 40))
                return True
            case "text_delta" | "thinking_delta" | "text_completed" | "thinking_completed":
                self._emit_and_record_text(kind, event)
            case "reply_discarded":
                self._discard_reply_texts(event)
            case "tool_started" | "tool_finished":
                self._emit_and_record_call(kind, event)
            case "todos_changed":
                self._emit_and_record_todos(event)
            case _:
                pass
        return False

    def _emit_and_record_text(self, kind: str, event: Mapping[str, Any]) -> None:
        """Emit and record a text of the agent itself. Texts of its children are ignored."""
        seq, text = event.get("seq"), event.get("text")
        if (
            event.get("path") != ""
            or not isinstance(seq, int)
            or not isinstance(text, str)
            or not self._said.chars_left
        ):
            return
        what = "text" if kind.startswith("text") else "thought"
        if not kind.endswith("completed"):
            self._said.emit_and_record_text(what, shorten_text(text, self._said.chars_left), reply=seq)
        elif (what, seq, text) not in self._completed_texts:
            self._completed_texts.add((what, seq, text))
            self._said.complete_text(what, text, reply=seq)

    def _discard_reply_texts(self, event: Mapping[str, Any]) -> None:
        """Remove the texts of a reply that was interrupted. Its retry has the same number."""
        seq = event.get("seq")
        if event.get("path") == "" and isinstance(seq, int):
            self._said.discard_reply(seq, shorten_text(event.get("model"), 100))

    def _emit_and_record_call(self, kind: str, event: Mapping[str, Any]) -> None:
        """Emit and record the start or the end of a tool call of the remote run."""
        call = shorten_text(event.get("tool_call_id"))
        if not call:
            return
        result = get_dict_or_empty(event.get("result"))
        given = event.get("input")
        status = "" if kind == "tool_started" else "completed" if result.get("status") in (None, "ok") else "failed"
        kept = {"input": shorten_json(given)} if kind == "tool_started" and given else {}
        self._said.emit_and_record_call(
            f"{shorten_text(event.get('path'), 100)}/{call}",
            name=shorten_text(event.get("tool_name"), 100) or "other",
            category=shorten_text(event.get("category"), 40),
            title=shorten_text(event.get("tool_name"), 100),
            status=status,
            input=make_shown_input(shorten_text(event.get("tool_name"), 100), get_dict_or_empty(given))
            if given
            else {},
            kept=kept,
            output=_format_tool_result(result) if kind == "tool_finished" else "",
        )

    def _emit_and_record_todos(self, event: Mapping[str, Any]) -> None:
        """Emit and record the todos of the remote agent as its plan; those of its children are ignored."""
        todos = list_dicts(event.get("todos"))[:200]
        if event.get("path") == "":
            self._said.emit_and_record_plan(
                [{"task": shorten_text(one.get("task")), "completed": one.get("completed") is True} for one in todos]
            )

    # --- what comes of it ---------------------------------------------------------------------------------------------

    async def _deny_oversized_and_list_asks(
        self, view: Mapping[str, Any], *, has_more_events: bool
    ) -> list[dict[str, Any]]:
        """
        Return the open questions as requests of the turn, without just answered ones; deny permissions that are too long.

        None are returned while the event of a permission request was not read: our rules judge the request by its category.
        """
        found, judges = self._list_open_questions(view), self._settings.permissions == "policy"
        if judges and has_more_events and any(one.get("tool_name") and one["id"] not in self._kinds for one in found):
            return []
        asks = []
        for one in found:
            # Without a category no rule would know the tool, so a person is asked.
            kind = self._kinds.get(one["id"], "") if judges and one.get("tool_name") else ""
            try:
                asks.append(_make_permission_ask(one, kind) if kind else _make_person_ask(one))
            except ToolError as error:
                LOGGER.warning("a permission request of %r was denied: %s", self._settings.id, error.message)
                await self._send_answer({"id": one["id"], "allowed": False})
        return asks

    def _list_open_questions(self, view: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the open questions except just answered ones, and drop the kinds of closed ones; raise for one without an id."""
        now = asyncio.get_running_loop().time()
        found, listed = [], list_dicts(view["questions"])
        names = [one.get("id") for one in listed]
        self._kinds = {name: kind for name, kind in self._kinds.items() if name in names}
        for one in listed[:OPEN_ASKS]:
            name = one.get("id")
            if not isinstance(name, str) or not name or len(name) > ENTRY_CHARS:
                self._server.raise_invalid_reply("a question without an id")
            if now - self._answered.get(name, -math.inf) > TAKEN_SECONDS:
                found.append(one)
        return found

    def _make_final_result(self, view: Mapping[str, Any]) -> ToolResult:
        """Return the output, usage and cost of an ended run; a failed result unless it completed."""
        self._said.emit_full_text()
        spent = {"usage": _parse_usage(view.get("usage")), "cost": _parse_cost(view.get("cost_usd"))}
        if view["status"] != "completed":
            why = shorten_text(view.get("error")) or "it did not say why"
            msg = (
                f"the run {self._run} of {self._settings.id!r} at {self._settings.url} ended as {view['status']}: {why}"
            )
            return make_failed_result(ExternalAgentError(_clean_text(msg), kind="failed"), **spent)
        data: Any = {
            "output": view.get("output"),
            "text": shorten_text(view.get("text"), ANSWER_BYTES),
            "run": self._run,
            "transcript": self._said.drain_record(),
        }
        return ToolResult.json(data, **spent)


def _make_permission_ask(question: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return an open question of the remote run as a permission request for the policy; raise ``ToolError`` if it is too long."""
    given = make_permission_input(_make_call_title(question), get_dict_or_empty(question.get("details")))
    return {"id": replace_lone_surrogates(question["id"]), "kind": kind, "input": given}


def _make_person_ask(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return an open question of the remote run as a question to a person."""
    tool, details = shorten_text(question.get("tool_name"), 200), question.get("details")
    options = [shorten_text(option) for option in question.get("options") or () if isinstance(option, str)][:100]
    options = list(dict.fromkeys(filter(None, options)))
    if len(options) == 1:
        options = []
    asked: dict[str, Any] = {
        "text": shorten_text(question.get("text"), ENTRY_CHARS)
        or (f"May {tool} run?" if tool else "A question without text"),
        "options": options,
        "multi_select": bool(options) and question.get("multi_select") is True,
        # A number may be an answer beside options, and a permission is refused with a text.
        "allow_text": bool(options) and (question.get("allow_text") is True or bool(tool)),
    }
    if tool:
        asked["details"] = make_shown_input(_make_call_title(question), get_dict_or_empty(details))
    elif details is not None:
        asked["details"] = {"details": shorten_json(details)}
    return {"id": replace_lone_surrogates(question["id"]), "kind": QUESTION, "input": asked}


def _make_call_title(question: Mapping[str, Any]) -> str:
    """Return the action that the preview of a call names; else a text with the name of its tool."""
    parts = [part.get("value") for part in list_dicts(question.get("preview_parts")) if part.get("kind") == "action"]
    return shorten_text(next(iter(parts), "")) or f"Call {shorten_text(question.get('tool_name'), 200)}"


def _clean_text(text: str) -> str:
    """Return untrusted text in a printable form for messages."""
    return make_safe_excerpt(replace_lone_surrogates(text), 4_000)


def _format_tool_result(result: Mapping[str, Any]) -> str:
    parts = list_dicts(result.get("parts")) or list_dicts(result.get("content"))
    said = [
        shorten_text(one.get("text"), ENTRY_CHARS) or shorten_json(one["value"])
        for one in parts
        if one.get("text") or "value" in one
    ]
    return cut_end("\n".join(filter(None, said)), ENTRY_CHARS)


def _parse_usage(usage: object) -> Usage | None:
    """Return the token usage that a server reported."""
    given = get_dict_or_empty(usage)
    names = [field.name for field in attrs.fields(Usage) if field.name != "at_least"]
    counted = {name: given[name] for name in names if type(given.get(name)) is int and 0 <= given[name] < 2**53}
    return Usage(**counted, at_least=given.get("at_least") is True) if counted else None


def _parse_cost(cost: object) -> Decimal | None:
    """Return a cost that a server reported in US dollars; ``None`` if it is invalid."""
    with contextlib.suppress(InvalidOperation, ValueError):
        amount = Decimal(cost[:40]) if isinstance(cost, str) else None
        return amount if amount is not None and amount.is_finite() and amount >= 0 else None
    return None


# --- the server -------------------------------------------------------------------------------------------------------


class _ServerClient:
    """A client of a stepengine server; checks the size and shape of each reply."""

    def __init__(self, settings: _RemoteSettings) -> None:
        self._settings = settings
        self._client: httpx2.AsyncClient | None = None
        self._last_seen = 0.0
        self._was_seen = False

    async def __aenter__(self) -> Self:
        import httpx2

        from stepengine.models._transport import decompress_and_limit_response, get_ssl_context

        settings, token = self._settings, self._require_token()
        register_secret(settings.id, token, "token")
        timeout = httpx2.Timeout(connect=10.0, read=READ_SECONDS, write=60.0, pool=60.0)
        headers = {"authorization": f"Bearer {token.reveal()}", "accept-encoding": "identity"}
        self._client = httpx2.AsyncClient(
            headers=headers, timeout=timeout, verify=get_ssl_context(), event_hooks={"response": [decompress_and_limit_response]},
            # A proxy of the environment would see what goes over plain HTTP.
            follow_redirects=False, trust_env=settings.url.startswith("https:"),
        )  # fmt: skip
        self._last_seen = asyncio.get_running_loop().time()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._client is not None  # noqa: S101
        await self._client.aclose()

    def _require_token(self) -> Secret:
        """Return the token of the settings or of the environment; raise an error if it is missing or invalid."""
        settings = self._settings
        if settings.token is not None:
            return settings.token
        found = os.environ.get(settings.token_env, "")
        if not found.strip():
            msg = (
                f"there is no token for {settings.id!r}: pass RemoteAgent(token=...), or set the environment variable "
                f"{settings.token_env}"
            )
            raise ExternalAgentError(msg, kind="auth_required")
        try:
            return Secret(_validate_token(settings.id, found))
        except DefinitionError as error:
            raise ExternalAgentError(error.message, kind="auth_required") from None

    def raise_invalid_reply(self, problem: str) -> NoReturn:
        msg = f"{self._settings.url} is not a stepengine server, or has an incompatible version: {problem}"
        raise ExternalAgentError(_clean_text(msg), kind="protocol") from None

    # --- questions and answers ----------------------------------------------------------------------------------------

    async def send_request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] = {},
        accepted_errors: Sequence[int] = (),
    ) -> Mapping[str, Any]:
        """
        Send a request, retry while the server is unreachable, and return its reply; *accepted_errors* are no failures.

        Raises:
            ExternalAgentError: If the server refuses the request, is unreachable too long, or sends an invalid reply.
        """
        import httpx2

        assert self._client is not None  # noqa: S101
        pause = FIRST_PAUSE
        while True:
            why = ""
            try:
                given: dict[str, Any] = {} if body is None else {"json": body}
                async with self._client.stream(
                    method, f"{self._settings.url}{path}", headers=headers, **given
                ) as response:
                    if response.status_code not in AWAY:
                        content = await self._read_capped_content(response)
                        self._record_contact()
                        return self._parse_reply(f"{method} {path}", response, content, accepted_errors)
                    why = f"it answered {response.status_code}"
            except httpx2.TransportError as error:
                why = type(error).__name__
            except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
                self.raise_invalid_reply(f"{type(error).__name__} for {method} {path}")
            pause = await self._wait_before_retry(why, pause)

    async def _read_capped_content(self, response: httpx2.Response) -> bytes:
        """Return the content of a response; raise an error if it is too large."""
        found = bytearray()
        async for piece in response.aiter_raw():
            found += piece
            if len(found) > ANSWER_BYTES:
                self.raise_invalid_reply(f"an answer of more than {ANSWER_BYTES:,} bytes")
        return bytes(found)

    def _parse_reply(
        self, request: str, response: httpx2.Response, content: bytes, accepted_errors: Sequence[int]
    ) -> Mapping[str, Any]:
        """Return the JSON object of a reply; raise an error for a redirect, a refusal or another content."""
        status = response.status_code
        if 300 <= status < 400:  # noqa: PLR2004
            where = shorten_text(response.headers.get("location"), 200)
            msg = f"{self._settings.url} redirects {request} to {where!r}; the token is not sent there: pass that address as url="
            raise ExternalAgentError(_clean_text(msg), kind="protocol")
        told: Any = None
        with contextlib.suppress(ValueError):
            told = jiter.from_json(content, allow_inf_nan=False)
        if status in OK and isinstance(told, dict):
            return told
        if status in OK:
            self.raise_invalid_reply(f"{request} was answered by {status} without a JSON object")
        if status in accepted_errors:
            return get_dict_or_empty(told)
        detail = shorten_text(get_dict_or_empty(told).get("detail")) or f"it answered {status}"
        msg = f"{self._settings.url} refused {request} for {self._settings.id!r}: {detail}"
        raise ExternalAgentError(
            _clean_text(msg), kind=PROBLEMS.get(status, "start" if request == "POST /runs" else "failed")
        )

    def _record_contact(self) -> None:
        """Store the time of the last contact with the server."""
        self._last_seen, self._was_seen = asyncio.get_running_loop().time(), True

    async def _wait_before_retry(self, why: str, pause: float) -> float:
        """Wait before a retry, and return the next waiting time; raise an error if the server is away too long."""
        if asyncio.get_running_loop().time() - self._last_seen > self._settings.away_seconds:
            msg = (
                f"{self._settings.url} was unreachable for {self._settings.away_seconds:g} s ({why}); the run of "
                f"{self._settings.id!r} may continue there"
            )
            raise ExternalAgentError(_clean_text(msg), kind="ended" if self._was_seen else "start")
        await asyncio.sleep(pause)
        return min(2 * pause, LAST_PAUSE)

    # --- events -------------------------------------------------------------------------------------------------------

    async def stream_events(self, path: str, after: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]]]:
        """Yield the events after *after*, each with its id, until the stream ends or breaks."""
        import httpx2

        assert self._client is not None  # noqa: S101
        headers = {"accept": "text/event-stream", **({"last-event-id": after} if after else {})}
        try:
            async with self._client.stream("GET", f"{self._settings.url}{path}", headers=headers) as response:
                if response.status_code in (*AWAY, 204):
                    return
                if response.status_code != 200 or "event-stream" not in response.headers.get("content-type", ""):  # noqa: PLR2004
                    self._parse_reply(f"GET {path}", response, await self._read_capped_content(response), ())
                    self.raise_invalid_reply("events that are not an event stream")
                async for place, event in self._parse_event_stream(response):
                    yield place, event
        except httpx2.TransportError:
            return
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            self.raise_invalid_reply(f"{type(error).__name__} in the events")

    async def _parse_event_stream(self, response: httpx2.Response) -> AsyncGenerator[tuple[str, Mapping[str, Any]]]:
        """Yield the events of a response with their ids; raise an error for an invalid or too large one."""
        parser, waiting = SSEParser(), 0
        async for piece in response.aiter_raw():
            self._record_contact()
            # One line at a time: each event has its own id.
            for line in piece.splitlines(keepends=True):
                waiting += len(line)
                if waiting > EVENT_BYTES:
                    self.raise_invalid_reply(f"an event of more than {EVENT_BYTES:,} bytes")
                for _, data in parser.feed(line):
                    waiting = 0
                    if EVENT_ID.fullmatch(parser.id) is None:
                        self.raise_invalid_reply("an event id with invalid characters")
                    yield parser.id, self._parse_event(data)

    def _parse_event(self, data: bytes) -> Mapping[str, Any]:
        """Parse an event; raise an error unless it is a JSON object with a type."""
        told: Any = None
        with contextlib.suppress(ValueError):
            told = jiter.from_json(data, allow_inf_nan=False)
        if not isinstance(told, dict) or not isinstance(told.get("type"), str):
            self.raise_invalid_reply("an event that is not a JSON object with a type")
        return told
