"""``stepengine init``: a project with an agent, its tests, a recorded run and CI, all of which work at once."""

from __future__ import annotations

import keyword
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
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
PACKAGE = Path(__file__).parents[1] / "_init_package"
SHARED = {
    "agents/todos.py": "src/{module}/todos.py",
    "evals/todos.py": "evals/todos.py",
    "tests/test_todos.py": "tests/test_todos.py",
    "tests/journals/test_todos/test_a_run.jsonl": "src/{module}/recordings/tests/test_todos/test_a_run.jsonl",
}
"""Files of a project that a package has, too, and where."""
SAMPLE = ".sample"
"""The suffix that keeps linters, type checkers and test collectors away from the files of a project that is not one yet."""
NAME, MODULE = "{name}", "{module}"
LOCAL = "agents"
INSTALL = 'python -m pip install "$(ls vendor/stepengine-*.whl)[{extra}]"'
"""Of a project: from the wheel that it keeps, so that nobody else's package of the name is taken."""
NEEDED = {"test": ("pytest", "syrupy"), "serve": ("starlette", "uvicorn", "prometheus_client")}
"""The packages of the extras with which a project is tested, and its studio opened."""
ODD = re.compile(r"[^a-z0-9]+")
LISTED = 5


def init(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Where the project goes, made if it is missing; by default this folder."),
    ] = Path(),
    *,
    package: Annotated[
        bool, typer.Option("--package", help="Make a package of agents, for others to install by its name.")
    ] = False,
) -> Exit:
    """
    Make a project: an agent, its tests, a recorded run, and CI.

    The tests of the new project pass as they are, without a model, a key or a network: its one run was recorded and is
    replayed. No file that exists is changed: where one would be, nothing is made at all. What it makes is trusted, so
    that `stepengine run` finds the agent by its id; see `stepengine agents trust --help`.

    With --package it is a package with agents, recordings, an evaluation, a licence and a workflow that publishes it, called
    like the folder; `stepengine agents check` says what somebody who installs it meets.

    Examples:
      stepengine init my-agent
      stepengine init
      stepengine init my-agents --package
    """
    if package:
        return _package(folder)
    own = not (folder / LOCAL).exists()
    made = make_project(folder)
    if own:
        _trust(folder / LOCAL)
    else:
        complain(
            f"{folder / LOCAL} was there before, so it is not trusted by this: `stepengine agents trust {folder}` does"
        )
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
    for extra, packages in NEEDED.items():
        if not all(map(find_spec, packages)):
            say(f"  {INSTALL.format(extra=extra)}")
            say("      for its tests" if extra == "test" else "      for the studio")
    say(
        "  cat README.md\n"
        "      an agent of your own: write it, record it, replay it, break it, debug it; all without a key\n"
        "  stepengine run todos src --model anthropic/claude-haiku-4-5\n"
        "      live; needs ANTHROPIC_API_KEY, and `stepengine config doctor` says whether all is there\n"
        "  stepengine studio --model anthropic/claude-haiku-4-5\n"
        "      the page below with a real model; needs the key, too"
    )
    say(
        "\nWhat works right now, without a key and without a network:\n"
        "  python -m pytest\n"
        "      its tests; a recorded run is replayed\n"
        "  stepengine show tests/journals/test_todos/test_a_run.jsonl\n"
        "      the recorded run, step by step\n"
        "  stepengine eval evals/todos.py\n"
        "      how good the agent is at two cases; its report is in the studio, too\n"
        "  stepengine studio --script tests/replies.json\n"
        "      a page in the browser: start runs, watch them, answer them, go back in them;\n"
        "      what tests/replies.json holds answers in place of the model"
    )
    return Exit.COMPLETED


