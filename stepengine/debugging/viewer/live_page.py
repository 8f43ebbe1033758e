"""
A page that follows a running run, served on this machine only.

The page polls once a second for new records. The journal is read without its lock, up to its last complete line. Nothing is written,
and no handler's code runs.
"""

from __future__ import annotations

import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from attrs import frozen

from stepengine.debugging.viewer.page import render_page
from stepengine.debugging.viewer.payload import FORMAT, NOT_RECORDED, PageTexts, RunPayload
from stepengine.errors import JournalError
from stepengine.journal.follower import Follower
from stepengine.journal.store import Journal
from stepengine.workspace.after_fork import Lock

SECONDS = 5
MOST_DIGITS = 18
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_LOCALS = (
    "Source lines and variables are not shown for a live run; `stepengine show --html` without --serve shows them."
)


@frozen
class _PageState:
    """The page state at an offset: the numbers of ``add_new_records`` calls, texts and pictures so far."""

    took: int
    texts: int
    images: int


class FollowedJournal:
    """
    A journal with its page data, which ``read_new_records`` extends while the run is running.

    Args:
        journal: The journal.
        file: Its name in commands.
        title: The page's title; by default the agent and the journal.

    Raises:
        JournalError: when the journal cannot be read, or holds no run yet.
    """

    def __init__(self, journal: Journal, file: str, title: str = "") -> None:
        self._title = title
        self._view = RunPayload(PageTexts(), file)
        self._known: dict[int, _PageState] = {0: _PageState(0, 0, 0)}
        self._follower = Follower(journal)
        self.offset = 0
        self.read_new_records()

    def read_new_records(self) -> None:
        """
        Read the records written since the last call, and extend the page data; read all again if the journal was replaced.

        Raises:
            JournalError: when the journal cannot be read.
        """
        is_behind = True
        while is_behind:
            news = self._follower.read_new()
            is_behind = news.is_behind
            if news.again:
                self._view = RunPayload(PageTexts(), self._view.file)
                self._known = {0: _PageState(0, 0, 0)}
            history = self._follower.history
            _ = history.root
            if news.records:
                self._view.add_new_records(history)
        self.offset = self._follower.offset
        texts = self._view.texts
        self._run = self._view.header_to_json()
        self._known[self.offset] = _PageState(self._view.took, len(texts.all), len(texts.images))

    def render_html(self) -> str:
        """Return the page of the records so far."""
        title = self._title or f"{self._view.agents[0]['id']} · {Path(self._view.file).name}"
        return render_page(self.make_page_data(), self._view.texts.clean(title))

    def make_page_data(self) -> dict[str, Any]:
        """Return the page data of the records so far, with the offset for later changes as ``"follow"``."""
        texts = self._view.texts
        missing = [{"text": text} for text in NOT_RECORDED] + [{"text": NO_LOCALS, "handler": True}]
        return {
            "format": FORMAT, **self._view.to_dict(), "texts": texts.all, "images": texts.images, "sources": [],
            "missing": missing, "follow": self.offset,
        }  # fmt: skip

    def get_changes_after(self, offset: int) -> dict[str, Any]:
        """Return the page data added or changed after *offset*; everything for an unknown offset."""
        known = self._known.get(offset, self._known[0])
        view, texts = self._view, self._view.texts
        if known.took == view.took:
            # Not the current end of the file: a line end alone adds nothing, and the page has nothing to merge.
            return {"after": offset}
        return {
            "after": self.offset, "from": known.texts, "texts": texts.all[known.texts :],
            "images_from": known.images, "images": texts.images[known.images :], "steps": view.list_changed_rows(known.took), "rows": len(view.rows),
            "run": self._run, "agents": view.agents, "series": view.get_chart_data(known.took),
        }  # fmt: skip


def make_page_server(following: FollowedJournal, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """
    Bind an HTTP server to this machine only; return it, not yet serving, and the URL of its page. *port* 0 selects a free port.

    The URL contains a random token, and requests with another host name are refused.

    Raises:
        OSError: when the port is in use.
    """
    server = _PageServer(following, port)
    return server, f"http://127.0.0.1:{server.server_port}/{server.token}/"


class _PageServer(ThreadingHTTPServer):
    """An HTTP server with a thread for each connection; silent connections are closed after five seconds."""

    daemon_threads = True

    def __init__(self, following: FollowedJournal, port: int) -> None:
        super().__init__(("127.0.0.1", port), _PageHandler)
        self.following = following
        self.reading = Lock()
        self.token = secrets.token_urlsafe(16)
        self.hosts = {f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"}


class _PageHandler(BaseHTTPRequestHandler):
    """Answers GET requests for the page and for the changes after an offset."""

    timeout = SECONDS
    server: _PageServer
    server_version = "stepengine"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a GET request: 403 for another host name, 404 for another token or path."""
        asked = urlsplit(self.path)
        first, _, rest = asked.path.removeprefix("/").partition("/")
        if self.headers.get("Host") not in self.server.hosts:
            self._send_body(
                403, "text/plain", "this server accepts only requests for the host 127.0.0.1; open the printed URL"
            )
        elif not secrets.compare_digest(first.encode(), self.server.token.encode()) or rest not in ("", "records"):
            self._send_body(404, "text/plain", "not found; open the printed URL")
        else:
            self._send_page_or_changes(rest, _parse_offset_or_zero(asked.query))

    def _send_page_or_changes(self, path: str, offset: int) -> None:
        """Read new records; send the page if *path* is empty, else the changes after *offset*. An error is sent as JSON."""
        following = self.server.following
        try:
            with self.server.reading:
                following.read_new_records()
                text = json.dumps(following.get_changes_after(offset)) if path else following.render_html()
            kind = "application/json" if path else "text/html"
        except JournalError as error:
            kind, text = "application/json", json.dumps({"error": error.message})
        except OSError as error:
            kind, text = "application/json", json.dumps({"error": f"the journal cannot be read: {error.strerror}"})
        self._send_body(200, kind, text)

    def _send_body(self, code: int, kind: str, text: str) -> None:
        """Send a whole response with the headers of the page."""
        body = text.encode()
        self.send_response(code)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **HEADERS}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the URL holds the token."""


def _parse_offset_or_zero(query: str) -> int:
    """Return the offset in the query of a request; 0 if there is no valid one."""
    given = parse_qs(query).get("after", ["0"])[0]
    return int(given) if given.isascii() and given.isdecimal() and len(given) <= MOST_DIGITS else 0
