"""``stepengine compare pin``: a failed run becomes a test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import attrs
import typer

from stepengine.cli.bench import family
from stepengine.cli.evaluation import CheckText, case_of, clean_report, interrupted_or
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import find_journal
from stepengine.cli.options import File, Last, Options, with_options
from stepengine.data.definition import AgentDefinition, name_of_published, normalised_id

__all__ = ("pin",)


@partial(with_options, without=("write", "shell", "web", "as_json", "verbose"))
def pin(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    check: CheckText,
    name: Annotated[str, typer.Option(help="Name of the test; default: that of the journal.", metavar="NAME")] = "",
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder of kept journals, below the one of the tests.", metavar="DIR")
    ] = Path("tests/journals"),
) -> Exit:
    """
    Turn a run that failed into a test that fails until repaired.

    The journal is cleaned of what looks like a secret and copied to --dir; beside that folder tests/test_pin_NAME.py is
    written and run once: the pin is made when it fails for the reason that --check gives. What is private in a journal,
    but no key, is still there.

    The test runs the recorded run again with the code of its day. Where the repair changes what a model is asked, the
    run goes on from there with the replies that you write into REPLIES, and with RESULTS for tool calls that are new;
    while one is missing, the failure shows the request or the call.

    Leaves with:
      0    the test is written, and fails as it has to
      1    the run does what it has to, so there is nothing to pin
      2    wrong usage; the copy still holds what looks like a secret
      5    what is recorded does not fit the present code

    Examples:
      stepengine compare pin run.jsonl --check "'refund' not in tools"
      stepengine compare pin --last --check checks:is_polite --name polite
    """
    options = attrs.evolve(options, journal=file, last=last)
    return interrupted_or(lambda: _pin(find_journal(options).in_force(), check, name, folder))


def _pin(options: Options, wanted: str, name: str, folder: Path) -> Exit:
    from stepengine.evaluation.checks import Check
    from stepengine.evaluation.pinning import pin

    case = case_of(options.journal, options, performs=False)
    agents = family(case.agent, options.agent, options.settings.agent_folders)

    def places(file: Path) -> list[str]:
        named = [_place_of(one, "", options, file) for one in _ids_named_by(agents)]
        return [_place_of(case.agent.id, options.agent, options, file), *named]

    with case.bench.engine as engine:
        made = pin(
            engine,
            case.journal,
            Check.of_text(wanted),
            case.agent,
            name=name or options.stem or Path(options.journal.partition("#")[0]).stem,
            folder=folder,
            family=agents,
            places=places,
            clean=lambda text: str(clean_report(text)),
        )
    if isinstance(made, str):
        return complain(made.replace("the check asks", "--check asks"), Exit.FAILED)
    print(f"{made.file}\n{made.journal}")
    if made.changed:
        complain(f"{made.changed} records were cleaned of what looks like a secret")
    complain(f"the test fails, as it has to: {made.reason}")
    return Exit.COMPLETED


def _place_of(agent_id: str, given: str, options: Options, file: Path) -> str:
    """Return how the test names an agent: its file as seen from the project's folder; one that comes along by its id."""
    from stepengine.engine import loading
    from stepengine.evaluation.pinning import seen_from

    place = loading.agent_place(given or agent_id, folders=options.settings.agent_folders)
    package = Path(loading.__file__).resolve().parents[1]
    if place.file.resolve().parent in (package / "_agents", package.parent / "agents"):
        return agent_id
    return str(attrs.evolve(place, file=Path(seen_from(place.file, file))))


def _ids_named_by(agents: Sequence[AgentDefinition]) -> list[str]:
    """Return the ids by which agents name others, except agents that one of them holds: those come with their holder."""
    children = [child for agent in agents for child in agent.spawnable_agents]
    held = {normalised_id(child.id) for child in (*agents[:1], *children) if not isinstance(child, str)}
    named = [name_of_published(child) or child for child in children if isinstance(child, str)]
    return list({normalised_id(child): child for child in named if normalised_id(child) not in held}.values())
