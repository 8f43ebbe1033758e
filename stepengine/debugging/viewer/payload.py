"""
A journal as the JSON data of the page.

Every text of a page is stored once and cleaned. A redactor replaces all kinds of secrets, regardless of the journal's own rules, and
control characters become escapes. The page resolves numbers to texts and rebuilds requests from their slices, as ``History`` does.

``RunPayload.add_new_records`` adds only the records that it has not seen, so a running run is followed by calling it again.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeAlias, assert_never

import attrs

from stepengine.data.codec import decode_stored, encode_stored, plain
from stepengine.data.effects import KINDS
from stepengine.data.json import compact, thaw
from stepengine.data.media_types import IMAGES, find_media_type
from stepengine.data.messages import (
    AssistantMessage,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    Message,
    OpaquePart,
    Part,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    ToolResult,
)
from stepengine.data.models import ModelReply
from stepengine.data.origins import describe_origin, redact_origin, sort_origins
from stepengine.data.outcomes import Failure
from stepengine.data.questions import Answer
from stepengine.data.state import ChildResult
from stepengine.data.usage import Spending, Usage, add_cost
from stepengine.data.visible import visible
from stepengine.journal.history import History
from stepengine.journal.origins import RecordedSources
from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.programs import find_program_text
from stepengine.journal.recorded_requests import list_initial_messages
from stepengine.journal.records import (
    INPUTS,
    ROOT,
    UNKNOWN_INPUT,
    Address,
    Input,
    Intent,
    Record,
    Result,
    format_address,
)
from stepengine.journal.show import ABOUT, find_root_end, get_run_id, get_run_status
from stepengine.redaction import make_redactor
from stepengine.runtime.performer import child_path

Form: TypeAlias = dict[str, Any]

FORMAT = "stepengine.view/1"
NOT_RECORDED = (
    "streamed text deltas (only whole replies are recorded)",
    "events, progress and log lines, and ctx.notify messages",
    "source lines, local variables and changes by hooks: they come from a replay with the agent's code",
    "HTTP bodies",
)
"""The data that no journal has, as the page lists it."""
GIVEN: Mapping[str, tuple[str, ...]] = {"agent_call": ("prompt", "params"), "perform": ("args", "kwargs")}
"""The members of a record that the page shows as the input of an effect; all, if there is no entry."""
SAID: Mapping[type[Any], str] = {
    TextPart: "text",
    ToolReferencePart: "text",
    ThinkingPart: "thinking",
    RefusalPart: "refusal",
}
ORDINARY = re.compile(r"[\n\t -~]*")
MAX_SAFE = 2**53 - 1
"""A browser shows whole numbers beyond this, such as ids of messages, with other digits; as texts they keep theirs."""
MAX_ORIGINS = 50
"""The most arguments of a call whose origins the page shows, untrusted ones first."""
MAX_IMAGE = 2 * 1024 * 1024


def _escape_invisible(text: str) -> str:
    """Return a text with control and invisible characters as escapes; line ends stay, with CRLF as LF."""
    if ORDINARY.fullmatch(text):
        return text
    return "\n".join(
        [line if ORDINARY.fullmatch(line) else visible(line) for line in text.replace("\r\n", "\n").split("\n")]
    )


class PageTexts:
    """
    The texts of a page, each stored once under a number.

    Args:
        longest: The number of characters to which a long text is cut, half of them at its end; ``None`` for no limit. Texts without
            *show_command* are never cut.
    """

    def __init__(self, longest: int | None = None) -> None:
        self.all: list[Any] = []
        self.images: list[str] = []
        self.longest = longest
        self._numbers: dict[bytes, int] = {}
        self._pictures: dict[str, int] = {}
        self._redactor = make_redactor("all", os.environ)

    def clean(self, value: object) -> Any:
        """Return a JSON value with secrets redacted, control characters escaped, and integers beyond 2**53 - 1 as texts."""
        if isinstance(value, str):
            return self._make_displayable(self._redactor.text(value))
        written = compact(value)
        return self._make_displayable(
            self._redactor.value(value) if self._redactor.may_contain_secret(written) else value
        )

    def _make_displayable(self, value: object) -> object:
        """Return a JSON value with invisible characters escaped, and integers beyond 2**53 - 1 as texts."""
        if isinstance(value, str):
            return _escape_invisible(value)
        if isinstance(value, Mapping):
            return {_escape_invisible(k): self._make_displayable(v) for k, v in value.items()}
        if isinstance(value, int) and abs(value) > MAX_SAFE:
            return str(value)
        return [self._make_displayable(v) for v in value] if isinstance(value, list | tuple) else value

    def add(self, value: Any, *, show_command: str = "") -> int:
        """
        Store a JSON value, cleaned, and return the number of its entry; equal values share one.

        Args:
            value: A JSON value.
            show_command: The command that shows a cut text in full; without it, nothing is cut.
        """
        key = hashlib.blake2b(
            f"{show_command and self.longest}{compact(value)}".encode(errors="replace"), digest_size=16
        ).digest()
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self.all)
            clean = self.clean(value)
            self.all.append(
                self._cut_long_texts(clean, show_command) if self.longest is not None and show_command else clean
            )
        return known

    def _cut_long_texts(self, value: object, show_command: str) -> object:
        """Return a JSON value with the middle of long texts replaced by a note with *show_command*, the command that shows them in full."""
        if isinstance(value, str):
            longest = self.longest or 0
            if len(value) <= longest:
                return value
            left = len(value) - longest
            return f"{value[: longest // 2]}\n... {left:,} characters left out; {show_command} shows them ...\n{value[-(longest // 2) :]}"
        if isinstance(value, Mapping):
            return {k: self._cut_long_texts(v, show_command) for k, v in value.items()}
        return [self._cut_long_texts(v, show_command) for v in value] if isinstance(value, list) else value

    def add_parts(self, parts: Iterable[Part], *, show_command: str = "") -> int:
        """Store the parts of a message, reply or result as one entry without call ids, and return the number of the entry."""
        return self.add([self._part_to_json(p) for p in parts], show_command=show_command)

    def _part_to_json(self, part: Part) -> Form:
        """Return a part of a message as JSON, without its call id; data of pictures are stored."""
        match part:
            case ToolCallPart():
                if part.input_error is None:
                    return {"call": part.tool_name, "input": thaw(part.input)}
                return {"call": part.tool_name, "unreadable": part.raw_input or "", "why": part.input_error}
            case TextPart() | ThinkingPart() | RefusalPart() | ToolReferencePart():
                return {SAID[type(part)]: part.text}
            case JsonPart():
                return {"json": thaw(part.value)}
            case ImagePart() | DocumentPart():
                return self._media_to_json(part)
            case OpaquePart():
                told = {name: said for name, said in (("tool", part.tool), ("said", part.text)) if said}
                return {"opaque": part.provider, **told, "data": thaw(part.data)}
            case CitationPart():
                cited = attrs.asdict(part, filter=lambda field, value: field.name != "url" and value != "")
                return {"cites": part.url or part.source, **cited}
            case _ as never:
                assert_never(never)

    def _media_to_json(self, part: ImagePart | DocumentPart) -> Form:
        """Return the description of a picture or document; the data of a small picture are stored, and the description has their number."""
        if part.data is None:
            where = f"at {part.url}" if part.file_id is None else f"file {part.file_id} of {part.provider}"
            return {"media": f"{part.mime_type} {where}"}
        told: Form = {"media": f"{part.mime_type}, {len(part.data):,} bytes"}
        kind = find_media_type(part.data)
        if kind in IMAGES and len(part.data) <= MAX_IMAGE:
            written = f"data:{kind};base64,{base64.b64encode(self._redactor.redact_binary(part.data)).decode()}"
            told["image"] = self._pictures.setdefault(written, len(self.images))
            self.images += [written] if told["image"] == len(self.images) else []
        return told


@attrs.define
class _OpenRun:
    """The state of one run while its records are read: its agent, current step and row."""

    agent: int
    last: int = 0
    """When its last effect ended; the start of its next one, since journals have the times of results alone."""
    step: int = 0
    row: int = -1
    wanted: int = 0
    ids: list[str] = attrs.Factory(list)
    """The ids of the calls in the step's row: at most as many as its reply requested."""


