"""
Our agents as tools of an MCP server: one tool for each, a question of a run is one to whoever calls.

A call is a run with a journal in memory. When the run asks something, a client of the newest protocol is sent the questions
and calls again with the answers; one of an older protocol is asked in the middle of its call; for one that cannot be asked
everything is declined, so that nothing happens which a person had to allow.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.events import RunFinished, ToolStarted
from stepengine.data.json import compact, thaw
from stepengine.data.questions import Answer, AnswerLike, Question, answer_problem
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.visible import visible
from stepengine.engine import Engine
from stepengine.engine.schemas import compiled
from stepengine.errors import DefinitionError, StepEngineError
from stepengine.journal import MemoryJournal
from stepengine.mcp.connection import installed
from stepengine.tooling.conversion import encode
from stepengine.tooling.spawning import direct_tool

if TYPE_CHECKING:
    from mcp.server import Server

__all__ = ("AgentServer", "Offered")

WAITING = 100
"""How many runs wait for answers at once; the oldest one is forgotten."""


@attrs.frozen
class Offered:
    """
    One agent that is offered.

    Attributes:
        engine: What runs it.
        definition: The agent.
        options: Options of its runs, such as ``limits``.
    """

    engine: Engine
    definition: AgentDefinition
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class _Waiting:
    """A run that waits for answers."""

    offered: Offered
    journal: MemoryJournal
    questions: tuple[Question, ...]


class AgentServer:
    """
    What answers a client; ``server`` is an object of the package ``mcp``, for any of its transports.

    Args:
        offered: The agents; each is a tool with its id, ``-`` as ``_``.

    Raises:
        DefinitionError: when two agents would be the same tool, there is none, or the package is not installed.
    """

    def __init__(self, offered: Sequence[Offered]) -> None:
        installed()
        from mcp.server import Server

        self._offered: dict[str, Offered] = {}
        self._tools: list[Any] = []
        self._waiting: dict[str, _Waiting] = {}
        for one in offered:
            self._add(one)
        if not offered:
            msg = "an MCP server of agents needs at least one agent"
            raise DefinitionError(msg)
        self.server: Server[Any] = Server("stepengine", on_list_tools=self._listed, on_call_tool=self._called)

    def _add(self, one: Offered) -> None:
        import mcp_types as types

        spec = direct_tool(one.definition).spec
        if spec.name in self._offered:
            msg = f"two agents would be the tool {spec.name!r}; offer one of them"
            raise DefinitionError(msg)
        self._offered[spec.name] = one
        promise = compiled(one.definition).output_schema
        is_object = promise is not None and promise.get("type") == "object"
        self._tools.append(
            types.Tool(
                name=spec.name,
                title=one.definition.display_name,
                description=spec.description,
                input_schema=thaw(spec.input_schema),
                output_schema=thaw(promise) if is_object else None,
            )
        )

    async def serve_stdio(self) -> None:
        """Answer one client on standard input and output, until it closes them."""
        from mcp.server.stdio import stdio_server

        async with stdio_server() as (read, write):
            await self.server.run(read, write, self.server.create_initialization_options())

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _listed(self, ctx: object, params: object) -> Any:
        import mcp_types as types

        return types.ListToolsResult(tools=self._tools)

    async def _called(self, ctx: Any, params: Any) -> Any:
        """Run an agent, or go on with a run whose questions were answered."""
        try:
            if params.request_state is not None:
                return await self._answered(ctx, params)
            offered = self._offered.get(params.name)
            if offered is None:
                known = ", ".join(self._offered)
                return _failed(f"there is no agent {visible(params.name, strict=True)!r}; known are: {known}")
            journal = MemoryJournal()
            result = await _apart(self._run(ctx, offered, params.arguments or {}, journal))
            return await self._told(ctx, offered, journal, result)
        except StepEngineError as error:
            return _failed(
                "\n  ".join([error.message, *[i for i in getattr(error, "issues", ()) if i not in error.message]])
            )

    async def _run(self, ctx: Any, offered: Offered, arguments: Mapping[str, Any], journal: MemoryJournal) -> RunResult:
        """Run an agent and tell the client of its tool calls, if it wants to know."""
        prompt, params = str(arguments.get("prompt") or ""), arguments.get("params")
        count = 0
        result: RunResult | None = None
        options: dict[str, Any] = {**offered.options, "journal": journal, "params": params}
        async for event in offered.engine.stream(offered.definition, prompt, **options):
            if isinstance(event, ToolStarted):
                count += 1
                with suppress(Exception):  # the client may be gone; the run has its own end
                    await ctx.session.report_progress(count, None, event.tool_name)
            elif isinstance(event, RunFinished):
                result = event.result
        if result is None:
            msg = f"the run of {offered.definition.id!r} ended without a result"
            raise StepEngineError(msg)
        return result

    async def _answered(self, ctx: object, params: Any) -> object:
        waiting = self._waiting.pop(params.request_state, None)
        if waiting is None:
            return _failed("the run that asked this is not known here any more; call again without request state")
        given = params.input_responses or {}
        answers = {q.id: _answer(given.get(q.id), q) for q in waiting.questions}
        result = await _apart(waiting.offered.engine.resume(waiting.journal, answers=answers))
        return await self._told(ctx, waiting.offered, waiting.journal, result)

    async def _told(self, ctx: object, offered: Offered, journal: MemoryJournal, result: RunResult) -> object:
        """Return a result, or its questions, once everything was asked that can be asked from here."""
        while result.status is RunStatus.SUSPENDED:
            questions = result.pending_questions
            if _can_ask(ctx) and _is_modern(ctx):
                return self._questions(_Waiting(offered, journal, questions))
            answers = {q.id: await _asked(ctx, q) for q in questions}
            result = await _apart(offered.engine.resume(journal, answers=answers))
        return _shown(offered, result)

    def _questions(self, waiting: _Waiting) -> object:
        """Return the questions, with a word that nobody can guess for whoever brings the answers."""
        import mcp_types as types

        while len(self._waiting) >= WAITING:
            self._waiting.pop(next(iter(self._waiting)))
        state = secrets.token_urlsafe(32)
        self._waiting[state] = waiting
        requests: Any = {q.id: types.ElicitRequest(params=_form(q)) for q in waiting.questions}
        return types.InputRequiredResult(input_requests=requests, request_state=state)


async def _apart(work: Coroutine[object, Any, RunResult]) -> RunResult:
    """Await a run in a task of its own: it is cancelled once and ends in its own time, whatever cancels the request how often."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        raise


