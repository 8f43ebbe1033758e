"""The page of a recorded run: ``stepengine show --html`` writes it to a file, or serves it and follows a running run."""

from __future__ import annotations

import contextlib
import os
import signal
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from stepengine.cli.bench import make_engine_setup
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import add_journal_to_options, load_recorded_agent, open_journal_or_cassette
from stepengine.cli.options import Options
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DefinitionError, JournalError, StepEngineError
from stepengine.journal.sources import get_journal_file, parse_database_path
from stepengine.workspace.calls import OWNER_FILE_MODE

if TYPE_CHECKING:
    from stepengine.debugging.viewer.rendering import PageSource
    from stepengine.engine.stepper import Stepper
    from stepengine.journal import Journal
    from stepengine.journal.history import History

MEGABYTE = 1_000_000
MAX_MB = 20
"""The largest page, in megabytes; the default of ``--max-mb``."""


@frozen(kw_only=True)
class PageOptions:
    """The options of `stepengine show --html`, with their defaults."""

    other: str = ""
    output: str = ""
    force: bool = False
    opens: bool = False
    agent: str = ""
    code: bool = True
    locals: bool = True
    max_mb: float = MAX_MB
    serve: bool = False
    port: int = 0
    title: str = ""
    strict: bool = False


def write_or_serve_page(options: Options, page_options: PageOptions) -> Exit:
    """Write the page of the run that *options* name, or serve it. Return the exit code."""
    options = add_journal_to_options(options)
    if page_options.serve and attrs.evolve(page_options, port=0, opens=False, title="") != PageOptions(serve=True):
        msg = "--serve follows one run and runs no code; of the other options, pass only --port, --open and --title"
        raise UsageProblem(msg)
    if page_options.port and not page_options.serve:
        msg = "--port is for a page that is served; add --serve"
        raise UsageProblem(msg)
    if page_options.agent and not page_options.code:
        msg = "--no-code does not run the agent's code; leave out --agent"
        raise UsageProblem(msg)
    try:
        return _serve_page(options, page_options) if page_options.serve else _write_page(options, page_options)
    except JournalError as error:
        return print_error(error.message)


# --- one page ---------------------------------------------------------------------------------------------------------


def _write_page(options: Options, page_options: PageOptions) -> Exit:
    """Write the page of one or two runs to a new file, or over an old one with ``--force``; open it if requested."""
    from stepengine.debugging.viewer.rendering import render_sources

    journals = [open_journal_or_cassette(name) for name in (options.journal, page_options.other) if name]
    target = Path(page_options.output) if page_options.output else _get_default_page_path(journals[0])
    if target.exists() and any(target.samefile(get_journal_file(journal.address)) for journal in journals):
        msg = f"{str(target)!r} is the journal itself; name another page with -o PATH"
        raise UsageProblem(msg)
    if target.exists() and not page_options.force:
        msg = f"{str(target)!r} exists already; overwrite it with --force, or name another page with -o PATH"
        raise UsageProblem(msg)
    source = _make_page_source(options, page_options)
    second = (
        _make_page_source(attrs.evolve(options, journal=page_options.other, last=False), page_options)
        if page_options.other
        else None
    )
    most = int(page_options.max_mb * MEGABYTE)
    made = render_sources(source, second, locals=page_options.locals, title=page_options.title, max_chars=most)
    size = len(made.html) / MEGABYTE
    if len(made.html) > most:
        msg = f"the page would have {size:.1f} MB, even with long texts truncated; to allow it, pass --max-mb {size + 1:.0f}"
        return print_error(msg, Exit.FAILED)
    try:
        # The page has the content of the journal, so only its owner may read it, too.
        with open(target, "w", encoding="utf-8", opener=partial(os.open, mode=OWNER_FILE_MODE)) as file:
            file.write(made.html)
    except OSError as error:
        msg = f"the page cannot be written to {str(target)!r}: {error.strerror}"
        raise UsageProblem(msg) from error
    if made.is_cut:
        print_error(
            f"long texts are truncated, because the page would be larger than {page_options.max_mb:g} MB (--max-mb)"
        )
    for reason in made.missing:
        print_error(reason)
    print(target)
    if page_options.opens:
        webbrowser.open(target.resolve().as_uri())
    return Exit.DIVERGED if page_options.strict and made.missing else Exit.COMPLETED


