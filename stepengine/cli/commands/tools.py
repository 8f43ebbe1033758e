"""``stepengine agents tools``: the bundled tools, their parameters and results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import did_you_mean

if TYPE_CHECKING:
    from stepengine.tools.bundled.reference import Form, Parameter, ResultKey, ToolPage

INDENT = 21
"""The column of texts, after the longest key."""


def tools(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Tools to describe; default: list all."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> Exit:
    """
    List the bundled tools, their parameters and results.

    For each NAME: parameters with types and defaults, keys of the result, errors, limits, and an example call. An
    agent can use the tools that it lists and its engine provides; `stepengine run` provides them as its options
    allow.

    Examples:
      stepengine agents tools
      stepengine agents tools read_files code_search
      stepengine agents tools read_files --json
    """
    from stepengine.tools.bundled import document_tools

    known = {one.name: one for one in document_tools()}
    for name in names or ():
        if name not in known:
            hint = did_you_mean(name.replace("-", "_"), known, otherwise="; `stepengine agents tools` lists them")
            msg = f"there is no bundled tool {name!r}{hint}"
            raise UsageProblem(msg)
    chosen = [known[name] for name in names] if names else list(known.values())
    if as_json:
        print(to_ascii_json([tool_to_dict(one) for one in chosen]))
    elif names:
        print_visible(
            "\n\n".join(["\n".join(describe_tool(one)) for one in chosen]), hanging_indent=_get_hanging_indent
        )
    else:
        width = max(map(len, known))
        print_visible("\n".join([f"{one.name:<{width}}  {one.text}" for one in chosen]), hanging_indent=width + 2)
    return Exit.COMPLETED


def describe_tool(page: ToolPage) -> Iterator[str]:
    """Yield the lines that describe a tool."""
    yield f"{page.name}: {page.text}"
    made = (
        f"{page.maker} of stepengine.tools.bundled"
        if page.maker
        else "to every handler; models can call it if their agent lists it"
    )
    yield f"  {'created by' if page.maker else 'available':<{INDENT - 2}}{made}"
    yield f"  {'category':<{INDENT - 2}}{page.spec.category}"
    yield from (
        ["", "Parameters:", *map(_describe_parameter, page.parameters)] if page.parameters else ["", "No parameters."]
    )
    for number, form in enumerate(page.forms):
        yield from [
            "",
            f"{'Or returns' if number else 'Returns'} {_describe_result(form)}",
            *_format_result_key_lines(form),
        ]
    yield from ["", f"{'Fails':<{INDENT}}{page.errors}", f"{'Limits':<{INDENT}}{page.limits}", ""]
    yield from ["In a handler:", "  from stepengine import call", f"  from stepengine.tools.bundled import {page.name}"]
    yield f"  yield from call({page.name}{''.join([f', {key}={value!r}' for key, value in page.example.items()])})"


def _get_hanging_indent(line: str) -> int:
    """Return the indent of the continuation of a line of a tool's description."""
    if line.startswith("  yield from"):
        return 4
    return INDENT - len(line) + len(line.lstrip()) if line.startswith((" ", "Fails", "Limits")) else 0


def _describe_parameter(parameter: Parameter) -> str:
    """Return a line with the name, type, default and text of a tool's parameter."""
    default = (
        "required"
        if parameter.is_required
        else "optional"
        if parameter.default is None
        else f"default {parameter.default!r}"
    )
    return (
        f"  {parameter.name:<{INDENT - 3}} {parameter.type}; {default}{f'. {parameter.text}' if parameter.text else ''}"
    )


def _describe_result(form: Form) -> str:
    """Return a text about the type and shape of a tool's result."""
    if not form.shape:
        return "a text."
    return f"{'an' if form.type[0] in 'aeiou' else 'a'} {form.type} ({form.shape} of stepengine.tools.bundled.shapes):"


def _format_result_key_lines(form: Form, indent: str = "  ") -> Iterator[str]:
    """Yield a line for each key of a tool's result, with nested keys indented."""
    for key in form.keys:
        name = f"{indent}{key.name}{'' if key.is_always else '?'}"
        yield f"{name:<{INDENT - 1}} {key.type}. {key.text}"
        if key.form is not None:
            yield from _format_result_key_lines(key.form, f"{indent}  ")


def tool_to_dict(page: ToolPage) -> dict[str, Any]:
    """Return the description of a tool as JSON."""
    return {
        "name": page.name,
        "text": page.text,
        "made_by": page.maker or None,
        "category": page.spec.category,
        "parameters": [
            {"name": p.name, "type": p.type, "required": p.is_required, "default": p.default, "text": p.text}
            for p in page.parameters
        ],
        "gives": [_form_to_dict(form) for form in page.forms],
        "errors": page.errors,
        "limits": page.limits,
        "example": page.example,
        "input_schema": page.spec.input_schema,
    }


def _form_to_dict(form: Form) -> dict[str, object]:
    """Return the form of a tool's result as JSON values."""
    return {"type": form.type, "shape": form.shape or None, "keys": [_result_key_to_dict(key) for key in form.keys]}


def _result_key_to_dict(key: ResultKey) -> dict[str, object]:
    """Return a key of a tool's result as JSON values."""
    inner = {} if key.form is None else {"of": _form_to_dict(key.form)}
    return {"name": key.name, "type": key.type, "always": key.is_always, "text": key.text, **inner}
