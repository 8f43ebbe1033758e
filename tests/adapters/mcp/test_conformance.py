"""
The conformance suite of MCP, for ``mcp_tools`` as a client and for ``AgentServer`` as a server.

The tables name every scenario of the suite. One that does not apply is run, too: if it starts to pass, or the suite has another
one, the table is wrong and the test fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COUNTERPARTS = (
    (
        "npm:@modelcontextprotocol/conformance",
        "0.1.16",
        "works",
        "25 of 26 scenarios of a client, 10 of a server of agents",
    ),
)
HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("MCP_CONFORMANCE", "."), "node_modules").absolute()
NODE, SUITE = FOLDER / ".bin" / "node", FOLDER / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"

CLIENT: dict[str, str] = {
    **dict.fromkeys(("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry"), ""),
    **{f"auth/metadata-{name}": "" for name in ("default", "var1", "var2", "var3")},
    **{f"auth/token-endpoint-auth-{name}": "" for name in ("basic", "post", "none")},
    **{f"auth/scope-{name}": "" for name in ("from-www-authenticate", "from-scopes-supported", "omitted-when-undefined")},
    **{f"auth/{name}": "" for name in ("scope-step-up", "scope-retry-limit", "offline-access-scope", "offline-access-not-supported")},
    **{f"auth/{name}": "" for name in ("basic-cimd", "pre-registration", "resource-mismatch", "cross-app-access-complete-flow")},
    **{f"auth/client-credentials-{name}": "" for name in ("jwt", "basic")},
    "auth/2025-03-26-oauth-endpoint-fallback": "",
    "auth/2025-03-26-oauth-metadata-backcompat": (
        "its server names an issuer below its own address, which RFC 8414 forbids, and the package mcp refuses it"
    ),
}  # fmt: skip
"""Why a scenario does not apply; ``""`` for one that does."""

NO_TOOLS = "a tool is an agent, whose result is text and JSON; it has no media, and sends no requests but its questions"
NO_LISTS = "agents are offered as tools alone, and the server announces neither resources nor prompts"
SERVER: dict[str, str] = {
    **dict.fromkeys(("server-initialize", "ping", "tools-list", "tools-call-simple-text", "tools-call-error"), ""),
    **dict.fromkeys(("tools-call-with-progress", "tools-call-elicitation", "json-schema-2020-12"), ""),
    **dict.fromkeys(("server-sse-multiple-streams", "dns-rebinding-protection"), ""),
    **{f"tools-call-{name}": NO_TOOLS for name in ("image", "audio", "embedded-resource", "mixed-content", "sampling")},
    "elicitation-sep1034-defaults": "a question has one field, 'answer', and no default",
    "elicitation-sep1330-enums": "a question has one field, 'answer', whose options have no other titles",
    "logging-set-level": "the server announces no logging; what a run logs is in its journal",
    "tools-call-with-logging": "the server announces no logging; what a run logs is in its journal",
    "completion-complete": "the server announces no completions",
    "server-sse-polling": "the server keeps no events of a stream; a run is found again by its id in the result's metadata",
    **{f"resources-{name}": NO_LISTS for name in ("list", "read-text", "read-binary", "templates-read")},
    **{f"resources-{name}": NO_LISTS for name in ("subscribe", "unsubscribe")},
    **{f"prompts-{name}": NO_LISTS for name in ("list", "get-simple", "get-with-args")},
    **{f"prompts-get-{name}": NO_LISTS for name in ("embedded-resource", "with-image")},
}  # fmt: skip
"""Why a scenario does not apply; ``""`` for one that does."""

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(
        not (NODE.exists() and SUITE.exists()),
        reason="needs node and `npm install --no-save @modelcontextprotocol/conformance@0.1.16 node@22`, here or in MCP_CONFORMANCE=path/to/folder",
    ),
]


def run_suite(folder: Path, *arguments: str) -> tuple[int, str]:
    """
    Return the exit code of the suite, 0 if a scenario passed, and what it printed.
    """
    path = os.pathsep.join([str(NODE.parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(NODE), str(SUITE), *arguments], cwd=folder, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout


def find_problem(reason: str, code: int, said: str) -> str:
    """
    Return why the outcome of a scenario is not that of its table; ``""`` if it is.
    """
    if reason:
        return "" if code else f"it passes now, though it did not apply: {reason}"
    return said if code or re.search(r"[1-9]\d* (failed|warnings)", said) else ""


@contextmanager
def serving() -> Iterator[str]:
    """
    Start the server with its agents, and yield its URL.
    """
    command = [sys.executable, str(HERE / "conformance_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(timeout=30)


@pytest.mark.spec("interfaces:IF55")
def test_every_scenario_of_the_suite_is_in_a_table(tmp_path: Path) -> None:
    _, said = run_suite(tmp_path, "list")

    server, client = said.split("Client scenarios")
    assert sorted(SERVER) == sorted(re.findall(r"^ +- (\S+)", server, re.MULTILINE))
    assert sorted(CLIENT) == sorted(re.findall(r"^ +- (\S+)", client, re.MULTILINE))


@pytest.mark.parametrize("scenario", CLIENT)
@pytest.mark.spec("interfaces:IF55", "interfaces:IF64", "interfaces:IF137")
def test_a_client_scenario_has_the_outcome_of_its_table(scenario: str, tmp_path: Path) -> None:
    command = f"{sys.executable} {HERE / 'conformance_client.py'}"

    code, said = run_suite(tmp_path, "client", "--command", command, "--scenario", scenario)

    assert "" == find_problem(CLIENT[scenario], code, said)


@pytest.mark.spec("interfaces:IF66")
def test_the_server_scenarios_have_the_outcomes_of_their_table(tmp_path: Path) -> None:
    with serving() as url:
        outcomes = {one: run_suite(tmp_path, "server", "--url", url, "--scenario", one) for one in SERVER}

    problems = {one: find_problem(SERVER[one], *outcome) for one, outcome in outcomes.items()}
    assert {} == {one: problem for one, problem in problems.items() if problem}
