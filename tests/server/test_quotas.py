"""Quotas of owners: open runs, stored bytes and bytes per minute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from stepengine.durable import DurableEngine
from stepengine.errors import DefinitionError
from stepengine.server import Problem, Quotas, Tokens, app, quotas
from stepengine.server.quotas import QuotaTable, QuotaUsage, parse_quotas
from tests.server.house import AGENTS, House, answered, ended, question_of, run_server, started
from tests.waits import until

MIB = 1024 * 1024


@pytest.fixture(params=["folder", "database"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {} if request.param == "folder" else {"runs": tmp_path / "runs.db"}


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def refused(answer: httpx2.Response) -> tuple[int, str, str]:
    said = answer.json()
    return answer.status_code, said["type"], said["quota"]


OVER = "urn:stepengine:problem:quota_exceeded"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV32")
def test_messages_and_starts_above_bytes_per_minute_are_rejected(tmp_path: Path) -> None:
    with House(tmp_path, quotas=Quotas(bytes_per_minute=100_000)).open() as house, house.client() as client:
        run = started(client, "listener")
        message = {"topic": "other", "value": "x" * 30_000}
        posted = [client.post(f"/runs/{run}/messages", json=message) for _ in range(5)]
        spoken = client.post(f"/runs/{run}/input", json={"text": "x" * 30_000})
        again = client.post("/runs", json={"agent": "quick", "prompt": "x" * 30_000})
        with house.client("bob") as other:
            of_bob = other.post("/runs", json={"agent": "quick", "prompt": "x" * 30_000})
        ended_by = client.post(f"/runs/{run}/cancel", json={})

    assert [202, 202, 202, 429, 429] == [one.status_code for one in posted]
    assert all(refused(one) == (429, OVER, "bytes_per_minute") for one in (posted[-1], spoken, again))
    assert 50 <= int(again.headers["retry-after"]) <= 61
    assert 202 == of_bob.status_code
    assert 202 == ended_by.status_code


@pytest.mark.deep
@pytest.mark.spec("studio:SV32")
def test_stored_bytes_count_journals_mailboxes_and_requests(
    tmp_path: Path, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MIN_AGE_SECONDS", 0.0)
    with House(tmp_path, quotas=Quotas(stored_bytes=200_000), **places).open() as house, house.client() as client:
        # Its journal holds the prompt several times.
        run = started(client, "quick", "x" * 60_000)
        ended(client, run)
        waiting = started(client, "listener")
        client.post(f"/runs/{waiting}/messages", json={"topic": "other", "value": "x" * 100_000})
        full = client.post("/runs", json={"agent": "quick", "prompt": "x" * 60_000})

    assert refused(full) == (429, OVER, "stored_bytes")
    assert "retry-after" not in full.headers


@pytest.mark.deep
@pytest.mark.spec("studio:SV32", "studio:SV7")
def test_waiting_runs_count_as_open_and_accept_answers(tmp_path: Path, places: dict[str, Any]) -> None:
    limits = Quotas(open_runs=3, bytes_per_minute=2_000)
    with House(tmp_path, quotas=limits, wait_for_answers=0, **places).open() as house, house.client() as client:
        runs = [started(client, "asker") for _ in range(3)]
        for run in runs:
            question_of(client, run)
        full = client.post("/runs", json={"agent": "asker"})
        forked = client.post(f"/runs/{runs[0]}/fork", json={"at": -1})
        client.post(f"/runs/{runs[0]}/messages", json={"topic": "other", "value": "x" * 1_900})
        no_bytes = client.post(f"/runs/{runs[0]}/messages", json={"topic": "other", "value": "x" * 1_900})
        answered(client, runs[0])
        done = ended(client, runs[0])

        def is_started() -> bool:
            return client.post("/runs", json={"agent": "asker"}).status_code == 202

        until(is_started)

    assert refused(full) == (429, OVER, "open_runs")
    assert full.headers["retry-after"]
    assert refused(forked)[0] == 429
    assert refused(no_bytes) == (429, OVER, "bytes_per_minute")
    assert "completed" == done["status"]


@pytest.mark.spec("studio:SV32")
@pytest.mark.parametrize("options", [{"quotas": Quotas(open_runs=1)}, {"max_live": 1}])
def test_repeated_start_is_answered_despite_quota_or_full_server(tmp_path: Path, options: dict[str, Any]) -> None:
    with House(tmp_path, **options).open() as house, house.client() as client:
        key = {"idempotency-key": "one"}
        first = client.post("/runs", json={"agent": "asker", "prompt": "Rome"}, headers=key)
        second = client.post("/runs", json={"agent": "asker", "prompt": "Rome"}, headers=key)
        other = client.post("/runs", json={"agent": "asker", "prompt": "Oslo"})

    assert [202, 429] == [first.status_code, other.status_code]
    assert first.json()["run_id"] == second.json()["run_id"]


@pytest.mark.deep
@pytest.mark.spec("studio:SV32", "studio:SV7")
def test_quotas_hold_for_runs_in_a_database(db: str, tmp_path: Path) -> None:
    house = House(tmp_path)
    agents = [one for one in AGENTS if one.id in ("asker", "listener")]
    engine = DurableEngine(agents, db=db, polling=0.1)
    limits = Quotas(open_runs=2, stored_bytes=50_000)
    with (
        run_server(app(engine, tokens=tmp_path / "tokens.json", quotas=limits, drain=0)) as house.url,
        house.client() as client,
    ):
        key = {"idempotency-key": "one"}
        first, listener = started(client), started(client, "listener")
        full = client.post("/runs", json={"agent": "asker"})
        question_of(client, first)
        message = {"topic": "other", "value": "x" * 20_000, "id": "one"}
        posted = [client.post(f"/runs/{listener}/messages", json=message) for _ in range(3)]
        spoken = client.post(f"/runs/{listener}/input", json={"text": "x" * 40_000})
        answered(client, first)
        ended(client, first)
        third = until(
            lambda: (one := client.post("/runs", json={"agent": "asker"}, headers=key)).status_code == 202 and one
        )
        repeated = client.post("/runs", json={"agent": "asker"}, headers=key)

    assert refused(full) == (429, OVER, "open_runs")
    assert [True, False, False] == [one.json()["is_new"] for one in posted]
    assert refused(spoken) == (429, OVER, "stored_bytes")
    assert third.json()["run_id"] == repeated.json()["run_id"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV32")
def test_repeated_message_is_not_counted_again(tmp_path: Path) -> None:
    with House(tmp_path, quotas=Quotas(bytes_per_minute=100_000)).open() as house, house.client() as client:
        run = started(client, "listener")
        message = {"topic": "other", "value": "x" * 30_000, "id": "one"}
        repeated = [client.post(f"/runs/{run}/messages", json=message) for _ in range(5)]
        others = [client.post(f"/runs/{run}/messages", json={**message, "id": str(n)}) for n in range(3)]

    assert [True, False, False, False, False] == [one.json()["is_new"] for one in repeated]
    assert [202, 202, 429] == [one.status_code for one in others]


@pytest.mark.spec("studio:SV32", "studio:SV14")
def test_refusals_are_counted_by_quota(tmp_path: Path) -> None:
    with House(tmp_path, quotas=Quotas(open_runs=1)).open() as house, house.client() as client:
        started(client)
        for _ in range(2):
            assert 429 == client.post("/runs", json={"agent": "asker"}).status_code
        token = Tokens.open(tmp_path / "tokens.json").add("scraper", ["metrics"])
        told = client.get("/metrics", headers={"authorization": f"Bearer {token}"}).text

    found = {
        tuple(one.labels.items()): one.value
        for family in text_string_to_metric_families(told)
        for one in family.samples
        if one.name == "stepengine_quota_refusals_total"
    }
    assert found == {(("quota", "open_runs"),): 2.0}


@pytest.mark.spec("studio:SV32")
async def test_bytes_per_minute_recover_and_admit_one_large_request() -> None:
    now, measured = [100.0], [0]

    async def measure(_: str) -> QuotaUsage:
        measured[0] += 1
        return QuotaUsage()

    table = QuotaTable(Quotas(bytes_per_minute=10), measure, clock=lambda: now[0])
    async with table.admit_request("ann", 25):
        pass
    with pytest.raises(Problem) as refused_by:
        async with table.admit_request("ann", 1):
            pass
    now[0] += 61
    async with table.admit_request("ann", 1):
        pass

    assert {"retry-after": "60"} == refused_by.value.headers
    assert 2 == measured[0]


@pytest.mark.spec("studio:SV32")
async def test_failed_requests_are_not_counted_and_pending_ones_are() -> None:
    async def measure(_: str) -> QuotaUsage:
        return QuotaUsage(stored_bytes=50)

    now = [100.0]
    table = QuotaTable(Quotas(stored_bytes=100), measure, clock=lambda: now[0])
    with pytest.raises(ZeroDivisionError):
        async with table.admit_request("ann", 40):
            raise ZeroDivisionError
    async with table.admit_request("ann", 40):
        now[0] += 11
        with pytest.raises(Problem):
            async with table.admit_request("ann", 20):
                pass
    now[0] += 11
    async with table.admit_request("ann", 50):
        pass


@pytest.mark.spec("studio:SV32")
def test_quota_options_parse_units_and_reject_others() -> None:
    assert Quotas() == parse_quotas([])
    assert Quotas(open_runs=7, stored_bytes=2 * 1024 * MIB, bytes_per_minute=None) == parse_quotas(
        ["open-runs=7", "stored-bytes=2GiB", "bytes-per-minute=none"]
    )
    for text in ("open-runs", "open-runs=2GiB", "runs=3", "stored-bytes=-1", "stored-bytes=2GB"):
        with pytest.raises(DefinitionError, match="open-runs"):
            parse_quotas([text])
    with pytest.raises(DefinitionError, match="positive number or None"):
        parse_quotas(["open-runs=0"])


@pytest.mark.deep
@pytest.mark.spec("studio:SV32")
def test_one_token_cannot_store_hundreds_of_megabytes(tmp_path: Path) -> None:
    """Six waiting runs, 25 messages of 0.9 MB each: 135 MB in mailboxes without a quota. A run copies what it reads into its journal."""
    with House(tmp_path).open() as house, house.client() as client:
        runs = [started(client, "listener") for _ in range(6)]

        def flood(run: str) -> list[int]:
            message = {"topic": "other", "value": "x" * 900_000}
            return [client.post(f"/runs/{run}/messages", json=message).status_code for _ in range(25)]

        with ThreadPoolExecutor(6) as pool:
            statuses = [status for found in pool.map(flood, runs) for status in found]

        assert {202, 429} == set(statuses)
        assert statuses.count(202) * 900_000 <= 64 * MIB
        assert stored(tmp_path) <= 2 * 64 * MIB


def test_default_quotas_allow_a_thousand_concurrent_runs() -> None:
    limits = Quotas()

    assert limits.open_runs is not None
    assert limits.bytes_per_minute is not None
    assert limits.open_runs >= 10_000
    assert limits.bytes_per_minute >= 1_000 * 16_384


@pytest.mark.spec("studio:SV32")
@given(st.floats(0, 200))
async def test_refund_gives_back_only_the_bytes_still_counted(seconds: float) -> None:
    """A request may take longer than the minute in which it was counted."""

    async def measure(_: str) -> QuotaUsage:
        return QuotaUsage()

    now = [100.0]
    table = QuotaTable(Quotas(bytes_per_minute=10), measure, clock=lambda: now[0])
    async with table.admit_request("ann", 10) as use:
        now[0] += seconds
        use.refund()
    async with table.admit_request("ann", 6):
        pass
    with pytest.raises(Problem):
        async with table.admit_request("ann", 5):
            pass
