"""``stepengine agents check`` and ``agree``: check a package of agents as its users will find it, and approve its requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs
import typer

from stepengine.cli.code_trust import format_package_requests, refuse_inside_tool
from stepengine.cli.exits import Exit
from stepengine.cli.screen.render import print_visible, to_ascii_json, visible


def check_package_of_agents(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="The project folder, or a wheel; default: this folder.")
    ] = Path(),
    *,
    write: Annotated[
        bool,
        typer.Option("--write", help="First write the tools and agents of its code to stepengine-agents.json."),
    ] = False,
    imports: Annotated[
        bool, typer.Option("--import", help="Also run the code of a wheel; this approves the access that it declares.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    """
    Check a package of agents as its users will find it.

    A wheel (*.whl) is only read: its metadata, its stepengine-agents.json, its files. Its code runs only if you
    approved the package before or pass --import. A project folder counts as your own: it is built, and its code
    runs.

    The code runs in an empty folder and home, without your environment variables, to find what exists only on your
    machine. This is not a sandbox: the code has your rights. The check loads the agents into an engine, replays
    recorded runs (*.jsonl in recordings/), and compares the code with stepengine-agents.json. It searches files for
    keys and for machine-specific paths.

    stepengine-agents.json is in the package. Users see it before they import the package: tools with their
    categories, which --write takes from the code, and the folders (reads, writes) and hosts, which only you know.

    Building needs the project's build backend; pip fetches it if it is not installed.

    Exit codes:
      0    no problems
      1    problems were found
      2    not a project with agents, or it cannot be built

    Examples:
      stepengine agents check
      stepengine agents check --write
      stepengine agents check dist/mine-0.1.0-py3-none-any.whl
      stepengine agents check dist/mine-0.1.0-py3-none-any.whl --import
    """
    from stepengine.testing import check_package

    found = check_package(path, write=write, imports=imports)
    if as_json:
        print(to_ascii_json(attrs.asdict(found)))
    else:
        lines = [("ok", found.good), ("note", found.notes), ("PROBLEM", found.problems)]
        print_visible(
            "\n".join([f"{mark:<8}{visible(line)}" for mark, several in lines for line in several]), hanging_indent=8
        )
    return Exit.FAILED if found.problems else Exit.COMPLETED


def approve_installed_package(
    name: Annotated[str, typer.Argument(metavar="PACKAGE", help="The package, by its pip name.")],
    *,
    forget: Annotated[bool, typer.Option("--forget", help="Withdraw the approval.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> Exit:
    """
    Approve what an installed package of agents requests.

    The package declares the tools, folders, hosts and other agents that it uses. They are shown, and your approval
    covers this version and later ones that request no more; you are asked again when one requests more. Approval is
    not a sandbox: agents are programs with your rights. The package is not imported for this.

    `run` and `chat` ask at a terminal; use this command where there is none.

    Examples:
      stepengine agents agree acme-agents
      stepengine agents agree acme-agents --forget
    """
    from stepengine.engine import packages, trust

    refuse_inside_tool("stepengine agents agree")
    if forget:
        was = trust.withdraw_approval(name)
        print(to_ascii_json({"forgotten": was}) if as_json else "forgotten" if was else "it was not approved")
        return Exit.COMPLETED
    request = packages.approve_package(name)
    if as_json:
        print(to_ascii_json(attrs.asdict(request)))
        return Exit.COMPLETED
    print(f"approved, for {visible(str(request), strict=True)}:")
    lines = format_package_requests(request.asks) or ["  it requests no tool, folder or host"]
    print(visible("\n".join(lines)))
    return Exit.COMPLETED
