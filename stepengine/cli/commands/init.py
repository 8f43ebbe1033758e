"""``stepengine init``: a project with an agent, its tests, a recorded run and CI, all of which work at once."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.screen.render import print_visible, visible
from stepengine.errors import DefinitionError
from stepengine.workspace.installation import find_install_source

LOCAL = "agents"
INSTALL = 'python -m pip install "$(ls vendor/stepengine-*.whl)[{extra}]"'
"""Of a project: from the wheel that it keeps, so that nobody else's package of the name is taken."""
NEEDED = {"test": ("pytest", "syrupy"), "serve": ("starlette", "uvicorn", "prometheus_client")}
"""The packages of the extras with which a project is tested, and its studio opened."""


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
    is_here = folder.resolve() == Path.cwd()
    print_visible(
        "This folder is a project now:" if is_here else f"{visible(str(folder), strict=True)} is a project now:"
    )
    print_visible("\n".join([f"  {path}" for path in made]))
    print_visible("\nWhat to type next:")
    if not is_here:
        print_visible(f"  cd {visible(shlex.quote(str(folder)), strict=True)}")
    activate = find_activation_command()
    if activate:
        print_visible(
            f"  {visible(activate, strict=True)}\n      so that `python` and `stepengine` come from this environment"
        )
    print_visible(
        f"  {visible(find_install_source().pip_wheel_command('vendor'), strict=True)}\n"
        "      stores stepengine's wheel in the project: it is on no package index, and CI needs it too"
    )
    for extra, packages in NEEDED.items():
        if not all(map(find_spec, packages)):
            print_visible(f"  {INSTALL.format(extra=extra)}")
            print_visible("      for its tests" if extra == "test" else "      for the studio")
    print_visible(
        "  cat README.md\n"
        "      an agent of your own: write it, record it, replay it, break it, debug it; all without a key\n"
        "  stepengine run todos src --model anthropic/claude-haiku-4-5\n"
        "      live; needs ANTHROPIC_API_KEY; `stepengine config doctor` checks the setup\n"
        "  stepengine studio --model anthropic/claude-haiku-4-5\n"
        "      the page below with a real model; needs the key, too"
    )
    print_visible(
        "\nWhat works right now, without a key and without a network:\n"
        "  python -m pytest\n"
        "      run the tests; one replays a recorded run\n"
        "  stepengine show tests/journals/test_todos/test_a_run.jsonl\n"
        "      the recorded run, step by step\n"
        "  stepengine eval evals/todos.py\n"
        "      evaluate the agent on two cases; the studio shows the report, too\n"
        "  stepengine studio --script tests/replies.json\n"
        "      a page in the browser to start runs, watch them, answer them and step back in them;\n"
        "      tests/replies.json supplies the replies in place of the model"
    )
    return Exit.COMPLETED


def _create_package(folder: Path) -> Exit:
    """Create a package, and print the next steps."""
    from stepengine.engine.projects import derive_project_and_module_names, make_project

    made = make_project(folder, package=True)
    name, module = derive_project_and_module_names(folder)
    print_visible(f"{visible(str(folder), strict=True)} is a package now:")
    print_visible("\n".join([f"  {path}" for path in made]))
    print_visible("\nWhat to type next:")
    if folder.resolve() != Path.cwd():
        print_visible(f"  cd {visible(shlex.quote(str(folder)), strict=True)}")
    activate = find_activation_command()
    if activate:
        print_visible(f"  {visible(activate, strict=True)}")
    print_visible(
        f"  {visible(find_install_source().pip_wheel_command('vendor'), strict=True)}\n"
        "      stores stepengine's wheel in the project: it is on no package index, and CI needs it\n"
        "  python -m pip install -e . hatchling\n"
        f"      then `stepengine agents list` lists {name}/todos, and `stepengine run {name}/todos src` runs it\n"
        "  python -m pytest\n"
        "      its tests; no key, no network\n"
        "  stepengine agents check\n"
        "      check the package as its users will find it\n"
        "  cat README.md\n"
        f"      the files, above all src/{module}/stepengine-agents.json, and how to publish the package"
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
