"""
`stepengine cassette record` and `replay`: whole programs, their threads and their child processes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest

from stepengine.errors import DataError, DefinitionError
from stepengine.testing import Cassette, record_program, replay_program
from stepengine.testing.processes.child_commands import find_uncovered_reason
from tests import forked_processes
from tests.model_server import ModelServer, model_server

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ASK = """
import requests, os, sys
def ask(text):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return requests.post(url, json=body, headers=headers).json()["choices"][0]["message"]["content"]
"""


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server() as running:
        yield running


@pytest.fixture
def cassette(server: ModelServer, tmp_path: Path, forks: None) -> Run:
    """
    Run `stepengine cassette` with the server's address; with keys while recording alone.
    """

    def run(
        operation: str, *words: str, options: Sequence[str] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **server.environment(), **variables}
        if operation == "replay":
            environment = {name: value for name, value in environment.items() if not re.search("KEY|TOKEN", name)}
        command = [sys.executable, "-m", "stepengine.cli", "cassette", operation, "c.yaml", *options, "--", *words]
        return forked_processes.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def program(folder: Path, source: str, name: str = "agent.py") -> list[str]:
    (folder / name).write_text(dedent(source), encoding="utf-8")
    return [sys.executable, name]


@pytest.mark.deep
@pytest.mark.spec("replay:Y30")
@pytest.mark.smoke
def test_program_replays_without_network_and_names_an_edited_prompt(cassette, server, tmp_path):
    words = program(tmp_path, ASK + "print(ask(sys.argv[1]))")
    recorded = cassette("record", *words, "hi")
    assert (0, 1) == (recorded.returncode, len(Cassette.load(tmp_path / "c.yaml"))), recorded.stderr
    assert "recorded c.yaml: 1 interaction" in recorded.stderr
    assert "live" not in (tmp_path / "c.yaml").read_text(encoding="utf-8")
    asked = len(server.requests)

    replayed = cassette("replay", *words, "hi")
    assert (0, recorded.stdout) == (replayed.returncode, replayed.stdout), replayed.stderr
    edited = cassette("replay", *words, "bye")
    assert 5 == edited.returncode
    assert re.search(r'/\S+ +recorded "hi\S* +.*now "bye', edited.stderr), edited.stderr
    assert asked == len(server.requests)


SWALLOWED = {
    "bare except": "quiet()",
    "child process": "subprocess.run([sys.executable, 'child.py', sys.argv[1]])",
    "child that exits at once": "subprocess.run([sys.executable, 'child.py', sys.argv[1], 'hard'])",
    "forked child": "p = multiprocessing.get_context('fork').Process(target=quiet); p.start(); p.join()",
    "socket": "quiet() if sys.argv[1] == 'hi' else reach()",
}


@pytest.mark.deep
@pytest.mark.spec("replay:Y30", "replay:Y10")
@pytest.mark.parametrize(
    "where", ["bare except", *[pytest.param(w, marks=pytest.mark.deep) for w in SWALLOWED if w != "bare except"]]
)
def test_miss_counts_even_if_the_program_catches_it(cassette, server, tmp_path, where):
    quiet = """
def quiet():
    try:
        print(ask(sys.argv[1]))
    except:
        print("swallowed")
def reach():
    try:
        socket.create_connection(tuple(os.environ["OPENAI_BASE_URL"][7:-3].split(":")))
    except:
        print("swallowed")
