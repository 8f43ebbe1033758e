"""
``prune_to_summary``: replaces older turns by a summary without a model call.

The summary contains one line for each tool call, and the few important results. Each entry is one part of the summary message and
stores its role in the part's own data. So a later prune restores the list exactly, whatever the texts contain. A summary is
identified by its tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
from attrs import frozen
from typing_extensions import override

from stepengine.context.policy import (
    COUNT,
    TOKENS,
    ContextLimits,
    ContextPolicy,
    find_last_tagged_user_message,
    make_hook_limits,
)
from stepengine.context.summaries import SUMMARY
from stepengine.context.truncation import GAP_TAG
from stepengine.data.definition import HookContext
from stepengine.data.estimate import MEDIA_TOKENS, message_tokens, transcript_tokens
from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict, compact
from stepengine.data.messages import (
    AssistantMessage,
    DocumentPart,
    ImagePart,
    JsonPart,
    Message,
    TextPart,
    ToolCallPart,
    ToolMessage,
    UserMessage,
    UserPart,
    system_reminder,
)
from stepengine.data.thoughts import split_thoughts
from stepengine.data.transcript import Transcript
from stepengine.data.visible import cut_middle

SUMMARY_TAG = "CONVERSATION_SUMMARY"
SUMMARY_TAGS = frozenset({SUMMARY_TAG, SUMMARY})
"""Tags of summaries, from this policy or written by the model. Texts never identify a summary (generator-contract:P24)."""
MEMORY_TAG = "MEMORY"
CONTINUE_TAG = "CONTINUE_PROMPT"
SILENT_TAGS = frozenset({"INSTRUCTIONS_PROMPT", "STEP_PROMPT", "AGENT_SPAWN_NOTICE", CONTINUE_TAG, GAP_TAG})
"""Tags of messages that are not summarized and do not start a turn (generator-contract:P12)."""

SEPARATOR = "\n\n---\n\n"
HEADER = (
    "<conversation_summary>\nThis is your memory of the conversation so far. What is left out below is gone; look again "
    "if you need it. It is a memory, not a format: do not write like this yourself, call tools as usual."
)
FOOTER = "\n</conversation_summary>"
CONTINUE = system_reminder(
    "The conversation above was shortened to a summary in the middle of your work. Go on with the last request of the user "
    "that it holds, and do not repeat what is already done."
)


class EntryCaps(NamedTuple):
    """
    The limits of new entries in tokens, at three characters each.

    Attributes:
        user: The text of a user.
        note: The text of a reply.
        work: The whole entry of a reply or a result, calls included.
    """

    user: int = 13_000
    note: int = 1_300
    work: int = 1_000_000


class RememberedMessage(NamedTuple):
    """The summary of one message; ``live`` marks the request that the agent works on."""

    role: str
    text: str
    live: bool = False


class Memory(NamedTuple):
    """The remembered part of a history: its entries, oldest first, and the newest images and documents of a user."""

    entries: tuple[RememberedMessage, ...]
    media: tuple[ImagePart | DocumentPart, ...] = ()


def count_entry_tokens(entry: RememberedMessage) -> int:
    """Return the size of an entry in tokens, at three characters each, rounded up."""
    # generator-contract:P22
    return -(-len(entry.text) // 3)


def _parse_summary_entries(message: UserMessage) -> list[RememberedMessage]:
    """Return the entries that ``make_summary_message`` stored in a message; an empty list for other messages."""
    entries = []
    for part in message.content:
        data = part.provider_data if isinstance(part, TextPart) else None
        if isinstance(part, TextPart) and data and data.get("provider") == "stepengine" and "entry" in data:
            entries.append(RememberedMessage(data["entry"], part.text.removeprefix(SEPARATOR), bool(data.get("live"))))
    return entries


def make_memory_entry(
    message: Message, calls: Mapping[str, ToolCallPart], forgotten_agents: frozenset[str], caps: EntryCaps
) -> RememberedMessage | None:
    """Return the entry that summarizes one message; ``None`` if nothing of the message is to be remembered."""
    if isinstance(message, UserMessage):
        text, documents = message.text.strip(), [p for p in message.content if isinstance(p, DocumentPart)]
        if not text and not documents:
            return None
        counts = {"image": sum(isinstance(p, ImagePart) for p in message.content), "document": len(documents)}
        listed = [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]
        note = f" (with {' and '.join(listed)})" if listed else ""
        speaker = "[EARLIER SUMMARY]" if SUMMARY_TAGS.intersection(message.tags) else "[USER]"
        return RememberedMessage("user", "\n".join(filter(None, (f"{speaker}{note}", cut_to_tokens(text, caps.user)))))
    if isinstance(message, AssistantMessage):
        text = cut_to_tokens(message.text_without_thoughts.strip(), caps.note)
        lines = [*([f"Progress note: {text}"] if text else []), *map(describe_call, message.tool_calls)]
        return RememberedMessage("assistant", cut_to_tokens("\n".join(lines), caps.work)) if lines else None
    text = format_remembered_result(message, calls[message.tool_call_id], forgotten_agents)
    return RememberedMessage("assistant", cut_to_tokens(text, caps.work)) if text else None


def build_memory(
    messages: Iterable[Message],
    live_request: Message | None,
    forgotten_agents: frozenset[str],
    caps: EntryCaps,
    *,
    keeps_live_mark: bool,
) -> Memory:
    """
    Return the memory of *messages*; the entries of earlier summaries keep their position.

    Args:
        messages: The messages to summarize.
        live_request: The request that the agent works on, if it is one of them.
        forgotten_agents: Agents whose outputs are omitted.
        caps: The limits of new entries.
        keeps_live_mark: Whether the live request in an earlier summary is still the live one.
    """
    entries: list[RememberedMessage] = []
    images: tuple[ImagePart | DocumentPart, ...] = ()
    documents: tuple[ImagePart | DocumentPart, ...] = ()
    calls: dict[str, ToolCallPart] = {}
    for message in messages:
        if isinstance(message, AssistantMessage):
            calls = {call.tool_call_id: call for call in message.tool_calls}
        if isinstance(message, UserMessage):
            images = tuple([p for p in message.content if isinstance(p, ImagePart)]) or images
            documents = tuple([p for p in message.content if isinstance(p, DocumentPart)]) or documents
            if SUMMARY_TAG in message.tags and (stored := _parse_summary_entries(message)):
                entries += stored if keeps_live_mark else [entry._replace(live=False) for entry in stored]
                continue
        entry = make_memory_entry(message, calls, forgotten_agents, EntryCaps() if message is live_request else caps)
        if entry is not None:
            entries.append(entry._replace(live=message is live_request))
    return Memory(tuple(entries), images + documents)


def select_fitting_entries(
    entries: Sequence[RememberedMessage], user_budget: int, assistant_tool_budget: int
) -> tuple[RememberedMessage, ...]:
    """
    Return the newest entries within the token budgets of both roles; live entries and the newest entry always stay.

    After the first entry of a role that does not fit, all older entries of that role are dropped. The size of live entries is not
    counted.
    """
    left = {"user": user_budget, "assistant": assistant_tool_budget}
    kept: list[RememberedMessage] = []
    for entry in reversed(entries):
        if not entry.live:
            size = count_entry_tokens(entry)
            fits = size <= left[entry.role]
            left[entry.role] = left[entry.role] - size if fits else -1
            if not fits and kept:
                continue
        kept.append(entry)
    return tuple(reversed(kept))


def make_summary_message(memory: Memory) -> UserMessage:
    """Return the message that stores a memory, one part per entry."""
    parts: list[UserPart] = [TextPart(HEADER)]
    for entry in memory.entries:
        data = {"provider": "stepengine", "entry": entry.role, **({"live": True} if entry.live else {})}
        parts.append(TextPart(SEPARATOR + entry.text, provider_data=data))
    return UserMessage((*parts, TextPart(FOOTER), *memory.media), (SUMMARY_TAG, MEMORY_TAG))


SAFE_CHARS_PER_TOKEN = 3
"""Fewer than the usual four: a text cut to a number of tokens must not exceed it in a language with short tokens."""
NOTICE_CHARS = 50
"""The length of the notice of omitted characters."""
HEAD_RATIO = 0.8
"""The share of the beginning of a text, which names its subject; its end contains the result."""
COMMAND_CHARS = 50
"""The program and its first arguments; its output is a separate entry."""
QUESTION_CHARS = 200
"""Usually a complete question, since its answer is useless without it."""
AGENT_CHARS = 1_000
"""A paragraph for each agent: its task, not the material."""
ERROR_CHARS = 100
"""The first line of an error; the model has seen the rest when it was new."""
ANSWER_CHARS = 10_000
"""An answer of a person is nearly complete, since the person cannot be asked again."""
EDIT_CHARS = 2_000
"""The changed parts of a file: the file itself can be read again."""
OUTPUT_TOKENS = 1_300
"""About a page of an agent's output; a summary contains dozens of them."""
RESULT_TOKENS = 5_000
"""The limit for the results of one message: one step must not use the room of the others."""

