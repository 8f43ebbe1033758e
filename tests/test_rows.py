"""
Every table over a closed union of the package has all rows.

``UNIONS`` lists the unions and their tables: a union has its rows in one module, and a package that knows more of its members keeps that in a
table of its own. For a new member, the first test names each table that lacks its row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from attrs import frozen

import stepengine
import stepengine.events
from stepengine import errors
from stepengine.adapters.acp.updates import ShownTurn
from stepengine.adapters.ag_ui import _Page as AgUiPage
from stepengine.adapters.otel import Tracing
from stepengine.adapters.vercel import _Page as VercelPage
from stepengine.cli.screen.progress import Progress
from stepengine.data import effects, events, yields
from stepengine.data.effects import EFFECTS, KINDS, EffectRow
from stepengine.data.events import EVENTS, Event, EventRow
from stepengine.data.stored import STORED_TYPES
from stepengine.data.yields import YIELDS, YieldRow
from stepengine.durable import steps as durable_steps
from stepengine.engine import stepping
from stepengine.journal import encoding, ordering, questions, records, show, watching
from stepengine.machine import calls, protocol
from stepengine.runtime import effect_events, performing, standstill
from stepengine.sandbox import prelude, rewriting, strangers
from stepengine.server import problems as problems_of_requests
from stepengine.testing import answering, faults, invariants, world

PACKAGE = Path(stepengine.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *[page for page in (ROOT / "docs").glob("*.md") if page.name != "step-order.md"]]
UNNUMBERED = ("Gather", "Compute", "Notify")
CALLS_OF_TOOLS = ("CallTool", "CallBody")
NOT_SHOWN = ("SendToRun", "EndRuns", "RunInBackground")


class Table(NamedTuple):
    """
    A table over one of the unions.

    Attributes:
        where: Module and name.
        keys: Its keys: classes, or names.
        needs: The key that it needs for a row; ``""`` for none.
        without: The keys that the code around it handles in another way.
    """

    where: str
    keys: Collection[Any]
    needs: Callable[[Any], str]
    without: Collection[str] = ()


def class_of(row: EffectRow) -> str:
    return row.cls.__name__


def numbered(row: EffectRow) -> str:
    return "" if row.cls.__name__ in UNNUMBERED else row.cls.__name__


def name_of(cls: type) -> str:
    return cls.__name__


def kind_of(row: EffectRow) -> str:
    return row.kind


def name_in_sandbox(row: YieldRow) -> str:
    return row.name * row.for_sandbox


def class_yielded(row: YieldRow) -> str:
    return row.kind.__name__


def types_recorded() -> list[str]:
    """Return the types of the inputs that the journal records."""
    files = [PACKAGE / "journal" / name for name in ("records.py", "recorder.py", "journaled_run.py", "run_mailbox.py")]
    found = "".join([file.read_text(encoding="utf-8") for file in files])
    made = re.findall(r'(?:Input\(.*|said = |return Input.*)\{"type": "(\w+)"', found)
    return [*dict.fromkeys([*made, records.SIGNED])]


def shown(row: EventRow) -> str:
    """Return the name of an event that each surface has a form for."""
    return row.cls.__name__ if row.form == "own" else ""


def shown_to_people(row: EventRow) -> str:
    """Return the JSON name of an event that our own surfaces show, since they send nothing as data."""
    return "" if row.form == "detail" else row.cls.type


def classes_made(*files: str) -> set[str]:
    """Return the names of the classes of which these modules of the package make objects."""
    return {
        name for file in files for name in re.findall(r"\b([A-Z]\w+)\(", (PACKAGE / file).read_text(encoding="utf-8"))
    }


OF_EFFECTS = (
    Table("data/effects.py Effect", get_args(effects.Effect), class_of),
    Table("data/effects.py Leaf", get_args(effects.Leaf), numbered),
    Table("machine/protocol.py PHASES", protocol.PHASES, class_of, ["RunInBackground"]),
    Table(
        "machine/protocol.py ORDER",
        {token.partition(":")[0] for state in protocol.ORDER.values() for token in state} | {*protocol.ANYWHERE},
        class_of,
        # A call of a tool that yields has the token of a call of a tool, and events have their own names.
        ["CallBody", "Notify", "RunInBackground"],
    ),
    Table("runtime/performing.py _PERFORM", performing.Innermost._PERFORM, numbered),
    Table(
        "runtime/effect_events.py STARTED",
        effect_events.STARTED,
        numbered,
        ["CallModel", *CALLS_OF_TOOLS, "AskPerson", *NOT_SHOWN],
    ),
    Table(
        "runtime/effect_events.py FINISHED",
        effect_events.FINISHED,
        numbered,
        ["CallModel", *CALLS_OF_TOOLS, *NOT_SHOWN],
    ),
    Table(
        "runtime/standstill.py WAITED_FOR", standstill.WAITED_FOR, lambda row: class_of(row) if row.waits_for else ""
    ),
    Table("journal/encoding.py DESCRIBE", encoding.DESCRIBE, numbered, CALLS_OF_TOOLS),
    Table("journal/records.py EFFECTS", records.EFFECTS, kind_of),
    Table("journal/records.py MORE", records.MORE, kind_of, ["tool_call", "agent_call", "perform", "sleep", "receive"]),
    Table("journal/watching.py EFFECTS", watching.EFFECTS, kind_of),
    Table("journal/show.py ABOUT", show.ABOUT, lambda row: "" if row.name else row.kind, ["model_call", "ask"]),
    Table("journal/questions.py REPLACE", questions.REPLACE, lambda row: row.kind if row.replaced_by else ""),
    Table("durable/steps.py KINDS", durable_steps.KINDS, kind_of),
    Table("engine/stepping.py SAID", stepping.SAID, numbered),
    Table("testing/invariants.py SHOWN", invariants.SHOWN, numbered),
    Table("testing/world.py HAPPENS", world.HAPPENS, numbered),
    Table("testing/faults.py ANY", faults.ANY, numbered, NOT_SHOWN),
)

OF_YIELDS = (
    Table("data/yields.py Yieldable", yields.YIELDABLES, class_yielded),
    Table("data/yields.py MEMBERS", re.findall(r"\w+", yields.MEMBERS), lambda row: row.name * row.is_member),
    Table("__init__.py __all__", stepengine.__all__, lambda row: row.name),
    Table(
        "machine/calls.py MEMBERS",
        calls.MEMBERS,
        class_yielded,
        ["ToolCall", "AgentCall", "Sentinel", "StepWith", "StepText", "GenerateN", "Parallel", "Race"],
    ),
    Table("testing/answering.py STEPS or VALUES", {**answering.STEPS, **answering.VALUES}, class_yielded),
    Table(
        "sandbox/prelude.py PRELUDE", re.findall(r"^(?:class )?(\w+)", prelude.PRELUDE, re.MULTILINE), name_in_sandbox
    ),
    Table(
        "sandbox/strangers.py _YieldReading",
        [name[4:] for name in vars(strangers._YieldReading) if name.startswith("_of_")],
        lambda row: name_in_sandbox(row).lower(),
        ["step", "step_all"],
    ),
    Table("sandbox/rewriting.py NOT_HERE", rewriting.NOT_HERE, lambda row: "" if row.for_sandbox else row.name),
    Table(
        "README.md and docs/*.md, a table row",
        [name for page in PAGES for name in re.findall(r"^\| `(\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)],
        lambda row: row.name,
    ),
)


OF_EVENTS = (
    Table("data/events.py __all__", events.__all__, class_of),
    Table("events.py __all__", stepengine.events.__all__, class_of),
    Table(
        "machine/protocol.py ORDER or ANYWHERE",
        {token.partition(":")[0] for state in protocol.ORDER.values() for token in state} | {*protocol.ANYWHERE},
        lambda row: class_of(row) if row.by_machine else "",
    ),
    Table(
        "journal/watching.py or runtime/effect_events.py, where it is made",
        classes_made("journal/watching.py", "runtime/effect_events.py"),
        lambda row: class_of(row) if row.is_recorded else "",
    ),
    Table("adapters/ag_ui/__init__.py SHOWN", AgUiPage.SHOWN, shown),
    Table(
        "adapters/vercel/__init__.py SHOWN or OF_ROOT",
        {**VercelPage.SHOWN, **VercelPage.OF_ROOT},
        shown,
        # A chunk begins the message, and a page shows its own answers.
        ["RunStarted", "AnswerReceived"],
    ),
    Table(
        "adapters/acp/updates.py SHOWN",
        ShownTurn.SHOWN,
        shown,
        # An editor has turns instead of runs and steps, calls without parts, and requests for questions.
        [
            "RunStarted",
            "StepStarted",
            "ToolInputDelta",
            "WaitFinished",
            "QuestionAsked",
            "AnswerReceived",
            "PermissionDecided",
        ],
    ),
    Table(
        "adapters/otel/__init__.py _TRACED",
        Tracing._TRACED,
        shown,
        # Spans have no texts but those of whole calls.
        [
            "TextCompleted",
            "ThinkingCompleted",
            "ReplyDiscarded",
            "ToolProgress",
            "ToolLog",
            "TodosChanged",
            "AnswerReceived",
        ],
    ),
    Table(
        "cli/screen/progress.py Progress",
        [name[4:] for name in vars(Progress) if name.startswith("_on_")],
        shown_to_people,
        # A terminal shows whole thoughts and calls, and the command prints how its run ended.
        [
            "run_started",
            "run_finished",
            "step_finished",
            "thinking_delta",
            "tool_input_delta",
            "todos_changed",
            "permission_decided",
            "wait_finished",
            "file_changed",
            "compacted",
            "followups_suggested",
            "events_dropped",
        ],
    ),
    Table(
        "server/page/views/run/watch.js take",
        re.findall(r'case "(\w+)"', (PACKAGE / "server/page/views/run/watch.js").read_text(encoding="utf-8")),
        shown_to_people,
        # The list shows what each agent does now. All steps of the run, with the rest, are below it.
        [
            "step_started",
            "step_finished",
            "thinking_completed",
            "tool_input_delta",
            "tool_log",
            "todos_changed",
            "answer_received",
            "permission_decided",
            "wait_finished",
            "compacted",
            "followups_suggested",
            "repeat",
            "warned",
            "events_dropped",
        ],
    ),
)

RECORDS = get_args(records.Record)
OF_RECORDS = (
    Table("journal/records.py _MAKERS", records._MAKERS, lambda record: record.kind),
    # The head is first, and a blob is before the record that names it.
    Table("journal/ordering.py RANK", ordering.RANK, lambda record: record.kind, ["head", "blob"]),
    Table(
        "docs/journals.md, a table row",
        re.findall(r"^\| `(\w+)", (ROOT / "docs" / "journals.md").read_text(encoding="utf-8"), re.MULTILINE),
        lambda record: record.kind,
    ),
)
ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, BaseException)]
STORED_ERRORS = [row for row in STORED_TYPES if issubclass(row.cls, BaseException)]
OF_ERRORS = (
    Table("errors.py __all__", errors.__all__, name_of),
    Table("errors.py, the tree in its docstring", re.findall(r"\w+", errors.__doc__ or ""), name_of),
    # The signal holds a `LimitExceeded`, which is stored.
    Table("data/stored.py STORED_TYPES", [row.cls for row in STORED_ERRORS], name_of, ["LimitReached"]),
    Table(
        "server/problems.py TOLD",
        [cls for cls in ERRORS if any(base in problems_of_requests.TOLD for base in cls.__mro__)],
        name_of,
        # The agent or the server is at fault: 500, and nothing is said about the inside.
        [
            *[
                "StepEngineError",
                "AgentError",
                "HandlerError",
                "BadYield",
                "ToolNotAvailable",
                "OutputMissing",
                "PerformError",
            ],
            *["ChildError", "ExternalAgentError", "RaceLost", "ToolError", "ToolServerError", "PathOutsideRoot"],
            *["BlockedAddress", "JournalError", "LimitReached"],
        ],
    ),
    Table(
        "docs/make_reference_tables.py REMEDIES",
        re.findall(
            r'^    "(\w+)": "', (ROOT / "docs" / "make_reference_tables.py").read_text(encoding="utf-8"), re.MULTILINE
        ),
        name_of,
    ),
)
OF_ERROR_FIELDS = (
    Table(
        "data/stored.py STORED_TYPES, the members of errors",
        [f"{row.cls.__name__}.{field}" for row in STORED_ERRORS for field in row.names()],
        str,
    ),
)
OF_INPUTS = (Table("journal/records.py INPUTS", records.INPUTS, str),)

UNIONS: tuple[tuple[Sequence[Any], Sequence[Table]], ...] = (
    (EFFECTS, OF_EFFECTS),
    (YIELDS, OF_YIELDS),
    (EVENTS, OF_EVENTS),
    (RECORDS, OF_RECORDS),
    (types_recorded(), OF_INPUTS),
    (ERRORS, OF_ERRORS),
    (
        [f"{row.cls.__name__}.{field}" for row in STORED_ERRORS for field in ("message", *row.cls.fields)],
        OF_ERROR_FIELDS,
    ),
)
TABLES = [table for _, tables in UNIONS for table in tables]


def missing_rows(table: Table, rows: Sequence[Any]) -> Iterator[str]:
    """Give a line for each row that *table* lacks, and for each exception that is none."""
    keys = {key if isinstance(key, str) else key.__name__ for key in table.keys}
    needed = {key: None for row in rows if (key := table.needs(row))}
    for key in needed:
        if key not in keys and key not in table.without:
            yield f"{table.where} lacks {key!r}"
    for key in table.without:
        if key not in needed or key in keys:
            yield f"{table.where}: {key!r} is no exception, since it {'has a row' if key in keys else 'needs none'}"


def problems(*planted: Sequence[Any]) -> list[str]:
    """Return the lines of all tables, where each union has the rows that are *planted* in it, too."""
    return [
        line
        for (rows, tables), more in zip(UNIONS, planted or [()] * len(UNIONS), strict=True)
        for table in tables
        for line in missing_rows(table, [*rows, *more])
    ]


OTHERS = {
    "__init__.py _PLACES": "tests/engine/test_front_door.py reads each name of __all__ through it",
    "cli/listing.py GROUPS": "commands, some of which have the name of a yieldable",
    "cli/screen/progress.py OF_MANY": "only what is shown of one child among many has to be in it",
    "durable/steps.py SLEEP, RECEIVE, AWAIT, START, TELL, CANCEL": "the names that KINDS refers to",
    "helpers/calls.py WORTH_ANOTHER_TRY": "the default of an option; other errors are not repeated",
    "machine/handler.py ANSWERS": "what it does not name becomes one effect, through MEMBERS of machine/calls.py",
    "machine/handler.py SPAWNS": "only what starts a child has to be in it",
    "machine/protocol.py OWN": "a part of ORDER",
    "machine/protocol.py WAITING": "a part of ORDER",
    "sandbox/prelude.py ERRORS": "the sandbox has these alone, and catches every other one by its base",
    "runtime/driver.py BARE": "a shorter way for the most frequent effects; the longer one serves for all",
    "runtime/hub.py NOTED": "the events that the hub itself reads",
    "testing/invariants.py AUTHORS_ERRORS": "what the handlers of the simulations raise",
    "testing/faults.py FAULTS": "which effects a fault suits; ANY is the part that suits all",
    "adapters/vercel/__init__.py OF_CHILD": "a child run is one part of the message, which needs only these",
}
"""Literals that are not in ``UNIONS``, each with the reason."""
A_TABLE = 3
"""A literal with so many members of a union is a table."""
NAMES = frozenset(
    [*KINDS, *map(class_of, EFFECTS), *map(class_yielded, YIELDS), *[row.name for row in YIELDS]]
    + [name for row in EVENTS for name in (row.cls.__name__, row.cls.type)]
    + [member.__name__ for member in (*RECORDS, *ERRORS)]
)


def is_table(node: ast.AST) -> bool:
    """Return whether *node* is a literal whose keys or elements name several members of a union."""
    if not isinstance(node, ast.Dict | ast.Tuple | ast.List | ast.Set):
        return False
    found = set()
    for key in node.keys if isinstance(node, ast.Dict) else node.elts:
        match key:
            case ast.Name(id=str(name)) | ast.Attribute(attr=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return len(found & NAMES) >= A_TABLE


def tables_in(text: str) -> Iterator[str]:
    """Give the names of the tables of a module or of its classes."""
    has_names = len({*re.findall(r"\w+", text)} & NAMES) >= A_TABLE
    statements = [*ast.parse(text).body] if has_names else []
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            statements += statement.body
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            name = ast.unparse(target).strip("()")
            if name != "__all__" and any(map(is_table, ast.walk(statement))):
                yield name


@frozen
class Planted:
    """An effect, and a yieldable, that only their rows know."""

    seq: int


PLANTED = EffectRow(
    Planted, asks="a plant", outcome=bool, kind="planted", verb="plant", waits_for="time", replaced_by="plant"
)
YIELDED = YieldRow(
    "Planted", Planted, asks="a plant", sent="value", gives="nothing", effects=("Planted",), is_member=True
)


class PlantedEvent(Event):
    """An event that only its row knows."""

    type = "planted_event"


class PlantedRecord:
    """A record that only the union names."""

    kind = "planted_record"


class PlantedError(errors.JournalError):
    """An error that only its class declares."""


def test_the_types_of_inputs_are_those_that_are_recorded():
    assert {*records.INPUTS} == {*types_recorded()}


def test_no_table_lacks_a_row():
    found = problems()
    assert not found, "\n".join(["", *found])


def test_each_table_that_lacks_a_row_is_named():
    """Members that have nothing but their rows in ``data`` are missing in every table of their union."""
    planted = problems(
        [PLANTED],
        [YIELDED, YIELDED._replace(name="Unsafe", for_sandbox=False)],
        [EventRow(PlantedEvent, by_machine=True, is_recorded=True)],
        [PlantedRecord],
        ["planted_input"],
        [PlantedError],
        ["ModelError.planted"],
    )
    found = {*planted} - {*problems()}
    assert {table.where for table in TABLES} == {line.partition(" lacks ")[0] for line in found}
    assert {"journal/records.py EFFECTS lacks 'planted'", "machine/calls.py MEMBERS lacks 'Planted'"} <= found


def test_a_row_that_a_table_loses_is_named():
    table = Table("x.py SAID", [effects.CallModel, effects.CallTool], numbered)
    assert ["x.py SAID lacks 'CallBody'"] == [*missing_rows(table, EFFECTS[:3])]


def test_an_exception_that_is_none_any_more_is_named():
    table = Table("x.py SAID", [effects.CallModel, effects.CallTool], numbered, ["CallBody", "CallTool", "Gone"])
    assert [
        "x.py SAID: 'CallTool' is no exception, since it has a row",
        "x.py SAID: 'Gone' is no exception, since it needs none",
    ] == [*missing_rows(table, EFFECTS[:3])]


def test_every_table_is_registered():
    """A new table is entered in ``UNIONS`` (or, with a reason, in ``OTHERS``), so that it is checked for missing rows."""
    registered = {
        f"{file} {name}"
        for table in TABLES
        for file, _, names in [table.where.partition(" ")]
        for name in names.split(" or ")
    }
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    found = {f"{name} {table}" for name, file in files.items() for table in tables_in(file.read_text(encoding="utf-8"))}
    assert set() == found - registered - {*OTHERS}
    assert set() == {*OTHERS} - found


def test_a_table_that_is_not_registered_is_found():
    text = "class A:\n    B = {Spawn: 1, ef.CallTool: 2, y.CallBody: 3}\nC = frozenset(['sleep', 'wait', 'ask'])\nD = (Spawn, CallTool)\n"
    assert ["C", "B"] == [*tables_in(text)]
