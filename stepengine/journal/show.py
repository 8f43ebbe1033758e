"""
A recorded run as one JSON value (``make_run_tree``) and as text for people: one fact per line.

Effects stand in the order of their addresses, a child's inside the effect that spawned it, so that concurrency changes
nothing; times, durations and provider ids are left out. Nothing in the text steers a terminal, no line ends with a space,
and no secret is in it that has a shape or stands in the environment.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import Any, assert_never

import attrs

from stepengine.data.codec import plain
from stepengine.data.effects import KINDS
from stepengine.data.json import JsonDict, canonical, thaw
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
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure, PartialUsage, find_failure_usage
from stepengine.data.questions import Answer, Question
from stepengine.data.state import ChildResult, RunResult
from stepengine.data.usage import Spending, Usage, filter_known_costs
from stepengine.data.visible import visible
from stepengine.journal.encoding import decode_stored
from stepengine.journal.history import History
from stepengine.journal.pending_items import find_open_questions, find_waits
from stepengine.journal.programs import find_program_text
from stepengine.journal.records import ROOT, Address, Result, format_address, get_starter_address
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.redaction import make_redactor
from stepengine.runtime.performer import child_path

MIN_PATH_CHARS = 5
"""A shorter path, such as `/` or `/app`, is in texts that do not speak of this machine."""
MIN_NAME_CHARS = 3
"""Names of one or two letters are in ordinary words."""
ORDINARY_NAMES = frozenset({
    "admin", "app", "build", "builder", "container", "default", "docker", "guest", "home", "host", "local", "localhost",
    "name", "node", "none", "nobody", "python", "root", "runner", "server", "test", "tester", "ubuntu", "unknown", "user",
    "worker", "workspace",
})  # fmt: skip
"""Names of users and hosts that are words: replacing them would change texts that do not speak of this machine."""


def machine_data(cwd: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """
    Return the texts that identify this machine, each with its placeholder.

    They are the working folder ``<cwd>``, the folder for temporary files ``<tmp>``, the home folder ``<home>``, and the
    names of host ``<host>`` and user ``<user>``. Short paths and names that are ordinary words are left out.
    """
    found: dict[str, str] = {}
    for path, placeholder in (
        (os.fspath(cwd) if cwd is not None else _find_current_folder(), "<cwd>"),
        (tempfile.gettempdir(), "<tmp>"),
        (os.path.expanduser("~"), "<home>"),  # noqa: PTH111  (never raises)
    ):
        if len(path) >= MIN_PATH_CHARS or (placeholder == "<tmp>" and len(path) > 1):
            found.setdefault(str(Path(path)), placeholder)
    for name, placeholder in ((socket.gethostname(), "<host>"), (_find_user_name(), "<user>")):
        if len(name) >= MIN_NAME_CHARS and name.lower() not in ORDINARY_NAMES:
            found.setdefault(name, placeholder)
    return found


def _find_current_folder() -> str:
    """Return the working folder, or ``""`` if it was removed."""
    try:
        return str(Path.cwd())
    except OSError:  # removed meanwhile
        return ""


def _find_user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


Tree = dict[str, Any]
HASH_DIGITS = 8
"""Enough to tell the texts of one run apart: among a thousand of them, two have the same digits once in about 8,000 runs."""
EMPTY: Any = (None, "", [], {}, ())


def load_stored_history(journal: Journal) -> History:
    """
    Return the history of a journal as stored; its requests share common messages.

    Raises:
        JournalError: when it cannot be read, or holds no run.
    """
    history = journal.history()
    if any(intent.live is not None for intent in history.intents.values()):
        # Lines say what of a request is new; values in memory would have to be compared with each other for that.
        history = MemoryJournal(journal.lines()).history()
    _ = history.root
    return history


def make_run_tree(journal: Journal) -> Tree:
    """
    Return the recorded run as a JSON tree: agent, status, numbers, prompt, effects in the order of their addresses, output.

    Raises:
        JournalCorrupt: when there is no run in it, or a record is damaged.
    """
    history = load_stored_history(journal)
    root, spending = history.root, compute_spending(history)
    ended = find_root_end(history)
    tree = _make_run_heading_tree(str(root["agent_id"]), get_run_status(history), spending)
    calls = sum(intent.type == "model_call" for intent in history.intents.values())
    tree |= {"effects": len(history.intents) - 1, "model_calls": calls}
    tree |= (
        _drop_empty(prompt=root.get("prompt"), params=plain(root.get("params")))
        | _RunEffects(history, "", results=not journal.records_tools).to_steps_tree()
    )
    if ended is not None:
        tree |= _make_run_end_tree(ended)
    elif not history.is_complete:
        tree |= _drop_empty(questions=[_question_tree(q) for _, q in find_open_questions(history).values()])
    return tree


def make_result_tree(result: RunResult) -> Tree:
    """Return a result without a journal as a tree: messages and children in place of effects."""
    state = result.state
    tree = _make_run_heading_tree(state.agent_id, result.status.value, result.spending)
    tree["messages"] = [_message_tree(m) for m in state.message_history]
    if result.children:
        tree["children"] = [
            {"agent": c.agent_id, "status": c.status.value} | _make_run_end_tree(c) for c in result.children
        ]
    error = None if result.error is None else _error_tree(result.error)
    output = plain(result.output)
    questions = [_question_tree(q) for q in result.pending_questions]
    return tree | _drop_empty(output=output if output != result.text else None, error=error, questions=questions)


def _make_run_heading_tree(agent: str, status: str, spending: Spending) -> Tree:
    usage = spending.usage
    tree: Tree = {"agent": agent, "status": status}
    if usage.total_tokens:
        tree["tokens"] = {"in": usage.prompt_tokens, "out": usage.completion_tokens}
    tree["cost_usd"] = None if spending.cost is None else str(spending.cost)
    if usage.at_least:
        tree["at_least"] = True
    return tree


def find_root_end(history: History) -> ChildResult | None:
    """Return the end of the root run, or ``None`` if it has not ended."""
    known = history.results.get(ROOT)
    value = getattr(history.outcome(known), "value", None) if known is not None else None
    return value if isinstance(value, ChildResult) else None


def get_run_id(history: History) -> str:
    """Return the id of the run from the head; for a fork this is its own id, not that of its parent."""
    return str(history.root["run_id"]) if history.head is None else history.head.run


def get_root_agent_id(history: History) -> str:
    """Return the id of the recorded agent, with its publisher if it comes from a package."""
    root, head = str(history.root["agent_id"]), history.head
    return root if head is None or "/" not in head.agent else head.agent


def get_run_status(history: History) -> str:
    """Return the status of the root run; without an end ``suspended``, ``stopped: KIND`` or ``interrupted``."""
    ended = find_root_end(history)
    if ended is not None:
        return ended.status.value
    last = history.stop
    if (last is None or last.input["kind"] == "suspended") and find_waits(history):
        return "suspended"
    stops = [str(i.input.get("kind")) for i in history.inputs if i.input.get("type") == "stop"]
    kinds = [kind for kind in stops if kind != "suspended"]
    return f"stopped: {kinds[-1]}" if kinds else "interrupted"


def compute_spending(history: History) -> Spending:
    """Return the spending of the run: as recorded at its end, else the sum of its replies."""
    ended = find_root_end(history)
    if ended is not None:
        return ended.spending
    spent: list[Spending] = []
    agents: dict[str, str] = {}
    for address, intent in history.intents.items():
        if intent.type != "model_call":
            continue
        path = address[0]
        if path not in agents:
            agents[path] = _find_agent_id(history, path)
        result = history.results.get(address)
        reply = None if result is None else getattr(history.outcome(result), "value", None)
        if isinstance(reply, ModelReply):
            usage = reply.usage or Usage(at_least=True)
            usage = attrs.evolve(usage, requests=usage.requests or 1)
            spent.append(_make_spending(agents[path], reply.model or history.model(intent), usage, reply.cost))
        elif (lost := _find_usage_without_reply(history, address, result)) is not None:
            spent.append(_make_spending(agents[path], history.model(intent), lost.usage, lost.cost))
    return _sum_spendings(spent)


def _sum_spendings(spent: Sequence[Spending]) -> Spending:
    """Return the sum. It is built by halves: a sum lists all models of its parts, and each reply may have another model."""
    while len(spent) > 1:
        spent = [one + other for one, other in zip_longest(spent[::2], spent[1::2], fillvalue=Spending())]
    return spent[0] if spent else Spending()


def _find_usage_without_reply(history: History, address: Address, result: Result | None) -> PartialUsage | None:
    """Return the usage of a model call without a reply, which failed or was cut off."""
    if result is None:
        return history.facts.find_lost_usage(address)
    return find_failure_usage(getattr(history.outcome(result), "error", None))


def _make_spending(agent: str, model: str, usage: Usage, cost: Decimal | None) -> Spending:
    by_agent, by_model = {agent: usage}, {model: usage}
    return Spending(
        usage=usage,
        cost=cost,
        by_agent=by_agent,
        by_model=by_model,
        agent_costs=filter_known_costs(by_agent, {agent: cost}),
        model_costs=filter_known_costs(by_model, {model: cost}),
    )


def _find_agent_id(history: History, path: str) -> str:
    """Return the agent of the run at a path; the body of a tool is its caller's."""
    while path:
        above = get_starter_address(path)
        form = history.form(history.intents[above])
        if form["type"] == "agent_call":
            return str(form["agent_id"])
        path = above[0]
    return str(history.root["agent_id"])


