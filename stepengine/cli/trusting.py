"""
``stepengine agents trust``, and what every command asks, tells and refuses about code of the working folder.

An agent file of a folder that nobody trusted is not run. ``run`` and ``chat`` ask a person at a terminal, once; everything
else says what it did not run and how to trust it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.screen.render import dumps, visible
from stepengine.cli.settings import UsageProblem

if TYPE_CHECKING:
    from stepengine.engine.trust import Foreign, Wishes

__all__ = ("OPTION", "at_the_gate", "can_ask", "grouped_wishes", "refuse_foreign", "refuse_inside", "trust")

HARMLESS = "tools, read"
WISHED = (
    "host",
    "writes",
    "reads",
    "tools, execute",
    "tools, network",
    "tools, write",
    "tools, of no category",
    "agent",
)
"""The kinds of wishes in the order in which a person is shown them; categories of others follow."""
CONTENT = re.compile(r"sha256:[0-9a-f]{64}")
OPTION = typer.Option(
    "--trust", help="Run ./agents if its files have this content; for CI.", metavar="sha256:...", show_default=False
)


def trust(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder that holds ./agents; by default this one.")
    ] = Path(),
    *,
    forget: Annotated[bool, typer.Option("--forget", help="Trust it no longer.")] = False,
    lists: Annotated[bool, typer.Option("--list", help="List the folders that are trusted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> Exit:
    r"""
    Let commands run the agent files of a folder.

    Agent files are programs. Those in ./agents of a folder are found by their ids, and of a folder that somebody else made
    they run only after you trusted it: once, by its real path and its owner. That is kept in your state folder.

    A FILE that you type is never asked about, and `stepengine init` trusts what it makes. In CI, where nobody can be asked,
    --trust=sha256:... of a command trusts the content of ./agents, for that command.

    Examples:
      stepengine agents trust
      stepengine agents trust ../project
      stepengine agents trust --list
      stepengine agents trust ../project --forget
      stepengine run code_reviewer "Look at it" --trust sha256:9f2c...
    """
    from stepengine.engine import trust as kept

    if lists:
        found = [str(one) for one in kept.trusted_folders()]
        print(dumps(found) if as_json else "\n".join([visible(one, strict=True) for one in found]))
        return Exit.COMPLETED
    refuse_inside("stepengine agents trust")
    local = folder / kept.LOCAL
    if forget:
        was_trusted = kept.forget(local)
        print(dumps({"forgotten": was_trusted}) if as_json else "forgotten" if was_trusted else "it was not trusted")
        return Exit.COMPLETED
    if not local.is_dir():
        msg = f"there is no {str(local)!r}; name the folder that holds a folder 'agents'"
        raise UsageProblem(msg)
    foreign = kept.foreign_at(local)
    real = kept.trust(local)
    if as_json:
        print(dumps({"folder": str(real), "owner": real.stat().st_uid, "content": _content(real)}))
        return Exit.COMPLETED
    files = ", ".join(foreign.files) if foreign is not None else "trusted before, or no agent files yet"
    print(f"{visible(str(real), strict=True)} is trusted: {visible(files, strict=True)}")
    print(f"for CI, what it holds now: --trust={_content(real)}")
    return Exit.COMPLETED


def refuse_inside(what: str) -> None:
    """
    Refuse what only a person may do inside of a command that a tool runs: a model could answer itself.

    Raises:
        UsageProblem: inside of such a command.
    """
    from stepengine.workspace.environment import MARKER

    if os.environ.get(MARKER):
        msg = f"{what} is for people; here a tool of an agent runs it, and nothing was done. Do it in a terminal of your own"
        raise UsageProblem(msg)


def refuse_foreign(module: str) -> None:
    """
    Refuse ``agents``, which commands take where nothing was typed, in a folder that nobody trusts.

    Raises:
        UsageProblem: when that is such a folder.
    """
    from stepengine.engine.trust import LOCAL, may_run

    if Path(module) == LOCAL and LOCAL.is_dir() and not may_run(LOCAL):
        msg = f"nothing was done without the agents of this run; --agents {LOCAL.resolve()} names them by their path"
        raise UsageProblem(msg)


@contextmanager
def at_the_gate(*, asks: bool, content: str = "") -> Iterator[None]:
    """
    Have files of the working folder judged for as long as the block lasts.

    Args:
        asks: Whether a person at a terminal is asked.
        content: The content that was trusted on the command line; ``""`` for none.

    Raises:
        UsageProblem: when that is not a digest, or a tool's command gives it.
    """
    from stepengine.engine.trust import GATE

    if content:
        refuse_inside("--trust")
        if CONTENT.fullmatch(content) is None:
            msg = f"--trust is {content!r}; it is sha256: and 64 hexadecimal digits, as the message says that asks for trust"
            raise UsageProblem(msg)
    token = GATE.set(_Gate(asks=asks, content=content))
    try:
        yield
    finally:
        GATE.reset(token)


class _Gate:
    """Judges each folder once for each command."""

    def __init__(self, *, asks: bool, content: str) -> None:
        self._asks, self._content = asks, content
        self._known: dict[Path, bool] = {}
        self._agreed: dict[Wishes, bool] = {}
        self._told: set[str] = set()

    def allows(self, foreign: Foreign) -> bool:
        """Return whether a folder may run: its content was trusted, or somebody at the terminal says so."""
        if foreign.folder not in self._known:
            self._known[foreign.folder] = self._judge(foreign)
        return self._known[foreign.folder]

    def agrees(self, wishes: Wishes) -> bool:
        """Return whether what a package wants was agreed to, or somebody at the terminal does now."""
        from stepengine.engine.trust import agree, not_agreed

        if wishes not in self._agreed:
            missing = not_agreed(wishes)
            self._agreed[wishes] = missing == () or (self._asks and can_ask() and _agreed_to(wishes, missing))
            if self._agreed[wishes] and missing != ():
                agree(wishes)
        if not self._agreed[wishes]:
            self.tell(
                f"not loaded, because nobody agreed to what it wants: {wishes}\n{_describe_wishes(wishes, not_agreed(wishes))}\n"
                f"  where nobody can be asked: {wishes.how}"
            )
        return self._agreed[wishes]

    def tell(self, message: str) -> None:
        """Say it on stderr, once."""
        if message not in self._told:
            self._told.add(message)
            complain(message)

    def _judge(self, foreign: Foreign) -> bool:
        from stepengine.engine.trust import trust as keep

        there = _content(foreign.folder)
        if self._content:
            if there == self._content:
                return True
            msg = f"--trust is {self._content}, and {foreign} is {there}; look at what has changed, then give that"
            raise UsageProblem(msg)
        if self._asks and can_ask() and _ask_for_trust(foreign):
            keep(foreign.folder)
            return True
        self.tell(
            f"not run, because nobody trusts it: {foreign}. Look at it, then: {foreign.how}\n"
            f"  for one command, as in CI: --trust={there}"
        )
        return False


def _content(folder: Path) -> str:
    from stepengine.engine.trust import content_of
    from stepengine.errors import DefinitionError

    try:
        return content_of(folder)
    except DefinitionError as error:
        return f"none ({error.message})"


def can_ask() -> bool:
    """Return whether a person is at the terminal and this is no command that a tool runs."""
    from stepengine.workspace.environment import MARKER

    return sys.stdin.isatty() and sys.stderr.isatty() and not os.environ.get(MARKER)


def _ask_for_trust(foreign: Foreign) -> bool:
    owner = "" if foreign.owner == os.geteuid() else f", which belongs to the user {_user(foreign.owner)}"
    # The number is next to the question: the names of many files scroll out of sight.
    count = f"{len(foreign.files):,} agent {'file is a program' if len(foreign.files) == 1 else 'files are programs'}"
    said = f"{foreign}{owner} was never trusted. Its {count} and may do whatever you may"
    print(f"stepengine: {visible(said)}. Run them, now and from now on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _agreed_to(wishes: Wishes, missing: Sequence[str] | None) -> bool:
    said = f"{wishes}, was never agreed to" if missing is None else f"{wishes}, wants more than was agreed to"
    print(f"stepengine: {visible(said)}:\n{visible(_describe_wishes(wishes, missing))}", file=sys.stderr)
    print("Load it, now and from now on? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _describe_wishes(wishes: Wishes, missing: Sequence[str] | None) -> str:
    """Return all that a package wants, and what that is worth."""
    asks = wishes.asks if missing is None else missing
    return "\n".join(
        [
            "it wants:" if missing is None else "new is:",
            *(grouped_wishes(asks) or ["  no tool, folder or host"]),
            "So it says itself. It is a program, and may do whatever you may.",
        ]
    )


def grouped_wishes(asks: Sequence[str]) -> list[str]:
    """
    Return a line for each kind of wish, hosts, folders and tools that change something first.

    Nothing is left out: a person agrees to all of it. What many harmless tools would hide stands in front of them, and as
    counts behind them, next to the question.
    """
    groups: dict[str, list[str]] = {}
    for wanted in asks:
        kind, _, rest = wanted.partition(" ")
        if kind == "tool":
            rest, _, category = rest.rpartition(": ")
            kind = f"tools, {category}"
        groups.setdefault(kind, []).append(rest)
    kinds = sorted(groups, key=lambda kind: (WISHED.index(kind) if kind in WISHED else len(WISHED), kind))
    # What only reads is the least of it. Categories of the package's own come before that.
    kinds.sort(key=lambda kind: kind == HARMLESS)
    lines = [f"  {kind}: {', '.join(groups[kind])}" for kind in kinds]
    counts = ", ".join([f"{len(groups[kind])} {kind}" for kind in kinds])
    return [*lines, f"  in all: {counts}"] if lines else []


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
