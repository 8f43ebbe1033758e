"""
The pytest plugin: recordings per test, replayed by default, never in silence past them.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import stepengine.pytest_plugin as plugin

pytest_plugins = ("pytester",)

ONE = "\ndef test_one(cassette):\n    assert [{'to': 'a'}] == ask(cassette, 'a')\n"
FILE = Path("cassettes/test_it/test_one.yaml")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y7", "replay:M1", "replay:M2")
def test_a_cassette_is_recorded_once_and_replayed_by_default(run, pytester):
    missing = run(ONE)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*CassetteMiss*", "*to record it: pytest*--stepengine-record=once*"])

    run(ONE, "--stepengine-record=once", "-rA").assert_outcomes(passed=1)
    first = (pytester.path / FILE).read_bytes()
    run(ONE).assert_outcomes(passed=1)
    run(ONE, "--stepengine-record=once").assert_outcomes(passed=1)
    assert first == (pytester.path / FILE).read_bytes()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y8", "replay:M1")
def test_differing_and_unused_interactions_fail_the_test(run):
    run(ONE, "--stepengine-record=once")

    other = run(ONE.replace("ask(cassette, 'a')", "ask(cassette, 'b')"))
    other.assert_outcomes(failed=1)
    other.stdout.fnmatch_lines(["*CassetteMiss*"])
    unused = run("\ndef test_one(cassette):\n    pass\n")
    unused.assert_outcomes(failed=1)
    unused.stdout.fnmatch_lines(["*CassetteUnused: 1 of 1 interactions of *test_one.yaml were not played*"])
    assert unused.stdout.str().count("to drop them: pytest") == 1
    run("\n@pytest.mark.stepengine(allow_unused=True)\ndef test_one(cassette):\n    pass\n").assert_outcomes(passed=1)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:M3", "replay:M4", "replay:M2", "replay:Y9", "replay:M1")
def test_record_modes_keep_drop_and_replace_interactions(run, pytester):
    def held():
        from stepengine.testing import Cassette

        return [i.request.body.decode() for i in Cassette.load(pytester.path / FILE).interactions]

    def test_of(*bodies, end=""):
        return f"\ndef test_one(cassette):\n    ask(cassette, *{bodies!r})\n{end}"

    run(test_of("a", "b"), "--stepengine-record=once")
    run(test_of("b", "c"), "--stepengine-record=new").assert_outcomes(passed=1)
    assert ["a", "b", "c"] == held()
    run(test_of("c", "d", end="    assert 0\n"), "--stepengine-record=extend").assert_outcomes(failed=1)
    assert ["a", "b", "c"] == held()
    run(test_of("c", "d"), "--stepengine-record=extend").assert_outcomes(passed=1)
    assert ["c", "d"] == held()
    run(test_of("d", "e"), "--stepengine-record=rewrite").assert_outcomes(passed=1)
    assert ["d", "e"] == held()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:M5")
def test_marks_and_environment_choose_the_record_mode(run, monkeypatch):
    marked = "\n@pytest.mark.stepengine(record='none')" + ONE.lstrip("\n").join(["\n", ""])
    run(marked, "--stepengine-record=once").assert_outcomes(failed=1)
    run("\n@pytest.mark.stepengine(recrod='once')" + "\n" + ONE.strip() + "\n").assert_outcomes(errors=1)
    monkeypatch.setenv("CI", "1")
    once = marked.replace("none", "once")
    run(once).assert_outcomes(failed=1)
    monkeypatch.delenv("CI")
    run(once).assert_outcomes(passed=1)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--stepengine-record=sometimes")
    assert pytest.ExitCode.USAGE_ERROR == run(ONE).ret


@pytest.mark.spec("ecosystem:EC123")
def test_the_plugin_imports_only_pytest_the_standard_library_and_itself():
    for file in Path(plugin.__file__).parent.glob("*.py"):
        names = [
            n.names[0].name if isinstance(n, ast.Import) else n.module
            for n in ast.parse(file.read_text()).body
            if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        others = {name for name in names if name.partition(".")[0] not in {"pytest", *sys.stdlib_module_names}}
        assert set() == {name for name in others if not name.startswith("stepengine.pytest_plugin")}


@pytest.mark.spec("replay:Y3", "replay:Y4")
def test_own_fixtures_replace_those_with_short_names(run):
    run("""
