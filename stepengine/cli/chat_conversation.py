"""
The conversation of ``stepengine chat``: its agent and engine, its turns so far, and the permission rules for the next turn.

Terminals are in ``chat_screen``.
"""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast

import attrs

from stepengine.cli import bench
from stepengine.cli.bench import choose_limits, make_engine_setup
from stepengine.cli.journals import open_journal, replay_recorded_run
from stepengine.cli.options import Options
from stepengine.cli.state_folder import fill_options_from_recorded
from stepengine.data.definition import AgentDefinition
from stepengine.data.estimate import estimate_tokens, message_tokens, tool_tokens
from stepengine.data.messages import AssistantMessage, UserMessage
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.usage import add_cost
from stepengine.journal.recorded_runs import RecordedRun

if TYPE_CHECKING:
    from stepengine.journal import Journal
    from stepengine.permissions import Policy, Rule
    from stepengine.runtime.handle import RunHandle


class ChatConversation:
    """
    A conversation with an agent. Each turn is a root run of its own that continues from the state of the turn before.

    Args:
        options: The options of the command.
        agent: The agent.

    Attributes:
        options: The options of the next turn.
        agent: The agent of the next turn.
        bench: The engine of the next turn and its progress display.
        engines: Closes all engines of the chat.
        session_id: The id of the session. Lasting approvals hold for all of its turns.
        states: The state after each turn.
        results: The results of all turns of this chat, including those of earlier conversations.
        journal: The journal of the last recorded turn.
        notes: Texts that are sent to the agent with the next prompt.
        diffs: The diffs of written files.
        filled: Tokens of the next prompt, from the usage of the last reply or by estimate; ``None`` if unknown.
        wanted_mode: The permission mode scheduled for the next turn; ``""`` for none.
        modes: The permission modes that the person may choose.
    """

    def __init__(self, options: Options, agent: AgentDefinition) -> None:
        from stepengine.permissions.policy import MODES

        self.options = options
        self.agent = agent
        self.bench = make_engine_setup(options, agent, is_new=True)
        self.engines = AsyncExitStack()
        self.session_id = _make_session_id()
        self.states: list[AgentState] = []
        self.results: list[RunResult] = []
        self.journal: Journal | None = None
        self.notes: list[str] = []
        self.diffs: list[str] = []
        self.filled: int | None = None
        self.wanted_mode = ""
        # The mode that approves every call can be chosen only if the chat started in it.
        self.modes: list[str] = [mode for mode in MODES if mode != "bypass" or self.policy.mode == "bypass"]

    # --- turns --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> AgentState | None:
        """The state after the last turn."""
        return self.states[-1] if self.states else None

    def start_turn(self, prompt: str, agent: AgentDefinition, options: Options, journal: Journal | None) -> RunHandle:
        """Start a turn and return its handle."""
        return self.bench.engine.start(
            agent,
            prompt,
            previous=self.state,
            session_id=self.session_id,
            journal=journal,
            limits=choose_limits(options, agent),
        )

    def store_turn_result(self, result: RunResult, prompt_tokens: int) -> None:
        """Store the result of a turn; unless it failed, store also its state, from which the next turn continues."""
        self.results.append(result)
        if result.status is not RunStatus.FAILED:
            self.states.append(result.state)
            self.filled = prompt_tokens or self.estimate_prompt_tokens()

    def replace_turns_by_recorded(self, last: RunResult, entry: RecordedRun) -> None:
        """Replace the turns by a recorded one, so that the conversation continues from its end."""
        self.states = [last.state]
        self.session_id = entry.get_text("session_id") or self.session_id
        self.filled = self.estimate_prompt_tokens()

    def drop_later_turns(self, turn: int) -> None:
        """Drop the turns after number *turn*, and continue with a new session id, so that lasting approvals end."""
        self.states, self.session_id = self.states[:turn], _make_session_id()
        self.filled = self.estimate_prompt_tokens()

    def list_visible_messages(self) -> list[UserMessage | AssistantMessage]:
        """Return the messages of the person and the agent, without instructions, reminders and tool calls."""
        found: list[UserMessage | AssistantMessage] = []
        for message in () if self.state is None else self.state.message_history:
            if isinstance(message, AssistantMessage):
                found += [message] if message.text.strip() else []
            elif isinstance(message, UserMessage) and "USER_PROMPT" in message.tags:
                found.append(message)
        return found

    def estimate_prompt_tokens_by_kind(self) -> dict[str, int]:
        """Return the estimated tokens of the next prompt by kind; nothing before the first turn."""
        state = self.state
        if state is None:
            return {}
        parts = {
            "system prompt": estimate_tokens(state.system_prompt),
            "tools": tool_tokens(state.tool_definitions.values()),
        }
        for message in state.message_history:
            what = {"user": "your messages", "assistant": "its replies", "tool": "results of tools"}[message.role]
            parts[what] = parts.get(what, 0) + message_tokens(message)
        return parts

    def estimate_prompt_tokens(self) -> int | None:
        """Return the estimated tokens of the next prompt; ``None`` before the first turn."""
        return sum(self.estimate_prompt_tokens_by_kind().values()) if self.states else None

    def compute_total_cost(self, current_turn_cost: Decimal | None) -> Decimal | None:
        """Return the cost of all ended turns plus the *current_turn_cost* one; ``None`` if a part of it is unknown."""
        for result in self.results:
            current_turn_cost = add_cost(current_turn_cost, result.cost)
        return current_turn_cost

    # --- the agent and its permissions --------------------------------------------------------------------------------

    async def switch_to_new_engine(self, options: Options, agent: AgentDefinition) -> None:
        """Make an engine for *options* and *agent*, and use them from the next turn on."""
        made = make_engine_setup(options, agent, is_new=True)
        await self.engines.enter_async_context(made.engine)
        self.options, self.bench, self.agent = options, made, agent

    @property
    def policy(self) -> Policy:
        """The permission policy of the next turn."""
        return bench.choose_policy(self.options) or bench.make_asking_policy()

    async def switch_policy_keeping_approvals(self, policy: Policy) -> None:
        """Use *policy* from the next turn on, with the lasting approvals of this conversation except those of a category."""
        from stepengine.permissions import Category

        for rule in self.bench.engine.list_rules(self.session_id):
            if isinstance(rule.matcher, Category):
                continue  # all edits: the mode says that, and another mode ends it
            policy = policy.with_session_rule(self.session_id, rule)
        await self.switch_to_new_engine(attrs.evolve(self.options, policy=policy, chat_policy=None), self.agent)

    @property
    def mode(self) -> str:
        """The permission mode of the next turn."""
        return self.wanted_mode or self.policy.mode

    def schedule_next_permission_mode(self) -> str:
        """Select the following permission mode for the next turn, and return it."""
        # A resumed turn may have a mode that cannot be chosen in this chat: the first one follows it.
        after = self.modes.index(self.mode) + 1 if self.mode in self.modes else 0
        self.wanted_mode = self.modes[after % len(self.modes)]
        return self.wanted_mode

    async def switch_permission_mode(self, mode: str) -> None:
        """Set the permission mode, and forget a scheduled one."""
        self.wanted_mode = ""
        await self.switch_policy_keeping_approvals(attrs.evolve(self.policy, mode=cast("Any", mode)))

    def list_approval_rules(self) -> list[Rule]:
        """Return the lasting approvals of files and of this conversation."""
        policy, here = self.policy, f"session:{self.session_id}"
        before = [rule for rule in policy.rules if str(rule.scope) == here]
        return [*policy.remembered, *before, *self.bench.engine.list_rules(self.session_id)]

    async def remove_approval_rule(self, rule: Rule) -> None:
        """Withdraw a lasting approval."""
        policy = self.policy
        if rule in (*policy.rules, *policy.remembered):
            rules, remembered = [[r for r in kept if r != rule] for kept in (policy.rules, policy.remembered)]
            await self.switch_policy_keeping_approvals(attrs.evolve(policy, rules=rules, remembered=remembered))
        else:
            self.bench.engine.remove_rules(self.session_id, rule.id)


def replay_turn(entry: RecordedRun, options: Options) -> RunResult:
    """Replay a recorded turn without model calls and return its result."""
    there = attrs.evolve(fill_options_from_recorded(options, entry), settings=options.settings, quiet=True)
    return replay_recorded_run(open_journal(entry.journal), there)


def _make_session_id() -> str:
    return f"chat-{secrets.token_hex(6)}"
