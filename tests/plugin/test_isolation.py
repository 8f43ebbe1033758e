"""
What tests that replay are kept away from: the network, keys, each other.
"""

from __future__ import annotations

import pytest

pytest_plugins = ("pytester",)

REACHING = """
import _socket, asyncio, socket

WAYS = {
    "connect": lambda: socket.create_connection(("127.0.0.2", 9), timeout=1),
    "lookup": lambda: socket.getaddrinfo("example.test", 443),
    "by name": lambda: socket.gethostbyname("example.test"),
    "by address": lambda: socket.gethostbyaddr("192.0.2.1"),
    "datagram": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.1", 9)),
    "underneath": lambda: _socket.socket().connect(("127.0.0.2", 9)),
    "sync": lambda: httpx2.get("https://example.test"),
    "async": lambda: asyncio.run(one()),
}

async def one():
    async with httpx2.AsyncClient() as client:
        await client.get("https://example.test")

def reach(way):
    try:
        WAYS[way]()
    except BaseException:
        pass

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_it(way, cassette):
    reach(way)
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y10")
def test_every_way_to_the_network_is_blocked_and_reported(run, pytester, monkeypatch):
    """
    Also lookups, datagrams and code below the modules that others replace; also when the refusal is swallowed.
    """
    blocked = run(REACHING, apart=True)
    blocked.assert_outcomes(failed=8)
    blocked.stdout.fnmatch_lines([
        "*NetworkBlocked: socket.getaddrinfo to '127.0.0.2': this test replays its recordings and must not use the network*",
        "*stepengine_network_allow*--stepengine-network=allow*", "*NetworkBlocked: socket.getaddrinfo to 'example.test'*",
    ])  # fmt: skip
    marked = REACHING.replace("(way, cassette)", "(way)").replace("def test_it", "@pytest.mark.stepengine\ndef test_it")
    run(marked, "-k", "connect or underneath", apart=True).assert_outcomes(failed=2, deselected=6)
    pytester.makeini("[pytest]\nstepengine_network_allow =\n    127.0.0.2\n")
    run(REACHING, "-k", "connect or underneath", apart=True).assert_outcomes(passed=2, deselected=6)


PLAIN = """
import socket

def test_plain():
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 9), timeout=1)

def test_local(tmp_path):
    here, there = socket.socketpair()
    here.send(b"x")
    here.close(), there.close()
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y1", "replay:Y10")
def test_unrelated_tests_are_unblocked_unless_all_are_requested(run):
    run(PLAIN).assert_outcomes(passed=2)
    every = run(PLAIN, "--stepengine-network=all")
    every.assert_outcomes(passed=1, failed=1)
    every.stdout.fnmatch_lines(["*NetworkBlocked: socket.getaddrinfo to '127.0.0.1'*"])
    body = PLAIN.replace("test_plain()", "test_plain(journal)")
    run(body).assert_outcomes(passed=1, failed=1)
    run(body, "--stepengine-network=allow").assert_outcomes(passed=2)


AROUND = """
import socket

def reach():
    try:
        socket.create_connection(("127.0.0.2", 9), timeout=1)
    except CAUGHT:
        pass

@pytest.fixture
def around(USED):
    BEFORE
    yield
    AFTER

@pytest.fixture
def late(request):
    request.getfixturevalue("cassette")

def test_one(around):
    pass
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y10")
@pytest.mark.parametrize("caught", ["OSError", "BaseException"])
@pytest.mark.parametrize(("moment", "used"), [("BEFORE", "journal"), ("AFTER", "journal"), ("AFTER", "late")])
def test_fixtures_of_a_replaying_test_reach_no_network(run, pytester, moment, used, caught):
    """
    Also when the fixture swallows the refusal, and when the cassette is requested dynamically.
    """
    body = AROUND.replace(moment, "reach()").replace("USED", used).replace("CAUGHT", caught)
    body = body.replace("BEFORE", "pass").replace("AFTER", "pass")

    blocked = run(body)

    assert 1 == blocked.ret
    blocked.stdout.fnmatch_lines(
        ["*NetworkBlocked: *to '127.0.0.2': this test replays its recordings and must not use the network*"]
    )
    pytester.makeini("[pytest]\nstepengine_network_allow =\n    127.0.0.2\n")
    run(body).assert_outcomes(passed=1)


LIVE = """
import os

@pytest.mark.stepengine(live=True)
def test_live(cassette, journal):
    assert ask(cassette, "a") == [{"to": "a"}]
    assert os.environ["OPENAI_API_KEY"]

def test_other(cassette):
    assert os.environ["OPENAI_API_KEY"] == "replay" and os.environ["ANTHROPIC_BASE_URL"] == "https://elsewhere.test"
    assert os.environ["MY_OWN_API_KEY"] == "kept"

