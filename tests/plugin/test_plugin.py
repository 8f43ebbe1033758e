"""
The pytest plugin: recordings per test, replayed by default, never in silence past them.
"""

from __future__ import annotations

import ast
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

import stepengine.engine
import stepengine.journal
import stepengine.pytest_plugin as plugin
import stepengine.testing.recording
import stepengine.testing.recordings

pytest_plugins = ("pytester",)

# Runs in this process forget what they import; a second copy of these would not know the first one's classes.
SHARED = (yaml, stepengine.engine, stepengine.journal, stepengine.testing.recording, stepengine.testing.recordings)

INSTALLED = any(e.value == plugin.__name__ for e in entry_points(group="pytest11"))
LOADED = () if INSTALLED else ("-p", "stepengine.pytest_plugin")

HTTP = """
import httpx2, pytest

def answer(request):
    return httpx2.Response(200, json={"to": request.content.decode()})

def ask(cassette, *bodies):
    with httpx2.Client(transport=cassette.transport(httpx2.MockTransport(answer))) as client:
        return [client.post("https://api.test/v1", content=body).json() for body in bodies]
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """
    Write a test module and run pytest over it with the plugin.
    """
    monkeypatch.delenv("CI", raising=False)
    pytester.makeini("[pytest]\n")

    def ran(body: str, *args: str):
        pytester.makepyfile(test_it=HTTP + body)
        return pytester.runpytest_inprocess(*LOADED, "-p", "no:cacheprovider", "-p", "no:randomly", *args)

    return ran


ONE = "\ndef test_one(cassette):\n    assert [{'to': 'a'}] == ask(cassette, 'a')\n"
FILE = Path("cassettes/test_it/test_one.yaml")


@pytest.mark.spec("replay:Y7", "replay:M1", "replay:M2")
def test_a_cassette_is_recorded_once_and_replayed_by_default(run, pytester):
    missing = run(ONE)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*CassetteMiss*", "*--stepengine-record=extend*"])

    run(ONE, "--stepengine-record=once", "-rA").assert_outcomes(passed=1)
    first = (pytester.path / FILE).read_bytes()
    run(ONE).assert_outcomes(passed=1)
    run(ONE, "--stepengine-record=once").assert_outcomes(passed=1)
    assert first == (pytester.path / FILE).read_bytes()


@pytest.mark.spec("replay:Y8", "replay:M1")
def test_what_differs_and_what_is_left_over_fails_the_test(run):
    run(ONE, "--stepengine-record=once")

    other = run(ONE.replace("ask(cassette, 'a')", "ask(cassette, 'b')"))
    other.assert_outcomes(failed=1)
    other.stdout.fnmatch_lines(["*CassetteMiss*"])
    swallowed = "\ndef test_one(cassette):\n    try:\n        ask(cassette, 'a', 'b')\n    except BaseException:\n        pass\n"
    run(swallowed).assert_outcomes(failed=1)
    unused = run("\ndef test_one(cassette):\n    pass\n")
    unused.assert_outcomes(failed=1)
    unused.stdout.fnmatch_lines(["*CassetteUnused: 1 of 1 interactions of *test_one.yaml were not played*"])
    own = run("\ndef test_one(cassette):\n    assert 0, 'its own failure'\n")
    own.stdout.fnmatch_lines(["*its own failure*"])
    own.stdout.no_fnmatch_line("*CassetteUnused*")
    run("\n@pytest.mark.stepengine(allow_unused=True)\ndef test_one(cassette):\n    pass\n").assert_outcomes(passed=1)


@pytest.mark.spec("replay:M3", "replay:M4", "replay:M7", "replay:Y9")
def test_modes_keep_drop_and_replace_what_they_should(run, pytester):
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


@pytest.mark.spec("replay:M5", "replay:M6")
def test_marks_and_the_environment_decide_as_documented(run, monkeypatch, pytester):
    marked = "\n@pytest.mark.stepengine(record='none')" + ONE.lstrip("\n").join(["\n", ""])
    run(marked, "--stepengine-record=once").assert_outcomes(failed=1)
    run("\n@pytest.mark.stepengine(recrod='once')" + "\n" + ONE.strip() + "\n").assert_outcomes(errors=1)
    monkeypatch.setenv("CI", "1")
    refused = run(ONE, "--stepengine-record=once")
    assert pytest.ExitCode.USAGE_ERROR == refused.ret
    refused.stderr.fnmatch_lines(["*--stepengine-allow-live*"])
    run(ONE, "--stepengine-record=once", "--stepengine-allow-live").assert_outcomes(passed=1)
    (pytester.path / FILE).unlink()
    once = marked.replace("none", "once")
    run(once).assert_outcomes(failed=1)
    monkeypatch.delenv("CI")
    run(once).assert_outcomes(passed=1)
    monkeypatch.setenv("STEPENGINE_RECORD", "sometimes")
    assert pytest.ExitCode.USAGE_ERROR == run(ONE).ret


@pytest.mark.spec("replay:Y7")
def test_files_have_names_that_every_system_takes_and_no_two_tests_share_one(run, pytester):
    body = """
