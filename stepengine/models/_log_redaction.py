"""
Redact keys in log records, by a filter on the loggers of the SDKs, of the HTTP libraries and of this package.

With settings like ``ANTHROPIC_LOG=debug`` the SDKs log requests with their headers, replies that echo them, and errors.
"""

from __future__ import annotations

import logging
import traceback

from stepengine.redaction import ANY

LOGGERS = (
    "anthropic", "asyncio", "google", "google_genai", "httpcore", "httpcore2", "httpx", "httpx2", "openai", "stepengine",
)  # fmt: skip
PARTS = ("connection", "http11", "http2", "proxy", "socks")
# Loggers of modules that are imported at the first connection of their kind.
LATE = tuple([f"{library}.{part}" for library in ("httpcore", "httpcore2") for part in PARTS])
PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


def redact_record(record: logging.LogRecord) -> bool:
    """Redact secrets in message, arguments, traceback and extras of *record* in place; return True, so that it is logged."""
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 - its arguments do not match; logging would print them unredacted
        record.msg, record.args = _remove_secrets(f"{record.msg} {record.args!r}"), ()
    else:
        clean = _remove_secrets(message)
        if clean != message or _remove_secrets(repr(record.args)) != repr(record.args):
            record.msg, record.args = clean, ()
    if record.exc_info and record.exc_info[0] is not None:
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if (clean := _remove_secrets(trace)) != trace:
            record.exc_info, record.exc_text = None, clean
    for name in record.__dict__.keys() - PLAIN:
        shown = record.__dict__[name]
        text = shown if isinstance(shown, str) else repr(shown)
        if (clean := _remove_secrets(text)) != text:
            record.__dict__[name] = clean
    return True


_swept = 0


def install_secret_filter() -> None:
    """Add the filter to all loggers that may log a key; called for each request, because loggers are created late."""
    global _swept  # noqa: PLW0603 - the number of loggers at the last call
    known = logging.root.manager.loggerDict
    if len(known) == _swept:
        return
    named = [name for name in [*known] if name.partition(".")[0] in LOGGERS]
    for name in {*named, *LOGGERS, *LATE}:
        logging.getLogger(name).addFilter(redact_record)
    _swept = len(known)


def _remove_secrets(text: str) -> str:
    """Return *text* with placeholders for all known secrets and texts that look like keys."""
    return ANY.text(text) if ANY.may_contain_secret(text) else text
