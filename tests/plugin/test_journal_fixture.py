"""
The `journal` fixture: a run is recorded once, and repeated with the present code from then on.
"""

from __future__ import annotations

import json
import re

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Start, Wait
from stepengine.errors import JournalError, ReplayDivergence
from stepengine.testing import JournalFixture, ScriptedModel, text

pytest_plugins = ("pytester",)

FILE = "journals/test_it/test_one.jsonl"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y3", "replay:M1", "replay:M2", "replay:M10", "replay:Y16")
def test_a_run_is_recorded_once_and_repeated_afterwards(run, pytester, agent_test):
    """
    A scripted model plays as always, whatever the mode; the journal decides whether it is asked.
    """
    file = pytester.path / FILE

    missing = run(agent_test(1))
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        ["*there is no journal journals/test_it/test_one.jsonl*", "*--stepengine-record=once*"]
    )
    run(agent_test(1), "--stepengine-record=once").assert_outcomes(passed=1)
    assert [file] == [*file.parent.iterdir()]
    first = file.read_bytes()
    for args in ((), ("--stepengine-record=once",), ("--stepengine-record=new",), ("--stepengine-record=extend",)):
        run(agent_test(0), *args).assert_outcomes(passed=1)
        assert first == file.read_bytes()
    run(agent_test(1), "--stepengine-record=rewrite").assert_outcomes(passed=1)
    assert first == file.read_bytes()
    run(agent_test(1, prompt="Look."), "--stepengine-record=rewrite").assert_outcomes(passed=1)
    assert first != file.read_bytes()
    run(agent_test(0, prompt="Look.")).assert_outcomes(passed=1)
    gone = "\ndef test_one(journal):\n    pass\n"
    run(gone, "--stepengine-record=rewrite").assert_outcomes(passed=1)
    assert not file.exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y8", "replay:D1")
def test_a_divergence_fails_with_place_field_and_commands(run, pytester, agent_test):
    run(agent_test(1), "--stepengine-record=once")
    first = (pytester.path / FILE).read_bytes()

    changed = run(agent_test(0, prompt="Look closely."))
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "*made.run_sync(*",
            "*ReplayDivergence: the run diverged from journals/test_it/test_one.jsonl at step 1, effect #1 of watcher*",
            '*/system_prompt*recorded "Watch."*now "Look closely."*',
            "*keeping the effects before #1: pytest test_it.py::test_one --stepengine-record=extend*",
            "*all of it: pytest test_it.py::test_one --stepengine-record=rewrite*",
        ]
    )
    changed.stdout.no_fnmatch_line("*live.py*")
    other = run(agent_test(0).replace('"go"', '"stop"'))
    other.stdout.fnmatch_lines(['*/prompt*recorded "go"*now "stop"*'])
    left = run("\ndef test_one(journal):\n    pass\n")
    left.stdout.fnmatch_lines(["*the test did not use the journal journals/test_it/test_one.jsonl*"])
    left.stdout.no_fnmatch_line("*recordings.py*")
    run("\n@pytest.mark.stepengine(allow_unused=True)\ndef test_one(journal):\n    pass\n").assert_outcomes(passed=1)
    assert first == (pytester.path / FILE).read_bytes()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:D15", "replay:Y8")
def test_a_different_end_fails_the_test_with_both_ends(run, agent_test):
    run(agent_test(1), "--stepengine-record=once")
    ignoring = agent_test(0).replace("result.output, LOOKED", '"done", LOOKED').replace("LIVE = 1", "LIVE = 0")
    for mode in ("none", "new"):
        told = run(ignoring.replace('return "done"', 'return "over"'), f"--stepengine-record={mode}")
        told.assert_outcomes(failed=1)
        told.stdout.fnmatch_lines(
            ['*/output*recorded "done"*now "over"*', "*keeping every effect: pytest test_it.py::test_one *"]
        )
    broken = run(ignoring.replace('return "done"', 'raise ValueError("gone")'))
    broken.stdout.fnmatch_lines(['*/status*recorded "completed"*now "failed"*', "*/error*now*ValueError: gone*"])
    over = agent_test(0).replace('"done"', '"over"')
    run(over, "--stepengine-record=extend").assert_outcomes(passed=1)
    run(over).assert_outcomes(passed=1)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:M4", "replay:D10", "replay:Y9")
