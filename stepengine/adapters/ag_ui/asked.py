"""
What a page asks for over AG-UI, read and checked: words, answers, results of its own tools, state, context.

What lives here: ``RunAgentInput`` as what a run is started with, and the hook that gives a run the page's tools, context and state.

What must not: the package ``ag_ui``, events, HTTP, and history from a browser.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.choices import answer_from_json
from stepengine.data.codec import plain
from stepengine.data.definition import HookContext
from stepengine.data.events import Event, RunFinished
from stepengine.data.hooks import Change, Hooks
from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.messages import AssistantMessage, ToolMessage, ToolResult, UserMessage
from stepengine.data.questions import PAGE, Answer, AnswerLike, Question
from stepengine.data.state import AgentState, find_suspended_reply_index
from stepengine.data.tools import Asking, ToolSpec
from stepengine.errors import DefinitionError, InputError
from stepengine.sessions import Session
from stepengine.tools.control import get_control_tools_by_name, make_tool_with_validation
from stepengine.tools.definition import Tool, check_tool_name
from stepengine.tools.schemas import SchemaInputs

if TYPE_CHECKING:
    from stepengine.runtime.handle import RunHandle

KEY = "ag_ui"
"""The member of a run's metadata with the tools, context and state that its page sent."""
PAGE_TOOL = "page_tool"
"""The member of a question's details with the name of the page's tool for whose result the run waits."""
MAX_PROMPT = 1_048_576
"""Characters of a prompt that a page may send, and of its tools, context and state as JSON."""
MAX_TOOLS = 100
NO_INPUT = {"type": "object", "properties": {}}