def _package(folder: Path) -> Exit:
    """Make a package, and say what to do with it."""
    made = make_project(folder, package=True)
    name, module = names_of(folder)
    say(f"{visible(str(folder), strict=True)} is a package now:")
    say("\n".join([f"  {path}" for path in made]))
    say("\nWhat to type next:")
    if folder.resolve() != Path.cwd():
        say(f"  cd {visible(shlex.quote(str(folder)), strict=True)}")
    activate = activation()
    if activate:
        say(f"  {visible(activate, strict=True)}")
    say(
        f"  {visible(own_source().wheel_line('vendor'), strict=True)}\n"
        "      keeps stepengine's wheel with the project: it is on no package index, and CI needs it\n"
        "  python -m pip install -e . hatchling\n"
        f"      `stepengine agents list` lists {name}/todos then, and `stepengine run {name}/todos src` runs it\n"
        "  python -m pytest\n"
        "      its tests; no key, no network\n"
        "  stepengine agents check\n"
        "      what somebody who installs it meets\n"
        "  cat README.md\n"
        f"      what belongs where, above all src/{module}/stepengine-agents.json, and how it is published"
    )
    return Exit.COMPLETED


def names_of(folder: Path) -> tuple[str, str]:
    """Return what a project in *folder* is called, and its module."""
    name = ODD.sub("-", folder.resolve().name.lower()).strip("-") or "agent"
    module = name.replace("-", "_")
    taken = {*sys.stdlib_module_names, *keyword.kwlist, "stepengine", LOCAL}
    return name, module if module.isidentifier() and module not in taken else f"{LOCAL}_{module}"


def activation() -> str:
    """Return the command after which ``python`` is the one that runs this; ``""`` where it is so already, or none is known."""
    scripts = Path(sys.executable).parent
    found = shutil.which("python")
    if found is not None and Path(found).parent == scripts:
        return ""
    script = scripts / "activate"
    return f". {shlex.quote(str(script))}" if script.is_file() else ""


def _trust(made: Path) -> None:
    """Trust the agent files that were made; where the trust cannot be stored, a person is asked when they are first run."""
    from stepengine.engine.trust import trust
    from stepengine.errors import DefinitionError

    try:
        trust(made)
    except DefinitionError as error:
        complain(error.message)


def make_project(folder: Path, *, package: bool = False) -> list[str]:
    """
    Write the project into *folder* and return its files, as sorted paths in it.

    Args:
        folder: Where it goes.
        package: Whether it is a package of agents for others.

    Raises:
        UsageProblem: when one of its files is there already, or *folder* cannot be written; nothing was written over.
    """
    name, module = names_of(folder)
    words = {NAME: name, MODULE: module} | (
        {"from agents.todos import": f"from {module}.todos import", '"agents/todos.py"': f'"src/{module}/todos.py"'}
        if package
        else {}
    )
    files = {_fill_template(path, words): file for path, file in _samples(package=package)}
    try:
        there = [path for path in files if (folder / path).exists() or (folder / path).is_symlink()]
        if there:
            more = f" and {len(there) - LISTED} more" if len(there) > LISTED else ""
            msg = (
                f"{folder} has {', '.join(there[:LISTED])}{more} already, and nothing is written over; "
                "a folder without them would be fine"
            )
            raise UsageProblem(msg)
        for path, file in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("x", encoding="utf-8", newline="\n") as made:
                made.write(_fill_template(file.read_text(encoding="utf-8"), words))
    except OSError as error:
        msg = f"{error.filename or folder} cannot be written: {error.strerror}"
        raise UsageProblem(msg) from None
    return sorted(files)


def _samples(*, package: bool) -> Iterator[tuple[str, Path]]:
    """Give the paths of a project and the files that become them."""
    for file in sorted(TEMPLATE.rglob(f"*{SAMPLE}")):
        path = str(file.relative_to(TEMPLATE)).removesuffix(SAMPLE)
        if not package:
            yield path, file
        elif path in SHARED:
            yield SHARED[path], file
    for file in sorted(PACKAGE.rglob(f"*{SAMPLE}")) if package else ():
        yield str(file.relative_to(PACKAGE)).removesuffix(SAMPLE), file


def _fill_template(text: str, words: Mapping[str, str]) -> str:
    for word, meant in words.items():
        text = text.replace(word, meant)
    return text
