"""
When a schedule comes: cron lines, time zones, and the hours that summer time takes and gives.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from stepengine import AgentDefinition, Schedule
from stepengine.engine.schedules import MAX_TIMES, list_newest_times
from stepengine.errors import DefinitionError, InputError

BERLIN, NEW_YORK, LORD_HOWE, CAIRO, APIA = (
    "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "Pacific/Apia",
)  # fmt: skip


MINUTELY = Schedule("a", cron="* * * * *", timezone=BERLIN)
YEARS = datetime(1990, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001 - a time of the wall clock, which is what cronsim is given


def coming(cron: str, zone: str, start: str, count: int) -> list[str]:
    """Return the next times after a local time, as the wall clock shows them."""
    schedule = Schedule("a", cron=cron, timezone=zone)
    moment: datetime | None = datetime.fromisoformat(start).replace(tzinfo=ZoneInfo(zone))
    found = []
    for _ in range(count):
        assert moment is not None
        moment = schedule.next_after(moment)
        found.append("" if moment is None else schedule.local(moment).strftime("%m-%d %H:%M%z"))
    return found


@pytest.mark.spec("waiting:WT26")
@pytest.mark.parametrize(
    ("cron", "zone", "start", "expected"),
    [
        ("30 2 * * *", BERLIN, "2026-03-28T12:00", ["03-29 03:00+0200", "03-30 02:30+0200"]),
        ("*/30 * * * *", BERLIN, "2026-03-29T01:00", ["03-29 01:30+0100", "03-29 03:00+0200", "03-29 03:30+0200"]),
        ("15 2 * * *", LORD_HOWE, "2026-10-03T12:00", ["10-04 02:30+1100", "10-05 02:15+1100"]),
        ("*/10 3 * * *", LORD_HOWE, "2026-10-04T00:00", ["10-04 03:00+1100", "10-04 03:10+1100"]),
        ("*/30 0 * * *", CAIRO, "2026-04-23T12:00", ["04-24 01:00+0300", "04-25 00:00+0300", "04-25 00:30+0300"]),
        ("0 12 * * *", APIA, "2011-12-29T00:00", ["12-29 12:00-1000", "12-31 00:00+1400", "12-31 12:00+1400"]),
        ("30 2 * * *", "UTC", "2026-03-28T12:00", ["03-29 02:30+0000", "03-30 02:30+0000"]),
    ],
)
def test_time_skipped_by_summer_time_runs_once_right_after_it(
    cron: str, zone: str, start: str, expected: list[str]
) -> None:
    assert expected == coming(cron, zone, start, len(expected))


@pytest.mark.spec("waiting:WT26")
def test_skipped_time_runs_in_the_first_second_of_summer_time() -> None:
    schedule = Schedule("a", cron="30 2 * * *", timezone=BERLIN)
    before = datetime(2026, 3, 29, 0, 59, 58, 700_000, tzinfo=UTC)

    assert datetime(2026, 3, 29, 1, tzinfo=UTC) == schedule.next_after(before)


@pytest.mark.spec("waiting:WT26")
@pytest.mark.parametrize(
    ("cron", "zone", "start", "expected"),
    [
        ("30 2 * * *", BERLIN, "2026-10-24T12:00", ["10-25 02:30+0200", "10-26 02:30+0100"]),
        ("0 * * * *", BERLIN, "2026-10-25T01:30", ["10-25 02:00+0200", "10-25 02:00+0100", "10-25 03:00+0100"]),
        ("*/30 * * * *", BERLIN, "2026-10-25T02:00", ["10-25 02:30+0200", "10-25 02:00+0100", "10-25 02:30+0100"]),
        ("*/10 2 * * *", LORD_HOWE, "2026-04-05T00:00", ["04-05 02:00+1030", "04-05 02:10+1030"]),
        ("*/20 1 * * *", LORD_HOWE, "2026-04-05T01:20", ["04-05 01:40+1100", "04-05 01:40+1030", "04-06 01:00+1030"]),
    ],
)
def test_repeated_hour_runs_a_time_once_except_for_intervals(
    cron: str, zone: str, start: str, expected: list[str]
) -> None:
    assert expected == coming(cron, zone, start, len(expected))


def test_second_pass_of_an_hour_repeats_nothing_of_the_first() -> None:
    schedule = Schedule("a", cron="30 2 * * *", timezone=BERLIN)
    second_pass = datetime(2026, 10, 25, 2, 15, tzinfo=ZoneInfo(BERLIN), fold=1)

    assert datetime(2026, 10, 26, 1, 30, tzinfo=UTC) == schedule.next_after(second_pass)


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("0 0 29 2 *", "2028-02-29 00:00"),
        ("0 0 * 2 MON#5", "2044-02-29 00:00"),
        ("0 0 L * *", "2026-01-31 00:00"),
        ("0 0 * * 5L", "2026-01-30 00:00"),
        ("0 9 * * MON-FRI", "2026-01-01 09:00"),
        ("10-50/20 8-18/5 * JAN-MAR/2 *", "2026-01-01 08:10"),
        ("0 0 13 * FRI", "2026-01-02 00:00"),
        ("0 0 */2 * MON", "2026-01-05 00:00"),
        ("@daily", "2026-01-02 00:00"),
        (" @Weekly ", "2026-01-04 00:00"),
        ("@monthly", "2026-02-01 00:00"),
        ("@yearly", "2027-01-01 00:00"),
        ("@hourly", "2026-01-01 01:00"),
        ("0\t7 * *\n1", "2026-01-05 07:00"),
    ],
)
def test_cron_lines_are_read_as_by_debian_cron(cron: str, expected: str) -> None:
    comes = Schedule("a", cron=cron).next_after(datetime(2026, 1, 1, tzinfo=UTC))

    assert comes is not None
    assert expected == f"{comes:%Y-%m-%d %H:%M}"


UNUSABLE = pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"cron": "0 0 31 2 *"}, "never runs, or cannot be read: '31' is not a day of a month, or not of the months '2'"),
        ({"cron": "* * */20 * 1L"}, "never runs: no day in 50 years matches"),
        ({"cron": "0 0 15W * *"}, r"W \(the working day nearest to a day\) is not supported"),
        ({"cron": "0 0 * * * *"}, "has 6 fields; it needs five .*Some programs put seconds into the first"),
        ({"cron": "@reboot"}, "unknown word; valid words: @hourly"),
        ({"cron": "@dayly"}, "did you mean '@daily'"),
        ({"cron": "60 * * * *"}, "cannot be read: bad minute"),
        ({"cron": "0 9 * * FRI-MON"}, "cannot be read: bad day-of-week"),
        ({"cron": "9" * 5_000 + " * * * *"}, "at most 200 ASCII characters"),
        ({"cron": "\u0663 * * * *"}, "ASCII characters"),
        ({"cron": 5}, "must be text, not 5"),
        ({"timezone": "Europe/Berln"}, "did you mean 'Europe/Berlin'"),
        ({"timezone": "../../etc/passwd"}, "must be the name of a time zone"),
        ({"timezone": "Europe"}, "must be the name of a time zone"),
        ({"timezone": ""}, "must be the name of a time zone"),
        ({"timezone": "x" * 10_000}, "must be the name of a time zone"),
        ({"timezone": "a\0b"}, "must be the name of a time zone"),
        ({"id": "Nightly run"}, "lower-case letters, digits and hyphens"),
        ({"id": "x" * 41}, "1 to 40"),
        ({"catch_up": "some"}, "'one' or 'all' or 'none', not 'some'"),
        ({"params": {"x": object()}}, r"Schedule\(params=...\): .* is not JSON"),
        ({"catchup": "all"}, "did you mean 'catch_up'"),
        ({"enabled": "no"}, "True or False"),
    ],
)  # fmt: skip


@pytest.mark.spec("waiting:WT25")
@UNUSABLE
def test_invalid_schedule_is_refused_where_it_is_written(given: dict[str, object], told: str) -> None:
    with pytest.raises(DefinitionError, match=told):
        Schedule("a", **{"cron": "0 7 * * 1-5", **given})


@pytest.mark.parametrize("agent", ["", 5, None])
def test_a_schedule_is_of_an_agent(agent: object) -> None:
    with pytest.raises(DefinitionError, match="an AgentDefinition or the id of one"):
        Schedule(agent, cron="* * * * *")


def test_a_time_without_a_zone_is_no_moment() -> None:
    schedule = Schedule("a", cron="* * * * *")

    with pytest.raises(InputError, match="a datetime with a time zone"):
        schedule.next_after(NAIVE)
    with pytest.raises(InputError, match="a datetime with a time zone"):
        schedule.times_between(datetime(2026, 1, 1, tzinfo=UTC), NAIVE)


def test_the_calendar_ends() -> None:
    assert None is Schedule("a", cron="0 0 29 2 *").next_after(datetime(9997, 1, 1, tzinfo=UTC))


class Ticket(BaseModel):
    number: int


@pytest.mark.spec("waiting:WT23")
def test_schedule_id_is_its_agent_and_a_content_digest() -> None:
    agent = AgentDefinition("my-agent")
    one = Schedule(agent, cron="0 7 * * *", params={"number": 1})

    assert one.id.startswith("my-agent-")
    assert one.id == Schedule("my-agent", cron="0  7 * * *", params=Ticket(number=1)).id
    others = [
        Schedule(agent, cron="0 8 * * *", params={"number": 1}),
        Schedule(agent, cron="0 7 * * *", params={"number": 2}),
        Schedule(agent, cron="0 7 * * *", params={"number": 1}, timezone=BERLIN),
        Schedule(agent, cron="0 7 * * *", params={"number": 1}, prompt="Go"),
    ]
    assert 5 == len({one.id, *[other.id for other in others]})
    assert "nightly" == Schedule(agent, cron="0 7 * * *", id="nightly").id
    assert 40 >= len(Schedule("publisher/" + "long-" * 20 + "name@1.0.0", cron="* * * * *").id)


def test_cron_line_is_described_in_words() -> None:
    assert "At 07:00 on Monday through Friday" == Schedule("a", cron="0 7 * * 1-5").describe()


# --- against brute force ----------------------------------------------------------------------------------------------


def parts(low: int, high: int) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    ranges = st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    steps = st.tuples(st.one_of(st.just("*"), ranges), st.integers(1, high)).map(lambda pair: f"{pair[0]}/{pair[1]}")
    one = st.one_of(number.map(str), ranges, steps)
    return st.one_of(st.just("*"), one, st.lists(one, min_size=2, max_size=3).map(",".join))


LINES = st.tuples(
    parts(0, 59),
    parts(0, 23),
    st.one_of(st.just("*"), parts(1, 28)),
    st.just("*"),
    st.one_of(st.just("*"), parts(0, 7)),
).map(" ".join)
TURNS = [
    (BERLIN, "2026-03-28T20:00"), (BERLIN, "2026-10-24T20:00"), (NEW_YORK, "2026-03-08T02:00"), (NEW_YORK, "2026-11-01T01:00"),
    (LORD_HOWE, "2026-04-04T10:00"), (LORD_HOWE, "2026-10-03T10:00"), (CAIRO, "2026-04-23T18:00"), (CAIRO, "2026-10-29T17:00"),
    ("UTC", "2026-02-27T12:00"), ("Asia/Kathmandu", "2026-12-31T12:00"), ("America/St_Johns", "2026-03-07T20:00"),
]  # fmt: skip
MINUTE = timedelta(minutes=1)


def matches(line: str, wall: datetime) -> bool:
    """Return whether a time of the wall clock is one of the line's: asked of cronsim for that minute alone."""
    return next(CronSim(line, wall - MINUTE, reverse=False)) == wall


