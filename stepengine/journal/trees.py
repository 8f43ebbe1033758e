"""
``run_tree``: a recorded run as one JSON value that says what happened and nothing that changes by itself (replay F23, F24).

Effects stand in the order of their addresses, a child's inside the effect that spawned it, so that concurrency changes
nothing. Times, durations and provider ids are left out; ``rendering`` makes text of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, assert_never

from stepengine.data.codec import plain
from stepengine.data.json import JsonDict, canonical, thaw
from stepengine.data.messages import (
    AssistantMessage,
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
    ToolResult,
)
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure
from stepengine.data.questions import Answer, Question
from stepengine.data.state import ChildResult, RunResult
from stepengine.data.usage import Spending, Usage, add_cost
from stepengine.journal.forms import restored
from stepengine.journal.history import History
from stepengine.journal.records import ROOT, Intent, Result, shown_address
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.runtime.performer import child_path

__all__ = ("ended_of", "result_tree", "run_tree", "spending_of", "status_of")

Tree = dict[str, Any]
VERBS = {"CallTool": ("tool", "tool_name"), "Spawn": ("spawn", "agent_id"), "Perform": ("perform", "name")}
HASH_DIGITS = 8
EMPTY: Any = (None, "", [], {}, ())


def run_tree(journal: Journal) -> Tree:
    """
    Return the run that *journal* holds: agent, status, numbers, prompt, effects in the order of their addresses, output.

    Raises:
        JournalCorrupt: when there is no run in it, or a record is damaged.
    """
    history = journal.history()
    if any(intent.live is not None for intent in history.intents.values()):
        # Lines say what of a request is new; values in memory would have to be compared with each other for that.
        history = MemoryJournal(journal.lines()).history()
    root, spending = history.root, spending_of(history)
    ended = ended_of(history)
    tree = _heading(str(root["agent_id"]), status_of(history), spending)
    calls = sum(intent.type == "CallModel" for intent in history.intents.values())
    tree |= {"effects": len(history.intents) - 1, "model_calls": calls}
    tree |= _filled(prompt=root.get("prompt"), params=plain(root.get("params"))) | _Path(history, "").told()
    if ended is not None:
        tree |= _ending(ended)
    elif not history.is_complete:
        tree |= _filled(questions=[_question(q) for _, q in history.open_questions().values()])
    return tree


def result_tree(result: RunResult[Any]) -> Tree:
    """Return what a result without a journal tells: messages and children stand in for the effects, which nobody noted."""
    state = result.state
    tree = _heading(state.agent_id, result.status.value, result.spending)
    tree["messages"] = [_message(m) for m in state.message_history]
    if result.children:
        tree["children"] = [{"agent": c.agent_id, "status": c.status.value} | _ending(c) for c in result.children]
    error = None if result.error is None else _error(result.error)
    output = plain(result.output)
    questions = [_question(q) for q in result.pending_questions]
    return tree | _filled(output=output if output != result.text else None, error=error, questions=questions)


def _heading(agent: str, status: str, spending: Spending) -> Tree:
    usage = spending.usage
    tree: Tree = {"agent": agent, "status": status}
    if usage.total_tokens:
        tree["tokens"] = {"in": usage.prompt_tokens, "out": usage.completion_tokens}
    tree["cost_usd"] = None if spending.cost is None else str(spending.cost)
    return tree


def ended_of(history: History) -> ChildResult[Any] | None:
    """Return how the root run ended; ``None`` when it has not."""
    known = history.results.get(ROOT)
    value = getattr(history.outcome(known), "value", None) if known is not None else None
    return value if isinstance(value, ChildResult) else None


def status_of(history: History) -> str:
    """Return the status of the root run, and a word for one that has not ended."""
    ended = ended_of(history)
    if ended is not None:
        return ended.status.value
    if history.open_questions():
        return "suspended"
    stops = [str(i.input.get("kind")) for i in history.inputs if i.input.get("type") == "Stop"]
    return f"stopped: {stops[-1]}" if stops else "interrupted"


def spending_of(history: History) -> Spending:
    """Return what the run spent: as it said at its end, else what its recorded replies add up to."""
    ended = ended_of(history)
    if ended is not None:
        return ended.spending
    usage = Usage()
    cost: Decimal | None = Decimal(0)
    for address, result in history.results.items():
        value = getattr(history.outcome(result), "value", None) if address != ROOT else None
        if isinstance(value, ModelReply):
            usage, cost = usage + (value.usage or Usage()), add_cost(cost, value.cost)
    return Spending(usage=usage, cost=cost)


class _Path:
    """
    The effects of one run, its children's inside them.

    Args:
        history: The journal's records.
        path: The run's path.
    """

    def __init__(self, history: History, path: str) -> None:
        self._history = history
        self._path = path
        self._step = 0
        self._system = ""
        self._tools: list[str] = []
        self._calls: dict[str, str] = {}
        self._seen: set[str] = set()

    def told(self) -> Tree:
        """Return the effects as a member of the run's tree; no member when there are none."""
        return _filled(steps=list(self._entries()))

    def _entries(self) -> Iterator[Tree]:
        seq = 0
        while (intent := self._history.intents.get((self._path, seq))) is not None:
            result = self._history.results.get((self._path, seq))
            form = self._history.form(intent)
            tree: Tree = {"address": shown_address(self._path, seq)}
            tree |= self._model(intent, form) if form["type"] == "CallModel" else self._other(form, seq)
            if result is not None:
                tree |= _filled(retries=[_retry(a) for a in result.attempts], outcome=self._outcome(result))
            yield tree
            seq += 1

    def _other(self, form: Mapping[str, Any], seq: int) -> Tree:
        if form["type"] == "Ask":
            questions = [_question(restored(q)) for q in form["questions"]]
            purpose = form["purpose"] if form["purpose"] != "question" else None
            return {"kind": "ask", "questions": questions} | _filled(purpose=purpose)
        kind, name = VERBS[form["type"]]
        tree: Tree = {"kind": kind, "name": form[name]}
        if kind == "tool":
            source = form["source"] if form["source"] != "model" else None
            return (
                tree | _filled(call=self._call(form["tool_call_id"]), source=source) | {"input": plain(form["input"])}
            )
        if kind == "perform":
            return tree | _filled(args=plain(form["args"]), kwargs=plain(form["kwargs"]))
        tree |= _filled(
            call=self._call(form.get("tool_call_id", "")), prompt=form["prompt"], params=plain(form["params"])
        )
        return tree | _Path(self._history, child_path(self._path, seq)).told()

    def _model(self, intent: Intent, form: Mapping[str, Any]) -> Tree:
        self._step += 1
        request = form["request"]
        items = request["messages"]
        kept = sum([i["stop"] - i["start"] for i in items if i["type"] == "Slice"])
        new = [i for i in items if i["type"] != "Slice"]
        tree: Tree = {"kind": "model", "name": request["model"], "step": self._step}
        tree |= _filled(purpose=form["purpose"] if form["purpose"] != "step" else None)
        tree |= {"messages": kept + len(new), "added": len(new)}
        tools = [spec["name"] for spec in request.get("tools", ())]
        if tools != self._tools:
            self._tools = tree["tools"] = tools
        tree |= _filled(
            tool_choice=plain(request.get("tool_choice")),
            settings=_settings(request.get("settings")),
        )
        system = request.get("system_prompt", "")
        if system != self._system:
            self._system = system
            tree["system"] = system
        tail = [_message(restored(m), self._call) for m in request.get("tail", ())]
        said = [m for each in new if self._is_news(m := _message(restored(each), self._call), of_role="user")]
        return tree | _filled(said=[*said, *[m for m in tail if self._is_news(m)]])

    def _is_news(self, message: Tree, of_role: str = "") -> bool:
        """Return whether a message was not told before: replies and results were, unless a hook changed them."""
        mark = _mark(message["role"], message["parts"])
        known = mark in self._seen
        self._seen.add(mark)
        return not known or message["role"] == of_role

    def _call(self, known: str) -> str | None:
        """Return the name of a call: numbered as they appear, so that ids of other places cannot shift them."""
        return self._calls.setdefault(known, f"c{len(self._calls) + 1}") if known else None

    def _outcome(self, result: Result) -> Tree:
        outcome = self._history.outcome(result)
        if isinstance(outcome, Failure):
            return {"error": _error(outcome.error)}
        value = outcome.value
        if isinstance(value, ModelReply):
            parts = [_part(p, self._call) for p in value.content]
            self._seen.add(_mark("assistant", parts))
            usual = StopReason.TOOL_USE if value.tool_calls else None
            return {"parts": parts} | _filled(stop=value.stop_reason.value if value.stop_reason != usual else None)
        if isinstance(value, ToolResult):
            parts = [_part(p) for p in value.content]
            self._seen.add(_mark("tool", parts))
            effects = [f"{e.kind} {e.target}".rstrip() for e in value.side_effects]
            return _filled(status=value.status if value.status != "ok" else None, side_effects=effects) | {
                "parts": parts
            }
        if isinstance(value, ChildResult):
            return {"status": value.status.value} | _ending(value)
        if isinstance(value, tuple) and value and isinstance(value[0], Answer):
            return {"answers": [a.value or "(declined)" for a in value]}
        return {"value": plain(value)}


