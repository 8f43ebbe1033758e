"""
Decide which tool calls of a run a person has to approve. The rule is the same for bundled tools and tools of agent files.

A tool of the category ``write`` needs ``--write``, and one of ``execute`` needs ``--shell``. Without the option a person is asked about
each call. If no one can answer, the command refuses the agent before the start. The name of a tool never decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from stepengine.data.definition import AgentDefinition
from stepengine.data.origins import ASKED, ORIGIN_HOOK
from stepengine.data.tools import ToolLike, ToolSpec
from stepengine.tools.agent_tools import iterate_reachable_tools

if TYPE_CHECKING:
    from stepengine.cli.options import Options
    from stepengine.journal.history import History
    from stepengine.permissions import Policy

OPTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"write": ("changes files", "--write"), "execute": ("runs programs", "--shell")}
)
"""By category: what its tools do, and the option that allows them."""
HOOK = "permission"
"""The name of a policy's hook, as a journal lists it."""
INJECTION = "injection"
"""The value of ``--guard``."""


def get_disallowed_categories(options: Options) -> frozenset[str]:
    """Return the categories that the options do not allow."""
    allowed = {"write": options.write, "execute": options.shell}
    return frozenset([category for category in OPTIONS if not allowed[category]])


def collect_tool_specs(tools: Iterable[object]) -> list[ToolSpec]:
    """Return the specs of tool objects and of the tools that their bodies call; tool names and sources are skipped."""
    return [tool.spec for tool in iterate_reachable_tools([tool for tool in tools if isinstance(tool, ToolLike)])]


def list_tools_needing_approval(specs: Iterable[ToolSpec], category: str) -> list[str]:
    """Return the names of the tools of a category whose calls can be asked about."""
    return [spec.name for spec in specs if spec.category == category and spec.requires_permission]


def make_category_approval_policy(categories: frozenset[str], specs: Collection[ToolSpec]) -> Policy | None:
    """Return the policy that asks about tools of *categories* and allows all others; ``None`` where none of *specs* is one."""
    asked = [
        category for category in OPTIONS if category in categories and list_tools_needing_approval(specs, category)
    ]
    if not asked:
        return None
    from stepengine.permissions import Policy, Rule
    from stepengine.permissions.rules import EveryCall

    return Policy([*[Rule.ask_for_category(category) for category in asked], Rule("allow", EveryCall())])


def had_command_line_policy(history: History, agent: AgentDefinition) -> bool:
    """Return whether a command-line policy was a hook of a recorded run, besides hooks of the agent."""
    from stepengine.journal.encoding import get_name_without_module

    own = [get_name_without_module(hook) for hook in agent.hooks.pre_tool]
    head = history.head
    return head is not None and any(head.hooks.count(hook) > own.count(hook) for hook in (HOOK, ORIGIN_HOOK))


def has_guard_rules(history: History) -> bool:
    """Return whether rules about untrusted data judged the calls of a recorded run."""
    return history.head is not None and ORIGIN_HOOK in history.head.hooks


def _is_untrusted_data_question(question: Mapping[str, object]) -> bool:
    """Return whether a recorded question was asked only because of untrusted data; its rules are not recorded, its text is."""
    return bool(question.get("provenance")) and question["text"] == ASKED.format(question.get("tool_name"))


def choose_categories_to_ask_about(
    history: History, specs: Mapping[str, ToolSpec], categories: frozenset[str]
) -> frozenset[str]:
    """
    Return the categories about which a resumed run asks, so that it matches its record.

    These are the categories about which it asked, and those that the options do not allow and that it never used.
    """
    asked, used = set[str](), set[str]()
    for intent in history.intents.values():
        form = history.form(intent)
        if intent.type == "tool_call":
            names, found = [form["tool_name"]], used
        elif intent.type == "ask" and form["purpose"] == HOOK:
            names, found = [q.get("tool_name") for q in form["questions"] if not _is_untrusted_data_question(q)], asked
        else:
            continue
        found.update([specs[name].category for name in names if name in specs])
    return frozenset((asked | (categories - used)) & {*OPTIONS})
