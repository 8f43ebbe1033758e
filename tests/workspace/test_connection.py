"""A program at the other end of a pipe is believed nothing: whatever it says, there is a typed error, soon, and no memory is taken."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepengine.errors import DefinitionError, ToolError, UnknownOutcome, WorkspaceLost
from stepengine.workspace import calls, connection, remote_files
from stepengine.workspace import root as root_module
from stepengine.workspace.guard import GUARD, CallGuard
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.root import Root
from stepengine.workspace.text import read_if_small
from stepengine.workspace.worker import LISTED_BYTES
from stepengine.workspace.workspace import Workspace
from tests.waits import until

LIAR = """
import json, os, struct, sys, time
def exactly(n):
    made = b""
    while len(made) < n:
        made += os.read(0, n - len(made)) or os._exit(0)
    return made
exactly(int(exactly(9)))
out = sys.stdout.buffer
def say(head, data=b""):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    out.write(struct.pack(">II", len(text), len(data)) + text + data)
    out.flush()
def asked():
    head, data = struct.unpack(">II", exactly(8))
    made = json.loads(exactly(head))
    exactly(data)
    return made
INFO = [0o40755, 5, 5, 1, 0, 0, 0, 0]
def begin():
    out.write(b"stepengine worker 1\\n")
    out.flush()
    say({"id": asked()["id"], "can_walk": True})
def root():
    begin()
    say({"id": asked()["id"], "info": INFO, "real": "/there", "wide": False, "mount": ""})
"""


def liar(tmp_path: Path, code: str, *, start_seconds: float = 30) -> Workspace:
    program = tmp_path / "liar.py"
    program.write_text(LIAR + code)
    return Workspace.from_command([sys.executable, "-I", "-S", str(program)], "/there", start_seconds=start_seconds)


class Ear:
    """Writes down what it is told."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def handle_output(self, stream: str, data: bytes) -> None:
        self.told.append(len(data))

    def handle_end(self, stream: str) -> None: ...

    def handle_exit(self, code: int | None) -> None:
        self.told.append(("gone", code))


def spawned(root: Root, place: Workspace, told: list[Any]) -> None:
    assert place.system is not None
    place.system.spawn(root.fd, Ear(told), script=None, supervisor="", limits="", program="", argv=[], env={}, log=None)  # type: ignore[arg-type]


LIES = {
    "nothing": "time.sleep(300)",
    "an end": "",
    "an end in the middle of a frame": "begin(); asked(); out.write(b'\\0\\0\\0\\x09\\0\\0'); out.flush()",
    "endless before it begins": "\nwhile True: out.write(b'welcome ' * 1000)",
    "zeros": "begin(); out.write(b'\\0' * 100000); out.flush(); time.sleep(300)",
    "a huge frame": "begin(); out.write(b'\\xff' * 8); out.flush(); time.sleep(300)",
    "no object": "begin(); say(b'[1]'); time.sleep(300)",
    "JSON a mile deep": "begin(); say(b'[' * 500000 + b']' * 500000); time.sleep(300)",
    "a number a mile long": "begin(); say(b'{\"id\": ' + b'9' * 500000 + b'}'); time.sleep(300)",
    "another id": "begin(); n = asked()['id']; say({'id': n + 1, 'info': INFO}); time.sleep(300)",
    "an id that is true": "begin(); n = asked()['id']; say({'id': True, 'info': INFO}); time.sleep(300)",
    "an answer twice": "begin(); n = asked()['id']; [say({'id': n, 'info': INFO}) for _ in range(3)]; time.sleep(300)",
    "news of a program that was not started": "begin(); asked(); say({'on': 1, 'from': 'out'}, b'x'); time.sleep(300)",
    "info of texts": "begin(); say({'id': asked()['id'], 'info': ['x'] * 8, 'real': '/there', 'wide': False}); time.sleep(300)",
    "info of huge numbers": "begin(); say({'id': asked()['id'], 'info': [10**400] * 8, 'real': '/there', 'wide': False}); time.sleep(300)",
    "no path": "begin(); say({'id': asked()['id'], 'info': INFO, 'real': 7, 'wide': False}); time.sleep(300)",
    "a relative path": "begin(); say({'id': asked()['id'], 'info': INFO, 'real': 'there', 'wide': False}); time.sleep(300)",
    "more for ever": "begin(); n = asked()['id']\nwhile True: say({'id': n, 'more': True}, b'x' * 1000000)",
    "an error that is none": "begin(); say({'id': asked()['id'], 'error': 'os.system'}); time.sleep(300)",
    "a slow answer": "begin(); asked(); time.sleep(300)",
    "it closes its output": "begin(); os.close(1); time.sleep(300)",
}
SILENT = {"nothing", "a slow answer"}
"""What is noticed by the time that it takes."""


