"""``stepengine run``: a new run of an agent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.bench import bench_for, limits_of
from stepengine.cli.exits import Exit
from stepengine.cli.options import (
    AskForMore,
    CodeMode,
    Model,
    NoJournal,
    Options,
    Params,
    Sign,
    read_params,
    with_options,
)
from stepengine.cli.perform import perform, print_result
from stepengine.cli.recording import RunRecording
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem
from stepengine.cli.toolset import in_code_mode

if TYPE_CHECKING:
    from stepengine.journal import Journal

__all__ = ("run",)


@with_options
def run(
    options: Options,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Id or file of the agent.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to do; - reads it from stdin.")] = "",
    *,
    params: Params = "",
    model: Model = None,
    script: ScriptFile = "",
    max_steps: Annotated[
        int, typer.Option(help="Model steps that the run may take; 0 for the agent's own limit.", min=0)
    ] = 0,
    ask_for_more: AskForMore = False,
    journal: Annotated[
        str,
        typer.Option(
            help="Record the run into a new file, in place of the user's state folder; RUNS.db holds many runs.",
            metavar="FILE",
        ),
    ] = "",
    no_journal: NoJournal = False,
    code_mode: CodeMode = False,
    sandboxed: Annotated[
        bool,
        typer.Option(
            "--sandboxed", help="AGENT is a stranger's file: do not import it, run its handler in the sandbox."
        ),
    ] = False,
    sign: Sign = "",
) -> Exit:
    r"""
    Run an agent, and print its output.

    AGENT is an id, as `stepengine agents list` lists them, or the path of an agent file. Progress is shown while it runs.

    Examples:
      stepengine run code_searcher --json \
          --params '{"search_queries": [{"pattern": "def main"}]}'
      stepengine run editor "Add a docstring to shop.py" --write \
          --model anthropic/claude-sonnet-4-5
      stepengine run editor "Fix the typo" --write \
          --model llama3.2 --base-url http://localhost:11434/v1
      stepengine run ./agents/mine.py --params @params.json --cwd ../project
      git diff | stepengine run ./agents/reviewer.py -

    Recorded where you say, and resumed after a crash or a question:
      stepengine run ./agents/mine.py "Go" --journal run.jsonl
      stepengine resume run.jsonl

    Asked whether it may go on where it has taken 20 steps; without a terminal, a recording waits for `stepengine resume`:
      stepengine run ./agents/mine.py "Go" --journal run.jsonl \
          --max-steps 20 --ask-for-more

    Twenty lookups in one step, by a program that the model writes; each of its calls is asked about and recorded as any other:
      stepengine run ./agents/mine.py "Add up all prices" --code-mode

    A file that somebody else wrote, or a model: nothing of it runs outside of the sandbox (`sandboxed:FILE` says the same):
      stepengine run ./downloads/theirs.py "Go" --sandboxed

    Models:
      anthropic/claude-sonnet-4-5     provider/model
      editor=openai/gpt-5             for one agent, also beside one for all
      llama3.2 --base-url URL         anything else that speaks Chat Completions
      --api-key-env NAME, --price 0   its key, and what it costs
      --script replies.json           no model, no key: replies from a file

    Keys come from the environment; `stepengine agents models` lists the providers and their variables.
    """
    # Made part of the agent's name, since everything from here on goes by that: what loads it, what is recorded, and
    # `resume`, which has to put the file into the sandbox again without being told.
    if sandboxed:
        agent = _in_sandbox(agent)
    # `options` holds what many commands take. What stands in the signature above has a help or a default of this
    # command's own, so it came apart from them, and is put in here: everything below then reads one value. The settings
    # of the folder come last (`in_force`), since `--config` says which these are.
    options = attrs.evolve(
        options,
        agent=agent,
        prompt=prompt,
        params=params,
        model=model,
        script=script,
        max_steps=max_steps,
        ask_for_more=ask_for_more,
        journal=journal,
        no_journal=no_journal,
        code_mode=code_mode,
    )
    return _run(options.in_force(), sign)


def _in_sandbox(agent: str) -> str:
    from stepengine.engine.loading import IN_SANDBOX, AgentPlace

    place = AgentPlace.of_text(agent)
    if place is None:
        msg = f"--sandboxed takes the path of an agent file, such as ./agents/{agent}.py, not {agent!r}"
        raise UsageProblem(msg)
    return agent if place.sandboxed else f"{IN_SANDBOX}{agent}"


def _run(options: Options, sign: str) -> Exit:
    from stepengine.engine import load_agent
    from stepengine.engine.packages import id_of

    if options.journal and options.no_journal:
        msg = "--journal and --no-journal exclude each other"
        raise UsageProblem(msg)
    if sign and not options.journal:
        msg = "--sign says by which key; name the journal that is signed with --journal FILE"
        raise UsageProblem(msg)
    agent = load_agent(options.agent, folders=options.settings.agent_folders)
    if options.code_mode:
        agent = in_code_mode(agent)
    params = read_params(options.params)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    bench = bench_for(options, agent, is_new=True)
    limits = limits_of(options, agent)
    given = _new_journal(options.journal, sign) if options.journal else None
    with RunRecording.begun(options, given, command="run", agent_id=id_of(agent), prompt=prompt) as recording:
        journal = recording.journal
        run = perform(
            bench.engine,
            agent,
            prompt,
            bench.progress,
            started=recording.started,
            params=params,
            limits=limits,
            journal=journal,
        )
        recording.ended(run.result)
    if journal is not None:
        from stepengine.cli.journals import name_of

        options = attrs.evolve(options, journal=name_of(journal), stem="" if given else recording.stem)
    return print_result(run, options, bench)


def _new_journal(path: str, sign: str) -> Journal:
    # What is typed about journals is loaded for who names one, and otherwise when the run has ended.
    from stepengine.cli.journals import new_journal

    return new_journal(path, sign=sign)