class _RunEffects:
    """
    The effects of one run, with the effects of its children inside them.

    Args:
        history: The journal's records.
        path: The run's path.
        results: Whether requests show all new tool results, because the journal does not record these as effects.
    """

    def __init__(self, history: History, path: str, *, results: bool = False) -> None:
        self._history = history
        self._always_new = ("user", "tool") if results else ("user",)
        self._path = path
        self._step = 0
        self._system = ""
        self._tools: list[str] = []
        self._calls: dict[str, str] = {}
        self._seen: set[str] = set()

    def to_steps_tree(self) -> Tree:
        """Return ``{"steps": [...]}`` with the trees of the effects; ``{}`` without effects."""
        return _drop_empty(steps=_drop_repeated_programs(list(self._effect_trees())))

    def _effect_trees(self) -> Iterator[Tree]:
        """Yield the tree of each effect of the run, with its outcome."""
        for intent in self._history.tree.list_effects(self._path):
            result = self._history.results.get(intent.address)
            form = self._history.form(intent)
            tree: Tree = {"address": format_address(*intent.address)}
            if intent.program_line:
                tree["program_line"] = intent.program_line
            tree |= (
                self._make_tree_of_new_request_parts(form)
                if form["type"] == "model_call"
                else self._effect_tree(form, intent.seq)
            )
            if result is not None:
                tree |= _drop_empty(
                    retries=[_describe_attempt(a) for a in result.attempts],
                    outcome=self._make_outcome_tree_and_mark_shown(result),
                )
            yield tree

    def _effect_tree(self, form: Mapping[str, Any], seq: int) -> Tree:
        """Return kind, name and input of an effect other than a model call, and the effects of the run that it starts."""
        if form["type"] == "ask":
            questions = [_question_tree(decode_stored(q)) for q in form["questions"]]
            purpose = form["purpose"] if form["purpose"] != "question" else None
            return {"kind": "ask", "questions": questions} | _drop_empty(purpose=purpose)
        row, about = KINDS[form["type"]], ABOUT.get(form["type"])
        tree: Tree = {"kind": row.verb, "name": form[row.name] if about is None else about(form)}
        if form["type"] == "tool_call":
            source = form["source"] if form["source"] != "model" else None
            tree |= _drop_empty(call=self._number_call_id(form["tool_call_id"]), source=source)
            program, given = find_program_text(form), plain(form["input"])
            if program is not None:
                tree["program"] = {"text": given.pop("code"), "lines": program.count("\n") + 1}
            tree |= {"input": given}
            return (
                tree | _RunEffects(self._history, child_path(self._path, seq)).to_steps_tree()
                if "yields" in form
                else tree
            )
        if form["type"] == "perform":
            return tree | _drop_empty(args=plain(form["args"]), kwargs=plain(form["kwargs"]))
        if form["type"] != "agent_call":
            return tree
        tree |= _drop_empty(
            call=self._number_call_id(form.get("tool_call_id", "")),
            prompt=form["prompt"],
            params=plain(form["params"]),
        )
        path = child_path(self._path, seq)
        if form.get("background"):
            ended = self._history.results.get((path, -1))
            tree |= {"background": True} | _drop_empty(
                ended=None if ended is None else self._make_outcome_tree_and_mark_shown(ended)
            )
        return tree | _RunEffects(self._history, path).to_steps_tree()

    def _make_tree_of_new_request_parts(self, form: Mapping[str, Any]) -> Tree:
        """Count a step, and return its model call with the parts of the request that no earlier call had; remember these parts."""
        self._step += 1
        request = form["request"]
        items = request["messages"]
        kept = sum([i["stop"] - i["start"] for i in items if i["type"] == "slice"])
        new = [i for i in items if i["type"] != "slice"]
        tree: Tree = {"kind": "model", "name": request["model"], "step": self._step}
        tree |= _drop_empty(purpose=form["purpose"] if form["purpose"] != "step" else None)
        tree |= {"messages": kept + len(new), "added": len(new)}
        tools = [spec["name"] for spec in request.get("tools", ())]
        if tools != self._tools:
            self._tools = tree["tools"] = tools
        tree |= _drop_empty(
            tool_choice=plain(request.get("tool_choice")),
            settings=_settings_tree(request.get("settings")),
        )
        system = request.get("system_prompt", "")
        if system != self._system:
            self._system = system
            tree["system"] = system
        tail = [_message_tree(decode_stored(m), self._number_call_id) for m in request.get("tail", ())]
        said = [
            m
            for each in new
            if self._mark_message_shown(
                m := _message_tree(decode_stored(each), self._number_call_id), always_new_roles=self._always_new
            )
        ]
        return tree | _drop_empty(said=[*said, *[m for m in tail if self._mark_message_shown(m)]])

    def _mark_message_shown(self, message: Tree, always_new_roles: Collection[str] = ()) -> bool:
        """Record that a message is shown; return whether it was not shown before or has one of *always_new_roles*."""
        mark = _message_key(message["role"], message["parts"])
        known = mark in self._seen
        self._seen.add(mark)
        return not known or message["role"] in always_new_roles

    def _number_call_id(self, call_id: str) -> str | None:
        """Return a short name for a call id, such as ``c1``, numbered in order of appearance; ``None`` for ``""``."""
        return self._calls.setdefault(call_id, f"c{len(self._calls) + 1}") if call_id else None

    def _make_outcome_tree_and_mark_shown(self, result: Result) -> Tree:
        """Return the outcome of an effect as a tree, and record its parts as shown."""
        outcome = self._history.outcome(result)
        if isinstance(outcome, Failure):
            return {"error": _error_tree(outcome.error)}
        value = outcome.value
        if isinstance(value, ModelReply):
            parts = [_message_part_tree(p, self._number_call_id) for p in value.content]
            self._seen.add(_message_key("assistant", parts))
            usual = StopReason.TOOL_USE if value.tool_calls else None
            return {"parts": parts} | _drop_empty(stop=value.stop_reason.value if value.stop_reason != usual else None)
        if isinstance(value, ToolResult):
            parts = [_message_part_tree(p) for p in value.content]
            self._seen.add(_message_key("tool", parts))
            effects = [f"{e.kind} {e.target}".rstrip() for e in value.side_effects]
            return _drop_empty(status=value.status if value.status != "ok" else None, side_effects=effects) | {
                "parts": parts
            }
        if isinstance(value, ChildResult):
            return {"status": value.status.value} | _make_run_end_tree(value)
        if isinstance(value, tuple) and value and isinstance(value[0], Answer):
            return {"answers": [a.value or "(declined)" for a in value]}
        return {"value": plain(value)}


