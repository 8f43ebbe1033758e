"""What a server says of its own accord: lines of its log, lists and resources that changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.adapters.mcp._caps import LOG_CHARS, LOG_LINES
from stepengine.data.json import JsonValue, compact, freeze
from stepengine.data.visible import cut_middle, visible
from stepengine.errors import DataError
from stepengine.runtime.logs import LOGGER

LogLevel: TypeAlias = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "notice": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "alert": logging.CRITICAL,
    "emergency": logging.CRITICAL,
}
"""The level of Python's ``logging`` for each level of the protocol."""


@frozen(kw_only=True)
class Notice:
    """
    A notification from a server.

    Attributes:
        server: The name that ``mcp_tools`` gave it.
        kind: ``"log"`` for a line of its log; ``"resource"`` for one that was subscribed to and changed; ``"tools"``,
            ``"prompts"`` or ``"resources"`` for a list that is another one by now.
        uri: The address of the resource that changed.
        level: The level of the line, as the protocol has it, such as ``"warning"``.
        logger: Which part of the server wrote the line, if it says so.
        data: The line: a text, or any other JSON.
    """

    server: str
    kind: Literal["log", "tools", "prompts", "resources", "resource"]
    uri: str = ""
    level: str = ""
    logger: str = ""
    data: JsonValue = attrs.field(default=None, converter=freeze)


class Notices:
    """
    Receives the notifications of one server, and passes them to the application and the log.

    Args:
        server: Its name.
        log_level: From which level on lines are logged; ``None`` logs none.
        on_notice: Called with each notice, in the event loop of the connection.
        on_tools: Called when the list of tools changed.
    """

    def __init__(
        self,
        server: str,
        *,
        log_level: LogLevel | None,
        on_notice: Callable[[Notice], object] | None,
        on_tools: Callable[[], None],
    ) -> None:
        self._server = server
        self._level = log_level
        self._on_notice = on_notice
        self._on_tools = on_tools
        self._logged = 0

    @property
    def wants_logs(self) -> bool:
        """Whether the application or the log receives log lines of the server."""
        return self._level is not None or self._on_notice is not None

    async def forward_log_line(self, params: Any) -> None:
        """Pass a log line to the application; log it if its level is high enough, up to ``LOG_LINES`` lines."""
        try:
            line = Notice(
                server=self._server,
                kind="log",
                level=str(params.level),
                logger=str(params.logger or ""),
                data=params.data,
            )
        except DataError:
            return
        self._notify_application(line)
        if self._level is not None and LEVELS.get(line.level, logging.INFO) >= LEVELS[self._level]:
            self._log_line(line)

    def _log_line(self, line: Notice) -> None:
        """Log a line of the server without hidden characters; drop all lines above the limit."""
        self._logged += 1
        if self._logged > LOG_LINES:
            return
        level = LEVELS.get(line.level, logging.INFO)
        text = line.data if isinstance(line.data, str) else compact(line.data)
        # No text of a server makes a line of its own, or steers a terminal (reliability:UI09).
        shown = visible(cut_middle(text, LOG_CHARS), strict=True)
        who = f" ({visible(cut_middle(line.logger, LOG_CHARS), strict=True)})" if line.logger else ""
        LOGGER.log(level, "the MCP server %r%s logged: %s", self._server, who, shown)
        if self._logged == LOG_LINES:
            LOGGER.warning("the MCP server %r has logged %d lines; later lines are dropped", self._server, LOG_LINES)

    async def forward_notification(self, message: Any) -> None:
        """Pass a notification about changed tools, prompts or resources to the application; call *on_tools* for tools."""
        method = getattr(message, "method", "")
        if method == "notifications/tools/list_changed":
            self._on_tools()
            self._notify_application(Notice(server=self._server, kind="tools"))
        elif method == "notifications/prompts/list_changed":
            self._notify_application(Notice(server=self._server, kind="prompts"))
        elif method == "notifications/resources/list_changed":
            self._notify_application(Notice(server=self._server, kind="resources"))
        elif method == "notifications/resources/updated":
            self._notify_application(Notice(server=self._server, kind="resource", uri=str(message.params.uri)))

    def _notify_application(self, notice: Notice) -> None:
        """Call the function of the application with a notice; an error in it is logged."""
        if self._on_notice is None:
            return
        try:
            self._on_notice(notice)
        except Exception:  # noqa: BLE001  (the caller's own code; the connection is not its victim)
            LOGGER.exception(
                "on_notice= of the MCP server %r raised an exception; the connection stays open", self._server
            )