def test_plain():
    assert os.environ["OPENAI_API_KEY"]
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:Y6", "replay:Y11", "replay:C27")
def test_a_live_test_runs_on_request_and_leaves_no_recording(run, pytester, monkeypatch):
    """
    Tests that replay have placeholders for the keys of providers; addresses stay, and other tests are left alone.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://elsewhere.test")
    monkeypatch.setenv("MY_OWN_API_KEY", "kept")
    skipped = run(LIVE, "-rs")
    skipped.assert_outcomes(skipped=1, passed=2)
    skipped.stdout.fnmatch_lines(["*calls real providers; run it with --stepengine-allow-live*"])
    run(LIVE, "--stepengine-allow-live").assert_outcomes(passed=3)
    assert not [*pytester.path.rglob("*.yaml"), *pytester.path.rglob("*.jsonl")]


ONE = "\ndef test_one(cassette):\n    assert [{'to': 'a'}] == ask(cassette, 'a')\n"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:M1", "replay:M5", "replay:Y1", "replay:Y11")
def test_recording_in_ci_needs_allow_live(run, monkeypatch, pytester):
    monkeypatch.setenv("CI", "1")
    file = pytester.path / "cassettes/test_it/test_one.yaml"
    for mode in ("once", "new", "extend", "rewrite"):
        refused = run(ONE, f"--stepengine-record={mode}")
        assert pytest.ExitCode.USAGE_ERROR == refused.ret
        refused.stderr.fnmatch_lines(["*would record in CI; add --stepengine-allow-live if that is intended*"])
    pytester.makeini("[pytest]\nstepengine_record = once\n")
    run(ONE).assert_outcomes(failed=1)
    assert not file.exists()
    run(ONE, "--stepengine-record=once", "--stepengine-allow-live").assert_outcomes(passed=1)
    run(ONE).assert_outcomes(passed=1)
    unused = run("\ndef test_one(cassette):\n    pass\n")
    unused.assert_outcomes(failed=1)
    unused.stdout.fnmatch_lines(["*to drop them: pytest test_it.py::test_one --stepengine-record=extend*"])
    file.unlink()
    monkeypatch.delenv("CI")
    run(ONE).assert_outcomes(passed=1)
    file.unlink()
    run(ONE, "--stepengine-record=none").assert_outcomes(failed=1)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--stepengine-record=none")
    run(ONE).assert_outcomes(failed=1)


MANY = "".join([ONE.replace("test_one", f"test_{n}").replace("'a'", f"'{n}'") for n in range(6)])
BACKWARDS = "def pytest_collection_modifyitems(items):\n    items.reverse()\n"


@pytest.mark.deep
@pytest.mark.spec("replay:Y13")
def test_parallel_workers_and_any_order_record_and_replay(run, pytester):
    pytest.importorskip("xdist")
    folder = pytester.path / "cassettes/test_it"
    run(MANY, "--stepengine-record=once", "-n2").assert_outcomes(passed=6)
    recorded = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 6 == len(recorded)
    pytester.makeconftest(BACKWARDS)
    run(MANY).assert_outcomes(passed=6)
    told = run(MANY, "-n2", "-v")
    told.assert_outcomes(passed=6)
    told.stdout.fnmatch_lines(
        ["test_it.py::test_0: cassettes/test_it/test_0.yaml  mode none: 1 replayed, 0 recorded, 0 unused"]
    )
    run(MANY, "--stepengine-record=rewrite").assert_outcomes(passed=6)
    assert recorded == {path.name: path.read_bytes() for path in folder.iterdir()}


SHARED = """
GROUP
def test_one(cassette):
    assert [{'to': 'a'}] == ask(cassette('shared'), 'a')

GROUP
def test_two(cassette):
    assert [{'to': 'a'}] == ask(cassette('shared'), 'a')
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y13")
def test_a_shared_cassette_must_be_recorded_by_one_process(run, pytester):
    pytest.importorskip("xdist")
    shared = SHARED.replace("GROUP", "")
    refused = run(shared, "--stepengine-record=once", "-n1")
    refused.assert_outcomes(failed=2)
    refused.stdout.fnmatch_lines(["*cassettes/test_it/shared.yaml is shared by several tests*--dist=loadgroup*"])
    grouped = SHARED.replace("GROUP", "@pytest.mark.xdist_group('shared')")
    run(grouped, "--stepengine-record=once", "-n1", "--dist=loadgroup").assert_outcomes(passed=2)
    assert ["shared.yaml"] == [path.name for path in pytester.path.rglob("*.yaml")]
    run(shared).assert_outcomes(passed=2)


KEYS = """
import os

def test_one(cassette):
    assert [{"to": "a"}] == ask(cassette, "a")
    assert os.environ.get("OPENAI_API_KEY") == "EXPECTED"
"""


@pytest.mark.deep
@pytest.mark.spec("replay:Y11", "replay:M2")
def test_keys_are_placeholders_when_mode_once_replays(run, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")

    run(KEYS.replace("EXPECTED", "key"), "--stepengine-record=once").assert_outcomes(passed=1)
    run(KEYS.replace("EXPECTED", "replay"), "--stepengine-record=once").assert_outcomes(passed=1)