def _drop_repeated_programs(steps: list[Tree]) -> list[Tree]:
    """Replace each program's text in the reply that calls it by the address of that call; return the changed *steps*."""
    asked: list[Tree] = []
    for step in steps:
        if step["kind"] == "model":
            asked = step.get("outcome", {}).get("parts", [])
        elif "program" in step:
            code = step["program"]["text"]
            part = next((p for p in asked if "tool" in p and (p.get("input") or {}).get("code") == code), None)
            if part is not None:
                part["input"] = {name: value for name, value in part["input"].items() if name != "code"}
                part["program"] = step["address"]
    return steps


def _message_key(role: str, parts: list[Tree]) -> str:
    """Return a key that the forms of one message share; the ids of calls are left out."""
    return f"{role} {canonical([{k: v for k, v in part.items() if k != 'call'} for part in parts])}"


def _settings_tree(stored: object) -> object:
    return None if stored is None else {k: v for k, v in plain(stored).items() if k != "type"}


def _make_run_end_tree(ended: ChildResult) -> Tree:
    """Return output or text of a run that ended, its error and its open questions."""
    output = plain(ended.output)
    said = {"text": ended.text} if ended.text and output is None else _drop_empty(output=output)
    error = None if ended.error is None else _error_tree(ended.error)
    return said | _drop_empty(error=error, questions=[_question_tree(q) for q in ended.questions])