@pytest.fixture
def journal():
    return "mine"

@pytest.fixture
def cassette():
    return "mine"

def test_own(journal, cassette):
    assert ("mine", "mine") == (journal, cassette)

def test_both(journal, cassette, stepengine_journal, stepengine_cassette):
    assert ("mine", "mine") == (journal, cassette)
    assert stepengine_journal.replaying
    assert [] == list(stepengine_cassette.misses)
""").assert_outcomes(passed=2)


@pytest.mark.deep
@pytest.mark.spec("replay:M4", "replay:M3")
def test_extending_without_a_request_keeps_the_cassette(run, pytester):
    run(ONE, "--stepengine-record=once").assert_outcomes(passed=1)
    first = (pytester.path / FILE).read_bytes()

    run("\ndef test_one(cassette):\n    pass\n", "--stepengine-record=extend").assert_outcomes(passed=1)

    assert first == (pytester.path / FILE).read_bytes()


@pytest.mark.deep
@pytest.mark.spec("replay:M3", "replay:M4")
@pytest.mark.parametrize("mode", ["new", "extend"])
def test_adding_to_a_cassette_keeps_its_other_data(run, pytester, mode):
    from stepengine.testing import Cassette

    run(ONE, "--stepengine-record=once").assert_outcomes(passed=1)
    held = Cassette.load(pytester.path / FILE)
    held.extras["frozen"] = {"time": [1]}
    held.save()

    run(ONE.replace("'a')", "'a', 'b')[:1]"), f"--stepengine-record={mode}").assert_outcomes(passed=1)

    again = Cassette.load(pytester.path / FILE)
    assert (2, {"frozen": {"time": [1]}}) == (len(again), again.extras)


SHARING = """
def test_one(cassette):
    ask(cassette("common"), "a", "b")

def test_two(cassette):
    ask(cassette("common"), "b", "c")
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y13", "replay:M2")
@pytest.mark.parametrize("mode", ["once", "rewrite", "new"])
def test_tests_that_share_a_cassette_record_into_it_together(run, pytester, mode):
    from stepengine.testing import Cassette

    if mode == "rewrite":
        run(SHARING.replace('"c"', '"d"'), "--stepengine-record=once")
    run(SHARING, f"--stepengine-record={mode}").assert_outcomes(passed=2)

    held = Cassette.load(pytester.path / "cassettes/test_it/common.yaml")
    assert ["a", "b", "c"] == [i.request.body.decode() for i in held.interactions]
    run(SHARING).assert_outcomes(passed=2)


DYNAMIC = """
def test_one(request):
    assert [{"to": "a"}] == ask(request.getfixturevalue("cassette"), "a")

@pytest.fixture
def asked(request):
    return ask(request.getfixturevalue("cassette"), "b")

def test_two(asked):
    assert [{"to": "b"}] == asked
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y8", "replay:Y9", "replay:Y12")
def test_a_cassette_that_is_requested_dynamically_is_written_and_checked(run, pytester):
    run(DYNAMIC, "--stepengine-record=once").assert_outcomes(passed=2)
    assert 2 == len([*pytester.path.rglob("*.yaml")])

    run(DYNAMIC, "--stepengine-orphans=fail").assert_outcomes(passed=2)
    unused = run(
        DYNAMIC.replace(
            'assert [{"to": "a"}] == ask(request.getfixturevalue("cassette"), "a")',
            'request.getfixturevalue("cassette")',
        )
    )
    unused.assert_outcomes(passed=1, failed=1)
    unused.stdout.fnmatch_lines(["*CassetteUnused*"])


RERUNNING = """
import pytest
from _pytest.runner import runtestprotocol

@pytest.hookimpl
def pytest_runtest_protocol(item, nextitem):
    runtestprotocol(item, nextitem=nextitem, log=False)
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y8")
def test_a_test_that_is_run_again_has_a_new_cassette(run, pytester):
    run(ONE, "--stepengine-record=once").assert_outcomes(passed=1)
    pytester.makeconftest(RERUNNING)

    again = ONE.replace("cassette):\n", "cassette, tried=[]):\n    tried.append(1)\n    assert len(tried) == 2\n")

    run(again).assert_outcomes(passed=1)
