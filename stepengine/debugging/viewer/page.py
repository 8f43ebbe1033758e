"""
The page: one file of HTML that holds its script, its style and the run, and loads nothing.

Script and style stand beside this file. What comes from the run reaches the page in two ways: a few words as escaped text, for
the first paint, and everything else packed, as data that no browser runs.
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


@cache
def _read_page_part(name: str) -> str:
    return files(__package__ or __name__).joinpath(name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_page(payload: Mapping[str, Any], title: str) -> str:
    """
    Return the HTML page for page data.

    Args:
        payload: What ``payload`` tells of the run; with ``"follow"`` the page asks for what comes at its own address.
        title: Its title.
    """
    script, style = _read_page_part("page.js"), _read_page_part("page.css")
    rules = [
        "default-src 'none'",
        f"script-src {_csp_hash(script)}",
        f"style-src {_csp_hash(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if "follow" in payload else []),
    ]
    # The name of a file may be no UTF-8: what Python has for such bytes is written as JSON has it.
    written = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
    run = payload["run"]
    parts = {
        "csp": "; ".join(rules),
        "title": html.escape(title),
        "style": style,
        "tone": "good" if run["status"] in GOOD else "ask" if run["status"] in WAITING else "bad",
        "status": html.escape(run["status"]),
        "lead": f"{run['steps']:,} steps",
        # One that is made twice is the same twice.
        "payload": base64.b64encode(gzip.compress(written, LEVEL, mtime=0)).decode(),
        "script": script,
    }
    parts["run"] = PLACE.sub(lambda found: parts[found[1]], _read_page_part("run.html"))
    return PLACE.sub(lambda found: parts[found[1]], _read_page_part("page.html"))