def _get_default_page_path(journal: Journal) -> Path:
    """Return the default path of a page: next to its journal, or next to the database of a run in one."""
    database, path = parse_database_path(journal.address), get_journal_file(journal.address)
    return path.with_name(f"{database[1]}.html") if database else path.with_suffix(".html")


def _make_page_source(options: Options, page_options: PageOptions) -> PageSource:
    """Return the journal with steppers for the agent's code, or the reason for none; with ``--force`` also a damaged journal's start."""
    from stepengine.debugging.viewer.rendering import PageSource, copy_undamaged_records
    from stepengine.journal.show import load_stored_history
    from stepengine.testing.cassette_runs import CassetteJournal

    journal = open_journal_or_cassette(options.journal)
    file = journal.address
    if isinstance(journal, CassetteJournal):
        if page_options.agent:
            msg = f"{file!r} is a cassette, which has no lines of an agent's code; leave out --agent"
            raise UsageProblem(msg)
        return PageSource(journal=journal, file=file, without="A cassette has no source lines and no variables.")
    try:
        history = load_stored_history(journal)
        # Outcomes are decoded lazily: decode all of them now, so that damage is found before the page is made.
        for result in history.results.values():
            history.outcome(result)
    except JournalError as error:
        if not page_options.force:
            raise
        whole, number = copy_undamaged_records(journal)
        damage = f"These are the records before the damage, {number} records. {error.message}"
        return PageSource(
            journal=whole, file=file, without="The journal is damaged, so no code of the agent was run.", damage=damage
        )
    if not page_options.code:
        return PageSource(
            journal=journal, file=file, without="Source lines and variables were left out with --no-code."
        )
    steppers = _make_stepper_factories(journal, history, options, page_options)
    if isinstance(steppers, str):
        return PageSource(journal=journal, file=file, without=steppers)
    return PageSource(journal=journal, file=file, steppers=steppers)


def _make_stepper_factories(
    journal: Journal, history: History, options: Options, page_options: PageOptions
) -> list[Callable[[], Stepper]] | str:
    """
    Return factories of steppers, or the reason there are none; raise if the user named an agent that cannot be loaded.

    A run of the command line has its hooks; one that was recorded by a program most likely has not.
    """
    from stepengine.cli.toolset import load_module_tools, merge_bundled_tools
    from stepengine.engine import Engine
    from stepengine.engine.agent_family import collect_agent_family
    from stepengine.engine.loader import locate_agent
    from stepengine.journal.show import get_root_agent_id
    from stepengine.tools.bundled.bundled import list_all_workspace_tools

    options = options.with_settings()
    folders = options.settings.agent_folders
    agent_id = get_root_agent_id(history)
    try:
        agent = load_recorded_agent(options, history)
        with contextlib.suppress(DefinitionError):
            print_error(f"lines and variables come from {locate_agent(options.agent or agent_id, folders=folders)}")
        ours = make_engine_setup(options, agent, performs=False, recorded=history).engine
        family = collect_agent_family(agent, options.agent, folders)
        bundled = list_all_workspace_tools(options.cwd.resolve())
        plain = Engine(family, merge_bundled_tools(load_module_tools(options, family), bundled))
    except (StepEngineError, UsageProblem) as error:
        if page_options.agent:
            raise
        # Only here, since the message names folders of this machine, and the page may be shared.
        print_error(error.message if isinstance(error, StepEngineError) else str(error))
        return f"No source lines and variables: the agent {agent_id!r} could not be loaded where this page was made."
    return [partial(engine.stepper, journal, agent=agent) for engine in (ours, plain)]


# --- a running run ----------------------------------------------------------------------------------------------------


def _serve_page(options: Options, page_options: PageOptions) -> Exit:
    """Serve the page of a run until Ctrl-C or SIGTERM; it follows a run that is running."""
    from stepengine.debugging.viewer.live_page import FollowedJournal, make_page_server

    journal = open_journal_or_cassette(options.journal)
    following = FollowedJournal(journal, journal.address, page_options.title)
    try:
        server, address = make_page_server(following, page_options.port)
    except OSError as error:
        msg = f"--port {page_options.port} cannot be used: {error.strerror}; --port 0 uses any free port"
        raise UsageProblem(msg) from error
    print(address, flush=True)
    print_error("the page follows the run until Ctrl-C")
    if page_options.opens:
        webbrowser.open(address)
    code = Exit.COMPLETED

    def terminate(*_: object) -> None:
        """Set the exit code for SIGTERM, and end the server."""
        nonlocal code
        code = Exit.TERMINATED
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGTERM, before)
    return code
