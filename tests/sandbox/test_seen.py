"""What people see of programs in a recorded run: each call at its line, the line that waits, and nothing that steers a screen."""

from __future__ import annotations

import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

import attrs
import pytest
from typer.testing import CliRunner

from stepengine import AgentDefinition, Engine, RunResult, load_agent, tool
from stepengine.cli.app import app
from stepengine.debugging.debugger import debug, iterate_source_lines_around
from stepengine.errors import JournalCorrupt, JournalError, ToolError
from stepengine.evaluation import blame, impact
from stepengine.evaluation.checks import Check
from stepengine.journal import FileJournal, Journal, MemoryJournal
from stepengine.journal.records import encode_line, format_address
from stepengine.journal.show import make_run_tree, redact_and_shorten_tree, render
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text, tool_call

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, code_mode

pytestmark = pytest.mark.anyio


@tool(category="read")
def price(item: str) -> int:
    """What an item costs."""
    if item == "gold":
        raise ValueError("nobody sells gold")
    return len(item) * 10


@tool(category="network")
def buy(item: str) -> str:
    """Buy an item."""
    return f"bought {item}"


writer = AgentDefinition("writer", model="test/m")
buyer: AgentDefinition[Any] = AgentDefinition(
    "buyer", model="test/m", tools=[code_mode(price, buy, agents=[writer], ask=True)]
)
POLICY = Policy([Rule.allow_tool("run_code"), Rule.allow_tool("price")])


async def ran(*codes: str, journal: Any, answer: str = "yes", **options: Any) -> RunResult:
    """Run programs one after the other; every question has the same answer."""
    calls = [tool_call("run_code", {"code": textwrap.dedent(code)}) for code in codes]
    replies = [*calls, text("end")]

    def reply(request: Any) -> Any:
        return text("Thank you.") if request.messages[-1].text == "Thank them." else replies.pop(0)

    async with Engine([buyer, writer], models=ScriptedModel(reply), permissions=POLICY, **options) as engine:
        result = await engine.run(buyer, "go", journal=journal)
        while answer and result.pending_questions:
            answers = {question.id: answer for question in result.pending_questions}
            result = await engine.resume(journal, answers=answers)
        return result


RECORDED: dict[tuple[Any, ...], bytes] = {}


async def record_run(*codes: str, answer: str = "yes") -> MemoryJournal:
    """Return a journal of programs that ran one after the other; each run is carried out once, and each test has its own copy."""
    if (codes, answer) not in RECORDED:
        journal = MemoryJournal()
        await ran(*codes, journal=journal, answer=answer)
        RECORDED[codes, answer] = journal.content()
    return MemoryJournal(RECORDED[codes, answer])


def shown(journal: Journal, *, whole: bool = False) -> str:
    return render(redact_and_shorten_tree(make_run_tree(journal), keeps_long_texts=whole))


def lines_of(journal: Journal) -> dict[str, int]:
    intents = journal.history().intents
    return {format_address(*at): intent.program_line for at, intent in intents.items() if intent.program_line}


def without_lines(journal: Journal) -> MemoryJournal:
    """Return a journal as it was before lines were recorded."""
    made, crc = bytearray(), 0
    for line in journal.lines():
        members = json.loads(line)
        members.pop("crc")
        members.pop("program_line", None)
        written, crc = encode_line(members, crc)
        made += written
    return MemoryJournal(bytes(made))


