"""Running programs below a root: what comes back, what they see, and that nothing of them is left (reliability 3.9, 4.3)."""

# ruff: noqa: ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
import unicodedata
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import Tool, ToolContext
from stepengine.data.events import Event, ToolProgress
from stepengine.data.messages import ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import DefinitionError
from stepengine.tools import ResourceMap, ToolRegistry
from stepengine.tools.bundled import bundled, shell_tools
from stepengine.tools.bundled.shell import commands, process
from stepengine.tools.bundled.shell.commands import Launch
from stepengine.tools.bundled.shell.output import Capture
from stepengine.tools.bundled.shell.tools import FLOODED
from stepengine.tools.context import RunResources
from tests.forked_processes import Process
from tests.phrases import NOT_EXECUTED
from tests.waits import until, until_async

from .processes import RUN_VARIABLE, running_with

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
pytestmark = pytest.mark.usefixtures("nothing_survives")
KEPT = 25_000
"""How many characters of each end of a stream are kept."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "sub").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
async def belongings() -> AsyncIterator[RunResources]:
    made = RunResources()
    yield made
    await made.aclose()


@pytest.fixture
def up_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """
    Have the time of every command be up as soon as a file is there, whatever a clock says.
    """
    wait = process.CommandProcess.wait

    def until_there(file: Path) -> None:
        async def waited(self: process.CommandProcess, _: float | None) -> bool:
            while not file.exists():
                if await wait(self, 0.01):
                    return True
            return await wait(self, 0)

        monkeypatch.setattr(process.CommandProcess, "wait", waited)

    return until_there


class Sh:
    """
    The shell tools of one root.
    """

    def __init__(self, root: Path, ctx: dict[str, Any] | None = None, **options: Any) -> None:
        self.tools = ToolRegistry(shell_tools(root, env=[RUN_VARIABLE, *options.pop("env", ())], **options))
        self._ctx = ctx or {}

    async def do(self, name: str, **input: Any) -> ToolResult:
        return await self.tools.execute(name, input, ToolContext.for_test(**self._ctx))

    async def __call__(self, command: Any, **input: Any) -> ToolResult:
        return await self.do("run_terminal_command", command=command, **input)

    async def out(self, command: Any, **input: Any) -> str:
        result = await self(command, **input)
        assert not result.is_error, result.text
        return str(result.data["stdout"])


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(code), *arguments]


# --- what comes back ------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SH02", "generator-contract:T0", "generator-contract:T1")
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["echo", "a b", ";"], {"command": "echo 'a b' ';'", "exit_code": 0, "stdout": "a b ;\n"}),
        ('echo "a b"', {"command": "echo 'a b'", "exit_code": 0, "stdout": "a b\n"}),
        ("echo a; echo b >&2; exit 255", {"exit_code": 255, "stdout": "a\n", "stderr": "b\n"}),
        ("echo a; kill -9 $$", {"exit_code": None, "signal": "SIGKILL", "stdout": "a\n"}),
        ("echo {a,b} $none", {"exit_code": 0, "stdout": "a b\n"}),
        ("if [[ ab == a* ]]; then echo ${BASH_VERSION:+bash}; fi", {"exit_code": 0, "stdout": "bash\n"}),
    ],
    ids=str,
)
async def test_a_command_returns_its_output_and_exit_status(root: Path, command: Any, expected: Any) -> None:
    result = await Sh(root, shell="bash")(command)

    data = dict(result.data)
    assert result.status == "ok"
    assert data.pop("duration_seconds") > 0
    assert {"command": command, "truncated": False, **expected} == data


@pytest.mark.spec("reliability:SH02", "generator-contract:D36", "reliability:HP3")
@pytest.mark.parametrize("command", ["ls; touch x", "touch $HOME"])
async def test_shell_syntax_is_refused_unless_a_shell_is_allowed(root: Path, command: str) -> None:
    refused = await Sh(root)(command)
    allowed = await Sh(root, shell="bash")(command)

    assert refused.is_error
    assert "needs a shell" in refused.text
    assert not allowed.is_error


@pytest.mark.spec("reliability:HP3")
async def test_sh_runs_command_lines_where_there_is_no_bash(root: Path) -> None:
    def without_programs(launch: Launch) -> Launch:
        return attrs.evolve(launch, env={**launch.env, "PATH": "/nowhere"})

    sh = Sh(root, shell="bash", runner=without_programs)

    assert "0 a\n" == await sh.out("command -v bash; x=a; echo $# $x")


@pytest.mark.spec("reliability:PM06")
@pytest.mark.parametrize("command", ["export PATH=./evil", ". x"])
async def test_shell_builtins_are_not_programs(root: Path, command: str) -> None:
    result = await Sh(root)(command)

    assert result.is_error
    assert f"{shlex.split(command)[0]!r} {NOT_EXECUTED}" in result.text


@pytest.mark.spec("reliability:SH10")
@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "does not exist"),
        ("echo ran > canary\n", 0o755, "no program of this system"),
        ("#!/bin/sh\necho ran > canary\n", 0o644, "not executable"),
        ("#!/bin/sh\r\necho ran > canary\r\n", 0o755, "interpreter that its first line names"),
        ("#!/no/such/interpreter\n", 0o755, "interpreter that its first line names"),
        ("", 0o755, "no program of this system"),
    ],
    ids=str,
)
async def test_a_program_that_cannot_execute_is_named_in_the_error(
    root: Path, content: str | None, mode: int, said: str
) -> None:
    if content is not None:
        (root / "prog").write_bytes(content.encode())
        (root / "prog").chmod(mode)
    result = await Sh(root)(["./prog"])

    assert result.is_error
    assert f"'./prog' {NOT_EXECUTED}" in result.text
    assert said in result.text
    assert not (root / "canary").exists()


@pytest.mark.spec("reliability:FS26", "reliability:HP2")
async def test_programs_are_found_with_the_system_as_root(elsewhere: Any) -> None:
    elsewhere.needs_the_whole_system()
    assert "hi\n" == await Sh(Path("/"), allow_wide_root=True).out(["echo", "hi"])


# --- how long -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:SH02", "generator-contract:T0")
@pytest.mark.usefixtures("soon")
async def test_a_command_is_killed_at_its_timeout_with_output_kept(root: Path, up_at: Any) -> None:
    up_at(root / "begun")
    script = "trap '' TERM; echo begun; : > begun; sleep 100; sleep 100"
    result = await Sh(root, shell="bash")(script, timeout_seconds=2)

    assert result.status == "error"
    assert result.data["stdout"] == "begun\n"
    assert result.data["signal"] == "SIGKILL"
    assert "longer than 2 s" in result.data["message"]


@pytest.mark.spec("reliability:SH02")
async def test_a_command_may_clean_up_at_its_timeout(root: Path, up_at: Any) -> None:
    up_at(root / "begun")
    script = "trap 'echo cleaned; exit 7' TERM; echo begun; : > begun; while :; do sleep 0.05; done"
    result = await Sh(root, shell="bash")(script, timeout_seconds=2)

    assert result.data["stdout"] == "begun\ncleaned\n"
    assert result.data["exit_code"] == 7


@pytest.mark.spec("generator-contract:T0", "reliability:SH02")
@pytest.mark.parametrize(
    ("asked", "unlimited", "seconds"),
    [
        (-1, False, 600),
        (-1, True, None),
        (0, False, 30),
        (601, False, 600),
        (0.5, True, 0.5),
    ],
)
async def test_the_requested_timeout_is_clamped_to_its_bounds(
    root: Path, monkeypatch: pytest.MonkeyPatch, asked: float, unlimited: bool, seconds: float | None
) -> None:
    waited: list[float | None] = []
    wait = process.CommandProcess.wait

    async def noted(self: process.CommandProcess, limit: float | None) -> bool:
        waited.append(limit)
        return await wait(self, limit)

    monkeypatch.setattr(process.CommandProcess, "wait", noted)
    await Sh(root, allow_unlimited=unlimited)("true", timeout_seconds=asked)

    assert waited == [seconds]


# --- nothing is left ------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:SH01", "generator-contract:T0")
async def test_a_child_that_holds_the_pipe_open_is_killed(root: Path, elsewhere: Any) -> None:
    out = await Sh(root, shell="bash").out("echo a; sleep 100 & echo $!; env -i sleep 100 & echo $!")

    first, *pids = out.split()
    assert first == "a"
    assert len(pids) == 2
    assert [] == elsewhere.running(map(int, pids))


ESCAPING = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", KEEPS, sys.argv[1]], {})
        os._exit(0)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    """
