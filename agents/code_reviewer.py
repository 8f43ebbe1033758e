"""
``code-reviewer``: reviews the change that the conversation before it has made.

It has no tools and no handler: a turn of the model is all there is to it.

It takes over the conversation, the system prompt and the shown tools of whoever spawns it, so that its request begins
with the same bytes and the provider's prompt cache is used.

``stepengine run code-reviewer "$(git diff)"``
"""

from __future__ import annotations

from stepengine import AgentDefinition

INSTRUCTIONS = """\
You are the reviewer now. Review the change that was made last, or that you are shown. You have no tools; judge what stands
above. In this order: does it do what was asked, and all of it; what breaks; what can be misused; what is missing in the
tests; what could be left out or is there twice; what does not read like the code around it. Name the file and the place, say
what happens and what would be better. Leave out praise and taste. When there is nothing to say, say so in one line."""

agent = AgentDefinition[str](
    "code-reviewer",
    description="Reviews the change made in the conversation so far: bugs, security, tests, what could be simpler.",
    include_message_history=True,
    inherit_parent_system_prompt=True,
    instructions_prompt=INSTRUCTIONS,
)
