"""
Webhooks: events of other services for runs that wait for them, and questions and results of runs for a service.

This module has the configuration file of both, signatures, the routes for incoming events, and ``WebhookSender``, which sends outgoing
messages. A request is parsed only after its signature is valid. The file alone has the addresses of outgoing messages.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import jiter
from attrs import frozen
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from stepengine.data.choices import question_to_json
from stepengine.data.questions import DOUBT
from stepengine.errors import DataError, DefinitionError, JournalMissing, StepEngineError
from stepengine.redaction import KNOWN
from stepengine.runtime.logs import LOGGER
from stepengine.server.access import Caller, open_secret_file
from stepengine.server.bodies import MessageReceipt, make_input_error
from stepengine.server.openapi import HttpParameter, Operation
from stepengine.server.problems import Problem

if TYPE_CHECKING:
    import sqlite3

    import httpx2
    from starlette.requests import Request
    from starlette.responses import Response

    from stepengine.server.ledger import Act, Ledger, RunRow
    from stepengine.server.metrics import Metrics
    from stepengine.server.run_reader import ServedRun
    from stepengine.server.run_service import RunService

__all__ = ("OPERATIONS", "Target", "Topic", "WebhookSender", "Webhooks", "sign", "verify")

TOLERANCE = 300
"""Seconds that the clocks of a sender and of this machine may differ, and a delivery may take."""
MAX_HEADER = 4_096
MAX_SIGNATURES = 16
"""Keys that a sender may have at a time while it changes from one to another."""
MAX_DIGITS = 12
MAX_ID = 120
MAX_FILE = 1024 * 1024
BEGIN_SECONDS = 2.0
BEGUN_SOON = 0.02
MAX_SECRETS = 10
MAX_POINTER = 16
STANDARD = "whsec_"
"""What secrets of Standard Webhooks begin with; the key is what follows, in base64."""
RETRIES = (1.0, 5.0, 30.0)
"""Seconds before each further attempt."""
AT_A_TIME = 16
POST_SECONDS = 10.0
LEASE = 2 * POST_SECONDS
"""Seconds for which other servers skip a claimed run. Each sent message renews the claim, and no post takes longer than half of it."""
LOOK_SECONDS = 1.0
OVERLAP = 600.0
"""Seconds that are looked at again: how far the clocks of servers of one place may differ."""
SUCCESS = range(200, 300)


# --- signatures -----------------------------------------------------------------------------------------------------


def sign(secret: str | Iterable[str], body: bytes, t: int) -> str:
    """
    Return the header ``Stepengine-Signature`` of a message: ``t=<unix>,v1=<hex HMAC-SHA256 of "t.body">``.

    Args:
        secret: The shared secret; several while it is being replaced, with one ``v1`` for each.
        body: The bytes of the body.
        t: The time of the signature, in seconds since 1970.
    """
    known = [secret] if isinstance(secret, str) else list(secret)
    return ",".join([f"t={t}", *[f"v1={_compute_hex_signature(one.encode(), body, str(t))}" for one in known]])


def verify(secret: str | Iterable[str], body: bytes, header: str, now: float) -> bool:
    """
    Return whether the signature matches *secret* and its time is within 300 s of *now*.

    A wrong signature takes as long as a valid one. Of several signatures and several secrets, one match is enough.

    Args:
        secret: The shared secret, or several.
        body: The received bytes of the body.
        header: The header ``Stepengine-Signature``; Stripe's ``Stripe-Signature`` has the same form.
        now: Seconds since 1970.
    """
    parts = [part.strip().partition("=") for part in header[: MAX_HEADER + 1].split(",")]
    times = [value for name, _, value in parts if name == "t"]
    given = [value for name, _, value in parts if name == "v1"]
    if len(header) > MAX_HEADER or len(times) != 1 or not _is_recent_timestamp(times[0], now):
        return False
    known = [secret] if isinstance(secret, str) else list(secret)
    return _has_matching_signature([_compute_hex_signature(one.encode(), body, times[0]) for one in known], given)


def _compute_hex_signature(key: bytes, body: bytes, t: str) -> str:
    """Return the HMAC-SHA256 of ``t.body`` as hexadecimal digits."""
    return hmac.new(key, f"{t}.".encode() + body, hashlib.sha256).hexdigest()


def _compute_standard_signature(key: bytes, body: bytes, id_: str, t: str) -> str:
    made = hmac.new(key, f"{id_}.{t}.".encode("utf-8", "surrogatepass") + body, hashlib.sha256).digest()
    return base64.b64encode(made).decode()


def _is_recent_timestamp(text: str, now: float) -> bool:
    """Return whether a text is a Unix time within 300 s of *now*."""
    return _is_short_digits(text) and abs(now - int(text)) <= TOLERANCE


def _is_short_digits(text: str) -> bool:
    """Return whether a text consists of a few ASCII digits."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def _has_matching_signature(valid: list[str], signatures: list[str]) -> bool:
    """Return whether one of *signatures* is in *valid*, compared in constant time."""
    # Each with each: neither how many there are nor which one fits is told by the time that it takes.
    tried = [one.encode("utf-8", "surrogatepass") for one in signatures[:MAX_SIGNATURES]]
    found = [hmac.compare_digest(one.encode(), other) for one in valid for other in tried]
    return len(signatures) <= MAX_SIGNATURES and any(found)


