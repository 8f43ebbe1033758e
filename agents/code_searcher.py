"""
``code-searcher``: runs searches from its params and returns what they found. It never calls a model.

``stepengine run code-searcher --params '{"search_queries": [{"pattern": "def handle_steps"}]}'``
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentDefinition, StepContext, Steps, ToolCall


class Query(BaseModel):
    """One search."""

    model_config = ConfigDict(extra="forbid")

    pattern: str = Field(min_length=1, description="A regular expression.")
    flags: str | None = Field(default=None, description="Flags of ripgrep, such as '-i' or '-g *.py'.")
    cwd: str | None = Field(default=None, description="A folder inside the root to search in.")
    max_results: int | None = Field(default=None, ge=1, description="Matches to return per file.")


class Queries(BaseModel):
    """The searches to make."""

    model_config = ConfigDict(extra="forbid")

    search_queries: list[Query] = Field(min_length=1, max_length=100, description="The searches, in order.")


class Found(BaseModel):
    """What the searches found, in the order asked for."""

    results: list[dict[str, Any]]


def handle_steps(ctx: StepContext[Queries]) -> Steps[Found]:
    """Run all queries in turn, and return their results; a failed query has its error in its place."""
    results: list[Any] = []
    for query in ctx.params.search_queries:
        turn = yield ToolCall("code_search", query.model_dump(exclude_none=True))
        found = turn.tool_results[0]
        results.append({"error": found.text} if found.is_error else found.data)
    return Found(results=results)


agent = AgentDefinition(
    "code-searcher",
    description="Searches the code for several patterns at once and returns files with lines; needs no model.",
    tools=["code_search"],
    input_schema=Queries,
    output_schema=Found,
    handle_steps=handle_steps,
)
