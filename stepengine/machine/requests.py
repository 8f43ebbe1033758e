"""Effects that are one request and one answer: model calls beside the conversation, author I/O, questions."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from stepengine.data import yields as y
from stepengine.data.effects import Ask, CallModel, Leaf, Perform
from stepengine.data.messages import Message, UserMessage, system_reminder
from stepengine.data.models import ModelReply, ModelRequest, quick_request
from stepengine.data.outcomes import Stop
from stepengine.data.questions import Answer, Question
from stepengine.data.transcript import Transcript
from stepengine.errors import LimitReached, StepEngineError, UnknownModel
from stepengine.machine.live import Live
from stepengine.machine.signals import Stopped, merged

__all__ = (
    "ask",
    "ask_effect",
    "candidates",
    "complete",
    "model_of",
    "perform_call",
    "step_prompt",
    "step_request",
    "with_questions",
)


def model_of(live: Live, override: str | None) -> str:
    """Return the model string in force, or raise ``UnknownModel`` when there is none."""
    model = override or live.plan.model
    if model:
        return model
    msg = (
        f"agent {live.agent.id!r} has no model: set AgentDefinition(model='provider/model') or Engine(default_model=...), "
        "or name one in StepWith or Complete"
    )
    raise UnknownModel(msg, kind="no_model")


def step_request(live: Live, over: y.StepWith, tail: Sequence[Message]) -> ModelRequest:
    """Return the request of a step: system prompt, view, the tails of run and step, tools and settings."""
    settings = live.agent.settings if over.settings is None else live.agent.settings.merged(over.settings)
    specs = live.specs if over.tools is None else tuple([live.bindings[name].spec for name in over.tools])
    choice = (over.tool_choice or settings.tool_choice) if specs else None
    return quick_request(
        model=over.model or live.plan.model or model_of(live, None),
        system_prompt=live.system_prompt,
        messages=live.view,
        tools=specs,
        tool_choice=choice,
        settings=settings,
        tail=(*live.tail, *tail),
    )


def step_prompt(live: Live) -> list[Message]:
    """Return the step prompt as a step-scoped message, if the agent has one (requirements A10)."""
    text = live.agent.step_prompt
    return [UserMessage(system_reminder(text), ("STEP_PROMPT",))] if text else []


def complete(live: Live, asked: y.Complete) -> Generator[Any, Any, ModelReply]:
    """Carry out a ``Complete``."""
    settings = asked.settings or live.agent.settings
    request = ModelRequest(
        model_of(live, asked.model),
        asked.system_prompt or "",
        Transcript(asked.messages),
        asked.tools,
        settings.tool_choice if asked.tools else None,
        settings,
    )
    return (yield from live.call_model(CallModel(live.number(), request, "complete")))


def candidates(live: Live, request: ModelRequest, count: int) -> Generator[Any, Any, list[ModelReply]]:
    """Ask for *count* replies to the same request; return those that succeeded, or raise the first failure."""
    effects = [CallModel(live.number(), request, "candidate") for _ in range(count)]
    outcomes = yield from live.gather(effects)
    replies: list[ModelReply] = []
    failures: list[BaseException] = []
    stops: list[Stop] = []
    for effect, outcome in zip(effects, outcomes, strict=True):
        try:
            reply = live.unwrap(outcome, effect)
        except Stopped as stopped:
            stops.append(stopped.stop)
        except (StepEngineError, LimitReached) as error:
            failures.append(error)
        else:
            live.count_reply(effect, reply)
            replies.append(reply)
    if stops:
        raise Stopped(merged(stops))
    if not replies:
        raise failures[0]
    return replies


def perform_call(live: Live, asked: y.Perform[Any]) -> Generator[Any, Any, Any]:
    """Carry out a ``Perform`` and return its JSON value."""
    return (yield from live.perform(Perform(live.number(), asked)))


def ask_effect(live: Live, *questions: Question, purpose: Any = "question", tool_call_id: str = "") -> Ask:
    """Return the effect that asks *questions*; their ids are their names, or are made from the effect's address."""
    seq, path = live.number(), live.plan.path
    number = f"{path}.q{seq}" if path else f"q{seq}"
    single = len(questions) == 1
    named = [
        Question(
            id=(f"{path}:{question.id}" if path else question.id)
            if question.id
            else (number if single else f"{number}.{index}"),
            text=question.text,
            options=question.options,
            multi_select=question.multi_select,
            tool_name=question.tool_name,
            details=question.details,
            path=path,
            allow_text=question.allow_text,
            remember=question.remember,
        )
        for index, question in enumerate(questions)
    ]
    return Ask(seq, tuple(named), purpose, tool_call_id)


def ask(live: Live, effect: Ask) -> Generator[Any, Any, tuple[Answer, ...]]:
    """Hand out an ``Ask``; a stop that names no questions is given those of the effect."""
    try:
        answers: tuple[Answer, ...] = yield from live.perform(effect)
    except Stopped as stopped:
        raise Stopped(with_questions(stopped.stop, effect)) from None
    return answers


def with_questions(stop: Stop, effect: Leaf) -> Stop:
    """Return *stop* with the questions of the ``Ask`` that it answers, when it is a suspension that names none."""
    if stop.questions or type(effect) is not Ask or stop.kind != "suspended":
        return stop
    return Stop(stop.kind, stop.at, stop.error, effect.questions)
