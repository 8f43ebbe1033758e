"""
``code-searcher``: runs searches from its params and returns what they found. It never calls a model.

``stepengine run code-searcher --params '{"search_queries": [{"pattern": "def handle_steps"}]}'``
"""

from __future__ import annotations

from typing import Any

from stepengine import AgentDefinition, StepContext, Steps, ToolCall

QUERY = {
    "type": "object",
    "properties": {
        "pattern": {"type": "string", "minLength": 1, "description": "A regular expression."},
        "flags": {"type": "string", "description": "Flags of ripgrep, such as '-i' or '-g *.py'."},
        "cwd": {"type": "string", "description": "A folder inside the root to search in."},
        "max_results": {"type": "integer", "minimum": 1, "description": "Matches to return per file."},
    },
    "required": ["pattern"],
    "additionalProperties": False,
}

PARAMS = {
    "type": "object",
    "properties": {
        "search_queries": {"type": "array", "minItems": 1, "items": QUERY, "description": "The searches, in order."},
    },
    "required": ["search_queries"],
    "additionalProperties": False,
}

OUTPUT = {
    "type": "object",
    "properties": {"results": {"type": "array", "items": {"type": "object"}}},
    "required": ["results"],
    "additionalProperties": False,
}


def handle_steps(ctx: StepContext[dict[str, Any]]) -> Steps[dict[str, Any]]:
    """Run every query in turn; a query that fails gives its error in its place and the others still run."""
    results: list[Any] = []
    for query in ctx.params["search_queries"]:
        turn = yield ToolCall("code_search", query)
        found = turn.tool_results[0]
        results.append({"error": found.text} if found.is_error else found.data)
    return {"results": results}


agent = AgentDefinition(
    "code-searcher",
    description="Searches the code for several patterns at once and returns files with lines; needs no model.",
    tools=["code_search"],
    input_schema=PARAMS,
    output_schema=OUTPUT,
    handle_steps=handle_steps,
)
