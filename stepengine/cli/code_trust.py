"""
``stepengine agents trust``, and the trust checks of every command for code of the working folder.

Agent files of an untrusted folder are not run. ``run`` and ``chat`` ask the person at a terminal once; other commands print
which files they did not run, and how to trust them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.screen.confirm import can_ask_at_terminal, confirm
from stepengine.cli.screen.render import to_ascii_json, visible
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DefinitionError

if TYPE_CHECKING:
    from stepengine.engine.trust import AccessRequest, UntrustedFolder

HARMLESS = "tools, read"
KIND_ORDER = (
    "host",
    "writes",
    "reads",
    "tools, execute",
    "tools, network",
    "tools, write",
    "tools, of no category",
    "agent",
)
"""The kinds of requests in the order in which a person sees them; other categories follow."""
CONTENT = re.compile(r"sha256:[0-9a-f]{64}")
OPTION = typer.Option(
    "--trust", help="Run ./agents only if its files have this hash; for CI.", metavar="sha256:...", show_default=False
)


def trust(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder that contains ./agents; default: this one.")
    ] = Path(),
    *,
    forget: Annotated[bool, typer.Option("--forget", help="Withdraw the trust.")] = False,
    lists: Annotated[bool, typer.Option("--list", help="List the trusted folders.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> Exit:
    r"""
    Allow commands to run the agent files of a folder.

    Agent files are programs. Commands find those in ./agents by their ids. In a folder that you did not create,
    they run only after you trust the folder once, by its real path and owner. Your state folder stores this decision.

    A FILE that you pass by path needs no trust, and `stepengine init` trusts the files that it creates. In CI, pass
    --trust=sha256:... to a command: it trusts ./agents with exactly that content, for that command.

    Examples:
      stepengine agents trust
      stepengine agents trust ../project
      stepengine agents trust --list
      stepengine agents trust ../project --forget
      stepengine run code_reviewer "Look at it" --trust sha256:9f2c...
    """
    from stepengine.engine import trust as kept

    if lists:
        found = [str(one) for one in kept.list_trusted_folders()]
        print(to_ascii_json(found) if as_json else "\n".join([visible(one, strict=True) for one in found]))
        return Exit.COMPLETED
    refuse_inside_tool("stepengine agents trust")
    local = folder / kept.LOCAL
    if forget:
        was_trusted = kept.untrust_folder(local)
        print(
            to_ascii_json({"forgotten": was_trusted})
            if as_json
            else "forgotten"
            if was_trusted
            else "the folder was not trusted"
        )
        return Exit.COMPLETED
    foreign = kept.find_untrusted_folder(local)
    real = kept.trust_folder(local)
    if as_json:
        print(
            to_ascii_json({"folder": str(real), "owner": real.stat().st_uid, "content": _hash_folder_or_reason(real)})
        )
        return Exit.COMPLETED
    files = ", ".join(foreign.files) if foreign is not None else "trusted before, or no agent files yet"
    print(f"{visible(str(real), strict=True)} is trusted: {visible(files, strict=True)}")
    print(f"for CI, with the current hash of its files: --trust={_hash_folder_or_reason(real)}")
    return Exit.COMPLETED


def refuse_inside_tool(action: str) -> None:
    """
    Raise if a tool of an agent started this command, because only a person may do *action*.

    Raises:
        DefinitionError: when a tool started this command.
    """
    from stepengine.engine import trust

    trust.refuse_inside_tool(action)


def refuse_untrusted_module(module: str) -> None:
    """
    Raise if *module* is the default folder ``agents`` and the user does not trust it.

    Raises:
        UsageProblem: when *module* is an untrusted ``agents`` folder.
    """
    from stepengine.engine.trust import LOCAL, may_run_agent_files

    if Path(module) == LOCAL and LOCAL.is_dir() and not may_run_agent_files(LOCAL):
        folder = shlex.quote(str(LOCAL.resolve()))
        msg = f"nothing was done, because the agents of this run are not trusted; name them by path with --agents {folder}"
        raise UsageProblem(msg)


@contextmanager
def enforce_trust(*, asks: bool, trusted_hash: str) -> Iterator[None]:
    """
    Check the trust of agent files and packages while the block runs; each folder or package is decided once.

    Args:
        asks: Whether a person at a terminal is asked.
        trusted_hash: The hash of ``--trust``; ``""`` for none.

    Raises:
        UsageProblem: when *trusted_hash* is not a hash.
        DefinitionError: when a tool of an agent started this command and passes ``--trust``.
    """
    from stepengine.engine.trust import GATE

    if trusted_hash:
        refuse_inside_tool("--trust")
        if CONTENT.fullmatch(trusted_hash) is None:
            msg = f"--trust is {trusted_hash!r}; expected sha256: and 64 hexadecimal digits, as in the message that asks for trust"
            raise UsageProblem(msg)
    token = GATE.set(_TrustGate(asks=asks, content=trusted_hash))
    try:
        yield
    finally:
        GATE.reset(token)


class _TrustGate:
    """Decides once per command whether a folder or package is trusted."""

    def __init__(self, *, asks: bool, content: str) -> None:
        self._asks, self._content = asks, content
        self._known: dict[Path, bool] = {}
        self._agreed: dict[AccessRequest, bool] = {}
        self._told: set[str] = set()

    def allows(self, foreign: UntrustedFolder) -> bool:
        """Return whether the files of a folder may run; decide once, by the hash in ``--trust`` or by asking the person at the terminal."""
        if foreign.folder not in self._known:
            self._known[foreign.folder] = self._decide_folder_trust(foreign)
        return self._known[foreign.folder]

    def approves_access(self, request: AccessRequest) -> bool:
        """Return whether the requests of a package are approved; if not, ask the person at the terminal and store the approval."""
        from stepengine.engine.trust import approve_access, find_unapproved_access

        if request not in self._agreed:
            missing = find_unapproved_access(request)
            self._agreed[request] = missing == () or (
                self._asks and can_ask_at_terminal() and _ask_to_approve_package(request, missing)
            )
            if self._agreed[request] and missing != ():
                approve_access(request)
        if not self._agreed[request]:
            self.print_message(
                f"not loaded, because it is not approved: {request}\n{_describe_request(request, find_unapproved_access(request))}\n"
                f"  to approve it without a terminal: {request.approve_command}"
            )
        return self._agreed[request]

    def print_message(self, message: str) -> None:
        """Print a message on stderr, once."""
        if message not in self._told:
            self._told.add(message)
            print_error(message)

    def _decide_folder_trust(self, foreign: UntrustedFolder) -> bool:
        """Compare the folder with the hash of ``--trust`` and raise if it differs; else ask, store an approval, or print a refusal."""
        from stepengine.engine.trust import trust_folder as keep

        there = _hash_folder_or_reason(foreign.folder)
        if self._content:
            if there == self._content:
                return True
            msg = f"--trust is {self._content}, but the hash of {foreign} is {there}; check what has changed, then pass the new hash"
            raise UsageProblem(msg)
        if self._asks and can_ask_at_terminal() and _ask_to_trust_folder(foreign):
            keep(foreign.folder)
            return True
        self.print_message(
            f"not run, because it is not trusted: {foreign}. Check its files, then run: {foreign.trust_command}\n"
            f"  to run one command, as in CI, pass --trust={there}"
        )
        return False


def _hash_folder_or_reason(folder: Path) -> str:
    """Return the hash of the agent files in *folder*, or ``none`` with the reason why there is none."""
    from stepengine.engine.trust import hash_folder

    try:
        return hash_folder(folder)
    except DefinitionError as error:
        return f"none ({error.message})"


def _ask_to_trust_folder(foreign: UntrustedFolder) -> bool:
    """Ask the person whether agent files may run, and return the answer."""
    owner = "" if foreign.owner == os.geteuid() else f", which belongs to the user {_user_name_from_id(foreign.owner)}"
    # The number is next to the question: the names of many files scroll out of sight.
    count = f"{len(foreign.files):,} agent {'file is a program' if len(foreign.files) == 1 else 'files are programs'}"
    said = f"{foreign}{owner} is not trusted. Its {count} with all of your rights"
    return confirm(f"stepengine: {visible(said)}. Trust this folder and run them?")


def _ask_to_approve_package(request: AccessRequest, missing: Sequence[str] | None) -> bool:
    """Print the requests of a package, ask the person to approve them, and return the answer."""
    said = f"{request}, is not approved yet" if missing is None else f"{request}, requests more than you approved"
    print_error(f"{said}:\n{_describe_request(request, missing)}")
    return confirm("Approve and load it?")


def _describe_request(request: AccessRequest, missing: Sequence[str] | None) -> str:
    """Return the requests of a package as lines, or only the *missing* ones, with a warning that it is a program."""
    asks = request.asks if missing is None else missing
    return "\n".join(
        [
            "it requests:" if missing is None else "new:",
            *(format_package_requests(asks) or ["  no tool, folder or host"]),
            "The package declares this itself; no limit enforces it. Its code runs with all of your rights.",
        ]
    )


def format_package_requests(asks: Sequence[str]) -> list[str]:
    """
    Return a line for each kind of request; hosts, folders and side effects are first.

    All requests are included, since a person approves all of them. Harmless tools come last, so that they do not hide the others. The last
    line has the counts, next to the question.
    """
    groups: dict[str, list[str]] = {}
    for wanted in asks:
        kind, _, rest = wanted.partition(" ")
        if kind == "tool":
            rest, _, category = rest.rpartition(": ")
            kind = f"tools, {category}"
        groups.setdefault(kind, []).append(rest)
    order = {kind: place for place, kind in enumerate(KIND_ORDER)}
    # Tools that only read are the least important. The package's own categories come before them.
    kinds = sorted(groups, key=lambda kind: (kind == HARMLESS, order.get(kind, len(order)), kind))
    lines = [f"  {kind}: {', '.join(groups[kind])}" for kind in kinds]
    counts = ", ".join([f"{len(groups[kind])} {kind}" for kind in kinds])
    return [*lines, f"  total: {counts}"] if lines else []


def _user_name_from_id(number: int) -> str:
    """Return the name of a user by its number; the number as text if there is no name."""
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
