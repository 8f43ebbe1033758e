"""
A page that follows a run under way: a small server for this machine alone.

The page asks once a second for what came after what it has. The journal is read without its lock, as far as its lines are whole;
nothing is ever written, and no handler's code is run.
"""

from __future__ import annotations

import json
import os
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import attrs

from stepengine.errors import JournalError
from stepengine.journal.files import FileJournal
from stepengine.journal.history import History
from stepengine.journal.places import opened
from stepengine.journal.reading import Reading, read_later, read_lines
from stepengine.journal.store import Journal
from stepengine.judging.viewing.page import page_of
from stepengine.judging.viewing.payload import FORMAT, NOT_RECORDED, RunView, Texts
from stepengine.system.after_fork import Lock

__all__ = ("Following", "server_of")

SECONDS = 5
MOST_DIGITS = 18
LAST = 64
"""Bytes in front of what is new that must still be there, or the file was written over."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_LOCALS = (
    "Source lines and variables are not shown while a run is followed; `stepengine view` without --serve has them."
)


@attrs.frozen
class _State:
    """What a page has that was given out at an offset: how often the view had taken records, how many texts and pictures."""

    took: int
    texts: int
    images: int


class Following:
    """
    A journal that is read again when it has grown.

    Args:
        journal: The journal.
        file: How it is named in commands.
        title: The page's title; by default the agent and the journal.

    Raises:
        JournalError: when it cannot be read, or holds no run yet.
    """

    def __init__(self, journal: Journal, file: str, title: str = "") -> None:
        self._journal = journal
        self._title = title
        self._view = RunView(Texts(), file)
        self._known: dict[int, _State] = {0: _State(0, 0, 0)}
        self._mark: object = None
        self._reading: Reading | None = None
        self._history = History(())
        self._file: tuple[int, int] | None = None
        self._last = b""
        self.offset = 0
        self.read()

    def read(self) -> None:
        """Take in what was written since the last time; raises as the class."""
        mark = self._now()
        if mark is not None and mark == self._mark:
            return
        reading = self._read()
        _ = self._history.root
        if reading.end != self.offset:
            self._view.take(self._history)
            self.offset = reading.end
        self._reading = reading._replace(records=[])
        self._told = self._view.told()
        texts = self._view.texts
        self._known[self.offset] = _State(self._view.took, len(texts.all), len(texts.images))
        self._mark = mark

    def _read(self) -> Reading:
        """Read what is new, all of it where that cannot be told."""
        before, self._reading = self._reading, None
        reading = None if before is None else self._later(before)
        if reading is not None:
            self._history.grow(reading.records)
            return reading
        identity = self._identity()
        if self._file not in (None, identity):
            # Another journal has taken the place of the one that was shown.
            self._view, self.offset = RunView(Texts(), self._view.file), 0
            self._known = {0: _State(0, 0, 0)}
        self._file = identity
        content = self._journal.content()
        reading = read_lines(content, self._journal.name)
        self._last = content[: reading.end][-LAST:]
        self._history = History(reading.records, self._journal.name)
        return reading

    def _identity(self) -> tuple[int, int] | None:
        if not isinstance(self._journal, FileJournal):
            return None
        status = self._journal.path.stat()
        return status.st_dev, status.st_ino

    def _later(self, before: Reading) -> Reading | None:
        """Return what was written behind the last reading; ``None`` where all has to be read again."""
        descriptor = opened(self._journal.path) if isinstance(self._journal, FileJournal) else None
        if descriptor is None or self._history.head is None:
            return None
        with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
            status = os.fstat(descriptor)
            is_same = (status.st_dev, status.st_ino) == self._file
            # What has changed and not grown was written over.
            if not is_same or status.st_size <= before.end or before.open_end:
                return None
            file.seek(before.end - len(self._last))
            if file.read(len(self._last)) != self._last:
                return None
            data = file.read()
        lines, link = len(self._history.records), self._history.head.link
        reading = read_later(data, self._journal.name, before, lines, link=link)
        self._last = (self._last + data[: reading.end - before.end])[-LAST:]
        return reading

    def _now(self) -> object:
        """Return what changes when the file does; ``None`` where that cannot be told without reading it."""
        if not isinstance(self._journal, FileJournal):
            return None
        stat = self._journal.path.stat()
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def page(self) -> str:
        """Return the page of what is recorded so far."""
        texts = self._view.texts
        title = self._title or f"{self._view.agents[0]['id']} · {Path(self._view.file).name}"
        missing = [{"text": text} for text in NOT_RECORDED] + [{"text": NO_LOCALS, "handler": True}]
        payload = {"format": FORMAT, **self._told, "texts": texts.all, "images": texts.images, "sources": []}
        return page_of({**payload, "missing": missing, "follow": self.offset}, str(texts.clean(title)))

    def after(self, offset: int) -> dict[str, Any]:
        """Return what a page lacks that has everything up to *offset*; all of it for an offset that was never given out."""
        known = self._known.get(offset, self._known[0])
        view, texts = self._view, self._view.texts
        if known.took == view.took:
            return {"after": self.offset}
        steps = [[n, view.rows[n]] for n, stamp in enumerate(view.stamps) if stamp > known.took]
        return {
            "after": self.offset, "from": known.texts, "texts": texts.all[known.texts :],
            "images_from": known.images, "images": texts.images[known.images :], "steps": steps,
            "run": self._told["run"], "agents": view.agents, "series": self._told["series"],
        }  # fmt: skip


def server_of(following: Following, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """
    Return a server for this machine alone, and the address of the page; *port* 0 takes any that is free.

    Only who knows the address can read: it holds a random word, and requests under another name for this machine are refused.

    Raises:
        OSError: when the port is taken.
    """
    server = _Server(following, port)
    return server, f"http://127.0.0.1:{server.server_port}/{server.token}/"


class _Server(ThreadingHTTPServer):
    """A thread for each connection, since browsers open some that say nothing; these are left after five seconds."""

    daemon_threads = True

    def __init__(self, following: Following, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.following = following
        self.reading = Lock()
        self.token = secrets.token_urlsafe(16)
        self.hosts = {f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"}


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the page, and for what came after what the page has."""

    timeout = SECONDS
    server: _Server
    server_version = "stepengine"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer."""
        asked = urlsplit(self.path)
        first, _, rest = asked.path.removeprefix("/").partition("/")
        if self.headers.get("Host") not in self.server.hosts:
            self._say(403, "text/plain", "this server is asked as 127.0.0.1 only")
        elif not secrets.compare_digest(first.encode(), self.server.token.encode()) or rest not in ("", "records"):
            self._say(404, "text/plain", "there is nothing here")
        else:
            self._told(rest, _offset(asked.query))

    def _told(self, what: str, offset: int) -> None:
        following = self.server.following
        try:
            with self.server.reading:
                following.read()
                text = json.dumps(following.after(offset)) if what else following.page()
            kind = "application/json" if what else "text/html"
        except JournalError as error:
            kind, text = "application/json", json.dumps({"error": error.message})
        except OSError as error:
            kind, text = "application/json", json.dumps({"error": f"the journal cannot be read: {error.strerror}"})
        self._say(200, kind, text)

    def _say(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **HEADERS}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the address holds the token."""


def _offset(query: str) -> int:
    given = parse_qs(query).get("after", ["0"])[0]
    return int(given) if given.isascii() and given.isdecimal() and len(given) <= MOST_DIGITS else 0