def _mark(role: str, parts: list[Tree]) -> str:
    """Return what two tellings of one message have in common; a reply's calls have no ids yet."""
    return f"{role} {canonical([{k: v for k, v in part.items() if k != 'call'} for part in parts])}"


def _settings(stored: Any) -> Any:
    return None if stored is None else {k: v for k, v in plain(stored).items() if k != "type"}


def _ending(ended: ChildResult[Any]) -> Tree:
    """Return output or text of a run that ended, its error and its open questions."""
    output = plain(ended.output)
    said = {"text": ended.text} if ended.text and output is None else _filled(output=output)
    error = None if ended.error is None else _error(ended.error)
    return said | _filled(error=error, questions=[_question(q) for q in ended.questions])


def _retry(attempt: Mapping[str, Any]) -> str:
    error = restored({"type": "Failure", "error": attempt["error"]}).error
    status = getattr(error, "status", None)
    return " ".join([str(p) for p in (type(error).__name__, status or "", getattr(error, "kind", "")) if p])


def _error(error: BaseException) -> Tree:
    return {"type": type(error).__name__, "message": plain(str(error))}


def _question(question: Question) -> Tree:
    return {"id": question.id, "text": question.text} | _filled(options=list(question.options))


def _message(message: Message, call: Any = str) -> Tree:
    tree: Tree = {"role": message.role, "parts": [_part(p, call) for p in message.content]}
    if isinstance(message, ToolMessage):
        status = message.status if message.status != "ok" else None
        return tree | _filled(name=message.tool_name, id=call(message.tool_call_id), status=status)
    if isinstance(message, AssistantMessage):
        return tree
    return tree | _filled(tags=[tag for tag in message.tags if tag != "USER_PROMPT"])