SHOPPING = """
    import asyncio
    tea = price("tea")
    rest = [price(item) for item in ["milk",
                                     "gold"]]
    await tea
    try:
        await asyncio.gather(*rest)
    except ToolError as error:
        print(error)
    await buy("tea")
"""


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG35")
async def test_each_effect_of_a_program_records_its_line() -> None:
    """Calls, the question whether one may be made, children, questions and waits; what no program asks for has no line."""
    journal = MemoryJournal()
    program = """\
    import asyncio
    a = price("tea")
    b = writer("Thank them.")
    await asyncio.gather(
        a, b, asyncio.sleep(0.01))

    await buy("tea")
    await ask("Good?", ["yes", "no"])
    """
    await ran(program, journal=journal)

    asked = {"1#0": 2, "1#1": 3, "1#2": 5, "1#3": 7, "1#4": 7, "1#5": 8}
    assert lines_of(journal) == asked
    assert lines_of(MemoryJournal(journal.lines())) == asked


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG35")
async def test_a_call_in_an_earlier_programs_function_has_no_line() -> None:
    journal = MemoryJournal()
    helper = "\n\n\nasync def double():\n    return 2 * await price('tea')\n"
    program = (
        "a = 1\nb = price('milk')\nawait double()\nawait b\nasync def later():\n    await price('gold')\nawait later()"
    )
    await ran(helper, program, program, journal=journal)

    assert lines_of(journal) == {"3#0": 2, "3#2": 6, "5#0": 2, "5#2": 6}


@pytest.mark.parametrize("line", ["3", -1, 10**9, True])
async def test_an_invalid_line_is_a_damaged_record(line: object) -> None:
    """A journal may be anybody's."""
    journal = await record_run('await price("tea")')
    made, crc = bytearray(), 0
    for one in journal.lines():
        members = json.loads(one)
        members.pop("crc")
        if "program_line" in members:
            members["program_line"] = line
        written, crc = encode_line(members, crc)
        made += written

    with pytest.raises(JournalCorrupt):
        MemoryJournal(bytes(made)).history()


async def test_a_journal_without_lines_replays_and_resumes() -> None:
    """Nothing but what people see depends on lines: the calls of an old run are compared without them."""
    journal = await record_run(SHOPPING, answer="")
    old = without_lines(journal)
    assert not lines_of(old)

    async with Engine([buyer], models=ScriptedModel([text("end")]), permissions=POLICY) as engine:
        await engine.replay(old)
        result = await engine.resume(old, answers={"1.q3": "yes"})

    assert result.unwrap() == "end"


# --- stepengine show --------------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG36")
async def test_show_prints_a_program_with_calls_below_their_lines() -> None:
    """Every call has its status and what it gave; the reply that asked for the program does not repeat it."""
    journal = await record_run(SHOPPING, answer="")

    assert (
        shown(journal).partition("   -> call")[2]
        == """\
 run_code  program of #1
#1  tool run_code  c1
     restart: false
     program
          1
          2  import asyncio
          3  tea = price("tea")
             1#0  tool price  {"item": "tea"} -> 30
          4  rest = [price(item) for item in ["milk",
             1#1  tool price  {"item": "milk"} -> 40
             1#2  tool price  {"item": "gold"} -> error "ValueError: nobody sells gold"
          5                                   "gold"]]
          6  await tea
          7  try:
          8      await asyncio.gather(*rest)
          9  except ToolError as error:
         10      print(error)
       > 11  await buy("tea")
             1#3  ask  permission  1.q3  "May buy run?"  "yes"  "no" -> (no result yet)
   -> (no result yet)
waits for an answer to 1.q3  options "yes", "no"
  May buy run?
"""
    )


async def test_show_prints_the_output_below_an_ended_program() -> None:
    """As with any result; no line waits any more."""
    journal = await record_run(SHOPPING)
    told = shown(journal)

    assert (
        '             1#4  tool buy  {"item": "tea"} -> "bought tea"\n   -> text\n        ValueError: nobody sells gold\n'
        in told
    )
    assert " > " not in told


async def test_show_prints_calls_below_a_program_without_lines() -> None:
    """Nobody noted then which line made them."""
    journal = await record_run('print("a")\nawait price("tea")\n')

    assert (
        '         1  print("a")\n         2  await price("tea")\n     1#0  tool price  {"item": "tea"} -> 30\n'
        in shown(without_lines(journal))
    )