def test_extend_rerecords_changed_effects_but_keeps_failed_tests_record(run, pytester, agent_test):
    file = pytester.path / FILE
    run(agent_test(1), "--stepengine-record=once")
    first = file.read_bytes()
    loose = agent_test(1, prompt="Look again.").replace('["a"] * LIVE)', "[])")

    run(loose.replace('("done", ', '("never", '), "--stepengine-record=extend").assert_outcomes(failed=1)
    assert (first, [file]) == (file.read_bytes(), [*file.parent.iterdir()])
    told = run(loose, "--stepengine-record=extend", "-v")
    told.assert_outcomes(passed=1)
    told.stdout.fnmatch_lines(["*mode extend: 1 replayed, 1 recorded, 0 unused*"])
    assert (True, [file]) == (first != file.read_bytes(), [*file.parent.iterdir()])
    run(loose.replace("LIVE = 1", "LIVE = 0")).assert_outcomes(passed=1)
    asked = loose.replace('"go"', '"stop"').replace('"done", []', '"done", ["a"]')
    run(asked, "--stepengine-record=extend").assert_outcomes(passed=1)
    run(asked.replace("LIVE = 1", "LIVE = 0").replace('["a"]', "[]")).assert_outcomes(passed=1)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:M3")
def test_mode_new_records_missing_effects_but_no_changed_ones(run, pytester, agent_test):
    file = pytester.path / FILE
    run(agent_test(1), "--stepengine-record=once")
    first = file.read_bytes()
    longer = agent_test(1, more='yield ToolCall("look", {"path": "b"})').replace('["a"] * LIVE)', "LOOKS)")

    run(longer.replace("LOOKS", "['b']").replace("LIVE = 1", "LIVE = 0"), "--stepengine-record=none").assert_outcomes(
        failed=1
    )
    run(agent_test(0, prompt="Other."), "--stepengine-record=new").assert_outcomes(failed=1)
    assert first == file.read_bytes()
    grown = run(longer.replace("LOOKS", "['b']").replace("LIVE = 1", "LIVE = 0"), "--stepengine-record=new", "-v")
    grown.assert_outcomes(passed=1)
    grown.stdout.fnmatch_lines(
        ["recorded journals/test_it/test_one.jsonl: 1 effect", "*2 replayed, 1 recorded, 0 unused*"]
    )
    second = file.read_bytes()
    run(longer.replace("LOOKS", "[]").replace("LIVE = 1", "LIVE = 0")).assert_outcomes(passed=1)
    shorter = agent_test(0).replace('["a"] * LIVE)', "[])")
    kept = run(shorter, "--stepengine-record=new", "-v")
    kept.assert_outcomes(passed=1)
    kept.stdout.fnmatch_lines(["*2 replayed, 0 recorded, 1 unused*"])
    assert second == file.read_bytes()
    run(shorter).assert_outcomes(failed=1)


