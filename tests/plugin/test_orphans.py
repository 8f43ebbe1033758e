"""
Recordings that no test uses any more, and names that no two tests share.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ("pytester",)

TESTS = """
def test_one(cassette):
    ask(cassette, "a")

def test_two(cassette):
    ask(cassette, "b")

@pytest.mark.skipif(SKIPS, reason="not today")
def test_three(cassette):
    ask(cassette, "c")

def test_shared(cassette):
    ask(cassette("shared"), "d")
"""
FOLDER = Path("cassettes/test_it")


def project(*gone: str, skips: bool = False) -> str:
    body = TESTS.replace("SKIPS", str(skips))
    for name in gone:
        body = body.replace(f"test_{name}(", f"check_{name}(")
    return body


def recordings() -> set[str]:
    return {path.name for path in FOLDER.iterdir()}


LISTED = ["1 recording that no test uses*", "*cassettes/test_it/test_two.yaml*"]


@pytest.mark.deep
@pytest.mark.spec("replay:Y12")
def test_orphaned_recordings_are_listed_after_a_full_collection(run, pytester):
    """
    Not with -k, -m, a node id, --deselect or --lf, for then nobody can know; those of a skipped test are owned.
    """
    run(project(), "--stepengine-record=once").assert_outcomes(passed=4)
    assert {"test_one.yaml", "test_two.yaml", "test_three.yaml", "shared.yaml"} == recordings()
    run(project(skips=True)).stdout.no_fnmatch_line("*no test uses*")
    (FOLDER / "shared.yaml").rename("cassettes/shared.yaml")
    alone = project("two", "shared", skips=True)
    said = run(alone)
    assert 0 == said.ret
    said.stdout.fnmatch_lines([*LISTED, "*--stepengine-orphans=delete"])
    assert 1 == run(alone, "--stepengine-orphans=fail").ret
    silent = [
        ("--stepengine-orphans=off",), ("-k", "one"), ("-m", "not slow"), ("test_it.py::test_one",),
        ("--deselect", "test_it.py::test_one"), ("--collect-only",),
    ]  # fmt: skip
    for args in silent:
        run(alone, "--stepengine-orphans=fail", *args).stdout.no_fnmatch_line("*no test uses*")
    failing = run(alone.replace('"a")', '"z")'), "--stepengine-orphans=fail")
    assert 1 == failing.ret
    failing.stdout.fnmatch_lines(LISTED)

    pytest.importorskip("xdist")
    spread = run(alone, "-n1", "--stepengine-orphans=fail")
    assert 1 == spread.ret
    spread.stdout.fnmatch_lines(LISTED)
    crashed = run(alone.replace('(cassette, "a")', '(cassette, "a"); import os; os._exit(3)'), "-n1")
    crashed.stdout.no_fnmatch_line("*no test uses*")
    run(alone, "--stepengine-orphans=delete").stdout.fnmatch_lines(["*was deleted*"])
    assert {"test_one.yaml", "test_three.yaml"} == recordings()
    run(alone).stdout.no_fnmatch_line("*no test uses*")


SHARING = """
def test_own(cassette):
    ask(cassette, "a")

