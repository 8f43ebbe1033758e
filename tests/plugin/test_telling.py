"""
What the plugin says: every command and option it names is real, and does what the message promises.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import stepengine

pytest_plugins = ("pytester",)

PACKAGE = Path(stepengine.__file__).parent
ONE = "\ndef test_one(cassette):\n    ask(cassette, 'a')\n"


@pytest.mark.spec("replay:Y1", "replay:Y18")
def test_every_option_named_in_a_message_exists(run):
    """
    Messages are looked for in the whole package; the mark, the help and the parser have to agree with them.
    """
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    helped = run(ONE, "--help").stdout.str()
    for option, value in set(re.findall(r"(--stepengine-[a-z-]+[a-z])(?:=([a-z]+))?", sources)):
        line = re.search(rf"{option}(?:=\{{([a-z,]+)\}})?", helped)
        assert line, option
        assert not value or value in (line[1] or "").split(","), (option, value)
    settings = {
        "stepengine_record", "stepengine_journal_dir", "stepengine_cassette_dir", "stepengine_redact",
        "stepengine_allow_secrets", "stepengine_network_allow",
    }  # fmt: skip
    assert settings <= set(re.findall(r"stepengine_[a-z_]+", helped))
    (mark,) = re.findall(r"@pytest.mark.stepengine\(([^)]*)\)", run(ONE, "--markers").stdout.str())
    named = set(re.findall(r"mark\.stepengine\((\w+)=", sources))
    assert named <= set(re.findall(r"\w+", mark))


@pytest.mark.deep
@pytest.mark.spec("replay:Y18", "replay:C14")
@pytest.mark.parametrize(
    ("before", "after"),
    [(None, "'a'"), ("'a'", "'b'"), ("'a', 'c'", "'a'"), ("'a'", "'a', 'a'")],
    ids=["missing", "differs", "unused", "used up"],
)
def test_the_command_in_a_message_makes_the_test_pass(run, pytester, before, after):
    """
    Also from another folder than the project's, and with a parameter that a shell would take apart.
    """
    body = "\n@pytest.mark.parametrize('way', ['a b/$x'])\ndef test_one(cassette, way):\n    ask(cassette, BODIES)\n"
    if before:
        run(body.replace("BODIES", before), "--stepengine-record=once").assert_outcomes(passed=1)
    failed = run(body.replace("BODIES", after))
    failed.assert_outcomes(failed=1)
    (command,) = set(re.findall(r"(pytest \S.* --stepengine-record=\w+)", failed.stdout.str()))
    _, *args = shlex.split(command)
    run(body.replace("BODIES", after), *args).assert_outcomes(passed=1)
    run(body.replace("BODIES", after)).assert_outcomes(passed=1)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y17")
def test_recorded_files_are_always_reported_and_replays_with_v(run):
    recorded = run(ONE, "--stepengine-record=once")
    recorded.stdout.fnmatch_lines(["recorded cassettes/test_it/test_one.yaml: 1 interaction"])
    run(ONE).stdout.no_fnmatch_line("*stepengine recordings*")
    run(ONE, "-v").stdout.fnmatch_lines([
        "*stepengine recordings*",
        "test_it.py::test_one: cassettes/test_it/test_one.yaml  mode none: 1 replayed, 0 recorded, 0 unused",
    ])  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y17")
def test_recording_reports_its_cost_and_replay_the_savings(run, agent_test):
    priced = (
        agent_test(1)
        .replace('text("fine")', "ModelReply('fine', cost=Decimal('0.0125'))")
        .replace("import anyio", "from decimal import Decimal\nfrom stepengine.models import ModelReply\nimport anyio")
    )
    run(priced, "--stepengine-record=once").stdout.fnmatch_lines(
        ["recorded journals/*test_one.jsonl: 2 effects, $0.0125"]
    )
    run(priced.replace("LIVE = 1", "LIVE = 0"), "-v").stdout.fnmatch_lines(
        ["*2 replayed, 0 recorded, 0 unused, $0.0125 saved"]
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y1", "replay:C14")
def test_the_full_diff_shows_everything_that_differs(run):
    long = "x" * 2_000
    body = "\nimport json\n\ndef test_one(cassette):\n    ask(cassette, json.dumps({'a': LONG, **{str(n): N for n in range(20)}}))\n"
    run(body.replace("LONG", "'x' * 2_000").replace("N for", "0 for"), "--stepengine-record=once")
    other = body.replace("LONG", "'x' * 2_000 + 'y'").replace("N for", "1 for")
    short = run(other)
    short.stdout.fnmatch_lines(["*nearest: interaction 0 (unused), 21 differences*", "*and 13 more*"])
    assert long not in short.stdout.str()
    full = run(other, "--stepengine-diff=full")
    full.stdout.fnmatch_lines(["*Captured stepengine call*", "*/19", "*recorded 0*", "*now*1*"])
    assert f"{long}y" in full.stdout.str()


LEAKY = """
import json, os
from stepengine import AgentDefinition, Engine, Perform

