"""
Journals that somebody changed and sealed again: every checksum is right, and what stands in the records is anything.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 7, 1.5, 2**53, 10**30, -(10**30), 1e308, float("nan"), float("inf"),
    "", "x", "#", "3.2", "\ud800", "\0", "slice", "model_call", "$blob", "9" * 5_000,
    [], {}, [[]], [None], [{}], {"x": 1}, {"$blob": "x"}, {"$blob": 1}, {"$obj": 1}, {"$obj": {"$blob": 1}},
    {"type": "slice"}, {"type": "slice", "seq": 0, "start": 0, "stop": 10**9}, {"type": "slice", "seq": 10**9, "start": -5, "stop": 5},
    "<deep 60>", "<deep 1200>", {"type": "value"}, {"type": "user_message"}, {"type": "tool_result", "content": 3}, {"type": "Nothing"}, {"type": []},
)  # fmt: skip

CHECKSUM = len(',"crc":"00000000"}')
# No encoder of Python's writes it: it nests too deeply.
DEEP = re.compile(r'"<deep (\d+)>"')


def mutant(lines: list[bytes], random: Random) -> bytes:
    """
    Return another journal: one to three things in it are changed, and its checksums made anew.
    """
    records = unsealed(lines)
    for _ in range(random.randint(1, 3)):
        random.choice([changed, changed, changed, dropped, renamed, shuffled])(records, random)
    return sealed(records)


def unsealed(lines: Iterable[bytes]) -> list[Any]:
    """
    Return the records of a journal without their checksums.
    """
    records = [json.loads(line) for line in lines]
    for record in records:
        del record["crc"]
    return records


def sealed(records: list[Any]) -> bytes:
    """
    Return a journal of records, with checksums.
    """
    link = bool(records) and isinstance(records[0], dict) and records[0].get("link") is True
    made, previous = [], 0
    for record in records:
        # Escaped, so that half a surrogate pair can stand in it, too.
        text = DEEP.sub(
            lambda found: "[" * int(found[1]) + "]" * int(found[1]), json.dumps(record, separators=(",", ":"))
        )
        body = text[:-1].encode()
        crc = zlib.crc32(body, previous)
        made.append(body + b',"crc":"%08x"}\n' % crc)
        previous = crc if link else 0
    return b"".join(made)


def resealed(content: bytes | str, *, link: bool = True) -> bytes:
    """
    Return the lines of a journal with right checksums in place of their own, as anybody can make them.
    """
    made, previous = [], 0
    for line in (content.encode() if isinstance(content, str) else content).splitlines():
        body = line[:-CHECKSUM]
        crc = zlib.crc32(body, previous)
        made.append(body + b',"crc":"%08x"}\n' % crc)
        previous = crc if link else 0
    return b"".join(made)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """
    Give every place in a JSON value, as what holds it and its key there.
    """
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from places(inner)


def place(records: list[Any], random: Random) -> tuple[Any, Any]:
    return random.choice(list(places(random.choice(records))))


def changed(records: list[Any], random: Random) -> None:
    holder, key = place(records, random)
    other, there = place(records, random)
    odd = random.choice([*ODD, *[other[there]] * 12])
    holder[key] = json.loads(json.dumps(odd))


def dropped(records: list[Any], random: Random) -> None:
    holder, key = place(records, random)
    del holder[key]


def renamed(records: list[Any], random: Random) -> None:
    holder, key = place(records, random)
    if isinstance(holder, dict):
        holder[random.choice(["type", "$blob", "x", f"{key}s"])] = holder.pop(key)
    else:
        holder.insert(0, holder[key])


def shuffled(records: list[Any], random: Random) -> None:
    one, other = random.randrange(len(records)), random.randrange(len(records))
    records[one], records[other] = records[other], json.loads(json.dumps(records[one]))
