"""
``Schedule``: an agent that is started at the times of a cron line, and what those times are.

``cronsim`` reads the line and goes from one time of the wall clock to the next. It is given times without a zone: which moments they
are, also in the hours that summer time takes and gives, is said here. What was started already stands in ``schedule_book``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.alike import did_you_mean, list_names
from stepengine.data.checks import (
    FLAG,
    TEXT,
    FieldCheck,
    format_repr_or_type,
    make_choice_check,
    make_validator,
    with_keyword_hints,
)
from stepengine.data.definition import AgentDefinition, find_published_name, normalised_id
from stepengine.data.json import JsonDict, freeze_object, thaw
from stepengine.data.typed_values import is_model, model_to_json
from stepengine.errors import DataError, DefinitionError, InputError

if TYPE_CHECKING:
    from cronsim import CronSim

CatchUp: TypeAlias = Literal["one", "all", "none"]
MAX_TIMES = 1_000
"""How many times of one schedule are ever listed, started or told as missed at once."""
MAX_CRON_CHARS = 200
"""A line that names all minutes of an hour has less; a longer one only costs time to parse."""
MAX_ZONE_CHARS = 100
"""The longest name of a time zone has 32 characters; the name becomes part of a path."""
ID = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
AGENT = FieldCheck(
    lambda value: isinstance(value, str | AgentDefinition) and value != "", "an AgentDefinition or the id of one"
)
NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
FIELDS = "minute, hour, day of the month, month, day of the week"
SECONDS = "Some programs put seconds into the first of six fields, and some into the last"
EXAMPLE = "such as '0 7 * * 1-5' (at 7:00 from Monday to Friday)"
# Whether a line ever comes does not depend on when that is asked; 29 February on a given weekday is at most 40 years away.
LOOKED_FROM = datetime(2001, 1, 1)  # noqa: DTZ001 - a time of the wall clock
SECOND, WEEK = timedelta(seconds=1), timedelta(days=7)


def _freeze_params(params: Any) -> JsonDict | None:
    """Return params as immutable JSON; raise ``DefinitionError`` if they are not a JSON object."""
    if params is None:
        return None
    try:
        return freeze_object(model_to_json(params) if is_model(params) else params, "params")
    except DataError as error:
        msg = f"Schedule(params=...): {error.message}"
        raise DefinitionError(msg) from None


@with_keyword_hints
@frozen(kw_only=True)
class Schedule:
    """
    The times at which an agent is started, and its prompt. Agent files contain ``schedule = Schedule(...)`` or ``schedules = [...]``.

    Times are those of the wall clock in *timezone*. A time that summer time skips is replaced by the first moment after the change.
    When the clock is set back, a line whose minute or hour starts with ``*``, such as ``*/15 * * * *``, runs in both hours. Any other
    line runs only in the first.

    Args:
        agent: The agent, or its id.
        cron: Five fields: minute, hour, day of the month, month, day of the week, as Debian's cron reads them; also ``MON-FRI``,
            ``JAN``, ``L`` and ``LW`` for the last day and the last working day of a month, ``5L`` and ``MON#2`` for its last Friday
            and its second Monday; or ``@hourly``, ``@daily``, ``@weekly``, ``@monthly``, ``@yearly``.
        timezone: The name of a time zone, such as ``Europe/Berlin``; default ``UTC``.
        prompt: The prompt of the run.
        params: Its params: a JSON object, or the pydantic model of its ``input_schema``.
        catch_up: The treatment of times at which no scheduler ran: ``"one"`` starts the newest of them (default), ``"all"`` each of the
            newest 1,000, ``"none"`` only one that is less than five minutes late. The others are reported as missed.
        id: The id of the schedule, at most 40 letters, digits and hyphens. The default is the agent's id and a digest of cron, timezone,
            prompt and params, so that a changed schedule has another id.
        enabled: Whether runs are started; times at which the schedule was not enabled are not missed.

    Raises:
        DefinitionError: For an invalid line or one without any time, an unknown time zone, or another invalid value.
    """

    agent: str | AgentDefinition = attrs.field(kw_only=False, validator=make_validator(AGENT))
    cron: str = attrs.field(validator=make_validator(TEXT))
    timezone: str = attrs.field(default="UTC", validator=make_validator(TEXT))
    prompt: str = attrs.field(default="", validator=make_validator(TEXT))
    params: JsonDict | None = attrs.field(default=None, converter=_freeze_params)
    catch_up: CatchUp = attrs.field(default="one", validator=make_validator(make_choice_check("one", "all", "none")))
    id: str = attrs.field(default="", validator=make_validator(TEXT))
    enabled: bool = attrs.field(default=True, validator=make_validator(FLAG))
    line: str = attrs.field(init=False, eq=False, repr=False)
    _zone: tzinfo = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "line", _validate_and_normalise_cron(self.cron))
        fill(self, "_zone", _load_time_zone(self.timezone))
        if not self.id:
            fill(self, "id", self._make_id())
        elif ID.fullmatch(self.id) is None:
            msg = f"Schedule(id=...) must be 1 to 40 lower-case letters, digits and hyphens, such as 'nightly-triage', not {format_repr_or_type(self.id)}"
            raise DefinitionError(msg)

    @property
    def agent_id(self) -> str:
        """The id of the agent."""
        return self.agent if isinstance(self.agent, str) else self.agent.id

    def _make_id(self) -> str:
        """Return an id from the agent's id and a digest of line, time zone, prompt and params."""
        what = [self.line, self.timezone, self.prompt, None if self.params is None else thaw(self.params)]
        digest = sha256(json.dumps([self.agent_id, *what], sort_keys=True).encode("utf-8", "replace")).hexdigest()[:8]
        name = normalised_id(find_published_name(self.agent_id) or self.agent_id).lower()
        # With a hyphen and the eight letters of the digest an id has at most 40.
        kept = "".join([sign if sign.isascii() and sign.isalnum() else "-" for sign in name[:31]]).strip("-")
        return f"{kept or 'agent'}-{digest}"

    def describe(self) -> str:
        """Return the meaning of the line in English, such as ``At 07:00, Monday through Friday``."""
        return str(_iterate_times_after(self.line, LOOKED_FROM).explain())

    def local(self, moment: datetime) -> datetime:
        """Return a moment as the wall clock of the schedule shows it."""
        return moment.astimezone(self._zone)

    def next_after(self, moment: datetime) -> datetime | None:
        """
        Return the first time after *moment*, in UTC; ``None`` when there is none in 50 years.

        Args:
            moment: Any moment; with its zone.

        Raises:
            InputError: for a time without a zone, which is not a moment.
        """
        try:
            return self._find_next_time(_to_utc(moment))
        except (StopIteration, OverflowError):  # the calendar ends with the year 9999
            return None

    def times_between(self, after: datetime, until: datetime, *, limit: int = MAX_TIMES) -> tuple[datetime, ...]:
        """
        Return the times after *after* up to *until*, oldest first, in UTC; no more than the first *limit* of them.

        Raises:
            InputError: for a time without a zone.
        """
        last, found = _to_utc(until), list[datetime]()
        comes = self.next_after(after)
        while comes is not None and comes <= last and len(found) < limit:
            found.append(comes)
            comes = self.next_after(comes)
        return tuple(found)

    def _find_next_time(self, moment: datetime) -> datetime:
        """Return the first time after *moment* in UTC, across changes of the clock; raise ``StopIteration`` if there is none."""
        offset = self._get_utc_offset(moment)
        while True:
            wall = next(_iterate_times_after(self.line, (moment + offset).replace(tzinfo=None)))
            comes = wall.replace(tzinfo=UTC) - offset
            turn = self._find_offset_change(moment, comes, offset)
            if turn is None:
                if self._runs_in_both_passes or not self.local(comes).fold:
                    return comes
                moment = comes
                continue
            later = self._get_utc_offset(turn)
            if wall.replace(tzinfo=UTC) < turn + later:  # the clock was put forward over it
                return turn
            # A time that is the first one of the new offset counts, too.
            moment, offset = turn - SECOND, later

    @property
    def _runs_in_both_passes(self) -> bool:
        """Whether a time that the clock passes twice counts twice: for a line with ``*`` first in its minute or hour."""
        minute, hour, *_ = self.line.split()
        return minute.startswith("*") or hour.startswith("*")

    def _get_utc_offset(self, moment: datetime) -> timedelta:
        return self.local(moment).utcoffset() or timedelta()

    def _find_offset_change(self, moment: datetime, until: datetime, offset: timedelta) -> datetime | None:
        """Return the first second after *moment* up to *until* with another offset than *offset*, if there is one."""
        same, other = moment, min(moment + WEEK, until)
        while self._get_utc_offset(other) == offset:
            if other >= until:
                return None
            same, other = other, min(other + WEEK, until)
        while other - same > SECOND:
            middle = same + (other - same) // 2
            same, other = (middle, other) if self._get_utc_offset(middle) == offset else (same, middle)
        return other.replace(microsecond=0)


