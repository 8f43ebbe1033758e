"""
``glob-matcher``: finds files by several patterns at once. It never calls a model.

``stepengine run glob-matcher --params '{"patterns": [{"pattern": "**/*.py"}]}'``
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentDefinition, Parallel, StepContext, Steps, ToolCall


class Pattern(BaseModel):
    """One pattern."""

    model_config = ConfigDict(extra="forbid")

    pattern: str = Field(min_length=1, description="A glob pattern such as '**/*.py'.")
    cwd: str | None = Field(default=None, description="The folder that it counts from; the root by default.")


class Patterns(BaseModel):
    """The patterns to match."""

    model_config = ConfigDict(extra="forbid")

    patterns: list[Pattern] = Field(min_length=1, max_length=100, description="The patterns, in order.")


class Matches(BaseModel):
    """What the patterns match, in the order asked for."""

    results: list[dict[str, Any]]


def handle_steps(ctx: StepContext[Patterns]) -> Steps[Matches]:
    """Match all patterns at once, and return the files of each; an invalid pattern has its error in its place."""
    patterns = [pattern.model_dump(exclude_none=True) for pattern in ctx.params.patterns]
    found = yield from Parallel([ToolCall("glob", pattern) for pattern in patterns])
    matched: list[Any] = [{"error": one.text} if one.is_error else one.data for one in found]
    return Matches(results=[{**pattern, **entry} for pattern, entry in zip(patterns, matched, strict=True)])


agent = AgentDefinition(
    "glob-matcher",
    description="Finds files by several glob patterns at once; needs no model.",
    tools=["glob"],
    input_schema=Patterns,
    output_schema=Matches,
    handle_steps=handle_steps,
)
