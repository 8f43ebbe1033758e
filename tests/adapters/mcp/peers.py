"""
Programs of others that speak MCP: where they are found, and in which versions they are named as supported.

From npm they are looked for below ``MCP_NPM`` and the working folder; fastmcp by its command on ``PATH``, in whichever environment
that belongs to.
"""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest

NPM = {
    "@modelcontextprotocol/sdk": "1.32.2",
    "@modelcontextprotocol/client": "2.4.0",
    "@modelcontextprotocol/server": "2.4.0",
    "@modelcontextprotocol/inspector": "2.12.0",
    "@modelcontextprotocol/server-everything": "2026.8.31",
    "@modelcontextprotocol/server-filesystem": "2026.8.31",
    "@modelcontextprotocol/server-memory": "2026.8.31",
    "@modelcontextprotocol/server-sequential-thinking": "2026.8.31",
}
"""Packages of npm, in the versions that `.ci/deep` installs."""
FASTMCP = "4.1.2"


@cache
def npm_folder() -> Path | None:
    """
    Return the folder whose `node_modules` holds the packages.
    """
    roots = (Path(os.environ.get("MCP_NPM", ".")), Path())
    has = (root for root in roots if (root / "node_modules" / "@modelcontextprotocol" / "sdk").is_dir())
    return next(has, None) if shutil.which("node") else None


def command(name: str) -> str:
    """
    Return where a command of an npm package stands.
    """
    folder = npm_folder()
    assert folder is not None
    return str((folder / "node_modules" / ".bin" / name).absolute())


def installed(package: str) -> str:
    """
    Return the version of an npm package that is there; ``""`` for none.
    """
    folder = npm_folder()
    file = None if folder is None else folder / "node_modules" / package / "package.json"
    return str(json.loads(file.read_text())["version"]) if file is not None and file.is_file() else ""


def fastmcp_python() -> str:
    """
    Return the Python that has fastmcp.
    """
    found = shutil.which("fastmcp")
    assert found is not None
    return str(Path(found).resolve().with_name("python"))


needs_npm = pytest.mark.skipif(
    npm_folder() is None,
    reason="needs node and `npm install --no-save @modelcontextprotocol/sdk@1 ...`, here or in MCP_NPM=path/to/folder",
)
needs_fastmcp = pytest.mark.skipif(
    shutil.which("fastmcp") is None, reason="needs the command fastmcp on PATH, from an environment of its own"
)