def by_minutes(line: str, zone: str, after: datetime, until: datetime) -> list[datetime]:
    """Go through all minutes, and say of each whether it is one: the rule as it is told, without any cleverness."""
    local, minute, hour = ZoneInfo(zone), *line.split()[:2]
    repeats = minute.startswith("*") or hour.startswith("*")
    found, moment = [], after + MINUTE
    while moment <= until:
        wall = moment.astimezone(local)
        before = (moment - MINUTE).astimezone(local)
        plain = wall.replace(tzinfo=None, fold=0)
        skipped = before.replace(tzinfo=None) + MINUTE
        hit = matches(line, plain) and (repeats or not wall.fold)
        while not hit and skipped < plain:
            hit = matches(line, skipped)
            skipped += MINUTE
        found += [moment] if hit else []
        moment += MINUTE
    return found


@pytest.mark.spec("waiting:WT26")
@settings(max_examples=60, deadline=None)
@given(line=LINES, turn=st.sampled_from(TURNS))
@example(line="*/10 3 * * *", turn=(LORD_HOWE, "2026-10-03T10:00"))
@example(line="30 2 * * *", turn=(BERLIN, "2026-03-28T20:00"))
@pytest.mark.deep
def test_times_between_two_moments_equal_a_minute_by_minute_search(line: str, turn: tuple[str, str]) -> None:
    zone, start = turn
    after = datetime.fromisoformat(start).replace(tzinfo=UTC)
    until = after + timedelta(hours=12)
    try:
        schedule = Schedule("a", cron=line, timezone=zone)
    except DefinitionError:  # such as every 29th weekday
        reject()

    assert by_minutes(schedule.line, zone, after, until) == list(schedule.times_between(after, until))


