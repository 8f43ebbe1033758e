"""
Webhooks: events that other services send to runs, with their own libraries, and what a server tells others of its runs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from stepengine import AgentDefinition, Ask, Engine, Parallel
from stepengine.errors import DataError, DefinitionError
from stepengine.server import Tokens, Webhooks, app, sign, verify
from stepengine.server import webhooks as own
from stepengine.server.ledger import Ledger
from stepengine.server.webhooks import MAX_SIGNATURES, TOLERANCE, Topic
from stepengine.testing import ScriptedModel
from tests.cases import case
from tests.servers import Quiet, served
from tests.waits import HANG_SECONDS, until, until_async

from .house import AGENTS, House, ended, question_of, started
from .served import Served

COUNTERPARTS = (("pypi:standardwebhooks", "1.1.0", "works", "signatures of received and sent webhooks"),)
pytestmark = pytest.mark.leaks_allowed(
    "the server outlasts a test: its threads and what its runs hold are the module's"
)
FEW = [agent for agent in AGENTS if agent.id in ("asker", "quick")]
KEY, OTHER_KEY = "sixteen characters and more", "another key of these characters"
STANDARD_KEY = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()
FILE = {
    "topics": {
        "go": {"secrets": [KEY, OTHER_KEY, STANDARD_KEY]},
        "stripe": {"secrets": [KEY], "run": "/data/object/metadata/run"},
    }
}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    webhooks = Webhooks.parse(json.dumps(FILE).encode(), "webhooks.json")
    with House(tmp_path_factory.mktemp("house"), webhooks=webhooks).open() as opened:
        yield opened


def numbered(value: object) -> str:
    """
    Return the name of a case whose text no report could show.
    """
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def sent(
    house: House, path: str, body: bytes, *, secret: str = KEY, t: float | None = None, **headers: str
) -> httpx2.Response:
    """
    Send an event as somebody who has a secret and no token.
    """
    signed = headers or {"stepengine-signature": sign(secret, body, int(time.time() if t is None else t))}
    with house.client(None) as client:
        return client.post(path, content=body, headers=signed)


# --- signatures -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV13")
def test_signature_is_hmac_sha256_over_time_and_body() -> None:
    made = hmac.new(b"secret", b"1700000000." + b'{"a":1}', hashlib.sha256).hexdigest()

    assert f"t=1700000000,v1={made}" == sign("secret", b'{"a":1}', 1_700_000_000)


@given(st.binary(max_size=200), st.text(min_size=1, max_size=20), st.integers(0, 10**11), st.integers(-400, 400))
@pytest.mark.spec("studio:SV13")
def test_signature_verifies_within_five_minutes(body: bytes, secret: str, t: int, late: int) -> None:
    header = sign([secret, "another"], body, t)

    assert (abs(late) <= TOLERANCE) == verify(secret, body, header, t + late)
    assert not verify(f"{secret}!", body, sign(secret, body, t), t)
    assert not verify(secret, body + b" ", header, t)


@pytest.mark.spec("studio:SV13")
def test_old_and_new_secrets_verify_during_rotation() -> None:
    both = sign(["old", "new"], b"{}", 1_000)

    assert [True, True, False] == [verify(known, b"{}", both, 1_000) for known in ("old", "new", "none")]
    assert verify(["new", "newer"], b"{}", sign("new", b"{}", 1_000), 1_000)


@pytest.mark.parametrize(
    "header",
    [
        "", "t=1000", "v1={v}", "t=1000,t=1000,v1={v}", "t=1e3,v1={v}", "t=+1000,v1={v}", "t=-1000,v1={v}", "t= 1000,v1={v}",
        "t=\u0661\u0660\u0660\u0660,v1={v}", "t=1000.0,v1={v}", "t=" + "0" * 20 + "1000,v1={v}", "t=1000,v0={v}", "t=1000,v1={v}x", "t=1000,v1=",
        "t=1000,v1=\udcff", "t=nan,v1={v}", "t=1000,v1={v}" + ",v1=" * MAX_SIGNATURES, "t=1000,v1={v}" + "," * 5_000,
    ],
    ids=numbered,
)  # fmt: skip
@pytest.mark.spec("studio:SV13")
def test_malformed_signature_header_verifies_nothing(header: str) -> None:
    right = sign("secret", b"{}", 1_000).partition("v1=")[2]

    assert verify("secret", b"{}", f"t=1000,v1={right}", 1_000)
    assert not verify("secret", b"{}", header.replace("{v}", right), 1_000)


# --- events that come in --------------------------------------------------------------------------------------------


@pytest.mark.spec("studio:SV13")
def test_signed_event_reaches_the_receiving_run_once(house: House) -> None:
    with house.client() as client:
        run = started(client, "listener")
        body = json.dumps({"id": "evt_1", "paid": 35}).encode()
        first = sent(house, f"/hooks/go/{run}", body)
        view = ended(client, run)
        late = sent(house, f"/hooks/go/{run}", body, secret=OTHER_KEY)

    assert (202, {"run_id": run, "is_new": True}) == (first.status_code, first.json())
    assert {"heard": {"id": "evt_1", "paid": 35}} == view["output"]
    assert (409, "urn:stepengine:problem:ended") == (late.status_code, late.json()["type"])


@pytest.mark.spec("studio:SV13")
def test_owner_cannot_forge_a_signed_event(house: House) -> None:
    with house.client() as client, house.client("root") as root:
        run = started(client, "listener")
        until(lambda: client.get(f"/runs/{run}").json()["status"] == "suspended")
        message = {"topic": "go", "value": {"paid": True}}
        forged = client.post(f"/runs/{run}/messages", json=message)
        other = client.post(f"/runs/{run}/messages", json={**message, "topic": "other"})
        by_admin = root.post(f"/runs/{run}/messages", json=message)

    assert [(403, "admin"), 202, 202] == [
        (forged.status_code, forged.json()["scope"]), other.status_code, by_admin.status_code
    ]  # fmt: skip


@pytest.mark.spec("studio:SV13")
def test_repeated_event_is_stored_once(house: House) -> None:
    with house.client() as client:
        run = started(client, "asker")
        question_of(client, run)
        body = b'{"id": "evt_2", "paid": 35}'
        told = [sent(house, f"/hooks/go/{run}", body) for _ in range(3)]
        other = sent(house, f"/hooks/go/{run}", b'{"id": "evt_2", "paid": 36}')
        nameless = [sent(house, f"/hooks/go/{run}", body) for body in (b"[1]", b"[1]", b"[2]")]

    assert [True, False, False] == [one.json()["is_new"] for one in told]
    assert 422 == other.status_code
    assert [True, False, True] == [one.json()["is_new"] for one in nameless]


@pytest.mark.spec("studio:SV13")
def test_event_finds_its_run_by_the_configured_pointer(house: House) -> None:
    with house.client() as client:
        run = started(client, "asker")
        question_of(client, run)
    body = json.dumps({"id": "evt_3", "data": {"object": {"metadata": {"run": run}}}}).encode()
    signed = {"stripe-signature": sign(KEY, body, int(time.time()))}
    taken = sent(house, "/hooks/stripe", body, **signed)
    of_none = sent(house, "/hooks/stripe", b'{"id": "evt_4", "data": {"object": {"metadata": []}}}')
    nowhere = sent(house, "/hooks/go", b'{"id": "evt_5"}')

    assert (202, run) == (taken.status_code, taken.json()["run_id"])
    assert (204, b"") == (of_none.status_code, of_none.content)
    assert (404, "no_such_run") == (nowhere.status_code, nowhere.json()["type"].rpartition(":")[2])


@pytest.mark.spec("studio:SV13")
def test_standardwebhooks_signatures_are_accepted(house: House) -> None:
    library, now, body = Webhook(STANDARD_KEY), datetime.now(UTC), '{"type": "order.paid", "data": {"eur": 35}}'

    def signed(at: datetime, id_: str = "msg_1", key: Webhook = library) -> dict[str, str]:
        signature = key.sign(msg_id=id_, timestamp=at, data=body)
        return {"webhook-id": id_, "webhook-timestamp": str(int(at.timestamp())), "webhook-signature": signature}

    with house.client() as client:
        run = started(client, "asker")
        question_of(client, run)
        path, data = f"/hooks/go/{run}", body.encode()
        first, again = [sent(house, path, data, **signed(now)) for _ in range(2)]
        other = sent(house, path, data, **signed(now, "msg_2"))
        rotated = signed(now, "msg_3", Webhook(base64.b64encode(b"some other key of theirs").decode()))
        rotated["webhook-signature"] += " v1a,abc " + signed(now, "msg_3")["webhook-signature"]
        both = sent(house, path, data, **rotated)
        refused = [
            sent(house, path, data, **signed(now - timedelta(seconds=TOLERANCE + 5))),
            sent(house, path, data, **signed(now + timedelta(seconds=TOLERANCE + 60))),
            sent(house, path, data, **{**signed(now), "webhook-id": "msg_9"}),
            sent(house, path, data + b" ", **signed(now)),
            sent(house, path, data, **{**signed(now), "webhook-timestamp": "now"}),
            sent(house, path, data, **{**signed(now), "webhook-signature": "v1," + " v1," * 2_000}),
        ]

    assert [True, False, True, True] == [one.json()["is_new"] for one in (first, again, other, both)]
    assert [401] * len(refused) == [one.status_code for one in refused]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV13")
def test_unsigned_requests_get_identical_answers_for_any_address(house: House) -> None:
    with house.client() as client:
        done, waits, asks = started(client, "quick"), started(client, "listener"), started(client, "asker")
        ended(client, done)
        question_of(client, asks)
    body, now = b'{"id": "evt_6"}', time.time()
    addresses = [
        f"/hooks/{topic}/{run}"
        for topic in ("go", "stripe", "nothing", "%ff", "x" * 5_000)
        for run in (done, waits, asks, "0" * 32, "%2e%2e", "\u00e4")
    ]
    signatures = (
        {"x-nothing": "1"},
        {"stepengine-signature": sign("a wrong one that is long", body, int(now))},
        {"stepengine-signature": sign(KEY, body, int(now) - TOLERANCE - 10)},
        {"stepengine-signature": sign(KEY, body, int(now) + TOLERANCE + 60)},
        {"stepengine-signature": sign(KEY, body + b" ", int(now))},
        {"stepengine-signature": "\u0000".encode().hex() * 3_000},
    )
    with house.client(None) as client:
        told = [client.post(path, content=body, headers=one) for path in addresses for one in signatures]
    told += [sent(house, "/hooks/stripe", body, **{"x-nothing": "1"}), sent(house, "/hooks/none", body, **{"x-n": "1"})]
    seen = {(one.status_code, one.content, tuple(n for n in one.headers if n != "date")) for one in told}

    assert 182 == len(told)
    assert 1 == len(seen), seen
    assert 401 == told[0].status_code
    with house.client() as client:
        assert client.get(f"/runs/{waits}").json()["status"] in ("running", "suspended")


NO_JSON = [
    b"", b"{", b"\xff\xfe{}", '{"id": "1"}'.encode("utf-16"), b'{"a":NaN}', b'{"id":1,"id":2}', b"[" * 100_000, b'{"a":"\\ud800"}', b"a=1&b=2",
]  # fmt: skip


@pytest.mark.spec("studio:SV13")
def test_signed_body_that_is_no_json_gets_422(house: House) -> None:
    with house.client() as client:
        run = started(client, "listener")
        until(lambda: client.get(f"/runs/{run}").json()["phase"])
        for body in NO_JSON:
            with case(body):
                answer = sent(house, f"/hooks/go/{run}", body)
                assert 422 == answer.status_code, answer.text
                assert "application/problem+json" == answer.headers["content-type"]
                assert client.get(f"/runs/{run}").json()["status"] in ("running", "suspended")


@pytest.mark.spec("studio:SV13")
def test_oversized_webhook_body_gets_413(house: House) -> None:
    body = b'"' + b"a" * (1024 * 1024) + b'"'

    assert 413 == sent(house, "/hooks/go/nothing", body).status_code
    assert 413 == sent(house, "/hooks/nothing/nothing", body, **{"x-nothing": "1"}).status_code


@pytest.mark.spec("studio:SV13")
def test_two_signature_headers_are_rejected(house: House) -> None:
    body, now = b"{}", int(time.time())
    right = ("stepengine-signature", sign(KEY, body, now))
    with house.client(None) as client:
        told = client.post("/hooks/stripe", content=body, headers=[right, ("stepengine-signature", "t=1,v1=a")])
        alone = client.post("/hooks/stripe", content=body, headers=[right])

    assert [401, 204] == [told.status_code, alone.status_code]


@given(
    st.dictionaries(
        st.sampled_from(
            ["stepengine-signature", "stripe-signature", "webhook-id", "webhook-timestamp", "webhook-signature"]
        ),
        st.lists(st.text(max_size=50), min_size=1, max_size=2),
    ),
    st.binary(max_size=50),
)
def test_any_header_text_signs_nothing_without_failing(headers: dict[str, list[str]], body: bytes) -> None:
    topic = Topic.model_validate({"secrets": (KEY, STANDARD_KEY, "whsec_no base64 at all!")})

    assert topic.verify_and_get_message_id(headers, body, time.time()) is None


# --- the file -------------------------------------------------------------------------------------------------------

OUT = {"url": "https://example.com/hook", "secrets": [KEY], "public_url": "https://runs.example.com"}


def written(folder: Path, content: object, mode: int = 0o600) -> Path:
    path = folder / "webhooks.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    path.chmod(mode)
    return path


@pytest.mark.spec("studio:SV13")
def test_linked_missing_or_shared_webhook_file_raises(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="may be read or written by others"):
        Webhooks.load(written(tmp_path, FILE, 0o640))
    there = written(tmp_path, FILE)
    (tmp_path / "link.json").symlink_to(there)
    with pytest.raises(DefinitionError):
        Webhooks.load(tmp_path / "link.json")
    with pytest.raises(DefinitionError, match="there is no"):
        Webhooks.load(tmp_path / "none.json")
    with pytest.raises(DefinitionError, match="regular file"):
        Webhooks.load(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(DefinitionError, match="others may write to the folder"):
        Webhooks.load(there)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "[" * 100_000, {"topics": {"go": {}}}, {"topics": {"go": {"secrets": []}}}, {"topics": {"go": {"secrets": ["short-XYZZY"]}}},
        {"topics": {"a/b": {"secrets": ["XYZZY" * 9]}}}, {"topics": {"go": {"secrets": ["XYZZY" * 9], "run": "data"}}},
        {"topics": {"go": {"secrets": ["XYZZY" * 9], "more": 1}}}, {"topics": {"go": {"secrets": "XYZZY" * 9}}},
        {"out": {**OUT, "url": "ftp://example.com/XYZZY"}}, {"out": {**OUT, "url": "https://XYZZY:XYZZY@example.com"}},
        {"out": {**OUT, "url": "https://"}}, {"out": {**OUT, "events": []}}, {"out": {**OUT, "events": ["started"]}},
        {"out": {**OUT, "public_url": None}}, {"out": {**OUT, "url": "https://example.com/\nXYZZY"}}, '{"topics": {}, "topics": {}}', {"XYZZY": 1},
    ],
    ids=numbered,
)  # fmt: skip
@pytest.mark.spec("studio:SV13")
def test_invalid_webhook_file_raises_without_showing_secrets(tmp_path: Path, content: object) -> None:
    with pytest.raises(DataError, match="not a file of webhooks") as raised:
        Webhooks.load(written(tmp_path, content))

    shown = str(raised.value).replace("XYZZY: Extra inputs", "")  # the name of a field
    assert "XYZZY" not in shown
    assert KEY not in shown


# --- what goes out --------------------------------------------------------------------------------------------------


class Listener:
    """
    A service that is told of questions: keeps what it was sent, and answers what a test says.

    Attributes:
        statuses: What it answers, one after the other; then always 204.
        got: Headers and bodies.
    """

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.headers: dict[str, str] = {}
        self.body = b""
        self.url = ""

    def told(self) -> list[dict[str, Any]]:
        """
        Return what it was told, each message of which is signed.
        """
        for headers, body in list(self.got):
            assert verify(STANDARD_KEY, body, headers["stepengine-signature"], time.time())
            Webhook(STANDARD_KEY).verify(body, headers)
        return [json.loads(body) for _, body in list(self.got)]

    def file(self, **more: object) -> Webhooks:
        out = {"url": self.url, "secrets": [STANDARD_KEY], "public_url": "https://runs.example.com/agents/", **more}
        return Webhooks.parse(json.dumps({"out": out}).encode(), "webhooks.json")


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()

    class Handler(Quiet):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            body = self.rfile.read(length)
            self.close_connection = True
            if len(body) < length:
                return  # the server was stopped in the middle of it
            made.got.append(({k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(made.statuses.pop(0) if made.statuses else 204)
            for name, value in made.headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # nobody reads it
                self.wfile.write(made.body)

    with served(Handler) as address:
        made.url = f"{address}/told"
        yield made


def set_sender_defaults(monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    defaults = own.WebhookSender.__init__.__kwdefaults__
    monkeypatch.setattr(own.WebhookSender.__init__, "__kwdefaults__", {**defaults, **options})


def retries_after(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    monkeypatch.setattr(own, "RETRIES", seconds)


def waiting(house: House, client: httpx2.Client) -> str:
    """
    Return a run that is suspended with a question.
    """
    run = started(client)
    until(lambda: client.get(f"/runs/{run}").json()["status"] == "suspended")
    return run


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF19")
def test_question_and_end_are_sent_signed_and_once(tmp_path: Path, listener: Listener) -> None:
    with House(tmp_path, webhooks=listener.file(), wait_for_answers=0.0).open() as house, house.client() as client:
        run = waiting(house, client)
        until(lambda: len(listener.got) == 1)
        (asked,) = listener.told()
        path = asked["answer_url"].removeprefix("https://runs.example.com/agents")
        assert 202 == client.post(path, json={"answers": {asked["question"]["id"]: "Friday"}}).status_code
        until(lambda: len(listener.got) == 2)
        # A second message of the first run would come before those of a run that begins now.
        quick = started(client, "quick")
        until(lambda: quick in str(listener.got))
        told = listener.told()

    assert {"id": f"{run}:q0", "type": "question", "run_id": run, "agent_id": "asker"} == {
        name: asked[name] for name in ("id", "type", "run_id", "agent_id")
    }
    assert "On which day?" == asked["question"]["text"]
    assert f"https://runs.example.com/agents/runs/{run}/answers" == asked["answer_url"]
    assert [(f"{run}:q0", "question"), (f"{run}:completed", "finished"), (f"{quick}:completed", "finished")] == [
        (one["id"], one["type"]) for one in told
    ]
    assert f"https://runs.example.com/agents/runs/{run}" == told[1]["run_url"]


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF19")
def test_open_question_is_not_sent_again_after_another_suspension(tmp_path: Path, listener: Listener) -> None:
    with House(tmp_path, webhooks=listener.file(), wait_for_answers=0.0).open() as house, house.client() as client:
        run = waiting(house, client)
        until(lambda: len(listener.got) == 1)
        ledger = Ledger(tmp_path / "runs")
        look = "SELECT told.changed FROM served_told AS told JOIN served USING (run) WHERE is_told = 1 AND told.changed = served.changed AND run = ?"
        (before,) = until(lambda: ledger.read(look, (run,)))
        # It wakes, finds nothing that it waits for, and lies down with its question.
        assert 202 == client.post(f"/runs/{run}/messages", json={"topic": "go", "value": 1}).status_code
        until(lambda: [one for one in ledger.read(look, (run,)) if one != before])
        ledger.close()

    assert [f"{run}:q0"] == [one["id"] for one in listener.told()]


@pytest.mark.spec("interfaces:IF19")
@pytest.mark.deep
def test_failed_webhook_is_retried_under_the_same_id(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    retries_after(monkeypatch, 0.1, 0.1, 0.1)
    listener.statuses, listener.headers, listener.body = [500, 307, 404], {"location": listener.url}, b"x" * 4_000_000
    with House(tmp_path, webhooks=listener.file(), wait_for_answers=0.0).open() as house, house.client() as client:
        run = waiting(house, client)
        until(lambda: len(listener.got) == 4)
        started(client, "quick")
        until(lambda: len(listener.got) == 5)
        with house.client("root") as root:
            numbers = root.get("/metrics").text

    ids = [one["id"] for one in listener.told()]
    assert [f"{run}:q0"] * 4 == ids[:4]
    assert f"{run}:q0" != ids[4]
    assert [
        "the response has the status 500",
        "the response has the status 307",
        "the response has the status 404",
    ] == [one.getMessage().rpartition(": ")[2] for one in caplog.records if "to 127.0.0.1 failed" in one.getMessage()]
    assert 'stepengine_webhooks_sent_total{outcome="failed",type="question"} 3.0' in numbers
    assert 'stepengine_webhooks_sent_total{outcome="taken",type="question"} 1.0' in numbers


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF19")
def test_undelivered_webhook_is_sent_at_the_next_start(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    retries_after(monkeypatch)
    with House(tmp_path, wait_for_answers=0.0).open() as house, house.client() as client:
        ended(client, started(client, "quick"))
        run = waiting(house, client)
    (tmp_path / "tokens.json").unlink()
    listener.statuses = [503]
    with House(tmp_path, webhooks=listener.file(), wait_for_answers=0.0).open():
        until(lambda: "the server sends it again at the next start" in caplog.text)
    (tmp_path / "tokens.json").unlink()
    with House(tmp_path, webhooks=listener.file(), wait_for_answers=0.0).open():
        until(lambda: len(listener.got) == 2)
        receipts = Ledger(tmp_path / "runs")
        until(lambda: receipts.read("SELECT message FROM served_receipts"))
        receipts.close()
    (tmp_path / "tokens.json").unlink()
    with House(tmp_path, webhooks=listener.file(), wait_for_answers=0.0).open() as house, house.client() as client:
        until(lambda: started(client, "quick") and len(listener.got) > 2)

    told = [one["id"] for one in listener.told()]
    assert [f"{run}:q0"] * 2 == told[:2]
    assert f"{run}:q0" not in told[2:]
    assert {"finished"} == {one["type"] for one in listener.told()[2:]}


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF19")
async def test_one_of_two_servers_sends_each_webhook(tmp_path: Path, listener: Listener) -> None:
    webhooks, tokens = listener.file(), tmp_path / "tokens.json"
    headers = {"authorization": f"Bearer {Tokens.open(tokens).add('anna', ['run', 'read'])}"}
    options: dict[str, Any] = {
        "runs": tmp_path / "runs",
        "tokens": tokens,
        "webhooks": webhooks,
        "wait_for_answers": 0.0,
    }
    async with Engine(FEW) as one, Engine(FEW) as other:
        first, second = app(one, **options), app(other, **options)
        transport = httpx2.ASGITransport(app=first)
        async with (
            first.lifespan(),
            second.lifespan(),
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client,
        ):
            runs = [(await client.post("/runs", json={"agent": "quick"})).json()["run_id"] for _ in range(40)]
            await asyncio.to_thread(until, lambda: len(listener.got) >= len(runs))
            # Both have looked again by then.
            last = (await client.post("/runs", json={"agent": "quick"})).json()["run_id"]
            await asyncio.to_thread(until, lambda: last in str(listener.got))

    assert sorted(f"{run}:completed" for run in [*runs, last]) == sorted(one["id"] for one in listener.told())


def asking_three(ctx: Any) -> Any:
    return (yield from Parallel(Ask("Who?"), Ask("Where?"), Ask("When?")))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF19")
async def test_no_other_server_sends_while_a_slow_service_receives(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three questions takes 9 s of a clock; during the third, the other server sends the ends of two runs."""
    told: list[str] = []
    late = 0.0
    monkeypatch.setattr(own, "time", SimpleNamespace(time=lambda: time.time() + late, monotonic=time.monotonic))
    monkeypatch.setattr(own, "POST_SECONDS", HANG_SECONDS)

    async def receive(request: httpx2.Request) -> httpx2.Response:
        nonlocal late
        message = json.loads(request.content)
        told.append(message["id"])
        if message["type"] == "question":
            late += 9.0
            for _ in range(2 if len(told) == 3 else 0):
                quick = (await client.post("/runs", json={"agent": "quick"})).json()["run_id"]
                await until_async(lambda id_=f"{quick}:completed": id_ in told)
        return httpx2.Response(204)

    set_sender_defaults(monkeypatch, transport=httpx2.MockTransport(receive))
    tokens = Tokens.open(tmp_path / "tokens.json")
    headers = {"authorization": f"Bearer {tokens.add('anna', ['run', 'read'])}"}
    options: dict[str, Any] = {"runs": tmp_path / "runs", "tokens": tokens, "webhooks": listener.file()}
    agents = [*FEW, AgentDefinition("three", handle_steps=asking_three)]
    async with Engine(agents) as one, Engine(agents) as other:
        first, second = [app(engine, wait_for_answers=0.0, **options) for engine in (one, other)]
        transport = httpx2.ASGITransport(app=first)
        async with (
            httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client,
            first.lifespan(),
            second.lifespan(),
        ):
            await client.post("/runs", json={"agent": "three"})
            await until_async(lambda: len(told) >= 5)

    assert ["q0", "q1", "q2", "completed", "completed"] == [id_.partition(":")[2] for id_ in told]


