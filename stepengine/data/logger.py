"""The logger protocol of handlers, tools and hooks (requirements O1, O4)."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ("RunLogger",)


class RunLogger(Protocol):
    """Four levels; *data* must be JSON when it is to be shown as an event."""

    def debug(self, message: str, /, **data: Any) -> None:
        """Log for developers."""

    def info(self, message: str, /, **data: Any) -> None:
        """Log for users who asked for detail."""

    def warning(self, message: str, /, **data: Any) -> None:
        """Log what somebody should look at."""

    def error(self, message: str, /, **data: Any) -> None:
        """Log what went wrong."""