def _join_child_paths(form: Mapping[str, Any]) -> str:
    return ", ".join(map(str, form["children"]))


ABOUT: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "sleep": lambda form: f"until {form['until']}" if form.get("until") else f"{form.get('seconds', 0):g} s",
    "receive": lambda form: str(form["topic"]),
    "wait": _join_child_paths,
    "send": lambda form: str(form["child"]),
    "cancel": _join_child_paths,
}
"""The name that is shown of an effect whose record has no member for it."""


def _describe_attempt(attempt: Mapping[str, object]) -> str:
    error = decode_stored({"type": "failure", "error": attempt["error"]}).error
    status = getattr(error, "status", None)
    return " ".join([str(p) for p in (type(error).__name__, status or "", getattr(error, "kind", "")) if p])


def _error_tree(error: BaseException) -> Tree:
    return {"type": type(error).__name__, "message": plain(str(error))}


def _question_tree(question: Question) -> Tree:
    return {"id": question.id, "text": question.text} | _drop_empty(options=list(question.options))


def _message_tree(message: Message, format_call_id: Any = str) -> Tree:
    tree: Tree = {"role": message.role, "parts": [_message_part_tree(p, format_call_id) for p in message.content]}
    if isinstance(message, ToolMessage):
        status = message.status if message.status != "ok" else None
        return tree | _drop_empty(name=message.tool_name, id=format_call_id(message.tool_call_id), status=status)
    if isinstance(message, AssistantMessage):
        return tree
    return tree | _drop_empty(tags=[tag for tag in message.tags if tag != "USER_PROMPT"])


