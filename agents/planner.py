"""
``planner``: reads the project and returns a plan, step by step. It changes nothing.

``stepengine run planner "Give orders of 100 or more a discount"``
"""

from __future__ import annotations

from stepengine import AgentDefinition

INSTRUCTIONS = """\
Read what you need, then write a plan for somebody who has not read anything: the aim in a sentence, then numbered steps.
Each step names its file, what changes there and why, and how to see that it worked. Put what everything else depends on
first. Say at the end what you assumed and what could go wrong. Write no code beyond a name or a signature."""

agent = AgentDefinition(
    "planner",
    description="Reads the project and returns a numbered plan for a request. Changes nothing.",
    tools=["read_files", "read_subtree", "list_directory", "glob", "code_search"],
    instructions_prompt=INSTRUCTIONS,
)
