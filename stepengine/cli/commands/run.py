"""``stepengine run``: a new run of an agent."""

from __future__ import annotations

from typing import Annotated

import attrs
import typer

from stepengine.cli.bench import choose_limits, make_engine_setup
from stepengine.cli.exits import Exit
from stepengine.cli.options import (
    AskForMore,
    CodeMode,
    Model,
    NoJournal,
    Options,
    Params,
    Sign,
    parse_json_params,
    read_text_or_stdin,
    with_shared_options,
)
from stepengine.cli.perform import print_result, run_agent_to_end
from stepengine.cli.scripts import ScriptFile
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import RunRecording
from stepengine.cli.toolset import convert_to_code_mode


@with_shared_options
def run(
    options: Options,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Id or file of the agent.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to do; - reads it from stdin.")] = "",
    *,
    params: Params = "",
    model: Model = None,
    script: ScriptFile = "",
    max_steps: Annotated[
        int, typer.Option(help="Maximum number of model steps; 0 for the agent's own limit.", min=0)
    ] = 0,
    max_cost: Annotated[
        float | None,
        typer.Option(
            help="Maximum cost of the run in US dollars; default: the agent's own limit.", metavar="USD", min=0
        ),
    ] = None,
    ask_for_more: AskForMore = False,
    journal: Annotated[
        str,
        typer.Option(
            help="Record the run in a new file instead of the state folder; RUNS.db holds many runs.",
            metavar="FILE",
        ),
    ] = "",
    no_journal: NoJournal = False,
    code_mode: CodeMode = False,
    sign: Sign = "",
) -> Exit:
    r"""
    Run an agent, and print its output.

    AGENT is an id from `stepengine agents list` or the path of an agent file. Progress is shown during the run.

    Examples:
      stepengine run code_searcher --json \
          --params '{"search_queries": [{"pattern": "def main"}]}'
      stepengine run editor "Add a docstring to shop.py" --write \
          --model anthropic/claude-sonnet-4-5
      stepengine run editor "Fix the typo" --write \
          --model llama3.2 --base-url http://localhost:11434/v1
      stepengine run ./agents/mine.py --params @params.json --cwd ../project
      git diff | stepengine run ./agents/reviewer.py -

    Record the run in a file, and resume it after a crash or a question:
      stepengine run ./agents/mine.py "Go" --journal run.jsonl
      stepengine resume run.jsonl

    End the run before it costs more than half a dollar:
      stepengine run ./agents/mine.py "Go" --max-cost 0.50

    Ask for permission to continue after 20 steps; without a terminal, the run is suspended until `stepengine
    resume`:
      stepengine run ./agents/mine.py "Go" --journal run.jsonl \
          --max-steps 20 --ask-for-more

    Let the model write a program that calls tools; each call is checked and recorded like any other:
      stepengine run ./agents/mine.py "Add up all prices" --code-mode

    Run a third-party or model-written file; its code stays inside the sandbox, and is never imported:
      stepengine run sandboxed:./downloads/theirs.py "Go"

    Models:
      anthropic/claude-sonnet-4-5     provider/model
      editor=openai/gpt-5             for one agent; others keep theirs
      llama3.2 --base-url URL         any other OpenAI-compatible server
      --api-key-env NAME, --price 0   its key, and what it costs
      --script replies.json           replies from a file, no model or key

    Keys are read from the environment; `stepengine agents models` lists the providers and their variables.
    """
    # `options` holds the options that many commands share. The parameters of this function have their own help or default,
    # so they are added to `options` here. The settings of the folder come last (`with_settings`), because `--config` selects
    # them.
    options = attrs.evolve(
        options,
        agent=agent,
        prompt=prompt,
        params=params,
        model=model,
        script=script,
        max_steps=max_steps,
        max_cost=max_cost,
        ask_for_more=ask_for_more,
        journal=journal,
        no_journal=no_journal,
        code_mode=code_mode,
    )
    return _run_and_record_agent(options.with_settings(), sign)


def _run_and_record_agent(options: Options, sign: str) -> Exit:
    """Run an agent, record the run, and print its result; return the exit code."""
    from stepengine.engine import load_agent
    from stepengine.engine.packages import get_published_id

    if options.journal and options.no_journal:
        msg = "--journal and --no-journal exclude each other"
        raise UsageProblem(msg)
    if sign and not options.journal:
        msg = "--sign needs a journal to sign; name it with --journal FILE"
        raise UsageProblem(msg)
    agent = load_agent(options.agent, folders=options.settings.agent_folders)
    if options.code_mode:
        agent = convert_to_code_mode(agent)
    params = parse_json_params(options.params)
    prompt = read_text_or_stdin(options.prompt)
    bench = make_engine_setup(options, agent, is_new=True)
    limits = choose_limits(options, agent)
    given = None
    if options.journal:
        # Without a named journal, this module is imported only after the run.
        from stepengine.cli.journals import create_journal

        given = create_journal(options.journal, sign=sign)
    with RunRecording.create(
        options, given, command="run", agent_id=get_published_id(agent), prompt=prompt
    ) as recording:
        journal = recording.journal
        run = run_agent_to_end(
            bench.engine,
            agent,
            prompt,
            bench.progress,
            on_start=recording.record_start,
            params=params,
            limits=limits,
            journal=journal,
        )
        recording.record_end(run.result)
    if journal is not None:
        options = attrs.evolve(options, journal=journal.address, stem="" if given else recording.stem)
    return print_result(run, options, bench)