async def test_a_program_cannot_control_the_terminal_or_shift_lines() -> None:
    """Escapes, carriage returns and separators stay in their line, as text, and in no way look like a line of ours."""
    hostile = "\x1b[2J\x1b]0;title\x07 \u202e \u2028 \r   9  fake"
    program = f'a = """{hostile}"""\nb = await price("tea")\n# {hostile.replace(chr(13), "")}\nawait buy(a)'
    journal = await record_run(program)
    told = shown(journal)

    assert all(character.isprintable() or character == "\n" for character in told)
    assert lines_of(journal) == {"1#0": 2, "1#1": 4, "1#2": 4}
    assert (
        '         2  b = await price("tea")\n            1#0  tool price  {"item": "tea"} -> 30\n         3  # ' in told
    )
    assert "\\x1b[2J" in told


async def test_programs_with_crlf_have_correct_lines() -> None:
    """Some models write programs as Windows has its files."""
    journal = await record_run('a = 1\r\nb = await price("tea")\r\n')

    assert '         1  a = 1\n         2  b = await price("tea")\n            1#0  tool price' in shown(journal)
    async with Engine([buyer], models=ScriptedModel([]), permissions=POLICY) as engine:
        with debug(engine, journal) as debugger:
            debugger.goto("1#0")
            (frame,) = debugger.list_author_frames()
            lines = list(iterate_source_lines_around(frame))

    assert (frame.source, lines) == ('b = await price("tea")', [(1, "a = 1"), (2, 'b = await price("tea")')])


async def test_show_prints_lines_around_calls_unless_asked_for_all() -> None:
    """What is left out is counted, also in a line that is too long."""
    far = [f"n{n} = {n}" for n in range(1, 301)]
    far[199] = 'await price("tea")  # ' + "x" * 300
    journal = await record_run("\n".join(far))
    told, whole = shown(journal), shown(journal, whole=True)

    assert (
        told.partition("     program\n")[2].partition("   -> ")[0]
        == f"""\
           1  n1 = 1
           2  n2 = 2
           3  n3 = 3
              ... (cut: lines 4 to 197)
         198  n198 = 198
         199  n199 = 199
         200  await price("tea")  # {"x" * 178}... (cut: 322 characters)
              1#0  tool price  {{"item": "tea"}} -> 30
         201  n201 = 201
         202  n202 = 202
              ... (cut: lines 203 to 300)
"""
    )
    assert far[199] in whole
    assert "cut:" not in whole


async def test_a_multiline_secret_is_hidden_and_calls_stay_visible() -> None:
    """Where lines are taken out the others have other numbers, so that calls stand below the program."""
    key = "\n".join(["-----BEGIN PRIVATE KEY-----", *["QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo" + "abcdefgh" * 3] * 5, "-----END PRIVATE KEY-----"])  # fmt: skip
    journal = MemoryJournal(redact="off")
    await ran(f'key = """{key}"""\nawait price("tea"){chr(10) * 12}1', journal=journal)
    told = shown(journal)

    assert "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo" not in told
    assert '\n     1#0  tool price  {"item": "tea"} -> 30\n' in told


# --- the debugger -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("programs:PG37")
async def test_the_debugger_shows_line_and_output_of_a_waiting_program() -> None:
    """Each call that the line waits for is a position, with the line that made it; both ways."""
    journal = await record_run(SHOPPING, answer="")
    async with Engine([buyer], models=ScriptedModel([]), permissions=POLICY) as engine:
        with debug(engine, journal) as debugger:
            seen = []
            for address in ("1#3", "1#2", "1#0"):
                moment = debugger.goto(address)
                (frame,) = debugger.list_author_frames()
                seen.append(
                    (
                        frame.kind,
                        frame.line,
                        frame.source,
                        debugger.get_program_output(frame),
                        getattr(moment.effect, "program_line", 0),
                    )
                )
            assert debugger.to_dict()["frames"][0]["printed"] == ""

    assert seen == [
        ("program", 11, 'await buy("tea")', "ValueError: nobody sells gold\n", 11),
        ("program", 6, "await tea", "", 4),  # which was made before, and goes out with what is awaited first
        ("program", 6, "await tea", "", 3),
    ]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG37")
