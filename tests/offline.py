"""
Scripts run as their users run them, in a process without network, without keys and in an empty folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests import forked_processes

__all__ = ("LOOPBACK_ONLY", "NO_NETWORK", "ROOT", "ran")

ROOT = Path(__file__).resolve().parents[1]
# Put before everything else that an interpreter imports: no socket of the internet can be connected, and no name is looked up.
NO_NETWORK = """
import socket

def refused(self, address, *_):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        raise RuntimeError(f"no network here: {address}")
    return connect(self, address)

connect = socket.socket.connect
socket.socket.connect = socket.socket.connect_ex = refused
socket.getaddrinfo = lambda *a, **k: refused(socket.socket(), a)
"""

LOOPBACK_ONLY = """
import socket

def refused(self, address, *_):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] != "127.0.0.1":
        raise RuntimeError(f"no network here: {address}")
    return connect(self, address)

def find(host, *rest, **options):
    return find_all(host, *rest, **options) if host == "127.0.0.1" else refused(socket.socket(), (host, *rest))

connect, find_all = socket.socket.connect, socket.getaddrinfo
socket.socket.connect = socket.socket.connect_ex = refused
socket.getaddrinfo = find
"""


def ran(
    script: Path, folder: Path, *options: str, typed: str = "", seconds: float = 50, network: str = NO_NETWORK
) -> str:
    """
    Return what a script prints that ends well and says nothing on stderr.
    """
    (folder / "sitecustomize.py").write_text(network)
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL"))}
    done = forked_processes.run(
        [sys.executable, script, *options],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "PYTHONWARNINGS": "error"},
        cwd=folder, capture_output=True, text=True, check=False, timeout=seconds, input=typed,
    )  # fmt: skip

    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout
