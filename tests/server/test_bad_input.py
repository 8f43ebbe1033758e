"""
Bad input over HTTP: whatever is sent, a client is told in a problem document, and nothing of anybody's is lost.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import httpx2
import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepengine.server import Caps
from stepengine.server.debug_pages import OPERATIONS as LOOKING
from stepengine.server.routes import OPERATIONS as ALWAYS
from tests.cases import case

from .house import House, ended, events, question_of, started

pytestmark = pytest.mark.leaks_allowed(
    "the server outlasts a test: its threads and what its runs hold are the module's"
)
OPERATIONS = (*ALWAYS, *LOOKING)
ROOT = Path(__file__).resolve().parents[2]
KNOWN = [one for one in OPERATIONS if one.scope is not None]
OF_RUNS = [one for one in KNOWN if "{run}" in one.path]
OURS = [one for one in OPERATIONS if one.path != "/mcp" and one.name != "open_desk"]
"""Those whose refusals are ours: what MCP refuses is an error of JSON-RPC, which its clients read. A desk is a process, so it gets a test of its own."""
MISSING = "0" * 32
JSON = "application/json"


def named(operations: list[Any]) -> Any:
    """
    Repeat a test for each operation; the gate takes every fifth, since all read their requests with the same code.
    """
    chosen = [
        pytest.param(one, id=one.name, marks=[] if n % 5 == 0 else [pytest.mark.deep])
        for n, one in enumerate(operations)
    ]
    return pytest.mark.parametrize("operation", chosen)


def path_for(operation: Any, run: str) -> str:
    parts = {"run": run, "call": "c1", "agent": "asker", "journal": "theirs"}
    return re.sub(r"\{(\w+)\}", lambda part: parts.get(part[1], part[0]), operation.path)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    caps = Caps(body=256 * 1024, body_seconds=0.5, rate=1_000_000, burst=1_000_000, failures=1_000_000)
    with House(tmp_path_factory.mktemp("house"), caps=caps, max_live=10_000, wait_for_answers=0.3).open() as opened:
        yield opened


@pytest.fixture(scope="module")
def document(house: House) -> dict[str, Any]:
    with house.client(None) as client:
        return dict(client.get("/openapi.json").json())


@pytest.fixture(scope="module")
def beside(house: House) -> Iterator[str]:
    """
    Give a run of bob that is under way during all tests, and check its end: it lost nothing.
    """
    with house.client("bob") as bob:
        run = started(bob, prompt="Rome")
        question = question_of(bob, run)
        yield run
        answer = bob.post(f"/runs/{run}/answers", json={"answers": {question: "Monday"}})
        assert 202 == answer.status_code, answer.text
        stands = ended(bob, run)
        assert ("completed", "Rome: Monday") == (stands["status"], stands["output"])


@pytest.fixture(autouse=True)
def no_logged_error(beside: str, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield
    assert [] == [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


def check_refused(house: House, answer: httpx2.Response) -> dict[str, Any]:
    """
    Return the problem document that an answer is; fail where it is none, or says something of the inside.
    """
    told = dict(answer.json())
    assert 400 <= answer.status_code < 500, answer.text
    assert ("application/problem+json", answer.status_code) == (answer.headers["content-type"], told["status"])
    assert {"type", "title", "status", "detail"} <= set(told)
    check_nothing_of_the_inside(house, answer)
    return told


def check_nothing_of_the_inside(house: House, answer: httpx2.Response) -> None:
    text = answer.text
    inside = [str(house.folder), str(ROOT), "Traceback", 'File \\"', "site-packages", ".jsonl", *house.tokens.values()]
    assert [] == [word for word in inside if word in text]


# --- a generator of requests, good and bad --------------------------------------------------------------------------


def in_place(data: bytes, other: bytes) -> bytes:
    """
    Return a body with something else for its 7777, which may be anything; of one that has none only that.
    """
    return data.replace(b"7777", other, 1) if b"7777" in data else other


TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\0", "a\0b", "../../etc/passwd", "\u202e", "𝄞" * 50, "a" * 5_000, "%s%n", "'; DROP TABLE served; --", "#1", "0", "-1"]),
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), TEXTS, st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-3, 3), st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400]),
)  # fmt: skip
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
BREAKS: dict[str, Any] = {
    "cut": lambda data: data[: len(data) // 2],
    "utf-16": lambda data: data.decode().encode("utf-16"),
    "no utf-8": lambda data: data.replace(b'"', b'"\xff\xc0\xed\xa0\x80', 1),
    "half a pair": lambda data: data.replace(b"7777", rb'"\ud83d"', 1) if b"7777" in data else rb'"\ud83d"',
    "twice": lambda data: data[:-1] + b"," + data[1:] if data.startswith(b'{"') else b'{"a":1,"a":2}',
    "NaN": lambda data: in_place(data, b"NaN"),
    "infinite": lambda data: in_place(data, b"1e999"),
    "deep": lambda data: in_place(data, b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
    "too deep": lambda data: in_place(data, b"[" * 201 + b"]" * 201),
    "digits": lambda data: in_place(data, b"9" * 100_000),
    "more": lambda data: data + data,
    "mark": lambda data: b"\xef\xbb\xbf" + data,
    "nothing": lambda data: b"",
}
"""What makes no JSON of JSON, or none that two readers would understand alike."""
TYPES = st.sampled_from([JSON] * 20 + [f"{JSON}; charset=utf-8", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "", "é\x7f", JSON * 500])  # fmt: skip


Fit: TypeAlias = Callable[[dict[str, Any]], st.SearchStrategy[Any]]


def fits(schema: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    """
    Return what gives values of a schema; where it says little, junk is among them.
    """
    if "$ref" in schema:
        return fits(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    if "anyOf" in schema:
        return st.one_of(*[fits(one, document) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            own, needed = schema.get("properties", {}), set(schema.get("required", ()))
            parts = {name: fits(each, document) for name, each in own.items()}
            more = schema.get("additionalProperties")
            if not own:
                return st.dictionaries(TEXTS, fits(more, document) if isinstance(more, dict) else JUNK, max_size=3)
            optional = {name: each for name, each in parts.items() if name not in needed}
            return st.fixed_dictionaries({name: parts[name] for name in needed}, optional=optional)
        case "array":
            return st.lists(fits(schema["items"], document), max_size=3)
        case "string":
            return st.sampled_from(["asker", "quick", "go", "0"]) | TEXTS
        case "integer":
            return st.integers(-2, 10)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return JUNK


@st.composite
def bent(draw: Any, value: Any) -> Any:
    """
    Give a value with one wrong place: another value, a member more, or one less.
    """
    if not isinstance(value, dict) or not value:
        return draw(JUNK)
    match draw(st.sampled_from(["other", "more", "less", "deeper", "root"])):
        case "root":
            return draw(JUNK)
        case "more":
            return {**value, draw(TEXTS): draw(JUNK)}
        case "less":
            gone = draw(st.sampled_from(sorted(value)))
            return {name: each for name, each in value.items() if name != gone}
        case "deeper":
            name = draw(st.sampled_from(sorted(value)))
            return {**value, name: draw(bent(value[name]))}
        case _:
            return {**value, draw(st.sampled_from(sorted(value))): draw(JUNK)}


@st.composite
def bodies(draw: Any, operation: Any, fit: Fit) -> bytes:
    if operation.body is None:
        return draw(st.just(b"") | st.binary(max_size=50))
    value = draw(fit({"$ref": operation.body.__name__}))
    if draw(st.booleans()):
        value = draw(bent(value))
    data = json.dumps(value).encode()
    return BREAKS[draw(st.sampled_from(sorted(BREAKS)))](data) if draw(st.integers(0, 3)) == 0 else data


@st.composite
def requests(draw: Any, operation: Any, fit: Fit, runs: list[str]) -> dict[str, Any]:
    path = operation.path
    for part in re.findall(r"\{(\w+)\}", path):
        known = {
            "run": runs, "agent": ["asker", "quick"], "call": ["c1"], "topic": ["go"], "chat": ["c", "nobody's"], "session": ["s", "a/b"],
            "report": ["tried/one"], "other": runs, "desk": ["0"], "job": ["0"], "journal": ["theirs"],
        }[part]  # fmt: skip
        path = path.replace(
            f"{{{part}}}", quote(draw(st.sampled_from(known) if draw(st.integers(0, 4)) else TEXTS), safe="")
        )
    headers, query = {}, {}
    for one in operation.parameters:
        if draw(st.booleans()):
            said = draw(
                TEXTS | st.sampled_from(["0", "1", "00000000-0", "W10=", "WzFlOTk5LCJcdWQ4MDAiXQ==", "running"])
            )
            if one.location == "query":
                query[one.name] = said
            else:
                # What no client lets through as a header is tried by sockets.
                headers[one.name] = re.sub(r"[^\x20-\x7e]", "?", said).strip().encode("latin-1")
    if operation.body is not None:
        headers["content-type"] = draw(TYPES).encode("latin-1")
    return {"method": operation.method, "url": path, "headers": headers, "params": query, "content": draw(bodies(operation, fit))}  # fmt: skip


def asked(client: httpx2.Client, request: dict[str, Any]) -> httpx2.Response:
    """
    Return an answer; of one that is a stream without an end its beginning.
    """
    with client.stream(**request) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return answer
        answer.read()
        return answer


@pytest.mark.deep
@pytest.mark.spec("studio:SV1")
@named(OURS)
@settings(max_examples=60)
@given(data=st.data())
def test_many_more_requests_are_answered_as_documented_or_as_problems(
    house: House, document: dict[str, Any], operation: Any, data: st.DataObject
) -> None:
    # A function, since hypothesis shows the arguments of a strategy, and the document is long.
    def fit(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        return fits(schema, document)

    own = TARGETS.setdefault(operation.name, [])
    who = data.draw(st.sampled_from(["root", "root", "root", "anna"]))
    with house.client("root") as client:
        if not own:
            own += [started(client, agent) for agent in ("asker", "listener", "booker", "quick")]
    answer = None
    with house.client(who) as client:
        request = data.draw(requests(operation, fit, [*own, MISSING]))
        answer = asked(client, request)

    ways = document["paths"][operation.path][operation.method.lower()]["responses"]
    if answer.status_code < 400:
        assert str(answer.status_code) in ways
        contents = ways[str(answer.status_code)].get("content", {})
        if JSON in contents:
            schema = {**contents[JSON]["schema"], "components": document["components"]}
            jsonschema.Draft202012Validator(schema).validate(answer.json())
    else:
        told = check_refused(house, answer)
        assert str(answer.status_code) in ways or "not_found" in told["type"]


TARGETS: dict[str, list[str]] = {}


# --- who asks, and for whose --------------------------------------------------------------------------------------------


@named(OF_RUNS)
def test_run_of_another_owner_looks_like_a_missing_run(house: House, beside: str, operation: Any) -> None:
    headers = {"content-type": JSON, "last-event-id": "00000000-0"}
    with house.client("anna") as client:
        for data in (b"{}", b"{", b'{"text":"x","at":0,"reason":"x","topic":"go","result":1,"answers":{"q":"x"}}'):
            with case(data):
                told = []
                for run in (beside, MISSING):
                    answer = client.request(operation.method, path_for(operation, run), content=data, headers=headers)
                    assert (403 if operation.scope in ("debug", "admin") else 404) == answer.status_code
                    check_refused(house, answer)
                    told.append((answer.text.replace(run, "RUN"), [name for name in answer.headers if name != "date"]))

                assert told[0] == told[1]


@pytest.mark.spec("studio:SV2")
def test_lists_and_cursors_show_no_run_of_other_owners(house: House, beside: str) -> None:
    with house.client("bob") as bob, house.client("anna") as anna:
        started(bob, "quick")
        cursor = bob.get("/runs", params={"limit": 1}).json()["next"]
        lists = [anna.get("/runs", params=params).json()["runs"] for params in ({"limit": 100}, {"cursor": cursor})]

    assert {"anna"} >= {one["owner"] for shown in lists for one in shown}


# --- sizes, types, paths ------------------------------------------------------------------------------------------------


def test_malformed_json_gets_422_with_issues(house: House) -> None:
    fine = json.dumps({"agent": "quick", "metadata": {"a": 7777}}, separators=(",", ":")).encode()
    with house.client("root") as client:
        assert 202 == client.post("/runs", content=fine, headers={"content-type": JSON}).status_code
        for broken, spoil in BREAKS.items():
            with case(broken):
                answer = client.post("/runs", content=spoil(fine), headers={"content-type": JSON})
                assert 422 == answer.status_code
                assert check_refused(house, answer)["issues"]


@pytest.mark.parametrize("action", ["fork", "undo"])
def test_fork_or_undo_at_invalid_place_gets_422_without_paths(house: House, action: str) -> None:
    with house.client("root") as client:
        run = ended(client, started(client, "quick"))["run_id"]
        for at in (-3, 7, 10**30, "x", "#9", "4.1#0", "", "\0", "../0", True, 0.5, None):
            with case(at):
                answer = client.post(f"/runs/{run}/{action}", json={"at": at})
                assert 422 == answer.status_code
                check_refused(house, answer)


def test_invalid_topic_gets_422(house: House) -> None:
    with house.client("root") as client:
        heard = started(client, "listener")
        for topic in ("", "\0", "a b", "\u0663", "a" * 201, "go\n", "go?", 7, None):
            with case(topic):
                answer = client.post(f"/runs/{heard}/messages", json={"topic": topic, "value": 1})
                assert 422 == answer.status_code
                assert check_refused(house, answer)["issues"][0].startswith("topic: ")


KINDS = ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", "text/json"]  # fmt: skip


def test_wrong_content_type_gets_415(house: House) -> None:
    with house.client("root") as client:
        for kind in KINDS:
            with case(kind):
                answer = client.post("/runs", content=b'{"agent":"quick"}', headers={"content-type": kind})
                assert 415 == answer.status_code
                check_refused(house, answer)


PATHS = [
    "/", "//", "/runs/", "//runs", "/runs//events", "/runs/%00", "/runs/%ff%fe", "/runs/%ed%a0%80", "/runs/..%2f..%2fetc%2fpasswd",
    "/runs/../tokens.json", "/runs/%2e%2e", f"/runs/{'a' * 30_000}", f"/{'a/' * 10_000}", "/agents/%00", "/agents/..%2fquick", "/RUNS",
    "/runs;x", "/openapi.json/", "/health/", "/.serving.db", "/tokens.json", "/docs", "/metrics.json", "/runs/\u0663", "/runs/%",
    "/runs/%zz",
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
def test_unknown_path_gets_404_or_405(house: House) -> None:
    with house.client("root") as client:
        for path in PATHS:
            for method in ("GET", "POST", "DELETE"):
                with case(path, method):
                    answer = client.request(method, f"{house.url}{path}")
                    assert answer.status_code in (404, 405), answer.text
                    check_refused(house, answer)


CURSORS = [
    "[]",
    "{}",
    "null",
    '[1.5, "\\ud800"]',
    '[NaN, "x"]',
    '[1e999, "x"]',
    "[1.5, 2, 3]",
    f'[{10**330}, "x"]',
    '["1.5", "x"]',
    "[" * 300,
]
QUERIES = {
    "cursor": ["x", "====", "\u0663", "\0", "a" * 30_000, *[b64encode(one.encode()).decode() for one in CURSORS]],
    "limit": ["0", "-1", "101", "1e2", "x", "", "\u0663", "9" * 5_000, "1.0", " 1", "0x10", "\0"],
    "status": ["x", "completed,x", "\0", "COMPLETED", "," * 3 + "a"],
    "details": ["x", "2", "", "true", "\u0661"],
}  # fmt: skip


@pytest.mark.parametrize("name", QUERIES)
def test_invalid_query_parameter_gets_422_with_its_name(house: House, name: str) -> None:
    lists = ["/runs"] if name in ("status", "details") else ["/runs", "/sessions", "/reports"]
    with house.client() as client:
        for value in QUERIES[name]:
            for path in lists:
                with case(value, path):
                    answer = client.get(path, params={"agent": "nobody", name: value})
                    told = check_refused(house, answer)
                    assert 422 == answer.status_code
                    assert told["issues"][0].startswith(f"{name}: ")


@pytest.mark.spec("studio:SV4")
def test_other_owners_data_needs_the_admin_scope(house: House) -> None:
    ways = [("GET", "/runs"), ("GET", "/sessions"), ("GET", "/sessions/s"), ("DELETE", "/sessions/s")]
    with house.client("bob") as bob, house.client("anna") as anna, house.client("root") as root:
        ended(bob, bob.post("/runs", json={"agent": "quick", "session_id": "s"}).json()["run_id"])
        for method, path in ways:
            with case(method, path):
                for owner in ("bob", "nobody", "root", "\0", "a" * 5_000):
                    told = anna.request(method, path, params={"owner": owner})
                    assert 403 == told.status_code
                    check_refused(house, told)
                own = anna.request(method, path, params={"owner": "anna"})
                assert (404 if path == "/sessions/s" else 200) == own.status_code
                assert root.request(method, path, params={"owner": "bob"}).status_code in (200, 204)
                assert root.request(method, path, params={"owner": "nobody"}).status_code in (200, 404)


ENTRIES = [
    "", "x", "%00", "..%2f..%2fetc%2fpasswd", "../tokens.json", "tried", "tried/one/", "/tried/one", "tried//one", "tried/../tried/one",
    "a" * 5_000, "%ff%fe", "\u202e", "tried/one/results.json", "'; DROP TABLE served; --",
]  # fmt: skip


@pytest.mark.parametrize("list_", ["sessions", "reports"])
def test_unknown_session_or_report_gets_404(house: House, list_: str) -> None:
    with house.client("root") as client:
        for name in ENTRIES:
            with case(name):
                answer = client.get(f"{house.url}/{list_}/{name}")
                assert 404 == answer.status_code
                check_refused(house, answer)


EVENT_IDS = [
    "x", "-1", "00000000-", "00000000-99999999999999999999", "\0", "00000000-\u0663", "a" * 30_000, "5d0c2a17-0~:0", "5d0c2a17-0~:x:tool_finished",
    "5d0c2a17-0~a:0:tool_finished", "5d0c2a17-0~:0:text_delta", "~", "5d0c2a17-0~,", f"5d0c2a17-0~:{'9' * 5000}:tool_finished",
    "5d0c2a17-0~" + ",".join(["3:0:tool_finished"] * 1000),
]  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
def test_invalid_last_event_id_gets_422(house: House, beside: str) -> None:
    with house.client("bob") as client:
        done = ended(client, started(client, "quick"))["run_id"]
        assert 200 == client.get(f"/runs/{done}/events", headers={"last-event-id": "5d0c2a17-0~"}).status_code
        for after in EVENT_IDS:
            given = re.sub(r"[\0\r\n]", "?", after).encode("utf-8")
            for run in (beside, done):
                with case(after, run == done):
                    by_query = client.get(f"/runs/{run}/events", params={"after": after})
                    by_header = client.get(f"/runs/{run}/events", headers={"last-event-id": given})
                    assert [422, 422] == [by_query.status_code, by_header.status_code]
                    for answer in (by_query, by_header):
                        assert "after" in check_refused(house, answer)["issues"][0]


def test_invalid_idempotency_key_starts_no_run(house: House) -> None:
    with house.client() as client:
        before = client.get("/runs").json()
        for key in (b"a" * 256, b"", b"a\tb"):
            with case(key):
                answer = client.post("/runs", json={"agent": "quick"}, headers={"idempotency-key": key})
                assert 422 == answer.status_code
                check_refused(house, answer)
                assert before == client.get("/runs").json()
        answer = client.post("/runs", json={"agent": "quick"}, headers={"idempotency-key": b"\xff\xfe"})
        assert 202 == answer.status_code, "text of Latin-1"


# --- over sockets: cut, slow, many --------------------------------------------------------------------------------------


def connected(house: House, data: bytes = b"") -> socket.socket:
    """
    Return a connection over which some bytes were sent.
    """
    made = socket.socket()
    made.settimeout(20)
    # Little fits in between, so that whoever does not read is waited for.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    made.connect(("127.0.0.1", house.port))
    made.sendall(data)
    return made


def head(house: House, line: str, who: str = "anna", *more: str) -> bytes:
    lines = [f"{line} HTTP/1.1", f"Host: 127.0.0.1:{house.port}", f"Authorization: Bearer {house.tokens[who]}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def read(made: socket.socket) -> bytes:
    """
    Return all that comes until the server ends the connection.
    """
    got = b""
    while part := made.recv(65_536):
        got += part
    return got


@pytest.mark.deep
@pytest.mark.smoke
def test_stalled_readers_block_no_run_and_miss_no_event_unreported(house: House) -> None:
    with house.client("anna") as client, ExitStack() as stack:
        run = started(client, "talker")
        # By HTTP/1.0 what comes is the text, and not pieces of it.
        ask = head(house, f"GET /runs/{run}/events").replace(b"HTTP/1.1", b"HTTP/1.0")
        slow = [stack.enter_context(connected(house, ask)) for _ in range(5)]
        assert "completed" == ended(client, run)["status"]
        shown = [events(client, run), *[events_of(read(one)) for one in slow]]

    for seen in shown:
        numbers = [one["data"]["number"] for one in seen if one["type"] == "notification"]
        assert sorted(set(numbers)) == numbers
        assert "run_finished" == seen[-1]["type"]
        assert 2_000 == len(numbers) or "events_dropped" in {one["type"] for one in seen}


def events_of(told: bytes) -> list[dict[str, Any]]:
    lines = told.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.deep
@pytest.mark.smoke
def test_reader_beyond_the_limit_gets_429(house: House) -> None:
    with house.client("anna") as client, ExitStack() as stack:
        run = started(client, "booker")
        for _ in range(100):
            one = stack.enter_context(connected(house, head(house, f"GET /runs/{run}/events")))
            assert one.recv(12).startswith(b"HTTP/1.1 200")
        answer = client.get(f"/runs/{run}/events")
        epoch = client.get(f"/runs/{run}").json()["epoch"]
        again = client.get(f"/runs/{run}/events", headers={"last-event-id": f"{epoch}-0"})

    for one in (answer, again):
        assert (429, "5") == (one.status_code, one.headers["retry-after"])
        assert "urn:stepengine:problem:too_many_readers" == check_refused(house, one)["type"]


IMAGES = [
    ("image/jpg", b"\xff\xd8\xff\xe0", ""),
    ("", b"\x89PNG\r\n\x1a\n", ""),
    ("IMAGE/PNG; charset=binary", b"unknown", ""),
    ("image/png", b"%PDF-1.7", "application/pdf"),
    ("image/bmp", b"BM", "image/bmp"),
]
"""The stated type, the bytes, and the type that the refusal names; empty if accepted."""


def test_image_type_is_detected_from_its_bytes(house: House) -> None:
    with house.client("bob") as bob:
        for stated, data, refused in IMAGES:
            with case(stated, data):
                picture = {"mime_type": stated, "data": b64encode(data).decode()}
                answer = bob.post("/runs", json={"agent": "asker", "prompt": "hi", "images": [picture]})
                assert (422 if refused else 202) == answer.status_code, answer.text
                assert not refused or "accepted types: image/png" in answer.text
                assert refused in answer.text


@pytest.mark.deep
@pytest.mark.smoke
@given(st.integers(0, 10**30), st.integers(0, 30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_list_limit_is_a_hundred_however_it_is_written(house: House, limit: int, zeros: int) -> None:
    with house.client() as client:
        answer = client.get("/runs", params={"limit": f"{'0' * zeros}{limit}"})

    assert answer.status_code == 422 or (200 == answer.status_code and 1 <= limit <= 100)