@frozen
class PageRequest:
    """
    The request of a page; ``parse_page_request`` returns it.

    Attributes:
        thread_id: The id of the conversation, which is the session's.
        run_id: The id that the page gave to the run.
        prompt: The text of the user; ``""`` if the request has only answers.
        answers: Answers to open questions, by question id; the results of the page's tools are among them.
        metadata: The metadata for ``engine.start``: the page's tools, context and state, which ``page_hooks`` adds to the run.
        session: The session before the request.
        shares: The members of ``AgentState.context`` that the page shares.
        results: The results of waiting calls of the page's tools, by call id; the questions about them are answered one at a time.
        warnings: Warnings about ignored members of the request, which ``ag_ui`` sends to the page.
    """

    thread_id: str
    run_id: str
    prompt: str
    answers: Mapping[str, AnswerLike]
    metadata: Mapping[str, Any]
    session: Session
    shares: tuple[str, ...] = ()
    results: Mapping[str, Answer] = attrs.field(factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def tools(self) -> tuple[str, ...]:
        """The names of the page's tools."""
        return tuple([tool["name"] for tool in self.metadata.get(KEY, {}).get("tools", ())])

    @property
    def state(self) -> dict[str, Any]:
        """The shared state that the run starts with."""
        held = {} if self.session.state is None else self.session.state.context
        own = self.metadata.get(KEY, {}).get("state", {})
        return {
            name: plain(value) for name, value in {**held, **own}.items() if name in self.shares and value is not None
        }


def parse_page_request(given: Any, session: Session, *, shares: Collection[str] = ()) -> PageRequest:
    """
    Validate and parse the request of a page: prompt, answers, and the metadata of the run.

    Args:
        given: The ``RunAgentInput``.
        session: The session of its thread, such as ``sessions.load(given.thread_id)``.
        shares: The members of ``AgentState.context`` that the page sees and may set; it may send no other members.

    Raises:
        InputError: For a last message that is not a text of the user, invalid answers, state that is not shared, invalid tools, and
            more than 1,048,576 characters of tools, context and state.
    """
    waiting = {message.tool_call_id for message in list_waiting_call_placeholders(session.state)}
    results = dict(_parse_page_results([m for m in given.messages if m.role == "tool" and m.tool_call_id in waiting]))
    answers = {**select_next_page_answer(session.state, results), **parse_interrupt_answers(given)}
    says_more = bool(answers) and not given.resume and bool(given.messages) and given.messages[-1].role == "user"
    prompt = "" if answers and not says_more else parse_prompt(given)
    metadata = _run_metadata_from_page(given, session.state, tuple(shares))
    sent = {"forwardedProps": given.forwarded_props, "parentRunId": given.parent_run_id}
    unread = tuple([f"the run ignores {name} of the page" for name, value in sent.items() if value])
    return PageRequest(
        given.thread_id, given.run_id, prompt, answers, metadata, session, tuple(shares), results, unread
    )


def parse_prompt(request: Any) -> str:
    """
    Return the prompt: the text of the last message of a page. The rest of its history is ignored.

    Args:
        request: The ``RunAgentInput``.

    Raises:
        InputError: If the last message is not the user's, contains something other than text, or is too long.
    """
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != "user":
        msg = f"the last message of a page must be a user message; this one is {'none' if last is None else repr(last.role)}"
        raise InputError(msg, issues=("messages: the last one is not a user message",))
    text = _join_text_parts(last.content)
    if text is None:
        msg = "a page sent a message with a part that is not text; only text parts are supported"
        raise InputError(msg, issues=("messages: the last one has a part that is not text",))
    if len(text) > MAX_PROMPT:
        msg = f"a page sent {len(text)} characters; a prompt has at most {MAX_PROMPT}"
        raise InputError(msg, issues=("messages: the last one is too long",))
    return text


def _join_text_parts(content: Any) -> str | None:
    """Return the texts of a message joined; ``None`` if a part is not text."""
    parts = [content] if isinstance(content, str) else [getattr(part, "text", None) for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "\n\n".join(texts) if len(texts) == len(parts) else None


def parse_interrupt_answers(request: Any) -> dict[str, AnswerLike]:
    """
    Return a page's answers to the interrupts of a suspended run, by question id; empty without answers.

    A payload is a bool, a string or a list of options; to a permission an object with ``approved`` and perhaps ``reason`` and
    ``editedInput``; or the ``answer`` of one of the choices in the interrupt's metadata. An entry that was cancelled is declined. The
    engine validates the answers.

    Args:
        request: The ``RunAgentInput``.

    Raises:
        InputError: If an id is unknown, the entries are of several runs, or a payload is invalid.
    """
    found: dict[str, AnswerLike] = {}
    runs = set()
    for number, entry in enumerate(request.resume or ()):
        run, colon, question = entry.interrupt_id.partition(":")
        if not (run and colon and question):
            msg = (
                f"resume[{number}] answers {entry.interrupt_id!r:.80}, which is not an interrupt id such as 'run-1:q3'"
            )
            raise InputError(msg, issues=(f"resume[{number}]: not an interrupt id",))
        runs.add(run)
        found[question] = Answer(declined=True) if entry.status == "cancelled" else _parse_answer(entry.payload, number)
    if len(runs) > 1:
        msg = f"resume answers interrupts of {len(runs)} runs; send a separate request for each run"
        raise InputError(msg, issues=("resume: interrupts of several runs",))
    return found


def _parse_answer(payload: Any, number: int) -> AnswerLike:
    """Convert the payload of an interrupt to an answer; raise ``InputError`` if it is none."""
    answer = answer_from_json(payload)
    if answer is not None:
        return answer
    msg = f"resume[{number}] has a payload that is not an answer; an answer is a bool, a string, a list of options or {{'approved': true}}"
    raise InputError(msg, issues=(f"resume[{number}]: no answer",))


# --- the page's own tools ---------------------------------------------------------------------------------------------


def _parse_page_results(messages: Sequence[Any]) -> Iterator[tuple[str, Answer]]:
    """Yield the call id and answer in each tool message of a page; raise ``InputError`` for one that is no text or too long."""
    for message in messages:
        text = _join_text_parts(message.content)
        if text is None or len(text) > MAX_PROMPT:
            msg = (
                f"the result of the call {message.tool_call_id!r:.80} is too long, or holds something that is not text"
            )
            raise InputError(msg, issues=("messages: a result that cannot be read",))
        yield message.tool_call_id, Answer(text=text, reason=message.error or "", by=PAGE)


def find_page_tool_name(question: Question) -> str:
    """Return the page's tool whose result answers a question of the root run; ``""`` for other questions."""
    details = question.details
    return (
        str(details[PAGE_TOOL]) if not question.path and isinstance(details, JsonDict) and PAGE_TOOL in details else ""
    )


def list_waiting_call_placeholders(state: AgentState | None) -> list[ToolMessage]:
    """Return the placeholder results of the calls that a suspended run waits for."""
    at = None if state is None else find_suspended_reply_index(state.message_history)
    if state is None or at is None:
        return []
    return [m for m in state.message_history[at:] if isinstance(m, ToolMessage) and m.status == "pending"]


def find_permission_call_id(state: AgentState | None, question: Question) -> str:
    """Return the id of the waiting call of the root run that a permission question is about; ``""`` for other questions."""
    at = None if state is None else find_suspended_reply_index(state.message_history)
    if state is None or at is None or question.path:
        return ""
    waiting = [m.tool_call_id for m in list_waiting_call_placeholders(state) if m.tool_name == question.tool_name]
    reply = cast("AssistantMessage", state.message_history[at])
    # Of several calls of a tool the one with the input that the question shows; it may be shown in another form.
    same = [call.tool_call_id for call in reply.tool_calls if call.input == question.details]
    return next((call for call in waiting if call in same), waiting[0] if waiting else "")


def list_waiting_page_call_ids(state: AgentState | None) -> list[str]:
    """Return the ids of the page tool calls that a suspended run needs results for; the first one is asked about."""
    names = {find_page_tool_name(question) for question in (state.pending if state is not None else ())} - {""}
    specs = state.tool_definitions if state is not None else {}
    waiting = list_waiting_call_placeholders(state) if names else []
    return [m.tool_call_id for m in waiting if m.tool_name in specs and specs[m.tool_name].category == PAGE]


def select_next_page_answer(state: AgentState | None, results: Mapping[str, Answer]) -> dict[str, AnswerLike]:
    """Return the answer to the first open question about a page tool with a result in *results*, by question id; else ``{}``."""
    names = {call.tool_call_id: call.tool_name for call in list_waiting_call_placeholders(state)}
    for question in state.pending if state is not None else ():
        name = find_page_tool_name(question)
        call = next((id for id, own in names.items() if own == name), "")
        if name and call in results:
            return {question.id: results[call]}
    return {}


def make_page_tool(name: str, description: str, schema: Mapping[str, Any]) -> Tool:
    """
    Return a tool that the page executes. A call suspends the run until the page sends the result.

    Raises:
        DefinitionError: For a name that no provider accepts, or an invalid schema.
    """
    check_tool_name(name)
    if not isinstance(schema, Mapping):
        msg = f"the parameters of the tool {name!r} are not a JSON Schema of an object"
        raise DefinitionError(msg)
    inputs = SchemaInputs(name, schema).schema
    spec = ToolSpec(name, description, inputs, category=PAGE, requires_permission=False)

    def make_questions(value: JsonDict) -> Sequence[Question]:
        return [
            Question("", f"The page carries out {name}.", details={PAGE_TOOL: name, "input": value}, allow_text=True)
        ]

    return make_tool_with_validation(spec, Asking(make_questions, _result_from_page_answer))


def _result_from_page_answer(answers: Sequence[Answer]) -> ToolResult:
    """Return the only answer as a result: an error if it is not from the page, or has a reason."""
    (answer,) = answers
    if answer.by != PAGE:
        said = f"; its user said: {answer.value}" if answer.value else ""
        return ToolResult.error(f"The page gave no result{said}")
    return (
        ToolResult.error(f"{answer.reason}\n\n{answer.text}".strip()) if answer.reason else ToolResult.text(answer.text)
    )


async def run_turns(
    asked: PageRequest, start: Callable[[str, Mapping[str, AnswerLike]], RunHandle]
) -> AsyncGenerator[Event, None]:
    """
    Start a run for a page and yield its events; repeat while the run waits for a result that the page already sent.

    Leaving the iteration ends nothing.

    Args:
        asked: What the page asks for.
        start: Starts a run with a prompt and answers.
    """
    prompt, answers, is_first = asked.prompt, asked.answers, True
    while is_first or answers:
        is_first, handle, answers = False, start(prompt, answers), {}
        prompt = ""
        async for event in handle.events():
            if isinstance(event, RunFinished) and not event.path:
                answers = (
                    select_next_page_answer(event.result.state, asked.results) if event.result.pending_questions else {}
                )
            if not answers:
                yield event


# --- metadata of a run -----------------------------------------------------------------------------------------------


def _run_metadata_from_page(request: Any, state: AgentState | None, shares: tuple[str, ...]) -> dict[str, Any]:
    """
    Validate the tools, context and shared state that a page sent, and return them as metadata of the run; empty without any.

    The tools of waiting calls are included, also if the page no longer offers them.

    Raises:
        InputError: If they are invalid or too long.
    """
    tools = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters or NO_INPUT}
        for tool in request.tools or ()
    ]
    # A reloaded page may offer no tools; a call that waits for its result is resumed nevertheless.
    tools += [
        tool for tool in _list_tools_of_waiting_calls(state) if tool["name"] not in {own["name"] for own in tools}
    ]
    context = [{"description": each.description, "value": each.value} for each in request.context or ()]
    page = {
        "tools": _validate_page_tools(tools),
        "context": context,
        "state": _parse_shared_state(request.state, shares),
    }
    page = {name: value for name, value in page.items() if value}
    if len(size := repr(page)) > MAX_PROMPT:
        msg = f"a page sent {len(size)} characters of tools, context and state; at most {MAX_PROMPT} are allowed"
        raise InputError(msg, issues=("tools, context and state are too long",))
    return {KEY: page} if page else {}