@pytest.mark.spec("interfaces:IF19")
@pytest.mark.deep
async def test_webhook_is_sent_after_a_kill_before_delivery(tmp_path: Path, listener: Listener) -> None:
    out = {"url": listener.url, "secrets": [STANDARD_KEY], "public_url": "http://127.0.0.1"}
    hooks = written(tmp_path, {**FILE, "out": out})
    listener.statuses = [503] * 2
    server = Served(
        tmp_path,
        tmp_path / "runs",
        patience=0.0,
        options=["--webhooks", str(hooks)],
        environment={"WEBHOOKS": str(hooks)},
    )
    try:
        server.start()
        await server.ready()
        async with server.client("anna") as client:
            run = await client.start("asking", 1)
            await client.until(run, lambda view: view["status"] == "suspended")
            await asyncio.to_thread(until, lambda: listener.got)
            server.kill()
            server.start()
            await server.ready()
            # Killed before it has written down that its message was taken it would send it once more.
            receipts = Ledger(server.place)
            await asyncio.to_thread(until, lambda: receipts.read("SELECT message FROM served_receipts"))
            receipts.close()
            server.kill()
            server.start()
            await server.ready()
            body = json.dumps({"id": "evt_1", "size": "big"}).encode()
            event = await client.ask("POST", f"/runs/{run}/answers", {"answers": {"q1": "big"}})
            await asyncio.to_thread(until, lambda: len(listener.got) == 4)
            async with httpx2.AsyncClient(trust_env=False) as stranger:
                header = {"stepengine-signature": sign(KEY, body, int(time.time()))}
                taken = await stranger.post(f"{server.url}/hooks/go/{run}", content=body, headers=header)
    finally:
        server.stop()

    assert 202 == event.status_code
    assert (202, True) == (taken.status_code, taken.json()["is_new"])
    assert [f"{run}:q1"] * 3 + [f"{run}:q2"] == [one["id"] for one in listener.told()]


