"""``stepengine config doctor``: check the installation, and report problems and how to fix them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.exits import Exit
from stepengine.cli.options import Config
from stepengine.cli.screen.render import print_visible, to_ascii_json, visible

if TYPE_CHECKING:
    from stepengine.testing import Finding


def doctor(
    *,
    reach: Annotated[
        bool,
        typer.Option("--reach", help="Test whether each usable provider's address answers; no key is sent."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    config: Config = None,
) -> Exit:
    """
    Check the installation: what works, what to fix, and how.

    Shows versions, which keys are set (never their values), where runs are recorded, settings and their sources,
    agent files that cannot be loaded, and common mistakes. Changes nothing, and uses the network only with --reach.

    Exits with 1 if a problem will make runs fail.

    Examples:
      stepengine config doctor
      stepengine config doctor --reach
      stepengine config doctor --json
    """
    from stepengine.testing import check_installation

    found = list(check_installation(config, reach=reach))
    wrong = sum(one.state == "wrong" for one in found)
    if as_json:
        print(to_ascii_json({"ok": not wrong, "findings": [attrs.asdict(one) for one in found]}))
    else:
        _print_findings(found)
        print(f"\n{wrong} problems found" if wrong else "\nno problems found")
    return Exit.FAILED if wrong else Exit.COMPLETED


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings of the installation by area, with a repair for each problem."""
    area = ""
    for one in findings:
        if one.area != area:
            area = one.area
            print(f"\n{area}" if one is not findings[0] else area)
        mark = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}[one.state]
        print_visible(f"  {mark}  {visible(one.text)}", hanging_indent=9)
        if one.repair:
            print_visible(f"         -> {visible(one.repair)}", hanging_indent=12)
