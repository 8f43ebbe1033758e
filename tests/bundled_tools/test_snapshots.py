"""Snapshots of folders: a copy to try something in, from which a run is forked."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from stepengine import Workspace
from stepengine.errors import DefinitionError, WorkspaceLost
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import file_tools, shell_tools
from stepengine.tools.bundled.bundled import workspace_tools


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    (made / "sub").mkdir(parents=True)
    (made / "sub" / "a.sh").write_text("one\n")
    (made / "sub" / "a.sh").chmod(0o751)
    (made / "link").symlink_to("../outside")
    (made / "gone").symlink_to("nowhere")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    return made


@pytest.mark.spec("remote:WS10")
async def test_a_folder_snapshot_is_an_independent_copy_with_its_links(project: Path, tmp_path: Path) -> None:
    os.mkfifo(project / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(project / "socket"))
    snapshot = Workspace(project, project / "sub").snapshot(tmp_path / "copies" / "one")
    await ToolRegistry(file_tools(snapshot, write=True)).execute("write_file", {"path": "sub/a.sh", "content": "two\n"})

    copy = tmp_path / "copies" / "one"
    assert (copy, copy / "sub") == (snapshot.root, snapshot.cwd)
    assert ("one\n", "two\n") == ((project / "sub" / "a.sh").read_text(), (copy / "sub" / "a.sh").read_text())
    assert (0o751, "../outside", "nowhere") == (
        (copy / "sub" / "a.sh").stat().st_mode & 0o777, str((copy / "link").readlink()), str((copy / "gone").readlink()),
    )  # fmt: skip
    assert ["gone", "link", "sub"] == sorted(one.name for one in copy.iterdir())
    assert snapshot.snapshot(tmp_path / "copies" / "two").root == tmp_path / "copies" / "two"
    snapshot.discard()
    assert copy.exists()


@pytest.mark.spec("remote:WS10")
@pytest.mark.parametrize("make", [Workspace, Workspace.bubblewrap])
async def test_a_snapshot_keeps_permissions_trusted_files_and_working_directory(
    make: Callable[[Path], Workspace], project: Path, tmp_path: Path
) -> None:
    place = attrs.evolve(
        make(project), cwd=project / "sub", write=True, shell="bash", web="http://localhost:1", trusted=("sub/**",)
    )
    snapshot = place.snapshot(tmp_path / "copy")

    assert attrs.evolve(place, root=snapshot.root, cwd=snapshot.root / "sub", system=snapshot.system) == snapshot
    local = attrs.evolve(snapshot, system=None, shell=False)
    refused = await ToolRegistry(workspace_tools(local)).execute("write_file", {"path": "sub/a.sh", "content": "x"})
    assert refused.is_error
    assert "what it holds is trusted" in refused.text


@pytest.mark.spec("remote:WS10")
def test_snapshot_refuses_existing_targets_and_unsupported_workspaces(project: Path, tmp_path: Path) -> None:
    for to, error, words in (
        (tmp_path / "outside", DefinitionError, "already exists; use a new folder for the snapshot"),
        (project / "sub" / "copy", DefinitionError, "is inside the folder to copy"),
        (tmp_path / "outside" / "secret" / "x", WorkspaceLost, "cannot be created"),
    ):
        with pytest.raises(error, match=words):
            Workspace(project).snapshot(to)
    with pytest.raises(DefinitionError, match="cannot make snapshots"):
        Workspace.from_command(["env"], project).snapshot(tmp_path / "x")
    with pytest.raises(DefinitionError, match="cannot make snapshots"):
        Workspace.ssh("host", "/x").snapshot(tmp_path / "x")
    for there, root in (("/srv/", "/srv"), ("/srv", "/srv/app"), ("/srv/./app", "/srv/x/../app/sub/")):
        with pytest.raises(DefinitionError, match="and a root outside of mounts"):
            Workspace.docker("image", root, mounts={project: there}, keep="kept").snapshot("shop:before")
    assert not (tmp_path / "x").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.spec("remote:WS10")
async def test_a_snapshot_of_a_sandbox_is_a_sandbox(project: Path, tmp_path: Path) -> None:
    with Workspace.bubblewrap(project).snapshot(tmp_path / "copy") as place:
        result = await ToolRegistry(shell_tools(place)).execute(
            "run_terminal_command", {"command": ["ls", str(project)]}
        )
        seen = await ToolRegistry(shell_tools(place)).execute("run_terminal_command", {"command": ["cat", "sub/a.sh"]})

    assert "one\n" == seen.data["stdout"]
    assert result.data["exit_code"] > 0