TWICE = """
def test_one(journal):
    with engine() as made:
        for one in (journal, SECOND):
            made.run_sync("watcher", "go", journal=one)
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y3")
def test_a_test_with_two_runs_names_the_second(run, pytester, agent_test):
    refused = run(agent_test(2, TWICE.replace("SECOND", "journal")), "--stepengine-record=once")
    refused.stdout.fnmatch_lines(["*stores one run*journal('second')*"])
    assert [] == [*pytester.path.rglob("*.jsonl")]
    named = TWICE.replace("SECOND", "journal('second')")
    run(agent_test(2, named), "--stepengine-record=once").assert_outcomes(passed=1)
    assert {"test_one.jsonl", "test_one.second.jsonl"} == {p.name for p in pytester.path.rglob("*.jsonl")}
    run(agent_test(0, named)).assert_outcomes(passed=1)
    only = run(agent_test(0, TWICE.replace("SECOND", "")))
    only.assert_outcomes(failed=1)
    only.stdout.fnmatch_lines(["*did not use the journal journals/test_it/test_one.second.jsonl*"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y9", "replay:K8", "replay:C5")
def test_an_interrupted_or_leaking_test_keeps_the_old_record(run, pytester, agent_test):
    file = pytester.path / FILE
    stops = "\ndef test_one(journal):\n    with engine() as made:\n        made.run_sync('watcher', 'go', journal=journal)\n"
    run(agent_test(1), "--stepengine-record=once")
    first = file.read_bytes()
    run(agent_test(1, f"{stops}    raise KeyboardInterrupt\n"), "--stepengine-record=rewrite", no_reraise_ctrlc=True)
    assert (first, [file]) == (file.read_bytes(), [*file.parent.iterdir()])
    # A rule that finds after the cleaning what no cleaning takes out: the last scan stands for itself.
    planted = f"{stops}    journal.redactor.rules.given\n    object.__setattr__(journal.redactor, 'find_secret_pointers', lambda *_: iter([('/effect', 'planted')]))\n"
    refused = run(agent_test(1, planted, prompt="Other."), "--stepengine-record=rewrite")
    refused.assert_outcomes(failed=1)
    refused.stdout.fnmatch_lines(["*SecretFound*"])
    assert first == file.read_bytes()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y6", "replay:Y1", "replay:K10")
def test_redaction_rules_come_from_mark_and_ini_file(run, pytester, agent_test):
    pytester.makeini("[pytest]\nstepengine_redact =\n    t-[0-9]+\n")
    marked = (
        "from stepengine.journal import RedactValue\n\n@pytest.mark.stepengine(redact=[RedactValue('Mallory', 'who')])"
    )
    body = (
        agent_test(1)
        .replace("\ndef test_one", f"\n{marked}\ndef test_one")
        .replace('"go"', '"go to t-4711 and Mallory"')
    )

    run(body, "--stepengine-record=once").assert_outcomes(passed=1)
    content = (pytester.path / FILE).read_text()
    assert "go to <redacted:stepengine_redact> and <redacted:who>" in content
    assert not {"4711", "Mallory"} & set(content.replace("-", " ").split())
    run(body.replace("LIVE = 1", "LIVE = 0")).assert_outcomes(passed=1)

    wire = f"\n{marked}\ndef test_wire(cassette):\n    ask(cassette, 'go to t-4711 and Mallory')\n"
    run(wire, "--stepengine-record=once").assert_outcomes(passed=1)
    content = (pytester.path / "cassettes/test_it/test_wire.yaml").read_text()
    assert 2 == len(re.findall(r"go to <redacted:stepengine_redact=\w{4}> and <redacted:who~\w{4}>", content))
    run(wire).assert_outcomes(passed=1)


SHORTER = """
@pytest.mark.stepengine(MARK)
def test_one(journal):
    with engine() as made:
        assert made.run_sync("watcher", "go", journal=journal).output == "done"
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y6", "replay:D15")
def test_allow_unused_lets_a_run_end_before_its_record(run, agent_test):
    strict, lenient = [SHORTER.replace("MARK", mark) for mark in ("", "allow_unused=True")]
    run(agent_test(1, strict), "--stepengine-record=once").assert_outcomes(passed=1)
    without = [agent_test(0, test).replace("    yield STEP\n", "") for test in (strict, lenient)]
    run(without[0]).stdout.fnmatch_lines(["*the run ended, but model_call was recorded here*"])
    run(without[1]).assert_outcomes(passed=1)


@pytest.mark.spec("replay:Y3")
def test_only_its_own_run_writes_the_journal_of_a_test(tmp_path):
    agent = AgentDefinition("w", model="test/m")
    first = JournalFixture(tmp_path / "one.jsonl", "once")
    assert not first.replaying
    with Engine(models={"test": ScriptedModel([text("fine")])}) as engine:
        recorded = engine.run_sync(agent, "go", journal=first)
        with pytest.raises(JournalError, match="is the journal of a test"):
            engine.resume_sync(first)
    first.check_usage()
    assert [1] == [account.recorded for account in first.write_recordings()]
    assert "run" == json.loads((tmp_path / "one.jsonl").read_text().splitlines()[0])["run"]
    again = JournalFixture(tmp_path / "one.jsonl", "none")
    with Engine(models={"test": ScriptedModel([])}) as engine:
        assert recorded == engine.run_sync(agent, "go", journal=again)
        third = JournalFixture(tmp_path / "one.jsonl", "none")
        with pytest.raises(ReplayDivergence):
            engine.run_sync(agent, "stop", journal=third)
    assert again.replaying
    again.check_usage()
    with pytest.raises(ReplayDivergence):
        third.check_usage()
    assert [] == again.write_recordings()


@pytest.mark.spec("replay:Y3")
def test_run_with_a_background_child_is_recorded(tmp_path):
    def handle_steps(ctx):
        child = yield from Start(AgentCall("kid", "go"))
        return (yield from Wait(child))[child].text

    kid = AgentDefinition("kid", model="test/m")
    agent = AgentDefinition("w", spawnable_agents=[kid], handle_steps=handle_steps)
    for mode, replies, effects in (("once", [text("fine")], 3), ("none", [], 0)):
        journal = JournalFixture(tmp_path / "one.jsonl", mode)
        with Engine([agent], models={"test": ScriptedModel(replies)}) as engine:
            assert "fine" == engine.run_sync("w", "go", journal=journal).output
        assert effects == sum(account.recorded for account in journal.write_recordings())
