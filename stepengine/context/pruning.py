"""``prune_to_summary``: older turns become a summary without a model call (requirements I16, generator-contract section 4)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

import attrs
from typing_extensions import override

from stepengine.context.policy import ContextPolicy, check_policy
from stepengine.context.pruning_calls import FORGOTTEN_AGENTS
from stepengine.context.pruning_entries import (
    SILENT_TAGS,
    SUMMARY_TAGS,
    Caps,
    Memory,
    continue_message,
    entry_tokens,
    fitting,
    remembered,
    summary_message,
)
from stepengine.context.sizes import ContextLimits, last_tagged, limits_of
from stepengine.data.estimate import MEDIA_TOKENS, message_tokens, transcript_tokens
from stepengine.data.hooks import Change, HookContext
from stepengine.data.json import JsonDict
from stepengine.data.messages import AssistantMessage, Message, UserMessage
from stepengine.data.transcript import Transcript
from stepengine.errors import DefinitionError

__all__ = ("PruneToSummary", "prune_to_summary")

LAST_REQUEST = "last_request_at"
"""The member of ``AgentState.context`` that says when the model was last asked; kept only for the cold trigger."""
MARGIN_TOKENS = 1_000
MARGIN_DIVISOR = 20
SUMMARY_SHARE = 2
"""The summary may have one half of the room that the messages have, so that the next prune is far away."""
UNLIMITED = Caps()


class Scene(NamedTuple):
    """
    A history as a prune sees it.

    Attributes:
        summarised: What becomes the summary.
        live: The request that the agent works on, when it has a message of its own.
        is_mid_turn: Whether the agent has begun to work on it.
        instructions: The instructions in force.
    """

    summarised: tuple[Message, ...]
    live: Message | None
    is_mid_turn: bool
    instructions: Message | None

    @property
    def ending(self) -> Message:
        """The message that the pruned history ends with."""
        return continue_message() if self.live is None or self.is_mid_turn else self.live


def _is_silent(message: Message) -> bool:
    return type(message) is UserMessage and not SILENT_TAGS.isdisjoint(message.tags)


def _is_work(message: Message) -> bool:
    return type(message) is not UserMessage or (SILENT_TAGS | SUMMARY_TAGS).isdisjoint(message.tags)


def _scene(transcript: Transcript) -> Scene:
    at, instructions = (last_tagged(transcript, tag) for tag in ("USER_PROMPT", "INSTRUCTIONS_PROMPT"))
    live = None if at is None else transcript[at]
    is_mid_turn = at is not None and any(map(_is_work, transcript[at + 1 :]))
    kept_apart = None if is_mid_turn else at
    summarised = [m for i, m in enumerate(transcript) if i != kept_apart and not _is_silent(m)]
    return Scene(tuple(summarised), live, is_mid_turn, None if instructions is None else transcript[instructions])


@attrs.frozen(kw_only=True)
class PruneToSummary(ContextPolicy):
    """What ``prune_to_summary`` returns; see there."""

    user_budget: int = 50_000
    assistant_tool_budget: int = 20_000
    cold_after: timedelta | None = None
    cold_min_tokens: int | None = 140_000
    forgotten_agents: frozenset[str] = frozenset(FORGOTTEN_AGENTS)

    @override
    def __call__(self, ctx: HookContext) -> Change | None:
        """Return the change that makes the prompt short, or ``None``; with a cold trigger also when the model is asked."""
        source, limits = self.source(ctx), limits_of(ctx, self.max_tokens)
        at = ctx.state.context.get(LAST_REQUEST)
        last_request = datetime.fromisoformat(at) if isinstance(at, str) else None
        reason = self.reason(source, limits, ctx.now, last_request)
        shorter = None if reason is None else self.summarised(source, limits)
        if shorter is not None:
            ctx.logger.info("pruned the history to a summary", reason=reason)
        if self.cold_after is None:
            return None if shorter is None else self.change(shorter)
        asked = JsonDict({LAST_REQUEST: ctx.now.isoformat()})
        return Change(context=asked) if shorter is None else attrs.evolve(self.change(shorter), context=asked)

    @override
    def rewrite(
        self, transcript: Transcript, limits: ContextLimits, now: datetime, last_request: datetime | None = None
    ) -> Transcript | None:
        """
        Return *transcript* as a summary and what must follow it, or ``None`` when there is nothing to do.

        Args:
            transcript: The history.
            limits: What a prompt may have.
            now: The run's recorded time.
            last_request: When the model was asked last; without it the prompt cache never counts as cold.
        """
        if self.reason(transcript, limits, now, last_request) is None:
            return None
        return self.summarised(transcript, limits)

    def reason(
        self, transcript: Transcript, limits: ContextLimits, now: datetime, last_request: datetime | None
    ) -> str | None:
        """Return why the history is to be pruned: ``context_limit``, ``cache_expiry``, both, or ``None`` (P3-P6)."""
        margin = min(MARGIN_TOKENS, limits.max_tokens // MARGIN_DIVISOR)
        is_large = limits.size(transcript) + margin > limits.max_tokens
        is_cold = self._is_cold(transcript, limits, now, last_request)
        if is_large:
            return "context_limit_and_cache_expiry" if is_cold else "context_limit"
        return "cache_expiry" if is_cold else None

    def _is_cold(
        self, transcript: Transcript, limits: ContextLimits, now: datetime, last_request: datetime | None
    ) -> bool:
        """Return whether a new request of the user comes so late that the provider's prompt cache has expired."""
        if self.cold_after is None or last_request is None or now - last_request <= self.cold_after:
            return False
        if self.cold_min_tokens is not None and limits.size(transcript) < self.cold_min_tokens:
            return False
        at = last_tagged(transcript, "USER_PROMPT")
        if at is None or any(map(_is_work, transcript[at + 1 :])):
            return False
        return any(type(message) is AssistantMessage for message in transcript[:at])

    def summarised(self, transcript: Transcript, limits: ContextLimits) -> Transcript | None:
        """Return *transcript* pruned whatever its size, or ``None`` when that would not make it smaller."""
        scene = _scene(transcript)
        ending = scene.ending
        memory = self._memory(scene, limits.room - _tokens(scene.instructions, ending))
        if not memory.entries and not memory.images:
            return None
        apart = (scene.instructions, ending)
        pruned = Transcript([summary_message(memory), *[m for m in apart if m is not None]])
        return pruned if transcript_tokens(pruned) < transcript_tokens(transcript) else None

    def _memory(self, scene: Scene, room: int) -> Memory:
        """Return what is remembered in *room* tokens; in a small window the budgets share what there is."""
        live = scene.live if scene.is_mid_turn else None
        keeps_mark = scene.live is None
        whole = remembered(scene.summarised, live, self.forgotten_agents, UNLIMITED, keeps_mark=keeps_mark)
        images = whole.images[-max(1, room // SUMMARY_SHARE // MEDIA_TOKENS) :]
        frame = message_tokens(summary_message(Memory((), images)))
        share = room // SUMMARY_SHARE - frame - sum(entry_tokens(e) for e in whole.entries if e.live)
        total = self.user_budget + self.assistant_tool_budget
        if total <= share:
            return Memory(fitting(whole.entries, self.user_budget, self.assistant_tool_budget), images)
        user = max(0, share * self.user_budget // max(1, total))
        assistant = max(0, share * self.assistant_tool_budget // max(1, total))
        caps = Caps(user=min(UNLIMITED.user, user), work=assistant)
        small = remembered(scene.summarised, live, self.forgotten_agents, caps, keeps_mark=keeps_mark)
        return Memory(fitting(small.entries, user, assistant), images)


def _tokens(*messages: Message | None) -> int:
    return sum(message_tokens(message) for message in messages if message is not None)


def prune_to_summary(
    max_tokens: int | None = None,
    *,
    user_budget: int = 50_000,
    assistant_tool_budget: int = 20_000,
    cold_after: timedelta | None = None,
    cold_min_tokens: int | None = 140_000,
    forgotten_agents: Iterable[str] = FORGOTTEN_AGENTS,
    replace_record: bool = False,
) -> PruneToSummary:
    """
    Return a ``pre_step`` hook that turns older turns into a summary without a model call (generator-contract section 4).

    Messages of the user stay almost as they are, replies become notes, and of tool calls one line stays that says what was
    done to what; of their results only what still matters: errors, exit codes, answers, edits, outputs of agents. The
    history is then one summary message, the instructions, and the request that the agent works on, or, in the middle of a
    turn, a message that says to go on. The request survives whatever the budgets are. A later prune takes the entries of
    this one over.

    In a handler call ``rewrite(state.view, ContextLimits.of(state, ...), ctx.now())``.

    Args:
        max_tokens: What a prompt may have; ``None``: 0.8 of the model's context length when known, else 100,000.
        user_budget: Tokens, at three characters each, that the user's messages may have in the summary. In a window too
            small for both budgets they share one half of it.
        assistant_tool_budget: The same for replies and tool calls.
        cold_after: Prune also when the user comes back after this time, since the provider's prompt cache has expired
            then and a short prompt costs less; ``None`` for never. The hook then keeps the time of the last request in
            ``AgentState.context``.
        cold_min_tokens: Prune a cold prompt only from this size on; ``None`` for any size.
        forgotten_agents: Agents whose outputs are not kept.
        replace_record: Prune the record itself, not only what the model sees.

    Raises:
        DefinitionError: for a limit below 1, or a negative budget.
    """
    check_policy("prune_to_summary", max_tokens)
    for option, budget in (("user_budget", user_budget), ("assistant_tool_budget", assistant_tool_budget)):
        if budget < 0:
            msg = f"prune_to_summary: {option} is a number of tokens from 0 on, not {budget!r}"
            raise DefinitionError(msg)
    return PruneToSummary(
        max_tokens=max_tokens,
        user_budget=user_budget,
        assistant_tool_budget=assistant_tool_budget,
        cold_after=cold_after,
        cold_min_tokens=cold_min_tokens,
        forgotten_agents=frozenset(forgotten_agents),
        replace_record=replace_record,
    )
