"""``stepengine agents tools``: the bundled tools, and what each takes and gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import dumps, say
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import did_you_mean

if TYPE_CHECKING:
    from stepengine.tools.bundled.reference import Form, Parameter, ResultKey, ToolPage

__all__ = ("tools",)

INDENT = 21
"""Where texts begin: behind the longest name of a key."""


def tools(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Tools to describe; without one, all are listed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> Exit:
    """
    List the bundled tools, and what they take and give.

    For a NAME: its parameters with types and defaults, the keys of its result, when it fails, its limits, and a call. An agent
    of yours has those that it lists and its engine was given; `stepengine run` gives them as its options allow it.

    Examples:
      stepengine agents tools
      stepengine agents tools read_files code_search
      stepengine agents tools read_files --json
    """
    from stepengine.tools.bundled.reference import told

    known = {one.name: one for one in told()}
    for name in names or ():
        if name not in known:
            hint = did_you_mean(name.replace("-", "_"), known, otherwise="; `stepengine agents tools` lists them")
            msg = f"there is no bundled tool {name!r}{hint}"
            raise UsageProblem(msg)
    chosen = [known[name] for name in names] if names else list(known.values())
    if as_json:
        print(dumps([json_of(one) for one in chosen]))
    elif names:
        say("\n\n".join(["\n".join(describe_tool(one)) for one in chosen]), hang=_hang)
    else:
        width = max(map(len, known))
        say("\n".join([f"{one.name:<{width}}  {one.text}" for one in chosen]), hang=width + 2)
    return Exit.COMPLETED


def describe_tool(one: ToolPage) -> Iterator[str]:
    """Give the lines that describe a tool."""
    yield f"{one.name}: {one.text}"
    made = (
        f"{one.maker} of stepengine.tools.bundled"
        if one.maker
        else "there for every handler; models have it where agents list it"
    )
    yield f"  {'made by' if one.maker else 'given by':<{INDENT - 2}}{made}"
    yield f"  {'category':<{INDENT - 2}}{one.spec.category}"
    yield from ["", "Takes:", *map(_describe_parameter, one.parameters)] if one.parameters else ["", "Takes nothing."]
    for number, form in enumerate(one.forms):
        yield from ["", f"{'Or gives' if number else 'Gives'} {_describe_result(form)}", *_keys(form)]
    yield from ["", f"{'Fails':<{INDENT}}{one.errors}", f"{'Limits':<{INDENT}}{one.limits}", ""]
    yield from ["In a handler:", "  from stepengine import call", f"  from stepengine.tools.bundled import {one.name}"]
    yield f"  yield from call({one.name}{''.join([f', {key}={value!r}' for key, value in one.example.items()])})"


def _hang(line: str) -> int:
    if line.startswith("  yield from"):
        return 4
    return INDENT - len(line) + len(line.lstrip()) if line.startswith((" ", "Fails", "Limits")) else 0


def _describe_parameter(one: Parameter) -> str:
    default = "required" if one.is_required else "optional" if one.default is None else f"default {one.default!r}"
    return f"  {one.name:<{INDENT - 3}} {one.type}; {default}{f'. {one.text}' if one.text else ''}"


def _describe_result(form: Form) -> str:
    if not form.shape:
        return "a text."
    return f"{'an' if form.type[0] in 'aeiou' else 'a'} {form.type} ({form.shape} of stepengine.tools.bundled.shapes):"


def _keys(form: Form, indent: str = "  ") -> Iterator[str]:
    for key in form.keys:
        name = f"{indent}{key.name}{'' if key.is_always else '?'}"
        yield f"{name:<{INDENT - 1}} {key.type}. {key.text}"
        if key.form is not None:
            yield from _keys(key.form, f"{indent}  ")


def json_of(one: ToolPage) -> dict[str, Any]:
    """Return what is told of a tool as JSON."""
    return {
        "name": one.name,
        "text": one.text,
        "made_by": one.maker or None,
        "category": one.spec.category,
        "parameters": [
            {"name": p.name, "type": p.type, "required": p.is_required, "default": p.default, "text": p.text}
            for p in one.parameters
        ],
        "gives": [_form_json(form) for form in one.forms],
        "errors": one.errors,
        "limits": one.limits,
        "example": one.example,
        "input_schema": one.spec.input_schema,
    }


def _form_json(form: Form) -> dict[str, object]:
    return {"type": form.type, "shape": form.shape or None, "keys": [_key_json(key) for key in form.keys]}


def _key_json(key: ResultKey) -> dict[str, object]:
    inner = {} if key.form is None else {"of": _form_json(key.form)}
    return {"name": key.name, "type": key.type, "always": key.is_always, "text": key.text, **inner}
