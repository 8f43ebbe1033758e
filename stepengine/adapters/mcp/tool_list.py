"""
The tools, resources and prompts of an MCP server, as JSON that a journal stores and a replay reads.

Everything that a model sees of a tool is made when the list is read from the server, so that a recorded list gives the same
requests for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import Any

import attrs
from attrs import frozen

from stepengine.adapters.mcp._caps import (
    DESCRIPTION_CHARS,
    LIST_BYTES,
    PAGE_ADDRESS_CHARS,
    PAGE_SCHEME,
    PARTS,
    PROMPT_CHARS,
    PROMPTS,
    SCHEMA_BYTES,
    SCHEMA_DEPTH,
    TOOLS,
)
from stepengine.adapters.mcp.lenient_messages import ODD
from stepengine.adapters.mcp.names import tool_name
from stepengine.data.json import JsonDict, canonical, compact, freeze, freeze_object, thaw
from stepengine.data.schemas import NAMED_SCHEMAS, SCHEMAS
from stepengine.data.tools import ToolAnnotations
from stepengine.data.visible import visible
from stepengine.errors import DataError, DefinitionError
from stepengine.tools.schemas import UNFIT_AT_TOP, UNFOLLOWED, SchemaInputs


@frozen(kw_only=True)
class ListedTool:
    """
    One tool of a server.

    Attributes:
        name: The server's name of the tool.
        tool: The name of the tool in runs.
        description: Its description for the model, cut and without hidden characters.
        input_schema: Its input schema for the model, with which inputs are validated before a call.
        hints: The server's hints about it, which are untrusted.
        digest: The SHA-256 digest of the definition that the server sent.
        task: Whether a call of it becomes a task of the server, which is polled for its result.
        page: The ``ui://`` address of the page that shows its results; ``""`` for none.
        promise: Its output schema as sent, which no record has; ``None`` for none.
    """

    name: str
    tool: str
    description: str
    input_schema: JsonDict = attrs.field(converter=freeze_object)
    hints: JsonDict = attrs.field(converter=freeze_object)
    digest: str
    task: bool = False
    page: str = ""
    promise: Mapping[str, Any] | None = attrs.field(default=None, eq=False)

    def to_json(self) -> dict[str, Any]:
        """Return the tool as a journal stores it, without members that have their default value."""
        form = {**attrs.asdict(self, recurse=False), "input_schema": thaw(self.input_schema), "hints": thaw(self.hints)}
        if not self.task:
            del form["task"]
        if not self.page:
            del form["page"]
        del form["promise"]
        return form

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ListedTool:
        """Return the tool from the JSON of ``to_json``; unknown members are ignored."""
        return cls(**{field.name: value[field.name] for field in attrs.fields(cls) if field.name in value})


def parse_tool_list(
    server: str,
    raw: Sequence[Mapping[str, object]],
    *,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    tasks: bool,
) -> tuple[list[ListedTool], list[str]]:
    """
    Return the usable tools of a server's list, sorted by name, and for each other tool the reason why it is left out.

    If two tools get the same name here, the first is used. *tasks* is whether calls to the server may be tasks.
    """
    chosen = [t for t in raw if (include is None or t["name"] in include) and t["name"] not in exclude]
    wanted = [t for t in chosen if not is_for_page_only(t)]
    made: dict[str, ListedTool] = {}
    left_out: list[str] = []
    if include is not None:
        left_out += [
            f"{_quote_tool_name(t)}: the server offers it to its own page only" for t in chosen if is_for_page_only(t)
        ]
    if len(wanted) > TOOLS:
        left_out.append(f"{len(wanted) - TOOLS:,} tools after the first {TOOLS:,}")
    left = LIST_BYTES
    for number, tool in enumerate(wanted[:TOOLS]):
        try:
            one = _make_listed_tool(server, tool, tasks=tasks)
        except (DefinitionError, DataError) as error:
            left_out.append(f"{_quote_tool_name(tool)}: {error.message}")
            continue
        left -= len(compact(freeze_object(one.to_json())))
        if left < 0:
            left_out.append(
                f"{min(len(wanted), TOOLS) - number:,} tools after the first {LIST_BYTES:,} bytes of the list"
            )
            break
        twin = made.get(one.tool)
        if twin is not None:
            left_out.append(f"{_quote_tool_name(tool)}: {_describe_clash(twin, one)}")
            continue
        made[one.tool] = one
    missing = sorted(set(include or ()) - {t["name"] for t in raw})
    left_out += [f"{visible(name, strict=True)!r}: the server has no tool of this name" for name in missing]
    return [made[name] for name in sorted(made)], left_out


def _describe_clash(kept: ListedTool, other: ListedTool) -> str:
    """Return why a tool is left out that has the name of one before it."""
    if kept == other:
        return "it is listed twice, and used once"
    if kept.name == other.name:
        return "it is listed twice with two definitions, and the first one is used"
    first = visible(kept.name, strict=True)
    return f"it would get the name {other.tool!r}, which {first!r} before it has; to use it, leave {first!r} out with exclude=[...]"


def _quote_tool_name(tool: Mapping[str, object]) -> str:
    """Return the name of a tool in quotes, cut and without hidden characters."""
    return repr(visible(str(tool.get("name", ""))[:200], strict=True))


def _make_listed_tool(server: str, tool: Mapping[str, Any], *, tasks: bool) -> ListedTool:
    """Return a tool of a server's list; raise ``DefinitionError`` if it is not usable."""
    if odd := find_recorded_problem(tool):
        raise DefinitionError(odd)
    is_task = (tool.get("execution") or {}).get("taskSupport") == "required"
    if is_task and not tasks:
        msg = "it runs only as a task, which the protocol version of this server does not support"
        raise DefinitionError(msg)
    name = tool["name"]
    if not name or "\ufffd" in name:
        msg = "its name is empty or has an invalid character, so it cannot be called"
        raise DefinitionError(msg)
    schema = adapt_schema(tool_name(server, name), tool.get("inputSchema") or {})
    return ListedTool(
        name=name,
        tool=tool_name(server, name),
        description=clean_server_text(tool.get("description") or tool.get("title") or ""),
        input_schema=schema,
        hints={k: v for k, v in (tool.get("annotations") or {}).items() if k.endswith("Hint") and isinstance(v, bool)},
        digest=compute_definition_digest(tool),
        task=is_task,
        page=_find_tool_page_address(tool),
        promise=tool.get("outputSchema") or None,
    )


