"""Tools that run elsewhere: the same results over every way there, what never gets there, and a connection that dies."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, Workspace
from stepengine.data.definition import AgentDefinition
from stepengine.data.yields import ToolCall
from stepengine.errors import DefinitionError, UndoRefused, UnknownOutcome, WorkspaceLost
from stepengine.journal import FileJournal, undo
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import FileChangeHook, change_hook_tools, file_tools, search_tools, shell_tools
from stepengine.workspace import remote_files
from tests.waits import until_async

from .places import why_not
from .podman import docker, podman

HERE = Path(__file__).parent
SUITE = {
    "files": (
        "test_file_tools.py", "test_confinement.py", "test_search_tools.py", "test_proposals.py", "test_ignore.py", "test_overview_tools.py",
        "test_followups_and_checks.py",
    ),
    "programs": ("test_shell_tools.py", "test_shell_runs.py", "test_shell_git.py", "test_watch.py"),
}  # fmt: skip
"""Not those of terminals of an editor and of ``sandbox=True``, which belong to this machine."""
MAIN = {"files": ("test_file_tools.py",), "programs": ("test_shell_tools.py",)}
"""Over ways that differ in nothing but how the program there is reached; each test starts a container."""
INSIDE = {
    "test_git_identity_of_the_repository_overrides_that_of_the_user": "the configuration of a repository is read on this machine alone",
    "nothing_is_started": "it looks at what this process starts",
    "a_missing_folder_that_appears_as_a_link": "it puts another function in the place of one of this process",
    "walk_by_descriptor_is_not_possible": "it takes functions from this process",
    "linear_time": "it takes ripgrep from this process",
    "system_that_stays_full": "it takes processes from this one",
    "output_file_of_a_job_has_a_cap": "it changes a limit of this process",
    "output_file_is_full": "it changes a limit of this process, and reads the file here",
}
"""Tests of what this process does itself, and why they cannot be about another one."""
OF_SSH = {
    "program_in_the_root_is_not_found": "the log-in there chooses the search path",
    "too_wide_is_refused": "the log-in there chooses the home folder",
}


# --- the same tests -------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("remote:WS1", "remote:WS2")
@pytest.mark.parametrize("part", SUITE)
@pytest.mark.parametrize("way", ["old", "ssh", "bubblewrap", "podman", "docker"])
def test_the_tool_suite_passes_in_every_remote_workspace(way: str, part: str, tmp_path: Path) -> None:
    why = podman(tmp_path).why if way == "podman" else docker().why if way == "docker" else why_not(way)
    if why:
        pytest.skip(why)
    left_out = " and ".join([f"not {name}" for name in (*INSIDE, *(OF_SSH if way == "ssh" else {}))])
    suite = SUITE if way in ("old", "bubblewrap") else MAIN
    words = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'b'}", "-k", left_out]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *[str(HERE / name) for name in suite[part]]],
        env={**os.environ, "STEPENGINE_TEST_WORKSPACE": way}, capture_output=True, text=True, check=False, cwd=HERE.parents[1],
    )  # fmt: skip

    assert "failed" not in done.stdout.splitlines()[-1], done.stdout[-4_000:]
    assert 0 == done.returncode, done.stdout[-4_000:] + done.stderr[-1_000:]


# --- what gets there ------------------------------------------------------------------------------------------------


def there(root: Path, **options: Any) -> Workspace:
    return Workspace.from_command(["env"], root, python=sys.executable, **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "proj"
    made.mkdir()
    (made / "a.txt").write_text("one\n")
    return made


WORKERS = "cat $(grep -ls 'stepengine worker' /proc/[0-9]*/cmdline | sed s/cmdline$/environ/); true"
"""A command that prints the environment of each worker; grep and its shell, which may end meanwhile, have that of the command."""


async def ran(tools: ToolRegistry, command: Any, **more: Any) -> Any:
    result = await tools.execute("run_terminal_command", {"command": command, **more})
    assert not result.is_error, result.text
    return result.data


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS4")
async def test_local_keys_and_variables_never_reach_the_workspace(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "MY_SECRET", "SSH_AUTH_SOCK", "STEPENGINE_MODEL", "DOCKER_HOST"):
        monkeypatch.setenv(name, f"the {name} of here")
    with there(root) as place:
        tools = ToolRegistry(shell_tools(place, shell="bash", env=["MY_SECRET"], env_secrets=True))
        own = await ran(tools, "cat /proc/$PPID/environ /proc/self/environ | tr '\\0' '\\n'")
        worker = await ran(tools, WORKERS)

    assert "PATH=" in own["stdout"] + worker["stdout"]
    assert "of here" not in own["stdout"] + worker["stdout"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS4")
async def test_allowed_variables_have_the_values_of_the_workspace(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKS_WITH", "here")
    with Workspace.from_command(["env", "WORKS_WITH=there"], root, python=sys.executable) as place:
        tools = ToolRegistry(shell_tools(place, env=["WORKS_WITH"]))

        assert "there\n" == (await ran(tools, ["printenv", "WORKS_WITH"]))["stdout"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(bool(why_not("bubblewrap")), reason="needs bubblewrap and the right to use it")
@pytest.mark.spec("remote:WS4", "remote:WS7")
async def test_a_sandbox_finds_programs_but_has_no_local_variables(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A folder of the search path, and this Python's environment, may be links; ``~/bin`` is shown without what stands beside it.
    """
    home = tmp_path / "home"
    for folder, program in ((tmp_path / "tools" / "bin", "linked"), (home / "bin", "own"), (root / "bin", "planted")):
        folder.mkdir(parents=True)
        (folder / program).write_text(f"#!/bin/sh\necho {program} ran\n")
        (folder / program).chmod(0o755)
    (home / "secret").write_text("of here")
    (tmp_path / "link").symlink_to(tmp_path / "tools" / "bin")
    path = [tmp_path / "link", home / "bin", root / "bin", tmp_path / "gone", "bin", "/usr/bin", "/bin"]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, path)))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WORKS_WITH", "here")
    (tmp_path / "environment").symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/environment/bin/{Path(sys.executable).name}")
    with Workspace.bubblewrap(root) as place:
        tools = ToolRegistry(shell_tools(place, shell="bash", env=["WORKS_WITH"], home="real"))
        seen = await ran(tools, "linked; own; planted || true; echo ${WORKS_WITH-nothing}, $HOME, $LANG; echo $PATH")
        listed = await ran(tools, ["ls", "-A", str(home), str(tmp_path / "tools")])

    shown = f"{tmp_path / 'tools' / 'bin'}:{home / 'bin'}:/usr/bin:/bin"
    assert ["linked ran", "own ran", "nothing, /tmp, C.UTF-8", shown] == seen["stdout"].splitlines()
    assert "planted: command not found" in seen["stderr"]
    assert f"{home}:\nbin\n\n{tmp_path / 'tools'}:\nbin\n" == listed["stdout"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(bool(why_not("bubblewrap")), reason="needs bubblewrap and the right to use it")
@pytest.mark.spec("remote:WS7")
async def test_a_sandbox_runs_home_programs_without_showing_keys(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    local, cargo = home / ".local", home / ".cargo"
    keys = [
        cargo / "credentials.toml", local / "share" / "keyrings" / "login", local / "share" / "tool" / "auth.json", local / "state" / "history",
        home / ".netrc",
    ]  # fmt: skip
    real = [local / "share" / "uv" / "tools" / "linter" / "bin" / "linter", local / "share" / "tool" / "bin" / "tool"]
    programs = [cargo / "bin" / "builds", local / "bin" / "own", home / "node" / "v1" / "bin" / "runs", *real]
    for file in (*keys, *programs, home / "node" / "v1" / "LICENSE", local / "lib" / "library", cargo / "env"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("#!/bin/sh\necho ${0##*/} ran\n" if file in programs else "a key of here")
        file.chmod(0o755)
    for program in real:
        (local / "bin" / program.name).symlink_to(program)
    (local / "bin" / "out").symlink_to(home / ".netrc")
    folders = [cargo / "bin", local / "bin", home / "node" / "v1" / "bin", Path("/usr/bin"), Path("/bin")]
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, folders)))
    (tmp_path / "linked").symlink_to(home)
    monkeypatch.setenv("HOME", str(tmp_path / "linked"))
    with Workspace.bubblewrap(root) as place:
        tools = ToolRegistry(shell_tools(place, shell="bash"))
        told = await ran(tools, "builds; own; runs; linter; tool")
        found = await ran(tools, ["find", str(home), "-type", "f"])

    assert [f"{name} ran" for name in ("builds", "own", "runs", "linter", "tool")] == told["stdout"].splitlines()
    shown = {*programs, home / "node" / "v1" / "LICENSE", local / "lib" / "library"}
    assert set(map(str, shown)) == set(found["stdout"].splitlines())


