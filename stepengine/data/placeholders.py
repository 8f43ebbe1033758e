"""
Placeholders of codebuff in the prompts of an agent, such as ``{CODEBUFF_PROJECT_ROOT}``. All other braces are text.

Here are their names, and how they are found and filled. Their values are known when a run starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

PLACEHOLDER = re.compile(r"\{CODEBUFF_(\w+)\}")
STEPS = "REMAINING_STEPS"
RUN_NAMES = (
    "AGENT_NAME",
    "AGENTS_PROMPT",
    "CURRENT_DATE",
    "INITIAL_AGENT_PROMPT",
    STEPS,
    "TOOLS_PROMPT",
    "USER_INPUT_PROMPT",
)
"""The placeholders whose values the run knows. Those for agents and tools are empty: a request describes them elsewhere."""
TREE_TOKENS = {"FILE_TREE_PROMPT_SMALL": 2_500, "FILE_TREE_PROMPT": 10_000, "FILE_TREE_PROMPT_LARGE": 190_000}
"""How many tokens the tree of files may have, as in codebuff."""
PROJECT_NAMES = (
    *TREE_TOKENS,
    "GIT_CHANGES_PROMPT",
    "KNOWLEDGE_FILES_CONTENTS",
    "PROJECT_ROOT",
    "SKILLS_PROMPT",
    "SYSTEM_INFO_PROMPT",
    "USER_CWD",
)
"""The placeholders whose values are read from the folder of the workspace."""


@frozen
class Placeholders:
    """
    The placeholders of an agent's prompts.

    Attributes:
        names: Their names without the prefix, in order.
        read: Reads those of the project: ``{"texts": {name: text}, "warnings": [text]}``.
    """

    names: tuple[str, ...]
    read: Callable[[Sequence[str]], Mapping[str, object]] = field(eq=False, repr=False)


def find_placeholders(*texts: str) -> tuple[str, ...]:
    """Return the names of the placeholders in *texts*, known or not, each once."""
    return tuple(dict.fromkeys([found[1] for text in texts for found in PLACEHOLDER.finditer(text)]))


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return *text* with placeholders replaced by *values*; one without a value stays."""
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)
