"""
Programs as models write them, and the functions that they have: what a check must let through.

`WRITTEN` were written by hand, one after another as answers to tasks; `families()` makes more of a few shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from stepengine import AgentDefinition
from stepengine.data.tools import ToolSpec
from stepengine.sandbox.stubs import Stubs, make_stubs

TEXT: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}


def tool(name: str, description: str = "", required: tuple[str, ...] = (), **properties: Any) -> ToolSpec:
    return ToolSpec(name, description, {"type": "object", "properties": properties, "required": list(required)})


ROW = {
    "type": "object",
    "properties": {
        "id": INTEGER,
        "name": TEXT,
        "amount": {"type": "number"},
        "tags": {"type": "array", "items": TEXT},
        "created": TEXT,
    },
    "required": ["id", "name", "amount", "tags", "created"],
}
TOOLS = [
    tool("query", "Get rows of a table.", ("table",), table=TEXT, limit={**INTEGER, "default": 10}),
    tool(
        "price", "Get the price of an item.", ("item",), item=TEXT, currency={"enum": ["EUR", "USD"], "default": "EUR"}
    ),
    tool("book", "Book so many of an item.", ("item", "count"), item=TEXT, count=INTEGER),
    tool("lookup", "Look something up.", ("key",), key=TEXT),
    tool("read-file", "Read a text file.", ("path",), path=TEXT),
    tool("fetch", "Get a web page.", ("url",), url=TEXT, headers={"type": "object"}),
    tool("add", "Add two numbers.", ("a", "b"), a=INTEGER, b=INTEGER),
    tool("list", "List the files of a folder."),
    tool("mcp_issues", "Find issues.", ("search-for",), **{"search-for": TEXT, "max": INTEGER}),
]
OUTPUTS: dict[str, Any] = {
    "query": {"type": "array", "items": ROW},
    "price": {
        "type": "object",
        "properties": {"item": TEXT, "value": {"type": "number"}, "currency": TEXT},
        "required": ["item", "value", "currency"],
    },
    "read-file": TEXT,
    "add": INTEGER,
    "list": {"type": "array", "items": TEXT},
}
AGENTS = [AgentDefinition("researcher", model="t/m", description="Finds things out.")]


def stubs() -> Stubs:
    return make_stubs(TOOLS, AGENTS, ask=True, outputs=OUTPUTS)


PROGRAMS = r'''
import asyncio

async def total_for(item: str, count: int) -> float:
    found = await price(item)
    return found["value"] * count

basket = {"apple": 3, "pear": 1}
totals = await asyncio.gather(*(total_for(item, count) for item, count in basket.items()))
print(dict(zip(basket, totals)))
=====
results = {}
for name in ["apple", "missing", "denied"]:
    try:
        results[name] = await price(name)
    except PermissionError as e:
        results[name] = f"denied: {e}"
    except Exception as e:
        results[name] = f"{type(e).__name__}: {e}"
results
=====
import re

page = await fetch("https://example.org")
links = re.findall(r"href='([^']+)'", page["body"])
match = re.search(r"version (\d+)\.(\d+)\.(\d+)", page["body"])
if match:
    major, minor, patch = (int(part) for part in match.groups())
    print(major, minor, patch)
print(links)
=====
from dataclasses import dataclass

@dataclass
class Offer:
    item: str
    value: float

    def cheaper_than(self, other):
        return self.value < other.value

offers = [Offer(item, (await price(item))["value"]) for item in ("fig", "melon")]
print(offers[0].cheaper_than(offers[1]))
=====
class Basket:
    """What is bought."""

    def __init__(self):
        self.items = []
        self.total = 0.0

    async def put(self, item, count=1):
        found = await price(item)
        self.items.append((item, count))
        self.total += found["value"] * count

basket = Basket()
await basket.put("fig")
await basket.put("melon", count=2)
print(basket.items, basket.total)
=====
answer = await ask("Which one shall be booked?", ["apple", "pear"])
if answer == "yes":
    done = await book("apple", 1)
    print(done)
else:
    print("nothing booked")
=====
issues = await mcp_issues({"search-for": "breaks", "max": 3})
bugs = [i for i in issues if "bug" in i["labels"] and i["open"]]
print(len(bugs), bugs[0]["title"] if bugs else None)
=====
import asyncio

async def main():
    print(await add(1, 2))

if __name__ == "__main__":
    asyncio.run(main())
=====
found = await lookup("shape")
match found:
    case {"owner": {"name": name}, **others}:
        print(name, sorted(others))
    case [first, *rest]:
        print(first, rest)
=====
if (n := len(await query("orders"))) > 3:
    print(f"many: {n}")
elif n:
    print("few")
else:
    print("none")
=====
count = 0

def step():
    global count
    count += 1
    return count

while step() < 4:
    pass
print(count)
=====
def counter():
    n = 0

    def increase(by=1):
        nonlocal n
        n += by
        return n

    return increase

tick = counter()
tick()
print(tick(by=2))
=====
def describe_row(r, *, width=10, **extra):
    return f"{r['name']:<{width}}|{r['amount']:>8.2f}" + "".join(f" {k}={v}" for k, v in extra.items())

for r in await query("orders", limit=3):
    print(describe_row(r, width=8, shop="x"))
=====
pages = []
for number in range(1, 4):
    page = await fetch(f"https://example.org/list?page={number}", headers={"Accept": "text/html"})
    pages.append(page)
    if page["status"] != 200:
        break
else:
    print("all pages")
len(pages)
=====
task = price("fig")
other = price("melon", currency="USD")
first = await task
second = await other
print(first["currency"], second["currency"])
=====
price = await price("fig")
print(price["value"])
=====
from typing import Any, Optional

async def first_or(default: Optional[str], table: str) -> dict[str, Any] | None:
    rows: list[dict[str, Any]] = await query(table, limit=1)
    return rows[0] if rows else default

print(await first_or(None, "orders"))
=====
def show(rows: list[QueryResultItem]) -> None:
    for r in rows:
        print(r["id"])

show(await query("orders", limit=2))
=====
try:
    import numpy as np
except ImportError:
    np = None
values = [1.0, 2.0]
print(sum(values) / len(values) if np is None else np.mean(values))
=====
from collections import deque, namedtuple

Point = namedtuple("Point", ["x", "y"])
trail = deque([Point(0, 0)], maxlen=2)
for step in range(3):
    last = trail[-1]
    trail.append(Point(last.x + 1, last.y + step))
print(list(trail))
=====
x = 10
x //= 3
x **= 2
y = -x if x > 5 else ~x
print(x, y, x & 3 | 4, 7 % 3, divmod(17, 5), 0x1F, 1e3, 1_000)
=====
def logged(fn):
    async def inner(*args, **kwargs):
        result = await fn(*args, **kwargs)
        print(fn.__name__ if hasattr(fn, "__name__") else "call", result)
        return result
    return inner

@logged
async def double(n):
    return await add(n, n)

await double(4)
=====
summary = f"""
Report
======
{chr(10).join(f'* {r["name"]}: {r["amount"]:.1f}' for r in await query("orders"))}
"""
print(summary)
=====
def safe_div(a, b, /, *, default=None):
    try:
        return a / b
    except ZeroDivisionError:
        return default
print(safe_div(1, 0, default="inf"), safe_div(4, 2))
=====
x = await add(1, 2) if len(await list_tool()) > 2 else await add(3, 4)
y = (await add(x, 1)) * (await add(x, 2))
print(x, y, -await add(1, 1))
=====
a = b = 0
for a, b in zip(range(3), "xyz"): pass
print(a, b, *(c for c in "pq"), sep="|")
=====
print({**{"a": 1}, **dict(b=2)}, [*range(2), *"ab"], (lambda *a, **k: (a, k))(1, z=2))
=====
for item in ["a", "b"]:
    match await price(item):
        case {"value": float(v), "currency": "EUR" | "USD" as cur} if v > 2:
            print(item, v, cur)
        case {"value": v}:
            print("cheap", v)
=====
if True:
    from json import dumps as to_json
print(to_json([1, None, True]))
=====
result = None
for attempt in range(3):
    try:
        result = await lookup("k")
    except (ToolError, TimeoutError) as err:
        print(f"attempt {attempt} failed: {err}")
    else:
        break
else:
    raise RuntimeError("gave up")
result["key"]
=====
answer = (await ask("Go on?")).strip().lower()
if answer not in {"yes", "y"}:
    print("stopped")
    raise SystemExit
print("on")
'''
WRITTEN = [program.strip("\n") for program in PROGRAMS.split("\n=====\n")]


def families() -> Iterator[str]:
    """Give programs of a few shapes, with what varies in each."""
    calls = {
        'await price("fig")': '["value"]',
        'await lookup("k")': '["values"][0]',
        "await add(1, 2)": "",
        'await query("t", limit=2)': '[0]["amount"]',
    }
    for (call, item), shape in product(calls.items(), SHAPES):
        yield shape.format(call=call, bare=call.removeprefix("await "), item=item).strip("\n")
    for module, use in USES.items():
        yield f"import {module}\n\nvalue = {use}\nprint(value)"
        yield f"import {module} as m\n\ndef run():\n    return {use.replace(f'{module}.', 'm.')}\n\nrun()"


SHAPES = [
    "value = {call}\nprint(value)\nvalue",
    "x = ({call}){item}\nprint(f'{{x}} and {{x!r:>10}}')",
    "async def go():\n    return ({call}){item}\n\nprint(await go())",
    "import asyncio\nfound = await asyncio.gather({bare}, {bare})\nprint(len(found))",
    "from asyncio import gather\n\nasync def one(n):\n    return n, {call}\n\nprint(await gather(*[one(n) for n in range(3)]))",
    "results = []\nfor n in range(3):\n    results.append(({call}){item})\nprint(sum(results))",
    "try:\n    got = {call}\nexcept ToolError as e:\n    got = str(e)\nelse:\n    print('fine')\nfinally:\n    print('over')\ngot",
    "values = [({call}){item} for _ in range(2)]\nprint(max(values), values[-1])",
    "values = {{n: ({call}){item} for n in range(2)}}\nprint(sorted(values.items()))",
    "n = 0\nwhile n < 2:\n    last = {call}\n    n += 1\nprint(n, last)",
    "class Holder:\n    def __init__(self):\n        self.seen = []\n\n    async def get(self):\n        self.seen.append(({call}){item})\n        return self\n\nh = await Holder().get()\nprint(h.seen)",
    "pending = {bare}\nprint('asked')\nprint(await pending)",
    "fn = lambda value: value * 2\nprint(fn(({call}){item}))",
    "import json\nprint(json.dumps({{'value': {call}}}))",
    "def outer(value):\n    def inner(n):\n        return value, n\n    return [inner(n) for n in range(2)]\n\nprint(outer({call}))",
    "if ({call}){item} >= 0:\n    said = 'more'\nelse:\n    said = 'less'\nprint(said)",
    "first, second = {call}, {call}\nprint(first == second)",
    "from dataclasses import dataclass, field\n\n@dataclass\nclass Found:\n    value: object\n    notes: list = field(default_factory=list)\n\nf = Found({call})\nf.notes.append('x')\nprint(f.notes)",
    "async def retried(times):\n    for n in range(times):\n        try:\n            return {call}\n        except Exception:\n            if n == times - 1:\n                raise\n\nprint(await retried(3))",
    "print(\n    [\n        x\n        for x in [{call}]\n        if x is not None\n    ]\n)",
    "with_value = ({call}){item}\nmatch with_value:\n    case 0:\n        print('none')\n    case int() | float() as number:\n        print(number)\n    case other:\n        print(other)",
    "cache = {{}}\n\nasync def cached(key):\n    if key not in cache:\n        cache[key] = {call}\n    return cache[key]\n\nawait cached('a')\nawait cached('a')\nlen(cache)",
]  # fmt: skip
USES = {
    "math": "math.floor(math.pi * 2)",
    "json": "json.loads('[1, 2]')",
    "re": "re.sub('a+', 'b', 'caat')",
    "datetime": "datetime.date(2026, 11, 22).isoformat()",
    "random": "random.Random(3).randint(1, 6)",
    "itertools": "list(itertools.chain([1], [2]))",
    "functools": "functools.partial(max, 3)(2)",
    "collections": "collections.Counter('aab')['a']",
    "hashlib": "hashlib.md5(b'x').hexdigest()",
    "base64": "base64.b64encode(b'x')",
    "copy": "copy.deepcopy([[1]])",
    "bisect": "bisect.bisect([1, 3], 2)",
    "decimal": "decimal.Decimal('1.5') * 2",
    "time": "time.time() > 0",
    "csv": "list(csv.reader(['a,b']))",
    "unicodedata": "unicodedata.name('a')",
    "tomllib": "tomllib.loads('a = 1')",
    "binascii": "binascii.hexlify(b'x')",
    "typing": "typing.Any is not None",
    "os.path": "os.path.basename('a/b')",
    "sys": "sys.maxsize > 0",
    "pathlib": "str(pathlib.Path('a') / 'b')",
}
