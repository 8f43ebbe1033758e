"""
What people come to do, each done with public names alone; both type checkers accept it, and a test runs it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, assert_type

from pydantic import BaseModel, Field

from stepengine import (
    STEP_ALL,
    AgentDefinition,
    AgentState,
    Answer,
    Ask,
    AssistantMessage,
    Engine,
    InputSchema,
    Interactor,
    Question,
    RunResult,
    StepContext,
    Steps,
    TextPart,
    ThinkingPart,
    ToolAnnotations,
    ToolCallPart,
    ToolMessage,
    Transcript,
    Usage,
    UserMessage,
    tool,
)
from stepengine.errors import ModelError
from stepengine.events import TextDelta, ThinkingDelta
from stepengine.journal import (
    AddedRecords,
    ExternalCall,
    FileJournal,
    Follower,
    ForkReport,
    SharedBudget,
    follow_events,
    send_answers,
    send_cancel,
    send_input,
    send_tool_result,
)
from stepengine.models import (
    ModelDelta,
    ModelReply,
    ModelRequest,
    Provider,
    ReplyDone,
    TextChunk,
    ThinkingChunk,
)
from stepengine.permissions import Policy, Rule
from stepengine.sandbox import (
    CallAnswer,
    CheckedProgram,
    MontySandbox,
    ProgramCall,
    ProgramEnded,
    ProgramFunction,
    ProgramLimits,
    ProgramProblem,
    ProgramRaised,
    ProgramSession,
    ProgramTurn,
    ProgramWaiting,
    Sandbox,
    StopSignal,
    Stubs,
    code_mode,
)
from stepengine.testing import ScriptedModel, text, tool_call

# --- a provider that streams ------------------------------------------------------------------------------------------


class Echo(Provider):
    """
    A model that thinks aloud and says what the last message says, in two pieces.
    """

    name = "echo"
    default_model = "echo/large"

    def __init__(self) -> None:
        self.asked: list[ModelRequest] = []

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.asked.append(request)
        if not request.messages:
            raise ModelError("there is nothing to echo")
        said = request.all_messages[-1].text
        return ModelReply([ThinkingPart("hm"), TextPart(f"echo: {said}")], usage=Usage(input_tokens=3, output_tokens=2))

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        reply = await self.complete(request)
        yield ThinkingChunk("hm")
        yield TextChunk("echo: ")
        yield TextChunk(reply.text.removeprefix("echo: "))
        yield ReplyDone(reply)


async def stream_of_an_own_provider() -> tuple[list[str], list[str]]:
    """
    An agent that names no model asks the one provider for its default model.
    """
    said, thought = list[str](), list[str]()
    async with Engine([AgentDefinition("parrot")], models=Echo()) as engine:
        async for event in engine.stream("parrot", "hello"):
            if isinstance(event, TextDelta):
                said.append(event.text)
            elif isinstance(event, ThinkingDelta):
                thought.append(event.text)
    return said, thought


# --- programs that a model writes -----------------------------------------------------------------------------------------


@tool
def tide_of(port: str) -> str:
    """Tell when the tide is high at a port."""
    return f"noon at {port}"


class CountedSession:
    """
    A session that allows a program two calls, and writes down how its turns end.
    """

    def __init__(self, inner: ProgramSession, turns: list[str]) -> None:
        self._inner, self._turns = inner, turns
        self.printed = ""

    def feed(self, code: str, now: datetime) -> ProgramTurn:
        return self._seen(self._inner.feed(code, now))

    def answer(self, answers: Mapping[int, CallAnswer], now: datetime) -> ProgramTurn:
        return self._seen(self._inner.answer(answers, now))

    def close(self) -> None:
        self._inner.close()

    def _seen(self, turn: ProgramTurn) -> ProgramTurn:
        self.printed = self._inner.printed
        match turn:
            case ProgramWaiting(calls):
                first: ProgramCall = calls[0]
                self._turns.append(f"{first.name} in line {first.line}")
                return turn if len(calls) <= 2 else ProgramRaised("PermissionError", "two calls at a time", first.line)
            case ProgramEnded(value):
                self._turns.append(f"{value}")
            case ProgramRaised(kind, text):
                self._turns.append(f"{kind}: {text}")
        return turn


class CountingSandbox:
    """
    Monty, with sessions that are counted, and without loops.
    """

    def __init__(self) -> None:
        self.inner = MontySandbox()
        self.turns: list[str] = []

    @property
    def name(self) -> str:
        return f"counting {self.inner.name}"

    def check(self, code: str, stubs: Stubs, known: Collection[str], stop: StopSignal | None = None) -> CheckedProgram:
        functions: list[ProgramFunction] = [*stubs.functions.values()]
        self.turns += [f"{one.name}({', '.join(one.parameters)})" for one in functions]
        if "while" in code:
            return CheckedProgram(refused=(ProgramProblem(1, 1, "a program has no loops here"),))
        return self.inner.check(code, stubs, known, stop)

    def open(
        self, functions: Collection[str], *, seconds: float, memory: int, printed: int, seed: int
    ) -> ProgramSession:
        inner = self.inner.open(functions, seconds=seconds, memory=memory, printed=printed, seed=seed)
        return CountedSession(inner, self.turns)


def run_a_program() -> str:
    """
    A scripted model runs a program over a tool.
    """
    counting = CountingSandbox()
    sandbox: Sandbox = counting
    run_code = code_mode(tide_of, limits=ProgramLimits(calls=10), sandbox=sandbox)
    model = ScriptedModel([tool_call("run_code", {"code": "await tide_of('Brest')"}), text("Found.")])
    agent = AgentDefinition("looker", model="anthropic/claude-sonnet-5", tools=[run_code])
    with Engine([agent], models=model) as engine:
        found = engine.run_sync(agent, "Look for tide.").tool_calls[0].result.text
    counting.inner.close()
    assert counting.turns == ["tide_of(port)", "tide_of in line 1", "noon at Brest"]
    return found


# --- a tool that changes nothing --------------------------------------------------------------------------------------


@tool(category="read", annotations=ToolAnnotations(read_only=True, idempotent=True))
def stock(article: str) -> int:
    """Say how many of an article are there."""
    return len(article)


@tool(category="write", annotations=ToolAnnotations(destructive=True))
def sell(article: str) -> str:
    """Sell one of an article."""
    return f"sold {article}"


# --- what an agent expects --------------------------------------------------------------------------------------------


class Order(BaseModel):
    article: str = Field(description="What is sold.")


def serve(ctx: StepContext[Order]) -> Steps[str]:
    assert_type(ctx.params, Order)
    turn = yield STEP_ALL
    assert_type(turn.agent_state.message_history, Transcript)
    sure = yield from Ask(f"Close the till for {ctx.params.article}?", options=["yes", "no"])
    return f"{turn.text} ({sure})"


seller = AgentDefinition(
    "seller",
    tools=[stock, sell],
    input_schema=InputSchema(prompt="Who wants to buy something.", params=Order),
    handle_steps=serve,
)


# --- somebody who answers ---------------------------------------------------------------------------------------------


class Clerk:
    """
    Says yes to whatever is asked, and keeps the questions.
    """

    def __init__(self) -> None:
        self.asked: list[Question] = []

    def ask(self, question: Question) -> Answer | bool:
        self.asked.append(question)
        return True if question.tool_name else Answer("yes")


def ask_a_clerk() -> tuple[RunResult[str], Clerk]:
    """
    The policy asks about tools that do not only read.
    """
    clerk = Clerk()
    somebody: Interactor = clerk
    policy = Policy([Rule.allow_category("read"), Rule.ask_for_tool("sell")])
    model = ScriptedModel(
        [tool_call(stock, {"article": "tea"}), tool_call(sell, {"article": "tea"}), text("Here it is.")]
    )
    with Engine([seller], models=model, permissions=policy, interactor=somebody) as engine:
        return engine.run_sync(seller, "Ann", params=Order(article="tea")), clerk


# --- a state on disk --------------------------------------------------------------------------------------------------


def store_and_load(file: Path) -> tuple[AgentState, RunResult[Any]]:
    """
    What was said yesterday is in a file; today the conversation goes on from it.
    """
    agent = AgentDefinition("host")
    with Engine([agent], models=ScriptedModel(["Hello Ann."])) as engine:
        file.write_text(json.dumps(engine.run_sync(agent, "I am Ann.").state.to_json()), encoding="utf-8")
    state = AgentState.from_json(json.loads(file.read_text(encoding="utf-8")))
    assert_type(state, AgentState)
    with Engine([agent], models=ScriptedModel(["You are Ann."])) as engine:
        return state, engine.run_sync(agent, "Who am I?", previous=state)


# --- reading what was said --------------------------------------------------------------------------------------------


def lines_of(transcript: Transcript) -> list[str]:
    """
    One line per message, and one per call.
    """
    lines = list[str]()
    for message in transcript:
        match message:
            case UserMessage():
                lines.append(f"user: {message.text}")
            case AssistantMessage():
                lines += [f"assistant: {part.text}" for part in message.content if isinstance(part, TextPart)]
                lines += [f"calls {p.tool_name}{dict(p.input)}" for p in message.content if isinstance(p, ToolCallPart)]
            case ToolMessage():
                lines.append(f"{message.tool_name} gave {message.text}")
    return lines


# --- running a recorded run again -------------------------------------------------------------------------------------


def made_up(call: ExternalCall, recorded: Sequence[ExternalCall]) -> str | None:
    """
    What a call gives that nobody recorded: what the last one of the same tool gave.
    """
    return f"as {recorded[-1].address} gave" if recorded else None


def ask_twice(journal: Path) -> tuple[list[ForkReport], SharedBudget]:
    """
    A recorded run goes on from its first model call with another reply, twice, for at most half a dollar together.
    """
    budget = SharedBudget("0.50")
    agent = AgentDefinition("host")
    model = ScriptedModel(["Hello Bob.", "Hello Eve."])
    with Engine([agent], models=model, pricing=lambda model, usage, at: Decimal("0.10")) as engine:
        again = [
            engine.fork_sync(journal, at=-1, tools="recorded", reuse=False, simulate=made_up, budget=budget)
            for _ in range(2)
        ]
    assert_type(again[0], ForkReport)
    return again, budget


# --- a run that another process holds -----------------------------------------------------------------------------------


def reach_a_run_elsewhere(journal: Path, answers: Mapping[str, str], paid: Mapping[str, bool], *, ends: bool) -> bool:
    """
    From a web application: the run is in another process, or in none until it is resumed.
    """
    send_answers(journal, answers)
    for call, is_paid in paid.items():
        send_tool_result(journal, call, {"paid": is_paid})
    is_new = send_input(journal, "Leave the tests out.", id="message-17")
    if ends:
        send_cancel(journal, "nobody needs it any more")
    return is_new


async def show_what_came(journal: Path, last_id: str | None) -> list[str]:
    """
    The events of a run that another process holds, after the one that was shown last, to its end or to where it waits.
    """
    follower = Follower(FileJournal(journal))
    news = follower.read_new()
    assert_type(news, AddedRecords)
    return [event.id async for event in follow_events(FileJournal(journal), last_id, stay=False)]
