"""Reads a docstring: what the model is told about a tool, and about each of its parameters."""

from __future__ import annotations

import inspect
import re

__all__ = ("read_docstring",)

HEADER = re.compile(r"^(?P<title>[A-Za-z][A-Za-z ]*):[ \t]*$", re.MULTILINE)
PARAMETERS = frozenset({"args", "arguments", "parameters", "params"})
DROPPED = PARAMETERS | {"returns", "return", "yields", "raises", "exceptions"}


def read_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """
    Return the description and the text of each parameter.

    Google, NumPy, reST and Epydoc docstrings are understood. The description keeps every section but those about
    parameters, results and exceptions.
    """
    if not text or not text.strip():
        return "", {}
    text = inspect.cleandoc(text)
    sections = _sections(text)
    if any(title in PARAMETERS for title, _ in sections):
        kept = [body for title, body in sections if title not in DROPPED]
        parameters = "\n\n".join(body for title, body in sections if title in PARAMETERS)
        return "\n\n".join(filter(None, kept)), _google(parameters)
    return _detected(text)


def _sections(text: str) -> list[tuple[str, str]]:
    """Split at Google headers, keeping each header with its body; the text before the first one has no title."""
    starts = [m for m in HEADER.finditer(text) if text[m.end() : m.end() + 2].startswith("\n ")]
    edges = [0, *[m.start() for m in starts], len(text)]
    titles = ["", *[m["title"].lower() for m in starts]]
    return [(t, text[a:b].strip()) for t, a, b in zip(titles, edges, edges[1:], strict=False)]


def _google(section: str) -> dict[str, str]:
    import docstring_parser
    from docstring_parser.common import DocstringStyle

    return _texts(docstring_parser.parse("Parameters.\n\n" + section, style=DocstringStyle.GOOGLE))


def _detected(text: str) -> tuple[str, dict[str, str]]:
    import docstring_parser

    try:
        parsed = docstring_parser.parse(text)
    except docstring_parser.ParseError:
        return text, {}
    texts = _texts(parsed)
    if not texts:
        kept = [body for title, body in _sections(text) if title not in DROPPED]
        return "\n\n".join(filter(None, kept)), {}
    return "\n\n".join(filter(None, (parsed.short_description, parsed.long_description))), texts


def _texts(parsed: object) -> dict[str, str]:
    params = getattr(parsed, "params", ())
    return {p.arg_name: " ".join(p.description.split()) for p in params if p.description}