EDITING = ("write_file", "str_replace", "apply_patch", "propose_write_file", "propose_str_replace")
SPAWNING = ("spawn_agents", "spawn_agent_inline", "task")


def cut_to_tokens(text: str, max_tokens: int) -> str:
    """Return *text* cut to three characters per token, 80 % of them from its start, with a note on the omitted length in the middle."""
    limit = max_tokens * SAFE_CHARS_PER_TOKEN
    if len(text) <= limit:
        return text
    kept = max(0, limit - NOTICE_CHARS)
    return cut_middle(text, kept, f"[... {len(text) - kept} characters left out ...]", head=int(kept * HEAD_RATIO))


def clip_to_one_line(text: str, max_chars: int) -> str:
    """Return *text* on one line and at most *max_chars* characters long."""
    return _cut_with_ellipsis(" ".join(text.split()), max_chars)


def _format_json_value(value: object) -> str:
    """Return a JSON value as text: strings unchanged, lists of strings joined by commas, ``null`` as ``""``."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return "" if value is None else compact(value)


def _format_paths(call_input: Mapping[str, object]) -> str:
    """Return the paths in the input of a file tool, joined by commas."""
    paths = call_input.get("paths") or call_input.get("path")
    listed = paths if isinstance(paths, list) else [paths]
    return ", ".join([_format_json_value(p.get("path") if isinstance(p, Mapping) else p) for p in listed])


def _describe_patch(call_input: Mapping[str, object]) -> str:
    """Return a line about an edit: the path of its operation."""
    operation = call_input.get("operation")
    return f"Edited {_format_json_value(operation.get('path') if isinstance(operation, Mapping) else None)}"


def _describe_search(call_input: Mapping[str, Any]) -> str:
    """Return a line about a code search: its pattern and flags."""
    flags = _format_json_value(call_input.get("flags"))
    return f"Searched code for {_format_json_value(call_input.get('pattern'))}" + (f" ({flags})" if flags else "")


def _describe_command(call_input: Mapping[str, object]) -> str:
    """Return a line about a terminal command."""
    command = call_input.get("command")
    words = " ".join(map(_format_json_value, command)) if isinstance(command, list) else _format_json_value(command)
    return f"Ran {clip_to_one_line(words, COMMAND_CHARS)}"


def _describe_docs_lookup(call_input: Mapping[str, object]) -> str:
    """Return a line about a look-up in documentation: the library and topic."""
    return f"Read docs: {_format_json_value(call_input.get('library_title'))} - {_format_json_value(call_input.get('topic'))}"


def _get_object_list(call_input: Mapping[str, object], name: str) -> list[Mapping[str, Any]]:
    """Return the objects in a list member of a call's input; an empty list if it is no list."""
    value = call_input.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _describe_todos(call_input: Mapping[str, object]) -> str:
    """Return a line about a to-do list: how many are done, and the open ones."""
    todos = _get_object_list(call_input, "todos")
    left = [_format_json_value(t.get("task")) for t in todos if not t.get("completed")]
    return f"Todos: {len(todos) - len(left)} of {len(todos)} done" + (f"; left: {'; '.join(left)}" if left else "")


