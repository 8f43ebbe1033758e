"""
The page: one HTML file that contains its script, its style and the run, and loads nothing.

Scripts and style are files next to this one. The page has data of the run in two forms. A few words are escaped text, for the first
paint. Everything else is compressed, as data that no browser runs.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

PLACE = re.compile(r"\{(csp|title|style|tone|status|lead|payload|script|run)\}")
LEVEL = 6
GOOD = frozenset({"completed"})
WAITING = frozenset({"suspended", "interrupted", "under way", "max_steps", "truncated"})
SCRIPTS = (
    "figures.js",
    "nodes.js",
    "markdown.js",
    "payload.js",
    "messages.js",
    "calls.js",
    "handler.js",
    "diff.js",
    "step.js",
    "list.js",
    "overview.js",
    "search.js",
    "charts.js",
    "controls.js",
    "page.js",
)
"""
The scripts in the order in which ``read_script`` joins them.

They are joined because an exported file has one script, which its Content-Security-Policy allows by hash. The last one starts the page.
"""


@cache
def _read_page_file(name: str) -> str:
    return files(__package__ or __name__).joinpath(name).read_text(encoding="utf-8")


@cache
def read_script() -> str:
    """Return the script of the page. The studio serves the same script as ``run.js``."""
    return "\n".join(map(_read_page_file, SCRIPTS))


def _compute_csp_hash(text: str) -> str:
    """Return the hash of a script or style as a Content-Security-Policy has it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_page(payload: Mapping[str, Any], title: str) -> str:
    """
    Return the HTML page for page data.

    Args:
        payload: The data from ``make_payload``; with ``"follow"`` the page polls its own address for new records.
        title: Its title.
    """
    script, style = read_script(), _read_page_file("page.css")
    rules = [
        "default-src 'none'",
        f"script-src {_compute_csp_hash(script)}",
        f"style-src {_compute_csp_hash(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if "follow" in payload else []),
    ]
    # The name of a file may not be UTF-8: its surrogates are written as JSON escapes.
    written = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
    run = payload["run"]
    parts = {
        "csp": "; ".join(rules),
        "title": html.escape(title),
        "style": style,
        "tone": "good" if run["status"] in GOOD else "ask" if run["status"] in WAITING else "bad",
        "status": html.escape(run["status"]),
        "lead": f"{run['steps']:,} steps",
        # Without a time, equal runs make equal pages.
        "payload": base64.b64encode(gzip.compress(written, LEVEL, mtime=0)).decode(),
        "script": script,
    }
    parts["run"] = PLACE.sub(lambda found: parts[found[1]], _read_page_file("run.html"))
    return PLACE.sub(lambda found: parts[found[1]], _read_page_file("page.html"))