class TestAll:
    @pytest.mark.parametrize("name", ["a/b", "a:b", "plain"])
    def test_one(self, cassette, name):
        ask(cassette, name)
"""
    pytester.makeini("[pytest]\nstepengine_cassette_dir = {rootdir}/recorded\n")
    run(body, "--stepengine-record=once").assert_outcomes(passed=3)
    names = sorted(p.name for p in (pytester.path / "recorded" / "test_it").iterdir())
    assert 3 == len(names)
    assert "TestAll.test_one[plain].yaml" in names
    assert 2 == sum(name.startswith("TestAll.test_one[a-b]~") for name in names)
    run(body).assert_outcomes(passed=3)


@pytest.mark.spec("replay:Y10", "replay:M11")
def test_the_network_is_blocked_while_a_test_replays(run):
    body = """
import socket

def test_one(cassette):
    with pytest.raises(BaseException):
        socket.create_connection(("127.0.0.2", 9), timeout=1)

def test_two(cassette):
    socket.create_connection(("127.0.0.1", 9), timeout=1)

def test_three():
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", 9), timeout=1)
"""
    blocked = run(body)
    blocked.assert_outcomes(failed=2, passed=1)
    blocked.stdout.fnmatch_lines(["*NetworkBlocked: socket.* to '127.0.0.2'*"])
    blocked.stdout.fnmatch_lines(["*NetworkBlocked: socket.* to '127.0.0.1'*"])


AGENT = """
import pytest
from stepengine import AgentDefinition, Engine, STEP, ToolCall, tool
from stepengine.testing import ScriptedModel, text

@tool
def look(path: str) -> str:
    '''Look.'''
    LOOKED.append(path)
    return "seen"

LOOKED = []

def handle(ctx):
    yield ToolCall("look", {"path": "a"})
    yield STEP
    return "done"

agent = AgentDefinition("watcher", tools=[look], system_prompt="PROMPT", handle_steps=handle)

def test_one(journal):
    with Engine([agent], [], ScriptedModel([text("fine")] * LIVE), default_model="x/y") as engine:
        result = journal.run_sync(engine, "watcher", "go")
    assert (result.output, LOOKED) == ("done", ["a"] * LIVE)
