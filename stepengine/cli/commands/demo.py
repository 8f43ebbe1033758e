"""
``stepengine demo``: the agent ``editor`` on a small project, with recorded replies.

The replies of the model come from a cassette, through the real SDK and the real codec. Everything else is live: the handler decides,
and the tools read and edit the files of a temporary copy of the project.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.bench import make_progress_display
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import Config, Options, Quiet
from stepengine.cli.perform import FinishedRun, run_agent_to_end
from stepengine.cli.screen.render import format_cost, print_visible, wrap_lines
from stepengine.data.usage import Usage

if TYPE_CHECKING:
    from stepengine.cli.screen.progress import ProgressDisplay
    from stepengine.data.definition import AgentDefinition

HERE = Path(__file__).parents[1] / "_demo"
CASSETTE = HERE / "cassette.yaml"
SAMPLE = ".sample"
"""The suffix that keeps linters, type checkers and test collectors away from the sample project."""
MODEL = "anthropic/demo"
HOST = "http://demo.localhost"
PROMPT = "Give orders of 100 or more a discount of 10 % in total(), and say so in the README."
PARAMS = {"files": ["shop.py", "README.md"]}
# The schemas of tools are made by pydantic and may differ between its versions; they are no part of what is shown here.
IGNORED = ("/tools",)
HANG = 4
CAUSE = """\
This handler caused the last edit: it read shop.py again, found a syntax error, and sent it to the model.
"""
LIVE = "anthropic/claude-sonnet-4-5"
NEXT = f"""\
Next:
  stepengine init my-agent
      create a project with an agent, tests, a recorded run and CI
  stepengine agents list
      list the agents that you can run
  stepengine run code_searcher \\
      --params '{{"search_queries": [{{"pattern": "def "}}]}}'
      run an agent that needs no model
  export ANTHROPIC_API_KEY=...
  stepengine run editor "..." --write --model {LIVE}
      run the agent of this demo on your files
  stepengine run editor "..." --write --model llama3.2 \\
      --base-url http://localhost:11434/v1
      the same with Ollama, without a key"""


def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the edited copy of the project and print its path.")
    ] = False,
    quiet: Quiet = False,
    config: Config = None,
) -> Exit:
    """
    Watch an agent edit a small project, without a key.

    The model's replies come from a recording, through the real SDK. The tools read and edit real files in a
    temporary copy. One recorded reply contains a mistake: the handler finds it and has the model fix it.

    Examples:
      stepengine demo
      stepengine demo --keep
    """
    from stepengine.testing import Cassette, CassetteMiss, ReplayTransport

    progress = make_progress_display(Options(agent="editor", quiet=quiet, config=config).with_settings())
    folder = Path(tempfile.mkdtemp(prefix="stepengine-demo-")) if keep else None
    cassette = Cassette.load(CASSETTE, ignore=IGNORED, hint="python -m cassettes.record_demo")
    _print_introduction()
    try:
        run = run_demo(ReplayTransport(cassette), progress, folder)
    except CassetteMiss as miss:
        return print_error(str(miss), Exit.DIVERGED)
    if progress is not None:
        progress.print_run_summary(run.result)
    if run.code is not Exit.COMPLETED:
        return print_error(f"the demo ended as {run.result.status.value}: {run.result.error}", run.code)
    _print_changes_and_next_steps(run.result.output["diff"], _explain_demo_cost(run.result.usage))
    if folder is not None:
        print(f"\nThe edited project is in {folder}")
    return Exit.COMPLETED


def copy_sample_project(target: Path) -> None:
    """Copy the sample project into the folder *target*."""
    for file in sorted((HERE / "project").iterdir()):
        if file.suffix == SAMPLE:
            (target / file.stem).write_bytes(file.read_bytes())


def run_demo(transport: object, progress: ProgressDisplay | None = None, folder: Path | None = None) -> FinishedRun:
    """
    Run ``editor`` on a copy of the sample project.

    Args:
        transport: Answers the model's requests; an ``httpx2.AsyncBaseTransport``.
        progress: The progress display; ``None`` for none.
        folder: The folder for the copy; by default a temporary one that is removed at the end.
    """
    from stepengine.engine import Engine
    from stepengine.models import AnthropicProvider
    from stepengine.tools.bundled import file_tools, search_tools

    with ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepengine-demo-")))
        copy_sample_project(root)
        editor = attrs.evolve(_load_editor(), model=MODEL)
        provider = AnthropicProvider(api_key="demo", base_url=HOST, transport=transport)
        engine = Engine(
            [editor],
            [*file_tools(root, write=True), *search_tools(root)],
            {"anthropic": provider},
            # Replies are streamed when somebody watches, and the recording holds streams.
            observers=[progress or (lambda _: None)],
            pricing=lambda *_: Decimal(0),
        )
        return run_agent_to_end(engine, editor, PROMPT, progress, params=PARAMS)


def _explain_demo_cost(usage: Usage) -> str:
    """Return a text about the cost of the demo, which is nothing, and the estimated cost with a live model."""
    from stepengine.models.pricing import LIST_PRICES

    live = LIST_PRICES(LIVE, usage, datetime.now(UTC))
    about = "" if live is None else f" Live, with {LIVE}, it would have cost about {format_cost(live)}."
    return f"This cost nothing: the replies are a recording.{about}"


def _print_introduction() -> None:
    """Print the request and the files of the demo."""
    print_visible("A generator agent edits a small project. The model's replies are recorded; the rest runs live.\n")
    print_visible(f"  request   {PROMPT}", hanging_indent=10)
    print_visible(f"  files     {', '.join(PARAMS['files'])}, in a temporary copy\n", hanging_indent=10)


def _print_changes_and_next_steps(diff: str, cost: str) -> None:
    """Print the diff of the demo, the source of its handler, its cost and the next commands."""
    from rich.console import Console
    from rich.text import Text

    from stepengine.cli.screen.progress import style_diff_lines

    console = Console(highlight=False)

    def print_styled(text: str, style: str = "", *, hang: int = 0) -> None:
        """Print a text in a style; on a terminal, it is wrapped with the indent *hang*."""
        line = wrap_lines(text, console.width, hang) if console.is_terminal else text
        # Wrapped above, with the indent of its kind; rich would break it once more, without one.
        console.print(Text(line, style=style), soft_wrap=True)

    print_styled("\nWhat changed", "bold")
    for line, style in style_diff_lines(diff):
        print_styled(line, style, hang=HANG)
    print_styled("\nThe handler of the agent (agents/editor.py)", "bold")
    print_styled(inspect.getsource(_load_editor().handle_steps or run_demo), hang=HANG)
    print_styled(CAUSE)
    print_styled(f"{cost}\n")
    print_styled(NEXT.replace("stepengine ", f"{_get_command_name()} "))


def _get_command_name() -> str:
    """Return the name of this command for the user's shell: its name, or its path if it is not on ``PATH``."""
    called = sys.argv[0]
    return "stepengine" if Path(called).name != "stepengine" or shutil.which("stepengine") else called


def _load_editor() -> AgentDefinition:
    """Return the bundled agent ``editor``, even if the working folder has one of that name."""
    from stepengine.engine.loader import find_bundled_agent

    found = find_bundled_agent("editor")
    assert found is not None  # noqa: S101 - the package has it
    return found