KEEPS = """
    import os, sys, time
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    os.closerange(0, 3)
    time.sleep(100)
    """


def escaping(name: str, then: str = "") -> list[str]:
    """
    Return a command that leaves a process without its session and its environment, which writes its id to the file *name*.
    """
    code = f"KEEPS = {textwrap.dedent(KEEPS)!r}\n{textwrap.dedent(ESCAPING)}\n{then}"
    return [sys.executable, "-c", code, name]


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:SH03")
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("way", ["it ends", "timeout", "cancelled", "killed with its job"])
async def test_a_process_without_session_and_environment_ends_with_its_command(
    root: Path, belongings: RunResources, up_at: Any, way: str, elsewhere: Any
) -> None:
    if way == "timeout":
        up_at(root / "seen")
    sh = Sh(root, {"belongings": lambda: belongings})
    command = escaping("pid", "" if way == "it ends" else "time.sleep(100)")
    job = way == "killed with its job"
    options: dict[str, Any] = {"process_type": "BACKGROUND"} if job else {}
    task = asyncio.create_task(sh(command, **options, **({"timeout_seconds": 3} if way == "timeout" else {})))
    pid = int(await until_async(lambda: (root / "pid").exists() and (root / "pid").read_text()))
    assert way == "it ends" or elsewhere.running([pid])
    (root / "seen").touch()
    if way == "cancelled":
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        result = await task
        if job:
            await sh.do("kill_job", job_id=result.data["job_id"])

    assert not elsewhere.running([pid])


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:SH03")
async def test_commands_leave_signal_settings_of_the_embedding_process_unchanged(root: Path) -> None:
    is_subreaper = ctypes.c_int(-1)
    await Sh(root).out(escaping("pid"))
    ctypes.CDLL(None).prctl(37, ctypes.byref(is_subreaper), 0, 0, 0)

    assert 0 == is_subreaper.value
    assert signal.SIG_DFL is signal.getsignal(signal.SIGCHLD)


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:SH03")
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", ["KILL", "STOP"])
async def test_a_command_that_turns_against_its_supervisor_ends_with_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, up_at: Any, how: str, elsewhere: Any
) -> None:
    monkeypatch.setattr(process, "DEATH_SECONDS", 0.1)
    up_at(root / "turned")
    turns = f"kill -{how} $PPID; : > turned; sleep 100"
    script = f"setsid sleep 100 & echo $! > new; mv new pid; echo said; sleep 0.05; {turns}"
    result = await Sh(root, shell="bash")(script, timeout_seconds=2)

    assert not elsewhere.running([int((root / "pid").read_text())])
    assert ("SIGKILL", "said\n") == (result.data["signal"], result.data["stdout"])


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.usefixtures("forks")
@LINUX
@pytest.mark.spec("reliability:SH04")
def test_a_command_and_escaped_children_end_with_a_killed_process(root: Path, elsewhere: Any) -> None:
    code = """
        import asyncio, json, sys
        from stepengine.tools import ToolRegistry
        from stepengine.tools.bundled import shell_tools
        tools = ToolRegistry(shell_tools(sys.argv[1]))
        asyncio.run(tools.execute("run_terminal_command", {"command": json.loads(sys.argv[2])}))
        """
    command = json.dumps(escaping("left", "open('here', 'w').write(str(os.getpid())); time.sleep(100)"))
    env = {**os.environ, "TMPDIR": str(root.parent)}
    with Process([sys.executable, "-c", textwrap.dedent(code), str(root), command], env=env) as parent:
        try:
            until(lambda: (root / "here").exists() and (root / "here").read_text())
        finally:
            parent.kill()
    pids = [int((root / name).read_text()) for name in ("left", "here")]
    until(lambda: not elsewhere.running(pids, here=True))


