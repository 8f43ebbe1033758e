"""
The mechanism of tools: how a function or a schema becomes one, what it is called with, and what its result becomes.

A tool is a specification that models see and a binding that machines use: it mends names, validates an input, and says how the tool
runs (a function, a change of the run, children, a question, steps, a generator). From a function both are made by looking at its
signature and docstring once, when it is declared, so that whatever is wrong with it is said there, and nothing is looked up at a
call. What the validator has made of an input is what rules judge, what is recorded and what runs. What a body returns becomes JSON
here, or an error that names the place: no ``repr`` ever reaches a model.

Bodies run in threads or on the loop, with a time limit and with a context that is theirs alone (``execution``); what they leave behind
is ended and told.

Also the tools that are part of an engine's contract: what ends a turn, sets the output, asks the user or spawns agents.

Must not know of the bundled tools in ``stepengine.tools.bundled``, which stand on this as anybody's do.

Begin with ``definition`` and ``decorator``, then ``execution``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.data.definition import ToolSource
    from stepengine.data.messages import ToolReferencePart
    from stepengine.data.names import ToolName
    from stepengine.data.tools import ToolLike, ToolSpec
    from stepengine.tools.context import ResourceMap
    from stepengine.tools.definition import ToolPreview
    from stepengine.tools.registry import ToolRegistry
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.data.definition": ("ToolSource",),
            "stepengine.data.messages": ("ToolReferencePart",),
            "stepengine.data.names": ("ToolName",),
            "stepengine.data.tools": ("ToolLike", "ToolSpec"),
            "stepengine.tools.context": ("ResourceMap",),
            "stepengine.tools.definition": ("ToolPreview",),
            "stepengine.tools.registry": ("ToolRegistry",),
        },
    )

__all__ = (
    "ResourceMap",
    "ToolLike",
    "ToolName",
    "ToolPreview",
    "ToolReferencePart",
    "ToolRegistry",
    "ToolSource",
    "ToolSpec",
)
