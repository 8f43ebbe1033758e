"""The performer of ``CallTool``: finds the tool, gives it its context, and shows what it says while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs

from stepengine.data.effects import CallTool
from stepengine.data.events import Event, ToolLog
from stepengine.data.results import ToolResult
from stepengine.data.state import AgentState, prompt_tokens
from stepengine.data.tools import ToolBinding
from stepengine.errors import StepEngineError, ToolError
from stepengine.runtime.logs import Lines
from stepengine.runtime.performer import Item
from stepengine.tools.context import ResourceMap, ToolContext, Workspace
from stepengine.tools.conversion import as_result
from stepengine.tools.threads import ThreadPool

if TYPE_CHECKING:
    from stepengine.runtime.tree import Tree

__all__ = ("BoundTool", "Deferred", "ToolSetting", "call_tool")


@attrs.frozen
class BoundTool(ToolBinding):
    """A binding that can also be carried out; ``tool`` is a ``stepengine.tools.Tool``."""

    tool: Any = attrs.field(default=None, kw_only=True)


@attrs.frozen(kw_only=True)
class ToolSetting:
    """
    What the tools of an engine are run with.

    Attributes:
        threads: Where sync bodies run.
        overrides: Dependency factories that replace others.
        workspace: Where agents work.
        resources: Live objects by type.
    """

    threads: ThreadPool = attrs.field(factory=ThreadPool)
    overrides: Mapping[Callable[..., Any], Callable[..., Any]] = attrs.field(factory=dict)
    workspace: Workspace | None = None
    resources: ResourceMap = attrs.field(factory=ResourceMap)


async def call_tool(item: Item, tree: Tree) -> ToolResult:
    """Run one tool; a failing body is an error result."""
    effect: CallTool = item.effect  # type: ignore[assignment]
    binding = item.plan.tools.get(effect.tool_name)
    tool = getattr(binding, "tool", None)
    if binding is None or tool is None:
        msg = f"the tool {effect.tool_name!r} of agent {item.plan.definition.id!r} cannot be carried out here"
        raise StepEngineError(msg)
    arguments = effect.arguments
    if arguments is None:
        arguments = binding.validate(effect.input).arguments
    ctx: ToolContext = _Unmade(item, effect, tree)  # type: ignore[assignment]
    if not getattr(tool, "deferred", False):
        result: ToolResult = await tool.execute(arguments, ctx, overrides=tree.services.tools.overrides)
        return result
    delivered = tree.deferred.expect(item)
    try:
        result = await tool.execute(arguments, ctx, overrides=tree.services.tools.overrides)
        return result if result.is_error else await delivered
    finally:
        tree.deferred.forget(item)


def is_deferred(item: Item) -> bool:
    """Return whether an effect is a call of a tool whose result comes from outside."""
    effect = item.effect
    if type(effect) is not CallTool:
        return False
    return getattr(getattr(item.plan.tools.get(effect.tool_name), "tool", None), "deferred", False)


class Deferred:
    """The calls of one run tree whose results come from outside (requirements E27)."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], asyncio.Future[ToolResult]] = {}

    def expect(self, item: Item) -> asyncio.Future[ToolResult]:
        """Take the result of a call from now on, and return what waits for it; it may come before the body has returned."""
        key = item.path, cast("CallTool", item.effect).tool_call_id
        known = self._open.get(key)
        if known is None:
            known = self._open[key] = asyncio.get_running_loop().create_future()
        return known

    def forget(self, item: Item) -> None:
        """Take no result of a call any more; may be called twice."""
        self._open.pop((item.path, cast("CallTool", item.effect).tool_call_id), None)

    def deliver(self, call_id: str, result: Any, path: str | None = None) -> None:
        """
        Give a call that waits its result; may be called from any thread.

        Raises:
            ToolError: when no call with that id waits, or those of several runs do and *path* does not say which.
        """
        waiting = {key: future for key, future in list(self._open.items()) if not future.done()}
        found = [key for key in waiting if key[1] == call_id and path in (None, key[0])]
        if len(found) != 1:
            listed = ", ".join([f"{key[1]!r} at path {key[0]!r}" for key in waiting])
            which = f"{call_id!r}" if path is None else f"{call_id!r} at path {path!r}"
            what = "waits for its result" if not found else "is one call: several wait, and path= says which"
            msg = f"no call {which} {what}; waiting are: {listed or 'none'}"
            raise ToolError(msg)
        future = waiting[found[0]]
        future.get_loop().call_soon_threadsafe(_deliver, future, as_result(result))