@LINUX
@pytest.mark.spec("reliability:SH04")
def test_a_command_ends_if_its_parent_dies_during_the_start(root: Path, elsewhere: Any, nothing_survives: str) -> None:
    # The supervisor as it is on a machine so busy that its first word comes too late.
    late = """
        import os, sys, time
        from stepengine.workspace import supervisor
        say, parent = os.write, os.getppid()
        def write(fd, data):
            while data.startswith(b"pid") and os.getppid() == parent:
                time.sleep(0.01)
            return say(fd, data)
        os.write = write
        supervisor.main([str(parent), *sys.argv[1:]])
        """
    code = """
        import os, socket, subprocess, sys
        ours, theirs = socket.socketpair()
        line, folder = theirs.fileno(), os.open(sys.argv[1], os.O_RDONLY)
        words = [str(line), str(folder), "", "/bin/sh", "sh", "-c", "sleep 100 & echo $! > new; mv new left; wait"]
        subprocess.run([sys.executable, "-c", sys.argv[2], *words], pass_fds=[line, folder])
        """
    words = [sys.executable, "-c", textwrap.dedent(code), str(root), textwrap.dedent(late)]
    with subprocess.Popen(words) as parent:
        try:
            until((root / "left").exists)
        finally:
            parent.kill()
    left = [int((root / "left").read_text())]
    until(lambda: not elsewhere.running(left, here=True))
    until(lambda: not running_with(nothing_survives))  # the supervisor ends after its command


async def test_private_folders_are_removed_with_the_command(root: Path) -> None:
    home, tmp = (await Sh(root, shell="bash").out('touch "$HOME/a" "$TMPDIR/b"; echo "$HOME"; echo "$TMPDIR"')).split()

    assert not Path(home).exists()
    assert not Path(tmp).parent.exists()