@pytest.mark.spec("interfaces:IF19")
def test_requests_cannot_set_the_webhook_address(house: House, tmp_path: Path, listener: Listener) -> None:
    with house.client() as client:
        answer = client.post("/runs", json={"agent": "asker", "webhook": listener.url})
        hidden = client.post("/runs", json={"agent": "asker", "metadata": {"webhook": {"url": listener.url}}})

    assert [422, 202] == [answer.status_code, hidden.status_code]
    assert [] == listener.got


async def test_application_accepts_a_webhook_file_path(tmp_path: Path) -> None:
    async with Engine(FEW) as engine:
        House(tmp_path)
        served = app(engine, runs=tmp_path / "runs", tokens=tmp_path / "tokens.json", webhooks=written(tmp_path, FILE))

        assert {"go", "stripe"} == set(served.app.state.webhooks.topics)  # type: ignore[attr-defined]
        with pytest.raises(DefinitionError):
            app(
                engine, runs=tmp_path / "runs", tokens=tmp_path / "tokens.json", webhooks=written(tmp_path, FILE, 0o644)
            )


def asking_when(ctx: Any) -> Any:
    return (yield from Ask("When?"))


@pytest.mark.deep
@pytest.mark.spec("interfaces:IF19")
def test_another_question_under_the_same_id_is_sent(tmp_path: Path, listener: Listener) -> None:
    """An extension replaced the one that was sent."""
    house = House(tmp_path, webhooks=listener.file(), wait_for_answers=0.0)
    with house.open(), house.client() as client:
        run = waiting(house, client)
        until(lambda: len(listener.got) == 1)
    agent = AgentDefinition("asker", handle_steps=asking_when)
    house.engine = lambda: Engine([agent], models=ScriptedModel([]))  # type: ignore[method-assign]
    with house.open(), house.client("root") as root:
        extended = root.post(f"/runs/{run}/resume", json={"on_divergence": "extend"})
        assert 202 == extended.status_code, extended.text
        until(lambda: len(listener.got) == 2)
        # It is suspended again with the same question.
        since = until(lambda: [one["since"] for one in root.get("/questions").json()["questions"]])
        assert 202 == root.post(f"/runs/{run}/messages", json={"topic": "go", "value": 1}).status_code
        until(lambda: [one for one in root.get("/questions").json()["questions"] if one["since"] not in since])
        quick = waiting(house, root)
        until(lambda: quick in str(listener.got))
    told = [one for one in listener.told() if one["run_id"] == run]

    assert ["On which day?", "When?"] == [one["question"]["text"] for one in told]
    assert ["q0", "q0"] == [one["question"]["id"] for one in told]
    assert 2 == len({one["id"] for one in told})