@settings(max_examples=120)
@given(st.text(alphabet="0123456789*/-,LW#@ MONFRIJAN?", max_size=40))
@example("0 0 L/2 * *")
@example("0 0 1L/2 * *")
@example("0 0 * * 1#2/3")
@example("*/*/* * * * *")
def test_any_text_is_a_schedule_or_a_definition_error(text: str) -> None:
    try:
        schedule = Schedule("a", cron=text)
    except DefinitionError:
        return
    assert schedule.next_after(datetime(2026, 1, 1, tzinfo=UTC)) is not None
    assert schedule.describe()


def test_listing_is_capped_and_finds_newest_times_of_any_age() -> None:
    after, until = YEARS
    newest = list_newest_times(MINUTELY, after, until)

    assert 3 == len(MINUTELY.times_between(after, until, limit=3))
    assert MAX_TIMES == len(MINUTELY.times_between(after, until))
    assert (MAX_TIMES, until) == (len(newest), newest[-1])
    assert all(b - a == MINUTE for a, b in pairwise(newest))
    yearly = Schedule("a", cron="0 0 29 2 *")
    assert 9 == len(list_newest_times(yearly, after, until))
    assert () == list_newest_times(yearly, until, after)


@pytest.mark.speed
def test_of_minutes_of_many_years_the_newest_are_found_soon() -> None:
    started = time.process_time()
    list_newest_times(MINUTELY, *YEARS)
    MINUTELY.times_between(*YEARS, limit=3)
    MINUTELY.times_between(*YEARS)

    assert 2.0 > time.process_time() - started


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT28")
@pytest.mark.parametrize(
    ("cron", "last"),
    [("* * * 1 *", "2026-01-31T23:59"), ("* * 1-9 3 *", "2026-03-09T23:59")],
)
def test_newest_times_of_a_dense_but_rare_line_are_found(cron: str, last: str) -> None:
    after, until = datetime(2020, 1, 1, tzinfo=UTC), datetime(2026, 3, 15, tzinfo=UTC)

    newest = list_newest_times(Schedule("a", cron=cron), after, until)

    end = datetime.fromisoformat(last).replace(tzinfo=UTC)
    assert (MAX_TIMES, end) == (len(newest), newest[-1])
    assert all(b - a == MINUTE for a, b in pairwise(newest))


@pytest.mark.speed
@pytest.mark.spec("waiting:WT25")
@UNUSABLE
def test_invalid_schedule_is_refused_within_a_second(given: dict[str, object], told: str) -> None:
    started = time.process_time()
    with pytest.raises(DefinitionError, match=told):
        Schedule("a", **{"cron": "0 7 * * 1-5", **given})

    assert 1.0 > time.process_time() - started