def _list_tools_of_waiting_calls(state: AgentState | None) -> list[dict[str, Any]]:
    """Return the definitions of the page's tools whose calls wait for a result."""
    calls = set(list_waiting_page_call_ids(state))
    names = {message.tool_name for message in list_waiting_call_placeholders(state) if message.tool_call_id in calls}
    specs = {} if state is None else state.tool_definitions
    return [
        {"name": name, "description": specs[name].description, "parameters": plain(specs[name].input_schema)}
        for name in sorted(names)
    ]


def _validate_page_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *tools* unchanged; raise ``InputError`` for too many, a taken name, or one that no model can be offered."""
    names = [tool["name"] for tool in tools]
    if len(tools) > MAX_TOOLS or len(set(names)) < len(names) or set(names) & get_control_tools_by_name().keys():
        msg = f"a page offers {len(tools)} tools; at most {MAX_TOOLS} are allowed, with unique names that no built-in tool has"
        raise InputError(msg, issues=("tools: too many, or a name that is taken",))
    for tool in tools:
        try:
            make_page_tool(tool["name"], tool["description"], tool["parameters"])
        except (DefinitionError, ValueError, TypeError, RecursionError) as error:
            msg = f"a page offers a tool that cannot be offered to a model: {error!s:.300}"
            raise InputError(msg, issues=("tools: one cannot be offered",)) from None
    return tools


def _parse_shared_state(state: Any, shares: tuple[str, ...]) -> dict[str, Any]:
    """Return the state that a page sent; raise ``InputError`` for members that are not shared."""
    if not state:
        return {}
    others = sorted(set(state) - set(shares)) if isinstance(state, dict) else ["no object"]
    if others:
        known = list_names(shares, others[0], quoted=True)
        msg = f"a page sent the state {others[0]!r:.80}, which is not shared; shared members: {known}"
        raise InputError(msg, issues=("state: only shared members are accepted",))
    try:
        return {name: plain(value) for name, value in freeze_object(state).items()}
    except (ValueError, TypeError, RecursionError) as error:
        msg = f"a page sent a state that is not JSON: {error!s:.200}"
        raise InputError(msg, issues=("state: not JSON",)) from None


def page_hooks() -> Hooks:
    """Return the hooks that add a page's tools, context and state to a run, for ``Engine(hooks=...)``."""
    return Hooks(pre_run=[add_page_data])


def add_page_data(ctx: HookContext) -> Change | None:
    """
    Add the page's tools, context and state to a root run.

    Raises:
        InputError: If the agent already has a tool with the name of a page's tool.
    """
    page = ctx.metadata.get(KEY)
    if ctx.path or not isinstance(page, JsonDict):
        return None
    tools = [make_page_tool(tool["name"], tool["description"], tool["parameters"]) for tool in page.get("tools", ())]
    taken = [tool.name for tool in tools if tool.name in ctx.state.tool_definitions]
    if taken:
        msg = f"the page offers the tool {taken[0]!r}, but the agent already has a tool of that name"
        raise InputError(msg, issues=("tools: a name that is taken",))
    said = "\n".join([f"- {each['description']}: {each['value']}" for each in page.get("context", ())])
    tail = [UserMessage(f"What the page says of itself:\n{said}")] if said else []
    return Change(tools=tools, context=page.get("state"), tail=tail)
