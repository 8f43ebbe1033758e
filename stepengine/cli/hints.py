"""The command that goes on with a run, with every option that it needs to be given again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stepengine.errors import DefinitionError, JournalError

if TYPE_CHECKING:
    from stepengine.cli.options import Options

__all__ = ("needs_agent", "options_again", "resume_hint")


def resume_hint(options: Options, agent_id: str = "") -> str:
    """
    Return the command that goes on with the run in ``options.journal``.

    Args:
        options: What the run was started with.
        agent_id: The id of its agent; where the id leads to the same file, the file is not named.
    """
    # Without a word about what was cut off, resuming would end the run with `UnknownOutcome`, for good.
    asking = ["--in-doubt ask"] if _is_in_doubt(options.journal) else []
    # Beside a run that has a name of its own lies what it was started with.
    named = [options.stem] if options.stem else [shlex.quote(options.journal), *options_again(options, agent_id)]
    return " ".join(["stepengine resume", *named, *asking])


def _is_in_doubt(journal: str) -> bool:
    from stepengine.journal import as_journal
    from stepengine.journal.questions import in_doubt

    try:
        return bool(in_doubt(as_journal(journal).history()))
    except JournalError:
        return False


def options_again(options: Options, agent_id: str = "") -> list[str]:
    """Return the options that a command on the same journal needs; the model stands in the journal."""
    again: list[str] = []
    if options.agent and needs_agent(options.agent, agent_id, options.settings.agent_folders):
        again += ["--agent", shlex.quote(options.agent)]
    if options.base_url:
        again += ["--base-url", shlex.quote(options.base_url)]
    if options.cwd != Path():
        again += ["--cwd", shlex.quote(str(options.cwd))]
    if options.web:
        again += ["--web", shlex.quote(options.web)]
    if options.config is not None:
        again += ["--config", shlex.quote(str(options.config))]
    return again + ["--write"] * options.write + ["--shell"] * options.shell


def needs_agent(given: str, agent_id: str, folders: Iterable[Path] = ()) -> bool:
    """Return whether the id in a journal does not lead to the agent that was given."""
    from stepengine.engine import load_agent

    if given == agent_id:
        return False
    if not agent_id or Path(agent_id).exists():
        return True
    try:
        return load_agent(agent_id, folders=folders) is not load_agent(given, folders=folders)
    except DefinitionError:
        return True
