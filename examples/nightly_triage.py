"""
A nightly triage that mostly sleeps: a schedule starts it, three children work in the background, and a webhook and a person answer.

``python examples/nightly_triage.py`` needs no key: a scripted reply replaces the model, and the clock is simulated. To run it for
real, omit ``models=`` and ``clock=``, set OPENAI_API_KEY, and start and wake it with ``stepengine resume --due runs --watch``.
"""

import asyncio
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from stepengine import (
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Perform,
    Race,
    Receive,
    RunResult,
    RunStatus,
    Schedule,
    Scheduler,
    Sleep,
    Start,
    StepContext,
    Steps,
    Wait,
)
from stepengine.errors import PerformError
from stepengine.testing import Clock, ScriptedModel, text

effects: list[str] = []


def count_alarms(hour: str) -> int:
    effects.append(f"counted alarms at {hour}")
    return 7 if hour == "2:00" else 2


def start_build() -> str:
    effects.append("started the build")
    return "build-17"


def page_the_team(why: str) -> str:
    effects.append("paged the team")
    return f"paged: {why}"


def build_steps(ctx: StepContext) -> Steps[str]:
    name = yield from Perform(start_build)
    said = yield from Receive(name, timeout=timedelta(hours=4))  # the CI server's webhook posts it
    return f"{name} said nothing" if said is None else f"{name} {said['status']}"


def alarm_steps(ctx: StepContext) -> Steps[str]:
    before = yield from Perform(count_alarms, "2:00")
    yield from Sleep(timedelta(hours=1))  # an alarm that goes away by itself wakes nobody
    return f"{before} alarms, {yield from Perform(count_alarms, '3:00')} an hour later"


def triage_steps(ctx: StepContext) -> Steps[str]:
    refs = yield from Start(*[AgentCall(agent, "Tonight.") for agent in (mail, build, alarms)])
    waited = yield from Wait(*refs, timeout=timedelta(hours=5))
    news = sorted(f"{child.agent_id}: {child.output}" for child in waited.done)
    ask = Ask(f"{'; '.join(news)}. Page the team?", options=("yes", "no"))
    first, answer = yield from Race(ask, Sleep(timedelta(hours=4)))  # a person, or nobody until morning
    if first == 1 or answer == "no":
        return "nobody was paged"
    try:
        return (yield from Perform(page_the_team, news[1]))
    except PerformError as error:
        return f"nobody could be paged: {error}"


mail = AgentDefinition("mail", model="openai/gpt-5", output_mode="last_message")
build = AgentDefinition("build", handle_steps=build_steps)
alarms = AgentDefinition("alarms", handle_steps=alarm_steps)
triage = AgentDefinition("triage", handle_steps=triage_steps, spawnable_agents=[mail, build, alarms])
schedule = Schedule(triage, cron="0 2 * * *", id="nightly")


async def main() -> None:
    clock = Clock(datetime(2026, 3, 2, 1, 59, tzinfo=UTC), waits=True)
    model = ScriptedModel([text("one customer cannot log in")])

    def tell(what: str, result: RunResult) -> None:
        print(f"{clock.now():%H:%M} {what}: {result.status.value}")
        for one in result.waits_for:
            print(f"      waits for {one.awaited_text or (one.question and one.question.text)}")

    with tempfile.TemporaryDirectory() as folder:
        # Every `async with Engine` is a process of its own: it knows nothing but the journal.
        async with Engine([triage], models=model, clock=clock) as engine:
            scheduler = Scheduler(engine, [schedule], runs=folder, clock=clock)
            await scheduler.tick()  # from here on the schedule counts
            clock.advance(minutes=1)
            (started,) = await scheduler.tick()
            tell("started", await started.handle.result())
            await scheduler.wait_until_idle()
        journal = Path(folder) / f"{started.due.run}.jsonl"

        clock.advance(minutes=20)
        async with Engine(
            [triage], models=model, clock=clock
        ) as engine:  # the webhook, which the CI server calls twice
            news = [
                await engine.send_message(journal, "build-17", {"status": "failed"}, id="hook-1", path="1")
                for _ in range(2)
            ]
            assert news == [True, False]
            tell("the build ended", await engine.resume(journal))

        clock.advance(minutes=40)
        async with Engine([triage], models=model, clock=clock) as engine:
            waiting = await engine.resume(journal)
            tell("an hour has passed", waiting)

        clock.advance(hours=2)
        async with Engine([triage], models=model, clock=clock) as engine:
            assert (await engine.resume(journal)).status is RunStatus.SUSPENDED  # woken too early, it sleeps on
            result = await engine.resume(journal, answers={waiting.pending_questions[0].id: "yes"})
            tell("a person said yes", result)
        async with Engine([triage], models=ScriptedModel([]), clock=clock) as engine:
            assert await engine.replay(journal) == result
    print(result.output, *effects, sep="\n")
    assert sorted(effects) == sorted(
        ["started the build", "counted alarms at 2:00", "counted alarms at 3:00", "paged the team"]
    )


if __name__ == "__main__":
    asyncio.run(main())
