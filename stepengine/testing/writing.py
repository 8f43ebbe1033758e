"""
Writing cassette files: vcrpy's YAML version 1, readable in a diff (replay C2-C5).

JSON bodies stand as indented text in a literal block, one field per line, so that plain vcrpy reads what we write. A
character that YAML would not print is written as JSON escape, which keeps the block.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stepengine.data.json import thaw
from stepengine.testing.interactions import Interaction, RecordedRequest, RecordedResponse, is_stream

__all__ = ("dump_cassette", "replace_file")

# What libyaml does not print inside a literal block, and what YAML 1.1 counts as a line break there.
UNPRINTABLE = re.compile(r"[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd]")
ENDLESS = 1 << 30


def dump_cassette(interactions: Iterable[Interaction]) -> bytes:
    """Return the file that holds *interactions*."""
    import yaml

    tree = {"interactions": [_interaction(i) for i in interactions], "version": 1}
    text = yaml.dump(
        tree, Dumper=_dumper(), allow_unicode=True, width=ENDLESS, sort_keys=False, default_flow_style=False
    )
    return str(text).encode()


def replace_file(path: Path, data: bytes) -> None:
    """Put *data* at *path* as a whole or not at all: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


@functools.cache
def _dumper() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return Dumper


def _interaction(interaction: Interaction) -> dict[str, Any]:
    request, response = interaction.request, interaction.response
    tree: dict[str, Any] = {
        "request": {
            "method": request.method,
            "uri": request.url,
            "headers": _headers(request),
            "body": _body(request),
        },
        "response": {
            "status": {"code": response.status, "message": response.reason},
            "headers": _headers(response),
            "body": {"string": _body(response)},
        },
    }
    if interaction.extras:
        tree["x_stepengine"] = thaw(interaction.extras)
    return tree


def _headers(message: RecordedRequest | RecordedResponse) -> dict[str, list[str]]:
    headers: dict[str, list[str]] = {}
    for name, value in message.headers:
        headers.setdefault(name, []).append(value)
    return headers


def _body(message: RecordedRequest | RecordedResponse) -> str | bytes:
    if message.header("content-encoding"):
        return message.body
    try:
        text = message.body.decode()
    except UnicodeDecodeError:
        return message.body
    return text if is_stream(message) else _indented(text)


def _indented(text: str) -> str:
    """Return a JSON object or array with one member per line; any other text as it is."""
    if text[:1] not in ("{", "["):
        return text
    try:
        tree = json.loads(text)
        written = json.dumps(tree, ensure_ascii=False, allow_nan=False, indent=2)
    except (ValueError, RecursionError):
        return text
    return UNPRINTABLE.sub(_escaped, written)


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
