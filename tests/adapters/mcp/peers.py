"""
Programs of others that speak MCP: where they are found.

From npm they are looked for below ``MCP_NPM`` and the working folder; fastmcp by its command on ``PATH``, in whichever environment
that belongs to.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from pathlib import Path

import pytest


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
