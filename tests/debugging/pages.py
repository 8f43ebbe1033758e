"""
Pages of runs, read as their own script reads them.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any

PAYLOAD = re.compile(r'<script type="application/octet-stream" id="payload">([A-Za-z0-9+/=]+)</script>')


def opened(page: str) -> Any:
    """
    Return what the page's script reads of it.
    """
    (packed,) = PAYLOAD.findall(page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def frames_at(data: Any, number: int) -> list[dict[str, Any]]:
    """
    Return the frames of a row with all their variables, as the page's script puts them together.
    """
    chain = []
    while number >= 0:
        chain.append(data["locals"][str(number)])
        number = chain[-1]["from"]
    values: list[dict[str, str]] = []
    for entry in reversed(chain):
        values = values[: len(entry["frames"])]
        for depth, frame in enumerate(entry["frames"]):
            if depth >= len(values):
                values.append({})
            if frame.get("all"):
                values[depth] = {}
            for name in frame.get("gone", ()):
                values[depth].pop(name)
            values[depth] |= {name: data["texts"][text] for name, text in frame.get("set", {}).items()}
    return [{**frame, "values": v} for frame, v in zip(chain[0]["frames"], values, strict=True)]