def _message_part_tree(part: Part, format_call_id: Any = str) -> Tree:
    match part:
        case TextPart():
            return {"text": part.text}
        case ThinkingPart():
            signed = (part.provider_data or JsonDict()).get("signature")
            return {"thinking": part.text} | _drop_empty(
                signature=_short_hash(str(signed).encode()) if signed else None
            )
        case RefusalPart():
            return {"refusal": part.text}
        case ToolCallPart():
            given = {"input": thaw(part.input)} if part.input_error is None else {"unreadable": part.raw_input or ""}
            return {"tool": part.tool_name} | _drop_empty(call=format_call_id(part.tool_call_id)) | given
        case JsonPart() | ToolReferencePart():
            return {"json": thaw(part.value)} if isinstance(part, JsonPart) else {"finds": part.tool_name}
        case ImagePart() | DocumentPart():
            return {"media": _describe_media(part)}
        case OpaquePart() | CitationPart():
            return _provider_part_tree(part)
        case _ as never:
            assert_never(never)


def _provider_part_tree(part: OpaquePart | CitationPart) -> Tree:
    if isinstance(part, CitationPart):
        return {"cites": part.url or part.source} | _drop_empty(title=part.title, quote=part.quote, said=part.said)
    told = _drop_empty(did=part.tool, shows=part.text)
    return {"opaque": f"{part.provider} {_short_hash(canonical(part.data).encode())}"} | told


def _describe_media(part: ImagePart | DocumentPart) -> str:
    if part.data is not None:
        what = f"{len(part.data):,} bytes {_short_hash(part.data)}"
    else:
        what = str(part.url) if part.file_id is None else f"file {part.file_id} of {part.provider}"
    return f"{part.mime_type} {what}"


def _short_hash(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()[:HASH_DIGITS]}"


def _drop_empty(**members: object) -> Tree:
    return {name: value for name, value in members.items() if value not in EMPTY}


MAX_TEXT_CHARS = 2_000
"""About a screen. The digest beside it shows whether the rest changed."""
MAX_INLINE_CHARS = 100
"""What fits on a line with its name stays on it."""
MAX_LINE_CHARS = 200
"""Longer lines of a program are data, such as a table in one line."""
FIRST_LINES = 3
"""The first lines of a program say what it is for."""
NEAR_LINES = 2
"""Enough to see the statement around a call; a diff has three lines."""
BLANK = "\u2420"
"""Stands for a space at the end of a line, which editors would take away."""
PYTEST_FOLDER = re.compile(r"<tmp>[/\\]pytest-of-[^/\\\s]+[/\\]pytest-\d+(?![\w-])")


def redact_and_shorten_tree(tree: object, *, portable: bool = False, keeps_long_texts: bool = False) -> Any:
    """
    Return a JSON value with secrets redacted and long texts cut to 2,000 characters.

    Args:
        tree: The value.
        portable: Also replace texts that identify this machine: folders, the names of host and user.
        keeps_long_texts: Do not shorten long texts.
    """
    clean = make_redactor("all", os.environ, machine=machine_data() if portable else None).value(tree)
    if portable:
        # The folder that pytest puts between its temporary folder and a test's is another one in each of its runs.
        clean = _map_keys_and_texts(clean, lambda text: PYTEST_FOLDER.sub("<tmp>", text))
    return clean if keeps_long_texts else _restore_program_texts(_map_keys_and_texts(clean, _shorten_text), clean)


def _restore_program_texts(shortened: Any, full: Any) -> Any:
    """
    Return a shortened tree with the full texts of its programs, marked where only parts are to be shown.

    Of a long program the lines around its calls are shown, so its text must not be cut.
    """
    if isinstance(full, list):
        return [_restore_program_texts(*pair) for pair in zip(shortened, full, strict=True)]
    if not isinstance(full, dict):
        return shortened
    for name in ("steps", "children"):
        if name in full:
            shortened[name] = _restore_program_texts(shortened[name], full[name])
    program = full.get("program")
    if isinstance(program, dict) and "address" in full:
        shortened["program"] = {**program, "cut": True} if len(str(program.get("text"))) > MAX_TEXT_CHARS else program
    return shortened


