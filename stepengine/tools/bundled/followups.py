"""``suggest_followups``: suggests next messages to the user, in an event."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from stepengine.data.events import FollowupsSuggested
from stepengine.data.tools import ToolAnnotations
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool


@with_config(ConfigDict(extra="forbid"))
class Followup(TypedDict):
    """Something that the user could ask next."""

    prompt: Annotated[str, Field(description="The whole prompt, as the user would write it.", min_length=1)]
    label: NotRequired[Annotated[str, Field(description="A few words to show in its place.")]]


def make_followup_tool() -> Tool:
    """Return the tool ``suggest_followups``, which suggests the user's next messages in an event."""

    @tool(
        category="control",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        requires_permission=False,
        forces_next_step=False,
        in_thread=False,
        destinations=(),
    )
    def suggest_followups(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext, followups: Annotated[list[Followup], Field(min_length=1)]
    ) -> dict[str, Any]:
        """
        Suggest to the user what could be asked next.

        Usage:
            - Call it at the end of your work, with two or three prompts that follow from it.

        Examples:
            {"followups": [{"prompt": "Write tests for the new parser.", "label": "Add tests"}]}

        When not to use:
            - To ask the user something, use `ask_user`.

        Notes:
            - The suggestions are shown to the user; nothing is done about them.

        Args:
            followups: The suggestions, best first.
        """
        ctx.emit(FollowupsSuggested(followups=followups))
        return {"message": f"{len(followups)} followups were suggested to the user."}

    return suggest_followups