# --- questions --------------------------------------------------------------------------------------------------------


def _can_ask(ctx: Any) -> bool:
    import mcp_types as types

    able: bool = ctx.session.check_client_capability(
        types.ClientCapabilities(elicitation=types.ElicitationCapability())
    )
    return able


def _is_modern(ctx: Any) -> bool:
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    return ctx.session.protocol_version in MODERN_PROTOCOL_VERSIONS


def _form(question: Question) -> Any:
    """Return a question as a form with one field; what would run is shown whole."""
    import mcp_types as types

    details = "" if question.details is None else f"\n{visible(compact(question.details))}"
    options = list(question.options) or (["yes", "no"] if question.tool_name else [])
    one: dict[str, object] = {"type": "string"}
    if options and not question.allow_text:
        one["enum"] = options
    elif options:
        one["description"] = f"One of {', '.join(options)}, or your own words"
    field = {"type": "array", "items": {"type": "string", "enum": options}} if question.multi_select else one
    schema = {"type": "object", "properties": {"answer": field}, "required": ["answer"]}
    return types.ElicitRequestFormParams(message=f"{visible(question.text)}{details}", requested_schema=schema)


async def _asked(ctx: Any, question: Question) -> AnswerLike:
    """Ask a client of an older protocol; who cannot be asked declines."""
    from mcp import MCPError

    if not _can_ask(ctx):
        return Answer(declined=True)
    form = _form(question)
    try:
        return _answer(await ctx.session.elicit_form(form.message, form.requested_schema), question)
    except MCPError:
        return Answer(declined=True)


def _answer(given: Any, question: Question) -> AnswerLike:
    """Return what a client answered; what is no answer declines, since a run that it was refused by would be lost."""
    if given is None or getattr(given, "action", "") != "accept":
        return Answer(declined=True)
    value = (given.content or {}).get("answer")
    answer = Answer(selected=tuple(map(str, value))) if isinstance(value, list) else str(value or "")
    problem = answer_problem(answer, question)
    return answer if problem is None else Answer(declined=True, reason=problem)


# --- results ----------------------------------------------------------------------------------------------------------


def _shown(offered: Offered, result: RunResult) -> object:
    import mcp_types as types

    if result.status is not RunStatus.COMPLETED:
        why = f": {result.error}" if result.error is not None else ""
        said = f"\nIt said before: {result.text}" if result.text else ""
        return _failed(f"the agent {offered.definition.id!r} ended as {result.status.value}{why}{said}")
    output: object = None if result.output is None else thaw(encode(result.output))
    text = result.text or (output if isinstance(output, str) else compact(encode(result.output)))
    more: dict[str, Any] = {"structured_content": output} if isinstance(output, dict) else {}
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], **more)


def _failed(text: str) -> object:
    import mcp_types as types

    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)
