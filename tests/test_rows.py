"""
Every table over a closed union of the package has all rows.

``UNIONS`` lists the unions and their tables: a union has its rows in one module, and a package that knows more of its members keeps that in a
table of its own. For a new member, the first test names each table that lacks its row.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple, get_args

import attrs
import pytest

import stepengine
import stepengine.events
from stepengine import errors
from stepengine.adapters.acp.updates import ShownTurn
from stepengine.adapters.ag_ui import _EventTranslator as AgUiPage
from stepengine.adapters.otel import Tracing
from stepengine.adapters.vercel import _ChunkTranslator as VercelPage
from stepengine.cli.screen import progress
from stepengine.data import effects, events, yields
from stepengine.data.effects import EFFECTS, KINDS, ROWS, CallModel, EffectRow
from stepengine.data.events import EVENTS, EventRow
from stepengine.data.json import compact
from stepengine.data.stored import STORED_TYPES
from stepengine.data.yields import YIELDS, YieldRow
from stepengine.durable import step_names
from stepengine.engine import moments
from stepengine.journal import encoding, event_stream, questions, record_order, records, show
from stepengine.machine import calls, protocol
from stepengine.runtime import core_performer, effect_events
from stepengine.runtime.performer import Item
from stepengine.sandbox import prelude, source_rewriter, untrusted_handlers
from stepengine.server import problems as problems_of_requests
from stepengine.testing import effect_performer, invariants, short_answers
from tests.machine.world import ADD, EXAMPLES, World, adding, agent, child, play, reply

PACKAGE = Path(stepengine.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
UNNUMBERED = ("Gather", "Compute", "Notify")
CALLS_OF_TOOLS = ("CallTool", "CallBody")
EMPTY = (str, bool, NoneType)
"""Types of outcomes whose empty value is an outcome."""


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


def with_own_members(row: EffectRow) -> str:
    """Return the name of an effect whose record has members that are not its attributes."""
    members = {member.rstrip("?") for member in row.members}
    return "" if members <= {attribute.name for attribute in attrs.fields(row.cls)} else class_of(row)


def with_paths_or_values(row: EffectRow) -> str:
    """Return the kind of an effect whose record has members that types do not check: paths and stored values."""
    return row.kind * bool({"child", "children", "questions", "request"} & {*row.members})


def shown_effect(row: EffectRow) -> str:
    """Return the name of an effect that events tell of: what waits, starts a run, or has an outcome that people look at."""
    return class_of(row) if row.waits_for or row.starts_run or row.replaced_by else ""


def name_of(cls: type) -> str:
    return cls.__name__


def name_in_sandbox(row: YieldRow) -> str:
    return row.name * row.for_sandbox


def class_yielded(row: YieldRow) -> str:
    return row.kind.__name__


def one_effect(row: YieldRow) -> EffectRow | None:
    """Return the row of the effect that a yieldable becomes if that has all of its attributes."""
    effect = calls.EFFECT_OF.get(row.kind)
    if effect is None or not attrs.has(row.kind):
        return None
    own, asked = ({attribute.name for attribute in attrs.fields(cls)} for cls in (effect, row.kind))
    return ROWS[effect] if asked < own else None


def with_own_value(row: YieldRow) -> str:
    """Return the class of a yieldable that does not give an empty value in the end."""
    effect = one_effect(row)
    return "" if effect is not None and effect.outcome in EMPTY else class_yielded(row)


def types_recorded() -> list[str]:
    """Return the types of the inputs that the journal records."""
    files = [
        PACKAGE / "journal" / name
        for name in (
            "records.py",
            "recorder.py",
            "record_player.py",
            "recorded_machines.py",
            "run_end.py",
            "replayer.py",
            "run_mailbox.py",
        )
    ]
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


def names_imported(file: Path) -> set[str]:
    """Return the names that a module imports from other modules."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


OF_EFFECTS = (
    Table("data/effects.py Effect", get_args(effects.Effect), class_of),
    Table("data/effects.py Leaf", get_args(effects.Leaf), numbered),
    Table(
        "machine/protocol.py ORDER",
        {token.partition(":")[0] for state in protocol.ORDER.values() for token in state} | {*protocol.ANYWHERE},
        class_of,
        # A call of a tool that yields has the token of a call of a tool, and events have their own names.
        ["CallBody", "Notify", "RunInBackground"],
    ),
    Table("runtime/core_performer.py _PERFORM", core_performer.CorePerformer._PERFORM, numbered),
    Table(
        "runtime/effect_events.py STARTED",
        effect_events.STARTED,
        shown_effect,
        ["AskPerson"],
    ),
    Table(
        "runtime/effect_events.py FINISHED",
        effect_events.FINISHED,
        shown_effect,
    ),
    Table("journal/encoding.py DESCRIBE", encoding.DESCRIBE, with_own_members, CALLS_OF_TOOLS),
    Table("journal/records.py MORE", records.MORE, with_paths_or_values),
    Table("journal/event_stream.py EFFECTS", event_stream.EFFECTS, lambda row: row.kind * bool(with_own_members(row))),
    Table("journal/show.py ABOUT", show.ABOUT, lambda row: "" if row.name else row.kind, ["model_call", "ask"]),
    Table("journal/questions.py REPLACE", questions.REPLACE, lambda row: row.kind if row.replaced_by else ""),
    Table("engine/moments.py EFFECT_TEXTS", moments.EFFECT_TEXTS, with_own_members),
    Table("testing/invariants.py SHOWN", invariants.SHOWN, with_own_members),
    Table(
        "testing/effect_performer.py HAPPENS",
        effect_performer.HAPPENS,
        lambda row: "" if row.outcome in EMPTY else numbered(row),
    ),
)

