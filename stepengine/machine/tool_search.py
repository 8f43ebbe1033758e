"""
Search for hidden tools: ``find_tools`` is offered for them, and the tools it finds are sent from then on.

A search goes by what the run has and by nothing else, so that a repeated run finds the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

import attrs

from stepengine.data.messages import ToolReferencePart, ToolResult
from stepengine.data.tools import FIND_TOOLS, Control, ToolBinding, ToolSpec
from stepengine.errors import DefinitionError

MAX_FOUND_TOOLS = 5
"""
Tools that one search returns: each is added to every further request, and a model rarely needs more for one subject.
"""
MAX_QUERY_WORDS = 50
"""Of a query; each is looked for in the text of every tool."""
SHORT_WORD_CHARS = 4
"""Words of fewer letters count as whole words only: as parts of words, letters such as "in" or "get" are everywhere."""
MAX_QUERY_CHARS = 4_000
"""The rest of a query is ignored: no useful one is longer than a page, and a model may put a whole document there."""
BETWEEN = re.compile(r"[\W_]+")
MAX_NAMED_TOOLS = 200
"""More names are counted instead: the description is part of every request, and 200 names take about 1,000 tokens."""


def with_search_tool(offered: Mapping[str, ToolSpec], bindings: Mapping[str, ToolBinding]) -> Mapping[str, ToolSpec]:
    """
    Return *offered* with ``find_tools`` appended if some tools are hidden; its description names them.

    Raises:
        DefinitionError: when another tool has that name.
    """
    hidden = tuple([name for name, spec in offered.items() if spec.defer_loading])
    if not hidden:
        return offered
    binding = bindings.get(FIND_TOOLS)
    if binding is None:
        return offered
    if binding.runs != Control("find_tools"):
        msg = (
            f"the tool {hidden[0]!r} has defer_loading=True and is found by {FIND_TOOLS!r}, but the agent has another tool with that "
            "name; rename it"
        )
        raise DefinitionError(msg)
    others = {name: spec for name, spec in offered.items() if name != FIND_TOOLS}
    description = _describe_search_tool(binding.spec.description, hidden)
    return {**others, FIND_TOOLS: attrs.evolve(binding.spec, description=description)}


@lru_cache(64)  # one entry for each agent with hidden tools; a process has few such agents
def _describe_search_tool(description: str, hidden: tuple[str, ...]) -> str:
    more = f", and {len(hidden) - MAX_NAMED_TOOLS} more" if len(hidden) > MAX_NAMED_TOOLS else ""
    return f"{description}\nThe tools: {', '.join(hidden[:MAX_NAMED_TOOLS])}{more}"


def list_visible_tools(offered: Iterable[str], bindings: Mapping[str, ToolBinding]) -> list[str]:
    """Return the names of *offered* tools that are not hidden from the model."""
    return [name for name in offered if name not in bindings or not bindings[name].spec.defer_loading]


def search_hidden_tools(offered: Mapping[str, ToolSpec], query: str) -> ToolResult:
    """Return the hidden tools that match *query* best: rare words count more, words in names double."""
    hidden = [spec for spec in offered.values() if spec.defer_loading]
    asked = _normalize_words(query[:MAX_QUERY_CHARS])
    exact = [spec for spec in hidden if _plain_kept(spec.name) == asked]
    words = [f" {word} " if len(word) < SHORT_WORD_CHARS else word for word in dict.fromkeys(asked.split())][
        :MAX_QUERY_WORDS
    ]
    texts = [
        (_plain_kept(spec.name), _plain_kept(f"{spec.name} {spec.description}"), spec.name) for spec in exact or hidden
    ]
    weights = {
        word: len(texts) // holding for word in words if (holding := sum([word in text for _, text, _ in texts]))
    }
    scored = sorted(
        [
            (-sum([weight * (1 + (word in title)) for word, weight in weights.items() if word in text]), name)
            for title, text, name in texts
        ]
    )
    best = [name for score, name in scored if score * 2 <= scored[0][0] and score][:MAX_FOUND_TOOLS]
    if not best:
        return ToolResult.text("No tool has any of these words. Other words may find one; the same will not.")
    return ToolResult.parts([ToolReferencePart(name) for name in best])


def _normalize_words(text: str) -> str:
    """Return the letters and digits of *text* in lower case, with single blanks between words and around them."""
    return f" {BETWEEN.sub(' ', text.casefold()).strip()} "


# Each search reads the name and the description of each hidden tool: 4,096 texts are those of about 2,000 tools.
_plain_kept = lru_cache(4_096)(_normalize_words)