# --- what it prints -------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SH05", "reliability:HP5")
async def test_a_flood_on_both_streams_is_cut_and_killed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "COMMAND_OUTPUT_BYTES", 4_000_000)
    # Both have begun before either floods: on a loaded machine one alone could be all that comes.
    begin = "printf 'begin\\n' >&2; printf 'é\x1b[31mred\\né\x1b[31mred\\n'"
    result = await Sh(root, shell="bash")(f"{begin}; yes begin >&2 & yes 'é\x1b[31mred'")

    data = result.data
    assert result.status == "error"
    assert FLOODED in data["message"]
    assert data["truncated"] is True
    assert data["stdout"].startswith("éred\néred\n")
    # How much of it came on which stream is the system's to say.
    assert any("characters were left out here" in data[stream] for stream in ("stdout", "stderr"))
    assert len(data["stdout"]) < 2 * KEPT + 100
    assert len(data["stderr"]) < 2 * KEPT + 100


@pytest.mark.spec("reliability:SH05", "generator-contract:T0")
async def test_start_and_end_of_a_long_line_are_kept(root: Path) -> None:
    code = "import sys; sys.stdout.write('a' * 25_000 + 'b' * 250_000 + 'c' * 25_000)"
    result = await Sh(root)(python(code))

    assert not result.is_error
    assert "a" * KEPT + "\n[... 250,000 characters were left out here ...]\n" + "c" * KEPT == result.data["stdout"]
    assert result.data["truncated"] is True