def _describe_questions(call_input: Mapping[str, object]) -> str:
    """Return a line with the questions that the user was asked."""
    asked = [_format_json_value(q.get("question")) for q in _get_object_list(call_input, "questions")]
    return f"Asked the user: {clip_to_one_line(' / '.join(asked), QUESTION_CHARS)}"


def _describe_agents(call_input: Mapping[str, object]) -> str:
    """Return a line with the agents of a call, and the excerpts of their prompts."""
    shown = []
    for agent in _get_object_list(call_input, "agents") or [call_input]:
        name = _format_json_value(agent.get("agent_type") or agent.get("agent"))
        parts = [_format_json_value(agent.get("prompt")), compact(agent["params"]) if agent.get("params") else ""]
        said = [clip_to_one_line(part, AGENT_CHARS) for part in parts if part]
        shown.append(f"{name} ({'; '.join(said)})" if said else name)
    return f"Delegated to {', '.join(shown)}"


def _make_describer(verb: str, name: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that describes a call by *verb* and the member *name* of its input."""
    return lambda call_input: f"{verb} {_format_json_value(call_input.get(name))}"


LINES: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        "read_files": lambda call_input: f"Read {_format_paths(call_input)}",
        "write_file": _make_describer("Wrote", "path"),
        "str_replace": _make_describer("Edited", "path"),
        "apply_patch": _describe_patch,
        "propose_write_file": _make_describer("Proposed to write", "path"),
        "propose_str_replace": _make_describer("Proposed to edit", "path"),
        "read_subtree": lambda call_input: f"Read the tree of {_format_paths(call_input) or '.'}",
        "code_search": _describe_search,
        "glob": _make_describer("Listed files like", "pattern"),
        "list_directory": _make_describer("Listed the directory", "path"),
        "find_files": _make_describer("Looked for files:", "prompt"),
        "run_terminal_command": _describe_command,
        "read_url": _make_describer("Read", "url"),
        "web_search": _make_describer("Searched the web for", "query"),
        "read_docs": _describe_docs_lookup,
        "write_todos": _describe_todos,
        "ask_user": _describe_questions,
        **dict.fromkeys(SPAWNING, _describe_agents),
        "set_output": lambda _: "Set the output",
        "set_messages": lambda _: "Changed the messages",
    }
)
"""The descriptions of tool calls, made from their input (generator-contract:P15); other tools are named only."""


def _find_delegated_agent(call: ToolCallPart) -> str:
    """Return the id of the agent to which a call delegates a task, recognized by tool name or input; ``""`` for other calls."""
    if call.tool_name == "task":
        return _format_json_value(call.input.get("agent"))
    is_agent = call.tool_name not in LINES and "prompt" in call.input and call.input.keys() <= {"prompt", "params"}
    return call.tool_name.replace("_", "-") if is_agent else ""


def describe_call(call: ToolCallPart) -> str:
    """Return a one-line description of a call: its action and its object."""
    describe, agent = LINES.get(call.tool_name), _find_delegated_agent(call)
    if agent and describe is None:
        line = _describe_agents({**call.input, "agent_type": agent})
    else:
        line = call.tool_name if describe is None else describe(call.input)
    return f"- {' '.join(line.split())}"


def _find_json_value(message: ToolMessage) -> object:
    return next((part.value for part in message.content if isinstance(part, JsonPart)), None)


def format_remembered_result(message: ToolMessage, call: ToolCallPart, omitted_agents: frozenset[str]) -> str:
    """
    Return the excerpt of a result for the memory; ``""`` for none.

    Args:
        message: The result.
        call: Its call.
        omitted_agents: Agents whose outputs are omitted.
    """
    # generator-contract:P18
    kept = cut_to_tokens("\n".join(_format_result_lines(message, call, omitted_agents)), RESULT_TOKENS)
    return f"[{message.tool_name} result]\n{kept}" if kept else ""


def _format_result_lines(message: ToolMessage, call: ToolCallPart, forgotten_agents: frozenset[str]) -> Iterator[str]:
    """Yield the lines to remember of a tool result, depending on its kind."""
    data, agent = _find_json_value(message), _find_delegated_agent(call)
    if children := _find_agent_entries(data):
        yield from _format_agent_outputs(children, forgotten_agents)
    elif message.is_error:
        yield from _format_failure(data, message.text)
    elif agent:
        yield from _format_agent_outputs([{"agent_type": agent, "output": message.text}], forgotten_agents)
    elif message.tool_name == "ask_user":
        yield from _format_answers(data)
    elif message.tool_name in EDITING:
        yield _cut_with_ellipsis(message.text, EDIT_CHARS)
    else:
        yield from _format_failure(data, "")


def _format_failure(data: object, fallback: str) -> Iterator[str]:
    """Yield a line for a non-zero exit code and a line for the error; without both fields, *fallback* is the error."""
    fields = data if isinstance(data, Mapping) else {}
    code = fields.get("exit_code", fields.get("exitCode"))
    if isinstance(code, int) and code:
        yield f"Exit code {code}"
    said = fields.get("error_message") or fields.get("errorMessage") or ("" if code else fallback)
    if said:
        yield f"Error: {clip_to_one_line(_format_json_value(said), ERROR_CHARS)}"


def _cut_with_ellipsis(text: str, max_chars: int) -> str:
    """Return *text* in at most *max_chars* characters, with an ellipsis if it was cut."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def _format_answers(data: object) -> Iterator[str]:
    """Yield a line with the user's answers, or that the question was skipped."""
    if not isinstance(data, Mapping) or data.get("skipped"):
        yield "The user skipped the question."
    else:
        answers = [_format_json_value(a.get("selected") or a.get("text")) for a in _get_object_list(data, "answers")]
        yield _cut_with_ellipsis(f"The user answered: {'; '.join(answers)}", ANSWER_CHARS)


def _find_agent_entries(data: object) -> list[Mapping[str, Any]]:
    """Return the entries of a result that lists agents; it is recognized by its form, since such a tool may have any name."""
    listed = data if isinstance(data, list) else []
    return [entry for entry in listed if isinstance(entry, Mapping) and "agent_type" in entry]


def _format_agent_outputs(children: Sequence[Mapping[str, object]], forgotten_agents: frozenset[str]) -> Iterator[str]:
    """Yield a line for the error or output of each child agent; outputs of *forgotten_agents* agents are omitted."""
    for child in children:
        name = _format_json_value(child.get("agent_type"))
        if "error" in child:
            yield f"{name} failed: {clip_to_one_line(_format_json_value(child['error']), ERROR_CHARS)}"
        if name not in forgotten_agents and (
            said := split_thoughts(_format_json_value(child.get("output"))).said.strip()
        ):
            yield f"{name}: {cut_to_tokens(said, OUTPUT_TOKENS)}"


LAST_REQUEST = "last_request_at"
"""The member of ``AgentState.context`` with the time of the last model call; stored only for the cold trigger."""
MARGIN_TOKENS = 1_000
"""Room for the next message, so that the history is pruned before a request is rejected and not after."""
MARGIN_DIVISOR = 20
"""The margin is at most one twentieth of a small window."""
SUMMARY_SHARE = 2
"""The summary may have half of the room for messages, so that the next prune is far away."""
KEPT_NOTES = 4
"""In a small window a note is cut to a quarter of their budget: an agent that sees only its last step repeats the others."""
NOTE_TOKENS = 50
"""150 characters contain the tool and its input. With less, each request would be the same as the one before."""
UNLIMITED = EntryCaps()


class PruneInput(NamedTuple):
    """
    A history split for pruning: the messages to summarise, the live request and the instructions.

    Attributes:
        summarised: The messages for the summary.
        live: The request that the agent works on, if it has a message of its own.
        is_mid_turn: Whether the agent has started to work on it.
        instructions: The current instructions.
    """

    summarised: tuple[Message, ...]
    live: Message | None
    is_mid_turn: bool
    instructions: Message | None

    @property
    def final_message(self) -> Message:
        """The last message of the pruned history; within a turn, a message that tells the model to continue (generator-contract:P11)."""
        return UserMessage(CONTINUE, (CONTINUE_TAG,)) if self.live is None or self.is_mid_turn else self.live


def _has_silent_tag(message: Message) -> bool:
    """Return True for a user message that is omitted from summaries and does not start a turn."""
    return isinstance(message, UserMessage) and not SILENT_TAGS.isdisjoint(message.tags)


def _is_turn_content(message: Message) -> bool:
    """Return True for a reply, a result, or a user message without a silent or summary tag."""
    return not isinstance(message, UserMessage) or (SILENT_TAGS | SUMMARY_TAGS).isdisjoint(message.tags)


def _split_history(transcript: Transcript) -> PruneInput:
    """Split a history into messages to summarize, the current request of the user, and instructions."""
    at, instructions = (
        find_last_tagged_user_message(transcript, tag) for tag in ("USER_PROMPT", "INSTRUCTIONS_PROMPT")
    )
    live = None if at is None else transcript[at]
    is_mid_turn = at is not None and any(map(_is_turn_content, transcript[at + 1 :]))
    kept_apart = None if is_mid_turn else at
    summarised = [m for i, m in enumerate(transcript) if i != kept_apart and not _has_silent_tag(m)]
    return PruneInput(tuple(summarised), live, is_mid_turn, None if instructions is None else transcript[instructions])


def _to_id_set(value: Iterable[str]) -> frozenset[str]:
    """Return ids as a frozen set."""
    return frozenset(value)


@frozen
class prune_to_summary(ContextPolicy):  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that replaces older turns by a summary without a model call.

    Messages of the user stay almost unchanged, and replies become notes. Each tool call becomes one line with its action and
    object. Of its result only the important parts stay: errors, exit codes, answers, edits, outputs of agents. The
    history is then one summary message, the instructions, and the current request. In the middle of a turn, a message to
    continue replaces the request. The request always stays, whatever the budgets. A later prune copies the entries of
    this one.

    In a handler call ``rewrite(state.view, ContextLimits.for_state(state, ...), ctx.now())``.

    Attributes:
        max_tokens: As in every ``ContextPolicy``, and so is *replace_record*.
        user_budget: The tokens, at three characters each, of the user's messages in the summary. In a window too small for
            both budgets, they share one half of it.
        assistant_tool_budget: The same for replies and tool calls. The newest notes stay in any window.
        cold_after: Also prune if the user returns after this time: the provider's prompt cache has then expired, and a
            short prompt costs less. ``None`` for never. The hook then stores the time of the last request in
            ``AgentState.context``.
        cold_min_tokens: The smallest cold prompt to prune; ``None`` for any size.
        forgotten_agents: Agents whose outputs are omitted, because their findings are used at once.
    """

    user_budget: int = attrs.field(default=50_000, validator=COUNT, kw_only=True)
    assistant_tool_budget: int = attrs.field(default=20_000, validator=COUNT, kw_only=True)
    cold_after: timedelta | None = attrs.field(default=None, kw_only=True)
    cold_min_tokens: int | None = attrs.field(default=140_000, validator=TOKENS, kw_only=True)
    forgotten_agents: frozenset[str] = attrs.field(default=frozenset(), converter=_to_id_set, kw_only=True)

    @override
    def __call__(self, ctx: HookContext) -> Change | None:
        """Return the change that shortens the prompt, or ``None``; with a cold trigger also the time of the request."""
        source, limits = self.get_history(ctx), make_hook_limits(ctx, self.max_tokens)
        at = ctx.state.context.get(LAST_REQUEST)
        last_request = datetime.fromisoformat(at) if isinstance(at, str) else None
        reason = self.find_prune_reason(source, limits, ctx.now, last_request)
        shorter = None if reason is None else self.summarize_turns(source, limits)
        if shorter is not None:
            ctx.logger.info("pruned the history to a summary", reason=reason)
        if self.cold_after is None:
            return None if shorter is None else self.make_change(shorter)
        asked = JsonDict({LAST_REQUEST: ctx.now.isoformat()})
        return Change(context=asked) if shorter is None else attrs.evolve(self.make_change(shorter), context=asked)

    @override
    def rewrite(
        self, transcript: Transcript, limits: ContextLimits, now: datetime, last_request: datetime | None = None
    ) -> Transcript | None:
        """
        Return *transcript* as a summary and the required messages after it, or ``None`` if there is nothing to do.

        Args:
            transcript: The history.
            limits: The limits of a prompt.
            now: The run's recorded time.
            last_request: The time of the last model call; without it the prompt cache never counts as cold.
        """
        if self.find_prune_reason(transcript, limits, now, last_request) is None:
            return None
        return self.summarize_turns(transcript, limits)

    def find_prune_reason(
        self, transcript: Transcript, limits: ContextLimits, now: datetime, last_request: datetime | None
    ) -> str | None:
        """Return why to prune the history: ``context_limit``, ``cache_expiry``, both, or ``None``."""
        margin = min(MARGIN_TOKENS, limits.max_tokens // MARGIN_DIVISOR)
        is_large = limits.size(transcript) + margin > limits.max_tokens
        is_cold = self._starts_cold_turn(transcript, limits, now, last_request)
        if is_large:
            return "context_limit_and_cache_expiry" if is_cold else "context_limit"
        return "cache_expiry" if is_cold else None

    def _starts_cold_turn(
        self, transcript: Transcript, limits: ContextLimits, now: datetime, last_request: datetime | None
    ) -> bool:
        """Return True if a new user request starts after the prompt cache has expired, in a large enough conversation."""
        if self.cold_after is None or last_request is None or now - last_request <= self.cold_after:
            return False
        if self.cold_min_tokens is not None and limits.size(transcript) < self.cold_min_tokens:
            return False
        at = find_last_tagged_user_message(transcript, "USER_PROMPT")
        if at is None or any(map(_is_turn_content, transcript[at + 1 :])):
            return False
        return any(isinstance(message, AssistantMessage) for message in transcript[:at])

    def summarize_turns(self, transcript: Transcript, limits: ContextLimits) -> Transcript | None:
        """Return *transcript* with a summary in place of its messages, even if it fits; ``None`` if it would not be smaller."""
        scene = _split_history(transcript)
        ending = scene.final_message
        memory = self._build_fitting_memory(scene, limits.room - _count_tokens(scene.instructions, ending))
        if not memory.entries and not memory.media:
            return None
        apart = (scene.instructions, ending)
        pruned = Transcript([make_summary_message(memory), *[m for m in apart if m is not None]])
        return pruned if transcript_tokens(pruned) < transcript_tokens(transcript) else None

    def _build_fitting_memory(self, prune_input: PruneInput, room: int) -> Memory:
        """Return the memory of the messages, with entries and media dropped or shortened until it fits into *room* tokens."""
        live = prune_input.live if prune_input.is_mid_turn else None
        keeps_mark = prune_input.live is None
        whole = build_memory(prune_input.summarised, live, self.forgotten_agents, UNLIMITED, keeps_live_mark=keeps_mark)
        media = whole.media[-max(1, room // SUMMARY_SHARE // MEDIA_TOKENS) :]
        frame = message_tokens(make_summary_message(Memory((), media)))
        share = room // SUMMARY_SHARE - frame - sum(count_entry_tokens(e) for e in whole.entries if e.live)
        chosen = select_fitting_entries(whole.entries, self.user_budget, self.assistant_tool_budget)
        needed = sum(count_entry_tokens(e) for e in chosen if not e.live)
        # The newest entry stays whatever the budgets, so it may need more than both.
        if max(self.user_budget + self.assistant_tool_budget, needed) <= share:
            return Memory(chosen, media)
        user, assistant = self._divide_token_budget(max(0, share), whole.entries)
        caps = EntryCaps(
            user=min(UNLIMITED.user, max(NOTE_TOKENS, user)), work=max(NOTE_TOKENS, assistant // KEPT_NOTES)
        )
        small = build_memory(prune_input.summarised, live, self.forgotten_agents, caps, keeps_live_mark=keeps_mark)
        return Memory(select_fitting_entries(small.entries, user, assistant), media)

    def _divide_token_budget(self, total_tokens: int, entries: Iterable[RememberedMessage]) -> tuple[int, int]:
        """
        Divide *total_tokens* tokens between user entries and notes; return (tokens for the user, tokens for notes).

        Each kind may use tokens that the other does not need. A few notes always have room.
        """
        needed = {"user": 0, "assistant": 0}
        for entry in entries:
            needed[entry.role] += 0 if entry.live else count_entry_tokens(entry)
        part = total_tokens * self.assistant_tool_budget // max(1, self.user_budget + self.assistant_tool_budget)
        wanted = max(part, total_tokens - needed["user"], KEPT_NOTES * NOTE_TOKENS)
        assistant = min(wanted, self.assistant_tool_budget)
        user = max(0, total_tokens - min(assistant, needed["assistant"]))
        return min(user, self.user_budget), assistant


def _count_tokens(*messages: Message | None) -> int:
    """Return the estimated tokens of all messages; ``None`` counts as 0."""
    return sum(message_tokens(message) for message in messages if message is not None)