def _map_keys_and_texts(value: object, change: Callable[[str], str]) -> object:
    """Return a JSON value with *change* applied to every string, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(k): _map_keys_and_texts(v, change) for k, v in value.items()}
    return [_map_keys_and_texts(v, change) for v in value] if isinstance(value, list) else value


def _shorten_text(text: str) -> str:
    """Return a text of at most 2,000 characters unchanged, or the start of a longer one with its length and a digest."""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    mark = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:HASH_DIGITS]
    return f"{text[:MAX_TEXT_CHARS]}\n... (cut: {len(text):,} characters, sha256:{mark})"


def render(tree: Mapping[str, object]) -> str:
    """
    Return a tree of ``make_run_tree`` or ``make_result_tree`` as text that ends with a line end.

    Missing members are left out, and members of an unusual type are shown unchanged, since the filters of a snapshot may have
    removed or replaced them.
    """
    return "".join([f"{_escape_line(line)}\n" for line in _iterate_run_lines(tree)])


def render_effects(tree: Mapping[str, object], addresses: Collection[str]) -> str:
    """Return the effects with one of *addresses* as text, without system prompts and messages of requests."""
    lines = [_escape_line(line) for effect in _find_effects(tree, addresses) for line in _effect_lines(effect)]
    return "".join([f"{line}\n" for line in lines])


def _find_effects(tree: Mapping[str, object], addresses: Collection[str]) -> Iterator[Mapping[str, object]]:
    """Yield the effects at *addresses*, at any depth, without system prompts and messages of requests."""
    for effect in _get_list_or_empty(tree, "steps"):
        if effect["address"] in addresses:
            yield {name: member for name, member in effect.items() if name not in ("system", "said")}
        else:
            yield from _find_effects(effect, addresses)


def _escape_line(line: str) -> str:
    """Return a line with line ends, tabs, control characters and trailing spaces made visible."""
    # Texts are split into lines already: a line end that is left stands in a name.
    return _mark_trailing_spaces(visible(line.replace("\n", "\\n")).replace("\t", "\\t"))


def _mark_trailing_spaces(line: str) -> str:
    """Return a line with the spaces at its end made visible."""
    bare = line.rstrip(" ")
    return bare + BLANK * (len(line) - len(bare))


def _iterate_run_lines(tree: Mapping[str, Any]) -> Iterator[str]:
    words = [
        f"run {tree.get('agent', '')}",
        tree.get("status"),
        _format_count(tree, "effects"),
        _format_count(tree, "model_calls"),
    ]
    spent = tree.get("tokens")
    about = "at least " if tree.get("at_least") else ""
    if isinstance(spent, Mapping):
        words.append(f"tokens {about}{spent.get('in')} in / {spent.get('out')} out")
    if tree.get("cost_usd") is not None:
        words.append(f"cost {about}${tree['cost_usd']}")
    elif about and "cost_usd" in tree:  # a snapshot may leave the cost out
        words.append("cost unknown")
    yield _join_words(words)
    yield from _named_value_lines("prompt", tree.get("prompt"))
    yield from _named_value_lines("params", tree.get("params"))
    for message in _get_list_or_empty(tree, "messages"):
        yield from _message_lines(message)
    for child in _get_list_or_empty(tree, "children"):
        yield _join_words([f"child {child.get('agent', '')}", child.get("status")])
        yield from _indent("  ", _iterate_run_end_lines(child))
    for effect in _get_list_or_empty(tree, "steps"):
        yield from _effect_lines(effect)
    yield from _iterate_run_end_lines(tree)


def _iterate_run_end_lines(tree: Mapping[str, Any]) -> Iterator[str]:
    if "output" in tree:
        yield from _named_value_lines("output", tree["output"], quoted=True)
    yield from _named_value_lines("text", tree.get("text"))
    error = tree.get("error")
    if isinstance(error, Mapping):
        yield from _named_value_lines(f"error {error.get('type')}", error.get("message"))
    for question in _get_list_or_empty(tree, "questions"):
        yield from _question_lines("waits for an answer to ", question)


def _effect_lines(effect: Mapping[str, object]) -> Iterator[str]:
    kind = effect.get("kind")
    words = [
        effect.get("address"),
        f"{kind} {effect.get('name', '')}".rstrip(),
        effect.get("call"),
        effect.get("purpose"),
    ]
    if effect.get("source"):
        words.append(f"by {effect['source']}")
    if kind == "model":
        messages = effect.get("messages")
        words += [f"step {effect.get('step')}", f"messages {messages} (+{effect.get('added')})" if messages else ""]
        words += [
            f"tools {', '.join(map(str, _get_list_or_empty(effect, 'tools'))) or 'none'}" if "tools" in effect else ""
        ]
    retries = _get_list_or_empty(effect, "retries")
    words += [f"retries {len(retries)}: {', '.join(map(str, retries))}" if retries else ""]
    yield _join_words(words)
    yield from _indent("     ", _request_lines(effect))
    yield from _result_lines(effect)


def _request_lines(effect: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of an effect's input, program or request, and of the effects inside it."""
    yield from _object_lines(effect.get("input"))
    program = effect.get("program")
    if isinstance(program, Mapping):
        yield from _program_lines(program, _get_list_or_empty(effect, "steps"))
        return
    for name in ("tool_choice", "settings", "system", "prompt", "params", "args", "kwargs"):
        yield from _named_value_lines(name, effect.get(name))
    for message in _get_list_or_empty(effect, "said"):
        yield from _message_lines(message)
    for question in _get_list_or_empty(effect, "questions"):
        yield from _question_lines("", question)
    for inner in _get_list_or_empty(effect, "steps"):
        yield from _effect_lines(inner)