async def test_the_debugger_shows_variables_without_changing_the_run() -> None:
    """Not even the names of programs in errors, which the model reads: the walk goes on as it was recorded."""
    codes = ('a = [1, 2]\napi_token = "xyzzyplugh"\nimport math\nb = await price("tea")', "a.append(b)\n1 / 0", "a")
    journal = await record_run(*codes)
    async with Engine([buyer], models=ScriptedModel([]), permissions=POLICY) as engine:
        with debug(engine, journal) as debugger:
            told = [(debugger.goto(at).address, debugger.variables()) for at in ("1#0", "#2", "#4", "#6")]
            debugger.move_to(debugger.last)

    known = {"a": "[1, 2]", "api_token": "<redacted>", "b": "30"}
    assert told == [
        ("1#0", {}),
        ("#2", known),
        ("#4", known | {"a": "[1, 2, 30]"}),
        ("#6", known | {"a": "[1, 2, 30]"}),
    ]


@pytest.mark.spec("programs:PG37")
async def test_names_without_a_value_hide_no_variables() -> None:
    code = (
        "alpha = 1\ntry:\n    int('x')\nexcept ValueError as error:\n    pass\nif not alpha:\n    never = 1\nzeta = 3"
    )
    journal = await record_run(code, "1")
    async with Engine([buyer], models=ScriptedModel([]), permissions=POLICY) as engine:
        with debug(engine, journal) as debugger:
            debugger.goto("#2")

            assert {"alpha": "1", "zeta": "3"} == debugger.variables()


@pytest.mark.deep
async def test_variables_that_cannot_be_shown_do_no_harm() -> None:
    """Their texts are the program's own code: it may raise, never end, or call a tool."""
    journal = MemoryJournal()
    code = """\
    class Bad:
        def __repr__(self):
            raise ValueError("no")
    class Slow:
        def __repr__(self):
            while True:
                pass
    a = Bad()
    b = "\\x1b[2J" + "x" * 1000
    c = Slow()
    """
    await ran(code, "1", journal=journal)
    async with Engine([buyer], models=ScriptedModel([]), permissions=POLICY) as engine:
        with debug(engine, journal) as debugger:
            debugger.goto("#2")
            found = debugger.variables()
            debugger.move_to(debugger.last)

    assert found["a"] == found["c"] == "<cannot be shown>"
    assert found["b"].startswith("'\\x1b[2Jxxx")
    assert len(found["b"]) <= 200


AGENT = '''
from stepengine import AgentDefinition, tool
from stepengine.sandbox import code_mode


@tool(category="read")
def price(item: str) -> int:
    """What an item costs."""
    return len(item) * 10


agent = AgentDefinition("buyer", model="test/m", tools=[code_mode(price, ask=True)])
'''
ASKING = """\
import asyncio
tea, milk = await asyncio.gather(price("tea"), price("milk"))
print("tea", tea)
if await ask("Buy it?", ["yes", "no"]) == "yes":
    print("yes!")
tea + milk
"""


@pytest.fixture(scope="module")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose program waits for a person, and of the file of its agent."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "buyer.py").write_text(AGENT)
    agent = load_agent(folder / "buyer.py")
    with Engine([agent], models=ScriptedModel([tool_call("run_code", {"code": ASKING})])) as engine:
        engine.run_sync(agent, "go", journal=folder / "run.jsonl")
    return folder


