"""Attacks on a workspace in a sandbox, by what a model writes and by the programs that it runs: none reaches this machine."""

# ruff: noqa: ASYNC220

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import Workspace
from stepengine.errors import UnknownOutcome
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, search_tools, shell_tools
from stepengine.tools.bundled.shell import process
from stepengine.tools.bundled.shell.tools import FLOODED

from .places import why_not

SECRET = "the secret of this machine"
MIB = 1024 * 1024

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(bool(why_not("bubblewrap")), reason="needs bubblewrap and the right to use it"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "proj"
    (made / "sub").mkdir(parents=True)
    (made / "a.txt").write_text("inside\n")
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "beside").mkdir()
    return made


@pytest.fixture
def place(root: Path) -> Iterator[Workspace]:
    limits = {"memory_bytes": 2048 * MIB, "file_bytes": 64 * MIB, "cpu_seconds": 20}
    with Workspace.bubblewrap(root, limits=limits, tmp_bytes=16 * MIB) as made:
        yield made


def tools_of(place: Workspace) -> ToolRegistry:
    return ToolRegistry(
        [*file_tools(place, write=True, delete=True), *search_tools(place), *shell_tools(place, shell="bash")]
    )


async def say(tools: ToolRegistry, command: Any, seconds: float = 20) -> Any:
    result = await tools.execute("run_terminal_command", {"command": command, "timeout_seconds": seconds})
    return result.text


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)]


# --- by programs ------------------------------------------------------------------------------------------------------


READING = {
    "a path": "cat {secret}",
    "a link": "ln -s {secret} link; cat link",
    "the root of another process": "cat /proc/1/root{secret} /proc/*/root{secret}",
    "descriptors of other processes": "cat /proc/*/fd/*",
    "the environment": "env; cat /proc/*/environ",
}


@pytest.mark.spec("remote:WS7")
@pytest.mark.parametrize("way", READING)
async def test_no_sandboxed_program_reads_a_hidden_secret(
    way: str, place: Workspace, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    text = await say(tools_of(place), READING[way].format(secret=root.parent / "secret"))

    assert SECRET not in text
    assert SECRET == (root.parent / "secret").read_text()


WRITING = {
    "beside the root": "echo owned > {beside}/x; echo owned > ../beside/x",
    "through a link": "ln -s {beside} b; echo owned > b/x",
    "another process": "kill -9 -1; kill -9 1",
}


@pytest.mark.spec("remote:WS7")
@pytest.mark.parametrize("way", WRITING)
async def test_no_program_writes_outside_of_the_root(way: str, place: Workspace, root: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        with contextlib.suppress(UnknownOutcome):  # it kills what runs it, too: that is all there is in sight
            await say(tools_of(place), WRITING[way].format(beside=root.parent / "beside"))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()

    assert [] == list((root.parent / "beside").iterdir())
    assert (root / "a.txt").exists()
    assert "one more" in await say(tools_of(place), "echo one more")


TAKING = {
    "endless output": ("yes", FLOODED),
    "a full disk": (
        "dd if=/dev/zero of=/tmp/x bs=1M count=100; dd if=/dev/zero of=$TMPDIR/y bs=1M count=100",
        "No space left|File too large",
    ),
    "a huge file": ("dd if=/dev/zero of=big bs=1M count=200", "File too large|SIGXFSZ"),
    "memory": (python("x = bytearray(8 << 30)"), "MemoryError"),
    "the processor": (python("while True: pass"), "SIGXCPU|SIGKILL|took longer"),
    "what ignores signals": ("trap '' TERM INT HUP; while :; do sleep 1; done", "took longer"),
    "what leaves its session": ("setsid sleep 1000 & setsid -f sleep 1000; sleep 1000", "took longer"),
}


@pytest.mark.spec("remote:WS7", "remote:WS6")
@pytest.mark.parametrize("what", TAKING)
async def test_a_resource_exhausting_command_is_ended_and_tools_keep_working(
    what: str, place: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So much comes in time over a pipe of any machine.
    monkeypatch.setattr(process, "COMMAND_OUTPUT_BYTES", 8 * MIB)
    command, said = TAKING[what]
    tools = tools_of(place)
    # What is ended by something else than its time has enough of it to get there on any machine.
    text = await say(tools, command, seconds=4 if "took longer" in said else 35)

    assert any(one in text for one in said.split("|")), text[-1_000:]
    assert "works on" in await say(tools, ["echo", "works on"])
    assert "inside" in (await tools.execute("read_files", {"paths": ["a.txt"]})).text
    left = await say(tools, "ps -e -o args 2>/dev/null | grep -c '[s]leep 1000' || true")
    assert '"stdout":"0\\n"' in left


# --- by what a model writes -------------------------------------------------------------------------------------------


async def test_a_folder_swapped_for_a_link_is_never_followed(place: Workspace, root: Path) -> None:
    """
    What runs there swaps; what reads there never follows.
    """
    (root / "sub" / "x").write_text("inside")
    (root / "other").symlink_to(root.parent)
    (root.parent / "x").write_text(SECRET)
    tools = tools_of(place)
    swap = """
    import ctypes, os, time
    libc, end = ctypes.CDLL(None), time.time() + 4
    while time.time() < end:
        libc.renameat2(-100, b"sub", -100, b"other", 2)
    """
    swapping = asyncio.create_task(say(tools, python(swap), seconds=10))
    seen = set()
    while not swapping.done():
        seen.add((await tools.execute("read_files", {"paths": ["sub/x"]})).text)
        await tools.execute("write_file", {"path": "sub/made", "content": "owned"})
        seen.add((await tools.execute("code_search", {"pattern": "secret"})).text)
    await swapping

    assert SECRET not in "".join(seen)
    assert any("inside" in text for text in seen)
    assert not (root.parent / "made").exists()


@pytest.mark.spec("remote:WS7")
@pytest.mark.parametrize("way", ["loopback", "an abstract socket", "a socket in a file"])
async def test_no_program_talks_to_this_machine(way: str, place: Workspace, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET if way == "loopback" else socket.AF_UNIX) as server:
        server.settimeout(0.2)
        if way == "loopback":
            server.bind(("127.0.0.1", 0))
            reached = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        else:
            address = f"\\0stepengine-{os.getpid()}" if way == "an abstract socket" else str(tmp_path / "socket")
            server.bind(address.replace("\\0", "\0"))
            reached = f"socket.socket(socket.AF_UNIX).connect('{address}')"
        server.listen()
        said = await say(tools_of(place), python(f"import socket\n{reached}\nprint('it got through')"))
        with pytest.raises(TimeoutError):
            server.accept()

    assert '"stdout":"it got through' not in said
