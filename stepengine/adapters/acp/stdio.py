"""
Serving an editor over the stdin and stdout of a process, and lines that the protocol's package cannot read.

What must not be here: sessions and runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from stepengine.adapters.acp.agent import EditorAgent
from stepengine.adapters.acp.servers import McpMaker
from stepengine.adapters.acp.session_engines import MakeEngine
from stepengine.errors import DefinitionError

KNOWN_PROMPTS = 1_000
OUR_OWN = {"session/delete": "_session/delete"}
"""Methods of the protocol that its package does not route, under the names by which it gives an agent any others."""
NO_MESSAGE = (
    b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"a line is one message: a JSON object with a method, or with the '
    b'id of a request that it answers"}}\n'
)


def redirect_stdout() -> BinaryIO:
    """
    Return a writer to the original stdout, and redirect all other output, also of child processes, to stderr.

    To be called before an agent's file is imported, which may print.
    """
    out = os.fdopen(os.dup(1), "wb")
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return out


async def serve(
    make: MakeEngine,
    agent: str,
    folder: Path,
    *,
    out: BinaryIO | None = None,
    mcp: McpMaker | None = None,
    modes: Sequence[str] = (),
    models: Sequence[str] = (),
) -> None:
    """
    Serve an editor over stdin and stdout until it disconnects.

    Args:
        make: Makes the engine of a session.
        agent: The id of the agent.
        folder: Where sessions are kept.
        out: What ``redirect_stdout`` returned, where that was called already.
        mcp: Makes a source of tools of an MCP server that the editor names: ``stepengine.adapters.mcp.mcp_tools``. Without it they are not
            started.
        modes: The modes of a policy that can be chosen, the first one by default; *make* takes ``mode`` then.
        models: The models that can be chosen, likewise, ``""`` for those that the agents name; *make* takes ``model`` then.

    Raises:
        DefinitionError: If ``agent-client-protocol`` is not installed, stdin is not a pipe, or a choice cannot be offered.
    """
    try:
        import acp
        from acp.core import DEFAULT_STDIO_BUFFER_LIMIT_BYTES as LIMIT
    except ImportError:
        msg = "editors need the package agent-client-protocol: pip install 'stepengine[acp]'"
        raise DefinitionError(msg) from None
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        msg = "stdin is not a pipe: let an editor start this command, which communicates with it over stdin and stdout"
        raise DefinitionError(msg)
    editor: Any = EditorAgent(make, agent, folder, mcp=mcp, modes=modes, models=models)
    editor.deletes = True
    loop = asyncio.get_running_loop()
    reader = _MessageReader(limit=LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, out or redirect_stdout())
    reader.answers = writer = asyncio.StreamWriter(transport, protocol, None, loop)
    try:
        await acp.run_agent(editor, writer, reader, use_unstable_protocol=True)
    finally:
        await editor.aclose()


class _MessageReader(asyncio.StreamReader):
    """
    Reads the messages of an editor for the protocol's package.

    The package would end the connection at a line that is not a message, cannot cancel a request, and does not route some methods.

    Attributes:
        answers: Where lines are answered that are no messages.
    """

    answers: asyncio.StreamWriter
    _is_part = False

    def __init__(self, limit: int) -> None:
        super().__init__(limit=limit)
        self._prompts: OrderedDict[object, object] = OrderedDict()

    async def readexactly(self, n: int) -> bytes:
        """Return *n* bytes of a line that exceeds the buffer."""
        self._is_part = True
        return await super().readexactly(n)

    async def readuntil(self, separator: Any = b"\n") -> bytes:
        """Return the next line with a message, or the rest of a message that was partly read."""
        while True:
            line = await super().readuntil(separator)
            if self._is_part or not line.strip():
                self._is_part = False
                return line
            message = parse_message(line)
            if message is None:
                self.answers.write(NO_MESSAGE)
            elif line := self._make_routable_line(message, line):
                return line

    def _make_routable_line(self, message: dict[str, Any], line: bytes) -> bytes:
        """Return the line of a message in a form for the package; empty bytes for a message without an action."""
        method, params = message.get("method"), message.get("params")
        if method == "session/prompt" and isinstance(params, dict):
            self._prompts[message.get("id")] = params.get("sessionId")
            while len(self._prompts) > KNOWN_PROMPTS:
                self._prompts.popitem(last=False)
        if method in OUR_OWN:
            return json.dumps({**message, "method": OUR_OWN[method]}).encode() + b"\n"
        if not (isinstance(method, str) and method.startswith("$/")) or "id" in message:
            return line
        # A request that is given up: of a prompt that is what `session/cancel` does, any other is answered at once anyhow.
        given_up = params.get("requestId") if isinstance(params, dict) and method == "$/cancel_request" else None
        session = self._prompts.get(given_up) if isinstance(given_up, int | str) else None
        if session is None:
            return b""
        cancel = {"jsonrpc": "2.0", "method": "session/cancel", "params": {"sessionId": session}}
        return json.dumps(cancel).encode() + b"\n"


def parse_message(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON-RPC message; return ``None`` if the line is not a message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    has_id = isinstance(message.get("id"), int | str | None)
    is_one = has_id and (isinstance(message["method"], str) if "method" in message else "id" in message)
    return message if is_one else None