def _parse_standard_key(secret: str) -> bytes | None:
    """Decode a secret of Standard Webhooks to its key; return ``None`` for other secrets."""
    try:
        return base64.b64decode(secret.removeprefix(STANDARD) + "==") if secret.startswith(STANDARD) else None
    except (binascii.Error, ValueError):
        return None


# --- the file -------------------------------------------------------------------------------------------------------


def _validate_json_pointer(text: str) -> str:
    """Return a JSON pointer; raise ``ValueError`` if it is invalid or has too many steps."""
    if not text.startswith("/") or text.count("/") > MAX_POINTER:
        msg = f"use a JSON pointer of at most {MAX_POINTER} steps, such as /data/object/metadata/run"
        raise ValueError(msg)
    return text


def _validate_url(text: str) -> str:
    """Return an HTTP address; raise ``ValueError`` if it is invalid or names a user."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        msg = "use an address that starts with https:// or http://, without a user"
        raise ValueError(msg)
    if not text.isascii() or not text.isprintable() or " " in text or parts.fragment:
        msg = "use an address without spaces and without a fragment, and encode characters other than ASCII"
        raise ValueError(msg)
    return text


Pointer = Annotated[str, Field(max_length=200), AfterValidator(_validate_json_pointer)]
Url = Annotated[str, Field(max_length=2_000), AfterValidator(_validate_url)]
Secret = Annotated[SecretStr, Field(min_length=16, max_length=500)]
Secrets = Annotated[tuple[Secret, ...], Field(min_length=1, max_length=MAX_SECRETS)]
TopicName = Annotated[str, Field(max_length=64, pattern="^[A-Za-z0-9_.:-]+$")]


class _WebhookModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class _SecretsModel(_WebhookModel):
    secrets: Annotated[
        Secrets, Field(description="Secrets of at least 16 characters; several while one is being replaced.")
    ]

    @property
    def secret_texts(self) -> tuple[str, ...]:
        return tuple([one.get_secret_value() for one in self.secrets])


class Topic(_SecretsModel):
    """
    Events of one sender, for ``Receive`` of this topic.

    Attributes:
        secrets: The secrets with which the sender signs.
        run: The JSON pointer to the run id in an event; ``None`` if the URL has the run id.
        id: The JSON pointer to the id of an event, by which a repeated event is recognized.
    """

    run: Pointer | None = None
    id: Pointer = "/id"

    def verify_and_get_message_id(self, headers: Mapping[str, list[str]], body: bytes, now: float) -> str | None:
        """Return the signed message id, ``""`` if it has none; ``None`` if no signature is valid."""
        for name in ("stepengine-signature", "stripe-signature"):
            found = headers.get(name, [])
            if len(found) == 1:
                return "" if verify(self.secret_texts, body, found[0], now) else None
        id_, said, given = [(headers.get(f"webhook-{name}") or [""]) for name in ("id", "timestamp", "signature")]
        if [len(id_), len(said), len(given)] != [1, 1, 1] or len(given[0]) > MAX_HEADER or not id_[0]:
            return None
        signatures = [one.removeprefix("v1,") for one in given[0].split(" ") if one.startswith("v1,")]
        keys = [key for key in map(_parse_standard_key, self.secret_texts) if key]
        is_right = _has_matching_signature(
            [_compute_standard_signature(key, body, id_[0], said[0]) for key in keys], signatures
        )
        return id_[0] if is_right and _is_recent_timestamp(said[0], now) else None


class Target(_SecretsModel):
    """
    The service that receives questions and results.

    Attributes:
        url: The URL to which messages are posted.
        secrets: The secrets with which they are signed.
        public_url: The public URL of this server, with which URLs in messages start.
        events: The kinds of messages that are sent.
    """

    url: Url
    public_url: Url
    events: Annotated[tuple[Literal["question", "finished"], ...], Field(min_length=1)] = ("question", "finished")


class Webhooks(_WebhookModel):
    """
    The configuration of incoming and outgoing webhooks.

    Attributes:
        topics: The topics of incoming events, with their secrets.
        out: The service that receives messages; ``None`` for none.
    """

    topics: Annotated[dict[TopicName, Topic], Field(max_length=1_000)] = {}
    out: Target | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Webhooks:
        """
        Read the file of webhooks, JSON: ``{"topics": {TOPIC: {"secrets": [...]}}, "out": {"url": ...}}``.

        Raises:
            DefinitionError: If other users could read or change the file, or it is missing.
            DataError: If its content is invalid; the message does not show the content.
        """
        place = Path(path).absolute()
        with open_secret_file(place, "webhooks") as fd:
            if fd is None:
                msg = (
                    f"there is no {str(path)!r}; create a JSON file as in docs/serving.md, which no other user may read"
                )
                raise DefinitionError(msg)
            with open(fd, "rb", closefd=False) as file:
                data = file.read(MAX_FILE + 1)
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, name: str) -> Webhooks:
        """
        Parse a file of webhooks.

        Raises:
            DataError: If *data* is not a file of webhooks.
        """
        if len(data) > MAX_FILE:
            msg = f"{name!r} has more than {MAX_FILE:,} bytes, which is too large for a file of webhooks"
            raise DataError(msg)
        try:
            return cls.model_validate(jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=True))
        except ValidationError as error:
            told = error.errors(include_url=False, include_context=False, include_input=False)
            issues = "; ".join([f"{'.'.join(map(str, one['loc']))[:100]}: {one['msg'][:200]}" for one in told[:5]])
        except ValueError:
            issues = "it is not JSON"  # which would be quoted with a secret in it
        msg = f"{name!r} is not a file of webhooks: {issues}"
        raise DataError(msg)


# --- incoming events --------------------------------------------------------------------------------------------------

SENDER = Caller("webhooks", frozenset({"admin"}))
"""The caller for events: a sender with a valid signature may send to any run."""
NOBODY = Topic(secrets=(SecretStr(secrets.token_hex(32)),))


async def receive_event(request: Request) -> Response:
    """Store a signed event of another service in the mailbox of its run."""
    from starlette.responses import Response

    webhooks: Webhooks = request.app.state.webhooks
    metrics: Metrics = request.app.state.metrics
    name, body = request.path_params["topic"], await request.body()
    topic = webhooks.topics.get(name)
    # An unknown topic is checked, too: how long a refusal takes tells nobody what there is.
    signed = (topic or NOBODY).verify_and_get_message_id(_collect_headers(request), body, time.time())
    if topic is None or signed is None:
        metrics.count_received_webhook("" if topic is None else name, "refused")
        raise _make_signature_problem()
    try:
        answer = await _store_event_for_run(request, name, topic, body, signed)
    except Exception:
        metrics.count_received_webhook(name, "failed")
        raise
    metrics.count_received_webhook(name, "ignored" if answer is None else "accepted" if answer.is_new else "repeated")
    if answer is None:
        return Response(status_code=204)
    return answer.response(202)


def _collect_headers(request: Request) -> dict[str, list[str]]:
    """Return the values of each header by its name in lower case."""
    found: dict[str, list[str]] = {}
    for name, value in request.headers.items():
        found.setdefault(name.lower(), []).append(value)
    return found


def _make_signature_problem() -> Problem:
    """Return the problem 401 for an event without a valid signature."""
    msg = (
        "this request has no valid signature; send Stepengine-Signature with t and v1, or the headers of Standard Webhooks. Sign the "
        f"bytes of the body with a secret of the topic, at most {TOLERANCE} s before the request arrives"
    )
    headers = {"www-authenticate": "Stepengine-Signature"}
    return Problem(msg, status=401, kind="not_signed", headers=headers)


async def _store_event_for_run(
    request: Request, topic_name: str, topic: Topic, body: bytes, signed_id: str
) -> MessageReceipt | None:
    """
    Store an event in the mailbox of its run, and return the receipt; ``None`` if the event names no run.

    Raises:
        Problem: 404 for a run that does not exist; 503 for one that has not started after 2 s.
    """
    value = _parse_event(body)
    run = request.path_params.get("run") or _find_event_run_id(value, topic)
    if run is None:
        return None
    runs: RunService = request.app.state.runs
    row = await runs.reader.get_run(SENDER, run)
    id_ = _make_message_id(topic_name, signed_id or _get_event_id_or_hash(value, topic, body))
    return MessageReceipt(run_id=row.run, is_new=await _send_event_when_started(runs, row, topic_name, value, id_))


async def _send_event_when_started(runs: RunService, row: RunRow, topic: str, event: object, id_: str) -> bool:
    """Send an event to a run, and return False for a repeated id; while the run has no mailbox, retry for 2 s, then raise 503."""
    until = time.monotonic() + BEGIN_SECONDS
    while True:
        try:
            return await runs.messenger.send_message(row, topic, event, id=id_, path="")
        except JournalMissing:
            # The run is registered and has done nothing yet, so it has no mailbox. Whoever was told of it before may be this fast.
            if time.monotonic() > until:
                msg = f"the run {row.run} has not started yet; send the event again in a moment"
                raise Problem(msg, status=503, kind="not_begun", headers={"retry-after": "5"}) from None
        await asyncio.sleep(BEGUN_SOON)


def _parse_event(body: bytes) -> Any:
    """Parse an event as JSON; raise ``InputError`` if it is invalid."""
    try:
        return jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        msg = f"the body is invalid: {error}"
        raise make_input_error(msg) from None


def _find_event_run_id(event: object, topic: Topic) -> str | None:
    """Return the run id in an event, ``None`` without one; raise ``Problem`` 404 if the topic has no pointer to the id."""
    if topic.run is None:
        msg = (
            "events of this topic name no run: send them to /hooks/TOPIC/RUN, or set `run` in the file of webhooks to the JSON "
            "pointer of the run's id"
        )
        raise Problem(msg, status=404, kind="no_such_run")
    found = _get_pointer_value(event, topic.run)
    return found if isinstance(found, str) and found else None


def _get_event_id_or_hash(event: object, topic: Topic, body: bytes) -> str:
    """Return the id in an event as text; the hash of the body if the event has none."""
    found = _get_pointer_value(event, topic.id)
    if isinstance(found, str | int) and not isinstance(found, bool) and str(found)[:1]:
        return str(found)
    return hashlib.sha256(body).hexdigest()


def _make_message_id(topic: str, id_: str) -> str:
    """Return the topic with the event's id; an id that is long or not printable is replaced by its hash."""
    # With its topic: two senders who both begin to count at 1 do not take each other's place.
    if len(id_) > MAX_ID or not id_.isprintable():
        id_ = hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{topic}:{id_}"