def _deliver(future: asyncio.Future[ToolResult], result: ToolResult) -> None:
    if not future.done():
        future.set_result(result)


class _Unmade:
    """A tool context that is made when somebody looks at it: most bodies never do, and making one costs microseconds."""

    __slots__ = ("_effect", "_item", "_made", "_tree")

    def __init__(self, item: Item, effect: CallTool, tree: Tree) -> None:
        self._item = item
        self._effect = effect
        self._tree = tree
        self._made: ToolContext | None = None

    def __getattr__(self, name: str) -> Any:
        if self._made is None:
            self._made = _context(self._item, self._effect, self._tree)
        return getattr(self._made, name)


def _context(item: Item, effect: CallTool, tree: Tree) -> ToolContext:
    plan, setting = item.plan, tree.services.tools
    state, agent = effect.state(), plan.definition
    voice = _Voice(item, effect, tree)
    return ToolContext(
        agent_state=state,
        tool_call_id=effect.tool_call_id,
        tool_name=effect.tool_name,
        run_id=state.run_id,
        address=f"{item.path}#{effect.seq}",
        input=effect.input,
        agent_id=agent.id,
        agent_name=agent.display_name,
        agent_description=agent.description,
        session_id=plan.session_id,
        user_id=plan.user_id,
        parent_session_id=plan.session_id if item.path else None,
        parent_tool_call_id=tree.spawned_by.get(item.path),
        ancestor_run_ids=cast("Any", state.ancestor_run_ids),
        step_index=effect.step_index,
        metadata=plan.metadata,
        workspace=setting.workspace,
        resources=setting.resources,
        logger=voice,
        cancelled=tree.signal,
        remaining_tokens=_remaining(item, effect, state, tree),
        emit=voice.emit,
        threads=setting.threads,
        leaked=tree.leaked,
        belongings=partial(tree.belongings, item.path),
        sleep=tree.services.clock.sleep,
    )


def _remaining(item: Item, effect: CallTool, state: AgentState, tree: Tree) -> int | None:
    """Return how many tokens of context are left; only a run that called its model has the model's data looked up."""
    plan = item.plan
    window = plan.context_window
    if window is None and plan.model and effect.measured is not None:
        window = tree.services.window(plan.model)
    return None if window is None else max(0, window - prompt_tokens(state, effect.measured))


class _Voice(Lines):
    """What a tool says while it runs: its events and log lines, with the address of its call."""

    __slots__ = ("_effect", "_item", "_tree")

    def __init__(self, item: Item, effect: CallTool, tree: Tree) -> None:
        self._item = item
        self._effect = effect
        self._tree = tree

    def emit(self, event: Event) -> None:
        """Show an event, with the address of the call."""
        event = attrs.evolve(event, path=self._item.path, seq=self._effect.seq)
        if isinstance(event, ToolLog):
            self._tree.hub.log(event, step=self._effect.step_index)
        self._tree.emit_from_anywhere(event)

    def line(self, level: str, message: str, data: dict[str, Any]) -> None:
        """Show a line, and log it."""
        event = ToolLog(
            path=self._item.path,
            seq=self._effect.seq,
            message=str(message),
            level=level,
            tool_name=self._effect.tool_name,
            tool_call_id=self._effect.tool_call_id,
        )
        self._tree.hub.log(event, data or None, step=self._effect.step_index)
        self._tree.emit_from_anywhere(event)