"""
    imports = "import multiprocessing, socket, subprocess\n"
    program(tmp_path, f"{ASK}{quiet}\nquiet()\nif 'hard' in sys.argv: sys.stdout.flush(); os._exit(0)", "child.py")
    words = program(tmp_path, f"{imports}{ASK}{quiet}\nif __name__ == '__main__': {SWALLOWED[where]}")
    recorded = cassette("record", *words, "hi")
    assert (0, "You said: hi\n", 1) == (recorded.returncode, recorded.stdout, len(server.requests)), recorded.stderr
    assert (0, "You said: hi\n") == (cassette("replay", *words, "hi").returncode, recorded.stdout)
    missed = cassette("replay", *words, "bye")
    assert (5, "swallowed\n", 1) == (missed.returncode, missed.stdout, len(server.requests)), missed.stderr
    named = "must not use the network" if where == "socket" else '/messages/0/content             recorded "hi"'
    assert named in missed.stderr


@pytest.mark.spec("replay:Y30", "replay:Y31")
@pytest.mark.deep
def test_concurrent_processes_share_one_file(cassette, server, tmp_path):
    """
    Each of six processes makes a request of its own and one that all of them make; a seventh of the latter is a miss.
    """
    # One write a line: under PYTHONUNBUFFERED print writes each of its parts, and those of several processes mix.
    program(tmp_path, f"{ASK}\nsys.stdout.write(f'{{ask(sys.argv[1])}} {{ask(\"same\")}}\\n')", "child.py")
    words = program(
        tmp_path,
        """
        import subprocess, sys
        children = [subprocess.Popen([sys.executable, "child.py", str(n)]) for n in range(int(sys.argv[1]))]
        sys.exit(sum(child.wait() for child in children))
    """,
    )
    recorded = cassette("record", *words, "6")
    assert (0, 12) == (recorded.returncode, len(Cassette.load(tmp_path / "c.yaml"))), recorded.stderr
    replayed = cassette("replay", *words, "6")
    assert (0, sorted(recorded.stdout.splitlines())) == (replayed.returncode, sorted(replayed.stdout.splitlines()))
    fewer = cassette("replay", *words, "5")
    assert 5 == fewer.returncode
    assert "2 of 12 interactions of c.yaml were not played" in fewer.stderr
    more = cassette("replay", *words, "7")
    assert 5 == more.returncode
    assert 12 == len(server.requests)


@pytest.mark.spec("replay:Y31")
@pytest.mark.deep
def test_python_processes_that_cannot_be_covered_are_named(cassette, tmp_path):
    words = program(
        tmp_path,
        f"""{ASK}
import subprocess
subprocess.run([sys.executable, "-I", "-c", "pass"])
subprocess.run([sys.executable, "-c", "pass"], env={{"PATH": os.environ["PATH"]}})
subprocess.run(sys.executable + " -S -c pass", shell=True)
print(ask("hi"))
""",
    )
    recorded = cassette("record", *words)
    assert (0, 3) == (recorded.returncode, recorded.stderr.count("not covered: "))
    for reason in (
        "-I ignores PYTHONPATH",
        "its environment has another PYTHONPATH",
        "-S does not import the site module",
    ):
        assert reason in recorded.stderr
    refused = cassette("record", sys.executable, "-I", "agent.py")
    assert (2, True) == (refused.returncode, "-I ignores PYTHONPATH" in refused.stderr)
    missing = cassette("replay", "no-such-program")
    assert (2, True) == (missing.returncode, "there is no program 'no-such-program'" in missing.stderr)
    other = cassette("replay", "true")
    assert (2, True) == (other.returncode, "started no Python process" in other.stderr)


@pytest.mark.spec("replay:Y31")
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["python", "-I", "a.py"], "-I"), (["/usr/bin/python3.12", "-Es", "a.py"], "-E"), (["python", "-W", "ignore", "-S", "-c", "x"], "-S"),
        (["python", "-c", "x", "-I"], None), (["python", "a.py", "-S"], None), (["python", "-X", "dev", "-m", "a", "-I"], None),
        (["cat", "python", "-I"], None), (["sh", "-c", "cd x && python -I a.py"], "-I"), (["sh", "-c", "echo 'open"], None), ([], None),
    ],
)  # fmt: skip
def test_options_that_ignore_the_path_are_recognised(command, reason):
    found = find_uncovered_reason(command, None, "/x")
    assert reason == (found and found.partition(" ")[0])


@pytest.mark.spec("replay:Y31")
@pytest.mark.deep
def test_recording_changes_nothing_else_of_the_program(cassette, tmp_path):
    """
    A module `sitecustomize` of the program is run, `sys.path` has no further entry, and no HTTP library or stepengine is loaded.
    """
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.OWN = 1", encoding="utf-8")
    words = program(
        tmp_path,
        """
        import sys
        print(OWN, [p for p in sys.path if p.rpartition("/")[2].startswith("stepengine-")], "attrs" in sys.modules, "stepengine" in sys.modules)
        import urllib3
        print("stepengine" in sys.modules, "httpx2" in sys.modules, "aiohttp" in sys.modules)
    """,
    )
    done = cassette("record", *words, PYTHONPATH=str(tmp_path / "own"))
    assert "1 [] False False\nTrue False False\n" == done.stdout, done.stderr
    assert (1, True) == (done.returncode, "nothing was recorded" in done.stderr)


@pytest.mark.spec("replay:Y31")
@pytest.mark.deep
def test_a_python_without_stepengine_is_named_and_has_no_network(cassette, tmp_path):
    words = program(
        tmp_path,
        f"""{ASK}
