"""
A journal as the JSON value that the page is made of.

What a page shows stands here once, cleaned: every text goes through one redactor that knows all kinds of secrets, whatever the
journal's own rules were, and through what shows controls as escapes. The page resolves numbers to texts and puts requests
together again from their slices, as ``History`` does.

A ``RunPayload`` takes in the records of a history that it has not seen yet, so that a run under way is followed by taking it again.
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

from stepengine.data.codec import bare, plain, restored
from stepengine.data.effects import KINDS
from stepengine.data.json import compact, thaw
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
from stepengine.data.outcomes import Failure
from stepengine.data.questions import Answer
from stepengine.data.state import ChildResult
from stepengine.data.usage import Spending, Usage, add_cost
from stepengine.data.visible import visible
from stepengine.journal.history import History
from stepengine.journal.programs import program_of
from stepengine.journal.records import INPUTS, ROOT, UNKNOWN_INPUT, Address, Input, Intent, Result, shown_address
from stepengine.journal.show import ABOUT, ended_of, run_id_of, status_of
from stepengine.redaction import redactor_for
from stepengine.runtime.performer import child_path

__all__ = ("FORMAT", "NOT_RECORDED", "RunPayload", "Texts")

Form: TypeAlias = dict[str, Any]

FORMAT = "stepengine.view/1"
NOT_RECORDED = (
    "text as it streamed in, only whole replies",
    "events, progress and log lines, and what ctx.notify said",
    "source lines, local variables and changes by hooks: these come from repeating the run with the agent's code",
    "HTTP bodies",
)
"""What no journal holds, as the page lists it."""
GIVEN: Mapping[str, tuple[str, ...]] = {"agent_call": ("prompt", "params"), "perform": ("args", "kwargs")}
"""The members of a record that the page shows as the input of an effect, where it does not show all."""
SAID: Mapping[type[Any], str] = {
    TextPart: "text",
    ToolReferencePart: "text",
    ThinkingPart: "thinking",
    RefusalPart: "refusal",
}
ORDINARY = re.compile(r"[\n\t -~]*")
MAX_SAFE = 2**53 - 1
"""A browser shows whole numbers beyond this, such as ids of messages, with other digits; as texts they keep theirs."""
MAX_IMAGE = 2 * 1024 * 1024
MAGIC: tuple[tuple[bytes, int, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", 0, "image/png"),
    (b"\xff\xd8\xff", 0, "image/jpeg"),
    (b"GIF87a", 0, "image/gif"),
    (b"GIF89a", 0, "image/gif"),
    (b"WEBP", 8, "image/webp"),
)


def _make_visible(text: str) -> str:
    """Return a text with marks for what would steer or hide, its line ends kept; plain lines are not looked at closer."""
    if ORDINARY.fullmatch(text):
        return text
    return "\n".join(
        [line if ORDINARY.fullmatch(line) else visible(line) for line in text.replace("\r\n", "\n").split("\n")]
    )


class Texts:
    """
    Every text of a page once, by number; those of two runs that are compared, too.

    Args:
        longest: How many characters of one text inside a result are kept, head and tail together; ``None`` for all.
    """

    def __init__(self, longest: int | None = None) -> None:
        self.all: list[Any] = []
        self.images: list[str] = []
        self.longest = longest
        self._numbers: dict[bytes, int] = {}
        self._pictures: dict[str, int] = {}
        self._redactor = redactor_for("all", os.environ)

    def clean(self, value: object) -> Any:
        """Return a JSON value without secrets and without anything that steers a screen."""
        if isinstance(value, str):
            return self._make_visible(self._redactor.text(value))
        written = compact(value)
        return self._make_visible(self._redactor.value(value) if self._redactor.suspicious(written) else value)

    def _make_visible(self, value: object) -> object:
        if isinstance(value, str):
            return _make_visible(value)
        if isinstance(value, Mapping):
            return {_make_visible(k): self._make_visible(v) for k, v in value.items()}
        if isinstance(value, int) and abs(value) > MAX_SAFE:
            return str(value)
        return [self._make_visible(v) for v in value] if isinstance(value, list | tuple) else value

    def number(self, value: Any, *, whole_at: str = "") -> int:
        """
        Return the number of a JSON value among the texts.

        Args:
            value: Anything that is JSON.
            whole_at: The command that shows it whole, for what may be cut.
        """
        key = hashlib.blake2b(
            f"{whole_at and self.longest}{compact(value)}".encode(errors="replace"), digest_size=16
        ).digest()
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self.all)
            clean = self.clean(value)
            self.all.append(self._cut(clean, whole_at) if self.longest is not None and whole_at else clean)
        return known

    def _cut(self, value: object, whole_at: str) -> object:
        if isinstance(value, str):
            longest = self.longest or 0
            if len(value) <= longest:
                return value
            left = len(value) - longest
            return f"{value[: longest // 2]}\n... {left:,} characters left out; {whole_at} shows them ...\n{value[-(longest // 2) :]}"
        if isinstance(value, Mapping):
            return {k: self._cut(v, whole_at) for k, v in value.items()}
        return [self._cut(v, whole_at) for v in value] if isinstance(value, list) else value

    def parts(self, parts: Iterable[Part], *, whole_at: str = "") -> int:
        """Return the number of the parts of a message, a reply or a result; ids of calls are no part of them."""
        return self.number([self._part(p) for p in parts], whole_at=whole_at)

    def _part(self, part: Part) -> Form:
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
                return self._media(part)
            case OpaquePart():
                told = {name: said for name, said in (("tool", part.tool), ("said", part.text)) if said}
                return {"opaque": part.provider, **told, "data": thaw(part.data)}
            case CitationPart():
                cited = attrs.asdict(part, filter=lambda field, value: field.name != "url" and value != "")
                return {"cites": part.url or part.source, **cited}
            case _ as never:
                assert_never(never)

    def _media(self, part: ImagePart | DocumentPart) -> Form:
        """Return what a medium is; the picture itself stands apart, and only if it is one."""
        if part.data is None:
            where = f"at {part.url}" if part.file_id is None else f"file {part.file_id} of {part.provider}"
            return {"media": f"{part.mime_type} {where}"}
        told: Form = {"media": f"{part.mime_type}, {len(part.data):,} bytes"}
        kind = next((mime for magic, at, mime in MAGIC if part.data[at : at + len(magic)] == magic), "")
        if kind and len(part.data) <= MAX_IMAGE:
            written = f"data:{kind};base64,{base64.b64encode(self._redactor.binary(part.data)).decode()}"
            told["image"] = self._pictures.setdefault(written, len(self.images))
            self.images += [written] if told["image"] == len(self.images) else []
        return told


@attrs.define
class _OpenRun:
    """What is known of one run while its records are read: its agent, the step it is in, the row of that step."""

    agent: int
    last: int = 0
    """When its last effect ended, which is when its next one begins: journals hold the times of results alone."""
    step: int = 0
    row: int = -1
    wanted: int = 0
    ids: list[str] = attrs.Factory(list)
    """The ids of calls that the step's row has taken in: at most as many as its reply asked for."""