def test_shared(cassette):
    BEFORE
    ask(cassette("common"), "b")
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y12")
@pytest.mark.parametrize(
    ("before", "words"), [("pass", ()), ("pytest.skip('not today')", ()), ("assert 0", ()), ("pass", ("-n1",))]
)
def test_shared_cassettes_are_orphans_only_without_a_user(run, before, words):
    """
    A test that is skipped or fails may use any of them: it has not named them.
    """
    if words:
        pytest.importorskip("xdist")
    run(SHARING.replace("BEFORE", "pass"), "--stepengine-record=once").assert_outcomes(passed=2)

    kept = run(SHARING.replace("BEFORE", before), "--stepengine-orphans=delete", *words)

    kept.stdout.no_fnmatch_line("*no test uses*")
    assert "common.yaml" in recordings()
    gone = run(
        SHARING.replace("test_shared", "check_shared").replace("BEFORE", "pass"), "--stepengine-orphans=delete", *words
    )
    gone.stdout.fnmatch_lines(["1 recording that no test uses was deleted*", "*common.yaml"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y12", "replay:Y7")
@pytest.mark.parametrize("setting", ["recorded", "{rootdir}/recorded"])
def test_recordings_of_deleted_modules_are_orphans_too(run, pytester, setting):
    pytester.makeini(f"[pytest]\nstepengine_cassette_dir = {setting}\n")
    gone = pytester.mkdir("inner") / "test_gone.py"
    gone.write_text("import pytest\n")
    run(project("two", "three", "shared"), "--stepengine-record=once").assert_outcomes(passed=1)
    place = pytester.path / ("inner/recorded" if setting == "recorded" else "recorded/inner") / "test_gone"
    place.mkdir(parents=True)
    (place / "test_old.yaml").touch()
    (place.parent / "shared.yaml").touch()
    gone.unlink()
    result = run(project("two", "three", "shared"))
    result.stdout.fnmatch_lines(["1 recording that no test uses*", "*test_gone/test_old.yaml"])
    run(project("two", "three", "shared"), "test_it.py").stdout.no_fnmatch_line("*no test uses*")


CASES = """
class TestAll:
    @pytest.mark.parametrize("name", ["a/b", "a:b", "plain", "EUR", "eur", "x" * 150])
    def test_one(self, cassette, name):
        ask(cassette, name)

    def test_twin(self, cassette):
        ask(cassette, "t")

    def test_TWIN(self, cassette):
        ask(cassette, "T")
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y7")
def test_recordings_have_portable_and_unique_file_names(run, pytester):
    """
    A name depends on its test alone: whichever tests are selected, each finds its own file.
    """
    pytester.makeini("[pytest]\nstepengine_cassette_dir = {rootdir}/recorded\n")
    run(CASES, "--stepengine-record=once").assert_outcomes(passed=8)
    names = sorted(p.name for p in (pytester.path / "recorded" / "test_it").iterdir())
    assert (8, 8) == (len(names), len({name.lower() for name in names}))
    assert {"TestAll.test_one[plain].yaml", "TestAll.test_one[eur].yaml"} <= set(names)
    assert 2 == sum(name.startswith("TestAll.test_one[a-b]~") for name in names)
    assert 2 == sum(name.lower().startswith("testall.test_twin~") for name in names)
    assert all(len(name) < 140 for name in names)
    run(CASES).assert_outcomes(passed=8)
    for chosen in ("plain", "EUR", "a/b", "test_TWIN"):
        assert "failed" not in run(CASES, "-k", chosen).parseoutcomes()


@pytest.mark.deep
@pytest.mark.spec("replay:Y12")
@pytest.mark.parametrize("way", ["ignored", "skipped"])
def test_recordings_of_uncollected_modules_are_no_orphans(run, pytester, way):
    other = "import pytest\nfrom test_it import ask\n{}\ndef test_other(cassette):\n    ask(cassette, 'o')\n"
    module = pytester.makepyfile(test_other=other.format(""))
    run(project(), "--stepengine-record=once").assert_outcomes(passed=5)
    file = Path("cassettes/test_other/test_other.yaml")
    if way == "skipped":
        module.write_text(other.format("pytest.skip('not today', allow_module_level=True)"))
    words = ["--ignore=test_other.py"] if way == "ignored" else []

    run(project(), "--stepengine-orphans=delete", *words).stdout.no_fnmatch_line("*test_other.yaml*")

    assert file.exists()
    module.unlink()
    run(project(), "--stepengine-orphans=delete").stdout.fnmatch_lines(["*test_other.yaml*"])
    assert not file.exists()


PLAIN_VCRPY = """
interactions:
- request: {method: GET, uri: 'https://api.test/', headers: {}, body: null}
  response: {status: {code: 200, message: OK}, headers: {}, body: {string: one}}
version: 1
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y12")
@pytest.mark.parametrize("folder", ["github", "test_it"])
def test_cassettes_of_another_recorder_are_no_orphans(run, pytester, folder):
    run(project(), "--stepengine-record=once").assert_outcomes(passed=4)
    file = pytester.path / "cassettes" / folder / "plain.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(PLAIN_VCRPY)

    run(project(), "--stepengine-orphans=delete").stdout.no_fnmatch_line("*plain.yaml*")

    assert file.exists()