print(ask("hi"))
if len(sys.argv) > 1:
    import subprocess
    subprocess.run([sys.executable, "other.py"])
""",
    )
    program(
        tmp_path,
        """
        import socket, sys
        sys.modules["stepengine"] = None
        import urllib3
        try:
            socket.create_connection(("127.0.0.1", 9))
        except BaseException as error:
            print(type(error).__name__)
    """,
        "other.py",
    )
    assert 0 == cassette("record", *words).returncode
    other = cassette("replay", *words, "other")
    assert (5, "You said: hi\nNetworkBlocked\n") == (other.returncode, other.stdout), other.stderr
    assert "not covered: " in other.stderr
    assert "stepengine cannot be imported in" in other.stderr
    allowed = cassette("replay", *words, "other", options=["--allow-host", "127.0.0.1"])
    assert (0, "You said: hi\nConnectionRefusedError\n") == (allowed.returncode, allowed.stdout), allowed.stderr


@pytest.mark.deep
@pytest.mark.spec("replay:Y32")
def test_frozen_values_are_those_of_the_recording(cassette, tmp_path):
    """
    In the process, its threads, a forked child and a child of the same program; a clock that is read more often goes on.
    """
    source = f"""{ASK}
from time import time, time_ns
from uuid import uuid4
import multiprocessing, random, subprocess, time as clock
def values():
    return [time(), time_ns(), str(uuid4()), str(uuid4()), random.random(), clock.time()]
def tell():
    print(ask("now " + str(values())), flush=True)
if __name__ == "__main__":
    tell()
    if "child" not in sys.argv:
        child = multiprocessing.get_context("fork").Process(target=tell)
        child.start()
        child.join()
        for _ in range(2):
            subprocess.run([sys.executable, "agent.py", "child"])
"""
    words = program(tmp_path, source)
    recorded = cassette("record", *words, options=["--freeze", "time,random,uuid"])
    lines = recorded.stdout.splitlines()
    assert (0, 4, 4) == (recorded.returncode, len(lines), len(set(lines))), recorded.stderr
    replayed = cassette("replay", *words)
    assert (0, recorded.stdout) == (replayed.returncode, replayed.stdout), replayed.stderr
    unknown = cassette("record", *words, options=["--freeze", "dates"])
    assert (2, True) == (unknown.returncode, "unknown value 'dates'" in unknown.stderr)


@pytest.mark.deep
@pytest.mark.spec("replay:Y32")
def test_frozen_clock_avoids_a_miss_and_advances_past_the_recording(cassette, tmp_path):
    source = f"""{ASK}
import time
print(ask(str(time.time())))
def wait():
    deadline = time.time() + 0.01
    while time.time() < deadline:
        pass
if os.environ.get("WAITS"):
    wait()
"""
    words = program(tmp_path, source)
    assert 0 == cassette("record", *words).returncode
    assert 5 == cassette("replay", *words).returncode
    assert 0 == cassette("record", *words, options=["--freeze", "time"]).returncode
    longer = cassette("replay", *words, WAITS="1")
    assert 0 == longer.returncode, longer.stderr


@pytest.mark.deep
@pytest.mark.spec("replay:Y33")
def test_the_doctor_names_the_lines_that_make_requests_differ(cassette, server, tmp_path):
    """
    Later requests are examined, too; a frozen clock is no source, and the order of a set is found by other hashes.
    """
    source = f"""{ASK}
