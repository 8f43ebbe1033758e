"""
Clients of editors from npm: the folder that has them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

NEEDS = (
    "needs node and `npm install --no-save acp1@npm:@agentclientprotocol/sdk@1.9.0 "
    "acp2@npm:@agentclientprotocol/sdk@2.4.0 acpx@0.1.15`, here or in ACP_SDK=path/to/folder"
)


def root_of(package: str) -> Path | None:
    """
    Return the folder that has *package* in its ``node_modules``, or ``None``.
    """
    roots = (Path(os.environ.get("ACP_SDK", ".")), Path())
    return next((root.resolve() for root in roots if (root / "node_modules" / package).is_dir()), None)


def needs(root: Path | None) -> pytest.MarkDecorator:
    """
    Return the mark of a module whose tests run what lies in *root*.
    """
    return pytest.mark.skipif(root is None or shutil.which("node") is None, reason=NEEDS)
