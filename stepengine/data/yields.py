"""
What a handler may yield (design 4).

One rule: ``yield x`` is sent a ``StepResult``; ``yield from x`` gives x's own typed value and raises on failure. Every
yieldable is therefore iterable: iterating it yields the value itself once and unpacks the answer.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from enum import Enum
from typing import Any, TypeAlias, final

import attrs
from typing_extensions import TypeVar

from stepengine.data.calls import AgentCall, Ask, Member, Parallel, Perform, ToolCall, tool_name_of
from stepengine.data.checks import CHOICE, TEXT, Fine, an_instance, fine, or_none
from stepengine.data.json import text_of
from stepengine.data.makers import maker_of
from stepengine.data.messages import Message, UserMessage
from stepengine.data.models import ModelReply, ModelSettings
from stepengine.data.parts import tuple_of
from stepengine.data.results import ToolResult
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolChoice, ToolLike, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import BadYield

__all__ = (
    "STEP",
    "STEP_ALL",
    "AgentCall",
    "Ask",
    "Complete",
    "GenerateN",
    "Member",
    "Parallel",
    "Perform",
    "Sentinel",
    "StepResult",
    "StepText",
    "StepWith",
    "Steps",
    "ToolCall",
    "Yieldable",
    "quick_step_result",
)

Ret = TypeVar("Ret", default=None)
MODEL = fine(
    or_none(Fine(lambda value: isinstance(value, str) and value.strip() != "", "a string such as 'openai/gpt-5'")),
    BadYield,
)
SETTINGS = fine(or_none(an_instance(ModelSettings, "ModelSettings(temperature=0)")), BadYield)
SPECS = Fine(
    lambda value: type(value) is tuple and all(isinstance(spec, ToolSpec) for spec in value),
    "a list of ToolSpec objects such as state.tool_definitions.values()",
)


@attrs.frozen(weakref_slot=False)
class StepResult:
    """
    What every bare ``yield`` is sent (generator-contract G22-G28).

    Attributes:
        agent_state: The state after the yielded thing, with everything that it did.
        tool_results: One result per call, in call order; empty after steps.
        steps_complete: Whether the last model step or ``StepText`` ended the turn, or the step budget is spent.
        n_responses: What the candidates of a ``GenerateN`` say, without thoughts; empty otherwise.
        value: The value of a ``Perform``, ``Ask``, ``Complete``, ``AgentCall`` or ``Parallel``; ``None`` otherwise.
    """

    agent_state: AgentState
    tool_results: tuple[ToolResult, ...] = ()
    steps_complete: bool = False
    n_responses: tuple[str, ...] = ()
    value: Any = None

    @property
    def tool_result(self) -> ToolResult | None:
        """The last tool result, or ``None`` when there is none."""
        return self.tool_results[-1] if self.tool_results else None


quick_step_result = maker_of(StepResult)


@final
class Sentinel(Enum):
    """``STEP`` is one model step; ``STEP_ALL`` is steps until the turn ends or the budget is spent."""

    STEP = "STEP"
    STEP_ALL = "STEP_ALL"

    def __repr__(self) -> str:
        return self.value

    __str__ = __repr__

    def __iter__(self) -> Generator[Yieldable, StepResult, StepResult]:
        return (yield self)


STEP = Sentinel.STEP
STEP_ALL = Sentinel.STEP_ALL


def _names(value: Iterable[str | ToolLike] | None) -> tuple[str, ...] | None:
    if isinstance(value, str):
        msg = f"the tools of a StepWith are a list of tools or names, not {value!r}"
        raise BadYield(msg)
    return None if value is None else tuple(map(tool_name_of, value))


@attrs.frozen
class StepWith:
    """
    One step with overrides that hold for it alone (requirements C16).

    Attributes:
        model: Another model string.
        tools: Names of the tools to offer instead of the agent's.
        tool_choice: ``"auto"``, ``"none"``, ``"required"`` or a tool name.
        settings: Settings put over the agent's.
    """

    model: str | None = attrs.field(default=None, validator=MODEL)
    tools: tuple[str, ...] | None = attrs.field(default=None, converter=_names)
    tool_choice: ToolChoice | None = attrs.field(default=None, validator=fine(or_none(CHOICE), BadYield))
    settings: ModelSettings | None = attrs.field(default=None, validator=SETTINGS)

    def __iter__(self) -> Generator[Yieldable, StepResult, StepResult]:
        return (yield self)


def _text(value: str) -> str:
    if isinstance(value, str):
        return text_of(value)
    msg = f"a StepText holds text, not {value!r}"
    raise BadYield(msg)


@attrs.frozen
class StepText:
    """
    Text that becomes an assistant message as if the model had said it; tool-call blocks in it run in order.

    A block with ``end_turn`` or ``task_completed`` ends the turn: the handler goes on with ``steps_complete``. A block is ``<tool_call>{"name": ..., "input": {...}}</tool_call>`` or codebuff's form (generator-contract G30).
    ``yield from`` gives the results of its blocks.
    """

    text: str = attrs.field(converter=_text)

    def __iter__(self) -> Generator[Yieldable, StepResult, tuple[ToolResult, ...]]:
        return (yield self).tool_results


MAX_CANDIDATES = 64


def _count(value: int) -> int:
    number: Any = value
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        return value
    msg = f"GenerateN needs an integer from 1 to {MAX_CANDIDATES}, not {value!r}"
    raise BadYield(msg)


@attrs.frozen
class GenerateN:
    """
    Ask the model *n* times for a reply to the present history, which stays untouched (generator-contract G19).

    ``yield from`` gives what they say, without thoughts, in candidate order; failed candidates are left out. *n* is 1 to 64; more is a spent limit.
    """

    n: int = attrs.field(converter=_count)

    def __iter__(self) -> Generator[Yieldable, StepResult, tuple[str, ...]]:
        return (yield self).n_responses


def _messages(value: str | Iterable[Message]) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (UserMessage(value),)
    if not isinstance(value, Iterable):
        msg = f"Complete takes a string or a sequence of messages, not {value!r}"
        raise BadYield(msg)
    return tuple(Transcript(value))


def _specs(value: Any) -> Any:
    return value if isinstance(value, str) or not isinstance(value, Iterable) else tuple_of(value)


@attrs.frozen
class Complete:
    """
    One model call beside the conversation (design 4).

    ``yield from`` gives the ``ModelReply``. Calls in it are not run.

    Attributes:
        messages: The messages to send; a string is one user message.
        model: Another model string than the run's.
        system_prompt: A system prompt; none by default.
        settings: Settings instead of the agent's.
        tools: Tools to show, none by default. With the run's own, ``state.tool_definitions.values()``, and its system prompt
            the request begins like that of a step, so that a provider's prompt cache hits.

    Raises:
        TranscriptError: when *messages* do not pair.
    """

    messages: tuple[Message, ...] = attrs.field(converter=_messages)
    model: str | None = attrs.field(default=None, validator=MODEL, kw_only=True)
    system_prompt: str | None = attrs.field(default=None, validator=fine(or_none(TEXT), BadYield), kw_only=True)
    settings: ModelSettings | None = attrs.field(default=None, validator=SETTINGS, kw_only=True)
    tools: tuple[ToolSpec, ...] = attrs.field(
        default=(), converter=_specs, validator=fine(SPECS, BadYield), kw_only=True
    )

    def __iter__(self) -> Generator[Yieldable, StepResult, ModelReply]:
        reply: ModelReply = (yield self).value
        return reply


Yieldable: TypeAlias = (
    ToolCall
    | AgentCall[Any]
    | Sentinel
    | StepWith
    | StepText
    | GenerateN
    | Complete
    | Parallel[Any]
    | Perform[Any]
    | Ask
)
"""Everything that a handler may yield."""

Steps: TypeAlias = Generator[Yieldable, StepResult, Ret]
"""The type of a handler's generator; ``Steps[Out]`` returns the output, bare ``Steps`` returns nothing."""

YIELDABLES: tuple[type, ...] = (
    ToolCall,
    AgentCall,
    Sentinel,
    StepWith,
    StepText,
    GenerateN,
    Complete,
    Parallel,
    Perform,
    Ask,
)