@pytest.mark.spec("reliability:SH05", "reliability:HP5")
async def test_output_becomes_plain_text(root: Path) -> None:
    raw = b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ \xff\xfe \xc3\xa9 a\tb\r\n\x07\x08\x00\xc2\x9b31mend\x1b[3"
    (root / "raw").write_bytes(raw)
    pieces = Capture(1_000)
    for byte in raw:
        pieces.feed(bytes([byte]))
    pieces.end()
    expected = "red link \ufffd\ufffd é a\tb\r\nend[3"

    assert expected == await Sh(root).out("cat raw")
    assert expected == pieces.text()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SH05", "reliability:R23")
@pytest.mark.parametrize("opener", ["\x9d", "\x1b[0;", "\x1b "])
async def test_escapes_that_never_end_hide_no_output(root: Path, opener: str) -> None:
    (root / "raw").write_text((opener * 131_072) + "end")
    result = await Sh(root)("cat raw")

    assert (0, False) == (result.data["exit_code"], result.is_error)
    assert result.data["stdout"].endswith("end")


@pytest.mark.spec("reliability:SH05", "reliability:HP5")
@given(
    st.lists(
        st.sampled_from(["\x1b", "[", "]", "0;", "31m", "\x07", "\\", "P", "\x9b", "é", "text\n", "\x00", " " * 600])
    )
)
def test_no_terminal_escape_is_left_however_output_is_split(pieces: list[str]) -> None:
    capture = Capture(1_000_000)
    shown = [capture.feed(piece.encode()) for piece in pieces] + [capture.end()]

    assert capture.text() == "".join(shown)
    assert not any(unicodedata.category(char) == "Cc" and char not in "\t\r\n" for char in capture.text())


@pytest.mark.deep
@pytest.mark.smoke
async def test_output_is_shown_while_the_command_runs(root: Path) -> None:
    events: list[Event] = []
    sh = Sh(root, {"emit": events.append}, shell="bash")
    shown = asyncio.create_task(sh("echo one; while [ ! -e go ]; do sleep 0.02; done; echo two"))
    await until_async(lambda: events)
    assert not shown.done()
    (root / "go").touch()
    await shown

    assert all(isinstance(e, ToolProgress) and e.tool_name == "run_terminal_command" for e in events)
    assert "".join([e.message for e in events if isinstance(e, ToolProgress)]) == "one\ntwo\n"


# --- what it sees ---------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:HP2", "reliability:SC05")
async def test_a_command_sees_only_the_variables_of_the_list(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "sk-canary-in-the-environment"
    for name in (
        "OPENAI_API_KEY",
        "MY_VARIABLE",
        "LD_PRELOAD_X",
        "PYTHONPATH",
        "RIPGREP_CONFIG_PATH",
        "GIT_SSH_COMMAND",
    ):
        monkeypatch.setenv(name, canary)
    monkeypatch.setenv("JAVA_HOME", "/opt/java")
    out = await Sh(root, env=["JAVA_HOME", "NOT_SET"]).out(["cat", "/proc/self/environ"])
    printed = await Sh(root, env=["JAVA_HOME"]).out("env")

    assert canary not in out + printed
    names = {line.partition("=")[0] for line in printed.splitlines()}
    assert names - {"TZ"} == {
        "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER", "LOGNAME", "TERM", "NO_COLOR", "CI", "PAGER", "GIT_PAGER",
        "MANPAGER", "EDITOR", "VISUAL", "GIT_EDITOR", "GIT_TERMINAL_PROMPT", "GIT_OPTIONAL_LOCKS", "GIT_CONFIG_NOSYSTEM",
        "GIT_CONFIG_GLOBAL", "GIT_CONFIG_COUNT", *[f"GIT_CONFIG_{kind}_{n}" for kind in ("KEY", "VALUE") for n in range(3)],
        "STEPENGINE_CALL", "JAVA_HOME", RUN_VARIABLE,
    }  # fmt: skip


@pytest.mark.spec("reliability:HP2")
async def test_a_secret_is_passed_on_only_when_that_is_meant(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "github_token", "DB_PASSWORD", "STEPENGINE_MODEL"]  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "canary")
        with pytest.raises(DefinitionError, match="env_secrets=True"):
            shell_tools(root, env=[name])

    lines = (await Sh(root, env=names, env_secrets=True).out("env")).splitlines()
    assert [] == [name for name in names if f"{name}=canary" not in lines]


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:HP3", "reliability:HP2", "reliability:SH04")
async def test_a_command_has_neither_input_nor_terminal_but_own_session(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("EDITOR", "vi")
    before = os.umask(0)
    read, write = os.pipe()
    os.write(write, b"what is typed\n")
    os.close(write)
    mine = os.dup(0)
    os.dup2(read, 0)
    try:
        script = "cat; readlink /proc/self/fd/0; umask; touch made; echo $TZ $LC_ALL $PAGER $EDITOR $TERM $GIT_TERMINAL_PROMPT"
        out = await Sh(root, shell="bash").out(script)
    finally:
        os.umask(before)
        os.dup2(mine, 0)
        os.close(mine)
        os.close(read)
    session = await Sh(root).out(python("import os; print(os.getsid(0) == os.getpgid(0) == os.getpid())"))
    tty = await Sh(root)(["cat", "/dev/tty"])

    assert out.split("\n") == ["/dev/null", "0022", "Asia/Tokyo C.UTF-8 cat true dumb 0", ""]
    assert (root / "made").stat().st_mode & 0o777 == 0o644
    assert session == "True\n"
    assert tty.data["exit_code"] == 1


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:HP3")
async def test_a_command_runs_in_its_folder_even_if_replaced_since(root: Path, tmp_path: Path) -> None:
    (root / "ours").touch()
    sh = Sh(root)
    root.rename(tmp_path / "aside")
    root.mkdir()
    (root / "theirs").touch()

    assert await sh.out(["ls"]) == (await sh.out(["ls", "."])) != "theirs\n"
    assert "ours\n" in await sh.out(["ls"])


@LINUX
@pytest.mark.spec("reliability:HP3")
async def test_a_command_inherits_no_descriptors(root: Path) -> None:
    leaked = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        out = await Sh(root).out(python("import os; print(sorted(os.listdir('/proc/self/fd')))"))
    finally:
        os.close(leaked)

    assert out == "['0', '1', '2', '3']\n"  # 3 is the listing itself


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("generator-contract:T0", "reliability:HP3", "reliability:SH12")
async def test_core_dumps_are_off_and_configured_limits_are_enforced(root: Path) -> None:
    show = "sh -c 'ulimit -c; ulimit -f; ulimit -t; ulimit -v'; ulimit -u"  # bash has another unit for -f
    before = resource.getrlimit(resource.RLIMIT_CORE)
    if before[1] == 0:
        pytest.skip(
            "this process may not have core dumps itself (core-dump limit: `ulimit -Hc` is 0), so nothing is seen"
        )
    resource.setrlimit(resource.RLIMIT_CORE, (4096, before[1]))
    try:
        free = (await Sh(root, shell="bash").out(show)).split()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    limits = {"file_bytes": 51_200, "cpu_seconds": 7, "memory_bytes": 2**30, "processes": 2_000}
    bound = Sh(root, shell="bash", limits=limits)

    assert free[0] == "0"
    assert (await bound.out(show)).split() == ["0", "100", "7", str(2**20), "2000"]
    large = await bound("head -c 100000 /dev/zero > large")
    assert large.data["exit_code"] or large.data.get("signal")
    assert (root / "large").stat().st_size == 51_200
    for limits in ({"cpu": 1}, {"cpu_seconds": 0}, {"cpu_seconds": True}):
        with pytest.raises(DefinitionError, match="cpu_seconds"):
            shell_tools(root, limits=limits)


@pytest.mark.deep
@pytest.mark.smoke
async def test_a_broken_pipe_ends_a_program_as_usual(root: Path) -> None:
    assert await Sh(root, shell="bash").out("yes | head -n 1") == "y\n"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as below a `nohup`
    try:
        status = await Sh(root).out(["cat", "/proc/self/status"])
    finally:
        signal.signal(signal.SIGHUP, before)
    mask = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    # Two signals below the real-time ones are the C library's own; its posix_spawn, which Python uses since 3.13, ignores them.
    own = sum(1 << number - 1 for number in signal.valid_signals())
    assert mask & own == 0


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:HP3")
async def test_a_command_works_below_the_root_only(root: Path, tmp_path: Path) -> None:
    (root / "inside").symlink_to("sub")
    (root / "out").symlink_to(tmp_path)
    sh = Sh(root)

    assert await sh.out("pwd") == f"{root}\n"
    assert await sh.out(["pwd", "-P"], cwd="sub") == f"{root}/sub\n"
    assert await sh.out(["pwd", "-P"], cwd="inside") == f"{root}/sub\n"
    for cwd in ("..", "/", "out", "sub/../..", str(tmp_path), "gone", "/etc"):
        refused = await sh(["touch", "canary"], cwd=cwd)
        assert refused.is_error, cwd
    assert not (tmp_path / "canary").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:HP2", "reliability:PM01")
async def test_a_program_in_the_root_is_not_found_by_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("bin", "."):
        (root / "bin").mkdir(exist_ok=True)
        (root / folder / "git").write_text("#!/bin/sh\necho planted\n")
        (root / folder / "git").chmod(0o755)
    outside = root.parent / "linked"
    outside.symlink_to(root / "bin")
    monkeypatch.setenv("PATH", f"{root}/bin:.:bin:{outside}:/usr/local/bin:/usr/bin:/bin")
    sh = Sh(root, shell="bash")
    by_name = await sh(["git"])

    assert "planted" not in by_name.text
    assert await sh.out("echo $PATH") == "/usr/local/bin:/usr/bin:/bin\n"
    assert await sh.out(["./git"]) == "planted\n"


@pytest.mark.deep
@pytest.mark.smoke
async def test_home_is_a_private_folder_unless_home_is_real(root: Path, elsewhere: Any) -> None:
    sh, real = Sh(root, shell="bash"), Sh(root, shell="bash", home="real")

    assert await sh.out("ls -A $HOME; ls -A $TMPDIR; stat -c %a $HOME/..") == "700\n"
    assert await real.out("echo $HOME") == f"{elsewhere.home}\n"


# --- many -----------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:HP5")
async def test_no_more_commands_than_the_limit_run_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "COMMANDS_AT_ONCE", 3)
    sh = Sh(root, {"resources": ResourceMap()}, shell="bash")
    results = await asyncio.gather(*[sh("touch on.$$; ls on.* | wc -l; sleep 0.05; rm on.$$") for _ in range(9)])

    assert {0} == {result.data["exit_code"] for result in results}
    assert max(int(result.data["stdout"]) for result in results) <= 3


@pytest.mark.spec("reliability:HP5")
async def test_a_system_that_stays_full_is_a_clear_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(process, "FULL_SECONDS", 0.1)
    monkeypatch.setattr(process, "_start_local_supervisor", full)
    result = await Sh(root)(["ls"])

    assert result.is_error
    assert "'ls' could not be started: Too many open files" in result.text


# --- jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SH14", "reliability:SH01")
async def test_a_background_job_is_checked_and_stopped_by_its_id(root: Path, belongings: RunResources) -> None:
    sh = Sh(root, {"belongings": lambda: belongings}, shell="bash")
    script = "echo one; while [ ! -e go ]; do sleep 0.02; done; echo two; echo err >&2; exit 3"
    started = await sh(script, process_type="BACKGROUND")
    job = started.data["job_id"]
    effects = [(e.kind, e.target) for e in started.side_effects]
    first = await sh.do("check_job", job_id=job, wait_for="one", timeout_seconds=20)
    again = await sh.do("check_job", job_id=job)
    absent = await sh.do("check_job", job_id=job, wait_for="never", timeout_seconds=0.05)
    (root / "go").touch()
    last = await sh.do("check_job", job_id=job, timeout_seconds=20)
    found = await sh.do("check_job", job_id=job, wait_for="one")
    killed = await sh.do("kill_job", job_id=job)
    file = started.data["output_file"]

    assert effects == [("job_started", job)]
    assert (first.data["status"], first.data["found"], first.data["stdout"]) == ("running", True, "one\n")
    assert (again.data["status"], again.data["stdout"]) == ("running", "")
    assert absent.data["found"] is False
    assert (last.data["status"], last.data["exit_code"]) == ("exited", 3)
    assert (last.data["stdout"], last.data["stderr"]) == ("two\n", "err\n")
    assert found.data["found"] is True
    assert killed.data["exit_code"] == 3
    assert "ended already" in killed.data["message"]
    assert await sh.out(["cat", file]) == "one\ntwo\nerr\n"
    assert await belongings.aclose() == []
    assert (await sh(["test", "-e", file])).data["exit_code"] == 1


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:SH14", "reliability:HP5")
async def test_jobs_are_stopped_counted_and_end_with_their_run(
    root: Path, belongings: RunResources, elsewhere: Any
) -> None:
    other = RunResources()
    ids = iter([f"c{n}" for n in range(100)])

    def ctx(owner: RunResources) -> ToolContext:
        return ToolContext.for_test(tool_call_id=next(ids), belongings=lambda: owner)

    tools = ToolRegistry(shell_tools(root, env=[RUN_VARIABLE]))

    async def do(owner: RunResources, name: str, **input: Any) -> ToolResult:
        return await tools.execute(name, input, ctx(owner))

    job = {"command": ["sleep", "100"], "process_type": "BACKGROUND"}
    jobs = [(await do(belongings, "run_terminal_command", **job)).data for _ in range(4)]
    fifth = await do(belongings, "run_terminal_command", **job)
    theirs = await do(other, "check_job", job_id=jobs[0]["job_id"])
    stopped = await do(belongings, "kill_job", job_id=jobs[0]["job_id"], signal="SIGINT")
    sixth = await do(belongings, "run_terminal_command", **job)
    mentioned = await belongings.aclose()

    assert fifth.is_error
    assert "4 background jobs are running already" in fifth.text
    assert theirs.is_error
    assert "no job 'job-c0'" in theirs.text
    assert stopped.data["signal"] == "SIGINT"
    assert not sixth.is_error
    assert [] == elsewhere.running([j["pid"] for j in [*jobs, sixth.data]])
    expected = [f"background job {j['job_id']} (sleep 100) was ended with its run" for j in [*jobs[1:], sixth.data]]
    assert mentioned == expected


@pytest.mark.spec("reliability:SH14")
async def test_the_output_file_of_a_job_has_a_cap(
    root: Path, belongings: RunResources, monkeypatch: pytest.MonkeyPatch, elsewhere: Any
) -> None:
    monkeypatch.setattr("stepengine.tools.bundled.shell.tools.JOB_OUTPUT_BYTES", 1_000)
    sh = Sh(root, {"belongings": lambda: belongings})
    started = await sh(["seq", "1000"], process_type="BACKGROUND")
    until(lambda: not elsewhere.running([started.data["pid"]]))  # and the loop has not read yet what it printed
    ended = await sh.do("check_job", job_id=started.data["job_id"], timeout_seconds=20)

    assert Path(started.data["output_file"]).stat().st_size == 1_000
    assert "the output file is full" in ended.data["message"]
    assert ended.data["stdout"].endswith("1000\n")


@pytest.mark.spec("reliability:SH14")
async def test_a_job_whose_output_file_is_full_is_still_searched(
    root: Path, belongings: RunResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.tools.bundled.shell.tools.JOB_OUTPUT_BYTES", 10)
    sh = Sh(root, {"belongings": lambda: belongings}, shell="bash")
    script = "echo 0123456789; while [ ! -e go ]; do sleep 0.02; done; echo ready"
    started = await sh(script, process_type="BACKGROUND")
    job = started.data["job_id"]
    across = await sh.do("check_job", job_id=job, wait_for="9\n", timeout_seconds=20)
    early = await sh.do("check_job", job_id=job, wait_for="ready")
    (root / "go").touch()
    late = await sh.do("check_job", job_id=job, wait_for="ready", timeout_seconds=20)

    assert [True, False, True] == [one.data["found"] for one in (across, early, late)]
    assert Path(started.data["output_file"]).read_text() == "0123456789"


@LINUX
@pytest.mark.spec("reliability:SH14")
async def test_job_goes_on_and_is_reported_on_a_full_disk(
    root: Path, belongings: RunResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
    sh = Sh(root, {"belongings": lambda: belongings})
    started = await sh(["echo", "ready"], process_type="BACKGROUND")
    ended = await sh.do("check_job", job_id=started.data["job_id"], timeout_seconds=20)

    assert ("exited", "ready\n") == (ended.data["status"], ended.data["stdout"])
    assert "the output file is full" in ended.data["message"]


async def test_a_background_job_needs_a_run_that_ends_it(root: Path) -> None:
    result = await Sh(root)(["sleep", "100"], process_type="BACKGROUND")

    assert result.is_error
    assert "so it can only be called in an agent run" in result.text


# --- what is logged ---------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:FP6")
async def test_the_log_has_the_command_without_secrets_or_output(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[tuple[str, dict[str, Any]]] = []

    def log(message: str, /, **data: Any) -> None:
        lines.append((message, data))

    monkeypatch.setenv("GITHUB_TOKEN", "canary-secret")
    logger = SimpleNamespace(debug=log, info=log, warning=log, error=log)
    await Sh(root, {"logger": logger}, shell="bash")("echo printed; test canary-secret = other")
    ((message, data),) = lines

    assert message == "ran echo printed; test [GITHUB_TOKEN] = other"
    assert data.pop("seconds") > 0
    assert data == {"exit_code": 1, "signal": None, "bytes": len("printed\n")}


@pytest.mark.spec("reliability:FP6")
async def test_the_log_shows_no_end_of_a_secret(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Not of one that starts with another secret, nor of one in the middle of a command that is too long to be logged.
    """
    lines: list[str] = []
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-canary-" + "x" * 8_000 + "-canary")
    logger = SimpleNamespace(debug=lambda message, /, **_: lines.append(message))
    await Sh(root, {"logger": logger})(["echo", os.environ["B_TOKEN"], os.environ["A_TOKEN"]])

    assert ["ran echo [B_TOKEN] [A_TOKEN]"] == lines


# --- how the set is made --------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:HP6", "requirements:F21")
def test_shell_tools_declare_category_and_annotations(root: Path) -> None:
    specs = {tool.spec.name: tool.spec for tool in shell_tools(root)}
    runs = ToolAnnotations(read_only=False, destructive=True, idempotent=False, open_world=True)

    assert list(specs) == ["run_terminal_command", "check_job", "kill_job"]
    assert {spec.category for spec in specs.values()} == {"execute"}
    assert specs["run_terminal_command"].annotations == specs["kill_job"].annotations == runs
    assert all(spec.requires_permission for spec in specs.values())
    assert specs["run_terminal_command"].parallel_safe is False


@pytest.mark.spec("reliability:PM24", "requirements:E19")
@pytest.mark.parametrize(
    ("input", "action", "details"),
    [
        ({"command": ["git", "push", "a b"]}, "Run git", {"command": "git push 'a b'", "argv": ["git", "push", "a b"], "cwd": "."}),
        ({"command": "git push", "cwd": "sub", "process_type": "BACKGROUND"}, "Run git in the background",
         {"command": "git push", "argv": ["git", "push"], "cwd": "sub"}),
        ({"command": "ls; rm x"}, "Run a shell script",
         {"script": "ls; rm x", "needs_a_shell_because_of": "';' outside of quotes", "cwd": "."}),
        ({"command": []}, "Run a command that will be refused", None),
    ],
    ids=str,
)  # fmt: skip
def test_an_approval_preview_shows_the_whole_command(root: Path, input: Any, action: str, details: Any) -> None:
    tool: Tool[..., Any] = shell_tools(root, shell="bash")[0]
    preview = tool.preview(input)
    refused = shell_tools(root)[0].preview(input)

    assert preview is not None
    assert refused is not None
    assert bool(refused.problem) == ("script" in (details or {}) or details is None)
    assert preview.action == action
    assert details is None or details == preview.details


@pytest.mark.spec("reliability:HP8")
async def test_a_runner_can_replace_the_executed_command(root: Path) -> None:
    seen = []

    def inside(launch: Any) -> Any:
        seen.append(launch)
        return attrs.evolve(launch, argv=("env", "INSIDE=yes", *launch.argv))

    sh = Sh(root, runner=inside, shell="bash")

    assert await sh.out(["printenv", "INSIDE"], cwd="sub") == "yes\n"
    assert await sh.out("echo $INSIDE; exit 0") == "yes\n"
    assert (seen[0].argv, seen[0].root, seen[0].cwd) == (("printenv", "INSIDE"), str(root), "sub")


@pytest.mark.spec("reliability:FP7")
def test_a_system_without_process_groups_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "os", SimpleNamespace(name="nt"))
    with pytest.raises(DefinitionError, match="POSIX"):
        shell_tools(root)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"timeout": 0}, "timeout=0"),
        ({"max_timeout": float("inf")}, "max_timeout=inf"),
        ({"home": "other"}, "home='other'"),
        ({"shell": True}, "shell=True; use None or 'bash'"),
        ({"runner": "bwrap"}, "runner='bwrap'"),
        ({"env": "PATH"}, "env="),
        ({"env": ["A=B"]}, "'A=B'"),
        ({"env": ["HOME"]}, "'HOME', which commands cannot inherit.*home=\"real\""),
        ({"env": ["GIT_CONFIG_COUNT"]}, "'GIT_CONFIG_COUNT', which commands cannot inherit"),
        ({"env": ["STEPENGINE_CALL"], "env_secrets": True}, "'STEPENGINE_CALL', which commands cannot inherit"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(root: Path, made: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        shell_tools(root, **made)