def _program_lines(program: Mapping[str, object], effects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """
    Yield the numbered lines of a program with their effects below, and ``>`` where it waits.

    Effects without a line of this text follow at the end: old records have no lines, and redaction may have removed some.
    """
    lines = str(program.get("text", "")).split("\n")
    fits = len(lines) == program.get("lines")
    if len(lines) > 1 and not lines[-1]:
        lines.pop()
    at: dict[int, list[Mapping[str, Any]]] = {}
    for effect in effects:
        line = effect.get("program_line")
        at.setdefault(line if fits and isinstance(line, int) and line <= len(lines) else 0, []).append(effect)
    waits = {line for line, asked in at.items() if any("outcome" not in effect for effect in asked)}
    digits = len(str(len(lines)))
    yield "program"
    for number, line in _select_program_lines(lines, at.keys() if program.get("cut") else None):
        if number:
            yield f"  {'>' if number in waits else ' '} {number:>{digits}}  {line}".rstrip(" ")
        else:
            yield f"    {'':{digits}}  {line}"
        for effect in at.get(number, ()) if number else ():
            yield from _indent(" " * (6 + digits), _program_effect_lines(effect))
    for effect in at.get(0, ()):
        yield from _program_effect_lines(effect)


def _select_program_lines(lines: Sequence[str], around: Collection[int] | None) -> Iterator[tuple[int, str]]:
    """Yield numbered lines: all if *around* is ``None``, else the first ones and those near its numbers; 0 marks an omission."""
    near = {at + n for at in around or () for n in range(-NEAR_LINES, NEAR_LINES + 1) if at}
    left = 0
    for number, line in enumerate(lines, 1):
        if around is not None and number > FIRST_LINES and number not in near:
            left += 1
            continue
        if left:
            yield 0, _omission_text(left, number - 1)
            left = 0
        line = line.removesuffix("\r")  # noqa: PLW2901 - of a line end that has two characters
        is_long = around is not None and len(line) > MAX_LINE_CHARS
        yield number, f"{line[:MAX_LINE_CHARS]}... (cut: {len(line):,} characters)" if is_long else line
    if left:
        yield 0, _omission_text(left, len(lines))


def _omission_text(count: int, last: int) -> str:
    """Return the text for *count* omitted lines that end with line *last*."""
    return f"... (cut: {f'lines {last - count + 1} to {last}' if count > 1 else f'line {last}'})"


def _program_effect_lines(effect: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for an effect of a program, in one line if it fits."""
    came = list(_outcome_lines(effect["outcome"])) if "outcome" in effect else ["(no result yet)"]
    asks = _format_request_if_single_line(effect)
    text = _format_outcome_if_single_line(effect.get("outcome"))
    brief = came if text is None else [text]
    if asks is None or len(brief) != 1 or len(brief[0]) > MAX_INLINE_CHARS:
        yield from _effect_lines(effect)
    else:
        yield f"{asks} -> {brief[0]}"


def _format_request_if_single_line(effect: Mapping[str, Any]) -> str | None:
    """Return the request of a program's effect in one line, or ``None`` if it needs more."""
    if any(name in effect for name in ("steps", "retries", "prompt", "params", "program")):
        return None
    asked = [
        _join_words([q.get("id"), _to_json(q.get("text")), *map(_to_json, _get_list_or_empty(q, "options"))])
        for q in _get_list_or_empty(effect, "questions")
        if isinstance(q, Mapping)
    ]
    given = [_to_json(effect["input"])] if "input" in effect else []
    words = [effect.get("address"), f"{effect.get('kind')} {effect.get('name', '')}".rstrip(), effect.get("purpose")]
    said = _join_words([*words, *given, *asked])
    return said if len(said) <= MAX_INLINE_CHARS and "\n" not in said else None


def _format_outcome_if_single_line(outcome: object) -> str | None:
    """Return the status and text of an outcome in one line; ``None`` if it is more than one text."""
    if not isinstance(outcome, Mapping) or not outcome.keys() <= {"parts", "status"}:
        return None
    parts = _get_list_or_empty(outcome, "parts")
    only = parts[0] if len(parts) == 1 else None
    if not isinstance(only, Mapping) or only.keys() != {"text"}:
        return None
    return " ".join([str(said) for said in (outcome.get("status"), _to_json(only["text"])) if said])


def _result_lines(effect: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines for the outcome of an effect, or that there is none yet."""
    if "outcome" not in effect:
        yield "   -> (no result yet)"
        return
    lines = list(_outcome_lines(effect["outcome"])) or ["(nothing)"]
    yield f"   -> {lines[0]}"
    yield from [f"      {line}" if line else "" for line in lines[1:]]


def _outcome_lines(outcome: object) -> Iterator[str]:
    if not isinstance(outcome, Mapping):
        yield from _value_lines(outcome)
        return
    if outcome.get("status"):
        yield str(outcome["status"])
    for part in _get_list_or_empty(outcome, "parts"):
        yield from _part_lines(part)
    if "value" in outcome:
        yield from _value_lines(outcome["value"])
    yield from [_to_json(answer) for answer in _get_list_or_empty(outcome, "answers")]
    yield from _iterate_run_end_lines(outcome)
    yield from [f"side effect {each}" for each in _get_list_or_empty(outcome, "side_effects")]
    if outcome.get("stop"):
        yield f"stop {outcome['stop']}"


def _message_lines(message: object) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield from _value_lines(message)
        return
    words = [message.get(name) for name in ("role", "name", "id", "status")]
    tags = ", ".join(map(str, _get_list_or_empty(message, "tags")))
    yield _join_words([*words, tags and f"tags {tags}"])
    for part in _get_list_or_empty(message, "parts"):
        text = part.get("text") if isinstance(part, Mapping) and len(part) == 1 else None
        yield from _indent("  ", _text_lines(text) if isinstance(text, str) else _part_lines(part))


def _part_lines(part: object) -> Iterator[str]:
    if not isinstance(part, Mapping):
        yield from _value_lines(part)
        return
    for name in ("text", "thinking", "refusal"):
        if name in part:
            yield _join_words([name, part.get("signature") and f"signature {part['signature']}"])
            yield from _indent("  ", _text_lines(str(part[name])))
    if "tool" in part:
        program = part.get("program")
        yield _join_words([f"call {part['tool']}", part.get("call"), program and f"program of {program}"])
        yield from _indent("  ", _object_lines(part.get("input")))
        yield from _indent("  ", _named_value_lines("unreadable", part.get("unreadable")))
    if "json" in part:
        yield from _value_lines(part["json"])
    if "media" in part:
        yield str(part["media"])
    yield from _provider_part_lines(part)


def _provider_part_lines(part: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines for a provider's own tool call, and for the source of a text."""
    if "opaque" in part:
        yield _join_words([f"opaque {part['opaque']}", part.get("did")])
        if part.get("shows"):
            yield from _indent("  ", _text_lines(str(part["shows"])))
    if "cites" in part:
        yield _join_words([f"cites {part['cites']}".rstrip(), part.get("title")])
        for name in ("quote", "said"):
            yield from _indent("  ", _named_value_lines(name, part.get(name)))


def _question_lines(prefix: str, question: Any) -> Iterator[str]:
    if not isinstance(question, Mapping):
        yield from _value_lines(question)
        return
    options = ", ".join([_to_json(o) for o in _get_list_or_empty(question, "options")])
    yield _join_words([f"{prefix}{question.get('id')}", options and f"options {options}"])
    yield from _indent("  ", _text_lines(str(question.get("text", ""))))


# --- values -----------------------------------------------------------------------------------------------------------


def _named_value_lines(name: str, value: object, *, quoted: bool = False) -> Iterator[str]:
    """Yield *name* and its value below it; nothing for ``None`` or ``""``, unless *quoted*."""
    if value in (None, "") and not quoted:
        return
    yield name
    yield from _indent("  ", _text_lines(value) if isinstance(value, str) and not quoted else _value_lines(value))


def _object_lines(value: object) -> Iterator[str]:
    """Yield the members of an object, one per line; long texts below their names."""
    if not isinstance(value, Mapping):
        yield from _value_lines(value) if value is not None else ()
        return
    for name, member in value.items():
        if isinstance(member, str) and ("\n" in member or len(member) > MAX_INLINE_CHARS):
            yield f"{name}: |"
            yield from _indent("  ", _text_lines(member))
            continue
        first, *rest = _value_lines(member)
        yield f"{name}: {first}"
        yield from rest


def _value_lines(value: object) -> Iterator[str]:
    """Yield the lines of a JSON value: one, or several if it is long."""
    if isinstance(value, str) and "\n" in value:
        yield "|"
        yield from _indent("  ", _text_lines(value))
        return
    short = _to_json(value)
    if len(short) <= MAX_INLINE_CHARS or not isinstance(value, Mapping | list | tuple):
        yield from _text_lines(short)
        return
    yield from _text_lines(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def _text_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text with trailing spaces made visible."""
    yield from map(_mark_trailing_spaces, text.split("\n"))


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _indent(prefix: str, lines: Iterator[str]) -> Iterator[str]:
    yield from [f"{prefix}{line}" if line else "" for line in lines]


def _join_words(words: list[Any]) -> str:
    return "  ".join([str(word) for word in words if word])


def _format_count(tree: Mapping[str, object], name: str) -> str:
    number = tree.get(name)
    if not isinstance(number, int):
        return ""
    words = name.replace("_", " ")
    return f"{number} {words[:-1] if number == 1 else words}"


def _get_list_or_empty(tree: Mapping[str, object], name: str) -> list[Any]:
    found = tree.get(name)
    return list(found) if isinstance(found, list | tuple) else []
