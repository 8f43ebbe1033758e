"""
The parser of all commands. Each command is built from its function when it is called or its help is requested.

A command is a function that takes its options and returns an exit code; its docstring is its help. The first line is shown in the
list of commands, so it has at most 62 characters. Indented lines are shown as they are, so they have at most 76.
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

from stepengine.cli.command_table import FIRST, LISTED, OVERVIEW, UNDER, ListedCommand
from stepengine.cli.exits import EXIT_CODES, Exit, raise_exit_unless_completed, run_explaining_errors

MARKUP = re.compile(r"\[(?=[a-z#/@])")
"""Where rich would take text for a style."""


Parsed: TypeAlias = Any
"""A command as typer parses it; the classes of the click inside of typer have no public names."""


AS_TYPED = {"ignore_unknown_options": True, "allow_interspersed_args": False}
RUNNING = ("run", "chat", "ask", "resume", "replay", "fork")
"""Commands whose help lists the exit codes, because they can return all of them."""
LOCAL = (
    *RUNNING, "show", "runs", "studio", "eval", "test", "debug", "undo", "acp", "mcp serve", "agents list", "config doctor",
    "config policy", "compare impact", "compare blame", "compare pin", "compare improve", "journal export", "journal import",
    "deploy release",
)  # fmt: skip
"""Commands that look for agents in ./agents, and have --trust."""
ASKING = ("run", "chat")
"""Commands that ask at the terminal whether ./agents is trusted; all others refuse untrusted files."""


def _help_text_to_markup(text: str) -> str:
    """Return a help text with rich markup: prose stays unwrapped, indented lines keep their breaks."""
    return "\n\n".join(
        ["\n".join(_help_lines_to_markup(paragraph)) for paragraph in MARKUP.sub(r"\\[", text).split("\n\n")]
    )


def _help_lines_to_markup(paragraph: str) -> Iterator[str]:
    """Yield the lines of a paragraph: prose joined into one line, indented lines marked as they are."""
    prose: list[str] = []
    for line in paragraph.split("\n"):
        if line.startswith(" "):
            heading = " ".join(prose)
            yield from [f"[bold not dim]{heading}[/]"] if heading else []
            # A backslash at the end would escape the closing tag.
            yield f"[not dim]{line}\\[/]" if line.endswith("\\") else f"[not dim]{line}[/]"
            prose = []
        else:
            prose.append(line)
    yield from [" ".join(prose)] if prose else []


def _wrap_with_trust_and_exit(name: str, command: Callable[..., Exit]) -> Callable[..., None]:
    """Return a command that checks the trust of agent files, reports errors and leaves with the exit code."""
    from stepengine.cli.code_trust import OPTION, enforce_trust

    @functools.wraps(command)
    def run_and_exit(**given: Any) -> None:
        """Run the command with checked trust, print its error, and exit with its code unless it completed."""
        content = given.pop("trust", "") if name in LOCAL else ""

        def run_trusted() -> Exit:
            """Run the command while the trust of agent files is checked; return its exit code."""
            with enforce_trust(asks=name in ASKING, trusted_hash=content):
                return command(**given)

        raise_exit_unless_completed(run_explaining_errors(run_trusted))

    if name in LOCAL:
        own = inspect.signature(command, eval_str=True)
        option = inspect.Parameter(
            "trust", inspect.Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, OPTION]
        )
        run_and_exit.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    return run_and_exit


def _print_version_and_exit(is_asked: bool) -> None:
    """Print the version and exit, if ``--version`` was typed."""
    if not is_asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"stepengine {version('stepengine')}")
    except PackageNotFoundError:
        print("stepengine (not installed: run from its source folder)")
    raise typer.Exit


def _print_overview_if_no_command(
    context: typer.Context,
    *,
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version_and_exit, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(FIRST)


class _Commands(Mapping[str, Parsed]):
    """A mapping of names to parsed commands, each built on first access."""

    def __init__(self) -> None:
        self._made: dict[str, Parsed] = {}

    def __getitem__(self, name: str) -> Parsed:
        if name not in self._made:
            group, listed = LISTED[name]
            made = _make_command_group(name) if name in UNDER else _make_single_command(name, listed)
            made.name, made.rich_help_panel = name, group
            self._made[name] = made
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(LISTED)

    def __len__(self) -> int:
        return len(LISTED)


class _MainCommandGroup(typer.core.TyperGroup):
    """The group of all commands. Its help comes from the table, because importing all commands would take a second."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]
        self._overview = typer.core.TyperGroup(**{**attributes, "commands": _make_help_only_commands()})

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the order of the table."""
        return [*LISTED]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show the list of commands."""
        self._overview.format_help(ctx, formatter)


class _CheckedCommand(typer.core.TyperCommand):
    """A command that refuses options with an empty text, such as that of an unset variable."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the typed words; raise if an option has an empty text."""
        rest = super().parse_args(ctx, args)
        for option in self.params:
            name, value = option.name or "", ctx.params.get(option.name)
            is_empty = value == "" and ctx.get_parameter_source(name).name == "COMMANDLINE"
            if option.param_type_name == "option" and (is_empty or (isinstance(value, list) and "" in value)):
                msg = "the value is empty; pass one, or leave out the option"
                raise typer.BadParameter(msg, ctx, param_hint=repr(option.opts[0]))
        return rest


def _make_help_only_commands() -> dict[str, Parsed]:
    """Return commands that are only listed: a name, a line of help and a group."""
    return {
        name: typer.core.TyperCommand(name, help=_escape_markup(listed.text), rich_help_panel=group)
        for name, (group, listed) in LISTED.items()
    }


def _make_typer_app(**attributes: Any) -> typer.Typer:
    """Return a typer application with the settings of this command line."""
    return typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, **attributes)


def _make_command_group(first_word: str) -> Parsed:
    """Return the group of the two-word commands whose first word is *first_word*."""
    text, several = UNDER[first_word]
    part = _make_typer_app(name=first_word, help=text, no_args_is_help=True)
    for name, listed in several.items():
        _register_command(part, name, listed, f"{first_word} {name}")
    return typer.main.get_group(part)  # of one command, `get_command` would make that command


def _make_single_command(name: str, listed: ListedCommand) -> Parsed:
    part = _make_typer_app()
    _register_command(part, name, listed, name)
    return typer.main.get_command(part)


def _register_command(group: typer.Typer, name: str, listed: ListedCommand, full_name: str) -> None:
    """Import a command, and add it to the application *group* with its help text."""
    command = listed.load()
    group.command(
        name,
        cls=_CheckedCommand,
        help=_help_text_to_markup(inspect.cleandoc(command.__doc__ or "")),
        short_help=_escape_markup(listed.text),
        epilog=_help_text_to_markup(EXIT_CODES) if full_name in RUNNING else None,
        # What follows the command of a server is its own, also where it looks like an option of ours.
        context_settings=AS_TYPED if full_name == "mcp inspect" else None,
    )(_wrap_with_trust_and_exit(full_name, command))


def _escape_markup(text: str) -> str:
    """Return a text in which rich reads no markup."""
    return MARKUP.sub(r"\\[", text)


app = _make_typer_app(
    name="stepengine",
    cls=_MainCommandGroup,
    help=_help_text_to_markup(OVERVIEW.strip()),
    epilog=_help_text_to_markup(EXIT_CODES),
    callback=_print_overview_if_no_command,
    invoke_without_command=True,
)