class RunPayload:
    """
    The page data of one run and its children.

    Args:
        texts: Stores the texts.
        file: The name of the journal in commands.

    Attributes:
        rows: The steps, the effects of handlers alone, and the inputs, in the order in which they started.
        agents: The runs of the tree and bodies of tools, in the order in which they started.
        lead: The number of the row of each effect, by address.
    """

    def __init__(self, texts: PageTexts, file: str) -> None:
        self.texts = texts
        self.file = file
        self.rows: list[Form] = []
        self.agents: list[Form] = []
        self.lead: dict[Address, int] = {}
        # The rows that each ``add_new_records`` added or changed.
        self._touched: list[set[int]] = []
        self.took = 0
        self._calls: dict[Address, Form] = {}
        self._runs: dict[str, _OpenRun] = {}
        self._done = 0
        self._models: set[str] = set()
        self._steps = 0
        self._series: dict[str, list[Any]] = {"row": [], "context": [], "cached": [], "cost": []}
        self._totals: list[Decimal | None] = []
        # The first index of the series that each ``add_new_records`` changed.
        self._changed: list[int] = []
        self._spent = Spending(usage=Usage(), cost=Decimal(0))
        self._history = History(())
        self._sources = RecordedSources()

    def add_new_records(self, history: History) -> None:
        """Add the records of *history* that were written since the last call."""
        self.took += 1
        self._history = history
        self._changed.append(len(self._totals))
        self._touched.append(set())
        for record in history.records[self._done :]:
            if isinstance(record, Intent):
                self._add_started_effect(history, record)
            elif isinstance(record, Result):
                self._add_effect_result(history, record)
            elif isinstance(record, Input):
                self._add_input_row(history, record)
            self._add_argument_origins(history, record)
        self._done = len(history.records)

    # --- effects ------------------------------------------------------------------------------------------------------

    def _add_started_effect(self, history: History, intent: Intent) -> None:
        """Add a row or a call for an effect that starts, and an entry for the child or tool body that it starts."""
        address = (intent.path, intent.seq)
        form = history.form(intent)
        if address == ROOT:
            self._add_started_run("", form)
            return
        run = self._runs[intent.path]
        if form["type"] == "model_call":
            run.step += 1
            # Before the row has a number: a request shares with earlier ones, never with itself.
            request = self._request_to_json(form, intent.path)
            self._append_effect_row(run, intent, "model").update(request)
            self._steps += 1
            self._models.add(request["model"])
            run.row, run.wanted, run.ids = len(self.rows) - 1, 0, []
            return
        call = self._call_to_json(run, intent, form)
        self._calls[address] = call
        if self._assign_to_reply_row(run, form):
            self.lead[address] = run.row
            self.rows[run.row]["calls"].append(call)
            self._mark_row_changed(run.row)
        else:
            self._append_effect_row(run, intent, call["kind"])["calls"].append(call)
        if intent.starts_child_or_body:
            call["child"] = path = child_path(intent.path, intent.seq)
            is_body = form["type"] == "tool_call"
            self._add_started_run(
                path, {"agent_id": form["tool_name"], "prompt": "", "params": form["input"]} if is_body else form
            )

    def _assign_to_reply_row(self, run: _OpenRun, effect: Mapping[str, Any]) -> bool:
        """
        Record the call id of an effect in the row of the last model reply if it belongs there; return whether it does.

        The record of a tool call has its source. Children and questions only have the id of their call, so the first ids count as
        requested, as many as the reply has calls.
        """
        if run.row < 0:
            return False
        if effect["type"] == "tool_call" and effect["source"] != "model":
            return bool(effect["source"] == "hook")
        known = effect.get("tool_call_id", "")
        if not known:
            return False
        if known not in run.ids:
            if len(run.ids) >= run.wanted:
                return False
            run.ids.append(known)
        return True

    def _append_effect_row(self, run: _OpenRun, intent: Intent, kind: str) -> Form:
        row: Form = {"n": run.step, "a": format_address(intent.path, intent.seq), "path": intent.path, "kind": kind}
        row |= {"agent": run.agent, "began": run.last, "calls": []}
        self.lead[intent.path, intent.seq] = len(self.rows)
        self._mark_row_changed(len(self.rows))
        self.rows.append(row)
        return row

    def _mark_row_changed(self, number: int) -> None:
        """Record that the current ``add_new_records`` added or changed a row."""
        self._touched[-1].add(number)

    def _request_to_json(self, effect: Mapping[str, Any], run_path: str) -> Form:
        """Store the texts of a model request, and return it as JSON with their numbers."""
        request = effect["request"]
        told: Form = {
            "model": self._clean_name(request["model"]),
            "m": [self._request_item_to_json(i, run_path) for i in request["messages"]],
        }
        if effect["purpose"] != "step":
            told["purpose"] = effect["purpose"]
        if request.get("system_prompt"):
            told["system"] = self.texts.add(request["system_prompt"])
        if request.get("tools"):
            told["tools"] = self.texts.add(plain(request["tools"]))
        if request.get("tool_choice") is not None:
            told["choice"] = self.texts.add(plain(request["tool_choice"]))
        settings = {k: v for k, v in plain(request.get("settings") or {}).items() if k != "type"}
        if settings:
            told["settings"] = self.texts.add(settings)
        if request.get("tail"):
            told["tail"] = [self._message_to_json(decode_stored(m)) for m in request["tail"]]
        return told

    def _request_item_to_json(self, item: Mapping[str, Any], run_path: str) -> Any:
        """Return a message, or a slice of an earlier request: the number of its row, the start and the end."""
        if item["type"] != "slice":
            return self._message_to_json(decode_stored(item))
        source = (item.get("path", run_path), item["seq"])
        return [self.lead.get(source, -1), item["start"], item["stop"]]

    def _message_to_json(self, message: Message) -> Form:
        """Store the parts of a message, and return its role, entry number, tool name and tags as JSON."""
        told: Form = {
            "role": message.role,
            "t": self.texts.add_parts(message.content, show_command=self._show_step_command),
        }
        if isinstance(message, ToolMessage):
            told |= {"name": self._clean_name(message.tool_name)}
            return told if message.status == "ok" else told | {"status": message.status}
        tags = [self._clean_name(t) for t in message.tags if t != "USER_PROMPT"]
        return told | {"tags": tags} if tags and not isinstance(message, AssistantMessage) else told

    @property
    def _show_step_command(self) -> str:
        """The command that shows a step in full, for notes about cut texts."""
        return f"`stepengine show {shlex.quote(self.file)} --step N`"

    def _clean_name(self, text: str) -> str:
        """Return a name with secrets redacted and all control characters escaped."""
        return visible(self.texts.clean(text), strict=True)

    def _call_to_json(self, run: _OpenRun, intent: Intent, effect: Mapping[str, Any]) -> Form:
        """Return an effect that calls no model as JSON: kind, address, start, name, stored input and program line."""
        row, about = KINDS[effect["type"]], ABOUT.get(effect["type"])
        call: Form = {"kind": row.verb, "a": format_address(intent.path, intent.seq), "began": run.last}
        if effect["type"] == "ask":
            questions = [decode_stored(q) for q in effect["questions"]]
            call["name"] = self._clean_name(", ".join([q.id for q in questions]))
            asked = [{"id": q.id, "text": q.text, "options": list(q.options)} for q in questions]
            call["input"] = self.texts.add(asked[0] if len(asked) == 1 else asked)
            if effect["purpose"] != "question":
                call["purpose"] = effect["purpose"]
        else:
            call["name"] = self._clean_name(effect[row.name] if about is None else about(effect))
            call["input"] = self.texts.add(_effect_input_to_json(effect))
        if effect.get("source") == "tool":
            call["by"] = "tool"
        if effect.get("tool_call_id"):
            call["id"] = self._clean_name(effect["tool_call_id"])
        if intent.gather is not None:
            call["together"] = intent.gather
        return call | _program_line_to_json(intent, effect)

    def _add_argument_origins(self, history: History, record: Record) -> None:
        """Add the origins of a call's arguments: sentences, each with whether its value is trusted; other records add nothing."""
        found = [
            origin for call in self._sources.add_record_and_trace_calls(history, record) for origin in call.origins
        ]
        if not found or not isinstance(record, Intent):
            return
        clean = [redact_origin(origin, self.texts.clean) for origin in sort_origins(found)[:MAX_ORIGINS]]
        said = [[describe_origin(origin), origin["trusted"]] for origin in clean]
        more = [[f"{len(found) - MAX_ORIGINS} more arguments", True]] if len(found) > MAX_ORIGINS else []
        self._calls[record.path, record.seq]["origins"] = self.texts.add([*said, *more])

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _add_effect_result(self, history: History, result: Result) -> None:
        """Add the outcome of an effect to its row or call; the result of the whole run ends the run."""
        address, at = (result.path, result.seq), history.compute_time_since_start(result.at)
        if result.seq == ROOT[1]:
            self._store_run_end(result.path, history.outcome(result), at)
            return
        run = self._runs[result.path]
        run.last = max(run.last, at)
        number = self.lead[address]
        self._mark_row_changed(number)
        row, outcome = self.rows[number], history.outcome(result)
        told = self._calls.get(address, row)
        told["at"] = at
        row["at"] = max(at, row.get("at", 0))
        told["began"] = min(told["began"], at)
        if result.attempts:
            told["attempts"] = self.texts.add([_error_to_json(_decode_error(a["error"])) for a in result.attempts])
        if outcome.inputs:
            row["inputs"] = [*row.get("inputs", ()), *[self._message_to_json(m) for m in outcome.inputs]]
        if isinstance(outcome, Failure):
            told["error"] = self.texts.add(_error_to_json(outcome.error))
            told["status"] = "error"
            self._store_run_end(child_path(*address), outcome, at)
            return
        value = outcome.value
        if isinstance(value, ModelReply):
            self._add_model_reply(row, run, number, value)
        else:
            told |= self._result_value_to_json(
                value, f"`stepengine show {shlex.quote(self.file)} --step '{told['a']}'`"
            )
            if isinstance(value, ChildResult) or (isinstance(value, ToolResult) and child_path(*address) in self._runs):
                self._store_run_end(child_path(*address), outcome, at)

    def _add_model_reply(self, row: Form, run: _OpenRun, number: int, reply: ModelReply) -> None:
        """Add a reply to its row, and its usage and cost to the chart data, the totals and the agent."""
        row["replied"] = row["at"]
        row["reply"] = self.texts.add_parts(reply.content, show_command=self._show_step_command)
        row["stop"] = reply.stop_reason.value
        if reply.model is not None:
            row["answered"] = self._clean_name(reply.model)
        usage = reply.usage
        if usage is not None:
            row["usage"] = _token_counts(usage)
        row["cost"] = None if reply.cost is None else str(reply.cost)
        if run.row == number:
            run.wanted = len(reply.tool_calls) if row.get("purpose") is None else 0
        self._add_to_chart_data(number, row)
        spent = self._spent
        self._spent = Spending(usage=spent.usage + (usage or Usage()), cost=add_cost(spent.cost, reply.cost))
        agent = self.agents[run.agent]
        agent["steps"] += 1
        agent["tokens"] += 0 if usage is None else usage.total_tokens
        cost = add_cost(None if agent["cost"] is None else Decimal(agent["cost"]), reply.cost)
        agent["cost"] = None if cost is None else str(cost)

    def _result_value_to_json(self, value: object, show_command: str) -> Form:
        """Store the value of an effect without a model, and return its status and entry numbers as JSON."""
        if isinstance(value, ToolResult):
            told: Form = {
                "status": value.status,
                "result": self.texts.add_parts(value.content, show_command=show_command),
            }
            if value.side_effects:
                told["did"] = self.texts.add([f"{e.kind} {e.target}".rstrip() for e in value.side_effects])
            change = {} if value.change is None else tool_change_to_json(value.change)
            return told | {"change": self.texts.add(change)} if change else told
        if isinstance(value, ChildResult):
            return {
                "status": value.status.value,
                "result": self.texts.add(_result_to_parts(value), show_command=show_command),
            }
        if isinstance(value, tuple) and value and isinstance(value[0], Answer):
            answers = [{"text": a.value or "(declined)"} for a in value]
            return {"status": "ok", "result": self.texts.add(answers)}
        return {"status": "ok", "result": self.texts.add([{"json": plain(value)}], show_command=show_command)}

    def _add_started_run(self, run_path: str, start: Mapping[str, Any]) -> None:
        """Append an entry for a run of the tree, or the body of a tool, that starts now; *start* has its agent, prompt and parameters."""
        above = self._runs[run_path.rpartition(".")[0]] if run_path else None
        last = 0 if above is None else above.last
        self._runs[run_path] = _OpenRun(len(self.agents), last)
        parent = None if above is None else above.agent
        told: Form = {"id": self._clean_name(start["agent_id"]), "path": run_path, "parent": parent, "began": last}
        told |= {
            "steps": 0,
            "tokens": 0,
            "cost": "0",
            "status": "under way",
            "prompt": self.texts.add(start["prompt"]),
        }
        if start.get("params"):
            told["params"] = self.texts.add(plain(start["params"]))
        if start.get("background"):
            told["background"] = True
        self.agents.append(told)

    def _store_run_end(self, run_path: str, outcome: Any, ended_at: int) -> None:
        """Store end, status and output of the child or tool body at *run_path*; other paths are ignored."""
        known = self._runs.get(run_path)
        if known is None:
            return
        # A failure has no value. Only children and bodies of tools have an entry, and their results have a status.
        agent, value = self.agents[known.agent], getattr(outcome, "value", None)
        agent["at"] = ended_at
        is_done = isinstance(value, ToolResult) and not value.is_error  # of the body of a tool
        agent["status"] = value.status.value if isinstance(value, ChildResult) else "completed" if is_done else "failed"
        if isinstance(value, ChildResult):
            agent["output"] = self.texts.add(_result_to_parts(value))

    def _add_input_row(self, history: History, record: Input) -> None:
        """Append a row for an input, such as an answer or a message; some kinds have no row."""
        kind, at = str(record.input.get("type")), history.compute_time_since_start(record.at)
        if not INPUTS.get(kind, UNKNOWN_INPUT).is_shown:
            return
        run = self._runs[record.path]
        run.last = max(run.last, at)
        row: Form = {"n": run.step, "a": format_address(record.path, record.seq), "path": record.path, "kind": "input"}
        row |= {"agent": run.agent, "began": at, "at": at, "calls": [], "name": self._clean_name(kind)}
        row["input"] = self.texts.add({k: v for k, v in plain(record.input).items() if k != "type"})
        self._mark_row_changed(len(self.rows))
        self.rows.append(row)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def header_to_json(self) -> Form:
        """Return the header of the run: agent, status, numbers, input and output."""
        history = self._history
        root, head, add = history.root, history.head, self.texts.add
        ended = find_root_end(history)
        spending = self._spent if ended is None else ended.spending
        told: Form = {
            "file": self.file,
            "fork": f"stepengine fork {shlex.quote(self.file)}",
            "resume": f"stepengine resume {shlex.quote(self.file)}",
            "agent": self._clean_name(root["agent_id"]),
            "run": self._clean_name(get_run_id(history)),
            "status": self._clean_name(get_run_status(history)),
            "created": self._clean_name(history.started),
            "engine": "" if head is None else self._clean_name(head.engine),
            "parent": None if head is None or head.parent is None else self.texts.clean(plain(head.parent)),
            "models": sorted(self._models),
            "steps": self._steps,
            "effects": len(history.intents) - 1,
            "milliseconds": history.duration_ms,
            "usage": _token_counts(spending.usage),
            "cost": None if spending.cost is None else str(spending.cost),
            "prompt": add(root["prompt"]),
            "previous": [self._request_item_to_json(m, "") for m in list_initial_messages(root)],
            "ended": history.is_complete,
        }
        if root.get("params") is not None:
            told["params"] = add(plain(root["params"]))
        if ended is not None:
            told["output"] = add(_result_to_parts(ended), show_command=self._show_step_command)
        elif not history.is_complete:
            asked = [
                {"id": q.id, "text": q.text, "options": list(q.options)}
                for _, q in find_open_questions(history).values()
            ]
            told |= {"questions": add(asked)} if asked else {}
        return told

    def _add_to_chart_data(self, number: int, row: Form) -> None:
        """Insert the tokens of a reply into the chart data, in the order of rows, and recompute the cost so far from there on."""
        series, usage = self._series, row.get("usage")
        at = bisect_left(series["row"], number)
        series["row"].insert(at, number)
        series["context"].insert(at, None if usage is None else usage[0] + usage[2] + usage[3])
        series["cached"].insert(at, None if usage is None else usage[2])
        del self._totals[at:], series["cost"][at:]
        total = self._totals[-1] if self._totals else Decimal(0)
        for one in series["row"][at:]:
            cost = self.rows[one]["cost"]
            total = add_cost(total, None if cost is None else Decimal(cost))
            self._totals.append(total)
            series["cost"].append(None if total is None else float(total))
        self._changed[-1] = min(self._changed[-1], at)

    def get_chart_data(self, seen_calls: int = 0) -> Form:
        """
        Return the data of the charts, for each model reply: its row, sent tokens, cached tokens and cost so far.

        Args:
            seen_calls: The number of ``add_new_records`` calls that the caller has seen; above 0, the result starts at ``"from"``, the
                first changed value.
        """
        start = min(self._changed[seen_calls:], default=len(self._totals)) if seen_calls else 0
        told: Form = {name: values[start:] for name, values in self._series.items()}
        return told | ({"from": start} if seen_calls else {}) | {"windows": dict(self._history.facts.context_windows)}

    def list_changed_rows(self, seen_calls: int) -> list[tuple[int, Form]]:
        """Return the rows, with their numbers, that were added or changed after the first *seen_calls* calls of ``add_new_records``."""
        return [(number, self.rows[number]) for number in sorted(set().union(*self._touched[seen_calls:]))]

    def to_dict(self) -> Form:
        """Return the header of the run, its agents, steps and chart data, without the texts that their numbers refer to."""
        return {
            "run": self.header_to_json(),
            "agents": self.agents,
            "steps": self.rows,
            "series": self.get_chart_data(),
        }


