"""
Turns HTML into Markdown in a process of its own: untrusted input, bounded time and memory.

This file is run as a script, ``python -I html_worker.py FOLDER SECONDS BYTES``, and imports nothing of stepengine. It reads
a line of JSON (``base``, ``encoding``) and the HTML on stdin, and writes one JSON object: ``title``, ``description``,
``text``.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any
from urllib.parse import urljoin

# fmt: off
DROPPED = frozenset((
    "script", "style", "template", "noscript", "svg", "math", "iframe", "object", "embed", "canvas", "audio", "video", "form",
    "button", "select", "input", "textarea", "dialog", "nav", "footer", "aside", "head", "link", "meta",
))
# fmt: on
HIDING = re.compile(r"display:none|visibility:hidden|opacity:0(?:\.0+)?(?:;|$)|font-size:0(?:px|em|rem|%)?(?:;|$)")
URLS = ("href", "src")
MAX_NODES = 400_000
"""The largest pages have some ten thousand; each becomes text."""
MAX_DEPTH_LEVELS = 400
"""Pages are some dozen levels deep; Python's recursion has a limit of its own at 1,000."""
MAX_CHARS = 2_000_000
"""As many as a page has bytes at most: links that are made absolute could make it many times as long."""


def extract_readable(html: bytes, base: str, encoding: str | None) -> dict[str, str]:
    """Return title, description and readable Markdown text of an HTML page; its main part if it has one."""
    from justhtml import JustHTML

    page = JustHTML(html, sanitize=False, encoding=encoding)
    title, description = _find_title_and_description(page)
    _remove_hidden_and_fix_links(page.root, base)
    parts = page.query("main") or page.query("article")
    text = _to_markdown(parts) or _to_markdown([page.root])
    return {"title": title, "description": description, "text": text[:MAX_CHARS]}


def _to_markdown(nodes: list[Any]) -> str:
    """Return the non-empty Markdown texts of nodes, separated by blank lines."""
    return "\n\n".join(text for node in nodes if (text := node.to_markdown().strip()))


def _find_title_and_description(page: Any) -> tuple[str, str]:
    """Return the title and the description of a page, also from its meta elements; ``""`` for a missing one."""
    title = page.query_one("title")
    named: dict[str, str] = {}
    for meta in page.query("meta"):
        name = (meta.attrs.get("name") or meta.attrs.get("property") or "").lower()
        named.setdefault(name, meta.attrs.get("content") or "")
    text = title.to_text() if title is not None else named.get("og:title", "")
    return _collapse_spaces_and_cut(text), _collapse_spaces_and_cut(
        named.get("description") or named.get("og:description") or ""
    )


def _collapse_spaces_and_cut(text: str) -> str:
    """Return *text* with single spaces, cut to 1,000 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 1_000 else f"{text[:1_000]}..."  # noqa: PLR2004 - a long title


def _remove_hidden_and_fix_links(root: Any, base: str) -> None:
    """Remove hidden, too deep and too many elements of a tree in place, and make its links absolute."""
    open_nodes = [(root, 0)]
    seen = 0
    while open_nodes:
        node, depth = open_nodes.pop()
        seen += 1
        for child in list(node.children or ()):
            name = str(child.name).lower()
            if name.startswith("#text"):
                continue
            if _is_hidden_or_dropped(child, name) or depth > MAX_DEPTH_LEVELS or seen > MAX_NODES:
                node.remove_child(child)
            else:
                _make_links_absolute(child, base)
                open_nodes.append((child, depth + 1))


def _is_hidden_or_dropped(node: object, name: str) -> bool:
    """Return True for an element that is hidden, or of a kind that is no readable content."""
    if name in DROPPED or name.startswith(("#comment", "!", "?")):
        return True
    given = getattr(node, "attrs", None) or {}
    style = re.sub(r"\s+", "", given.get("style") or "").lower()
    return "hidden" in given or (given.get("aria-hidden") or "").lower() == "true" or bool(HIDING.search(style))


def _make_links_absolute(node: object, base: str) -> None:
    """Make the link attributes of an element absolute in place; remove those that are not http."""
    given = getattr(node, "attrs", None) or {}
    for name in URLS:
        if name in given:
            link = ""
            with contextlib.suppress(ValueError):
                link = urljoin(base, (given[name] or "").strip())
            if link.startswith(("http://", "https://")):
                given[name] = link
            else:
                del given[name]


def _limit_process_resources(seconds: int, max_bytes: int) -> None:
    """Limit the CPU time, the memory and the open files of this process, where the system can."""
    import resource

    for kind, bound in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, max_bytes), (resource.RLIMIT_NOFILE, 64)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (bound, bound))


def main() -> None:
    """Read a page from stdin and write its text to stdout as JSON."""
    folder, seconds, size = sys.argv[1:4]
    sys.path.append(folder)
    _limit_process_resources(int(seconds), int(size))
    head, _, html = sys.stdin.buffer.read().partition(b"\n")
    said = json.loads(head)
    sys.stdout.write(json.dumps(extract_readable(html, said["base"], said["encoding"])))


if __name__ == "__main__":
    main()
