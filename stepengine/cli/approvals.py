"""
Which tool calls of a command line's run a person has to approve. One rule for the bundled tools and for those of agent files.

A tool of the category ``write`` needs ``--write``, and one of ``execute`` needs ``--shell``. Without the option a person is asked about
each call. Where nobody can answer, the command refuses the agent before it starts. The name of a tool never decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from stepengine.data.definition import AgentDefinition
from stepengine.data.tools import ToolLike, ToolSpec
from stepengine.tools.spawning import with_carried

if TYPE_CHECKING:
    from stepengine.cli.options import Options
    from stepengine.journal.history import History
    from stepengine.permissions import Policy

__all__ = ("OPTIONS", "approval_policy", "approvals_needed", "asked_categories", "is_judged", "own_specs", "restricted")

OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"write": ("changes files", "--write"), "execute": ("runs programs", "--shell")}
)
"""By category: what its tools do, and the option that allows them."""
HOOK = "permission"
"""The name of a policy's hook, as a journal lists it."""


def restricted(options: Options) -> frozenset[str]:
    """Return the categories that the options do not allow."""
    allowed = {"write": options.write, "execute": options.shell}
    return frozenset([category for category in OPTIONS if not allowed[category]])


def own_specs(tools: Iterable[object]) -> list[ToolSpec]:
    """Return the specs of tool objects, and of those that their bodies call; names and sources of tools have none."""
    return [tool.spec for tool in with_carried([tool for tool in tools if isinstance(tool, ToolLike)])]


def approvals_needed(specs: Iterable[ToolSpec], category: str) -> list[str]:
    """Return the names of the tools of a category whose calls can be asked about."""
    return [spec.name for spec in specs if spec.category == category and spec.requires_permission]


def approval_policy(categories: frozenset[str], specs: Collection[ToolSpec]) -> Policy | None:
    """Return the policy that asks about tools of *categories* and allows all others; ``None`` where none of *specs* is one."""
    asked = [category for category in OPTIONS if category in categories and approvals_needed(specs, category)]
    if not asked:
        return None
    from stepengine.permissions import Policy, Rule
    from stepengine.permissions.rules import Every

    return Policy([*[Rule.ask_for_category(category) for category in asked], Rule("allow", Every())])


def is_judged(history: History, agent: AgentDefinition) -> bool:
    """Return whether a policy judged the calls of a recorded run; a hook of the agent's own does not count."""
    from stepengine.journal.encoding import name_of

    own = [name_of(hook) for hook in agent.hooks.pre_tool]
    head = history.head
    return head is not None and head.hooks.count(HOOK) > own.count(HOOK)


def asked_categories(history: History, specs: Mapping[str, ToolSpec], categories: frozenset[str]) -> frozenset[str]:
    """
    Return the categories about which a recorded run asks, so that its record is met again.

    Those about which it asked, and of those that the options do not allow the ones that it never used.
    """
    asked, used = set[str](), set[str]()
    for intent in history.intents.values():
        form = history.form(intent)
        if intent.type == "tool_call":
            names, found = [form["tool_name"]], used
        elif intent.type == "ask" and form["purpose"] == HOOK:
            names, found = [question.get("tool_name") for question in form["questions"]], asked
        else:
            continue
        found.update([specs[name].category for name in names if name in specs])
    return frozenset((asked | (categories - used)) & {*OPTIONS})
