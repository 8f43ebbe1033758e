"""
The commands as they are parsed: each is made of its function when it is called, or its own help is asked for.

A command is a function with its options that returns an exit code; its docstring is its help. Its first line stands in the
list of commands, so that it has at most 62 characters, and indented lines are shown as they are, so that they have at most 76.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeAlias

import typer
import typer.core
import typer.main

from stepengine.cli.exits import EXIT_CODES, Exit, explain_errors, leave
from stepengine.cli.listing import FIRST, LISTED, OVERVIEW, UNDER, ListedCommand

__all__ = ("app",)

MARKUP = re.compile(r"\[(?=[a-z#/@])")
"""Where rich would take text for a style."""


Parsed: TypeAlias = Any
"""A command as typer parses it; the classes of the click inside of typer have no public names."""


AS_TYPED = {"ignore_unknown_options": True, "allow_interspersed_args": False}
RUNNING = ("run", "chat", "ask", "resume", "replay", "fork")
"""Those that leave with any of the exit codes."""
LOCAL = (
    *RUNNING, "show", "runs", "studio", "eval", "test", "debug", "undo", "acp", "mcp serve", "agents list", "config doctor",
    "config policy", "compare impact", "compare blame", "compare pin", "compare improve", "journal export", "journal import",
    "deploy release",
)  # fmt: skip
"""Those that look for agents in ./agents, and take --trust."""
ASKING = ("run", "chat")
"""Those that ask a person at a terminal whether ./agents is trusted; ``acp`` and others have no such person."""


def _help_text(text: str) -> str:
    """Return a help text as typer takes it: prose is wrapped where it is shown, indented lines stay as they are."""
    return "\n\n".join(["\n".join(_lines(paragraph)) for paragraph in MARKUP.sub(r"\\[", text).split("\n\n")])


def _lines(paragraph: str) -> Iterator[str]:
    prose: list[str] = []
    for line in paragraph.split("\n"):
        if line.startswith(" "):
            heading = " ".join(prose)
            yield from [f"[bold not dim]{heading}[/]"] if heading else []
            # One backslash at the end would take the mark behind it for text.
            yield f"[not dim]{line}\\[/]" if line.endswith("\\") else f"[not dim]{line}[/]"
            prose = []
        else:
            prose.append(line)
    yield from [" ".join(prose)] if prose else []


def _leaving(name: str, command: Callable[..., Exit]) -> Callable[..., None]:
    from stepengine.cli.trusting import OPTION, at_the_gate

    @functools.wraps(command)
    def ended(**given: Any) -> None:
        content = given.pop("trust", "") if name in LOCAL else ""

        def judged() -> Exit:
            with at_the_gate(asks=name in ASKING, content=content):
                return command(**given)

        leave(explain_errors(judged))

    if name in LOCAL:
        own = inspect.signature(command, eval_str=True)
        option = inspect.Parameter(
            "trust", inspect.Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, OPTION]
        )
        ended.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    return ended


def _print_version(is_asked: bool) -> None:
    if not is_asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"stepengine {version('stepengine')}")
    except PackageNotFoundError:
        print("stepengine (not installed: run from its source folder)")
    raise typer.Exit


def _first(
    context: typer.Context,
    *,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(FIRST)


class _Commands(Mapping[str, Parsed]):
    """Every command by its name, made when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Parsed] = {}

    def __getitem__(self, name: str) -> Parsed:
        if name not in self._made:
            group, listed = LISTED[name]
            made = _several(name) if name in UNDER else _alone(name, listed)
            made.name, made.rich_help_panel = name, group
            self._made[name] = made
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(LISTED)

    def __len__(self) -> int:
        return len(LISTED)


class _Group(typer.core.TyperGroup):
    """All commands. Its list is made from the table: importing every command for it would take a second."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]
        self._overview = typer.core.TyperGroup(**{**attributes, "commands": _listed_commands()})

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the order of the table."""
        return [*LISTED]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the list of commands."""
        self._overview.format_help(ctx, formatter)


def _listed_commands() -> dict[str, Parsed]:
    """Return commands that are only listed: a name, a line of help and a group."""
    return {
        name: typer.core.TyperCommand(name, help=_escape_markup(listed.text), rich_help_panel=group)
        for name, (group, listed) in LISTED.items()
    }


def _make_app() -> typer.Typer:
    return typer.Typer(
        name="stepengine",
        cls=_Group,
        help=_help_text(OVERVIEW.strip()),
        epilog=_help_text(EXIT_CODES),
        callback=_first,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )


def _part(**attributes: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, **attributes)


def _several(first: str) -> Parsed:
    """Return the group of the commands of two words that begin with *first*."""
    _, text, several = UNDER[first]
    part = _part(name=first, help=text, no_args_is_help=True)
    for name, listed in several.items():
        _add(part, name, listed, f"{first} {name}")
    return typer.main.get_group(part)  # of one command, `get_command` would make that command


def _alone(name: str, listed: ListedCommand) -> Parsed:
    part = _part()
    _add(part, name, listed, name)
    return typer.main.get_command(part)


def _add(part: typer.Typer, name: str, listed: ListedCommand, words: str) -> None:
    command = listed.load()
    part.command(
        name,
        help=_help_text(inspect.cleandoc(command.__doc__ or "")),
        short_help=_escape_markup(listed.text),
        epilog=_help_text(EXIT_CODES) if words in RUNNING else None,
        # What follows the command of a server is its own, also where it looks like an option of ours.
        context_settings=AS_TYPED if words == "mcp inspect" else None,
    )(_leaving(words, command))


def _escape_markup(text: str) -> str:
    return MARKUP.sub(r"\\[", text)


app = _make_app()