def _effect_input_to_json(effect: Mapping[str, Any]) -> Any:
    if effect["type"] == "tool_call":
        return plain(effect["input"])
    return {name: plain(effect[name]) for name in GIVEN.get(effect["type"], effect) if name != "type"}


def _program_line_to_json(intent: Intent, effect: Mapping[str, Any]) -> Form:
    """Return the program line that requests an effect, as JSON; for the call of a program, its number of lines."""
    told: Form = {"line": intent.program_line} if intent.program_line else {}
    program = find_program_text(effect)
    # If a secret was redacted, the text may have fewer lines than the program had.
    return told if program is None else told | {"program": program.count("\n") + 1}


def _token_counts(usage: Usage) -> list[int]:
    """Return input, output, cache-read, cache-write and reasoning tokens, in this order."""
    return [
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
    ]


def _decode_error(stored: object) -> BaseException:
    error: BaseException = decode_stored({"type": "failure", "error": stored}).error
    return error


def _error_to_json(error: BaseException) -> Form:
    """Return class and message of an error as JSON."""
    return {"type": type(error).__name__, "message": str(plain(str(error)))}


def tool_change_to_json(change: object) -> Form:
    """Return a change by a tool or hook as JSON, with the members that are set."""
    return {k: v for k, v in plain(encode_stored(change)).items() if k != "type" and v not in (None, {}, [], ())}


def _result_to_parts(ended: ChildResult) -> list[Form]:
    """Return the result of a run as parts: its output or text, and its error."""
    output = plain(ended.output)
    parts: list[Form] = []
    if isinstance(output, str) or (output is None and ended.text):
        parts.append({"text": output or ended.text})
    elif output is not None:
        parts.append({"json": output})
    if ended.error is not None:
        parts.append({"error": _error_to_json(ended.error)})
    return parts