class RunPayload:
    """
    One run and its children, as the page has them.

    Args:
        texts: Where texts are kept.
        file: How the journal is named in commands.

    Attributes:
        rows: The steps, and what handlers did by themselves, in the order in which they began.
        agents: The runs of the tree, by the order in which they began.
        lead: The number of the row of each effect, by address.
    """

    def __init__(self, texts: Texts, file: str) -> None:
        self.texts = texts
        self.file = file
        self.rows: list[Form] = []
        self.agents: list[Form] = []
        self.lead: dict[Address, int] = {}
        # The rows that each ``take`` made or changed.
        self._touched: list[set[int]] = []
        self.took = 0
        self._calls: dict[Address, Form] = {}
        self._runs: dict[str, _OpenRun] = {}
        self._done = 0
        self._models: set[str] = set()
        self._steps = 0
        self._series: dict[str, list[Any]] = {"row": [], "context": [], "cached": [], "cost": []}
        self._totals: list[Decimal | None] = []
        # For each ``take`` where the series first changed in it.
        self._changed: list[int] = []
        self._spent = Spending(usage=Usage(), cost=Decimal(0))
        self._history = History(())

    def take(self, history: History) -> None:
        """Take in the records that came since the last time; *history* begins with those that were taken before."""
        self.took += 1
        self._history = history
        self._changed.append(len(self._totals))
        self._touched.append(set())
        for record in history.records[self._done :]:
            if isinstance(record, Intent):
                self._begin(history, record)
            elif isinstance(record, Result):
                self._end(history, record)
            elif isinstance(record, Input):
                self._input(record)
        self._done = len(history.records)

    # --- effects ------------------------------------------------------------------------------------------------------

    def _begin(self, history: History, intent: Intent) -> None:
        address = (intent.path, intent.seq)
        form = history.form(intent)
        if address == ROOT:
            self._agent("", form)
            return
        run = self._runs[intent.path]
        if form["type"] == "model_call":
            run.step += 1
            # Before the row has a number: a request shares with earlier ones, never with itself.
            request = self._request(form, intent.path)
            self._row(run, intent, "model").update(request)
            self._steps += 1
            self._models.add(request["model"])
            run.row, run.wanted, run.ids = len(self.rows) - 1, 0, []
            return
        call = self._call(run, intent, form)
        self._calls[address] = call
        if self._is_models(run, form):
            self.lead[address] = run.row
            self.rows[run.row]["calls"].append(call)
            self._touch(run.row)
        else:
            self._row(run, intent, call["kind"])["calls"].append(call)
        if intent.begins_run:
            call["child"] = path = child_path(intent.path, intent.seq)
            is_body = form["type"] == "tool_call"
            self._agent(
                path, {"agent_id": form["tool_name"], "prompt": "", "params": form["input"]} if is_body else form
            )

    def _is_models(self, run: _OpenRun, form: Mapping[str, Any]) -> bool:
        """
        Return whether an effect belongs to the calls of the last reply of its run.

        A tool says who asked for it. Children and questions only have the id of their call, so that as many ids are taken for
        those of the reply as it has calls.
        """
        if run.row < 0:
            return False
        if form["type"] == "tool_call" and form["source"] != "model":
            return bool(form["source"] == "hook")
        known = form.get("tool_call_id", "")
        if not known:
            return False
        if known not in run.ids:
            if len(run.ids) >= run.wanted:
                return False
            run.ids.append(known)
        return True

    def _row(self, run: _OpenRun, intent: Intent, kind: str) -> Form:
        row: Form = {"n": run.step, "a": shown_address(intent.path, intent.seq), "path": intent.path, "kind": kind}
        row |= {"agent": run.agent, "began": run.last, "calls": []}
        self.lead[intent.path, intent.seq] = len(self.rows)
        self._touch(len(self.rows))
        self.rows.append(row)
        return row

    def _touch(self, number: int) -> None:
        self._touched[-1].add(number)

    def _request(self, form: Mapping[str, Any], path: str) -> Form:
        request = form["request"]
        told: Form = {"model": self._name(request["model"]), "m": [self._item(i, path) for i in request["messages"]]}
        if form["purpose"] != "step":
            told["purpose"] = form["purpose"]
        if request.get("system_prompt"):
            told["system"] = self.texts.number(request["system_prompt"])
        if request.get("tools"):
            told["tools"] = self.texts.number(plain(request["tools"]))
        if request.get("tool_choice") is not None:
            told["choice"] = self.texts.number(plain(request["tool_choice"]))
        settings = {k: v for k, v in plain(request.get("settings") or {}).items() if k != "type"}
        if settings:
            told["settings"] = self.texts.number(settings)
        if request.get("tail"):
            told["tail"] = [self._message(restored(m)) for m in request["tail"]]
        return told

    def _item(self, item: Mapping[str, Any], path: str) -> Any:
        """Return a message, or what a request shares with an earlier one: the number of its row, from where, to where."""
        if item["type"] != "slice":
            return self._message(restored(item))
        source = (item.get("path", path), item["seq"])
        return [self.lead.get(source, -1), item["start"], item["stop"]]

    def _message(self, message: Message) -> Form:
        told: Form = {"role": message.role, "t": self.texts.parts(message.content, whole_at=self._anywhere)}
        if isinstance(message, ToolMessage):
            told |= {"name": self._name(message.tool_name)}
            return told if message.status == "ok" else told | {"status": message.status}
        tags = [self._name(t) for t in message.tags if t != "USER_PROMPT"]
        return told | {"tags": tags} if tags and not isinstance(message, AssistantMessage) else told

    @property
    def _anywhere(self) -> str:
        return f"`stepengine show {shlex.quote(self.file)} --step N`"

    def _name(self, text: str) -> str:
        return visible(str(self.texts.clean(text)), strict=True)

    def _call(self, run: _OpenRun, intent: Intent, form: Mapping[str, Any]) -> Form:
        row, about = KINDS[form["type"]], ABOUT.get(form["type"])
        call: Form = {"kind": row.verb, "a": shown_address(intent.path, intent.seq), "began": run.last}
        if form["type"] == "ask":
            questions = [restored(q) for q in form["questions"]]
            call["name"] = self._name(", ".join([q.id for q in questions]))
            asked = [{"id": q.id, "text": q.text, "options": list(q.options)} for q in questions]
            call["input"] = self.texts.number(asked[0] if len(asked) == 1 else asked)
            if form["purpose"] != "question":
                call["purpose"] = form["purpose"]
        else:
            call["name"] = self._name(form[row.name] if about is None else about(form))
            call["input"] = self.texts.number(_given(form))
        if form.get("source") == "tool":
            call["by"] = "tool"
        if form.get("tool_call_id"):
            call["id"] = self._name(form["tool_call_id"])
        if intent.gather is not None:
            call["together"] = intent.gather
        return call | _of_program(intent, form)

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def _end(self, history: History, result: Result) -> None:
        address = (result.path, result.seq)
        if result.seq == ROOT[1]:
            self._end_run(result.path, history.outcome(result), result.at)
            return
        run = self._runs[result.path]
        run.last = max(run.last, result.at)
        number = self.lead[address]
        self._touch(number)
        row, outcome = self.rows[number], history.outcome(result)
        told = self._calls.get(address, row)
        told["at"] = result.at
        row["at"] = max(result.at, row.get("at", 0))
        told["began"] = min(told["began"], result.at)
        if result.attempts:
            told["attempts"] = self.texts.number([_error(_failure(a["error"])) for a in result.attempts])
        if outcome.inputs:
            row["inputs"] = [*row.get("inputs", ()), *[self._message(m) for m in outcome.inputs]]
        if isinstance(outcome, Failure):
            told["error"] = self.texts.number(_error(outcome.error))
            told["status"] = "error"
            self._end_run(child_path(*address), outcome, result.at)
            return
        value = outcome.value
        if isinstance(value, ModelReply):
            self._reply(row, self._runs[result.path], number, value)
        else:
            told |= self._value(value, f"`stepengine show {shlex.quote(self.file)} --step '{told['a']}'`")
            if isinstance(value, ChildResult) or (isinstance(value, ToolResult) and child_path(*address) in self._runs):
                self._end_run(child_path(*address), outcome, result.at)

    def _reply(self, row: Form, run: _OpenRun, number: int, reply: ModelReply) -> None:
        row["replied"] = row["at"]
        row["reply"] = self.texts.parts(reply.content, whole_at=self._anywhere)
        row["stop"] = reply.stop_reason.value
        if reply.model is not None:
            row["answered"] = self._name(reply.model)
        usage = reply.usage
        if usage is not None:
            row["usage"] = _buckets(usage)
        row["cost"] = None if reply.cost is None else str(reply.cost)
        if run.row == number:
            run.wanted = len(reply.tool_calls) if row.get("purpose") is None else 0
        self._plot(number, row)
        spent = self._spent
        self._spent = Spending(usage=spent.usage + (usage or Usage()), cost=add_cost(spent.cost, reply.cost))
        agent = self.agents[run.agent]
        agent["steps"] += 1
        agent["tokens"] += 0 if usage is None else usage.total_tokens
        cost = add_cost(None if agent["cost"] is None else Decimal(agent["cost"]), reply.cost)
        agent["cost"] = None if cost is None else str(cost)

    def _value(self, value: object, whole_at: str) -> Form:
        if isinstance(value, ToolResult):
            told: Form = {"status": value.status, "result": self.texts.parts(value.content, whole_at=whole_at)}
            if value.side_effects:
                told["did"] = self.texts.number([f"{e.kind} {e.target}".rstrip() for e in value.side_effects])
            change = {} if value.change is None else _change(value.change)
            return told | {"change": self.texts.number(change)} if change else told
        if isinstance(value, ChildResult):
            return {"status": value.status.value, "result": self.texts.number(_result_parts(value), whole_at=whole_at)}
        if isinstance(value, tuple) and value and isinstance(value[0], Answer):
            answers = [{"text": a.value or "(declined)"} for a in value]
            return {"status": "ok", "result": self.texts.number(answers)}
        return {"status": "ok", "result": self.texts.number([{"json": plain(value)}], whole_at=whole_at)}

    def _agent(self, path: str, form: Mapping[str, Any]) -> None:
        above = self._runs[path.rpartition(".")[0]] if path else None
        last = 0 if above is None else above.last
        self._runs[path] = _OpenRun(len(self.agents), last)
        parent = None if above is None else above.agent
        told: Form = {"id": self._name(form["agent_id"]), "path": path, "parent": parent, "began": last}
        told |= {
            "steps": 0,
            "tokens": 0,
            "cost": "0",
            "status": "under way",
            "prompt": self.texts.number(form["prompt"]),
        }
        if form.get("params"):
            told["params"] = self.texts.number(plain(form["params"]))
        if form.get("background"):
            told["background"] = True
        self.agents.append(told)

    def _end_run(self, path: str, outcome: Any, at: int) -> None:
        known = self._runs.get(path)
        if known is None:
            return
        # A failure has no value. Only children and bodies of tools have a place here, and these results say how they ended.
        agent, value = self.agents[known.agent], getattr(outcome, "value", None)
        agent["at"] = at
        is_done = isinstance(value, ToolResult) and not value.is_error  # of the body of a tool
        agent["status"] = value.status.value if isinstance(value, ChildResult) else "completed" if is_done else "failed"
        if isinstance(value, ChildResult):
            agent["output"] = self.texts.number(_result_parts(value))

    def _input(self, record: Input) -> None:
        kind = str(record.input.get("type"))
        if not INPUTS.get(kind, UNKNOWN_INPUT).is_shown:
            return
        run = self._runs[record.path]
        run.last = max(run.last, record.at)
        row: Form = {"n": run.step, "a": shown_address(record.path, record.seq), "path": record.path, "kind": "input"}
        row |= {"agent": run.agent, "began": record.at, "at": record.at, "calls": [], "name": self._name(kind)}
        row["input"] = self.texts.number({k: v for k, v in plain(record.input).items() if k != "type"})
        self._touch(len(self.rows))
        self.rows.append(row)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def run(self) -> Form:
        """Return what the header tells: agent, status, numbers, and what the run was given and gave."""
        history = self._history
        root, head, number = history.root, history.head, self.texts.number
        ended = ended_of(history)
        spending = self._spent if ended is None else ended.spending
        told: Form = {
            "file": self.file,
            "fork": f"stepengine fork {shlex.quote(self.file)}",
            "resume": f"stepengine resume {shlex.quote(self.file)}",
            "agent": self._name(root["agent_id"]),
            "run": self._name(run_id_of(history)),
            "status": self._name(status_of(history)),
            "created": "" if head is None else self._name(head.created),
            "engine": "" if head is None else self._name(head.engine),
            "parent": None if head is None or head.parent is None else self.texts.clean(plain(head.parent)),
            "models": sorted(self._models),
            "steps": self._steps,
            "effects": len(history.intents) - 1,
            "milliseconds": history.last_at,
            "usage": _buckets(spending.usage),
            "cost": None if spending.cost is None else str(spending.cost),
            "prompt": number(root["prompt"]),
            "previous": [self._item(m, "") for m in _previous(root)],
            "ended": history.is_complete,
        }
        if root.get("params") is not None:
            told["params"] = number(plain(root["params"]))
        if ended is not None:
            told["output"] = number(_result_parts(ended), whole_at=self._anywhere)
        elif not history.is_complete:
            asked = [
                {"id": q.id, "text": q.text, "options": list(q.options)} for _, q in history.open_questions().values()
            ]
            told |= {"questions": number(asked)} if asked else {}
        return told

    def _plot(self, number: int, row: Form) -> None:
        """Put a reply into the series: at its row's place, which for one of children at once may be before the last."""
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

    def series(self, since: int = 0) -> Form:
        """
        Return what the charts show, for each model reply: its row, tokens sent, of these from the cache, cost so far.

        Args:
            since: How often ``take`` had been called when somebody got it: ``"from"`` on it is other than then.
        """
        start = min(self._changed[since:], default=len(self._totals)) if since else 0
        told: Form = {name: values[start:] for name, values in self._series.items()}
        return told | ({"from": start} if since else {}) | {"windows": dict(self._history.windows)}

    def changed(self, since: int) -> list[tuple[int, Form]]:
        """Return the rows that were made or changed since ``take`` had been called so often, each with its number."""
        return [(number, self.rows[number]) for number in sorted(set().union(*self._touched[since:]))]

    def told(self) -> Form:
        """Return the run, its agents, steps and series, all but the texts."""
        return {"run": self.run(), "agents": self.agents, "steps": self.rows, "series": self.series()}


def _given(form: Mapping[str, Any]) -> Any:
    """Return the input of an effect, from its record."""
    if form["type"] == "tool_call":
        return plain(form["input"])
    return {name: plain(form[name]) for name in GIVEN.get(form["type"], form) if name != "type"}


def _of_program(intent: Intent, form: Mapping[str, Any]) -> Form:
    """Return the line of the program that asks for an effect; of the call of a program, how many lines it has."""
    told: Form = {"line": intent.program_line} if intent.program_line else {}
    program = program_of(form)
    # Where a secret was taken out of the text there may be fewer, with other numbers.
    return told if program is None else told | {"program": program.count("\n") + 1}


def _buckets(usage: Usage) -> list[int]:
    return [
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
    ]


def _failure(stored: object) -> BaseException:
    error: BaseException = restored({"type": "failure", "error": stored}).error
    return error


def _error(error: BaseException) -> Form:
    return {"type": type(error).__name__, "message": str(plain(str(error)))}


def _change(change: object) -> Form:
    """Return what a tool changed in its run: the members that are set, as JSON."""
    return {k: v for k, v in plain(bare(change)).items() if k != "type" and v not in (None, {}, [], ())}


def _result_parts(ended: ChildResult) -> list[Form]:
    """Return what a run gave, as the parts of a result: its output, or its text, and its error."""
    output = plain(ended.output)
    parts: list[Form] = []
    if isinstance(output, str) or (output is None and ended.text):
        parts.append({"text": output or ended.text})
    elif output is not None:
        parts.append({"json": output})
    if ended.error is not None:
        parts.append({"error": _error(ended.error)})
    return parts


def _previous(root: Mapping[str, Any]) -> list[Mapping[str, object]]:
    state = root.get("previous") or {}
    transcript = state.get("view") or state.get("message_history") or {"messages": []}
    messages: list[Mapping[str, object]] = transcript["messages"]
    return messages