def list_newest_times(schedule: Schedule, after: datetime, until: datetime) -> tuple[datetime, ...]:
    """Return up to 1,000 of the newest times after *after* and up to *until*, in ascending order."""
    span = timedelta(hours=12)
    few = until
    while True:
        begin = max(after, until - span)
        found = schedule.times_between(begin, until, limit=2 * MAX_TIMES + 1)
        if begin <= after or len(found) >= MAX_TIMES:
            break
        few, span = begin, span * 2
    # More than that are the oldest since then, not the newest: a line may come each minute of one month of the year.
    while len(found) > 2 * MAX_TIMES:
        middle = begin + (few - begin) // 2
        some = schedule.times_between(middle, until, limit=2 * MAX_TIMES + 1)
        if len(some) < MAX_TIMES:
            few = middle
        else:
            begin, found = middle, some
    return found[-MAX_TIMES:]


def require_unique_ids(schedules: Iterable[Schedule]) -> tuple[Schedule, ...]:
    """
    Return the schedules as a tuple; raise if two have the same id.

    Raises:
        DefinitionError: for what is not a schedule, and when two have one id.
    """
    found: dict[str, Schedule] = {}
    for schedule in schedules:
        if not isinstance(schedule, Schedule):
            msg = f"schedules must contain Schedule objects, not {schedule!r}"
            raise DefinitionError(msg)
        if schedule.id in found:
            msg = f"two schedules have the id {schedule.id!r}; give each its own with Schedule(id=...)"
            raise DefinitionError(msg)
        found[schedule.id] = schedule
    return tuple(found.values())