@pytest.fixture(autouse=True, scope="module")
def impatience() -> Iterator[None]:
    """
    Kill soon a program that does not end by itself. For the whole file: the threads that do so may outlast a test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "KILL_SECONDS", 0.02)
        yield


LONG = 300.0
"""Seconds of patience that no test has."""


def refusal(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what is said of a root behind a program that lies."""
    monkeypatch.setattr(remote_files, "CALL_SECONDS", 0.1 if lie in SILENT else LONG)
    monkeypatch.setattr(connection, "ANSWER_BYTES", 16 * 1024 * 1024)
    with liar(tmp_path, LIES[lie], start_seconds=0.1 if lie == "nothing" else LONG) as place:
        with pytest.raises((WorkspaceLost, DefinitionError)) as found:
            Root(place, PathPolicy())
        return found.value.message


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS6")
@pytest.mark.parametrize("lie", LIES)
def test_any_protocol_violation_raises_a_typed_error(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(refusal(lie, tmp_path, monkeypatch)) < 5_000


@pytest.mark.memory
@pytest.mark.spec("remote:WS6")
@pytest.mark.parametrize(
    "lie", ["endless before it begins", "zeros", "a huge frame", "JSON a mile deep", "more for ever"]
)
def test_any_protocol_violation_takes_little_memory(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(lie, tmp_path, monkeypatch)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 96 * 1024


FILES = {
    "a name with a slash": ("list", "[['a/b', 'f', 1, INFO]]"),
    "a dot": ("list", "[['.', 'd', 1, None]]"),
    "a name of zeros": ("list", "[['a\\0b', 'f', 1, INFO]]"),
    "a kind that is none": ("list", "[['a', 'link', 1, INFO]]"),
    "an entry that is none": ("list", "[7]"),
    "a listing that is none": ("list", "{}"),
    "half of a listing": ("list", "b'[[\"a\"'"),
    "more bytes than requested": ("read", "b'x' * 1000"),
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS6")
@pytest.mark.parametrize("lie", FILES)
def test_a_malformed_listing_or_file_is_refused(lie: str, tmp_path: Path) -> None:
    kind, value = FILES[lie]
    answers = (
        f"value = {value}\n"
        "root(); n = asked()['id']; say({'id': n, 'info': INFO, 'mount': ''}); n = asked()['id'];"
        " say({'id': n}, value if isinstance(value, bytes) else json.dumps(value).encode()); time.sleep(30)"
    )
    with liar(tmp_path, answers) as place:
        root = Root(place, PathPolicy())
        opened = root.fd.open("x", "folder")  # type: ignore[union-attr]
        with pytest.raises(WorkspaceLost, match="violates the protocol"):
            opened.list() if kind == "list" else opened.read(10)


@pytest.mark.spec("remote:WS6")
def test_output_beyond_the_limit_ends_the_connection(tmp_path: Path) -> None:
    told: list[Any] = []
    flood = "root(); n = asked()['id']; say({'id': n})\nwhile True: say({'on': n, 'from': 'out'}, b'x' * 65536)"
    with liar(tmp_path, flood) as place:
        root = Root(place, PathPolicy())
        assert place.system is not None
        line = place.system.ensure_connection()
        spawned(root, place, told)
        until(lambda: ("gone", None) in told)
        assert line.is_lost

    assert ("gone", None) == told[-1]
    assert sum(told[:-1]) <= connection.UNTAKEN_BYTES


def slow_to_return(monkeypatch: pytest.MonkeyPatch, has_happened: Callable[[], bool]) -> None:
    """Let whoever sent something continue only when something has happened, as on a machine that is busy."""
    send = connection.ProgramConnection._send_frame

    def sent(self: connection.ProgramConnection, head: Any, data: bytes, deadline: float) -> None:
        send(self, head, data, deadline)
        if head["do"] in {"spawn", "put"}:
            until(has_happened)

    monkeypatch.setattr(connection.ProgramConnection, "_send_frame", sent)


@pytest.mark.deep
@pytest.mark.spec("remote:WS6")
def test_output_may_arrive_before_the_spawn_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    quick = "root(); n = asked()['id']; say({'id': n}); say({'on': n, 'from': 'out'}, b'quick'); say({'on': n, 'gone': 0}); time.sleep(30)"
    with liar(tmp_path, quick) as place:
        root = Root(place, PathPolicy())
        slow_to_return(monkeypatch, lambda: len(told) == 2)
        spawned(root, place, told)

    assert [5, ("gone", 0)] == told


@pytest.mark.spec("remote:WS5")
def test_a_sent_call_is_in_doubt_after_the_connection_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    with liar(tmp_path, "root(); asked()") as place:
        root = Root(place, PathPolicy())
        assert place.system is not None
        line = place.system.ensure_connection()
        slow_to_return(monkeypatch, lambda: line._woken == -1)
        with pytest.raises(UnknownOutcome):
            spawned(root, place, told)

    assert [("gone", None)] == told


@pytest.mark.spec("remote:WS5")
def test_an_unanswered_effect_is_in_doubt_unless_never_sent(tmp_path: Path) -> None:
    with liar(tmp_path, "root(); asked()") as place:
        root = Root(place, PathPolicy())
        with pytest.raises(UnknownOutcome):
            root.fd.replace_file("x", b"data", None)  # type: ignore[union-attr]
    with liar(tmp_path, "root()") as place:
        root = Root(place, PathPolicy())
        connected = place.system.ensure_connection()  # type: ignore[union-attr]
        until(lambda: connected.is_lost)
        with pytest.raises(WorkspaceLost):
            connected.send_call("replace", b"data", has_effect=True, seconds=1)


def names(root: Root) -> list[str]:
    folder = root.open_folder(".")
    try:
        with calls.scandir(folder.fd) as entries:
            return [entry.name for entry in entries]
    finally:
        calls.close(folder.fd)


# --- the program itself -----------------------------------------------------------------------------------------------


def test_the_worker_answers_an_invalid_call_with_an_error(tmp_path: Path) -> None:
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        root = Root(place, PathPolicy())
        assert place.system is not None
        for do, given_ in (
            ("open", {}),
            ("nothing", {}),
            ("list", {"handle": 99}),
            ("open", {"handle": 1, "folder": 1, "name": 7, "kind": "x"}),
        ):
            with pytest.raises((WorkspaceLost, OSError)):
                place.system.call(do, **given_)
        assert [] == names(root)


@pytest.mark.deep
@pytest.mark.smoke
def test_a_large_file_and_a_large_folder_come_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(2_500_000))
    (tmp_path / "many").mkdir()
    for number in range(2 * LISTED_BYTES // 300):
        (tmp_path / "many" / f"{number:04}{'x' * 200}").touch()
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        root = Root(place, PathPolicy())
        opened = root.open_file("large")
        assert (tmp_path / "large").read_bytes() == read_if_small(opened.fd)
        folder = root.open_folder("many")
        assert sorted([path.name for path in (tmp_path / "many").iterdir()]) == sorted(e.name for e in folder.fd.list())  # type: ignore[union-attr]
        with pytest.raises(ToolError, match="does not exist"):
            root.open_file("nothing")


@pytest.mark.deep
@pytest.mark.smoke
def test_a_large_folder_of_long_odd_names_can_be_listed(tmp_path: Path) -> None:
    """
    A byte of a name that is not UTF-8 needs six in a frame.
    """
    for number in range(800):
        (tmp_path / os.fsdecode(b"%04d" % number + b"\xff" * 251)).touch()
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        root = Root(place, PathPolicy())

        assert sorted([path.name for path in tmp_path.iterdir()]) == sorted(names(root))


@pytest.mark.spec("reliability:FS09")
@pytest.mark.parametrize("cross_mounts", [False, True])
def test_rules_withhold_no_remote_file_of_the_roots_own_mount(
    tmp_path: Path, cross_mounts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The other names of a file on another mount are searched for; in this tree that search is cut off.
    """
    monkeypatch.setattr(root_module, "SECRET_SCAN_ENTRIES", 1)
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("x")
    guard = CallGuard(file=lambda _, parts: "is denied" if parts[-1] == "b.txt" else "")
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        root = Root(place, PathPolicy(cross_mounts=cross_mounts))
        token = GUARD.set(guard)
        try:
            assert b"x" == calls.read(root.open_file("a.txt").fd, 9)
            with pytest.raises(ToolError, match="is denied"):
                root.open_file("b.txt")
        finally:
            GUARD.reset(token)


REMOUNTED = """
count = {count!r}
number = os.path.getsize(count)
open(count, "a").write("x")
begin()
while True:
    made = asked()
    info = [0o100644, *INFO[1:]] if made.get("kind") == "file" else INFO
    say({{"id": made["id"], "info": info, "real": "/there", "wide": False, "mount": f"mnt_id: {{number}}"}})
"""


@pytest.mark.spec("reliability:FS09")
def test_a_new_mount_id_after_a_reconnect_withholds_no_file(tmp_path: Path) -> None:
    (tmp_path / "count").touch()
    with liar(tmp_path, REMOUNTED.format(count=str(tmp_path / "count"))) as place:
        root = Root(place, PathPolicy())
        token = GUARD.set(CallGuard(file=lambda _, __: ""))
        try:
            for _ in range(3):
                assert ("a.txt",) == root.open_file("a.txt").parts
                place.close()
        finally:
            GUARD.reset(token)


def test_non_utf_8_file_names_are_preserved(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xfe.txt")).write_text("odd")
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        root = Root(place, PathPolicy())
        (name,) = names(root)
        opened = root.fd.open(name, "file")  # type: ignore[union-attr]

        assert os.fsdecode(b"\xff\xfe.txt") == name
        assert b"odd" == opened.read(10)


def test_a_login_banner_may_precede_the_protocol(tmp_path: Path) -> None:
    with Workspace.from_command(
        ["sh", "-c", 'echo "Welcome to the machine"; exec "$@"', "sh"], tmp_path, python=sys.executable
    ) as place:
        assert [] == names(Root(place, PathPolicy()))


@pytest.mark.deep
@pytest.mark.smoke
def test_a_forked_child_opens_its_own_connection(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        root = Root(place, PathPolicy())
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.write(write, json.dumps(names(root)).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            assert '["a"]' == said.read()
        os.waitpid(pid, 0)

        assert ["a"] == names(root)


# --- names and modes that no system has -------------------------------------------------------------------------------

NOWHERE = ("a\0b", "\ud800", "sub/\udbff/x")


@pytest.mark.spec("remote:WS6")
@pytest.mark.parametrize("is_far", [False, True])
def test_an_invalid_name_or_mode_raises_like_the_system(is_far: bool, tmp_path: Path) -> None:
    place = Workspace.from_command(["env"], tmp_path, python=sys.executable) if is_far else Workspace(tmp_path)
    with place:
        root = Root(place, PathPolicy())
        folder = root.open_folder(".").fd
        for name in NOWHERE:
            for call in (
                lambda name=name: calls.open_at(name, calls.FILE, folder),
                lambda name=name: calls.stat_at(name, folder),
                lambda name=name: calls.readlink(name, folder),
                lambda name=name: calls.mkdir(name, 0o755, folder),
                lambda name=name: calls.rmdir(name, folder),
                lambda name=name: calls.unlink(name, folder),
                lambda name=name: calls.put_file(folder, name, b"x", None),
            ):
                with pytest.raises(OSError, match="Invalid argument"):
                    call()
        for mode in (2**31, -(2**70)):
            with pytest.raises(OSError, match="Invalid argument"):
                calls.mkdir("made", mode, folder)
            with pytest.raises(OSError, match="Invalid argument"):
                calls.put_file(folder, "made", b"x", mode)
        assert [] == names(root)
        calls.close(folder)
        root.close()


@pytest.mark.spec("remote:WS6")
@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("path", NOWHERE)
def test_a_root_with_an_invalid_name_is_refused(is_far: bool, path: str) -> None:
    place = Workspace.from_command(["env"], path, python=sys.executable) if is_far else Workspace(path)
    with place, pytest.raises(DefinitionError, match="cannot be opened as a folder"):
        Root(place, PathPolicy())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:FS26")
@pytest.mark.parametrize("home", ["", "/", "~", "here/relative", "/nowhere/at/all"])
def test_the_remote_root_folder_is_wide_with_any_home(home: str) -> None:
    with Workspace.from_command(["env", f"HOME={home}"], "/", python=sys.executable) as place:
        with pytest.raises(DefinitionError, match="allow_wide_root"):
            Root(place, PathPolicy())
        Root(place, PathPolicy(allow_wide_root=True))


def test_a_command_with_an_invalid_name_cannot_be_executed(tmp_path: Path) -> None:
    with (
        Workspace.from_command(["\ud800"], tmp_path, name="odd") as place,
        pytest.raises(WorkspaceLost, match=r"the workspace odd cannot be reached: .* cannot be executed"),
    ):
        Root(place, PathPolicy())


# --- threads that do things at the same time --------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
def test_a_closed_workspace_is_reopened_for_roots_in_use(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        closed, kept = Root(place, PathPolicy()), Root(place, PathPolicy())
        closed.close()
        place.close()

        assert ["a"] == names(kept)


@pytest.mark.deep
def test_a_raising_listener_ends_the_connection_for_all_calls(tmp_path: Path) -> None:
    class Deaf(Ear):
        def handle_output(self, stream: str, data: bytes) -> None:
            msg = "the loop is closed"
            raise RuntimeError(msg)

        def handle_exit(self, code: int | None) -> None:
            super().handle_exit(code)
            msg = "the loop is closed"
            raise RuntimeError(msg)

    first, second = [], []
    prints = "root(); n = asked()['id']; say({'id': n}); m = asked()['id']; say({'id': m}); say({'on': m, 'from': 'out'}, b'x'); time.sleep(30)"
    with liar(tmp_path, prints) as place:
        root = Root(place, PathPolicy())
        system = place.system
        assert system is not None
        line = system.ensure_connection()
        for told, kind in ((first, Deaf), (second, Deaf)):
            system.spawn(
                root.fd, kind(told), script=None, supervisor="", limits="", program="", argv=[], env={}, log=None
            )
        line._thread.join(50)

        assert line.is_lost
        with pytest.raises(WorkspaceLost, match="its data could not be processed: RuntimeError: the loop is closed"):
            line.send_call("fstat", seconds=1)
        assert [("gone", None)] == first == second


@pytest.mark.spec("reliability:HP5")
def test_a_command_that_cannot_be_logged_never_starts(tmp_path: Path) -> None:
    source = (Path(connection.__file__).parent / "supervisor.py").read_text("utf-8")
    told: list[Any] = []
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        root = Root(place, PathPolicy())
        assert place.system is not None
        spawn = partial(
            place.system.spawn, root.fd, Ear(told), script=None, supervisor=source, limits="", program="/bin/sh", env={}
        )  # type: ignore[arg-type]
        (tmp_path / "log").touch()
        with pytest.raises(FileExistsError):
            spawn(argv=["sh", "-c", "echo >canary"], log=str(tmp_path / "log"))
        spawn(argv=["sh", "-c", "echo >done"], log=None)
        assert until((tmp_path / "done").exists)

    assert not (tmp_path / "canary").exists()


def test_a_call_interrupted_while_sending_ends_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        root = Root(place, PathPolicy())
        line = place.system.ensure_connection()  # type: ignore[union-attr]
        write, sent = os.write, []

        def half(fd: int, data: bytes) -> int:
            if fd != line._in:
                return write(fd, data)
            if sent:
                raise KeyboardInterrupt
            sent.append(write(fd, bytes(data)[:10]))
            return 10

        with monkeypatch.context() as patched:
            patched.setattr(connection.os, "write", half)
            with pytest.raises(KeyboardInterrupt):
                root.fd.replace_file("x", b"data", None)  # type: ignore[union-attr]

        assert line.is_lost
        assert not line._pending
        assert [] == names(root)


@pytest.mark.deep
def test_concurrent_calls_closes_and_opens_raise_only_typed_errors(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with Workspace.from_command(["env"], tmp_path, python=sys.executable) as place:
        roots = [Root(place, PathPolicy()) for _ in range(4)]
        wrong: list[BaseException] = []
        answered = [0]

        def ask(root: Root) -> None:
            for _ in range(40):
                try:
                    assert ["a"] == names(root)
                    answered[0] += 1
                except (WorkspaceLost, ToolError):
                    pass
                except BaseException as error:
                    wrong.append(error)

        def close() -> None:
            for step in range(12):
                time.sleep(0.002 * step)
                place.close()
                Root(place, PathPolicy()).close()

        threads = [*[threading.Thread(target=ask, args=(root,)) for root in roots], threading.Thread(target=close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)

        assert not [thread for thread in threads if thread.is_alive()]
        assert [] == wrong
        assert ["a"] == names(roots[0])
        assert answered[0]