@pytest.fixture
def recorded(recorded_once: Path, tmp_path: Path) -> Path:
    """The journal of that run, in a copy of its folder."""
    return shutil.copytree(recorded_once, tmp_path, dirs_exist_ok=True) / "run.jsonl"


def command(*words: object) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(word) for word in words])


@pytest.mark.deep
@pytest.mark.smoke
def test_debug_shows_variables_and_forks_inside_a_program(recorded: Path) -> None:
    """A fork in the middle of a program goes on with it."""
    agent = recorded.with_name("buyer.py")
    with Engine([load_agent(agent)], models=ScriptedModel([text("end")])) as engine:
        engine.resume_sync(recorded, answers={"1.q2": "yes"})
    steps = [f"--exec={step}" for step in ("goto #2", "locals", "goto 1#2", "fork --reply no --allow-repeat")]
    done = command("debug", recorded, "--agent", agent, *steps)

    assert done.exit_code == 0, done.output
    assert "snapshots: paused replays (programs do not run in forked processes)" in done.output
    assert "variables milk=40  tea=30\nmilk  40\ntea   30\n" in done.stdout
    assert " asked     Buy it?\n answer    yes\n printed   tea 30\n" in done.stdout
    fork = FileJournal(recorded.with_name("run-1.jsonl")).history()
    assert fork.outcome(fork.results["", 1]).value.text == "tea 30\n70"


async def test_the_debugger_shows_lines_without_the_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it asked for is recorded; what it printed on the way, and its variables, only the sandbox knows."""
    journal = await record_run(SHOPPING, "1")

    def gone(*_: Any, **__: Any) -> Any:
        msg = "no sandbox"
        raise ToolError(msg)

    monkeypatch.setattr(MontySandbox, "open", gone)
    async with Engine([buyer], models=ScriptedModel([]), permissions=POLICY) as engine:
        with debug(engine, journal) as debugger:
            debugger.goto("1#4")
            (frame,) = debugger.list_author_frames()
            seen = (frame.line, debugger.get_program_output(frame), debugger.to_dict()["frames"][0]["printed"])
            debugger.goto("#2")
            left = debugger.variables()
            debugger.move_to(debugger.last)

    assert (seen, left) == ((11, None, None), {})


# --- forks, impact, blame, checks -------------------------------------------------------------------------------------

PRICES = """\
import asyncio
tea, milk = await asyncio.gather(price("tea"), price("milk"))
await buy("tea" if tea <= milk else "milk")
"""
LOOPED = """\
found = {}
for item in ["tea", "milk"]:
    found[item] = await price(item)
