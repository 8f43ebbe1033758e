"""The commands that deal with journals, and their options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import attrs
import typer

from stepengine.cli.ending import EXIT_CODES, leave
from stepengine.cli.options import Agent, Config, File, Last, Options, with_options

__all__ = ("add_journal_commands",)

RESUME = f"""\
Go on with the run in FILE: answer its questions, or pick it up after a crash or Ctrl-C.

What is recorded is not done again: no model is asked twice, no tool runs twice. A run that has ended just prints its
result again. The agent is found by the id in FILE, as `stepengine run` finds ids, or given with --agent.

\b
Examples:
  stepengine resume --last --answer q3=yes
  stepengine resume run.jsonl
  stepengine resume run.jsonl --answer q3=yes
  stepengine resume run.jsonl --agent ./drafts/mine.py --in-doubt retry

\b
--in-doubt, for an effect that a crash cut off, so that nobody knows whether it happened:
  fail     the handler gets UnknownOutcome at its yield (default)
  retry    it is done again
  ask      the run is suspended with a question about it

\b
--on-divergence, for an agent that was edited since, so that it asks for something else than FILE holds:
  raise    say where, and leave with 5 (default); stop says so in the result
  keep     where FILE holds an effect of the same kind, go on with what came of it; from where FILE ends, the code runs
           as it is now. `stepengine ready FILE` says beforehand whether that works

{EXIT_CODES}"""

REPLAY = f"""\
Repeat the run in FILE from its record: no model, no tool, no network, no key.

The present code of the agent decides, the record answers. When the agent does something else than it did, the first
difference is told, with step, file, line and fields, and the exit code is 5.

With --speed the results come as fast as they did, or faster, to watch a run again. With --live some effects really
happen: call_tool and perform must come to the recorded results; call_model lets a model answer anew against the recorded
tools, and ends at the first call that was not recorded.

\b
Examples:
  stepengine replay --last
  stepengine replay run.jsonl
  stepengine replay run.jsonl --speed 4
  stepengine replay run.jsonl --live call_tool
  stepengine replay run.jsonl --live call_model --model openai/gpt-5-mini
  stepengine replay run.jsonl --agent ./agents/mine.py --json

{EXIT_CODES}"""

EXTEND = f"""\
Record the run in FILE again after its agent was changed: what is still equal is kept, the rest really happens.

Only what changed is paid for. FILE is replaced when the run has ended or waits for an answer, and stays as it is when
the run fails. What it held before is kept beside it, as run.before-1.jsonl. Effects that changed the world and do not
hold any more would happen again: that needs --allow-repeat. To go on in another file: stepengine fork.

\b
Examples:
  stepengine extend run.jsonl
  stepengine extend run.jsonl --agent ./agents/mine.py --answer q3=yes

{EXIT_CODES}"""

SEAL = """\
Make FILE valid again after it was edited by hand: show what was edited, then make its checksums anew.

Edit what a tool or a model said, seal the file, and replay it: the run takes the edited value. With --against, which names
the file as it was, the difference is told by meaning.

\b
Examples:
  stepengine seal run.jsonl
  stepengine seal run.jsonl --dry-run
  git show HEAD:./run.jsonl > before.jsonl; stepengine seal run.jsonl --against before.jsonl"""

REPAIR = """\
Keep the first records of a damaged FILE in a new file, which can be resumed. FILE itself is only read.

`stepengine check FILE` says which record is damaged, and which number to give here.

\b
Examples:
  stepengine repair run.jsonl --until 41
  stepengine repair run.jsonl --until 41 --into good.jsonl"""

FORK = f"""\
Go on from the middle of the run in FILE, in a new journal; FILE itself is only read.

AT is the last effect to keep, as `stepengine show` numbers them: 5, or 3.2#1 for effect 1 of the child 3.2. With --edit
it gets another outcome: text for a model's reply, JSON or text for a tool's result, an answer for a question; or a
whole reply or result as `stepengine show --json` prints it. With --restore-files the files that the run wrote after AT are
brought back first to what they were then, all of them or the fork is refused; see `stepengine undo --help`.