"""


def agent_test(live: int, prompt: str = "Watch.", asked: str = "go") -> str:
    return AGENT.replace("LIVE", str(live)).replace("PROMPT", prompt).replace('"go"', f'"{asked}"')


def test_a_run_is_recorded_once_and_repeated_with_the_present_code(run, pytester):
    file = pytester.path / "journals/test_it/test_one.jsonl"

    missing = run(agent_test(1))
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no journal *--stepengine-record=rewrite*"])
    run(agent_test(1), "--stepengine-record=once").assert_outcomes(passed=1)
    assert [file] == [*file.parent.iterdir()]
    first = file.read_bytes()
    run(agent_test(0)).assert_outcomes(passed=1)

    changed = run(agent_test(0, prompt="Look closely."))
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(["*ReplayDivergence*"])
    other = run(agent_test(0, asked="stop"))
    other.stdout.fnmatch_lines(["*recorded with the prompt 'go', and now it is 'stop'*"])
    unused = run("\ndef test_one(journal):\n    pass\n")
    unused.stdout.fnmatch_lines(["*the test did not run the journal*"])
    assert first == file.read_bytes()
    run(agent_test(1), "--stepengine-record=rewrite").assert_outcomes(passed=1)
    assert first == file.read_bytes()
    run(agent_test(1, prompt="Look closely."), "--stepengine-record=rewrite").assert_outcomes(passed=1)
    assert first != file.read_bytes()
    run(agent_test(0, prompt="Look closely.")).assert_outcomes(passed=1)


@pytest.mark.spec("replay:M4")
def test_a_changed_run_is_extended_and_a_failed_test_leaves_the_record_alone(run, pytester):
    file = pytester.path / "journals/test_it/test_one.jsonl"
    run(agent_test(1), "--stepengine-record=once")
    first = file.read_bytes()
    loose = agent_test(1, prompt="Look again.").replace('["a"] * 1)', "[])")

    run(loose.replace('("done", ', '("never", '), "--stepengine-record=extend").assert_outcomes(failed=1)
    assert (first, [file]) == (file.read_bytes(), [*file.parent.iterdir()])
    run(loose, "--stepengine-record=extend").assert_outcomes(passed=1)
    assert (True, [file]) == (first != file.read_bytes(), [*file.parent.iterdir()])
    run(loose.replace("* 1", "* 0")).assert_outcomes(passed=1)


def test_a_test_with_two_runs_names_the_second(run, pytester):
    line = '        result = journal.run_sync(engine, "watcher", "go")\n'
    twice = agent_test(2).replace(line, line * 2)
    refused = run(twice, "--stepengine-record=once")
    refused.stdout.fnmatch_lines(["*holds one run*journal('second')*"])
    named = agent_test(2).replace(line, line + line.replace("journal.", "journal('second')."))
    run(named, "--stepengine-record=once").assert_outcomes(passed=1)
    assert {"test_one.jsonl", "test_one.second.jsonl"} == {p.name for p in pytester.path.rglob("*.jsonl")}
    run(named.replace("* 2", "* 0")).assert_outcomes(passed=1)


def test_workers_record_and_replay_side_by_side(run, pytester):
    pytest.importorskip("xdist")
    body = "".join(ONE.replace("one", name) for name in ("one", "two", "three", "four"))
    run(body, "--stepengine-record=once", "-n2").assert_outcomes(passed=4)
    run(body, "-n2").assert_outcomes(passed=4)
    assert 4 == len([*(pytester.path / FILE).parent.iterdir()])


@pytest.mark.spec("replay:Y14")
@pytest.mark.anyio
async def test_async_clients_record_and_replay_with_the_same_transport(tmp_path):
    import httpx2

    from stepengine.testing.recordings import TestCassette

    async def ask(cassette, *bodies):
        inner = httpx2.MockTransport(lambda request: httpx2.Response(200, content=request.content))
        async with httpx2.AsyncClient(transport=cassette.transport(inner)) as client:
            return [(await client.post("https://api.test/", content=body)).text for body in bodies]

    first = TestCassette(tmp_path / "one.yaml", "once")
    assert ["a", "b"] == await ask(first, "a", "b")
    first.check()
    assert tmp_path / "one.yaml" == first.keep()
    more = TestCassette(tmp_path / "one.yaml", "new")
    assert ["b", "c", "a"] == await ask(more, "b", "c", "a")
    more.check()
    more.keep()
    again = TestCassette(tmp_path / "one.yaml", "none")
    assert ["c", "b", "a"] == await ask(again, "c", "b", "a")
    again.check()
    assert again.keep() is None


@pytest.mark.spec("ecosystem:EC123")
def test_the_plugin_imports_only_pytest_and_the_standard_library():
    tree = ast.parse(Path(plugin.__file__).read_text())
    names = [
        n.names[0].name if isinstance(n, ast.Import) else n.module
        for n in tree.body
        if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    assert {"pytest"} == {name.partition(".")[0] for name in names} - sys.stdlib_module_names