def test_http(cassette):
    said = {"api_key": os.environ["MY_TOKEN"], "text": f"WORD {os.environ['MY_TOKEN']} SHAPED"}
    try:
        ask(cassette, json.dumps(said))
    except BaseException as miss:
        raise miss.with_traceback(None) from None  # pytest shows the lines of a test, and with them what it says itself

def test_run(journal):
    def handle_steps(ctx):
        yield from Perform(len, f"WORD {os.environ['MY_TOKEN']} SHAPED")

    with Engine() as engine:
        engine.run_sync(AgentDefinition("leaky", handle_steps=handle_steps), journal=journal)
"""


@pytest.mark.deep
@pytest.mark.spec("reliability:R11")
def test_a_failure_report_contains_no_secret(run, monkeypatch):
    known, shaped = "a-value-nobody-guesses-4711", "sk-ant-api03-" + "Zz9Yy8Xx7Ww6" * 4
    monkeypatch.setenv("MY_TOKEN", known)
    body = LEAKY.replace("SHAPED", "{'sk-ant-api03-' + 'Zz9Yy8Xx7Ww6' * 4}")
    run(body.replace("WORD", "old"), "--stepengine-record=once").assert_outcomes(passed=2)
    failed = run(body.replace("WORD", "new"), "--stepengine-diff=full", "-v")
    failed.assert_outcomes(failed=2)
    failed.stdout.fnmatch_lines_random(
        ["*CassetteMiss: POST*", "*now*new <redacted:MY_TOKEN> <redacted:*", "*/args/0*"]
    )
    printed = failed.stdout.str() + failed.stderr.str()
    assert [secret for secret in (known, shaped) if secret in printed] == []


SWALLOWED = """
import asyncio

def test_one(cassette):
    async def all_of_them():
        transport = cassette.transport(httpx2.MockTransport(answer))
        async with httpx2.AsyncClient(transport=transport) as client:
            calls = [client.post("https://api.test/v1", content=body) for body in ("a", "b")]
            return await asyncio.gather(*calls, return_exceptions=True)
    assert len(asyncio.run(all_of_them())) == 2
    ENDS
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y8", "replay:C14")
def test_a_swallowed_cassette_miss_still_fails_the_test(run):
    run(
        SWALLOWED.replace("ENDS", "pass").replace('("a", "b")', '("a", "c")'), "--stepengine-record=once"
    ).assert_outcomes(passed=1)
    quiet = run(SWALLOWED.replace("ENDS", "pass"))
    quiet.assert_outcomes(failed=1)
    quiet.stdout.fnmatch_lines(["*CassetteMiss: POST https://api.test/v1 is not in cassettes/test_it/test_one.yaml*"])
    own = run(SWALLOWED.replace("ENDS", "assert 0, 'its own'"))
    own.assert_outcomes(failed=1)
    own.stdout.fnmatch_lines(
        ["*AssertionError: its own*", "*CassetteMiss: POST*", "FAILED test_it.py::test_one - CassetteMiss: *"]
    )
    left = run("\ndef test_one(cassette):\n    assert 0, 'its own'\n")
    left.stdout.fnmatch_lines(["*its own*"])
    left.stdout.no_fnmatch_line("*CassetteUnused*")
    skipped = run(SWALLOWED.replace("ENDS", "pytest.skip('not today')"))
    skipped.assert_outcomes(skipped=1)


MARKED = """
@pytest.mark.stepengine(MARK)
def test_one(cassette):
    ASKS
"""