await buy(sorted(found.items(), key=lambda one: one[1])[0][0])
"""


@pytest.mark.spec("programs:PG39")
@pytest.mark.parametrize(
    ("at", "edit", "said"),
    [("1#0", 50, "bought milk"), ("1#2", "no", "denied"), ("1#3", "sold out", "sold out")],
)
async def test_a_fork_continues_from_any_effect_of_a_program(at: str, edit: Any, said: str) -> None:
    """What comes after it follows from that; what stands before is not asked for again; the fork replays."""
    journal, fork = await record_run(PRICES), MemoryJournal()
    async with Engine([buyer], models=ScriptedModel([text("end")] * 2), permissions=POLICY) as engine:
        result = await engine.fork(journal, at=at, edit=edit, into=fork, allow_repeat=True)
        while result.pending_questions:
            answers = dict.fromkeys([question.id for question in result.pending_questions], "yes")
            result = await engine.resume(fork, answers=answers)
        assert result == await engine.replay(fork)

    assert said in result.tool_calls[0].result.text
    assert set(lines_of(fork).values()) == {2, 3}


@pytest.mark.spec("programs:PG39")
async def test_editing_the_result_of_a_program_is_refused_with_advice() -> None:
    """It follows from what the program asked for, as that of a child does: a fork would differ at once."""
    journal = await record_run(PRICES)
    async with Engine([buyer], models=ScriptedModel([]), permissions=POLICY) as engine:
        with pytest.raises(JournalError) as refused:
            await engine.fork(journal, at=1, edit="bought milk")

    assert str(refused.value) == (
        "the result of #1, a call of a program, follows from its own effects; fork at one of them, such as 1#0, or at the "
        "reply that asked for the call"
    )


@pytest.mark.spec("programs:PG39")
@pytest.mark.parametrize(
    ("code", "is_changed", "served"),
    [(LOOPED, False, 3), (PRICES.replace("milk", "gold"), True, 1)],
)
async def test_impact_compares_program_calls_and_serves_them_from_the_record(
    code: str, is_changed: bool, served: int
) -> None:
    """Another prompt, and the model writes another program: what it asks for decides whether that is another decision."""
    journal = MemoryJournal()
    free = Policy([Rule.allow_tool("run_code"), Rule.allow_tool("price"), Rule.allow_tool("buy")])
    async with Engine(
        [buyer], models=ScriptedModel([tool_call("run_code", {"code": PRICES}), text("end")]), permissions=free
    ) as engine:
        await engine.run(buyer, "go", journal=journal)
    changed = attrs.evolve(buyer, system_prompt="Be quick.")

    def models() -> ScriptedModel:
        return ScriptedModel([tool_call("run_code", {"code": code}), text("end")])

    async with Engine([changed], permissions=free) as engine:
        report = await impact(engine, [journal], agent=changed, n=1, models=models)
    (sample,) = report.journals[0].samples

    assert (sample.changed, sample.report.served, sample.report.performed) == (is_changed, served, 0)


@pytest.mark.spec("programs:PG39")
async def test_checks_count_tools_called_by_programs() -> None:
    """A check that something must not be called holds for programs."""
    journal = await record_run(PRICES)
    async with Engine([buyer], models=ScriptedModel([]), permissions=POLICY) as engine:
        result = await engine.replay(journal)

    assert not Check.from_expression("tools == ['run_code', 'price', 'price', 'buy']").find_failure(result)
    assert Check.from_expression("'buy' not in tools").find_failure(result)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG39")
async def test_blame_serves_program_calls_from_the_record() -> None:
    """The second program of this run spoiled it; with the first one of the record in place a better one passes."""
    codes = ('tea = await price("tea")', "tea * 2")
    journal = await record_run(*codes)

    def models() -> ScriptedModel:
        def reply(request: Any) -> Any:
            results = [message.text for message in request.messages if message.role == "tool"]
            better = ('tea = await price("tea")', "tea * 3")
            return tool_call("run_code", {"code": better[len(results)]}) if len(results) < 2 else text(results[-1])

        return ScriptedModel(reply)

    async with Engine([buyer], permissions=POLICY) as engine:
        report = await blame(engine, journal, Check.from_expression("text == '90'"), k=2, models=models)

    assert [(step.ok, step.failed, step.unknown) for step in report.steps] == [(2, 0, 0), (2, 0, 0), (0, 2, 0)]
    assert report.blamed is not None
    assert report.blamed.step.address == "#2"
    assert report.performed == 0


@pytest.mark.deep
@pytest.mark.smoke
def test_a_pinned_program_run_fails_until_the_check_passes(recorded: Path) -> None:
    """Its calls come from the kept journal."""
    agent = recorded.with_name("buyer.py")
    with Engine([load_agent(agent)], models=ScriptedModel([text("end")])) as engine:
        engine.resume_sync(recorded, answers={"1.q2": "yes"})
    folder = recorded.with_name("tests") / "journals"
    made = command("compare", "pin", recorded, "--agent", agent, "--check", "'price' not in tools", "--dir", folder)
    again = command("compare", "pin", recorded, "--agent", agent, "--check", "'price' in tools", "--dir", folder)

    assert made.exit_code == 0, made.output
    assert "the test fails, as expected" in made.output
    assert again.exit_code == 1
