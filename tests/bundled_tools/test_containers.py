"""Containers by the real Podman and Docker, of an image that is made here: what is promised of them, what is kept, and attacks on them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, Workspace
from stepengine.data.yields import ToolCall
from stepengine.errors import DefinitionError, UnknownOutcome, WorkspaceLost
from stepengine.journal import FileJournal
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, shell_tools

from .podman import NAME, Podman, docker, podman, ran

SECRET = "the secret of this machine"
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module", params=["podman", "docker"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Podman:
    found = docker() if request.param == "docker" else podman(tmp_path_factory.mktemp("podman"))
    if found.why:
        pytest.skip(found.why)
    return found


Make = Callable[..., Workspace]


@pytest.fixture
def make(program: Podman) -> Iterator[Make]:
    """
    Give what makes workspaces of the image, which are thrown away with the test.
    """
    made: list[Workspace] = []
    images: list[str] = []

    def of(image: str = NAME, root: Any = "/workspace", **options: Any) -> Workspace:
        if image != NAME:
            images.append(image)
        given = {"memory": "512m", "cpus": 1.0, "processes": 64, **options}
        made.append(Workspace.docker(image, root, program=program.program, options=program.options, **given))
        return made[-1]

    yield of
    for place in made:
        place.discard()
    for image in images:
        ran(program.program, "rmi", "--force", image)


def tools_of(place: Workspace) -> ToolRegistry:
    return ToolRegistry([*file_tools(place, write=True), *shell_tools(place, timeout=60)])


async def did(place: Workspace, *command: str) -> Any:
    result = await tools_of(place).execute("run_terminal_command", {"command": list(command)})
    assert not result.is_error, result.text
    return result.data


def named() -> str:
    return f"stepengine-test-{os.getpid()}-{next(NUMBERS)}"


pytestmark = [pytest.mark.deep]


@pytest.mark.spec("remote:WS1", "remote:WS2")
async def test_tools_work_in_a_container_in_a_new_folder(make: Make) -> None:
    with make(root="/made/for/this") as place:
        tools = tools_of(place)
        await tools.execute("write_file", {"path": "sub/a.txt", "content": "one\n"})
        code = "import os; print(os.getcwd(), os.listdir())"
        assert "/made/for/this ['sub']\n" == (await did(place, "/usr/bin/python3", "-c", code))["stdout"]
        read = await tools.execute("read_files", {"paths": ["sub/a.txt", "../../../etc/passwd"]})

    assert ("one\\n" in read.text, "root:x" in read.text) == (True, False)


@pytest.mark.spec("remote:WS4", "remote:WS7")
async def test_a_container_sees_no_host_data_and_has_no_network(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "project").mkdir()
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    code = (
        "import os, socket, glob\n"
        f"print(os.path.exists({str(tmp_path / 'secret')!r}), len(glob.glob('/proc/[0-9]*')) < 10)\n"
        f"print({SECRET!r} in str(dict(os.environ)), any({SECRET!r}.encode() in open(p, 'rb').read() for p in glob.glob('/proc/*/environ')))\n"
        "s = socket.socket(); s.settimeout(2)\n"
        "try: s.connect(('192.0.2.1', 80)); print('reached')\n"
        "except OSError: print('alone')\n"
    )
    with make(mounts={tmp_path / "project": "/workspace"}) as place:
        seen = (await did(place, "/usr/bin/python3", "-c", code))["stdout"]
        await tools_of(place).execute("write_file", {"path": "a.txt", "content": "from there\n"})

    assert "False True\nFalse False\nalone\n" == seen
    assert "from there\n" == (tmp_path / "project" / "a.txt").read_text()


ATTACKS = {
    "a fork bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: raise SystemExit('no more processes')",
    "killing all": "import os\nos.kill(-1, 9)",
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.spec("remote:WS6")
async def test_exhausting_a_container_leaves_the_host_unharmed(make: Make, name: str) -> None:
    command = ["/usr/bin/python3", "-c", ATTACKS[name]]
    with make(processes=32, memory="256m") as place:
        try:
            result = await tools_of(place).execute("run_terminal_command", {"command": command, "timeout_seconds": 5})
            said = result.text
            assert result.is_error or result.data["exit_code"] != 0, said
        except UnknownOutcome as error:  # the container is lost with all that was in it, and says so
            said = str(error)
    assert len(said) < 200_000

    with make() as place:
        assert 0 == (await did(place, "/usr/bin/echo", "fine"))["exit_code"]


@pytest.mark.spec("remote:WS9")
async def test_a_kept_container_is_reused_until_it_is_discarded(make: Make, program: Podman) -> None:
    name = named()
    with make(keep=name) as place:
        await tools_of(place).execute("write_file", {"path": "a.txt", "content": "kept\n"})
    ran(program.program, "stop", "--time=0", name)  # as the machine does that is started anew
    with make(keep=name) as place:
        assert "kept\n" == (await did(place, "/usr/bin/cat", "a.txt"))["stdout"]

    with pytest.raises(WorkspaceLost, match="created from another image or with other options"):
        tools_of(make(keep=name, network="host"))
    place.discard()
    with make(keep=name) as place:
        assert 0 != (await did(place, "/usr/bin/cat", "a.txt"))["exit_code"]


@pytest.mark.spec("remote:WS9")
async def test_a_container_of_others_is_neither_used_nor_removed(make: Make, program: Podman) -> None:
    name = named()
    ran(
        program.program,
        "run",
        "-d",
        f"--name={name}",
        "--network=none",
        *program.options,
        NAME,
        "/usr/bin/sleep",
        "600",
    )
    try:
        with pytest.raises(WorkspaceLost, match="pass another name as keep="):
            tools_of(make(keep=name))
        with pytest.raises(WorkspaceLost, match="created from another image"):
            make(keep=name).discard()
        Workspace.docker(container=name, program=program.program).discard()
        assert b"true\n" == ran(program.program, "container", "inspect", "--format={{.State.Running}}", name).stdout
    finally:
        ran(program.program, "rm", "--force", name)
    # The fixture would try to throw it away, too, which is not there any more.


@pytest.mark.spec("remote:WS10")
async def test_a_run_is_forked_from_the_snapshot_of_a_container(make: Make, tmp_path: Path) -> None:
    image, journal = f"localhost/{named()}:1", tmp_path / "run.jsonl"

    def handler(ctx: Any) -> Any:
        yield ToolCall("write_file", {"path": "a.txt", "content": "one\n"})
        read = yield ToolCall("read_files", {"paths": ["a.txt", "b.txt"]})
        return str(read.tool_result.data)

    agent = AgentDefinition("writer", tools=["write_file", "read_files"], handle_steps=handler)
    place = make(keep=named())
    with place:
        first = await Engine([agent], file_tools(place, write=True), workspace=place).run(
            "writer", journal=FileJournal(journal)
        )
        snapshot = await asyncio.to_thread(place.snapshot, image)
        await tools_of(place).execute("write_file", {"path": "b.txt", "content": "later\n"})
    with snapshot:
        engine = Engine([agent], file_tools(snapshot, write=True), workspace=snapshot)
        forked = await engine.fork(journal, at=0, into=FileJournal(tmp_path / "fork.jsonl"), allow_repeat=True)
        assert ("one\\n" in forked.unwrap(), "later" in forked.unwrap()) == (True, False), forked.unwrap()
        assert first.unwrap() == forked.unwrap()
    make(image)  # which the fixture removes then


@pytest.mark.spec("remote:WS10")
async def test_a_container_without_snapshots_refuses_one(make: Make, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    for place in (make(), make(keep=named(), mounts={tmp_path / "project": "/workspace"})):
        with pytest.raises(DefinitionError, match="cannot make snapshots"):
            place.snapshot("localhost/x:1")
    with pytest.raises(DefinitionError, match="cannot be passed to"):
        make(keep=named()).snapshot("--all")


@pytest.mark.spec("reliability:FS26", "remote:WS1")
def test_mounting_the_home_folder_as_root_needs_allow_wide_root(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    with make(mounts={tmp_path: "/workspace"}) as place:
        with pytest.raises(DefinitionError, match="allow_wide_root"):
            file_tools(place)
        file_tools(place, allow_wide_root=True)
    with make(mounts={tmp_path / "project": "/workspace"}) as place:
        file_tools(place)