\b
Examples:
  stepengine fork --last --at 5
  stepengine fork run.jsonl --at 5
  stepengine fork run.jsonl --at 5 --restore-files
  stepengine fork run.jsonl --at 2 --edit "No such file" --into other.jsonl
  stepengine fork run.jsonl --at 4 --edit @reply.json

{EXIT_CODES}"""

UNDO = """\
Bring the files that the run in FILE and its children wrote back to what they were before it; FILE itself is only read.

All of it or nothing: when one of the files was changed since, by a person, a command or another run, nothing is done, and
the files are named. With --partial these are left, and the rest is brought back. A file that had more than 4 MiB is not
undoable, and what programs did is not undone: that is said, too.

\b
Examples:
  stepengine undo --last --dry-run
  stepengine undo --last
  stepengine undo run.jsonl --cwd project
  stepengine undo run.jsonl --at 5             what was written after effect 5

\b
Leaves with 0 when it is done, with 1 when it is refused."""

SHOW = """\
Show the run in FILE step by step: what was asked for, what came back, when, and what it cost.

Nothing is run and no agent is needed. With --step the whole model request of that step is shown, what came back, and
what was done with it; --step takes the number of a step, or an effect such as 3.2#1.

\b
Examples:
  stepengine show --last
  stepengine show run.jsonl
  stepengine show run.jsonl --step 2
  stepengine show run.jsonl --json | jq .effects"""

DIFF = """\
Show what the runs in A and B did differently: effects added, removed, changed, with other outcomes; tokens and cost.

Ids and times that differ in every run do not count. Leaves with 0 when there is no difference, with 1 when there is.

\b
Examples:
  stepengine diff before.jsonl after.jsonl
  stepengine diff before.jsonl --last          the newest run of this folder
  stepengine diff --last                       the two newest ones
  stepengine diff before.jsonl after.jsonl --json"""

CHECK = """\
Check every record of each FILE: checksums, order, fingerprints, blobs; and what looks like a key.

Nothing is run or changed. Leaves with 1 when a file is damaged or holds what looks like a secret. A run without an end
is no fault.