def _get_pointer_value(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer; ``None`` if *document* has nothing there."""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict):
            document = document.get(name)
        elif isinstance(document, list) and _is_short_digits(name) and int(name) < len(document):
            document = document[int(name)]
        else:
            return None
    return document


SIGNATURE = (
    HttpParameter("Stepengine-Signature", "t=<unix>,v1=<hex HMAC-SHA256 of t, a dot and the body>.", location="header"),
    HttpParameter("Stripe-Signature", "The same, under the name that Stripe uses.", location="header"),
    HttpParameter("webhook-id", "Standard Webhooks: the id of the event.", location="header"),
    HttpParameter("webhook-timestamp", "Standard Webhooks: the time at which the event was sent.", location="header"),
    HttpParameter(
        "webhook-signature",
        "Standard Webhooks: v1,<base64>, made with a secret that starts with whsec_.",
        location="header",
    ),
)
SIGNED = "The request needs no token, but a signature with a secret of the topic. A second copy of an event is ignored."
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST", path="/hooks/{topic}", name="receive_event", scope=None, handler=receive_event, parameters=SIGNATURE,
        gives={202: MessageReceipt, 204: None}, refuses=(401, 404, 409, 422, 503),
        about=f"Receive an event of another service for the run that the event names.\n{SIGNED} 204 means that it names no run.",
    ),
    Operation(
        method="POST", path="/hooks/{topic}/{run}", name="receive_event_for_run", scope=None, handler=receive_event,
        parameters=SIGNATURE, gives={202: MessageReceipt}, refuses=(401, 404, 409, 422, 503),
        about=f"Receive an event of another service for a run that receives on its topic.\n{SIGNED}",
    ),
)  # fmt: skip


# --- outgoing messages --------------------------------------------------------------------------------------------------

TABLES = """
CREATE TABLE IF NOT EXISTS served_told (
    run TEXT PRIMARY KEY, changed REAL NOT NULL, due REAL NOT NULL, tries INTEGER NOT NULL, is_told INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS served_untold ON served_told (due) WHERE is_told = 0;
CREATE TABLE IF NOT EXISTS served_receipts (
    run TEXT NOT NULL, message TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (run, message)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS served_changed ON served (changed)
"""
# Ends that came before anybody was to be told stay untold; questions that are open now are told.
NEWS = (
    "FROM served WHERE served.changed >= ? AND (status = 'suspended' OR (status NOT IN ('started', 'running') AND served.changed >= ?)) "
    "AND NOT EXISTS (SELECT 1 FROM served_told AS told WHERE told.run = served.run AND told.changed = served.changed)"
)
DUE = "FROM served_told WHERE is_told = 0 AND due <= ?"
NEVER = 1e18


@frozen
class _RunWithWebhooks:
    """A run with webhooks to send."""

    run: str
    changed: float
    tries: int


@frozen
class _WebhookMessage:
    """A message, its id, and the receipts that are stored when it was sent."""

    id: str
    content: Mapping[str, Any]
    receipts: tuple[str, ...]


class WebhookSender:
    """
    Sends questions and results of runs to the configured service, at least once even after a crash.

    The messages to send follow from the ledger, which also has a receipt for each sent message. A message that is not accepted is sent
    again after 1, 5 and 30 s, and then at the next start.

    Args:
        runs: The run service.
        ledger: The ledger with the runs and the receipts.
        target: The service that receives messages.
        delivered: Is called after each attempt with the type of the message and whether it was accepted.
        transport: Replaces the network in tests.
    """

    def __init__(
        self,
        runs: RunService,
        ledger: Ledger,
        target: Target,
        *,
        delivered: Callable[[str, bool], object],
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._runs, self._target, self._delivered = runs, target, delivered
        self._http_transport = transport
        self._ledger = ledger
        self._since, self._begun = 0.0, 0.0
        self._stack = contextlib.AsyncExitStack()
        self._client: httpx2.AsyncClient

    async def __aenter__(self) -> Self:
        """Start to send pending webhooks."""
        import httpx2

        (self._begun,) = await asyncio.to_thread(self._ledger.write, [_make_setup_act(time.time())])
        client = httpx2.AsyncClient(
            timeout=POST_SECONDS,
            follow_redirects=False,
            transport=self._http_transport,
            limits=httpx2.Limits(max_connections=AT_A_TIME),
        )
        self._client = await self._stack.enter_async_context(client)
        task = asyncio.ensure_future(self._send_forever())
        self._stack.push_async_callback(_cancel_and_wait, task)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; interrupted webhooks are sent again at the next start."""
        await self._stack.aclose()

    async def _send_forever(self) -> None:
        """Claim runs with due webhooks and send their messages, again and again; errors are logged."""
        while True:
            try:
                found = await asyncio.to_thread(self._claim_due_runs)
                await asyncio.gather(*[self._send_run_messages(one) for one in found])
            except StepEngineError as error:
                found = []
                LOGGER.error("the webhooks to send could not be listed: %s", error)
            except Exception:  # noqa: BLE001 - nobody waits for this loop, and without it nothing is sent any more
                found = []
                LOGGER.exception("webhooks could not be sent; the server tries again within seconds")
            if len(found) < AT_A_TIME:
                await asyncio.sleep(LOOK_SECONDS)

    def _claim_due_runs(self) -> list[_RunWithWebhooks]:
        """Claim and return up to 16 runs with due webhooks; other servers skip them until 20 s after the last sent message."""
        now, given = time.time(), (self._since, self._begun)
        # A look waits for nobody; only what there is to do is written.
        looks = ((f"SELECT 1 {NEWS} LIMIT 1", given), (f"SELECT 1 {DUE} LIMIT 1", (now,)))
        found: list[_RunWithWebhooks] = []
        if any(self._ledger.read(query, values) for query, values in looks):
            (found,) = self._ledger.write([_make_claim_act(now, *given)])
        self._since = max(self._since, now - OVERLAP)
        return found

    async def _send_run_messages(self, claimed: _RunWithWebhooks) -> None:
        """Send the pending messages of a claimed run; then mark them as sent, or postpone them."""
        try:
            row = await asyncio.to_thread(self._ledger.find, claimed.run)
            # A run that was resumed since is claimed again when it is suspended or ends.
            known = {id_ for (id_,) in await asyncio.to_thread(self._ledger.read, RECEIPTS, (claimed.run,))}
            messages = [] if row is None or row.changed != claimed.changed else await self._make_messages(row, known)
            is_told = True
            for message in messages:
                # Behind one that is not taken the others would not be, either, and each of them costs ten seconds.
                is_told = is_told and (message.id in known or await self._send_message(claimed, message))
        except StepEngineError as error:
            LOGGER.warning("the webhooks of run %s cannot be sent now: %s", claimed.run, error)
            is_told = False
        await asyncio.to_thread(
            self._ledger.write, [_make_mark_sent_act(claimed) if is_told else self._make_next_try_act(claimed)]
        )

    def _make_next_try_act(self, claimed: _RunWithWebhooks) -> Act:
        """Return an act that postpones the webhooks of a run to their next try; after the last try, log that and give up until a restart."""
        has_more = claimed.tries < len(RETRIES)
        if not has_more:
            LOGGER.warning(
                "run %s: the webhook failed %d times; the server sends it again at the next start",
                claimed.run,
                claimed.tries + 1,
            )
        return _make_postpone_act(claimed, time.time() + RETRIES[claimed.tries] if has_more else NEVER)

    async def _make_messages(self, row: RunRow, receipts: Collection[str]) -> list[_WebhookMessage]:
        """Return the messages for the open questions of a suspended run, or for the end of a run, as far as configured."""
        if row.status in ("started", "running"):
            return []
        look = await self._runs.reader.load_details(row)
        if row.status == "suspended":
            return self._make_question_messages(look, receipts) if "question" in self._target.events else []
        return [self._make_result_message(look)] if "finished" in self._target.events else []

    def _make_question_messages(self, run: ServedRun, receipts: Collection[str]) -> list[_WebhookMessage]:
        """Return a message for each open question; a question that is asked again or replaced gets a new id."""
        row = run.row
        made = []
        for question in run.questions:
            shown, part = question_to_json(question), question.id
            asked = f"{part}@{_compute_short_digest(shown)}"
            # What is in doubt is asked anew after each crash, under one id.
            if part.startswith(DOUBT):
                part = asked = f"{part}@{row.changed}"
            # After an extension another question may have the id of one that was sent.
            elif any(id_.startswith(f"{row.run}:{part}@") for id_ in receipts) and f"{row.run}:{asked}" not in receipts:
                part = asked
            # From the file alone: this message is not made for a request, so there is none whose host could be taken,
            # and one that could be would be the sender's choice (a forged Host header would send people's answers
            # elsewhere). The address that the server is bound to is mostly one behind a proxy, which nobody outside can
            # reach.
            url = f"{self._target.public_url.rstrip('/')}/runs/{row.run}/answers"
            made.append(
                self._make_message(row, "question", part, {"question": shown, "answer_url": url}, receipt=asked)
            )
        return made

    def _make_result_message(self, run: ServedRun) -> _WebhookMessage:
        """Return the message about the end of a run."""
        row = run.row
        url = f"{self._target.public_url.rstrip('/')}/runs/{row.run}"
        return self._make_message(row, "finished", row.status, {"status": row.status, "run_url": url})

    def _make_message(
        self, row: RunRow, kind: str, id_suffix: str, members: Mapping[str, Any], *, receipt: str = ""
    ) -> _WebhookMessage:
        """Return a message about a run with secrets redacted; its id ends with *id_suffix*."""
        # Made of what it tells of, so that the same message has the same id each time that it is sent, by whichever
        # server of the place: the receiver can throw the second one away.
        id_ = f"{row.run}:{id_suffix}"
        told = {"id": id_, "type": kind, "run_id": row.run, "agent_id": row.agent, **members}
        return _WebhookMessage(
            id_, KNOWN.redact_keeping_machine_details(told), (id_, f"{row.run}:{receipt or id_suffix}")
        )

    async def _send_message(self, claimed: _RunWithWebhooks, message: _WebhookMessage) -> bool:
        """Try once to send a message, and record its receipt; return whether it was accepted."""
        body = json.dumps(message.content, ensure_ascii=True, separators=(",", ":")).encode()
        now = int(time.time())
        headers = {
            "content-type": "application/json",
            **_make_signature_headers(self._target.secret_texts, message.id, body, now),
        }
        try:
            # No look at what is answered but its status: nothing that is sent back costs anything.
            async with (
                asyncio.timeout(POST_SECONDS),
                self._client.stream("POST", self._target.url, content=body, headers=headers) as answer,
            ):
                problem = "" if answer.status_code in SUCCESS else f"the response has the status {answer.status_code}"
        except Exception as error:  # noqa: BLE001 - whatever an address and its server do, the next try may go well
            problem = type(error).__name__
        self._delivered(message.content["type"], not problem)
        if problem:
            # Not its address: that of some services is as good as a password.
            host = urlsplit(self._target.url).hostname
            LOGGER.warning("the webhook %s to %s failed (try %d): %s", message.id, host, claimed.tries + 1, problem)
            return False
        await asyncio.to_thread(self._ledger.write, [_make_store_receipts_act(claimed, message.receipts, time.time())])
        return True


RECEIPTS = "SELECT message FROM served_receipts WHERE run = ?"


def _compute_short_digest(content: object) -> str:
    """Return 16 digits of the SHA-256 of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _make_signature_headers(secret_texts: tuple[str, ...], id_: str, body: bytes, now: int) -> dict[str, str]:
    """Return the signature headers of a message, also those of Standard Webhooks for such secrets."""
    made = {"stepengine-signature": sign(secret_texts, body, now)}
    keys = [key for key in map(_parse_standard_key, secret_texts) if key]
    if keys:
        signed = " ".join([f"v1,{_compute_standard_signature(key, body, id_, str(now))}" for key in keys])
        made |= {"webhook-id": id_, "webhook-timestamp": str(now), "webhook-signature": signed}
    return made


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _make_setup_act(now: float) -> Act:
    """Return an act that creates the tables, retries given-up webhooks, and returns when webhooks were first enabled."""

    def create_tables_and_retry(database: sqlite3.Connection) -> float:
        """Create the tables, retry given-up webhooks, and return when webhooks were first enabled."""
        for table in TABLES.split(";"):
            database.execute(table)
        database.execute("UPDATE served_told SET due = 0, tries = 0 WHERE is_told = 0")
        # Under the name of no run.
        database.execute("INSERT OR IGNORE INTO served_told VALUES ('', ?, 0, 0, 1)", (now,))
        (begun,) = database.execute("SELECT changed FROM served_told WHERE run = ''").fetchone()
        return float(begun)

    return create_tables_and_retry


def _make_claim_act(now: float, since: float, begun: float) -> Act:
    """
    Return an act that claims up to 16 runs with due webhooks, and returns them.

    It first adds the runs that were suspended or ended since *since*, without ends before *begun*.
    """

    def claim_due_runs(database: sqlite3.Connection) -> list[_RunWithWebhooks]:
        """Insert changed runs, claim up to 16 runs with due webhooks, and return them."""
        database.execute(
            f"INSERT INTO served_told SELECT run, changed, 0, 0, 0 {NEWS} "
            "ON CONFLICT (run) DO UPDATE SET changed = excluded.changed, due = 0, tries = 0, is_told = 0",
            (since, begun),
        )
        query = f"SELECT run, changed, tries {DUE} ORDER BY due LIMIT {AT_A_TIME}"
        # Taken for a while and not for good, in the same transaction: of several servers of one place each message is
        # sent by one, and one that dies with it leaves it to the others when the time is over.
        found = [_RunWithWebhooks(*row) for row in database.execute(query, (now,)).fetchall()]
        for one in found:
            database.execute("UPDATE served_told SET due = ? WHERE run = ?", (now + LEASE, one.run))
        return found

    return claim_due_runs


def _make_mark_sent_act(claimed: _RunWithWebhooks) -> Act:
    """Return an act that marks the webhooks of a run as sent, unless the run has changed."""

    def mark_as_sent(database: sqlite3.Connection) -> None:
        """Mark the webhooks of a run as sent, unless the run has changed."""
        # Only if the run has not changed since: a run that asked again while the message was under way has something
        # new to tell.
        database.execute(
            "UPDATE served_told SET is_told = 1 WHERE run = ? AND changed = ?", (claimed.run, claimed.changed)
        )

    return mark_as_sent


def _make_postpone_act(claimed: _RunWithWebhooks, due: float) -> Act:
    """Return an act that sets the next try of a run's webhooks to *due*, and counts the failed try."""

    def postpone(database: sqlite3.Connection) -> None:
        """Store the next try of a run's webhooks, and count the failed one."""
        values = (due, claimed.tries + 1, claimed.run, claimed.changed)
        database.execute("UPDATE served_told SET due = ?, tries = ? WHERE run = ? AND changed = ?", values)

    return postpone


def _make_store_receipts_act(claimed: _RunWithWebhooks, receipts: Iterable[str], now: float) -> Act:
    """Return an act that stores the receipts of a sent message, and renews the claim of its run."""

    def insert_receipts(database: sqlite3.Connection) -> None:
        """Store the receipts of a sent message, and renew the claim of its run."""
        rows = [(claimed.run, receipt, now) for receipt in receipts]
        database.executemany("INSERT OR IGNORE INTO served_receipts VALUES (?, ?, ?)", rows)
        values = (now + LEASE, claimed.run, claimed.changed)
        database.execute("UPDATE served_told SET due = ? WHERE run = ? AND changed = ?", values)

    return insert_receipts
