"""
Records the tests of ``examples/unchanged_programs``: ``python -m cassettes.record_unchanged [FOLDER]``.

The tests run in a process of their own, as a user runs them, with a key in the environment that is none. What they send to a
provider goes to a server on this machine, which speaks the protocols of the providers and calls ``find_order`` once. This is done
below the cassettes, so that they hold the providers' own addresses: some frameworks send more to those than to others.

Programs whose framework is not installed are skipped, and their cassettes stay as they are.
"""

# ruff: noqa: T201 - a script that prints what it wrote

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs

from cassettes.local_server import Answer, save_cassette, serve, source_of
from cassettes.record_wires import FOUR, Said
from stepengine.testing import Cassette

HERE = Path(__file__).resolve().parent
UNCHANGED = HERE / "unchanged_programs"
PROGRAMS = HERE.parent / "examples" / "unchanged_programs"
PATHS = {
    "/v1/chat/completions": "openai_chat",
    "/v1/responses": "openai",
    "/v1/messages": "anthropic",
    "/v1/models/": "google",
}
"""The wire by the start of a path."""
HOSTS = ("api.openai.com", "api.anthropic.com", "generativelanguage.googleapis.com")
REDIRECTION = """
import importlib.util

HOSTS, PORT = {hosts!r}, {port}

class Redirected:
    # A connection to the local server that passes for one to a provider.

    def __init__(self, module, connection, origin):
        self.module, self.connection, self.origin = module, connection, origin

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def can_handle_request(self, origin):
        return origin == self.origin

    def moved(self, request):
        there = self.module.URL(scheme=b"http", host=b"127.0.0.1", port=PORT, target=request.url.target)
        return self.module.Request(
            request.method, there, headers=request.headers, content=request.stream, extensions=request.extensions
        )

    def handle_request(self, request):
        return self.connection.handle_request(self.moved(request))

    async def handle_async_request(self, request):
        return await self.connection.handle_async_request(self.moved(request))

def redirect(module, pool):
    create = pool.create_connection

    def create_connection(self, origin):
        if origin.host.decode() not in HOSTS:
            raise RuntimeError(f"the recording is made without a network, and a program asks for {{origin}}")
        return Redirected(module, create(self, module.Origin(b"http", b"127.0.0.1", PORT)), origin)

    pool.create_connection = create_connection

for library in ("httpcore2", "httpcore"):
    if importlib.util.find_spec(library):
        module = importlib.import_module(library)
        redirect(module, module.ConnectionPool)
        redirect(module, module.AsyncConnectionPool)
"""
"""A ``conftest.py``: the connections of both libraries lead to the local server."""
SECONDS = 300


WIRES = {wire.name: wire for wire in FOUR}
CALL = Said(calls=({"number": 17},), tool="find_order")
ANSWER = Said("Order 17 was shipped on Tuesday.")


def answer(path: str, body: bytes) -> Answer:
    """Call the tool, or answer a request that holds its result; in a stream if the request asks for one."""
    wire = WIRES[next(name for start, name in PATHS.items() if path.startswith(start))]
    said = ANSWER if b"shipped" in body else CALL
    streamed = b'"stream":true' in body.replace(b" ", b"") or "streamGenerateContent" in path
    return attrs.evolve(wire.answer(None, said, stream=streamed), headers={})


def run_tests(folder: Path) -> None:
    """
    Run the tests of the programs in *folder* and record them.

    Raises:
        SystemExit: if a test fails.
    """
    variables = {
        **{f"{name}_API_KEY": "local" for name in ("OPENAI", "ANTHROPIC", "GEMINI")},
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # it would report to its maker
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    unfit = ("CI",)
    kept = {
        n: v for n, v in os.environ.items() if n not in unfit and not n.startswith("PYTEST_") and "_BASE_URL" not in n
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--stepengine-record=rewrite", "."],
        cwd=folder, env={**kept, **variables}, capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def record(folder: Path) -> list[Path]:
    """Run the tests of all programs in a copy, and return the cassettes written into *folder*."""
    written = []
    with tempfile.TemporaryDirectory() as scratch, serve(answer) as port:
        copy = Path(scratch)
        for file in PROGRAMS.glob("*.py"):
            shutil.copy(file, copy)
        (copy / "pytest.ini").write_text("[pytest]\n")
        (copy / "conftest.py").write_text(REDIRECTION.format(hosts=HOSTS, port=port))
        run_tests(copy)
        for file in sorted((copy / "cassettes").rglob("*.yaml")):
            target = folder / file.relative_to(copy / "cassettes")
            target.parent.mkdir(parents=True, exist_ok=True)
            recorded = Cassette.load(file).interactions
            written.append(save_cassette(recorded, source_of("record_unchanged"), target))
    return written


if __name__ == "__main__":
    for cassette in record(Path(sys.argv[1]) if sys.argv[1:] else UNCHANGED):
        print(f"recorded {cassette}")