\b
Examples:
  stepengine check run.jsonl
  stepengine check journals/*.jsonl --json"""

TEST = """\
Replay each FILE against the present code, and say which runs came out differently, and where.

A regression suite for agents: record good runs once, keep them, and let CI test them; it needs no key and no network.
An output or a status that is not the recorded one counts, too. A folder stands for the *.jsonl files in it, an SQLite
file for its runs.

\b
Leaves with:
  0    all replays did what is recorded
  1    a file could not be replayed: it is damaged, or its agent is not found
  5    a replay did something else than its recording

\b
Examples:
  stepengine test journals/
  stepengine test journals/*.jsonl --agent ./agents/mine.py"""

READY = """\
Before a deployment: say which waiting runs would go on with the present code of their agents, and which would diverge.

A run that waits for an answer, or that a crash ended, goes on in the code of today: `stepengine resume` first repeats
what is recorded, and ends where the code asks for something else. This command does the repeating and stops there:
nothing is performed or changed, no key is needed. FILE is a journal, a folder of them, an SQLite file or a run's name;
without one, what `stepengine runs --waiting` lists. Runs that have ended do not count.

\b
For each run, and the first place that differs:
  ready      it goes on as it is
  keep       it goes on with `resume --on-divergence keep`: effects of the same kind are recorded, with other content
  diverges   effects were added, removed or exchanged: put the old code back until it has ended, or use extend or fork
  failed     it could not be tried: the journal is damaged, or its agent is not found

\b
Leaves with:
  0    every waiting run goes on; with --on-divergence keep, also those of `keep`
  1    a run could not be tried
  5    a run would diverge

\b
Examples:
  stepengine ready
  stepengine ready journals/ --agent ./agents/mine.py
  stepengine ready runs.db --on-divergence keep --json
  stepengine ready --last"""

RUNS = """\
List the runs that were recorded in this folder, newest first: name, age, status, agent, cost, prompt, open questions.

The beginning of a name stands for the run wherever a FILE is asked for; --last is the newest one. Runs lie in
$STEPENGINE_STATE_DIR, else $XDG_STATE_HOME/stepengine, else ~/.local/state/stepengine. The oldest ended ones go, by the
settings journal.keep_runs and journal.keep_bytes; a run that waits or was interrupted stays.

\b
Examples:
  stepengine runs
  stepengine runs --waiting
  stepengine runs --all --json"""

Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="Journals.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Repeat = Annotated[
    bool,
    typer.Option("--allow-repeat", help="Go on although what is cut off changed the world and may happen again."),
]
Answers = Annotated[
    list[str] | None,
    typer.Option("--answer", help="Answer to a question; may be given several times.", metavar="ID=TEXT"),
]


@with_options
def resume(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    answer: Answers = None,
    in_doubt: Annotated[str, typer.Option(help="fail, retry or ask.")] = "fail",
    on_divergence: Annotated[str, typer.Option(help="raise, stop or keep.")] = "raise",
) -> None:
    """Go on with a run; ``RESUME`` is what users read."""
    from stepengine.cli.journals import GoingOn, resume_command

    how = GoingOn(in_doubt, on_divergence)
    leave(resume_command(attrs.evolve(options, journal=file, last=last), answer or (), how))


@with_options
def replay(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    speed: Annotated[
        float, typer.Option(help="How fast results come; 1 as they did, 0 all at once.", min=0, metavar="X")
    ] = 0,
    live: Annotated[
        list[str] | None,
        typer.Option(help="Effects that really happen: call_tool, perform, call_model.", metavar="KIND"),
    ] = None,
) -> None:
    """Repeat a run; ``REPLAY`` is what users read."""
    from stepengine.cli.journals import replay_command

    leave(replay_command(attrs.evolve(options, journal=file, last=last), live or (), speed or None))


@with_options
def extend(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    allow_repeat: Repeat = False,
    answer: Answers = None,
) -> None:
    """Record a run again as far as it has changed; ``EXTEND`` is what users read."""
    from stepengine.cli.journals import extend_command

    leave(extend_command(attrs.evolve(options, journal=file, last=last), answer or (), allow_repeat=allow_repeat))


def seal(
    file: File,
    *,
    against: Annotated[str, typer.Option(help="The journal as it was before it was edited.", metavar="FILE")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what was edited.")] = False,
) -> None:
    """Make an edited journal valid; ``SEAL`` is what users read."""
    from stepengine.cli.mending import seal_command

    leave(seal_command(file, against=against, dry_run=dry_run))


def repair(
    file: File,
    *,
    until: Annotated[int, typer.Option(help="The number of the last record to keep.", metavar="N")],
    into: Annotated[str, typer.Option(help="The new journal; default: beside FILE.", metavar="FILE")] = "",
) -> None:
    """Keep the start of a damaged journal; ``REPAIR`` is what users read."""
    from stepengine.cli.mending import repair_command

    leave(repair_command(file, until=until, into=into))


@with_options
def fork(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[str, typer.Option(help="The last effect to keep.", metavar="N|PATH#N")],
    edit: Annotated[
        str | None, typer.Option(help="Another outcome for it: text, JSON, or @FILE.", metavar="TEXT|JSON|@FILE")
    ] = None,
    into: Annotated[str, typer.Option(help="The new journal; default: beside FILE.", metavar="FILE")] = "",
    allow_repeat: Repeat = False,
    restore_files: Annotated[
        bool, typer.Option("--restore-files", help="First bring back the files that were written after N.")
    ] = False,
    answer: Answers = None,
) -> None:
    """Go on from the middle of a run; ``FORK`` is what users read."""
    from stepengine.cli.journals import Branch, fork_command

    branch = Branch(at, edit, into, allow_repeat, restore_files)
    leave(fork_command(attrs.evolve(options, journal=file, last=last), branch, answer or ()))


def undo(
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[
        str, typer.Option(help="The last effect whose writes stay; default: none.", metavar="N|PATH#N")
    ] = "-1",
    cwd: Annotated[
        Path | None, typer.Option(help="Folder that the tools worked in; default: as the run was started.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Leave the files that were changed since, and bring back the rest.")
    ] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="The folder stands at another place than when the run wrote.")
    ] = False,
    allow_protected: Annotated[
        list[str] | None,
        typer.Option(help="Protected files that may be brought back, such as .github/workflows/.", metavar="PATTERN"),
    ] = None,
) -> None:
    """Undo what a run wrote; ``UNDO`` is what users read."""
    from stepengine.cli.undoing import undo_command

    how = {"at": at, "dry_run": dry_run, "partial": partial, "moved": moved, "allow_protected": allow_protected or ()}
    leave(undo_command(file, last=last, cwd=cwd, **how))


def show(
    file: File = "",
    *,
    last: Last = False,
    step: Annotated[str, typer.Option(help="Show one step, or one effect, whole.", metavar="N|PATH#N")] = "",
    as_json: Json = False,
) -> None:
    """Show a run; ``SHOW`` is what users read."""
    from stepengine.cli.showing import show_command

    leave(show_command(file, last=last, step=step, as_json=as_json))


def diff(a: File = "", b: File = "", *, last: Last = False, as_json: Json = False) -> None:
    """Compare two runs; ``DIFF`` is what users read."""
    from stepengine.cli.inspecting import diff_command

    leave(diff_command(a, b, last=last, as_json=as_json))


def check(files: Files, *, as_json: Json = False) -> None:
    """Check journals; ``CHECK`` is what users read."""
    from stepengine.cli.inspecting import check_command

    leave(check_command(files, as_json=as_json))


def suite(files: Files, *, agent: Agent = "", as_json: Json = False, config: Config = None) -> None:
    """Replay journals; ``TEST`` is what users read."""
    from stepengine.cli.inspecting import test_command

    leave(test_command(files, agent=agent, as_json=as_json, config=config))


@with_options
def ready(
    options: Options,
    files: Annotated[list[str] | None, typer.Argument(metavar="[FILE...]", help="Journals, or names of runs.")] = None,
    *,
    last: Annotated[
        bool, typer.Option("--last", help="The newest run of this folder that waits, in place of FILE.")
    ] = False,
    on_divergence: Annotated[str, typer.Option(help="raise or keep, as it will be given to resume.")] = "raise",
) -> None:
    """Try waiting runs; ``READY`` is what users read."""
    from stepengine.cli.inspecting import ready_command

    leave(ready_command(attrs.evolve(options, last=last), files or (), on_divergence))


def runs(
    *,
    everywhere: Annotated[bool, typer.Option("--all", help="Those of all folders.")] = False,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those that can be gone on with.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the recorded runs; ``RUNS`` is what users read."""
    from stepengine.cli.inspecting import runs_command

    leave(runs_command(everywhere=everywhere, waiting=waiting, as_json=as_json))


def add_journal_commands(app: typer.Typer) -> None:
    """Add the commands to *app*."""
    commands: dict[str, tuple[Callable[..., None], str]] = {
        "runs": (runs, RUNS),
        "resume": (resume, RESUME),
        "replay": (replay, REPLAY),
        "show": (show, SHOW),
        "fork": (fork, FORK),
        "undo": (undo, UNDO),
        "extend": (extend, EXTEND),
        "diff": (diff, DIFF),
        "check": (check, CHECK),
        "test": (suite, TEST),
        "ready": (ready, READY),
        "seal": (seal, SEAL),
        "repair": (repair, REPAIR),
    }
    for name, (command, text) in commands.items():
        app.command(name, help=text)(command)