def _part(part: Part, call: Any = str) -> Tree:
    match part:
        case TextPart():
            return {"text": part.text}
        case ThinkingPart():
            signed = (part.provider_data or JsonDict()).get("signature")
            return {"thinking": part.text} | _filled(signature=_hash(str(signed).encode()) if signed else None)
        case RefusalPart():
            return {"refusal": part.text}
        case ToolCallPart():
            given = {"input": thaw(part.input)} if part.input_error is None else {"unreadable": part.raw_input or ""}
            return {"tool": part.tool_name} | _filled(call=call(part.tool_call_id)) | given
        case JsonPart():
            return {"json": thaw(part.value)}
        case ImagePart() | DocumentPart():
            return {"media": _media(part)}
        case OpaquePart():
            return {"opaque": f"{part.provider} {_hash(canonical(part.data).encode())}"}
        case _ as never:
            assert_never(never)


def _media(part: ImagePart | DocumentPart) -> str:
    what = f"{len(part.data):,} bytes {_hash(part.data)}" if part.data is not None else str(part.url)
    return f"{part.mime_type} {what}"


def _hash(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()[:HASH_DIGITS]}"


def _filled(**members: Any) -> Tree:
    """Return the members that say something."""
    return {name: value for name, value in members.items() if value not in EMPTY}
