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
@pytest.mark.spec("replay:M3", "replay:M4", "replay:M7", "replay:Y9", "replay:M1")
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
@pytest.mark.spec("replay:M5", "replay:M6")
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