def marked(mark: str, asks: str) -> str:
    return MARKED.replace("MARK", mark).replace("ASKS", asks)


@pytest.mark.deep
@pytest.mark.spec("replay:Y6", "replay:V19")
def test_the_mark_sets_ignored_fields_extra_cassettes_and_chunks(run, pytester):
    """
    A second cassette is only read: what is left in it fails nothing, and nothing is recorded into it.
    """
    shared = pytester.mkdir("cassettes") / "shared.yaml"
    run(marked("", "ask(cassette, 'b', 'c')"), "--stepengine-record=once").assert_outcomes(passed=1)
    Path("cassettes/test_it/test_one.yaml").rename(shared)
    before = shared.read_bytes()
    both = marked("extra=['shared.yaml']", "ask(cassette, 'a', 'b')")
    run(both, "--stepengine-record=once").assert_outcomes(passed=1)
    run(both).assert_outcomes(passed=1)
    run(marked("", "ask(cassette, 'a')")).assert_outcomes(passed=1)
    assert before == shared.read_bytes()
    run(marked("extra=['none.yaml']", "pass")).stdout.fnmatch_lines(["*there is no cassette 'none.yaml'*"])

    pointed = 'ask(cassette, \'{"id": %d, "say": "a"}\')'
    run(marked("", pointed % 1), "--stepengine-record=rewrite").assert_outcomes(passed=1)
    run(marked("", pointed % 2)).assert_outcomes(failed=1)
    run(marked("ignore=['/id']", pointed % 2)).assert_outcomes(passed=1)

    cut = "assert [2] == [len(chunk) for chunk in cassette.transport()._split_body_into_chunks(b'ab', None)][:1]"
    run(marked("chunks=2, allow_unused=True", cut)).assert_outcomes(passed=1)
    for wrong in ("chunks='some'", "recrod='once'", "record='sometimes'", "ignore='/id'", "'once'"):
        assert "errors" in run(marked(wrong, "pass")).parseoutcomes(), wrong


GATE = """
from stepengine import AgentDefinition
from stepengine.evaluation import Case, Evaluation, contains, evaluate_sync
from stepengine.testing import text

greeter = AgentDefinition("greeter", model="test/m")
cases = [Case(name, f"Greet {name}", checks=[contains(name)]) for name in ("Ann", "Bob", "Carla", "Doris", "Emil")]

def evaluated():
    evaluation = Evaluation("greeting", cases=cases, agents={"greeter": greeter}, gates=["pass >= 0.8"])
    return evaluate_sync(evaluation, replies=lambda request: text("Hello!"))

def test_named():
    report = evaluated()
    assert report.passed, report

def test_bare():
    report = evaluated()
    assert report.passed
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("name", ["test_named", "test_bare"])
def test_a_failed_gate_shows_the_whole_report(run, name):
    failed = run(GATE, "-k", name)
    failed.assert_outcomes(failed=1)
    shown = failed.stdout.str()

    assert "<EvaluationReport of 'greeting': gate pass >= 0.8: greeter.pass is 0, not >= 0.8>" in shown
    assert [] == [
        case for case in ("Ann", "Bob", "Carla", "Doris", "Emil") if f"{case} greeter 1: contains:" not in shown
    ]
    assert "gate pass >= 0.8: greeter.pass is 0, not >= 0.8" in shown.partition("- evaluation greeting -")[2]


@pytest.mark.deep
@pytest.mark.spec("replay:Y18", "replay:Y3")
@pytest.mark.parametrize("mode", ["extend", "rewrite"])
def test_the_commands_at_a_divergence_make_the_test_pass(run, agent_test, mode):
    run(agent_test(1), "--stepengine-record=once")
    loose = agent_test(1, prompt="Look again.").replace("LOOKED)", "[])").replace('["a"] * LIVE)', "[])")
    failed = run(loose)
    failed.assert_outcomes(failed=1)
    (command,) = set(re.findall(rf"(pytest \S+ --stepengine-record={mode})", failed.stdout.str()))
    run(loose, *shlex.split(command)[1:]).assert_outcomes(passed=1)
    run(loose.replace("LIVE = 1", "LIVE = 0")).assert_outcomes(passed=1)
