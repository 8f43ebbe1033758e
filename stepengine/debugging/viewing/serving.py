"""
A page that follows a run under way: a small server for this machine alone.

The page asks once a second for what came after what it has. The journal is read without its lock, as far as its lines are whole;
nothing is ever written, and no handler's code is run.
"""

from __future__ import annotations

import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from attrs import frozen

from stepengine.debugging.viewing.page import page_of
from stepengine.debugging.viewing.payload import FORMAT, NOT_RECORDED, RunPayload, Texts
from stepengine.errors import JournalError
from stepengine.journal.following import Follower
from stepengine.journal.store import Journal
from stepengine.workspace.after_fork import Lock

__all__ = ("FollowedJournal", "server_of")

SECONDS = 5
MOST_DIGITS = 18
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_LOCALS = "Source lines and variables are not shown while a run is followed; `stepengine show --html` without --serve has them."


@frozen
class _State:
    """What a page has that was given out at an offset: how often the view had taken records, how many texts and pictures."""

    took: int
    texts: int
    images: int


class FollowedJournal:
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
        self._title = title
        self._view = RunPayload(Texts(), file)
        self._known: dict[int, _State] = {0: _State(0, 0, 0)}
        self._follower = Follower(journal)
        self.offset = 0
        self.read()

    def read(self) -> None:
        """Take in what was written since the last time; raises as the class."""
        is_behind = True
        while is_behind:
            news = self._follower.news()
            is_behind = news.is_behind
            if news.again:
                self._view = RunPayload(Texts(), self._view.file)
                self._known = {0: _State(0, 0, 0)}
            history = self._follower.history
            _ = history.root
            if news.records:
                self._view.take(history)
        self.offset = self._follower.end
        texts = self._view.texts
        self._run = self._view.run()
        self._known[self.offset] = _State(self._view.took, len(texts.all), len(texts.images))

    def page(self) -> str:
        """Return the page of what is recorded so far."""
        title = self._title or f"{self._view.agents[0]['id']} · {Path(self._view.file).name}"
        return page_of(self.payload(), str(self._view.texts.clean(title)))

    def payload(self) -> dict[str, Any]:
        """Return what a page shows of what is recorded so far, and where it goes on."""
        texts = self._view.texts
        missing = [{"text": text} for text in NOT_RECORDED] + [{"text": NO_LOCALS, "handler": True}]
        return {
            "format": FORMAT, **self._view.told(), "texts": texts.all, "images": texts.images, "sources": [],
            "missing": missing, "follow": self.offset,
        }  # fmt: skip

    def after(self, offset: int) -> dict[str, Any]:
        """Return what a page lacks that has everything up to *offset*; all of it for an offset that was never given out."""
        known = self._known.get(offset, self._known[0])
        view, texts = self._view, self._view.texts
        if known.took == view.took:
            # Not where the file ends by now: the end of a line that was taken without it is no news, and a page has nothing to merge.
            return {"after": offset}
        return {
            "after": self.offset, "from": known.texts, "texts": texts.all[known.texts :],
            "images_from": known.images, "images": texts.images[known.images :], "steps": view.changed(known.took), "rows": len(view.rows),
            "run": self._run, "agents": view.agents, "series": view.series(known.took),
        }  # fmt: skip


def server_of(following: FollowedJournal, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
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

    def __init__(self, following: FollowedJournal, port: int) -> None:
        super().__init__(("127.0.0.1", port), _PageHandler)
        self.following = following
        self.reading = Lock()
        self.token = secrets.token_urlsafe(16)
        self.hosts = {f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"}


class _PageHandler(BaseHTTPRequestHandler):
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
            self._send_update(rest, _offset(asked.query))

    def _send_update(self, what: str, offset: int) -> None:
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
