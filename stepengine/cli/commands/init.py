"""``stepengine init``: a project with an agent, its tests, a recorded run and CI, all of which work at once."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.installing import own_source
from stepengine.cli.screen.render import say, visible
from stepengine.cli.settings import UsageProblem

__all__ = ("TEMPLATE", "init", "make_project")

TEMPLATE = Path(__file__).parents[1] / "_init"
SAMPLE = ".sample"
"""The suffix that keeps linters, type checkers and test collectors away from the files of a project that is not one yet."""
NAME = "{name}"
LOCAL = "agents"
INSTALL = 'python -m pip install "$(ls vendor/stepengine-*.whl)[test]"'
"""Of a project: from the wheel that it keeps, so that nobody else's package of the name is taken."""
ODD = re.compile(r"[^a-z0-9]+")
LISTED = 5


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the project goes; it is made if it is missing.")],
) -> Exit:
    """
    Make a project: an agent, its tests, a recorded run, and CI.

    The tests of the new project pass as they are, without a model, a key or a network: its one run was recorded and is
    replayed. No file that exists is changed: where one would be, nothing is made at all. What it makes is trusted, so
    that `stepengine run` finds the agent by its id; see `stepengine trust --help`.

    Examples:
      stepengine init my-agent
      stepengine init .
    """
    own = not (folder / LOCAL).exists()
    made = make_project(folder)
    if own:
        _trust(folder / LOCAL)
    else:
        complain(f"{folder / LOCAL} was there before, so it is not trusted by this: `stepengine trust {folder}` does")
    is_here = folder.resolve() == Path.cwd()
    say("This folder is a project now:" if is_here else f"{visible(str(folder), strict=True)} is a project now:")
    say("\n".join([f"  {path}" for path in made]))
    say("\nWhat to type next:")
    if not is_here:
        say(f"  cd {visible(shlex.quote(str(folder)), strict=True)}")
    activate = activation()
    if activate:
        say(
            f"  {visible(activate, strict=True)}\n      so that `python` and `stepengine` are those of this environment"
        )
    say(
        f"  {visible(own_source().wheel_line('vendor'), strict=True)}\n"
        "      keeps stepengine's wheel with the project: it is on no package index, and CI needs it too"
    )
    if find_spec("pytest") is None or find_spec("syrupy") is None:
        say(f"  {INSTALL}")
    say(
        "  python -m pytest\n"
        "      its tests; no key, no network\n"
        "  stepengine show tests/journals/test_todos/test_a_run.jsonl\n"
        "      the recorded run, step by step\n"
        "  cat README.md\n"
        "      an agent of your own: write it, record it, replay it, break it, debug it; all without a key\n"
        "  stepengine run todos src --model anthropic/claude-haiku-4-5\n"
        "      live; needs ANTHROPIC_API_KEY, and `stepengine doctor` says whether all is there"
    )
    return Exit.COMPLETED


def activation() -> str:
    """Return the command after which ``python`` is the one that runs this; ``""`` where it is so already, or none is known."""
    scripts = Path(sys.executable).parent
    found = shutil.which("python")
    if found is not None and Path(found).parent == scripts:
        return ""
    script = scripts / "activate"
    return f". {shlex.quote(str(script))}" if script.is_file() else ""


def _trust(made: Path) -> None:
    """Trust the agent files that were made; where that cannot be kept, somebody is asked when they are to run."""
    from stepengine.engine.trust import trust
    from stepengine.errors import DefinitionError

    try:
        trust(made)
    except DefinitionError as error:
        complain(error.message)


def make_project(folder: Path) -> list[str]:
    """
    Write the project into *folder* and return its files, as sorted paths in it.

    Raises:
        UsageProblem: when one of its files is there already, or *folder* cannot be written; nothing was written over.
    """
    files = {str(f.relative_to(TEMPLATE)).removesuffix(SAMPLE): f for f in sorted(TEMPLATE.rglob(f"*{SAMPLE}"))}
    try:
        there = [path for path in files if (folder / path).exists() or (folder / path).is_symlink()]
        if there:
            more = f" and {len(there) - LISTED} more" if len(there) > LISTED else ""
            msg = (
                f"{folder} has {', '.join(there[:LISTED])}{more} already, and nothing is written over; "
                "a folder without them would be fine"
            )
            raise UsageProblem(msg)
        name = ODD.sub("-", folder.resolve().name.lower()).strip("-") or "agent"
        for path, file in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("x", encoding="utf-8", newline="\n") as made:
                made.write(file.read_text(encoding="utf-8").replace(NAME, name))
    except OSError as error:
        msg = f"{error.filename or folder} cannot be written: {error.strerror}"
        raise UsageProblem(msg) from None
    return sorted(files)
