"""The options that commands share, with their types and help texts."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Container, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_origin, get_type_hints

import attrs
import typer
from attrs import frozen

from stepengine.cli.exits import Exit
from stepengine.cli.settings import UsageProblem, load_settings
from stepengine.data.definition import normalised_id
from stepengine.data.json import make_object_with_unique_keys
from stepengine.data.quantities import parse_age
from stepengine.engine.settings import Settings
from stepengine.workspace.file_formats import read_regular_file

T = TypeVar("T")
MAX_VALUE_FILE_BYTES = 64 * 1024 * 1024
"""Limit of a file that an option names as ``@FILE``: more than a record holds, but a wrong path does not read a whole disk."""
AGENT_MODEL = re.compile(r"([A-Za-z0-9_-]+)=(.+)", re.DOTALL)
File: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A journal, or the beginning of a run's name in `stepengine runs`; RUNS.db#RUN in an SQLite file.",
    ),
]
Recorded: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A journal, a cassette (.yaml), or the beginning of a run's name in `stepengine runs`; RUNS.db#RUN in an SQLite file.",
    ),
]
Agent: TypeAlias = Annotated[
    str, typer.Option(help="File or id of the agent; default: the id in FILE.", metavar="PATH|ID")
]
BaseUrl: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Base URL of an OpenAI-compatible server (Chat Completions); --model names the model.", metavar="URL"
    ),
]
ApiKeyEnv: TypeAlias = Annotated[
    str,
    typer.Option(help="Environment variable with the key for --base-url; by default no key is sent.", metavar="NAME"),
]
Price: TypeAlias = Annotated[
    str,
    typer.Option(
        help="US dollars per million input and output tokens, for models without a known price; 0 is free.",
        metavar="USD|IN/OUT",
    ),
]
Config: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", help="Trusted settings file; see `stepengine config show`.", metavar="FILE"),
]
Last: TypeAlias = Annotated[bool, typer.Option("--last", help="The newest run of this folder, in place of FILE.")]
Params: TypeAlias = Annotated[str, typer.Option(help="Params as JSON, or @FILE.", metavar="JSON|@FILE")]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def parse_age_option(option: str, text: str) -> timedelta:
    """
    Parse the value of an age option, such as ``--older-than 30d``.

    Raises:
        UsageProblem: when *text* is not an age.
    """
    try:
        return parse_age(text)
    except ValueError as error:
        msg = f"{option} {error}"
        raise UsageProblem(msg) from None


def make_unique_dict(option: str, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """
    Return the names and values of a repeated option as a dict; raise ``UsageProblem`` for a repeated name.

    Raises:
        UsageProblem: when a name has two values.
    """
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            msg = f"{option} is given twice{f' for {name!r}' if name else ''}; pass one of them"
            raise UsageProblem(msg)
        found[name] = value
    return found


def _wrap_in_list(given: str | list[str] | None) -> list[str] | None:
    """Return a text as a list with one item, and any other value unchanged."""
    return [given] if isinstance(given, str) else given


@frozen(kw_only=True)
class Options:
    """
    The typed options of a command that runs an agent; all such commands have the annotated ones.

    Attributes:
        journal: The journal.
        no_journal: Whether a new run is not recorded.
        last: Whether the newest run was named in place of a journal.
        stem: The name of a run in the state folder; ``""`` for a journal elsewhere.
        served: The models that a recorded run requested from *base_url*.
        code_mode: Whether the model calls the tools of the agent from programs.
        script: The file with replies in place of models; ``""`` to call models.
        ask_for_more: Whether limits ask for more before they end a run.
        asks: Whether a person is asked about calls that change something if no policy is set, as in a chat.
        policy: The ``Policy`` that replaces the policy of the settings; ``None`` for the settings.
        chat_policy: The mode and session rules of a recorded chat, as a ``Policy``; ``None`` if it has none.
        buffers: The files that are open in the editor; ``None`` for the files on disk.
        place: The ``Workspace`` that *workspace* names; ``bench`` makes it.
        terminals: The terminals of the editor for commands; ``None`` to start processes here.
        settings: The settings; ``with_settings`` loads them.
    """

    agent: Agent = ""
    prompt: str = ""
    params: str = ""
    model: Annotated[
        list[str] | None,
        typer.Option(help="Replace the recorded model, for all agents or for one.", metavar="MODEL|AGENT=MODEL"),
    ] = attrs.field(default=None, converter=_wrap_in_list)
    base_url: BaseUrl = ""
    api_key_env: ApiKeyEnv = ""
    price: Price = ""
    cwd: Annotated[Path, typer.Option(help="Working folder of the tools.")] = Path()
    workspace: Annotated[
        str,
        typer.Option(
            help="Run the tools elsewhere: docker:IMAGE (the folder becomes /workspace), ssh:HOST:/FOLDER ...",
            metavar="KIND:WHERE",
        ),
    ] = ""
    write: Annotated[
        bool, typer.Option("--write", help="Allow tools to change files in the folder without asking.")
    ] = False
    shell: Annotated[
        bool, typer.Option("--shell", help="Allow tools to run programs and command lines of bash without asking.")
    ] = False
    web: Annotated[
        str,
        typer.Option(
            help="Allow tools to read the public web, with this SearXNG instance for searches.", metavar="URL"
        ),
    ] = ""
    guard: Annotated[
        str, typer.Option(help="Ask before third-party text decides the target of an effect.", metavar="injection")
    ] = ""
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with the whole result.")] = False
    max_steps: int = 0
    max_cost: float | None = None
    quiet: Quiet = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show thinking, complete inputs and log lines.")] = (
        False
    )
    journal: str = ""
    no_journal: bool = False
    last: bool = False
    stem: str = ""
    served: tuple[str, ...] = ()
    code_mode: bool = False
    script: str = ""
    ask_for_more: bool = False
    asks: bool = False
    policy: Any = None
    chat_policy: Any = None
    buffers: Any = None
    terminals: Any = None
    place: Any = None
    config: Config = None
    settings: Settings = Settings()

    @property
    def models(self) -> dict[str, str]:
        """The typed models by agent; the key ``""`` has the model of all other agents."""
        split = [(one, AGENT_MODEL.fullmatch(one)) for one in self.model or () if one]
        named = [(normalised_id(found[1]), found[2]) if found else ("", one) for one, found in split]
        return make_unique_dict("--model", named)

    @property
    def main_model(self) -> str:
        """The typed model of all agents; ``""`` if none was typed."""
        return self.models.get("", "")

    def with_settings(self) -> Options:
        """
        Load the settings of the working folder, and return the options with them.

        Raises:
            UsageProblem: when they cannot be read.
        """
        return attrs.evolve(self, settings=load_settings(self.config))


def with_shared_options(command: Callable[..., Exit], *, without: Container[str] = ()) -> Callable[..., Exit]:
    """
    Return *command* with the shared options of ``Options`` in its signature, for typer.

    The first argument of *command* receives them as ``Options``. Options in *without* are not offered and have their defaults.
    """
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    hints = get_type_hints(Options, include_extras=True)
    shared = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
        for field in attrs.fields(Options)
        if get_origin(hint := hints[field.name]) is Annotated
        and field.name not in without
        and field.name not in [each.name for each in own]
    ]

    def run_with_options(**given: Any) -> Exit:
        """Collect the shared options into ``Options``, and call the command with them."""
        options = Options(**{each.name: given.pop(each.name, each.default) for each in shared})
        return command(options, **given)

    run_with_options.__doc__ = command.__doc__
    run_with_options.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return run_with_options


Model: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        help="Model of every agent of the run, or of one of them; default: the agent's own model, else STEPENGINE_MODEL.",
        metavar="MODEL|AGENT=MODEL",
    ),
]
CodeMode: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--code-mode", help="Let the model call tools from programs that it writes; needs the extra `programs`."
    ),
]
AskForMore: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--ask-for-more", help="At a limit of steps, tokens or dollars, ask for a higher limit before the run ends."
    ),
]
NoJournal: TypeAlias = Annotated[bool, typer.Option("--no-journal", help="Do not record the run.")]
Sign: TypeAlias = Annotated[
    str,
    typer.Option(
        "--sign",
        help="Private key to sign the journal with; `stepengine journal check --key` verifies it.",
        metavar="KEY",
    ),
]
Files = Annotated[list[str], typer.Argument(metavar="FILE", help="Journals.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Repeat = Annotated[
    bool,
    typer.Option(
        "--allow-repeat", help="Continue although dropped effects changed the outside world and may happen again."
    ),
]
TrustJournal: TypeAlias = Annotated[
    bool, typer.Option("--trust-journal", help="Trust FILE as a journal of your own, whoever wrote it.")
]
Answers = Annotated[
    list[str] | None,
    typer.Option("--answer", help="Answer to a question; may be repeated.", metavar="ID=TEXT"),
]


def read_text_or_stdin(text: str, max_chars: int = -1) -> str:
    """
    Return a typed text, or for ``-`` the text of stdin, up to *max_chars* characters.

    Raises:
        UsageProblem: when stdin is not text in the encoding of the terminal.
    """
    if text != "-":
        return text
    try:
        return sys.stdin.read(max_chars)
    except UnicodeDecodeError as error:
        msg = f"stdin is not text in the encoding {sys.stdin.encoding}: {error.reason}; convert it, as with `iconv`"
        raise UsageProblem(msg) from None


def read_value_file(file: str, option: str) -> str:
    """
    Return the text of the file that an option names as ``@FILE``.

    Raises:
        UsageProblem: when it is not a regular file, not text, too large, or cannot be read.
    """
    try:
        data = read_regular_file(file, MAX_VALUE_FILE_BYTES)
        if len(data) <= MAX_VALUE_FILE_BYTES:
            return data.decode()
        why = f"it has more than {MAX_VALUE_FILE_BYTES:,} bytes"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = str(error)
    msg = f"{option} {file!r} cannot be read: {why}"
    raise UsageProblem(msg)


def parse_json_params(text: str, option: str = "--params") -> dict[str, Any] | None:
    """
    Parse the JSON object in *text*, or in the file that ``@FILE`` names; ``None`` for an empty text.

    Raises:
        UsageProblem: when it is not a JSON object, or there is no such file.
    """
    if not text:
        return None
    source = option
    if text.startswith("@"):
        source = text[1:]
        text = read_value_file(source, option)
    try:
        params = json.loads(text, object_pairs_hook=make_object_with_unique_keys)
    except (ValueError, RecursionError) as error:
        msg = f'{source} is not JSON: {error}. Pass an object such as \'{{"files": ["shop.py"]}}\', or @FILE'
        raise UsageProblem(msg) from None
    if not isinstance(params, dict):
        msg = f'{source} is JSON, but not an object such as \'{{"files": ["shop.py"]}}\''
        raise UsageProblem(msg)
    return params
