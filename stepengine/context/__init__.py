"""
What the model is shown of the record.

What lives here: the context policies (cutting, masking, summarising, injecting), which turn the record into a view, and
`SystemPrompt`.

What must not: changes of the record that nobody asked for, provider formats, I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import late

if TYPE_CHECKING:
    from stepengine.context.masking import mask_tool_results
    from stepengine.context.outputs import find_output, output_cache
    from stepengine.context.overflow import raise_on_overflow
    from stepengine.context.policy import ContextLimits, ContextPolicy
    from stepengine.context.project import project_context
    from stepengine.context.prompt import Environment, SystemPrompt
    from stepengine.context.pruning import prune_to_summary
    from stepengine.context.reminding import inject_context, reminders
    from stepengine.context.summarizing import compact, summarize
    from stepengine.context.truncating import truncate
    from stepengine.context.unfinished import require_finished_todos
    from stepengine.context.usage_log import usage_logger
    from stepengine.data.estimate import estimate_tokens
else:
    __getattr__, __dir__ = late(
        __name__,
        {
            "stepengine.context.masking": ("mask_tool_results",),
            "stepengine.context.outputs": (
                "find_output",
                "output_cache",
            ),
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
            "stepengine.context.reminding": (
                "inject_context",
                "reminders",
            ),
            "stepengine.context.summarizing": (
                "compact",
                "summarize",
            ),
            "stepengine.context.truncating": ("truncate",),
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
    "find_output",
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
