"""Scripts: files with replies in place of a model, so that a run needs no key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepengine.cli.settings import UsageProblem
from stepengine.errors import DataError

if TYPE_CHECKING:
    from stepengine.cli.options import Options
    from stepengine.testing import RunScript

ScriptFile = Annotated[
    str,
    typer.Option(
        "--script",
        help="Replies in place of a model: a list in JSON or YAML, or `replies` in a .py file.",
        metavar="FILE",
    ),
]


def refuse_script_with_server(options: Options) -> None:
    """
    Raise if both a script and a server, or its key, are given.

    Raises:
        UsageProblem: when ``--script`` is given together with ``--base-url`` or ``--api-key-env``.
    """
    if options.script and (options.base_url or options.api_key_env):
        msg = (
            f"--script and {'--base-url' if options.base_url else '--api-key-env'} exclude each other; pass one of them"
        )
        raise UsageProblem(msg)


def make_scripted_model_factory(file: str) -> Callable[[], object] | None:
    """Return a function that makes a model with the replies of a script; ``None`` without one. Raises as ``load_script``."""
    from stepengine.testing import ScriptedModel

    if not file:
        return None
    replies = load_script(file)
    return lambda: ScriptedModel(replies)


def make_run_script(file: str) -> RunScript:
    """Return a provider that answers each run with the replies of a script from its start. Raises as ``load_script``."""
    from stepengine.testing import RunScript

    return RunScript(load_script(file), source=Path(file).name)


def load_script(file: str) -> Any:
    """
    Load the replies of a script, in the form for ``ScriptedModel``.

    A ``.py`` file defines them as ``replies``. Any other file is a list, in JSON or YAML, of texts, of calls
    ``{"tool": "look", "input": {...}, "text": "..."}``, and of lists of both for one reply.

    Raises:
        UsageProblem: when the script is invalid or cannot be read.
    """
    from stepengine.evaluation.checks import load_file_member, load_json_or_yaml
    from stepengine.testing import ScriptedModel

    try:
        replies = (
            load_file_member(Path(file), "replies")
            if file.endswith(".py")
            else _parse_replies(load_json_or_yaml(Path(file)), file)
        )
        ScriptedModel(replies)
    except DataError as error:
        msg = f"--script {file!r}: {error.message}"
        raise UsageProblem(msg) from None
    return replies


def _parse_replies(replies: object, file: str) -> list[Any]:
    """Parse the replies of a script; raise ``UsageProblem`` unless they are a list."""
    if not isinstance(replies, list):
        msg = f"--script {file!r} must be a list of replies, not {type(replies).__name__}"
        raise UsageProblem(msg)
    return [_parse_reply(item, file) for item in replies]


def _parse_reply(reply: object, file: str) -> Any:
    """Parse a reply: a text, a tool call or a list of tool calls; raise ``UsageProblem`` for anything else."""
    from stepengine.testing import tool_call, tool_calls

    if isinstance(reply, str):
        return reply
    if isinstance(reply, list):
        return tool_calls(*[_parse_reply(each, file) for each in reply])
    if isinstance(reply, dict) and isinstance(reply.get("tool"), str) and set(reply) <= {"tool", "input", "text"}:
        return tool_call(reply["tool"], reply.get("input") or {}, text=str(reply.get("text") or ""))
    msg = f'--script {file!r}: a reply must be a text, a call {{"tool": "look", "input": {{}}}}, or a list of both, not {reply!r}'
    raise UsageProblem(msg)
