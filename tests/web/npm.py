"""
Programs of other projects from npm: a folder that has them, and conversations with a script of ours that runs them.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

PACKAGES = (
    "ai5@npm:ai@5", "ai6@npm:ai@6", "ai7@npm:ai@7", "react5@npm:@ai-sdk/react@2", "react6@npm:@ai-sdk/react@3",
    "react7@npm:@ai-sdk/react@4", "react@19", "@ag-ui/client@1",
)  # fmt: skip
"""What is installed, as npm is told it; ``.ci/deep`` and CONTRIBUTING name the same."""
NEEDS = f"needs node and `npm install --no-save {' '.join(PACKAGES)}`, here or in AI_SDK=path/to/folder"
SECONDS = 8


def folder_of_packages(temporary: Path) -> Path:
    """
    Return a folder whose ``node_modules`` has them: that of AI_SDK, this one, or one below *temporary* that npm fills once.
    """
    if shutil.which("node") is None:
        pytest.skip(NEEDS)
    for root in (os.environ.get("AI_SDK"), "."):
        if root and all((Path(root) / "node_modules" / _name(each)).is_dir() for each in PACKAGES):
            return Path(root).resolve()
    if shutil.which("npm") is None:
        pytest.skip(NEEDS)
    folder = temporary / "npm"
    folder.mkdir(exist_ok=True)
    with (temporary / "npm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            _install(folder)
    return folder


def _name(package: str) -> str:
    return package[: package.index("@", 1)]


def _install(folder: Path) -> None:
    options = ["--silent", "--no-audit", "--no-fund", "--no-save", "--prefix", str(folder)]
    done = subprocess.run(
        ["npm", "install", *options, *PACKAGES], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        pytest.skip(f"{NEEDS}; npm said {done.stderr.strip()[-300:]!r}")
    (folder / ".complete").touch()


class Script:
    """
    A script that runs under node: it is told one line of JSON, and answers one.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def __call__(self, do: str, **more: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        async with asyncio.timeout(SECONDS):
            line = await self._process.stdout.readline()
        assert line, f"the script ended at {do!r}"
        told = json.loads(line)
        assert "failed" not in told, told["failed"]
        return told


@asynccontextmanager
async def running(name: str, root: Path, **about: Any) -> AsyncIterator[Script]:
    """
    Run the script of that name, which imports its packages from *root*, and tell it what it is *about* first.
    """
    command = ["node", str(Path(__file__).with_name(name))]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
    try:
        script = Script(process)
        await script("begin", root=str(root), **about)
        yield script
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
