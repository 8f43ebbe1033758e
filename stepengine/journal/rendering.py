"""
A run's tree as text for people: one fact per line, so that a diff of two runs shows what changed (replay F23-F26).

``stepengine show`` prints it and the snapshots of the testing kit keep it. Nothing in it steers a terminal, no line ends with
a space, and no secret is in it that has a shape or stands in the environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from stepengine.data.visible import visible
from stepengine.journal.machine import machine_data
from stepengine.redaction import redactor_for

__all__ = ("clean_tree", "render", "render_effects")

MAX_TEXT = 2_000
MAX_INLINE = 100
HASH_DIGITS = 8
BLANK = "\u2420"
"""Stands for a space at the end of a line, which editors would take away."""
PYTEST_FOLDER = re.compile(r"<tmp>[/\\]pytest-of-[^/\\\s]+[/\\]pytest-\d+(?![\w-])")


def clean_tree(tree: Any, *, portable: bool = False, whole: bool = False) -> Any:
    """
    Return a JSON value without secrets, its long texts cut to 2,000 characters (replay F23, F25, K1).

    Args:
        tree: The value.
        portable: Take out what tells of this machine, too: folders, the names of host and user (replay K7).
        whole: Leave long texts whole.
    """
    clean = redactor_for("all", os.environ, machine=machine_data() if portable else None).value(tree)
    if portable:
        # The folder that pytest puts between its temporary folder and a test's is another one in each of its runs.
        clean = _mapped(clean, lambda text: PYTEST_FOLDER.sub("<tmp>", text))
    return clean if whole else _mapped(clean, _cut)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(k): _mapped(v, change) for k, v in value.items()}
    return [_mapped(v, change) for v in value] if isinstance(value, list) else value


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    mark = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:HASH_DIGITS]
    return f"{text[:MAX_TEXT]}\n... (cut: {len(text):,} characters, sha256:{mark})"


def render(tree: Mapping[str, Any]) -> str:
    """
    Return a tree of ``run_tree`` or ``result_tree`` as text that ends with a line end.

    Members that are missing are left out, and members of another type than usual are shown as they are: a snapshot's
    filters may have taken or replaced them.
    """
    return "".join([f"{_line(line)}\n" for line in _run(tree)])


def render_effects(tree: Mapping[str, Any], addresses: Collection[str]) -> str:
    """Return the effects of a run's tree that have one of *addresses*, without what was sent to models before them."""
    lines = [_line(line) for effect in _found(tree, addresses) for line in _effect(effect)]
    return "".join([f"{line}\n" for line in lines])


def _found(tree: Mapping[str, Any], addresses: Collection[str]) -> Iterator[Mapping[str, Any]]:
    for effect in _list(tree, "steps"):
        if effect["address"] in addresses:
            yield {name: member for name, member in effect.items() if name not in ("system", "said")}
        else:
            yield from _found(effect, addresses)


def _line(line: str) -> str:
    # Texts are split into lines already: a line end that is left stands in a name.
    return _ended(visible(line.replace("\n", "\\n")).replace("\t", "\\t"))


def _ended(line: str) -> str:
    """Return a line with the spaces at its end made visible."""
    bare = line.rstrip(" ")
    return bare + BLANK * (len(line) - len(bare))


def _run(tree: Mapping[str, Any]) -> Iterator[str]:
    words = [f"run {tree.get('agent', '')}", tree.get("status"), _count(tree, "effects"), _count(tree, "model_calls")]
    spent = tree.get("tokens")
    if isinstance(spent, Mapping):
        words.append(f"tokens {spent.get('in')} in / {spent.get('out')} out")
    if tree.get("cost_usd") is not None:
        words.append(f"cost ${tree['cost_usd']}")
    yield _joined(words)
    yield from _named("prompt", tree.get("prompt"))
    yield from _named("params", tree.get("params"))
    for message in _list(tree, "messages"):
        yield from _said(message)
    for child in _list(tree, "children"):
        yield _joined([f"child {child.get('agent', '')}", child.get("status")])
        yield from _indented("  ", _end(child))
    for effect in _list(tree, "steps"):
        yield from _effect(effect)
    yield from _end(tree)


def _end(tree: Mapping[str, Any]) -> Iterator[str]:
    if "output" in tree:
        yield from _named("output", tree["output"], quoted=True)
    yield from _named("text", tree.get("text"))
    error = tree.get("error")
    if isinstance(error, Mapping):
        yield from _named(f"error {error.get('type')}", error.get("message"))
    for question in _list(tree, "questions"):
        yield from _asked("waits for an answer to ", question)


def _effect(effect: Mapping[str, Any]) -> Iterator[str]:
    kind = effect.get("kind")
    words = [
        effect.get("address"),
        f"{kind} {effect.get('name', '')}".rstrip(),
        effect.get("call"),
        effect.get("purpose"),
    ]
    if effect.get("source"):
        words.append(f"by {effect['source']}")
    if kind == "model":
        messages = effect.get("messages")
        words += [f"step {effect.get('step')}", f"messages {messages} (+{effect.get('added')})" if messages else ""]
        words += [f"tools {', '.join(map(str, _list(effect, 'tools'))) or 'none'}" if "tools" in effect else ""]
    retries = _list(effect, "retries")
    words += [f"retries {len(retries)}: {', '.join(map(str, retries))}" if retries else ""]
    yield _joined(words)
    yield from _indented("     ", _asks(effect))
    yield from _came(effect)