OF_YIELDS = (
    Table("data/yields.py Yieldable", yields.YIELDABLES, class_yielded),
    Table("__init__.py __all__", stepengine.__all__, lambda row: row.name),
    Table("__init__.py _PLACES", stepengine._PLACES["yields"], lambda row: row.name),
    Table("__init__.py, the import for types", names_imported(PACKAGE / "__init__.py"), lambda row: row.name),
    Table(
        "machine/calls.py MEMBERS",
        calls.MEMBERS,
        lambda row: "" if one_effect(row) else class_yielded(row),
        ["ToolCall", "AgentCall", "Sentinel", "StepWith", "StepText", "GenerateN", "Parallel", "Race"],
    ),
    Table(
        "testing/short_answers.py STEPS or VALUES",
        {**short_answers.STEPS, **short_answers.VALUES},
        with_own_value,
    ),
    Table(
        "sandbox/prelude.py PRELUDE", re.findall(r"^(?:class )?(\w+)", prelude.PRELUDE, re.MULTILINE), name_in_sandbox
    ),
    Table(
        "sandbox/source_rewriter.py NOT_HERE", source_rewriter.NOT_HERE, lambda row: "" if row.for_sandbox else row.name
    ),
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
        "journal/event_stream.py or runtime/effect_events.py, where it is made",
        classes_made("journal/event_stream.py", "runtime/effect_events.py"),
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
        "cli/screen/progress.py SHOWN",
        [cls.type for cls in progress.SHOWN],
        shown_to_people,
        # A terminal shows whole thoughts and calls, and the command prints how its run ended.
        [
            "run_started",
            "run_finished",
            "step_finished",
            "thinking_delta",
            "tool_input_delta",
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
    Table("journal/record_order.py RANK", record_order.RANK, lambda record: record.kind, ["head", "blob"]),
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
            *["BlockedAddress", "JournalError", "LimitReached", "ExecutorBusy"],
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
        [f"{row.cls.__name__}.{field}" for row in STORED_ERRORS for field in row.get_member_names()],
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


OTHERS = {
    "cli/command_table.py GROUPS": "commands, some of which have the name of a yieldable",
    "cli/screen/progress.py OF_MANY": "only what is shown of one child among many has to be in it",
    "data/events.py DELTAS": "the pieces of texts, by class for the type checker",
    "durable/step_names.py KINDS": "what it does not name is a step with the kind of its record",
    "helpers/calls.py WORTH_ANOTHER_TRY": "the default of an option; other errors are not repeated",
    "machine/calls.py OF_STEPS": "its rows are those of YIELDS",
    "machine/handler.py ANSWERS": "what it does not name becomes one effect, through MEMBERS of machine/calls.py",
    "machine/handler.py SPAWNS": "only what starts a child has to be in it",
    "machine/protocol.py PHASES": "other effects change no phase",
    "sandbox/prelude.py ERRORS": "the sandbox has these alone, and catches every other one by its base",
    "runtime/driver.py DIRECT": "a shorter way for the most frequent effects; the longer one serves for all",
    "runtime/hub.py NOTED": "the events that the hub itself reads",
    "testing/invariants.py AUTHORS_ERRORS": "what the handlers of the simulations raise",
    "testing/faults.py FAULTS": "which effects a fault suits",
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
IMPORT = re.compile(r"^ *from \S+ import (?:\([^)]*\)|.*)$", re.MULTILINE)
KEY = re.compile(r"[\[({,=\n]\s*(?:\w+\.)*[\"']?(\w+)[\"']?(?=\s*[,:)\]}])")
"""What may be a key or an element of a literal."""


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
    has_names = len({*KEY.findall(IMPORT.sub("", text))} & NAMES) >= A_TABLE  # to parse every module takes long
    statements = [*ast.parse(text).body] if has_names else []
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            statements += statement.body
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            name = ast.unparse(target).strip("()")
            if name != "__all__" and any(map(is_table, ast.walk(statement))):
                yield name


NOT_COMPARED = frozenset(
    ["idempotent", "purpose", "questions", "reason", "request", "sandbox", "source", "tool_call_id", "yields"]
)
"""
Members outside a fingerprint, in which a replay may differ from the record: ids and origins of calls, settings of tools, and the reason
of a cancellation. The fingerprints of requests and questions are made by functions of their own.
"""


def test_the_types_of_inputs_are_those_that_are_recorded():
    assert {*records.INPUTS} == {*types_recorded()}


def test_no_member_of_a_union_lacks_its_row():
    rows = [row.kind for row in YIELDS]
    found = [f"data/yields.py YIELDS lacks {kind.__name__!r}" for kind in yields.YIELDABLES if kind not in rows]
    found += [f"data/effects.py EFFECTS lacks {cls.__name__!r}" for cls in get_args(effects.Effect) if cls not in ROWS]
    assert not found, "\n".join(["", *found])


def test_the_row_of_a_recorded_effect_is_complete():
    recorded = [row for row in EFFECTS if numbered(row) not in ("", "RunInBackground")]
    found = [f"the row of {class_of(row)!r} lacks its kind" for row in recorded if not row.kind]
    found += [f"the row of {class_of(row)!r} lacks its verb" for row in recorded if not row.verb]
    found += [f"the row of {class_of(row)!r} lacks its members" for row in recorded if not row.members]
    found += [
        f"the row of {class_of(row)!r} lacks its fingerprint, of its members"
        for row in recorded
        if not {*row.fingerprint} <= {"type", *[member.rstrip("?") for member in row.members]}
        # Its fingerprint is that of a request, or of questions, without what no model and no person sees.
        or not (row.fingerprint or row.kind in ("model_call", "ask"))
    ]
    for row in recorded:
        members = {member.rstrip("?") for member in row.members}
        attributes = {attribute.name for attribute in attrs.fields(row.cls) if attribute.eq} - {"seq"}
        lost = set() if row.cls in encoding.DESCRIBE else attributes - members
        found += [f"the members of {class_of(row)!r} lack {name!r}" for name in sorted(lost)]
        ignored = members - {*row.fingerprint} - NOT_COMPARED
        found += [f"the fingerprint of {class_of(row)!r} lacks {name!r}" for name in sorted(ignored)]
    assert not found, "\n".join(["", *found])


def test_no_table_lacks_a_row():
    found = [line for rows, tables in UNIONS for table in tables for line in missing_rows(table, rows)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("row", YIELDS, ids=lambda row: row.name)
def test_effects_are_recorded_decoded_and_described(row):
    """What no table says of an effect is made of the members in its row."""

    def handler(ctx: Any) -> Any:
        yield EXAMPLES["Start"]
        yield EXAMPLES[row.name]

    setting = World(
        replies=lambda _: reply("hm"),
        tools={"add": adding},
        children={"helper": child()},
        answers={f"q{seq}": "yes" for seq in range(9)},
    )
    played = play(agent(handler, tools=["add"]), setting, tools=[ADD])
    for effect in played.leaves:
        kind = KINDS[ROWS[type(effect)].kind].kind
        assert "\n" not in moments.format_effect_request(effect)
        assert "\n" not in invariants.describe_effect(effect)
        form = encoding.encode_effect(Item("", effect, played.plan))
        if not isinstance(form, CallModel):
            line = json.loads(compact(form))
            records.check_effect(line, is_start=False)
            intent = records.Intent("", effect.seq, line)
            read = event_stream.effect_from_json(intent, line)
            assert type(effect) is type(read)
            assert kind in event_stream.EFFECTS or effect == read


IN_JSON = [
    row
    for row in YIELDS
    if row.for_sandbox
    and attrs.has(row.kind)
    and not hasattr(untrusted_handlers._YieldDecoder, f"_make_{row.name.lower()}")
]


@pytest.mark.parametrize("row", IN_JSON, ids=lambda row: row.name)
def test_a_yieldable_without_a_reader_leaves_the_sandbox_as_json(row):
    inside: dict[str, Any] = {}
    exec(prelude.PRELUDE, inside)
    example = EXAMPLES[row.name]
    made = inside[row.name](**{field.name: getattr(example, field.name) for field in attrs.fields(row.kind)})
    left, known = untrusted_handlers._sandbox_value_to_json(SimpleNamespace(name=row.name, attributes=vars(made))), None
    read = untrusted_handlers._YieldDecoder(known).decode_yield(left)  # type: ignore[arg-type]  # which only schemas need
    assert example == read


def test_database_steps_have_unique_names():
    of_effects = [step_names.KINDS.get(kind, kind) for kind in KINDS]
    others = [
        getattr(step_names, name) for name in ("SPAWN", "INTENT", "LOOKUP", "END", "BODY", "RESULT", "START", "WAIT")
    ]
    assert len(of_effects) + len(others) == len({*of_effects, *others})
    assert all(re.fullmatch(r"[a-z]{1,16}", kind) for kind in of_effects)


@pytest.mark.deep
@pytest.mark.smoke
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
