# ruff: noqa: INP001
"""Write the tables of events, errors and limits: ``python docs/make_reference_tables.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import docstring_parser

from stepengine import errors
from stepengine.cli.exits import choose_exit_code
from stepengine.data.events import EVENTS
from stepengine.data.limits import DEFAULT_LIMITS, NAMES, Limits
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.errors import StepEngineError
from stepengine.helpers.calls import WORTH_ANOTHER_TRY
from stepengine.server import problem_of
from stepengine.testing import CassetteMiss, CassetteUnused

EVENTS_PAGE = Path(__file__).parent / "reference" / "stepengine.events.md"
EVENTS_TEXT = """\
# stepengine.events: events

All events of a run, with their names in JSON.

The table is made from `EVENTS` by `python docs/make_reference_tables.py`. A recorded event has the same path, number and type when it is
read from a [journal](../journals.md#following-a-run-of-another-process). The other events come from the process that performs the run.

{table}

```{{names}} stepengine.events
The site lists the public names of this module here. A checkout shows them with
`python -m pydoc stepengine.events`, or builds the site with `python -m sphinx docs site`.
```
"""


ERRORS_PAGE = EVENTS_PAGE.with_name("stepengine.errors.md")
ERRORS_TEXT = """\
# stepengine.errors: errors

All errors of the package, with what to do about each.

The table is made from the classes by `python docs/make_reference_tables.py`. Each message says what happened and where, and often names
the line of code or the command that helps.

- **HTTP** is the status with which `stepengine serve` answers. 500 means that the agent or the server is at fault.
- **exit** is the exit code of a command whose run ends with the error.
- `CassetteMiss` and `CassetteUnused` are in `stepengine.testing`, the others in `stepengine.errors`.
- **again** marks the errors that [`retry`](../retries.md) repeats by default. The engine itself repeats a `ModelError` that is `retryable`.

{table}

```{{names}} stepengine.errors
The site lists the public names of this module here. A checkout shows them with
`python -m pydoc stepengine.errors`, or builds the site with `python -m sphinx docs site`.
```
"""
LIMITS_PAGE = Path(__file__).parent / "cost.md"
REMEDIES = {
    "StepEngineError": "Read the message. The classes below say more.",
    "AgentError": "Change the agent or the call.",
    "DefinitionError": "Change the definition, the tool or the engine as the message says.",
    "InputError": "Send a prompt and params that fit the agent's schema. `issues` has a line for each field.",
    "HandlerError": "Correct the handler, hook or prompt at `location`.",
    "BadYield": "Yield what the table of [Agent loop](step-order.md) lists, at `location`.",
    "ToolNotAvailable": "Add the tool to the agent's `tools`, or call one of `available`.",
    "ToolInputError": "Call the tool with an input that fits its schema. `issues` has a line for each field.",
    "OutputMissing": "Return a value that fits `output_schema`, or let the model call `set_output`.",
    "PerformError": "Correct the function, or let it return JSON.",
    "ChildError": "Read `status` and the error in `__cause__`, or yield `AgentCall` without `from` for a result.",
    "ExternalAgentError": "Start the program of the external agent at a terminal, and sign in there if `kind` is `auth_required`.",
    "RaceLost": "Nothing. No handler sees it.",
    "ModelError": "Read `kind` and `status`. Wait and try again if it is `retryable`, or name a fallback model.",
    "UnknownModel": "Write the model as `provider/model`. `stepengine agents models` lists what is known.",
    "MissingKey": "Set the environment variable that the message names, or pass the key to the engine.",
    "TruncatedReply": "Try again. Nothing of the reply counts.",
    "ContextOverflow": "Shorten the conversation with a [context policy](../context-policies.md).",
    "ToolError": "Read `result`, and correct the tool or its input.",
    "ToolServerError": "Start the server of tools again. `stepengine mcp inspect` shows whether it answers.",
    "PermissionDenied": "Change the [permission rules](../permissions.md), or approve the call.",
    "PathOutsideRoot": "Use a path inside the root folder, or give the tool another root.",
    "BlockedAddress": "Use a public address, or allow this one in the web tools.",
    "LimitExceeded": "Raise the limit that `kind` names, or set `Limits(ask=True)` to be asked.",
    "LimitReached": "Return what there is. A handler that catches it may tidy up.",
    "TranscriptError": "Give each tool call one result, behind the message with the call.",
    "DataError": "Correct the value at `path`.",
    "SecretFound": "Remove the secret, or replace it with a redaction rule. If it is none, pass its hash as `allow_secrets`.",
    "SessionError": "Read the message. The classes below say more.",
    "SessionConflict": "Read the session again, then repeat the turn.",
    "AnswerRejected": "Answer one of the open questions. `stepengine runs` lists them.",
    "JournalError": "Read the message. The classes below say more.",
    "JournalCorrupt": "Run `stepengine journal check`, then `stepengine journal repair`.",
    "JournalLocked": "Wait until the process `pid` on `host` has ended, or send it the input.",
    "JournalMissing": "Check the path. `beside` names the journals that are there.",
    "JournalVersion": "Upgrade stepengine.",
    "JournalWriteFailed": "Make room on the disk, or check its permissions, then resume the run.",
    "ReplayDivergence": "Compare `diff` with the code at `site`, or resume with the version that recorded the run.",
    "UndoRefused": "Look at `files`. They changed after the run wrote them.",
    "WorkspaceLost": "Start the container or the host again, then resume the run.",
    "UnknownOutcome": "Find out whether it happened, then resume with `in_doubt=` or an answer.",
    "DatabaseUnavailable": "Check the URL and that the database is running. Workers reconnect by themselves.",
    "ExecutorBusy": "Start the worker with another `executor`, or stop the process that has this one.",
}
"""What to do about each error, in one or two sentences."""
OF_TESTS = {
    CassetteMiss: "Compare the request with `candidates`, or record the test again.",
    CassetteUnused: "Record the test again, or accept unused interactions with `allow_unused=True`.",
}
"""The errors of recorded tests, in ``stepengine.testing``, each with what to do about it."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"| {' | '.join(line)} |" for line in lines])


def summary(cls: type) -> str:
    """Return the first sentence of the docstring of *cls*, as Markdown."""
    first = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return first.replace("``", "`")


def events() -> str:
    """Return the page of events."""
    rows = [
        (f"`{row.cls.__name__}`", f"`{row.cls.type}`", summary(row.cls), "yes" if row.is_recorded else "")
        for row in EVENTS
    ]
    return EVENTS_TEXT.format(table=table(("event", "`type` in JSON", "what it shows", "recorded"), rows))


def error_page() -> str:
    """Return the page of errors."""
    rows = []
    for cls in tree(StepEngineError):
        error, base = cls(""), cls.__bases__[0]
        code = choose_exit_code(RunResult(status=RunStatus.FAILED, state=AgentState(), error=error))
        again = "yes" if issubclass(cls, WORTH_ANOTHER_TRY) else ""
        about = (f"`{cls.__name__}`", f"`{base.__name__}`", summary(cls), REMEDIES[cls.__name__])
        rows.append((*about, str(problem_of(error).status), str(int(code)), again))
    limit = errors.LimitReached
    rows.append((f"`{limit.__name__}`", "`BaseException`", summary(limit), REMEDIES[limit.__name__], "", "", ""))
    for of_tests, remedy in OF_TESTS.items():
        rows.append(
            (f"`{of_tests.__name__}`", f"`{of_tests.__bases__[0].__name__}`", summary(of_tests), remedy, "", "", "")
        )
    return ERRORS_TEXT.format(table=table(("error", "base", "meaning", "what to do", "HTTP", "exit", "again"), rows))


def tree(cls: type[StepEngineError]) -> list[type[StepEngineError]]:
    """Return *cls* and the public classes below it, each before those below it."""
    below = [sub for sub in cls.__subclasses__() if sub.__name__ in errors.__all__]
    return [cls, *[one for sub in below for one in tree(sub)]]


def limits() -> str:
    """Return the page of limits with the table of those that have an amount, made from the docstring of ``Limits``."""
    documented = docstring_parser.parse(inspect.getdoc(Limits) or "").params
    texts = {limit.arg_name: re.split(r"[;.]\s|\.$", limit.description or "")[0] for limit in documented}
    rows = []
    for name in NAMES:
        if name.startswith("max_"):
            default = getattr(DEFAULT_LIMITS, name)
            amount = "none" if default is None else f"{default:,}".removesuffix(".0")
            rows.append((f"`{name}`", texts[name].replace("``", "`"), amount))
    before, mark, rest = LIMITS_PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end -->")
    return "".join((before, mark, table(("limit", "counts", "default"), rows), "\n", end, after))


if __name__ == "__main__":
    EVENTS_PAGE.write_text(events(), encoding="utf-8")
    ERRORS_PAGE.write_text(error_page(), encoding="utf-8")
    LIMITS_PAGE.write_text(limits(), encoding="utf-8")