@pytest.mark.deep
@pytest.mark.spec("remote:WS4", "remote:WS1")
async def test_over_ssh_the_environment_is_that_of_the_other_machine(
    root: Path, sshd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key of here")
    monkeypatch.setenv("LC_MY_KEY", "another key of here")
    with sshd.workspace(root, same_environment=False) as place:
        tools = ToolRegistry([*shell_tools(place, shell="bash"), *file_tools(place)])
        seen = await ran(tools, WORKERS)
        read = await tools.execute("read_files", {"paths": ["a.txt"]})

    assert "SSH_CONNECTION" in seen["stdout"]
    assert "of here" not in seen["stdout"]
    assert "one\\n" in read.text


# --- a connection that dies -----------------------------------------------------------------------------------------


def worker_of(place: Workspace) -> int:
    assert place.system is not None
    return int(place.system.ensure_connection()._process.pid)


async def lose_connection(place: Workspace, root: Path) -> None:
    """
    Kill the worker as soon as the command that it runs has made its file.
    """
    await until_async((root / "begun").exists)
    os.kill(worker_of(place), signal.SIGKILL)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS5")
async def test_a_lost_connection_is_reopened_between_calls(root: Path) -> None:
    with there(root) as place:
        tools = ToolRegistry([*file_tools(place, write=True), *shell_tools(place)])
        before = worker_of(place)
        os.kill(before, signal.SIGKILL)
        await until_async(lambda: place.system.ensure_connection().is_lost or worker_of(place) != before)  # type: ignore[union-attr]
        read = await tools.execute("read_files", {"paths": ["a.txt"]})

        assert "one\\n" in read.text
        assert before != worker_of(place)
        assert "one\n" == (await ran(tools, ["cat", "a.txt"]))["stdout"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS5")
async def test_a_command_with_a_lost_connection_is_in_doubt(root: Path) -> None:
    with there(root) as place:
        tools = ToolRegistry(shell_tools(place))
        running = asyncio.create_task(
            tools.execute("run_terminal_command", {"command": ["sh", "-c", "echo > begun; sleep 60"]})
        )
        await lose_connection(place, root)
        with pytest.raises(UnknownOutcome, match="nobody knows how"):
            await running

        assert "ok\n" == (await ran(tools, ["echo", "ok"]))["stdout"]
    await until_async(lambda: not sleeping(root))


def sleeping(root: Path) -> list[str]:
    """
    Return the commands that still run in the root.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "cwd") == str(root):  # noqa: PTH115
                found.append((folder / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS5")
async def test_a_model_gets_an_unknown_outcome_and_continues(root: Path) -> None:
    asked = [
        tool_call("run_terminal_command", {"command": given})
        for given in (["sh", "-c", "echo > begun; sleep 60"], ["echo", "x"])
    ]
    with there(root) as place:
        bot = AgentDefinition("bot", model="m/m", tools=["run_terminal_command"])
        async with Engine([bot], shell_tools(place), ScriptedModel([*asked, "Done."]), workspace=place) as engine:
            result, _ = await asyncio.gather(engine.run(bot, "go"), lose_connection(place, root))
    told = [message for message in result.state.message_history if message.role == "tool"]

    assert "completed" == result.status
    assert "nobody knows" in str(told[0])
    assert "'stdout': 'x\\n'" in str(told[1])


async def test_a_cancelled_read_does_not_wait_for_its_answer(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever waited for it would wait for longer than a test may take.
    monkeypatch.setattr(remote_files, "CALL_SECONDS", 3_000)
    with there(root) as place:
        tools = ToolRegistry(file_tools(place))
        await tools.execute("read_files", {"paths": ["a.txt"]})
        os.kill(worker_of(place), signal.SIGSTOP)
        task = asyncio.create_task(tools.execute("read_files", {"paths": ["a.txt"]}))
        await until_async(lambda: place.system.ensure_connection()._pending)  # type: ignore[union-attr]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        os.kill(worker_of(place), signal.SIGCONT)


@pytest.mark.deep
async def test_many_calls_at_once_share_a_connection(root: Path) -> None:
    for number in range(20):
        (root / f"{number}.txt").write_text(f"{number}\n" * 20_000)
    with there(root) as place:
        tools = ToolRegistry([*file_tools(place), *shell_tools(place), *search_tools(place)])
        reads = [tools.execute("read_files", {"paths": [f"{n}.txt"], "limit": 1}) for n in range(20)]
        runs = [tools.execute("run_terminal_command", {"command": ["cat", f"{n}.txt"]}) for n in range(8)]
        finds = [tools.execute("code_search", {"pattern": f"^{n}$", "flags": "-c"}) for n in range(4)]
        results = await asyncio.gather(*reads, *runs, *finds)

    assert [] == [r.text for r in results if r.is_error]
    assert [f"{n}\n" for n in range(20)] == [r.data[0]["content"] for r in results[:20]]  # type: ignore[index,call-overload]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:HP3", "reliability:FS25")
async def test_commands_never_change_the_umask_of_remote_files(root: Path) -> None:
    words = ["sh", "-c", 'umask 077; exec "$@"', "sh"]
    with Workspace.from_command(words, root, python=sys.executable) as place:
        tools = ToolRegistry([*file_tools(place, write=True), *shell_tools(place)])
        runs = [tools.execute("run_terminal_command", {"command": ["sh", "-c", "umask"]}) for _ in range(12)]
        writes = [tools.execute("write_file", {"path": f"new{n}", "content": "x"}) for n in range(12)]
        results = await asyncio.gather(*[one for pair in zip(runs, writes, strict=True) for one in pair])
        await tools.execute("write_file", {"path": "new12", "content": "x"})

    assert {"0022\n"} == {str(result.data["stdout"]) for result in results[::2]}
    assert {0o600} == {stat.S_IMODE((root / f"new{n}").stat().st_mode) for n in range(13)}


# --- undo, hooks, definitions ---------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS1", "remote:WS8")
async def test_undo_of_a_remote_run_restores_the_remote_files(root: Path, tmp_path: Path) -> None:
    def handler(ctx: Any) -> Iterator[Any]:
        yield ToolCall("write_file", {"path": "new/b.txt", "content": "b"})
        yield ToolCall("str_replace", {"path": "a.txt", "replacements": [{"old_string": "one", "new_string": "two"}]})

    journal = FileJournal(tmp_path / "run.jsonl")
    with there(root, name="box") as place:
        async with Engine([AgentDefinition("a", tools=file_tools(place, write=True), handle_steps=handler)]) as engine:
            await engine.run("a", "go", journal=journal)
        assert "two\n" == (root / "a.txt").read_text()
        with pytest.raises(UndoRefused, match="outside of the given folders"):
            undo(journal, root)
        done = undo(journal, place)

    assert ("a.txt",) == done.restored
    assert "one\n" == (root / "a.txt").read_text()
    assert not (root / "new").exists()


@pytest.mark.deep
@pytest.mark.smoke
async def test_change_hooks_run_in_the_workspace(root: Path) -> None:
    with there(root) as place:
        hook = FileChangeHook("names", ["cat", "a.txt"], pattern="**/*.txt")
        result = await ToolRegistry(change_hook_tools(place, [hook])).execute(
            "run_file_change_hooks", {"files": ["a.txt"]}
        )

    assert "one\n" == result.data[0]["stdout"]  # type: ignore[index,call-overload]


@pytest.mark.spec("remote:WS3")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Workspace.from_command([]), "list of words"),
        (lambda: Workspace.from_command(["env"], limits={"cores": 1}), "cores"),
        (Workspace.docker, "needs either an image or container="),
        (lambda: Workspace.docker("a", container="b"), "needs either an image or container="),
        (lambda: Workspace.docker("--privileged"), "does not start with '-'"),
        (lambda: Workspace.docker("a", "relative"), "must be the absolute path of a folder in the workspace"),
        (lambda: Workspace.docker("a", mounts={"/tmp/a,readonly": "/x"}), "cannot be mounted"),
        (lambda: Workspace.ssh("-oProxyCommand=touch /tmp/x", "/x"), "cannot be passed to ssh"),
        (lambda: Workspace.kubernetes("pod", namespace="-x"), "cannot be passed to kubectl"),
        (lambda: Workspace.bubblewrap("/"), "folder other than /"),
        (lambda: Workspace.bubblewrap("/nowhere"), "cannot be opened as a folder: it does not exist"),
        (lambda: Workspace.parse("docker"), "is not a workspace"),
        (lambda: Workspace.parse("over:'x"), "cannot be parsed"),
    ],
    ids=itertools.count(),
)
def test_an_invalid_workspace_is_refused_when_it_is_defined(make: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        make()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["no-such-program-at-all"], "cannot be executed"),
        (["sh", "-c", "echo no such container >&2; exit 1"], "no such container"),
    ],
)
def test_an_unreachable_workspace_raises_a_typed_error_with_its_output(root: Path, argv: list[str], said: str) -> None:
    with pytest.raises(WorkspaceLost, match=said):
        file_tools(Workspace.from_command(argv, root))


@pytest.mark.spec("remote:WS8")
def test_local_only_options_are_refused_for_a_remote_workspace(root: Path) -> None:
    with there(root) as place:
        with pytest.raises(DefinitionError, match="sandbox="):
            shell_tools(place, sandbox=True)
        with pytest.raises(DefinitionError, match="cannot be opened as a folder"):
            file_tools(Workspace(root / "nothing", system=place.system))
        with pytest.raises(DefinitionError, match="is not a folder on this machine"):
            Path(place)


# --- words for containers -------------------------------------------------------------------------------------------


STAND_IN = """#!{python}
import json, os, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps([words, sorted(os.environ)]) + "\\n")
at = words.index("python3")
os.execv({python!r}, [{python!r}, *words[at + 1:]])
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS3")
@pytest.mark.parametrize("program", ["docker", "podman", "kubectl"])
async def test_container_workspaces_start_with_the_documented_command_lines(
    root: Path, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    With a stand-in, which writes down what it was given and starts the Python here.
    """
    log = tmp_path / "log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / program).write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    (tmp_path / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    ways = {
        "docker": [
            Workspace.docker("image:3", str(root), mounts={root: str(root)}),
            Workspace.docker(container="box", root=str(root)),
        ],
        "podman": [Workspace.podman("image:3", str(root), network="bridge", user="1:1", options=["--read-only"])],
        "kubectl": [Workspace.kubernetes("pod-1", str(root), container="c", namespace="n", context="x")],
    }
    for place in ways[program]:
        with place:
            result = await ToolRegistry(file_tools(place)).execute("read_files", {"paths": ["a.txt"]})
            assert "one\\n" in result.text, result.text
    given = [json.loads(line) for line in log.read_text().splitlines()]

    assert all("OPENAI_API_KEY" not in names for _, names in given)
    words = [" ".join(argv[: argv.index("python3")]) for argv, _ in given]
    limits = "--memory=4g --memory-swap=4g --cpus=2 --pids-limit=1024"
    start = "run --rm -i --init --network={} --security-opt=no-new-privileges " + limits
    expected = {
        "docker": [
            f"{start.format('none')} --mount=type=bind,source={root},target={root} image:3",
            f"exec -i -w {root} box",
        ],
        "podman": [f"{start.format('bridge')} --user=1:1 --read-only image:3"],
        "kubectl": ["exec -i --context=x --namespace=n --container=c pod-1 --"],
    }
    assert expected[program] == words


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:FS26")
@pytest.mark.parametrize(
    ("target", "is_link"), [("/", False), ("", True), ("/./x/../..", True), ("/home", False), ("/home/sub/", False)]
)
def test_a_home_folder_mount_is_wide_in_any_spelling(
    root: Path, tmp_path: Path, target: str, is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "log")))
    (tmp_path / "bin" / "docker").chmod(0o755)
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to(root)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "link" if is_link else root

    with Workspace.docker("image", str(folder), mounts={tmp_path / "home": f"{root}{target}"}) as place:
        with pytest.raises(DefinitionError, match="allow_wide_root"):
            file_tools(place)
        file_tools(place, allow_wide_root=True)
    mounts = {root: f"{root}{target}", tmp_path / "home": f"{root}s"}
    with Workspace.docker("image", str(folder), mounts=mounts) as place:
        file_tools(place)


@pytest.mark.spec("remote:WS4")
@pytest.mark.parametrize("keep", ["", "kept"])
def test_no_container_program_below_a_mount_is_executed(
    root: Path, tmp_path: Path, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A command in the container may have written it, and it would be executed on this machine.
    """
    for folder in (tmp_path / "bin", root / "bin"):
        folder.mkdir()
        (folder / "docker").write_text(f"#!/bin/sh\necho >>{folder.parent}/log\nexit 1\n")
        (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{root}/bin:{tmp_path}/bin:{os.environ['PATH']}")

    place = Workspace.docker("image", str(root), mounts={root: "/mounted"}, keep=keep)
    with pytest.raises(WorkspaceLost):
        file_tools(place)

    assert (tmp_path / "log").exists()
    assert not (root / "log").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS5")
async def test_an_ended_container_is_not_replaced_by_an_empty_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "log")))
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with Workspace.docker("image", str(root)) as place:
        tools = ToolRegistry(file_tools(place))
        assert place.system is not None
        line = place.system.ensure_connection()
        os.kill(worker_of(place), signal.SIGKILL)
        await until_async(lambda: line.is_lost)
        result = await tools.execute("read_files", {"paths": ["a.txt"]})

    assert result.is_error
    assert "its container ended with the connection" in result.text