import datetime, random, time, uuid
print(ask("same"))
stamp = str(datetime.datetime.now())
token = str(uuid.uuid4())
print(ask(stamp))
print(ask(str(time.time())))
print(ask("always"))
"""
    words = program(tmp_path, source)
    numbered = list(enumerate(source.splitlines(), 1))
    line = next(n for n, text in numbered if "datetime.now" in text)
    sender = next(n for n, text in numbered if "requests.post" in text)
    assert 0 == cassette("record", *words, options=["--freeze", "time"]).returncode
    asked = len(server.requests)
    found = cassette("replay", *words, options=["--doctor"])
    assert (5, 1, asked) == (found.returncode, found.stderr.count("differs between two runs"), len(server.requests)), (
        found.stderr
    )
    assert f"\n    agent.py:{line}  datetime.now\n" in found.stderr
    assert f"agent.py:{line + 1}  uuid.uuid4  (record with --freeze uuid)" in found.stderr
    assert re.search(
        rf"sent by agent\.py:{sender}, differs between two runs\n    /messages/0/content .*first .* second ",
        found.stderr,
    )
    assert "time.time" not in found.stderr

    words = program(tmp_path, f"{ASK}\nprint(ask(str(set('abcdefgh'))))")
    assert 0 == cassette("record", *words).returncode
    unordered = cassette("replay", *words, options=["--doctor"])
    assert (5, True) == (unordered.returncode, "check the order of a set" in unordered.stderr), unordered.stderr
    words = program(tmp_path, f"{ASK}\nprint(ask('hi'))")
    assert 0 == cassette("record", *words).returncode
    equal = cassette("replay", *words, options=["--doctor"])
    assert (0, True) == (equal.returncode, "1 requests are equal in both runs" in equal.stderr), equal.stderr


@pytest.mark.spec("replay:Y30", "replay:Y33")
@pytest.mark.deep
def test_record_and_replay_work_from_python_and_in_threads(server, tmp_path, monkeypatch):
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    file, words = tmp_path / "c.yaml", program(tmp_path, f"{ASK}\nprint(ask(sys.argv[1]))\nsys.exit(3)")
    words[1] = str(tmp_path / words[1])
    with ThreadPoolExecutor() as threads:
        recorded = threads.submit(record_program, file, [*words, "hi"]).result()
        again = threads.submit(record_program, file, [*words, "bye"]).result()
    replayed, edited = replay_program(file, [*words, "hi"]), replay_program(file, [*words, "bye"])
    compared = replay_program(file, [*words, "bye"], twice=True)

    assert [True, False] == [recorded.saved, again.saved]
    assert [3, 3, 3] == [one.exit_code for one in (recorded, again, replayed)]
    assert 1 == len(Cassette.load(file))
    assert ([], (), [], ["body_differs"]) == (
        replayed.cassette.misses, replayed.cassette.unused, replayed.blocked, [m.reason for m in edited.cassette.misses],
    )  # fmt: skip
    assert ([1, 1], []) == (compared.requests, compared.differences)
    assert [shlex.join([*words, "bye"])] == compared.processes


STREAMED = """
import requests, os, sys
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
reply = requests.post(url, json=body, stream=True)
"""


@pytest.mark.spec("replay:Y30")
@pytest.mark.deep
def test_presigned_request_does_not_hide_a_lost_reply(cassette, tmp_path):
    signed = 'requests.get(os.environ["OPENAI_BASE_URL"] + "/file?X-Amz-Signature=abc")'
    words = program(tmp_path, f"{ASK}\nask('hi')\n{signed}\n{STREAMED}\nos._exit(0)")
    recorded = cassette("record", *words)

    assert "the URL itself is a credential" in recorded.stderr
    assert "not recorded: 1 request(s) whose process ended before the reply was complete" in recorded.stderr


@pytest.mark.spec("replay:Y30")
@pytest.mark.deep
def test_forked_child_does_not_report_its_parents_request(cassette, tmp_path):
    words = program(tmp_path, f"{STREAMED}\nif os.fork() == 0: sys.exit()\nos.wait()\nprint(reply.text)")
    recorded = cassette("record", *words)

    assert (0, False) == (recorded.returncode, "not recorded" in recorded.stderr), recorded.stderr
    assert cassette("replay", *words).stdout == recorded.stdout


@pytest.mark.spec("replay:Y30")
def test_invalid_record_or_replay_is_rejected_before_the_program_starts(tmp_path):
    file, words = tmp_path / "c.yaml", program(tmp_path, "open('started', 'w')")

    with pytest.raises(DefinitionError, match="freeze has the unknown value 'dates'; valid values: time, random, uuid"):
        record_program(file, words, freeze=["time", "dates"])
    with pytest.raises(DefinitionError, match="-I ignores PYTHONPATH"):
        record_program(file, [words[0], "-I", words[1]])
    with pytest.raises(DataError, match=r"is a folder, not a cassette\. Name a file"):
        record_program(tmp_path, words)
    with pytest.raises(DefinitionError, match="there is no program 'no-such-program'"):
        replay_program(file, ["no-such-program"])
    with pytest.raises(
        DataError, match=r"there is no cassette '.*c.yaml'. To record it:\n  stepengine cassette record"
    ):
        replay_program(file, words)
    assert [words[1]] == [path.name for path in tmp_path.iterdir()]
