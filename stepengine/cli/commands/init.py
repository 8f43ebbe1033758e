"""``stepengine init``: a project with an agent, its tests, a recorded run and CI, all of which work at once."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.screen.render import print_visible, visible
from stepengine.errors import DefinitionError
from stepengine.workspace.installation import get_install_source

LOCAL = "agents"
INSTALL = 'python -m pip install "$(ls vendor/stepengine-*.whl)[{extra}]"'
"""The install command of a project: from its own wheel, so that no other package of the same name is installed."""
NEEDED = {"test": ("pytest", "syrupy"), "serve": ("starlette", "uvicorn", "prometheus_client")}
"""The packages of the extras that the tests and the studio of a project need."""


def init(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of the project, created if missing; default: this folder."),
    ] = Path(),
    *,
    package: Annotated[bool, typer.Option("--package", help="Create an installable package of agents.")] = False,
) -> Exit:
    """
    Create a project: an agent, its tests, a recorded run, and CI.

    The tests of the new project pass without a model, a key or a network, because they replay its recorded run.
    Existing files are never changed: if one is in the way, nothing is created. The new files are trusted, so
    `stepengine run` finds the agent by its id; see `stepengine agents trust --help`.

    --package creates an installable package with the folder's name: agents, recordings, an evaluation, a licence
    and a publishing workflow. `stepengine agents check` tests it as its users will find it.

    Examples:
      stepengine init my-agent
      stepengine init
      stepengine init my-agents --package
    """
    if package:
        return _create_package(folder)
    from stepengine.engine import make_project

    own = not (folder / LOCAL).exists()
    made = make_project(folder)
    if own:
        _trust_agents(folder / LOCAL)
    else:
        print_error(
            f"{folder / LOCAL} existed before, so it is not trusted yet; to trust it, run `stepengine agents trust {shlex.quote(str(folder))}`"
        )
    print_visible(
        "Created a project in this folder:"
        if folder.resolve() == Path.cwd()
        else f"Created the project {visible(str(folder), strict=True)}:"
    )
    _print_files_and_folder(folder, made)
    activate = find_activation_command()
    if activate:
        print_visible(f"  {visible(activate, strict=True)}\n      use `python` and `stepengine` of this environment")
    print_visible(
        f"  {visible(get_install_source().pip_wheel_command('vendor'), strict=True)}\n"
        "      store the wheel of stepengine in the project for CI, since it is not on a package index"
    )
    for extra, packages in NEEDED.items():
        if not all(map(find_spec, packages)):
            print_visible(f"  {INSTALL.format(extra=extra)}")
            print_visible("      for the tests" if extra == "test" else "      for the studio")
    print_visible(
        "  cat README.md\n"
        "      read how to write, record, replay and debug your own agent without a key\n"
        "  stepengine run todos src --model anthropic/claude-haiku-4-5\n"
        "      run the agent with a real model; needs ANTHROPIC_API_KEY (`stepengine config doctor` checks the setup)\n"
        "  stepengine studio --model anthropic/claude-haiku-4-5\n"
        "      do the same in the browser"
    )
    print_visible(
        "\nThese commands need no key and no network:\n"
        "  python -m pytest\n"
        "      run the tests; one replays a recorded run\n"
        "  stepengine show tests/journals/test_todos/test_a_run.jsonl\n"
        "      print the recorded run step by step\n"
        "  stepengine eval evals/todos.py\n"
        "      evaluate the agent on two cases; the studio also shows the report\n"
        "  stepengine studio --script tests/replies.json\n"
        "      start, watch, answer and debug runs in the browser; tests/replies.json replaces the model"
    )
    return Exit.COMPLETED


def _print_files_and_folder(folder: Path, made: Sequence[str]) -> None:
    """Print the created files, and how to change to their folder unless it is the current one."""
    print_visible("\n".join([f"  {path}" for path in made]))
    print_visible("\nNext:")
    if folder.resolve() != Path.cwd():
        print_visible(f"  cd {visible(shlex.quote(str(folder)), strict=True)}")


def _create_package(folder: Path) -> Exit:
    """Create a package, and print the next steps."""
    from stepengine.engine.projects import derive_project_and_module_names, make_project

    made = make_project(folder, package=True)
    name, module = derive_project_and_module_names(folder)
    print_visible(f"Created the package {visible(str(folder), strict=True)}:")
    _print_files_and_folder(folder, made)
    activate = find_activation_command()
    if activate:
        print_visible(f"  {visible(activate, strict=True)}")
    print_visible(
        f"  {visible(get_install_source().pip_wheel_command('vendor'), strict=True)}\n"
        "      store the wheel of stepengine in the project for CI, since it is not on a package index\n"
        "  python -m pip install -e . hatchling\n"
        f"      install the package; then `stepengine run {name}/todos src` runs its agent\n"
        "  python -m pytest\n"
        "      run the tests; they need no key and no network\n"
        "  stepengine agents check\n"
        "      check the package as its users will install it\n"
        "  cat README.md\n"
        f"      read about the files, such as src/{module}/stepengine-agents.json, and how to publish the package"
    )
    return Exit.COMPLETED


def find_activation_command() -> str:
    """Return the shell command that activates this Python environment; ``""`` if it is active or has no such command."""
    scripts = Path(sys.executable).parent
    found = shutil.which("python")
    if found is not None and Path(found).parent == scripts:
        return ""
    script = scripts / "activate"
    return f". {shlex.quote(str(script))}" if script.is_file() else ""


def _trust_agents(folder: Path) -> None:
    """Trust the created agent files; if that cannot be stored, print why."""
    from stepengine.engine.trust import trust_folder

    try:
        trust_folder(folder)
    except DefinitionError as error:
        print_error(error.message)
