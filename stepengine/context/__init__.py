"""
Policies for the history that the model receives.

A run has two versions of its conversation. The record is the whole conversation. The view goes out with the next request. A policy
is a ``pre_step`` hook. Before a model call it reads both and may return another view: shortened, masked, summarized, or with
additions. The record changes only on request. So a policy that cuts too much loses nothing, and an undo or export is complete.

A policy is a pure function of the history, its limits and the recorded time. A policy whose summary is written by a model requests
it as an effect. So a replay repeats its result without a record of its own. It should change little and rarely: a change in
front of a request invalidates the provider's prompt cache for everything after it. So policies cut much at once and then
change nothing for a while. Calls stay with their results, and the current request of the user is never cut.

This package contains the context policies and ``SystemPrompt``.

It must not contain changes of the record without a request, provider formats, or I/O.

Start reading with ``policy``, then ``pruning``, the policy of most agents.
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