def _asks(effect: Mapping[str, Any]) -> Iterator[str]:
    yield from _members(effect.get("input"))
    for name in ("tool_choice", "settings", "system", "prompt", "params", "args", "kwargs"):
        yield from _named(name, effect.get(name))
    for message in _list(effect, "said"):
        yield from _said(message)
    for question in _list(effect, "questions"):
        yield from _asked("", question)
    for inner in _list(effect, "steps"):
        yield from _effect(inner)


def _came(effect: Mapping[str, Any]) -> Iterator[str]:
    if "outcome" not in effect:
        yield "   -> (no result yet)"
        return
    lines = list(_outcome(effect["outcome"])) or ["(nothing)"]
    yield f"   -> {lines[0]}"
    yield from [f"      {line}" if line else "" for line in lines[1:]]


def _outcome(outcome: Any) -> Iterator[str]:
    if not isinstance(outcome, Mapping):
        yield from _value(outcome)
        return
    if outcome.get("status"):
        yield str(outcome["status"])
    for part in _list(outcome, "parts"):
        yield from _part(part)
    if "value" in outcome:
        yield from _value(outcome["value"])
    yield from [_json(answer) for answer in _list(outcome, "answers")]
    yield from _end(outcome)
    yield from [f"side effect {each}" for each in _list(outcome, "side_effects")]
    if outcome.get("stop"):
        yield f"stop {outcome['stop']}"


def _said(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield from _value(message)
        return
    words = [message.get(name) for name in ("role", "name", "id", "status")]
    tags = ", ".join(map(str, _list(message, "tags")))
    yield _joined([*words, tags and f"tags {tags}"])
    for part in _list(message, "parts"):
        text = part.get("text") if isinstance(part, Mapping) and len(part) == 1 else None
        yield from _indented("  ", _text(text) if isinstance(text, str) else _part(part))


def _part(part: Any) -> Iterator[str]:
    if not isinstance(part, Mapping):
        yield from _value(part)
        return
    for name in ("text", "thinking", "refusal"):
        if name in part:
            yield _joined([name, part.get("signature") and f"signature {part['signature']}"])
            yield from _indented("  ", _text(str(part[name])))
    if "tool" in part:
        yield _joined([f"call {part['tool']}", part.get("call")])
        yield from _indented("  ", _members(part.get("input")))
        yield from _indented("  ", _named("unreadable", part.get("unreadable")))
    if "json" in part:
        yield from _value(part["json"])
    yield from [
        str(part[name]) if name == "media" else f"{name} {part[name]}" for name in ("media", "opaque") if name in part
    ]


def _asked(before: str, question: Any) -> Iterator[str]:
    if not isinstance(question, Mapping):
        yield from _value(question)
        return
    options = ", ".join([_json(o) for o in _list(question, "options")])
    yield _joined([f"{before}{question.get('id')}", options and f"options {options}"])
    yield from _indented("  ", _text(str(question.get("text", ""))))


# --- values -----------------------------------------------------------------------------------------------------------


def _named(name: str, value: Any, *, quoted: bool = False) -> Iterator[str]:
    """Give *name* and its value below it; nothing for a value that is not there."""
    if value in (None, "") and not quoted:
        return
    yield name
    yield from _indented("  ", _text(value) if isinstance(value, str) and not quoted else _value(value))


def _members(value: Any) -> Iterator[str]:
    """Give the members of an object, one per line; long texts below their names."""
    if not isinstance(value, Mapping):
        yield from _value(value) if value is not None else ()
        return
    for name, member in value.items():
        if isinstance(member, str) and ("\n" in member or len(member) > MAX_INLINE):
            yield f"{name}: |"
            yield from _indented("  ", _text(member))
            continue
        first, *rest = _value(member)
        yield f"{name}: {first}"
        yield from rest


def _value(value: Any) -> Iterator[str]:
    """Give a JSON value on one line, or on several when it is long; a text of several lines as it is."""
    if isinstance(value, str) and "\n" in value:
        yield "|"
        yield from _indented("  ", _text(value))
        return
    short = _json(value)
    if len(short) <= MAX_INLINE or not isinstance(value, Mapping | list | tuple):
        yield from _text(short)
        return
    yield from _text(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def _text(text: str) -> Iterator[str]:
    """Give the lines of a text, with the spaces at their ends made visible."""
    yield from map(_ended, text.split("\n"))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _indented(by: str, lines: Iterator[str]) -> Iterator[str]:
    yield from [f"{by}{line}" if line else "" for line in lines]


def _joined(words: list[Any]) -> str:
    return "  ".join([str(word) for word in words if word])


def _count(tree: Mapping[str, Any], name: str) -> str:
    number = tree.get(name)
    if not isinstance(number, int):
        return ""
    words = name.replace("_", " ")
    return f"{number} {words[:-1] if number == 1 else words}"


def _list(tree: Mapping[str, Any], name: str) -> list[Any]:
    found = tree.get(name)
    return list(found) if isinstance(found, list | tuple) else []