def is_for_page_only(tool: Mapping[str, Any]) -> bool:
    """Return True if the server offers a tool to its own page and not to models."""
    visibility = _get_ui_metadata(tool).get("visibility")
    return isinstance(visibility, list | tuple) and "app" in visibility and "model" not in visibility


def _find_tool_page_address(tool: Mapping[str, Any]) -> str:
    """Return the ``ui://`` address of the page of a tool, without hidden characters; ``""`` without a valid one."""
    address = _get_ui_metadata(tool).get("resourceUri")
    fits = isinstance(address, str) and address.startswith(PAGE_SCHEME) and len(address) <= PAGE_ADDRESS_CHARS
    return visible(str(address), strict=True) if fits else ""


def _get_ui_metadata(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``_meta.ui`` of a tool; ``{}`` if it has another form."""
    meta = tool.get("_meta")
    ui = meta.get("ui") if isinstance(meta, Mapping) else None
    return ui if isinstance(ui, Mapping) else {}


def find_recorded_problem(entry: Mapping[str, Any]) -> str:
    """Return the problem that ``MessageRepair`` recorded in a tool or prompt; ``""`` if it is usable."""
    said = (entry.get("_meta") or {}).get(ODD)
    return said if isinstance(said, str) else ""


def clean_server_text(text: str) -> str:
    """Return a text of a server, cut and without hidden characters."""
    shown = visible(cleandoc(text[:DESCRIPTION_CHARS]))
    return (
        shown
        if len(text) <= DESCRIPTION_CHARS and len(shown) <= DESCRIPTION_CHARS
        else f"{shown[:DESCRIPTION_CHARS]}..."
    )


def compute_definition_digest(tool: Mapping[str, object]) -> str:
    """Return the digest by which a tool definition is pinned; it does not depend on the order of members."""
    members = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
    said = {member: tool[member] for member in members if tool.get(member) is not None}
    return hashlib.sha256(canonical(freeze(said)).encode("utf-8", "surrogatepass")).hexdigest()


def annotations_from_hints(hints: Mapping[str, object], *, trusted: bool) -> ToolAnnotations:
    """
    Return the annotations of a tool from its hints if they are *trusted*, else the worst case.

    In the worst case a tool is not read-only, destructive, not idempotent, and reaches the open world. A missing hint of a trusted
    server also means the worst case, as the protocol says.
    """
    said = hints if trusted else {}
    read_only = bool(said.get("readOnlyHint", False))
    return ToolAnnotations(
        read_only=read_only,
        destructive=not read_only and bool(said.get("destructiveHint", True)),
        idempotent=bool(said.get("idempotentHint", False)),
        open_world=bool(said.get("openWorldHint", True)),
    )


def select_usable_prompts(listed: Sequence[Mapping[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """Return the usable prompts of a server. A line for each other prompt is appended to *problems*."""
    if len(listed) > PROMPTS:
        problems.append(f"{len(listed) - PROMPTS:,} prompts after the first {PROMPTS:,}")
    made: list[dict[str, object]] = []
    for prompt in listed[:PROMPTS]:
        name = prompt["name"]
        if odd := find_recorded_problem(prompt):
            problems.append(f"the prompt {_quote_tool_name(prompt)}: {odd}")
            continue
        if not 0 < len(name) <= PROMPT_CHARS or visible(name, strict=True) != name:
            problems.append(
                f"the prompt {_quote_tool_name(prompt)}: its name is empty, too long, or has hidden characters"
            )
            continue
        if any(one["name"] == name for one in made):
            problems.append(f"the prompt {_quote_tool_name(prompt)}: it is listed twice, and the first one is used")
            continue
        arguments = [
            {"name": clean_server_text(one["name"]), "required": bool(one.get("required"))}
            for one in (prompt.get("arguments") or ())[:PARTS]
        ]
        made.append(
            {"name": name, "description": clean_server_text(prompt.get("description") or ""), "arguments": arguments}
        )
    return made


# --- schemas ----------------------------------------------------------------------------------------------------------


def adapt_schema(name: str, schema: Mapping[str, object]) -> JsonDict:
    """
    Return a third-party input schema in a form that providers and our validation accept.

    Keywords that cannot be validated here, or that providers refuse at the top level, are removed: the server validates its input itself.

    Raises:
        DefinitionError: If the schema is too large, too deep, or not the schema of an object.
    """
    if _measure_nesting_depth(schema) > SCHEMA_DEPTH:
        msg = f"its input schema is nested more than {SCHEMA_DEPTH} deep"
        raise DefinitionError(msg)
    frozen = freeze_object(schema)
    if len(compact(frozen)) > SCHEMA_BYTES:
        msg = f"its input schema has more than {SCHEMA_BYTES // 1024} KiB"
        raise DefinitionError(msg)
    top = {word: value for word, value in frozen.items() if word not in UNFIT_AT_TOP}
    kept: Any = _prune_schema({**top, "type": top.get("type", "object")})
    try:
        return SchemaInputs(name, kept).schema
    except DefinitionError:
        # The likeliest reason is an expression of a dialect that is not matched here.
        return SchemaInputs(name, _prune_schema(kept, without=frozenset({"pattern", "patternProperties"}))).schema


def _measure_nesting_depth(value: object) -> int:
    """Return the nesting depth of third-party JSON, at most ``SCHEMA_DEPTH + 1``; without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        one, level = waiting.pop()
        deepest = max(deepest, level)
        if level > SCHEMA_DEPTH:
            break
        below = one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple) else ()
        waiting += [(child, level + 1) for child in below]
    return deepest


def _prune_schema(schema: object, without: frozenset[str] = frozenset()) -> Any:
    """Return a schema without ``$schema``, unsupported keywords and those in *without*, at every level."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, object] = {}
    for word, value in schema.items():
        # Providers refuse `$schema` anywhere, and below the top it would start another document.
        if word in without or word in UNFOLLOWED or word == "$schema":
            continue
        if word in NAMED_SCHEMAS and isinstance(value, Mapping):
            made[word] = {key: _prune_schema(below, without) for key, below in value.items()}
        elif word in SCHEMAS and isinstance(value, list | tuple):
            made[word] = [_prune_schema(below, without) for below in value]
        else:
            made[word] = _prune_schema(value, without) if word in SCHEMAS else value
    return made
