"""
What the model is shown of the record.

A run keeps two sides of its conversation: the record, which is all of it, and the view, which goes out with the next request. A policy
is a ``pre_step`` hook that looks at both before a model call and gives another view: shortened, masked, summed up, or with something
added. The record stays unless somebody asks for it, so that nothing is lost by a policy that cut too much, and an undo or an
export has everything.

A policy is a pure function of the history, its limits and the recorded time (one that has a model write a summary asks for that as an
effect): so it does the same again in a replay, and needs no record of its own. It should change little and seldom: whatever changes in
front of a request loses the provider's prompt cache for all that follows, hence policies that cut much at once and then leave
everything alone. Calls stay with their results, and the live request of the user outlives every cut.

What lives here: the context policies, and ``SystemPrompt``.

Must not be here: changes of the record that nobody asked for, provider formats, I/O.

Begin with ``policy``, then ``pruning``, the policy that most agents have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.context.masks import mask_tool_results
    from stepengine.context.outputs import output_cache
    from stepengine.context.overflow import raise_on_overflow
    from stepengine.context.policy import ContextLimits, ContextPolicy
    from stepengine.context.project import project_context
    from stepengine.context.prompt import Environment, SystemPrompt
    from stepengine.context.pruning import prune_to_summary
    from stepengine.context.reminders_hook import inject_context, reminders
    from stepengine.context.summaries import compact, summarize
    from stepengine.context.truncation import truncate
    from stepengine.context.unfinished import require_finished_todos
    from stepengine.context.usage_log import usage_logger
    from stepengine.data.estimate import estimate_tokens
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.context.masks": ("mask_tool_results",),
            "stepengine.context.outputs": ("output_cache",),
            "stepengine.context.overflow": ("raise_on_overflow",),
            "stepengine.context.policy": (
                "ContextLimits",
                "ContextPolicy",
            ),
            "stepengine.context.project": ("project_context",),
            "stepengine.context.prompt": (
                "Environment",
                "SystemPrompt",
            ),
            "stepengine.context.pruning": ("prune_to_summary",),
            "stepengine.context.reminders_hook": (
                "inject_context",
                "reminders",
            ),
            "stepengine.context.summaries": (
                "compact",
                "summarize",
            ),
            "stepengine.context.truncation": ("truncate",),
            "stepengine.context.unfinished": ("require_finished_todos",),
            "stepengine.context.usage_log": ("usage_logger",),
            "stepengine.data.estimate": ("estimate_tokens",),
        },
    )

__all__ = (
    "ContextLimits",
    "ContextPolicy",
    "Environment",
    "SystemPrompt",
    "compact",
    "estimate_tokens",
    "inject_context",
    "mask_tool_results",
    "output_cache",
    "project_context",
    "prune_to_summary",
    "raise_on_overflow",
    "reminders",
    "require_finished_todos",
    "summarize",
    "truncate",
    "usage_logger",
)
