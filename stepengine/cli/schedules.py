"""``stepengine runs --schedules``: the next scheduled starts of agents, and the status of their last runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from stepengine.cli.deployment import run_with_operator
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.screen.render import format_error, print_visible, to_ascii_json, visible
from stepengine.cli.settings import UsageProblem, load_settings
from stepengine.errors import DefinitionError, JournalError

if TYPE_CHECKING:
    from stepengine.durable import Operator
    from stepengine.engine.scheduler import ScheduleStatus
    from stepengine.engine.schedules import Schedule


def list_and_print_schedules(
    files: Iterable[str], *, runs: str, db: str, app: str, as_json: bool, config: Path | None
) -> Exit:
    """Print the schedules of agent files, each with its next and last time. Return the exit code."""
    found, problems = _load_schedules_of_files(files, load_settings(config).agent_folders)
    for problem in problems:
        print_error(problem)
    if db and runs:
        msg = "--runs and --db both name where the runs of these schedules are; pass one of them"
        raise UsageProblem(msg)
    try:
        if db:
            return _print_durable_schedules(found, db, app=app, as_json=as_json)
        return _print_schedule_states(_load_schedule_states(found, runs), as_json=as_json)
    except JournalError as error:
        return print_error(error.message, Exit.FAILED)


def _print_durable_schedules(schedules: Sequence[Schedule], db: str, *, app: str, as_json: bool) -> Exit:
    """Print the schedules with their last runs in a database; return the exit code."""

    async def print_states(operator: Operator) -> Exit:
        """Load the status of each schedule from the database, print them, and return the exit code."""
        from stepengine.durable.schedules import load_durable_schedule_statuses

        return _print_schedule_states(
            await load_durable_schedule_statuses(operator, schedules, now=datetime.now(UTC)), as_json=as_json
        )

    return run_with_operator(db, print_states, app=app)


def _print_schedule_states(statuses: Sequence[ScheduleStatus], *, as_json: bool) -> Exit:
    """Print the status of each schedule as text or JSON; return the exit code."""
    if as_json:
        print(to_ascii_json([_schedule_state_to_dict(one) for one in statuses]))
    elif statuses:
        print_visible("\n\n".join(["\n".join(_describe_schedule(one)) for one in statuses]), hanging_indent=10)
    else:
        print_error(
            "there are no schedules; define one in an agent file with `schedule = Schedule(agent, cron=...)`",
            Exit.COMPLETED,
        )
    return Exit.COMPLETED


def _load_schedules_of_files(files: Iterable[str], folders: Iterable[Path]) -> tuple[list[Schedule], list[str]]:
    """Return the schedules of the given files and folders, else of the agent folders, and a list of problems."""
    from stepengine.engine.loader import load_schedules

    places, problems = [Path(file) for file in files], list[str]()
    found = [schedule for place in places if not place.is_dir() for schedule in load_schedules(place)]
    given = [place for place in places if place.is_dir()] if places else None
    found += load_schedules_of_folders(given, folders, problems.append)
    return found, problems


def load_schedules_of_folders(
    given: Iterable[Path] | None, agent_folders: Iterable[Path], report: Callable[[str], object]
) -> Iterator[Schedule]:
    """
    Yield the schedules of the agent files in the given folders, else in the trusted agent folders, and report problems.

    Raises:
        DefinitionError: when a given folder cannot be loaded.
    """
    from stepengine.engine.loader import list_trusted_agent_folders, load_folder

    for folder in list_trusted_agent_folders(agent_folders) if given is None else given:
        try:
            loaded = load_folder(folder)
        except DefinitionError as error:
            if given is not None:
                raise
            report(format_error(error))
            continue
        for problem in loaded.problems:
            report(problem)
        yield from loaded.schedules


def _load_schedule_states(schedules: Sequence[Schedule], runs: str) -> list[ScheduleStatus]:
    """Return the status of each schedule: its next time and, with a store in *runs*, its last run and missed times."""
    from stepengine.engine.scheduler import ScheduleStatus, load_schedule_statuses
    from stepengine.engine.schedules import require_unique_ids

    now = datetime.now(UTC)
    if runs:
        return load_schedule_statuses(schedules, runs=runs, now=now)
    return [ScheduleStatus(one, one.next_after(now) if one.enabled else None) for one in require_unique_ids(schedules)]


def _schedule_state_to_dict(status: ScheduleStatus) -> dict[str, object]:
    schedule, last = status.schedule, status.last
    return {
        "id": schedule.id,
        "agent": schedule.agent_id,
        "cron": schedule.cron,
        "words": schedule.describe(),
        "timezone": schedule.timezone,
        "enabled": schedule.enabled,
        "catch_up": schedule.catch_up,
        "next": status.next and status.next.isoformat(),
        "next_local": status.next and schedule.local(status.next).isoformat(),
        "last": last
        and {"at": last.at.isoformat(), "status": last.status, "run": last.run, "error": last.error or None},
        "missed": status.missed,
        "newest_missed": status.newest_missed and status.newest_missed.isoformat(),
    }


def _describe_schedule(status: ScheduleStatus) -> Iterator[str]:
    """Yield the lines about a schedule: agent, times, next and last run."""
    schedule, last = status.schedule, status.last
    yield schedule.id
    yield f"  agent   {visible(schedule.agent_id, strict=True)}"
    yield f"  when    {schedule.line}, {schedule.timezone}: {schedule.describe()}"
    if not schedule.enabled:
        yield "  next    never: the schedule is not enabled"
    elif status.next is None:
        yield "  next    none in the next 50 years"
    else:
        yield f"  next    {_format_local_time(schedule, status.next)} ({status.next:%H:%M} UTC)"
    if last is not None:
        error = f": {visible(last.error, strict=True)}" if last.error else ""
        yield f"  last    {_format_local_time(schedule, last.at)}, {last.run}, {last.status}{error}"
    if status.newest_missed is not None:
        yield f"  missed  {status.missed:,}, the newest {_format_local_time(schedule, status.newest_missed)}"


def _format_local_time(schedule: Schedule, moment: datetime) -> str:
    return f"{schedule.local(moment):%a %Y-%m-%d %H:%M %z}"