def _to_utc(moment: Any) -> datetime:
    """Return a time in UTC; raise ``InputError`` for anything but a ``datetime`` with a time zone."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        msg = (
            f"a time must be a datetime with a time zone, such as datetime.now(UTC), not {format_repr_or_type(moment)}"
        )
        raise InputError(msg, issues=("datetime without a zone",))
    return moment.astimezone(UTC)


def _iterate_times_after(line: str, wall: datetime) -> CronSim:
    """Return an iterator of the times of the wall clock after *wall*."""
    from cronsim import CronSim

    return CronSim(line, wall)


def _validate_and_normalise_cron(cron: str) -> str:
    """Return a cron line as five fields, with words such as ``@daily`` replaced; raise if it is invalid or never due."""
    from cronsim import CronSimError

    if len(cron) > MAX_CRON_CHARS or not cron.isascii():
        msg = f"Schedule(cron=...) must be at most {MAX_CRON_CHARS} ASCII characters, {EXAMPLE}, not {format_repr_or_type(cron)}"
        raise DefinitionError(msg)
    line = NAMED.get(cron.strip().lower(), " ".join(cron.split()))
    if line.startswith("@"):
        msg = f"Schedule(cron={cron!r}): unknown word; valid words: {list_names(NAMED, line)}{did_you_mean(line, list(NAMED))}"
        raise DefinitionError(msg)
    fields = line.split()
    if len(fields) != len(FIELDS.split(", ")):
        more = f". {SECONDS}" if len(fields) == len(FIELDS.split(", ")) + 1 else ""
        msg = f"Schedule(cron={cron!r}) has {len(fields)} fields; it needs five ({FIELDS}), {EXAMPLE}{more}"
        raise DefinitionError(msg)
    try:
        next(_iterate_times_after(line, LOOKED_FROM))
    except CronSimError as error:
        msg = f"Schedule(cron={cron!r}) {_format_cron_error(str(error), fields)}. It needs five fields ({FIELDS}), {EXAMPLE}"
        raise DefinitionError(msg) from None
    except StopIteration:
        msg = f"Schedule(cron={cron!r}) never runs: no day in 50 years matches"
        raise DefinitionError(msg) from None
    return line


def _format_cron_error(cronsim_message: str, fields: Sequence[str]) -> str:
    """Return the rest of an error message from the text of ``cronsim``, with the reason for an impossible day."""
    if "day-of-month" not in cronsim_message:
        return f"cannot be read: {cronsim_message.lower()}"
    if "W" in fields[2].upper():
        return "cannot be read: W (the working day nearest to a day) is not supported; LW is the last working day of a month"
    return f"never runs, or cannot be read: {fields[2]!r} is not a day of a month, or not of the months {fields[3]!r}"


def _load_time_zone(name: str) -> tzinfo:
    """Return the time zone of this name; raise ``DefinitionError`` if there is none."""
    if name == "UTC":
        return timezone.utc  # noqa: UP017 - `UTC` is a name of this module, too, and this says what is meant
    import zoneinfo

    try:
        # Longer names reach the file system, which has words of its own for them.
        return zoneinfo.ZoneInfo(name if 0 < len(name) <= MAX_ZONE_CHARS else "/")
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        near = did_you_mean(name[:MAX_ZONE_CHARS], sorted(zoneinfo.available_timezones()))
        msg = f"Schedule(timezone=...) must be the name of a time zone, such as 'Europe/Berlin' or 'UTC', not {format_repr_or_type(name)}{near}"
        raise DefinitionError(msg) from None


def make_run_metadata(schedule: Schedule, at: datetime, missed: int) -> Mapping[str, Any]:
    """Return the metadata of a scheduled run: schedule id, scheduled time, and how many times were missed."""
    told: dict[str, Any] = {"schedule": schedule.id, "scheduled_for": schedule.local(at).isoformat()}
    return {**told, "missed": missed} if missed else told
